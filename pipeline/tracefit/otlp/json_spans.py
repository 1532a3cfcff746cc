"""Spans of OTLP JSON in any spelling: as `json_fast` reads them, and field by field where that fails."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from tracefit.otlp.json_attributes import READER, attributes_json
from tracefit.otlp.json_fast import Event, UsualSpan, has_plain_ids, span_of
from tracefit.otlp.json_values import (
    Count,
    Int32,
    Json,
    Nanos,
    as_object,
    child,
    from_base64,
    get,
    items,
    number,
    read_attributes,
    text,
)
from tracefit.otlp.model import FieldError, Span, UncheckedAttributeError

SHORTEST_SPAN = len(b'{"spanId":"","traceId":""}') + 11 + 22
"""Bytes of the shortest text that can be a span: its two ids are base64 without padding."""

_HEX = re.compile("[0-9a-fA-F]+")
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUS_CODES = ("UNSET", "OK", "ERROR")


class _Events(msgspec.Struct, gc=False, frozen=True):
    events: list[Raw] = []


_SPANS = msgspec.json.Decoder(UsualSpan, strict=False)
_EVENTS = msgspec.json.Decoder(Event, strict=False)
_EVENT_LISTS = msgspec.json.Decoder(_Events)
_UNUSUAL = (FieldError, UncheckedAttributeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_span(raw: Raw, *, judge: bool = True) -> Span:
    """Read a span.

    Args:
        raw: Its text.
        judge: Whether anybody wants to know what is wrong with it.

    Raises:
        FieldError: If it is not valid.
        ValueError: If it is not JSON; `RecursionError` if it is nested beyond what the parser does.
    """
    try:
        usual = _SPANS.decode(raw)
        if not has_plain_ids(usual):
            usual = _with_plain_ids(usual)
    except FieldError:
        if not judge:
            raise
        return _span(raw)
    except _UNUSUAL:
        return _span(raw)
    try:
        for event in usual.events:
            READER.pairs(event.attributes)
        return span_of(usual)
    except _UNUSUAL:
        return _span(raw)


def _with_plain_ids(span: UsualSpan) -> UsualSpan:
    ids = {"traceId": span.trace_id, "spanId": span.span_id, "parentSpanId": span.parent_span_id}
    return msgspec.structs.replace(
        span,
        trace_id=_id(ids, "traceId", 16),
        span_id=_id(ids, "spanId", 8),
        parent_span_id=_parent_id(ids),
    )


def _span(raw: Raw) -> Span:
    span = as_object(msgspec.json.decode(raw), "it")
    status = child(span, "status")
    return Span(
        trace_id=_id(span, "traceId", 16),
        span_id=_id(span, "spanId", 8),
        parent_span_id=_parent_id(span),
        name=text(span, "name"),
        kind=_enum(span, "kind", "SPAN_KIND_", _KINDS),
        start_time_unix_nano=number(span, "startTimeUnixNano", Nanos),
        end_time_unix_nano=number(span, "endTimeUnixNano", Nanos),
        attributes=read_attributes(span),
        events=[_event(event) for event in _EVENT_LISTS.decode(raw).events] if items(span, "events") else [],
        dropped_attributes_count=number(span, "droppedAttributesCount", Count),
        dropped_events_count=number(span, "droppedEventsCount", Count),
        status_code=_enum(status, "code", "STATUS_CODE_", _STATUS_CODES),
        status_message=text(status, "message"),
    )


def _event(raw: Raw) -> Event:
    try:
        usual = _EVENTS.decode(raw)
        READER.pairs(usual.attributes)
    except _UNUSUAL:
        return _unusual_event(msgspec.json.decode(raw))
    return usual


def _unusual_event(tree: Any) -> Event:
    event = as_object(tree, "events")
    return Event(
        time_unix_nano=number(event, "timeUnixNano", Nanos),
        name=text(event, "name"),
        attributes=attributes_json(read_attributes(event)),
        dropped_attributes_count=number(event, "droppedAttributesCount", Count),
    )


def _enum(owner: Json, name: str, prefix: str, names: tuple[str, ...]) -> int:
    value = get(owner, name)
    if isinstance(value, str) and value.removeprefix(prefix) in names:
        return names.index(value.removeprefix(prefix))
    return number(owner, name, Int32)


def _id(owner: Json, name: str, size: int) -> str:
    plain = _hex_id(owner, name, size)
    if not plain.strip("0"):
        raise FieldError(f"{name} is all zero")
    return plain


def _parent_id(span: Json) -> str:
    plain = _hex_id(span, "parentSpanId", 8) if text(span, "parentSpanId") else ""
    return plain if plain.strip("0") else ""


def _hex_id(owner: Json, name: str, size: int) -> str:
    """Read an id of `size` bytes as lower-case hex: it comes as hex, or as base64, which is shorter."""
    spelled = text(owner, name)
    if len(spelled) == 2 * size and _HEX.fullmatch(spelled):
        return spelled.lower()
    plain = from_base64(spelled, name).hex() if len(spelled) < 2 * size else ""
    if len(plain) != 2 * size:
        raise FieldError(f"{name} is not {size} bytes of hex or base64")
    return plain
