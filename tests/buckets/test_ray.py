"""Ray's workers read and write tables in a bucket: the same as this process does."""

from __future__ import annotations

import pytest

from tracefit import EngineChoice, TrainOptions, ingest, train

pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it beside")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.flaky(reason="a node of Ray has 30 s to start, a fixed limit, which a busy machine passes"),
    pytest.mark.filterwarnings("ignore"),
]

HERE = EngineChoice("ray")


def test_bucket_traces_become_tables_and_coefficients(tmp_path, bucket, new_traces, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in "ab":
        folder = new_traces().load(steps=120, requests=60).write(tmp_path / "runs" / name)
        bucket.copy_of(folder, f"traces/{name}")
    near = ingest([f"{bucket.url}/traces"], tmp_path / "tables", workers=1)
    far = ingest([f"{bucket.url}/traces"], f"{bucket.url}/tables", workers=2, engine=HERE)
    assert [run.run_id for run in far.runs] == [run.run_id for run in near.runs] == ["a", "b"]
    parts = {p.relative_to(near.tables).as_posix() for p in near.tables.rglob("part-*.parquet")}
    assert bucket.parts("tables") == parts == bucket.named("tables")
    fast = TrainOptions(fast=True)
    train(near.tables, tmp_path / "near", options=fast, workers=1)
    train(far.tables, tmp_path / "far", options=fast, workers=2, engine=HERE)
    for name in ("alpha.json", "beta.json"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
