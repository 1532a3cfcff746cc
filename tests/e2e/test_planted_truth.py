"""The fit finds the coefficients the generator was given."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import polars as pl
import pytest

import tracefit
from tracefit.synth import LinearLaw, SynthOptions, synth, write_run

if TYPE_CHECKING:
    from pathlib import Path

LAW = LinearLaw(
    intercept_us=7_000.0,
    per_prefill_token_us=26.0,
    per_decode_req_us=15.0,
    per_context_token_us=0.0,
    per_prefill_req_us=400.0,
)
FAST = tracefit.TrainOptions(fast=True)
TRUTH = {"prefill_tokens": 26.0, "num_decode_reqs": 15.0, "num_prefill_reqs": 400.0}
FEATURES = """
name: planted
features:
  - {name: prefill_tokens, unit: token, formula: prefill_tokens}
  - {name: num_prefill_reqs, unit: request, formula: num_prefill_reqs}
  - {name: num_decode_reqs, unit: request, formula: num_decode_reqs}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duration", "step_sampling"),
    [
        ("schedule", 0.1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(("schedule", "step"), (1.0, 0.1, 0.0))
            if case != ("schedule", 0.1)
        ),
    ],
)
def test_planted_coefficients_are_recovered_within_their_noise(
    tmp_path: Path, duration: str, step_sampling: float
) -> None:
    options = SynthOptions(
        name="planted",
        seed=21,
        # Where durations are the step times only sampled steps tell: enough of them must hold a prompt.
        requests=2_000 if duration == "step" and step_sampling == 0.1 else 400,
        law=LAW,
        duration=duration,
        step_sampling=step_sampling,
    )
    folder = write_run(synth(options), tmp_path / "runs")
    declared = tmp_path / "planted.yaml"
    declared.write_text(FEATURES)
    tracefit.run([folder], tmp_path / "out", options=replace(FAST, features=str(declared)))
    model = json.loads((tmp_path / "out/models/beta.json").read_text())["models"][0]
    durations_are_step_times = duration == "step" and step_sampling > 0
    assert model["target"]["source"] == ("duration" if durations_are_step_times else "step_clock")
    found = {t["feature"]: t for t in model["terms"]}
    assert found.keys() == TRUTH.keys()
    for name, truth in TRUTH.items():
        low, high = found[name]["ci95"]
        assert abs(found[name]["value"] - truth) <= 2 * (high - low) / 2, name
        assert high - low < 1.5 * truth, f"{name}: an interval this wide finds nothing"
    assert model["intercept"]["value"] == pytest.approx(7_000.0, rel=0.005)


@pytest.mark.slow
def test_the_hold_out_error_is_the_noise_that_was_put_in(tmp_path: Path) -> None:
    folder = write_run(synth(SynthOptions(name="noisy", seed=22, requests=400, law=LAW)), tmp_path)
    result = tracefit.run([folder], tmp_path / "out", options=FAST)
    beta = next(m for m in result.trained.fitted if m.name == "beta.cycle_time")
    # The mean of |exp(N(0, 0.03)) - 1| is 0.03 * sqrt(2 / pi) = 2.39 %.
    assert beta.holdout_mape_pct == pytest.approx(2.39, abs=0.3)


@pytest.mark.slow
def test_the_step_clock_gives_the_generators_own_step_times(tmp_path: Path) -> None:
    run = synth(SynthOptions(name="clock", seed=23, requests=100))
    folder = write_run(run, tmp_path / "runs")
    tracefit.ingest([folder], tmp_path / "tables")
    timeline = pl.read_parquet(tmp_path / "tables/timeline/run_id=clock/*.parquet")
    with gzip.open(folder / "truth_steps.csv.gz", "rt") as stream:
        truth = {int(row["step_id"]): float(row["cycle_us"]) for row in csv.DictReader(stream) if row["cycle_us"]}
    known = timeline.filter(pl.col("cycle_us").is_not_null() & ~pl.col("idle_after"))
    assert known.height > 500
    for step, cycle in known.select("step_id", "cycle_us").iter_rows():
        assert cycle == pytest.approx(truth[step], abs=0.002)


@pytest.mark.slow
def test_admission_finds_the_api_work_and_the_boundary(tmp_path: Path) -> None:
    run = synth(SynthOptions(name="api", seed=24, requests=500))
    folder = write_run(run, tmp_path / "runs")
    tracefit.run([folder], tmp_path / "out", options=FAST)
    models = json.loads((tmp_path / "out/models/alpha.json").read_text())["models"]
    admission = next(m for m in models if m["name"] == "alpha.admission")
    assert admission["form"] == "boundary"
    work = admission["work"]["intercept"]["value"]
    per_token = sum(t["value"] for t in admission["work"]["terms"])
    truth = run.truth_requests.select(pl.col("api_work_us").mean(), pl.col("prompt_tokens").mean()).row(0)
    assert work + per_token * truth[1] == pytest.approx(truth[0], abs=200)
    entry = admission["validation"]
    assert entry["boundary_accuracy_pct"] >= 90
    assert entry["boundary_accuracy_pct"] >= entry["boundary_accuracy_without_work_pct"] + 3


@pytest.mark.slow
def test_the_queue_wait_has_two_regimes_when_blocks_are_short(tmp_path: Path) -> None:
    options = SynthOptions(name="short", seed=25, requests=700, num_blocks=500, phases=SynthOptions().phases)
    tracefit.run([write_run(synth(options), tmp_path)], tmp_path / "out", options=FAST)
    models = json.loads((tmp_path / "out/models/alpha.json").read_text())["models"]
    wait = next(m for m in models if m["name"] == "alpha.queue_wait")
    assert [r["name"] for r in wait["regimes"]] == ["queued", "free"]
    assert wait["regimes"][1]["when"] == {"any": None, "all": []}
    assert wait["validation"]["classifier"]["balanced_accuracy"] >= 0.98
    assert wait["validation"]["skill"] >= 0.6
