"""OTLP JSON as exporters write it, decoded straight into typed structs.

A payload with anything else in it (other key spellings, nulls, ids that are not lower-case hex) does not decode here,
by construction: unknown keys are refused. `json_general` reads those.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from tracefit.otlp.json_attributes import READER, ScalarValue
from tracefit.otlp.json_values import Count, Int32, Nanos, read_value
from tracefit.otlp.model import (
    Decoded,
    FieldError,
    Pairs,
    Scalar,
    Span,
    SpanGroup,
    UncheckedAttributeError,
    origin_of,
)

if TYPE_CHECKING:
    from tracefit.sources.records import Frame

_HEX_TRACE_ID = re.compile("[0-9a-f]{32}")
_HEX_SPAN_ID = re.compile("[0-9a-f]{16}")
_ZERO_TRACE_ID = "0" * 32
_ZERO_SPAN_ID = "0" * 16
_IGNORED = Raw(b"null")
_NO_VALUE = Raw(b"")


class _Unusual(Exception):  # noqa: N818 - no error: the general decoder is to look at the record
    pass


class Event(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A span event; its attributes are left as JSON text."""

    time_unix_nano: Nanos = 0
    name: str = ""
    attributes: Raw = Raw(b"[]")
    dropped_attributes_count: Count = 0


class _Value(ScalarValue, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    array_value: Raw = _NO_VALUE
    kvlist_value: Raw = _NO_VALUE
    bytes_value: Raw = _NO_VALUE


class _Attribute(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    key: str
    value: _Value


class _Status(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    code: Int32 = 0
    message: str = ""


class UsualSpan(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A span as exporters write it; its ids are not checked yet."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str = ""
    kind: Int32 = 0
    start_time_unix_nano: Nanos = 0
    end_time_unix_nano: Nanos = 0
    attributes: list[_Attribute] = []
    events: list[Event] = []
    dropped_attributes_count: Count = 0
    dropped_events_count: Count = 0
    status: _Status = _Status()
    trace_state: Raw = _IGNORED
    flags: Raw = _IGNORED
    links: Raw = _IGNORED
    dropped_links_count: Raw = _IGNORED


class _Scope(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    name: str = ""
    version: Raw = _IGNORED
    attributes: Raw = _IGNORED
    dropped_attributes_count: Raw = _IGNORED


class _ScopeSpans(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    spans: list[UsualSpan] = []
    scope: _Scope = _Scope()
    schema_url: Raw = _IGNORED


class _ResourceValue(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    string_value: str = ""
    int_value: Raw = _IGNORED
    double_value: Raw = _IGNORED
    bool_value: Raw = _IGNORED
    array_value: Raw = _IGNORED
    kvlist_value: Raw = _IGNORED
    bytes_value: Raw = _IGNORED


class _ResourceAttribute(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    key: str
    value: _ResourceValue


class _Resource(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    attributes: list[_ResourceAttribute] = []
    dropped_attributes_count: Raw = _IGNORED
    entity_refs: Raw = _IGNORED


class _ResourceSpans(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    scope_spans: list[_ScopeSpans] = []
    resource: _Resource = _Resource()
    schema_url: Raw = _IGNORED


class _TracesData(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    resource_spans: list[_ResourceSpans]


# Not strict: 64-bit integers come as strings, which msgspec then converts without a Python str in between.
_DECODER = msgspec.json.Decoder(_TracesData, strict=False)


def decode_fast(frame: Frame, *, check_events: bool) -> Decoded | None:
    """Decode a record of the usual form.

    Args:
        frame: A JSON frame.
        check_events: Whether to read the attributes of events too. Else the column builder may find that they cannot
            be read.

    Returns:
        Its spans; None if the record has to be looked at by the general decoder, which may find it good or bad.
    """
    try:
        data = _DECODER.decode(frame.payload)
        return Decoded(
            [
                group
                for item in data.resource_spans
                if item.scope_spans
                for group in _groups(frame, item, check_events)
            ]
        )
    except (
        _Unusual,
        FieldError,
        UncheckedAttributeError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ):
        return None


def _groups(frame: Frame, item: _ResourceSpans, check_events: bool) -> list[SpanGroup]:
    resource: Pairs = [(a.key, a.value.string_value) for a in item.resource.attributes]
    groups = []
    for scope_spans in item.scope_spans:
        if not scope_spans.spans:
            continue
        if check_events:
            for event in [event for span in scope_spans.spans for event in span.events]:
                READER.pairs(event.attributes)
        origin = origin_of(frame.source_file, frame.offset, resource, scope_spans.scope.name)
        groups.append(SpanGroup(origin, [_checked(span) for span in scope_spans.spans]))
    return groups


def _checked(span: UsualSpan) -> Span:
    if not has_plain_ids(span):
        raise _Unusual
    return span_of(span)


def span_of(span: UsualSpan) -> Span:
    """Return a span whose ids are plain.

    Raises:
        FieldError: If an attribute is not valid.
    """
    return Span(
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.name,
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        [(attribute.key, _plain_value(attribute.value)) for attribute in span.attributes],
        span.events,
        span.dropped_attributes_count,
        span.dropped_events_count,
        span.status.code,
        span.status.message,
    )


def has_plain_ids(span: UsualSpan) -> bool:
    """Return whether the ids of a span are lower-case hex, and not all zero."""
    parent = span.parent_span_id
    return (
        _HEX_TRACE_ID.fullmatch(span.trace_id) is not None
        and _HEX_SPAN_ID.fullmatch(span.span_id) is not None
        and (not parent or (_HEX_SPAN_ID.fullmatch(parent) is not None and parent != _ZERO_SPAN_ID))
        and span.trace_id != _ZERO_TRACE_ID
        and span.span_id != _ZERO_SPAN_ID
    )


def _plain_value(value: _Value) -> Scalar:
    scalar = value.scalar()
    if scalar is not None:
        return scalar
    nested = {
        "arrayValue": value.array_value,
        "kvlistValue": value.kvlist_value,
        "bytesValue": value.bytes_value,
    }
    return read_value(
        {kind: msgspec.json.decode(raw) for kind, raw in nested.items() if raw is not _NO_VALUE}
    )
