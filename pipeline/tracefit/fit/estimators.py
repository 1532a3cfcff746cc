"""The linear estimator: Ridge or Lasso made robust by Huber weights, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from scipy.stats import t as student_t
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import Lasso, Ridge
from sklearn.utils.validation import check_is_fitted

if TYPE_CHECKING:
    from tracefit.fit.metrics import Matrix, Vector

Penalty = Literal["ridge", "lasso"]

HUBER = 1.345
"""Tuning constant of the Huber weights: 95 % efficient under Gaussian noise (Huber 1964)."""

_ROUNDS = 30
_SETTLED = 1e-6
_LASSO_ROUNDS = 100_000
_NORMAL_MAD = 1.4826
_FLAT = 0.05
"""Slope of a row's pull beyond the bend: zero in truth, which would let a feature that only such rows carry look certain."""


class RobustLinear(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Linear model with a Ridge or Lasso penalty, fitted by iteratively reweighted least squares.

    Minimises sum_i w_i (y_i - b - x_i.a)^2 + penalty(a) over standardised features, where w_i is 1 within `huber`
    robust standard deviations of the fit and falls as 1/|r_i| beyond, so that the one step in a hundred that hits a
    hiccup (garbage collection, a page fault, a neighbour) pulls with bounded force.

    Args:
        penalty: `ridge` or `lasso`.
        strength: Relative to the data, so that one grid serves every target: for Ridge a multiple of n on
            standardised features, for Lasso a fraction of the smallest penalty that empties the model.
        huber: Tuning constant; infinity is ordinary least squares.
        rounds: Most rounds of reweighting.

    Attributes:
        intercept_: In the unit of y, for raw features.
        coef_: Shape (n_features,), for raw features: `intercept_ + x @ coef_` is the prediction.
        weights_: Shape (n,), final weights of the training rows: given ones times Huber's.
        slopes_: Shape (n,), how much more a row pulls per unit of residual: its given weight, next to nothing beyond
            the bend of Huber's loss.
    """

    def __init__(
        self, penalty: Penalty = "ridge", strength: float = 1e-6, huber: float = HUBER, rounds: int = _ROUNDS
    ) -> None:
        self.penalty = penalty
        self.strength = strength
        self.huber = huber
        self.rounds = rounds

    def fit(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> Self:  # noqa: N803  # sklearn's contract
        """Fit on raw features of shape (n, n_features) and targets of shape (n,).

        Args:
            X: Raw features.
            y: Targets.
            sample_weight: Inverse variance of each row up to a factor, shape (n,); equal if not given.
        """
        x = np.asarray(X, dtype=float)
        y = np.asarray(y, dtype=float)
        given = np.ones(len(y)) if sample_weight is None else sample_weight / np.mean(sample_weight)
        center, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        z = (x - center) / scale
        weights, bent = given, given
        intercept, slopes = self._solve(z, y, weights)
        for _ in range(self.rounds):
            residual = y - intercept - z @ slopes
            bent = huber_weights(residual * np.sqrt(given), self.huber)
            weights = given * bent
            intercept, slopes = self._solve(z, y, weights)
            moved = np.abs(residual - (y - intercept - z @ slopes)).max(initial=0.0)
            if moved <= _SETTLED * (np.abs(y).max(initial=0.0) or 1.0):
                break
        self.n_features_in_ = x.shape[1]
        self.coef_: Vector = slopes / scale
        self.intercept_ = float(intercept - center @ self.coef_)
        self.weights_: Vector = weights
        self.slopes_: Vector = given * np.where(bent < 1, _FLAT, 1.0)
        return self

    def predict(self, X: Matrix) -> Vector:  # noqa: N803  # scikit-learn's contract
        """Return intercept + X @ coefficients, shape (n,)."""
        check_is_fitted(self)
        return np.asarray(self.intercept_ + np.asarray(X, dtype=float) @ self.coef_, dtype=float)

    def _solve(self, z: Matrix, y: Vector, weights: Vector) -> tuple[float, Vector]:
        """Solve the weighted problem; centering and scaling by root weights makes it an unweighted one."""
        level = float(np.average(y, weights=weights))
        if z.shape[1] == 0:
            return level, np.zeros(0)
        center = np.average(z, axis=0, weights=weights)
        root = np.sqrt(weights)
        x, target = (z - center) * root[:, None], (y - level) * root
        if self.penalty == "ridge":
            model = Ridge(alpha=self.strength * len(y), fit_intercept=False, solver="cholesky")
        else:
            emptying = float(np.abs(x.T @ target).max()) / len(y)
            strength = max(self.strength * emptying, 1e-12)
            model = Lasso(strength, fit_intercept=False, precompute=x.T @ x, max_iter=_LASSO_ROUNDS, tol=1e-5)
        model.fit(x, target)
        slopes = np.asarray(model.coef_, dtype=float)
        return level - float(center @ slopes), slopes


def huber_weights(residual: Vector, huber: float) -> Vector:
    """Return weights in (0, 1]: 1 within `huber` robust standard deviations, huber/|u| beyond; shape (n,)."""
    centered = np.abs(residual - np.median(residual))
    spread = _NORMAL_MAD * float(np.median(centered))
    if spread <= 0 or not np.isfinite(huber):
        return np.ones(len(residual))
    return np.minimum(1.0, huber / np.maximum(np.abs(residual) / spread, 1e-12))


def confidence_intervals(
    x: Matrix, y: Vector, model: RobustLinear, blocks: NDArrayInt, *, level: float = 0.95
) -> tuple[tuple[float, float], list[tuple[float, float] | None]]:
    """Intervals of the intercept and of each coefficient, robust to neighbours in time resembling each other.

    Cluster-robust sandwich: V = A^-1 (sum over blocks g_b g_b') A^-1 with A = Z'DZ + penalty, D the slopes of the rows'
    pull (not its weights, which would make intervals too narrow: Huber 1981) and g_b the sum of a block's weighted
    scores, times the small-sample factor B/(B-1); quantile of Student's t with B-1 degrees of freedom (Liang and Zeger
    1986; Cameron and Miller 2015). Coefficients the Lasso set to zero have no interval.

    Args:
        x: Raw features, shape (n, n_features).
        y: Targets, shape (n,).
        model: Fitted on exactly these rows.
        blocks: Shape (n,), the time block of each row.
        level: Coverage aimed at.
    """
    active = np.flatnonzero(model.coef_) if x.shape[1] else np.zeros(0, dtype=int)
    center, scale = x[:, active].mean(axis=0), x[:, active].std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.column_stack([np.ones(len(y)), (x[:, active] - center) / scale])
    weighted = design * model.weights_[:, None]
    penalty = np.zeros(design.shape[1])
    if model.penalty == "ridge":
        penalty[1:] = model.strength * len(y)
    bread = np.linalg.pinv(design.T @ (design * model.slopes_[:, None]) + np.diag(penalty))
    residual = y - model.predict(x)
    _, index = np.unique(blocks, return_inverse=True)
    count = int(index.max()) + 1
    scores = np.zeros((count, design.shape[1]))
    np.add.at(scores, index, weighted * residual[:, None])
    cov = bread @ (scores.T @ scores) @ bread * (count / max(count - 1, 1))
    # Back to raw features: slope = b / scale, intercept = b0 - sum(b * center / scale).
    back = np.diag(np.concatenate([[1.0], 1 / scale]))
    back[0, 1:] = -center / scale
    spread = np.sqrt(np.maximum(np.diag(back @ cov @ back.T), 0.0))
    reach = float(student_t.ppf(0.5 + level / 2, max(count - 1, 1))) * spread
    intercept = (model.intercept_ - float(reach[0]), model.intercept_ + float(reach[0]))
    intervals: list[tuple[float, float] | None] = [None] * x.shape[1]
    for position, feature in enumerate(active, start=1):
        value = float(model.coef_[feature])
        intervals[int(feature)] = (value - float(reach[position]), value + float(reach[position]))
    return intercept, intervals


NDArrayInt = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
