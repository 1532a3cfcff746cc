"""What is left of a step in progress on the average, by hand and from the published file."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit.fit.boundary import mean_residual

MS = 1_000_000


def _timeline(cycles_ms, *, idle=()):
    """Steps with the given cycles, one after another; those in `idle` hold idle time."""
    starts = [sum(cycles_ms[:k]) for k in range(len(cycles_ms))]
    return pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_start_ns": [at * MS for at in starts],
            "cycle_us": [c * 1e3 for c in cycles_ms],
            "interval_steps": 1,
            "idle_after": [k in idle for k in range(len(cycles_ms))],
        }
    )


def _until(ms):
    return pl.DataFrame({"run_id": ["r"], "server": ["s"], "holdout_from_ns": [ms * MS]})


def test_a_moment_falls_into_a_long_cycle_more_often_and_half_of_it_is_left():
    # E[c^2] / (2 E[c]) = (10^2 + 30^2) / (2 * (10 + 30)) = 12.5 ms.
    assert mean_residual(_timeline([10, 30]), _until(1000)) == (12_500, 1)
    assert mean_residual(_timeline([20, 20]), _until(1000)) == (10_000, 1)


def test_of_a_cycle_with_idle_time_a_median_one_was_busy():
    # 10 + 10 ms and 10 of 80 ms: 30 of 100 ms.
    assert mean_residual(_timeline([10, 80, 10], idle=[1]), _until(1000)) == (5_000, 0.3)


def test_the_hold_out_says_nothing():
    assert mean_residual(_timeline([10, 30, 500]), _until(40)) == (12_500, 1)
    assert mean_residual(_timeline([10]), _until(0)) == (0, 0)


def test_the_expectation_is_exported_and_its_error_stands_beside_the_clocks(trained):
    models = json.loads((trained / "models" / "alpha.json").read_text())["models"]
    admission = next(m for m in models if m["name"] == "alpha.admission")
    expected, work, offset = admission["expectation"], admission["work"], admission["offset"]["value"]
    wait = expected["busy_share"] * (expected["residual"]["value"] + offset)
    assert expected["intercept"]["value"] == pytest.approx(work["intercept"]["value"] + wait)
    rows = pl.read_parquet(f"{trained}/tables/alpha_training/*/*.parquet").filter(
        target="admission", split="holdout"
    )
    errors = (rows["y"] - expected["intercept"]["value"]).abs()
    validation = admission["validation"]
    assert work["terms"] == []
    assert validation["by"]["expectation"]["mae"] == pytest.approx(errors.mean(), rel=1e-6)
    assert "| `alpha.admission`, expectation |" in (trained / "report.md").read_text()
