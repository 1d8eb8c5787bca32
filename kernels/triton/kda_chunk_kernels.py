"""Kimi delta attention by chunks of C tokens and sub-chunks of a quarter of that, in three kernels; what they compute
is written in ``kda_chunk``.

Chunks are numbered by slots, so that the host need not know any length: chunk i of packed sequence n, which starts at
token s, has slot s // C + n + i. Slots never collide, and one that belongs to no chunk is a chunk of no tokens. Below,
``item`` is a slot of this launch times H plus the head: the place in the workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import exp, kernel
from glm5fn.kernels.triton.kda_kernels import sequence_bounds

__all__ = ["kda_diagonal_kernel", "kda_join_kernel", "kda_scan_kernel"]


@triton.jit
def _sequence_of(cu_seqlens, slot, N, T, halvings, C: tl.constexpr):
    """The last sequence whose first slot is at most ``slot``."""
    low, high = slot * 0, slot * 0 + N
    for _ in range(halvings):
        middle = (low + high) // 2
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), T) // C + middle
        low, high = tl.where(first <= slot, middle, low), tl.where(first <= slot, high, middle)
    return low


@triton.jit
def _tokens_of(cu_seqlens, slot, N, T, per_row, halvings, C: tl.constexpr, PACKED: tl.constexpr):
    """Row of the batch, first token and number of tokens of the chunk at ``slot``."""
    if PACKED:
        n = _sequence_of(cu_seqlens, slot, N, T, halvings, C)
        start, end = sequence_bounds(cu_seqlens, n, T)
        start += (slot - start // C - n) * C
        b = n * 0
    else:
        b = slot // per_row
        start, end = slot % per_row * C, T
    start = tl.minimum(tl.maximum(start, 0), T)
    return tl.cast(b, tl.int64), start, tl.minimum(tl.maximum(end - start, 0), C)


@triton.jit
def _unit_lower_inverse(A, S: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [S, S], row by row."""
    row = tl.arange(0, S)
    X = -A
    for i in range(2, S):
        here = (row == i)[:, None]
        a = tl.sum(tl.where(here, X, 0.0), 0)
        X = tl.where(here, (a + tl.sum(a[:, None] * X, 0))[None, :], X)
    return tl.where(row[:, None] == row[None, :], 1.0, X)


@kernel
def kda_diagonal_kernel(
    q, k, g, beta, q_start, k_start, k_end, decay, solve, scores, cu_seqlens, scale,
    tasks: tl.int32, T: tl.int32, H: tl.int32, N: tl.int32, per_row: tl.int32, halvings: tl.int32, first_slot: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, q_k: tl.int64,
    k_b: tl.int64, k_t: tl.int64, k_h: tl.int64, k_k: tl.int64,
    g_b: tl.int64, g_t: tl.int64, g_h: tl.int64, g_k: tl.int64,
    beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    C: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A task is one sub-chunk of one item: (I + A)^-1 and B inside it, q and k times the decay since its start, k times
    the decay to its end, and the decay over all of it. Token by token backwards, ``since[i]`` is the product of the
    decays after token j up to and including i."""
    S: tl.constexpr = C // 4
    row = tl.arange(0, S)
    key = tl.arange(0, BLOCK_K)
    key_used = key < K
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        item, sub = task // 4, task % 4
        b, start, count = _tokens_of(cu_seqlens, item // H + first_slot, N, T, per_row, halvings, C, PACKED)
        count = tl.minimum(tl.maximum(count - sub * S, 0), S)
        first = tl.cast(tl.minimum(start + sub * S, T), tl.int64)
        h = tl.cast(item % H, tl.int64)
        q_at = q + (b * q_b + first * q_t + h * q_h) * UNIT + key * (1 if UNIT > 1 else q_k)
        k_at = k + (b * k_b + first * k_t + h * k_h) * UNIT + key * (1 if UNIT > 1 else k_k)
        g_at = g + (b * g_b + first * g_t + h * g_h) * UNIT + key * (1 if UNIT > 1 else g_k)
        used = row < count
        time = tl.where(used, row, 0).to(tl.int64)[:, None]
        tile_used = used[:, None] & key_used[None, :]
        qs = tl.load(q_at[None, :] + time * (q_t * UNIT), mask=tile_used, other=0.0).to(tl.float32) * scale
        ks = tl.load(k_at[None, :] + time * (k_t * UNIT), mask=tile_used, other=0.0).to(tl.float32)
        since, ks_end = tl.zeros((S, BLOCK_K), tl.float32), tl.zeros((S, BLOCK_K), tl.float32)
        A, B = tl.zeros((S, S), tl.float32), tl.zeros((S, S), tl.float32)
        whole = tl.full((BLOCK_K,), 1.0, tl.float32)
        for back in range(count):
            j = count - 1 - back
            when = tl.cast(j, tl.int64)
            k_j = tl.load(k_at + when * (k_t * UNIT), mask=key_used, other=0.0).to(tl.float32)
            decay_j = exp(tl.load(g_at + when * (g_t * UNIT), mask=key_used, other=0.0))
            here = (row == j)[:, None]
            since = tl.where(here, 1.0, since)
            ks_end = tl.where(here, (k_j * whole)[None, :], ks_end)
            right = since * k_j[None, :]
            column = (row == j)[None, :]
            A = tl.where(column & (row > j)[:, None], tl.sum(ks * right, 1)[:, None], A)
            B = tl.where(column & (row >= j)[:, None], tl.sum(qs * right, 1)[:, None], B)
            since = since * decay_j[None, :]
            whole = whole * decay_j
        beta_at = beta + b * beta_b + (first + time) * beta_t + h * beta_h
        A = A * tl.load(beta_at, mask=used[:, None], other=0.0)
        tile = tl.cast(task, tl.int64) * (S * BLOCK_K) + row[:, None] * BLOCK_K + key[None, :]
        tl.store(q_start + tile, qs * since)
        tl.store(k_start + tile, ks * since)
        tl.store(k_end + tile, ks_end)
        tl.store(decay + tl.cast(task, tl.int64) * BLOCK_K + key, whole)
        square = row[:, None] * S + row[None, :]
        tl.store(solve + tl.cast(task, tl.int64) * (S * S) + square, _unit_lower_inverse(A, S))
        corner = tl.cast(item, tl.int64) * (C * C) + (sub * S) * (C + 1)
        tl.store(scores + corner + row[:, None] * C + row[None, :], B)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse_of_pair(solve, A, S: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 [2S, 2S] of two sub-chunks, given those of each, ``solve`` [2, S, S], and A between them."""
    row = tl.arange(0, 2 * S)
    own = (row // S)[:, None] == (row // S)[None, :]
    X = tl.load(solve + row[:, None] * S + (row % S)[None, :], mask=own, other=0.0)
    return X - _dot(X, _dot(A, X, PRECISION), PRECISION)


@kernel
def kda_join_kernel(
    beta, q_start, k_start, k_end, decay, solve, scores, solution, before, after, cu_seqlens,
    tasks: tl.int32, T: tl.int32, H: tl.int32, N: tl.int32, per_row: tl.int32, halvings: tl.int32, first_slot: tl.int32,
    beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    C: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A task is one item: join its four sub-chunks, first two and two, then the halves. ``solution`` is
    (I + A)^-1 diag(beta); ``before`` and ``after`` are the decays from the start of the chunk to that of each sub-chunk
    (the fifth: to the end), and from the end of each to that of the chunk."""
    S: tl.constexpr = C // 4
    HALF: tl.constexpr = C // 2
    row = tl.arange(0, HALF)
    later = (row >= S)[:, None]
    corner = later & (row < S)[None, :]
    square = row[:, None] * C + row[None, :]
    for item in range(tl.program_id(0), tasks, tl.num_programs(0)):
        place = tl.cast(item, tl.int64)
        A_left, B_left = tl.zeros((HALF, HALF), tl.float32), tl.zeros((HALF, HALF), tl.float32)
        A_right, B_right = tl.zeros((HALF, HALF), tl.float32), tl.zeros((HALF, HALF), tl.float32)
        A_cross, B_cross = tl.zeros((HALF, HALF), tl.float32), tl.zeros((HALF, HALF), tl.float32)
        for offset in range(0, BLOCK_K, SLICE):
            key = offset + tl.arange(0, SLICE)
            left = place * (C * BLOCK_K) + row[:, None] * BLOCK_K + key[None, :]
            right = left + HALF * BLOCK_K
            decays = decay + place * (4 * BLOCK_K) + key
            d0, d1 = tl.load(decays), tl.load(decays + BLOCK_K)
            d2, d3 = tl.load(decays + 2 * BLOCK_K), tl.load(decays + 3 * BLOCK_K)
            end = tl.load(k_end + left)
            A_left += _dot(tl.load(k_start + left), tl.trans(end), PRECISION)
            B_left += _dot(tl.load(q_start + left), tl.trans(end), PRECISION)
            end *= tl.where(later, 1.0, d1[None, :])
            start = tl.load(k_start + right)
            right_end = tl.load(k_end + right)
            A_right += _dot(start, tl.trans(right_end), PRECISION)
            A_cross += _dot(start * tl.where(later, d2[None, :], 1.0), tl.trans(end), PRECISION)
            start = tl.load(q_start + right)
            B_right += _dot(start, tl.trans(right_end), PRECISION)
            B_cross += _dot(start * tl.where(later, d2[None, :], 1.0), tl.trans(end), PRECISION)
            at = before + place * (5 * BLOCK_K) + key
            tl.store(at, tl.full((SLICE,), 1.0, tl.float32))
            tl.store(at + BLOCK_K, d0)
            tl.store(at + 2 * BLOCK_K, d0 * d1)
            tl.store(at + 3 * BLOCK_K, d0 * d1 * d2)
            tl.store(at + 4 * BLOCK_K, d0 * d1 * (d2 * d3))
            at = after + place * (4 * BLOCK_K) + key
            tl.store(at, d1 * (d2 * d3))
            tl.store(at + BLOCK_K, d2 * d3)
            tl.store(at + 2 * BLOCK_K, d3)
            tl.store(at + 3 * BLOCK_K, tl.full((SLICE,), 1.0, tl.float32))
        corner_at = scores + place * (C * C) + square
        tl.store(corner_at, B_left, mask=corner)
        tl.store(corner_at + HALF * (C + 1), B_right, mask=corner)
        tl.store(corner_at + HALF * C, B_cross)

        b, first, count = _tokens_of(cu_seqlens, item // H + first_slot, N, T, per_row, halvings, C, PACKED)
        beta_at = beta + b * beta_b + tl.cast(item % H, tl.int64) * beta_h
        time = tl.cast(first, tl.int64)
        betas = tl.load(beta_at + (time + tl.where(row < count, row, 0)) * beta_t, mask=row < count, other=0.0)
        used = row + HALF < count
        betas_right = tl.load(beta_at + (time + tl.where(used, row + HALF, 0)) * beta_t, mask=used, other=0.0)
        blocks = solve + place * (C * S)
        X_left = _inverse_of_pair(blocks, tl.where(corner, A_left * betas[:, None], 0.0), S, PRECISION)
        X_right = _inverse_of_pair(
            blocks + HALF * S, tl.where(corner, A_right * betas_right[:, None], 0.0), S, PRECISION
        )  # fmt: skip
        X = -_dot(X_right, _dot(A_cross * betas_right[:, None], X_left, PRECISION), PRECISION)
        solution_at = solution + place * (C * C) + square
        tl.store(solution_at, X_left * betas[None, :])
        tl.store(solution_at + HALF * C, X * betas[None, :])
        tl.store(solution_at + HALF * (C + 1), X_right * betas_right[None, :])


@triton.jit
def _load_half(at, used, K: tl.constexpr, step, offset, W: tl.constexpr):
    """Rows ``offset`` to ``offset + W`` of S [K, V]."""
    key = offset + tl.arange(0, W)
    return tl.load(at + key[:, None] * step, mask=(key < K)[:, None] & used[None, :], other=0.0)


@triton.jit
def _store_half(at, used, K: tl.constexpr, step, offset, W: tl.constexpr, S):
    key = offset + tl.arange(0, W)
    tl.store(at + key[:, None] * step, S, mask=(key < K)[:, None] & used[None, :])


@triton.jit
def _times_state(tiles, decays, S0, S1, W: tl.constexpr, PRECISION: tl.constexpr):
    """What the rows of a tile, decayed, read out of the state."""
    o = _dot(tl.load(tiles) * tl.load(decays), S0, PRECISION)
    return o + _dot(tl.load(tiles + W) * tl.load(decays + W), S1, PRECISION)


@triton.jit
def _after_chunk(S, tiles, decays, whole, e, PRECISION: tl.constexpr):
    """Half of the state after a chunk that writes ``e`` at the keys of ``tiles``, decayed to its end."""
    keys = tl.load(tiles) * tl.load(decays)
    return S * tl.load(whole)[:, None] + _dot(tl.trans(keys), e, PRECISION)


@kernel
def kda_scan_kernel(
    v, state, new, out, q_start, k_start, k_end, scores, solution, before, after, cu_seqlens,
    tasks: tl.int32, T: tl.int32, H: tl.int32, per_row: tl.int32, first_slot: tl.int32, slots: tl.int32,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, v_v: tl.int64,
    s_n: tl.int64, s_h: tl.int64, s_v: tl.int64, s_k: tl.int64,
    n_n: tl.int64, n_h: tl.int64, n_v: tl.int64, n_k: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    UNIT: tl.constexpr, PACKED: tl.constexpr, FROM_ZEROS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_V value channels of one head of one sequence, through those of its chunks whose slots are among
    ``slots`` from ``first_slot`` on. The launch that holds a sequence's first slot starts from ``state``, later ones go
    on from ``new``. The state is kept turned over, S [K, V], in two halves, so that an operand of C tokens and half the
    channels fits into registers."""
    W: tl.constexpr = BLOCK_K // 2
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.arange(0, C)
    lower = row[:, None] >= row[None, :]
    key = tl.arange(0, W)
    tile = row[:, None] * BLOCK_K + key[None, :]
    by_sub = (row // (C // 4))[:, None] * BLOCK_K + key[None, :]
    square = row[:, None] * C + row[None, :]
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        value = task % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        value_used = value < V
        h, n = task // blocks % H, task // blocks // H
        if PACKED:
            start, end = sequence_bounds(cu_seqlens, n, T)
            origin = start // C + n - first_slot
            b = n * 0
        else:
            start, end = n * 0, n * 0 + T
            origin = n * per_row - first_slot
            b = n
        last = tl.minimum((end - start + C - 1) // C, slots - origin)
        begins = (origin >= 0) & (origin < slots)
        if begins | ((origin < 0) & (last > -origin)):
            h_, n_, b_ = tl.cast(h, tl.int64), tl.cast(n, tl.int64), tl.cast(b, tl.int64)
            column = value[None, :].to(tl.int64)
            new_at = new + (n_ * n_n + h_ * n_h + column * n_v) * UNIT
            new_step = 1 if UNIT > 1 else n_k
            if begins:
                if FROM_ZEROS:
                    S0, S1 = tl.zeros((W, BLOCK_V), tl.float32), tl.zeros((W, BLOCK_V), tl.float32)
                else:
                    state_at = state + (n_ * s_n + h_ * s_h + column * s_v) * UNIT
                    step = 1 if UNIT > 1 else s_k
                    S0 = _load_half(state_at, value_used, K, step, 0, W)
                    S1 = _load_half(state_at, value_used, K, step, W, W)
            else:
                S0 = _load_half(new_at, value_used, K, new_step, 0, W)
                S1 = _load_half(new_at, value_used, K, new_step, W, W)
            v_at = v + (b_ * v_b + h_ * v_h) * UNIT + value[None, :] * (1 if UNIT > 1 else v_v)
            out_at = out + (b_ * T * H + h_) * V + value[None, :]
            for i in range(tl.maximum(0, -origin), last):
                item = tl.cast(origin + i, tl.int64) * H + h_
                token = start + i * C + row
                used = (token < end)[:, None] & value_used[None, :]
                time = tl.minimum(token, T - 1)[:, None].to(tl.int64)
                tiles, squares = item * (C * BLOCK_K) + tile, item * (C * C) + square
                since = before + item * (5 * BLOCK_K) + by_sub
                e = tl.load(v_at + time * (v_t * UNIT), mask=used, other=0.0).to(tl.float32)
                e -= _times_state(k_start + tiles, since, S0, S1, W, PRECISION)
                e = _dot(tl.load(solution + squares, mask=lower, other=0.0), e, PRECISION)
                o = _times_state(q_start + tiles, since, S0, S1, W, PRECISION)
                o += _dot(tl.load(scores + squares, mask=lower, other=0.0), e, PRECISION)
                tl.store(out_at + time * (H * V), o.to(out.dtype.element_ty), mask=used)
                until = after + item * (4 * BLOCK_K) + by_sub
                whole = before + item * (5 * BLOCK_K) + 4 * BLOCK_K + key
                S0 = _after_chunk(S0, k_end + tiles, until, whole, e, PRECISION)
                S1 = _after_chunk(S1, k_end + tiles + W, until + W, whole + W, e, PRECISION)
            _store_half(new_at, value_used, K, new_step, 0, W, S0)
            _store_half(new_at, value_used, K, new_step, W, W, S1)
