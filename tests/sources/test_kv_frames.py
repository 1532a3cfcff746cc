"""Files of KV-cache events to batches: lines and msgpack, whole and damaged."""

from __future__ import annotations

import gzip
import json
import struct

import msgspec
import numpy as np
import pytest

from tracefit.errors import UsageError
from tracefit.sources.files import TraceFile
from tracefit.sources.kv_frames import read_kv_frames
from tracefit.sources.msgpack import INVALID, MORE, message_size
from tracefit.sources.records import Frame, Reject

BATCHES = [
    [1_700_000_000.25 + k, [["BlockStored", [2**64 - 1 - k], None, list(range(300)), 16, None, "GPU"]], 0, k]
    for k in range(20)
]


def _lines(batches):
    return [json.dumps(batch).encode() for batch in batches]


def _messages(batches):
    return [msgspec.msgpack.encode(batch) for batch in batches]


def _framed(batches):
    return [len(m).to_bytes(4, "big") + m for m in _messages(batches)]


def _read(tmp_path, content, name="kv_events.bin"):
    path = tmp_path / name
    path.write_bytes(content)
    items = list(read_kv_frames(TraceFile.local(path)))
    return [i for i in items if isinstance(i, Frame)], [i for i in items if isinstance(i, Reject)]


def _decoded(frames):
    decoders = {"json": msgspec.json.decode, "msgpack": msgspec.msgpack.decode}
    return [decoders[f.encoding](f.payload) for f in frames]


@pytest.mark.parametrize("write", [_lines, _messages, _framed])
@pytest.mark.parametrize("compressed", [False, True])
def test_every_batch_comes_back_from_every_shape(tmp_path, write, compressed):
    content = (b"\n" if write is _lines else b"").join(write(BATCHES))
    frames, rejects = _read(tmp_path, gzip.compress(content) if compressed else content)
    assert _decoded(frames) == BATCHES
    assert rejects == []


@pytest.mark.parametrize("write", [_messages, _framed])
def test_damage_costs_the_batch_it_is_in(tmp_path, write):
    parts = write(BATCHES)
    parts[5] = parts[5][: len(parts[5]) // 2]
    parts[9] = b"\xc1\xc1\xc1"
    frames, rejects = _read(tmp_path, b"".join(parts))
    assert _decoded(frames) == [b for k, b in enumerate(BATCHES) if k not in (5, 9)]
    assert sum(r.length for r in rejects) == len(parts[5]) + 3
    assert [r.source_offset for r in rejects] == [
        sum(len(p) for p in parts[:5]),
        sum(len(p) for p in parts[:9]),
    ]


@pytest.mark.parametrize("write", [_messages, _framed])
def test_a_cut_tail_is_one_reject(tmp_path, write):
    content = b"".join(write(BATCHES))[:-40]
    frames, rejects = _read(tmp_path, content)
    assert _decoded(frames) == BATCHES[:-1]
    assert len(rejects) == 1


def test_a_cut_gzip_stream_is_told(tmp_path):
    frames, rejects = _read(tmp_path, gzip.compress(b"\n".join(_lines(BATCHES)))[:-30])
    assert _decoded(frames)[:5] == BATCHES[:5]
    assert rejects[-1].reason == "gzip data is cut"


def test_other_bytes_are_one_reject_without_their_values(tmp_path):
    noise = bytes(np.random.default_rng(0).integers(0, 90, 100_000, dtype=np.uint8))
    frames, rejects = _read(tmp_path, b"\x01" + noise)
    assert frames == []
    assert [(r.length, r.excerpt) for r in rejects] == [(100_001, "<binary, 100001 bytes>")]


def test_an_empty_file_holds_nothing(tmp_path):
    assert _read(tmp_path, b"") == ([], [])


def test_a_missing_file_is_a_usage_error(tmp_path):
    path = tmp_path / "kv_events.jsonl"
    path.touch()
    file = TraceFile.local(path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot be opened"):
        list(read_kv_frames(file))


VALUES = [
    None,
    True,
    -1,
    127,
    -32,
    2**64 - 1,
    -(2**63),
    1.5,
    "",
    "x" * 31,
    "x" * 300,
    "x" * 70_000,
    b"y" * 300,
    [],
    [1] * 20,
    list(range(70_000)),
    {"a": {"b": [1, 2]}},
    {str(k): k for k in range(20)},
    msgspec.msgpack.Ext(5, b"12345678"),
    msgspec.msgpack.Ext(5, b"123456789"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_a_message_ends_where_its_encoder_ended_it(value):
    message = msgspec.msgpack.encode(value)
    assert message_size(message + b"\xc0\xc0", len(message) + 2) == len(message)
    assert {message_size(message, stop) for stop in range(min(len(message), 200))} == {MORE}


def test_a_byte_that_msgpack_never_uses_is_none():
    assert message_size(b"\x91\xc1", 2) == INVALID


def test_a_message_may_claim_more_than_there_is(tmp_path):
    """An array of four billion values, nested ten thousand times: told by its bytes, not by building it."""
    bomb = b"\x94\xcb" + struct.pack(">d", 1.7e9) + b"\xdd\xff\xff\xff\xff" * 10_000
    frames, rejects = _read(tmp_path, bomb)
    assert (frames, len(rejects)) == ([], 1)
