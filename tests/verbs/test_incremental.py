"""Ingesting again reads what is new and gives what reading everything at once gives."""

from __future__ import annotations

import json
import random
import time

import pyarrow as pa
import pytest

from tracefit import ingest
from tracefit.tables.store import TableStore
from tracefit.verbs.decoding import decode
from tracefit.verbs.plan import plan_ingest
from tracefit.verbs.workers import _ask


@pytest.fixture
def lines(new_traces):
    """Return the lines of a busy run, and of one span that is there twice."""
    trace = new_traces().load(steps=240, requests=60)
    return [*trace.lines(), trace.lines()[3]]


def _write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path.parent


@pytest.fixture
def fresh(tmp_path, lines, contents):
    """Return the tables of all lines, read at once."""
    ingest([_write(tmp_path / "fresh" / "run" / "traces.json", lines)], tmp_path / "fresh" / "tables")
    return contents(tmp_path / "fresh" / "tables")


def test_what_is_known_is_not_read_again(tmp_path, lines, decoded):
    folder = _write(tmp_path / "run" / "traces.json", lines)
    first = ingest([folder], tmp_path / "tables")
    before = {p: p.stat().st_ino for p in (tmp_path / "tables").rglob("*")}
    decoded.clear()
    assert ingest([folder], tmp_path / "tables") == first
    assert decoded == []
    assert {p: p.stat().st_ino for p in (tmp_path / "tables").rglob("*")} == before


def test_only_a_new_file_is_read(tmp_path, lines, fresh, contents, decoded):
    folder = _write(tmp_path / "run" / "traces-1.json", lines[:40])
    ingest([folder], tmp_path / "tables")
    _write(folder / "traces-2.json", lines[40:])
    decoded.clear()
    result = ingest([folder], tmp_path / "tables")
    assert decoded == [("traces-2.json", 0)]
    assert [(r.run_id, r.duplicate_spans) for r in result.runs] == [("run", 1)]
    assert contents(tmp_path / "tables") == fresh


@pytest.mark.parametrize("cut", [0, 30])
def test_of_a_grown_file_only_the_last_stretch_is_read_again(
    tmp_path, lines, fresh, contents, decoded, small_pieces, cut
):
    """The last line may have been cut when it was read first: what was a reject is whole now."""
    folder = _write(tmp_path / "run" / "traces.json", lines[:50])
    whole = (folder / "traces.json").read_bytes()
    (folder / "traces.json").write_bytes(whole[: len(whole) - cut])
    first = ingest([folder], tmp_path / "tables")
    assert first.runs[0].rejects == (1 if cut else 0)
    begins = [begin for _, begin in decoded]
    assert len(begins) > 2
    _write(folder / "traces.json", lines)
    decoded.clear()
    ingest([folder], tmp_path / "tables")
    assert decoded[0] == ("traces.json", begins[-1])
    assert contents(tmp_path / "tables") == fresh
    assert TableStore(tmp_path / "tables").runs() == ["run"]


def test_a_rotated_file_is_known_by_its_contents(tmp_path, lines, fresh, contents, decoded):
    folder = _write(tmp_path / "run" / "traces.json", lines[:40])
    ingest([folder], tmp_path / "tables")
    (folder / "traces.json").rename(folder / "traces-2026-02-14T05-02-14.173.json")
    _write(folder / "traces.json", lines[40:])
    decoded.clear()
    ingest([folder], tmp_path / "tables")
    assert decoded == [("traces.json", 0)]
    assert contents(tmp_path / "tables") == fresh
    files = set(TableStore(tmp_path / "tables").read("spans")["source_file"])
    assert files == {str(p) for p in folder.iterdir()}


def test_a_changed_beginning_is_another_run(tmp_path, lines):
    folder = _write(tmp_path / "run" / "traces.json", lines[:40])
    ingest([folder], tmp_path / "tables")
    _write(folder / "traces.json", lines[1:])
    result = ingest([folder], tmp_path / "tables")
    assert [r.run_id for r in result.runs] == ["run-2"]
    assert "run-2" in result.warnings[0]


def test_training_frames_of_a_run_that_grew_are_gone(tmp_path, lines):
    """They are of what the run was; `train` makes them anew."""
    folder = _write(tmp_path / "run" / "traces.json", lines[:-20])
    ingest([folder], tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    old = store.read("timeline")
    _write(folder / "traces.json", lines)
    ingest([folder], tmp_path / "tables")
    assert len(list((store.root / "timeline").rglob("*.parquet"))) == 1
    assert store.read("timeline").height >= old.height


def test_the_order_and_cut_of_files_does_not_matter(tmp_path, lines, fresh, contents, small_pieces):
    shuffled = random.Random(5).sample(lines, len(lines))
    for number in range(3):
        folder = _write(tmp_path / "run" / f"traces-{number}.json", shuffled[number::3])
    ingest([folder], tmp_path / "tables")
    assert contents(tmp_path / "tables") == fresh


def test_framed_protobuf_is_cut_too(tmp_path, new_traces, lines, fresh, contents, decoded, small_pieces):
    trace = new_traces().load(steps=240, requests=60)
    trace.records.append(trace.records[3])
    frames = []
    for record in trace.records:
        one = new_traces()
        one.records = [record]
        frames.append(len(one.protobuf()).to_bytes(4, "big") + one.protobuf())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traces.binpb").write_bytes(b"".join(frames))
    ingest([tmp_path / "run"], tmp_path / "tables")
    assert len(decoded) > 2
    assert contents(tmp_path / "tables") == fresh


def test_framed_zstd_is_cut_too_and_read_on_where_it_ended(
    tmp_path, lines, fresh, contents, decoded, small_pieces
):
    packed = [pa.compress(line.encode(), "zstd", asbytes=True) for line in lines]
    framed = [len(frame).to_bytes(4, "big") + frame for frame in packed]
    file = tmp_path / "run" / "traces.json"
    file.parent.mkdir()
    begins = []
    for most in (len(lines) * 3 // 4, len(lines)):
        file.write_bytes(b"".join(framed[:most]))
        ingest([file.parent], tmp_path / "tables")
        begins.append([begin for _, begin in decoded])
        decoded.clear()
    assert len(begins[0]) > 5
    assert min(begins[1]) == max(begins[0])  # the last stretch ended with the file: it is read again
    assert contents(tmp_path / "tables") == fresh


def test_the_number_of_workers_does_not_matter(tmp_path, lines, fresh, contents, small_pieces, monkeypatch):
    monkeypatch.setattr("tracefit.verbs.workers.BYTES_PER_WORKER", 1)
    # This process is slow, so that the other one gets to do something.
    monkeypatch.setattr(
        "tracefit.verbs.workers.decode", lambda task, **how: (time.sleep(4), decode(task, **how))[1]
    )
    asked = []
    monkeypatch.setattr("tracefit.verbs.workers._ask", lambda *who: (asked.append(who), _ask(*who))[1])
    ingest([_write(tmp_path / "run" / "traces.json", lines)], tmp_path / "tables", workers=2)
    assert asked
    assert contents(tmp_path / "tables") == fresh


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
    assert [f.status for f in plan.files] == ["known", "new"]
    assert [f.bytes_to_read for f in plan.files] == [0, (folder / "traces-2.json").stat().st_size]
    assert files_in(tmp_path / "tables") == before


def test_the_manifest_says_what_was_read(tmp_path, lines):
    folder = _write(tmp_path / "run" / "traces.json", [*lines, '{"resourceSpans": [{'])
    ingest([folder], tmp_path / "tables")
    file = json.loads((tmp_path / "tables" / "manifest.json").read_text())["runs"]["run"]["files"][0]
    assert file["path"] == str(folder / "traces.json")
    assert file["size_bytes"] == (folder / "traces.json").stat().st_size
    assert [(p["spans"], p["rejects"]) for p in file["parts"]] == [(len(lines), 1)]
    assert file["tool_version"]
