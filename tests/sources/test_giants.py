"""Documents and messages that are not held as a whole; here the sizes that decide it are small."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tracefit.sources import (
    Frame,
    Reject,
    framed_zstd,
    framing,
    json_pieces,
    json_records,
    json_scan,
    proto_pieces,
    shape,
)
from tracefit.sources.json_scan import Scanner

DOCUMENTS = (
    "lines",
    "pretty object",
    "array",
    "pretty array",
    "pretty objects in a row",
    "Tempo trace",
    "Tempo batches",
    "bare protobuf",
    "framed protobuf",
    "framed zstd of JSON",
    "framed zstd of protobuf",
)


def limit(patch, *, held=1, piece=1, guess=1, span=10_000, chunk=1 << 20):
    """Make records of more than `held` bytes be taken apart, into pieces of about `piece` bytes."""
    patch.setattr(json_records, "MAX_HELD_BYTES", held)
    patch.setattr(shape, "MAX_HELD_BYTES", 1 << 20)
    patch.setattr(framing, "MAX_HELD_BYTES", held)
    patch.setattr(framed_zstd, "MAX_HELD_BYTES", held)
    for pieces in (json_pieces, proto_pieces):
        patch.setattr(pieces, "PIECE_BYTES", piece)
        patch.setattr(pieces, "MAX_SPAN_BYTES", span)
    patch.setattr(json_pieces, "_SMALLEST_GUESS_BYTES", guess)
    patch.setattr(json_scan, "CHUNK_BYTES", chunk)
    patch.setattr(json_scan, "_DOUBLINGS", 0 if chunk < 1 << 20 else 8)


@pytest.fixture
def small(monkeypatch):
    """Take everything apart as far as it goes."""
    limit(monkeypatch)
    return monkeypatch


def spans_of(otlp, data):
    """Return what is known of each span: its id, scope and server."""
    rows = otlp.batch_of(data).spans.select("span_id", "scope", "service_name")
    return [(int(span_id, 16), scope, service) for span_id, scope, service in rows.iter_rows()]


def rejects_of(otlp, data):
    return [item for item in otlp.frames_of(data) if isinstance(item, Reject)]


def document(otlp, *, first=1, last=6, service="one", scope="vllm.api", **more):
    """Return a request of spans `first` to `last`."""
    spans = [otlp.span(n) for n in range(first, last + 1)]
    record = otlp.record(*spans, scope=scope, resource=[otlp.attribute("service.name", stringValue=service)])
    return record | more


@settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
@pytest.mark.parametrize("shape_name", DOCUMENTS)
def test_taken_apart_or_held_a_document_has_the_same_spans(otlp, shape_name, data):
    content = otlp.SHAPES[shape_name](data.draw(otlp.records))
    expected = otlp.batch_of(content)
    with pytest.MonkeyPatch.context() as patch:
        limit(
            patch,
            held=data.draw(st.integers(1, 800)),
            piece=data.draw(st.integers(1, 800)),
            guess=data.draw(st.sampled_from([1, 100, 10_000])),
            span=1 << 20,
            chunk=data.draw(st.sampled_from([2, 7, 100, 1 << 20])),
        )
        found = otlp.batch_of(content)
    assert found.rejects == ()
    if len(expected.spans):
        otlp.assert_same(found, expected)
    else:
        assert not len(found.spans)


@pytest.mark.parametrize("shape_name", ["bare protobuf", "framed protobuf"])
def test_every_span_of_a_message_is_a_piece_where_pieces_are_small(otlp, small, shape_name):
    data = otlp.SHAPES[shape_name]([document(otlp), document(otlp, first=7, last=8, service="two")])
    frames = otlp.frames_of(data)
    assert [data.index(bytes([0] * 15 + [n])) - frame.offset for n, frame in enumerate(frames, 1)] == [4] * 8
    assert spans_of(otlp, data) == [(n, "vllm.api", "one" if n < 7 else "two") for n in range(1, 9)]


def test_of_a_cut_message_every_whole_span_is_kept(otlp, small):
    data = otlp.to_protobuf(document(otlp))
    ends = [data.index(bytes([0] * 15 + [n])) - 4 for n in range(2, 7)]
    for cut in range(ends[0], len(data)):
        *frames, reject = otlp.frames_of(data[:cut])
        whole = [end for end in ends if end <= cut]
        assert len(frames) == len(whole)
        assert reject.reason == "record cut"
        assert (reject.source_offset, reject.length) == (whole[-1], cut - whole[-1])


@pytest.mark.parametrize("size", [50_000, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_frame_that_claims_too_much_costs_nothing_but_itself(otlp, small, size):
    small.setattr(framing, "MAX_HELD_BYTES", 1500)
    messages = [otlp.to_protobuf(document(otlp, first=n, last=n + 9)) for n in range(1, 50, 10)]
    data = otlp.framed(messages[:2]) + size.to_bytes(4, "big") + messages[2] + otlp.framed(messages[3:])
    found = [span[0] for span in spans_of(otlp, data)]
    assert [n for n in found if not 20 < n < 31] == [*range(1, 21), *range(31, 51)]
    assert len(rejects_of(otlp, data)) == 1


@pytest.mark.parametrize("size", [2**31, 2**32, 2**62, 2**63 - 1])
def test_a_field_that_claims_too_much_is_a_reject(otlp, small, size):
    good, claimed = otlp.to_protobuf(document(otlp)), bytearray(b"\x0a")
    while size:
        claimed.append(size & 0x7F | (0x80 if size > 0x7F else 0))
        size >>= 7
    data = good + bytes(claimed) + good
    assert len(spans_of(otlp, data)) >= 6
    assert len(rejects_of(otlp, data)) == 1


def test_a_span_of_a_message_that_is_too_large_costs_itself(otlp, small):
    record = otlp.record(otlp.span(1), otlp.span(2, name="x" * 20_000), otlp.span(3))
    data = otlp.to_protobuf(record)
    assert [span[0] for span in spans_of(otlp, data)] == [1, 3]
    (reject,) = rejects_of(otlp, data)
    assert (reject.reason, reject.length > 20_000) == ("span too large", True)


def test_every_span_is_a_piece_where_pieces_are_small(otlp, small):
    frames = otlp.frames_of(otlp.to_json(document(otlp)))
    assert [len(json.loads(frame.payload)["resourceSpans"]) for frame in frames] == [1] * 6


def test_a_piece_tells_where_its_spans_are(otlp, small):
    text = otlp.to_json(document(otlp))
    offsets = [frame.offset for frame in otlp.frames_of(text)]
    assert offsets == [text.index(b'{"traceId":"%032x"' % n) for n in range(1, 7)]


@pytest.mark.parametrize("envelope", ["resourceSpans", "resource_spans", "batches"])
@pytest.mark.parametrize("scopes", ["scopeSpans", "scope_spans", "instrumentationLibrarySpans"])
@pytest.mark.parametrize("scope", ["scope", "instrumentationLibrary", "instrumentation_library"])
def test_every_name_of_a_level_is_known(otlp, small, envelope, scopes, scope):
    ((item,),) = document(otlp, last=2).values()
    inside = {scope: {"name": "vllm.api"}, "spans": item["scopeSpans"][0]["spans"]}
    renamed = {envelope: [{"resource": item["resource"], scopes: [inside]}]}
    assert spans_of(otlp, otlp.to_json(renamed)) == [(1, "vllm.api", "one"), (2, "vllm.api", "one")]


def test_a_key_may_be_spelled_with_escapes(otlp, small):
    text = otlp.to_json(document(otlp, last=2)).replace(b'"spans"', b'"\\u0073pans"')
    assert len(spans_of(otlp, text)) == 2


def test_resource_and_scope_may_come_last(otlp, small):
    items = []
    for number, service in ((1, "one"), (3, "two")):
        ((item,),) = document(otlp, first=number, last=number + 1, service=service).values()
        late = [
            {"spans": [otlp.span(number)], "scope": {"name": "vllm.api"}},
            {"spans": [otlp.span(number + 1)], "scope": {"name": "vllm.scheduler"}},
        ]
        items.append({"scopeSpans": late, "resource": item["resource"]})
    assert spans_of(otlp, otlp.to_json({"resourceSpans": items})) == [
        (1, "vllm.api", "one"),
        (2, "vllm.scheduler", "one"),
        (3, "vllm.api", "two"),
        (4, "vllm.scheduler", "two"),
    ]


def test_what_waits_for_its_resource_is_kept_where_the_document_is_cut(otlp, small):
    text = otlp.to_json({"resourceSpans": [{"scopeSpans": document(otlp)["resourceSpans"][0]["scopeSpans"]}]})
    assert spans_of(otlp, text[: _ends(text, 2)]) == [(1, "vllm.api", None), (2, "vllm.api", None)]


def test_resource_and_scope_may_be_missing_or_null(otlp, small):
    item = {
        "resource": None,
        "scopeSpans": [{"spans": [otlp.span(1)]}, {"scope": None, "spans": [otlp.span(2)]}],
    }
    assert sorted(spans_of(otlp, otlp.to_json({"resourceSpans": [item], "schemaUrl": None}))) == [
        (1, None, None),
        (2, None, None),
    ]


def test_records_behind_very_many_blank_lines_are_read(otlp):
    assert len(spans_of(otlp, b"\n" * (3 << 20) + otlp.to_json(document(otlp)))) == 6


def test_of_two_resources_the_first_counts_and_the_other_is_told(otlp, small):
    text = otlp.to_json(document(otlp, last=2))
    second = b',"resource":{"attributes":[]}}]}'
    doubled = text.removesuffix(b"}]}") + second
    assert [span[2] for span in spans_of(otlp, doubled)] == ["one", "one"]
    (reject,) = rejects_of(otlp, doubled)
    assert reject.reason == "resource is there twice"


def test_unknown_fields_of_every_level_are_passed_over(otlp, small):
    record = document(otlp, last=2)
    odd = {"a": [{"spans": [otlp.span(9)]}, "]}", 1.5], "b": '\\"{[', "c": -1e300, "d": True}
    item = record["resourceSpans"][0]
    item["scopeSpans"][0] = odd | item["scopeSpans"][0] | {"z": odd}
    record["resourceSpans"][0] = odd | item | {"z": odd}
    assert len(spans_of(otlp, otlp.to_json(odd | record | {"z": odd}))) == 2


@pytest.mark.parametrize("key", ["resourceSpans", "scopeSpans", "spans"])
def test_what_should_be_an_array_and_is_not_is_a_reject(otlp, small, key):
    text = otlp.to_json(document(otlp, last=2))
    broken = text.replace(b'"%b":[' % key.encode(), b'"%b":17,"x":[' % key.encode())
    assert [reject.reason for reject in rejects_of(otlp, broken)] == [f"{key} is not an array"]


def test_a_document_without_spans_is_a_reject(otlp, small):
    (reject,) = rejects_of(otlp, b"[\n{},\n" + b'{"some":{"thing":1}}' + b', {"batches":null}]')
    assert (reject.reason, reject.source_offset, reject.length) == ("it has no resourceSpans", 6, 20)


@pytest.mark.parametrize("shape_name", ["lines", "pretty object", "array"])
def test_of_a_cut_document_every_whole_span_is_kept(otlp, small, shape_name):
    text = otlp.SHAPES[shape_name]([document(otlp)]).rstrip()
    cuts = range(0, len(text) - 2, 7)
    for cut in cuts:
        whole = sum(text[:cut].count(b'"%032x"' % n) and _ends(text, n) <= cut for n in range(1, 7))
        items = otlp.frames_of(text[:cut])
        frames = [item for item in items if isinstance(item, Frame)]
        assert len(frames) == whole
        if whole:
            assert items[-1].reason == "document is cut"
            assert items[-1].source_offset + items[-1].length == cut


def _ends(text, number):
    """Return where a span ends; there is no brace inside of these."""
    return text.index(b"}", text.index(b'"%032x"' % number)) + 1


def test_a_record_that_was_glued_on_is_read(otlp, small):
    first, second = otlp.to_json(document(otlp)), otlp.to_json(document(otlp, first=7, last=8))
    small.setattr(json_records, "CHUNK_BYTES", 256)
    small.setattr(json_records, "_EDGE_BYTES", 40)
    start = first.index(b'{"traceId"')
    for cut in range(start, len(first) - 4, 5):
        found = [span[0] for span in spans_of(otlp, first[:cut] + second)]
        assert found[-2:] == [7, 8], first[:cut]
        assert found[:-2] == [n for n in range(1, 7) if _ends(first, n) <= cut]


def test_a_bad_span_costs_itself(otlp, small):
    small.setattr(json_pieces, "PIECE_BYTES", 100_000)
    text = otlp.to_json(document(otlp))
    third = text.index(b'{"traceId":"%032x"' % 3)
    for damage in (b'"kind":x', b'"kind"}1', b'"k":"\xff","kind":1'):
        broken = text[:third] + text[third:].replace(b'"kind":1', damage, 1)
        assert [span[0] for span in spans_of(otlp, broken)] in ([1, 2, 4, 5, 6], [1, 2])
        (reject, *_) = rejects_of(otlp, broken)
        assert abs(reject.source_offset - third) <= 1


def test_many_bad_spans_are_few_rejects(otlp, small):
    small.setattr(json_pieces, "PIECE_BYTES", 1 << 20)
    text = b'{"resourceSpans":[{"resource":{},"scopeSpans":[{"scope":{},"spans":[%b]}]}]}'
    assert len(rejects_of(otlp, text % b",".join([b"{}", b"{x}"] * 20_000))) < 250


def test_a_span_that_is_too_large_costs_the_rest_of_its_record(otlp, small):
    large = otlp.record(otlp.span(1), otlp.span(2, name="x" * 20_000), otlp.span(3))
    data = b"[\n" + otlp.to_json(large) + b",\n" + otlp.to_json(document(otlp, first=7, last=7)) + b"]"
    assert [span[0] for span in spans_of(otlp, data)] == [1, 7]
    (reject,) = rejects_of(otlp, data)
    assert reject.reason == "record too large"


@pytest.mark.parametrize("signal", ["Logs", "Metrics"])
def test_a_large_document_of_another_signal_is_refused(otlp, small, signal):
    text = b'{"resource%b":[%b]}' % (signal.encode(), b",".join([b'{"a":[{}]}'] * 100))
    with pytest.raises(json_pieces.JsonDamageError.__base__, match=f"OTLP {signal.lower()}"):
        otlp.frames_of(text)


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"resourceSpans":' + b"[" * 12_000_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"{" * 12_000_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"{}," * 4_000_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"1," * 6_000_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"' + b"x" * 12_000_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"' + b"\\" * 12_000_000,
        b'{"resourceSpans":[' + b'{"scopeSpans":[{"spans":[' * 500_000,
        b'{"trace":' * 1_400_000 + b'{"resourceSpans":[]',
        b'{"batches":[], "' + b"k" * 12_000_000,
        b'{"batches":[], "k":' + b"1" * 12_000_000,
        b"[" * 12_000_000 + b'{"batches":[]}',
        b'{"batches":[]}' + b"}" * 12_000_000,
    ],
    ids=lambda text: repr(text[-20:]),
)
def test_hostile_documents_take_bounded_memory(otlp, monkeypatch, hostile):
    limit(monkeypatch, held=1 << 18, piece=1 << 18, guess=1 << 16, span=1 << 20)
    tracemalloc.start()
    items = otlp.frames_of(b"[\n" + hostile)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(isinstance(item, Reject) for item in items) < 20
    # The input itself is there once, and once more in what is handed on.
    assert peak < 40 << 20


def test_brackets_close_where_a_parser_says():
    rng = random.Random(0)
    for _ in range(300):
        values = [_some_value(rng, 4) for _ in range(rng.randrange(1, 5))]
        texts = [json.dumps(value, ensure_ascii=rng.random() < 0.5).encode() for value in values]
        text = b",".join(texts) + b"]{"
        ends, position = [], 0
        for value in texts:
            position += len(value) + 1
            if value[:1] in b"[{":
                ends.append(position - 1)
        found = Scanner().ends(text)
        assert found.ends.tolist() == ends
        assert found.stop == len(text) - 2


def _some_value(rng, depth):
    kind = rng.randrange(4 if depth else 2)
    if kind == 0:
        return rng.choice([1, None, -2.5, True])
    if kind == 1:
        return "".join(rng.choice('ab"\\{}[],é\n') for _ in range(rng.randrange(6)))
    if kind == 2:
        return [_some_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {_some_value(rng, 0) or "": _some_value(rng, depth - 1) for _ in range(rng.randrange(4))}
