"""The kpool indexer in plain torch: float32 inside (float64 if given float64)."""

from __future__ import annotations

import torch

from glm5fn.dims import compute_dtype
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["kpool_compress", "kpool_select"]

_BLOCK_BYTES = 32 << 20
"""Bytes of temporaries that are held at a time (but at least one token's)."""


def kpool_compress(k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    dtype = compute_dtype(k.dtype)
    weights = (gate.to(dtype) + ape.to(dtype)).softmax(dim=2)
    return (weights * k.to(dtype)).sum(2).to(k.dtype)


@without_autocast
def kpool_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    kpool: int,
    tail: bool = True,
) -> torch.Tensor:
    B, T, J, I = q.shape
    P, dtype = pooled.shape[1], compute_dtype(q.dtype)
    tokens = (positions.long() + 1).clamp(min=0)
    complete = tokens // kpool
    q, weights, keys = q.detach(), weights.detach().to(dtype) * J**-0.5, pooled.detach().to(dtype).mT
    # Per token and pool: the heads' scores, their sum and what choosing makes of it.
    step = max(1, _BLOCK_BYTES // max(1, B * P * (J * keys.element_size() + 64)))
    chosen = []
    for begin in range(0, T, step):
        part = slice(begin, begin + step)
        dots = torch.bmm((q[:, part].to(dtype) * I**-0.5).flatten(1, 2), keys).relu_()
        scores = torch.matmul(weights[:, part, None], dots.unflatten(1, (-1, J))).squeeze(2)
        chosen.append(_top_pools(scores, complete[:, part], topk // kpool))
    pools = torch.cat(chosen, dim=1) if chosen else tokens.new_empty(B, 0, topk // kpool)
    member = torch.arange(kpool, device=q.device)
    history = torch.where(pools[..., None] < 0, -1, pools[..., None] * kpool + member).flatten(-2)
    if not tail:
        return history.int()
    last = complete[..., None] * kpool + member[: kpool - 1]
    return torch.cat([history, torch.where(last < tokens[..., None], last, -1)], dim=-1).int()


def _top_pools(scores: torch.Tensor, complete: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` best of the first ``complete [B, T]`` pools by ``scores [B, T, P]``, ascending, then -1: ``[B, T, k]``.

    ``topk`` promises no order among equal scores, so it only gives the k-th best score; the lowest pools that reach it
    fill up.
    """
    P = scores.shape[-1]
    pool = torch.arange(P, device=scores.device)
    out = torch.full((*scores.shape[:2], k + 1), -1, dtype=torch.long, device=scores.device)
    if min(k, P) == 0:
        return out[..., :k]
    visible = pool < complete[..., None]
    # A NaN score means a broken key: it is chosen, so that the break shows, and takes no other pool's place at random.
    scores = scores.masked_fill(scores.isnan(), torch.inf).masked_fill(~visible, -torch.inf)
    bar = scores.topk(min(k, P), dim=-1).values[..., -1:]
    above, level = scores > bar, scores == bar
    room = min(k, P) - above.sum(-1, keepdim=True)
    keep = (above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))) & visible
    slot = torch.where(keep, keep.cumsum(-1) - 1, k)
    return out.scatter(-1, slot, pool.expand_as(slot))[..., :k]
