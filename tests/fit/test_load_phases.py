"""Workload phases: where the arrival rate of a run changes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.fit.load import find_phases, with_phases
from tracefit.models.validation import Phase


def _arrivals(*periods):
    """Arrivals, evenly spaced, of periods of (seconds, per second)."""
    gaps = np.concatenate([np.full(round(seconds * rate), 1 / rate) for seconds, rate in periods])
    return np.concatenate([[0.0], np.cumsum(gaps)])


def _frame(at_s):
    at_ns = pl.Series(np.round(np.asarray(at_s) * 1e9) + 5, dtype=pl.Int64)
    return pl.DataFrame({"at_ns": at_ns}).with_columns(run_id=pl.lit("run"), server=pl.lit("server"))


def _phases(arrivals_s):
    return tuple(Phase(**row) for row in find_phases(_frame(arrivals_s)).drop("from_ns").to_dicts())


def test_a_run_is_cut_where_its_rate_changes():
    quiet, busy, after = _phases(_arrivals((60, 2), (30, 9), (50, 2)))
    assert (quiet.from_s, quiet.to_s) == pytest.approx((0, 60), abs=0.6)
    assert (busy.from_s, busy.to_s) == pytest.approx((60, 90), abs=0.6)
    assert after.to_s == pytest.approx(140)
    assert [p.arrivals_per_s for p in (quiet, busy, after)] == pytest.approx([2, 9, 2], rel=0.03)
    assert sum(p.requests for p in (quiet, busy, after)) == 120 + 270 + 100 + 1


@pytest.mark.parametrize("rate", [1, 5, 20])
def test_a_steady_run_is_one_phase(rate):
    gaps = np.random.default_rng(rate).exponential(1 / rate, 600)
    arrivals = np.cumsum(gaps) - gaps[0]
    (phase,) = _phases(arrivals)
    assert (phase.from_s, phase.to_s, phase.requests) == (0, pytest.approx(arrivals[-1]), 600)


@pytest.mark.parametrize(("arrivals_s", "phases"), [(_arrivals((2, 2), (2, 9)), 1), (np.zeros(1), 1), (np.zeros(0), 0)])
def test_few_requests_are_one_phase(arrivals_s, phases):
    assert len(_phases(arrivals_s)) == phases


def test_requests_fall_into_the_phase_that_began_before_them():
    arrivals = _arrivals((60, 2), (30, 9))
    cut = _phases(arrivals)[1].from_s
    rows = _frame([-1.0, 30.0, cut, cut + 1, 90.0])
    phase_of = with_phases(rows, "at_ns", _frame(arrivals))["phase"]
    assert phase_of.struct["from_s"].to_list() == [0, 0, cut, cut, cut]
    other = rows.with_columns(server=pl.lit("another"))
    assert with_phases(other, "at_ns", _frame(arrivals))["phase"].null_count() == 5


def test_a_run_has_sixteen_phases_at_most():
    changing = _phases(_arrivals(*[(20, rate) for _ in range(40) for rate in (2, 20)]))
    assert 4 <= len(changing) <= 16


def test_a_hundred_thousand_arrivals_at_once_are_cut_fast():
    assert len(_phases(np.sort(np.random.default_rng(0).choice([0.0, 7.0, 50.0], 100_000)))) <= 16
