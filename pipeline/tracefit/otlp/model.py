"""Spans between wire and columns: what the JSON and protobuf decoders both hand to the column builder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tracefit.errors import TracefitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

    from tracefit.sources.records import Reject

INT64_MAX = 2**63 - 1
UINT32_MAX = 2**32 - 1

Scalar = int | float | bool | str | None
"""An attribute's value: of the four scalar kinds, JSON text (a str) for nested ones, None for an empty one."""

Pairs = list[tuple[str, Scalar]]
"""Attributes in the order of the wire."""


class FieldError(TracefitError):
    """A field has a value that OTLP does not allow; the message names the field, not the value."""


class UncheckedAttributeError(TracefitError):
    """An attribute that was taken on trust cannot be read: its batch has to be decoded with checks."""


class TooMuchError(TracefitError):
    """Records have more fields or events together than are held at a time."""

    def __init__(self) -> None:
        super().__init__("too much in these records together")


class EventLike(Protocol):
    """An event as decoded; `attributes` are whatever the encoding's `AttributeReader` reads."""

    @property
    def time_unix_nano(self) -> int:
        """When it happened; 0 if that is unset."""
        ...

    @property
    def name(self) -> str:
        """What happened."""
        ...

    @property
    def attributes(self) -> Any:
        """The attributes, still encoded."""
        ...

    @property
    def dropped_attributes_count(self) -> int:
        """How many attributes the emitter left out."""
        ...


class Span(msgspec.Struct, frozen=True):
    """A span that has been checked: ids are lower-case hex, or empty for no parent; times are within int64.

    Events are as they were parsed, for there are many of them.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_time_unix_nano: int
    end_time_unix_nano: int
    attributes: Pairs
    events: Sequence[EventLike]
    dropped_attributes_count: int
    dropped_events_count: int
    status_code: int
    status_message: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where spans come from: what their resource and scope say, and the record they were in."""

    source_file: str
    source_offset: int
    service_name: str | None = None
    service_instance_id: str | None = None
    host_name: str | None = None
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans of one origin, in the record's order."""

    origin: Origin
    spans: list[Span]


@dataclass(slots=True)
class Decoded:
    """What was in some records.

    Attributes:
        groups: The good spans.
        rejects: What is wrong with others.
        more: How many bad spans there are besides.
    """

    groups: list[SpanGroup] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    more: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Attribute columns of events that are alike.

    Attributes:
        rows: Which of the events, ascending.
        columns: Attribute key to a column without nulls, as long as `rows`; None if the events are to be read one
            by one.
    """

    rows: NDArray[np.int64]
    columns: dict[str, pl.Series] | None


class AttributeReader(Protocol):
    """Reads the attributes of events of one encoding."""

    def pairs(self, attributes: Any) -> Pairs:
        """Return keys and values of one event, in order."""
        ...

    def parts(self, attributes: list[Any]) -> list[Part]:
        """Read the attributes of many events at once.

        Args:
            attributes: Those of each event.

        Returns:
            Parts that have every event once: those with the same keys, in the same order and of the same kinds, as
            columns, the others left over.
        """
        ...


def origin_of(source_file: str, source_offset: int, resource: Pairs, scope: str) -> Origin:
    """Make the origin of a scope's spans from its resource's attributes; what is not a string is unset."""
    named = {key: value or None for key, value in resource if isinstance(value, str)}
    return Origin(
        source_file,
        source_offset,
        named.get("service.name"),
        named.get("service.instance.id"),
        named.get("host.name") or named.get("host.id"),
        scope or None,
    )
