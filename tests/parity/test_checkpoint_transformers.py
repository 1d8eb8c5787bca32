"""Checkpoints exchanged with transformers: what its ``save_pretrained`` writes is read exactly, and the reverse."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

from glm5fn.checkpoint import inspect_checkpoint, load_checkpoint, save_checkpoint
from glm5fn.config import Config, VisionConfig
from glm5fn.params import cast, init_params, named_leaves

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 5,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "v_head_dim": 10, "index_topk": 16,
    "index_head_dim": 8, "index_n_heads": 3, "index_kpool": 4, "linear_head_dim": 6, "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3, "hc_mult": 2, "pad_token_id": 0, "eos_token_id": [1, 2], "n_shared_experts": 2,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
          "projection_intermediate_size": 32}  # fmt: skip


def _config(**text):
    return transformers.Glm5NextConfig(text_config=TEXT | text, vision_config=VISION)


def _model(config):
    model = transformers.Glm5NextForConditionalGeneration(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model


def _expected(model, cfg):
    """The tree's leaves taken from the modules, with nothing but attribute access, cat and reshape."""
    text = model.model.language_model
    out = {"embed": text.embed_tokens.weight, "norm": text.norm.weight, "lm_head": model.lm_head.weight}
    for i, layer in enumerate(text.layers):
        leaves = {"attn_norm": layer.input_layernorm.weight, "ffn_norm": layer.post_attention_layernorm.weight}
        for name in ("attn_hc", "ffn_hc"):
            hc = getattr(layer, name)
            leaves |= {f"{name}.fn": hc.fn, f"{name}.base": hc.base, f"{name}.scale": hc.scale}
        attn = _kda(layer.self_attn, cfg) if cfg.layer_types[i] == "linear_attention" else _mla(layer.self_attn, cfg)
        ffn = _moe(layer.mlp) if cfg.mlp_layer_types[i] == "sparse" else _mlp(layer.mlp)
        leaves |= {f"attn.{k}": v for k, v in attn.items()} | {f"ffn.{k}": v for k, v in ffn.items()}
        out |= {f"layers.{i}.{k}": v for k, v in leaves.items()}
    return out


def _kda(m, cfg):
    gate = m.forget_gate
    return {
        "qkv_proj": torch.cat([m.q_proj.weight, m.k_proj.weight, m.v_proj.weight]),
        "conv": m.conv1d.weight[:, 0],
        "b_proj": m.b_proj.weight,
        "f_a": gate.f_a_proj.weight,
        "f_b": gate.f_b_proj.weight,
        "g_a": m.g_a_proj.weight,
        "g_b": m.g_b_proj.weight,
        "A_log": gate.A_log,
        "dt_bias": gate.dt_bias.view(cfg.linear_num_heads, cfg.linear_head_dim),
        "o_norm": m.o_norm.weight,
        "o_proj": m.o_proj.weight,
    }


def _mla(m, cfg):
    kv_b = m.kv_b_proj.weight.view(cfg.num_attention_heads, -1, cfg.kv_lora_rank)
    ix = m.indexer
    return {
        "q_a": m.q_a_proj.weight,
        "q_a_norm": m.q_a_layernorm.weight,
        "q_b": m.q_b_proj.weight,
        "kv_a": m.kv_a_proj_with_mqa.weight,
        "kv_a_norm": m.kv_a_layernorm.weight,
        "w_uk": kv_b[:, : cfg.qk_nope_head_dim],
        "w_uv": kv_b[:, cfg.qk_nope_head_dim :],
        "o_proj": m.o_proj.weight,
        "indexer.wq_b": ix.wq_b.weight,
        "indexer.wk": ix.wk.weight,
        "indexer.k_norm_weight": ix.k_norm.weight,
        "indexer.k_norm_bias": ix.k_norm.bias,
        "indexer.weights_proj": ix.weights_proj.weight,
        "indexer.compress_gate": ix.index_kpool_compress_gate,
        "indexer.compress_ape": ix.index_kpool_compress_ape,
    }


def _mlp(m):
    return {"gate_up": torch.cat([m.gate_proj.weight, m.up_proj.weight]), "down": m.down_proj.weight}


def _moe(m):
    leaves = {"gate": m.gate.weight, "bias": m.gate.e_score_correction_bias}
    leaves |= {"gate_up": m.experts.gate_up_proj, "down": m.experts.down_proj}
    return leaves | {f"shared.{k}": v for k, v in _mlp(m.shared_experts).items()}


def _assert_leaves(params, expected, dtype=None):
    leaves = dict(named_leaves(params))
    assert leaves.keys() == expected.keys()
    for path, value in expected.items():
        assert leaves[path].dtype == (dtype or value.dtype), path
        assert torch.equal(leaves[path], value.to(leaves[path].dtype)), path


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize(
    "text", [{}, {"linear_lower_bound": None, "tie_word_embeddings": False}], ids=["bounded", "softplus"]
)
def test_loads_what_transformers_saves(tmp_path, text, max_shard_size):
    model = _model(_config(**text))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    cfg, params = load_checkpoint(tmp_path)
    _assert_leaves(params, _expected(model, cfg), torch.float32)
    assert cfg.linear_lower_bound == (None if "linear_lower_bound" in text else -5.0)
    assert cfg.layer_types == tuple(model.config.text_config.layer_types)
    for name, value in TEXT.items():
        found = getattr(cfg, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert cfg.vision == VisionConfig(**VISION)
    report = inspect_checkpoint(tmp_path)
    visual = {name for name in model.state_dict() if name.startswith("model.visual.")}
    assert set(report.not_loaded) == visual


def test_bfloat16_with_float32_kept_where_needed(tmp_path):
    _model(_config()).save_pretrained(tmp_path / "f32")
    model = transformers.Glm5NextForConditionalGeneration.from_pretrained(tmp_path / "f32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    cfg, params = load_checkpoint(tmp_path / "bf16")
    _assert_leaves(params, _expected(model, cfg))  # the same leaves are float32 in both
    _, exact = load_checkpoint(tmp_path / "f32")
    expected = dict(named_leaves(cast(exact, torch.bfloat16)))
    _assert_leaves(params, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_we_save(tmp_path, dtype):
    cfg = attrs.evolve(Config.from_dict(_config().to_dict()), extra={})
    params = init_params(cfg, dtype=dtype)
    save_checkpoint(cfg, params, tmp_path / "model", shard_bytes=50_000)
    model, info = transformers.Glm5NextForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=dtype, output_loading_info=True
    )
    assert {name for name in info["missing_keys"] if "visual" not in name} == set()
    assert (set(info["unexpected_keys"]), set(info["mismatched_keys"])) == (set(), set())
    _assert_leaves(params, _expected(model, cfg))
    text = model.config.text_config
    assert text.layer_types == list(cfg.layer_types)
    assert text.mlp_layer_types == list(cfg.mlp_layer_types)
    assert (text.eos_token_id, text.linear_lower_bound, text.hc_mult) == ([1, 2], -5.0, 2)


def test_tied_embeddings(tmp_path):
    config = transformers.Glm5NextConfig(
        text_config=TEXT | {"tie_word_embeddings": True}, vision_config=VISION, tie_word_embeddings=True
    )
    model = _model(config)
    model.save_pretrained(tmp_path)
    cfg, params = load_checkpoint(tmp_path)
    assert params.lm_head is params.embed
    _assert_leaves(params, _expected(model, cfg))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"index_topk_freq": 1},
        {"linear_attn_config": {"head_dim": 8, "num_heads": 3, "gate_lower_bound": None}},
        {"linear_lower_bound": None, "linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
        {"layer_types": "legacy"},
        {"num_local_experts": 6},
    ],
    ids=lambda e: "-".join(e) or "plain",
)
def test_configs_are_read_alike(layers, extra):
    text = {k: v for k, v in TEXT.items() if k != "mlp_layer_types"} | {"num_hidden_layers": layers} | extra
    if "layer_types" in extra:
        text["layer_types"] = [["mamba", "deepseek_sparse_attention", "full_attention"][i % 3] for i in range(layers)]
    if "num_local_experts" in extra:
        del text["n_routed_experts"]
    theirs = transformers.Glm5NextConfig(text_config=dict(text)).text_config
    ours = Config.from_dict({"text_config": text})
    if layers < 3:  # its default schedule is then longer than the model
        theirs.mlp_layer_types = theirs.mlp_layer_types[:layers]
    names = set(json.loads(theirs.to_json_string())) & {f.name for f in attrs.fields(Config)}
    assert {"layer_types", "mlp_layer_types", "indexer_types", "linear_lower_bound", "n_routed_experts"} <= names
    for name in names:
        mine = getattr(ours, name)
        assert (list(mine) if isinstance(mine, tuple) else mine) == getattr(theirs, name), name
