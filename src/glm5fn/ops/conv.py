"""The short causal depthwise convolution in front of KDA, and its state."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5fn.dims import FLOATS, check_cu_seqlens, check_dtype, check_same, check_shape
from glm5fn.dispatch import ContractError, dispatch, op
from glm5fn.donation import check_state, settle

__all__ = ["ConvOut", "causal_conv1d", "causal_conv1d_update"]

ACTIVATIONS = ("silu", None)


class ConvOut(NamedTuple):
    """Result of a causal convolution."""

    out: torch.Tensor
    """``[B, T, D]`` in the dtype of ``x``."""
    state: torch.Tensor
    """``[N, W-1, D]``, the last W-1 inputs of every sequence, oldest first; wider if the state passed was wider."""


@op
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    donate: bool = False,
) -> ConvOut:
    """Filter every channel with its own W taps over the present and the past, and return the inputs to continue from::

        out[t] = act(bias + sum_w weight[:, w] * x[t - (W-1) + w])        w = 0..W-1

    where ``x[-(W-1)], ..., x[-1]`` are the rows of ``state``, or zeros. Cutting a sequence anywhere and passing the
    state on gives the same result. The arithmetic is float32 (float64 if given float64), with one rounding at the end.

    Args:
        x: ``[B, T, D]``, any float dtype; with ``cu_seqlens``, ``[1, T, D]``. T may be 0 and may be less than W-1.
        weight: ``[D, W]``, any float dtype; ``weight[:, W-1]`` multiplies the present token.
        bias: ``[D]``, any float dtype, or ``None``.
        state: ``[N, W-1, D]`` in the dtype of ``x``: the last W-1 inputs, oldest first (N is B unless packed); ``None``
            is zeros. A state for speculative decoding, ``[N, W-1+S, D]``, is used as after 1 accepted token: only its
            first W-1 rows are read and written.
        activation: ``"silu"`` or ``None``.
        cu_seqlens: int32 ``[N+1]``, offsets of the packed sequences in the T axis; an empty sequence leaves its state
            as it is. Its values are checked on the CPU only.
        backend: see :func:`glm5fn.use_backend`.
        donate: overwrite ``state`` and return it; the one passed may not be used again.

    Returns:
        ConvOut: ``out [B, T, D]`` in the dtype of ``x`` and the new ``state``.

    Raises:
        ContractError: if an argument has another shape, dtype, device or value than said above.

    Source: the short convolution of Mamba (arXiv:2312.00752), section 3.4, and Kimi Linear (arXiv:2510.26692),
        section 4.

    Example:
        >>> x, weight = torch.arange(5.0).view(1, 5, 1), torch.tensor([[0.0, 0.0, 10.0, 1.0]])
        >>> whole = causal_conv1d(x, weight, activation=None)
        >>> whole.out.flatten().tolist(), whole.state.flatten().tolist()
        ([0.0, 1.0, 12.0, 23.0, 34.0], [2.0, 3.0, 4.0])
        >>> head = causal_conv1d(x[:, :2], weight, activation=None)
        >>> tail = causal_conv1d(x[:, 2:], weight, state=head.state, activation=None)
        >>> torch.equal(torch.cat([head.out, tail.out], dim=1), whole.out)
        True
    """
    name = "causal_conv1d"
    dims = _check(name, x, weight, bias, activation)
    if cu_seqlens is not None:
        dims["N"] = check_cu_seqlens(name, cu_seqlens, dims["B"], dims["T"])
    if state is not None:
        _check_rows(name, x, state, dims, {"N": dims["N"]} if cu_seqlens is not None else {"N": dims["B"]})
    check_same(name, "device", x=x, weight=weight, bias=bias, state=state, cu_seqlens=cu_seqlens)
    check_state(name, "state", state, donate, x, weight, bias)
    out, new = dispatch(
        name, backend, x, weight, bias, state, activation=activation, cu_seqlens=cu_seqlens, donate=donate
    )
    return ConvOut(out, settle(name, state, new, donate))


@op
def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    *,
    num_accepted: torch.Tensor | None = None,
    activation: str | None = "silu",
    backend: str | None = None,
    donate: bool = False,
) -> ConvOut:
    """Continue the convolution by a few tokens, of which the last ones may be taken back by the next call.

    Without ``num_accepted`` this is :func:`causal_conv1d` with a state. With it, T is the number of tokens to verify
    and the history of row n starts at row ``num_accepted[n] - 1`` of its state::

        history = state[n, a-1 : a-1 + W-1]           a = num_accepted[n]
        out     = the convolution of x[n] after history
        state[n, : W-2+T] = (history ++ x[n])[1:]     later rows keep what they held

    so that the next call can say how many of these T tokens became permanent. A plain step, or :func:`causal_conv1d`,
    may follow only when that number is 1.

    Args:
        x: ``[N, T, D]``, any float dtype; T at most S+1 with ``num_accepted``.
        weight: ``[D, W]``, any float dtype; ``weight[:, W-1]`` multiplies the present token.
        bias: ``[D]``, any float dtype, or ``None``.
        state: ``[N, W-1+S, D]`` in the dtype of ``x``, oldest input first; S is the number of speculative tokens it has
            room for.
        num_accepted: int32 ``[N]``, 1 to S+1: how many tokens of the previous call became permanent, 1 after a prefill.
            On the CPU it is checked; on an accelerator, and in compiled code, it is clamped, because reading it would
            stall.
        activation: ``"silu"`` or ``None``.
        backend: see :func:`glm5fn.use_backend`.
        donate: overwrite ``state`` and return it; the one passed may not be used again.

    Returns:
        ConvOut: ``out [N, T, D]`` in the dtype of ``x`` and the new ``state``.

    Raises:
        ContractError: if an argument has another shape, dtype, device or value than said above.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192), applied to a
        sliding window.

    Example:
        >>> weight = torch.tensor([[0.0, 100.0, 10.0, 1.0]])
        >>> state = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0]).view(1, 5, 1)  # W-1 = 3 inputs, S = 2
        >>> def step(tokens, state, accepted):
        ...     x, accepted = torch.tensor(tokens).view(1, -1, 1), torch.tensor([accepted], dtype=torch.int32)
        ...     return causal_conv1d_update(x, weight, None, state, num_accepted=accepted, activation=None)
        >>> out, state = step([4.0, 5.0, 6.0], state, 1)
        >>> out.flatten().tolist(), state.flatten().tolist()
        ([234.0, 345.0, 456.0], [2.0, 3.0, 4.0, 5.0, 6.0])
        >>> step([9.0], state, 2).out.item()  # 4 and 5 were accepted, 6 was not
        459.0
    """
    name = "causal_conv1d_update"
    dims = _check(name, x, weight, bias, activation)
    _check_rows(name, x, state, dims, {"N": dims["B"]})
    spec = state.shape[1] - (dims["W"] - 1)
    if num_accepted is not None:
        check_num_accepted(name, num_accepted, dims["B"], dims["T"], spec)
    check_same(name, "device", x=x, weight=weight, bias=bias, state=state, num_accepted=num_accepted)
    check_state(name, "state", state, donate, x, weight, bias)
    out, new = dispatch(
        name, backend, x, weight, bias, state, num_accepted=num_accepted, activation=activation, donate=donate
    )
    return ConvOut(out, settle(name, state, new, donate))


def check_num_accepted(op: str, num_accepted: torch.Tensor, rows: int, tokens: int, spec: int) -> None:
    """Check ``num_accepted`` int32 [N] and the number of tokens against a state with room for ``spec`` more tokens."""
    check_shape(op, "num_accepted", num_accepted, "N", {"N": rows})
    check_dtype(op, "num_accepted", num_accepted, (torch.int32,))
    if tokens > spec + 1:
        raise ContractError(
            f"{op}: T must be at most num_spec+1 = {spec + 1} with this state, got {tokens}. Pass fewer tokens, or "
            f"allocate the state with num_spec={tokens - 1}."
        )
    if num_accepted.device.type == "cpu" and not torch.compiler.is_compiling():
        values = num_accepted.tolist()
        if any(not 1 <= a <= spec + 1 for a in values):
            raise ContractError(
                f"{op}: num_accepted must be 1 to num_spec+1 = {spec + 1} in every row (1 after a prefill), got "
                f"{values[:8]}."
            )


def _check(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> dict[str, int]:
    dims: dict[str, int] = {}
    check_shape(op, "x", x, "B T D", dims)
    check_dtype(op, "x", x, FLOATS)
    check_shape(op, "weight", weight, "D W", dims)
    check_dtype(op, "weight", weight, FLOATS)
    if dims["W"] < 1:
        raise ContractError(f"{op}: weight must have at least one tap, got [{dims['D']}, 0].")
    if bias is not None:
        check_shape(op, "bias", bias, "D", dims)
        check_dtype(op, "bias", bias, FLOATS)
    if activation not in ACTIVATIONS:
        raise ContractError(f"{op}: activation must be 'silu' or None, got {activation!r}.")
    return dims


def _check_rows(op: str, x: torch.Tensor, state: torch.Tensor, dims: dict[str, int], rows: dict[str, int]) -> None:
    check_shape(op, "state", state, "N rows D", {**rows, "D": dims["D"]})
    if state.shape[1] < dims["W"] - 1:
        raise ContractError(
            f"{op}: state must hold at least W-1 = {dims['W'] - 1} rows, got {state.shape[1]}: {list(state.shape)}."
        )
    check_same(op, "dtype", x=x, state=state)
