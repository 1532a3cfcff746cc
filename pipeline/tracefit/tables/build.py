"""Staged parts of one run to its published tables, in windows: memory does not grow with the run.

The parts are gone over twice: once for the clock and the step counter alone, which tell restarts, and once for
everything. Rows leave in the order of their table, through sorts that keep on disk what does not fit into memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.clocks import on_core_clock
from tracefit.tables.epochs import MARKS, EpochScanner, in_epoch, marks_of
from tracefit.tables.external_sort import ExternalSort
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
from tracefit.tables.span_requests import telling_spans, told_requests
from tracefit.tables.staging import read_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tracefit.tables.manifest import ReadFile


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """What went through, for the report: nothing is lost without a number here."""

    spans: int = 0
    other_spans: int = 0
    duplicate_spans: int = 0
    dropped_attributes: int = 0
    rejects: int = 0
    moved_events: int = 0
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
    parts = [(file.path, part.name) for file in files for part in file.parts]
    facts = resolve(stage, [name for _, name in parts])
    other_spans = sum(part.other_spans for file in files for part in file.parts)
    starts = _epoch_starts(stage, parts, facts, scratch)
    run = _Run(run_id, scratch, starts)
    for (path, name), known in zip(parts, facts, strict=True):
        run.add(_Part.of(stage, name, path, known))
    if not run.counts["spans"]:
        return IngestCounts(other_spans=other_spans, rejects=run.rejects.rows)
    counts = run.sum_up(other_spans=other_spans, spans_read=sum(f.spans_read for f in facts))
    run.finish(counts, write, run_columns)
    return counts


@dataclass(frozen=True, slots=True)
class _Part:
    """One staged part, and what is known of its spans."""

    stage: Path
    name: str
    source_file: str
    facts: pl.DataFrame
    """row, server, core_zero, server_zero of the spans that count."""

    @classmethod
    def of(cls, stage: Path, name: str, source_file: str, facts: Facts) -> _Part:
        """Make ready for reading; server names become texts, which they are not while they wait."""
        return cls(stage, name, source_file, facts.spans.with_columns(pl.col("server").cast(pl.String)))

    def read(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return rows of the spans that count, with their facts."""
        rows = read_staged(self.stage, self.name, kind, columns)
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


def _epoch_starts(
    stage: Path, parts: Sequence[tuple[str, str]], facts: Sequence[Facts], scratch: Path
) -> pl.DataFrame:
    """Go over the marks of the whole run in the order of their clock."""
    marks = ExternalSort(scratch, key=("clock",), order=("clock", "server", "step_id", "exact"))
    marks.add(pl.DataFrame(schema=MARKS))
    for (path, name), known in zip(parts, facts, strict=True):
        part = _Part.of(stage, name, path, known)
        steps = part.read("steps", ("row", "unix_ns", "ts_start_ns", "step_id"))
        journeys, _, _ = part.journeys(("row", "unix_ns", "ts_ns", "step_id", "layer"))
        marks.add(marks_of(steps, journeys))
    scanner = EpochScanner()
    for window in marks.windows():
        scanner.feed(window)
    return scanner.starts()


@dataclass(slots=True)
class _Run:
    """The rows of a run on their way to the tables."""

    run_id: str
    scratch: Path
    starts: pl.DataFrame
    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    sorts: dict[str, ExternalSort] = field(default_factory=dict)
    cached: list[pl.DataFrame] = field(default_factory=list)
    layer_columns: dict[str, list[str]] = field(default_factory=dict)

    @property
    def rejects(self) -> ExternalSort:
        """The rejects so far."""
        return self._sort("rejects")

    def add(self, part: _Part) -> None:
        """Take one part apart."""
        spans = part.read("spans").with_columns(source_file=pl.lit(part.source_file))
        self.counts["spans"] += spans.height
        self.counts["dropped_attributes"] += int(spans["dropped_attributes"].sum() or 0)
        counted = part.read("events").group_by("name").agg(pl.col("count").sum())
        self.events.update(dict(counted.iter_rows()))
        self._take("spans", spans)
        others = read_staged(part.stage, part.name, "others")
        self._take("spans", others.with_columns(source_file=pl.lit(part.source_file)))
        steps = part.read("steps")
        self._take("steps", in_epoch(steps, self.starts, "ts_start_ns"))
        snapshots = in_epoch(part.read("snapshots"), self.starts, None)
        self._take("request_snapshots", snapshots)
        self.cached.append(cached_prompt_tokens(snapshots))
        journeys, lost, moved = part.journeys()
        self.counts["moved"] += moved
        self._add_journeys(in_epoch(journeys, self.starts, "ts_ns"), spans)
        self._add_rejects(part, spans, lost)

    def _add_journeys(self, journeys: pl.DataFrame, spans: pl.DataFrame) -> None:
        ids = spans.select("row", "trace_id", "span_id", "parent_span_id", "request_id")
        journeys = journeys.join(ids, on="row", how="left", maintain_order="left")
        self._take("journey_events", journeys)
        api_spans = spans.filter(pl.col("scope") == dialects.API_SCOPE)
        layers = {
            "core": core_requests(journeys),
            "api": api_requests(journeys, api_spans),
            "told": telling_spans(spans),
        }
        self.layer_columns = {side: frame.columns for side, frame in layers.items()}
        both = pl.concat([f.with_columns(side=pl.lit(s)) for s, f in layers.items()], how="diagonal")
        self._sort("layers").add(both)

    def _add_rejects(self, part: _Part, spans: pl.DataFrame, lost: pl.DataFrame) -> None:
        places = spans.select("row", "source_offset")
        bad = pl.concat([part.read("incomplete").select("row", "reason"), lost]).join(
            places, on="row", how="inner"
        )
        rejects = read_staged(part.stage, part.name, "rejects")
        rows = pl.concat([rejects, bad.select("source_offset", "reason", excerpt=pl.lit(""))], how="diagonal")
        self._take("rejects", rows.with_columns(source_file=pl.lit(part.source_file)))

    def _take(self, name: str, rows: pl.DataFrame) -> None:
        self._sort(name).add(schema.TABLES[name].shape(rows.with_columns(run_id=pl.lit(self.run_id))))

    def _sort(self, name: str) -> ExternalSort:
        if name not in self.sorts:
            table = schema.TABLES.get(name)
            # The first column of a key is the run's.
            key = table.key[1:5] if table else ("trace_id",)
            order = table.order[1:] if table else key
            self.sorts[name] = ExternalSort(self.scratch, key, order)
        return self.sorts[name]

    def sum_up(self, *, other_spans: int, spans_read: int) -> IngestCounts:
        """Return the counts, once every part was taken."""
        return IngestCounts(
            spans=self.counts["spans"],
            other_spans=other_spans,
            duplicate_spans=spans_read - self.counts["spans"],
            dropped_attributes=self.counts["dropped_attributes"],
            rejects=self.rejects.rows,
            moved_events=self.counts["moved"],
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
            "moved_events": counts.moved_events,
            "events": json.dumps(dict(counts.events)),
        }
        write("runs", tally.rows({**run_columns, **counted}))

    def _finish_requests(self) -> None:
        cached = first_hits(pl.concat(self.cached))
        self._sort("requests").add(schema.REQUESTS.empty())
        for window in self._sort("layers").windows():
            core, api, telling = (
                window.filter(side=s).select(self.layer_columns[s]) for s in ("core", "api", "told")
            )
            told = told_requests(telling)
            self._sort("requests").add(join_requests(core, api, told, cached, run_id=self.run_id))
        del self.sorts["layers"]


def _without_repeats(spans: pl.DataFrame) -> pl.DataFrame:
    """Leave one of each span. Those of the vLLM scopes are single by now; others come as often as they were read."""
    return spans.unique(["trace_id", "span_id"], keep="first", maintain_order=True)
