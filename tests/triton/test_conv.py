"""The causal convolution on Triton beyond what every backend is asked: tiles, bad metadata, pools, hand-over."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from glm5fn.dispatch import explain
from glm5fn.kernels.triton import conv, launch
from glm5fn.ops.conv import causal_conv1d, causal_conv1d_update
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs.conv import make
from glm5fn.testing.oracle import conv as oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGES = [31, 1, 2, 0, 30, 0, 0, 65, 3, 32, 1, 0]
"""With tiles of 8 or 32 tokens: sequences that start at, before and after an edge, and one of several tiles."""


def assert_defined(found, name, **call):
    exact, low = (getattr(oracle, name)(**call, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert_within_budget(found.out, exact[0], low[0].to(call["x"].dtype))
    assert_bitwise(found.state, exact[1].to(call["x"].dtype))


def test_what_starts():
    call = make(T=3, num_spec=2)._asdict()
    one = torch.ones(2, dtype=torch.int32)
    step = {n: x for n, x in call.items() if n != "cu_seqlens"}
    for run, kernels in (
        (lambda: causal_conv1d(**call, backend="triton"), {"conv_kernel": 1, "conv_step_kernel": 1}),
        (lambda: causal_conv1d_update(**step, backend="triton"), {"conv_step_kernel": 1}),
        (lambda: causal_conv1d_update(**step, num_accepted=one, backend="triton"), {"conv_step_kernel": 1}),
    ):
        with launch.counted() as counter:
            run()
        assert counter == kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W", [2, 4, 8])
def test_sequences_across_tiles(W, dtype):
    """Also two blocks of channels, the last one not full."""
    chip = launch.chip_of(torch.device("cpu"))
    assert [conv.plan(chip, D)["BLOCK_T"] for D in (5, 300)] == [32, 8]
    for D in (5, 300):
        call = make(lengths=EDGES, W=W, D=D, dtype=dtype)._asdict()
        assert_defined(causal_conv1d(**call, backend="triton"), "causal_conv1d", **call)


def test_many_short_sequences():
    call = make(lengths=[i % 3 for i in range(150)], D=3)._asdict()
    assert_defined(causal_conv1d(**call, backend="triton"), "causal_conv1d", **call)


def test_too_many_taps_are_refused():
    call = make(W=9)
    verdicts = explain(causal_conv1d, call.x, call.weight, backend="triton").verdicts
    reasons = next(v.reasons for v in verdicts if v.backend == "triton")
    assert any("W must be at most 8 taps, which are unrolled, got 9" in reason for reason in reasons)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, EDGES], ids=["dense", "packed"])
def test_nothing_is_read_or_written_beside_any_tensor(lengths, dtype):
    call = make(lengths=lengths, num_spec=2, dtype=dtype)._asdict()
    call = {n: x if x is None else poison.guarded(x) for n, x in call.items()}
    with poison.unchanged(*call.values()), poison.fenced():
        found = causal_conv1d(**call, backend="triton")
    assert_defined(found, "causal_conv1d", **call)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_or_written_beside_an_update(dtype):
    call = make(B=3, T=2, num_spec=3, dtype=dtype)._replace(cu_seqlens=torch.tensor([1, 4, 2], dtype=torch.int32))
    call = dict(zip(("x", "weight", "bias", "state", "num_accepted"), map(poison.guarded, call), strict=True))
    with poison.unchanged(*call.values()), poison.fenced():
        found = causal_conv1d_update(**call, backend="triton")
    assert_defined(found, "causal_conv1d_update", **call)


BAD_OFFSETS = [[3, 5, 30], [0, 7, 7], [20, 3, 11], [0, -9, 99], [-(2**31), 2**31 - 1, 4], [99, 99, 99], [0, 40, 0]]


@pytest.mark.parametrize("cu_seqlens", BAD_OFFSETS)
def test_bad_offsets_reach_no_other_memory(cu_seqlens):
    """On an accelerator offsets are not checked. Whatever they are, memory stays whole, and a token that no sequence
    claims gives zeros. (The launcher is called, because on the CPU the operation does check.)"""
    call = make(B=1, T=40)
    x, weight, bias = (poison.guarded(t) for t in call[:3])
    state = poison.guarded(torch.randn(2, 3, 5))
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32)
    with poison.unchanged(x, weight, bias, state), poison.fenced():
        out, new = conv.causal_conv1d(x, weight, bias, state, cu_seqlens=offsets)
    assert out.isfinite().all()
    assert new.isfinite().all()
    claimed = torch.zeros(40, dtype=torch.bool)
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        claimed[max(0, start) : max(0, end)] = True
        if min(end, 40) <= min(max(start, 0), 40):
            assert_bitwise(new[n], state[n])
    assert not out[:, ~claimed].any()


@pytest.mark.parametrize("accepted", [[0, 9], [-7, 2**31 - 1]])
def test_bad_counts_are_clamped(accepted):
    call = make(T=2, num_spec=2)
    with poison.fenced():
        found = conv.causal_conv1d_update(*call[:4], num_accepted=torch.tensor(accepted, dtype=torch.int32))
    assert_bitwise(found, conv.causal_conv1d_update(*call[:4], num_accepted=torch.tensor([1, 3], dtype=torch.int32)))


@pytest.mark.parametrize("name", ["causal_conv1d", "causal_conv1d_update"])
def test_a_pool_with_gaps_is_updated_in_place(name):
    """States of one layer, in pages of a pool that holds more: nothing but them is touched."""
    call = make(B=3, T=2, num_spec=2)
    run = {"causal_conv1d": causal_conv1d, "causal_conv1d_update": causal_conv1d_update}[name]
    options = {} if name == "causal_conv1d" else {"num_accepted": torch.tensor([1, 3, 2], dtype=torch.int32)}
    expected = run(*call[:4], **options, backend="triton")
    pool = torch.full((3, 60), torch.nan)
    state = pool.as_strided((3, 5, 5), (60, 8, 1), 16)
    state.copy_(call.state)
    gaps = pool.isnan()
    found = run(*call[:3], state, **options, donate=True, backend="triton")
    assert found.state.data_ptr() == state.data_ptr()
    assert_bitwise((found.out, state.contiguous()), tuple(expected))
    assert torch.equal(pool.isnan(), gaps)


@pytest.mark.parametrize(("first", "second"), [("reference", "triton"), ("triton", "reference"), ("triton", "triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_backend_goes_on_where_another_stopped(first, second, dtype):
    """Prefill, decode, verify and take back, prefill again: as if one had done it all."""
    call = make(T=50, dtype=dtype)
    filter_ = (call.weight, call.bias)
    outs = []
    out, state = causal_conv1d(call.x[:, :40], *filter_, call.state, backend=first)
    outs.append(out)
    out, state = causal_conv1d_update(call.x[:, 40:41], *filter_, state, backend=second)
    outs.append(out)
    state = torch.cat([state, torch.full_like(state[:, :2], torch.nan)], dim=1)
    one, two = (torch.full((2,), n, dtype=torch.int32) for n in (1, 2))
    out, state = causal_conv1d_update(call.x[:, 41:44], *filter_, state, num_accepted=one, backend=first)
    outs.append(out[:, :2])
    out, state = causal_conv1d_update(call.x[:, 43:44], *filter_, state, num_accepted=two, backend=second)
    outs.append(out)
    out, state = causal_conv1d(call.x[:, 44:], *filter_, state[:, :3].contiguous(), backend=second)
    outs.append(out)
    given = {n: x for n, x in call._asdict().items() if n != "cu_seqlens"}
    assert_defined(type(causal_conv1d(**given))(torch.cat(outs, dim=1), state), "causal_conv1d", **given)
