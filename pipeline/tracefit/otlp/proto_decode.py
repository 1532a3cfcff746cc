"""Protobuf records to spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from tracefit.otlp.model import (
    Decoded,
    FieldError,
    Span,
    SpanGroup,
    UncheckedAttributeError,
    origin_of,
)
from tracefit.otlp.proto_attributes import READER, ProtobufEvent, read_pairs
from tracefit.otlp.proto_schema import EventsOfTraces, TracesData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.sources.records import Frame


def decode_protobuf(frame: Frame, *, check_events: bool) -> Decoded:
    """Decode a protobuf record.

    Args:
        frame: A protobuf frame.
        check_events: Whether to read the attributes of events here too, where what is wrong with them costs no more
            than their span or record. Else the column builder may find it.

    Returns:
        The good spans and a reject for each bad one; one reject alone if the message cannot be parsed.
    """
    try:
        return _RecordReader(frame, check_events=check_events).read()
    except (DecodeError, UncheckedAttributeError):
        return Decoded(rejects=[frame.reject("protobuf message cannot be parsed")])


class _RecordReader:
    """Walks one record and keeps count of its spans, for the rejects to name them."""

    def __init__(self, frame: Frame, *, check_events: bool) -> None:
        self._frame = frame
        self._check_events = check_events
        self._decoded = Decoded()
        self._spans_seen = 0

    def read(self) -> Decoded:
        message = TracesData.FromString(self._frame.payload)
        serialized = EventsOfTraces.FromString(self._frame.payload)
        for resource_spans, events in zip(message.resource_spans, serialized.resource_spans, strict=True):
            try:
                resource = read_pairs(resource_spans.resource.attributes)
            except FieldError as error:
                self._decoded.rejects.append(self._frame.reject(f"resourceSpans: {error.what}"))
                self._spans_seen += sum(len(scope_spans.spans) for scope_spans in resource_spans.scope_spans)
                continue
            for scope_spans, scope_events in zip(resource_spans.scope_spans, events.scope_spans, strict=True):
                name = scope_spans.scope.name
                origin = origin_of(self._frame.source_file, self._frame.offset, resource, name)
                self._decoded.groups.append(SpanGroup(origin, self._spans(scope_spans, scope_events)))
        return self._decoded

    def _spans(self, scope_spans: Any, scope_events: Any) -> list[Span]:
        spans = []
        for message, events in zip(scope_spans.spans, scope_events.spans, strict=True):
            try:
                spans.append(self._span(message, events.events))
            except FieldError as error:
                self._decoded.rejects.append(self._frame.reject(f"span {self._spans_seen}: {error.what}"))
            self._spans_seen += 1
        return spans

    def _span(self, message: Any, serialized: Sequence[bytes]) -> Span:
        events = [
            ProtobufEvent(e.time_unix_nano, e.name, e.dropped_attributes_count, e, whole)
            for e, whole in zip(message.events, serialized, strict=True)
        ]
        _check_times(message, events)
        if self._check_events:
            for event in events:
                READER.pairs(event.attributes)
        return Span(
            _id(message.trace_id, "traceId", 16),
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


def _check_times(message: Any, events: list[ProtobufEvent]) -> None:
    times = {
        "startTimeUnixNano": message.start_time_unix_nano,
        "endTimeUnixNano": message.end_time_unix_nano,
        "timeUnixNano": min([event.time_unix_nano for event in events], default=0),
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
