"""From the engine's thread to a collector: bounded, and readable whatever ends."""

from __future__ import annotations

import io
import logging
import marshal
import os
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tracefit_vllm
from plugin.fake_vllm import engine
from plugin.test_scheduler import load
from receive.process import Process
from tracefit import ingest
from tracefit.tables.store import TableStore
from tracefit_vllm import export, recorder
from tracefit_vllm import records as records_of
from tracefit_vllm.recorder import SIZE, Recorder
from tracefit_vllm.records import Header
from tracefit_vllm.spans import Event, Span

HEADER = Header(1, 10**18, None, None, 16, 100, 1.0, 0.0, 100)


EVENT = Event("step.BATCH_SUMMARY", 1, {})


def frames(*batches):
    datas = [marshal.dumps(list(batch)) for batch in batches]
    return b"".join(SIZE.pack(len(data)) + data for data in datas)


@pytest.fixture
def recorded(traced):
    scheduler, kept = traced()
    engine(scheduler, load())
    return scheduler, kept.records


class Collector(InMemorySpanExporter):
    """Takes spans after it has refused some times."""

    def __init__(self, refuses=0):
        super().__init__()
        self.refuses = refuses

    def export(self, spans):
        if self.refuses:
            self.refuses -= 1
            return SpanExportResult.FAILURE
        return super().export(spans)


def received(collector):
    spans = collector.get_finished_spans()
    summaries = [e for s in spans for e in s.events if e.name == "step.BATCH_SUMMARY"]
    return spans, summaries


def test_a_stream_becomes_spans(recorded):
    scheduler, records = recorded
    collector = Collector()
    export.run(io.BytesIO(frames(records[:9], records[9:])), collector, pause_s=0.001)
    spans, summaries = received(collector)
    assert len(summaries) == len(scheduler.truth.steps)
    journeys = [s for s in spans if s.instrumentation_scope.name == "vllm.scheduler"]
    assert len(journeys) == len(scheduler.truth.ended) == 30
    assert all(s.name == "llm_core" and s.end_time >= s.start_time > 10**18 for s in journeys)


def test_of_a_server_that_is_killed_the_last_frame_alone_is_lost(recorded):
    _, records = recorded
    data, collector = frames(records[:101], records[101:]), Collector()
    export.run(io.BytesIO(data[:-1]), collector, pause_s=0.001)
    _, summaries = received(collector)
    assert len(summaries) == sum(record[0] == 1 for record in records[1:101])


def test_a_collector_that_comes_back_gets_everything(recorded, capfd):
    scheduler, records = recorded
    collector = Collector(refuses=3)
    export.run(io.BytesIO(frames(records)), collector, pause_s=0.001)
    _, summaries = received(collector)
    assert len(summaries) == len(scheduler.truth.steps)
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "tracefit-vllm: the collector takes no spans",
        "tracefit-vllm: the collector takes spans again",
    ]


def test_a_span_that_is_sent_again_is_the_same(recorded):
    """A collector that answers too late has taken it."""
    _, records = recorded
    seen = []

    class Late(Collector):
        def export(self, spans):
            seen.extend((span.name, span.context.trace_id, span.context.span_id) for span in spans)
            return super().export(spans)

    export.run(io.BytesIO(frames(records)), Late(refuses=2), pause_s=0.001)
    assert len(seen) > len(set(seen)) == len({name for name, *_ in seen if name != "llm_core"}) + 30


def test_slow_collector_delays_no_record(recorded, monkeypatch, capfd):
    """It answers its first message after the last record was read: there is room for 100 events meanwhile."""
    _, records = recorded
    monkeypatch.setattr(export, "MOST_QUEUED_EVENTS", 100)
    header = Header(*records[0])._replace(closure_interval=5)
    has_read, is_asked = threading.Event(), threading.Event()

    class Slow(Collector):
        def export(self, spans):
            is_asked.set()
            assert has_read.wait(30), "records wait for the collector"
            return super().export(spans)

    def batches(_):
        yield [tuple(header), *records[1:60]]
        assert is_asked.wait(30), "nothing is sent before the end"
        yield records[60:]
        has_read.set()

    monkeypatch.setattr(export, "frames", batches)
    collector = Slow()
    export.run(io.BytesIO(), collector, pause_s=0.001)
    builder = export.SpanBuilder(header)
    made = [span for record in records[1:] for span in builder.feed(record)] + list(builder.close())
    spans = collector.get_finished_spans()
    kept, lost = sum(len(span.events) for span in spans), sum(span.dropped_events for span in spans)
    for line in capfd.readouterr().err.splitlines():
        lost += int(line.removeprefix("tracefit-vllm: ").removesuffix(" events could not be sent"))
    assert 0 < kept <= 200, "it is asked for the first of them at once"
    assert kept + lost == sum(len(span.events) for span in made)


def test_what_finds_no_room_is_counted_on_the_next_span(recorded, monkeypatch):
    """Room for 40 events: every event is either received or counted as dropped."""
    _, records = recorded
    monkeypatch.setattr(export, "MOST_QUEUED_EVENTS", 40)
    collector = Collector()
    builder = export.SpanBuilder(Header(*records[0]))
    spans = [span for record in records[1:] for span in builder.feed(record)]
    sender = export.Sender(collector, export.Resource.create({}))
    for span in spans[:-1]:
        sender.add(span)
    sender.send()
    sender.add(spans[-1])
    sender.send()
    got = collector.get_finished_spans()
    total = sum(len(span.events) for span in spans)
    dropped = sum(span.dropped_events for span in got)
    assert dropped > 0
    assert sum(len(span.events) for span in got) + dropped == total


def test_records_lost_to_a_slow_exporter_are_counted(monkeypatch, tmp_path):
    """The process reads nothing until the engine has handed over everything: what it gets and what is counted is
    all."""
    monkeypatch.setattr(recorder, "MOST_WEIGHT", 5000)
    os.mkfifo(tmp_path / "gate")
    program = "import sys; open(sys.argv[1]).read(); open(sys.argv[2], 'wb').write(sys.stdin.buffer.read())"
    made = Recorder(HEADER, [sys.executable, "-c", program, tmp_path / "gate", tmp_path / "got"])
    record = (2, 1, 1, "a" * 100)
    for _ in range(20_000):
        made.put(record)
    assert made._lost >= 20_000 - 5000 - 5000, "a pipe and a frame hold some"
    (tmp_path / "gate").write_text("now")
    while made._taken < made._put:
        threading.Event().wait(0.01)
    made.put(record)
    made.close()
    made.wait()
    with (tmp_path / "got").open("rb") as stream:
        got = [one for batch in export.frames(stream) for one in batch]
    assert got[0] == tuple(HEADER)
    assert sum(one == record for one in got) + sum(one[1] for one in got if one[0] == 5) == 20_001


def test_a_process_that_ends_ends_the_tracing_with_a_line(caplog):
    with caplog.at_level(logging.WARNING):
        made = Recorder(HEADER, [sys.executable, "-c", "pass"])
        made.wait()
        made.put((2, 1, 1, "a"))
        made.close()
    assert not made.is_on
    (line,) = caplog.messages
    assert "tracing ends, serving goes on: BrokenPipeError" in line
    made.put((2, 1, 1, "a"))  # nothing happens


def test_the_whole_way_to_tables(recorded, tmp_path, monkeypatch):
    """A process of its own, OTLP, `tracefit receive`: the steps are the scheduler's."""
    scheduler, records = recorded
    receiver = Process(tmp_path / "traces")
    try:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "fake")
        monkeypatch.setenv("PYTHONPATH", str(Path(tracefit_vllm.__file__).parents[1]))
        header = Header(*records[0])._replace(endpoint=f"http://127.0.0.1:{receiver.grpc_port}")
        made = Recorder(header)
        for record in records[1:]:
            made.put(record)
        made.close()
        made.wait()
    finally:
        code, _, said = receiver.end()
    assert code == 0, said
    ingest([tmp_path / "traces"], tmp_path / "tables")
    tables = TableStore(tmp_path / "tables")
    steps = tables.read("steps").sort("step_id")
    wanted = [(step, sum(one[1] for one in batch)) for step, *_, batch in scheduler.truth.steps]
    assert steps.select("step_id", "scheduled_tokens").rows() == wanted
    assert tables.read("requests").height == 30


def test_spans_that_are_never_taken_hold_up_no_others():
    """A collector refuses a span for good, as one that is too large for it."""

    class Picky(Collector):
        def export(self, spans):
            if any(span.name == "scheduler_steps_1" for span in spans):
                raise ValueError("not this one")
            return super().export(spans)

    collector = Picky()
    sender = export.Sender(collector, export.Resource.get_empty())
    for number in (1, 2, 3):
        span = Span("vllm.scheduler.step", f"scheduler_steps_{number}", 1, 2, {}, [EVENT] * 600)
        sender.add(span)
    while not sender.send() and len(collector.get_finished_spans()) < 2:
        pass
    assert [span.name for span in collector.get_finished_spans()] == [
        "scheduler_steps_2",
        "scheduler_steps_3",
    ]


def test_an_error_in_the_process_ends_the_tracing_with_a_line(recorded, capfd):
    _, records = recorded
    collector, stream = Collector(), io.BytesIO(frames(records[:20], [(records_of.STEP, "?")], records[20:]))
    export.run(stream, collector, pause_s=0.01)
    assert received(collector)[1], "what came before is sent"
    assert stream.read() == b"", "it reads on, so that the engine does not notice"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tracefit-vllm: tracing ends, serving goes on: TypeError")
