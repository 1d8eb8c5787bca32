"""Kimi delta attention token by token, and its gate."""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import exp, kernel, sigmoid, softplus

__all__ = ["kda_gate_kernel", "kda_recurrent_kernel", "sequence_bounds"]


@triton.jit
def sequence_bounds(cu_seqlens, n, T):
    """First token of sequence ``n`` and the one after its last, whatever the offsets say: inside 0..T, in order."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), start), T)
    return start, end


@kernel
def kda_recurrent_kernel(
    q, k, v, g, beta, state, new, out, cu_seqlens, accepted, scale,
    tasks: tl.int32, T: tl.int32, H: tl.int32, slots: tl.int32,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, q_k: tl.int64,
    k_b: tl.int64, k_t: tl.int64, k_h: tl.int64, k_k: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, v_v: tl.int64,
    g_b: tl.int64, g_t: tl.int64, g_h: tl.int64, g_k: tl.int64,
    beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    s_n: tl.int64, s_slot: tl.int64, s_h: tl.int64, s_v: tl.int64, s_k: tl.int64,
    n_n: tl.int64, n_slot: tl.int64, n_h: tl.int64, n_v: tl.int64, n_k: tl.int64,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, VERIFY: tl.constexpr, FROM_ZEROS: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_V rows of the state of one head of one sequence: S [BLOCK_V, K] stays on the chip."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    key = tl.arange(0, BLOCK_K)
    key_used = key < K
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        value = task % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        value_used = value < V
        both_used = value_used[:, None] & key_used[None, :]
        h = tl.cast(task // blocks % H, tl.int64)
        n = tl.cast(task // blocks // H, tl.int64)
        b = n
        start, end = 0, T
        if PACKED:
            b = n * 0
            start, end = sequence_bounds(cu_seqlens, n, T)
        q_at = q + (b * q_b + h * q_h) * UNIT + key * (1 if UNIT > 1 else q_k)
        k_at = k + (b * k_b + h * k_h) * UNIT + key * (1 if UNIT > 1 else k_k)
        g_at = g + (b * g_b + h * g_h) * UNIT + key * (1 if UNIT > 1 else g_k)
        v_at = v + (b * v_b + h * v_h) * UNIT + value * (1 if UNIT > 1 else v_v)
        beta_at = beta + b * beta_b + h * beta_h
        out_at = out + (b * T * H + h) * V + value
        row = value[:, None].to(tl.int64)
        new_at = new + (n * n_n + h * n_h + row * n_v) * UNIT + key[None, :] * (1 if UNIT > 1 else n_k)
        if FROM_ZEROS:
            S = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
        else:
            slot = n * 0
            if VERIFY:
                slot = tl.minimum(tl.maximum(tl.load(accepted + n) - 1, 0), slots - 1).to(tl.int64)
            state_at = state + (n * s_n + slot * s_slot + h * s_h + row * s_v) * UNIT
            S = tl.load(state_at + key[None, :] * (1 if UNIT > 1 else s_k), mask=both_used, other=0.0)
        for t in range(start, end):
            time = tl.cast(t, tl.int64)
            k_t_ = tl.load(k_at + time * (k_t * UNIT), mask=key_used, other=0.0).to(tl.float32)
            q_t_ = tl.load(q_at + time * (q_t * UNIT), mask=key_used, other=0.0).to(tl.float32) * scale
            decay = exp(tl.load(g_at + time * (g_t * UNIT), mask=key_used, other=0.0))
            v_t_ = tl.load(v_at + time * (v_t * UNIT), mask=value_used, other=0.0).to(tl.float32)
            S = S * decay[None, :]
            update = (v_t_ - tl.sum(S * k_t_[None, :], 1)) * tl.load(beta_at + time * beta_t)
            S = S + update[:, None] * k_t_[None, :]
            o = tl.sum(S * q_t_[None, :], 1)
            tl.store(out_at + time * H * V, o.to(out.dtype.element_ty), mask=value_used)
            if VERIFY:
                tl.store(new_at + time * (n_slot * UNIT), S, mask=both_used)
        if not VERIFY:
            tl.store(new_at, S, mask=both_used)


@kernel
def kda_gate_kernel(
    f, A_log, dt_bias, out, lower_bound,
    tasks: tl.int32, T: tl.int32, H: tl.int32,
    f_b: tl.int64, f_t: tl.int64, f_h: tl.int64, f_k: tl.int64, a_h: tl.int64, dt_h: tl.int64, dt_k: tl.int64,
    K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """A task is BLOCK_H heads of one token."""
    blocks = (H + BLOCK_H - 1) // BLOCK_H
    key = tl.arange(0, BLOCK_K)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        used = head < H
        both_used = used[:, None] & (key < K)[None, :]
        h = tl.minimum(head, H - 1).to(tl.int64)
        row = task // blocks
        t, b = tl.cast(row % T, tl.int64), tl.cast(row // T, tl.int64)
        f_at = f + (b * f_b + t * f_t + h[:, None] * f_h) * UNIT + key[None, :] * (1 if UNIT > 1 else f_k)
        dt_at = dt_bias + h[:, None] * dt_h * UNIT + key[None, :] * (1 if UNIT > 1 else dt_k)
        z = tl.load(f_at, mask=both_used, other=0.0).to(tl.float32)
        z += tl.load(dt_at, mask=both_used, other=0.0).to(tl.float32)
        rate = exp(tl.load(A_log + h * a_h, mask=used, other=0.0).to(tl.float32))[:, None]
        if BOUNDED:
            value = lower_bound * sigmoid(rate * z)
        else:
            value = -rate * softplus(z)
        place = out + (tl.cast(row, tl.int64) * H + h[:, None]) * K + key[None, :]
        tl.store(place, value, mask=both_used)
