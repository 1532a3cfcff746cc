from __future__ import annotations

import gzip
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from containers import COMPRESSIONS, SHAPES, framed, to_json, to_protobuf
from tracefit.inputs.blocks import Block, load, read_blocks
from tracefit.inputs.files import TraceFile
from tracefit.inputs.framing import records
from tracefit.inputs.rejects import Reject
from tracefit.options import IngestOptions

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def tree(number=1, name="llm_core", **fields):
    """Return a record of one span that has only its ids, its name and the given fields."""
    span = {"traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": name, **fields}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def text(number=1, **fields):
    return to_json(tree(number, **fields))


def message(number=1, **fields):
    return to_protobuf(tree(number, **fields))


def numbered(make):
    return lambda count: [make(number + 1) for number in range(count)]


def of_count(shape):
    return lambda count: shape(numbered(tree)(count))


@dataclass
class Read:
    """Payloads of a file by offset, and its rejects."""

    payloads: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    encodings: set[str] = field(default_factory=set)
    rejects: list[Reject] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


def read_file(file, limits=None, **options):
    found = Read()
    for block in read_blocks(file, limits or IngestOptions(), **options):
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
        messages=numbered(message),
        texts=numbered(text),
        framed=framed,
        zstd=zstd.compress,
        gzip=gzip.compress,
        SHAPES={name: of_count(shape) for name, shape in SHAPES.items()},
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
