"""Engines and their steps: every (run, server, epoch) is one row of steps, laid end to end in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

ENGINE = ["run_id", "server", "epoch"]
MAX_STEPS = 20_000_000
"""Most steps laid out; counters that claim more are not believed."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepAxis:
    """All steps of all engines on one axis; position = offset of the engine + step id - its first step.

    Attributes:
        engines: One row per engine: run_id, server, epoch, first_step, last_step, offset.
        size: Positions on the axis.
    """

    engines: pl.DataFrame
    size: int

    def place(self, rows: pl.DataFrame, step: str, name: str = "position") -> pl.DataFrame:
        """Add a column of positions: null where the step is null or not on the axis.

        Args:
            rows: Columns of the engine and `step`.
            step: Column of step ids.
            name: Column to add.
        """
        ends = {"first_step": "_first", "last_step": "_last", "offset": "_offset"}
        known = rows.join(self.engines.rename(ends), on=ENGINE, how="left", maintain_order="left")
        inside = pl.col(step).is_between(pl.col("_first"), pl.col("_last"))
        position = pl.when(inside).then(pl.col("_offset") + pl.col(step) - pl.col("_first"))
        return known.with_columns(position.alias(name)).drop(ends.values())

    def frame(self) -> pl.DataFrame:
        """One row per position: engine, step_id, in axis order."""
        repeats = self.engines["last_step"] - self.engines["first_step"] + 1
        spread = self.engines.select(*ENGINE, "first_step").select(pl.all().repeat_by(repeats).explode())
        return spread.with_columns(
            step_id=pl.col("first_step") + pl.int_range(pl.len()).over(ENGINE),
            position=pl.int_range(pl.len()),
        ).drop("first_step")


def lay_out(steps: pl.DataFrame, snapshots: pl.DataFrame, journeys: pl.DataFrame) -> StepAxis:
    """Lay out every step between the first and the last one that anything names.

    QUEUED carries the counter of the step before it and names no step of its own.
    """
    named = journeys.filter(pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED"))
    seen = pl.concat([frame.select(*ENGINE, "step_id") for frame in (steps, snapshots, named)])
    engines = (
        seen.group_by(ENGINE)
        .agg(first_step=pl.col("step_id").min(), last_step=pl.col("step_id").max())
        .sort(ENGINE)
    )
    count = pl.col("last_step") - pl.col("first_step") + 1
    engines = engines.with_columns(offset=count.cum_sum() - count)
    return StepAxis(engines, int(engines.select(count.sum()).item() or 0))


def spread(size: int, first: Ints, last: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts over inclusive ranges of positions: a difference array; shape (size,)."""
    edges = np.zeros(size + 1)
    np.add.at(edges, first, amount)
    np.add.at(edges, last + 1, -np.asarray(amount))
    return np.cumsum(edges)[:size]


def pile(size: int, position: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts at positions; shape (size,)."""
    piled = np.bincount(position, weights=np.asarray(amount, dtype=float), minlength=size)[:size]
    return np.asarray(piled, dtype=np.float64)
