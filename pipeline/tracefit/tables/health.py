"""Check that journeys and steps are complete and in order, and count the faults.

The checks read the tables, not the traces. `inspect` and the report show them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from tracefit.tables.dialects import WITHOUT_EVENTS
from tracefit.tables.requests import is_cut_off
from tracefit.tables.schema import ENGINE


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `held` of the `of` rows it applies to are correct."""

    name: str
    held: int
    of: int
    detail: str = ""
    """The faults of the other rows, with counts; empty if every row is correct."""


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
    cut_off = is_cut_off()
    complete = {
        "without QUEUED": pl.col("queued_ns").is_null(),
        "without SCHEDULED": pl.col("first_scheduled_ns").is_null() & ~cut_off,
        "without FIRST_TOKEN": pl.col("first_token_ns").is_null() & ~cut_off,
        "without FINISHED": pl.col("finished_ns").is_null(),
    }
    both_layers = {
        "without an API span": pl.col("arrival_ns").is_null(),
        "without an engine span": pl.col("core_request_id").is_null(),
    }
    # All times except DEPARTED: in a burst the API process may stamp it before the engine stamps FINISHED.
    time_order = {
        "QUEUED before ARRIVED": pl.col("queued_ns") < pl.col("arrival_ns"),
        "SCHEDULED before QUEUED": pl.col("first_scheduled_ns") < pl.col("queued_ns"),
        "FIRST_TOKEN before SCHEDULED": pl.col("first_token_ns") < pl.col("first_scheduled_ns"),
        "FINISHED before FIRST_TOKEN": pl.col("finished_ns") < pl.col("first_token_ns"),
    }
    step_order = {
        "SCHEDULED in a step before QUEUED": pl.col("first_scheduled_step") < pl.col("queued_step"),
        "FIRST_TOKEN in a step before SCHEDULED": pl.col("first_token_step") < pl.col("first_scheduled_step"),
        "FINISHED in a step before FIRST_TOKEN": pl.col("finished_step") < pl.col("first_token_step"),
    }
    # Requests without preemption or abort.
    undisturbed = core.filter(
        ~cut_off & (pl.col("num_preemptions").fill_null(0) == 0) & (pl.col("output_tokens") > 0)
    ).drop_nulls(["first_token_step", "finished_step"])
    decode_steps = pl.col("finished_step") - pl.col("first_token_step")
    ordered = steps.sort(*ENGINE, "step_id")
    start_before = pl.col("ts_start_ns").shift(1).over(ENGINE)
    counted = steps.drop_nulls(["scheduled_tokens", "prefill_tokens", "decode_tokens"])
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    return (
        _check("complete lifecycles", core, complete),
        _check("both layers", requests.filter(~pl.col("dialect").is_in(WITHOUT_EVENTS)), both_layers),
        _check("time order", requests, time_order),
        _check("step order", core, step_order),
        _check("one token per step", undisturbed, {"otherwise": decode_steps != pl.col("output_tokens") - 1}),
        _preemptions(journeys),
        _check("step starts in order", ordered, {"before the step before": pl.col("ts_start_ns") < start_before}),
        _check("tokens of a step add up", counted, {"otherwise": tokens != pl.col("scheduled_tokens")}),
    )


def _check(name: str, frame: pl.DataFrame, faults: dict[str, pl.Expr]) -> Check:
    """Count the rows without faults, and the faults of each kind."""
    # Rows with a null time pass; other checks cover missing times.
    marked = frame.select(expr.fill_null(value=False).alias(kind) for kind, expr in faults.items())
    bad = int(marked.select(pl.any_horizontal(pl.all())).sum().item() or 0) if marked.height else 0
    counts = marked.sum().row(0) if marked.height else ()
    detail = ", ".join(f"{n:,} {kind}" for kind, n in zip(faults, counts, strict=False) if n)
    return Check(name, frame.height - bad, frame.height, detail)


def _preemptions(journeys: pl.DataFrame) -> Check:
    """Expect a RESUME or the request's end after every PREEMPTED, and a PREEMPTED before every RESUME."""
    turns = journeys.filter(
        (pl.col("layer") == "core") & pl.col("event").is_in(["SCHEDULED", "PREEMPTED", "FINISHED"])
    ).sort("trace_id", "span_id", "ts_ns")
    following, preceding = (pl.col("event").shift(k).over("trace_id", "span_id") for k in (-1, 1))
    preempted = pl.col("event") == "PREEMPTED"
    resumed = (pl.col("event") == "SCHEDULED") & (pl.col("schedule_kind") == "RESUME")
    marked = turns.with_columns(following=following, preceding=preceding).filter(preempted | resumed)
    unpaired = {
        "preempted and never heard of again": preempted & pl.col("following").is_null(),
        "preempted twice in a row": preempted & (pl.col("following") == "PREEMPTED"),
        "resumed without a preemption": resumed & (pl.col("preceding") != "PREEMPTED").fill_null(value=True),
    }
    return _check("preemption pairing", marked, unpaired)
