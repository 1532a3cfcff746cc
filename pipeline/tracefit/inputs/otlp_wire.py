"""The protobuf wire format of OTLP, as far as needed to find messages among other bytes.

Tags and smallest sizes of OTLP messages are defined here and nowhere else in this room. A `TracesData` is a sequence of
`resource_spans` fields; each holds `scope_spans`, and each of these holds spans. Logs and metrics nest alike.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

Signal = Literal["traces", "logs", "metrics"]
Field = tuple[int, int, int, int]
"""Field number, wire type, begin and end of the content; the end is a claim and may lie beyond the buffer."""

RESOURCE_SPANS_TAG = 0x0A
SHORTEST_RESOURCE_SPANS = 32
"""Bytes of the shortest content with a span in it: two ids of 18 and 10 bytes in a span in a `scope_spans`."""
LONGEST_HEADER = 16

# Resource, scope_spans, schema_url, and instrumentation_library_spans of old.
_RESOURCE_SPANS_FIELDS = (1, 2, 3, 1000)
_SCOPE_SPANS_LIMITS = (2, 1000)
_TRACE_ID_HEADER = b"\x0a\x10"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_METRIC_NAME = re.compile(rb"[A-Za-z][A-Za-z0-9_./-]{0,254}")
_MAX_FIELDS = 64
"""Fields of a message that are examined: more would not make it more plausible."""


_UNUSED = frozenset({"trace_state", "links", "dropped_links_count", "schema_url"})


def trace_messages(names: Sequence[str], *, as_bytes: Collection[str] = ()) -> list[Any]:
    """Return the classes of OTLP's trace messages of some names, with fewer fields than OTLP declares.

    Messages of other files (attributes, resource, scope) are bytes in them, and so are the fields `as_bytes`:
    on the wire a message and its bytes are the same. Without a Python object for each attribute, which are
    most of a trace, a trace is parsed in a fifth of the time. Fields that no table uses are left out and so
    become unknown fields.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415 - JSON is read without
    from opentelemetry.proto.trace.v1 import trace_pb2  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto()
    trace_pb2.DESCRIPTOR.CopyToProto(file)
    del file.dependency[:]
    span = next(message for message in file.message_type if message.name == "Span")
    for message in (*file.message_type, *span.nested_type):
        kept = [field for field in message.field if field.name not in _UNUSED]
        del message.field[:]
        message.field.extend(kept)
        for field in message.field:
            is_foreign = field.type_name and not field.type_name.startswith(f".{file.package}.")
            if is_foreign or field.name in as_bytes:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
                field.ClearField("type_name")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptors = [pool.FindMessageTypeByName(f"{file.package}.{name}") for name in names]
    return [message_factory.GetMessageClass(descriptor) for descriptor in descriptors]


def read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    """Return the base-128 number at a position and the position after it; the number is -1 if the bytes are not one."""
    if position < len(buffer) and buffer[position] < 0x80:  # almost all are one byte long
        return buffer[position], position + 1
    value = 0
    for shift, byte in enumerate(buffer[position : position + 10]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    return -1, position


def read_field(buffer: bytes, position: int) -> Field | None:
    """Return the field at a position, or None if the bytes are not a field."""
    tag, start = read_varint(buffer, position)
    wire_type = tag & 7
    if tag < 8:  # no field has the number 0
        return None
    if wire_type == _BYTES:
        size, start = read_varint(buffer, start)
        return (tag >> 3, wire_type, start, start + size) if size >= 0 else None
    if wire_type == _VARINT:
        value, stop = read_varint(buffer, start)
        return (tag >> 3, wire_type, start, stop) if value >= 0 else None
    fixed = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
    return (tag >> 3, wire_type, start, start + fixed) if fixed else None


def fields(buffer: bytes, start: int, stop: int) -> tuple[list[Field], bool | None]:
    """Return the fields of a message that begins at `start`, and whether they fill it up to `stop`, where it ends.

    A message with more fields than are examined counts as filled if these fit. The second value is None where
    the buffer ends before it is known.
    """
    complete: list[Field] = []
    position = start
    while position < stop and len(complete) < _MAX_FIELDS:
        if position + LONGEST_HEADER > len(buffer) < stop:
            return complete, None
        field = read_field(buffer, position)
        if field is None or field[3] > stop:
            return complete, False
        complete.append(field)
        position = field[3]
    return complete, True


def submessages(buffer: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of every field of a whole message; the number is 0 if the content is not a message.

    Raises:
        ValueError: There is no field where one should be.
    """
    while start < stop:
        field = read_field(buffer, start)
        if field is None or field[3] > stop:
            raise ValueError("no protobuf message")
        number, wire_type, begin, start = field
        yield (number if wire_type == _BYTES else 0), begin, start


def is_traces(buffer: bytes, start: int, stop: int) -> bool | None:
    """Return whether a message is all fields, `resource_spans` first; None if more bytes are needed."""
    if start < min(stop, len(buffer)) and buffer[start] == RESOURCE_SPANS_TAG:
        return fields(buffer, start, stop)[1]
    return None if len(buffer) <= start < stop else False


def is_resource_spans(buffer: bytes, start: int, stop: int) -> bool | None:
    """Return whether the content of a field is that of `resource_spans`; None if more bytes are needed."""
    # A prefix is enough to reject a message, but only the complete message can confirm it.
    inside, fills = fields(buffer, start, stop)
    return fills if all(f[0] in _RESOURCE_SPANS_FIELDS and f[1] == _BYTES for f in inside) else False


def has_span(buffer: bytes, start: int, stop: int) -> bool:
    """Return whether the content of a `resource_spans` field has a span with a trace id in it."""
    scopes = [f for f in fields(buffer, start, stop)[0] if f[0] in _SCOPE_SPANS_LIMITS and f[1] == _BYTES]
    return any(
        f[:2] == (2, _BYTES) and buffer[f[2] : f[2] + 2] == _TRACE_ID_HEADER
        for scope in scopes
        for f in fields(buffer, scope[2], min(scope[3], stop))[0]
    )


def signal_of(payload: bytes) -> Signal:
    """Return which signal an export request holds, from its first item; `traces` also if the item does not show it.

    The three requests nest alike (resource, scope, item). A log record's times are the fixed64 fields 1 and 11, a
    span's are 7 and 8, and a metric has none; its first field is a name, where a span's is an id of random bytes.
    """
    start, stop = 0, len(payload)
    for number in (1, 2, 2):
        inside, _ = fields(payload, start, stop)
        child = next((f for f in inside if f[:2] == (number, _BYTES)), None)
        if child is None or child[3] > len(payload):
            return "traces"
        _, _, start, stop = child
    item, _ = fields(payload, start, stop)
    times = {f[0] for f in item if f[1] == _FIXED64}
    if times & {1, 11} and not times & {7, 8}:
        return "logs"
    # The pattern rejects random bytes, which are not a name.
    name = next((f for f in item if f[:2] == (1, _BYTES)), None)
    is_metric = name and not times and _METRIC_NAME.fullmatch(payload, name[2], name[3])
    return "metrics" if is_metric else "traces"
