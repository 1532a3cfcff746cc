"""Prediction intervals: what they are made of, and how often they hold a new observation."""

from __future__ import annotations

import numpy as np
import pytest

from designs import plain_design
from tracefit.fit.estimators import RobustLinear
from tracefit.fit.fitted import ANY_SIGN
from tracefit.fit.results import PenaltyChoice
from tracefit.fit.validation import coverage_pct, prediction_interval
from tracefit.models.validation import PredictionInterval

CHOICE = PenaltyChoice("ridge", 1e-6, 0.0, 5)


def test_limits_leave_a_fortieth_of_the_rows_on_each_side():
    """79 rows: the 2nd from below and the 2nd from above are at 2/80 and 78/80."""
    predicted = np.zeros(79)
    band = prediction_interval(predicted, np.random.default_rng(0).permutation(79) - 39.0)
    assert band.kind == "difference"
    assert (band.low, band.high) == pytest.approx((-38, 38))


@pytest.mark.parametrize(("relative", "kind"), [(True, "ratio"), (False, "difference")])
def test_the_kind_is_that_of_the_noise(relative, kind):
    rng = np.random.default_rng(0)
    predicted = rng.uniform(1000, 50_000, 2000)
    noise = rng.normal(0, 0.05, 2000)
    actual = predicted * (1 + noise) if relative else predicted + 10_000 * noise
    assert prediction_interval(predicted, actual).kind == kind


@pytest.mark.parametrize(
    ("kind", "limits", "low", "high"),
    [("ratio", (0.9, 1.5), [90, 9], [150, 15]), ("difference", (-20.0, 5.0), [80, 0], [105, 15])],
)
def test_limits_about_a_prediction_by_hand(kind, limits, low, high):
    sides = PredictionInterval("all", 95, kind, *limits).limits(np.array([100.0, 10.0]))
    assert [side.tolist() for side in sides] == [low, high]


def test_a_prediction_of_zero_has_no_ratio():
    assert prediction_interval(np.array([0.0, 10.0] * 50), np.array([1.0, 30.0] * 50)).kind == "difference"


def test_coverage_counts_the_limits_in():
    assert coverage_pct(np.zeros(4), np.array([-1.0, 0.0, 2.0, 3.0]), np.full(4, 2.0)) == 50


@pytest.mark.slow
@pytest.mark.parametrize("relative", [True, False])
def test_95_percent_of_new_observations_are_in_their_interval(relative):
    """200 runs of 150 rows and 20 new ones, eight features, six of them noise: in-sample residuals are too small."""
    coverage = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x = rng.uniform(0, 100, (170, 8))
        clean = 2000 + x[:, 0] * 30 + x[:, 1] * 5
        noise = rng.normal(0, 0.05, 170)
        y = clean * (1 + noise) if relative else clean + 3000 * noise
        old, new = slice(0, 150), slice(150, None)
        unseen = plain_design(x[old], y[old], np.arange(150) // 30).out_of_fold(CHOICE, ANY_SIGN)
        predicted = RobustLinear().fit(x[old], y[old]).predict(x[new])
        low, high = prediction_interval(unseen, y[old]).limits(predicted)
        coverage.append(coverage_pct(low, y[new], high))
    assert 93 <= np.mean(coverage) <= 97


def test_a_fold_is_predicted_without_its_own_rows():
    """The last block's level is another one: no training row shows it."""
    x = np.arange(100.0)[:, None] % 7
    y = np.where(np.arange(100) < 80, 1000.0, 5000.0)
    unseen = plain_design(x, y, np.arange(100) // 20).out_of_fold(CHOICE, ANY_SIGN)
    assert unseen[80:] == pytest.approx(1000, abs=1)
