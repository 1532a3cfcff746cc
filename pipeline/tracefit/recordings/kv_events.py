"""Read files of KV-cache events, JSON lines or consecutive msgpack messages, into batches with their offsets.

vLLM publishes events on a socket and whoever records them chooses the file: with lengths between messages or without,
compressed or not, cut anywhere. The shape is detected from the content, and damage costs only the damaged batches.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack  # type: ignore[import-untyped]  # it has no types
import polars as pl

from tracefit.inputs.compression import USUAL, Expansion, Gap, pieces
from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import BOM, LENGTH_BYTES
from tracefit.inputs.rejects import Reject, Rejects, TooManyRejectsError, excerpt
from tracefit.recordings.kv_batches import (
    KV_ROW_COLUMNS,
    Batch,
    BlockAges,
    KvRows,
    MessageEncoding,
    WholeBatch,
    decode_batch,
    event_rows,
)
from tracefit.recordings.kv_columns import kv_tables

if TYPE_CHECKING:
    from tracefit.inputs.files import TraceFile
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.options import IngestOptions

MAX_BATCH_BYTES = 32 << 20
"""A longer line or message is rejected; a hostile one takes ten times its size once decoded."""

_BLANK_LINES = re.compile(rb"\n+")
_BATCH_IN_LINE = re.compile(rb"\[\s*\d{9,10}(?:\.\d*)?\s*,\s*\[")
"""The beginning of a batch, its unix time and its events; no event contains such a sequence."""

_BATCH_START = re.compile(rb"(?=[\x92-\x9f]\xcb\x41[\xd0-\xdf])")
"""An array whose first element is a float64 from 2**30 to 2**31: a batch with its unix time, from 2004 to 2038."""
_START_BYTES = 4
_CHUNK_ROWS = 1 << 16


class RecordedBatch(NamedTuple):
    """A batch, and the offset of its record in the decompressed file."""

    offset: int
    encoding: MessageEncoding
    batch: Batch


_Items = Generator[RecordedBatch | Reject, None, int]


def read_kv(files: Iterable[TraceFile], options: IngestOptions) -> KvRows:
    """Read the KV-cache recordings of one run.

    Memory grows with the number of events, not with their token ids. A bad event costs only itself.

    Args:
        files: The recordings, in the order of their times.
        options: Rejects of a file after which reading it stops, with one reject for the rest.

    Raises:
        UsageError: A file cannot be opened, or not be read to its end.
    """
    ages = BlockAges()
    frames: list[pl.DataFrame] = []
    rows: list[tuple[Any, ...]] = []
    rejects: list[Reject] = []
    for file in files:
        of_file = Rejects(options, file.name)
        end = 0
        with suppress(TooManyRejectsError):
            for item in _rows_of_file(file, ages):
                if isinstance(item, Reject):
                    end = item.source_offset + item.length
                    of_file.include(item)
                    continue
                rows.append(item)
                if len(rows) == _CHUNK_ROWS:
                    frames.append(_frame(rows))
                    rows.clear()
        rejects += of_file.take()
        if of_file.is_full:
            rejects.append(of_file.rest(end))
    return KvRows(pl.concat([*frames, _frame(rows)]), rejects)


def _frame(rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=KV_ROW_COLUMNS, orient="row")
    return frame.with_columns(pl.col(pl.String).replace("", None))


def _rows_of_file(file: TraceFile, ages: BlockAges) -> Iterator[tuple[Any, ...] | Reject]:
    for item in read_recording(file):
        if isinstance(item, Reject):
            yield item
        else:
            yield from event_rows(item.batch, item.encoding, file.name, item.offset, ages)


def read_recording(
    file: TraceFile, *, bounds: Expansion = USUAL, max_batch_bytes: int = MAX_BATCH_BYTES
) -> Iterator[RecordedBatch | Reject]:
    """Yield the batches of one file in order, in bounded memory, and a reject for each unreadable part.

    Compression and encoding are detected from the content. A 4-byte length may precede each msgpack message.

    Args:
        file: The recording.
        bounds: Bounds on compressed content.
        max_batch_bytes: Bytes of the longest line or message that is read.

    Raises:
        UsageError: The file cannot be opened, or not be read to its end.
    """
    offset, read = 0, None
    with file.open() as raw:
        for is_gap, items in groupby(pieces(raw, bounds), key=lambda item: isinstance(item, Gap)):
            if is_gap:
                gaps = (item for item in items if isinstance(item, Gap))
                yield from (Reject(file.name, offset, 0, gap.reason, count=gap.count) for gap in gaps)
                continue
            chunks = (item.data for item in items if not isinstance(item, Gap))
            head = next(chunks)
            read = read or (_read_lines if _is_text(head) else _read_messages)
            # No record continues across a gap.
            offset = yield from read(file.name, chain([head], chunks), offset, max_batch_bytes)


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    if _BATCH_IN_LINE.match(head.removeprefix(BOM).lstrip()):
        return "lines", "json"
    begins = _BATCH_START.match(head) or _BATCH_START.match(head, LENGTH_BYTES)
    return ("messages", "msgpack") if begins else None


FORMAT = register(
    Recording(
        name="kv_events",
        title="KV-cache events",
        find=_find,
        fills="`kv_events`, and columns of `requests`, of `runs` and, in training, of steps",
        units="s (`ts` of a batch); blocks and tokens",
        clock="the server's wall clock",
        file_name="kv_events",
        read=read_kv,
        fill=kv_tables,
    )
)


def _is_text(head: bytes) -> bool:
    begin = head.removeprefix(BOM).lstrip()[:1]
    return begin in (b"[", b"{", b"") or not (b"\0" in head or b"\xcb\x41" in head)


def _cut(
    chunks: Iterable[bytes], offset: int, where: re.Pattern[bytes], most_bytes: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yield a file in pieces that end where a match of a pattern ends: offset, size, and content.

    The content of a piece that is too large is shorter than its size. The last piece may be empty.
    """
    buffer = bytearray()
    dropped = 0
    for chunk in chunks:
        searched = max(len(buffer) - _START_BYTES + 1, 0)
        buffer += chunk
        ends = [match.end() for match in where.finditer(buffer, searched)]
        whole, begin = bytes(buffer[: ends[-1]]) if ends else b"", 0
        for end in ends:
            if size := dropped + end - begin:
                yield offset, size, whole[begin:end]
            offset, begin, dropped = offset + size, end, 0
        del buffer[:begin]
        if dropped + len(buffer) > most_bytes:
            dropped += max(len(buffer) - _START_BYTES + 1, 0)
            del buffer[: 1 - _START_BYTES]
    yield offset, dropped + len(buffer), bytes(buffer)


def _read_lines(name: str, chunks: Iterable[bytes], offset: int, most_bytes: int) -> _Items:
    """Yield the batches in lines; return the offset after them."""
    for offset, size, content in _cut(chunks, offset, _BLANK_LINES, most_bytes):  # noqa: B020, PLR1704
        if len(content) < size:
            yield Reject(name, offset, size, "record too large")
            continue
        line = content.rstrip().removeprefix(BOM)
        if not line:
            continue
        start = offset + (len(BOM) if content.startswith(BOM) else 0)
        batch = decode_batch(line, "json")
        if not isinstance(batch, str):
            yield RecordedBatch(start, "json", batch)
            continue
        # Each of several glued lines begins like a batch.
        starts = (match.start() for match in _BATCH_IN_LINE.finditer(line, 1))
        for begin, end in pairwise(chain([0], starts, [len(line)])):
            part = line[begin:end]
            decoded = decode_batch(part, "json") if len(part) < len(line) else batch
            if isinstance(decoded, str):
                reason = decoded if end == len(line) else "record cut: another begins inside"
                yield Reject(name, start + begin, len(part), reason, excerpt(part, "json"))
            else:
                yield RecordedBatch(start + begin, "json", decoded)
    return offset + size


def _read_messages(name: str, chunks: Iterable[bytes], offset: int, most_bytes: int) -> _Items:
    """Yield the batches in msgpack messages; return the offset after them."""

    def reject(begin: int, size: int, reason: str) -> Reject:
        return Reject(name, begin, size, reason, f"<binary, {size} bytes>")

    pending = b""  # a message that does not end before the next one seems to begin
    for offset, size, content in _cut(chunks, offset, _BATCH_START, most_bytes):  # noqa: B020, PLR1704
        begin, end = offset - len(pending), offset + size
        length, batch = _decode_message(pending + content)
        # Some block hashes look like a beginning. If a message that contains one is whole, all its events are good.
        if pending and not isinstance(batch, WholeBatch):
            yield reject(begin, len(pending), "record cut")
            begin = offset
            length, batch = _decode_message(content)
        pending = b""
        if not isinstance(batch, str):
            yield RecordedBatch(begin, "msgpack", batch)
            begin += length
            batch = "not a batch of KV-cache events"
        elif len(content) < size:
            batch = "record too large"
        elif not length:
            pending = content
            continue
        # The length of the next message may follow a message.
        if end - begin not in (0, LENGTH_BYTES):
            yield reject(begin, end - begin, batch)
    if pending:
        yield reject(offset, size, "record cut")
    return offset + size


def _decode_message(content: bytes) -> tuple[int, Batch | str]:
    """Return the length of the message at the start of some bytes, 0 if cut, and its batch or a reject reason."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(content))
    unpacker.feed(content)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        return 0, "record cut"
    except msgpack.UnpackException:
        return len(content), "not a batch of KV-cache events"
    length: int = unpacker.tell()
    return length, decode_batch(content[:length], "msgpack")
