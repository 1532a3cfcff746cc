"""Fit one model, of one regime or several, on one training frame and validate it on the frame's hold-out.

`fit_linear` and `fit_regimes` are the entries. The steps: drop features that too many rows lack, mark outliers, fit
each regime on the rows its condition holds for (features, penalty, coefficients, intervals), evaluate all regimes
together.

A fit takes its rows as arrays (`select.Design`). Rows differ in how much they determine: an interval of many steps has
less noise than one step, a start taken from an event has more than one from a summary, and the noise of a step may grow
with its time. Weights are inverse variances of all three.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
import polars as pl

from tracefit.fit import splits
from tracefit.fit.estimators import FEW_ROUNDS, RobustLinear, bounds_of, confidence_intervals
from tracefit.fit.fitted import (
    NON_NEGATIVE,
    FittedRegime,
    LinearFit,
    RegimeRows,
    TooFewRows,
    linear_terms,
    matrix,
    predict_regimes,
    target_of,
    which,
)
from tracefit.fit.select import (
    ENOUGH_ROWS,
    FOLDS,
    Design,
    collinearity,
    estimator,
    time_blocks,
    usable_features,
)
from tracefit.fit.speed import SPEED
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted_rows, evaluation_rows
from tracefit.fit.validation import held_out_error, measure, prediction_interval, summed_row_errors, validate
from tracefit.models.columns import held
from tracefit.models.schema import NO_CONDITION, Number, OmittedFeature
from tracefit.models.validation import Collinearity, LearningPoint
from tracefit.statistics import median, robust_sd
from tracefit.tables.schema import SERVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.features.sets import Feature, FeatureSet
    from tracefit.fit.estimators import RowWeights
    from tracefit.fit.fitted import FitOptions
    from tracefit.models.validation import PredictionInterval
    from tracefit.statistics import Flags, Integers, Matrix, Vector

MAX_UNKNOWN_SHARE = 0.05
_ESTIMATOR_NAMES = {"ridge": "Ridge", "lasso": "Lasso", "elastic_net": "elastic net"}


def fit_linear(rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions) -> LinearFit | TooFewRows:
    """Fit a robust linear model on the training rows of a frame and measure it on the held-out ones.

    Columns of `rows`: run_id, server, ts_ns, y, split, excluded_reason, and the features, which are in order of
    preference.
    """
    return fit_regimes(rows, [RegimeRows("all", tuple(features))], options)


def fit_regimes(rows: pl.DataFrame, regimes: Sequence[RegimeRows], options: FitOptions) -> LinearFit | TooFewRows:
    """Fit one robust linear model per regime and measure them together on the held-out rows.

    A regime with too few training rows is not fitted; its rows fall to the next one.
    """
    features = list({f.name: f for regime in regimes for f in regime.features}.values())
    rows, usable, unknown = _prepared(rows, features, options)
    used, holdout = counted_rows(rows, "train"), counted_rows(rows, "holdout")
    # Held-out rows keep their outliers, so that an interval includes those of the training.
    outlying = rows.filter((pl.col("split") == "train") & (pl.col("excluded_reason") == splits.OUTLIER))
    fitted, designs = _fit_each(used, outlying, regimes, {f.name for f in usable}, unknown, options)
    if not fitted or holdout.height < MIN_HOLDOUT_ROWS:
        rows_are = f"{used.height} training and {holdout.height} held-out rows"
        return TooFewRows(f"{rows_are}, {MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed")
    evaluated = evaluation_rows(holdout, options.eval_filter)
    if options.only_error:
        validation = held_out_error(fitted, evaluated)
    else:
        validation = replace(
            validate(fitted, used, evaluated, options),
            learning_curve=learning_curve(fitted, designs, evaluated),
            held_out_equations=summed_row_errors(fitted, holdout),
        )
    return LinearFit(
        regimes=tuple(fitted),
        rows_train=int((rows["split"] == "train").sum()),
        rows_used=used.height,
        rows_holdout=evaluated.height,
        validation=validation,
        rows=rows,
    )


class TrainingRows(msgspec.Struct, frozen=True):
    """Rows that several fits of other features share.

    Attributes:
        included: The rows of both parts that no rule leaves out.
        used: The training rows among them.
    """

    included: pl.DataFrame
    used: FitRows

    @classmethod
    def of(cls, rows: pl.DataFrame) -> Self:
        """Take the rows of a training frame whose outliers are marked."""
        included = rows.filter(pl.col("excluded_reason").is_null())
        return cls(included, _thinned(included.filter(split="train")))

    def design(self, features: FeatureSet, *, relative: bool = False) -> tuple[FitRows, Design] | None:
        """Return the training rows that know the features of a set, as they are and as arrays; null where rows or
        features are too few, or no feature is known that defines the set.

        At most `select.ENOUGH_ROWS` rows are taken, evenly over the frame.
        """
        kept, _ = _known(self.included, features.features)
        names = [f.name for f in kept]
        if features.defining and set(features.defining).isdisjoint(names):
            return None
        used = self.used
        if any(self.included[name].null_count() for name in names):
            used = _thinned(self.included.filter(split="train").drop_nulls(names))
        if len(used.y) < MIN_TRAIN_ROWS:
            return None
        data, _ = design_of(used, kept, relative=relative)
        return (used, data) if data.columns else None


def _thinned(used: pl.DataFrame) -> FitRows:
    return FitRows.of(used[:: max(1, -(-used.height // ENOUGH_ROWS))])


def mark_outliers(rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions) -> pl.DataFrame:
    """Mark the training rows that a fit of these features would leave out, as unknown or as outliers."""
    return rows.with_columns(_prepared(rows, features, options)[0]["excluded_reason"])


def _prepared(
    rows: pl.DataFrame, features: Sequence[Feature], options: FitOptions
) -> tuple[pl.DataFrame, list[Feature], list[OmittedFeature]]:
    """Do as `_drop_unknown` does, and mark outliers where there are enough rows to recognise them."""
    rows, kept, unknown = _drop_unknown(rows, features, fill_holdout=options.fill_unknown)
    if options.drop_outliers and counted_rows(rows, "train").height >= MIN_TRAIN_ROWS:
        rows = _mark_outliers(rows, kept)
    return rows, kept, unknown


def _fit_each(
    used: pl.DataFrame,
    outlying: pl.DataFrame,
    regimes: Sequence[RegimeRows],
    usable: set[str],
    unknown: list[OmittedFeature],
    options: FitOptions,
) -> tuple[list[FittedRegime], list[Design]]:
    """Fit every regime that has enough rows; return the fitted ones with the arrays they were fitted on."""
    results: list[FittedRegime] = []
    designs: list[Design] = []
    for regime in regimes:
        holds = held(used, regime.when)
        matching = used.filter(holds)
        if matching.height < MIN_TRAIN_ROWS:
            continue
        used = used.filter(~holds)
        columns = [f for f in regime.features if f.name in usable]
        lacking = [x for x in unknown if x.feature in {f.name for f in regime.features}]
        fitted, design = _fit_one(matching, outlying.filter(held(outlying, regime.when)), regime, columns, options)
        left_out = tuple(_with_range(x, matching) for x in (*lacking, *fitted.features_left_out))
        results.append(msgspec.structs.replace(fitted, features_left_out=left_out))
        designs.append(design)
    # The last regime must predict all remaining rows, so that it loses the condition it was fitted under.
    if results:
        results[-1] = msgspec.structs.replace(
            results[-1], regime=msgspec.structs.replace(results[-1].regime, when=NO_CONDITION)
        )
    return results, designs


def _with_range(omitted: OmittedFeature, used: pl.DataFrame) -> OmittedFeature:
    """Add the range of an omitted feature: a model without prompt tokens was trained on few of them, or on none."""
    values = matrix(used, [omitted.feature])
    if not values.size or not np.isfinite(values).all():
        return omitted
    return replace(omitted, training_range=(float(values.min()), float(values.max())))


class _FittedLine(msgspec.Struct, frozen=True):
    """The line of a regime, without intervals, and the fit that they are computed from."""

    fitted: FittedRegime
    design: Design
    model: RobustLinear
    rows: RowWeights


def _fit_one(
    used: pl.DataFrame,
    outlying: pl.DataFrame,
    regime: RegimeRows,
    features: Sequence[Feature],
    options: FitOptions,
) -> tuple[FittedRegime, Design]:
    """Fit one regime on the training rows its condition holds for.

    `outlying` are its rows that are left out as outliers: its prediction interval covers them.
    """
    line = _fit_line(used, regime, features, options)
    if options.only_error:
        return line.fitted, line.design
    return _with_intervals(line, used, outlying, options.eval_filter), line.design


def _fit_line(used: pl.DataFrame, regime: RegimeRows, features: Sequence[Feature], options: FitOptions) -> _FittedLine:
    """Fit the line of a regime: a constant where that predicts better, and no negative coefficients where these would
    predict times below zero.
    """
    data, left = design_of(FitRows.of(used), features, relative=options.relative)
    choice = data.choose_penalty(options)
    if data.is_worse_than_constant(choice, options):
        reason = "predicts left-out blocks of time worse than a constant"
        misleading = [OmittedFeature(c.name, reason) for c in data.columns]
        line = _fit_line(used, regime, [], options)
        left_out = (*left, *misleading, *line.fitted.features_left_out)
        fitted = msgspec.structs.replace(line.fitted, features_left_out=left_out)
        return msgspec.structs.replace(line, fitted=fitted)
    model = estimator(choice, options.signs, data.columns)
    rows = model.fit_rows(data.x, data.y, data.weights)
    # Fits of some of these rows, for intervals and the learning curve, start from here; this fit from no other. Where
    # most rows are without noise, a fit that missed the others would pass its weights on.
    data = msgspec.structs.replace(data, start=rows.huber)
    bounds, _ = bounds_of(model.positive, len(data.columns))
    penalized = f"set to zero by the {_ESTIMATOR_NAMES[choice.penalty]}"
    zeroed = [
        OmittedFeature(c.name, "its coefficient is not above zero in these runs" if bound else penalized)
        for c, value, bound in zip(data.columns, model.coef_, bounds, strict=True)
        if value == 0
    ]
    terms = linear_terms(data.columns, model.coef_, data.x)
    alike = [tuple(x.feature for x in left if term.feature in x.collinear_with) for term in terms]
    fitted = FittedRegime(
        regime=regime,
        # As the baseline: of all constants the median has the smallest absolute error.
        intercept=Number(value=model.intercept_ if data.columns else float(np.median(data.y))),
        terms=tuple(t.model_copy(update={"collinear_with": names}) for t, names in zip(terms, alike, strict=True)),
        features_left_out=(*left, *zeroed),
        choice=choice,
        rows_used=used.height,
        collinearity=Collinearity(regime.name, None, {}),
        signs=options.signs,
        relative=options.relative,
    )
    if fitted.least <= 0 and options.signs.intercept and options.signs != NON_NEGATIVE:
        # Terms of either sign can predict times below zero within their training ranges. Refitted without negative
        # coefficients they cannot.
        return _fit_line(used, regime, features, msgspec.structs.replace(options, signs=NON_NEGATIVE))
    return _FittedLine(fitted, data, model, rows)


def _with_intervals(
    line: _FittedLine, used: pl.DataFrame, outlying: pl.DataFrame, eval_filter: pl.Expr | None
) -> FittedRegime:
    """Return a line with the intervals of its numbers and its predictions, and how collinear its features are."""
    fitted, data, model = line.fitted, line.design, line.model
    intercept, predicted = fitted.intercept, np.full(len(data.y), fitted.intercept.value)
    terms = fitted.terms
    if data.columns:
        of_intercept, intervals = confidence_intervals(data.x, data.y, model, line.rows, data.blocks())
        intercept = Number(value=intercept.value, ci95=of_intercept)
        of_terms = dict(zip((column.name for column in data.columns), intervals, strict=True))
        terms = tuple(t.model_copy(update={"ci95": of_terms[t.feature]}) for t in terms)
        # In-sample errors would make the interval too narrow.
        predicted = data.out_of_fold(fitted.choice, fitted.signs)
    return msgspec.structs.replace(
        fitted,
        intercept=intercept,
        terms=terms,
        collinearity=collinearity(data.x[:, model.coef_ != 0], [t.feature for t in terms], fitted.regime.name),
        prediction_interval=_interval(fitted, used, predicted, outlying, eval_filter),
    )


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
    rows: pl.DataFrame, features: Sequence[Feature], *, fill_holdout: bool = True
) -> tuple[pl.DataFrame, list[Feature], list[OmittedFeature]]:
    """Drop features that too many rows lack; mark the rows that lack one of the others, held-out ones unless these are
    filled.

    Returns:
        The frame, the kept features, and the dropped ones with reasons.
    """
    columns = [rows[f.name] for f in features]
    if rows["excluded_reason"].null_count() and all(
        column.dtype == pl.Float64 and not column.null_count() for column in columns
    ):
        # Most frames are complete, and candidates ask often.
        return rows, list(features), []
    kept, left = _known(rows.filter(pl.col("excluded_reason").is_null()), features)
    if not kept:
        return rows, kept, left
    any_null = pl.any_horizontal(pl.col(f.name).is_null() for f in kept)
    rows = splits.mark(rows, splits.UNKNOWN_FEATURES, any_null, holdout=not fill_holdout)
    trained = pl.col("split") == "train"
    medians = [pl.col(f.name).fill_null(pl.col(f.name).filter(trained).median()) for f in kept]
    return rows.with_columns(medians), kept, left


def _known(included: pl.DataFrame, features: Sequence[Feature]) -> tuple[list[Feature], list[OmittedFeature]]:
    """Return the features that enough of the rows have, and the others with reasons."""
    kept, left = [], []
    for feature in features:
        share = included[feature.name].null_count() / included.height if included.height else 1.0
        if share <= MAX_UNKNOWN_SHARE:
            kept.append(feature)
        else:
            unknown = "in these runs" if share == 1.0 else f"on {100 * share:.0f} % of the rows"
            left.append(OmittedFeature(feature.name, f"not known {unknown}"))
    return kept, left


def _mark_outliers(rows: pl.DataFrame, features: Sequence[Feature]) -> pl.DataFrame:
    is_used = (rows["split"] == "train") & rows["excluded_reason"].is_null()
    used, names = rows.filter(is_used), [f.name for f in features]
    x = matrix(used, names)
    kept, _ = usable_features(x, names)
    flags = is_used.to_numpy().copy()
    flags[flags] = outliers(x[:, kept], target_of(used))
    return splits.mark(rows, splits.OUTLIER, pl.lit(pl.Series("far", flags)))


# -- the learning curve ----------------------------------------------------------------------------------


TRAINING_SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the training rows, always the latest ones, so that the distance in time to the hold-out stays the same."""


def learning_curve(
    regimes: Sequence[FittedRegime], designs: Sequence[Design], evaluated: pl.DataFrame
) -> tuple[LearningPoint, ...]:
    """Refit a model on growing shares of its rows, with the features and penalties that were chosen on all rows.

    A share that leaves a regime too few rows for a fit has no point.
    """
    y = target_of(evaluated)
    points = []
    for share in TRAINING_SHARES:
        latest = [design.latest(share) for design in designs]
        rows = [int(flags.sum()) for flags in latest]
        if min(rows) < MIN_TRAIN_ROWS:
            continue
        refitted = list(regimes)
        # The last point is the model itself.
        if share < 1:
            for index, (regime, design, used) in enumerate(zip(regimes, designs, latest, strict=True)):
                # It starts from the fit of all rows.
                model = estimator(regime.choice, regime.signs, design.columns, max_iter=FEW_ROUNDS)
                part = design.part(used)
                model.fit(part.x, part.y, part.weights, part.start)
                terms = linear_terms(design.columns, model.coef_, design.x)
                refitted[index] = msgspec.structs.replace(regime, intercept=Number(value=model.intercept_), terms=terms)
        errors = measure(y, predict_regimes(refitted, evaluated))
        if errors.mae is not None:
            points.append(LearningPoint(share, sum(rows), errors.mae, errors.mape_pct))
    return tuple(points)


# -- rows as arrays ---------------------------------------------------------------------------------------


def server_numbers(rows: pl.DataFrame) -> Integers:
    """Return a number for each server, from 0; shape (n,)."""
    if all(rows[name].n_unique() < 2 for name in SERVER):
        return np.zeros(rows.height, dtype=np.int64)
    return rows.select(pl.struct(SERVER).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()


class FitRows(msgspec.Struct, frozen=True):
    """Rows to fit, and what a fit takes from them whatever its features are; arrays of shape (n,).

    Attributes:
        frame: The rows, with the features.
        y: Targets, at the usual speed of the machine.
        noise: Steps of each row and the standard deviation of its time that comes from the clocks; null if all rows are
            alike.
        scale: Typical target of each row's deployment; null where one deployment is fitted.
        run: Number of the server.
        time: When each row began.
        folds: Number of the block of time, for cross-validation.
    """

    frame: pl.DataFrame
    y: Vector
    noise: tuple[Vector, Vector] | None
    scale: Vector | None
    run: Integers
    time: Integers
    folds: Integers

    @classmethod
    def of(cls, frame: pl.DataFrame) -> Self:
        """Take some rows of a training frame.

        The optional columns `interval_steps` and `cycle_sd_us` give each row's noise. `row_scale_us`, also optional, is
        the typical target of the row's deployment where several deployments are fitted together: errors of one multiple
        of it count the same.
        """

        def floats(name: str) -> Vector | None:
            return matrix(frame, [name])[:, 0] if name in frame.columns else None

        y, speed = target_of(frame), floats(SPEED)
        steps, sd = floats("interval_steps"), floats("cycle_sd_us")
        run = server_numbers(frame)
        if frame["ts_ns"].null_count():
            time = frame.select(splits.in_time()).to_series().to_numpy()
        else:
            time = frame["ts_ns"].to_numpy()
        return cls(
            frame,
            y if speed is None else y / speed,
            None if steps is None or sd is None else (steps, sd),
            floats("row_scale_us"),
            run,
            time,
            time_blocks(run, time, FOLDS),
        )


def design_of(
    used: FitRows, features: Sequence[Feature], *, relative: bool = False
) -> tuple[Design, list[OmittedFeature]]:
    """Return the rows as arrays of the features that can be fitted, and the other features with reasons.

    Args:
        used: Training rows.
        features: Candidates in order of preference.
        relative: Weigh rows by the inverse square of their time, so that errors in proportion to it are minimised.
    """
    names = [f.name for f in features]
    everything, y = matrix(used.frame, names), used.y
    kept, left = usable_features(everything, names)
    x = np.asfortranarray(everything[:, kept])
    counts = weights = np.ones(len(y))
    if used.noise is not None:
        counts = interval_weights(x, y, *used.noise)
        weights = relative_weights(x, y, counts) if relative else noise_weights(x, y, counts)
    if used.scale is not None:
        counts, weights = counts / used.scale**2, weights / used.scale**2
    design = Design([features[k] for k in kept], x, y, weights, counts, used.run, used.time, used.folds)
    return design, left


_MIN_STANDARD_ERRORS = 2.0
"""The exponent of the noise must be this many standard errors above zero to count."""

_LEAST_CURVE_SHARE, _MOST_SHARE = 0.1, 3.0
"""Noise is taken to grow between these multiples of the median time."""

_LOG_SD = 1.1107
"""Standard deviation of the logarithm of the size of a normal deviate: pi / sqrt(8)."""


def interval_weights(x: Matrix, y: Vector, steps: Vector, sd: Vector) -> Vector:
    """Return inverse variances of mean cycles: 1 / (s^2 / n + sd^2), up to a factor; shape (n_rows,).

    `s`, the standard deviation of a single cycle about the model, comes from a first robust fit weighted by n.

    Args:
        x: Features, means over the steps of each interval.
        y: Mean cycles.
        steps: Steps of each interval (n).
        sd: Standard deviation of each mean cycle that comes from its two ends' clocks.
    """
    if np.all(steps == steps[0]) and not np.any(sd):
        return np.ones(len(y))
    residual = (y - RobustLinear(max_iter=FEW_ROUNDS).fit(x, y, steps).predict(x)) * np.sqrt(steps)
    single_sd = robust_sd(residual)
    variance = single_sd**2 / steps + sd**2
    # A model that fits exactly leaves no variance: no row may weigh infinitely much.
    least = float(variance[variance > 0].min(initial=np.inf))
    weights = 1 / np.maximum(variance, least if np.isfinite(least) else 1.0)
    return np.asarray(weights / weights.mean())


def noise_exponent(residual: Vector, predicted: Vector) -> float:
    """Return g of noise whose standard deviation is proportional to predicted**g, from 0 (constant) to 1 (a share).

    g is the slope of log |residual| over log predicted, or 0 where it is not significantly positive (Harvey 1976).
    Where the speed of the machine varies, the noise of a step is a share of its time. The short steps then determine
    the intercept, which the noise of the long ones would drown.

    `residual` is scaled to equal noise except for this growth.
    """
    is_positive = (residual != 0) & (predicted > 0)
    size, time = np.log(np.abs(residual[is_positive])), np.log(predicted[is_positive])
    centered = time - time.mean() if time.size else time
    sum_of_squares = float(centered @ centered)
    if sum_of_squares <= 0:
        return 0.0
    slope = float(centered @ size) / sum_of_squares
    return min(slope, 1.0) if slope > _MIN_STANDARD_ERRORS * _LOG_SD / np.sqrt(sum_of_squares) else 0.0


def noise_weights(x: Matrix, y: Vector, weights: Vector) -> Vector:
    """Return weights times the inverse variance of noise that grows with the time of a step, mean 1; shape
    (n_rows,).
    """
    predicted = RobustLinear(max_iter=FEW_ROUNDS).fit(x, y, weights).predict(x)
    exponent = noise_exponent((y - predicted) * np.sqrt(weights), predicted)
    if exponent == 0:
        return weights
    # Clipped: otherwise a very short step could determine the intercept, and a very long one lose all weight.
    middle = median(predicted)
    within = np.clip(predicted, _LEAST_CURVE_SHARE * middle, _MOST_SHARE * middle)
    both = weights * within ** (-2 * exponent)
    return np.asarray(both / both.mean())


def relative_weights(x: Matrix, y: Vector, weights: Vector) -> Vector:
    """Return weights times the inverse square of predicted times, mean 1; shape (n_rows,).

    The times are those of a first fit weighted by measured ones, which would favour the rows that noise made short.
    """
    # In stamps of whole seconds most times may be zero.
    least = _LEAST_CURVE_SHARE * (median(y) or float(y.mean()) or 1.0)
    first = weights / np.maximum(y, least) ** 2
    predicted = RobustLinear(max_iter=FEW_ROUNDS, positive=True).fit(x, y, first).predict(x)
    both = weights / np.maximum(predicted, least) ** 2
    return np.asarray(both / both.mean())


OUTLIER_SDS = 8.0
OUTLIER_FACTOR = 3.0
"""A training row is an outlier when its residual from a first robust fit is more than 8 robust standard deviations from
the median residual, and it is more than a factor of 3 away from the fit: never more than half of the rows."""


def outliers(x: Matrix, y: Vector) -> Flags:
    """Find the outliers among training rows; shape (n,)."""
    fitted = RobustLinear().fit(x, y).predict(x)
    residual = y - fitted
    # Distances are from the median residual: if most rows are exactly equal, the fit itself can be off for all of them.
    distance = np.abs(residual - np.median(residual))
    floor = np.maximum(fitted, 1e-9)
    far = distance > OUTLIER_SDS * robust_sd(residual)
    return np.asarray(far & ((y > OUTLIER_FACTOR * floor) | (y * OUTLIER_FACTOR < floor)))
