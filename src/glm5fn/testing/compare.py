"""Compare a result with the exact one: where the worst error sits, and whether it is within the budget.

There are no hand-tuned tolerances. ``exact`` is the definition evaluated in float64; ``low`` is the same definition
evaluated in the arithmetic that the kernel promises (float32, one rounding at the end). A kernel may lose twice what
that loses plus one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ErrorReport", "assert_bitwise", "assert_within_budget", "budget", "error_report"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ErrorReport(NamedTuple):
    """How far a tensor is from the exact one."""

    max_abs: float
    """Largest absolute error (``inf`` if any value is not finite where the exact one is)."""
    where: tuple[int, ...]
    """Index of the largest error."""
    found: float
    wanted: float
    rms_ratio: float
    """RMS of the error over RMS of the exact tensor (over 1 if that is zero)."""
    scale: float
    """Largest absolute value of the exact tensor."""
    window: tuple[int, int]
    """Start and end, along the windowed axis, of the window with the largest RMS ratio."""
    window_ratio: float
    """RMS of the error in that window over RMS of the exact tensor in it."""

    def __str__(self) -> str:
        start, end = self.window
        return (
            f"max error {self.max_abs:.3g} at {list(self.where)} (found {self.found:.9g}, wanted {self.wanted:.9g}, "
            f"scale {self.scale:.3g}); RMS ratio {self.rms_ratio:.3g}; worst window [{start}, {end}) has RMS ratio "
            f"{self.window_ratio:.3g}"
        )


def error_report(actual: torch.Tensor, exact: torch.Tensor, *, axis: int = 1, window: int = 64) -> ErrorReport:
    """Report the error of ``actual`` against ``exact``, also by windows of ``window`` elements along ``axis`` (time).

    A value that is not finite where the exact one is counts as an infinite error; equal infinities count as no error.

    Example:
        >>> report = error_report(torch.tensor([[1.0, 2.5]]), torch.tensor([[1.0, 2.0]]))
        >>> report.max_abs, report.where
        (0.5, (0, 1))
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shapes differ: found {list(actual.shape)}, wanted {list(exact.shape)}")
    a, e = actual.detach().double().cpu(), exact.detach().double().cpu()
    if e.numel() == 0:
        return ErrorReport(0.0, (), 0.0, 0.0, 0.0, 0.0, (0, 0), 0.0)
    if e.dim() == 0:
        a, e = a[None], e[None]
    error = (a - e).abs()
    error = torch.where(a == e, 0.0, torch.where(error.isnan(), torch.inf, error))
    worst = int(error.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), e.shape))
    axis = min(axis, e.dim() - 1)
    ratios = [
        _ratio(error.narrow(axis, s, min(window, e.shape[axis] - s)), e.narrow(axis, s, min(window, e.shape[axis] - s)))
        for s in range(0, e.shape[axis], window)
    ]
    start = max(range(len(ratios)), key=ratios.__getitem__) * window
    return ErrorReport(
        max_abs=float(error.max()),
        where=where,
        found=float(a[where]),
        wanted=float(e[where]),
        rms_ratio=_ratio(error, e),
        scale=float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0.0,
        window=(start, min(start + window, e.shape[axis])),
        window_ratio=max(ratios),
    )


def _ratio(error: torch.Tensor, exact: torch.Tensor) -> float:
    size = float(exact.square().mean().sqrt())
    return float(error.square().mean().sqrt()) / (size if size > 0 else 1.0)


def budget(low: torch.Tensor | None, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest error allowed: ``2 * (error of low + one rounding of dtype at the scale of exact)``."""
    scale = float(exact.double().abs().max()) if exact.numel() else 0.0
    rounding = torch.finfo(dtype).eps * scale
    return 2.0 * ((error_report(low, exact).max_abs if low is not None else 0.0) + rounding)


def assert_within_budget(actual: Any, exact: Any, low: Any = None, *, what: str = "result") -> None:
    """Assert that ``actual`` is finite and within the budget of ``exact``; tuples are compared field by field.

    Args:
        actual: what the kernel gave.
        exact: the definition evaluated in float64.
        low: the definition evaluated in the arithmetic that the kernel promises, rounded to the dtype of ``actual``;
            without it only the rounding counts.
        what: name used in the message.

    Raises:
        AssertionError: with the error, where it sits and the budget.

    Example:
        >>> third = torch.tensor(1.0, dtype=torch.float64) / 3
        >>> assert_within_budget(third.float(), third)
    """
    if not isinstance(actual, torch.Tensor):
        names: Sequence[str] = getattr(actual, "_fields", [str(i) for i in range(len(actual))])
        lows = [None] * len(actual) if low is None else low
        for name, a, e, lo in zip(names, actual, exact, lows, strict=True):
            assert_within_budget(a, e, lo, what=f"{what}.{name}")
        return
    report = error_report(actual, exact)
    allowed = budget(low, exact, actual.dtype)
    if not report.max_abs <= allowed:
        base = "" if low is None else f"; the same definition in this arithmetic: {error_report(low, exact)}"
        raise AssertionError(f"{what} ({actual.dtype}) exceeds its budget {allowed:.3g}: {report}{base}")


def assert_bitwise(actual: Any, expected: Any, *, what: str = "result") -> None:
    """Assert that two tensors, or trees of tuples of them, are the same bit for bit (NaN equals the same NaN, 0 is not
    -0).

    Raises:
        AssertionError: with the number of elements that differ and the first one.
    """
    if actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(f"{what}: found {actual!r}, wanted {expected!r}")
        return
    if not isinstance(actual, torch.Tensor):
        names = getattr(actual, "_fields", [str(i) for i in range(len(actual))])
        for name, a, e in zip(names, actual, expected, strict=True):
            assert_bitwise(a, e, what=f"{what}.{name}")
        return
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: found {list(actual.shape)} {actual.dtype}, wanted {list(expected.shape)} {expected.dtype}"
        )
    a, e = _bits(actual), _bits(expected)
    if not torch.equal(a, e):
        differ = a != e
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, first at {list(first)}: found "
            f"{actual[first].item()!r}, wanted {expected[first].item()!r}"
        )


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().cpu().contiguous()
    return x if x.dtype == torch.bool else x.view(_BITS[x.element_size()])
