"""Execute the notebooks in place: ``python notebooks/execute.py [NOTEBOOK ...]``, by default all beside this file.

Outputs and figures are stored; timestamps and details of the machine are not.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, *, folder: Path, **environment: str) -> nbformat.NotebookNode:
    """Return the notebook ``path`` with fresh outputs.

    Args:
        path: the notebook, which is not written.
        folder: where the cells run.
        environment: variables for the cells, beside those of this process.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=os.environ | environment)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = fewer_colours(output.data["image/png"])
    return notebook


def fewer_colours(png: str) -> str:
    """Reduce a base64 figure to a palette, which takes a fraction of the bytes and looks the same."""
    slim = BytesIO()
    Image.open(BytesIO(b64decode(png))).convert("RGB").quantize(128).save(slim, format="png", optimize=True)
    return b64encode(slim.getvalue()).decode()


if __name__ == "__main__":
    here = Path(__file__).parent
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(here.glob("*.ipynb")):
        nbformat.write(executed(path, folder=here), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
