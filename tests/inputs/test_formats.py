"""The format of a file, from its content."""

from __future__ import annotations

import gzip
import io
import sys
from random import Random

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

from tracefit.inputs import formats
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.compression import Expansion
from tracefit.inputs.files import TraceFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WORDS = {
    "lines": "OTLP JSON lines",
    "lines with BOM, CRLF and blanks": "OTLP JSON lines",
    "pretty object": "one OTLP JSON document",
    "pretty array": "one OTLP JSON document",
    "Tempo batches": "OTLP JSON lines",
    "bare protobuf": "one OTLP protobuf message",
    "framed protobuf": "length-prefixed OTLP protobuf",
    "framed zstd of JSON": "length-prefixed zstd of OTLP JSON",
    "framed zstd of protobuf": "length-prefixed zstd of OTLP protobuf",
}


@pytest.fixture
def inspect(tmp_path):
    def inspect_bytes(data):
        (tmp_path / "photo.png").write_bytes(data)
        return inspect_file(TraceFile.local(tmp_path / "photo.png"))

    return inspect_bytes


@pytest.mark.parametrize("shape", WORDS)
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_a_trace_file_is_described_by_its_contents(inspect, otlp, shape, compression):
    if "framed zstd" in shape and compression != "plain":
        pytest.skip("no exporter compresses twice")
    contents = inspect(otlp.COMPRESSIONS[compression](otlp.SHAPES[shape](2)))
    known = "framed zstd" if "framed zstd" in shape else {"plain": None}.get(compression, compression)
    assert (str(contents), contents.compression) == (WORDS[shape], known)
    assert contents.is_traces


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"time,value\n1,2\n", "not OTLP traces"),
        (b'{"hidden_size": 8}', "not OTLP traces"),
        (b'{"resourceLogs":[]}', "OTLP JSON lines, logs"),
        (b'{ "resource_metrics": [] }', "OTLP JSON lines, metrics"),
        (b'[\n{"resourceMetrics":[]}]', "one OTLP JSON document, metrics"),
        (b"{}", "OTLP JSON lines"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20, "not OTLP traces"),
        (b"\0" * 5000, "not OTLP traces"),
        (b"\xff" * 5000, "not OTLP traces"),
        (b"\n\n- a: 1\n- b: 2\n" * 50, "not OTLP traces"),
        (b'["a", "b"]', "not OTLP traces"),
        (b"x", "not OTLP traces"),
    ],
)
def test_what_holds_no_traces_says_so(inspect, data, words):
    assert str(inspect(data)) == words
    assert inspect(data).is_traces == (data == b"{}")


@pytest.mark.parametrize("container", ["bare", "framed", "framed zstd"])
def test_protobuf_of_other_signals_is_recognised(inspect, otlp, container):
    logs = LogsData()
    log = logs.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=5)
    log.body.string_value = "x"
    metrics = MetricsData()
    metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="vllm.requests")
    metric.gauge.data_points.add(time_unix_nano=7)
    for signal, data in (("logs", logs), ("metrics", metrics)):
        message = data.SerializeToString()
        packed = {
            "bare": message,
            "framed": otlp.framed([message]),
            "framed zstd": otlp.framed([otlp.zstd(message)]),
        }
        assert inspect(packed[container]).signal == signal


def test_traces_in_a_file_that_other_signals_share_are_traces(inspect, otlp):
    assert inspect(b'{"resourceLogs":[]}\n' + otlp.text()).signal == "traces"


@pytest.mark.parametrize("shape", ["lines", "pretty object", "pretty array", "framed protobuf", "bare protobuf"])
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
@pytest.mark.parametrize("junk", [b"junk, no JSON\n", b"\xff\xfe\x01\n", b"{\n", b"]\n", b"\0\0\0\n"])
def test_junk_before_the_first_record_does_not_decide(inspect, otlp, shape, compression, junk):
    if shape.startswith("pretty") and junk == b"{\n":
        pytest.skip("a document may begin so")
    data = otlp.COMPRESSIONS[compression](junk + otlp.SHAPES[shape](4))
    assert str(inspect(data)) == WORDS[shape]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_junk_first_member_does_not_decide(inspect, otlp, pack):
    members = pack(Random(1).randbytes(200)), pack(otlp.SHAPES["lines"](3))
    assert str(inspect(b"".join(members))) == "OTLP JSON lines"
    broken = members[1][:9] + b"\xff" * 9 + members[1][18:]
    assert str(inspect(broken + members[1])) == "OTLP JSON lines"


@pytest.mark.parametrize("first", [b"{", b"[", b"\xff"])
def test_the_first_byte_of_a_framed_file_does_not_decide(inspect, otlp, first):
    data = otlp.SHAPES["framed protobuf"](4)
    assert str(inspect(first + data[1:])) == "length-prefixed OTLP protobuf"


def test_bare_message_is_not_json_or_frames(inspect, otlp):
    for size in range(300):
        assert inspect(otlp.message(name="x" * size)).shape == "bare"


@pytest.mark.parametrize("shape", ["framed protobuf", "bare protobuf", "framed zstd of protobuf"])
def test_json_in_a_string_does_not_make_protobuf_json(inspect, otlp, shape):
    messages = [otlp.message(n, name='{"resourceSpans":[]}\n{"resourceLogs":[]}') for n in (1, 2)]
    data = {
        "framed protobuf": otlp.framed(messages),
        "bare protobuf": b"".join(messages),
        "framed zstd of protobuf": otlp.framed(map(otlp.zstd, messages)),
    }[shape]
    assert str(inspect(data)) == WORDS[shape]


@pytest.mark.slow
def test_a_head_is_enough(tmp_path, otlp):
    """A first record of 40 MB is known by its keys."""
    (tmp_path / "traces.json").write_bytes(otlp.text(name="x" * (40 << 20)))
    (tmp_path / "traces.pb").write_bytes(otlp.framed([otlp.message(name="x" * (40 << 20))]))
    files = CountingFiles()
    for name in ("traces.json", "traces.pb"):
        assert inspect_file(files.file(tmp_path / name)).is_traces
    assert 0 < sum(files.sizes) <= 16 << 20


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    "begins",
    [
        pytest.param(b"\x00\x20\x00\x00\x0a\x84\xff\xff\x7f", id="weights"),
        pytest.param(b"\x1f\x8b\x08\x00", id="damaged gzip"),
        pytest.param(b"\x28\xb5\x2f\xfd", id="damaged zstd"),
    ],
)
def test_what_is_no_trace_is_not_read_through(tmp_path, begins):
    """It is searched for records as far as junk can reach, and its head is read a few times."""
    assert Expansion().most_junk_bytes <= 64 << 20
    (tmp_path / "weights.bin").write_bytes(begins + Random(2).randbytes(1 << 20) + bytes(39 << 20))
    files = CountingFiles()
    found = inspect_file(files.file(tmp_path / "weights.bin"), Expansion(most_junk_bytes=8 << 20))
    assert not found.is_traces
    assert 0 < sum(files.sizes) <= (8 << 20) + 3 * formats.FORMAT_HEAD_BYTES


class CountingFiles:
    """A file system of this disk that notes the sizes of what is read."""

    def __init__(self):
        self.sizes = []

    def file(self, path):
        return TraceFile(str(path), str(path), path.stat().st_size, filesystem=self)

    def open_input_stream(self, path, **_):
        sizes = self.sizes

        class Counted(io.FileIO):
            def read(self, size=-1):
                data = super().read(size)
                sizes.append(len(data))
                return data

        return Counted(path)
