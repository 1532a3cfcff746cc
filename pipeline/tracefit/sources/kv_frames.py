"""Files of KV-cache events to one frame per batch: JSON lines, or msgpack batches one after the other."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.sources.compression import decompressed
from tracefit.sources.json_records import lines, skip_large
from tracefit.sources.limits import CHUNK_BYTES, HEAD_BYTES, MAX_GUESSES, MAX_RECORD_BYTES
from tracefit.sources.msgpack import message_size
from tracefit.sources.records import Frame, Reject, Source
from tracefit.sources.shape import BOM
from tracefit.sources.short_lines import ShortLines
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.sources.files import TraceFile

KV_NAME = re.compile(r"kv_events.*\.(jsonl|json|msgpack|bin)(\.(gz|zst))?")

_LENGTH_BYTES = 4
_BATCH_START = re.compile(rb"[\x92-\x9f]\xcb\x41[\xd0-\xdf]")
"""An array whose first element is a float64 between 2**30 and 2**31: a batch with its unix time, from 2004 to 2038."""
_START_BYTES = 4

SHORTEST_EVENT = 15
"""Bytes of the shortest event, `CacheEviction` alone in msgpack."""

_SHORT_LINES = ShortLines(
    len(b'[1,[["CacheEviction"]]]'),
    re.compile(
        rb"\s*(?:\[\s*(?:0|[1-9]\d{0,8}|[1-8]\d{9})(?:\.\d+)?\s*,\s*\[\s*\]\s*(?:,\s*(?:null|0|[1-9]\d{0,8})\s*){0,2}\]\s*)?"
    ),
    "KV-cache events",
)
_FEW_BYTES, _NEAR_BYTES, _MAX_LOOKED_BYTES = 4 << 10, 64 << 10, 1 << 30
"""Bytes that are looked at for nothing: so few are not counted; when they were so many, it is not looked far ahead."""

_BYTES_OF_FAILURE = 16
"""Bytes for each of which one more failure is borne."""

MAX_LISTED = 1000
"""Damaged stretches of a file that are listed."""


def read_kv_frames(
    file: TraceFile, *, on_read: Callable[[int], object] | None = None
) -> Iterator[Frame | Reject]:
    """Read the batches of one file of KV-cache events, in their order, in bounded memory.

    Compression and encoding are told from the content. What cannot be read is reported as a reject, which never shows
    values: these files hold token ids. What follows it is read on.

    Args:
        file: The file.
        on_read: Told of the bytes of the file, as stored, that were read.

    Yields:
        A `Frame` per batch, its payload not yet decoded; a `Reject` per stretch of the file that holds none.

    Raises:
        UsageError: If the file cannot be opened, or not be read to its end.
    """
    source = Source(file.name)
    with file.open(on_read=on_read) as raw:
        window = Window(decompressed(raw))
        window.fill(HEAD_BYTES)
        head = window.peek(0, HEAD_BYTES).removeprefix(BOM).lstrip()
        binary = _is_start(window, 0) or _is_start(window, _LENGTH_BYTES) or head[:1] not in b"[{"
        yield from (
            _Messages(window, source).read()
            if binary and head
            else lines(window, source, too_large=skip_large, short=_SHORT_LINES)
        )
        if window.damage:
            yield Reject(source.name, window.offset, 0, window.damage)


def _is_start(window: Window, position: int) -> bool:
    window.fill(position + _START_BYTES)
    return bool(_BATCH_START.match(window.peek(position, position + _START_BYTES)))


class _Messages:
    """Reads msgpack messages, each perhaps behind its length as a 4-byte number.

    How often it is looked far ahead in vain is bounded, for a hostile file can hold many likely beginnings.
    """

    def __init__(self, window: Window, source: Source) -> None:
        self._window = window
        self._source = source
        self._far_left = MAX_GUESSES
        self._failed = 0
        self._looked = 0
        self._begin = self._end = 0

    def read(self) -> Iterator[Frame | Reject]:
        """Yield a frame per message, and a reject for what is passed over; of very many there is one for the rest."""
        for item in self._read():
            if isinstance(item, Frame):
                yield item
                continue
            self._failed += 1
            if self._failed <= MAX_LISTED:
                yield item
            elif self._failed == MAX_LISTED + 1:
                self._begin = item.source_offset
            self._end = item.source_offset + item.length
        if self._failed > MAX_LISTED:
            more = self._failed - MAX_LISTED
            reason = f"{more} more stretches that are no batches"
            rest = self._source.reject(self._begin, self._end - self._begin, reason, b"", "msgpack")
            yield replace(rest, count=more)

    def _read(self) -> Iterator[Frame | Reject]:
        window = self._window
        while window.fill(1) and self._may_go_on():
            lead = 0 if _is_start(window, 0) or not _is_start(window, _LENGTH_BYTES) else _LENGTH_BYTES
            window.skip(lead)
            if not _is_start(window, 0):
                yield self._skip("not a batch of KV-cache events", lead)
                continue
            size = self._size()
            if size > 0 and self._is_followed(size):
                yield self._source.frame(window.offset, window.take(size), "msgpack")
            else:
                reason = "record cut" if size <= 0 else "record cut: another begins inside"
                yield self._skip(reason, lead)
        if window.fill(1):
            start = window.offset
            reason = "too many damaged records"
            yield self._source.reject(start, window.drain(), reason, b"", "msgpack")

    def _may_go_on(self) -> bool:
        """Return whether there were not too many failures for what was read."""
        return self._far_left > 0 and self._failed < MAX_GUESSES + self._window.offset // _BYTES_OF_FAILURE

    def _size(self) -> int:
        """Return the length of the message at the beginning of the window; 0 if it does not end, or is none."""
        window = self._window
        limit = MAX_RECORD_BYTES if self._looked < _MAX_LOOKED_BYTES else _NEAR_BYTES
        wanted = min(CHUNK_BYTES, limit)
        while True:
            more = window.fill(wanted)
            size = message_size(window.buffered(), min(len(window), limit))
            if size >= 0 or not more or wanted > limit:
                break
            wanted *= 2
        if size < 0:
            self._looked_in_vain(min(len(window), limit))
        return max(size, 0)

    def _looked_in_vain(self, size: int) -> None:
        if size > _FEW_BYTES:
            self._looked += size
            self._far_left -= 1

    def _is_followed(self, size: int) -> bool:
        """Tell whether the file ends behind a message or another begins; one that lost bytes reaches into the next."""
        window = self._window
        if not window.fill(size + 1) or _is_start(window, size) or _is_start(window, size + _LENGTH_BYTES):
            return True
        if _BATCH_START.search(window.buffered(), 1, size) is None:
            return True
        self._looked_in_vain(size)
        return False

    def _skip(self, reason: str, lead: int) -> Reject:
        """Move to the next batch, or to the end, and report what was passed over and `lead` bytes before."""
        window = self._window
        start, first = window.offset - lead, 1
        while True:
            window.fill(HEAD_BYTES)
            found = _BATCH_START.search(window.buffered(), first, HEAD_BYTES)
            at = found.start() if found else -1
            del found  # it holds the buffer
            if at >= 0 or not window.fill(HEAD_BYTES + 1):
                break
            window.skip(HEAD_BYTES - _START_BYTES)
            first = 0
        size = at if at >= 0 else len(window)
        framed = size >= _LENGTH_BYTES and at >= 0 and self._announced(size)
        window.skip(size - _LENGTH_BYTES if framed else size)
        return self._source.reject(start, window.offset - start, reason, b"", "msgpack")

    def _announced(self, position: int) -> bool:
        """Tell whether the four bytes before a batch are its length."""
        window = self._window
        size = int.from_bytes(window.peek(position - _LENGTH_BYTES, position), "big")
        if not 0 < size <= MAX_RECORD_BYTES or not window.fill(position + size):
            return False
        if size > _NEAR_BYTES and self._looked >= _MAX_LOOKED_BYTES:
            return False
        found = message_size(window.peek(position, position + size), size)
        if found != size:
            self._looked_in_vain(size)
        return found == size
