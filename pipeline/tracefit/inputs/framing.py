"""Find the records in the bytes of a file: lines, a document, framed messages, a bare message. No I/O, no decoding.

- `lines`: a record per line. `document`: the whole text is one record.
- `framed`: repeatedly a 4-byte big-endian length and a `TracesData`.
- `bare`: one `TracesData` without a length; each of its `resource_spans` fields is a record, and by itself a
  `TracesData` on the wire, so that damage costs one of them.
- `messages`: msgpack values one after another, of a recording that says how one begins.

Lengths can be wrong and bytes can be missing. Bytes that are not part of a record are damage, up to the next record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgpack  # type: ignore[import-untyped]  # it has no types

from tracefit.inputs import otlp_wire as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

Shape = Literal["lines", "document", "framed", "bare", "messages", "empty", "unknown"]

BOM = b"\xef\xbb\xbf"
RECORD_START = re.compile(rb'\{\s*"(?:trace"\s*:\s*\{\s*")?(?:resourceSpans|resource_spans|batches)"\s*:')
"""How a record begins in JSON."""

LENGTH_BYTES = 4
MAX_FRAME_GUESSES, _MAX_LOOKS = 10_000, 500_000
"""Candidates for a record after damage: how many are parsed in one block, and how many are considered at all."""

_VISIBLE = re.compile(rb"\S")

# The tag of `resource_spans` before a varint length. A match is only the tag, because the next byte can be the true
# tag. In a frame, the 4-byte length before it begins with a small byte: no message is longer than 272 MiB.
# The pattern begins with the tag: the regex engine skips to a byte, but steps through a look behind.
_FRAMED_START = re.compile(rb"\x0a(?<=[\x00-\x10].{3}\x0a)(?=[\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)
_BARE_START = re.compile(rb"\x0a(?=[\x80-\xff]{0,4}[\x00-\x7f](?:[\x0a\x12\x1a]|\xc2\x3e))")
# Fields and frames too short to hold a span: a file can hold millions of them. Each alternative of the patterns fixes
# the length byte and as many bytes after it, so that the regex engine skips a whole field at once.
_TINY_FIELD = rb"\x0a(?:%b)" % b"|".join(
    re.escape(bytes([size])) + b".{%d}" % size for size in range(wire.SHORTEST_RESOURCE_SPANS)
)
_TINY_FRAME = rb"\0\0\0(?:%b)" % b"|".join(
    re.escape(bytes([2 + size, wire.RESOURCE_SPANS_TAG, size])) + b".{%d}" % size
    for size in range(wire.SHORTEST_RESOURCE_SPANS)
)
_TINY = {"framed": re.compile(_TINY_FRAME, re.DOTALL), "bare": re.compile(_TINY_FIELD, re.DOTALL)}
_ONE_TINY_FRAME = re.compile(rb"\0\0\0.(%b)" % _TINY_FIELD, re.DOTALL)
_RESOURCE_SPANS_TAGS = b"\x0a\x12\x1a"
"""First byte of the content of `resource_spans`: the tag of its resource, its scope_spans or its schema URL."""

_MESSAGES_TRIED, _MOST_BETWEEN, _MOST_DAMAGE_BYTES = 64, 4, 2 << 20
"""Limits at the end of a buffer: message beginnings tried, false ones between two true ones, and bytes of damage after
which the next beginning is accepted without proof."""

_MANY_BYTES, _MOST_FRAME_BYTES = 16 << 10, 1 << 20
"""A run of records too short to hold a span is joined to one record, if it has at least and at most so many bytes."""


class Record(NamedTuple):
    """A record and its offset in the block. If `fault` is set, the bytes are not a record."""

    offset: int
    payload: bytes
    fault: str = ""


class _Extent(NamedTuple):
    """The range of a record in a buffer, length prefix included; of damage, if `reason` is set."""

    start: int
    stop: int
    reason: str = ""


def whole_records(buffer: bytes, shape: Shape, *, is_last: bool, starts: re.Pattern[bytes] | None = None) -> int:
    """Return how many bytes at the beginning of a buffer are whole records, or damage between them.

    Args:
        buffer: Bytes of a file, from the beginning of a record.
        shape: How the file lays out its records.
        is_last: Whether the file ends with the buffer; then all of it counts.
        starts: Pattern of the beginning of each of `messages`.
    """
    if is_last:
        return len(buffer)
    if starts is not None:
        return _last_message(buffer, starts)
    if shape == "lines":
        return buffer.rfind(b"\n") + 1
    if shape not in ("framed", "bare"):
        return 0
    stop = 0
    for extent in _extents(buffer, shape, is_last=False):
        stop = extent.stop
    return stop


def records(block: bytes, shape: Shape) -> Iterator[Record]:
    """Yield the records of a block in order, and the damage between them.

    Args:
        block: Whole records, as `whole_records` measures them.
        shape: How the file lays out its records.

    Yields:
        Records without their framing: lines without line end and byte order mark, and no blank lines; messages without
        their length. Very many messages too short to hold a span are one record.
    """
    if shape == "lines":
        yield from _lines(block)
    elif shape == "document":
        yield Record(0, block)
    elif shape in ("framed", "bare"):
        header = LENGTH_BYTES if shape == "framed" else 0
        for extent in _extents(block, shape, is_last=True):
            if extent.reason:
                yield Record(extent.start, block[extent.start : extent.stop], extent.reason)
                continue
            payload = block[extent.start + header : extent.stop]
            if header and len(payload) > int.from_bytes(block[extent.start : extent.start + header], "big"):
                # Concatenated protobuf messages parse as one message, so a run of tiny frames becomes one record.
                payload = b"".join(_ONE_TINY_FRAME.findall(block, extent.start, extent.stop))
            yield Record(extent.start + header, payload)
    elif block:
        yield Record(0, block, "not OTLP traces")


def next_record(
    buffer: bytes,
    shape: Shape,
    start: int,
    stop: int | None = None,
    *,
    is_last: bool = True,
    max_guesses: int = MAX_FRAME_GUESSES,
    starts: re.Pattern[bytes] | None = None,
) -> int:
    """Return where the first record between `start` and `stop` begins, or -1.

    A message counts if its inner fields are plausible and it is whole; if `is_last` is false, it may end
    after the buffer. At most `max_guesses` candidates are tried.
    """
    if shape == "lines":
        return buffer.find(b"\n", start, stop) + 1 or -1
    if starts is not None:
        match = starts.search(buffer, start)
        return match.start() if match else -1
    finder = _RecordFinder(buffer, shape, is_last=is_last, max_guesses=max_guesses)
    return finder.next(start, len(buffer) if stop is None else stop)


def _last_message(buffer: bytes, starts: re.Pattern[bytes]) -> int:
    """Return where the last message of a buffer begins.

    It must begin where another one ends: bytes of a number can look like a beginning.
    """
    begins = [match.start() for match in starts.finditer(buffer)][-_MESSAGES_TRIED:]
    for position in range(len(begins) - 1, 0, -1):
        for before in reversed(begins[max(position - _MOST_BETWEEN, 0) : position]):
            size = message_bytes(buffer[before : begins[position]])
            if size and begins[position] - before - size in {0, LENGTH_BYTES}:
                return begins[position]
    # All of the searched bytes are damaged: any beginning is as good as another.
    return begins[-1] if begins and len(buffer) > _MOST_DAMAGE_BYTES else 0


def message_bytes(content: bytes) -> int:
    """Return the length of the msgpack value at the start of some bytes; 0 if it is cut or not msgpack."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(content))
    unpacker.feed(content)
    try:
        unpacker.skip()
    except (msgpack.UnpackException, ValueError):
        return 0
    return int(unpacker.tell())


def _lines(block: bytes) -> Iterator[Record]:
    stop = 0
    while (match := _VISIBLE.search(block, stop)) is not None:
        start, end = match.start(), block.find(b"\n", match.end())
        stop = len(block) if end < 0 else end
        line = block[start:stop]
        if line == b"{}":  # holds nothing, and there can be millions of them
            continue
        if line.startswith(BOM):
            start, line = start + len(BOM), line[len(BOM) :]
        if line.endswith(b"\r"):
            line = line[:-1]
        if line:
            yield Record(start, line)


def _extents(buffer: bytes, shape: Shape, *, is_last: bool) -> Iterator[_Extent]:
    """Yield the extents of framed or bare records and of damage, as far as their ends are known from the buffer."""
    end_of = _frame_end if shape == "framed" else _field_end
    finder = _RecordFinder(buffer, shape, is_last=is_last)
    position = tried = 0  # `tried`: up to where a run of tiny records was looked for
    while position < len(buffer):
        plain_end = _plain_end(buffer, position, shape)
        if 0 < plain_end < len(buffer) and _plain_end(buffer, plain_end, shape):
            # The usual case: this record is beyond doubt, and so is the next.
            yield _Extent(position, plain_end)
            position = plain_end
            continue
        if position >= tried and buffer[position : position + 1] in b"\0\x0a":
            tried = max(end_of_run(_TINY[shape], buffer, position, position + _MOST_FRAME_BYTES), position + 1)
            if tried - position >= _MANY_BYTES:
                yield _Extent(position, tried)
                position = tried
                continue
        end = end_of(buffer, position)
        # Without enough of the bytes after it, what follows cannot be checked.
        if not is_last and (end is None or len(buffer) - wire.LONGEST_HEADER < end > 0):
            return
        if end:
            # A record that lost bytes reaches into the next one. So if no record begins after it, one is
            # searched inside.
            is_followed = end == len(buffer) or _begins(buffer, shape, end, is_last=is_last)
            next_start = -1 if is_followed else finder.next(position + 1, end)
            if next_start >= 0 and is_followed is None:
                return  # the bytes to come decide whether this is one record or the rest of one and others
            if next_start < 0:
                yield _Extent(position, end)
                position = end
                continue
            reason = "record cut: another begins inside"
        else:
            next_start = finder.next(position + 1, len(buffer))
            reason = _fault(buffer, shape, position)
        if next_start < 0:
            # The last bytes may be the beginning of a header: they stay for the next buffer.
            next_start = len(buffer) if is_last else max(len(buffer) - wire.LONGEST_HEADER, position + 1)
        yield _Extent(position, next_start, reason)
        position = next_start


def end_of_run(pattern: re.Pattern[bytes], buffer: bytes, start: int, stop: int) -> int:
    """Return the end of the last of the consecutive matches from `start` on; `start` without a match.

    The matches are made one by one: a pattern that repeats a group a hundred thousand times can exhaust the
    regex engine.
    """
    match = pattern.scanner(buffer, start, stop).match  # type: ignore[attr-defined]  # not in its type stubs
    while (hit := match()) is not None:
        start = hit.end()
    return start


def _plain_end(buffer: bytes, position: int, shape: Shape) -> int:
    """Return the end of a record that is valid beyond doubt, else 0.

    Its only field, or its first one before another, ends exactly where the lengths say, which random bytes do
    at one position in a million.
    """
    begin = position + LENGTH_BYTES if shape == "framed" else position
    if begin + wire.LONGEST_HEADER > len(buffer) or buffer[begin] != wire.RESOURCE_SPANS_TAG:
        return 0
    size, inside = wire.read_varint(buffer, begin + 1)
    end = inside + size
    if size < wire.SHORTEST_RESOURCE_SPANS or buffer[inside] not in _RESOURCE_SPANS_TAGS:
        return 0
    if shape != "framed":
        return end
    stop = begin + int.from_bytes(buffer[position:begin], "big")
    is_followed = end < stop and end < len(buffer) and buffer[end] == wire.RESOURCE_SPANS_TAG
    return stop if end == stop or is_followed else 0


def _frame_end(buffer: bytes, position: int) -> int | None:
    """Return the end of the framed record at a position; 0 if no record is there, None if more bytes are needed."""
    begin = position + LENGTH_BYTES
    if begin >= len(buffer):
        return None
    stop = begin + int.from_bytes(buffer[position:begin], "big")
    fits = wire.is_traces(buffer, begin, stop)
    if fits is False:
        return 0
    return stop if fits and stop <= len(buffer) else None


def _field_end(buffer: bytes, position: int) -> int | None:
    """Return the same for the `resource_spans` field at a position."""
    if buffer[position] != wire.RESOURCE_SPANS_TAG:
        return 0
    field = wire.read_field(buffer, position)
    if field is None:
        return None if position + wire.LONGEST_HEADER > len(buffer) else 0
    if wire.fields(buffer, field[2], field[3])[1] is False:
        return 0
    return field[3] if field[3] <= len(buffer) else None


def _begins(buffer: bytes, shape: Shape, position: int, *, is_last: bool) -> bool | None:
    """Return whether the bytes at a position look like a record, two levels deep; None if more bytes are needed."""
    end = _frame_end(buffer, position) if shape == "framed" else _field_end(buffer, position)
    if end == 0 or (end is None and is_last):
        return False
    field = wire.read_field(buffer, position + (LENGTH_BYTES if shape == "framed" else 0))
    # One level is not enough: after a record that lost bytes, an id also looks like a tag, a length and bytes.
    return wire.is_resource_spans(buffer, field[2], field[3]) if field else None


def _fault(buffer: bytes, shape: Shape, position: int) -> str:
    """Return why there is no record at a position."""
    if shape == "bare":
        return "not a resource_spans field" if _field_end(buffer, position) == 0 else "record cut"
    size = int.from_bytes(buffer[position : position + LENGTH_BYTES], "big")
    there = len(buffer) - position - LENGTH_BYTES
    if there < 0:
        return "record cut in its length"
    if there < size:
        return f"record cut: {size} bytes announced, {there} there"
    return "not a traces message" if size else "record of no bytes"


class _RecordFinder:
    """Searches the next record after a length that cannot be trusted.

    A candidate counts only if its inner fields are plausible, and the number of candidates is bounded: a
    hostile file can hold millions of them.
    """

    def __init__(self, buffer: bytes, shape: Shape, *, is_last: bool, max_guesses: int = MAX_FRAME_GUESSES) -> None:
        self._buffer = buffer
        self._is_framed = shape == "framed"
        self._is_last = is_last
        self._guesses_left = max_guesses
        self._looks_left = _MAX_LOOKS

    def next(self, start: int, stop: int) -> int:
        """Return where the first record between `start` and `stop` begins, or -1."""
        header = LENGTH_BYTES if self._is_framed else 0
        pattern = _FRAMED_START if self._is_framed else _BARE_START
        for match in pattern.finditer(self._buffer, start + header):
            position = match.start() - header
            self._looks_left -= 1
            if position >= stop or self._looks_left < 0 or not self._guesses_left:
                return -1
            inner, begin = wire.read_varint(self._buffer, match.start() + 1)
            end = begin + inner
            size = int.from_bytes(self._buffer[position : match.start()], "big")
            stop_of_frame = match.start() + size if self._is_framed else end
            is_cut = stop_of_frame > len(self._buffer)
            if end <= stop_of_frame and not (is_cut and self._is_last):
                self._guesses_left -= 1
                if self._is_likely(match.start(), stop_of_frame, begin, end, is_cut=is_cut):
                    return position
        return -1

    def _is_likely(self, start: int, stop: int, begin: int, end: int, *, is_cut: bool) -> bool:
        """Return whether a message may hold traces; `begin` and `end` bound the content of its first field."""
        if wire.is_resource_spans(self._buffer, begin, end) is False:
            return False
        if self._is_framed:
            return wire.is_traces(self._buffer, start, stop) is not False
        # Attributes nest like `resource_spans`. A bare field has no length before it to confirm it, only a span inside.
        return is_cut or wire.has_span(self._buffer, begin, end)
