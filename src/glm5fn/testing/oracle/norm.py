"""Definitions of the norms, row by row."""

from __future__ import annotations

import math

import torch

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight``."""
    rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = torch.zeros_like(rows)
    for i, row in enumerate(rows):
        out[i] = row / torch.sqrt((row * row).mean() + eps) * weight.to(dtype)
    return out.reshape(x.shape)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """``rms_norm(x) / (1 + exp(-gate))``."""
    return rms_norm(x, weight, eps=eps, dtype=dtype) / (1 + torch.exp(-gate.to(dtype)))


def l2_norm(x: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``x / sqrt(sum(x**2) + eps)``."""
    rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = torch.zeros_like(rows)
    for i, row in enumerate(rows):
        out[i] = row / torch.sqrt((row * row).sum() + eps)
    return out.reshape(x.shape)
