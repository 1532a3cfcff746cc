from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tracefit.otlp import decode_frames, json_attributes
from tracefit.otlp.columns import build_batch
from tracefit.otlp.json_fast import decode_fast
from tracefit.otlp.json_general import decode_general
from tracefit.otlp.model import Part
from tracefit.sources import Frame

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
def test_columns_read_at_once_equal_columns_read_row_by_row(otlp, data):
    content = otlp.SHAPES["lines"](data.draw(otlp.records))
    expected = otlp.batch_of(content)

    def row_by_row(_self, attributes):
        return [Part(np.arange(len(attributes)), None)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_attributes.JsonAttributes, "parts", row_by_row)
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
