"""The estimator of the law: bounded sums, the larger one the time."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from tracefit.fit.law import LawRegressor


def _steps(count=400, seed=0):
    rng = np.random.default_rng(seed)
    return np.column_stack([np.ones(count), rng.uniform(0, 100, count), rng.uniform(0, 3000, count)])


def test_coefficients_of_a_sum_are_found():
    x = _steps()
    law = LawRegressor(strength=1e-12).fit(x, x @ [500.0, 20.0, 1.5])
    assert law.coef_ == pytest.approx([500.0, 20.0, 1.5], rel=1e-4)


def test_the_longer_of_memory_and_compute_counts():
    x = _steps()
    y = 500 + np.maximum(60 * x[:, 1], 2 * x[:, 2])
    law = LawRegressor(part=["always", "memory", "compute"], prior=[300, 40, 1], strength=1e-12).fit(x, y)
    assert law.coef_ == pytest.approx([500.0, 60.0, 2.0], rel=1e-3)
    assert law.predict(np.array([[1.0, 10.0, 1000.0]])) == pytest.approx([2500.0], rel=1e-4)


def test_a_step_takes_at_least_its_launches():
    x = _steps()
    y = np.maximum(10 * x[:, 1] + x[:, 2], 1200 * x[:, 0])
    law = LawRegressor(part=["launch", "always", "always"], prior=[1000, 5, 0.5], strength=1e-12).fit(x, y)
    assert law.coef_ == pytest.approx([1200.0, 10.0, 1.0], rel=1e-3)


def test_coefficients_keep_to_their_bounds():
    x = _steps()
    law = LawRegressor(low=[0, 0, 1.8], high=[np.inf, 15, 4], strength=1e-12).fit(x, x @ [500.0, 20.0, 1.5])
    assert law.coef_[1] == pytest.approx(15.0)
    assert law.coef_[2] == pytest.approx(1.8)


def test_one_mistimed_step_in_ten_hardly_moves_the_others():
    x = _steps()
    y = x @ [500.0, 20.0, 1.5]
    # Relative errors of steps that are too short have no limit.
    y[::10] /= 5
    assert LawRegressor(strength=1e-12).fit(x, y).coef_ == pytest.approx([500.0, 20.0, 1.5], rel=0.05)


def test_two_terms_that_go_together_are_shared_as_their_priors_say():
    x = np.column_stack([np.ones(50), np.full(50, 10.0)])
    law = LawRegressor(prior=[60, 4], scale=[60, 4], strength=1e-3).fit(x, np.full(50, 200.0))
    # Least ((a - 60) / 60)^2 + ((b - 4) / 4)^2 with a + 10 b = 200: a = 60 + 3600 m and b = 4 + 160 m with m = 100 /
    # 5200.
    assert law.coef_ == pytest.approx([129.2, 7.08], rel=0.01)


def test_a_coefficient_that_no_step_shows_follows_one_that_is_expected_to_be_alike():
    x = np.column_stack([np.linspace(1, 9, 50), np.zeros(50), np.zeros(50)])
    law = LawRegressor(prior=[1, 2, 5], scale=[1, 0.5, 1], alike=["reads", "reads", ""], strength=1e-9)
    # Its mean given the other one: 2 + 0.8 (0.5 / 1) (3 - 1).
    assert law.fit(x, 3 * x[:, 0]).coef_ == pytest.approx([3.0, 2.8, 5.0], rel=1e-3)


def test_weights_decide_between_steps_that_contradict_each_other():
    x, y = np.ones((10, 1)), np.array([100.0] * 9 + [200.0])
    weights = np.array([1.0] * 9 + [1e4])
    assert LawRegressor(strength=1e-12).fit(x, y, weights).coef_ == pytest.approx([200.0], rel=0.01)


def test_times_of_zero_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        LawRegressor().fit(np.ones((3, 1)), [1.0, 0.0, 2.0])


def test_it_keeps_the_contract_of_scikit_learn():
    assert clone(LawRegressor(strength=0.5, low=[1.0])).get_params()["strength"] == 0.5
    check_estimator(LawRegressor(), on_skip=None)
