"""What an implementation's limits may look at: one call of one operation, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from glm5fn.dispatch.hardware import Hardware

__all__ = ["OpSpec"]


class OpSpec(NamedTuple):
    """One call of one operation: everything ``unsupported(spec)`` may ask about, and no tensor data.

    A NamedTuple, so that ``torch.compile`` can trace the limits and guard on exactly the comparisons they make.
    """

    op: str
    """Name of the operation."""
    hardware: Hardware
    """Where the tensors are, or the hardware that the caller of ``explain`` asked about."""
    shapes: dict[str, Sequence[int]]
    """Shape of each tensor argument by parameter name; an argument that was ``None`` is not in it."""
    strides: dict[str, Sequence[int]]
    """Strides of each tensor argument, in elements."""
    dtypes: dict[str, torch.dtype]
    """Dtype of each tensor argument."""
    options: dict[str, Any]
    """Every other argument: numbers, strings, flags and those that were ``None``. Left-out ones hold their default."""
    needs_grad: bool
    """Gradients are recorded and some tensor argument asks for one."""
    capturing: bool
    """A CUDA or NPU graph is being captured on the current stream."""

    def contiguous(self, name: str) -> bool:
        """Whether argument ``name`` is dense in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shapes[name]), reversed(self.strides[name]), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def make_spec(
    names: Sequence[str],
    defaults: dict[str, Any],
    op: str,
    hardware: Hardware,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    capturing: bool = False,
) -> OpSpec:
    """Describe the call ``op(*args, **kwargs)`` of the operation whose parameters are ``names`` and ``defaults``."""
    shapes: dict[str, Sequence[int]] = {}
    strides: dict[str, Sequence[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    options: dict[str, Any] = dict(defaults)
    needs_grad = False
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        options.pop(name, None)
        if isinstance(value, torch.Tensor):
            shapes[name] = value.shape
            strides[name] = value.stride()
            dtypes[name] = value.dtype
            needs_grad = needs_grad or value.requires_grad
        else:
            options[name] = value
    grad = needs_grad and torch.is_grad_enabled()
    return OpSpec(op, hardware, shapes, strides, dtypes, options, grad, capturing)


def is_capturing(device_type: str) -> bool:
    """Whether the current stream of ``device_type`` is recording a graph."""
    if device_type not in ("cuda", "npu"):
        return False
    ask = getattr(getattr(torch, device_type, None), "is_current_stream_capturing", None)
    return bool(ask()) if ask is not None else False
