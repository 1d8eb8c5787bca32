"""Block-wise FP8 weights: float8_e4m3fn values with one float32 scale per 128 × 128 block."""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "dequantize_blocks", "scale_shape"]

BLOCK = 128
"""Rows and columns that share a scale; blocks at the right and lower edge may be smaller."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix.

    Example:
        >>> scale_shape((300, 128))
        (3, 1)
    """
    return tuple(-(-size // BLOCK) for size in shape)


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``values[i, j] · scale[i // 128, j // 128]`` to ``out``, computed in float32 and rounded once.

    Only one row of blocks is held in float32 at a time.

    Args:
        values: float8_e4m3fn [M, N].
        scale: float32 [⌈M/128⌉, ⌈N/128⌉]. It multiplies, although checkpoints name it ``weight_scale_inv``.
        out: [M, N], the matrix to fill.

    Example:
        >>> out = torch.empty(2, 129)
        >>> dequantize_blocks(torch.ones(2, 129).to(torch.float8_e4m3fn), torch.tensor([[0.5, 3.0]]), out)
        >>> out[0, 127:]
        tensor([0.5000, 3.0000])
    """
    columns = scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    for block, start in enumerate(range(0, values.shape[0], BLOCK)):
        rows = slice(start, start + BLOCK)
        out[rows] = values[rows].float() * columns[block]
