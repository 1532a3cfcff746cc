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

STRAY_STEPS, FASTEST_STEP_NS = 1_000, 200_000
"""A counter goes on by as many steps as fit into the time, and by so many besides: clocks of layers differ a little."""

_NEIGHBOURS = 3
"""Marks on either side that a mark is compared with."""

_BEFORE_ALL = np.iinfo(np.int64).min

MARKS = {"server": pl.String, "clock": pl.Int64, "step_id": pl.Int64, "exact": pl.Boolean}
"""What the scanner reads: an event of a step at a time, `exact` if it is the step's summary."""

STRAYS = {"server": pl.String, "clock": pl.Int64, "step_id": pl.Int64}
"""Marks whose step cannot be: no counter gets there from the marks before it, or from there to those behind it."""


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
    summaries, by more than `STEP_JITTER` between any two events. Marks that stray do not count.
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

    def strays(self) -> pl.DataFrame:
        """Return the marks that stray, as in `STRAYS`; complete once `starts` was called."""
        found = [
            pl.DataFrame({"server": name, "clock": clock, "step_id": step}, schema_overrides=STRAYS)
            for name, server in self._servers.items()
            for clock, step in server.strays
        ]
        return pl.concat([pl.DataFrame(schema=STRAYS), *found])

    def bounds(self) -> pl.DataFrame:
        """Return the lowest and the highest step of every server that is accepted: server, least, most."""
        found = [(name, s.least, s.most) for name, s in self._servers.items() if s.step is not None]
        return pl.DataFrame(
            found, schema={"server": pl.String, "least": pl.Int64, "most": pl.Int64}, orient="row"
        )


@dataclass(slots=True)
class _Server:
    """The scan of one server: what of the marks behind it bears on those to come."""

    first_clock: int | None = None
    step: int | None = None
    """Step of the last mark that is accepted."""
    least: int = np.iinfo(np.int64).max
    most: int = 0
    exact: tuple[int, int] | None = None
    """Step and clock of the last summary."""
    jump_clock: int = _BEFORE_ALL
    """Time of the last jump larger than jitter."""
    held: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]] | None = None
    """The last marks: those compared with, then those that wait for what follows them."""
    scanned: int = 0
    """How many of the held marks were scanned already."""
    jumps: set[int] = field(default_factory=set)
    strays: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)

    def feed(self, clock: NDArray[np.int64], step: NDArray[np.int64], exact: NDArray[np.bool_]) -> None:
        if self.held is not None:
            clock, step, exact = (
                np.concatenate([old, new]) for old, new in zip(self.held, (clock, step, exact), strict=True)
            )
        self._scan(clock, step, exact, stop=max(len(step) - _NEIGHBOURS, self.scanned))

    def starts(self) -> list[int]:
        """Return the clocks at which epochs begin, the first one included."""
        if self.held is not None:
            self._scan(*self.held, stop=len(self.held[0]))
            self.held = None
        return sorted({*self.jumps, *([] if self.first_clock is None else [self.first_clock])})

    def _scan(
        self, clock: NDArray[np.int64], step: NDArray[np.int64], exact: NDArray[np.bool_], *, stop: int
    ) -> None:
        """Scan marks up to `stop`; those behind it wait for what they are compared with."""
        new, first_kept = slice(self.scanned, stop), max(stop - _NEIGHBOURS, 0)
        stray = _stray(clock, step)[new]
        self.held = (clock[first_kept:], step[first_kept:], exact[first_kept:])
        self.scanned = stop - first_kept
        clock, step, exact = clock[new], step[new], exact[new]
        if stray.any():
            self.strays.append((clock[stray], step[stray]))
            clock, step, exact = clock[~stray], step[~stray], exact[~stray]
        if not len(clock):
            return
        self.least, self.most = min(self.least, int(step.min())), max(self.most, int(step.max()))
        if self.first_clock is None:
            self.first_clock = int(clock[0])
        previous = np.concatenate([[step[0] if self.step is None else self.step], step[:-1]])
        is_jump = previous.astype(np.float64) - step > STEP_JITTER
        last_jump = np.maximum.accumulate(np.where(is_jump, clock, self.jump_clock))
        self.jumps.update(clock[is_jump].tolist())
        self._compare_summaries(clock[exact], step[exact], last_jump[exact])
        self.step, self.jump_clock = int(step[-1]), int(last_jump[-1])

    def _compare_summaries(
        self, clock: NDArray[np.int64], step: NDArray[np.int64], last_jump: NDArray[np.int64]
    ) -> None:
        """Find backward jumps between summaries that no large jump in between has already marked."""
        if not len(clock):
            return
        last_step, last_clock = self.exact or (int(step[0]) - 1, int(clock[0]))
        steps_before = np.concatenate([[last_step], step[:-1]])
        clocks_before = np.concatenate([[last_clock], clock[:-1]])
        is_back = (steps_before >= step) & (last_jump <= clocks_before)
        self.jumps.update(clock[is_back].tolist())
        self.exact = (int(step[-1]), int(clock[-1]))


def _stray(clock: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Find marks that nearly no neighbour supports and that no counter could have come to, or gone on from.

    A counter can fall to nothing at a restart, but climb only as fast as steps end. So the last mark before a restart
    and the first one behind it are no strays, however far they are from one side.
    """
    supporters = np.zeros(len(step), np.int64)
    neighbours = np.zeros(len(step), np.int64)
    cannot = []
    for sign in (-1, 1):
        reached, there = np.ones(len(step), bool), np.zeros(len(step), np.int64)
        for k in range(1, _NEIGHBOURS + 1):
            here, other = (slice(k, None), slice(None, -k)) if sign < 0 else (slice(None, -k), slice(k, None))
            climbed = -sign * (step[here].astype(np.float64) - step[other])
            room = STRAY_STEPS + np.abs(clock[here].astype(np.float64) - clock[other]) / FASTEST_STEP_NS
            supporters[here] += np.abs(climbed) <= room
            there[here] += 1
            reached[here] &= climbed > room
        neighbours += there
        cannot.append(reached & (there > 0))
    unsupported = supporters < np.where(neighbours > 2, 2, 1)
    is_stray: NDArray[np.bool_] = unsupported & (cannot[0] | cannot[1]) & (neighbours > 1)
    return is_stray


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
