"""Literal definitions of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["mla_decode", "mla_prefill", "mla_sparse"]


def mla_prefill(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Query t of row b sits at ``lengths[b] - T + t`` and sees the rows up to there."""
    B, T, S = *q.shape[:2], latent.shape[1]
    ends = [S] * B if lengths is None else lengths.tolist()
    rows = [[range(ends[b] - T + t + 1) for t in range(T)] for b in range(B)]
    return _attend(q, latent, w_uk, w_uv, rows, scale, dtype)


def mla_decode(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The same function as :func:`mla_prefill`."""
    return mla_prefill(q, latent, w_uk, w_uv, lengths=lengths, scale=scale, dtype=dtype)


def mla_sparse(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Every query sees the rows that its indices name."""
    rows = [[[i for i in query if i >= 0] for query in row] for row in indices.tolist()]
    return _attend(q, latent, w_uk, w_uv, rows, scale, dtype)


def _attend(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    rows: Sequence[Sequence[Sequence[int]]],
    scale: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    (B, T, H, Dk), Dv = q.shape, w_uv.shape[1]
    scale = Dk**-0.5 if scale is None else scale
    q, latent, w_uk, w_uv = (x.to(dtype) for x in (q, latent, w_uk, w_uv))
    out = torch.zeros(B, T, H, Dv, dtype=dtype)
    for b in range(B):
        for t in range(T):
            if len(rows[b][t]) == 0:
                continue
            c = torch.stack([latent[b, s] for s in rows[b][t]])
            for h in range(H):
                k, v = c @ w_uk[h].T, c @ w_uv[h].T
                score = scale * (k @ q[b, t, h])
                weight = torch.exp(score - score.max())
                out[b, t, h] = (weight / weight.sum()) @ v
    return out
