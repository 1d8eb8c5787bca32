"""Kimi delta attention by chunks: how it is cut into kernels.

With P_t the product of the decays from the start of a block up to and including token t, Q_t that of those after t up
to its end, a chunk that starts with the state S0 [V, K] does

    A[i, j] = beta_i k_i . (k_j decay(j -> i))   for j < i
    B[i, j] =        q_i . (k_j decay(j -> i))   for j <= i
    E       = (I + A)^-1 beta (v - (k P) S0^T)
    O       = (q P) S0^T + B E
    S1      = S0 P_end + E^T (k Q)

(arXiv:2510.26692, section 3). Three kernels compute it. ``diagonal`` does what lies inside a sub-chunk, a quarter of a
chunk, where decay(j -> i) is multiplied up token by token; ``join`` what lies between sub-chunks, where it is Q_j of
the earlier one times P_i of the later one, and so a product of matrices; ``scan`` goes through the chunks with the
state. Every decay is a product of just the factors, at most 1, that it stands for: nothing overflows however strong the
gate is, and no exponent loses digits to a long cumulative sum. The inverse is assembled from exact blocks.
"""

from __future__ import annotations

import torch

from glm5fn.kernels.triton import launch

__all__ = ["plan", "run_chunks"]

_WORKSPACE = 1 << 30
"""Bytes of workspace beyond which the chunks are worked on in several rounds."""


def plan(chip: launch.Chip, K: int, V: int) -> tuple[int, int, int]:
    """Tokens per chunk, BLOCK_K, and value channels per task of the scan.

    With more tokens than key channels the keys of a chunk depend on each other, and solving for all of them at once
    amplifies rounding; so heads with few channels get shorter chunks. Nine of the scan's slices of the state fit on the
    chip.
    """
    block_k = max(32, launch.power_of_two(K))
    most = launch.power_of_two(chip.on_chip // (9 * 4 * block_k) + 1) // 2
    return 64 if K > 32 else 32, block_k, min(max(16, launch.power_of_two(V)), max(16, most), 64)


def _workspace(items: int, C: int, block_k: int, device: torch.device) -> list[torch.Tensor]:
    """q_start, k_start, k_end, decay, solve, scores, solution, before, after for that many chunks and heads."""
    sizes = [C * block_k] * 3 + [4 * block_k, C * C // 4, C * C, C * C, 5 * block_k, 4 * block_k]
    flat = torch.empty(items * sum(sizes), dtype=torch.float32, device=device)
    return list(flat.split([items * n for n in sizes]))


@launch.opaque(
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, Tensor(a!) new, Tensor(b!) out, "
    "Tensor? cu_seqlens, float scale) -> ()"
)
def run_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    new: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    scale: float,
) -> None:
    from glm5fn.kernels.triton import kda_chunk_kernels as kernels

    (B, T, H, K), (N, _, V, _) = q.shape, new.shape
    if N * H * V == 0:
        return
    chip = launch.chip_of(q.device)
    precision = launch.dot_precision(chip, q.dtype)
    C, block_k, block_v = plan(chip, K, V)
    unit = launch.UNIT if launch.is_aligned(q, k, v, g, state, new) else 1
    per_row = -(-T // C)
    slots = B * per_row if cu_seqlens is None else T // C + N
    per_round = max(1, min(slots, _WORKSPACE // (4 * H * C * (3 * block_k + 2 * C))))
    q_start, k_start, k_end, decay, solve, scores, solution, before, after = _workspace(
        per_round * H, C, block_k, q.device
    )
    halvings = (N - 1).bit_length()
    q_, k_, g_, v_ = ((*launch.outer(x, unit, 3), x.stride(3)) for x in (q, k, g, v))
    state_, new_ = ((*launch.outer(x, unit, 3), 1 if x is None else x.stride(3)) for x in (state, new))
    beta_ = launch.outer(beta, 1, 3)
    packed = cu_seqlens is not None
    common = {"C": C, "BLOCK_K": block_k, "PACKED": packed, "num_stages": 1}
    for first in range(0, max(1, slots), per_round):
        n = min(per_round, slots - first)
        where = (T, H, N, per_row, halvings, first)
        launch.run(
            kernels.kda_diagonal_kernel, q.device, 4 * n * H,
            q, k, g, beta, q_start, k_start, k_end, decay, solve, scores, cu_seqlens, float(scale), 4 * n * H, *where,
            *q_, *k_, *g_, *beta_, K=K, UNIT=unit, num_warps=4 if block_k <= 128 else 8, **common,
        )  # fmt: skip
        launch.run(
            kernels.kda_join_kernel, q.device, n * H,
            beta, q_start, k_start, k_end, decay, solve, scores, solution, before, after, cu_seqlens, n * H, *where,
            *beta_, SLICE=16, PRECISION=precision, num_warps=4, **common,
        )  # fmt: skip
        tasks = N * H * -(-V // block_v)
        launch.run(
            kernels.kda_scan_kernel, q.device, tasks,
            v, state, new, out, q_start, k_start, k_end, scores, solution, before, after, cu_seqlens,
            tasks, T, H, per_row, first, max(1, n), *v_, *state_, *new_,
            K=K, V=V, BLOCK_V=block_v, UNIT=unit, FROM_ZEROS=state is None, PRECISION=precision,
            num_warps=4, **common,
        )  # fmt: skip
