"""Inputs for the rotated float8 quantisation."""

from __future__ import annotations

import torch

__all__ = ["hadamard_rows"]


def hadamard_rows(*, size: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows ``[R, size]``: zeros, a unit vector, constants, alternating signs, tiny, huge, one outlier, random ones."""
    make = torch.Generator().manual_seed(seed)
    lane = torch.arange(size)
    unit = (lane == 0).double()
    outlier = torch.randn(size, generator=make, dtype=torch.float64) * 0.01
    outlier[-1] = 30.0
    size_of_row = torch.logspace(-6, 3, 24, dtype=torch.float64)[:, None]
    random = size_of_row * torch.randn(24, size, generator=make, dtype=torch.float64)
    special = [0 * unit, unit, 0 * unit + 0.875, (-1.0) ** lane, unit * 1e-7, unit * 1e4, outlier]
    return torch.cat([torch.stack(special), random]).to(dtype)
