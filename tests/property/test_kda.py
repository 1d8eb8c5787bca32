"""Kimi delta attention against its definition, and what holds for any cut, packing, gate and acceptance."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.kda import kda_chunk, kda_gate, kda_recurrent, kda_verify
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget, error_report
from glm5fn.testing.inputs.kda import BETAS, GATES, KEYS, make, offsets
from glm5fn.testing.oracle import kda as oracle

FORMS = [kda_chunk, kda_recurrent]
TOKENS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 130]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
quick = settings(
    max_examples=4 if INTERPRETED else 15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
every_form = pytest.mark.parametrize("form", FORMS)


def assert_defined(form, call, backend, **options):
    """Assert that ``form`` is within the budget of the definition."""
    found = form(*call, **options, backend=backend)
    exact = oracle.kda(*call, **options)
    out, state = oracle.kda(*call, **options, dtype=torch.float32)
    assert found.out.dtype == call[0].dtype
    assert found.state.dtype == torch.float32
    assert_within_budget(tuple(found), exact, (out.to(call[0].dtype), state), what=form.__name__)


@every_form
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_definition(backend, form, T, dtype):
    assert_defined(form, make(T=T, dtype=dtype), backend)


@every_form
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("keys", KEYS)
def test_regimes(backend, form, gate, beta, keys, at_most):
    assert_defined(form, make(B=1, T=at_most(130, 70), gate=gate, beta=beta, keys=keys), backend)


@every_form
@pytest.mark.parametrize("K", [1, 16])
@pytest.mark.parametrize("V", [1, 20])
def test_sizes(backend, form, K, V):
    assert_defined(form, make(T=40, H=3, K=K, V=V), backend, scale=0.7)


@pytest.mark.long
@every_form
@pytest.mark.parametrize("gate", ["bound", "strong"])
def test_strong_gates_for_4096_tokens(backend, form, gate):
    assert_defined(form, make(B=1, T=4096, H=1, gate=gate), backend)


@pytest.mark.needs("float64")
@every_form
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("gate", ["uniform", "mixed"])
def test_definition_in_float64(backend, form, T, gate):
    call = make(T=T, gate=gate, dtype=torch.float64)
    for found, exact in zip(form(*call, backend=backend), oracle.kda(*call), strict=True):
        assert found.dtype == torch.float64
        assert error_report(found, exact).max_abs < 1e-10


@every_form
def test_without_state_starts_from_zeros(backend, form):
    call = make(T=40)
    zeros = call._replace(state=torch.zeros_like(call.state))
    assert_bitwise(tuple(form(*call[:5], backend=backend)), tuple(form(*zeros, backend=backend)))


@every_form
def test_small_numbers(backend, form):
    """beta = 0 and g = 0 leave the state as it is; beta = 1 and a strong gate leave only the last token."""
    q, k, v, g, beta, state = make(T=33)
    kept = form(q, k, v, 0 * g, 0 * beta, state, backend=backend)
    assert torch.equal(kept.state, state)
    last = form(q, k, v, torch.full_like(g, -200.0), torch.ones_like(beta), state, backend=backend)
    assert_within_budget(last.state, v[:, -1, :, :, None].double() * k[:, -1, :, None, :].double())


def test_forms_agree_at_the_released_head_size(backend):
    call = make(B=1, T=200, H=1, K=128, V=128)
    assert_defined(kda_chunk, call, backend)
    assert_defined(kda_recurrent, call, backend)


@pytest.mark.long
def test_one_hundred_thousand_tokens(backend):
    """The state neither drifts nor grows: the last state is that of the definition."""
    call = make(B=1, T=100_000, H=1, K=4, V=2, gate="tiny")
    found = kda_recurrent(*call, backend=backend)
    chunked = kda_chunk(*call, backend=backend)
    exact, low = oracle.kda(*call), oracle.kda(*call, dtype=torch.float32)
    assert_within_budget(tuple(found), exact, low)
    assert_within_budget(tuple(chunked), exact, low)


# --- cutting, packing, permuting
# ---------------------------------------------------------------------------------------


def part(call, *index):
    return tuple(x[index] for x in call[:5])


@every_form
@quick
@given(T=st.integers(0, 100), cuts=st.lists(st.integers(0, 100), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_cut_anywhere(backend, form, T, cuts, seed):
    call = make(T=T, gate=GATES[seed % len(GATES)], seed=seed)
    whole = form(*call, backend=backend)
    outs, state, ends = [], call.state, sorted(min(c, T) for c in cuts)
    for start, end in zip([0, *ends], [*ends, T], strict=True):
        out, state = form(*part(call, slice(None), slice(start, end)), state, backend=backend)
        outs.append(out)
    if form is kda_recurrent:
        assert_bitwise((torch.cat(outs, dim=1), state), tuple(whole))
    exact, low = oracle.kda(*call), oracle.kda(*call, dtype=torch.float32)
    assert_within_budget((torch.cat(outs, dim=1), state), exact, low)


@every_form
@quick
@given(lengths=st.lists(st.sampled_from([0, 0, 1, 2, 5, 31, 32, 33, 70]), max_size=5), seed=st.integers(0, 9))
def test_packed_is_a_loop(backend, form, lengths, seed):
    call = make(B=1, T=sum(lengths), N=len(lengths), gate=GATES[seed % len(GATES)], seed=seed)
    found = form(*call, cu_seqlens=offsets(lengths), backend=backend)
    exact = oracle.kda(*call, cu_seqlens=offsets(lengths))
    low = oracle.kda(*call, cu_seqlens=offsets(lengths), dtype=torch.float32)
    assert_within_budget(tuple(found), exact, low)
    start = 0
    for n, length in enumerate(lengths):
        here = slice(start, start + length)
        one = form(*part(call, slice(None), here), call.state[n : n + 1], backend=backend)
        pair = (found.out[:, here], found.state[n : n + 1])
        if form is kda_recurrent or length == 0:
            assert_bitwise(pair, tuple(one))
        else:
            assert_within_budget(pair, tuple(x[:, here] if x is exact[0] else x[n : n + 1] for x in exact), tuple(one))
        start += length


@every_form
def test_empty_sequences_pass_through_bit_for_bit(backend, form):
    lengths = [0, 3, 0, 40, 0]
    call = make(B=1, T=43, N=5)
    call.state[0], call.state[2], call.state[4] = -0.0, torch.nan, torch.inf
    found = form(*call, cu_seqlens=offsets(lengths), backend=backend)
    assert_bitwise(found.state[::2], call.state[::2])
    assert found.state[1::2].isfinite().all()
    empty = make(B=3, T=0)
    assert_bitwise(form(*empty, backend=backend).state, empty.state)
    assert form(*part(make(B=1, T=0), slice(None)), cu_seqlens=offsets([]), backend=backend).state.shape == (0, 2, 6, 8)


@every_form
def test_rows_do_not_know_each_other(backend, form):
    call = make(B=4, T=40)
    order = torch.tensor([2, 0, 3, 1])
    found = form(*call, backend=backend)
    permuted = form(*(x[order] for x in call), backend=backend)
    assert_within_budget(tuple(permuted), (found.out[order], found.state[order]))


@every_form
def test_nan_stays_in_its_sequence(backend, form):
    lengths = [5, 40, 0, 33]
    call = make(B=1, T=sum(lengths), N=4)
    clean = form(*call, cu_seqlens=offsets(lengths), backend=backend)
    for x in call[:5]:
        x[:, 5:45] = torch.nan
    call.state[1] = torch.nan
    found = form(*call, cu_seqlens=offsets(lengths), backend=backend)
    kept = [*range(5), *range(45, 78)]
    assert_bitwise(found.out[:, kept], clean.out[:, kept])
    assert_bitwise(found.state[[0, 2, 3]], clean.state[[0, 2, 3]])
    rows = make(B=3, T=40)
    clean = form(*rows, backend=backend)
    for x in rows:
        x[1] = torch.nan
    found = form(*rows, backend=backend)
    assert_bitwise(found.out[::2], clean.out[::2])
    assert_bitwise(found.state[::2], clean.state[::2])


@every_form
@pytest.mark.parametrize("lengths", [None, [3, 0, 37]])
def test_strided_inputs(backend, form, lengths):
    call = make(B=1 if lengths else 2, T=40, N=3 if lengths else 2)
    packing = None if lengths is None else offsets(lengths)
    expected = form(*call, cu_seqlens=packing, backend=backend)
    apart = [poison.strided(x) for x in call]
    with poison.unchanged(*apart):
        found = form(*apart, cu_seqlens=packing, backend=backend)
    assert_within_budget(tuple(found), tuple(expected))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in call]
    assert_within_budget(tuple(form(*turned, cu_seqlens=packing, backend=backend)), tuple(expected))


@every_form
def test_one_rounding(backend, form):
    call = make(T=40, dtype=torch.bfloat16)
    wide = form(*(x.float() for x in call), backend=backend)
    assert_bitwise(tuple(form(*call, backend=backend)), (wide.out.bfloat16(), wide.state))


# --- tokens that may be taken back
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 2, 4])
def test_verify_definition(backend, T, dtype):
    *tokens, _ = make(B=4, T=T, dtype=dtype)
    states = torch.randn(4, 4, 2, 6, 8)
    accepted = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    found = kda_verify(*tokens, states, accepted, backend=backend)
    exact = oracle.kda_verify(*tokens, states, accepted)
    out, low = oracle.kda_verify(*tokens, states, accepted, dtype=torch.float32)
    assert_within_budget(tuple(found), exact, (out.to(dtype), low))
    assert_bitwise(found.state[:, T:], states[:, T:])


@quick
@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5))
def test_taking_back_equals_never_having_seen(backend, steps):
    """Verify T tokens, keep some, go on: the outputs are those of the kept tokens run straight through."""
    call = make(B=1, T=4 * len(steps))
    states = torch.cat([call.state[:, None], torch.full((1, 3, *call.state.shape[1:]), torch.nan)], dim=1)
    state, accepted = call.state, 1
    for i, (T, keep) in enumerate(steps):
        tokens = part(call, slice(None), slice(4 * i, 4 * i + T))
        count = torch.tensor([accepted], dtype=torch.int32)
        out, states = kda_verify(*tokens, states, count, donate=True, backend=backend)
        assert_bitwise(out, kda_recurrent(*tokens, state, backend=backend).out)
        accepted = min(keep, T)
        state = kda_recurrent(*(x[:, :accepted] for x in tokens), state, backend=backend).state


def test_verify_reads_only_the_accepted_slot(backend):
    *tokens, _ = make(B=2, T=2)
    states = torch.full((2, 4, 2, 6, 8), torch.nan)
    states[0, 2], states[1, 0] = 1.0, 2.0
    found = kda_verify(*tokens, states, torch.tensor([3, 1], dtype=torch.int32), backend=backend)
    assert found.out.isfinite().all()
    assert_bitwise(found.state[:, 2:], states[:, 2:])


# --- the gate
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [-5.0, -0.5, None])
def test_gate_definition(backend, dtype, bound):
    f = (30 * torch.randn(2, 7, 3, 5)).to(dtype)
    A_log, dt_bias = torch.randn(3), torch.randn(3, 5)
    found = kda_gate(f, A_log, dt_bias, lower_bound=bound, backend=backend)
    exact = oracle.kda_gate(f, A_log, dt_bias, lower_bound=bound)
    low = oracle.kda_gate(f, A_log, dt_bias, lower_bound=bound, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert (found <= 0).all()
    assert bound is None or (found >= bound).all()
    assert_within_budget(found, exact, low)


def test_gate_values(backend):
    z = torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0]).view(1, 1, 1, 5)
    found = kda_gate(z, torch.zeros(1), torch.zeros(1, 5), backend=backend).flatten()
    wanted = torch.tensor([-0.08993, -0.59601, -2.5, -4.40399, -4.91007])
    assert (found - wanted).abs().max() < 1e-5
    soft = kda_gate(
        torch.full((1, 1, 1, 1), 50.0), torch.zeros(1), torch.zeros(1, 1), lower_bound=None, backend=backend
    )
    assert soft.item() == -50
