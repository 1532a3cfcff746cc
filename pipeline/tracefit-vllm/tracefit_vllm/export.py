"""The process that makes spans of records and sends them, beside the engine.

It reads frames of records from its standard input until that ends, which it does when the server ends in whatever way.
"""

from __future__ import annotations

import logging
import marshal
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from tracefit_vllm.recorder import SIZE
from tracefit_vllm.records import Header
from tracefit_vllm.spans import MOST_EVENTS, SpanBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit_vllm.records import Record
    from tracefit_vllm.spans import Span

MOST_QUEUED_EVENTS = 50_000
"""Events of spans that wait for the collector, about 1.5 kB each; of spans beyond, events are counted as dropped."""

RETRY_S = 1.0
LAST_S = 10.0
"""How long what is left is offered to a collector after the server has ended."""

_IDS = RandomIdGenerator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _ReadableSpan(ReadableSpan):
    """A span with events that were lost before it was made."""

    dropped = 0

    @property
    def dropped_events(self) -> int:
        return self.dropped


def to_otlp(span: Span, resource: Resource) -> ReadableSpan:
    """Return a span as exporters take it."""
    trace_id, span_id = span.context or _new_context(span)
    parent = SpanContext(*span.parent, is_remote=True, trace_flags=_SAMPLED) if span.parent else None
    made = _ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.unix_ns) for event in span.events],
        kind=SpanKind.INTERNAL,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(span.scope),
    )
    made.dropped = span.dropped_events
    return made


def _new_context(span: Span) -> tuple[int, int]:
    trace_id = span.parent[0] if span.parent else _IDS.generate_trace_id()
    return trace_id, _IDS.generate_span_id()


def make_exporter(endpoint: str | None) -> SpanExporter:
    """Return the exporter that vLLM would use."""
    if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

        return Http(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

    return Grpc(endpoint=endpoint, insecure=not (endpoint or "").startswith("https"))


class Sender:
    """Sends spans in batches of a bounded size; holds a bounded number of events while the collector is away.

    `add` is called from one thread, `send` from another.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter, self._resource = exporter, resource
        self._spans: deque[Span] = deque()
        self._added = self._sent = self._dropped = 0
        self._fails = False

    def add(self, span: Span) -> None:
        """Queue a span, or count its events where there is no room."""
        weight = len(span.events)
        if self._added - self._sent + weight > MOST_QUEUED_EVENTS:
            self._dropped += weight + span.dropped_events
            return
        span.context = span.context or _new_context(span)  # once: a collector may have taken what is sent again
        span.dropped_events += self._dropped
        self._dropped = 0
        self._added += weight
        self._spans.append(span)

    def send(self) -> bool:
        """Send what is queued; return whether the collector took all of it."""
        while self._spans:
            batch, weight = [self._spans.popleft()], 0
            weight = len(batch[0].events)
            while self._spans and weight + len(self._spans[0].events) <= MOST_EVENTS:
                batch.append(self._spans.popleft())
                weight += len(batch[-1].events)
            try:
                result = self._exporter.export([to_otlp(span, self._resource) for span in batch])
            except Exception:  # noqa: BLE001 - an exporter that raises has failed too
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self._spans.extend(batch)  # after the others: it may be this one that is not taken
                if not self._fails:
                    self.say("the collector takes no spans; they are kept, as far as there is room")
                self._fails = True
                return False
            self._sent += weight
            if self._fails:
                self.say("the collector takes spans again")
            self._fails = False
        return True

    def close(self) -> None:
        """Count what is lost."""
        if lost := self._added - self._sent + self._dropped:
            self.say(f"{lost} events could not be sent")
        self._exporter.shutdown()

    @staticmethod
    def say(what: str) -> None:
        """Put a line in the server's log."""
        with suppress(OSError):  # a full disk, or nobody reads it any more
            print(f"tracefit-vllm: {what}", file=sys.stderr, flush=True)  # noqa: T201 - the server's log


def frames(stream: BinaryIO) -> Iterator[list[Record]]:
    """Yield the batches of records that a stream holds; a cut one at its end is left out."""
    while len(head := stream.read(SIZE.size)) == SIZE.size:
        (size,) = SIZE.unpack(head)
        if len(data := stream.read(size)) < size:
            return
        # Written by the engine that started this process with the same interpreter.
        yield marshal.loads(data)  # noqa: S302


def run(stream: BinaryIO, exporter: SpanExporter | None = None, *, pause_s: float = 0.5) -> None:
    """Make spans of a stream's records and send them, until the stream ends and some seconds longer at most."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line of our own says it
    batches = frames(stream)
    first = next(batches, None)
    if first is None:
        return
    header = Header(*first.pop(0))  # type: ignore[arg-type]  # the recorder's first record
    rank: dict[str, str | int] = {} if header.rank is None else {"vllm.data_parallel_rank": header.rank}
    resource = Resource.create({"vllm.process_id": str(header.process_id), **rank})
    sender = Sender(exporter or make_exporter(header.endpoint), resource)
    builder, building, ended = SpanBuilder(header), threading.Lock(), threading.Event()

    def add(spans: Iterator[Span]) -> None:
        with building:
            for span in spans:
                sender.add(span)

    def send_all() -> None:
        while not ended.wait(pause_s):
            add(builder.tick(time.monotonic_ns()))
            if not sender.send():
                ended.wait(RETRY_S)
        until = time.monotonic() + LAST_S
        while not sender.send() and time.monotonic() < until:
            time.sleep(pause_s)

    thread = threading.Thread(target=send_all, daemon=True)
    thread.start()
    batches = chain([first], batches)
    try:
        for batch in batches:
            add(span for record in batch for span in builder.feed(record))
    except Exception as error:  # noqa: BLE001 - the spans built so far are still sent
        sender.say(f"tracing ends, serving goes on: {type(error).__name__}: {error}")
    add(builder.close())
    deque(batches, maxlen=0)  # after an error too, it reads to the end: the engine's side needs not know
    ended.set()
    thread.join(2 * LAST_S)
    sender.close()


def main() -> None:
    """Run on the standard input."""
    run(sys.stdin.buffer)
