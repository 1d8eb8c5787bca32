"""The kpool indexer: compressed keys, and scores of pools."""

from __future__ import annotations

import triton.language as tl

from glm5fn.kernels.triton._compat import fast_exp, kernel

__all__ = ["kpool_compress_kernel", "kpool_score_kernel"]


@kernel
def kpool_compress_kernel(
    k, gate, ape, out,
    tasks: tl.int32, blocks: tl.int32, P: tl.int32,
    k_b: tl.int64, k_p: tl.int64, k_j: tl.int64, k_i: tl.int64,
    g_b: tl.int64, g_p: tl.int64, g_j: tl.int64, g_i: tl.int64, a_j: tl.int64, a_i: tl.int64,
    KPOOL: tl.constexpr, I: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_P pools by BLOCK_I channels."""
    i_blocks: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        i = task % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
        pool = task // i_blocks % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
        b = tl.cast(task // i_blocks // blocks, tl.int64)
        used = (pool < P)[:, None] & (i < I)[None, :]
        p = tl.minimum(pool, P - 1).to(tl.int64)[:, None]
        k_at = k + (b * k_b + p * k_p) * UNIT + (i * (1 if UNIT > 1 else k_i))[None, :]
        g_at = gate + (b * g_b + p * g_p) * UNIT + (i * (1 if UNIT > 1 else g_i))[None, :]
        a_at = ape + i * (1 if UNIT > 1 else a_i)
        highest = tl.full((BLOCK_P, BLOCK_I), float("-inf"), tl.float32)
        for j in range(KPOOL):
            score = tl.load(g_at + tl.cast(j, tl.int64) * (g_j * UNIT), mask=used, other=0.0).to(tl.float32)
            place = tl.load(a_at + tl.cast(j, tl.int64) * (a_j * UNIT), mask=i < I, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, score + place[None, :])
        total = tl.zeros((BLOCK_P, BLOCK_I), tl.float32)
        acc = tl.zeros((BLOCK_P, BLOCK_I), tl.float32)
        for j in range(KPOOL):
            score = tl.load(g_at + tl.cast(j, tl.int64) * (g_j * UNIT), mask=used, other=0.0).to(tl.float32)
            place = tl.load(a_at + tl.cast(j, tl.int64) * (a_j * UNIT), mask=i < I, other=0.0).to(tl.float32)
            weight = fast_exp(score + place[None, :] - highest)
            key = tl.load(k_at + tl.cast(j, tl.int64) * (k_j * UNIT), mask=used, other=0.0).to(tl.float32)
            total += weight
            acc += weight * key
        place = out + (b * P + p) * I + i[None, :]
        tl.store(place, (acc / total).to(out.dtype.element_ty), mask=used)


@kernel
def kpool_score_kernel(
    q, weights, pooled, positions, out, q_scale, w_scale,
    tasks: tl.int32, first: tl.int32, rows: tl.int32, blocks: tl.int32, P: tl.int32, kpool: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_j: tl.int64, q_i: tl.int64, w_b: tl.int64, w_t: tl.int64, w_j: tl.int64,
    p_b: tl.int64, p_p: tl.int64, p_i: tl.int64, pos_b: tl.int64, pos_t: tl.int64,
    J: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[b, row, p] = w_scale * sum over heads j of weights[j] * relu(q_scale * q_j . pooled_p), -inf where a query
    does not see the pool, inf for NaN. A task is BLOCK_P pools, whose keys stay on the chip, by ROWS queries; out holds
    the ``rows`` queries from ``first`` on."""
    p_blocks = (P + BLOCK_P - 1) // BLOCK_P
    i = tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        pool = task % p_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
        start = task // p_blocks % blocks * ROWS
        b = tl.cast(task // p_blocks // blocks, tl.int64)
        p = tl.minimum(pool, P - 1).to(tl.int64)
        key_at = pooled + (b * p_b + p * p_p)[:, None] * UNIT + (i * (1 if UNIT > 1 else p_i))[None, :]
        keys = tl.load(key_at, mask=(pool < P)[:, None] & (i < I)[None, :], other=0.0)
        q_at = q + b * (q_b * UNIT) + (j * (q_j * UNIT))[None, :] + (i * (1 if UNIT > 1 else q_i))[:, None]
        for row in range(start, tl.minimum(start + ROWS, rows)):
            t = tl.cast(first + row, tl.int64)
            position = tl.load(positions + b * pos_b + t * pos_t)
            complete = tl.minimum(tl.maximum(position + 1, 0) // kpool, P).to(tl.int32)
            place = out + (b * rows + row) * P + pool
            if task % p_blocks * BLOCK_P < complete:
                query = tl.load(q_at + t * (q_t * UNIT), mask=(i < I)[:, None] & (j < J)[None, :], other=0.0)
                if keys.dtype == tl.float32:
                    dots = tl.dot(keys, query, input_precision=PRECISION)
                else:
                    dots = tl.dot(keys, query)
                weight = tl.load(weights + b * w_b + t * w_t + j * w_j, mask=j < J, other=0.0).to(tl.float32)
                dots = dots * q_scale
                dots = tl.where(dots < 0.0, 0.0, dots)
                score = tl.sum(dots * (weight * w_scale)[None, :], 1)
                score = tl.where(score != score, float("inf"), score)
                tl.store(place, tl.where(pool < complete, score, float("-inf")), mask=pool < P)
            else:
                tl.store(place, tl.full((BLOCK_P,), float("-inf"), tl.float32), mask=pool < P)
