"""The kpool indexer: which earlier tokens a query attends to, decided per pool of ``kpool`` tokens."""

from __future__ import annotations

import torch

from glm5fn.dims import FLOATS, check_dtype, check_range, check_same, check_shape
from glm5fn.dispatch import ContractError, dispatch, op

__all__ = ["kpool_compress", "kpool_select"]


@op
def kpool_compress(
    k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Compress the keys of each complete pool to one key: a weighted mean with its own weights per channel.

    ::

        weight[j, i] = softmax over j of (gate[j, i] + ape[j, i])      pooled[i] = sum_j weight[j, i] k[j, i]

    Args:
        k: ``[B, P, kpool, I]`` keys of the members of each pool.
        gate: ``[B, P, kpool, I]`` compression scores of the members, in the dtype of ``k``.
        ape: ``[kpool, I]`` learned score of each place in a pool, in the dtype of ``k`` or float32.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, P, I]`` in the dtype of ``k``; float32 inside (float64 if given float64), one rounding.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit.
        BackendUnavailable: if no allowed backend can run it.

    Source: GLM-5.3-Flash's indexer; the weighted compression is that of Native Sparse Attention (arXiv:2502.11089),
        section 3.3.1.

    Example:
        >>> k = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> kpool_compress(k, torch.zeros_like(k), torch.zeros(2, 1))
        tensor([[[2.]]])
    """
    name = "kpool_compress"
    dims: dict[str, int] = {}
    check_shape(name, "k", k, "B P kpool I", dims)
    check_shape(name, "gate", gate, "B P kpool I", dims)
    check_shape(name, "ape", ape, "kpool I", dims)
    check_dtype(name, "k", k, FLOATS)
    check_same(name, "dtype", k=k, gate=gate)
    check_dtype(name, "ape", ape, (k.dtype, torch.float32))
    check_same(name, "device", k=k, gate=gate, ape=ape)
    if dims["kpool"] < 1:
        raise ContractError(f"{name}: kpool (dimension 2 of k) must be at least 1, got 0.")
    return dispatch(name, backend, k, gate, ape)


@op
def kpool_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    kpool: int,
    tail: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Choose for each query the tokens of its best ``topk / kpool`` pools and, with ``tail``, those of the incomplete
    last pool.

    A query at position t sees pool p if the pool's last token is at most t, that is ``p < (t + 1) // kpool``::

        score_p = sum over heads j of weights[j] J^-0.5 relu(I^-0.5 q_j . pooled_p)

    The tail is the ``(t + 1) % kpool`` tokens after the last complete pool. When that is none, nothing guarantees that
    a query selects itself. On equal scores the lower pool wins; which of two scores that differ only by rounding is
    higher may depend on the backend. A NaN score ranks first, so that a broken key shows. Not differentiable.

    Args:
        q: ``[B, T, J, I]`` indexer queries.
        weights: ``[B, T, J]`` head weights, in the dtype of ``q`` or float32.
        pooled: ``[B, P, I]`` pooled keys, in the dtype of ``q``. Pools that a query cannot see are never read by it.
        positions: int32 or int64 ``[B, T]`` position of each query in its sequence. Negative: the query is padding.
        topk: tokens to select, a positive multiple of ``kpool``; may exceed what there is.
        kpool: tokens per pool.
        tail: whether to add the incomplete last pool.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        int32 ``[B, T, topk + kpool - 1]`` (``[B, T, topk]`` without tail) distinct token positions. Columns below
        ``topk`` hold the selected pools in ascending order, ``kpool`` tokens each, then -1; the rest hold the tail,
        then -1. Padding gives -1 only.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit, ``topk`` is not a positive multiple of ``kpool``, or a
            query's position has more complete pools than P (checked on the CPU).
        BackendUnavailable: if no allowed backend can run it.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), equation 1, over pools as GLM-5.3-Flash has it.

    Example:
        >>> q, weights = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1)
        >>> pooled = torch.tensor([[[0.0, 1.0], [5.0, 5.0], [1.0, 1.0]]])
        >>> kpool_select(q, weights, pooled, torch.tensor([[6]]), topk=2, kpool=2)
        tensor([[[2, 3, 6]]], dtype=torch.int32)
    """
    name = "kpool_select"
    dims: dict[str, int] = {}
    check_shape(name, "q", q, "B T J I", dims)
    check_shape(name, "weights", weights, "B T J", dims)
    check_shape(name, "pooled", pooled, "B P I", dims)
    check_shape(name, "positions", positions, "B T", dims)
    check_dtype(name, "q", q, FLOATS)
    check_dtype(name, "weights", weights, (q.dtype, torch.float32))
    check_same(name, "dtype", q=q, pooled=pooled)
    check_dtype(name, "positions", positions, (torch.int32, torch.int64))
    check_same(name, "device", q=q, weights=weights, pooled=pooled, positions=positions)
    if kpool < 1:
        raise ContractError(f"{name}: kpool must be at least 1, got {kpool}.")
    if topk < 1 or topk % kpool:
        raise ContractError(f"{name}: topk must be a positive multiple of kpool={kpool}, got {topk}.")
    least, most = torch.iinfo(positions.dtype).min, (dims["P"] + 1) * kpool - 2
    check_range(name, "positions", positions, least, most, f"P={dims['P']} pools of {kpool}; negative means padding")
    return dispatch(name, backend, q, weights, pooled, positions, topk=topk, kpool=kpool, tail=tail)
