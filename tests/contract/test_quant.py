"""The rotated float8 quantisation, bit for bit."""

from __future__ import annotations

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.quant import hadamard_quant_fp8
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs.quant import hadamard_rows
from glm5fn.testing.oracle import quant as exact
from glm5fn.testing.poison import guarded, nan_empty, strided, unchanged
from glm5fn.testing.trace import assert_traceable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 256])
def test_bits_are_the_definition(size, dtype, backend):
    x = hadamard_rows(size=size, dtype=dtype)
    found = hadamard_quant_fp8(x, backend=backend)
    assert_bitwise(found, exact.hadamard_quant_fp8(x))
    assert (found.values.dtype, found.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (found.values.shape, found.scale.shape) == (x.shape, x.shape[:-1])


def test_unit_vector_by_hand(backend):
    """e_0 rotates to 128^-0.5 everywhere: bfloat16 0.08837890625, scale 2^-12, so 362, which rounds to 352."""
    x = torch.zeros(128).bfloat16()
    x[0] = 1
    values, scale = hadamard_quant_fp8(x, backend=backend)
    assert scale.item() == 2.0**-12
    assert values.float().tolist() == [352.0] * 128
    assert (values.float() * scale)[0].item() == 0.0859375


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (450.0, 2.0), (1.0, 2.0**-8), (0.875, 2.0**-9), (1e-5, 2.0**-22), (0.0, 2.0**-22), (896.0, 2.0)],
)
def test_scales_by_hand(largest, scale, backend):
    """A row of one channel is its own rotation. 450 is the next bfloat16 after 448."""
    assert hadamard_quant_fp8(torch.tensor([largest]).bfloat16(), backend=backend).scale.item() == scale


def test_scale_at_every_power_of_two(backend):
    """Exactly 448 * 2^n still gets the scale 2^n; the next bfloat16 gets twice that."""
    power = torch.arange(-20.0, 100.0).exp2()
    exactly, next_up = (448 * power).bfloat16(), (450 * power).bfloat16()
    assert_bitwise(hadamard_quant_fp8(exactly[:, None], backend=backend).scale, power)
    assert_bitwise(hadamard_quant_fp8(next_up[:, None], backend=backend).scale, 2 * power)


def test_signs_follow_sylvester(backend):
    """Row i of the matrix: (-1)^popcount(i & j)."""
    x = torch.eye(8).bfloat16()
    signs = hadamard_quant_fp8(x, backend=backend).values.float().sign().int().tolist()
    assert signs == [[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)]


def test_rounding_to_even(backend):
    """With the scale 1 that 448 forces, 17, 19, 21 and 23 lie halfway between e4m3 values, which are even there."""
    x = torch.tensor([[448.0], [17.0], [19.0], [21.0], [23.0]])
    own = torch.cat([x[:1].expand(4, 1), x[1:]], dim=1)
    rotated = torch.stack([own.sum(1), own[:, 0] - own[:, 1]], dim=1) * 2**-0.5  # its own inverse
    values, scale = hadamard_quant_fp8(rotated, backend=backend)
    assert scale.tolist() == [1.0] * 4
    assert values[:, 1].float().tolist() == [16.0, 20.0, 20.0, 24.0]


def test_dot_products_survive(backend):
    x, y = hadamard_rows(seed=1)[-6:], hadamard_rows(seed=2)[-6:]
    (xv, xs), (yv, ys) = (hadamard_quant_fp8(z, backend=backend) for z in (x, y))
    found = (xv.double() @ yv.double().T) * xs[:, None].double() * ys.double()
    wanted = x.double() @ y.double().T
    bound = x.double().norm(dim=1)[:, None] * y.double().norm(dim=1)
    assert bool(((found - wanted).abs() < 0.05 * bound).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_rows_show_and_stay_in_place(value, backend):
    clean = hadamard_rows()
    broken = clean.clone()
    broken[3, 5] = value
    found, wanted = (hadamard_quant_fp8(x, backend=backend) for x in (broken, clean))
    assert not bool(found.scale[3].isfinite())
    keep = [i for i in range(len(clean)) if i != 3]
    assert_bitwise((found.values[keep], found.scale[keep]), (wanted.values[keep], wanted.scale[keep]))


@pytest.mark.parametrize(
    "shape",
    [*(pytest.param(s, marks=pytest.mark.no_launch) for s in [(0, 128), (2, 0, 4)]), (3, 2, 5, 16), (128,)],
    ids=str,
)
def test_shapes(shape, backend):
    x = torch.randn(shape).bfloat16()
    found = hadamard_quant_fp8(x, backend=backend)
    assert found.values.shape == x.shape
    assert found.scale.shape == x.shape[:-1]
    flat = hadamard_quant_fp8(x.reshape(-1, shape[-1]), backend=backend)
    assert_bitwise(flat.values.view(shape), found.values)


@pytest.mark.parametrize("wrap", [strided, guarded])
def test_inputs_any_strides_unchanged_and_unaliased(wrap, backend):
    x = hadamard_rows()
    wrapped = wrap(x)
    with unchanged(wrapped), nan_empty():
        found = hadamard_quant_fp8(wrapped, backend=backend)
    assert_bitwise(found, hadamard_quant_fp8(x, backend=backend))


def test_result_owns_its_memory(backend):
    x = hadamard_rows(size=1, dtype=torch.float32)
    found = hadamard_quant_fp8(x, backend=backend)
    assert all(y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for y in found)


def test_traceable(backend):
    assert_traceable(hadamard_quant_fp8, hadamard_rows(), backend=backend)


FLOATS = "bfloat16 or float16 or float32 or float64"
REFUSED = {
    "size": (torch.zeros(2, 96), "the last dimension of x must be a power of two, got 96."),
    "no channels": (torch.zeros(2, 0), "the last dimension of x must be a power of two, got 0."),
    "scalar": (torch.zeros(()), "x must have 1 dimensions [I], got 0: []."),
    "list": ([1.0], "x must be a tensor [I], got list."),
    "integers": (torch.zeros(4, dtype=torch.int32), f"x must be {FLOATS}, got int32."),
    "float8": (torch.zeros(4).to(torch.float8_e4m3fn), f"x must be {FLOATS}, got float8_e4m3fn."),
}


@pytest.mark.nothing_runs
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, backend):
    x, text = REFUSED[what]
    with pytest.raises(ContractError) as error:
        hadamard_quant_fp8(x, backend=backend)
    assert str(error.value) == f"hadamard_quant_fp8: {text}"
