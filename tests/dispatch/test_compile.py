"""Under torch.compile(fullgraph=True): argument, frame, environment and default count, and a change compiles again."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import glm5fn
from glm5fn import BackendFallback, Hardware, record_choices, register, reload_env, use_backend
from glm5fn.dispatch.selection import assume_hardware


@pytest.fixture
def compiled(toy):
    """The toy operation compiled as a whole graph, with the number of graphs so far."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    toy.eager = toy.op
    toy.op = torch.compile(lambda x, **options: toy.eager(x, **options) * 1, fullgraph=True, backend=counter)
    toy.counter = counter
    yield toy
    torch.compiler.reset()


def test_argument_frame_and_default(compiled):
    compiled.add("mine")
    assert compiled() == "reference"
    with use_backend("mine"):
        assert compiled() == "mine"
        assert compiled(backend="reference") == "reference"
        with use_backend(toy="reference"):
            assert compiled() == "reference"
        with use_backend("auto"):
            assert compiled() == "reference"
    assert compiled() == "reference"


def test_a_known_frame_is_not_compiled_again(compiled):
    compiled.add("mine")
    for name in ("mine", "reference", "mine", "reference"):
        with use_backend(name):
            assert compiled() == name
    assert compiled.counter.frame_count == 2
    for _ in range(3):
        with use_backend("mine", l2_norm="reference"):
            assert compiled() == "mine"
    assert compiled.counter.frame_count == 2, "an entry for another operation does not matter"


def test_environment_and_registration_compile_again(compiled, set_env):
    compiled.add("mine")
    assert compiled() == "reference"
    set_env(GLM5FN_BACKEND="mine")
    assert compiled() == "mine"
    set_env(GLM5FN_BACKEND="")
    assert compiled() == "reference"
    compiled.add("better", priority=1)
    assert compiled() == "better"
    compiled._registrations.pop().remove()
    assert compiled() == "reference"


def test_limits_are_guarded_by_what_they_compare(compiled):
    compiled.add("mine", unsupported=compiled.wants_k(8), priority=1)
    assert compiled(torch.zeros(2, 4)) == "reference"
    assert compiled(torch.zeros(2, 9)) == "mine"
    assert compiled(torch.zeros(2, 10)) == "mine"
    graphs = compiled.counter.frame_count
    assert [compiled(torch.zeros(2, size)) for size in (11, 12, 300)] == ["mine"] * 3
    assert compiled.counter.frame_count == graphs, "sizes within the limits share one graph"
    assert compiled(torch.zeros(2, 9, dtype=torch.float64)) == "reference"
    assert compiled(torch.zeros(2, 3)) == "reference"


def test_limits_see_strides_options_gradients_and_hardware(compiled):
    def unsupported(spec):
        reasons = []
        if not spec.contiguous("x"):
            reasons.append("x must be dense")
        if spec.options["eps"] != 1e-6:
            reasons.append(f"eps must be 1e-6, got {spec.options['eps']}")
        if spec.needs_grad:
            reasons.append("no backward")
        if spec.hardware.device_type != "cpu" or spec.options["y"] is not None:
            reasons.append("not this")
        return reasons

    compiled.add("mine", unsupported=unsupported, priority=1)
    x = torch.zeros(3, 3)
    assert compiled(x) == "mine"
    assert compiled(torch.zeros(3, 4).t()) == "reference"
    assert compiled(x, eps=0.5) == "reference"
    assert compiled(x.clone().requires_grad_()) == "reference"


@pytest.mark.parametrize(
    "limits", [None, lambda spec: [f"K must be 8, got {spec.shapes['x'][-1]}"]], ids=["standing", "limits"]
)
def test_a_refusal_names_every_reason(compiled, limits):
    if limits is not None:
        compiled.add("mine", unsupported=limits)
    asked = "triton" if limits is None else "mine"
    with pytest.raises(Exception, match=f"toy: none  \\(asked '{asked}' by backend argument\\)") as error:
        compiled(backend=asked)
    text = str(error.value)
    assert "AscendC needs an Ascend NPU, found cpu" in text
    assert "has no Triton kernel for toy" in text
    assert limits is None or "K must be 8, got 4" in text


def test_unknown_words_are_refused(compiled):
    with pytest.raises(Exception, match=r"no backend named 'tritn'\. Known: auto, ascendc"):
        compiled(backend="tritn")


def test_choices_are_recorded_while_tracing(compiled):
    compiled.add("mine", unsupported=compiled.wants_k(8), priority=1)
    with record_choices() as choices:
        compiled(torch.zeros(2, 4))
        compiled(torch.zeros(2, 4))
    assert [c.backend for c in choices] == ["reference"]
    assert next(v for v in choices[0].verdicts if v.backend == "mine").reasons == ("K must be at least 8, got 4",)


def test_falling_back_warns_while_tracing(compiled):
    with assume_hardware(Hardware.named("H100")):
        with pytest.warns(BackendFallback, match="toy runs on the slow reference backend"):
            assert compiled() == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compiled() == "reference"


def test_threads_have_their_own_frames(compiled):
    compiled.add("mine")
    ran = {}
    assert compiled() == "reference"
    with use_backend("mine"):
        assert compiled() == "mine"
        thread = threading.Thread(target=lambda: ran.update(other=compiled()))
        thread.start()
        thread.join()
        assert compiled() == "mine"
    assert ran == {"other": "reference"}


def test_a_frame_of_another_task_is_an_error_not_another_backend(compiled):
    """Dynamo cannot see tasks: what one task's frame asks for must not silently become another task's choice."""
    import asyncio

    compiled.add("mine")

    async def framed(entered, leave):
        with use_backend("mine"):
            entered.set()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(framed(entered, leave))
        await entered.wait()
        try:
            with pytest.raises(Exception, match="another task of this thread holds a use_backend frame open"):
                compiled()
            assert compiled(backend="reference") == "reference", "with a named backend there is no doubt"
        finally:
            leave.set()
            await task
        assert compiled() == "reference"

    asyncio.run(main())


def test_two_operations_in_one_graph(compiled):
    compiled.add("mine", priority=1)
    both = torch.compile(lambda x: compiled.eager(glm5fn.l2_norm(x)), fullgraph=True, backend="eager")
    x = torch.ones(2, 4)
    torch.testing.assert_close(both(x), compiled.eager(glm5fn.l2_norm(x)))


def test_a_kernel_registered_by_name_is_loaded_while_tracing(compiled):
    with register("toy", "mine", f"{__name__}:by_name"):
        assert int(compiled.op(torch.zeros(2, 4), backend="mine")[0, 0]) == 77


def by_name(x, y=None, *, eps=1e-6):
    return x + 77


def test_a_broken_environment_is_reported(compiled, monkeypatch):
    monkeypatch.setenv("GLM5FN_BACKEND", "nope")
    with pytest.raises(ValueError, match="nope"):
        reload_env()
    with pytest.raises(Exception, match="no backend named 'nope'"):
        compiled()
