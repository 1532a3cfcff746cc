"""The trace files of a run to staged parts: what is known is left alone, what lies in a bucket is fetched first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.sources.fetching import fetch, in_groups
from tracefit.tables.disk import scratch_folder
from tracefit.tables.staging import STAGE_NAME
from tracefit.verbs.bundles import bundled, pieces_of
from tracefit.verbs.decoding import Piece, Task
from tracefit.verbs.file_plans import FilePlan, Stock, plan_files
from tracefit.verbs.inputs import Input, look_at
from tracefit.verbs.workers import decode_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tracefit.sources import TraceFile
    from tracefit.tables.manifest import ReadFile, StagedPart
    from tracefit.tables.rows import RowOptions
    from tracefit.verbs.results import Progress


@dataclass(frozen=True, slots=True)
class FileRead:
    """A trace file that was read.

    Attributes:
        input: The file; what was fetched of it is gone.
        entry: What the manifest is to say of it.
        is_known: Whether the manifest said so before.
    """

    input: Input
    entry: ReadFile
    is_known: bool


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads the files of one run; how is the same for all of them.

    Attributes:
        before: Files that they may be, perhaps grown.
        stock: What was decoded before.
        options: What of a span is kept.
        root: The tables folder; copies of files in buckets lie there for a while.
        workers: Most processes to use.
        told: Told of what is going on.
    """

    before: Sequence[ReadFile]
    stock: Stock
    options: RowOptions
    root: Path
    workers: int
    told: Progress

    def read(self, files: Iterable[TraceFile]) -> list[FileRead]:
        """Bring all files to staged parts; return them in the order of their names.

        Raises:
            UsageError: A file cannot be read.
            DataError: A file holds something else than traces.
            OSError: A part or a copy cannot be written.
        """
        same, near, far = divided(files, self.stock)
        plans = [*same, *plan_files(look_at(near, self.before), self.before, self.stock)]
        if far or not all(plan.is_known for plan in plans):
            self.told.expect(sum(plan.bytes_to_read for plan in plans) + sum(file.size for file in far))
        read = self._decode(plans, self.told.read)
        known = {(plan.input.size_bytes, plan.input.sha256) for plan in same}
        left = {file.size_bytes for file in self.before if (file.size_bytes, file.sha256) not in known}
        for group in in_groups(far):
            with scratch_folder(self.root) as scratch:
                copies = fetch(group, scratch, left, self.told.read)
                inputs = [
                    Input.hashed(copy.file, copy.hashes, modified_ns=file.modified_ns)
                    for copy, file in zip(copies, group, strict=True)
                ]
                read += self._decode(plan_files(inputs, self.before, self.stock), lambda _: None)
        return sorted(read, key=lambda one: one.entry.path)

    def _decode(self, plans: Sequence[FilePlan], on_read: Callable[[int], object]) -> list[FileRead]:
        parts = self._decoded(list(bundled(plans)), on_read)
        return [
            FileRead(
                plan.input,
                plan.read(part for piece in pieces_of(plan) for part in parts[piece]),
                is_known=plan.is_known,
            )
            for plan in plans
        ]

    def _decoded(
        self, bundles: Sequence[tuple[Piece, ...]], on_read: Callable[[int], object]
    ) -> dict[Piece, tuple[StagedPart, ...]]:
        if not bundles:
            return {}
        with scratch_folder(self.root) as scratch:
            tasks = [Task(pieces, self.options, scratch, self.root / STAGE_NAME) for pieces in bundles]
            return decode_all(tasks, workers=self.workers, on_read=on_read)


def divided(
    files: Iterable[TraceFile], stock: Stock
) -> tuple[list[FilePlan], list[TraceFile], list[TraceFile]]:
    """Tell files of buckets that have not changed, files on the local disk, and other files of buckets."""
    same: list[FilePlan] = []
    near: list[TraceFile] = []
    far: list[TraceFile] = []
    for file in files:
        if plan := stock.as_it_was(file):
            same.append(plan)
        else:
            (near if file.filesystem is None else far).append(file)
    return same, near, far
