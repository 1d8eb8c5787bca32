"""What runs kernels needs the interpreter, which Triton must know of when it is imported: ``make test-triton`` runs it,
in a process of its own. What compiles kernels must not be interpreted, and runs with everything else."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'glm5fn[triton]'", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/triton/" not in item.path.as_posix():
            continue
        compiles = item.path.name.startswith("test_aot")
        if compiles and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="compiles kernels, so TRITON_INTERPRET must not be set"))
        elif not compiles and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="runs kernels on the CPU: TRITON_INTERPRET=1, or make test-triton"))
