"""Literal definitions of the hyper-connections."""

from __future__ import annotations

import torch

__all__ = ["mhc_post", "mhc_pre", "mhc_pre_norm"]


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token at a time; rows and columns of comb are scaled one at a time."""
    B, T, N, D = streams.shape
    r, fn, base, scale = (x.to(dtype) for x in (streams, fn, base, scale))
    x = torch.zeros(B, T, D, dtype=dtype)
    post = torch.zeros(B, T, N, dtype=dtype)
    comb = torch.zeros(B, T, N, N, dtype=dtype)
    for b in range(B):
        for t in range(T):
            flat = torch.cat([r[b, t, j] for j in range(N)])
            m = fn @ (flat / torch.sqrt(flat.square().mean() + norm_eps))
            for j in range(N):
                x[b, t] += (torch.sigmoid(m[j] * scale[0] + base[j]) + hc_eps) * r[b, t, j]
                post[b, t, j] = 2 * torch.sigmoid(m[N + j] * scale[1] + base[N + j])
            C = torch.zeros(N, N, dtype=dtype)
            for i in range(N):
                row = slice(2 * N + N * i, 2 * N + N * (i + 1))
                C[i] = torch.softmax(m[row] * scale[2] + base[row], dim=0) + hc_eps
            for n in range(iters):
                for i in range(N if n else 0):
                    C[i] /= C[i].sum() + hc_eps
                for j in range(N):
                    C[:, j] /= C[:, j].sum() + hc_eps
            comb[b, t] = C
    return x, post, comb


def mhc_pre_norm(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The collapsed stream is rounded to the dtype of the streams before the norm."""
    x, post, comb = mhc_pre(streams, fn, base, scale, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps, dtype=dtype)
    x = x.to(streams.dtype).to(dtype)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(dtype), post, comb


def mhc_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Stream j receives post[j] of the output and comb[i, j] of every stream i."""
    N = streams.shape[2]
    y, streams, post, comb = (x.to(dtype) for x in (y, streams, post, comb))
    new = torch.zeros_like(streams)
    for j in range(N):
        new[:, :, j] = post[:, :, j, None] * y
        for i in range(N):
            new[:, :, j] += comb[:, :, i, j, None] * streams[:, :, i]
    return new
