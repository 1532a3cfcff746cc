"""The step clock that requests meet: which step start each of them is queued at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.tables.keys import ENGINE

if TYPE_CHECKING:
    from tracefit.fit.arrays import Flags, Integers, Vector

SPREADS = 3.0
"""An estimated start is believed to within three standard deviations."""


@dataclass(frozen=True, slots=True)
class StepClock:
    """Step starts on one axis in time order, per engine: an engine's part is starts[first[e]:first[e + 1]]."""

    starts: Vector
    follows: Flags
    """Whether the step before has a known start too."""
    idle_before: Flags
    """Whether the step before left nothing running and nothing waiting."""
    bounds: dict[tuple[object, ...], tuple[int, int]]
    tolerance_us: float
    """How far an estimated start may lie before the stamp of a request that was queued at it; 0 of exact starts."""


def step_clock(timeline: pl.DataFrame) -> StepClock:
    """Lay out the known step starts of the `timeline` table."""
    known = timeline.filter(pl.col("ts_start_ns").is_not_null()).sort(*ENGINE, "ts_start_ns")
    idle = (pl.col("running_depth") == 0) & (pl.col("waiting_depth") == 0)
    known = known.with_columns(
        follows=(pl.col("step_id").shift(1).over(ENGINE) == pl.col("step_id") - 1).fill_null(value=False),
        idle_before=idle.shift(1).over(ENGINE).fill_null(value=False),
    )
    counts = known.group_by(ENGINE, maintain_order=True).len()
    ends = counts["len"].cum_sum().to_list()
    keys = counts.select(ENGINE).rows()
    bounds = {key: (end - n, end) for key, n, end in zip(keys, counts["len"].to_list(), ends, strict=True)}
    columns = (
        known["ts_start_ns"].to_numpy().astype(float),
        known["follows"].to_numpy(),
        known["idle_before"].to_numpy(),
    )
    spread = known.select(pl.col("start_sd_us").median().cast(pl.Float64)).item() or 0.0
    return StepClock(*columns, bounds, SPREADS * spread)


def interpolated_clock(timeline: pl.DataFrame) -> StepClock:
    """Lay out the step starts of the `timeline` table, those not known spread evenly between the known ones around them.

    Nothing is put between two known starts with an idle gap after the first: nobody knows which of the steps took it.
    """
    ordered = timeline.sort(*ENGINE, "step_id")
    start = pl.col("ts_start_ns")
    idle = pl.when(start.is_not_null()).then(pl.col("idle_after").fill_null(value=False)).forward_fill()
    between = start.cast(pl.Float64).interpolate_by("step_id").round().cast(pl.Int64)
    filled = pl.when(start.is_null() & ~idle.over(ENGINE)).then(between.over(ENGINE)).otherwise(start)
    return step_clock(ordered.with_columns(ts_start_ns=filled))


def _next_start(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Integers:
    """Index of the first known start at or after ARRIVED + `done_us`; -1 where there is none; shape (n,)."""
    at = rows["ts_ns"].to_numpy().astype(float) + done_us * 1e3
    names = rows.select(ENGINE)
    engine = names.select(pl.struct(ENGINE).rank("dense")).to_series().to_numpy()
    found = np.full(len(at), -1)
    for one in np.unique(engine):
        mine = np.flatnonzero(engine == one)
        low, high = clock.bounds.get(names.row(int(mine[0])), (0, 0))
        index = low + np.searchsorted(clock.starts[low:high], at[mine])
        found[mine] = np.where(index < high, index, -1)
    return found


def boundary_of(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Integers:
    """Index of the boundary each request waits for; -1 where it is not known or the engine was idle."""
    index = _next_start(rows, clock, done_us)
    sure = (index >= 0) & clock.follows[index] & ~clock.idle_before[index]
    return np.where(sure, index, -1)


def true_boundary(rows: pl.DataFrame, clock: StepClock) -> Integers:
    """Index of the boundary each request was queued at; -1 where it is not known or the engine was idle."""
    return boundary_of(rows, clock, rows["y"].to_numpy().astype(float) - clock.tolerance_us)


def meets_idle(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Flags:
    """Tell whether the engine was idle `done_us` after ARRIVED; shape (n,)."""
    index = _next_start(rows, clock, done_us)
    return np.asarray((index >= 0) & clock.follows[index] & clock.idle_before[index])
