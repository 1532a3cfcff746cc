"""Errors of models: metrics, quantiles and prediction intervals, and the evaluation of a fitted model on held-out rows.

Every report and file of tracefit states errors as this module computes them. A model is compared with the training
median (the baseline), gradient boosting on the same features (how much error a more flexible model would remove), and
the model itself fitted on fewer rows (the learning curve).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import tracefit.recordings  # noqa: F401 - declares the sources of recorded steps
from tracefit.fit.boosting import boosted
from tracefit.fit.fitted import (
    FREE,
    FittedRegime,
    active_regime,
    matrix,
    predict_regimes,
    target_of,
    which,
)
from tracefit.fit.results import Distribution
from tracefit.models.validation import (
    NO_ROWS,
    Classifier,
    Metrics,
    PredictionInterval,
    SummedRowErrors,
    Validation,
)
from tracefit.statistics import PERCENTS
from tracefit.tables.sources import is_one_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.fitted import FitOptions
    from tracefit.statistics import Flags, Vector


# -- predictions -----------------------------------------------------------------------------------------


def measure(actual: Vector, predicted: Vector) -> Metrics:
    """Return the errors of predictions; both of shape (n,), in the same unit."""
    if actual.size == 0:
        return NO_ROWS
    error = np.abs(predicted - actual)
    nonzero = actual != 0
    ape = 100 * error[nonzero] / np.abs(actual[nonzero])
    total_squares = float(np.sum((actual - actual.mean()) ** 2))
    total = float(actual.sum())
    quantiles = [float(q) for q in np.quantile(ape, [0.5, 0.9, 0.99])] if ape.size else [None, None, None]
    return Metrics(
        n=int(actual.size),
        mape_pct=float(ape.mean()) if ape.size else None,
        mdape_pct=quantiles[0],
        mae=float(error.mean()),
        rmse=float(np.sqrt(np.mean(error**2))),
        r2=1 - float(np.sum(error**2)) / total_squares if total_squares > 0 else None,
        bias_pct=100 * (float(predicted.sum()) - total) / total if total else None,
        p90_ape_pct=quantiles[1],
        p99_ape_pct=quantiles[2],
        zero_targets=int(np.sum(~nonzero)),
    )


def skill(model: Metrics, baseline: Metrics) -> float | None:
    """Return the share of the baseline's mean absolute error that the model removes: 1 is perfect, 0 no better."""
    if model.mae is None or not baseline.mae:
        return None
    return 1 - model.mae / baseline.mae


def distribution(rows: pl.DataFrame, measured: str, *predictions: str) -> Distribution | None:
    """Return quantiles of a column and of its predictions, over the rows where all are known; null without such rows.

    A prediction that is null on all rows is left out and removes no row. Predictions are clipped at 0, as everywhere.
    """
    columns = [name for name in predictions if rows[name].count()]
    rows = rows.drop_nulls([measured, *columns])
    if not rows.height or not columns:
        return None
    curves = (_quantiles(rows[name].clip(lower_bound=0)) if name in columns else None for name in predictions)
    return Distribution(rows.height, PERCENTS, _quantiles(rows[measured]), *curves)


def _quantiles(column: pl.Series) -> tuple[float, ...]:
    return tuple(float(column.quantile(p / 100, "linear") or 0.0) for p in PERCENTS)


INTERVAL_LEVEL_PCT = 95.0


def prediction_interval(predicted: Vector, actual: Vector, regime: str = "all") -> PredictionInterval:
    """Return the limits that 2.5 % of rows are below and above, as conformal quantiles at k / (n + 1) (Vovk et al.
    2005).

    The limits are ratios or differences, whichever give the narrower intervals over these rows: the noise of a step
    time grows with the step, the noise of a wait need not.
    """
    tail = (1 - INTERVAL_LEVEL_PCT / 100) / 2
    differences = _limits(actual - predicted, tail)
    if (predicted > 0).all():
        ratios = _limits(actual / predicted, tail)
        if (ratios[1] - ratios[0]) * float(predicted.mean()) < differences[1] - differences[0]:
            return PredictionInterval(regime, INTERVAL_LEVEL_PCT, "ratio", *ratios)
    return PredictionInterval(regime, INTERVAL_LEVEL_PCT, "difference", *differences)


def _limits(values: Vector, tail: float) -> tuple[float, float]:
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


def coverage_pct(low: Vector, actual: Vector, high: Vector) -> float:
    """Return the share of rows within their limits, in percent."""
    return 100 * float(np.mean((actual >= low) & (actual <= high)))


def within_5_pct(actual: Vector, predicted: Vector) -> float:
    """Return the share of rows that are predicted within 5 %, in percent."""
    return 100 * float((np.abs(predicted - actual) <= 5.0 / 100 * np.abs(actual)).mean())


# -- a fitted model --------------------------------------------------------------------------------------


def validate(
    regimes: list[FittedRegime], used: pl.DataFrame, evaluated: pl.DataFrame, options: FitOptions
) -> Validation:
    """Measure a model on the held-out rows, with its baseline and its reference."""
    y, y_holdout = target_of(used), target_of(evaluated)
    predicted = predict_regimes(regimes, evaluated)
    measured = measure(y_holdout, predicted)
    baseline = measure(y_holdout, np.full(len(y_holdout), float(np.median(y))))
    outside, extrapolated = extrapolated_rows(regimes, evaluated)

    def by(groups: dict[str, Flags]) -> dict[str, Metrics]:
        return {name: measure(y_holdout[rows], predicted[rows]) for name, rows in groups.items() if rows.any()}

    names = sorted({t.feature for regime in regimes for t in regime.terms})
    return Validation(
        unit="us",
        n_features=sum(len(regime.terms) for regime in regimes),
        train=measure(y, predict_regimes(regimes, used)),
        holdout=measured,
        baseline=baseline,
        gradient_boosting=reference(used, evaluated, names) if options.reference and names else None,
        by_group=by({name: which(evaluated, condition) for name, condition in options.groups}),
        within_5_pct=within_5_pct(y_holdout, predicted),
        extrapolated_rows=int(outside.sum()),
        extrapolated=extrapolated,
        prediction_intervals=tuple(regime.prediction_interval for regime in regimes),
        interval_coverage_pct=_coverage_pct(regimes, evaluated),
        collinearity=tuple(regime.collinearity for regime in regimes),
        rows_by_source=_by_source(used),
        by_load=by({"inside": ~outside, "outside": outside}),
        skill=skill(measured, baseline),
        classifier=_classify(regimes, evaluated, options.label)
        if len(regimes) > 1 and options.label is not None
        else None,
    )


def held_out_error(regimes: list[FittedRegime], evaluated: pl.DataFrame) -> Validation:
    """Return the errors of a model on the held-out rows, and nothing else: for a fit that is compared with others."""
    return Validation(
        unit="us",
        n_features=sum(len(regime.terms) for regime in regimes),
        train=NO_ROWS,
        holdout=measure(target_of(evaluated), predict_regimes(regimes, evaluated)),
        baseline=NO_ROWS,
        gradient_boosting=None,
        skill=None,
    )


def summed_row_errors(regimes: list[FittedRegime], holdout: pl.DataFrame) -> SummedRowErrors | None:
    """Measure a step-time model on all held-out rows, intervals included; null where none is an interval."""
    if "source" not in holdout.columns or holdout.select(is_one_step().all()).item():
        return None
    actual, predicted = target_of(holdout), predict_regimes(regimes, holdout)
    steps = holdout["interval_steps"].to_numpy()
    return SummedRowErrors(
        rows_by_source=_by_source(holdout),
        per_equation=measure(actual, predicted),
        per_step=measure(np.repeat(actual, steps), np.repeat(predicted, steps)),
    )


def _by_source(rows: pl.DataFrame) -> dict[str, int]:
    """Count rows by kind of equation, in name order; none where the target has one kind only."""
    return dict(sorted(rows.group_by("source").len().iter_rows())) if "source" in rows.columns else {}


def extrapolated_rows(regimes: Sequence[FittedRegime], evaluated: pl.DataFrame) -> tuple[Flags, dict[str, int]]:
    """Return which rows have a feature outside the training range of their regime, and how many by feature."""
    outside = np.zeros(evaluated.height, dtype=bool)
    by_feature: dict[str, int] = {}
    active = active_regime(regimes, evaluated)
    for index, regime in enumerate(regimes):
        for term in regime.terms:
            values = evaluated[term.feature].cast(pl.Float64).to_numpy()
            low, high = term.limits
            out_of_range = (active == index) & ((values < low) | (values > high))
            if out_of_range.any():
                by_feature[term.feature] = by_feature.get(term.feature, 0) + int(out_of_range.sum())
            outside |= out_of_range
    return outside, by_feature


def _coverage_pct(regimes: list[FittedRegime], evaluated: pl.DataFrame) -> float:
    """Return the percent of rows within the prediction interval of their regime."""
    active = active_regime(regimes, evaluated)
    limits = [regime.prediction_interval.limits(regime.predict(evaluated)) for regime in regimes]
    low, high = (np.choose(active, side) for side in zip(*limits, strict=True))
    return coverage_pct(low, target_of(evaluated), high)


def _classify(regimes: list[FittedRegime], evaluated: pl.DataFrame, label: pl.Expr) -> Classifier:
    """Compare whether the conditions leave a request waiting with whether it was, on the rows where that is known."""
    evaluated = evaluated.filter(label.is_not_null())
    waits = np.array([regime.regime.name != FREE for regime in regimes])
    true, predicted = which(evaluated, label), waits[active_regime(regimes, evaluated)]
    # Balanced accuracy: the mean of the rates of correct predictions among true and among false rows.
    rates = [float((predicted[true == side] == side).mean()) for side in (True, False) if (true == side).any()]
    return Classifier(
        balanced_accuracy=float(np.mean(rates)) if rates else None,
        confusion={
            "true_positive": int((true & predicted).sum()),
            "false_negative": int((true & ~predicted).sum()),
            "false_positive": int((~true & predicted).sum()),
            "true_negative": int((~true & ~predicted).sum()),
        },
    )


def reference(used: pl.DataFrame, evaluated: pl.DataFrame, names: list[str]) -> Metrics:
    """Return the errors of gradient boosting on the same features and rows: a flexible model that cannot be read.

    Thirty trees of eight leaves are fitted to the logarithms of the times by least squares. Fifty trees on four times
    the bins take two and a half times as long, and their errors on the recordings of `fixtures/runs` are 2 % smaller.
    """
    logs = np.log(np.maximum(target_of(used), _LEAST_US))
    predicted = np.exp(boosted(matrix(used, names), logs, matrix(evaluated, names)))
    return measure(target_of(evaluated), predicted)


_LEAST_US = 1.0
"""Shortest time that has a logarithm for the reference: stamps resolve none below it."""
