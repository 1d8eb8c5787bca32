"""Kimi delta attention on Triton beyond what every backend is asked: sizes, rounds, bad metadata, pools, hand-over."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from glm5fn.kernels.triton import kda, kda_chunk, launch
from glm5fn.ops import kda as ops
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs.kda import make, offsets
from glm5fn.testing.oracle import kda as oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [ops.kda_chunk, ops.kda_recurrent]
CHUNKED = {"kda_diagonal_kernel", "kda_join_kernel", "kda_scan_kernel"}


def assert_defined(found, call, **options):
    exact = oracle.kda(*call, **options)
    out, state = oracle.kda(*call, **options, dtype=torch.float32)
    assert_within_budget(tuple(found), exact, (out.to(call[0].dtype), state))


def test_what_starts():
    call = make(B=1, T=20)
    accepted = torch.ones(1, dtype=torch.int32)
    f, a, b = torch.zeros(1, 2, 2, 8), torch.zeros(2), torch.zeros(2, 8)
    starts = {
        "kda_chunk": (lambda: ops.kda_chunk(*call, backend="triton"), CHUNKED),
        "kda_chunk of few tokens": (
            lambda: ops.kda_chunk(*make(B=1, T=16), backend="triton"),
            {"kda_recurrent_kernel"},
        ),
        "kda_recurrent": (lambda: ops.kda_recurrent(*call, backend="triton"), {"kda_recurrent_kernel"}),
        "kda_verify": (
            lambda: ops.kda_verify(*make(B=1, T=1)[:5], torch.zeros(1, 2, 2, 6, 8), accepted, backend="triton"),
            {"kda_recurrent_kernel"},
        ),
        "kda_gate": (lambda: ops.kda_gate(f, a, b, backend="triton"), {"kda_gate_kernel"}),
    }
    for name, (run, kernels) in starts.items():
        with launch.counted() as counter:
            run()
        assert dict(counter) == dict.fromkeys(kernels, 1), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["mild", "mixed"])
def test_chunks_of_64_tokens(dtype, gate):
    """Heads with more than 32 channels; neither size is a power of two, and there are two slices of values."""
    assert kda_chunk.plan(launch.chip_of(torch.device("cpu")), 40, 70)[0] == 64
    call = make(B=1, T=150, H=1, K=40, V=70, gate=gate, dtype=dtype)
    assert_defined(ops.kda_chunk(*call, backend="triton"), call)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "V"), [(128, 128), (256, 256), (256, 16), (5, 256)])
def test_largest_heads(form, K, V):
    call = make(B=1, T=18, H=1, K=K, V=V, dtype=torch.bfloat16)
    assert_defined(form(*call, backend="triton"), call)


def test_heads_that_are_too_large_are_refused():
    for K, V, text in ((257, 8, "K must be 1 to 256, got 257"), (8, 300, "V must be 1 to 256, got 300")):
        for form in FORMS:
            choice = ops_explain(form, *make(B=1, T=3, K=K, V=V))
            assert any(text in reason for reason in choice)


def ops_explain(form, *call):
    from glm5fn.dispatch import explain

    return next(v.reasons for v in explain(form, *call, backend="triton").verdicts if v.backend == "triton")


@pytest.mark.parametrize("lengths", [None, [40, 0, 0, 33, 130, 1]])
@pytest.mark.parametrize("donate", [False, True])
def test_several_rounds_are_one(monkeypatch, lengths, donate):
    """With little workspace the chunks are worked on in rounds, and a sequence goes on from its state in the next."""
    if lengths is None:
        call, packing = make(B=3, T=100), None
    else:
        call, packing = make(B=1, T=sum(lengths), N=len(lengths)), offsets(lengths)
    expected = ops.kda_chunk(*call, cu_seqlens=packing, backend="triton")
    monkeypatch.setattr(kda_chunk, "_WORKSPACE", 80_000)
    state = call.state.clone()
    with launch.counted() as counter, poison.nan_empty():
        found = ops.kda_chunk(*call[:5], state, cu_seqlens=packing, donate=donate, backend="triton")
    assert counter["kda_scan_kernel"] > 3
    assert_bitwise(tuple(found), tuple(expected))
    assert donate or torch.equal(state, call.state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_or_written_beside_any_tensor(form, packed, dtype):
    packing = offsets([5, 0, 32, 1]) if packed else None
    given = make(B=1 if packed else 2, T=38, N=4 if packed else 2, H=3, K=7, dtype=dtype)
    call = [poison.guarded(x) for x in given]
    with poison.unchanged(*call), poison.fenced():
        found = form(*call, cu_seqlens=packing, backend="triton")
    assert_defined(found, given, cu_seqlens=packing)


def test_nothing_is_written_beside_states_and_gates():
    tokens = [poison.guarded(x) for x in make(B=2, T=3)[:5]]
    states = poison.guarded(torch.randn(2, 4, 2, 6, 8))
    accepted = poison.guarded(torch.tensor([4, 1], dtype=torch.int32))
    f, A_log, dt_bias = (poison.guarded(torch.randn(*s)) for s in ((2, 3, 5, 7), (5,), (5, 7)))
    with poison.unchanged(*tokens, states, accepted, f, A_log, dt_bias), poison.fenced():
        found = ops.kda_verify(*tokens, states, accepted, backend="triton")
        g = ops.kda_gate(f, A_log, dt_bias, backend="triton")
    assert_within_budget(tuple(found), oracle.kda_verify(*tokens, states, accepted))
    assert g.isfinite().all()


BAD_OFFSETS = [[3, 5, 30], [0, 7, 7], [20, 3, 11], [0, -9, 99], [-(2**31), 2**31 - 1, 4], [99, 99, 99]]


@pytest.mark.parametrize("cu_seqlens", BAD_OFFSETS)
@pytest.mark.parametrize("form", [kda.kda_chunk, kda.kda_recurrent])
def test_bad_offsets_reach_no_other_memory(form, cu_seqlens):
    """On an accelerator offsets are not checked. Whatever they are, memory stays whole, and a token that no sequence
    claims gives zeros. (The launchers are called, because on the CPU the operations do check.)"""
    call = [poison.guarded(x) for x in make(B=1, T=40, N=2)]
    with poison.unchanged(*call), poison.fenced():
        out, state = form(*call, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
    assert out.isfinite().all()
    assert state.isfinite().all()
    claimed = torch.zeros(40, dtype=torch.bool)
    for start, end in pairwise(cu_seqlens):
        claimed[max(0, start) : max(0, end)] = True
    assert not out[:, ~claimed].any()
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        if min(end, 40) <= min(max(start, 0), 40):
            assert_bitwise(state[n], call[5][n])


@pytest.mark.parametrize("accepted", [[0, 9], [-7, 2**31 - 1]])
def test_bad_counts_are_clamped(accepted):
    tokens, states = make(B=2, T=2)[:5], torch.randn(2, 3, 2, 6, 8)
    with poison.fenced():
        found = kda.kda_verify(*tokens, states, torch.tensor(accepted, dtype=torch.int32))
    assert_bitwise(found, kda.kda_verify(*tokens, states, torch.tensor([1, 3], dtype=torch.int32)))


@pytest.mark.parametrize("form", FORMS)
def test_a_pool_with_gaps_is_updated_in_place(form):
    """States of one layer, in pages of a pool that holds more: nothing but them is touched."""
    call = make(B=3, T=20)
    expected = form(*call, backend="triton")
    pool = torch.full((3, 2 * 6 * 8 + 40), torch.nan)
    state = pool.as_strided((3, 2, 6, 8), (pool.stride(0), 48, 8, 1), 24)
    state.copy_(call.state)
    gaps = pool.isnan()
    found = form(*call[:5], state, donate=True, backend="triton")
    assert found.state.data_ptr() == state.data_ptr()
    assert_bitwise((found.out, state.contiguous()), tuple(expected))
    assert torch.equal(pool.isnan(), gaps)


@pytest.mark.parametrize(("first", "second"), [("reference", "triton"), ("triton", "reference"), ("triton", "triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_backend_goes_on_where_another_stopped(first, second, dtype):
    """Prefill by chunks, decode token by token, verify and take back, prefill again: as if one had done it all."""
    call = make(B=2, T=70, dtype=dtype)
    at = lambda start, end: tuple(x[:, start:end] for x in call[:5])  # noqa: E731
    outs = []
    out, state = ops.kda_chunk(*at(0, 40), call.state, backend=first)
    outs.append(out)
    for t in (40, 41):
        out, state = ops.kda_recurrent(*at(t, t + 1), state, backend=second)
        outs.append(out)
    slots = torch.stack([state, *[torch.full_like(state, torch.nan)] * 2], dim=1)
    one, two = (torch.full((2,), n, dtype=torch.int32) for n in (1, 2))
    out, slots = ops.kda_verify(*at(42, 45), slots, one, backend=first)
    outs.append(out[:, :2])
    out, slots = ops.kda_verify(*at(44, 45), slots, two, backend=second)
    outs.append(out)
    out, state = ops.kda_chunk(*at(45, 70), slots[:, 0], backend=second)
    outs.append(out)
    assert_defined((torch.cat(outs, dim=1), state), call)


def test_same_bits_every_time():
    call = make(B=2, T=70, dtype=torch.bfloat16)
    assert_bitwise(tuple(ops.kda_chunk(*call, backend="triton")), tuple(ops.kda_chunk(*call, backend="triton")))
