"""Ingesting again reads what is new and gives what reading everything at once gives."""

from __future__ import annotations

import io
import json
import os
import random
import shutil

import pytest

from containers import framed, to_protobuf, zstd
from tracefit import ingest
from tracefit.commands import scheduler
from tracefit.commands.ingest import plan_ingest
from tracefit.options import IngestOptions
from tracefit.tables import store
from tracefit.tables.store import TableStore


@pytest.fixture
def lines(new_traces):
    """Return the lines of a busy run, and of one span that is there twice."""
    trace = new_traces().load(steps=240, requests=60)
    return [*trace.lines(), trace.lines()[3]]


def _write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path.parent


def _parts(tables):
    """Return how many parts the only file of the tables was decoded in."""
    (run,) = TableStore(tables).manifest().runs.values()
    return sum(len(file.parts) for file in run.files)


@pytest.fixture
def fresh(tmp_path, lines, contents):
    """Return the tables of all lines, read at once."""
    ingest([_write(tmp_path / "fresh" / "run" / "traces.json", lines)], tmp_path / "fresh" / "tables")
    return contents(tmp_path / "fresh" / "tables")


@pytest.mark.slow
def test_what_is_known_is_not_read_again(tmp_path, lines, decoded):
    folder = _write(tmp_path / "run" / "traces.json", lines)
    first = ingest([folder], tmp_path / "tables")
    before = {p: p.stat().st_ino for p in (tmp_path / "tables").rglob("*")}
    assert decoded(tmp_path / "tables") == ["traces.json"]
    assert ingest([folder], tmp_path / "tables") == first
    assert decoded(tmp_path / "tables") == []
    assert {p: p.stat().st_ino for p in (tmp_path / "tables").rglob("*")} == before


def test_only_a_new_file_is_read(tmp_path, lines, fresh, contents, decoded):
    folder = _write(tmp_path / "run" / "traces-1.json", lines[:40])
    ingest([folder], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == ["traces-1.json"]
    _write(folder / "traces-2.json", lines[40:])
    result = ingest([folder], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == ["traces-2.json"]
    assert [(r.run_id, r.duplicate_spans) for r in result.runs] == [("run", 1)]
    assert contents(tmp_path / "tables") == fresh


@pytest.fixture
def fleet(tmp_path, lines, monkeypatch):
    """Return the folder of two ingested runs, whose files count as old, and the runs that another ingest reads
    again."""
    monkeypatch.setattr("tracefit.inputs.files._TICK_NS", -(10**18))
    for name, some in (("a", lines[:40]), ("b", lines[40:80])):
        _write(tmp_path / "runs" / name / "traces.json", some)
    ingest([tmp_path / "runs"], tmp_path / "tables")
    return tmp_path / "runs"


def _altered(path):
    """Change a byte of a file, and set its time back."""
    before, content = path.stat(), bytearray(path.read_bytes())
    at = content.index(b"1")
    content[at : at + 1] = b"2"
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.slow
def test_rewritten_file_of_equal_size_and_date_is_read_again(fleet, tmp_path, decoded):
    decoded(tmp_path / "tables")
    _altered(fleet / "b" / "traces.json")
    ingest([fleet], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == ["traces.json"]


@pytest.mark.slow
def test_changed_table_is_built_again(fleet, tmp_path, contents):
    before = contents(tmp_path / "tables")
    _altered(next((tmp_path / "tables" / "steps" / "run_id=b").glob("*.parquet")))
    assert ingest([fleet], tmp_path / "tables").warnings == (
        "b: its tables are damaged, or files of them missing; it is read again",
    )
    assert contents(tmp_path / "tables") == before


@pytest.mark.slow
def test_of_runs_that_stay_neither_traces_nor_tables_are_read(fleet, tmp_path, lines, monkeypatch):
    _write(fleet / "b" / "traces-2.json", lines[80:])
    looked_at, digest_of = [], store.digest_of
    monkeypatch.setattr(store, "digest_of", lambda path: looked_at.append(str(path)) or digest_of(path))
    monkeypatch.setattr(scheduler, "content_hash_of", lambda file: looked_at.append(file.name) or "")
    ingest([fleet], tmp_path / "tables")
    assert [path for path in looked_at if "run_id=a" in path or "/a/" in path] == []


@pytest.mark.slow
def test_touched_file_is_hashed_once(fleet, tmp_path, monkeypatch):
    hashed, hash_of = [], scheduler.content_hash_of
    monkeypatch.setattr(scheduler, "content_hash_of", lambda file: hashed.append(file.name) or hash_of(file))
    (fleet / "b" / "traces.json").touch()
    for _ in range(2):
        ingest([fleet], tmp_path / "tables")
    assert hashed == [str(fleet / "b" / "traces.json")]


@pytest.mark.slow
def test_copied_tables_are_compared_once_and_noted(fleet, tmp_path, lines):
    shutil.copytree(tmp_path / "tables", tmp_path / "copied")
    _write(fleet / "b" / "traces-2.json", lines[80:])
    ingest([fleet], tmp_path / "copied")
    place = TableStore(tmp_path / "copied")
    run = place.manifest().runs["a"]
    assert run.stamp == place.storage.stamp(f"{t}/run_id=a/{p.name}" for t, p in run.tables.items())[0]
    assert run.stamp != TableStore(tmp_path / "tables").manifest().runs["a"].stamp


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 30])
def test_a_file_that_grew_is_decoded_again(tmp_path, lines, fresh, contents, decoded, small_pieces, cut):
    """The last line may have been cut when it was read first: what was a reject is whole now."""
    folder = _write(tmp_path / "run" / "traces.json", lines[:50])
    whole = (folder / "traces.json").read_bytes()
    (folder / "traces.json").write_bytes(whole[: len(whole) - cut])
    first = ingest([folder], tmp_path / "tables", workers=1, options=small_pieces)
    assert first.runs[0].rejects == (1 if cut else 0)
    assert decoded(tmp_path / "tables") == ["traces.json"]
    _write(folder / "traces.json", lines)
    ingest([folder], tmp_path / "tables", workers=1, options=small_pieces)
    assert decoded(tmp_path / "tables") == ["traces.json"]
    assert contents(tmp_path / "tables") == fresh
    assert TableStore(tmp_path / "tables").runs() == ["run"]


@pytest.mark.slow
def test_a_rotated_file_belongs_to_its_run_and_has_its_new_name(tmp_path, lines, fresh, contents):
    folder = _write(tmp_path / "run" / "traces.json", lines[:40])
    ingest([folder], tmp_path / "tables")
    (folder / "traces.json").rename(folder / "traces-2026-02-14T05-02-14.173.json")
    _write(folder / "traces.json", lines[40:])
    ingest([folder], tmp_path / "tables")
    assert TableStore(tmp_path / "tables").runs() == ["run"]
    assert contents(tmp_path / "tables") == fresh
    files = set(TableStore(tmp_path / "tables").read("spans")["source_file"])
    assert files == {str(p) for p in folder.iterdir()}


@pytest.mark.slow
def test_other_files_of_the_same_name_are_another_run(tmp_path, lines):
    ingest([_write(tmp_path / "a" / "run" / "traces.json", lines[:40])], tmp_path / "tables")
    result = ingest([_write(tmp_path / "b" / "run" / "traces.json", lines[1:])], tmp_path / "tables")
    assert [r.run_id for r in result.runs] == ["run-2"]
    assert "run-2" in result.warnings[0]


@pytest.fixture
def days(tmp_path, lines):
    """Return two folders that have a run of the same name each, with other spans."""
    folders = tmp_path / "day1", tmp_path / "day2"
    for folder, some in zip(folders, (lines[:40], lines[40:]), strict=True):
        _write(folder / "run" / "traces.json", some)
    return folders


@pytest.fixture
def ingested(tmp_path, monkeypatch):
    """Return a function that ingests paths in a working folder; it returns the ids of the runs read and of those
    stored."""

    def read(folder, *paths):
        monkeypatch.chdir(folder)
        result = ingest(paths, tmp_path / "tables")
        return [run.run_id for run in result.runs], TableStore(tmp_path / "tables").runs(), result.warnings

    return read


@pytest.mark.slow
@pytest.mark.parametrize(("path", "run_id"), [("run", "run"), ("run/traces.json", "traces"), ("run/*.json", "traces")])
def test_a_relative_name_in_two_working_folders_is_two_runs(days, ingested, path, run_id):
    ingested(days[0], path)
    read, stored, warnings = ingested(days[1], path)
    assert (read, stored) == ([f"{run_id}-2"], [run_id, f"{run_id}-2"])
    assert warnings == (f"{run_id}: another run of that name is in the tables already; this one is {run_id}-2",)
    assert ingested(days[0], path)[:2] == ([run_id], stored)
    assert ingested(days[1], path)[:2] == ([f"{run_id}-2"], stored)


@pytest.mark.slow
def test_a_run_is_the_same_by_any_name_of_its_folder(tmp_path, days, ingested, decoded):
    """From another working folder, and through links to the folder, a folder above it and the file."""
    (tmp_path / "to-run").symlink_to(days[0] / "run")
    (tmp_path / "to-day").symlink_to(days[0])
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "other").symlink_to(days[0] / "run")
    ingested(days[0], "run")
    before = decoded(tmp_path / "tables")
    for path in ("day1/run", "day1/../day1/run/", "to-run", "to-day/run", "links", "links/other", "day1"):
        assert ingested(tmp_path, path)[:2] == (["run"], ["run"]), path
    assert (before, decoded(tmp_path / "tables")) == (["traces.json"], [])


@pytest.mark.slow
def test_a_loose_file_is_the_same_through_a_link(tmp_path, days, ingested):
    (tmp_path / "latest.json").symlink_to("day1/run/traces.json")
    ingested(tmp_path, "day1/run/traces.json")
    read, stored, warnings = ingested(tmp_path, "latest.json")
    assert (read, stored) == (["traces"], ["traces"])
    assert warnings == ("latest: is in the tables already, as traces",)
    # The link and one more file.
    shutil.copy(days[1] / "run" / "traces.json", tmp_path / "more.json")
    assert ingested(tmp_path, "more.json", "latest.json")[:2] == (["traces"], ["traces"])


@pytest.mark.slow
def test_one_file_of_a_run_does_not_replace_it(days, lines, ingested):
    """Named alone beside its configuration, it is another run, as loose files are; named with its folder, it is read
    once."""
    _write(days[0] / "run" / "traces-2.json", lines[40:])
    (days[0] / "run" / "exp-config.yaml").write_text("model: m\n")
    assert ingested(days[0], "run", "run/traces-2.json")[:2] == (["run"], ["run"])
    assert ingested(days[0], "run/traces-2.json")[:2] == (["run-2"], ["run", "run-2"])


@pytest.mark.slow
def test_two_new_runs_never_get_one_id(tmp_path, days, lines, ingested):
    """The first is numbered, because its name is taken; the number is the name of the second."""
    _write(days[1] / "run-2" / "traces.json", lines[:50])
    ingested(tmp_path, "day1/run")
    read, stored, _ = ingested(tmp_path, "day2/run", "day2/run-2")
    assert len(set(read)) == 2
    assert len(stored) == 3
    assert ingested(tmp_path, "day2/run", "day2/run-2")[:2] == (read, stored)


@pytest.mark.slow
def test_piped_runs_are_compared_by_content(tmp_path, days, monkeypatch):
    def piped(path):
        data = path.read_bytes()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return [run.run_id for run in ingest("-", tmp_path / "tables").runs]

    first, second = (day / "run" / "traces.json" for day in days)
    assert [piped(first), piped(second)] == [["stdin"], ["stdin-2"]]
    with first.open("ab") as file:
        file.write(second.read_bytes().splitlines(keepends=True)[0])
    assert [piped(first), piped(second)] == [["stdin"], ["stdin-2"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["run", "run/traces.json"])
def test_a_run_stored_under_a_relative_name_is_known_by_its_content(tmp_path, days, lines, ingested, path):
    """An earlier version stored the names as they were typed."""
    (run_id,), *_ = ingested(days[0], path)
    manifest = tmp_path / "tables" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f"{days[0]}/run/traces.json", path))
    _write(days[0] / "run" / "traces.json", lines[:50])
    assert ingested(days[0], path)[:2] == ([run_id], [run_id])
    manifest.write_text(manifest.read_text().replace(f"{days[0]}/run/traces.json", path))
    assert ingested(days[1], path)[:2] == ([f"{run_id}-2"], [run_id, f"{run_id}-2"])
    assert ingested(tmp_path, f"day1/{path}")[:2] == ([run_id], [run_id, f"{run_id}-2"])


@pytest.mark.slow
def test_training_frames_of_a_run_that_grew_are_gone(tmp_path, lines):
    """They are of the run as it was; `train` makes them again."""
    folder = _write(tmp_path / "run" / "traces.json", lines[:-20])
    ingest([folder], tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    old = store.read("timeline")
    _write(folder / "traces.json", lines)
    ingest([folder], tmp_path / "tables")
    assert len(list((store.root / "timeline").rglob("*.parquet"))) == 1
    assert store.read("timeline").height >= old.height


@pytest.mark.slow
def test_the_order_and_cut_of_files_does_not_matter(tmp_path, lines, fresh, contents, small_pieces):
    shuffled = random.Random(5).sample(lines, len(lines))
    for number in range(3):
        folder = _write(tmp_path / "run" / f"traces-{number}.json", shuffled[number::3])
    ingest([folder], tmp_path / "tables", options=small_pieces)
    assert contents(tmp_path / "tables") == fresh


@pytest.mark.slow
def test_framed_protobuf_is_cut_too(tmp_path, new_traces, lines, fresh, contents, small_pieces):
    trace = new_traces().load(steps=240, requests=60)
    trace.records.append(trace.records[3])
    (tmp_path / "run").mkdir()
    frames = (to_protobuf({"resourceSpans": [record]}) for record in trace.records)
    (tmp_path / "run" / "traces.binpb").write_bytes(framed(frames))
    ingest([tmp_path / "run"], tmp_path / "tables", workers=1, options=small_pieces)
    assert _parts(tmp_path / "tables") > 2
    assert contents(tmp_path / "tables") == fresh


@pytest.mark.slow
def test_framed_zstd_is_cut_too(tmp_path, lines, fresh, contents, small_pieces):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traces.json").write_bytes(framed(zstd(line.encode()) for line in lines))
    ingest([tmp_path / "run"], tmp_path / "tables", workers=1, options=small_pieces)
    assert _parts(tmp_path / "tables") > 4
    assert contents(tmp_path / "tables") == fresh


@pytest.mark.slow
def test_the_environment_is_as_it_was_after_workers_ran(tmp_path, lines):
    before = dict(os.environ)
    ingest(
        [_write(tmp_path / "run" / "traces.json", lines)],
        tmp_path / "tables",
        workers=2,
        options=IngestOptions(bytes_per_worker=1),
    )
    assert dict(os.environ) == before


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_read_and_writes_nothing(tmp_path, lines, files_in):
    folder = _write(tmp_path / "run" / "traces-1.json", lines[:40])
    _write(folder / "traces-2.json", lines[40:50])
    plan = plan_ingest([folder], tmp_path / "tables")
    assert not (tmp_path / "tables").exists()
    assert [(f.status, f.shape, f.bytes_to_read == f.bytes) for f in plan.files] == [
        ("new", "OTLP JSON lines", True)
    ] * 2
    ingest([folder], tmp_path / "tables")
    before = files_in(tmp_path / "tables")
    _write(folder / "traces-2.json", lines[40:])
    plan = plan_ingest([folder], tmp_path / "tables")
    assert [f.status for f in plan.files] == ["known", "grown"]
    assert [f.bytes_to_read for f in plan.files] == [0, (folder / "traces-2.json").stat().st_size]
    assert files_in(tmp_path / "tables") == before


@pytest.mark.slow
def test_the_manifest_says_what_was_read(tmp_path, lines):
    folder = _write(tmp_path / "run" / "traces.json", [*lines, '{"resourceSpans": [{'])
    ingest([folder], tmp_path / "tables")
    file = json.loads((tmp_path / "tables" / "manifest.json").read_text())["runs"]["run"]["files"][0]
    assert file["path"] == str(folder / "traces.json")
    assert file["size_bytes"] == (folder / "traces.json").stat().st_size
    assert [(p["spans"], p["rejects"]) for p in file["parts"]] == [(len(lines), 1)]
    assert file["tool_version"]
