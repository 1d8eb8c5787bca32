"""Launchers of the hyper-connections."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits
from glm5fn.kernels.triton.norm import rms_norm

__all__ = ["mhc_post", "mhc_pre", "mhc_pre_norm", "unsupported"]

_MOST_STREAMS = 8
_MOST_SPLITS = 8
"""Programs that share one block of tokens, so that a few tokens do not leave the reading of fn to one."""


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec)
    N = spec.shapes["streams"][2]
    if N > _MOST_STREAMS:
        reasons.append(f"N must be at most {_MOST_STREAMS} streams, because N x N x tokens stay on the chip, got {N}")
    return reasons


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
    splits, _ = _shares(N, D)
    partial = streams.new_empty(splits, fn.shape[0] + 1, B * T, dtype=torch.float32)
    x = streams.new_empty(B, T, D)
    post = streams.new_empty(B, T, N, dtype=torch.float32)
    comb = streams.new_empty(B, T, N, N, dtype=torch.float32)
    _logits(streams, fn, partial)
    _collapse(streams, partial, base, scale, x, post, comb, iters, hc_eps, norm_eps)
    return x, post, comb


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
    # The norm's own kernel: another one might add up in another order, and the result is promised to be the same.
    x, post, comb = mhc_pre(streams, fn, base, scale, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps)
    return rms_norm(x, norm_weight, eps=norm_eps), post, comb


def mhc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    out = streams.new_empty(streams.shape)
    _mix(y, streams, post, comb, out)
    return out


_PIECE = 128
"""Channels of one stream that are multiplied by their part of fn at a time."""


def _shares(N: int, D: int) -> tuple[int, int]:
    """How many programs share the pieces of the flattened streams, and how many pieces each takes."""
    pieces = N * -(-D // _PIECE)
    each = -(-pieces // _MOST_SPLITS)
    return -(-pieces // each), each


@launch.opaque("(Tensor streams, Tensor fn, Tensor(a!) partial) -> ()")
def _logits(streams: torch.Tensor, fn: torch.Tensor, partial: torch.Tensor) -> None:
    from glm5fn.kernels.triton.mhc_kernels import mhc_logits_kernel

    (B, T, N, D), M = streams.shape, fn.shape[0]
    splits, each = _shares(N, D)
    chip = launch.chip_of(streams.device)
    unit = launch.UNIT if launch.is_aligned(streams, fn) else 1
    narrow = streams.dtype == torch.bfloat16
    block_t = 64 if narrow and chip.kind == "cuda" else 16
    tasks = -(-(B * T) // block_t) * splits
    launch.run(
        mhc_logits_kernel, streams.device, tasks,
        streams, fn, partial, tasks, B * T, T, *launch.outer(streams, unit, 3), streams.stride(3),
        *launch.outer(fn, unit, 1), fn.stride(1), N=N, D=D, M=M, SPLITS=splits, EACH=each, BLOCK_T=block_t,
        BLOCK_D=_PIECE, BLOCK_M=max(16, launch.power_of_two(M)), UNIT=unit,
        THREE=narrow and fn.dtype == torch.float32, PRECISION=launch.dot_precision(chip, streams.dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip


@launch.opaque(
    "(Tensor streams, Tensor partial, Tensor base, Tensor scale, Tensor(a!) x, Tensor(b!) post, Tensor(c!) comb, "
    "int iters, float hc_eps, float norm_eps) -> ()"
)
def _collapse(
    streams: torch.Tensor,
    partial: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float,
) -> None:
    from glm5fn.kernels.triton.mhc_kernels import mhc_collapse_kernel

    B, T, N, D = streams.shape
    unit = launch.UNIT if launch.is_aligned(streams) else 1
    chip = launch.chip_of(streams.device)
    block_t = 8 if chip.kind in ("cuda", "hip") else 32
    tasks = -(-(B * T) // block_t)
    launch.run(
        mhc_collapse_kernel, streams.device, tasks,
        streams, partial, base, scale, x, post, comb, float(hc_eps), float(norm_eps), tasks, B * T, T, iters,
        *launch.outer(streams, unit, 3), streams.stride(3), base.stride(0), scale.stride(0),
        N=N, D=D, M=base.shape[0], SPLITS=partial.shape[0], BLOCK_T=block_t, BLOCK_N=launch.power_of_two(N),
        BLOCK_D=min(launch.power_of_two(D), 1024), UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip


@launch.opaque("(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor(a!) out) -> ()")
def _mix(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor) -> None:
    from glm5fn.kernels.triton.mhc_kernels import mhc_post_kernel

    B, T, N, D = streams.shape
    if out.numel() == 0:
        return
    unit = launch.UNIT if launch.is_aligned(y, streams) else 1
    block_d = min(launch.power_of_two(D), 1024)
    tasks = B * T * -(-D // block_d)
    launch.run(
        mhc_post_kernel, y.device, tasks,
        y, streams, post, comb, out, tasks, T, *launch.outer(y, unit, 2), y.stride(2),
        *launch.outer(streams, unit, 3), streams.stride(3), *post.stride(), *comb.stride(),
        N=N, D=D, BLOCK_N=launch.power_of_two(N), BLOCK_D=block_d, UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip
