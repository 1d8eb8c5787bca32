"""Definition of Kimi delta attention: one sequence, one head, one token at a time."""

from __future__ import annotations

import torch

__all__ = ["kda", "kda_gate", "kda_verify"]


def kda_gate(
    f: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None = -5.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the natural logarithm of the decay, in ``dtype``."""
    f, A_log, dt_bias = f.to(dtype), A_log.to(dtype), dt_bias.to(dtype)
    out = torch.zeros_like(f)
    for h in range(f.shape[2]):
        z = f[:, :, h] + dt_bias[h]
        if lower_bound is not None:
            out[:, :, h] = lower_bound / (1 + torch.exp(-torch.exp(A_log[h]) * z))
        else:
            softplus = torch.where(z > 20, z, torch.log1p(torch.exp(z.clamp(max=20))))
            out[:, :, h] = -torch.exp(A_log[h]) * softplus
    return out


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and the new state in ``dtype``: what ``kda_chunk`` and ``kda_recurrent`` compute."""
    (B, T, H, K), V = k.shape, v.shape[3]
    offsets = cu_seqlens.tolist() if cu_seqlens is not None else [0, T]
    N = len(offsets) - 1 if cu_seqlens is not None else B
    out = torch.zeros(B, T, H, V, dtype=dtype)
    new = torch.zeros(N, H, V, K, dtype=dtype) if state is None else state.to(dtype, copy=True)
    for n in range(N):
        b, start, end = (0, offsets[n], offsets[n + 1]) if cu_seqlens is not None else (n, 0, T)
        part = tuple(x[b, start:end] for x in (q, k, v, g, beta))
        for h in range(H):
            rows, states = _one_head([x[:, h] for x in part], new[n, h], scale, dtype)
            out[b, start:end, h] = rows
            new[n, h] = states[-1]
    return out, new


def kda_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and all states in ``dtype``."""
    N, T, H, _ = q.shape
    out = torch.zeros(*v.shape, dtype=dtype)
    new = states.to(dtype, copy=True)
    for n in range(N):
        first = states[n, int(num_accepted[n]) - 1].to(dtype)
        for h in range(H):
            rows, after = _one_head([x[n, :, h] for x in (q, k, v, g, beta)], first[h], scale, dtype)
            out[n, :, h] = rows
            for t in range(T):
                new[n, t, h] = after[t + 1]
    return out, new


def _one_head(
    tokens: list[torch.Tensor], state: torch.Tensor, scale: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs [T, V] of tokens (q, k, v, g, beta), and the states [V, K] before the first and after each."""
    q, k, v, g, beta = (x.to(dtype) for x in tokens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states = [state]
    out = torch.zeros(len(q), v.shape[-1], dtype=dtype)
    for t in range(len(q)):
        decayed = states[-1] * torch.exp(g[t])
        error = v[t] - decayed @ k[t]
        states.append(decayed + torch.outer(beta[t] * error, k[t]))
        out[t] = states[-1] @ (q[t] * scale)
    return out, states
