"""Error metrics by hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.fit.validation import measure, skill
from tracefit.models.validation import NO_ROWS


def _measure(actual, predicted):
    return measure(np.array(actual, dtype=float), np.array(predicted, dtype=float))


def test_three_rows_by_hand():
    """Errors 10, 20, 6 of 100, 200, 400: 10 %, 10 %, 1.5 %."""
    m = _measure([100, 200, 400], [110, 180, 406])
    assert m.n == 3
    assert m.mape_pct == pytest.approx(21.5 / 3)
    assert m.mdape_pct == pytest.approx(10)
    assert m.mae == pytest.approx(12)
    assert m.rmse == pytest.approx((536 / 3) ** 0.5)
    assert m.bias_pct == pytest.approx(100 * (696 - 700) / 700)
    assert m.r2 == pytest.approx(1 - 536 / (1e4 + 4e4 + 16e4 - 3 * (700 / 3) ** 2))
    assert m.zero_targets == 0


def test_percentiles_of_the_percentage_errors():
    """Errors of 0 to 100 % in steps of 1: the 90th percentile is 90, the 99th 99."""
    m = _measure([100] * 101, [100 + k for k in range(101)])
    assert (m.mdape_pct, m.p90_ape_pct, m.p99_ape_pct) == pytest.approx((50, 90, 99))


@pytest.mark.parametrize(("predicted", "bias"), [(120, 20), (75, -25), (100, 0)])
def test_bias_is_positive_where_predictions_are_too_high(predicted, bias):
    assert _measure([100, 100], [predicted] * 2).bias_pct == pytest.approx(bias)


def test_zero_targets_are_counted_and_left_out_of_percentages():
    m = _measure([0, 100], [30, 110])
    assert (m.n, m.zero_targets) == (2, 1)
    assert (m.mape_pct, m.mdape_pct, m.p99_ape_pct) == pytest.approx((10, 10, 10))
    assert m.mae == pytest.approx(20)
    assert m.bias_pct == pytest.approx(40)


def test_nothing_but_zeros_has_no_percentages():
    m = _measure([0, 0], [1, 3])
    assert (m.mape_pct, m.mdape_pct, m.bias_pct, m.r2) == (None, None, None, None)
    assert (m.mae, m.zero_targets) == (2, 2)


def test_a_constant_target_has_no_r2():
    assert _measure([5, 5], [5, 6]).r2 is None


def test_no_rows_have_no_errors():
    assert _measure([], []) == NO_ROWS
    assert (NO_ROWS.n, NO_ROWS.mae, NO_ROWS.mape_pct) == (0, None, None)


def test_skill_is_the_share_of_the_baselines_error_removed():
    model, baseline = _measure([100, 100], [90, 110]), _measure([100, 100], [60, 140])
    assert skill(model, baseline) == pytest.approx(0.75)
    assert skill(baseline, model) == pytest.approx(-3)
    assert skill(model, _measure([1], [1])) is None
    assert skill(NO_ROWS, baseline) is None
