"""Zipkin's JSON, version 2: a list of spans, a list of traces, or a list or span a line.

Tags are texts, times microseconds, and an event is an annotation: its name, or its name with its attributes in JSON.
Facts of the resource and the scope are tags.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.compression import Gap
from tracefit.inputs.containers.base import (
    Container,
    Encoded,
    Faulty,
    SpanItem,
    encoded,
    nanoseconds,
    otlp_lines,
    peeked,
    plain,
    register,
    with_resource,
)
from tracefit.inputs.containers.elements import UNREADABLE_JSON, items

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.inputs.compression import Piece

_FIND = re.compile(rb'[\[\s]*\{(?=[^{}]{0,400}"(?:traceId|id)"\s*:\s*")')
_ZIPKIN_KEYS = tuple(re.compile(rb'"%b"\s*:' % key) for key in (b"traceId", b"id", b"timestamp", b"duration"))
_OTLP = re.compile(rb'"(?:startTimeUnixNano|spanId)"')
_BEGIN = re.compile(
    rb'\{\s*"(?:(?:traceId|id|parentId|name|kind)"\s*:\s*"|duration"\s*:\s*[0-9]|annotations"\s*:\s*\[)'
)
_MOST_TOGETHER = 512
_NAMED_JSON = re.compile(r'"(?P<name>[^"]{1,256})"\s*:\s*(?P<values>\{.*\})', re.DOTALL)
_PIPED = re.compile(r"(?P<name>[^|]{1,256})\|(?P<values>\{.*\})\|[0-9]+", re.DOTALL)


class _ZipkinEndpoint(msgspec.Struct):
    serviceName: str | None = None  # noqa: N815 - Zipkin's key


class _ZipkinAnnotation(msgspec.Struct):
    timestamp: int = 0
    value: str = ""


class _ZipkinSpan(
    msgspec.Struct,
    rename={"trace_id": "traceId", "span_id": "id", "parent_id": "parentId", "endpoint": "localEndpoint"},
):
    trace_id: str
    span_id: str
    timestamp: int
    duration: int = 0
    parent_id: str | None = None
    name: str | None = None
    kind: str | None = None
    endpoint: _ZipkinEndpoint | None = None
    annotations: list[_ZipkinAnnotation] | None = None
    tags: dict[str, str] | None = None


_ZIPKIN_DECODER, _LIST = msgspec.json.Decoder(_ZipkinSpan), msgspec.json.Decoder(list[msgspec.Raw])


def _event(annotation: _ZipkinAnnotation) -> tuple[str, str, dict[str, Any]]:
    """Return an event; exporters write its attributes as `{"name": {…}}`, `"name": {…}` or `name|{…}|0`."""
    text = annotation.value
    name: str = text
    values: Any = {}
    if text.startswith("{"):
        read = msgspec.json.decode(text)
        if isinstance(read, dict) and len(read) == 1:
            ((name, values),) = read.items()
    elif match := _NAMED_JSON.fullmatch(text) or _PIPED.fullmatch(text):
        name, values = match["name"], msgspec.json.decode(match["values"])
    if not isinstance(values, dict):
        name, values = text, {}
    return nanoseconds(annotation.timestamp), name, {key: plain(value) for key, value in values.items()}


def _item(text: msgspec.Raw) -> SpanItem:
    span = _ZIPKIN_DECODER.decode(text)
    if span.timestamp < 0 or span.duration < 0:
        raise Faulty("time before 1970")
    tags: dict[str, Any] = dict(span.tags or {})
    resource = with_resource((span.endpoint and span.endpoint.serviceName) or "", tags)
    return SpanItem(
        span.trace_id,
        span.span_id,
        span.parent_id or "",
        span.name or "",
        nanoseconds(span.timestamp),
        nanoseconds(span.timestamp + span.duration),
        {key: plain(value) for key, value in tags.items()},
        [_event(one) for one in span.annotations or ()],
        resource,
        kind=span.kind or "INTERNAL",
    )


def _convert(text: bytes) -> Iterator[bytes | Gap]:
    return _lines(_LIST.decode(text) if text.startswith(b"[") else [msgspec.Raw(text)])


def _lines(spans: list[msgspec.Raw]) -> Iterator[bytes | Gap]:
    for begin in range(0, len(spans), _MOST_TOGETHER):
        together: list[Encoded] = []
        for text in spans[begin : begin + _MOST_TOGETHER]:
            try:
                together.append(encoded(_item(text)))
            except UNREADABLE_JSON:
                yield Gap("not a span of Zipkin's", record=bytes(text))
        yield from otlp_lines(together)


def _find(head: bytes) -> bool:
    return bool(_FIND.match(head) and all(key.search(head) for key in _ZIPKIN_KEYS) and not _OTLP.search(head))


def _read(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    head, content = peeked(content, 4096)
    depth = int(head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))
    return items(content, depth, _BEGIN, most_bytes, _convert)


FORMAT = register(
    Container(
        name="zipkin",
        title="Zipkin's JSON, version 2",
        holds="traces",
        version="API v2",
        source="https://zipkin.io/zipkin-api/",
        find=_find,
        read=_read,
    )
)
