"""A text gives the same logits and the same cache however it is cut, batched, padded, forked or given away."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from glm5fn import decode_step, fork, forward, init_cache, prefill, record_choices, rms_norm, select, use_backend
from glm5fn.blocks import Rows, feed_forward, kda_block, mla_block
from glm5fn.params import cast, map_named_leaves
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.margin import watch_choices

T = 21  # more than index_topk, not a multiple of kpool
CFG = inputs.config()
VARIANTS = {
    "mix": CFG,
    "KDA only": inputs.config("K"),
    "MLA only": inputs.config("M"),
    "plain residuals": inputs.config(mhc=False),
    "no tail": inputs.config(index_kpool_always_select_tail=False),
    "pools of 1": inputs.config(index_kpool=1, index_topk=7),
    "pools of 5": inputs.config(index_kpool=5, index_topk=10),
    "softplus": inputs.config(linear_lower_bound=None),
    "conv of 2": inputs.config(linear_conv_kernel_dim=2),
}
PARAMS = {cfg: inputs.params(cfg, dtype=torch.float64) for cfg in VARIANTS.values()}


@pytest.fixture(autouse=True)
def _backend(backend):
    with use_backend(backend):
        yield


def empty(cfg, batch=1, capacity=T, dtype=torch.float64, **options):
    return init_cache(cfg, batch, capacity, dtype=dtype, **options)


def text(cfg, tokens=T, batch=1, seed=0):
    return torch.cat(inputs.prompts(cfg, *[tokens] * batch, seed=seed))


def same(actual, expected, tolerance=1e-10):
    """Trees of tensors are equal up to rounding in float64."""
    pairs = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True))
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def feed(params, cfg, tokens, cache, pieces, **options):
    """Logits after each piece and the last cache; a piece of 1 is a decode step, -1 a prefill of one token."""
    logits, begin = [], 0
    for piece in pieces:
        part = tokens[:, begin : begin + abs(piece)]
        if piece == 1:
            out, cache = decode_step(params, cfg, part[:, 0], cache, **options)
        else:
            out, cache = prefill(params, cfg, part, cache, **options)
        begin += abs(piece)
        logits.append(out)
    return torch.stack(logits, 1), cache


# ------------------------------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_cut_is_the_whole(name):
    cfg, params = VARIANTS[name], PARAMS[VARIANTS[name]]
    tokens = text(cfg)
    whole, after = forward(params, cfg, tokens)
    for cut in range(T + 1):
        first, cache = forward(params, cfg, tokens[:, :cut], empty(cfg))
        second, cache = forward(params, cfg, tokens[:, cut:], cache)
        same(torch.cat([first, second], 1), whole)
        same(cache, after)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_token_by_token_is_the_whole(name):
    cfg, params = VARIANTS[name], PARAMS[VARIANTS[name]]
    tokens = text(cfg, batch=2)
    whole, after = forward(params, cfg, tokens)
    logits, cache = feed(params, cfg, tokens, empty(cfg, 2), [1] * T)
    same((logits, cache), (whole, after))


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 11]), max_size=12))
def test_any_pieces_in_any_order(pieces):
    pieces.append(T - sum(abs(p) for p in pieces))
    while pieces[-1] < 0:  # too long: drop pieces until the rest fits
        pieces = [*pieces[:-2], pieces[-1] + abs(pieces[-2])]
    tokens = text(CFG)
    whole, after = forward(PARAMS[CFG], CFG, tokens)
    logits, cache = feed(PARAMS[CFG], CFG, tokens, empty(CFG), pieces)
    ends = torch.tensor([abs(p) for p in pieces]).cumsum(0)
    for i, (piece, end) in enumerate(zip(pieces, ends.tolist(), strict=True)):
        same(logits[:, i], whole[:, end - 1] if piece else torch.zeros_like(whole[:, 0]))
    same(cache, after)


@pytest.mark.parametrize("pieces", [[T], [5, 7, 9], [1] * T, [13, 1, 1, 1, 5]], ids=str)
def test_float32_stays_within_its_budget(pieces):
    tokens = text(CFG, batch=2)
    params = inputs.params(CFG)
    with watch_choices() as margin:
        exact, _ = forward(cast(params, torch.float64), CFG, tokens)
    margin.assert_no_near_tie()
    low, _ = forward(params, CFG, tokens)
    logits, _ = feed(params, CFG, tokens, empty(CFG, 2, dtype=torch.float32), pieces)
    ends = [sum(pieces[: i + 1]) - 1 for i in range(len(pieces))]
    assert_within_budget(logits, exact[:, ends], low[:, ends])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_cache(dtype):
    """Rounding would flip choices, so there are none: all experts, and a context below index_topk."""
    cfg = inputs.config(num_experts_per_tok=CFG.n_routed_experts, index_topk=32)
    params = inputs.params(cfg, dtype=dtype)
    tokens = text(cfg, batch=2)
    exact, _ = forward(cast(params, torch.float64), cfg, tokens)
    low, _ = forward(params, cfg, tokens)
    logits, cache = feed(params, cfg, tokens, empty(cfg, 2, dtype=dtype), [9, *[1] * 12])
    assert {x.dtype for x in pytree.tree_leaves(cache)} == {dtype, torch.float32, torch.int32}
    assert_within_budget(logits, exact[:, 8:], low[:, 8:])


# ------------------------------------------------------------------------------------------------------------ batching


@pytest.mark.parametrize("name", ["mix", "plain residuals", "no tail"])
def test_a_padded_batch_is_each_row_alone(name):
    cfg, params = VARIANTS[name], PARAMS[VARIANTS[name]]
    tokens = text(cfg, batch=5)
    check_rows(cfg, params, tokens, [(9, 0, 4, 1, 7), (2, 0, 0, 9, 1), (10, 3, 8, 11, 0)])


@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 7)] * 3), min_size=1, max_size=3))
def test_any_lengths_in_any_number_of_calls(calls):
    check_rows(CFG, PARAMS[CFG], text(CFG, batch=3), calls)


def check_rows(cfg, params, tokens, calls):
    """Rows advance by ``calls[i][b]`` tokens in call i; each row's logits and cache are those of the row by itself."""
    B = tokens.shape[0]
    cache, done = empty(cfg, B), [0] * B
    for lengths in calls:
        before, width = cache, max(lengths) + 1
        padded = torch.full((B, width), -7)  # no such token: padding must not even be looked at
        for b, n in enumerate(lengths):
            padded[b, :n] = tokens[b, done[b] : done[b] + n]
        last, cache = prefill(params, cfg, padded, before, lengths=lengths)
        logits, other = forward(params, cfg, padded, before, lengths=torch.tensor(lengths))
        assert_bitwise(other, cache)
        for b, n in enumerate(lengths):
            assert not logits[b, n:].any()
            if n == 0:
                assert not last[b].any()
                assert_bitwise(select(cache, [b]), select(before, [b]))
                continue
            whole, alone = forward(params, cfg, tokens[b : b + 1, : done[b] + n], empty(cfg))
            same(logits[b, :n], whole[0, done[b] :])
            same(last[b], whole[0, -1])
            done[b] += n
            same(select(cache, [b]), alone)
    assert cache.length.tolist() == done


def test_a_permuted_batch_gives_permuted_results():
    tokens, order = text(CFG, batch=4), [2, 0, 3, 1]
    lengths = torch.tensor([T - 2, 3, 11, 0])
    logits, cache = prefill(PARAMS[CFG], CFG, tokens, empty(CFG, 4), lengths=lengths)
    mixed, other = prefill(PARAMS[CFG], CFG, tokens[order], empty(CFG, 4), lengths=lengths[order])
    same((mixed, other), (logits[order], select(cache, order)))
    step, after = decode_step(PARAMS[CFG], CFG, tokens[:, 0], cache)
    mixed, other = decode_step(PARAMS[CFG], CFG, tokens[order, 0], other)
    same((mixed, other), (step[order], select(after, order)))


def test_an_empty_batch():
    for call in (forward, prefill):
        logits, cache = call(PARAMS[CFG], CFG, torch.zeros(0, 3, dtype=torch.int64), empty(CFG, 0))
        assert (logits.shape[0], logits.shape[-1], cache.length.numel()) == (0, CFG.vocab_size, 0)
    logits, _ = decode_step(PARAMS[CFG], CFG, torch.zeros(0, dtype=torch.int64), empty(CFG, 0))
    assert logits.shape == (0, CFG.vocab_size)


def test_int32_tokens():
    tokens = text(CFG)
    assert_bitwise(forward(PARAMS[CFG], CFG, tokens.int()), forward(PARAMS[CFG], CFG, tokens))


# ------------------------------------------------------------------------------------------- dense and sparse attention


def test_sparse_attention_is_dense_while_everything_is_selected(monkeypatch):
    """Where the host must not read lengths, a cache with room for more than index_topk tokens always selects; up to
    index_topk tokens that leaves none out, which is what the dense path that the host may choose computes."""
    monkeypatch.setattr("glm5fn.model._check_capacity", lambda *args: None)
    sparse, dense = inputs.config("M", index_topk=12), inputs.config("M", index_topk=40)
    params, tokens = PARAMS[VARIANTS["MLA only"]], text(CFG, 12, batch=2)
    with record_choices() as ran:
        logits, cache = feed(params, sparse, tokens, empty(sparse, 2, 40), [1] * 12)
    assert {"mla_sparse", "kpool_select"} <= {choice.op for choice in ran}
    monkeypatch.undo()
    with record_choices() as ran:
        again, _ = feed(params, sparse, tokens, empty(sparse, 2, 40), [1] * 12)
    assert not {"mla_sparse", "kpool_select"} & {choice.op for choice in ran}
    with record_choices() as ran:
        expected, other = feed(params, dense, tokens, empty(dense, 2, 40), [1] * 12)
    assert "mla_decode" in {choice.op for choice in ran}
    assert not {"mla_sparse", "kpool_select"} & {choice.op for choice in ran}
    same((logits, cache), (expected, other))
    same(again, expected)


def test_sparse_attention_leaves_tokens_out_beyond():
    tokens = text(CFG, batch=2)
    with watch_choices() as margin:
        logits, _ = forward(PARAMS[CFG], CFG, tokens)
    everything, _ = forward(PARAMS[CFG], inputs.config(index_topk=32), tokens)
    assert margin.left_out > 0
    first = CFG.index_topk + 1  # tokens that the first query which leaves one out can see
    same(logits[:, : first - 1], everything[:, : first - 1])
    assert (logits - everything)[:, first:].abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------- caches are values


CALLS = (
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 6, 2), cache, **o),
    lambda cache, **o: decode_step(PARAMS[CFG], CFG, text(CFG, 1, 2, seed=1)[:, 0], cache, **o),
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 5, 2, seed=2), cache, lengths=[5, 2], **o),
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 0, 2), cache, **o),
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 3, 2), cache, lengths=[0, 0], **o),
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 4, 2, seed=3), cache, lengths=[0, 4], **o),
    lambda cache, **o: decode_step(PARAMS[CFG], CFG, text(CFG, 1, 2, seed=4)[:, 0], cache, **o),
    lambda cache, **o: prefill(PARAMS[CFG], CFG, text(CFG, 7, 2, seed=5), cache, **o),
)


def memory(cache):
    return {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(cache)}


@pytest.mark.parametrize("num_spec", [0, 3])
def test_old_caches_stay_as_they_were_and_share_no_memory(num_spec):
    caches = [empty(CFG, 2, 30, num_spec=num_spec)]
    copies, results = [fork(caches[0])], []
    for call in CALLS:
        logits, cache = call(caches[-1])
        assert not memory(cache) & set().union(*map(memory, caches))
        caches.append(cache)
        copies.append(fork(cache))
        results.append(logits)
    assert_bitwise(caches, copies)
    # Any of them can be continued from again.
    for call, before, logits, after in zip(CALLS, caches[:-1], results, caches[1:], strict=True):
        assert_bitwise(call(before), (logits, after))


@pytest.mark.parametrize("num_spec", [0, 3])
def test_donating_changes_nothing_but_the_memory(num_spec):
    kept = given_away = empty(CFG, 2, 30, num_spec=num_spec)
    given_away = fork(given_away)
    places = [x.data_ptr() for x in pytree.tree_leaves(given_away.layers)]
    for call in CALLS:
        expected, kept = call(kept)
        logits, given_away = call(given_away, donate=True)
        assert_bitwise((logits, given_away), (expected, kept))
    assert [x.data_ptr() for x in pytree.tree_leaves(given_away.layers)] == places, "nothing was reused"


def test_a_fork_goes_its_own_way():
    tokens = text(CFG, batch=2)
    _, trunk = prefill(PARAMS[CFG], CFG, tokens[:, :13], empty(CFG, 2))
    branch = fork(trunk)
    for _ in range(13, T):
        _, branch = decode_step(PARAMS[CFG], CFG, tokens[:, 0], branch, donate=True)
    logits, _ = prefill(PARAMS[CFG], CFG, tokens[:, 13:], trunk)
    same(logits, forward(PARAMS[CFG], CFG, tokens)[0][:, -1])


def test_one_prompt_becomes_a_beam():
    tokens = text(CFG, batch=3)
    tokens[:, :13] = tokens[:1, :13]
    _, one = prefill(PARAMS[CFG], CFG, tokens[:1, :13], empty(CFG))
    logits, _ = prefill(PARAMS[CFG], CFG, tokens[:, 13:], select(one, [0, 0, 0]), donate=True)
    same(logits, forward(PARAMS[CFG], CFG, tokens)[0][:, -1])


@pytest.mark.parametrize("num_spec", [1, 3, 4])
def test_room_for_speculation_changes_nothing(num_spec):
    tokens = text(CFG, batch=2)
    expected, _ = feed(PARAMS[CFG], CFG, tokens, empty(CFG, 2), [6, 1, 1, 3, 1, 9])
    cache = pytree.tree_map(lambda x: x if x.dtype == torch.int32 else x + 1, empty(CFG, 2, num_spec=num_spec))
    cache = clear_what_counts(cache)
    logits, after = feed(PARAMS[CFG], CFG, tokens, cache, [6, 1, 1, 3, 1, 9])
    assert_bitwise(logits, expected)
    W = CFG.linear_conv_kernel_dim
    for layer in (after.layers[0], after.layers[3]):
        assert torch.all(layer.conv[:, W - 1 :] == 1)
        assert torch.all(layer.state[:, 1:] == 1)


def clear_what_counts(cache):
    """The conv rows and the state that a plain step reads are zero in an empty cache; the others may hold anything."""
    for layer in cache.layers:
        if hasattr(layer, "conv"):
            layer.conv[:, : CFG.linear_conv_kernel_dim - 1] = 0
            layer.state[:, 0] = 0
    return cache


def test_the_streams_end_in_their_mean():
    """Blocks that add nothing leave every stream as it began; small ones, so that the epsilon of the norm shows."""
    silent = lambda path, x: torch.zeros_like(x) if path.endswith(("o_proj", "down")) else x  # noqa: E731
    params = map_named_leaves(silent, PARAMS[CFG])
    params = params._replace(embed=1e-3 * params.embed)
    tokens = text(CFG)
    expected = rms_norm(params.embed[tokens], params.norm, eps=CFG.rms_norm_eps) @ params.lm_head.T
    same(forward(params, CFG, tokens)[0], expected, tolerance=1e-4)  # the columns of comb sum to 1 up to hc_eps


def test_plain_residuals_are_what_they_say():
    """Without hyper-connections a layer is x + f(norm(x)), twice, and nothing else."""
    cfg, params = VARIANTS["plain residuals"], PARAMS[VARIANTS["plain residuals"]]
    tokens = text(cfg, batch=2)
    cache = empty(cfg, 2)
    x = params.embed[tokens]
    for p, layer in zip(params.layers, cache.layers, strict=True):
        block = mla_block if hasattr(layer, "latent") else kda_block
        x = x + block(p.attn, cfg, rms_norm(x, p.attn_norm, eps=cfg.rms_norm_eps), layer, Rows(cache.length))[0]
        x = x + feed_forward(p.ffn, cfg, rms_norm(x, p.ffn_norm, eps=cfg.rms_norm_eps))
    expected = rms_norm(x, params.norm, eps=cfg.rms_norm_eps) @ params.lm_head.T
    same(forward(params, cfg, tokens)[0], expected)
