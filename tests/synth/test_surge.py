"""Surges and stamps of generated runs: what was asked for is what comes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit import UsageError
from tracefit.synth import SynthOptions, surge_phases, synth


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_surge_is_the_last_thirty_percent_of_the_time_at_so_many_times_the_rate(factor):
    options = SynthOptions(requests=4_000, rate_per_s=200.0, phases=surge_phases(factor), seed=5)
    arrivals = np.sort(synth(options).truth_requests["arrival_ns"].to_numpy())
    steady = round(4_000 * 0.7 / (0.7 + 0.3 * factor))
    first, rest = arrivals[:steady], arrivals[steady:]
    span = arrivals[-1] - arrivals[0]
    assert (first[-1] - first[0]) / span == pytest.approx(0.7, abs=0.04)
    rates = [len(part) / (part[-1] - part[0]) for part in (first, rest)]
    assert rates[1] / rates[0] == pytest.approx(factor, rel=0.12)


def test_a_surge_of_nothing_is_refused():
    with pytest.raises(UsageError, match="above 0"):
        surge_phases(0)


def test_requests_queued_at_arrival_wait_for_the_same_step():
    """The stamp moves back to the end of the API work; what is scheduled, and when, stays as it was."""
    truth = {
        stamp: synth(SynthOptions(requests=80, seed=2, queued_stamp=stamp)).truth_requests
        for stamp in ("step_start", "arrival")
    }
    late, early = truth["step_start"], truth["arrival"]
    scheduled = [c for c in late.columns if "scheduled" in c]
    assert scheduled
    assert late.select(scheduled).equals(early.select(scheduled))
    moved = (late["queued_ns"] - early["queued_ns"]).drop_nulls()
    assert (moved >= 0).all()
    assert moved.median() > 1_000_000
    work = early.select((pl.col("queued_ns") - pl.col("arrival_ns")) / 1e3).to_series().drop_nulls()
    assert 1_000 < work.median() < 2_500


def test_an_unknown_stamp_is_refused():
    with pytest.raises(UsageError, match="unknown stamp"):
        synth(SynthOptions(queued_stamp="later"))
