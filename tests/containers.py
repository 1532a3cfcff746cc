"""Records of OTLP as JSON trees, and every container that files hold them in; independent of the readers."""

from __future__ import annotations

import base64
import copy
import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def to_json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def to_protobuf(tree: Record) -> bytes:
    """Return a record as a message; OTLP's JSON has ids in hex, protobuf's own in base64."""
    tree = copy.deepcopy(tree)
    for resource_spans in tree["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for each in scope_spans["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    each[key] = base64.b64encode(bytes.fromhex(each.get(key, ""))).decode()
    return json_format.ParseDict(tree, TracesData()).SerializeToString()


def framed(payloads: Iterable[bytes]) -> bytes:
    """Return payloads, each after its length in four bytes."""
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
