"""Token loops: the same tokens as by hand, reproducible sampling, stopping, caches, errors before the first token."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from glm5fn import ContractError, decode_step, fork, generate, init_cache, prefill, use_backend
from glm5fn.generate import sample
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import model as inputs
from glm5fn.testing.poison import unchanged

CFG = inputs.config("KM", eos_token_id=None)
PARAMS = inputs.params(CFG)
PROMPT = [5, 40, 17, 3, 22]
V = CFG.vocab_size


@pytest.fixture(autouse=True)
def _backend(request):
    """Tests that run the model take ``backend``; those of :func:`sample` run no operation."""
    if "backend" not in request.fixturenames:
        yield
        return
    with use_backend(request.getfixturevalue("backend")):
        yield


def run(tokens, max_new_tokens=8, params=PARAMS, cfg=CFG, **options):
    return list(generate(params, cfg, tokens, max_new_tokens=max_new_tokens, **options))


def chosen(steps):
    """Tokens per row."""
    return torch.stack([step.token for step in steps], 1).tolist()


# --------------------------------------------------------------------------------------------------------------- greedy


@pytest.fixture
def by_hand(backend):
    """Greedy tokens, their log-probabilities and the last cache, from prefill and decode_step."""
    cache = init_cache(CFG, 1, len(PROMPT) + 8, dtype=torch.float32)
    logits, cache = prefill(PARAMS, CFG, torch.tensor([PROMPT]), cache)
    tokens, logprobs = [], []
    for _ in range(8):
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[0, tokens[-1]]))
        before = cache
        logits, cache = decode_step(PARAMS, CFG, torch.tensor(tokens[-1:]), cache)
    return tokens, logprobs, before


def test_greedy_is_the_loop_by_hand(by_hand):
    tokens, logprobs, cache = by_hand
    steps = run(PROMPT)
    assert chosen(steps) == [tokens]
    assert torch.cat([step.logprob for step in steps]).tolist() == pytest.approx(logprobs, rel=1e-6)
    assert not any(step.finished.any() for step in steps)
    assert steps[-1].cache.length.tolist() == [len(PROMPT) + 7], "the last token has not been fed"
    torch.testing.assert_close(steps[-1].cache.layers[0].state, cache.layers[0].state)
    first = steps[0]
    assert (first.token.dtype, first.logprob.dtype, first.finished.dtype) == (torch.int64, torch.float32, torch.bool)


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], torch.tensor([PROMPT]), [torch.tensor(PROMPT)], (*PROMPT,)])
def test_prompts_of_any_form(by_hand, prompt):
    assert chosen(run(prompt)) == [by_hand[0]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 100])
def test_a_prompt_in_pieces_gives_the_same_tokens(by_hand, chunk):
    assert chosen(run(PROMPT, prefill_chunk=chunk)) == [by_hand[0]]


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_a_batch_of_uneven_prompts_is_each_alone(backend, chunk):
    prompts = [x[0].tolist() for x in inputs.prompts(CFG, 5, 13, 1, 7, seed=1)]
    assert chosen(run(prompts, prefill_chunk=chunk)) == [chosen(run(prompt))[0] for prompt in prompts]


# ------------------------------------------------------------------------------------------------------------- stopping


def test_stop_tokens_end_rows_one_by_one(backend):
    prompts = [x[0].tolist() for x in inputs.prompts(CFG, 5, 9, 7, seed=3)]
    free = chosen(run(prompts, 12))
    stop = [free[0][2], free[1][5]]
    ends = [min([row.index(s) for s in stop if s in row], default=11) for row in free]
    assert len(set(ends)) == 3
    steps = run(prompts, 12, stop=stop)
    assert len(steps) == max(ends) + 1
    for t, step in enumerate(steps):
        assert step.token.tolist() == [row[min(t, end)] for row, end in zip(free, ends, strict=True)]
        assert step.finished.tolist() == [t >= end and row[end] in stop for row, end in zip(free, ends, strict=True)]
        assert [p == 0 for p in step.logprob.tolist()] == [t > end for end in ends]


def test_stop_tokens_come_from_the_config(by_hand):
    tokens = by_hand[0]
    end = tokens.index(tokens[3])
    for eos in (tokens[3], [V - 1, tokens[3]]):
        cfg = inputs.config("KM", eos_token_id=eos)
        assert chosen(run(PROMPT, cfg=cfg)) == [tokens[: end + 1]]
        assert chosen(run(PROMPT, cfg=cfg, stop=[])) == [tokens]


def test_integers_of_any_type(by_hand):
    numpy = pytest.importorskip("numpy")
    tokens = by_hand[0]
    end = tokens.index(tokens[3])
    for of in (numpy.int64, numpy.int32, torch.tensor):
        assert chosen(run([of(i) for i in PROMPT])) == [tokens]
        assert chosen(run([[of(i) for i in PROMPT]])) == [tokens]
    for stop in (numpy.array([tokens[3]]), [numpy.int64(tokens[3])], torch.tensor([tokens[3]]), {tokens[3]}):
        assert chosen(run(PROMPT, stop=stop)) == [tokens[: end + 1]]
    assert chosen(run(PROMPT, numpy.int64(3), prefill_chunk=numpy.int32(2), seed=numpy.int64(1))) == [tokens[:3]]


@pytest.mark.parametrize("donate", [True, False])
def test_parameters_that_require_gradients(by_hand, donate):
    """Nothing is kept for a backward pass, memory is reused all the same, and the caller's mode is its own."""
    params = pytree.tree_map(lambda x: x.clone().requires_grad_(), PARAMS)
    steps = generate(params, CFG, PROMPT, max_new_tokens=8, donate=donate)
    assert torch.is_grad_enabled()
    tokens = []
    for step in steps:
        assert torch.is_grad_enabled(), "between steps"
        assert not any(x.requires_grad for x in pytree.tree_leaves(step))
        tokens += step.token.tolist()
    assert torch.is_grad_enabled()
    assert tokens == by_hand[0]


def test_nothing_to_do(backend):
    assert run(PROMPT, 0) == []
    assert len(run(PROMPT, 1)) == 1


@pytest.mark.nothing_runs
def test_nothing_happens_before_the_first_token_is_asked_for(backend):
    generate(PARAMS, CFG, PROMPT, max_new_tokens=3)


# ------------------------------------------------------------------------------------------------------------- sampling


def test_the_seed_decides(backend):
    first = chosen(run(PROMPT, 12, temperature=2.0, seed=1))
    assert chosen(run(PROMPT, 12, temperature=2.0, seed=1)) == first
    assert chosen(run(PROMPT, 12, temperature=2.0, seed=2)) != first


def test_other_sources_of_randomness_do_not_matter(backend):
    first = chosen(run(PROMPT, 5, temperature=2.0, seed=1))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert chosen(run(PROMPT, 5, temperature=2.0, seed=1)) == first
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-45, 5e-324])
def test_temperature_towards_0_is_greedy(by_hand, temperature):
    assert chosen(run(PROMPT, temperature=temperature)) == [by_hand[0]]


def test_logprob_is_that_of_the_model(backend):
    """Before temperature and top_p."""
    steps = run(PROMPT, 4, temperature=3.0, top_p=0.9, seed=4)
    cache = init_cache(CFG, 1, 20, dtype=torch.float32)
    logits, cache = prefill(PARAMS, CFG, torch.tensor([PROMPT]), cache)
    for step in steps:
        assert float(step.logprob) == pytest.approx(float(logits.log_softmax(-1)[0, step.token[0]]), rel=1e-5)
        logits, cache = decode_step(PARAMS, CFG, step.token, cache)


def counts(logits, draws=4000, **options):
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits).expand(draws, -1)
    return torch.bincount(sample(rows, generator=generator, **options), minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, 4), (0.95, 4), (0.88, 4), (0.87, 3), (0.76, 3), (0.74, 2), (0.51, 2), (0.49, 1), (0.3, 1), (1e-9, 1)],
)
def test_top_p_keeps_exactly_the_nucleus(top_p, kept):
    """Probabilities 1/2, 1/4, 1/8, 1/8 (in another order): the smallest set of likeliest tokens that reaches top_p."""
    probs = torch.tensor([0.125, 0.5, 0.125, 0.25])
    order = [1, 3, 0, 2]  # of the two equal ones the lower id is in the nucleus
    found = counts(probs.log().tolist(), temperature=1.0, top_p=top_p)
    assert found.nonzero().flatten().tolist() == sorted(order[:kept])
    nucleus = torch.zeros(4)
    nucleus[order[:kept]] = probs[order[:kept]]
    assert torch.allclose(found, nucleus / nucleus.sum(), atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_a_nucleus_that_reaches_top_p_exactly_is_complete(top_p, kept):
    """Four probabilities of exactly 1/4."""
    found = counts([2.0] * 4, temperature=1.0, top_p=top_p)
    assert found.nonzero().flatten().tolist() == list(range(kept))


def test_temperature_comes_before_top_p():
    """At temperature 2 the probabilities 16/21, 4/21, 1/21 become 4/7, 2/7, 1/7: two tokens reach 0.8, not one."""
    logits = [math.log(16), math.log(4), 0.0]
    assert counts(logits, temperature=1.0, top_p=0.76).nonzero().flatten().tolist() == [0]
    found = counts(logits, temperature=2.0, top_p=0.76)
    assert torch.allclose(found, torch.tensor([4 / 6, 2 / 6, 0.0]), atol=0.03)


def test_sampling_frequencies_follow_the_softmax():
    found = counts([0.0, 1.0, 2.0], temperature=0.5)
    assert torch.allclose(found, torch.tensor([0.0, 2.0, 4.0]).softmax(0), atol=0.03)


@pytest.mark.parametrize("temperature", [1e-37, 1e-45, 5e-324])
def test_no_temperature_overflows(temperature):
    assert sample(torch.tensor([[10.0, 500.0, 499.0, -500.0]]), temperature=temperature, top_p=0.9).tolist() == [1]


def test_a_tie_goes_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [7.0, 7.0, 7.0, 7.0]])
    assert sample(logits).tolist() == [1, 0]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}])
def test_sample_names_itself(options):
    with pytest.raises(ContractError, match=r"^sample: (temperature|top_p) must be "):
        sample(torch.zeros(1, 2), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype(dtype):
    logits = torch.tensor([[0.0, 50.0, -torch.inf]], dtype=dtype)
    assert sample(logits).tolist() == sample(logits, temperature=1.0, top_p=0.9).tolist() == [1]


# --------------------------------------------------------------------------------------------------------------- caches


def test_every_step_keeps_its_cache_without_donation(by_hand):
    tokens = by_hand[0]
    steps = run(PROMPT, donate=False)
    for t, step in enumerate(steps):
        assert step.cache.length.tolist() == [len(PROMPT) + t]
        cache = fork(step.cache)
        logits = None
        for token in tokens[t:7]:
            logits, cache = decode_step(PARAMS, CFG, torch.tensor([token]), cache, donate=True)
        assert logits is None or int(logits.argmax()) == tokens[7]


def test_steps_share_memory_with_donation(backend):
    steps = run(PROMPT)
    assert len({step.cache.layers[1].latent.data_ptr() for step in steps}) == 1


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_conversation_continues_in_its_cache(by_hand, donate, chunk):
    cache = init_cache(CFG, 1, len(PROMPT) + 7, dtype=torch.float32)
    _, cache = prefill(PARAMS, CFG, torch.tensor([PROMPT[:2]]), cache)
    with unchanged(*pytree.tree_leaves(cache)):
        steps = run(PROMPT[2:], cache=cache, donate=donate, prefill_chunk=chunk)
    assert chosen(steps) == [by_hand[0]]
    # The last step's cache has room for one token more.
    other = run(PROMPT[2:], 3, cache=cache)[-1]
    logits, _ = prefill(PARAMS, CFG, other.token[:, None], other.cache)
    assert int(logits.argmax()) == by_hand[0][3]


def test_its_own_cache_has_the_dtype_of_the_model_and_just_enough_room(backend):
    params = inputs.params(CFG, dtype=torch.bfloat16)
    steps = run([PROMPT, [1]], 4, params=params)
    assert steps[0].cache.layers[1].latent.dtype == torch.bfloat16
    assert steps[0].cache.layers[1].latent.shape[1] == len(PROMPT) + 3


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.nothing_runs
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "generate: every prompt must hold at least one token, got lengths []."),
        ({"tokens": [[1, 2], []]}, "generate: every prompt must hold at least one token, got lengths [2, 0]."),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)},
         "generate: every prompt must hold at least one token, got lengths [0, 0]."),
        ({"tokens": torch.tensor([1, 2])}, "generate: tokens must have 2 dimensions [B, T], got 1: [2]."),
        ({"tokens": [[[1]]]}, "generate: tokens must be a list of ids, a list of such lists, or a tensor [B, T]."),
        ({"tokens": [1.5, 2.0]}, "generate: tokens must be a list of ids, a list of such lists, or a tensor [B, T]."),
        ({"tokens": [[1, 2], [1.5]]}, "generate: tokens must be int64 or int32, got float32."),
        ({"tokens": torch.ones(1, 2)}, "generate: tokens must be int64 or int32, got float32."),
        ({"max_new_tokens": -1}, "generate: max_new_tokens must be at least 0, got -1."),
        ({"prefill_chunk": 0}, "generate: prefill_chunk must be at least 1, got 0."),
        ({"temperature": -0.1}, "generate: temperature must be a number from 0 up, got -0.1."),
        ({"temperature": math.nan}, "generate: temperature must be a number from 0 up, got nan."),
        ({"temperature": math.inf}, "generate: temperature must be a number from 0 up, got inf."),
        ({"top_p": 0.0}, "generate: top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.01}, "generate: top_p must be in (0, 1], got 1.01."),
        ({"top_p": math.nan}, "generate: top_p must be in (0, 1], got nan."),
        *(({"tokens": bad}, "generate: tokens must be a list of ids, a list of such lists, or a tensor [B, T].")
          for bad in ("abc", None, [1, [2]], [[1], 2], {"a": 1}, 7, [None])),
        ({"tokens": [True, False]}, "generate: tokens must be int64 or int32, got bool."),
        *(({name: bad}, f"generate: {name} must be a whole number, got {bad!r}.")
          for name, bads in {"max_new_tokens": (1.5, "3", None, True), "prefill_chunk": (1.5, "2", False),
                             "seed": (1.5, None, "1", True)}.items() for bad in bads),
        *(({"seed": bad}, f"generate: seed must be a 64-bit number, got {bad}.") for bad in (10**30, -(10**30))),
        *(({"temperature": bad}, f"generate: temperature must be a number from 0 up, got {bad!r}.")
          for bad in ("x", None, True, [1.0])),
        *(({"top_p": bad}, f"generate: top_p must be in (0, 1], got {bad!r}.") for bad in ("x", None, True)),
        *(({"stop": bad}, f"generate: stop must be a list of token ids, got {bad!r}.") for bad in (5, "ab", b"ab")),
        *(({"stop": [1, bad]}, f"generate: stop must be a whole number, got {bad!r}.")
          for bad in (10.9, "a", None, True, [2])),
        ({"stop": [-1]}, "generate: stop must be at least 0, got -1."),
        ({"stop": [V - 1, V, 1 << 70]},
         f"generate: stop must lie in 0..{V - 1} (the vocabulary), got [{V}, {1 << 70}]."),
        ({"max_new_tokens": 4093},
         "init_cache: capacity must be at most the model's max_position_embeddings 4096, got 4097."),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(backend, change, message):
    with pytest.raises(ContractError) as error:
        generate(PARAMS, CFG, **{"tokens": PROMPT, "max_new_tokens": 3} | change)
    assert str(error.value) == message


@pytest.mark.nothing_runs
def test_an_iterator_is_no_prompt(backend):
    with pytest.raises(ContractError, match=r"^generate: tokens must be a list of ids, a list of such lists, or"):
        generate(PARAMS, CFG, iter(PROMPT), max_new_tokens=3)


@pytest.mark.parametrize(("held", "new", "total"), [(0, 7, 11), (3, 4, 11), (3, 5, 12), (4, 3, 11)])
def test_a_cache_that_is_too_small(backend, held, new, total):
    """Found before the first token, although only the last ones would not fit."""
    cache = init_cache(CFG, 2, 10, dtype=torch.float32)
    _, cache = prefill(PARAMS, CFG, torch.ones(2, 4, dtype=torch.int64), cache, lengths=[1, held])
    needed = total - held
    with unchanged(*pytree.tree_leaves(cache)), pytest.raises(ContractError) as error:
        generate(PARAMS, CFG, [PROMPT[:2], PROMPT], max_new_tokens=new, cache=cache)
    assert str(error.value) == (
        f"generate: row 1 holds {held} tokens and takes {needed} more (its prompt and all new tokens but the last), "
        f"{total} together, but the cache has capacity 10. Make a larger one with init_cache(..., capacity={total}), "
        "or lower max_new_tokens."
    )
    assert len(run([PROMPT[:2], PROMPT], new - (total - 10), cache=cache)) == new - (total - 10)


@pytest.mark.nothing_runs
def test_a_cache_of_another_batch(backend):
    with pytest.raises(ContractError, match=r"^generate: there are 2 prompts, but cache has 1 rows\.$"):
        generate(PARAMS, CFG, [[1], [2]], max_new_tokens=1, cache=init_cache(CFG, 1, 10, dtype=torch.float32))


@pytest.mark.nothing_runs
def test_what_the_model_refuses_comes_before_the_first_token(backend):
    with pytest.raises(ContractError, match=r"tokens must lie in 0\.\.60 \(the vocabulary\), got 61 at \[0, 2\]"):
        next(generate(PARAMS, CFG, [1, 2, 61], max_new_tokens=3))
    with pytest.raises(ContractError, match=r"cache\.layers\[0\]\.conv must be .* float32"):
        next(generate(PARAMS, CFG, [1, 2], max_new_tokens=3, cache=init_cache(CFG, 1, 10)))


def test_without_attention_there_is_no_limit(backend):
    cfg = inputs.config("K", eos_token_id=None)
    params = inputs.params(cfg)
    cache = init_cache(cfg, 1, 1, dtype=torch.float32)
    assert len(run(PROMPT, 6, params=params, cfg=cfg, cache=cache)) == 6


def test_results_do_not_alias(backend):
    """Tokens of earlier steps stay what they were, whatever comes after."""
    steps = generate(PARAMS, CFG, PROMPT, max_new_tokens=5, temperature=2.0)
    kept, copies = [], []
    for step in steps:
        kept.append((step.token, step.logprob, step.finished))
        copies.append(tuple(x.clone() for x in kept[-1]))
    assert_bitwise(kept, copies)
