"""Build the timeline: one row per engine step, from summaries, snapshots and journeys together.

A step has a summary, or follows from the events of the requests in it. Each row has the start of the step, its
composition, its cycle (to the next anchored start) and whether that cycle has idle time.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracefit.tables import schema
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import ADJACENT, INTERVAL, REQUEST_SOURCE, SOURCES
from tracefit.timeline.anchors import execution_lags, step_starts
from tracefit.timeline.composition import EngineLimits, compose
from tracefit.timeline.engines import StepAxis, bincount_at, position, step_axis
from tracefit.timeline.logged_steps import is_logged, sources_of_intervals
from tracefit.timeline.segments import core_events, running_segments, waiting_segments, with_steps_by_time

_SUMMARY_COLUMNS = tuple(
    name
    for name in schema.TIMELINE.names
    if name in schema.STEPS.names and name not in (*ENGINE, "step_id", "ts_start_ns")
)
"""Columns that the timeline takes from a step's summary. The start is derived from more than summaries."""

_COMPARED = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens")
"""Columns that both summaries and journeys give, and that must agree."""

_CONTEXT_COLUMNS = ("context_tokens", "prefill_context_tokens")


def build_timeline(
    steps: pl.DataFrame,
    snapshots: pl.DataFrame,
    journeys: pl.DataFrame,
    limits: EngineLimits | None = None,
    *,
    journeys_complete: bool = False,
    known_starts: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Build the `timeline` table.

    With complete journeys, every step between the first and the last has a row, with the composition that follows from
    them; a summary or a full set of snapshots takes precedence. Without complete journeys, only sampled steps have
    rows.

    `cycle_us` is the mean cycle from the start of the step to the next anchored start, `interval_steps` later: one step
    (`adjacent`, between two summaries), or an `interval` when a start comes from a journey event or steps in between
    are not anchored, or `request` when both were counted from requests. `idle_after` says that one of these steps left
    no request running or waiting, so that the time includes idle time.

    Args:
        steps: The `steps` table.
        snapshots: The `request_snapshots` table.
        journeys: The `journey_events` table.
        limits: Limits of the scheduler.
        journeys_complete: Whether every request has a journey.
        known_starts: Starts of steps that were counted from requests (`count_steps`), whose events are then in
            `journeys`, or those of a log (`log_clock`).

    Returns:
        The `timeline` table.
    """
    limits = limits or EngineLimits()
    axis = step_axis(steps, snapshots, journeys)
    lags = execution_lags(steps if known_starts is None else known_starts, journeys)
    # If several summaries have the id of a step, the first in time counts.
    summaries = _positioned(axis, steps).unique("position", keep="first", maintain_order=True)
    snapshots = _positioned(axis, snapshots)
    core = axis.locate(core_events(journeys)).join(lags, on=SERVER, how="left", maintain_order="left")
    # A server with too few events for a lag is taken to schedule and execute in the same cycle.
    core = with_steps_by_time(core.with_columns(pl.col("execution_lag_steps").fill_null(0)), summaries)
    # Sampled journeys lack some requests of a batch, so that the batch stays unknown.
    rows = axis.frame()
    if journeys_complete and axis.size:
        rows = pl.concat([rows, _inferred(axis, core, snapshots, limits)], how="horizontal")
    rows = _with_usage(_with_summaries(rows, summaries, snapshots, limits), limits)
    rows = rows.with_columns(context_estimated=pl.lit(value=False))
    if journeys.is_empty():
        rows = _with_estimated_contexts(rows, limits.block_size)
    if known_starts is None:
        starts = step_starts(summaries, core).with_columns(pause=pl.lit(value=False))
    else:
        starts = _positioned(axis, known_starts)
        rows = rows.with_columns(pl.col("composition_source").replace("journey", "request"))
    starts = starts.select("position", "start_source", "ts_start_ns", "start_sd_us", "pause")
    rows = rows.join(starts, on="position", how="left", maintain_order="left")
    has_facts = pl.col("ts_start_ns").is_not_null() | pl.col("composition_source").is_not_null()
    return schema.TIMELINE.conform(axis.name(_with_cycles(rows.filter(has_facts & ~pl.col("is_gap")))))


def _positioned(axis: StepAxis, rows: pl.DataFrame) -> pl.DataFrame:
    return axis.locate(rows).with_columns(position=position(pl.col("step_id"))).drop_nulls("position")


def _inferred(axis: StepAxis, core: pl.DataFrame, snapshots: pl.DataFrame, limits: EngineLimits) -> pl.DataFrame:
    """Return the composition of every position from the journeys, in columns prefixed `journey.`."""
    running = running_segments(core, _cached(snapshots))
    composed = compose(axis, running, waiting_segments(core), limits)
    lost = core.filter(pl.col("event") == "PREEMPTED").select(at=position(pl.col("step_id"))).drop_nulls()
    preempted = bincount_at(axis.size, lost["at"].to_numpy(), np.ones(lost.height)).astype(np.int64)
    composed = composed.with_columns(num_preempted=preempted)
    return composed.rename(lambda name: f"journey.{name}")


def _cached(snapshots: pl.DataFrame) -> pl.DataFrame:
    """Return the cached prompt tokens of each request whose snapshots state them."""
    hits = pl.col("num_prompt_tokens") - pl.col("effective_prompt_len")
    shown = snapshots.filter(pl.col("effective_prompt_len").is_not_null()).sort("step_id")
    return shown.group_by(*ENGINE, "request_id").agg(cached_tokens=hits.first())


def _with_summaries(
    rows: pl.DataFrame, summaries: pl.DataFrame, snapshots: pl.DataFrame, limits: EngineLimits
) -> pl.DataFrame:
    """Add summaries and full snapshots, which take precedence over the composition from the journeys."""
    steps = summaries.select(
        "position",
        *_SUMMARY_COLUMNS,
        # A log has only the share of used blocks.
        kv_blocks_used=pl.coalesce(
            pl.col("kv_blocks_total") - pl.col("kv_blocks_free"),
            (pl.col("kv_usage_ratio") * pl.lit(limits.num_blocks, pl.Int64)).round().cast(pl.Int64),
        ),
        has_summary=pl.lit(value=True),
    )
    shown = _contexts(summaries, snapshots)
    joined = rows.join(steps, on="position", how="left", maintain_order="left")
    # The contexts of a recorded step are in its record.
    joined = joined.join(shown, on="position", how="left", maintain_order="left", suffix="_shown")
    joined = joined.with_columns(pl.coalesce(name, f"{name}_shown").alias(name) for name in _CONTEXT_COLUMNS)
    kind = pl.when(pl.col("cycle_source").is_null()).then(pl.lit("summary")).otherwise("cycle_source")
    source = pl.when("has_summary").then(kind)
    columns = joined.columns
    inferred = [name.removeprefix("journey.") for name in columns if name.startswith("journey.")]
    if not inferred:
        return joined.with_columns(composition_source=source)
    # A summary comes first; journeys fill in the steps without one.
    return joined.with_columns(*_agreement(), _shared_blocks(), *_logged_contexts()).with_columns(
        *(pl.coalesce(c for c in (name, f"journey.{name}") if c in columns).alias(name) for name in inferred),
        composition_source=source.otherwise(pl.lit("journey")),
    )


def _logged_contexts() -> list[pl.Expr]:
    """Return the journeys' context tokens; on logged steps, only where both count as many requests.

    The log counts the prompt tokens that are computed; the other prompt tokens of a request come from the prefix cache.
    """
    logged = is_logged()
    counts = {"context_tokens": "num_decode_reqs", "prefill_context_tokens": "num_prefill_reqs"}
    cached = (pl.col("journey.prefill_tokens") - pl.col("prefill_tokens")).clip(lower_bound=0)
    added = {"context_tokens": pl.lit(0), "prefill_context_tokens": pl.when(logged).then(cached).otherwise(0)}
    return [
        pl.when(~logged | (pl.col(f"journey.{count}") == pl.col(count)))
        .then(pl.col(f"journey.{name}") + added[name])
        .alias(f"journey.{name}")
        for name, count in counts.items()
    ]


def _agreement() -> list[pl.Expr]:
    """Return columns that compare the journeys' composition with the summaries' where a step has both."""

    def error(*names: str) -> pl.Expr:
        return pl.sum_horizontal((pl.col(f"journey.{n}") - pl.col(n) for n in names), ignore_nulls=False)

    equal = pl.all_horizontal(pl.col(f"journey.{n}") == pl.col(n) for n in _COMPARED)
    return [
        equal.alias("journey_agrees"),
        error("num_prefill_reqs", "num_decode_reqs").alias("journey_error_reqs"),
        error("prefill_tokens", "decode_tokens").alias("journey_error_tokens"),
    ]


def _shared_blocks() -> pl.Expr:
    """Return used KV blocks from the journeys, corrected for the blocks that requests share.

    Journeys do not show shared blocks, so that the last summary's number of them is carried forward.
    """
    counted = pl.col("journey.kv_blocks_used")
    used = counted + (pl.col("kv_blocks_used") - counted).forward_fill().over("engine").fill_null(0)
    # If fewer blocks are in use than were shared, the number in the summary is out of date.
    used = pl.when((counted == 0) | (used >= 0)).then(used.clip(lower_bound=0))
    return used.alias("journey.kv_blocks_used")


def _with_usage(rows: pl.DataFrame, limits: EngineLimits) -> pl.DataFrame:
    """Fill in the KV usage of steps without a summary from the blocks of their requests."""
    # A server's total is constant: one summary gives that of all steps.
    total = pl.coalesce(pl.col("kv_blocks_total").max().over("engine"), pl.lit(limits.num_blocks, pl.Int64))
    usage = (pl.col("kv_blocks_used") / total).clip(0.0, 1.0)
    return rows.with_columns(kv_usage_ratio=pl.coalesce("kv_usage_ratio", usage), kv_blocks_total=total)


def _with_estimated_contexts(rows: pl.DataFrame, block_size: int) -> pl.DataFrame:
    """Estimate the missing contexts of summarised steps: the slots of the KV blocks in use, less those of other tokens.

    A request fills half of its last block on average. Blocks that requests share count once, and earlier chunks of a
    prompt
    count as context of decodes: the estimate is right where both are rare.
    """
    requests = pl.col("num_prefill_reqs") + pl.col("num_decode_reqs")
    new = pl.col("prefill_tokens") + pl.col("decode_tokens")
    slots = pl.col("kv_blocks_used") * block_size - requests * (block_size - 1) / 2
    estimate = pl.when(pl.col("num_decode_reqs") == 0).then(0).otherwise((slots - new).clip(lower_bound=0))
    is_missing = pl.col("context_tokens").is_null() & (pl.col("composition_source") == "summary")
    # The sum is null if the summary lacks one of its columns.
    estimable = is_missing & pl.col("kv_blocks_used").is_not_null() & (requests + new).is_not_null()
    return rows.with_columns(
        context_tokens=pl.when(estimable).then(estimate.round().cast(pl.Int64)).otherwise("context_tokens"),
        context_estimated=estimable.fill_null(value=False),
    )


def _contexts(steps: pl.DataFrame, snapshots: pl.DataFrame) -> pl.DataFrame:
    """Return the KV tokens that each step reads, for steps whose every running request has a snapshot."""
    scheduled, before = pl.col("scheduled_tokens") > 0, pl.col("num_computed_tokens")
    has_output = pl.col("num_output_tokens") > 0
    sums = snapshots.group_by("position").agg(
        shown=pl.len(),
        context_tokens=before.filter(scheduled & has_output).sum(),
        prefill_context_tokens=before.filter(scheduled & ~has_output).sum(),
    )
    whole = sums.join(steps.select("position", "running_depth"), on="position", how="inner")
    return whole.filter(pl.col("shown") == pl.col("running_depth")).drop("shown", "running_depth")


def _with_cycles(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the cycles between consecutive starts, and whether the engine was idle in them; recorded cycles stay."""
    rows = rows.rename({"cycle_us": "recorded_us", "cycle_source": "recorded_source"})
    idle = (pl.col("running_depth") == 0) & (pl.col("waiting_depth") == 0)
    started = pl.col("ts_start_ns").is_not_null()
    ordered = rows.with_columns(idle=idle, interval=started.cum_sum())
    follows = pl.col("step_id").shift(1) == pl.col("step_id") - 1
    same_engine = pl.col("engine").shift(1) == pl.col("engine")
    ordered = ordered.with_columns(idle_before=pl.when(follows & same_engine).then(pl.col("idle").shift(1)))
    # By engine: unanchored steps of the next engine would join the last interval of this one.
    interval = ["engine", "interval"]
    # The next start of the same engine, one step later or many.
    nexts = {c: pl.col(c).shift(-1) for c in ("ts_start_ns", "step_id", "start_source", "start_sd_us")}
    count = nexts["step_id"] - pl.col("step_id")
    spans = ordered.filter(started).select(
        *interval,
        "position",
        "start_source",
        last_of_engine=pl.col("engine").shift(-1) != pl.col("engine"),
        interval_steps=count,
        cycle_us=(nexts["ts_start_ns"] - pl.col("ts_start_ns")) / 1e3 / count,
        exact=(pl.col("start_source") == "summary") & (nexts["start_source"] == "summary"),
        cycle_sd_us=(pl.col("start_sd_us") ** 2 + nexts["start_sd_us"] ** 2).sqrt() / count,
    )
    members = ordered.group_by(interval).agg(
        members=pl.len(),
        composed=pl.col("running_depth").is_not_null().all(),
        idle_after=pl.col("idle").any() | pl.col("pause").any(),
    )
    spans = spans.filter(~pl.col("last_of_engine")).join(members, on=interval, how="left")
    # If a step between two starts has no composition, the work in that time is unknown.
    full = (pl.col("members") == pl.col("interval_steps")) & pl.col("composed") & (pl.col("cycle_us") > 0)
    single = pl.col("interval_steps") == 1
    means = {REQUEST_SOURCE.name: REQUEST_SOURCE.name, **sources_of_intervals()}
    source = (
        pl.when(pl.col("exact") & single)
        .then(pl.lit(ADJACENT.name))
        .when(is_logged("start_source") & single)
        .then("start_source")
        .otherwise(pl.col("start_source").replace_strict(means, default=INTERVAL.name))
    )
    spans = spans.filter(full).select(
        "position", "interval_steps", "cycle_us", "cycle_sd_us", "idle_after", cycle_source=source
    )
    joined = ordered.join(spans, on="position", how="left", maintain_order="left")
    is_recorded = pl.col("recorded_us").is_not_null()
    return joined.with_columns(
        idle_after=pl.coalesce("idle_after", "idle"),
        cycle_us=pl.coalesce("recorded_us", "cycle_us"),
        cycle_source=pl.when(is_recorded).then("recorded_source").otherwise("cycle_source"),
        interval_steps=pl.when(is_recorded).then(1).otherwise("interval_steps"),
        cycle_sd_us=pl.when(is_recorded).then(_stated_sd_us()).otherwise("cycle_sd_us"),
    )


def _stated_sd_us() -> pl.Expr:
    """Return the standard deviation of the time in a record; that of a logged step, which agrees with the clock, is not
    known.
    """
    sd_us = {name: source.sd_us for name, source in SOURCES.items() if source.is_stated and source.sd_us}
    if not sd_us:
        return pl.lit(0.0)
    return pl.col("recorded_source").replace_strict(sd_us, default=0.0, return_dtype=pl.Float64)
