"""Times of requests that the steps they were in tell of, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from together import together

CORE = "cmpl-1-0-00000000"
DONE = {"finish.status": "length", "decode.done_tokens": 4}


def _steps(trace, steps, **changes):
    """Steps start every 10,000 us; step k takes 100 k us to schedule."""
    events = [trace.summary(k, 10_000 * k, duration_us=100 * k, **changes) for k in steps]
    return trace.steps(*events)


def _preempted(trace):
    events = [
        ("QUEUED", 9_000, 0),
        ("SCHEDULED", 10_050, 1, {"schedule.kind": "FIRST"}),
        ("FIRST_TOKEN", 19_500, 1),
        ("PREEMPTED", 30_050, 3),
        ("SCHEDULED", 50_050, 5, {"schedule.kind": "RESUME"}),
        ("FINISHED", 69_500, 6, DONE),
    ]
    return trace.api(1, {"ARRIVED": 8_000}).core(1, events, preemptions=1)


@pytest.mark.slow
@together
def test_a_request_is_not_in_the_steps_of_its_preemption(traces):
    row = (yield _steps(_preempted(traces), range(1, 8)))("requests").row(0, named=True)
    assert (row["steps"], row["steps_timed"]) == (4, 1.0)
    assert row["scheduler_us"] == 100 + 200 + 500 + 600
    # Steps 1 and 2 from 10,000 to the start of step 3; steps 5 and 6 from 50,000 to FINISHED.
    assert row["model_execute_us"] == 20_000 + 19_500 - 1_400
    assert row["execute_ratio"] == pytest.approx(38_100 / 61_500)
    assert row["model_forward_us"] is None


@together
def test_unsampled_steps_count_as_the_mean_of_the_others(traces):
    row = (yield _steps(_preempted(traces), (1, 3, 5, 7)))("requests").row(0, named=True)
    assert (row["steps"], row["steps_timed"], row["scheduler_us"]) == (4, 0.5, (100 + 500) * 4 / 2)
    assert row["model_execute_us"] == 39_500 - 1_200


@pytest.mark.slow
@together
def test_durations_of_whole_steps_are_no_time_of_scheduling(traces):
    """Four steps of 10,000 us are longer than the 39,500 us until FINISHED: a value below zero would be a reject."""
    events = [traces.summary(k, 10_000 * k, duration_us=10_000) for k in range(1, 8)]
    table = yield _preempted(traces).steps(*events)
    row = table("requests").row(0, named=True)
    assert (row["steps"], row["steps_timed"]) == (4, 1.0)
    assert [row[c] for c in ("scheduler_us", "model_execute_us", "execute_ratio")] == [None] * 3
    assert table("rejects").is_empty()


@pytest.mark.slow
@together
def test_without_recorded_steps_times_are_null(traces):
    row = (yield _preempted(traces))("requests").row(0, named=True)
    assert row["steps"] == 4, "the journey tells so much"
    assert [row[c] for c in ("scheduler_us", "model_execute_us", "execute_ratio")] == [None] * 3


@together
def test_a_request_in_flight_has_no_times_of_its_steps(traces):
    trace = traces.api(1, {"ARRIVED": 8_000}).core(1, [("QUEUED", 9_000, 0), ("SCHEDULED", 10_050, 1)])
    row = (yield _steps(trace, range(1, 8)))("requests").row(0, named=True)
    assert [row[c] for c in ("steps", "scheduler_us", "model_execute_us")] == [None] * 3


@pytest.mark.slow
@together
def test_scheduling_ahead_executes_a_step_later(traces):
    table = yield traces.load(lag=1, noise=0.0)
    starts = table("steps").select("step_id", "ts_start_ns")
    rows = table("requests").filter(pl.col("model_execute_us").is_not_null())
    begun = rows.join(starts.with_columns(pl.col("step_id") - 1), left_on="first_scheduled_step", right_on="step_id")
    expected = (begun["finished_ns"] - begun["ts_start_ns"]) / 1e3
    assert begun.height > 80
    assert begun["model_execute_us"].to_list() == pytest.approx(expected.to_list())


def _tokens(trace, shown):
    events = [
        ("QUEUED", 9_000, 0),
        ("SCHEDULED", 10_050, 1),
        ("FIRST_TOKEN", 19_900, 1),
        ("FINISHED", 49_000, 4, DONE),
    ]
    trace.api(1, {"ARRIVED": 8_000}).core(1, events)
    _steps(trace, range(1, 6))
    return trace.steps(*(trace.snapshot(step, 10_000 * step + 200, CORE, num_output_tokens=n) for step, n in shown))


@pytest.mark.slow
@together
def test_the_99th_percentile_is_of_the_times_between_all_tokens(traces):
    table = yield _tokens(traces, [(2, 1), (3, 2), (4, 3)])
    # Tokens at 19,900 (FIRST_TOKEN), 30,000 and 40,000 (steps that count them), 49,000 (FINISHED): 10,100, 10,000,
    # 9,000.
    assert table("requests")["itl_p99_us"].item() == pytest.approx(10_000 + 0.98 * 100)


@together
def test_itl_is_null_where_a_token_has_no_snapshot(traces):
    assert (yield _tokens(traces, [(2, 1), (4, 3)]))("requests")["itl_p99_us"].item() is None
