"""Norms in plain torch: float32 inside (float64 if given float64), one rounding at the end."""

from __future__ import annotations

import torch

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_unit_rms(_wide(x), eps) * _wide(weight)).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_unit_rms(_wide(x), eps) * _wide(weight) * _wide(gate).sigmoid()).to(x.dtype)


def l2_norm(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
