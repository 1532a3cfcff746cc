"""The summary of requests: what a person who serves them reads, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

import clients
from tracefit.commands.ingest import ingest
from tracefit.commands.requests import SECONDS_VIEW, requests, seconds_view
from tracefit.diagnostics.load import measured_latencies
from tracefit.errors import DataError, UsageError
from tracefit.replay.closed_loop import _quantities
from tracefit.tables.schema import REQUEST
from tracefit.tables.store import TableStore


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_requests_report_and_replay_have_the_same_percentiles(tables, traces):
    """Request k has its first token after 100 k ms and its tokens k ms apart. P99 of 22 is at rank 20.79, of 21 at
    19.8."""
    trace = traces
    for k in range(1, 22):
        first = 1_000_000 * (k - 1) + 100_000 * k
        trace.request(k, 1_000_000 * (k - 1), step=10 * k, tokens_at=(first, first + 4_000 * k))
    # Only its first token counts: after 7 s the client was gone.
    cut = {"finish.status": "aborted", "decode.done_tokens": 3}
    events = [("QUEUED", 1_000, 0), ("SCHEDULED", 1_200, 1), ("FIRST_TOKEN", 2_200_000, 1)]
    trace.api(22, {"ARRIVED": 0, "ABORTED": 7_000_000}).core(22, [*events, ("FINISHED", 7e6, 9, cut)])
    folder = tables(trace)
    rows = TableStore(folder).read("requests")
    whole = rows.filter(pl.col("finish_status") == "length")
    ms = {
        "ttft": ((1_150, 1_990, 2_179), rows),
        "itl": ((11, 19, 20.8), whole),
        "e2e": ((1_144, 1_976, 2_163.2), whole),
    }
    summary, drawn = requests(folder).total, measured_latencies(rows)
    for name, (expected, counted) in ms.items():
        replayed = {q.name: q for q in _quantities(_as_compared(counted), rows.clear(), _predicted(counted))}
        assert getattr(summary, name).n == counted.height
        assert getattr(summary, name).percentiles_ms == pytest.approx(expected), name
        assert [drawn[name][p] for p in (50, 90, 99)] == pytest.approx(expected), name
        of_replay = [replayed[f"{name}_p{p}_us"] for p in (50, 90, 99)]
        assert [q.measured / 1e3 for q in of_replay] == pytest.approx(expected), name
        assert [q.replayed / 1e3 for q in of_replay] == pytest.approx([2 * e for e in expected]), name


def _as_compared(rows):
    """Return requests as a replay compares them; each event takes twice as long after the arrival as it did."""
    scheduled, first, last, departed = map(pl.col, ("time_in_queue_us", "ttft_us", "e2e_us", "client_us"))
    return rows.select(
        *(*REQUEST, "ttft_us", "itl_us", "e2e_us", "client_us"),
        arrival=pl.lit(0.0),
        output="output_tokens",
        done=0,
        first_scheduled=scheduled,
        first_token=first,
        finished=last,
        departed=departed,
        replayed_scheduled=2 * scheduled,
        replayed_first=2 * first,
        replayed_last=2 * last,
        replayed_departed=2 * departed,
    )


def _predicted(rows):
    return rows.select(*REQUEST, "ttft_us", "itl_us", "e2e_us")


@pytest.mark.slow
def test_latencies_that_only_a_client_knows_are_the_client_s(tmp_path):
    """Request k waits 100 k ms for the first of its five tokens, which come 10 ms apart."""
    tokens = [[k + 0.1 * (k + 1) + 0.01 * t for t in range(5)] for k in range(11)]
    plan = [clients.Request(f"r{k}", float(k), 100, 5, times) for k, times in enumerate(tokens)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.json").write_bytes(clients.guidellm(plan))
    ingest([tmp_path / "run"], tmp_path / "tables")
    total = requests(tmp_path / "tables").total
    assert total.ttft.percentiles_ms == pytest.approx((600, 1_000, 1_090))
    # Times of the log are floats of Unix seconds: 0.2 us apart.
    assert total.itl.percentiles_ms == pytest.approx((10, 10, 10), rel=1e-4)
    assert total.e2e.percentiles_ms == pytest.approx((640, 1_040, 1_130))
    drawn = measured_latencies(TableStore(tmp_path / "tables").read("requests"))
    assert [drawn["ttft"][p] for p in (50, 90, 99)] == pytest.approx((600, 1_000, 1_090))


@pytest.mark.slow
def test_every_run_is_a_group_and_all_together_are_one(tables, new_traces):
    summary = requests(tables(_load(new_traces()), _load(new_traces(), number=2)))
    assert [(g.name, g.requests) for g in summary.runs] == [("run-0", 11), ("run-1", 2)]
    assert summary.total.requests == 13
    # The second run ends with the departure of its last request, after 1 + 0.2 + 0.041 s.
    assert summary.total.seconds == pytest.approx(11.141 + 1.241)


@pytest.mark.slow
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
