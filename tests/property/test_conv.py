"""The causal convolution against its definition, and what holds for any cut, packing and acceptance.

States are copies of inputs, so they are compared bit for bit. Outputs may differ in the last bit: PyTorch computes the
end of an array with other instructions than its middle.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.conv import causal_conv1d, causal_conv1d_update
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget, error_report
from glm5fn.testing.inputs.conv import make
from glm5fn.testing.oracle import conv as oracle

TOKENS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 130]
LENGTHS = [0, 1, 5, 0, 0, 2, 3, 0]
quick = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_definition(backend, dtype, W, lengths):
    for bias, activation in ((True, "silu"), (False, None)):
        call = make(W=W, lengths=lengths, bias=bias, dtype=dtype)._asdict()
        found = causal_conv1d(**call, activation=activation, backend=backend)
        exact = oracle.causal_conv1d(**call, activation=activation)
        low = oracle.causal_conv1d(**call, activation=activation, dtype=torch.float32)
        assert found.out.dtype == found.state.dtype == dtype
        assert_within_budget(found.out, exact[0], low[0].to(dtype))
        assert_bitwise(found.state, exact[1].to(dtype))


@pytest.mark.needs("float64")
@pytest.mark.parametrize("T", TOKENS)
def test_definition_in_float64(backend, T):
    call = make(T=T, dtype=torch.float64)._asdict()
    for found, exact in zip(causal_conv1d(**call, backend=backend), oracle.causal_conv1d(**call), strict=True):
        assert error_report(found, exact).max_abs < 1e-10


def test_without_state_starts_from_zeros(backend):
    call = make(T=2)._asdict()
    zeros = causal_conv1d(**{**call, "state": torch.zeros_like(call["state"])}, backend=backend)
    assert_bitwise(tuple(causal_conv1d(**{**call, "state": None}, backend=backend)), tuple(zeros))


@quick
@given(T=st.integers(0, 12), cut=st.integers(0, 12), W=st.integers(1, 5), spec=st.integers(0, 2))
def test_cut_anywhere(backend, T, cut, W, spec):
    x, weight, bias, state, _ = make(T=T, W=W, num_spec=spec)
    whole = causal_conv1d(x, weight, bias, state, backend=backend)
    head = causal_conv1d(x[:, :cut], weight, bias, state, backend=backend)
    tail = causal_conv1d(x[:, cut:], weight, bias, head.state, backend=backend)
    assert_within_budget(torch.cat([head.out, tail.out], dim=1), whole.out)
    assert_bitwise(tail.state, whole.state)


@quick
@given(lengths=st.lists(st.integers(0, 6), max_size=5), W=st.integers(1, 5), spec=st.integers(0, 2))
def test_packed_is_a_loop(backend, lengths, W, spec):
    x, weight, bias, state, offsets = make(lengths=lengths, W=W, num_spec=spec)
    found = causal_conv1d(x, weight, bias, state, cu_seqlens=offsets, backend=backend)
    start = 0
    for n, length in enumerate(lengths):
        one = causal_conv1d(x[:, start : start + length], weight, bias, state[n : n + 1], backend=backend)
        assert_within_budget(found.out[:, start : start + length], one.out)
        assert_bitwise(found.state[n : n + 1], one.state)
        start += length
    causal_conv1d(x, weight, bias, cu_seqlens=offsets, backend=backend)  # no sequence at all is legal too


def test_rows_do_not_know_each_other(backend):
    x, weight, bias, state, _ = make(B=4)
    order = torch.tensor([2, 0, 3, 1])
    found = causal_conv1d(x, weight, bias, state, backend=backend)
    permuted = causal_conv1d(x[order], weight, bias, state[order], backend=backend)
    assert_within_budget(permuted.out, found.out[order])
    assert_bitwise(permuted.state, found.state[order])


def test_nan_stays_in_its_sequence_and_unused_rows_are_not_read(backend):
    x, weight, bias, state, offsets = make(lengths=[4, 0, 3, 2], num_spec=2)
    clean = causal_conv1d(x, weight, bias, state, cu_seqlens=offsets, backend=backend)
    x[:, 4:7] = torch.nan
    state[2] = torch.nan
    state[:, 3:] = torch.nan
    found = causal_conv1d(x, weight, bias, state, cu_seqlens=offsets, backend=backend)
    kept, sequences = [0, 1, 2, 3, 7, 8], [0, 1, 3]
    assert_bitwise(found.out[:, kept], clean.out[:, kept])
    assert_bitwise(found.state[sequences, :3], clean.state[sequences, :3])
    assert_bitwise(found.state[:, 3:], state[:, 3:])


def test_strided_inputs(backend):
    x, weight, bias, state, offsets = make(lengths=LENGTHS, num_spec=1)
    apart = [poison.strided(t) for t in (x, weight, bias, state)]
    with poison.unchanged(*apart):
        found = causal_conv1d(*apart, cu_seqlens=offsets, backend=backend)
    assert_bitwise(tuple(found), tuple(causal_conv1d(x, weight, bias, state, cu_seqlens=offsets, backend=backend)))


def test_one_rounding(backend):
    call = make(T=33, dtype=torch.bfloat16, bias=False)
    wide = causal_conv1d(*(t.float() for t in call[:2]), None, call.state.float(), backend=backend)
    found = causal_conv1d(call.x, call.weight, None, call.state, backend=backend)
    assert_bitwise(tuple(found), (wide.out.bfloat16(), wide.state.bfloat16()))


# --- tokens that may be taken back -----------------------------------------------------------------------------------


def test_worked_example(backend):
    """W = 4, room for S = 3; letters are inputs, and the taps spell the window that each output saw."""
    names = ["a", "b", "c", "x0", "x1", "x2", "x3", "y0", "y1", "y2", "y3", "z0", "z1", "w0", "-"]
    letters = {name: 1.0 + i for i, name in enumerate(names)}
    taps = torch.tensor([[64.0**3, 64.0**2, 64.0, 1.0]])

    def row(text):
        return torch.tensor([letters[name] for name in text.split()]).view(1, -1, 1)

    def step(tokens, state, accepted):
        accepted = torch.tensor([accepted], dtype=torch.int32)
        return causal_conv1d_update(
            row(tokens), taps, None, state, num_accepted=accepted, activation=None, backend=backend
        )

    def spell(out):
        return ["".join(names[(int(o) >> shift) % 64 - 1] for shift in (18, 12, 6, 0)) for o in out.flatten()]

    out, state = step("x0 x1 x2 x3", row("a b c - - -"), 1)
    assert spell(out) == ["abcx0", "bcx0x1", "cx0x1x2", "x0x1x2x3"]
    assert_bitwise(state, row("b c x0 x1 x2 x3"))
    out, state = step("y0 y1 y2 y3", state, 2)
    assert spell(out) == ["cx0x1y0", "x0x1y0y1", "x1y0y1y2", "y0y1y2y3"]
    assert_bitwise(state, row("x0 x1 y0 y1 y2 y3"))
    out, state = step("z0 z1", state, 4)
    assert spell(out) == ["y1y2y3z0", "y2y3z0z1"]
    assert_bitwise(state, row("y2 y3 z0 z1 y2 y3"))
    out, state = step("w0", state, 2)
    assert spell(out) == ["y3z0z1w0"]
    assert_bitwise(state, row("z0 z1 w0 z1 y2 y3"))
    out, state = causal_conv1d_update(row("a"), taps, None, state, activation=None, backend=backend)
    assert spell(out) == ["z0z1w0a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 2, 4])
def test_update_definition(backend, dtype, T):
    x, weight, bias, state, _ = make(B=4, T=T, num_spec=3, dtype=dtype)
    accepted = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    found = causal_conv1d_update(x, weight, bias, state, num_accepted=accepted, backend=backend)
    exact = oracle.causal_conv1d_update(x, weight, bias, state, num_accepted=accepted)
    low = oracle.causal_conv1d_update(x, weight, bias, state, num_accepted=accepted, dtype=torch.float32)
    assert_within_budget(found.out, exact[0], low[0].to(dtype))
    assert_bitwise(found.state, exact[1].to(dtype))


def test_plain_update_is_a_step_of_the_convolution(backend):
    x, weight, bias, state, _ = make(T=6, num_spec=2)
    expected = causal_conv1d(x, weight, bias, state, backend=backend)
    assert_bitwise(tuple(causal_conv1d_update(x, weight, bias, state, backend=backend)), tuple(expected))


@quick
@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6))
def test_taking_back_equals_never_having_seen(backend, steps):
    """Verify T tokens, keep some, go on: the outputs are those of the kept tokens run straight through."""
    spec = 3
    stream, weight, bias, state, _ = make(B=1, T=4 * len(steps), num_spec=spec, seed=len(steps))
    kept = stream[:, :0]
    accepted = 1
    start = state[:, :3]
    for i, (T, keep) in enumerate(steps):
        x = stream[:, 4 * i : 4 * i + T]
        call = torch.tensor([accepted], dtype=torch.int32)
        out, state = causal_conv1d_update(x, weight, bias, state, num_accepted=call, backend=backend)
        straight = causal_conv1d(torch.cat([kept, x], dim=1), weight, bias, start, backend=backend)
        assert_within_budget(out, straight.out[:, kept.shape[1] :])
        accepted = min(keep, T)
        kept = torch.cat([kept, x[:, :accepted]], dim=1)


def test_update_reads_only_its_window(backend):
    x, weight, bias, state, _ = make(B=1, T=2, num_spec=3)
    accepted = torch.tensor([2], dtype=torch.int32)
    clean = causal_conv1d_update(x, weight, bias, state, num_accepted=accepted, backend=backend)
    state[:, [0, 4, 5]] = torch.nan
    found = causal_conv1d_update(x, weight, bias, state, num_accepted=accepted, backend=backend)
    assert_bitwise(found.out, clean.out)
    assert_bitwise(found.state[:, :4], clean.state[:, :4])
    assert found.state[:, 4:].isnan().all()
