"""Literal definition of block-wise FP8 weights."""

from __future__ import annotations

import torch

__all__ = ["dequantize"]


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``values[i, j] · scale[i // 128, j // 128]`` in float64, the values decoded from their bits."""
    decoded = torch.tensor([_decode(code) for code in range(256)], dtype=torch.float64)
    exact = decoded[values.view(torch.uint8).long()]
    rows, columns = torch.arange(values.shape[0]) // 128, torch.arange(values.shape[1]) // 128
    return exact * scale.double()[rows][:, columns]


def _decode(code: int) -> float:
    """The value of 1 sign, 4 exponent (bias 7) and 3 mantissa bits; without infinities, and all ones is NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (code & 0x7F) == 0x7F:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size
