"""Fit one model, of one regime or several, on one training frame and validate it on the frame's hold-out.

`fit_linear` and `fit_regimes` are the entries. The steps: drop features that too many rows lack, mark outliers, fit each
regime on the rows its condition holds for (features, penalty, coefficients, intervals), evaluate all regimes together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit import splits
from tracefit.fit.design import Design, design_of, outliers
from tracefit.fit.estimators import HUBER, RobustLinear, bounds_of, confidence_intervals
from tracefit.fit.fitted import LinearFit, TooFewRows
from tracefit.fit.linear import (
    NON_NEGATIVE,
    FittedRegime,
    RegimeRows,
    linear_terms,
    matrix,
    max_inflations,
    target_of,
    which,
)
from tracefit.fit.results import NO_INTERVAL, OmittedFeature
from tracefit.fit.select import (
    ENOUGH_ROWS,
    FOLDS,
    choose_penalty,
    collinearity,
    is_worse_than_constant,
    out_of_fold,
    usable_features,
)
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted, evaluation_rows
from tracefit.fit.validation import equation_errors, learning_curve, prediction_interval, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.fitted import FitOptions
    from tracefit.fit.results import PredictionInterval
    from tracefit.statistics import Vector

MAX_UNKNOWN_SHARE = 0.05
_SPELLED = {"ridge": "Ridge", "lasso": "Lasso", "elastic_net": "elastic net"}


def fit_linear(
    rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions
) -> LinearFit | TooFewRows:
    """Fit a robust linear model on the training rows of a frame and measure it on the held-out ones.

    Args:
        rows: One row per observation: run_id, server, ts_ns, y, split, excluded_reason, and the feature columns.
        features: Candidates in order of preference.
        options: How to fit.
    """
    return fit_regimes(rows, [RegimeRows("all", (), tuple(features))], options)


def fit_regimes(rows: pl.DataFrame, regimes: list[RegimeRows], options: FitOptions) -> LinearFit | TooFewRows:
    """Fit one robust linear model per regime and measure them together on the held-out rows.

    A regime with too few training rows is not fitted; its rows fall to the next one.

    Args:
        rows: As for `fit_linear`, and the features that the conditions compare.
        regimes: The regimes in order: the first whose condition holds predicts a row. The last one has no condition.
        options: How to fit.
    """
    features = list({f.name: f for regime in regimes for f in regime.features}.values())
    rows, known, unknown = _drop_unknown(rows, features)
    used = counted(rows, "train")
    if options.drop_outliers and used.height >= MIN_TRAIN_ROWS:
        rows = _mark_outliers(rows, used, known)
        used = counted(rows, "train")
    holdout = counted(rows, "holdout")
    # Held-out rows keep their outliers, so that an interval must know of those of the training.
    outlying = rows.filter((pl.col("split") == "train") & (pl.col("excluded_reason") == splits.OUTLIER))
    fitted, designs = _fit_each(used, outlying, regimes, {f.name for f in known}, unknown, options)
    if not fitted or holdout.height < MIN_HOLDOUT_ROWS:
        have = f"{used.height} training and {holdout.height} held-out rows"
        need = f"{MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed"
        return TooFewRows(f"{have}, {need}")
    evaluated = evaluation_rows(holdout, options.eval_filter)
    curve = learning_curve(fitted, designs, evaluated, fewest=MIN_TRAIN_ROWS)
    return LinearFit(
        regimes=tuple(fitted),
        huber=HUBER,
        rows_train=int((rows["split"] == "train").sum()),
        rows_used=used.height,
        rows_holdout=evaluated.height,
        validation=replace(
            validate(fitted, used, evaluated, options),
            learning_curve=curve,
            held_out_equations=equation_errors(fitted, holdout),
        ),
        rows=rows,
    )


def training_design(
    rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions
) -> tuple[pl.DataFrame, Design] | None:
    """Return the training rows that `fit_linear` would use, as a frame and as arrays; null where rows or features are too few.

    At most `select.ENOUGH_ROWS` rows are taken, evenly over the frame.
    """
    rows, known, _ = _drop_unknown(rows, features)
    used = counted(rows, "train")
    used = used.gather_every(max(1, -(-used.height // ENOUGH_ROWS)))
    if used.height < MIN_TRAIN_ROWS:
        return None
    if options.drop_outliers:
        used = counted(_mark_outliers(used, used, known), "train")
    if used.height < MIN_TRAIN_ROWS:
        return None
    data, _ = design_of(used, known)
    if not data.columns:
        return None
    return used, data


def mark_outliers(rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions) -> pl.DataFrame:
    """Mark the training rows that a fit of these features would leave out as outliers."""
    filled, known, _ = _drop_unknown(rows, features)
    used = counted(filled, "train")
    if not options.drop_outliers or used.height < MIN_TRAIN_ROWS:
        return rows
    return rows.with_columns(_mark_outliers(filled, used, known)["excluded_reason"])


def _fit_each(
    used: pl.DataFrame,
    outlying: pl.DataFrame,
    regimes: list[RegimeRows],
    known: set[str],
    unknown: list[OmittedFeature],
    options: FitOptions,
) -> tuple[list[FittedRegime], list[Design]]:
    """Fit every regime that has enough rows; return the fitted ones with the arrays they were fitted on."""
    results: list[FittedRegime] = []
    designs: list[Design] = []
    rest = used
    for regime in regimes:
        matching = rest.filter(regime.holds())
        if matching.height < MIN_TRAIN_ROWS:
            continue
        rest = rest.filter(~regime.holds()) if regime.any_of else rest.clear()
        columns = [f for f in regime.features if f.name in known]
        lacking = [x for x in unknown if x.feature in {f.name for f in regime.features}]
        fitted, design = _fit_one(matching, outlying.filter(regime.holds()), regime, columns, options)
        left_out = tuple(_with_range(x, matching) for x in (*lacking, *fitted.features_left_out))
        results.append(replace(fitted, features_left_out=left_out))
        designs.append(design)
    # The last regime must predict all remaining rows, so that it loses the condition it was fitted under.
    if results and results[-1].regime.any_of:
        results[-1] = replace(results[-1], regime=replace(results[-1].regime, any_of=()))
    return results, designs


def _with_range(omitted: OmittedFeature, used: pl.DataFrame) -> OmittedFeature:
    """Add the range of an omitted feature: a model without prompt tokens was trained on few of them, or on none."""
    values = matrix(used, [omitted.feature])
    if not values.size or not np.isfinite(values).all():
        return omitted
    return replace(omitted, training_range=(float(values.min()), float(values.max())))


def _fit_one(
    used: pl.DataFrame,
    outlying: pl.DataFrame,
    regime: RegimeRows,
    features: Sequence[Feature],
    options: FitOptions,
) -> tuple[FittedRegime, Design]:
    """Fit one regime on the training rows its condition holds for.

    Args:
        used: The rows to fit.
        outlying: Rows of the regime that are left out as outliers; its prediction interval covers them.
        regime: The regime.
        features: Its candidates whose values are known.
        options: How to fit.
    """
    data, left = design_of(used, features)
    positive, folds = options.signs.of(data.columns), data.folds(FOLDS)
    choice = choose_penalty(
        data.x, data.y, folds, data.weights, options.penalties, positive=positive, counts=data.counts
    )
    if is_worse_than_constant(data.x, data.y, folds, data.weights, choice, data.counts):
        reason = "predicts left-out blocks of time worse than a constant"
        misleading = [OmittedFeature(c.name, reason) for c in data.columns]
        fitted, design = _fit_one(used, outlying, regime, [], options)
        return replace(fitted, features_left_out=(*left, *misleading, *fitted.features_left_out)), design
    model = RobustLinear(choice.penalty, choice.strength, positive=positive)
    rows = model.fit_rows(data.x, data.y, data.weights)
    intercept_ci, intervals = confidence_intervals(data.x, data.y, model, rows, data.blocks())
    bounds, _ = bounds_of(positive, len(data.columns))
    penalized = f"set to zero by the {_SPELLED[choice.penalty]}"
    zeroed = [
        OmittedFeature(c.name, "its coefficient is not above zero in these runs" if bound else penalized)
        for c, value, bound in zip(data.columns, model.coef_, bounds, strict=True)
        if value == 0
    ]
    terms = linear_terms(data.columns, model.coef_, data.x, intervals)
    in_model = [data.columns.index(t.feature) for t in terms]
    fitted = FittedRegime(
        regime=regime,
        intercept=model.intercept_,
        intercept_ci95=intercept_ci,
        terms=terms,
        features_left_out=(*left, *zeroed),
        choice=choice,
        rows_used=used.height,
        collinearity=collinearity(data.x[:, in_model], [t.feature.name for t in terms], regime.name),
        prediction_interval=NO_INTERVAL,
        signs=options.signs,
    )
    if fitted.least <= 0 and options.signs.intercept and options.signs != NON_NEGATIVE:
        # Terms of either sign can predict times below zero within their training ranges. Refitted without negative
        # coefficients they cannot.
        return _fit_one(used, outlying, regime, features, replace(options, signs=NON_NEGATIVE))
    # In-sample errors would make the interval too narrow.
    predicted = out_of_fold(data.x, data.y, folds, data.weights, choice, positive=positive)
    interval = _interval(fitted, used, predicted, outlying, options.eval_filter)
    return replace(fitted, prediction_interval=interval), data


def _interval(
    fitted: FittedRegime,
    used: pl.DataFrame,
    out_of_sample: Vector,
    outlying: pl.DataFrame,
    eval_filter: pl.Expr | None,
) -> PredictionInterval:
    """Return the prediction interval of the rows the error is measured on, with outliers among them."""
    predicted = np.concatenate([out_of_sample, fitted.predict(outlying)])
    actual = np.concatenate([target_of(used), target_of(outlying)])
    if eval_filter is not None:
        selected = np.concatenate([which(frame, eval_filter) for frame in (used, outlying)])
        if selected.sum() >= MIN_TRAIN_ROWS:
            predicted, actual = predicted[selected], actual[selected]
    return prediction_interval(predicted, actual, fitted.regime.name)


def _drop_unknown(
    rows: pl.DataFrame, features: Sequence[Feature]
) -> tuple[pl.DataFrame, list[Feature], list[OmittedFeature]]:
    """Drop features that too many rows lack; mark the training rows that lack one of the others, and fill the rest in.

    Returns:
        The frame, the kept features, and the dropped ones with reasons.
    """
    included = rows.filter(pl.col("excluded_reason").is_null())
    lacking = {f.name: _null_share(included[f.name]) for f in features}
    kept = [f for f in features if lacking[f.name] <= MAX_UNKNOWN_SHARE]
    left = [OmittedFeature(f.name, _unknown_reason(lacking[f.name])) for f in features if f not in kept]
    if not kept:
        return rows, kept, left
    any_null = pl.any_horizontal(pl.col(f.name).is_null() for f in kept)
    rows = splits.mark(rows, splits.UNKNOWN_FEATURES, any_null)
    trained = pl.col("split") == "train"
    medians = [pl.col(f.name).fill_null(pl.col(f.name).filter(trained).median()) for f in kept]
    # A held-out row is never left out for an unknown feature: the median stands in for it, as in a prediction.
    return rows.with_columns(medians), kept, left


def _null_share(column: pl.Series) -> float:
    return column.null_count() / len(column) if len(column) else 1.0


def _unknown_reason(share: float) -> str:
    return "not known in these runs" if share == 1.0 else f"not known on {100 * share:.0f} % of the rows"


def _mark_outliers(rows: pl.DataFrame, used: pl.DataFrame, features: Sequence[Feature]) -> pl.DataFrame:
    names = [f.name for f in features]
    kept, _ = usable_features(matrix(used, names), names, max_inflations(features))
    far = outliers(matrix(used, names)[:, kept], target_of(used))
    flags = np.zeros(rows.height, dtype=bool)
    is_used = (rows["split"] == "train") & rows["excluded_reason"].is_null()
    flags[np.flatnonzero(is_used.to_numpy())] = far
    return splits.mark(rows, splits.OUTLIER, pl.lit(pl.Series("far", flags)))
