"""Read OTLP JSON: fast for records as exporters write them, carefully for unusual spellings or damage.

A record is first divided into scopes whose spans stay JSON text, then each span is decoded by itself, so that
a bad span does not reject its siblings. The attributes of spans and events stay JSON text, which
`layouts` reads column by column. Records that the typed structs refuse go through the careful functions,
which accept the output of the Collector, of Tempo and of hand-saved files: snake_case keys, base64 ids,
nulls, numbers for strings and strings for numbers, names of enums, Tempo's envelopes, arrays of records,
records glued to others or cut. They bring each span into the usual form.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw

from tracefit.inputs.framing import BOM, RECORD_START
from tracefit.otlp import layouts
from tracefit.otlp.model import (
    ID_BYTES,
    INT64_MAX,
    AddReject,
    AttributeValue,
    EncodedScope,
    Events,
    FieldError,
    Origin,
    Pairs,
    Plain,
    check_depth,
    finite,
    kind_name,
    nested_text,
    status_name,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.inputs.rejects import Encoding

NAME: Encoding = "json"
SYNTAX = layouts.JSON_SYNTAX

_Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
_Nanos = Annotated[int, Meta(ge=0, le=INT64_MAX)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]

_HEX_IDS = re.compile("(?:[0-9a-fA-F]{16})*")
_IGNORED = Raw(b"null")
_UNSET = Raw(b"")
_NO_ATTRIBUTES = Raw(b"[]")


class _Struct(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Structs of OTLP; any other key sends the record to the careful reader. They form no cycles (`gc`)."""


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
    """A span as exporters write it, a `model.Span`."""

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
    spans: list[Raw] = []
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


class _ValueList(_Struct, frozen=True):
    values: list[_Value] = []


class _KeyValueList(_Struct, frozen=True):
    values: list[_KeyValue] = []


_LONG_BYTES, _SHORTEST_OBJECT = 4 << 20, 14

PIECE_BYTES = 4 << 20
"""Piece size for long records, in bytes. Spans of 100 bytes need ten times their size once decoded."""

# Not strict: OTLP writes 64-bit integers as strings, which msgspec then converts without a Python str in between.
_RECORD_DECODER = msgspec.json.Decoder(_TracesData, strict=False)
_SPAN_DECODER = msgspec.json.Decoder(_Span, strict=False)
_PAIR_DECODER = msgspec.json.Decoder(list[_KeyValue], strict=False)
_LIST_DECODER = msgspec.json.Decoder(_ValueList, strict=False)
_KEY_VALUE_LISTS = msgspec.json.Decoder(_KeyValueList, strict=False)


_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for text that is not JSON, or not of the wanted type."""


def _field_of(error: Exception) -> str:
    """Return the name of the field that msgspec has refused, for a message."""
    names = re.findall(r"\.(\w+)", str(error).rpartition(" at `$")[2])
    return names[-1] if names else "value"


def _is_mostly_empty(payload: bytes) -> bool:
    """Return whether a long record has more objects than real spans and events of its length can have.

    The shortest attribute takes 17 bytes for each of its two objects. Decoded, empty objects take many times
    their length in memory, so that a hostile record of them is refused.
    """
    size = len(payload)
    return size > _LONG_BYTES and (payload.count(b"{") * _SHORTEST_OBJECT > size or payload.count(b"[") * 8 > size)


def scopes(payload: bytes, reject: AddReject, most_bytes: int) -> Iterator[EncodedScope]:  # noqa: ARG001 - all stay encoded
    """Yield the scopes of one record, or of several on one line; reject everything else."""
    if _is_mostly_empty(payload):
        reject("more objects than spans and events of its length can have")
        return
    try:
        resources = _RECORD_DECODER.decode(payload).resource_spans
    except _DECODE_ERRORS:
        yield from _read_any_record(payload, reject)
        return
    for each in resources:
        texts = [(attribute.key, attribute.value.string_value) for attribute in each.resource.attributes]
        for group in each.scope_spans:
            yield EncodedScope(Origin.of(texts, group.scope.name), group.spans)


def read_spans(encoded: Sequence[Raw]) -> list[_Span]:
    """Decode spans as exporters write them; attributes are not checked yet.

    Raises:
        FieldError: A span is not as exporters write it, good or bad.
    """
    try:
        spans = list(map(_SPAN_DECODER.decode, encoded))
    except _DECODE_ERRORS as error:
        raise FieldError(f"{_field_of(error)} is not valid") from error
    ids = [span.trace_id for span in spans], [span.span_id for span in spans]
    parents = [span.parent_span_id for span in spans if span.parent_span_id]
    # One regex over all ids joined: a thousand are checked in the time of a few. Sizes are checked before, so that
    # the groups of 16 digits fall on the edges of the ids.
    sizes_fit = {*map(len, ids[0]), 32} == {32} and {*map(len, ids[1]), *map(len, parents), 16} == {16}
    if not (sizes_fit and _HEX_IDS.fullmatch("".join([*ids[0], *ids[1], *parents]))):
        raise FieldError("ids are not hex")
    if "0" * 32 in ids[0] or "0" * 16 in ids[1] or "0" * 16 in parents:
        raise FieldError("an id is all zero")
    for kind, code in {(span.kind, span.status.code) for span in spans}:
        kind_name(kind)
        status_name(code)
    return spans


def id_text(identifier: str) -> str:
    """Return an id as hex, in any case."""
    return identifier


def attributes_of(span: _Span) -> Raw:
    """Return the attributes of a span, encoded."""
    return span.attributes


def _plain_nested(value: _Value, depth: int) -> Plain:
    """Return a nested value as plain JSON; None if nothing is set."""
    check_depth(depth)
    try:
        if value.array_value is not _UNSET:
            return [_plain(each, depth + 1) for each in _LIST_DECODER.decode(value.array_value).values]
        if value.kvlist_value is not _UNSET:
            pairs = _KEY_VALUE_LISTS.decode(value.kvlist_value).values
            return {each.key: _plain(each.value, depth + 1) for each in pairs}
        if value.bytes_value is _UNSET:
            return None
        return b64encode(_from_base64(msgspec.json.decode(value.bytes_value, type=str), "bytesValue")).decode()
    except _DECODE_ERRORS as error:
        raise FieldError("value is not valid") from error


def _plain(value: _Value, depth: int) -> Plain:
    for scalar in (value.int_value, value.bool_value, value.string_value):
        if scalar is not None:
            return scalar
    return _plain_nested(value, depth) if value.double_value is None else finite(value.double_value)


def event_columns(events: list[_Event]) -> Events:
    """Return events as columns; all count as regular, because their attributes are not read yet."""
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

    The attributes of many events are read by `layouts`, which accepts the same spellings: tests/otlp gives its cases to
    both (`each_reader`).

    Raises:
        FieldError: They are written in an unusual way.
    """
    try:
        return [(each.key, each.value.scalar()) for each in _PAIR_DECODER.decode(attributes)]
    except _DECODE_ERRORS as error:
        raise FieldError(f"{_field_of(error)} is not valid") from error


# The careful functions. The upper levels of a record are divided without parsing the levels below. An invalid
# value raises a FieldError, which becomes the reject of the item it is in.

_Json = dict[str, Any]

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_BETWEEN = b" \t\r\n,[]"
_MAX_ENVELOPES = 16
"""Nested envelopes around a record that are opened; Tempo writes one."""

_SIGNAL_KEYS = {"resourceLogs": "logs", "resourceMetrics": "metrics"}
_RECORD_KEYS = {"trace", "batches", "resourceSpans", "resource_spans"}


def _read_any_record(text: bytes, reject: AddReject) -> Iterator[EncodedScope]:
    """Yield the scopes of a record in any spelling, or of the whole records in a text that is not whole JSON."""
    try:
        whole = _whole(text)
    except FieldError as error:
        reason = error.what
    else:
        yield from _read_envelopes(whole, reject)
        return

    def leave_out(reason: str, start: int, end: int) -> None:
        if text[start:end].strip(_BETWEEN):
            reject(reason, start, end)

    # No JSON string contains the beginning of a record, whose quotes would be escaped. So a record ends where another
    # begins, at the latest.
    starts = [match.start() for match in RECORD_START.finditer(text)]
    if not starts and not text.startswith(b"{"):
        reject(reason)
        return
    starts = starts or [0]
    leave_out(reason, 0, starts[0])
    for start, stop in pairwise([*starts, len(text)]):
        end = _object_end(text, start, stop)
        if end < 0:
            leave_out("record cut: another begins inside" if stop < len(text) else reason, start, stop)
            continue
        try:
            whole = _whole(text[start:end])
        except FieldError as error:
            leave_out(error.what, start, end)
        else:
            yield from _read_envelopes(whole, reject)
        leave_out("not a record", end, stop)


def _whole(text: bytes) -> Raw:
    """Return a text as one JSON value, still unparsed."""
    raw: Raw = _decoded(text.removeprefix(BOM), Raw, "not JSON")
    if not text.isascii():  # msgspec does not check the UTF-8 of a raw value
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise FieldError("not UTF-8") from error
    return raw


def _each(
    field: str, read: Callable[[Raw, AddReject], Iterator[EncodedScope]], items: list[Raw], reject: AddReject
) -> Iterator[EncodedScope]:
    """Read the items of a field and reject the invalid ones."""
    for item in items:
        try:
            yield from read(item, reject)
        except FieldError as error:
            reject(f"{field}: {error.what}", shown=bytes(item))


def _read_envelopes(raw: Raw, reject: AddReject) -> Iterator[EncodedScope]:
    is_array = bytes(memoryview(raw)[:1]) == b"["
    yield from _each("record", _read_envelope, _list(raw, "it") if is_array else [raw], reject)


def _read_envelope(raw: Raw, reject: AddReject) -> Iterator[EncodedScope]:
    record = _fields(raw, "it")
    for _ in range(_MAX_ENVELOPES):
        if (inner := _get(record, "trace")) is None:
            break
        record = _fields(inner, "trace")
    name = next((name for name in ("resourceSpans", "batches") if _get(record, name) is not None), None)
    if name is not None:
        yield from _each(name, _read_resource_spans, _list(_get(record, name), name), reject)
    elif record and not _RECORD_KEYS & record.keys():
        signal = next((key for key in _SIGNAL_KEYS if _get(record, key) is not None), None)
        raise FieldError(f"it holds OTLP {_SIGNAL_KEYS[signal]}, not traces" if signal else "it has no resourceSpans")


def _read_resource_spans(raw: Raw, reject: AddReject) -> Iterator[EncodedScope]:
    item = _fields(raw, "it")
    resource = _usual_of(_get(item, "resource"), _Resource, "resource")
    # Only texts are read: other values of a resource do not reject its spans.
    texts = [
        (_text(each, "key"), _text(each.get("value", {}), "stringValue")) for each in resource.get("attributes", ())
    ]

    def read_scope_spans(raw: Raw, _: AddReject) -> Iterator[EncodedScope]:
        item = _fields(raw, "it")
        scope = _usual_of(_get(item, "scope", "instrumentationLibrary"), _Scope, "scope")
        yield EncodedScope(Origin.of(texts, _text(scope, "name")), _list(_get(item, "spans"), "spans"))

    scopes = _list(_get(item, "scopeSpans", "instrumentationLibrarySpans"), "scopeSpans")
    yield from _each("scopeSpans", read_scope_spans, scopes, reject)


def _object_end(text: bytes, start: int, stop: int) -> int:
    """Return the end of the JSON object that begins at `start`, or -1 if it does not end before `stop`."""
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


def read_span(raw: Raw) -> _Span:
    """Read one span in any spelling, its attributes and those of its events included.

    Raises:
        FieldError: It is not valid.
    """
    # Most spans of a damaged record are good: the typed reader is several times as fast.
    try:
        return _read_usual_span(raw)
    except FieldError:
        span = _usual_of(raw, _Span, "it")
    span |= {name: _hex_id(span, name) for name in ID_BYTES}
    return _read_usual_span(Raw(msgspec.json.encode(span)))


def _read_usual_span(raw: Raw) -> _Span:
    (span,) = read_spans([raw])
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        read_pairs(attributes)
    return span


_MEMBERS: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    _Span: {"attributes": _KeyValue, "events": _Event, "status": _Status},
    _Event: {"attributes": _KeyValue},
    _KeyValue: {"value": _Value},
    _Value: {"arrayValue": _ValueList, "kvlistValue": _KeyValueList},
    _ValueList: {"values": _Value},
    _KeyValueList: {"values": _KeyValue},
    _Resource: {"attributes": _KeyValue},
}
"""The structs inside other structs, by field."""

_LIST_MEMBERS = ("attributes", "events", "values")


def _usual_of(raw: Raw | None, struct: type[msgspec.Struct], name: str) -> _Json:
    return {} if raw is None else _usual(_decoded(raw, Any, "JSON is nested too deep"), struct, name)


def _usual(tree: Any, struct: type[msgspec.Struct], name: str) -> _Json:
    """Return an object as exporters spell it: only the fields of its struct, in lowerCamelCase, without nulls."""
    if not isinstance(tree, dict):
        raise FieldError(f"{name} is not an object")
    fields: _Json = {}
    for field in _fields_read(struct):
        value = tree.get(field)
        value = tree.get(_snake_case(field)) if value is None else value
        inside = _MEMBERS.get(struct, {}).get(field)
        if value is None:
            continue
        if inside is not None and field in _LIST_MEMBERS:
            if not isinstance(value, list):
                raise FieldError(f"{field} is not an array")
            # In an array of values, null is the empty value.
            items = [{} if item is None and inside is _Value else item for item in value]
            fields[field] = [_usual(item, inside, field) for item in items]
        else:
            fields[field] = value if inside is None else _usual(value, inside, field)
    return fields


@cache  # records have many of the same few structs
def _fields_read(struct: type[msgspec.Struct]) -> list[str]:
    """Return the keys of a struct that are not ignored."""
    return [each.encode_name for each in msgspec.structs.fields(struct) if each.default is not _IGNORED]


@cache  # the keys of OTLP are few
def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def _text(owner: _Json, name: str) -> str:
    text = owner.get(name, "")
    if not isinstance(text, str):
        raise FieldError(f"{name} is not valid")
    return text


def _hex_id(span: _Json, name: str) -> str:
    """Return an id as lower-case hex; the record has it as hex, or as base64, which is shorter."""
    # An empty parent id or one of zeros means no parent; the other ids are required.
    is_parent = name == "parentSpanId"
    if is_parent and not span.get(name):
        return ""
    size, spelled = ID_BYTES[name], _text(span, name)
    if len(spelled) == 2 * size and _HEX_IDS.fullmatch(spelled):
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


def _decoded(raw: bytes | Raw, kind: Any, fault: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8") from error
    except RecursionError as error:
        raise FieldError("JSON is nested too deep") from error
    except msgspec.DecodeError as error:
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
