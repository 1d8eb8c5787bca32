"""Inputs of the norms."""

from __future__ import annotations

import torch

__all__ = ["rows"]


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return rows of very different sizes; the first is zero."""
    rng = torch.Generator().manual_seed(seed)
    size = 10 ** (4 * torch.rand(*shape[:-1], 1, dtype=torch.float64, generator=rng) - 2)
    x = size * torch.randn(*shape, dtype=torch.float64, generator=rng)
    x.view(-1, shape[-1])[:1] = 0
    return x.to(dtype)
