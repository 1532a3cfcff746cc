"""The sum of step times over the hold-out and how far chance moves it."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
import pytest
from scipy.signal import lfilter

from tracefit import TrainOptions, run
from tracefit.coefficients.files import read_evaluation
from tracefit.features.sets import Feature
from tracefit.fit.fitted import FitOptions, LinearFit
from tracefit.fit.holdout import block_length, speed_change, summed_holdout, summed_time
from tracefit.fit.results import SummedTime
from tracefit.fit.train import fit_linear
from tracefit.reports.content import summed_line
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.text import percent


def test_bias_is_of_the_sums():
    summed = summed_time(np.array([10.0, 20, 30]), np.array([10.0, 10, 30]), np.arange(3))
    assert (summed.predicted_us, summed.actual_us, summed.blocks) == (60, 50, 3)
    assert summed.bias_pct == pytest.approx(20)


def test_the_largest_error_is_given_as_a_part_of_the_bias():
    """400 are measured: 100 steps of 1, one predicted as 2, and one hiccup of 300, predicted as 100: -50 points."""
    actual = np.r_[np.ones(100), 300.0]
    predicted = np.r_[2.0, np.ones(99), 100.0]
    summed = summed_time(predicted, actual, np.arange(101) // 10)
    assert summed.bias_pct == pytest.approx(-49.75)
    assert summed.max_contribution_pct == pytest.approx(-50)


def test_a_constant_bias_has_no_spread():
    actual = np.random.default_rng(0).uniform(1, 9, 600)
    summed = summed_time(1.07 * actual, actual, np.arange(600) // 30)
    assert summed.bias_pct == pytest.approx(7)
    assert summed.bias_2sd_pct == pytest.approx(0, abs=1e-9)


def test_the_spread_is_that_of_independent_draws():
    """The bias of n steps of noise s has a standard deviation of 100 s / sqrt(n) percent, over runs of the noise."""
    rng = np.random.default_rng(1)
    runs = [1_000 * (1 + 0.2 * rng.standard_normal(2_000)) for _ in range(40)]
    spreads = [summed_time(np.full(2_000, 1_000.0), y, np.arange(2_000) // 50).bias_2sd_pct for y in runs]
    assert np.mean(spreads) == pytest.approx(2 * 100 * 0.2 / np.sqrt(2_000), rel=0.1)


def test_drift_within_blocks_widens_it():
    steps = np.arange(2_000)
    slow = 1_000 * (1 + 0.2 * np.sign(np.sin(steps / 100)))
    quick = 1_000 * (1 + 0.2 * np.where(steps % 2, 1, -1))
    wide, narrow = (summed_time(np.full(2_000, 1_000.0), y, steps // 100) for y in (slow, quick))
    assert wide.bias_2sd_pct > 5 * narrow.bias_2sd_pct


@pytest.mark.parametrize("r", [0.5, 0.8])
def test_blocks_are_as_long_as_an_autoregression_asks_for(r):
    """For x_t = r x_{t-1} + e_t: b = (6 r^2 / (1 - r^2)^2 n)^(1/3), from R(k) = r^k put into the formula by hand."""
    n = 5_000
    noise = (np.random.default_rng(seed).standard_normal(n) for seed in range(10))
    lengths = [block_length(lfilter([1], [1, -r], series)) for series in noise]
    assert np.median(lengths) == pytest.approx(np.cbrt(6 * r**2 / (1 - r**2) ** 2 * n), rel=0.25)


def test_noise_needs_short_blocks_and_a_drift_long_ones():
    noise = np.random.default_rng(0).standard_normal(5_000)
    assert block_length(noise) <= 5
    drift = np.linspace(-9, 9, 5_000)
    # Autocorrelation that does not end within sqrt(n) = 71 lags and 5 more: the formula's sums over R(k) = 1.
    assert 71 < block_length(drift + noise) <= 3 * np.sqrt(5_000) + 1
    assert block_length(np.ones(40)) == block_length(noise[:4]) == 1


def test_the_spread_of_the_same_rows_is_the_same():
    y = np.random.default_rng(2).uniform(1, 9, 300)
    one, other = (summed_time(np.full(300, 5.0), y, np.arange(300) // 30) for _ in range(2))
    assert one == other


def test_a_sum_of_no_time_has_no_bias():
    assert summed_time(np.ones(3), np.zeros(3), np.arange(3)) is None


def test_the_evaluation_and_the_report_give_the_bias(trained):
    deployment = json.loads((trained / "evaluation.json").read_text())["deployments"][0]
    summed = deployment["summed_step_time"]
    holdout = pl.read_parquet(f"{trained}/tables/beta_training/*/*.parquet").filter(
        pl.col("split") == "holdout", pl.col("excluded_reason").is_null()
    )
    assert summed["actual_us"] == pytest.approx(holdout["y"].sum())
    assert summed["bias_pct"] == pytest.approx(deployment["models"]["beta.cycle_time"]["holdout"]["bias_pct"])
    text = (trained / "report.md").read_text()
    assert f"measured {summed['actual_us'] / 1e6:,.2f} s, bias {summed['bias_pct']:+.2f} %" in text
    assert f"interval with the largest error contributes {summed['max_contribution_pct']:+.2f} points" in text


def _drifting(change, rows=400, law=lambda batch: 1_000 + 10 * batch):
    """A fitted model of 1000 + 10 batch, and rows whose held-out ones take `change` times as long."""
    rng = np.random.default_rng(7)
    batch = np.concatenate([rng.integers(1, 40, rows), rng.integers(10, 60, rows)])
    late = np.repeat([1.0, change], rows)
    frame = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "step_id": np.arange(2 * rows),
            "interval_steps": 1,
            "cycle_sd_us": 0.0,
            "ts_ns": np.arange(2 * rows),
            "batch": batch,
            "y": law(batch) * late * np.exp(rng.normal(0, 0.02, 2 * rows)),
            "split": np.repeat(["train", "holdout"], rows),
            "excluded_reason": pl.Series([None] * 2 * rows, dtype=pl.String),
        }
    )
    fitted = fit_linear(frame, [Feature("batch", "request", "batch")], FitOptions(reference=False))
    assert isinstance(fitted, LinearFit)
    return fitted


@pytest.mark.parametrize("change", [0.9, 1.0, 1.08])
def test_a_change_of_the_machine_is_measured_at_equal_batches(change):
    """The hold-out has larger batches too: they do not count as a slower machine."""
    blocks = np.arange(400) // 20
    speed, two_sd = speed_change(_drifting(change), blocks, blocks)
    assert speed == pytest.approx(100 * (change - 1), abs=0.6)
    # The level of 400 rows with 2 % noise: 1.25 times its standard error, once for each part.
    assert two_sd == pytest.approx(2 * 1.25 * 2 / np.sqrt(400) * np.sqrt(2), rel=0.4)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(("change", "drifting"), [(0.9, True), (1.0, False), (1.01, False), (1.08, True)])
def test_only_a_change_of_speed_is_a_drift(change, drifting):
    """Batches of the hold-out are larger by 15 requests on average, (1000 + 350) / (1000 + 200): a change of load."""
    summed = summed_holdout(_drifting(change))
    assert summed.drifting is drifting
    assert summed.load_change_pct == pytest.approx(12.5, abs=2)
    assert summed.bias_pct == pytest.approx(100 * (1 / change - 1), abs=0.6)


def test_a_bias_of_the_model_is_no_change_of_the_server():
    """A straight line through the square root of the batch: far off at batches it never saw, at the same speed as
    ever."""
    fitted = _drifting(1.0, law=lambda batch: 1_000 + 400 * np.sqrt(batch))
    summed = summed_holdout(fitted)
    assert abs(summed.bias_pct) > summed.bias_2sd_pct, "the sum is off beyond chance"
    assert not summed.drifting


def test_few_known_steps_of_a_server_are_scaled_up_to_all():
    """Ten steps of 1,000 us of one server are known of a hundred, and a hundred of 500 us of the other: 100 ms and 50
    ms."""
    fitted = _drifting(1.0)
    holdout = fitted.rows.filter(split="holdout").head(110)
    two = holdout.with_columns(
        server=pl.Series(["sampled"] * 10 + ["full"] * 100),
        step_id=pl.Series([*range(0, 100, 10), *range(100)]),
        y=pl.Series([1_000.0] * 10 + [500.0] * 100),
    )
    # The last known step of a sample ends it: steps 0 to 90.
    rows = pl.concat([fitted.rows.filter(split="train"), two.cast(fitted.rows.schema)])
    summed = summed_holdout(msgspec.structs.replace(fitted, rows=rows))
    assert summed.actual_us == pytest.approx(91 * 1_000 + 100 * 500)
    assert summed.steps_known_pct == pytest.approx(100 * 110 / 191)


def test_bias_speed_and_load_are_three_statements():
    entry = {"actual_us": 100e6, "blocks": 40, "max_contribution_pct": 0.1, "load_change_pct": -14.7}
    off = SummedTime(
        predicted_us=93e6,
        bias_pct=-7.0,
        bias_2sd_pct=2.0,
        speed_change_pct=7.9,
        speed_change_2sd_pct=1.2,
        drifting=True,
        **entry,
    )
    assert "bias -7.00 %" in summed_line(off)
    assert "**The server changed:** steps of equal batches take 7.9 % longer" in summed_line(off)
    assert "a step of the hold-out takes 14.7 % shorter" in summed_line(off)
    right = replace(off, speed_change_pct=-0.35, drifting=False)
    assert "changed:" not in summed_line(right)
    assert "no change beyond chance; steps of equal batches take 0.35 % shorter" in summed_line(right)


@pytest.mark.slow
def test_a_full_and_a_sampled_run_have_one_sum_of_step_times(tmp_path):
    """One law made both, so that the sum is right; of the sampled run most steps, and the contexts of all, are
    unknown."""
    runs = [
        SynthOptions(name="full", seed=1, requests=200),
        SynthOptions(name="sampled", seed=2, requests=200, step_sampling=0.5, journey_sampling=0.1),
    ]
    run([write_run(synth(options), tmp_path) for options in runs], tmp_path / "out", options=TrainOptions())
    deployment = read_evaluation(tmp_path / "out" / "evaluation.json").deployments[0]
    bias = deployment.summed_step_time.bias_pct
    assert abs(bias) < 1
    assert not deployment.summed_step_time.drifting
    used = [c.value for v in deployment.verdicts.values() for c in v.criteria if c.measure == "step_bias_pct"]
    assert used == [abs(bias)] * 3, "simulation, capacity planning and autoscaling"
    text = (tmp_path / "out" / "report.md").read_text()
    # The table of errors has ten columns.
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `beta.cycle_time` |")]
    assert [row[6] for row in rows if len(row) == 10] == [percent(bias)]
