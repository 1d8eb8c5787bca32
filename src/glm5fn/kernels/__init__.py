"""Which function runs which operation on which backend. This table is data: nothing is imported here.

A kernel's target is ``"module:function"``. The function has the operation's signature without ``backend``. Its limits
are a second function, ``unsupported(spec) -> list[str]``, named the same way; it stands beside the kernel in a module
that imports neither Triton nor torch-npu, so that the limits can be asked on any machine. A kernel without limits
runs whatever passes the argument checks. An operation with no entry for a backend has no kernel there.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BACKENDS", "TABLE", "Backend", "Kernel"]


class Kernel(NamedTuple):
    """Where a kernel is, and where its limits are."""

    target: str
    limits: str | None = None


class Backend(NamedTuple):
    """A family of kernels. ``auto`` tries higher priorities first."""

    title: str
    priority: int
    available: str | None = None
    """``"module:function"`` of ``available(hardware) -> list[str]``: why none of its kernels can run there."""
    uninvited: str | None = None
    """``"module:function"`` of ``uninvited(hardware) -> list[str]``: why ``auto`` leaves it alone although it runs."""


BACKENDS: dict[str, Backend] = {
    "ascendc": Backend("AscendC", 20, "glm5fn.kernels.ascendc:available"),
    "triton": Backend("Triton", 10, "glm5fn.kernels.triton:available", "glm5fn.kernels.triton:uninvited"),
    "reference": Backend("reference", 0),
}
"""Known backends, in the order in which ``auto`` tries them."""

_REFERENCE = {
    "norm": ("rms_norm", "gated_rms_norm", "l2_norm"),
    "conv": ("causal_conv1d", "causal_conv1d_update"),
    "kda": ("kda_gate", "kda_chunk", "kda_recurrent", "kda_verify"),
    "mla": ("mla_prefill", "mla_decode", "mla_sparse"),
    "indexer": ("kpool_compress", "kpool_select"),
    "quant": ("hadamard_quant_fp8",),
    "mhc": ("mhc_pre", "mhc_pre_norm", "mhc_post"),
    "moe": ("moe_route", "moe_experts", "clamped_swiglu"),
}

_TRITON = {
    "norm": ("rms_norm", "gated_rms_norm", "l2_norm"),
    "conv": ("causal_conv1d", "causal_conv1d_update"),
    "kda": ("kda_gate", "kda_chunk", "kda_recurrent", "kda_verify"),
    "mla": ("mla_decode", "mla_sparse"),
    "indexer": ("kpool_compress", "kpool_select"),
    "quant": ("hadamard_quant_fp8",),
    "mhc": ("mhc_pre", "mhc_pre_norm", "mhc_post"),
    "moe": ("clamped_swiglu",),
}

TABLE: dict[str, dict[str, Kernel]] = {
    op: {"reference": Kernel(f"glm5fn.kernels.reference.{file}:{op}")} for file, ops in _REFERENCE.items() for op in ops
}
"""``TABLE[op][backend]`` is the kernel of that operation on that backend."""

for _file, _ops in _TRITON.items():
    for _op in _ops:
        _module = f"glm5fn.kernels.triton.{_file}"
        TABLE[_op]["triton"] = Kernel(f"{_module}:{_op}", f"{_module}:unsupported")
