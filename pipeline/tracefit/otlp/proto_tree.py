"""From records down to spans, events and attributes, level by level, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from tracefit.otlp.model import FieldError, Origin, Pairs, UncheckedAttributeError, origin_of
from tracefit.otlp.octets import Octets
from tracefit.otlp.proto_attributes import Attributes, read_attributes
from tracefit.otlp.proto_events import Events, read_events
from tracefit.otlp.proto_general import read_pairs
from tracefit.otlp.proto_level import Level
from tracefit.otlp.proto_schema import Resource, Scope
from tracefit.otlp.proto_walk import Messages, UnusualRecordsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.otlp.octets import Positions
    from tracefit.sources.records import Frame

_RESOURCE_SPANS = 0x0A
_RESOURCE, _SCOPE_SPANS = 0x0A, 0x12
_SCOPE, _SPANS = 0x0A, 0x12


_T = TypeVar("_T")


class SpanTag:
    """Tags of `Span`."""

    TRACE_ID, SPAN_ID, PARENT_SPAN_ID, NAME = 0x0A, 0x12, 0x22, 0x2A
    KIND, START_TIME, END_TIME = 0x30, 0x39, 0x41
    ATTRIBUTES, DROPPED_ATTRIBUTES, EVENTS, DROPPED_EVENTS, STATUS = 0x4A, 0x50, 0x5A, 0x60, 0x7A
    ALL = (
        TRACE_ID, SPAN_ID, PARENT_SPAN_ID, NAME, KIND, START_TIME, END_TIME,
        ATTRIBUTES, DROPPED_ATTRIBUTES, EVENTS, DROPPED_EVENTS, STATUS,
    )  # fmt: skip


class StatusTag:
    """Tags of `Status`."""

    MESSAGE, CODE = 0x12, 0x18
    ALL = (MESSAGE, CODE)


@dataclass(frozen=True, slots=True)
class Tree:
    """What is in some records.

    Attributes:
        octets: The bytes that everything else points into.
        origins: Of each group of spans that have one origin.
        origin: Number of each span's origin; shape (spans,).
        spans: The spans.
        statuses: Their statuses, empty where there is none.
        span_attributes: Their attributes, in order.
        span: Which span each event is of; shape (events,).
        events: The events.
    """

    octets: Octets
    origins: list[Origin]
    origin: Positions
    spans: Level
    statuses: Level
    span_attributes: Attributes
    span: Positions
    events: Events


def read_tree(frames: Sequence[Frame]) -> Tree:
    """Walk through records.

    Args:
        frames: Protobuf frames, one at least.

    Raises:
        UnusualRecordsError: If some are to be decoded by the general way; their numbers are those of the frames.
    """
    octets, starts, stops = Octets.of([frame.payload for frame in frames])
    records = Level.of(octets, Messages(np.arange(len(frames)), starts, stops), (_RESOURCE_SPANS,))
    _, messages = records.children(_RESOURCE_SPANS)
    resources = Level.of(octets, messages[messages.start < messages.stop], (_RESOURCE, _SCOPE_SPANS))
    resource, messages = resources.children(_SCOPE_SPANS)
    has_any = messages.start < messages.stop
    resource, messages = resource[has_any], messages[has_any]
    scopes = Level.of(octets, messages, (_SCOPE, _SPANS))
    origins = _origins(frames, resources, resource, scopes)
    origin, messages = scopes.children(_SPANS)
    spans = Level.of(octets, messages, SpanTag.ALL)
    starts, sizes = spans.stretches(SpanTag.STATUS)
    statuses = Level.of(octets, Messages(messages.record, starts, starts + sizes), StatusTag.ALL)
    owner, messages = spans.children(SpanTag.ATTRIBUTES)
    span_attributes = read_attributes(octets, owner, messages)
    span, messages = spans.children(SpanTag.EVENTS)
    events = read_events(octets, messages)
    return Tree(octets, origins, origin, spans, statuses, span_attributes, span, events)


def _origins(frames: Sequence[Frame], resources: Level, resource: Positions, scopes: Level) -> list[Origin]:
    """Return the origin of each scope's spans."""
    attributes = _parsed(resources, _RESOURCE, _attributes_of_resource)
    names = _parsed(scopes, _SCOPE, _name_of_scope)
    return [
        origin_of(frames[record].source_file, frames[record].offset, attributes[number], name)
        for record, number, name in zip(
            scopes.messages.record.tolist(), resource.tolist(), names, strict=True
        )
    ]


def _parsed(level: Level, tag: int, parse: Callable[[bytes], _T]) -> list[_T]:
    """Parse a field of each message, of which few differ."""
    starts, sizes = level.stretches(tag)
    known: dict[bytes, _T] = {}
    found, unusual = [], []
    stretches = zip(level.messages.record.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
    for record, start, stop in stretches:
        text = level.octets.data[start:stop]
        try:
            if text not in known:
                known[text] = parse(text)
            found.append(known[text])
        except (DecodeError, FieldError, UncheckedAttributeError):
            unusual.append(record)
    if unusual:
        raise UnusualRecordsError(np.array(unusual))
    return found


def _attributes_of_resource(resource: bytes) -> Pairs:
    return read_pairs(Resource.FromString(resource).attributes)


def _name_of_scope(scope: bytes) -> str:
    return str(Scope.FromString(scope).name)
