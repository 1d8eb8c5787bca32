"""Keeps autocast out of the kernels: it would turn their float32 matrix products into bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["without_autocast"]

F = TypeVar("F", bound=Callable[..., Any])


def without_autocast(kernel: F) -> F:
    """Run ``kernel``, whose first argument is a tensor, with autocast off on that tensor's device."""

    @functools.wraps(kernel)
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = x.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return kernel(x, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return kernel(x, *args, **kwargs)

    return run  # type: ignore[return-value]
