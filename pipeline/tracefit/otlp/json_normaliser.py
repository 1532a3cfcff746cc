"""Read OTLP JSON in unusual spellings or damaged: the careful counterpart of `json_records`, with the same result.

It accepts the output of the Collector, of Tempo and of hand-saved files: snake_case keys, base64 ids, nulls, numbers for
strings and strings for numbers, names of enums, Tempo's envelopes, arrays of records, records glued together or cut. A
bad span costs itself and not its siblings; everything left out is a reject with place and reason.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Raw

from tracefit.otlp import json_records
from tracefit.otlp.json_records import (
    DECODE_ERRORS,
    Event,
    KeyValue,
    KeyValueList,
    Resource,
    Scope,
    SpanStruct,
    Status,
    Value,
    ValueList,
    field_of,
    fields_read,
    from_base64,
)
from tracefit.otlp.model import ID_BYTES, CheckedRecord, FieldError, Origin, Scalar, Span, SpanGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.inputs.rejects import Reject

Json = dict[str, Any]

_RECORD_START = re.compile(rb'\{\s*"(?:trace"\s*:\s*\{\s*")?(?:resourceSpans|resource_spans|batches)"\s*:')
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_BETWEEN = b" \t\r\n,[]"
_BOM = b"\xef\xbb\xbf"
_NOT_A_RECORD = "not a record"
_MAX_ENVELOPES = 16
"""Nested envelopes around a record that are opened; Tempo writes one."""

_HEX = re.compile("[0-9a-fA-F]+")
_OTHER_SIGNALS = {"resourceLogs": "logs", "resourceMetrics": "metrics"}
_RECORD_KEYS = {"trace", "batches", "resourceSpans", "resource_spans"}


class TooManyRejectsError(Exception):
    """A record has more bad spans than a file may have rejects."""


class MakeReject(Protocol):
    """Makes the reject of a byte range of a record."""

    def __call__(
        self, reason: str, start: int = 0, end: int | None = None, shown: bytes | None = None
    ) -> Reject:
        """Return a reject of the bytes from `start` to `end`; its excerpt shows `shown`, or all of them."""
        ...


def normalise(payload: bytes, reject: MakeReject, max_rejects: int, first_span: int = 0) -> CheckedRecord:
    """Read one record, or the records glued together in one line or document.

    Args:
        payload: The record's text.
        reject: Makes a reject.
        max_rejects: Rejects after which reading the record stops.
        first_span: The number of its first span, by which rejects name spans.

    Returns:
        The good spans, and a reject for everything else.
    """
    if json_records.is_mostly_empty(payload):
        return CheckedRecord([], [reject("more objects than spans and events of its length can have")])
    reader = _RecordReader(payload, reject, max_rejects, first_span)
    with suppress(TooManyRejectsError):
        reader.read()
    return CheckedRecord(reader.groups, reader.rejects)


def object_end(text: bytes, start: int, stop: int) -> int:
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


class _RecordReader:
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
        starts = [found.start() for found in _RECORD_START.finditer(text)]
        if not starts and not text.startswith(b"{"):
            self._add(self._reject(reason))
            return
        starts = starts or [0]
        self._leave_out(reason, 0, starts[0])
        for start, stop in zip(starts, [*starts[1:], size], strict=True):
            end = object_end(text, start, stop)
            if end < 0:
                self._leave_out("record cut: another begins inside" if stop < size else reason, start, stop)
                continue
            try:
                whole = _whole(text[start:end])
            except FieldError as error:
                self._leave_out(error.what, start, end)
            else:
                self._read_envelopes(whole)
            self._leave_out(_NOT_A_RECORD, end, stop)

    def _leave_out(self, reason: str, start: int, end: int) -> None:
        if self._payload[start:end].strip(_BETWEEN):
            self._add(self._reject(reason, start, end))

    def _add(self, reject: Reject) -> None:
        self._left -= 1
        self.rejects.append(reject)
        if self._left <= 0:
            raise TooManyRejectsError

    def _each(self, place: str, read: Callable[[Raw], None], each: list[Raw]) -> None:
        """Read items, and reject the bad ones."""
        for item in each:
            try:
                read(item)
            except FieldError as error:
                self._add(self._reject(f"{place}: {error.what}", shown=bytes(item)))

    def _read_envelopes(self, raw: Raw) -> None:
        self._each(
            "record", self._read_envelope, _list(raw, "it") if bytes(memoryview(raw)[:1]) == b"[" else [raw]
        )

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
        resource = _text_of(_get(item, "resource"), Resource, "resource", _TextAttributes)
        strings: list[tuple[str, Scalar]] = [
            (each.key, each.value.string_value) for each in resource.attributes
        ]
        scopes = _first(item, "scopeSpans", "instrumentationLibrarySpans")
        self._each(
            "scopeSpans", partial(self._read_scope_spans, resource=strings), _list(scopes, "scopeSpans")
        )

    def _read_scope_spans(self, raw: Raw, *, resource: list[tuple[str, Scalar]]) -> None:
        item = _fields(raw, "it")
        scope = _text_of(_first(item, "scope", "instrumentationLibrary"), Scope, "scope", _ScopeName)
        spans: list[Span] = []
        self.groups.append(SpanGroup(Origin.of(resource, scope.name), spans))
        for each in _list(_get(item, "spans"), "spans"):
            self._spans_read += 1
            try:
                spans.append(read_span(each))
            except FieldError as error:
                self._add(self._reject(f"span {self._spans_read - 1}: {error.what}", shown=bytes(each)))


def _whole(text: bytes) -> Raw:
    """Return a text as one JSON value, still unparsed.

    Raises:
        FieldError: The text is not one JSON value.
    """
    try:
        if not text.isascii():  # msgspec does not check the UTF-8 of a raw value
            text.decode()
        return msgspec.json.decode(text.removeprefix(_BOM), type=Raw)
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8") from error
    except RecursionError as error:
        raise FieldError("JSON is nested too deep") from error
    except msgspec.DecodeError as error:
        raise FieldError("not JSON") from error


def read_span(raw: Raw) -> Span:
    """Read one span in any spelling.

    Raises:
        FieldError: A field is not valid.
    """
    # Most spans of a damaged record are good: the typed reader is several times as fast.
    try:
        return json_records.read_span(raw)
    except (FieldError, *DECODE_ERRORS):
        span = _usual(_tree(raw), SpanStruct, "it")
    span |= {name: _id(span, name) for name in ("traceId", "spanId")} | {"parentSpanId": _parent_id(span)}
    try:
        return json_records.read_span(Raw(msgspec.json.encode(span)))
    except DECODE_ERRORS as error:
        raise FieldError(f"{field_of(error)} is not valid") from error


_INSIDE: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    SpanStruct: {"attributes": KeyValue, "events": Event, "status": Status},
    Event: {"attributes": KeyValue},
    KeyValue: {"value": Value},
    Value: {"arrayValue": ValueList, "kvlistValue": KeyValueList},
    ValueList: {"values": Value},
    KeyValueList: {"values": KeyValue},
    Resource: {"attributes": KeyValue},
}
"""The structs inside other structs, by field."""

_LISTS = ("attributes", "events", "values")


def _usual(tree: Any, struct: type[msgspec.Struct], name: str) -> Json:
    """Return an object as exporters spell it: the fields of its struct alone, in lowerCamelCase, without nulls.

    Raises:
        FieldError: It, or something inside, is not of the form of its struct.
    """
    if not isinstance(tree, dict):
        raise FieldError(f"{name} is not an object")
    found: Json = {}
    for field in fields_read(struct):
        value = tree.get(field)
        value = tree.get(_snake_case(field)) if value is None else value
        inside = _INSIDE.get(struct, {}).get(field)
        if value is None:
            continue
        if inside is not None and field in _LISTS:
            if not isinstance(value, list):
                raise FieldError(f"{field} is not an array")
            # In an array of values null is one of them, the empty one.
            items = [{} if item is None and inside is Value else item for item in value]
            found[field] = [_usual(item, inside, field) for item in items]
        else:
            found[field] = value if inside is None else _usual(value, inside, field)
    return found


def _id(owner: Json, name: str) -> str:
    plain = _hex_id(owner, name)
    if not plain.strip("0"):
        raise FieldError(f"{name} is all zero")
    return plain


def _parent_id(span: Json) -> str:
    # An id of zeros means no parent, as an empty one does; `_id` refuses it, because a span needs one.
    plain = _hex_id(span, "parentSpanId") if span.get("parentSpanId") else ""
    return plain if plain.strip("0") else ""


def _hex_id(owner: Json, name: str) -> str:
    """Return an id as lower-case hex; the record has it as hex, or as base64, which is shorter."""
    size, spelled = ID_BYTES[name], owner.get(name, "")
    if not isinstance(spelled, str):
        raise FieldError(f"{name} is not valid")
    if len(spelled) == 2 * size and _HEX.fullmatch(spelled):
        return spelled.lower()
    plain = from_base64(spelled, name).hex() if len(spelled) < 2 * size else ""
    if len(plain) != 2 * size:
        raise FieldError(f"{name} is not {size} bytes of hex or base64")
    return plain


@cache
def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


# The upper levels of a record are split without parsing the levels below: a record can be long, and its spans are then
# parsed one by one, so that a bad one costs itself alone.


def _fields(raw: Raw, name: str) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Raw])
    except DECODE_ERRORS as error:
        raise FieldError(f"{name} is not an object") from error


def _list(raw: Raw | None, name: str) -> list[Raw]:
    try:
        return [] if raw is None else msgspec.json.decode(raw, type=list[Raw])
    except DECODE_ERRORS as error:
        raise FieldError(f"{name} is not an array") from error


def _get(fields: dict[str, Raw], name: str) -> Raw | None:
    spellings = (fields.get(name), fields.get(_snake_case(name)))
    # A raw null is unset, as in ProtoJSON.
    return next((raw for raw in spellings if raw is not None and bytes(memoryview(raw)[:5]) != b"null"), None)


def _first(fields: dict[str, Raw], *names: str) -> Raw | None:
    return next((found for name in names if (found := _get(fields, name)) is not None), None)


def _tree(raw: Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS as error:
        raise FieldError("JSON is nested too deep") from error


class _Text(msgspec.Struct, frozen=True, rename="camel"):
    string_value: str = ""


class _TextAttribute(msgspec.Struct, frozen=True):
    key: str = ""
    value: _Text = _Text()


class _TextAttributes(msgspec.Struct, frozen=True):
    """The attributes of a resource, whose texts alone are read: whatever else they hold does not cost its spans."""

    attributes: list[_TextAttribute] = []


class _ScopeName(msgspec.Struct, frozen=True):
    name: str = ""


_T = TypeVar("_T")


def _text_of(raw: Raw | None, struct: type[msgspec.Struct], name: str, kind: type[_T]) -> _T:
    try:
        return msgspec.convert({} if raw is None else _usual(_tree(raw), struct, name), kind)
    except msgspec.ValidationError as error:
        raise FieldError(f"{field_of(error)} is not valid") from error
