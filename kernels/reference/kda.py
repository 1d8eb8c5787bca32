"""Kimi delta attention in plain torch: the gate, and the recurrence token by token. The chunked form is in
``kda_chunk``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm5fn.kernels.reference.kda_chunk import kda_chunk
from glm5fn.kernels.reference.kda_state import begin, finish, is_recording
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["kda_chunk", "kda_gate", "kda_recurrent", "kda_verify"]


def kda_gate(
    f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, lower_bound: float | None = -5.0
) -> torch.Tensor:
    wide = torch.promote_types(f.dtype, torch.float32)
    z = f.to(wide) + dt_bias.to(wide)
    rate = A_log.to(wide).exp()[:, None]
    return -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


@without_autocast
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
    recording = is_recording(q, k, v, g, beta, state)
    S = begin(state, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, k, v, donate)
    steps = _steps(q, k, v, g, beta, scale)
    out = []
    if cu_seqlens is None:
        for step in steps:
            S, o = _step(S, *step, in_place=not recording)
            out.append(o)
    else:
        time = torch.arange(q.shape[1], device=q.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), time, right=True)
        for t, step in enumerate(steps):
            heads = sequence[t] * q.shape[2] + torch.arange(q.shape[2], device=q.device)
            one, o = _step(S.index_select(0, heads), *step, in_place=not recording)
            S = S.index_copy(0, heads, one) if recording else S.index_copy_(0, heads, one)
            out.append(o)
    return _joined(out, v), finish(S, state, q.shape[2], donate)


@without_autocast
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
    (N, slots, H, V, K), T = states.shape, q.shape[1]
    slot = (num_accepted.long() - 1).clamp(0, slots - 1)
    S = states[torch.arange(N, device=q.device), slot].reshape(N * H, V, K)
    steps = _steps(q, k, v, g, beta, scale)
    out, after = [], []
    for t, step in enumerate(steps):
        # A new tensor per token: the state of the token before stays in its slot.
        S, o = _step(S, *step, in_place=False)
        out.append(o)
        if donate:
            states[:, t].copy_(S.view(N, H, V, K))
        else:
            after.append(S.view(N, 1, H, V, K))
    if not donate:
        states = torch.cat([*after, states[:, T:]], dim=1)
    return _joined(out, v), states


def _steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None
) -> list[tuple[torch.Tensor, ...]]:
    """Return, per token, (q scaled [BH, K, 1], k [BH, 1, K], v [BH, V, 1], decay [BH, 1, K], beta [BH, 1, 1])."""
    (B, T, H, K), V = k.shape, v.shape[3]
    q = q.to(g.dtype) * (K**-0.5 if scale is None else scale)
    parts = (q, (K, 1)), (k, (1, K)), (v, (V, 1)), (g.exp(), (1, K)), (beta, (1, 1))
    per_token = [x.to(g.dtype).transpose(0, 1).reshape(T, B * H, *shape).unbind(0) for x, shape in parts]
    return list(zip(*per_token, strict=True))


def _step(
    S: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    S = S.mul_(decay) if in_place else S * decay
    update = beta * (v - S @ k.mT)
    S = S.baddbmm_(update, k) if in_place else torch.baddbmm(S, update, k)
    return S, S @ q


def _joined(out: list[torch.Tensor], v: torch.Tensor) -> torch.Tensor:
    """Return the outputs per token as [B, T, H, V] in the dtype of ``v``."""
    if not out:
        return torch.zeros_like(v)
    B, T, H, V = v.shape
    return torch.stack(out).view(T, B, H, V).transpose(0, 1).to(v.dtype).contiguous()
