"""Cut a trace file into blocks of whole records: the units of decoding, in this process or another.

A block of an uncompressed local file is a byte range, which the decoding process reads itself; any other
block carries its bytes. Offsets count in the decompressed file. At most a few blocks are in memory, and at
most `IngestOptions.max_document_mib` MiB of one record.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracefit.inputs.compression import USUAL, Expansion, Gap, Piece, compression_of, pieces, rewindable
from tracefit.inputs.containers import Container, unwrapped
from tracefit.inputs.files import cannot_open, read_fully
from tracefit.inputs.formats import (
    FORMAT_HEAD_BYTES,
    JUNK_EDGE_BYTES,
    Contents,
    begins_json_traces,
    detect_format,
)
from tracefit.inputs.framing import Shape, next_record, whole_records
from tracefit.inputs.rejects import Encoding, Reject, Rejects, TooManyRejectsError
from tracefit.options import IngestOptions, named

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.inputs.files import ContentHash, TraceFile

_EXCERPT_BYTES, _EDGE_BYTES = 4096, 16

_MOST_LINES = 10_000
_LONGEST_REST = 1 << 20
"""Most bytes of a line that one piece begins and the next one ends."""

_FIRST_BYTES = 16 << 10
_SMALLEST_READ_BYTES = 4096
"""Lower limit for small blocks: each read has its cost."""


def head_bytes(options: IngestOptions) -> int:
    """Return the bytes at the beginning of a file from which its format is detected."""
    # If no format is recognised, the last JUNK_EDGE_BYTES are kept and scanned with the next read.
    return min(FORMAT_HEAD_BYTES, max(options.block_bytes, 2 * JUNK_EDGE_BYTES))


class Block(msgspec.Struct, frozen=True):
    """Consecutive whole records of one file.

    Attributes:
        source_file: The file, as the user knows it.
        shape: How the file lays out its records.
        encoding: How the records are encoded.
        offset: Where the block begins, in bytes of the decompressed file.
        path: The absolute path of the file to read the block from, if it has no payload.
        size: Number of bytes.
        payload: The bytes themselves, if there is no path.
        recording: Name of the recording format, if the file does not hold spans.
        header: The line that names the columns of its lines, if there is one before the block.
    """

    source_file: str
    shape: Shape
    encoding: Encoding
    offset: int
    path: str | None
    size: int
    payload: bytes | None
    recording: str | None = None
    header: bytes = b""


def read_blocks(
    file: TraceFile,
    options: IngestOptions = IngestOptions(),
    *,
    bounds: Expansion = USUAL,
    on_read: Callable[[int], object] | None = None,
    content_hash: ContentHash | None = None,
    by_path: bool = True,
) -> Iterator[Block | Reject]:
    """Yield the blocks of a file in order, and rejects for the bytes between them.

    Compression and shape are detected from the content. Damage inside a block is found when it is decoded.

    Args:
        file: The file.
        options: Bounds on record length and rejects.
        bounds: Bounds on compressed content.
        on_read: Receives the number of bytes of the file, as stored, that were read.
        content_hash: Receives the bytes as they are read.
        by_path: Whether blocks of uncompressed local files come as ranges, for other processes to read.

    Raises:
        UsageError: If the file cannot be opened or read to its end.
    """
    rejects = Rejects(options, file.name)
    chunk_bytes = max(options.block_bytes, _SMALLEST_READ_BYTES)
    bounds = replace(bounds, chunk_bytes=min(bounds.chunk_bytes, chunk_bytes))
    with file.open(on_read=on_read, content_hash=content_hash) as raw:
        splitter = _Splitter(file, options, bounds, pieces(raw, bounds), by_path=by_path)
        with suppress(TooManyRejectsError):
            for item in splitter.blocks():
                yield item
                rejects.count(int(isinstance(item, Reject)))
    if rejects.is_full:
        yield rejects.rest()


def inspect_file(file: TraceFile, bounds: Expansion = USUAL, *, is_shape_needed: bool = True) -> Contents:
    """Return the format of a file, from its first few MiB.

    Args:
        file: The file.
        bounds: How much is read if these show nothing.
        is_shape_needed: Whether the layout of JSON traces matters. If not, the first KiB usually suffice: of many small
            files, reading more takes longer than everything else until they are decoded.

    Raises:
        UsageError: If it cannot be read.
    """
    with file.open() as raw, rewindable(raw) as stream:
        head = read_fully(stream, 8 if is_shape_needed else _FIRST_BYTES)
        if not is_shape_needed and begins_json_traces(head):
            return Contents("lines", "json")
        compression = compression_of(head)
        content = pieces(stream, bounds, most_bytes=bounds.most_junk_bytes)
        splitter = _Splitter(file, IngestOptions(), bounds, content)
        rejects = list(splitter.detect())
    contents = splitter.contents
    # A file that cannot be decompressed at all is damaged, not empty.
    is_lost = contents.encoding is None and rejects
    return replace(contents, compression=compression, shape="unknown" if is_lost else contents.shape)


def lines_with(file: TraceFile, marks: Sequence[bytes], *, most_bytes: int, bounds: Expansion = USUAL) -> list[str]:
    """Return the lines of a text file that contain one of some marks, at most the last 10,000.

    Args:
        file: The file; compressed or not.
        marks: Parts of a line that is wanted.
        most_bytes: Bytes of its content that are read, as if it ended there.
        bounds: Bounds on compressed content.

    Raises:
        UsageError: It cannot be opened or read.
    """
    found: deque[str] = deque(maxlen=_MOST_LINES)
    rest, left = b"", most_bytes
    with file.open() as raw:
        for piece in unwrapped(pieces(raw, bounds, most_bytes=most_bytes), _LONGEST_REST, []):
            if isinstance(piece, Gap):
                continue
            left -= len(piece.data)
            if left < 0:
                break
            whole, _, rest = (rest + piece.data).rpartition(b"\n")
            # Most of a log has none: to look at each of its lines takes several times as long.
            if any(mark in whole for mark in marks):
                lines = whole.split(b"\n")
                found += [line.decode(errors="replace") for line in lines if any(mark in line for mark in marks)]
            rest = rest[-_LONGEST_REST:]
    return [*found, *([rest.decode(errors="replace")] if any(mark in rest for mark in marks) else [])]


def load(block: Block) -> bytes:
    """Return the bytes of a block.

    Raises:
        UsageError: If its file can no longer be read.
    """
    if block.payload is not None or block.path is None:
        return block.payload or b""
    try:
        with Path(block.path).open("rb", buffering=0) as raw:
            raw.seek(block.offset)
            return raw.read(block.size)
    except OSError as error:
        raise cannot_open(block.source_file, error) from error


class _Splitter:
    """Reads content into a buffer and cuts it where records end."""

    def __init__(
        self,
        file: TraceFile,
        options: IngestOptions,
        bounds: Expansion,
        content: Iterator[Piece | Gap],
        *,
        by_path: bool = False,
    ) -> None:
        self._file = file
        self._options = options
        self._bounds = bounds
        self._containers: list[Container] = []
        self._content = unwrapped(content, options.max_document_mib << 20, self._containers)
        # Where other processes find the file: some engines' workers have a working folder of their own.
        self._path = os.path.abspath(file.path) if by_path and file.filesystem is None else None  # noqa: PTH100 - `..` of a link stays what it is
        self._buffer = b""
        self._offset = 0  # of the buffer, in the content
        self._stored = 0  # bytes of the content that the file has at the same offset
        self._is_last = False
        self._header = b""
        self.contents = Contents("unknown", None)

    def detect(self) -> Iterator[Reject]:
        """Find the format of the content; skip junk at the beginning, a head at a time, and yield one reject for it."""
        yield from self._fill(head_bytes(self._options))
        contents = detect_format(self._buffer, is_whole=self._is_last)
        most = self._bounds.most_junk_bytes
        known = contents.known
        while contents.shape == "unknown" and not self._is_last and self._offset < most:
            # A record may begin in the last bytes of the junk.
            self._drop(len(self._buffer) - JUNK_EDGE_BYTES)
            yield from self._fill(head_bytes(self._options))
            contents = detect_format(self._buffer, is_whole=False)
        if self._offset and contents.shape != "unknown":
            yield Reject(self._file.name, 0, self._offset, "not OTLP traces")
        titles = tuple(one.title for one in self._containers)
        known = known if contents.shape == "unknown" else ""
        self.contents = replace(contents, known=known, containers=titles)

    def blocks(self) -> Iterator[Block | Reject]:
        yield from self._fill(head_bytes(self._options))
        is_text = self._buffer.lstrip().startswith((b"{", b"["))
        yield from self.detect()
        shape, encoding = self.contents.shape, self.contents.encoding or "json"
        if shape == "unknown":
            yield from self._skipped(self._words_of_unknown, shape, "json" if is_text else "protobuf", start=0)
            return
        if self.contents.recording and not self.contents.recording.decode:
            yield Reject(
                self._file.name,
                0,
                self._file.size,
                f"{self.contents}: they are read from {self.contents.recording.file_name}*",
            )
            return
        if shape == "empty":
            return
        longest = self._options.max_document_mib << 20
        usual = wanted = min(self._options.block_bytes, longest + 1)
        while self._buffer or not self._is_last:
            yield from self._fill(wanted)
            size = whole_records(self._buffer, shape, is_last=self._is_last, starts=self._starts)
            if size > longest:  # many records together; a record that is too long is rejected once it is alone
                size = whole_records(self._buffer[:longest], shape, is_last=False, starts=self._starts)
            if not size and len(self._buffer) > longest:
                advice = f"longer than {longest >> 20} MiB: raise {named(IngestOptions, 'max_document_mib')} to read it"
                yield from self._skipped(advice, shape, encoding, start=self._offset)
                size = 1  # there was progress: read on in the usual size
            elif size:
                yield self._block(shape, encoding, size)
            wanted = usual if size else min(2 * wanted, longest + 1)

    def _fill(self, size: int) -> Iterator[Reject]:
        """Read until the buffer holds `size` bytes or the file ends; yield a reject for each gap on the way."""
        parts, size_so_far = [self._buffer], len(self._buffer)
        while size_so_far < size and not self._is_last:
            piece = next(self._content, None)
            if piece is None:
                self._is_last = True
            elif isinstance(piece, Gap):
                yield self._reject(self._offset + size_so_far, piece)
            else:
                parts.append(piece.data)
                size_so_far += len(piece.data)
                self._stored += len(piece.data) if piece.is_stored else 0
        self._buffer = b"".join(parts) if len(parts) > 1 else self._buffer

    def _reject(self, offset: int, gap: Gap) -> Reject:
        outline = Rejects(self._options).excerpt(gap.record) if gap.record else ""
        return Reject(self._file.name, offset, len(gap.record), gap.reason, outline, gap.count)

    def _drop(self, size: int) -> None:
        self._buffer = self._buffer[size:]
        self._offset += size

    def _block(self, shape: Shape, encoding: Encoding, size: int) -> Block:
        # Bytes of a plain part lie in the file at the same offset only as long as nothing compressed came before.
        path = self._path if self._offset + size <= self._stored else None
        payload = None if path else self._buffer[:size]
        recording = self.contents.recording
        name = recording.name if recording else None
        block = Block(self._file.name, shape, encoding, self._offset, path, size, payload, name, self._header)
        if recording and recording.header:
            # Concatenated files have several headers: the last one applies to the next block.
            header = recording.header(self._buffer[:size])
            # A cut line may be glued to it.
            self._header = self._header if self._header and header.endswith(self._header) else header or self._header
        self._drop(size)
        return block

    @property
    def _words_of_unknown(self) -> str:
        return f"not OTLP traces: {self.contents.known}" if self.contents.known else "not OTLP traces"

    @property
    def _starts(self) -> re.Pattern[bytes] | None:
        return (
            self.contents.recording.message_start
            if self.contents.shape == "messages" and self.contents.recording
            else None
        )

    def _skipped(self, reason: str, shape: Shape, encoding: Encoding, *, start: int) -> Iterator[Reject]:
        """Skip to the next record, or to the end, and yield one reject for the bytes from `start` on."""
        begins = self._buffer[:_EXCERPT_BYTES]
        can_go_on = shape in ("lines", "framed", "bare", "messages")
        while (end := next_record(self._buffer, shape, 1, starts=self._starts) if can_go_on else -1) < 0:
            # A record header may lie across the edge of the buffer, so that its last bytes are searched again.
            self._drop(max(len(self._buffer) - _EDGE_BYTES, 1))
            yield from self._fill(self._options.block_bytes)
            if self._is_last and len(self._buffer) <= _EDGE_BYTES:
                end = len(self._buffer)
                break
        self._drop(end)
        rejects = Rejects(self._options, encoding=encoding)
        outline = rejects.excerpt(begins) if encoding == "json" else ""
        yield Reject(self._file.name, start, self._offset - start, reason, outline)
