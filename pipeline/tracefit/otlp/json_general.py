"""OTLP JSON in all its spellings, read field by field: slower than `json_fast`, and the judge of what is valid.

What a span gets wrong costs that span, not its siblings.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.otlp.json_attributes import attributes_json
from tracefit.otlp.json_fast import Event
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
from tracefit.otlp.model import Decoded, FieldError, Pairs, Span, SpanGroup, origin_of
from tracefit.otlp.rejects import RecordRejects
from tracefit.sources.excerpt import excerpt
from tracefit.sources.records import Frame, Reject

if TYPE_CHECKING:
    from collections.abc import Callable

_HEX = re.compile("[0-9a-fA-F]+")
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUS_CODES = ("UNSET", "OK", "ERROR")
_ENVELOPE_KEYS = ("trace", "resourceSpans", "resource_spans", "batches")


def decode_general(frame: Frame) -> Decoded:
    """Decode a record by the rules of ProtoJSON, and by what exporters make of them.

    Args:
        frame: A JSON frame: an object with `resourceSpans`, one of Tempo's envelopes, or an array of these.

    Returns:
        Its good spans, and a reject for each bad one.

    Raises:
        ValueError: If the payload is not JSON; `RecursionError` if it is nested beyond what the parser does.
    """
    tree = msgspec.json.decode(frame.payload)
    return _RecordReader(frame).read(tree)


class _RecordReader:
    """Walks one record and keeps count of its spans, for the rejects to name them."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._groups: list[SpanGroup] = []
        self._rejects = RecordRejects(frame)
        self._spans_seen = 0

    def read(self, tree: Any) -> Decoded:
        for envelope in tree if isinstance(tree, list) else [tree]:
            self._guarded("record", self._read_envelope, envelope)
        return Decoded(self._groups, self._rejects.all())

    def _guarded(self, place: str, read: Callable[[Any], None], item: Any) -> None:
        try:
            read(item)
        except FieldError as error:
            self._rejects.add(partial(self._reject, f"{place}: {error.what}", item))

    def _reject(self, reason: str, item: Any) -> Reject:
        frame = self._frame
        outline = excerpt(msgspec.json.encode(item), "json", show_values=frame.show_values)
        return Reject(frame.source_file, frame.offset, len(frame.payload), reason, outline)

    def _read_envelope(self, tree: Any) -> None:
        envelope = as_object(tree, "it")
        while isinstance(inner := envelope.get("trace"), dict):
            envelope = inner
        for name in ("resourceSpans", "batches"):
            if get(envelope, name) is not None:
                for item in items(envelope, name):
                    self._guarded(name, self._read_resource_spans, item)
                return
        if envelope and not any(key in envelope for key in _ENVELOPE_KEYS):
            raise FieldError(_other_content(envelope))

    def _read_resource_spans(self, tree: Any) -> None:
        resource_spans = as_object(tree, "resourceSpans")
        resource = _resource_strings(child(resource_spans, "resource"))
        for name in ("scopeSpans", "instrumentationLibrarySpans"):
            for item in items(resource_spans, name):
                self._guarded(name, partial(self._read_scope_spans, resource=resource), item)

    def _read_scope_spans(self, tree: Any, resource: Pairs) -> None:
        scope_spans = as_object(tree, "scopeSpans")
        scope = child(scope_spans, "scope") or child(scope_spans, "instrumentationLibrary")
        origin = origin_of(self._frame.source_file, self._frame.offset, resource, text(scope, "name"))
        spans: list[Span] = []
        for item in items(scope_spans, "spans"):
            self._guarded(f"span {self._spans_seen}", partial(_append_span, spans), item)
            self._spans_seen += 1
        self._groups.append(SpanGroup(origin, spans))


def _append_span(spans: list[Span], tree: Any) -> None:
    spans.append(_span(tree))


def _other_content(envelope: Json) -> str:
    for signal in ("logs", "metrics"):
        if get(envelope, f"resource{signal.title()}") is not None:
            return f"it holds OTLP {signal}, not traces"
    return "it has no resourceSpans"


def _resource_strings(resource: Json) -> Pairs:
    """Read the string attributes of a resource, which are all that is used of it."""
    pairs = [as_object(item, "attributes") for item in items(resource, "attributes")]
    return [(text(pair, "key"), text(child(pair, "value"), "stringValue")) for pair in pairs]


def _span(tree: Any) -> Span:
    span = as_object(tree, "it")
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
        events=[_event(event) for event in items(span, "events")],
        dropped_attributes_count=number(span, "droppedAttributesCount", Count),
        dropped_events_count=number(span, "droppedEventsCount", Count),
        status_code=_enum(status, "code", "STATUS_CODE_", _STATUS_CODES),
        status_message=text(status, "message"),
    )


def _event(tree: Any) -> Event:
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
