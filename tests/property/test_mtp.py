"""The multi-token-prediction layer against its definition, composed in float64 from the definitions of its parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from glm5fn import MLACache, init_cache, load_checkpoint, save_checkpoint, use_backend
from glm5fn.blocks import Rows, mtp_block
from glm5fn.model import hidden_states
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.oracle import indexer, mla, moe, norm

B, T = 2, 19
CFG = inputs.config("KM", num_nextn_predict_layers=1)
PARAMS = inputs.params(CFG, dtype=torch.float64)


def new_cache(batch=B) -> MLACache:
    return init_cache(CFG, batch, T, dtype=torch.float64).layers[CFG.mla_layers[0]]


def start(*lengths: int) -> Rows:
    return Rows(torch.tensor(lengths, dtype=torch.int32))


def definition(p, hidden, embedding):
    """``hidden`` and ``embedding`` [B, T, D] of whole sequences that begin at position 0."""
    eps = CFG.rms_norm_eps
    embedding = embedding.clone()
    embedding[:, 0] = 0
    a, b = norm.rms_norm(embedding, p.enorm, eps=eps), norm.rms_norm(hidden, p.hnorm, eps=eps)
    z = torch.cat([a, b], -1) @ p.eh_proj.T
    r = z + attention(p.attn, norm.rms_norm(z, p.attn_norm, eps=eps))
    r = r + experts(p.ffn, norm.rms_norm(r, p.ffn_norm, eps=eps))
    return norm.rms_norm(r, p.norm, eps=eps)


def attention(p, x):
    eps, kpool, ix = CFG.rms_norm_eps, CFG.index_kpool, p.indexer
    q_latent = norm.rms_norm(x @ p.q_a.T, p.q_a_norm, eps=eps)
    q = (q_latent @ p.q_b.T).view(B, T, CFG.num_attention_heads, CFG.qk_nope_head_dim)
    latent = norm.rms_norm(x @ p.kv_a.T, p.kv_a_norm, eps=eps)
    key = x @ ix.wk.T
    key = key - key.mean(-1, keepdim=True)
    key = key / torch.sqrt((key * key).mean(-1, keepdim=True) + 1e-6) * ix.k_norm_weight + ix.k_norm_bias
    P = T // kpool
    members = (x_.unflatten(1, (P, kpool)) for x_ in (key[:, : P * kpool], (x @ ix.compress_gate.T)[:, : P * kpool]))
    pooled = indexer.kpool_compress(*members, ix.compress_ape)
    query = (q_latent @ ix.wq_b.T).view(B, T, CFG.index_n_heads, CFG.index_head_dim)
    chosen = indexer.kpool_select(
        query, x @ ix.weights_proj.T, pooled, torch.arange(T).expand(B, T), topk=CFG.index_topk, kpool=kpool
    )
    assert (chosen >= 0).sum(-1).max() < T
    return mla.mla_sparse(q, latent, p.w_uk, p.w_uv, chosen).flatten(-2) @ p.o_proj.T


def experts(p, x):
    weights, ids = moe.moe_route(
        x, p.gate, p.bias, top_k=CFG.num_experts_per_tok, n_group=CFG.n_group, topk_group=CFG.topk_group,
        norm_topk=CFG.norm_topk_prob, scale=CFG.routed_scaling_factor,
    )  # fmt: skip
    routed = moe.moe_experts(x, ids, weights, p.gate_up, p.down, limit=CFG.swiglu_limit)
    return routed + moe.clamped_swiglu(x @ p.shared.gate_up.T, limit=CFG.swiglu_limit) @ p.shared.down.T


@pytest.fixture
def case(backend):
    """Main hidden states and the embedding of the token after each, as at training; and the definition's result."""
    tokens = torch.cat(inputs.prompts(CFG, T + 1, T + 1))
    with use_backend(backend):
        hidden, _ = hidden_states(PARAMS, CFG, tokens[:, :T])
        embedding = F.embedding(tokens[:, 1:], PARAMS.embed)
        yield hidden, embedding, definition(PARAMS.mtp[0], hidden, embedding)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_whole_sequence(case):
    hidden, embedding, expected = case
    out, cache = mtp_block(PARAMS.mtp[0], CFG, hidden, embedding, new_cache(), start(0, 0))
    close(out, expected)
    assert cache.latent.shape == (B, T, CFG.kv_lora_rank)


@pytest.mark.parametrize("donate", [False, True])
def test_in_pieces(case, donate):
    hidden, embedding, expected = case
    cache, begin = new_cache(), 0
    for piece in (3, 1, 6, 1, 8):
        part = slice(begin, begin + piece)
        rows = start(begin, begin)
        out, cache = mtp_block(PARAMS.mtp[0], CFG, hidden[:, part], embedding[:, part], cache, rows, donate=donate)
        close(out, expected[:, part])
        begin += piece


def test_packed_sequences_of_different_lengths(case):
    """Two sequences, one already begun: only the one at position 0 has its embedding zeroed."""
    hidden, embedding, expected = case
    _, begun = mtp_block(PARAMS.mtp[0], CFG, hidden[:, :5], embedding[:, :5], new_cache(), start(0, 0))
    cache = pytree.tree_map(lambda a, b: torch.cat([a[:1], b[1:]]), new_cache(), begun)
    pack = lambda x: torch.cat([x[0, :7], x[1, 5:]])[None]  # noqa: E731
    rows = Rows(torch.tensor([0, 5], dtype=torch.int32), (7, 14), torch.tensor([0, 7, 21], dtype=torch.int32), T)
    out, _ = mtp_block(PARAMS.mtp[0], CFG, pack(hidden), pack(embedding), cache, rows)
    close(out, pack(expected))


def test_the_embedding_at_position_0_is_zeroed_unless_told_not_to(case):
    hidden, embedding, expected = case
    run = lambda e, **o: mtp_block(PARAMS.mtp[0], CFG, hidden, e, new_cache(), start(0, 0), **o)[0]  # noqa: E731
    other = embedding.clone()
    other[:, 0] = 5.0
    assert_bitwise(run(other), run(embedding))
    assert (run(embedding, zero_first=False) - expected)[:, 0].abs().max() > 1e-3


def test_the_next_draft_takes_this_ones_output(case):
    """Draft j+1: position + 1, the token drafted before, and the previous output as hidden state."""
    hidden, embedding, _ = case
    out, cache = mtp_block(PARAMS.mtp[0], CFG, hidden[:, : T - 1], embedding[:, : T - 1], new_cache(), start(0, 0))
    token = F.linear(out[:, -1:], PARAMS.lm_head).argmax(-1)
    again = F.embedding(token, PARAMS.embed)
    draft, _ = mtp_block(PARAMS.mtp[0], CFG, out[:, -1:], again, cache, start(T - 1, T - 1))
    literal = definition(
        PARAMS.mtp[0],
        torch.cat([hidden[:, : T - 1], out[:, -1:]], 1),
        torch.cat([embedding[:, : T - 1], again], 1),
    )
    close(draft[:, 0], literal[:, -1])


def test_its_weights_are_loaded(case, tmp_path):
    hidden, embedding, _ = case
    save_checkpoint(CFG, inputs.params(CFG), tmp_path / "model")
    cfg, loaded = load_checkpoint(tmp_path / "model", dtype=torch.float64)
    assert (cfg.num_nextn_predict_layers, len(loaded.mtp)) == (1, 1)
    found, _ = mtp_block(loaded.mtp[0], cfg, hidden, embedding, new_cache(), start(0, 0))
    expected, _ = mtp_block(PARAMS.mtp[0], CFG, hidden, embedding, new_cache(), start(0, 0))
    assert_bitwise(found, expected)
