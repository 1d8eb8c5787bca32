"""The indexer's float8 quantisation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5fn.dims import FLOATS, check_dtype, check_shape
from glm5fn.dispatch import ContractError, dispatch, op

__all__ = ["QuantOut", "hadamard_quant_fp8"]


class QuantOut(NamedTuple):
    """Quantised rows: ``values * scale[..., None]`` approximates them in the rotated basis."""

    values: torch.Tensor
    scale: torch.Tensor


@op
def hadamard_quant_fp8(x: torch.Tensor, *, backend: str | None = None) -> QuantOut:
    """Rotate rows by the orthonormal Hadamard matrix and quantise them to float8 with one power-of-two scale per row.

    ::

        r = bfloat16(H x / sqrt(I))      H[i, j] = (-1)^popcount(i & j), as butterflies of stride 1, 2, 4, ... I/2 in
        float32 scale = 2^ceil(log2(max(max |r|, 1e-4) / 448))      values = float8_e4m3fn(r / scale), to nearest, ties
        to even

    The result is defined bit for bit. Two rows rotated alike keep their dot product, which is why keys and queries both
    go through this. A row with NaN or infinity has a scale that is not finite. Not differentiable.

    Args:
        x: ``[..., I]`` with I a power of two. The model's own path has bfloat16 rows.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``values`` float8_e4m3fn ``[..., I]`` and ``scale`` float32 ``[...]``, a power of two per row.

    Raises:
        ContractError: if the dtype is not floating, ``x`` has no axis, or I is not a power of two.
        BackendUnavailable: if no allowed backend can run it.

    Source: the e4m3 format is that of FP8 Formats for Deep Learning (arXiv:2209.05433); rotation before quantisation,
        QuaRot
    (arXiv:2404.00456).

    Example:
        >>> unit = torch.zeros(128, dtype=torch.bfloat16)
        >>> unit[0] = 1.0
        >>> values, scale = hadamard_quant_fp8(unit)
        >>> values[0].float().item(), scale.log2().item()
        (352.0, -12.0)
    """
    name = "hadamard_quant_fp8"
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        check_shape(name, "x", x, "I", {})
    check_dtype(name, "x", x, FLOATS)
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ContractError(f"{name}: the last dimension of x must be a power of two, got {size}.")
    return QuantOut(*dispatch(name, backend, x))
