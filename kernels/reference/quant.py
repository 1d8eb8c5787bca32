"""Hadamard rotation and float8 quantisation in plain torch, bit for bit as the contract says."""

from __future__ import annotations

import torch

from glm5fn.dims import compute_dtype

__all__ = ["hadamard_quant_fp8"]


def hadamard_quant_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    wide = x.to(compute_dtype(x.dtype))
    # The order of the butterflies fixes the rounding of every sum.
    for log_stride in range(size.bit_length() - 1):
        even, odd = wide.unflatten(-1, (-1, 2, 1 << log_stride)).unbind(-2)
        wide = torch.stack([even + odd, even - odd], dim=-2).flatten(-3)
    rotated = (wide * size**-0.5).to(torch.bfloat16).float()
    scale = _power_of_two_above(rotated.abs().amax(-1).clamp(min=1e-4) * (1 / 448))
    values = (rotated / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scale


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """2**ceil(log2(x)) of normal positive float32, exactly: log2 itself may be one rounding off at a power of two."""
    bits = x.view(torch.int32)
    up = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(x.isfinite(), up, x)
