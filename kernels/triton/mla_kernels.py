"""Absorbed latent attention: heads' queries against shared latents, split over the context.

Products of bfloat16 run as such, their result is float32. Where one factor is float32, the absorbed query or the
weighted mean of latents, it travels as a bfloat16 and what is missing, also bfloat16: 16 bits in two products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import fast_exp, kernel

__all__ = ["mla_attend_kernel", "mla_merge_kernel", "mla_project_kernel"]


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc: as they are where both are narrow, otherwise in float32."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _store_in_two(high, low, place, x, mask, TWO: tl.constexpr):
    """Store float32 ``x`` in the dtype of ``high``, and with TWO what that loses in ``low``."""
    rounded = x.to(high.dtype.element_ty)
    tl.store(high + place, rounded, mask=mask)
    if TWO:
        tl.store(low + place, (x - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=mask)


@kernel
def mla_project_kernel(
    a, a_low, w, out, out_low, scale,
    tasks: tl.int32, rows: tl.int32, T: tl.int32, H: tl.int32, a_first: tl.int64, out_first: tl.int64,
    a_b: tl.int64, a_t: tl.int64, a_h: tl.int64, a_k: tl.int64, w_h: tl.int64, w_k: tl.int64, w_n: tl.int64,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr, DENSE_K: tl.constexpr, A_IN_TWO: tl.constexpr, OUT_IN_TWO: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, h] = scale * a[m, h] @ w[h]; a task is BLOCK_M rows by BLOCK_N columns of one head. With UNIT above 1 the
    weight is dense along k (DENSE_K) or along n."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        n = task % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        h = tl.cast(task // n_blocks % H, tl.int64)
        m = task // n_blocks // H * BLOCK_M + tl.arange(0, BLOCK_M)
        row = tl.minimum(m, rows - 1).to(tl.int64)
        b, t = (a_first + row) // T, (a_first + row) % T
        a_at = (b * a_b + t * a_t + h * a_h) * UNIT
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_place = a_at[:, None] + (k * (1 if UNIT > 1 else a_k))[None, :]
            a_used = (m < rows)[:, None] & (k < K)[None, :]
            w_place = w + h * w_h * UNIT
            if UNIT > 1:
                if DENSE_K:
                    w_place = w_place + k[:, None] + (n * w_n * UNIT)[None, :]
                else:
                    w_place = w_place + (k * w_k * UNIT)[:, None] + n[None, :]
            else:
                w_place = w_place + (k * w_k)[:, None] + (n * w_n)[None, :]
            weight = tl.load(w_place, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc = _product(tl.load(a + a_place, mask=a_used, other=0.0), weight, acc, PRECISION)
            if A_IN_TWO:
                acc = _product(tl.load(a_low + a_place, mask=a_used, other=0.0), weight, acc, PRECISION)
        place = ((out_first + row) * H + h)[:, None] * N + n[None, :]
        _store_in_two(out, out_low, place, acc * scale, (m < rows)[:, None] & (n < N)[None, :], OUT_IN_TWO)


@kernel
def mla_attend_kernel(
    q, q_low, latent, lengths, indices, most, total, partial, mean, mean_low,
    tasks: tl.int32, first: tl.int32, rows: tl.int32, splits: tl.int32,
    T: tl.int32, S: tl.int32, J: tl.int32, H: tl.int32,
    l_b: tl.int64, l_s: tl.int64, l_r: tl.int64, i_b: tl.int64, i_t: tl.int64, i_j: tl.int64,
    R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr,
    SPARSE: tl.constexpr, RAGGED: tl.constexpr, IN_TWO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_H heads of one query over one split of the rows it sees.

    Heads see the same rows, so a masked load keeps away what the query may not see: a weight of zero would not, since
    0 * NaN is NaN. Every query is cut evenly into ``splits`` by what it sees, not by the capacity. With one split the
    mean of the latents is final; otherwise the highest score, the sum of weights (-1: no row at all) and the weighted
    sum go to the merge.
    """
    h_blocks = (H + BLOCK_H - 1) // BLOCK_H
    r = tl.arange(0, BLOCK_R)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        h = task % h_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        row = task // h_blocks % rows
        split = task // h_blocks // rows
        t, b = (first + row) % T, tl.cast((first + row) // T, tl.int64)
        seen = J
        if not SPARSE:
            end_of_row = S
            if RAGGED:
                end_of_row = tl.minimum(tl.maximum(tl.load(lengths + b), 0), S)
            seen = tl.maximum(end_of_row - T + t + 1, 0)
        each = ((seen + splits - 1) // splits + BLOCK_S - 1) // BLOCK_S * BLOCK_S
        begin = tl.minimum(split * each, seen)
        end = tl.minimum(begin + each, seen)

        used = (h < H)[:, None] & (r < R)[None, :]
        place = (tl.cast(row, tl.int64) * H + tl.minimum(h, H - 1))[:, None] * R + r[None, :]
        query = tl.load(q + place, mask=used, other=0.0)
        if IN_TWO:
            query_low = tl.load(q_low + place, mask=used, other=0.0)
        latent_at = latent + b * (l_b * UNIT) + (r * (1 if UNIT > 1 else l_r))[None, :]
        index_at = indices + b * i_b + t * i_t
        highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        weights = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
        for s in range(begin, end, BLOCK_S):
            column = s + tl.arange(0, BLOCK_S)
            visible = column < end
            source = tl.minimum(column, S - 1)
            if SPARSE:
                index = tl.load(index_at + tl.minimum(column, J - 1) * i_j, mask=visible, other=-1)
                visible = visible & (index >= 0)
                source = tl.minimum(tl.maximum(index, 0), S - 1)
            chosen = tl.load(
                latent_at + (source.to(tl.int64) * (l_s * UNIT))[:, None],
                mask=visible[:, None] & (r < R)[None, :],
                other=0.0,
            )
            score = _product(query, tl.trans(chosen), tl.zeros((BLOCK_H, BLOCK_S), tl.float32), PRECISION)
            if IN_TWO:
                score = _product(query_low, tl.trans(chosen), score, PRECISION)
            score = tl.where(visible[None, :], score, float("-inf"))
            higher = tl.maximum(highest, tl.max(score, 1))
            # Nothing seen yet: the maximum is -inf, and -inf - -inf is NaN.
            floor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = fast_exp(score - floor[:, None])
            keep = fast_exp(highest - floor)
            weights = weights * keep + tl.sum(weight, 1)
            acc = acc * keep[:, None]
            if IN_TWO:
                acc = _product(weight.to(chosen.dtype), chosen, acc, PRECISION)
            else:
                acc = _product(weight, chosen, acc, PRECISION)
            highest = higher

        # Not the places of the query, although with one split they are the same: those would stay alive for the loop.
        cell = (tl.cast(row, tl.int64) * H + tl.minimum(h, H - 1)) * splits + split
        cells = cell[:, None] * R + r[None, :]
        if splits == 1:
            acc = acc / tl.where(weights == 0.0, 1.0, weights)[:, None]
            _store_in_two(mean, mean_low, cells, acc, (h < H)[:, None] & (r < R)[None, :], IN_TWO)
        else:
            tl.store(most + cell, highest, mask=h < H)
            tl.store(total + cell, tl.where(begin < end, weights, -1.0), mask=h < H)
            tl.store(partial + cells, acc, mask=((h < H) & (begin < end))[:, None] & (r < R)[None, :])


@kernel
def mla_merge_kernel(
    most, total, partial, mean, mean_low,
    tasks: tl.int32, splits: tl.int32,
    R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, IN_TWO: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_R channels of one head of one query: the mean over all splits."""
    r_blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        r = task % r_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
        cell = tl.cast(task // r_blocks, tl.int64)
        highest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
        for start in range(0, splits, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            highest = tl.maximum(highest, tl.load(most + cell * splits + s, mask=s < splits, other=float("-inf")))
        higher = tl.max(highest, 0)
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.zeros((BLOCK_S,), tl.float32)
        acc = tl.zeros((BLOCK_R,), tl.float32)
        for start in range(0, splits, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            part = tl.load(total + cell * splits + s, mask=s < splits, other=-1.0)
            used = part != -1.0
            score = tl.load(most + cell * splits + s, mask=s < splits, other=float("-inf"))
            weight = tl.where(used, fast_exp(score - floor), 0.0)
            weights += tl.where(used, weight * part, 0.0)
            place = (cell * splits + tl.minimum(s, splits - 1))[:, None] * R + r[None, :]
            values = tl.load(partial + place, mask=used[:, None] & (r < R)[None, :], other=0.0)
            acc += tl.sum(weight[:, None] * values, 0)
        weights_of_all = tl.sum(weights, 0)
        acc = acc / tl.where(weights_of_all == 0.0, 1.0, weights_of_all)
        _store_in_two(mean, mean_low, cell * R + r, acc, r < R, IN_TWO)
