"""Jaeger's dumps: the answer of `/api/traces` and of the user interface's download, and that of `/api/v3/traces`.

The first has traces with spans, tags and processes; its times are microseconds, and the scope of a span is a tag. The
second holds OTLP in an envelope.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.compression import Gap, Piece
from tracefit.inputs.containers.base import (
    Container,
    Encoded,
    Faulty,
    SpanItem,
    encoded,
    nanoseconds,
    otlp_lines,
    peeked,
    register,
)
from tracefit.inputs.containers.elements import UNREADABLE_JSON, items

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIND = re.compile(rb'\{(?:\s*"(?:errors|limit|offset|total)"\s*:\s*(?:null|[0-9]+|\[\s*\])\s*,)*\s*"data"\s*:\s*\[')
_JAEGER_SPAN = re.compile(rb'"operationName"\s*:')
_BEGIN = re.compile(rb'\{\s*"(?:traceID"\s*:\s*"[0-9a-fA-F]{1,32}"\s*,\s*"spans|processes)"\s*:')
_EMPTY_END = re.compile(rb"\s*\]")
_FIND_LINE = re.compile(rb'[\[\s]*\{\s*"(?:traceID"\s*:\s*"[0-9a-fA-F]{1,32}"\s*,\s*"spans"\s*:\s*\[)')

_MOST_TOGETHER = 512
_NAME_FIELDS = ("event", "message")


class _JaegerTag(msgspec.Struct, gc=False):
    key: str = ""
    type: str = ""
    value: Any = None


class _JaegerReference(
    msgspec.Struct, gc=False, rename={"kind": "refType", "span_id": "spanID", "trace_id": "traceID"}
):
    kind: str = "CHILD_OF"
    span_id: str = ""
    trace_id: str = ""


class _JaegerLog(msgspec.Struct, gc=False):
    timestamp: int = 0
    fields: list[_JaegerTag] | None = None


class _JaegerProcess(msgspec.Struct, rename={"service": "serviceName"}):
    service: str = ""
    tags: list[_JaegerTag] | None = None


class _JaegerSpan(
    msgspec.Struct,
    rename={
        "trace_id": "traceID",
        "span_id": "spanID",
        "parent_id": "parentSpanID",
        "name": "operationName",
        "start": "startTime",
        "process_id": "processID",
    },
):
    trace_id: str
    span_id: str
    start: int
    duration: int
    name: str = ""
    parent_id: str | None = ""
    references: list[_JaegerReference] | None = None
    tags: list[_JaegerTag] | None = None
    logs: list[_JaegerLog] | None = None
    process_id: str | None = ""
    process: _JaegerProcess | None = None


class _JaegerTrace(msgspec.Struct):
    spans: list[msgspec.Raw]
    processes: dict[str, _JaegerProcess] | None = None


_TRACE_DECODER, _JAEGER_DECODER = msgspec.json.Decoder(_JaegerTrace), msgspec.json.Decoder(_JaegerSpan)


def _value(tag: _JaegerTag) -> Any:
    value = tag.value
    if tag.type == "int64" and isinstance(value, str):  # beyond 2^53, which browsers cannot read
        return int(value) if len(value) <= 20 else value
    if tag.type == "float64" and isinstance(value, int):
        return float(value)
    return value == "true" if tag.type == "bool" and isinstance(value, str) else value


def _values(tags: list[_JaegerTag] | None) -> dict[str, Any]:
    return {tag.key: _value(tag) for tag in tags or ()}


def _event(log: _JaegerLog) -> tuple[str, str, dict[str, Any]]:
    fields = _values(log.fields)
    name = next((str(fields.pop(key)) for key in _NAME_FIELDS if isinstance(fields.get(key), str)), "")
    return nanoseconds(log.timestamp), name, fields


def _item(text: msgspec.Raw, resources: dict[str, dict[str, Any]]) -> SpanItem:
    span = _JAEGER_DECODER.decode(text)
    if span.start < 0 or span.duration < 0:
        raise Faulty("time before 1970")
    parents = (one.span_id for one in span.references or () if one.kind == "CHILD_OF")
    resource = _resource(span.process) if span.process else resources.get(span.process_id or "", {})
    return SpanItem(
        span.trace_id,
        span.span_id,
        span.parent_id or next(parents, ""),
        span.name,
        nanoseconds(span.start),
        nanoseconds(span.start + span.duration),
        _values(span.tags),
        [_event(log) for log in span.logs or ()],
        resource,
    )


def _resource(process: _JaegerProcess) -> dict[str, Any]:
    return {"service.name": process.service, **_values(process.tags)}


def _convert(text: bytes) -> Iterator[bytes | Gap]:
    trace = _TRACE_DECODER.decode(text)
    # A process names no other one, so that they cannot form a circle; one that is missing has no facts.
    return _lines(trace.spans, {key: _resource(each) for key, each in (trace.processes or {}).items()})


def _lines(spans: list[msgspec.Raw], resources: dict[str, dict[str, Any]]) -> Iterator[bytes | Gap]:
    for begin in range(0, len(spans), _MOST_TOGETHER):
        together: list[Encoded] = []
        for text in spans[begin : begin + _MOST_TOGETHER]:
            try:
                together.append(encoded(_item(text, resources)))
            except UNREADABLE_JSON:
                yield Gap("not a span of Jaeger's", record=bytes(text))
        yield from otlp_lines(together)


def _find(head: bytes) -> bool:
    match = _FIND.match(head)
    if match:
        return bool(_EMPTY_END.match(head, match.end()) or _JAEGER_SPAN.search(head))
    return bool(_FIND_LINE.match(head) and _JAEGER_SPAN.search(head))


def _read(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    head, content = peeked(content, 4096)
    depth = 2 if _FIND.search(head) else int(head.lstrip().startswith(b"["))
    yield from items(content, depth, _BEGIN, most_bytes, _convert)


FORMAT = register(
    Container(
        name="jaeger",
        title="Jaeger's API answer",
        holds="traces",
        version="query service API, a dump of November 2026",
        source="https://www.jaegertracing.io/docs/latest/architecture/apis/",
        find=_find,
        read=_read,
    )
)

_FIND_V3 = re.compile(rb'\{\s*"result"\s*:\s*\{\s*"resource_?[sS]pans"\s*:\s*\[')
_BEGIN_V3 = re.compile(rb'\{\s*"(?:resource"\s*:\s*\{|scope_?[sS]pans"\s*:\s*\[)')


def envelope(text: bytes) -> list[bytes]:
    """Return one ResourceSpans as a record in a line."""
    # A raw line end is never inside a string.
    return [b'{"resourceSpans":[%b]}\n' % text.replace(b"\n", b" ").replace(b"\r", b" ")]


def _checked(text: bytes) -> list[bytes]:
    msgspec.json.decode(text, type=msgspec.Raw)
    return envelope(text)


V3 = register(
    Container(
        name="jaeger_v3",
        title="Jaeger's API v3 answer",
        holds="traces",
        version="API v3",
        source="https://www.jaegertracing.io/docs/latest/architecture/apis/",
        find=lambda head: bool(_FIND_V3.match(head)),
        read=lambda content, most_bytes: items(content, 3, _BEGIN_V3, most_bytes, _checked),
    )
)
