"""KV-cache events beside traces: which engine, step and request they belong to, each transfer once."""

from __future__ import annotations

import json

import msgspec
import polars as pl
import pytest

from tracefit.features.kv_cache import KV_COLUMNS, with_kv_cache, with_prefix_hits
from tracefit.tables.kv_events import transfers
from tracefit.tables.store import TableStore
from tracefit.verbs.ingest import ingest

BOOT_S = 1_700_000_000
R1 = "cmpl-1-0-00000000"


def _batch(at_us, events, step=None, rank=0):
    return [BOOT_S + at_us / 1e6, events, rank, step]


@pytest.fixture
def tables(tmp_path):
    """Ingest a trace and its KV-cache batches; return a function from a table's name to its frame."""

    def of(trace, batches, *, encode="json"):
        folder = trace.write(tmp_path / "run")
        if encode == "json":
            text = "".join(json.dumps(batch) + "\n" for batch in batches)
            (folder / "kv_events.jsonl").write_text(text)
        else:
            (folder / "kv_events.msgpack").write_bytes(b"".join(map(msgspec.msgpack.encode, batches)))
        result = ingest([folder], tmp_path / "tables")
        store = TableStore(tmp_path / "tables")
        return lambda name: result if name == "result" else store.read(name)

    return of


def _stepped(trace, steps=range(1, 11)):
    """Steps start every 10,000 us; the summary of each is stamped 100 us after its start."""
    return trace.steps(*(trace.summary(k, 10_000 * k) for k in steps))


STORE = [
    _batch(20_500, [["CacheStoreCommitted", R1, "CPU", 4, 2]], 2),
    _batch(30_500, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, 3]], 3),
    # Some builds tell of the same beginning again with a later batch.
    _batch(40_500, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, 3]], 4),
    _batch(60_500, [["TransferCompleted", 7, R1, "GPU", "CPU", 4, True, 3]], 6),
    _batch(60_600, [["CacheLoadCommitted", R1, "CPU", 2, 6]], 6),
    _batch(60_700, [["TransferInitiated", 8, R1, "CPU", "GPU", 2, 6]], 6),
]


@pytest.mark.parametrize("encode", ["json", "msgpack"])
def test_events_are_joined_to_their_engine_and_step(tables, traces, encode):
    table = tables(_stepped(traces.request(1, 9_000, step=1)), STORE, encode=encode)
    rows = table("kv_events")
    assert rows.select("event", "step_id", "initiated_step", "step_source").rows() == [
        ("CacheStoreCommitted", 2, None, "event"),
        ("TransferInitiated", 3, None, "event"),
        ("TransferCompleted", 6, 3, "event"),
        ("CacheLoadCommitted", 6, None, "event"),
        ("TransferInitiated", 6, None, "event"),
    ]
    assert set(rows.select("run_id", "server", "epoch", "request_id").rows()) == {("run", "engine", 0, R1)}
    joined = rows.join(table("requests"), left_on="request_id", right_on="core_request_id")
    assert joined.height == 5
    run = table("runs").row(0, named=True)
    counts = ("kv_events", "kv_duplicate_events", "kv_transfers", "kv_transfers_unfinished")
    assert [run[c] for c in counts] == [5, 1, 2, 1]


def test_a_store_prepared_in_a_step_is_submitted_in_the_next_and_a_load_in_the_same(tables, traces):
    table = tables(_stepped(traces.request(1, 9_000, step=1)), STORE)
    moved = transfers(table("kv_events")).sort("initiated_step")
    assert moved.select(
        "transfer_id", "committed_step", "initiated_step", "completed_step", "success"
    ).rows() == [
        ("7", 2, 3, 6, True),
        ("8", 6, 6, None, None),
    ]


def test_the_same_id_in_another_step_is_another_transfer(tables, traces):
    batches = [
        _batch(30_500 + k, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, step]])
        for k, step in enumerate((3, 3, 5))
    ]
    table = tables(_stepped(traces.request(1, 9_000, step=1)), batches)
    assert table("kv_events")["step_id"].to_list() == [3, 5]
    assert table("runs")["kv_duplicate_events"].item() == 1


def test_without_a_step_the_clock_tells_it_between_two_known_ones(tables, traces):
    stored = [["BlockStored", [1], None, [5], 16, None, "GPU"]]
    batches = [_batch(at, stored) for at in (5_000, 25_000, 45_000, 75_000, 500_000)]
    table = tables(_stepped(traces, (1, 2, 3, 5, 7, 8)), batches)
    # 25 ms is between the summaries of steps 2 and 3, 75 ms between 7 and 8; after step 3 nobody knows when 4 began.
    rows = table("kv_events").sort("unix_ns")
    assert rows["step_id"].to_list() == [None, 2, None, 7, None]
    assert rows["step_source"].to_list() == [None, "clock", None, "clock", None]


def test_events_of_a_restarted_engine_have_its_epoch(tables, traces):
    trace = traces.steps(traces.summary(50, 10_000), traces.summary(51, 20_000))
    trace.steps(trace.summary(1, 1_000_000), trace.summary(2, 1_010_000))
    batches = [_batch(at, [["TransferInitiated", 1, "r", "GPU", "CPU", 1, 2]]) for at in (15_000, 1_015_000)]
    rows = tables(trace, batches)("kv_events").sort("unix_ns")
    assert rows["epoch"].to_list() == [0, 1], "the same id and step, and another transfer"


def test_of_several_engines_the_requests_tell_which(tables, traces):
    trace = traces.request(1, 9_000, step=1)
    trace.server = "other"
    trace.request(2, 9_500, step=1)
    cleared = ["AllBlocksCleared"]
    batches = [
        _batch(30_000, [cleared, ["CacheLoadCommitted", R1, "CPU", 1, 1]], 1, rank=0),
        _batch(30_100, [["CacheLoadCommitted", "cmpl-2-0-00000000", "CPU", 1, 1]], 1, rank=1),
        _batch(30_200, [cleared], 1, rank=1),
        _batch(30_300, [cleared], 1, rank=2),
    ]
    rows = tables(trace, batches)("kv_events").sort("data_parallel_rank")
    assert rows["server"].to_list() == ["engine", "engine", "other", "other", None]


def test_after_a_preemption_the_blocks_of_a_request_start_over(tables, traces):
    events = [
        ("QUEUED", 9_000, 0),
        ("SCHEDULED", 10_050, 1),
        ("FIRST_TOKEN", 19_900, 1),
        ("PREEMPTED", 40_050, 4),
        ("SCHEDULED", 60_050, 6),
        ("FINISHED", 99_000, 9, {"finish.status": "length", "decode.done_tokens": 5}),
    ]
    trace = _stepped(traces.api(1, {"ARRIVED": 8_000}).core(1, events, preemptions=1))
    stores = [(2, 5), (3, 1), (7, 6)]
    batches = [_batch(10_000 * s + 500, [["CacheStoreCommitted", R1, "CPU", n, s]], s) for s, n in stores]
    batches.append(_batch(10_400, [["CacheLoadCommitted", R1, "CPU", 2, 1]], 1))
    batches.append(_batch(10_500, [["BlockStored", [1], None, [5], 16, None, "GPU"]], 1))
    row = tables(trace, batches)("requests").row(0, named=True)
    assert row["kv_blocks_offloaded"] == 6, "six blocks would be there to load, not twelve"
    assert row["kv_blocks_loaded"] == 2
    assert row["cached_prompt_tokens"] == 2 * 16, "no snapshot tells of the hits"


def test_what_steps_are_told_of_the_cache(tables, traces):
    trace = _stepped(traces.request(1, 9_000, step=1))
    blocks = [
        _batch(20_400, [["BlockStored", [1, 2, 3], None, [5], 16, None, "GPU"]], 2),
        _batch(20_450, [["BlockStored", [9], None, [5], 16, None, "CPU"]], 2),
        _batch(50_450, [["BlockRemoved", [1, 2], "GPU"], ["CacheEviction", "CPU", 3, "lru", 5]], 5),
    ]
    table = tables(trace, [*STORE, *blocks])
    steps = with_kv_cache(table("timeline"), table("kv_events"), kv_bytes_per_token=1000.0).sort("step_id")
    steps = with_prefix_hits(steps, table("requests"))
    assert set(KV_COLUMNS) <= set(steps.columns)
    by = {row["step_id"]: row for row in steps.iter_rows(named=True)}
    assert [by[k]["kv_blocks_stored"] for k in (1, 2, 3)] == [0, 3, 0], "of the engine's own cache"
    assert [by[k]["kv_blocks_evicted"] for k in (4, 5)] == [0, 2]
    assert by[5]["kv_offload_evicted"] == 3
    assert by[5]["kv_block_lifetime_us"] == pytest.approx(30_050, abs=1)
    assert [by[k]["kv_blocks_offloaded"] for k in (2, 3)] == [4, 0]
    assert [by[k]["kv_blocks_transferred"] for k in (3, 4, 6)] == [4, 0, 2]
    # Transfer 7 from step 3 on, seen complete in 6; transfer 8 from 6 on, never seen to end.
    assert [by[k]["kv_transfers_in_flight"] for k in range(1, 9)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [by[k]["kv_blocks_in_flight"] for k in range(1, 9)] == [0, 0, 4, 4, 4, 2, 2, 2]
    assert by[3]["kv_bytes_in_flight"] == 4 * 16 * 1000
    assert by[3]["kv_offload_pressure"] == pytest.approx(4 / 1000)
    assert by[1]["kv_prefix_hit_ratio"] == pytest.approx(2 * 16 / 100), (
        "two of the blocks of 100 tokens were loaded"
    )
    assert by[2]["kv_prefix_hit_ratio"] is None


def test_an_engine_without_events_has_nulls_not_zeros(tables, traces):
    table = tables(_stepped(traces), [])
    steps = with_prefix_hits(with_kv_cache(table("timeline"), table("kv_events")), table("requests"))
    assert steps.select(pl.col(KV_COLUMNS).is_null().all()).row(0) == (True,) * len(KV_COLUMNS)


@pytest.mark.parametrize(("decoding", "ratio"), [(1, 2 / 6), (2, None)])
def test_blocks_never_stored_were_found_in_the_cache(tables, traces, decoding, ratio):
    """100 + 5 tokens of which the last is never computed fill 6 blocks; with 4 of them stored 2 of 6 were there."""
    trace = traces.request(1, 8_900, step=1, output=5)
    counts = {k: decoding if 2 <= k <= 5 else 0 for k in range(1, 7)}
    trace.steps(*(trace.summary(k, 10_000 * k, num_decode_reqs=n) for k, n in counts.items()))
    stored = [["BlockStored", [1, 2, 3, 4], None, [5], 16, None, "GPU"]]
    run = tables(trace, [_batch(15_000, stored)])("runs").row(0, named=True)
    assert run["kv_prefix_hit_ratio"] == pytest.approx(ratio) if ratio else run["kv_prefix_hit_ratio"] is None


def test_damaged_lines_are_in_quarantine_with_their_file_and_offset(tables, traces, tmp_path):
    trace = _stepped(traces)
    folder = trace.write(tmp_path / "damaged")
    good = json.dumps(_batch(20_500, [["AllBlocksCleared"]], 2))
    (folder / "kv_events.jsonl").write_text(f"{good}\n[17000\n{good}\n")
    result = ingest([folder], tmp_path / "t")
    rejects = TableStore(tmp_path / "t").read("rejects")
    assert result.exit_code == 3
    assert (
        result.runs[0].rejects
        == rejects.height
        == TableStore(tmp_path / "t").read("runs")["rejects"].item()
        == 1
    )
    assert rejects.select("source_offset", "length").row(0) == (len(good) + 1, 6)
    assert rejects["source_file"].item().endswith("kv_events.jsonl")


def test_no_token_id_is_in_any_table(tables, traces, tmp_path):
    """Token ids are what users wrote; 987654321 is one, in events that are whole, odd and cut."""
    secret = 987_654_321
    whole = _batch(20_500, [["BlockStored", [1], None, [secret] * 16, 16, None, "GPU"]], 2)
    odd = _batch(20_600, [["BlockStored", [2], None, [secret], "x"], ["Unknown", [secret]]], 2)
    folder = _stepped(traces).write(tmp_path / "run2")
    lines = f"{json.dumps(whole)}\n{json.dumps(odd)}\n{json.dumps(whole)[:-20]}\n"
    (folder / "kv_events.jsonl").write_text(lines)
    ingest([folder], tmp_path / "t")
    store = TableStore(tmp_path / "t")
    assert store.read("kv_events").height == 1
    assert store.read("rejects").height == 3
    for part in (tmp_path / "t").rglob("*.parquet"):
        assert str(secret) not in repr(pl.read_parquet(part).rows()), part


def test_loose_files_of_events_belong_to_the_traces_beside_them(traces, tmp_path):
    folder = _stepped(traces).write(tmp_path / "run")
    (folder / "kv_events.jsonl").write_text(json.dumps(_batch(20_500, [["AllBlocksCleared"]], 2)) + "\n")
    ingest([folder / "traces.json", folder / "kv_events.jsonl"], tmp_path / "t")
    assert TableStore(tmp_path / "t").read("kv_events").select("run_id", "event").rows() == [
        ("run", "AllBlocksCleared")
    ]


def test_other_events_beside_the_same_traces_take_the_place_of_those_before(traces, tmp_path):
    folder = _stepped(traces).write(tmp_path / "run")
    for step in (2, 3):
        batch = _batch(20_500, [["AllBlocksCleared"]], step)
        (folder / "kv_events.jsonl").write_text(json.dumps(batch) + "\n")
        ingest([folder], tmp_path / "t")
    store = TableStore(tmp_path / "t")
    assert store.runs() == ["run"]
    assert store.read("kv_events")["step_id"].to_list() == [3]
    assert store.read("timeline").height, "and everything else is there as before"
