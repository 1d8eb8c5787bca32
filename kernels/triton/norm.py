"""Launchers of the norms."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm", "unsupported"]

_TILE = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, None, weight, out, eps, True)
    return out


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, gate, weight, out, eps, True)
    return out


def l2_norm(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, None, None, out, eps, False)
    return out


def unsupported(spec: Any) -> list[str]:
    return limits.common(spec) + limits.rows(spec, "x", "gate")


def plan(D: int) -> dict[str, int]:
    """Tile of a task, and warps. It depends on the row length alone."""
    columns = min(launch.power_of_two(D), 2 * _TILE)
    rows = max(1, _TILE // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": 4 if rows * columns <= _TILE else 8, "num_stages": 1}


@launch.opaque("(Tensor x, Tensor? gate, Tensor? weight, Tensor(a!) out, float eps, bool mean) -> ()")
def _norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    mean: bool,
) -> None:
    from glm5fn.kernels.triton.norm_kernels import norm_kernel

    if out.numel() == 0:
        return
    D = x.shape[-1]
    n, (x_steps, gate_steps) = launch.rows_of(x, gate)
    unit = launch.UNIT if launch.is_aligned(x, gate, weight) else 1
    strides = [
        *(s // unit for s in x_steps), x.stride(-1),
        *(s // unit for s in gate_steps), 0 if gate is None else gate.stride(-1),
        0 if weight is None else weight.stride(0),
    ]  # fmt: skip
    tile = plan(D)
    blocks = -(-n[2] // tile["ROWS"])
    tasks = n[0] * n[1] * blocks
    launch.run(
        norm_kernel, x.device, tasks,
        x, gate, weight, out, float(eps), tasks, blocks, n[1], n[2], *strides,
        D=D, MEAN=mean, WEIGHTED=weight is not None, GATED=gate is not None, UNIT=unit, **tile,
    )  # fmt: skip
