"""A small operation with as many implementations as a test asks for, and a clean environment around each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from glm5fn.dispatch import ContractError, dispatch, op, register, registry, reload_env


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch) -> Iterator[None]:
    for name in ("GLM5FN_BACKEND", "GLM5FN_FALLBACK", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    reload_env()
    yield
    monkeypatch.undo()
    reload_env()


@pytest.fixture
def set_env(monkeypatch) -> Callable[..., None]:
    """Set environment variables and have them read again."""

    def set_(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        reload_env()

    return set_


class Toy:
    """The operation ``toy(x, y=None, *, eps=1e-6, backend=None)``. Each implementation adds its own number to x."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._registrations: list[Any] = []

    def add(self, backend: str, *, unsupported: Callable[[Any], list[str]] | None = None, **options: Any) -> None:
        number = self.numbers.setdefault(backend, len(self.numbers) + 1)

        def implementation(x, y=None, *, eps=1e-6):
            return x + number

        self._registrations.append(register("toy", backend, implementation, unsupported=unsupported, **options))

    def __call__(self, x: torch.Tensor | None = None, **kwargs: Any) -> str:
        """Run it and say which backend did."""
        out = self.op(torch.zeros(2, 4) if x is None else x, **kwargs)
        number = int(out.flatten()[0])
        return next(backend for backend, n in self.numbers.items() if n == number)

    def declare(self) -> None:
        @op
        def toy(x, y=None, *, eps=1e-6, backend=None):
            if x.dim() != 2:
                raise ContractError(f"toy: x must have 2 dimensions, got {x.dim()}.")
            return dispatch("toy", backend, x, y, eps=eps)

        self.op = toy

    @staticmethod
    def wants_k(least: int) -> Callable[[Any], list[str]]:
        """Limits with two reasons: the size of the last dimension, and float32."""

        def unsupported(spec):
            reasons = []
            if spec.shapes["x"][-1] < least:
                reasons.append(f"K must be at least {least}, got {spec.shapes['x'][-1]}")
            if spec.dtypes["x"] != torch.float32:
                reasons.append(f"x must be float32, got {spec.dtypes['x']}")
            return reasons

        return unsupported

    def remove(self) -> None:
        for registration in self._registrations:
            registration.remove()
        del registry._OPS["toy"]
        registry.changed()


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    toy.declare()
    toy.add("reference")
    yield toy
    toy.remove()
