"""The estimator of the law: bounded sums of terms, the larger one the time, fitted to relative errors.

Minimises sum_i w_i h(r_i)^2 + strength * d' R^-1 d, with r_i = predicted_i / y_i - 1, Huber's loss h, d_j = (c_j -
prior_j) / scale_j and R the correlations that are expected of the coefficients. Each coefficient is within its bounds.
The time is max(always + max(memory, compute), launch), each the sum of the terms of this part; without terms of memory
and compute it is max(always, launch). Which sum is the larger on a row depends on the coefficients: they are refitted
in turn until that no longer changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from scipy.optimize import lsq_linear
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tracefit.statistics import Matrix, Vector

    Names = NDArray[np.str_]

Part = Literal["always", "memory", "compute", "launch"]

HUBER_SHARE = 0.05
"""Relative error from which on a row pulls with bounded force."""
MOST_ROUNDS = 40
ALIKE = 0.8
"""Correlation that coefficients of one name are expected to have: what is seen of one of them says something of the
others."""
_SETTLED_LAW = 1e-5
_LEAST_RIDGE = 1e-10
"""Share of each square that is added to it: two terms that always go together have one solution."""
_FEWEST_ROUNDS = 5
"""Rows that the work needs: with fewer, the launches are left out of a round."""
_SETTLED_WEIGHTS = 1e-3


class LawRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The larger of sums of bounded terms, by robust relative least squares with a Ridge towards priors.

    Args:
        low: Least coefficients, shape (n_features,); 0 if not given.
        high: Largest coefficients; no limit if not given.
        prior: Coefficients to which the Ridge draws; 0 if not given.
        scale: Distances from the prior that cost the same; 1 if not given.
        part: The sum that each column is in; `always` if not given.
        alike: Names; coefficients of columns with the same one are expected to be alike. None are if not given, or
            empty.
        strength: Weight of the Ridge beside the mean squared relative error.
        huber: Relative error from which on a row pulls with bounded force.

    Attributes:
        coef_: Coefficients, shape (n_features,).
        loss_: Mean of Huber's loss of the relative errors, weighted.
        n_iter_: Rounds of reweighting.

    Examples:
        Steps of 2 ms and 10 us per token, or of 5 ms where these take less:

        >>> import numpy as np
        >>> x = np.array([[1, t, 1] for t in range(0, 600, 10)], dtype=float)
        >>> y = np.maximum(2000 + 10 * x[:, 1], 5000 * x[:, 2])
        >>> law = LawRegressor(part=["always", "always", "launch"], strength=1e-12, prior=[1000, 5, 4000]).fit(x, y)
        >>> law.coef_.round(-1)
        array([2000.,   10., 5000.])
    """

    def __init__(
        self,
        *,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
        prior: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        part: Sequence[Part] | None = None,
        alike: Sequence[str] | None = None,
        strength: float = 1e-3,
        huber: float = HUBER_SHARE,
    ) -> None:
        self.low = low
        self.high = high
        self.prior = prior
        self.scale = scale
        self.part = part
        self.alike = alike
        self.strength = strength
        self.huber = huber

    def __sklearn_tags__(self) -> Any:
        """Say that the target must be positive: errors are relative to it."""
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit rows.

        Args:
            X: Terms, shape (n, n_features).
            y: Times, shape (n,), above 0.
            sample_weight: Weights of the rows, shape (n,); 1 each if not given.

        Raises:
            ValueError: A time is not positive, no row has a weight, or an array has another shape or a value that is
                not finite.
        """
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)  # noqa: N806
        if not (y > 0).all():
            raise ValueError("errors are relative to times, which must be above 0")
        count = X.shape[1]
        weights = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight, dtype=float)
        if not weights.sum() > 0:
            raise ValueError("the sum of the sample weights is zero")
        weights = weights / weights.sum()
        low, high = _of(self.low, count, 0.0), _of(self.high, count, np.inf)
        prior, ridge = _of(self.prior, count, 0.0), self.strength * self._precision(count)
        parts = self._parts(count)
        shares = X / y[:, None]
        coef = np.clip(prior, low, high)
        huber = np.ones(len(y))
        self.n_iter_ = 0
        for _ in range(MOST_ROUNDS):
            self.n_iter_ += 1
            taken = _taken(shares, coef, parts)
            # A sum that no row takes keeps its priors: with others' rows it would explain what it never takes.
            rows, pull = _masked(shares, parts, taken), weights * huber
            if (taken == "launch").sum() > len(y) - _FEWEST_ROUNDS:
                # Every row has the work: it is fitted to all of them, beside the launches.
                work = _taken(shares, coef, np.where(parts == "launch", "never", parts))
                rows, pull = np.concatenate([rows, _masked(shares, parts, work)]), np.tile(pull, 2)
            found = _bounded(rows, pull, ridge, prior, (low, high))
            settled = np.abs(found - coef).max(initial=0.0) <= _SETTLED_LAW * (1 + np.abs(coef).max(initial=0.0))
            coef = found
            error = np.abs(_time(shares, coef, parts) - 1)
            before, huber = huber, np.minimum(1.0, self.huber / np.maximum(error, 1e-12))
            if settled and np.abs(before - huber).max(initial=0.0) <= _SETTLED_WEIGHTS:
                break
        self.coef_ = coef
        self.loss_ = float(weights @ np.where(error <= self.huber, error**2, self.huber * (2 * error - self.huber)))
        return self

    def predict(self, X: Matrix) -> Vector:  # noqa: N803 - scikit-learn's name
        """Return the times of rows of terms (n, n_features); shape (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)  # noqa: N806
        return _time(X, self.coef_, self._parts(X.shape[1]))

    def _precision(self, count: int) -> Matrix:
        """Return the inverse of the covariance that coefficients are expected to have, shape (n_features,
        n_features).
        """
        scale = _of(self.scale, count, 1.0)
        together = np.eye(count)
        if self.alike is not None:
            group = np.array(self.alike)
            together[(group[:, None] == group) & (group != "")] = ALIKE
            np.fill_diagonal(together, 1.0)
        return np.asarray(np.linalg.inv(together * np.outer(scale, scale)))

    def _parts(self, count: int) -> Names:
        return np.array(self.part if self.part is not None else ["always"] * count, dtype="U7")


def _of(values: Sequence[float] | None, count: int, default: float) -> Vector:
    """Return a parameter as an array of one value per feature."""
    return np.full(count, default) if values is None else np.asarray(values, dtype=float)


def _sum(x: Matrix, coef: Vector, parts: Names, part: Part) -> Vector:
    of = parts == part
    return np.asarray(x[:, of] @ coef[of])


def _work(x: Matrix, coef: Vector, parts: Names) -> Vector:
    longer = np.maximum(_sum(x, coef, parts, "memory"), _sum(x, coef, parts, "compute"))
    return np.asarray(_sum(x, coef, parts, "always") + longer)


def _time(x: Matrix, coef: Vector, parts: Names) -> Vector:
    return np.maximum(_work(x, coef, parts), _sum(x, coef, parts, "launch"))


def _taken(x: Matrix, coef: Vector, parts: Names) -> Names:
    """Return which of memory, compute and launch each row takes; shape (n,)."""
    work = np.where(_sum(x, coef, parts, "compute") > _sum(x, coef, parts, "memory"), "compute", "memory")
    is_launched = _sum(x, coef, parts, "launch") > _work(x, coef, parts)
    return np.where(is_launched, "launch", work)


def _masked(x: Matrix, parts: Names, taken: Names) -> Matrix:
    """Return the rows with 0 in the columns of the sums that they do not take."""
    return np.asarray(x * ((parts == "always") & (taken != "launch")[:, None] | (parts == taken[:, None])))


def _bounded(shares: Matrix, weights: Vector, ridge: Matrix, prior: Vector, bounds: tuple[Vector, Vector]) -> Vector:
    """Return the coefficients that minimise the weighted squares and the Ridge within the bounds."""
    gram = shares.T @ (weights[:, None] * shares) + ridge
    cross = shares.T @ weights + ridge @ prior
    gram += np.diag(_LEAST_RIDGE * np.maximum(np.diag(gram), np.finfo(float).tiny))
    # The factor of the products stands for the rows: a few numbers instead of thousands.
    factor = np.linalg.cholesky(gram)
    return np.asarray(lsq_linear(factor.T, np.linalg.solve(factor, cross), bounds, method="bvls").x)
