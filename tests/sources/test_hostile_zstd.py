"""Framed zstd of tiny, empty and damaged frames by the thousand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tracefit.sources import Reject, zstd_frames
from tracefit.sources.zstd_frames import unzstd_small

MANY = 5000


@pytest.fixture
def streams(calls):
    """Return the streams that are set up: they take longer than a tiny frame is worth."""
    return calls(zstd_frames, "_stream")


def test_small_frames_are_decompressed_without_a_stream(otlp, streams):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    frames = otlp.frames_of(otlp.framed([otlp.zstd(each) for each in [good, *[b"{}"] * MANY, b"", good]]))
    assert [frame.payload for frame in frames] == [good, *[b"{}"] * MANY, b"", good]
    assert len(streams) < 10


@pytest.mark.parametrize("size", [0, 1, 200, 255, 256, 257, 300, 65_535, 65_536])
def test_what_a_small_frame_holds_is_read_whatever_its_header(size):
    text = bytes(number % 251 for number in range(size))
    assert unzstd_small(pa.Codec("zstd").compress(text, asbytes=True)) == text


def test_frames_that_do_not_say_what_they_hold_or_are_bad_are_left_to_the_stream(otlp):
    text = b"some text " * 50
    whole = otlp.zstd(text)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text)
    streamed = sink.getvalue().to_pybytes()
    assert unzstd_small(streamed) in (None, text)
    for bad in (
        b"",
        whole[:10],
        whole[:-1],
        whole + b"x",
        whole + whole,
        otlp.zstd(b"x" * 70_000),
    ):
        assert unzstd_small(bad) is None
    for frame in (whole, streamed, whole + whole):
        (found,) = otlp.frames_of(otlp.framed([frame]))
        assert found.payload == text * (2 if frame == whole + whole else 1)


@pytest.mark.parametrize("bad", [bytes(4), b"\0\0\0\4\x28\xb5\x2f\xfd", b"\0\0\0\7\x28\xb5\x2f\xfd\x08xx"])
def test_frames_of_nothing_in_a_row_are_one_reject(otlp, bad):
    good = otlp.zstd(otlp.to_json(otlp.record(otlp.span(1))))
    data = otlp.framed([good]) + bad * MANY + otlp.framed([good])
    items = otlp.frames_of(data)
    assert [isinstance(item, Reject) for item in items] == [False, True, False]
    assert (items[1].source_offset, items[1].length) == (4 + len(good), len(bad) * MANY)


@pytest.mark.parametrize("text", [b"", b"{}\n", b"{}" + b" " * 997 + b"\n"])
def test_small_frames_before_a_damaged_one_are_gone_over_without_streams(otlp, streams, text):
    good = otlp.zstd(otlp.to_json(otlp.record(otlp.span(1))) + b"\n")
    damaged = bytearray(otlp.zstd(otlp.to_json(otlp.record(otlp.span(2))) + b"\n"))
    damaged[20] ^= 0xFF
    batch = otlp.batch_of(good + otlp.zstd(text) * MANY + good + bytes(damaged) + good)
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 3
    assert sum(len(stream) > 0 for stream in streams) < 50
    (gap,) = [reject for reject in batch.rejects if "zstd" in reject.reason]
    assert gap.reason.startswith("zstd data is corrupt")
    whole = len(otlp.to_json(otlp.record(otlp.span(1)))) + 1
    assert batch.spans["source_offset"].to_list() == [
        0,
        whole + len(text) * MANY,
        batch.spans["source_offset"][2],
    ]
