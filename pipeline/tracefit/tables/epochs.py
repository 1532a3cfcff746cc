"""Find engine epochs: a restarted server counts its steps from 1 again on the same clock.

`scan_epochs` reads the events that name a step (*marks*) in the order of time and finds where the counter falls back.
Most of this module makes sure that a single absurd step id, or a late stamp, does not look like a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.tables.sources import is_by_client

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

STEP_JITTER = 8
"""Steps by which the ids of different kinds of events may fall back within an epoch.

With asynchronous scheduling an event of step k is stamped after step k+1 begins; the margin is several times that.
"""

FASTEST_STEP_NS = 200_000
"""Least time of a step: a counter climbs by at most the steps that fit into the time, plus a slack."""

STRAY_STEPS = 1_000
"""That slack between two marks: clocks of layers differ a little."""

_NEIGHBOURING_MARKS = 3
"""Marks on either side that a mark is compared with."""

_BEFORE_ALL = int(np.iinfo(np.int64).min)
"""A step and a time below all others, for the state before the first mark: no mark can fall back from it."""

MARK_TYPES = {"server": pl.String, "clock": pl.Int64, "step_id": pl.Int64, "exact": pl.Boolean}
"""Columns of marks: the time of an event and its step; `exact` if it is the step's summary."""

STRAYS = {"server": pl.String, "clock": pl.Int64, "step_id": pl.Int64}
"""Columns of marks with an impossible step: no counter climbs to it from the marks before, or from it to the marks
after."""

BOUNDS = {"server": pl.String, "least": pl.Int64, "most": pl.Int64}
"""Columns of the range of a server's accepted steps."""


def marks_of(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the events that name a step.

    Args:
        steps: Columns server, unix_ns, ts_start_ns, step_id.
        journeys: Columns server, unix_ns, ts_ns, step_id.
    """
    kinds = ((steps, "ts_start_ns", True), (journeys.drop_nulls("step_id"), "ts_ns", False))
    return pl.concat(
        f.select(pl.col("server").cast(pl.String), _clock(ts), "step_id", exact=pl.lit(exact)) for f, ts, exact in kinds
    ).drop_nulls("clock")


RECORDED_MARKS = ("file", "source_offset", "server", "unix_ns", "step_id", "cycle_source")
"""Columns of recorded steps that their servers and `marks_of_records` need."""


def marks_of_records(recorded: pl.DataFrame) -> pl.DataFrame:
    """Return the recorded steps with a time as marks, inexact because they may arrive out of order.

    Steps that a client saw do not count: every benchmark numbers its own.
    """
    marks = recorded.filter(~is_by_client()).select("server", "step_id", clock="unix_ns", exact=pl.lit(value=False))
    return marks.drop_nulls("clock").select(list(MARK_TYPES))


def _clock(ts: str) -> pl.Expr:
    # The wall clock also orders restarts of the host; the monotonic clock is the fallback.
    return pl.coalesce("unix_ns", ts).alias("clock")


def scan_epochs(windows: Iterable[pl.DataFrame]) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Find the restarts of every server in one pass over its marks.

    A new epoch begins where step ids fall back while the clock goes forward: by any amount between two step
    summaries, by more than `STEP_JITTER` between other events. Stray marks do not count.

    Args:
        windows: The marks of all servers, columns as `MARK_TYPES`, in the order of their clock.

    Returns:
        One row per server and epoch, with `epoch`, its number, and `clock`, the time of its first event; the stray
        marks, columns as `STRAYS`; and the range of each server's accepted steps, columns as `BOUNDS`.
    """
    servers: dict[str, _Server] = {}
    for window in windows:
        for (name,), marks in window.group_by("server", maintain_order=True):
            servers.setdefault(str(name), _Server()).feed(marks.drop("server"))
    begins = [(name, clock) for name, server in servers.items() for clock in server.starts()]
    starts = pl.DataFrame(begins, {"server": pl.String, "clock": pl.Int64}, orient="row").sort("server", "clock")
    strays = [
        marks.select(pl.lit(name).alias("server"), "clock", "step_id")
        for name, server in servers.items()
        for marks in server.strays
    ]
    bounds = [(name, server.least, server.most) for name, server in servers.items() if server.epoch_starts]
    return (
        starts.with_columns(epoch=pl.int_range(pl.len(), dtype=pl.Int64).over("server")),
        pl.concat([pl.DataFrame(schema=STRAYS), *strays]),
        pl.DataFrame(bounds, BOUNDS, orient="row"),
    )


class _Server(msgspec.Struct):
    """The scan of one server.

    Attributes:
        epoch_starts: The times at which the epochs so far begin.
        least: The lowest accepted step.
        most: The highest accepted step.
        strays: Marks with an impossible step.
        last_step: Step of the last accepted mark.
        last_jump: Time of the last fall back by more than jitter.
        last_summary: Step and time of the last accepted summary.
        waiting: The last marks: scanned ones, which are neighbours of the next, then those that wait for their
            neighbours.
        scanned: Number of the scanned ones among them.
    """

    epoch_starts: set[int] = msgspec.field(default_factory=set)
    least: int = np.iinfo(np.int64).max
    most: int = 0
    strays: list[pl.DataFrame] = msgspec.field(default_factory=list)
    last_step: int = _BEFORE_ALL
    last_jump: int = _BEFORE_ALL
    last_summary: tuple[int, int] = (_BEFORE_ALL, _BEFORE_ALL)
    waiting: pl.DataFrame = msgspec.field(default_factory=lambda: pl.DataFrame(schema=MARK_TYPES).drop("server"))
    scanned: int = 0

    def feed(self, marks: pl.DataFrame) -> None:
        self.waiting = pl.concat([self.waiting, marks])
        # The last few wait for the marks to compare them with.
        self._scan_waiting(stop=max(self.waiting.height - _NEIGHBOURING_MARKS, self.scanned))

    def starts(self) -> list[int]:
        """Return the times at which epochs begin, including the first."""
        self._scan_waiting(stop=self.waiting.height)
        self.waiting, self.scanned = self.waiting.clear(), 0
        return sorted(self.epoch_starts)

    def _scan_waiting(self, *, stop: int) -> None:
        """Scan the waiting marks up to `stop`, and keep those to compare the next marks with."""
        is_stray = pl.Series(_is_stray(self.waiting), dtype=pl.Boolean)[self.scanned : stop]
        marks = self.waiting[self.scanned : stop]
        first_kept = max(stop - _NEIGHBOURING_MARKS, 0)
        self.waiting, self.scanned = self.waiting[first_kept:], stop - first_kept
        if is_stray.any():
            self.strays.append(marks.filter(is_stray))
            marks = marks.filter(~is_stray)
        if marks.height:
            self._accept(marks)

    def _accept(self, marks: pl.DataFrame) -> None:
        """Find the epochs that begin among marks without strays."""
        clock, step, exact = (marks[c].to_numpy() for c in ("clock", "step_id", "exact"))
        self.least, self.most = min(self.least, int(step.min())), max(self.most, int(step.max()))
        if not self.epoch_starts:
            self.epoch_starts.add(int(clock[0]))
        previous = np.concatenate([[self.last_step], step[:-1]])
        # As floats: the step before the first mark is so low that the difference of integers would wrap.
        is_jump = previous.astype(np.float64) - step > STEP_JITTER
        jumps = np.maximum.accumulate(np.where(is_jump, clock, self.last_jump))
        self.epoch_starts.update(clock[is_jump].tolist())
        # Summaries come in the order of their steps: any fall back between two is a restart, however small, unless a
        # large one between them has marked it already.
        steps, clocks = np.column_stack([self.last_summary, [step[exact], clock[exact]]])
        is_back = (steps[:-1] >= steps[1:]) & (jumps[exact] <= clocks[:-1])
        self.epoch_starts.update(clocks[1:][is_back].tolist())
        self.last_step, self.last_jump = int(step[-1]), int(jumps[-1])
        self.last_summary = int(steps[-1]), int(clocks[-1])


def _is_stray(marks: pl.DataFrame) -> NDArray[np.bool_]:
    """Return which marks almost no neighbour supports and no counter can reach or leave.

    A counter can fall to 0 at a restart, but climbs only as fast as steps end. So the last mark before a restart
    and the first mark after it are not strays, however far they are from one side.
    """
    # As floats: the difference of two absurd steps may be beyond 64 bits.
    clock, step = (marks[c].to_numpy().astype(np.float64) for c in ("clock", "step_id"))
    # For both sides of a mark: the number of its neighbours, and whether the climb to or from all of them is too large.
    neighbours = np.zeros((2, marks.height), np.int64)
    is_impossible = np.ones((2, marks.height), np.bool_)
    supporters = np.zeros(marks.height, np.int64)
    for distance in range(1, _NEIGHBOURING_MARKS + 1):
        earlier, later = slice(None, -distance), slice(distance, None)
        climbed = step[later] - step[earlier]
        allowed = STRAY_STEPS + np.abs(clock[later] - clock[earlier]) / FASTEST_STEP_NS
        for side, here in enumerate((later, earlier)):
            neighbours[side, here] += 1
            supporters[here] += np.abs(climbed) <= allowed
            is_impossible[side, here] &= climbed > allowed
    is_impossible &= neighbours > 0
    count = neighbours.sum(axis=0)
    # With a single neighbour either of the two could be the stray.
    mask: NDArray[np.bool_] = is_impossible.any(axis=0) & (supporters < np.where(count > 2, 2, 1)) & (count > 1)
    return mask


def in_epoch(frame: pl.DataFrame, starts: pl.DataFrame, clock: str | None) -> pl.DataFrame:
    """Add the epoch that runs at each row's time; rows before the first mark, and rows without a time, get epoch 0.

    Args:
        frame: Columns server, unix_ns and `clock`.
        starts: The epochs, as `scan_epochs` returns them.
        clock: Column of the time on the engine's clock, which replaces a missing wall-clock time, or None.
    """
    if not starts.select(pl.col("epoch").max()).item():
        return frame.with_columns(epoch=pl.lit(0, pl.Int64))
    time = _clock(clock) if clock else pl.col("unix_ns").alias("clock")
    rows = frame.with_columns(time).with_row_index("_row")
    joined = rows.sort("clock").join_asof(
        starts.sort("clock").rename({"clock": "epoch_start"}),
        left_on="clock",
        right_on="epoch_start",
        by="server",
        check_sortedness=False,
    )
    return joined.sort("_row").with_columns(pl.col("epoch").fill_null(0)).drop("_row", "clock", "epoch_start")


def in_benchmark(steps: pl.DataFrame) -> pl.DataFrame:
    """Return recorded steps with the second in which their benchmark begins as epoch, if a client saw them.

    The clocks of benchmarks are known to the second, so that one may seem to begin before the one before it ends.

    Args:
        steps: source_file, source_offset, unix_ns, cycle_source, epoch; all steps of a benchmark.
    """
    begin_s = pl.col("unix_ns").min().over("source_file", "source_offset") // 10**9
    return steps.with_columns(epoch=pl.when(is_by_client()).then(begin_s.fill_null(0)).otherwise("epoch"))
