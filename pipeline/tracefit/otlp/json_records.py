"""Read OTLP JSON: quickly where records are as exporters write them, with care where spellings are unusual or bytes damaged.

The quick reader has typed structs down to the event; the attributes of spans and events stay JSON text, which `layouts`
reads column by column. A record that these structs refuse goes through the careful reader, which accepts the output of the
Collector, of Tempo and of hand-saved files: snake_case keys, base64 ids, nulls, numbers for strings and strings for
numbers, names of enums, Tempo's envelopes, arrays of records, records glued together or cut. It brings each span into the
usual form, so that both readers return the same spans; a bad span costs itself and not its siblings.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw

from tracefit.inputs.framing import BOM, RECORD_START
from tracefit.otlp.model import (
    ID_BYTES,
    INT64_MAX,
    KINDS,
    STATUS_CODES,
    AttributeValue,
    CheckedRecord,
    Events,
    FieldError,
    MakeReject,
    Origin,
    Pairs,
    Plain,
    Span,
    SpanGroup,
    UnreadScope,
    check_depth,
    enum_number,
    finite,
    nested_text,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.inputs.rejects import Reject

_Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
_Nanos = Annotated[int, Meta(ge=0, le=INT64_MAX)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]

_HEX_IDS = re.compile("(?:[0-9a-f]{16})*")
_UPPER_CASE = re.compile("[A-F]")
_IGNORED = Raw(b"null")
_UNSET = Raw(b"")
_NO_ATTRIBUTES = Raw(b"[]")
_NOTHING = Raw(b"{}")


class _Struct(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Structs with all fields of OTLP; any other key sends the record to the careful reader. They form no cycles (`gc`)."""


class _Value(_Struct, frozen=True):
    """An attribute value; a nested one stays JSON text."""

    int_value: _Int64 | None = None
    double_value: float | None = None
    bool_value: bool | None = None
    string_value: str | None = None
    array_value: Raw = _UNSET
    kvlist_value: Raw = _UNSET
    bytes_value: Raw = _UNSET

    def scalar(self) -> AttributeValue:
        """Return the value that is set; the first, if a record sets several, which OTLP does not allow."""
        for value in (self.int_value, self.double_value, self.bool_value, self.string_value):
            if value is not None:
                return value
        nested = _plain_nested(self, 1)
        return nested if isinstance(nested, str) or nested is None else nested_text(nested)


class _KeyValue(_Struct, frozen=True):
    key: str = ""
    value: _Value = _Value()


class _Event(_Struct, frozen=True):
    """A span event; its attributes stay JSON text."""

    time_unix_nano: _Nanos = 0
    name: str = ""
    attributes: Raw = _NO_ATTRIBUTES
    dropped_attributes_count: _Count = 0


class _Status(_Struct, frozen=True):
    code: _Int32 | str = 0
    message: str = ""


class _Span(_Struct, frozen=True):
    """A span as exporters write it; its ids are not checked yet."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str = ""
    kind: _Int32 | str = 0
    start_time_unix_nano: _Nanos = 0
    end_time_unix_nano: _Nanos = 0
    attributes: Raw = _NO_ATTRIBUTES
    events: list[_Event] = []
    dropped_attributes_count: _Count = 0
    dropped_events_count: _Count = 0
    status: _Status = _Status()
    trace_state: Raw = _IGNORED
    flags: Raw = _IGNORED
    links: Raw = _IGNORED
    dropped_links_count: Raw = _IGNORED


class _Scope(_Struct, frozen=True):
    name: str = ""
    version: Raw = _IGNORED
    attributes: Raw = _IGNORED
    dropped_attributes_count: Raw = _IGNORED


class _ScopeSpans(_Struct, frozen=True):
    spans: list[_Span] = []
    scope: _Scope = _Scope()
    schema_url: Raw = _IGNORED


class _Resource(_Struct, frozen=True):
    attributes: list[_KeyValue] = []
    dropped_attributes_count: Raw = _IGNORED
    entity_refs: Raw = _IGNORED


class _ResourceSpans(_Struct, frozen=True):
    scope_spans: list[_ScopeSpans] = []
    resource: _Resource = _Resource()
    schema_url: Raw = _IGNORED


class _TracesData(_Struct, frozen=True):
    resource_spans: list[_ResourceSpans]


# A record whose spans stay JSON text.
class _UnreadScopeSpans(_Struct, frozen=True):
    spans: list[Raw] = []
    scope: Raw = _NOTHING
    schema_url: Raw = _IGNORED


class _UnreadResourceSpans(_Struct, frozen=True):
    scope_spans: list[_UnreadScopeSpans] = []
    resource: Raw = _NOTHING
    schema_url: Raw = _IGNORED


class _UnreadTraces(_Struct, frozen=True):
    resource_spans: list[_UnreadResourceSpans]


class _ValueList(_Struct, frozen=True):
    values: list[_Value] = []


class _KeyValueList(_Struct, frozen=True):
    values: list[_KeyValue] = []


_LONG_BYTES, _SHORTEST_OBJECT = 4 << 20, 14
_EMPTY_RECORDS = (b"{}", b"[]")

PIECE_BYTES = 4 << 20
"""Bytes of spans of a piece of a long record: those of a hundred bytes each take ten times as much when decoded."""

# Not strict: OTLP writes 64-bit integers as strings, which msgspec then converts without a Python str in between.
_RECORDS = msgspec.json.Decoder(_TracesData, strict=False)
_UNREAD = msgspec.json.Decoder(_UnreadTraces)
_SPANS = msgspec.json.Decoder(_Span, strict=False)
_PAIRS = msgspec.json.Decoder(list[_KeyValue], strict=False)
_LISTS = msgspec.json.Decoder(_ValueList, strict=False)
_KEY_VALUE_LISTS = msgspec.json.Decoder(_KeyValueList, strict=False)


_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for text that is not JSON, or not of the wanted type."""


def _field_of(error: Exception) -> str:
    """Return the name of the field that msgspec has refused, for a message."""
    names = re.findall(r"\.(\w+)", str(error).rpartition(" at `$")[2])
    return names[-1] if names else "value"


def _is_mostly_empty(payload: bytes) -> bool:
    """Return whether a long record has more objects than real spans and events of its length can have.

    The shortest attribute takes 17 bytes for each of its two objects. Decoded, empty objects take many times their length
    in memory, so that a hostile record of them is refused.
    """
    size = len(payload)
    return size > _LONG_BYTES and (
        payload.count(b"{") * _SHORTEST_OBJECT > size or payload.count(b"[") * 8 > size
    )


def unread_scopes(payload: bytes) -> list[UnreadScope] | None:
    """Return the scopes of a record, their spans still JSON text; None if its upper levels are not as exporters write them."""
    if _is_mostly_empty(payload):
        return None
    try:
        resources = _UNREAD.decode(payload).resource_spans
    except _DECODE_ERRORS:
        return None
    return [(each.resource, group.scope, group.spans) for each in resources for group in each.scope_spans]


def record_of(resource: bytes, scope: bytes, spans: Sequence[bytes]) -> bytes:
    """Return a record of unread spans of one scope."""
    frame = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":%b,"spans":[%b]}]}]}'
    return frame % (resource, scope, b",".join(spans))


def read_record(payload: bytes) -> list[SpanGroup] | None:
    """Decode a record as exporters write it; attributes are not checked yet.

    Returns:
        Its spans; None if the careful reader must decide whether the record is good or bad.
    """
    if payload in _EMPTY_RECORDS:
        return []
    if _is_mostly_empty(payload):
        return None
    try:
        data = _RECORDS.decode(payload)
        return [
            group
            for resource_spans in data.resource_spans
            if (group_spans := resource_spans.scope_spans)
            for group in _groups(resource_spans.resource, group_spans)
        ]
    except (FieldError, *_DECODE_ERRORS):
        return None


def _read_span(raw: Raw) -> Span:
    """Decode one span as exporters write it, the attributes of its events included.

    A FieldError names an id or an attribute that is not valid; for any other field it is one of `_DECODE_ERRORS`.
    """
    span = _SPANS.decode(raw)
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        read_pairs(attributes)
    return _checked([span])[0]


def _groups(resource: _Resource, scope_spans: list[_ScopeSpans]) -> list[SpanGroup]:
    pairs = [(attribute.key, attribute.value.string_value) for attribute in resource.attributes]
    return [
        SpanGroup(Origin.of(pairs, each.scope.name), _checked(each.spans))
        for each in scope_spans
        if each.spans
    ]


def _checked(spans: list[_Span]) -> list[Span]:
    """Return spans whose ids and enums are right, the ids in lower case; FieldError if one is not."""
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


def _plain_nested(value: _Value, depth: int) -> Plain:
    """Return a nested value as plain JSON; None if nothing is set."""
    check_depth(depth)
    try:
        if value.array_value is not _UNSET:
            return [_plain(each, depth + 1) for each in _LISTS.decode(value.array_value).values]
        if value.kvlist_value is not _UNSET:
            pairs = _KEY_VALUE_LISTS.decode(value.kvlist_value).values
            return {each.key: _plain(each.value, depth + 1) for each in pairs}
        if value.bytes_value is _UNSET:
            return None
        return b64encode(
            _from_base64(msgspec.json.decode(value.bytes_value, type=str), "bytesValue")
        ).decode()
    except _DECODE_ERRORS as error:
        raise FieldError("value is not valid") from error


def _plain(value: _Value, depth: int) -> Plain:
    for scalar in (value.int_value, value.bool_value, value.string_value):
        if scalar is not None:
            return scalar
    return _plain_nested(value, depth) if value.double_value is None else finite(value.double_value)


def event_columns(events: list[_Event]) -> Events:
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
    except _DECODE_ERRORS as error:
        raise FieldError(f"{_field_of(error)} is not valid") from error


# The careful reader. The upper levels of a record are split without parsing the levels below: a record can be long, and its
# spans are then parsed one by one, so that a bad one costs itself alone. What is not valid raises a FieldError, which becomes
# the reject of the item it is in.

_Json = dict[str, Any]

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_BETWEEN = b" \t\r\n,[]"
_MAX_ENVELOPES = 16
"""Nested envelopes around a record that are opened; Tempo writes one."""

_HEX = re.compile("[0-9a-fA-F]+")
_OTHER_SIGNALS = {"resourceLogs": "logs", "resourceMetrics": "metrics"}
_RECORD_KEYS = {"trace", "batches", "resourceSpans", "resource_spans"}


def check_record(payload: bytes, reject: MakeReject, max_rejects: int, first_span: int = 0) -> CheckedRecord:
    """Read one record, or the records glued together in one line or document.

    Args:
        payload: The record's text.
        reject: Makes a reject.
        max_rejects: Rejects after which reading the record stops.
        first_span: The number of its first span, by which rejects name spans.

    Returns:
        The good spans, and a reject for everything else.
    """
    if _is_mostly_empty(payload):
        return CheckedRecord([], [reject("more objects than spans and events of its length can have")])
    reader = _CarefulReader(payload, reject, max_rejects, first_span)
    with suppress(_TooManyRejectsError):
        reader.read()
    return CheckedRecord(reader.groups, reader.rejects)


class _TooManyRejectsError(Exception):
    """A record has more bad spans than a file may have rejects."""


class _CarefulReader:
    """Reads one record, and counts its spans, so that rejects can name them by number."""

    def __init__(self, payload: bytes, reject: MakeReject, max_rejects: int, first_span: int) -> None:
        self.groups: list[SpanGroup] = []
        self.rejects: list[Reject] = []
        self._payload = payload
        self._reject = reject
        self._left = max_rejects
        self._spans_read = first_span

    def read(self) -> None:
        try:
            whole = _whole(self._payload)
        except FieldError as error:
            self._read_pieces(error.what)
        else:
            self._read_envelopes(whole)

    def _read_pieces(self, reason: str) -> None:
        """Read the whole records in a text that is not whole JSON."""
        text, size = self._payload, len(self._payload)
        # No JSON string can hold the beginning of a record, whose quotes would be escaped. So a record ends where another
        # begins, at the latest.
        starts = [found.start() for found in RECORD_START.finditer(text)]
        if not starts and not text.startswith(b"{"):
            self._add(self._reject(reason))
            return
        starts = starts or [0]
        self._leave_out(reason, 0, starts[0])
        for start, stop in zip(starts, [*starts[1:], size], strict=True):
            end = _object_end(text, start, stop)
            if end < 0:
                self._leave_out("record cut: another begins inside" if stop < size else reason, start, stop)
                continue
            try:
                whole = _whole(text[start:end])
            except FieldError as error:
                self._leave_out(error.what, start, end)
            else:
                self._read_envelopes(whole)
            self._leave_out("not a record", end, stop)

    def _leave_out(self, reason: str, start: int, end: int) -> None:
        if self._payload[start:end].strip(_BETWEEN):
            self._add(self._reject(reason, start, end))

    def _add(self, reject: Reject) -> None:
        self._left -= 1
        self.rejects.append(reject)
        if self._left <= 0:
            raise _TooManyRejectsError

    def _each(self, place: str, read: Callable[[Raw], None], items: list[Raw]) -> None:
        """Read items, and reject the bad ones."""
        for item in items:
            try:
                read(item)
            except FieldError as error:
                self._add(self._reject(f"{place}: {error.what}", shown=bytes(item)))

    def _read_envelopes(self, raw: Raw) -> None:
        is_array = bytes(memoryview(raw)[:1]) == b"["
        self._each("record", self._read_envelope, _list(raw, "it") if is_array else [raw])

    def _read_envelope(self, raw: Raw) -> None:
        record = _fields(raw, "it")
        for _ in range(_MAX_ENVELOPES):
            if (inner := _get(record, "trace")) is None:
                break
            record = _fields(inner, "trace")
        name = next((name for name in ("resourceSpans", "batches") if _get(record, name) is not None), None)
        if name is not None:
            self._each(name, self._read_resource_spans, _list(_get(record, name), name))
        elif record and not _RECORD_KEYS & record.keys():
            signal = next((key for key in _OTHER_SIGNALS if _get(record, key) is not None), None)
            raise FieldError(
                f"it holds OTLP {_OTHER_SIGNALS[signal]}, not traces" if signal else "it has no resourceSpans"
            )

    def _read_resource_spans(self, raw: Raw) -> None:
        item = _fields(raw, "it")
        resource = _usual_of(_get(item, "resource"), _Resource, "resource")
        # The texts alone are read: whatever else the attributes of a resource hold does not cost its spans.
        texts = [
            (_text(each, "key"), _text(each.get("value", {}), "stringValue"))
            for each in resource.get("attributes", ())
        ]
        scopes = _list(_get(item, "scopeSpans", "instrumentationLibrarySpans"), "scopeSpans")
        self._each("scopeSpans", partial(self._read_scope_spans, resource=texts), scopes)

    def _read_scope_spans(self, raw: Raw, *, resource: list[tuple[str, str]]) -> None:
        item = _fields(raw, "it")
        scope = _usual_of(_get(item, "scope", "instrumentationLibrary"), _Scope, "scope")
        spans: list[Span] = []
        self.groups.append(SpanGroup(Origin.of(resource, _text(scope, "name")), spans))
        for each in _list(_get(item, "spans"), "spans"):
            self._spans_read += 1
            try:
                spans.append(_read_any_span(each))
            except FieldError as error:
                self._add(self._reject(f"span {self._spans_read - 1}: {error.what}", shown=bytes(each)))


def _object_end(text: bytes, start: int, stop: int) -> int:
    """Return the end of the JSON object that begins at `start`, or -1 if it has none before `stop`."""
    depth = 0
    for token in _STRUCTURE.finditer(text, start, stop):
        mark = text[token.start()]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth <= 0:
                return token.end()
    return -1


def _whole(text: bytes) -> Raw:
    """Return a text as one JSON value, still unparsed."""
    try:
        if not text.isascii():  # msgspec does not check the UTF-8 of a raw value
            text.decode()
        return msgspec.json.decode(text.removeprefix(BOM), type=Raw)
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8") from error
    except RecursionError as error:
        raise FieldError("JSON is nested too deep") from error
    except msgspec.DecodeError as error:
        raise FieldError("not JSON") from error


def _read_any_span(raw: Raw) -> Span:
    """Read one span in any spelling."""
    # Most spans of a damaged record are good: the typed reader is several times as fast.
    try:
        return _read_span(raw)
    except (FieldError, *_DECODE_ERRORS):
        span = _usual_of(raw, _Span, "it")
    span |= {name: _hex_id(span, name) for name in ID_BYTES}
    try:
        return _read_span(Raw(msgspec.json.encode(span)))
    except _DECODE_ERRORS as error:
        raise FieldError(f"{_field_of(error)} is not valid") from error


_INSIDE: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    _Span: {"attributes": _KeyValue, "events": _Event, "status": _Status},
    _Event: {"attributes": _KeyValue},
    _KeyValue: {"value": _Value},
    _Value: {"arrayValue": _ValueList, "kvlistValue": _KeyValueList},
    _ValueList: {"values": _Value},
    _KeyValueList: {"values": _KeyValue},
    _Resource: {"attributes": _KeyValue},
}
"""The structs inside other structs, by field."""

_LISTED = ("attributes", "events", "values")


def _usual_of(raw: Raw | None, struct: type[msgspec.Struct], name: str) -> _Json:
    return {} if raw is None else _usual(_decoded(raw, Any, "JSON is nested too deep"), struct, name)


def _usual(tree: Any, struct: type[msgspec.Struct], name: str) -> _Json:
    """Return an object as exporters spell it: the fields of its struct alone, in lowerCamelCase, without nulls."""
    if not isinstance(tree, dict):
        raise FieldError(f"{name} is not an object")
    found: _Json = {}
    for field in _fields_read(struct):
        value = tree.get(field)
        value = tree.get(_snake_case(field)) if value is None else value
        inside = _INSIDE.get(struct, {}).get(field)
        if value is None:
            continue
        if inside is not None and field in _LISTED:
            if not isinstance(value, list):
                raise FieldError(f"{field} is not an array")
            # In an array of values null is one of them, the empty one.
            items = [{} if item is None and inside is _Value else item for item in value]
            found[field] = [_usual(item, inside, field) for item in items]
        else:
            found[field] = value if inside is None else _usual(value, inside, field)
    return found


@cache
def _fields_read(struct: type[msgspec.Struct]) -> list[str]:
    """Return the keys of a struct that are not ignored."""
    return [each.encode_name for each in msgspec.structs.fields(struct) if each.default is not _IGNORED]


@cache
def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def _text(owner: _Json, name: str) -> str:
    text = owner.get(name, "")
    if not isinstance(text, str):
        raise FieldError(f"{name} is not valid")
    return text


def _hex_id(span: _Json, name: str) -> str:
    """Return an id as lower-case hex; the record has it as hex, or as base64, which is shorter."""
    # No parent is an empty id or one of zeros. A span needs ids of its own.
    is_parent = name == "parentSpanId"
    if is_parent and not span.get(name):
        return ""
    size, spelled = ID_BYTES[name], _text(span, name)
    if len(spelled) == 2 * size and _HEX.fullmatch(spelled):
        plain = spelled.lower()
    else:
        plain = _from_base64(spelled, name).hex() if len(spelled) < 2 * size else ""
    if len(plain) != 2 * size:
        raise FieldError(f"{name} is not {size} bytes of hex or base64")
    if plain.strip("0"):
        return plain
    if is_parent:
        return ""
    raise FieldError(f"{name} is all zero")


def _from_base64(encoded: str, name: str) -> bytes:
    """Decode base64 of either alphabet, padded or not."""
    decode = urlsafe_b64decode if "-" in encoded or "_" in encoded else b64decode
    try:
        return decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError as error:
        raise FieldError(f"{name} is not base64") from error


def _decoded(raw: Raw, kind: Any, fault: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except _DECODE_ERRORS as error:
        raise FieldError(fault) from error


def _fields(raw: Raw, name: str) -> dict[str, Raw]:
    fields: dict[str, Raw] = _decoded(raw, dict[str, Raw], f"{name} is not an object")
    return fields


def _list(raw: Raw | None, name: str) -> list[Raw]:
    return [] if raw is None else _decoded(raw, list[Raw], f"{name} is not an array")


def _get(fields: dict[str, Raw], *names: str) -> Raw | None:
    """Return the first field of some names, in either spelling, that is set."""
    spellings = (fields.get(spelled) for name in names for spelled in (name, _snake_case(name)))
    # A raw null is unset, as in ProtoJSON.
    return next((raw for raw in spellings if raw is not None and bytes(memoryview(raw)[:5]) != b"null"), None)
