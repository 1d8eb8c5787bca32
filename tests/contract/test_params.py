"""The parameter tree: its shapes, what must be float32, initial values, and the helpers over whole trees."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from glm5fn.config import Config
from glm5fn.params import (
    KDA,
    MLA,
    MLP,
    MTP,
    MoE,
    ParamInfo,
    abstract,
    cast,
    count,
    init_params,
    map_leaves,
    map_named_leaves,
    named_leaves,
    nbytes,
)

TINY = Config(
    vocab_size=29, hidden_size=24, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=5,
    num_attention_heads=3, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
    q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=8,
    v_head_dim=6, index_topk=8, index_head_dim=4, index_n_heads=5, index_kpool=4, linear_head_dim=7, linear_num_heads=2,
    linear_conv_kernel_dim=3, hc_mult=3, num_nextn_predict_layers=1, pad_token_id=0,
)  # fmt: skip

FLOAT32 = {"attn_hc.base", "attn_hc.scale", "ffn_hc.base", "ffn_hc.scale", "attn.conv", "attn.A_log", "attn.dt_bias"}


def _path_in_layer(path):
    return ".".join(path.split(".")[2:])


def test_shapes_of_every_leaf():
    tree = abstract(TINY)
    shapes = {path: info.shape for path, info in named_leaves(tree)}
    hc = {"fn": (15, 72), "base": (15,), "scale": (3,)}
    hcs = {f"{site}_hc.{k}": v for site in ("attn", "ffn") for k, v in hc.items()}
    kda = {
        "qkv_proj": (42, 24), "conv": (42, 3), "b_proj": (2, 24), "f_a": (7, 24), "f_b": (14, 7), "g_a": (7, 24),
        "g_b": (14, 7), "A_log": (2,), "dt_bias": (2, 7), "o_norm": (7,), "o_proj": (24, 14),
    }  # fmt: skip
    mla = {
        "q_a": (14, 24), "q_a_norm": (14,), "q_b": (24, 14), "kv_a": (10, 24), "kv_a_norm": (10,), "w_uk": (3, 8, 10),
        "w_uv": (3, 6, 10), "o_proj": (24, 18), "indexer.wq_b": (20, 14), "indexer.wk": (4, 24),
        "indexer.k_norm_weight": (4,), "indexer.k_norm_bias": (4,), "indexer.weights_proj": (5, 24),
        "indexer.compress_gate": (4, 24), "indexer.compress_ape": (4, 4),
    }  # fmt: skip
    dense = {"gate_up": (80, 24), "down": (24, 40)}
    moe = {"gate": (6, 24), "bias": (6,), "gate_up": (6, 24, 24), "down": (6, 24, 12)}
    moe |= {"shared.gate_up": (48, 24), "shared.down": (24, 24)}

    def block(attn, ffn):
        leaves = {"attn_norm": (24,), "ffn_norm": (24,)}
        return leaves | {f"attn.{k}": v for k, v in attn.items()} | {f"ffn.{k}": v for k, v in ffn.items()}

    layers = [block(kda, dense)] * 3 + [block(mla, moe), block(kda, moe)]
    wanted = {"embed": (29, 24), "norm": (24,), "lm_head": (29, 24)}
    wanted |= {f"layers.{i}.{k}": v for i, layer in enumerate(layers) for k, v in (layer | hcs).items()}
    mtp = block(mla, moe) | {"enorm": (24,), "hnorm": (24,), "eh_proj": (24, 48), "norm": (24,)}
    assert shapes == wanted | {f"mtp.0.{k}": v for k, v in mtp.items()}
    for _, info in named_leaves(tree):
        assert len(info.axes) == len(info.shape)


def test_types_follow_the_schedules():
    tree = abstract(TINY)
    assert [type(layer.attn) for layer in tree.layers] == [KDA, KDA, KDA, MLA, KDA]
    assert [type(layer.ffn) for layer in tree.layers] == [MLP, MLP, MLP, MoE, MoE]
    assert [type(mtp) for mtp in tree.mtp] == [MTP]
    assert type(tree.mtp[0].ffn) is MoE
    dense = abstract(Config(num_hidden_layers=1, num_nextn_predict_layers=2))
    assert [type(mtp.ffn) for mtp in dense.mtp] == [MLP, MLP]


def test_without_hyper_connections():
    layer = abstract(Config(num_hidden_layers=1, mhc=False)).layers[0]
    assert (layer.attn_hc, layer.ffn_hc) == (None, None)


def test_axes_have_one_size_each():
    sizes: dict[str, set[int]] = {}
    for _, info in named_leaves(abstract(TINY)):
        for axis, size in zip(info.axes, info.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    assert all(len(found) == 1 for found in sizes.values()), sizes


def test_released_model_has_320_billion_parameters():
    cfg = Config(index_kpool=4, num_nextn_predict_layers=1)
    tree = abstract(cfg)
    moe = 288 * 3 * 2048 * 4096 + 3 * 2048 * 4096 + 288 * 4096 + 288
    indexer = 4096 * 1536 + 128 * 4096 + 256 + 32 * 4096 + 128 * 4096 + 4 * 128
    mla = 1536 * 4096 + 1536 + 16384 * 1536 + 512 * 4096 + 512 + 32768 * 512 + 4096 * 16384 + indexer
    kda = 3 * 8192 * (4096 + 4) + 64 * 4096 + 2 * (128 * 4096 + 8192 * 128) + 64 + 8192 + 128 + 4096 * 8192
    hc = 24 * 16384 + 24 + 3
    wanted = 45 * (2 * hc + 2 * 4096) + 34 * kda + 12 * mla + 3 * 3 * 12288 * 4096 + 43 * moe
    wanted += 2 * 154880 * 4096 + 4096 + (5 * 4096 + 4096 * 8192)
    assert count(tree) == wanted
    assert 320e9 < wanted < 321e9
    float32 = sum(math.prod(info.shape) for _, info in named_leaves(tree) if info.dtype == torch.float32)
    assert nbytes(tree) == 2 * wanted + 2 * float32


def test_float32_leaves_are_exactly_these():
    found = {_path_in_layer(p) for p, info in named_leaves(abstract(TINY)) if info.dtype is not None}
    assert found == FLOAT32 | {"ffn.bias"}


def test_tied_head_is_the_embedding_and_counts_once():
    tied = Config(num_hidden_layers=1, tie_word_embeddings=True, vocab_size=10, hidden_size=4)
    free = Config(num_hidden_layers=1, vocab_size=10, hidden_size=4)
    params = init_params(tied)
    assert params.lm_head is params.embed
    assert count(abstract(free)) - count(abstract(tied)) == 40
    assert count(params) == count(abstract(tied))
    assert nbytes(params) == nbytes(abstract(tied), torch.float32)
    other = map_leaves(lambda x: x + 1, params)
    assert other.lm_head is other.embed
    assert cast(params, torch.bfloat16).lm_head.dtype == torch.bfloat16
    assert dict(named_leaves(params))["lm_head"] is params.embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_initial_values_have_the_described_shape_and_dtype(dtype):
    params = init_params(TINY, dtype=dtype)
    infos = dict(named_leaves(abstract(TINY)))
    leaves = dict(named_leaves(params))
    assert leaves.keys() == infos.keys()
    for path, x in leaves.items():
        assert tuple(x.shape) == infos[path].shape
        assert x.dtype == infos[path].dtype_for(dtype), path
        assert x.isfinite().all()
        assert x.is_contiguous()


def test_initial_values_depend_on_the_seed_and_the_path_only():
    a, b = dict(named_leaves(init_params(TINY, seed=3))), dict(named_leaves(init_params(TINY, seed=3)))
    assert all(torch.equal(a[path], b[path]) for path in a)
    torch.manual_seed(99)
    shorter = dict(named_leaves(init_params(attrs.evolve(TINY, **_four_layers()), seed=3)))
    assert all(torch.equal(x, a[path]) for path, x in shorter.items())
    other = dict(named_leaves(init_params(TINY, seed=4)))
    infos = dict(named_leaves(abstract(TINY)))
    random = {path for path in a if infos[path].init in ("normal", "conv", "kda_dt_bias")}
    assert all(not torch.equal(a[path], other[path]) for path in random)
    assert len({a[path].flatten()[0].item() for path in random}) == len(random)
    rounded = dict(named_leaves(init_params(TINY, seed=3, dtype=torch.bfloat16)))
    assert all(torch.equal(a[path].to(x.dtype), x) for path, x in rounded.items())


def _four_layers():
    return {
        "num_hidden_layers": 4,
        "layer_types": TINY.layer_types[:4],
        "mlp_layer_types": TINY.mlp_layer_types[:4],
        "indexer_types": TINY.indexer_types[:4],
    }


def test_distributions_of_initial_values():
    cfg = Config(num_hidden_layers=1, vocab_size=256, hidden_size=64, linear_num_heads=64, linear_head_dim=16,
                 intermediate_size=8, initializer_range=0.5)  # fmt: skip
    attn = init_params(cfg).layers[0].attn
    assert attn.qkv_proj.std().item() == pytest.approx(0.5, rel=0.02)
    assert attn.conv.abs().max() <= 0.5
    assert attn.conv.std().item() == pytest.approx(1 / 12**0.5, rel=0.02)
    assert (attn.A_log == 0).all()
    assert (attn.o_norm == 1).all()
    step = torch.nn.functional.softplus(attn.dt_bias.double())
    assert 1e-3 * 0.999 <= step.min() < 1.1e-3
    assert 0.09 < step.max() <= 0.1 * 1.001
    assert step.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.1)
    rate = init_params(Config(num_hidden_layers=1, vocab_size=8, hidden_size=8, linear_num_heads=512, linear_head_dim=1,
                              intermediate_size=8, linear_lower_bound=None)).layers[0].attn.A_log.exp()  # fmt: skip
    assert 1 <= rate.min() < 1.5
    assert 15.5 < rate.max() <= 16


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_connections_start_as_a_plain_residual(streams):
    cfg = Config(num_hidden_layers=1, vocab_size=8, hidden_size=8, linear_num_heads=1, linear_head_dim=4,
                 intermediate_size=8, hc_mult=streams)  # fmt: skip
    hc = init_params(cfg).layers[0].attn_hc
    pre, post, comb = hc.base.split([streams, streams, streams * streams])
    if streams > 1:
        assert pre.sigmoid().sum().item() == pytest.approx(1.0)
        stays = comb.view(streams, streams).softmax(-1).diagonal()
        assert stays.tolist() == pytest.approx([0.99] * streams)
    assert (2 * post.sigmoid() == 1).all()
    assert hc.scale.tolist() == pytest.approx([0.01] * 3)


def test_cast_keeps_the_float32_leaves():
    params = init_params(TINY)
    half = cast(params, torch.bfloat16)
    for path, x in named_leaves(half):
        assert x.dtype == (torch.float32 if _path_in_layer(path) in FLOAT32 | {"ffn.bias"} else torch.bfloat16), path
    moe = cast(half.layers[3].ffn, torch.float64)
    assert (moe.bias.dtype, moe.gate.dtype, moe.shared.down.dtype) == (torch.float64, torch.float64, torch.float64)
    broken = half.layers[0].attn_hc._replace(base=half.layers[0].attn_hc.base.bfloat16())
    assert cast(broken, torch.float16).base.dtype == torch.float32


def test_cast_is_differentiable():
    params = map_leaves(lambda x: x.requires_grad_(), init_params(TINY))
    cast(params, torch.bfloat16).embed.sum().backward()
    assert (params.embed.grad == 1).all()


def test_maps_skip_layers_that_are_none():
    params = init_params(TINY)
    params = params._replace(layers=(None, *params.layers[1:]), mtp=())
    mapped = map_leaves(lambda x: x + 1, params)
    assert mapped.layers[0] is None
    assert torch.equal(mapped.layers[1].attn.A_log, params.layers[1].attn.A_log + 1)
    paths = map_named_leaves(lambda path, _: path, params)
    assert paths.layers[3].attn.indexer.wk == "layers.3.attn.indexer.wk"
    assert [path for path, _ in named_leaves(params)] == [path for _, path in named_leaves(paths)]
    assert count(params) == sum(x.numel() for _, x in named_leaves(params))


def test_infos_are_values():
    assert abstract(TINY) == abstract(TINY)
    assert isinstance(abstract(TINY).embed, ParamInfo)
    assert hash(abstract(TINY)) == hash(abstract(TINY))
