"""Check export requests, remove what users wrote, and divide the spans by sender.

The rules are those of `tracefit ingest`: vLLM's spans keep the attributes that tables use (ids, counts, sampling
parameters); other spans keep only their existence. Dropped data never reach the disk.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Generator
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.wrappers_pb2 import StringValue
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tracefit.errors import DataError
from tracefit.inputs.otlp_wire import submessages, trace_messages
from tracefit.tables import dialects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tracefit.receive.observed import Observed
    from tracefit.receive.refusals import Cause

_INSTANCE_KEYS = frozenset(
    {
        "host.id",
        "host.name",
        "service.instance.id",
        "service.name",
        "service.version",
        "telemetry.sdk.language",
        "telemetry.sdk.name",
        "telemetry.sdk.version",
    }
)
_VLLM_SCOPES, _PHASE_SPANS = frozenset(dialects.READ_SCOPES), frozenset(dialects.PHASE_SPANS)
_ID_KEYS = ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id")
_UNNAMED = "unknown"
_NAME_LENGTH, _SPAN_HASH_DIGITS = 256, 16
"""Longest name of a service or an instance that is kept as it is: every active sender's is in memory."""
_GZIP_WINDOW = 31  # zlib's largest window, 15, and 16 for a gzip header

MAX_ELEMENTS = 1 << 20
"""Resources, scopes, spans, events and attributes of a request: one in 16 bytes of the longest; real ones
have one in 22.

An element that takes the time of several counts as several.
"""

MAX_FIELDS = 1 << 16
"""Most fields of a span or an event, which are parsed at once. A step span with snapshots of 256 requests
has 25,600."""

MAX_JSON_OBJECTS = 1 << 12
"""Objects of a span without its events, or of an event, in JSON; an attribute is two."""

SLICE_ELEMENTS = 1 << 11
"""Elements after which other requests have a turn: some 10 ms of work."""

_GUNZIP_BYTES = 1 << 20
_RESOURCE_ELEMENTS, _SCOPE_ELEMENTS, _SPAN_ELEMENTS = 32, 8, 4
_WRITTEN_BYTES = 64 << 10
_HEADER_BYTES, _BYTES_OF_ELEMENT = 64 << 10, 8
# Numbers of fields: of a request, a resource, a scope, a span; and of its resource in the second and its
# scope in the third.
_RESOURCE_SPANS_FIELD, _SCOPE_SPANS_FIELD, _SPANS_FIELD, _EVENTS_FIELD, _HEADER_FIELD = 1, 2, 2, 11, 1
_NO_OBJECT = msgspec.Raw(b"{}")

_T = TypeVar("_T")
_MessageT = TypeVar("_MessageT", bound=Message)
InSlices: TypeAlias = Generator[None, None, _T]
"""Work that yields wherever other work may have a turn, and returns its result."""


class RequestError(DataError):
    """A request that will never be accepted, however often it is sent."""

    cause: Cause = "malformed"


SentForm: TypeAlias = Literal["spans", "steps"]
"""The form of the received data: `TracesData` messages, or lines of recorded steps."""


class Sender(NamedTuple):
    """The resource that spans come from: `service.name`, and its instance or, without one, its host."""

    service: str
    instance: str
    form: SentForm = "spans"

    @property
    def is_unnamed(self) -> bool:
        """Whether the server has no name: the SDK's default is `unknown_service`, often with its program."""
        return self.service == _UNNAMED or self.service.split(":")[0] == "unknown_service"


class SenderSpans(NamedTuple):
    """A `TracesData` message with the spans of one sender, and their number."""

    sender: Sender
    payload: bytes
    spans: int


# On the wire a message and its bytes are the same, so encoded spans are copied into a request unchanged.
(_TracesData,) = trace_messages(["TracesData"], as_bytes=["scope_spans"])
(_ScopeSpans,) = trace_messages(["ScopeSpans"])
(_EncodedSpans,) = trace_messages(["ScopeSpans"], as_bytes=["spans"])


class _Work:
    """Counts what a request has: resources, scopes, spans, events, attributes, and fields that OTLP does not define.

    The count runs while the request is read, before its elements become objects: two bytes can become an object of a
    hundred, and gzip makes two bytes of a few bits.
    """

    def __init__(self) -> None:
        self._elements = 0
        self._slice_end = SLICE_ELEMENTS

    def add(self, elements: int) -> bool:
        """Count some more; return whether other requests should have a turn now.

        Raises:
            RequestError: The request has too many elements.
        """
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise RequestError(f"more than {MAX_ELEMENTS:,} spans, events and attributes")
        is_due = self._elements >= self._slice_end
        if is_due:
            self._slice_end = self._elements + SLICE_ELEMENTS
        return is_due


class PrivacyFilter:
    """Selects the attributes to keep, and whether spans of other scopes keep any.

    Args:
        keep_attributes: Keys of span attributes to keep in addition to those that `ingest` keeps.
        all_spans: Whether spans that are not vLLM's keep their names and attributes.
    """

    def __init__(self, keep_attributes: Collection[str] = (), *, all_spans: bool = False) -> None:
        self._span_keys = _Keys({*dialects.SPAN_ATTRIBUTES, *keep_attributes})
        self._all_spans = all_spans

    def by_sender(self, body: bytes, observed: Observed) -> InSlices[list[SenderSpans]]:
        """Return the filtered spans of a request, for each sender in it.

        Raises:
            RequestError: The body is not an export request of traces, or has too many elements.
        """
        work = _Work()
        payloads: dict[Sender, list[bytes]] = {}
        counts: Counter[Sender] = Counter()
        try:
            for number, start, stop in submessages(body, 0, len(body)):
                if work.add(_RESOURCE_ELEMENTS):
                    yield
                if number == _RESOURCE_SPANS_FIELD:
                    sender, payload, spans = yield from self._resource_spans(body, start, stop, observed, work)
                    payloads.setdefault(sender, []).append(payload)
                    counts[sender] += spans
        except (DecodeError, ValueError):
            raise RequestError("not an ExportTraceServiceRequest") from None
        # Protobuf parses concatenated messages as one.
        return [SenderSpans(s, b"".join(payloads[s]), count) for s, count in counts.items() if count]

    def _resource_spans(
        self, body: bytes, start: int, stop: int, observed: Observed, work: _Work
    ) -> InSlices[SenderSpans]:
        encoded = yield from _header(body, start, stop, work)
        sender, resource = _resource(encoded)
        data, spans = _TracesData(), 0
        resource_spans = data.resource_spans.add(resource=resource)
        for number, scope_start, scope_stop in submessages(body, start, stop):
            if work.add(_SCOPE_ELEMENTS):
                yield
            if number != _SCOPE_SPANS_FIELD:
                continue
            encoded = yield from _header(body, scope_start, scope_stop, work)
            scope, kept = _scope(encoded)
            for begin, end, fields in _pieces(body, scope_start, scope_stop):
                if work.add(fields):
                    yield
                scope_spans = _ScopeSpans.FromString(body[begin:end])
                scope_spans.DiscardUnknownFields()  # they may hold text that a user wrote
                spans += len(scope_spans.spans)
                yield from self._reduce(scope, scope_spans.spans, observed, work)
                scope_spans.scope = kept
                if scope_spans.spans:
                    resource_spans.scope_spans.append(scope_spans.SerializeToString())
                del scope_spans  # as long as the request, perhaps
        return SenderSpans(sender, data.SerializeToString(), spans)

    def _reduce(self, scope: str, spans: Any, observed: Observed, work: _Work) -> InSlices[None]:
        """Reduce the spans of one scope to the data that are kept."""
        is_vllm, may_be = scope in _VLLM_SCOPES, scope.startswith("vllm")
        for span in spans:
            elements = _SPAN_ELEMENTS + len(span.attributes)
            if is_vllm or (may_be and span.name in _PHASE_SPANS):
                self._span_keys.keep(span.attributes)
                for event in span.events:
                    elements += 1 + _EVENT_KEYS.keep(event.attributes)
                    if elements >= SLICE_ELEMENTS:
                        work.add(elements)
                        elements = 0
                        yield
                observed.add(scope, span)
            else:
                elements += len(span.events)
                self._reduce_other(span)
            if work.add(elements):
                yield

    def _reduce_other(self, span: Any) -> None:
        # Exceptions and messages of other libraries quote what users sent.
        del span.events[:]
        if self._all_spans:
            self._span_keys.keep(span.attributes)
            return
        del span.attributes[:]
        span.ClearField("name")
        span.ClearField("status")


def _pieces(body: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Divide a `ScopeSpans` into pieces that are messages too, each of a long span or of several short ones.

    Yields:
        Begin and end of a piece, and the number of fields that were looked at for it.

    Raises:
        RequestError: A span or an event has too many fields.
    """
    position = start
    fields = 0
    # A piece is parsed at once. This many bytes hold 32,768 fields at most, and need no check.
    if stop - start > _WRITTEN_BYTES:
        for number, begin, end in submessages(body, start, stop):
            fields += 1
            if end - start > _WRITTEN_BYTES and position > start:
                yield start, position, fields
                start, fields = position, 0
            if number == _SPANS_FIELD and end - begin > _WRITTEN_BYTES:
                _require_few_fields(body, begin, end)
            position = end
    yield start, stop, fields


def _header(body: bytes, start: int, stop: int, work: _Work) -> InSlices[bytes]:
    """Return the resource of a `ResourceSpans`, or the scope of a `ScopeSpans`: nearly always the first field."""
    for number, begin, end in submessages(body, start, stop):
        if number == _HEADER_FIELD:
            if end - begin > _HEADER_BYTES:
                raise RequestError(f"a resource or a scope of more than {_HEADER_BYTES:,} bytes")
            if work.add((end - begin) // _BYTES_OF_ELEMENT):
                yield
            return body[begin:end]
        if work.add(1):
            yield
    return b""


def _require_few_fields(body: bytes, start: int, stop: int) -> None:
    """Refuse a span or an event with too many fields, because all of them are parsed at once."""
    for count, (number, begin, end) in enumerate(submessages(body, start, stop), 1):
        if count > MAX_FIELDS:
            raise RequestError(f"a span or an event of more than {MAX_FIELDS:,} fields")
        if number == _EVENTS_FIELD and end - begin > _WRITTEN_BYTES:
            _require_few_fields(body, begin, end)


class _Keys:
    """Keys of attributes that are kept, and the bytes with which an encoded attribute of each begins."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = frozenset(keys)
        self._beginnings = frozenset(KeyValue(key=key).SerializeToString() for key in keys)

    def keep(self, attributes: Any) -> int:
        """Remove the attributes of other keys from a field of encoded ones; almost always there are no others.

        Returns:
            How many attributes there were.
        """
        # The first byte is the tag of the key, the second its length. Other encodings are valid but rare.
        try:
            is_kept = [a[: a[1] + 2] in self._beginnings or self._has_key(a) for a in attributes]
        except IndexError:
            is_kept = [self._has_key(a) for a in attributes]
        if not all(is_kept):
            kept = list(compress(attributes, is_kept))
            del attributes[:]
            attributes.extend(kept)
        return len(is_kept)

    def _has_key(self, attribute: bytes) -> bool:
        # In this class the value is an unknown field, so it is not parsed into objects.
        return StringValue.FromString(attribute).value in self._keys


_EVENT_KEYS = _Keys(
    {
        "event.type",
        *dialects.TS_NS_KEYS,
        *dialects.TS_S_KEYS,
        *(key for keys in dialects.JOURNEY_KEYS.values() for key in keys),
        *(key for keys in dialects.STEP_KEYS.values() for key in keys),
        *(key for keys in dialects.SNAPSHOT_KEYS.values() for key in keys),
    }
)


_MAX_CACHED_BYTES = 4096


def _cached(function: Callable[[bytes], _T]) -> Callable[[bytes], _T]:
    """Cache the results for the last short arguments; long ones would let a sender fill the memory."""
    cached = lru_cache(maxsize=1024)(function)
    return lambda encoded: (cached if len(encoded) <= _MAX_CACHED_BYTES else function)(encoded)


@_cached
def _resource(encoded: bytes) -> tuple[Sender, bytes]:
    """Return the sender that a resource names, and the resource reduced to the attributes that are kept."""
    resource = Resource.FromString(encoded)
    kept = [attribute for attribute in resource.attributes if attribute.key in _INSTANCE_KEYS]
    named = {attribute.key: attribute.value.string_value for attribute in kept}
    host = named.get("host.name") or named.get("host.id") or ""
    service, instance = named.get("service.name") or _UNNAMED, named.get("service.instance.id") or host
    return Sender(_short_name(service), _short_name(instance)), Resource(attributes=kept).SerializeToString()


def _short_name(name: str) -> str:
    """Return a name, or the beginning of a long one with a hash of all of it."""
    if len(name) <= _NAME_LENGTH:
        return name
    return f"{name[: _NAME_LENGTH - _SPAN_HASH_DIGITS]}{hashlib.sha256(name.encode()).hexdigest()[:_SPAN_HASH_DIGITS]}"


@_cached
def _scope(encoded: bytes) -> tuple[str, bytes]:
    """Return the name of a scope, and the scope without its attributes."""
    scope = InstrumentationScope.FromString(encoded)
    return scope.name, InstrumentationScope(name=scope.name, version=scope.version).SerializeToString()


class _JsonScope(msgspec.Struct):
    scope: msgspec.Raw = _NO_OBJECT
    spans: list[msgspec.Raw] | None = None


class _JsonResource(msgspec.Struct):
    resource: msgspec.Raw = _NO_OBJECT
    scope_spans: list[_JsonScope] | None = None
    camel: list[_JsonScope] | None = msgspec.field(name="scopeSpans", default=None)


class _JsonRequest(msgspec.Struct):
    resource_spans: list[_JsonResource] | None = None
    camel: list[_JsonResource] | None = msgspec.field(name="resourceSpans", default=None)


class _JsonSpan(msgspec.Struct):
    events: list[msgspec.Raw] | None = None


def protobuf_of_json(body: bytes) -> InSlices[bytes]:
    """Return a request in OTLP's JSON, whose ids are hexadecimal where protobuf's own JSON has base64, as protobuf.

    Resources, scopes, spans and events are parsed one by one: unparsed text costs no extra memory.

    Raises:
        RequestError: The body is not an export request of traces, or has too many elements.
    """
    # Before anything is parsed. In strings there may be some too; attributes have one in twenty bytes.
    if max(body.count(sign) for sign in (b"{", b"[", b",")) > MAX_ELEMENTS:
        raise RequestError(f"more than {MAX_ELEMENTS:,} objects, lists or values")
    work = _Work()
    try:
        document = msgspec.json.decode(body, type=_JsonRequest)
        data = _TracesData()
        for resource in document.camel or document.resource_spans or ():
            if work.add(_RESOURCE_ELEMENTS):
                yield
            encoded = _of_json(resource.resource, Resource()).SerializeToString()
            resource_spans = data.resource_spans.add(resource=encoded)
            for scope in resource.camel or resource.scope_spans or ():
                if work.add(_SCOPE_ELEMENTS):
                    yield
                scope_spans = _EncodedSpans(scope=_of_json(scope.scope, InstrumentationScope()).SerializeToString())
                for text in scope.spans or ():
                    span = yield from _span_of_json(text, work)
                    scope_spans.spans.append(span.SerializeToString())
                resource_spans.scope_spans.append(scope_spans.SerializeToString())
        request: bytes = data.SerializeToString()
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError):
        raise RequestError("not an ExportTraceServiceRequest in OTLP's JSON") from None
    return request


def _span_of_json(text: msgspec.Raw, work: _Work) -> InSlices[Span]:
    """Return a span; its events, perhaps thousands, are parsed one by one."""
    events = msgspec.json.decode(text, type=_JsonSpan).events or []
    if len(events) > MAX_FIELDS:
        raise RequestError(f"a span of more than {MAX_FIELDS:,} events")
    objects = _objects(text) - sum(map(_objects, events))
    if work.add(_SPAN_ELEMENTS + objects):
        yield
    document = _document(text, objects)
    document.pop("events", None)
    document.pop("links", None)  # never kept, and their ids need not be read
    for key in _ID_KEYS:
        if document.get(key):
            document[key] = base64.b64encode(bytes.fromhex(document[key])).decode()
    span = json_format.ParseDict(document, Span(), ignore_unknown_fields=True)
    for event in events:
        if work.add(1 + _objects(event)):
            yield
        _of_json(event, span.events.add())
    return span


def _objects(text: msgspec.Raw) -> int:
    """Return how many objects a text has, counting eight keys as one; braces and colons of its strings count too."""
    encoded = bytes(text)
    return encoded.count(b"{") + encoded.count(b":") // 8


def _document(text: msgspec.Raw, objects: int) -> Any:
    """Parse a resource, a scope, an event or a span, which has few objects and so takes little time."""
    if objects > MAX_JSON_OBJECTS:
        raise RequestError(f"a resource, span or event of more than {MAX_JSON_OBJECTS:,} objects")
    return json.loads(bytes(text)) or {}


def _of_json(text: msgspec.Raw, message: _MessageT) -> _MessageT:
    document = _document(text, _objects(text))
    return json_format.ParseDict(document, message, ignore_unknown_fields=True)


def stated_bytes(body: bytes) -> int:
    """Return the decompressed length that a gzip member states; `gunzip` enforces it."""
    return int.from_bytes(body[-4:], "little")


def gunzip(body: bytes, *, limit_bytes: int) -> InSlices[bytes]:
    """Decompress one gzip member.

    Raises:
        RequestError: The member is damaged, cut, followed by other bytes, or longer than the limit when decompressed.
    """
    size = stated_bytes(body)
    if size > limit_bytes:
        raise RequestError(f"longer than {limit_bytes:,} bytes when decompressed")
    # A MiB of gzip can hold a GiB of zeros, and say that it does not.
    member = zlib.decompressobj(_GZIP_WINDOW)
    content = bytearray()
    try:
        while len(content) <= size and (piece := member.decompress(body, _GUNZIP_BYTES)):
            content += piece
            body = member.unconsumed_tail
            yield
    except zlib.error:
        raise RequestError("not gzip") from None
    # One member: thousands of empty ones would take minutes.
    if len(content) > size or not member.eof or member.unused_data:
        raise RequestError("gzip cut short, or with something behind it")
    return bytes(content)
