"""Fit one model on one training frame and validate it on its hold-out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.fit import rows as rules
from tracefit.fit.estimators import HUBER, NDArrayInt, RobustLinear, confidence_intervals
from tracefit.fit.metrics import Matrix, Metrics, Vector, measure, skill
from tracefit.fit.select import FOLDS, Choice, LeftOut, choose_penalty, time_blocks, usable_features
from tracefit.fit.weights import interval_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TRAIN_ROWS = 30
MIN_HOLDOUT_ROWS = 10
MAX_UNKNOWN_SHARE = 0.05
BLOCK_ROWS = 10
FEWEST_BLOCKS, MOST_BLOCKS = 10, 50
"""Blocks of time for intervals: long enough that rows of two blocks have little in common, enough to tell a variance."""

WITHIN_PCT = 5.0

_SPELLED = {"ridge": "Ridge", "lasso": "Lasso", "elastic_net": "elastic net"}


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
class Classified:
    """How a regime's condition did on the held-out rows; the first regime is the positive one."""

    balanced_accuracy: float | None
    true_positive: int
    false_negative: int
    false_positive: int
    true_negative: int


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
    classifier: Classified | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A feature compared with a number or with another feature; null compares false."""

    feature: str
    op: Literal["<=", ">"]
    value: float | None = None
    feature2: str | None = None

    def holds(self) -> pl.Expr:
        """Return the comparison as an expression over a training frame."""
        left = pl.col(self.feature)
        right = pl.col(self.feature2) if self.feature2 else pl.lit(self.value)
        return (left <= right if self.op == "<=" else left > right).fill_null(value=False)


@dataclass(frozen=True, slots=True)
class Regime:
    """Rows that one linear model speaks for: those any of the comparisons holds for; all others if there are none."""

    name: str
    any_of: tuple[Comparison, ...]
    features: tuple[FeatureColumn, ...]

    def holds(self) -> pl.Expr:
        """Return the condition as an expression over a training frame."""
        return pl.any_horizontal(c.holds() for c in self.any_of) if self.any_of else pl.lit(value=True)


@dataclass(frozen=True, slots=True)
class FittedPart:
    """One linear model: the whole of a linear fit, or one regime of a fit by regimes."""

    regime: Regime
    intercept: float
    intercept_ci95: tuple[float, float] | None
    terms: tuple[FittedTerm, ...]
    left_out: tuple[LeftOut, ...]
    choice: Choice
    rows_used: int

    def predict(self, rows: pl.DataFrame) -> Vector:
        """Predict the rows of a training frame, clipped at 0; shape (n,)."""
        values: Vector = np.full(rows.height, self.intercept)
        for term in self.terms:
            values += term.value * rows[term.feature.name].cast(pl.Float64).to_numpy()
        return np.asarray(np.maximum(values, 0.0))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted model with its validation: one part, or one per regime, the first whose condition holds speaking."""

    parts: tuple[FittedPart, ...]
    huber: float
    rows_train: int
    rows_used: int
    rows_holdout: int
    validation: Validation
    rows: pl.DataFrame
    """The training frame with `excluded_because` as the fit left it."""

    @property
    def terms(self) -> tuple[FittedTerm, ...]:
        """Terms of all parts."""
        return tuple(t for part in self.parts for t in part.terms)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Features left out of all parts; with several, the regime's name leads the reason."""
        many = len(self.parts) > 1
        return tuple(
            LeftOut(x.feature, f"{part.regime.name}: {x.reason}" if many else x.reason)
            for part in self.parts
            for x in part.left_out
        )


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
        truth: What the first regime's condition should have told, where there are regimes.
        judge: Held-out rows to measure the error on, when there are enough of them; all rows if not given.
        reference: Fit the gradient-boosted reference.
        positive: Costs can only add: no coefficient and no intercept below zero.
    """

    drop_outliers: bool = True
    groups: tuple[tuple[str, pl.Expr], ...] = ()
    judge: pl.Expr | None = None
    truth: pl.Expr | None = None
    reference: bool = True
    positive: bool = False


def fit_linear(rows: pl.DataFrame, features: list[FeatureColumn], options: FitOptions) -> Fitted | TooFewRows:
    """Fit a robust linear model on the training rows of a frame and measure it on the held-out ones.

    Args:
        rows: One row per observation: run_id, server, ts_ns, y, split, excluded_because, and the feature columns.
        features: Candidates in order of preference.
        options: How.
    """
    return fit_regimes(rows, [Regime("all", (), tuple(features))], options)


def fit_regimes(rows: pl.DataFrame, regimes: list[Regime], options: FitOptions) -> Fitted | TooFewRows:
    """Fit one robust linear model per regime and measure them together on the held-out rows.

    A regime with too few training rows is not fitted; its rows fall to the next one.

    Args:
        rows: As for `fit_linear`; also the features the conditions compare.
        regimes: The first whose condition holds speaks for a row; the last one has no condition.
        options: How.
    """
    features = list({f.name: f for regime in regimes for f in regime.features}.values())
    rows, known, unknown = _drop_unknown(rows, features)
    used = _counted(rows, "train")
    if options.drop_outliers and used.height >= MIN_TRAIN_ROWS:
        rows = _mark_outliers(rows, used, known)
        used = _counted(rows, "train")
    holdout = _counted(rows, "holdout")
    parts = _fit_parts(used, regimes, {f.name for f in known}, unknown, positive=options.positive)
    if not parts or holdout.height < MIN_HOLDOUT_ROWS:
        have = f"{used.height} training and {holdout.height} held-out rows"
        need = f"{MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed"
        return TooFewRows(f"{have}, {need}", rows)
    judged = _judged(holdout, options.judge)
    return Fitted(
        parts=tuple(parts),
        huber=HUBER,
        rows_train=int((rows["split"] == "train").sum()),
        rows_used=used.height,
        rows_holdout=judged.height,
        validation=_validate(parts, used, judged, options),
        rows=rows,
    )


def _fit_parts(
    used: pl.DataFrame, regimes: list[Regime], known: set[str], unknown: list[LeftOut], *, positive: bool
) -> list[FittedPart]:
    parts: list[FittedPart] = []
    rest = used
    for regime in regimes:
        mine = rest.filter(regime.holds())
        if mine.height < MIN_TRAIN_ROWS:
            continue
        rest = rest.filter(~regime.holds()) if regime.any_of else rest.clear()
        columns = [f for f in regime.features if f.name in known]
        lacking = [x for x in unknown if x.feature in {f.name for f in regime.features}]
        parts.append(_fit_part(mine, regime, columns, lacking, positive=positive))
    # The last part speaks for all rows that are left, whatever condition it was fitted under.
    if parts and parts[-1].regime.any_of:
        parts[-1] = replace(parts[-1], regime=replace(parts[-1].regime, any_of=()))
    return parts


def _fit_part(
    used: pl.DataFrame,
    regime: Regime,
    features: list[FeatureColumn],
    unknown: list[LeftOut],
    *,
    positive: bool,
) -> FittedPart:
    data, left = _training_data(used, features)
    folds = time_blocks(data.run, data.time, FOLDS)
    choice = choose_penalty(data.x, data.y, folds, data.weights, positive=positive)
    model = RobustLinear(choice.penalty, choice.strength, positive=positive).fit(data.x, data.y, data.weights)
    intercept_ci, intervals = confidence_intervals(data.x, data.y, model, data.blocks())
    reason = "not above zero in these runs" if positive else f"set to zero by the {_SPELLED[choice.penalty]}"
    fitted = zip(data.columns, model.coef_, strict=True)
    zeroed = [LeftOut(c.name, reason) for c, value in fitted if value == 0]
    return FittedPart(
        regime=regime,
        intercept=model.intercept_,
        intercept_ci95=intercept_ci,
        terms=tuple(_terms(data.columns, model, intervals, data.x)),
        left_out=tuple(unknown + left + zeroed),
        choice=choice,
        rows_used=used.height,
    )


def predict_parts(parts: Sequence[FittedPart], rows: pl.DataFrame) -> Vector:
    """Predict rows, each by the first part whose condition holds; shape (n,)."""
    speaker = _speakers(parts, rows)
    predicted = np.zeros(rows.height)
    for index, part in enumerate(parts):
        predicted = np.where(speaker == index, part.predict(rows), predicted)
    return predicted


def _speakers(parts: Sequence[FittedPart], rows: pl.DataFrame) -> NDArrayInt:
    """Return the index of the part that speaks for each row; shape (n,)."""
    speaker = np.full(rows.height, len(parts) - 1)
    for index in reversed(range(len(parts) - 1)):
        speaker[rows.select(holds=parts[index].regime.holds())["holds"].to_numpy()] = index
    return speaker


@dataclass(frozen=True, slots=True)
class _Data:
    """Training rows as arrays: features (n, n_features), targets, weights, run and time, each (n,)."""

    columns: list[FeatureColumn]
    x: Matrix
    y: Vector
    weights: Vector
    run: NDArrayInt
    time: NDArrayInt

    def blocks(self) -> NDArrayInt:
        """Blocks of time for intervals, numbered over all runs."""
        rows = len(self.y) // (int(self.run.max()) + 1)
        count = min(max(rows // BLOCK_ROWS, FEWEST_BLOCKS), MOST_BLOCKS)
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


def _validate(
    parts: list[FittedPart], used: pl.DataFrame, judged: pl.DataFrame, options: FitOptions
) -> Validation:
    y, y_held = _target(used), _target(judged)
    predicted = predict_parts(parts, judged)
    measured = measure(y_held, predicted)
    baseline = measure(y_held, np.full(len(y_held), float(np.median(y))))
    groups = {name: judged.select(condition).to_series().to_numpy() for name, condition in options.groups}
    close = np.abs(predicted - y_held) <= WITHIN_PCT / 100 * np.abs(y_held)
    names = sorted({t.feature.name for part in parts for t in part.terms})
    return Validation(
        train=measure(y, predict_parts(parts, used)),
        holdout=measured,
        baseline=baseline,
        reference=reference(used, judged, names) if options.reference and names else None,
        by={name: measure(y_held[rows], predicted[rows]) for name, rows in groups.items() if rows.any()},
        within_5_pct=100 * float(close.mean()),
        extrapolated_rows=_extrapolated(parts, judged),
        skill=skill(measured, baseline),
        classifier=_classify(parts, judged, options.truth)
        if len(parts) > 1 and options.truth is not None
        else None,
    )


def _extrapolated(parts: list[FittedPart], judged: pl.DataFrame) -> int:
    """Count held-out rows with a feature outside the range of the training rows of their part."""
    outside = np.zeros(judged.height, dtype=bool)
    speaker = _speakers(parts, judged)
    for index, part in enumerate(parts):
        for term in part.terms:
            values = judged[term.feature.name].cast(pl.Float64).to_numpy()
            outside |= (speaker == index) & ((values < term.seen[0]) | (values > term.seen[1]))
    return int(outside.sum())


def _classify(parts: list[FittedPart], judged: pl.DataFrame, truth: pl.Expr) -> Classified:
    """Hold the first regime's condition against what happened."""
    frame = judged.select(truth=truth, told=parts[0].regime.holds())
    true, told = frame["truth"].to_numpy().astype(bool), frame["told"].to_numpy().astype(bool)
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
        boosted.fit(_matrix(used, names), _target(used))
    return measure(_target(judged), np.maximum(boosted.predict(_matrix(judged, names)), 0.0))
