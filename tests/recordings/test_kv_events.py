"""Files of KV-cache events to batches: lines and msgpack, whole, damaged and hostile."""

from __future__ import annotations

import gzip
import json
import struct

import msgspec
import numpy as np
import pytest

from tracefit.errors import UsageError
from tracefit.inputs.compression import Expansion
from tracefit.inputs.files import TraceFile
from tracefit.inputs.rejects import Reject
from tracefit.options import IngestOptions
from tracefit.recordings.kv_events import read_kv, read_recording

TS = 1_700_000_000.25
EVENTS = [
    [TS + k, [["BlockStored", [2**64 - 1 - k], None, list(range(300)), 16, None, "GPU"]], 0, k] for k in range(20)
]
PACKED = msgspec.msgpack.encode([TS, [["BlockRemoved", [1]]]])
LINE = b'[1700000000.5,[["BlockRemoved",[1]]]]\n'


def _lines(batches):
    return [json.dumps(batch).encode() + b"\n" for batch in batches]


def _messages(batches):
    return [msgspec.msgpack.encode(batch) for batch in batches]


def _framed(batches):
    return [len(m).to_bytes(4, "big") + m for m in _messages(batches)]


@pytest.fixture
def read(tmp_path):
    """Return the step of each batch of a file with these bytes, and the rejects."""

    def read_bytes(content, **limits):
        path = tmp_path / "kv_events.bin"
        path.write_bytes(content)
        items = list(read_recording(TraceFile.local(path), **limits))
        batches = [item for item in items if not isinstance(item, Reject)]
        return [item.batch.scheduler_step for item in batches], [i for i in items if isinstance(i, Reject)]

    return read_bytes


@pytest.fixture
def rows(tmp_path):
    """Return what `read_kv` makes of a file with these bytes."""

    def of(content, **options):
        path = tmp_path / "kv_events.bin"
        path.write_bytes(content)
        return read_kv([TraceFile.local(path)], IngestOptions(**options))

    return of


@pytest.mark.parametrize("write", [_lines, _messages, _framed])
@pytest.mark.parametrize("compressed", [False, True])
def test_every_batch_comes_back_from_every_shape(read, write, compressed):
    content = b"".join(write(EVENTS))
    assert read(gzip.compress(content) if compressed else content) == (list(range(20)), [])


@pytest.mark.parametrize(
    ("write", "chunk_bytes"),
    # A length and a message need five bytes to be recognised.
    [(_lines, 1), *((write, size) for write in (_lines, _messages, _framed) for size in (7, 1000))],
)
def test_records_over_the_edges_of_chunks_come_back(read, write, chunk_bytes):
    content = b"".join(write(EVENTS))
    assert read(content, bounds=Expansion(chunk_bytes=chunk_bytes)) == (list(range(20)), [])


@pytest.mark.parametrize("write", [_messages, _framed])
def test_damage_costs_the_message_it_is_in(read, write):
    parts = write(EVENTS)
    parts[5] = parts[5][: len(parts[5]) // 2]
    parts[9] = b"\xc1\xc1\xc1"
    steps, rejects = read(b"".join(parts))
    assert steps == [k for k in range(20) if k not in (5, 9)]
    cut, garbage = rejects
    assert abs(cut.source_offset - sum(map(len, parts[:5]))) <= 4, "the length before it may count or not"
    assert abs(cut.length - len(parts[5])) <= 4
    assert garbage.source_offset == sum(map(len, parts[:9]))
    assert 3 <= garbage.length <= 7


@pytest.mark.parametrize("write", [_lines, _messages, _framed])
def test_a_cut_tail_is_one_reject(read, write):
    steps, rejects = read(b"".join(write(EVENTS))[:-40])
    assert (steps, len(rejects)) == (list(range(19)), 1)


def test_a_block_hash_that_looks_like_a_message_costs_nothing(read):
    batch = [TS, [["BlockStored", [0x92CB41D000000000, 7], None, [], 16]], 0, 3]
    assert read(b"".join(_messages([*EVENTS, batch, *EVENTS])))[0] == [*range(20), 3, *range(20)]


def test_a_cut_line_with_others_glued_to_it_costs_itself_alone(read):
    lines = _lines(EVENTS)
    glued = lines[0][:100] + lines[1].strip() + lines[2][:100] + lines[3]
    steps, rejects = read(glued + lines[4])
    assert steps == [1, 3, 4]
    assert [(r.source_offset, r.length) for r in rejects] == [(0, 100), (100 + len(lines[1]) - 1, 100)]


def test_blank_lines_and_byte_order_marks_are_no_records(read):
    content = b"\xef\xbb\xbf\n\n" + b"\r\n\n".join(line.strip() for line in _lines(EVENTS)) + b"\n \n"
    assert read(content) == (list(range(20)), [])


def test_a_cut_gzip_stream_is_reported_and_read_until_there(read):
    steps, rejects = read(gzip.compress(b"".join(_lines(EVENTS)))[:-30])
    assert steps[:5] == list(range(5))
    assert "cut" in rejects[-1].reason


def test_other_bytes_are_one_reject_without_their_values(read):
    noise = bytes(np.random.default_rng(0).integers(0, 90, 100_000, dtype=np.uint8))
    steps, rejects = read(b"\x01" + noise)
    assert steps == []
    assert [(r.length, r.excerpt) for r in rejects] == [(100_001, "<binary, 100001 bytes>")]


def test_an_empty_file_holds_nothing(read):
    assert read(b"") == ([], [])


def test_a_missing_file_is_a_usage_error(tmp_path):
    path = tmp_path / "kv_events.jsonl"
    path.touch()
    file = TraceFile.local(path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot be opened"):
        read_kv([file], IngestOptions())


def test_a_message_may_claim_more_than_there_is(read):
    """An array of four billion values, nested ten thousand times."""
    bomb = b"\x94\xcb" + struct.pack(">d", 1.7e9) + b"\xdd\xff\xff\xff\xff" * 10_000
    steps, rejects = read(bomb + _messages(EVENTS[:1])[0])
    assert (steps, len(rejects)) == ([0], 1)


@pytest.mark.parametrize("write", [_lines, _messages])
def test_a_record_that_is_too_large_is_not_held(read, write):
    large = [TS, [["BlockStored", list(range(2**60, 2**60 + 300_000))]], 0, 99]
    parts = write([EVENTS[0], large, EVENTS[1]])
    steps, rejects = read(b"".join(parts), max_batch_bytes=100_000)
    assert steps == [0, 1]
    assert [r.reason for r in rejects] == ["record too large"]
    assert abs(rejects[0].length - len(parts[1])) <= 1


@pytest.mark.parametrize(
    "bad",
    [
        b"\x92\xcb\x41\xd0",
        b"\x9f\xcb\x41\xd0" + bytes(6),
        b"\x92\xcb\x41\xd0" + bytes(6) + b"\xc1",
        b"\x92\xcb\x41\xd0" + bytes(6) + b"\xdd\xff\xff\xff\xff",
        b"\x92\xcb\x41\xd0" + bytes(6) + b"\xc6\0\xff\xff\xff",
        PACKED[:-3],
    ],
)
def test_bad_messages_beyond_the_limit_are_one_reject(rows, bad):
    found = rows(PACKED + bad * 3000, max_rejects=20)
    assert found.rows.height == 1
    assert len(found.rejects) == 21
    assert (
        found.rejects[-1].reason
        == "more than 20 rejects: the rest of the file is not read (--max-rejects sets the limit)"
    )
    assert len(rows(PACKED + bad * 10 + PACKED, max_rejects=20).rejects) == 10


@pytest.mark.parametrize("line", [b"[]\n", b"x\n", b"[1700000000.5,[1]]\n", b"[1700000000,[1\n"])
def test_bad_lines_beyond_the_limit_are_one_reject(rows, line):
    found = rows(LINE + line * 5000 + LINE, max_rejects=20)
    assert (found.rows.height, len(found.rejects)) == (1, 21)
    few = rows(LINE + line * 5 + LINE, max_rejects=20)
    assert (few.rows.height, len(few.rejects)) == (2, 5)


def test_a_file_ends_at_its_last_listed_reject_as_other_files_do(rows):
    found = rows(LINE + b"[]\n" * 2 + LINE, max_rejects=2)
    assert found.rows.height == 1
    end = len(LINE) + len(b"[]\n[]")
    assert [reject.reason.partition(":")[0] for reject in found.rejects[2:]] == ["more than 2 rejects"]
    assert found.rejects[-1].source_offset == end


def test_reading_goes_on_with_the_next_file(tmp_path):
    for name, content in (("a", b"x\n" * 50 + LINE), ("b", LINE)):
        (tmp_path / name).write_bytes(content)
    found = read_kv([TraceFile.local(tmp_path / "a"), TraceFile.local(tmp_path / "b")], IngestOptions(max_rejects=5))
    assert found.rows["source_file"].to_list() == [str(tmp_path / "b")]
    assert len(found.rejects) == 6


def test_good_messages_between_bad_ones_are_kept(read):
    steps, rejects = read(b"".join(m + b"\xc1" for m in _messages(EVENTS)))
    assert (steps, len(rejects)) == (list(range(20)), 20)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("write", [_lines, _messages, _framed])
def test_no_damage_raises_and_what_is_apart_from_it_is_kept(read, write):
    """Property: of 20 batches one is changed at random; the others come back."""
    rng = np.random.default_rng(3)
    parts = write(EVENTS)
    for _ in range(100):
        changed = list(parts)
        k = int(rng.integers(20))
        part = bytearray(changed[k])
        low, high = sorted(int(x) for x in rng.integers(0, len(part), 2))
        if rng.random() < 0.5:
            part[low] ^= 1 << int(rng.integers(8))
        else:
            del part[low:high]
        changed[k] = bytes(part)
        steps, _ = read(b"".join(changed))
        # Of lines the next one may be glued to the damage, of messages behind a length this is part of the damage.
        assert set(steps) >= set(range(20)) - {k}
