"""Launchers of the causal convolution."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits

__all__ = ["causal_conv1d", "causal_conv1d_update", "unsupported"]

_MOST_TAPS = 8


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec)
    W = spec.shapes["weight"][1]
    if W > _MOST_TAPS:
        reasons.append(f"W must be at most {_MOST_TAPS} taps, which are unrolled, got {W}")
    return reasons


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = x.new_empty(x.shape)
    new = _new_state(x, weight, state, N, donate)
    _filter(x, weight, bias, state, out, cu_seqlens, activation == "silu")
    # A second start, because tiles all over the sequence read the old state, and it may be in the new one's place.
    _step(x, weight, None, state, new, None, cu_seqlens, None, False, donate)
    return out, new


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    *,
    num_accepted: torch.Tensor | None = None,
    activation: str | None = "silu",
    donate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.new_empty(x.shape)
    new = _new_state(x, weight, state, x.shape[0], donate)
    _step(x, weight, bias, state, new, out, None, num_accepted, activation == "silu", donate)
    return out, new


def _new_state(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, N: int, donate: bool) -> torch.Tensor:
    if state is None:
        return x.new_empty(N, weight.shape[1] - 1, x.shape[2])
    return state if donate else x.new_empty(state.shape)


def plan(chip: launch.Chip, D: int) -> dict[str, int]:
    """Tokens by channels of a tile. On an NPU a tile of float32, with what it is made from, is there about ten times
    over."""
    block_d = min(launch.power_of_two(D), 256 if chip.kind in ("ascend", "interpreter") else 128)
    most = chip.on_chip // 48 if chip.kind in ("ascend", "interpreter") else 4096
    block_t = max(1, min(32, most // block_d))
    return {"BLOCK_T": 1 << (block_t.bit_length() - 1), "BLOCK_D": block_d, "num_warps": 4, "num_stages": 1}


@launch.opaque(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor(a!) out, Tensor? cu_seqlens, bool silu) -> ()"
)
def _filter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> None:
    from glm5fn.kernels.triton.conv_kernels import conv_kernel

    (B, T, D), W = x.shape, weight.shape[1]
    if out.numel() == 0:
        return
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    old = x if state is None or W == 1 else state
    unit = launch.UNIT if launch.is_aligned(x, old) else 1
    tile = plan(launch.chip_of(x.device), D)
    blocks = -(-T // tile["BLOCK_T"])
    tasks = B * blocks * -(-D // tile["BLOCK_D"])
    launch.run(
        conv_kernel, x.device, tasks,
        x, weight, bias, old, out, cu_seqlens, tasks, blocks, T, N, N.bit_length(),
        *launch.outer(x, unit, 2), x.stride(2), *weight.stride(), 0 if bias is None else bias.stride(0),
        *launch.outer(old, unit, 2), old.stride(2),
        D=D, W=W, UNIT=unit, PACKED=cu_seqlens is not None, FROM_ZEROS=old is x, BIAS=bias is not None,
        SILU=silu, **tile,
    )  # fmt: skip


@launch.opaque(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor(a!) new, Tensor(b!)? out, Tensor? cu_seqlens, "
    "Tensor? num_accepted, bool silu, bool donate) -> ()"
)
def _step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    new: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
    silu: bool,
    donate: bool,
) -> None:
    """Write the new state and, where there is an ``out``, the outputs."""
    from glm5fn.kernels.triton.conv_kernels import conv_step_kernel

    T, W = x.shape[1], weight.shape[1]
    N, rows, D = new.shape
    written = W - 1 if num_accepted is None or T == 0 else W - 2 + T
    old = x if state is None else state
    unit = launch.UNIT if launch.is_aligned(x, old, new) else 1
    block_d = min(launch.power_of_two(D), 512)
    tasks = N * -(-D // block_d)
    launch.run(
        conv_step_kernel, x.device, tasks,
        x, weight, bias, old, new, out, cu_seqlens, num_accepted, tasks, T, rows, 0 if donate else rows - written,
        *launch.outer(x, unit, 2), x.stride(2), *weight.stride(), 0 if bias is None else bias.stride(0),
        *launch.outer(old, unit, 2), old.stride(2),
        *launch.outer(new, unit, 2), new.stride(2),
        D=D, W=W, BLOCK_D=block_d, UNIT=unit, FILTER=out is not None, PACKED=cu_seqlens is not None,
        VERIFY=num_accepted is not None, FROM_ZEROS=state is None or W == 1, BIAS=bias is not None, SILU=silu,
        num_warps=2, num_stages=1,
    )  # fmt: skip
