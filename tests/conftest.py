"""Fixtures that every test can use: the backend under test, proof that it ran, and a fixed seed."""

from __future__ import annotations

import pytest
import torch

from glm5fn.dispatch import record_choices


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
    with record_choices() as choices:
        yield request.param
    others = [str(c) for c in choices if c.backend != request.param]
    assert not others, f"asked for {request.param}, but these ran elsewhere: {others}"
    if request.node.get_closest_marker("nothing_runs"):
        assert not choices, f"nothing was to run, but this did: {[str(c) for c in choices]}"
    else:
        assert choices, f"no operation ran at all, so nothing was proved about {request.param}"
