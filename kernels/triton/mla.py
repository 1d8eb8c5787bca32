"""Launchers of absorbed latent attention: queries into the latent space, attention there, values out of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["mla_decode", "mla_sparse", "unsupported"]

_MOST_RANK = 512
_MOST_SPLITS = 128
_BLOCK_BYTES = 128 << 20
"""Bytes of queries and means in the latent space that are held at a time (but at least one query's)."""


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec)
    R = spec.shapes["latent"][2]
    if R > _MOST_RANK:
        reasons.append(
            f"R must be at most {_MOST_RANK}, because a head's mean of the latents stays on the chip, got {R}"
        )
    return reasons


def mla_decode(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    return _attention(q, latent, w_uk, w_uv, lengths, None, scale)


def mla_sparse(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    return _attention(q, latent, w_uk, w_uv, None, indices, scale)


class Plan(NamedTuple):
    """How a chip shares the work."""

    step: int
    """Queries at a time."""
    splits: int
    """Parts of the context, each by its own program."""
    in_two: bool
    """A float32 factor is two narrow numbers."""
    attend: dict[str, int]
    merge: dict[str, int]
    project: dict[str, int]


def _attend_tile(chip: launch.Chip, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Heads and rows of a tile, warps and stages: what spills least of the mean to slow memory, as compiled."""
    if dtype != torch.bfloat16:
        return 16, 16, 8 if chip.kind == "cuda" and dtype == torch.float32 else 4, 1
    if chip.kind == "hip":
        return 16, 32, 4, 2
    if chip.kind == "cuda" and chip.on_chip >= 200 << 10:
        return 64, 32, 8, 1 if chip.arch.startswith("sm_10") else 2
    return 32 if chip.kind == "cuda" else 16, 32, 8, 2


def plan(chip: launch.Chip, dtype: torch.dtype, queries: int, rows: int, H: int, R: int) -> Plan:
    """``rows`` is how many latents a query can see at most."""
    in_two = dtype == torch.bfloat16
    heads, block_s, warps, stages = _attend_tile(chip, dtype)
    block_h = min(heads, max(16, launch.power_of_two(H)))
    block_r = max(16, launch.power_of_two(R))
    step = max(1, min(queries, _BLOCK_BYTES // (8 * H * R)))
    programs = step * -(-H // block_h)
    splits = max(1, min(_MOST_SPLITS, 2 * chip.cores // programs, rows // (4 * block_s)))
    return Plan(
        step, splits, in_two,
        {"BLOCK_H": block_h, "BLOCK_S": block_s, "BLOCK_R": block_r, "num_warps": warps, "num_stages": stages},
        {"BLOCK_S": 32, "BLOCK_R": min(block_r, 128), "num_warps": 4, "num_stages": 1},
        {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64 if in_two else 32, "num_warps": 4, "num_stages": 3},
    )  # fmt: skip


def _attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: torch.Tensor | None,
    indices: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    B, T, H, Dk = q.shape
    seen = latent.shape[1] if indices is None else indices.shape[2]
    if q.numel() == 0 or latent.shape[1] == 0 or seen == 0:
        return q.new_zeros(B, T, H, w_uv.shape[1])
    out = q.new_empty(B, T, H, w_uv.shape[1])
    _attend(q, latent, w_uk, w_uv, lengths, indices, out, Dk**-0.5 if scale is None else float(scale))
    return out


@launch.opaque(
    "(Tensor q, Tensor latent, Tensor w_uk, Tensor w_uv, Tensor? lengths, Tensor? indices, Tensor(a!) out, "
    "float scale) -> ()"
)
def _attend(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: torch.Tensor | None,
    indices: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    (B, T, H, _), (_, S, R) = q.shape, latent.shape
    chip = launch.chip_of(q.device)
    chosen = plan(chip, q.dtype, B * T, S if indices is None else indices.shape[2], H, R)
    half = q.dtype if chosen.in_two else torch.float32
    query, mean = (q.new_empty(1 + chosen.in_two, chosen.step, H, R, dtype=half) for _ in range(2))
    for first in range(0, B * T, chosen.step):
        rows = min(chosen.step, B * T - first)
        _absorb(chip, chosen, q, w_uk, query, scale, first, rows)
        _average(chip, chosen, query, latent, lengths, indices, mean, first, rows, T)
        _expand(chip, chosen, mean, w_uv, out, first, rows)


def _absorb(
    chip: launch.Chip,
    chosen: Plan,
    q: torch.Tensor,
    w_uk: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    first: int,
    rows: int,
) -> None:
    """The queries ``[B, T, H, Dk]`` from number ``first`` on into the latent space: ``query [1 or 2, step, H, R]``."""
    from glm5fn.kernels.triton.mla_kernels import mla_project_kernel

    H, K, N = w_uk.shape
    unit = launch.UNIT if launch.is_aligned(q, w_uk) else 1
    tile = _fitting(chosen.project, N)
    tasks = -(-rows // tile["BLOCK_M"]) * H * -(-N // tile["BLOCK_N"])
    launch.run(
        mla_project_kernel, q.device, tasks,
        q, q, w_uk, query[0], query[-1], scale, tasks, rows, q.shape[1], H, first, 0,
        *launch.outer(q, unit, 3), q.stride(3), *launch.outer(w_uk, unit, 2), w_uk.stride(2),
        K=K, N=N, UNIT=unit, DENSE_K=False, A_IN_TWO=False, OUT_IN_TWO=chosen.in_two,
        PRECISION=launch.dot_precision(chip, q.dtype), **tile,
    )  # fmt: skip


def _expand(
    chip: launch.Chip, chosen: Plan, mean: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor, first: int, rows: int
) -> None:
    """The means ``[1 or 2, step, H, R]`` of latents out into ``out [B, T, H, Dv]``, from number ``first`` on."""
    from glm5fn.kernels.triton.mla_kernels import mla_project_kernel

    H, N, K = w_uv.shape
    high = mean[:1]
    unit = launch.UNIT if launch.is_aligned(high, w_uv) else 1
    tile = _fitting(chosen.project, N)
    tasks = -(-rows // tile["BLOCK_M"]) * H * -(-N // tile["BLOCK_N"])
    w_h, w_n = launch.outer(w_uv, unit, 2)
    launch.run(
        mla_project_kernel, out.device, tasks,
        high, mean[-1:], w_uv, out, out, 1.0, tasks, rows, mean.shape[1], H, 0, first,
        *launch.outer(high, unit, 3), high.stride(3), w_h, w_uv.stride(2), w_n,
        K=K, N=N, UNIT=unit, DENSE_K=True, A_IN_TWO=chosen.in_two, OUT_IN_TWO=False,
        PRECISION=launch.dot_precision(chip, out.dtype), **tile,
    )  # fmt: skip


def _fitting(tile: dict[str, int], N: int) -> dict[str, int]:
    return tile | {"BLOCK_N": min(tile["BLOCK_N"], max(16, launch.power_of_two(N)))}


def _average(
    chip: launch.Chip,
    chosen: Plan,
    query: torch.Tensor,
    latent: torch.Tensor,
    lengths: torch.Tensor | None,
    indices: torch.Tensor | None,
    mean: torch.Tensor,
    first: int,
    rows: int,
    T: int,
) -> None:
    """The means of latents, ``mean [1 or 2, step, H, R]``, that the queries from number ``first`` on see."""
    from glm5fn.kernels.triton.mla_kernels import mla_attend_kernel, mla_merge_kernel

    (_, _, H, R), S, splits = query.shape, latent.shape[1], chosen.splits
    most, total = mean.new_empty(2, rows, H, splits, dtype=torch.float32).unbind()
    partial = most if splits == 1 else mean.new_empty(rows, H, splits, R, dtype=torch.float32)
    unit = launch.UNIT if launch.is_aligned(latent) else 1
    tasks = rows * splits * -(-H // chosen.attend["BLOCK_H"])
    launch.run(
        mla_attend_kernel, query.device, tasks,
        query[0], query[-1], latent, lengths, latent if indices is None else indices, most, total, partial,
        mean[0], mean[-1], tasks, first, rows, splits, T, S, 0 if indices is None else indices.shape[2], H,
        *launch.outer(latent, unit, 2), latent.stride(2), *((0, 0, 0) if indices is None else indices.stride()),
        R=R, UNIT=unit, SPARSE=indices is not None, RAGGED=lengths is not None, IN_TWO=chosen.in_two,
        PRECISION=launch.dot_precision(chip, latent.dtype), **chosen.attend,
    )  # fmt: skip
    if splits > 1:
        tasks = rows * H * -(-R // chosen.merge["BLOCK_R"])
        launch.run(
            mla_merge_kernel, query.device, tasks,
            most, total, partial, mean[0], mean[-1], tasks, splits, R=R, IN_TWO=chosen.in_two, **chosen.merge,
        )  # fmt: skip
