"""Generated spans as those of OpenTelemetry's Python SDK, which its exporters send."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from tracefit.synth import GeneratedSpan, SynthRun

_KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER}


def sdk_spans(run: SynthRun, *, offset: int = 0) -> list[ReadableSpan]:
    """Return every span of a run, in the order they were sent; `offset` is added to trace ids, to make others of
    them."""
    scopes = {span.scope: InstrumentationScope(span.scope) for span in run.spans}
    return [
        _sdk_span(span, Resource(batch.resource), scopes[span.scope], offset)
        for batch in run.batches
        for span in batch.spans
    ]


def _sdk_span(span: GeneratedSpan, resource: Resource, scope: InstrumentationScope, offset: int) -> ReadableSpan:
    def context(span_id: str) -> SpanContext:
        trace_id = (int(span.trace_id, 16) + offset) % (1 << 128)
        return SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))

    events = BoundedList(None)
    events._dq = deque(Event(e.name, e.attributes, e.unix_ns) for e in span.events)
    events.dropped = span.dropped_events
    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=context(span.parent_span_id) if span.parent_span_id else None,
        resource=resource,
        attributes=span.attributes,
        events=events,
        kind=_KINDS[int(span.kind)],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=scope,
    )
