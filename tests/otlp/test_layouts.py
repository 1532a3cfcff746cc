"""Events written in any layout: what is read of them is what `json.loads` finds, from JSON and from protobuf."""

from __future__ import annotations

import json
import math
import random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefit.tables.options import IngestOptions
from tracefit.tables.rows import rows_of, wanted_of

whole_files = settings.get_profile("whole-files")
seeds = st.integers(0, 2**32)

KINDS = ("intValue", "doubleValue", "boolValue", "stringValue")
TYPES = (pl.Int64(), pl.Float64(), pl.String())
KEYS = [
    "step.id",
    "a",
    "x" * 60,
    "kv.usage",
    "é",
    'a"b\\c',
    "漢字",
    "key",
    "value",
    "intValue",
    "{}",
    " ",
    "unix",
    "",
]


def draw_value(rng, kind):
    """Return a value of a kind, extreme ones among them."""
    if kind == "intValue":
        edge = rng.choice([0, 1, 9, 10, 10**18, 10**18 - 1, 2**53 + 1, 2**62, 2**63 - 1])
        return rng.choice([rng.randrange(1000), rng.getrandbits(rng.randrange(1, 64)), edge, -edge, -(2**63)])
    if kind == "doubleValue":
        return rng.choice(
            [0.0, 0.5, rng.random(), 1 / 3, 1e-300, -1.5e300, 3.0, float(rng.randrange(99)), 5e-324]
        )
    if kind == "boolValue":
        return rng.random() < 0.5
    texts = [
        "",
        "DECODE",
        "WAITING",
        'a"b',
        "back\\slash",
        "tab\t",
        "é",
        "漢字😀",
        "\x7f",
        "]}",
        '"}]',
        "x" * 200,
        "cmpl-1-0",
    ]
    return rng.choice([*texts, f"r{rng.randrange(999)}"])


class Writer:
    """Writes JSON as one exporter might: its own spaces, order of keys, numbers as text or not, escapes or not."""

    def __init__(self, rng):
        self.space = rng.choice(["", "", " ", "\t", " \n "])
        self.value_first = rng.random() < 0.3
        self.is_ascii = rng.random() < 0.3
        self.ints = rng.choice([lambda x: f'"{x}"', str])
        self.drops = rng.random() < 0.1

    def text(self, value):
        return json.dumps(value, ensure_ascii=self.is_ascii)

    def object(self, pairs):
        s = self.space
        return "{" + s + f"{s},{s}".join(f"{self.text(key)}{s}:{s}{value}" for key, value in pairs) + s + "}"

    def array(self, items):
        return "[" + self.space + f"{self.space},{self.space}".join(items) + self.space + "]"

    def attribute(self, key, kind, value):
        written = self.ints(value) if kind == "intValue" else self.text(value)
        pairs = [("key", self.text(key)), ("value", self.object([(kind, written)]))]
        return self.object(pairs[::-1] if self.value_first else pairs)

    def event(self, name, time, attributes):
        """Write an event of (key, kind, value)."""
        pairs = [
            ("timeUnixNano", f'"{time}"'),
            ("name", self.text(name)),
            ("attributes", self.array([self.attribute(*each) for each in attributes])),
        ]
        if self.drops:
            pairs.append(("droppedAttributesCount", "1"))
        return self.object(pairs[::-1] if self.value_first else pairs)


def draw_layout(rng, keys):
    """Return which attributes the events of one line of code have: (key, kind, share of events that have it)."""
    some = rng.sample(keys, rng.randrange(len(keys) + 1))
    return [(key, rng.choice(KINDS), rng.choice([1, 1, 1, 0.5, 0.95])) for key in some]


def draw_events(rng, name, count, keys=KEYS):
    """Return events as JSON text, of a few layouts and a few writers."""
    layouts = [draw_layout(rng, keys) for _ in range(rng.randrange(1, 4))]
    writers = [Writer(rng) for _ in range(rng.choice([1, 1, 2]))]
    events = []
    for _ in range(count):
        layout = rng.choice(layouts)
        attributes = [
            (key, kind, draw_value(rng, kind)) for key, kind, share in layout if rng.random() < share
        ]
        events.append(rng.choice(writers).event(name, rng.randrange(1, 2**63), attributes))
    return events


def draw_record(rng, names=("e", "other"), keys=KEYS):
    """Return a record as JSON text; a few hundred events of a few spans."""
    spans = []
    for number in range(1, rng.randrange(2, 6)):
        events = [text for name in names for text in draw_events(rng, name, rng.choice([0, 3, 40, 90]), keys)]
        fields = {"traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": "scheduler_steps_1"}
        spans.append(json.dumps(fields)[:-1] + f', "events": [{",".join(events)}]}}')
    scope = '{"scope":{"name":"vllm.scheduler.step"},"spans":[' + ",".join(spans) + "]}"
    return ('{"resourceSpans":[{"scopeSpans":[' + scope + "]}]}").replace("\n", " ")


def expected_value(value, dtype):
    """Return what a column of a type holds of a value as it is on the wire."""
    ((kind, plain),) = value.items()
    if kind == "intValue":
        plain = int(plain)
    elif kind == "doubleValue":
        plain = float(plain)
    if dtype == pl.String():
        if kind == "stringValue":
            return plain
        return {"true": "true", "false": "false"}[json.dumps(plain)] if kind == "boolValue" else "any"
    if kind in ("boolValue", "stringValue"):
        return None if kind == "boolValue" or not is_number(plain) else "any"
    if dtype == pl.Float64():
        return float(plain)
    return int(plain) if -(2**63) <= plain < 2**63 else None


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def expected_events(text, names, types):
    """Return the events of a record by name, by way of `json.loads`: place of the span, time, values of the keys."""
    found = {name: [] for name in names}
    (scope_spans,) = json.loads(text)["resourceSpans"][0]["scopeSpans"]
    for number, span in enumerate(scope_spans["spans"]):
        for event in span["events"]:
            values = {each["key"]: each["value"] for each in event["attributes"]}
            row = {
                key: expected_value(values[key], dtype) if key in values else None
                for key, dtype in types.items()
            }
            found[event["name"]].append({"span": number, "unix_ns": int(event["timeUnixNano"]), **row})
    return found


def assert_equal(found, expected):
    """Compare rows; where "any" is expected, nothing is promised."""
    for name, rows in expected.items():
        got = found.get(name, [])
        assert len(got) == len(rows)
        for one, other in zip(got, rows, strict=True):
            open_ = [key for key, value in other.items() if isinstance(value, str) and value == "any"]
            assert {k: v for k, v in one.items() if k not in open_} == {
                k: v for k, v in other.items() if k not in open_
            }


@pytest.mark.slow
@whole_files
@given(seed=seeds, encoding=st.sampled_from(["lines", "framed protobuf"]))
def test_events_in_any_layout_are_read_as_json_loads_reads_them(otlp, seed, encoding):
    rng = random.Random(seed)
    text = draw_record(rng)
    types = {key: rng.choice(TYPES) for key in rng.sample(KEYS, 6)}
    found = otlp.read(data_of(otlp, text, encoding), events={"e": types, "other": types})
    assert found.rejects == []
    assert_equal(found.events, expected_events(text, ("e", "other"), types))


def record_of(spans):
    """Return a record as JSON text; a line is whole JSON."""
    return '{"resourceSpans":[{"scopeSpans":[{"spans":[' + spans + "]}]}]}"


def data_of(otlp, text, encoding):
    """Return the bytes of a file with one record; JSON as it was written."""
    return text.encode() if encoding == "lines" else otlp.SHAPES[encoding]([json.loads(text)])


STEPS = {
    "step_id": "step.id",
    "ts_start_ns": "step.ts_start_ns",
    "ts_end_ns": "step.ts_end_ns",
    "duration_us": "step.duration_us",
    "running_depth": "queue.running_depth",
    "waiting_depth": "queue.waiting_depth",
    "prefill_tokens": "batch.prefill_tokens",
    "kv_usage_ratio": "kv.usage_gpu_ratio",
    "kv_blocks_free": "kv.blocks_free_gpu",
}
"""Columns of `steps` and where they come from, as docs/reference has them."""


@whole_files
@given(seed=seeds, encoding=st.sampled_from(["lines", "framed protobuf"]))
def test_the_rows_of_steps_are_what_json_loads_finds(otlp, seed, encoding):
    """By way of the real tables: whole numbers in every column but the ratio, those without step or time apart."""
    rng = random.Random(seed)
    keys = [*STEPS.values(), "some.other", "é"]
    text = draw_record(rng, ("step.BATCH_SUMMARY",), keys)
    wanted = wanted_of(IngestOptions())
    found = otlp.decode(data_of(otlp, text, encoding), events=wanted.events, span_keys=wanted.span_keys)
    (batch,), rejects = found
    assert rejects == []
    rows = rows_of(batch, IngestOptions())
    types = {key: pl.Float64() if key == "kv.usage_gpu_ratio" else pl.Int64() for key in STEPS.values()}
    expected = expected_events(text, ("step.BATCH_SUMMARY",), types)["step.BATCH_SUMMARY"]
    expected = [
        {"row": e["span"], "unix_ns": e["unix_ns"], **{c: e[k] for c, k in STEPS.items()}} for e in expected
    ]
    complete = [e for e in expected if e["step_id"] is not None and e["ts_start_ns"] is not None]
    assert_equal({"steps": rows.steps.select("row", "unix_ns", *STEPS).to_dicts()}, {"steps": complete})
    lacking = [e["row"] for e in expected if e not in complete]
    assert rows.incomplete["row"].to_list() == lacking
    assert rows.rejects.height == 0
    counted = dict(rows.events.select("row", "count").iter_rows())
    assert counted == {row: sum(e["row"] == row for e in expected) for row in {e["row"] for e in expected}}


LITERALS = [
    "1", '"1"', "01", '"01"', "-", "+1", '"+1"', "1.5", '"1.5"', "1.0", '"1.0"', "1e2", '"1e2"', "1E2", '""',
    '" 1"', '"1 "', "1 ", '"1_0"', "0x1", "9223372036854775807", '"9223372036854775808"', "-9223372036854775808",
    '"-9223372036854775809"', "9999999999999999999", "99999999999999999999", "18446744073709551615", '"' + "9" * 300 + '"',
    "9" * 30, "0.1", ".5", "5.", "1e400", "-1e400", "1e-400", '"NaN"', "NaN", '"nan"', '"Infinity"', "Infinity", '"-Infinity"',
    '"inf"', "true", "false", '"true"', "tru", "truee", "null", '"null"', "{}", "[]", '"x"', '"é"', '"\\u00e9"', '"\\ud83d\\ude00"',
    '"\\ud800"', '"\\x"', '"a\\"b"', '"\\\\"', '"', '"a\tb"', '"a\x00b"', '"' + "x" * 5000 + '"', '"' + "9" * 40 + '"', "0." + "3" * 60,
]  # fmt: skip
"""What may stand where a value is expected, valid or not."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_value_is_read_in_a_crowd_as_it_is_alone(otlp, kind, dtype):
    """The crowd is read all at once, the single event by the parser: both accept the same, and as the same."""
    for usual in {
        "intValue": ["1", '"1"'],
        "doubleValue": ["1.5"],
        "boolValue": ["true"],
        "stringValue": ['"x"'],
    }[kind]:
        for literal in LITERALS:
            alone, crowd = (read_raw(otlp, kind, [usual] * times + [literal], dtype) for times in (2, 50))
            is_read = [f"{2:016x}" in found.ids for found in (alone, crowd)]
            assert is_read[0] == is_read[1], literal
            assert len(alone.rejects) == len(crowd.rejects) == (not is_read[0]), literal
            if is_read[0]:
                first, last = alone.events["e"][-1]["k"], crowd.events["e"][-1]["k"]
                assert first == last or repr(first) == repr(last) == "nan", literal


def read_raw(otlp, kind, literals, dtype):
    """Read one record of a span for each literal, as the value of its only event."""

    def record(number, literal):
        event = (
            f'{{"name":"e","timeUnixNano":"5","attributes":[{{"key":"k","value":{{"{kind}":{literal}}}}}]}}'
        )
        return record_of(f'{{"traceId":"{number:032x}","spanId":"{number:016x}","events":[{event}]}}')

    *usual, last = literals
    lines = [record(1, literal) for literal in usual] + [record(2, last)]
    return otlp.read("\n".join(lines).encode(), events={"e": {"k": dtype}})


def test_what_json_says_of_a_value_is_what_is_read(otlp):
    """Of those literals that are valid, by hand."""
    expected = {
        ("intValue", "-0"): 0, ("intValue", '"1e2"'): 100, ("intValue", "1.0"): 1, ("intValue", "9223372036854775807"): 2**63 - 1,
        ("intValue", "-9223372036854775808"): -(2**63), ("doubleValue", "1e-400"): 0.0, ("doubleValue", '"-Infinity"'): -math.inf,
        ("doubleValue", "0." + "3" * 60): 1 / 3, ("stringValue", '"\\u00e9"'): "é", ("stringValue", '"a\\"b"'): 'a"b',
        ("stringValue", '"\\ud83d\\ude00"'): "😀",
    }  # fmt: skip
    for (kind, literal), value in expected.items():
        for times in (1, 50):
            found = read_raw(
                otlp, kind, [literal] * times, {int: TYPES[0], float: TYPES[1], str: TYPES[2]}[type(value)]
            )
            assert [event["k"] for event in found.events["e"]] == [value] * times, literal


@whole_files
@given(seed=seeds, encoding=st.sampled_from(["lines", "framed protobuf"]))
def test_attributes_of_spans_in_any_layout_are_texts(otlp, seed, encoding):
    rng = random.Random(seed)
    layouts, writer = [draw_layout(rng, KEYS) for _ in range(2)], Writer(rng)
    drawn, spans = [], []
    for number in range(1, rng.choice([3, 80])):
        layout = rng.choice(layouts)
        attributes = [
            (key, kind, draw_value(rng, kind)) for key, kind, share in layout if rng.random() < share
        ]
        drawn.append({key: as_text(value) for key, _, value in attributes})
        ids = [("traceId", f'"{number:032x}"'), ("spanId", f'"{number:016x}"')]
        spans.append(
            writer.object(
                [*ids, ("attributes", writer.array([writer.attribute(*each) for each in attributes]))]
            )
        )
    text = record_of(",".join(spans)).replace("\n", " ")
    kept = rng.sample(KEYS, 8)
    found = otlp.read(data_of(otlp, text, encoding), kept=kept)
    assert found.rejects == []
    assert [span["attributes"] for span in found.spans] == [
        {key: value for key, value in each.items() if key in kept} for each in drawn
    ]


def as_text(value):
    """Return a string as it is and anything else as JSON has it, which is how Python writes numbers too."""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("encoding", ["lines", "framed protobuf"])
def test_doubles_of_spans_as_texts(otlp, times, encoding):
    texts = {
        0.7: "0.7",
        1.0: "1.0",
        1e16: "1e+16",
        1e-7: "1e-07",
        123456789.125: "123456789.125",
        "NaN": "NaN",
        "-Infinity": "-Infinity",
    }
    spans = [
        otlp.span(1 + n, attributes=[otlp.attribute("d", doubleValue=value)])
        for n, value in enumerate([*texts] * times)
    ]
    found = otlp.read(otlp.SHAPES[encoding]([otlp.record(*spans)]))
    assert [span["attributes"] for span in found.spans] == [{"d": text} for text in texts.values()] * times


@pytest.mark.slow
@whole_files
@given(seed=seeds)
def test_events_in_any_layout_are_read_whatever_the_size_of_a_block(otlp, seed):
    rng = random.Random(seed)
    text = "\n".join(draw_record(rng) for _ in range(3))
    types = dict.fromkeys(KEYS, pl.Int64())
    whole = otlp.read(text.encode(), events={"e": types})
    cut = otlp.read(text.encode(), events={"e": types}, block_bytes=rng.randrange(50, 20_000))
    assert cut.content == whole.content
    assert whole.rejects == cut.rejects == []
