"""Inspect traces before fitting: facts, health of the journeys, and the models that can be trained."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING

from tracefit.commands.evidence import Evidence, allowances, gather, total
from tracefit.commands.ingest import ServerOptions, ingest_inputs
from tracefit.commands.locate import as_list, find_tables, is_tables
from tracefit.commands.timelines import write_timelines
from tracefit.inputs.discovery import open_inputs
from tracefit.inputs.formats import inspect_file
from tracefit.progress import NullProgress, Progress
from tracefit.results.inspection import (
    FileShape,
    Inspection,
    RunFacts,
    ScopeInspection,
    ScopeSpans,
    ServerFacts,
)
from tracefit.server.context import context_from_json, scope_of
from tracefit.tables.dialects import dialect_of
from tracefit.tables.health import Check, health_checks
from tracefit.tables.store import TableStore
from tracefit.timeline import clock_disagreements

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import polars as pl

    from tracefit.inputs.discovery import Inputs, RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.results.ingestion import IngestResult
    from tracefit.server.context import RunContext


def inspect(
    paths: str | Path | Iterable[str | Path],
    *,
    server: ServerOptions | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Describe traces or tables without fitting anything.

    Args:
        paths: Run folders, folders of run folders or trace files; or one folder that `run` or `ingest` wrote.
        server: Facts about the server beyond the run's files; without effect on tables.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a configuration file or an option is wrong.
        DataError: A run holds no vLLM spans at all.
    """
    paths = as_list(paths)
    progress = progress or NullProgress()
    if len(paths) == 1 and is_tables(find_tables(paths[0])):
        store = TableStore(find_tables(paths[0])).require()
        write_timelines(store, store.runs())
        return _inspect_tables(store, {}, progress)
    with tempfile.TemporaryDirectory(prefix="tracefit-inspect-") as scratch, open_inputs(paths) as inputs:
        result = ingest_inputs(inputs, scratch, server or ServerOptions(), progress)
        write_timelines(TableStore(scratch), [run.run_id for run in result.runs])
        # Runs are ingested in the order they are found; of two with one name the second has a number by now.
        files = {
            run.run_id: tuple(_file_shape(file) for file in source.trace_files)
            for run, source in zip(result.runs, _read(inputs, result), strict=True)
        }
        return _inspect_tables(TableStore(scratch), files, progress)


def _file_shape(file: TraceFile) -> FileShape:
    """Describe a file by its first bytes.

    Raises:
        UsageError: The file cannot be read.
    """
    contents = inspect_file(file)
    return FileShape(file.name.rpartition("/")[2], file.size, contents.compression or "none", str(contents))


def _read(inputs: Inputs, result: IngestResult) -> list[RunSource]:
    """Return the runs that were read, in order; the others are named in the result."""
    return [
        source
        for source in inputs.runs
        if not any(text.startswith(f"{source.name}: ") for text in result.failed)
    ]


def _scopes(spans: pl.DataFrame) -> tuple[ScopeSpans, ...]:
    counts = spans.group_by("scope", "name").len().sort("scope", "name")
    found: dict[tuple[str, str | None], int] = {}
    for scope, name, count in counts.iter_rows():
        key = (scope, dialect_of(scope, name))
        found[key] = found.get(key, 0) + count
    return tuple(ScopeSpans(scope, count, dialect) for (scope, dialect), count in found.items())


def _inspect_tables(
    store: TableStore, files: dict[str, tuple[FileShape, ...]], progress: Progress
) -> Inspection:
    facts: list[RunFacts] = []
    contexts: dict[str, RunContext] = {}
    evidence: dict[str, list[Evidence]] = {}
    for run_id in store.runs():
        progress.stage(f"inspecting {run_id}")
        rows = store.read("runs", [run_id])
        first = rows.row(0, named=True)
        place = f"{store.root}/runs/run_id={run_id}"
        context = context_from_json(first["settings"], first["model_config"], first["gpu"], where=place)
        scope_id = scope_of(context).scope_id
        facts.append(_run_facts(store, run_id, scope_id, rows, files.get(run_id, ())))
        contexts.setdefault(scope_id, context)
        evidence.setdefault(scope_id, []).append(gather(store, run_id))
    scopes = tuple(
        ScopeInspection(
            scope_id,
            tuple(f.run_id for f in facts if f.scope_id == scope_id),
            allowances(
                total(evidence[scope_id]),
                has_model_config=contexts[scope_id].architecture is not None,
                has_gpu=contexts[scope_id].gpu is not None,
            ),
        )
        for scope_id in sorted(evidence)
    )
    return Inspection(tuple(facts), scopes)


def _run_facts(
    store: TableStore, run_id: str, scope_id: str, rows: pl.DataFrame, files: tuple[FileShape, ...]
) -> RunFacts:
    first = rows.row(0, named=True)
    spans = store.read("spans", [run_id])
    journeys, requests = store.read("journey_events", [run_id]), store.read("requests", [run_id])
    checks = health_checks(journeys, requests, store.read("steps", [run_id]))
    clock = clock_disagreements(store.read("timeline", [run_id]), journeys)
    return RunFacts(
        run_id=run_id,
        scope_id=scope_id,
        bytes=first["bytes"],
        files=files,
        services=tuple(spans["service_name"].drop_nulls().unique().sort()),
        scopes=_scopes(spans),
        other_spans=first["other_spans"],
        servers=tuple(_server_facts(rows)),
        events=json.loads(first["events"]),
        rejects=first["rejects"],
        implausible=json.loads(first["implausible"] or "{}"),
        missing_attributes=json.loads(first["missing_attributes"] or "{}"),
        duplicate_spans=first["duplicate_spans"],
        checks=(*checks, _clock_check(clock)),
    )


def _server_facts(rows: pl.DataFrame) -> list[ServerFacts]:
    names = list(ServerFacts.__slots__)
    return [ServerFacts(**row) for row in rows.select(names).iter_rows(named=True)]


def _clock_check(disagreements: pl.DataFrame) -> Check:
    of, bad = (int(disagreements[c].sum() or 0) for c in ("events", "disagreeing"))
    detail = f"{bad:,} stamped outside the step they name" if bad else ""
    return Check("events within their steps", of - bad, of, detail)
