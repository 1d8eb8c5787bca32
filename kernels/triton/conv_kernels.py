"""The causal depthwise convolution over tiles of tokens, and its state."""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import kernel, silu
from glm5fn.kernels.triton.kda_kernels import sequence_bounds

__all__ = ["conv_kernel", "conv_step_kernel"]


@triton.jit
def _sequence_of(cu_seqlens, N, steps, t):
    """The last sequence that starts at or before token t, by ``steps`` halvings; 0 if none does."""
    low, high = 0, N
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) <= t
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _taps(
    acc, x_at, x_t, state_at, s_row, weight_at, w_w, t, inside, start, near, d_used,
    W: tl.constexpr, FROM_ZEROS: tl.constexpr,
):  # fmt: skip
    """Add the taps of the tokens ``t`` that are ``inside`` a sequence which starts at token ``start``; ``near`` says
    that some of them see its history. Oldest first, as a step does it."""
    if not FROM_ZEROS:
        if near:
            for w in tl.static_range(W - 1):
                row = t - start + w
                used = (inside & (row < W - 1))[:, None] & d_used[None, :]
                row = tl.minimum(tl.maximum(row, 0), W - 2).to(tl.int64)
                tap = tl.load(state_at[None, :] + row[:, None] * s_row, mask=used, other=0.0).to(tl.float32)
                acc += tap * tl.load(weight_at + w * w_w, mask=d_used, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        source = t - (W - 1 - w)
        used = (inside & (source >= start))[:, None] & d_used[None, :]
        row = tl.maximum(source, 0).to(tl.int64)
        tap = tl.load(x_at[None, :] + row[:, None] * x_t, mask=used, other=0.0).to(tl.float32)
        acc += tap * tl.load(weight_at + w * w_w, mask=d_used, other=0.0).to(tl.float32)[None, :]
    return acc


@kernel
def conv_kernel(
    x, weight, bias, state, out, cu_seqlens,
    tasks: tl.int32, blocks: tl.int32, T: tl.int32, N: tl.int32, steps: tl.int32,
    x_b: tl.int64, x_t: tl.int64, x_d: tl.int64, w_d: tl.int64, w_w: tl.int64, bias_d: tl.int64,
    s_n: tl.int64, s_row: tl.int64, s_d: tl.int64,
    D: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, FROM_ZEROS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_T tokens by BLOCK_D channels; ``blocks`` of them cover the T axis."""
    d_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        d = task % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        d_used = d < D
        row = task // d_blocks
        b = tl.cast(row // blocks, tl.int64)
        first = row % blocks * BLOCK_T
        t = first + tl.arange(0, BLOCK_T)
        x_at = x + b * (x_b * UNIT) + d * (1 if UNIT > 1 else x_d)
        state_at = state + d * (1 if UNIT > 1 else s_d)
        weight_at = weight + d * w_d
        acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        known = t < T
        if PACKED:
            known = t < 0
            n = _sequence_of(cu_seqlens, N, steps, first)
            reached = first
            last = tl.minimum(first + BLOCK_T, T)
            while (reached < last) & (n < N):
                start, end = sequence_bounds(cu_seqlens, n, T)
                if end > reached:
                    inside = (t >= start) & (t < end)
                    at = state_at + tl.cast(n, tl.int64) * (s_n * UNIT)
                    near = first - start < W - 1
                    acc = _taps(
                        acc, x_at, x_t * UNIT, at, s_row * UNIT, weight_at, w_w, t, inside, start, near, d_used,
                        W, FROM_ZEROS,
                    )  # fmt: skip
                    known = known | inside
                    reached = end
                n += 1
        else:
            at = state_at + b * (s_n * UNIT)
            acc = _taps(
                acc, x_at, x_t * UNIT, at, s_row * UNIT, weight_at, w_w, t, known, 0, first < W - 1, d_used,
                W, FROM_ZEROS,
            )  # fmt: skip
        if BIAS:
            acc += tl.load(bias + d * bias_d, mask=d_used, other=0.0).to(tl.float32)[None, :]
        if SILU:
            acc = silu(acc)
        if PACKED:
            # Tokens before the first offset or after the last belong to nobody, and give zeros.
            acc = tl.where(known[:, None], acc, 0.0)
        place = out + (b * T + tl.minimum(t, T - 1).to(tl.int64))[:, None] * D + d[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & d_used[None, :])


@kernel
def conv_step_kernel(
    x, weight, bias, state, new, out, cu_seqlens, accepted,
    tasks: tl.int32, T: tl.int32, rows: tl.int32, kept: tl.int32,
    x_b: tl.int64, x_t: tl.int64, x_d: tl.int64, w_d: tl.int64, w_w: tl.int64, bias_d: tl.int64,
    s_n: tl.int64, s_row: tl.int64, s_d: tl.int64, n_n: tl.int64, n_row: tl.int64, n_d: tl.int64,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    FILTER: tl.constexpr, PACKED: tl.constexpr, VERIFY: tl.constexpr, FROM_ZEROS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_D channels of one sequence: with FILTER the outputs of its few tokens, then its new state.

    ``new`` may be ``state`` itself. Every row of a state is one load and one store of the same lanes, in ascending
    order, and a row comes from itself or from a later one, so nothing is overwritten before it is read.
    ``kept`` rows at the end of a state are copied: all that are not written, or none if they are there already.
    """
    d_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        d = task % d_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        d_used = d < D
        n = tl.cast(task // d_blocks, tl.int64)
        start, end = 0, T
        b = n
        if PACKED:
            start, end = sequence_bounds(cu_seqlens, n, T)
            b = n * 0
        length = end - start
        x_at = x + (b * x_b + tl.cast(start, tl.int64) * x_t) * UNIT + d * (1 if UNIT > 1 else x_d)
        state_at = state + n * (s_n * UNIT) + d * (1 if UNIT > 1 else s_d)
        new_at = new + n * (n_n * UNIT) + d * (1 if UNIT > 1 else n_d)
        history = state_at
        shift = length
        if VERIFY:
            offset = tl.minimum(tl.maximum(tl.load(accepted + n) - 1, 0), rows - (W - 1))
            history += tl.cast(offset, tl.int64) * (s_row * UNIT)
            shift = tl.minimum(length, 1)
        if FILTER:
            for t in range(T):
                acc = tl.zeros((BLOCK_D,), tl.float32)
                for w in tl.static_range(W):
                    source = t - (W - 1 - w)
                    tap = _window_row(
                        x_at, x_t * UNIT, history, s_row * UNIT, source, d_used, W, FROM_ZEROS
                    )  # fmt: skip
                    acc += tap.to(tl.float32) * tl.load(weight + d * w_d + w * w_w, mask=d_used, other=0.0).to(
                        tl.float32
                    )
                if BIAS:
                    acc += tl.load(bias + d * bias_d, mask=d_used, other=0.0).to(tl.float32)
                if SILU:
                    acc = silu(acc)
                place = out + (n * T + t) * D + d
                tl.store(place, acc.to(out.dtype.element_ty), mask=d_used)
        for row in range(W - 1 + length - shift):
            value = _window_row(
                x_at, x_t * UNIT, history, s_row * UNIT, row + shift - (W - 1), d_used, W, FROM_ZEROS
            )  # fmt: skip
            tl.store(new_at + tl.cast(row, tl.int64) * (n_row * UNIT), value, mask=d_used)
        for row in range(rows - kept, rows):
            value = tl.load(state_at + tl.cast(row, tl.int64) * (s_row * UNIT), mask=d_used)
            tl.store(new_at + tl.cast(row, tl.int64) * (n_row * UNIT), value, mask=d_used)


@triton.jit
def _window_row(
    x_at, x_t, history, s_row, source, d_used, W: tl.constexpr, FROM_ZEROS: tl.constexpr
):  # fmt: skip
    """Input number ``source`` of a sequence, bit for bit: a row of its history below 0."""
    token = tl.cast(tl.maximum(source, 0), tl.int64)
    value = tl.load(x_at + token * x_t, mask=d_used & (source >= 0), other=0.0)
    if not FROM_ZEROS:
        row = tl.cast(tl.minimum(tl.maximum(source + (W - 1), 0), W - 2), tl.int64)
        old = tl.load(history + row * s_row, mask=d_used & (source < 0), other=0.0)
        value = tl.where(source < 0, old, value)
    return value
