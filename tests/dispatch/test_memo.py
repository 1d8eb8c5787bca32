"""Decisions are remembered, forgotten when they must be, and recorded either way."""

from __future__ import annotations

import pytest
import torch

from glm5fn import Hardware, record_choices, register, reload_env, use_backend
from glm5fn.dispatch import dispatch, engine
from glm5fn.dispatch.selection import assume_hardware


def test_limits_are_asked_once_per_kind_of_call(toy):
    asked = []
    toy.add("mine", unsupported=lambda spec: asked.append(spec) or [], priority=1)
    for _ in range(5):
        assert toy() == "mine"
        assert toy(torch.zeros(2, 4), eps=1e-6) == "mine"
    assert len(asked) <= 2, "the first call finds out that the answer depends on the call, the second one remembers it"
    toy(torch.zeros(3, 4))
    assert len(asked) <= 3


@pytest.mark.parametrize("other", [
    {"x": torch.zeros(2, 3)},
    {"x": torch.zeros(2, 8, dtype=torch.float64)},
    {"x": torch.zeros(8, 2).t()},
    {"x": torch.zeros(2, 8, requires_grad=True)},
    {"eps": 1e-5},
    {"y": torch.zeros(1)},
], ids=["shape", "dtype", "strides", "grad", "option", "optional tensor"])  # fmt: skip
def test_whatever_limits_can_see_is_part_of_the_memory(toy, other):
    def plain(spec):
        ok = (
            spec.shapes["x"][-1] == 8
            and spec.dtypes["x"] == torch.float32
            and spec.contiguous("x")
            and not spec.needs_grad
            and spec.options["eps"] == 1e-6
            and "y" not in spec.shapes
        )
        return [] if ok else ["not the plain call"]

    toy.add("mine", unsupported=plain, priority=1)
    call = {"x": torch.zeros(2, 8)}
    for _ in range(3):
        assert toy(**call) == "mine"
        assert toy(**(call | other)) == "reference"


def test_gradient_mode_is_part_of_the_memory(toy):
    toy.add("mine", unsupported=lambda spec: ["no backward"] if spec.needs_grad else [], priority=1)
    x = torch.zeros(2, 4, requires_grad=True)
    for _ in range(3):
        assert toy(x) == "reference"
        with torch.no_grad():
            assert toy(x) == "mine"


def test_names_of_keywords_are_part_of_the_memory(toy):
    toy.add("mine", unsupported=lambda spec: ["eps"] if spec.options["eps"] == 3 else [], priority=1)
    with record_choices() as choices:
        for _ in range(3):
            dispatch("toy", None, torch.zeros(2, 4), y=3)
            dispatch("toy", None, torch.zeros(2, 4), eps=3)
    assert [c.backend for c in choices] == ["mine", "reference"] * 3


def test_register_and_remove_are_seen_at_once(toy):
    assert toy() == "reference"
    toy.add("mine", priority=1)
    assert toy() == "mine"
    toy._registrations.pop().remove()
    assert toy() == "reference"


def test_frames_and_environment_are_seen_at_once(toy, set_env):
    toy.add("mine")
    for _ in range(2):
        assert toy() == "reference"
        with use_backend("mine"):
            assert toy() == "mine"
        set_env(GLM5FN_BACKEND="mine")
        assert toy() == "mine"
        set_env(GLM5FN_BACKEND="")


def test_the_memory_is_bounded(toy, monkeypatch):
    monkeypatch.setattr(engine, "MEMO_SIZE", 16)
    toy.add("mine", unsupported=toy.wants_k(3), priority=1)
    for size in [*range(1, 60), *range(1, 60)]:
        assert toy(torch.zeros(2, size)) == ("mine" if size >= 3 else "reference")
        assert len(engine._MEMO) <= 16


def test_options_that_cannot_be_remembered_still_work(toy):
    toy.add("mine", unsupported=toy.wants_k(3), priority=1)
    for _ in range(3):
        assert toy(eps=[1.0]) == "mine"


def test_a_registration_in_the_middle_of_a_choice_is_not_lost(toy):
    """What was chosen from the old state must not be remembered for the new one."""

    def unsupported(spec):
        if spec.shapes["x"][-1] == 5 and not late:
            late.append(register("toy", "late", lambda x, y=None, *, eps=1e-6: x + 99, priority=90))
        return []

    late: list = []
    toy.add("mine", unsupported=unsupported, priority=50)
    toy.numbers["late"] = 99
    try:
        assert toy() == "mine"
        assert toy(torch.zeros(2, 5)) == "mine"
        assert toy(torch.zeros(2, 5)) == "late"
    finally:
        late[0].remove()


def test_choices_are_recorded_with_and_without_memory(toy):
    toy.add("mine", unsupported=toy.wants_k(4), priority=1)
    with record_choices() as outer:
        toy()
        with record_choices() as inner:
            toy()
            toy(torch.zeros(2, 2))
        toy(backend="reference")
    assert [c.backend for c in outer] == ["mine", "mine", "reference", "reference"]
    assert [c.backend for c in inner] == ["mine", "reference"]
    assert next(v for v in inner[1].verdicts if v.backend == "mine").reasons == ("K must be at least 4, got 2",)
    assert outer[3].source == "backend argument"
    toy()
    assert len(outer) == 4


def test_what_fails_is_not_recorded_as_run(toy):
    def fail(x, y=None, *, eps=1e-6):
        raise ArithmeticError

    with register("toy", "failing", fail), record_choices() as choices, pytest.raises(ArithmeticError):
        toy(backend="failing")
    assert choices == []


def test_hardware_is_part_of_the_memory(toy):
    toy.add("triton")
    for _ in range(2):
        assert toy() == "reference"
        with assume_hardware(Hardware.named("H100")):
            assert toy() == "triton"
    reload_env()
