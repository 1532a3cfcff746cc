"""Hostile JSON costs about what good JSON costs: what is done per bad item is counted, not timed."""

from __future__ import annotations

import pytest

from tracefit.otlp import decode, json_decode, json_general
from tracefit.sources import Frame
from tracefit.sources.json_records import object_end

LISTED = 10
START = b'{"resourceSpans":['


@pytest.fixture
def few_listed(monkeypatch):
    monkeypatch.setattr("tracefit.otlp.rejects.MAX_REJECTS", LISTED)


def frame_of(text):
    return Frame("f", 0, text, "json")


def is_good(text):
    return not isinstance(json_decode._general(frame_of(text), 1), str)


def listed_and_rest(batch):
    """Return how many rejects there are of each record, and what the last says."""
    return [reject.reason for reject in batch.rejects[:-1]], batch.rejects[-1]


def test_record_starts_without_a_record_are_looked_at_once(otlp, calls):
    looks = calls(json_decode, "decode_general")
    good = otlp.to_json(otlp.record(otlp.span(1)))
    batch = otlp.batch_of(START * 20_000 + good)
    assert otlp.span_ids(batch) == [f"{1:016x}"]
    reject = otlp.only_reject(batch)
    assert (reject.source_offset, reject.length) == (0, 20_000 * len(START))
    assert len(looks) < 5


def test_different_record_starts_are_looked_at_up_to_a_bound(otlp, calls, monkeypatch):
    monkeypatch.setattr(json_decode, "_MAX_KNOWN", 10)
    looks = calls(json_decode, "decode_general")
    good = otlp.to_json(otlp.record(otlp.span(1)))
    data = b"".join(START + b"%d" % number for number in range(1000)) + good
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == [f"{1:016x}"]
    assert otlp.only_reject(batch).length == len(data) - len(good)
    assert len(looks) < 15


def test_empty_records_glued_together_are_no_rejects(otlp):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    batch = otlp.batch_of(b'{"resourceSpans":[]}' * 50 + good + b'{"resourceSpans":[]}, {"resourceSpans":[]}')
    assert otlp.span_ids(batch) == [f"{1:016x}"]
    assert batch.rejects == ()


@pytest.mark.parametrize("item", [b"1", b"{}", b'{"traceId":"zz"}', b'"traceId"', b"[[]]"])
def test_items_too_short_for_a_span_are_counted_and_not_read(otlp, calls, few_listed, item):
    looks = calls(json_general, "read_span")
    good = otlp.to_json(otlp.span(1))
    spans = b",".join([item] * 500 + [good] + [item] * 500)
    data = b'{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"s"},"spans":[%b]}]}]}' % spans
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == [f"{1:016x}"]
    listed, rest = listed_and_rest(batch)
    assert [reason.split(":")[0] for reason in listed] == [f"span {number}" for number in range(LISTED)]
    assert rest.reason == f"{1000 - LISTED} more bad spans"
    assert (rest.source_offset, rest.length) == (0, len(data))
    assert len(looks) == LISTED + 1


@pytest.mark.parametrize(
    ("around", "item", "each"),
    [
        (b"[%b]", b"1", 1),
        (b'{"resourceSpans":[%b]}', b"1", 1),
        (b'{"resourceSpans":[%b]}', b'{"scopeSpans":[1,2]}', 2),
        (b'{"resourceSpans":[{"scopeSpans":[%b]}]}', b'{"spans":5}', 1),
        (b'{"resourceSpans":[{"scopeSpans":[%b]}]}', b'{"spans":[5,6,{}]}', 3),
    ],
)
def test_bad_items_of_every_level_are_counted_once_for_all(otlp, few_listed, around, item, each):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    batch = otlp.batch_of(good + b"\n" + around % b",".join([item] * 200) + b"\n" + good)
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 2
    listed, rest = listed_and_rest(batch)
    assert len(listed) == LISTED
    assert rest.reason == f"{200 * each - LISTED} more bad spans"


def test_items_without_spans_are_read_once_however_many_there_are(otlp, calls):
    looks = calls(json_general, "_object")
    spans = otlp.to_json(otlp.span(1, unknown=1))  # for the record not to be a usual one
    data = b'{"resourceSpans":[%b{"scopeSpans":[%b{"spans":[%b]}]}]}' % (b"{}," * 1000, b"{}," * 1000, spans)
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == [f"{1:016x}"]
    assert batch.rejects == ()
    assert len(looks) < 10


def test_bad_spans_and_lines_of_a_file_are_listed_up_to_a_bound_and_then_counted(otlp, few_listed):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    bad = otlp.to_json(otlp.record(*[otlp.span(n, traceId="x" * 32) for n in range(2, 9)]))
    lines = [good, bad, b"x" * 70, bad, good, bad, b"{" * 80, good]
    batch = otlp.batch_of(b"\n".join(lines))
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 3
    assert len(batch.rejects) == LISTED + 1
    rest = batch.rejects[-1]
    assert rest.reason == f"{7 + 1 + 7 + 7 + 1 - LISTED} more bad records and spans"
    first = sum(len(line) + 1 for line in lines[:3])
    assert (rest.source_offset, rest.length) == (first, sum(len(line) + 1 for line in lines[3:7]) - 1)


def test_one_unusual_span_does_not_make_its_siblings_unusual(otlp, calls):
    from tracefit.otlp import json_spans  # noqa: PLC0415 - of this test alone

    slow = calls(json_spans, "_span")
    event = otlp.event("e", [otlp.attribute("k", intValue="1")])
    bad = otlp.event("e", [otlp.attribute("k", intValue="x")])
    spans = [otlp.span(n, events=[event, bad] if n == 5 else [event]) for n in range(1, 50)]
    spans[7] = otlp.span(8, traceId="A" * 32)
    batch = otlp.batch_of(otlp.to_json(otlp.record(*spans)))
    assert len(batch.spans) == 48
    assert batch.spans["trace_id"][6] == "a" * 32
    assert otlp.only_reject(batch).reason == "span 4: intValue is not valid"
    assert len(slow) == 1


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1}x',
        b'{"a":1} x',
        b'{"a":[{}]}{"b":',
        b'{"a":1}\xff',
        b'{"a":"\xff"}',
        b'{"a":"\xff"}{"b":1}',
        b'{"a":"}"}}',
        b'{"a":',
        b'{"a":]}',
        b"{}\0",
        b'{"a":"\xc3\xa4"}\xc3\xa4',
    ],
)
def test_the_end_of_a_whole_object_is_where_its_brackets_close(otlp, text):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    for whole in (text, good + text):
        why = json_decode._general(frame_of(whole), 1)
        assert isinstance(why, str)
        end = json_decode.head_end(whole, why)
        expected = object_end(whole)
        ends = [at if at > 0 and is_good(whole[:at]) else -1 for at in (end, expected)]
        assert ends[0] == ends[1]


def test_a_span_of_nothing_but_empty_events_is_rejected_and_its_neighbours_are_kept(otlp, monkeypatch):
    """As columns a million events of two bytes each take hundreds of megabytes."""
    monkeypatch.setattr(decode, "MAX_EVENTS", 1000)
    real = [otlp.event("api.ARRIVED", [], n) for n in range(1, 60)]
    hollow = otlp.span(2, events=[{}] * 2000)
    batch = otlp.batch_of(otlp.to_json(otlp.record(otlp.span(1, events=real), hollow, otlp.span(3))))
    assert otlp.span_ids(batch) == [f"{n:016x}" for n in (1, 3)]
    assert otlp.only_reject(batch).reason == "a span of 2000 events, most of them empty"
    many = otlp.span(2, events=real * 40)
    batch = otlp.batch_of(otlp.to_json(otlp.record(otlp.span(1), many)))
    assert not batch.rejects
    assert batch.events["api.ARRIVED"].height == 59 * 40
