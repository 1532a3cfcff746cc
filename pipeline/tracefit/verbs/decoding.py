"""Stretches of trace files to staged parts: the piece of work that workers share out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations of tasks
from typing import TYPE_CHECKING

from tracefit.otlp import columns, decode_frames
from tracefit.sources.files import TraceFile  # noqa: TC001
from tracefit.sources.shape import Shape  # noqa: TC001
from tracefit.sources.stretches import EXPANSION, STRETCH_BYTES, Stretch, read_stretch
from tracefit.tables.manifest import StagedPart
from tracefit.tables.rows import RowOptions, rows_of
from tracefit.tables.staging import write_staged

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.otlp.batch import SpanBatch

_BATCH_BYTES = STRETCH_BYTES + STRETCH_BYTES // 4
"""A stretch ends with the record that takes it beyond its size: it is still one batch."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a file."""

    file: TraceFile
    stretch: Stretch
    shape: Shape
    size_bytes: int
    is_compressed: bool = False

    @property
    def bytes_to_decode(self) -> int:
        """Bytes of it as they are decoded, about."""
        return self.size_bytes * (EXPANSION if self.is_compressed else 1)


@dataclass(frozen=True, slots=True)
class Task:
    """Pieces to decode together, and where the result goes. No two are of files of one name."""

    pieces: tuple[Piece, ...]
    options: RowOptions
    scratch: Path
    stage: Path

    @property
    def size_bytes(self) -> int:
        """Bytes of the files to read."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def bytes_to_decode(self) -> int:
        """Bytes of the pieces as they are decoded, about."""
        return sum(piece.bytes_to_decode for piece in self.pieces)

    @property
    def name(self) -> str:
        """What to call it in an error."""
        first, more = self.pieces[0].file.name, len(self.pieces) - 1
        return f"{first} and {more} more" if more else first


Decoded = tuple[tuple[StagedPart, ...], ...]
"""The staged parts of each piece of a task, in their order."""


def decode(
    task: Task,
    *,
    on_read: Callable[[int], object] = lambda _: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Decoded:
    """Decode pieces and write the staged parts.

    Args:
        task: The pieces.
        on_read: Told of the bytes of the files that were read.
        go_on: Asked after each part; the rest is left alone if it says no.

    Raises:
        DataError: A file holds something else than traces.
        OSError: A part cannot be written.
    """
    files = [piece.file.name for piece in task.pieces]
    show = task.options.show_values
    frames = chain.from_iterable(
        read_stretch(piece.file, piece.stretch, piece.shape, on_read=on_read, show_values=show)
        for piece in task.pieces
    )
    parts: list[list[StagedPart]] = [[] for _ in files]
    for batch in decode_frames(frames, batch_bytes=_BATCH_BYTES):
        if len(files) > 1 and _is_full(batch):
            # What is left out of a batch that has too much must not depend on the neighbours of a file.
            single = (replace(task, pieces=(piece,)) for piece in task.pieces)
            return tuple(chain.from_iterable(decode(one, go_on=go_on) for one in single))
        rows = rows_of(batch, task.options, files)
        name = write_staged(rows, task.scratch, task.stage)
        for file, spans, other_spans, rejects in rows.counts.iter_rows():
            begin = task.pieces[file].stretch.begin
            part = StagedPart(
                name=name, file=file, begin=begin, spans=spans, other_spans=other_spans, rejects=rejects
            )
            parts[file].append(part)
        del batch, rows
        if not go_on():
            break
    return tuple(map(tuple, parts))


def _is_full(batch: SpanBatch) -> bool:
    """Tell a batch with as many names or keys of events as there may be: some may have been left out."""
    widest = max((frame.width for frame in batch.events.values()), default=0)
    return len(batch.events) >= columns.MAX_EVENT_NAMES or widest >= columns.MAX_EVENT_KEYS
