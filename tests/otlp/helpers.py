"""Trace records, every container they come in, and how to compare what is read from them."""

from __future__ import annotations

import base64
import copy
import gzip
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from google.protobuf import json_format
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from polars.testing import assert_frame_equal

from tracefit.otlp import SpanBatch, decode_frames
from tracefit.sources import Frame, Reject, read_frames

if TYPE_CHECKING:
    from collections.abc import Callable

Record = dict[str, Any]


def span(number: int = 1, **fields: Any) -> Record:
    """Return a span in its usual JSON form; `fields` replace or add to it."""
    usual = {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "name": "llm_core",
        "kind": 1,
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000000000000009",
    }
    return {key: value for key, value in (usual | fields).items() if value is not ...}


def record(*spans: Record, scope: str = "vllm.scheduler", resource: list[Record] | None = None) -> Record:
    """Return one export request with the given spans."""
    scope_spans = {"scope": {"name": scope}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": resource or []}, "scopeSpans": [scope_spans]}]}


def event(name: str, attributes: list[Record], time: Any = "1700000000000000001") -> Record:
    return {"timeUnixNano": time, "name": name, "attributes": attributes}


def attribute(key: str, **value: Any) -> Record:
    return {"key": key, "value": value}


def to_json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def to_protobuf(tree: Record) -> bytes:
    tree = copy.deepcopy(tree)
    for resource_spans in tree["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for each in scope_spans["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    each[key] = base64.b64encode(bytes.fromhex(each.get(key, ""))).decode()
    return json_format.ParseDict(tree, TracesData()).SerializeToString()


def framed(payloads: list[bytes]) -> bytes:
    return b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def in_pieces(data: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Compress the data as three members or frames, cut anywhere."""
    third = len(data) // 3
    return b"".join(compress(piece) for piece in (data[:third], data[third : 2 * third], data[2 * third :]))


def _lines(records: list[Record]) -> bytes:
    return b"".join(to_json(each) + b"\n" for each in records)


def _pretty(records: list[Record]) -> bytes:
    merged = {"resourceSpans": [item for each in records for item in each["resourceSpans"]]}
    return json.dumps(merged, indent=2, ensure_ascii=False).encode()


SHAPES: dict[str, Callable[[list[Record]], bytes]] = {
    "lines": _lines,
    "lines with BOM, CRLF and blanks": lambda records: (
        b"\xef\xbb\xbf\r\n" + b"\r\n\r\n".join(to_json(each) for each in records)
    ),
    "pretty object": _pretty,
    "array": to_json,
    "pretty array": lambda records: json.dumps(records, indent=1, ensure_ascii=False).encode(),
    "pretty objects in a row": lambda records: b"\n".join(
        json.dumps(each, indent="\t", ensure_ascii=False).encode() for each in records
    ),
    "Tempo trace": lambda records: _lines([{"trace": each} for each in records]),
    "Tempo batches": lambda records: _lines([{"batches": each["resourceSpans"]} for each in records]),
    "bare protobuf": lambda records: b"".join(map(to_protobuf, records)),
    "framed protobuf": lambda records: framed([to_protobuf(each) for each in records]),
    "framed zstd of JSON": lambda records: framed([zstd(to_json(each)) for each in records]),
    "framed zstd of protobuf": lambda records: framed([zstd(to_protobuf(each)) for each in records]),
}
"""Records to the bytes of a file, by the name of its shape."""

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": lambda data: in_pieces(data, gzip.compress),
    "zstd": lambda data: in_pieces(data, zstd),
}


def frames_of(data: bytes) -> list[Frame | Reject]:
    """Read a file's bytes as frames and rejects."""
    return list(read_frames("-", stdin=io.BytesIO(data)))


def batch_of(data: bytes) -> SpanBatch:
    """Read a file's bytes as one batch."""
    batches = list(decode_frames(frames_of(data), batch_bytes=1 << 60))
    if not batches:
        empty = pl.DataFrame()
        return SpanBatch(empty, empty, {})
    if len(batches) > 1:
        raise AssertionError("the bytes made more than one batch")
    return batches[0]


def span_ids(batch: SpanBatch) -> list[str]:
    """Return the ids of the spans of a batch, in order."""
    return batch.spans["span_id"].to_list() if batch.spans.width else []


def assert_same(left: SpanBatch, right: SpanBatch) -> None:
    """Compare all that two batches say about their spans, except where these were found."""
    source = ["source_file", "source_offset"]
    assert_frame_equal(left.spans.drop(source), right.spans.drop(source))
    assert_frame_equal(left.attributes, right.attributes)
    assert list(left.events) == list(right.events)
    for name, frame in left.events.items():
        assert_frame_equal(frame, right.events[name], check_exact=True)


@dataclass(frozen=True)
class One:
    """The only span and event of a batch."""

    span: dict[str, Any]
    attributes: dict[str, str | None]
    events: dict[str, list[dict[str, Any]]]
    rejects: tuple[Reject, ...]


def read_one(data: bytes) -> One:
    """Read bytes that hold one span."""
    batch = batch_of(data)
    assert len(batch.spans) == 1, batch.rejects
    pairs = dict(zip(batch.attributes["key"], batch.attributes["value"], strict=True))
    events = {name: frame.to_dicts() for name, frame in batch.events.items()}
    return One(batch.spans.to_dicts()[0], pairs, events, batch.rejects)


def only_reject(batch: SpanBatch) -> Reject:
    """Return the one reject of a batch."""
    assert len(batch.rejects) == 1, batch.rejects
    return batch.rejects[0]


# Strategies. Text without surrogates: they have no UTF-8, hence no trace file can hold them.
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_keys = st.sampled_from(["step.id", "phase", "kv.usage", 'a"b\\c', "é", "span_row", "event_index", ""])


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
