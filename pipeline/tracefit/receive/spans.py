"""Check export requests, remove what users wrote, and divide the spans by sender.

The rules are those of `tracefit ingest`: of vLLM's spans the attributes that tables are made of are kept (ids, counts,
sampling parameters), of other spans only that they were there. What is not kept never reaches the disk.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tracefit.errors import DataError
from tracefit.inputs.otlp_wire import trace_messages
from tracefit.tables import dialects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tracefit.receive.observed import Observed

_RESOURCE_KEYS = frozenset(
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
_VLLM_SCOPES, _PHASE_SPANS = frozenset(dialects.VLLM_SCOPES), frozenset(dialects.PHASE_SPANS)
_ID_KEYS = ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id")
_GZIP_WINDOW = 31  # zlib's largest window, 15, and 16 for a gzip header


_T = TypeVar("_T")


class RequestError(DataError):
    """A request that will never be accepted, however often it is sent."""


SentForm: TypeAlias = Literal["spans", "steps"]
"""What comes: `TracesData` messages, or lines of recorded steps."""


class Sender(NamedTuple):
    """The resource that spans come from: `service.name`, and its instance or, without one, its host."""

    service: str
    instance: str
    form: SentForm = "spans"


class SenderSpans(NamedTuple):
    """A `TracesData` message with the spans of one sender, and their number."""

    sender: Sender
    payload: bytes
    spans: int


(_TracesData,) = trace_messages(["TracesData"])


class PrivacyFilter:
    """Which attributes are kept, and whether spans of other scopes keep anything.

    Args:
        keep_attributes: Keys of span attributes to keep beside those that `ingest` keeps.
        all_spans: Whether spans that are not vLLM's keep their names and attributes.
    """

    def __init__(self, keep_attributes: Collection[str] = (), *, all_spans: bool = False) -> None:
        self._span_keys = _Keys({*dialects.SPAN_ATTRIBUTES, *keep_attributes})
        self._all_spans = all_spans

    def by_sender(self, body: bytes, observed: Observed) -> list[SenderSpans]:
        """Return what is written of a request, for each sender in it.

        Raises:
            RequestError: It is no export request of traces.
        """
        try:
            data = _TracesData.FromString(body)
            data.DiscardUnknownFields()  # they may hold text that a user wrote
            messages: dict[Sender, Any] = {}
            counts: dict[Sender, int] = {}
            for resource_spans in data.resource_spans:
                sender, resource_spans.resource = _resource(resource_spans.resource)
                count = self._reduce(resource_spans, observed)
                counts[sender] = counts.get(sender, 0) + count
                messages.setdefault(sender, _TracesData()).resource_spans.append(resource_spans)
        except DecodeError:
            raise RequestError("not an ExportTraceServiceRequest") from None
        return [
            SenderSpans(s, messages[s].SerializeToString(), count) for s, count in counts.items() if count
        ]

    def _reduce(self, resource_spans: Any, observed: Observed) -> int:
        """Remove what is not kept from the spans of one resource; return how many there are."""
        spans = 0
        for scope_spans in resource_spans.scope_spans:
            scope, scope_spans.scope = _scope(scope_spans.scope)
            is_vllm, may_be = scope in _VLLM_SCOPES, scope.startswith("vllm")
            for span in scope_spans.spans:
                spans += 1
                if is_vllm or (may_be and span.name in _PHASE_SPANS):
                    self._span_keys.keep(span.attributes)
                    for event in span.events:
                        _EVENT_KEYS.keep(event.attributes)
                    observed.add(scope, span)
                else:
                    self._reduce_other(span)
        return spans

    def _reduce_other(self, span: Any) -> None:
        # Exceptions and messages of other libraries quote what users sent.
        del span.events[:]
        if self._all_spans:
            self._span_keys.keep(span.attributes)
            return
        del span.attributes[:]
        span.ClearField("name")
        span.ClearField("status")


class _Keys:
    """Keys of attributes that are kept, and the bytes with which an encoded attribute of each begins."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = frozenset(keys)
        self._beginnings = frozenset(KeyValue(key=key).SerializeToString() for key in keys)

    def keep(self, attributes: Any) -> None:
        """Remove the attributes of other keys from a field of encoded ones; almost always there are none."""
        # The first byte is the tag of the key, the second its length. Other encodings of the same are allowed, and rare.
        try:
            kept = [a for a in attributes if a[: a[1] + 2] in self._beginnings or self._has_key(a)]
        except IndexError:
            kept = [a for a in attributes if self._has_key(a)]
        if len(kept) < len(attributes):
            del attributes[:]
            attributes.extend(kept)

    def _has_key(self, attribute: bytes) -> bool:
        return KeyValue.FromString(attribute).key in self._keys


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
    """Remember the results for the last short arguments: long ones are memory that a sender could ask for."""
    remembered = lru_cache(maxsize=1024)(function)
    return lambda encoded: (remembered if len(encoded) <= _MAX_CACHED_BYTES else function)(encoded)


@_cached
def _resource(encoded: bytes) -> tuple[Sender, bytes]:
    """Return the sender a resource names, and the resource without what is not kept."""
    resource = Resource.FromString(encoded)
    kept = [attribute for attribute in resource.attributes if attribute.key in _RESOURCE_KEYS]
    named = {attribute.key: attribute.value.string_value for attribute in kept}
    host = named.get("host.name") or named.get("host.id") or ""
    sender = Sender(named.get("service.name") or "unknown", named.get("service.instance.id") or host)
    return sender, Resource(attributes=kept).SerializeToString()


@_cached
def _scope(encoded: bytes) -> tuple[str, bytes]:
    """Return the name of a scope, and the scope without its attributes."""
    scope = InstrumentationScope.FromString(encoded)
    return scope.name, InstrumentationScope(name=scope.name, version=scope.version).SerializeToString()


def protobuf_of_json(body: bytes) -> bytes:
    """Return a request in OTLP's JSON, whose ids are hexadecimal where protobuf's own JSON has base64, as protobuf.

    Raises:
        RequestError: It is no export request of traces.
    """
    try:
        document = json.loads(body)
        for item in _spans(document):
            for key in _ID_KEYS:
                if item.get(key):
                    item[key] = base64.b64encode(bytes.fromhex(item[key])).decode()
            item.pop("links", None)  # never kept, and their ids need not be read
        request = json_format.ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError):
        raise RequestError("not an ExportTraceServiceRequest in OTLP's JSON") from None
    return request.SerializeToString()


def _spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a JSON request, under either spelling of its keys."""
    for resource in document.get("resourceSpans") or document.get("resource_spans") or ():
        for scope in resource.get("scopeSpans") or resource.get("scope_spans") or ():
            yield from scope.get("spans") or ()


def gunzip(body: bytes, *, limit_bytes: int) -> bytes:
    """Decompress one gzip member.

    Raises:
        RequestError: It is damaged, cut, followed by something, or longer than the limit when decompressed.
    """
    # Bounded as it is decompressed: a MiB of gzip can hold a GiB of zeros.
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = member.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise RequestError("not gzip") from None
    if len(content) > limit_bytes:
        raise RequestError(f"longer than {limit_bytes:,} bytes when decompressed")
    if not member.eof or member.unused_data:  # one member: thousands of empty ones would take minutes
        raise RequestError("gzip cut short, or with something behind it")
    return content
