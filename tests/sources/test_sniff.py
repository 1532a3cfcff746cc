"""What is said of a file from its head."""

from __future__ import annotations

import pytest

from tracefit.sources import TraceFile, sniff
from tracefit.sources.describe import describe_file


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("lines", "OTLP JSON lines"),
        ("lines with BOM, CRLF and blanks", "OTLP JSON lines"),
        ("pretty object", "one OTLP JSON document"),
        ("pretty array", "one OTLP JSON document"),
        ("Tempo batches", "OTLP JSON lines"),
        ("bare protobuf", "one OTLP protobuf message"),
        ("framed protobuf", "length-prefixed OTLP protobuf"),
        ("framed zstd of JSON", "length-prefixed zstd of OTLP JSON"),
        ("framed zstd of protobuf", "length-prefixed zstd of OTLP protobuf"),
    ],
)
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_a_trace_file_is_described_by_its_contents(tmp_path, otlp, shape, words, compression):
    data = otlp.COMPRESSIONS[compression](otlp.SHAPES[shape]([otlp.record(otlp.span(n)) for n in (1, 2)]))
    (tmp_path / "photo.png").write_bytes(data)
    file = TraceFile.local(tmp_path / "photo.png")
    told = describe_file(file)
    known = {"plain": "none"}.get(compression, compression)
    assert (told.name, told.bytes, told.compression, told.shape) == ("photo.png", len(data), known, words)
    assert sniff(file).is_traces


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"time,value\n1,2\n", "not OTLP traces"),
        (b'{"hidden_size": 8}', "not OTLP traces"),
        (b'{"resourceLogs":[]}', "OTLP JSON lines, logs"),
        (b'[\n{"resourceMetrics":[]}]', "one OTLP JSON document, metrics"),
    ],
)
def test_what_holds_no_traces_says_so(tmp_path, data, words):
    (tmp_path / "traces.json").write_bytes(data)
    contents = sniff(TraceFile.local(tmp_path / "traces.json"))
    assert str(contents) == words
    assert not contents.is_traces


def test_a_head_is_enough(tmp_path, otlp):
    """A first record of 40 MB is told by its keys; what is no trace is not read through."""
    line = otlp.to_json(otlp.record(otlp.span(name="x" * (40 << 20))))
    (tmp_path / "traces.json").write_bytes(line)
    (tmp_path / "weights.bin").write_bytes(b"\x00\x20\x00\x00\x0a\x84\xff\xff\x7f" + bytes(40 << 20))
    read: list[int] = []
    opened = TraceFile.open

    def counted(self, **_):
        return opened(self, on_read=read.append)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceFile, "open", counted)
        assert sniff(TraceFile.local(tmp_path / "traces.json")).is_traces
        assert not sniff(TraceFile.local(tmp_path / "weights.bin")).is_traces
    assert sum(read) < 12 << 20
