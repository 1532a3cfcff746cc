"""Attributes of many events are read column by column, in any layout, as `json.loads` and the parser of one event read
them."""

from __future__ import annotations

import json
import math

import polars as pl
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from otlp.helpers import each_reader
from tracefit.options import IngestOptions
from tracefit.tables.rows import rows_of, wanted_of

whole_files = settings.get_profile("whole-files")

KINDS = {
    "step.id": "intValue",
    "queue": "intValue",
    "kv.usage": "doubleValue",
    "": "doubleValue",
    "is_rich": "boolValue",
    "phase": "stringValue",
    'a"b\\c': "stringValue",
    "漢字": "stringValue",
    "value": "stringValue",
    "x" * 60: "intValue",
}
"""Keys, odd ones among them, and the kind of their values."""

TYPES = {
    "intValue": pl.Int64(),
    "doubleValue": pl.Float64(),
    "boolValue": pl.String(),
    "stringValue": pl.String(),
}
COLUMNS = {key: TYPES[kind] for key, kind in KINDS.items()}

VALUES = {
    "intValue": st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 9, 10, 10**18, 2**63 - 1, -(2**63)])),
    "doubleValue": st.floats(allow_nan=False, allow_infinity=False),
    "boolValue": st.booleans(),
    "stringValue": st.sampled_from(["", "DECODE", 'a"b', "back\\slash", "tab\t", "漢字😀", "\x7f", '"}]', "x" * 200]),
}

# How exporters write JSON: white space between all signs, escapes, the order of keys, numbers as text or not.
COMPACT, SPACED, TABBED = (",", ":"), (" , ", " : "), ("\t,\t", "\t:\t")
STYLES = st.fixed_dictionaries(
    {
        "separators": st.sampled_from([COMPACT, SPACED, TABBED]),
        "ascii": st.booleans(),
        "value_first": st.booleans(),
        "number": st.sampled_from([str, int]),
    }
)


def ordered(pairs, style):
    return dict(pairs[::-1] if style["value_first"] else pairs)


def attributes_of(values, style):
    return [
        ordered(
            [("key", key), ("value", {KINDS[key]: style["number"](v) if KINDS[key] == "intValue" else v})],
            style,
        )
        for key, v in values.items()
    ]


def written(items, style):
    return json.dumps(items, separators=style["separators"], ensure_ascii=style["ascii"])


def record_of(spans):
    scope = '"scope":{"name":"vllm.scheduler.step"}'
    return f'{{"resourceSpans":[{{"scopeSpans":[{{{scope},"spans":[{",".join(spans)}]}}]}}]}}'


def span_of(number, **fields):
    """Return a span as JSON text; the fields are JSON text too."""
    more = "".join(f',"{name}":{text}' for name, text in fields.items())
    return f'{{"traceId":"{number:032x}","spanId":"{number:016x}"{more}}}'


def data_of(otlp, text, encoding):
    return text.encode() if encoding == "lines" else otlp.SHAPES[encoding]([json.loads(text)])


@st.composite
def crowds(draw):
    """Draw values of a few attributes, and repeat them: enough for reading by column, few enough to look at."""
    keys = draw(st.lists(st.sampled_from([*KINDS]), unique=True, max_size=5))
    layouts = draw(
        st.lists(st.lists(st.sampled_from(keys), unique=True) if keys else st.just([]), min_size=1, max_size=4)
    )
    return [{key: draw(VALUES[KINDS[key]]) for key in layout} for layout in layouts] * 20


@whole_files
@given(crowd=crowds(), styles=st.tuples(STYLES, STYLES), encoding=st.sampled_from(["lines", "framed protobuf"]))
def test_events_are_what_was_written(otlp, crowd, styles, encoding):
    events = [
        written(
            ordered([("timeUnixNano", str(n)), ("name", "e"), ("attributes", attributes_of(values, style))], style),
            style,
        )
        for n, values in enumerate(crowd)
        for style in [styles[n * 2 // len(crowd)]]
    ]
    note(events[0])
    found = otlp.read(
        data_of(otlp, record_of([span_of(1, events=f"[{','.join(events)}]")]), encoding),
        events={"e": COLUMNS},
    )
    assert found.rejects == []
    texts = [{key: as_text(v) if KINDS[key] == "boolValue" else v for key, v in values.items()} for values in crowd]
    assert found.events["e"] == [
        {"span": 0, "unix_ns": n, **dict.fromkeys(KINDS), **values} for n, values in enumerate(texts)
    ]


@whole_files
@given(crowd=crowds(), style=STYLES, encoding=st.sampled_from(["lines", "framed protobuf"]))
def test_attributes_of_spans_are_texts(otlp, crowd, style, encoding):
    spans = [span_of(1 + n, attributes=written(attributes_of(values, style), style)) for n, values in enumerate(crowd)]
    found = otlp.read(data_of(otlp, record_of(spans), encoding), kept=KINDS)
    assert found.rejects == []
    assert [span["attributes"] for span in found.spans] == [
        {key: as_text(v) for key, v in values.items()} for values in crowd
    ]


def as_text(value):
    """Return a string as it is and anything else as JSON has it, which is how Python writes numbers too."""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.slow
@whole_files
@given(crowd=crowds(), style=STYLES, block_bytes=st.integers(50, 20_000))
def test_the_size_of_a_block_changes_nothing(otlp, crowd, style, block_bytes):
    events = [written({"timeUnixNano": "1", "name": "e", "attributes": attributes_of(v, style)}, style) for v in crowd]
    lines = [record_of([span_of(n, events=f"[{','.join(events)}]")]) for n in (1, 2, 3)]
    whole, cut = (
        otlp.read("\n".join(lines).encode(), events={"e": COLUMNS}, block_bytes=size) for size in (None, block_bytes)
    )
    assert cut.content == whole.content
    assert whole.rejects == cut.rejects == []


STEP, TIME = (
    '{"key":"step.id","value":{"intValue":"7"}}',
    '{"key":"step.ts_start_ns","value":{"intValue":"90"}}',
)
DEPTH, RATIO = (
    '{"key":"queue.running_depth","value":{"intValue":3}}',
    '{"key":"kv.usage_gpu_ratio","value":{"doubleValue":1}}',
)


@pytest.mark.parametrize("encoding", ["lines", "framed protobuf"])
def test_events_become_rows_of_steps(otlp, encoding):
    """A summary without a step or a time is counted but gives no row; every column except the ratio has whole
    numbers."""
    events = [
        f'{{"name":"step.BATCH_SUMMARY","timeUnixNano":"{n}","attributes":[{",".join(attributes)}]}}'
        for n, attributes in enumerate([[STEP, TIME, DEPTH], [TIME, STEP, RATIO], [STEP, DEPTH], [TIME], []] * 10, 1)
    ]
    wanted = wanted_of(IngestOptions())
    data = data_of(otlp, record_of([span_of(1, events=f"[{','.join(events)}]")]), encoding)
    (batch,), rejects = otlp.decode(data, events=wanted.events, span_keys=wanted.span_keys)
    rows = rows_of(batch, IngestOptions())
    assert (rejects, rows.rejects.height) == ([], 0)
    columns = ["unix_ns", "step_id", "ts_start_ns", "running_depth", "kv_usage_ratio"]
    assert rows.steps.select(columns).rows() == [
        row for n in range(10) for row in [(5 * n + 1, 7, 90, 3, None), (5 * n + 2, 7, 90, None, 1.0)]
    ]
    assert rows.incomplete["row"].to_list() == [0] * 30
    assert rows.events.select("row", "name", "count").rows() == [(0, "step.BATCH_SUMMARY", 50)]


def read_values(otlp, kind, literals, dtype):
    """Read a record for each literal, as the value of the only event of its only span."""
    lines = [
        record_of(
            [
                span_of(
                    n,
                    events=f'[{{"name":"e","timeUnixNano":"5","attributes":[{{"key":"k","value":{{"{kind}":{text}}}}}]}}]',
                )
            ]
        )
        for n, text in enumerate(literals, 1)
    ]
    return otlp.read("\n".join(lines).encode(), events={"e": {"k": dtype}})


LITERALS = [
    "1", '"1"', "01", '"01"', "-", "+1", '"+1"', "1.5", '"1.5"', "1.0", '"1.0"', "1e2", '"1e2"', "1E2", '""',
    '" 1"', '"1 "', "1 ", '"1_0"', "0x1", "9223372036854775807", '"9223372036854775808"', "-9223372036854775808",
    '"-9223372036854775809"', "9999999999999999999", "99999999999999999999", "18446744073709551615", '"' + "9" * 300 + '"',
    "9" * 30, "0.1", ".5", "5.", "1e400", "-1e400", "1e-400", '"NaN"', "NaN", '"nan"', '"Infinity"', "Infinity", '"-Infinity"',
    '"inf"', "true", "false", '"true"', "tru", "truee", "null", '"null"', "{}", "[]", '"x"', '"é"', '"\\u00e9"', '"\\ud83d\\ude00"',
    '"\\ud800"', '"\\x"', '"a\\"b"', '"\\\\"', '"', '"a\tb"', '"a\x00b"', '"' + "x" * 5000 + '"', '"' + "9" * 40 + '"', "0." + "3" * 60,
]  # fmt: skip
"""Text where a value is expected, valid or not."""

USUAL = [
    ("intValue", "1"),
    ("intValue", '"1"'),
    ("doubleValue", "1.5"),
    ("boolValue", "true"),
    ("stringValue", '"x"'),
]
"""Values as exporters write them: the crowd around a literal."""


@pytest.mark.slow
@pytest.mark.parametrize("literal", LITERALS, ids=lambda text: ascii(text)[:20])
def test_literal_is_read_alike_by_parser_and_layout(otlp, literal):
    """Few events go through the parser, many are read by column: both accept the same, and as the same."""
    for (kind, usual), dtype in ((each, dtype) for each in USUAL for dtype in (pl.Int64(), pl.Float64(), pl.String())):
        alone, crowd = (read_values(otlp, kind, [usual] * times + [literal], dtype) for times in (2, 50))
        is_read = len(alone.ids) == 3
        assert len(crowd.ids) == (51 if is_read else 50), (kind, usual, dtype)
        assert len(alone.rejects) == len(crowd.rejects) == (not is_read), (kind, usual, dtype)
        if is_read:
            first, last = alone.events["e"][-1]["k"], crowd.events["e"][-1]["k"]
            assert first == last or repr(first) == repr(last) == "nan", (kind, usual, dtype)


@each_reader
@pytest.mark.parametrize(
    ("kind", "literal", "value"),
    [
        ("intValue", "-0", 0),
        ("intValue", '"1e2"', 100),
        ("intValue", "1.0", 1),
        ("intValue", "9223372036854775807", 2**63 - 1),
        ("intValue", "-9223372036854775808", -(2**63)),
        ("doubleValue", "1e-400", 0.0),
        ("doubleValue", '"-Infinity"', -math.inf),
        ("doubleValue", "0." + "3" * 60, 1 / 3),
        ("stringValue", '"\\u00e9"', "é"),
        ("stringValue", '"a\\"b"', 'a"b'),
        ("stringValue", '"\\ud83d\\ude00"', "😀"),
    ],
)
def test_a_literal_has_its_value(otlp, times, kind, literal, value):
    found = read_values(otlp, kind, [literal] * times, TYPES[kind])
    assert [event["k"] for event in found.events["e"]] == [value] * times


@each_reader
@pytest.mark.parametrize(
    ("kind", "literal", "dtype", "value"),
    [
        ("intValue", "7", pl.Float64(), 7.0),
        ("intValue", "7", pl.String(), "7"),
        ("doubleValue", "7.0", pl.Int64(), 7),
        ("stringValue", '"7"', pl.Int64(), 7),
        ("stringValue", '"x"', pl.Int64(), None),
        ("boolValue", "true", pl.Int64(), None),
        ("boolValue", "true", pl.String(), "true"),
    ],
)
def test_a_value_of_another_kind_is_converted_or_null(otlp, times, kind, literal, dtype, value):
    found = read_values(otlp, kind, [literal] * times, dtype)
    assert [event["k"] for event in found.events["e"]] == [value] * times


@each_reader
@pytest.mark.parametrize("encoding", ["lines", "framed protobuf"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.7, "0.7"),
        (1.0, "1.0"),
        (1e16, "1e+16"),
        (1e-7, "1e-07"),
        (123456789.125, "123456789.125"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
    ],
)
def test_a_double_of_a_span_as_text(otlp, times, encoding, value, text):
    spans = [otlp.span(1 + n, attributes=[otlp.attribute("d", doubleValue=value)]) for n in range(times)]
    found = otlp.read(otlp.SHAPES[encoding]([otlp.record(*spans)]))
    assert [span["attributes"] for span in found.spans] == [{"d": text}] * times
