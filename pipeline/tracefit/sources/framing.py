"""Length-prefixed records: framed protobuf, bare protobuf, and the zstd framing of older exporters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.sources import wire
from tracefit.sources.compression import DamagedStreamError, unzstd_record
from tracefit.sources.limits import HEAD_BYTES, MAX_GUESSES, MAX_RECORD_BYTES
from tracefit.sources.zstd_frames import ZSTD_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.sources.records import Frame, Reject, Source
    from tracefit.sources.window import Window

LENGTH_BYTES = 4
_SHOWN_BYTES = 1024
_LONGEST_FIELD_HEADER = 16
_FRAME_HEADER = re.compile(rb"(?=[\x00-\x10][\x00-\xff]{3}\x0a)")


def framed_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the messages of a file of 4-byte big-endian lengths, each followed by its message.

    A length or message that makes no sense is skipped up to the next whole frame.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame per message, one reject per damaged stretch.
    """
    finder = FrameFinder(window)
    while window.fill(1):
        size = _declared(window)
        if not is_frame_at(window, 0):
            yield _skip_damage(window, source, _fault(window, size), finder.next)
        elif (hidden := _frame_inside(window, finder, LENGTH_BYTES + size)) > 0:
            start, begins = window.offset, window.peek(0, _SHOWN_BYTES)
            window.skip(hidden)
            yield source.reject(start, hidden, "record cut: another begins inside", begins, "protobuf")
        else:
            window.skip(LENGTH_BYTES)
            yield source.frame(window.offset, window.take(size), "protobuf")


def is_frame_at(window: Window, position: int) -> bool:
    """Return whether a length and a message of that length begin at a position of the buffer."""
    begin = position + LENGTH_BYTES
    if not window.fill(begin):
        return False
    size = int.from_bytes(window.peek(position, begin), "big")
    if not (0 < size <= MAX_RECORD_BYTES and window.fill(begin + 1)):
        return False
    # The first byte is looked at before as much is read as anybody claims.
    there = window.buffered()[begin] == wire.RESOURCE_SPANS_TAG and window.fill(begin + size)
    return there and wire.is_message(window.buffered(), begin, begin + size)


def _frame_inside(window: Window, finder: FrameFinder, stop: int) -> int:
    """Return where a frame begins inside the one that ends at `stop`, or -1.

    A record that lost bytes reaches into the next one. So where none begins behind a record, it is looked for inside.
    """
    if not window.fill(stop + 1) or is_frame_at(window, stop):
        return -1
    return finder.next(1, stop)


def bare_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the parts of one bare message.

    Each `resource_spans` field is a message of its own on the wire, so that a cut message loses its last part only.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame per field, and a reject for what does not fit.
    """
    while window.fill(1):
        window.fill(_LONGEST_FIELD_HEADER)
        field = wire.read_field(window.peek(0, _LONGEST_FIELD_HEADER), 0)
        size = field[3] if field else MAX_RECORD_BYTES + 1
        if size <= MAX_RECORD_BYTES and window.fill(size):
            yield source.frame(window.offset, window.take(size), "protobuf")
            continue
        reason = _fault(window, size) if field else "not a protobuf field"
        start, begins = window.offset, window.peek(0, _SHOWN_BYTES)
        length = window.drain()
        yield source.reject(start, length, window.damage or reason, begins, "protobuf")


def framed_zstd_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the records of a file of 4-byte big-endian lengths, each followed by one zstd frame.

    Args:
        window: The file; its frames are the compressed part.
        source: The file, for frames and rejects.

    Yields:
        One frame per record, JSON or protobuf as it is; one reject per damaged stretch.
    """
    while window.fill(1):
        size = _declared(window)
        stop = LENGTH_BYTES + size
        if not (size <= MAX_RECORD_BYTES and window.fill(stop)):
            yield _skip_damage(
                window, source, _fault(window, size), lambda start, _: next_zstd_frame(window, start)
            )
            continue
        try:
            payload = unzstd_record(window.peek(LENGTH_BYTES, stop))
        except DamagedStreamError as error:
            yield _skip_damage(window, source, error.what, lambda start, _: next_zstd_frame(window, start))
            continue
        protobuf = wire.is_message(payload, 0, len(payload))
        yield source.frame(window.offset + LENGTH_BYTES, payload, "protobuf" if protobuf else "json")
        window.skip(stop)


def next_zstd_frame(window: Window, start: int) -> int:
    """Return where, from `start` of the buffer, a length followed by a zstd frame begins, or -1."""
    found = window.buffered().find(ZSTD_MAGIC, start + LENGTH_BYTES)
    return found - LENGTH_BYTES if found >= 0 else -1


class FrameFinder:
    """Looks for the next framed message where the last length cannot be trusted.

    Only a frame that is there as a whole, and looks right inside, counts. The number of close looks is bounded, for
    a hostile file can hold many likely beginnings.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._guesses_left = MAX_GUESSES

    def next(self, start: int, stop: int) -> int:
        """Return where, from `start` and before `stop` of the buffer, a frame begins, or -1."""
        text = self._window.peek(start, stop + LENGTH_BYTES)
        return next(
            (start + m.start() for m in _FRAME_HEADER.finditer(text) if self._is_frame(start + m.start())), -1
        )

    def _is_frame(self, position: int) -> bool:
        begin = position + LENGTH_BYTES
        size = int.from_bytes(self._window.peek(position, begin), "big")
        field = wire.read_field(self._window.peek(begin, begin + _LONGEST_FIELD_HEADER), 0)
        if not (field and 0 < size <= MAX_RECORD_BYTES and field[3] <= size and self._guesses_left):
            return False
        self._guesses_left -= 1
        whole = self._window.fill(begin + size)
        return whole and wire.is_traces_message(self._window.buffered(), begin, begin + size)


def _declared(window: Window) -> int:
    """Return the length that comes next; more than any record may have if it is cut."""
    if not window.fill(LENGTH_BYTES):
        return MAX_RECORD_BYTES + 1
    return int.from_bytes(window.peek(0, LENGTH_BYTES), "big")


def _fault(window: Window, size: int) -> str:
    if len(window) < LENGTH_BYTES:
        return "record cut in its length"
    if size > MAX_RECORD_BYTES:
        return f"record too large: {size} bytes"
    if window.fill(LENGTH_BYTES + size):
        return "not a traces message"
    return f"record cut: {size} bytes announced, {len(window) - LENGTH_BYTES} there"


def _skip_damage(window: Window, source: Source, reason: str, find: Callable[[int, int], int]) -> Reject:
    """Move to the next frame that `find` sees, or to the end, and report what was passed over."""
    start, begins, first = window.offset, window.peek(0, _SHOWN_BYTES), 1
    while (found := find(first, HEAD_BYTES)) < 0 and window.fill(HEAD_BYTES + 1):
        # What could be a header across the edge stays in sight.
        window.skip(HEAD_BYTES - LENGTH_BYTES)
        first = 0
    if found >= 0:
        window.skip(found)
    else:
        window.drain()
        reason = window.damage or reason
    return source.reject(start, window.offset - start, reason, begins, "protobuf")
