"""Statistics that several rooms share, by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.statistics import percentile, percentile_expr


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)]
)
def test_a_percentile_lies_between_ranks(percent, expected):
    """Of four values, P90 is at rank 2.7: seven tenths of the way from the third to the last."""
    assert percentile(np.array([40.0, 10.0, 30.0, 20.0]), percent) == pytest.approx(expected)


def test_the_expression_is_the_percentile_of_each_group():
    rows = pl.DataFrame({"of": ["a"] * 5 + ["b"], "value": [40.0, 10.0, None, 30.0, 20.0, 7.0]})
    found = rows.group_by("of", maintain_order=True).agg(percentile_expr(pl.col("value"), 90))
    assert found.rows() == [("a", pytest.approx(37.0)), ("b", 7.0)]
