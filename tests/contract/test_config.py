"""Config: defaults, layouts, aliases, older spellings, and an error for every value that cannot be used."""

from __future__ import annotations

import copy
import json
import pickle

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from glm5fn.config import Config, ConfigError, VisionConfig

# What the released model's file says, in its own spelling.
RELEASED = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "image_token_id": 154854,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "text_config": {
        "model_type": "glm5_next_text",
        "num_hidden_layers": 45,
        "hidden_size": 4096,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_n_heads": 32,
        "index_topk": 2048,
        "mhc": True,
        "mla_use_nope": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_router_dtype": "float32",
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "eos_token_id": [154820, 154827, 154829],
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i % 4 != 3],
            "full_attn_layers": list(range(3, 45, 4)),
        },
    },
    "vision_config": {"model_type": "glm5_next_vision", "out_hidden_size": 4096, "num_hidden_layers": 24},
}


def test_released_config():
    cfg = Config.from_dict(RELEASED)
    assert cfg.mla_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert len(cfg.kda_layers) == 34
    assert cfg.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 42
    assert cfg.indexer_types == ("full",) * 45
    assert (cfg.index_kpool, cfg.num_nextn_predict_layers, cfg.index_share_for_mtp_iteration) == (4, 1, True)
    assert cfg.eos_token_ids == (154820, 154827, 154829)
    assert cfg.vision == VisionConfig(out_hidden_size=4096)
    assert set(cfg.extra) == {"architectures", "quantization_config", "text_config.indexer_rope_interleave"}


def test_defaults():
    cfg = Config()
    wanted = {
        "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256, "v_head_dim": 256, "hidden_act": "silu", "swiglu_limit": 10.0,
        "max_position_embeddings": 1048576, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": 154820, "bos_token_id": None,
        "eos_token_id": None, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16,
        "index_kpool_always_select_tail": True, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "hc_mult": 4, "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20, "mhc": True, "num_nextn_predict_layers": 0, "image_token_id": 154854,
        "video_token_id": 154855, "image_start_token_id": 154830, "image_end_token_id": 154831,
        "video_start_token_id": 154832, "video_end_token_id": 154833, "vision": None, "qk_head_dim": 256,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in wanted} == wanted
    vision = {
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "in_channels": 3,
        "image_size": 336, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "out_hidden_size": 1536,
        "projection_intermediate_size": 10240, "swiglu_limit": 10.0,
    }  # fmt: skip
    assert attrs.asdict(VisionConfig()) == vision


def test_null_heads_mean_as_many_as_query_heads():
    assert Config.from_dict({"num_attention_heads": 8, "num_key_value_heads": None}).num_key_value_heads == 8


def test_fewer_than_three_layers_are_all_dense():
    assert Config(num_hidden_layers=2).mlp_layer_types == ("dense", "dense")
    assert Config(num_hidden_layers=2).mtp_mlp_type == "dense"


def test_flat_and_nested_read_the_same():
    flat = RELEASED["text_config"] | {"model_type": "glm5_next_text", "vision_config": RELEASED["vision_config"]}
    nested = {k: v for k, v in RELEASED.items() if k not in ("architectures", "quantization_config")}
    assert attrs.evolve(Config.from_dict(flat), extra={}) == attrs.evolve(Config.from_dict(nested), extra={})


def test_fields_at_the_top_level_of_the_nested_layout_count_too():
    cfg = Config.from_dict({"text_config": {"hidden_size": 8}, "eos_token_id": [1, 2], "bos_token_id": None})
    assert (cfg.eos_token_ids, cfg.extra) == ((1, 2), {})


def test_legacy_layer_types():
    kinds = [
        "mamba",
        "attention",
        "full_attention",
        "deepseek_sparse_attention",
        "indexed_attention",
        "linear_attention",
    ]
    cfg = Config.from_dict({"num_hidden_layers": 6, "layer_types": kinds})
    assert cfg.layer_types == ("linear_attention", *["indexed_attention"] * 4, "linear_attention")


def test_linear_attn_config_overrides():
    section = {"head_dim": 32, "num_heads": 6, "short_conv_kernel_size": 3, "gate_lower_bound": -2.5}
    cfg = Config.from_dict({"linear_head_dim": 64, "linear_lower_bound": None, "linear_attn_config": section})
    found = (cfg.linear_head_dim, cfg.linear_num_heads, cfg.linear_conv_kernel_dim, cfg.linear_lower_bound)
    assert found == (32, 6, 3, -2.5)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_lower_bound": None, "linear_attn_config": {}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": True}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
        ({"linear_lower_bound": -1, "linear_attn_config": {"safe_gate": False}}, -1),
    ],
)
def test_lower_bound_of_the_gate(text, bound):
    assert Config.from_dict(text).linear_lower_bound == bound


def test_layer_lists_may_confirm_the_schedule_but_not_set_it():
    lists = {"kda_layers": [0, 1, 2], "full_attn_layers": [3]}
    assert Config.from_dict({"num_hidden_layers": 4, "linear_attn_config": lists}).mla_layers == (3,)
    counted_from_1 = {"full_attn_layers": [4]}
    with pytest.raises(ConfigError, match=r"full_attn_layers must be \[3\].*got \[4\]; give layer_types"):
        Config.from_dict({"num_hidden_layers": 4, "linear_attn_config": counted_from_1})
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {"num_hidden_layers": 4, "layer_types": kinds, "linear_attn_config": counted_from_1}
    assert Config.from_dict(text).mla_layers == (3,)


def test_alias_of_the_number_of_experts():
    assert Config.from_dict({"num_local_experts": 16}).n_routed_experts == 16
    assert Config.from_dict({"num_local_experts": 16, "n_routed_experts": 16}).n_routed_experts == 16
    with pytest.raises(ConfigError, match=r"num_local_experts is another name of n_routed_experts.*got 16 and 32"):
        Config.from_dict({"num_local_experts": 16, "n_routed_experts": 32})


def test_dense_layers_by_number():
    assert Config.from_dict({"num_hidden_layers": 4, "first_k_dense_replace": 1}).mlp_layer_types.count("dense") == 1
    kinds = ["sparse", "dense"]
    cfg = Config.from_dict({"num_hidden_layers": 2, "first_k_dense_replace": 1, "mlp_layer_types": kinds})
    assert list(cfg.mlp_layer_types) == kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ({"index_topk_freq": 4}, "FFSSSFSSSF"),  # offset 2 unless given
        ({"index_topk_freq": 4, "index_skip_topk_offset": 2}, "FFSSSFSSSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 4}, "FFFFSSFSSF"),
        ({"index_topk_freq": 1}, "FFFFFFFFFF"),
        ({"index_topk_freq": 0}, "FFFFFFFFFF"),
        ({"index_skip_topk_offset": 5}, "FFFFFFFFFF"),
        ({"index_topk_pattern": "FFFFFFFFSS"}, "FFFFFFFFSS"),
        ({"index_topk_pattern": ["full"] * 9 + ["shared"], "index_topk_freq": 3}, "FFFFFFFFFS"),
        ({"index_topk_pattern": "SSSSSSSSSS", "indexer_types": ["full"] * 10}, "FFFFFFFFFF"),
    ],
)
def test_indexer_schedules(text, kinds):
    # Only KDA layers, which have no indexer, so that a schedule with shared ones is legal.
    base = {"num_hidden_layers": 10, "layer_types": ["linear_attention"] * 10}
    assert "".join({"full": "F", "shared": "S"}[k] for k in Config.from_dict(base | text).indexer_types) == kinds


def test_shared_indexer_is_refused_on_mla_layers_only():
    cfg = Config.from_dict({"num_hidden_layers": 4, "index_topk_pattern": "SSSF"})
    assert cfg.indexer_types[0] == "shared"
    with pytest.raises(ConfigError, match=r"indexer_types\[3\] must be 'full'.*got 'shared'.*not supported"):
        Config.from_dict({"num_hidden_layers": 8, "index_topk_freq": 4})


def test_derived_sizes_in_the_file_are_ignored():
    cfg = Config.from_dict({"head_dim": 99, "qk_head_dim": 7})
    assert (cfg.qk_head_dim, cfg.extra) == (256, {})


def test_token_ids():
    cfg = Config.from_dict({"pad_token_id": None, "eos_token_id": 7, "bos_token_id": [1, 2]})
    assert (cfg.pad_token_id, cfg.eos_token_ids, cfg.bos_token_id) == (None, (7,), (1, 2))
    assert Config().eos_token_ids == ()


def test_unknown_keys_are_kept_and_listed():
    data = {"text_config": {"foo": [1], "linear_attn_config": {"bar": 2}}, "vision_config": {"baz": 3}, "dtype": "bf16"}
    cfg = Config.from_dict(data)
    assert cfg.extra == {
        "text_config.foo": [1],
        "text_config.linear_attn_config.bar": 2,
        "vision_config.baz": 3,
        "dtype": "bf16",
    }
    for path in cfg.extra:
        assert f"not used: {path} = " in cfg.describe()
    written = cfg.to_dict()
    assert (written["dtype"], written["text_config"]["linear_attn_config"]["bar"]) == ("bf16", 2)
    assert Config.from_dict(written) == cfg


def test_describe_names_the_sizes():
    text = Config.from_dict(RELEASED).describe()
    for part in (
        "34 linear_attention, 11 indexed_attention",
        "3 dense, 42 sparse",
        "pools of 4",
        "288 experts",
        "24 blocks",
    ):
        assert part in text
    assert "softplus gate" in Config(linear_lower_bound=None).describe()


def test_the_input_is_not_changed():
    data = copy.deepcopy(RELEASED)
    Config.from_dict(data)
    assert data == RELEASED


def test_frozen_hashable_and_picklable():
    cfg = Config.from_dict(RELEASED)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        cfg.hidden_size = 1
    assert hash(cfg) == hash(Config.from_dict(RELEASED))
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert copy.deepcopy(cfg) == cfg


def test_official_layout_is_written():
    data = Config.from_dict(RELEASED).to_dict()
    assert data["model_type"] == "glm5_next"
    text = data["text_config"]
    assert text["layer_types"] == RELEASED["text_config"]["layer_types"]
    assert text["linear_attn_config"] == RELEASED["text_config"]["linear_attn_config"] | {"safe_gate": True}
    assert text["first_k_dense_replace"] == 3
    assert data["quantization_config"] == RELEASED["quantization_config"]
    assert json.loads(json.dumps(data)) == data
    assert Config.from_dict(data) == Config.from_dict(RELEASED)


_SIZES = [
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "n_shared_experts", "n_routed_experts", "num_experts_per_tok",
    "n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_topk",
    "index_head_dim", "index_n_heads", "index_kpool", "linear_head_dim", "linear_num_heads",
    "linear_conv_kernel_dim", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
]  # fmt: skip
_POSITIVE = ["routed_scaling_factor", "hc_eps", "swiglu_limit", "rms_norm_eps"]
_FLAGS = ["norm_topk_prob", "index_kpool_always_select_tail", "mhc", "tie_word_embeddings"]
_NAN = float("nan")

_BAD = [
    *[(name, value, "an integer ≥ 1") for name in _SIZES for value in (0, -1, 2.0, "3", True, [4])],
    *[(name, None, "an integer ≥ 1") for name in _SIZES if name != "num_key_value_heads"],
    *[(name, value, "a number > 0") for name in _POSITIVE for value in (0, -1.5, None, "1", True, _NAN)],
    *[(name, value, "true or false") for name in _FLAGS for value in (0, 1, "true", None)],
    ("initializer_range", -0.1, "a number ≥ 0"),
    ("num_nextn_predict_layers", -1, "an integer ≥ 0"),
    ("index_share_for_mtp_iteration", 1, "true or false"),
    ("linear_lower_bound", 0, "a number < 0, or null"),
    ("linear_lower_bound", 5.0, "a number < 0, or null"),
    ("linear_lower_bound", "-5", "a number < 0, or null"),
    ("qk_rope_head_dim", 64, "0 (MLA has no rotary part here)"),
    ("qk_rope_head_dim", False, "0 (MLA has no rotary part here)"),
    ("mla_use_nope", False, "true (MLA has no rotary part here)"),
    ("attention_bias", True, "false (the projections have no bias)"),
    ("hidden_act", "gelu", '"silu"'),
    ("topk_method", "greedy", '"noaux_tc"'),
    ("scoring_func", "softmax", '"sigmoid"'),
    ("moe_router_dtype", "bfloat16", '"float32" (the router always computes in float32)'),
    ("index_kpool_compress", False, "true (pools are always compressed"),
    ("eos_token_id", -1, "a token id ≥ 0, a list of token ids or null"),
    ("eos_token_id", [1, "2"], "a token id ≥ 0, a list of token ids or null"),
    ("pad_token_id", 1.5, "a token id ≥ 0, a list of token ids or null"),
    ("image_token_id", None, "an integer ≥ 0"),
    ("layer_types", "linear_attention", "a list with one entry per layer"),
    ("mlp_layer_types", 3, "a list with one entry per layer"),
    ("index_topk_pattern", "FX", "made of the letters F (full) and S (shared)"),
    ("index_topk_pattern", 4, "a string of letters F and S, or a list"),
    ("index_topk_freq", "4", "an integer or null"),
    ("index_skip_topk_offset", 1.0, "an integer or null"),
    ("first_k_dense_replace", -1, "an integer ≥ 0"),
    ("linear_attn_config", [], "a JSON object"),
    ("model_type", "llama", "'glm5_next' or 'glm5_next_text'"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), _BAD, ids=lambda v: str(v)[:30])
def test_error_names_field_value_and_what_is_allowed(name, value, allowed):
    for data in ({name: value}, {"text_config": {name: value}}):
        with pytest.raises(ConfigError) as error:
            Config.from_dict(data)
        text = str(error.value)
        assert name in text
        assert allowed in text
        assert repr(value) in text or type(value).__name__ in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "num_key_value_heads must equal num_attention_heads=8"),
        ({"index_topk": 30, "index_kpool": 4}, "index_topk must be a multiple of index_kpool=4 .* got 30"),
        ({"n_routed_experts": 10, "n_group": 4}, "n_routed_experts must be a multiple of n_group=4, got 10"),
        ({"n_routed_experts": 4, "n_group": 4, "num_experts_per_tok": 1}, "two experts or more per group.*n_group=4"),
        ({"topk_group": 2}, "topk_group must be at most n_group=1, got 2"),
        ({"n_routed_experts": 8, "n_group": 4, "topk_group": 2}, "num_experts_per_tok must be at most 4.* got 8"),
        ({"n_routed_experts": 4}, "num_experts_per_tok must be at most 4.* got 8"),
        ({"num_hidden_layers": 2, "layer_types": ["mamba"]}, "layer_types must have num_hidden_layers=2 entries.*1"),
        ({"num_hidden_layers": 1, "mlp_layer_types": ["moe"]}, r"mlp_layer_types\[0\] must be 'dense' or 'sparse'"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding"]}, r"layer_types\[0\] must be .*got 'sliding'"),
        ({"num_hidden_layers": 1, "layer_types": [None]}, r"layer_types\[0\] must be .*got None"),
        ({"num_hidden_layers": 1, "indexer_types": ["half"]}, r"indexer_types\[0\] must be 'full' or 'shared', got"),
        ({"num_hidden_layers": 4, "index_topk_pattern": "FF"}, "indexer_types must have num_hidden_layers=4 entries"),
    ],
)  # fmt: skip
def test_relations_between_fields(text, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(text)


def test_experts_do_not_matter_without_sparse_layers():
    assert Config(num_hidden_layers=1, n_routed_experts=1).mlp_layer_types == ("dense",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "config.json must be a JSON object, got list"),
        ({"text_config": []}, "text_config must be a JSON object, got list"),
        ({"text_config": {}, "model_type": "kimi_k3"}, "^model_type must be .* got 'kimi_k3'"),
        ({"text_config": {"model_type": "kimi"}}, r"text_config\.model_type must be .* got 'kimi'"),
        ({"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False}, "same in both places, got True"),
        ({"vision_config": 3}, "vision_config must be a JSON object, got int"),
        ({"vision_config": {"depth": 0}}, r"vision_config\.depth must be an integer ≥ 1, got 0"),
        ({"vision_config": {"patch_size": [14, 0]}}, r"vision_config\.patch_size must be .* got \(14, 0\)"),
        ({"vision_config": {"hidden_act": 3}}, r"vision_config\.hidden_act must be a string, got 3"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method must be 'fp8' or 'quark', got 'awq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size must be \[128, 128\], got \[64, 64\]",
        ),
    ],
)
def test_errors_of_the_sections(data, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(data)


def test_vision_must_be_a_vision_config():
    with pytest.raises(ConfigError, match=r"vision must be a VisionConfig or None, got \{'depth': 2\}"):
        Config(vision={"depth": 2})


def test_from_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert Config.from_pretrained(tmp_path) == Config.from_pretrained(str(tmp_path / "config.json"))


def test_errors_of_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        Config.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Config.from_pretrained(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    for content in (b'{"hidden_size": ', b"\xff\xfe\x00"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
            Config.from_pretrained(tmp_path)
    file.write_text('{"hidden_size": NaN}')
    with pytest.raises(ConfigError, match=r"config.json: hidden_size must be an integer ≥ 1, got nan"):
        Config.from_pretrained(tmp_path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=4
)


@st.composite
def _configs(draw):
    size = st.integers(1, 300)
    layers, kpool, heads = draw(st.integers(1, 7)), draw(st.integers(1, 9)), draw(size)
    kinds = draw(st.lists(st.sampled_from(["linear_attention", "indexed_attention"]), min_size=layers, max_size=layers))
    mlps = draw(st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers))
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    topk_group = draw(st.integers(1, groups))
    ids = st.none() | size | st.lists(size, max_size=3)
    names = st.from_regex(r"\A(text_config\.|vision_config\.)?unknown_[a-z.]{1,6}\Z")
    vision = draw(st.none() | st.builds(VisionConfig, depth=size, patch_size=size | st.tuples(size, size)))
    extra = draw(st.dictionaries(names, _json, max_size=3))
    return Config(
        num_hidden_layers=layers, layer_types=kinds, mlp_layer_types=mlps, hidden_size=draw(size),
        num_attention_heads=heads, index_kpool=kpool, index_topk=kpool * draw(size), linear_num_heads=draw(size),
        indexer_types=[draw(st.sampled_from(["full", "shared"])) if k[0] == "l" else "full" for k in kinds],
        n_group=groups, topk_group=topk_group, n_routed_experts=groups * per_group,
        num_experts_per_tok=draw(st.integers(1, topk_group * per_group)),
        linear_lower_bound=draw(st.none() | st.floats(-10, -0.01)), mhc=draw(st.booleans()),
        num_nextn_predict_layers=draw(st.integers(0, 2)), tie_word_embeddings=draw(st.booleans()),
        eos_token_id=draw(ids), pad_token_id=draw(ids), rms_norm_eps=draw(st.floats(1e-9, 1)), vision=vision,
        extra={k: v for k, v in extra.items() if vision is not None or not k.startswith("vision_config")},
    )  # fmt: skip


@given(_configs())
@settings(max_examples=60, deadline=None)
def test_round_trip(cfg):
    assert Config.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
