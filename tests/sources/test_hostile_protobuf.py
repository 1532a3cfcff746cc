"""Tiny frames and fields by the million, and lengths that lie: what is done per item is counted."""

from __future__ import annotations

import pytest

from tracefit.otlp.rejects import MAX_REJECTS
from tracefit.sources import Reject, framing, wire
from tracefit.sources.framing import FrameFinder, likely_frames
from tracefit.sources.window import Window

MANY = 30_000


def field(number, content):
    size = bytearray()
    left = len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([number << 3 | 2, *size, left]) + content


@pytest.fixture
def fields_read(calls):
    return calls(wire, "read_field")


@pytest.mark.parametrize("tiny", [b"", field(2, b""), field(1, b"") * 3, b"x" * 31])
@pytest.mark.parametrize("shape", ["bare", "framed", "in one frame"])
def test_tiny_messages_are_handed_on_together(otlp, fields_read, shape, tiny):
    good = otlp.to_protobuf(otlp.record(otlp.span(1)))
    item = field(1, tiny)
    data = {
        "bare": good + item * MANY + good,
        "framed": otlp.framed([good, *[item] * MANY, good]),
        "in one frame": otlp.framed([good, item * MANY, good]),
    }[shape]
    frames = otlp.frames_of(data)
    assert (frames[0].payload, frames[-1].payload) == (good, good)
    assert frames[-1].offset == len(data) - len(good)
    assert b"".join(frame.payload for frame in frames[1:-1]) == item * MANY
    assert len(frames) < MANY / 20
    assert len(fields_read) < MANY / 5


def test_the_shortest_span_is_not_in_a_run(otlp):
    span = field(1, b"\1" * 16) + field(2, b"\1" * 8)
    record = field(1, field(2, field(2, span)))
    assert len(record) == 2 + wire.SHORTEST_RESOURCE_SPANS
    tiny = field(1, b"") * MANY
    batch = otlp.batch_of(tiny + record + tiny + record + tiny)
    assert otlp.span_ids(batch) == ["01" * 8] * 2
    assert batch.spans["source_offset"].to_list() == [len(tiny), 2 * len(tiny) + len(record)]
    assert batch.rejects == ()


@pytest.mark.parametrize("tag", [0x0A, 0x12, 0x1A])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_tiny_fields_of_a_large_message_are_taken_together(otlp, monkeypatch, fields_read, level, tag):
    monkeypatch.setattr(framing, "MAX_HELD_BYTES", 4000)
    good = otlp.to_protobuf(otlp.record(otlp.span(1)))
    inside = bytes([tag, 0]) * MANY
    for number in (2, 1)[2 - level :]:
        inside = field(number, inside)
    batch = otlp.batch_of(otlp.framed([good, inside, good]))
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 2
    assert len(fields_read) < MANY / 5
    if (level, tag) == (2, 0x12):  # spans without ids
        assert batch.rejects[-1].reason == f"{MANY - MAX_REJECTS} more bad spans"


def test_many_top_level_fields_are_walked_by_the_parser(otlp, fields_read):
    good = otlp.to_protobuf(otlp.record(otlp.span(1)))
    bad = field(1, b"") * MANY
    cut = field(1, b"") * MANY + b"\x0a\x7f"
    frames = [f for f in otlp.frames_of(otlp.framed([good, bad, cut, good])) if not isinstance(f, Reject)]
    assert [frame.payload for frame in frames] == [good, bad, good]
    assert len(fields_read) < 2000


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"\0\0\0\2\x0a\0", [0]),
        (b"\0\0\0\1\x0a\0", []),
        (b"\0\0\0\4\x0a\2xx", [0]),
        (b"\0\0\0\3\x0a\2xx", []),
        (b"\0\0\0\0\x0a\0", []),
        (b"\0\0\1\x83\x0a\x80\3" + b"x" * 20, [0]),
        (b"\0\0\1\x82\x0a\x80\3" + b"x" * 20, []),
        (b"\x10\0\0\0\x0a\xfb\xff\xff\x7f" + b"x" * 20, [0]),
        (b"\x0f\xff\xff\xff\x0a\xff\xff\xff\x7f" + b"x" * 20, []),
        (b"\x11\0\0\0\x0a\0" + b"x" * 20, []),
        (b"\0\0\0\2\x12\0" + b"x" * 20, []),
        (b"x\0\0\0\2\x0a\0", [1]),
    ],
)
def test_a_length_and_the_field_behind_it_are_held_against_each_other(header, expected):
    text = header + b"x" * 20
    assert likely_frames(text, len(header)).tolist() == expected


def test_lengths_that_lie_are_not_looked_at_one_by_one(fields_read):
    data = b"\0\0\0\1\x0a" * MANY
    window = Window(iter([data]))
    window.fill(len(data))
    assert FrameFinder(window).next(0, len(data)) == -1
    assert len(fields_read) < 10


def test_what_lies_behind_damage_is_looked_for_in_little_steps(otlp, monkeypatch):
    looked = []

    def counted(text, stop):
        looked.append(len(text))
        return likely_frames(text, stop)

    monkeypatch.setattr(framing, "likely_frames", counted)
    good = otlp.to_protobuf(otlp.record(otlp.span(1)))
    data = (otlp.framed([good]) + b"x") * 1000
    frames = [frame for frame in otlp.frames_of(data) if not isinstance(frame, Reject)]
    assert len(frames) == 1000
    assert sum(looked) < 20 * len(data)
