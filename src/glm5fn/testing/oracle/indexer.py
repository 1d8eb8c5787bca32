"""Literal definitions of the kpool indexer."""

from __future__ import annotations

import torch

__all__ = ["kpool_compress", "kpool_select"]


def kpool_compress(
    k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """A softmax over the members of a pool, for every channel by itself, weighs their keys."""
    B, P, K, I = k.shape
    k, gate, ape = k.to(dtype), gate.to(dtype), ape.to(dtype)
    out = torch.zeros(B, P, I, dtype=dtype)
    for b in range(B):
        for p in range(P):
            for i in range(I):
                logit = torch.stack([gate[b, p, j, i] + ape[j, i] for j in range(K)])
                weight = torch.exp(logit - logit.max())
                out[b, p, i] = (weight / weight.sum()) @ k[b, p, :, i]
    return out


def kpool_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    kpool: int,
    tail: bool = True,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Score every pool whose last token the query sees, take the best (the lower among equals), add the rest."""
    B, T, J, I = q.shape
    q, weights, pooled = q.to(dtype), weights.to(dtype), pooled.to(dtype)
    out = torch.full((B, T, topk + (kpool - 1 if tail else 0)), -1, dtype=torch.int32)
    for b in range(B):
        for t in range(T):
            position = int(positions[b, t])
            if position < 0:
                continue
            scores = {}
            p = 0
            while p * kpool + kpool - 1 <= position:
                dots = [max(0.0, float(q[b, t, j] @ pooled[b, p]) * I**-0.5) for j in range(J)]
                scores[p] = sum(float(weights[b, t, j]) * J**-0.5 * dots[j] for j in range(J))
                p += 1
            best = sorted(sorted(scores, key=lambda p: (-scores[p], p))[: topk // kpool])
            history = [pool * kpool + member for pool in best for member in range(kpool)]
            rest = list(range(p * kpool, position + 1)) if tail else []
            out[b, t, : len(history)] = torch.tensor(history, dtype=torch.int32)
            out[b, t, topk : topk + len(rest)] = torch.tensor(rest, dtype=torch.int32)
    return out
