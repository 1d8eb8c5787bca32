"""The glossary of dimensions and the checks that every operation makes on its arguments.

====  =====================================================================================
name  meaning
====  =====================================================================================
B     batch rows; packed sequences have B = 1 and ``cu_seqlens``
T     tokens of this call, per row
N     sequences (``N == B`` unless packed); in hyper-connections, residual streams
H     attention heads
K     key channels per KDA head
V     value channels per KDA head
D     channels of a convolution, or the model's hidden size
W     width of the causal convolution
R     rank of the MLA latent (``kv_lora_rank``)
S     capacity of a cache in tokens
I     channels of an indexer head
J     indexer heads, or selected tokens per query
P     pools of ``kpool`` tokens
E     routed experts
====  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from glm5fn.dispatch.errors import ContractError

__all__ = ["FLOATS", "check_cu_seqlens", "check_dtype", "check_range", "check_same", "check_shape", "compute_dtype"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Activation dtypes that every operation accepts (float64 is for tests and gradient checks)."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic runs in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_shape(op: str, name: str, x: torch.Tensor, shape: str, dims: dict[str, int]) -> None:
    """Check that ``x`` is a tensor of the given ``shape`` and bind names of dimensions not yet known.

    ``shape`` is a string such as ``"B T H K"`` or ``"B W-1 D"``: a name that ``dims`` already holds must match, a new
    name is bound, an integer must be met, and ``NAME±INT`` must match the bound name plus that integer.

    Raises:
        ContractError: naming the operation, the argument, its shape and the shape wanted.

    Example:
        >>> dims = {}
        >>> check_shape("kda_gate", "f", torch.zeros(1, 2, 3, 4), "B T H K", dims)
        >>> dims
        {'B': 1, 'T': 2, 'H': 3, 'K': 4}
    """
    if not isinstance(x, torch.Tensor):
        raise ContractError(f"{op}: {name} must be a tensor [{shape.replace(' ', ', ')}], got {type(x).__name__}.")
    words = shape.split()
    if x.dim() != len(words):
        raise ContractError(
            f"{op}: {name} must have {len(words)} dimensions [{', '.join(words)}], got {x.dim()}: {_show(x.shape)}."
        )
    for axis, word in enumerate(words):
        size = x.shape[axis]
        base, offset = _split(word)
        if base is None:
            wanted = offset
        elif base in dims:
            wanted = dims[base] + offset
        else:
            dims[base] = size - offset
            continue
        if size != wanted:
            known = ", ".join(f"{k}={v}" for k, v in dims.items())
            raise ContractError(
                f"{op}: {name} must be [{', '.join(words)}]"
                + (f" with {known}" if known else "")
                + f", so its dimension "
                f"{axis} ({word}) must be {wanted}, got {size}: {_show(x.shape)}."
            )


def _split(word: str) -> tuple[str | None, int]:
    if word.lstrip("-").isdigit():
        return None, int(word)
    for sign in "+-":
        base, found, offset = word.partition(sign)
        if found:
            return base, int(sign + offset)
    return word, 0


def _show(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(int(s)) for s in shape) + "]"


def check_dtype(op: str, name: str, x: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check that the dtype of ``x`` is one of ``allowed``.

    Raises:
        ContractError: naming the operation, the argument, its dtype and those allowed.
    """
    if x.dtype not in allowed:
        names = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in allowed))
        raise ContractError(f"{op}: {name} must be {names}, got {str(x.dtype).removeprefix('torch.')}.")


def check_range(op: str, name: str, x: torch.Tensor, least: int, most: int, why: str) -> None:
    """Check that the integers ``x`` lie in ``least..most``; ``why`` says where the bounds come from.

    Only on the CPU and outside captured graphs: elsewhere reading a value would stall the device.

    Raises:
        ContractError: naming the operation, the argument, a value outside, its place, the bounds and ``why``.

    Example:
        >>> check_range("mla_sparse", "indices", torch.tensor([0, -1, 7]), -1, 7, "S=8")
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() == 0:
        return
    for value, place in ((x.amin(), x.argmin()), (x.amax(), x.argmax())):
        found: Any = value.tolist()
        if not least <= found <= most:
            index = [i.tolist() for i in torch.unravel_index(place, x.shape)]
            raise ContractError(f"{op}: {name} must lie in {least}..{most} ({why}), got {found} at {index}.")


def check_same(op: str, what: str, **tensors: torch.Tensor | None) -> None:
    """Check that all given tensors (``None`` is skipped) share one ``what``: ``"dtype"`` or ``"device"``.

    Raises:
        ContractError: naming the operation, the first two arguments that differ and both values.
    """
    first: tuple[str, object] | None = None
    for name, x in tensors.items():
        if x is None:
            continue
        value = getattr(x, what)
        if first is None:
            first = (name, value)
        elif value != first[1]:
            a, b = (str(v).removeprefix("torch.") for v in (first[1], value))
            raise ContractError(f"{op}: {first[0]} and {name} must have the same {what}, got {a} and {b}.")


def check_cu_seqlens(op: str, cu_seqlens: torch.Tensor, batch: int, tokens: int) -> int:
    """Check packed offsets ``cu_seqlens`` int32 [N+1] against ``[1, tokens, ...]`` inputs; return N.

    On the CPU the values are checked too (they start at 0, never fall, end at ``tokens``); on an accelerator reading
    them would stall it, so only the shape and dtype are.

    Raises:
        ContractError: naming the operation and what is wrong with the offsets.
    """
    dims: dict[str, int] = {}
    check_shape(op, "cu_seqlens", cu_seqlens, "N+1", dims)
    check_dtype(op, "cu_seqlens", cu_seqlens, (torch.int32,))
    if batch != 1:
        raise ContractError(f"{op}: cu_seqlens packs all sequences into one row, so B must be 1, got {batch}.")
    if dims["N"] < 0:
        raise ContractError(f"{op}: cu_seqlens must hold N+1 offsets, got an empty tensor.")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != tokens or any(a > b for a, b in pairwise(offsets)):
            raise ContractError(
                f"{op}: cu_seqlens must start at 0, never fall and end at T={tokens}, got {offsets[:8]}"
                + (f"...{offsets[-1]}." if len(offsets) > 8 else ".")
            )
    return dims["N"]
