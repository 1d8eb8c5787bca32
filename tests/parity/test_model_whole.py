"""Logits of whole prompts are those of transformers, for every kind of layer, pool size and gate.

A near tie in a selection could flip by rounding and change the logits by far more. So every test shows that there is
none: the smallest margin of any choice is ten times what float32 loses.
"""

from __future__ import annotations

import pytest
import torch

from glm5fn import blocks, forward, use_backend
from glm5fn.testing.margin import watch_choices

STACKS = ["K:d", "KK:ds", "M:d", "MM:sd", "KM:sd", "MK:ds", "KKKMKKKMK:dddssssss"]
VARIANTS = {
    "bounded": {},
    "softplus": {"linear_lower_bound": None},
    "kpool16": {"index_kpool": 16, "index_topk": 32},
    "groups": {"n_group": 2, "topk_group": 1},
    "two shared": {"n_shared_experts": 2, "norm_topk_prob": False},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack(pair, close, backend, stack):
    check(pair(*stack.split(":")), close, backend)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_of_a_mix(pair, close, backend, variant):
    text = dict(VARIANTS[variant])
    implementation = text.pop("attn_implementation", "sdpa")
    one = pair("KMKM", "dsss", seed=1, **text)
    one.theirs.set_attn_implementation(implementation)
    check(one, close, backend, tokens=90)


def check(pair, close, backend, tokens=70):
    prompt = torch.randint(pair.cfg.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(1))
    with use_backend(backend), watch_choices() as margin:
        ours, cache = forward(pair.params, pair.cfg, prompt)
    assert cache.length.tolist() == [tokens] * 2
    margin.assert_no_near_tie()
    if pair.cfg.mla_layers:
        assert margin.left_out > 0, "every token was selected, so selection was not compared"
    close(ours, pair.logits(prompt))


@pytest.mark.parametrize("kpool", [4, 16])
def test_the_same_tokens_are_selected(pair, backend, kpool):
    """What the indexer of transformers returns, query by query, as sets; and some visible tokens are left out."""
    one = pair("M", "d", index_kpool=kpool, index_topk=32)
    prompt = torch.randint(61, (2, 83), generator=torch.Generator().manual_seed(2))
    theirs, ours = [], []
    hook = one.layer(0).self_attn.indexer.register_forward_hook(lambda module, args, result: theirs.append(result))
    one.logits(prompt)
    hook.remove()
    with use_backend(backend), pytest.MonkeyPatch.context() as patch:
        select = blocks.kpool_select
        patch.setattr(blocks, "kpool_select", lambda *a, **k: ours.append(select(*a, **k)) or ours[-1])
        forward(one.params, one.cfg, prompt)
    assert theirs[0].shape == ours[0].shape == (2, 83, 32 + kpool - 1)
    as_sets = [[[set(t) - {-1} for t in row] for row in x.tolist()] for x in (theirs[0], ours[0])]
    assert as_sets[0] == as_sets[1]
    assert all(len(s) < 83 for row in as_sets[0] for s in row)
