"""Spans as data, independent of how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

Value: TypeAlias = str | int | float
"""A scalar attribute value; its Python type is its kind on the wire."""


class SpanKind(IntEnum):
    """OTLP span kinds that occur here."""

    INTERNAL = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes in order; events of one kind share one tuple of keys.

    Attributes:
        keys: The keys.
        values: Their values.
    """

    keys: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    def as_dict(self) -> dict[str, Value]:
        """Return them as a dictionary."""
        return dict(zip(self.keys, self.values, strict=True))


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
    if limit is None or len(events) <= limit:
        return tuple(events), 0
    return tuple(events[-limit:]), len(events) - limit
