"""States of a serving engine: in the pages of a pool that holds more than them, addressed by slot.

The operations take and return states of their own, one per sequence. An engine gathers them before a step and scatters
them after it, without reading a slot on the host.
"""

from __future__ import annotations

import torch

from glm5fn.kernels.triton import launch

__all__ = ["gather_states", "scatter_states"]

_BLOCK = 4096


def gather_states(pool: torch.Tensor, slots: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Copy ``pool[slots[i]]`` to row i of a new tensor; a row is zeros where the slot is outside the pool (engines mark
    unused ones by -1) or ``keep`` is false (a sequence that starts anew in a slot that was used before).

    Args:
        pool: ``[P, ...]``, dense but for the first axis.
        slots: integers ``[N]``. Slots may repeat.
        keep: booleans or integers ``[N]``.

    Raises:
        ValueError: if an argument has another shape or layout than said above.
    """
    _check(pool, slots, keep)
    rows = pool.new_empty(len(slots), *pool.shape[1:])
    _copy(pool, rows, slots, keep, rows, False)
    return rows


def scatter_states(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy row i of ``rows`` to ``pool[slots[i]]``, in place; a slot outside the pool is skipped, and what lies between
    the pages is not touched. Where slots repeat, one of their rows stays.

    Args:
        pool: ``[P, ...]``, dense but for the first axis.
        slots: integers ``[N]``.
        rows: ``[N, ...]``.

    Raises:
        ValueError: if an argument has another shape, dtype or layout than said above.
    """
    _check(pool, slots, None)
    if rows.shape != (len(slots), *pool.shape[1:]) or rows.dtype != pool.dtype:
        raise ValueError(
            f"scatter_states: rows must be {[len(slots), *pool.shape[1:]]} {pool.dtype}, got {list(rows.shape)} "
            f"{rows.dtype}."
        )
    _copy(pool, rows.contiguous(), slots, None, pool, True)


def _check(pool: torch.Tensor, slots: torch.Tensor, keep: torch.Tensor | None) -> None:
    if pool.dim() < 2 or not pool[:1].is_contiguous():
        raise ValueError(
            f"pool must be dense but for its first axis, got shape {list(pool.shape)} with strides "
            f"{list(pool.stride())}."
        )
    for name, x in (("slots", slots), ("keep", keep)):
        if x is not None and (x.dim() != 1 or len(x) != len(slots) or x.is_floating_point()):
            raise ValueError(f"{name} must be integers [N] with N={len(slots)}, got {x.dtype} {list(x.shape)}.")


@launch.opaque("(Tensor pool, Tensor rows, Tensor slots, Tensor? keep, Tensor(a!) written, bool scatter) -> ()")
def _copy(
    pool: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    keep: torch.Tensor | None,
    written: torch.Tensor,
    scatter: bool,
) -> None:
    """``written`` is the one of ``pool`` and ``rows`` that is written."""
    from glm5fn.kernels.triton.state_kernels import state_copy_kernel

    if rows.numel() == 0:
        return
    if pool.numel() == 0:
        if not scatter:
            rows.zero_()
        return
    inner = pool[0].numel()
    unit = launch.UNIT if inner % launch.UNIT == 0 and launch.is_aligned(pool[:, None].flatten(1), rows) else 1
    blocks = -(-inner // _BLOCK)
    tasks = len(rows) * blocks
    launch.run(
        state_copy_kernel, pool.device, tasks,
        pool, rows, slots, keep if keep is None else keep.view(torch.int8) if keep.dtype == torch.bool else keep,
        tasks, blocks, inner // unit, len(pool), pool.stride(0) // unit, slots.stride(0),
        0 if keep is None else keep.stride(0),
        BLOCK=min(_BLOCK, launch.power_of_two(inner)), UNIT=unit, SCATTER=scatter, KEEP=keep is not None, num_warps=4,
        num_stages=1,
    )  # fmt: skip
