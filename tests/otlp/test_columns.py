from __future__ import annotations

import polars as pl
import pytest

from tracefit.otlp import EVENT_COLUMNS, columns, decode_frames, templates


@pytest.fixture(params=["lines", "framed protobuf"])
def events_of(request, otlp):
    """Return a function from attribute lists to the frame of the events that have them."""

    def read(*attribute_lists):
        events = [otlp.event("e", attributes) for attributes in attribute_lists]
        return otlp.batch_of(otlp.SHAPES[request.param]([otlp.record(otlp.span(events=events))])).events["e"]

    return read


def test_values_of_one_kind_make_a_typed_column(otlp, events_of):
    def attributes(n):
        return [
            otlp.attribute("i", intValue=str(-n)),
            otlp.attribute("d", doubleValue=n / 8),
            otlp.attribute("b", boolValue=n % 2 == 0),
            otlp.attribute("s", stringValue="x" * n),
        ]

    frame = events_of(*map(attributes, range(1, 6)))
    types = {"b": pl.Boolean, "d": pl.Float64, "i": pl.Int64, "s": pl.String}
    assert frame.schema == pl.Schema(EVENT_COLUMNS | types)
    assert frame.row(4, named=True) == {
        "span_row": 0, "event_index": 4, "unix_ns": 1700000000000000001, "b": False, "d": 0.625, "i": -5, "s": "xxxxx",
    }  # fmt: skip


def test_values_of_several_kinds_make_a_string_column(otlp, events_of):
    values = [
        {"intValue": "1"},
        {"stringValue": "x"},
        {"doubleValue": 2.5},
        {"boolValue": True},
        {"doubleValue": "NaN"},
    ]
    frame = events_of(*[[otlp.attribute("k", **value)] for value in values])
    assert frame["k"].to_list() == ["1", "x", "2.5", "true", "NaN"]


def test_an_attribute_that_some_events_lack_is_null_there(otlp, events_of):
    a, b = otlp.attribute("a", intValue="1"), otlp.attribute("b", intValue="2")
    frame = events_of([a], [a, b], [], [b], [a])
    assert frame["event_index"].to_list() == [0, 1, 2, 3, 4]
    assert frame["a"].to_list() == [1, 1, None, None, 1]
    assert frame["b"].to_list() == [None, 2, None, 2, None]
    assert frame["b"].dtype == pl.Int64


def test_an_empty_value_leaves_the_column_its_type(otlp, events_of):
    frame = events_of([otlp.attribute("a")], [otlp.attribute("a", intValue="1")])
    assert frame["a"].to_list() == [None, 1]
    assert frame["a"].dtype == pl.Int64


def test_a_key_like_a_leading_column_does_not_replace_it(otlp, events_of):
    frame = events_of([otlp.attribute("unix_ns", intValue="5")])
    assert frame["unix_ns"].to_list() == [1700000000000000001]
    assert frame["attribute:unix_ns"].to_list() == [5]


def test_more_layouts_than_templates_are_read_all_the_same(otlp, events_of):
    count = templates.MAX_TEMPLATES + 3
    frame = events_of(*[[otlp.attribute(f"k{n:02}", intValue=str(n))] for n in range(count)])
    assert [frame[f"k{n:02}"].drop_nulls().to_list() for n in range(count)] == [[n] for n in range(count)]


def test_long_strings_and_numbers_of_every_length(otlp, events_of):
    strings = ["", "x" * 7, "x" * 8, "x" * 127, "x" * 128, "é" * 300]
    numbers = [0, 9, 99_999_999, 100_000_000, 10**16, 2**63 - 1]
    lists = [
        [otlp.attribute("s", stringValue=s), otlp.attribute("n", intValue=str(n))]
        for s, n in zip(strings, numbers, strict=True)
    ]
    frame = events_of(*lists)
    assert frame["s"].to_list() == strings
    assert frame["n"].to_list() == numbers


def test_events_keep_span_row_and_index(otlp):
    spans = [
        otlp.span(n, events=[otlp.event("a", []), otlp.event("b", []), otlp.event("a", [])]) for n in (1, 2)
    ]
    events = otlp.batch_of(otlp.to_json(otlp.record(*spans))).events
    assert events["a"].select("span_row", "event_index").rows() == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert events["b"].select("span_row", "event_index").rows() == [(0, 1), (1, 1)]


def test_columns_are_sorted_by_key(otlp, events_of):
    frame = events_of([otlp.attribute("b", intValue="1"), otlp.attribute("a", intValue="1")])
    assert frame.columns == [*EVENT_COLUMNS, "a", "b"]


def test_of_too_many_keys_the_usual_ones_are_kept_and_the_rest_is_told(otlp, monkeypatch):
    monkeypatch.setattr(columns, "MAX_EVENT_KEYS", 3)
    three = [otlp.attribute(f"k{n}", intValue=str(n)) for n in range(3)]
    hostile = [
        otlp.event("e", [otlp.attribute(f"x{n}.{m}", intValue="1") for m in range(4)]) for n in range(5)
    ]
    events = [*hostile, otlp.event("e", three), otlp.event("e", three)]
    for shape in ("lines", "framed protobuf"):
        batch = otlp.batch_of(otlp.SHAPES[shape]([otlp.record(otlp.span(events=events))]))
        frame = batch.events["e"]
        assert frame.columns == [*EVENT_COLUMNS, "k0", "k1", "k2"]
        assert frame.tail(2).select("k0", "k1", "k2").rows() == [(0, 1, 2)] * 2
        assert otlp.only_reject(batch).reason.endswith("events of one name have more than 3")
        batch = otlp.batch_of(otlp.SHAPES[shape]([otlp.record(otlp.span(events=events[-2:]))]))
        assert batch.rejects == ()


def test_of_too_many_event_names_the_usual_ones_are_kept_and_the_rest_is_told(otlp, monkeypatch):
    monkeypatch.setattr(columns, "MAX_EVENT_NAMES", 2)
    events = [otlp.event(name, []) for name in ("x1", "x2", "x3", "a", "b", "b", "a")]
    batch = otlp.batch_of(otlp.SHAPES["lines"]([otlp.record(otlp.span(events=events))]))
    assert {name: len(frame) for name, frame in batch.events.items()} == {"a": 2, "b": 2}
    assert batch.events["a"]["event_index"].to_list() == [3, 6]
    assert otlp.only_reject(batch).reason.startswith("3 events of rare names left out")


def test_batches_end_when_they_are_full_or_the_encoding_changes(otlp):
    lines = otlp.SHAPES["lines"]([otlp.record(otlp.span(n)) for n in (1, 2, 3)])
    frames = otlp.frames_of(lines)
    size = len(frames[0].payload)
    assert [len(b.spans) for b in decode_frames(frames, batch_bytes=size)] == [1, 1, 1]
    assert [len(b.spans) for b in decode_frames(frames, batch_bytes=size + 1)] == [2, 1]
    protobuf = otlp.frames_of(otlp.SHAPES["framed protobuf"]([otlp.record(otlp.span(4))]))
    assert [len(b.spans) for b in decode_frames([*frames, *protobuf])] == [3, 1]


def test_nothing_makes_no_batch():
    assert list(decode_frames([])) == []


def test_rejects_alone_make_a_batch(otlp):
    batch = otlp.batch_of(b"\x89PNG\r\n\x1a\n" + bytes(99))
    assert len(batch.spans) == 0
    assert otlp.only_reject(batch).reason == "not OTLP traces"
