"""Protobuf written in unusual ways, or damaged: what the official parser finds in it is what is read."""

from __future__ import annotations

import random

import polars as pl
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

whole_files = settings.get_profile("whole-files")

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
FACTS = [
    "trace_id",
    "span_id",
    "parent_span_id",
    "name",
    "kind",
    "start_unix_ns",
    "end_unix_ns",
    "status_message",
    "dropped_events",
    "dropped_attributes",
]
KINDS = (None, "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")


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


def read_varint(data, position):
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def fields(data):
    """Yield number, wire type and content of each field of a valid message without groups."""
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        start = position
        if tag & 7 == 2:
            size, start = read_varint(data, position)
            position = start + size
        elif tag & 7 == 0:
            position = read_varint(data, position)[1]
        else:
            position += {1: 8, 5: 4}[tag & 7]
        yield tag >> 3, tag & 7, data[start:position]


def unknown(rng):
    """Return a field that no message has, of some wire type; one of them is a group."""
    number = rng.choice([30, 100, 1000, 5000])
    content = rng.choice([
        (0, varint(rng.getrandbits(rng.choice([7, 40, 64])))), (1, bytes(8)), (2, b"\x03abc"), (2, b"\0"), (5, b"four"),
        (3, varint(number << 3 | 4)),
    ])  # fmt: skip
    return varint(number << 3 | content[0]) + content[1]


def rewritten(data, kind, rng, rate):
    """Write a message again: with unknown fields, others twice or moved, and numbers longer than they need to be.

    Events themselves stay as every exporter writes them, field by field: there are many, and one look tells.
    """
    pieces = []
    inner, rate = rate, 0 if kind == "event" else rate
    for number, wire_type, content in fields(data):
        inside = INSIDE[kind].get(number)
        if inside:
            content = rewritten(content, inside, rng, inner)  # noqa: PLW2901 - the same, written again
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


def expected_number(value):
    """Return what a column of whole numbers holds of a value."""
    kind = value.WhichOneof("value")
    if kind == "double_value":
        number = value.double_value
        return int(number) if -(2.0**63) <= number < 2.0**63 else None
    if kind == "string_value":
        return "any" if any(c.isdigit() for c in value.string_value) else None
    return value.int_value if kind == "int_value" else None


def expected_span(span, number, wanted):
    """Return a span and its wanted events, as the official parser has them; None if it is not valid."""
    parent = span.parent_span_id if any(span.parent_span_id) else b""
    ids_fit = (len(span.trace_id), len(span.span_id), len(parent) or 8) == (16, 8, 8)
    times = [
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        *(event.time_unix_nano for event in span.events),
    ]
    if not (ids_fit and any(span.trace_id) and any(span.span_id)) or max(times) >= 2**63:
        return None
    events = []
    for event in span.events:
        last = {pair.key: expected_number(pair.value) for pair in event.attributes}
        row = {key: last.get(key) for key in wanted.get(event.name, ())}
        events.append((event.name, {"span": number, "unix_ns": event.time_unix_nano, **row}))
    facts = (
        span.trace_id.hex(),
        span.span_id.hex(),
        parent.hex() or None,
        span.name or None,
        KINDS[span.kind] if 0 <= span.kind < len(KINDS) else None,
        span.start_time_unix_nano or None,
        span.end_time_unix_nano or None,
        span.status.message or None,
        span.dropped_events_count,
        span.dropped_attributes_count + sum(e.dropped_attributes_count for e in span.events),
    )
    return dict(zip(FACTS, facts, strict=True)), events


def check(otlp, payloads, records, *, is_whole):
    """Compare with the official parser, record by record; what it refuses need not be refused here."""
    wanted = otlp.wanted_of(records, pl.Int64())
    for payload in [*payloads, *([b"".join(payloads * 30)] if is_whole else [])]:
        found = otlp.read_records([payload], "protobuf", **wanted)
        try:
            message = TracesData.FromString(payload)
        except DecodeError:
            assert not is_whole
            continue
        spans, events, bad = [], {}, 0
        for span in (s for r in message.resource_spans for ss in r.scope_spans for s in ss.spans):
            expected = expected_span(span, len(spans), wanted["events"])
            if expected is None:
                bad += 1
                continue
            spans.append(expected[0])
            for name, row in expected[1]:
                if name in wanted["events"]:
                    events.setdefault(name, []).append(row)
        assert len(found.rejects) == bad
        if not is_whole:
            assert found.ids == [each["span_id"] for each in spans]
            continue
        assert [{key: each[key] for key in FACTS} for each in found.spans] == spans
        assert {name: len(rows) for name, rows in found.events.items()} == {n: len(rows) for n, rows in events.items()}
        for name, rows in events.items():
            for one, other in zip(found.events[name], rows, strict=True):
                assert {k: v for k, v in one.items() if other[k] != "any"} == {
                    k: v for k, v in other.items() if v != "any"
                }


@pytest.mark.slow
@whole_files
@given(data=st.data())
def test_records_of_all_kinds(otlp, data):
    records = data.draw(otlp.records)
    check(otlp, [otlp.to_protobuf(record) for record in records], records, is_whole=True)


@pytest.mark.slow
@whole_files
@given(data=st.data(), seed=st.integers(0, 2**32), rate=st.sampled_from([0.01, 0.05, 0.3]))
def test_records_written_in_unusual_ways(otlp, data, seed, rate):
    rng = random.Random(seed)
    records = of_scalars(data.draw(otlp.records))
    payloads = [rewritten(otlp.to_protobuf(record), "traces", rng, rate) for record in records]
    check(otlp, payloads, records, is_whole=True)


@pytest.mark.slow
@whole_files
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_damaged_records(otlp, data, seed):
    rng = random.Random(seed)
    records = of_scalars(data.draw(otlp.records))
    for payload in [otlp.to_protobuf(record) for record in records] * 5:
        damaged = bytearray(payload)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        check(otlp, [bytes(damaged)], records, is_whole=False)


@pytest.mark.parametrize("events", [1, 50])
def test_the_last_of_two_values_of_a_key_counts(otlp, events):
    pairs = [otlp.attribute("k", stringValue="first"), otlp.attribute("k", stringValue="last")]
    span = otlp.span(1, events=[otlp.event("e", pairs)] * events)
    found = otlp.read(otlp.to_protobuf(otlp.record(span)))
    assert [event["k"] for event in found.events["e"]] == ["last"] * events


def test_records_of_nothing_are_neither_spans_nor_rejects(otlp):
    payload = otlp.to_protobuf(otlp.record(otlp.span(1)))
    found = otlp.read_records([b"", payload, b""], "protobuf", kept=[], events={})
    assert found.ids == [f"{1:016x}"]
    assert found.rejects == []
    assert [span["source_offset"] for span in found.spans] == [1]
