"""Whatever happens to a bucket or on the way to it, the tables are those of a quiet day, or one line and nothing half
there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tracefit import UsageError, ingest
from tracefit.inputs import buckets
from tracefit.tables.store import TableStore

TABLES = "s3://fleet/tables"
INGEST = "import sys; from tracefit import ingest; ingest([sys.argv[1]], sys.argv[2], workers=1)"


@pytest.fixture
def run(tmp_path, traces):
    """Return a run folder."""
    return traces.load(steps=40, requests=20).write(tmp_path / "run")


@pytest.fixture
def parts(tmp_path, run):
    """Return the parts that the run has, from a folder on disk."""
    ingest([run], tmp_path / "tables")
    return {p.relative_to(tmp_path / "tables").as_posix() for p in tmp_path.rglob("part-*.parquet")}


def _first_times(count, *kinds):
    """Return troubles that meet every object and list for its first requests, one kind after the other."""
    met = Counter()

    def trouble(method, key):
        met[method, key] += 1
        return kinds[met[method, key] % len(kinds)] if met[method, key] <= count else None

    return trouble


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("503",), ("reset",), ("torn",), ("lost",), ("cut",), ("503", "reset", "torn", "lost")],
    ids="-".join,
)
def test_a_bucket_in_trouble_for_a_while_gets_the_same_tables(bucket, run, parts, kinds):
    bucket.trouble = _first_times(len(kinds) + 1, *kinds)
    ingest([run], TABLES)
    assert bucket.parts("tables") == parts == bucket.named("tables")
    method = "GET" if kinds == ("cut",) else "PUT"  # answers alone are cut
    assert bucket.asked.count((method, "tables/manifest.json")) > len(kinds)


@pytest.mark.slow
def test_parts_larger_than_one_request_are_whole_too(bucket, tmp_path):
    """Those are uploads of several requests; none of them is left open."""
    data = os.urandom(12 << 20)
    (tmp_path / "part").write_bytes(data)
    bucket.trouble = _first_times(2, "torn", "503")
    buckets.put(buckets.location_of(f"{TABLES}/part"), tmp_path / "part")
    assert bucket.objects["tables/part"][0] == data
    assert bucket.uploads == {}
    buckets.download(buckets.location_of(f"{TABLES}/part"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


@pytest.mark.slow
def test_an_answer_that_is_lost_is_no_other_writer(bucket, run):
    """The manifest is replaced, and the connection ends before the answer."""
    lost = iter(["lost"])
    bucket.trouble = lambda method, key: next(lost, None) if (method, key) == ("PUT", "tables/manifest.json") else None
    ingest([run], TABLES)
    assert bucket.parts("tables") == bucket.named("tables")


@pytest.mark.slow
def test_killed_writer_is_completed_by_the_next(bucket, run, parts, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the killed leave their scratch folders
    code = [sys.executable, "-c", INGEST, str(run)]
    subprocess.run([*code, TABLES], check=True)
    puts = [key for method, key in bucket.asked if method in ("PUT", "POST")]
    moments = [1, len(puts) // 3, puts.index("tables/manifest.json")]
    for number, moment in enumerate(moments):
        place = f"killed{number}"
        job = subprocess.Popen([*code, f"s3://fleet/{place}"], stderr=subprocess.DEVNULL)
        bucket.trouble = _killer(job, moment)
        assert job.wait(60) == -signal.SIGKILL
        bucket.trouble = None
        # The manifest is the last that is written.
        assert TableStore(f"s3://fleet/{place}").runs() == []
        ingest([run], f"s3://fleet/{place}")
        assert bucket.named(place) == parts


def _killer(job, moment):
    writes = iter(range(moment))

    def trouble(method, _):
        if method in ("PUT", "POST") and next(writes, None) is None:
            job.send_signal(signal.SIGKILL)
            job.wait(60)
            return "reset"
        return None

    return trouble


@pytest.mark.slow
def test_two_processes_at_once_lose_nothing(bucket, tmp_path, new_traces):
    runs = [new_traces().request(n, 0, step=1).write(tmp_path / f"run{n}") for n in (1, 2)]
    jobs = [subprocess.Popen([sys.executable, "-c", INGEST, run, TABLES]) for run in runs]
    assert [job.wait(60) for job in jobs] == [0, 0]
    assert TableStore(TABLES).runs() == ["run1", "run2"]
    assert bucket.parts("tables") == bucket.named("tables")


@pytest.mark.parametrize(
    "command", [("ingest", "{run}", "--out"), ("requests",), ("report",), ("inspect",)], ids=" ".join
)
@pytest.mark.parametrize(
    ("trouble", "url", "says"),
    [
        ("403", TABLES, "AccessDenied"),
        (None, "s3://elsewhere/tables", "there is no such bucket"),
    ],
)
def test_a_bucket_that_refuses_is_one_line(bucket, tracefit, run, command, trouble, url, says):
    bucket.trouble = lambda *_: trouble
    arguments = [part.format(run=run) for part in command]
    code, said, error = tracefit(*arguments, url)
    assert (code, said) == (2, "")
    assert error.count("\n") == 1
    assert url in error
    assert says in error or command == ("inspect",)
    assert bucket.objects == {}


@pytest.mark.slow
def test_an_endpoint_where_nobody_answers_is_one_line(bucket, tracefit, run, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code, said, error = tracefit("ingest", run, "--out", TABLES)
    assert (code, said, error.count("\n")) == (2, "", 1)
    assert "AWS_ENDPOINT_URL in the environment" in error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", ".parquet"])
def test_a_bucket_that_may_only_be_read_stays_as_it_is(bucket, run, new_traces, tmp_path, name):
    ingest([new_traces().request(1, 0, step=1).write(tmp_path / "first")], TABLES)
    before = bucket.named("tables")
    bucket.trouble = lambda method, key: "403" if method == "PUT" and key.endswith(name) else None
    with pytest.raises(UsageError, match="cannot be read or written") as caught:
        ingest([run], TABLES)
    assert caught.value.exit_code == 2
    assert bucket.named("tables") == bucket.parts("tables") == before
