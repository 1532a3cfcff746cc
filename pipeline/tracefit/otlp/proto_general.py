"""Protobuf records to spans one by one: the careful way, which judges what is wrong with a record."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tracefit.otlp.model import (
    Decoded,
    FieldError,
    Pairs,
    Part,
    Scalar,
    Span,
    SpanGroup,
    UncheckedAttributeError,
    origin_of,
)
from tracefit.otlp.proto_schema import TracesData
from tracefit.otlp.rejects import MAX_REJECTS
from tracefit.otlp.values import Plain, check_depth, finite, nested_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.sources.records import Frame

_TRACE_ID_BYTES = 16
_REMEMBERED_BYTES, _MAX_REMEMBERED = 64, 1000
"""Bytes of an attribute, and attributes of a span or event, that are remembered."""
_SCALAR_KINDS = ("string_value", "int_value", "double_value", "bool_value")


class Event(msgspec.Struct, gc=False, frozen=True):
    """An event."""

    time_unix_nano: int
    name: str
    attributes: Pairs
    dropped_attributes_count: int


def decode_general(frame: Frame, *, listed: int = MAX_REJECTS) -> Decoded:
    """Decode a protobuf record.

    Args:
        frame: A protobuf frame.
        listed: Most rejects to return; the others are counted.

    Returns:
        The good spans and a reject for each bad one; one reject alone if the message cannot be parsed.
    """
    try:
        return _RecordReader(frame, listed).read()
    except (DecodeError, UncheckedAttributeError):
        return Decoded(rejects=[frame.reject("protobuf message cannot be parsed")])


class _RecordReader:
    """Walks one record and keeps count of its spans, for the rejects to name them."""

    def __init__(self, frame: Frame, listed: int) -> None:
        self._frame = frame
        self._left = listed
        self._found = Decoded()
        self._spans_seen = 0

    def read(self) -> Decoded:
        for resource_spans in TracesData.FromString(self._frame.payload).resource_spans:
            try:
                resource = read_pairs(resource_spans.resource.attributes)
            except FieldError as error:
                self._reject(f"resourceSpans: {error.what}")
                self._spans_seen += sum(len(scope_spans.spans) for scope_spans in resource_spans.scope_spans)
                continue
            for scope_spans in resource_spans.scope_spans:
                name = scope_spans.scope.name
                origin = origin_of(self._frame.source_file, self._frame.offset, resource, name)
                self._found.groups.append(SpanGroup(origin, self._spans(scope_spans)))
        return self._found

    def _reject(self, reason: str) -> None:
        if self._left:
            self._left -= 1
            self._found.rejects.append(self._frame.reject(reason))
        else:
            self._found.more += 1

    def _spans(self, scope_spans: Any) -> list[Span]:
        spans = []
        for message in scope_spans.spans:
            if not self._left and len(message.trace_id) != _TRACE_ID_BYTES:
                self._found.more += 1
                continue
            try:
                spans.append(_span(message))
            except FieldError as error:
                self._reject(f"span {self._spans_seen}: {error.what}")
            self._spans_seen += 1
        return spans


def _span(message: Any) -> Span:
    _check_times(message)
    events = [
        Event(e.time_unix_nano, e.name, read_pairs(e.attributes), e.dropped_attributes_count)
        for e in message.events
    ]
    return Span(
        _id(message.trace_id, "traceId", _TRACE_ID_BYTES),
        _id(message.span_id, "spanId", 8),
        _parent_id(message.parent_span_id),
        message.name,
        message.kind,
        message.start_time_unix_nano,
        message.end_time_unix_nano,
        read_pairs(message.attributes),
        events,
        message.dropped_attributes_count,
        message.dropped_events_count,
        message.status.code,
        message.status.message,
    )


def _check_times(message: Any) -> None:
    times = {
        "startTimeUnixNano": message.start_time_unix_nano,
        "endTimeUnixNano": message.end_time_unix_nano,
        "timeUnixNano": min([event.time_unix_nano for event in message.events], default=0),
    }
    for name, time in times.items():
        if time < 0:
            raise FieldError(f"{name} is beyond int64")


def _id(value: bytes, name: str, size: int) -> str:
    if len(value) != size:
        raise FieldError(f"{name} is not {size} bytes")
    if not any(value):
        raise FieldError(f"{name} is all zero")
    return value.hex()


def _parent_id(value: bytes) -> str:
    return _id(value, "parentSpanId", 8) if any(value) else ""


def read_pairs(attributes: Iterable[bytes]) -> Pairs:
    """Return keys and values of serialized `KeyValue` messages, in order.

    Raises:
        UncheckedAttributeError: If an attribute is no message.
        FieldError: If a value is nested too deep.
    """
    known: dict[bytes, tuple[str, Scalar]] = {}
    try:
        return [known.get(attribute) or _known_pair(attribute, known) for attribute in attributes]
    except DecodeError as error:
        raise UncheckedAttributeError("attribute is not a protobuf message") from error


def _known_pair(attribute: bytes, known: dict[bytes, tuple[str, Scalar]]) -> tuple[str, Scalar]:
    """Read an attribute, and remember it if it is short: such a one may be there again and again."""
    message = KeyValue.FromString(attribute)
    pair = message.key, _scalar(message.value)
    if len(attribute) <= _REMEMBERED_BYTES and len(known) < _MAX_REMEMBERED:
        known[attribute] = pair
    return pair


class ProtobufAttributes:
    """Reads the attributes of events that have been parsed."""

    def pairs(self, attributes: Pairs) -> Pairs:
        """Return keys and values of one event, in order."""
        return attributes

    def parts(self, attributes: list[Pairs]) -> list[Part]:
        """Leave every event to be read by itself."""
        return [Part(np.arange(len(attributes)), None)]


READER = ProtobufAttributes()


def _scalar(value: Any) -> Scalar:
    kind = value.WhichOneof("value")
    if kind in _SCALAR_KINDS:
        scalar: Scalar = getattr(value, kind)
        return scalar
    nested = _container(value, kind, 1)
    return nested if isinstance(nested, str) or nested is None else nested_text(nested)


def _plain(value: Any, depth: int) -> Plain:
    """Read a value inside another, as what it is in plain JSON."""
    check_depth(depth)
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return finite(value.double_value)
    if kind in _SCALAR_KINDS:
        scalar: Scalar = getattr(value, kind)
        return scalar
    return _container(value, kind, depth)


def _container(value: Any, kind: str | None, depth: int) -> Plain:
    if kind == "array_value":
        return [_plain(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return b64encode(value.bytes_value).decode() if kind == "bytes_value" else None
