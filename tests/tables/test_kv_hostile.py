"""Hostile files of KV-cache events: what is done per item is counted, and memory does not grow with what is bad."""

from __future__ import annotations

import struct
import time

import msgspec
import pytest

from tracefit.sources import Reject, TraceFile, kv_frames, msgpack, short_lines
from tracefit.sources.kv_frames import read_kv_frames
from tracefit.sources.records import Frame
from tracefit.tables import kv_batches
from tracefit.tables.kv_batches import decode_kv

TS = 1_700_000_000.5
GOOD = b'[1700000000.5,[["BlockRemoved",[1]]]]'
PACKED = msgspec.msgpack.encode([TS, [["BlockRemoved", [1]]]])


@pytest.fixture
def read(tmp_path):
    """Return what is in a file of these bytes."""

    def read_bytes(data):
        path = tmp_path / "kv_events.bin"
        path.write_bytes(data)
        return list(read_kv_frames(TraceFile.local(path)))

    return read_bytes


def test_bad_events_too_short_for_one_are_counted_and_not_read(monkeypatch, calls):
    monkeypatch.setattr("tracefit.otlp.rejects.MAX_REJECTS", 10)
    tried = calls(kv_batches, "_decoded")
    events = b",".join(
        [b"1"] * 11 + [b'["BlockRemoved",[1]]'] + [b"[]"] * 5000 + [b'["a long name of nothing"]']
    )
    found = decode_kv(
        [Frame("f", 7, b"[1700000000.5,[%b]]" % events, "json"), Frame("f", 99999, GOOD, "json")]
    )
    assert found.rows.height == 2
    assert len(found.rejects) == 11
    rest = found.rejects[-1]
    assert rest.reason == f"{11 + 5000 + 1 - 10} more bad events"
    assert (rest.source_offset, rest.length) == (7, 17 + len(events) + 2 - 2)
    # Those of the batch in which the bound is reached are tried, the others only counted.
    again = len(tried)
    bad = Frame("f", 0, b"[1700000000.5,[1]]", "json")
    found = decode_kv([*[bad] * 12, Frame("f", 0, b"[1700000000.5,[%b]]" % events, "json")])
    assert len(tried) - again < 60
    assert found.rejects[-1].reason == f"{12 + 11 + 5000 + 1 - 10} more bad events"


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [
        (b"[]", True),
        (b"x", True),
        (b"[1700000000.5,[1]]", True),
        (b"[1700000000.5,[]]", False),
        (b"[9,[],0,null]", False),
    ],
)
def test_short_lines_are_counted(read, monkeypatch, line, is_bad):
    monkeypatch.setattr(short_lines, "MAX_SHORT_LINES", 1000)
    items = read((GOOD + b"\n") * 2 + (line + b"\n") * 5000 + GOOD)
    rejects = [item for item in items if isinstance(item, Reject)]
    assert [item.payload for item in items if item not in rejects].count(GOOD) == 3
    assert len(items) == 3 + (1001 if is_bad else 0)
    assert [r.reason for r in rejects] == (
        ["4000 more short lines without KV-cache events"] if is_bad else []
    )


def test_the_size_of_a_message_is_told_without_a_walk(monkeypatch):
    def fail(*_):
        raise AssertionError("walked")

    walked = msgpack.walked_size
    monkeypatch.setattr(msgpack, "walked_size", fail)
    values = [
        PACKED,
        msgspec.msgpack.encode({"a": [1, 2.5, None, b"x" * 1000, "y" * 100_000]}),
        b"\x01",
        b"\xc0",
    ]
    for value in values:
        for behind in (b"", b"\0", PACKED, b"\xc1"):
            text = value + behind
            assert msgpack.message_size(text, len(text)) == walked(text, len(text)) == len(value)
        for cut in {0, 1, len(value) // 2, len(value) - 1} - {len(value)}:
            assert msgpack.message_size(value, cut) == walked(value, cut) == msgpack.MORE
    monkeypatch.setattr(msgpack, "walked_size", walked)
    assert msgpack.message_size(b"\xc1", 1) == msgpack.INVALID
    assert msgpack.message_size(b"\x91" * 100_000, 100_000) == msgpack.INVALID


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
def test_beginnings_without_an_end_take_time_in_proportion_and_are_few_rejects(read, monkeypatch, bad):
    monkeypatch.setattr(kv_frames, "MAX_LISTED", 20)
    monkeypatch.setattr(kv_frames, "MAX_GUESSES", 100)
    monkeypatch.setattr(kv_frames, "_MAX_LOOKED_BYTES", 1 << 20)
    seconds = []
    for many in (3_000, 24_000):
        begin = time.process_time()
        items = read(PACKED + bad * many)
        seconds.append(time.process_time() - begin)
        assert items[0].payload == PACKED
        rejects = [item for item in items if isinstance(item, Reject)]
        assert len(rejects) <= 21
        assert rejects[-1].source_offset + rejects[-1].length == len(PACKED) + many * len(bad)
        covered = sum(reject.length for reject in rejects)
        assert covered <= many * len(bad)
    assert seconds[1] < 30 * max(seconds[0], 0.05)  # eight times as much; the square of it is 64


def test_good_messages_between_many_bad_ones_are_kept(read, monkeypatch):
    monkeypatch.setattr(kv_frames, "MAX_LISTED", 20)
    monkeypatch.setattr(kv_frames, "MAX_GUESSES", 100)
    items = read((PACKED + b"\xc1") * 5000)
    frames = [item for item in items if not isinstance(item, Reject)]
    assert len(frames) == 5000
    assert items[-1].reason == "4980 more stretches that are no batches"
    assert items[-1].source_offset == 21 * (len(PACKED) + 1) - 1


def batch(*events, rank=0):
    payload = msgspec.json.encode([TS + 1, list(events), rank])
    return Frame("f", 0, payload, "json")


def test_clearing_a_cache_again_and_again_takes_no_time(monkeypatch):
    sweeps = []
    items = kv_batches.OrderedDict.items

    class Counted(kv_batches.OrderedDict):
        def items(self):
            sweeps.append(len(self))
            return items(self)

    monkeypatch.setattr(kv_batches, "OrderedDict", Counted)
    stored = Frame("f", 0, msgspec.json.encode([TS, [["BlockStored", list(range(1000))]], 0]), "json")
    other = Frame("f", 0, msgspec.json.encode([TS, [["BlockStored", [7]]], 1]), "json")
    clears = batch(*[["AllBlocksCleared"]] * 1000, rank=1)
    found = decode_kv(
        [stored, other, clears, batch(["BlockRemoved", [7]]), batch(["BlockRemoved", [7]], rank=1)]
    )
    assert found.rows["lifetime_us"].to_list()[-2:] == [1e6, None]
    assert sum(sweeps) < 5000


def test_a_block_that_is_stored_again_behind_a_clearing_is_as_old_as_that(monkeypatch):
    def at(second, *events):
        return Frame("f", 0, msgspec.json.encode([TS + second, list(events), 0]), "json")

    found = decode_kv(
        [
            # So much in another cache that what is gone is not taken out at once.
            Frame("f", 0, msgspec.json.encode([TS, [["BlockStored", list(range(100))]], 1]), "json"),
            at(0, ["BlockStored", [1, 2, 3, 4]]),
            at(1, ["AllBlocksCleared"], ["BlockStored", [2, 3]]),
            at(2, ["BlockStored", [2, 5]], ["BlockRemoved", [1]]),
            at(4, ["BlockRemoved", [2]], ["BlockRemoved", [2]], ["BlockRemoved", [5]], ["BlockRemoved", [1]]),
        ]
    )
    assert found.rows["lifetime_us"].to_list()[5:] == [None, 3e6, None, 2e6, None]
    monkeypatch.setattr(kv_batches, "_MAX_TRACKED_BLOCKS", 2)
    found = decode_kv([at(0, ["BlockStored", [1, 2, 3]]), at(1, *[["BlockRemoved", [n]] for n in (1, 2, 3)])])
    assert found.rows["lifetime_us"].to_list()[1:] == [None, 1e6, 1e6]


def test_a_length_that_announces_much_is_not_believed_again_and_again(read, monkeypatch):
    looked = []
    size = kv_frames.message_size

    def counted(buffer, stop):
        looked.append(stop)
        return size(buffer, stop)

    monkeypatch.setattr(kv_frames, "message_size", counted)
    monkeypatch.setattr(kv_frames, "_MAX_LOOKED_BYTES", 1 << 20)
    bad = b"\xc1" * 3 + struct.pack(">I", 100_000) + PACKED + b"\xc1"
    items = read(bad * 5000)
    assert sum(isinstance(item, Frame) for item in items) == 5000
    assert sum(stop == 100_000 for stop in looked) < 20
