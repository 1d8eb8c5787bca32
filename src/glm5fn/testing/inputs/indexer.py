"""Inputs for the kpool indexer."""

from __future__ import annotations

import torch

__all__ = ["kpool_compress", "kpool_select"]


def kpool_compress(
    *, B: int = 2, P: int = 3, kpool: int = 4, I: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Arguments of ``kpool_compress``; one pool has scores so far apart that a single member decides."""
    make = torch.Generator().manual_seed(seed)
    k, gate = (torch.randn(B, P, kpool, I, generator=make, dtype=torch.float64) for _ in range(2))
    gate[:, -1:] *= 100
    ape = torch.randn(kpool, I, generator=make, dtype=torch.float64)
    return {"k": k.to(dtype), "gate": gate.to(dtype), "ape": ape.to(dtype)}


def kpool_select(
    *, B: int = 2, T: int = 9, J: int = 4, I: int = 4, P: int = 5, kpool: int = 4, topk: int = 8,
    positions: list[list[int]] | None = None, ties: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, object]:  # fmt: skip
    """Arguments of ``kpool_select`` made of small integers, so that every score is exact in every dtype.

    J and I should be powers of four. With ``ties`` many scores are equal; without, the pooled keys of a row are
    multiples of one vector, all different, so that no two scores that are not zero are equal. By default each row's
    queries are its last T tokens.
    """
    make = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (B, T, J, I), generator=make)
    weights = torch.randint(-2, 3, (B, T, J), generator=make)
    if ties:
        pooled = torch.randint(-2, 3, (B, P, I), generator=make)
    else:
        size = torch.stack([torch.randperm(P, generator=make) + 1 for _ in range(B)]).view(B, P, 1)
        pooled = size * torch.ones(I, dtype=torch.long)
        q, weights = q.abs() + 1, weights.abs() + 1
    if positions is None:
        most = (P + 1) * kpool - 2
        positions = [[most - b - T + 1 + t for t in range(T)] for b in range(B)]
    return {
        "q": q.to(dtype), "weights": weights.float(), "pooled": pooled.to(dtype),
        "positions": torch.tensor(positions, dtype=torch.int32).view(B, T), "topk": topk, "kpool": kpool,
    }  # fmt: skip
