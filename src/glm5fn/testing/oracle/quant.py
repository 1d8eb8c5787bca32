"""Literal definition of the rotated float8 quantisation. It is exact: every rounding is part of the definition."""

from __future__ import annotations

import math

import torch

__all__ = ["hadamard_quant_fp8"]


def hadamard_quant_fp8(x: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Butterflies one pair of channels at a time, then the scale and the nearest e4m3 value by search."""
    size = x.shape[-1]
    channel = list(x.to(dtype).unbind(-1))
    stride = 1
    while stride < size:
        for i in range(size):
            if not i & stride:
                a, b = channel[i], channel[i + stride]
                channel[i], channel[i + stride] = a + b, a - b
        stride *= 2
    rotated = (torch.stack(channel, dim=-1) * size**-0.5).to(torch.bfloat16).double()
    rows = rotated.reshape(-1, size).tolist()
    grid = _e4m3_values()
    values, scales = [], []
    for row in rows:
        # The largest magnitude is multiplied by the float32 nearest 1/448, in float32.
        largest = torch.tensor(max([1e-4] + [abs(r) for r in row]), dtype=torch.float32)
        ratio = float(largest * torch.tensor(1 / 448, dtype=torch.float32))
        scale = 2.0 ** math.ceil(math.log2(ratio))
        scales.append(scale)
        values.append([_nearest(max(-448.0, min(448.0, r / scale)), grid) for r in row])
    found = torch.tensor(values, dtype=torch.float64).reshape(x.shape)
    return found.float().to(torch.float8_e4m3fn), torch.tensor(scales, dtype=torch.float32).reshape(x.shape[:-1])


def _e4m3_values() -> list[tuple[float, int]]:
    """The non-negative values of 4 exponent (bias 7) and 3 mantissa bits, with their bits; pattern 0x7F is NaN."""
    grid = []
    for bits in range(0x7F):
        exponent, mantissa = bits >> 3, bits & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        grid.append((value, bits))
    return grid


def _nearest(x: float, grid: list[tuple[float, int]]) -> float:
    best = min(grid, key=lambda entry: (abs(entry[0] - abs(x)), entry[1] & 1))
    return math.copysign(best[0], x)
