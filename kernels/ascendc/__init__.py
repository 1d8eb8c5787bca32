"""AscendC kernels, for Ascend NPUs.

Importing this package does not import torch-npu, so that what it says about a chip can be asked on any machine.
"""

from __future__ import annotations

from typing import Any

__all__ = ["available"]

_FAMILIES = ("A2", "A3", "A5")


def available(hardware: Any) -> list[str]:
    """Why no AscendC kernel can run on ``hardware`` (a :class:`glm5fn.Hardware`)."""
    reasons = []
    if hardware.device_type != "npu":
        reasons.append(f"AscendC needs an Ascend NPU, found {hardware}")
    elif hardware.soc not in _FAMILIES:
        reasons.append(f"the AscendC kernels are for Atlas A2, A3 and A5 (Ascend910B, 910_93, 950), found {hardware}")
    if not hardware.driver:
        reasons.append(f"no {hardware.device_type} device answers: {hardware}")
    if hardware.torch_npu_problem is not None:
        reasons.append(hardware.torch_npu_problem)
    return reasons
