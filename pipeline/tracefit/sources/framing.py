"""Records told by their length: framed protobuf and bare protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.sources import wire
from tracefit.sources.limits import HEAD_BYTES, MAX_GUESSES, MAX_HELD_BYTES, MAX_RECORD_BYTES
from tracefit.sources.proto_pieces import HEADER_BYTES, WireDamageError, message_pieces
from tracefit.sources.records import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tracefit.sources.records import Frame, Reject, Source
    from tracefit.sources.window import Window

LENGTH_BYTES = 4
_SHOWN_BYTES = 1024
_TINY = 2 + wire.SHORTEST_RESOURCE_SPANS
_RUN_BYTES, _MANY_BYTES = 256 << 10, 16 << 10
"""Bytes of tiny frames or fields that are looked at together, and from which on they are taken together."""
_FIRST_BYTES = 1024
_MOST_SIGNIFICANT = 0x10
_VARINT_BYTES = 5


def framed_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the messages of a file of 4-byte big-endian lengths, each followed by its message.

    A length or message that makes no sense is skipped up to the next whole frame.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame per message, one reject per damaged stretch.
    """
    return joined(_framed(window, source))


def _framed(window: Window, source: Source) -> Iterator[Frame | Reject]:
    finder = FrameFinder(window)
    while window.fill(1):
        size = declared(window)
        if size < _TINY and (run := _tiny_run(window)):
            text = window.peek(0, run)
            yield source.frame(window.offset, wire.messages_of_tiny_frames(text), "protobuf")
            window.skip(run)
        elif not is_frame_at(window, 0):
            yield skip_damage(window, source, fault(window, size), finder.next)
        elif size > MAX_HELD_BYTES:
            window.skip(LENGTH_BYTES)
            try:
                yield from message_pieces(window, source, size)
            except WireDamageError as damage:
                lost = window.offset - damage.start
                yield source.reject(damage.start, lost, damage.what, b"", "protobuf")
        elif (hidden := _frame_inside(window, finder, LENGTH_BYTES + size)) > 0:
            start, begins = window.offset, window.peek(0, _SHOWN_BYTES)
            window.skip(hidden)
            yield source.reject(start, hidden, "record cut: another begins inside", begins, "protobuf")
        else:
            window.skip(LENGTH_BYTES)
            yield source.frame(window.offset, window.take(size), "protobuf")


def _tiny_run(window: Window) -> int:
    """Return the length of very many frames that are too short to hold a span, or 0."""
    window.fill(_RUN_BYTES)
    run = wire.size_of_tiny_frames(window.peek(0, _RUN_BYTES))
    return run if run >= _MANY_BYTES else 0


def is_frame_at(window: Window, position: int) -> bool:
    """Return whether a length and a message of that length begin at a position of the buffer."""
    begin = position + LENGTH_BYTES
    if not window.fill(begin):
        return False
    size = int.from_bytes(window.peek(position, begin), "big")
    if size == 0 or not window.fill(begin + 1):
        return False
    if size > MAX_HELD_BYTES:
        return _begins_large(window, begin, size)
    # The first byte is looked at before as much is read as anybody claims.
    there = window.buffered()[begin] == wire.RESOURCE_SPANS_TAG and window.fill(begin + size)
    return there and wire.is_message(window.buffered(), begin, begin + size)


def _begins_large(window: Window, begin: int, size: int) -> bool:
    """Return whether a message of so many bytes, which are more than are held, looks right as far as they are."""
    there = window.fill(begin + MAX_HELD_BYTES)
    return there and wire.begins_traces_message(window.buffered(), begin, size)


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
        window.fill(HEADER_BYTES)
        field = wire.read_field(window.peek(0, HEADER_BYTES), 0)
        size = field[3] if field else 0
        if 0 < size < _TINY and window.peek(0, 1) == bytes([wire.RESOURCE_SPANS_TAG]):
            window.fill(_RUN_BYTES)
            run = wire.size_of_tiny_fields(window.peek(0, _RUN_BYTES), wire.RESOURCE_SPANS_TAG)
            size = run if run >= _MANY_BYTES else size
        if 0 < size <= MAX_HELD_BYTES and window.fill(size):
            yield source.frame(window.offset, window.take(size), "protobuf")
            continue
        start, reason = window.offset, "not a protobuf field"
        try:
            if size:
                yield from message_pieces(window, source, size)
                continue
        except WireDamageError as damage:
            start, reason = damage.start, damage.what
        begins = window.peek(0, _SHOWN_BYTES)
        window.drain()
        yield source.reject(start, window.offset - start, window.damage or reason, begins, "protobuf")


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
        size = _FIRST_BYTES
        while start < stop:
            end = min(start + size, stop)
            # Little at first: mostly the next frame is near.
            text = self._window.peek(start, end + LENGTH_BYTES + _VARINT_BYTES + 1)
            likely: list[int] = likely_frames(text, end - start).tolist()
            for at in likely:
                if self._is_frame(start + at):
                    return start + at
            start, size = end, 2 * size
        return -1

    def _is_frame(self, position: int) -> bool:
        begin = position + LENGTH_BYTES
        size = int.from_bytes(self._window.peek(position, begin), "big")
        if size > MAX_HELD_BYTES and not self._window.fill(begin + MAX_HELD_BYTES):
            return False
        field = wire.read_field(self._window.peek(begin, begin + HEADER_BYTES), 0)
        if not (field and size and field[3] <= size and self._guesses_left):
            return False
        self._guesses_left -= 1
        if size > MAX_HELD_BYTES:
            return _begins_large(self._window, begin, size)
        whole = self._window.fill(begin + size)
        return whole and wire.is_traces_message(self._window.buffered(), begin, begin + size)


def likely_frames(text: bytes, stop: int) -> NDArray[np.int64]:
    """Return where, before `stop`, a length is followed by a `resource_spans` field that is no longer than it; ascending.

    Where the text ends before that is known, too.
    """
    octets = np.frombuffer(text + bytes(LENGTH_BYTES + _VARINT_BYTES + 1), np.uint8)
    count = min(stop, max(len(text) - LENGTH_BYTES, 0))
    begins = octets[LENGTH_BYTES : LENGTH_BYTES + count] == wire.RESOURCE_SPANS_TAG
    at = np.flatnonzero(begins & (octets[:count] <= _MOST_SIGNIFICANT))
    size = np.zeros(len(at), np.int64)
    for place in range(LENGTH_BYTES):
        size = size << 8 | octets[at + place]
    inner, goes_on = np.zeros(len(at), np.int64), np.ones(len(at), np.bool_)
    for place in range(_VARINT_BYTES):
        byte = octets[at + (LENGTH_BYTES + 1 + place)].astype(np.int64)
        inner += np.where(goes_on, (byte & 0x7F) << (7 * place) | np.int64(1) << 40, 0)
        goes_on &= byte > 0x7F
    header = 1 + (inner >> 40)
    return at[
        (header + (inner & (1 << 40) - 1) <= size) | (at + LENGTH_BYTES + 1 + _VARINT_BYTES > len(text))
    ]


def declared(window: Window) -> int:
    """Return the length that comes next; more than any record may have if it is cut."""
    if not window.fill(LENGTH_BYTES):
        return MAX_RECORD_BYTES + 1
    return int.from_bytes(window.peek(0, LENGTH_BYTES), "big")


def fault(window: Window, size: int) -> str:
    """Return what is wrong with a record of so many bytes, as its length says."""
    if len(window) < LENGTH_BYTES:
        return "record cut in its length"
    if size > MAX_RECORD_BYTES:
        return f"record too large: {size} bytes"
    if window.fill(LENGTH_BYTES + size):
        return "not a traces message"
    return f"record cut: {size} bytes announced, {len(window) - LENGTH_BYTES} there"


def skip_damage(window: Window, source: Source, reason: str, find: Callable[[int, int], int]) -> Reject:
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
