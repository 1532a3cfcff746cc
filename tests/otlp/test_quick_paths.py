"""Common forms of exporters are read column by column, or by the typed structs: ten times as fast as with care."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import Raw
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tracefit.otlp import layouts
from tracefit.otlp.json_records import read_spans
from tracefit.otlp.model import kind_name, status_name
from tracefit.otlp.packed import PackedTexts


@pytest.mark.parametrize("sizes", [[200] * 40, [300, 16_000] * 30, [100, 127, 128, 150] * 20])
def test_attributes_of_any_length_are_read_column_by_column(sizes):
    texts = ["x" * size for size in sizes]
    events = [
        Span.Event(
            attributes=[
                KeyValue(key="note", value=AnyValue(string_value=text)),
                KeyValue(key="step.id", value=AnyValue(int_value=number)),
            ]
        ).SerializeToString()
        for number, text in enumerate(texts)
    ]
    packed = PackedTexts.of(events)
    rows, columns = layouts.read_columns(packed, np.arange(len(events)), {"note", "step.id"}, layouts.PROTOBUF)
    assert rows.tolist() == list(range(len(events)))
    assert columns["note"].to_list() == texts
    assert columns["step.id"].to_list() == list(range(len(texts)))


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ('"kind":"SPAN_KIND_SERVER","status":{"code":"STATUS_CODE_OK"}', "SERVER", "OK"),
        ('"kind":3,"status":{"code":2}', "CLIENT", "ERROR"),
    ],
)
def test_names_of_enums_and_upper_case_ids_need_no_care(fields, kind, code):
    ids = f'"traceId":"{"AB" * 16}","spanId":"{"CD" * 8}","parentSpanId":"{"EF" * 8}"'
    (span,) = read_spans([Raw(f"{{{ids},{fields}}}".encode())])
    assert (kind_name(span.kind), status_name(span.status.code)) == (kind, code)
