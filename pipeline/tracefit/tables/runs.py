"""The `runs` table: one row per run and server, with what `train` needs to stand alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables import schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.tables.build import EventTables

_SERVER = "server"


def run_rows(
    run_id: str,
    events: EventTables,
    frames: Mapping[str, pl.DataFrame],
    columns: Mapping[str, str | int | None],
) -> pl.DataFrame:
    """Build the run's rows: one per server, counts of the server, configuration and content hash of the run.

    Args:
        run_id: The run.
        events: Its event tables.
        frames: Its other tables by name: requests, steps, request_snapshots, journey_events, spans.
        columns: Values that are the same for every server of the run.
    """
    spans = events.spans.group_by(_SERVER).agg(
        spans=pl.len(),
        dropped_events=pl.col("dropped_events").sum(),
        first_unix_ns=pl.col("start_unix_ns").min(),
        last_unix_ns=pl.col("end_unix_ns").max(),
        dialects=pl.col("scope").unique().sort().str.join(","),
    )
    counters = step_counters(frames["steps"], frames["journey_events"])
    epochs = counters.group_by(_SERVER).agg(
        epochs=pl.len(), counted=(pl.col("last_step") - pl.col("first_step") + 1).sum()
    )
    steps = frames["steps"].group_by(_SERVER).agg(steps=pl.len())
    step = [_SERVER, "epoch", "step_id"]
    rich = frames["steps"].join(frames["request_snapshots"], on=step, how="semi").group_by(_SERVER)
    requests = frames["requests"].group_by(_SERVER).agg(requests=pl.len(), **_workload())
    rows = spans
    for part in (epochs, steps, rich.agg(rich_steps=pl.len()), requests):
        rows = rows.join(part, on=_SERVER, how="left")
    shared = {
        **columns,
        "run_id": run_id,
        "other_spans": events.counts.other_spans,
        "duplicate_spans": events.counts.duplicate_spans,
        "rejects": events.counts.rejects,
        "dropped_attributes": events.counts.dropped_attributes,
        "moved_events": events.counts.moved_events,
        "events": json.dumps(dict(events.counts.events)),
    }
    zero = [pl.col(c).fill_null(0) for c in ("steps", "requests", "epochs", "rich_steps")]
    rows = rows.with_columns(*zero, *(pl.lit(v).alias(k) for k, v in shared.items()))
    traced = pl.col("steps") > 0
    load = [
        pl.when(pl.col(c).is_finite()).then(c).alias(c) for c in ("arrival_rate_per_s", "prefix_hit_ratio")
    ]
    return schema.RUNS.conform(
        rows.with_columns(
            *load,
            step_sampling=pl.when(traced).then(pl.col("steps") / pl.col("counted")).otherwise(0.0),
            snapshot_sampling=pl.when(traced).then(pl.col("rich_steps") / pl.col("steps")),
            journey_sampling=pl.col(_SERVER).replace_strict(
                journey_sampling(frames["steps"], frames["requests"]), default=None, return_dtype=pl.Float64
            ),
        )
    )


def _workload() -> dict[str, pl.Expr]:
    """Describe the load of one server, over its requests."""
    arrived = pl.col("arrival_ns").drop_nulls()
    told = pl.col("cached_prompt_tokens").is_not_null()
    return {
        "arrival_rate_per_s": (arrived.len() - 1) / ((arrived.max() - arrived.min()) / 1e9),
        "prompt_tokens_mean": pl.col("prompt_tokens").mean(),
        "max_tokens_mean": pl.col("max_tokens").mean(),
        "output_tokens_mean": pl.col("output_tokens").mean(),
        "prefix_hit_ratio": pl.col("cached_prompt_tokens").sum() / pl.col("prompt_tokens").filter(told).sum(),
    }


def step_counters(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """First and last step id of every epoch: (run_id, server, epoch, first_step, last_step), from whatever names one."""
    engine = ["run_id", _SERVER, "epoch", "step_id"]
    # QUEUED carries the last step before it, 0 at a fresh start: it names no step of its own.
    named = journeys.filter(pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED"))
    seen = pl.concat([steps.select(engine), named.select(engine)])
    return seen.group_by(engine[:3]).agg(
        first_step=pl.col("step_id").min(), last_step=pl.col("step_id").max()
    )


def journey_sampling(steps: pl.DataFrame, requests: pl.DataFrame) -> dict[str, float]:
    """Estimate per server the share of requests with a journey: decodes in journeys over those in step summaries.

    Over the sampled steps, each traced request decodes in the steps between its first token and its end; the
    summaries count everybody. A server without step summaries has no estimate.

    Args:
        steps: The `steps` table of one run.
        requests: Its `requests` table.
    """
    engine = [_SERVER, "epoch"]
    ends = requests.filter(pl.col("first_token_step").is_not_null() & pl.col("finished_step").is_not_null())
    edges = pl.concat(
        [
            ends.select(*engine, step_id=pl.col("first_token_step") + 1, change=pl.lit(1)),
            ends.select(*engine, step_id=pl.col("finished_step") + 1, change=pl.lit(-1)),
        ]
    ).sort(*engine, "step_id")
    running = edges.with_columns(members=pl.col("change").cum_sum().over(engine))
    at_steps = steps.sort("step_id").join_asof(
        running.sort("step_id"), on="step_id", by=engine, check_sortedness=False
    )
    shares = at_steps.group_by(_SERVER).agg(
        share=(pl.col("members").fill_null(0).sum() / pl.col("num_decode_reqs").sum()).clip(0.0, 1.0)
    )
    return dict(shares.filter(pl.col("share").is_finite()).iter_rows())
