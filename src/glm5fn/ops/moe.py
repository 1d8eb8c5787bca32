"""Mixture of experts: the router, the routed experts and the clamped SwiGLU that experts and dense layers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5fn.dims import FLOATS, check_dtype, check_range, check_same, check_shape, compute_dtype
from glm5fn.dispatch import ContractError, dispatch, op

__all__ = ["RouteOut", "clamped_swiglu", "moe_experts", "moe_route"]


class RouteOut(NamedTuple):
    """The experts of each token, best first, and their weights."""

    weights: torch.Tensor
    ids: torch.Tensor


@op
def moe_route(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk: bool,
    scale: float,
    backend: str | None = None,
) -> RouteOut:
    """Choose ``top_k`` experts per token by biased sigmoid scores; weight them by the unbiased ones.

    ::

        s = sigmoid(w_gate x)      choice = s + bias
        keep the topk_group of n_group groups (of E / n_group experts) whose two best choices have the largest sum
        ids = the top_k of the kept by choice      weights = s[ids], over their sum + 1e-20 if norm_topk, times scale

    On equal choices the lower expert or group wins. Differentiable in ``x`` and ``w_gate`` through the weights;
    ``bias`` only chooses.

    Args:
        x: ``[B, T, D]`` tokens.
        w_gate: ``[E, D]`` router, in the dtype of ``x`` or float32.
        bias: float32 ``[E]`` correction of the choice, or None.
        top_k: experts per token.
        n_group: groups of experts, a divisor of E.
        topk_group: groups that are kept.
        norm_topk: whether the weights of a token are scaled to a sum of 1 before ``scale``.
        scale: factor of the weights.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``weights`` float32 (float64 if ``x`` is) and ``ids`` int32, both ``[B, T, top_k]``, best choice first. float32
        inside.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit, or the numbers of experts and groups do not.
        BackendUnavailable: if no allowed backend can run it.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0]]])
        >>> w_gate = torch.tensor([[0.0, 9.0], [2.0, 0.0], [1.0, 0.0]])
        >>> moe_route(x, w_gate, None, top_k=2, n_group=1, topk_group=1, norm_topk=True, scale=1.0).ids
        tensor([[[1, 2]]], dtype=torch.int32)
    """
    name = "moe_route"
    dims: dict[str, int] = {}
    check_shape(name, "x", x, "B T D", dims)
    check_shape(name, "w_gate", w_gate, "E D", dims)
    check_dtype(name, "x", x, FLOATS)
    check_dtype(name, "w_gate", w_gate, (x.dtype, torch.float32))
    if bias is not None:
        check_shape(name, "bias", bias, "E", dims)
        check_dtype(name, "bias", bias, (compute_dtype(x.dtype),))
    check_same(name, "device", x=x, w_gate=w_gate, bias=bias)
    E = dims["E"]
    if n_group < 1 or E % n_group:
        raise ContractError(f"{name}: n_group must divide the number of experts E={E}, got {n_group}.")
    if not 1 <= topk_group <= n_group:
        raise ContractError(f"{name}: topk_group must lie in 1..n_group={n_group}, got {topk_group}.")
    most = E // n_group * topk_group
    if not 1 <= top_k <= most:
        where = f"{topk_group} of {n_group} groups of E={E}"
        raise ContractError(f"{name}: top_k must lie in 1..{most}, the experts in {where}, got {top_k}.")
    return RouteOut(
        *dispatch(
            name, backend, x, w_gate, bias,
            top_k=top_k, n_group=n_group, topk_group=topk_group, norm_topk=norm_topk, scale=scale,
        )
    )  # fmt: skip


@op
def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    limit: float | None,
    backend: str | None = None,
) -> torch.Tensor:
    """Run each token through its chosen experts and add their outputs, weighted. Experts that no token chose are not
    read.

    ::

        y = sum_k weights[k] w_down[e] clamped_swiglu(w_gate_up[e] x, limit)      e = ids[k]

    The matrix products run in the dtype of ``x``, the activation and the weighted sum in float32 (float64 if given
    float64), and the sum is rounded once. Differentiable in ``x``, ``weights``, ``w_gate_up`` and ``w_down``.

    Args:
        x: ``[B, T, D]`` tokens.
        ids: int32 ``[B, T, top_k]`` experts, from :func:`moe_route`. A repeated expert counts as often.
        weights: float32 (float64 if ``x`` is) ``[B, T, top_k]``.
        w_gate_up: ``[E, 2I, D]`` gate rows, then up rows, in the dtype of ``x``.
        w_down: ``[E, D, I]`` in the dtype of ``x``.
        limit: see :func:`clamped_swiglu`.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[B, T, D]`` in the dtype of ``x``.

    Raises:
        ContractError: if shapes, dtypes or devices do not fit, ``limit`` is not positive, or an id is outside
            ``0..E-1`` (checked on the CPU).
        BackendUnavailable: if no allowed backend can run it.

    Source: DeepSeek-V3 (arXiv:2412.19437), equation 12.

    Example:
        >>> x, ids = torch.randn(1, 3, 4), torch.tensor([[[0], [1], [1]]], dtype=torch.int32)
        >>> w_gate_up, w_down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
        >>> y = moe_experts(x, ids, torch.ones(1, 3, 1), w_gate_up, w_down, limit=10.0)
        >>> torch.allclose(y[0, 2], w_down[1] @ clamped_swiglu(w_gate_up[1] @ x[0, 2], limit=10.0), atol=1e-5)
        True
    """
    name = "moe_experts"
    dims: dict[str, int] = {}
    check_shape(name, "x", x, "B T D", dims)
    check_shape(name, "ids", ids, "B T top_k", dims)
    check_shape(name, "weights", weights, "B T top_k", dims)
    check_shape(name, "w_down", w_down, "E D I", dims)
    check_shape(name, "w_gate_up", w_gate_up, f"E {2 * dims['I']} D", dims)
    check_dtype(name, "x", x, FLOATS)
    check_dtype(name, "ids", ids, (torch.int32,))
    check_dtype(name, "weights", weights, (compute_dtype(x.dtype),))
    check_same(name, "dtype", x=x, w_gate_up=w_gate_up, w_down=w_down)
    check_same(name, "device", x=x, ids=ids, weights=weights, w_gate_up=w_gate_up, w_down=w_down)
    _check_limit(name, limit)
    check_range(name, "ids", ids, 0, dims["E"] - 1, f"E={dims['E']} experts")
    return dispatch(name, backend, x, ids, weights, w_gate_up, w_down, limit=limit)


@op
def clamped_swiglu(gate_up: torch.Tensor, *, limit: float | None, backend: str | None = None) -> torch.Tensor:
    """SwiGLU with its inputs clamped: ``silu(min(gate, limit)) * clamp(up, -limit, limit)``.

    Args:
        gate_up: ``[..., 2I]``: I gate channels, then I up channels.
        limit: bound of the inputs; the gate is bounded from above only. None: no bound.
        backend: see :func:`glm5fn.use_backend`.

    Returns:
        ``[..., I]`` in the dtype of ``gate_up``; float32 inside (float64 if given float64), one rounding.

    Raises:
        ContractError: if the last dimension is odd, the dtype is not floating or ``limit`` is not positive.
        BackendUnavailable: if no allowed backend can run it.

    Source: GLU Variants Improve Transformer (arXiv:2002.05202), equation 6.

    Example:
        >>> clamped_swiglu(torch.tensor([20.0, -30.0]), limit=10.0)
        tensor([-99.9955])
    """
    name = "clamped_swiglu"
    if not isinstance(gate_up, torch.Tensor) or gate_up.dim() == 0:
        check_shape(name, "gate_up", gate_up, "2I", {})
    check_dtype(name, "gate_up", gate_up, FLOATS)
    if gate_up.shape[-1] % 2:
        raise ContractError(f"{name}: gate_up must have an even last dimension 2I, got {list(gate_up.shape)}.")
    _check_limit(name, limit)
    return dispatch(name, backend, gate_up, limit=limit)


def _check_limit(name: str, limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ContractError(f"{name}: limit must be positive, or None for no clamp, got {limit}.")
