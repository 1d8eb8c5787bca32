"""What holds for multi-head latent attention whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.mla import mla_decode, mla_prefill, mla_sparse
from glm5fn.testing.inputs import mla as make

DENSE = {"mla_prefill": mla_prefill, "mla_decode": mla_decode}
PREFILL = pytest.param("mla_prefill", marks=pytest.mark.needs("kernel for mla_prefill"))
every_dense_form = pytest.mark.parametrize("form", [PREFILL, "mla_decode"])
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.sampled_from([1, 2, 3, 15, 16, 17, 33]),
        "H": st.integers(1, 3),
        "Dk": st.integers(1, 5),
        "Dv": st.integers(1, 5),
        "R": st.integers(1, 6),
        "seed": st.integers(0, 99),
    }
)


def close(a, b):
    wide = {"rtol": 1e-9, "atol": 1e-9} if a.dtype == torch.float64 else {}
    torch.testing.assert_close(a, b, **wide)


@few
@given(sizes=sizes, history=st.integers(0, 20), data=st.data())
@every_dense_form
def test_cut_anywhere(form, backend, widest, sizes, history, data):
    T, S = sizes["T"], sizes["T"] + history
    arguments = make.mla_dense(**sizes, S=S, lengths=[S] * sizes["B"], dtype=widest)
    whole = DENSE[form](**arguments, backend=backend)
    cut = data.draw(st.integers(0, T))
    parts = []
    for begin, end in ((0, cut), (cut, T)):
        lengths = torch.full((sizes["B"],), history + end, dtype=torch.int32)
        part = arguments | {"q": arguments["q"][:, begin:end], "lengths": lengths}
        parts.append(DENSE[form](**part, backend=backend))
    close(torch.cat(parts, dim=1), whole)


@few
@given(sizes=sizes, data=st.data())
@every_dense_form
def test_three_forms_are_one(form, backend, widest, sizes, data):
    S = sizes["T"] + 3
    lengths = data.draw(st.lists(st.integers(0, S), min_size=sizes["B"], max_size=sizes["B"]))
    arguments = make.mla_dense(**sizes, S=S, lengths=lengths, dtype=widest)
    dense = DENSE[form](**arguments, backend=backend)
    arguments.pop("lengths")
    indices = make.all_indices(sizes["B"], sizes["T"], S, lengths)
    order = torch.randperm(S)
    close(mla_sparse(**arguments, indices=indices[..., order].contiguous(), backend=backend), dense)


@few
@given(sizes=sizes, data=st.data())
@every_dense_form
def test_rows_are_independent(form, backend, widest, sizes, data):
    B, S = sizes["B"], sizes["T"] + 3
    lengths = data.draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
    arguments = make.mla_dense(**sizes, S=S, lengths=lengths, dtype=widest)
    order = data.draw(st.permutations(range(B)))
    shuffled = {n: x[order] if n in ("q", "latent", "lengths") else x for n, x in arguments.items()}
    close(DENSE[form](**shuffled, backend=backend), DENSE[form](**arguments, backend=backend)[order])
    alone = {n: x[:1] if n in ("q", "latent", "lengths") else x for n, x in arguments.items()}
    close(DENSE[form](**alone, backend=backend), DENSE[form](**arguments, backend=backend)[:1])


@few
@given(sizes=sizes, data=st.data())
def test_unused_indices_and_their_order_change_nothing(backend, widest, sizes, data):
    arguments = make.mla_sparse(**sizes, S=12, J=5, dtype=widest)
    wanted = mla_sparse(**arguments, backend=backend)
    padded = torch.nn.functional.pad(arguments["indices"], (2, 3), value=-1)
    order = data.draw(st.permutations(range(10)))
    close(mla_sparse(**arguments | {"indices": padded[..., order].contiguous()}, backend=backend), wanted)


@few
@given(sizes=sizes, capacity=st.integers(0, 9))
@every_dense_form
def test_capacity_beyond_the_length_changes_nothing(form, backend, widest, sizes, capacity):
    T = sizes["T"]
    arguments = make.mla_dense(**sizes, S=T, lengths=[T] * sizes["B"], dtype=widest)
    wanted = DENSE[form](**arguments, backend=backend)
    latent = torch.nn.functional.pad(arguments["latent"], (0, 0, 0, capacity), value=torch.nan)
    close(DENSE[form](**arguments | {"latent": latent}, backend=backend), wanted)
    arguments.pop("lengths")
    close(DENSE[form](**arguments, backend=backend), wanted)
