"""bfloat16: no further from a float32 run of the same weights than twice what transformers loses, plus one rounding.

Rounding to bfloat16 flips choices, and a flipped choice has nothing to do with accuracy. So whole models are compared
with nothing to choose (every expert is chosen, the context is shorter than index_topk), and single blocks with choices
are compared on the tokens whose choice is clear by more than bfloat16 loses.
"""

from __future__ import annotations

import copy

import pytest
import torch

from glm5fn import blocks, decode_step, forward, init_cache, prefill, use_backend
from glm5fn.blocks import Rows, feed_forward, kda_block, mla_block
from glm5fn.testing.compare import assert_within_budget
from glm5fn.testing.margin import expert_margins, pool_margins

T = 70
NO_CHOICE = {"num_experts_per_tok": 4, "n_routed_experts": 4, "index_topk": 128}
BF16 = torch.bfloat16


def prompt(seed):
    return torch.randint(61, (2, T), generator=torch.Generator().manual_seed(seed))


def exact(pair):
    """The same weights on their side, computed in float32."""
    return pair._replace(theirs=copy.deepcopy(pair.theirs).float())


@pytest.mark.parametrize(
    ("attention", "ffn", "text"),
    [
        ("K", "d", {}),
        ("M", "d", {}),
        ("K", "s", {}),
        ("KMKM", "dsds", {"linear_lower_bound": None}),
        ("KKKMKKKMK", "dddssssss", {}),
    ],
)
def test_whole_prompt(pair, backend, attention, ffn, text):
    """Over three models together: the largest error of one, of theirs or ours, is partly chance."""
    ours, theirs, low = [], [], []
    for seed in range(3):
        one = pair(attention, ffn, dtype=BF16, seed=seed, **NO_CHOICE, **text)
        tokens = prompt(seed)
        with use_backend(backend):
            ours.append(forward(one.params, one.cfg, tokens)[0])
        theirs.append(exact(one).logits(tokens))
        low.append(one.logits(tokens))
    assert_within_budget(torch.stack(ours), torch.stack(theirs), torch.stack(low), what="logits")


def test_prefill_and_steps(pair, backend):
    one = pair("KKKMKKKMK", "dddssssss", dtype=BF16, **NO_CHOICE)
    tokens = prompt(11)
    with use_backend(backend):
        logits, cache = prefill(one.params, one.cfg, tokens[:, :30], init_cache(one.cfg, 2, T))
        found = [logits]
        for t in range(30, T):
            logits, cache = decode_step(one.params, one.cfg, tokens[:, t], cache, donate=True)
            found.append(logits)
    assert_within_budget(torch.stack(found, 1), exact(one).logits(tokens)[:, 29:], one.logits(tokens)[:, 29:])


@pytest.fixture
def one(pair):
    return pair("KMKM", "dsss", dtype=BF16, seed=1)


@pytest.fixture
def hidden(one):
    return torch.randn(2, T, one.cfg.hidden_size, generator=torch.Generator().manual_seed(12)).to(BF16)


@torch.no_grad()
def test_kda_layer(one, hidden, backend):
    cache = init_cache(one.cfg, 2, T)
    with use_backend(backend):
        out, _ = kda_block(one.params.layers[0].attn, one.cfg, hidden, cache.layers[0], Rows(cache.length))
    theirs = exact(one).layer(0).self_attn(hidden.float())
    assert_within_budget(out, theirs, one.layer(0).self_attn(hidden))


@torch.no_grad()
def test_mla_layer_where_the_selection_is_clear(one, hidden, backend, monkeypatch):
    margins = []

    def select(q, weights, pooled, positions, *, topk, kpool, tail):
        margins.append(pool_margins(q, weights, pooled, positions, topk=topk, kpool=kpool))
        return kpool_select(q, weights, pooled, positions, topk=topk, kpool=kpool, tail=tail)

    kpool_select = blocks.kpool_select
    monkeypatch.setattr(blocks, "kpool_select", select)
    cache, mask = init_cache(one.cfg, 2, T), torch.ones(2, T, dtype=torch.bool)
    with use_backend(backend):
        out, _ = mla_block(one.params.layers[1].attn, one.cfg, hidden, cache.layers[1], Rows(cache.length))
    clear = margins[0] > 0.04
    chosen_from_some = margins[0].isfinite()
    assert (clear & chosen_from_some).sum() > 20
    theirs = exact(one).layer(1).self_attn(hidden.float(), mask)[0]
    low = one.layer(1).self_attn(hidden, mask)[0]
    assert_within_budget(out[clear], theirs[clear], low[clear])


@torch.no_grad()
def test_experts_where_the_routing_is_clear(one, hidden, backend):
    moe = one.params.layers[1].ffn
    clear = expert_margins(hidden, moe.gate, moe.bias, top_k=one.cfg.num_experts_per_tok) > 1e-4
    assert clear.float().mean() > 0.9  # the router computes in float32 on both sides
    with use_backend(backend):
        out = feed_forward(moe, one.cfg, hidden)
    theirs, low = exact(one).layer(1).mlp(hidden.float()), one.layer(1).mlp(hidden)
    assert_within_budget(out[clear], theirs[clear], low[clear])
