"""Who may import whom, and who may read the environment: read off the source, file by file."""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "glm5fn." + ".".join(path.relative_to(ROOT / "src/glm5fn").with_suffix("").parts): path
    for path in sorted((ROOT / "src/glm5fn").rglob("*.py"))
} | {
    "glm5fn.kernels." + ".".join(path.relative_to(ROOT / "kernels").with_suffix("").parts): path
    for path in sorted((ROOT / "kernels").rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

BACKEND_PACKAGES = {
    "reference": set(),
    "triton": {"triton"},
    "ascendc": {"torch_npu"},
}

_KERNELS_MAY = ("glm5fn.dims", "glm5fn.layouts")
ALLOWED = {
    "glm5fn.dims": ("glm5fn.dispatch.errors",),
    "glm5fn.layouts": (),
    "glm5fn.kernels": (),
    "glm5fn.kernels.reference": (*_KERNELS_MAY, "glm5fn.kernels.reference*"),
    "glm5fn.kernels.triton": (*_KERNELS_MAY, "glm5fn.kernels.triton*"),
    "glm5fn.kernels.ascendc": (*_KERNELS_MAY, "glm5fn.kernels.ascendc*"),
    "glm5fn.dispatch": ("glm5fn.dispatch*", "glm5fn.kernels"),
    "glm5fn.donation": ("glm5fn.dispatch*",),
    "glm5fn.ops": ("glm5fn.ops*", "glm5fn.dims", "glm5fn.dispatch*", "glm5fn.donation"),
}
"""What of ours a file may import. The rule of a file is the longest of these names that begins its own."""


def imports(path: Path, module: str) -> set[str]:
    """Names of all modules that a file imports, anywhere in it, except for type checking only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are written in full, not relative"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def rule(module: str) -> str | None:
    matching = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return max(matching, key=len, default=None)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("module", [name for name in MODULES if rule(name) is not None])
def test_arrows(module):
    wrong = {
        found
        for found in imports(MODULES[module], module)
        if inside(found, "glm5fn") and not any(fnmatchcase(found, pattern) for pattern in ALLOWED[rule(module)])
    }
    assert not wrong, f"{module} may not import {sorted(wrong)}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("glm5fn.kernels.")])
def test_kernels_import_only_torch_and_their_own_package(module):
    own = BACKEND_PACKAGES[module.split(".")[2]]
    outside = {name.partition(".")[0] for name in imports(MODULES[module], module)} - {"glm5fn"}
    assert outside - set(sys.stdlib_module_names) <= {"torch", "numpy", "einops"} | own


def test_optional_packages_are_not_imported_elsewhere():
    optional = {"triton", "torch_npu", "transformers", "matplotlib", "rich", "tqdm", "hypothesis", "pytest"}
    found = {}
    for module, path in MODULES.items():
        if inside(module, "glm5fn.kernels.triton") or inside(module, "glm5fn.kernels.ascendc"):
            continue
        top_level = {
            name.partition(".")[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
        }
        if top_level & optional:
            found[module] = top_level & optional
    assert not found, "import these inside the function that needs them"


def test_only_two_files_read_the_environment():
    readers = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            reads |= isinstance(node, ast.ImportFrom) and node.module == "os"
            if reads:
                readers.add(module)
    assert readers == {"glm5fn.dispatch.selection", "glm5fn.diagnostics"}


def test_kernels_are_reached_only_through_the_table():
    """A kernel is reached through the table, by its string; importing it would choose a backend silently."""
    importers = {
        module
        for module, path in MODULES.items()
        if not inside(module, "glm5fn.kernels") and not inside(module, "glm5fn.testing")
        if any(found.startswith("glm5fn.kernels.") for found in imports(path, module))
    }
    assert importers == set()


def test_this_test_sees_what_it_should(tmp_path):
    """The reader of imports must not be blind: nested, aliased and from-imports count, type-checking ones do not."""
    source = tmp_path / "module.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import glm5fn.model\n"
        "def f():\n    from glm5fn import blocks as b\n    import glm5fn.cache as c\n"
    )
    assert imports(source, "x") == {"typing", "glm5fn.blocks", "glm5fn.cache"}
    assert "glm5fn.kernels.reference.kda" in MODULES
    assert rule("glm5fn.kernels.triton.kda") == "glm5fn.kernels.triton"
