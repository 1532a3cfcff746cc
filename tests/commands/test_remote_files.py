"""A file in a bucket crosses the network once, and not at all if it is as it was."""

from __future__ import annotations

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
    """A folder as an object store: what is read of it is counted, and it may break off."""

    def __init__(self, root):
        self.root = root
        self.opened = Counter()
        self.served = Counter()
        self.breaks_after = None
        self.on_read = lambda: None

    def get_type_name(self):
        return "bucket"

    def get_file_info(self, paths):
        return LocalFileSystem().get_file_info(paths)

    def get_file_info_selector(self, selector):
        return LocalFileSystem().get_file_info(selector)

    def open_input_stream(self, path):
        self.opened[Path(path).name] += 1
        return pa.PythonFile(_Served(path, self), mode="r")

    def _unused(self, *_):
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = (
        _unused
    )
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
        name = Path(self.path).name
        self.bucket.served[name] += len(data)
        if self.bucket.breaks_after is not None and self.bucket.served[name] > self.bucket.breaks_after:
            raise OSError("connection reset")
        return data

    def close(self):
        self.closed = True
        self.stream.close()


@pytest.fixture
def bucket(tmp_path, new_traces):
    """Return a bucket that holds the spans of a run in three files."""
    lines = new_traces().load(steps=120, requests=60).lines()
    folder = tmp_path / "bucket" / "prod"
    new_traces().write(folder)
    (folder / "traces.json").unlink()
    for number in range(3):
        (folder / f"traces-{number}.json").write_text("".join(f"{line}\n" for line in lines[number::3]))
    return Bucket(str(tmp_path / "bucket"))


@pytest.fixture
def read(tmp_path, bucket):
    """Return a function that ingests a URL of the bucket."""

    def one(url="s3://bucket/prod", out="tables", *, workers=1, options=None):
        opened = PyFileSystem(bucket), bucket.root
        with open_inputs([url], filesystem_of=lambda _: opened) as inputs:
            return ingest_inputs(
                inputs,
                tmp_path / out,
                ServerOptions(),
                NullProgress(),
                options=options or IngestOptions(),
                engine=LocalEngine(workers),
            )

    return one


def _traces(counter):
    return {name: count for name, count in counter.items() if name.startswith("traces")}


def _sizes(bucket):
    return {path.name: path.stat().st_size for path in Path(bucket.root, "prod").glob("traces*")}


def _tables(root):
    own = ("source_file",)
    return {name: TableStore(root).read(name).drop(own, strict=False) for name in INGEST_TABLES}


def _same(one, other):
    return all(rows.equals(other[name]) for name, rows in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_byte_is_read_once_and_gives_the_tables_of_local_files(
    tmp_path, bucket, read, small_pieces, workers
):
    read(workers=workers, options=small_pieces)
    assert _traces(bucket.opened) == dict.fromkeys(_sizes(bucket), 1)
    assert _traces(bucket.served) == _sizes(bucket)
    spans = TableStore(tmp_path / "tables").read("spans")
    assert set(spans["source_file"]) == {f"s3://bucket/prod/traces-{n}.json" for n in range(3)}
    ingest([Path(bucket.root, "prod")], tmp_path / "local", workers=1)
    assert _same(_tables(tmp_path / "tables"), _tables(tmp_path / "local"))
    remote, local = (TableStore(tmp_path / out).manifest().runs["prod"].files for out in ("tables", "local"))
    assert [file.sha256 for file in remote] == [file.sha256 for file in local]
    assert not list((tmp_path / "tables").glob(".writing-*"))


def test_files_named_one_by_one_are_read_once_too(bucket, read):
    read("s3://bucket/prod/traces-*.json")
    assert _traces(bucket.served) == _sizes(bucket)


def test_what_is_as_it_was_is_not_read(tmp_path, bucket, read, decoded):
    first = read()
    bucket.opened.clear()
    assert len(decoded(tmp_path / "tables")) == 3
    assert read() == first
    assert _traces(bucket.opened) == {}
    assert decoded(tmp_path / "tables") == []


@pytest.mark.slow
def test_what_was_written_anew_is_read_and_decoded_if_it_is_another(tmp_path, bucket, read, decoded):
    read()
    bucket.opened.clear()
    decoded(tmp_path / "tables")
    folder = Path(bucket.root, "prod")
    os.utime(folder / "traces-0.json", ns=(1, 1))
    with (folder / "traces-1.json").open("a") as file:
        file.write("{}\n")
    result = read()
    assert _traces(bucket.opened) == {"traces-0.json": 1, "traces-1.json": 1}
    assert decoded(tmp_path / "tables") == ["traces-1.json"]
    assert [run.run_id for run in result.runs] == ["prod"]
    bucket.opened.clear()
    read()
    assert _traces(bucket.opened) == {}


def test_a_file_that_is_gone_costs_no_reading(tmp_path, bucket, read, decoded):
    read()
    bucket.opened.clear()
    decoded(tmp_path / "tables")
    Path(bucket.root, "prod", "traces-2.json").unlink()
    assert [run.run_id for run in read().runs] == ["prod"]
    assert _traces(bucket.opened) == {}
    assert decoded(tmp_path / "tables") == []


@pytest.mark.parametrize(("fetched_bytes", "most"), [(1, 1), (1 << 30, 3)])
def test_copies_are_on_disk_a_few_at_a_time(tmp_path, bucket, read, fetched_bytes, most):
    copies = []
    bucket.on_read = lambda: copies.append(
        sum(path.stat().st_size > 0 for path in (tmp_path / "tables").glob(".writing-*/*") if path.is_file())
    )
    read(options=IngestOptions(fetched_bytes=fetched_bytes))
    assert max(copies) <= most
    assert (max(copies) > 1) == (most > 1)


@pytest.mark.parametrize("lines", [1, 2000])
def test_other_signals_are_refused_in_one_line(tmp_path, bucket, read, small_pieces, lines):
    Path(bucket.root, "prod", "traces-1.json").write_text('{"resourceMetrics": []}\n' * lines)
    with pytest.raises(DataError, match=r"^s3://bucket/prod/traces-1.json: holds OTLP metrics, not traces"):
        read("s3://bucket/prod/traces-1.json", options=small_pieces)
    assert TableStore(tmp_path / "tables").runs() == []


def test_a_connection_that_breaks_is_one_line_and_leaves_what_was_there(tmp_path, bucket, read):
    bucket.breaks_after = 1000
    with pytest.raises(UsageError, match=r"^s3://bucket/prod/traces-\d.json: cannot be read beyond byte"):
        read()
    assert list((tmp_path / "tables").iterdir()) == []
    bucket.breaks_after = None
    bucket.served.clear()
    read()
    assert TableStore(tmp_path / "tables").read("requests").height == 60
