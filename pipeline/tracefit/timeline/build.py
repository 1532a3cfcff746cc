"""The step clock: true step times from the starts of consecutive steps.

`step.duration_us` is the time inside `schedule()`. The time a step takes is the start of the next step less its own,
as long as the engine stayed busy; that difference needs two consecutive steps in the sample.
"""

from __future__ import annotations

import polars as pl

from tracefit.tables import schema

ENGINE = ["run_id", "server", "epoch"]

_LAG_SHARE = 0.25
"""An update that comes later than a quarter of a cycle after the next step began is the update of a step that was
still executing then: scheduling runs ahead of execution."""

_LAG_EVENTS = 20


def build_timeline(steps: pl.DataFrame, snapshots: pl.DataFrame) -> pl.DataFrame:
    """Build the `timeline` table from the sampled steps.

    `cycle_us` is known where the next step is in the sample too. `idle_after` says that the step left nothing
    running and nothing waiting, so that its cycle holds idle time.

    Args:
        steps: The `steps` table.
        snapshots: The `request_snapshots` table; context tokens come from steps whose every running request has one.

    Returns:
        The `timeline` table, one row per known step.
    """
    ordered = steps.sort(*ENGINE, "step_id")
    next_step, next_start = (pl.col(c).shift(-1).over(ENGINE) for c in ("step_id", "ts_start_ns"))
    last_step = pl.col("step_id").shift(1).over(ENGINE)
    idle = (pl.col("running_depth") == 0) & (pl.col("waiting_depth") == 0)
    adjacent = (next_step == pl.col("step_id") + 1) & (next_start > pl.col("ts_start_ns"))
    rows = ordered.with_columns(
        cycle_us=pl.when(adjacent).then((next_start - pl.col("ts_start_ns")) / 1e3),
        idle_after=idle,
        kv_blocks_used=pl.col("kv_blocks_total") - pl.col("kv_blocks_free"),
        composition_source=pl.lit("summary"),
    ).with_columns(
        cycle_source=pl.when(pl.col("cycle_us").is_not_null()).then(pl.lit("adjacent")),
        interval_steps=pl.when(pl.col("cycle_us").is_not_null()).then(1),
        idle_before=pl.when(last_step == pl.col("step_id") - 1).then(
            pl.col("idle_after").shift(1).over(ENGINE)
        ),
    )
    return schema.TIMELINE.conform(
        rows.join(_contexts(steps, snapshots), on=[*ENGINE, "step_id"], how="left")
    )


def _contexts(steps: pl.DataFrame, snapshots: pl.DataFrame) -> pl.DataFrame:
    """KV tokens read per step, from steps where every running request has a snapshot."""
    step = [*ENGINE, "step_id"]
    scheduled, before = pl.col("scheduled_tokens") > 0, pl.col("num_computed_tokens")
    decoding = pl.col("phase") == "DECODE"
    sums = snapshots.group_by(step).agg(
        shown=pl.len(),
        context_tokens=before.filter(scheduled & decoding).sum(),
        prefill_context_tokens=before.filter(scheduled & ~decoding).sum(),
    )
    whole = sums.join(steps.select(*step, "running_depth"), on=step, how="inner")
    return whole.filter(pl.col("shown") == pl.col("running_depth")).drop("shown", "running_depth")


def execution_lags(timeline: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Find engines that schedule a step while the one before it executes (asynchronous scheduling).

    There, a request's FIRST_TOKEN or FINISHED of step k is stamped well after step k+1 began, because step k
    executes in the period between the starts of k+1 and k+2. Composition k then explains the cycle of step k+1.

    Args:
        timeline: The `timeline` table.
        journeys: The `journey_events` table.

    Returns:
        One row per (run_id, server) that has enough events to tell: `execution_lag_steps`, 0 or 1.
    """
    nexts = timeline.select(
        *ENGINE, "cycle_us", pl.col("step_id"), next_start_ns=pl.col("ts_start_ns") + pl.col("cycle_us") * 1e3
    ).drop_nulls()
    updates = journeys.filter(
        pl.col("event").is_in(["FIRST_TOKEN", "FINISHED"])
        & (pl.col("finish_status") != "aborted").fill_null(value=True)
    )
    late = updates.join(nexts, on=[*ENGINE, "step_id"], how="inner").with_columns(
        lateness=(pl.col("ts_ns") - pl.col("next_start_ns")) / 1e3 / pl.col("cycle_us")
    )
    return (
        late.group_by("run_id", "server")
        .agg(events=pl.len(), lateness=pl.col("lateness").median())
        .filter(pl.col("events") >= _LAG_EVENTS)
        .select("run_id", "server", execution_lag_steps=(pl.col("lateness") > _LAG_SHARE).cast(pl.Int64))
    )
