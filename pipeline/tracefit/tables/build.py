"""Staged parts of one run to its published tables, in windows: memory does not grow with the run.

The parts are gone over twice: once for the clock and the step counter alone, which tell restarts, and once for
everything. Rows leave in the order of their table, through sorts that keep on disk what does not fit into memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import polars as pl

from tracefit import memory
from tracefit.tables import dialects, schema
from tracefit.tables.clocks import on_core_clock
from tracefit.tables.epochs import MARKS, EpochScanner, in_epoch, marks_of
from tracefit.tables.external_sort import ExternalSort, SortSpace
from tracefit.tables.requests import (
    api_requests,
    cached_prompt_tokens,
    core_requests,
    first_hits,
    join_requests,
)
from tracefit.tables.resolve import Facts, resolve
from tracefit.tables.rows import NO_CLOCK
from tracefit.tables.runs import RunTally
from tracefit.tables.span_requests import request_spans, requests_from_spans
from tracefit.tables.staging import RunPart, parts_of, read_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tracefit.tables.manifest import ReadFile

WINDOW_BYTES = 8 << 20
"""Bytes on disk of the staged parts that are read as one; they are several times that in memory."""


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """What went through, for the report: nothing is lost without a number here."""

    spans: int = 0
    other_spans: int = 0
    duplicate_spans: int = 0
    dropped_attributes: int = 0
    rejects: int = 0
    clock_corrected_events: int = 0
    """API events whose clock was not the engine core's: moved to it by way of the wall clock."""
    events: tuple[tuple[str, int], ...] = ()


def build_tables(
    files: Sequence[ReadFile],
    *,
    run_id: str,
    stage: Path,
    scratch: Path,
    write: Callable[[str, pl.DataFrame], None],
    run_columns: Mapping[str, str | int | None],
) -> IngestCounts:
    """Build every table of a run but `timeline` and the training frames.

    Args:
        files: What was read, with its staged parts, in the order of their names.
        run_id: The run.
        stage: The folder of staged parts.
        scratch: A folder for what does not fit into memory.
        write: Takes the next rows of a table, in order; called at least once for every table.
        run_columns: What the `runs` table says of the whole run, beside what is counted here.

    Returns:
        The counts; a run without a single span of the vLLM scopes is not written at all.
    """
    run, spans_read = _taken_apart(files, run_id, stage, scratch)
    memory.give_back()
    other_spans = sum(part.other_spans for file in files for part in file.parts)
    if not run.counts["spans"]:
        return IngestCounts(other_spans=other_spans, rejects=run.counts["rejects"])
    counts = run.sum_up(other_spans=other_spans, spans_read=spans_read)
    run.finish(counts, write, run_columns)
    return counts


def _taken_apart(files: Sequence[ReadFile], run_id: str, stage: Path, scratch: Path) -> tuple[_Run, int]:
    """Return the rows of all tables, in sorts, and how many spans were read. What was known of each span is let go."""
    staged = parts_of(files)
    facts = resolve(stage, staged)
    parts = [_Part(part, known) for part, known in zip(staged, facts, strict=True)]
    run = _Run(run_id, SortSpace(scratch), _epoch_starts(stage, parts, scratch))
    for window in _windows(stage, parts):
        run.add(window)
    return run, sum(known.spans_read for known in facts)


@dataclass(frozen=True, slots=True)
class _Part:
    """A staged part, and what is known of its spans."""

    staged: RunPart
    facts: Facts


@dataclass(frozen=True, slots=True)
class _Window:
    """Staged parts that are read as one; their rows are counted on from part to part."""

    stage: Path
    parts: Sequence[tuple[_Part, int]]
    """Each with the number of its first row."""
    facts: pl.DataFrame
    """row, server, core_zero, server_zero of the spans that count."""

    @classmethod
    def of(cls, stage: Path, parts: Sequence[_Part]) -> _Window:
        """Make ready for reading; server names become texts, which they are not while they wait."""
        firsts = [0, *accumulate(part.facts.rows for part in parts[:-1])]
        numbered = list(zip(parts, firsts, strict=True))
        facts = [_moved(part.facts.spans, first) for part, first in numbered]
        return cls(stage, numbered, pl.concat(facts).with_columns(pl.col("server").cast(pl.String)))

    def every(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of all spans; those that tell where they came from name the file too."""
        frames = []
        for part, first in self.parts:
            rows = read_staged(self.stage, part.staged.name, kind, columns)
            if "row" in rows.columns:
                rows = _moved(rows, first)
            if "file" in rows.columns:
                rows = part.staged.of_files(rows, "source_file")
            frames.append(rows)
        return pl.concat(frames)

    def read(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return rows of the spans that count, with their facts."""
        rows = self.every(kind, columns)
        if "server" in rows.columns:
            rows = rows.drop("server")
        return rows.join(self.facts, on="row", how="inner", maintain_order="left")

    def journeys(self, columns: Sequence[str] | None = None) -> tuple[pl.DataFrame, pl.DataFrame, int]:
        """Return journey events on the engine's clock, rows of those without one, and how many were moved."""
        rows = self.read("journeys", columns)
        # A layer that stamps wall-clock time alone still has a place on the engine's clock: their difference is constant.
        rows = rows.with_columns(ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - pl.col("server_zero")))
        placed = rows.filter(pl.col("ts_ns").is_not_null())
        lost = rows.filter(pl.col("ts_ns").is_null()).select("row", reason=pl.lit(NO_CLOCK))
        placed, moved = on_core_clock(placed)
        return placed, lost, moved


def _moved(rows: pl.DataFrame, first: int) -> pl.DataFrame:
    return rows.with_columns(pl.col("row") + pl.lit(first, pl.UInt32))


def _windows(stage: Path, parts: Iterable[_Part]) -> Iterator[_Window]:
    """Put small parts together, in order: each frame of rows costs something whatever its size."""
    held: list[_Part] = []
    size = 0
    for part in parts:
        own = sum(file.stat().st_size for file in (stage / part.staged.name).iterdir())
        if held and size + own > WINDOW_BYTES:
            yield _Window.of(stage, held)
            held, size = [], 0
        held.append(part)
        size += own
    if held:
        yield _Window.of(stage, held)


def _epoch_starts(stage: Path, parts: Sequence[_Part], scratch: Path) -> pl.DataFrame:
    """Go over the marks of the whole run in the order of their clock."""
    marks = SortSpace(scratch).sort(key=("clock",), order=("clock", "server", "step_id", "exact"))
    marks.add(pl.DataFrame(schema=MARKS))
    for window in _windows(stage, parts):
        steps = window.read("steps", ("row", "unix_ns", "ts_start_ns", "step_id"))
        journeys, _, _ = window.journeys(("row", "unix_ns", "ts_ns", "step_id", "layer"))
        marks.add(marks_of(steps, journeys))
    scanner = EpochScanner()
    for rows in marks.windows():
        scanner.feed(rows)
    return scanner.starts()


@dataclass(slots=True)
class _Run:
    """The rows of a run on their way to the tables."""

    run_id: str
    space: SortSpace
    starts: pl.DataFrame
    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    sorts: dict[str, ExternalSort] = field(default_factory=dict)
    cached: list[pl.DataFrame] = field(default_factory=list)
    layer_columns: dict[str, list[str]] = field(default_factory=dict)

    def add(self, window: _Window) -> None:
        """Take some parts apart."""
        spans = window.read("spans")
        self.counts["spans"] += spans.height
        self.counts["dropped_attributes"] += int(spans["dropped_attributes"].sum() or 0)
        counted = window.read("events").group_by("name").agg(pl.col("count").sum())
        self.events.update(dict(counted.iter_rows()))
        self._take("spans", spans)
        self._take("spans", window.every("others"))
        steps = window.read("steps")
        self._take("steps", in_epoch(steps, self.starts, "ts_start_ns"))
        snapshots = in_epoch(window.read("snapshots"), self.starts, None)
        self._take("request_snapshots", snapshots)
        self.cached.append(cached_prompt_tokens(snapshots))
        journeys, lost, moved = window.journeys()
        self.counts["moved"] += moved
        self._add_journeys(in_epoch(journeys, self.starts, "ts_ns"), spans)
        self._add_rejects(window, spans, lost)

    def _add_journeys(self, journeys: pl.DataFrame, spans: pl.DataFrame) -> None:
        ids = spans.select("row", "trace_id", "span_id", "parent_span_id", "request_id")
        journeys = journeys.join(ids, on="row", how="left", maintain_order="left")
        self._take("journey_events", journeys)
        api_spans = spans.filter(pl.col("scope").is_in(dialects.API_SCOPES))
        layers = {
            "core": core_requests(journeys),
            "api": api_requests(journeys, api_spans),
            "spans": request_spans(spans),
        }
        self.layer_columns = {side: frame.columns for side, frame in layers.items()}
        both = pl.concat([f.with_columns(side=pl.lit(s)) for s, f in layers.items()], how="diagonal")
        self._sort("layers").add(both)

    def _add_rejects(self, window: _Window, spans: pl.DataFrame, lost: pl.DataFrame) -> None:
        places = spans.select("row", "source_offset", "source_file")
        bad = pl.concat([window.read("incomplete").select("row", "reason"), lost])
        found = bad.join(places, on="row", how="inner").drop("row")
        found = found.with_columns(excerpt=pl.lit(""), count=pl.lit(1, pl.Int64))
        rejects = pl.concat([window.every("rejects"), found], how="diagonal")
        self.counts["rejects"] += int(rejects["count"].sum())
        self._take("rejects", rejects)

    def _take(self, name: str, rows: pl.DataFrame) -> None:
        self._sort(name).add(schema.TABLES[name].shape(rows.with_columns(run_id=pl.lit(self.run_id))))

    def _sort(self, name: str) -> ExternalSort:
        if name not in self.sorts:
            table = schema.TABLES.get(name)
            # The first column of a key is the run's.
            key = table.key[1:5] if table else ("trace_id",)
            order = table.order[1:] if table else key
            self.sorts[name] = self.space.sort(key, order)
        return self.sorts[name]

    def sum_up(self, *, other_spans: int, spans_read: int) -> IngestCounts:
        """Return the counts, once every part was taken."""
        return IngestCounts(
            spans=self.counts["spans"],
            other_spans=other_spans,
            duplicate_spans=spans_read - self.counts["spans"],
            dropped_attributes=self.counts["dropped_attributes"],
            rejects=self.counts["rejects"],
            clock_corrected_events=self.counts["moved"],
            events=tuple(sorted(self.events.items())),
        )

    def finish(
        self,
        counts: IngestCounts,
        write: Callable[[str, pl.DataFrame], None],
        run_columns: Mapping[str, str | int | None],
    ) -> None:
        """Write every table, in an order in which each finds what it needs counted."""
        tally = RunTally(self.run_id)
        self._finish_requests()
        for name in ("requests", "journey_events", "request_snapshots", "steps", "spans", "rejects"):
            write(name, schema.TABLES[name].empty())
            for window in self._sort(name).windows():
                rows = _without_repeats(window) if name == "spans" else window
                tally.add(name, rows)
                write(name, rows)
            del self.sorts[name]
        counted: dict[str, str | int | None] = {
            "other_spans": counts.other_spans,
            "duplicate_spans": counts.duplicate_spans,
            "rejects": counts.rejects,
            "dropped_attributes": counts.dropped_attributes,
            "clock_corrected_events": counts.clock_corrected_events,
            "events": json.dumps(dict(counts.events)),
        }
        write("runs", tally.rows({**run_columns, **counted}))

    def _finish_requests(self) -> None:
        cached = first_hits(pl.concat(self.cached))
        self.cached.clear()
        self._sort("requests").add(schema.REQUESTS.empty())
        for window in self._sort("layers").windows():
            core, api, described = (
                window.filter(side=s).select(self.layer_columns[s]) for s in ("core", "api", "spans")
            )
            hits = cached.join(
                core, left_on=cached.columns[:3], right_on=["server", "epoch", "request_id"], how="semi"
            )
            self._sort("requests").add(
                join_requests(core, api, requests_from_spans(described), hits, run_id=self.run_id)
            )
        del self.sorts["layers"]


def _without_repeats(spans: pl.DataFrame) -> pl.DataFrame:
    """Leave one of each span, that of the first file.

    Those of the vLLM scopes are single by now; others come as often as they were read.
    """
    ids = ["trace_id", "span_id"]
    if spans.n_unique(ids) == spans.height:
        return spans
    numbered = spans.with_row_index("row").sort("source_file", "source_offset", maintain_order=True)
    return numbered.unique(ids, keep="first").sort("row").drop("row")
