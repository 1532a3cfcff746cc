"""Statistics that several rooms share, by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy.interpolate import PchipInterpolator

from tracefit.statistics import median, monotone, percentile, percentile_expr


@pytest.mark.parametrize(("percent", "expected"), [(0, 10.0), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)])
def test_a_percentile_lies_between_ranks(percent, expected):
    """Of four values, P90 is at rank 2.7: seven tenths of the way from the third to the last."""
    assert percentile(np.array([40.0, 10.0, 30.0, 20.0]), percent) == pytest.approx(expected)


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
