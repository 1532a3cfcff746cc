"""Decode blocks of trace files into staged rows: the first of the two functions that engines run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

from tracefit.inputs.blocks import Block, load
from tracefit.inputs.rejects import Reject
from tracefit.otlp.decode import decode_blocks
from tracefit.tables.rows import rows_of, wanted_of
from tracefit.tables.staging import write_staged
from tracefit.tables.store import StagedPart

if TYPE_CHECKING:
    from tracefit.tables.options import IngestOptions
    from tracefit.tables.places import Place


@dataclass(frozen=True, slots=True)
class Task:
    """Blocks of one run that are decoded together, and the place for their rows.

    Attributes:
        items: Blocks, and the rejects between them.
        options: Which part of the input is kept.
        place: Where the staged parts go.
    """

    items: tuple[Block | Reject, ...]
    options: IngestOptions
    place: Place


Decoded = tuple[tuple[StagedPart, ...], ...]
"""The staged parts of each item of a task; rows know their item by `file`."""


def decode_tasks(tasks: tuple[Task, ...]) -> tuple[Decoded, ...]:
    """Decode the blocks of several runs, one run after the other: small runs share the cost of a task.

    Raises:
        UsageError: A file cannot be read any more.
        OSError: A part cannot be written.
    """
    return tuple(map(decode_task, tasks))


def decode_task(task: Task) -> Decoded:
    """Decode a task's blocks and write the staged parts.

    Raises:
        UsageError: A file cannot be read any more.
        OSError: A part cannot be written.
    """
    # A part of small files holds rows of several items: each gets an entry of its own, with its counts.
    parts: list[list[StagedPart]] = [[] for _ in task.items]
    rejects = [(number, item) for number, item in enumerate(task.items) if isinstance(item, Reject)]
    blocks = [(number, item, load(item)) for number, item in enumerate(task.items) if isinstance(item, Block)]
    alike = [list(some) for _, some in groupby(blocks, key=lambda block: block[1].encoding)]
    options, wanted = task.options, wanted_of(task.options)
    batches = (decode_blocks(some, wanted, options) for some in alike)
    for batch in chain(*batches, decode_blocks([], wanted, options, rejects=rejects)):
        rows = rows_of(batch, options)
        name = write_staged(rows, task.place)
        for file, spans, other_spans, bad in rows.counts.iter_rows():
            parts[file].append(
                StagedPart(name=name, file=file, spans=spans, other_spans=other_spans, rejects=bad)
            )
    return tuple(map(tuple, parts))
