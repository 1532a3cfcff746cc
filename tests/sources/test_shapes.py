from __future__ import annotations

import io
import os
import threading

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

from tracefit.errors import DataError, UsageError
from tracefit.sources import Frame, read_frames


@pytest.fixture
def records(otlp):
    """Return three records of one span each."""
    return [otlp.record(otlp.span(number)) for number in (1, 2, 3)]


def test_lines_keep_their_offsets(otlp, records):
    data = otlp.SHAPES["lines"](records)
    for frame in otlp.frames_of(data):
        assert data[frame.offset : frame.offset + len(frame.payload)] == frame.payload
        assert frame.encoding == "json"


def test_offsets_count_what_lies_between_lines(otlp, records):
    lines = [otlp.to_json(record) for record in records]
    data = b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n \n\xef\xbb\xbf" + lines[1] + b"\n" + lines[2]
    frames = otlp.frames_of(data)
    assert [frame.payload.rstrip(b"\r") for frame in frames] == lines
    assert [data[frame.offset :].startswith(frame.payload) for frame in frames] == [True] * 3


def test_offsets_of_compressed_files_are_those_of_their_content(otlp, records):
    plain = otlp.SHAPES["framed protobuf"](records)
    expected = otlp.frames_of(plain)
    assert [frame.encoding for frame in expected] == ["protobuf"] * 3
    assert expected[0].offset == 4
    for compress in otlp.COMPRESSIONS.values():
        assert otlp.frames_of(compress(plain)) == expected


def test_names_and_paths_do_not_matter(otlp, records, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(otlp.COMPRESSIONS["zstd"](otlp.SHAPES["framed protobuf"](records)))
    frames = list(read_frames(path))
    assert [frame.source_file for frame in frames] == [str(path)] * 3
    assert list(read_frames(str(path))) == frames


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_standard_input_may_be_a_pipe(otlp, records, compression):
    data = otlp.COMPRESSIONS[compression](otlp.SHAPES["lines"](records))
    read_end, write_end = os.pipe()

    def write():
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            for index in range(0, len(data), 7):
                pipe.write(data[index : index + 7])

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(read_end, "rb") as pipe:
        frames = list(read_frames("-", stdin=pipe))
    writer.join()
    assert len(frames) == 3


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf"])
def test_an_empty_file_holds_nothing(otlp, data):
    assert otlp.frames_of(data) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20,
        b"time,value\n" + b"1,2\n" * 5000,
        b'{"architectures": ["LlamaForCausalLM"]}\n',
        b'{"ts": 1, "event": "x"}\n' * 5000,
        b"\n\n- a: 1\n- b: 2\n" * 50,
        b"\0" * 5000,
        os.urandom(1) + b"\xff" * 5000,
        b'["a", "b"]',
        b"x",
    ],
)
def test_what_is_no_trace_is_one_reject(otlp, data):
    (reject,) = otlp.frames_of(data)
    assert (reject.source_offset, reject.length, reject.reason) == (0, len(data), "not OTLP traces")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_the_reject_of_a_compressed_file_counts_its_content(otlp, compression):
    data = b"time,value\n" * 9999
    (reject,) = otlp.frames_of(otlp.COMPRESSIONS[compression](data))
    assert reject.length == len(data)


LOGS = b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{}]}]}]}'
METRICS = b'{ "resource_metrics": [] }'


@pytest.mark.parametrize(
    ("data", "signal"), [(LOGS + b"\n" + LOGS, "logs"), (METRICS, "metrics"), (b"[\n" + LOGS + b"]", "logs")]
)
def test_json_of_other_signals_is_one_error_that_names_the_file(tmp_path, data, signal):
    path = tmp_path / "other.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"holds OTLP {signal}, not traces") as caught:
        list(read_frames(path))
    assert caught.value.where == str(path)


def _other_messages():
    logs = LogsData()
    log = logs.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=5)
    log.body.string_value = "x"
    metrics = MetricsData()
    metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="vllm:requests/x")
    metric.gauge.data_points.add(time_unix_nano=7)
    metrics.resource_metrics[0].scope_metrics[0].metrics[0].name = "vllm.requests"
    return {"logs": logs.SerializeToString(), "metrics": metrics.SerializeToString()}


@pytest.mark.parametrize("signal", ["logs", "metrics"])
@pytest.mark.parametrize("container", ["bare", "framed", "framed zstd"])
def test_protobuf_of_other_signals_is_one_error(otlp, signal, container):
    message = _other_messages()[signal]
    data = {
        "bare": message,
        "framed": otlp.framed([message]),
        "framed zstd": otlp.framed([otlp.zstd(message)]),
    }
    with pytest.raises(DataError, match=f"holds OTLP {signal}, not traces"):
        otlp.frames_of(data[container])


def test_a_first_line_that_is_damaged_does_not_decide(otlp, records):
    data = otlp.SHAPES["lines"](records)
    for first in (b"x" + data[1:], data[5:], b"\xff" + data, data[: data.index(b",") + 1] + b"\n" + data):
        frames = otlp.frames_of(first)
        assert [f.payload for f in frames[-2:]] == [otlp.to_json(record) for record in records[1:]]


def test_a_first_frame_that_is_damaged_does_not_decide(otlp, records):
    data = otlp.SHAPES["framed protobuf"](records)
    reject, *frames = otlp.frames_of(b"\xff" + data[1:])
    assert (reject.source_offset, reject.length) == (0, 4 + len(otlp.to_protobuf(records[0])))
    assert [frame.encoding for frame in frames] == ["protobuf"] * 2


def test_a_bare_message_of_any_length_is_not_taken_for_json_or_frames(otlp):
    for size in range(300):
        message = otlp.to_protobuf(otlp.record(otlp.span(1, name="x" * size)))
        (frame,) = otlp.frames_of(message)
        assert (frame.payload, frame.encoding) == (message, "protobuf")


@pytest.mark.parametrize("shape", ["framed protobuf", "bare protobuf", "framed zstd of protobuf"])
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_json_in_a_string_does_not_make_protobuf_json(otlp, shape, compression):
    records = [otlp.record(otlp.span(n, name='{"resourceSpans":[]}\n{"resourceLogs":[]}')) for n in (1, 2)]
    data = otlp.COMPRESSIONS[compression](otlp.SHAPES[shape](records))
    assert [frame.encoding for frame in otlp.frames_of(data)] == ["protobuf"] * 2


def test_bare_messages_are_handed_out_by_resource(otlp, records):
    messages = [otlp.to_protobuf(record) for record in records]
    assert [frame.payload for frame in otlp.frames_of(b"".join(messages))] == messages


def test_a_file_that_cannot_be_opened_is_a_usage_error(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="cannot be opened"):
            list(read_frames(path))


def test_a_stream_is_read_as_it_comes(otlp, records):
    lines = [otlp.to_json(record) + b"\n" for record in records]

    class Endless(io.RawIOBase):
        served = 0

        def readable(self):
            return True

        def read(self, size=-1):
            self.served += 1
            return lines[self.served % 3] * 400

    stream = Endless()
    frames = read_frames("-", stdin=stream)
    for _ in range(5):
        assert isinstance(next(frames), Frame)
    assert stream.served < 40
