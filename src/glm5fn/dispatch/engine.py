"""From a call to the function that runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5fn.dispatch import registry, selection
from glm5fn.dispatch.choice import Choice
from glm5fn.dispatch.choosing import choose, device_of, here, warn_of_fallback
from glm5fn.dispatch.errors import BackendUnavailable
from glm5fn.dispatch.hardware import Hardware
from glm5fn.dispatch.spec import is_capturing, make_spec

__all__ = ["dispatch", "explain"]

Decision = tuple[Callable[..., Any], Choice]

MEMO_SIZE = 4096
"""Decisions kept; the oldest goes first."""

_MEMO: dict[Any, Decision | str] = {}
"""By operation, asked backend and hardware; where the answer depends on more of the call, that entry holds the device
type, and there is one entry for each kind of call besides.
"""
_LOCK = threading.Lock()


@registry.on_change
def forget() -> None:
    """Drop every remembered decision."""
    with _LOCK:
        _MEMO.clear()


def dispatch(name: str, backend: str | None, /, *args: Any, **kwargs: Any) -> Any:
    """Run operation ``name`` on the backend that is asked for, or on the best one that can.

    An operation calls this last, with its arguments already checked, the positional ones in the order of its signature.

    Raises:
        BackendUnavailable: if no backend that was allowed to can run this call.
        ContractError: if ``backend`` is not a known word.
    """
    if torch.compiler.is_compiling():
        from glm5fn.dispatch import traced  # not at the top: it needs torch._dynamo, which takes a second to import

        return traced.run(name, backend, args, kwargs)
    scope = selection.current()
    if scope.explaining:
        raise _Reached(name, args, kwargs)
    function, choice = _decide(scope, name, backend, args, kwargs)
    out = function(*args, **kwargs)
    for recorder in scope.recorders:
        recorder.append(choice)
    return out


def _decide(
    scope: selection.Scope, name: str, backend: str | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> Decision:
    device = args[0].device if args and isinstance(args[0], Tensor) else device_of(args, kwargs)
    key: Any = (name, backend, scope.per_op.get(name) or scope.everything, device, scope.hardware)
    try:
        known = _MEMO.get(key)
    except TypeError:  # backend is no word at all, which is refused where words are checked
        known = None
    if known is None:
        return _select(scope, key, None, name, backend, args, kwargs)
    if not isinstance(known, str):
        return known
    full: Any = (*key, torch.is_grad_enabled(), is_capturing(known), *kwargs, *_properties(*args, *kwargs.values()))
    try:
        decision = _MEMO.get(full)
    except TypeError:  # a symbolic size or a list among the options cannot be a key
        full = decision = None
    return decision or _select(scope, key, full, name, backend, args, kwargs)  # type: ignore[return-value]


def _properties(*values: Any) -> list[Any]:
    """What limits can see of the arguments. Getting it is most of what a remembered choice costs."""
    return [
        (value.shape, value.dtype, value.requires_grad, value.is_contiguous() or value.stride())
        if isinstance(value, Tensor)
        else value
        for value in values
    ]


def _select(
    scope: selection.Scope,
    key: Any,
    full: Any,
    name: str,
    backend: str | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Decision:
    epoch = registry.EPOCH
    asked, source = selection.asked(name, backend, scope.everything, scope.per_op.get(name))
    declared = registry.operation(name)
    device_type = device_of(args, kwargs).type
    hardware = scope.hardware or here(device_type)
    capturing = is_capturing(device_type)
    spec = make_spec(declared.names, declared.defaults, name, hardware, args, kwargs, capturing=capturing)
    choice, function, by_call = choose(spec, asked, source)
    if function is None:
        raise BackendUnavailable(choice)
    warn_of_fallback(choice, spec.hardware)
    with _LOCK:
        if epoch is registry.EPOCH:  # else it was chosen from what has changed since
            _remember(key, device_type if by_call else (function, choice))
            if by_call and full is not None:
                _remember(full, (function, choice))
    return function, choice


def _remember(key: Any, decision: Decision | str) -> None:
    if len(_MEMO) >= MEMO_SIZE:
        del _MEMO[next(iter(_MEMO))]
    _MEMO[key] = decision


class _Reached(BaseException):
    """An operation under ``explain`` has checked its arguments. Not an Exception, so that nothing swallows it."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]):
        super().__init__(name)
        self.call = name, args, kwargs


def explain(
    op: str | Callable[..., Any],
    /,
    *args: Any,
    backend: str | None = None,
    hardware: Hardware | str | None = None,
    **kwargs: Any,
) -> Choice:
    """Say which backend would run ``op(*args, **kwargs)`` and what keeps every other one from it. Nothing runs.

    The operation checks its arguments as usual. Nothing is computed, so tensors on the meta device will do.

    Args:
        op: the operation or its name.
        *args: its positional arguments.
        backend: as for the operation itself.
        hardware: the chip to answer for, or its name, for instance ``"Ascend910B2"``; by default the one the tensors
            are on.
        **kwargs: its keyword arguments.

    Raises:
        ContractError: if the operation does not accept the arguments.
        ValueError: for an unknown operation.

    Example:
        >>> x = torch.empty(2, 3, 64, device="meta")
        >>> explain("l2_norm", x, backend="reference").backend
        'reference'
    """
    declared = registry.operation(op if isinstance(op, str) else getattr(op, "__name__", repr(op)))
    with selection.entered(selection.current().replace(explaining=True)):
        try:
            declared.function(*args, backend=backend, **kwargs)
        except _Reached as reached:
            name, given, options = reached.call
        else:
            raise RuntimeError(f"{declared.name} returned without reaching dispatch, so there is no choice to explain.")
    scope = selection.current()
    asked, source = selection.asked(name, backend, scope.everything, scope.per_op.get(name))
    chip = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    target = chip or scope.hardware or here(device_of(given, options).type)
    declared = registry.operation(name)
    spec = make_spec(declared.names, declared.defaults, name, target, given, options)
    return choose(spec, asked, source, full=True, load=hardware is None)[0]
