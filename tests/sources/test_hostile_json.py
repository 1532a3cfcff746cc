"""Millions of tiny lines and objects cost about what good records of their size cost: what is done per item is counted."""

from __future__ import annotations

import pytest

from tracefit.sources import Reject, json_records, short_lines
from tracefit.sources.json_scan import Scanner

LISTED = 20


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(short_lines, "MAX_SHORT_LINES", LISTED)
    return monkeypatch


def divided(items):
    return [i for i in items if not isinstance(i, Reject)], [i for i in items if isinstance(i, Reject)]


@pytest.mark.parametrize(
    "line", [b"x", b"{", b'{"a":1}', b'{"scopeSpans":[]}', b"null", b"\xff", b"[[]]", b"{]"]
)
def test_bad_short_lines_are_handed_on_up_to_a_bound_and_then_counted(otlp, few, line):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    data = good + b"\n" + (line + b"\n") * 3000 + good + b"\n" + (line + b"\n") * 2000 + good
    frames, rejects = divided(otlp.frames_of(data))
    (rest,) = rejects
    assert [frame.payload for frame in frames] == [good, *[line] * LISTED, good, good]
    second = len(good) + 1 + 3000 * (len(line) + 1)
    assert frames[LISTED + 1].offset == second
    assert rest.reason == f"{5000 - LISTED} more short lines without spans"
    assert rest.source_offset == len(good) + 1 + LISTED * (len(line) + 1)
    assert rest.source_offset + rest.length == len(data) - len(good)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b" { } \r",
        b"",
        b"  ",
        b"\xef\xbb\xbf",
        b'{"resourceSpans":[]}',
        b'{"resourceSpans":null}',
        b'{"batches":[{},{}]}',
        b'[{},{"resource_spans":[{"scopeSpans":[{}]}]}]',
        b'{"resourceSpans":[{"resource":{},"scope_spans":[]}]}',
    ],
)
def test_short_lines_of_nothing_are_passed_over(otlp, few, line):
    good = otlp.to_json(otlp.record(otlp.span(1)))
    data = good + b"\n" + (line + b"\n") * 3000 + good
    assert [frame.payload for frame in otlp.frames_of(data)] == [good, good]
    # A few of them are left to the decoder, which says the same.
    batch = otlp.batch_of(good + b"\n" + (line + b"\n") * 100 + good)
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 2
    assert batch.rejects == ()


def test_a_short_line_is_judged_once_however_often_it_is_there(otlp, few):
    looks = []

    class Counted:
        def fullmatch(self, line):
            looks.append(line)

    kind = short_lines.ShortLines(short_lines.SHORTEST_RECORD, Counted(), "spans")
    few.setattr(json_records, "TRACE_LINES", kind)
    few.setattr(json_records, "CHUNK_BYTES", 4096)
    few.setattr(short_lines, "_MANY", 1)
    frames, (rest,) = divided(
        otlp.frames_of(otlp.to_json(otlp.record(otlp.span(1))) + b"\n" + b"x\ny\n" * 3000)
    )
    assert len(frames) == 1 + LISTED
    assert rest.reason == f"{6000 - LISTED} more short lines without spans"
    assert sorted(looks) == [b"x", b"y"]


def test_the_shortest_span_is_no_short_line(otlp, few):
    line = b'{"batches":[{"scopeSpans":[{"spans":[{"traceId":"AAAAAAAAAAAAAAAAAAAAAQ","spanId":"AAAAAAAAAAE"}]}]}]}'
    assert len(line) == short_lines.SHORTEST_RECORD
    data = (line + b"\n{}\n" * 3) * 500 + b'{"resourceSpans":[]}'
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == [f"{1:016x}"] * 500
    assert batch.rejects == ()
    assert batch.spans["source_offset"].to_list() == [n * (len(line) + 12) for n in range(500)]


@pytest.mark.parametrize("between", [b",", b"", b",\n", b" "])
@pytest.mark.parametrize("item", [b"{}", b'{"resourceSpans":[]}', b'{"a":"}"}'])
def test_objects_without_spans_are_scanned_once_and_handed_on_together(
    otlp, monkeypatch, calls, between, item
):
    monkeypatch.setattr(json_records, "MAX_HELD_BYTES", 1 << 14)
    scanned = calls(Scanner, "scan")
    good = otlp.to_json(otlp.record(otlp.span(1)))
    several = (item + between) * 40_000
    data = b"[\n" + good + between + several + good + b"]"
    frames, rejects = divided(otlp.frames_of(data))
    assert rejects == []
    assert (frames[0].offset, frames[0].payload) == (2, good)
    assert (frames[-1].offset, frames[-1].payload) == (2 + len(good) + len(between) + len(several), good)
    assert sum(frame.payload.count(item) for frame in frames[1:-1]) == 40_000
    assert len(frames) < 8000
    assert sum(len(piece) for _, piece in scanned) < 4 * len(data)


def test_good_objects_in_a_row_are_scanned_once(otlp, monkeypatch, calls):
    monkeypatch.setattr(json_records, "MAX_HELD_BYTES", 1 << 14)
    scanned = calls(Scanner, "scan")
    records = [otlp.to_json(otlp.record(otlp.span(n))) for n in range(1, 600)]
    for data in (b"".join(records), b"[" + b",".join(records) + b"]"):
        scanned.clear()
        frames = otlp.frames_of(data)
        assert [frame.payload for frame in frames] == records
        assert [data[frame.offset :][: len(frame.payload)] for frame in frames] == records
        assert sum(len(piece) for _, piece in scanned) < 4 * len(data)
