"""What holds for the kpool indexer whatever the sizes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.indexer import kpool_compress, kpool_select
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import indexer as make

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.sampled_from([1, 2, 3, 15, 16, 17]),
        "J": st.sampled_from([1, 4]),
        "I": st.sampled_from([1, 4, 16]),
        "P": st.integers(0, 9),
        "kpool": st.sampled_from([1, 2, 4, 16]),
        "ties": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


def cases(sizes, pools):
    return make.kpool_select(**sizes, topk=pools * sizes["kpool"])


@few
@given(sizes=sizes, pools=st.integers(1, 12), tail=st.booleans())
def test_result_is_well_formed(backend, sizes, pools, tail):
    arguments = cases(sizes, pools)
    found = kpool_select(**arguments, tail=tail, backend=backend)
    kpool, topk = arguments["kpool"], arguments["topk"]
    for position, row in zip(arguments["positions"].flatten().tolist(), found.flatten(0, 1).tolist(), strict=True):
        history, rest = row[:topk], row[topk:]
        used = [i for i in history if i >= 0]
        complete = max(0, position + 1) // kpool
        assert history == used + [-1] * (topk - len(used))
        assert used == sorted(set(used))
        assert len(used) == min(pools, complete) * kpool
        assert all(i // kpool < complete for i in used)
        assert all(used[i : i + kpool] == list(range(used[i], used[i] + kpool)) for i in range(0, len(used), kpool))
        wanted = list(range(complete * kpool, position + 1)) if tail else []
        assert rest == wanted + [-1] * ((kpool - 1 if tail else 0) - len(wanted))


@few
@given(sizes=sizes, pools=st.integers(1, 12), data=st.data())
def test_queries_are_independent(backend, sizes, pools, data):
    arguments = cases(sizes, pools)
    whole = kpool_select(**arguments, backend=backend)
    cut = data.draw(st.integers(0, sizes["T"]))
    split = {n: arguments[n].tensor_split([cut], dim=1) for n in ("q", "weights", "positions")}
    parts = [kpool_select(**arguments | {n: s[i] for n, s in split.items()}, backend=backend) for i in range(2)]
    assert_bitwise(torch.cat(parts, dim=1), whole)
    order = data.draw(st.permutations(range(sizes["B"])))
    shuffled = {n: arguments[n][order] for n in ("q", "weights", "pooled", "positions")}
    assert_bitwise(kpool_select(**arguments | shuffled, backend=backend), whole[order])


@few
@given(sizes=sizes, pools=st.integers(1, 12), extra=st.integers(1, 5))
def test_pools_to_come_change_nothing(backend, sizes, pools, extra):
    arguments = cases(sizes, pools)
    longer = torch.nn.functional.pad(arguments["pooled"], (0, 0, 0, extra), value=torch.nan)
    assert_bitwise(
        kpool_select(**arguments | {"pooled": longer}, backend=backend), kpool_select(**arguments, backend=backend)
    )


@few
@given(sizes=sizes)
def test_a_large_budget_selects_everything(backend, sizes):
    arguments = cases(sizes, sizes["P"] + 1)
    found = kpool_select(**arguments, backend=backend)
    for position, row in zip(arguments["positions"].flatten().tolist(), found.flatten(0, 1).tolist(), strict=True):
        assert sorted(i for i in row if i >= 0) == list(range(position + 1))


@few
@given(kpool=st.integers(1, 5), P=st.integers(1, 4), seed=st.integers(0, 99))
def test_compressing_lies_between_the_members(backend, widest, kpool, P, seed):
    arguments = make.kpool_compress(kpool=kpool, P=P, seed=seed, dtype=widest)
    found = kpool_compress(**arguments, backend=backend)
    low, high = arguments["k"].aminmax(dim=2)
    room = 8 * torch.finfo(widest).eps * arguments["k"].abs().max()
    assert bool(((found >= low - room) & (found <= high + room)).all())
    equal = torch.zeros_like(arguments["gate"])
    mean = kpool_compress(arguments["k"], equal, torch.zeros_like(arguments["ape"]), backend=backend)
    torch.testing.assert_close(mean, arguments["k"].mean(2))
