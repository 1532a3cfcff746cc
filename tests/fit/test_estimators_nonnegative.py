"""Non-negative fits: coefficients that can only add up, hiccups that pull with bounded force."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.fit.estimators import fit_nonnegative


def test_a_coefficient_that_would_be_negative_is_zero():
    x = np.column_stack([np.ones(50), np.arange(50.0)])
    assert fit_nonnegative(x, 7.0 + 3 * x[:, 1]) == pytest.approx([7, 3])
    falling = fit_nonnegative(x, 100.0 - x[:, 1])
    assert falling[1] == 0
    assert falling[0] == pytest.approx(75.5, abs=1)


def test_a_term_that_is_nowhere_has_no_coefficient():
    x = np.column_stack([np.ones(9), np.zeros(9)])
    assert fit_nonnegative(x, np.full(9, 4.0)).tolist() == [4, 0]


def test_hiccups_pull_a_robust_fit_little_and_a_mean_in_full():
    y = np.array([10.0, 10.1, 9.9, 10.0, 10.2, 9.8] * 10 + [1000.0])
    ones = np.ones((len(y), 1))
    assert fit_nonnegative(ones, y)[0] == pytest.approx(10, abs=0.1)
    assert fit_nonnegative(ones, y, huber=np.inf)[0] == pytest.approx(y.mean())
