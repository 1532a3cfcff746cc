"""Build the tables of runs from their staged parts: the second of the two functions that engines run."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
from msgspec.structs import replace

from tracefit import memory
from tracefit.errors import DataError, printable
from tracefit.inputs.formats import asked_for
from tracefit.recordings import RECORDINGS
from tracefit.server.settings import DEFAULT_BLOCK_SIZE, ENDPOINT_FLAG
from tracefit.tables import dialects, schema
from tracefit.tables.build import TracedRun, UnlikeRunsError, build_tables
from tracefit.tables.client_times import TEXT_COUNT, UNMATCHED, with_asked_lengths, with_client_times
from tracefit.tables.dialects import CLIENT
from tracefit.tables.points import has_points, points_of
from tracefit.tables.runs import COMPLETE_SHARE, with_implausible
from tracefit.tables.sources import SOURCES, is_by_client
from tracefit.tables.staging import read_staged
from tracefit.tables.store import RunsWriter, put_parts
from tracefit.tables.units import has_fields, step_unit_faults, without_wrong_units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tracefit.inputs.files import TraceFile
    from tracefit.inputs.formats import Recording
    from tracefit.options import BuildLimits, IngestOptions
    from tracefit.server.context import RunContext
    from tracefit.tables.spread import Spread
    from tracefit.tables.storage import Storage
    from tracefit.tables.store import ReadFile, TableFile, WrittenTables
    from tracefit.timeline import EngineLimits


_log = logging.getLogger("tracefit")

_PLACED_SHARE = 0.9
"""Least share of the requests on a log's lines that composition is worked out from: contexts are kept where both name
as many requests."""

_COUNTED_TOKENS = 500_000
"""Output tokens of the runs whose steps are counted together: each may be a step, which takes a kilobyte while its row
is built."""

_FEW_UNMATCHED, _FEW_UNMATCHED_SHARE = 2, 0.01
"""Requests of clients, and their share, up to which those that match no span are usual."""

_MOST_NAMED_FILES = 5
"""Most other scopes that the error of a run without usable spans names."""


class RunTask(msgspec.Struct, frozen=True):
    """A run whose files are decoded.

    Attributes:
        run_id: The run.
        name: The run's name for the user.
        files: Its trace files with their staged parts, in the order of their names.
        storage: Storage of the staged parts and of the tables.
        scratch: A folder for the finished tables, which the caller moves when it makes them valid; null if the worker
            itself may store them, because no reader sees a table before the manifest names it.
        columns: Values of the `runs` table for the whole run, beside the counts.
        limits: Settings of the server that bound values of the tables.
        context: The server.
        kv: Its recordings of KV-cache events: the files, or their rows if workers may not have the files.
        options: Bounds on reading the recordings, and on the run's share of memory.
    """

    run_id: str
    name: str
    files: tuple[ReadFile, ...]
    storage: Storage
    scratch: Path | None
    columns: Mapping[str, str | int | None]
    limits: Mapping[str, float]
    context: RunContext
    kv: tuple[TraceFile, ...] | Any
    options: IngestOptions


class BuiltRun(msgspec.Struct, frozen=True):
    """The finished tables of a run.

    Attributes:
        parts: Table name to its file in the scratch folder.
        tables: Table name to its stored file, if the worker stored it.
        runs: The rows of the `runs` table.
    """

    parts: dict[str, Path]
    tables: dict[str, TableFile]
    runs: pl.DataFrame


def build_runs(tasks: tuple[RunTask, ...], spread: Spread = map) -> tuple[BuiltRun | DataError, ...]:
    """Build the tables of some runs, and the timelines of small ones.

    Runs with equal settings are built together, as rows of the same frames. If that fails, they are built one by one,
    so that only the runs at fault fail.

    Args:
        tasks: The runs.
        spread: See `build_tables`.

    Raises:
        UsageError: A recording cannot be read.
        OSError: A table cannot be written.
    """
    # Errors are returned: raised, one would discard the finished runs of the job.
    results: dict[str, BuiltRun | DataError] = {}
    alike: dict[tuple[tuple[str, float], ...], list[RunTask]] = {}
    for task in sorted(tasks, key=lambda task: task.run_id):
        try:
            _require_spans(task)
            alike.setdefault(tuple(sorted(task.limits.items())), []).append(task)
        except DataError as error:
            results[task.run_id] = error
    for some in alike.values():
        results |= _built_together(some, spread)
    return tuple(results[task.run_id] for task in tasks)


def _built_together(tasks: Sequence[RunTask], spread: Spread) -> dict[str, BuiltRun | DataError]:
    # Memory freed by decoding would add to the peak of building the tables.
    memory.trim()
    try:
        return dict(_stored(tasks, spread))
    except Exception as error:
        if len(tasks) > 1:
            if not isinstance(error, DataError | UnlikeRunsError):
                # Only the run at fault fails below; without a trace, a defect of building together would only be slow.
                _log.info("%d runs are built one by one: together they failed", len(tasks), exc_info=True)
            return {i: built for task in tasks for i, built in _built_together([task], spread).items()}
        if isinstance(error, DataError):
            return {tasks[0].run_id: error}
        raise


def _stored(tasks: Sequence[RunTask], spread: Spread) -> dict[str, BuiltRun]:
    storage, scratch = tasks[0].storage, tasks[0].scratch
    if scratch is None:
        with storage.scratch() as folder:
            built = _build(tasks, folder, spread)
            return {
                run_id: replace(run, parts={}, tables=put_parts(storage, run_id, run.parts))
                for run_id, run in built.items()
            }
    folder = Path(tempfile.mkdtemp(prefix="runs-", dir=scratch))
    try:
        return _build(tasks, folder, spread)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _build(tasks: Sequence[RunTask], folder: Path, spread: Spread) -> dict[str, BuiltRun]:
    run_ids = [task.run_id for task in tasks]
    with RunsWriter(folder, run_ids) as writer:
        build_tables(
            [TracedRun(task.run_id, task.files, task.columns) for task in tasks],
            storage=tasks[0].storage,
            scratch=folder,
            writer=writer,
            limits=tasks[0].limits,
            memory_limits=tasks[0].options.build,
            spread=spread,
        )
        writer.complete()
        tables = writer.of(run_ids)
        _require_rows(tasks, tables)
        recorded = writer.scan("steps").select(pl.col("run_id").filter(has_fields()).unique())
        for run_id in recorded.collect().to_series():
            writer.replace([run_id], _with_step_units(writer.of([run_id])))
        client = pl.col("run_id").filter(pl.col("dialect") == CLIENT).unique()
        measured = writer.scan("requests").select(client).collect().to_series()
        for run_id in measured:
            writer.replace([run_id], _with_clients(writer.of([run_id]).read))
        writer.replace(run_ids, {"points": points_of(writer.scan("spans").filter(has_points()).collect())})
        # After the tables of the traces: KV events are matched with their steps and requests.
        with_kv = [task for task in tasks if task.kv]
        if len(with_kv) < len(tasks):
            writer.replace([t.run_id for t in tasks if not t.kv], {"kv_events": schema.KV_EVENTS.empty()})
        for task in with_kv:
            writer.replace([task.run_id], _kv_tables(task, writer.of([task.run_id]).read))
        runs = tables.read("runs").partition_by("run_id", as_dict=True)
        small = [t for t in tasks if is_small(runs[t.run_id,]["events"][0], t.options.build)]
        for some, built in timelines_of({t.run_id: t.context for t in small}, writer.of):
            writer.replace(some, built)
        runs = tables.read("runs").partition_by("run_id", as_dict=True)
        return {run_id: BuiltRun(parts, {}, runs[run_id,]) for run_id, parts in writer.close().items()}


def _require_rows(tasks: Sequence[RunTask], tables: WrittenTables) -> None:
    """Refuse a run that has no row of any server, because every record breaks a rule."""
    known = set(tables.read("runs", ("run_id",))["run_id"])
    for task in (task for task in tasks if task.run_id not in known):
        rejects = tables.read("rejects").filter(run_id=task.run_id)
        counts = rejects.group_by("reason").agg(pl.sum("count")).sort(-pl.col("count"), "reason")
        reason, count = counts.row(0)
        # A reason may say what to do, or ask for the cause.
        what, _, advice = reason.partition(": ")
        raise DataError(
            f"every one of its records breaks a rule ({count:,} {what})",
            where=task.name,
            hint=advice or "compare the units of its times with those in docs/reference/recordings.md",
        )


def _with_step_units(tables: WrittenTables) -> dict[str, pl.DataFrame | Iterator[pl.DataFrame]]:
    """Leave out the times of recorded steps that are in a wrong unit; no table changes if none is."""
    faults = step_unit_faults(tables.pieces("steps"))
    if not faults.height:
        return {}
    columns = ("run_id", "server", "cycle_source", "cycle_us", "unix_ns")
    counted = tables.read("steps", columns).filter(has_fields())
    times = counted.unpivot(["cycle_us", "unix_ns"], index=["run_id", "server"], variable_name="column")
    odd = times.drop_nulls().join(faults, on=["server", "column"]).group_by("run_id", "reason")
    runs, rejects = with_implausible(
        tables.read("runs"), tables.read("rejects"), odd.agg(count=pl.len().cast(pl.Int64)).sort("reason")
    )
    undated = pl.col("server").is_in(faults.filter(column="unix_ns")["server"].implode()) & (pl.col("spans") == 0)
    runs = runs.with_columns(pl.when(~undated).then(c).alias(c) for c in ("first_unix_ns", "last_unix_ns"))
    steps = without_wrong_units(tables.pieces("steps"), faults)
    return {"steps": steps, "runs": runs, "rejects": rejects}


def _with_clients(read: Callable[[str], pl.DataFrame]) -> dict[str, pl.DataFrame]:
    seen = read("requests")
    matched, unmatched, faults = with_client_times(seen)
    requests, changed = with_asked_lengths(matched)
    counts = requests.group_by("server").agg(requests=pl.len().cast(pl.Int64))
    runs = read("runs").drop("requests").join(counts, on="server", how="left")
    runs = runs.with_columns(pl.col("requests").fill_null(0))
    steps = read("steps")
    of_client = is_by_client()
    # The first benchmark is epoch 0.
    number = pl.col("epoch").rank("dense").over("server").cast(pl.Int64) - 1
    steps = steps.with_columns(epoch=pl.when(of_client).then(number).otherwise("epoch"))
    if requests.height < seen.height:
        # The server's requests are the load, and the steps that a client saw are not used.
        is_seen = pl.col("server").is_in(steps.filter(of_client)["server"].unique().implode())
        steps = steps.filter(~of_client)
        runs = runs.with_columns(
            *(pl.when(~is_seen).then(c).otherwise(0).alias(c) for c in ("steps", "epochs", "step_sampling")),
            pl.when(pl.col("requests") > 0).then("arrival_rate_per_s").alias("arrival_rate_per_s"),
        )
    count = sum(unmatched.values())
    if count:
        runs = runs.with_columns(events=pl.lit(_with_event(runs["events"][0], UNMATCHED, count)))
    left_out = dict(faults)
    if changed:
        left_out[TEXT_COUNT] = changed
    if count > max(_FEW_UNMATCHED, _FEW_UNMATCHED_SHARE * int((seen["dialect"] == CLIENT).sum())):
        left_out |= {f"{UNMATCHED}: {reason}": n for reason, n in unmatched.items()}
    runs, rejects = schema.RUNS.conform(runs), read("rejects")
    if left_out:
        columns = {"run_id": runs["run_id"][0], "reason": [*left_out], "count": [*left_out.values()]}
        runs, rejects = with_implausible(runs, rejects, pl.DataFrame(columns))
    return {"steps": steps, "requests": requests, "runs": runs, "rejects": rejects}


def _with_event(events: str, name: str, count: int) -> str:
    """Return the counts of events in the `runs` table with one more."""
    return json.dumps({**json.loads(events), name: count}, sort_keys=True)


def _kv_tables(task: RunTask, read: Callable[[str], pl.DataFrame]) -> dict[str, pl.DataFrame]:
    tables = {name: read(name) for name in ("steps", "journey_events", "requests", "runs", "rejects")}
    rows = rows_beside(task.kv, task.options) if isinstance(task.kv, tuple) else task.kv
    fill = read_beside().fill
    assert fill is not None  # noqa: S101 - such a format has one
    return fill(rows, tables, run_id=task.run_id, block_size=task.context.settings.block_size)


def read_beside() -> Recording:
    """Return the format of the files that are read when a run's tables are built."""
    return next(recording for recording in RECORDINGS.values() if recording.read)


def rows_beside(files: tuple[TraceFile, ...], options: IngestOptions) -> Any:
    """Return what that format reads of some files."""
    read = read_beside().read
    assert read is not None  # noqa: S101 - it was found by this
    return read(files, options)


def is_small(events: str, limits: BuildLimits) -> bool:
    """Return whether the timeline of a run is built with its other tables; `events` are its counts in the `runs`
    table.
    """
    counts: dict[str, int] = json.loads(events)
    return sum(counts.values()) <= limits.small_run_rows


def timelines_of(
    contexts: Mapping[str, RunContext], tables_of: Callable[[Sequence[str]], WrittenTables]
) -> Iterator[tuple[list[str], dict[str, pl.DataFrame | Iterator[pl.DataFrame]]]]:
    """Build the timelines of some runs, and add the step times they give to the runs' requests.

    Runs that are read the same way are rows of the same frames. Impossible values are left out, counted in `runs` and
    listed in `rejects`.

    Args:
        contexts: Run to its server.
        tables_of: Returns the other tables of some of the runs.

    Yields:
        Runs, and table name to their rows, or to pieces of these if the table is read in pieces.
    """
    if not contexts:
        return
    kinds: dict[tuple[_TimelineKind, str | int], list[str]] = {}
    tokens_so_far: Counter[_TimelineKind] = Counter()
    for run_id, (way, tokens) in _timeline_kinds_of(contexts, tables_of(list(contexts))).items():
        group = run_id if way.is_apart else tokens_so_far[way] // _COUNTED_TOKENS
        tokens_so_far[way] += tokens if way.is_counted else 0
        kinds.setdefault((way, group), []).append(run_id)
    for (way, _), run_ids in kinds.items():
        yield run_ids, _timeline_of(tables_of(run_ids), way)


class _TimelineKind(msgspec.Struct, frozen=True):
    """How the timeline of a run is built.

    Attributes:
        limits: Limits of its scheduler.
        is_sglang: Whether its server is SGLang.
        without_clients: Whether steps seen by clients are left out.
        has_journeys: Whether it has journey events.
        is_complete: Whether every request has journey events.
        is_counted: Whether steps are counted from its requests, or its requests are placed on a log.
        is_apart: Whether it is built by itself: a log takes only the requests of one run, and snapshots do
            not show that requests are complete.
        traced_share: Share of the requests that have a span, as its configuration says; null if it says nothing.
    """

    limits: EngineLimits
    is_sglang: bool
    without_clients: bool
    has_journeys: bool
    is_complete: bool
    is_counted: bool
    is_apart: bool
    traced_share: float | None


def _timeline_kinds_of(
    contexts: Mapping[str, RunContext], tables: WrittenTables
) -> dict[str, tuple[_TimelineKind, int]]:
    """Return how the timeline of each run is built, and the output tokens of its requests."""
    from tracefit.timeline import is_logged  # noqa: PLC0415 - most ingests need none

    is_own = ~is_by_client()
    steps = tables.read("steps", ("run_id", "cycle_source")).group_by("run_id")
    of_steps = steps.agg(own=is_own.any(), logged=is_logged().any())
    counts = {run_id: facts for run_id, *facts in of_steps.iter_rows()}
    journeys, sampled = (
        set(tables.read(name, ("run_id",))["run_id"].unique()) for name in ("journey_events", "request_snapshots")
    )
    requests = tables.read("requests", ("run_id", "dialect", "queued_ns", "output_tokens")).group_by("run_id")
    of_server, queued = (pl.col("dialect") != CLIENT).any(), pl.col("queued_ns").is_not_null().any()
    of_requests = requests.agg(of_server=of_server, queued=queued, tokens=pl.col("output_tokens").sum())
    asked = {run_id: facts for run_id, *facts in of_requests.iter_rows()}
    shares = tables.read("runs", ("run_id", "journey_sampling")).group_by("run_id")
    least = dict(shares.agg(pl.col("journey_sampling").min()).iter_rows())
    ways = {}
    for run_id, context in contexts.items():
        has_own_steps, is_logged_run = counts.get(run_id, (False, False))
        has_requests, is_queued, tokens = asked.get(run_id, (False, False, 0))
        without_clients = has_requests or has_own_steps
        has_steps = has_own_steps or (run_id in counts and not without_clients)
        rate = context.settings.journey_tracing_sample_rate
        if rate is None:
            rate = 1.0 if least.get(run_id) is None else least[run_id]
        is_counted = run_id not in journeys and (is_logged_run or not has_steps)
        way = _TimelineKind(
            engine_limits(context),
            context.settings.is_sglang,
            without_clients,
            run_id in journeys,
            run_id in journeys and is_queued and rate >= COMPLETE_SHARE,
            is_counted,
            is_counted and (run_id in counts or run_id in sampled),
            context.settings.journey_tracing_sample_rate,
        )
        ways[run_id] = (way, tokens)
    return ways


def _timeline_of(tables: WrittenTables, way: _TimelineKind) -> dict[str, pl.DataFrame | Iterator[pl.DataFrame]]:
    from tracefit.timeline import (  # noqa: PLC0415 - most ingests need none
        COUNTED_COLUMNS,
        PLACED_COLUMNS,
        build_timeline,
        count_steps,
        events_of,
        every_start,
        log_clock,
        place_on_log,
        with_step_times,
        without_jumps,
    )

    snapshots, journeys = tables.read("request_snapshots"), tables.read("journey_events")
    steps, limits, complete = tables.read("steps"), way.limits, way.is_complete
    # Steps seen by a client are the last resort: any record of the server has more.
    if way.without_clients:
        steps = steps.filter(~is_by_client())
    counted = starts = jumps = None
    if way.is_counted:
        requests = tables.read("requests", COUNTED_COLUMNS)
        if not steps.height:
            counted = count_steps(requests, limits, traced_share=way.traced_share)
            starts = counted.starts
            complete = starts.height > 0
        else:
            clock = log_clock(steps)
            steps, starts, jumps = clock.steps, clock.starts, clock.jumps
            counted = place_on_log(requests, clock, limits)
            if counted:
                starts = counted.starts
                complete = counted.rows.len() >= _PLACED_SHARE * requests.height
            starts = every_start(steps, starts)
        del requests
    if counted:
        # There may be a million requests and only some thousands on steps: they are read and written in pieces.
        rows = _rows_at(tables, counted.rows).with_columns(counted.requests.select(PLACED_COLUMNS))
        journeys = events_of(rows)
    else:
        rows = tables.read("requests")
    steps_built = build_timeline(steps, snapshots, journeys, limits, journeys_complete=complete, known_starts=starts)
    steps_built, odd_times = without_jumps(steps_built, jumps)
    if way.is_sglang:
        of_sglang = {source.name: source.from_sglang for source in SOURCES.values() if source.from_sglang}
        steps_built = steps_built.with_columns(pl.col("cycle_source", "composition_source").replace(of_sglang))
    timeline, odd_steps = schema.TIMELINE.sift_derived(steps_built, "run_id")
    timed = with_step_times(schema.REQUESTS.shape(rows), timeline, journeys, snapshots)
    timed, odd_requests = schema.REQUESTS.sift_derived(timed, "run_id")
    built: dict[str, pl.DataFrame | Iterator[pl.DataFrame]] = {"timeline": timeline}
    if counted:
        built["requests"] = _replaced(tables, counted.rows, schema.REQUESTS.shape(timed))
    else:
        built["requests"] = schema.REQUESTS.conform(timed)
    odd = pl.concat([odd_steps, odd_requests, odd_times.cast(odd_steps.schema)])
    if odd.height:
        built["runs"], built["rejects"] = with_implausible(tables.read("runs"), tables.read("rejects"), odd)
    return built


def _numbered(tables: WrittenTables) -> Iterator[pl.DataFrame]:
    """Yield the requests in pieces, each row with its number `row`."""
    first = 0
    for piece in tables.pieces("requests"):
        yield schema.REQUESTS.shape(piece).with_row_index("row", first)
        first += piece.height


def _rows_at(tables: WrittenTables, rows: pl.Series) -> pl.DataFrame:
    """Return the requests at some row numbers, which increase."""
    numbers = rows.to_frame("row")
    pieces = (piece.join(numbers, on="row", how="semi", maintain_order="left") for piece in _numbered(tables))
    return pl.concat([schema.REQUESTS.empty(), *(piece.drop("row") for piece in pieces)])


def _replaced(tables: WrittenTables, rows: pl.Series, new: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the `requests` table in pieces, with the rows numbered in `rows` replaced by `new`."""
    numbered = new.with_columns(row=rows)
    for piece in _numbered(tables):
        yield piece.update(numbered, on="row", include_nulls=True).drop("row")


def engine_limits(context: RunContext) -> EngineLimits:
    """Return the known limits of the server's scheduler."""
    from tracefit.timeline.composition import EngineLimits  # noqa: PLC0415

    s = context.settings
    return EngineLimits(
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_num_seqs=s.max_num_seqs,
        block_size=s.block_size or DEFAULT_BLOCK_SIZE,
        # vLLM reserves one block as the null block.
        num_blocks=s.num_gpu_blocks - 1 if s.num_gpu_blocks else None,
    )


def _require_spans(task: RunTask) -> None:
    parts = [part for file in task.files for part in file.parts]
    if any(part.spans or part.steps for part in parts):
        return
    other_spans, rejects = sum(part.other_spans for part in parts), sum(part.rejects for part in parts)
    if rejects and not other_spans:
        first = next(p for p in parts if p.rejects)
        reasons = read_staged(task.storage, first.name, "rejects", ["file", "reason"]).filter(file=first.file)
        raise DataError(
            f"none of its records can be read ({rejects} rejected; the first: {reasons['reason'][0]})",
            where=task.name,
            hint="traces are OTLP JSON or protobuf, as the Collector's file exporter writes them; other files that "
            f"are read: {asked_for()}",
        )
    staged = (read_staged(task.storage, p.name, "other_scopes", ["file", "scope"]).filter(file=p.file) for p in parts)
    scopes = {printable(scope or "unnamed") for rows in staged for scope in rows["scope"]}
    seen = f" ({', '.join(sorted(scopes)[:_MOST_NAMED_FILES])})" if scopes else ""
    contents = f"{other_spans} spans of other scopes{seen}, {rejects} unreadable records"
    raise DataError(
        f"holds no spans of {', '.join(dialects.READ_SCOPES)}: {contents}",
        where=task.name,
        hint=f"start vLLM with {ENDPOINT_FLAG} URL, which gives a span of every request",
    )
