"""Export requests to what is written of them: checked, without what a user wrote, apart by where they go.

The rules are those of `tracefit ingest`: of vLLM's spans the attributes that tables are made of, ids, counts and sampling
parameters; of other spans that they were there. What is not kept never reaches the disk.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tracefit.errors import DataError
from tracefit.tables import dialects

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

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
_EVENT_KEYS = frozenset(
    {
        "event.type",
        *dialects.TS_NS_KEYS,
        *dialects.TS_S_KEYS,
        *(key for keys in dialects.JOURNEY_KEYS.values() for key in keys),
        *(key for keys in dialects.STEP_KEYS.values() for key in keys),
        *(key for keys in dialects.SNAPSHOT_KEYS.values() for key in keys),
    }
)
_VLLM_SCOPES, _PHASE_SPANS = frozenset(dialects.VLLM_SCOPES), frozenset(dialects.PHASE_SPANS)
_ID_KEYS = ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id")
_GZIP_WINDOW = 31


class RequestError(DataError):
    """A request that will never be accepted, however often it is sent."""


class Sender(NamedTuple):
    """The resource that spans come from: `service.name`, and its instance or, without one, its host."""

    service: str
    instance: str


class Part(NamedTuple):
    """A `TracesData` message of one sender's spans."""

    sender: Sender
    payload: bytes
    spans: int


@dataclass(frozen=True, slots=True)
class PrivacyFilter:
    """Which attributes are kept, and whether spans of other scopes keep anything."""

    span_keys: frozenset[str]
    all_spans: bool = False

    @classmethod
    def of(cls, keep_attributes: Collection[str], *, all_spans: bool) -> PrivacyFilter:
        """Return the filter that keeps some span attributes beside the usual ones."""
        return cls(frozenset({*dialects.SPAN_ATTRIBUTES, *keep_attributes}), all_spans)

    def apply(self, resource_spans: ResourceSpans, observed: Observed) -> int:
        """Reduce the spans of one resource, in place; return how many there are."""
        _keep(resource_spans.resource.attributes, _RESOURCE_KEYS)
        del resource_spans.resource.entity_refs[:]
        spans = 0
        for scope_spans in resource_spans.scope_spans:
            del scope_spans.scope.attributes[:]
            scope = scope_spans.scope.name
            spans += len(scope_spans.spans)
            for span in scope_spans.spans:
                self._reduce(span, scope)
                observed.add(scope, span)
        return spans

    def _reduce(self, span: Span, scope: str) -> None:
        del span.links[:]
        if span.trace_state:
            span.ClearField("trace_state")
        if scope in _VLLM_SCOPES or (span.name in _PHASE_SPANS and scope.startswith("vllm")):
            _keep(span.attributes, self.span_keys)
            for event in span.events:
                _keep(event.attributes, _EVENT_KEYS)
            return
        del span.events[:]
        if self.all_spans:
            _keep(span.attributes, self.span_keys)
            return
        del span.attributes[:]
        span.ClearField("name")
        span.ClearField("status")


def _keep(attributes: Any, keys: Collection[str]) -> None:
    """Remove the attributes of other keys; almost always there are none."""
    kept = [attribute for attribute in attributes if attribute.key in keys]
    if len(kept) < len(attributes):
        del attributes[:]
        attributes.extend(kept)


def parts_of(request: ExportTraceServiceRequest, privacy: PrivacyFilter, observed: Observed) -> list[Part]:
    """Return what is written of a request, a part for each sender in it."""
    request.DiscardUnknownFields()  # whatever a sender hides there is not known to be harmless
    by_sender: dict[Sender, TracesData] = {}
    counts: dict[Sender, int] = {}
    for resource_spans in request.resource_spans:
        sender = _sender_of(resource_spans.resource)
        if count := privacy.apply(resource_spans, observed):
            by_sender.setdefault(sender, TracesData()).resource_spans.append(resource_spans)
            counts[sender] = counts.get(sender, 0) + count
    return [Part(sender, data.SerializeToString(), counts[sender]) for sender, data in by_sender.items()]


def _sender_of(resource: Resource) -> Sender:
    named = {attribute.key: attribute.value.string_value for attribute in resource.attributes}
    host = named.get("host.name") or named.get("host.id") or ""
    return Sender(named.get("service.name") or "unknown", named.get("service.instance.id") or host)


def decode_protobuf(body: bytes) -> ExportTraceServiceRequest:
    """Parse a request.

    Raises:
        RequestError: It is no export request of traces.
    """
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise RequestError("not an ExportTraceServiceRequest") from None


def decode_json(body: bytes) -> ExportTraceServiceRequest:
    """Parse a request in OTLP's JSON, whose ids are hexadecimal where protobuf's own JSON has base64.

    Raises:
        RequestError: It is no export request of traces.
    """
    try:
        document = json.loads(body)
        for item in (*_spans(document),):
            for key in _ID_KEYS:
                if item.get(key):
                    item[key] = base64.b64encode(bytes.fromhex(item[key])).decode()
            item.pop("links", None)
        return json_format.ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError):
        raise RequestError("not an ExportTraceServiceRequest in OTLP's JSON") from None


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
