"""Quantiles of what was measured and what was predicted, over the same rows."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.fit.validation import distribution
from tracefit.statistics import PERCENTS


def _at(quantiles, percent):
    return quantiles[PERCENTS.index(percent)]


def test_quantiles_are_interpolated_between_ranks():
    """Between 0 and 100 the p-th percentile is p; of predictions twice as large, twice that."""
    rows = pl.DataFrame({"y": [0.0, 100.0], "a": [0.0, 200.0], "b": [5.0, 5.0]})
    curves = distribution(rows, "y", "a", "b")
    assert curves.requests == 2
    assert curves.measured == pytest.approx(PERCENTS)
    assert curves.predicted == pytest.approx([2 * p for p in PERCENTS])


def test_all_curves_are_of_the_rows_that_have_every_number():
    rows = pl.DataFrame({"y": [1.0, 2.0, 3.0, None], "a": [1.0, None, 5.0, 9.0], "b": [7.0, 7.0, 8.0, 9.0]})
    curves = distribution(rows, "y", "a", "b")
    assert curves.requests == 2
    assert (_at(curves.measured, 0), _at(curves.measured, 100)) == (1.0, 3.0)
    assert (_at(curves.given_measured_state, 0), _at(curves.given_measured_state, 100)) == (7.0, 8.0)


def test_a_prediction_without_values_removes_no_row():
    rows = pl.DataFrame({"y": [1.0, 3.0], "a": [None, None], "b": [2.0, 4.0]}, schema_overrides={"a": pl.Float64})
    curves = distribution(rows, "y", "a", "b")
    assert (curves.requests, curves.predicted) == (2, None)
    assert _at(curves.given_measured_state, 100) == 4.0


def test_predictions_are_clipped_at_zero():
    curves = distribution(pl.DataFrame({"y": [1.0, 1.0], "a": [-5.0, 1.0]}), "y", "a", "a")
    assert _at(curves.predicted, 0) == 0.0


def test_nothing_to_compare_is_no_distribution():
    rows = pl.DataFrame({"y": [1.0], "a": [None]}, schema_overrides={"a": pl.Float64})
    assert distribution(rows, "y", "a", "a") is None
