"""Definition of the causal depthwise convolution: one sequence, one token, one tap at a time."""

from __future__ import annotations

import itertools

import torch

__all__ = ["causal_conv1d", "causal_conv1d_update"]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and the new state in ``dtype``."""
    W = weight.shape[1]
    sequences = list(x) if cu_seqlens is None else _sequences(x, cu_seqlens)
    D = x.shape[2]
    old = torch.zeros(len(sequences), W - 1, D, dtype=x.dtype) if state is None else state
    new = old.clone()
    out = []
    for n, tokens in enumerate(sequences):
        past = [*old[n, : W - 1], *tokens]
        out += [_one(past[t : t + W], weight, bias, activation, dtype) for t in range(len(tokens))]
        for row in range(W - 1):
            new[n, row] = past[len(tokens) + row]
    flat = torch.stack(out) if out else torch.zeros(0, D, dtype=dtype)
    return flat.reshape(x.shape), new.to(dtype)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    *,
    num_accepted: torch.Tensor,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and the new state in ``dtype``, for tokens that may be taken back."""
    W = weight.shape[1]
    new = state.clone()
    out = []
    for n, tokens in enumerate(x):
        offset = int(num_accepted[n]) - 1
        past = [*state[n, offset : offset + W - 1], *tokens]
        out += [_one(past[t : t + W], weight, bias, activation, dtype) for t in range(len(tokens))]
        for row, token in enumerate(past[1:]):
            new[n, row] = token
    return torch.stack(out).reshape(x.shape), new.to(dtype)


def _one(
    window: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    total = torch.zeros_like(window[0], dtype=dtype)
    for w, tap in enumerate(window):
        total = total + weight[:, w].to(dtype) * tap.to(dtype)
    if bias is not None:
        total = total + bias.to(dtype)
    return total / (1 + torch.exp(-total)) if activation == "silu" else total


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    offsets = cu_seqlens.tolist()
    return [x[0, a:b] for a, b in itertools.pairwise(offsets)]
