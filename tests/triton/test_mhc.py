"""Hyper-connections and the experts' activation on Triton beyond what every backend is asked: tiles, dtypes, other
memory, hand-over."""

from __future__ import annotations

import functools

import pytest
import torch

from glm5fn.dispatch import explain
from glm5fn.kernels.triton import launch
from glm5fn.ops.mhc import mhc_post, mhc_pre, mhc_pre_norm
from glm5fn.ops.moe import clamped_swiglu
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import mhc as make
from glm5fn.testing.oracle import mhc as exact
from glm5fn.testing.oracle import moe as exact_moe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {"mhc_pre": mhc_pre, "mhc_pre_norm": mhc_pre_norm, "mhc_post": mhc_post}


def cases(op, **options):
    return make.mhc_post(**options) if op == "mhc_post" else make.mhc_pre(norm_weight=op == "mhc_pre_norm", **options)


def assert_defined(found, op, arguments):
    definition = functools.partial(getattr(exact, op), **arguments)
    dtype, low = arguments["streams"].dtype, definition(dtype=torch.float32)
    low = low.to(dtype) if op == "mhc_post" else (low[0].to(dtype), *low[1:])
    assert_within_budget(found, definition(), low, what=op)


def test_what_starts():
    for op, kernels in (
        ("mhc_pre", {"mhc_logits_kernel": 1, "mhc_collapse_kernel": 1}),
        ("mhc_pre_norm", {"mhc_logits_kernel": 1, "mhc_collapse_kernel": 1, "norm_kernel": 1}),
        ("mhc_post", {"mhc_post_kernel": 1}),
    ):
        with launch.counted() as counter:
            OPS[op](**cases(op), backend="triton")
        assert counter == kernels
    with launch.counted() as counter:
        clamped_swiglu(torch.randn(3, 8), limit=1.0, backend="triton")
    assert counter == {"clamped_swiglu_kernel": 1}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [3, 4, 8])
def test_many_tokens_and_channels(op, dtype, N):
    """Several tiles of tokens and pieces of channels, none of them full, and programs that share a token."""
    arguments = cases(op, B=2, T=19, N=N, D=300, dtype=dtype)
    assert_defined(OPS[op](**arguments, backend="triton"), op, arguments)


@pytest.mark.parametrize("streams", DTYPES)
@pytest.mark.parametrize("fn", [torch.float32, torch.bfloat16])
def test_coefficients_are_exact_to_float32(streams, fn):
    """Even where the streams are narrow, and with weights that bfloat16 cannot hold."""
    arguments = make.mhc_pre(B=1, T=20, D=200, dtype=streams)
    arguments["fn"] = make.mhc_pre(B=1, T=20, D=200)["fn"].to(fn)
    assert_defined(mhc_pre(**arguments, backend="triton"), "mhc_pre", arguments)


def test_too_many_streams_are_refused():
    verdicts = explain(mhc_pre, **make.mhc_pre(N=9), backend="triton").verdicts
    reasons = next(v.reasons for v in verdicts if v.backend == "triton")
    assert any("N must be at most 8 streams" in reason and reason.endswith("got 9") for reason in reasons)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_or_written_beside_any_tensor(op, dtype):
    arguments = {n: poison.guarded(x) for n, x in cases(op, T=5, N=3, D=13, dtype=dtype).items()}
    with poison.unchanged(*arguments.values()), poison.fenced():
        found = OPS[op](**arguments, backend="triton")
    assert_defined(found, op, arguments)


@pytest.mark.parametrize(("first", "second"), [("reference", "triton"), ("triton", "reference"), ("triton", "triton")])
def test_one_backend_writes_back_what_another_read(first, second):
    arguments = make.mhc_pre(T=6, D=40)
    streams = arguments["streams"]
    x, post, comb = mhc_pre(**arguments, backend=first)
    found = mhc_post(x, streams, post, comb, backend=second)

    def whole(dtype):
        x, post, comb = exact.mhc_pre(**arguments, dtype=dtype)
        return exact.mhc_post(x, streams, post, comb, dtype=dtype)

    assert_within_budget(found, whole(torch.float64), whole(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3000), (2, 3, 5, 14), (1, 2)], ids=str)
def test_swiglu(shape, dtype):
    x = poison.guarded((4 * torch.randn(*shape)).to(dtype))
    with poison.unchanged(x), poison.fenced():
        found = clamped_swiglu(x, limit=3.0, backend="triton")
    exactly, low = (exact_moe.clamped_swiglu(x, limit=3.0, dtype=d) for d in (torch.float64, torch.float32))
    assert_within_budget(found, exactly, low.to(dtype))
    assert_bitwise(found, clamped_swiglu(poison.strided(x), limit=3.0, backend="triton"))


def test_swiglu_keeps_nan():
    x = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan], [1.0, 2.0, 3.0, 4.0]])
    found = clamped_swiglu(x, limit=1.0, backend="triton")
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
