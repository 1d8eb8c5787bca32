"""Inputs of the causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from glm5fn.testing.inputs.kda import offsets

__all__ = ["ConvInputs", "make"]


class ConvInputs(NamedTuple):
    """Arguments of ``causal_conv1d``, in order."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    cu_seqlens: torch.Tensor | None


def make(
    B: int = 2,
    T: int = 9,
    D: int = 5,
    W: int = 4,
    *,
    lengths: Sequence[int] | None = None,
    num_spec: int = 0,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ConvInputs:
    """Return random inputs; with ``lengths``, packed ones (B and T follow from them)."""
    rng = torch.Generator().manual_seed(seed)
    N = B if lengths is None else len(lengths)
    if lengths is not None:
        B, T = 1, sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng).to(dtype)

    return ConvInputs(
        normal(B, T, D),
        normal(D, W),
        normal(D) if bias else None,
        normal(N, W - 1 + num_spec, D),
        None if lengths is None else offsets(lengths),
    )
