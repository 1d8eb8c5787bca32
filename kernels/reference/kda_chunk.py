"""Kimi delta attention by chunks, in plain torch.

With ``a_t = exp(g_t)``, ``P_t`` the product of the decays from the start of a block up to and including ``t``, and
``Q_t`` the product of those after ``t`` up to its end, a block of C tokens that starts with the state S0 [V, K] does

    A[i, j] = beta_i k_i . (k_j decay(j -> i))   for j < i
    B[i, j] =        q_i . (k_j decay(j -> i))   for j <= i
    E       = (I + A)^-1 beta (v - (k P) S0^T)
    O       = (q P) S0^T + B E
    S1      = S0 P_end + E^T (k Q)

(arXiv:2510.26692, section 3). Blocks are built by doubling: in the lower left corner of a pair of blocks decay(j -> i)
is Q_j of the left one times P_i of the right one, so every factor is at most 1 and is a product of just the decays it
stands for. Nothing overflows however strong the gate is, no exponent loses digits to a long cumulative sum, and the
inverse is assembled from exact corners, so that repeated keys cost no accuracy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from glm5fn.kernels.reference.kda_state import begin, finish, is_recording
from glm5fn.kernels.reference.precision import without_autocast

__all__ = ["kda_chunk"]

_CHUNK = 32
_SEGMENT = 1 << 18


class _Blocks(NamedTuple):
    """What the recurrence over chunks needs; n chunks of C tokens, with BH independent rows each."""

    qk: torch.Tensor
    """[n, BH, 2C, K]: k P and q P of every token, in turn."""
    k_end: torch.Tensor
    """[n, BH, C, K]: k Q."""
    decay: torch.Tensor
    """[n, BH, 1, K]: product of all decays."""
    inverse: torch.Tensor
    """[n, BH, C, C]: (I + A)^-1."""
    scores: torch.Tensor
    """[n, BH, C, C]: B."""
    v: torch.Tensor
    """[n, BH, C, V]"""
    beta: torch.Tensor
    """[n, BH, C, 1]"""


@without_autocast
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
    (B, T, H, K), V = k.shape, v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    in_place = not is_recording(q, k, v, g, beta, state)
    S = begin(state, N, k, v, donate)
    if B * T == 0:
        return torch.zeros_like(v), finish(S, state, H, donate)
    C = min(_CHUNK, 1 << (max(1, B * T // N) - 1).bit_length())
    packing = None if cu_seqlens is None else _pack(cu_seqlens, T, C)
    inputs = [x if packing is None else _spread(x, packing) for x in (q, k, v, g, beta[..., None])]
    step = max(1, _SEGMENT // (B * H * K * C))
    out = []
    # split, not slices: their gradients are assembled once instead of added up at full length per segment.
    for i, part in enumerate(zip(*(x.split(step * C, dim=1) for x in inputs), strict=True)):
        heads = None if packing is None else packing.heads(H)[i * step : (i + 1) * step]
        o, S = _scan(_blocks(*(_cut(x, C) for x in part)), S, heads, in_place=in_place)
        o = o.view(-1, B, H, C, V).permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)[:, : part[0].shape[1]]
        out.append((o * (K**-0.5 if scale is None else scale)).to(q.dtype))
    whole = torch.cat(out, dim=1)
    return whole if packing is None else whole[:, packing.place], finish(S, state, H, donate)


class _Packing(NamedTuple):
    """Where the tokens of packed sequences are in n chunks of C places, of which no chunk holds two sequences."""

    sequence: torch.Tensor
    """[n]: the sequence of each chunk."""
    token: torch.Tensor
    """[n*C]: the token at each place."""
    used: torch.Tensor
    """[n*C]: whether the place holds a token at all."""
    place: torch.Tensor
    """[T]: the place of each token."""

    def heads(self, H: int) -> torch.Tensor:
        """Rows of the state [N*H, V, K] that each chunk works on: [n, H]."""
        return self.sequence[:, None] * H + torch.arange(H, device=self.sequence.device)


def _pack(cu_seqlens: torch.Tensor, T: int, C: int) -> _Packing:
    """Lay out the chunks on the device. Their number is not known here, only a bound, so the last ones may be empty."""
    N = cu_seqlens.shape[0] - 1
    start = cu_seqlens.long()
    lengths = start.diff()
    ends = ((lengths + C - 1) // C).cumsum(0)
    firsts = F.pad(ends, (1, 0))
    chunk = torch.arange((T + N * (C - 1)) // C, device=cu_seqlens.device)
    # An empty chunk belongs to the last sequence that has tokens: it may turn a -0 into 0 there.
    sequence = torch.searchsorted(ends, torch.minimum(chunk, ends[-1] - 1), right=True)
    inside = (chunk - firsts[sequence])[:, None] * C + torch.arange(C, device=cu_seqlens.device)
    used = inside < lengths[sequence, None]
    token = torch.where(used, start[sequence, None] + inside, 0)
    time = torch.arange(T, device=cu_seqlens.device)
    owner = torch.searchsorted(start[1:], time, right=True)
    return _Packing(sequence, token.flatten(), used.flatten(), firsts[owner] * C + time - start[owner])


def _spread(x: torch.Tensor, packing: _Packing) -> torch.Tensor:
    """Return x [1, T, H, X] at its places, [1, n*C, H, X]; unused places are zero, which leaves the state as it is."""
    return x[:, packing.token].masked_fill(~packing.used[:, None, None], 0)


def _cut(x: torch.Tensor, C: int) -> torch.Tensor:
    """Return x [B, T, H, X] in chunks, [n, B, H, C, X]; zeros, which leave the state as it is, fill the last one."""
    B, T, H, X = x.shape
    if T % C:
        x = F.pad(x, (0, 0, 0, 0, 0, -T % C))
    return x.reshape(B, -1, C, H, X).permute(1, 0, 3, 2, 4)


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> _Blocks:
    """Build the blocks of all chunks [n, B, H, C, ...] by doubling: blocks of s tokens become blocks of 2s."""
    n, B, H, C, K = k.shape
    G = n * B * H
    total = g.exp().reshape(G, C, K).contiguous()
    k_end = k.to(g.dtype).reshape(G, C, K).contiguous()
    qk = torch.stack((k, q), dim=-2).to(g.dtype).reshape(G, C, 2, K)
    k_row, q_row = qk.unbind(2)
    scores = (k_row * q_row).sum(-1).view(G * C, 1, 1)
    qk = qk * total[:, :, None]
    inverse = torch.ones_like(scores)
    beta = beta.reshape(G, C, 1).contiguous()
    s = 1
    while s < C:
        m = G * (C // (2 * s))
        # unbind, not selects: its gradient is one stack instead of two sums of zero-filled tensors.
        qk_left, qk_right = qk.view(m, 2, 2 * s, K).unbind(1)
        k_left, k_right = k_end.view(m, 2, s, K).unbind(1)
        decay_left, decay_right = total.view(m, 2, 1, K).unbind(1)
        inverse_left, inverse_right = inverse.view(m, 2, s, s).unbind(1)
        scores_left, scores_right = scores.view(m, 2, s, s).unbind(1)
        a, b = torch.bmm(qk_right, k_left.mT).view(m, s, 2, s).unbind(2)
        a = a * beta.view(m, 2, s, 1)[:, 1]
        inverse = _join(inverse_left, -torch.bmm(inverse_right, torch.bmm(a, inverse_left)), inverse_right)
        scores = _join(scores_left, b, scores_right)
        qk = torch.stack((qk_left, qk_right * decay_left), dim=1)
        k_end = torch.stack((k_left * decay_right, k_right), dim=1)
        total = decay_left * decay_right
        s *= 2
    shape = (n, B * H)
    return _Blocks(
        qk=qk.reshape(*shape, 2 * C, K),
        k_end=k_end.reshape(*shape, C, K),
        decay=total.reshape(*shape, 1, K),
        inverse=inverse.reshape(*shape, C, C),
        scores=scores.reshape(*shape, C, C),
        v=v.to(g.dtype).reshape(*shape, C, v.shape[-1]),
        beta=beta.reshape(*shape, C, 1),
    )


def _join(left: torch.Tensor, corner: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Put two lower triangular blocks [m, s, s] and the corner below the first into one [m, 2s, 2s]."""
    s = left.shape[-1]
    return torch.cat([F.pad(left, (0, s)), torch.cat([corner, right], dim=-1)], dim=-2)


def _scan(
    blocks: _Blocks, S: torch.Tensor, heads: torch.Tensor | None, *, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over chunks. ``heads`` [n, H], for packed sequences, are the rows of S that each chunk works
    on."""
    out = []
    for i, (qk, k_end, decay, inverse, scores, v, beta) in enumerate(zip(*(x.unbind(0) for x in blocks), strict=True)):
        one = S if heads is None else S.index_select(0, heads[i])
        recalled, read = torch.bmm(qk, one.mT).view(*v.shape[:2], 2, v.shape[2]).unbind(2)
        e = torch.bmm(inverse, beta * (v - recalled))
        out.append(torch.baddbmm(read, scores, e))
        one = one.mul_(decay).baddbmm_(e.mT, k_end) if in_place else torch.baddbmm(one * decay, e.mT, k_end)
        if heads is not None:
            one = S.index_copy_(0, heads[i], one) if in_place else S.index_copy(0, heads[i], one)
        S = one
    return torch.stack(out), S
