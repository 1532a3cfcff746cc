"""Sort more rows than fit into memory: any number of frames in, sorted windows out.

Incoming frames are sorted and spilled to disk as blocks, and the first key of every block is kept. The blocks are then
read in the order of these keys: all rows below the first key of the next block are complete and can be yielded. Traces
are nearly in order, so that few blocks wait at any time. Several processes may each sort and spill some of the rows.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import pyarrow as pa

from tracefit.tables.disk import create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_Key = tuple[Any, ...]

_MOST_OPEN = 128
"""Files of spilled rows that are open at a time: there is one for each window of a run."""


class _Block(msgspec.Struct, frozen=True):
    first: _Key
    """First key, each column as (is null, value)."""
    run: Path
    number: int


class SortContents(msgspec.Struct, frozen=True):
    """Rows of a sort that another sort goes on with, in this process or in another one on the same disk.

    Attributes:
        frames: Rows in memory.
        blocks: Sorted rows on disk.
        rows: Their number.
    """

    frames: Sequence[pl.DataFrame]
    blocks: Sequence[_Block]
    rows: int


class SortSpace(msgspec.Struct):
    """The memory that several sorts share, and the folder they spill to.

    Attributes:
        scratch: Folder for spilled rows.
        most_held_bytes: Memory of all sorts together; beyond it rows are spilled to disk.
        window_bytes: About the size of a window in memory.
        block_rows: Rows of a block: the smaller, the fewer rows wait for the next key, and the more keys are kept.
        sorts: The sorts that share it.
    """

    scratch: Path
    most_held_bytes: int = 48 << 20
    window_bytes: int = 16 << 20
    block_rows: int = 8 * 1024
    sorts: list[ExternalSort] = msgspec.field(default_factory=list)

    def sort(self, key: Sequence[str], order: Sequence[str], *, block_rows: int | None = None) -> ExternalSort:
        """Return a new sort in this space, with the arguments of `ExternalSort`; `block_rows` if not those of the
        space.
        """
        self.sorts.append(ExternalSort(self, key, order, block_rows or self.block_rows))
        return self.sorts[-1]

    def evict(self) -> None:
        """Spill the largest sorts until the rest fits into `most_held_bytes`."""
        # The largest first: its blocks are longest, so that the fewest are merged again later.
        while sum(sort.held_bytes for sort in self.sorts) > self.most_held_bytes:
            max(self.sorts, key=lambda sort: sort.held_bytes).spill()


class ExternalSort(msgspec.Struct):
    """Sorts more rows than memory holds.

    Attributes:
        space: The memory and the folder for the rows.
        key: Columns that decide where windows are cut: rows with equal keys share a window. Nulls are last.
        order: All columns to sort by, `key` first.
        block_rows: Rows of a block.
        rows: Number of rows added.
        held_bytes: Size of the rows in memory.
    """

    space: SortSpace
    key: Sequence[str]
    order: Sequence[str]
    block_rows: int
    rows: int = 0
    held_bytes: int = 0
    _held: list[pl.DataFrame] = msgspec.field(default_factory=list)
    _blocks: list[_Block] = msgspec.field(default_factory=list)

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows; all frames have the same columns."""
        if not frame.height:
            return
        self._held.append(frame)
        self.held_bytes += int(frame.estimated_size())
        self.rows += frame.height
        self.space.evict()

    def add_all(self, contents: SortContents) -> None:
        """Add the rows of another sort with the same key."""
        self._blocks += contents.blocks
        self.rows += contents.rows - sum(frame.height for frame in contents.frames)
        for frame in contents.frames:
            self.add(frame)

    def take(self, *, on_disk: bool = False) -> SortContents:
        """Return all rows, spilled if asked for; the sort is empty afterwards."""
        if on_disk:
            self.spill()
        contents = SortContents(self._held, self._blocks, self.rows)
        self._held, self._blocks, self.held_bytes, self.rows = [], [], 0, 0
        return contents

    def windows(self) -> Iterator[pl.DataFrame]:
        """Yield all rows in order, as non-empty frames; the sort is empty afterwards."""
        self.rows = 0
        if not self._blocks:
            yield from self._held_windows()
            return
        self.spill()
        # By first key: no later block can hold a row below the first key of the next one.
        blocks = sorted(self._blocks, key=lambda block: block.first)
        self._blocks = []
        opened = lru_cache(_MOST_OPEN)(lambda path: pa.ipc.open_file(pa.OSFile(str(path))))
        waiting: list[pl.DataFrame] = []
        new_bytes = 0
        for index, block in enumerate(blocks):
            waiting.append(_frame(opened(block.run).get_batch(block.number)))
            new_bytes += int(waiting[-1].estimated_size())
            last = index + 1 == len(blocks)
            if new_bytes >= self.space.window_bytes or last:
                rows = pl.concat(waiting)
                rows = rows[self._row_order(rows)]
                # The rest may have to go after rows of the next block: it waits.
                whole = rows.height
                if not last:
                    keys = rows.select(self.key)
                    whole = bisect_left(range(whole), blocks[index + 1].first, key=_keys_of(keys))
                if whole:
                    yield rows.head(whole)
                waiting, new_bytes = [rows.slice(whole)], 0

    def _held_windows(self) -> Iterator[pl.DataFrame]:
        if not self._held:
            return
        windows = 1 + self.held_bytes // self.space.window_bytes
        rows = self._take_held().rechunk()
        order = self._row_order(rows)
        # Gather one window at a time: a sorted copy of everything would double the memory.
        if windows == 1:
            yield rows[order]
            return
        key_at = _keys_of(rows.select(pl.col(self.key).gather(order)))
        every = range(rows.height)
        wanted = (rows.height * number // windows for number in range(1, windows))
        # Rows with equal keys stay together: cut after the last of them.
        cuts = {bisect_right(every, key_at(row - 1), key=key_at) for row in wanted if row}
        for begin, end in pairwise(sorted({0, *cuts, rows.height})):
            yield rows[order[begin:end]]

    def _row_order(self, rows: pl.DataFrame) -> pl.Series:
        """Return the row numbers in sorted order."""
        # The key alone nearly always distinguishes rows, and sorting by it takes a third of the time.
        order = rows.select(pl.arg_sort_by(*self.key, nulls_last=True)).to_series()
        if rows.height > 1 and len(self.order) > len(self.key):
            keys = rows.select(pl.col(self.key).gather(order))
            equal = (pl.col(c).eq_missing(pl.col(c).shift()).slice(1) for c in self.key)
            if keys.select(pl.all_horizontal(equal).any()).item():
                return rows.select(pl.arg_sort_by(*self.order, nulls_last=True)).to_series()
        return order

    def spill(self) -> None:
        """Move the rows in memory to disk, as blocks in the order of the key."""
        if not self._held:
            return
        rows = self._take_held()
        # Blocks are sorted only by the key; windows are sorted by the full order when they are read. Rows are gathered
        # block by block: a sorted copy of them all, and one more for Arrow, would take three times the memory.
        order = rows.select(pl.arg_sort_by(*self.key, nulls_last=True)).to_series()
        path = self.space.scratch / f"sorted-{uuid.uuid4().hex}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        schema = rows.clear().to_arrow().schema
        with create(path) as stream, pa.ipc.new_file(stream, schema, options=options) as writer:
            for number, start in enumerate(range(0, rows.height, self.block_rows)):
                block = rows[order[start : start + self.block_rows]]
                writer.write_batch(block.to_arrow().combine_chunks().to_batches()[0])
                self._blocks.append(_Block(_keys_of(block.select(self.key))(0), path, number))

    def _take_held(self) -> pl.DataFrame:
        rows = pl.concat(self._held)
        self._held, self.held_bytes = [], 0
        return rows


def _keys_of(rows: pl.DataFrame) -> Callable[[int], _Key]:
    """Return a function from the number of a row to its key, in a form that Python compares."""
    # Python cannot compare None; as (is null, value) a key sorts like the rows do, nulls last.
    return lambda number: tuple((value is None, 0 if value is None else value) for value in rows.row(number))


def _frame(batch: pa.RecordBatch) -> pl.DataFrame:
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a record batch is always a frame
    return frame
