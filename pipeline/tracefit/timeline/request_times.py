"""Times of a request that follow from its steps: scheduling, execution, and the gaps between its tokens."""

from __future__ import annotations

import polars as pl

from tracefit.statistics import divided, percentile_expr, sum_if_all_known
from tracefit.tables.schema import ENGINE, REQUEST, SERVER
from tracefit.timeline.anchors import execution_lags
from tracefit.timeline.segments import core_events, following
from tracefit.timeline.step_sums import StepSums


def with_step_times(
    requests: pl.DataFrame, timeline: pl.DataFrame, journeys: pl.DataFrame, snapshots: pl.DataFrame
) -> pl.DataFrame:
    """Fill `steps`, `steps_timed`, `scheduler_us`, `model_execute_us`, `execute_ratio` and `itl_p99_us`.

    A request is in the steps from each SCHEDULED to the step before PREEMPTED, or to FINISHED. Its scheduling time is
    the sum of `step.duration_us`; steps without a sample count as the mean of the sampled ones, and `steps_timed`
    is the share of sampled steps. The rest of the time from the first to the last of its steps is execution, including
    sampling, synchronization and the processing of outputs between two steps. Where scheduling runs a step ahead of
    execution, scheduling is not subtracted, and the steps begin to execute a step later.

    Values of spans are kept. A value is null if no step of the request is recorded or the request has not finished;
    scheduling and execution also if the durations exceed the request's time in the engine, as those of whole steps do.

    Args:
        requests: The `requests` table.
        timeline: The `timeline` table of the same runs.
        journeys: Their `journey_events`.
        snapshots: Their `request_snapshots`.
    """
    times = _step_times(_stays(journeys), timeline, execution_lags(timeline, journeys))
    gaps = _token_gaps(requests, timeline, snapshots)
    names = ("steps", "steps_timed", "scheduler_us", "model_execute_us", "itl_p99_us")
    joined = requests.join(times, on=REQUEST, how="left", suffix="_computed", maintain_order="left")
    joined = joined.join(gaps, on=REQUEST, how="left", suffix="_computed", maintain_order="left")
    whole = pl.col("finished_ns").is_not_null()
    filled = joined.with_columns(pl.coalesce(c, pl.when(whole).then(f"{c}_computed")).alias(c) for c in names)
    share = pl.col("model_execute_us") / pl.when(pl.col("e2e_us") > 0).then("e2e_us")
    return filled.with_columns(execute_ratio=share).select(requests.columns)


def _stays(journeys: pl.DataFrame) -> pl.DataFrame:
    """Return each request's segments of steps: first_step, last_step, begin_ns, end_ns (null if the next step's start
    is the end).
    """
    marks = core_events(journeys).filter(
        pl.col("event").is_in(["SCHEDULED", "PREEMPTED", "FINISHED"]), pl.col("step_id").is_not_null()
    )
    stays = marks.with_columns(map(following, ("event", "step_id", "ts_ns")))
    preempted = pl.col("next_event") == "PREEMPTED"
    stays = stays.filter(pl.col("event") == "SCHEDULED").select(
        *ENGINE,
        "trace_id",
        core_request_id="request_id",
        end_event="next_event",
        first_step="step_id",
        last_step=pl.col("next_step_id") - preempted.cast(pl.Int64),
        begin_ns="ts_ns",
        end_ns=pl.when(~preempted).then("next_ts_ns"),
    )
    # A request that one step scheduled and preempted was in no step.
    return stays.filter(pl.col("last_step").is_null() | (pl.col("last_step") >= pl.col("first_step")))


def _step_times(stays: pl.DataFrame, timeline: pl.DataFrame, lags: pl.DataFrame) -> pl.DataFrame:
    lag = lags.select(*SERVER, lag="execution_lag_steps")
    rows = stays.join(lag, on=SERVER, how="left").with_columns(pl.col("lag").fill_null(0))
    rows = rows.with_columns(
        starts=pl.col("first_step") + pl.col("lag"),
        # The last step before a preemption ends where the next one starts.
        ends=pl.col("last_step") + 1 + pl.col("lag"),
    )
    before, last = pl.col("first_step") - 1, pl.col("last_step")
    rows = rows.hstack(StepSums(timeline, "duration_us").between(rows, before, last, missing="skipped"))
    starts = timeline.select(*ENGINE, "step_id", "ts_start_ns")
    for step in ("starts", "ends"):
        at = starts.rename({"step_id": step, "ts_start_ns": f"{step}_ns"})
        rows = rows.join(at, on=[*ENGINE, step], how="left")
    ahead = pl.col("lag") > 0
    begin = pl.coalesce("starts_ns", pl.when(~ahead).then("begin_ns"))
    whole = ~pl.any_horizontal(pl.col("end_event", "last_step").is_null())
    rows = rows.with_columns(
        steps=pl.when(whole).then(pl.col("last_step") - pl.col("first_step") + 1),
        engine_us=divided(pl.coalesce("end_ns", "ends_ns") - begin, 1e3),
    )
    sums = rows.group_by(REQUEST).agg(
        steps=sum_if_all_known(pl.col("steps")),
        sampled=pl.col("duration_us_known").sum(),
        total=pl.col("duration_us").sum(),
        engine_us=sum_if_all_known(pl.col("engine_us")),
        lag=pl.col("lag").first(),
    )
    timed = (pl.col("sampled") > 0) & (pl.col("steps") > 0)
    scheduler = pl.when(timed).then(pl.col("total") * pl.col("steps") / pl.col("sampled"))
    # Scheduling that runs ahead of execution costs a request no time.
    taken = pl.when(pl.col("lag") > 0).then(pl.when(timed).then(0.0)).otherwise(scheduler)
    # Durations beyond a request's time in the engine are times of whole steps (`step.duration_us` of such a server is
    # its step time), whose share of scheduling is unknown.
    is_scheduling = (taken <= pl.col("engine_us")).fill_null(value=True)
    return sums.select(
        *REQUEST,
        "steps",
        steps_timed=pl.when(pl.col("steps") > 0).then(pl.col("sampled") / pl.col("steps")),
        scheduler_us=pl.when(is_scheduling).then(scheduler),
        model_execute_us=pl.when(is_scheduling).then(pl.col("engine_us") - taken),
    )


def _token_gaps(requests: pl.DataFrame, timeline: pl.DataFrame, snapshots: pl.DataFrame) -> pl.DataFrame:
    """Return the 99th percentile of the times between a request's tokens, for requests whose snapshots show every
    token.

    A token is out by the start of the first step whose snapshot counts it; the first and the last token have events.
    """
    several = pl.col("last_token_ns").is_not_null() & (pl.col("output_tokens") > 1)
    ends = requests.filter(several & pl.col("first_token_ns").is_not_null())
    facts = ends.select(*REQUEST, "first_token_ns", "last_token_ns", "output_tokens")
    starts = timeline.select(*ENGINE, "step_id", ts_ns="ts_start_ns").drop_nulls("ts_ns")
    counted = snapshots.select(*ENGINE, "step_id", core_request_id="request_id", tokens="num_output_tokens")
    counted = counted.join(starts, on=[*ENGINE, "step_id"]).join(facts, on=[*ENGINE, "core_request_id"])
    counted = counted.filter(pl.col("tokens").is_between(2, pl.col("output_tokens") - 1))
    events = ((pl.lit(1, pl.Int64), "first_token_ns"), (pl.col("output_tokens"), "last_token_ns"))
    edges = [facts.select(*REQUEST, "output_tokens", tokens=tokens, ts_ns=ts) for tokens, ts in events]
    points = pl.concat([counted.select(edges[0].columns), *edges])
    out = points.group_by(*REQUEST, "output_tokens", "tokens").agg(pl.col("ts_ns").min()).sort("tokens")
    gap = divided(pl.col("ts_ns").diff().slice(1), 1e3)
    whole = out.group_by(REQUEST, maintain_order=True).agg(
        points=pl.len(),
        output_tokens=pl.col("output_tokens").first(),
        itl_p99_us=percentile_expr(gap, 99),
    )
    # A missing snapshot would join two gaps.
    return whole.filter(pl.col("points") == pl.col("output_tokens")).select(*REQUEST, "itl_p99_us")
