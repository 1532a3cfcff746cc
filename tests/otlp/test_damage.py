from __future__ import annotations

import pytest

LEAKED = "the secret prompt"


def lines_of(otlp, *numbers):
    return [otlp.to_json(otlp.record(otlp.span(number, name=LEAKED))) for number in numbers]


def ids(*numbers):
    return [f"{number:016x}" for number in numbers]


@pytest.mark.slow
def test_tail_cut_at_any_byte_rejects_only_the_last_record(otlp):
    whole, last = lines_of(otlp, 1, 2)
    start = len(whole) + 1
    for size in range(1, len(last)):
        found = otlp.read(whole + b"\n" + last[:size])
        assert found.ids == ids(1)
        assert (found.reject.source_offset, found.reject.length) == (start, size)
    assert otlp.read(whole + b"\n" + last).ids == ids(1, 2)


@pytest.mark.slow
def test_a_record_glued_onto_a_cut_one_at_any_byte_is_recovered(otlp):
    first, cut, glued, last = lines_of(otlp, 1, 2, 3, 4)
    start = len(first) + 1
    for size in range(1, len(cut)):
        found = otlp.read(b"\n".join([first, cut[:size] + glued, last, b""]))
        assert found.ids == ids(1, 3, 4)
        assert (found.reject.source_offset, found.reject.length) == (start, size)


def test_several_cuts_and_a_good_record_on_one_line(otlp):
    a, b, c, d = lines_of(otlp, 1, 2, 3, 4)
    found = otlp.read(a[:90] + b[:120] + c + d)
    assert found.ids == ids(3, 4)
    assert [(reject.source_offset, reject.length) for reject in found.rejects] == [(0, 90), (90, 120)]


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", b"{", b"}}}x", b'"secret"'])
def test_a_good_record_before_rubbish_on_its_line_is_kept(otlp, rubbish):
    good, after = lines_of(otlp, 1, 2)
    found = otlp.read(good + rubbish + b"\n" + after + b"\n")
    assert found.ids == ids(1, 2)
    assert sum(reject.length for reject in found.rejects) <= len(rubbish)


def test_record_like_text_in_a_string_is_not_read(otlp):
    text = '{"resourceSpans":[]}'
    data = otlp.to_json(otlp.record(otlp.span(1, name=text)))
    assert otlp.read_one(data).span["name"] == text


def test_one_bad_object_of_an_array_costs_itself(otlp):
    a, b, c = lines_of(otlp, 1, 2, 3)
    found = otlp.read(b"[" + b",\n".join([a, b[:-20] + b"!" + b[-19:], c]) + b"]")
    assert found.ids == ids(1, 3)
    assert found.reject


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
def test_a_string_that_is_no_text_costs_its_span(otlp, name, reason, place):
    attributes = [otlp.attribute("s", stringValue="MARK")] if place == "event attribute" else []
    span = otlp.span(2, name="MARK" if place == "span name" else "x", events=[otlp.event("e", attributes)])
    a, c = lines_of(otlp, 1, 3)
    data = b"\n".join([a, otlp.to_json(otlp.record(span)).replace(b"MARK", name), c])
    found = otlp.read(data)
    assert found.ids == ids(1, 3)
    assert reason in found.reject.reason


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
    found = otlp.read(b"\n".join([a, bad, c]))
    survivors = [1, 2, 3] if place == "ignored" and depth < 1000 else [1, 3]
    assert found.ids == ids(*survivors)
    assert len(found.rejects) == 3 - len(survivors)


@pytest.mark.parametrize("number", [b"9" * 300, b"-" + b"9" * 300, b"1e400", b"9" * 5000])
@pytest.mark.parametrize("key", ["startTimeUnixNano", "kind", "droppedEventsCount", "flags"])
def test_giant_numbers_are_a_reject(otlp, number, key):
    a, c = lines_of(otlp, 1, 3)
    bad = otlp.to_json(otlp.record(otlp.span(2, **{key: "MARK"}))).replace(b'"MARK"', number)
    found = otlp.read(b"\n".join([a, bad, c]))
    if key == "flags":  # not used here, so that its value is not checked
        assert {f"{1:016x}", f"{3:016x}"} <= set(found.ids)
    else:
        assert found.ids == ids(1, 3)
        assert found.reject


def test_each_of_many_glued_cuts_is_a_reject(otlp):
    (good,) = lines_of(otlp, 1)
    found = otlp.read(good[:60] * 2_000 + good)
    assert found.ids == ids(1)
    assert [reject.source_offset for reject in found.rejects] == [60 * n for n in range(2_000)]


def test_empty_records_glued_together_are_no_rejects(otlp):
    (good,) = lines_of(otlp, 1)
    found = otlp.read(b'{"resourceSpans":[]}' * 50 + good + b'{"resourceSpans":[]}, {"resourceSpans":[]}')
    assert found.ids == ids(1)
    assert found.rejects == []


@pytest.mark.parametrize("item", [b"1", b"{}", b'{"traceId":"zz"}', b'"traceId"', b"[[]]"])
def test_item_that_is_no_span_is_a_reject(otlp, item):
    good = otlp.to_json(otlp.span(1))
    spans = b",".join([item] * 500 + [good] + [item] * 500)
    data = b'{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"s"},"spans":[%b]}]}]}' % spans
    found = otlp.read(data)
    assert found.ids == ids(1)
    numbers = [int(reject.reason.partition(":")[0].removeprefix("span ")) for reject in found.rejects]
    assert numbers == [n for n in range(1001) if n != 500]


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
def test_bad_items_of_every_level_are_a_reject_each(otlp, around, item, each):
    good, after = lines_of(otlp, 1, 2)
    found = otlp.read(good + b"\n" + around % b",".join([item] * 200) + b"\n" + after)
    assert found.ids == ids(1, 2)
    assert len(found.rejects) == 200 * each
    assert {reject.source_offset for reject in found.rejects} == {len(good) + 1}


def test_siblings_of_unusual_and_bad_spans_are_kept(otlp):
    event = otlp.event("e", [otlp.attribute("n", intValue="1")])
    bad = otlp.event("e", [otlp.attribute("n", intValue="x")])
    spans = [otlp.span(n, events=[event, bad] if n == 5 else [event]) for n in range(1, 50)]
    spans[7] = otlp.span(8, traceId="A" * 32, events=[event])
    found = otlp.read(otlp.to_json(otlp.record(*spans)))
    assert found.ids == ids(*(n for n in range(1, 50) if n != 5))
    assert found.spans[6]["trace_id"] == "a" * 32
    assert found.reject.reason == "span 4: intValue is not valid"
    assert [row["n"] for row in found.events["e"]] == [1] * 48


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
    found = otlp.read(b"\n".join([a, line, c]))
    assert found.ids == ids(1, 3)
    assert reason in found.reject.reason


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"resourceSpans":[]}', b'{"resourceSpans":null}', b'{"batches":[]}'])
def test_an_empty_export_is_neither_spans_nor_a_reject(otlp, line):
    (a,) = lines_of(otlp, 1)
    found = otlp.read(b"\n".join([line, a, line]))
    assert found.ids == ids(1)
    assert found.rejects == []


@pytest.mark.slow
def test_excerpts_never_show_values(otlp):
    (line,) = lines_of(otlp, 1)
    for start in range(0, len(line), 3):
        found = otlp.read(lines_of(otlp, 9)[0] + b"\n" + line[start:-1] + b"\n")
        for reject in found.rejects:
            assert "secret" not in reject.excerpt
            assert "prompt" not in reject.excerpt
            assert "secret" not in reject.reason
            assert len(reject.excerpt) <= 200


def test_the_excerpt_shows_structure_and_keys(otlp):
    data = otlp.to_json(otlp.record(otlp.span(1), otlp.span(2, traceId="nope", attributes=[])))
    assert otlp.read(data).reject.excerpt.startswith('{"traceId":"…","spanId":"…","name":"…","kind":…,')


def test_bad_event_attribute_rejects_only_its_span(otlp):
    good = otlp.event("e", [otlp.attribute("k", intValue="1")])
    bad = otlp.event("e", [otlp.attribute("k", intValue="x")])
    lines = [
        otlp.to_json(otlp.record(otlp.span(1, events=[good]))),
        otlp.to_json(otlp.record(otlp.span(2, events=[good]), otlp.span(3, events=[good, bad]))),
        otlp.to_json(otlp.record(otlp.span(4, events=[good]))),
    ]
    found = otlp.read(b"\n".join(lines))
    assert found.ids == ids(1, 2, 4)
    reject = found.reject
    assert reject.reason == "span 1: intValue is not valid"
    assert reject.source_offset == len(lines[0]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_thousands_of_bad_records_are_a_reject_each(otlp, shape):
    records = [otlp.record(otlp.span(n, traceId="" if n % 2 else "1" * 32)) for n in range(1, 10_001)]
    found = otlp.read(otlp.SHAPES[shape](records))
    assert found.ids == ids(*range(2, 10_001, 2))
    assert len({reject.source_offset for reject in found.rejects}) == len(found.rejects) == 5000


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
@pytest.mark.parametrize("is_one_record", [True, False])
def test_after_so_many_rejects_no_more_are_made_of_a_block(otlp, shape, is_one_record):
    """That the rest is not read is for `ingest` to say; good spans before are kept."""
    spans = [otlp.span(1), *[otlp.span(n, traceId="0" * 32) for n in range(2, 9)], otlp.span(9)]
    records = [otlp.record(*spans)] if is_one_record else [otlp.record(span) for span in spans]
    found = otlp.read(otlp.SHAPES[shape](records), options=otlp.IngestOptions(max_rejects=3))
    assert found.ids[:1] == ids(1)
    assert len(found.rejects) == 3


@pytest.mark.parametrize("shape", ["lines", "framed protobuf", "bare protobuf"])
def test_a_record_beyond_the_limit_costs_only_itself(otlp, shape):
    long = otlp.record(otlp.span(2, name="x" * (2 << 20)))
    data = otlp.SHAPES[shape]([otlp.record(otlp.span(1)), long, otlp.record(otlp.span(3))])
    found = otlp.read(data, options=otlp.IngestOptions(max_document_mib=1), block_bytes=1 << 19)
    assert found.ids == ids(1, 3)
    assert found.reject.reason == "longer than 1 MiB: raise `IngestOptions.max_document_mib` to read it"
    assert found.reject.length > 2 << 20
    assert otlp.read(data).ids == ids(1, 2, 3)


def test_a_document_longer_than_the_limit_is_one_line_of_advice(otlp):
    data = otlp.SHAPES["pretty object"]([otlp.record(otlp.span(n, name="x" * 9999)) for n in range(1, 300)])
    found = otlp.read(data, options=otlp.IngestOptions(max_document_mib=1))
    assert found.ids == []
    assert found.reject.reason == "longer than 1 MiB: raise `IngestOptions.max_document_mib` to read it"
    assert (found.reject.source_offset, found.reject.length) == (0, len(data))
    assert len(otlp.read(data).ids) == 299


@pytest.mark.parametrize("block_bytes", [100, 1000, 10_000])
def test_only_damaged_records_are_rejected_at_any_block_end(otlp, block_bytes):
    lines = [otlp.to_json(otlp.record(otlp.span(n, name=LEAKED))) for n in range(1, 200)]
    lines[50] = lines[50][:70] + lines[51]
    lines[120] = lines[120].replace(b'"spans"', b'"spans')
    data = b"\n".join(lines)
    found = otlp.read(data, block_bytes=block_bytes)
    assert found.ids == ids(*range(1, 51), 52, *range(52, 121), *range(122, 200))
    assert {data[: reject.source_offset].count(b"\n") for reject in found.rejects} == {50, 120}
