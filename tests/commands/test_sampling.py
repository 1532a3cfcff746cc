"""Of more runs than fit into memory together, some are trained on: evenly in time, and the file says so."""

from __future__ import annotations

import itertools
import json

import polars as pl
import pytest

from tracefit import ingest, train
from tracefit.commands.deployments import sample_runs
from tracefit.progress import KeptWarnings
from tracefit.tables.store import TableStore


def _runs(sizes, *, steps=0, sampling=0.0):
    """Return rows of the `runs` table: runs `r0`, `r1`, ... one second after the other, of so many events."""
    return pl.DataFrame(
        {
            "run_id": [f"r{n}" for n in range(len(sizes))],
            "server": "s",
            "steps": steps,
            "step_sampling": sampling,
            "events": [json.dumps({"step.BATCH_SUMMARY": size}) for size in sizes],
            "first_unix_ns": [n * 10**9 for n in range(len(sizes))],
        }
    )


def _sample(runs, *, rows=10**9, runs_at_most=10**9):
    return sample_runs(runs, runs["run_id"].to_list(), most_rows=rows, most_runs=runs_at_most)


def test_runs_that_fit_are_all_kept():
    assert _sample(_runs([100] * 10), rows=1000) == [f"r{n}" for n in range(10)]


def test_the_middles_of_equal_parts_of_the_time_are_kept():
    # Three parts of ten runs: their middles lie at 1.67, 5 and 8.33.
    assert _sample(_runs([100] * 10), rows=300) == ["r1", "r5", "r8"]
    assert _sample(_runs([100] * 10), runs_at_most=3) == ["r1", "r5", "r8"]


def test_time_counts_and_not_the_names():
    shuffled = _runs([100] * 10).sample(fraction=1.0, shuffle=True, seed=3)
    assert sorted(_sample(shuffled, rows=300)) == ["r1", "r5", "r8"]
    later = _runs([100] * 4).with_columns(first_unix_ns=-pl.col("first_unix_ns"))  # r3 first: middles 1 and 3
    assert _sample(later, runs_at_most=2) == ["r0", "r2"]


def test_every_part_of_the_time_has_its_share():
    kept = [int(name[1:]) for name in _sample(_runs([100] * 10_000), rows=50_000)]
    assert len(kept) == 500
    assert {b - a for a, b in itertools.pairwise(kept)} == {20}


@pytest.mark.parametrize("sizes", [[1, 1000] * 50, [1000] + [10] * 99, list(range(1, 101))])
def test_the_bound_holds_for_runs_of_different_sizes(sizes):
    kept = _sample(_runs(sizes), rows=1200)
    assert 1 <= len(kept) < 100
    assert sum(sizes[int(name[1:])] for name in kept) <= 1200


def test_steps_that_were_not_sampled_count():
    # 100 events, and 10 of 1000 steps: a run has 1100 rows.
    assert len(_sample(_runs([100] * 10, steps=10, sampling=0.01), rows=5500)) == 5


def test_of_runs_that_are_each_too_large_one_is_left():
    assert _sample(_runs([500] * 3), rows=100) == ["r1"]


@pytest.mark.slow
def test_the_sampling_is_stated(tmp_path, new_traces, quick):
    for number in range(4):
        new_traces().load(steps=80, requests=45, seed=number).write(tmp_path / "runs" / f"r{number}")
    ingest([tmp_path / "runs"], tmp_path / "tables")
    # Each claims nine hundred thousand steps: two of them are as many rows as fit into memory.
    store = TableStore(tmp_path / "tables")
    claimed = pl.lit(json.dumps({"step.BATCH_SUMMARY": 900_000}))
    rows = {run_id: store.read("runs", [run_id]).with_columns(events=claimed) for run_id in store.runs()}
    store.write_runs((run_id, {"runs": row}) for run_id, row in rows.items())
    progress = KeptWarnings(None)
    train(tmp_path / "tables", tmp_path / "models", options=quick, progress=progress)
    (deployment,) = json.loads((tmp_path / "models" / "evaluation.json").read_text())["deployments"]
    (note,) = deployment["notes"]
    assert note.startswith("trained on 2 of 4 runs, evenly in the order of their beginning")
    assert deployment["runs"] == ["r1", "r3"]
    assert f"{deployment['deployment_id']}: {note}" in progress.warnings
    assert note in (tmp_path / "models" / "report.md").read_text()
    # The tables of the others stay.
    assert TableStore(tmp_path / "tables").runs() == ["r0", "r1", "r2", "r3"]
