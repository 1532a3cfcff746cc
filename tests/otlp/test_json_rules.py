"""Rules of OTLP/JSON: opentelemetry-proto's JSON Protobuf Encoding, and ProtoJSON below it."""

from __future__ import annotations

import base64
import json
import math

import polars as pl
import pytest

from otlp.helpers import each_reader
from tracefit.otlp.decode import SPAN_COLUMNS

TRACE_ID = "5b8efff798038103d269b633813fc60c"
SPAN_ID = "eee19b7ec3c1b174"


def one(otlp, **fields):
    """Read one span with the given fields."""
    return otlp.read_one(otlp.to_json(otlp.record(otlp.span(**fields))))


def rejected(otlp, **fields):
    """Return the reason why a span is rejected, after its sibling was found unharmed."""
    data = otlp.to_json(otlp.record(otlp.span(1), otlp.span(2, **fields), otlp.span(3)))
    found = otlp.read(data)
    assert found.ids == [f"{1:016x}", f"{3:016x}"]
    assert (found.reject.source_offset, found.reject.length) == (0, len(data))
    assert found.reject.reason.startswith("span 1: ")
    return found.reject.reason


@pytest.mark.parametrize("spelled", [TRACE_ID, TRACE_ID.upper(), base64.b64encode(bytes.fromhex(TRACE_ID)).decode()])
def test_trace_ids_are_hex_in_any_case_or_base64(otlp, spelled):
    assert one(otlp, traceId=spelled).span["trace_id"] == TRACE_ID


@pytest.mark.parametrize("spelled", [SPAN_ID, SPAN_ID.upper(), base64.b64encode(bytes.fromhex(SPAN_ID)).decode()])
def test_span_and_parent_ids_are_hex_in_any_case_or_base64(otlp, spelled):
    span = one(otlp, spanId=spelled, parentSpanId=spelled).span
    assert (span["span_id"], span["parent_span_id"]) == (SPAN_ID, SPAN_ID)


def test_base64_of_the_url_alphabet_and_without_padding_is_read(otlp):
    raw = bytes([0xFB, 0xFF, 0xFE] * 5 + [1])
    spelled = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    assert one(otlp, traceId=spelled).span["trace_id"] == raw.hex()


@pytest.mark.parametrize("unset", [..., "", None, "0000000000000000", "AAAAAAAAAAA="])
def test_no_parent_is_null(otlp, unset):
    assert one(otlp, parentSpanId=unset).span["parent_span_id"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("traceId", TRACE_ID[:-1]),
        ("traceId", TRACE_ID + "00"),
        ("traceId", "g" * 32),
        ("traceId", "0" * 32),
        ("traceId", ...),
        ("traceId", 5),
        ("spanId", SPAN_ID * 2),
        ("spanId", "0" * 16),
        ("spanId", None),
        ("parentSpanId", "abc"),
        ("kind", "SPAN_KIND_ODD"),
        ("startTimeUnixNano", "-1"),
        ("startTimeUnixNano", str(2**63)),
        ("startTimeUnixNano", 1.5),
        ("endTimeUnixNano", "soon"),
        ("endTimeUnixNano", True),
        ("droppedEventsCount", -1),
        ("droppedAttributesCount", 2**32),
        ("name", 7),
        ("attributes", {"key": "a"}),
        ("events", "none"),
        ("status", [1]),
    ],
)
def test_a_field_that_is_not_valid_costs_its_span_and_is_named(otlp, field, value):
    assert field in rejected(otlp, **{field: value})


@pytest.mark.parametrize("time", ["-1", str(2**63), "1.5", "x"])
def test_an_event_time_that_is_not_valid_costs_its_span(otlp, time):
    assert "timeUnixNano" in rejected(otlp, events=[otlp.event("e", [], time)])


@pytest.mark.parametrize(
    "value", [str(2**63), str(-(2**63) - 1), str(2**64 + 5), 10**300, "one", 1.5, True, "", " 1", "1_0"]
)
@pytest.mark.parametrize("neighbours", [0, 50])
def test_int_value_beyond_int64_rejects_its_span(otlp, value, neighbours):
    good, broken = ([otlp.attribute("n", intValue=number)] for number in ("1", value))
    assert "intValue" in rejected(otlp, attributes=broken)
    events = [otlp.event("e", good)] * neighbours + [otlp.event("e", broken)]
    assert "intValue" in rejected(otlp, events=events)


@pytest.mark.parametrize(
    ("spelled", "number"),
    [
        ("42", 42),
        (42, 42),
        ("1e2", 100),
        (1e2, 100),
        ("1.0", 1),
        (1.0, 1),
        ("-7", -7),
        (str(2**63 - 1), 2**63 - 1),
        (2**63 - 1, 2**63 - 1),
        (str(-(2**63)), -(2**63)),
    ],
)
@each_reader
def test_integers_are_strings_or_numbers(otlp, spelled, number, times):
    events = [otlp.event("e", [otlp.attribute("n", intValue=spelled)])] * times
    read = one(otlp, attributes=[otlp.attribute("n", intValue=spelled)], events=events)
    assert read.span["attributes"] == {"n": str(number)}
    assert [event["n"] for event in read.events["e"]] == [number] * times


@pytest.mark.parametrize("spelled", ["1700000000000000001", 1700000000000000001])
def test_times_are_strings_or_numbers(otlp, spelled):
    read = one(otlp, startTimeUnixNano=spelled, events=[otlp.event("e", [], spelled)])
    assert read.span["start_unix_ns"] == 1700000000000000001
    assert read.events["e"][0]["unix_ns"] == 1700000000000000001


@pytest.mark.parametrize(
    ("spelled", "kind"),
    [(0, None), (1, "INTERNAL"), ("2", "SERVER"), ("SPAN_KIND_CLIENT", "CLIENT"), (9, None), (..., None)],
)
def test_kinds_are_numbers_or_names(otlp, spelled, kind):
    assert one(otlp, kind=spelled).span["kind"] == kind


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"code": 2, "message": "boom"}, ("ERROR", "boom")),
        ({"code": "STATUS_CODE_OK"}, ("OK", None)),
        ({}, ("UNSET", None)),
        (None, ("UNSET", None)),
        (..., ("UNSET", None)),
    ],
)
def test_status_codes_are_numbers_or_names(otlp, status, expected):
    span = one(otlp, status=status).span
    assert (span["status_code"], span["status_message"]) == expected


@pytest.mark.parametrize(
    ("spelled", "number"),
    [
        ("NaN", math.nan),
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        ("1.5", 1.5),
        (3, 3.0),
        (1e-300, 1e-300),
    ],
)
@each_reader
def test_doubles_are_numbers_or_strings_and_need_not_be_finite(otlp, spelled, number, times):
    read = one(otlp, events=[otlp.event("e", [otlp.attribute("x", doubleValue=spelled)])] * times)
    assert [event["x"] for event in read.events["e"]] == pytest.approx([number] * times, nan_ok=True, abs=0)


def test_doubles_as_text_are_json_or_the_names_of_protojson(otlp):
    spelled = {"a": "NaN", "b": "-Infinity", "c": 0.1, "d": 1.0}
    attributes = [otlp.attribute(key, doubleValue=value) for key, value in spelled.items()]
    assert one(otlp, attributes=attributes).span["attributes"] == {
        "a": "NaN",
        "b": "-Infinity",
        "c": "0.1",
        "d": "1.0",
    }


def test_keys_may_be_snake_case(otlp):
    span = {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "parent_span_id": SPAN_ID,
        "start_time_unix_nano": "1",
        "end_time_unix_nano": "2",
        "dropped_events_count": 3,
        "dropped_attributes_count": 4,
        "attributes": [{"key": "a", "value": {"string_value": "x"}}],
        "events": [
            {"time_unix_nano": "5", "name": "e", "attributes": [{"key": "n", "value": {"int_value": "6"}}]},
        ],
    }
    tree = {"resource_spans": [{"scope_spans": [{"scope": {"name": "s"}, "spans": [span]}]}]}
    read = otlp.read_one(otlp.to_json(tree))
    assert read.span["attributes"] == {"a": "x"}
    assert read.events["e"][0]["n"] == 6
    found = [read.span[key] for key in ("start_unix_ns", "end_unix_ns", "dropped_events", "dropped_attributes")]
    assert found == [1, 2, 3, 4]
    assert (read.span["scope"], read.span["parent_span_id"]) == ("s", SPAN_ID)


def test_one_snake_case_key_among_others_is_not_lost(otlp):
    events = [otlp.event("e", [{"key": "n", "value": {"int_value": "6"}}])]
    read = one(otlp, events=events, dropped_events_count=3)
    assert read.events["e"][0]["n"] == 6
    assert read.span["dropped_events"] == 3


def test_unknown_fields_are_ignored_wherever_they_are(otlp):
    tree = otlp.record(
        otlp.span(events=[otlp.event("e", [otlp.attribute("n", intValue="1") | {"new": 1}]) | {"new": []}])
    )
    tree["new"] = {"a": [1]}
    tree["resourceSpans"][0]["new"] = None
    tree["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["new"] = "x"
    read = otlp.read_one(otlp.to_json(tree))
    assert read.rejects == []
    assert read.events["e"][0]["n"] == 1


def test_null_is_unset(otlp):
    read = one(
        otlp,
        name=None,
        kind=None,
        attributes=None,
        events=[{"timeUnixNano": None, "name": "e", "attributes": None, "droppedAttributesCount": None}],
        droppedEventsCount=None,
        startTimeUnixNano=None,
    )
    assert (read.span["name"], read.span["kind"], read.span["start_unix_ns"]) == (None, None, None)
    event = {"span": 0, "unix_ns": 0} | dict.fromkeys("ksnxb")
    assert read.events["e"] == [event]  # `tables` make null of the time
    assert read.span["dropped_events"] == 0


def test_scope_and_resource_may_be_missing(otlp):
    tree = {"resourceSpans": [{"scopeSpans": [{"spans": [otlp.span()]}]}, {}, {"scopeSpans": None}]}
    span = otlp.read_one(otlp.to_json(tree)).span
    names = ("scope", "service_name", "service_instance_id", "host_name")
    assert [span[name] for name in names] == [None] * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"service.name": "vllm", "service.instance.id": "7", "host.name": "h", "host.id": "i"},
            ("vllm", "7", "h"),
        ),
        ({"host.id": "i"}, (None, None, "i")),
        ({"host.name": "", "host.id": "i"}, (None, None, "i")),
    ],
)
def test_the_resource_tells_the_server(otlp, given, expected):
    resource = [otlp.attribute(key, stringValue=value) for key, value in given.items()]
    resource.append(otlp.attribute("process.command_args", arrayValue={"values": [{"stringValue": "x"}]}))
    span = otlp.read_one(otlp.to_json(otlp.record(otlp.span(), resource=resource))).span
    assert (span["service_name"], span["service_instance_id"], span["host_name"]) == expected


VALUES = [
    ({"stringValue": "x"}, "x"),
    ({"stringValue": ""}, ""),
    ({"boolValue": True}, "true"),
    ({"intValue": "5"}, "5"),
    ({}, None),
    (None, None),
    ({"bytesValue": "aGk="}, "aGk="),
    ({"bytesValue": "aGk"}, "aGk="),
    ({"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "a"}, {}]}}, '[1,"a",null]'),
    ({"arrayValue": {}}, "[]"),
    ({"kvlistValue": {"values": [{"key": "k", "value": {"doubleValue": "NaN"}}]}}, '{"k":"NaN"}'),
    ({"arrayValue": {"values": [{"arrayValue": {"values": [{"boolValue": False}]}}]}}, "[[false]]"),
]


@pytest.mark.parametrize(("value", "text"), VALUES)
@each_reader
def test_attribute_values_of_every_kind(otlp, value, text, times):
    read = one(
        otlp,
        attributes=[{"key": "k", "value": value}],
        events=[otlp.event("e", [{"key": "k", "value": value}])] * times,
    )
    assert read.span["attributes"].get("k") == text
    assert [event["k"] for event in read.events["e"]] == [text] * times


@pytest.mark.parametrize("count", [2, 50])
def test_of_an_attribute_that_is_there_twice_the_last_counts(otlp, count):
    twice = [otlp.attribute("n", intValue="1"), otlp.attribute("n", intValue="2")]
    read = one(otlp, attributes=twice, events=[otlp.event("e", twice)] * count)
    assert read.span["attributes"] == {"n": "2"}
    assert [event["n"] for event in read.events["e"]] == [2] * count


def test_attributes_come_in_any_order(otlp):
    a, b = otlp.attribute("n", intValue="1"), otlp.attribute("s", stringValue="x")
    read = one(otlp, events=[otlp.event("e", [a, b]), otlp.event("e", [b, a]), otlp.event("e", [a, b])])
    assert [(event["n"], event["s"]) for event in read.events["e"]] == [(1, "x")] * 3


def test_dropped_attributes_of_span_and_events_are_summed(otlp):
    events = [otlp.event("e", []) | {"droppedAttributesCount": count} for count in (2, 3)]
    read = one(otlp, droppedAttributesCount=5, droppedEventsCount=7, events=events)
    assert (read.span["dropped_attributes"], read.span["dropped_events"]) == (10, 7)


def test_old_tempo_names_of_the_scope_are_read(otlp):
    batch = {"instrumentationLibrarySpans": [{"instrumentationLibrary": {"name": "s"}, "spans": [otlp.span()]}]}
    assert otlp.read_one(otlp.to_json({"batches": [batch]})).span["scope"] == "s"


@each_reader
@pytest.mark.parametrize("is_escaped", [True, False])
def test_strings_keep_escapes_and_characters_of_every_plane(otlp, times, is_escaped):
    text = 'a"b\\c\n\t\x7fé漢😀 '
    tree = otlp.record(otlp.span(events=[otlp.event("e", [otlp.attribute("s", stringValue=text)])] * times))
    data = json.dumps(tree, ensure_ascii=is_escaped)
    assert [event["s"] for event in otlp.read_one(data.encode()).events["e"]] == [text] * times


def test_the_columns_of_spans_have_the_published_types(otlp):
    (batch,), _ = otlp.decode(otlp.to_json(otlp.record(otlp.span())))
    assert {name: batch.spans.schema[name] for name in SPAN_COLUMNS} == SPAN_COLUMNS
    assert batch.spans.schema["attributes"] == pl.List(pl.Struct({"key": pl.String, "value": pl.String}))
