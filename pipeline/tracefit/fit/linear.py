"""Linear models: their candidate features, signs, terms and regimes, and the prediction of a training frame's rows.

A model is one line, or one line per regime: a regime is a condition on the features with a line of its own, and the first
regime whose condition holds predicts a row. `Feature` and `RegimeRows` describe a model before the fit, `FittedTerm` and
`FittedRegime` after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from tracefit.features.sets import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.estimators import Penalty, Positive
    from tracefit.fit.results import Collinearity, OmittedFeature, PenaltyChoice, PredictionInterval
    from tracefit.statistics import Flags, Integers, Matrix, Vector


MAX_VIF = 10.0
"""A feature whose variance inflation against the features before it exceeds this is left out as redundant."""

MAX_PRODUCT_VIF = 100.0
"""The limit for a product of features. A square always correlates with its root; cross-validation decides on products."""


PENALTIES: tuple[tuple[Penalty, float], ...] = (
    *(("ridge", s) for s in (1e-8, 1e-4, 1e-3, 1e-2)),
    *(("lasso", s) for s in (1e-3, 1e-2, 3e-2)),
    *(("elastic_net", s) for s in (1e-3, 1e-2)),
)
"""Penalties and strengths that are compared, in order of preference."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Which signs are in force in a fit.

    Attributes:
        slopes: Which coefficients cannot be negative: none, those whose feature declares it, or all.
        intercept: Whether the intercept cannot be negative.
    """

    slopes: Literal["any", "declared", "non_negative"] = "declared"
    intercept: bool = False

    def of(self, features: Sequence[Feature]) -> Positive:
        """Return which coefficients cannot be negative in a model of these features, the intercept last."""
        if self.slopes == "declared":
            return (*(f.sign == "non_negative" for f in features), self.intercept)
        return (*(self.slopes == "non_negative" for _ in features), self.intercept)


ANY_SIGN = Signs("any")
NON_NEGATIVE = Signs("non_negative", intercept=True)


@dataclass(frozen=True, slots=True)
class FittedTerm:
    """A coefficient on a raw feature."""

    feature: Feature
    value: float
    ci95: tuple[float, float] | None
    training_range: tuple[float, float]


@dataclass(frozen=True, slots=True)
class RegimeComparison:
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
class RegimeRows:
    """The rows of one linear model: those for which any comparison holds; all remaining rows if there are no comparisons."""

    name: str
    any_of: tuple[RegimeComparison, ...]
    features: tuple[Feature, ...]

    def holds(self) -> pl.Expr:
        """Return the condition as an expression over a training frame."""
        return pl.any_horizontal(c.holds() for c in self.any_of) if self.any_of else pl.lit(value=True)


@dataclass(frozen=True, slots=True)
class FittedRegime:
    """One linear model: the whole of a linear fit, or one regime of a fit by regimes."""

    regime: RegimeRows
    intercept: float
    intercept_ci95: tuple[float, float] | None
    terms: tuple[FittedTerm, ...]
    features_left_out: tuple[OmittedFeature, ...]
    choice: PenaltyChoice
    rows_used: int
    collinearity: Collinearity
    prediction_interval: PredictionInterval
    signs: Signs = ANY_SIGN
    """The signs that were in force."""

    @property
    def least(self) -> float:
        """Smallest prediction, before clipping, over the box of the training ranges of all features."""
        return self.intercept + sum(
            min(t.value * t.training_range[0], t.value * t.training_range[1]) for t in self.terms
        )

    def predict(self, rows: pl.DataFrame) -> Vector:
        """Predict the rows of a training frame, clipped at 0; shape (n,)."""
        values: Vector = np.full(rows.height, self.intercept)
        for term in self.terms:
            values += term.value * rows[term.feature.name].cast(pl.Float64).to_numpy()
        return np.asarray(np.maximum(values, 0.0))


def predict_regimes(regimes: Sequence[FittedRegime], rows: pl.DataFrame) -> Vector:
    """Predict rows, each by the first regime whose condition holds; shape (n,)."""
    active = active_regime(regimes, rows)
    predicted = np.zeros(rows.height)
    for index, regime in enumerate(regimes):
        predicted = np.where(active == index, regime.predict(rows), predicted)
    return predicted


def active_regime(regimes: Sequence[FittedRegime], rows: pl.DataFrame) -> Integers:
    """Return the index of the regime that predicts each row; shape (n,)."""
    # From the last regime to the first: where several conditions hold the earliest one is written last and stays.
    active = np.full(rows.height, len(regimes) - 1)
    for index in reversed(range(len(regimes) - 1)):
        active[which(rows, regimes[index].regime.holds())] = index
    return active


def which(rows: pl.DataFrame, condition: pl.Expr) -> Flags:
    """Return which rows a condition holds for, shape (n,); it does not hold where it is null."""
    return rows.with_columns(_holds=condition.fill_null(value=False))["_holds"].to_numpy().astype(bool)


def linear_terms(
    columns: Sequence[Feature],
    coefficients: Vector,
    x: Matrix,
    intervals: Sequence[tuple[float, float] | None] | None = None,
) -> tuple[FittedTerm, ...]:
    """Return a term per coefficient that is not zero, with the range of its feature in the training rows `x`."""
    given = intervals or [None] * len(columns)
    return tuple(
        FittedTerm(column, float(value), interval, (float(values.min()), float(values.max())))
        for column, value, interval, values in zip(columns, coefficients, given, x.T, strict=True)
        if value != 0
    )


def matrix(rows: pl.DataFrame, names: Sequence[str]) -> Matrix:
    """Return columns as floats, shape (n, n_names); null is NaN."""
    if not names:
        return np.zeros((rows.height, 0))
    return rows.select(pl.col(n).cast(pl.Float64) for n in names).to_numpy().astype(np.float64)


def target_of(rows: pl.DataFrame) -> Vector:
    """Return the column y as floats, shape (n,)."""
    return rows["y"].to_numpy().astype(np.float64)


def max_inflations(features: Sequence[Feature]) -> list[float]:
    """Return the variance inflation against the features before it above which each feature is left out."""
    products = {f.name for f in PRODUCTS}
    return [MAX_PRODUCT_VIF if f.name in products else MAX_VIF for f in features]
