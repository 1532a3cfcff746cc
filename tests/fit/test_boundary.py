"""What is left of a step in progress on the average, by hand and from the published file."""

from __future__ import annotations

import json

import polars as pl
import pytest

import tracefit
from tracefit.fit.boundary import mean_residual

MS = 1_000_000
BOOT_UNIX_NS = 1_700_000_000_000_000_000


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


def test_bursts_are_outside_the_range_and_do_not_move_the_api_work(tmp_path, new_traces, quick):
    """Thirty requests at once are named in the report; the work is that of the requests that came alone."""
    trace = new_traces().load()
    alone = (one["scopeSpans"][0]["spans"][0] for one in trace.records)
    (span,) = (s for s in alone if s["name"] == "llm_core" and "'cmpl-40-0-00000000'" in str(s["attributes"]))
    at_us = (int(span["events"][0]["timeUnixNano"]) - BOOT_UNIX_NS) / 1e3
    step = 1 + (40 - 1) * 228 // 90
    for number in range(1_000, 1_030):
        trace.api(number, {"ARRIVED": at_us, "DEPARTED": at_us + 1_900})
        queued = at_us + 50 * (number - 999)
        done = {"finish.status": "aborted"}
        trace.core(number, [("QUEUED", queued, step), ("FINISHED", queued + 1, step, done)])
    tracefit.run([trace.write(tmp_path / "bursty")], tmp_path / "out")
    models = json.loads((tmp_path / "out/models/alpha.json").read_text())["models"]
    admission = next(m for m in models if m["name"] == "alpha.admission")
    (burst,) = admission["validation"]["bursts"]
    assert burst["requests"] == 25
    # Requests that came alone were queued 100 us before their step: any work up to 1,100 us finds its start.
    assert 0 < admission["work"]["intercept"]["value"] <= 1_100
    assert (
        f"`bursty` {burst['from_s']:.2f} to {burst['to_s']:.2f} s: 25 requests"
        in (tmp_path / "out/report.md").read_text()
    )
