"""The step clock: cycle times from the starts of consecutive steps, by hand."""

from __future__ import annotations

import polars as pl
import pytest

from together import together
from tracefit.tables import schema
from tracefit.tables.sources import SOURCES, CycleSource
from tracefit.timeline import build_timeline, execution_lags


def _adjacent(table):
    rows = table("timeline").filter(pl.col("cycle_source") == "adjacent")
    return dict(rows.select("step_id", "cycle_us").rows())


def _row(table, step):
    return table("timeline").row(by_predicate=pl.col("step_id") == step, named=True)


@together
def test_a_cycle_is_start_to_start_of_consecutive_steps(traces):
    starts = {1: 0, 2: 9470, 3: 19_000, 5: 40_000, 6: 50_500}
    table = yield traces.steps(*(traces.summary(step, at) for step, at in starts.items()))
    assert _adjacent(table) == {1: 9470.0, 2: 9530.0, 5: 10_500.0}
    assert _row(table, 3)["cycle_us"] is None, "nobody knows step 4"
    last = _row(table, 6)
    assert (last["ts_start_ns"], last["cycle_us"], last["cycle_source"]) == (50_500_000, None, None)


@together
def test_a_duration_is_no_cycle(traces):
    table = yield traces.steps(traces.summary(1, 0, duration_us=91), traces.summary(2, 9470))
    assert (_row(table, 1)["cycle_us"], _row(table, 1)["duration_us"]) == (9470.0, 91)


@together
def test_cycles_do_not_reach_over_a_restart(traces):
    traces.steps(traces.summary(1, 0), traces.summary(2, 1000))
    traces.steps(traces.summary(1, 500_000), traces.summary(2, 500_900))
    rows = (yield traces)("timeline").filter(pl.col("cycle_source") == "adjacent")
    assert rows.select("epoch", "step_id", "cycle_us").rows() == [(0, 1, 1000.0), (1, 1, 900.0)]


@together
def test_cycles_do_not_reach_over_servers(traces):
    traces.steps(traces.summary(1, 0), traces.summary(2, 1000), server="a")
    traces.steps(traces.summary(3, 2000), traces.summary(4, 2900), server="b")
    assert _adjacent((yield traces)) == {1: 1000.0, 3: 900.0}


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(("running", "waiting", "idle"), [(0, 0, True), (1, 0, False), (0, 1, False), (3, 2, False)])
@together
def test_a_step_that_leaves_no_request_ends_in_idle_time(traces, running, waiting, idle):
    first = traces.summary(1, 0, running_depth=running, waiting_depth=waiting)
    table = yield traces.steps(first, traces.summary(2, 1_000_000), traces.summary(3, 1_010_000))
    assert (_row(table, 1)["idle_after"], _row(table, 2)["idle_before"]) == (idle, idle)
    assert not _row(table, 3)["idle_before"]


@together
def test_blocks_in_use_are_total_less_free(traces):
    traces.steps(traces.summary(1, 0, blocks_total_gpu=320, blocks_free_gpu=19))
    assert _row((yield traces), 1)["kv_blocks_used"] == 301


@together
def test_context_is_the_cache_read_by_scheduled_requests(traces):
    shown = (
        traces.snapshot(1, 200, "a", num_computed_tokens=70),
        traces.snapshot(1, 200, "b", num_computed_tokens=30),
        traces.snapshot(1, 200, "not-scheduled", num_computed_tokens=500, scheduled_tokens_this_step=0),
        traces.snapshot(1, 200, "c", phase="PREFILL", num_computed_tokens=64, num_output_tokens=0),
    )
    facts = {"running_depth": 4, "num_decode_reqs": 2, "num_prefill_reqs": 1}
    row = _row((yield traces.steps(traces.summary(1, 0, **facts), *shown)), 1)
    assert (row["context_tokens"], row["prefill_context_tokens"]) == (100, 64)


@together
def test_context_is_estimated_where_a_snapshot_is_missing(traces):
    first = traces.summary(1, 0, running_depth=2, num_decode_reqs=2)
    table = yield traces.steps(first, traces.snapshot(1, 200, "a"))
    row = _row(table, 1)
    # Without journeys, that is; the snapshot of one of two requests would give half of it.
    assert row["context_estimated"]
    assert row["context_tokens"] == row["kv_blocks_used"] * 16 - 2 * 7.5 - 1


def _served(traces, *, late):
    """Forty steps of 1,000 us and ten requests whose updates come `late` us after the next step began."""
    traces.steps(*(traces.summary(step, 1000.0 * step) for step in range(1, 41)))
    for number in range(1, 11):
        step = 3 * number
        ends = (1000.0 * (step + 1) + late, 1000.0 * (step + 5) + late)
        traces.request(number, 1000.0 * step - 1190, step=step, tokens_at=ends)
    return traces


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("late", "lag"), [(-30, 0), (500, 1), (970, 1)])
@together
def test_updates_well_after_the_next_start_tell_scheduling_ahead(traces, late, lag):
    table = yield _served(traces, late=late)
    lags = execution_lags(table("timeline"), table("journey_events"))
    assert lags.drop("run_id").rows() == [("engine", lag)]


@together
def test_a_few_updates_do_not_show_scheduling_ahead(traces):
    traces.steps(*(traces.summary(step, 1000.0 * step) for step in range(1, 11)))
    table = yield traces.request(1, 1810, step=3, tokens_at=(4970, 8970))
    assert execution_lags(table("timeline"), table("journey_events")).height == 0


@pytest.mark.slow
@together
def test_aborts_do_not_count_as_updates(traces):
    traces.steps(*(traces.summary(step, 1000.0 * step) for step in range(1, 41)))
    for step in range(2, 32):
        aborted = ("FINISHED", 1000.0 * (step + 1) + 500, step, {"finish.status": "aborted"})
        traces.core(step, [("QUEUED", 1000.0 * step - 10, step - 1), aborted])
    table = yield traces
    assert execution_lags(table("timeline"), table("journey_events")).height == 0


def test_a_recorded_time_has_the_error_that_its_source_declares(monkeypatch):
    monkeypatch.setitem(SOURCES, "ticks", CycleSource(name="ticks", sd_us=3.0))
    engine = {"run_id": "r", "server": "s", "epoch": 0, "running_depth": 1, "waiting_depth": 0}
    rows = [
        {**engine, "step_id": step, "cycle_us": 70.0, "cycle_source": source}
        for step, source in ((1, "ticks"), (2, "fpm"))
    ]
    steps = schema.STEPS.shape(pl.DataFrame(rows))
    built = build_timeline(steps, schema.REQUEST_SNAPSHOTS.empty(), schema.JOURNEY_EVENTS.empty())
    columns = ("cycle_us", "cycle_source", "cycle_sd_us", "composition_source")
    assert built.select(columns).rows() == [(70.0, "ticks", 3.0, "ticks"), (70.0, "fpm", 0.0, "fpm")]
