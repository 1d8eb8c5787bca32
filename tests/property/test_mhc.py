"""What holds for the hyper-connections whatever the sizes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.mhc import mhc_post, mhc_pre
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import mhc as make

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.sampled_from([1, 2, 3, 17]),
        "N": st.integers(1, 5),
        "D": st.integers(1, 9),
        "seed": st.integers(0, 99),
    }
)


def close(a, b):
    wide = {"rtol": 1e-9, "atol": 1e-9} if b[0].dtype == torch.float64 else {}
    torch.testing.assert_close(a, b, **wide)


def run(arguments, backend):
    """A sub-block that halves what it reads."""
    x, post, comb = mhc_pre(**arguments, backend=backend)
    return mhc_post(x / 2, arguments["streams"], post, comb, backend=backend)


@few
@given(sizes=sizes, data=st.data())
def test_tokens_are_independent(backend, widest, sizes, data):
    arguments = make.mhc_pre(**sizes, dtype=widest)
    whole = run(arguments, backend)
    cut = data.draw(st.integers(0, sizes["T"]))
    parts = [run(arguments | {"streams": s}, backend) for s in arguments["streams"].tensor_split([cut], dim=1)]
    close(torch.cat(parts, dim=1), whole)
    order = data.draw(st.permutations(range(sizes["B"])))
    shuffled = run(arguments | {"streams": arguments["streams"][order]}, backend)
    close(shuffled, whole[order])


@few
@given(sizes=sizes, factor=st.sampled_from([2.0**-20, 2.0, 2.0**20]))
def test_coefficients_ignore_the_size_of_the_streams(backend, widest, sizes, factor):
    arguments = make.mhc_pre(**sizes, dtype=widest)
    small, large = (
        mhc_pre(**arguments | {"streams": arguments["streams"] * f}, norm_eps=0.0, backend=backend) for f in (1, factor)
    )
    close(small._replace(x=small.x * factor), large)


@few
@given(sizes=sizes)
def test_mixing_keeps_the_sum_of_the_streams(backend, widest, sizes):
    """Rows of a doubly stochastic comb sum to one, so mixing moves the streams about without gain."""
    N = sizes["N"]
    arguments = make.mhc_post(**sizes, dtype=widest)
    comb = torch.eye(N, dtype=widest).roll(1, dims=1) * 0.5 + 0.5 / N
    arguments |= {"post": torch.zeros_like(arguments["post"]), "comb": comb.expand_as(arguments["comb"])}
    new = mhc_post(**arguments, backend=backend)
    close(new.sum(2), arguments["streams"].sum(2))


@few
@given(sizes=sizes)
def test_same_call_same_bits(backend, sizes):
    arguments = make.mhc_pre(**sizes)
    assert_bitwise(run(arguments, backend), run(arguments, backend))
