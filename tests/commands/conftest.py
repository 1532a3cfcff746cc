"""Shared by the tests of the commands: reading what a job left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.store import TableStore


@pytest.fixture
def models_of():
    """Return a function from a folder of models to name and model."""

    def read(folder):
        files = [json.loads((folder / f"{kind}.json").read_text()) for kind in ("alpha", "beta")]
        return {m["name"]: m for file in files for m in file["models"]}

    return read


def _tables(root):
    frames = {}
    for name in INGEST_TABLES:
        rows = TableStore(root).read(name)
        # Where a span was read is all that the way it was read may change; runs count their files.
        own = ("run_id", "source_file", "source_offset", "files", "bytes", "content_sha256")
        frames[name] = rows.drop(own, strict=False).rows()
    return frames


@pytest.fixture
def contents():
    """Return a function from a tables folder to the rows of every table, without where they were read."""
    return _tables


@pytest.fixture
def decoded():
    """Return a function from a tables folder to the names of the files decoded since it was last asked: their parts are
    new."""
    known = set()

    def since(tables):
        files = [file for run in TableStore(tables).manifest().runs.values() for file in run.files]
        parts = {Path(file.path).name: {part.name for part in file.parts} for file in files}
        new = sorted(name for name, names in parts.items() if names - known)
        known.update(*parts.values())
        return new

    return since
