"""Latencies and step times over the load, and percentiles of the measured latencies."""

from __future__ import annotations

import polars as pl

from tracefit.diagnostics.groups import US_PER_MS, Bin, bins_by_run, count_open
from tracefit.models.targets import LATENCY_TITLES
from tracefit.statistics import PERCENTS, percentiles
from tracefit.tables.client_times import with_clients_latencies
from tracefit.tables.requests import latency_us
from tracefit.tables.schema import SERVER


def measured_latencies(requests: pl.DataFrame) -> dict[str, dict[int, float]]:
    """Return percentiles of the measured request latencies in ms; a latency of fewer than two requests is left out."""
    rows = with_clients_latencies(requests).select(latency_us(name).alias(name) for name in LATENCY_TITLES)
    known = {name: (rows[name].drop_nulls() / US_PER_MS).to_numpy() for name in LATENCY_TITLES}
    return {
        name: dict(zip(PERCENTS, percentiles(ms, PERCENTS), strict=True)) for name, ms in known.items() if len(ms) >= 2
    }


def latencies_over_load(requests: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return each latency of the requests and how many were in flight when each arrived: run_id, in_flight, ms."""
    began = pl.coalesce("arrival_ns", "queued_ns")
    ended = pl.coalesce("finished_ns", "aborted_ns", "departed_ns")
    latencies = {f"{name}_us": latency_us(name) for name in LATENCY_TITLES}
    rows = requests.select(*SERVER, **latencies, began=began, ended=ended).drop_nulls("began")
    servers = [part.with_columns(in_flight=_in_flight(part)) for part in rows.partition_by(SERVER)]
    if not servers:
        return {}
    every = pl.concat(servers)
    over_load = {}
    for name in LATENCY_TITLES:
        ms = pl.col(f"{name}_us") / US_PER_MS
        measured = every.filter(ms > 0)
        if measured.height >= 2:
            over_load[name] = measured.select("run_id", "in_flight", ms=ms)
    return over_load


def _in_flight(rows: pl.DataFrame) -> pl.Series:
    """Count the requests of a server in flight when each one began; those without an end do not count."""
    whole = rows.drop_nulls("ended")
    return count_open(whole["began"], whole["ended"], rows["began"]).cast(pl.Float64)


def step_times_over_batch(timeline: pl.DataFrame) -> dict[str, list[Bin]]:
    """Return the step times of each run over the requests in the batch, of steps whose next one is known and not
    idle.
    """
    steps = timeline.filter(pl.col("cycle_source") == "adjacent", ~pl.col("idle_after")).with_columns(
        ms=pl.col("cycle_us") / US_PER_MS
    )
    return bins_by_run(steps.drop_nulls(["ms", "running_depth"]), "running_depth", "ms")
