"""Build the published tables of runs from their staged parts, in windows, so that memory does not grow with the run.

Small runs are rows of the same frames, and are divided when they are written.

The parts are read twice: first only for clocks and step counters, which show restarts, then for everything. Rows leave
in the order of their table, through sorts that spill to disk.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import polars as pl

from tracefit import memory
from tracefit.errors import printable
from tracefit.statistics import divided
from tracefit.tables import dialects, schema
from tracefit.tables.clocks import api_clocks, is_off_clock, on_core_clock
from tracefit.tables.epochs import (
    BOUNDS,
    MARKS,
    RECORDED_MARKS,
    STRAY_STEPS,
    STRAYS,
    in_epoch,
    marks_of,
    marks_of_records,
    scan_epochs,
)
from tracefit.tables.external_sort import ExternalSort, SortSpace
from tracefit.tables.qualified import QUALIFIED, qualified, run_of
from tracefit.tables.requests import (
    api_requests,
    cached_prompt_tokens,
    clock_bounds,
    core_requests,
    first_hits,
    join_requests,
    request_spans,
    requests_from_spans,
    sift_numbers,
    with_api_moved,
)
from tracefit.tables.resolve import ResolvedRuns, RunPart, parts_of, resolve
from tracefit.tables.rows import NO_CLOCK
from tracefit.tables.runs import missing_attributes, run_rows
from tracefit.tables.sources import RECORDS, CycleSource
from tracefit.tables.stages import results_of, steps_of
from tracefit.tables.staging import read_staged, staged_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tracefit.options import BuildLimits
    from tracefit.tables.places import Place
    from tracefit.tables.store import ReadFile, RunsWriter


_BYTES_PER_SPAN = 128
"""Least bytes that a span counts: spans without content compress to nearly nothing, but still take memory."""

OTHER_RECORD = "steps.step_id is that of another record with other values"
"""Reason of a record whose step is recorded already."""

_LAYER_BLOCK_ROWS = 1024
"""Trace ids are random: a block of every spilled part waits while the layers are joined, at several times its size."""

_MOST_SCOPES = 16
"""How many other scopes are named: those with the most spans."""

_ODD_SHARE = 0.01
"""If a larger share of a run's values contradicts a setting, the setting is not the server's and is not used."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run whose tables are built.

    Attributes:
        run_id: Its id.
        files: Its trace files with their staged parts, in the order of their names; there is a span of the vLLM scopes in
            them.
        columns: Values of the `runs` table for the whole run, beside the counts.
    """

    run_id: str
    files: Sequence[ReadFile]
    columns: Mapping[str, str | int | None]


class UnlikeRunsError(Exception):
    """Runs that cannot be built together: some of them contradict a setting, and others do not."""


def build_tables(
    runs: Sequence[TracedRun],
    *,
    place: Place,
    scratch: Path,
    writer: RunsWriter,
    limits: Mapping[str, float],
    memory_limits: BuildLimits,
    has_free_core: bool = False,
) -> None:
    """Build every table of some runs except `timeline` and the training frames.

    Args:
        runs: The runs; several only if they are small, in the order of their ids.
        place: Where the staged parts are.
        scratch: A folder on disk for rows that do not fit into memory.
        writer: Takes the tables.
        limits: Settings of the servers that bound values of the tables; one that a run contradicts is not used.
        memory_limits: How much of the runs is in memory at a time.
        has_free_core: Whether a second core is free: rows are then sorted and spilled in a thread, which holds a third more.

    Raises:
        UnlikeRunsError: They have to be built one by one.
    """
    # A third each for the rows being read, the rows that wait for the next block, and a sorted copy.
    window_bytes = memory_limits.sorted_bytes // 3
    with SortSpace(scratch, memory_limits.sorted_bytes, window_bytes, has_thread=has_free_core) as space:
        resolved = resolve(place, parts_of([run.files for run in runs]), several=len(runs) > 1)
        bounds = _window_bounds(place, resolved, memory_limits.window_bytes)
        windows = (_Window.of(place, resolved, *each) for each in bounds)
        starts, sieve = _epoch_starts(windows, space, _Sieve(limits, resolved.clocks))
        building = _RunRows(runs, space, starts, sieve)
        for each in bounds:
            building.add(_Window.of(place, resolved, *each))
        spans_read = resolved.spans_read
        del resolved, windows  # the facts of every span: the rest needs the memory
        memory.give_back()
        building.finish(writer, spans_read)


@dataclass(frozen=True, slots=True)
class _Sieve:
    """The rules of the tables, with the facts of the whole run that they use.

    Attributes:
        limits: Settings of the server that bound values.
        clocks: Clocks of the servers, as `clocks_of` returns them.
        strays: Marks with an impossible step, as the scanner of epochs returns them.
        bounds: Lowest and highest step of each server, from the same scanner.
    """

    limits: Mapping[str, float]
    clocks: pl.DataFrame
    strays: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STRAYS))
    bounds: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=BOUNDS))

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

    def recorded(self) -> _Sieve:
        """Return the sieve for recorded steps, which are not checked against the scheduler's own settings."""
        return replace(self, limits={}, clocks=self.clocks.clear())

    def _strays(self, rows: pl.DataFrame, ts: str | None) -> pl.Series:
        if not (self.bounds if ts is None else self.strays).height:
            return pl.repeat(value=False, n=rows.height, eager=True)
        if ts is not None:
            marks = rows.select(
                pl.col("server").cast(pl.String), pl.coalesce("unix_ns", ts).alias("clock"), "step_id"
            )
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


@dataclass(frozen=True, slots=True)
class _Window:
    """Staged parts that are read together.

    Attributes:
        place: The storage of the parts.
        parts: Each part with the number of its first row; row numbers continue from part to part.
        facts: server, core_zero, server_zero of each row; the server is null for spans that do not count.
        links: row, twin, owner: the twins and owners of `ResolvedRuns`.
        several: As in `ResolvedRuns`, and `log_owners` too.
    """

    place: Place
    parts: Sequence[tuple[RunPart, int]]
    facts: pl.DataFrame
    links: pl.DataFrame
    several: bool
    log_owners: Mapping[int, str]

    @classmethod
    def of(cls, place: Place, run: ResolvedRuns, begin: int, end: int) -> _Window:
        """Return a window of the parts from one number to another."""
        first = run.firsts[begin]
        parts = [(run.parts[number], run.firsts[number] - first) for number in range(begin, end)]
        # Server names become text only here, to save memory until then.
        facts = run.facts[first : run.firsts[end]].with_columns(pl.col("server").cast(pl.String))
        links = run.twins.join(run.owners, on="row", how="full", coalesce=True)
        links = links.filter(pl.col("row").is_between(first, run.firsts[end], closed="left"))
        links = links.with_columns(pl.col("row") - pl.lit(first, pl.UInt32))
        return cls(place, parts, facts, links, run.several, run.log_owners)

    def every(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of all spans, counted or not; a file number is replaced by the name of the file.

        Rows of several runs have the number of their `run` beside it, and qualified names.
        """
        frames = []
        for part, first in self.parts:
            rows = read_staged(self.place, part.name, kind, columns)
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
        """Return the recorded steps, numbered, with the names of their servers."""
        rows = self.every("recorded_steps", columns).with_row_index("row")
        if not self.log_owners:
            return rows
        of_log, run = (
            pl.col("cycle_source") == CycleSource.LOG.value,
            pl.col("run") if self.several else pl.lit(0),
        )
        owner = run.replace_strict(self.log_owners, default=None, return_dtype=pl.String)
        return rows.with_columns(
            server=pl.when(of_log).then(pl.coalesce(owner, "server")).otherwise("server")
        )

    def read(self, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of the spans that count, with their facts."""
        rows = self.every(kind, columns)
        # Facts are gathered by the number of the row: a join takes several times as long.
        joined = rows.drop("server", strict=False).hstack(self.facts[rows["row"]])
        return joined.drop_nulls("server") if joined["server"].has_nulls() else joined

    def journeys(
        self, sieve: _Sieve, columns: Sequence[str] | None = None
    ) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Return journey events on the engine's clock, events without it, broken rules, and events that were corrected."""
        rows, broken = sieve.sift("journey_events", self.read("journeys", columns))
        # A layer that stamps only wall-clock time can still be put on the engine's clock: their difference is constant.
        rows = rows.with_columns(ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - pl.col("server_zero")))
        placed = rows.filter(pl.col("ts_ns").is_not_null())
        lost = rows.filter(pl.col("ts_ns").is_null()).select("row", reason=pl.lit(NO_CLOCK))
        corrected, count = on_core_clock(placed)
        moved = placed.filter(corrected["ts_ns"] != placed["ts_ns"]) if count else placed.clear()
        return corrected, lost, broken, moved


def _window_bounds(place: Place, run: ResolvedRuns, window_bytes: int) -> list[tuple[int, int]]:
    """Return the first and last number of the parts of each window; small parts share a window and its fixed cost."""
    begins: list[int] = []
    size = 0
    sizes = staged_bytes(place, (part.name for part in run.parts))
    for number, (stored, (first, end)) in enumerate(zip(sizes, pairwise(run.firsts), strict=True)):
        part_bytes = max(stored, (end - first) * _BYTES_PER_SPAN)
        if not begins or size + part_bytes > window_bytes:
            begins.append(number)
            size = 0
        size += part_bytes
    return list(pairwise([*begins, len(run.parts)]))


def _epoch_starts(windows: Iterable[_Window], space: SortSpace, sieve: _Sieve) -> tuple[pl.DataFrame, _Sieve]:
    """Scan the marks of the whole run in the order of their clock; return the epochs, and the sieve for odd rows."""
    marks = space.sort(key=("clock",), order=("clock", "server", "step_id", "exact"))
    marks.add(pl.DataFrame(schema=MARKS))
    # This pass counts the values beyond each setting, and rejects none: only its end shows whether the run
    # contradicts one.
    free = replace(sieve, limits={})
    limited = {
        name: [c for c in schema.TABLES[name].columns if c.limit in sieve.limits]
        for name in ("steps", "journey_events")
    }
    # By run, setting and column: how many values there are, and how many are above the setting.
    values, above = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    for window in windows:
        columns = ("row", "unix_ns", "ts_start_ns", "step_id", *(c.name for c in limited["steps"]))
        steps, _ = free.sift("steps", window.read("steps", columns))
        columns = (
            "row",
            "unix_ns",
            "ts_ns",
            "step_id",
            "layer",
            *(c.name for c in limited["journey_events"]),
        )
        journeys, _, _, _ = window.journeys(free, columns)
        recorded, _ = free.recorded().sift("steps", window.recorded(RECORDED_MARKS))
        marks.add(pl.concat([marks_of(steps, journeys), marks_of_records(recorded)]))
        for name, rows in (("steps", steps), ("journey_events", journeys)):
            bounded = {c.name: c.limit for c in limited[name] if c.limit}
            counts = {f"{c} values": pl.col(c).count() for c in bounded}
            counts |= {f"{c} above": (pl.col(c) > sieve.limits[limit]).sum() for c, limit in bounded.items()}
            for run, of_run in _by_run(rows, window.several, **counts) if bounded else ():
                for c, limit in bounded.items():
                    values[run, limit, c] += of_run[f"{c} values"]
                    above[run, limit, c] += of_run[f"{c} above"] or 0
    starts, strays, bounds = scan_epochs(marks.windows())
    refuted = {run: set[str]() for run, _, _ in values}
    for (run, limit, name), n in above.items():
        refuted[run] |= {limit} if n > values[run, limit, name] * _ODD_SHARE else set()
    every, *others = list(refuted.values()) or [set[str]()]
    if any(other != every for other in others):
        raise UnlikeRunsError
    accepted = {name: most for name, most in sieve.limits.items() if name not in every}
    return starts, replace(sieve, limits=accepted, strays=strays, bounds=bounds)


def _by_run(rows: pl.DataFrame, several: bool, **values: pl.Expr) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each run with rows, and values over its rows."""
    if not several:
        yield 0, rows.select(**values).row(0, named=True)
        return
    for of_run in rows.group_by(_run_of(rows, several=True)).agg(**values).iter_rows(named=True):
        yield of_run.pop("run"), of_run


def _run_of(rows: pl.DataFrame, *, several: bool) -> pl.Expr:
    """Return the number of each row's run."""
    if not several:
        return pl.lit(0, pl.UInt32).alias("run")
    return (pl.col("run") if "run" in rows.columns else run_of("server")).alias("run")


@dataclass(slots=True)
class _Tally:
    """Counts of one run."""

    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    implausible: Counter[str] = field(default_factory=Counter)
    other_scopes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _RunRows:
    """The rows of some runs on their way to the tables."""

    runs: Sequence[TracedRun]
    space: SortSpace
    starts: pl.DataFrame
    sieve: _Sieve
    several: bool = False
    tallies: list[_Tally] = field(default_factory=list)
    sorts: dict[str, ExternalSort] = field(default_factory=dict)
    # One per window, because the snapshots of a request may be in another window than its spans.
    cached: list[pl.DataFrame] = field(default_factory=list)
    layer_columns: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.several = len(self.runs) > 1
        self.tallies = [_Tally() for _ in self.runs]

    def add(self, window: _Window) -> None:
        """Add the rows of a window to the sorts of all tables."""
        # The table of spans has no rules; the attributes that requests use are bounded here.
        spans, odd_spans = sift_numbers(window.read("spans"))
        self._count(spans, spans=pl.len(), dropped_attributes=pl.col("dropped_attributes").sum())
        for run, name, count in self._sums(window.read("events"), "name"):
            self.tallies[run].events[name] += count
        self._take("spans", spans)
        other_spans = window.every("other_scope_spans")
        self._count(other_spans, other=pl.len())
        for run, scope, count in self._sums(window.every("other_scopes"), "scope"):
            self.tallies[run].other_scopes[printable(scope or "unnamed")] += count
        self._take("spans", other_spans)
        steps, odd_steps = self.sieve.sift("steps", window.read("steps"))
        self._take("steps", in_epoch(steps, self.starts, "ts_start_ns"))
        odd_records = self._add_recorded(window)
        snapshots, odd_snapshots = self.sieve.sift("request_snapshots", window.read("snapshots"))
        snapshots = in_epoch(snapshots, self.starts, None)
        self._take("request_snapshots", snapshots)
        self.cached.append(cached_prompt_tokens(snapshots))
        journeys, lost, odd_journeys, moved = window.journeys(self.sieve)
        self._count(moved, clock_corrected_events=pl.len())
        spans = spans.join(window.links, on="row", how="left", maintain_order="left")
        self._add_journeys(in_epoch(journeys, self.starts, "ts_ns"), spans)
        self._add_rejects(
            window, spans, lost, pl.concat([odd_spans, odd_steps, odd_snapshots, odd_journeys]), odd_records
        )

    def _count(self, rows: pl.DataFrame, **values: pl.Expr) -> None:
        for run, of_run in _by_run(rows, self.several, **values) if rows.height else ():
            self.tallies[run].counts.update({name: int(value or 0) for name, value in of_run.items()})

    def _sums(self, rows: pl.DataFrame, name: str) -> Iterator[tuple[int, Any, int]]:
        """Yield the sum of `count` by run and name."""
        counted = rows.group_by(_run_of(rows, several=self.several), name, maintain_order=True)
        yield from counted.agg(pl.col("count").sum()).iter_rows()

    def _count_odd(self, odd: pl.DataFrame) -> None:
        """Count rows that break a rule: reason, count."""
        for run, reason, count in self._sums(odd, "reason") if odd.height else ():
            self.tallies[run].implausible[reason] += count

    def _add_recorded(self, window: _Window) -> pl.DataFrame:
        """Add recorded steps; return those that break a rule, as rows of `rejects`."""
        recorded = window.recorded()
        # Records have no time on the engine's clock.
        no_clock = [pl.lit(None, pl.Int64).alias(name) for name in ("ts_start_ns", "server_zero")]
        counted = recorded.select(_run_of(recorded, several=self.several), "cycle_source", count=1)
        for run, source, count in self._sums(counted, "cycle_source") if recorded.height else ():
            self.tallies[run].events[RECORDS.get(source, source)] += count
        steps, broken = self.sieve.recorded().sift("steps", recorded.with_columns(no_clock))
        self._take("steps", in_epoch(steps, self.starts, "ts_start_ns"))
        return _as_rejects(broken.join(recorded, on="row", how="inner"))

    def _add_journeys(self, journeys: pl.DataFrame, spans: pl.DataFrame) -> None:
        ids = spans.select("row", "trace_id", "span_id", "parent_span_id", "request_id")
        journeys = journeys.join(ids, on="row", how="left", maintain_order="left")
        self._take("journey_events", journeys)
        # Three kinds of rows in one sort by trace: the rows of one trace come out together, to be joined.
        api_spans = spans.filter(pl.col("scope").is_in(dialects.API_SCOPES))
        layers = {
            "core": core_requests(journeys),
            "api": api_requests(journeys, api_spans),
            "spans": request_spans(spans),
        }
        self.layer_columns = {side: frame.columns for side, frame in layers.items()}
        both = pl.concat([f.with_columns(side=pl.lit(s)) for s, f in layers.items()], how="diagonal")
        self._sort("layers").add(both)

    def _add_rejects(
        self,
        window: _Window,
        spans: pl.DataFrame,
        lost: pl.DataFrame,
        odd: pl.DataFrame,
        odd_records: pl.DataFrame,
    ) -> None:
        positions = spans.select("row", "source_offset", "source_file", *(["run"] if self.several else []))
        bad = pl.concat([window.read("incomplete").select("row", "reason"), lost])
        broken, odd = (_as_rejects(rows.join(positions, on="row", how="inner")) for rows in (bad, odd))
        unreadable = pl.concat([window.every("rejects"), broken], how="diagonal")
        odd = pl.concat([odd, odd_records], how="diagonal")
        # Rows that a rule leaves out were readable: they are listed and counted separately.
        self._count(unreadable, rejects=pl.col("count").sum())
        self._count_odd(odd)
        self._take("rejects", pl.concat([unreadable, odd], how="diagonal"))

    def _run_id(self, run: pl.Expr) -> pl.Expr:
        """Return the id of a run from its number."""
        if not self.several:
            return pl.lit(self.runs[0].run_id)
        return run.replace_strict({n: one.run_id for n, one in enumerate(self.runs)}, return_dtype=pl.String)

    def _take(self, name: str, rows: pl.DataFrame) -> None:
        if rows.height or not self.several:
            run_id = self._run_id(_run_of(rows, several=self.several))
            self._sort(name).add(schema.TABLES[name].shape(rows.with_columns(run_id=run_id)))

    def _sort(self, name: str) -> ExternalSort:
        if name not in self.sorts:
            table = schema.TABLES.get(name)
            # The first column of a key is the run id, which is constant in one run.
            first = 0 if self.several else 1
            key = table.key[first:5] if table else ("trace_id",)
            order = table.order[first:] if table else key
            self.sorts[name] = self.space.sort(key, order, block_rows=None if table else _LAYER_BLOCK_ROWS)
        return self.sorts[name]

    def finish(self, writer: RunsWriter, spans_read: Mapping[int, int]) -> None:
        """Write every table; `spans_read` are the spans of each run, by its number, duplicates included."""
        api_clock = self._finish_requests()
        if api_clock.height:
            self._move_api_events(api_clock)
        any_other = any(tally.counts["other"] for tally in self.tallies)
        for name in ("requests", "journey_events", "request_snapshots", "steps", "spans", "rejects"):
            # At least one frame, so that a table without rows exists too.
            for window in (
                self._sort(name).windows() if self._sort(name).rows else [schema.TABLES[name].empty()]
            ):
                rows = _without_repeats(window) if name == "spans" and any_other else window
                if name == "requests":
                    rows = self._requests(rows, api_clock)
                writer.write(name, self._one_record_a_step(rows) if name == "steps" else rows)
            del self.sorts[name]
        missing = missing_attributes(writer.scan)
        columns = [
            {"run": n, "run_id": run.run_id, **run.columns, **self._counts(n, spans_read.get(n, 0))}
            | {"missing_attributes": json.dumps(missing.get(run.run_id, {}))}
            for n, run in enumerate(self.runs)
        ]
        of_run = pl.DataFrame(columns, infer_schema_length=None)
        runs = run_rows(writer.scan, run_of("server") if self.several else pl.lit(0), of_run)
        ahead, error = (divided(pl.col(c), 1e3) for c in ("ahead_ns", "error_ns"))
        clocks = api_clock.select("server", api_clock_ahead_us=ahead, api_clock_error_us=error)
        writer.write(
            "runs", schema.RUNS.conform(runs.drop(clocks.columns[1:]).join(clocks, on="server", how="left"))
        )

    def _counts(self, run: int, spans_read: int) -> dict[str, str | int]:
        tally, counts = self.tallies[run], self.tallies[run].counts
        return {
            "other_spans": sum(part.other_spans for file in self.runs[run].files for part in file.parts),
            "duplicate_spans": counts["duplicate_steps"] + spans_read - counts["spans"],
            **{name: counts[name] for name in ("rejects", "dropped_attributes", "clock_corrected_events")},
            "events": json.dumps(tally.events, sort_keys=True),
            "implausible": json.dumps(tally.implausible, sort_keys=True),
            "other_scopes": json.dumps(dict(tally.other_scopes.most_common(_MOST_SCOPES))),
        }

    def _one_record_a_step(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Return steps with their first record each; a later one is a duplicate if equal, a reject if not."""
        recorded = steps.filter(pl.col("cycle_source").is_not_null())
        key = ["server", "epoch", "step_id"]
        if recorded.n_unique(key) == recorded.height:
            return steps
        position = ["source_file", "source_offset"]
        different = recorded.sort(*key, *position).unique(
            [name for name in recorded.columns if name not in (*position, "unix_ns")],
            keep="first",
            maintain_order=True,
        )
        first = different.unique(key, keep="first", maintain_order=True)
        others = different.join(first, on=[*key, *position], how="anti").with_columns(
            reason=pl.lit(OTHER_RECORD)
        )
        for rows, sign in ((recorded, 1), (different, -1)):
            self._count(rows, duplicate_steps=sign * pl.len().cast(pl.Int64))
        others = _as_rejects(others)
        self._count_odd(others)
        self._take("rejects", others)
        sampled = steps.filter(pl.col("cycle_source").is_null())
        return pl.concat([sampled, first]).sort(schema.STEPS.order[1:], nulls_last=True)

    def _move_api_events(self, api_clock: pl.DataFrame) -> None:
        """Put the API's journey events on the core's clock; their order changes."""
        unmoved = self.sorts.pop("journey_events")
        for window in unmoved.windows():
            joined = window.join(
                api_clock.select("server", "ahead_ns"), on="server", how="left", maintain_order="left"
            )
            off = (pl.col("layer") == "api") & pl.col("ahead_ns").is_not_null()
            self._count(joined, clock_corrected_events=off.sum())
            moved = pl.when(off).then(pl.col("ts_ns") - pl.col("ahead_ns")).otherwise("ts_ns")
            self._sort("journey_events").add(joined.with_columns(ts_ns=moved).drop("ahead_ns"))

    def _requests(self, rows: pl.DataFrame, api_clock: pl.DataFrame) -> pl.DataFrame:
        """Return rows of requests on one clock; impossible values are cleared and counted."""
        moved = with_api_moved(rows, api_clock) if api_clock.height else rows
        kept, odd = schema.REQUESTS.sift_derived(moved, "server")
        self._count_odd(odd)
        self._take("rejects", odd)
        return kept

    def _finish_requests(self) -> pl.DataFrame:
        """Join the requests; return the servers whose API has a clock of its own, as `api_clocks` does."""
        cached = first_hits(pl.concat(self.cached))
        self.cached.clear()
        self._sort("requests").add(schema.REQUESTS.empty())
        bounds = [clock_bounds(schema.REQUESTS.empty())]
        run_id = self._run_id(run_of("server"))
        results = self.space.sort(key=("server", "block"), order=("server", "block", "end_ns"))
        for window in self._sort("layers").windows():
            core, api, described = (
                window.filter(side=s).select(self.layer_columns[s]) for s in ("core", "api", "spans")
            )
            hits = cached.join(
                core, left_on=cached.columns[:3], right_on=["server", "epoch", "request_id"], how="semi"
            )
            requests = requests_from_spans(described)
            joined = join_requests(core, api, requests, hits, run_id=run_id)
            results.add(results_of(described, requests))
            bounds.append(clock_bounds(joined))
            self._sort("requests").add(joined)
        del self.sorts["layers"]
        self._add_stages(results)
        return api_clocks(pl.concat(bounds))

    def _add_stages(self, results: ExternalSort) -> None:
        """Add the steps in SGLang's spans; only a trace level with spans of steps shows all prompts."""
        count = Counter[str]()
        for window in results.windows() if results.rows else ():
            for (server, _), block in window.group_by("server", "block", maintain_order=True):
                if block["is_loop"].any():
                    block_steps = steps_of(block, count[str(server)] + 1)
                    count[str(server)] += block_steps.height
                    steps, odd = schema.STEPS.sift_derived(block_steps, "server")
                    self._count_odd(odd)
                    self._take("rejects", odd)
                    self._take("steps", steps)


def _as_rejects(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with a reason as rows of `rejects`."""
    names = [name for name in ("run", "server") if name in rows.columns]
    position = ("source_file", "source_offset", "reason")
    return rows.select(*names, *position, excerpt=pl.lit(""), count=pl.lit(1, pl.Int64))


def _without_repeats(spans: pl.DataFrame) -> pl.DataFrame:
    """Return each span once, from the first file that has it.

    Spans of the vLLM scopes are unique by now; spans of other scopes occur as often as they were read.
    """
    ids = ["trace_id", "span_id"]
    if spans.n_unique(ids) == spans.height:
        return spans
    numbered = spans.with_row_index("row").sort("source_file", "source_offset", maintain_order=True)
    return numbered.unique(ids, keep="first").sort("row").drop("row")
