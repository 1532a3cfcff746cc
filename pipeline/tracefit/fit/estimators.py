"""Estimators: a robust linear model with Ridge, Lasso or elastic-net penalty, and non-negative least squares.

Both reweight rows by Huber's weights, so that the one step in a hundred that hits a hiccup pulls with bounded force.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from tracefit.statistics import robust_sd

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Integers, Matrix, Vector


# -- penalised least squares -----------------------------------------------------------------------------
#
# `moments` reduces n rows to matrices of the size of the number of features; `line` and `solve` minimise over them, with
# bounds on the signs of the coefficients. One pass over the rows therefore serves all penalties that are compared.

Penalty = Literal["ridge", "lasso", "elastic_net"]

Positive: TypeAlias = bool | tuple[bool, ...]
"""Coefficients that cannot be negative: all and the intercept, or none; or one flag per feature and, last, the intercept's."""


Shrunk: TypeAlias = tuple[bool, ...]
"""Coefficients with an additional Ridge penalty, which draws them to zero: a flag per feature; empty without any."""

SHRINKAGE = 0.3
"""Strength of that penalty: a correction enters to the extent that the other features cannot explain its rows."""

_LASSO_ROUNDS = 100_000
_BLOCK_ROWS = 8192
"""Rows summed at once: a block of them fits into a processor's cache."""

_SINGULAR = 1e-13
"""Directions with a smaller share of the largest eigenvalue are rounding errors."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Weighted second moments of features and target over `rows` rows.

    Attributes:
        rows: Number of rows, regardless of their weights.
        total: Sum of the weights.
        center: Weighted means of the features, shape (n_features,).
        level: Weighted mean of the target.
        gram: Weighted products of the features about their means, shape (n_features, n_features).
        cross: Weighted products of features and target about their means, shape (n_features,).
    """

    rows: int
    total: float
    center: Vector
    level: float
    gram: Matrix
    cross: Vector


def moments(x: Matrix, y: Vector, weights: Vector) -> Moments:
    """Sum up rows of features (n, n_features), targets (n,) and weights (n,)."""
    total = float(weights.sum())
    center = np.asarray(weights @ x / total)
    level = float(weights @ y / total)
    gram, cross = np.zeros((x.shape[1], x.shape[1])), np.zeros(x.shape[1])
    for first in range(0, len(y), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        # Centered first: sums of raw squares would lose the digits that their difference needs.
        centered = x[rows] - center
        weighted = (centered * weights[rows, None]).T
        gram += weighted @ centered
        cross += weighted @ (y[rows] - level)
    return Moments(len(y), total, center, level, gram, cross)


def bounds_of(positive: Positive, features: int) -> tuple[Flags, bool]:
    """Return which slopes cannot be negative, shape (features,), and whether the intercept cannot."""
    if isinstance(positive, bool):
        return np.full(features, positive), positive
    return np.array(positive[:-1], dtype=bool), positive[-1]


def extra_ridge(shrunk: Shrunk, features: int) -> Vector:
    """Return the Ridge strength that each coefficient has on top of the common one, shape (features,)."""
    return SHRINKAGE * np.array(shrunk or (False,) * features, dtype=float)


def line(
    summed: Moments, origin: Vector, penalty: Penalty, strength: float, *, positive: Positive, shrunk: Shrunk
) -> tuple[float, Vector]:
    """Return intercept and slopes of the line that `solve` finds; the intercept is the line's value at `origin`.

    The problem remains convex where the intercept cannot be negative: if the best line is below zero at the origin, the best
    allowed line goes through zero there.
    """
    bound, intercept_bound = bounds_of(positive, len(origin))
    extra_l2 = extra_ridge(shrunk, len(origin))
    slopes = solve(summed, penalty, strength, bound, extra_l2)
    from_origin = summed.center - origin
    intercept = summed.level - float(from_origin @ slopes)
    if not intercept_bound or intercept >= 0:
        return intercept, slopes
    # Moments about the origin instead of the mean (parallel axis theorem): a line through the origin has no intercept.
    about_origin = replace(
        summed,
        gram=summed.gram + summed.total * np.outer(from_origin, from_origin),
        cross=summed.cross + summed.total * summed.level * from_origin,
    )
    return 0.0, solve(about_origin, penalty, strength, bound, extra_l2)


def solve(summed: Moments, penalty: Penalty, strength: float, bound: Flags, extra_l2: Vector) -> Vector:
    """Return the slopes that minimise the penalised squares, shape (n_features,).

    Minimises |y - x.a|^2 / 2n + l1 |a|_1 + l2 |a|^2 / 2 over the moments, with n the number of rows. Ridge: l2 =
    `strength`. Lasso: l1 = `strength` times the smallest l1 that empties the model. Elastic net (Zou and Hastie 2005):
    half of each. Slopes that are `bound` are not negative (Lawson and Hanson 1974 where l1 is 0). `extra_l2` comes on top for
    each slope.
    """
    if not summed.cross.size:
        return np.zeros(0)
    l2 = ridge_share(penalty) * strength
    l1 = (strength - l2) * float(np.abs(summed.cross).max()) / summed.rows
    gram = summed.gram + summed.rows * np.diag(l2 + extra_l2)
    if l1 == 0 and not bound.any():
        return np.asarray(np.linalg.lstsq(gram, summed.cross, rcond=_SINGULAR)[0])
    root, target = _as_rows(gram, summed.cross)
    if l1 == 0:
        return _partly_nonnegative(root, target, bound)
    # Lasso's `positive` bounds all slopes or none. Where only some are bound, a free slope becomes the difference of two
    # bound ones, whose penalty is the same.
    free = np.flatnonzero(~bound) if bound.any() else np.zeros(0, dtype=np.int64)
    # scikit-learn divides the squares by the rows it gets; these few stand for `summed.rows`.
    alpha, positive = l1 * summed.rows / len(target), bool(bound.any())
    model = Lasso(alpha, fit_intercept=False, positive=positive, max_iter=_LASSO_ROUNDS, tol=1e-6)
    with warnings.catch_warnings():
        # Descent is slow on nearly collinear features. Where it stops is a candidate like any other.
        warnings.simplefilter("ignore", ConvergenceWarning)
        coefficients = np.asarray(model.fit(np.hstack([root, -root[:, free]]), target).coef_, dtype=float)
    slopes = coefficients[: len(summed.cross)]
    slopes[free] -= coefficients[len(summed.cross) :]
    return slopes


def _partly_nonnegative(root: Matrix, target: Vector, bound: Flags) -> Vector:
    """Return the least-squares solution a of root.a = target with a >= 0 where `bound`.

    For any bound slopes the best free ones are an unbounded least-squares solution of the rest. The bound slopes are therefore
    solved by NNLS in the space orthogonal to the free columns (variable projection), the free ones after them.
    """
    slopes = np.zeros(len(bound))
    directions, sizes, _ = np.linalg.svd(root[:, ~bound], full_matrices=False)
    basis = directions[:, sizes > _SINGULAR * sizes.max(initial=0.0)]
    columns = root[:, bound]
    slopes[bound] = nnls(columns - basis @ (basis.T @ columns), target - basis @ (basis.T @ target))[0]
    if not bound.all():
        rest = target - root[:, bound] @ slopes[bound]
        slopes[~bound] = np.linalg.lstsq(root[:, ~bound], rest, rcond=None)[0]
    return slopes


def ridge_share(penalty: Penalty) -> float:
    """Return the share of a penalty's strength that is on the squares of the slopes."""
    return {"ridge": 1.0, "lasso": 0.0, "elastic_net": 0.5}[penalty]


def _as_rows(gram: Matrix, cross: Vector) -> tuple[Matrix, Vector]:
    """Return rows R and targets t, as few as there are features, with R'R = gram and R't = cross."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > _SINGULAR * values.max(initial=0.0)
    root = np.sqrt(values[kept])
    return root[:, None] * vectors[:, kept].T, (vectors[:, kept].T @ cross) / root


# -- robust fits -----------------------------------------------------------------------------------------

HUBER = 1.345
"""Tuning constant of the Huber weights: 95 % efficient under Gaussian noise (Huber 1964)."""

MAX_ITER = 30
"""Most rounds of reweighting."""

_SETTLED = 1e-6
_FLAT = 0.05
"""Slope of a row's pull beyond the bend. In theory it is zero, but then a feature that only such rows carry would look
certain."""


RowWeights: TypeAlias = "tuple[Vector, Vector]"
"""How much each training row counted in a fit: its final weight, the sample weight times Huber's; and how much more it pulls
per unit of residual, its sample weight and next to nothing beyond the bend of Huber's loss. Shape (n,) each."""


class RobustLinear(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Linear model with a Ridge, Lasso or elastic-net penalty, fitted by iteratively reweighted least squares.

    Minimises sum_i w_i (y_i - b - x_i.a)^2 + penalty(a) over standardised features, where w_i is 1 within `huber`
    robust standard deviations of the fit and falls as 1/|r_i| beyond, so that the one step in a hundred that hits a
    hiccup (garbage collection, a page fault, a neighbour) pulls with bounded force.

    Args:
        penalty: `ridge`, `lasso` or `elastic_net`, see `solve`.
        strength: Relative to the data, so that one grid serves every target: for Ridge a multiple of n on
            standardised features, for Lasso a fraction of the smallest penalty that empties the model.
        huber: Tuning constant, above 0; infinity is ordinary least squares.
        max_iter: Most rounds of reweighting; 0 is penalised least squares.
        positive: Allow no negative coefficient and no negative intercept; or which of them, the intercept last.
        shrunk: Which coefficients are drawn to zero, see `SHRINKAGE`; none of them if empty.

    Attributes:
        intercept_: In the unit of y, for raw features.
        coef_: Shape (n_features,), for raw features: `intercept_ + x @ coef_` is the prediction.
        n_iter_: Rounds of reweighting it took, `max_iter` at most.
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
        max_iter: int = MAX_ITER,
        *,
        positive: Positive = False,
        shrunk: Shrunk = (),
    ) -> None:
        self.penalty = penalty
        self.strength = strength
        self.huber = huber
        self.max_iter = max_iter
        self.positive = positive
        self.shrunk = shrunk

    def fit(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> Self:  # noqa: N803  # sklearn's contract
        """Fit on raw features of shape (n, n_features) and targets of shape (n,); return the model itself.

        Args:
            X: Raw features.
            y: Targets.
            sample_weight: Inverse variance of each row up to a factor, shape (n,); equal if not given.

        Raises:
            ValueError: There are no rows, or values that are not finite numbers; or a parameter is not allowed.
        """
        self.fit_rows(X, y, sample_weight)
        return self

    def fit_rows(self, X: Matrix, y: Vector, sample_weight: Vector | None = None) -> RowWeights:  # noqa: N803  # sklearn's contract
        """Fit as `fit` does, and return how much each row counted: confidence intervals need it, predictions do not."""
        self._require_parameters()
        # A model without features is allowed: it is a constant, the baseline that other models are compared with.
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_features=0)
        y = np.asarray(y, dtype=float)
        if not isinstance(self.positive, bool) and len(self.positive) != x.shape[1] + 1:
            raise ValueError(
                f"positive has {len(self.positive)} flags, not one per feature and one for the intercept"
            )
        if self.shrunk and len(self.shrunk) != x.shape[1]:
            raise ValueError(f"shrunk has {len(self.shrunk)} flags, not one per feature")
        sampled = np.ones(len(y)) if sample_weight is None else sample_weight
        sampled = check_array(sampled, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        if sampled.shape != y.shape or (sampled < 0).any() or not sampled.any():
            raise ValueError(
                "Sample weights must contain at least one non-zero number, none below 0, one per row"
            )
        sampled = sampled / np.mean(sampled)
        z, center, scale = standardised(x)
        # On standardised features one penalty strength suits all of them. `origin` is where the raw features are zero.
        origin = -center / scale
        settled = _SETTLED * (np.abs(y).max(initial=0.0) or 1.0)
        huber_factors, fitted = np.ones(len(y)), np.full(len(y), np.inf)
        # The first fit is before any reweighting.
        for rounds in range(self.max_iter + 1):  # noqa: B007  # read after the loop
            weights = sampled * huber_factors
            summed = moments(z, y, weights)
            intercept, slopes = line(
                summed, origin, self.penalty, self.strength, positive=self.positive, shrunk=self.shrunk
            )
            before, fitted = fitted, intercept - origin @ slopes + z @ slopes
            if np.abs(fitted - before).max(initial=0.0) <= settled:
                break
            huber_factors = huber_weights((y - fitted) * np.sqrt(sampled), self.huber)
        self.n_iter_ = rounds
        self.coef_: Vector = slopes / scale
        self.intercept_ = intercept
        return weights, sampled * np.where(huber_factors < 1, _FLAT, 1.0)

    def _require_parameters(self) -> None:
        valid = {
            "penalty": self.penalty in get_args(Penalty),
            "strength": isinstance(self.strength, Real) and self.strength >= 0,
            "huber": isinstance(self.huber, Real) and self.huber > 0,
            "max_iter": isinstance(self.max_iter, Integral) and self.max_iter >= 0,
            "positive": isinstance(self.positive, bool | tuple),
            "shrunk": isinstance(self.shrunk, tuple),
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}")

    def predict(self, X: Matrix) -> Vector:  # noqa: N803  # scikit-learn's contract
        """Return intercept + X @ coefficients, shape (n,)."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=np.float64, reset=False, ensure_min_features=0)
        return np.asarray(self.intercept_ + x @ self.coef_, dtype=float)


def standardised(x: Matrix) -> tuple[Matrix, Vector, Vector]:
    """Return features about their means in standard deviations, and both of these; a constant feature is 0."""
    center, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return np.asfortranarray((x - center) / scale), center, scale


def huber_weights(residual: Vector, huber: float) -> Vector:
    """Return weights in (0, 1]: 1 within `huber` robust standard deviations, huber/|u| beyond; shape (n,)."""
    sd = robust_sd(residual)
    if sd <= 0 or not np.isfinite(huber):
        return np.ones(len(residual))
    return np.minimum(1.0, huber / np.maximum(np.abs(residual) / sd, 1e-12))


def confidence_intervals(
    x: Matrix, y: Vector, model: RobustLinear, rows: RowWeights, blocks: Integers
) -> tuple[Interval | None, list[Interval | None]]:
    """Return 95 % confidence intervals of the intercept and of each coefficient, robust to correlation between rows near in time.

    Cluster-robust sandwich: V = A^-1 (sum over blocks g_b g_b') A^-1 with A = Z'DZ + penalty, D the slopes of the rows'
    pull (not its weights, which would make intervals too narrow: Huber 1981) and g_b the sum of a block's weighted
    scores, times the small-sample factor B/(B-1); quantile of Student's t with B-1 degrees of freedom (Liang and Zeger
    1986; Cameron and Miller 2015). A coefficient that a penalty or a bound set to zero has no interval; the interval of a
    number that cannot be negative starts at zero or above.

    `model` is fitted on exactly these rows, `rows` is what its `fit_rows` returned, and `blocks` the time block of each row.
    """
    weights, pull_slopes = rows
    active = np.flatnonzero(model.coef_)
    at_least_zero, constant_at_least_zero = bounds_of(model.positive, x.shape[1])
    # A line forced through the origin has no intercept to vary: its design has no column of ones.
    bound = constant_at_least_zero and model.intercept_ == 0
    center = np.zeros(len(active)) if bound else x[:, active].mean(axis=0)
    scale = x[:, active].std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.column_stack([np.full(len(y), float(not bound)), (x[:, active] - center) / scale])
    strengths = ridge_share(model.penalty) * model.strength + extra_ridge(model.shrunk, x.shape[1])[active]
    penalty = len(y) * np.concatenate([[0.0], strengths])
    bread = np.linalg.pinv(design.T @ (design * pull_slopes[:, None]) + np.diag(penalty))
    pull = weights * (y - model.predict(x))
    _, index = np.unique(blocks, return_inverse=True)
    count = int(index.max()) + 1
    scores = np.column_stack([np.bincount(index, pull * column, count) for column in design.T])
    cov = bread @ (scores.T @ scores) @ bread * (count / max(count - 1, 1))
    # Back to raw features: slope = b / scale, intercept = b0 - sum(b * center / scale).
    back = np.diag(np.concatenate([[1.0], 1 / scale]))
    back[0, 1:] = -center / scale
    errors = np.sqrt(np.maximum(np.diag(back @ cov @ back.T), 0.0))
    reach = float(stdtrit(max(count - 1, 1), 0.975)) * errors

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
    weights = np.ones(len(y)) if weights is None else weights
    # Scaled to 1 at most: NNLS decides by an absolute tolerance, and terms come in bytes, tokens and microseconds.
    scale = x.max(axis=0, initial=0.0)
    scale = np.where(scale > 0, scale, 1.0)
    huber_factors, coefficients = np.ones(len(y)), np.zeros(x.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights * huber_factors)
        coefficients, _norm = nnls((x / scale) * root[:, None], y * root)
        huber_factors = huber_weights(y - (x / scale) @ coefficients, huber)
    return np.asarray(coefficients / scale)
