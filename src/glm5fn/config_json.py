"""``config.json`` to `Config` and back: nested and flat layouts, aliases, older spellings, schedules as patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from glm5fn.config import Config, ConfigError, VisionConfig, fail, is_int, layer_indices, mlp_schedule

__all__ = ["read", "write"]

# --- reading --------------------------------------------------------------------------------------------------------

_MODEL_TYPES = ("glm5_next", "glm5_next_text")
_TEXT_FIELDS = {f.name for f in attrs.fields(Config)} - {"vision", "extra"}
# Written at the top level of the nested layout; read from either place, like every other field.
_TOP_FIELDS = {name for name in _TEXT_FIELDS if name.startswith(("image_", "video_"))} | {"tie_word_embeddings"}
_VISION_FIELDS = {f.name for f in attrs.fields(VisionConfig)}
_VISION_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
# Other ways to say what a text field says; read from either place too.
_TEXT_ALIASES = {
    "num_local_experts",
    "linear_attn_config",
    "first_k_dense_replace",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
}
_LEGACY_LAYER_TYPES = {
    "full_attention": "indexed_attention",
    "attention": "indexed_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
# Fields for which null in the file means the same as leaving them out.
_NULLABLE = {
    "num_key_value_heads",
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "moe_router_dtype",
    "num_nextn_predict_layers",
    "index_share_for_mtp_iteration",
}


def read(data: Mapping[str, Any]) -> Config:
    """Read the content of a ``config.json``, nested or flat; see `Config.from_dict`."""
    return _Reader(data).read()


class _Reader:
    """Reads one file: takes the known keys out of a copy, and what is left over is ``extra``."""

    def __init__(self, data: Mapping[str, Any]):
        self.top = _mapping("config.json", data)
        if "text_config" in self.top:
            self.text = _mapping("text_config", self.top.pop("text_config"))
            self.text_prefix = "text_config."
        else:
            self.text, self.text_prefix = self.top, ""
        self.extra: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}

    def read(self) -> Config:
        self._check_model_type()
        self._check_quantization()
        vision = self._vision()
        self._gather_aliases()
        for name in sorted(_TEXT_FIELDS):
            self._take(name)
        self._experts_alias()
        self._linear_attn_config()
        self._schedules()
        # What follows from other fields, and so carries no information.
        self.text.pop("head_dim", None)
        self.text.pop("qk_head_dim", None)
        self.extra |= {self.text_prefix + name: value for name, value in self.text.items()}
        self.extra |= dict(self.top)
        return Config(vision=vision, extra=self.extra, **self.fields)

    def _check_model_type(self) -> None:
        for section, prefix in ((self.top, ""), (self.text, self.text_prefix)):
            found = section.pop("model_type", None)
            if found is not None and found not in _MODEL_TYPES:
                raise fail(f"{prefix}model_type", found, " or ".join(map(repr, _MODEL_TYPES)))

    def _check_quantization(self) -> None:
        found = self.top.get("quantization_config")
        if found is None:
            return
        found = _mapping("quantization_config", found)
        if found.get("quant_method") not in ("fp8", "quark"):
            raise fail("quantization_config.quant_method", found.get("quant_method"), "'fp8' or 'quark'")
        block = found.get("weight_block_size", [128, 128])
        if block != [128, 128]:
            raise fail("quantization_config.weight_block_size", block, "[128, 128]")

    def _vision(self) -> VisionConfig | None:
        found = self.top.pop("vision_config", None)
        if found is None:
            return None
        section = _mapping("vision_config", found)
        for alias, name in _VISION_ALIASES.items():
            if alias in section:
                section.setdefault(name, section.pop(alias))
        section.pop("model_type", None)
        known = {name: section.pop(name) for name in _VISION_FIELDS & section.keys()}
        self.extra |= {f"vision_config.{name}": value for name, value in section.items()}
        return VisionConfig(**known)

    def _take(self, name: str) -> None:
        found = [section.pop(name) for section in (self.text, self.top) if name in section]
        values = [value for value in found if value is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise ConfigError(
                f"{name} must be the same in both places, got {values[0]!r} in text_config and {values[1]!r} at the "
                f"top level."
            )
        if values:
            self.fields[name] = values[0]
        elif found and name not in _NULLABLE:
            self.fields[name] = None

    def _gather_aliases(self) -> None:
        """Other names of text fields may stand at the top level too, as the fields themselves may."""
        if self.text is self.top:
            return
        for name in sorted(_TEXT_ALIASES & self.top.keys()):
            value = self.top.pop(name)
            if self.text.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} must be the same in both places, got {self.text[name]!r} in text_config and {value!r} at "
                    f"the top level."
                )

    def _experts_alias(self) -> None:
        alias, name = "num_local_experts", "n_routed_experts"
        if alias not in self.text:
            return
        value = self.text.pop(alias)
        if self.fields.setdefault(name, value) != value:
            raise ConfigError(
                f"{alias} is another name of {name} and must be equal, got {value!r} and {self.fields[name]!r}."
            )

    def _linear_attn_config(self) -> None:
        found = self.text.pop("linear_attn_config", None)
        if found is None:
            return
        section = _mapping("linear_attn_config", found)
        for key, name in _LINEAR_KEYS.items():
            if key in section:
                self.fields[name] = section.pop(key)
        if section.pop("safe_gate", True) and self.fields.get("linear_lower_bound", -5.0) is None:
            self.fields["linear_lower_bound"] = -5.0
        lists: dict[str, Any] = {key: section.pop(key) for key in ("kda_layers", "full_attn_layers") if key in section}
        if lists and "layer_types" not in self.fields:
            self._check_layer_lists(lists)
        self.extra |= {f"{self.text_prefix}linear_attn_config.{key}": value for key, value in section.items()}

    def _check_layer_lists(self, lists: dict[str, Any]) -> None:
        # Some models count these lists from 0 and some from 1, so they may confirm the schedule but not set it.
        plain = Config(num_hidden_layers=self.fields.get("num_hidden_layers", 45))
        for key, wanted in (("kda_layers", plain.kda_layers), ("full_attn_layers", plain.mla_layers)):
            if key in lists and lists[key] != list(wanted):
                raise ConfigError(
                    f"linear_attn_config.{key} must be {list(wanted)} (every fourth layer is MLA, counted from 0) when "
                    f"there is no layer_types, got {lists[key]!r}; give layer_types for another schedule."
                )

    def _schedules(self) -> None:
        layers = self.fields.get("num_hidden_layers", attrs.fields(Config).num_hidden_layers.default)
        kinds = self.fields.get("layer_types")
        if isinstance(kinds, list | tuple):
            self.fields["layer_types"] = tuple(
                _LEGACY_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds
            )
        dense = self.text.pop("first_k_dense_replace", None)
        if dense is not None:
            if not is_int(dense) or dense < 0:
                raise fail("first_k_dense_replace", dense, "an integer ≥ 0")
            self.fields.setdefault("mlp_layer_types", mlp_schedule(dense, layers))
        shared = _indexer_schedule(self.text, layers)
        if shared is not None:
            self.fields.setdefault("indexer_types", shared)


def _indexer_schedule(text: dict[str, Any], layers: object) -> tuple[Any, ...] | None:
    pattern = text.pop("index_topk_pattern", None)
    freq, offset = text.pop("index_topk_freq", None), text.pop("index_skip_topk_offset", None)
    if isinstance(pattern, str):
        if not set(pattern) <= {"F", "S"}:
            raise fail("index_topk_pattern", pattern, "made of the letters F (full) and S (shared)")
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    if pattern is not None:
        if not isinstance(pattern, list | tuple):
            raise fail("index_topk_pattern", pattern, "a string of letters F and S, or a list of 'full' and 'shared'")
        return tuple(pattern)
    for name, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if value is not None and not is_int(value):
            raise fail(name, value, "an integer or null")
    if freq is None:
        return None
    freq, offset = max(freq, 1), 2 if offset is None else offset
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in layer_indices(layers))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a JSON object, got {type(value).__name__}.")
    return dict(value)


# --- writing --------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def write(cfg: Config) -> dict[str, Any]:
    """Return the content of a ``config.json`` in the official nested layout."""
    names = [f.name for f in attrs.fields(Config) if f.name in _TEXT_FIELDS]
    values = {name: _plain(getattr(cfg, name)) for name in names}
    top: dict[str, Any] = {"model_type": "glm5_next"} | {name: values.pop(name) for name in sorted(_TOP_FIELDS)}
    # On disk the family spells its MLA layers so; every reader knows the name.
    spelling = {"indexed_attention": "deepseek_sparse_attention"}
    values["layer_types"] = [spelling.get(kind, kind) for kind in cfg.layer_types]
    values["linear_attn_config"] = {key: values[name] for key, name in _LINEAR_KEYS.items()} | {
        "safe_gate": cfg.linear_lower_bound is not None,
        "kda_layers": list(cfg.kda_layers),
        "full_attn_layers": list(cfg.mla_layers),
    }
    dense = cfg.mlp_layer_types.count("dense")
    if cfg.mlp_layer_types == mlp_schedule(dense, cfg.num_hidden_layers):
        values["first_k_dense_replace"] = dense
    top["text_config"] = {"model_type": "glm5_next_text"} | values
    if cfg.vision is not None:
        top["vision_config"] = {"model_type": "glm5_next_vision"} | {
            f.name: _plain(getattr(cfg.vision, f.name)) for f in attrs.fields(VisionConfig)
        }
    for path, value in cfg.extra.items():
        section, key = top, path
        while (head := key.partition(".")[0]) in ("text_config", "vision_config", "linear_attn_config") and head != key:
            section, key = section.setdefault(head, {}), key.partition(".")[2]
        section[key] = value
    return top
