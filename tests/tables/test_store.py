"""Tables on disk: run ids, replacement, and the published shape of every part."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import jsonschema
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracefit.commands.ingest import ingest
from tracefit.commands.train import train
from tracefit.errors import DataError, UsageError
from tracefit.options import ServerOptions
from tracefit.tables.schema import INGEST_TABLES, TABLES
from tracefit.tables.store import ROW_GROUP_ROWS, TableStore

SCHEMAS = Path(__file__).parents[2] / "schemas" / "tables"
ARROW = {
    "string": pa.string(),
    "json": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "map": pa.map_(pa.string(), pa.string()),
}


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("name", "run_id"), [("my run (2)", "my-run-2"), ("...", "run"), ("a/../b", "b"), ("é", "run")]
)
def test_a_run_is_named_after_its_folder(tmp_path, traces, name, run_id):
    folder = traces.request(1, 0, step=1).write(tmp_path / "x" / name)
    result = ingest([folder], tmp_path / "tables")
    assert [r.run_id for r in result.runs] == [run_id]
    assert TableStore(tmp_path / "tables").runs() == [run_id]


def test_loose_files_are_one_run_under_their_common_stem(tmp_path, new_traces):
    files = []
    for number in (1, 2):
        name = f"traces-day-{number}.json"
        folder = new_traces().request(1 + number, 0, step=1).write(tmp_path, name=name, config=False)
        files.append(folder / name)
    result = ingest(files, tmp_path / "tables")
    assert [(r.run_id, r.files, r.requests) for r in result.runs] == [("traces-day", 2, 2)]


@pytest.mark.slow
def test_the_same_contents_replace_the_run(tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    for gpu in ("A100", "H100"):
        result = ingest([folder], tmp_path / "tables", server=ServerOptions(gpu=gpu))
    assert result.warnings == ()
    assert [len(list((tmp_path / "tables" / name).rglob("*.parquet"))) for name in INGEST_TABLES] == [1] * len(
        INGEST_TABLES
    )
    assert "H100" in TableStore(tmp_path / "tables").read("runs")["gpu"].item()


def test_only_the_wanted_columns_are_read(tmp_path, traces):
    ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    wanted = ["request_id", "server", "no_such_column"]
    assert store.read("requests", columns=wanted).equals(store.read("requests").select("server", "request_id"))
    assert store.read("requests", [], wanted).columns == ["server", "request_id"]


@pytest.fixture
def many_runs(tmp_path, new_traces):
    """A store of more small runs than are read one by one."""
    runs = [new_traces().request(n, 0, step=1).write(tmp_path / f"run-{n:02}") for n in range(1, 21)]
    ingest(runs, tmp_path / "tables")
    return TableStore(tmp_path / "tables")


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("name", ["requests", "spans"])
def test_many_small_runs_are_the_rows_of_each(many_runs, name):
    alone = [many_runs.read(name, [run_id]) for run_id in many_runs.runs()]
    assert many_runs.read(name).equals(pl.concat(alone))


def test_training_frames_of_many_runs_keep_their_features(tmp_path):
    # Features are columns that the schema does not name.
    frames = (pl.DataFrame({"ts_ns": [n], "feature": [n / 2]}) for n in range(20))
    conform = TABLES["beta_training"].conform
    store = TableStore(tmp_path)
    store.write_runs([(f"run-{n:02}", {"beta_training": conform(frame)}) for n, frame in enumerate(frames)])
    assert store.read("beta_training", columns=["ts_ns", "feature"]).rows() == [(n, n / 2) for n in range(20)]


@pytest.mark.slow
def test_of_many_small_runs_a_damaged_one_is_named(many_runs):
    part = sorted((many_runs.root / "steps").rglob("*.parquet"))[7]
    part.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=rf"run_id=run-08.*{part.name}.*is not what was written"):
        many_runs.read("steps")


def test_the_order_of_a_runs_files_does_not_matter(tmp_path, new_traces):
    for number in (1, 2):
        new_traces().request(1 + number, 0, step=1).write(tmp_path, name=f"traces-{number}.json", config=False)
    files = sorted(tmp_path.glob("traces-*.json"))
    for order in (files, files[::-1]):
        ingest(order, tmp_path / "tables")
    assert TableStore(tmp_path / "tables").runs() == ["traces"]


@pytest.fixture
def same_name_runs(tmp_path, new_traces):
    """Return two run folders of one name and different contents."""
    return [new_traces().request(n, 0, step=1).write(tmp_path / f"day{n}" / "run") for n in (1, 2)]


@pytest.mark.slow
def test_other_run_of_the_same_name_gets_a_number(tmp_path, same_name_runs):
    results = [ingest([folder], tmp_path / "tables") for folder in same_name_runs]
    assert [r.runs[0].run_id for r in results] == ["run", "run-2"]
    assert results[0].warnings == ()
    assert "run-2" in results[1].warnings[0]
    assert TableStore(tmp_path / "tables").read("requests")["request_id"].to_list() == ["cmpl-1", "cmpl-2"]


@pytest.mark.slow
def test_runs_of_one_name_in_one_call_get_numbers(tmp_path, same_name_runs):
    result = ingest(same_name_runs, tmp_path / "tables")
    assert [r.run_id for r in result.runs] == ["run", "run-2"]
    assert "run-2" in result.warnings[0]


@pytest.mark.slow
def test_ingesting_again_in_another_order_changes_nothing(tmp_path, same_name_runs):
    ingest(same_name_runs, tmp_path / "tables")
    again = ingest(same_name_runs[::-1], tmp_path / "tables")
    assert TableStore(tmp_path / "tables").runs() == ["run", "run-2"]
    assert [r.run_id for r in again.runs] == ["run-2", "run"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory, trained, new_traces):
    """Return table name to a Parquet part with rows in it."""
    root = tmp_path_factory.mktemp("parts")
    trace = new_traces().request(1, 0, step=1)
    trace.steps(trace.summary(1, 1100), trace.snapshot(1, 1300, "cmpl-1-0-00000000"))
    folder = trace.write(root / "busy")
    with (folder / "traces.json").open("a") as stream:
        stream.write('{"resourceSpans": [{"sc\n')
    (folder / "kv_events.jsonl").write_text('[1700000002.5,[["AllBlocksCleared"],["BlockRemoved",[7]]],0,1]\n')
    (folder / "points.csv").write_text("concurrency,ttft_ms\n1,20\n")
    ingest([folder], root / "tables")
    few = ("request_snapshots", "rejects", "kv_events", "points")
    many = {p.parts[-3]: p for p in (trained / "tables").rglob("*.parquet") if p.parts[-3] not in few}
    return many | {name: next((root / "tables" / name).rglob("*.parquet")) for name in few}


def _published(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text())


NAMES = sorted(path.stem for path in SCHEMAS.glob("*.json"))


def test_every_published_table_is_written(parts):
    assert sorted(parts) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_columns_and_types_are_the_published_ones(parts, name):
    published = _published(name)
    schema = pq.read_schema(parts[name])
    # A dictionary, as pyarrow reads the run_id= of the folder.
    kinds = {name: ARROW[c["column_type"]] for name, c in published["properties"].items()}
    expected = [*(kinds | {"run_id": pa.dictionary(pa.int32(), pa.string())}).items()]
    fields = [(f.name, f.type) for f in schema]
    assert fields[: len(expected)] == expected
    further = {kind for _, kind in fields[len(expected) :]}
    assert further == ({pa.float64()} if published["further_columns"] else set())


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("name", ["requests", "spans"])
def test_the_folder_of_a_table_is_read_without_options(tmp_path, new_traces, name):
    """By pyarrow, which pandas calls, and by polars: all runs, and `run_id` once although folders are named after
    it."""
    for number in (1, 2):
        folder = new_traces().request(1 + number, 0, step=1).write(tmp_path / f"day-{number}")
        ingest([folder], tmp_path / "tables")
    columns = [c.name for c in TABLES[name].columns]
    for read in (pq.read_table(tmp_path / "tables" / name), pl.read_parquet(tmp_path / "tables" / name)):
        assert pl.DataFrame(read).columns == columns
        assert set(pl.DataFrame(read)["run_id"].cast(pl.String)) == {"day-1", "day-2"}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_valid_by_the_json_schema_of_its_table(parts, name):
    published = _published(name)
    jsonschema.Draft202012Validator.check_schema(published)
    validator = jsonschema.Draft202012Validator(published)
    assert (published["$schema"], published["version"]) == ("https://json-schema.org/draft/2020-12/schema", 1)
    for row in pq.read_table(parts[name]).slice(0, 10).to_pylist():
        plain = {k: dict(v) if isinstance(v, list) else v for k, v in row.items()}
        validator.validate(plain)
        assert not validator.is_valid(plain | {"surprise": "x"})


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_sorted_by_the_published_key(parts, name):
    key = _published(name)["sorted_by"]
    rows = pq.read_table(parts[name], columns=key).to_pylist()
    assert rows, "a test of no rows tests nothing"
    values = [tuple((row[k] is None, row[k] if row[k] is not None else 0) for k in key) for row in rows]
    assert values == sorted(values)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_zstd_and_named_after_their_content(parts, name):
    file = pq.ParquetFile(parts[name])
    group = file.metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}
    assert file.metadata.num_row_groups == 1
    assert parts[name].parent.name == "run_id=busy"
    assert parts[name].match("part-" + 16 * "[0-9a-f]" + ".parquet")


def test_a_row_group_holds_128_ki_rows(tmp_path):
    frame = pl.DataFrame({"run_id": ["r"] * (ROW_GROUP_ROWS + 1), "length": 1})
    TableStore(tmp_path).write_runs([("r", {"rejects": TABLES["rejects"].conform(frame)})])
    metadata = pq.ParquetFile(next(tmp_path.rglob("part-*.parquet"))).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [131_072, 1]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("runs", [1, 3])
def test_disk_has_all_parts_before_the_manifest(tmp_path, new_traces, monkeypatch, runs):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    for number in range(runs):
        new_traces().request(1 + number, 0, step=1).write(tmp_path / f"run-{number}")
    ingest([tmp_path / f"run-{number}" for number in range(runs)], tmp_path / "tables")
    parts = {part.stat().st_ino for part in (tmp_path / "tables").rglob("part-*.parquet")}
    manifest = (tmp_path / "tables" / "manifest.json").stat().st_ino
    assert len(parts) == runs * len(INGEST_TABLES)
    assert parts <= set(synced[: synced.index(manifest)])


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("runs", [1, 3])
def test_part_that_the_disk_refuses_is_one_line(tmp_path, new_traces, monkeypatch, runs):
    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".parquet":
            raise OSError(errno.EIO, "Input/output error")

    folders = [new_traces().request(1 + number, 0, step=1).write(tmp_path / f"run-{number}") for number in range(runs)]
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UsageError, match=r"tables: cannot be written \(Input/output error\)"):
        ingest(folders, tmp_path / "tables")
    assert not (tmp_path / "tables" / "manifest.json").exists()


def test_a_failed_write_leaves_the_run_as_it_was(tmp_path, traces):
    store = TableStore(tmp_path / "tables")
    ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], store.root)
    before = sorted(store.root.rglob("*"))
    with pytest.raises(pl.exceptions.PolarsError):
        store.write_runs([("run", {"spans": store.read("spans").clear(), "steps": _unwritable()})])
    assert sorted(store.root.rglob("*")) == before


def _unwritable():
    class Frame(pl.DataFrame):
        def to_arrow(self, *args, **kwargs):
            raise pl.exceptions.ComputeError("no")

    return Frame()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, traces):
    (tmp_path / "tables").write_text("a file")
    with pytest.raises(UsageError, match="tables: cannot be written"):
        ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], tmp_path / "tables")


def test_a_damaged_part_is_one_line(tmp_path, traces):
    ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], tmp_path / "tables")
    part = next((tmp_path / "tables" / "steps").rglob("*.parquet"))
    part.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"part-.*is not what was written; remove it and ingest the run again"):
        train(tmp_path / "tables", tmp_path / "models")
