"""Manifold-constrained hyper-connections: N residual streams that each sub-block reads from, writes to and mixes.

A sub-block f runs as ``x, post, comb = mhc_pre_norm(streams, ...)``, ``streams = mhc_post(f(x), streams, post, comb)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5fn.dims import FLOATS, check_dtype, check_same, check_shape, compute_dtype
from glm5fn.dispatch import ContractError, dispatch, op

__all__ = ["MHCOut", "mhc_post", "mhc_pre", "mhc_pre_norm"]


class MHCOut(NamedTuple):
    """What a sub-block reads and how its result is written back."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


@op
def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-5,
    backend: str | None = None,
) -> MHCOut:
    """Collapse the streams to a sub-block's input and compute how its output will be written back.

    Per token, with ``m = fn r / rms(r)`` of the flattened streams r (stream-major), split into N, N and N x N entries::

        pre  = sigmoid(m_pre scale[0] + base_pre) + hc_eps         x = sum_j pre[j] streams[j]
        post = 2 sigmoid(m_post scale[1] + base_post)
        comb = softmax over out of (m_comb scale[2] + base_comb) + hc_eps, then a column scaling, then iters - 1 times
               a row and a column scaling; row: comb / (sum over out + hc_eps), column: comb / (sum over in + hc_eps)

    Args:
        streams: ``[B, T, N, D]`` residual streams, any N >= 1.
        fn: ``[(2+N)N, ND]`` in the dtype of ``streams``, or bfloat16 or float32. Rows: N pre, N post, then comb as [in,
            out].
        base: ``[(2+N)N]`` float32. In bfloat16 it would destroy the model, so that is refused.
        scale: ``[3]`` float32, for pre, post and comb.
        iters: Sinkhorn rounds, at least 1.
        hc_eps: the epsilon of ``pre`` and of the Sinkhorn scaling.
        norm_eps: the epsilon inside ``rms(r) = sqrt(mean r^2 + norm_eps)``.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``x [B, T, D]`` in the dtype of ``streams``, ``post [B, T, N]`` and ``comb [B, T, N, N]``, indexed [in, out], in
        float32 (float64 if the streams are). float32 inside, one rounding of x.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit or ``iters`` is below 1.
        BackendUnavailable: if no allowed backend can run it.

    Source: mHC (arXiv:2512.24880), section 4; Hyper-Connections (arXiv:2409.19606).

    Example:
        >>> streams = torch.randn(1, 3, 2, 8)
        >>> x, post, comb = mhc_pre(streams, torch.randn(8, 16), torch.zeros(8), torch.ones(3))
        >>> x.shape, bool((comb.sum(-2) - 1).abs().max() < 1e-4)
        (torch.Size([1, 3, 8]), True)
    """
    _check_pre("mhc_pre", streams, fn, base, scale, iters)
    return MHCOut(
        *dispatch("mhc_pre", backend, streams, fn, base, scale, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps)
    )


@op
def mhc_pre_norm(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-5,
    backend: str | None = None,
) -> MHCOut:
    """:func:`mhc_pre` followed by the RMS norm of its (rounded) ``x``, as every sub-block needs it.

    ``mhc_pre_norm(...).x`` is ``rms_norm(mhc_pre(...).x, norm_weight, eps=norm_eps)``, post and comb are those of
    :func:`mhc_pre`.

    Args:
        streams: see :func:`mhc_pre`, as are ``fn``, ``base``, ``scale``, ``iters`` and ``hc_eps``.
        fn: see there.
        base: see there.
        scale: see there.
        norm_weight: ``[D]`` weight of the norm, in the dtype of ``streams`` or float32.
        iters: see there.
        hc_eps: see there.
        norm_eps: the epsilon of both norms: of the flattened streams and of x.
        backend: see :func:`glm5fn.use_backend`.

    Returns, raises and source as :func:`mhc_pre`.

    Example:
        >>> from glm5fn.ops.norm import rms_norm
        >>> arguments = torch.randn(1, 3, 2, 8), torch.randn(8, 16), torch.zeros(8), torch.ones(3)
        >>> weight = torch.rand(8)
        >>> torch.equal(mhc_pre_norm(*arguments, weight).x, rms_norm(mhc_pre(*arguments).x, weight, eps=1e-5))
        True
    """
    name = "mhc_pre_norm"
    dims = _check_pre(name, streams, fn, base, scale, iters)
    check_shape(name, "norm_weight", norm_weight, "D", dims)
    check_dtype(name, "norm_weight", norm_weight, (streams.dtype, torch.float32))
    check_same(name, "device", streams=streams, norm_weight=norm_weight)
    return MHCOut(
        *dispatch(name, backend, streams, fn, base, scale, norm_weight, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps)
    )


@op
def mhc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Write a sub-block's output back to the streams and mix them.

    ::

        new_j = post[j] y + sum_i comb[i, j] streams_i

    Args:
        y: ``[B, T, D]`` output of the sub-block, in the dtype of ``streams``.
        streams: ``[B, T, N, D]`` the streams that :func:`mhc_pre` read.
        post: ``[B, T, N]`` float32 from :func:`mhc_pre` (float64 if the streams are).
        comb: ``[B, T, N, N]`` likewise, indexed [in, out].
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, T, N, D]`` in the dtype of ``streams``; float32 inside (float64 if given float64), one rounding.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit.
        BackendUnavailable: if no allowed backend can run it.

    Source: as :func:`mhc_pre`.

    Example:
        >>> streams = torch.tensor([[[[1.0], [10.0]]]])
        >>> y, post, comb = torch.full((1, 1, 1), 100.0), torch.tensor([[[1.0, 2.0]]]), torch.eye(2)[None, None]
        >>> mhc_post(y, streams, post, comb).flatten()
        tensor([101., 210.])
    """
    name = "mhc_post"
    dims: dict[str, int] = {}
    check_shape(name, "streams", streams, "B T N D", dims)
    check_shape(name, "y", y, "B T D", dims)
    check_shape(name, "post", post, "B T N", dims)
    check_shape(name, "comb", comb, "B T N N", dims)
    check_dtype(name, "streams", streams, FLOATS)
    check_same(name, "dtype", streams=streams, y=y)
    for label, x in (("post", post), ("comb", comb)):
        check_dtype(name, label, x, (compute_dtype(streams.dtype),))
    check_same(name, "device", streams=streams, y=y, post=post, comb=comb)
    return dispatch(name, backend, y, streams, post, comb)


def _check_pre(
    name: str, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iters: int
) -> dict[str, int]:
    dims: dict[str, int] = {}
    check_shape(name, "streams", streams, "B T N D", dims)
    N, D = dims["N"], dims["D"]
    if N < 1 or D < 1:
        raise ContractError(f"{name}: streams must have N >= 1 and D >= 1 in [B, T, N, D], got N={N} and D={D}.")
    check_shape(name, "fn", fn, f"{(2 + N) * N} {N * D}", dims)
    check_shape(name, "base", base, f"{(2 + N) * N}", dims)
    check_shape(name, "scale", scale, "3", dims)
    check_dtype(name, "streams", streams, FLOATS)
    check_dtype(name, "fn", fn, (streams.dtype, torch.bfloat16, torch.float32))
    for label, x in (("base", base), ("scale", scale)):
        check_dtype(name, label, x, (compute_dtype(streams.dtype),))
    check_same(name, "device", streams=streams, fn=fn, base=base, scale=scale)
    if iters < 1:
        raise ContractError(f"{name}: iters must be at least 1, got {iters}.")
    return dims
