"""OTLP JSON in all its spellings: slower than `json_fast`, and the judge of what is valid.

What a span gets wrong costs that span, not its siblings. A record is taken apart level by level; what is too short to hold
a span is looked at once, however often it is there.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Raw

from tracefit.otlp.json_spans import SHORTEST_SPAN, read_span
from tracefit.otlp.json_values import Json, as_object, child, items, text
from tracefit.otlp.model import Decoded, FieldError, Pairs, SpanGroup, origin_of
from tracefit.otlp.rejects import MAX_REJECTS
from tracefit.sources.excerpt import excerpt
from tracefit.sources.records import Frame, Reject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_ENVELOPES = 16
"""Envelopes around a record; Tempo has one."""

_MAX_HARMLESS = 1000
"""Different short items without spans that are remembered."""

_UNSET = Raw(b"null")


def _key(name: str) -> Any:
    return msgspec.field(default=_UNSET, name=name)


class _Envelope(msgspec.Struct, gc=False, frozen=True):
    trace: Raw = _UNSET
    batches: Raw = _UNSET
    resource_spans: Raw = _key("resourceSpans")
    resource_spans_: Raw = _key("resource_spans")
    resource_logs: Raw = _key("resourceLogs")
    resource_logs_: Raw = _key("resource_logs")
    resource_metrics: Raw = _key("resourceMetrics")
    resource_metrics_: Raw = _key("resource_metrics")


class _ResourceSpans(msgspec.Struct, gc=False, frozen=True):
    resource: Raw = _UNSET
    scope_spans: Raw = _key("scopeSpans")
    scope_spans_: Raw = _key("scope_spans")
    library_spans: Raw = _key("instrumentationLibrarySpans")
    library_spans_: Raw = _key("instrumentation_library_spans")


class _ScopeSpans(msgspec.Struct, gc=False, frozen=True):
    spans: Raw = _UNSET
    scope: Raw = _UNSET
    library: Raw = _key("instrumentationLibrary")
    library_: Raw = _key("instrumentation_library")


_T = TypeVar("_T")
_ENVELOPES = msgspec.json.Decoder(_Envelope)
_RESOURCE_SPANS = msgspec.json.Decoder(_ResourceSpans)
_SCOPE_SPANS = msgspec.json.Decoder(_ScopeSpans)
_LISTS = msgspec.json.Decoder(list[Raw])


def decode_general(frame: Frame, *, listed: int = MAX_REJECTS) -> Decoded:
    """Decode a record by the rules of ProtoJSON, and by what exporters make of them.

    Args:
        frame: A JSON frame: an object with `resourceSpans`, one of Tempo's envelopes, or an array of these.
        listed: Most rejects to return; the others are counted.

    Returns:
        Its good spans, and a reject for each bad one.

    Raises:
        ValueError: If the payload is not JSON; `RecursionError` if it is nested beyond what the parser does.
    """
    whole = msgspec.json.decode(frame.payload, type=Raw)
    if not frame.payload.isascii():
        frame.payload.decode()
    return _RecordReader(frame, listed).read(whole)


class _RecordReader:
    """Walks one record and keeps count of its spans, for the rejects to name them."""

    def __init__(self, frame: Frame, listed: int) -> None:
        self._frame = frame
        self._left = listed
        self._found = Decoded()
        self._spans_seen = 0
        self._harmless: set[bytes] = set()

    def read(self, whole: Raw) -> Decoded:
        self._each("record", self._read_envelope, _LISTS.decode(whole) if _begins(whole, b"[") else [whole])
        return self._found

    def _each(self, place: str, read: Callable[[Raw], None], each: Sequence[Raw]) -> None:
        """Read items, and reject those that are bad."""
        for number, item in enumerate(each):
            if not self._left:
                self._count(read, each[number:])
                return
            is_short = len(item) < SHORTEST_SPAN
            if is_short and bytes(item) in self._harmless:
                continue
            left = self._left
            self._guarded(place, read, item)
            if is_short and left == self._left and len(self._harmless) < _MAX_HARMLESS:
                self._harmless.add(bytes(item))

    def _count(self, read: Callable[[Raw], None], each: Sequence[Raw]) -> None:
        """Read items when no more rejects are listed."""
        short = Counter(bytes(item) for item in each if len(item) < SHORTEST_SPAN)
        for item, times in short.items():
            before = self._found.more
            self._guarded("", read, Raw(item))
            self._found.more += (times - 1) * (self._found.more - before)
        for item in each:
            if len(item) >= SHORTEST_SPAN:
                self._guarded("", read, item)

    def _guarded(self, place: str, read: Callable[[Raw], None], item: Raw) -> None:
        try:
            read(item)
        except FieldError as error:
            self._reject(place, error, item)

    def _reject(self, place: str, error: FieldError, item: Raw) -> None:
        if not self._left:
            self._found.more += 1
            return
        self._left -= 1
        frame = self._frame
        outline = excerpt(
            msgspec.json.encode(msgspec.json.decode(item)), "json", show_values=frame.show_values
        )
        reason = f"{place}: {error.what}"
        self._found.rejects.append(
            Reject(frame.source_file, frame.offset, len(frame.payload), reason, outline)
        )

    def _read_envelope(self, item: Raw) -> None:
        envelope = _object(_ENVELOPES, item, "it")
        for _ in range(_MAX_ENVELOPES):
            if not _begins(envelope.trace, b"{"):
                break
            item = envelope.trace
            envelope = _object(_ENVELOPES, item, "it")
        for name, raw in (
            ("resourceSpans", _first(envelope.resource_spans, envelope.resource_spans_)),
            ("batches", envelope.batches),
        ):
            if _is_set(raw):
                self._each(name, self._read_resource_spans, _list(raw, name))
                return
        if _is_empty(item):
            return
        known = (envelope.trace, envelope.batches, envelope.resource_spans, envelope.resource_spans_)
        if all(raw is _UNSET for raw in known):
            raise FieldError(_other_content(envelope))

    def _read_resource_spans(self, item: Raw) -> None:
        resource_spans = _object(_RESOURCE_SPANS, item, "resourceSpans")
        resource = _resource_strings(_tree(resource_spans.resource, "resource"))
        for name, raw in (
            ("scopeSpans", _first(resource_spans.scope_spans, resource_spans.scope_spans_)),
            (
                "instrumentationLibrarySpans",
                _first(resource_spans.library_spans, resource_spans.library_spans_),
            ),
        ):
            if _is_set(raw):
                self._each(name, partial(self._read_scope_spans, resource=resource), _list(raw, name))

    def _read_scope_spans(self, item: Raw, resource: Pairs) -> None:
        scope_spans = _object(_SCOPE_SPANS, item, "scopeSpans")
        library = _first(scope_spans.library, scope_spans.library_)
        scope = _tree(scope_spans.scope, "scope") or _tree(library, "instrumentationLibrary")
        origin = origin_of(self._frame.source_file, self._frame.offset, resource, text(scope, "name"))
        if not _is_set(scope_spans.spans):
            return
        each = _list(scope_spans.spans, "spans")
        group = SpanGroup(origin, [])
        self._found.groups.append(group)
        for number, span in enumerate(each):
            if not self._left:
                each = each[number:]
                break
            try:
                group.spans.append(read_span(span))
            except FieldError as error:
                self._reject(f"span {self._spans_seen}", error, span)
            self._spans_seen += 1
        else:
            return
        long = [span for span in each if len(span) >= SHORTEST_SPAN]
        self._found.more += len(each) - len(long)
        for span in long:
            try:
                group.spans.append(read_span(span, judge=False))
            except FieldError:
                self._found.more += 1


def _begins(raw: Raw, byte: bytes) -> bool:
    return memoryview(raw)[:1] == byte


def _is_set(raw: Raw) -> bool:
    return len(raw) != len(b"null") or bytes(raw) != b"null"


def _is_empty(item: Raw) -> bool:
    """Return whether an object has nothing in it."""
    return not bytes(item)[1:-1].strip()


def _first(usual: Raw, other: Raw) -> Raw:
    """Return a field that has two spellings."""
    return usual if _is_set(usual) else other


def _object(decoder: msgspec.json.Decoder[_T], raw: Raw, name: str) -> _T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise FieldError(f"{name} is not an object") from error


def _list(raw: Raw, name: str) -> list[Raw]:
    try:
        return _LISTS.decode(raw)
    except msgspec.ValidationError as error:
        raise FieldError(f"{name} is not an array") from error


def _tree(raw: Raw, name: str) -> Json:
    """Return a small object, empty if it is unset."""
    return as_object(msgspec.json.decode(raw), name) if _is_set(raw) else {}


def _other_content(envelope: _Envelope) -> str:
    if _is_set(_first(envelope.resource_logs, envelope.resource_logs_)):
        return "it holds OTLP logs, not traces"
    if _is_set(_first(envelope.resource_metrics, envelope.resource_metrics_)):
        return "it holds OTLP metrics, not traces"
    return "it has no resourceSpans"


def _resource_strings(resource: Json) -> Pairs:
    """Read the string attributes of a resource, which are all that is used of it."""
    pairs = [as_object(item, "attributes") for item in items(resource, "attributes")]
    return [(text(pair, "key"), text(child(pair, "value"), "stringValue")) for pair in pairs]
