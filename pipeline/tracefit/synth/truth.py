"""The truth beside a synthetic trace: every step and request, with what the trace does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import polars as pl

from tracefit.synth.emit import api_request_id

if TYPE_CHECKING:
    from tracefit.synth.logs import EpochLog, RequestLog, StepLog

Cell: TypeAlias = str | int | float | bool | None
"""A value of a truth table."""

_Schema: TypeAlias = Mapping[str, type[pl.DataType]]

STEP_COLUMNS: _Schema = {
    "server": pl.Int64,
    "epoch": pl.Int64,
    "step_id": pl.Int64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "cycle_us": pl.Float64,
    "law_us": pl.Float64,
    "schedule_us": pl.Float64,
    "is_hiccup": pl.Boolean,
    "num_prefill_reqs": pl.Int64,
    "num_decode_reqs": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "recompute_tokens": pl.Int64,
    "scheduled_tokens": pl.Int64,
    "context_tokens": pl.Int64,
    "prefill_context_tokens": pl.Int64,
    "attention_pairs": pl.Int64,
    "running": pl.Int64,
    "waiting": pl.Int64,
    "waiting_tokens": pl.Int64,
    "blocks_free": pl.Int64,
    "num_finished": pl.Int64,
    "num_preempted": pl.Int64,
    "is_sampled": pl.Boolean,
}
"""Columns of the steps' truth; times monotonic, `law_us` is `cycle_us` without noise and hiccups."""

REQUEST_COLUMNS: _Schema = {
    "server": pl.Int64,
    "epoch": pl.Int64,
    "request_id": pl.String,
    "core_request_id": pl.String,
    "load_phase": pl.String,
    "is_chat": pl.Boolean,
    "is_streaming": pl.Boolean,
    "prompt_tokens": pl.Int64,
    "max_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cached_prompt_tokens": pl.Int64,
    "arrival_ns": pl.Int64,
    "api_work_us": pl.Float64,
    "socket_ns": pl.Int64,
    "queued_ns": pl.Int64,
    "queued_step": pl.Int64,
    "requests_ahead": pl.Int64,
    "tokens_ahead": pl.Int64,
    "running_reqs": pl.Int64,
    "running_remaining_tokens": pl.Int64,
    "blocks_free": pl.Int64,
    "first_scheduled_ns": pl.Int64,
    "first_scheduled_step": pl.Int64,
    "first_token_ns": pl.Int64,
    "first_token_step": pl.Int64,
    "finished_ns": pl.Int64,
    "finished_step": pl.Int64,
    "finish_status": pl.String,
    "departed_ns": pl.Int64,
    "num_preemptions": pl.Int64,
    "batch_reqs": pl.Int64,
    "finishing_reqs": pl.Int64,
    "abort_ns": pl.Int64,
    "abort_stage": pl.String,
}
"""Columns of the requests' truth; queue state is what the request met when it was QUEUED."""


def steps_frame(epochs: Sequence[EpochLog]) -> pl.DataFrame:
    """Return one row per step."""
    rows = [_step_row(epoch, step) for epoch in epochs for step in epoch.steps]
    return _frame(rows, STEP_COLUMNS)


def requests_frame(epochs: Sequence[EpochLog]) -> pl.DataFrame:
    """Return one row per request, sampled or not."""
    rows = [_request_row(epoch, log) for epoch in epochs for log in epoch.requests]
    return _frame(rows, REQUEST_COLUMNS)


def _frame(rows: list[tuple[Cell, ...]], columns: _Schema) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=dict(columns), orient="row")


def _step_row(epoch: EpochLog, step: StepLog) -> tuple[Cell, ...]:
    batch = step.composition
    return (
        epoch.server,
        epoch.epoch,
        step.step_id,
        step.start_ns,
        step.end_ns,
        step.cycle_ns / 1e3,
        step.law_us,
        step.schedule_ns / 1e3,
        step.is_hiccup,
        batch.num_prefill_reqs,
        batch.num_decode_reqs,
        batch.prefill_tokens,
        batch.decode_tokens,
        batch.recompute_tokens,
        batch.scheduled_tokens,
        batch.context_tokens,
        batch.prefill_context_tokens,
        batch.attention_pairs,
        step.running_depth,
        step.waiting_depth,
        step.waiting_tokens,
        step.blocks_free,
        step.num_finished,
        step.num_preempted,
        step.is_sampled,
    )


def _request_row(epoch: EpochLog, log: RequestLog) -> tuple[Cell, ...]:
    arrival, request = log.arrival, log.request
    return (
        epoch.server,
        epoch.epoch,
        api_request_id(arrival.number, server=epoch.server, is_chat=arrival.is_chat),
        request.request_id,
        arrival.phase,
        arrival.is_chat,
        arrival.is_streaming,
        arrival.prompt_tokens,
        arrival.max_tokens,
        request.done_tokens,
        log.cached_prompt_tokens,
        arrival.arrival_ns,
        arrival.api_work_us,
        log.socket_ns,
        *_point_cells(log, "QUEUED"),
        *_queue_cells(log),
        *_point_cells(log, "SCHEDULED"),
        *_point_cells(log, "FIRST_TOKEN"),
        *_point_cells(log, "FINISHED"),
        log.points[-1].detail,
        log.departed_ns,
        request.num_preemptions,
        log.batch_reqs or None,
        log.finishing_reqs or None,
        log.abort_ns,
        arrival.abort_stage.value or None,
    )


def _point_cells(log: RequestLog, event: str) -> tuple[Cell, Cell]:
    point = log.first(event)
    return (point.ts_ns, point.step_id) if point else (None, None)


def _queue_cells(log: RequestLog) -> tuple[Cell, ...]:
    state = log.queue_state
    if state is None:
        return (None,) * 5
    return (
        state.requests_ahead,
        state.tokens_ahead,
        state.running_reqs,
        state.running_remaining_tokens,
        state.blocks_free,
    )
