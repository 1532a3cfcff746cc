"""KV-cache events beside traces: which engine, step and request they belong to, each transfer once."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit.inputs.files import TraceFile
from tracefit.options import IngestOptions
from tracefit.recordings.kv_columns import KV_COLUMNS, kv_tables, transfers, with_kv_cache, with_prefix_hits
from tracefit.recordings.kv_events import read_kv
from tracefit.tables import schema

BOOT_S = 1_700_000_000
ENGINE = {"run_id": "run", "server": "engine", "epoch": 0}
R1, R2 = "cmpl-1-0-00000000", "cmpl-2-0-00000000"


def _batch(at_us, events, step=None, rank=0):
    return [BOOT_S + at_us / 1e6, events, rank, step]


def _ns(at_us):
    return BOOT_S * 10**9 + at_us * 1000


def _frame(table, rows):
    names = {c.name: c.polars for c in schema.TABLES[table].columns}
    return schema.TABLES[table].shape(pl.DataFrame([ENGINE | row for row in rows], schema=names))


def _steps(steps=range(1, 11), **more):
    """Steps start every 10,000 us; the summary of each is stamped 100 us after its start."""
    return [{"step_id": k, "unix_ns": _ns(10_000 * k + 100), **more} for k in steps]


def _core(request_id, event, at_us, step, **more):
    row = {"layer": "core", "request_id": request_id, "event": event, "unix_ns": _ns(at_us), "step_id": step}
    return row | more


ONE_REQUEST = {
    "core_request_id": R1,
    "prompt_tokens": 100,
    "output_tokens": 5,
    "first_scheduled_step": 1,
}


@pytest.fixture
def tables(tmp_path):
    """Return a function from batches, and what is known of a run, to its tables."""

    def of(batches, *, steps=None, journeys=None, requests=(ONE_REQUEST,), servers=("engine",), text=None, **run):
        path = tmp_path / "kv_events.jsonl"
        path.write_text(text or "".join(json.dumps(batch) + "\n" for batch in batches))
        journeys = [_core(R1, "QUEUED", 9_000, 0)] if journeys is None else journeys
        run = {"journey_sampling": 1.0, "rejects": 0, **run}
        base = {
            "steps": _frame("steps", _steps() if steps is None else steps),
            "journey_events": _frame("journey_events", journeys),
            "requests": _frame("requests", requests),
            "runs": schema.RUNS.conform(pl.DataFrame([{"run_id": "run", "server": s, **run} for s in servers])),
            "rejects": schema.REJECTS.empty(),
        }
        return kv_tables(read_kv([TraceFile.local(path)], IngestOptions()), base, run_id="run")

    return of


STORE = [
    _batch(20_500, [["CacheStoreCommitted", R1, "CPU", 4, 2]], 2),
    _batch(30_500, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, 3]], 3),
    # Some builds report the same beginning again with a later batch.
    _batch(40_500, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, 3]], 4),
    _batch(60_500, [["TransferCompleted", 7, R1, "GPU", "CPU", 4, True, 3]], 6),
    _batch(60_600, [["CacheLoadCommitted", R1, "CPU", 2, 6]], 6),
    _batch(60_700, [["TransferInitiated", 8, R1, "CPU", "GPU", 2, 6]], 6),
]
BLOCKS = [
    _batch(20_400, [["BlockStored", [1, 2, 3], None, [5], 16, None, "GPU"]], 2),
    _batch(20_450, [["BlockStored", [9], None, [5], 16, None, "CPU"]], 2),
    _batch(50_450, [["BlockRemoved", [1, 2], "GPU"], ["CacheEviction", "CPU", 3, "lru", 5]], 5),
]


def test_events_are_joined_to_their_engine_and_step(tables):
    found = tables(STORE)
    rows = found["kv_events"]
    assert rows.select("event", "step_id", "initiated_step", "step_source").rows() == [
        ("CacheStoreCommitted", 2, None, "event"),
        ("TransferInitiated", 3, None, "event"),
        ("TransferCompleted", 6, 3, "event"),
        ("CacheLoadCommitted", 6, None, "event"),
        ("TransferInitiated", 6, None, "event"),
    ]
    assert set(rows.select("run_id", "server", "epoch", "request_id").rows()) == {("run", "engine", 0, R1)}
    run = found["runs"].row(0, named=True)
    counts = ("kv_events", "kv_duplicate_events", "kv_transfers", "kv_transfers_unfinished")
    assert [run[c] for c in counts] == [5, 1, 2, 1]


def test_each_table_has_its_columns(tables):
    for name, frame in tables(STORE).items():
        assert frame.schema == schema.TABLES[name].empty().schema


def test_transfers_have_their_beginning_and_their_end(tables):
    moved = transfers(tables(STORE)["kv_events"])
    assert moved.select("transfer_id", "initiated_step", "completed_step", "success").rows() == [
        ("7", 3, 6, True),
        ("8", 6, None, None),
    ]
    assert moved["completed_ns"].to_list() == [pytest.approx(_ns(60_500), abs=1000), None]


def test_the_same_id_in_another_step_is_another_transfer(tables):
    batches = [
        _batch(30_500 + k, [["TransferInitiated", 7, R1, "GPU", "CPU", 4, step]]) for k, step in enumerate((3, 3, 5))
    ]
    batches.append(_batch(60_500, [["TransferCompleted", 7, R1, "GPU", "CPU", 4, True, 3]], 6))
    found = tables(batches)
    assert found["kv_events"]["step_id"].to_list() == [3, 5, 6]
    assert found["runs"]["kv_duplicate_events"].item() == 1
    assert transfers(found["kv_events"])["completed_step"].to_list() == [6, None]


def test_without_a_step_the_clock_has_it_between_two_known_ones(tables):
    stored = [["BlockStored", [1], None, [5], 16, None, "GPU"]]
    batches = [_batch(at, stored) for at in (5_000, 25_000, 45_000, 75_000, 500_000)]
    # 25 ms is between the summaries of steps 2 and 3, 75 ms between 7 and 8; when step 4 began is not known.
    rows = tables(batches, steps=_steps((1, 2, 3, 5, 7, 8)))["kv_events"]
    assert rows["step_id"].to_list() == [None, 2, None, 7, None]
    assert rows["step_source"].to_list() == [None, "clock", None, "clock", None]


def test_events_of_a_restarted_engine_have_its_epoch(tables):
    steps = [*_steps((50, 51)), *({"step_id": k, "unix_ns": _ns(10**6 * k), "epoch": 1} for k in (1, 2))]
    stored = [["BlockStored", [1], None, [5], 16, None, "GPU"]]
    rows = tables([_batch(at, stored) for at in (1_000, 505_000, 1_500_000)], steps=steps)["kv_events"]
    assert rows.select("epoch", "step_id").rows() == [(0, None), (0, 50), (1, 1)]


def test_events_go_to_the_engine_of_their_request_or_rank(tables):
    journeys = [_core(R1, "QUEUED", 9_000, 0), _core(R2, "QUEUED", 9_000, 0, server="other")]
    cleared = ["AllBlocksCleared"]
    batches = [
        _batch(30_000, [cleared, ["CacheLoadCommitted", R1, "CPU", 1, 1]], 1, rank=0),
        _batch(30_100, [["CacheLoadCommitted", R2, "CPU", 1, 1]], 1, rank=1),
        _batch(30_200, [cleared], 1, rank=1),
        _batch(30_300, [cleared], 1, rank=2),
    ]
    found = tables(batches, journeys=journeys, servers=("engine", "other", "third"))
    rows = found["kv_events"].sort("data_parallel_rank")
    assert rows["server"].to_list() == ["engine", "engine", "other", "other", None]
    assert found["runs"].select("kv_events", "kv_transfers").rows() == [(2, 0), (2, 0), (None, None)]


def test_after_a_preemption_the_blocks_of_a_request_start_over(tables):
    stores = [(2, 5), (3, 1), (7, 6)]
    batches = [_batch(10_000 * s + 500, [["CacheStoreCommitted", R1, "CPU", n, s]], s) for s, n in stores]
    batches.append(_batch(10_400, [["CacheLoadCommitted", R1, "CPU", 2, 1]], 1))
    batches.append(_batch(10_500, [["BlockStored", [1], None, [5], 16, None, "GPU"]], 1))
    row = tables(batches, journeys=[_core(R1, "PREEMPTED", 40_050, 4)])["requests"].row(0, named=True)
    assert row["kv_blocks_offloaded"] == 6, "six blocks would be there to load, not twelve"
    assert row["kv_blocks_loaded"] == 2
    assert row["cached_prompt_tokens"] == 2 * 16


@pytest.mark.parametrize(("stored", "known", "cached"), [(True, 40, 40), (True, None, 32), (False, None, None)])
def test_loaded_blocks_are_prefix_hits(tables, stored, known, cached):
    batches = [_batch(10_400, [["CacheLoadCommitted", R1, "CPU", 2, 1]], 1)]
    batches += [_batch(10_500, [["BlockStored", [1], None, [5], 16]], 1)] if stored else []
    requests = [ONE_REQUEST | {"cached_prompt_tokens": known}]
    assert tables(batches, requests=requests)["requests"]["cached_prompt_tokens"].item() == cached


def test_what_is_known_of_the_cache_at_each_step(tables):
    found = tables([*STORE, *BLOCKS])
    timeline = _frame("timeline", [{"step_id": k, "kv_blocks_total": 1000} for k in range(1, 11)])
    steps = with_kv_cache(timeline, found["kv_events"], kv_bytes_per_token=1000.0)
    steps = with_prefix_hits(steps, found["requests"])
    assert set(KV_COLUMNS) <= set(steps.columns)
    by = {row["step_id"]: row for row in steps.iter_rows(named=True)}
    assert [by[k]["kv_blocks_stored"] for k in (1, 2, 3)] == [0, 3, 0], "of the engine's own cache"
    assert [by[k]["kv_blocks_evicted"] for k in (4, 5)] == [0, 2]
    assert by[5]["kv_offload_evicted"] == 3
    assert by[5]["kv_block_lifetime_us"] == pytest.approx(30_050, abs=1)
    assert [by[k]["kv_blocks_offloaded"] for k in (2, 3)] == [4, 0]
    assert [by[k]["kv_blocks_loaded"] for k in (5, 6)] == [0, 2]
    assert [by[k]["kv_blocks_transferred"] for k in (3, 4, 6)] == [4, 0, 2]
    # Transfer 7 from step 3 on, seen complete in 6; transfer 8 from 6 on, never seen to end.
    assert [by[k]["kv_transfers_in_flight"] for k in range(1, 9)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [by[k]["kv_blocks_in_flight"] for k in range(1, 9)] == [0, 0, 4, 4, 4, 2, 2, 2]
    assert by[3]["kv_bytes_in_flight"] == 4 * 16 * 1000
    assert by[3]["kv_offload_pressure"] == pytest.approx(4 / 1000)
    assert by[1]["kv_prefix_hit_ratio"] == pytest.approx(2 * 16 / 100), "two blocks of 100 tokens were loaded"
    assert by[2]["kv_prefix_hit_ratio"] is None


def test_an_engine_without_events_has_nulls_not_zeros(tables):
    found = tables(STORE, requests=[ONE_REQUEST | {"server": "other"}])
    timeline = _frame("timeline", [{"step_id": 1, "kv_blocks_total": 1000, "server": "other"}])
    steps = with_prefix_hits(with_kv_cache(timeline, found["kv_events"]), found["requests"])
    assert steps.select(pl.col(KV_COLUMNS).is_null().all()).row(0) == (True,) * len(KV_COLUMNS)
    steps = with_kv_cache(timeline, schema.KV_EVENTS.empty())
    assert steps["kv_blocks_stored"].to_list() == [None]


@pytest.mark.parametrize(("sampling", "ratio"), [(1.0, 2 / 6), (0.5, None)])
def test_blocks_never_stored_were_found_in_the_cache(tables, sampling, ratio):
    """100 + 5 tokens, the last one never computed, fill 6 blocks; with 4 of them stored 2 of 6 were there."""
    stored = [["BlockStored", [1, 2, 3, 4], None, [5], 16, None, "GPU"]]
    run = tables([_batch(15_000, stored)], journey_sampling=sampling)["runs"].row(0, named=True)
    assert run["kv_prefix_hit_ratio"] == (pytest.approx(ratio) if ratio else None)


def test_lifetime_of_a_run_is_the_mean_of_removed_blocks(tables):
    removed = [_batch(60_400, [["BlockRemoved", [3], "GPU"]], 6)]
    run = tables([*BLOCKS, *removed])["runs"].row(0, named=True)
    assert run["kv_block_lifetime_us"] == pytest.approx((2 * 30_050 + 40_000) / 3, abs=1)


def test_damaged_lines_are_rejects_of_the_run(tables):
    good = json.dumps(_batch(20_500, [["AllBlocksCleared"]], 2))
    found = tables([], text=f"{good}\n[17000\n{good}\n", rejects=4)
    assert found["runs"]["rejects"].item() == 5
    assert found["rejects"].select("run_id", "source_offset", "length", "count").row(0) == (
        "run",
        len(good) + 1,
        6,
        1,
    )


def test_an_empty_recording_is_one_without_events(tables):
    found = tables([])
    assert found["kv_events"].height == 0
    assert found["runs"]["kv_duplicate_events"].item() == 0
    assert found["requests"]["kv_blocks_loaded"].item() is None
