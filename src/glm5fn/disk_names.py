"""Where each leaf of the parameter tree lies on disk, in the official layout.

One table serves reading and writing. A leaf is one tensor, or several put together: projections that are separate on
disk are rows of one leaf, experts are stacked, and ``kv_b_proj`` is two leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from glm5fn.config import VisionConfig
from glm5fn.params import KDA, MLA, MLP, MTP, HyperConnection, Indexer, Layer, MoE, ParamInfo, Params

__all__ = ["PREFIXES", "VISION_PREFIX", "Entry", "Slot", "entries", "vision_names"]

PREFIXES = ("model.language_model.", "model.")
"""What text tensors' names start with: in the full model, and in text-only exports."""

VISION_PREFIX = "model.visual."


class Slot(NamedTuple):
    """One tensor on disk.

    Args:
        name: its full name.
        shape: its shape on disk.
        part: what it fills of the entry's storage: ``storage[part].view(shape)``.
        float32: whether it must be float32 on disk.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int | slice, ...]
    float32: bool

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor may be stored as block-wise FP8."""
        return len(self.shape) == 2 and self.name.endswith(".weight")


class Entry(NamedTuple):
    """Tensors that are read into one allocation, the storage.

    Args:
        leaves: path and description of the leaves: one, or several that are slices of the storage along axis 1.
        shape: shape of the storage.
        slots: the tensors on disk; together they cover the storage.
    """

    leaves: dict[str, ParamInfo]
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def info(self) -> ParamInfo:
        """Description of the first leaf; all have the same dtype."""
        return next(iter(self.leaves.values()))

    def split(self, storage: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the leaves by path, as views of the storage."""
        if len(self.leaves) == 1:
            return dict.fromkeys(self.leaves, storage)
        parts = storage.split([info.shape[1] for info in self.leaves.values()], dim=1)
        return dict(zip(self.leaves, parts, strict=True))

    def join(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the storage from the leaves by path; the inverse of `split`."""
        parts = [leaves[path] for path in self.leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _Disk(NamedTuple):
    how: str
    names: tuple[str, ...]


def _whole(name: str) -> _Disk:
    return _Disk("whole", (name,))


def _float32(name: str) -> _Disk:
    return _Disk("float32", (name,))


def _rows(*names: str) -> _Disk:
    return _Disk("rows", names)


def _conv(*names: str) -> _Disk:
    return _Disk("conv", names)


def _flat(name: str) -> _Disk:
    return _Disk("flat", (name,))


def _experts(*names: str) -> _Disk:
    return _Disk("experts", tuple(f"experts.{{e}}.{name}" for name in names))


# How the leaves of each type are stored.
#   whole    as one tensor of the same shape
#   float32  the same, and it must be float32 on disk too: a rounded one has lost what the model needs
#   rows     as tensors of equally many rows, one below the other
#   conv     the same, each with an axis of size 1 in the middle
#   flat     as one tensor with all axes merged
#   experts  per expert (the first axis) as rows
#   heads    the first of two leaves [H, ·, R] that are one tensor: per head the rows of both
# A name that starts with "/" is complete, others follow the name of the place.
_TABLE: dict[type, dict[str, _Disk]] = {
    Params: {
        "embed": _whole("embed_tokens.weight"),
        "norm": _whole("norm.weight"),
        "lm_head": _whole("/lm_head.weight"),
    },
    Layer: {
        "attn_norm": _whole("input_layernorm.weight"),
        "ffn_norm": _whole("post_attention_layernorm.weight"),
    },
    HyperConnection: {"fn": _whole("fn"), "base": _float32("base"), "scale": _float32("scale")},
    KDA: {
        "qkv_proj": _rows("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "conv": _conv("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
        "b_proj": _whole("b_proj.weight"),
        "f_a": _whole("f_a_proj.weight"),
        "f_b": _whole("f_b_proj.weight"),
        "g_a": _whole("g_a_proj.weight"),
        "g_b": _whole("g_b_proj.weight"),
        "A_log": _whole("A_log"),
        "dt_bias": _flat("dt_bias"),
        "o_norm": _whole("o_norm.weight"),
        "o_proj": _whole("o_proj.weight"),
    },
    MLA: {
        "q_a": _whole("q_a_proj.weight"),
        "q_a_norm": _whole("q_a_layernorm.weight"),
        "q_b": _whole("q_b_proj.weight"),
        "kv_a": _whole("kv_a_proj_with_mqa.weight"),
        "kv_a_norm": _whole("kv_a_layernorm.weight"),
        "w_uk": _Disk("heads", ("kv_b_proj.weight",)),
        "o_proj": _whole("o_proj.weight"),
    },
    Indexer: {
        "wq_b": _whole("wq_b.weight"),
        "wk": _whole("wk.weight"),
        "k_norm_weight": _whole("k_norm.weight"),
        "k_norm_bias": _whole("k_norm.bias"),
        "weights_proj": _whole("weights_proj.weight"),
        "compress_gate": _whole("index_kpool_compress_gate"),
        "compress_ape": _whole("index_kpool_compress_ape"),
    },
    MLP: {"gate_up": _rows("gate_proj.weight", "up_proj.weight"), "down": _whole("down_proj.weight")},
    MoE: {
        "gate": _whole("gate.weight"),
        "bias": _whole("gate.e_score_correction_bias"),
        "gate_up": _experts("gate_proj.weight", "up_proj.weight"),
        "down": _experts("down_proj.weight"),
    },
    MTP: {
        "enorm": _whole("enorm.weight"),
        "hnorm": _whole("hnorm.weight"),
        "eh_proj": _whole("eh_proj.weight"),
        "attn_norm": _whole("input_layernorm.weight"),
        "ffn_norm": _whole("post_attention_layernorm.weight"),
        "norm": _whole("shared_head.norm.weight"),
    },
}

_PLACES = {
    "attn_hc": "hc_attn_",
    "ffn_hc": "hc_ffn_",
    "attn": "self_attn.",
    "indexer": "indexer.",
    "ffn": "mlp.",
    "shared": "shared_experts.",
}


def entries(tree: Params, prefix: str = PREFIXES[0]) -> Iterator[Entry]:
    """Yield how the leaves of an abstract tree, complete or in part, are stored; ``None`` in it is skipped.

    A tied head is not stored.

    Example:
        >>> from glm5fn.config import Config
        >>> from glm5fn.params import abstract
        >>> all_entries = list(entries(abstract(Config(num_hidden_layers=1))))
        >>> list(all_entries[3].leaves), [slot.name for slot in all_entries[3].slots]
        (['layers.0.attn_hc.scale'], ['model.language_model.layers.0.hc_attn_scale'])
    """
    yield _entry("embed", tree.embed, _TABLE[Params]["embed"], prefix)
    for i, layer in enumerate(tree.layers):
        yield from _node(layer, f"layers.{i}", f"{prefix}layers.{i}.")
    for i, mtp in enumerate(tree.mtp):
        yield from _node(mtp, f"mtp.{i}", f"{prefix}layers.{len(tree.layers) + i}.")
    yield _entry("norm", tree.norm, _TABLE[Params]["norm"], prefix)
    if tree.lm_head is not tree.embed:
        yield _entry("lm_head", tree.lm_head, _TABLE[Params]["lm_head"], prefix)


def _node(node: Any, path: str, place: str) -> Iterator[Entry]:
    if node is None:
        return
    for field in node._fields:
        child, child_path = getattr(node, field), f"{path}.{field}"
        if child is None or isinstance(child, tuple):
            yield from _node(child, child_path, place + _PLACES[field])
        elif field == "w_uk":
            yield _heads_entry(path, node, _TABLE[MLA]["w_uk"], place)
        elif field != "w_uv":
            yield _entry(child_path, child, _TABLE[type(node)][field], place)


def _entry(path: str, info: ParamInfo, disk: _Disk, place: str) -> Entry:
    names = [name[1:] if name.startswith("/") else place + name for name in disk.names]
    shape = info.shape
    if disk.how == "experts":
        slots = [
            Slot(name.format(e=e), (rows.stop - rows.start, *shape[2:]), (e, rows), False)
            for e in range(shape[0])
            for name, rows in zip(names, _parts(shape[1], len(names)), strict=True)
        ]
    else:
        slots = []
        for name, rows in zip(names, _parts(shape[0], len(names)), strict=True):
            stored = (rows.stop - rows.start, *shape[1:])
            if disk.how == "conv":
                stored = (stored[0], 1, stored[1])
            elif disk.how == "flat":
                stored = (stored[0] * stored[1],)
            slots.append(Slot(name, stored, (rows,), disk.how == "float32"))
    return Entry({path: info}, shape, tuple(slots))


def _heads_entry(path: str, node: MLA, disk: _Disk, place: str) -> Entry:
    (heads, dk, rank), dv = node.w_uk.shape, node.w_uv.shape[1]
    slot = Slot(place + disk.names[0], (heads * (dk + dv), rank), (slice(0, heads),), False)
    leaves = {f"{path}.w_uk": node.w_uk, f"{path}.w_uv": node.w_uv}
    return Entry(leaves, (heads, dk + dv, rank), (slot,))


def _parts(rows: int, parts: int) -> list[slice]:
    size = rows // parts
    return [slice(i * size, (i + 1) * size) for i in range(parts)]


def vision_names(vision: VisionConfig) -> set[str]:
    """Return the names of the vision tower's tensors, which are recognised but not loaded.

    Example:
        >>> len(vision_names(VisionConfig(depth=24)))
        347
    """
    names = {f"patch_embed.proj.{part}" for part in ("weight", "bias")}
    names |= {"post_layernorm.weight", "downsample.weight", "downsample.bias", "merger.proj.weight"}
    names |= {"merger.post_projection_norm.weight", "merger.post_projection_norm.bias"}
    names |= {f"merger.{part}_proj.weight" for part in ("gate", "up", "down")}
    linears = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    block = {f"{name}.weight" for name in (*linears, "norm1", "norm2", "attn.q_norm", "attn.k_norm")}
    block |= {f"{name}.bias" for name in linears}
    names |= {f"blocks.{i}.{name}" for i in range(vision.depth) for name in block}
    return {VISION_PREFIX + name for name in names}
