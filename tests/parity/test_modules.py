"""Module by module, in float32, with the weights of a loaded checkpoint: each block here is the module there."""

from __future__ import annotations

import pytest
import torch

from glm5fn import init_cache, mhc_post, mhc_pre, mhc_pre_norm, rms_norm, use_backend
from glm5fn.blocks import Rows, decoder_layer, feed_forward, index_inputs, kda_block, mla_block
from glm5fn.testing.margin import watch_choices

B, T = 2, 75


@pytest.fixture(params=["bounded", "softplus"])
def one(request, pair):
    text = {"linear_lower_bound": None} if request.param == "softplus" else {}
    return pair("KMKM", "dsss", seed=1, **text)


@pytest.fixture
def hidden(one):
    return torch.randn(B, T, one.cfg.hidden_size, generator=torch.Generator().manual_seed(6))


@pytest.fixture
def streams(one):
    shape = (B, T, one.cfg.hc_mult, one.cfg.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def fresh(one, layer):
    """The empty cache of a layer that T tokens fit in, and where they go."""
    cache = init_cache(one.cfg, B, T, dtype=torch.float32)
    return cache.layers[layer], Rows(cache.length)


@torch.no_grad()
def test_kda_layer(one, hidden, close, backend):
    cache, rows = fresh(one, 0)
    with use_backend(backend):
        out, _ = kda_block(one.params.layers[0].attn, one.cfg, hidden, cache, rows)
    close(out, one.layer(0).self_attn(hidden))


@torch.no_grad()
def test_mla_layer_with_its_indexer(one, hidden, close, backend):
    cache, rows = fresh(one, 1)
    with use_backend(backend), watch_choices() as margin:
        out, _ = mla_block(one.params.layers[1].attn, one.cfg, hidden, cache, rows)
    margin.assert_no_near_tie()
    assert margin.left_out > 0
    close(out, one.layer(1).self_attn(hidden, torch.ones(B, T, dtype=torch.bool))[0])


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_indexer_keys_and_queries(one, hidden, close, size):
    """Small inputs show the epsilon of the key norm."""
    p, theirs = one.params.layers[1].attn.indexer, one.layer(1).self_attn.indexer
    q_latent = torch.randn(B, T, one.cfg.q_lora_rank, generator=torch.Generator().manual_seed(13))
    found = index_inputs(p, one.cfg, size * hidden, q_latent)
    close(found.key, theirs.k_norm(theirs.wk(size * hidden)))
    close(found.query.flatten(-2), theirs.wq_b(q_latent))
    close(found.weights, theirs.weights_proj(size * hidden))
    close(found.gate, size * hidden @ theirs.index_kpool_compress_gate.T)


@torch.no_grad()
@pytest.mark.parametrize("tail", [True, False])
def test_mla_layer_with_and_without_tail(pair, close, backend, tail):
    """Without tail the first tokens select nothing. There the definition gives zeros, as does SDPA in transformers."""
    one = pair("M", "d", index_kpool_always_select_tail=tail)
    hidden = torch.randn(B, T, one.cfg.hidden_size, generator=torch.Generator().manual_seed(8))
    cache, rows = fresh(one, 0)
    with use_backend(backend), watch_choices() as margin:
        out, _ = mla_block(one.params.layers[0].attn, one.cfg, hidden, cache, rows)
    margin.assert_no_near_tie()
    expected = one.layer(0).self_attn(hidden, torch.ones(B, T, dtype=torch.bool))[0]
    assert (not out[:, : one.cfg.index_kpool - 1].any()) == (not tail)
    close(out, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["attn_hc", "ffn_hc"])
def test_hyper_connection(one, streams, close, backend, name):
    ours, theirs = getattr(one.params.layers[2], name), getattr(one.layer(2), name)
    norm = one.params.layers[2].attn_norm
    cfg = one.cfg
    options = {"iters": cfg.hc_sinkhorn_iters, "hc_eps": cfg.hc_eps, "norm_eps": cfg.rms_norm_eps, "backend": backend}
    post, comb, x = theirs(streams)
    found = mhc_pre(streams, ours.fn, ours.base, ours.scale, **options)
    for mine, other in zip(found, (x, post, comb), strict=True):
        close(mine, other)
    normed = mhc_pre_norm(streams, ours.fn, ours.base, ours.scale, norm, **options)[0]
    close(normed, one.layer(2).input_layernorm(x))
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    # What the layer there does with its sub-block's result, in one line.
    mixed = post[..., None] * y[..., None, :] + comb.mT @ streams
    close(mhc_post(y, streams, post, comb, backend=backend), mixed)


@torch.no_grad()
@pytest.mark.parametrize("text", [{}, {"n_group": 3, "topk_group": 2}, {"norm_topk_prob": False}], ids=str)
def test_mixture_of_experts(pair, close, backend, text):
    one = pair("K", "s", seed=2, **text)
    hidden = 4 * torch.randn(B, T, one.cfg.hidden_size, generator=torch.Generator().manual_seed(10))
    with use_backend(backend), watch_choices() as margin:
        out = feed_forward(one.params.layers[0].ffn, one.cfg, hidden)
    margin.assert_no_near_tie()
    close(out, one.layer(0).mlp(hidden))


@torch.no_grad()
def test_dense_feed_forward_and_its_clamp(one, hidden, close, backend):
    for size in (1, 100):
        with use_backend(backend):
            out = feed_forward(one.params.layers[0].ffn, one.cfg, size * hidden)
        close(out, one.layer(0).mlp(size * hidden))


@torch.no_grad()
@pytest.mark.parametrize("layer", range(4))
def test_decoder_layer(one, streams, close, backend, layer):
    cache, rows = fresh(one, layer)
    with use_backend(backend), watch_choices() as margin:
        out, _ = decoder_layer(one.params.layers[layer], one.cfg, streams, cache, rows)
    margin.assert_no_near_tie()
    close(out, one.layer(layer)(streams, attention_mask=torch.ones(B, T, dtype=torch.bool))[0])


@torch.no_grad()
def test_norm(one, hidden, close, backend):
    close(
        rms_norm(hidden, one.params.norm, eps=one.cfg.rms_norm_eps, backend=backend),
        one.theirs.model.language_model.norm(hidden),
    )
