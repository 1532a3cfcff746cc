"""Build the published tables of runs from their staged parts, in windows, so that memory does not grow with the run.

Small runs are rows of the same frames, and are divided when they are written.

The parts are read twice: first only for clocks and step counters, which show restarts, then for everything. Rows leave
in the order of their table, through sorts that spill to disk. Each window is one call of a function, and so is each
table: of a large run, several processes do them (`Spread`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
from msgspec.structs import replace

from tracefit import memory
from tracefit.errors import printable
from tracefit.statistics import divided
from tracefit.tables import dialects, schema
from tracefit.tables.clocks import api_clocks
from tracefit.tables.epochs import (
    MARK_TYPES,
    RECORDED_MARKS,
    in_benchmark,
    in_epoch,
    marks_of,
    marks_of_records,
    scan_epochs,
)
from tracefit.tables.external_sort import ExternalSort, SortContents, SortSpace
from tracefit.tables.named_models import listed_models, named_models
from tracefit.tables.qualified import plain, run_of
from tracefit.tables.record_servers import CLOCK_SETBACK, SHARED_NAME
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
from tracefit.tables.resolve import parts_of, resolve
from tracefit.tables.runs import EVENT_TABLES, filled_attributes, missing_attributes, run_rows
from tracefit.tables.sources import SOURCES
from tracefit.tables.stages import results_of, steps_of
from tracefit.tables.store import write_table
from tracefit.tables.unread import unread_requests
from tracefit.tables.windows import Sieve, Window, window_bounds

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.options import BuildLimits
    from tracefit.tables.spread import Spread
    from tracefit.tables.storage import Storage
    from tracefit.tables.store import ReadFile, RunsWriter, WrittenTable


OTHER_RECORD = "steps.step_id is that of another record with other values"
"""Reason of a record whose step is recorded already."""

_LAYER_BLOCK_ROWS = 1024
"""Trace ids are random: a block of every spilled part waits while the layers are joined, at several times its size."""

_MOST_SCOPES = 16
"""How many other scopes are named: those with the most spans."""

_MAX_REFUTING_SHARE = 0.01
"""If a larger share of a run's values contradicts a setting, the setting is not the server's and is not used."""


class TracedRun(msgspec.Struct, frozen=True):
    """A run whose tables are built.

    Attributes:
        run_id: Its id.
        files: Its trace files with their staged parts, in the order of their names; there is a span of the vLLM scopes
            in them.
        columns: Values of the `runs` table for the whole run, beside the counts.
    """

    run_id: str
    files: Sequence[ReadFile]
    columns: Mapping[str, str | int | None]


_REJECTING = frozenset({"spans", "steps", "request_snapshots", "journey_events", "requests"})
"""Tables whose rows may be rejected while they are written."""

_Counts = Counter[tuple[int, str, str]]
"""Number of values by run, setting and column."""


class UnlikeRunsError(Exception):
    """Runs that cannot be built together: some of them contradict a setting, and others do not."""


def build_tables(
    runs: Sequence[TracedRun],
    *,
    storage: Storage,
    scratch: Path,
    writer: RunsWriter,
    limits: Mapping[str, float],
    memory_limits: BuildLimits,
    spread: Spread = map,
) -> None:
    """Build every table of some runs except `timeline` and the training frames.

    Args:
        runs: The runs; several only if they are small, in the order of their ids.
        storage: Where the staged parts are.
        scratch: A folder on disk for rows that do not fit into memory; every process that `spread` uses sees it.
        writer: Takes the tables.
        limits: Settings of the servers that bound values of the tables; one that a run contradicts is not used.
        memory_limits: How much of the runs is in memory at a time.
        spread: Reads parts and windows, and writes tables; here, one after the other, if not given.

    Raises:
        UnlikeRunsError: They have to be built one by one.
    """
    resolved = resolve(storage, parts_of([run.files for run in runs]), several=len(runs) > 1, spread=spread)
    bounds = window_bounds(storage, resolved, memory_limits.window_bytes)
    job = _Job(tuple(run.run_id for run in runs), scratch, memory_limits, spills=len(bounds) > 1)
    windows = (Window.of(storage, resolved, *each) for each in bounds)
    starts, sieve = _epoch_starts(job, spread, windows, Sieve(limits, resolved.clocks))
    collected = _Collected(job)
    windows = (Window.of(storage, resolved, *each) for each in bounds)
    for rows in spread(partial(_rows_in, job, sieve, starts), windows):
        collected.add(rows)
    spans_read, has_stages = resolved.spans_read, resolved.owners.height > 0
    del resolved, windows  # the facts of every span: the rest needs the memory
    memory.trim()
    _finish(runs, collected, writer, spread, spans_read, has_stages=has_stages)


class _Job(msgspec.Struct, frozen=True):
    """The context that every function below needs.

    Attributes:
        run_ids: The runs, by their number.
        scratch: The folder for spilled rows.
        memory: How much is in memory at a time.
        spills: Whether rows wait on disk for the other windows, not in memory.
    """

    run_ids: tuple[str, ...]
    scratch: Path
    memory: BuildLimits
    spills: bool

    @property
    def several(self) -> bool:
        return len(self.run_ids) > 1

    def space(self) -> SortSpace:
        # A third each for the rows being read, the rows that wait for the next block, and a sorted copy.
        return SortSpace(self.scratch, self.memory.sorted_bytes, self.memory.sorted_bytes // 3)

    def run_of(self, rows: pl.DataFrame) -> pl.Expr:
        """Return the number of each row's run."""
        if not self.several:
            return pl.lit(0, pl.UInt32).alias("run")
        return (pl.col("run") if "run" in rows.columns else run_of("server")).alias("run")

    def run_id(self, run: pl.Expr) -> pl.Expr:
        """Return the id of a run from its number."""
        if not self.several:
            return pl.lit(self.run_ids[0])
        return run.replace_strict(dict(enumerate(self.run_ids)), return_dtype=pl.String)

    def by_run(self, rows: pl.DataFrame, **values: pl.Expr) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each run with rows, and values over its rows."""
        if not self.several:
            yield 0, rows.select(**values).row(0, named=True)
            return
        for of_run in rows.group_by(self.run_of(rows)).agg(**values).iter_rows(named=True):
            yield of_run.pop("run"), of_run


def _epoch_starts(job: _Job, spread: Spread, windows: Iterable[Window], sieve: Sieve) -> tuple[pl.DataFrame, Sieve]:
    """Scan the marks of the whole run in the order of their clock; return the epochs, and the sieve for odd rows."""
    marks = _marks(job.space())
    marks.add(pl.DataFrame(schema=MARK_TYPES))
    values, above = _Counts(), _Counts()
    for of_window, *counts in spread(partial(_marks_in, job, sieve), windows):
        marks.add_all(of_window)
        for total, count in zip((values, above), counts, strict=True):
            total.update(count)
    starts, strays, bounds = scan_epochs(marks.windows())
    refuted = {run: set[str]() for run, _, _ in values}
    for (run, limit, name), n in above.items():
        refuted[run] |= {limit} if n > values[run, limit, name] * _MAX_REFUTING_SHARE else set()
    every, *others = list(refuted.values()) or [set[str]()]
    if any(other != every for other in others):
        raise UnlikeRunsError
    accepted = {name: most for name, most in sieve.limits.items() if name not in every}
    return starts, replace(sieve, limits=accepted, strays=strays, bounds=bounds)


def _marks(space: SortSpace) -> ExternalSort:
    return space.sort(key=("clock",), order=("clock", "server", "step_id", "exact"))


def _marks_in(job: _Job, sieve: Sieve, window: Window) -> tuple[SortContents, _Counts, _Counts]:
    """Return the marks of a window, how many values it has, and how many of these are above their setting.

    No value is rejected here: only the end of the run shows whether it contradicts a setting.
    """
    free = replace(sieve, limits={})
    limited = {
        name: [c for c in schema.TABLES[name].columns if c.limit in sieve.limits]
        for name in ("steps", "journey_events")
    }
    columns = ("row", "unix_ns", "ts_start_ns", "step_id", *(c.name for c in limited["steps"]))
    steps, _ = free.sift("steps", window.read("steps", columns))
    columns = ("row", "unix_ns", "ts_ns", "step_id", "layer", *(c.name for c in limited["journey_events"]))
    journeys, _, _, _ = window.journeys(free, columns)
    recorded = window.recorded(RECORDED_MARKS).drop_nulls("server")
    recorded, _ = free.recorded().sift("steps", recorded)
    values, above = _Counts(), _Counts()
    for name, rows in (("steps", steps), ("journey_events", journeys)):
        bounded = {c.name: c.limit for c in limited[name] if c.limit}
        counts = {f"{c} values": pl.col(c).count() for c in bounded}
        counts |= {f"{c} above": (pl.col(c) > sieve.limits[limit]).sum() for c, limit in bounded.items()}
        for run, of_run in job.by_run(rows, **counts) if bounded else ():
            for c, limit in bounded.items():
                values[run, limit, c] += of_run[f"{c} values"]
                above[run, limit, c] += of_run[f"{c} above"] or 0
    marks = _marks(job.space())
    marks.add(pl.concat([marks_of(steps, journeys), marks_of_records(recorded)]))
    return marks.take(on_disk=job.spills), values, above


class _Tally(msgspec.Struct):
    """Counts of one run."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    events: Counter[str] = msgspec.field(default_factory=Counter)
    implausible: Counter[str] = msgspec.field(default_factory=Counter)
    other_scopes: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, other: _Tally) -> None:
        self.counts.update(other.counts)
        self.events.update(other.events)
        self.implausible.update(other.implausible)
        self.other_scopes.update(other.other_scopes)


class _Part(msgspec.Struct, frozen=True):
    """The results that one call has made from its rows.

    Attributes:
        tables: Rows by table, `layers` too, on their way to the table.
        tallies: Counts, by the number of the run.
        frames: Frames of other kinds, by name.
        finished: The table that was written, by its name.
    """

    tables: Mapping[str, SortContents] = msgspec.field(default_factory=dict)
    tallies: Mapping[int, _Tally] = msgspec.field(default_factory=dict)
    frames: Mapping[str, Sequence[pl.DataFrame]] = msgspec.field(default_factory=dict)
    finished: Mapping[str, WrittenTable] = msgspec.field(default_factory=dict)


class _Collected:
    """Rows of some runs on their way to the tables, and their counts."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.tallies: defaultdict[int, _Tally] = defaultdict(_Tally)
        self.frames: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self.space = job.space()
        self._sorts: dict[str, ExternalSort] = {}

    def sort(self, name: str) -> ExternalSort:
        """Return the sort of a table, or of the `layers` that requests are joined from."""
        if name not in self._sorts:
            table = schema.TABLES.get(name)
            # The first column of a key is the run id, which is constant in one run.
            first = 0 if self.job.several else 1
            key = table.key[first:5] if table else ("trace_id",)
            order = table.order[first:] if table else key
            self._sorts[name] = self.space.sort(key, order, block_rows=None if table else _LAYER_BLOCK_ROWS)
        return self._sorts[name]

    def take(self, name: str, rows: pl.DataFrame) -> None:
        """Add rows to a table."""
        if rows.height or not self.job.several:
            run_id = self.job.run_id(self.job.run_of(rows))
            self.sort(name).add(schema.TABLES[name].shape(rows.with_columns(run_id=run_id)))

    def take_odd(self, odd: pl.DataFrame) -> None:
        """Add rows of `rejects` that break a rule."""
        self.count_odd(odd)
        self.take("rejects", odd)

    def count(self, rows: pl.DataFrame, **values: pl.Expr) -> None:
        for run, of_run in self.job.by_run(rows, **values) if rows.height else ():
            self.tallies[run].counts.update({name: int(value or 0) for name, value in of_run.items()})

    def sums(self, rows: pl.DataFrame, name: str) -> Iterator[tuple[_Tally, Any, int]]:
        """Yield the counts of each run, a name, and the sum of the rows' `count` with both."""
        counted = rows.group_by(self.job.run_of(rows), name, maintain_order=True)
        for run, value, count in counted.agg(pl.col("count").sum()).iter_rows():
            yield self.tallies[run], value, count

    def count_odd(self, odd: pl.DataFrame) -> None:
        """Count rows that break a rule: reason, count."""
        for tally, reason, count in self.sums(odd, "reason") if odd.height else ():
            tally.implausible[reason] += count

    def add(self, part: _Part) -> None:
        """Add what a call has made."""
        for name, contents in part.tables.items():
            self.sort(name).add_all(contents)
        for run, tally in part.tallies.items():
            self.tallies[run].add(tally)
        for name, frames in part.frames.items():
            self.frames[name] += frames

    def pop(self, name: str) -> SortContents:
        """Return the rows of a table, which are then no longer here."""
        return self.sort(name).take()

    def part(self) -> _Part:
        """Return everything, for this process or another one."""
        tables = {name: sort.take(on_disk=self.job.spills) for name, sort in self._sorts.items() if sort.rows}
        return _Part(tables, dict(self.tallies), dict(self.frames))


def _rows_in(job: _Job, sieve: Sieve, starts: pl.DataFrame, window: Window) -> _Part:
    """Return the rows of all tables in a window."""
    collected = _Collected(job)
    _collect(collected, sieve, starts, window)
    # Spilled here, where the rows of the window have left the memory.
    return collected.part()


def _collect(collected: _Collected, sieve: Sieve, starts: pl.DataFrame, window: Window) -> None:
    """Add the rows of a window to all tables."""
    # The table of spans has no rules; the attributes that requests use are bounded here.
    spans, odd_spans = sift_numbers(window.read("spans"))
    collected.count(spans, spans=pl.len(), dropped_attributes=pl.col("dropped_attributes").sum())
    for tally, name, count in collected.sums(window.read("events"), "name"):
        tally.events[name] += count
    collected.take("spans", spans)
    other_spans = window.every("other_scope_spans")
    collected.count(other_spans, other=pl.len())
    for tally, scope, count in collected.sums(window.every("other_scopes"), "scope"):
        tally.other_scopes[printable(scope or "unnamed")] += count
    collected.take("spans", other_spans)
    read = window.every("values_read")
    collected.frames["values_read"].append(read.with_columns(collected.job.run_of(read).cast(pl.UInt32)))
    models = named_models(spans)
    models = models.with_columns(collected.job.run_of(models).cast(pl.UInt32))
    collected.frames["models"].append(plain(models) if collected.job.several else models)
    steps, odd_steps = sieve.sift("steps", window.read("steps"))
    collected.take("steps", in_epoch(steps, starts, "ts_start_ns"))
    odd_records = _add_recorded(collected, sieve, starts, window)
    snapshots, odd_snapshots = sieve.sift("request_snapshots", window.read("snapshots"))
    snapshots = in_epoch(snapshots, starts, None)
    collected.take("request_snapshots", snapshots)
    collected.frames["cached"].append(cached_prompt_tokens(snapshots))
    journeys, lost, odd_journeys, moved = window.journeys(sieve)
    collected.count(moved, clock_corrected_events=pl.len())
    spans = spans.join(window.links, on="row", how="left", maintain_order="left")
    _add_journeys(collected, in_epoch(journeys, starts, "ts_ns"), spans)
    odd = pl.concat([odd_spans, odd_steps, odd_snapshots, odd_journeys])
    _add_rejects(collected, window, spans, lost, odd, odd_records)


def _add_recorded(collected: _Collected, sieve: Sieve, starts: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Add recorded steps; return those that break a rule, or whose engine is not known, as rows of `rejects`."""
    every = window.recorded()
    recorded = every.drop_nulls("server")
    shared = every.filter(pl.col("server").is_null()).with_columns(reason=pl.lit(SHARED_NAME))
    # Records have no time on the engine's clock.
    no_clock = [pl.lit(None, pl.Int64).alias(name) for name in ("ts_start_ns", "server_zero")]
    counted = recorded.select(collected.job.run_of(recorded), "cycle_source", count=1)
    for tally, source, count in collected.sums(counted, "cycle_source") if recorded.height else ():
        tally.events[SOURCES[source].recorder] += count
    steps, broken = sieve.recorded().sift("steps", recorded.with_columns(no_clock))
    collected.take("steps", in_benchmark(in_epoch(steps, starts, "ts_start_ns")))
    broken = broken.join(recorded, on="row", how="inner")
    after = recorded.join(window.clock_setbacks, on=["source_file", "source_offset"], how="semi")
    after = after.with_columns(reason=pl.lit(CLOCK_SETBACK))
    return _as_rejects(pl.concat([broken, *(rows.select(broken.columns) for rows in (shared, after))]))


def _add_journeys(collected: _Collected, journeys: pl.DataFrame, spans: pl.DataFrame) -> None:
    ids = spans.select("row", "trace_id", "span_id", "parent_span_id", "request_id")
    journeys = journeys.join(ids, on="row", how="left", maintain_order="left")
    collected.take("journey_events", journeys)
    # Three kinds of rows in one sort by trace: the rows of one trace come out together, to be joined.
    api_spans = spans.filter(pl.col("scope").is_in(dialects.API_SCOPES))
    layers = {
        "core": core_requests(journeys),
        "api": api_requests(journeys, api_spans),
        "spans": request_spans(spans),
    }
    collected.frames.update({side: [frame.clear()] for side, frame in layers.items()})
    both = pl.concat([f.with_columns(side=pl.lit(s)) for s, f in layers.items()], how="diagonal")
    collected.sort("layers").add(both)


def _add_rejects(
    collected: _Collected,
    window: Window,
    spans: pl.DataFrame,
    lost: pl.DataFrame,
    odd: pl.DataFrame,
    odd_records: pl.DataFrame,
) -> None:
    run = ["run"] if collected.job.several else []
    positions = spans.select("row", "source_offset", "source_file", *run)
    bad = pl.concat([window.read("incomplete").select("row", "reason"), lost])
    broken, odd = (_as_rejects(rows.join(positions, on="row", how="inner")) for rows in (bad, odd))
    unreadable = pl.concat([window.every("rejects"), broken], how="diagonal")
    odd = pl.concat([odd, odd_records], how="diagonal")
    # Rows that a rule leaves out were readable: they are listed and counted separately.
    collected.count(unreadable, rejects=pl.col("count").sum())
    collected.count_odd(odd)
    collected.take("rejects", pl.concat([unreadable, odd], how="diagonal"))


def _finish(
    runs: Sequence[TracedRun],
    collected: _Collected,
    writer: RunsWriter,
    spread: Spread,
    spans_read: Mapping[int, int],
    *,
    has_stages: bool,
) -> None:
    """Write every table.

    Args:
        runs: The runs.
        collected: The rows of all their windows.
        writer: Takes the tables.
        spread: Joins requests and writes tables.
        spans_read: Spans of each run, by its number, duplicates included.
        has_stages: Whether there are steps in spans of stages, which are known once requests are joined.
    """
    job = collected.job
    any_other = any(tally.counts["other"] for tally in collected.tallies.values())
    is_joined, written = False, set[str]()

    def table(name: str, change: _Change) -> Callable[[], _Part]:
        return partial(_table, job, writer.folder, name, collected.pop(name), change)

    # A generator: the rows of a table leave the memory when it is written. It yields null while a call needs results
    # that are still missing.
    def calls() -> Iterator[Callable[[], _Part] | None]:
        yield partial(_join_layers, job, collected.pop("layers"), dict(collected.frames))
        yield table("spans", _without_repeats if any_other else _unchanged)
        if not has_stages:
            yield table("steps", _one_record_a_step)
        while not is_joined:
            yield None
        api_clock = _api_clock_of(collected)
        moved = partial(_with_api_events_moved, api_clock)
        yield table("journey_events", moved if api_clock.height else _unchanged)
        yield table("request_snapshots", _unchanged)
        yield table("requests", partial(_requests_on_core_clock, api_clock))
        if has_stages:
            yield table("steps", _one_record_a_step)
        while not written.issuperset(_REJECTING):
            yield None
        yield table("rejects", _unchanged)

    for part in spread(_made, calls()):
        collected.add(part)
        is_joined = True  # the first one
        for name, finished in part.finished.items():
            writer.put(name, finished)
            written.add(name)
    missing = missing_attributes({name: collected.frames[name] for name in EVENT_TABLES}, writer.scan("rejects"))
    unread: defaultdict[int, list[str]] = defaultdict(list)
    for n, text in unread_requests(pl.concat(collected.frames["values_read"])):
        unread[n].append(text)
    models = pl.concat(collected.frames["models"])
    columns = [
        {"run": n, "run_id": run.run_id, **run.columns}
        | _run_columns(run, collected.tallies[n], spans_read.get(n, 0))
        | {"missing_attributes": json.dumps(missing.get(run.run_id, {})), "unread": json.dumps(unread[n])}
        | {"models": json.dumps(listed_models(models.filter(run=n)))}
        for n, run in enumerate(runs)
    ]
    of_run = pl.DataFrame(columns, infer_schema_length=None)
    rows = run_rows(writer.scan, run_of("server") if job.several else pl.lit(0), of_run)
    ahead, error = (divided(pl.col(c), 1e3) for c in ("ahead_ns", "error_ns"))
    clocks = _api_clock_of(collected).select("server", api_clock_ahead_us=ahead, api_clock_error_us=error)
    rows = rows.drop(clocks.columns[1:]).join(clocks, on="server", how="left")
    writer.write("runs", schema.RUNS.conform(rows))


def _api_clock_of(collected: _Collected) -> pl.DataFrame:
    """Return how far the API's clock is ahead, from the joined requests."""
    return api_clocks(pl.concat([clock_bounds(schema.REQUESTS.empty()), *collected.frames["bounds"]]))


def _run_columns(run: TracedRun, tally: _Tally, spans_read: int) -> dict[str, str | int]:
    counts = tally.counts
    return {
        "other_spans": sum(part.other_spans for file in run.files for part in file.parts),
        "duplicate_spans": counts["duplicate_steps"] + spans_read - counts["spans"],
        **{name: counts[name] for name in ("rejects", "dropped_attributes", "clock_corrected_events")},
        "events": json.dumps(tally.events, sort_keys=True),
        "implausible": json.dumps(tally.implausible, sort_keys=True),
        "other_scopes": json.dumps(dict(tally.other_scopes.most_common(_MOST_SCOPES))),
    }


def _made(call: Callable[[], _Part] | None) -> _Part:
    assert call is not None  # noqa: S101 - only `spread` waits
    return call()


def _join_layers(job: _Job, layers: SortContents, frames: Mapping[str, Sequence[pl.DataFrame]]) -> _Part:
    """Return the requests that spans and events of each trace describe, with the bounds of their clocks."""
    cached = first_hits(pl.concat(frames["cached"]))
    collected = _Collected(job)
    collected.sort("layers").add_all(layers)
    run_id = job.run_id(run_of("server"))
    results = collected.space.sort(key=("server", "block"), order=("server", "block", "end_ns"))
    for window in collected.sort("layers").windows():
        core, api, described = (
            window.filter(side=side).select(frames[side][0].columns) for side in ("core", "api", "spans")
        )
        hits = cached.join(core, left_on=cached.columns[:3], right_on=["server", "epoch", "request_id"], how="semi")
        requests = requests_from_spans(described)
        joined = join_requests(core, api, requests, hits, run_id=run_id)
        results.add(results_of(described, requests))
        collected.frames["bounds"].append(clock_bounds(joined))
        collected.sort("requests").add(joined)
    _add_stages(collected, results)
    return collected.part()


def _add_stages(collected: _Collected, results: ExternalSort) -> None:
    """Add the steps in SGLang's spans; only a trace level with spans of steps shows all prompts."""
    count = Counter[str]()
    for window in results.windows():
        for (server, _), block in window.group_by("server", "block", maintain_order=True):
            if block["is_loop"].any():
                block_steps = steps_of(block, count[str(server)] + 1)
                count[str(server)] += block_steps.height
                steps, odd = schema.STEPS.sift_derived(block_steps, "server")
                collected.take_odd(odd)
                collected.take("steps", steps)


_Change = Callable[[_Collected, Iterator[pl.DataFrame]], Iterable[pl.DataFrame]]
"""Makes the rows of a table from those that were collected; counts and rejects are collected too."""


def _table(job: _Job, folder: Path | None, name: str, contents: SortContents, change: _Change) -> _Part:
    """Return a finished table of the runs."""
    collected = _Collected(job)
    collected.sort(name).add_all(contents)
    # At least one frame, so that a table without rows exists too.
    windows = collected.sort(name).windows() if contents.rows else iter([schema.TABLES[name].empty()])
    rows = change(collected, windows)
    if name in EVENT_TABLES:
        rows = _counted(collected, name, rows)
    finished = write_table(name, rows, folder)
    return replace(collected.part(), finished={name: finished})


def _counted(collected: _Collected, name: str, windows: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Count the values of attributes in the rows of a table on their way to it."""
    for rows in windows:
        collected.frames[name].append(filled_attributes(name, rows))
        yield rows


def _unchanged(_: _Collected, windows: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    return windows


def _with_api_events_moved(
    api_clock: pl.DataFrame, collected: _Collected, windows: Iterator[pl.DataFrame]
) -> Iterator[pl.DataFrame]:
    """Put the API's journey events on the core's clock; their order changes."""
    ahead = api_clock.select("server", "ahead_ns")
    unmoved = collected.sort("journey_events")
    moved = collected.space.sort(unmoved.key, unmoved.order)
    for window in windows:
        joined = window.join(ahead, on="server", how="left", maintain_order="left")
        off = (pl.col("layer") == "api") & pl.col("ahead_ns").is_not_null()
        collected.count(joined, clock_corrected_events=off.sum())
        ts_ns = pl.when(off).then(pl.col("ts_ns") - pl.col("ahead_ns")).otherwise("ts_ns")
        moved.add(joined.with_columns(ts_ns=ts_ns).drop("ahead_ns"))
    return moved.windows()


def _requests_on_core_clock(
    api_clock: pl.DataFrame, collected: _Collected, windows: Iterator[pl.DataFrame]
) -> Iterator[pl.DataFrame]:
    """Yield rows of requests on one clock; impossible values are cleared and counted."""
    for rows in windows:
        moved = with_api_moved(rows, api_clock) if api_clock.height else rows
        kept, odd = schema.REQUESTS.sift_derived(moved, "server")
        collected.take_odd(odd)
        yield kept


def _one_record_a_step(collected: _Collected, windows: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield steps with their first record each; a later one is a duplicate if equal, a reject if not."""
    key, position = ["server", "epoch", "step_id"], ["source_file", "source_offset"]
    for steps in windows:
        recorded = steps.filter(pl.col("cycle_source").is_not_null())
        if recorded.n_unique(key) == recorded.height:
            yield steps
            continue
        different = recorded.sort(*key, *position).unique(
            [name for name in recorded.columns if name not in (*position, "unix_ns")],
            keep="first",
            maintain_order=True,
        )
        first = different.unique(key, keep="first", maintain_order=True)
        others = different.join(first, on=[*key, *position], how="anti")
        for rows, sign in ((recorded, 1), (different, -1)):
            collected.count(rows, duplicate_steps=sign * pl.len().cast(pl.Int64))
        collected.take_odd(_as_rejects(others.with_columns(reason=pl.lit(OTHER_RECORD))))
        sampled = steps.filter(pl.col("cycle_source").is_null())
        yield pl.concat([sampled, first]).sort(schema.STEPS.order[1:], nulls_last=True)


def _without_repeats(_: _Collected, windows: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield each span once, from the first file that has it.

    Spans of the vLLM scopes are unique by now; spans of other scopes occur as often as they were read.
    """
    ids = ["trace_id", "span_id"]
    for spans in windows:
        if spans.n_unique(ids) == spans.height:
            yield spans
            continue
        numbered = spans.with_row_index("row").sort("source_file", "source_offset", maintain_order=True)
        yield numbered.unique(ids, keep="first").sort("row").drop("row")


def _as_rejects(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with a reason as rows of `rejects`."""
    names = [name for name in ("run", "server") if name in rows.columns]
    position = ("source_file", "source_offset", "reason")
    return rows.select(*names, *position, excerpt=pl.lit(""), count=pl.lit(1, pl.Int64))
