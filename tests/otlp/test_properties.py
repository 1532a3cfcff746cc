from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefit.otlp.decode import DecodeLimits

SHAPES = (
    "lines with BOM, CRLF and blanks",
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

whole_files = settings.get_profile("whole-files")


@pytest.mark.mostly_slow(every=6)
@settings(whole_files, max_examples=max(2, whole_files.max_examples // 10))
@given(data=st.data())
@pytest.mark.parametrize("shape", SHAPES)
def test_every_container_holds_the_same_spans(otlp, shape, data):
    records = data.draw(otlp.records)
    # The record of a span is another in each container; its numbers are the same, and the texts of doubles are not.
    wanted = otlp.wanted_of(records, data.draw(st.sampled_from([pl.Int64(), pl.Float64()])))
    expected = otlp.read(otlp.SHAPES["lines"](records), **wanted)
    assert expected.rejects == []
    assert expected.ids == [s["spanId"] for r in records for s in r["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    compressions = otlp.COMPRESSIONS if "zstd" not in shape else {"plain": bytes}  # one compression, not two
    for compress in compressions.values():
        found = otlp.read(compress(otlp.SHAPES[shape](records)), **wanted)
        assert found.rejects == []
        assert found.content == expected.content


@whole_files
@given(data=st.data())
def test_slow_path_reads_what_the_fast_path_reads(otlp, data):
    """They are two programs: the one has typed structs, the other the rules of ProtoJSON."""
    records = data.draw(otlp.records)
    wanted = otlp.wanted_of(records, pl.Float64())
    usual = otlp.read(otlp.SHAPES["lines"](records), **wanted)
    # A field that OTLP does not know is what makes the typed structs refuse.
    unusual = [record | {"unknown": 1} for record in records]
    for record in unusual:
        for scope in record["resourceSpans"][0]["scopeSpans"]:
            scope["spans"] = [span | {"unknown": 1} for span in scope["spans"]]
    found = otlp.read(otlp.SHAPES["lines"](unusual), **wanted)
    assert found.rejects == []
    assert found.content == usual.content


@pytest.mark.mostly_slow(every=2)
@whole_files
@given(data=st.data())
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_blocks_of_any_size_hold_the_same_spans(otlp, shape, data):
    records = data.draw(otlp.records)
    wanted = otlp.wanted_of(records)
    content = otlp.SHAPES[shape](records)
    whole = otlp.read(content, **wanted)
    cut = otlp.read(content, **wanted, block_bytes=data.draw(st.integers(1, 3000)))
    assert cut.content == whole.content
    assert [span["source_offset"] for span in cut.spans] == [span["source_offset"] for span in whole.spans]


@pytest.mark.mostly_slow(every=2)
@whole_files
@given(data=st.data())
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_a_long_record_that_is_split_holds_the_same_spans(otlp, shape, data):
    records = data.draw(otlp.records)
    wanted = otlp.wanted_of(records)
    content = otlp.SHAPES[shape](records)
    whole = otlp.read(content, **wanted)
    split = otlp.read(content, **wanted, decode_limits=DecodeLimits(piece_bytes=data.draw(st.integers(1, 300))))
    assert split.content == whole.content
    assert [span["source_offset"] for span in split.spans] == [span["source_offset"] for span in whole.spans]


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_bad_spans_of_a_split_record_keep_their_numbers(otlp, shape):
    """By their number in the record, and with its place and length."""
    bad = {5: {"traceId": "0" * 32}, 17: {"spanId": "0" * 16}}
    content = otlp.SHAPES[shape]([otlp.record(*[otlp.span(n + 1, **bad.get(n, {})) for n in range(20)])] * 2)
    whole = otlp.read(content)
    assert [reject.reason.split(":")[0] for reject in whole.rejects] == ["span 5", "span 17"] * 2
    split = otlp.read(content, decode_limits=DecodeLimits(piece_bytes=150))
    assert split.ids == whole.ids
    places = [[(r.source_offset, r.length, r.reason) for r in found.rejects] for found in (split, whole)]
    assert places[0] == places[1]


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
@pytest.mark.parametrize(("records_bytes", "most"), [(1 << 20, 1), (6_000, 12)])
def test_pieces_of_a_long_record_share_batches(otlp, shape, records_bytes, most):
    """Each batch has a fixed cost, and a record of many small scopes has as many pieces."""
    limits = DecodeLimits(piece_bytes=500, records_bytes=records_bytes, batch_bytes=3_000)
    scopes = [otlp.record(otlp.span(n + 1), scope=f"vllm.{n}")["resourceSpans"][0] for n in range(100)]
    batches, _ = otlp.decode(otlp.SHAPES[shape]([{"resourceSpans": scopes}]), decode_limits=limits)
    assert sum(batch.spans.height for batch in batches) == 100
    assert len(batches) <= most


@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
@pytest.mark.parametrize("of_record", [1, 100])
def test_a_batch_holds_no_more_spans_than_fit_into_memory(otlp, shape, of_record):
    """Short spans take twenty times their bytes when they are decoded."""
    spans = [otlp.span(n + 1) for n in range(100)]
    records = [otlp.record(*spans[n : n + of_record]) for n in range(0, 100, of_record)]
    limits = DecodeLimits(piece_bytes=500, max_spans=10)
    batches, _ = otlp.decode(otlp.SHAPES[shape](records), decode_limits=limits)
    assert sum(batch.spans.height for batch in batches) == 100
    assert max(batch.spans.height for batch in batches) <= 20
