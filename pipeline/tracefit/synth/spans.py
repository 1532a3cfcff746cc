"""Generated spans: as data, as OTLP JSON lines of the Collector's file exporter, and as framed protobuf.

Both encodings are written by hand here, so that no code is shared with the rooms that read them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Value: TypeAlias = str | int | float
"""A scalar attribute value; its Python type is its kind on the wire."""


class SpanKind(IntEnum):
    """OTLP span kinds of the emitter."""

    INTERNAL = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes in order; events of one kind share one tuple of keys, by which templates are cached.

    Attributes:
        keys: The keys.
        values: Their values.
    """

    keys: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Attributes:
        """Return the attributes of a mapping, in its order."""
        return cls(_shared(tuple(values)), tuple(values.values()))

    def as_dict(self) -> dict[str, Value]:
        """Return them as a dictionary."""
        return dict(zip(self.keys, self.values, strict=True))


@cache
def _shared(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return one tuple for all equal ones: a run has millions of events of a few kinds."""
    return keys


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """An event of a span.

    Attributes:
        name: Its name.
        unix_ns: When it was stamped.
        attributes: Its attributes.
    """

    name: str
    unix_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class GeneratedSpan:
    """A span as its exporter sends it.

    Attributes:
        scope: Name of the instrumentation scope.
        trace_id: 32 lower-case hex digits.
        span_id: 16 lower-case hex digits.
        parent_span_id: 16 lower-case hex digits, or empty.
        flags: OTLP span flags.
        name: Name of the span.
        kind: Kind of the span.
        start_unix_ns: Start.
        end_unix_ns: End.
        attributes: Attributes of the span itself.
        events: Its events, oldest first.
        dropped_events: Events that were lost to the limit.
        error: Status message of a failed span, or empty.
    """

    scope: str
    trace_id: str
    span_id: str
    parent_span_id: str
    flags: int
    name: str
    kind: SpanKind
    start_unix_ns: int
    end_unix_ns: int
    attributes: Attributes
    events: tuple[GeneratedEvent, ...]
    dropped_events: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExportBatch:
    """One export request: what one process sent at one time.

    Attributes:
        resource: Attributes of the process.
        spans: Its spans, by the order they ended in.
    """

    resource: Attributes
    spans: tuple[GeneratedSpan, ...]

    def by_scope(self) -> dict[str, list[GeneratedSpan]]:
        """Return the spans of each scope, scopes in order of appearance."""
        scopes: dict[str, list[GeneratedSpan]] = {}
        for span in self.spans:
            scopes.setdefault(span.scope, []).append(span)
        return scopes


def limited(events: list[GeneratedEvent], limit: int | None) -> tuple[tuple[GeneratedEvent, ...], int]:
    """Return the events a span keeps under a limit, the newest ones, and how many it lost."""
    # The SDK's queue of events is bounded (128 by default) and loses its oldest.
    if limit is None or len(events) <= limit:
        return tuple(events), 0
    return tuple(events[-limit:]), len(events) - limit


# -- encodings -------------------------------------------------------------------------------------------

_STATUS_ERROR = 2
# Attributes are printed into a template made once per kind of event. 64-bit integers are strings in OTLP's JSON.
_SLOTS = {
    str: '{"key":%s,"value":{"stringValue":%%s}}',
    int: '{"key":%s,"value":{"intValue":"%%d"}}',
    float: '{"key":%s,"value":{"doubleValue":%%s}}',
}


def json_lines(batches: Iterable[ExportBatch]) -> bytes:
    """Return one JSON line per export batch."""
    return "".join(f"{_batch_json(batch)}\n" for batch in batches).encode()


def framed_protobuf(batches: Iterable[ExportBatch]) -> bytes:
    """Return one message per export batch, each after its length in four bytes, big-endian."""
    frames = []
    for batch in batches:
        message = _batch_message(batch).SerializeToString(deterministic=True)
        frames.append(len(message).to_bytes(4, "big") + message)
    return b"".join(frames)


def _batch_json(batch: ExportBatch) -> str:
    scopes = ",".join(
        f'{{"scope":{{"name":{_text(scope)}}},"spans":[{",".join(map(_span_json, spans))}]}}'
        for scope, spans in batch.by_scope().items()
    )
    resource = f'{{"attributes":{_attributes_json(batch.resource)}}}'
    return f'{{"resourceSpans":[{{"resource":{resource},"scopeSpans":[{scopes}]}}]}}'


def _span_json(span: GeneratedSpan) -> str:
    # The Collector leaves out an event list without events and a count of nothing.
    events = f'"events":[{",".join(map(_event_json, span.events))}],' if span.events else ""
    dropped = f'"droppedEventsCount":{span.dropped_events},' if span.dropped_events else ""
    status = f'"message":{_text(span.error)},"code":{_STATUS_ERROR}' if span.error else ""
    return (
        f'{{"traceId":"{span.trace_id}","spanId":"{span.span_id}","parentSpanId":"{span.parent_span_id}",'
        f'"flags":{span.flags},"name":{_text(span.name)},"kind":{span.kind.value},'
        f'"startTimeUnixNano":"{span.start_unix_ns}","endTimeUnixNano":"{span.end_unix_ns}",'
        f'"attributes":{_attributes_json(span.attributes)},{events}{dropped}"status":{{{status}}}}}'
    )


def _event_json(event: GeneratedEvent) -> str:
    attributes = _attributes_json(event.attributes)
    return f'{{"timeUnixNano":"{event.unix_ns}","name":{_text(event.name)},"attributes":{attributes}}}'


def _attributes_json(attributes: Attributes) -> str:
    values = attributes.values
    template = _template(attributes.keys, tuple(map(type, values)))
    return template % tuple(value if type(value) is int else _scalar(value) for value in values)


@cache
def _template(keys: tuple[str, ...], kinds: tuple[type[Value], ...]) -> str:
    """Return the text of attributes with these keys and kinds, a slot for each value."""
    pairs = zip(keys, kinds, strict=True)
    return "[" + ",".join(_SLOTS[kind] % _text(key).replace("%", "%%") for key, kind in pairs) + "]"


def _scalar(value: Value) -> str:
    return _text(value) if isinstance(value, str) else _double(value)


@cache
def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _double(value: float) -> str:
    """Return a double as the Collector prints it: shortest digits, `0` for 0.0, no exponent in our range."""
    text = repr(float(value))
    if "e" in text:
        return np.format_float_positional(value, trim="-")
    return text.removesuffix(".0")


def _batch_message(batch: ExportBatch) -> trace_pb2.TracesData:
    data = trace_pb2.TracesData()
    resource_spans = data.resource_spans.add()
    resource_spans.resource.attributes.extend(_pairs(batch.resource))
    for scope, spans in batch.by_scope().items():
        scope_spans = resource_spans.scope_spans.add()
        scope_spans.scope.name = scope
        scope_spans.spans.extend(map(_span_message, spans))
    return data


def _span_message(span: GeneratedSpan) -> trace_pb2.Span:
    message = trace_pb2.Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_span_id),
        flags=span.flags,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.ValueType(span.kind),
        start_time_unix_nano=span.start_unix_ns,
        end_time_unix_nano=span.end_unix_ns,
        attributes=_pairs(span.attributes),
        events=[_event_message(event) for event in span.events],
        dropped_events_count=span.dropped_events,
    )
    message.status.SetInParent()  # an empty status is there too, as in JSON
    if span.error:
        message.status.message = span.error
        message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    return message


def _event_message(event: GeneratedEvent) -> trace_pb2.Span.Event:
    return trace_pb2.Span.Event(
        time_unix_nano=event.unix_ns, name=event.name, attributes=_pairs(event.attributes)
    )


def _pairs(attributes: Attributes) -> list[common_pb2.KeyValue]:
    return [
        common_pb2.KeyValue(key=key, value=_any_value(value))
        for key, value in zip(attributes.keys, attributes.values, strict=True)
    ]


def _any_value(value: Value) -> common_pb2.AnyValue:
    if isinstance(value, str):
        return common_pb2.AnyValue(string_value=value)
    if isinstance(value, int):
        return common_pb2.AnyValue(int_value=value)
    return common_pb2.AnyValue(double_value=value)
