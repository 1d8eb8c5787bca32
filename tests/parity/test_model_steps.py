"""Prompts in pieces and tokens one by one give what transformers computes for the whole text, without a cache."""

from __future__ import annotations

import pytest
import torch

from glm5fn import decode_step, init_cache, prefill, use_backend
from glm5fn.testing.margin import watch_choices

PROMPT, STEPS = 37, 64
STACKS = {
    "bounded": ("KKKMKKKMK", "dddssssss", {}),
    "softplus": ("KMK", "dss", {"linear_lower_bound": None}),
    "kpool16": ("MKM", "sds", {"index_kpool": 16, "index_topk": 32}),
    "one KDA": ("K", "d", {}),
    "one MLA": ("M", "s", {}),
}


@pytest.fixture(params=list(STACKS))
def case(request, pair):
    """Both sides, a text, its logits by transformers, and a cache that the whole text fits in exactly."""
    attention, ffn, text = STACKS[request.param]
    one = pair(attention, ffn, **text)
    tokens = torch.randint(61, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(33))
    cache = init_cache(one.cfg, 2, PROMPT + STEPS, dtype=torch.float32)
    return one, tokens, one.logits(tokens), cache


def test_prefill_and_64_steps(case, close, backend):
    one, tokens, expected, cache = case
    with use_backend(backend), watch_choices() as margin:
        logits, cache = prefill(one.params, one.cfg, tokens[:, :PROMPT], cache)
        found = [logits]
        for t in range(PROMPT, PROMPT + STEPS):
            logits, cache = decode_step(one.params, one.cfg, tokens[:, t], cache, donate=True)
            found.append(logits)
    margin.assert_no_near_tie()
    assert margin.left_out > 0 or not one.cfg.mla_layers
    close(torch.stack(found, dim=1), expected[:, PROMPT - 1 :])


@pytest.mark.parametrize("pieces", [(1, 1, 1, 98), (50, 51), (3, 5, 7, 11, 13, 62), (98, 3), (31, 33, 0, 37)], ids=str)
def test_uneven_pieces(case, close, backend, pieces):
    one, tokens, expected, cache = case
    assert sum(pieces) == tokens.shape[1]
    begin = 0
    for piece in pieces:
        with use_backend(backend):
            logits, cache = prefill(one.params, one.cfg, tokens[:, begin : begin + piece], cache)
        begin += piece
        if piece:
            close(logits, expected[:, begin - 1])
    assert cache.length.tolist() == [begin] * 2
