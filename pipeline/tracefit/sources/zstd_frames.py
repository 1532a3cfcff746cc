"""Zstd files: frames one behind another, by RFC 8878."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa

from tracefit.sources.limits import CHUNK_BYTES
from tracefit.sources.units import Damage, bounded, matches

if TYPE_CHECKING:
    from collections.abc import Iterator

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

SMALL_BYTES = 64 << 10
"""Bytes of a frame, and in it, up to which it is decompressed at once."""

_FRAME = re.compile(re.escape(ZSTD_MAGIC) + rb"[^\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f]")
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_SINGLE_SEGMENT, _RESERVED, _CHECKSUM = 0x20, 0x08, 0x04
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE, _RESERVED_BLOCK = 1, 3
_BYTEWISE_READS = 1 << 20
_PAGE_BYTES = 4096
_CODEC = pa.Codec("zstd")


class ZstdFrames:
    """How zstd is read."""

    magic = ZSTD_MAGIC
    unit = "zstd frame"

    def read(self, raw: BinaryIO, start: int) -> Iterator[bytes]:
        """Yield what is in the frames from `start` on; see `compression` for the rest of this class."""
        stream, produced = _stream(raw, start), 0
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
            except OSError:
                break
            if not chunk:
                return
            yield chunk
            produced += len(chunk)
        yield from _to_the_damage(raw, start, produced)

    def starts(self, raw: BinaryIO, start: int) -> Iterator[int]:
        """Yield where something begins like a frame."""
        return matches(raw, start, _FRAME, 5)

    def is_unit(self, raw: BinaryIO, start: int) -> bool:
        """Return whether something can be decompressed at `start`."""
        try:
            return bool(_stream(raw, start).read(1))
        except OSError:
            return False


def unzstd(compressed: bytes) -> Iterator[bytes]:
    """Yield what is in frames that are in memory.

    Raises:
        Damage: If one is cut or corrupt, or expands out of all proportion.
    """
    raw = io.BytesIO(compressed)
    yield from bounded(raw, 0, ZstdFrames().read(raw, 0))


def unzstd_small(compressed: bytes) -> bytes | None:
    """Return what is in one frame that says how little it holds; None if it does not, or is not good.

    It takes far less than to set up a stream.
    """
    size = _content_size(compressed)
    if size is None or size > SMALL_BYTES:
        return None
    try:
        return bytes(_CODEC.decompress(compressed, size, asbytes=True))
    except OSError:
        return None


def _content_size(frame: bytes) -> int | None:
    """Return how many bytes the first frame says it holds, None if it does not say."""
    if not frame.startswith(ZSTD_MAGIC) or len(frame) <= len(ZSTD_MAGIC):
        return None
    descriptor = frame[4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    width = max(_CONTENT_SIZE_BYTES[descriptor >> 6], int(single))
    begin = 5 + int(not single) + _DICTIONARY_BYTES[descriptor & 3]
    size = int.from_bytes(frame[begin : begin + width], "little")
    return size + 256 * (width == 2) if width else None


def _to_the_damage(raw: BinaryIO, start: int, handed_out: int) -> Iterator[bytes]:
    """Look at frames one by one, to find the damaged one; yield what was not handed out yet of what is before it.

    Arrow drops what it had of a read that fails, so the last frame is read again, in small steps.
    """
    while True:
        stop = frame_end(raw, start)
        small = _small_frame(raw, start, stop)
        if small is not None:
            if len(small) > handed_out:
                yield small[handed_out:]
            start, handed_out = stop, max(handed_out - len(small), 0)
            continue
        produced = 0
        try:
            for chunk in _chunks(raw, start, stop):
                if produced + len(chunk) > handed_out:
                    yield chunk[max(handed_out - produced, 0) :]
                produced += len(chunk)
        except OSError as error:
            yield from _before_damage(raw, start, stop, max(handed_out, produced))
            raise Damage(
                f"zstd data is {'cut' if 'Truncated' in str(error) else 'corrupt'}", start
            ) from error
        if stop <= start:
            raise Damage("zstd data is cut", start)
        start = stop
        handed_out = max(handed_out - produced, 0)


def _small_frame(raw: BinaryIO, start: int, stop: int) -> bytes | None:
    if not start < stop <= start + SMALL_BYTES:
        return None
    raw.seek(start)
    return unzstd_small(raw.read(stop - start))


def _before_damage(raw: BinaryIO, start: int, stop: int, handed_out: int) -> Iterator[bytes]:
    stream = _stream(raw, start, stop)
    while handed_out > 0:
        handed_out -= len(stream.read(min(handed_out, CHUNK_BYTES)))
    rest = bytearray()
    reads = 0
    try:
        while piece := stream.read(1 if reads < _BYTEWISE_READS else _PAGE_BYTES):
            rest += piece
            reads += 1
    except OSError:
        yield bytes(rest)


def _chunks(raw: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    stream = _stream(raw, start, stop)
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _stream(raw: BinaryIO, start: int, stop: int = -1) -> pa.CompressedInputStream:
    return pa.CompressedInputStream(pa.PythonFile(_Section(raw, start, stop), mode="r"), "zstd")


class _Section(io.RawIOBase):
    """A part of a file, as a file that stays open when Arrow is done with it; to its end if `stop` is negative."""

    def __init__(self, raw: BinaryIO, start: int, stop: int) -> None:
        super().__init__()
        self._raw = raw
        self._position = start
        self._stop = stop

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._stop >= 0:
            left = max(self._stop - self._position, 0)
            size = left if size < 0 else min(size, left)
        self._raw.seek(self._position)  # others may read the file meanwhile
        data = self._raw.read(size)
        self._position += len(data)
        return data


def frame_end(raw: BinaryIO, start: int) -> int:
    """Return where the frame that begins at `start` ends, or -1 if there is no whole frame."""
    raw.seek(start)
    header = raw.read(8)
    if _SKIPPABLE.match(header):
        return _within(raw, start + 8 + int.from_bytes(header[4:], "little"))
    if not header.startswith(ZSTD_MAGIC) or len(header) < 5 or header[4] & _RESERVED:
        return -1
    descriptor = header[4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    content_size = max(_CONTENT_SIZE_BYTES[descriptor >> 6], int(single))
    position = start + 5 + int(not single) + _DICTIONARY_BYTES[descriptor & 3] + content_size
    is_last = False
    while not is_last:
        raw.seek(position)
        block = raw.read(3)
        number = int.from_bytes(block, "little")
        kind = number >> 1 & 3
        if len(block) < 3 or kind == _RESERVED_BLOCK:
            return -1
        position += 3 + (1 if kind == _RLE else number >> 3)
        is_last = bool(number & 1)
    return _within(raw, position + (4 if descriptor & _CHECKSUM else 0))


def _within(raw: BinaryIO, position: int) -> int:
    """Return the position if the file goes as far."""
    if position == 0:
        return 0
    raw.seek(position - 1)
    return position if raw.read(1) else -1
