"""Multi-head latent attention without positions (NoPE MLA): a token is remembered as one latent vector that all heads
share.

Three forms of the same attention. :func:`mla_prefill` expands keys and values and suits many queries;
:func:`mla_decode` absorbs the expansion into the query and the output and suits a few; :func:`mla_sparse` is the
absorbed form over chosen rows.
"""

from __future__ import annotations

import torch

from glm5fn.dims import FLOATS, check_dtype, check_range, check_same, check_shape
from glm5fn.dispatch import dispatch, op

__all__ = ["mla_decode", "mla_prefill", "mla_sparse"]


@op
def mla_prefill(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Dense causal attention over latents, in expanded form: best for many queries.

    Per head, with position ``p = lengths[b] - T + t`` of query t::

        k_s = w_uk c_s      v_s = w_uv c_s      out_t = sum over s <= p of softmax_s(scale * q_t . k_s) v_s

    A query with ``p < 0`` sees nothing and gives zeros. Latent rows at or beyond ``lengths[b]`` are never read, nor are
    rows after a query's position by that query: NaN there does not spread.

    Args:
        q: ``[B, T, H, Dk]`` queries of the last T tokens.
        latent: ``[B, S, R]`` normalised latents; S is the capacity.
        w_uk: ``[H, Dk, R]`` expands a latent to a head's key. Any strides, so it may be a view of the checkpoint's
            ``kv_b``.
        w_uv: ``[H, Dv, R]`` expands a latent to a head's value.
        lengths: int32 ``[B]`` valid latent rows, these T tokens included. Default: S.
        scale: factor of the scores. Default: ``Dk**-0.5``.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, T, H, Dv]`` in the dtype of ``q``; float32 inside (float64 if given float64), one rounding.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit, or a length is outside ``0..S`` (checked on the CPU).
        BackendUnavailable: if no allowed backend can run it.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2, without the rotary part.

    Example:
        >>> q, latent = torch.randn(1, 3, 2, 4), torch.randn(1, 5, 8)
        >>> w_uk, w_uv = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
        >>> mla_prefill(q, latent, w_uk, w_uv).shape
        torch.Size([1, 3, 2, 6])
    """
    _check("mla_prefill", q, latent, w_uk, w_uv, lengths)
    return dispatch("mla_prefill", backend, q, latent, w_uk, w_uv, lengths=lengths, scale=scale)


@op
def mla_decode(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Dense causal attention over latents, in absorbed form: best for a few queries per row.

    The same function as :func:`mla_prefill`, with the expansion moved to the query and the output, so that no key or
    value is ever formed::

        a_t = w_uk^T q_t      out_t = w_uv (sum over s <= p of softmax_s(scale * a_t . c_s) c_s)

    Arguments, returns, errors and source as :func:`mla_prefill`.

    Example:
        >>> q, latent = torch.randn(1, 1, 2, 4), torch.randn(1, 5, 8)
        >>> w_uk, w_uv = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
        >>> lengths = torch.tensor([3], dtype=torch.int32)
        >>> out = mla_decode(q, latent, w_uk, w_uv, lengths=lengths)
        >>> torch.allclose(out, mla_prefill(q, latent, w_uk, w_uv, lengths=lengths), atol=1e-5)
        True
    """
    _check("mla_decode", q, latent, w_uk, w_uv, lengths)
    return dispatch("mla_decode", backend, q, latent, w_uk, w_uv, lengths=lengths, scale=scale)


@op
def mla_sparse(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention over the latent rows that each query has chosen, in absorbed form; nothing else is read or expanded.

    ::

        a_t = w_uk^T q_t      out_t = w_uv (sum over s in indices[t] of softmax_s(scale * a_t . c_s) c_s)

    Causality comes from ``indices`` alone. A query without an index gives zeros; an index that is repeated counts as
    often.

    Args:
        q: ``[B, T, H, Dk]`` queries.
        latent: ``[B, S, R]`` normalised latents.
        w_uk: ``[H, Dk, R]`` expands a latent to a head's key.
        w_uv: ``[H, Dv, R]`` expands a latent to a head's value.
        indices: int32 ``[B, T, J]`` rows of ``latent``, in any order; negative means unused. From
            :func:`glm5fn.kpool_select`.
        scale: factor of the scores. Default: ``Dk**-0.5``.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, T, H, Dv]`` in the dtype of ``q``; float32 inside (float64 if given float64), one rounding.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit, or an index is S or more (checked on the CPU).
        BackendUnavailable: if no allowed backend can run it.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.

    Example:
        >>> q, latent = torch.randn(1, 1, 2, 4), torch.randn(1, 5, 8)
        >>> w_uk, w_uv = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
        >>> one = mla_sparse(q, latent, w_uk, w_uv, torch.tensor([[[3, -1]]], dtype=torch.int32))
        >>> torch.allclose(one[0, 0], w_uv @ latent[0, 3], atol=1e-5)
        True
    """
    name = "mla_sparse"
    dims = _check(name, q, latent, w_uk, w_uv, None)
    check_shape(name, "indices", indices, "B T J", dims)
    check_dtype(name, "indices", indices, (torch.int32,))
    check_same(name, "device", q=q, indices=indices)
    least = torch.iinfo(torch.int32).min
    check_range(name, "indices", indices, least, dims["S"] - 1, f"S={dims['S']} latent rows; negative means unused")
    return dispatch(name, backend, q, latent, w_uk, w_uv, indices, scale=scale)


def _check(
    name: str,
    q: torch.Tensor,
    latent: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: torch.Tensor | None,
) -> dict[str, int]:
    dims: dict[str, int] = {}
    check_shape(name, "q", q, "B T H Dk", dims)
    check_shape(name, "latent", latent, "B S R", dims)
    check_shape(name, "w_uk", w_uk, "H Dk R", dims)
    check_shape(name, "w_uv", w_uv, "H Dv R", dims)
    check_dtype(name, "q", q, FLOATS)
    check_same(name, "dtype", q=q, latent=latent, w_uk=w_uk, w_uv=w_uv)
    if lengths is not None:
        check_shape(name, "lengths", lengths, "B", dims)
        check_dtype(name, "lengths", lengths, (torch.int32,))
    check_same(name, "device", q=q, latent=latent, w_uk=w_uk, w_uv=w_uv, lengths=lengths)
    if lengths is not None:
        check_range(name, "lengths", lengths, 0, dims["S"], f"S={dims['S']} latent rows")
    return dims
