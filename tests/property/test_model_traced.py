"""Decoding never waits for the device, compiles to one graph that fits every length, and runs without memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from glm5fn import Config, decode_step, forward, init_cache, prefill, select, use_backend
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.trace import no_host_reads

CFG = inputs.config()
PARAMS = inputs.params(CFG)


def begun(capacity=40):
    tokens = torch.cat(inputs.prompts(CFG, 7, 7))
    cache = init_cache(CFG, 2, capacity, dtype=torch.float32)
    return prefill(PARAMS, CFG, tokens, cache, lengths=[7, 4])[1]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("capacity", [40, 8], ids=["sparse", "dense"])
def test_a_step_reads_nothing_on_the_host(backend, donate, capacity):
    cache, tokens = begun(capacity), torch.tensor([3, 5])
    with use_backend(backend), no_host_reads():
        decode_step(PARAMS, CFG, tokens, cache, donate=donate)


@pytest.fixture
def compiled():
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    yield torch.compile(decode_step, fullgraph=True, backend=counter), counter
    torch.compiler.reset()


@pytest.mark.parametrize("donate", [False, True])
def test_one_graph_for_every_step(backend, compiled, donate):
    step, counter = compiled
    cache = other = begun()
    with use_backend(backend):
        for t in range(12):  # pools complete on the way, and selection begins
            tokens = torch.tensor([t, 60 - t])
            expected, other = decode_step(PARAMS, CFG, tokens, other)
            logits, cache = step(PARAMS, CFG, tokens, cache, donate=donate)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    assert cache.length.tolist() == other.length.tolist() == [19, 16]


@pytest.mark.parametrize("capacity", [8, 10], ids=["dense", "sparse"])
def test_a_compiled_step_beyond_the_capacity_harms_no_other_row(backend, compiled, capacity):
    """A captured graph cannot raise: the last entry of the full row takes the token, and the other row goes on."""
    step, _ = compiled
    cache = begun(capacity)  # rows of 7 and 4 tokens
    alone = select(cache, [1])
    with use_backend(backend):
        for t in range(capacity - 5):
            logits, cache = step(PARAMS, CFG, torch.tensor([t, t]), cache)
            expected, alone = decode_step(PARAMS, CFG, torch.tensor([t]), alone)
            torch.testing.assert_close(logits[1:], expected, rtol=1e-5, atol=1e-5)
    assert cache.length.tolist() == [capacity + 2, capacity - 1]
    for mine, other in zip(pytree.tree_leaves(select(cache, [1])), pytree.tree_leaves(alone), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


RELEASED = Config(num_hidden_layers=4, index_kpool=4, num_nextn_predict_layers=1)
"""Sizes of the released model, its first four layers: three KDA and one MLA, three dense and one of 288 experts."""


def shapes(tree):
    return [(x.device.type, x.dtype, tuple(x.shape)) for x in pytree.tree_leaves(tree)]


@pytest.mark.parametrize("capacity", [64, 1 << 20], ids=["dense", "sparse"])
def test_the_released_sizes_without_memory(backend, capacity):
    params, V = inputs.meta_params(RELEASED), RELEASED.vocab_size
    cache = init_cache(RELEASED, 2, capacity, device="meta")
    tokens = torch.empty(2, 9, dtype=torch.int64, device="meta")
    with use_backend(backend):
        logits, after = forward(params, RELEASED, tokens)
        assert shapes(logits) == [("meta", torch.bfloat16, (2, 9, V))]
        assert after.layers[3].latent.shape == (2, 9, 512)
        for call in (
            lambda: prefill(params, RELEASED, tokens, cache),
            lambda: prefill(params, RELEASED, tokens, cache, lengths=[9, 4]),
            lambda: decode_step(params, RELEASED, tokens[:, 0], cache),
            lambda: decode_step(params, RELEASED, tokens[:, 0], cache, donate=True),
        ):
            logits, after = call()
            assert shapes(logits) == [("meta", torch.bfloat16, (2, V))]
            assert shapes(after) == shapes(cache)
