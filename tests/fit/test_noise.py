"""Machines of planted noise: steps of equal batches whose times are log-normal."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.fit.noise import machine_noise

NORMAL_MEDIAN, NORMAL_P90, NORMAL_MEAN = 0.6745, 1.6449, 0.7979
"""Quantiles and mean of the absolute value of a standard normal number."""


def steps(count=4_000, *, sd=0.1, every_s=0.5, seed=0, drift=0.0, same_batch=True):
    rng = np.random.default_rng(seed)
    reqs = rng.integers(1, 4, count)
    seconds = every_s * np.arange(count)
    logs = np.log(10_000 + 2_000 * reqs) + sd * rng.standard_normal(count) + drift * seconds
    return pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "ts_ns": (1e9 * seconds).astype(np.int64),
            "y": np.exp(logs),
            "interval_steps": 1,
            "num_decode_reqs": reqs.astype(float) if same_batch else np.arange(count, dtype=float),
            "num_prefill_reqs": 0.0,
            "context_tokens": 100.0 * reqs,
            "excluded_reason": pl.Series([None] * count, dtype=pl.String),
        }
    )


@pytest.mark.parametrize("sd", [0.02, 0.1])
def test_the_noise_is_that_of_a_model_that_knows_every_batch(sd):
    found = machine_noise(steps(sd=sd))
    assert found.pairs > 3_000
    expected = (
        100 * (1 - np.exp(-sd * NORMAL_MEDIAN)),
        100 * (1 - np.exp(-sd * NORMAL_P90)),
        100 * sd * NORMAL_MEAN,
    )
    assert (found.mdape_pct, found.p90_ape_pct, found.mape_pct) == pytest.approx(expected, rel=0.08)


def test_a_slow_change_of_the_machine_is_not_noise():
    """Its speed changes by half over the run, and by little within seconds."""
    still, moving = (machine_noise(steps(drift=drift)).mdape_pct for drift in (0.0, 0.4 / 2_000))
    assert moving == pytest.approx(still, rel=0.02)


def test_a_stall_of_one_step_counts_once():
    rows = steps(sd=0.02)
    stalled = rows.with_columns(y=pl.when(pl.int_range(pl.len()) % 100 == 0).then(100 * pl.col("y")).otherwise("y"))
    # One step in a hundred is at most wholly off, in two pairs.
    assert machine_noise(stalled).mape_pct < machine_noise(rows).mape_pct + 2.1


@pytest.mark.parametrize(
    "rows",
    [
        steps(40),
        steps(same_batch=False),
        steps().with_columns(ts_ns=pl.lit(None, pl.Int64)),
        steps().drop("num_decode_reqs"),
        steps().with_columns(excluded_reason=pl.lit("warm_up")),
        steps(every_s=60.0),
    ],
    ids=["few", "no equal batches", "no times", "no batches", "left out", "far apart"],
)
def test_noise_that_does_not_show_is_unknown(rows):
    assert machine_noise(rows) is None
