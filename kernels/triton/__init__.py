"""Triton kernels, for CUDA, ROCm and (through triton-ascend) Ascend devices.

Importing this package does not import Triton, so that what it says about a chip can be asked on any machine.
"""

from __future__ import annotations

from typing import Any

__all__ = ["available", "uninvited"]


def available(hardware: Any) -> list[str]:
    """Why no Triton kernel can run on ``hardware`` (a :class:`glm5fn.Hardware`)."""
    reasons = []
    if hardware.device_type not in ("cuda", "npu") and not (hardware.device_type == "cpu" and hardware.interpreter):
        hint = " (TRITON_INTERPRET=1 interprets the kernels on the CPU)" if hardware.device_type == "cpu" else ""
        reasons.append(f"Triton needs a CUDA, ROCm or NPU device, found {hardware}{hint}")
    if not hardware.driver:
        reasons.append(f"no {hardware.device_type} device answers: {hardware}")
    if hardware.soc == "310P":
        reasons.append(f"triton-ascend supports Atlas A2, A3 and A5 (Ascend910B, 910_93, 950), found {hardware}")
    if hardware.triton_problem is not None:
        reasons.append(hardware.triton_problem)
    return reasons


def uninvited(hardware: Any) -> list[str]:
    """Why ``auto`` leaves Triton alone on ``hardware``."""
    if hardware.device_type == "cpu" and hardware.interpreter:
        return ["the Triton interpreter is a slow test device, so it runs only where triton is named"]
    return []
