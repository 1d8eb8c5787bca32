"""Operations against the modules of transformers' glm5_next."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm5fn.ops.indexer import kpool_compress, kpool_select
from glm5fn.ops.mhc import mhc_pre
from glm5fn.ops.moe import moe_experts, moe_route

peer = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")


def config(**changes):
    options = {
        "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": 12,
        "index_n_heads": 4, "index_head_dim": 8, "index_kpool": 4, "index_topk": 8, "n_routed_experts": 12,
        "num_experts_per_tok": 3, "moe_intermediate_size": 10, "swiglu_limit": 1.0, "hc_mult": 4,
    }  # fmt: skip
    return peer.Glm5NextTextConfig(**options | changes)


def random_(module, spread=1.0):
    """``module`` with normal parameters and buffers, in evaluation mode."""
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.copy_(torch.randn_like(x) * spread)
    return module.eval()


@pytest.mark.parametrize("streams", [1, 4])
def test_hyper_connection(streams, backend):
    cfg = config(hc_mult=streams)
    module = random_(peer.Glm5NextTextHyperConnection(cfg))
    x = torch.randn(2, 5, streams, 24)
    with torch.no_grad():
        post, comb, collapsed = module(x)
        found = mhc_pre(
            x, module.fn, module.base, module.scale,
            iters=cfg.hc_sinkhorn_iters, hc_eps=cfg.hc_eps, norm_eps=cfg.rms_norm_eps, backend=backend,
        )  # fmt: skip
    for ours, theirs in zip(found, (collapsed, post, comb), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("kpool", "topk"), [(4, 8), (4, 16), (16, 16), (2, 64)])
@pytest.mark.parametrize("tail", [True, False])
def test_indexer_selects_the_same_tokens(kpool, topk, tail, backend):
    """Row 1 is left-padded there by 5 tokens and right-padded here."""
    cfg = config(index_kpool=kpool, index_topk=topk, index_kpool_always_select_tail=tail)
    module = random_(peer.Glm5NextTextIndexer(cfg, layer_idx=3), spread=0.5)
    T, pad = 50, torch.tensor([0, 5])
    x, q_latent = torch.randn(2, T, 24), torch.randn(2, T, 12)
    mask = torch.arange(T) >= pad[:, None]
    with torch.no_grad():
        theirs = module(x, q_latent, mask, None)
        theirs = torch.where(theirs >= 0, theirs - pad[:, None, None], -1)
        shifted = torch.stack([row.roll(-int(n), dims=0) for row, n in zip(x, pad, strict=True)])
        complete = shifted[:, : T // kpool * kpool]
        key = module.k_norm(module.wk(complete)).unflatten(1, (-1, kpool))
        gate = F.linear(complete, module.index_kpool_compress_gate).unflatten(1, (-1, kpool))
        pooled = kpool_compress(key, gate, module.index_kpool_compress_ape, backend=backend)
        query = module.wq_b(q_latent).unflatten(-1, (4, 8))
        weights = module.weights_proj(x)
        positions = torch.arange(T) - pad[:, None]
        ours = kpool_select(query, weights, pooled, positions, topk=topk, kpool=kpool, tail=tail, backend=backend)
    distinct = gapped(query, weights, pooled, positions, topk // kpool, kpool)
    assert distinct.float().mean() > 0.8
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.sort(-1).values[distinct], theirs.int().sort(-1).values[distinct], rtol=0, atol=0)


def gapped(query, weights, pooled, positions, pools, kpool):
    """Which queries have a clear gap between the scores of the last chosen pool and the first one left out."""
    scores = torch.einsum("btj,btjp->btp", weights, torch.einsum("btji,bpi->btjp", query, pooled).relu())
    scores = scores.masked_fill(torch.arange(pooled.shape[1]) >= (positions[..., None] + 1) // kpool, -torch.inf)
    ranked = F.pad(scores.sort(-1, descending=True).values, (0, pools + 1), value=-torch.inf)
    gap = ranked[..., pools - 1] - ranked[..., pools]
    return ~(gap < 1e-4)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("norm", [True, False])
def test_router(groups, norm, backend):
    cfg = config(n_group=groups[0], topk_group=groups[1], norm_topk_prob=norm, routed_scaling_factor=2.5)
    module = random_(peer.Glm5NextTextTopkRouter(cfg), spread=0.3)
    x = torch.randn(2, 40, 24)
    with torch.no_grad():
        _, weights, ids = module(x)
        found = moe_route(
            x, module.weight, module.e_score_correction_bias, top_k=3, n_group=groups[0], topk_group=groups[1],
            norm_topk=norm, scale=2.5, backend=backend,
        )  # fmt: skip
    order = ids.view(2, 40, 3).argsort(-1)
    ours = found.ids.long().argsort(-1)
    assert torch.equal(found.ids.gather(-1, ours).long(), ids.view(2, 40, 3).gather(-1, order))
    theirs = weights.view(2, 40, 3).gather(-1, order)
    torch.testing.assert_close(found.weights.gather(-1, ours), theirs, rtol=2e-6, atol=1e-7)


def test_experts(backend):
    module = random_(peer.Glm5NextTextExperts(config()), spread=0.4)
    x, weights = torch.randn(2, 20, 24), torch.rand(2, 20, 3)
    ids = torch.rand(2, 20, 12).argsort(-1)[..., :3]
    with torch.no_grad():
        theirs = module(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        ours = moe_experts(
            x, ids.int(), weights, module.gate_up_proj, module.down_proj, limit=module.swiglu_limit, backend=backend
        )
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
