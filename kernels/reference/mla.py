"""Multi-head latent attention in plain torch: float32 inside (float64 if given float64), one rounding at the end.

All three forms work in blocks of bounded memory. A weight of zero does not hide a row, since 0 * NaN is NaN: the dense
forms replace rows that are not finite by zeros, and the queries that see one get NaN at the end.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glm5fn.dims import compute_dtype
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["mla_decode", "mla_prefill", "mla_sparse"]

_BLOCK_BYTES = 64 << 20
"""Bytes that the largest temporary of a block may take (but a block is at least one token or one head)."""


@without_autocast
def mla_prefill(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    (B, T, H, Dk), S, Dv = q.shape, latent.shape[1], w_uv.shape[1]
    if q.numel() == 0 or S == 0:
        return q.new_zeros(B, T, H, Dv)
    dtype = compute_dtype(q.dtype)
    width = max(Dk, Dv)  # PyTorch's blockwise attention wants keys and values of one size; zeros change nothing
    position = _positions(lengths, B, T, S, q.device)
    rows = torch.arange(S, device=q.device)
    finite = latent.isfinite().all(-1)
    clean = _only(latent, finite).to(dtype)

    heads = max(1, min(H, _BLOCK_BYTES // (2 * B * S * width * clean.element_size())))
    step = max(1, _BLOCK_BYTES // (B * heads * S * clean.element_size()))
    # On a CPU PyTorch's causal attention is blockwise by itself; elsewhere it may not be.
    causal = lengths is None and T == S and (step >= T or q.device.type == "cpu")
    step = T if causal else step
    # Autograd would keep every block's mask, together as large as a score matrix.
    attend = functools.partial(checkpoint, _block, use_reentrant=False) if step < T else _block
    outs = []
    for head in range(0, H, heads):
        k = _expand(clean, w_uk[head : head + heads].to(dtype), width)
        v = _expand(clean, w_uv[head : head + heads].to(dtype), width)
        parts = []
        for begin in range(0, T, step):
            query = F.pad(q[:, begin : begin + step, head : head + heads].to(dtype), (0, width - Dk)).transpose(1, 2)
            last = None if causal else position[:, begin : begin + step]
            parts.append(attend(query, k, v, last, _scale(scale, Dk)))
        outs.append(torch.cat(parts, dim=2)[..., :Dv].transpose(1, 2).to(q.dtype))
    return _spoil(torch.cat(outs, dim=2), position, rows, finite)


def _expand(latent: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    """Keys or values of ``latent [B, S, R]`` by ``weight [H, D, R]``: ``[B, H, S, width]``, zeros beyond D."""
    return torch.matmul(latent[:, None], F.pad(weight, (0, 0, 0, width - weight.shape[1])).mT)


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention of ``q [B, H, T, D]`` to the keys up to ``last [B, T]``; without it query t sees the keys up to t."""
    mask = None if last is None else (torch.arange(k.shape[2], device=k.device) <= last[:, None, :, None])
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)


def _spoil(out: torch.Tensor, position: torch.Tensor, rows: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """``out`` with NaN for the queries that see a latent row that is not finite, as the definition has it."""
    first = torch.where(finite, rows.shape[0], rows).amin(1)
    return out.masked_fill((first[:, None] <= position)[..., None, None], torch.nan)


@without_autocast
def mla_decode(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    (B, T, H, _), S, dtype = q.shape, latent.shape[1], compute_dtype(q.dtype)
    if q.numel() == 0 or S == 0:
        return q.new_zeros(B, T, H, w_uv.shape[1])
    position = _positions(lengths, B, T, S, q.device)
    query = _absorb(q, w_uk, scale, dtype)
    total = query.new_zeros(B, T, H, 1)
    most = torch.full_like(total, -torch.inf)
    out = torch.zeros_like(query)
    step = max(64, _BLOCK_BYTES // (max(B * T * H, latent.shape[2]) * query.element_size()))
    for begin in range(0, S, step):
        block = latent[:, begin : begin + step]
        visible = torch.arange(begin, begin + block.shape[1], device=q.device) <= position[..., None]
        finite = block.isfinite().all(-1)
        block = _only(block, finite).to(dtype)
        score = torch.einsum("bthr,bsr->bths", query, block).masked_fill(~visible[:, :, None], -torch.inf)
        higher = torch.maximum(most, score.detach().amax(-1, keepdim=True))
        # A query that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
        floor = higher.masked_fill(higher == -torch.inf, 0.0)
        weight = torch.exp(score - floor)
        keep = torch.exp(most - floor)
        out = out * keep + torch.einsum("bths,bsr->bthr", weight, block)
        out = out.masked_fill((visible & ~finite[:, None]).any(-1)[..., None, None], torch.nan)
        total = total * keep + weight.sum(-1, keepdim=True)
        most = higher
    return _finish(out, total, w_uv, q.dtype)


@without_autocast
def mla_sparse(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    (B, T, H, _), J, R, dtype = q.shape, indices.shape[2], latent.shape[2], compute_dtype(q.dtype)
    if q.numel() == 0 or J == 0 or latent.shape[1] == 0:
        return q.new_zeros(B, T, H, w_uv.shape[1])
    row = torch.arange(B, device=q.device)[:, None, None]
    step = max(1, _BLOCK_BYTES // (B * J * max(R, H) * (8 if dtype == torch.float64 else 4)))
    outs = []
    for begin in range(0, T, step):
        index = indices[:, begin : begin + step]
        used = index >= 0
        # An unused index reads a row that its query reads anyway, so it brings in nothing new; its weight is zero.
        index = torch.where(used, index, index.amax(-1, keepdim=True).clamp(min=0)).clamp(max=latent.shape[1] - 1)
        chosen = latent[row, index.long()].to(dtype)
        score = torch.einsum("bthr,btjr->bthj", _absorb(q[:, begin : begin + step], w_uk, scale, dtype), chosen)
        score = score.masked_fill(~used[:, :, None], -torch.inf)
        most = score.detach().amax(-1, keepdim=True)
        weight = torch.exp(score - most.masked_fill(most == -torch.inf, 0.0))
        out = torch.einsum("bthj,btjr->bthr", weight, chosen)
        outs.append(_finish(out, weight.sum(-1, keepdim=True), w_uv, q.dtype))
    return torch.cat(outs, dim=1)


def _absorb(q: torch.Tensor, w_uk: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """The queries in the latent space, scaled: ``[B, T, H, R]``."""
    return torch.einsum("bthd,hdr->bthr", q.to(dtype) * _scale(scale, q.shape[-1]), w_uk.to(dtype))


def _finish(out: torch.Tensor, total: torch.Tensor, w_uv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide the weighted sum of latents by the sum of weights, 0 / 0 being 0, and expand the values."""
    blind = total == 0
    out = (out / total.masked_fill(blind, 1.0)).masked_fill(blind, 0.0)
    return torch.einsum("bthr,hdr->bthd", out, w_uv.to(out.dtype)).to(dtype)


def _scale(scale: float | None, Dk: int) -> float:
    return Dk**-0.5 if scale is None else scale


def _positions(lengths: torch.Tensor | None, B: int, T: int, S: int, device: torch.device) -> torch.Tensor:
    """``[B, T]`` position of every query: the last one sits at length - 1. Lengths that nobody checked are clamped."""
    step = torch.arange(T, device=device) - T
    return (step + S).expand(B, T) if lengths is None else lengths.clamp(max=S)[:, None] + step


def _only(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``x [..., R]`` with zeros in the rows that ``keep [...]`` leaves out."""
    return torch.where(keep[..., None], x, 0.0)
