"""OpenTelemetry's own exporters as senders: what arrives is what was sent, and makes the tables of a file."""

from __future__ import annotations

import inspect
import threading

import grpc
import polars as pl
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tracefit import ingest
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

_TAKES_OPTIONS = "channel_options" in inspect.signature(GrpcExporter).parameters
BATCH = 512
KINDS = ["grpc", "grpc gzip", "http", "http gzip"]


def exporter(kind, receiver, timeout=60):
    is_gzip = "gzip" in kind
    if "grpc" in kind:
        compression = grpc.Compression.Gzip if is_gzip else grpc.Compression.NoCompression
        options = (("grpc.use_local_subchannel_pool", 1),)  # else all exporters share one connection
        at = f"http://127.0.0.1:{receiver.grpc_port}"
        more = {"channel_options": options} if _TAKES_OPTIONS else {}  # older ones do not
        return GrpcExporter(at, compression=compression, timeout=timeout, **more)
    compression = Compression.Gzip if is_gzip else Compression.NoCompression
    return HttpExporter(f"http://127.0.0.1:{receiver.http_port}/v1/traces", compression=compression, timeout=timeout)


def send(kind, receiver, spans, connections=1):
    """Send spans in batches as the SDK does, divided over connections; all of them must be acknowledged."""
    batches = [spans[i : i + BATCH] for i in range(0, len(spans), BATCH)]
    results = []

    def one(number):
        sender = exporter(kind, receiver)
        results.extend(sender.export(batch) for batch in batches[number::connections])
        sender.shutdown()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [SpanExportResult.SUCCESS] * len(batches)


def ids(spans):
    return sorted((s.context.trace_id.to_bytes(16, "big"), s.context.span_id.to_bytes(8, "big")) for s in spans)


@pytest.fixture(scope="module")
def run():
    """A run of two processes, as newer SDKs have it: events dropped, requests preempted and aborted."""
    options = SynthOptions(
        name="vllm-synth",
        requests=150,
        step_sampling=0.5,
        rich_sampling=0.2,
        num_blocks=600,
        instance_ids="process",
    )
    return synth(options)


TABLES = ("runs", "spans", "journey_events", "steps", "request_snapshots", "requests", "rejects")
WHERE = ("source_file", "source_offset", "files", "bytes", "content_sha256")


def tables(folder, out):
    ingest([folder], out)
    store = TableStore(out)
    return {name: store.read(name).drop(*WHERE, strict=False) for name in TABLES}


@pytest.fixture(scope="module")
def in_a_file(run, tmp_path_factory):
    """Return the folder of the run as a file, and its tables."""
    root = tmp_path_factory.mktemp("file")
    folder = write_run(run, root)
    return folder, tables(folder, root / "tables")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] if n else []) for n, k in enumerate(KINDS)])
def test_the_tables_are_those_of_the_same_spans_in_a_file(lib, start, tmp_path, run, in_a_file, kind):
    configured, of_a_file = in_a_file
    files = ["--run-config", configured / "exp-config.yaml", "--model-config", configured / "config.json"]
    receiver = start(tmp_path / "received", *files)
    send(kind, receiver, lib.sdk_spans(run))
    assert receiver.end()[0] == 0
    received = tables(tmp_path / "received", tmp_path / "tables")
    for name in TABLES:
        expected = of_a_file[name]
        assert received[name].drop("settings", strict=False).equals(expected.drop("settings", strict=False)), name
    assert of_a_file["journey_events"].height > 500
    assert settings(received) == settings(of_a_file)


def settings(found):
    (text,) = found["runs"]["settings"].unique().to_list()
    return pl.Series([text]).str.json_decode(infer_schema_length=None).struct.unnest().drop("other").to_dicts()


@pytest.mark.slow
def test_the_two_processes_of_a_server_are_one_run(lib, start, tmp_path, new_traces):
    """With newer SDKs each has a service.instance.id: a folder each, and requests joined over both."""
    traces = new_traces(server="engine").request(1, 0, step=1, server="api")
    receiver = start(tmp_path / "received", "--model", "m")
    with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        call(traces.protobuf(), timeout=30)
    receiver.end()
    folder = tmp_path / "received" / "vllm"
    assert sorted(path.name for path in folder.iterdir()) == ["api", "engine", "exp-config.yaml"]
    found = tables(tmp_path / "received", tmp_path / "tables")
    assert found["requests"].select("server", "admission_us").rows() == [("engine", 1000.0)]


@pytest.mark.slow
def test_what_is_received_is_what_was_sent(lib, start, tmp_path):
    """12,000 spans: both protocols, with and without gzip, over 1, 8 and 64 connections."""
    run = synth(SynthOptions(requests=400, step_sampling=0.02))
    receiver, every, offset = start(tmp_path / "received"), [], 0
    ways = [(kind, connections) for connections in (1, 8, 64) for kind in KINDS]
    while len(every) < 12_000:
        kind, connections = ways[offset % len(ways)]
        spans = lib.sdk_spans(run, offset=offset << 64)
        send(kind, receiver, spans, connections)
        every += ids(spans)
        offset += 1
    assert offset >= len(ways)
    code, out, err = receiver.end()
    assert (code, err) == (0, "")
    assert sorted(lib.span_ids(tmp_path / "received")) == sorted(every)
    assert f"{len(every):,}" in out
