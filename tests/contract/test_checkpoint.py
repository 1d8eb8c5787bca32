"""Reading and writing checkpoints: names, values, partial loads, memory, and what a save leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm5fn.checkpoint import CheckpointError, inspect_checkpoint, load_checkpoint, save_checkpoint
from glm5fn.config import Config, VisionConfig
from glm5fn.disk_names import entries, vision_names
from glm5fn.dispatch import ContractError
from glm5fn.params import abstract, cast, init_params, map_leaves, named_leaves
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs.checkpoint import PREFIX, TINY, edit_file, make_params, quantise_file


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture
def folder(tmp_path, params):
    """A checkpoint in one file, to be changed."""
    save_checkpoint(TINY, params, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path, params):
    save_checkpoint(TINY, params, tmp_path / "sharded", shard_bytes=60_000)
    return tmp_path / "sharded"


# --- the released model's inventory, written down from its files' headers -------------------------------------------


def _released_tensors():
    kda = {f"{x}_proj.weight": (8192, 4096) for x in "qkv"} | {f"{x}_conv1d.weight": (8192, 1, 4) for x in "qkv"}
    kda |= {"b_proj.weight": (64, 4096), "A_log": (64,), "dt_bias": (8192,), "o_norm.weight": (128,)}
    kda |= {f"{x}_a_proj.weight": (128, 4096) for x in "fg"} | {f"{x}_b_proj.weight": (8192, 128) for x in "fg"}
    kda |= {"o_proj.weight": (4096, 8192)}
    mla = {
        "q_a_proj.weight": (1536, 4096), "q_a_layernorm.weight": (1536,), "q_b_proj.weight": (16384, 1536),
        "kv_a_proj_with_mqa.weight": (512, 4096), "kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (32768, 512),
        "o_proj.weight": (4096, 16384), "indexer.wq_b.weight": (4096, 1536), "indexer.wk.weight": (128, 4096),
        "indexer.weights_proj.weight": (32, 4096), "indexer.k_norm.weight": (128,), "indexer.k_norm.bias": (128,),
        "indexer.index_kpool_compress_gate": (128, 4096), "indexer.index_kpool_compress_ape": (4, 128),
    }  # fmt: skip

    def mlp(width):
        wide = {f"{x}_proj.weight": (width, 4096) for x in ("gate", "up")}
        return wide | {"down_proj.weight": (4096, width)}

    moe = {"gate.weight": (288, 4096), "gate.e_score_correction_bias": (288,)}
    moe |= {f"experts.{e}.{k}": v for e in range(288) for k, v in mlp(2048).items()}
    moe |= {f"shared_experts.{k}": v for k, v in mlp(2048).items()}
    hc = {"fn": (24, 16384), "base": (24,), "scale": (3,)}
    names = {
        PREFIX + "embed_tokens.weight": (154880, 4096),
        PREFIX + "norm.weight": (4096,),
        "lm_head.weight": (154880, 4096),
    }
    for i in range(46):
        layer = {"input_layernorm.weight": (4096,), "post_attention_layernorm.weight": (4096,)}
        attn, ffn = (mla if i % 4 == 3 or i == 45 else kda), (mlp(12288) if i < 3 else moe)
        layer |= {f"self_attn.{k}": v for k, v in attn.items()} | {f"mlp.{k}": v for k, v in ffn.items()}
        if i < 45:
            layer |= {f"hc_{site}_{k}": v for site in ("attn", "ffn") for k, v in hc.items()}
        else:
            layer |= {f"{x}.weight": (4096,) for x in ("enorm", "hnorm", "shared_head.norm")}
            layer |= {"eh_proj.weight": (4096, 8192)}
        names |= {f"{PREFIX}layers.{i}.{k}": v for k, v in layer.items()}
    return names


def test_inventory_of_the_released_model():
    cfg = Config(index_kpool=4, num_nextn_predict_layers=1, vision=VisionConfig(out_hidden_size=4096))
    slots = [slot for entry in entries(abstract(cfg)) for slot in entry.slots]
    wanted = _released_tensors()
    assert {slot.name: slot.shape for slot in slots} == wanted
    assert len(slots) == len(wanted)
    fp8 = re.compile(
        r"(q_a_proj|q_b_proj|kv_a_proj_with_mqa|(?<=\d\.self_attn\.)o_proj|mlp\..*(gate|up|down)_proj)\.weight$"
    )
    kda_layers = {i for i in range(45) if i % 4 != 3}
    matrices = [s for s in slots if fp8.search(s.name) and not _is_kda_o_proj(s.name, kda_layers)]
    assert len(matrices) == 37338
    assert all(slot.is_matrix for slot in matrices)
    assert len(slots) + len(matrices) == 75761
    assert len(vision_names(cfg.vision)) == 347


def _is_kda_o_proj(name, kda_layers):
    found = re.search(r"layers\.(\d+)\.self_attn\.o_proj", name)
    return bool(found) and int(found[1]) in kda_layers


def test_every_element_of_a_storage_is_stored_once():
    for entry in entries(abstract(TINY)):
        hits = torch.zeros(entry.shape)
        for slot in entry.slots:
            hits[slot.part].view(slot.shape).add_(1)
        assert (hits == 1).all(), entry.leaves


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000, 1])
def test_round_trip_is_bit_exact(tmp_path, params, dtype, shard_bytes):
    params = cast(params, dtype)
    save_checkpoint(TINY, params, tmp_path / "model", shard_bytes=shard_bytes)
    cfg, loaded = load_checkpoint(tmp_path / "model")
    assert_bitwise(loaded, params)
    assert attrs.evolve(cfg, extra={}) == TINY
    assert cfg.extra["dtype"] == str(dtype).removeprefix("torch.")
    files = sorted(f.name for f in (tmp_path / "model").iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        shards = [f for f in files if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", f)]
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == shards
        assert len(shards) > 3
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in dict(named_leaves(params)).values())
        for file in shards:
            tensors = load_file(tmp_path / "model" / file).values()
            assert len(tensors) == 1 or sum(x.nbytes for x in tensors) <= shard_bytes
    assert inspect_checkpoint(tmp_path / "model").ok


def test_values_lie_where_the_official_layout_puts_them(folder, params):
    disk = load_file(folder / "model.safetensors")
    kda, mla, moe = params.layers[0].attn, params.layers[3].attn, params.layers[3].ffn
    attn = PREFIX + "layers.0.self_attn."
    assert torch.equal(disk[attn + "k_proj.weight"], kda.qkv_proj[14:28])
    assert torch.equal(disk[attn + "v_conv1d.weight"], kda.conv[28:, None])
    assert torch.equal(disk[attn + "dt_bias"], kda.dt_bias.flatten())
    kv_b = disk[PREFIX + "layers.3.self_attn.kv_b_proj.weight"].view(3, 14, 10)
    assert torch.equal(kv_b[:, :8], mla.w_uk)
    assert torch.equal(kv_b[:, 8:], mla.w_uv)
    mlp = PREFIX + "layers.3.mlp."
    assert torch.equal(disk[mlp + "experts.2.gate_proj.weight"], moe.gate_up[2, :12])
    assert torch.equal(disk[mlp + "experts.2.up_proj.weight"], moe.gate_up[2, 12:])
    assert torch.equal(disk[mlp + "experts.3.down_proj.weight"], moe.down[3])
    assert torch.equal(disk[mlp + "shared_experts.up_proj.weight"], moe.shared.gate_up[12:])
    assert torch.equal(disk[PREFIX + "layers.0.hc_ffn_fn"], params.layers[0].ffn_hc.fn)
    assert torch.equal(disk[PREFIX + "layers.5.shared_head.norm.weight"], params.mtp[0].norm)
    assert torch.equal(disk["lm_head.weight"], params.lm_head)
    dtypes = Counter(x.dtype for x in disk.values())
    assert dtypes[torch.float32] == 5 * 4 + 4 * (3 + 2) + 4  # hc base and scale; conv, A_log, dt_bias; router bias


def test_views_and_mapping(folder, params):
    _, loaded = load_checkpoint(folder)
    mla = loaded.layers[3].attn
    assert mla.w_uk.untyped_storage().data_ptr() == mla.w_uv.untyped_storage().data_ptr()
    before = (folder / "model.safetensors").read_bytes()
    loaded.embed.add_(1)  # mapped, and written to: only the copy in memory changes
    assert (folder / "model.safetensors").read_bytes() == before
    _, again = load_checkpoint(folder)
    shutil.rmtree(folder)
    assert_bitwise(again, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_dtype_converts_all_but_the_float32_leaves(folder, params, dtype):
    _, loaded = load_checkpoint(folder, dtype=dtype)
    assert_bitwise(loaded, cast(params, dtype))


def test_each_value_is_rounded_once(tmp_path, params):
    save_checkpoint(TINY, cast(map_leaves(lambda x: x.float() * 1.000123, params), torch.float32), tmp_path / "f32")
    _, exact = load_checkpoint(tmp_path / "f32")
    _, rounded = load_checkpoint(tmp_path / "f32", dtype=torch.bfloat16)
    assert_bitwise(rounded, cast(exact, torch.bfloat16))


def test_mixed_dtypes_on_disk_are_promoted(folder, params):
    def change(tensors):
        tensors[PREFIX + "layers.0.self_attn.k_proj.weight"] = tensors[
            PREFIX + "layers.0.self_attn.k_proj.weight"
        ].float()

    edit_file(folder / "model.safetensors", change)
    _, loaded = load_checkpoint(folder)
    assert loaded.layers[0].attn.qkv_proj.dtype == torch.float32
    assert torch.equal(loaded.layers[0].attn.qkv_proj, params.layers[0].attn.qkv_proj.float())


def test_rounded_float32_leaves_are_read_exactly(folder):
    # The released model has its convolutions in bfloat16; the model computes with them in float32.
    def change(tensors):
        for name in list(tensors):
            if "conv1d" in name or "A_log" in name:
                tensors[name] = tensors[name].bfloat16()

    edit_file(folder / "model.safetensors", change)
    _, loaded = load_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")[PREFIX + "layers.0.self_attn.q_conv1d.weight"]
    assert loaded.layers[0].attn.conv.dtype == torch.float32
    assert torch.equal(loaded.layers[0].attn.conv[:14], stored[:, 0].float())


def test_tied_head(tmp_path):
    cfg = attrs.evolve(TINY, tie_word_embeddings=True)
    params = init_params(cfg)
    save_checkpoint(cfg, params, tmp_path / "model")
    _, loaded = load_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.lm_head is loaded.embed
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    with pytest.raises(CheckpointError, match="lm_head: must be the embedding itself"):
        save_checkpoint(cfg, params._replace(lm_head=params.embed.clone()), tmp_path / "other")


def test_plain_residuals_and_no_mtp(tmp_path):
    cfg = attrs.evolve(TINY, mhc=False, num_nextn_predict_layers=0, linear_lower_bound=None)
    params = init_params(cfg)
    save_checkpoint(cfg, params, tmp_path / "model")
    loaded_cfg, loaded = load_checkpoint(tmp_path / "model")
    assert (loaded_cfg.mhc, loaded_cfg.linear_lower_bound, loaded.mtp) == (False, None, ())
    assert_bitwise(loaded, params)


def test_text_only_prefix(folder, params):
    def change(tensors):
        for name in list(tensors):
            tensors[name.replace(PREFIX, "model.")] = tensors.pop(name)

    edit_file(folder / "model.safetensors", change)
    _, loaded = load_checkpoint(folder)
    assert_bitwise(loaded, params)
    edit_file(folder / "model.safetensors", lambda t: t.update({PREFIX + "embed_tokens.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"two prefixes, 'model.language_model.' and 'model.'"):
        load_checkpoint(folder)


def test_any_name_of_a_single_file(folder, params):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_bitwise(load_checkpoint(folder)[1], params)


_MEMORY = """
import sys
import torch
from glm5fn.checkpoint import load_checkpoint

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def check(done, total):
    extra = anonymous() - before - done
    assert extra < 24 << 20, f"{extra >> 20} MiB more than the {done >> 20} MiB read so far"

torch.ones(8).bfloat16().float()
before = anonymous()
_, params = load_checkpoint(sys.argv[1], dtype=getattr(torch, sys.argv[2]), progress=check)
print(sum(x.nbytes for x in params.layers[0].ffn[:4]) >> 20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "quantise"), [("bfloat16", False), ("float32", False), ("bfloat16", True)])
def test_loading_holds_one_copy(tmp_path, dtype, quantise):
    cfg = Config(vocab_size=8, hidden_size=1024, num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=24,
                 moe_intermediate_size=512, linear_num_heads=1, linear_head_dim=8)  # fmt: skip
    params = map_leaves(lambda info: torch.full(info.shape, 0.5, dtype=info.dtype or torch.bfloat16), abstract(cfg))
    save_checkpoint(cfg, params, tmp_path / "model")
    if quantise:
        quantise_file(tmp_path / "model" / "model.safetensors", lambda name: "experts" in name)
    command = [sys.executable, "-c", _MEMORY, tmp_path / "model", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= (144 if dtype == "float32" else 72)


def test_progress_counts_bytes(folder, params):
    calls = []
    load_checkpoint(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(x.nbytes for _, x in named_leaves(params))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


# --- parts ----------------------------------------------------------------------------------------------------------


def test_layers_loads_just_those(tmp_path, params):
    save_checkpoint(TINY, params, tmp_path / "model", shard_bytes=20_000)
    _, loaded = load_checkpoint(tmp_path / "model", layers=[3, 1])
    assert [layer is not None for layer in loaded.layers] == [False, True, False, True, False]
    assert loaded.mtp == ()
    assert_bitwise(loaded, params._replace(layers=(None, params.layers[1], None, params.layers[3], None), mtp=()))
    _, loaded = load_checkpoint(tmp_path / "model", layers=[], mtp=True)
    assert_bitwise(loaded, params._replace(layers=(None,) * 5))
    _, loaded = load_checkpoint(tmp_path / "model", mtp=False)
    assert_bitwise(loaded, params._replace(mtp=()))


def test_layers_needs_only_the_files_that_hold_them(tmp_path, params):
    folder = tmp_path / "model"
    save_checkpoint(TINY, params, folder, shard_bytes=1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        if f"{PREFIX}layers." in name and f"{PREFIX}layers.2." not in name:
            (folder / file).unlink()
    _, loaded = load_checkpoint(folder, layers=range(2, 3))
    assert_bitwise(loaded.layers[2], params.layers[2])
    report = inspect_checkpoint(folder, layers=[2, 4])
    assert all(reason == "the file is missing" for _, reason in report.unreadable)
    assert len(report.unreadable) == sum(f"{PREFIX}layers.4." in name for name in index)


@pytest.mark.parametrize("layers", [[5], [-1], [True], ["0"], [1.0]])
def test_layers_must_exist(folder, layers):
    with pytest.raises(ContractError, match=r"layers must be integers from 0 to 4, got "):
        load_checkpoint(folder, layers=layers)


def test_dtype_must_be_a_float(folder):
    with pytest.raises(ContractError, match=r"dtype must be one of bfloat16, .* or None, got torch.int8"):
        load_checkpoint(folder, dtype=torch.int8)


# --- writing --------------------------------------------------------------------------------------------------------


def test_saved_config_describes_what_was_saved(tmp_path, params):
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    cfg = attrs.evolve(TINY, extra={"quantization_config": quantised, "torch_dtype": "float8", "mark": 1})
    save_checkpoint(cfg, params, tmp_path / "model")
    data = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in data
    assert "torch_dtype" not in data
    assert (data["dtype"], data["mark"]) == ("bfloat16", 1)
    assert data["architectures"] == ["Glm5NextForConditionalGeneration"]
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_existing_folders_are_not_overwritten_unasked(folder, params):
    before = sorted((f.name, f.read_bytes()) for f in folder.iterdir())
    with pytest.raises(FileExistsError, match="already exists; choose another folder or pass overwrite=True"):
        save_checkpoint(TINY, params, folder)
    assert sorted((f.name, f.read_bytes()) for f in folder.iterdir()) == before


def test_overwrite_replaces_the_checkpoint_and_keeps_the_rest(tmp_path, params, sharded):
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "plots").mkdir()
    (sharded / "plots" / "loss.png").write_bytes(b"png")
    other = map_leaves(lambda x: x + 1, params)
    save_checkpoint(TINY, other, sharded, overwrite=True)
    assert_bitwise(load_checkpoint(sharded)[1], other)
    assert sorted(f.name for f in sharded.iterdir()) == ["config.json", "model.safetensors", "plots", "tokenizer.json"]
    assert (sharded / "plots" / "loss.png").read_bytes() == b"png"
    assert [f.name for f in tmp_path.iterdir()] == ["sharded"]


def test_a_checkpoint_can_be_overwritten_by_itself(folder, params):
    _, loaded = load_checkpoint(folder)
    save_checkpoint(TINY, loaded, folder, overwrite=True)
    assert_bitwise(load_checkpoint(folder)[1], params)
    assert_bitwise(loaded, params)


def test_only_checkpoints_are_overwritten(tmp_path, params):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("…")
    (tmp_path / "file").write_text("…")
    for path in (home, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="not a checkpoint and is not overwritten"):
            save_checkpoint(TINY, params, path, overwrite=True)
    (home / "thesis.tex").unlink()
    save_checkpoint(TINY, params, home)  # an empty folder is fine
    assert inspect_checkpoint(home).ok


def test_a_failed_save_leaves_nothing_behind(tmp_path, folder, params, monkeypatch):
    import glm5fn.checkpoint

    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk full")
        save_file(*args, **kwargs)

    monkeypatch.setattr(glm5fn.checkpoint, "save_file", fail)
    before = sorted((f.name, f.read_bytes()) for f in folder.iterdir())
    for path in (folder, tmp_path / "new"):
        calls.clear()
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(TINY, params, path, shard_bytes=60_000, overwrite=True)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    assert sorted((f.name, f.read_bytes()) for f in folder.iterdir()) == before


def test_save_makes_parents_and_takes_relative_paths(tmp_path, params, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(TINY, params, "a/b/model")
    assert inspect_checkpoint("a/b/model").ok
    assert [f.name for f in (tmp_path / "a" / "b").iterdir()] == ["model"]


def test_save_refuses_params_that_do_not_fit(tmp_path, params):
    layer = params.layers[0]
    hc = layer.attn_hc._replace(base=layer.attn_hc.base.bfloat16())
    bad = params._replace(
        embed=params.embed[:5],
        norm=params.norm.double(),
        layers=(layer._replace(attn_hc=hc), *params.layers[1:4], None),
    )
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(TINY, bad, tmp_path / "model")
    text = str(error.value)
    assert "The parameters do not fit the configuration; nothing was written." in text
    assert "embed: shape [5, 136], must be [37, 136]" in text
    assert "layers.0.attn_hc.base: torch.bfloat16, must be torch.float32" in text
    assert "layers.4.attn.A_log: missing" in text
    assert "more" in text
    with pytest.raises(CheckpointError, match=r"norm: torch.float64, must be torch.bfloat16 or"):
        save_checkpoint(TINY, params._replace(norm=params.norm.double()), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn.*not part of this configuration"):
        save_checkpoint(attrs.evolve(TINY, num_nextn_predict_layers=0), params, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_save_takes_parameters_in_training(tmp_path, params):
    training = map_leaves(lambda x: x.float().requires_grad_(), params)
    save_checkpoint(TINY, training, tmp_path / "model")
    _, loaded = load_checkpoint(tmp_path / "model")
    assert_bitwise(loaded, training)
    assert not loaded.embed.requires_grad
