"""Causal depthwise convolution in plain torch, with its state.

Packed sequences need no host read: every tap gathers either an earlier token of the same sequence or a row of its
history.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["causal_conv1d", "causal_conv1d_update"]


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
    T, rows = x.shape[1], weight.shape[1] - 1
    if state is None:
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state, donate = x.new_zeros(N, rows, x.shape[2]), False
    history = state[:, :rows]
    if cu_seqlens is None:
        window = torch.cat([history, x], dim=1)
        taps, last = [window[:, w : w + T] for w in range(rows + 1)], window[:, T:]
    else:
        taps, last = _packed_taps(x, history, cu_seqlens)
    return _filter(taps, weight, bias, activation, x.dtype), _put_rows(state, last, donate)


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
    T, rows = x.shape[1], weight.shape[1] - 1
    if num_accepted is None or T == 0:
        return causal_conv1d(x, weight, bias, state, activation=activation, donate=donate)
    offset = (num_accepted.long() - 1).clamp(0, state.shape[1] - rows)
    index = offset[:, None] + torch.arange(rows, device=x.device)
    window = torch.cat([_gather_rows(state, index), x], dim=1)
    taps = [window[:, w : w + T] for w in range(rows + 1)]
    # The oldest row of the history is dropped whatever will be accepted: the next step starts at row num_accepted - 1
    # of the rest.
    return _filter(taps, weight, bias, activation, x.dtype), _put_rows(state, window[:, 1:], donate)


def _filter(
    taps: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight.to(wide)
    out = taps[0].to(wide) * weight[:, 0]
    for w, tap in enumerate(taps[1:], start=1):
        out = torch.addcmul(out, tap.to(wide), weight[:, w])
    if bias is not None:
        out = out + bias.to(wide)
    return (F.silu(out) if activation == "silu" else out).to(dtype)


def _packed_taps(
    x: torch.Tensor, history: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what each tap sees, oldest first ([1, T, D] each), and the last W-1 inputs of every sequence [N, W-1,
    D]."""
    T, (N, rows, D) = x.shape[1], history.shape
    start = cu_seqlens.long()
    lengths = start.diff()
    # One row before the tokens and one before the history keep the gathers legal when either is empty; `where` never
    # picks them.
    tokens = F.pad(x[0], (0, 0, 1, 0))
    flat = F.pad(history.reshape(N * rows, D), (0, 0, 1, 0))

    def pick(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Inputs at ``position`` of ``sequence``, where -1 is the newest row of its history."""
        inside = position >= 0
        token = torch.where(inside, start[sequence] + position + 1, 0)
        row = torch.where(inside, 0, sequence * rows + rows + position + 1)
        return torch.where(inside[..., None], tokens[token], flat[row])

    time = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(start[1:], time, right=True) if N else time
    position = time - start[sequence]
    taps = [pick(sequence, position - lag)[None] for lag in range(rows, -1, -1)]
    number = torch.arange(N, device=x.device)[:, None].expand(N, rows)
    last = pick(number, lengths[:, None] - rows + torch.arange(rows, device=x.device))
    return taps, last


def _gather_rows(state: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return state.gather(1, index[..., None].expand(*index.shape, state.shape[2]))


def _put_rows(state: torch.Tensor, rows: torch.Tensor, donate: bool) -> torch.Tensor:
    """Replace the first rows of ``state``; in place if it was donated."""
    if donate:
        state[:, : rows.shape[1]].copy_(rows)
        return state
    return torch.cat([rows, state[:, rows.shape[1] :]], dim=1)
