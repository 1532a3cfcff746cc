"""Stretches of a request's life in the engine: waiting in the queue, or running from SCHEDULED to its end.

A stretch of running computes a prompt (a resumed request its output so far, too), then decodes a token per step.
"""

from __future__ import annotations

import polars as pl

from tracefit.timeline.engines import ENGINE

REQUEST = [*ENGINE, "trace_id", "span_id"]


def running_segments(journeys: pl.DataFrame, cached: pl.DataFrame, lasts: pl.DataFrame) -> pl.DataFrame:
    """Find every stretch from SCHEDULED to PREEMPTED or FINISHED.

    The step that completes the prompt follows from the tokens that came out: with g of them and one per step, it
    is g - 1 steps before the last (FINISHED.step - FIRST_TOKEN.step = output tokens - 1 of an undisturbed request).

    Args:
        journeys: The `journey_events` table.
        cached: engine columns, request_id, cached_tokens: prompt tokens found in the prefix cache.
        lasts: engine columns, last_step: where a request ends that never finished in the trace.

    Returns:
        Per stretch: request columns, request_id, ts_ns, start_step, end_step (the last step it may have tokens in),
        complete_step (null where the prompt was not completed), need_tokens (to compute before the first token),
        cached_tokens, outputs (before the stretch), prompt_tokens, max_tokens, has_finished.
    """
    marks = ["SCHEDULED", "PREEMPTED", "FINISHED"]
    core = journeys.filter((pl.col("layer") == "core") & pl.col("event").is_in(marks)).sort(*REQUEST, "ts_ns")
    following = [
        pl.col(c).shift(-1).over(REQUEST).alias(f"next_{c}")
        for c in ("event", "step_id", "decode_done_tokens")
    ]
    starts = core.with_columns(following).filter(pl.col("event") == "SCHEDULED")
    first_tokens = journeys.filter(pl.col("event") == "FIRST_TOKEN").select(
        *REQUEST, first_token_step=pl.col("step_id")
    )
    starts = (
        starts.join(first_tokens, on=REQUEST, how="left")
        .join(lasts, on=ENGINE, how="left")
        .join(cached, on=[*ENGINE, "request_id"], how="left")
    )
    preempted = pl.col("next_event") == "PREEMPTED"
    end = pl.when(preempted).then(pl.col("next_step_id") - 1).otherwise(pl.col("next_step_id"))
    is_first = pl.col("schedule_kind").fill_null("FIRST") != "RESUME"
    outputs = pl.col("decode_done_tokens").fill_null(0)
    rows = starts.with_columns(
        end_step=pl.coalesce(end, "last_step"),
        outputs=outputs,
        produced=pl.col("next_decode_done_tokens") - outputs,
        cached_tokens=pl.when(is_first).then(pl.col("cached_tokens").fill_null(0)).otherwise(0),
        prompt_tokens=pl.col("prefill_total_tokens"),
        has_finished=pl.col("next_event") == "FINISHED",
    )
    by_count = pl.when(pl.col("produced") > 0).then(pl.col("end_step") - pl.col("produced") + 1)
    in_here = pl.col("first_token_step").is_between(pl.col("step_id"), pl.col("end_step"))
    complete = pl.coalesce(pl.when(in_here).then("first_token_step"), by_count)
    return rows.select(
        *REQUEST,
        "request_id",
        "ts_ns",
        "end_step",
        "outputs",
        "cached_tokens",
        "prompt_tokens",
        "has_finished",
        start_step="step_id",
        max_tokens="decode_max_tokens",
        need_tokens=(pl.col("prompt_tokens") + pl.col("outputs") - pl.col("cached_tokens")).clip(
            lower_bound=1
        ),
        complete_step=complete.clip(lower_bound=pl.col("step_id")),
    ).filter(pl.col("end_step") >= pl.col("start_step"))


def waiting_segments(journeys: pl.DataFrame, lasts: pl.DataFrame) -> pl.DataFrame:
    """Find every stretch of waiting: QUEUED to SCHEDULED, PREEMPTED to RESUME, or to an abort while waiting.

    Returns:
        Per stretch: request columns, first_step and last_step (inclusive) whose schedule() left it waiting,
        wait_tokens (to compute once scheduled).
    """
    marks = ["QUEUED", "SCHEDULED", "PREEMPTED", "FINISHED"]
    core = journeys.filter((pl.col("layer") == "core") & pl.col("event").is_in(marks)).sort(*REQUEST, "ts_ns")
    following = [pl.col(c).shift(-1).over(REQUEST).alias(f"next_{c}") for c in ("event", "step_id")]
    waits = core.with_columns(following).filter(pl.col("event").is_in(["QUEUED", "PREEMPTED"]))
    waits = waits.join(lasts, on=ENGINE, how="left")
    scheduled = pl.col("next_event") == "SCHEDULED"
    end = pl.when(scheduled).then(pl.col("next_step_id") - 1).otherwise(pl.col("next_step_id"))
    begin = pl.when(pl.col("event") == "QUEUED").then(pl.col("step_id") + 1).otherwise("step_id")
    return waits.select(
        *REQUEST,
        first_step=begin,
        last_step=pl.coalesce(end, "last_step"),
        wait_tokens=pl.col("prefill_total_tokens") + pl.col("decode_done_tokens").fill_null(0),
    ).filter(pl.col("last_step") >= pl.col("first_step"))
