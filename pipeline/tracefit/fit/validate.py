"""How good a fitted model is on the rows it has not seen, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.fit.bands import covered_pct
from tracefit.fit.metrics import Metrics, measure, skill
from tracefit.fit.parts import FittedPart, Flags, matrix, predict_parts, speakers, target_of, which

if TYPE_CHECKING:
    from tracefit.fit.learning import LearningPoint
    from tracefit.fit.options import FitOptions

WITHIN_PCT = 5.0


@dataclass(frozen=True, slots=True)
class Classified:
    """How a regime's condition did on the held-out rows; the first regime is the positive one."""

    balanced_accuracy: float | None
    true_positive: int
    false_negative: int
    false_positive: int
    true_negative: int


@dataclass(frozen=True, slots=True)
class EquationErrors:
    """Errors of step times on every held-out equation: single steps, and intervals by their mean.

    Attributes:
        rows_by_source: Held-out equations by kind.
        per_equation: Each equation counts once.
        per_step: Each equation counts as many times as it has steps.
    """

    rows_by_source: dict[str, int]
    per_equation: Metrics
    per_step: Metrics


@dataclass(frozen=True, slots=True)
class Validation:
    """Errors of one model and of what stands beside it; all but `train` on the hold-out."""

    train: Metrics
    holdout: Metrics
    baseline: Metrics
    reference: Metrics | None
    by: dict[str, Metrics]
    within_5_pct: float | None
    extrapolated_rows: int
    extrapolated: dict[str, int]
    """Held-out rows with a feature outside the range of its part's training rows, by feature."""
    interval_coverage_pct: float
    """Share of held-out rows within their 95 % prediction interval."""
    by_load: dict[str, Metrics]
    """Errors on held-out rows `inside` and `outside` the ranges of the training rows."""
    skill: float | None
    classifier: Classified | None = None
    learning_curve: tuple[LearningPoint, ...] = ()
    equations: EquationErrors | None = None
    """Of step times whose hold-out holds intervals."""


def validate(
    parts: list[FittedPart], used: pl.DataFrame, judged: pl.DataFrame, options: FitOptions
) -> Validation:
    """Measure parts on the held-out rows, with what stands beside them.

    Args:
        parts: The model.
        used: The rows it was fitted on.
        judged: The held-out rows the error is measured on.
        options: How it was fitted.
    """
    y, y_held = target_of(used), target_of(judged)
    predicted = predict_parts(parts, judged)
    measured = measure(y_held, predicted)
    baseline = measure(y_held, np.full(len(y_held), float(np.median(y))))
    groups = {name: which(judged, condition) for name, condition in options.groups}
    outside, extrapolated = _extrapolated(parts, judged)
    close = np.abs(predicted - y_held) <= WITHIN_PCT / 100 * np.abs(y_held)
    names = sorted({t.feature.name for part in parts for t in part.terms})
    return Validation(
        train=measure(y, predict_parts(parts, used)),
        holdout=measured,
        baseline=baseline,
        reference=reference(used, judged, names) if options.reference and names else None,
        by={name: measure(y_held[rows], predicted[rows]) for name, rows in groups.items() if rows.any()},
        within_5_pct=100 * float(close.mean()),
        extrapolated_rows=int(outside.sum()),
        extrapolated=extrapolated,
        interval_coverage_pct=_coverage_pct(parts, judged),
        by_load={
            name: measure(y_held[rows], predicted[rows])
            for name, rows in (("inside", ~outside), ("outside", outside))
            if rows.any()
        },
        skill=skill(measured, baseline),
        classifier=_classify(parts, judged, options.truth)
        if len(parts) > 1 and options.truth is not None
        else None,
    )


def equation_errors(parts: list[FittedPart], holdout: pl.DataFrame) -> EquationErrors | None:
    """Measure a model on all held-out equations; null where none of them is an interval.

    Args:
        parts: The model.
        holdout: All held-out rows.
    """
    if "source" not in holdout.columns or not (holdout["source"] == "interval").any():
        return None
    actual, predicted = target_of(holdout), predict_parts(parts, holdout)
    steps = holdout["interval_steps"].to_numpy()
    return EquationErrors(
        rows_by_source=dict(sorted(holdout.group_by("source").len().iter_rows())),
        per_equation=measure(actual, predicted),
        per_step=measure(np.repeat(actual, steps), np.repeat(predicted, steps)),
    )


def _extrapolated(parts: list[FittedPart], judged: pl.DataFrame) -> tuple[Flags, dict[str, int]]:
    """Tell held-out rows with a feature outside the range of the training rows of their part, and count by feature."""
    outside = np.zeros(judged.height, dtype=bool)
    by_feature: dict[str, int] = {}
    speaker = speakers(parts, judged)
    for index, part in enumerate(parts):
        for term in part.terms:
            values = judged[term.feature.name].cast(pl.Float64).to_numpy()
            beyond = (speaker == index) & ((values < term.seen[0]) | (values > term.seen[1]))
            if beyond.any():
                by_feature[term.feature.name] = by_feature.get(term.feature.name, 0) + int(beyond.sum())
            outside |= beyond
    return outside, by_feature


def _coverage_pct(parts: list[FittedPart], judged: pl.DataFrame) -> float:
    speaker = speakers(parts, judged)
    low, high = np.zeros(judged.height), np.zeros(judged.height)
    for index, part in enumerate(parts):
        limits = part.band.around(part.predict(judged))
        low, high = (np.where(speaker == index, *pair) for pair in zip(limits, (low, high), strict=True))
    return covered_pct(low, target_of(judged), high)


def _classify(parts: list[FittedPart], judged: pl.DataFrame, truth: pl.Expr) -> Classified:
    """Hold the first regime's condition against what happened, on the rows that tell what happened."""
    known = judged.filter(truth.is_not_null())
    true, told = which(known, truth), which(known, parts[0].regime.holds())
    rates = [float((told[true == side] == side).mean()) for side in (True, False) if (true == side).any()]
    return Classified(
        balanced_accuracy=float(np.mean(rates)) if rates else None,
        true_positive=int((true & told).sum()),
        false_negative=int((true & ~told).sum()),
        false_positive=int((~true & told).sum()),
        true_negative=int((~true & ~told).sum()),
    )


def reference(used: pl.DataFrame, judged: pl.DataFrame, names: list[str]) -> Metrics:
    """Gradient boosting on the same features and rows: what a model nobody can read would get."""
    boosted = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    # One thread: threads that wait for each other on a busy machine cost more than they bring on frames this small,
    # and sums do not depend on how many there are.
    with threadpool_limits(1):
        boosted.fit(matrix(used, names), target_of(used))
    return measure(target_of(judged), np.maximum(boosted.predict(matrix(judged, names)), 0.0))
