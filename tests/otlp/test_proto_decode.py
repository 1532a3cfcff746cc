"""Protobuf decoded all at once equals protobuf decoded one by one, or is left to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tracefit.otlp import columns
from tracefit.otlp.proto_decode import decode_one_by_one, decode_protobuf, decode_usual
from tracefit.sources import Frame, wire

quick = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

INSIDE = {
    "traces": {1: "resource spans"},
    "resource spans": {1: "resource", 2: "scope spans"},
    "resource": {1: "attribute"},
    "scope spans": {1: "scope", 2: "span"},
    "scope": {},
    "span": {9: "attribute", 11: "event", 15: "status"},
    "event": {3: "attribute"},
    "status": {},
    "attribute": {2: "value"},
    "value": {},
}
"""Messages and which of their fields are messages."""

NESTED = ("arrayValue", "kvlistValue", "bytesValue")


def varint(number, extra=0):
    """Encode a number, with `extra` bytes more than it needs."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    for _ in range(extra):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def unknown(rng):
    """Return a field that no message has, of some wire type; one of them is a group."""
    number = rng.choice([30, 100, 1000, 5000])
    content = rng.choice([
        (0, varint(rng.getrandbits(rng.choice([7, 40, 64])))), (1, bytes(8)), (2, b"\x03abc"), (2, b"\0"), (5, b"four"),
        (3, varint(number << 3 | 4)),
    ])  # fmt: skip
    return varint(number << 3 | content[0]) + content[1]


def rewritten(data, kind, rng, rate):
    """Write a message anew: with unknown fields, others twice or moved, and numbers longer than they need to be."""
    pieces = []
    for number, wire_type, start, stop in wire.fields(data, 0, len(data)):
        content = data[start:stop]
        inside = INSIDE[kind].get(number)
        if inside:
            content = rewritten(content, inside, rng, rate)
        extra = rng.choice([0, 1]) if rng.random() < rate else 0
        size = varint(len(content), extra) if wire_type == 2 else b""
        pieces.append(varint(number << 3 | wire_type) + size + content)
        if rng.random() < rate:
            pieces.append(rng.choice([unknown(rng), pieces[-1], b""]))
    if rng.random() < rate:
        rng.shuffle(pieces)
    return b"".join(pieces)


def of_scalars(tree):
    """Put a string in the place of each value that is not a scalar."""
    if isinstance(tree, list):
        return [of_scalars(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if any(name in tree for name in NESTED):
        return {"stringValue": "instead"}
    return {name: of_scalars(each) for name, each in tree.items()}


def frames_of(payloads):
    return [Frame("f", number, payload, "protobuf") for number, payload in enumerate(payloads)]


def assert_equal(found, expected):
    assert_frame_equal(found.spans, expected.spans)
    assert_frame_equal(found.attributes, expected.attributes)
    assert list(found.events) == list(expected.events)
    for name, frame in found.events.items():
        assert_frame_equal(frame, expected.events[name], check_exact=True)


def check(frames):
    """Compare both ways; return how many of the records were decoded all at once."""
    usual, fast = decode_usual(frames)
    if fast:
        expected, records = decode_one_by_one([frames[number] for number in usual])
        assert expected.rejects == ()
        assert_equal(fast[0], expected)
        assert fast[1].tolist() == records.tolist()
    expected, _ = decode_one_by_one(frames)
    found = decode_protobuf(frames)
    assert_equal(found, expected)
    assert found.rejects == expected.rejects
    return len(usual) if fast else 0


@quick
@given(data=st.data())
def test_spans_of_scalars_are_all_read_at_once(otlp, data):
    records = of_scalars(data.draw(otlp.records))
    for record in records:
        for span in record["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            span["attributes"] = list({each["key"]: each for each in span["attributes"]}.values())
    assert check(frames_of([otlp.to_protobuf(record) for record in records])) == len(records)


@quick
@given(data=st.data())
def test_records_of_all_kinds_are_read_as_one_by_one(otlp, data):
    check(frames_of([otlp.to_protobuf(record) for record in data.draw(otlp.records)]))


@quick
@given(data=st.data(), seed=st.integers(0, 2**32), rate=st.sampled_from([0.01, 0.05, 0.3]))
def test_records_written_in_unusual_ways_are_read_as_one_by_one(otlp, data, seed, rate):
    rng = random.Random(seed)
    payloads = [otlp.to_protobuf(of_scalars(record)) for record in data.draw(otlp.records)]
    check(frames_of([rewritten(payload, "traces", rng, rate) for payload in payloads]))


@settings(quick, max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_damaged_records_are_read_as_one_by_one(otlp, data, seed):
    rng = random.Random(seed)
    payloads = [otlp.to_protobuf(of_scalars(record)) for record in data.draw(otlp.records)]
    for payload in payloads * 5:
        if not payload:
            continue
        damaged = bytearray(payload)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        check(frames_of([payload, bytes(damaged), payload[: rng.randrange(len(payload))], payload]))


def test_a_value_that_does_not_count_has_to_be_text_all_the_same(otlp):
    event = otlp.event("e", [otlp.attribute("k", stringValue="MARK"), otlp.attribute("k", stringValue="x")])
    good = otlp.to_protobuf(otlp.record(otlp.span(1, events=[event])))
    frames = frames_of([good, good.replace(b"MARK", b"\xff\xff\xff\xff")])
    assert check(frames) == 1
    assert decode_protobuf(frames).events["e"]["k"].to_list() == ["x"]


def test_many_spans_with_many_events(otlp):
    """So many that they are walked in step, and in more than one block."""
    rng = random.Random(1)
    records = []
    for number in range(30):
        spans = []
        for each in range(10):
            events = [
                otlp.event(
                    rng.choice(["a", "b", "a long name of an event" * 10]),
                    [
                        otlp.attribute(f"key {key}", intValue=str(rng.getrandbits(rng.choice([3, 20, 60]))))
                        for key in range(rng.randrange(8))
                    ],
                )
                for _ in range(rng.choice([0, 1, 3, 40]))
            ]
            spans.append(otlp.span(1 + number * 10 + each, events=events))
        records.append(otlp.record(*spans))
    assert check(frames_of(map(otlp.to_protobuf, records))) == len(records)


def test_records_of_both_kinds_keep_their_order(otlp):
    def record(number, **value):
        events = [otlp.event("e", [otlp.attribute("k", **value)]), otlp.event(f"only {number}", [])]
        return otlp.record(otlp.span(number, events=events, attributes=[otlp.attribute("s", **value)]))

    nested = {"arrayValue": {"values": [{"intValue": "1"}]}}
    values = [{"intValue": "1"}, nested, {"doubleValue": 2.5}, nested, {"intValue": "3"}]
    frames = frames_of([otlp.to_protobuf(record(n, **value)) for n, value in enumerate(values, 1)])
    assert check(frames) == 3
    batch = decode_protobuf(frames)
    assert batch.spans["source_offset"].to_list() == [0, 1, 2, 3, 4]
    assert batch.events["e"]["k"].to_list() == ["1", "[1]", "2.5", "[1]", "3"]
    assert batch.attributes["value"].to_list() == ["1", "[1]", "2.5", "[1]", "3"]
    assert list(batch.events) == ["e", "only 1", "only 2", "only 3", "only 4", "only 5"]


@pytest.mark.parametrize("limit", ["MAX_EVENT_NAMES", "MAX_EVENT_KEYS"])
def test_too_many_names_or_keys_are_left_to_the_general_way(otlp, monkeypatch, limit):
    monkeypatch.setattr(columns, limit, 2)
    events = [
        otlp.event(f"e{n}", [otlp.attribute(f"k{m}", intValue="1") for m in range(3)]) for n in range(3)
    ]
    frames = frames_of([otlp.to_protobuf(otlp.record(otlp.span(events=events)))] * 2)
    assert decode_usual(frames)[1] is None
    assert decode_protobuf(frames).rejects


def test_attributes_of_too_many_keys_at_one_place_cost_no_more_than_their_record(otlp):
    hostile = [otlp.event("e", [otlp.attribute(f"k{n}", intValue="1")]) for n in range(100)]
    good = otlp.to_protobuf(otlp.record(otlp.span(1)))
    frames = frames_of([good, otlp.to_protobuf(otlp.record(otlp.span(2, events=hostile))), good])
    assert check(frames) == 2


def test_a_column_named_as_another_is_one(otlp):
    keys = ["unix_ns", "attribute:unix_ns"]
    event = otlp.event("e", [otlp.attribute(key, intValue="1") for key in keys])
    frames = frames_of([otlp.to_protobuf(otlp.record(otlp.span(1, events=[event])))])
    assert len(decode_protobuf(frames).spans) == 1


def test_frames_of_nothing(otlp):
    payload = otlp.to_protobuf(otlp.record(otlp.span(1)))
    assert check(frames_of([b"", payload, b""])) == 3
    assert len(decode_protobuf([replace(frames_of([b""])[0])]).spans) == 0
