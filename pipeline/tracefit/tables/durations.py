"""Compute the durations, rates and state of requests from their times.

Formulas follow vLLM's request metrics; the columns are documented in `schema.REQUESTS`.
"""

from __future__ import annotations

import polars as pl

from tracefit.tables.health import CUT_OFF

STATES = {
    "stopped": "FINISHED_STOPPED",
    "length": "FINISHED_LENGTH_CAPPED",
    "aborted": "FINISHED_ABORTED",
    "ignored": "FINISHED_IGNORED",
    "error": "FINISHED_ERROR",
}
"""vLLM's name of the state, by finish status of the trace."""

_LIVE_STATES = {
    "QUEUED": "WAITING",
    "SCHEDULED": "RUNNING",
    "FIRST_TOKEN": "RUNNING",
    "PREEMPTED": "PREEMPTED",
}
"""State of an unfinished request, by its last event of the engine core."""


def divided(values: pl.Expr, number: float) -> pl.Expr:
    """Return values divided by a number, equal to the last digit in frames of any length."""
    # By a column: polars divides a long frame by a constant through its reciprocal, which can be off in the last digit.
    return values / (values * 0 + number)


def as_us(ns: pl.Expr) -> pl.Expr:
    """Return nanoseconds as microseconds."""
    return divided(ns, 1e3)


def _us(end: str, start: str) -> pl.Expr:
    return as_us(pl.col(end) - pl.col(start))


def with_state(requests: pl.DataFrame) -> pl.DataFrame:
    """Add `state`, from the finish status, else the last event of the core, else the end of the API span.

    The state of a request with only an API span, which ended without an error, is unknown: null.

    Args:
        requests: finish_status, last_event (of the core), arrival_ns, departed_ns, aborted_ns.
    """
    api = (
        pl.when(pl.col("aborted_ns").is_not_null())
        .then(pl.lit("FINISHED_ABORTED"))
        .when(pl.col("arrival_ns").is_not_null() & pl.col("departed_ns").is_null())
        .then(pl.lit("WAITING"))
    )
    finished = pl.col("finish_status").replace_strict(STATES, default=None, return_dtype=pl.String)
    live = pl.col("last_event").replace_strict(_LIVE_STATES, default=None, return_dtype=pl.String)
    from_api = pl.when(pl.col("last_event").is_null()).then(api)
    return requests.with_columns(state=pl.coalesce(finished, live, from_api))


def with_durations(requests: pl.DataFrame) -> pl.DataFrame:
    """Add the durations of requests, in us; null if one of the two times is.

    Source of the formulas: the request metrics of vLLM. The wait after a preemption belongs to neither prefill nor
    decode.
    """
    counted = pl.col("preempted_events").fill_null(0)
    lost = pl.col("num_preemptions") > counted
    # Never preempted: the requeue wait is a true zero. Preempted without the events of it: unknown.
    requeue = {
        side: pl.when(lost).then(None).when(counted > 0).then(f"requeue_{side}_us").otherwise(0.0)
        for side in ("before", "after")
    }
    cut_off = pl.col("finish_status").is_in(CUT_OFF)
    several = pl.col("output_tokens") > 1
    return requests.with_columns(
        last_token_ns=pl.when(~cut_off & (pl.col("output_tokens") > 0)).then("finished_ns"),
        admission_us=_us("queued_ns", "arrival_ns"),
        queue_wait_us=_us("first_scheduled_ns", "queued_ns"),
        requeue_wait_us=pl.when(pl.col("first_scheduled_ns").is_not_null()).then(
            requeue["before"] + requeue["after"]
        ),
        time_in_queue_us=_us("first_scheduled_ns", "arrival_ns"),
        prefill_us=_us("first_token_ns", "first_scheduled_ns") - requeue["before"],
        decode_us=_us("finished_ns", "first_token_ns") - requeue["after"],
        ttft_us=_us("first_token_ns", "arrival_ns"),
        engine_us=_us("finished_ns", "queued_ns"),
        e2e_us=_us("finished_ns", "arrival_ns"),
        departure_us=_us("departed_ns", "finished_ns"),
        client_us=_us("departed_ns", "arrival_ns"),
        itl_us=pl.when(several).then(_us("finished_ns", "first_token_ns") / (pl.col("output_tokens") - 1)),
    )


def with_rates(requests: pl.DataFrame) -> pl.DataFrame:
    """Add times per token, throughput and shares of the latency to rows with durations.

    An inference time in the trace is kept; a computed one ends with the last token.
    """
    e2e = pl.when(pl.col("e2e_us") > 0).then("e2e_us")
    later = pl.when(pl.col("output_tokens") > 1).then(pl.col("output_tokens") - 1)
    return requests.with_columns(
        inference_us=pl.coalesce("inference_us", _us("last_token_ns", "first_scheduled_ns")),
        tpot_us=_us("last_token_ns", "first_token_ns") / later,
        tokens_per_s=pl.col("output_tokens") / divided(e2e, 1e6),
        queue_ratio=pl.col("time_in_queue_us") / e2e,
        execute_ratio=pl.col("model_execute_us") / e2e,
    )
