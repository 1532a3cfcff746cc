"""Files to blocks: whole records in order, by range where the file is stored plain, and a reject for what is in
none."""

from __future__ import annotations

import gzip
import os
import pickle
import resource
from pathlib import Path

import pytest

from tracefit.errors import UsageError
from tracefit.inputs.blocks import Block, head_bytes, load, read_blocks
from tracefit.inputs.compression import Expansion
from tracefit.inputs.files import TraceFile
from tracefit.inputs.rejects import Reject
from tracefit.options import IngestOptions

MIB = 1 << 20


SMALL = IngestOptions(block_bytes=5000)


@pytest.mark.parametrize("shape", ["lines", "framed protobuf", "bare protobuf", "framed zstd of JSON"])
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_every_record_is_in_a_block_once_and_in_order(otlp, read, shape, compression):
    if "framed zstd" in shape and compression != "plain":
        pytest.skip("no exporter compresses twice")
    found = read(otlp.COMPRESSIONS[compression](otlp.SHAPES[shape](500)), SMALL)
    assert found.rejects == []
    assert found.payloads == (otlp.messages if "protobuf" in shape else otlp.texts)(500)
    assert found.encodings == {"protobuf" if "protobuf" in shape else "json"}
    is_range = compression == "plain" and "zstd" not in shape
    assert {block.payload is None for block in found.blocks} == {is_range}
    assert found.blocks[0].offset == 0
    for one, following in zip(found.blocks, found.blocks[1:], strict=False):
        assert one.offset + one.size == following.offset
        assert one.size <= 5000 + MIB


def test_offsets_count_in_the_decompressed_file(otlp, read):
    plain = otlp.SHAPES["framed protobuf"](3)
    expected = read(plain).offsets
    assert expected[0] == 4
    for compress in otlp.COMPRESSIONS.values():
        assert read(compress(plain)).offsets == expected


def test_blocks_can_be_sent_to_another_process(otlp, tmp_path):
    for name, pack in (("a", bytes), ("b", gzip.compress)):
        (tmp_path / name).write_bytes(pack(otlp.SHAPES["lines"](3)))
        (block,) = read_blocks(TraceFile.local(tmp_path / name))
        assert load(pickle.loads(pickle.dumps(block))) == otlp.SHAPES["lines"](3)  # noqa: S301


def test_a_document_is_one_block(otlp, read):
    for shape in ("pretty object", "pretty array"):
        found = read(otlp.SHAPES[shape](50))
        assert found.payloads == [otlp.SHAPES[shape](50)]


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file_holds_nothing(read, data):
    found = read(data)
    assert (found.payloads, found.rejects) == ([], [])


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    "data",
    [
        b"time,value\n" + b"1,2\n" * 5000,
        b'{"ts": 1, "event": "x"}\n' * 5000,
        b"\0" * 5000,
        b"x",
        b"\xff" * 9 * MIB,
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_no_trace_is_one_reject(read, data, pack):
    found = read(pack(data))
    (reject,) = found.rejects
    assert (reject.source_offset, reject.length, reject.reason) == (0, len(data), "not OTLP traces")
    assert found.blocks == []


def test_a_document_that_is_too_long_is_one_line_of_advice(otlp, read):
    data = otlp.SHAPES["pretty object"](3) + b" " * (3 * MIB)
    (reject,) = read(data, IngestOptions(max_document_mib=2)).rejects
    assert "`IngestOptions.max_document_mib`" in reject.reason
    assert (reject.source_offset, reject.length) == (0, len(data))


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("shape", ["lines", "framed protobuf", "bare protobuf"])
def test_a_record_that_is_too_long_is_one_reject(otlp, read, shape):
    make = otlp.text if shape == "lines" else otlp.message
    parts = [make(1), make(2, name="x" * 6 * MIB), make(3), make(4)]
    wrap = {
        "lines": lambda part: part + b"\n",
        "framed protobuf": lambda part: otlp.framed([part]),
        "bare protobuf": lambda part: part,
    }[shape]
    data = b"".join(map(wrap, parts))
    found = read(data, IngestOptions(max_document_mib=3))
    assert found.payloads == [parts[0], *parts[2:]]
    (reject,) = found.rejects
    assert "longer than 3 MiB: raise `IngestOptions.max_document_mib` to read it" in reject.reason
    assert (reject.source_offset, reject.length) == (len(wrap(parts[0])), len(wrap(parts[1])))
    assert len(read(data, IngestOptions(max_document_mib=8)).payloads) == 4


def test_gaps_are_rejects_where_they_are(otlp, read):
    lines = otlp.SHAPES["lines"](2)
    broken = gzip.compress(lines)[:-20] + b"\xff" * 9
    found = read(gzip.compress(lines) + broken + gzip.compress(b"\n" + lines))
    assert [payload for payload in found.payloads if payload in otlp.texts(2)] == [
        *otlp.texts(2),
        *otlp.texts(2),
    ]
    (gap,) = found.rejects
    assert gap.length == 0
    assert gap.source_offset >= len(lines)
    assert "gzip data is corrupt" in gap.reason


def test_plain_lines_before_compressed_ones_are_ranges(otlp, read):
    lines = otlp.SHAPES["lines"](2000)
    found = read(lines + gzip.compress(lines) + lines, SMALL, bounds=Expansion(chunk_bytes=1000))
    assert found.payloads == otlp.texts(2000) * 3
    assert found.rejects == []
    assert [block.payload is None for block in found.blocks].count(True) >= (len(lines) - head_bytes(SMALL)) // 5000 - 1


def test_reading_stops_after_many_rejects(otlp, read):
    junk = (gzip.compress(os.urandom(99))[:-9] + b"\xff" * 9 + gzip.compress(b"{}\n")) * 50
    found = read(junk, IngestOptions(max_rejects=10))
    assert len(found.rejects) <= 10 + 1 + 50
    assert (
        found.rejects[-1].reason
        == "more than 10 rejects: the rest of the file is not read (--max-rejects sets the limit)"
    )


def test_a_file_that_is_gone_or_shrunk_is_one_line(otlp, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(otlp.SHAPES["lines"](3))
    (block,) = read_blocks(TraceFile.local(path))
    path.unlink()
    with pytest.raises(UsageError, match="cannot be opened"):
        load(block)
    for wrong in (path, tmp_path):
        with pytest.raises(UsageError, match="cannot be opened"):
            TraceFile.local(wrong)


def test_a_block_is_read_from_another_working_folder(otlp, tmp_path, monkeypatch):
    (tmp_path / "a.json").write_bytes(otlp.SHAPES["lines"](3))
    monkeypatch.chdir(tmp_path)
    (block,) = read_blocks(TraceFile.local(Path("a.json")))
    monkeypatch.chdir("/")
    assert load(block) == otlp.SHAPES["lines"](3)
    assert block.source_file == "a.json"


@pytest.mark.parametrize("show_values", [False, True])
def test_values_are_shown_on_request_alone(read, show_values):
    found = read(b'{"secret": "SECRET"}\n' * 9, IngestOptions(show_values=show_values))
    assert ("SECRET" in found.rejects[0].excerpt) == show_values


HOSTILE = {
    "empty objects": b"{}\n",
    "one letter a line": b"x\n",
    "empty lines": b"\n",
    "tiny frames": b"\0\0\0\2\x0a\0",
    "tiny fields": b"\x0a\0",
    "lengths that lie": b"\0\0\0\1\x0a",
    "lengths beyond the end": b"\x0f\xff\xff\xff\x0a\x02\x0a\x00",
    "gzip headers": b"\x1f\x8b\x08\x00",
    "gzip members": gzip.compress(b"{}\n"),
    "bad framed zstd": b"\0\0\0\4\x28\xb5\x2f\xfd",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [pytest.param(u, id=n, marks=[pytest.mark.slow] if n != "bad framed zstd" else []) for n, u in HOSTILE.items()],
)
def test_hostile_files_end_in_bounded_memory(otlp, tmp_path, unit):
    good = {b"\0": otlp.framed([otlp.message()]), b"\x0a": otlp.message()}.get(unit[:1], otlp.text() + b"\n")
    (tmp_path / "a").write_bytes(good + unit * (10 * MIB // len(unit)) + good)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = otlp.read_file(TraceFile.local(tmp_path / "a")) if unit[:1] in b"\0\x0a\x1f" else None
    if found is None:
        assert all(isinstance(item, Block | Reject) for item in read_blocks(TraceFile.local(tmp_path / "a")))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
