"""Hyper-connections: coefficients from the streams, their collapse to one, and their mixing."""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import exp, kernel, rsqrt, sigmoid

__all__ = ["mhc_collapse_kernel", "mhc_logits_kernel", "mhc_post_kernel"]


@triton.jit
def _product(x, f, acc, THREE: tl.constexpr, PRECISION: tl.constexpr):
    """x @ f + acc, with float32 accuracy. THREE: x is bfloat16 and f float32, which is the sum of three bfloat16."""
    if THREE:
        high = f.to(tl.bfloat16)
        rest = f - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        acc = tl.dot(x, high, acc)
        acc = tl.dot(x, middle, acc)
        acc = tl.dot(x, (rest - middle.to(tl.float32)).to(tl.bfloat16), acc)
    elif x.dtype == f.dtype and x.dtype != tl.float32:
        acc = tl.dot(x, f, acc)
    else:
        acc = tl.dot(x.to(tl.float32), f.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@kernel
def mhc_logits_kernel(
    streams, fn, partial,
    tasks: tl.int32, tokens: tl.int32, T: tl.int32,
    s_b: tl.int64, s_t: tl.int64, s_n: tl.int64, s_d: tl.int64, f_m: tl.int64, f_k: tl.int64,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
    THREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_T tokens over EACH pieces of BLOCK_D channels of a stream: M parts of logits and the part of the
    sum of squares, partial [SPLITS, M + 1, tokens]."""
    d_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    m = tl.arange(0, BLOCK_M)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        split = task % SPLITS
        token = task // SPLITS * BLOCK_T + tl.arange(0, BLOCK_T)
        used = token < tokens
        row = tl.minimum(token, tokens - 1).to(tl.int64)
        stream_at = streams + (row // T * s_b + row % T * s_t)[:, None] * UNIT
        fn_at = fn + (m * f_m)[None, :] * UNIT
        acc = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
        squares = tl.zeros((BLOCK_T,), tl.float32)
        for piece in range(split * EACH, tl.minimum(split * EACH + EACH, N * d_blocks)):
            n = tl.cast(piece // d_blocks, tl.int64)
            d = piece % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
            x_at = stream_at + n * (s_n * UNIT) + (d * (1 if UNIT > 1 else s_d))[None, :]
            x = tl.load(x_at, mask=used[:, None] & (d < D)[None, :], other=0.0)
            f_at = fn_at + ((n * D + d) * (1 if UNIT > 1 else f_k))[:, None]
            f = tl.load(f_at, mask=(d < D)[:, None] & (m < M)[None, :], other=0.0)
            acc = _product(x, f, acc, THREE, PRECISION)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        place = partial + tl.cast(split, tl.int64) * ((M + 1) * tokens)
        logit_at = place + (m.to(tl.int64) * tokens)[None, :] + row[:, None]
        tl.store(logit_at, acc, mask=used[:, None] & (m < M)[None, :])
        tl.store(place + tl.cast(M, tl.int64) * tokens + row, squares, mask=used)


@triton.jit
def _whole(partial_at, tokens, mask, M: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of the parts at ``partial_at``."""
    value = tl.load(partial_at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(partial_at + tl.cast(split * (M + 1), tl.int64) * tokens, mask=mask, other=0.0)
    return value


@kernel
def mhc_collapse_kernel(
    streams, partial, base, scale, x, post, comb, hc_eps, norm_eps,
    tasks: tl.int32, tokens: tl.int32, T: tl.int32, iters: tl.int32,
    s_b: tl.int64, s_t: tl.int64, s_n: tl.int64, s_d: tl.int64, b_m: tl.int64, c_j: tl.int64,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_T tokens: their post and comb side by side, the token axis last, then one x after the other."""
    n = tl.arange(0, BLOCK_N)
    size: tl.constexpr = N * D
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        first = task * BLOCK_T
        token = first + tl.arange(0, BLOCK_T)
        used = token < tokens
        row = tl.minimum(token, tokens - 1).to(tl.int64)
        squares = _whole(partial + tl.cast(M, tl.int64) * tokens + row, tokens, used, M, SPLITS)
        factor = rsqrt(squares / size + norm_eps)

        m = (n * N)[:, None] + n[None, :] + 2 * N
        inside = (n < N)[:, None] & (n < N)[None, :]
        place = partial + (m.to(tl.int64) * tokens)[:, :, None] + row[None, None, :]
        logits = _whole(place, tokens, inside[:, :, None] & used[None, None, :], M, SPLITS) * factor[None, None, :]
        logits = logits * tl.load(scale + 2 * c_j)
        logits += tl.load(base + m * b_m, mask=inside, other=float("-inf"))[:, :, None]
        # Rows beyond N are -inf all over; their maximum is moved, so that they give 0 and not NaN.
        most = tl.where((n < N)[:, None], tl.max(logits, 1), 0.0)
        weight = exp(logits - most[:, None, :])
        total = tl.where((n < N)[:, None], tl.sum(weight, 1), 1.0)
        mixed = tl.where(inside[:, :, None], weight / total[:, None, :] + hc_eps, 0.0)
        mixed = mixed / (tl.sum(mixed, 0) + hc_eps)[None, :, :]
        for _ in range(1, iters):
            mixed = mixed / (tl.sum(mixed, 1) + hc_eps)[:, None, :]
            mixed = mixed / (tl.sum(mixed, 0) + hc_eps)[None, :, :]
        place = comb + (row * (N * N))[None, None, :] + (m - 2 * N)[:, :, None]
        tl.store(place, mixed, mask=inside[:, :, None] & used[None, None, :])

        place = partial + ((n + N).to(tl.int64) * tokens)[:, None] + row[None, :]
        back = _whole(place, tokens, (n < N)[:, None] & used[None, :], M, SPLITS) * factor[None, :]
        back = back * tl.load(scale + c_j) + tl.load(base + (n + N) * b_m, mask=n < N, other=0.0)[:, None]
        place = post + (row * N)[None, :] + n[:, None]
        tl.store(place, 2.0 * sigmoid(back), mask=(n < N)[:, None] & used[None, :])

        for one in range(first, tl.minimum(first + BLOCK_T, tokens)):
            at = tl.cast(one, tl.int64)
            parts = _whole(partial + tl.cast(M, tl.int64) * tokens + at + n * 0, tokens, n >= 0, M, SPLITS)
            pre = _whole(partial + n.to(tl.int64) * tokens + at, tokens, n < N, M, SPLITS)
            pre = pre * rsqrt(parts / size + norm_eps) * tl.load(scale)
            pre = sigmoid(pre + tl.load(base + n * b_m, mask=n < N, other=0.0)) + hc_eps
            stream_at = streams + (at // T * s_b + at % T * s_t + n.to(tl.int64)[:, None] * s_n) * UNIT
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                value = tl.load(
                    stream_at + (d * (1 if UNIT > 1 else s_d))[None, :],
                    mask=(n < N)[:, None] & (d < D)[None, :],
                    other=0.0,
                ).to(tl.float32)
                value = tl.sum(pre[:, None] * value, 0)
                tl.store(x + at * D + d, value.to(x.dtype.element_ty), mask=d < D)


@kernel
def mhc_post_kernel(
    y, streams, post, comb, out,
    tasks: tl.int32, T: tl.int32,
    y_b: tl.int64, y_t: tl.int64, y_d: tl.int64, s_b: tl.int64, s_t: tl.int64, s_n: tl.int64, s_d: tl.int64,
    p_b: tl.int64, p_t: tl.int64, p_n: tl.int64, c_b: tl.int64, c_t: tl.int64, c_i: tl.int64, c_o: tl.int64,
    N: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_D channels of all streams of one token."""
    d_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    n = tl.arange(0, BLOCK_N)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        d = task % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        row = tl.cast(task // d_blocks, tl.int64)
        b, t = row // T, row % T
        y_at = y + (b * y_b + t * y_t) * UNIT + d * (1 if UNIT > 1 else y_d)
        new = tl.load(y_at, mask=d < D, other=0.0).to(tl.float32)
        old_at = streams + (b * s_b + t * s_t + n.to(tl.int64)[:, None] * s_n) * UNIT
        old = tl.load(
            old_at + (d * (1 if UNIT > 1 else s_d))[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0
        ).to(tl.float32)
        for j in tl.static_range(N):
            column = tl.load(comb + b * c_b + t * c_t + n * c_i + j * c_o, mask=n < N, other=0.0)
            mixed = tl.load(post + b * p_b + t * p_t + j * p_n) * new + tl.sum(column[:, None] * old, 0)
            tl.store(out + (row * N + j) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)
