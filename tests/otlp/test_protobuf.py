from __future__ import annotations

import polars as pl
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData


@pytest.fixture
def message(otlp):
    """Return a message of three spans, each with an event of one attribute."""
    events = [otlp.event("e", [otlp.attribute("k", intValue="1")])]
    data = otlp.to_protobuf(otlp.record(*[otlp.span(n, events=events) for n in (1, 2, 3)]))
    return TracesData.FromString(data)


def second(message):
    return message.resource_spans[0].scope_spans[0].spans[1]


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("trace_id", b"x" * 15, "traceId"),
        ("trace_id", b"", "traceId"),
        ("trace_id", bytes(16), "traceId"),
        ("span_id", b"x" * 9, "spanId"),
        ("span_id", bytes(8), "spanId"),
        ("parent_span_id", b"xx", "parentSpanId"),
        ("start_time_unix_nano", 2**63, "startTimeUnixNano"),
        ("end_time_unix_nano", 2**64 - 1, "endTimeUnixNano"),
    ],
)
def test_a_field_that_is_not_valid_costs_its_span_and_is_named(otlp, message, field, value, name):
    setattr(second(message), field, value)
    found = otlp.read(otlp.framed([message.SerializeToString()]))
    assert found.ids == [f"{1:016x}", f"{3:016x}"]
    assert found.reject.reason.startswith(f"span 1: {name}")
    assert found.reject.excerpt == f"<binary, {len(message.SerializeToString())} bytes>"


def test_an_event_beyond_int64_costs_its_span(otlp, message):
    second(message).events[0].time_unix_nano = 2**63
    found = otlp.read(otlp.framed([message.SerializeToString()]))
    assert found.ids == [f"{1:016x}", f"{3:016x}"]
    assert "timeUnixNano" in found.reject.reason


def test_span_that_is_no_message_is_a_reject(otlp, message):
    """The name of the second span is longer than the span."""
    data = bytearray(message.SerializeToString())
    name = second(message).name.encode()
    at = data.index(name, data.index(name) + 1)
    data[at - 1] += 100
    found = otlp.read(otlp.framed([bytes(data)]))
    assert found.ids == [f"{1:016x}", f"{3:016x}"]
    assert found.reject.reason == "span 1: it is not a protobuf message"


def test_parent_of_zeros_is_null(otlp, message):
    second(message).parent_span_id = bytes(8)
    assert [span["parent_span_id"] for span in otlp.read(message.SerializeToString()).spans] == [None] * 3


@pytest.mark.parametrize("where", ["attributes", "events"])
@pytest.mark.parametrize(("depth", "lost"), [(20, 0), (45, 1), (60, 1), (300, 1)])
def test_values_nested_too_deep(otlp, message, where, depth, lost):
    span = second(message)
    owner = span if where == "attributes" else span.events[0]
    value = owner.attributes.add(key="deep").value
    for _ in range(depth):
        value = value.array_value.values.add()
    found = otlp.read(otlp.framed([message.SerializeToString()]))
    assert len(found.spans) == 3 - lost
    assert len(found.rejects) == (lost > 0)


@pytest.mark.parametrize("text", [b"event name", b"key", b"value", b"span name"])
@pytest.mark.parametrize("count", [2, 50])
def test_a_string_that_is_not_utf8_costs_its_span(otlp, text, count):
    events = [otlp.event("event name", [otlp.attribute("key", stringValue="value")])] * count
    bad = otlp.to_protobuf(otlp.record(otlp.span(2, name="span name", events=events)))
    bad = bad.replace(text, b"\xff" * len(text), 1)
    good = [otlp.to_protobuf(otlp.record(otlp.span(n, events=events))) for n in (1, 3)]
    found = otlp.read(otlp.framed([good[0], bad, good[1]]), events={"event name": {"key": pl.String()}})
    assert found.ids == [f"{1:016x}", f"{3:016x}"]
    assert (found.reject.source_offset, found.reject.length) == (len(good[0]) + 8, len(bad))
    assert [event["key"] for event in found.events["event name"]] == ["value"] * 2 * count


def test_unknown_fields_are_ignored(otlp):
    plain = otlp.to_protobuf(otlp.record(otlp.span(1)))
    unknown = b"\xa2\x06\x03new"  # field 100, three bytes
    found = otlp.read(otlp.framed([plain + unknown]))
    assert found.ids == [f"{1:016x}"]
    assert found.rejects == []


def test_fields_of_events_and_attributes_in_any_order(otlp):
    def field(tag, content):
        return bytes([tag, len(content)]) + content

    value_first = field(0x12, b"\x18\x05") + field(0x0A, b"n")
    usual = field(0x0A, b"n") + field(0x12, b"\x18\x05")
    time = b"\x09" + (7).to_bytes(8, "little")
    events = [
        time + field(0x12, b"e") + field(0x1A, usual),
        field(0x12, b"e") + field(0x1A, usual) + time,
        time + field(0x12, b"e") + field(0x1A, value_first),
        time + field(0x12, b"e") + field(0x1A, usual) + b"\x20\x03",
    ]
    message = TracesData.FromString(otlp.to_protobuf(otlp.record(otlp.span(1))))
    span = message.resource_spans[0].scope_spans[0].spans[0]
    whole = span.SerializeToString() + b"".join(field(0x5A, event) for event in events)
    found = otlp.read(_long(0x0A, _long(0x12, _long(0x12, whole))))
    assert [(event["unix_ns"], event["n"]) for event in found.events["e"]] == [(7, 5)] * 4
    assert found.span["dropped_attributes"] == 3


def _long(tag, data):
    return bytes([tag, len(data) & 0x7F | 0x80, len(data) >> 7]) + data


@pytest.mark.parametrize("number", [0, 1, -1, 127, 128, 2**55, 2**56, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("count", [1, 50])
def test_ints_of_every_size(otlp, number, count):
    events = [otlp.event("e", [otlp.attribute("n", intValue=str(number))])] * count
    found = otlp.read(otlp.to_protobuf(otlp.record(otlp.span(1, events=events))))
    assert [event["n"] for event in found.events["e"]] == [number] * count
