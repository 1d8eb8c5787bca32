"""Who is asked: the argument, then frames from the inside out, then the environment, then auto."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from glm5fn import BackendUnavailable, ContractError, explain, record_choices, use_backend

LEVELS = ("argument", "inner_op", "inner_all", "outer_op", "outer_all", "env_op", "env_all")
X = torch.zeros(2, 4)
SOURCES = {"argument": "backend argument", "env_op": "GLM5FN_BACKEND", "env_all": "GLM5FN_BACKEND"}


@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=len(LEVELS))))
def test_every_combination(toy, set_env, given):
    for level in LEVELS:
        toy.add(level)
    named = {level: level for level, there in zip(LEVELS, given, strict=True) if there}
    entries = [named.get("env_all"), f"toy={named['env_op']}" if "env_op" in named else None]
    set_env(GLM5FN_BACKEND=",".join(filter(None, entries)))
    with contextlib.ExitStack() as stack:
        for frame in ("outer", "inner"):
            everything = [named[f"{frame}_all"]] if f"{frame}_all" in named else []
            per_op = {"toy": named[f"{frame}_op"]} if f"{frame}_op" in named else {}
            if everything or per_op:
                stack.enter_context(use_backend(*everything, **per_op))
        choices = stack.enter_context(record_choices())
        ran = toy(backend=named.get("argument"))
    # An inner general entry hides an outer entry for the operation: the innermost frame that says anything counts.
    expected = next((level for level in LEVELS if level in named), "reference")
    assert ran == expected
    assert choices[0].source == SOURCES.get(expected, "default" if expected == "reference" else "use_backend")
    assert choices[0].asked == ("auto" if expected == "reference" else expected)


def test_frames_end(toy):
    toy.add("mine")
    with use_backend("mine"):
        with use_backend(toy="reference"):
            assert toy() == "reference"
        assert toy() == "mine"
    assert toy() == "reference"


def test_a_frame_ends_when_its_body_raises(toy):
    toy.add("mine")
    with pytest.raises(KeyError), use_backend("mine"):
        raise KeyError
    assert toy() == "reference"


def test_a_frame_can_be_a_decorator(toy):
    toy.add("mine")
    framed = use_backend("mine")(lambda: toy())
    assert [framed(), toy(), framed()] == ["mine", "reference", "mine"]


def test_a_frame_for_other_operations_changes_nothing(toy):
    toy.add("mine")
    with use_backend("mine"), use_backend(l2_norm="reference"):
        assert toy() == "mine"


@pytest.mark.parametrize("how", ["argument", "frame", "frame for the operation", "environment"])
def test_auto_lifts_what_was_asked_outside(toy, set_env, how):
    toy.add("mine")
    set_env(GLM5FN_BACKEND="mine,toy=auto" if how == "environment" else "mine")
    frame = {"frame": use_backend("auto"), "frame for the operation": use_backend(toy="auto")}.get(how)
    with frame or contextlib.nullcontext():
        assert toy(backend="auto" if how == "argument" else None) == "reference"


def test_auto_takes_the_highest_priority_that_can(toy):
    toy.add("low", priority=5)
    toy.add("high", priority=50)
    toy.add("never", priority=90, unsupported=lambda spec: ["always something"])
    toy.add("last")
    assert toy() == "high"
    assert [v.backend for v in explain("toy", X).verdicts] == [
        "never", "high", "ascendc", "triton", "low", "reference", "last",
    ]  # fmt: skip


def test_arguments_are_checked_before_a_backend_is_chosen(toy):
    with pytest.raises(ContractError, match="x must have 2 dimensions, got 1"):
        toy(X.flatten(), backend="no such backend")


def test_unknown_backend_argument(toy):
    with pytest.raises(ContractError) as error:
        toy(backend="tritn")
    assert str(error.value) == "toy: backend: no backend named 'tritn'. Known: auto, ascendc, triton, reference."


@pytest.mark.parametrize("word", [["reference"], 3, torch.float32, ""])
def test_a_backend_that_is_no_word(toy, word):
    with pytest.raises(ContractError, match="toy: backend: no backend named"):
        toy(backend=word)


@pytest.mark.parametrize("how", ["argument", "frame", "environment"])
def test_a_named_backend_never_falls_back(toy, set_env, how):
    toy.add("picky", unsupported=lambda spec: ["no"])
    if how == "environment":
        set_env(GLM5FN_BACKEND="picky")
    frame = use_backend("picky") if how == "frame" else contextlib.nullcontext()
    for _ in range(2):  # a refusal is not remembered as anything else
        with frame if how != "frame" else use_backend("picky"), pytest.raises(BackendUnavailable) as error:
            toy(backend="picky" if how == "argument" else None)
        assert error.value.choice.backend is None
        assert error.value.choice.asked == "picky"


@pytest.mark.parametrize(("words", "per_op", "text"), [
    (["tritn"], {}, "use_backend: no backend named 'tritn'. Known: auto, ascendc, triton, reference."),
    ([], {"l2_norm": "x"}, "use_backend: no backend named 'x'"),
    ([], {"l2norm": "reference"}, "use_backend: no operation named 'l2norm'. Known: rms_norm, gated_rms_norm,"),
    ([], {}, "use_backend: name a backend, or give operations by keyword"),
])  # fmt: skip
def test_use_backend_refuses_unknown_words_at_once(words, per_op, text):
    with pytest.raises(ValueError, match="use_backend") as error:
        use_backend(*words, **per_op)
    assert text in str(error.value)
