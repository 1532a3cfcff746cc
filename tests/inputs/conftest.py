from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tracefit.inputs.blocks import Block, ReadLimits, load, read_blocks
from tracefit.inputs.files import TraceFile
from tracefit.inputs.framing import records
from tracefit.inputs.rejects import Reject

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def message(number=1, name="llm_core", **fields):
    """Return a protobuf message with one span."""
    data = TracesData()
    span = data.resource_spans.add().scope_spans.add().spans.add(name=name, **fields)
    span.trace_id, span.span_id = number.to_bytes(16, "big"), number.to_bytes(8, "big")
    return data.SerializeToString()


def text(number=1, name="llm_core", **fields):
    """Return a JSON record with one span."""
    span = {"traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": name, **fields}
    tree = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def framed(payloads):
    return b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)


def in_pieces(data, compress):
    """Compress data as three members or frames, cut anywhere."""
    third = len(data) // 3
    return b"".join(compress(piece) for piece in (data[:third], data[third : 2 * third], data[2 * third :]))


def pretty(count):
    tree = {"resourceSpans": [json.loads(text(n + 1))["resourceSpans"][0] for n in range(count)]}
    return json.dumps(tree, indent=2).encode()


def numbered(make):
    return lambda count: [make(number + 1) for number in range(count)]


texts, messages = numbered(text), numbered(message)

SHAPES = {
    "lines": lambda count: b"".join(each + b"\n" for each in texts(count)),
    "lines with BOM, CRLF and blanks": lambda count: b"\xef\xbb\xbf\r\n" + b"\r\n\r\n".join(texts(count)),
    "pretty object": pretty,
    "pretty array": lambda count: json.dumps(list(map(json.loads, texts(count))), indent=1).encode(),
    "Tempo batches": lambda count: b"\n".join(
        t.replace(b"resourceSpans", b"batches", 1) for t in texts(count)
    ),
    "bare protobuf": lambda count: b"".join(messages(count)),
    "framed protobuf": lambda count: framed(messages(count)),
    "framed zstd of JSON": lambda count: framed([zstd.compress(each) for each in texts(count)]),
    "framed zstd of protobuf": lambda count: framed([zstd.compress(each) for each in messages(count)]),
}
COMPRESSIONS = {
    "plain": lambda data: data,
    "gzip": lambda data: in_pieces(data, gzip.compress),
    "zstd": lambda data: in_pieces(data, zstd.compress),
}


@dataclass
class Read:
    """What was read of a file: payloads by offset, and what was not."""

    payloads: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    encodings: set[str] = field(default_factory=set)
    rejects: list[Reject] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


def read_file(file, limits=None, **options):
    found = Read()
    for block in read_blocks(file, limits or ReadLimits(), **options):
        if isinstance(block, Reject):
            found.rejects.append(block)
            continue
        found.blocks.append(block)
        content = load(block)
        assert len(content) == block.size
        for item in records(content, block.shape):
            if item.fault:
                offset, size = block.offset + item.offset, len(item.payload)
                found.rejects.append(Reject(block.source_file, offset, size, item.fault))
            else:
                found.payloads.append(item.payload)
                found.offsets.append(block.offset + item.offset)
                found.encodings.add(block.encoding)
    return found


@pytest.fixture(scope="session")
def otlp():
    """Return records and the containers they come in."""
    return SimpleNamespace(
        message=message,
        text=text,
        messages=messages,
        texts=texts,
        framed=framed,
        zstd=zstd.compress,
        gzip=gzip.compress,
        SHAPES=SHAPES,
        COMPRESSIONS=COMPRESSIONS,
        read_file=read_file,
    )


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the bytes of a file."""

    def read_bytes(data, limits=None, **options):
        path = tmp_path / "data"
        path.write_bytes(data)
        return read_file(TraceFile.local(path, name="-"), limits, **options)

    return read_bytes
