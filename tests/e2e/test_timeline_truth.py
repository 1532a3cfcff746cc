"""The timeline against the generator's own: batches inferred from only the journeys, and models trained on few
steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

import tracefit
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore
from tracefit.timeline import EngineLimits, build_timeline

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = EngineLimits(max_num_batched_tokens=2_048, max_num_seqs=64)
COUNTS = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens")


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "least"), [pytest.param(4_097, 0.995, marks=pytest.mark.slow), (400, 0.97)])
def test_composition_follows_from_the_journeys_alone(tmp_path: Path, num_blocks: int, least: float) -> None:
    run = synth(SynthOptions(seed=41, requests=500, num_blocks=num_blocks))
    assert (run.truth_steps["num_preempted"].sum() > 0) == (num_blocks == 400)
    tracefit.ingest([write_run(run, tmp_path / "runs")], tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    steps, snapshots, journeys = (store.read(n) for n in ("steps", "request_snapshots", "journey_events"))
    inferred = build_timeline(steps.clear(), snapshots, journeys, LIMITS, journeys_complete=True)
    both = run.truth_steps.join(inferred, on=["epoch", "step_id"], how="inner", suffix="_inferred")
    assert both.height >= run.truth_steps.height - 1
    agrees = pl.all_horizontal(pl.col(c) == pl.col(f"{c}_inferred") for c in (*COUNTS, "context_tokens"))
    assert both.select(agrees.mean()).item() >= least


@pytest.mark.slow
def test_few_steps_or_none_train_as_good_a_model_as_all(tmp_path: Path) -> None:
    errors = {}
    for sampling in (1.0, 0.01, 0.0):
        run = synth(SynthOptions(name=f"at-{sampling}", seed=44, requests=400, step_sampling=sampling))
        out = tmp_path / f"out-{sampling}"
        options = tracefit.TrainOptions(features="batch", fast=True)
        tracefit.run([write_run(run, tmp_path / "runs")], out, options=options)
        errors[sampling] = _error_on_every_step(out / "models/beta.json", tmp_path / "out-1.0/tables")
    assert errors[0.01] <= 1.1 * errors[1.0]
    assert errors[0.0] <= 1.1 * errors[1.0]


def _error_on_every_step(model: Path, full: Path) -> float:
    """Mean absolute error of a written model on the held-out steps of the run that was traced in full."""
    beta = json.loads(model.read_text())["models"][0]
    rows = TableStore(full).read("beta_training")
    held = rows.filter((pl.col("split") == "holdout") & pl.col("excluded_reason").is_null())
    terms = [pl.col(t["feature"]) * t["value"] for t in beta["terms"]]
    predicted = pl.sum_horizontal(terms) + beta["intercept"]["value"]
    return float(held.select((predicted - pl.col("y")).abs().mean()).item())
