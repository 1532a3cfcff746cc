"""What an ingest would read, and as what, without reading it or writing anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracefit.sources import RunSource, open_inputs, sniff
from tracefit.tables.store import TableStore
from tracefit.verbs.file_plans import FilePlan, Stock, options_hash, plan_files
from tracefit.verbs.ingest import IngestOptions
from tracefit.verbs.inputs import look_at, namesakes, place
from tracefit.verbs.reading import divided

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tracefit.tables.rows import RowOptions


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One trace file: what it is, and how much of it the tables do not have yet.

    Attributes:
        run_id: The run it would belong to.
        file: Its name.
        shape: What its records are and how they lie, in words.
        compression: gzip or zstd; null for none.
        bytes: Its size.
        status: `new`, `grown` (what was appended is to be read), or `known` (nothing is).
        bytes_to_read: Bytes that would be decoded.
    """

    run_id: str
    file: str
    shape: str
    compression: str | None
    bytes: int
    status: Literal["new", "grown", "known"]
    bytes_to_read: int


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """What an ingest would read.

    Attributes:
        files: Trace files, run by run.
        left_out: Other files, each with the reason.
    """

    files: tuple[PlannedFile, ...]
    left_out: tuple[str, ...] = ()


def plan_ingest(
    paths: Iterable[str | Path], out: str | Path, *, options: IngestOptions | None = None
) -> IngestPlan:
    """Say what `ingest` would read of the same paths into the same folder. Nothing is written.

    Args:
        paths: As for `ingest`.
        out: The tables folder; it need not be there.
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
    before = namesakes(manifest, source.run_id)
    stock = Stock.of(manifest, options_hash(options), store.root)
    same, near, far = divided(source.trace_files, stock)
    plans = [*same, *plan_files(look_at([*near, *far], before), before, stock)]
    run_id = place(manifest, source.run_id, [plan.input for plan in plans])
    return [_planned_file(run_id, plan) for plan in sorted(plans, key=lambda plan: plan.input.file.name)]


def _planned_file(run_id: str, plan: FilePlan) -> PlannedFile:
    contents = plan.input.file.contents or sniff(plan.input.file)
    return PlannedFile(
        run_id=run_id,
        file=plan.input.file.name,
        shape=str(contents),
        compression=contents.compression,
        bytes=plan.input.size_bytes,
        status="known" if plan.is_known else "grown" if plan.kept else "new",
        bytes_to_read=plan.bytes_to_read,
    )
