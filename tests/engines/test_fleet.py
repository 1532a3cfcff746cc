"""Small runs are built together, as rows of the same frames: each gets the same tables as by itself, and fails by
itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

import tracefit.engines.build as building
from tracefit import ingest
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def together(monkeypatch):
    """Return the list of how many runs each build of several took; a build that fails is not in it."""
    sizes = []
    stored = building._stored

    def noted(tasks, spread):
        built = stored(tasks, spread)
        sizes.append(len(tasks))
        return built

    monkeypatch.setattr(building, "_stored", noted)
    return sizes


def _alone(fleet, out, bytes_of):
    """Return the bytes of each run's tables when the run is built by itself."""
    found = {}
    for run in fleet.iterdir():
        ingest([run], out / run.name, workers=1)
        found |= bytes_of(out / run.name)
    return found


@pytest.mark.slow
def test_runs_of_a_fleet_have_the_tables_they_have_alone(tmp_path, fleet, bytes_of, together):
    # The same ids in another run, files that hold spans twice, and runs of other kinds.
    shutil.copytree(fleet / "b", fleet / "f")
    (fleet / "c" / "traces-2.json").write_bytes((fleet / "d" / "traces.json").read_bytes())
    for kind in ("generated/llama-8b-sampled", "sglang/sglang-level3-tp2"):
        shutil.copytree(FIXTURES / kind, fleet / kind.rpartition("/")[2])
    ingest([fleet], tmp_path / "fleet", workers=1)
    assert max(together) >= 6
    assert bytes_of(tmp_path / "fleet") == _alone(fleet, tmp_path / "alone", bytes_of)


@pytest.mark.slow
@pytest.mark.parametrize(("most_tokens", "times"), [(1 << 40, 1), (1, 3)])
def test_requests_of_several_stock_runs_are_counted_together(
    tmp_path, bytes_of, together, monkeypatch, most_tokens, times
):
    counts, timeline_of = [], building._timeline_of
    monkeypatch.setattr(building, "_timeline_of", lambda *given: counts.append(1) or timeline_of(*given))
    monkeypatch.setattr(building, "_COUNTED_TOKENS", most_tokens)
    # The last run has half of its requests: no steps can be counted from them.
    for name, seed, share in (("a", 1, 1.0), ("b", 2, 1.0), ("c", 3, 0.5)):
        options = SynthOptions(name=name, form="stock", requests=120, seed=seed, journey_sampling=share)
        write_run(synth(options), tmp_path / "runs")
    ingest([tmp_path / "runs"], tmp_path / "fleet", workers=1)
    assert (together, len(counts)) == ([3], times)
    assert bytes_of(tmp_path / "fleet") == _alone(tmp_path / "runs", tmp_path / "alone", bytes_of)
    steps = TableStore(tmp_path / "fleet").read("timeline").group_by("run_id").len()
    assert set(steps["run_id"]) == {"a", "b"}


@pytest.mark.slow
def test_counts_of_new_runs_are_not_read_from_their_tables(tmp_path, fleet, monkeypatch):
    read, asked = TableStore.read, []
    monkeypatch.setattr(TableStore, "read", lambda *given: asked.append(given[1:3]) or read(*given))
    first = ingest([fleet], tmp_path / "fleet", workers=1)
    assert asked == [("runs", [])]
    again = ingest([fleet], tmp_path / "fleet", workers=1)
    assert asked[1:] == [("runs", [run.run_id for run in again.runs])]
    assert again.runs == first.runs


@pytest.mark.slow
def test_logged_runs_of_a_fleet_keep_their_own_steps(tmp_path, bytes_of):
    for name in "ab":
        shutil.copytree(FIXTURES / "logged" / "stock-vllm-0.32-cpu", tmp_path / "runs" / name)
    ingest([tmp_path / "runs"], tmp_path / "fleet", workers=1)
    assert bytes_of(tmp_path / "fleet") == _alone(tmp_path / "runs", tmp_path / "alone", bytes_of)


@pytest.mark.slow
def test_a_run_that_fails_in_a_fleet_costs_itself(tmp_path, fleet, bytes_of, monkeypatch, together):
    ingest([fleet], tmp_path / "whole", workers=1)
    before = building.build_tables

    def failing(runs, **how):
        if any(run.run_id == "c" for run in runs):
            raise building.DataError("is odd", where="c")
        before(runs, **how)

    monkeypatch.setattr(building, "build_tables", failing)
    result = ingest([fleet], tmp_path / "tables", workers=1)
    assert [line.partition(":")[0] for line in result.failed] == ["c"]
    assert TableStore(tmp_path / "tables").runs() == ["a", "b", "d", "e"]
    others = {name: digest for name, digest in bytes_of(tmp_path / "whole").items() if "run_id=c/" not in name}
    assert bytes_of(tmp_path / "tables") == others


@pytest.mark.slow
def test_contradicted_setting_is_unused_for_that_run_only(tmp_path, fleet, new_traces, bytes_of):
    new_traces().load(steps=4, requests=0, seed=4).write(fleet / "b")
    for run in "ab":
        (fleet / run / "exp-config.yaml").write_text("max_num_batched_tokens: 60\n")
    ingest([fleet], tmp_path / "fleet", workers=1)
    steps = TableStore(tmp_path / "fleet").read("steps")
    most = dict(steps.group_by("run_id").agg(pl.col("scheduled_tokens").max()).iter_rows())
    assert most["b"] <= 60 < most["a"]
    assert bytes_of(tmp_path / "fleet") == _alone(fleet, tmp_path / "alone", bytes_of)
