"""Spans that SDKs print: documents of the Python SDK's console exporter, and a ResourceSpans a line of Java's logging
exporter.

Both share their output with the server's log, whose lines are skipped. The console exporter leaves out the scope of a
span, which follows from its name and its attributes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.compression import Gap
from tracefit.inputs.containers.base import (
    Container,
    Encoded,
    Faulty,
    SpanItem,
    encoded,
    otlp_lines,
    register,
)
from tracefit.inputs.containers.elements import UNREADABLE_JSON, joined, lines_in

if TYPE_CHECKING:
    from collections.abc import Iterator


# At the beginning of a line. The pattern begins with the bracket: the regex engine skips to one.
_FIND = re.compile(rb'\{(?<![^\n]\{)\s*"name"\s*:\s*"[^"\n]{0,999}"\s*,\s*"context"\s*:\s*\{\s*"trace_id"\s*:\s*"0x')
_MOST_TOGETHER = 64
_MICROSECONDS = 1000


class _ConsoleContext(msgspec.Struct):
    trace_id: str
    span_id: str


class _ConsoleEvent(msgspec.Struct):
    name: str = ""
    timestamp: str = ""
    attributes: dict[str, Any] | None = None


class _ConsoleStatus(msgspec.Struct):
    status_code: str = "UNSET"
    description: str | None = None


class _ConsoleSpan(msgspec.Struct):
    name: str
    context: _ConsoleContext
    start_time: str
    end_time: str
    kind: str = ""
    parent_id: str | None = None
    status: _ConsoleStatus | None = None
    attributes: dict[str, Any] | None = None
    events: list[_ConsoleEvent] | None = None
    resource: dict[str, Any] | None = None


_CONSOLE_DECODER = msgspec.json.Decoder(_ConsoleSpan)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _ns(text: str) -> str:
    time = datetime.fromisoformat(text)
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    if since.days < 0:
        raise Faulty("time before 1970")
    return str(((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds) * 1000)


def _item(text: bytes) -> SpanItem:
    span = _CONSOLE_DECODER.decode(text)
    resource = span.resource or {}
    values = resource.get("attributes", resource)
    status = span.status or _ConsoleStatus()
    return SpanItem(
        span.context.trace_id,
        span.context.span_id,
        span.parent_id or "",
        span.name,
        _ns(span.start_time),
        _ns(span.end_time),
        span.attributes or {},
        [(_ns(one.timestamp), one.name, one.attributes or {}) for one in span.events or ()],
        values if isinstance(values, dict) else {},
        kind=span.kind.removeprefix("SpanKind."),
        status=status.status_code,
        message=status.description or "",
    )


def _documents(lines: Iterator[bytes | Gap], most_bytes: int) -> Iterator[bytes | Gap]:
    """Yield the documents among the lines of a log: from a line with only a bracket to the next one with only that, or
    in one line.
    """
    parts: list[bytes] = []
    size = 0
    for line in lines:
        if isinstance(line, Gap):
            yield line
        elif line == b"{":
            if parts:
                yield Gap("record cut: another begins inside", record=b"\n".join(parts))
            parts, size = [line], 0
        elif parts:
            parts.append(line)
            size += len(line)
            if line == b"}":
                yield b"\n".join(parts)
                parts = []
            elif size > most_bytes:
                yield Gap(f"longer than {most_bytes >> 20} MiB", record=b"\n".join(parts))
                parts = []
        elif line.startswith(b"{") and b'"context"' in line:
            yield line
    if parts:
        yield Gap("record cut", record=b"\n".join(parts))


def _spans(documents: Iterator[bytes | Gap]) -> Iterator[bytes | Gap]:
    together: list[Encoded] = []
    for document in documents:
        gap = document if isinstance(document, Gap) else None
        if not isinstance(document, Gap):
            try:
                together.append(encoded(_item(document)))
            except UNREADABLE_JSON:
                gap = Gap("not a span of the console exporter", record=document)
        if gap or len(together) >= _MOST_TOGETHER:
            yield from otlp_lines(together)
            together = []
        if gap:
            yield gap
    yield from otlp_lines(together)


CONSOLE = register(
    Container(
        name="console",
        title="output of the Python SDK's console exporter",
        holds="traces",
        version="opentelemetry-sdk 1.45",
        source="https://opentelemetry-python.readthedocs.io/en/latest/sdk/trace.export.html",
        find=lambda head: bool(_FIND.search(head)),
        read=lambda content, most_bytes: joined(_spans(_documents(lines_in(content, most_bytes), most_bytes))),
    )
)

_RESOURCE_SPANS_START = rb'\{\s*"(?:resource"\s*:\s*\{|scopeSpans"\s*:\s*\[)'
_FIND_JAVA = re.compile(rb"(?:^|\n)(?:[A-Z]{4,7}: |\[[^\n{]{0,200}|[0-9][^\n{]{0,200})?" + _RESOURCE_SPANS_START)
_JAVA_LINE = re.compile(_RESOURCE_SPANS_START)


def _java(lines: Iterator[bytes | Gap]) -> Iterator[bytes | Gap]:
    for line in lines:
        if isinstance(line, Gap):
            yield line
        elif b'"scopeSpans"' in line and (match := _JAVA_LINE.search(line)):
            yield b'{"resourceSpans":[%b]}\n' % line[match.start() :].rstrip()


def _is_java(head: bytes) -> bool:
    return b'"scopeSpans"' in head and b'"resourceSpans"' not in head and bool(_FIND_JAVA.search(head))


JAVA = register(
    Container(
        name="java",
        title="a ResourceSpans a line, as Java's logging exporter writes them",
        holds="traces",
        version="OTLP 1",
        source="https://opentelemetry.io/docs/languages/java/configuration/#properties-exporters",
        find=_is_java,
        read=lambda content, most_bytes: joined(_java(lines_in(content, most_bytes))),
    )
)
