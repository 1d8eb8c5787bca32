"""Norms over the last axis."""

from __future__ import annotations

import torch

from glm5fn.dims import FLOATS, check_dtype, check_same, check_shape
from glm5fn.dispatch import ContractError, dispatch, op

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: str | None = None) -> torch.Tensor:
    """Scale every row to unit root mean square, then every channel by its weight::

        y = x / sqrt(mean(x**2) + eps) * weight

    The arithmetic is float32 (float64 if given float64), with one rounding at the end.

    Args:
        x: ``[..., D]``, any float dtype.
        weight: ``[D]``, any float dtype.
        eps: added to the mean square; at least 0.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[..., D]`` in the dtype of ``x``.

    Raises:
        ContractError: if an argument has another shape, dtype or device, or ``eps`` is negative.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467), equation 4.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
        tensor([0.8485, 1.1314])
    """
    _check_rows("rms_norm", x, eps)
    _check_weight("rms_norm", x, weight)
    check_same("rms_norm", "device", x=x, weight=weight)
    return dispatch("rms_norm", backend, x, weight, eps=eps)


@op
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: str | None = None
) -> torch.Tensor:
    """RMS norm times the sigmoid of a gate: the output norm of a KDA layer, per head::

        y = x / sqrt(mean(x**2) + eps) * weight * sigmoid(gate)

    The arithmetic is float32 (float64 if given float64), with one rounding at the end.

    Args:
        x: ``[..., D]``, any float dtype.
        gate: like ``x``: the gate's logits.
        weight: ``[D]``, any float dtype.
        eps: added to the mean square; at least 0.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[..., D]`` in the dtype of ``x``.

    Raises:
        ContractError: if an argument has another shape, dtype or device, or ``eps`` is negative.

    Source: Kimi Linear (arXiv:2510.26692), section 4: the head-wise normalised and gated output.

    Example:
        >>> gated_rms_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), torch.ones(2), eps=0.0)
        tensor([0.4243, 0.5657])
    """
    _check_rows("gated_rms_norm", x, eps)
    found = list(gate.shape) if isinstance(gate, torch.Tensor) else type(gate).__name__
    if found != list(x.shape):
        raise ContractError(f"gated_rms_norm: gate must be a tensor of the shape of x, {list(x.shape)}, got {found}.")
    check_same("gated_rms_norm", "dtype", x=x, gate=gate)
    _check_weight("gated_rms_norm", x, weight)
    check_same("gated_rms_norm", "device", x=x, gate=gate, weight=weight)
    return dispatch("gated_rms_norm", backend, x, gate, weight, eps=eps)


@op
def l2_norm(x: torch.Tensor, *, eps: float = 1e-6, backend: str | None = None) -> torch.Tensor:
    """Scale every row to unit Euclidean length; a row of zeros stays zero::

        y = x / sqrt(sum(x**2) + eps)

    The arithmetic is float32 (float64 if given float64), with one rounding at the end.

    Args:
        x: ``[..., D]``, any float dtype.
        eps: added to the sum of squares, inside the root; at least 0.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[..., D]`` in the dtype of ``x``.

    Raises:
        ContractError: if ``x`` is no float tensor of at least one axis, or ``eps`` is negative.

    Source: Yang et al., Gated Delta Networks (arXiv:2412.06464), section 3.4: normalised queries and keys.

    Example:
        >>> l2_norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    _check_rows("l2_norm", x, eps)
    return dispatch("l2_norm", backend, x, eps=eps)


def _check_rows(op: str, x: torch.Tensor, eps: float) -> None:
    if not isinstance(x, torch.Tensor):
        raise ContractError(f"{op}: x must be a tensor [..., D], got {type(x).__name__}.")
    if x.dim() == 0:
        raise ContractError(f"{op}: x must have at least one dimension [..., D], got a scalar.")
    check_dtype(op, "x", x, FLOATS)
    if eps < 0:
        raise ContractError(f"{op}: eps must be at least 0, got {eps}.")


def _check_weight(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    check_shape(op, "weight", weight, "D", {"D": x.shape[-1]})
    check_dtype(op, "weight", weight, FLOATS)
