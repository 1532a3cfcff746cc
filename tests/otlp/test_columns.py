"""Attributes of events to typed columns, whether there are few events or so many that they are read all at once."""

from __future__ import annotations

import polars as pl
import pytest

MANY = 60
"""More events than are parsed one by one."""


@pytest.fixture(params=["lines", "framed protobuf"])
def column_of(request, otlp):
    """Return a function from attribute lists to the values of one column, of the type that is asked for."""

    def read(attribute_lists, key="k", dtype=None):
        events = [otlp.event("e", attributes) for attributes in attribute_lists]
        data = otlp.SHAPES[request.param]([otlp.record(otlp.span(events=events))])
        found = otlp.read(data, events={"e": {key: dtype or pl.Int64()}})
        assert found.rejects == []
        return [event[key] for event in found.events["e"]]

    return read


@pytest.fixture(params=[1, MANY])
def times(request):
    return request.param


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ({"intValue": "-7"}, pl.Int64(), -7),
        ({"intValue": "-7"}, pl.Float64(), -7.0),
        ({"intValue": "-7"}, pl.String(), "-7"),
        ({"doubleValue": 0.625}, pl.Float64(), 0.625),
        ({"doubleValue": 7.0}, pl.Int64(), 7),
        ({"boolValue": True}, pl.Boolean(), True),
        ({"boolValue": True}, pl.Int64(), None),
        ({"boolValue": True}, pl.String(), "true"),
        ({"stringValue": "x"}, pl.String(), "x"),
        ({"stringValue": "7"}, pl.Int64(), 7),
        ({"stringValue": "9223372036854775807"}, pl.Int64(), 2**63 - 1),
        ({"stringValue": "7.5"}, pl.Float64(), 7.5),
        ({"stringValue": "x"}, pl.Int64(), None),
        ({}, pl.Int64(), None),
        ({"arrayValue": {"values": [{"intValue": "1"}]}}, pl.String(), "[1]"),
        ({"arrayValue": {"values": [{"intValue": "1"}]}}, pl.Int64(), None),
    ],
)
def test_value_of_any_kind_gets_its_columns_type_or_null(otlp, column_of, times, value, dtype, expected):
    assert column_of([[{"key": "k", "value": value}]] * times, dtype=dtype) == [expected] * times


def test_values_of_several_kinds_are_read_each_as_alone(column_of, otlp, times):
    values = [
        {"intValue": "1"},
        {"stringValue": "x"},
        {"doubleValue": 2.0},
        {"boolValue": True},
        {},
        {"intValue": str(2**62 + 1)},
    ]
    lists = [[otlp.attribute("k", **value)] for value in values for _ in range(times)]
    expected = [1, None, 2, None, None, 2**62 + 1]
    assert column_of(lists) == [number for number in expected for _ in range(times)]
    texts = ["1", "x", "2.0", "true", None, str(2**62 + 1)]
    assert column_of(lists, dtype=pl.String()) == [text for text in texts for _ in range(times)]


def test_an_attribute_that_some_events_lack_is_null_there(otlp, column_of, times):
    a, b = otlp.attribute("a", intValue="1"), otlp.attribute("b", intValue="2")
    lists = [[a], [a, b], [], [b], [a]] * times
    assert column_of(lists, "a") == [1, 1, None, None, 1] * times
    assert column_of(lists, "b") == [None, 2, None, 2, None] * times
    assert column_of(lists, "c") == [None] * 5 * times


def test_more_layouts_than_are_looked_for_are_read_all_the_same(otlp, column_of):
    """Each of a hundred keys stands in enough events for a layout of its own."""
    lists = [[otlp.attribute(f"k{n:03}", boolValue=True), otlp.attribute("k", intValue=str(n))] for n in range(100)]
    assert column_of(lists * 30) == list(range(100)) * 30


@pytest.mark.mostly_slow(every=2)
def test_layouts_of_one_event_each(otlp, column_of):
    lists = [[otlp.attribute("k", intValue=str(n))] + [otlp.attribute("x", boolValue=True)] * n for n in range(200)]
    assert column_of(lists) == list(range(200))


@pytest.mark.mostly_slow(every=4)
def test_long_strings(otlp, column_of, times):
    strings = ["", "x" * 7, "x" * 8, "x" * 127, "x" * 128, "é" * 300, "x" * 4095, "x" * 4097, "y" * 70_000]
    assert (
        column_of([[otlp.attribute("k", stringValue=s)] for s in strings] * times, dtype=pl.String()) == strings * times
    )


@pytest.mark.mostly_slow(every=4)
def test_numbers_of_every_length(otlp, column_of, times):
    numbers = [0, *(sign * (10**n + d) for n in range(19) for d in (-1, 0, 1) for sign in (1, -1))]
    numbers += [2**63 - 1, -(2**63), -(2**63) + 1, 2**53 + 1]
    assert column_of([[otlp.attribute("k", intValue=str(n))] for n in numbers] * times) == numbers * times


def test_events_keep_their_order_and_their_span(otlp, times):
    def event(name, number):
        return otlp.event(name, [otlp.attribute("n", intValue=str(number))])

    spans = [
        otlp.span(n, events=[event("e", 10 * n), event("other", 0), event("e", 10 * n + 1)] * times) for n in (1, 2)
    ]
    found = otlp.read(otlp.to_json(otlp.record(*spans)))
    rows = [(row["span"], row["n"]) for row in found.events["e"]]
    assert rows == [(0, 10), (0, 11)] * times + [(1, 20), (1, 21)] * times


def test_events_that_nobody_asked_for_are_counted(otlp):
    events = [otlp.event(name, []) for name in ("a", "b", "e", "a")]
    found = otlp.read(otlp.SHAPES["framed protobuf"]([otlp.record(otlp.span(1), otlp.span(2, events=events))]))
    assert found.counts == {(1, "a"): 2, (1, "b"): 1, (1, "e"): 1}
    assert list(found.events) == ["e"]


def test_span_attributes_that_nobody_asked_for_are_left_out(otlp):
    attributes = [otlp.attribute(key, stringValue=key) for key in ("z", "prompt", "a")]
    (batch,), _ = otlp.decode(otlp.to_json(otlp.record(otlp.span(attributes=attributes))), kept=["a", "z"])
    assert batch.spans["attributes"].to_list() == [[{"key": "a", "value": "a"}, {"key": "z", "value": "z"}]]


def test_nothing_makes_no_batch(otlp):
    assert otlp.decode(b"") == ([], [])


def test_what_is_no_trace_file_is_one_reject(otlp):
    found = otlp.read(b"\x89PNG\r\n\x1a\n" + bytes(99))
    assert found.spans == []
    assert found.reject.reason == "not OTLP traces"
