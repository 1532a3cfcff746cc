"""Shared by the tests of the engines: runs of different sizes, and their tables byte for byte."""

from __future__ import annotations

import hashlib

import pytest

from tracefit.tables.schema import TABLES


@pytest.fixture
def fleet(tmp_path, new_traces):
    """Return a folder of five runs; the first has about half of the bytes."""
    sizes = {"a": (120, 30), "b": (20, 6), "c": (20, 6), "d": (30, 6), "e": (30, 6)}
    for name, (steps, requests) in sizes.items():
        new_traces().load(steps=steps, requests=requests).write(tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.fixture
def bytes_of():
    """Return a function from a tables folder to the name of each file of a table and the hash of its content."""

    def read(root):
        parts = [part for name in TABLES for part in (root / name).rglob("*.parquet")]
        return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in parts}

    return read
