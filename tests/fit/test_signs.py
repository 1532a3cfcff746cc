"""Signs that physics gives: in force where a feature declares one, exact where they bind, lifted where that is asked
for."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy.optimize import lsq_linear

from tracefit import TrainOptions, UsageError
from tracefit.commands.fitting import deployment_options
from tracefit.features.sets import BUILT_IN, QUEUED_FEATURES, Feature
from tracefit.fit import splits
from tracefit.fit.estimators import RobustLinear, confidence_intervals
from tracefit.fit.fitted import ANY_SIGN, NON_NEGATIVE, DeploymentOptions, FitOptions, Signs
from tracefit.fit.train import fit_linear


def _data(seed, truth, n=300):
    rng = np.random.default_rng(seed)
    x = rng.normal(3, 1, (n, len(truth) - 1)) @ rng.normal(0, 1, (len(truth) - 1, len(truth) - 1))
    return x, truth[0] + x @ np.array(truth[1:]) + rng.normal(0, 2, n)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bound", [(True, False, True, False), (False, True, False, True), (True,) * 4])
def test_bound_slopes_are_those_of_bounded_least_squares(seed, bound):
    """Against SciPy's bounded-variable least squares on the raw columns, the intercept bound or not."""
    x, y = _data(seed, (4.0, -3.0, -2.0, 5.0))
    low = [0.0 if b else -np.inf for b in (bound[-1], *bound[:-1])]
    wanted = lsq_linear(np.column_stack([np.ones(len(y)), x]), y, (low, np.inf), method="bvls").x
    model = RobustLinear(strength=0.0, huber=np.inf, positive=bound).fit(x, y)
    np.testing.assert_allclose([model.intercept_, *model.coef_], wanted, atol=1e-6)


def test_a_free_slope_costs_a_lasso_the_same_either_way():
    x, y = _data(1, (4.0, -3.0, 2.0, 5.0))
    free = RobustLinear("lasso", 0.05, huber=np.inf).fit(x, y)
    bound = RobustLinear("lasso", 0.05, huber=np.inf, positive=(False, True, True, False)).fit(x, y)
    assert free.coef_[0] < 0
    assert (free.coef_[1:] > 0).all()
    np.testing.assert_allclose(bound.coef_, free.coef_, rtol=1e-3)


def test_only_bound_coefficients_have_intervals_cut_at_zero():
    x, y = _data(2, (4.0, 0.02, 0.02, 5.0))
    model = RobustLinear(strength=0.0, positive=(True, False, False, False))
    rows = model.fit_rows(x, y)
    _, (first, second, _) = confidence_intervals(x, y, model, rows, np.arange(len(y)) // 10)
    assert first is None or first[0] >= 0
    assert second is not None
    assert second[0] < 0 < second[1]


def _frame(law, n=400):
    rng = np.random.default_rng(0)
    prefill, decode = rng.integers(0, 200, n), rng.integers(1, 30, n)
    frame = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_ns": np.arange(n) * 1000,
            "prefill": prefill,
            "decode": decode,
            "y": law(prefill, decode) + rng.normal(0, 5, n),
            "excluded_reason": None,
        },
        schema_overrides={"excluded_reason": pl.String},
    )
    return splits.split_by_time(frame)


FEATURES = [
    Feature("prefill", "token", "prefill", sign="non_negative"),
    Feature("decode", "request", "decode"),
]


def _fit(frame, signs):
    return fit_linear(frame, FEATURES, FitOptions(reference=False, signs=signs)).regimes[0]


def test_a_declared_sign_binds_and_any_sign_lifts_it():
    frame = _frame(lambda prefill, decode: 5000 - 10 * prefill - 20 * decode)
    declared, lifted = (_fit(frame, signs) for signs in (Signs("declared", intercept=True), ANY_SIGN))
    assert {t.feature for t in declared.terms} == {"decode"}
    (left_out,) = declared.features_left_out
    assert (left_out.feature, left_out.reason) == (
        "prefill",
        "its coefficient is not above zero in these runs",
    )
    trained = frame.filter(pl.col("split") == "train")["prefill"]
    assert left_out.training_range == (trained.min(), trained.max())
    assert {t.feature: t.value for t in lifted.terms} == pytest.approx({"prefill": -10, "decode": -20}, rel=0.02)


def test_a_fit_below_zero_loses_its_free_signs():
    """50 + 10 prefill - 4 decode is below zero at no prompt and 29 decodes, a corner of what was trained on."""
    frame = _frame(lambda prefill, decode: 50 + 10 * prefill - 4 * decode)
    part = _fit(frame, Signs("declared", intercept=True))
    assert part.signs == NON_NEGATIVE
    assert part.least >= 0
    assert {t.feature for t in part.terms} == {"prefill"}
    kept = _fit(_frame(lambda prefill, decode: 500 + 10 * prefill - 4 * decode), Signs("declared", intercept=True))
    assert {t.feature: t.value for t in kept.terms} == pytest.approx({"prefill": 10, "decode": -4}, rel=0.1)


def test_every_time_per_token_request_or_byte_declares_its_sign():
    free = {
        f.name
        for name in ("batch", "roofline", "roofline_max", "work_max")
        for f in BUILT_IN[name].features
        if not f.sign
    }
    constant = {f.name for f in BUILT_IN["batch"].features[-8:]}
    assert free == constant
    signs = {f.name: f.sign for f in BUILT_IN["queue"].features}
    assert {signs[name] for name in QUEUED_FEATURES} == {"non_negative"}, "work ahead never shortens a wait"


@pytest.mark.parametrize(
    ("options", "signs"),
    [({"positive": True}, NON_NEGATIVE), ({"any_sign": True}, ANY_SIGN), ({}, Signs(intercept=True))],
)
def test_options_of_a_deployment_give_the_signs(options, signs):
    assert DeploymentOptions(**options).signs(intercept=True) == signs


def test_options_of_signs_contradict_each_other():
    with pytest.raises(UsageError, match="contradict"):
        deployment_options(TrainOptions(positive=True, any_sign=True))
