"""The summary of requests: what a person who serves them reads, worked out by hand."""

from __future__ import annotations

import pytest

from tracefit.commands.ingest import ingest
from tracefit.commands.requests import SECONDS_VIEW, requests, seconds_view
from tracefit.errors import DataError, UsageError


def _load(trace, *, number=11, every_us=1_000_000):
    """One request per second; request k has its first token 100 k ms after it arrived and 5 tokens, 10 ms apart."""
    for k in range(1, number + 1):
        at = every_us * (k - 1)
        first = at + 100_000 * k
        trace.request(k, at, step=10 * k, tokens_at=(first, first + 40_000), departs=1_000)
    return trace


@pytest.fixture
def tables(tmp_path):
    def of(*traces):
        for index, trace in enumerate(traces):
            ingest([trace.write(tmp_path / f"run-{index}", config=False)], tmp_path / "tables")
        return tmp_path / "tables"

    return of


def test_percentiles_and_throughput_are_those_of_the_requests(tables, traces):
    total = requests(tables(_load(traces))).total
    assert (total.requests, total.failed, total.in_flight) == (11, 0, 0)
    assert (total.prompt_tokens, total.output_tokens) == (1_100, 55)
    # TTFT is 0.1 to 1.1 s: the median is the sixth, P90 the tenth, P99 nine tenths of the way from there to the last.
    ttft = (total.ttft.n, total.ttft.mean, total.ttft.p50, total.ttft.p90, total.ttft.p99)
    assert ttft == pytest.approx((11, 0.6, 0.6, 1.0, 1.09))
    assert total.itl.p50 == total.itl.p99 == pytest.approx(0.01)
    assert total.e2e.p50 == pytest.approx(0.64)
    assert total.queue.p50 == pytest.approx(0.0012)
    # From the arrival at 0 to the departure of the last: 10 + 1.1 + 0.04 + 0.001 s.
    assert total.seconds == pytest.approx(11.141)
    assert total.output_tokens_per_s == pytest.approx(55 / 11.141)
    assert total.requests_per_s == pytest.approx(11 / 11.141)


def test_failures_are_left_out_of_request_times(tables, traces):
    trace = _load(traces, number=2)
    cut = {"finish.status": "aborted", "decode.done_tokens": 3}
    trace.api(3, {"ARRIVED": 0, "ABORTED": 9_000_000})
    trace.core(
        3,
        [
            ("QUEUED", 1_000, 0),
            ("SCHEDULED", 1_200, 1),
            ("FIRST_TOKEN", 50_000, 1),
            ("FINISHED", 9e6, 9, cut),
        ],
    )
    trace.api(4, {"ARRIVED": 2_000_000}).core(4, [("QUEUED", 2_001_000, 1)])
    summary = requests(tables(trace))
    total = summary.total
    assert (total.requests, total.failed, total.in_flight) == (4, 1, 1)
    assert summary.states == {"FINISHED_ABORTED": 1, "FINISHED_LENGTH_CAPPED": 2, "WAITING": 1}
    assert (total.e2e.n, total.itl.n, total.ttft.n, total.queue.n) == (2, 2, 3, 3)
    assert total.e2e.p99 < 1


def test_every_run_is_a_group_and_all_together_are_one(tables, new_traces):
    summary = requests(tables(_load(new_traces()), _load(new_traces(), number=2)))
    assert [(g.name, g.requests) for g in summary.runs] == [("run-0", 11), ("run-1", 2)]
    assert summary.total.requests == 13
    # The second run ends with the departure of its last request, after 1 + 0.2 + 0.041 s.
    assert summary.total.seconds == pytest.approx(11.141 + 1.241)


def test_windows_are_round_and_have_every_request_once(tables, traces):
    windows = requests(tables(_load(traces))).windows
    # A tenth of 11.1 s, rounded up, is 2 s.
    names = [f"run-0 {k}-{k + 2} s" for k in range(0, 12, 2)]
    assert [w.name for w in windows] == names
    assert [w.requests for w in windows] == [2, 2, 2, 2, 2, 1]
    assert windows[0].output_tokens_per_s == pytest.approx(10 / 2)
    assert windows[-1].seconds == pytest.approx(1.141), "the run ends before the window does"


def test_phases_add_up(tables, traces):
    phases = {p.phase: p for p in requests(tables(_load(traces, number=1))).phases}
    assert {name: p.seconds.p50 for name, p in phases.items()} == pytest.approx(
        {
            "admission": 0.001,
            "queue wait": 0.0002,
            "requeue wait": 0.0,
            "prefill": 0.0988,
            "decode": 0.04,
            "departure": 0.001,
        }
    )
    assert phases["decode"].share == pytest.approx(0.04 / 0.141)
    assert sum(p.share for p in phases.values()) == pytest.approx(1)


def test_the_view_in_seconds_has_vllms_names_and_nulls(tables, traces):
    trace = _load(traces, number=1)
    trace.api(2, {"ARRIVED": 5_000_000}).core(2, [("QUEUED", 5_001_000, 1)])
    whole, waiting = seconds_view(tables(trace)).sort("arrival_time").to_dicts()
    expected = {
        "arrival_time": 0.0,
        "first_scheduled_time": 0.0012,
        "first_token_time": 0.1,
        "last_token_time": 0.14,
        "finished_time": 0.14,
        "time_in_queue": 0.0012,
        "first_wait": 0.0002,
        "preempted_time": 0.0,
        "ttft": 0.1,
        "itl": 0.01,
        "tpot": 0.01,
        "e2e": 0.14,
        "tokens_per_s": 5 / 0.14,
        "queue_ratio": 0.0012 / 0.14,
    }
    assert {key: whole[key] for key in expected} == pytest.approx(expected)
    known = {name for name in SECONDS_VIEW if waiting[name] is not None}
    assert (known, waiting["arrival_time"], waiting["state"]) == ({"arrival_time"}, 5.0, "WAITING")


def test_the_folder_has_to_hold_requests(tables, traces, tmp_path):
    with pytest.raises(UsageError, match="holds no tables"):
        requests(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no requests"):
        requests(tables(traces.steps(traces.summary(1, 1000))))
