"""What holds for the router and the experts whatever the sizes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.moe import clamped_swiglu, moe_experts, moe_route
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import moe as make

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.sampled_from([1, 2, 3, 17, 64]),
        "D": st.integers(1, 9),
        "E": st.integers(2, 9),
        "seed": st.integers(0, 99),
    }
)
options = st.fixed_dictionaries({"top_k": st.integers(1, 2), "norm_topk": st.booleans(), "scale": st.just(2.5)})


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@few
@given(sizes=sizes, options=options, data=st.data())
def test_tokens_are_routed_independently(backend, sizes, options, data):
    arguments = make.moe_route(**sizes, dtype=torch.float64) | options | {"n_group": 1, "topk_group": 1}
    whole = moe_route(**arguments, backend=backend)
    cut = data.draw(st.integers(0, sizes["T"]))
    parts = [moe_route(**arguments | {"x": x}, backend=backend) for x in arguments["x"].tensor_split([cut], dim=1)]
    close(torch.cat([p.weights for p in parts], dim=1), whole.weights)
    assert_bitwise(torch.cat([p.ids for p in parts], dim=1), whole.ids)


@few
@given(sizes=sizes, options=options)
def test_chosen_experts_are_distinct_and_best_first(backend, sizes, options):
    arguments = make.moe_route(**sizes, ties=True, dtype=torch.float64) | options | {"n_group": 1, "topk_group": 1}
    weights, ids = moe_route(**arguments, backend=backend)
    assert bool((ids.sort(-1).values.diff(dim=-1) > 0).all())
    assert bool((weights.diff(dim=-1) <= 0).all())  # without a bias the order of the choice is that of the weights
    if options["norm_topk"]:
        close(weights.sum(-1), torch.full(weights.shape[:2], 2.5, dtype=torch.float64))


@few
@given(sizes=sizes, top_k=st.integers(1, 2), data=st.data())
def test_tokens_run_independently(backend, sizes, top_k, data):
    arguments = make.moe_experts(**sizes, top_k=top_k, dtype=torch.float64) | {"limit": 1.0}
    whole = moe_experts(**arguments, backend=backend)
    cut = data.draw(st.integers(0, sizes["T"]))
    cuts = {n: arguments[n].tensor_split([cut], dim=1) for n in ("x", "ids", "weights")}
    parts = [moe_experts(**arguments | {n: c[i] for n, c in cuts.items()}, backend=backend) for i in range(2)]
    close(torch.cat(parts, dim=1), whole)
    order = data.draw(st.permutations(range(sizes["B"])))
    close(moe_experts(**arguments | {n: arguments[n][order] for n in cuts}, backend=backend), whole[order])


@few
@given(sizes=sizes, data=st.data())
def test_renaming_experts_and_reordering_choices_changes_nothing(backend, sizes, data):
    arguments = make.moe_experts(**sizes, dtype=torch.float64) | {"limit": 1.0}
    wanted = moe_experts(**arguments, backend=backend)
    order = torch.tensor(data.draw(st.permutations(range(sizes["E"]))))
    renamed = {
        "ids": order.argsort()[arguments["ids"].long()].to(torch.int32).flip(-1),
        "weights": arguments["weights"].flip(-1),
        "w_gate_up": arguments["w_gate_up"][order],
        "w_down": arguments["w_down"][order],
    }
    close(moe_experts(**arguments | renamed, backend=backend), wanted)


@few
@given(sizes=sizes)
def test_one_expert_with_weight_one_is_a_dense_layer(backend, sizes):
    arguments = make.moe_experts(**sizes, top_k=1, only=[1], dtype=torch.float64)
    arguments["weights"] = torch.ones_like(arguments["weights"])
    hidden = clamped_swiglu(arguments["x"] @ arguments["w_gate_up"][1].T, limit=0.5, backend=backend)
    close(moe_experts(**arguments, limit=0.5, backend=backend), hidden @ arguments["w_down"][1].T)
