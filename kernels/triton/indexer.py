"""Launchers of the kpool indexer. Scores come from a kernel, the choice among them from PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["kpool_compress", "kpool_select", "unsupported"]

_MOST_CHANNELS = 256
_MOST_HEADS = 128
_BLOCK_BYTES = 32 << 20
"""Bytes of temporaries that are held at a time (but at least one token's)."""


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec)
    if spec.op == "kpool_select":
        J, I = spec.shapes["q"][2:]
        for name, size, most in (("J", J, _MOST_HEADS), ("I", I, _MOST_CHANNELS)):
            if not 1 <= size <= most:
                reasons.append(f"{name} must be 1 to {most}, because a query's heads stay on the chip, got {size}")
    return reasons


def kpool_compress(k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    B, P, _, I = k.shape
    out = k.new_empty(B, P, I)
    _compress(k, gate, ape, out)
    return out


@launch.opaque("(Tensor k, Tensor gate, Tensor ape, Tensor(a!) out) -> ()")
def _compress(k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, out: torch.Tensor) -> None:
    from glm5fn.kernels.triton.indexer_kernels import kpool_compress_kernel

    B, P, KPOOL, I = k.shape
    if out.numel() == 0:
        return
    unit = launch.UNIT if launch.is_aligned(k, gate, ape) else 1
    block_i = min(launch.power_of_two(I), 256)
    block_p = max(1, 2048 // block_i)
    blocks = -(-P // block_p)
    tasks = B * blocks * -(-I // block_i)
    launch.run(
        kpool_compress_kernel, k.device, tasks,
        k, gate, ape, out, tasks, blocks, P, *launch.outer(k, unit, 3), k.stride(3),
        *launch.outer(gate, unit, 3), gate.stride(3), *launch.outer(ape, unit, 1), ape.stride(1),
        KPOOL=KPOOL, I=I, BLOCK_P=block_p, BLOCK_I=block_i, UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip


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
    (B, T), P, k = positions.shape, pooled.shape[1], topk // kpool
    tokens = (positions.long() + 1).clamp(min=0)
    complete = tokens // kpool
    pools = tokens.new_full((B, T, k), -1)
    # Per token and pool: the score and what choosing makes of it.
    step = max(1, _BLOCK_BYTES // max(1, B * P * 24))
    for begin in range(0, T if B * P > 0 else 0, step):
        rows = min(step, T - begin)
        scores = q.new_empty(B, rows, P, dtype=torch.float32)
        _score(q, weights, pooled, positions, scores, begin, kpool)
        pools[:, begin : begin + rows] = _top_pools(scores, complete[:, begin : begin + rows], k)
    member = torch.arange(kpool, device=q.device)
    history = torch.where(pools[..., None] < 0, -1, pools[..., None] * kpool + member).flatten(-2)
    if not tail:
        return history.int()
    last = complete[..., None] * kpool + member[: kpool - 1]
    return torch.cat([history, torch.where(last < tokens[..., None], last, -1)], dim=-1).int()


def plan(dtype: torch.dtype, J: int, I: int) -> dict[str, int]:
    wide = dtype == torch.float32
    return {
        "ROWS": 16,
        "BLOCK_P": 32 if wide else 128,
        "BLOCK_J": max(16, launch.power_of_two(J)),
        "BLOCK_I": max(16, launch.power_of_two(I)),
        "num_warps": 4,
        "num_stages": 1 if wide else 2,
    }


@launch.opaque(
    "(Tensor q, Tensor weights, Tensor pooled, Tensor positions, Tensor(a!) out, int first, int kpool) -> ()"
)
def _score(
    q: torch.Tensor,
    weights: torch.Tensor,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    first: int,
    kpool: int,
) -> None:
    """Scores ``out [B, rows, P]`` of the queries from ``first`` on."""
    from glm5fn.kernels.triton.indexer_kernels import kpool_score_kernel

    (B, rows, P), (J, I) = out.shape, q.shape[2:]
    if out.numel() == 0:
        return
    unit = launch.UNIT if launch.is_aligned(q, pooled) else 1
    chip = launch.chip_of(q.device)
    tile = plan(q.dtype, J, I)
    blocks = -(-rows // tile["ROWS"])
    tasks = B * blocks * -(-P // tile["BLOCK_P"])
    launch.run(
        kpool_score_kernel, q.device, tasks,
        q, weights, pooled, positions, out, I**-0.5, J**-0.5, tasks, first, rows, blocks, P, kpool,
        *launch.outer(q, unit, 3), q.stride(3), *weights.stride(), *launch.outer(pooled, unit, 2), pooled.stride(2),
        *positions.stride(), J=J, I=I, UNIT=unit, PRECISION=launch.dot_precision(chip, q.dtype), **tile,
    )  # fmt: skip


def _top_pools(scores: torch.Tensor, complete: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` best pools by ``scores [B, T, P]``, which are -inf beyond the first ``complete [B, T]``, ascending,
    then -1: ``[B, T, k]``.

    Among equal scores the lower pool wins, which ``topk`` does not promise: so it only gives the k-th best score, and
    the lowest pools that reach it fill up.
    """
    P = scores.shape[-1]
    best = min(k, P)
    bar = scores.topk(best, dim=-1).values[..., -1:]
    level = scores == bar
    room = best - (scores > bar).sum(-1, keepdim=True)
    keep = (scores > bar) | (level & (level.cumsum(-1, dtype=torch.int32) <= room))
    pool = torch.arange(P, device=scores.device)
    keep &= pool < complete[..., None]
    slot = torch.where(keep, keep.cumsum(-1) - 1, k)
    out = torch.full((*scores.shape[:2], k + 1), -1, dtype=torch.long, device=scores.device)
    return out.scatter(-1, slot, pool.expand_as(slot))[..., :k]
