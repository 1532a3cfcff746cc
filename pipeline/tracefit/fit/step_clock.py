"""The step clock as requests meet it: the known step starts of each engine, and the one each request is queued at.

The admission model (`boundary`) looks up the first step start after a request's API work. A start counts as the boundary only
where the step before it has a known start too: otherwise an unknown start may lie in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.linear import target_of
from tracefit.tables.keys import ENGINE, SERVER

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Integers, Vector

TOLERANCE_SDS = 3.0
"""An estimated start is taken to be exact to within this many standard deviations."""


@dataclass(frozen=True, slots=True)
class StepClock:
    """Step starts in ns, engine after engine, each in time order: starts[slice(*bounds[key])] are those of one engine."""

    starts: Vector
    follows: Flags
    """Whether the step before has a known start too, shape of `starts`."""
    idle_before: Flags
    """Whether the step before left nothing running and nothing waiting, shape of `starts`."""
    bounds: dict[tuple[object, ...], tuple[int, int]]
    """Engine key to the range of its starts."""
    tolerance_us: float
    """How far before an estimated start the stamp of a request queued at it may lie; 0 for exact starts."""


def step_clock(timeline: pl.DataFrame) -> StepClock:
    """Return the known step starts of the `timeline` table."""
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
    start_sd = known.select(pl.col("start_sd_us").median().cast(pl.Float64)).item() or 0.0
    return StepClock(*columns, bounds, TOLERANCE_SDS * start_sd)


def interpolated_clock(timeline: pl.DataFrame) -> StepClock:
    """Return the step starts of the `timeline` table, with unknown ones spaced evenly between the known ones around them.

    No start is interpolated across an idle gap: which of the steps the gap followed is not known.
    """
    ordered = timeline.sort(*ENGINE, "step_id")
    start = pl.col("ts_start_ns")
    idle = pl.when(start.is_not_null()).then(pl.col("idle_after").fill_null(value=False)).forward_fill()
    between = start.cast(pl.Float64).interpolate_by("step_id").round().cast(pl.Int64)
    filled = pl.when(start.is_null() & ~idle.over(ENGINE)).then(between.over(ENGINE)).otherwise(start)
    return step_clock(ordered.with_columns(ts_start_ns=filled))


def _next_start(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Integers:
    """Return the index of the first known start at or after ARRIVED + `done_us`, -1 where there is none; shape (n,)."""
    at = rows["ts_ns"].to_numpy().astype(float) + done_us * 1e3
    names = rows.select(ENGINE)
    engine = names.select(pl.struct(ENGINE).rank("dense")).to_series().to_numpy()
    found = np.full(len(at), -1)
    for number in np.unique(engine):
        requests = np.flatnonzero(engine == number)
        low, high = clock.bounds.get(names.row(int(requests[0])), (0, 0))
        index = low + np.searchsorted(clock.starts[low:high], at[requests])
        found[requests] = np.where(index < high, index, -1)
    return found


def boundary_of(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Integers:
    """Return the index of the boundary each request waits for, -1 where it is unknown or the engine was idle; shape (n,)."""
    index = _next_start(rows, clock, done_us)
    # After a step of unknown start another boundary may lie in between; after an idle step nothing is waited for.
    is_known = (index >= 0) & clock.follows[index] & ~clock.idle_before[index]
    return np.where(is_known, index, -1)


def true_boundary(rows: pl.DataFrame, clock: StepClock) -> Integers:
    """Return the index of the boundary each request was queued at, -1 where unknown or the engine was idle; shape (n,)."""
    return boundary_of(rows, clock, target_of(rows) - clock.tolerance_us)


def meets_idle(rows: pl.DataFrame, clock: StepClock, done_us: Vector) -> Flags:
    """Return whether the engine was idle `done_us` after ARRIVED; shape (n,)."""
    index = _next_start(rows, clock, done_us)
    return np.asarray((index >= 0) & clock.follows[index] & clock.idle_before[index])


def queued_at_once(rows: pl.DataFrame, clock: StepClock, wait_us: Vector, done_us: Vector) -> Flags:
    """Return whether a request is QUEUED when its API work ends, with no step to wait for; shape (n,).

    The engine is idle then, or it is idle when the request arrives and no other one is ahead of it: a step that starts
    within `done_us` of that is the request's own, whose work took less than is predicted.

    Args:
        rows: Admission rows: engine columns and ts_ns (ARRIVED).
        clock: Known step starts.
        wait_us: How long each request waits for the API process, shape (n,).
        done_us: From the arrival of each to the end of its API work, shape (n,).
    """
    arrives = meets_idle(rows, clock, np.zeros(len(done_us))) & (wait_us <= 0)
    return arrives | meets_idle(rows, clock, done_us)


def admission_with_clock(
    rows: pl.DataFrame, timeline: pl.DataFrame, wait_us: Vector, done_us: Vector, offset_us: float
) -> tuple[Vector, Flags]:
    """Predict admissions by the step clock: the boundary after the work, or its end itself when the engine is idle.

    A step start that the clock does not know is placed evenly between the known ones around it.

    Args:
        rows: Admission rows: engine columns and ts_ns.
        timeline: The `timeline` table.
        wait_us: How long each row waits for the API process.
        done_us: From the arrival of each row to the end of its API work.
        offset_us: QUEUED less the step start it comes before.

    Returns:
        Predictions in us, clipped at 0, and for which rows the clock knows enough; shape (n,) each.
    """
    clock, between = step_clock(timeline), interpolated_clock(timeline)
    idle = queued_at_once(rows, clock, wait_us, done_us)
    until, known = until_boundary(rows, clock, between, done_us, idle)
    predicted = np.where(known, until + offset_us, done_us)
    return np.asarray(np.maximum(predicted, 0.0)), np.asarray(known | idle)


def until_boundary(
    rows: pl.DataFrame, clock: StepClock, between: StepClock, done_us: Vector, idle: Flags
) -> tuple[Vector, Flags]:
    """Return the time to the boundary each request waits for, and whether either clock knows it; shape (n,) each.

    Those of `idle` wait for none.
    """
    arrived = rows["ts_ns"].to_numpy()
    exact, interpolated = (boundary_of(rows, starts, done_us) for starts in (clock, between))
    until = np.where(exact >= 0, clock.starts[exact] - arrived, between.starts[interpolated] - arrived) / 1e3
    return until, np.asarray(((exact >= 0) | (interpolated >= 0)) & ~idle)


def mean_residual(timeline: pl.DataFrame, train: pl.DataFrame) -> tuple[float, float]:
    """Return the mean residual cycle and the busy share of time in the training part.

    The mean residual of a cycle c at a random moment of busy time is E[c^2] / (2 E[c]) (renewal theory: the moment falls
    into a cycle with a probability proportional to its length, and half of the cycle is left). A cycle that holds idle
    time counts as busy for the length of a median cycle.
    """
    ends = train.group_by(SERVER).agg(until_ns=pl.col("holdout_from_ns").first())
    cycles = timeline.filter(pl.col("cycle_us").is_not_null()).join(ends, on=SERVER)
    cycles = cycles.filter(pl.col("ts_start_ns") < pl.col("until_ns"))
    cycle, steps = cycles["cycle_us"].to_numpy(), cycles["interval_steps"].to_numpy().astype(float)
    idle = cycles["idle_after"].fill_null(value=False).to_numpy()
    if not (~idle).any():
        return 0.0, 0.0
    busy = cycle[~idle] * steps[~idle]
    busy_of_idle = np.minimum(cycle[idle], np.median(cycle[~idle])) * steps[idle]
    residual = float((busy * cycle[~idle]).sum() / (2 * busy.sum()))
    return residual, float((busy.sum() + busy_of_idle.sum()) / (cycle * steps).sum())
