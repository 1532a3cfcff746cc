"""Build the tables of runs from their staged parts: the second of the two functions that engines run."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import polars as pl

from tracefit import memory
from tracefit.errors import DataError, printable
from tracefit.server.settings import DEFAULT_BLOCK_SIZE, ENDPOINT_FLAG
from tracefit.tables import dialects, schema
from tracefit.tables.build import build_tables
from tracefit.tables.client_times import with_client_times
from tracefit.tables.dialects import CLIENT
from tracefit.tables.runs import COMPLETE_SHARE, with_implausible
from tracefit.tables.sources import CycleSource
from tracefit.tables.staging import read_staged
from tracefit.tables.store import RunWriter, put_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tracefit.inputs.files import TraceFile
    from tracefit.recordings.kv_events import KvRows
    from tracefit.server.context import RunContext
    from tracefit.tables.options import BuildLimits, IngestOptions
    from tracefit.tables.places import Place
    from tracefit.tables.store import ReadFile, TableFile
    from tracefit.timeline import EngineLimits


_MOST_NAMED = 5
"""Most other scopes that the error of a run without usable spans names."""


@dataclass(frozen=True, slots=True)
class RunTask:
    """A run whose files are decoded.

    Attributes:
        run_id: The run.
        name: The run's name for the user.
        files: Its trace files with their staged parts, in the order of their names.
        place: Storage of the staged parts and of the tables.
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
    place: Place
    scratch: Path | None
    columns: Mapping[str, str | int | None]
    limits: Mapping[str, float]
    context: RunContext
    kv: tuple[TraceFile, ...] | KvRows
    options: IngestOptions


@dataclass(frozen=True, slots=True)
class BuiltRun:
    """The finished tables of a run.

    Attributes:
        parts: Table name to its file in the scratch folder.
        tables: Table name to its stored file, if the worker stored it.
        runs: The rows of the `runs` table.
    """

    parts: dict[str, Path]
    tables: dict[str, TableFile]
    runs: pl.DataFrame


def build_runs(tasks: tuple[RunTask, ...]) -> tuple[BuiltRun | DataError, ...]:
    """Build several runs, one after the other: small runs share the cost of a job, and each fails alone.

    Raises:
        UsageError: A recording cannot be read.
        OSError: A table cannot be written.
    """
    # Errors are returned: raised, one would discard the finished runs of the job.
    results: list[BuiltRun | DataError] = []
    for task in tasks:
        try:
            results.append(build_run(task))
        except DataError as error:
            results.append(error)
    return tuple(results)


def build_run(task: RunTask) -> BuiltRun:
    """Build every table of a run; the timeline only for small runs.

    Raises:
        DataError: The run has neither vLLM spans nor recorded steps, or a staged part is damaged.
        UsageError: A recording cannot be read.
        OSError: A table cannot be written.
    """
    # Memory freed by decoding would add to the peak of building the tables.
    memory.give_back()
    if task.scratch is None:
        with task.place.scratch() as folder:
            built = _build(task, folder)
            return replace(built, parts={}, tables=put_parts(task.place, task.run_id, built.parts))
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=task.scratch))
    try:
        return _build(task, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _build(task: RunTask, folder: Path) -> BuiltRun:
    _require_spans(task)
    with RunWriter(folder) as writer:
        build_tables(
            task.files,
            run_id=task.run_id,
            place=task.place,
            scratch=folder,
            writer=writer,
            run_columns=task.columns,
            limits=task.limits,
            memory_limits=task.options.build,
        )
        if writer.scan("requests").select((pl.col("dialect") == CLIENT).any()).collect().item():
            writer.write_all(_with_clients(writer.read))
        # After the tables of the traces: KV events are matched with their steps and requests.
        writer.write_all(_kv_tables(task, writer.read))
        runs = writer.read("runs")
        if is_small(runs, task.options.build):
            writer.write_all(timeline_of(writer, task.context))
            runs = writer.read("runs")
        return BuiltRun(writer.close(), {}, runs)


def _with_clients(read: Callable[[str], pl.DataFrame]) -> dict[str, pl.DataFrame]:
    requests = with_client_times(read("requests"))
    counts = requests.group_by("server").agg(requests=pl.len().cast(pl.Int64))
    runs = read("runs").drop("requests").join(counts, on="server", how="left")
    return {
        "requests": requests,
        "runs": schema.RUNS.conform(runs.with_columns(pl.col("requests").fill_null(0))),
    }


def _kv_tables(task: RunTask, read: Callable[[str], pl.DataFrame]) -> dict[str, pl.DataFrame]:
    if not task.kv:
        return {"kv_events": schema.KV_EVENTS.empty()}
    from tracefit.recordings.kv_columns import kv_tables  # noqa: PLC0415 - most runs have no recordings
    from tracefit.recordings.kv_events import read_kv  # noqa: PLC0415

    names = ("steps", "journey_events", "requests", "runs", "rejects")
    return kv_tables(
        read_kv(task.kv, task.options) if isinstance(task.kv, tuple) else task.kv,
        {name: read(name) for name in names},
        run_id=task.run_id,
        block_size=task.context.settings.block_size,
    )


def is_small(runs: pl.DataFrame, limits: BuildLimits) -> bool:
    """Return whether the timeline of a run is built with its other tables; `runs` has its rows."""
    # The counts are those of the run, repeated in the row of every server.
    events = sum(sum(json.loads(text).values()) for text in runs["events"].head(1))
    return events <= limits.small_run_rows


class WrittenTables(Protocol):
    """The tables of one run that were written."""

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return a table, with all columns or some."""

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """Yield the rows of a table in their order."""


def timeline_of(
    tables: WrittenTables, context: RunContext
) -> dict[str, pl.DataFrame | Iterator[pl.DataFrame]]:
    """Build the timeline of one run, and add the step times it gives to the run's requests.

    Impossible values of either are left out, counted in `runs` and listed in `rejects`.

    Args:
        tables: The other tables of the run.
        context: Its server.

    Returns:
        Table name to its rows, or to its pieces if it is read in pieces.
    """
    from tracefit.timeline import (  # noqa: PLC0415 - most ingests need none
        COUNTED_COLUMNS,
        PLACED_COLUMNS,
        build_timeline,
        count_steps,
        events_of,
        is_logged,
        log_clock,
        place_on_log,
        with_step_times,
    )

    snapshots, journeys = tables.read("request_snapshots"), tables.read("journey_events")
    runs, steps, limits = tables.read("runs"), tables.read("steps"), engine_limits(context)
    requests = tables.read("requests", COUNTED_COLUMNS)
    of_client = pl.col("cycle_source").eq_missing(CycleSource.CLIENT.value)
    # Steps seen by a client are the last resort: any record of the server has more.
    if (requests["dialect"] != CLIENT).any() or steps.filter(~of_client).height:
        steps = steps.filter(~of_client)
    complete = journeys.height > 0 and _journeys_complete(context, runs, requests)
    counted = starts = None
    if not steps.height and not journeys.height:
        counted = count_steps(requests, limits)
        complete = counted.starts.height > 0
    elif not journeys.height and steps.filter(is_logged()).height:
        clock = log_clock(steps)
        steps, starts = clock.steps, clock.starts
        counted = place_on_log(requests, clock, limits)
        if counted:
            steps = steps.with_columns(cycle_us=pl.when(~is_logged()).then("cycle_us"))
            complete = counted.rows.len() >= COMPLETE_SHARE * requests.height
    del requests
    if counted:
        # There may be a million requests and only some thousands on steps: they are read and written in pieces.
        own = _rows_at(tables, counted.rows).with_columns(counted.requests.select(PLACED_COLUMNS))
        journeys, starts = events_of(own), counted.starts
    else:
        own = tables.read("requests")
    steps_built = build_timeline(
        steps, snapshots, journeys, limits, journeys_complete=complete, known_starts=starts
    )
    if context.settings.is_sglang:
        gpu_time = pl.col("cycle_source", "composition_source").replace(
            {CycleSource.FPM.value: CycleSource.FPM_GPU.value}
        )
        steps_built = steps_built.with_columns(gpu_time)
    timeline, odd_steps = schema.TIMELINE.sift_derived(steps_built)
    timed = with_step_times(schema.REQUESTS.shape(own), timeline, journeys, snapshots)
    timed, odd_requests = schema.REQUESTS.sift_derived(timed)
    built: dict[str, pl.DataFrame | Iterator[pl.DataFrame]] = {"timeline": timeline}
    if counted:
        built["requests"] = _replaced(tables, counted.rows, schema.REQUESTS.shape(timed))
    else:
        built["requests"] = schema.REQUESTS.conform(timed)
    odd = pl.concat([odd_steps, odd_requests])
    if odd.height:
        built["runs"], built["rejects"] = with_implausible(runs, tables.read("rejects"), odd)
    return built


def _numbered(tables: WrittenTables) -> Iterator[pl.DataFrame]:
    """Yield the requests in pieces, each row with its number `row`."""
    first = 0
    for piece in tables.pieces("requests"):
        yield schema.REQUESTS.shape(piece).with_row_index("row", first)
        first += piece.height


def _rows_at(tables: WrittenTables, rows: pl.Series) -> pl.DataFrame:
    """Return the requests at some row numbers, which increase."""
    places = rows.to_frame("row")
    pieces = (piece.join(places, on="row", how="semi", maintain_order="left") for piece in _numbered(tables))
    return pl.concat([schema.REQUESTS.empty(), *(piece.drop("row") for piece in pieces)])


def _replaced(tables: WrittenTables, rows: pl.Series, new: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the requests in pieces, some of them replaced."""
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
        chunked_prefill=s.enable_chunked_prefill is not False,
    )


def _journeys_complete(context: RunContext, runs: pl.DataFrame, requests: pl.DataFrame) -> bool:
    """Say whether every request has a journey: by the server's setting, else by the counts of step summaries."""
    if not requests["queued_ns"].is_not_null().any():
        return False
    rate = context.settings.journey_tracing_sample_rate
    if rate is None:
        shares = runs["journey_sampling"].drop_nulls().to_list()
        rate = min(shares, default=1.0)
    return rate >= COMPLETE_SHARE


def _require_spans(task: RunTask) -> None:
    parts = [part for file in task.files for part in file.parts]
    if any(part.spans or part.steps for part in parts):
        return
    other_spans, rejects = sum(part.other_spans for part in parts), sum(part.rejects for part in parts)
    if rejects and not other_spans:
        first = next(p for p in parts if p.rejects)
        reasons = read_staged(task.place, first.name, "rejects", ["file", "reason"]).filter(file=first.file)
        raise DataError(
            f"none of its records can be read ({rejects} rejected; the first: {reasons['reason'][0]})",
            where=task.name,
            hint="traces are OTLP JSON or protobuf, as the Collector's file exporter writes them; recordings are "
            "ForwardPassMetrics, or vLLM's log with its iterations",
        )
    staged = (
        read_staged(task.place, p.name, "other_scopes", ["file", "scope"]).filter(file=p.file) for p in parts
    )
    scopes = {printable(scope or "unnamed") for rows in staged for scope in rows["scope"]}
    seen = f" ({', '.join(sorted(scopes)[:_MOST_NAMED])})" if scopes else ""
    contents = f"{other_spans} spans of other scopes{seen}, {rejects} unreadable records"
    raise DataError(
        f"holds no spans of {', '.join(dialects.READ_SCOPES)}: {contents}",
        where=task.name,
        hint=f"start vLLM with {ENDPOINT_FLAG} URL, which gives a span of every request",
    )
