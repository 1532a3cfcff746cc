"""Where zstd frames begin and end, by RFC 8878, without decompressing them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.sources.limits import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_FRAME = re.compile(re.escape(ZSTD_MAGIC) + rb"[^\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f]")
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_SINGLE_SEGMENT, _RESERVED, _CHECKSUM = 0x20, 0x08, 0x04
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE, _RESERVED_BLOCK = 1, 3


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


def frame_starts(raw: BinaryIO, start: int) -> Iterator[int]:
    """Yield, from `start` on, where a frame could begin by its first five bytes."""
    data = b""
    while True:
        raw.seek(start + len(data))
        piece = raw.read(CHUNK_BYTES)
        data += piece
        for found in _FRAME.finditer(data):
            yield start + found.start()
        if not piece:
            return
        start += max(len(data) - len(ZSTD_MAGIC), 0)
        data = data[-len(ZSTD_MAGIC) :]


def _within(raw: BinaryIO, position: int) -> int:
    """Return the position if the file goes as far."""
    if position == 0:
        return 0
    raw.seek(position - 1)
    return position if raw.read(1) else -1
