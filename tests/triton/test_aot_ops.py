"""Every kernel of convolution, latent attention, indexer and streams compiles for chips that are not here, as it is
shipped, for the released model."""

from __future__ import annotations

import importlib

import pytest
import torch

aot = pytest.importorskip("aot", reason="needs Triton: pip install 'glm5fn[triton]'", exc_type=ImportError)

from glm5fn.dispatch.support import released_call  # noqa: E402
from glm5fn.kernels.triton.launch import CHIPS  # noqa: E402

FILES = {
    "conv": ("causal_conv1d", "causal_conv1d_update"),
    "mla": ("mla_decode", "mla_sparse"),
    "indexer": ("kpool_compress", "kpool_select"),
    "quant": ("hadamard_quant_fp8",),
    "mhc": ("mhc_pre", "mhc_post"),
    "moe": ("clamped_swiglu",),
}
LAUNCHERS = {
    op: getattr(importlib.import_module(f"glm5fn.kernels.triton.{file}"), op)
    for file, ops in FILES.items()
    for op in ops
}
MULTIPLIES_MATRICES = {"mla_project_kernel", "mla_attend_kernel", "kpool_score_kernel", "mhc_logits_kernel"}


def call(op, dtype=torch.bfloat16, **changes):
    """Arguments of the released model, with activations in ``dtype``."""
    given = released_call(op) | changes
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
        for name, x in given.items()
    }


def integers(*shape):
    return torch.empty(shape, dtype=torch.int32, device="meta")


def variants(op):
    """Arguments that give other constants than the released call does."""
    given = call(op)
    yield given
    if op == "causal_conv1d":
        state = given["state"].new_empty(8, *given["state"].shape[1:])
        yield given | {"state": state, "cu_seqlens": integers(9)}
        yield {n: x for n, x in given.items() if n != "state"} | {"bias": given["weight"][:, 0], "activation": None}
    if op == "causal_conv1d_update":
        state = given["state"].new_empty(8, 6, given["state"].shape[2])
        yield given | {"state": state, "num_accepted": integers(8)}
    if op == "mla_decode":
        yield given | {"lengths": integers(8)}
    if op == "mhc_pre":
        yield given | {"fn": given["fn"].bfloat16()}


@pytest.mark.parametrize("op", LAUNCHERS)
@pytest.mark.parametrize("chip", aot.GPUS)
def test_released_shapes(op, chip):
    for given in variants(op):
        for start in aot.starts(chip, LAUNCHERS[op], **given):
            assert 0 < start.programs <= 65535
            binary = aot.compiled(start, chip)
            assert binary.metadata.shared <= CHIPS[chip].on_chip, start.name
            assert aot.has_tensor_cores(binary) == (start.name in MULTIPLIES_MATRICES), start.name


@pytest.mark.parametrize("op", LAUNCHERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(op, dtype):
    """On sm_90. Products of float32 inputs are exact, so they have no tensor cores there."""
    for start in aot.starts("sm_90", LAUNCHERS[op], **call(op, dtype)):
        binary = aot.compiled(start, "sm_90")
        assert binary.metadata.shared <= 232448
        exact = dtype == torch.float32
        assert aot.has_tensor_cores(binary) == (start.name in MULTIPLIES_MATRICES and not exact), start.name


@pytest.mark.parametrize("op", LAUNCHERS)
def test_rows_are_loaded_sixteen_bytes_at_a_time(op):
    for start in aot.starts("sm_90", LAUNCHERS[op], **call(op)):
        ptx = aot.compiled(start, "sm_90").asm["ptx"]
        assert "ld.global.v4" in ptx or ", 0x10, " in ptx, start.name  # the second is an asynchronous copy of 16 bytes


def test_attention_is_pipelined():
    """Latents come in beside the products, straight into shared memory, and are multiplied by warp groups."""
    attend = [s for s in aot.starts("sm_90", LAUNCHERS["mla_decode"], **call("mla_decode")) if "attend" in s.name]
    ptx = aot.compiled(attend[0], "sm_90").asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx
    assert "wgmma.mma_async" in ptx


def sizes(op):
    """Calls that differ in tokens, batch and strides only; the last one has offsets beyond 32 bits."""
    given = call(op)
    per_sequence = {"state", "latent", "pooled"}
    batched = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.dim() >= 2 and n not in FIXED]

    def resized(B, T):
        def shape(name):
            rest = given[name].shape[2:]
            return (B, given[name].shape[1], *rest) if name in per_sequence else (B, T, *rest)

        return given | {n: given[n].new_empty(shape(n)) for n in batched}

    for B, T in ((1, 1), (2, 32), (16, 48), (1, 16384)):
        yield resized(B, T)
    last = resized(2, 3)
    for name in batched:
        x = last[name]
        if x.dim() > 2:
            last[name] = torch.empty_strided(x.shape, (2**33, 2**31, *x.stride()[2:]), dtype=x.dtype, device="meta")
    yield last


FIXED = ("weight", "w_uk", "w_uv", "fn", "ape")


@pytest.mark.parametrize("op", LAUNCHERS)
def test_no_compiling_again_when_sizes_change(op):
    """Few queries of latent attention also start the merge of the splits, so the kernels are compared by name."""
    keys: dict[str, set] = {}
    for given in sizes(op):
        for start in aot.starts("sm_90", LAUNCHERS[op], **given):
            constants = tuple(sorted((n, v) for n, v in start.options.items() if n in ("K", "DENSE_K")))
            keys.setdefault(f"{start.name}{constants}", set()).add(aot.key(start, "sm_90"))
    assert all(len(found) == 1 for found in keys.values()), {n: len(k) for n, k in keys.items()}


def test_this_test_sees_what_it_should():
    """Other channels are another binary, and so is a tensor that is not aligned."""

    def key(x):
        return aot.key(aot.starts("sm_90", LAUNCHERS["clamped_swiglu"], gate_up=x, limit=None)[0], "sm_90")

    x = torch.empty(4, 4096, dtype=torch.bfloat16, device="meta")
    assert key(x) != key(x[:, :2048])
    assert key(x) != key(torch.empty(4, 4097, dtype=torch.bfloat16, device="meta")[:, :4096])
    assert key(x) == key(torch.empty(4, 4160, dtype=torch.bfloat16, device="meta")[:, :4096])
