"""Make reads of memory that nobody wrote, and writes to memory that nobody gave, visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from glm5fn.testing.compare import assert_bitwise

__all__ = ["fenced", "guarded", "nan_empty", "strided", "unchanged"]


@contextmanager
def nan_empty() -> Iterator[None]:
    """Inside, every ``torch.empty*`` and ``Tensor.new_empty*`` called from Python returns NaN (integers: their smallest
    value).

    Example:
        >>> with nan_empty():
        ...     bool(torch.empty(3).isnan().all())
        True
    """
    with (
        mock.patch.object(torch, "empty", _filled(torch.empty)),
        mock.patch.object(torch, "empty_like", _filled(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", _filled(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", _filled(torch.Tensor.new_empty)),
        mock.patch.object(torch.Tensor, "new_empty_strided", _filled(torch.Tensor.new_empty_strided)),
    ):
        yield


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        with torch.no_grad():
            if x.dtype.is_floating_point or x.dtype.is_complex:
                return x.fill_(torch.nan)
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    return poisoned


@contextmanager
def fenced(*, margin: int = 64) -> Iterator[None]:
    """As :func:`nan_empty`, and on leaving assert that nothing was written in the ``margin`` elements right before and
    right after any of these tensors, or one from ``Tensor.new_zeros``.

    Example:
        >>> with fenced(margin=1):
        ...     torch.empty(3).as_strided((4,), (1,), 1).zero_()  # one element too many
        Traceback (most recent call last):
        AssertionError: memory right after a new tensor [3] was written to: 1 of 1 elements differ, first at [0]: found
        0.0, wanted nan
    """
    fences: list[tuple[torch.Tensor, torch.Size]] = []

    def fence(make: Callable[..., torch.Tensor], *, poison: bool) -> Callable[..., torch.Tensor]:
        def inside(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            if not x.is_contiguous() or x.device.type == "meta":
                return _filled(lambda: x)() if poison else x
            buffer = _filled(make_empty)(x.numel() + 2 * margin, dtype=x.dtype, device=x.device)
            fences.append((buffer, x.shape))
            view = buffer[margin : margin + x.numel()].view(x.shape)
            return view if poison else view.copy_(x)

        return inside

    make_empty = torch.empty
    with (
        mock.patch.object(torch, "empty", fence(torch.empty, poison=True)),
        mock.patch.object(torch, "empty_like", fence(torch.empty_like, poison=True)),
        mock.patch.object(torch.Tensor, "new_empty", fence(torch.Tensor.new_empty, poison=True)),
        mock.patch.object(torch.Tensor, "new_zeros", fence(torch.Tensor.new_zeros, poison=False)),
    ):
        yield
    for buffer, shape in fences:
        for side, edge in (("before", buffer[:margin]), ("after", buffer[len(buffer) - margin :])):
            clean = _filled(torch.empty_like)(edge)
            assert_bitwise(edge, clean, what=f"memory right {side} a new tensor {list(shape)} was written to")


def guarded(x: torch.Tensor, *, margin: int = 64, value: float = torch.nan) -> torch.Tensor:
    """Return a contiguous copy of ``x`` with ``margin`` elements of ``value`` right before and right after it in
    memory.

    A kernel that reads past either end sees ``value``; :func:`unchanged` on the result also sees a write there.

    Example:
        >>> guarded(torch.ones(2), margin=1).untyped_storage().nbytes() // 4
        4
    """
    if not x.dtype.is_floating_point:
        value = torch.iinfo(x.dtype).min
    buffer = torch.full((x.numel() + 2 * margin,), value, dtype=x.dtype, device=x.device)
    view = buffer[margin : margin + x.numel()].view(x.shape)
    view.copy_(x.detach())
    return view


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` whose last axis has stride 2, with NaN (integers: the smallest value) between the
    elements.

    Example:
        >>> strided(torch.ones(2, 3)).stride()
        (6, 2)
    """
    gap = torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    buffer = torch.full((*x.shape, 2), gap, dtype=x.dtype, device=x.device)
    view = buffer[..., 0]
    view.copy_(x.detach())
    return view


@contextmanager
def unchanged(*tensors: torch.Tensor | None) -> Iterator[None]:
    """Assert on leaving that the whole storage behind every tensor holds the same bits as on entering.

    Example:
        >>> x = torch.zeros(3)
        >>> with unchanged(x):
        ...     y = x + 1
    """
    whole = [x.new_tensor([]).set_(x.untyped_storage()) for x in tensors if x is not None]
    before = [w.clone() for w in whole]
    yield
    for i, (w, b) in enumerate(zip(whole, before, strict=True)):
        assert_bitwise(w, b, what=f"input {i} (or memory beside it) was written to;")
