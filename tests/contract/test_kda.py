"""What Kimi delta attention promises about arguments, results and memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glm5fn.dispatch import ContractError
from glm5fn.donation import debug_donation
from glm5fn.ops.kda import kda_chunk, kda_gate, kda_recurrent, kda_verify
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs.kda import make, offsets
from glm5fn.testing.trace import assert_traceable

FORMS = [kda_chunk, kda_recurrent]
GOOD = make(B=2, T=3, H=2, K=4, V=5)._asdict()
ONE = torch.ones(2, dtype=torch.int32)
SLOTS = torch.zeros(2, 4, 2, 5, 4)
GATE = {"f": torch.zeros(2, 3, 2, 4), "A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 4)}


def cut(name, *index):
    return {name: GOOD[name][index]}


def to(name, what):
    return {name: GOOD[name].to(what)}


REFUSED = {
    "q has three axes": (cut("q", 0), "q must have 4 dimensions [B, T, H, K], got 3: [3, 2, 4]."),
    "q is an integer": (to("q", torch.int32), "q must be bfloat16 or float16 or float32 or float64, got int32."),
    "k has other channels": (
        cut("k", ..., slice(3)),
        "k must be [B, T, H, K] with B=2, T=3, H=2, K=4, so its dimension 3 (K) must be 4, got 3: [2, 3, 2, 3].",
    ),
    "k has other heads": (cut("k", slice(None), slice(None), slice(1)), "its dimension 2 (H) must be 2, got 1"),
    "v has other tokens": (cut("v", slice(None), slice(2)), "v must be [B, T, H, V]"),
    "v has another dtype": (to("v", torch.float16), "q and v must have the same dtype, got float32 and float16."),
    "g per head": (cut("g", ..., 0), "g must have 4 dimensions [B, T, H, K], got 3"),
    "g is bfloat16": (to("g", torch.bfloat16), "g must be float32, got bfloat16."),
    "g is float64": (to("g", torch.float64), "g must be float32, got float64."),
    "beta per channel": ({"beta": GOOD["g"]}, "beta must have 3 dimensions [B, T, H], got 4"),
    "beta is bfloat16": (to("beta", torch.bfloat16), "beta must be float32, got bfloat16."),
    "state is K-first": (
        {"state": GOOD["state"].mT},
        "state must be [N, H, V, K] with N=2, H=2, V=5, K=4, so its dimension 2 (V) must be 5, got 4: [2, 2, 4, 5].",
    ),
    "state of another N": (cut("state", slice(1)), "its dimension 0 (N) must be 2, got 1"),
    "state is bfloat16": (
        to("state", torch.bfloat16),
        "g and state must have the same dtype, got float32 and bfloat16.",
    ),
    "state is elsewhere": (to("state", "meta"), "q and state must have the same device, got cpu and meta."),
    "k is elsewhere": (to("k", "meta"), "q and k must have the same device, got cpu and meta."),
    "packed with two rows": ({"cu_seqlens": offsets([3])}, "so B must be 1, got 2."),
    "donation while recording": (
        {"v": GOOD["v"].clone().requires_grad_(), "donate": True},
        "donate=True overwrites state, which gradients need. Leave donate=False, or call under torch.no_grad().",
    ),
    "overlapping donation": (
        {"state": GOOD["state"][:1].expand(2, -1, -1, -1), "donate": True},
        "donate=True overwrites state, but its elements share memory",
    ),
}
VERIFY_REFUSED = {
    "states without slots": ({"states": SLOTS[:, 0]}, "states must have 5 dimensions [N, slots, H, V, K], got 4"),
    "states are bfloat16": ({"states": SLOTS.bfloat16()}, "g and states must have the same dtype"),
    "nothing accepted": ({"num_accepted": 0 * ONE}, "num_accepted must be 1 to num_spec+1 = 4 in every row"),
    "too much accepted": ({"num_accepted": 5 * ONE}, "(1 after a prefill), got [5, 5]."),
    "num_accepted is int64": ({"num_accepted": ONE.long()}, "num_accepted must be int32, got int64."),
    "num_accepted of another N": ({"num_accepted": ONE[:1]}, "num_accepted must be [N] with N=2"),
    "too many tokens": (
        {"states": SLOTS[:, :2]},
        "T must be at most num_spec+1 = 2 with this state, got 3. Pass fewer tokens, or allocate the state with "
        "num_spec=2.",
    ),
}
GATE_REFUSED = {
    "f has three axes": ({"f": GATE["f"][0]}, "kda_gate: f must have 4 dimensions [B, T, H, K], got 3: [3, 2, 4]."),
    "A_log per channel": ({"A_log": GATE["dt_bias"]}, "kda_gate: A_log must have 1 dimensions [H], got 2: [2, 4]."),
    "dt_bias as on disk": ({"dt_bias": torch.zeros(8)}, "kda_gate: dt_bias must have 2 dimensions [H, K], got 1: [8]."),
    "dt_bias is an integer": ({"dt_bias": torch.zeros(2, 4, dtype=torch.int8)}, "dt_bias must be bfloat16 or"),
    "A_log is elsewhere": ({"A_log": GATE["A_log"].to("meta")}, "f and A_log must have the same device"),
    "bound is positive": ({"lower_bound": 5.0}, "kda_gate: lower_bound must be at most 0"),
    "bound is nan": ({"lower_bound": float("nan")}, "or None for the softplus form, got nan."),
}


def refuses(call, text, given):
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    with poison.unchanged(*tensors), pytest.raises(ContractError) as error:
        call(**given)
    assert text in str(error.value)
    assert str(error.value).startswith(call.__name__ + ": ")


@pytest.mark.nothing_runs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_writing(backend, form, case):
    changed, text = REFUSED[case]
    refuses(form, text, {**GOOD, **changed, "backend": backend})


@pytest.mark.nothing_runs
@pytest.mark.parametrize("case", VERIFY_REFUSED)
def test_verify_refuses_before_writing(backend, case):
    changed, text = VERIFY_REFUSED[case]
    given = {**GOOD, "states": SLOTS, "num_accepted": ONE, **changed, "backend": backend}
    del given["state"]
    refuses(kda_verify, text, given)


@pytest.mark.nothing_runs
@pytest.mark.parametrize("case", GATE_REFUSED)
def test_gate_refuses(backend, case):
    changed, text = GATE_REFUSED[case]
    refuses(kda_gate, text, {**GATE, **changed, "backend": backend})


@pytest.mark.nothing_runs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], []])
def test_bad_offsets_are_refused(backend, form, bad):
    call = {name: x[:1] for name, x in GOOD.items() if name != "state"}
    refuses(form, "cu_seqlens must", {**call, "cu_seqlens": torch.tensor(bad, dtype=torch.int32), "backend": backend})


def calls():
    """(operation, its arguments, the argument that can be donated)."""
    packed = [0, 3, 37]
    rows = make(B=1, T=40, N=3)._asdict()
    states = torch.randn(2, 4, 2, 5, 4)
    accepted = torch.tensor([4, 2], dtype=torch.int32)
    verify = {**{n: x for n, x in GOOD.items() if n != "state"}, "states": states, "num_accepted": accepted}
    return {
        "gate": (kda_gate, GATE, None),
        "chunk": (kda_chunk, make(T=40)._asdict(), "state"),
        "chunk packed": (kda_chunk, {**rows, "cu_seqlens": offsets(packed)}, "state"),
        "chunk nothing": (kda_chunk, make(T=0)._asdict(), "state"),
        "recurrent": (kda_recurrent, GOOD, "state"),
        "recurrent packed": (
            kda_recurrent,
            {**make(B=1, T=4, N=3)._asdict(), "cu_seqlens": offsets([1, 0, 3])},
            "state",
        ),
        "recurrent nothing": (kda_recurrent, make(T=0)._asdict(), "state"),
        "verify": (kda_verify, verify, "states"),
    }


DONATING = [case for case, (*_, name) in calls().items() if name]


@pytest.mark.parametrize("case", calls())
def test_inputs_are_untouched_and_results_are_new(backend, case):
    function, call, _ = calls()[case]
    call = {name: poison.guarded(x) for name, x in call.items()}
    with poison.unchanged(*call.values()), poison.nan_empty():
        result = function(**call, backend=backend)
    given = {x.untyped_storage().data_ptr() for x in call.values()}
    for x in pytree.tree_leaves(result):
        assert x.isfinite().all()
        assert x.numel() == 0 or x.untyped_storage().data_ptr() not in given


@pytest.mark.parametrize("case", DONATING)
@pytest.mark.parametrize("layout", ["contiguous", "one layer of many", "strided"])
def test_donation_reuses_the_memory(backend, case, layout):
    function, call, name = calls()[case]
    expected = function(**call, backend=backend)
    state = call[name].clone()
    if layout == "one layer of many":
        state = torch.stack([state, torch.full_like(state, torch.nan)], dim=1)[:, 0]
    elif layout == "strided":
        state = poison.strided(state)
    result = function(**{**call, name: state}, donate=True, backend=backend)
    assert result.state.data_ptr() == state.data_ptr()
    assert result.state.stride() == state.stride()
    assert_within_budget(tuple(result), tuple(expected))


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that was made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {
            x.untyped_storage().data_ptr() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_donation_makes_no_second_state(backend, form, packed):
    call = make(B=1 if packed else 64, T=3, K=64, V=64, N=64)._asdict()
    packing = offsets([1] * 3 + [0] * 61) if packed else None
    size = call["state"].untyped_storage().nbytes()
    with LargestAllocation() as kept:
        form(**call, cu_seqlens=packing, backend=backend)
    assert kept.bytes >= size, "this check cannot see a copy of the state"
    with LargestAllocation() as donated:
        form(**call, cu_seqlens=packing, donate=True, backend=backend)
    assert donated.bytes < size


@pytest.mark.parametrize("case", DONATING)
def test_debug_donation_catches_the_next_use(backend, case):
    function, call, name = calls()[case]
    expected = function(**call, backend=backend)
    given = call[name].clone()
    with debug_donation():
        result = function(**{**call, name: given}, donate=True, backend=backend)
        assert_bitwise(tuple(result), tuple(expected))
        assert given.isnan().all()
        with pytest.raises(ContractError, match=f"{name} was donated to {function.__name__} before"):
            function(**{**call, name: given}, backend=backend)


@pytest.mark.parametrize("case", calls())
def test_traceable(backend, case):
    function, call, _ = calls()[case]
    assert_traceable(function, **call, backend=backend)


def test_donation_is_traceable(backend):
    call = {n: x[:, :1] if n != "state" else x for n, x in GOOD.items()}
    expected = kda_recurrent(**call, backend=backend)
    torch.compiler.reset()
    step = torch.compile(kda_recurrent, fullgraph=True, backend="eager")
    state = call["state"].clone()
    result = step(**{**call, "state": state}, donate=True, backend=backend)
    assert_bitwise(tuple(result), tuple(expected))
    assert_bitwise(state, expected.state)


@pytest.mark.parametrize("case", calls())
def test_autocast_changes_nothing(backend, case):
    function, call, _ = calls()[case]
    expected = function(**call, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = function(**call, backend=backend)
    assert_bitwise(pytree.tree_leaves(result), pytree.tree_leaves(expected))


def gradient_calls():
    small = {"H": 1, "K": 3, "V": 2, "dtype": torch.float64}
    several = {**make(B=1, T=6, N=3, **small)._asdict(), "cu_seqlens": offsets([4, 0, 2])}
    verify = make(B=2, T=2, **small)._asdict()
    del verify["state"]
    verify |= {"states": torch.randn(2, 3, 1, 2, 3, dtype=torch.float64), "num_accepted": ONE + 1}
    gate = {"f": torch.randn(1, 2, 2, 3), "A_log": torch.randn(2), "dt_bias": torch.randn(2, 3)}
    gate = {name: x.double() for name, x in gate.items()}
    return {
        "gate": (kda_gate, gate),
        "gate softplus": (kda_gate, {**gate, "lower_bound": None}),
        "chunk": (kda_chunk, make(B=2, T=5, **small)._asdict()),
        "two chunks": (kda_chunk, make(B=1, T=35, **small)._asdict()),
        "chunk packed": (kda_chunk, several),
        "chunk repeated keys": (
            kda_chunk,
            make(B=1, T=6, keys="duplicate", beta="one", gate="tiny", **small)._asdict(),
        ),
        "chunk zero keys": (kda_chunk, make(B=1, T=6, keys="zero", **small)._asdict()),
        "recurrent": (kda_recurrent, make(B=2, T=5, **small)._asdict()),
        "recurrent packed": (kda_recurrent, several),
        "verify": (kda_verify, verify),
    }


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("case", gradient_calls())
def test_gradients(backend, case):
    function, call = gradient_calls()[case]
    leaves = {
        name: x.clone().requires_grad_()
        for name, x in call.items()
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64
    }

    def result(*values):
        return tuple(
            pytree.tree_leaves(function(**{**call, **dict(zip(leaves, values, strict=True))}, backend=backend))
        )

    assert torch.autograd.gradcheck(result, tuple(leaves.values()))


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["bound", "strong", "mixed"])
def test_gradients_stay_finite_under_strong_gates(backend, form, gate):
    call = [x.requires_grad_() for x in make(T=70, gate=gate)]
    form(*call, backend=backend).out.square().sum().backward()
    for x in call:
        assert x.grad.isfinite().all()


@pytest.mark.no_launch
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_do(backend, form, B, T):
    call = make(B=B, T=T)
    result = form(*call, backend=backend)
    assert result.out.shape == (B, T, 2, 6)
    assert_bitwise(result.state, call.state)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_once_used_at_other_lengths(backend, form):
    torch.compiler.reset()
    compiled = torch.compile(form, fullgraph=True, backend="eager")
    for B, T in ((1, 3), (2, 5), (3, 40)):
        call = make(B=B, T=T)
        assert_bitwise(tuple(compiled(*call, backend=backend)), tuple(form(*call, backend=backend)))
