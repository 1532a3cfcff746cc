"""One stretch of a trace file to staged parts: the piece of work that workers share out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations of tasks
from typing import TYPE_CHECKING

from tracefit.otlp import decode_frames
from tracefit.sources.files import TraceFile  # noqa: TC001
from tracefit.sources.shape import Shape  # noqa: TC001
from tracefit.sources.stretches import STRETCH_BYTES, Stretch, read_stretch
from tracefit.tables.manifest import StagedPart
from tracefit.tables.rows import RowOptions, rows_of
from tracefit.tables.staging import write_staged

if TYPE_CHECKING:
    from collections.abc import Callable

_BATCH_BYTES = STRETCH_BYTES + STRETCH_BYTES // 4
"""A stretch ends with the record that takes it beyond its size: it is still one batch."""


@dataclass(frozen=True, slots=True)
class Task:
    """A stretch to decode, and where the result goes."""

    file: TraceFile
    stretch: Stretch
    shape: Shape
    size_bytes: int
    options: RowOptions
    scratch: Path
    stage: Path


def decode(
    task: Task,
    *,
    on_read: Callable[[int], object] = lambda _: None,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[StagedPart, ...]:
    """Decode a stretch and write its staged parts.

    Args:
        task: The stretch.
        on_read: Told of the bytes of the file that were read.
        go_on: Asked after each part; the rest is left alone if it says no.

    Returns:
        The parts, in order.

    Raises:
        DataError: The file holds something else than traces.
        OSError: A part cannot be written.
    """
    parts = []
    frames = read_stretch(
        task.file, task.stretch, task.shape, on_read=on_read, show_values=task.options.show_values
    )
    for batch in decode_frames(frames, batch_bytes=_BATCH_BYTES):
        rows = rows_of(batch, task.options)
        name = write_staged(rows, task.scratch, task.stage)
        parts.append(
            StagedPart(
                name=name,
                begin=task.stretch.begin,
                spans=rows.spans.height,
                other_spans=rows.other_spans,
                rejects=rows.rejects.height,
            )
        )
        del batch, rows
        if not go_on():
            break
    return tuple(parts)
