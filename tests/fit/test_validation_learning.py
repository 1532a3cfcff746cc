"""Error against the number of training rows."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.fitted import FitOptions, LinearFit, RegimeRows
from tracefit.fit.train import fit_linear, fit_regimes
from tracefit.models.schema import Comparison, Condition

OPTIONS = FitOptions(drop_outliers=False, reference=False, penalties=(("ridge", 1e-9),))


def _frame(n, y):
    columns = {"run_id": "r", "server": "s", "ts_ns": np.arange(n) * 1000, "y": y, "excluded_reason": None}
    x = np.random.default_rng(0).integers(0, 100, n)
    frame = pl.DataFrame(columns | {"x": x}, schema_overrides={"excluded_reason": pl.String})
    return splits.split_by_time(frame)


def _curve(frame):
    fitted = fit_linear(frame, [Feature("x", "1", "x")], OPTIONS)
    assert isinstance(fitted, LinearFit)
    return fitted.validation.learning_curve, fitted.validation.holdout


def test_the_last_point_of_the_curve_is_the_model_itself():
    frame = _frame(1000, np.random.default_rng(1).normal(1000, 30, 1000))
    curve, holdout = _curve(frame)
    assert [p.share for p in curve] == [0.1, 0.2, 0.4, 0.7, 1.0]
    assert [p.rows for p in curve] == [70, 140, 280, 490, 700]
    assert (curve[-1].mae, curve[-1].mape_pct) == (holdout.mae, holdout.mape_pct)


def test_the_rows_are_the_latest_before_the_hold_out():
    """The server slows down a fifth before the hold-out: fewer rows know only that, more rows do not."""
    curve, _ = _curve(_frame(1000, np.where(np.arange(1000) < 560, 1000.0, 3000.0)))
    assert [p.mae for p in curve[:2]] == pytest.approx([0, 0], abs=1)
    assert curve[3].mae > 1000


def test_shares_with_too_few_rows_have_no_point():
    curve, _ = _curve(_frame(200, np.random.default_rng(1).normal(1000, 30, 200)))
    assert [p.rows for p in curve] == [56, 98, 140]


def test_a_point_needs_enough_rows_of_every_regime():
    frame = _frame(1000, np.random.default_rng(1).normal(1000, 30, 1000))
    frame = frame.with_columns(rare=pl.int_range(pl.len()) % 10 == 0).cast({"rare": pl.Int64})
    features = (Feature("x", "1", "x"),)
    regimes = [
        RegimeRows("rare", features, Condition(any=(Comparison(feature="rare", op=">", value=0.0),))),
        RegimeRows("rest", features),
    ]
    fitted = fit_regimes(frame, regimes, OPTIONS)
    assert isinstance(fitted, LinearFit)
    assert [p.share for p in fitted.validation.learning_curve] == [0.7, 1.0]
