"""Copies between a pool of states and rows of their own."""

from __future__ import annotations

import triton.language as tl

from glm5fn.kernels.triton._compat import kernel

__all__ = ["state_copy_kernel"]


@kernel
def state_copy_kernel(
    pool, rows, slots, keep,
    tasks: tl.int32, blocks: tl.int32, inner: tl.int32, count: tl.int64,
    pool_step: tl.int64, slots_step: tl.int64, keep_step: tl.int64,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, SCATTER: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A task is one block of one row; sizes and steps are in units. A slot outside the pool stands for none."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.cast(task // blocks, tl.int64)
        column = task % blocks * BLOCK + tl.arange(0, BLOCK)
        used = column < inner * UNIT
        slot = tl.load(slots + row * slots_step).to(tl.int64)
        valid = (slot >= 0) & (slot < count)
        if KEEP:
            valid = valid & (tl.load(keep + row * keep_step) != 0)
        in_pool = pool + tl.where(valid, slot, 0) * pool_step * UNIT + column
        in_rows = rows + row * inner * UNIT + column
        if SCATTER:
            tl.store(in_pool, tl.load(in_rows, mask=used & valid), mask=used & valid)
        else:
            tl.store(in_rows, tl.load(in_pool, mask=used & valid, other=0.0), mask=used)
