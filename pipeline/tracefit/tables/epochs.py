"""Engine epochs: a restarted server counts its steps from 1 again on the same clock."""

from __future__ import annotations

import polars as pl

STEP_JITTER = 8
"""How far step ids of different event kinds may run backwards within an epoch.

With asynchronous scheduling an event of step k is stamped after step k+1 began; the margin is several times that.
"""

DAMAGED_STEPS = 1_000_000
"""Nobody counts so many steps between two events, forth and back again."""


def assign_epochs(
    journeys: pl.DataFrame, steps: pl.DataFrame, snapshots: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Add an `epoch` column (0, 1, ... per server) to the three frames.

    A new epoch begins where step ids jump backwards while the clock goes forward: by any amount between two step
    summaries, by more than `STEP_JITTER` between any two events. Events without a step id (API layer) belong to the
    epoch running at their time.

    Args:
        journeys: Columns server, unix_ns, ts_ns, step_id.
        steps: Columns server, unix_ns, ts_start_ns, step_id.
        snapshots: Columns server, unix_ns, step_id; they carry no engine clock of their own.
    """
    marks = pl.concat(
        [
            steps.select("server", "step_id", _clock("ts_start_ns"), exact=pl.lit(value=True)),
            journeys.filter(pl.col("step_id").is_not_null()).select(
                "server", "step_id", _clock("ts_ns"), exact=pl.lit(value=False)
            ),
        ]
    ).drop_nulls("clock")
    starts = _epoch_starts(_plausible(marks))
    return (
        _in_epoch(journeys, starts, _clock("ts_ns")),
        _in_epoch(steps, starts, _clock("ts_start_ns")),
        _in_epoch(snapshots, starts, pl.col("unix_ns").alias("clock")),
    )


def _plausible(marks: pl.DataFrame) -> pl.DataFrame:
    """Leave out damaged ids, far above those before and after them: the way back down is no restart."""
    step = pl.col("step_id").cast(pl.Float64)
    above = [step - step.shift(k).over("server") > DAMAGED_STEPS for k in (1, -1)]
    return marks.sort("server", "clock").filter(~(above[0] & above[1]).fill_null(value=False))


def _clock(ts: str) -> pl.Expr:
    # Wall-clock time orders restarts of the host too; the monotonic clock is the fallback.
    return pl.coalesce("unix_ns", ts).alias("clock")


def _epoch_starts(marks: pl.DataFrame) -> pl.DataFrame:
    """One row per server and epoch: its number and `clock`, the time of its first known event."""
    ordered = marks.sort("server", "clock")
    first = ordered.group_by("server").agg(pl.col("clock").min())
    starts = (
        pl.concat([first, _large_jumps(ordered), _summary_jumps(ordered)]).unique().sort("server", "clock")
    )
    return starts.with_columns(epoch=pl.int_range(pl.len(), dtype=pl.Int64).over("server"))


def _large_jumps(ordered: pl.DataFrame) -> pl.DataFrame:
    drop = pl.col("step_id").shift(1).over("server") - pl.col("step_id")
    return ordered.filter(drop > STEP_JITTER).select("server", "clock")


def _summary_jumps(ordered: pl.DataFrame) -> pl.DataFrame:
    """Backward jumps between step summaries that no large jump in between has already told of."""
    before = [pl.col(c).shift(1).over("server").alias(f"last_{c}") for c in ("step_id", "clock")]
    summaries = (
        ordered.filter("exact").with_columns(before).filter(pl.col("last_step_id") >= pl.col("step_id"))
    )
    told = _large_jumps(ordered).with_columns(told=pl.col("clock"))
    known = summaries.sort("clock").join_asof(
        told.sort("clock"), on="clock", by="server", check_sortedness=False
    )
    return known.filter(pl.col("told").is_null() | (pl.col("told") <= pl.col("last_clock"))).select(
        "server", "clock"
    )


def _in_epoch(frame: pl.DataFrame, starts: pl.DataFrame, clock: pl.Expr) -> pl.DataFrame:
    """Attach the epoch running at each row's time; rows before the first mark belong to epoch 0."""
    rows = frame.with_columns(clock).with_row_index("_row")
    placed = rows.sort("clock").join_asof(
        starts.sort("clock").rename({"clock": "epoch_start"}),
        left_on="clock",
        right_on="epoch_start",
        by="server",
        check_sortedness=False,
    )
    return placed.sort("_row").with_columns(pl.col("epoch").fill_null(0)).drop("_row", "clock", "epoch_start")
