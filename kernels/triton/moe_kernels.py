"""The experts' activation."""

from __future__ import annotations

import triton.language as tl

from glm5fn.kernels.triton._compat import kernel, silu

__all__ = ["clamped_swiglu_kernel"]


@kernel
def clamped_swiglu_kernel(
    gate_up, out, limit,
    tasks: tl.int32, blocks: tl.int32, n1: tl.int32, n2: tl.int32,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, x3: tl.int64,
    I: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out = silu(min(gate, limit)) * clamp(up, -limit, limit); a task is ROWS rows along axis 2 of [i0, i1, i2, 2I] by
    COLUMNS columns. NaN stays NaN, so comparisons instead of tl.minimum, which drops it."""
    i_blocks: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        column = task % i_blocks * COLUMNS + tl.arange(0, COLUMNS)
        i0 = tl.cast(task // i_blocks // blocks // n1, tl.int64)
        i1 = tl.cast(task // i_blocks // blocks % n1, tl.int64)
        row = task // i_blocks % blocks * ROWS + tl.arange(0, ROWS)
        used = (row < n2)[:, None] & (column < I)[None, :]
        i2 = tl.minimum(row, n2 - 1).to(tl.int64)
        step = 1 if UNIT > 1 else x3
        place = gate_up + (i0 * x0 + i1 * x1 + i2 * x2)[:, None] * UNIT + (column * step)[None, :]
        gate = tl.load(place, mask=used, other=0.0).to(tl.float32)
        up = tl.load(place + I * step, mask=used, other=0.0).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out_place = ((i0 * n1 + i1) * n2 + i2)[:, None] * I + column[None, :]
        tl.store(out + out_place, (silu(gate) * up).to(out.dtype.element_ty), mask=used)
