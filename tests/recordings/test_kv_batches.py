"""Batches of KV-cache events to rows: every kind of event, every length of it, and no token id anywhere."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest

from tracefit.inputs.files import TraceFile
from tracefit.options import IngestOptions
from tracefit.recordings.kv_batches import MAX_LOOSE_BYTES, BlockAges, hash_number
from tracefit.recordings.kv_events import read_kv

TS = 1_700_000_000.5

WHOLE = {
    "BlockStored": [[11, 12], 10, [901, 902], 16, None, "GPU", None],
    "BlockRemoved": [[11], "GPU"],
    "AllBlocksCleared": [],
    "TransferInitiated": [(3 << 32) | 7, "r-1", "GPU", "CPU", 4, 42],
    "TransferCompleted": [(3 << 32) | 7, "r-1", "GPU", "CPU", 4, True, 42],
    "RemoteTransferInitiated": [9, "r-2", "NIXL", 0, 3, 20],
    "RemoteTransferCompleted": [9, "r-2", "NIXL", 0, 3, 20, False],
    "CacheLoadCommitted": ["r-3", "CPU", 15, 100],
    "CacheStoreCommitted": ["r-4", "DISK", 8, 101],
    "CacheEviction": ["CPU", 5, "lru", 102, [13, 14]],
}
NEEDED = {"BlockStored": 1, "BlockRemoved": 1, "CacheLoadCommitted": 1, "CacheStoreCommitted": 1}
NEEDED |= dict.fromkeys((k for k in WHOLE if "Transfer" in k), 1)

_MOVED = {
    "transfer_id": "12884901895",
    "request_id": "r-1",
    "source_medium": "GPU",
    "dest_medium": "CPU",
    "block_count": 4,
    "event_step": 42,
}
_SENT = {
    "transfer_id": "9",
    "request_id": "r-2",
    "medium": "NIXL",
    "source_rank": 0,
    "dest_rank": 3,
    "block_count": 20,
}
EXPECTED = {
    "BlockStored": {"medium": "GPU", "block_count": 2, "block_size": 16},
    "BlockRemoved": {"medium": "GPU", "block_count": 1},
    "AllBlocksCleared": {},
    "TransferInitiated": _MOVED,
    "TransferCompleted": {**_MOVED, "success": True},
    "RemoteTransferInitiated": _SENT,
    "RemoteTransferCompleted": {**_SENT, "success": False},
    "CacheLoadCommitted": {"request_id": "r-3", "medium": "CPU", "block_count": 15, "event_step": 100},
    "CacheStoreCommitted": {"request_id": "r-4", "medium": "DISK", "block_count": 8, "event_step": 101},
    "CacheEviction": {"medium": "CPU", "block_count": 5, "eviction_reason": "lru", "event_step": 102},
}
ENCODE = {"json": lambda v: msgspec.json.encode(v) + b"\n", "msgpack": msgspec.msgpack.encode}
ALWAYS = {"event", "unix_ns", "data_parallel_rank", "batch_step", "source_file", "source_offset"}
CLEARED = ["AllBlocksCleared"]


@pytest.fixture
def read(tmp_path):
    """Return what is in a file of these bytes."""

    def of(content):
        path = tmp_path / "kv_events.jsonl"
        path.write_bytes(content)
        return read_kv([TraceFile.local(path)], IngestOptions())

    return of


@pytest.fixture
def read_events(read):
    """Return what is in a batch of these events."""

    def of(events, *, encoding="json", ts=TS):
        return read(ENCODE[encoding]([ts, events, 1, 50]))

    return of


@pytest.fixture
def lifetimes(read):
    """Return the lifetimes in batches at these seconds of these ranks."""

    def of(*batches):
        lines = [ENCODE["json"]([TS + at, events, rank]) for at, rank, *events in batches]
        return read(b"".join(lines)).rows["lifetime_us"].to_list()

    return of


def _facts(row):
    return {k: v for k, v in row.items() if v is not None and k not in ALWAYS}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("kind", WHOLE)
def test_every_kind_of_event_has_its_fields(read_events, kind, encoding):
    found = read_events([[kind, *WHOLE[kind]]], encoding=encoding)
    row = found.rows.row(0, named=True)
    assert (found.rejects, found.rows.height) == ([], 1)
    assert (row["event"], row["unix_ns"]) == (kind, 1_700_000_000_500_000_000)
    assert (row["data_parallel_rank"], row["batch_step"]) == (1, 50)
    assert _facts(row) == EXPECTED[kind]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("kind", WHOLE)
def test_trailing_fields_may_be_missing_or_added(read_events, kind, encoding):
    fields = WHOLE[kind]
    for length in range(NEEDED.get(kind, 0), len(fields) + 1):
        found = read_events([[kind, *fields[:length]]], encoding=encoding)
        assert (found.rejects, found.rows.height) == ([], 1), length
        assert _facts(found.rows.row(0, named=True)).items() <= EXPECTED[kind].items(), length
    more = read_events([[kind, *fields, "added", {"later": [1]}]], encoding=encoding)
    assert _facts(more.rows.row(0, named=True)) == EXPECTED[kind]


@pytest.mark.parametrize("batch", [[TS, [CLEARED]], [TS, [CLEARED], None, None, "more"]])
def test_a_batch_may_lack_rank_and_step(read, batch):
    row = read(json.dumps(batch).encode()).rows.row(0, named=True)
    assert (row["data_parallel_rank"], row["batch_step"]) == (None, None)


def test_an_empty_text_is_a_missing_value(read_events):
    row = read_events([["CacheLoadCommitted", "", "", 1]]).rows.row(0, named=True)
    assert (row["request_id"], row["medium"]) == (None, None)


def test_hashes_of_both_kinds_are_the_same_blocks(lifetimes):
    """vLLM's numbers are the last eight bytes of its hashes; JSON has bytes in base64."""
    whole = bytes(range(100, 132))
    number = int.from_bytes(whole[-8:], "big")
    assert hash_number(whole) == hash_number(number) == number
    assert hash_number(2**64 - 1) == 2**64 - 1
    text = base64.b64encode(whole).decode()
    stored = ["BlockStored", [text], None, [1], 16, None, "GPU"]
    assert lifetimes((0, 0, stored), (2, 0, ["BlockRemoved", [number], "GPU"])) == [None, 2e6]


def test_the_lifetime_of_removed_blocks_is_a_mean(lifetimes):
    found = lifetimes(
        (0, 0, ["BlockStored", [1, 2], None, [], 16, None, "GPU"]),
        (1, 0, ["BlockStored", [3], 2, [], 16, None, "GPU"]),
        (4, 0, ["BlockRemoved", [1, 3, 99], "GPU"]),
        (5, 0, ["BlockRemoved", [1], "GPU"], ["BlockRemoved", [2], "CPU"], CLEARED),
        (6, 0, ["BlockRemoved", [2], "GPU"]),
    )
    # 1 lived 4 s and 3 lived 3 s; 1 is gone, 2 of the CPU is another block, and clearing ends the rest.
    assert found == [None, None, 3.5e6, None, None, None, None]


def test_clearing_a_cache_concerns_its_rank_alone(lifetimes):
    found = lifetimes(
        (0, 0, ["BlockStored", [7]]),
        (0, 1, ["BlockStored", [7]]),
        (1, 1, CLEARED),
        (1, 0, ["BlockRemoved", [7]]),
        (1, 1, ["BlockRemoved", [7]]),
    )
    assert found[-2:] == [1e6, None]


def test_age_of_a_block_begins_again_after_a_clearing(lifetimes):
    found = lifetimes(
        (0, 0, ["BlockStored", [1, 2, 3, 4]]),
        (1, 0, CLEARED, ["BlockStored", [2, 3]]),
        (2, 0, ["BlockStored", [2, 5]], ["BlockRemoved", [1]]),
        (4, 0, ["BlockRemoved", [2]], ["BlockRemoved", [2]], ["CacheEviction", None, 1, "lru", 4, [5]]),
    )
    assert found[4:] == [None, 3e6, None, 2e6]


def test_ages_are_dropped_when_too_many_blocks_are_stored():
    ages = BlockAges(most_blocks=3)
    for rank, hashes in ((0, [1, 2]), (1, [3, 4]), (0, [5])):
        ages.store(rank, None, hashes, 0.0)
    assert [ages.remove(0, None, [one], 1.0) for one in (1, 5)] == [None, 1e6]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (["BlockEaten", [1]], "KV-cache event of an unknown kind"),
        (["BlockStored"], "BlockStored event cannot be read"),
        (["BlockStored", ["%%%"]], "BlockStored event cannot be read"),
        (["TransferInitiated", -1], "TransferInitiated event cannot be read"),
        (["TransferCompleted", 1, "r", "GPU", "CPU", 2**70], "TransferCompleted event cannot be read"),
        (["CacheEviction", "CPU", "five"], "CacheEviction event cannot be read"),
        ([], "not a KV-cache event"),
        (5, "not a KV-cache event"),
        ({"type": "BlockStored"}, "not a KV-cache event"),
    ],
)
def test_an_event_that_cannot_be_read_costs_itself_alone(read_events, event, reason, encoding):
    if encoding == "msgpack" and reason.startswith("TransferCompleted"):
        event = [*event[:-1], 2**64 - 1]  # msgpack has no larger numbers
    found = read_events([CLEARED, event, CLEARED], encoding=encoding)
    assert found.rows["event"].to_list() == ["AllBlocksCleared"] * 2
    assert [r.reason.startswith(reason) for r in found.rejects] == [True]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "event",
    [
        ["CacheStoreCommitted", "r", "CPU", 2**62, 5],
        ["CacheStoreCommitted", "r", "CPU", 4, 2**63 - 1],
        ["BlockStored", [1], None, [5], 2**62, None, "GPU"],
    ],
)
def test_an_absurd_number_costs_its_event_alone(read_events, event, encoding):
    """Two counts of 2^62 had a sum below zero."""
    found = read_events([CLEARED, event, CLEARED], encoding=encoding)
    assert found.rows["event"].to_list() == ["AllBlocksCleared"] * 2
    assert [r.reason.startswith(f"{event[0]} event cannot be read") for r in found.rejects] == [True]


def test_a_large_batch_with_a_bad_event_is_one_reject(read_events):
    large = ["BlockStored", [1], None, "x" * MAX_LOOSE_BYTES]
    assert read_events([CLEARED, large]).rows.height == 2
    found = read_events([CLEARED, large, 5])
    assert (found.rows.height, len(found.rejects)) == (0, 1)


@pytest.mark.parametrize(
    "line",
    [
        b'[1700000000.5,[["BlockStored",[1],nu',
        b"{}",
        b"[]",
        b'["now",[],0,1]',
        b"[-1,[],0,1]",
        b"[1e300,[],0,1]",
        b'[1700000000.5,[],"zero",1]',
        b"\xff\xfe",
        b"[" * 10_000,
        b"[1700000000.5," + b"9" * 400 + b"]",
        b"[1700000000.5,[],0,9223372036854775807]",
    ],
)
def test_a_damaged_line_is_one_reject_and_the_next_is_read(read, line):
    good = json.dumps([TS, [CLEARED], 0, 1]).encode()
    found = read(b"\n".join([good, line, good]))
    assert found.rows.height == 2
    assert [(r.source_offset, r.length) for r in found.rejects] == [(len(good) + 1, len(line))]


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_batch_without_a_unix_time_is_a_reject(read_events, ts):
    found = read_events([CLEARED], encoding="msgpack", ts=ts)
    assert (found.rows.height, len(found.rejects)) == (0, 1)


def test_rows_have_the_offset_of_their_batch(read):
    good = json.dumps([TS, [CLEARED], 0, 1]).encode()
    cut = json.dumps([TS, [["BlockStored", [1], None, [7] * 50, 16]], 0, 1]).encode()[:-30]
    found = read(good + b"\n" + cut + good)
    assert found.rows["source_offset"].to_list() == [0, len(good) + 1 + len(cut)]


SECRET = 123_454_321


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_token_ids_are_nowhere_in_what_comes_back(read, read_events, encoding):
    tokens = [SECRET] * 16
    events = [
        ["BlockStored", [1], None, tokens, 16, None, "GPU", None],
        ["BlockStored", [2], None, tokens, "sixteen"],
        ["BlockStored", "x", None, tokens],
        ["BlockEaten", tokens],
        [str(SECRET), tokens],
        tokens,
    ]
    found = read_events(events, encoding=encoding)
    cut = read(ENCODE[encoding]([TS, events, 0, 1])[:-3])
    assert (found.rows.height, len(found.rejects)) == (1, 5)
    assert cut.rejects
    assert str(SECRET) not in repr(found.rows.rows()) + repr(found.rejects) + repr(cut.rejects)


def _random_event(rng):
    kind = list(WHOLE)[rng.integers(len(WHOLE))]
    fields = WHOLE[kind][: rng.integers(0, len(WHOLE[kind]) + 1)]
    odd = [None, -1, 2**63, "text", [], [[]], 1.5, True, {}]
    if fields and rng.random() < 0.4:
        fields = list(fields)
        fields[rng.integers(len(fields))] = odd[rng.integers(len(odd))]
    return [kind, *fields]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_every_event_is_a_row_or_a_reject_whatever_it_is(read, encoding):
    """Property: over random events, whole and odd, nothing is lost and nothing raises; damage is a reject."""
    rng = np.random.default_rng(5)
    for _ in range(150):
        events = [_random_event(rng) for _ in range(rng.integers(0, 6))]
        payload = ENCODE[encoding]([TS, events, 0, int(rng.integers(0, 9))])
        found = read(payload)
        assert found.rows.height + len(found.rejects) == len(events)
        cut = read(payload[: rng.integers(5, len(payload) - 1)])
        assert (cut.rows.height, len(cut.rejects)) == (0, 1)
        flipped = bytearray(payload)
        flipped[rng.integers(len(payload))] ^= 1 << int(rng.integers(8))
        read(bytes(flipped))
