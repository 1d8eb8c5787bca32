"""Launcher of the experts' activation. Routing and the experts' products stay with PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["clamped_swiglu", "unsupported"]


def unsupported(spec: Any) -> list[str]:
    return limits.common(spec) + limits.rows(spec, "gate_up")


def clamped_swiglu(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _swiglu(gate_up, out, math.inf if limit is None else float(limit))
    return out


@launch.opaque("(Tensor gate_up, Tensor(a!) out, float limit) -> ()")
def _swiglu(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    from glm5fn.kernels.triton.moe_kernels import clamped_swiglu_kernel

    if out.numel() == 0:
        return
    I = out.shape[-1]
    n, (steps,) = launch.rows_of(gate_up)
    unit = launch.UNIT if launch.is_aligned(gate_up) and I % launch.UNIT == 0 else 1
    columns = min(launch.power_of_two(I), 1024)
    rows = 1024 // columns
    blocks = -(-n[2] // rows)
    tasks = n[0] * n[1] * blocks * -(-I // columns)
    launch.run(
        clamped_swiglu_kernel, gate_up.device, tasks,
        gate_up, out, limit, tasks, blocks, n[1], n[2], *(s // unit for s in steps), gate_up.stride(-1),
        I=I, ROWS=rows, COLUMNS=columns, UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip
