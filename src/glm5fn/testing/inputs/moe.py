"""Inputs for the router and the experts."""

from __future__ import annotations

import torch

from glm5fn.dims import compute_dtype

__all__ = ["moe_experts", "moe_route"]


def moe_route(
    *,
    B: int = 2,
    T: int = 4,
    D: int = 8,
    E: int = 12,
    ties: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Arguments of ``moe_route`` without its options. Logits are small integers, so they are exact in every dtype.

    The bias keeps all choices of a token at least 1e-3 apart; with ``ties`` there is no bias, and many are equal.
    """
    make = torch.Generator().manual_seed(seed)
    arguments = {
        "x": torch.randint(-1, 2, (B, T, D), generator=make).to(dtype),
        "w_gate": torch.randint(-1, 2, (E, D), generator=make).to(dtype),
    }
    order = torch.randperm(E, generator=make).double()
    bias = 0 * order if ties else (order - E / 2) * 2e-3 / 1.9
    return arguments | {"bias": bias.to(compute_dtype(dtype))}


def moe_experts(
    *, B: int = 2, T: int = 4, D: int = 8, I: int = 6, E: int = 5, top_k: int = 2, only: list[int] | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Arguments of ``moe_experts`` but ``limit``; activations reach past 1. ``only`` names the experts in use."""
    make = torch.Generator().manual_seed(seed)
    used = torch.arange(E) if only is None else torch.tensor(only)
    pick = torch.rand(B, T, len(used), generator=make).argsort(-1)[..., :top_k]
    return {
        "x": torch.randn(B, T, D, generator=make, dtype=torch.float64).to(dtype),
        "ids": used[pick].to(torch.int32),
        "weights": torch.rand(B, T, top_k, generator=make, dtype=torch.float64).to(compute_dtype(dtype)),
        "w_gate_up": (2 * D**-0.5 * torch.randn(E, 2 * I, D, generator=make, dtype=torch.float64)).to(dtype),
        "w_down": (I**-0.5 * torch.randn(E, D, I, generator=make, dtype=torch.float64)).to(dtype),
    }
