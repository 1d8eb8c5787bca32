"""The checks themselves can fail."""

from __future__ import annotations

import pytest
import torch

from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget, budget, error_report
from glm5fn.testing.trace import no_host_reads


def test_report_finds_the_worst_element_and_window():
    exact = torch.ones(2, 200, 3, dtype=torch.float64)
    actual = exact.clone()
    actual[1, 130, 2] += 0.5
    report = error_report(actual, exact)
    assert (report.max_abs, report.where, report.window) == (0.5, (1, 130, 2), (128, 192))
    assert report.window_ratio > report.rms_ratio > 0
    assert "max error 0.5 at [1, 130, 2]" in str(report)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_an_infinite_error(bad):
    exact = torch.ones(3, dtype=torch.float64)
    actual = torch.tensor([1.0, bad, 1.0])
    assert error_report(actual, exact).max_abs == torch.inf
    with pytest.raises(AssertionError, match="exceeds its budget"):
        assert_within_budget(actual, exact)


def test_budget_is_twice_the_plain_error_plus_a_rounding():
    exact = torch.tensor([4.0, 1.0], dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    assert budget(None, exact, torch.bfloat16) == 8 * eps
    assert budget(exact + 0.25, exact, torch.bfloat16) == 0.5 + 8 * eps
    assert_within_budget((exact + 8 * eps).bfloat16(), exact)
    with pytest.raises(AssertionError, match=r"y\.1 .*found 1\.125, wanted 1"):
        assert_within_budget((exact, (exact + torch.tensor([0, 16 * eps])).bfloat16()), (exact, exact), what="y")


def test_shapes_and_arity_must_match():
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_within_budget(torch.ones(3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="zip"):
        assert_bitwise((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_bitwise_tells_signs_of_zero_and_dtypes_apart_but_not_nans():
    assert_bitwise(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]))
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, first at \[1\]: found -0.0, wanted 0.0"):
        assert_bitwise(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]))
    with pytest.raises(AssertionError, match="float16"):
        assert_bitwise(torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.bfloat16))


def test_poisoned_memory_shows():
    with poison.nan_empty():
        made = [
            torch.empty(2),
            torch.empty_like(torch.ones(2)),
            torch.ones(1).new_empty(2),
            torch.empty_strided((2,), (1,)),
        ]
        assert torch.empty(1, dtype=torch.int32).item() == torch.iinfo(torch.int32).min
    assert all(x.isnan().all() for x in made)


@pytest.mark.parametrize("make", [poison.guarded, poison.strided])
def test_neighbours_are_poisoned_and_watched(make):
    x = make(torch.ones(4))
    assert torch.equal(x, torch.ones(4))
    beside = x.as_strided((1,), (1,), x.storage_offset() + (4 if make is poison.guarded else 1))
    assert beside.isnan().all()
    with pytest.raises(AssertionError, match=r"input 0 .* was written to"), poison.unchanged(x):
        beside.fill_(1)
    with pytest.raises(AssertionError, match=r"input 1 .* was written to"), poison.unchanged(torch.ones(1), x):
        x[2] = 3


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, torch.nonzero])
def test_host_reads_are_caught(read):
    with pytest.raises(AssertionError, match="host wait"), no_host_reads():
        read(torch.ones(1))
