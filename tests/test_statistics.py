"""Statistics that several rooms share, by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy.interpolate import PchipInterpolator
from scipy.optimize import nnls
from scipy.stats import binom

from tracefit.statistics import binomial_tail, median, monotone, nonnegative, percentile, percentile_expr, percentiles


@pytest.mark.parametrize(("percent", "expected"), [(0, 10.0), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)])
def test_a_percentile_lies_between_ranks(percent, expected):
    """Of four values, P90 is at rank 2.7: seven tenths of the way from the third to the last."""
    assert percentile(np.array([40.0, 10.0, 30.0, 20.0]), percent) == pytest.approx(expected)


def test_several_percentiles_are_those_of_each():
    values, percents = np.array([40.0, 10.0, 30.0, 20.0, 7.5]), (0, 1, 50, 90, 100)
    assert percentiles(values, percents) == [percentile(values, percent) for percent in percents]


@pytest.mark.parametrize(
    "values", [[3.0], [4.0, 1.0], [5.0, 1.0, 9.0], [2, 2, 7, 1], [1.0, np.nan, 3.0], [1.0, 2.0, np.inf]]
)
@pytest.mark.parametrize("percent", [0, 12.5, 50, 60, 99.9, 100])
def test_a_percentile_is_that_of_numpy(values, percent):
    with np.errstate(invalid="ignore"):
        np.testing.assert_equal(percentile(np.array(values), percent), np.percentile(values, percent))


def test_the_expression_is_the_percentile_of_each_group():
    rows = pl.DataFrame({"of": ["a"] * 5 + ["b"], "value": [40.0, 10.0, None, 30.0, 20.0, 7.0]})
    found = rows.group_by("of", maintain_order=True).agg(percentile_expr(pl.col("value"), 90))
    assert found.rows() == [("a", pytest.approx(37.0)), ("b", 7.0)]


@pytest.mark.parametrize(
    "y", [[1.0, 2.0, 8.0, 9.0, 9.0], [3.0, 1.0, 4.0, 1.0, 5.0], [1.0, -30.0, -31.0, -31.0, 2.0], [2.0, 5.0]]
)
def test_a_monotone_curve_is_that_of_scipy(y):
    x = np.array([0.0, 1.0, 1.5, 4.0, 7.0])[: len(y)]
    at = np.linspace(0, x[-1], 57)
    np.testing.assert_allclose(monotone(x, np.array(y))(at), PchipInterpolator(x, y)(at), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("values", [[3.0], [4.0, 1.0], [5.0, 1.0, 9.0], [2.0, 2.0, 7.0, 1.0], [1.0, np.nan], []])
def test_a_median_is_that_of_numpy(values):
    expected = np.median(np.array(values)) if values else np.nan
    np.testing.assert_equal(median(np.array(values)), expected)


@pytest.mark.parametrize("seed", range(8))
def test_nonnegative_coefficients_are_those_of_scipys_nnls(seed):
    rng = np.random.default_rng(seed)
    # Terms of very different sizes, one of them zero on every row, and negative ones among the true coefficients.
    x = rng.random((60, 5)) * np.array([1.0, 1e3, 1e6, 10.0, 0.0])
    y = x @ (rng.normal(size=5) / np.array([1.0, 1e3, 1e6, 10.0, 1.0])) + rng.normal(size=60)
    square = x.T @ x
    found = nonnegative(square + 1e-12 * np.diag(square.diagonal() + 1e-30), x.T @ y, np.ones(5, bool))
    np.testing.assert_allclose(found, nnls(x, y)[0], rtol=1e-6, atol=1e-9)


def test_negative_coefficients_are_zero_and_the_others_are_fitted_without_them():
    """With a = 0 for the second term, the first one is 6 / 2; with both it would be 4, and the second one -1."""
    both = np.ones(2, bool)
    assert nonnegative(np.array([[2.0, 2.0], [2.0, 4.0]]), np.array([6.0, 4.0]), both).tolist() == [3.0, 0.0]
    assert nonnegative(np.eye(2), np.array([-1.0, -2.0]), both).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("least", "trials", "chance"), [(0, 5, 0.1), (3, 5, 0.5), (5, 5, 0.9), (40, 700, 0.02), (9000, 100_000, 0.09)]
)
def test_the_tail_of_a_binomial_distribution_is_that_of_scipy(least, trials, chance):
    assert binomial_tail(least, trials, chance) == pytest.approx(binom.sf(least - 1, trials, chance), rel=1e-8)
