"""Latencies and step times over the load, and percentiles of the measured latencies."""

from __future__ import annotations

import polars as pl

from tracefit.diagnostics.groups import US_PER_MS, Bin, bins_by_run
from tracefit.features.targets import LATENCIES
from tracefit.statistics import PERCENTS
from tracefit.tables.requests import is_cut_off
from tracefit.tables.schema import SERVER


def measured_latencies(requests: pl.DataFrame) -> dict[str, dict[int, float]]:
    """Return percentiles of the measured request latencies in ms; a latency of fewer than two requests is left out."""
    found = {}
    for name in LATENCIES:
        positive = requests[f"{name}_us"].drop_nulls()
        positive = positive.filter(positive > 0)
        if positive.len() >= 2:
            found[name] = {
                p: float(positive.quantile(p / 100, "linear") or 0.0) / US_PER_MS for p in PERCENTS
            }
    return found


def latencies_over_load(requests: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return each latency of the requests and how many were in flight when each arrived: run_id, in_flight, ms."""
    began = pl.coalesce("arrival_ns", "queued_ns")
    ended = pl.coalesce("finished_ns", "aborted_ns", "departed_ns")
    columns = (*SERVER, *(f"{name}_us" for name in LATENCIES))
    rows = requests.select(*columns, cut_off=is_cut_off(), began=began, ended=ended).drop_nulls("began")
    parts = [
        part.select(
            "run_id",
            *(f"{name}_us" for name in LATENCIES),
            "cut_off",
            in_flight=_in_flight(part).cast(pl.Float64),
        )
        for _, part in rows.group_by(SERVER, maintain_order=True)
    ]
    if not parts:
        return {}
    every = pl.concat(parts)
    found = {}
    for name in LATENCIES:
        ms = pl.col(f"{name}_us") / US_PER_MS
        known = every.filter(ms > 0, pl.lit(name == "ttft") | ~pl.col("cut_off")).select(
            "run_id", "in_flight", ms=ms
        )
        if known.height >= 2:
            found[name] = known
    return found


def _in_flight(rows: pl.DataFrame) -> pl.Series:
    """Count the requests of a server that had begun and not ended when each one began; those without an end do not count."""
    whole = rows.drop_nulls("ended")
    starts, ends = whole["began"].sort(), whole["ended"].sort()
    began = starts.search_sorted(rows["began"], side="left")
    return began.cast(pl.Int64) - ends.search_sorted(rows["began"], side="right").cast(pl.Int64)


def step_times_over_batch(timeline: pl.DataFrame) -> dict[str, list[Bin]]:
    """Return the step times of each run over the requests in the batch, of steps whose next one is known and not idle."""
    steps = timeline.filter(pl.col("cycle_source") == "adjacent", ~pl.col("idle_after")).with_columns(
        ms=pl.col("cycle_us") / US_PER_MS
    )
    return bins_by_run(steps.drop_nulls(["ms", "running_depth"]), "running_depth", "ms")
