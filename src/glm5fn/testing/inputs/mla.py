"""Inputs for multi-head latent attention."""

from __future__ import annotations

import torch

__all__ = ["all_indices", "mla_dense", "mla_sparse"]


def mla_dense(
    *,
    B: int = 2,
    T: int = 5,
    S: int = 9,
    H: int = 3,
    Dk: int = 4,
    Dv: int = 6,
    R: int = 8,
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Arguments of ``mla_prefill`` and ``mla_decode``, scores of order one; ``w_uk`` and ``w_uv`` are views."""
    make = torch.Generator().manual_seed(seed)
    kv_b = torch.randn(H, Dk + Dv, R, generator=make, dtype=torch.float64) * R**-0.5
    w_uk, w_uv = kv_b.to(dtype).split([Dk, Dv], dim=1)
    arguments = {
        "q": 2 * torch.randn(B, T, H, Dk, generator=make, dtype=torch.float64).to(dtype),
        "latent": torch.randn(B, S, R, generator=make, dtype=torch.float64).to(dtype),
        "w_uk": w_uk,
        "w_uv": w_uv,
    }
    if lengths is not None:
        arguments["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    return arguments


def mla_sparse(
    *, J: int = 6, B: int = 2, T: int = 5, S: int = 9, H: int = 3, Dk: int = 4, Dv: int = 6, R: int = 8,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Arguments of ``mla_sparse``: distinct rows in random order, some indices unused, all of query [0, 0]'s."""
    make = torch.Generator().manual_seed(seed + 1)
    arguments = mla_dense(B=B, T=T, S=S, H=H, Dk=Dk, Dv=Dv, R=R, dtype=dtype, seed=seed)
    order = torch.rand(B, T, S, generator=make).argsort(-1)[..., :J]
    order = torch.nn.functional.pad(order, (0, J - order.shape[-1]), value=-1)
    unused = torch.rand(B, T, J, generator=make) < 0.3
    unused[:1, :1] = True
    return arguments | {"indices": order.masked_fill(unused, -1).to(torch.int32)}


def all_indices(B: int, T: int, S: int, lengths: list[int] | None = None) -> torch.Tensor:
    """Indices int32 ``[B, T, S]`` that make ``mla_sparse`` dense and causal, row b ending at ``lengths[b]``."""
    ends = torch.tensor([S] * B if lengths is None else lengths)
    position = ends[:, None] - T + torch.arange(T)
    rows = torch.arange(S)
    return torch.where(rows <= position[..., None], rows, -1).to(torch.int32)
