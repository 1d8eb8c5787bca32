"""What the causal convolution promises about arguments, results and memory."""

from __future__ import annotations

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.donation import debug_donation
from glm5fn.ops.conv import causal_conv1d, causal_conv1d_update
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs.conv import make
from glm5fn.testing.trace import assert_traceable

X, WEIGHT, STATE = torch.ones(2, 5, 3), torch.ones(3, 4), torch.zeros(2, 6, 3)
ONE = torch.ones(2, dtype=torch.int32)


def cu(*offsets, dtype=torch.int32):
    return torch.tensor(offsets, dtype=dtype)


def conv(**changed):
    return lambda **k: causal_conv1d(**{"x": X, "weight": WEIGHT, "state": STATE, **changed}, **k)


def packed(offsets, **changed):
    return conv(**{"x": X[:1], "cu_seqlens": offsets, "state": None, **changed})


def update(**changed):
    call = {"x": X[:, :2], "weight": WEIGHT, "bias": None, "state": STATE, "num_accepted": ONE, **changed}
    return lambda **k: causal_conv1d_update(**call, **k)


REFUSED = {
    "x has no time": (conv(x=X[0]), "causal_conv1d: x must have 3 dimensions [B, T, D], got 2: [5, 3]."),
    "x is an integer": (
        conv(x=X.int()),
        "causal_conv1d: x must be bfloat16 or float16 or float32 or float64, got int32.",
    ),
    "weight as on disk": (conv(weight=WEIGHT[:, None]), "causal_conv1d: weight must have 2 dimensions [D, W], got 3"),
    "weight has other channels": (conv(weight=WEIGHT[:2]), "its dimension 0 (D) must be 3, got 2: [2, 4]."),
    "weight has no taps": (conv(weight=WEIGHT[:, :0]), "weight must have at least one tap, got [3, 0]."),
    "bias has other channels": (conv(bias=torch.ones(4)), "causal_conv1d: bias must be [D]"),
    "state has other rows": (conv(state=STATE[:1]), "causal_conv1d: state must be [N, rows, D] with N=2"),
    "state is too short": (
        conv(state=STATE[:, :2]),
        "causal_conv1d: state must hold at least W-1 = 3 rows, got 2: [2, 2, 3].",
    ),
    "state has another dtype": (
        conv(state=STATE.half()),
        "causal_conv1d: x and state must have the same dtype, got float32 and float16.",
    ),
    "state is elsewhere": (
        conv(state=STATE.to("meta")),
        "causal_conv1d: x and state must have the same device, got cpu and meta.",
    ),
    "unknown activation": (conv(activation="gelu"), "causal_conv1d: activation must be 'silu' or None, got 'gelu'."),
    "packed with two rows": (packed(cu(0, 5), x=X), "so B must be 1, got 2."),
    "cu_seqlens is int64": (packed(cu(0, 5, dtype=torch.int64)), "cu_seqlens must be int32, got int64."),
    "cu_seqlens is a matrix": (packed(cu(0, 5)[None]), "cu_seqlens must have 1 dimensions"),
    "cu_seqlens is empty": (packed(cu()), "cu_seqlens must hold N+1 offsets, got an empty tensor."),
    "cu_seqlens starts late": (packed(cu(1, 5)), "must start at 0, never fall and end at T=5, got [1, 5]."),
    "cu_seqlens falls": (packed(cu(0, 3, 2, 5)), "got [0, 3, 2, 5]."),
    "cu_seqlens ends early": (packed(cu(0, 4)), "got [0, 4]."),
    "packed state of another N": (packed(cu(0, 2, 5), state=STATE[:1]), "state must be [N, rows, D] with N=2"),
    "nothing accepted": (
        update(num_accepted=0 * ONE),
        "causal_conv1d_update: num_accepted must be 1 to num_spec+1 = 4 in every row (1 after a prefill), got [0, 0].",
    ),
    "too much accepted": (update(num_accepted=5 * ONE), "num_accepted must be 1 to num_spec+1 = 4 in every row"),
    "num_accepted is int64": (update(num_accepted=ONE.long()), "num_accepted must be int32, got int64."),
    "num_accepted of another N": (update(num_accepted=ONE[:1]), "num_accepted must be [N] with N=2"),
    "too many tokens": (
        update(x=X),
        "T must be at most num_spec+1 = 4 with this state, got 5. Pass fewer tokens, or allocate the state with "
        "num_spec=4.",
    ),
    "overlapping donation": (
        conv(state=STATE[:1].expand(2, -1, -1), donate=True),
        "causal_conv1d: donate=True overwrites state, but its elements share memory (strides [0, 3, 1], as after "
        "expand). Pass state.contiguous().",
    ),
    "donation while recording": (
        conv(x=X.clone().requires_grad_(), donate=True),
        "causal_conv1d: donate=True overwrites state, which gradients need.",
    ),
}


@pytest.mark.nothing_runs
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_writing(backend, case):
    call, text = REFUSED[case]
    with poison.unchanged(X, WEIGHT, STATE, ONE), pytest.raises(ContractError) as error:
        call(backend=backend)
    assert text in str(error.value)


def test_no_option_is_swallowed():
    with pytest.raises(TypeError):
        causal_conv1d(X, WEIGHT, initial_state=STATE)


def calls(num_spec=3):
    dense, packed = make(num_spec=num_spec), make(lengths=[0, 2, 7], num_spec=num_spec)
    some = {**dense._asdict(), "x": dense.x[:, :3]}
    del some["cu_seqlens"]
    return {
        "dense": (causal_conv1d, dense._asdict()),
        "packed": (causal_conv1d, packed._asdict()),
        "no tokens": (causal_conv1d, {**dense._asdict(), "x": dense.x[:, :0]}),
        "plain update": (causal_conv1d_update, some),
        "update": (causal_conv1d_update, {**some, "num_accepted": torch.tensor([1, 4], dtype=torch.int32)}),
    }


@pytest.mark.parametrize("case", calls())
def test_inputs_are_untouched_and_results_are_new(backend, case):
    function, call = calls()[case]
    call = {name: poison.guarded(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    with poison.unchanged(*call.values()), poison.nan_empty():
        result = function(**call, backend=backend)
    given = {x.untyped_storage().data_ptr() for x in call.values() if x is not None}
    for x in result:
        assert x.isfinite().all()
        assert x.untyped_storage().data_ptr() not in given


@pytest.mark.parametrize("case", calls())
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_donation_reuses_the_memory(backend, case, layout):
    function, call = calls()[case]
    expected = function(**call, backend=backend)
    state = call["state"].clone() if layout == "contiguous" else poison.strided(call["state"])
    result = function(**{**call, "state": state}, donate=True, backend=backend)
    assert result.state.data_ptr() == state.data_ptr()
    assert result.state.stride() == state.stride()
    assert_bitwise(tuple(result), tuple(expected))


def test_debug_donation_catches_the_next_use(backend):
    given = make()
    view = given.state[0]
    with debug_donation():
        _, state = causal_conv1d(given.x, given.weight, state=given.state, donate=True, backend=backend)
        causal_conv1d(given.x, given.weight, state=state, backend=backend)
        assert view.isnan().all()
        with pytest.raises(ContractError, match=r"was donated to causal_conv1d before.*Use the state which"):
            causal_conv1d_update(given.x, given.weight, None, given.state, backend=backend)
    assert state.isfinite().all()


@pytest.mark.parametrize("case", calls())
def test_traceable(backend, case):
    function, call = calls()[case]
    assert_traceable(function, **call, backend=backend)


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("case", calls())
def test_gradients(backend, case):
    function, call = calls()[case]
    floats = {n: x.double().requires_grad_() for n, x in call.items() if x is not None and x.dtype == torch.float32}

    def result(*values):
        return tuple(function(**{**call, **dict(zip(floats, values, strict=True))}, backend=backend))

    assert torch.autograd.gradcheck(result, tuple(floats.values()))
