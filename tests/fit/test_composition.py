"""Latencies composed of step times, worked out by hand.

One engine, six steps:

    step       1       2       3       4       5       6
    start ms   0      10      20      35      45      60
    predicted  9      11      14      10      12       8   ms
"""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.fit.latency import given_state

MS = 1_000_000
ENGINE = {"run_id": "r", "server": "s", "epoch": 0}
STARTS_MS = (0, 10, 20, 35, 45, 60)
PREDICTED_MS = (9, 11, 14, 10, 12, 8)
NO_WAITS = {"preempted_step": pl.Int64, "resumed_step": pl.Int64}


def _steps(predicted_ms=PREDICTED_MS, *, without=()):
    rows = [
        {**ENGINE, "step_id": k, "ts_start_ns": at * MS, "predicted_us": None if ms is None else ms * 1e3}
        for k, (at, ms) in enumerate(zip(STARTS_MS, predicted_ms, strict=True), 1)
        if k not in without
    ]
    return pl.DataFrame(rows)


def _request(name, *, queued_ms, steps):
    """Describe a request by when it was queued and the steps of SCHEDULED, FIRST_TOKEN and FINISHED."""
    scheduled, first_token, finished = steps
    return {
        **ENGINE,
        "trace_id": name,
        "core_request_id": name,
        "queued_ns": queued_ms * MS,
        "first_scheduled_step": scheduled,
        "first_token_step": first_token,
        "finished_step": finished,
    }


def _waits(*waits):
    rows = [
        {**ENGINE, "trace_id": n, "request_id": n, "preempted_step": lost, "resumed_step": back}
        for n, lost, back in waits
    ]
    known = {"run_id": pl.String, "server": pl.String, "epoch": pl.Int64}
    return pl.DataFrame(rows, schema={**known, "trace_id": pl.String, "request_id": pl.String, **NO_WAITS})


def _composed(*requests, steps=None, waits=(), lag=0):
    steps = _steps() if steps is None else steps
    composed = given_state(pl.DataFrame(list(requests)), steps, _waits(*waits), {("r", "s"): lag})
    columns = ("queue_wait", "prefill", "decode", "requeue_before", "requeue_after")
    rows = composed.select(f"state_{c}_us" for c in columns).rows()
    return [tuple(None if v is None else v / 1e3 for v in row) for row in rows]


A = _request("a", queued_ms=9, steps=(2, 3, 5))
B = _request("b", queued_ms=21, steps=(4, 4, 4))


def test_request_time_is_sum_of_its_steps():
    a, b = _composed(A, B)
    # a: queued at 9 ms, its first step begins at 10 ms; prompt in steps 2 and 3, two more tokens in 4 and 5.
    assert a == (10 - 9, 11 + 14, 10 + 12, 0, 0)
    # b: one token, in step 4, which begins at 35 ms.
    assert b == (35 - 21, 10, 0, 0, 0)


def test_scheduling_a_step_ahead_moves_tokens_to_the_next_cycle():
    (a,) = _composed(A, lag=1)
    # Scheduled at the start of step 2; step 3 executes in cycle 4, step 5 in cycle 6.
    assert a == (10 - 9, 11 + 14 + 10, 12 + 8, 0, 0)


def test_the_wait_after_a_preemption_is_the_real_one():
    c = _request("c", queued_ms=-2, steps=(1, 1, 6))
    (request,) = _composed(c, waits=[("c", 3, 5)])
    # Token in step 1, another in 2; preempted by step 3 at 20 ms, resumed by step 5 at 45 ms, there and in 6.
    assert request == (2, 9, 11 + 12 + 8, 0, 45 - 20)


def test_a_wait_before_the_first_token_counts_to_the_prompt():
    d = _request("d", queued_ms=-2, steps=(1, 5, 6))
    (request,) = _composed(d, waits=[("d", 2, 4)])
    assert request == (2, 9 + 10 + 12, 8, 35 - 10, 0)


def test_two_preemptions_add_up():
    c = _request("c", queued_ms=-2, steps=(1, 1, 6))
    (request,) = _composed(c, waits=[("c", 2, 3), ("c", 4, 6)])
    assert request == (2, 9, 14 + 8, 0, (20 - 10) + (60 - 35))


def test_the_step_in_flight_executes_before_the_wait():
    c = _request("c", queued_ms=-2, steps=(1, 1, 5))
    (request,) = _composed(c, waits=[("c", 3, 5)], lag=1)
    # First token in cycle 2. Cycle 3 executes step 2; the wait is cycle 4, from 35 to 45 ms; then cycles 5 and 6.
    assert request == (2, 9 + 11, 14 + 12 + 8, 0, 45 - 35)


@pytest.mark.parametrize(
    "steps",
    [_steps(without=(3,)), _steps((9, 11, None, 10, 12, 8))],
    ids=["not sampled", "batch not known"],
)
def test_a_request_with_an_unknown_step_has_no_prediction(steps):
    a, b = _composed(A, B, steps=steps)
    assert a[:2] == (1, None)
    assert b == (14, 10, 0, 0, 0)


def test_a_missing_step_in_the_middle_leaves_no_prediction():
    c = _request("c", queued_ms=-2, steps=(1, 1, 6))
    (request,) = _composed(c, steps=_steps(without=(4,)))
    assert request == (2, 9, None, 0, 0)


def test_steps_of_another_engine_do_not_count():
    twice = pl.concat([_steps(), _steps([100] * 6).with_columns(epoch=pl.lit(1, pl.Int64))])
    assert _composed(A, steps=twice) == _composed(A)


def test_a_request_that_outlasts_the_steps_has_no_prediction():
    (request,) = _composed(_request("e", queued_ms=59, steps=(6, 6, 7)))
    assert request == (1, 8, None, 0, 0)
