"""The interpreter tells the truth, and the functions that kernels share are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

from glm5fn.kernels.triton import launch
from glm5fn.kernels.triton._compat import exp_polynomial, kernel, sigmoid, softplus
from glm5fn.testing.compare import assert_bitwise


@kernel
def copy_kernel(x, y, n: tl.int32, B: tl.constexpr):
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=place < n)


@kernel
def double_kernel(x, y, n: tl.int32, B: tl.constexpr):
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place, mask=place < n, other=0.0)
    tl.store(y + place, value + value, mask=place < n)


@kernel
def product_kernel(a, b, c, N: tl.constexpr):
    square = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square), input_precision="ieee"))


@kernel
def function_kernel(x, y, n: tl.int32, WHICH: tl.constexpr, B: tl.constexpr):
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place, mask=place < n, other=0.0)
    if WHICH == "exp":
        value = exp_polynomial(value)
    elif WHICH == "sigmoid":
        value = sigmoid(value)
    else:
        value = softplus(value)
    tl.store(y + place, value, mask=place < n)


def bits(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_bfloat16_is_rounded_to_nearest_even():
    x = torch.cat([torch.randn(4000) * 10 ** (60 * torch.rand(4000) - 30), bits(
        0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00008000,
        0x00018000, 0x807FFFFF,
    )])  # fmt: skip
    y = torch.zeros(len(x), dtype=torch.bfloat16)
    launch.run(copy_kernel, x.device, 1, x, y, len(x), B=4096)
    assert_bitwise(y, x.bfloat16())
    back = torch.zeros_like(x)
    launch.run(copy_kernel, x.device, 1, y, back, len(x), B=4096)
    assert_bitwise(back, y.float())
    x = torch.tensor([torch.nan])
    launch.run(copy_kernel, x.device, 1, x, y, 1, B=16)
    assert y[0].isnan()


def test_bfloat16_arithmetic_is_refused():
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="turn the operands into float32"):
        launch.run(double_kernel, x.device, 1, x, x.clone(), 8, B=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_matrices(dtype):
    a, b, c = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype), torch.zeros(32, 32)
    launch.run(product_kernel, a.device, 1, a, b, c, N=32)
    assert (c - a.double() @ b.double()).abs().max() < 1e-5


def evaluate(which: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    launch.run(function_kernel, x.device, 1, x, y, len(x), WHICH=which, B=launch.power_of_two(len(x)))
    return y


def test_exp_is_exact_to_a_unit():
    n = 30_000
    x = torch.cat([torch.linspace(-87.2, 88.2, n), torch.linspace(-1, 0.5, n), -torch.logspace(-9, 1.9, n)])
    exact = x.double().exp()
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    error = (evaluate("exp", x).double() - exact) / unit
    assert error.abs().max() < 1
    assert error[-n:].mean().abs() < 0.01, "a bias would add up over a long context"


def test_exp_at_the_edges():
    x = torch.tensor([0.0, -0.0, -88.0, -1e4, -torch.inf, 89.0, torch.inf, torch.nan])
    assert_bitwise(evaluate("exp", x)[:-1], torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, torch.inf, torch.inf]))
    assert evaluate("exp", x)[-1].isnan()


def test_sigmoid_and_softplus():
    x = torch.cat(
        [torch.linspace(-120, 120, 9_001), -torch.logspace(-9, 1.9, 1_000), torch.tensor([-torch.inf, torch.inf])]
    )
    for which, exact in (("sigmoid", x.double().sigmoid()), ("softplus", torch.logaddexp(x.double(), torch.zeros(())))):
        found = evaluate(which, x).double()
        relative = ((found - exact) / exact.clamp(min=1e-37)).abs()
        assert relative[exact.isfinite()].max() < 4e-7, which
        assert torch.equal(found[~exact.isfinite()], exact[~exact.isfinite()]), which


def test_counting_launches():
    x = torch.ones(4)
    with launch.counted() as outer:
        launch.run(copy_kernel, x.device, 1, x, x.clone(), 4, B=4)
        with launch.counted() as inner:
            launch.run(copy_kernel, x.device, 1, x, x.clone(), 4, B=4)
        launch.run(copy_kernel, x.device, 0, x, x.clone(), 4, B=4)
    assert (dict(outer), dict(inner)) == ({"copy_kernel": 2}, {"copy_kernel": 1})
