"""Decompress a file: gzip members, zstd frames, length-prefixed zstd and plain parts, in any order.

A file is a sequence of *units*: a gzip member, a zstd frame, or (the old form of the Collector's file
exporter) a 4-byte big-endian length and a zstd frame with one record. For a damaged unit, the content before
the damage is yielded, then a `Gap`, then the next unit that can be decompressed. Bytes outside units are
plain. Memory, expansion, guesses and re-reading are bounded, because every size in a file is an unverified
claim of its writer.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import tempfile
import zlib
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, BinaryIO, Literal, NamedTuple, cast

import msgspec
import pyarrow as pa

from tracefit.inputs import otlp_wire as wire
from tracefit.inputs.files import read_fully
from tracefit.inputs.framing import LENGTH_BYTES, end_of_run

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Compression = Literal["gzip", "zstd", "framed zstd"]


class Expansion(msgspec.Struct, frozen=True):
    """Bounds on what a file becomes when it is read: every size in it is an unverified claim of its writer.

    Attributes:
        chunk_bytes: Largest chunk that is yielded.
        max_ratio: Decompressed bytes allowed per compressed byte; traces reach 30.
        free_bytes: Decompressed bytes allowed at any ratio, so that a small file of zeros is odd but not refused.
        max_record_bytes: Longest decompressed record of length-prefixed zstd; a longer one is a gap.
        most_junk_bytes: Bytes of a file, and of its content, searched where the beginning shows nothing: a damaged
            beginning is short, and a file of something else may be huge.
    """

    chunk_bytes: int = 1 << 20
    max_ratio: int = 200
    free_bytes: int = 64 << 20
    max_record_bytes: int = 64 << 20
    most_junk_bytes: int = 64 << 20


USUAL = Expansion()

MAX_STREAM_GUESSES = 10_000
"""Limit on the positions of a file that are tried because they look like the beginning of a unit."""

MAX_REREAD_BYTES, MAX_REREAD_SHARE = 32 << 20, 2
"""Bytes that may be read again to find the unit after damage: a fixed number, plus a multiple of the bytes
read so far."""

_MOST_LAYERS = 3
"""Compressions of one content that are undone."""

_TEXT_BYTES, _DECOMPRESSED_BYTES = 4096, 64 << 10
_TRIAL_BYTES, _MAX_TRIALS = 16 << 10, 16
_BYTEWISE_STEPS, _STEP_BYTES = 1 << 20, 4096
_WINDOW_BYTES = 256 << 10
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The magic numbers of gzip (with the deflate method and no reserved flag) and of a zstd frame whose header has its
# reserved bit clear: the more bytes a match needs, the fewer guesses are wasted on random ones.
_UNIT_START = re.compile(
    rb"\x1f\x8b\x08[\x00-\x1f]|\x28\xb5\x2f\xfd[^\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f]",
    re.DOTALL,
)
_UNIT_OR_RECORD_START = re.compile(
    _UNIT_START.pattern + rb'|\{\s{0,9}"(?:resourceSpans|resource_spans|batches|trace)"\s{0,9}:', re.DOTALL
)
_UNIT_START_BYTES = 48
"""Bytes that searched pieces overlap, so that a match across their edge is found."""
_SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_SHORTEST_FRAME = 9
_TOO_SHORT_FRAME = re.compile(
    rb"\0\0\0(?:%b)"
    % b"|".join(re.escape(bytes([n]) + _ZSTD_MAGIC) + b"." * (n - 4) for n in range(4, _SHORTEST_FRAME)),
    re.DOTALL,
)
"""Length-prefixed zstd data too short to be a frame; a hostile file can hold millions of them, so that a run of them is
skipped at once."""

_CODEC = pa.Codec("zstd")
# A larger window than 128 MiB is memory that a hostile header asks for.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}


class Gap(msgspec.Struct, frozen=True):
    """A range with missing content; `count` adjacent units of length-prefixed zstd make one gap.

    A gap of a container has the `record` that could not be read.
    """

    reason: str
    count: int = 1
    record: bytes = b""


class Piece(NamedTuple):
    """Bytes of the content; `is_stored` if the file has the same bytes at the same offset."""

    data: bytes
    is_stored: bool


def pieces(raw: BinaryIO, bounds: Expansion = USUAL, *, most_bytes: int = sys.maxsize) -> Iterator[Piece | Gap]:
    """Yield the content of a file in pieces, decompressed where it is compressed.

    Length-prefixed zstd gives JSON lines, a record each, or length-prefixed protobuf.

    Args:
        raw: The file, at any position if it can be rewound.
        bounds: Bounds on the content.
        most_bytes: Bytes of the file that are read, as if it ended there.

    Yields:
        Pieces of at most `bounds.chunk_bytes` (`max_record_bytes` for a record of length-prefixed zstd), and a gap
        wherever content is missing.
    """
    with ExitStack() as streams:
        reader = _FileReader(streams.enter_context(rewindable(raw)), bounds, most_bytes)
        content = reader.read()
        # A program that compresses its files may be given one that is compressed already.
        for _ in range(_MOST_LAYERS - 1):
            head = next(content, None)
            content = itertools.chain([head] if head else [], content)
            if not isinstance(head, Piece) or head.is_stored or not compression_of(head.data):
                break
            inner = streams.enter_context(rewindable(cast("BinaryIO", layer := _Layer(content))))
            content = layer.with_gaps(_FileReader(inner, bounds, sys.maxsize).read())
            content = _limited(content, reader, bounds)
        # Adjacent gaps are joined: there can be millions of them.
        for is_gap, group in itertools.groupby(content, key=lambda item: isinstance(item, Gap)):
            if is_gap:
                first = cast("Gap", next(group))
                yield Gap(first.reason, first.count + sum(cast("Gap", gap).count for gap in group))
            else:
                yield from group


def _limited(content: Iterator[Piece | Gap], reader: _FileReader, bounds: Expansion) -> Iterator[Piece | Gap]:
    """Yield content of several layers of compression, which together expand no more than one may."""
    size = 0
    for item in content:
        size += 0 if isinstance(item, Gap) else len(item.data)
        if size > bounds.free_bytes and size > bounds.max_ratio * reader.reach:
            yield Gap(_bomb(bounds))
            return
        yield item


def _bomb(bounds: Expansion) -> str:
    return f"decompression bomb: more than {bounds.max_ratio} bytes for each compressed byte"


class _Layer(io.RawIOBase):
    """Content of one layer of compression as a stream that the next layer is read from."""

    def __init__(self, content: Iterator[Piece | Gap]) -> None:
        super().__init__()
        self._content = content
        self._rest = b""
        self._gaps: list[Gap] = []

    def read(self, size: int = -1) -> bytes:
        while not self._rest and (item := next(self._content, None)) is not None:
            if isinstance(item, Gap):
                self._gaps.append(item)
            else:
                self._rest = item.data
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def with_gaps(self, content: Iterator[Piece | Gap]) -> Iterator[Piece | Gap]:
        """Yield content that is made of this stream, and the gaps of the stream as they come."""
        for item in content:
            yield from self._taken()
            yield item
        yield from self._taken()

    def _taken(self) -> list[Gap]:
        gaps, self._gaps = self._gaps, []
        return gaps


@contextmanager
def rewindable(raw: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the same bytes as a stream that can be rewound, as damage requires; a pipe is copied to disk."""
    if raw.seekable():
        yield raw
    else:
        with tempfile.TemporaryFile() as copy:
            yield cast("BinaryIO", _Kept(raw, copy))


def compression_of(head: bytes) -> Compression | None:
    """Return the compression of a file from its first bytes (eight are enough), or None if it is plain."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(_ZSTD_MAGIC) or _SKIPPABLE_FRAME.match(head):
        return "zstd"
    return "framed zstd" if head.startswith(_ZSTD_MAGIC, LENGTH_BYTES) else None


class _Kept(io.RawIOBase):
    """A stream that can be rewound, over one that cannot; its bytes are kept in a file as far as they are read."""

    def __init__(self, raw: BinaryIO, copy: IO[bytes]) -> None:
        super().__init__()
        self._raw = raw
        self._copy = copy
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, _: int = io.SEEK_SET) -> int:
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        missing = self._position + size - self._copy.seek(0, io.SEEK_END)
        while missing > 0 and (piece := self._raw.read(missing)):
            missing -= self._copy.write(piece)
        self._copy.seek(self._position)
        data = self._copy.read(size)
        self._position += len(data)
        return data


class _DamageError(Exception):
    """A unit is damaged; reading stopped at `position`. If `is_final`, the rest of the file is skipped."""

    def __init__(self, reason: str, position: int, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.is_final = is_final


class _GzipDecoder:
    """zlib's decompressor with the interface of zstd's."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)  # zlib's number for a gzip header and trailer, nothing else
        self.eof = False
        self.needs_input = True
        self.unused_data = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        content = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self.eof, self.unused_data = self._inflate.eof, self._inflate.unused_data
        self.needs_input = not (self._inflate.unconsumed_tail or self.eof)
        return content


def _decoder(kind: Compression) -> _GzipDecoder | zstd.ZstdDecompressor:
    return _GzipDecoder() if kind == "gzip" else zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)


class _FileReader:
    """Reads one file, and counts the guesses and re-reads that damage has cost so far."""

    def __init__(self, raw: BinaryIO, bounds: Expansion, most_bytes: int) -> None:
        self._raw = raw
        self._bounds = bounds
        self._most_bytes = most_bytes
        self._window, self._window_start, self._at_end = b"", 0, False
        self._guesses_left = MAX_STREAM_GUESSES
        self._reread = 0
        self._steps_left = _BYTEWISE_STEPS
        self._expanded = self._compressed = self._unit_end = 0
        self._in_frames = False  # length-prefixed zstd has occurred
        self._is_binary = False  # these records are protobuf
        self._is_stored = True  # all bytes yielded so far are the file's own, at the same offset

    @property
    def reach(self) -> int:
        """How many bytes of the file are read so far."""
        return self._window_start + len(self._window)

    def read(self) -> Iterator[Piece | Gap]:
        position = 0
        while position >= 0 and (head := self._bytes(position, 8)):
            kind = compression_of(head)
            if kind is None:
                position = yield from self._plain(position)
                continue
            self._is_stored = False
            try:
                if kind == "framed zstd":
                    position = yield from self._framed(position)
                else:
                    position = yield from self._unit(kind, position)
            except _DamageError as damage:
                position, gap = self._behind(damage, kind, position)
                yield gap

    def _bytes(self, position: int, size: int) -> bytes:
        """Return `size` bytes of the file, or fewer at its end."""
        # Units are small and mostly read in order: a window of the file saves a read for each.
        begin = position - self._window_start
        if begin < 0 or (begin + size > len(self._window) and not (self._at_end and self._window)):
            self._raw.seek(position)
            wanted = max(min(max(size, _WINDOW_BYTES), self._most_bytes - position), 0)
            self._window, self._window_start, begin = read_fully(self._raw, wanted), position, 0
            self._at_end = len(self._window) < wanted
        return self._window[begin : begin + size]

    # Units.

    def _unit(self, kind: Compression, start: int) -> Generator[Piece, None, int]:
        """Yield the content of a unit; return where it ends."""
        yield from self._decoded(kind, start)
        # Tape blocks are padded with zeros; framed protobuf begins with zeros too, but no unit or end follows them.
        zeros = self._unit_end
        while kind == "gzip" and (piece := self._bytes(zeros, _DECOMPRESSED_BYTES)):
            zeros += len(piece) - len(piece.lstrip(b"\0"))
            if piece.strip(b"\0"):
                break
        rest = self._bytes(zeros, 8)
        return zeros if not rest or compression_of(rest) else self._unit_end

    def _decoded(
        self, kind: Compression, start: int, *, careful_from: int | None = None, skip: int = 0
    ) -> Iterator[Piece]:
        """Yield the content of one unit after its first `skip` bytes; then `_unit_end` is where it ends.

        The library drops the output of the call that reaches a corrupt byte. To save that output, the unit is then
        decompressed once more, and from the piece with the corrupt byte on (`careful_from`) byte by byte.
        """
        decoder, size = _decoder(kind), 1024
        piece_start = position = start
        while not decoder.eof:
            if careful_from is not None:
                size = min(careful_from - position, _DECOMPRESSED_BYTES)
                if size <= 0:  # byte by byte, as long as that is affordable
                    self._steps_left -= 1
                    size = 1 if self._steps_left > 0 else _STEP_BYTES
            needs_input = decoder.needs_input
            piece = self._bytes(position, size) if needs_input else b""
            if piece:
                piece_start, position = position, position + len(piece)
                size = min(2 * size, _DECOMPRESSED_BYTES)  # little at first: units can be tiny
            try:
                chunk = decoder.decompress(piece, self._bounds.chunk_bytes)
            except (zlib.error, zstd.ZstdError) as error:
                if careful_from is None:
                    yield from self._decoded(kind, start, careful_from=piece_start, skip=skip)
                raise _DamageError(f"{kind} data is corrupt", position) from error
            if needs_input and not (piece or chunk or decoder.eof):
                raise _DamageError(f"{kind} data is cut", position)
            if careful_from is None:
                skip += len(chunk)
                self._count_expansion(len(chunk), position - start)
            else:
                chunk, skip = chunk[skip:], max(skip - len(chunk), 0)
            if chunk:
                yield Piece(chunk, is_stored=False)
        self._unit_end = position - len(decoder.unused_data)
        self._compressed += self._unit_end - start

    def _count_expansion(self, size: int, consumed: int) -> None:
        self._expanded += size
        read = self._compressed + consumed
        if self._expanded > self._bounds.free_bytes and self._expanded > self._bounds.max_ratio * read:
            raise _DamageError(_bomb(self._bounds), 0, is_final=True)

    def _framed(self, start: int) -> Generator[Piece | Gap, None, int]:
        """Yield the one record after a length, as a line of JSON or as length-prefixed protobuf; return its end."""
        self._in_frames = True
        if self._bytes(start + LENGTH_BYTES - 1, 1) < bytes([_SHORTEST_FRAME]):
            data = self._bytes(start, _DECOMPRESSED_BYTES)
            if size := end_of_run(_TOO_SHORT_FRAME, data, 0, len(data)):
                yield Gap("zstd data is cut", data[:size].count(_ZSTD_MAGIC))
                return start + size
        small, stop_of_small = self._small_records(start)
        if small:
            yield Piece(b"".join(map(self._canonical, small)), is_stored=False)
            return stop_of_small
        parts: list[bytes] = []
        size = 0
        most = self._bounds.max_record_bytes
        # The length is not needed, and a wrong one costs nothing: a frame says where it ends.
        for part in self._decoded("zstd", start + LENGTH_BYTES):
            size += len(part.data)
            if size > most:
                raise _DamageError(f"record too large: more than {most >> 20} MiB", start)
            parts.append(part.data)
        yield Piece(self._canonical(b"".join(parts)), is_stored=False)
        return self._unit_end

    def _small_records(self, start: int) -> tuple[list[bytes], int]:
        """Return consecutive small records, and where they end.

        One call decompresses them all: setting up a decompressor for each takes longer than decompressing it.
        """
        data, position = self._bytes(start, _DECOMPRESSED_BYTES), 0
        frames: list[bytes] = []
        ends = [0]
        try:
            while data.startswith(_ZSTD_MAGIC, position + LENGTH_BYTES):
                begin = position + LENGTH_BYTES
                stop = begin + int.from_bytes(data[position:begin], "big")
                size = zstd.get_frame_info(data[begin:stop]).decompressed_size if stop <= len(data) else None
                if size is None or ends[-1] + size > self._bounds.chunk_bytes:
                    break
                frames.append(data[begin:stop])
                ends.append(ends[-1] + size)
                position = stop
            text = _CODEC.decompress(b"".join(frames), ends[-1], asbytes=True) if frames else b""
        except (zstd.ZstdError, OSError):  # one frame is damaged: the caller reads them one by one
            return [], start
        self._count_expansion(len(text), position)
        self._compressed += position
        return [text[begin:end] for begin, end in itertools.pairwise(ends)], start + position

    def _canonical(self, record: bytes) -> bytes:
        """Return a record as in an uncompressed file; an unrecognised one takes the encoding of the last one."""
        if wire.is_traces(record, 0, len(record)):
            self._is_binary = True
        elif record.lstrip().startswith((b"{", b"[")):
            self._is_binary = False
        if not record:
            return b""
        if self._is_binary:
            return len(record).to_bytes(LENGTH_BYTES, "big") + record
        # White space in JSON: a record over several lines becomes one line.
        return record.replace(b"\n", b" ") + b"\n"

    # Damage.

    def _behind(self, damage: _DamageError, kind: Compression, start: int) -> tuple[int, Gap]:
        """Return where reading continues after a damaged unit (-1: nowhere), and the gap to report."""
        if kind == "framed zstd" and not damage.is_final:
            # The length leads to the next record most of the time; if it does, nothing has to be guessed.
            size = int.from_bytes(self._bytes(start, LENGTH_BYTES), "big")
            behind = start + LENGTH_BYTES + size
            if size <= self._bounds.max_record_bytes and compression_of(self._bytes(behind, 8)) == "framed zstd":
                # A wrong length can also lead to a record, past whole ones.
                inside = start + LENGTH_BYTES + 1
                next_unit = self._unit_in(self._bytes(inside, behind - inside), inside, _UNIT_START)
                return next_unit if 0 <= next_unit < behind else behind, Gap(damage.reason)
        # The apparent end of the unit does not count: if the unit was cut, its end is inside another one.
        self._reread += max(damage.position - start, 0)
        skipped = LENGTH_BYTES + 1 if kind == "framed zstd" else 1
        next_unit = -1 if damage.is_final else self._next_unit(start + skipped)
        if next_unit < 0:
            return -1, Gap(damage.reason)
        return next_unit, Gap(f"{damage.reason}; read on at the next {self._name_at(next_unit)}")

    def _next_unit(self, start: int) -> int:
        """Return where, from `start` on, the next readable unit or plain record begins, or -1."""
        # Junk before a file's plain records is part of its content. A file that is not a trace file is not read to its
        # end.
        pattern, limit = (
            (_UNIT_START, self._bounds.most_junk_bytes) if self._is_stored else (_UNIT_OR_RECORD_START, None)
        )
        while limit is None or start < limit:
            data = self._bytes(start, _DECOMPRESSED_BYTES)
            unit = self._unit_in(data, start, pattern)
            if unit >= 0:
                return unit
            if len(data) < _DECOMPRESSED_BYTES:
                return -1
            start += len(data) - _UNIT_START_BYTES + 1
        return -1

    def _unit_in(self, data: bytes, start: int, pattern: re.Pattern[bytes]) -> int:
        """Return the file offset of the first unit in `data`, which lies at `start` of the file, or -1."""
        for match in pattern.finditer(data):
            position = start + match.start()
            if not self._guesses_left or self._reread > MAX_REREAD_BYTES + MAX_REREAD_SHARE * position:
                return -1
            self._guesses_left -= 1
            kind = compression_of(match[0])
            if kind is None:
                if _is_text(self._bytes(position, _TEXT_BYTES)[1:]):
                    return position
            elif self._can_decode(kind, position):
                begin = position - LENGTH_BYTES
                is_framed = kind == "zstd" and begin >= 0 and (self._in_frames or self._is_framed(begin))
                return begin if is_framed else position
        return -1

    def _name_at(self, position: int) -> str:
        kind = compression_of(self._bytes(position, 8))
        return "gzip member" if kind == "gzip" else "zstd frame" if kind else "JSON"

    def _can_decode(self, kind: Compression, position: int) -> bool:
        """Return whether decompressing at a position yields any content."""
        decoder = _decoder(kind)
        for _ in range(_MAX_TRIALS):
            data = self._bytes(position, _TRIAL_BYTES)
            position += len(data)
            self._reread += len(data)
            try:
                if decoder.decompress(data, _TRIAL_BYTES) or decoder.eof:
                    return True
            except (zlib.error, zstd.ZstdError):
                return False
        return False

    def _is_framed(self, position: int) -> bool:
        """Return whether a position holds a length followed by a zstd frame of exactly that length."""
        size = int.from_bytes(self._bytes(position, LENGTH_BYTES), "big")
        if not _SHORTEST_FRAME <= size <= self._bounds.max_record_bytes:
            return False
        frame = self._bytes(position + LENGTH_BYTES, size)
        self._reread += len(frame)
        try:
            return zstd.get_frame_size(frame) == size
        except zstd.ZstdError:
            return False

    # Plain parts.

    def _plain(self, start: int) -> Generator[Piece | Gap, None, int]:
        """Yield uncompressed bytes up to the next unit or the end; return where they end."""
        head = self._bytes(start, _TEXT_BYTES)
        is_text = _is_text(head)
        if not (is_text or _is_protobuf(head, 0) or _is_protobuf(head, LENGTH_BYTES)):
            # Neither JSON nor protobuf: junk before a unit, or a unit that has lost its first bytes.
            unit = self._next_unit(start + 1)
            if unit >= 0:
                self._is_stored = False
                yield Gap(f"not gzip or zstd; read on at the next {self._name_at(unit)}")
                return unit
        while data := self._bytes(start, self._bounds.chunk_bytes):
            # UTF-8 has no byte FD, and JSON no unescaped 1F. So units show in text; in protobuf anything may look so.
            if is_text and (b"\xfd" in data or b"\x1f" in data):
                around = self._bytes(start, self._bounds.chunk_bytes + _UNIT_START_BYTES)
                if (unit := self._unit_in(around, start, _UNIT_START)) >= 0:
                    if unit > start:
                        yield Piece(data[: unit - start], self._is_stored)
                    return unit
            yield Piece(data, self._is_stored)
            start += len(data)
        return start


def _is_protobuf(head: bytes, start: int) -> bool:
    """Return whether bytes look like a message of traces from `start` on: the tag alone is one byte in 256."""
    if head[start : start + 1] != bytes([wire.RESOURCE_SPANS_TAG]):
        return False
    field = wire.read_field(head, start)
    return field is not None and wire.is_resource_spans(head, field[2], field[3]) is not False


def _is_text(head: bytes) -> bool:
    """Return whether bytes look like JSON text."""
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[")):
        return True
    text = head.decode(errors="replace")
    # The head can begin and end inside a character.
    return text.count("\ufffd") <= 4 and not any(c < " " and c not in "\t\r\n" for c in text)
