"""What the user asked for: ``backend=``, ``use_backend``, ``GLM5FN_BACKEND``, and in which order they count.

This is the only file of the library that reads the environment (the info command does too).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from glm5fn.dispatch import registry
from glm5fn.dispatch.errors import ContractError
from glm5fn.dispatch.registry import AUTO

if TYPE_CHECKING:
    from glm5fn.dispatch.choice import Choice
    from glm5fn.dispatch.hardware import Hardware

__all__ = ["Environment", "Scope", "assume_hardware", "record_choices", "reload_env", "use_backend"]

FALLBACK_MODES = ("warn", "silent", "error")


class Scope:
    """Everything that surrounds a call without being an argument. Never changed once it is current."""

    __slots__ = ("everything", "explaining", "hardware", "per_op", "recorders")

    def __init__(
        self,
        everything: str | None = None,
        per_op: Mapping[str, str] | None = None,
        hardware: Hardware | None = None,
        recorders: tuple[list[Choice], ...] = (),
        explaining: bool = False,
    ):
        self.everything = everything
        """Backend for every operation without an entry in ``per_op``; ``None`` leaves it to the environment."""
        self.per_op = {} if per_op is None else per_op
        self.hardware = hardware
        """What to take the tensors' device for, instead of probing it."""
        self.recorders = recorders
        self.explaining = explaining
        """``explain`` asks: operations check their arguments and do not run."""

    def replace(self, **changes: object) -> Scope:
        return Scope(**{name: getattr(self, name) for name in Scope.__slots__} | changes)


_SCOPE: ContextVar[Scope] = ContextVar("glm5fn_scope", default=Scope())  # noqa: B039 (a Scope never changes)
current = _SCOPE.get


class _Mirror(threading.local):
    """The current scope once more, where ``torch.compile`` can see it.

    A traced region cannot read a ContextVar, but it does guard on attributes of an instance (not on those of its
    class), so it compiles again when another frame is entered.
    """

    def __init__(self) -> None:
        self.scope = Scope()


MIRROR = _Mirror()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    # The previous scope is set again rather than a token reset: generators may be closed in another context.
    previous = _SCOPE.get()
    _SCOPE.set(scope)
    MIRROR.scope = scope
    try:
        yield scope
    finally:
        _SCOPE.set(previous)
        MIRROR.scope = previous


def use_backend(backend: str | None = None, /, **per_op: str) -> contextlib.AbstractContextManager[None]:
    """Within this context, run operations on the named backend: all of them, or those given by keyword, or both.

    Frames nest; the innermost one that says something about an operation counts, its entry for that operation before
    its general one. ``"auto"`` lifts what an outer frame or the environment asked for. A named backend never falls
    back: an operation that it cannot run raises BackendUnavailable. The frame belongs to this thread and asyncio
    task.

    Functions under ``torch.compile`` see the frames of their thread and compile again when these change, but cannot
    tell asyncio tasks apart: where a frame stays open across an ``await``, pass ``backend=`` in what is compiled.

    Raises:
        ValueError: for an unknown backend or operation, listing the known ones.

    Example:
        >>> with use_backend("auto", kda_chunk="reference"):
        ...     pass
    """
    if backend is None and not per_op:
        raise ValueError(
            "use_backend: name a backend, or give operations by keyword, for instance kda_chunk='reference'."
        )
    for word in [*([backend] if backend is not None else []), *per_op.values()]:
        check_backend("use_backend", word)
    for name in per_op:
        check_operation("use_backend", name)
    return _frame(backend, per_op)


@contextlib.contextmanager
def _frame(backend: str | None, per_op: dict[str, str]) -> Iterator[None]:
    outer = current()
    if backend is None:
        scope = outer.replace(per_op={**outer.per_op, **per_op})
    else:
        scope = outer.replace(everything=backend, per_op=per_op)
    with entered(scope):
        yield


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Collect the Choice of every operation that runs within this context, in order.

    It covers this thread and asyncio task, and tasks started inside. A region under ``torch.compile`` records when it
    is traced, not when it is run again. A Choice holds the verdicts of the backends that were looked at, best first,
    up to the one that ran.

    Example:
        >>> with record_choices() as choices:
        ...     pass
        >>> choices
        []
    """
    choices: list[Choice] = []
    scope = current()
    with entered(scope.replace(recorders=(*scope.recorders, choices))):
        yield choices


@contextlib.contextmanager
def assume_hardware(hardware: Hardware) -> Iterator[None]:
    """Within this context, choose as if all tensors sat on ``hardware``, to test choices on a machine without it."""
    with entered(current().replace(hardware=hardware)):
        yield


class Environment(NamedTuple):
    """``GLM5FN_BACKEND`` and ``GLM5FN_FALLBACK``, understood."""

    everything: str | None
    per_op: Mapping[str, str]
    fallback: str


@functools.lru_cache(maxsize=1)
def environment() -> Environment:
    """The environment variables as they were at the first use, or at the last :func:`reload_env`.

    Raises:
        ValueError: for a word that is not known, listing the known ones.
    """
    everything, per_op = parse(os.environ.get("GLM5FN_BACKEND", ""))
    fallback = os.environ.get("GLM5FN_FALLBACK", "").strip() or "warn"
    if fallback not in FALLBACK_MODES:
        raise ValueError(f"GLM5FN_FALLBACK: must be one of {', '.join(FALLBACK_MODES)}, got {fallback!r}.")
    return Environment(everything, per_op, fallback)


def interpreting() -> bool:
    """Whether Triton was asked to interpret its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def reload_env() -> None:
    """Read ``GLM5FN_BACKEND`` and ``GLM5FN_FALLBACK`` again, for instance after a notebook set them.

    Raises:
        ValueError: for a word that is not known; the old values are forgotten all the same.
    """
    environment.cache_clear()
    registry.changed()
    environment()


def parse(text: str) -> tuple[str | None, dict[str, str]]:
    """Understand ``auto|<backend>[,<op>=<backend>...]``; empty text asks for nothing.

    Raises:
        ValueError: for a word that is not known, listing the known ones, or for a second general or equal entry.
    """
    where = f"GLM5FN_BACKEND={text!r}"
    everything: str | None = None
    per_op: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, equals, word = (part.strip() for part in entry.partition("="))
        if not equals:
            if everything is not None:
                raise ValueError(f"{where}: only one word may be general, got {everything!r} and {name!r}.")
            check_backend(where, name)
            everything = name
            continue
        check_operation(where, name)
        check_backend(where, word)
        if name in per_op:
            raise ValueError(f"{where}: {name} is given twice.")
        per_op[name] = word
    return everything, per_op


def check_backend(where: str, word: str, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` unless ``word`` is "auto" or a known backend."""
    known = (AUTO, *registry.backends())
    if word not in known:
        raise error(f"{where}: no backend named {word!r}. Known: {', '.join(known)}.")


def check_operation(where: str, name: str) -> None:
    """Raise ValueError unless ``name`` is a known operation."""
    if name not in registry.operations():
        raise ValueError(f"{where}: no operation named {name!r}. Known: {', '.join(registry.operations())}.")


def asked(name: str, backend: str | None, everything: str | None, scoped: str | None) -> tuple[str, str]:
    """Which backend is asked for, and by whom: the argument, then the scope, then the environment, then auto."""
    if backend is not None:
        check_backend(f"{name}: backend", backend, ContractError)
        return backend, "backend argument"
    word = scoped or everything
    if word is not None:
        return word, "use_backend"
    env = environment()
    word = env.per_op.get(name) or env.everything
    return (word, "GLM5FN_BACKEND") if word is not None else (AUTO, "default")
