"""Inputs of Kimi delta attention: gate regimes, awkward keys, packed lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["BETAS", "GATES", "KEYS", "KDAInputs", "make", "offsets"]

GATES = ("zero", "tiny", "mild", "uniform", "bound", "strong", "mixed")
"""g = 0; −1e-6; uniform in [−0.05, 0], which carries far; uniform in [−5, 0]; −5 everywhere; −12 everywhere; a mix per
channel and token, from 0 to −1000."""
BETAS = ("uniform", "zero", "one")
KEYS = ("random", "zero", "duplicate")
"""Random unit vectors; every third one zero; all nearly the same."""


class KDAInputs(NamedTuple):
    """Arguments of ``kda_chunk``, in order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor


def make(
    B: int = 2,
    T: int = 9,
    H: int = 2,
    K: int = 8,
    V: int = 6,
    *,
    gate: str = "uniform",
    beta: str = "uniform",
    keys: str = "random",
    N: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> KDAInputs:
    """Return random inputs with a random state for N sequences (default B)."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    return KDAInputs(
        torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype),
        _keys(normal(B, T, H, K), keys).to(dtype),
        normal(B, T, H, V).to(dtype),
        _gate(torch.rand(B, T, H, K, dtype=torch.float64, generator=rng), gate).to(wide),
        _beta(torch.rand(B, T, H, dtype=torch.float64, generator=rng), beta).to(wide),
        normal(B if N is None else N, H, V, K).to(wide),
    )


def _keys(noise: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "duplicate":
        noise = noise[:, :1] + 1e-3 * noise
    k = torch.nn.functional.normalize(noise, dim=-1)
    if kind == "zero":
        k[:, ::3] = 0
    return k


def _gate(uniform: torch.Tensor, kind: str) -> torch.Tensor:
    constant = {"zero": 0.0, "tiny": -1e-6, "bound": -5.0, "strong": -12.0}
    if kind in constant:
        return torch.full_like(uniform, constant[kind])
    if kind in ("mild", "uniform"):
        return (-0.05 if kind == "mild" else -5) * uniform
    levels = torch.tensor([0.0, -1e-6, -1e-2, -0.7, -5.0, -12.0, -1000.0], dtype=uniform.dtype)
    return levels[(uniform * len(levels)).long()]


def _beta(uniform: torch.Tensor, kind: str) -> torch.Tensor:
    return {"uniform": uniform, "zero": torch.zeros_like(uniform), "one": torch.ones_like(uniform)}[kind]


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Return ``cu_seqlens`` int32 [N+1] of packed sequences with these lengths.

    Example:
        >>> offsets([2, 0, 3]).tolist()
        [0, 2, 2, 5]
    """
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
