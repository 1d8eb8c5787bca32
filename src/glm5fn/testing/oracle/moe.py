"""Literal definitions of the router, the experts and their activation."""

from __future__ import annotations

import math

import torch

__all__ = ["clamped_swiglu", "moe_experts", "moe_route"]


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
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token at a time, with Python's sort: by falling value, then by rising number."""
    B, T, _ = x.shape
    E = w_gate.shape[0]
    x, w_gate = x.to(dtype), w_gate.to(dtype)
    correction = [0.0] * E if bias is None else bias.tolist()
    weights = torch.zeros(B, T, top_k, dtype=dtype)
    ids = torch.zeros(B, T, top_k, dtype=torch.int32)
    size = E // n_group
    for b in range(B):
        for t in range(T):
            score = [float(torch.sigmoid(w_gate[e] @ x[b, t])) for e in range(E)]
            choice = [score[e] + correction[e] for e in range(E)]
            groups = [range(n * size, (n + 1) * size) for n in range(n_group)]
            strength = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
            kept = sorted(range(n_group), key=lambda n: (-strength[n], n))[:topk_group]
            allowed = [e for n in kept for e in groups[n]]
            best = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
            total = math.fsum(score[e] for e in best) + 1e-20 if norm_topk else 1.0
            for k, e in enumerate(best):
                weights[b, t, k] = score[e] / total * scale
                ids[b, t, k] = e
    return weights, ids


def clamped_swiglu(gate_up: torch.Tensor, *, limit: float | None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The gate is bounded from above, the up part on both sides, both before the product."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].to(dtype), gate_up[..., half:].to(dtype)
    if limit is not None:
        bound = torch.tensor(limit, dtype=dtype)
        gate, up = torch.minimum(gate, bound), torch.maximum(torch.minimum(up, bound), -bound)
    return gate / (1 + torch.exp(-gate)) * up


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    limit: float | None,
    dtype: torch.dtype = torch.float64,
    store: torch.dtype | None = None,
) -> torch.Tensor:
    """One token and expert at a time. ``store``: what products and activations are rounded to (None: ``dtype``)."""
    B, T, D = x.shape
    store = dtype if store is None else store
    x, weights, w_gate_up, w_down = (z.to(dtype) for z in (x, weights, w_gate_up, w_down))
    y = torch.zeros(B, T, D, dtype=dtype)
    for b in range(B):
        for t in range(T):
            for k, e in enumerate(ids[b, t].tolist()):
                hidden = (w_gate_up[e] @ x[b, t]).to(store).to(dtype)
                hidden = clamped_swiglu(hidden, limit=limit, dtype=dtype).to(store).to(dtype)
                y[b, t] += weights[b, t, k] * (w_down[e] @ hidden).to(store).to(dtype)
    return y
