"""Check that journeys and steps are complete and in order, and count the faults.

The checks need only the tables, not the traces. `inspect` and the report show them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from tracefit.tables.schema import ENGINE

CUT_OFF = ("aborted", "error", "ignored")
"""Finish statuses of requests that need not have produced a token."""

_SPAN = ["trace_id", "span_id"]
_STEP = [*ENGINE, "step_id"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `held` of the `of` rows it applies to are correct."""

    name: str
    held: int
    of: int
    detail: str = ""
    """The faults of the other rows, with counts; empty if there are none."""


def health_checks(journeys: pl.DataFrame, requests: pl.DataFrame, steps: pl.DataFrame) -> tuple[Check, ...]:
    """Check the tables of one or several runs.

    Args:
        journeys: The `journey_events` table.
        requests: The `requests` table.
        steps: The `steps` table.

    Returns:
        One check per rule, in reading order; a rule without rows has `of` 0.
    """
    core = requests.filter(pl.col("core_request_id").is_not_null())
    return (
        _complete(core),
        _both_layers(requests),
        _time_order(requests),
        _step_order(core),
        _one_token_per_step(core),
        _preemptions(journeys),
        _steps_in_order(steps),
        _tokens_add_up(steps),
    )


def _check(name: str, frame: pl.DataFrame, faults: dict[str, pl.Expr]) -> Check:
    """Count the rows without fault, and each kind of fault."""
    marked = frame.select(expr.fill_null(value=False).alias(kind) for kind, expr in faults.items())
    bad = int(marked.select(pl.any_horizontal(pl.all())).sum().item() or 0) if marked.height else 0
    counts = marked.sum().row(0) if marked.height else ()
    detail = ", ".join(f"{n:,} {kind}" for kind, n in zip(faults, counts, strict=False) if n)
    return Check(name, frame.height - bad, frame.height, detail)


def _complete(core: pl.DataFrame) -> Check:
    """Expect all events of a finished request, and the first and last event of one that was cut off."""
    cut_off = pl.col("finish_status").is_in(CUT_OFF).fill_null(value=False)
    missing = {
        "without QUEUED": pl.col("queued_ns").is_null(),
        "without SCHEDULED": pl.col("first_scheduled_ns").is_null() & ~cut_off,
        "without FIRST_TOKEN": pl.col("first_token_ns").is_null() & ~cut_off,
        "without FINISHED": pl.col("finished_ns").is_null(),
    }
    return _check("complete lifecycles", core, missing)


def _both_layers(requests: pl.DataFrame) -> Check:
    alone = {
        "without an API span": pl.col("arrival_ns").is_null(),
        "without an engine span": pl.col("core_request_id").is_null(),
    }
    return _check("both layers", requests, alone)


def _after(later: str, earlier: str) -> pl.Expr:
    return pl.col(later) < pl.col(earlier)


def _time_order(requests: pl.DataFrame) -> Check:
    """Compare all times but DEPARTED: in a burst the API process may stamp it before the engine stamps FINISHED."""
    backwards = {
        "QUEUED before ARRIVED": _after("queued_ns", "arrival_ns"),
        "SCHEDULED before QUEUED": _after("first_scheduled_ns", "queued_ns"),
        "FIRST_TOKEN before SCHEDULED": _after("first_token_ns", "first_scheduled_ns"),
        "FINISHED before FIRST_TOKEN": _after("finished_ns", "first_token_ns"),
    }
    return _check("time order", requests, backwards)


def _step_order(core: pl.DataFrame) -> Check:
    backwards = {
        "SCHEDULED in a step before QUEUED": _after("first_scheduled_step", "queued_step"),
        "FIRST_TOKEN in a step before SCHEDULED": _after("first_token_step", "first_scheduled_step"),
        "FINISHED in a step before FIRST_TOKEN": _after("finished_step", "first_token_step"),
    }
    return _check("step order", core, backwards)


def _one_token_per_step(core: pl.DataFrame) -> Check:
    """Expect one token per step, from FIRST_TOKEN to FINISHED, of a request without preemption or abort."""
    cut_off = pl.col("finish_status").is_in(CUT_OFF).fill_null(value=False)
    undisturbed = core.filter(
        ~cut_off & (pl.col("num_preemptions").fill_null(0) == 0) & (pl.col("output_tokens") > 0)
    ).drop_nulls(["first_token_step", "finished_step"])
    steps = pl.col("finished_step") - pl.col("first_token_step")
    return _check("one token per step", undisturbed, {"otherwise": steps != pl.col("output_tokens") - 1})


def _preemptions(journeys: pl.DataFrame) -> Check:
    """Expect a RESUME or the request's end after every PREEMPTED, and a PREEMPTED before every RESUME."""
    turns = journeys.filter(
        (pl.col("layer") == "core") & pl.col("event").is_in(["SCHEDULED", "PREEMPTED", "FINISHED"])
    ).sort(*_SPAN, "ts_ns")
    following, preceding = (pl.col("event").shift(k).over(_SPAN) for k in (-1, 1))
    preempted = pl.col("event") == "PREEMPTED"
    resumed = (pl.col("event") == "SCHEDULED") & (pl.col("schedule_kind") == "RESUME")
    marked = turns.with_columns(following=following, preceding=preceding).filter(preempted | resumed)
    unpaired = {
        "preempted and never heard of again": preempted & pl.col("following").is_null(),
        "preempted twice in a row": preempted & (pl.col("following") == "PREEMPTED"),
        "resumed without a preemption": resumed & (pl.col("preceding") != "PREEMPTED").fill_null(value=True),
    }
    return _check("preemption pairing", marked, unpaired)


def _steps_in_order(steps: pl.DataFrame) -> Check:
    earlier = pl.col("ts_start_ns").shift(1).over(ENGINE)
    ordered = steps.sort(_STEP)
    return _check(
        "step starts in order", ordered, {"before the step before": pl.col("ts_start_ns") < earlier}
    )


def _tokens_add_up(steps: pl.DataFrame) -> Check:
    known = steps.drop_nulls(["scheduled_tokens", "prefill_tokens", "decode_tokens"])
    total = pl.col("prefill_tokens") + pl.col("decode_tokens")
    return _check("tokens of a step add up", known, {"otherwise": total != pl.col("scheduled_tokens")})
