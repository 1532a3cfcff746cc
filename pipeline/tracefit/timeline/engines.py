"""One axis for the steps of all engines (run, server, epoch), one engine after the other.

Sums over steps are then sums over positions of one array, for all engines at once.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from tracefit.tables.epochs import FASTEST_STEP_NS
from tracefit.tables.schema import ENGINE, MOST_STEP, SERVER

_SLACK_STEPS = 100
"""An engine runs at most as many steps between two events as fit into the time, plus a few without work."""

_MAX_UNNAMED, _UNNAMED_PER_NAMED = 300_000, 16
"""Most steps without an event on the axis: a number for each run, and more for each step with an event."""

_GAP_STEPS = 2
"""Positions of a gap, for the steps that the events before it end in or give the start of."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class StepAxis(msgspec.Struct, frozen=True):
    """All steps of all engines on one axis; position = offset of the engine + step number - its first step.

    A gap of step ids without steps, or with too many, takes `_GAP_STEPS` positions, after which the number of a step is
    smaller than its id. So the size depends on the number of events and not on the ids in them.

    Attributes:
        engines: One row per engine: run_id, server, epoch, engine (its number), server_number, first_step,
            last_step (its number), offset.
        pieces: The step ids between gaps, at least one row per engine: columns of the engine, engine, first_id,
            last_id, removed (id less number of its steps), positions (including those of the gap after it).
        size: Positions on the axis.
    """

    engines: pl.DataFrame
    pieces: pl.DataFrame
    size: int

    def locate(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the columns of each row's engine, for `position`, and turn its `step_id` into a number; drop rows of
        engines without steps.
        """
        located = rows.join(self.engines, on=ENGINE, how="inner", maintain_order="left")
        if self.pieces.height == self.engines.height:
            return located
        end = pl.col("first_id") + pl.col("positions") - 1
        end = pl.when(end > pl.col("last_id")).then(end)
        pieces = self.pieces.select(*ENGINE, "first_id", "removed", end=end).sort("first_id")
        joined = (
            located.with_row_index("_row")
            .sort("step_id")
            .join_asof(pieces, left_on="step_id", right_on="first_id", by=ENGINE, check_sortedness=False)
        )
        number = pl.min_horizontal("step_id", "end") - pl.col("removed")
        # Before the first step (QUEUED of a fresh engine) nothing was removed.
        is_known = pl.col("step_id").is_not_null()
        numbered = joined.with_columns(step_id=pl.coalesce(pl.when(is_known).then(number), "step_id"))
        return numbered.sort("_row").drop("_row", "first_id", "removed", "end")

    def frame(self) -> pl.DataFrame:
        """Return one row per position, in order: engine, step_id, position, is_gap."""
        first, last, engine, counts = (
            self.pieces[c].to_numpy() for c in ("first_id", "last_id", "engine", "positions")
        )
        piece = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(self.size)
        step_id = at - np.repeat(np.cumsum(counts) - counts, counts) + first[piece]
        is_gap = step_id > last[piece]
        return pl.DataFrame({"engine": engine[piece], "step_id": step_id, "position": at, "is_gap": is_gap})

    def name(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Replace the number of each engine by the columns that name it."""
        names = self.engines.select("engine", *ENGINE)
        return rows.join(names, on="engine", how="left", maintain_order="left").drop("engine")


def position(step: pl.Expr) -> pl.Expr:
    """Return the position of a located row's step; null where the step is null or not on the axis."""
    inside = step.is_between(pl.col("first_step"), pl.col("last_step"))
    return pl.when(inside).then(pl.col("offset") + step - pl.col("first_step"))


def step_axis(steps: pl.DataFrame, snapshots: pl.DataFrame, journeys: pl.DataFrame) -> StepAxis:
    """Return an axis with the steps of each engine, from the first to the last that a step, snapshot or event names.

    QUEUED does not count: it carries the counter of the step before it.
    """
    named = journeys.filter(pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED"))
    clocks = ((steps, pl.col("ts_start_ns")), (snapshots, pl.lit(None, pl.Int64)), (named, pl.col("ts_ns")))
    ids = pl.concat([frame.select(*ENGINE, "step_id", at_ns=at) for frame, at in clocks])
    ids = ids.filter(pl.col("step_id").is_between(0, MOST_STEP))
    pieces = _pieces(ids.group_by(*ENGINE, "step_id").agg(pl.col("at_ns").min()).sort(*ENGINE, "step_id"))
    engines = (
        pieces.group_by(ENGINE, maintain_order=True)
        .agg(first_step=pl.col("first_id").first(), count=pl.col("positions").sum())
        .with_columns(
            last_step=pl.col("first_step") + pl.col("count") - 1,
            offset=pl.col("count").cum_sum() - pl.col("count"),
            engine=pl.int_range(pl.len(), dtype=pl.Int64),
            server_number=pl.struct(SERVER).rank("dense").cast(pl.Int64),
        )
    )
    pieces = pieces.join(engines.select(*ENGINE, "engine"), on=ENGINE, how="left", maintain_order="left")
    return StepAxis(engines.drop("count"), pieces, int(engines["count"].sum()))


def _pieces(ids: pl.DataFrame) -> pl.DataFrame:
    """Cut the named step ids of every engine, in order, at their gaps; see `StepAxis.pieces`.

    Gaps are the climbs that do not fit into the time, and the widest of the others until the rest fits on the axis.
    """
    climbed = pl.col("step_id").diff().over(ENGINE) - 1
    fit = pl.col("at_ns").diff().over(ENGINE).clip(lower_bound=0) // FASTEST_STEP_NS + _SLACK_STEPS
    ids = ids.with_columns(unnamed=climbed, is_gap=(climbed > fit).fill_null(value=False))
    widths = ids.filter(~pl.col("is_gap")).select("run_id", "unnamed").drop_nulls()
    # Each run has its own limit, so that its axis does not depend on the other runs.
    if widths["unnamed"].sum() > _MAX_UNNAMED:
        named = ids.group_by("run_id").agg(most=_MAX_UNNAMED + _UNNAMED_PER_NAMED * pl.len().cast(pl.Int64))
        many = widths.sort("unnamed").join(named, on="run_id", how="left", maintain_order="left")
        many = many.filter(pl.col("unnamed").cum_sum().over("run_id") > pl.col("most"))
        wide = many.group_by("run_id").agg(wide=pl.col("unnamed").min())
        ids = ids.join(wide, on="run_id", how="left", maintain_order="left")
        is_wide = (pl.col("unnamed") >= pl.col("wide")).fill_null(value=False)
        ids = ids.with_columns(is_gap=pl.col("is_gap") | is_wide).drop("wide")
    pieces = (
        ids.with_columns(piece=pl.col("is_gap").cum_sum().over(ENGINE))
        .group_by(*ENGINE, "piece", maintain_order=True)
        .agg(first_id=pl.col("step_id").first(), last_id=pl.col("step_id").last())
    )
    is_last = pl.col("piece") == pl.col("piece").max().over(ENGINE)
    ids_in_piece = pl.col("last_id") - pl.col("first_id") + 1
    pieces = pieces.with_columns(positions=ids_in_piece + pl.when(is_last).then(0).otherwise(_GAP_STEPS))
    number = pl.col("first_id").first() + pl.col("positions").cum_sum() - pl.col("positions")
    return pieces.with_columns(removed=pl.col("first_id") - number.over(ENGINE)).drop("piece")


def range_add(size: int, first: Ints, last: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts over inclusive ranges of positions by a difference array; shape (size,)."""
    # Each range adds its amount at its first position and subtracts it after its last.
    begun, ended = bincount_at(size, first, amount), bincount_at(size + 1, last + 1, amount)
    return np.cumsum(begun - ended[:size])


def bincount_at(size: int, where: Ints, amount: Floats | Ints) -> Floats:
    """Sum amounts at positions; shape (size,)."""
    sums = np.bincount(where, weights=np.asarray(amount, dtype=float), minlength=size)[:size]
    return np.asarray(sums, dtype=np.float64)
