"""What the documentation says is run: README blocks, docstring examples, the generated table."""

import doctest
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import glm5fn

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/contract.md", "src/glm5fn/assets/pydoc-3m/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page):
    namespace: dict = {}
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    ):
        exec(compile(block, f"{page}[{number}]", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_the_support_table_of_the_readme_is_current():
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    text = (ROOT / "README.md").read_text()
    assert generate["updated"](text) == text, "run: python docs/generate.py"


def modules():
    for module in pkgutil.walk_packages(glm5fn.__path__, "glm5fn."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", ["glm5fn", *modules()])
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_public_function_has_a_docstring_and_every_operation_an_example():
    for name in glm5fn.__all__:
        thing = getattr(glm5fn, name)
        if callable(thing):
            assert thing.__doc__, f"{name} has no docstring"
    for name in glm5fn.dispatch.registry.operations():
        assert ">>>" in getattr(glm5fn, name).__doc__, f"{name} has no example"
