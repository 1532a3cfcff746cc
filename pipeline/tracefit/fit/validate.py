"""Evaluate a fitted model on held-out rows, beside the models it is compared with.

Beside the model stand the training median (the baseline), gradient boosting on the same features (the reference: how much
error a more flexible model would remove), and the model itself fitted on fewer rows (the learning curve).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import (
    FittedRegime,
    active_regime,
    linear_terms,
    matrix,
    predict_regimes,
    target_of,
    which,
)
from tracefit.fit.metrics import coverage_pct, measure, skill
from tracefit.fit.results import Classifier, EquationErrors, LearningPoint, Metrics, Validation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.arrays import Flags
    from tracefit.fit.design import Design
    from tracefit.fit.inputs import FitOptions

WITHIN_PCT = 5.0
"""Error in percent for the share of rows that are predicted closely, `within_5_pct`."""


def validate(
    regimes: list[FittedRegime], used: pl.DataFrame, evaluated: pl.DataFrame, options: FitOptions
) -> Validation:
    """Measure a model on the held-out rows, with its baseline and its reference.

    Args:
        regimes: The model.
        used: The rows it was fitted on.
        evaluated: The held-out rows the error is measured on.
        options: How it was fitted.
    """
    y, y_held = target_of(used), target_of(evaluated)
    predicted = predict_regimes(regimes, evaluated)
    measured = measure(y_held, predicted)
    baseline = measure(y_held, np.full(len(y_held), float(np.median(y))))
    groups = {name: which(evaluated, condition) for name, condition in options.groups}
    outside, extrapolated = _extrapolated(regimes, evaluated)
    close = np.abs(predicted - y_held) <= WITHIN_PCT / 100 * np.abs(y_held)
    names = sorted({t.feature.name for regime in regimes for t in regime.terms})
    return Validation(
        train=measure(y, predict_regimes(regimes, used)),
        holdout=measured,
        baseline=baseline,
        reference=reference(used, evaluated, names) if options.reference and names else None,
        by_group={
            name: measure(y_held[rows], predicted[rows]) for name, rows in groups.items() if rows.any()
        },
        within_5_pct=100 * float(close.mean()),
        extrapolated_rows=int(outside.sum()),
        extrapolated=extrapolated,
        interval_coverage_pct=_coverage_pct(regimes, evaluated),
        by_load={
            name: measure(y_held[rows], predicted[rows])
            for name, rows in (("inside", ~outside), ("outside", outside))
            if rows.any()
        },
        skill=skill(measured, baseline),
        classifier=_classify(regimes, evaluated, options.label)
        if len(regimes) > 1 and options.label is not None
        else None,
    )


def equation_errors(regimes: list[FittedRegime], holdout: pl.DataFrame) -> EquationErrors | None:
    """Measure a step-time model on all held-out rows, intervals included; null where none is an interval.

    Args:
        regimes: The model.
        holdout: All held-out rows.
    """
    if "source" not in holdout.columns or not (holdout["source"] == "interval").any():
        return None
    actual, predicted = target_of(holdout), predict_regimes(regimes, holdout)
    steps = holdout["interval_steps"].to_numpy()
    return EquationErrors(
        rows_by_source=dict(sorted(holdout.group_by("source").len().iter_rows())),
        per_equation=measure(actual, predicted),
        per_step=measure(np.repeat(actual, steps), np.repeat(predicted, steps)),
    )


def _extrapolated(regimes: list[FittedRegime], evaluated: pl.DataFrame) -> tuple[Flags, dict[str, int]]:
    """Return which rows have a feature outside the training range of their regime, and how many by feature."""
    outside = np.zeros(evaluated.height, dtype=bool)
    by_feature: dict[str, int] = {}
    active = active_regime(regimes, evaluated)
    for index, regime in enumerate(regimes):
        for term in regime.terms:
            values = evaluated[term.feature.name].cast(pl.Float64).to_numpy()
            low, high = term.training_range
            out_of_range = (active == index) & ((values < low) | (values > high))
            if out_of_range.any():
                name = term.feature.name
                by_feature[name] = by_feature.get(name, 0) + int(out_of_range.sum())
            outside |= out_of_range
    return outside, by_feature


def _coverage_pct(regimes: list[FittedRegime], evaluated: pl.DataFrame) -> float:
    """Return the percent of rows within the prediction interval of their regime."""
    active = active_regime(regimes, evaluated)
    low, high = np.zeros(evaluated.height), np.zeros(evaluated.height)
    for index, regime in enumerate(regimes):
        limits = regime.prediction_interval.limits(regime.predict(evaluated))
        low, high = (np.where(active == index, *pair) for pair in zip(limits, (low, high), strict=True))
    return coverage_pct(low, target_of(evaluated), high)


def _classify(regimes: list[FittedRegime], evaluated: pl.DataFrame, label: pl.Expr) -> Classifier:
    """Compare the first regime's condition with its true value, on the rows where that is known."""
    known = evaluated.filter(label.is_not_null())
    true, predicted = which(known, label), which(known, regimes[0].regime.holds())
    # Balanced accuracy: the mean of the rates of correct predictions among true and among false rows.
    rates = [
        float((predicted[true == side] == side).mean()) for side in (True, False) if (true == side).any()
    ]
    return Classifier(
        balanced_accuracy=float(np.mean(rates)) if rates else None,
        true_positive=int((true & predicted).sum()),
        false_negative=int((true & ~predicted).sum()),
        false_positive=int((~true & predicted).sum()),
        true_negative=int((~true & ~predicted).sum()),
    )


def reference(used: pl.DataFrame, evaluated: pl.DataFrame, names: list[str]) -> Metrics:
    """Return the errors of gradient boosting on the same features and rows: a flexible model that cannot be read."""
    boosted = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    # One thread: on frames this small threads cost more in waiting than they gain, and the order of floating-point sums
    # would depend on their number.
    with threadpool_limits(1):
        boosted.fit(matrix(used, names), target_of(used))
    return measure(target_of(evaluated), np.maximum(boosted.predict(matrix(evaluated, names)), 0.0))


SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the training rows, always the latest ones, so that the distance in time to the hold-out stays the same."""


def learning_curve(
    regimes: Sequence[FittedRegime],
    designs: Sequence[Design],
    evaluated: pl.DataFrame,
    *,
    fewest: int,
) -> tuple[LearningPoint, ...]:
    """Refit a model on growing shares of its rows, with the features and penalties that were chosen on all rows.

    A share that leaves a regime fewer than `fewest` rows has no point.

    Args:
        regimes: The fitted model.
        designs: The training rows of each regime.
        evaluated: The held-out rows.
        fewest: Rows that every regime needs.
    """
    y = target_of(evaluated)
    points = []
    for share in SHARES:
        latest = [design.latest(share) for design in designs]
        rows = [int(flags.sum()) for flags in latest]
        if min(rows) < fewest:
            continue
        refitted = list(regimes)
        # The last point is the model itself.
        if share < 1:
            for index, (regime, design, used) in enumerate(zip(regimes, designs, latest, strict=True)):
                positive = regime.signs.of(design.columns)
                model = RobustLinear(regime.choice.penalty, regime.choice.strength, positive=positive)
                model.fit(design.x[used], design.y[used], design.weights[used])
                terms = linear_terms(design.columns, model.coef_, design.x)
                refitted[index] = replace(regime, intercept=model.intercept_, terms=terms)
        errors = measure(y, predict_regimes(refitted, evaluated))
        if errors.mae is not None:
            points.append(LearningPoint(share, sum(rows), errors.mae, errors.mape_pct))
    return tuple(points)
