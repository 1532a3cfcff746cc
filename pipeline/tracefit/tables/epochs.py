"""Engine epochs: a restarted server counts its steps from 1 again on the same clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP_JITTER = 8
"""How far step ids of different event kinds may run backwards within an epoch.

With asynchronous scheduling an event of step k is stamped after step k+1 began; the margin is several times that.
"""

DAMAGED_STEPS = 1_000_000
"""Nobody counts so many steps between two events, forth and back again."""

_BEFORE_ALL = np.iinfo(np.int64).min

MARKS = {"server": pl.String, "clock": pl.Int64, "step_id": pl.Int64, "exact": pl.Boolean}
"""What the scanner reads: an event of a step at a time, `exact` if it is the step's summary."""


def marks_of(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the events that name a step.

    Args:
        steps: Columns server, unix_ns, ts_start_ns, step_id.
        journeys: Columns server, unix_ns, ts_ns, step_id.
    """
    kinds = ((steps, "ts_start_ns", True), (journeys.drop_nulls("step_id"), "ts_ns", False))
    return pl.concat(
        f.select(pl.col("server").cast(pl.String), _clock(ts), "step_id", exact=pl.lit(exact))
        for f, ts, exact in kinds
    ).drop_nulls("clock")


def _clock(ts: str) -> pl.Expr:
    # Wall-clock time orders restarts of the host too; the monotonic clock is the fallback.
    return pl.coalesce("unix_ns", ts).alias("clock")


@dataclass(slots=True)
class EpochScanner:
    """Finds the restarts of every server, going over its marks once in the order of their clock.

    A new epoch begins where step ids jump backwards while the clock goes forward: by any amount between two step
    summaries, by more than `STEP_JITTER` between any two events.
    """

    _servers: dict[str, _Server] = field(default_factory=dict)

    def feed(self, window: pl.DataFrame) -> None:
        """Read the next marks: columns as in `MARKS`, sorted by clock."""
        for (name,), marks in window.group_by("server", maintain_order=True):
            server = self._servers.setdefault(str(name), _Server())
            server.feed(*(marks[c].to_numpy() for c in ("clock", "step_id", "exact")))

    def starts(self) -> pl.DataFrame:
        """Return one row per server and epoch: its number and `clock`, the time of its first known event."""
        found = [
            pl.DataFrame({"server": name, "clock": server.starts()}, schema_overrides={"clock": pl.Int64})
            for name, server in self._servers.items()
        ]
        none = pl.DataFrame(schema={"server": pl.String, "clock": pl.Int64})
        starts = pl.concat([none, *found]).sort("server", "clock")
        return starts.with_columns(epoch=pl.int_range(pl.len(), dtype=pl.Int64).over("server"))


@dataclass(slots=True)
class _Server:
    """The scan of one server: what of the marks behind it bears on those to come."""

    first_clock: int | None = None
    raw_step: int | None = None
    """Step of the last mark, believed or not."""
    step: int | None = None
    """Step of the last mark that is believed."""
    exact: tuple[int, int] | None = None
    """Step and clock of the last summary."""
    jump_clock: int = _BEFORE_ALL
    """Time of the last jump larger than jitter."""
    held: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]] | None = None
    """The last mark: whether it is believed depends on the next."""
    jumps: set[int] = field(default_factory=set)

    def feed(self, clock: NDArray[np.int64], step: NDArray[np.int64], exact: NDArray[np.bool_]) -> None:
        if self.held is not None:
            clock, step, exact = (
                np.concatenate([old, new]) for old, new in zip(self.held, (clock, step, exact), strict=True)
            )
        self.held = (clock[-1:], step[-1:], exact[-1:])
        self._scan(clock[:-1], step[:-1], exact[:-1], next_step=int(step[-1]))

    def starts(self) -> list[int]:
        """Return the clocks at which epochs begin, the first one included."""
        if self.held is not None:
            self._scan(*self.held, next_step=None)
            self.held = None
        return sorted({*self.jumps, *([] if self.first_clock is None else [self.first_clock])})

    def _scan(
        self,
        clock: NDArray[np.int64],
        step: NDArray[np.int64],
        exact: NDArray[np.bool_],
        *,
        next_step: int | None,
    ) -> None:
        if not len(clock):
            return
        # Damaged ids lie far above those before and after them: the way back down is no restart.
        raw = step.astype(np.float64)
        before = np.concatenate([[np.nan if self.raw_step is None else self.raw_step], raw[:-1]])
        after = np.concatenate([raw[1:], [np.nan if next_step is None else next_step]])
        self.raw_step = int(step[-1])
        good = ~((raw - before > DAMAGED_STEPS) & (raw - after > DAMAGED_STEPS))
        clock, step, exact = clock[good], step[good], exact[good]
        if not len(clock):
            return
        if self.first_clock is None:
            self.first_clock = int(clock[0])
        previous = np.concatenate([[step[0] if self.step is None else self.step], step[:-1]])
        is_jump = previous.astype(np.float64) - step > STEP_JITTER
        told = np.maximum.accumulate(np.where(is_jump, clock, self.jump_clock))
        self.jumps.update(clock[is_jump].tolist())
        self._compare_summaries(clock[exact], step[exact], told[exact])
        self.step, self.jump_clock = int(step[-1]), int(told[-1])

    def _compare_summaries(
        self, clock: NDArray[np.int64], step: NDArray[np.int64], told: NDArray[np.int64]
    ) -> None:
        """Find backward jumps between summaries that no large jump in between has already told of."""
        if not len(clock):
            return
        last_step, last_clock = self.exact or (int(step[0]) - 1, int(clock[0]))
        steps_before = np.concatenate([[last_step], step[:-1]])
        clocks_before = np.concatenate([[last_clock], clock[:-1]])
        is_back = (steps_before >= step) & (told <= clocks_before)
        self.jumps.update(clock[is_back].tolist())
        self.exact = (int(step[-1]), int(clock[-1]))


def in_epoch(frame: pl.DataFrame, starts: pl.DataFrame, clock: str | None) -> pl.DataFrame:
    """Attach the epoch running at each row's time; rows before the first mark, and without a time, are of epoch 0.

    Args:
        frame: Columns server, unix_ns and `clock`.
        starts: What the scanner found.
        clock: Column of the time on the engine's clock, which stands in for the wall clock; None if there is none.
    """
    if not starts.select(pl.col("epoch").max()).item():
        return frame.with_columns(epoch=pl.lit(0, pl.Int64))
    time = _clock(clock) if clock else pl.col("unix_ns").alias("clock")
    rows = frame.with_columns(time).with_row_index("_row")
    placed = rows.sort("clock").join_asof(
        starts.sort("clock").rename({"clock": "epoch_start"}),
        left_on="clock",
        right_on="epoch_start",
        by="server",
        check_sortedness=False,
    )
    return placed.sort("_row").with_columns(pl.col("epoch").fill_null(0)).drop("_row", "clock", "epoch_start")
