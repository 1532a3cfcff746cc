"""Just enough of the protobuf wire format to tell messages from other bytes and traces from other signals."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Literal

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable

Signal = Literal["traces", "logs", "metrics"]

RESOURCE_SPANS_TAG = 0x0A
_RESOURCE_SPANS_FIELDS = (1, 2, 3, 1000)  # resource, scope_spans, schema_url, and what the second once was
_METRIC_NAME = re.compile(rb"[A-Za-z][A-Za-z0-9_./-]{0,254}")
_MAX_FIELDS_GUESSED = 1000
_WALKED_FIELDS = 64
_SHORTEST_SPAN = 2 + 16 + 2 + 8
SHORTEST_RESOURCE_SPANS = 4 + _SHORTEST_SPAN
"""Bytes of the shortest content of a `resource_spans` field that has a span: with one field in another around it."""
_LONGEST_HEADER = 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Buffer = bytes | bytearray
Field = tuple[int, int, int, int]
"""Field number, wire type, where its content begins, where it ends."""


def read_varint(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read a base-128 number.

    Args:
        buffer: Bytes that hold it.
        position: Where it begins.

    Returns:
        The number and the position behind it; the number is -1 where there is none.
    """
    value = 0
    for count, byte in enumerate(buffer[position : position + 10]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return -1, position


def read_field(buffer: Buffer, position: int) -> Field | None:
    """Read one field's tag and extent, or return None where there is none.

    The extent is what the field says, which may be more than the buffer holds.
    """
    tag, start = read_varint(buffer, position)
    if tag < 8:
        return None
    wire_type = tag & 7
    if wire_type == _VARINT:
        value, stop = read_varint(buffer, start)
        return None if value < 0 else (tag >> 3, wire_type, start, stop)
    if wire_type == _BYTES:
        size, start = read_varint(buffer, start)
        return None if size < 0 else (tag >> 3, wire_type, start, start + size)
    size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, -1)
    return None if size < 0 else (tag >> 3, wire_type, start, start + size)


def fields(buffer: Buffer, position: int, stop: int, *, limit: int | None = None) -> list[Field] | None:
    """Return the fields of a message, or None if they do not fill it exactly or are more than `limit`."""
    found: list[Field] = []
    while position < stop:
        if len(found) == limit:
            return None
        field = read_field(buffer, position)
        if field is None or field[3] > stop:
            return None
        found.append(field)
        position = field[3]
    return found


def is_message(buffer: Buffer, start: int, stop: int) -> bool:
    """Return whether the bytes are one message whose first field is `resource_spans`; an empty one is not."""
    if start >= stop or buffer[start] != RESOURCE_SPANS_TAG:
        return False
    position = start
    for _ in range(_WALKED_FIELDS):
        field = read_field(buffer, position)
        if field is None or field[3] > stop:
            return False
        position = field[3]
        if position == stop:
            return True
    return _is_any_message(bytes(memoryview(buffer)[position:stop]))


def _is_any_message(text: bytes) -> bool:
    """Return whether bytes are fields and nothing else: what has very many of them takes too long to walk."""
    try:
        Empty.FromString(text)
    except DecodeError:
        return False
    return True


def size_of_tiny_fields(text: bytes, tag: int) -> int:
    """Return the length of a run of fields of a tag of one byte, each too short to hold a span.

    They are nothing but the tag, a length and so many bytes: what is in them is not looked at.
    """
    found = _tiny_fields(tag).match(text)
    return found.end() if found else 0


def size_of_tiny_frames(text: bytes) -> int:
    """Return the length of a run of framed messages that have one `resource_spans` field, too short to hold a span."""
    found = _TINY_FRAMES.match(text)
    return found.end() if found else 0


def messages_of_tiny_frames(text: bytes) -> bytes:
    """Return what is in a run of such frames, as one message."""
    return b"".join(frame[4:] for frame in _TINY_FRAME.findall(text))


@cache
def _tiny_fields(tag: int) -> re.Pattern[bytes]:
    return _run_of(re.escape(bytes([tag])) + _one_of(_sized(size) for size in range(SHORTEST_RESOURCE_SPANS)))


def _sized(size: int) -> bytes:
    return re.escape(bytes([size])) + b"." * size


def _one_of(texts: Iterable[bytes]) -> bytes:
    return b"(?:%b)" % b"|".join(texts)


def _run_of(text: bytes) -> re.Pattern[bytes]:
    return re.compile(b"(?>%b)++" % text, re.DOTALL)  # nothing is kept for a second try


_FRAME_OF_ONE = rb"\0\0\0" + _one_of(
    re.escape(bytes([2 + size, RESOURCE_SPANS_TAG])) + _sized(size) for size in range(SHORTEST_RESOURCE_SPANS)
)
_TINY_FRAMES = _run_of(_FRAME_OF_ONE)
_TINY_FRAME = re.compile(_FRAME_OF_ONE, re.DOTALL)


def is_traces_message(buffer: Buffer, start: int, stop: int) -> bool:
    """Return whether the bytes are one message of `resource_spans` alone, looked at two levels deep.

    Stricter than `is_message`, for guesses; messages of very many resources and scopes are not guessed.
    """
    position, left = start, _MAX_FIELDS_GUESSED
    while left > 0:
        field = read_field(buffer, position)
        if field is None or field[:2] != (1, _BYTES) or field[3] > stop:
            return False
        inner = fields(buffer, field[2], field[3], limit=left)
        left -= 1 + len(inner or ())
        if inner is None or any(f[0] not in _RESOURCE_SPANS_FIELDS or f[1] != _BYTES for f in inner):
            return False
        position = field[3]
        if position == stop:
            return True
    return False


def begins_traces_message(buffer: Buffer, start: int, size: int) -> bool:
    """Return whether a message of `size` bytes, of which the buffer has the beginning, can be of `resource_spans` alone.

    Looked at two levels deep, as far as the buffer goes or up to a number of fields that no accident reaches.
    """
    position, stop = start, start + size
    for _ in range(_MAX_FIELDS_GUESSED):
        field = read_field(buffer, position)
        if field is None or field[:2] != (1, _BYTES) or field[3] > stop:
            return False
        if field[3] > len(buffer):
            return _begins_resource_spans(buffer, field)
        position = field[3]
        if position == stop or position + _LONGEST_HEADER > len(buffer):
            return True
    return True


def _begins_resource_spans(buffer: Buffer, field: Field) -> bool:
    position = field[2]
    for _ in range(_MAX_FIELDS_GUESSED):
        inner = read_field(buffer, position)
        if (
            inner is None
            or inner[0] not in _RESOURCE_SPANS_FIELDS
            or inner[1] != _BYTES
            or inner[3] > field[3]
        ):
            return False
        position = inner[3]
        if position == field[3] or position + _LONGEST_HEADER > len(buffer):
            return True
    return True


def signal_of(payload: bytes) -> Signal:
    """Tell which signal an export request holds, by its first item.

    The three requests nest alike (resource, scope, item). A log record's times are the fixed64 fields 1 and 11, a
    span's are 7 and 8, and a metric has none; its first field is a name, where a span's is an id of random bytes.

    Args:
        payload: The message.

    Returns:
        The signal; `traces` also where the message does not say.
    """
    item = _first_item(payload) or []
    times = {f[0] for f in item if f[1] == _FIXED64}
    if times & {1, 11} and not times & {7, 8}:
        return "logs"
    name = next((f for f in item if f[:2] == (1, _BYTES)), None)
    if name and not times and _METRIC_NAME.fullmatch(payload, name[2], name[3]):
        return "metrics"
    return "traces"


def _first_item(payload: bytes) -> list[Field] | None:
    start, stop = 0, len(payload)
    for number in (1, 2, 2):
        inside = fields(payload, start, stop)
        child = next((f for f in inside or () if f[0] == number and f[1] == _BYTES), None)
        if child is None:
            return None
        _, _, start, stop = child
    return fields(payload, start, stop)
