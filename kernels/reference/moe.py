"""Router and experts in plain torch.

Expert products run in the dtype of x, the activation and the sum over a token's experts in float32 (float64 if given
float64).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm5fn.dims import compute_dtype
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["clamped_swiglu", "moe_experts", "moe_route"]

_FEW_BYTES = 4 << 20
"""Up to this many bytes of expert weights are gathered per (token, expert) pair; beyond, pairs are sorted by expert."""
_BLOCK_BYTES = 64 << 20
"""Bytes of expert weights that the sync-free path gathers at a time (but at least one expert's)."""
_BLOCK_ROWS = 64
"""Pairs of the same expert that the sync-free path multiplies together."""


@without_autocast
def moe_route(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = compute_dtype(x.dtype)
    scores = F.linear(x.to(dtype), w_gate.to(dtype)).sigmoid()
    choice = (scores if bias is None else scores + bias).detach()
    if topk_group < n_group:
        groups = choice.unflatten(-1, (n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _first(best, topk_group), True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = _first(choice, top_k)
    weights = scores.gather(-1, ids)
    if norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


def _first(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the ``k`` largest values; among equals the lower index wins, which ``topk`` does not promise."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def clamped_swiglu(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(gate_up.dtype)


@without_autocast
def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    limit: float | None,
) -> torch.Tensor:
    tokens, pairs = x.reshape(-1, x.shape[-1]), ids.reshape(-1).long().clamp(0, w_gate_up.shape[0] - 1)
    if pairs.numel() == 0:
        return torch.zeros_like(x)
    if pairs.numel() * _bytes_per_expert(w_gate_up, w_down) <= _FEW_BYTES:
        run = _by_pair
    elif x.device.type == "cpu" and not torch.compiler.is_compiling():
        run = _by_expert
    else:
        run = _by_block
    return run(tokens, pairs, weights.reshape(-1, ids.shape[-1]), w_gate_up, w_down, limit).to(x.dtype).view(x.shape)


def _by_pair(
    tokens: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Gather the expert's weights for each (token, expert) pair."""
    rows = tokens[:, None].expand(-1, weights.shape[1], -1).reshape(pairs.numel(), 1, -1)
    return _weighted(_blocks(rows, pairs, w_gate_up, w_down, limit), weights)


def _by_expert(
    tokens: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Sort the pairs by expert; one product per used expert. Reads the counts: for eager calls on the CPU."""
    order = pairs.argsort(stable=True)
    token = order // weights.shape[1]
    counts = torch.bincount(pairs, minlength=w_gate_up.shape[0]).tolist()
    rows = tokens.index_select(0, token).split(counts)
    outs = [_expert(row, w_gate_up[e], w_down[e], limit) for e, row in enumerate(rows) if counts[e]]
    wide = torch.cat(outs).to(weights.dtype) * weights.reshape(-1, 1).index_select(0, order)
    return torch.zeros(tokens.shape, dtype=weights.dtype).index_add(0, token, wide)


def _by_block(
    tokens: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Sort the pairs by expert, each expert's padded to whole blocks: no host read, for accelerators and graphs.

    The number of blocks is bounded without knowing the counts; blocks beyond the last used one repeat its expert on
    token 0, and nobody reads them.
    """
    n, E, device = pairs.numel(), w_gate_up.shape[0], pairs.device
    order = pairs.argsort(stable=True)
    expert = pairs[order]
    counts = torch.zeros(E, dtype=torch.long, device=device).scatter_add(0, pairs, torch.ones_like(pairs))
    blocks = (counts + _BLOCK_ROWS - 1).div(_BLOCK_ROWS, rounding_mode="floor")
    first_block, first_pair = blocks.cumsum(0) - blocks, counts.cumsum(0) - counts
    place = first_block[expert] * _BLOCK_ROWS + torch.arange(n, device=device) - first_pair[expert]
    total = n // _BLOCK_ROWS + min(E, n)
    source = torch.zeros(total * _BLOCK_ROWS, dtype=torch.long, device=device)
    source = source.scatter(0, place, order // weights.shape[1])
    block_expert = torch.searchsorted(blocks.cumsum(0), torch.arange(total, device=device), right=True)
    block_expert = torch.minimum(block_expert, expert[-1])
    rows = tokens.index_select(0, source).unflatten(0, (total, _BLOCK_ROWS))
    out = _blocks(rows, block_expert, w_gate_up, w_down, limit).flatten(0, 1)
    return _weighted(out.index_select(0, torch.zeros_like(place).scatter(0, order, place)), weights)


def _weighted(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum ``[tokens, D]`` of the pairs' outputs, in the dtype of ``weights [tokens, top_k]``."""
    return torch.bmm(weights[:, None], out.view(*weights.shape, -1).to(weights.dtype)).squeeze(1)


def _blocks(
    rows: torch.Tensor, expert: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, limit: float | None
) -> torch.Tensor:
    """``rows [G, R, D]`` through the expert of each block, gathering the weights of a few blocks at a time."""
    step = max(1, _BLOCK_BYTES // _bytes_per_expert(w_gate_up, w_down))
    outs = [
        _expert(part, w_gate_up.index_select(0, e), w_down.index_select(0, e), limit)
        for part, e in zip(rows.split(step), expert.split(step), strict=True)
    ]
    return torch.cat(outs)


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Experts ``gate_up [..., 2I, D]``, ``down [..., D, I]`` on ``x [..., rows, D]``."""
    return clamped_swiglu(x @ gate_up.mT, limit=limit) @ down.mT


def _bytes_per_expert(w_gate_up: torch.Tensor, w_down: torch.Tensor) -> int:
    return max(1, (w_gate_up[0].numel() + w_down[0].numel()) * w_down.element_size())
