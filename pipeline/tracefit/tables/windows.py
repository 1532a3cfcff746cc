"""Read staged parts of some runs in windows, so that memory does not grow with the runs, and sort out impossible
rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import polars as pl
from msgspec.structs import replace

from tracefit.tables import schema
from tracefit.tables.clocks import is_off_clock, on_core_clock
from tracefit.tables.epochs import BOUNDS, STRAY_STEPS, STRAYS
from tracefit.tables.qualified import QUALIFIED, qualified
from tracefit.tables.record_servers import with_names, with_one_clock
from tracefit.tables.rows import NO_CLOCK
from tracefit.tables.sources import is_from
from tracefit.tables.staging import read_staged, staged_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.tables.resolve import ResolvedRuns, RunPart
    from tracefit.tables.storage import Storage

_BYTES_PER_SPAN = 128
"""Least bytes that a span counts: spans without content compress to nearly nothing, but still take memory."""


class Sieve(msgspec.Struct, frozen=True):
    """The rules of the tables, with the facts of the whole run that they use.

    Attributes:
        limits: Settings of the server that bound values.
        clocks: Clocks of the servers, as `clocks_of` returns them.
        strays: Marks with an impossible step, as the scanner of epochs returns them.
        bounds: Lowest and highest step of each server, from the same scanner.
    """

    limits: Mapping[str, float]
    clocks: pl.DataFrame
    strays: pl.DataFrame = msgspec.field(default_factory=lambda: pl.DataFrame(schema=STRAYS))
    bounds: pl.DataFrame = msgspec.field(default_factory=lambda: pl.DataFrame(schema=BOUNDS))

    def sift(self, name: str, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the rows of a table that stay, and the broken rules: row, reason.

        Bounds are checked first, because differences of numbers within them do not overflow.
        """
        table = schema.TABLES[name]
        columns = rows.columns
        kept, broken = table.sift(rows, self.limits)
        ts = next((c for c in ("ts_ns", "ts_start_ns") if c in columns), None)
        evidence = {}
        if ts is not None:
            evidence[schema.OFF_CLOCK] = is_off_clock(kept, ts, self.clocks)
        if "step_id" in columns:
            evidence[schema.STRAY_STEP] = self._strays(kept, ts)
        if not any(mark.any() for mark in evidence.values()):
            return kept, broken
        kept, also = table.sift(kept.with_columns(**evidence), {})
        return kept.select(columns), pl.concat([broken, also])

    def recorded(self) -> Sieve:
        """Return the sieve for recorded steps, which are not checked against the scheduler's own settings."""
        return replace(self, limits={}, clocks=self.clocks.clear())

    def _strays(self, rows: pl.DataFrame, ts: str | None) -> pl.Series:
        if not (self.bounds if ts is None else self.strays).height:
            return pl.repeat(value=False, n=rows.height, eager=True)
        if ts is not None:
            marks = rows.select(pl.col("server").cast(pl.String), pl.coalesce("unix_ns", ts).alias("clock"), "step_id")
            marked = self.strays.unique().with_columns(is_stray=pl.lit(value=True))
            joined = marks.join(marked, on=["server", "clock", "step_id"], how="left", maintain_order="left")
            return joined["is_stray"].fill_null(value=False)
        # Snapshots have no engine time, so they are checked against the range of accepted steps.
        bounded = rows.select(pl.col("server").cast(pl.String), "step_id").join(
            self.bounds, on="server", how="left", maintain_order="left"
        )
        outside = (pl.col("step_id") < pl.col("least") - STRAY_STEPS) | (
            pl.col("step_id") > pl.col("most") + STRAY_STEPS
        )
        return bounded.select(outside.fill_null(value=False)).to_series()


class Window(msgspec.Struct, frozen=True):
    """Staged parts that are read together.

    Attributes:
        storage: The storage of the parts.
        parts: Each part with the number of its first row; row numbers continue from part to part.
        facts: server, core_zero, server_zero of each row; the server is null for spans that do not count.
        links: row, twin, owner: the twins and owners of `ResolvedRuns`.
        several: As in `ResolvedRuns`, and `log_owners`, `record_servers` and `clock_setbacks` too.
    """

    storage: Storage
    parts: Sequence[tuple[RunPart, int]]
    facts: pl.DataFrame
    links: pl.DataFrame
    several: bool
    log_owners: Mapping[int, str]
    record_servers: pl.DataFrame
    clock_setbacks: pl.DataFrame

    @classmethod
    def of(cls, storage: Storage, run: ResolvedRuns, begin: int, end: int) -> Window:
        """Return a window of the parts from one number to another."""
        first = run.firsts[begin]
        parts = [(run.parts[number], run.firsts[number] - first) for number in range(begin, end)]
        # Server names become text only here, to save memory until then.
        facts = run.facts[first : run.firsts[end]].with_columns(pl.col("server").cast(pl.String))
        links = run.twins.join(run.owners, on="row", how="full", coalesce=True)
        links = links.filter(pl.col("row").is_between(first, run.firsts[end], closed="left"))
        links = links.with_columns(pl.col("row") - pl.lit(first, pl.UInt32))
        of_records = run.log_owners, run.record_servers, run.clock_setbacks
        return cls(storage, parts, facts, links, run.several, *of_records)

    def every(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of all spans, counted or not; a file number is replaced by the name of the file.

        Rows of several runs have the number of their `run` beside it, and qualified names.
        """
        frames = []
        for part, first in self.parts:
            rows = read_staged(self.storage, part.name, kind, columns)
            if first and "row" in rows.columns:
                rows = rows.with_columns(pl.col("row") + pl.lit(first, pl.UInt32))
            if "file" in rows.columns:
                rows = part.of_files(rows, "source_file", *(["run"] if self.several else []))
            frames.append(rows)
        rows = pl.concat(frames)
        if "run" in rows.columns:
            rows = rows.with_columns(qualified(name) for name in QUALIFIED if name in rows.columns)
        return rows

    def recorded(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the recorded steps, numbered, with the names of their servers; null where a file has two of one
        name.
        """
        rows = self.every("recorded_steps", columns).with_row_index("row")
        rows = with_names(with_one_clock(rows, self.clock_setbacks), self.record_servers)
        if not self.log_owners:
            return rows
        run = pl.col("run") if self.several else pl.lit(0)
        owner = run.replace_strict(self.log_owners, default=None, return_dtype=pl.String)
        is_owned = is_from(lambda source: source.of_traced_server) & pl.col("server").is_not_null()
        return rows.with_columns(server=pl.when(is_owned).then(pl.coalesce(owner, "server")).otherwise("server"))

    def read(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of the spans that count, with their facts."""
        rows = self.every(kind, columns)
        # Facts are gathered by the number of the row: a join takes several times as long.
        joined = rows.drop("server", strict=False).hstack(self.facts[rows["row"]])
        return joined.drop_nulls("server") if joined["server"].has_nulls() else joined

    def journeys(
        self, sieve: Sieve, columns: Sequence[str] | None = None
    ) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Return journey events on the engine's clock, events without it, broken rules, and events that were
        corrected.
        """
        rows, broken = sieve.sift("journey_events", self.read("journeys", columns))
        # A layer that stamps only wall-clock time can still be put on the engine's clock: their difference is constant.
        rows = rows.with_columns(ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - pl.col("server_zero")))
        placed = rows.filter(pl.col("ts_ns").is_not_null())
        lost = rows.filter(pl.col("ts_ns").is_null()).select("row", reason=pl.lit(NO_CLOCK))
        corrected, count = on_core_clock(placed)
        moved = placed.filter(corrected["ts_ns"] != placed["ts_ns"]) if count else placed.clear()
        return corrected, lost, broken, moved


def window_bounds(storage: Storage, run: ResolvedRuns, window_bytes: int) -> list[tuple[int, int]]:
    """Return the first and last number of the parts of each window; small parts share a window and its fixed cost."""
    begins: list[int] = []
    size = 0
    sizes = staged_bytes(storage, (part.name for part in run.parts))
    for number, (stored, (first, end)) in enumerate(zip(sizes, pairwise(run.firsts), strict=True)):
        part_bytes = max(stored, (end - first) * _BYTES_PER_SPAN)
        if not begins or size + part_bytes > window_bytes:
            begins.append(number)
            size = 0
        size += part_bytes
    return list(pairwise([*begins, len(run.parts)]))
