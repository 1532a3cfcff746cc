"""Read OTLP JSON in unusual spellings or damaged: the careful counterpart of `json_records`, with the same result.

It accepts the output of the Collector, of Tempo and of hand-saved files: snake_case keys, base64 ids, nulls, numbers for
strings and strings for numbers, names of enums, Tempo's envelopes, arrays of records, records glued together or cut. A
bad span costs itself and not its siblings; everything left out is a reject with place and reason.
"""

from __future__ import annotations

import re
from base64 import b64encode
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Raw

from tracefit.otlp import json_records
from tracefit.otlp.json_records import (
    DECODE_ERRORS,
    Count,
    Event,
    Int32,
    Int64,
    Nanos,
    from_base64,
    write_pairs,
)
from tracefit.otlp.model import (
    ID_BYTES,
    KINDS,
    STATUS_CODES,
    CheckedRecord,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
_SCALAR_KINDS = (("intValue", Int64), ("doubleValue", float), ("boolValue", bool), ("stringValue", str))
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
        resource = _object_of(_get(item, "resource"), "resource")
        strings: list[tuple[str, Scalar]] = [
            (text(pair, "key"), text(child(pair, "value"), "stringValue")) for pair in _pairs_of(resource)
        ]
        scopes = _first(item, "scopeSpans", "instrumentationLibrarySpans")
        self._each(
            "scopeSpans", partial(self._read_scope_spans, resource=strings), _list(scopes, "scopeSpans")
        )

    def _read_scope_spans(self, raw: Raw, *, resource: list[tuple[str, Scalar]]) -> None:
        item = _fields(raw, "it")
        scope = _object_of(_first(item, "scope", "instrumentationLibrary"), "scope")
        spans: list[Span] = []
        self.groups.append(SpanGroup(Origin.of(resource, text(scope, "name")), spans))
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
        return _span(as_object(_tree(raw), "it"))


def _span(span: Json) -> Span:
    status = child(span, "status")
    return Span(
        trace_id=_id(span, "traceId"),
        span_id=_id(span, "spanId"),
        parent_span_id=_parent_id(span),
        name=text(span, "name"),
        kind=_enum(span, "kind", "SPAN_KIND_", KINDS),
        start_unix_ns=number(span, "startTimeUnixNano", Nanos),
        end_unix_ns=number(span, "endTimeUnixNano", Nanos),
        attributes=write_pairs(read_attributes(span)),
        events=[_event(as_object(event, "events")) for event in items(span, "events")],
        dropped_attributes=number(span, "droppedAttributesCount", Count),
        dropped_events=number(span, "droppedEventsCount", Count),
        status_code=_enum(status, "code", "STATUS_CODE_", STATUS_CODES),
        status_message=text(status, "message"),
    )


def _event(event: Json) -> Event:
    return Event(
        time_unix_nano=number(event, "timeUnixNano", Nanos),
        name=text(event, "name"),
        attributes=write_pairs(read_attributes(event)),
        dropped_attributes_count=number(event, "droppedAttributesCount", Count),
    )


def _enum(owner: Json, name: str, prefix: str, names: tuple[str, ...]) -> int:
    value = get(owner, name)
    if isinstance(value, str) and value.removeprefix(prefix) in names:
        return enum_number(value, prefix, names)
    # ProtoJSON allows unknown numbers, which a newer version may define.
    return number(owner, name, Int32)


def _id(owner: Json, name: str) -> str:
    plain = _hex_id(owner, name)
    if not plain.strip("0"):
        raise FieldError(f"{name} is all zero")
    return plain


def _parent_id(span: Json) -> str:
    # An id of zeros means no parent, as an empty one does; `_id` refuses it, because a span needs one.
    plain = _hex_id(span, "parentSpanId") if text(span, "parentSpanId") else ""
    return plain if plain.strip("0") else ""


def _hex_id(owner: Json, name: str) -> str:
    """Return an id as lower-case hex; the record has it as hex, or as base64, which is shorter."""
    size, spelled = ID_BYTES[name], text(owner, name)
    if len(spelled) == 2 * size and _HEX.fullmatch(spelled):
        return spelled.lower()
    plain = from_base64(spelled, name).hex() if len(spelled) < 2 * size else ""
    if len(plain) != 2 * size:
        raise FieldError(f"{name} is not {size} bytes of hex or base64")
    return plain


# Attribute values by every rule of ProtoJSON.


def read_attributes(owner: Json) -> Pairs:
    """Read the attributes of a resource, span or event.

    Raises:
        FieldError: One of them is not valid.
    """
    return [(key, _value(tree)) for key, tree in _key_values(owner, "attributes")]


def _value(tree: Any) -> Scalar:
    """Return one value; a nested one as JSON text."""
    value = as_object({} if tree is None else tree, "value")
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    nested = _container(value, 1)
    return nested if isinstance(nested, str) or nested is None else nested_text(nested)


def _scalar(value: Json) -> Scalar:
    """Return a scalar, None if there is none; every kind that is set must be valid, and the first counts."""
    scalars = [optional(value, name, kind) for name, kind in _SCALAR_KINDS]
    return next((scalar for scalar in scalars if scalar is not None), None)


def _plain(tree: Any, depth: int) -> Plain:
    """Return a value inside another as plain JSON."""
    check_depth(depth)
    value = as_object({} if tree is None else tree, "value")
    scalar = _scalar(value)
    if scalar is None:
        return _container(value, depth)
    return finite(scalar) if isinstance(scalar, float) else scalar


def _container(value: Json, depth: int) -> Plain:
    if get(value, "arrayValue") is not None:
        return [_plain(item, depth + 1) for item in items(child(value, "arrayValue"), "values")]
    if get(value, "kvlistValue") is not None:
        return {
            key: _plain(item, depth + 1) for key, item in _key_values(child(value, "kvlistValue"), "values")
        }
    if (encoded := optional(value, "bytesValue", str)) is not None:
        return b64encode(from_base64(encoded, "bytesValue")).decode()
    return None


def _key_values(owner: Json, name: str) -> Iterator[tuple[str, Any]]:
    for item in items(owner, name):
        pair = as_object(item, name)
        yield text(pair, "key"), pair.get("value")


# Fields under either spelling of their key; null is unset.


@cache
def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def get(owner: Json, name: str) -> Any:
    """Return a field under its lowerCamelCase or snake_case key, or None if it is unset."""
    value = owner.get(name)
    return owner.get(_snake_case(name)) if value is None else value


def as_object(value: Any, name: str) -> Json:
    """Return the value if it is a JSON object.

    Raises:
        FieldError: The value is not an object.
    """
    if not isinstance(value, dict):
        raise FieldError(f"{name} is not an object")
    return value


def child(owner: Json, name: str) -> Json:
    """Return a field that is an object, empty if it is unset."""
    value = get(owner, name)
    return {} if value is None else as_object(value, name)


def items(owner: Json, name: str) -> list[Any]:
    """Return a field that is an array, empty if it is unset."""
    value = get(owner, name)
    if value is not None and not isinstance(value, list):
        raise FieldError(f"{name} is not an array")
    return value or []


def optional(owner: Json, name: str, kind: Any) -> Any:
    """Return a scalar field converted as the typed structs convert it, or None if it is unset.

    Raises:
        FieldError: It cannot be converted.
    """
    value = get(owner, name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind | None, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(f"{name} is not valid") from error


def number(owner: Json, name: str, kind: Any) -> int:
    """Return an integer field, 0 if it is unset."""
    value: int | None = optional(owner, name, kind)
    return value or 0


def text(owner: Json, name: str) -> str:
    """Return a string field, empty if it is unset."""
    value: str | None = optional(owner, name, str)
    return value or ""


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


def _object_of(raw: Raw | None, name: str) -> Json:
    return {} if raw is None else as_object(_tree(raw), name)


def _pairs_of(resource: Json) -> list[Json]:
    return [as_object(item, "attributes") for item in items(resource, "attributes")]
