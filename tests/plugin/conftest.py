"""A traced scheduler whose records are kept, and the spans that they make; the middleware in front of an app."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from plugin.fake_vllm import FakeScheduler
from tracefit_vllm import ApiTracing
from tracefit_vllm import scheduler as plugin
from tracefit_vllm.records import Header
from tracefit_vllm.spans import SpanBuilder


class Kept:
    """In place of a recorder: keeps records."""

    def __init__(self, header):
        self.header, self.records, self.why, self.is_closed = header, [tuple(header)], None, False

    def put(self, record, weight=1):
        self.records.append(record)

    def end(self, why):
        self.why = why

    def close(self):
        self.is_closed = True


@pytest.fixture
def traced(monkeypatch):
    """Return a function that makes a traced scheduler and the recorder it has."""

    def of(base=FakeScheduler, **options):
        kept = []

        def recorder(header):
            kept.append(Kept(header))
            return kept[0]

        monkeypatch.setattr(plugin.Tracing.__init__, "__defaults__", (recorder,))
        made = plugin.traced(base)(**options)
        return made, kept[0] if kept else None

    return of


@pytest.fixture
def built():
    """Return a function from records to their spans: steps' events and journeys by request."""

    def of(records, seed=0):
        builder = SpanBuilder(Header(*records[0]), seed=seed)
        spans = [span for record in records[1:] for span in builder.feed(record)] + list(builder.close())
        steps = [span for span in spans if span.scope == "vllm.scheduler.step"]
        journeys = {s.attributes["gen_ai.request.id"]: s for s in spans if s.scope == "vllm.scheduler"}
        events = [event for span in steps for event in span.events]
        return SimpleNamespace(
            spans=spans,
            steps=steps,
            journeys=journeys,
            summaries=[e.attributes for e in events if e.name == "step.BATCH_SUMMARY"],
            snapshots=[e.attributes for e in events if e.name == "step.REQUEST_SNAPSHOT"],
        )

    return of


@pytest.fixture
def serve():
    """Return a function that sends one request through the middleware to an app; it returns the app's scope and the
    spans."""

    def of(app, *, path="/v1/completions", headers=()):
        exporter, seen = InMemorySpanExporter(), []
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))

        async def seeing(scope, receive, send):
            seen.append(scope)
            await app(send)

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
        asyncio.run(ApiTracing(seeing, provider.get_tracer("vllm.api"))(scope, None, send))
        return seen[0], exporter.get_finished_spans()

    return of
