"""What holds for the rotated float8 quantisation of any rows."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5fn.ops.quant import hadamard_quant_fp8
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs.quant import hadamard_rows
from glm5fn.testing.oracle import quant as exact

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows = st.tuples(st.sampled_from([1, 4, 32, 128]), st.integers(0, 999))


def make(case):
    return hadamard_rows(size=case[0], seed=case[1])


@few
@given(case=st.tuples(st.sampled_from([1, 2, 16, 32]), st.integers(0, 999)))
def test_bits_are_the_definition(backend, case):
    assert_bitwise(hadamard_quant_fp8(make(case), backend=backend), exact.hadamard_quant_fp8(make(case)))


@few
@given(case=rows)
def test_scale_is_the_least_power_of_two_that_fits(backend, case):
    values, scale = hadamard_quant_fp8(make(case), backend=backend)
    mantissa, _ = torch.frexp(scale)
    assert bool((mantissa == 0.5).all())
    largest = values.float().abs().amax(-1)
    small = scale == 2.0**-22
    assert bool((largest <= 448).all())
    assert bool(((largest >= 208) | small).all())  # 224 before rounding, or the row is below the least scale


@few
@given(case=rows)
def test_scaling_by_a_power_of_two_scales_the_scale(backend, case):
    x = make(case)
    one, two = (hadamard_quant_fp8(x * f, backend=backend) for f in (1, 4))
    normal = one.scale > 2.0**-22
    assert_bitwise(two.values[normal], one.values[normal])
    assert_bitwise(two.scale[normal], one.scale[normal] * 4)


@few
@given(case=rows)
def test_negation_flips_signs_only(backend, case):
    x = make(case)
    one, two = (hadamard_quant_fp8(x * f, backend=backend) for f in (1, -1))
    assert_bitwise(two.scale, one.scale)
    assert bool((two.values.float() == -one.values.float()).all())


@few
@given(case=rows, data=st.data())
def test_rows_are_independent(backend, case, data):
    x = make(case)
    order = data.draw(st.permutations(range(len(x))))
    whole = hadamard_quant_fp8(x, backend=backend)
    assert_bitwise(hadamard_quant_fp8(x[order], backend=backend), (whole.values[order], whole.scale[order]))
