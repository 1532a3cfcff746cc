"""The robust linear estimator: known coefficients, known penalties, intervals that hold the truth."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from msgspec.structs import replace
from scipy.optimize import lsq_linear, nnls
from scipy.special import stdtrit
from scipy.stats import norm
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge
from sklearn.preprocessing import StandardScaler

from designs import plain_design
from tracefit.fit import estimators
from tracefit.fit.estimators import (
    SHRINKAGE,
    RobustLinear,
    confidence_intervals,
    huber_weights,
    moments,
    solve,
    student_975,
)
from tracefit.fit.fitted import FitOptions
from tracefit.fit.results import PenaltyChoice
from tracefit.fit.select import time_blocks

TRUTH = np.array([2000.0, 10.0, -40.0, 0.003])


def _features(rng, n=400):
    return np.column_stack([rng.integers(0, 200, n), rng.random(n) * 8, rng.normal(5e5, 1e5, n)])


def _clean(seed=0, n=400):
    x = _features(np.random.default_rng(seed), n)
    return x, TRUTH[0] + x @ TRUTH[1:]


def _noisy(seed=0, n=400):
    x, y = _clean(seed, n)
    return x, y + np.random.default_rng(seed + 1).normal(0, 30, n)


def _fitted(model):
    return np.array([model.intercept_, *model.coef_])


def test_moments_of_many_rows_are_those_of_plain_weighted_sums():
    rng = np.random.default_rng(0)
    x, y, weights = rng.normal(50, 3, (20_011, 3)), rng.normal(9, 1, 20_011), rng.random(20_011)
    of = moments(np.asfortranarray(x), y, weights)
    center, level = np.average(x, axis=0, weights=weights), np.average(y, weights=weights)
    np.testing.assert_allclose(of.gram / of.total, np.cov(x.T, aweights=weights, ddof=0), rtol=1e-9)
    np.testing.assert_allclose(of.cross, ((x - center) * weights[:, None]).T @ (y - level), rtol=1e-9)
    np.testing.assert_allclose([*of.center, of.level, of.rows], [*center, level, 20_011], rtol=1e-12)


def test_without_noise_and_penalty_the_coefficients_are_exact():
    x, y = _clean()
    np.testing.assert_allclose(_fitted(RobustLinear(strength=0.0).fit(x, y)), TRUTH, rtol=1e-9)


def test_without_noise_the_steps_with_prompts_count_although_they_are_few():
    """A third of the steps has prompts of 20 us per token. Weighed by what a tiny penalty leaves of the others' times,
    they would be wild rows, and a token would take 2 us.
    """
    steps = np.arange(1, 601)
    prefill = np.where(steps % 3 == 0, steps * 37 % 29 * 16, 0.0)
    decodes = 1.0 + steps * 11 % 23
    x = np.column_stack([decodes, prefill > 0, prefill])
    model = RobustLinear().fit(x, 5_000 + 30 * decodes + 20 * prefill)
    assert model.coef_ == pytest.approx([30, 0, 20], abs=0.02)


def test_the_default_penalty_costs_a_millionth():
    x, y = _clean()
    np.testing.assert_allclose(_fitted(RobustLinear().fit(x, y)), TRUTH, rtol=1e-4)


def test_without_bend_and_penalty_it_is_least_squares():
    x, y = _noisy()
    design = np.column_stack([np.ones(len(y)), x])
    expected = np.linalg.lstsq(design, y, rcond=None)[0]
    model = RobustLinear(strength=0.0, huber=np.inf).fit(x, y)
    np.testing.assert_allclose(_fitted(model), expected, rtol=1e-7)


def test_two_percent_of_wild_rows_do_not_move_it():
    x, y = _noisy(n=2000)
    rng = np.random.default_rng(9)
    wild = rng.random(len(y)) < 0.02
    y = y + wild * rng.uniform(5e4, 1e5, len(y)) * (x[:, 0] > 100)
    robust = _fitted(RobustLinear().fit(x, y))
    ordinary = LinearRegression().fit(x, y)
    np.testing.assert_allclose(robust[1:3], TRUTH[1:3], rtol=0.05)
    assert abs(ordinary.coef_[0] / TRUTH[1] - 1) > 0.5


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_ridge_is_scikit_learns_on_standardised_features(strength):
    x, y = _noisy()
    z = StandardScaler().fit_transform(x)
    expected = Ridge(alpha=strength * len(y)).fit(z, y).predict(z)
    np.testing.assert_allclose(RobustLinear("ridge", strength, huber=np.inf).fit(x, y).predict(x), expected, rtol=1e-9)


def test_shrunk_coefficients_have_a_ridge_penalty_of_their_own():
    """Ridge is least squares with a row of 0 = sqrt(n * strength) * slope for each standardised slope."""
    x, y = _noisy()
    z = StandardScaler().fit_transform(x)
    shrunk = (False, True, False)
    rows = np.diag(np.sqrt(len(y) * SHRINKAGE) * np.array(shrunk))
    slopes = np.linalg.lstsq(np.vstack([z, rows]), np.append(y - y.mean(), np.zeros(3)), rcond=None)[0]
    model = RobustLinear(strength=0.0, huber=np.inf, shrunk=shrunk).fit(x, y)
    np.testing.assert_allclose(model.coef_ * x.std(axis=0), slopes, rtol=1e-9)


def test_lasso_is_scikit_learns_at_a_share_of_the_limit():
    x, y = _noisy()
    z = StandardScaler().fit_transform(x)
    emptying = np.abs(z.T @ (y - y.mean())).max() / len(y)
    expected = Lasso(alpha=0.3 * emptying).fit(z, y)
    model = RobustLinear("lasso", 0.3, huber=np.inf).fit(x, y)
    np.testing.assert_allclose(model.coef_ * x.std(axis=0), expected.coef_, rtol=1e-3, atol=1e-6)
    assert 0 < np.count_nonzero(model.coef_) < 3


def test_elastic_net_halves_each_penalty_of_scikit_learn():
    """scikit-learn's objective: squares / 2n + alpha * l1_ratio * |a|_1 + alpha * (1 - l1_ratio) / 2 * |a|^2."""
    x, y = _noisy()
    z = StandardScaler().fit_transform(x)
    l1, l2 = 0.2 * np.abs(z.T @ (y - y.mean())).max() / len(y), 0.2
    expected = ElasticNet(alpha=l1 + l2, l1_ratio=l1 / (l1 + l2)).fit(z, y)
    model = RobustLinear("elastic_net", 0.4, huber=np.inf).fit(x, y)
    np.testing.assert_allclose(model.coef_ * x.std(axis=0), expected.coef_, rtol=1e-3, atol=1e-6)
    assert 0 < np.count_nonzero(model.coef_) < 3


@pytest.mark.parametrize("level", [2000.0, -3000.0, -20_000.0])
def test_positive_is_least_squares_within_bounds(level):
    """One slope is negative in truth; the lower levels also want a negative intercept."""
    x, y = _noisy()
    y = y - TRUTH[0] + level
    design = np.column_stack([np.ones(len(y)), x])
    expected = lsq_linear(design / design.max(axis=0), y, (0, np.inf), tol=1e-14).x / design.max(axis=0)
    model = RobustLinear(strength=0.0, huber=np.inf, positive=True).fit(x, y)
    np.testing.assert_allclose(_fitted(model), expected, rtol=1e-6, atol=1e-8)
    assert model.coef_[1] == 0
    assert (model.intercept_ == 0) == (level < 0)


@pytest.mark.parametrize("penalty", ["lasso", "elastic_net"])
def test_positive_holds_under_every_penalty(penalty):
    x, y = _noisy()
    model = RobustLinear(penalty, 0.01, positive=True).fit(x, y)
    assert (_fitted(model) >= 0).all()
    assert model.coef_[0] == pytest.approx(TRUTH[1], rel=0.1)


def test_bounds_that_do_not_bind_change_nothing():
    x, y = _noisy()
    x = x * [1, -1, 1]
    free, bound = (_fitted(RobustLinear(positive=p).fit(x, y)) for p in (False, True))
    np.testing.assert_allclose(bound, free, rtol=1e-7)


def test_a_strong_lasso_leaves_the_level_alone():
    x, y = _noisy()
    model = RobustLinear("lasso", 1.001, huber=np.inf).fit(x, y)
    assert not model.coef_.any()
    assert model.intercept_ == pytest.approx(y.mean())


def test_units_of_features_do_not_matter():
    x, y = _noisy()
    units = np.array([1000.0, 1e-6, 3.0])
    model, scaled = RobustLinear(strength=1e-3).fit(x, y), RobustLinear(strength=1e-3).fit(x * units, y)
    np.testing.assert_allclose(scaled.coef_ * units, model.coef_, rtol=1e-6)


def test_a_model_of_no_feature_is_a_robust_level():
    y = np.array([9.0, 10.0, 10.0, 11.0, 1e6])
    model = RobustLinear().fit(np.zeros((5, 0)), y)
    assert model.intercept_ == pytest.approx(10, abs=1.5)
    assert model.predict(np.zeros((2, 0))).tolist() == [model.intercept_] * 2


def test_huber_weights_by_hand():
    residual = np.array([-2.0, -1.0, 0.0, 1.0, 10.0])
    spread = 1.4826  # median 0, median absolute deviation 1
    expected = [1.345 * spread / 2, 1, 1, 1, 1.345 * spread / 10]
    np.testing.assert_allclose(huber_weights(residual, RobustLinear().huber), expected)


@pytest.mark.parametrize("degrees", [1, 2, 3, 10, 49, 200, 201, 5_000])
def test_percentiles_of_students_t_are_those_of_scipy(degrees):
    assert student_975(degrees) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-8)


@pytest.mark.parametrize("seed", range(20))
def test_bounded_slopes_are_those_of_scipys_nnls_also_of_columns_that_are_nearly_one(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 2 + seed % 6))
    x[:, 1] = x[:, 0] + 0.01 * x[:, 1]
    y = x @ rng.normal(size=x.shape[1]) + rng.normal(size=60)
    of = replace(moments(x, y, np.ones(60)), gram=x.T @ x, cross=x.T @ y)
    bound = np.ones(x.shape[1], dtype=bool)
    found = solve(of, "ridge", 0.0, bound, np.zeros(x.shape[1]))
    np.testing.assert_allclose(found, nnls(x, y)[0], rtol=1e-9, atol=1e-9)
    # From anywhere the search ends at the same slopes.
    start = rng.normal(size=x.shape[1])
    np.testing.assert_allclose(solve(of, "ridge", 0.0, bound, np.zeros(x.shape[1]), start), found, rtol=1e-9, atol=1e-9)


def test_a_fit_that_starts_from_huber_weights_finds_the_same_line_in_fewer_rounds():
    x, y = _noisy()
    y[::50] += 5_000
    first, second = RobustLinear(), RobustLinear()
    huber = first.fit_rows(x, y).huber
    np.testing.assert_allclose(_fitted(second.fit(x, y, start=huber)), _fitted(first), rtol=1e-4)
    assert second.n_iter_ < first.n_iter_


def test_the_model_keeps_nothing_of_the_rows():
    x, y = _noisy(n=400)
    model = RobustLinear().fit(x, y)
    assert all(np.size(value) <= 3 for value in vars(model).values())


@pytest.mark.parametrize("most", [0, 1, 2, 30])
def test_rounds_of_reweighting_are_counted_up_to_the_most(most):
    """The first reweighting changes the line of noisy rows; how many it takes to settle depends on them."""
    rounds = RobustLinear(max_iter=most).fit(*_noisy()).n_iter_
    assert min(most, 2) <= rounds <= most


@pytest.mark.parametrize(
    "wrong",
    [
        {"penalty": "foo"},
        {"strength": -1.0},
        {"strength": float("nan")},
        {"huber": -1},
        {"huber": 0.0},
        {"max_iter": -1},
        {"max_iter": 2.5},
        {"positive": "yes"},
        {"positive": (True, False)},
        {"shrunk": True},
        {"shrunk": (True, False)},
    ],
    ids=str,
)
def test_a_parameter_that_cannot_be_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RobustLinear(**wrong).fit(*_noisy())


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan")])
def test_weights_that_cannot_be_are_refused(wrong):
    x, y = _noisy()
    with pytest.raises(ValueError, match=r"(?i)sample.weight"):
        RobustLinear().fit(x, y, np.full(len(y), wrong))
    with pytest.raises(ValueError, match="one per row"):
        RobustLinear().fit(x, y, np.ones(len(y) - 1))


def test_the_example_of_the_docstring_holds():
    assert doctest.testmod(estimators).failed == 0
    assert doctest.testmod(estimators).attempted >= 6


def test_fitting_leaves_data_and_parameters_alone():
    x, y = _noisy()
    before = x.copy(), y.copy()
    model = RobustLinear(strength=0.01)
    assert model.fit(x, y) is model
    assert np.array_equal(x, before[0])
    assert np.array_equal(y, before[1])
    assert model.strength == 0.01


def _autoregressive(rng, n, memory):
    values = rng.standard_normal(n)
    for i in range(1, n):
        values[i] = memory * values[i - 1] + np.sqrt(1 - memory**2) * values[i]
    return values


def _intervals(seed, *, n=150, memory=0.0, blocks=15, chosen=False):
    rng = np.random.default_rng(seed)
    x = np.column_stack([100 + 30 * rng.standard_normal(n), 5 + 2 * rng.standard_normal(n)])
    y = 2000 + x @ [10.0, -40.0] + 50 * _autoregressive(rng, n, memory)
    one_run, time = np.zeros(n, dtype=np.int64), np.arange(n)
    design = plain_design(x, y, time_blocks(one_run, time, 5))
    choice = design.choose_penalty(FitOptions()) if chosen else PenaltyChoice("ridge", 1e-6, 0.0, 0)
    model = RobustLinear(choice.penalty, choice.strength)
    rows = model.fit_rows(x, y)
    block = time_blocks(one_run, time, blocks)
    intercept, slopes = confidence_intervals(x, y, model, rows, block)
    return [intercept, *slopes]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_intervals_of_95_percent_hold_the_truth_about_that_often(chosen):
    """200 runs whose noise remembers half of the step before; also with the penalty that validation chooses."""
    intervals = [_intervals(seed, memory=0.5, chosen=chosen) for seed in range(200)]
    covered = [
        [low <= true <= high for (low, high), true in zip(one, (2000, 10, -40), strict=True)] for one in intervals
    ]
    coverage = np.mean(covered, axis=0)
    assert (coverage >= 0.90).all(), coverage
    assert (coverage <= 0.99).all(), coverage


def test_an_interval_is_as_wide_as_theory_has_it():
    """Independent Gaussian noise: Huber's asymptotic variance, sd / sqrt(n) by the root of its efficiency of 95 %."""
    n = 20_000
    low, high = _intervals(0, n=n, blocks=1000)[1]
    expected = 2 * norm.ppf(0.975) * 50 / 30 / np.sqrt(n) / np.sqrt(0.95)
    assert high - low == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("level", [2000.0, -3000.0])
def test_an_interval_of_bounded_numbers_is_not_negative(level):
    x, y = _noisy()
    model = RobustLinear(positive=True)
    rows = model.fit_rows(x, y - TRUTH[0] + level)
    intercept, slopes = confidence_intervals(x, y - TRUTH[0] + level, model, rows, np.arange(len(y)) // 10)
    assert slopes[1] is None
    assert (intercept is None) == (model.intercept_ == 0) == (level < 0)
    for interval in (intercept, *slopes):
        assert interval is None or 0 <= interval[0] < interval[1]


def test_an_interval_holds_its_value_unless_that_is_zero():
    x, y = _noisy()
    model = RobustLinear("lasso", 0.3)
    rows = model.fit_rows(x, y)
    _, slopes = confidence_intervals(x, y, model, rows, np.arange(len(y)) // 10)
    for value, interval in zip(model.coef_, slopes, strict=True):
        assert (interval is None) == (value == 0)
        assert interval is None or interval[0] < value < interval[1]
