"""The only file that turns a state from one layout into another."""

from __future__ import annotations

import torch

__all__ = ["kda_state_from_k_first", "kda_state_to_k_first"]


def kda_state_to_k_first(state: torch.Tensor) -> torch.Tensor:
    """Turn a KDA state ``[..., V, K]`` (as here and in vLLM) into ``[..., K, V]`` (transformers, fla), as a view."""
    return state.transpose(-1, -2)


def kda_state_from_k_first(state: torch.Tensor) -> torch.Tensor:
    """Turn a KDA state ``[..., K, V]`` (transformers, fla) into ``[..., V, K]`` (as here and in vLLM), as a view."""
    return state.transpose(-1, -2)
