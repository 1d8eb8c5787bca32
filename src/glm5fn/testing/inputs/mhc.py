"""Inputs for the hyper-connections."""

from __future__ import annotations

import torch

from glm5fn.dims import compute_dtype

__all__ = ["mhc_post", "mhc_pre"]


def mhc_pre(
    *, B: int = 2, T: int = 3, N: int = 4, D: int = 8, spread: float = 1.0, norm_weight: bool = False,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Arguments of ``mhc_pre``, with ``norm_weight`` of ``mhc_pre_norm``; ``spread`` is the size of the logits."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    wide, rows = compute_dtype(dtype), (2 + N) * N
    arguments = {
        "streams": normal(B, T, N, D).to(dtype),
        "fn": (normal(rows, N * D) * (N * D) ** -0.5).to(dtype),
        "base": (spread * normal(rows)).to(wide),
        "scale": (spread * torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)).to(wide),
    }
    if norm_weight:
        arguments["norm_weight"] = (1 + 0.2 * normal(D)).to(dtype)
    return arguments


def mhc_post(
    *, B: int = 2, T: int = 3, N: int = 4, D: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Arguments of ``mhc_post``. ``comb`` is far from symmetric, so that in and out cannot be confused."""
    make = torch.Generator().manual_seed(seed)
    wide = compute_dtype(dtype)
    return {
        "y": torch.randn(B, T, D, generator=make, dtype=torch.float64).to(dtype),
        "streams": torch.randn(B, T, N, D, generator=make, dtype=torch.float64).to(dtype),
        "post": (2 * torch.rand(B, T, N, generator=make, dtype=torch.float64)).to(wide),
        "comb": torch.rand(B, T, N, N, generator=make, dtype=torch.float64).to(wide),
    }
