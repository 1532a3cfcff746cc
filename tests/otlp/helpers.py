"""Trace records, every container they come in, and how to compare what is read from them."""

from __future__ import annotations

import base64
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from hypothesis import strategies as st

from containers import (  # noqa: F401 - tests have them of this module
    COMPRESSIONS,
    SHAPES,
    Record,
    framed,
    record,
    span,
    to_json,
    to_protobuf,
    zstd,
)
from tracefit.inputs.blocks import Block, load, read_blocks
from tracefit.inputs.files import TraceFile
from tracefit.inputs.rejects import Reject
from tracefit.options import IngestOptions
from tracefit.otlp.decode import DecodeLimits, SpanBatch, Wanted, decode_blocks
from tracefit.otlp.layouts import FEW_EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


each_reader = pytest.mark.parametrize("times", [1, 2 * FEW_EVENTS], ids=["one by one", "by column"])
"""Gives a case to both readers of attributes: few events go through the parser, many are read column by column."""


def event(name: str, attributes: list[Record], time: Any = "1700000000000000001") -> Record:
    return {"timeUnixNano": time, "name": name, "attributes": attributes}


def attribute(key: str, **value: Any) -> Record:
    return {"key": key, "value": value}


_USUAL, _USUAL_DECODE = IngestOptions(), DecodeLimits()
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_TYPES = {"e": {"k": pl.String(), "s": pl.String(), "n": pl.Int64(), "x": pl.Float64(), "b": pl.Boolean()}}


@dataclass(frozen=True)
class Found:
    """The content of a file, in plain Python.

    `spans` have the columns of the frame, `attributes` as a dict; `events` are by name, `span` in them is the place of
    their span; `counts` are (place of the span, name of the event) to how many there are.
    """

    spans: list[dict[str, Any]]
    events: dict[str, list[dict[str, Any]]]
    counts: dict[tuple[int, str], int]
    rejects: list[Reject]

    @property
    def ids(self) -> list[str]:
        """Ids of the spans, in order."""
        return [each["span_id"] for each in self.spans]

    @property
    def reject(self) -> Reject:
        """The only reject."""
        assert len(self.rejects) == 1, self.rejects
        return self.rejects[0]

    @property
    def span(self) -> dict[str, Any]:
        """The only span."""
        assert len(self.spans) == 1, self.rejects
        return self.spans[0]

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything about the spans but where they were found; NaN equals itself in it."""
        own = [{k: v for k, v in each.items() if k != "source_offset"} for each in self.spans]
        return repr(own), repr(self.events), self.counts


def wanted_of(records: list[Record], dtype: Any = None) -> dict[str, Any]:
    """Ask for every attribute of every span and event of some records; options of `read`."""
    spans = [s for r in records for rs in r["resourceSpans"] for ss in rs["scopeSpans"] for s in ss["spans"]]
    events: dict[str, dict[str, Any]] = {}
    for each in (e for s in spans for e in s.get("events", [])):
        keys = [attribute["key"] for attribute in each.get("attributes", [])]
        events.setdefault(each["name"], {}).update(dict.fromkeys(keys, dtype or pl.String()))
    return {"kept": {a["key"] for s in spans for a in s.get("attributes", [])}, "events": events}


def decode(
    data: bytes,
    *,
    kept: Iterable[str] = _LETTERS,
    span_keys: tuple[str, ...] = (),
    events: Mapping[str, Mapping[str, pl.DataType]] = _TYPES,
    options: IngestOptions = _USUAL,
    block_bytes: int | None = None,
    decode_limits: DecodeLimits = _USUAL_DECODE,
) -> tuple[list[SpanBatch], list[Reject]]:
    """Decode a file of these bytes, as an ingest does; return the batches, and what is in no block.

    Span attributes of one letter are kept, and of events named `e` the attributes k and s (texts), n (whole numbers), x
    (numbers) and b, unless something else is asked for. `block_bytes` makes blocks as small as that.
    """
    wanted = Wanted(span_keys, frozenset(kept), events)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "traces")
        path.write_bytes(data)
        options = replace(options, block_bytes=block_bytes or options.block_bytes)
        items = list(read_blocks(TraceFile.local(path), options))
        blocks = [(n, item, load(item)) for n, item in enumerate(items) if isinstance(item, Block)]
        return list(decode_blocks(blocks, wanted, options, decode_limits)), [
            item for item in items if isinstance(item, Reject)
        ]


def read(data: bytes, *, events: Mapping[str, Mapping[str, pl.DataType]] = _TYPES, **options: Any) -> Found:
    """Read a file of these bytes; the options are those of `decode`."""
    return _plain(*decode(data, events=events, **options), events)


def read_records(
    payloads: Sequence[bytes],
    encoding: str,
    *,
    kept: Iterable[str],
    events: Mapping[str, Mapping[str, pl.DataType]],
) -> Found:
    """Read records that were cut already."""
    blocks = [Block("f", "document", encoding, n, None, len(payload), payload) for n, payload in enumerate(payloads)]
    numbered = [(n, block, block.payload) for n, block in enumerate(blocks)]
    return _plain(list(decode_blocks(numbered, Wanted((), frozenset(kept), events), _USUAL)), [], events)


def _plain(batches: list[SpanBatch], rejects: list[Reject], wanted: Mapping[str, Mapping[str, pl.DataType]]) -> Found:
    found = Found([], {}, {}, rejects)
    for batch in batches:
        first = len(found.spans)
        assert batch.spans["span_row"].to_list() == list(range(batch.spans.height))
        for each in batch.spans.drop("span_row", "file").to_dicts():
            pairs = {pair["key"]: pair["value"] for pair in each["attributes"]}
            found.spans.append(each | {"attributes": pairs})
        for name, frame in batch.events.items():
            none = dict.fromkeys(wanted[name])  # of what no event has there may be no column
            rows = [none | {"span": first + each.pop("span_row"), **each} for each in frame.to_dicts()]
            found.events.setdefault(name, []).extend(rows)
        for row, name, count in batch.event_counts.iter_rows():
            found.counts[first + row, name] = count
        found.rejects.extend(Reject("", *row) for row in batch.rejects.drop("file").iter_rows())
    return found


def read_one(data: bytes, **options: Any) -> Found:
    """Read bytes that hold one span."""
    found = read(data, **options)
    assert len(found.spans) == 1, found.rejects
    return found


# Strategies. Text without surrogates: they have no UTF-8, hence no trace file can hold them.
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_keys = st.sampled_from(["step.id", "phase", "kv.usage", 'a"b\\c', "é", ""])


def _pair(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Record]:
    return st.builds(lambda key, value: {"key": key, "value": value}, _keys, values)


_int64 = st.integers(-(2**63), 2**63 - 1)
_nanos = st.integers(0, 2**63 - 1).map(str)
_doubles = st.floats().map(lambda x: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(x), x))
_scalars = st.one_of(
    st.builds(lambda x: {"intValue": str(x)}, _int64),
    st.builds(lambda x: {"doubleValue": x}, _doubles),
    st.builds(lambda x: {"boolValue": x}, st.booleans()),
    st.builds(lambda x: {"stringValue": x}, _text),
    st.builds(lambda x: {"bytesValue": base64.b64encode(x).decode()}, st.binary(max_size=5)),
    st.just({}),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(lambda x: {"arrayValue": {"values": x}}, st.lists(inner, max_size=3)),
        st.builds(lambda x: {"kvlistValue": {"values": x}}, st.lists(_pair(inner), max_size=3)),
    ),
    max_leaves=4,
)


_attributes = st.lists(_pair(_values), max_size=4)
_usual_events = st.builds(
    lambda step, ratio, phase: event(
        "step.BATCH_SUMMARY",
        [
            attribute("step.id", intValue=str(step)),
            attribute("kv.usage", doubleValue=ratio),
            attribute("phase", stringValue=phase),
            attribute("rich", boolValue=step % 2 == 0),
        ],
        str(1_700_000_000_000_000_000 + step % 1000),
    ),
    st.one_of(_int64, st.integers(0, 9)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["WAITING", "PREFILL", "", "ü"]),
)
_events = st.one_of(
    _usual_events,
    st.fixed_dictionaries(
        {"timeUnixNano": _nanos, "name": st.sampled_from(["a", "b", ""]), "attributes": _attributes},
        optional={"droppedAttributesCount": st.integers(0, 9)},
    ),
)
_spans = st.fixed_dictionaries(
    {
        "traceId": st.integers(1, 2**128 - 1).map(lambda x: f"{x:032x}"),
        "spanId": st.integers(1, 2**64 - 1).map(lambda x: f"{x:016x}"),
        "name": _text,
        "kind": st.integers(0, 5),
        "startTimeUnixNano": _nanos,
        "endTimeUnixNano": _nanos,
        "attributes": _attributes,
        "events": st.lists(_events, max_size=6),
    },
    optional={
        "parentSpanId": st.integers(0, 2**64 - 1).map(lambda x: f"{x:016x}"),
        "status": st.fixed_dictionaries({}, optional={"code": st.integers(0, 2), "message": _text}),
        "droppedEventsCount": st.integers(0, 2**32 - 1),
        "droppedAttributesCount": st.integers(0, 2**32 - 1),
        "traceState": _text,
        "flags": st.integers(0, 2**32 - 1),
    },
)
_resources = st.lists(
    st.builds(
        lambda key, value: attribute(key, stringValue=value),
        st.sampled_from(["service.name", "service.instance.id", "host.name", "host.id"]),
        _text,
    ),
    max_size=4,
)
records = st.lists(
    st.builds(
        lambda spans, scope, resource: record(*spans, scope=scope, resource=resource),
        st.lists(_spans, max_size=3),
        st.sampled_from(["vllm.api", ""]),
        _resources,
    ),
    min_size=1,
    max_size=4,
)
"""Files' worth of export requests."""
