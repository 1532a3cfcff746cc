"""A file in a bucket crosses the network once, and not at all if it is as it was."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem

from tracefit import DataError, UsageError, ingest
from tracefit.commands.ingest import ingest_inputs
from tracefit.engines.local import LocalEngine
from tracefit.inputs.discovery import open_inputs
from tracefit.options import IngestOptions, ServerOptions
from tracefit.progress import NullProgress
from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.store import TableStore


class Bucket(FileSystemHandler):
    """A folder as an object store.

    `opened` counts reads and `served` bytes, both by name of trace file; a read breaks off after `breaks_after` bytes.
    """

    def __init__(self, root):
        self.root = root
        self.opened, self.served = Counter(), Counter()
        self.breaks_after = math.inf
        self.on_read = lambda: None

    def get_type_name(self):
        return "bucket"

    def get_file_info(self, paths):
        return LocalFileSystem().get_file_info(paths)

    def get_file_info_selector(self, selector):
        return LocalFileSystem().get_file_info(selector)

    def open_input_stream(self, path):
        if Path(path).name.startswith("traces"):
            self.opened[Path(path).name] += 1
        return pa.PythonFile(_Served(path, self), mode="r")

    def _unused(self, *_):
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _unused
    move = normalize_path = open_append_stream = open_input_file = open_output_stream = _unused


class _Served:
    closed = False

    def __init__(self, path, bucket):
        self.path, self.bucket, self.stream = path, bucket, Path(path).open("rb")  # noqa: SIM115

    def readable(self):
        return True

    def read(self, size=-1):
        self.bucket.on_read()
        data = self.stream.read(min(size, 1000))  # fewer than it was asked for, as over a network
        if (name := Path(self.path).name).startswith("traces"):
            self.bucket.served[name] += len(data)
            if self.bucket.served[name] > self.bucket.breaks_after:
                raise OSError("connection reset")
        return data

    def close(self):
        self.closed = True
        self.stream.close()


@pytest.fixture
def folder(tmp_path, new_traces):
    """Return the folder that the bucket shows as `s3://bucket/prod`: a run whose spans are in three files."""
    lines = new_traces().load(steps=120, requests=60).lines()
    folder = tmp_path / "bucket" / "prod"
    new_traces().write(folder)
    (folder / "traces.json").unlink()
    for number in range(3):
        (folder / f"traces-{number}.json").write_text("".join(f"{line}\n" for line in lines[number::3]))
    return folder


@pytest.fixture
def bucket(folder):
    return Bucket(str(folder.parent))


@pytest.fixture
def read(tmp_path, bucket):
    """Return a function that ingests a URL of the bucket into `tables`."""

    def one(url="s3://bucket/prod", *, workers=1, options=None):
        opened, out = (PyFileSystem(bucket), bucket.root), tmp_path / "tables"
        with open_inputs([url], filesystem_of=lambda _: opened) as inputs:
            engine, options = LocalEngine(workers), options or IngestOptions()
            return ingest_inputs(inputs, out, ServerOptions(), NullProgress(), options=options, engine=engine)

    return one


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.glob("traces*")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_byte_is_read_once(tmp_path, bucket, folder, read, small_pieces, workers):
    read(workers=workers, options=small_pieces)
    assert bucket.opened == dict.fromkeys(sizes(folder), 1)
    assert bucket.served == sizes(folder)
    assert list((tmp_path / "tables").glob(".writing-*")) == []


@pytest.mark.slow
def test_files_named_by_a_pattern_are_read_once(bucket, folder, read):
    read("s3://bucket/prod/traces-*.json")
    assert bucket.served == sizes(folder)


@pytest.mark.slow
def test_tables_are_those_of_local_files(tmp_path, folder, read, small_pieces):
    read(workers=2, options=small_pieces)
    ingest([folder], tmp_path / "local", workers=1)
    remote, local = TableStore(tmp_path / "tables"), TableStore(tmp_path / "local")
    for table in INGEST_TABLES:
        here, there = (store.read(table).drop("source_file", strict=False) for store in (local, remote))
        assert here.equals(there), table
    here, there = ([f.sha256 for f in store.manifest().runs["prod"].files] for store in (local, remote))
    assert here == there
    urls = {f"s3://bucket/prod/traces-{number}.json" for number in range(3)}
    assert set(remote.read("spans")["source_file"]) == urls


def touch(path):
    os.utime(path, ns=(1, 1))


def grow(path):
    with path.open("a") as file:
        file.write("{}\n")


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("change", "opened", "decodes"),
    [
        (lambda path: None, {}, []),
        (Path.unlink, {}, []),
        (touch, {"traces-2.json": 1}, []),
        pytest.param(grow, {"traces-2.json": 1}, ["traces-2.json"], marks=pytest.mark.slow),
    ],
    ids=["unchanged", "removed", "new date", "new content"],
)
def test_second_reading_takes_what_changed(tmp_path, bucket, folder, read, decoded, change, opened, decodes):
    read()
    assert len(decoded(tmp_path / "tables")) == 3
    bucket.opened.clear()
    change(folder / "traces-2.json")
    assert [run.run_id for run in read().runs] == ["prod"]
    assert bucket.opened == opened
    assert decoded(tmp_path / "tables") == decodes


@pytest.mark.slow
def test_what_has_grown_is_read_once_more(bucket, folder, read):
    read()
    grow(folder / "traces-2.json")
    read()
    bucket.opened.clear()
    read()
    assert bucket.opened == {}


@pytest.mark.slow
def test_second_reading_has_the_same_result(read):
    assert read() == read()


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(("fetched_bytes", "most"), [(1, 1), (1 << 30, 3)])
def test_copies_on_disk_are_bounded(tmp_path, bucket, read, fetched_bytes, most):
    copies = []
    bucket.on_read = lambda: copies.append(
        sum(path.stat().st_size > 0 for path in (tmp_path / "tables").glob(".writing-*/*") if path.is_file())
    )
    read(options=IngestOptions(fetched_bytes=fetched_bytes))
    assert max(copies) <= most
    assert (max(copies) > 1) == (most > 1)


@pytest.mark.parametrize("lines", [1, 2000], ids=["one piece", "many pieces"])
def test_metrics_are_refused(tmp_path, folder, read, small_pieces, lines):
    (folder / "traces-1.json").write_text('{"resourceMetrics": []}\n' * lines)
    with pytest.raises(DataError, match=r"^s3://bucket/prod/traces-1.json: holds OTLP metrics, not traces"):
        read("s3://bucket/prod/traces-1.json", options=small_pieces)
    assert TableStore(tmp_path / "tables").runs() == []


@pytest.mark.slow
def test_broken_connection_leaves_nothing_half_written(tmp_path, bucket, read):
    bucket.breaks_after = 1000
    with pytest.raises(UsageError, match=r"^s3://bucket/prod/traces-\d.json: cannot be read beyond byte"):
        read()
    assert list((tmp_path / "tables").iterdir()) == []
    bucket.breaks_after = math.inf
    read()
    assert TableStore(tmp_path / "tables").read("requests").height == 60
