"""A protobuf message too large to be held, as many small ones: each has some of its spans, and their resource and scope.

The wire format says how long everything is, so that a message is walked from field to field, and only into what is too
large. What is walked into is checked no further than that; the rest the decoder does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit.errors import TracefitError
from tracefit.sources import wire
from tracefit.sources.limits import CHUNK_BYTES, MAX_ORIGIN_BYTES, MAX_SPAN_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.records import Frame, Reject, Source
    from tracefit.sources.window import Window

HEADER_BYTES = 16
"""No tag with its length is longer."""

_TINY_HEADER, _TINY = 2, 2 + wire.SHORTEST_RESOURCE_SPANS
_RUN_BYTES, _MANY_BYTES = 256 << 10, 16 << 10
"""Bytes of tiny fields that are looked at together, and from which on they are taken together."""

_SPANS = 2
_ITEMS = (1, 2, 2)
"""Numbers of the fields that hold a message's items, from the request inwards: resources, scopes, spans."""
_ORIGIN = 1
"""Number of the resource, or the scope, that items belong to."""


class WireDamageError(TracefitError):
    """A message makes no sense from the next byte of its window on.

    Args:
        what: What is wrong with it.
        start: Where in the file the last item ended that was handed on.
    """

    def __init__(self, what: str, start: int) -> None:
        super().__init__(what)
        self.start = start


def message_pieces(window: Window, source: Source, size: int) -> Iterator[Frame | Reject]:
    """Yield the spans of a message in pieces.

    Args:
        window: The file, at the message.
        source: The file, for frames and rejects.
        size: How long the message is said to be.

    Yields:
        Frames of at most a few MiB, and rejects for spans that are larger than `MAX_SPAN_BYTES`. The window is left
        behind the message.

    Raises:
        WireDamageError: The message makes no sense where the window is left; every whole span before was handed out.
    """
    return _Walk(window, source).walk(_Message(0, window.offset + size))


@dataclass(slots=True)
class _Message:
    """A message that is walked into.

    Attributes:
        level: What its items are, as in `_ITEMS`.
        stop: Where in the file it ends.
        resource: The field of the resource around it.
        origin: The field of its own resource or scope.
        items: Fields of items that were not handed on yet.
        offset: Where the first of these was.
        is_begun: Whether any were handed on.
    """

    level: int
    stop: int
    resource: bytes = b""
    origin: bytes = b""
    items: bytearray = field(default_factory=bytearray)
    offset: int = 0
    is_begun: bool = False


class _Walk:
    """Goes over one message."""

    def __init__(self, window: Window, source: Source) -> None:
        self._window = window
        self._source = source
        self._whole = window.offset

    def walk(self, message: _Message) -> Iterator[Frame | Reject]:
        """Yield what is in a message."""
        try:
            while self._window.offset < message.stop:
                yield from self._field(message)
        except WireDamageError:
            yield from self._hand_on(message)
            raise
        yield from self._hand_on(message)

    def _field(self, message: _Message) -> Iterator[Frame | Reject]:
        """Read one field of a message."""
        window = self._window
        window.fill(HEADER_BYTES)
        found = wire.read_field(window.peek(0, HEADER_BYTES), 0)
        if found is None or window.offset + found[3] > message.stop:
            raise self._damage("not a protobuf field")
        number, _, start, size = found
        if start == _TINY_HEADER and size < _TINY and (run := self._tiny_run(message)):
            size = run
        if number == _ITEMS[message.level]:
            yield from self._item(message, start, size)
        elif number == _ORIGIN and len(message.origin) + size <= MAX_ORIGIN_BYTES:
            if message.is_begun:
                yield self._source.reject(window.offset, size, "resource behind its spans", b"", "protobuf")
            message.origin += self._take(size)
        elif number == _ORIGIN:
            yield self._skip(size, "resource too large")
        else:
            self._skip(size, "")

    def _tiny_run(self, message: _Message) -> int:
        """Return the length of the fields here that are alike and too short to hold a span, if they are very many."""
        most = min(_RUN_BYTES, message.stop - self._window.offset)
        self._window.fill(most)
        text = self._window.peek(0, most)
        run = wire.size_of_tiny_fields(text, text[0])
        return run if run >= _MANY_BYTES else 0

    def _item(self, message: _Message, start: int, size: int) -> Iterator[Frame | Reject]:
        """Take an item that fits into a piece; walk into one that does not, unless it is a span."""
        if len(message.items) + size > PIECE_BYTES:
            yield from self._hand_on(message)
        if size <= PIECE_BYTES or (message.level == _SPANS and size <= MAX_SPAN_BYTES):
            if message.level == _SPANS or self._window.fill(size):
                message.offset = message.offset if message.items else self._window.offset
                message.items += self._take(size)
                self._whole = self._window.offset
                return
        elif message.level == _SPANS:
            yield self._skip(size, "span too large")
            return
        yield from self._hand_on(message)
        message.is_begun = True
        stop = self._window.offset + size
        self._window.skip(start)
        yield from self.walk(_Message(message.level + 1, stop, resource=message.origin))

    def _hand_on(self, message: _Message) -> Iterator[Frame]:
        if message.items:
            payload = message.origin + message.items
            if message.level == _SPANS:
                payload = message.resource + _delimited(_ITEMS[1], payload)
            if message.level:
                payload = _delimited(_ITEMS[0], payload)
            yield self._source.frame(message.offset, bytes(payload), "protobuf")
            message.items.clear()
            message.is_begun = True

    def _take(self, size: int) -> bytes:
        if not self._window.fill(size):
            raise self._damage("record cut")
        return self._window.take(size)

    def _damage(self, what: str) -> WireDamageError:
        is_end = not self._window.fill(HEADER_BYTES)
        return WireDamageError(self._window.damage or ("record cut" if is_end else what), self._whole)

    def _skip(self, size: int, reason: str) -> Reject:
        """Move on by so many bytes, and return the reject of these."""
        offset = self._window.offset
        while left := offset + size - self._window.offset:
            self._take(min(left, CHUNK_BYTES))
        return self._source.reject(offset, size, reason, b"", "protobuf")


def _delimited(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    header = bytearray([number << 3 | 2])
    size = len(content)
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(header) + bytes([size]) + content
