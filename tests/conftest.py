"""Fixtures that every test can use: the backend under test, proof that it ran, and a fixed seed."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from glm5fn.dispatch import BackendUnavailable, record_choices


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        choices=("reference", "triton", "ascendc"),
        help="backend under test; may be given more than once (default: reference)",
    )


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--backend") or ["reference"], indirect=True)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_runtest_setup(item):
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    if backend == "triton" and INTERPRETED and item.get_closest_marker("long"):
        pytest.skip("takes minutes under the Triton interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test marked ``needs`` asks for something that only reference has; the other backends must refuse it."""
    words = [mark.args[0] for mark in pyfuncitem.iter_markers("needs")]
    if not words or pyfuncitem.funcargs.get("backend") in (None, "reference"):
        return (yield)
    with pytest.raises(BackendUnavailable, match="|".join(words)):
        yield
    return True


@pytest.fixture
def at_most(request):
    """``at_most(n, fewer)`` is ``n``, and ``fewer`` under the Triton interpreter: it needs a millisecond per token and
    head."""
    interpreted = INTERPRETED and request.getfixturevalue("backend") == "triton"
    return lambda n, fewer: fewer if interpreted else n


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def backend(request):
    """Name of the backend under test, to be passed as ``backend=``; afterwards every operation that ran is proved to
    have run on it.

    A test that expects nothing to run (argument errors) is marked ``nothing_runs``; one that names other backends on
    purpose does not use this fixture.
    """
    with record_choices() as choices, _launches(request.param) as launches:
        yield request.param
    others = [str(c) for c in choices if c.backend != request.param]
    assert not others, f"asked for {request.param}, but these ran elsewhere: {others}"
    if request.param != "reference" and request.node.get_closest_marker("needs"):
        return
    if request.node.get_closest_marker("nothing_runs"):
        assert not choices, f"nothing was to run, but this did: {[str(c) for c in choices]}"
        return
    assert choices, f"no operation ran at all, so nothing was proved about {request.param}"
    if launches is not None and not request.node.get_closest_marker("no_launch"):
        assert launches, f"{request.param} was chosen, but it started no kernel"


def _launches(backend):
    """Counts the kernels that are started, where that is known."""
    if backend != "triton":
        return contextlib.nullcontext()
    from glm5fn.kernels.triton import launch

    return launch.counted()


@pytest.fixture
def widest(request, backend):
    """The widest dtype that the backend under test computes in: with it two forms of one function are compared."""
    return torch.float64 if request.node.callspec.params["backend"] == "reference" else torch.float32
