"""Norms over the last axis, one kernel for all."""

from __future__ import annotations

import triton
import triton.language as tl

from glm5fn.kernels.triton._compat import kernel, rsqrt, sigmoid

__all__ = ["norm_kernel"]


@triton.jit
def _tile(base, rows, row_used, columns, stride, D: tl.constexpr, UNIT: tl.constexpr):
    """Load [rows, columns] as float32; what is beyond the last row or column is 0."""
    step = 1 if UNIT > 1 else stride
    pointers = base + rows[:, None] + (columns * step)[None, :]
    return tl.load(pointers, mask=row_used[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)


@kernel
def norm_kernel(
    x, gate, weight, out, eps,
    tasks: tl.int32, blocks: tl.int32, n1: tl.int32, n2: tl.int32,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, x3: tl.int64,
    g0: tl.int64, g1: tl.int64, g2: tl.int64, g3: tl.int64,
    w0: tl.int64,
    D: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[i0, i1, i2] = norm(x[i0, i1, i2]) * weight * sigmoid(gate[i0, i1, i2]); a task is ROWS rows along i2."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        i0 = tl.cast(task // blocks // n1, tl.int64)
        i1 = tl.cast(task // blocks % n1, tl.int64)
        row = task % blocks * ROWS + tl.arange(0, ROWS)
        used = row < n2
        i2 = tl.minimum(row, n2 - 1).to(tl.int64)
        x_base, x_rows = x + (i0 * x0 + i1 * x1) * UNIT, i2 * (x2 * UNIT)
        out_base = out + ((i0 * n1 + i1) * n2) * D
        columns = tl.arange(0, COLUMNS)
        if COLUMNS >= D:
            squares = tl.zeros((ROWS,), tl.float32)
            values = _tile(x_base, x_rows, used, columns, x3, D, UNIT)
            squares = tl.sum(values * values, 1)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, D, COLUMNS):
                part = _tile(x_base, x_rows, used, start + columns, x3, D, UNIT)
                total += part * part
            squares = tl.sum(total, 1)
        if MEAN:
            squares = squares / D
        factor = rsqrt(squares + eps)[:, None]
        for start in tl.static_range(0, D, COLUMNS):
            column = start + columns
            y = (values if COLUMNS >= D else _tile(x_base, x_rows, used, column, x3, D, UNIT)) * factor
            if WEIGHTED:
                w_step = 1 if UNIT > 1 else w0
                y = y * tl.load(weight + column * w_step, mask=column < D, other=0.0).to(tl.float32)[None, :]
            if GATED:
                logits = _tile(gate + (i0 * g0 + i1 * g1) * UNIT, i2 * (g2 * UNIT), used, column, g3, D, UNIT)
                y = y * sigmoid(logits)
            place = out_base + i2[:, None] * D + column[None, :]
            tl.store(place, y.to(out.dtype.element_ty), mask=used[:, None] & (column < D)[None, :])
