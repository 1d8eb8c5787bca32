"""Router, experts and clamped SwiGLU: values, gradients, paths and refusals."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.moe import clamped_swiglu, moe_experts, moe_route
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import moe as make
from glm5fn.testing.oracle import moe as exact
from glm5fn.testing.poison import guarded, nan_empty, strided, unchanged
from glm5fn.testing.trace import assert_traceable

only_reference = pytest.mark.needs("kernel for moe_")
OPS = {"moe_route": moe_route, "moe_experts": moe_experts, "clamped_swiglu": clamped_swiglu}
every_op = pytest.mark.parametrize(
    "op", [*(pytest.param(op, marks=only_reference) for op in ("moe_route", "moe_experts")), "clamped_swiglu"]
)
LOW = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = {"top_k": 3, "n_group": 1, "topk_group": 1, "norm_topk": True, "scale": 2.5}
ROUTES = {
    "plain": PLAIN,
    "groups": PLAIN | {"n_group": 4, "topk_group": 2},
    "one group of several": PLAIN | {"n_group": 3, "topk_group": 1, "top_k": 4},
    "groups of one expert": PLAIN | {"n_group": 12, "topk_group": 5},
    "as they are": PLAIN | {"norm_topk": False, "scale": 1.0},
    "all": PLAIN | {"top_k": 12},
    "one": PLAIN | {"top_k": 1},
}


def cases(op, **options):
    if op == "moe_route":
        return make.moe_route(**options) | PLAIN
    if op == "moe_experts":
        return make.moe_experts(**options) | {"limit": 1.0}
    return {"gate_up": 2 * make.moe_experts(**options)["w_gate_up"], "limit": 1.0}


@pytest.fixture(params=["gathered", "sorted", "blocks"])
def path(request, monkeypatch):
    """The reference backend's ways: gathered weights, one product per expert, blocks without host reads."""
    reference = "glm5fn.kernels.reference.moe."
    monkeypatch.setattr(reference + "_FEW_BYTES", {"gathered": 1 << 40}.get(request.param, 0))
    monkeypatch.setattr(reference + "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(reference + "_BLOCK_ROWS", 3)
    if request.param == "blocks":
        monkeypatch.setattr(reference + "_by_expert", importlib.import_module(reference[:-1])._by_block)
    return request.param


# --- moe_route


@only_reference
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_route_is_the_definition(route, ties, backend):
    arguments = make.moe_route(ties=ties, dtype=torch.float64, T=9) | ROUTES[route]
    found, wanted = moe_route(**arguments, backend=backend), exact.moe_route(**arguments)
    assert_bitwise(found.ids, wanted[1])
    torch.testing.assert_close(found.weights, wanted[0], rtol=1e-10, atol=1e-10)


@only_reference
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_route_in_low_precision(route, dtype, backend):
    arguments = make.moe_route(dtype=dtype, T=9) | ROUTES[route]
    found, wanted = moe_route(**arguments, backend=backend), exact.moe_route(**arguments)
    low = exact.moe_route(**arguments, dtype=torch.float32)
    assert found.weights.dtype == torch.float32
    assert found.ids.dtype == torch.int32
    assert_bitwise(found.ids, wanted[1])
    assert_within_budget(found.weights, wanted[0], low[0], what="weights")


@only_reference
def test_route_logits_are_float32(backend):
    """In bfloat16 the two logits would be equal and expert 0 would win."""
    x = torch.tensor([[[1.0, 1.0]]]).bfloat16()
    w_gate = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]]).bfloat16()
    options = PLAIN | {"top_k": 1}
    assert moe_route(x, w_gate, None, **options, backend=backend).ids.item() == 1


@only_reference
def test_route_ties_go_to_the_lower_expert(backend):
    found = moe_route(torch.zeros(1, 1, 4), torch.ones(300, 4), None, **PLAIN | {"top_k": 8}, backend=backend)
    assert found.ids.flatten().tolist() == list(range(8))
    torch.testing.assert_close(found.weights, torch.full((1, 1, 8), 2.5 / 8))


@only_reference
def test_route_group_ties_go_to_the_lower_group(backend):
    options = PLAIN | {"n_group": 4, "topk_group": 2, "top_k": 6}
    found = moe_route(torch.zeros(1, 1, 4), torch.ones(12, 4), None, **options, backend=backend)
    assert found.ids.flatten().tolist() == list(range(6))


@only_reference
def test_route_bias_chooses_but_does_not_weigh(backend):
    arguments = make.moe_route(E=4) | PLAIN | {"top_k": 2, "norm_topk": False, "scale": 1.0}
    arguments["bias"] = torch.tensor([0.0, 100.0, 0.0, 50.0])
    found = moe_route(**arguments, backend=backend)
    assert bool((found.ids == torch.tensor([1, 3])).all())
    scores = torch.sigmoid(arguments["x"] @ arguments["w_gate"].T)
    torch.testing.assert_close(found.weights, scores[..., [1, 3]])


@only_reference
def test_route_without_bias(backend):
    arguments = make.moe_route(ties=True) | PLAIN
    assert_bitwise(moe_route(**arguments | {"bias": None}, backend=backend), moe_route(**arguments, backend=backend))


@only_reference
def test_route_vanishing_scores_do_not_divide_by_zero(backend):
    x = torch.full((1, 1, 4), 1000.0)
    found = moe_route(x, -torch.ones(5, 4), None, **PLAIN, backend=backend)
    assert bool((found.weights == 0).all())


@only_reference
@pytest.mark.parametrize("route", ["plain", "groups", "as they are"])
def test_route_gradients(route, backend):
    arguments = make.moe_route(B=1, T=3, dtype=torch.float64) | ROUTES[route]
    x, w_gate = arguments.pop("x").requires_grad_(), arguments.pop("w_gate").requires_grad_()
    torch.autograd.gradcheck(lambda x, w: moe_route(x, w, **arguments, backend=backend).weights, (x, w_gate))


# --- moe_experts


@only_reference
@pytest.mark.parametrize("limit", [1.0, None])
@pytest.mark.parametrize(
    "sizes", [{}, {"T": 1, "B": 1}, {"T": 30}, {"top_k": 5}, {"E": 1, "top_k": 1}, {"I": 1, "D": 1}], ids=str
)
def test_experts_are_the_definition(sizes, limit, path, backend):
    arguments = make.moe_experts(**sizes, dtype=torch.float64) | {"limit": limit}
    found = moe_experts(**arguments, backend=backend)
    torch.testing.assert_close(found, exact.moe_experts(**arguments), rtol=1e-10, atol=1e-10)


@only_reference
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_experts_in_low_precision(dtype, path, backend):
    arguments = make.moe_experts(dtype=dtype, D=32, I=16, T=9) | {"limit": 1.0}
    found = moe_experts(**arguments, backend=backend)
    low = exact.moe_experts(**arguments, dtype=torch.float32, store=dtype).to(dtype)
    assert found.dtype == dtype
    assert_within_budget(found, exact.moe_experts(**arguments), low, what="moe_experts")


@only_reference
def test_experts_sum_is_rounded_once(path, backend):
    """Each expert adds 1 or 2^-9 of it; rounding after each addition in bfloat16 would lose the small ones."""
    x, ids = torch.ones(1, 1, 1).bfloat16(), torch.arange(5, dtype=torch.int32).view(1, 1, 5)
    weights = torch.tensor([1.0] + [2.0**-9] * 4).view(1, 1, 5)
    one = torch.full((5, 2, 1), 10.0).bfloat16()
    down = torch.ones(5, 1, 1).bfloat16()
    unit = moe_experts(x, ids[..., :1], weights[..., :1], one, down, limit=None, backend=backend)
    found = moe_experts(x, ids, weights, one, down, limit=None, backend=backend)
    assert found.item() == (unit.double() * (1 + 2.0**-7)).bfloat16().item()
    assert found.item() > unit.item()


@only_reference
def test_a_repeated_expert_counts_twice(path, backend):
    arguments = make.moe_experts(B=1, T=2, dtype=torch.float64) | {"limit": 1.0}
    arguments["ids"] = torch.tensor([[[3, 3], [0, 3]]], dtype=torch.int32)
    torch.testing.assert_close(moe_experts(**arguments, backend=backend), exact.moe_experts(**arguments))


@only_reference
@pytest.mark.parametrize("T", [2, 30])
def test_unused_experts_are_not_read(T, path, backend):
    arguments = make.moe_experts(only=[1, 3], T=T) | {"limit": 1.0}
    names = ("x", "weights", "w_gate_up", "w_down")
    results = []
    for value in (0.0, torch.nan):
        for name in ("w_gate_up", "w_down"):
            arguments[name] = arguments[name].detach().clone()
            arguments[name][[0, 2, 4]] = value
        leaves = [arguments[n].requires_grad_() for n in names]
        found = moe_experts(**arguments, backend=backend)
        results.append((found.detach(), *torch.autograd.grad(found.sum(), leaves)))
        for leaf in leaves:
            leaf.requires_grad_(False)
    assert_bitwise(results[1], results[0])


@only_reference
def test_experts_gradients(path, backend):
    arguments = make.moe_experts(B=1, T=4, D=3, I=2, E=4, dtype=torch.float64)
    ids = arguments.pop("ids")
    leaves = [x.requires_grad_() for x in arguments.values()]
    torch.autograd.gradcheck(lambda x, *rest: moe_experts(x, ids, *rest, limit=0.5, backend=backend), leaves)


@only_reference
def test_nan_token_stays_in_its_place(path, backend):
    clean = make.moe_experts(T=9) | {"limit": 1.0}
    broken = clean | {"x": clean["x"].clone()}
    broken["x"][0, 4] = torch.nan
    found, wanted = (moe_experts(**a, backend=backend) for a in (broken, clean))
    assert bool(found[0, 4].isnan().all())
    found[0, 4] = wanted[0, 4]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# --- clamped_swiglu


@pytest.mark.parametrize("limit", [None, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.needs("float64")), *LOW], ids=str)
def test_swiglu_is_the_definition(dtype, limit, backend):
    gate_up = (8 * torch.randn(7, 2, 10, dtype=torch.float64)).to(dtype)
    found = clamped_swiglu(gate_up, limit=limit, backend=backend)
    low = exact.clamped_swiglu(gate_up, limit=limit, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.dtype == dtype
    assert_within_budget(found, exact.clamped_swiglu(gate_up, limit=limit), low.to(dtype), what="clamped_swiglu")


def test_swiglu_clamps_the_gate_from_above_only(backend, widest):
    gate_up = torch.tensor([[-100.0, 5.0], [5.0, 100.0], [5.0, -100.0], [100.0, 5.0], [-3.0, 1.0]]).to(widest)
    silu = torch.nn.functional.silu
    wanted = [silu(torch.tensor(float(g)).double()) * u for g, u in [(-100, 2), (2, 2), (2, -2), (2, 2), (-3, 1)]]
    found = clamped_swiglu(gate_up, limit=2.0, backend=backend)
    torch.testing.assert_close(found.flatten(), torch.stack(wanted).to(widest))


@pytest.mark.needs("gradients")
def test_swiglu_gradients(backend):
    gate_up = (3 * torch.randn(4, 6, dtype=torch.float64)).requires_grad_()
    torch.autograd.gradcheck(lambda x: clamped_swiglu(x, limit=2.0, backend=backend), gate_up)


def test_swiglu_saturates_finitely(backend):
    gate_up = torch.tensor([[-1e4, 1.0], [1e4, 1.0], [-torch.inf, 1.0]])
    found = clamped_swiglu(gate_up, limit=None, backend=backend)
    assert found[:2].flatten().tolist() == [0.0, 1e4]


# --- all three


@only_reference
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}], ids=str)
def test_empty(sizes, backend):
    route = moe_route(**cases("moe_route", **sizes), backend=backend)
    experts = cases("moe_experts", **sizes)
    assert route.weights.shape == route.ids.shape == (*experts["x"].shape[:2], 3)
    assert moe_experts(**experts, backend=backend).shape == experts["x"].shape
    assert clamped_swiglu(torch.zeros(0, 4), limit=1.0, backend=backend).shape == (0, 2)


@pytest.mark.no_launch
def test_swiglu_empty(backend):
    assert clamped_swiglu(torch.zeros(0, 4), limit=1.0, backend=backend).shape == (0, 2)


def tensors(arguments):
    return {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}


@every_op
def test_inputs_any_strides_unchanged_and_unaliased(op, backend):
    arguments = cases(op)
    wanted = OPS[op](**arguments, backend=backend)
    for wrap in (strided, guarded):
        wrapped = {n: wrap(x) for n, x in tensors(arguments).items()}
        with unchanged(*wrapped.values()), nan_empty():
            found = OPS[op](**arguments | wrapped, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        own = {x.untyped_storage().data_ptr() for x in wrapped.values()}
        results = found if op == "moe_route" else [found]
        assert all(x.untyped_storage().data_ptr() not in own for x in results)


@every_op
def test_traceable(op, backend):
    assert_traceable(OPS[op], **cases(op), backend=backend)


@only_reference
def test_experts_need_no_host_read_when_captured(backend, monkeypatch):
    """Compiled, even large calls run as one graph and give what the eager path gives."""
    monkeypatch.setattr("glm5fn.kernels.reference.moe._FEW_BYTES", 0)
    arguments = cases("moe_experts", T=50)
    wanted = moe_experts(**arguments, backend=backend)
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(moe_experts, backend=backend), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), wanted, rtol=1e-5, atol=1e-6)


I32 = torch.int32
RANGE = "ids must lie in 0..4 (E=5 experts)"
REFUSED = {
    "moe_route": {
        "rank": ({"x": torch.zeros(2, 8)}, "x must have 3 dimensions [B, T, D], got 2: [2, 8]."),
        "width": ({"w_gate": torch.zeros(12, 7)}, "so its dimension 1 (D) must be 8, got 7: [12, 7]."),
        "bias": ({"bias": torch.zeros(11)}, "so its dimension 0 (E) must be 12, got 11: [11]."),
        "bias dtype": ({"bias": torch.zeros(12).bfloat16()}, "bias must be float32, got bfloat16."),
        "gate dtype": ({"w_gate": torch.zeros(12, 8).half()}, "w_gate must be float32, got float16."),
        "integers": ({"x": torch.zeros(2, 4, 8, dtype=I32)}, "or float64, got int32."),
        "device": ({"w_gate": torch.zeros(12, 8, device="meta")}, "x and w_gate must have the same device"),
        "groups": ({"n_group": 5}, "n_group must divide the number of experts E=12, got 5."),
        "no groups": ({"n_group": 0}, "n_group must divide the number of experts E=12, got 0."),
        "kept groups": ({"n_group": 4, "topk_group": 5}, "topk_group must lie in 1..n_group=4, got 5."),
        "few": ({"n_group": 4, "topk_group": 2, "top_k": 7}, "top_k must lie in 1..6, the experts in 2 of 4 "),
        "many": ({"top_k": 13}, "top_k must lie in 1..12"),
        "none": ({"top_k": 0}, "top_k must lie in 1..12"),
    },
    "moe_experts": {
        "rank": ({"x": torch.zeros(2, 8)}, "x must have 3 dimensions [B, T, D], got 2: [2, 8]."),
        "ids shape": ({"ids": torch.zeros(2, 3, 2, dtype=I32)}, "so its dimension 1 (T) must be 4, got 3: [2, 3, 2]."),
        "ids dtype": ({"ids": torch.zeros(2, 4, 2, dtype=torch.int64)}, "ids must be int32, got int64."),
        "id too large": ({"ids": torch.full((2, 4, 2), 5, dtype=I32)}, f"{RANGE}, got 5 at [0, 0, 0]."),
        "id negative": ({"ids": torch.full((2, 4, 2), -1, dtype=I32)}, f"{RANGE}, got -1 at [0, 0, 0]."),
        "weights shape": ({"weights": torch.zeros(2, 4, 3)}, "so its dimension 2 (top_k) must be 2, got 3: [2, 4, 3]."),
        "weights dtype": ({"weights": torch.zeros(2, 4, 2).bfloat16()}, "weights must be float32, got bfloat16."),
        "gate rows": ({"w_gate_up": torch.zeros(5, 11, 8)}, "so its dimension 1 (12) must be 12, got 11: [5, 11, 8]."),
        "experts": ({"w_gate_up": torch.zeros(4, 12, 8)}, "so its dimension 0 (E) must be 5, got 4: [4, 12, 8]."),
        "width": ({"w_down": torch.zeros(5, 7, 6)}, "so its dimension 1 (D) must be 8, got 7: [5, 7, 6]."),
        "dtype": ({"w_down": torch.zeros(5, 8, 6).half()}, "x and w_down must have the same dtype, got float32 and "),
        "device": ({"w_down": torch.zeros(5, 8, 6, device="meta")}, "x and w_down must have the same device"),
        "limit": ({"limit": 0.0}, "limit must be positive, or None for no clamp, got 0.0."),
    },
    "clamped_swiglu": {
        "odd": ({"gate_up": torch.zeros(2, 3)}, "gate_up must have an even last dimension 2I, got [2, 3]."),
        "scalar": ({"gate_up": torch.zeros(())}, "gate_up must have 1 dimensions [2I], got 0: []."),
        "list": ({"gate_up": [1.0, 2.0]}, "gate_up must be a tensor [2I], got list."),
        "integers": ({"gate_up": torch.zeros(2, dtype=I32)}, "or float64, got int32."),
        "limit": ({"limit": -1.0}, "limit must be positive, or None for no clamp, got -1.0."),
        "nan": ({"limit": float("nan")}, "limit must be positive, or None for no clamp, got nan."),
    },
}  # fmt: skip


@pytest.mark.nothing_runs
@pytest.mark.parametrize(("op", "what"), [(op, what) for op, changes in REFUSED.items() for what in changes])
def test_refusals(op, what, backend):
    change, text = REFUSED[op][what]
    with pytest.raises(ContractError) as error:
        OPS[op](**cases(op) | change, backend=backend)
    assert str(error.value).startswith(f"{op}: ")
    assert text in str(error.value)
