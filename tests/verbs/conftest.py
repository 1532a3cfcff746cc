"""What the tests of the verbs share: reading what a job left."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def models_of():
    """Return a function from a folder of models to name and model."""

    def read(folder):
        files = [json.loads((folder / f"{kind}.json").read_text()) for kind in ("alpha", "beta")]
        return {m["name"]: m for file in files for m in file["models"]}

    return read


@pytest.fixture
def files_in():
    """Return a function that lists every file below a folder, if it is there."""
    return lambda folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
