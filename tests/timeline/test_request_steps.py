"""Steps counted from the times of requests, on generated runs: every step is known there, and nothing of it is in the
requests."""

from __future__ import annotations

from functools import cache

import polars as pl
import pytest

from stock import stock_requests
from tracefit.synth import SynthOptions, synth
from tracefit.synth.options import LengthMix, LoadPhase
from tracefit.tables import schema
from tracefit.timeline import (
    EngineLimits,
    build_timeline,
    count_steps,
    events_of,
    execution_lags,
    queue_state,
)

LIMITS = EngineLimits(max_num_batched_tokens=2048, max_num_seqs=64)
STEADY = (LoadPhase("steady", 1.0, 1.0),)
BATCH = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "context_tokens")


@cache
def _run(rate=12.0, requests=200, seed=1, **more):
    return synth(SynthOptions(rate_per_s=rate, requests=requests, seed=seed, phases=STEADY, abort_fraction=0.0, **more))


def _timeline(counted):
    empty = (schema.STEPS.empty(), schema.REQUEST_SNAPSHOTS.empty())
    events = events_of(counted.requests)
    return build_timeline(*empty, events, LIMITS, journeys_complete=True, known_starts=counted.starts)


def _beside_truth(run, counted):
    """Return the counted requests with the true steps of their tokens."""
    truth = run.truth_requests.select("request_id", true_first="first_token_step", true_last="finished_step")
    return counted.requests.join(truth, on="request_id").sort("arrival_ns")


def test_every_step_of_a_busy_engine_is_counted():
    run = _run()
    counted = _beside_truth(run, count_steps(stock_requests(run), LIMITS))
    # Numbers begin anywhere, and an idle gap may be one empty step or several.
    shift = counted["first_token_step"] - counted["true_first"]
    assert shift.n_unique() <= 2
    assert (counted["finished_step"] - counted["true_last"] - shift).is_in([0]).all()


def test_the_batch_of_every_step_is_that_of_the_engine():
    run = _run()
    counted = count_steps(stock_requests(run), LIMITS)
    beside = _beside_truth(run, counted)
    shift = int((beside["first_token_step"] - beside["true_first"])[-1])
    late = beside.filter(pl.col("first_token_step") - pl.col("true_first") == shift)["true_first"].min()
    truth = run.truth_steps.filter(pl.col("step_id") >= late).with_columns(step_id=pl.col("step_id") + shift)
    both = _timeline(counted).join(truth.select("step_id", *BATCH), on="step_id", suffix="_true")
    assert both.height > 1_000
    # All but the prompts that two steps share: which tokens of them are whose is not in the spans.
    for name in BATCH:
        assert (both[name] == both[f"{name}_true"]).mean() > 0.99, name


def test_time_between_anchored_starts_is_that_of_the_steps():
    run = _run()
    timeline = _timeline(count_steps(stock_requests(run, delay_us=0.0), LIMITS))
    rows = timeline.filter(pl.col("cycle_source") == "request", ~pl.col("idle_after"))
    mean_true = run.truth_steps.filter(pl.col("running") > 0)["cycle_us"].mean()
    whole = (rows["cycle_us"] * rows["interval_steps"]).sum() / rows["interval_steps"].sum()
    assert rows.height > 300
    assert whole == pytest.approx(mean_true, rel=0.05)


@pytest.mark.slow
def test_an_idle_gap_is_no_time_of_a_step():
    run = _run(rate=0.7, requests=60)
    counted = count_steps(stock_requests(run), LIMITS)
    timeline = _timeline(counted)
    assert timeline.filter(pl.col("idle_after"))["cycle_us"].max() > 100_000
    busy = timeline.filter(pl.col("cycle_source") == "request", ~pl.col("idle_after"))
    assert busy["cycle_us"].max() < 2 * run.truth_steps["law_us"].max()


@pytest.mark.parametrize("ahead", [False, True])
def test_scheduling_a_step_ahead_is_seen(ahead):
    counted = count_steps(stock_requests(_run(), ahead=ahead), LIMITS)
    lags = execution_lags(counted.starts, events_of(counted.requests))
    assert lags["execution_lag_steps"].to_list() == [int(ahead)]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("ahead", [False, True])
def test_long_requests_that_all_come_at_once_are_counted(ahead):
    """Chunks of the prompts before take room in the steps of the next ones, and every request overlaps most of the
    others."""
    lengths = {
        "prompt_tokens": LengthMix(((1.0, 900.0, 0.6),)),
        "output_tokens": LengthMix(((1.0, 500.0, 0.2),), maximum=900),
    }
    run = _run(60.0, num_blocks=20_000, prefix_fraction=0.0, **lengths)
    counted = _beside_truth(run, count_steps(stock_requests(run, ahead=ahead), LIMITS))
    assert counted.height == 200
    shift = counted["first_token_step"] - counted["true_first"]
    off = counted["finished_step"] - counted["true_last"] - shift
    assert (off == 0).mean() > 0.95
    assert off.abs().max() <= 1


@pytest.mark.slow
def test_a_preempted_request_keeps_the_other_counts_exact():
    run = _run(num_blocks=450, requests=150, rate=9.0)
    preempted = run.truth_requests.filter(pl.col("num_preemptions") > 0)["request_id"]
    assert 1 <= len(preempted) <= 5
    counted = _beside_truth(run, count_steps(stock_requests(run), LIMITS))
    others = counted.filter(~pl.col("request_id").is_in(preempted.to_list()))
    took = others["finished_step"] - others["first_token_step"]
    assert (took == others["true_last"] - others["true_first"]).mean() > 0.9


@pytest.mark.slow
def test_batches_are_right_where_half_the_requests_are_preempted():
    run = _run(14.0, 400, num_blocks=1200, output_tokens=LengthMix(((1.0, 400.0, 0.2),)))
    assert (run.truth_requests["num_preemptions"] > 0).mean() > 0.4
    counted = count_steps(stock_requests(run), LIMITS)
    beside = _beside_truth(run, counted)
    took, true = (beside[last] - beside[first] for last, first in _TOOK)
    assert ((took / true - 1).abs() < 0.025).mean() > 0.9
    steps = _timeline(counted).drop_nulls("ts_start_ns").sort("ts_start_ns")
    truth = run.truth_steps.select(pl.col("start_ns", *BATCH).name.suffix("_true")).sort("start_ns_true")
    both = steps.join_asof(truth, left_on="ts_start_ns", right_on="start_ns_true", strategy="nearest")
    both = both.group_by(pl.int_range(pl.len()) // 20).agg(pl.col("^(num_decode|context).*$").mean())
    for name in ("num_decode_reqs", "context_tokens"):
        assert ((both[name] / both[f"{name}_true"] - 1).abs() < 0.05).all(), name


_TOOK = (("finished_step", "first_token_step"), ("true_last", "true_first"))


@pytest.mark.slow
def test_steps_at_the_ends_of_a_cut_recording_have_no_time():
    """Requests that ran on when it ended are not in it, and those that had ended before it began."""
    run = _run()
    whole = stock_requests(run)
    end = pl.col("arrival_ns") + pl.col("e2e_us") * 1e3
    low, high = whole.select(low=end.quantile(0.2), high=end.quantile(0.8)).row(0)
    cut = whole.filter(end.is_between(low, high))
    counted = count_steps(cut, LIMITS)
    lost = whole.join(cut, on="request_id", how="anti").select(begin="arrival_ns", end=end)
    known = counted.starts.filter(pl.col("ts_start_ns").is_between(low, high))
    assert known.height == counted.starts.height > 100
    # Few of the missing requests still ran at a known start: the longest of all.
    still = lost.filter((pl.col("begin") < counted.starts["ts_start_ns"].max()) & (pl.col("end") > high))
    assert still.height <= 3


def test_requests_ahead_are_counted_when_one_is_queued():
    run = synth(SynthOptions(rate_per_s=30.0, requests=150, seed=2, phases=STEADY, abort_fraction=0.0, max_num_seqs=8))
    limits = EngineLimits(max_num_batched_tokens=2048, max_num_seqs=8)
    counted = count_steps(stock_requests(run), limits)
    events = events_of(counted.requests)
    empty = (schema.STEPS.empty(), schema.REQUEST_SNAPSHOTS.empty())
    timeline = build_timeline(*empty, events, limits, journeys_complete=True, known_starts=counted.starts)
    both = queue_state(events, timeline, limits).join(
        run.truth_requests.select("request_id", "requests_ahead", true_running="running_reqs"),
        on="request_id",
    )
    # Of what happens within 0.1 ms the order is not known.
    assert ((both["waiting_ahead"] - both["requests_ahead"]).abs() <= 1).mean() > 0.97
    assert ((both["running_reqs"] - both["true_running"]).abs() <= 1).mean() > 0.97
