"""Users' own implementations, and the package's own table."""

from __future__ import annotations

import inspect

import pytest
import torch

import glm5fn
from glm5fn import BackendUnavailable, backends, register, unregister
from glm5fn.dispatch import op, registry
from glm5fn.kernels import BACKENDS, TABLE


def good(x, y=None, *, eps=1e-6):
    return x


def renamed(z, y=None, *, eps=1e-6):
    return z


def reordered(y=None, x=None, *, eps=1e-6):
    return x


def other_default(x, y=None, *, eps=1e-5):
    return x


def other_kind(x, y=None, eps=1e-6):
    return x


def without_eps(x, y=None):
    return x


def with_backend(x, y=None, *, eps=1e-6, backend=None):
    return x


def swallowing(x, y=None, **kwargs):
    return x


@pytest.mark.parametrize(
    "target",
    [renamed, reordered, other_default, other_kind, without_eps, with_backend, swallowing],
    ids=lambda f: f.__name__,
)
def test_another_signature_is_refused(toy, target):
    with pytest.raises(TypeError) as error:
        register("toy", "mine", target)
    text = str(error.value)
    assert "toy(x, y=None, *, eps=1e-06)" in text
    assert f"{target.__name__} has {inspect.signature(target)}" in text
    assert "mine" not in backends()


def test_a_string_is_checked_when_it_is_loaded(toy):
    with register("toy", "mine", f"{__name__}:renamed"), pytest.raises(BackendUnavailable, match="signature without"):
        toy(backend="mine")
    with (
        register("toy", "mine", f"{__name__}:nowhere"),
        pytest.raises(BackendUnavailable, match="has no function 'nowhere'"),
    ):
        toy(backend="mine")
    with register("toy", "mine", f"{__name__}:good"):
        toy.op(torch.zeros(2, 4), backend="mine")


def test_limits_may_be_strings(toy, monkeypatch):
    import types

    module = types.ModuleType("my_limits")
    module.available = lambda hardware: [f"not on {hardware.name}"]
    module.unsupported = lambda spec: [f"not {spec.op}"]
    monkeypatch.setitem(__import__("sys").modules, "my_limits", module)
    with register("toy", "mine", good, available="my_limits:available", unsupported="my_limits:unsupported"):
        choice = glm5fn.explain("toy", torch.zeros(2, 4), backend="mine")
    assert next(v.reasons for v in choice.verdicts if v.backend == "mine") == ("not on cpu", "not toy")


@pytest.mark.parametrize(("name", "word", "message"), [
    ("toyy", "mine", "No operation named 'toyy'. Known: rms_norm"),
    ("toy", "auto", "backend must be a word other than 'auto', got 'auto'"),
    ("toy", "my backend", "got 'my backend'"),
    ("toy", "a=b", "got 'a=b'"),
    ("toy", "reference", "reference already has an implementation of toy"),
])  # fmt: skip
def test_refusals(toy, name, word, message):
    with pytest.raises(ValueError, match=r"toy|register") as error:
        register(name, word, good)
    assert message in str(error.value)


def test_duplicates_are_refused_until_removed(toy):
    registration = register("toy", "mine", good)
    assert backends() == ("ascendc", "triton", "reference", "mine")
    with pytest.raises(ValueError, match="mine already has an implementation of toy"):
        register("toy", "mine", good)
    registration.remove()
    registration.remove()
    assert backends() == ("ascendc", "triton", "reference")
    with register("toy", "mine", good):
        unregister("toy", "mine")
        second = register("toy", "mine", good)
    assert "mine" in backends(), "leaving the first context does not remove the second registration"
    second.remove()


def test_unregister_refuses_what_is_not_there_or_built_in(toy):
    with pytest.raises(ValueError, match="the mine implementation of toy is not registered"):
        unregister("toy", "mine")
    with pytest.raises(ValueError, match="the reference implementation of l2_norm is part of glm5fn"):
        unregister("l2_norm", "reference")


def test_a_new_backend_is_by_itself_never_chosen_by_auto(toy):
    toy.add("mine")
    assert toy() == "reference"
    toy.add("eager", priority=1)
    assert toy() == "eager"


def test_an_implementation_for_a_real_operation():
    def mine(x, *, eps=1e-6):
        return x * 0 + 7

    with register("l2_norm", "mine", mine, priority=1):
        assert glm5fn.l2_norm(torch.ones(1, 2)).tolist() == [[7, 7]]
    assert glm5fn.l2_norm(torch.ones(1, 2)).tolist() != [[7, 7]]


def test_what_an_operation_must_look_like():
    with pytest.raises(TypeError, match="keyword-only parameter backend=None"):
        op(lambda x: x)
    with pytest.raises(TypeError, match="keyword-only parameter backend=None"):
        op(lambda x, backend=None: x)
    with pytest.raises(TypeError, match="names every parameter, so it cannot take \\*\\*options"):
        op(lambda x, *, backend=None, **options: x)


@pytest.mark.parametrize(("name", "column"), [(n, b) for n, kernels in TABLE.items() for b in kernels])
def test_every_target_of_the_table_loads_and_fits(name, column):
    found = registry.implementation(name, column)
    assert callable(registry.load(found))
    if found.unsupported is not None:
        assert callable(registry.resolve(found.unsupported))


def test_the_table_names_only_what_exists():
    assert all("reference" in kernels for kernels in TABLE.values()), "every operation runs somewhere"
    assert {backend for kernels in TABLE.values() for backend in kernels} <= set(BACKENDS)
    priorities = [backend.priority for backend in BACKENDS.values()]
    assert priorities == sorted(priorities, reverse=True)


@pytest.mark.parametrize("name", TABLE)
def test_every_operation_is_public(name):
    assert registry.operation(name).function is getattr(glm5fn, name)
