"""Block-wise FP8 checkpoints, against a dequantisation of our own in NumPy."""

from __future__ import annotations

import re

import pytest
import torch

from glm5fn.checkpoint import inspect_checkpoint, load_checkpoint, save_checkpoint
from glm5fn.disk_names import entries
from glm5fn.fp8 import dequantize_blocks
from glm5fn.params import abstract
from glm5fn.testing.inputs.checkpoint import PREFIX, TINY, edit_file, make_params, quantise_file, random_fp8
from glm5fn.testing.oracle.fp8 import dequantize


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture
def folder(tmp_path, params):
    """A checkpoint in one file, to be changed."""
    save_checkpoint(TINY, params, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 128), (128, 129), (300, 257), (3, 400)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantisation(shape, dtype):
    values, scale = random_fp8(shape, seed=1)
    out = torch.full(shape, torch.nan, dtype=dtype)
    dequantize_blocks(values, scale, out)
    assert torch.equal(out, dequantize(values, scale).float().to(dtype))


_FP8 = re.compile(r"layers\.3\.self_attn\.(q_a|kv_b|q_b|o)_proj\.weight|mlp\..*_proj\.weight|indexer\.wk\.weight")


def _quantise(folder, suffix="_scale_inv"):
    meaning = quantise_file(folder / "model.safetensors", _FP8.search, suffix)
    return {name: exact.float() for name, exact in meaning.items()}  # the product is formed in float32


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_fp8_checkpoint(folder, params, suffix, dtype):
    meaning = _quantise(folder, suffix)
    _, loaded = load_checkpoint(folder, dtype=dtype)
    target = dtype or torch.bfloat16
    base = PREFIX + "layers.3."
    experts = torch.stack([meaning[f"{base}mlp.experts.{e}.up_proj.weight"] for e in range(4)]).to(target)
    assert torch.equal(loaded.layers[3].ffn.gate_up[:, 12:], experts)
    mla = loaded.layers[3].attn
    assert torch.equal(mla.q_a, meaning[base + "self_attn.q_a_proj.weight"].to(target))
    kv_b = meaning[base + "self_attn.kv_b_proj.weight"].to(target).view(3, 14, 10)
    assert torch.equal(mla.w_uv, kv_b[:, 8:])
    assert torch.equal(mla.indexer.wk, meaning[base + "self_attn.indexer.wk.weight"].to(target))
    dense = [meaning[f"{PREFIX}layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert dense[0].shape == (130, 136)  # two blocks each way, the last ones partial
    assert torch.equal(loaded.layers[0].ffn.gate_up, torch.cat(dense).to(target))
    assert loaded.embed.dtype == target
    assert loaded.layers[3].ffn.bias.dtype == torch.float32
    report = inspect_checkpoint(folder)
    assert sorted(report.fp8) == sorted(meaning)
    plain = sum(len(entry.slots) for entry in entries(abstract(TINY)))
    assert str(report).endswith(f"{plain + len(meaning)} tensors, {len(meaning)} of them FP8 matrices")
    assert report.tensors == plain + len(meaning)


def test_fp8_layers_alone(folder):
    _quantise(folder)
    _, loaded = load_checkpoint(folder, layers=[0])
    assert loaded.layers[0].ffn.gate_up.dtype == torch.bfloat16


def test_fp8_problems_are_reported(folder):
    _quantise(folder)
    q_a, gate = PREFIX + "layers.3.self_attn.q_a_proj.weight", PREFIX + "layers.0.mlp.gate_proj.weight"
    up, norm, hc = PREFIX + "layers.0.mlp.up_proj.weight", PREFIX + "norm.weight", PREFIX + "layers.1.hc_attn_fn"

    def change(tensors):
        del tensors[q_a + "_scale_inv"]
        tensors[gate + "_scale_inv"] = tensors[gate + "_scale_inv"][:1].bfloat16()
        tensors[up + "_scale"] = tensors[up + "_scale_inv"].clone()
        for name in (norm, hc):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[PREFIX + "layers.1.self_attn.b_proj.weight_scale_inv"] = torch.ones(1, 2)

    edit_file(folder / "model.safetensors", change)
    report = inspect_checkpoint(folder)
    assert report.missing == (q_a + "_scale_inv",)
    assert report.wrong_shape == ((gate + "_scale_inv", (1, 2), (2, 2)),)
    assert set(report.wrong_dtype) == {
        (gate + "_scale_inv", "BF16", "F32"),
        (norm, "F8_E4M3", "BF16 or F16 or F32"),
        (hc, "F8_E4M3", "BF16 or F16 or F32"),
    }
    assert set(report.unexpected) == {up + "_scale", PREFIX + "layers.1.self_attn.b_proj.weight_scale_inv"}
