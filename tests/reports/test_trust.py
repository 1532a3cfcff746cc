"""Statements of the report on how far a model can be trusted."""

from __future__ import annotations

from tracefit.models.validation import (
    Collinearity,
    LearningPoint,
    Metrics,
    PredictionInterval,
    Validation,
)
from tracefit.reports.content import trust_lines

ERRORS = Metrics(n=90, mape_pct=2, mdape_pct=1, mae=10, rmse=1, r2=1, bias_pct=0, p90_ape_pct=1, p99_ape_pct=1)


def _said(**facts):
    entry = Validation(
        unit="us",
        n_features=2,
        train=ERRORS,
        holdout=ERRORS,
        baseline=ERRORS,
        gradient_boosting=None,
        skill=0,
        **facts,
    )
    return "\n".join(trust_lines(entry))


def test_unknown_facts_have_no_sentence():
    assert _said() == ""


def test_prediction_intervals_have_their_regime_and_coverage():
    ratio = PredictionInterval(regime="all", level_pct=95, kind="ratio", low=0.9, high=1.2)
    text = _said(prediction_intervals=(ratio,), interval_coverage_pct=93.33)
    assert "0.9 to 1.2 times the prediction" in text
    assert "held 93.3 %" in text
    wide = PredictionInterval(regime="queued", level_pct=95, kind="difference", low=-2500, high=4000)
    text = _said(prediction_intervals=(wide, ratio), interval_coverage_pct=90)
    assert "*queued* the prediction -2,500 to +4,000 us; *all* 0.9" in text


def test_collinear_features_are_named_and_trouble_is_called_so():
    inflation = {"prefill_tokens": 1.5, "context_tokens": 8.0}
    fine = Collinearity(regime="all", condition_number=6, variance_inflation=inflation)
    text = _said(collinearity=(fine,))
    assert "condition number 6, largest variance inflation 8 (`context_tokens`)" in text
    assert "do not determine" not in text
    bad = Collinearity(regime="all", condition_number=31, variance_inflation=inflation)
    assert "do not determine single coefficients" in _said(collinearity=(bad,))


def test_extrapolation_warns_and_names_the_features():
    text = _said(extrapolated_rows=9, extrapolated={"context_tokens": 8, "prefill_tokens": 1})
    assert "**Extrapolation:** 9 of 90 held-out rows" in text
    assert "(`context_tokens` 8, `prefill_tokens` 1)" in text


def test_a_learning_curve_needs_two_points():
    points = [LearningPoint(share=s, rows=r, mae=m, mape_pct=1) for s, r, m in [(0.7, 70, 12), (1, 100, 10)]]
    assert "12 (70), 10 (100)" in _said(learning_curve=tuple(points))
    assert _said(learning_curve=tuple(points[:1])) == ""
