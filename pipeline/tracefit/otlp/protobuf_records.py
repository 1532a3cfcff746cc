"""Decode OTLP protobuf, down to the event with protobuf's parser.

A record is first divided into scopes. A short scope is parsed whole; the spans of a long one, or of one with
a bad span, stay encoded until they are parsed in pieces, or one by one, so that a bad span does not
reject its siblings. Events and attributes stay bytes: `layouts` reads the attributes of events column by column.
"""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tracefit.inputs.otlp_wire import trace_messages
from tracefit.otlp import layouts
from tracefit.otlp.model import (
    ID_BYTES,
    INT64_MAX,
    AddReject,
    AttributeValue,
    EncodedScope,
    Events,
    FieldError,
    Origin,
    Pairs,
    Plain,
    Span,
    check_depth,
    finite,
    nested_text,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.inputs.rejects import Encoding

NAME: Encoding = "protobuf"
SYNTAX = layouts.PROTOBUF

(_TracesData,) = trace_messages(["TracesData"], as_bytes={"scope_spans"})
(_ScopeSpans,) = trace_messages(["ScopeSpans"], as_bytes={"spans"})
_ParsedSpans, Event = trace_messages(("ScopeSpans", "Span.Event"), as_bytes={"events"})

PIECE_BYTES = 1 << 20
"""Piece size for long records, in bytes. Spans of 30 bytes need twenty times their size once decoded."""

_MANY_EVENTS, _SHORTEST_EVENT = 100_000, 12
"""An event with its time takes eleven bytes. Decoded, empty events take many times their length in memory."""

_SCALAR_KINDS = ("string_value", "int_value", "double_value", "bool_value")


def scopes(payload: bytes, reject: AddReject, most_bytes: int) -> Iterator[EncodedScope]:
    """Yield the scopes of a record; long ones, and all scopes of a record with many, keep their spans encoded.

    Raises:
        FieldError: The message cannot be parsed.
    """
    try:
        data = _TracesData.FromString(payload)
    except DecodeError as error:
        raise FieldError("protobuf message cannot be parsed") from error
    # All of them before the first is yielded, for a record with one that cannot be parsed may be cut. Parsed,
    # short spans take many times their bytes.
    most = most_bytes if len(payload) <= 2 * most_bytes else 0
    scopes_of = [[_scope_spans(text, most) for text in each.scope_spans] for each in data.resource_spans]
    for resource_spans, spans_of_scopes in zip(data.resource_spans, scopes_of, strict=True):
        texts: Pairs | None = None
        try:
            resource = Resource.FromString(resource_spans.resource)
            texts = [(attribute.key, _scalar(attribute.value)) for attribute in resource.attributes]
        except DecodeError:
            reject("resourceSpans: attribute is not a protobuf message")
        except FieldError as error:
            reject(f"resourceSpans: {error.what}")
        for scope_spans, parsed_bytes in spans_of_scopes:
            origin = None
            try:
                scope = InstrumentationScope.FromString(scope_spans.scope)
            except DecodeError:
                reject("scopeSpans: scope is not a protobuf message")
            else:
                origin = None if texts is None else Origin.of(texts, scope.name)
            yield EncodedScope(origin, scope_spans.spans, parsed_bytes)


def _scope_spans(text: bytes, most_bytes: int) -> tuple[Any, int]:
    """Return the parsed spans of a scope and their length; encoded, and 0, if long or not all can be parsed."""
    if len(text) <= most_bytes:
        with suppress(DecodeError):
            return _ParsedSpans.FromString(text), len(text)
    try:
        return _ScopeSpans.FromString(text), 0
    except DecodeError as error:
        raise FieldError("protobuf message cannot be parsed") from error


def read_spans(encoded: Sequence[Any]) -> list[Span]:
    """Parse spans that are not parsed yet, and check them; attributes and events are not checked yet.

    Raises:
        FieldError: A span is not valid.
    """
    spans = list(encoded)
    if spans and isinstance(spans[0], bytes):
        # A call for each span takes three times as long as joining them again, which is fast in the library.
        joined = _ScopeSpans(spans=spans).SerializeToString()
        try:
            spans = list(_ParsedSpans.FromString(joined).spans)
        except DecodeError as error:
            raise FieldError("it is not a protobuf message") from error
    ids = {
        "traceId": [span.trace_id for span in spans],
        "spanId": [span.span_id for span in spans],
        # An all-zero parent id means that the span has no parent.
        "parentSpanId": [span.parent_span_id for span in spans if any(span.parent_span_id)],
    }
    for name, values in ids.items():
        size = ID_BYTES[name]
        if not {size}.issuperset(map(len, values)):
            raise FieldError(f"{name} is not {size} bytes")
        if bytes(size) in values:
            raise FieldError(f"{name} is all zero")
    if max([span.start_time_unix_nano for span in spans], default=0) > INT64_MAX:
        raise FieldError("startTimeUnixNano is beyond int64")
    if max([span.end_time_unix_nano for span in spans], default=0) > INT64_MAX:
        raise FieldError("endTimeUnixNano is beyond int64")
    for span in spans:
        count = len(span.events)
        if count > _MANY_EVENTS and span.ByteSize() < count * _SHORTEST_EVENT:
            raise FieldError(f"{count} events, most of them empty")
    return spans


def read_span(encoded: Any) -> Span:
    """Parse one span, its attributes and events included.

    Raises:
        FieldError: It is not valid.
    """
    (span,) = read_spans([encoded])
    read_pairs(attributes_of(span))
    for event in span.events:
        _read_event(event)
    return span


id_text = bytes.hex
"""Returns an id as hex."""


def attributes_of(span: Span) -> bytes:
    """Return the attributes of a span, encoded end to end as those of an event are."""
    return Event(attributes=span.attributes).SerializeToString()  # type: ignore[no-any-return]  # a class made at run time


def _read_event(event: bytes) -> tuple[int, str, Pairs, int]:
    """Return the time, name, attributes and number of dropped attributes of an event; FieldError if it is not valid."""
    try:
        message = Event.FromString(event)
    except DecodeError as error:
        raise FieldError("event is not a protobuf message") from error
    if message.time_unix_nano > INT64_MAX:
        raise FieldError("timeUnixNano is beyond int64")
    pairs = [_pair(attribute) for attribute in message.attributes]
    return message.time_unix_nano, message.name, pairs, message.dropped_attributes_count


def read_pairs(attributes: bytes) -> Pairs:
    """Return keys and values of attributes in the wire format of an event's attributes.

    Raises:
        FieldError: An attribute is not a message, or is nested too deep.
    """
    return _read_event(attributes)[2]


def _pair(attribute: bytes) -> tuple[str, AttributeValue]:
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


_TIME_TAG, _NAME_TAG, _ATTRIBUTES_TAG, _DROPPED_TAG = 0x09, 0x12, 0x1A, 0x20
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
    usual &= (attributes_at == ends) | (array[np.minimum(attributes_at, ends)] == _ATTRIBUTES_TAG)
    # A count of dropped attributes, of one byte or two, comes last: such events are read one by one.
    usual &= (array[ends - 2] != _DROPPED_TAG) & (array[ends - 3] != _DROPPED_TAG)
    attributes_at = np.where(usual, attributes_at, ends)
    unix_ns = texts.words[starts + 1].view(np.int64)  # a copy
    usual &= unix_ns >= 0
    names = [
        texts.data[start:stop] for start, stop in zip((starts + _NAME_AT).tolist(), attributes_at.tolist(), strict=True)
    ]
    text_of = {name: _text_of(name) for name in set(names)}  # few names: each is decoded once
    if None in text_of.values():
        usual &= np.array([text_of[name] is not None for name in names], np.bool_)
    columns = Events(
        [text_of[name] or "" for name in names],
        unix_ns,
        PackedTexts(texts.data, array, texts.words, attributes_at, ends),
        np.zeros(len(events), np.int64),
        {},
        [],
    )
    for index in np.flatnonzero(~usual).tolist():
        try:
            unix_ns[index], columns.names[index], pairs, columns.dropped[index] = _read_event(events[index])
        except FieldError:
            columns.bad.append(index)
        else:
            columns.odd[index] = pairs
    return columns


def _text_of(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None
