"""Which server a span belongs to, and which spans count."""

from __future__ import annotations

import pytest

from together import together


@pytest.mark.slow
@together
def test_the_api_process_belongs_to_the_engine_under_it(traces):
    traces.server = "engine"
    traces.request(1, 0, step=1, server="api-process")
    table = yield traces
    for name in ("spans", "journey_events", "requests", "runs"):
        assert table(name)["server"].unique().to_list() == ["engine"], name
    assert table("requests").height == 1


@pytest.mark.slow
@together
def test_two_engines_behind_two_api_processes_stay_apart(traces):
    for number, (engine, api) in enumerate((("a", "api-a"), ("b", "api-b")), 1):
        traces.server = engine
        traces.request(number, 0, step=1, server=api)
    table = yield traces
    assert table("runs").select("server", "requests").rows() == [("a", 1), ("b", 1)]
    assert table("requests").select("server", "request_id").rows() == [("a", "cmpl-1"), ("b", "cmpl-2")]


@pytest.mark.slow
@together
def test_an_api_span_without_a_core_goes_to_the_only_engine(traces):
    traces.request(1, 0, step=1).api(2, {"ARRIVED": 5000, "ABORTED": 6000}, server="api-process")
    rows = (yield traces)("requests").filter(request_id="cmpl-2")
    names = ("server", "core_request_id", "arrival_ns", "aborted_ns", "queued_ns", "admission_us")
    assert rows.select(names).rows() == [("engine", None, 5_000_000, 6_000_000, None, None)]


@together
def test_an_api_span_without_a_core_has_no_engine(traces):
    for number, engine in enumerate(("a", "b"), 1):
        traces.server = engine
        traces.request(number, 0, step=1)
    traces.api(3, {"ARRIVED": 5000}, server="api-process")
    assert (yield traces)("requests").filter(request_id="cmpl-3")["server"].to_list() == ["api-process"]


@pytest.mark.slow
@together
def test_several_cores_under_one_api_span_are_several_requests(traces):
    traces.api(1, {"ARRIVED": 0, "DEPARTED": 9000})
    for child in (0, 1):
        traces.core(1, [("QUEUED", 1000 + child, 0), ("SCHEDULED", 2000, 1)], child=child)
    rows = (yield traces)("requests")
    assert rows.select("request_id", "core_request_id", "admission_us", "queue_wait_us").rows() == [
        ("cmpl-1", "cmpl-1-0-00000000", 1000.0, 1000.0),
        ("cmpl-1", "cmpl-1-1-00000001", 1001.0, 999.0),
    ]


@pytest.mark.slow
@together
def test_an_orphan_core_is_a_request_without_an_arrival(traces):
    traces.core(1, [("QUEUED", 1000, 0), ("SCHEDULED", 1200, 1)], parent=False)
    row = (yield traces)("requests").row(0, named=True)
    assert row["request_id"] == row["core_request_id"] == "cmpl-1-0-00000000"
    assert (row["arrival_ns"], row["admission_us"], row["queue_wait_us"]) == (None, None, 200.0)


@together
def test_a_span_that_is_there_twice_counts_once(traces):
    traces.request(1, 0, step=1)
    traces.records.append(traces.records[1])
    table = yield traces
    assert table("journey_events").filter(layer="core").height == 4
    assert table("requests").height == 1
    assert table("runs").select("spans", "duplicate_spans").rows() == [(2, 1)]


@together
def test_spans_of_other_scopes_are_counted_and_left_out(traces):
    traces.request(1, 0, step=1).span("fastapi", "GET /health", (9, 9, 0), [traces.event("x", 0, {})])
    table = yield traces
    assert sorted(table("spans")["scope"]) == ["vllm.api", "vllm.scheduler"]
    assert table("runs")["other_spans"].to_list() == [1]
    assert "x" not in table("runs")["events"][0]


@together
def test_events_that_the_sdk_dropped_are_summed_over_spans(traces):
    traces.steps(traces.summary(1, 0), dropped=3).steps(traces.summary(2, 1000), dropped=4)
    assert (yield traces)("runs")["dropped_events"].to_list() == [7]


@pytest.mark.slow
@together
def test_an_event_that_cannot_be_placed_is_a_reject(traces):
    lost = traces.summary(2, 1000)
    lost["attributes"] = [a for a in lost["attributes"] if a["key"] != "step.id"]
    traces.steps(traces.summary(1, 0), lost, traces.summary(3, 2000))
    table = yield traces
    assert table("steps")["step_id"].to_list() == [1, 3]
    assert "step.id" in table("rejects")["reason"].item()
    assert table("rejects")["source_file"].item().endswith("traces.json")


@together
def test_a_journey_event_without_any_time_is_a_reject(traces):
    timeless = {"name": "journey.QUEUED", "timeUnixNano": "0", "attributes": []}
    traces.span("vllm.scheduler", "llm_core", (5, 6, 0), [timeless]).request(1, 0, step=1)
    table = yield traces
    assert table("journey_events").height == 6
    assert table("rejects").height == 1
