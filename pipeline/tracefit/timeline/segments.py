"""Segments of a request's life in the engine: waiting in the queue, or running from SCHEDULED to its end.

A segment of running computes a prompt (and the output so far, after a preemption), then decodes a token per step.
"""

from __future__ import annotations

import polars as pl

from tracefit.tables.schema import ENGINE

CORE_SPAN = [*ENGINE, "trace_id", "span_id"]
"""Columns that identify the events of one request: several requests of one trace (n > 1) have a core span each."""

_ORDER = ["QUEUED", "PREEMPTED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
"""Core events, in the order in which events with the same stamp happen."""


def core_events(journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the events of the engine core, in order, with a number for each `request` (sorted by it and time)."""
    core = journeys.filter((pl.col("layer") == "core") & pl.col("event").is_in(_ORDER))
    ranks = dict(zip(_ORDER, range(len(_ORDER)), strict=True))
    rank = pl.col("event").replace_strict(ranks, return_dtype=pl.Int8)
    numbered = core.with_columns(request=pl.struct(CORE_SPAN).rank("dense"), _rank=rank)
    return numbered.sort("request", "ts_ns", "_rank").drop("_rank")


def with_steps_by_time(core: pl.DataFrame, summaries: pl.DataFrame) -> pl.DataFrame:
    """Fill in the missing steps of events: the step that was scheduled last before them, by a summary or another event.

    Args:
        core: `core_events`, located, with `execution_lag_steps`.
        summaries: Located `steps`.
    """
    if not core["step_id"].null_count():
        return core
    inside = pl.col("event").is_in(["SCHEDULED", "PREEMPTED"])
    # By the time of an update, the steps that scheduling runs ahead are scheduled.
    lag = pl.when(pl.col("event").is_in(["FIRST_TOKEN", "FINISHED"])).then("execution_lag_steps").otherwise(0)
    marks = pl.concat(
        [
            core.select("engine", "ts_ns", last=pl.col("step_id") + lag, begun=inside),
            summaries.select("engine", ts_ns="ts_start_ns", last="step_id", begun=pl.lit(value=True)),
        ]
    ).drop_nulls()
    joined = (
        core.with_row_index("_row")
        .sort("ts_ns")
        .join_asof(marks.sort("ts_ns", "last"), on="ts_ns", by="engine", check_sortedness=False)
    )
    # An event inside schedule() that follows an update belongs to a new step.
    step = pl.col("last") + pl.when(inside & ~pl.col("begun")).then(1).otherwise(-lag)
    filled = joined.with_columns(pl.coalesce("step_id", step.clip(lower_bound="first_step")))
    return filled.sort("_row").drop("_row", "last", "begun")


def following(name: str) -> pl.Expr:
    """Return the value of the request's next row; rows are in the order of `core_events`."""
    same = pl.col("request") == pl.col("request").shift(-1)
    return pl.when(same).then(pl.col(name).shift(-1)).alias(f"next_{name}")


def running_segments(core: pl.DataFrame, cached: pl.DataFrame) -> pl.DataFrame:
    """Find every segment from SCHEDULED to PREEMPTED or FINISHED.

    The output shows which step completed the prompt: with g tokens and one token per step, it is g - 1 steps before the
    last (without disturbance, FINISHED.step - FIRST_TOKEN.step = output tokens - 1).

    Args:
        core: `core_events`, located on the step axis.
        cached: engine columns, request_id, cached_tokens (prompt tokens in the prefix cache).

    Returns:
        Per segment, besides the columns of `core`: end_step (the last step that may compute its tokens), complete_step
        (null if the prompt was not completed), need_tokens (to compute before the first token), cached_tokens,
        outputs (before the segment), has_finished, next_finish_status.
    """
    marks = core.filter(pl.col("event").is_in(["SCHEDULED", "PREEMPTED", "FINISHED"]))
    names = ("event", "step_id", "decode_done_tokens", "finish_status")
    starts = marks.with_columns(map(following, names)).filter(pl.col("event") == "SCHEDULED")
    first_tokens = core.filter(pl.col("event") == "FIRST_TOKEN").group_by("request")
    first_steps = first_tokens.agg(first_token_step=pl.col("step_id").min())
    starts = starts.join(first_steps, on="request", how="left", maintain_order="left")
    starts = starts.join(cached, on=[*ENGINE, "request_id"], how="left", maintain_order="left")
    finished = (pl.col("next_event") == "FINISHED").fill_null(value=False)
    # A request that was preempted in a step has no tokens in it.
    end = pl.when(finished).then(pl.col("next_step_id")).otherwise(pl.col("next_step_id") - 1)
    is_first = pl.col("schedule_kind").fill_null("FIRST") != "RESUME"
    outputs = pl.col("decode_done_tokens").fill_null(0)
    # Without an end in the trace a request runs to the engine's last step, or to the last token it may produce.
    rows = starts.with_columns(
        end_step=pl.coalesce(end, "last_step"),
        outputs=outputs,
        produced=pl.col("next_decode_done_tokens") - outputs,
        cached_tokens=pl.when(is_first).then(pl.col("cached_tokens").fill_null(0)).otherwise(0),
        has_finished=finished,
    )
    by_count = pl.when(pl.col("produced") > 0).then(pl.col("end_step") - pl.col("produced") + 1)
    # FIRST_TOKEN names the step itself; after a preemption it is missing, and tokens are counted back from the end.
    is_inside = pl.col("first_token_step").is_between(pl.col("step_id"), pl.col("end_step"))
    complete = pl.coalesce(pl.when(is_inside).then("first_token_step"), by_count)
    most = complete + (pl.col("decode_max_tokens") - outputs).clip(lower_bound=1) - 1
    is_open = pl.col("next_event").is_null()
    need = pl.col("prefill_total_tokens") + pl.col("outputs") - pl.col("cached_tokens")
    return rows.with_columns(
        need_tokens=need.clip(lower_bound=1),
        complete_step=complete.clip(lower_bound=pl.col("step_id")),
        end_step=pl.when(is_open).then(pl.min_horizontal("end_step", most)).otherwise("end_step"),
    ).filter(pl.col("end_step") >= pl.col("step_id"))


def waiting_segments(core: pl.DataFrame) -> pl.DataFrame:
    """Find every segment of waiting: from QUEUED or PREEMPTED to SCHEDULED, or to an abort.

    Returns:
        Per segment, besides the columns of `core` (`core_events`, located): wait_first and wait_last, the first and
        the last step whose schedule() left it waiting, wait_tokens (to compute once scheduled).
    """
    marks = core.filter(pl.col("event") != "FIRST_TOKEN")
    waits = marks.with_columns(following("event"), following("step_id"))
    waits = waits.filter(pl.col("event").is_in(["QUEUED", "PREEMPTED"]))
    scheduled = pl.col("next_event") == "SCHEDULED"
    end = pl.when(scheduled).then(pl.col("next_step_id") - 1).otherwise(pl.col("next_step_id"))
    # QUEUED carries the counter of the step before it.
    begin = pl.when(pl.col("event") == "QUEUED").then(pl.col("step_id") + 1).otherwise("step_id")
    return waits.with_columns(
        wait_first=begin.clip(lower_bound=pl.col("first_step")),
        wait_last=pl.coalesce(end, "last_step"),
        wait_tokens=pl.col("prefill_total_tokens") + pl.col("decode_done_tokens").fill_null(0),
    ).filter(pl.col("wait_last") >= pl.col("wait_first"))


def requeue_waits(journeys: pl.DataFrame) -> pl.DataFrame:
    """Find every wait after a preemption that ended in a RESUME.

    Args:
        journeys: The `journey_events` table.

    Returns:
        run_id, server, epoch, trace_id, request_id, preempted_step (its schedule() took the blocks), resumed_step.
    """
    marks = core_events(journeys).filter(pl.col("event").is_in(["PREEMPTED", "SCHEDULED", "FINISHED"]))
    waits = marks.with_columns(following("event"), following("step_id"))
    resumed = (pl.col("event") == "PREEMPTED") & (pl.col("next_event") == "SCHEDULED")
    return waits.filter(resumed).select(
        *ENGINE, "trace_id", "request_id", preempted_step="step_id", resumed_step="next_step_id"
    )
