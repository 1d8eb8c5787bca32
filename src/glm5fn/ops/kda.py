"""Kimi delta attention: the gate, the recurrence token by token, by chunks, and with tokens that may be taken back.

Everywhere, per sequence and head, with the state S [V, K]::

    S = S * exp(g_t)                          decay every key channel
    S = S + beta_t (v_t - S k_t) k_t^T        replace what k_t recalls by v_t, in proportion beta
    o_t = scale * S q_t
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5fn.dims import FLOATS, check_cu_seqlens, check_dtype, check_same, check_shape
from glm5fn.dispatch import ContractError, dispatch, op
from glm5fn.donation import check_state, settle
from glm5fn.ops.conv import check_num_accepted

__all__ = ["KDAOut", "kda_chunk", "kda_gate", "kda_recurrent", "kda_verify"]


class KDAOut(NamedTuple):
    """Result of Kimi delta attention."""

    out: torch.Tensor
    """``[B, T, H, V]`` in the dtype of ``q``."""
    state: torch.Tensor
    """``[N, H, V, K]`` float32 (float64 if ``q`` is); from :func:`kda_verify` all states, ``[N, S+1, H, V, K]``."""


@op
def kda_gate(
    f: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None = -5.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Turn the gate's logits into the natural logarithm of the decay per token and key channel::

        g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))       in (lower_bound, 0)
        g = -exp(A_log) * softplus(f + dt_bias)                     with lower_bound=None; softplus(z) = z above 20

    Nothing is clipped: the bound scales the sigmoid.

    Args:
        f: ``[B, T, H, K]``, any float dtype.
        A_log: ``[H]``, any float dtype.
        dt_bias: ``[H, K]``, any float dtype (a checkpoint's ``[H*K]`` is ``dt_bias.view(H, K)``).
        lower_bound: at most 0, or ``None`` for the softplus form.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, T, H, K]`` float32 (float64 if ``f`` is), at most 0.

    Raises:
        ContractError: if an argument has another shape, dtype or device, or ``lower_bound`` is positive.

    Source: Kimi Linear (arXiv:2510.26692), section 4; the bounded form is that of GLM-5.3-Flash and Kimi K3.

    Example:
        >>> kda_gate(torch.zeros(1, 1, 1, 2), torch.zeros(1), torch.tensor([[0.0, 2.0]])).flatten().tolist()
        [-2.5, -4.403985023498535]
    """
    dims: dict[str, int] = {}
    check_shape("kda_gate", "f", f, "B T H K", dims)
    check_shape("kda_gate", "A_log", A_log, "H", dims)
    check_shape("kda_gate", "dt_bias", dt_bias, "H K", dims)
    check_dtype("kda_gate", "f", f, FLOATS)
    check_dtype("kda_gate", "A_log", A_log, FLOATS)
    check_dtype("kda_gate", "dt_bias", dt_bias, FLOATS)
    check_same("kda_gate", "device", f=f, A_log=A_log, dt_bias=dt_bias)
    if lower_bound is not None and not lower_bound <= 0:
        raise ContractError(
            f"kda_gate: lower_bound must be at most 0 (so that exp(g) <= 1) or None for the softplus form, "
            f"got {lower_bound}."
        )
    return dispatch("kda_gate", backend, f, A_log, dt_bias, lower_bound=lower_bound)


@op
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
    backend: str | None = None,
    donate: bool = False,
) -> KDAOut:
    """Run the recurrence over many tokens at once: what :func:`kda_recurrent` computes, by chunks of tokens in matrix
    form::

        S = S * exp(g_t);  S = S + beta_t (v_t - S k_t) k_t^T;  o_t = scale * S q_t

    Any gate ``g <= 0`` is safe and accurate, however strong and however long it lasts. The arithmetic is float32
    (float64 if given float64), with one rounding at the end. No value on an accelerator is read on the host.

    Args:
        q: ``[B, T, H, K]``, any float dtype, rows of unit length (see :func:`glm5fn.l2_norm`); with ``cu_seqlens``, B
            is 1.
        k: like ``q``.
        v: ``[B, T, H, V]`` in the dtype of ``q``.
        g: ``[B, T, H, K]`` float32 (float64 if ``q`` is): natural logarithm of the decay of each token, at most 0.
        beta: ``[B, T, H]`` in the dtype of ``g``, 0 to 1.
        state: ``[N, H, V, K]`` in the dtype of ``g`` (N is B unless packed); ``None`` is zeros.
        scale: factor on the output; ``None`` is ``K**-0.5``.
        cu_seqlens: int32 ``[N+1]``, offsets of the packed sequences in the T axis; an empty sequence leaves its state
            as it is. Its values are checked on the CPU only.
        backend: see :func:`glm5fn.use_backend`.
        donate: overwrite ``state`` and return it; the one passed may not be used again.

    Returns:
        KDAOut: ``out [B, T, H, V]`` in the dtype of ``q`` and the new ``state``.

    Raises:
        ContractError: if an argument has another shape, dtype or device than said above, or a bad offset or count.
            The values of q, k, v, g and beta are not read.

    Source: Kimi Linear (arXiv:2510.26692), section 3.1, the chunkwise form.

    Example:
        >>> from glm5fn.ops.norm import l2_norm
        >>> q, k, v = l2_norm(torch.randn(1, 100, 2, 8)), l2_norm(torch.randn(1, 100, 2, 8)), torch.randn(1, 100, 2, 4)
        >>> g, beta = -5 * torch.rand(1, 100, 2, 8), torch.rand(1, 100, 2)
        >>> whole = kda_chunk(q, k, v, g, beta)
        >>> head = kda_chunk(q[:, :37], k[:, :37], v[:, :37], g[:, :37], beta[:, :37])
        >>> tail = kda_chunk(q[:, 37:], k[:, 37:], v[:, 37:], g[:, 37:], beta[:, 37:], head.state)
        >>> torch.allclose(torch.cat([head.out, tail.out], dim=1), whole.out, atol=1e-6)
        True
    """
    _check("kda_chunk", q, k, v, g, beta, state, cu_seqlens)
    check_state("kda_chunk", "state", state, donate, q, k, v, g, beta)
    out, new = dispatch(
        "kda_chunk", backend, q, k, v, g, beta, state, scale=scale, cu_seqlens=cu_seqlens, donate=donate
    )
    return KDAOut(out, settle("kda_chunk", state, new, donate))


@op
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
    backend: str | None = None,
    donate: bool = False,
) -> KDAOut:
    """Run the recurrence token by token: the form for decoding, and the definition of :func:`kda_chunk`::

        S = S * exp(g_t);  S = S + beta_t (v_t - S k_t) k_t^T;  o_t = scale * S q_t

    The arithmetic is float32 (float64 if given float64), with one rounding at the end. No value on an accelerator is
    read on the host.

    Args, Returns, Raises: as :func:`kda_chunk`.

    Source: Kimi Linear (arXiv:2510.26692), section 3, equation 1.

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> kda_recurrent(one, one, 3 * one, -2.5 * one, torch.full((1, 1, 1), 0.5), 2 * one).out.item()
        1.5820850133895874
    """
    _check("kda_recurrent", q, k, v, g, beta, state, cu_seqlens)
    check_state("kda_recurrent", "state", state, donate, q, k, v, g, beta)
    out, new = dispatch(
        "kda_recurrent", backend, q, k, v, g, beta, state, scale=scale, cu_seqlens=cu_seqlens, donate=donate
    )
    return KDAOut(out, settle("kda_recurrent", state, new, donate))


@op
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
    backend: str | None = None,
    donate: bool = False,
) -> KDAOut:
    """Run the recurrence over tokens to verify, keeping the state after each, so that the next call can take the last
    ones back::

        S = states[n, num_accepted[n] - 1]            read before anything is written
        for t in 0..T-1:  S, o_t = one step of kda_recurrent;  states[n, t] = S

    Slots T and later keep what they held.

    Args:
        q: ``[N, T, H, K]``, any float dtype, rows of unit length; T is at most S+1.
        k: like ``q``.
        v: ``[N, T, H, V]`` in the dtype of ``q``.
        g: ``[N, T, H, K]`` float32 (float64 if ``q`` is): natural logarithm of the decay of each token, at most 0.
        beta: ``[N, T, H]`` in the dtype of ``g``, 0 to 1.
        states: ``[N, S+1, H, V, K]`` in the dtype of ``g``: the state after each token of the previous call.
        num_accepted: int32 ``[N]``, 1 to S+1: how many tokens of the previous call became permanent, 1 after a prefill
            (whose state belongs into slot 0). On the CPU it is checked; on an accelerator, and in compiled code, it is
            clamped, because reading it would stall.
        scale: factor on the output; ``None`` is ``K**-0.5``.
        backend: see :func:`glm5fn.use_backend`.
        donate: overwrite ``states`` and return it; the one passed may not be used again.

    Returns:
        KDAOut: ``out [N, T, H, V]`` in the dtype of ``q``, and all states in ``state``.

    Raises:
        ContractError: if an argument has another shape, dtype or device than said above, or a bad offset or count.
            The values of q, k, v, g and beta are not read.

    Source: Kimi Linear (arXiv:2510.26692), equation 1; Leviathan et al., Speculative Decoding (arXiv:2211.17192).

    Example:
        >>> one = torch.ones(1, 2, 1, 1)
        >>> states = torch.tensor([2.0, 7.0]).view(1, 2, 1, 1, 1)
        >>> accepted = torch.ones(1, dtype=torch.int32)
        >>> out, states = kda_verify(one, one, 3 * one, 0 * one, 0.5 * one[..., 0], states, accepted)
        >>> out.flatten().tolist(), states.flatten().tolist()
        ([2.5, 2.75], [2.5, 2.75])
    """
    dims = _check_tokens("kda_verify", q, k, v, g, beta)
    check_shape("kda_verify", "states", states, "N slots H V K", {"N": dims["B"], **{d: dims[d] for d in "HVK"}})
    check_same("kda_verify", "dtype", g=g, states=states)
    check_num_accepted("kda_verify", num_accepted, dims["B"], dims["T"], states.shape[1] - 1)
    check_same("kda_verify", "device", q=q, k=k, v=v, g=g, beta=beta, states=states, num_accepted=num_accepted)
    check_state("kda_verify", "states", states, donate, q, k, v, g, beta)
    out, new = dispatch("kda_verify", backend, q, k, v, g, beta, states, num_accepted, scale=scale, donate=donate)
    return KDAOut(out, settle("kda_verify", states, new, donate))


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    dims = _check_tokens(op, q, k, v, g, beta)
    N = dims["B"] if cu_seqlens is None else check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    if state is not None:
        check_shape(op, "state", state, "N H V K", {"N": N, **{d: dims[d] for d in "HVK"}})
        check_same(op, "dtype", g=g, state=state)
    check_same(op, "device", q=q, k=k, v=v, g=g, beta=beta, state=state, cu_seqlens=cu_seqlens)


def _check_tokens(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> dict[str, int]:
    dims: dict[str, int] = {}
    check_shape(op, "q", q, "B T H K", dims)
    check_dtype(op, "q", q, FLOATS)
    check_shape(op, "k", k, "B T H K", dims)
    check_shape(op, "v", v, "B T H V", dims)
    check_same(op, "dtype", q=q, k=k, v=v)
    check_shape(op, "g", g, "B T H K", dims)
    check_shape(op, "beta", beta, "B T H", dims)
    wide = torch.promote_types(q.dtype, torch.float32)
    check_dtype(op, "g", g, (wide,))
    check_dtype(op, "beta", beta, (wide,))
    return dims
