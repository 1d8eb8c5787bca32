"""The norms against their definitions, and what holds for any input."""

from __future__ import annotations

import pytest
import torch

from glm5fn.ops.norm import gated_rms_norm, l2_norm, rms_norm
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget, error_report
from glm5fn.testing.inputs.norm import rows
from glm5fn.testing.oracle import norm as oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def calls(x, gate, weight, backend):
    """(what the kernel gave, the definition as a function of the dtype to evaluate it in)."""
    return {
        "rms_norm": (
            rms_norm(x, weight, eps=1e-5, backend=backend),
            lambda dtype: oracle.rms_norm(x, weight, eps=1e-5, dtype=dtype),
        ),
        "gated_rms_norm": (
            gated_rms_norm(x, gate, weight, eps=1e-5, backend=backend),
            lambda dtype: oracle.gated_rms_norm(x, gate, weight, eps=1e-5, dtype=dtype),
        ),
        "l2_norm": (l2_norm(x, backend=backend), lambda dtype: oracle.l2_norm(x, dtype=dtype)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 7, 128, 4096])
def test_definition(backend, dtype, D):
    x, gate, weight = rows(3, 4, D, dtype=dtype), rows(3, 4, D, dtype=dtype, seed=1), rows(1, D, seed=2)[0]
    for name, (found, define) in calls(x, gate, weight.to(dtype) + 1, backend).items():
        assert found.dtype == dtype
        assert_within_budget(found, define(torch.float64), define(torch.float32).to(dtype), what=name)


@pytest.mark.needs("float64")
def test_definition_in_float64(backend):
    x, gate, weight = (torch.randn(*s, dtype=torch.float64) for s in ((3, 9), (3, 9), (9,)))
    for name, (found, define) in calls(x, gate, weight, backend).items():
        assert error_report(found, define(torch.float64)).max_abs < 1e-10, name


def test_one_rounding(backend):
    """A bfloat16 result is the float32 one rounded: nothing is rounded in between."""
    x, gate, weight = (torch.randn(*s).bfloat16() for s in ((5, 64), (5, 64), (64,)))
    narrow, wide = (calls(*(t.to(d) for t in (x, gate, weight)), backend) for d in (torch.bfloat16, torch.float32))
    for name in narrow:
        assert_bitwise(narrow[name][0], wide[name][0].bfloat16(), what=name)


def test_zero_row_stays_zero(backend):
    for name, (found, _) in calls(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(8), backend).items():
        assert not found.any(), name


def test_rows_are_independent(backend):
    x, weight = torch.randn(4, 8), torch.ones(8)
    bad = x.clone()
    bad[2] = torch.nan
    kept = [0, 1, 3]
    for name, (found, _) in calls(bad, bad, weight, backend).items():
        assert_bitwise(found[kept], calls(x, x, weight, backend)[name][0][kept], what=name)


def test_strided(backend):
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    plain = calls(x, gate, weight, backend)
    apart = calls(poison.strided(x), poison.strided(gate), poison.strided(weight), backend)
    for name, (found, _) in apart.items():
        assert_within_budget(found, plain[name][0], what=name)
