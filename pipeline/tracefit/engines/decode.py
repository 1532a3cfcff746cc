"""Decode blocks of trace files into staged rows: the first of the two functions that engines run."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from tracefit.inputs.blocks import Block, load
from tracefit.inputs.rejects import Reject, Rejects
from tracefit.otlp.decode import decode_blocks, without_events
from tracefit.recordings import RECORDINGS
from tracefit.tables.rows import RECORDED_STEPS, rows_of, wanted_of
from tracefit.tables.staging import write_staged
from tracefit.tables.store import StagedPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.options import IngestOptions
    from tracefit.tables.rows import SpanRows
    from tracefit.tables.storage import Storage


class Task(msgspec.Struct, frozen=True):
    """Blocks that are decoded together, of one run or of several small ones, and the storage for their rows.

    Attributes:
        items: Blocks, and the rejects between them.
        options: Which part of the input is kept.
        storage: Storage for the staged parts.
    """

    items: tuple[Block | Reject, ...]
    options: IngestOptions
    storage: Storage


Decoded = tuple[tuple[StagedPart, ...], ...]
"""The staged parts of each item of a task; rows know their item by `file`."""


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
    alike = [list(some) for _, some in groupby(blocks, key=lambda block: (block[1].recording, block[1].encoding))]
    for some in alike:
        rows = _recorded(some, task.options) if some[0][1].recording else _spans(some, task.options)
        _write(rows, task.storage, parts)
    _write(_spans([], task.options, rejects), task.storage, parts)
    return tuple(map(tuple, parts))


_Blocks = list[tuple[int, Block, bytes]]


def _spans(blocks: _Blocks, options: IngestOptions, rejects: Sequence[tuple[int, Reject]] = ()) -> Iterator[SpanRows]:
    for batch in decode_blocks(blocks, wanted_of(options), options, rejects=rejects):
        yield rows_of(batch, options)


def _recorded(blocks: _Blocks, options: IngestOptions) -> Iterator[SpanRows]:
    steps, spans, rejects = [pl.DataFrame(schema=RECORDED_STEPS)], [], []
    keys_of_file: dict[int, Callable[[], list[str]]] = {}
    lacking: dict[int, tuple[str, ...]] = {}
    for number, block, payload in blocks:
        recording = RECORDINGS[block.recording or ""]
        decode, lacking[number] = recording.decode, recording.lacks
        assert decode is not None  # noqa: S101 - files of other formats have no blocks
        of_block = Rejects(options, block.source_file, block.offset, block.encoding)
        rows, requests, keys_of_file[number] = decode(block, payload, of_block)
        of_file = pl.lit(number, pl.UInt32).alias("file")
        steps.append(rows.select(of_file, pl.all()))
        spans += [] if requests is None else [requests.select(of_file, pl.all())]
        rejects += [(number, reject) for reject in of_block.take()]
    batch = without_events(spans, rejects, wanted_of(options), keys_of_file)
    yield rows_of(batch, options, pl.concat(steps, how="diagonal"), lacking)


def _write(rows: Iterator[SpanRows], storage: Storage, parts: list[list[StagedPart]]) -> None:
    for some in rows:
        name = write_staged(some, storage)
        for file, spans, other_spans, rejects, steps in some.counts.iter_rows():
            parts[file].append(
                StagedPart(name=name, file=file, spans=spans, other_spans=other_spans, rejects=rejects, steps=steps)
            )
