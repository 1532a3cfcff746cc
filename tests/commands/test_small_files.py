"""Small files are decoded and kept in bundles; each is a file of its own all the same."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from containers import framed, to_json, to_protobuf
from tracefit import ingest
from tracefit.options import IngestOptions
from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.store import TableStore

FILES = 12


def _line(records):
    return to_json({"resourceSpans": records})


def _message(records):
    return to_protobuf({"resourceSpans": records})


CONTAINERS = {
    "object": lambda records: gzip.compress(_line(records), mtime=0),
    "lines": lambda records: b"".join(_line([record]) + b"\n" for record in records),
    "document": lambda records: json.dumps({"resourceSpans": records}, indent=1).encode(),
    "bare": _message,
    "framed": lambda records: framed(_message([record]) for record in records),
    "empty": lambda _: b"",
    "cut": lambda records: gzip.compress(_line(records), mtime=0)[:-40],
    "damaged": lambda records: b'{"resourceSpans": [{]\n' + _line(records) + b"\n",
    "nothing": lambda _: b"no trace at all",
}


@pytest.fixture
def records(new_traces):
    """Return the spans of a busy run in small steps, some of other programs among them."""
    trace = new_traces().load(steps=24, requests=30)
    for number in range(10):
        trace.span("fastapi", "GET /", (1 << 70, 1000 + number, 0), [trace.event("x", number, {})])
    for step in range(24, 34):
        trace.steps(trace.summary(step, 10_000_000 + 2000 * step))
    return trace.records


def _of_others(records):
    return [record for record in records if record["scopeSpans"][0]["scope"]["name"] == "fastapi"]


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file of the run in a container; it returns the run's folder."""

    def one(number, records, container="object"):
        path = tmp_path / "run" / f"hour={number // 10:02}" / f"traces_{number:09}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTAINERS[container](records))
        return tmp_path / "run"

    return one


def _every_table(root):
    return {name: TableStore(root).read(name) for name in INGEST_TABLES}


def _parts(root):
    files = [file for run in TableStore(root).manifest().runs.values() for file in run.files]
    return {Path(file.path).name: {part.name for part in file.parts} for file in files}


@pytest.fixture
def opened():
    """Return how often Python opens each file from now on, by its name."""
    counts, active = Counter(), [True]

    def hook(event, arguments):
        if active and event == "open":
            counts[Path(str(arguments[0])).name] += 1

    sys.addaudithook(hook)  # the interpreter has no way to take it away again
    yield counts
    active.clear()


@pytest.fixture
def one_by_one(tmp_path):
    """Return a function that ingests with every record in a part of its own, and returns the tables."""

    def into(folder, *, options=None, **others):
        apart = tmp_path / "apart"
        ingest([folder], apart, options=replace(options or IngestOptions(), block_bytes=1), **others)
        return _every_table(apart)

    return into


@pytest.fixture
def same(tmp_path, one_by_one):
    """Return a function that compares `tables` with those of files read one by one, and returns them."""

    def tables_of(folder, **how):
        tables, apart = _every_table(tmp_path / "tables"), one_by_one(folder, **how)
        assert [name for name, rows in tables.items() if not rows.equals(apart[name])] == []
        return tables

    return tables_of


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_bundled_files_have_the_same_tables(tmp_path, records, write, same, seed):
    """Whatever they hold and however it is packed, where it was read included; many spans are in two files."""
    chance = random.Random(seed)
    records += deepcopy(chance.sample(records, len(records) // 4) + _of_others(records))
    chance.shuffle(records)
    for number in range(FILES):
        folder = write(number, records[number::FILES], chance.choice(list(CONTAINERS)))
    options = {"options": IngestOptions(all_spans=True), "workers": 1}
    ingest([folder], tmp_path / "tables", **options)
    tables = same(folder, **options)
    assert tables["rejects"].height
    assert tables["runs"]["other_spans"][0] > 0
    assert tables["runs"]["duplicate_spans"][0] > 0
    apart_parts, parts = (set().union(*_parts(tmp_path / out).values()) for out in ("apart", "tables"))
    assert len(apart_parts) > len(parts)


@pytest.mark.slow
def test_every_file_has_counts_of_its_own(tmp_path, records, write):
    others = _of_others(records)
    vllm_records = [record for record in records if record not in others]
    write(0, vllm_records[:30])
    write(1, [*vllm_records[30:35], *others[:7]], "lines")
    write(2, others[7:9])
    folder = write(3, vllm_records[35:], "damaged")
    ingest([folder], tmp_path / "tables")
    files = TableStore(tmp_path / "tables").manifest().runs["run"].files
    counts = [[(p.spans, p.other_spans, p.rejects) for p in file.parts] for file in files]
    assert counts == [[(30, 0, 0)], [(5, 7, 0)], [(0, 2, 0)], [(len(vllm_records) - 35, 0, 1)]]
    assert len({part.name for file in files for part in file.parts}) == 1


def _in_files(write, records):
    for number in range(FILES):
        folder = write(number, records[number::FILES])
    return folder


@pytest.mark.slow
def test_only_new_files_are_decoded(tmp_path, records, write, same, decoded):
    """They come before, between and after those that are known; of a span that is in two files the first counts."""
    records += records[:40]
    for number in range(1, FILES, 2):
        folder = write(number, records[number::FILES])
    ingest([folder], tmp_path / "tables")
    known = _parts(tmp_path / "tables")
    decoded(tmp_path / "tables")
    for number in range(0, FILES, 2):
        write(number, records[number::FILES])
    ingest([folder], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == [f"traces_{number:09}.json" for number in range(0, FILES, 2)]
    parts = _parts(tmp_path / "tables")
    assert {name: parts[name] for name in known} == known
    same(folder)


@pytest.mark.slow
def test_only_a_file_that_grew_is_replaced(tmp_path, records, write, same, decoded):
    folder = _in_files(write, records)
    write(5, records[5::FILES][:2], "lines")
    ingest([folder], tmp_path / "tables")
    before = TableStore(tmp_path / "tables").read("spans")
    decoded(tmp_path / "tables")
    write(5, records[5::FILES], "lines")
    ingest([folder], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == ["traces_000000005.json"]
    assert TableStore(tmp_path / "tables").runs() == ["run"]
    assert before.height < same(folder)["spans"].height


@pytest.mark.slow
@pytest.mark.parametrize("change", ["gone", "other"])
def test_files_beside_a_lost_one_are_kept(tmp_path, records, write, same, decoded, change):
    """The run is its folder: what is not there any more is not in its tables."""
    folder = _in_files(write, records)
    ingest([folder], tmp_path / "tables")
    decoded(tmp_path / "tables")
    changed = folder / "hour=00" / "traces_000000005.json"
    if change == "gone":
        changed.unlink()
    else:
        write(5, records[5::FILES][1:])
    ingest([folder], tmp_path / "tables")
    assert decoded(tmp_path / "tables") == ([] if change == "gone" else [changed.name])
    assert TableStore(tmp_path / "tables").runs() == ["run"]
    same(folder)


@pytest.mark.slow
def test_copies_of_a_file_have_rows_of_their_own(tmp_path, records, write, same):
    for number in range(FILES):
        folder = write(10 + number, records[number::FILES])
    ingest([folder], tmp_path / "tables")
    for number, container in ((1, "object"), (40, "object"), (41, "lines")):  # before it and after it
        write(number, records[7::FILES], container)
    result = ingest([folder], tmp_path / "tables")
    vllm_records = len(records[7::FILES]) - len(_of_others(records[7::FILES]))
    assert [(r.run_id, r.duplicate_spans) for r in result.runs] == [("run", 3 * vllm_records)]
    same(folder)


@pytest.mark.slow
def test_thousands_of_event_names_stay_in_their_file(tmp_path, records, write, same, new_traces):
    folder = _in_files(write, records)
    trace = new_traces()
    events = [trace.event(f"strange {n}", n, {f"key {n}": n}) for n in range(4000)]
    trace.span("vllm.api", "llm_request", (1 << 71, 5, 0), events)
    write(3, trace.records)
    ingest([folder], tmp_path / "tables")
    tables = same(folder)
    assert sum(json.loads(tables["runs"]["events"][0]).values()) >= 4000


@pytest.mark.slow
def test_too_many_rejects_cost_only_their_file(tmp_path, records, write, one_by_one):
    folder = _in_files(write, records)
    (folder / "hour=00" / "traces_000000003.json").write_bytes(b'{"resourceSpans": [1]}\n' * 50)
    options = {"options": IngestOptions(max_rejects=10)}
    ingest([folder], tmp_path / "tables", **options)
    apart, spans = one_by_one(folder, **options), TableStore(tmp_path / "tables").read("spans")
    assert spans["span_id"].equals(apart["spans"]["span_id"])
    assert spans.height > len(records) // 2
    assert apart["rejects"].height >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("tick_ns", "most"), [(-(10**18), 0), (10**18, 2)])
def test_a_known_file_is_opened_twice_at_most(tmp_path, records, write, opened, monkeypatch, tick_ns, most):
    """However many there are: no file is compared with every other, and one that did not change for a while is not
    opened."""
    monkeypatch.setattr("tracefit.inputs.files._TICK_NS", tick_ns)
    folder = _in_files(write, records)
    ingest([folder], tmp_path / "tables")
    write(FILES, records[:5])
    opened.clear()
    ingest([folder], tmp_path / "tables")
    new = f"traces_{FILES:09}.json"
    times = [opened[path.name] for path in folder.rglob("traces*.json") if path.name != new]
    assert len(times) == FILES
    assert max(times) == most
