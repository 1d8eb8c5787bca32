"""Asking the backends about one call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from glm5fn.dispatch import registry, selection
from glm5fn.dispatch.choice import Choice, Verdict
from glm5fn.dispatch.errors import BackendFallback
from glm5fn.dispatch.hardware import Hardware, probe
from glm5fn.dispatch.registry import AUTO
from glm5fn.dispatch.spec import OpSpec

__all__ = ["choose", "device_of", "here", "local", "order", "standing_reasons", "warn_of_fallback"]

_WARNED: set[Choice] = set()
_WARNED_SIZE = 4096
_LOCK = threading.Lock()
registry.on_change(_WARNED.clear)


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where the first tensor argument is; the operation has checked that the others are there too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def here(device_type: str) -> Hardware:
    """The hardware of this machine behind ``device_type``."""
    return probe(device_type, interpreter=selection.interpreting())


def local() -> Hardware:
    """The accelerator of this machine, or its CPU."""
    npu = getattr(torch, "npu", None)
    return here("cuda" if torch.cuda.is_available() else "npu" if npu is not None and npu.is_available() else "cpu")


def order(op: str, asked: str) -> tuple[str, ...]:
    """The backends to ask about a call, best first."""
    known = registry.order(op)
    return known if asked in (AUTO, *known) else (*known, asked)


def choose(
    spec: OpSpec, asked: str, source: str, *, full: bool = False, load: bool = True
) -> tuple[Choice, Callable[..., Any] | None, bool]:
    """Ask the backends about ``spec``.

    Args:
        spec: the call.
        asked: ``"auto"`` or a backend.
        source: who asked.
        full: ask every backend; otherwise only those up to the one that runs, and all of them when none does.
        load: import the function of the backend that is chosen; without it none is returned.

    Returns:
        The choice, the function that runs it (``None`` if no backend can), and whether the answer depends on more of
        the call than the operation and the hardware.
    """
    if full or asked == AUTO:
        return _ask(order(spec.op, asked), spec, asked, source, full=full, load=load)
    only = _ask((asked,), spec, asked, source, full=False, load=load)
    return only if only[0].backend else _ask(order(spec.op, asked), spec, asked, source, full=True, load=load)


def _ask(
    candidates: Sequence[str], spec: OpSpec, asked: str, source: str, *, full: bool, load: bool
) -> tuple[Choice, Callable[..., Any] | None, bool]:
    chosen: str | None = None
    function: Callable[..., Any] | None = None
    by_call = False
    verdicts = []
    for backend in candidates:
        found = registry.implementation(spec.op, backend)
        reasons = standing_reasons(spec.op, backend, spec.hardware, asked)
        if found is not None:
            by_call = by_call or (not reasons and found.unsupported is not None)
            reasons = reasons + found.limits(spec)
        if found is not None and not reasons and chosen is None and asked in (AUTO, backend):
            function, problem = registry.try_load(found) if load else (None, None)
            if problem is None:
                chosen = backend
            else:
                reasons = [problem]
        verdicts.append(Verdict(backend, tuple(reasons)))
        if chosen is not None and not full:
            break
    return Choice(spec.op, chosen, asked, source, tuple(verdicts)), function, by_call


def standing_reasons(op: str, backend: str, hardware: Hardware, asked: str) -> list[str]:
    """Why ``backend`` runs no call of ``op`` on ``hardware`` at all."""
    family, found = registry.family(backend), registry.implementation(op, backend)
    reasons = [] if found is not None else [_no_kernel(op, backend)]
    if family.available is not None:
        reasons += registry.resolve(family.available)(hardware)
    if asked == AUTO and family.uninvited is not None:
        reasons += registry.resolve(family.uninvited)(hardware)
    if found is not None:
        reasons += found.reasons(hardware)
    if (
        asked == AUTO
        and backend == "reference"
        and hardware.accelerator
        and selection.environment().fallback == "error"
    ):
        reasons.append(f"GLM5FN_FALLBACK=error does not let auto fall back to it on {hardware.name}; name it to use it")
    return reasons


def _no_kernel(op: str, backend: str) -> str:
    if backend not in registry.BACKENDS:
        return f"nobody registered a kernel for {op}"
    return f"glm5fn {registry.version()} has no {registry.family(backend).title} kernel for {op}"


def warn_of_fallback(choice: Choice, hardware: Hardware) -> None:
    if choice.asked != AUTO or choice.backend != "reference" or not hardware.accelerator:
        return
    if selection.environment().fallback != "warn":
        return
    with _LOCK:
        if choice in _WARNED:
            return
        if len(_WARNED) >= _WARNED_SIZE:
            _WARNED.clear()
        _WARNED.add(choice)
    warnings.warn(
        f"{choice.op} runs on the slow reference backend although its tensors are on {hardware}. "
        f"GLM5FN_FALLBACK=silent hides this, =error forbids it, backend='reference' asks for it.\n{choice}",
        BackendFallback,
        stacklevel=6,
    )
