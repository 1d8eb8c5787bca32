"""Measure how much memory a call needs beyond what was there before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["peak_extra_mib"]

_PROC = Path("/proc/self")
_M_MMAP_THRESHOLD = -3  # glibc's mallopt


def peak_extra_mib(function: Callable[[], Any]) -> float:
    """Return the peak resident memory during ``function()`` beyond that before it, its result included, in MiB.

    Needs Linux, whose kernel keeps the peak and lets it be reset. Memory that the allocator already holds is not
    counted, so run nothing large beforehand in the same process, and nothing beside it.

    Raises:
        NotImplementedError: where the system does not keep that number.

    Example:
        >>> import torch
        >>> peak_extra_mib(lambda: torch.ones(64 << 20, dtype=torch.uint8).sum()) > 60
        True
    """
    # A fixed threshold gives every large block its own mapping, returned when freed. By default glibc raises it up to
    # 32 MiB and keeps what was freed, and how much it keeps differs from run to run.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    gc.collect()
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError as error:
        raise NotImplementedError(f"peak memory needs a writable {_PROC / 'clear_refs'} (Linux): {error}") from error
    before = _status("VmRSS")
    result = function()
    peak = _status("VmHWM")
    del result
    return (peak - before) / 1024


def _status(field: str) -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))
