"""Decode OTLP JSON as exporters write it, with typed structs down to the event.

The attributes of spans and events stay JSON text: `layouts` reads them column by column. A record that these structs
refuse (snake_case keys, nulls, base64 ids, damage) goes through `json_normaliser`, which returns the same spans.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode
from functools import cache
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta, Raw

from tracefit.otlp.model import (
    INT64_MAX,
    KINDS,
    STATUS_CODES,
    Events,
    FieldError,
    Origin,
    Pairs,
    Plain,
    Scalar,
    Span,
    SpanGroup,
    check_depth,
    enum_number,
    finite,
    nested_text,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Iterator

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Nanos = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]

_HEX_IDS = re.compile("(?:[0-9a-f]{16})*")
_UPPER_CASE = re.compile("[A-F]")
_IGNORED = Raw(b"null")
_UNSET = Raw(b"")
_NO_ATTRIBUTES = Raw(b"[]")
_NOTHING = Raw(b"{}")


class _Struct(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Structs with all fields of OTLP; any other key sends the record to the careful reader. They form no cycles (`gc`)."""


class Value(_Struct, frozen=True):
    """An attribute value; a nested one stays JSON text."""

    int_value: Int64 | None = None
    double_value: float | None = None
    bool_value: bool | None = None
    string_value: str | None = None
    array_value: Raw = _UNSET
    kvlist_value: Raw = _UNSET
    bytes_value: Raw = _UNSET

    def scalar(self) -> Scalar:
        """Return the value that is set; the first, if a record sets several, which OTLP does not allow.

        Raises:
            FieldError: A nested value is not valid.
        """
        for value in (self.int_value, self.double_value, self.bool_value, self.string_value):
            if value is not None:
                return value
        nested = _plain_nested(self, 1)
        return nested if isinstance(nested, str) or nested is None else nested_text(nested)


class KeyValue(_Struct, frozen=True):
    """An attribute."""

    key: str = ""
    value: Value = Value()


class Event(_Struct, frozen=True):
    """A span event; its attributes stay JSON text."""

    time_unix_nano: Nanos = 0
    name: str = ""
    attributes: Raw = _NO_ATTRIBUTES
    dropped_attributes_count: Count = 0


class Status(_Struct, frozen=True):
    """The status of a span."""

    code: Int32 | str = 0
    message: str = ""


class SpanStruct(_Struct, frozen=True):
    """A span as exporters write it; its ids are not checked yet."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str = ""
    kind: Int32 | str = 0
    start_time_unix_nano: Nanos = 0
    end_time_unix_nano: Nanos = 0
    attributes: Raw = _NO_ATTRIBUTES
    events: list[Event] = []
    dropped_attributes_count: Count = 0
    dropped_events_count: Count = 0
    status: Status = Status()
    trace_state: Raw = _IGNORED
    flags: Raw = _IGNORED
    links: Raw = _IGNORED
    dropped_links_count: Raw = _IGNORED


class Scope(_Struct, frozen=True):
    """An instrumentation scope."""

    name: str = ""
    version: Raw = _IGNORED
    attributes: Raw = _IGNORED
    dropped_attributes_count: Raw = _IGNORED


class _ScopeSpans(_Struct, frozen=True):
    spans: list[SpanStruct] = []
    scope: Scope = Scope()
    schema_url: Raw = _IGNORED


class Resource(_Struct, frozen=True):
    """The resource that spans come from."""

    attributes: list[KeyValue] = []
    dropped_attributes_count: Raw = _IGNORED
    entity_refs: Raw = _IGNORED


class _ResourceSpans(_Struct, frozen=True):
    scope_spans: list[_ScopeSpans] = []
    resource: Resource = Resource()
    schema_url: Raw = _IGNORED


class _TracesData(_Struct, frozen=True):
    resource_spans: list[_ResourceSpans]


class _UnreadScopeSpans(_Struct, frozen=True):
    spans: list[Raw] = []
    scope: Raw = _NOTHING
    schema_url: Raw = _IGNORED


class _UnreadResourceSpans(_Struct, frozen=True):
    scope_spans: list[_UnreadScopeSpans] = []
    resource: Raw = _NOTHING
    schema_url: Raw = _IGNORED


class _UnreadTraces(_Struct, frozen=True):
    """A record whose spans stay JSON text."""

    resource_spans: list[_UnreadResourceSpans]


class ValueList(_Struct, frozen=True):
    """The values of an array."""

    values: list[Value] = []


class KeyValueList(_Struct, frozen=True):
    """The pairs of a key-value list."""

    values: list[KeyValue] = []


_LONG_BYTES, _SHORTEST_OBJECT = 4 << 20, 14
_EMPTY_RECORDS = (b"{}", b"[]")

_PIECE_BYTES = 4 << 20
"""Bytes of spans of a piece of a long record: those of a hundred bytes each take ten times as much when decoded."""

_MOST_SHARED_BYTES = 64 << 10
"""Bytes of resource and scope of a record that is split: each piece repeats them."""

# Not strict: OTLP writes 64-bit integers as strings, which msgspec then converts without a Python str in between.
_RECORDS = msgspec.json.Decoder(_TracesData, strict=False)
_UNREAD = msgspec.json.Decoder(_UnreadTraces)
_SPANS = msgspec.json.Decoder(SpanStruct, strict=False)
_PAIRS = msgspec.json.Decoder(list[KeyValue], strict=False)
_LISTS = msgspec.json.Decoder(ValueList, strict=False)
_KEY_VALUE_LISTS = msgspec.json.Decoder(KeyValueList, strict=False)


@cache
def fields_read(struct: type[msgspec.Struct]) -> list[str]:
    """Return the keys of a struct that are not ignored."""
    return [each.encode_name for each in msgspec.structs.fields(struct) if each.default is not _IGNORED]


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for text that is not JSON, or not of the wanted type."""


def field_of(error: Exception) -> str:
    """Return the name of the field that msgspec has refused, for a message."""
    names = re.findall(r"\.(\w+)", str(error).rpartition(" at `$")[2])
    return names[-1] if names else "value"


def is_mostly_empty(payload: bytes) -> bool:
    """Return whether a long record has more objects than real spans and events of its length can have.

    The shortest attribute takes 17 bytes for each of its two objects. Decoded, empty objects take many times their length
    in memory, so that a hostile record of them is refused.
    """
    size = len(payload)
    return size > _LONG_BYTES and (
        payload.count(b"{") * _SHORTEST_OBJECT > size or payload.count(b"[") * 8 > size
    )


def split_record(payload: bytes) -> Iterator[tuple[int, bytes]] | None:
    """Split a long record into shorter ones, so that not all of its spans are in memory decoded at once.

    Returns:
        Records, each with the number of its first span; None if the record is read whole: a short one, or one whose upper
        levels are not as exporters write them.
    """
    if len(payload) <= 2 * _PIECE_BYTES or is_mostly_empty(payload):
        return None
    try:
        resources = _UNREAD.decode(payload).resource_spans
    except DECODE_ERRORS:
        return None
    if any(
        len(each.resource) + len(group.scope) > _MOST_SHARED_BYTES
        for each in resources
        for group in each.scope_spans
    ):
        return None
    return _pieces(resources)


def _pieces(resources: list[_UnreadResourceSpans]) -> Iterator[tuple[int, bytes]]:
    frame = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":%b,"spans":[%b]}]}]}'
    number = 0
    for each in resources:
        for group in each.scope_spans:
            held: list[Raw] = []
            size = 0
            for place, span in enumerate(group.spans, start=1):
                held.append(span)
                size += len(span)
                if size >= _PIECE_BYTES or place == len(group.spans):
                    yield number, frame % (each.resource, group.scope, b",".join(held))
                    number += len(held)
                    held, size = [], 0


def read_record(payload: bytes) -> list[SpanGroup] | None:
    """Decode a record as exporters write it; attributes are not checked yet.

    Returns:
        Its spans; None if the careful reader must decide whether the record is good or bad.
    """
    if payload in _EMPTY_RECORDS:
        return []
    if is_mostly_empty(payload):
        return None
    try:
        data = _RECORDS.decode(payload)
        return [
            group
            for resource_spans in data.resource_spans
            if (group_spans := resource_spans.scope_spans)
            for group in _groups(resource_spans.resource, group_spans)
        ]
    except (FieldError, *DECODE_ERRORS):
        return None


def read_span(raw: Raw) -> Span:
    """Decode one span as exporters write it, the attributes of its events included.

    Raises:
        FieldError: An id or an attribute is not valid.
        DecodeError: Any other field is not valid; also UnicodeDecodeError and RecursionError.
    """
    span = _SPANS.decode(raw)
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        read_pairs(attributes)
    return _checked([span])[0]


def _groups(resource: Resource, scope_spans: list[_ScopeSpans]) -> list[SpanGroup]:
    pairs = [(attribute.key, attribute.value.string_value) for attribute in resource.attributes]
    return [
        SpanGroup(Origin.of(pairs, each.scope.name), _checked(each.spans))
        for each in scope_spans
        if each.spans
    ]


def _checked(spans: list[SpanStruct]) -> list[Span]:
    """Return checked spans, their ids in lower case.

    Raises:
        FieldError: An id is not hex or all zero, or an enum has an unknown name.
    """
    traces, ids = [span.trace_id for span in spans], [span.span_id for span in spans]
    parents = [span.parent_span_id for span in spans if span.parent_span_id]
    sizes_fit = set(map(len, traces)) == {32} and {*map(len, ids), *map(len, parents), 16} == {16}
    # One regex over all ids joined: a thousand are checked in the time of a few. Sizes are checked before, so that
    # the groups of 16 digits fall on the edges of the ids.
    every = "".join([*traces, *ids, *parents])
    is_upper = _UPPER_CASE.search(every) is not None
    if not (sizes_fit and _HEX_IDS.fullmatch(every.lower() if is_upper else every)):
        raise FieldError("ids are not hex")
    if "0" * 32 in traces or "0" * 16 in ids or "0" * 16 in parents:
        raise FieldError("an id is all zero")
    return [
        Span(
            span.trace_id.lower() if is_upper else span.trace_id,
            span.span_id.lower() if is_upper else span.span_id,
            span.parent_span_id.lower() if is_upper else span.parent_span_id,
            span.name,
            enum_number(span.kind, "SPAN_KIND_", KINDS),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.attributes,
            span.events,
            span.dropped_attributes_count,
            span.dropped_events_count,
            enum_number(span.status.code, "STATUS_CODE_", STATUS_CODES),
            span.status.message,
        )
        for span in spans
    ]


def _plain_nested(value: Value, depth: int) -> Plain:
    """Return a nested value as plain JSON; None if nothing is set.

    Raises:
        FieldError: It is not valid, or nested too deep.
    """
    check_depth(depth)
    try:
        if value.array_value is not _UNSET:
            return [_plain(each, depth + 1) for each in _LISTS.decode(value.array_value).values]
        if value.kvlist_value is not _UNSET:
            pairs = _KEY_VALUE_LISTS.decode(value.kvlist_value).values
            return {each.key: _plain(each.value, depth + 1) for each in pairs}
        if value.bytes_value is _UNSET:
            return None
        return b64encode(from_base64(msgspec.json.decode(value.bytes_value, type=str), "bytesValue")).decode()
    except DECODE_ERRORS as error:
        raise FieldError("value is not valid") from error


def _plain(value: Value, depth: int) -> Plain:
    for scalar in (value.int_value, value.bool_value, value.string_value):
        if scalar is not None:
            return scalar
    return _plain_nested(value, depth) if value.double_value is None else finite(value.double_value)


def from_base64(encoded: str, name: str) -> bytes:
    """Decode base64 of either alphabet, padded or not.

    Raises:
        FieldError: It is not base64.
    """
    decode = urlsafe_b64decode if "-" in encoded or "_" in encoded else b64decode
    try:
        return decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError as error:
        raise FieldError(f"{name} is not base64") from error


def event_columns(events: list[Event]) -> Events:
    """Return events as columns; none is odd or bad, as their attributes are not read yet."""
    return Events(
        [event.name for event in events],
        np.array([event.time_unix_nano for event in events], np.int64),
        PackedTexts.of([event.attributes for event in events]),
        np.array([event.dropped_attributes_count for event in events], np.int64),
        {},
        [],
    )


def read_pairs(attributes: bytes | Raw) -> Pairs:
    """Return keys and values of the attributes of one event.

    Raises:
        FieldError: They are written in an unusual way.
    """
    try:
        return [(each.key, each.value.scalar()) for each in _PAIRS.decode(attributes)]
    except DECODE_ERRORS as error:
        raise FieldError(f"{field_of(error)} is not valid") from error
