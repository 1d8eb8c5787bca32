"""The host side of every kernel: what a device offers, how many programs to start, and on which device.

A launcher allocates its results in plain torch and hands them to a function marked :func:`opaque`, which chooses tiles
and calls :func:`run`. This module imports no Triton, so launchers and limits can be imported on any machine.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["CHIPS", "Chip", "chip_of", "counted", "dot_precision", "opaque", "outer", "power_of_two", "programs", "run"]

UNIT = 8
"""Strides of aligned tensors are passed in units of this many elements: 16 bytes of the narrowest dtype."""
MOST_AXES = 3
"""Axes before the last that kernels over rows can walk."""
_MOST_PROGRAMS = 65535
_UNIFIED_BUFFER = {"A2": (192 << 10) - 256, "A3": (192 << 10) - 256, "A5": 248 << 10}


class Chip(NamedTuple):
    """What the heuristics may know of a device."""

    kind: str
    """``"cuda"``, ``"hip"``, ``"ascend"`` or ``"interpreter"``."""
    cores: int
    """Multiprocessors, or vector cores of an NPU."""
    on_chip: int
    """Bytes of shared memory, or of unified buffer, that one program may use."""
    arch: str = ""
    """``"sm_90"``, ``"gfx942"``, ``"A2"``, …"""


CHIPS = {
    "sm_80": Chip("cuda", 108, 166912, "sm_80"),
    "sm_90": Chip("cuda", 132, 232448, "sm_90"),
    "sm_100": Chip("cuda", 148, 232448, "sm_100"),
    "gfx942": Chip("hip", 304, 65536, "gfx942"),
    "A2": Chip("ascend", 48, _UNIFIED_BUFFER["A2"], "A2"),
    "A3": Chip("ascend", 48, _UNIFIED_BUFFER["A3"], "A3"),
    "A5": Chip("ascend", 56, _UNIFIED_BUFFER["A5"], "A5"),
}
"""The chips that kernels are compiled for without having one."""
_INTERPRETER = Chip("interpreter", 3, _UNIFIED_BUFFER["A2"])
"""Few cores, so that tests run the loops over tasks."""


@functools.lru_cache(maxsize=64)
def chip_of(device: torch.device) -> Chip:
    """What ``device`` offers."""
    if device.type == "npu":
        return _npu(device)
    if device.type != "cuda":
        return _INTERPRETER
    found = torch.cuda.get_device_properties(device)
    on_chip = getattr(found, "shared_memory_per_block_optin", 48 << 10)
    if torch.version.hip:
        return Chip("hip", found.multi_processor_count, 64 << 10, found.gcnArchName.partition(":")[0])
    return Chip("cuda", found.multi_processor_count, on_chip, f"sm_{found.major}{found.minor}")


def _npu(device: torch.device) -> Chip:
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    name = torch.get_device_module("npu").get_device_name()
    family = "A5" if "950" in name else "A3" if "910_93" in name else "A2"
    return Chip("ascend", properties["num_vectorcore"], _UNIFIED_BUFFER[family], family)


def programs(chip: Chip, tasks: int) -> int:
    """How many programs share ``tasks``: each takes every n-th. On an NPU one per core, elsewhere as many as may be."""
    return min(tasks, chip.cores if chip.kind in ("ascend", "interpreter") else _MOST_PROGRAMS)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def dot_precision(chip: Chip, dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies float32 operands: exactly, or, for inputs narrower than float32 on NVIDIA's tensor
    cores, as three tf32 products, which keeps 22 bits. Plain tf32 would keep 10."""
    return "tf32x3" if chip.kind == "cuda" and dtype != torch.float32 else "ieee"


def is_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether the last axis of all is dense and every row starts at a multiple of 16 bytes, so that rows can be loaded
    in the widest units."""
    return all(
        x.stride(-1) == 1
        and all(s % UNIT == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        and x.data_ptr() % 16 == 0
        for x in tensors
        if x is not None and x.numel() > 0
    )


def outer(x: torch.Tensor | None, unit: int, axes: int) -> Sequence[int]:
    """Strides of the first ``axes`` axes in units of ``unit`` elements; 0 where an axis has one element or ``x`` is
    ``None``."""
    if x is None:
        return (0,) * axes
    return tuple(s // unit if n > 1 else 0 for s, n in zip(x.stride()[:axes], x.shape[:axes], strict=True))


def merged_rows(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides of the axes before the last, with neighbours merged where all tensors allow it."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis in range(len(shape) - 1):
        n = shape[axis]
        if n == 1:
            continue
        if sizes and all(m[-1] == s[axis] * n for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= n
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[axis]
        else:
            sizes.append(n)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[axis])
    return sizes, merged


def rows_of(*tensors: torch.Tensor | None) -> tuple[list[int], list[list[int]]]:
    """Sizes of the axes before the last, merged into :data:`MOST_AXES`, and each tensor's strides along them; what is
    ``None`` has strides 0."""
    given = [x for x in tensors if x is not None]
    sizes, strides = merged_rows(given[0].shape, [x.stride() for x in given])
    missing = [0] * (MOST_AXES - len(sizes))
    found = iter(strides)
    return [1 for _ in missing] + sizes, [[0] * MOST_AXES if x is None else missing + next(found) for x in tensors]


_COUNTERS: list[collections.Counter[str]] = []


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count launches by the name of the kernel while inside, so that nothing else can pass for one."""
    counter: collections.Counter[str] = collections.Counter()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS[:] = [c for c in _COUNTERS if c is not counter]


def run(kernel: Any, device: torch.device, tasks: int, *args: Any, **options: Any) -> None:
    """Start ``kernel`` on ``device`` with enough programs for ``tasks`` (none: nothing starts).

    ``options`` are constexprs by name, ``num_warps`` and ``num_stages``. The kernel loops over its tasks::

        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
    """
    if tasks == 0:
        return
    for counter in _COUNTERS:
        counter[kernel.__name__] += 1
    start(kernel, device, programs(chip_of(device), tasks), args, options)


def start(kernel: Any, device: torch.device, count: int, args: Sequence[Any], options: dict[str, Any]) -> None:
    """Start ``count`` programs; nothing else in this package starts a kernel."""
    if device.type == "cpu":
        kernel[(count,)](*args, **options)
        return
    module = torch.get_device_module(device.type)
    if module.current_device() == device.index:
        kernel[(count,)](*args, **options)
        return
    with module.device(device.index):
        kernel[(count,)](*args, **options)


def opaque(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep ``torch.compile`` out of a function that starts kernels: traced code calls it as a custom operation.

    Args:
        schema: its arguments and result, for instance ``"(Tensor x, Tensor(a!) out, float eps) -> ()"``. It writes
            into the tensors marked ``(a!)`` and returns nothing.
    """

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        name = f"glm5fn_triton::{function.__name__.strip('_')}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        torch.library.register_fake(name)(lambda *args, **kwargs: None)
        namespace, _, operation = name.partition("::")
        registered = getattr(getattr(torch.ops, namespace), operation).default

        @functools.wraps(function)
        def call(*args: Any) -> None:
            if torch.compiler.is_compiling():
                registered(*args)
            else:
                function(*args)

        return call

    return mark
