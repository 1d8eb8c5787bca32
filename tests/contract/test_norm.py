"""What the norms promise about arguments, results and memory."""

from __future__ import annotations

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.norm import gated_rms_norm, l2_norm, rms_norm
from glm5fn.testing import poison
from glm5fn.testing.trace import assert_traceable

X, G, W = torch.ones(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(4)
REFUSED = {
    "x is a list": (lambda **k: rms_norm([1.0], W, eps=0.0, **k), "rms_norm: x must be a tensor [..., D], got list"),
    "x is a scalar": (lambda **k: l2_norm(torch.ones(()), **k), "l2_norm: x must have at least one dimension"),
    "x is an integer": (lambda **k: l2_norm(torch.ones(3, dtype=torch.int64), **k), "got int64"),
    "weight is too long": (
        lambda **k: rms_norm(X, torch.ones(5), eps=0.0, **k),
        "rms_norm: weight must be [D] with D=4, so its dimension 0 (D) must be 4, got 5: [5].",
    ),
    "weight is a matrix": (
        lambda **k: rms_norm(X, torch.ones(4, 1), eps=0.0, **k),
        "must have 1 dimensions [D], got 2",
    ),
    "weight is elsewhere": (
        lambda **k: rms_norm(X, W.to("meta"), eps=0.0, **k),
        "rms_norm: x and weight must have the same device, got cpu and meta.",
    ),
    "eps is negative": (lambda **k: rms_norm(X, W, eps=-1e-6, **k), "rms_norm: eps must be at least 0, got -1e-06."),
    "gate has another shape": (
        lambda **k: gated_rms_norm(X, G[:1], W, eps=0.0, **k),
        "gated_rms_norm: gate must be a tensor of the shape of x, [2, 3, 4], got [1, 3, 4].",
    ),
    "gate has another dtype": (
        lambda **k: gated_rms_norm(X, G.half(), W, eps=0.0, **k),
        "gated_rms_norm: x and gate must have the same dtype, got float32 and float16.",
    ),
}
CALLS = {
    "rms_norm": lambda x, **k: rms_norm(x, x.new_full(x.shape[-1:], 2.0), eps=1e-5, **k),
    "gated_rms_norm": lambda x, **k: gated_rms_norm(x, x, x.new_full(x.shape[-1:], 2.0), eps=1e-5, **k),
    "l2_norm": l2_norm,
}


@pytest.mark.nothing_runs
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(backend, case):
    call, text = REFUSED[case]
    with pytest.raises(ContractError) as error:
        call(backend=backend)
    assert text in str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_result_is_new_defined_and_inputs_are_untouched(backend, name):
    x = poison.guarded(torch.randn(3, 8))
    with poison.unchanged(x), poison.nan_empty():
        out = CALLS[name](x, backend=backend)
    assert out.isfinite().all()
    assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.no_launch
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(backend, name, shape):
    assert CALLS[name](torch.zeros(shape), backend=backend).shape == shape


@pytest.mark.parametrize("name", CALLS)
def test_traceable(backend, name):
    assert_traceable(CALLS[name], torch.randn(2, 3, 8), backend=backend)


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("name", CALLS)
def test_gradients(backend, name):
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: CALLS[name](x, backend=backend), (x,))
    if name == "l2_norm":
        return
    gate = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    if name == "rms_norm":
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=1e-5, backend=backend), (x, weight))
    else:
        call = lambda x, g, w: gated_rms_norm(x, g, w, eps=1e-5, backend=backend)  # noqa: E731
        assert torch.autograd.gradcheck(call, (x, gate, weight))
