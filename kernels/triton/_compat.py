"""Every difference between CUDA, ROCm, Ascend and the interpreter, so that no other kernel file needs to know.

Rules for kernels, which make one source run on all of them:

* Decorate with :func:`kernel` and annotate every integer (``tl.int32`` for counts, ``tl.int64`` for strides): their
  values never cause a recompile.
* Turn what is loaded into float32 at once, ``tl.load(...).to(tl.float32)``; round once, at the store. Arithmetic in
  bfloat16 differs between backends, and raises under the interpreter.
* Products of matrices: ``tl.dot(a, b, acc, input_precision=PRECISION)`` with ``PRECISION`` from
  :func:`glm5fn.kernels.triton.launch.dot_precision`; never plain tf32.
* A loop variable is an ``int`` under the interpreter, so widen it with ``tl.cast(i, tl.int64)``, not ``i.to(...)``.
* Transcendental functions come from here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "ASCEND", "INTERPRETED", "exp", "exp_polynomial", "fast_exp", "kernel", "log1p", "rsqrt", "sigmoid", "silu",
    "softplus",
]  # fmt: skip


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)
"""Kernels run in Python on the CPU (TRITON_INTERPRET=1 when Triton was imported)."""
ASCEND = "ascend" in getattr(triton.backends, "backends", {})
"""The installed Triton is triton-ascend."""


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with no specialisation on the values of integers: they must be annotated."""
    parameters = inspect.signature(function).parameters.values()
    integers = [p.name for p in parameters if str(p.annotation).removeprefix("tl.") in ("int32", "int64")]
    return triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=integers)


@triton.jit
def exp_polynomial(x):
    """e**x to within a unit in the last place: 0 below -87.3, infinite above 88.3.

    tl.exp is a GPU's approximate 2**x behind a multiplication. Its error is a few units, and not random: over a
    hundred thousand tokens that decay by 1e-6 each it would add up to a percent.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) - n * -2.12194440e-4  # ln 2 in two parts: the first has few bits, so n times it is exact
    q = 1.0 / 720 + r * (1.0 / 5040)
    q = 1.0 / 24 + r * (1.0 / 120 + r * q)
    q = 1.0 / 2 + r * (1.0 / 6 + r * q)
    power = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    y = (1.0 + (r + r * r * q)) * power
    return tl.where(x < -87.3, 0.0, tl.where(x > 88.3, float("inf"), y))


if INTERPRETED or ASCEND:

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log1p(x):
        """log(1 + x) for x in [0, 1]: the last term is what 1 + x loses in rounding."""
        y = 1.0 + x
        return tl.log(y) + (x - (y - 1.0)) / y

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt(x)

else:
    from triton.language.extra import libdevice

    exp = exp_polynomial

    @triton.jit
    def log1p(x):
        return libdevice.log1p(x)

    @triton.jit
    def rsqrt(x):
        return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def fast_exp(x):
    """e**x as the device has it, for weights that are averaged: relative error |x| * 6e-8 on a GPU."""
    return tl.exp(x)


@triton.jit
def silu(x):
    """x * sigmoid(x) at the cost of one exponential: -0 below -88, where 1 + exp(-x) overflows."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return tl.maximum(x, 0.0) + log1p(exp(-tl.abs(x)))


def _correct_interpreter() -> None:
    """Make the interpreter round to bfloat16 and exp to the nearest, refuse bfloat16 arithmetic, which it gets wrong,
    and patch Triton's language once per launch instead of once per call of a device function. For Triton 3.7.1."""
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def is_bf16(handle: Any) -> bool:
        return handle.dtype.scalar == tl.bfloat16

    def up(data: Any) -> Any:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def down(data: Any) -> Any:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16).reshape(data.shape)

    def widened(handle: Any) -> Any:
        return interpreter.TensorHandle(up(handle.data), tl.float32) if is_bf16(handle) else handle

    def corrected_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(cast)
        def run(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
            if dst_type.scalar == tl.bfloat16 and not is_bf16(src):
                return interpreter.TensorHandle(down(src.data.astype(np.float32)), tl.bfloat16)
            if is_bf16(src) and dst_type.scalar == tl.float32:
                return widened(src)
            return cast(self, widened(src) if dst_type.scalar != tl.bfloat16 else src, dst_type, *rest)

        return run

    def refusing_bf16(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def run(self: Any, *operands: Any) -> Any:
            if any(is_bf16(x) for x in operands if isinstance(x, interpreter.TensorHandle)):
                raise TypeError("bfloat16 arithmetic: turn the operands into float32 right after the load")
            return op(self, *operands)

        return run

    dot, start = builder.create_dot, interpreter.GridExecutor.__call__

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def start_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        standard = interpreter._patch_lang(tl.zeros.fn)  # the kernel's own globals do not lead to tl.core
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():  # a GPU does not warn of infinities either
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                start(self, *args, **kwargs)
        finally:
            standard.restore()

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    builder.cast_impl = corrected_cast(builder.cast_impl)
    builder.create_fp_to_fp = corrected_cast(builder.create_fp_to_fp)
    builder.binary_op = refusing_bf16(builder.binary_op)
    builder.unary_op = refusing_bf16(builder.unary_op)
    builder.create_dot = dot_of_floats
    builder.create_exp = lambda self, x: self.unary_op(x, lambda d: np.exp(d.astype(np.float64)).astype(d.dtype))
    # Its overflow checks only act in debug mode, and cost a fifth of the time.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter.GridExecutor.__call__ = start_patched
    interpreter.InterpretedFunction.__call__ = call_device_function


if INTERPRETED:
    _correct_interpreter()
