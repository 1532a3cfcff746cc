"""Compressed streams to plain chunks: gzip of many members, zstd of many frames, and their cut tails."""

from __future__ import annotations

import io
import re
import tempfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

import pyarrow as pa

from tracefit.errors import TracefitError
from tracefit.sources.limits import (
    CHUNK_BYTES,
    FREE_EXPANSION_BYTES,
    MAX_EXPANSION,
    MAX_GUESSES,
    MAX_RECORD_BYTES,
)
from tracefit.sources.zstd_frames import ZSTD_MAGIC, frame_end, frame_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

GZIP_MAGIC = b"\x1f\x8b"
_GZIP_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL)
_GZIP_WBITS = 31  # zlib's way to say: a gzip header and trailer, nothing else
_PIECE_BYTES = 256 << 10
_TRIAL_BYTES = 64 << 10
_BYTEWISE_BYTES = 16 << 20
"""Bytes before damage in zstd data that are read one by one, to have all of them; then it is by pages."""


class DamagedStreamError(TracefitError):
    """The compressed stream stops making sense; every byte before that has been handed out."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the stream that could not be decompressed; what comes next is from another member or frame."""

    reason: str


def decompressed(raw: BinaryIO) -> Iterator[bytes | Gap]:
    """Yield the content of a file in chunks, decompressed if it begins like gzip or zstd.

    Behind damage, reading goes on at the next gzip member or zstd frame, if there is one.

    Args:
        raw: The file, at its beginning; it need not be seekable.

    Yields:
        Chunks of at most a few MiB, and gaps between them.

    Raises:
        DamagedStreamError: After the last byte that could be decompressed, if the compressed data is cut,
            corrupt, or expands beyond what `limits` allows.
    """
    head = _read_fully(raw, len(ZSTD_MAGIC))
    if head.startswith(GZIP_MAGIC):
        yield from _gunzip(_pieces(head, raw, _PIECE_BYTES))
    elif head == ZSTD_MAGIC:
        if raw.seekable():
            yield from _unzstd(raw)
        else:
            with _spooled(_pieces(head, raw, _PIECE_BYTES)) as file:
                yield from _unzstd(file)
    else:
        yield from _pieces(head, raw, CHUNK_BYTES)


def unzstd_record(compressed: bytes) -> bytes:
    """Decompress one zstd frame that holds one record.

    Args:
        compressed: The whole frame.

    Returns:
        The record.

    Raises:
        DamagedStreamError: If the frame is cut or corrupt, or the record larger than `MAX_RECORD_BYTES`.
    """
    record = bytearray()
    for chunk in _unzstd_one(compressed):
        record += chunk
        if len(record) > MAX_RECORD_BYTES:
            raise DamagedStreamError("record too large")
    return bytes(record)


def _read_fully(raw: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or all there are: a pipe may give fewer than asked at a time."""
    data = b""
    while len(data) < size and (piece := raw.read(size - len(data))):
        data += piece
    return data


def _pieces(head: bytes, raw: BinaryIO, size: int) -> Iterator[bytes]:
    if head:
        yield head
    while piece := raw.read(size):
        yield piece


def _spooled(pieces: Iterator[bytes]) -> BinaryIO:
    """Keep a stream that cannot be rewound on disk: a damaged one has to be read twice."""
    file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
    for piece in pieces:
        file.write(piece)
    return file


def _check_expansion(consumed: int, produced: int) -> None:
    if produced > FREE_EXPANSION_BYTES and produced > MAX_EXPANSION * consumed:
        raise DamagedStreamError(
            f"decompression bomb: more than {MAX_EXPANSION} bytes for each compressed byte"
        )


def _gunzip(pieces: Iterator[bytes]) -> Iterator[bytes | Gap]:
    consumed = produced = 0
    inflate, started, guesses = zlib.decompressobj(_GZIP_WBITS), False, MAX_GUESSES
    for piece in pieces:
        consumed += len(piece)
        data = piece
        while data := data if started else data.lstrip(b"\0"):  # tape blocks are padded with zeros
            started = True
            saved = inflate.copy()
            try:
                chunk = inflate.decompress(data, CHUNK_BYTES)
            except zlib.error as error:
                yield from _until_error(saved, data)
                data, passed, guesses = _next_member(data[1:], pieces, guesses)
                if not data:
                    raise DamagedStreamError("gzip data is corrupt") from error
                yield Gap("gzip data is corrupt; read on at its next member")
                consumed += passed
                inflate = zlib.decompressobj(_GZIP_WBITS)
                continue
            yield chunk
            produced += len(chunk)
            _check_expansion(consumed, produced)
            data = inflate.unconsumed_tail
            if inflate.eof:
                data = inflate.unused_data
                inflate, started = zlib.decompressobj(_GZIP_WBITS), False
    if started:
        yield inflate.flush()
        raise DamagedStreamError("gzip data is cut")


def _next_member(data: bytes, pieces: Iterator[bytes], guesses: int) -> tuple[bytes, int, int]:
    """Find the next member behind damage.

    Returns:
        The data from there on, empty if there is none; the bytes read on the way; the guesses that are left.
    """
    read = 0
    while True:
        for found in _GZIP_MEMBER.finditer(data):
            if not guesses:
                return b"", read, 0
            guesses -= 1
            if _is_member(data[found.start() : found.start() + _TRIAL_BYTES]):
                return data[found.start() :], read, guesses
        piece = next(pieces, b"")
        if not piece:
            return b"", read, guesses
        read += len(piece)
        data = data[-3:] + piece


def _is_member(data: bytes) -> bool:
    inflate = zlib.decompressobj(_GZIP_WBITS)
    try:
        return bool(inflate.decompress(data, _TRIAL_BYTES)) or inflate.eof
    except zlib.error:
        return False


def _until_error(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """Yield what `data` holds before its corrupt byte; zlib drops the output of the call that fails."""
    for index in range(len(data)):
        try:
            yield inflate.decompress(data[index : index + 1])
        except zlib.error:
            return


def _unzstd(raw: BinaryIO) -> Iterator[bytes | Gap]:
    """Decompress all frames as one stream; if one is damaged, look at them one by one."""
    stream, produced = _zstd_stream(raw), 0
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except OSError:
            yield from _FrameByFrame(raw).behind(produced)
            return
        if not chunk:
            return
        yield chunk
        produced += len(chunk)
        _check_expansion(raw.tell(), produced)


class _FrameByFrame:
    """Reads zstd frames each by itself, so that a damaged one costs itself."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._fault: OSError | None = None
        self._guesses_left = MAX_GUESSES
        self._bytewise_left = _BYTEWISE_BYTES

    def behind(self, handed_out: int) -> Iterator[bytes | Gap]:
        """Yield what follows the first bytes of the stream, and gaps where frames are damaged.

        Raises:
            DamagedStreamError: At the end, if the last frame is damaged.
        """
        start = produced = 0
        while self._raw.seek(start) == start and self._raw.read(1):
            stop = frame_end(self._raw, start)
            self._fault = None
            for chunk in self._frame(start, stop):
                if produced + len(chunk) > handed_out:
                    yield chunk[max(handed_out - produced, 0) :]
                produced += len(chunk)
                _check_expansion(self._raw.tell(), produced)
            if self._fault:
                reason = f"zstd data is {'cut' if 'Truncated' in str(self._fault) else 'corrupt'}"
                stop = self._next(start + 1)  # where it says that it ends may be in the next one already
                if stop < 0:
                    raise DamagedStreamError(reason) from self._fault
                yield Gap(f"{reason}; read on at its next frame")
            start = stop

    def _frame(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield what a frame holds, up to its damage."""
        section, produced = _section(self._raw, start, stop), 0
        stream = _zstd_stream(section)
        try:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
                produced += len(chunk)
        except OSError as error:
            self._fault = error
            yield from self._before_damage(section, produced)
        else:
            if stop < 0:  # a whole number of blocks, but not the last one
                self._fault = OSError("Truncated")

    def _before_damage(self, section: BinaryIO, produced: int) -> Iterator[bytes]:
        """Yield what follows the first `produced` bytes, up to the damage.

        Arrow drops what it had of a read that fails, so the end is read again, in small steps.
        """
        stream = _zstd_stream(section)
        while produced:
            produced -= len(stream.read(min(produced, CHUNK_BYTES)))
        rest = bytearray()
        try:
            while piece := stream.read(1 if self._bytewise_left > 0 else 4096):
                rest += piece
                self._bytewise_left -= 1
        except OSError:
            yield bytes(rest)

    def _next(self, start: int) -> int:
        """Return where the next frame begins that can be decompressed, at least its first byte; or -1."""
        for found in frame_starts(self._raw, start):
            if not self._guesses_left:
                return -1
            self._guesses_left -= 1
            try:
                _zstd_stream(_section(self._raw, found, -1)).read(1)
            except OSError:
                continue
            return found
        return -1


def _unzstd_one(compressed: bytes) -> Iterator[bytes]:
    stream, produced = _zstd_stream(io.BytesIO(compressed)), 0
    try:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
            produced += len(chunk)
            _check_expansion(len(compressed), produced)
    except OSError as error:
        cut = "Truncated" in str(error)
        raise DamagedStreamError(f"zstd data is {'cut' if cut else 'corrupt'}") from error


def _zstd_stream(raw: BinaryIO) -> pa.CompressedInputStream:
    raw.seek(0)
    return pa.CompressedInputStream(pa.PythonFile(_Unclosable(raw), mode="r"), "zstd")


def _section(raw: BinaryIO, start: int, stop: int) -> BinaryIO:
    return cast("BinaryIO", _Section(raw, start, stop))


class _Section(io.RawIOBase):
    """A part of a file, as a file; to its end if `stop` is negative."""

    def __init__(self, raw: BinaryIO, start: int, stop: int) -> None:
        super().__init__()
        self._raw = raw
        self._start = start
        self._stop = stop
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        del whence  # always from the beginning
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        if self._stop >= 0:
            left = max(self._stop - self._start - self._position, 0)
            size = left if size < 0 else min(size, left)
        self._raw.seek(self._start + self._position)
        data = self._raw.read(size)
        self._position += len(data)
        return data


class _Unclosable(io.RawIOBase):
    """A file that stays open when Arrow is done with it."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(size)
