"""One name of a bucket at two endpoints is two buckets."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tracefit import ingest
from tracefit.tables.store import TableStore

RUN = "s3://fleet/prod/run"


@pytest.fixture
def sites(serve, bucket, new_traces):
    """Return the endpoints of two stores, and the bucket of each: it has a run of the same name, with other spans."""
    here, there = serve(), serve()
    lines = new_traces().load(steps=80, requests=40).lines()
    for (one, _), some in zip((here, there), (lines[:40], lines[40:]), strict=True):
        one.objects["prod/run/traces.json"] = (
            "".join(f"{line}\n" for line in some).encode(),
            datetime.now(UTC),
        )
    return here, there


@pytest.fixture
def ingested(tmp_path, monkeypatch):
    """Return a function that ingests URLs at an endpoint; it returns the ids of the runs read and of those stored."""

    def read(endpoint, *urls):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        result = ingest(urls, tmp_path / "tables")
        return [run.run_id for run in result.runs], TableStore(tmp_path / "tables").runs(), result.warnings

    return read


def objects_read(bucket):
    return [key for method, key in bucket.asked if method == "GET" and key]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "run_id"), [("", "run"), ("/traces.json", "traces"), ("/*.json", "traces")])
def test_one_name_at_two_endpoints_is_two_runs(sites, ingested, path, run_id):
    (here, first), (there, second) = sites
    assert ingested(first, RUN + path) == ([run_id], [run_id], ())
    read, stored, warnings = ingested(second, RUN + path)
    assert (read, stored) == ([f"{run_id}-2"], [run_id, f"{run_id}-2"])
    assert warnings == (f"{run_id}: another run of that name is in the tables already; this one is {run_id}-2",)
    for bucket, endpoint, known in ((here, first, run_id), (there, second, f"{run_id}-2")):
        before = objects_read(bucket)
        assert ingested(f"{endpoint.upper().replace('HTTP', 'http')}/", RUN + path)[:2] == ([known], stored)
        assert objects_read(bucket) == before


@pytest.mark.slow
def test_two_endpoints_in_one_command_are_two_runs(sites, ingested):
    (_, first), (_, second) = sites
    urls = [f"{RUN}/traces.json?endpoint_override={endpoint}" for endpoint in (first, second)]
    for (bucket, _), model in zip(sites, ("one", "two"), strict=True):
        bucket.objects["prod/run/exp-config.yaml"] = f"model: {model}\n".encode(), datetime.now(UTC)
    read, stored, _ = ingested("http://127.0.0.1:9", *urls)
    assert (read, stored) == (["run", "run-2"], ["run", "run-2"])
    # The environment names the same store.
    assert ingested(second, f"{RUN}/traces.json")[:2] == (["run-2"], stored)


@pytest.mark.slow
def test_tables_are_written_where_the_variable_of_s3_says(serve, bucket, tmp_path, traces, monkeypatch):
    other, endpoint = serve()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], "s3://fleet/tables")
    assert bucket.objects == {}
    assert "tables/manifest.json" in other.objects
