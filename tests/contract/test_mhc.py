"""Hyper-connections: values, gradients, shapes and refusals."""

from __future__ import annotations

import functools

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.mhc import mhc_post, mhc_pre, mhc_pre_norm
from glm5fn.ops.norm import rms_norm
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import mhc as make
from glm5fn.testing.oracle import mhc as exact
from glm5fn.testing.poison import guarded, nan_empty, strided, unchanged
from glm5fn.testing.trace import assert_traceable

OPS = {"mhc_pre": mhc_pre, "mhc_pre_norm": mhc_pre_norm, "mhc_post": mhc_post}
LOW = [torch.float32, torch.bfloat16, torch.float16]


def cases(op, **options):
    if op == "mhc_post":
        return make.mhc_post(**options)
    return make.mhc_pre(norm_weight=op == "mhc_pre_norm", **options)


def rounded(op, result, dtype):
    """The definition's float32 result, in the dtypes that the operation promises."""
    return result.to(dtype) if op == "mhc_post" else (result[0].to(dtype), *result[1:])


@pytest.mark.parametrize("sizes", [{}, {"N": 1}, {"N": 2, "D": 1}, {"N": 5, "D": 3, "T": 1}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_widest_is_the_definition(op, sizes, backend, widest):
    arguments = cases(op, dtype=widest, **sizes)
    found = OPS[op](**arguments, backend=backend)
    definition = functools.partial(getattr(exact, op), **arguments)
    assert_within_budget(found, definition(), definition(dtype=widest), what=op)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_low_precision_stays_within_the_budget(op, dtype, backend):
    arguments = cases(op, dtype=dtype, T=5, D=32)
    found = OPS[op](**arguments, backend=backend)
    definition = functools.partial(getattr(exact, op), **arguments)
    assert_within_budget(found, definition(), rounded(op, definition(dtype=torch.float32), dtype), what=op)
    first, *coefficients = [found] if op == "mhc_post" else found
    assert first.dtype == dtype
    assert all(c.dtype == torch.float32 for c in coefficients)


@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_extreme_logits(spread, backend):
    arguments = make.mhc_pre(spread=spread, T=40)
    definition = functools.partial(exact.mhc_pre, **arguments)
    found = mhc_pre(**arguments, backend=backend)
    assert_within_budget(found, definition(), definition(dtype=torch.float32), what="mhc_pre")


@pytest.mark.parametrize(
    ("iters", "wanted"),
    [
        (1, [[0.5938449, 0.3497553], [0.4061543, 0.6502434]]),
        (2, [[0.6207657, 0.3758508], [0.3792333, 0.6241482]]),
        (20, [[0.6224584, 0.3775406], [0.3775406, 0.6224584]]),
    ],
)
def test_sinkhorn_by_hand(iters, wanted, backend, widest):
    """Logits [[1, 0], [0, 0]] come from the base alone."""
    base = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0]).to(widest)
    streams, fn, scale = (x.to(widest) for x in (torch.ones(1, 1, 2, 3), torch.zeros(8, 6), torch.ones(3)))
    comb = mhc_pre(streams, fn, base, scale, iters=iters, backend=backend).comb
    torch.testing.assert_close(comb[0, 0], torch.tensor(wanted).to(widest), rtol=0, atol=2e-7)


def test_comb_is_doubly_stochastic(backend):
    comb = mhc_pre(**make.mhc_pre(B=1, T=50), backend=backend).comb
    assert bool(((comb.sum(2) - 1).abs() < 1e-5).all())  # ends on a column scaling
    assert bool(((comb.sum(3) - 1).abs() < 1e-2).all())


def test_comb_is_indexed_in_out(backend):
    """Comb of a permutation moves stream i to stream order[i]."""
    order = [2, 0, 1]
    comb = torch.zeros(1, 1, 3, 3)
    comb[0, 0, [0, 1, 2], order] = 1.0
    streams = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    new = mhc_post(torch.zeros(1, 1, 1), streams, torch.zeros(1, 1, 3), comb, backend=backend)
    assert new.flatten().tolist() == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_fused_norm_is_the_norm_of_the_rounded_stream(dtype, backend):
    arguments = make.mhc_pre(norm_weight=True, dtype=dtype, T=7)
    weight = arguments["norm_weight"]
    plain = {n: x for n, x in arguments.items() if n != "norm_weight"}
    found = mhc_pre_norm(**arguments, norm_eps=1e-3, iters=3, backend=backend)
    x, post, comb = mhc_pre(**plain, norm_eps=1e-3, iters=3, backend=backend)
    assert_bitwise(found, (rms_norm(x, weight, eps=1e-3, backend=backend), post, comb))


def test_fn_may_be_bfloat16_under_float32_streams(backend):
    arguments = make.mhc_pre()
    arguments["fn"] = arguments["fn"].bfloat16()
    assert_bitwise(
        mhc_pre(**arguments, backend=backend), mhc_pre(**arguments | {"fn": arguments["fn"].float()}, backend=backend)
    )


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("sizes", [{}, {"N": 1, "D": 3}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, sizes, backend):
    arguments = cases(op, **{"B": 1, "T": 2, "N": 2, "D": 3} | sizes, dtype=torch.float64)
    options = {} if op == "mhc_post" else {"iters": 4}
    leaves = [x.requires_grad_() for x in arguments.values()]
    torch.autograd.gradcheck(lambda *xs: OPS[op](*xs, **options, backend=backend), leaves)


@pytest.mark.no_launch
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_empty(op, sizes, backend):
    arguments = cases(op, **{"B": 2, "T": 3, "N": 4, "D": 8} | sizes)
    B, T = arguments["streams"].shape[:2]
    found = OPS[op](**arguments, backend=backend)
    shapes = [tuple(x.shape) for x in ([found] if op == "mhc_post" else found)]
    assert shapes == ([(B, T, 4, 8)] if op == "mhc_post" else [(B, T, 8), (B, T, 4), (B, T, 4, 4)])


@pytest.mark.parametrize("op", OPS)
def test_nan_stays_with_its_token(op, backend):
    clean = cases(op, B=2, T=3)
    broken = clean | {"streams": clean["streams"].clone()}
    broken["streams"][1, 1, 0, 0] = torch.nan
    found, wanted = (OPS[op](**a, backend=backend) for a in (broken, clean))
    for f, w in zip([found] if op == "mhc_post" else found, [wanted] if op == "mhc_post" else wanted, strict=True):
        assert bool(f[1, 1].isnan().any())
        f[1, 1] = w[1, 1]
        torch.testing.assert_close(f, w, rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_zero_streams_are_finite(op, backend):
    arguments = cases(op)
    found = OPS[op](**arguments | {"streams": torch.zeros_like(arguments["streams"])}, backend=backend)
    assert all(bool(x.isfinite().all()) for x in ([found] if op == "mhc_post" else found))


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("op", OPS)
def test_zero_streams_have_finite_gradients(op, backend):
    arguments = cases(op)
    arguments["streams"] = torch.zeros_like(arguments["streams"]).requires_grad_()
    found = OPS[op](**arguments, backend=backend)
    results = [found] if op == "mhc_post" else list(found)
    sum(x.sum() for x in results).backward()
    assert bool(arguments["streams"].grad.isfinite().all())


@pytest.mark.parametrize("op", OPS)
def test_inputs_any_strides_unchanged_and_unaliased(op, backend):
    arguments = cases(op)
    wanted = OPS[op](**arguments, backend=backend)
    for wrap in (strided, guarded):
        wrapped = {n: wrap(x) for n, x in arguments.items()}
        with unchanged(*wrapped.values()), nan_empty():
            found = OPS[op](**wrapped, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        own = {x.untyped_storage().data_ptr() for x in wrapped.values()}
        results = [found] if op == "mhc_post" else found
        assert all(x.untyped_storage().data_ptr() not in own for x in results)


@pytest.mark.parametrize("op", OPS)
def test_traceable(op, backend):
    assert_traceable(OPS[op], **cases(op), backend=backend)


PRE_REFUSED = {
    "rank": ({"streams": torch.zeros(2, 3, 8)}, "streams must have 4 dimensions [B, T, N, D], got 3: [2, 3, 8]."),
    "rows of fn": ({"fn": torch.zeros(23, 32)}, "fn must be [24, 32]"),
    "columns of fn": ({"fn": torch.zeros(24, 31)}, "so its dimension 1 (32) must be 32, got 31: [24, 31]."),
    "base": ({"base": torch.zeros(16)}, "so its dimension 0 (24) must be 24, got 16: [16]."),
    "scale": ({"scale": torch.zeros(4)}, "so its dimension 0 (3) must be 3, got 4: [4]."),
    "bfloat16 base": ({"base": torch.zeros(24).bfloat16()}, "base must be float32, got bfloat16."),
    "bfloat16 scale": ({"scale": torch.zeros(3).bfloat16()}, "scale must be float32, got bfloat16."),
    "float16 fn": ({"fn": torch.zeros(24, 32).half()}, "fn must be float32 or bfloat16, got float16."),
    "integers": ({"streams": torch.zeros(2, 3, 4, 8, dtype=torch.int32)}, "or float64, got int32."),
    "no streams": ({"streams": torch.zeros(2, 3, 0, 8)}, "got N=0 and D=8."),
    "device": ({"fn": torch.zeros(24, 32, device="meta")}, "streams and fn must have the same device"),
    "iters": ({"iters": 0}, "iters must be at least 1, got 0."),
}
NORM_REFUSED = {
    "weight shape": ({"norm_weight": torch.zeros(7)}, "norm_weight must be [D] with "),
    "weight dtype": ({"norm_weight": torch.zeros(8).half()}, "norm_weight must be float32"),
    "weight device": (
        {"norm_weight": torch.zeros(8, device="meta")},
        "streams and norm_weight must have the same device",
    ),
}
POST_REFUSED = {
    "y": ({"y": torch.zeros(2, 3, 7)}, "so its dimension 2 (D) must be 8, got 7: [2, 3, 7]."),
    "post": ({"post": torch.zeros(2, 3, 3)}, "so its dimension 2 (N) must be 4, got 3: [2, 3, 3]."),
    "comb": ({"comb": torch.zeros(2, 3, 4, 3)}, "so its dimension 3 (N) must be 4, got 3: [2, 3, 4, 3]."),
    "bfloat16 comb": ({"comb": torch.zeros(2, 3, 4, 4).bfloat16()}, "comb must be float32, got bfloat16."),
    "bfloat16 post": ({"post": torch.zeros(2, 3, 4).bfloat16()}, "post must be float32, got bfloat16."),
    "dtype of y": (
        {"y": torch.zeros(2, 3, 8).half()},
        "streams and y must have the same dtype, got float32 and float16.",
    ),
    "device": (
        {"y": torch.zeros(2, 3, 8, device="meta")},
        "streams and y must have the same device, got cpu and meta.",
    ),
}
REFUSED = [
    *(("mhc_pre", *case) for case in PRE_REFUSED.values()),
    *(("mhc_pre_norm", *case) for case in (PRE_REFUSED | NORM_REFUSED).values()),
    *(("mhc_post", *case) for case in POST_REFUSED.values()),
]


@pytest.mark.nothing_runs
@pytest.mark.parametrize(("op", "change", "text"), REFUSED, ids=[f"{op}-{text[:20]}" for op, _, text in REFUSED])
def test_refusals(op, change, text, backend):
    with pytest.raises(ContractError) as error:
        OPS[op](**cases(op) | change, backend=backend)
    assert str(error.value).startswith(f"{op}: ")
    assert text in str(error.value)
