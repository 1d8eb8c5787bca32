"""Giving a state's memory away with ``donate=True``, and a debug mode that catches its use afterwards.

A donated state is overwritten and comes back as the result, so the one that was passed may not be used again. Normally
nothing watches this. Under :func:`debug_donation` the result lives in new memory, the old tensor is filled with NaN
(which also shows in every view of it), and passing the same tensor object to an operation again raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from glm5fn.dispatch.errors import ContractError

__all__ = ["check_state", "debug_donation", "settle"]

_GIVEN: WeakTensorKeyDictionary | None = None


@contextmanager
def debug_donation() -> Iterator[None]:
    """Inside, a state that was donated is filled with NaN and refused when it is passed to an operation again.

    For debugging: it is process-wide, costs a copy of every donated state, and compiled code is not watched.

    Example:
        >>> from glm5fn.ops.conv import causal_conv1d
        >>> x, weight, state = torch.ones(1, 2, 3), torch.ones(3, 4), torch.zeros(1, 3, 3)
        >>> with debug_donation():
        ...     out, new = causal_conv1d(x, weight, state=state, donate=True)
        ...     try:
        ...         causal_conv1d(x, weight, state=state)
        ...     except ContractError as error:
        ...         print(str(error).partition(".")[0])
        causal_conv1d: state was donated to causal_conv1d before, so it may not be used again
    """
    global _GIVEN
    outer, _GIVEN = _GIVEN, WeakTensorKeyDictionary()
    try:
        yield
    finally:
        _GIVEN = outer


def check_state(op: str, name: str, state: torch.Tensor | None, donate: bool, *others: torch.Tensor | None) -> None:
    """Check that ``state`` was not given away before and, if it is donated now, that it can be overwritten.

    Raises:
        ContractError: naming the operation, the argument and what to do instead.
    """
    if state is None:
        return
    if _GIVEN is not None and not torch.compiler.is_compiling() and state in _GIVEN:
        before = _GIVEN[state]
        raise ContractError(
            f"{op}: {name} was donated to {before} before, so it may not be used again. Use the state which that call "
            f"returned (`out, state = {before}(..., state, donate=True)`), or leave donate=False to keep the old one."
        )
    if not donate:
        return
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *others)):
        raise ContractError(
            f"{op}: donate=True overwrites {name}, which gradients need. Leave donate=False, or call under "
            "torch.no_grad()."
        )
    if any(stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape, strict=True)):
        raise ContractError(
            f"{op}: donate=True overwrites {name}, but its elements share memory (strides {list(state.stride())}, as "
            f"after expand). Pass {name}.contiguous()."
        )


def settle(op: str, old: torch.Tensor | None, new: torch.Tensor, donate: bool) -> torch.Tensor:
    """Return the new state; in debug mode, move it to new memory and make the donated one unusable."""
    if _GIVEN is None or not donate or old is None or torch.compiler.is_compiling():
        return new
    new = new.clone()
    old.fill_(torch.nan)
    _GIVEN[old] = op
    return new
