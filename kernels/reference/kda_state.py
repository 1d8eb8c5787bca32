"""The recurrent state while a kernel works on it: ``[N*H, V, K]``, in the caller's memory if that was donated."""

from __future__ import annotations

import torch

__all__ = ["begin", "finish", "is_recording"]


def is_recording(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will want the intermediate states, so that the state must not be updated in place."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def begin(state: torch.Tensor | None, sequences: int, k: torch.Tensor, v: torch.Tensor, donate: bool) -> torch.Tensor:
    """Return the state as ``[N*H, V, K]``: zeros, a copy, or the donated memory itself."""
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    if state is None:
        return k.new_zeros(sequences * H, V, K, dtype=torch.promote_types(k.dtype, torch.float32))
    if not donate:
        state = state.clone(memory_format=torch.contiguous_format)
    return state.view(-1, V, K) if _merges(state) else state.reshape(-1, V, K)


def finish(S: torch.Tensor, state: torch.Tensor | None, H: int, donate: bool) -> torch.Tensor:
    """Return ``S`` as ``[N, H, V, K]``; a donated state that could not be viewed as ``[N*H, V, K]`` is written back."""
    if state is None or not donate:
        return S.view(-1, H, *S.shape[1:])
    return state if _merges(state) else state.copy_(S.view(state.shape))


def _merges(state: torch.Tensor) -> bool:
    N, H = state.shape[:2]
    return N <= 1 or H <= 1 or state.stride(0) == H * state.stride(1)
