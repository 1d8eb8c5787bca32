"""Which operations there are, and which implementations each has.

Operations are declared with :func:`op` beside their argument checks; implementations come from the table in
:mod:`glm5fn.kernels` and from :func:`register`. Nothing here chooses: see :mod:`glm5fn.dispatch.engine`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from glm5fn.dispatch.hardware import Hardware
from glm5fn.dispatch.spec import OpSpec
from glm5fn.kernels import BACKENDS, TABLE, Backend

__all__ = ["Registration", "backends", "op", "register", "unregister"]

F = TypeVar("F", bound=Callable[..., Any])
Available = Callable[[Hardware], list[str]]
Unsupported = Callable[[OpSpec], list[str]]

AUTO = "auto"


@attrs.frozen(eq=False)
class Op:
    """An operation as declared: its public function and its parameters without ``backend``."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    names: tuple[str, ...]
    defaults: dict[str, Any]


@attrs.frozen(eq=False)
class Implementation:
    """One way to run one operation. What is given as ``"module:function"`` is imported when it is first needed."""

    op: str
    backend: str
    target: str | Callable[..., Any]
    priority: int
    available: str | Available | None = None
    unsupported: str | Unsupported | None = None
    builtin: bool = False

    def reasons(self, hardware: Hardware) -> list[str]:
        """Why it cannot run on ``hardware``, beyond what its backend says."""
        return [] if self.available is None else list(resolve(self.available)(hardware))

    def limits(self, spec: OpSpec) -> list[str]:
        """Why it cannot run this call."""
        return [] if self.unsupported is None else list(resolve(self.unsupported)(spec))


_OPS: dict[str, Op] = {}
_IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    (name, backend): Implementation(
        name, backend, kernel.target, BACKENDS[backend].priority, unsupported=kernel.limits, builtin=True
    )
    for name, kernels in TABLE.items()
    for backend, kernel in kernels.items()
}
_LOADED: dict[Implementation, Callable[..., Any]] = {}
_LOCK = threading.RLock()
_ON_CHANGE: list[Callable[..., Any]] = []
EPOCH = "0"
"""Counts the changes. A string, because torch.compile would turn an integer that changes into a symbol."""


def op(function: F) -> F:
    """Declare an operation: a function that checks its arguments and ends in ``dispatch(name, backend, ...)``.

    It is returned unchanged. Its signature, without the keyword-only ``backend=None`` that every operation has, is
    what each implementation must have.

    Raises:
        TypeError: if it takes ``*args`` or ``**kwargs``, or has no keyword-only ``backend=None``.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters
    backend = parameters.get("backend")
    if backend is None or backend.kind is not inspect.Parameter.KEYWORD_ONLY or backend.default is not None:
        raise TypeError(f"{name}: an operation has a keyword-only parameter backend=None.")
    kept = tuple(p for p in parameters.values() if p.name != "backend")
    for p in kept:
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise TypeError(f"{name}: an operation names every parameter, so it cannot take {p}.")
    defaults = {p.name: p.default for p in kept if p.default is not inspect.Parameter.empty}
    with _LOCK:
        again = name in _OPS
        _OPS[name] = Op(name, function, kept, tuple(p.name for p in kept), defaults)
        if again:  # in a notebook: its implementations must be compared with the new signature
            _LOADED.clear()
            changed()
    return function


def operation(name: str) -> Op:
    """The declaration of operation ``name``; imports the file that declares a built-in one."""
    if name not in _OPS and name in TABLE:
        file = TABLE[name]["reference"].target.partition(":")[0].rpartition(".")[2]
        importlib.import_module(f"glm5fn.ops.{file}")
    if name not in _OPS:
        raise ValueError(f"No operation named {name!r}. Known: {', '.join(operations())}.")
    return _OPS[name]


def operations() -> tuple[str, ...]:
    """Names of all known operations."""
    return tuple(dict.fromkeys([*TABLE, *_OPS]))


def backends() -> tuple[str, ...]:
    """Names of all known backends: the built-in ones in the order in which ``auto`` tries them, then registered ones.

    Example:
        >>> backends()
        ('ascendc', 'triton', 'reference')
    """
    return tuple(dict.fromkeys([*BACKENDS, *(backend for _, backend in list(_IMPLEMENTATIONS))]))


def implementation(name: str, backend: str) -> Implementation | None:
    """How ``backend`` runs operation ``name``, if it can at all."""
    return _IMPLEMENTATIONS.get((name, backend))


def order(name: str) -> tuple[str, ...]:
    """The backends that ``auto`` considers for operation ``name``, best first."""
    known = [b for b in backends() if b in BACKENDS or (name, b) in _IMPLEMENTATIONS]

    def priority(backend: str) -> int:
        found = implementation(name, backend)
        return found.priority if found is not None else BACKENDS[backend].priority

    return tuple(sorted(known, key=priority, reverse=True))


def family(backend: str) -> Backend:
    """What is known about a backend as a whole."""
    return BACKENDS.get(backend) or Backend(backend, _USER_PRIORITY)


_USER_PRIORITY = -1


@functools.lru_cache(maxsize=512)
def _import(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise AttributeError(f"{module} has no function {attribute!r}, which {target!r} names.") from None


def resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or the one that ``"module:function"`` names."""
    return _import(target) if isinstance(target, str) else target


def load(found: Implementation) -> Callable[..., Any]:
    """The function that runs ``found``, imported and compared with the operation's signature the first time.

    Raises:
        ImportError: if its module cannot be imported.
        TypeError: if its signature is not the operation's.
    """
    function = _LOADED.get(found)
    if function is None:
        function = resolve(found.target)
        check_signature(operation(found.op), function)
        _LOADED[found] = function
    return function


def try_load(found: Implementation) -> tuple[Callable[..., Any] | None, str | None]:
    """The function that runs ``found``, or why there is none: a reason like any other not to run there."""
    try:
        return load(found), None
    except (ImportError, OSError) as error:
        return None, f"{found.target} cannot be imported: {type(error).__name__}: {error}"
    except (AttributeError, TypeError) as error:
        return None, f"{found.target} cannot be used: {error}"


def check_signature(declared: Op, function: Callable[..., Any]) -> None:
    """Check that ``function`` has the parameters of ``declared``: same names, order, kinds and defaults.

    Raises:
        TypeError: showing both signatures.
    """

    def key(p: inspect.Parameter) -> tuple[str, object, str]:
        return p.name, p.kind, repr(p.default)

    found = tuple(inspect.signature(function).parameters.values())
    if [key(p) for p in found] != [key(p) for p in declared.parameters]:
        bare = [inspect.Signature([p.replace(annotation=p.empty) for p in ps]) for ps in (declared.parameters, found)]
        where = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
        raise TypeError(
            f"{declared.name}: an implementation must have the operation's signature without backend, "
            f"{declared.name}{bare[0]}, but {where} has {bare[1]}."
        )


class Registration:
    """What :func:`register` returns: keep it to undo the registration, or use it as a context manager."""

    def __init__(self, found: Implementation):
        self._found = found

    def remove(self) -> None:
        """Undo the registration; does nothing the second time."""
        with _LOCK:
            if _IMPLEMENTATIONS.get((self._found.op, self._found.backend)) is self._found:
                unregister(self._found.op, self._found.backend)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def register(
    op: str,
    backend: str,
    target: str | Callable[..., Any],
    *,
    available: str | Available | None = None,
    unsupported: str | Unsupported | None = None,
    priority: int | None = None,
) -> Registration:
    """Add an implementation of an operation, under a known backend that has none or under a new backend name.

    Args:
        op: name of the operation.
        backend: name of the backend; a new one becomes known to ``backend=``, ``use_backend`` and ``GLM5FN_BACKEND``.
        target: the function, or ``"module:function"`` to import it only when it is first chosen. It must have the
            operation's signature without ``backend``: names, order, kinds and defaults. A string is checked when it is
            loaded.
        available: ``available(hardware) -> list[str]``, every reason why it cannot run on that hardware.
        unsupported: ``unsupported(spec) -> list[str]``, every reason why it cannot run that call, each with the value
            found and the limit; it must be cheap and depend on nothing but ``spec``.
        priority: where ``auto`` tries it: ascendc is 20, triton 10, reference 0. By default the backend's own, and for
            a new name -1, which ``auto`` never reaches because reference comes first.

    Raises:
        ValueError: for an unknown operation, an illegal backend name, or one that already implements ``op``.
        TypeError: for a function whose signature differs from the operation's.

    Example:
        >>> def mine(x, *, eps=1e-6):
        ...     return x / (x.float().square().sum(-1, keepdim=True) + eps).sqrt()
        >>> with register("l2_norm", "mine", mine):
        ...     backends()
        ('ascendc', 'triton', 'reference', 'mine')
    """
    declared = operation(op)
    if not backend.isidentifier() or backend == AUTO:
        raise ValueError(f"register: backend must be a word other than 'auto', got {backend!r}.")
    if not isinstance(target, str):
        check_signature(declared, target)
    found = Implementation(
        op, backend, target, family(backend).priority if priority is None else priority, available, unsupported
    )
    with _LOCK:
        if (op, backend) in _IMPLEMENTATIONS:
            raise ValueError(
                f"register: {backend} already has an implementation of {op}. "
                "Choose another backend name, or unregister that one first."
            )
        _IMPLEMENTATIONS[op, backend] = found
        changed()
    return Registration(found)


def unregister(op: str, backend: str) -> None:
    """Remove an implementation that :func:`register` added.

    Raises:
        ValueError: if there is none, or if it is one of the package's own.
    """
    with _LOCK:
        found = _IMPLEMENTATIONS.get((op, backend))
        if found is None or found.builtin:
            what = "is part of glm5fn" if found else "is not registered"
            raise ValueError(f"unregister: the {backend} implementation of {op} {what}.")
        del _IMPLEMENTATIONS[op, backend]
        _LOADED.pop(found, None)
        changed()


def on_change(callback: F) -> F:
    """Call ``callback`` whenever an operation, an implementation or the environment changes."""
    _ON_CHANGE.append(callback)
    return callback


def changed() -> None:
    """Start a new epoch: whatever was chosen before must be chosen again."""
    global EPOCH
    EPOCH = f"{int(EPOCH) + 1}"
    for callback in _ON_CHANGE:
        callback()


@functools.lru_cache(maxsize=1)
def version() -> str:
    """The installed version of glm5fn."""
    return importlib.metadata.version("glm5fn")
