"""Errors of step times by workload phase: planted loads, one of them absent from the training part."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.fitted import FitOptions
from tracefit.fit.holdout import errors_by_phase
from tracefit.fit.train import fit_linear

SECOND = 1_000_000_000


def _steps():
    """Ten steps a second for 120 s; from 90 s on, in the middle of the hold-out, each takes a fifth longer."""
    at = np.arange(1_200) / 10
    x = np.random.default_rng(0).random(1_200)
    frame = {"run_id": "r", "server": "s", "ts_ns": (at * SECOND).astype(np.int64), "x": x}
    y = (1_000 + 500 * x) * np.where(at > 90, 1.2, 1.0)
    return splits.split_by_time(pl.DataFrame({**frame, "y": y, "excluded_reason": [None] * 1_200}))


def _requests(server="s"):
    """Two a second, and ten a second from 90 s on; one without an arrival."""
    arrivals = [*np.arange(0, 90, 0.5), *np.arange(90, 120, 0.1)]
    columns = {"arrival_ns": [round(at * SECOND) for at in arrivals], "queued_ns": None}
    frame = pl.DataFrame({"run_id": "r", "server": server, **columns}, schema_overrides={"queued_ns": pl.Int64})
    return pl.concat([frame, frame.head(1).with_columns(arrival_ns=pl.lit(None, pl.Int64))])


@pytest.fixture(scope="module")
def fitted():
    return fit_linear(_steps(), [Feature("x", "1", "x")], FitOptions(reference=False))


def test_each_phase_has_its_own_error(fitted):
    quiet, busy = errors_by_phase(fitted, _requests())
    assert (quiet.from_s, busy.from_s) == pytest.approx((0, 90), abs=0.5)
    # The hold-out begins at 84 s: 6 s of steps as trained on, 30 s that are predicted a sixth too short.
    assert (quiet.holdout.n, busy.holdout.n) == pytest.approx((60, 300), abs=5)
    assert quiet.holdout.mape_pct == pytest.approx(0, abs=0.5)
    assert busy.holdout.bias_pct == pytest.approx(-100 / 6, abs=0.5)
    assert quiet.baseline.mape_pct > 5


def test_a_server_without_requests_has_no_phases(fitted):
    few = errors_by_phase(fitted, _requests(), pl.col("x") < 0.5)
    assert sum(p.holdout.n for p in few) == fitted.rows.filter(pl.col("split") == "holdout", pl.col("x") < 0.5).height
    assert errors_by_phase(fitted, _requests("t")) == errors_by_phase(fitted, _requests().clear()) == ()


def test_step_times_and_latencies_have_the_same_phases(trained):
    deployment = json.loads((trained / "evaluation.json").read_text())["deployments"][0]
    steps = deployment["models"]["beta.cycle_time"]
    assert sum(p["holdout"]["n"] for p in steps["by_phase"]) == steps["holdout"]["n"]
    spans = {(p["from_s"], p["to_s"]) for p in deployment["latency"]["ttft"]["by_phase"]}
    assert spans & {(p["from_s"], p["to_s"]) for p in steps["by_phase"]}
