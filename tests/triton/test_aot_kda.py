"""Attention and norms compile, as they are shipped for the released model, for chips that are not here."""

from __future__ import annotations

import pytest
import torch

aot = pytest.importorskip("aot", reason="needs Triton: pip install 'glm5fn[triton]'", exc_type=ImportError)

from glm5fn.dispatch.support import released_call  # noqa: E402
from glm5fn.kernels.triton import kda, norm, state  # noqa: E402
from glm5fn.kernels.triton.launch import CHIPS  # noqa: E402

LAUNCHERS = {
    **{op: getattr(kda, op) for op in ("kda_gate", "kda_chunk", "kda_recurrent", "kda_verify")},
    **{op: getattr(norm, op) for op in ("rms_norm", "gated_rms_norm", "l2_norm")},
}
MULTIPLIES_MATRICES = {"kda_join_kernel", "kda_scan_kernel"}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def call(op, dtype=torch.bfloat16, **changes):
    """Arguments of the released model, with activations in ``dtype``."""
    given = released_call(op) | changes
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
        for name, x in given.items()
    }


def variants(op):
    """Arguments that give other constants than the released call does."""
    yield call(op)
    if op in ("kda_chunk", "kda_recurrent"):
        N, (H, V, K) = 4, call(op)["state"].shape[1:]
        tokens = {n: x.new_empty(1, 4096, *x.shape[2:]) for n, x in call(op).items() if n != "state"}
        offsets = torch.empty(N + 1, dtype=torch.int32, device="meta")
        yield {**tokens, "cu_seqlens": offsets}
        yield {**tokens, "cu_seqlens": offsets, "state": torch.empty(N, H, V, K, device="meta")}
    if op == "kda_gate":
        yield call(op, lower_bound=None)


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(op, dtype):
    """On sm_90. Products of float32 inputs are exact, so they have no tensor cores there."""
    for start in aot.starts("sm_90", LAUNCHERS[op], **call(op, dtype)):
        binary = aot.compiled(start, "sm_90")
        assert binary.metadata.shared <= 232448
        exact = dtype == torch.float32
        assert aot.has_tensor_cores(binary) == (start.name in MULTIPLIES_MATRICES and not exact), start.name
        assert "tf32" not in start.options.get("PRECISION", "") or start.options["PRECISION"] == "tf32x3"


@pytest.mark.parametrize("op", LAUNCHERS)
def test_rows_are_loaded_sixteen_bytes_at_a_time(op):
    for start in aot.starts("sm_90", LAUNCHERS[op], **call(op)):
        assert "ld.global.v4" in aot.compiled(start, "sm_90").asm["ptx"], start.name


@pytest.mark.parametrize("op", ["kda_chunk", "kda_recurrent"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (40, 70), (256, 256)])
def test_other_heads(op, K, V):
    tokens = {"q": K, "k": K, "v": V, "g": K}
    given = {n: x.new_empty(*x.shape[:3], tokens[n]) for n, x in call(op).items() if n in tokens}
    given |= {"beta": call(op)["beta"], "state": torch.empty(len(given["q"]), 64, V, K, device="meta")}
    for start in aot.starts("sm_90", LAUNCHERS[op], **given):
        assert aot.compiled(start, "sm_90").metadata.shared <= 232448


def sizes(op):
    """Calls that differ in tokens, batch and strides only; the last one has offsets beyond 32 bits."""
    tokens = [
        name for name, x in call(op).items() if isinstance(x, torch.Tensor) and x.dim() >= 3 and "state" not in name
    ]

    def resized(B, T):
        given = dict(call(op))
        for name, x in given.items():
            if name in tokens:
                given[name] = x.new_empty(B, T, *x.shape[2:])
            elif isinstance(x, torch.Tensor) and (name.startswith("state") or name == "num_accepted"):
                given[name] = x.new_empty(B, *x.shape[1:])
        return given

    least = 17 if op == "kda_chunk" else 1
    for B, T in ((1, least), (2, 32), (16, 48), (1, 16384)) if op != "kda_verify" else ((1, 1), (2, 2), (256, 1)):
        yield resized(B, T)
    given = resized(2, least)
    for name in tokens:
        x = given[name]
        given[name] = torch.empty_strided(x.shape, (2**33, 2**31, *x.stride()[2:]), dtype=x.dtype, device="meta")
    yield given


@pytest.mark.parametrize("op", LAUNCHERS)
def test_no_compiling_again_when_sizes_change(op):
    """On an AMD chip each tensor beyond 2 GiB is another binary, because Triton addresses it in another way."""
    keys = [{aot.key(start, "sm_90") for start in aot.starts("sm_90", LAUNCHERS[op], **given)} for given in sizes(op)]
    assert all(k == keys[0] for k in keys)
    for key in keys[0]:
        assert ("i64", None) in key, "strides are 64 bits wide"


@pytest.mark.parametrize("chip", aot.GPUS)
def test_state_copies(chip):
    pool = torch.empty(100, 2 * 64 * 128 * 128, device="meta")[:, : 64 * 128 * 128].view(100, 64, 128, 128)
    slots = torch.empty(8, dtype=torch.int32, device="meta")
    rows = torch.empty(8, 64, 128, 128, device="meta")
    for run, given in ((state.gather_states, (slots, slots.bool())), (state.scatter_states, (slots, rows))):
        (start,) = aot.starts(chip, run, pool, *given)
        binary = aot.compiled(start, chip)
        assert chip == "gfx942" or {"ld.global.v4", "st.global.v4"} <= set(
            binary.asm["ptx"].replace(".b32", " ").split()
        )


def test_this_test_sees_what_it_should():
    """Another head size is another binary, and so is a tensor that is not aligned."""

    def key(**changes):
        return aot.key(aot.starts("sm_90", LAUNCHERS["l2_norm"], **call("l2_norm", **changes))[0], "sm_90")

    x = call("l2_norm")["x"]
    assert key() != key(x=x[..., :64])
    assert key() != key(x=torch.empty(1, 8, 64, 129, dtype=x.dtype, device="meta")[..., :128])
    assert key() == key(x=torch.empty(1, 8, 64, 192, dtype=x.dtype, device="meta")[..., :128])
