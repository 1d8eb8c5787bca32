"""Hadamard rotation and float8 quantisation, bit for bit, in float32 and integer instructions that every device has."""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import kernel

__all__ = ["hadamard_quant_fp8_kernel"]


@triton.jit
def _rotate(x, ROWS: tl.constexpr, I: tl.constexpr, LOG_I: tl.constexpr):
    """Butterflies of stride 1, 2, 4, ... over the last axis.

    Each round pairs neighbours, and moves the bit it used from the lowest place of the index to the highest; after
    LOG_I rounds every bit is back.
    """
    for _ in tl.static_range(LOG_I):
        even, odd = tl.split(tl.reshape(x, (ROWS, I // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, I))
    return x


@triton.jit
def _float8_bits(x):
    """The bits of float32 ``x``, at most 448 in size, as float8 e4m3fn: to nearest, ties to even, NaN to NaN."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9, the last place of a float32 between 2^14 and 2^15.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    value = tl.where(size < 0.015625, small, normal)
    value = tl.where(x != x, 0x7F, value)
    return value | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@kernel
def hadamard_quant_fp8_kernel(
    x, values, scale, norm, inverse_most,
    tasks: tl.int32, blocks: tl.int32, n1: tl.int32, n2: tl.int32,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, x3: tl.int64,
    I: tl.constexpr, LOG_I: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A task is ROWS rows along axis 2 of [i0, i1, i2, I]; values are bytes."""
    lane = tl.arange(0, I)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        i0 = tl.cast(task // blocks // n1, tl.int64)
        i1 = tl.cast(task // blocks % n1, tl.int64)
        row = task % blocks * ROWS + tl.arange(0, ROWS)
        used = row < n2
        i2 = tl.minimum(row, n2 - 1).to(tl.int64)
        place = (i0 * x0 + i1 * x1 + i2 * x2)[:, None] * UNIT + (lane * (1 if UNIT > 1 else x3))[None, :]
        rows = tl.load(x + place, mask=used[:, None], other=0.0).to(tl.float32)
        rotated = (_rotate(rows, ROWS, I, LOG_I) * norm).to(tl.bfloat16).to(tl.float32)
        broken = tl.max((rotated != rotated).to(tl.int32), 1)
        most = tl.maximum(tl.max(tl.abs(rotated), 1), 1e-4) * inverse_most
        # 2^ceil(log2(most)): add almost one to the exponent, cut the fraction off. Its inverse likewise.
        bits = (most.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        finite = (bits < 0x7F800000) & (broken == 0)
        power = tl.where(finite, bits, tl.where(broken == 0, 0x7F800000, 0x7FC00000))
        inverse = tl.where(finite, 0x7F000000 - bits, tl.where(broken == 0, 0, 0x7FC00000)).to(tl.float32, bitcast=True)
        value = rotated * inverse[:, None]
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
        out = (i0 * n1 + i1) * n2 + i2
        tl.store(values + out[:, None] * I + lane[None, :], _float8_bits(value).to(tl.uint8), mask=used[:, None])
        tl.store(scale + out, power.to(tl.float32, bitcast=True), mask=used)
