"""Launchers of Kimi delta attention. How the chunked form is cut into kernels is in ``kda_chunk``."""

from __future__ import annotations

from typing import Any

import torch

from glm5fn.kernels.triton import launch, limits
from glm5fn.kernels.triton.kda_chunk import run_chunks

__all__ = ["kda_chunk", "kda_gate", "kda_recurrent", "kda_verify", "unsupported"]

_MOST_CHANNELS = 256
_SHORT = 16
"""Tokens up to which the recurrence is run token by token in any case: a chunk of them is mostly padding."""


def unsupported(spec: Any) -> list[str]:
    reasons = limits.common(spec)
    if spec.op == "kda_gate":
        sizes = {"K": spec.shapes["f"][3]}
    else:
        sizes = {"K": spec.shapes["q"][3], "V": spec.shapes["v"][3]}
    for name, size in sizes.items():
        if not 1 <= size <= _MOST_CHANNELS:
            reasons.append(f"{name} must be 1 to {_MOST_CHANNELS}, got {size}")
    return reasons


def kda_gate(
    f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, lower_bound: float | None = -5.0
) -> torch.Tensor:
    out = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    _gate(f, A_log, dt_bias, out, lower_bound)
    return out


@launch.opaque("(Tensor f, Tensor A_log, Tensor dt_bias, Tensor(a!) out, float? lower_bound) -> ()")
def _gate(
    f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, out: torch.Tensor, lower_bound: float | None
) -> None:
    from glm5fn.kernels.triton.kda_kernels import kda_gate_kernel

    B, T, H, K = f.shape
    unit = launch.UNIT if launch.is_aligned(f, dt_bias) else 1
    block_k = launch.power_of_two(K)
    block_h = max(1, 2048 // block_k)
    tasks = B * T * -(-H // block_h)
    launch.run(
        kda_gate_kernel, f.device, tasks,
        f, A_log, dt_bias, out, 0.0 if lower_bound is None else float(lower_bound), tasks, T, H,
        *launch.outer(f, unit, 3), f.stride(3), A_log.stride(0), *launch.outer(dt_bias, unit, 1), dt_bias.stride(1),
        K=K, BLOCK_H=block_h, BLOCK_K=block_k, UNIT=unit, BOUNDED=lower_bound is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.shape[1] <= _SHORT:
        return kda_recurrent(q, k, v, g, beta, state, scale=scale, cu_seqlens=cu_seqlens, donate=donate)
    out, new = _results(v, g, state, cu_seqlens, donate)
    run_chunks(q, k, v, g, beta, state, new, out, cu_seqlens, q.shape[3] ** -0.5 if scale is None else scale)
    return out, new


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, new = _results(v, g, state, cu_seqlens, donate)
    slot = None if state is None else state.unsqueeze(1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    _recurrent(q, k, v, g, beta, slot, new.unsqueeze(1), out, cu_seqlens, None, scale)
    return out, new


def _results(
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    donate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the output and for the new state."""
    (B, _, H, V), K = v.shape, g.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    new = state if donate and state is not None else g.new_empty(N, H, V, K)
    # Tokens before the first or after the last offset belong to nobody; on a device nothing rules them out.
    return v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape), new


def kda_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    scale: float | None = None,
    donate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    T = q.shape[1]
    out = v.new_empty(v.shape)
    new = states
    if not donate:
        new = states.new_empty(states.shape)
        new[:, T:].copy_(states[:, T:])
    _recurrent(
        q, k, v, g, beta, states, new, out, None, num_accepted, q.shape[3] ** -0.5 if scale is None else scale
    )  # fmt: skip
    return out, new


def plan(chip: launch.Chip, K: int, V: int) -> dict[str, int]:
    """Rows of the state per task: 16 KiB of it on a GPU; on an NPU an eighth of the buffer, for it is there more than
    once while it is worked on."""
    block_k = launch.power_of_two(K)
    budget = chip.on_chip // 8 if chip.kind in ("ascend", "interpreter") else 16 << 10
    rows = min(launch.power_of_two(V), max(1, budget // (4 * block_k)))
    rows = 1 << (rows.bit_length() - 1)
    return {"BLOCK_K": block_k, "BLOCK_V": rows, "num_warps": 4, "num_stages": 1}


@launch.opaque(
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? states, Tensor(a!) new, Tensor(b!) out, "
    "Tensor? cu_seqlens, Tensor? num_accepted, float scale) -> ()"
)
def _recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor | None,
    new: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
    scale: float,
) -> None:
    """``states`` and ``new`` are [N, slots, H, V, K]; with ``num_accepted`` the state after every token goes into its
    slot, otherwise the last one into slot 0."""
    from glm5fn.kernels.triton.kda_kernels import kda_recurrent_kernel

    T, H, K = q.shape[1:]
    N, slots, _, V, _ = new.shape
    unit = launch.UNIT if launch.is_aligned(q, k, v, g, states, new) else 1
    tile = plan(launch.chip_of(q.device), K, V)
    tasks = N * H * -(-V // tile["BLOCK_V"])
    per_token = [s for x in (q, k, v, g) for s in (*launch.outer(x, unit, 3), x.stride(3))]
    per_state = [s for x in (states, new) for s in (*launch.outer(x, unit, 4), 1 if x is None else x.stride(4))]
    launch.run(
        kda_recurrent_kernel, q.device, tasks,
        q, k, v, g, beta, states, new, out, cu_seqlens, num_accepted, float(scale), tasks, T, H, slots,
        *per_token, *launch.outer(beta, 1, 3), *per_state,
        K=K, V=V, UNIT=unit, PACKED=cu_seqlens is not None, VERIFY=num_accepted is not None,
        FROM_ZEROS=states is None, **tile,
    )  # fmt: skip
