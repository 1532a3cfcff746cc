"""Tables in a bucket are those of a folder, by the same names; a run is there whole or not at all."""

from __future__ import annotations

import pytest

from tracefit import ingest
from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.store import TableStore


@pytest.fixture
def run(tmp_path, new_traces):
    """Return a run folder."""
    return new_traces().load(steps=120, requests=60).write(tmp_path / "run")


def _files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("part-*.parquet"))


def test_a_bucket_has_the_parts_of_a_folder(tmp_path, bucket, run):
    far = ingest([run], f"{bucket.url}/a/tables")
    near = ingest([run], tmp_path / "tables")
    assert str(far.tables) == "s3://fleet/a/tables"
    assert far.runs == near.runs
    assert [p for p in bucket.names("a/tables/") if "/part-" in p] == _files(tmp_path / "tables")
    for name in INGEST_TABLES:
        one, other = (TableStore(root).read(name) for root in (far.tables, near.tables))
        assert one.equals(other)
