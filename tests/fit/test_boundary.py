"""The admission model with a step clock: mean residual cycle, bursts, and interpolated step starts."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

import tracefit
from tracefit.commands.deployments import deployments_of, load_deployment
from tracefit.features.sets import BUILT_IN, Feature
from tracefit.features.training import constants_of
from tracefit.fit import boundary, splits
from tracefit.fit.boundary import (
    admission_with_clock,
    clocks_of,
    fit_boundary,
    interpolated_clock,
    mean_residual,
)
from tracefit.fit.fitted import FitOptions, LinearFit
from tracefit.fit.splits import request_frame
from tracefit.fit.train import fit_linear
from tracefit.models.targets import target_named
from tracefit.reports.content import burst_line
from tracefit.tables.store import TableStore

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


@pytest.mark.parametrize(("cycles_ms", "residual_us"), [([10, 30], 12_500), ([20, 20], 10_000)])
def test_mean_residual_weights_cycles_by_their_length(cycles_ms, residual_us):
    """E[c^2] / (2 E[c]) = (10^2 + 30^2) / (2 * (10 + 30)) = 12.5 ms."""
    assert mean_residual(_timeline(cycles_ms), _until(1000)) == (residual_us, 1)


def test_a_cycle_with_idle_time_was_busy_for_a_median_cycle():
    # 10 + 10 ms and 10 of 80 ms: 30 of 100 ms.
    assert mean_residual(_timeline([10, 80, 10], idle=[1]), _until(1000)) == (5_000, 0.3)


def test_the_hold_out_does_not_count_to_the_mean_residual():
    assert mean_residual(_timeline([10, 30, 500]), _until(40)) == (12_500, 1)
    assert mean_residual(_timeline([10]), _until(0)) == (0, 0)


def test_the_expectation_is_published_with_its_error(trained):
    models = json.loads((trained / "models" / "alpha.json").read_text())["models"]
    admission = next(m for m in models if m["name"] == "alpha.admission")
    expected, work, offset = admission["expectation"], admission["work"], admission["offset"]["value"]
    wait = expected["busy_share"] * (expected["residual"]["value"] + offset)
    assert expected["intercept"]["value"] == pytest.approx(work["intercept"]["value"] + wait)
    rows = pl.read_parquet(f"{trained}/tables/alpha_training/*/*.parquet").filter(target="admission", split="holdout")
    errors = (rows["y"] - expected["intercept"]["value"]).abs()
    validation = admission["validation"]
    assert work["terms"] == []
    assert validation["by_group"]["expectation"]["mae"] == pytest.approx(errors.mean(), rel=1e-6)
    assert "| `alpha.admission`, expectation |" in (trained / "report.md").read_text()


@pytest.mark.slow
def test_bursts_are_named_and_do_not_move_the_api_work(tmp_path, new_traces, monkeypatch):
    """Thirty requests at once are named in the report; the work is that of the requests outside the burst."""
    trace = new_traces().load()
    spans = (one["scopeSpans"][0]["spans"][0] for one in trace.records)
    (span,) = (s for s in spans if s["name"] == "llm_core" and "'cmpl-40-0-00000000'" in str(s["attributes"]))
    at_us = (int(span["events"][0]["timeUnixNano"]) - BOOT_UNIX_NS) / 1e3
    step = 1 + (40 - 1) * 228 // 90
    for number in range(1_000, 1_030):
        trace.api(number, {"ARRIVED": at_us, "DEPARTED": at_us + 1_900})
        queued = at_us + 50 * (number - 999)
        done = {"finish.status": "aborted"}
        trace.core(number, [("QUEUED", queued, step), ("FINISHED", queued + 1, step, done)])
    tracefit.ingest([trace.write(tmp_path / "bursty")], tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    runs = store.read("runs")
    ((deployment, members),) = deployments_of(runs, "tables")
    # All of them are queued after the same time, which a line or a constant fits as well: this test needs the boundary.
    tables, features = load_deployment(store, members), BUILT_IN["admission"]
    rows = request_frame(tables, target_named("admission"), features, constants_of(deployment.context))
    linear = fit_linear(rows, features.features, FitOptions(drop_outliers=False, reference=False))
    fitted = fit_boundary(linear, tables.timeline)
    (burst,) = fitted.validation.bursts
    assert burst.requests == 25
    # Requests outside the burst were queued 100 us before their step: any work up to 1,100 us finds its start.
    assert 0 < fitted.work_us <= 1_100
    line = burst_line(fitted.validation.bursts)
    assert f"`bursty` {burst.from_s:.2f} to {burst.to_s:.2f} s: 25 requests" in line
    assert fitted.validation.n_features == linear.validation.n_features
    with monkeypatch.context() as patched:
        patched.setattr(boundary, "_work_of_idle", lambda *_: (0.5, 900.0))
        with_work = fit_boundary(linear, tables.timeline)
    # The file says how many terms its errors are of: those without a clock, and the work per prompt token.
    assert with_work.validation.n_features == linear.validation.n_features + 1


WORK_US, STEP_US = 1_000, 10_000


def _one_at_a_time(arrivals_us):
    """Admissions of an API process that takes 1 ms for each request, one after the other, before steps of 10 ms."""
    free, waits = 0, []
    for at in arrivals_us:
        free = max(free, at) + WORK_US
        waits.append(-(-free // STEP_US) * STEP_US - at)
    return waits


@pytest.mark.parametrize("way_back_us", [0, 3_000])
def test_a_request_in_a_burst_waits_for_earlier_ones(way_back_us):
    """Planted truth: 400 separate requests, every fifty of them followed by a burst of forty at once.

    The admission of a span without events ends when the first token is back, some time after QUEUED.
    """
    rng = np.random.default_rng(0)
    arrivals = []
    for k in range(400):
        arrivals.append(k * 100_000 + int(rng.integers(0, 40_000)))
        if k % 50 == 49:
            arrivals += [k * 100_000 + 50_500 + j for j in range(40)]
    admissions = np.array(_one_at_a_time(arrivals), dtype=float)
    rows = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "ts_ns": [at * 1_000 for at in arrivals],
            "queued_ns": (np.array(arrivals) + admissions.astype(int)) * 1_000,
            "y": admissions + way_back_us,
            "prompt_tokens": rng.integers(1, 500, len(arrivals)),
            "step_residual_us": None,
            "excluded_reason": None,
        },
        schema_overrides={"step_residual_us": pl.Float64, "excluded_reason": pl.String},
    ).sample(fraction=1, shuffle=True, seed=1)
    steps = range(max(arrivals) // STEP_US + 20)
    timeline = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "step_id": steps,
            "ts_start_ns": [k * STEP_US * 1_000 for k in steps],
            "start_sd_us": 0.0,
            "cycle_us": float(STEP_US),
            "interval_steps": 1,
            "idle_after": False,
        }
    )
    linear = fit_linear(
        splits.split_by_time(rows),
        [Feature("prompt_tokens", "token", "prompt_tokens")],
        FitOptions(drop_outliers=False, reference=False),
    )
    assert isinstance(linear, LinearFit)
    fitted = fit_boundary(linear, timeline)
    assert fitted is not None
    assert fitted.work_us == pytest.approx(WORK_US, abs=150)
    assert fitted.offset_us == pytest.approx(way_back_us)
    assert len(fitted.validation.bursts) == 8
    # Work that begins on arrival would find the first boundary for all forty of a burst, which nine of it get.
    assert fitted.validation.boundary_accuracy_pct > 95
    assert fitted.validation.by_group["burst"].mae < 0.05 * admissions[-40:].mean()


def _unknown_steps(idle_after=False):
    """Steps 1 to 6 of 10 ms; the starts of 1, 2, 5 and 6 are known; step 2 may end in idle time."""
    starts_ms = {1: 0, 2: 10, 5: 40, 6: 50}
    steps = range(1, 7)
    return pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "step_id": list(steps),
            "ts_start_ns": pl.Series([starts_ms[k] * MS if k in starts_ms else None for k in steps], dtype=pl.Int64),
            "start_sd_us": pl.Series([0.0] * 6),
            "idle_after": [idle_after and k == 2 for k in steps],
        }
    )


@pytest.mark.parametrize(("arrived_ms", "until_ms"), [(15, 5), (22, 8), (31, 9), (41, 9)])
def test_unknown_boundaries_are_spaced_evenly_between_known_ones(arrived_ms, until_ms):
    """A request waits for 20, 30, 40 and 50 ms: the first two starts are not in the trace."""
    rows = pl.DataFrame({"run_id": ["r"], "server": ["s"], "epoch": 0, "ts_ns": [arrived_ms * MS]})
    predicted, has_start = admission_with_clock(rows, clocks_of(_unknown_steps()), np.zeros(1), np.zeros(1), 0.0)
    assert (predicted[0], has_start[0]) == (until_ms * 1e3, True)


@pytest.mark.parametrize(
    ("wait_ms", "predicted_ms"),
    [
        pytest.param(0, 2, id="no request ahead, the step at 1.2 ms is its own"),
        pytest.param(1, 10, id="a request ahead has that step"),
    ],
)
def test_a_request_does_not_wait_for_the_step_it_starts(wait_ms, predicted_ms):
    """The engine is idle until a step starts 1.2 ms after the arrival; work is taken to last 2 ms."""
    starts = pl.Series([int(k * MS) for k in (0, 10, 21.2, 30, 40, 50)], dtype=pl.Int64)
    timeline = _unknown_steps(idle_after=True).with_columns(ts_start_ns=starts)
    rows = pl.DataFrame({"run_id": ["r"], "server": ["s"], "epoch": 0, "ts_ns": [20 * MS]})
    waits = np.array([wait_ms * 1e3])
    predicted, has_start = admission_with_clock(rows, clocks_of(timeline), waits, np.array([2e3]), 0.0)
    assert (predicted[0], has_start[0]) == (predicted_ms * 1e3, True)


def test_no_start_is_interpolated_across_idle_time():
    clock = interpolated_clock(_unknown_steps(idle_after=True))
    assert (clock["start"] / MS).to_list() == [0, 10, 40, 50]
    assert (interpolated_clock(_unknown_steps())["start"] / MS).to_list() == [0, 10, 20, 30, 40, 50]
