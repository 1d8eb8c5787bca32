"""What the Triton kernels cannot do, as reasons with the value found and the limit. Imports neither Triton nor
torch-npu, so that it can be asked on any machine."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch

__all__ = ["common", "rows"]


def common(spec: Any) -> list[str]:
    """What holds for every kernel (``spec`` is a :class:`glm5fn.OpSpec`)."""
    reasons = []
    if spec.needs_grad:
        reasons.append("the Triton kernels compute no gradients, and an argument requires them (use torch.no_grad())")
    wide = [name for name, dtype in spec.dtypes.items() if dtype == torch.float64]
    if wide:
        reasons.append(f"the Triton kernels take bfloat16, float16 and float32, got float64 for {', '.join(wide)}")
    return reasons


def rows(spec: Any, *names: str) -> list[str]:
    """What holds for kernels over the rows of tensors of one shape, of which the optional ones may be missing."""
    strides = [spec.strides[name] for name in names if name in spec.strides]
    axes = len(launch.merged_rows(spec.shapes[names[0]], strides)[0])
    if axes <= launch.MOST_AXES:
        return []
    return [f"rows must be reachable by at most {launch.MOST_AXES} strides, and these need {axes}: {strides}"]
