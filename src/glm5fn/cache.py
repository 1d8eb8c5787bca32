"""Caches: what a model remembers between calls, as immutable trees of tensors.

A cache is a value. Functions take one and return the next; the old one stays valid unless ``donate=True`` was passed,
so a notebook can keep any earlier cache and branch from it. All classes are NamedTuples, hence PyTorch pytrees.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from glm5fn.config import Config
from glm5fn.dims import FLOATS
from glm5fn.dispatch import ContractError

__all__ = [
    "IndexCache", "KDACache", "LayerCache", "MLACache", "ModelCache",
    "cache_nbytes", "capacity", "check_cache", "check_device", "check_tree", "describe", "fork", "init_cache",
    "limit_of", "ring_size", "select", "whole_number",
]  # fmt: skip


class KDACache(NamedTuple):
    """What a KDA layer remembers; its size does not depend on the context.

    Attributes:
        conv: ``[B, W-1+num_spec, H*(2K+V)]`` the last inputs of the causal convolution (q, k, v channels side by
            side), oldest first, in the activation dtype.
        state: ``[B, H, V, K]`` float32 recurrent state; with ``num_spec`` > 0 ``[B, num_spec+1, H, V, K]``, one per
            query token.
    """

    conv: torch.Tensor
    state: torch.Tensor


class IndexCache(NamedTuple):
    """What the kpool indexer of an MLA layer remembers.

    Attributes:
        pooled: ``[B, P, I]`` one key per complete pool of ``index_kpool`` tokens, P = ceil(S / index_kpool).
        tail: ``[B, 2, ring, I]`` keys (0) and compression scores (1) of the latest tokens; the token at position p
            sits at ``p % ring``. A pool that a later call completes takes its earlier members from here.
    """

    pooled: torch.Tensor
    tail: torch.Tensor


class MLACache(NamedTuple):
    """What an MLA layer remembers.

    Attributes:
        latent: ``[B, S, R]`` normalised latents of the tokens seen so far, zeros beyond them.
        index: the indexer's part.
    """

    latent: torch.Tensor
    index: IndexCache  # type: ignore[assignment]


LayerCache: TypeAlias = "KDACache | MLACache"


class ModelCache(NamedTuple):
    """The cache of the whole text model.

    Attributes:
        layers: one :class:`KDACache` or :class:`MLACache` per layer, in layer order.
        length: int32 ``[B]`` tokens seen so far, per row.
    """

    layers: tuple[LayerCache, ...]
    length: torch.Tensor


def ring_size(kpool: int, num_spec: int = 0) -> int:
    """Slots of the indexer's tail ring: ``num_spec`` rejected tokens never overwrite a member that a redo needs.

    Example:
        >>> [ring_size(4, s) for s in (0, 1, 4, 5, 12)]
        [4, 8, 8, 16, 16]
    """
    pools = -(-(kpool + num_spec) // kpool)
    return kpool * (1 << (pools - 1).bit_length())


def init_cache(
    cfg: Config,
    batch: int,
    capacity: int,
    *,
    num_spec: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> ModelCache:
    """An empty cache for ``batch`` rows of up to ``capacity`` tokens.

    Args:
        cfg: the model's configuration.
        batch: rows, B.
        capacity: tokens per row that the MLA layers can hold, S. KDA layers have no limit.
        num_spec: draft tokens that a later verification step may feed beside the accepted one.
        device: where the tensors live.
        dtype: activation dtype of convolution states, latents and index keys. Recurrent states are float32 (float64 if
            this is).

    Returns:
        A :class:`ModelCache` of zeros with length 0.

    Raises:
        ContractError: if a number is no whole number or negative, if the capacity exceeds
            ``cfg.max_position_embeddings``, if the dtype is no activation dtype, and if this machine has no such
            device.

    Example:
        >>> import glm5fn
        >>> cfg, _ = glm5fn.load_checkpoint(glm5fn.shipped_checkpoint())
        >>> cache = init_cache(cfg, batch=1, capacity=256)
        >>> cache.length
        tensor([0], dtype=torch.int32)
    """
    batch = whole_number("init_cache", "batch", batch)
    capacity = whole_number("init_cache", "capacity", capacity)
    num_spec = whole_number("init_cache", "num_spec", num_spec)
    if dtype not in FLOATS:
        names = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise ContractError(f"init_cache: dtype must be one of {names}, got {str(dtype).removeprefix('torch.')}.")
    if capacity > cfg.max_position_embeddings:
        raise ContractError(
            "init_cache: capacity must be at most the model's max_position_embeddings "
            f"{cfg.max_position_embeddings}, got {capacity}."
        )

    check_device("init_cache", device)

    def layer(kind: str) -> LayerCache:
        leaf = {
            name: torch.zeros(shape, dtype=_dtype(name, dtype), device=device)
            for name, shape in _shapes(cfg, kind, batch, capacity, num_spec).items()
        }
        if kind == "linear_attention":
            return KDACache(leaf["conv"], leaf["state"])
        return MLACache(leaf["latent"], IndexCache(leaf["index.pooled"], leaf["index.tail"]))

    length = torch.zeros(batch, dtype=torch.int32, device=device)
    return ModelCache(tuple(layer(kind) for kind in cfg.layer_types), length)


def check_device(op: str, device: Any) -> None:
    """Check that tensors can be put on ``device`` on this machine.

    Raises:
        ContractError: naming the operation, the device and PyTorch's reason.
    """
    if torch.compiler.is_compiling():
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:  # PyTorch raises another class for every kind of device
        raise ContractError(f"{op}: device {str(device)!r} cannot be used here. {error}") from error


def whole_number(op: str, name: str, value: Any, least: int | None = 0) -> Any:
    """Return ``value`` as an int if it is one (NumPy's count, booleans do not), at least ``least``.

    Raises:
        ContractError: naming the operation, the argument, its value and what it must be.
    """
    whole = hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)
    if not whole or (least is not None and value < least):
        wanted = f"at least {least}" if whole else "a whole number"
        raise ContractError(f"{op}: {name} must be {wanted}, got {value!r}.")
    return value if isinstance(value, int | torch.SymInt) else operator.index(value)


def _shapes(cfg: Config, kind: str, batch: int, capacity: int, num_spec: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a layer's cache, named as :func:`describe` names it."""
    H, K, I = cfg.linear_num_heads, cfg.linear_head_dim, cfg.index_head_dim
    if kind == "linear_attention":
        slots = (num_spec + 1,) if num_spec else ()
        return {
            "conv": (batch, cfg.linear_conv_kernel_dim - 1 + num_spec, 3 * H * K),
            "state": (batch, *slots, H, K, K),
        }
    return {
        "latent": (batch, capacity, cfg.kv_lora_rank),
        "index.pooled": (batch, -(-capacity // cfg.index_kpool), I),
        "index.tail": (batch, 2, ring_size(cfg.index_kpool, num_spec), I),
    }


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if name == "state" else dtype


def _leaves(layer: LayerCache) -> dict[str, torch.Tensor]:
    if isinstance(layer, KDACache):
        return {"conv": layer.conv, "state": layer.state}
    return {"latent": layer.latent, "index.pooled": layer.index.pooled, "index.tail": layer.index.tail}


def check_tree(op: str, cache: Any) -> None:
    """Check that ``cache`` is built as :func:`init_cache` builds it: these types, and tensors as leaves.

    Raises:
        ContractError: naming the operation, the part that is something else, and what it must be.
    """
    _check_type(op, "", cache, ModelCache)
    _check_type(op, ".length", cache.length, torch.Tensor)
    _check_type(op, ".layers", cache.layers, tuple)
    for number, layer in enumerate(cache.layers):
        where = f".layers[{number}]"
        _check_type(op, where, layer, (KDACache, MLACache))
        if isinstance(layer, MLACache):
            _check_type(op, where + ".index", layer.index, IndexCache)
        for name, x in _leaves(layer).items():
            if not isinstance(x, torch.Tensor):
                _check_type(op, f"{where}.{name}", x, torch.Tensor)


def _check_type(op: str, where: str, found: Any, wanted: type | tuple[type, ...]) -> None:
    if not isinstance(found, wanted):
        names = " or ".join(kind.__name__ for kind in (wanted if isinstance(wanted, tuple) else (wanted,)))
        raise ContractError(
            f"{op}: cache{where} must be a {names}, got {type(found).__name__}. Use what init_cache or an earlier call "
            "returned."
        )


def check_cache(
    op: str, cfg: Config, cache: ModelCache, *, batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that ``cache`` is one that :func:`init_cache` makes for this model, whatever its capacity and num_spec.

    Raises:
        ContractError: naming the operation, the tensor, what it is and what it must be.
    """
    check_tree(op, cache)
    if len(cache.layers) != cfg.num_hidden_layers:
        raise ContractError(f"{op}: cfg has {cfg.num_hidden_layers} layers, but cache has {len(cache.layers)}.")
    if tuple(cache.length.shape) != (batch,):
        raise ContractError(
            f"{op}: tokens has {batch} rows, but cache has {', '.join(map(str, cache.length.shape))}. "
            f"Use init_cache(cfg, batch={batch}, ...)."
        )
    room, num_spec = limit_of(cache) or 0, _num_spec(cfg, cache)
    _check_leaf(op, "length", cache.length, ((batch,), torch.int32, device))
    for number, (kind, layer) in enumerate(zip(cfg.layer_types, cache.layers, strict=True)):
        wanted = _shapes(cfg, kind, batch, room, num_spec)
        found = _leaves(layer)
        if found.keys() != wanted.keys():
            raise ContractError(
                f"{op}: layer {number} of cfg is {kind}, but cache.layers[{number}] is {type(layer).__name__} with "
                f"{', '.join(found)}. Use the cache of this model."
            )
        for name, shape in wanted.items():
            _check_leaf(op, f"layers[{number}].{name}", found[name], (shape, _dtype(name, dtype), device))


def _num_spec(cfg: Config, cache: ModelCache) -> int:
    """The ``num_spec`` that ``cache`` was made for, or a number that needs the same sizes."""
    leaves = [_leaves(layer) for layer in cache.layers]
    exact = [leaf["conv"].shape[1] - (cfg.linear_conv_kernel_dim - 1) for leaf in leaves if "conv" in leaf]
    rounded_up = [leaf["index.tail"].shape[2] - cfg.index_kpool for leaf in leaves if "index.tail" in leaf]
    return max([*exact, *rounded_up, 0][0], 0)


def _check_leaf(op: str, name: str, x: torch.Tensor, wanted: tuple[tuple[int, ...], torch.dtype, torch.device]) -> None:
    found = (tuple(x.shape), x.dtype, x.device)
    if found != wanted:
        a, b = (f"{list(shape)} {str(dtype)[6:]} on {device}" for shape, dtype, device in (found, wanted))
        raise ContractError(
            f"{op}: cache.{name} must be {b} for this config and these params, got {a}. Make the cache with "
            "init_cache(cfg, ..., dtype=..., device=...)."
        )


def capacity(cache: ModelCache) -> int | None:
    """Tokens per row that ``cache`` can hold, or None if no layer limits it (a model of KDA layers only).

    Raises:
        ContractError: if ``cache`` is no model's cache.
    """
    check_tree("capacity", cache)
    return limit_of(cache)


def limit_of(cache: ModelCache) -> int | None:
    """:func:`capacity` of what is known to be a cache."""
    return next((layer.latent.shape[1] for layer in cache.layers if isinstance(layer, MLACache)), None)


def fork(cache: ModelCache) -> ModelCache:
    """A copy of ``cache`` that shares no memory with it, to keep a branch safe from later ``donate=True`` calls.

    Raises:
        ContractError: if ``cache`` is no model's cache.
    """
    check_tree("fork", cache)
    return pytree.tree_map(torch.clone, cache)


def select(cache: ModelCache, rows: Sequence[int] | torch.Tensor) -> ModelCache:
    """The cache of the given ``rows``, in that order, as a copy. A repeated row is how one prompt becomes a beam.

    Raises:
        ContractError: if a row does not exist, and if ``cache`` is no model's cache.
    """
    check_tree("select", cache)
    try:
        index = torch.as_tensor(rows, device=cache.length.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(f"select: rows must be a list of row numbers, got {rows!r}.") from error
    batch = cache.length.shape[0]
    if index.dim() != 1 or (index.numel() and index.dtype not in (torch.int64, torch.int32)):
        raise ContractError(
            f"select: rows must be a list of row numbers, got {str(index.dtype)[6:]} {list(index.shape)}."
        )
    index = index.long()
    wrong = [r for r in index.tolist() if not 0 <= r < batch]
    if wrong:
        raise ContractError(f"select: rows must be in 0..{batch - 1} for a cache of {batch} rows, got {wrong}.")
    return pytree.tree_map(lambda x: x.index_select(0, index), cache)


def cache_nbytes(cache: ModelCache) -> int:
    """Bytes of all tensors in ``cache``.

    Raises:
        ContractError: if ``cache`` is no model's cache.
    """
    check_tree("cache_nbytes", cache)
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(cache))


def describe(cache: ModelCache) -> str:
    """``cache`` as a readable tree with shapes, dtypes and bytes.

    Raises:
        ContractError: if ``cache`` is no model's cache.

    Example:
        >>> import glm5fn
        >>> cfg = glm5fn.Config.from_pretrained(glm5fn.shipped_checkpoint())
        >>> print(describe(init_cache(cfg, 1, 64)).splitlines()[0].startswith("ModelCache: 1 row, "))
        True
    """
    check_tree("describe", cache)
    rows = cache.length.shape[0]
    limit = limit_of(cache)
    size = _size(cache_nbytes(cache))
    room = "no limit of tokens" if limit is None else f"capacity {limit} tokens"
    lines = [f"ModelCache: {rows} row{'s' * (rows != 1)}, {room}, {size}"]
    known = "" if cache.length.device.type == "meta" else f" = {cache.length.tolist()}"
    lines.append(_leaf("length", cache.length) + known)
    for number, layer in enumerate(cache.layers):
        lines.append(f"  layers[{number}] {type(layer).__name__}")
        lines += ["  " + _leaf(name, x) for name, x in _leaves(layer).items()]
    return "\n".join(lines)


def _leaf(name: str, x: torch.Tensor) -> str:
    shape = ", ".join(map(str, x.shape))
    return f"  {name:<13} [{shape}] {str(x.dtype).removeprefix('torch.')} {_size(x.numel() * x.element_size())}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
