"""Latencies of requests composed of step times: a request's time in the engine is the sum of the steps it was in.

TTFT = admission + wait + steps to the first token; ITL = steps after it / (tokens - 1); E2E = TTFT + (tokens - 1) * ITL.
Here the batches and the waits are the real ones (teacher-forced); step times and overheads are predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER = ["run_id", "server"]
ENGINE = [*SERVER, "epoch"]
REQUEST = [*ENGINE, "trace_id", "core_request_id"]


def teacher_forced(
    requests: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame, lags: Mapping[tuple[str, str], int]
) -> pl.DataFrame:
    """Compose each request of the predicted times of the steps it was in and of its real waits.

    A wait ends where the step begins that ends it: the queue wait is QUEUED to the start of the first step, the wait
    after a preemption goes from the start of the step that preempted to that of the one that resumed. With scheduling a
    step ahead (lag 1) step k executes in the cycle after its own: tokens come a cycle later.

    Sums over steps are differences of a cumulative sum along an engine's steps.

    Args:
        requests: The `requests` table.
        steps: Columns of the engine, step_id, ts_start_ns, predicted_us (null where its batch is not known).
        waits: `requeue_waits`.
        lags: (run_id, server) to steps that scheduling runs ahead of execution.

    Returns:
        `requests` with forced_wait_us (queue), forced_prefill_us and forced_decode_us (without the waits after a
        preemption), forced_requeue_before_us and forced_requeue_after_us (the first token); null where a step is not
        known.
    """
    axis = _axis(steps)
    asked = requests.join(_lag_column(requests, lags), on=SERVER, how="left", maintain_order="left")
    lag = pl.col("lag")
    rows = asked.with_columns(
        token_step=pl.col("first_token_step") + lag, last_step=pl.col("finished_step") + lag
    )
    marks = {"first_scheduled_step": "begin", "token_step": "token", "last_step": "last"}
    for column, prefix in marks.items():
        rows = _located(rows, axis, column, prefix)
    rows = rows.join(_requeued(waits, axis, requests, lags), on=REQUEST, how="left", maintain_order="left")
    prefill = _summed("begin", "token", inclusive=True)
    decode = _summed("token", "last", inclusive=False)
    none_seen = pl.col("requeues").is_null()
    requeue = {
        name: pl.when(none_seen).then(0.0).otherwise(pl.col(name))
        for name in ("requeue_before_us", "requeue_after_us", "skipped_before_us", "skipped_after_us")
    }
    return rows.select(
        *requests.columns,
        forced_wait_us=(pl.col("begin_start_ns") - pl.col("queued_ns")) / 1e3,
        forced_prefill_us=prefill - requeue["skipped_before_us"],
        forced_decode_us=decode - requeue["skipped_after_us"],
        forced_requeue_before_us=requeue["requeue_before_us"],
        forced_requeue_after_us=requeue["requeue_after_us"],
    )


def _axis(steps: pl.DataFrame) -> pl.DataFrame:
    """Each step with what came up to its end on its engine: predicted time, steps nobody knows, and its row."""
    ordered = steps.sort(*ENGINE, "step_id")
    predicted = pl.col("predicted_us")
    return ordered.select(
        *ENGINE,
        "step_id",
        start_ns=pl.col("ts_start_ns"),
        own_us=predicted.fill_null(0.0),
        own_unknown=predicted.is_null().cast(pl.Int64),
        sum_us=predicted.fill_null(0.0).cum_sum().over(ENGINE),
        unknown=predicted.is_null().cast(pl.Int64).cum_sum().over(ENGINE),
        row=pl.int_range(pl.len()).over(ENGINE),
        at=pl.col("step_id"),
    )


def _located(rows: pl.DataFrame, axis: pl.DataFrame, column: str, prefix: str) -> pl.DataFrame:
    named = axis.rename({c: f"{prefix}_{c}" for c in axis.columns if c not in {*ENGINE, "step_id"}})
    return rows.join(
        named, left_on=[*ENGINE, column], right_on=[*ENGINE, "step_id"], how="left", maintain_order="left"
    )


def _summed(first: str, last: str, *, inclusive: bool) -> pl.Expr:
    """Predicted time from one located step to another one, `last` included; null unless every step between is known."""

    def difference(name: str, own: str) -> pl.Expr:
        whole = pl.col(f"{last}_{name}") - pl.col(f"{first}_{name}")
        return whole + pl.col(f"{first}_{own}") if inclusive else whole

    every = pl.col(f"{last}_row") - pl.col(f"{first}_row") == pl.col(f"{last}_at") - pl.col(f"{first}_at")
    known = every & (difference("unknown", "own_unknown") == 0)
    return pl.when(known).then(difference("sum_us", "own_us"))


def _requeued(
    waits: pl.DataFrame, axis: pl.DataFrame, requests: pl.DataFrame, lags: Mapping[tuple[str, str], int]
) -> pl.DataFrame:
    """Sum each request's real waits after preemptions, and the predicted time of the steps they skip.

    What the step before the preemption computed still executes `lag` cycles later: the wait begins after it.
    """
    known = waits.rename({"request_id": "core_request_id"}).join(
        _lag_column(waits, lags), on=SERVER, how="left"
    )
    token = requests.select(*REQUEST, "first_token_step").unique(REQUEST)
    known = known.join(token, on=REQUEST, how="left").with_columns(
        from_step=pl.min_horizontal(pl.col("preempted_step") + pl.col("lag"), "resumed_step")
    )
    for column, prefix in {"from_step": "lost", "resumed_step": "back"}.items():
        known = _located(known, axis, column, prefix)
    # From the start of one step to the start of another: its own time belongs to the one that resumes.
    skipped = _summed("lost", "back", inclusive=True) - pl.col("back_own_us")
    waited = (pl.col("back_start_ns") - pl.col("lost_start_ns")) / 1e3
    before = (pl.col("preempted_step") <= pl.col("first_token_step")).fill_null(value=True)
    return known.group_by(REQUEST).agg(
        requeues=pl.len(),
        requeue_before_us=_known_sum(waited.filter(before)),
        requeue_after_us=_known_sum(waited.filter(~before)),
        skipped_before_us=_known_sum(skipped.filter(before)),
        skipped_after_us=_known_sum(skipped.filter(~before)),
    )


def _known_sum(values: pl.Expr) -> pl.Expr:
    return pl.when(values.null_count() == 0).then(values.sum())


def _lag_column(rows: pl.DataFrame, lags: Mapping[tuple[str, str], int]) -> pl.DataFrame:
    servers = rows.select(SERVER).unique(maintain_order=True)
    keys = servers.rows()
    return servers.with_columns(
        lag=pl.Series([lags.get((run, server), 0) for run, server in keys], dtype=pl.Int64)
    )
