"""Spellings of traces: what differs in writing is equal in the tables."""

from __future__ import annotations

import subprocess
import sys

import polars as pl
import pyarrow.parquet as pq
import pytest

from together import together
from tracefit.tables.dialects import EVENT_KINDS, SNAPSHOT_EVENT, STEP_EVENT

SOURCE = ("run_id", "source_file", "source_offset")


def _disturbed(trace):
    """One request that is preempted, with every event both layers have."""
    times = {"ARRIVED": 0, "HANDOFF_TO_CORE": 500, "FIRST_RESPONSE_FROM_CORE": 11_500, "DEPARTED": 60_000}
    if trace.spelling == "plain":
        times["FIRST_RESPONSE"] = times.pop("FIRST_RESPONSE_FROM_CORE")
    done = {"finish.status": "length", "decode.done_tokens": 5, "decode.max_tokens": 8}
    return trace.api(1, times).core(
        1,
        [
            ("QUEUED", 1000, 0),
            ("SCHEDULED", 1200, 1, {"schedule.kind": "FIRST"}),
            ("FIRST_TOKEN", 11_200, 1),
            ("PREEMPTED", 20_000, 2),
            ("SCHEDULED", 26_000, 4, {"schedule.kind": "RESUME"}),
            ("FINISHED", 51_200, 7, done),
        ],
        preemptions=1,
    )


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("table", ["journey_events", "requests"])
def test_plain_spelling_gives_the_tables_of_the_dotted_one(tables_of, new_traces, table):
    dotted = tables_of(_disturbed(new_traces()), run_id="dotted")(table)
    plain = tables_of(_disturbed(new_traces(spelling="plain")), run_id="plain")(table)
    assert plain.drop("run_id").equals(dotted.drop("run_id"))
    assert dotted.height == (10 if table == "journey_events" else 1)


@together
def test_every_event_has_its_name_layer_and_facts(new_traces):
    rows = (yield _disturbed(new_traces()))("journey_events")
    assert rows.select("layer", "event").rows() == [
        ("api", "ARRIVED"),
        ("api", "HANDOFF_TO_CORE"),
        ("core", "QUEUED"),
        ("core", "SCHEDULED"),
        ("core", "FIRST_TOKEN"),
        ("api", "FIRST_RESPONSE_FROM_CORE"),
        ("core", "PREEMPTED"),
        ("core", "SCHEDULED"),
        ("core", "FINISHED"),
        ("api", "DEPARTED"),
    ]
    finished = rows.row(8, named=True)
    facts = {"step_id": 7, "decode_done_tokens": 5, "decode_max_tokens": 8, "finish_status": "length"}
    assert {key: finished[key] for key in facts} == facts
    assert rows["schedule_kind"].drop_nulls().to_list() == ["FIRST", "RESUME"]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("clock", ["s", "zero"])
@together
def test_times_without_nanoseconds_come_from_the_seconds(new_traces, clock):
    trace = new_traces(clock=clock).request(1, 2_000_000, step=1)
    core = (yield trace)("journey_events").filter(layer="core")
    assert core["ts_ns"].to_list() == [2_001_000_000, 2_001_200_000, 2_011_200_000, 2_051_200_000]


@together
def test_api_event_without_engine_time_is_placed_by_wall_clock(traces):
    arrived = traces.event("api.ARRIVED", 4000, {})
    traces.span("vllm.api", "llm_request", (1, 2, 0), [arrived]).request(2, 50_000, step=1)
    rows = (yield traces)("journey_events").filter(event="ARRIVED")
    assert rows["ts_ns"].to_list() == [4_000_000, 50_000_000]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("attributes", [{}, {"ts.monotonic": True, "event.ts.monotonic": True}])
@together
def test_attribute_absent_from_every_event_is_null(traces, attributes):
    """Two of every event, so that columns from events are as long as columns from spans."""
    for number, (scope, layer) in enumerate([("vllm.api", "api"), ("vllm.scheduler", "core")], start=5):
        names = [name for kind in EVENT_KINDS if kind.layer == layer for name in kind.spellings]
        events = [traces.event(name, at, attributes) for name in names for at in (4000, 5000)]
        traces.span(scope, "a span", (number, number, 0), events)
    bare = [traces.event(name, 4000, attributes) for name in (STEP_EVENT, SNAPSHOT_EVENT) for _ in range(2)]
    table = yield traces.steps(*bare).request(1, 0, step=1)
    rows = table("journey_events").filter(pl.col("request_id").is_null())
    assert rows.group_by("layer", "event").len().height == len(EVENT_KINDS)
    assert rows.select("step_id", "phase", "num_preemptions").null_count().row(0) == (rows.height,) * 3
    assert set(rows["ts_ns"]) == {4_000_000, 5_000_000}
    assert table("requests").height == 1 + 2
    assert table("rejects").height > 0


@pytest.mark.slow
def test_both_encodings_give_equal_tables(tables_of, new_traces):
    def trace():
        one = _disturbed(new_traces()).request(2, 3000, step=2)
        one.steps(one.summary(1, 1100), one.snapshot(1, 1300, "cmpl-1-0-00000000"), one.summary(2, 12_000))
        return one

    json, protobuf = (
        tables_of(trace(), run_id=kind, name=name)
        for kind, name in (("json", "traces.json"), ("protobuf", "traces.pb"))
    )
    for table in ("spans", "journey_events", "steps", "request_snapshots", "requests", "timeline"):
        left, right = (t(table).drop(SOURCE, strict=False) for t in (json, protobuf))
        assert left.height > 0
        assert left.equals(right), table


def test_only_attributes_on_the_list_are_kept(tables_of, traces, tmp_path):
    traces.request(1, 0, step=1, **{"gen_ai.prompt": "my secret plan", "http.route": "/v1/completions"})
    traces.records[0]["scopeSpans"][0]["spans"][0]["events"].append(
        traces.event("api.NOTE", 100, {"gen_ai.completion": "my secret plan", "reason": "none"})
    )
    tables_of(traces)
    parts = {p.parts[-3]: pq.read_table(p).to_pylist() for p in (tmp_path / "tables").rglob("*.parquet")}
    api = next(row for row in parts["spans"] if row["scope"] == "vllm.api")
    assert dict(api["attributes"]) == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.usage.prompt_tokens": "100",
        "http.route": "/v1/completions",
    }
    assert "secret" not in str(parts)


WITH_ONE_ROW_MORE = """
import importlib.util, sys, types
import tracefit.tables

spec = importlib.util.find_spec("tracefit.tables.dialects")
source = open(spec.origin).read()
begin = "SPELLINGS: tuple[Spelling, ...] = ("
assert source.count(begin) == 1
module = types.ModuleType(spec.name)
sys.modules[spec.name] = tracefit.tables.dialects = module
exec(source.replace(begin, begin + sys.argv[1]), module.__dict__)

from tracefit.commands.ingest import ingest
ingest([sys.argv[2]], sys.argv[3], workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "table", "found"),
    [
        (
            'Spelling("acme", "acme.llm", "generate", None, "acme.wait_s", "requests", "queue_wait_us", factor=1e6),',
            "requests",
            {"dialect": "acme", "queue_wait_us": 250_000.0},
        ),
        (
            'Spelling("acme", "acme.api", None, "acme.came", EVENT_NAME, "journey_events", "ARRIVED"),',
            "journey_events",
            {"layer": "api", "event": "ARRIVED"},
        ),
    ],
)
def test_another_dialect_is_one_row(traces, tmp_path, row, table, found):
    traces.span("acme.llm", "generate", (1, 1, 0), [], attributes={"acme.wait_s": 0.25})
    traces.span("acme.api", "call", (2, 2, 0), [traces.event("acme.came", 1000, {"ts.monotonic": 0.001})])
    traces.api(3, {"ARRIVED": 0})
    folder = traces.write(tmp_path / "run")
    command = [sys.executable, "-c", WITH_ONE_ROW_MORE, row, str(folder), str(tmp_path / "tables")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    rows = pl.read_parquet(tmp_path / "tables" / table)
    assert [one for one in rows.to_dicts() if found.items() <= one.items()], rows
