"""Hyper-connections in plain torch: float32 inside (float64 if given float64), one rounding at the end.

The coefficients are computed as ``[coefficient, token]``, so that the many sums over four streams of the Sinkhorn
iteration run along whole rows of memory.
"""

from __future__ import annotations

import torch

from glm5fn.dims import compute_dtype
from glm5fn.kernels.reference.norm import rms_norm
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["mhc_post", "mhc_pre", "mhc_pre_norm"]


@without_autocast
def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, N, D = streams.shape
    dtype = compute_dtype(streams.dtype)
    wide = streams.to(dtype).reshape(B * T, N, D)
    flat = wide.reshape(B * T, N * D)
    # The norm is one factor per token, so it scales the logits: the normalised streams are never stored.
    rms = torch.linalg.vector_norm(flat, dim=-1).square() / (N * D)
    logits = (fn.to(dtype) @ flat.t()) * torch.rsqrt(rms + norm_eps)
    pre, post, comb = logits.split([N, N, N * N])
    pre_base, post_base, comb_base = base[:, None].split([N, N, N * N])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = _sinkhorn((comb * scale[2] + comb_base).view(N, N, B * T), iters, hc_eps)
    # bmm takes a slow loop for transposed rows, hence the copy of the few weights.
    x = torch.bmm(pre.t().contiguous()[:, None], wide).to(streams.dtype)
    return x.view(B, T, D), post.t().reshape(B, T, N), comb.permute(2, 0, 1).reshape(B, T, N, N)


def _sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """``logits [in, out, token]`` made doubly stochastic by ``iters`` rounds of row and column scaling."""
    comb = logits.softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


@without_autocast
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, post, comb = mhc_pre(streams, fn, base, scale, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps)
    return rms_norm(x, norm_weight, eps=norm_eps), post, comb


@without_autocast
def mhc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    dtype = compute_dtype(streams.dtype)
    new = post[..., None] * y.to(dtype)[..., None, :]
    mixed = torch.baddbmm(new.flatten(0, 1), comb.flatten(0, 1).mT, streams.to(dtype).flatten(0, 1))
    return mixed.to(streams.dtype).view(streams.shape)
