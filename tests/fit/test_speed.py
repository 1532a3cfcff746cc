"""Machines of planted speed: a step takes 10 ms and 1 ms per request, times the speed of its stretch of 30 s."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.features.sets import Feature
from tracefit.fit.fitted import FitOptions
from tracefit.fit.speed import SPEED, with_speed
from tracefit.fit.train import fit_linear

BATCH = (Feature("num_decode_reqs", "request", "num_decode_reqs"),)
PER_STRETCH = 200


def recorded(batches, speeds, *, noise=0.02, seed=0, times=True):
    """Return steps of stretches whose batch is drawn up to some size, at some speed; the last 30 % are held out."""
    rng = np.random.default_rng(seed)
    reqs = np.concatenate([rng.integers(1, most + 1, PER_STRETCH) for most in batches]).astype(float)
    speed = np.repeat(speeds, PER_STRETCH)
    count = len(reqs)
    y = (10_000 + 1_000 * reqs) * speed * np.exp(noise * rng.standard_normal(count))
    ts_ns = (30e9 * np.arange(count) / PER_STRETCH).astype(np.int64)
    return pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "step_id": np.arange(count),
            "ts_ns": ts_ns if times else pl.Series([None] * count, dtype=pl.Int64),
            "y": y,
            "interval_steps": 1,
            "cycle_sd_us": 0.0,
            "has_prefill": False,
            "num_decode_reqs": reqs,
            "split": np.where(np.arange(count) < 0.7 * count, "train", "holdout"),
            "excluded_reason": pl.Series([None] * count, dtype=pl.String),
        }
    )


def slope(rows):
    (term,) = fit_linear(rows, BATCH, FitOptions()).regimes[0].terms
    return term.value


SLOW_WHILE_BUSY = ([3, 12, 3, 3, 12, 3, 3, 12, 3, 12], [1.0, 1.3, 1.0, 1.0, 1.3, 1.0, 1.0, 1.0, 1.2, 0.9])


@pytest.mark.slow
def test_a_machine_that_is_slow_while_it_is_busy_does_not_make_a_request_dear():
    rows = recorded(*SLOW_WHILE_BUSY)
    adjusted, found = with_speed(rows, BATCH)
    assert slope(rows) > 1_250, "the plain fit gives large batches what the machine lost"
    # The slope is that at the mean speed of the training part.
    mean = float(np.exp(np.mean(np.log(SLOW_WHILE_BUSY[1][:7]))))
    assert slope(adjusted) == pytest.approx(1_000 * mean, rel=0.04)
    assert found.adjusted
    assert found.stretches == 10


def test_speeds_are_those_that_were_planted():
    speeds = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.0, 0.8, 1.2, 1.0])
    adjusted, found = with_speed(recorded([8] * 10, speeds), BATCH)
    mean = float(np.exp(np.mean(np.log(speeds[:7]))))
    by_stretch = adjusted[SPEED].to_numpy().reshape(10, PER_STRETCH).mean(axis=1)
    assert by_stretch == pytest.approx(speeds / mean, rel=0.02)
    assert found.sd_pct == pytest.approx(100 * np.sqrt(np.mean(np.log(speeds / mean) ** 2)), rel=0.05)
    ends = (found.fastest_pct, found.slowest_pct, found.holdout_pct)
    assert ends == pytest.approx((-20, 20, 100 * (np.exp(np.mean(np.log([0.8, 1.2, 1.0]))) - 1)), abs=1.5)


def test_a_machine_of_one_speed_keeps_its_times():
    adjusted, found = with_speed(recorded([3, 12] * 5, [1.0] * 10, noise=0.3), BATCH)
    assert not found.adjusted
    assert found.sd_pct < 2
    assert adjusted[SPEED].unique().to_list() == [1.0]


def test_a_load_that_one_stretch_has_looks_like_a_batch():
    """Nothing tells whether a batch of 20 or the machine made this stretch long: it stays with the batch."""
    rows = recorded([3, 3, 3, 3, 3, 3], [1.0] * 6)
    batch = pl.when(pl.col("step_id") // PER_STRETCH == 2).then(20.0).otherwise("num_decode_reqs")
    time = pl.when(pl.col("step_id") // PER_STRETCH == 2).then(60_000.0).otherwise("y")
    adjusted, _ = with_speed(rows.with_columns(num_decode_reqs=batch, y=time), BATCH)
    third = adjusted.filter(pl.col("step_id") // PER_STRETCH == 2)
    assert third[SPEED].to_numpy() == pytest.approx(1.0, abs=0.03)


def test_few_stretches_say_nothing_of_the_machine():
    adjusted, found = with_speed(recorded([8] * 3, [1.0, 1.3, 0.8]), BATCH)
    assert found is None
    assert adjusted[SPEED].unique().to_list() == [1.0]


def test_a_training_part_of_short_stretches_says_nothing_of_the_machine():
    """40 training rows are in stretches of 5, and only the hold-out has stretches of more."""
    rows = recorded([8] * 6, [1.0] * 6)
    early = rows.head(40).with_columns(ts_ns=(30e9 * pl.int_range(40) / 5).cast(pl.Int64))
    late = rows.tail(-40).with_columns(ts_ns=pl.col("ts_ns") + 300_000_000_000, split=pl.lit("holdout"))
    adjusted, found = with_speed(pl.concat([early, late]), BATCH)
    assert found is None
    assert adjusted[SPEED].unique().to_list() == [1.0]


def test_steps_without_times_are_in_stretches_of_busy_time():
    rows = recorded([8] * 10, [1.0] * 10, times=False).with_columns(y=10 * pl.col("y"))
    _, found = with_speed(rows, BATCH)
    assert found.stretches == pytest.approx(rows["y"].sum() / 30e6, abs=1)


def test_rows_that_are_left_out_have_no_say():
    rows = recorded([8] * 6, [1.0] * 6)
    idle = pl.col("step_id") % 3 > 0
    left_out = rows.with_columns(
        y=pl.when(idle).then(100 * pl.col("y") * (1 + pl.col("step_id") // PER_STRETCH)).otherwise("y"),
        excluded_reason=pl.when(idle).then(pl.lit("idle_gap")),
    )
    assert not with_speed(left_out, BATCH)[1].adjusted
