from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tracefit.otlp import decode_frames, json_attributes, proto_attributes
from tracefit.otlp.columns import build_batch
from tracefit.otlp.json_fast import decode_fast
from tracefit.otlp.json_general import decode_general
from tracefit.otlp.model import Part
from tracefit.sources import Frame, read_frames

MUTATIONS = 500
RECORDS_PER_FILE = 6

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

# Not shrunk: a smaller example is not worth the minutes that whole files take to make one.
quick = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@settings(quick, max_examples=4)
@given(data=st.data())
@pytest.mark.parametrize("shape", SHAPES)
def test_every_container_holds_the_same_spans(otlp, shape, data):
    records = data.draw(otlp.records)
    expected = otlp.batch_of(otlp.SHAPES["lines"](records))
    assert expected.rejects == ()
    total = sum(len(s["spans"]) for r in records for s in r["resourceSpans"][0]["scopeSpans"])
    assert len(expected.spans) == total
    for compress in otlp.COMPRESSIONS.values():
        found = otlp.batch_of(compress(otlp.SHAPES[shape](records)))
        assert found.rejects == ()
        otlp.assert_same(found, expected)


@quick
@given(data=st.data())
def test_what_both_json_decoders_accept_they_read_alike(otlp, data):
    for record in data.draw(otlp.records):
        frame = Frame("f", 0, otlp.to_json(record), "json")
        fast = decode_fast(frame, check_events=True)
        general = decode_general(frame)
        if fast is not None:
            assert general.rejects == []
            otlp.assert_same(
                build_batch(fast, json_attributes.READER), build_batch(general, json_attributes.READER)
            )


@quick
@given(data=st.data())
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_columns_read_at_once_equal_columns_read_row_by_row(otlp, shape, data):
    content = otlp.SHAPES[shape](data.draw(otlp.records))
    expected = otlp.batch_of(content)

    def row_by_row(_self, attributes):
        return [Part(np.arange(len(attributes)), None)]

    with pytest.MonkeyPatch.context() as patch:
        for reader in (json_attributes.JsonAttributes, proto_attributes.ProtobufAttributes):
            patch.setattr(reader, "parts", row_by_row)
        by_row = otlp.batch_of(content)
    assert list(by_row.events) == list(expected.events)
    for name, frame in by_row.events.items():
        assert frame.sort(*frame.columns[:2]).equals(expected.events[name].select(frame.columns)), name


@quick
@given(data=st.data())
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_batches_of_any_size_hold_the_same_spans(otlp, shape, data):
    content = otlp.SHAPES[shape](data.draw(otlp.records))
    whole = otlp.batch_of(content)
    batches = list(decode_frames(otlp.frames_of(content), batch_bytes=data.draw(st.integers(1, 3000))))
    ids = [span_id for batch in batches for span_id in batch.spans["span_id"]]
    assert ids == otlp.span_ids(whole)
    for batch in batches:
        assert batch.spans["span_row"].to_list() == list(range(len(batch.spans)))


def _records(otlp, rng):
    """Return records of one span each, whose number is their place in the file."""
    summaries = [
        otlp.event("step.BATCH_SUMMARY", [otlp.attribute("step.id", intValue=str(rng.randrange(10**6)))])
        for _ in range(5)
    ]
    return [otlp.record(otlp.span(number, events=summaries)) for number in range(1, RECORDS_PER_FILE + 1)]


def _mutated(data, rng):
    """Flip, cut, splice or repeat something; return the new bytes and which of the old ones were touched."""
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice([1, 1, 1, 2, 8, 60]))
    kind = rng.choice(["flip", "cut", "splice", "repeat", "tail"])
    if kind == "flip":
        stop = start + 1
        new = bytes([data[start] ^ (1 << rng.randrange(8))])
    elif kind == "cut":
        new = b""
    elif kind == "splice":
        new = rng.randbytes(rng.randrange(1, 20))
    elif kind == "repeat":
        new = data[start:stop] * 2
    else:
        stop, new = len(data), b""
    return data[:start] + new + data[stop:], start, stop


def _extents(shape, data, payload_sizes):
    """Return where each record with its delimiters begins and ends."""
    extra = 1 if shape == "lines" else 4
    position = 0
    for size in payload_sizes:
        # A line is also delimited by the end of the line before it.
        yield (position - 1 if shape == "lines" else position), position + size + extra
        position += size + extra
    assert position == len(data)


@pytest.mark.parametrize(
    "shape", ["lines", "framed protobuf", "framed zstd of JSON", "framed zstd of protobuf"]
)
def test_damage_costs_no_record_that_it_does_not_touch(otlp, shape):
    rng = random.Random(shape)
    for _ in range(MUTATIONS // 4):
        records = _records(otlp, rng)
        data = otlp.SHAPES[shape](records)
        sizes = [len(otlp.SHAPES[shape]([each])) - (1 if shape == "lines" else 4) for each in records]
        damaged, start, stop = _mutated(data, rng)
        untouched = {
            f"{number:016x}"
            for number, (begin, end) in enumerate(_extents(shape, data, sizes), 1)
            if end <= start or begin >= stop
        }
        batch = otlp.batch_of(damaged)
        assert untouched <= set(otlp.span_ids(batch)), (start, stop)


@pytest.mark.parametrize("shape", ["pretty object", "array", "bare protobuf", "lines", "framed protobuf"])
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_damage_never_raises(otlp, shape, compression):
    rng = random.Random(shape + compression)
    for _ in range(MUTATIONS // 15):
        data = otlp.COMPRESSIONS[compression](otlp.SHAPES[shape](_records(otlp, rng)))
        damaged, _, _ = _mutated(data, rng)
        for batch in decode_frames(read_frames("-", stdin=io.BytesIO(damaged))):
            assert len(batch.rejects) < 100
