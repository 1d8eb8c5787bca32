"""Choosing inside a region that ``torch.compile`` traces.

Three facts of Dynamo shape this file. It cannot read a ContextVar, so the scope comes from the mirror, on whose
attributes it guards: entering another frame compiles again. It runs functions marked ``assume_constant_result`` as
they are and bakes in what they return, which must be plain constants; so whatever the answer depends on is an
argument of theirs, the epoch included. And it calls functions only where it can guard on them, so they are handed
over as attributes of an object. Limits are traced, not baked in: the graph is guarded by exactly the comparisons that
they make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm5fn.dispatch import registry, selection
from glm5fn.dispatch.choice import Choice, Verdict
from glm5fn.dispatch.choosing import device_of, here, order, standing_reasons, warn_of_fallback
from glm5fn.dispatch.errors import BackendUnavailable
from glm5fn.dispatch.registry import AUTO
from glm5fn.dispatch.spec import make_spec

__all__ = ["run"]


class _Handover:
    """Functions, limits and hardware: set by :func:`_candidates`, then read by the traced code."""


_HANDOVER = _Handover()

Refusals = tuple[tuple[str, tuple[str, ...]], ...]


def run(name: str, backend: str | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As ``dispatch``, in traced code."""
    scope = selection.MIRROR.scope
    everything, scoped = (scope.everything, scope.per_op.get(name)) if backend is None else (None, None)
    call = (name, backend, everything, scoped, device_of(args, kwargs).type, registry.EPOCH)
    refusals: Refusals = ()
    for candidate, limited in _candidates(*call):
        reasons = _limits(call, candidate, args, kwargs) if limited else []
        if not reasons:
            _conclude(*call, candidate, refusals)
            return getattr(_HANDOVER, f"{name}__{candidate}")(*args, **kwargs)
        refusals = (*refusals, (candidate, tuple(reasons)))
    return _conclude(*call, None, refusals)


def _limits(call: tuple[Any, ...], candidate: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    name, *_, device_type, _ = call
    hardware = getattr(_HANDOVER, f"hardware__{device_type}")
    names, defaults = _parameters(name)
    spec = make_spec(names, dict(defaults), name, hardware, args, kwargs)
    return getattr(_HANDOVER, f"{name}__{candidate}__limits")(spec)


@torch.compiler.assume_constant_result
def _parameters(name: str) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    declared = registry.operation(name)
    return declared.names, tuple(declared.defaults.items())


@torch.compiler.assume_constant_result
def _candidates(
    name: str, backend: str | None, everything: str | None, scoped: str | None, device_type: str, epoch: str
) -> tuple[tuple[str, bool], ...]:
    """The backends to try, best first, each with whether it has limits, up to the first one that has none."""
    scope = selection.current()
    if backend is None and (scope.everything, scope.per_op.get(name)) != (everything, scoped):
        raise RuntimeError(
            f"{name}: another task of this thread holds a use_backend frame open, and torch.compile cannot tell tasks "
            "apart. Pass backend= inside compiled functions, or do not await inside use_backend."
        )
    asked, _ = selection.asked(name, backend, everything, scoped)
    hardware = scope.hardware or here(device_type)
    setattr(_HANDOVER, f"hardware__{device_type}", hardware)
    candidates: list[tuple[str, bool]] = []
    for candidate in registry.order(name) if asked == AUTO else (asked,):
        found = registry.implementation(name, candidate)
        if found is None or standing_reasons(name, candidate, hardware, asked):
            continue
        function, problem = registry.try_load(found)
        if problem is not None:
            continue
        setattr(_HANDOVER, f"{name}__{candidate}", function)
        candidates.append((candidate, found.unsupported is not None))
        if found.unsupported is None:
            break
        setattr(_HANDOVER, f"{name}__{candidate}__limits", registry.resolve(found.unsupported))
    return tuple(candidates)


@torch.compiler.assume_constant_result
def _conclude(
    name: str,
    backend: str | None,
    everything: str | None,
    scoped: str | None,
    device_type: str,
    epoch: str,
    chosen: str | None,
    refusals: Refusals,
) -> None:
    """Record what was chosen, or raise BackendUnavailable, while tracing."""
    scope = selection.current()
    asked, source = selection.asked(name, backend, everything, scoped)
    hardware = scope.hardware or here(device_type)
    limits = dict(refusals)
    verdicts = []
    for candidate in order(name, asked):
        found = registry.implementation(name, candidate)
        reasons = (*standing_reasons(name, candidate, hardware, asked), *limits.get(candidate, ()))
        if not reasons and candidate != chosen and found is not None:
            problem = registry.try_load(found)[1]
            if problem is not None:
                reasons = (problem,)
            elif found.unsupported is not None:
                reasons = ("its limits were not asked while torch.compile was tracing",)
        verdicts.append(Verdict(candidate, reasons))
    choice = Choice(name, chosen, asked, source, tuple(verdicts))
    if chosen is None:
        raise BackendUnavailable(choice)
    warn_of_fallback(choice, hardware)
    for recorder in scope.recorders:
        recorder.append(choice)
