from __future__ import annotations

import pytest

from tracefit.otlp import json_decode

LEAKED = "the secret prompt"


def lines_of(otlp, *numbers):
    return [otlp.to_json(otlp.record(otlp.span(number, name=LEAKED))) for number in numbers]


def ids(*numbers):
    return [f"{number:016x}" for number in numbers]


def test_a_tail_cut_at_any_byte_costs_the_last_record_alone(otlp):
    whole, last = lines_of(otlp, 1, 2)
    start = len(whole) + 1
    for size in range(1, len(last)):
        batch = otlp.batch_of(whole + b"\n" + last[:size])
        assert otlp.span_ids(batch) == ids(1)
        reject = otlp.only_reject(batch)
        assert (reject.source_offset, reject.length) == (start, size)
    assert otlp.span_ids(otlp.batch_of(whole + b"\n" + last)) == ids(1, 2)


def test_a_record_glued_onto_a_cut_one_at_any_byte_is_recovered(otlp):
    first, cut, glued, last = lines_of(otlp, 1, 2, 3, 4)
    start = len(first) + 1
    for size in range(1, len(cut)):
        batch = otlp.batch_of(b"\n".join([first, cut[:size] + glued, last, b""]))
        assert otlp.span_ids(batch) == ids(1, 3, 4)
        reject = otlp.only_reject(batch)
        assert (reject.source_offset, reject.length) == (start, size)


def test_several_cuts_and_a_good_record_on_one_line(otlp):
    a, b, c, d = lines_of(otlp, 1, 2, 3, 4)
    batch = otlp.batch_of(a[:90] + b[:120] + c + d)
    assert otlp.span_ids(batch) == ids(3, 4)
    reject = otlp.only_reject(batch)
    assert (reject.source_offset, reject.length) == (0, 210)
    assert batch.spans["source_offset"].to_list() == [210, 210 + len(c)]


def test_a_good_record_before_rubbish_on_its_line_is_kept(otlp):
    good, after = lines_of(otlp, 1, 2)
    for rubbish in (b"\0\0\0\0", b"{", b"}}}x", b'"secret"'):
        batch = otlp.batch_of(good + rubbish + b"\n" + after + b"\n")
        assert otlp.span_ids(batch) == ids(1, 2)
        assert sum(reject.length for reject in batch.rejects) <= len(rubbish)


def test_a_text_that_looks_like_a_record_inside_a_string_is_none(otlp):
    text = '{"resourceSpans":[]}'
    data = otlp.to_json(otlp.record(otlp.span(1, name=text)))
    assert otlp.read_one(data).span["name"] == text


def test_one_bad_object_of_an_array_costs_itself(otlp):
    a, b, c = lines_of(otlp, 1, 2, 3)
    batch = otlp.batch_of(b"[" + b",\n".join([a, b[:-20] + b"!" + b[-19:], c]) + b"]")
    assert otlp.span_ids(batch) == ids(1, 3)
    otlp.only_reject(batch)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"\xff", "UTF-8"),
        (b"\xed\xa0\x80", "UTF-8"),
        (b"\xc0\x80", "UTF-8"),
        (rb"\ud800", "not JSON"),
        (b"\x01", "not JSON"),
        (rb"\x", "not JSON"),
    ],
)
@pytest.mark.parametrize("place", ["span name", "event attribute"])
def test_a_string_that_is_no_text_costs_its_record(otlp, name, reason, place):
    attributes = [otlp.attribute("s", stringValue="MARK")] if place == "event attribute" else []
    span = otlp.span(2, name="MARK" if place == "span name" else "x", events=[otlp.event("e", attributes)])
    a, c = lines_of(otlp, 1, 3)
    data = b"\n".join([a, otlp.to_json(otlp.record(span)).replace(b"MARK", name), c])
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == ids(1, 3)
    assert reason in otlp.only_reject(batch).reason


@pytest.mark.parametrize("depth", [50, 2_000, 10_000, 60_000])
@pytest.mark.parametrize("place", ["ignored", "attribute", "event", "top"])
def test_deep_nesting_is_a_reject(otlp, depth, place):
    a, c = lines_of(otlp, 1, 3)
    deep = b"[" * depth + b"]" * depth
    value = b'{"arrayValue":{"values":[' * depth + b"{}" + b"]}}" * depth
    if place == "ignored":
        bad = otlp.to_json(otlp.record(otlp.span(2, links="MARK"))).replace(b'"MARK"', deep)
    elif place == "attribute":
        bad = otlp.to_json(otlp.record(otlp.span(2, attributes=[{"key": "k", "value": "MARK"}])))
        bad = bad.replace(b'"MARK"', value)
    elif place == "event":
        event = otlp.event("e", [{"key": "k", "value": "MARK"}])
        bad = otlp.to_json(otlp.record(otlp.span(2, events=[event]))).replace(b'"MARK"', value)
    else:
        bad = deep
    batch = otlp.batch_of(b"\n".join([a, bad, c]))
    survivors = [1, 2, 3] if place == "ignored" and depth < 1000 else [1, 3]
    assert otlp.span_ids(batch) == ids(*survivors)
    assert len(batch.rejects) == 3 - len(survivors)


@pytest.mark.parametrize("number", [b"9" * 300, b"-" + b"9" * 300, b"1e400", b"9" * 5000])
@pytest.mark.parametrize("key", ["startTimeUnixNano", "kind", "droppedEventsCount", "flags"])
def test_giant_numbers_are_a_reject(otlp, number, key):
    a, c = lines_of(otlp, 1, 3)
    bad = otlp.to_json(otlp.record(otlp.span(2, **{key: "MARK"}))).replace(b'"MARK"', number)
    batch = otlp.batch_of(b"\n".join([a, bad, c]))
    if key == "flags":  # of no use to anyone here, so that nobody has to understand it
        assert {f"{1:016x}", f"{3:016x}"} <= set(otlp.span_ids(batch))
    else:
        assert otlp.span_ids(batch) == ids(1, 3)
        otlp.only_reject(batch)


def test_many_glued_cuts_take_time_in_proportion(otlp, monkeypatch):
    sizes = []
    decode = json_decode.decode_fast

    def counted(frame, *, check_events):
        sizes.append(len(frame.payload))
        return decode(frame, check_events=check_events)

    monkeypatch.setattr(json_decode, "decode_fast", counted)
    (good,) = lines_of(otlp, 1)
    data = good[:60] * 2_000 + good
    batch = otlp.batch_of(data)
    assert otlp.span_ids(batch) == ids(1)
    otlp.only_reject(batch)
    assert sum(sizes) <= 3 * len(data)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"model":"x"}', "no resourceSpans"),
        (b"5", "not an object"),
        (b'{"resourceLogs":[{}]}', "OTLP logs"),
        (b'{"resourceSpans":{}}', "not an array"),
        (b'{"resourceSpans":[5]}', "not an object"),
        (b'{"resourceSpans":[{"scopeSpans":[5]}]}', "not an object"),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[5]}]}]}', "not an object"),
        (b'{"resourceSpans":[{"resource":{"attributes":5}}]}', "not an array"),
    ],
)
def test_a_line_that_is_no_record_is_named_for_what_it_is(otlp, line, reason):
    a, c = lines_of(otlp, 1, 3)
    batch = otlp.batch_of(b"\n".join([a, line, c]))
    assert otlp.span_ids(batch) == ids(1, 3)
    assert reason in otlp.only_reject(batch).reason


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b'{"resourceSpans":[]}', b'{"resourceSpans":null}', b'{"batches":[]}']
)
def test_an_empty_export_is_neither_spans_nor_a_reject(otlp, line):
    (a,) = lines_of(otlp, 1)
    batch = otlp.batch_of(b"\n".join([line, a, line]))
    assert otlp.span_ids(batch) == ids(1)
    assert batch.rejects == ()


def test_excerpts_never_show_values(otlp):
    (line,) = lines_of(otlp, 1)
    for start in range(0, len(line), 3):
        batch = otlp.batch_of(lines_of(otlp, 9)[0] + b"\n" + line[start:-1] + b"\n")
        for reject in batch.rejects:
            assert "secret" not in reject.excerpt
            assert "prompt" not in reject.excerpt
            assert "secret" not in reject.reason
            assert len(reject.excerpt) <= 200


def test_the_excerpt_shows_structure_and_keys(otlp):
    data = otlp.to_json(otlp.record(otlp.span(1), otlp.span(2, traceId="nope", attributes=[])))
    excerpt = otlp.only_reject(otlp.batch_of(data)).excerpt
    assert excerpt.startswith('{"traceId":"…","spanId":"…","name":"…","kind":…,')


def test_a_bad_attribute_of_an_event_costs_no_span_of_another_record(otlp):
    good = otlp.event("e", [otlp.attribute("k", intValue="1")])
    bad = otlp.event("e", [otlp.attribute("k", intValue="x")])
    lines = [
        otlp.to_json(otlp.record(otlp.span(1, events=[good]))),
        otlp.to_json(otlp.record(otlp.span(2, events=[good]), otlp.span(3, events=[good, bad]))),
        otlp.to_json(otlp.record(otlp.span(4, events=[good]))),
    ]
    batch = otlp.batch_of(b"\n".join(lines))
    assert otlp.span_ids(batch) == ids(1, 2, 4)
    reject = otlp.only_reject(batch)
    assert reject.reason == "span 1: intValue is not valid"
    assert reject.source_offset == len(lines[0]) + 1


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_of_too_many_bad_spans_some_are_listed_and_the_rest_is_counted(otlp, monkeypatch, shape):
    monkeypatch.setattr("tracefit.otlp.rejects.MAX_REJECTS", 3)
    bad = [otlp.span(n, traceId="0" * 32) for n in range(2, 9)]
    batch = otlp.batch_of(otlp.SHAPES[shape]([otlp.record(otlp.span(1), *bad, otlp.span(9))]))
    assert otlp.span_ids(batch) == ids(1, 9)
    reasons = [reject.reason for reject in batch.rejects]
    assert len(reasons) == 4
    assert all("traceId" in reason for reason in reasons[:3])
    assert reasons[3] == "4 more bad spans"
    assert [reject.count for reject in batch.rejects] == [1, 1, 1, 4]


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_thousands_of_bad_records_are_a_reject_each(otlp, shape):
    records = [otlp.record(otlp.span(n, traceId="" if n % 2 else "1" * 32)) for n in range(1, 10_001)]
    batch = otlp.batch_of(otlp.SHAPES[shape](records))
    assert otlp.span_ids(batch) == ids(*range(2, 10_001, 2))
    assert len({reject.source_offset for reject in batch.rejects}) == len(batch.rejects) == 5000
