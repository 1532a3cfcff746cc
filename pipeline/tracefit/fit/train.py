"""Fit one model on one training frame and validate it on its hold-out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.fit import rows as rules
from tracefit.fit.estimators import HUBER, NDArrayInt, RobustLinear, confidence_intervals
from tracefit.fit.metrics import Matrix, Metrics, Vector, measure, skill
from tracefit.fit.select import FOLDS, Choice, LeftOut, choose_penalty, time_blocks, usable_features
from tracefit.fit.weights import interval_weights

MIN_TRAIN_ROWS = 30
MIN_HOLDOUT_ROWS = 10
MAX_UNKNOWN_SHARE = 0.05
INTERVAL_BLOCKS = 50
WITHIN_PCT = 5.0


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """A candidate feature: its column, the unit of a coefficient on it, and how it is computed."""

    name: str
    unit: str
    formula: str | None = None


@dataclass(frozen=True, slots=True)
class FittedTerm:
    """A coefficient on a raw feature."""

    feature: FeatureColumn
    value: float
    ci95: tuple[float, float] | None
    seen: tuple[float, float]


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
    skill: float | None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted linear model with its validation."""

    intercept: float
    intercept_ci95: tuple[float, float]
    terms: tuple[FittedTerm, ...]
    left_out: tuple[LeftOut, ...]
    choice: Choice
    huber: float
    rows_train: int
    rows_used: int
    rows_holdout: int
    validation: Validation
    rows: pl.DataFrame
    """The training frame with `excluded_because` as the fit left it."""


@dataclass(frozen=True, slots=True)
class TooFewRows:
    """Why nothing was fitted."""

    reason: str
    rows: pl.DataFrame


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a target is fitted.

    Attributes:
        drop_outliers: Leave outliers out of the training part. Not for a target whose tail is its signal.
        groups: Name to condition: hold-out errors are also given for these rows.
        judge: Held-out rows to measure the error on, when there are enough of them; all rows if not given.
        reference: Fit the gradient-boosted reference.
    """

    drop_outliers: bool = True
    groups: tuple[tuple[str, pl.Expr], ...] = ()
    judge: pl.Expr | None = None
    reference: bool = True


def fit_linear(rows: pl.DataFrame, features: list[FeatureColumn], options: FitOptions) -> Fitted | TooFewRows:
    """Fit a robust linear model on the training rows of a frame and measure it on the held-out ones.

    Args:
        rows: One row per observation: run_id, server, ts_ns, y, split, excluded_because, and the feature columns.
        features: Candidates in order of preference.
        options: How.
    """
    rows, features, unknown = _drop_unknown(rows, features)
    used = _counted(rows, "train")
    if options.drop_outliers and used.height >= MIN_TRAIN_ROWS:
        rows = _mark_outliers(rows, used, features)
        used = _counted(rows, "train")
    holdout = _counted(rows, "holdout")
    if used.height < MIN_TRAIN_ROWS or holdout.height < MIN_HOLDOUT_ROWS:
        have = f"{used.height} training and {holdout.height} held-out rows"
        need = f"{MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed"
        return TooFewRows(f"{have}, {need}", rows)
    data, left = _training_data(used, features)
    choice = choose_penalty(data.x, data.y, time_blocks(data.run, data.time, FOLDS), data.weights)
    model = RobustLinear(choice.penalty, choice.strength).fit(data.x, data.y, data.weights)
    intercept_ci, intervals = confidence_intervals(data.x, data.y, model, data.blocks(INTERVAL_BLOCKS))
    zeroed = [
        LeftOut(c.name, "set to zero by the Lasso")
        for c, v in zip(data.columns, model.coef_, strict=True)
        if v == 0
    ]
    judged = _judged(holdout, options.judge)
    return Fitted(
        intercept=model.intercept_,
        intercept_ci95=intercept_ci,
        terms=tuple(_terms(data.columns, model, intervals, data.x)),
        left_out=tuple(unknown + left + zeroed),
        choice=choice,
        huber=HUBER,
        rows_train=int((rows["split"] == "train").sum()),
        rows_used=used.height,
        rows_holdout=judged.height,
        validation=_validate(model, data, judged, options),
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """Training rows as arrays: features (n, n_features), targets, weights, run and time, each (n,)."""

    columns: list[FeatureColumn]
    x: Matrix
    y: Vector
    weights: Vector
    run: NDArrayInt
    time: NDArrayInt

    def blocks(self, count: int) -> NDArrayInt:
        """Blocks of time, numbered over all runs."""
        return time_blocks(self.run, self.time, count) + self.run * count


def _training_data(used: pl.DataFrame, features: list[FeatureColumn]) -> tuple[_Data, list[LeftOut]]:
    names = [f.name for f in features]
    everything, y = _matrix(used, names), _target(used)
    kept, left = usable_features(everything, names)
    x = everything[:, kept]
    weights = np.ones(len(y))
    if "interval_steps" in used.columns:
        steps, sd = _matrix(used, ["interval_steps", "cycle_sd_us"]).T
        weights = interval_weights(x, y, steps, sd)
    columns = [features[k] for k in kept]
    return _Data(columns, x, y, weights, _run_index(used), used["ts_ns"].to_numpy()), left


def _counted(rows: pl.DataFrame, split: str) -> pl.DataFrame:
    return rows.filter((pl.col("split") == split) & pl.col("excluded_because").is_null())


def _judged(holdout: pl.DataFrame, judge: pl.Expr | None) -> pl.DataFrame:
    """Return the held-out rows the error is measured on: those `judge` asks for, all if they are too few."""
    if judge is None:
        return holdout
    wanted = holdout.filter(judge)
    return wanted if wanted.height >= MIN_HOLDOUT_ROWS else holdout


def _drop_unknown(
    rows: pl.DataFrame, features: list[FeatureColumn]
) -> tuple[pl.DataFrame, list[FeatureColumn], list[LeftOut]]:
    """Drop features that too many rows lack; of the few rows that lack another, training rows are left out."""
    counted = rows.filter(pl.col("excluded_because").is_null())
    lacking = {f.name: _null_share(counted[f.name]) for f in features}
    kept = [f for f in features if lacking[f.name] <= MAX_UNKNOWN_SHARE]
    left = [LeftOut(f.name, _unknown_reason(lacking[f.name])) for f in features if f not in kept]
    if not kept:
        return rows, kept, left
    any_null = pl.any_horizontal(pl.col(f.name).is_null() for f in kept)
    rows = rules.mark(rows, rules.UNKNOWN_FEATURES, any_null)
    trained = pl.col("split") == "train"
    medians = [pl.col(f.name).fill_null(pl.col(f.name).filter(trained).median()) for f in kept]
    # A held-out row is never left out for a feature nobody knows: the middle of the range stands in for it.
    return rows.with_columns(medians), kept, left


def _null_share(column: pl.Series) -> float:
    return column.null_count() / len(column) if len(column) else 1.0


def _unknown_reason(share: float) -> str:
    return "not known in these runs" if share == 1.0 else f"not known on {100 * share:.0f} % of the rows"


def _mark_outliers(rows: pl.DataFrame, used: pl.DataFrame, features: list[FeatureColumn]) -> pl.DataFrame:
    names = [f.name for f in features]
    kept, _ = usable_features(_matrix(used, names), names)
    far = rules.outliers(_matrix(used, names)[:, kept], _target(used))
    flags = np.zeros(rows.height, dtype=bool)
    is_used = (rows["split"] == "train") & rows["excluded_because"].is_null()
    flags[np.flatnonzero(is_used.to_numpy())] = far
    return rules.mark(rows, rules.OUTLIER, pl.lit(pl.Series("far", flags)))


def _matrix(rows: pl.DataFrame, names: list[str]) -> Matrix:
    if not names:
        return np.zeros((rows.height, 0))
    return rows.select(pl.col(n).cast(pl.Float64) for n in names).to_numpy().astype(np.float64)


def _target(rows: pl.DataFrame) -> Vector:
    return rows["y"].to_numpy().astype(np.float64)


def _run_index(rows: pl.DataFrame) -> NDArrayInt:
    return rows.select(pl.struct(rules.SERVER).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()


def _terms(
    columns: list[FeatureColumn], model: RobustLinear, intervals: list[tuple[float, float] | None], x: Matrix
) -> list[FittedTerm]:
    return [
        FittedTerm(column, float(value), interval, (float(x[:, i].min()), float(x[:, i].max())))
        for i, (column, value, interval) in enumerate(zip(columns, model.coef_, intervals, strict=True))
        if value != 0
    ]


def _validate(model: RobustLinear, data: _Data, judged: pl.DataFrame, options: FitOptions) -> Validation:
    names = [c.name for c in data.columns]
    x, y = data.x, data.y
    x_held, y_held = _matrix(judged, names), _target(judged)
    predicted = np.maximum(model.predict(x_held), 0.0)
    measured = measure(y_held, predicted)
    baseline = measure(y_held, np.full(len(y_held), float(np.median(y))))
    groups = {name: judged.select(condition).to_series().to_numpy() for name, condition in options.groups}
    outside = (x_held < x.min(axis=0)) | (x_held > x.max(axis=0))
    close = np.abs(predicted - y_held) <= WITHIN_PCT / 100 * np.abs(y_held)
    return Validation(
        train=measure(y, np.maximum(model.predict(x), 0.0)),
        holdout=measured,
        baseline=baseline,
        reference=_reference(data, x_held, y_held) if options.reference and names else None,
        by={name: measure(y_held[rows], predicted[rows]) for name, rows in groups.items() if rows.any()},
        within_5_pct=100 * float(close.mean()),
        extrapolated_rows=int(outside.any(axis=1).sum()),
        skill=skill(measured, baseline),
    )


def _reference(data: _Data, x_held: Matrix, y_held: Vector) -> Metrics:
    """Gradient boosting on the same features and rows: what a model nobody can read would get."""
    boosted = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    # One thread: threads that wait for each other on a busy machine cost more than they bring on frames this small,
    # and sums do not depend on how many there are.
    with threadpool_limits(1):
        boosted.fit(data.x, data.y, data.weights)
    return measure(y_held, np.maximum(boosted.predict(x_held), 0.0))
