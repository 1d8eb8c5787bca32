"""Compile what a launcher would start, for chips that are not there.

The launcher itself runs, on meta tensors, for the chip in question; each start is recorded and compiled exactly as
Triton's just-in-time compiler would: same constexprs, same types, same alignment. So what is compiled is what is
shipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

from glm5fn.kernels.triton import launch
from glm5fn.kernels.triton.launch import CHIPS, Chip

__all__ = ["GPUS", "Start", "compiled", "has_tensor_cores", "key", "starts"]

GPUS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")


class Start(NamedTuple):
    """One kernel that a launcher wants to start."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__


@contextlib.contextmanager
def on_chip(chip: Chip) -> Iterator[list[Start]]:
    """Inside, every device is ``chip``, and what would be started is collected instead."""
    found: list[Start] = []

    def record(kernel: Any, device: torch.device, count: int, args: Any, options: dict[str, Any]) -> None:
        found.append(Start(kernel, count, tuple(args), options))

    with mock.patch.object(launch, "chip_of", return_value=chip), mock.patch.object(launch, "start", record):
        yield found


def starts(chip: str, launcher: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Start]:
    """What ``launcher(*args, **kwargs)`` would start on a chip of :data:`glm5fn.kernels.triton.launch.CHIPS`; the
    tensors are on the meta device."""
    with on_chip(CHIPS[chip]) as found:
        launcher(*args, **kwargs)
    return found


def _bound(start: Start, target: GPUTarget) -> tuple[Any, dict[str, Any], list[Any], dict[str, Any]]:
    backend = make_backend(target)
    binder = create_function_from_signature(start.kernel.signature, start.kernel.params, backend)
    values, specialization, options = binder(*start.args, **start.options)
    return backend, values, specialization, options


def key(start: Start, chip: str) -> tuple[Any, ...]:
    """What decides whether Triton compiles again: equal keys share one binary."""
    _, _, specialization, options = _bound(start, GPUS[chip])
    return (start.name, *map(tuple, specialization), *sorted(options.items()))


def compiled(start: Start, chip: str) -> Any:
    """The binary of ``start`` for ``chip``: ``.metadata.shared`` is its shared memory, ``.asm`` its texts."""
    target = GPUS[chip]
    backend, values, specialization, options = _bound(start, target)
    names = [p.name for p in start.kernel.params]
    signature = {name: kind for name, (kind, _) in zip(names, specialization, strict=True)}
    constexprs = {(i,): values[n] for i, n in enumerate(names) if signature[n] == "constexpr"}
    attrs = {
        (i,): backend.parse_attr(attr)
        for i, (kind, attr) in enumerate(specialization)
        if kind != "constexpr" and isinstance(attr, str)
    }
    source = ASTSource(start.kernel, signature, constexprs, attrs)
    return compile(source, target=target, options=options)


def has_tensor_cores(binary: Any) -> bool:
    """Whether some instruction of ``binary`` multiplies matrices."""
    return any(word in text for text in _texts(binary) for word in MATRIX_INSTRUCTIONS)


def _texts(binary: Any) -> list[str]:
    return [binary.asm[kind] for kind in ("ptx", "amdgcn") if kind in binary.asm]
