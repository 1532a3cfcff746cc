"""Frames of runs are the same wherever they are made, and training on them gives the same files."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit import ingest, train
from tracefit.engines import training
from tracefit.engines.local import LocalEngine
from tracefit.engines.training import deployment_tables, each_run, frames_of, timeline_in
from tracefit.options import TrainOptions
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore


@pytest.fixture
def tables(tmp_path, fleet):
    """Return a folder with the tables of five runs."""
    ingest([fleet], tmp_path / "tables", workers=1)
    return tmp_path / "tables"


def _frames(store, workers):
    with LocalEngine(workers) as engine:
        return dict(each_run(engine, frames_of, store, store.runs()))


@pytest.mark.slow
def test_two_workers_make_the_frames_that_this_process_makes(tmp_path):
    for seed in (1, 2):
        write_run(
            synth(SynthOptions(name=f"run-{seed}", seed=seed, requests=200, num_blocks=16_384)),
            tmp_path / "runs",
        )
    ingest([tmp_path / "runs"], tmp_path / "tables", workers=1)
    store = TableStore(tmp_path / "tables")
    here, there = _frames(store, 1), _frames(store, 2)
    assert sorted(here) == sorted(there) == ["run-1", "run-2"]
    one, two = (deployment_tables([frames[run].tables for run in sorted(frames)]) for frames in (here, there))
    for name in one.__struct_fields__:
        left, right = getattr(one, name), getattr(two, name)
        assert left.equals(right) if isinstance(left, pl.DataFrame) else left == right, name
    # As the fits divide: a column of one value must not be another kind of number here than there.
    used = 1 - pl.col("kv_blocks_free") / pl.col("kv_blocks_total")
    assert one.queue.height == 400
    assert one.queue.select(used).equals(two.queue.select(used))


@pytest.mark.slow
def test_two_workers_build_the_timelines_that_ingest_builds(tables):
    store = TableStore(tables)
    with LocalEngine(2) as engine:
        for run_id, frames in each_run(engine, timeline_in, store, store.runs()):
            assert frames["timeline"].equals(store.read("timeline", [run_id]))
            assert frames["requests"].equals(store.read("requests", [run_id]))


@pytest.mark.slow
def test_workers_get_small_runs_together_and_each_gets_some(tables):
    jobs = []

    class Recorded(LocalEngine):
        def run(self, next_job):
            while (job := next_job()) is not None:
                jobs.append(job.work)
                yield job, job.function(job.argument)

    store = TableStore(tables)
    for workers, expected in ((1, [5]), (2, [3, 2]), (9, [1] * 5)):
        jobs.clear()
        assert [run for run, _ in each_run(Recorded(workers), frames_of, store, store.runs())] == list("abcde")
        assert [len(runs) for runs in jobs] == expected


@pytest.mark.slow
def test_very_many_requests_are_sampled_for_training(tmp_path, monkeypatch):
    """Half of the requests have a span: why the steps cannot be counted is judged by all of them."""
    run = synth(SynthOptions(name="half", form="stock", requests=400, journey_sampling=0.5))
    ingest([write_run(run, tmp_path)], tmp_path / "tables", workers=1)
    monkeypatch.setattr(training, "MOST_PLACED", 60)
    store = TableStore(tmp_path / "tables")
    read = store.read("requests").height
    frames = frames_of(store, "half").tables
    assert 40 <= frames.requests.height <= 60 < read
    assert "a sampler kept about" in frames.unknown_batches[0]
    trained = train(tmp_path / "tables", tmp_path / "models")
    (deployment,) = json.loads(trained.evaluation.read_text())["deployments"]
    assert f"{frames.requests.height} of {read} requests are trained on" in deployment["notes"][0]


@pytest.mark.slow
def test_a_table_that_is_gone_is_one_line(tables, tmp_path):
    (part,) = (tables / "timeline" / "run_id=b").iterdir()
    part.unlink()
    with pytest.raises(Exception, match="is missing") as caught:
        train(tables, tmp_path / "models", options=TrainOptions(fast=True))
    assert str(part) in caught.value.line()
    assert not (tmp_path / "models").exists()
