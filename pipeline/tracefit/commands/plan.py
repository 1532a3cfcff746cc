"""Plan an ingest: which files it would read, in which format, without decoding or writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tracefit.commands.ingest import IngestOptions
from tracefit.commands.reading import KnownFiles, options_hash, resolve_run_id
from tracefit.inputs.discovery import RunSource, open_inputs
from tracefit.inputs.formats import inspect_file
from tracefit.results.ingestion import IngestPlan, PlannedFile
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tracefit.inputs.files import TraceFile
    from tracefit.tables.rows import RowOptions


def plan_ingest(
    paths: str | Path | Iterable[str | Path], out: str | Path, *, options: IngestOptions | None = None
) -> IngestPlan:
    """Return which files `ingest` would read from the same paths into the same folder. Nothing is written.

    Args:
        paths: As for `ingest`.
        out: The tables folder; it need not exist.
        options: As for `ingest`.

    Raises:
        UsageError: A path is wrong or cannot be read.
        DataError: The folder's manifest is damaged, or a file that was named holds OTLP logs or metrics.
    """
    store = TableStore(out)
    with open_inputs(paths) as inputs:
        files = [
            f for source in inputs.runs for f in _planned(source, store, (options or IngestOptions()).rows)
        ]
        return IngestPlan(tuple(files), tuple(f"{left.name}: {left.reason}" for left in inputs.left_out))


def _planned(source: RunSource, store: TableStore, options: RowOptions) -> list[PlannedFile]:
    manifest = store.manifest()
    run_id = resolve_run_id(manifest, source)
    known = KnownFiles.of(manifest.runs.get(run_id), options_hash(options), store.root)
    return [_planned_file(run_id, file, known.status(file)) for file in source.trace_files]


def _planned_file(run_id: str, file: TraceFile, status: Literal["new", "grown", "known"]) -> PlannedFile:
    contents = inspect_file(file)
    return PlannedFile(
        run_id=run_id,
        file=file.name,
        shape=str(contents),
        compression=contents.compression,
        bytes=file.size,
        status=status,
        bytes_to_read=0 if status == "known" else file.size,
    )
