"""Estimators: a robust linear model with Ridge, Lasso or elastic-net penalty, and non-negative least squares.

Both reweight rows by Huber's weights, so that the one step in a hundred that hits a hiccup pulls with bounded force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from tracefit.fit.solvers import Penalty, Positive, bounds_of, line, moments, ridge_share
from tracefit.statistics import robust_sd

if TYPE_CHECKING:
    from tracefit.fit.arrays import Integers, Matrix, Vector

HUBER = 1.345
"""Tuning constant of the Huber weights: 95 % efficient under Gaussian noise (Huber 1964)."""

_MAX_ITER = 30
_SETTLED = 1e-6
_FLAT = 0.05
"""Slope of a row's pull beyond the bend. In theory it is zero, but then a feature that only such rows carry would look
certain."""


@dataclass(frozen=True, slots=True)
class RowWeights:
    """How much each training row counted in a fit.

    Attributes:
        weights: Shape (n,), final weights: given ones times Huber's.
        slopes: Shape (n,), how much more a row pulls per unit of residual: its given weight, next to nothing beyond the bend
            of Huber's loss.
    """

    weights: Vector
    slopes: Vector


class RobustLinear(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Linear model with a Ridge, Lasso or elastic-net penalty, fitted by iteratively reweighted least squares.

    Minimises sum_i w_i (y_i - b - x_i.a)^2 + penalty(a) over standardised features, where w_i is 1 within `huber`
    robust standard deviations of the fit and falls as 1/|r_i| beyond, so that the one step in a hundred that hits a
    hiccup (garbage collection, a page fault, a neighbour) pulls with bounded force.

    Args:
        penalty: `ridge`, `lasso` or `elastic_net`, see `solvers.solve`.
        strength: Relative to the data, so that one grid serves every target: for Ridge a multiple of n on
            standardised features, for Lasso a fraction of the smallest penalty that empties the model.
        huber: Tuning constant; infinity is ordinary least squares.
        max_iter: Most rounds of reweighting.
        positive: Allow no negative coefficient and no negative intercept; or which of them, the intercept last.

    Attributes:
        intercept_: In the unit of y, for raw features.
        coef_: Shape (n_features,), for raw features: `intercept_ + x @ coef_` is the prediction.
        n_iter_: Rounds of reweighting it took.
        n_features_in_: Features it was fitted on.

    Examples:
        Ten steps of 2 ms and 10 us per token, the last one hit by a hiccup of 50 ms:

        >>> import numpy as np
        >>> tokens = np.arange(10.0).reshape(-1, 1)
        >>> time_us = 2_000 + 10 * tokens[:, 0]
        >>> time_us[9] += 50_000
        >>> model = RobustLinear().fit(tokens, time_us)
        >>> round(float(model.intercept_)), model.coef_.round(1)
        (2000, array([10.]))
        >>> model.predict(np.array([[100.0]])).round()
        array([3000.])

    References:
        Huber, Robust Statistics (1981), for the weights; Holland and Welsch (1977) for the reweighting.
    """

    def __init__(
        self,
        penalty: Penalty = "ridge",
        strength: float = 1e-6,
        huber: float = HUBER,
        max_iter: int = _MAX_ITER,
        *,
        positive: Positive = False,
    ) -> None:
        self.penalty = penalty
        self.strength = strength
        self.huber = huber
        self.max_iter = max_iter
        self.positive = positive

    def fit(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> Self:  # noqa: N803  # sklearn's contract
        """Fit on raw features of shape (n, n_features) and targets of shape (n,); return the model itself.

        Args:
            X: Raw features.
            y: Targets.
            sample_weight: Inverse variance of each row up to a factor, shape (n,); equal if not given.

        Raises:
            ValueError: There are no rows, or values that are not finite numbers.
        """
        self.fit_rows(X, y, sample_weight)
        return self

    def fit_rows(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> RowWeights:  # noqa: N803  # sklearn's contract
        """Fit as `fit` does, and return how much each row counted: confidence intervals need it, predictions do not."""
        # A model without features is allowed: it is a constant, the baseline that other models are compared with.
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_features=0)
        y = np.asarray(y, dtype=float)
        given = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        given = given / np.mean(given)
        center, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        z = np.asfortranarray((x - center) / scale)
        # On standardised features one penalty strength suits all of them. `origin` is where the raw features are zero.
        origin = -center / scale
        settled = _SETTLED * (np.abs(y).max(initial=0.0) or 1.0)
        bent, fitted = np.ones(len(y)), np.full(len(y), np.inf)
        for rounds in range(1, self.max_iter + 2):  # noqa: B007  # read after the loop
            weights = given * bent
            summed = moments(z, y, weights)
            intercept, slopes = line(summed, origin, self.penalty, self.strength, positive=self.positive)
            before, fitted = fitted, intercept - origin @ slopes + z @ slopes
            if np.abs(fitted - before).max(initial=0.0) <= settled:
                break
            bent = huber_weights((y - fitted) * np.sqrt(given), self.huber)
        self.n_iter_ = rounds
        self.coef_: Vector = slopes / scale
        self.intercept_ = intercept
        return RowWeights(weights, given * np.where(bent < 1, _FLAT, 1.0))

    def predict(self, X: Matrix) -> Vector:  # noqa: N803  # scikit-learn's contract
        """Return intercept + X @ coefficients, shape (n,)."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=np.float64, reset=False, ensure_min_features=0)
        return np.asarray(self.intercept_ + x @ self.coef_, dtype=float)


def huber_weights(residual: Vector, huber: float) -> Vector:
    """Return weights in (0, 1]: 1 within `huber` robust standard deviations, huber/|u| beyond; shape (n,)."""
    sd = robust_sd(residual)
    if sd <= 0 or not np.isfinite(huber):
        return np.ones(len(residual))
    return np.minimum(1.0, huber / np.maximum(np.abs(residual) / sd, 1e-12))


def confidence_intervals(
    x: Matrix, y: Vector, model: RobustLinear, rows: RowWeights, blocks: Integers, *, level: float = 0.95
) -> tuple[Interval | None, list[Interval | None]]:
    """Return confidence intervals of the intercept and of each coefficient, robust to correlation between rows near in time.

    Cluster-robust sandwich: V = A^-1 (sum over blocks g_b g_b') A^-1 with A = Z'DZ + penalty, D the slopes of the rows'
    pull (not its weights, which would make intervals too narrow: Huber 1981) and g_b the sum of a block's weighted
    scores, times the small-sample factor B/(B-1); quantile of Student's t with B-1 degrees of freedom (Liang and Zeger
    1986; Cameron and Miller 2015). A coefficient that a penalty or a bound set to zero has no interval; the interval of a
    number that cannot be negative starts at zero or above.

    Args:
        x: Raw features, shape (n, n_features).
        y: Targets, shape (n,).
        model: Model fitted on exactly these rows.
        rows: What `fit_rows` returned.
        blocks: Shape (n,), the time block of each row.
        level: Nominal coverage.
    """
    active = np.flatnonzero(model.coef_)
    at_least_zero, constant_at_least_zero = bounds_of(model.positive, x.shape[1])
    # A line forced through the origin has no intercept to vary: its design has no column of ones.
    bound = constant_at_least_zero and model.intercept_ == 0
    center = np.zeros(len(active)) if bound else x[:, active].mean(axis=0)
    scale = x[:, active].std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.column_stack([np.full(len(y), float(not bound)), (x[:, active] - center) / scale])
    penalty = np.full(design.shape[1], ridge_share(model.penalty) * model.strength * len(y))
    penalty[0] = 0.0
    bread = np.linalg.pinv(design.T @ (design * rows.slopes[:, None]) + np.diag(penalty))
    pull = rows.weights * (y - model.predict(x))
    _, index = np.unique(blocks, return_inverse=True)
    count = int(index.max()) + 1
    scores = np.column_stack([np.bincount(index, pull * column, count) for column in design.T])
    cov = bread @ (scores.T @ scores) @ bread * (count / max(count - 1, 1))
    # Back to raw features: slope = b / scale, intercept = b0 - sum(b * center / scale).
    back = np.diag(np.concatenate([[1.0], 1 / scale]))
    back[0, 1:] = -center / scale
    errors = np.sqrt(np.maximum(np.diag(back @ cov @ back.T), 0.0))
    reach = float(stdtrit(max(count - 1, 1), 0.5 + level / 2)) * errors

    def around(value: float, width: float, *, cut: bool) -> Interval:
        return max(value - width, 0.0 if cut else -np.inf), value + width

    intervals: list[Interval | None] = [None] * x.shape[1]
    for position, feature in enumerate(active, start=1):
        width, cut = float(reach[position]), bool(at_least_zero[feature])
        intervals[int(feature)] = around(float(model.coef_[feature]), width, cut=cut)
    constant = around(model.intercept_, float(reach[0]), cut=constant_at_least_zero)
    return None if bound else constant, intervals


Interval = tuple[float, float]


ROUNDS = 10


def fit_nonnegative(x: Matrix, y: Vector, weights: Vector | None = None, *, huber: float = HUBER) -> Vector:
    """Minimise sum_i w_i h_i (y_i - x_i.a)^2 over a >= 0, h_i Huber's weights.

    There is no intercept; a column of ones among the terms is one.

    Args:
        x: Terms, shape (n, n_terms), none of them negative.
        y: Targets, shape (n,).
        weights: Shape (n,); equal if not given.
        huber: Tuning constant of the Huber weights; infinity for a fit of the mean, tails and all.

    Returns:
        Coefficients, shape (n_terms,); 0 for a term that is 0 on every row.
    """
    given = np.ones(len(y)) if weights is None else weights
    scale = x.max(axis=0, initial=0.0)
    scale = np.where(scale > 0, scale, 1.0)
    bent = np.ones(len(y))
    found = np.zeros(x.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(given * bent)
        found, _norm = nnls((x / scale) * root[:, None], y * root)
        bent = huber_weights(y - (x / scale) @ found, huber)
    return np.asarray(found / scale)


def balanced(group: Integers) -> Vector:
    """Return weights that give every group the same total, however many rows it has; shape (n,), mean 1."""
    _, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    weights = 1.0 / counts[index]
    return np.asarray(weights / weights.mean())
