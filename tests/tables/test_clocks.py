"""Engines behind one name, layers on two hosts, ids that cannot be: what does not compare is kept apart."""

from __future__ import annotations

import json

import polars as pl
import pytest

from together import together

BOOT_UNIX_NS = 1_700_000_000_000_000_000
"""As in `conftest.py`."""

HOUR_US = 3_600_000_000


def _moved(attribute, by_us):
    """Move the engine's clock in one attribute of an event."""
    value = attribute["value"]
    if attribute["key"] in ("ts.monotonic_ns", "step.ts_start_ns", "step.ts_end_ns"):
        value["intValue"] = str(int(value["intValue"]) + by_us * 1000)
    elif attribute["key"] in ("ts.monotonic", "event.ts.monotonic"):
        value["doubleValue"] += by_us / 1e6


def _spans(traces, server):
    for record in traces.records:
        keys = {a["key"]: a["value"]["stringValue"] for a in record["resource"]["attributes"]}
        if keys.get("service.instance.id") == server:
            yield record["scopeSpans"][0]["spans"][0]


def _on_another_host(traces, server, *, by_us=HOUR_US, scopes=("llm_core", "llm_request", "scheduler_steps_1")):
    for span in _spans(traces, server):
        if span["name"] in scopes:
            for event in span["events"]:
                for attribute in event["attributes"]:
                    _moved(attribute, by_us)


def _nameless(traces):
    """Leave service.name as all that a resource says."""
    for record in traces.records:
        attributes = record["resource"]["attributes"]
        attributes[:] = [a for a in attributes if a["key"] != "service.instance.id"]
    return traces


def _engine(traces, server, first_step, begin_us, *, spans=4, steps=10, every=1, requests=(), edges=False):
    """Steps in spans of so many; requests are (number, step) of three tokens. Only every so many-th step is sampled.

    With `edges` a span opens as the one before closes, as servers have it; else it is as long as its events are.
    """
    cycle_us = 1000.0
    traces.server = server
    for number in range(spans):
        ids = range(first_step + number * steps, first_step + (number + 1) * steps)
        events = [traces.summary(i, begin_us + cycle_us * (i - first_step)) for i in ids if i % every == 0]
        traces.steps(*events)
        if edges:
            span = traces.records[-1]["scopeSpans"][0]["spans"][0]
            opened_us, closed_us = (begin_us + cycle_us * steps * (number + k) - 300 for k in (0, 1))
            span["startTimeUnixNano"] = str(BOOT_UNIX_NS + round(opened_us * 1000))
            span["endTimeUnixNano"] = str(BOOT_UNIX_NS + round(closed_us * 1000) - 75_000)
    for number, step in requests:
        start = begin_us + cycle_us * (step - first_step)
        ends = (start + cycle_us - 50, start + 3 * cycle_us - 50)
        traces.request(number, start - 1100, step=step, output=3, tokens_at=ends)
    return traces


def _requests(table):
    return dict(table("requests").select("request_id", "server").rows())


def _twins(traces, *, apart=1000, late_us=430.0, **how):
    """Two engines whose counters are so far apart, each with ten requests: 1, 3, 5, ... and 2, 4, 6, ..."""
    requests_of_a = [(1 + 2 * n, 102 + 3 * n) for n in range(10)]
    requests_of_b = [(2 + 2 * n, 102 + apart + 3 * n) for n in range(10)]
    _engine(traces, "a", 100, 0.0, requests=requests_of_a, **how)
    return _engine(traces, "b", 100 + apart, late_us, requests=requests_of_b, **how)


@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize(
    ("apart", "edges"),
    [(1000, False), (-60, False), (12, False), (3, False), (1000, True), (1, True), (0, True)],
)
@together
def test_step_counters_side_by_side_are_servers_of_their_own(traces, apart, edges):
    table = yield _nameless(_twins(traces, apart=apart, edges=edges))
    assert table("runs").select("server", "epochs", "steps", "requests").rows() == [
        ("vllm#1", 1, 40, 10),
        ("vllm#2", 1, 40, 10),
    ]
    server_of = _requests(table)
    assert {server_of[f"cmpl-{2 * n + 1}"] for n in range(10)} == {"vllm#1"}
    assert {server_of[f"cmpl-{2 * n + 2}"] for n in range(10)} == {"vllm#2"}
    cycles = table("timeline").filter(cycle_source="adjacent")["cycle_us"]
    assert (cycles.len(), set(cycles.round(6))) == (78, {1000.0})


@pytest.mark.slow
@together
def test_counters_with_few_sampled_steps(traces):
    table = yield _nameless(_twins(traces, apart=300, every=5))
    assert table("runs").select("server", "steps", "requests").rows() == [
        ("vllm#1", 8, 10),
        ("vllm#2", 8, 10),
    ]


@pytest.mark.slow
@together
def test_snapshots_go_with_the_steps_of_their_span(traces):
    _twins(traces)
    for server, step in (("a", 105), ("b", 1105)):
        span = next(s for s in _spans(traces, server) if s["name"].startswith("scheduler"))
        span["events"].append(traces.snapshot(step, 5_600, f"of-{server}"))
    rows = (yield _nameless(traces))("request_snapshots").select("server", "request_id").rows()
    assert rows == [("vllm#1", "of-a"), ("vllm#2", "of-b")]


@pytest.mark.slow
@together
def test_hosts_have_clocks_of_their_own(traces):
    """With counters that are the same, and with no step event at all."""
    traces.server = "a"
    traces.request(1, 0, step=5).request(3, 60_000, step=9)
    traces.server = "b"
    traces.request(2, 500, step=5).request(4, 60_500, step=9)
    _on_another_host(traces, "b")
    assert _requests((yield _nameless(traces))) == {
        "cmpl-1": "vllm#1",
        "cmpl-3": "vllm#1",
        "cmpl-2": "vllm#2",
        "cmpl-4": "vllm#2",
    }


@together
def test_a_host_that_was_restarted_is_one_server(traces):
    """Its monotonic clock starts again: another zero, after the other one's time."""
    traces.server = "before"
    traces.request(1, 0, step=50)
    traces.server = "after"
    traces.request(2, 90_000_000, step=5)
    _on_another_host(traces, "after", by_us=-80_000_000)
    table = yield _nameless(traces)
    assert table("runs").select("server", "epochs").rows() == [("vllm", 2)]


@pytest.mark.slow
@together
def test_a_step_that_a_machine_suspends_stays(traces):
    """Its wall-clock time is at its end, seconds after it began; one that began at another time than it says does not
    stay."""
    late_ns = 3_000_000_000
    steps = [traces.summary(step, 1000.0 * step) for step in range(1, 9)]
    for event, is_true in ((steps[6], False), (steps[7], True)):
        event["timeUnixNano"] = str(int(event["timeUnixNano"]) + late_ns)
        if is_true:
            traces.change([event], lambda end: end + late_ns, "step.ts_end_ns")
            traces.change([event], lambda us: us + late_ns // 1000, "step.duration_us")
    traces.steps(*steps)
    assert (yield traces)("steps")["step_id"].sort().to_list() == [1, 2, 3, 4, 5, 6, 8]


@together
def test_a_server_that_was_restarted_is_one_server(traces):
    _engine(traces, "a", 1, 0.0)
    _engine(traces, "a", 1, 500_000.0, spans=2)
    assert (yield _nameless(traces))("runs").select("server", "epochs").rows() == [("vllm", 2)]


@pytest.mark.slow
@together
def test_restarted_twin_is_a_second_server(traces):
    _engine(traces, "a", 5000, 0.0, spans=20)
    _engine(traces, "b", 100, 430.0)
    _engine(traces, "b", 1, 60_430.0)
    assert (yield _nameless(traces))("runs").select("server", "epochs", "steps").rows() == [
        ("vllm#1", 1, 200),
        ("vllm#2", 2, 80),
    ]


@pytest.mark.slow
@together
def test_servers_with_names_of_their_own_keep_them(traces):
    assert (yield _twins(traces))("runs")["server"].to_list() == ["a", "b"]


@together
def test_api_events_of_another_host_come_onto_the_engines_clock(traces):
    traces.request(1, 0, step=5).request(2, 60_000, step=9)
    _on_another_host(traces, "engine", scopes=("llm_request",))
    rows = (yield traces)("requests").select("admission_us", "departure_us").rows()
    assert [tuple(round(value, 3) for value in row) for row in rows] == [(1000.0, 300.0)] * 2


@pytest.mark.slow
@together
def test_a_damaged_step_id_is_no_restart(traces):
    """10^15 and back again."""
    traces.steps(*(traces.summary(step, 1000.0 * step) for step in range(1, 21)))
    traces.core(7, [("QUEUED", 9_500, 8), ("SCHEDULED", 10_200, 10**15), ("FINISHED", 10_900, 10)])
    table = yield traces
    assert table("runs")["epochs"].to_list() == [1]
    assert table("timeline")["step_id"].to_list() == list(range(1, 21))


API_CLOCK = ["server", "api_clock_ahead_us", "api_clock_error_us", "clock_corrected_events"]


def _api_ahead(traces, number, ahead_us):
    span = next(s for s in traces.spans if s["name"] == "llm_request" and s["spanId"] == f"{2 * number:016x}")
    traces.change(span["events"], lambda seconds: seconds + ahead_us / 1e6, "event.ts.monotonic")


def _requests_of_two_clocks(traces, count, ahead_us):
    """Requests that take 1,000 us to the core and 300 us back, the API of each on a clock so far ahead."""
    for number in range(1, count + 1):
        traces.request(number, 100_000 * number, step=5 * number, departs=300)
        _api_ahead(traces, number, ahead_us(number))
    return traces


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("ahead_us", [50_000, 10_000, 1_100, -50_000, -400])
@together
def test_a_clock_ahead_is_found_by_causality(traces, ahead_us):
    """The core may have queued a request from 0 to 1,300 us after the API: the middle is 650 us from either end."""
    table = yield _requests_of_two_clocks(traces, 12, lambda _: ahead_us)
    # Of 1,000 us on the way there and 300 us on the way back 650 us each are left.
    assert table("runs").select(API_CLOCK).rows() == [("engine", ahead_us - 350, 650, 24)]
    rows = table("requests").select(pl.col("^(admission|ttft|departure|client)_us$").round(3)).unique()
    assert rows.rows(named=True) == [
        {"admission_us": 650.0, "ttft_us": 10_850.0, "departure_us": 650.0, "client_us": 51_500.0}
    ]
    api = table("journey_events").filter(layer="api", event="ARRIVED")["ts_ns"]
    assert api.to_list() == [(100_000 * number + 350) * 1000 for number in range(1, 13)]
    assert table("journey_events").select("ts_ns").to_series().is_sorted()
    assert (table("runs")["implausible"][0], table("rejects").height) == ("{}", 0)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("ahead_us", [900, 0, -200])
@together
def test_clocks_that_causality_allows_are_left_alone(traces, ahead_us):
    table = yield _requests_of_two_clocks(traces, 12, lambda _: ahead_us)
    assert table("runs").select(API_CLOCK).rows() == [("engine", None, None, 0)]
    assert table("requests")["admission_us"].round(3).unique().to_list() == [1000 - ahead_us]


@pytest.mark.slow
@together
def test_a_few_requests_out_of_order_are_no_clock(traces):
    """One in forty departs before it finishes, as a request whose id another one has, too."""
    table = yield _requests_of_two_clocks(traces, 400, lambda number: -400 * (number % 40 == 0))
    assert table("runs").select(API_CLOCK).rows() == [("engine", None, None, 0)]
    assert table("requests")["departure_us"].null_count() == 10
    counts = json.loads(table("runs")["implausible"][0])
    assert counts == {f"requests.{c} is between events out of order": 10 for c in ("departure_us", "client_us")}


@pytest.mark.slow
@together
def test_clocks_that_no_distance_explains_leave_no_value(traces):
    table = yield _requests_of_two_clocks(traces, 40, lambda number: 50_000 * (-1) ** number)
    assert table("runs").select(API_CLOCK).rows() == [("engine", None, None, 0)]
    requests = table("requests")
    assert (requests["admission_us"].null_count(), requests["departure_us"].null_count()) == (20, 20)
    assert json.loads(table("runs")["implausible"][0])["requests.admission_us is between events out of order"] == 20


@pytest.mark.slow
def test_a_moved_clock_and_lost_events_are_reasons(tracefit, tmp_path, traces, new_traces):
    moved = _requests_of_two_clocks(traces, 12, lambda _: 50_000).write(tmp_path / "moved")
    code, _, stderr = tracefit("ingest", moved, "--out", tmp_path / "tables")
    assert code == 0
    assert "the API's clock was 49.6 ms ahead of the engine core's on engine, to 0.7 ms" in stderr
    # Each on a clock of its own: no model of the API, and more requests would not help.
    odd = new_traces().load(steps=300, requests=90)
    for number in range(1, 91):
        _api_ahead(odd, number, 50_000 + 10_000 * number)
    code, stdout, stderr = tracefit(
        "run", odd.write(tmp_path / "odd"), "--out", tmp_path / "out", "--fast", "--features", "batch"
    )
    assert code == 3
    said = " ".join(stdout.split())
    assert (
        "90 of 90 have events out of order, or of one time; check the clocks of the API process and the engine core"
        in said
    )
    assert "trace more requests" not in said
