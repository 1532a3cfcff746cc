"""Shared by the tests of the engines: runs of different sizes, and their tables byte for byte."""

from __future__ import annotations

import hashlib

import pytest

from tracefit import ingest
from tracefit.tables.schema import TABLES


def _write_fleet(folder, new_traces):
    """Write five runs; the first has about half of the bytes."""
    sizes = {"a": (120, 30), "b": (20, 6), "c": (20, 6), "d": (30, 6), "e": (30, 6)}
    for name, (steps, requests) in sizes.items():
        new_traces().load(steps=steps, requests=requests).write(folder / name)
    return folder


@pytest.fixture
def fleet(tmp_path, new_traces):
    """Return a folder of five runs, which a test may change; the first has about half of the bytes."""
    return _write_fleet(tmp_path / "runs", new_traces)


def _bytes_of(root):
    parts = [part for name in TABLES for part in (root / name).rglob("*.parquet")]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in parts}


@pytest.fixture
def bytes_of():
    """Return a function from a tables folder to the name of each file of a table and the hash of its content."""
    return _bytes_of


@pytest.fixture(scope="session")
def read_by_one(once, small_pieces, new_traces):
    """Return a folder of five runs that no test changes, and the bytes of its tables as one worker writes them in small
    pieces."""

    def fill(root):
        ingest([_write_fleet(root / "runs", new_traces)], root / "tables", workers=1, options=small_pieces)

    root = once("fleet", fill)
    return root / "runs", _bytes_of(root / "tables")
