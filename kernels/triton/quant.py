"""Launcher of the Hadamard rotation with float8 quantisation."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["hadamard_quant_fp8", "unsupported"]

_MOST_CHANNELS = 1024


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec) + limits.rows(spec, "x")
    I = spec.shapes["x"][-1]
    if I > _MOST_CHANNELS:
        reasons.append(f"I must be at most {_MOST_CHANNELS}, because a row stays on the chip, got {I}")
    return reasons


def hadamard_quant_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _quantise(x, values, scale)
    return values.view(torch.float8_e4m3fn), scale


@launch.opaque("(Tensor x, Tensor(a!) values, Tensor(b!) scale) -> ()")
def _quantise(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    from glm5fn.kernels.triton.quant_kernels import hadamard_quant_fp8_kernel

    if values.numel() == 0:
        return
    I = x.shape[-1]
    n, (steps,) = launch.rows_of(x)
    unit = launch.UNIT if launch.is_aligned(x) else 1
    rows = max(1, 2048 // I)
    blocks = -(-n[2] // rows)
    tasks = n[0] * n[1] * blocks
    launch.run(
        hadamard_quant_fp8_kernel, x.device, tasks,
        x, values, scale, I**-0.5, 1 / 448, tasks, blocks, n[1], n[2], *(s // unit for s in steps), x.stride(-1),
        I=I, LOG_I=I.bit_length() - 1, ROWS=rows, UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip
