"""The text model: :func:`forward`, :func:`prefill`, :func:`decode_step`. Pure functions: cache in, cache out.

All three run the same layers; they differ in which logits they return and in what they may read on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from glm5fn.blocks import Rows, autocast_off, decoder_layer
from glm5fn.cache import ModelCache, check_cache, check_tree, init_cache, limit_of
from glm5fn.config import Config
from glm5fn.dims import check_dtype, check_range, check_same, check_shape, compute_dtype
from glm5fn.dispatch import ContractError
from glm5fn.ops.norm import rms_norm
from glm5fn.params import Params, abstract, named_leaves

__all__ = ["check_params", "decode_step", "forward", "hidden_states", "prefill"]


def forward(
    params: Params,
    cfg: Config,
    tokens: torch.Tensor,
    cache: ModelCache | None = None,
    *,
    lengths: Sequence[int] | torch.Tensor | None = None,
) -> tuple[torch.Tensor, ModelCache]:
    """Logits of every token.

    The model cannot run under ``torch.vmap`` (it reads lengths and writes caches by row): batch rows are its own
    dimension for that. Autocast does not reach into it: the dtype of the parameters decides.

    Args:
        params: parameters from :func:`load_checkpoint` or :func:`init_params`.
        cfg: the model's configuration.
        tokens: integer ``[B, T]`` token ids that follow what ``cache`` holds.
        cache: the cache to continue from; None starts new sequences in a cache of capacity T.
        lengths: ``[B]`` valid tokens per row when rows are padded on the right (with any ids); None means all T. Read
            on the host.

    Returns:
        Logits ``[B, T, Vocab]`` in the parameters' dtype, zero where a row is padded, and the next cache.

    Raises:
        ContractError: on params that do not belong to ``cfg``, on tokens outside the vocabulary, on a cache that does
            not fit the model or the batch, and when a row would exceed the cache's capacity. Nothing has been written
            then.

    Example:
        >>> import torch, glm5fn
        >>> cfg, params = glm5fn.load_checkpoint(glm5fn.shipped_checkpoint(), dtype=torch.float32)
        >>> logits, cache = forward(params, cfg, torch.tensor([[72, 105]]))
        >>> logits.shape[:2], cache.length.tolist()
        (torch.Size([1, 2]), [2])
    """
    hidden, cache = hidden_states(params, cfg, tokens, cache, lengths=lengths, op="forward")
    return _head(params, hidden), cache


def prefill(
    params: Params,
    cfg: Config,
    tokens: torch.Tensor,
    cache: ModelCache,
    *,
    lengths: Sequence[int] | torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[torch.Tensor, ModelCache]:
    """Feed a prompt, or the next piece of one: call it again to continue, any split gives the same result.

    Args:
        params: parameters from :func:`load_checkpoint` or :func:`init_params`.
        cfg: the model's configuration.
        tokens: integer ``[B, T]``.
        cache: from :func:`init_cache` or an earlier call.
        lengths: ``[B]`` valid tokens per row when rows are padded on the right; 0 leaves a row as it was. Read on the
            host.
        donate: the old cache's memory may be reused; do not use ``cache`` afterwards.

    Returns:
        Logits ``[B, Vocab]`` of each row's last valid token (zeros for a row with none), and the next cache.

    Raises:
        ContractError: as :func:`forward`.

    Example:
        >>> import torch, glm5fn
        >>> cfg, params = glm5fn.load_checkpoint(glm5fn.shipped_checkpoint(), dtype=torch.float32)
        >>> cache = glm5fn.init_cache(cfg, 1, 16, dtype=torch.float32)
        >>> logits, cache = prefill(params, cfg, torch.tensor([[72, 105, 33]]), cache)
        >>> logits, cache = decode_step(params, cfg, logits.argmax(-1), cache)
        >>> cache.length.tolist()
        [4]
    """
    check_tree("prefill", cache)
    hidden, new_cache = hidden_states(params, cfg, tokens, cache, lengths=lengths, donate=donate, op="prefill")
    B, T = tokens.shape
    if T == 0:
        return hidden.new_zeros(B, params.lm_head.shape[0]), new_cache
    if lengths is None:
        return _head(params, hidden[:, -1]), new_cache
    count = torch.as_tensor(lengths, device=hidden.device).long()
    # A row without tokens is all padding, whose hidden states are zeros.
    last = hidden[torch.arange(B, device=hidden.device), (count - 1).clamp(min=0)]
    return _head(params, last), new_cache


def decode_step(
    params: Params, cfg: Config, tokens: torch.Tensor, cache: ModelCache, *, donate: bool = False
) -> tuple[torch.Tensor, ModelCache]:
    """One token for every row.

    Nothing is read from an accelerator, so steps queue without stalling it. That is also why an overflow of the
    capacity is an error only where the lengths are on the CPU; elsewhere, and in captured graphs, the caller counts
    (:func:`generate` does), and a token too many overwrites the last entry of its row.

    Args:
        params: parameters from :func:`load_checkpoint` or :func:`init_params`.
        cfg: the model's configuration.
        tokens: integer ``[B]``.
        cache: from :func:`prefill` or an earlier step.
        donate: the old cache's memory may be reused; do not use ``cache`` afterwards.

    Returns:
        Logits ``[B, Vocab]`` and the next cache.

    Raises:
        ContractError: as :func:`forward`.
    """
    op = "decode_step"
    check_shape(op, "tokens", tokens, "B", {})
    check_params(op, params, cfg)
    _check(params, cfg, tokens, cache, op)
    _check_vocabulary(params, tokens, op)
    longest = _check_capacity(cache, [1] * tokens.shape[0], op)
    hidden, layers = _run(params, cfg, tokens[:, None], cache, Rows(cache.length, longest=longest), donate)
    return _head(params, hidden[:, 0]), ModelCache(layers, cache.length + 1)


def hidden_states(
    params: Params,
    cfg: Config,
    tokens: torch.Tensor,
    cache: ModelCache | None = None,
    *,
    lengths: Sequence[int] | torch.Tensor | None = None,
    donate: bool = False,
    op: str = "hidden_states",
) -> tuple[torch.Tensor, ModelCache]:
    """Like :func:`forward`, but the hidden states ``[B, T, D]`` after the final norm, before ``lm_head``."""
    check_shape(op, "tokens", tokens, "B T", {})
    B, T = tokens.shape
    check_params(op, params, cfg)
    if cache is None:
        cache = init_cache(cfg, B, T, device=params.embed.device, dtype=params.embed.dtype)
    _check(params, cfg, tokens, cache, op)
    counts = [T] * B if lengths is None else _counts(lengths, B, T, op)
    longest = _check_capacity(cache, counts, op)
    if all(count == T for count in counts):
        _check_vocabulary(params, tokens, op)
        hidden, layers = _run(params, cfg, tokens, cache, Rows(cache.length, longest=longest), donate)
        return hidden, ModelCache(layers, cache.length + T)

    cu_seqlens = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=tokens.device)
    packed = torch.cat([tokens[b, :count] for b, count in enumerate(counts)])[None]
    valid = torch.arange(T, device=tokens.device) < cu_seqlens.diff()[:, None]
    _check_vocabulary(params, tokens.where(valid, 0), op)
    rows = Rows(cache.length, tuple(counts), cu_seqlens, longest)
    hidden, layers = _run(params, cfg, packed, cache, rows, donate)
    padded = pad_sequence(list(hidden[0].split(counts)), batch_first=True)
    padded = F.pad(padded, (0, 0, 0, T - padded.shape[1]))
    return padded, ModelCache(layers, cache.length + cu_seqlens.diff())


def _head(params: Params, hidden: torch.Tensor) -> torch.Tensor:
    with autocast_off(hidden):
        return F.linear(hidden, params.lm_head)


def _run(
    params: Params, cfg: Config, tokens: torch.Tensor, cache: ModelCache, rows: Rows, donate: bool
) -> tuple[torch.Tensor, tuple]:
    x = F.embedding(tokens, params.embed)
    if cfg.mhc:
        x = x[:, :, None].expand(-1, -1, cfg.hc_mult, -1)
    layers = []
    with autocast_off(x):
        for p, layer_cache in zip(params.layers, cache.layers, strict=True):
            assert p is not None
            x, layer_cache = decoder_layer(p, cfg, x, layer_cache, rows, donate=donate)
            layers.append(layer_cache)
        if cfg.mhc:
            x = x.to(compute_dtype(x.dtype)).mean(2).to(x.dtype)
        return rms_norm(x, params.norm, eps=cfg.rms_norm_eps), tuple(layers)


def _counts(lengths: Sequence[int] | torch.Tensor, batch: int, tokens: int, op: str) -> list[int]:
    try:
        counts: Any = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    except TypeError:
        counts = lengths
    whole = isinstance(counts, list) and not any(isinstance(n, bool) or not hasattr(n, "__index__") for n in counts)
    if not whole or len(counts) != batch or any(not 0 <= n <= tokens for n in counts):
        raise ContractError(
            f"{op}: lengths must be {batch} integers, one per row, each in 0..T={tokens}, got {counts}."
        )
    return [int(n) for n in counts]


def _check(params: Params, cfg: Config, tokens: torch.Tensor, cache: ModelCache, op: str) -> None:
    check_dtype(op, "tokens", tokens, (torch.int64, torch.int32))
    check_same(op, "device", tokens=tokens, params=params.embed)
    check_cache(op, cfg, cache, batch=tokens.shape[0], dtype=params.embed.dtype, device=params.embed.device)


def check_params(op: str, params: Params, cfg: Config) -> None:
    """Raise unless ``params`` have the types and shapes that ``cfg`` says, apart from those of the MTP layers."""
    embed = getattr(params, "embed", None)
    for name, value, kind in (("params", params, Params), ("cfg", cfg, Config), ("params.embed", embed, torch.Tensor)):
        if not isinstance(value, kind):
            raise ContractError(
                f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}. load_checkpoint returns both."
            )
    missing = [i for i, p in enumerate(params.layers) if p is None]
    if missing:
        raise ContractError(
            f"{op}: params were loaded without layers {missing}. Load the checkpoint without layers= to run it."
        )
    if len(params.layers) != cfg.num_hidden_layers:
        raise ContractError(f"{op}: cfg has {cfg.num_hidden_layers} layers, but params has {len(params.layers)}.")
    if torch.compiler.is_compiling():
        return
    # This runs on every step, so it only compares shapes. Names are made when they are needed.
    shapes: list[Any] = []
    _collect_shapes(params._replace(mtp=()), shapes)
    if shapes != _wanted_shapes(cfg):
        _refuse_params(op, params, cfg)


def _collect_shapes(tree: Any, shapes: list[Any]) -> None:
    for child in tree:
        if isinstance(child, tuple):
            _collect_shapes(child, shapes)
        else:
            shapes.append(getattr(child, "shape", None))


@functools.lru_cache(maxsize=16)
def _wanted_shapes(cfg: Config) -> list[Any]:
    shapes: list[Any] = []
    _collect_shapes(abstract(cfg)._replace(mtp=()), shapes)
    return shapes


def _refuse_params(op: str, params: Params, cfg: Config) -> None:
    found, wanted = (dict(named_leaves(tree._replace(mtp=()))) for tree in (params, abstract(cfg)))
    for name in [*wanted, *found]:
        here, there = (_shown(tree.get(name)) for tree in (found, wanted))
        if here != there:
            raise ContractError(
                f"{op}: params do not belong to cfg: params.{name} is {here}, but for this cfg it must be {there}. "
                "Use params and cfg of one load_checkpoint, or init_params(cfg)."
            )


def _shown(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    return f"[{', '.join(map(str, leaf.shape))}]" if hasattr(leaf, "shape") else type(leaf).__name__


def _check_vocabulary(params: Params, tokens: torch.Tensor, op: str) -> None:
    check_range(op, "tokens", tokens, 0, params.embed.shape[0] - 1, "the vocabulary")


def _check_capacity(cache: ModelCache, counts: list[int], op: str) -> int | None:
    """Raise if a row would outgrow the cache; return the length of the longest row afterwards, if the host may know."""
    if torch.compiler.is_compiling() or cache.length.device.type == "meta":
        return None
    if op == "decode_step" and cache.length.device.type != "cpu":
        return None
    after = [
        (length + count, row, length)
        for row, (length, count) in enumerate(zip(cache.length.tolist(), counts, strict=True))
    ]
    limit = limit_of(cache)
    if not after:
        return 0
    negative = [(row, length) for _, row, length in after if length < 0]
    if negative:
        row, length = negative[0]
        raise ContractError(
            f"{op}: cache.length must be at least 0, got {length} in row {row}. Use a cache as init_cache or an "
            "earlier call returned it."
        )
    total, row, length = max(after)
    if limit is not None and total > limit:
        raise ContractError(
            f"{op}: row {row} holds {length} tokens and {total - length} more make {total}, but the cache has capacity "
            f"{limit}. Make a larger one with init_cache(..., capacity={total})."
        )
    return total
