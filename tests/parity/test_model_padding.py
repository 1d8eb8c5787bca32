"""A batch padded on the left in transformers is the same batch padded on the right here."""

from __future__ import annotations

import pytest
import torch

from glm5fn import decode_step, forward, init_cache, prefill, use_backend
from glm5fn.testing.margin import watch_choices

LENGTHS = (41, 70, 2, 53)


@pytest.mark.parametrize("stack", ["K:d", "M:s", "KMKM:dsds"])
def test_left_padded_there_is_right_padded_here(pair, close, backend, stack):
    one = pair(*stack.split(":"))
    T = max(LENGTHS)
    generator = torch.Generator().manual_seed(15)
    rows = [torch.randint(61, (n,), generator=generator) for n in LENGTHS]
    left, mask, right = (
        torch.zeros(4, T, dtype=torch.int64),
        torch.zeros(4, T, dtype=torch.int64),
        torch.full((4, T), -1),
    )
    for b, row in enumerate(rows):
        left[b, T - len(row) :], mask[b, T - len(row) :], right[b, : len(row)] = row, 1, row
    theirs = one.logits(left, attention_mask=mask)

    with use_backend(backend), watch_choices() as margin:
        ours, _ = forward(one.params, one.cfg, right, lengths=LENGTHS)
    margin.assert_no_near_tie()
    assert margin.left_out > 0 or not one.cfg.mla_layers
    for b, n in enumerate(LENGTHS):
        close(ours[b, :n], theirs[b, T - n :])
        assert not ours[b, n:].any()

    # The last tokens of the rows, one each, after a padded prompt: the caches too belong to the right positions.
    cache = init_cache(one.cfg, 4, T, dtype=torch.float32)
    last = torch.tensor([int(row[-1]) for row in rows])
    with use_backend(backend):
        _, cache = prefill(one.params, one.cfg, right, cache, lengths=[n - 1 for n in LENGTHS])
        logits, cache = decode_step(one.params, one.cfg, last, cache)
    assert cache.length.tolist() == list(LENGTHS)
    close(logits, theirs[:, -1])
