"""How good a fitted model is on the rows it was not fitted on, and what is compared with it.

Compared with the model: the training median, a gradient-boosted reference, and the model itself on fewer rows.
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


def validate(
    parts: list[FittedRegime], used: pl.DataFrame, evaluated: pl.DataFrame, options: FitOptions
) -> Validation:
    """Measure parts on the held-out rows, with what stands beside them.

    Args:
        parts: The model.
        used: The rows it was fitted on.
        evaluated: The held-out rows the error is measured on.
        options: How it was fitted.
    """
    y, y_held = target_of(used), target_of(evaluated)
    predicted = predict_regimes(parts, evaluated)
    measured = measure(y_held, predicted)
    baseline = measure(y_held, np.full(len(y_held), float(np.median(y))))
    groups = {name: which(evaluated, condition) for name, condition in options.groups}
    outside, extrapolated = _extrapolated(parts, evaluated)
    close = np.abs(predicted - y_held) <= WITHIN_PCT / 100 * np.abs(y_held)
    names = sorted({t.feature.name for part in parts for t in part.terms})
    return Validation(
        train=measure(y, predict_regimes(parts, used)),
        holdout=measured,
        baseline=baseline,
        reference=reference(used, evaluated, names) if options.reference and names else None,
        by_group={
            name: measure(y_held[rows], predicted[rows]) for name, rows in groups.items() if rows.any()
        },
        within_5_pct=100 * float(close.mean()),
        extrapolated_rows=int(outside.sum()),
        extrapolated=extrapolated,
        interval_coverage_pct=_coverage_pct(parts, evaluated),
        by_load={
            name: measure(y_held[rows], predicted[rows])
            for name, rows in (("inside", ~outside), ("outside", outside))
            if rows.any()
        },
        skill=skill(measured, baseline),
        classifier=_classify(parts, evaluated, options.label)
        if len(parts) > 1 and options.label is not None
        else None,
    )


def equation_errors(parts: list[FittedRegime], holdout: pl.DataFrame) -> EquationErrors | None:
    """Measure a model on all held-out equations; null where none of them is an interval.

    Args:
        parts: The model.
        holdout: All held-out rows.
    """
    if "source" not in holdout.columns or not (holdout["source"] == "interval").any():
        return None
    actual, predicted = target_of(holdout), predict_regimes(parts, holdout)
    steps = holdout["interval_steps"].to_numpy()
    return EquationErrors(
        rows_by_source=dict(sorted(holdout.group_by("source").len().iter_rows())),
        per_equation=measure(actual, predicted),
        per_step=measure(np.repeat(actual, steps), np.repeat(predicted, steps)),
    )


def _extrapolated(parts: list[FittedRegime], evaluated: pl.DataFrame) -> tuple[Flags, dict[str, int]]:
    """Tell held-out rows with a feature outside the range of the training rows of their part, and count by feature."""
    outside = np.zeros(evaluated.height, dtype=bool)
    by_feature: dict[str, int] = {}
    active = active_regime(parts, evaluated)
    for index, part in enumerate(parts):
        for term in part.terms:
            values = evaluated[term.feature.name].cast(pl.Float64).to_numpy()
            beyond = (active == index) & (
                (values < term.training_range[0]) | (values > term.training_range[1])
            )
            if beyond.any():
                by_feature[term.feature.name] = by_feature.get(term.feature.name, 0) + int(beyond.sum())
            outside |= beyond
    return outside, by_feature


def _coverage_pct(parts: list[FittedRegime], evaluated: pl.DataFrame) -> float:
    active = active_regime(parts, evaluated)
    low, high = np.zeros(evaluated.height), np.zeros(evaluated.height)
    for index, part in enumerate(parts):
        limits = part.prediction_interval.limits(part.predict(evaluated))
        low, high = (np.where(active == index, *pair) for pair in zip(limits, (low, high), strict=True))
    return coverage_pct(low, target_of(evaluated), high)


def _classify(parts: list[FittedRegime], evaluated: pl.DataFrame, truth: pl.Expr) -> Classifier:
    """Hold the first regime's condition against what happened, on the rows that tell what happened."""
    known = evaluated.filter(truth.is_not_null())
    true, told = which(known, truth), which(known, parts[0].regime.holds())
    rates = [float((told[true == side] == side).mean()) for side in (True, False) if (true == side).any()]
    return Classifier(
        balanced_accuracy=float(np.mean(rates)) if rates else None,
        true_positive=int((true & told).sum()),
        false_negative=int((true & ~told).sum()),
        false_positive=int((~true & told).sum()),
        true_negative=int((~true & ~told).sum()),
    )


def reference(used: pl.DataFrame, evaluated: pl.DataFrame, names: list[str]) -> Metrics:
    """Gradient boosting on the same features and rows: what a model nobody can read would get."""
    boosted = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    # One thread: threads that wait for each other on a busy machine cost more than they bring on frames this small,
    # and sums do not depend on how many there are.
    with threadpool_limits(1):
        boosted.fit(matrix(used, names), target_of(used))
    return measure(target_of(evaluated), np.maximum(boosted.predict(matrix(evaluated, names)), 0.0))


SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the training rows, the latest ones before the hold-out: the distance in time to it stays what it is."""


def learning_curve(
    parts: Sequence[FittedRegime],
    designs: Sequence[Design],
    evaluated: pl.DataFrame,
    *,
    fewest: int,
) -> tuple[LearningPoint, ...]:
    """Fit a model anew on ever more rows, features and penalty as they were chosen on all.

    A share that leaves a part fewer than `fewest` rows has no point.

    Args:
        parts: The fitted model.
        designs: The training rows of each part.
        evaluated: The held-out rows.
        fewest: Rows that every part needs.
    """
    y = target_of(evaluated)
    points = []
    for share in SHARES:
        chosen = [design.latest(share) for design in designs]
        rows = [int(mine.sum()) for mine in chosen]
        if min(rows) < fewest:
            continue
        refitted = list(parts)
        if share < 1:
            for index, (part, design, mine) in enumerate(zip(parts, designs, chosen, strict=True)):
                positive = part.signs.of(design.columns)
                model = RobustLinear(part.choice.penalty, part.choice.strength, positive=positive)
                model.fit(design.x[mine], design.y[mine], design.weights[mine])
                terms = linear_terms(design.columns, model.coef_, design.x)
                refitted[index] = replace(part, intercept=model.intercept_, terms=terms)
        errors = measure(y, predict_regimes(refitted, evaluated))
        if errors.mae is not None:
            points.append(LearningPoint(share, sum(rows), errors.mae, errors.mape_pct))
    return tuple(points)
