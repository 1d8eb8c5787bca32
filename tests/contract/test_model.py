"""What forward, prefill and decode_step return, and what they refuse: in words, before anything is written."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
from torch.utils import _pytree as pytree

from glm5fn import ContractError, debug_donation, decode_step, fork, forward, init_cache, prefill, use_backend
from glm5fn.model import hidden_states
from glm5fn.params import abstract, map_named_leaves, named_leaves
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.poison import unchanged

CFG = inputs.config()
PARAMS = inputs.params(CFG)
CAPACITY = 10


@pytest.fixture
def cache(backend):
    """Rows of 6 and 3 tokens, room for 10."""
    tokens = torch.cat(inputs.prompts(CFG, 6, 6))
    with use_backend(backend):
        empty = init_cache(CFG, 2, CAPACITY, dtype=torch.float32)
        yield prefill(PARAMS, CFG, tokens, empty, lengths=[6, 3])[1]


def tokens(*shape, value=1):
    return torch.full(shape, value)


# -------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shapes_and_dtypes(backend, dtype):
    params = inputs.params(CFG, dtype=dtype)
    with use_backend(backend):
        logits, cache = forward(params, CFG, tokens(2, 5))
        assert (logits.shape, logits.dtype) == ((2, 5, CFG.vocab_size), dtype)
        assert cache.layers[1].latent.shape[1] == 5, "without a cache it makes one that fits exactly"
        hidden, _ = hidden_states(params, CFG, tokens(2, 5))
        assert (hidden.shape, hidden.dtype) == ((2, 5, CFG.hidden_size), dtype)
        logits, cache = prefill(params, CFG, tokens(2, 5), init_cache(CFG, 2, 6, dtype=dtype))
        assert (logits.shape, logits.dtype) == ((2, CFG.vocab_size), dtype)
        logits, cache = decode_step(params, CFG, tokens(2), cache)
        assert (logits.shape, logits.dtype) == ((2, CFG.vocab_size), dtype)
        assert (cache.length.tolist(), cache.length.dtype) == ([6, 6], torch.int32)


def test_logits_are_the_head_of_the_hidden_states(cache):
    hidden, _ = hidden_states(PARAMS, CFG, tokens(2, 3), cache)
    logits, _ = forward(PARAMS, CFG, tokens(2, 3), cache)
    last, _ = prefill(PARAMS, CFG, tokens(2, 3), cache)
    torch.testing.assert_close(logits, hidden @ PARAMS.lm_head.T)
    torch.testing.assert_close(last, logits[:, -1])


@pytest.mark.parametrize("lengths", [[3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32)])
def test_lengths_of_any_integer_kind(cache, lengths):
    expected = prefill(PARAMS, CFG, tokens(2, 3), cache, lengths=[3, 1])
    assert_bitwise(prefill(PARAMS, CFG, tokens(2, 3), cache, lengths=lengths), expected)
    assert expected[1].length.tolist() == [9, 4]


def test_full_lengths_are_no_lengths(cache):
    expected = prefill(PARAMS, CFG, tokens(2, 3), cache)
    assert_bitwise(prefill(PARAMS, CFG, tokens(2, 3), cache, lengths=[3, 3]), expected)


def test_exactly_full_is_allowed(cache):
    _, full = prefill(PARAMS, CFG, tokens(2, 7), cache, lengths=[4, 7])
    assert full.length.tolist() == [CAPACITY, CAPACITY]
    _, full = prefill(PARAMS, CFG, tokens(2, 0), full)
    _, full = prefill(PARAMS, CFG, tokens(2, 5), full, lengths=[0, 0])
    assert full.length.tolist() == [CAPACITY, CAPACITY]


def test_gradients_reach_every_parameter(backend):
    """All but what only chooses: the indexer and the router's correction."""
    params = pytree.tree_map(lambda x: x.clone().requires_grad_(), inputs.params(CFG, dtype=torch.float64))
    with use_backend(backend):
        logits, _ = forward(params, CFG, torch.cat(inputs.prompts(CFG, 21, 21)), lengths=[21, 13])
    logits.square().sum().backward()
    still = {path for path, leaf in named_leaves(params) if leaf.grad is None or not leaf.grad.any()}
    assert still == {path for path, _ in named_leaves(params) if ".indexer." in path or path.endswith("ffn.bias")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(backend, dtype):
    """Neither logits nor caches, in any of the calls."""
    params = inputs.params(CFG, dtype=dtype)

    def results():
        first = forward(params, CFG, tokens(2, 9), lengths=[9, 6])
        begun = prefill(params, CFG, tokens(2, 5), init_cache(CFG, 2, 12, dtype=dtype))
        return (
            first,
            begun,
            decode_step(params, CFG, tokens(2), begun[1], donate=True),
            torch.is_autocast_enabled("cpu"),
        )

    with use_backend(backend):
        expected = results()
        with torch.autocast("cpu", dtype=torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
            found = results()
    assert (expected[-1], found[-1]) == (False, True), "the caller keeps its own mode"
    assert_bitwise(found[:-1], expected[:-1])


# --------------------------------------------------------------------------------------------------------------- errors


def check(message, call, cache):
    """``call`` raises ``message`` and leaves every bit of the cache, of the parameters and of memory beside them."""
    with unchanged(*pytree.tree_leaves((cache, PARAMS))), pytest.raises(ContractError) as error:
        call()
    assert str(error.value) == message


CALLS = {
    "forward": lambda t, c, **o: forward(PARAMS, CFG, t, c, **o),
    "prefill": lambda t, c, **o: prefill(PARAMS, CFG, t, c, donate=True, **o),
    "decode_step": lambda t, c: decode_step(PARAMS, CFG, t[:, 0] if t.dim() > 1 else t, c, donate=True),
}
every_call = pytest.mark.parametrize("name", list(CALLS))
with_rows = pytest.mark.parametrize("name", ["forward", "prefill"])


@every_call
@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, "float32"), (torch.int16, "int16"), (torch.bool, "bool")])
def test_wrong_token_dtype(cache, name, dtype, word):
    message = f"{name}: tokens must be int64 or int32, got {word}."
    check(message, lambda: CALLS[name](tokens(2, 1).to(dtype), cache), cache)


@every_call
@pytest.mark.parametrize(("value", "place"), [(-1, 0), (CFG.vocab_size, 1), (1 << 40, 1)])
def test_token_outside_the_vocabulary(cache, name, value, place):
    bad = tokens(2, 1)
    bad[place] = value
    where = [place] if name == "decode_step" else [place, 0]
    message = f"{name}: tokens must lie in 0..{CFG.vocab_size - 1} (the vocabulary), got {value} at {where}."
    check(message, lambda: CALLS[name](bad, cache), cache)


@with_rows
def test_only_padding_may_be_outside_the_vocabulary(cache, name):
    bad = tokens(2, 3)
    bad[1, 1:] = -9
    CALLS[name](bad, fork(cache), lengths=[3, 1])
    message = f"{name}: tokens must lie in 0..{CFG.vocab_size - 1} (the vocabulary), got -9 at [1, 1]."
    check(message, lambda: CALLS[name](bad, cache, lengths=[3, 2]), cache)


@with_rows
def test_tokens_without_rows(cache, name):
    message = f"{name}: tokens must have 2 dimensions [B, T], got 1: [2]."
    check(message, lambda: CALLS[name](tokens(2), cache), cache)
    message = f"{name}: tokens must be a tensor [B, T], got list."
    check(message, lambda: CALLS[name]([[1], [2]], cache), cache)


def test_a_step_of_many_tokens(cache):
    message = "decode_step: tokens must have 1 dimensions [B], got 2: [2, 1]."
    check(message, lambda: decode_step(PARAMS, CFG, tokens(2, 1), cache, donate=True), cache)


@every_call
def test_cache_of_another_batch(cache, name):
    message = f"{name}: tokens has 3 rows, but cache has 2. Use init_cache(cfg, batch=3, ...)."
    check(message, lambda: CALLS[name](tokens(3, 1), cache), cache)


@every_call
def test_cache_with_too_few_layers(cache, name):
    short = cache._replace(layers=cache.layers[:3])
    message = f"{name}: cfg has 4 layers, but cache has 3."
    check(message, lambda: CALLS[name](tokens(2, 1), short), cache)


@every_call
def test_cache_of_another_model(cache, name):
    other = init_cache(inputs.config("MKKM"), 2, CAPACITY, dtype=torch.float32)
    message = (
        f"{name}: layer 0 of cfg is linear_attention, but cache.layers[0] is MLACache with latent, index.pooled, "
        "index.tail. Use the cache of this model."
    )
    check(message, lambda: CALLS[name](tokens(2, 1), other), other)


@every_call
@pytest.mark.parametrize(
    ("change", "leaf", "wanted", "found"),
    [
        ({"dtype": torch.bfloat16}, "layers[0].conv", "[2, 3, 48] float32 on cpu", "[2, 3, 48] bfloat16 on cpu"),
        ({"dtype": torch.float64}, "layers[0].conv", "[2, 3, 48] float32 on cpu", "[2, 3, 48] float64 on cpu"),
        ({"device": "meta"}, "length", "[2] int32 on cpu", "[2] int32 on meta"),
        ({"linear_num_heads": 4}, "layers[0].conv", "[2, 3, 48] float32 on cpu", "[2, 3, 96] float32 on cpu"),
        ({"kv_lora_rank": 7}, "layers[1].latent", "[2, 10, 10] float32 on cpu", "[2, 10, 7] float32 on cpu"),
        ({"index_kpool": 2}, "layers[1].index.pooled", "[2, 3, 4] float32 on cpu", "[2, 5, 4] float32 on cpu"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_cache_of_other_sizes(cache, name, change, leaf, wanted, found):
    options = {"dtype": torch.float32} | {k: v for k, v in change.items() if k in ("dtype", "device")}
    cfg = attrs.evolve(CFG, **{k: v for k, v in change.items() if k not in options and k != "device"})
    other = init_cache(cfg, 2, CAPACITY, **options)
    message = (
        f"{name}: cache.{leaf} must be {wanted} for this config and these params, got {found}. Make the cache with "
        "init_cache(cfg, ..., dtype=..., device=...)."
    )
    with pytest.raises(ContractError, match=re.escape(message)):
        CALLS[name](tokens(2, 1), other)


@every_call
def test_one_leaf_that_does_not_belong(cache, name):
    """A cache put together from two, found before the layers in front of it have run."""
    other = init_cache(CFG, 2, CAPACITY + 1, dtype=torch.float32)
    mixed = cache._replace(layers=(*cache.layers[:2], other.layers[2], cache.layers[3]))
    message = (
        f"{name}: cache.layers[2].latent must be [2, 10, 10] float32 on cpu for this config and these params, got "
        "[2, 11, 10] float32 on cpu. Make the cache with init_cache(cfg, ..., dtype=..., device=...)."
    )
    check(message, lambda: CALLS[name](tokens(2, 1), mixed), mixed)


@every_call
def test_params_with_missing_layers(cache, name):
    some = PARAMS._replace(layers=(None, *PARAMS.layers[1:3], None))
    call = {"forward": forward, "prefill": prefill, "decode_step": decode_step}[name]
    message = f"{name}: params were loaded without layers [0, 3]. Load the checkpoint without layers= to run it."
    check(message, lambda: call(some, CFG, tokens(2) if name == "decode_step" else tokens(2, 1), cache), cache)


@every_call
def test_params_of_another_model(cache, name):
    call = {"forward": forward, "prefill": prefill, "decode_step": decode_step}[name]
    other = PARAMS._replace(layers=PARAMS.layers[:3])
    message = f"{name}: cfg has 4 layers, but params has 3."
    check(message, lambda: call(other, CFG, tokens(2) if name == "decode_step" else tokens(2, 1), cache), cache)


@every_call
@pytest.mark.parametrize(
    ("change", "leaf", "found", "wanted"),
    [
        ({"index_kpool": 8}, "layers.1.attn.indexer.compress_ape", "[4, 4]", "[8, 4]"),
        ({"n_routed_experts": 12}, "layers.1.ffn.gate", "[6, 24]", "[12, 24]"),
        ({"hidden_size": 48}, "embed", "[61, 24]", "[61, 48]"),
        ({"vocab_size": 10}, "embed", "[61, 24]", "[10, 24]"),
        ({"kv_lora_rank": 8}, "layers.1.attn.kv_a", "[10, 24]", "[8, 24]"),
        ({"mhc": False}, "", "", ""),
        ({"mlp_layer_types": ["sparse"] * 4}, "", "", ""),
        ({"layer_types": ["linear_attention"] * 4}, "", "", ""),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_params_of_another_config(cache, name, change, leaf, found, wanted):
    call = {"forward": forward, "prefill": prefill, "decode_step": decode_step}[name]
    cfg = attrs.evolve(CFG, **change)
    if name == "decode_step":  # what is remembered of one config says nothing about another
        decode_step(PARAMS, CFG, tokens(2), cache)
    with unchanged(*pytree.tree_leaves((cache, PARAMS))), pytest.raises(ContractError) as error:
        call(PARAMS, cfg, tokens(2) if name == "decode_step" else tokens(2, 1), cache)
    assert str(error.value).startswith(f"{name}: params do not belong to cfg: params.{leaf}")
    assert str(error.value).endswith("Use params and cfg of one load_checkpoint, or init_params(cfg).")
    assert f"is {found}" in str(error.value)
    assert f"must be {wanted}" in str(error.value)


@every_call
def test_one_leaf_of_other_params(cache, name):
    call = {"forward": forward, "prefill": prefill, "decode_step": decode_step}[name]
    batch = tokens(2) if name == "decode_step" else tokens(2, 1)
    for path, leaf in named_leaves(PARAMS._replace(mtp=())):
        other = map_named_leaves(lambda p, x, path=path: x[..., :-1] if p == path else x, PARAMS)
        with pytest.raises(ContractError) as error:
            call(other, CFG, batch, cache)
        shape = list(leaf.shape)
        assert str(error.value).startswith(
            f"{name}: params do not belong to cfg: params.{path} is {[*shape[:-1], shape[-1] - 1]}, but for this cfg "
            f"it must be {shape}."
        )


@every_call
@pytest.mark.parametrize(
    ("params", "cfg", "text"),
    [
        (None, CFG, "params must be a Params, got NoneType"),
        (tuple(PARAMS), CFG, "params must be a Params, got tuple"),
        (PARAMS, None, "cfg must be a Config, got NoneType"),
        (CFG, PARAMS, "params must be a Params, got Config"),
        (abstract(CFG), CFG, "params.embed must be a Tensor, got ParamInfo"),
    ],
    ids=["None", "tuple", "no cfg", "swapped", "abstract"],
)
def test_what_is_no_model(cache, name, params, cfg, text):
    call = {"forward": forward, "prefill": prefill, "decode_step": decode_step}[name]
    message = f"{name}: {text}. load_checkpoint returns both."
    check(message, lambda: call(params, cfg, tokens(2) if name == "decode_step" else tokens(2, 1), cache), cache)


@every_call
@pytest.mark.parametrize("row", [0, 1])
def test_negative_length(cache, name, row):
    cache.length[row] = -3
    message = (
        f"{name}: cache.length must be at least 0, got -3 in row {row}. Use a cache as init_cache or an earlier call "
        "returned it."
    )
    check(message, lambda: CALLS[name](tokens(2, 1), cache), cache)


@every_call
def test_tokens_on_another_device(cache, name):
    message = f"{name}: tokens and params must have the same device, got meta and cpu."
    check(message, lambda: CALLS[name](tokens(2, 1).to("meta"), cache), cache)


@with_rows
@pytest.mark.parametrize(
    ("options", "more", "total"), [({}, 5, 11), ({"lengths": [5, 0]}, 5, 11), ({"lengths": [5, 5]}, 5, 11)]
)
def test_overflow_of_the_capacity(cache, name, options, more, total):
    message = (
        f"{name}: row 0 holds 6 tokens and {more} more make {total}, but the cache has capacity 10. Make a larger one "
        f"with init_cache(..., capacity={total})."
    )
    check(message, lambda: CALLS[name](tokens(2, 5), cache, **options), cache)


def test_the_fullest_row_is_named(cache):
    message = (
        "prefill: row 1 holds 3 tokens and 9 more make 12, but the cache has capacity 10. Make a larger one with "
        "init_cache(..., capacity=12)."
    )
    check(message, lambda: prefill(PARAMS, CFG, tokens(2, 9), cache, lengths=[5, 9], donate=True), cache)


def test_overflow_while_decoding(cache):
    for _ in range(4):
        _, cache = decode_step(PARAMS, CFG, tokens(2), cache)
    message = (
        "decode_step: row 0 holds 10 tokens and 1 more make 11, but the cache has capacity 10. Make a larger one with "
        "init_cache(..., capacity=11)."
    )
    for donate in (False, True):
        check(message, lambda donate=donate: decode_step(PARAMS, CFG, tokens(2), cache, donate=donate), cache)


def test_no_limit_without_attention(backend):
    cfg = inputs.config("K")
    params, cache = inputs.params(cfg), init_cache(cfg, 1, 2, dtype=torch.float32)
    with use_backend(backend):
        for _ in range(5):
            _, cache = decode_step(params, cfg, tokens(1), cache)
    assert cache.length.tolist() == [5]


@with_rows
@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([3], "[3]"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([-1, 3], "[-1, 3]"),
        ([4, 0], "[4, 0]"),
        ([1.0, 2.0], "[1.0, 2.0]"),
        ([True, False], "[True, False]"),
        (torch.tensor([1.5, 2.0]), "[1.5, 2.0]"),
        (torch.tensor([True, True]), "[True, True]"),
        (torch.tensor(3), "3"),
        (3, "3"),
        ("ab", "['a', 'b']"),
        ([None, 1], "[None, 1]"),
        (torch.tensor([[1, 2]]), "[[1, 2]]"),
    ],
    ids=str,
)
def test_bad_lengths(cache, name, lengths, shown):
    message = f"{name}: lengths must be 2 integers, one per row, each in 0..T=3, got {shown}."
    check(message, lambda: CALLS[name](tokens(2, 3), cache, lengths=lengths), cache)


# ------------------------------------------------------------------------------------------------------------- donation


@pytest.mark.parametrize("kinds", ["K", "M", "MK"])
def test_debug_mode_finds_a_donated_cache(backend, kinds):
    cfg = inputs.config(kinds)
    params, cache = inputs.params(cfg), init_cache(cfg, 2, 10, num_spec=1, dtype=torch.float32)
    with use_backend(backend), debug_donation():
        _, after = prefill(params, cfg, tokens(2, 3), cache, lengths=[3, 2], donate=True)
        expected, _ = decode_step(params, cfg, tokens(2), after)
        with pytest.raises(ContractError, match=r"was donated to .* before, so it may not be used again"):
            decode_step(params, cfg, tokens(2), cache)
        logits, _ = decode_step(params, cfg, tokens(2), after, donate=True)
    assert_bitwise(logits, expected)


def test_donating_what_gradients_need(cache):
    params = PARAMS._replace(embed=PARAMS.embed.clone().requires_grad_())
    with pytest.raises(ContractError, match=r"donate=True overwrites .*, which gradients need"):
        prefill(params, CFG, tokens(2, 3), cache, donate=True)
    with torch.no_grad():
        prefill(params, CFG, tokens(2, 3), cache, donate=True)
