"""Hostile protobuf costs about what good protobuf costs: what is done per item is counted, and memory is bounded."""

from __future__ import annotations

import pytest

from tracefit.otlp import decode, decode_frames, proto_decode, proto_general, proto_walk
from tracefit.otlp.proto_decode import decode_protobuf
from tracefit.sources import Frame, wire

TINY = b"\x4a\0"
"""A span attribute with neither key nor value."""


def field(number, content):
    size = bytearray()
    left = len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([number << 3 | 2, *size, left]) + content


def record(*spans):
    return field(1, field(2, b"".join(field(2, span) for span in spans)))


def span(number, rest=b""):
    return field(1, number.to_bytes(16, "big")) + field(2, number.to_bytes(8, "big")) + rest


def frames_of(*payloads):
    return [Frame("f", number, payload, "protobuf") for number, payload in enumerate(payloads)]


def ids(*numbers):
    return [f"{number:016x}" for number in numbers]


def test_records_of_too_many_fields_are_decoded_in_parts(monkeypatch, calls):
    monkeypatch.setattr(proto_walk, "MAX_FIELDS", 5000)
    decoded = calls(decode, "decode_protobuf")
    dense = [record(span(number, b"\x5a\0" * 2000)) for number in range(1, 9)]
    batches = list(decode_frames(frames_of(*dense, record(span(99)))))
    assert [name for batch in batches for name in batch.spans["span_id"]] == ids(*range(1, 9), 99)
    assert sum(len(batch.events[""]) for batch in batches) == 16_000
    sizes = [len(frames) for (frames,) in decoded]
    assert max(sizes[sizes.index(9) + 1 :]) < 9
    assert len(batches) > 3
    # A record by itself is decoded however many it has.
    (alone,) = decode_frames(frames_of(record(span(1, b"\x5a\0" * 6000))))
    assert alone.events[""].height == 6000


def test_the_rejects_before_records_in_parts_are_there_once(monkeypatch):
    monkeypatch.setattr(proto_walk, "MAX_FIELDS", 5000)
    dense = [record(span(number, b"\x5a\0" * 2000), b"") for number in range(1, 9)]
    frames = frames_of(*dense)
    before = frames[0].reject("before")
    rejects = [reject for batch in decode_frames([before, *frames]) for reject in batch.rejects]
    assert [reject.reason for reject in rejects] == ["before", *["span 1: traceId is not 16 bytes"] * 8]


def test_json_records_of_too_many_events_are_decoded_in_parts(otlp, monkeypatch):
    monkeypatch.setattr(decode, "MAX_EVENTS", 50)
    events = [otlp.event("e", [])] * 20
    lines = [otlp.to_json(otlp.record(otlp.span(number, events=events))) for number in range(1, 9)]
    batches = list(decode_frames(Frame("f", n, line, "json") for n, line in enumerate(lines)))
    assert [name for batch in batches for name in batch.spans["span_id"]] == ids(*range(1, 9))
    assert max(batch.events["e"].height for batch in batches) <= 60
    assert sum(batch.events["e"].height for batch in batches) == 160


def test_an_attribute_that_is_there_again_and_again_is_parsed_once(calls):
    parsed = calls(proto_general, "_known_pair")
    other = field(9, field(1, b"a") + field(2, field(1, b"x")))
    batch = decode_protobuf(frames_of(record(span(1, TINY * 1000 + other + TINY * 1000 + other))))
    assert batch.attributes["key"].to_list() == ["", "a"]
    assert len(parsed) == 2


@pytest.mark.parametrize("bad", [b"", b"\x30\1", field(1, b"abc")])
def test_bad_spans_that_nobody_wants_listed_are_only_counted(monkeypatch, calls, bad):
    monkeypatch.setattr("tracefit.otlp.rejects.MAX_REJECTS", 10)
    read = calls(proto_general, "_span")
    batch = decode_protobuf(frames_of(record(span(1), *[bad] * 500, span(2)), record(*[bad] * 300, span(3))))
    assert batch.spans["span_id"].to_list() == ids(1, 2, 3)
    assert len(batch.rejects) == 11
    assert batch.rejects[-1].reason == "790 more bad spans"
    assert len(read) == 10 + 3


def test_small_numbers_are_walked_without_the_careful_reader(calls):
    read = calls(wire, "read_field")
    unknown = b"\x70\1" * 1000  # a number of a field that no span has
    batch, _ = proto_decode.decode_usual(frames_of(record(span(1, unknown))))[1]
    assert batch.spans["span_id"].to_list() == ids(1)
    assert read == []
    # A tag of field 0 is none, however short.
    assert proto_decode.decode_usual(frames_of(record(span(1, b"\0\1"))))[1] is None
