"""What a cache holds beyond its tokens, and what stands in padding, never reaches a result."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from glm5fn import KDACache, ModelCache, decode_step, fork, forward, init_cache, prefill, select, use_backend
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.poison import nan_empty, unchanged

CAPACITY, NUM_SPEC = 30, 3
CONFIGS = {
    "sparse": inputs.config(),
    "dense": inputs.config(index_topk=32),
    "no tail": inputs.config(index_kpool_always_select_tail=False),
}


@pytest.fixture(autouse=True)
def _backend(backend):
    with use_backend(backend):
        yield


@pytest.fixture(params=list(CONFIGS))
def cfg(request):
    return CONFIGS[request.param]


@pytest.fixture
def params(cfg):
    return inputs.params(cfg)


def fill_unused(cfg, cache: ModelCache, value: float) -> ModelCache:
    """A copy of ``cache`` with ``value`` wherever nothing lives: by the definition of each part, row by row."""
    cache = fork(cache)
    for b, length in enumerate(cache.length.tolist()):
        for layer in cache.layers:
            if isinstance(layer, KDACache):
                layer.conv[b, cfg.linear_conv_kernel_dim - 1 :] = value
                layer.state[b, 1:] = value
                continue
            complete = length // cfg.index_kpool
            layer.latent[b, length:] = value
            layer.index.pooled[b, complete:] = value
            ring = layer.index.tail.shape[2]
            waiting = {p % ring for p in range(complete * cfg.index_kpool, length)}
            layer.index.tail[b, :, [slot for slot in range(ring) if slot not in waiting]] = value
    return cache


def calls(cfg, params, cache, **options):
    """Logits of a padded prefill, steps, another padded prefill and steps again, on three rows."""
    tokens = torch.cat(inputs.prompts(cfg, 8, 8, 8, seed=1))
    out = []
    for lengths in ([5, 0, 7], [4, 8, 1]):
        for call in (
            lambda cache, lengths=lengths: prefill(params, cfg, tokens, cache, lengths=lengths, **options),
            lambda cache: decode_step(params, cfg, tokens[:, 0], cache, **options),
            lambda cache: decode_step(params, cfg, tokens[:, 1], cache, **options),
        ):
            logits, cache = call(cache)
            out.append(logits)
    return torch.stack(out), cache


@pytest.fixture
def begun(cfg, params):
    """A cache of three rows with 0, 6 and 13 tokens."""
    tokens = torch.cat(inputs.prompts(cfg, 13, 13, 13))
    cache = init_cache(cfg, 3, CAPACITY, num_spec=NUM_SPEC, dtype=torch.float32)
    return prefill(params, cfg, tokens, cache, lengths=[0, 6, 13])[1]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, -3.0])
def test_unused_entries_never_count(cfg, params, begun, value, donate):
    expected, after = calls(cfg, params, begun)
    logits, dirty = calls(cfg, params, fill_unused(cfg, begun, value), donate=donate)
    assert logits.isfinite().all()
    assert_bitwise(logits, expected)
    # What is alive afterwards is the same too.
    assert_bitwise(fill_unused(cfg, dirty, 0.0), fill_unused(cfg, after, 0.0))


def test_unused_entries_are_left_alone(cfg, params, begun):
    """A call writes its own tokens and nothing beyond them, so that memory can be shared in pages."""
    before = fill_unused(cfg, begun, torch.nan)
    _, after = prefill(params, cfg, torch.zeros(3, 4, dtype=torch.int64), before, lengths=[0, 1, 4])
    assert_bitwise(select(after, [0]), select(before, [0]))
    for b, length in ((1, 7), (2, 17)):
        for layer in after.layers:
            if isinstance(layer, KDACache):
                assert layer.conv[b, cfg.linear_conv_kernel_dim - 1 :].isnan().all()
                assert layer.state[b, 1:].isnan().all()
            else:
                assert layer.latent[b].isnan().all(-1).tolist() == [p >= length for p in range(CAPACITY)]
                pools = layer.index.pooled[b].isnan().all(-1).tolist()
                assert pools == [p >= length // cfg.index_kpool for p in range(len(pools))]


def test_another_text_in_recycled_memory(cfg, params):
    """A cache that held a longer text, with its states zeroed and its length 0, is as good as a new one."""
    tokens = torch.cat(inputs.prompts(cfg, 30, 30, 30, seed=2))
    fresh = init_cache(cfg, 3, CAPACITY, num_spec=NUM_SPEC, dtype=torch.float32)
    _, used = prefill(params, cfg, tokens, fresh)
    recycled = ModelCache(
        tuple(
            pytree.tree_map(torch.zeros_like, layer) if isinstance(layer, KDACache) else layer for layer in used.layers
        ),
        torch.zeros_like(used.length),
    )
    assert_bitwise(calls(cfg, params, recycled)[0], calls(cfg, params, fresh)[0])


@pytest.mark.parametrize("pad", [0, 60, -1, -100, 2**40])
def test_padding_may_hold_anything(cfg, params, begun, pad):
    tokens = torch.cat(inputs.prompts(cfg, 6, 6, 6, seed=3))
    lengths = [3, 6, 0]
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    expected = forward(params, cfg, tokens, begun, lengths=lengths)
    found = forward(params, cfg, torch.where(valid, tokens, pad), begun, lengths=lengths)
    assert_bitwise(found, expected)


def test_uninitialised_memory_is_never_read(cfg, params, begun):
    expected = calls(cfg, params, begun)
    with nan_empty():
        found = calls(cfg, params, begun)
    assert_bitwise(found, expected)


def test_parameters_tokens_and_caches_are_never_written(cfg, params, begun):
    tokens = torch.cat(inputs.prompts(cfg, 6, 6, 6, seed=4))
    with unchanged(*pytree.tree_leaves((params, begun)), tokens):
        prefill(params, cfg, tokens, begun, lengths=[1, 0, 6])
        forward(params, cfg, tokens, begun)
        decode_step(params, cfg, tokens[:, 0], begun)
    with unchanged(*pytree.tree_leaves(params), tokens):
        decode_step(params, cfg, tokens[:, 0], begun, donate=True)


def test_a_broken_token_shows(cfg, params):
    """The other way round: NaN in a row that is alive must not be hidden."""
    (tokens,) = inputs.prompts(cfg, 13)
    cache = init_cache(cfg, 1, CAPACITY, dtype=torch.float32)
    _, cache = prefill(params, cfg, tokens, cache)
    cache.layers[1].latent[0, :13] = torch.nan
    logits, _ = decode_step(params, cfg, tokens[:, 0], cache)
    assert logits.isnan().all()
