"""Load: what a run's models are worth beyond what they were trained on, in the file and in the report."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

import tracefit
from tracefit import TrainOptions, run
from tracefit.fit.holdout import with_load
from tracefit.fit.splits import FEW_ROWS
from tracefit.synth import LinearLaw, SynthOptions, surge_phases, synth, write_run


@pytest.fixture(scope="module")
def surge(tmp_path_factory):
    """Return the output of a run whose last 30 % carries three times the arrivals, by the roofline law."""
    folder = tmp_path_factory.mktemp("surge")
    options = SynthOptions(
        name="run", seed=1, requests=600, rate_per_s=20.0, law="roofline", phases=surge_phases(3),
        max_num_seqs=256, num_blocks=40_000,
    )  # fmt: skip
    run([write_run(synth(options), folder)], folder / "out", options=TrainOptions())
    return folder / "out"


def _beta(out):
    deployment = json.loads((out / "evaluation.json").read_text())["deployments"][0]
    (model,) = json.loads((out / "models" / "beta.json").read_text())["models"]
    return deployment, deployment["models"]["beta.cycle_time"], model


def _holdout(out):
    rows = pl.read_parquet(out / "tables" / "beta_training" / "**" / "*.parquet")
    return rows.filter((pl.col("split") == "holdout") & pl.col("excluded_reason").is_null())


@pytest.mark.slow
def test_the_peak_is_predicted_from_a_quiet_afternoon(surge):
    """The bound of the roofline law holds at three times the load; boosted trees do not know it."""
    deployment, entry, model = _beta(surge)
    assert model["feature_set"] == "roofline_max"
    assert entry["holdout"]["mape_pct"] <= 4.0
    assert entry["gradient_boosting"]["mape_pct"] > 1.2 * entry["holdout"]["mape_pct"]
    assert abs(deployment["summed_step_time"]["bias_pct"]) <= 4.0


@pytest.mark.slow
def test_the_bound_is_published_as_a_term_with_its_formula(surge):
    """Its ratio is that of the law's efficiencies, 0.75 of memory to 0.55 of compute, on a grid of quarter octaves."""
    _, _, model = _beta(surge)
    (bound,) = (t for t in model["terms"] if t["feature"] == "step_bound_us")
    assert bound["formula"].startswith("max(1.41421 * (prefill_compute_us + decode_compute_us), ")
    assert {"prefill_compute_us", "weight_read_us"} <= model["definitions"].keys()
    assert bound["sign"] == "non_negative"
    assert bound["value"] == pytest.approx(1 / 0.75, rel=0.1)
    step = {"batch": 30, "context": 400, "prefill": 512, "prefill_reqs": 1}
    answer = tracefit.load(surge / "models").predict_step(**step)
    assert 8_000 < answer.step.value_us < 30_000


@pytest.mark.slow
def test_errors_inside_and_outside_the_training_ranges_add_up(surge):
    _, entry, model = _beta(surge)
    holdout = _holdout(surge)
    outside = pl.any_horizontal(
        (pl.col(t["feature"]) < t["training_range"][0] * (1 - 1e-9))
        | (pl.col(t["feature"]) > t["training_range"][1] * (1 + 1e-9))
        for t in model["terms"]
    )
    counts = {name: errors["n"] for name, errors in entry["by_load"].items()}
    assert counts == {"inside": holdout.filter(~outside).height, "outside": holdout.filter(outside).height}
    assert counts["outside"] == entry["extrapolated_rows"] > FEW_ROWS
    total = sum(e["mae"] * e["n"] for e in entry["by_load"].values())
    assert total / holdout.height == pytest.approx(entry["holdout"]["mae"])


@pytest.mark.slow
def test_candidates_are_published_with_both_errors(surge):
    _, entry, model = _beta(surge)
    # The terms of a sum of rooflines are not all on these rows.
    offered = ["batch", "roofline_max", "batch+products", "line", "line+sizes"]
    assert [c["name"] for c in entry["candidates"]] == offered
    assert [c["name"] for c in entry["candidates"] if c["chosen"]] == [model["feature_set"]]
    assert all(c["inside_mae"] > 0 and c["beyond_mae"] > 0 and c["reason"] for c in entry["candidates"])


@pytest.mark.slow
def test_the_lower_half_of_the_load_predicts_the_upper(surge):
    _, entry, _ = _beta(surge)
    beyond = entry["load_extrapolation"]
    assert beyond["load"] == "running_tokens"
    steps = pl.read_parquet(surge / "tables" / "beta_training" / "**" / "*.parquet")
    assert beyond["n"] == pytest.approx(steps.height / 2, rel=0.1)
    assert beyond["mape_pct"] <= 1.25 * entry["by_load"]["inside"]["mape_pct"]
    assert beyond["mape_pct"] < beyond["gradient_boosting"]["mape_pct"]


@pytest.mark.slow
def test_the_report_draws_the_error_over_the_load(surge):
    _, entry, _ = _beta(surge)
    over = entry["error_over_load"]
    assert sum(b["holdout"]["n"] for b in over["bins"]) == entry["holdout"]["n"]
    assert over["bins"][-1]["high"] > over["training_range"][1]
    text = (surge / "report.md").read_text()
    assert "Errors of step times by load" in text
    assert "**Beyond the load:** trained on the lower half" in text
    assert "training range" in (surge / "report.html").read_text()


@pytest.mark.slow
def test_predictions_within_the_training_ranges_are_positive(surge):
    """Ten thousand random points of the box of all features, corners among them."""
    _, _, model = _beta(surge)
    rng = np.random.default_rng(0)
    low, high = np.array([t["training_range"] for t in model["terms"]]).T
    points = low + (high - low) * np.where(
        rng.random((10_000, 1)) < 0.5, rng.random((10_000, len(low))), rng.integers(0, 2, (10_000, len(low)))
    )
    predicted = model["intercept"]["value"] + points @ [t["value"] for t in model["terms"]]
    assert predicted.min() > 0


def test_load_is_running_tokens_or_requests():
    frame = pl.DataFrame(
        {
            "load_tokens": [100, 200, None, None],
            "load_requests": [1, 2, 3, 4],
            "excluded_reason": [None, None, "warm_up", None],
        }
    )
    rows, load = with_load(frame)
    assert (rows["load"].to_list(), load) == ([1, 2, 3, 4], "batch_requests")
    rows, load = with_load(frame.head(3))
    assert (rows["load"].to_list(), load) == ([100, 200, 0], "running_tokens")
    assert "load_tokens" not in rows.columns


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Return the output of a run with one step in ten traced."""
    folder = tmp_path_factory.mktemp("sparse")
    options = SynthOptions(name="run", seed=4, requests=300, law=LinearLaw(), step_sampling=0.1)
    run([write_run(synth(options), folder)], folder / "out", options=TrainOptions(fast=True))
    return folder / "out"


@pytest.mark.slow
def test_a_sparse_run_is_evaluated_on_its_intervals_too(sparse):
    _, entry, _ = _beta(sparse)
    holdout, equations = _holdout(sparse), entry["held_out_equations"]
    by_source = dict(holdout.group_by("source").len().iter_rows())
    assert by_source["adjacent"] < FEW_ROWS < by_source["interval"]
    assert equations["rows_by_source"] == by_source
    assert entry["holdout"]["n"] == equations["per_equation"]["n"] == holdout.height
    assert equations["per_step"]["n"] > 2 * holdout.height
    text = (sparse / "report.md").read_text()
    assert f"each (n = {holdout.height:,})" in text
    assert f"weighted by steps (n = {equations['per_step']['n']:,} steps)" in text


@pytest.mark.slow
def test_evaluated_rows_of_a_sparse_run_are_counted(sparse):
    deployment, entry, _ = _beta(sparse)
    (rows,) = (r for r in deployment["rows"] if r["model"] == "beta.cycle_time")
    assert rows["held_out"] == entry["holdout"]["n"]
