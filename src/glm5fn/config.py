"""The model's configuration, read from the ``config.json`` that lies beside a checkpoint.

Field names are those of the file. Every value is checked, and what this library does not implement is refused when the
config is read, with the reason. Aliases, older spellings and the layouts of the file are the matter of `config_json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Config", "ConfigError", "VisionConfig"]


class ConfigError(ValueError):
    """A ``config.json`` that cannot be used. The text names the field, the value found and what is allowed."""


# --- checks of single fields ----------------------------------------------------------------------------------------

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def fail(name: str, found: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} must be {allowed}, got {found!r}.")


def _integer(minimum: int) -> Validator:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_int(value) or value < minimum:
            raise fail(_label(instance, attribute), value, f"an integer ≥ {minimum}")

    return check


def _number(minimum: float, *, open_: bool = False) -> Validator:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_number(value) or value < minimum or (open_ and value == minimum):
            raise fail(_label(instance, attribute), value, f"a number {'>' if open_ else '≥'} {minimum:g}")

    return check


def _one_of(*allowed: Any, why: str = "") -> Validator:
    words = " or ".join(json.dumps(a) for a in allowed) + (f" ({why})" if why else "")

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        # 1 == True in Python, but the file's type matters.
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise fail(_label(instance, attribute), value, words)

    return check


def _lower_bound(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not (is_number(value) and value < 0):
        raise fail(_label(instance, attribute), value, "a number < 0, or null for the gate without a bound")


def _token_ids(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    ids = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(is_int(i) and i >= 0 for i in ids):
        raise fail(_label(instance, attribute), value, "a token id ≥ 0, a list of token ids or null")


def _sides(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    sizes = value if isinstance(value, tuple) else (value,)
    if len(sizes) not in (1, 2) or not all(is_int(i) and i >= 1 for i in sizes):
        raise fail(_label(instance, attribute), value, "an integer ≥ 1 or a list of two")


def _string(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise fail(_label(instance, attribute), value, "a string")


def _vision(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, VisionConfig):
        raise fail(_label(instance, attribute), value, "a VisionConfig or None")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _label(instance: object, attribute: attrs.Attribute[Any]) -> str:
    return f"vision_config.{attribute.name}" if isinstance(instance, VisionConfig) else attribute.name


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _field(default: Any, check: Validator, *, converter: Callable[[Any], Any] | None = None) -> Any:
    return attrs.field(default=default, validator=check, converter=converter)


_flag = _one_of(True, False)


# --- the two classes ------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class VisionConfig:
    """Sizes of the vision tower, kept so that its tensors are recognised; this library does not run the tower.

    Note that the released weights were trained with an epsilon of 1e-6 in the norms of the blocks, whatever
    ``rms_norm_eps`` says.
    """

    depth: int = _field(24, _integer(1))
    hidden_size: int = _field(1024, _integer(1))
    hidden_act: str = _field("silu", _string)
    attention_bias: bool = _field(True, _flag)
    num_heads: int = _field(16, _integer(1))
    in_channels: int = _field(3, _integer(1))
    image_size: int | tuple[int, int] = _field(336, _sides, converter=_tuple)
    patch_size: int | tuple[int, int] = _field(14, _sides, converter=_tuple)
    temporal_patch_size: int | tuple[int, int] = _field(2, _sides, converter=_tuple)
    spatial_merge_size: int = _field(2, _integer(1))
    rms_norm_eps: float = _field(1e-5, _number(0, open_=True))
    out_hidden_size: int = _field(1536, _integer(1))
    intermediate_size: int = _field(4096, _integer(1))
    projection_intermediate_size: int = _field(10240, _integer(1))
    swiglu_limit: float = _field(10.0, _number(0, open_=True))


# Defaults are made before num_hidden_layers is checked, so it may still be anything.
def layer_indices(num_hidden_layers: object) -> range:
    return range(num_hidden_layers) if isinstance(num_hidden_layers, int) else range(0)


def _default_layer_types(cfg: Config) -> tuple[str, ...]:
    kinds = ("linear_attention",) * 3 + ("indexed_attention",)
    return tuple(kinds[i % 4] for i in layer_indices(cfg.num_hidden_layers))


def _default_mlp_layer_types(cfg: Config) -> tuple[str, ...]:
    return mlp_schedule(3, cfg.num_hidden_layers)


def mlp_schedule(dense: int, num_hidden_layers: object) -> tuple[str, ...]:
    return tuple("dense" if i < dense else "sparse" for i in layer_indices(num_hidden_layers))


def _default_indexer_types(cfg: Config) -> tuple[str, ...]:
    return tuple("full" for _ in layer_indices(cfg.num_hidden_layers))


_NO_KERNEL = "nothing else is implemented"


@attrs.frozen(kw_only=True)
class Config:
    """Everything the model needs to know besides its weights. Immutable and hashable.

    Defaults are those of the ``glm5_next`` family and not of a particular checkpoint: the released one, for example,
    has ``index_kpool`` 4. So read a file with `from_pretrained`, or name every size that matters.

    Args:
        layer_types: ``"linear_attention"`` (KDA) or ``"indexed_attention"`` (MLA) per layer; by default every fourth is
            MLA.
        mlp_layer_types: ``"dense"`` or ``"sparse"`` (MoE) per layer; by default the first three are dense.
        indexer_types: ``"full"`` per layer; MLA layers that share another layer's indexer are refused.
        linear_lower_bound: bound of the KDA log-decay, or None for the softplus gate.
        mhc: False replaces the hyper-connections by plain residuals.
        num_nextn_predict_layers: number of multi-token-prediction layers.
        vision: sizes of the vision tower, None for a text-only checkpoint.
        extra: keys of the file that are not used, by dotted path; kept for `to_dict`, listed by `describe`.

    Raises:
        ConfigError: naming the field, the value found and what is allowed.

    Example:
        >>> cfg = Config.from_dict({"hidden_size": 64, "num_hidden_layers": 4, "rope_theta": 10000.0})
        >>> cfg.layer_types[2:], cfg.qk_head_dim, dict(cfg.extra)
        (('linear_attention', 'indexed_attention'), 256, {'rope_theta': 10000.0})
        >>> Config.from_dict(cfg.to_dict()) == cfg
        True
    """

    vocab_size: int = _field(154880, _integer(1))
    hidden_size: int = _field(4096, _integer(1))
    intermediate_size: int = _field(12288, _integer(1))
    moe_intermediate_size: int = _field(2048, _integer(1))
    num_hidden_layers: int = _field(45, _integer(1))
    num_attention_heads: int = _field(64, _integer(1))
    num_key_value_heads: int = attrs.field(
        default=attrs.Factory(lambda self: self.num_attention_heads, takes_self=True), validator=_integer(1)
    )
    n_shared_experts: int = _field(1, _integer(1))
    n_routed_experts: int = _field(288, _integer(1))
    num_experts_per_tok: int = _field(8, _integer(1))
    n_group: int = _field(1, _integer(1))
    topk_group: int = _field(1, _integer(1))
    norm_topk_prob: bool = _field(True, _flag)
    routed_scaling_factor: float = _field(2.5, _number(0, open_=True))
    topk_method: str = _field("noaux_tc", _one_of("noaux_tc", why=_NO_KERNEL))
    scoring_func: str = _field("sigmoid", _one_of("sigmoid", why=_NO_KERNEL))
    moe_router_dtype: str = _field("float32", _one_of("float32", why="the router always computes in float32"))
    q_lora_rank: int = _field(1536, _integer(1))
    kv_lora_rank: int = _field(512, _integer(1))
    qk_rope_head_dim: int = _field(0, _one_of(0, why="MLA has no rotary part here"))
    qk_nope_head_dim: int = _field(256, _integer(1))
    v_head_dim: int = _field(256, _integer(1))
    mla_use_nope: bool = _field(True, _one_of(True, why="MLA has no rotary part here"))
    attention_bias: bool = _field(False, _one_of(False, why="the projections have no bias"))
    index_topk: int = _field(2048, _integer(1))
    index_head_dim: int = _field(128, _integer(1))
    index_n_heads: int = _field(32, _integer(1))
    index_kpool: int = _field(16, _integer(1))
    index_kpool_always_select_tail: bool = _field(True, _flag)
    index_kpool_compress: bool = _field(True, _one_of(True, why="pools are always compressed by learned weights"))
    linear_head_dim: int = _field(128, _integer(1))
    linear_num_heads: int = _field(64, _integer(1))
    linear_conv_kernel_dim: int = _field(4, _integer(1))
    linear_lower_bound: float | None = _field(-5.0, _lower_bound)
    mhc: bool = _field(True, _flag)
    hc_mult: int = _field(4, _integer(1))
    hc_eps: float = _field(1e-6, _number(0, open_=True))
    hc_sinkhorn_iters: int = _field(20, _integer(1))
    hidden_act: str = _field("silu", _one_of("silu", why=_NO_KERNEL))
    swiglu_limit: float = _field(10.0, _number(0, open_=True))
    rms_norm_eps: float = _field(1e-5, _number(0, open_=True))
    initializer_range: float = _field(0.02, _number(0))
    max_position_embeddings: int = _field(1048576, _integer(1))
    num_nextn_predict_layers: int = _field(0, _integer(0))
    index_share_for_mtp_iteration: bool = _field(False, _flag)
    pad_token_id: int | tuple[int, ...] | None = _field(154820, _token_ids, converter=_tuple)
    bos_token_id: int | tuple[int, ...] | None = _field(None, _token_ids, converter=_tuple)
    eos_token_id: int | tuple[int, ...] | None = _field(None, _token_ids, converter=_tuple)
    layer_types: tuple[str, ...] = attrs.field(
        default=attrs.Factory(_default_layer_types, takes_self=True), converter=_tuple
    )
    mlp_layer_types: tuple[str, ...] = attrs.field(
        default=attrs.Factory(_default_mlp_layer_types, takes_self=True), converter=_tuple
    )
    indexer_types: tuple[str, ...] = attrs.field(
        default=attrs.Factory(_default_indexer_types, takes_self=True), converter=_tuple
    )
    tie_word_embeddings: bool = _field(False, _flag)
    image_token_id: int = _field(154854, _integer(0))
    video_token_id: int = _field(154855, _integer(0))
    image_start_token_id: int = _field(154830, _integer(0))
    image_end_token_id: int = _field(154831, _integer(0))
    video_start_token_id: int = _field(154832, _integer(0))
    video_end_token_id: int = _field(154833, _integer(0))
    vision: VisionConfig | None = attrs.field(default=None, validator=_vision)
    extra: Mapping[str, Any] = attrs.field(factory=dict, converter=dict, hash=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_schedules(self)
        _check_relations(self)

    @property
    def qk_head_dim(self) -> int:
        """Channels per head of an MLA query."""
        return self.qk_nope_head_dim

    @property
    def mtp_mlp_type(self) -> str:
        """Kind of the MLP of the multi-token-prediction layers: that of the last main layer."""
        return self.mlp_layer_types[-1]

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "indexed_attention")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All token ids that end a text; empty when the file names none."""
        return _as_ids(self.eos_token_id)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Config:
        """Read ``config.json``, given as the file or as the folder that holds it.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: it is not JSON, or a value in it cannot be used.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            where = f"The folder {path} holds no config.json" if path.is_dir() else f"{path} does not exist"
            raise FileNotFoundError(f"{where}; give the folder of a checkpoint or its config.json.")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}.") from error
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Read the content of a ``config.json``: text fields in ``text_config``, or all at the top level.

        Older spellings and aliases are accepted: ``num_local_experts``; layer types ``full_attention``, ``attention``,
        ``deepseek_sparse_attention`` and ``mamba``; ``linear_attn_config``, whose values win over the ``linear_*``
        fields; ``first_k_dense_replace``; ``index_topk_pattern`` (letters F and S) or ``index_topk_freq`` with
        ``index_skip_topk_offset``.

        Raises:
            ConfigError: naming the field, the value found and what is allowed.
        """
        from glm5fn.config_json import read  # it needs this class

        return read(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` in the official nested layout; `from_dict` gives an equal config."""
        from glm5fn.config_json import write

        return write(self)

    def describe(self) -> str:
        """Return a readable summary: sizes, the layer schedule, and the keys of the file that are not used."""
        return _describe(self)


def _as_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


# --- checks across fields -------------------------------------------------------------------------------------------


def _check_schedules(cfg: Config) -> None:
    for name, allowed in (
        ("layer_types", ("linear_attention", "indexed_attention")),
        ("mlp_layer_types", ("dense", "sparse")),
        ("indexer_types", ("full", "shared")),
    ):
        value = getattr(cfg, name)
        if not isinstance(value, tuple):
            raise fail(name, value, "a list with one entry per layer")
        if len(value) != cfg.num_hidden_layers:
            raise ConfigError(
                f"{name} must have num_hidden_layers={cfg.num_hidden_layers} entries, one per layer, got {len(value)}."
            )
        for index, kind in enumerate(value):
            if kind not in allowed:
                raise fail(f"{name}[{index}]", kind, " or ".join(map(repr, allowed)))
    for index in cfg.mla_layers:
        if cfg.indexer_types[index] == "shared":
            raise ConfigError(
                f"indexer_types[{index}] must be 'full', because layer {index} is an MLA layer, got 'shared': taking "
                f"over an earlier layer's selection is not supported, since the KDA layers between do not pass it on."
            )


def _check_relations(cfg: Config) -> None:
    if cfg.num_key_value_heads != cfg.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads must equal num_attention_heads={cfg.num_attention_heads} (every head has its own "
            f"keys and values), got {cfg.num_key_value_heads}."
        )
    if cfg.index_topk % cfg.index_kpool:
        raise ConfigError(
            f"index_topk must be a multiple of index_kpool={cfg.index_kpool} (whole pools are selected), got "
            f"{cfg.index_topk}."
        )
    if "sparse" not in cfg.mlp_layer_types:
        return
    if cfg.n_routed_experts % cfg.n_group:
        raise ConfigError(f"n_routed_experts must be a multiple of n_group={cfg.n_group}, got {cfg.n_routed_experts}.")
    if cfg.n_group > 1 and cfg.n_routed_experts // cfg.n_group < 2:
        raise ConfigError(
            f"n_group must leave two experts or more per group, since a group is scored by its best two, got "
            f"n_group={cfg.n_group} for n_routed_experts={cfg.n_routed_experts}."
        )
    if cfg.topk_group > cfg.n_group:
        raise ConfigError(f"topk_group must be at most n_group={cfg.n_group}, got {cfg.topk_group}.")
    selectable = cfg.topk_group * (cfg.n_routed_experts // cfg.n_group)
    if cfg.num_experts_per_tok > selectable:
        raise ConfigError(
            f"num_experts_per_tok must be at most {selectable}, the experts in topk_group={cfg.topk_group} of "
            f"n_group={cfg.n_group} groups of {cfg.n_routed_experts // cfg.n_group}, got {cfg.num_experts_per_tok}."
        )


def _describe(cfg: Config) -> str:
    def runs(kinds: Sequence[str]) -> str:
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    experts = f"{cfg.n_routed_experts} experts, {cfg.num_experts_per_tok} per token, and {cfg.n_shared_experts} shared"
    bound = "softplus gate" if cfg.linear_lower_bound is None else f"gate bound {cfg.linear_lower_bound:g}"
    lines = [
        f"{cfg.num_hidden_layers} layers: {runs(cfg.layer_types)}; {runs(cfg.mlp_layer_types)}; "
        f"{cfg.num_nextn_predict_layers} multi-token-prediction",
        f"hidden {cfg.hidden_size}, vocabulary {cfg.vocab_size}, "
        + (f"{cfg.hc_mult} residual streams" if cfg.mhc else "plain residuals"),
        f"KDA: {cfg.linear_num_heads} heads of {cfg.linear_head_dim}, conv {cfg.linear_conv_kernel_dim}, {bound}",
        f"MLA: {cfg.num_attention_heads} heads of {cfg.qk_nope_head_dim} and {cfg.v_head_dim}, "
        f"latent {cfg.kv_lora_rank}; indexer {cfg.index_n_heads} heads of {cfg.index_head_dim}, "
        f"top {cfg.index_topk} in pools of {cfg.index_kpool}",
        f"MLP: dense {cfg.intermediate_size}"
        + (f"; sparse {cfg.moe_intermediate_size} in {experts}" if "sparse" in cfg.mlp_layer_types else ""),
        "vision: " + ("none" if cfg.vision is None else f"{cfg.vision.depth} blocks (not run by this library)"),
    ]
    lines += [f"not used: {path} = {json.dumps(value, default=repr)}" for path, value in sorted(cfg.extra.items())]
    return "\n".join(lines)
