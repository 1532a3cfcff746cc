"""Engines and their steps: the steps of every (run, server, epoch), one engine after the other in flat arrays.

Sums over steps are then sums over positions of one array, for all engines at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tracefit.tables.schema import ENGINE, SERVER

MAX_STEPS = 20_000_000
"""Most steps on the axis, two days at 10 ms each and 160 MB per array; counters that claim more are not accepted."""

MAX_GAP = 1_000_000
"""Most consecutive steps without any event, hours of work: a step id beyond such a gap is damaged."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepAxis:
    """All steps of all engines on one axis; position = offset of the engine + step id - its first step.

    Attributes:
        engines: One row per engine: run_id, server, epoch, engine (its number), server_number, first_step,
            last_step, offset.
        size: Positions on the axis.
    """

    engines: pl.DataFrame
    size: int

    def locate(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the columns of each row's engine, for `position`; rows of engines without a step are left out."""
        return rows.join(self.engines, on=ENGINE, how="inner", maintain_order="left")

    def frame(self) -> pl.DataFrame:
        """Return one row per position: engine, step_id, position, in axis order."""
        steps = (self.engines["last_step"] - self.engines["first_step"] + 1).to_numpy()
        engine = np.repeat(np.arange(len(steps)), steps)
        start = (self.engines["first_step"] - self.engines["offset"]).to_numpy()
        position = np.arange(self.size)
        return pl.DataFrame({"engine": engine, "step_id": position + start[engine], "position": position})

    def name(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Replace the number of an engine by the columns that name it."""
        names = self.engines.select("engine", *ENGINE)
        return rows.join(names, on="engine", how="left", maintain_order="left").drop("engine")


def position(step: pl.Expr) -> pl.Expr:
    """Return the position of a located row's step; null where the step is null or not on the axis."""
    inside = step.is_between(pl.col("first_step"), pl.col("last_step"))
    return pl.when(inside).then(pl.col("offset") + step - pl.col("first_step"))


def step_axis(steps: pl.DataFrame, snapshots: pl.DataFrame, journeys: pl.DataFrame) -> StepAxis:
    """Return an axis of all steps of each engine, from the first to the last one that a step, snapshot or event names.

    QUEUED does not count: it carries the counter of the step before it.
    """
    named = journeys.filter(pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED"))
    step_ids = pl.concat([frame.select(*ENGINE, "step_id") for frame in (steps, snapshots, named)])
    engines = _accepted(step_ids).sort(ENGINE)
    count = pl.col("last_step") - pl.col("first_step") + 1
    engines = engines.with_columns(
        offset=count.cum_sum() - count,
        engine=pl.int_range(pl.len(), dtype=pl.Int64),
        server_number=pl.struct(SERVER).rank("dense").cast(pl.Int64),
    )
    size = int(engines.select(count.sum()).item() or 0)
    # Many engines together can exceed the bound that each of them keeps.
    return StepAxis(engines, size) if size <= MAX_STEPS else StepAxis(engines.clear(), 0)


def _accepted(step_ids: pl.DataFrame) -> pl.DataFrame:
    """Return the first and last step of every engine; where ids lie far apart, those of the group with most ids."""
    bounds = step_ids.group_by(ENGINE).agg(
        first_step=pl.col("step_id").min(), last_step=pl.col("step_id").max()
    )
    # In floating point: ids near the ends of int64 do not overflow, and the bound is a rough one.
    claimed = pl.col("last_step").cast(pl.Float64) - pl.col("first_step").cast(pl.Float64)
    suspicious = bounds.filter(claimed > MAX_GAP)
    if not suspicious.height:
        return bounds
    ids = step_ids.join(suspicious, on=ENGINE, how="semi").sort(*ENGINE, "step_id")
    jump = pl.col("step_id").cast(pl.Float64).diff().over(ENGINE) > MAX_GAP
    ids = ids.with_columns(id_group=jump.fill_null(value=False).cast(pl.Int64).cum_sum().over(ENGINE))
    groups = ids.group_by(*ENGINE, "id_group").agg(
        names=pl.len(), first_step=pl.col("step_id").min(), last_step=pl.col("step_id").max()
    )
    # Damage hits single ids: the group that most events name is the engine's.
    most = groups.sort(*ENGINE, "names", "first_step", descending=[False] * 3 + [True, False])
    kept = most.unique(ENGINE, keep="first", maintain_order=True).select(bounds.columns)
    return pl.concat([bounds.join(suspicious, on=ENGINE, how="anti"), kept])


def range_add(size: int, first: Ints, last: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts over inclusive ranges of positions: a difference array; shape (size,)."""
    # Each range adds its amount at its first position and takes it off behind its last one; the cumulative sum covers it.
    begun, ended = bincount_at(size, first, amount), bincount_at(size + 1, last + 1, amount)
    return np.cumsum(begun - ended[:size])


def bincount_at(size: int, where: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts at positions; shape (size,)."""
    sums = np.bincount(where, weights=np.asarray(amount, dtype=float), minlength=size)[:size]
    return np.asarray(sums, dtype=np.float64)
