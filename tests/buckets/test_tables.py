"""Tables in a bucket are those of a folder, by the same names; a run is there whole or not at all."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import polars as pl
import pytest

from tracefit import UsageError, ingest, scan
from tracefit.inputs.buckets import BucketPath, location_of
from tracefit.tables.rows import FRAMES
from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.storage import Bucket, Disk, open_storage
from tracefit.tables.store import IngestedRun, TableStore

TABLES = "s3://fleet/a/tables"


@pytest.fixture
def run(tmp_path, new_traces):
    """Return a run folder."""
    return new_traces().load(steps=120, requests=60).write(tmp_path / "run")


@pytest.fixture
def small(tmp_path, new_traces):
    """Return a function that makes a run of one request."""

    def make(number, name=None):
        return new_traces().request(number, 0, step=1).write(tmp_path / f"{number}" / (name or f"run{number}"))

    return make


@pytest.mark.slow
def test_a_bucket_has_the_parts_of_a_folder_and_nothing_else(tmp_path, bucket, run):
    remote, local = ingest([run], TABLES), ingest([run], tmp_path / "tables")
    assert (str(remote.tables), remote.runs) == (TABLES, local.runs)
    parts = {p.relative_to(local.tables).as_posix() for p in local.tables.rglob("part-*.parquet")}
    assert bucket.parts("a/tables") == parts == bucket.named("a/tables")
    # Staged parts are read from the copies on disk.
    assert not [key for method, key in bucket.asked if method == "GET" and ".stage/" in key]
    for name in INGEST_TABLES:
        assert TableStore(TABLES).read(name).equals(TableStore(local.tables).read(name))
    for name in ("requests", "runs"):
        assert scan(TABLES, name).collect().equals(scan(local.tables, name).collect())
    assert set(TableStore(TABLES).read("steps", columns=["step_id"]).columns) == {"step_id"}


@pytest.mark.slow
def test_many_runs_are_published_with_one_manifest(bucket, small):
    ingest([small(1), small(2), small(3)], TABLES)
    assert TableStore(TABLES).runs() == ["run1", "run2", "run3"]
    assert bucket.asked.count(("PUT", "a/tables/manifest.json")) == 1


def test_copies_on_disk_are_kept_while_there_is_room(tmp_path, bucket):
    place = Bucket(location_of(TABLES), kept_bytes=6)
    with place.lock(lambda: None, ()) as writing, place.scratch() as scratch:
        for name in ("one", "two"):
            (scratch / name).write_text(f"{name}.")
            writing.put({name: scratch / name})
            with writing.fetched(name) as path:
                assert path.read_text() == f"{name}."
    assert [key for method, key in bucket.asked if method == "GET"] == ["a/tables/two"]


@pytest.mark.slow
def test_the_buckets_of_google_are_read_and_written_too(bucket, run):
    google = ingest([run], f"{bucket.google}/google")
    ingest([run], f"{bucket.url}/amazon")
    assert bucket.parts("google") == bucket.parts("amazon")
    assert ingest([run], f"{bucket.google}/google") == google
    assert TableStore(google.tables).read("requests").height == 60


@pytest.mark.slow
def test_what_is_known_is_not_read_again(bucket, run):
    first = ingest([run], TABLES)
    before = dict(bucket.objects)
    bucket.asked.clear()
    assert ingest([run], TABLES) == first
    assert bucket.objects == before
    assert not [key for method, key in bucket.asked if method == "PUT"]


@pytest.mark.slow
def test_a_run_that_grows_is_the_run_read_at_once(tmp_path, bucket, new_traces):
    lines = new_traces().load(steps=120, requests=60).lines()
    folder = new_traces().write(tmp_path / "run")
    (folder / "traces.json").unlink()
    staged = set()
    for number in range(2):
        (folder / f"traces-{number}.json").write_text("".join(f"{line}\n" for line in lines[number::2]))
        ingest([folder], TABLES)
        before, staged = staged, set(bucket.names("a/tables/.stage/"))
        # One file was decoded, the other is known.
        assert before < staged
        assert len(staged) == (number + 1) * len(FRAMES)
    ingest([folder], tmp_path / "tables")
    for name in INGEST_TABLES:
        assert TableStore(TABLES).read(name).equals(TableStore(tmp_path / "tables").read(name))
    # A folder of parts is read without the manifest too: what was replaced is not beside what replaced it.
    assert bucket.parts("a/tables") == bucket.named("a/tables")


@pytest.mark.slow
def test_a_part_that_is_gone_is_made_again(bucket, run):
    ingest([run], TABLES)
    before = dict(bucket.objects)
    lost = next(name for name in bucket.names() if "/steps/" in name)
    del bucket.objects[lost]
    result = ingest([run], TABLES)
    assert "read again" in result.warnings[0]
    assert bucket.objects[lost][0] == before[lost][0]


@pytest.mark.slow
def test_what_no_manifest_names_goes_after_a_day(bucket, small):
    ingest([small(1)], TABLES)
    left = "a/tables/.stage/0123456789abcdef0123456789abcdef/spans.arrow"
    part = "a/tables/steps/run_id=run1/part-0123456789abcdef.parquet"
    foreign = "a/tables/steps/notes.txt"
    bucket.objects |= dict.fromkeys((left, part, foreign), (b"x", bucket.objects["a/tables/manifest.json"][1]))
    bucket.age(hours=23)
    ingest([small(2)], TABLES)
    assert {left, part, foreign} <= set(bucket.objects)
    bucket.age(hours=2)
    ingest([small(3)], TABLES)
    assert {left, part, foreign} & set(bucket.objects) == {foreign}
    assert TableStore(TABLES).read("requests").height == 3
    assert bucket.parts("a/tables") == bucket.named("a/tables")


@pytest.mark.slow
def test_two_writers_of_different_runs_both_count(bucket, small, monkeypatch):
    """The second one has read the manifest when the first one replaces it."""
    ingest([small(1)], TABLES)
    mine, theirs = TableStore(TABLES), TableStore(TABLES)
    replace = Bucket.replace_if
    entry = mine.manifest().runs["run1"]

    def late(place, *arguments):
        monkeypatch.setattr(Bucket, "replace_if", replace)
        theirs.commit({"theirs": (None, entry)})
        return place.replace_if(*arguments)

    monkeypatch.setattr(Bucket, "replace_if", late)
    mine.commit({"mine": (None, entry)})
    assert mine.runs() == ["mine", "run1", "theirs"]


@pytest.mark.slow
def test_two_writers_of_one_run_are_one_and_one_line(bucket, small, monkeypatch):
    ingest([small(1, "run")], TABLES)
    first = bucket.named("a/tables")
    mine, theirs = small(2, "run"), small(3, "run")
    commit = TableStore.commit

    def late(store, changes):
        monkeypatch.setattr(TableStore, "commit", commit)
        ingest([theirs], TABLES)
        return commit(store, changes)

    monkeypatch.setattr(TableStore, "commit", late)
    with pytest.raises(UsageError, match=f"^{TABLES}: run run-2 was changed by another process meanwhile") as caught:
        ingest([mine], TABLES)
    assert caught.value.exit_code == 2
    rows = TableStore(TABLES).read("requests")
    assert rows.select("run_id", "request_id").rows() == [("run", "cmpl-1"), ("run-2", "cmpl-3")]
    assert first < bucket.parts("a/tables") == bucket.named("a/tables")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_many_writers_lose_nothing(bucket, scheme):
    store = TableStore(f"{scheme}://fleet/tables")
    threads = [threading.Thread(target=store.commit, args=({f"run{n}": (None, IngestedRun())},)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(store.manifest().runs) == sorted(f"run{n}" for n in range(12))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("s3://b/x/", BucketPath("s3:/b/x")),
        (Path("s3://b/x"), BucketPath("s3:/b/x")),
        ("GS://b", BucketPath("gs:/b")),
        ("file:///traces/a%20b", Path("/traces/a b")),
        (Path("file:///traces/x"), Path("/traces/x")),
        ("tables", Path("tables")),
    ],
)
def test_a_name_leads_to_a_folder_or_a_bucket(name, place):
    assert (location_of(name), type(location_of(name))) == (place, type(place))
    assert type(open_storage(name)) is (Bucket if isinstance(place, BucketPath) else Disk)


def test_a_path_in_a_bucket_stays_one(monkeypatch):
    path = location_of("s3://b/x")
    for one in (path / "y", (path / "y" / "z").parent, pickle.loads(pickle.dumps(path / "y"))):  # noqa: S301 - our own
        assert (str(one), type(one)) == ("s3://b/x/y", BucketPath)
    assert (path.bucket, path.key) == ("s3://b", "x")
    with pytest.raises(UsageError, match=r"^s3://b/x: is in a bucket"):
        path.mkdir()


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@b/x", "s3://b/x?region=eu-west-1", "s3://"])
def test_secrets_and_options_stay_out_of_the_name(url):
    with pytest.raises(UsageError, match="from the environment: AWS_ACCESS_KEY_ID") as caught:
        TableStore(url)
    assert "KEY:" not in str(caught.value)


def test_a_file_url_is_a_folder(tmp_path, small):
    result = ingest([small(1)], f"file://{tmp_path}/tables")
    assert result.tables == tmp_path / "tables"
    assert pl.read_parquet(tmp_path / "tables" / "requests").height == 1


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("name", ["a b", "a%2Fb", "a%20b", "a+b", "a#b", "ü-😀", "a'b\"c", "a\\b"])
def test_odd_names_stay_as_they_are(bucket, small, name):
    bucket.copy_of(small(1), f"{name}/run")
    tables = f"s3://fleet/{name}/tables"
    ingest([f"s3://fleet/{name}/run"], tables)
    store = TableStore(tables)
    assert str(store.root) == tables
    assert {key.partition("/")[0] for key in bucket.objects} == {name}
    file = f"{os.environ['AWS_ENDPOINT_URL']}/fleet/{name}/run/traces.json"
    assert store.read("spans")["source_file"].unique().to_list() == [file]


@pytest.mark.parametrize("name", ["..", "a/../b"])
def test_a_way_out_of_the_bucket_is_refused(bucket, small, name):
    for paths, out in (
        ([small(1)], f"s3://fleet/{name}/tables"),
        ([f"s3://fleet/{name}/run"], "s3://fleet/tables"),
    ):
        with pytest.raises(UsageError, match=r"^s3://fleet/[^\n]*$"):
            ingest(paths, out)
    assert not bucket.objects
