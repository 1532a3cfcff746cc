"""The notebook in docs/ runs as it stands there, and says what it says there."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/notebook.ipynb"


def _printed(notebook):
    """Return the numbers that cells print, in order."""
    texts = [o["text"] for cell in notebook.cells for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
    return [float(number) for text in texts for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter's own libraries
def test_every_cell_runs_and_prints_what_the_notebook_shows(tmp_path):
    from scripts.make_notebook import execute  # noqa: PLC0415 - under the filter of warnings

    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    executed = execute(NOTEBOOK, tmp_path)
    shown = _printed(nbformat.read(NOTEBOOK, as_version=4))
    assert len(shown) > 3
    assert _printed(executed) == pytest.approx(shown, rel=0.02)


def test_the_notebook_is_small_and_has_no_error_in_it():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 100_000
    assert not [o for cell in notebook.cells for o in cell.get("outputs", ()) if o["output_type"] == "error"]
