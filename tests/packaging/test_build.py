"""The package list, and what ends up in an sdist and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> set[str]:
    below = {
        "glm5fn": ROOT / "src/glm5fn",
        **{f"glm5fn.kernels.{backend}": ROOT / "kernels" / backend for backend in ("reference", "triton", "ascendc")},
    }
    return {
        ".".join([name, *path.parent.relative_to(folder).parts])
        for name, folder in below.items()
        for path in folder.rglob("__init__.py")
    }


def test_the_list_in_pyproject_is_the_folders_on_disk():
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_every_folder_with_python_is_a_package():
    folders = {path.parent for root in ("src/glm5fn", "kernels") for path in (ROOT / root).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_the_root_folder_of_kernels_is_not_a_package():
    assert not (ROOT / "kernels/__init__.py").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist of a copy of the tree, and the wheel that is built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    copy = out / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", "kernels", "tests"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    subprocess.run(["find", str(copy), "-name", "*.egg-info", "-prune", "-exec", "rm", "-rf", "{}", "+"], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "would be ignored" not in found.stdout, "setuptools warns of data that it takes for packages"
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def shipped(kind: str) -> set[str]:
    """Files of the tree that belong into a package, as paths inside the wheel."""
    files = {}
    for root, prefix in (("src/glm5fn", "glm5fn"), ("kernels", "glm5fn/kernels")):
        for path in (ROOT / root).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"{prefix}/{path.relative_to(ROOT / root)}"] = path
    wanted = {name for name in files if name.endswith((".py", "py.typed"))}
    wanted |= {name for name in files if name.startswith("glm5fn/assets/") or "/csrc/" in name}
    return {name for name in wanted if kind in name}


@pytest.mark.parametrize(
    "kind", [".py", "py.typed", "assets/", "kernels/reference/", "kernels/triton/", "kernels/ascendc/"]
)
def test_the_wheel_holds_everything(built, kind):
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert shipped(kind), "there is something to look for"
    assert shipped(kind) - names == set()


def test_the_wheel_holds_nothing_else(built):
    names = zipfile.ZipFile(built[1]).namelist()
    strangers = [name for name in names if not name.startswith(("glm5fn/", "glm5fn-"))]
    assert strangers == []
    assert [name for name in names if "test_" in name or "__pycache__" in name or name.endswith(".pyc")] == []


def test_the_sdist_holds_the_kernels(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "kernels").rglob("csrc/**/*.*")]:
        if "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in names


def test_the_wheel_works_where_it_is_installed(built, tmp_path):
    """Unpacked somewhere else, and nothing of the checkout on the path."""
    zipfile.ZipFile(built[1]).extractall(tmp_path)
    code = (
        "import glm5fn, torch\n"
        f"assert glm5fn.__file__.startswith({str(tmp_path)!r}), glm5fn.__file__\n"
        "from glm5fn.kernels import reference\n"
        f"assert reference.__file__.startswith({str(tmp_path)!r}), reference.__file__\n"
        "print(glm5fn.l2_norm(torch.ones(1, 4)).sum().round().item())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "2.0\n"
