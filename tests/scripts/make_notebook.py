"""Run the cells of a notebook in a folder, and write their outputs into it; figures, which are large, are left out.

`python tests/scripts/make_notebook.py docs/notebook.ipynb .`
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FIGURE = "application/vnd.plotly.v1+json"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of its cells."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if FIGURE not in o.get("data", {})]
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[1])
