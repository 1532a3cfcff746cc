"""Decode OTLP protobuf, down to the event with protobuf's own parser.

The schema is trimmed to the fields that become columns. It declares events and attributes as bytes, which the wire format
writes like messages; `layouts` reads the attributes of events column by column. A record with an unusual encoding is
read span by span, to find its bad spans.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tracefit.otlp.model import (
    ID_BYTES,
    AttributeValue,
    CheckedRecord,
    Events,
    FieldError,
    MakeReject,
    Origin,
    Pairs,
    Plain,
    Span,
    SpanGroup,
    UnreadScope,
    check_depth,
    finite,
    nested_text,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.inputs.rejects import Reject

_PACKAGE = "tracefit.otlp.trimmed"
_Proto = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Proto.TYPE_BYTES,
    "string": _Proto.TYPE_STRING,
    "int32": _Proto.TYPE_INT32,
    "uint32": _Proto.TYPE_UINT32,
    "sfixed64": _Proto.TYPE_SFIXED64,  # declared signed: a time beyond int64 shows as negative
}
_MESSAGES = {
    "TracesData": "repeated ResourceSpans resource_spans 1",
    "ResourceSpans": "optional Resource resource 1, repeated ScopeSpans scope_spans 2",
    "Resource": "repeated bytes attributes 1",
    "ScopeSpans": "optional Scope scope 1, repeated Span spans 2",
    "Scope": "optional string name 1",
    "Span": (
        "optional bytes trace_id 1, optional bytes span_id 2, optional bytes parent_span_id 4, "
        "optional string name 5, optional int32 kind 6, "
        "optional sfixed64 start_time_unix_nano 7, optional sfixed64 end_time_unix_nano 8, "
        "repeated bytes attributes 9, optional uint32 dropped_attributes_count 10, "
        "repeated bytes events 11, optional uint32 dropped_events_count 12, optional Status status 15"
    ),
    "Event": (
        "optional sfixed64 time_unix_nano 1, optional string name 2, repeated bytes attributes 3, "
        "optional uint32 dropped_attributes_count 4"
    ),
    "Status": "optional string message 2, optional int32 code 3",
    "UnreadTraces": "repeated UnreadResourceSpans resource_spans 1",
    "UnreadResourceSpans": "repeated bytes resource 1, repeated UnreadScopeSpans scope_spans 2",
    "UnreadScopeSpans": "repeated bytes scope 1, repeated bytes spans 2",
}
"""The last three are for records whose spans stay bytes."""


def _field(text: str) -> descriptor_pb2.FieldDescriptorProto:
    label, kind, name, number = text.split()
    field = _Proto(name=name, number=int(number))
    field.label = _Proto.LABEL_REPEATED if label == "repeated" else _Proto.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return field


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tracefit/trimmed.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        file.message_type.add(name=name, field=[_field(text) for text in fields.split(", ")])
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = ((name, pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES)
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found}


_CLASSES = _message_classes()
_TracesData, Event = _CLASSES["TracesData"], _CLASSES["Event"]
_UnreadTraces = _CLASSES["UnreadTraces"]

PIECE_BYTES = 1 << 20
"""Bytes of spans of a piece of a long record: those of thirty bytes each take twenty times as much when decoded."""

_MANY_EVENTS, _SHORTEST_EVENT = 100_000, 12
"""An event with its time takes eleven bytes. Decoded, empty events take many times their length in memory."""

_SCALAR_KINDS = ("string_value", "int_value", "double_value", "bool_value")


def unread_scopes(payload: bytes) -> list[UnreadScope] | None:
    """Return the scopes of a record, their spans still encoded; None if its upper levels are not as exporters write them."""
    try:
        resources = _UnreadTraces.FromString(payload).resource_spans
    except DecodeError:
        return None
    # A message that comes in several parts is these parts end to end.
    return [
        (b"".join(each.resource), b"".join(group.scope), group.spans)
        for each in resources
        for group in each.scope_spans
    ]


def record_of(resource: bytes, scope: bytes, spans: Sequence[bytes]) -> bytes:
    """Return a record of unread spans of one scope."""
    scope_spans = {"scope": [scope], "spans": spans}
    record = _UnreadTraces(resource_spans=[{"resource": [resource], "scope_spans": [scope_spans]}])
    return record.SerializeToString()  # type: ignore[no-any-return]  # a class made at run time


def read_record(payload: bytes) -> list[SpanGroup] | None:
    """Decode a record as exporters write it; attributes and events are not checked yet.

    Returns:
        Its spans; None if the careful reader must decide whether the record is good or bad.
    """
    groups = []
    try:
        for resource_spans in _TracesData.FromString(payload).resource_spans:
            resource = [_pair(attribute) for attribute in resource_spans.resource.attributes]
            for scope_spans in resource_spans.scope_spans:
                spans = [_span(message) for message in scope_spans.spans]
                groups.append(SpanGroup(Origin.of(resource, scope_spans.scope.name), spans))
    except (FieldError, DecodeError):
        return None
    return groups


def check_record(payload: bytes, reject: MakeReject, max_rejects: int, first_span: int = 0) -> CheckedRecord:
    """Read a record span by span.

    Args:
        payload: The record.
        reject: Makes a reject.
        max_rejects: Rejects after which reading the record stops.
        first_span: The number of its first span, by which rejects name spans.

    Returns:
        The good spans, and a reject for each bad one; a single reject if the message cannot be parsed.
    """
    groups: list[SpanGroup] = []
    rejects: list[Reject] = []
    spans_read = first_span
    try:
        data = _TracesData.FromString(payload)
    except DecodeError:
        return CheckedRecord([], [reject("protobuf message cannot be parsed")], is_unreadable=True)
    for resource_spans in data.resource_spans:
        try:
            resource = [_pair(attribute) for attribute in resource_spans.resource.attributes]
        except FieldError as error:
            rejects.append(reject(f"resourceSpans: {error.what}"))
            spans_read += sum(len(scope_spans.spans) for scope_spans in resource_spans.scope_spans)
            continue
        for scope_spans in resource_spans.scope_spans:
            spans: list[Span] = []
            groups.append(SpanGroup(Origin.of(resource, scope_spans.scope.name), spans))
            for message in scope_spans.spans:
                if len(rejects) >= max_rejects:
                    return CheckedRecord(groups, rejects)
                try:
                    spans.append(_checked_span(message))
                except FieldError as error:
                    rejects.append(reject(f"span {spans_read}: {error.what}"))
                spans_read += 1
    return CheckedRecord(groups, rejects)


def _span(message: Any) -> Span:
    if len(message.events) > _MANY_EVENTS and message.ByteSize() < len(message.events) * _SHORTEST_EVENT:
        raise FieldError(f"{len(message.events)} events, most of them empty")
    start, end = message.start_time_unix_nano, message.end_time_unix_nano
    if start < 0 or end < 0:
        raise FieldError(f"{'startTimeUnixNano' if start < 0 else 'endTimeUnixNano'} is beyond int64")
    parent = message.parent_span_id
    return Span(
        _id(message.trace_id, "traceId"),
        _id(message.span_id, "spanId"),
        _id(parent, "parentSpanId") if any(parent) else "",
        message.name,
        message.kind,
        start,
        end,
        # End to end, in the wire format of the attributes of an event.
        Event(attributes=message.attributes).SerializeToString(),
        list(message.events),
        message.dropped_attributes_count,
        message.dropped_events_count,
        message.status.code,
        message.status.message,
    )


def _checked_span(message: Any) -> Span:
    span = _span(message)
    read_pairs(bytes(span.attributes))
    for event in span.events:
        _read_event(event)
    return span


def _id(value: bytes, name: str) -> str:
    if len(value) != ID_BYTES[name]:
        raise FieldError(f"{name} is not {ID_BYTES[name]} bytes")
    if not any(value):
        raise FieldError(f"{name} is all zero")
    return value.hex()


def _read_event(event: bytes) -> tuple[int, str, Pairs, int]:
    """Return the time, name, attributes and number of dropped attributes of an event; FieldError if it is not valid."""
    try:
        message = Event.FromString(event)
    except DecodeError as error:
        raise FieldError("event is not a protobuf message") from error
    if message.time_unix_nano < 0:
        raise FieldError("timeUnixNano is beyond int64")
    pairs = [_pair(attribute) for attribute in message.attributes]
    return message.time_unix_nano, message.name, pairs, message.dropped_attributes_count


def read_pairs(attributes: bytes) -> Pairs:
    """Return keys and values of attributes in the wire format of an event's attributes.

    Raises:
        FieldError: An attribute is no message, or nested too deep.
    """
    return _read_event(attributes)[2]


def _pair(attribute: bytes) -> tuple[str, AttributeValue]:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue  # noqa: PLC0415

    try:
        message = KeyValue.FromString(attribute)
    except DecodeError as error:
        raise FieldError("attribute is not a protobuf message") from error
    return message.key, _scalar(message.value)


def _scalar(value: Any) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind in _SCALAR_KINDS:
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    nested = _container(value, kind, 1)
    return nested if isinstance(nested, str) or nested is None else nested_text(nested)


def _plain(value: Any, depth: int) -> Plain:
    """Return a value inside another as plain JSON."""
    check_depth(depth)
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return finite(value.double_value)
    if kind in _SCALAR_KINDS:
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    return _container(value, kind, depth)


def _container(value: Any, kind: str | None, depth: int) -> Plain:
    if kind == "array_value":
        return [_plain(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return b64encode(value.bytes_value).decode() if kind == "bytes_value" else None


_TIME_TAG, _NAME_TAG, _ATTRIBUTE_TAG, _DROPPED_TAG = 0x09, 0x12, 0x1A, 0x20
_NAME_AT = 11
"""An event as exporters write it: 09 TIME (8 bytes), 12 SIZE NAME, then its attributes."""


def event_columns(events: list[bytes]) -> Events:
    """Return serialized events as columns; events with an unusual encoding are read one by one."""
    # All tests below look at the bytes of all events at once. They read beyond short events, into the next one or the
    # final zeros, which does no harm: `attributes_at <= ends` then fails.
    texts = PackedTexts.of(events)
    array, starts, ends = texts.array, texts.starts, texts.ends
    sizes = array[starts + _NAME_AT - 1].astype(np.int64)
    usual = (array[starts] == _TIME_TAG) & (array[starts + 9] == _NAME_TAG) & (sizes < 0x80)
    attributes_at = starts + _NAME_AT + sizes
    usual &= attributes_at <= ends
    usual &= (attributes_at == ends) | (array[np.minimum(attributes_at, ends)] == _ATTRIBUTE_TAG)
    # A count of dropped attributes, of one byte or two, comes last: such events are read one by one.
    usual &= (array[ends - 2] != _DROPPED_TAG) & (array[ends - 3] != _DROPPED_TAG)
    attributes_at = np.where(usual, attributes_at, ends)
    unix_ns = texts.words[starts + 1].view(np.int64)  # a copy
    usual &= unix_ns >= 0
    names = [
        texts.data[start:stop]
        for start, stop in zip((starts + _NAME_AT).tolist(), attributes_at.tolist(), strict=True)
    ]
    known = {name: _text_of(name) for name in set(names)}  # few names: each is decoded once
    if None in known.values():
        usual &= np.array([known[name] is not None for name in names], np.bool_)
    columns = Events(
        [known[name] or "" for name in names],
        unix_ns,
        PackedTexts(texts.data, array, texts.words, attributes_at, ends),
        np.zeros(len(events), np.int64),
        {},
        [],
    )
    for place in np.flatnonzero(~usual).tolist():
        try:
            unix_ns[place], columns.names[place], pairs, columns.dropped[place] = _read_event(events[place])
        except FieldError:
            columns.bad.append(place)
        else:
            columns.odd[place] = pairs
    return columns


def _text_of(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None
