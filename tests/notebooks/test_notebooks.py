"""The notebooks run from a clean kernel, and what they store is what they give."""

import re
import runpy
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest

import glm5fn

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
image = pytest.importorskip("matplotlib.image")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
FIGURES = {"01_quickstart": 1, "02_caches_by_hand": 7}
PATH = re.compile(r"(?<![\w.:/])/\w[\w.-]*/\w|\b[A-Z]:\\|site-packages")
AGAIN = "run: make notebooks"


def stored(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(notebook):
    """Everything readable in the outputs."""
    for output in outputs(notebook):
        assert output.output_type != "error", f"{output.ename}: {output.evalue}"
        yield output.get("text", "")
        yield from (text for kind, text in output.get("data", {}).items() if not kind.startswith("image/"))


def figures(notebook):
    """Every figure as an array ``[height, width, channels]`` of 0..1."""
    pngs = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [image.imread(BytesIO(b64decode(png))) for png in pngs]


def shape(notebook):
    """Which cell has which outputs, without their content."""
    return {
        cell.id: [(output.output_type, output.get("name"), sorted(output.get("data", {}))) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_it_runs_on_the_reference_backend(name, tmp_path, monkeypatch):
    # Its first import on a machine builds a cache of fonts: here, for in a cell it would complain how long that takes.
    pytest.importorskip("matplotlib.font_manager")
    # A kernel registered in the user's home would be another Python.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    execute = runpy.run_path(str(FOLDER / "execute.py"))["executed"]
    (folder := tmp_path / "work").mkdir()

    notebook = execute(FOLDER / f"{name}.ipynb", folder=folder, GLM5FN_BACKEND="reference")

    assert not list(folder.iterdir()), "a notebook leaves no files behind"
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []
    assert len(figures(notebook)) == FIGURES[name]
    for number, figure in enumerate(figures(notebook)):
        assert 500 <= figure.shape[1] <= 1000, f"figure {number} does not suit the width of a page"
        assert figure[..., :3].std() > 0.05, f"figure {number} is blank"
    here = {str(ROOT), str(Path.home()), str(Path(glm5fn.__file__).parents[1]), str(tmp_path)}
    for text in texts(notebook):
        assert not [path for path in here if path + "/" in text]
    assert shape(stored(name)) == shape(notebook), AGAIN


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_stored_is_complete_small_and_of_no_machine(name):
    notebook = stored(name)
    nbformat.validate(notebook)
    assert notebook.metadata == runpy.run_path(str(FOLDER / "execute.py"))["METADATA"], AGAIN
    assert all(cell.metadata == {} for cell in notebook.cells), AGAIN
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), AGAIN
    assert len(figures(notebook)) == FIGURES[name], AGAIN
    for text in texts(notebook):
        assert not PATH.search(text), f"a path of a machine in {text!r}"


@pytest.mark.parametrize("name", FIGURES)
def test_links_lead_somewhere(name):
    prose = "\n".join(cell.source for cell in stored(name).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)\)", prose)
    assert targets
    for target in targets:
        assert (FOLDER / target).exists(), f"{name} links to {target}"
