"""What the tests of the commands share: reading what a job left."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tracefit.commands.ingest import IngestOptions
from tracefit.engines import local
from tracefit.inputs.blocks import Block
from tracefit.tables.external_sort import SortSpace
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
def decoded(monkeypatch):
    """Return the list of blocks that are decoded from now on in this process: file name and where the block begins."""
    seen, decode = [], local.decode_task

    def spy(task):
        blocks = [item for item in task.items if isinstance(item, Block)]
        seen.extend((Path(block.source_file).name, block.offset) for block in blocks)
        return decode(task)

    monkeypatch.setattr(local, "decode_task", spy)
    return seen


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut files, sorts and windows so small that a small run has many of each."""
    small = functools.partial(IngestOptions, block_bytes=20_000)
    monkeypatch.setattr("tracefit.commands.ingest.IngestOptions", small)
    monkeypatch.setattr("tracefit.tables.build.WINDOW_BYTES", 60_000)
    space = functools.partial(SortSpace, most_held_bytes=4_000, window_bytes=4_000, block_rows=7)
    monkeypatch.setattr("tracefit.tables.build.SortSpace", space)
    monkeypatch.setattr("tracefit.tables.store.PIECE_ROWS", 11)


@pytest.fixture
def files_in():
    """Return a function that lists every file below a folder, if it is there."""
    return lambda folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
