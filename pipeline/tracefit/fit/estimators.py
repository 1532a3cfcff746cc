"""Estimators: a robust linear model with Ridge, Lasso or elastic-net penalty, and non-negative least squares.

Both reweight rows by Huber's weights, so that the one step in a hundred that hits a hiccup pulls with bounded force.
They need only numpy: a training fits hundreds of small lines, and libraries that check each of these take longer than
the fits.
"""

from __future__ import annotations

import math
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from tracefit.statistics import nonnegative, robust_sd

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Integers, Matrix, Vector


# -- penalised least squares -----------------------------------------------------------------------------
#
# `moments` reduces n rows to matrices of the size of the number of features; `line` and `solve` minimise over them,
# with bounds on the signs of the coefficients. One pass over the rows therefore serves all penalties that are compared.

Penalty = Literal["ridge", "lasso", "elastic_net"]

Positive: TypeAlias = bool | tuple[bool, ...]
"""Coefficients that cannot be negative: all and the intercept, or none; or one flag per feature and, last, the
intercept's."""


Shrunk: TypeAlias = tuple[bool, ...]
"""Coefficients with an additional Ridge penalty, which draws them to zero: a flag per feature; empty without any."""

SHRINKAGE = 0.3
"""Strength of that penalty: a correction enters to the extent that the other features cannot explain its rows."""

_MATRIX_ROWS = 8192
"""Rows summed at once: a block of them fits into a processor's cache."""

_LEAST_SPREAD = 1e-12
"""Variance of a feature on some rows, relative to that on all, below which it is constant on them."""


class Moments(msgspec.Struct, frozen=True):
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
    # Rows about their means: sums of raw squares would lose the digits that their difference needs.
    center, level = x.mean(axis=0), float(y.mean())
    return Sums.of(rows_of(x - center, y - level), weights).moments(center, level)


def rows_of(z: Matrix, y: Vector) -> Matrix:
    """Return rows of 1, features and target, whose weighted products are the sums of a fit; shape (n, 1 + n_features +
    1).
    """
    return np.column_stack([np.ones(len(y)), z, y])


class Sums(msgspec.Struct, frozen=True):
    """Sums over rows of features and target, which add up: those without some rows are the difference.

    Attributes:
        rows: Number of rows, regardless of their weights.
        products: Weighted products of the columns of `rows_of`.
        sums: Sums of the columns, without weights.
        squares: Sums of their squares, without weights.
    """

    rows: int
    products: Matrix
    sums: Vector
    squares: Vector

    @classmethod
    def of(cls, rows: Matrix, weights: Vector) -> Self:
        """Sum up the rows that `rows_of` returned, near zero in the mean, with weights of shape (n,)."""
        return cls(len(rows), _products(rows, weights), rows.sum(axis=0), np.einsum("ij,ij->j", rows, rows))

    def __sub__(self, other: Sums) -> Sums:
        """Return the sums over the rows that `other` has not."""
        return Sums(
            self.rows - other.rows,
            self.products - other.products,
            self.sums - other.sums,
            self.squares - other.squares,
        )

    def moments(self, center: Vector | float = 0.0, level: float = 0.0) -> Moments:
        """Return the moments of features and target, from which `center` and `level` were subtracted."""
        return moments_of(self.products, self.rows, center, level)

    def standardised(self, level: float) -> tuple[Moments, Vector, Vector]:
        """Return the moments of these rows' standardised features, and mean and standard deviation of each feature.

        The rows are some of those whose features have mean 0 and standard deviation 1; `level` was subtracted from the
        target.
        """
        of = self.moments(level=level)
        center = self.sums[1:-1] / self.rows
        variance = self.squares[1:-1] / self.rows - center**2
        # Differences of sums leave a rounding error of a feature that is constant on these rows.
        varies = variance > _LEAST_SPREAD
        scale = np.sqrt(np.where(varies, variance, 1.0))
        in_scale = varies / scale
        return (
            replace(
                of,
                center=(of.center - center) * in_scale,
                gram=of.gram * np.outer(in_scale, in_scale),
                cross=of.cross * in_scale,
            ),
            center,
            scale,
        )


def _products(rows: Matrix, weights: Vector) -> Matrix:
    products = np.zeros((rows.shape[1], rows.shape[1]))
    for first in range(0, len(rows), _MATRIX_ROWS):
        block = rows[first : first + _MATRIX_ROWS]
        products += (block * weights[first : first + _MATRIX_ROWS, None]).T @ block
    return products


def moments_of(products: Matrix, rows: int, center: Vector | float = 0.0, level: float = 0.0) -> Moments:
    """Return the moments that weighted products of the columns of `rows_of` give, about their means (parallel axis
    theorem).
    """
    total = float(products[0, 0])
    means = products[0, 1:] / total
    about_means = products[1:, 1:] - total * np.outer(means, means)
    return Moments(
        rows,
        total,
        means[:-1] + center,
        float(means[-1]) + level,
        about_means[:-1, :-1],
        about_means[:-1, -1],
    )


def bounds_of(positive: Positive, features: int) -> tuple[Flags, bool]:
    """Return which slopes cannot be negative, shape (features,), and whether the intercept cannot."""
    if isinstance(positive, bool):
        return np.full(features, positive), positive
    return np.array(positive[:-1], dtype=bool), positive[-1]


def extra_ridge(shrunk: Shrunk, features: int) -> Vector:
    """Return the Ridge strength that each coefficient has on top of the common one, shape (features,)."""
    return SHRINKAGE * np.array(shrunk or (False,) * features, dtype=float)


def line(
    summed: Moments,
    origin: Vector,
    penalty: Penalty,
    strength: float,
    *,
    positive: Positive,
    shrunk: Shrunk,
    start: Vector | None = None,
) -> tuple[float, Vector]:
    """Return intercept and slopes of the line that `solve` finds; the intercept is the line's value at `origin`.

    The problem remains convex where the intercept cannot be negative: if the best line is below zero at the origin, the
    best allowed line goes through zero there. `start` are slopes nearby, which make the search shorter.
    """
    bound, intercept_bound = bounds_of(positive, len(origin))
    extra_l2 = extra_ridge(shrunk, len(origin))
    slopes = solve(summed, penalty, strength, bound, extra_l2, start)
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
    return 0.0, solve(about_origin, penalty, strength, bound, extra_l2, start)


def solve(
    summed: Moments,
    penalty: Penalty,
    strength: float,
    bound: Flags,
    extra_l2: Vector,
    start: Vector | None = None,
) -> Vector:
    """Return the slopes that minimise the penalised squares, shape (n_features,).

    Minimises |y - x.a|^2 / 2n + l1 |a|_1 + l2 |a|^2 / 2 over the moments, with n the number of rows. Ridge: l2 =
    `strength`. Lasso: l1 = `strength` times the smallest l1 that empties the model. Elastic net (Zou and Hastie 2005):
    half of each. Slopes that are `bound` are not negative. `extra_l2` comes on top for each slope. `start` are slopes
    nearby, which make the search shorter.
    """
    if not summed.cross.size:
        return np.zeros(0)
    l2 = ridge_share(penalty) * strength
    l1 = (strength - l2) * float(np.abs(summed.cross).max())
    ridge = summed.rows * (l2 + extra_l2)
    gram = summed.gram + np.diag(ridge)
    if l1 == 0:
        return nonnegative(gram, summed.cross, bound, start, least=float(ridge.min()))
    # A free slope becomes the difference of two bound ones, whose penalty is the same: of such a pair one is always 0.
    count, free = len(bound), np.flatnonzero(~bound)
    columns = np.concatenate([np.arange(count), free])
    signs = np.concatenate([np.ones(count), -np.ones(len(free))])
    halves = None if start is None else np.maximum(signs * start[columns], 0.0)
    pairs = np.outer(signs, signs) * gram[np.ix_(columns, columns)]
    found = nonnegative(pairs, signs * summed.cross[columns] - l1, np.ones(len(columns), bool), halves)
    slopes = found[:count]
    slopes[free] -= found[count:]
    return slopes


def ridge_share(penalty: Penalty) -> float:
    """Return the share of a penalty's strength that is on the squares of the slopes."""
    return {"ridge": 1.0, "lasso": 0.0, "elastic_net": 0.5}[penalty]


# -- robust fits -----------------------------------------------------------------------------------------

HUBER_SD = 1.345
"""Tuning constant of the Huber weights: 95 % efficient under Gaussian noise (Huber 1964)."""

MAX_ITER = 30
"""Most rounds of reweighting."""

FEW_ROUNDS = 5
"""Rounds of a fit that only ranks others or weighs rows: after these a line moves by less than what it is used for."""

_SETTLED_COEFFICIENTS = 1e-6
_FLAT_SHARE = 0.05
"""Slope of a row's pull beyond the bend. In theory it is zero, but then a feature that only such rows carry would look
certain."""


class RowWeights(NamedTuple):
    """How much each training row counted in a fit; shape (n,) each.

    Attributes:
        final: The sample weight times Huber's.
        pull_slopes: How much more a row pulls per unit of residual: its sample weight, and next to nothing beyond the
            bend of Huber's loss.
        huber: Huber's weights, from which a fit nearby can start.
    """

    final: Vector
    pull_slopes: Vector
    huber: Vector


class RobustLinear:
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

    Examples:
        Ten steps of 2 ms and 10 us per token, the last one hit by a hiccup of 50 ms:

        >>> import numpy as np
        >>> tokens = np.arange(10.0).reshape(-1, 1)
        >>> time_us = 2_000 + 10 * tokens[:, 0]
        >>> time_us[9] += 50_000
        >>> model = RobustLinear().fit(tokens, time_us)
        >>> round(float(model.intercept_)), model.coef_.round(1)
        (2000, array([10.]))
        >>> model.predict(np.array([[100.0]])).round(-1)
        array([3000.])

    References:
        Huber, Robust Statistics (1981), for the weights; Holland and Welsch (1977) for the reweighting.
    """

    def __init__(
        self,
        penalty: Penalty = "ridge",
        strength: float = 1e-6,
        huber: float = HUBER_SD,
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
        self._require_parameters()

    def fit(self, x: Matrix, y: Vector, weights: Vector | None = None, start: Vector | None = None) -> Self:
        """Fit on raw features of shape (n, n_features) and targets of shape (n,); return the model itself.

        Args:
            x: Raw features.
            y: Targets.
            weights: Inverse variance of each row up to a factor, shape (n,); equal if not given.
            start: Huber's weights of a fit nearby, shape (n,), from which fewer rounds lead to the same line; 1 if not
                given.

        Raises:
            ValueError: There are no rows, or values that are not finite numbers; or a parameter does not fit the
                features.
        """
        self.fit_rows(x, y, weights, start)
        return self

    def fit_rows(self, x: Matrix, y: Vector, weights: Vector | None = None, start: Vector | None = None) -> RowWeights:
        """Fit as `fit` does, and return how much each row counted: confidence intervals need it, predictions do not."""
        self._require_rows(x, y)
        row_weights = sampled(y, weights)
        z, center, scale = standardised(x)
        # On standardised features one penalty strength suits all of them. `origin` is where the raw features are zero.
        origin, level = -center / scale, float(y.mean())
        rows = rows_of(z, y - level)
        settled = _SETTLED_COEFFICIENTS * (np.abs(y).max(initial=0.0) or 1.0)
        root = np.sqrt(row_weights)
        huber_factors, fitted = np.ones(len(y)) if start is None else start, np.full(len(y), np.inf)
        nearby: Vector | None = None
        # The first fit is before any reweighting.
        for rounds in range(self.max_iter + 1):  # noqa: B007  # read after the loop
            counted = row_weights * huber_factors
            summed = moments_of(_products(rows, counted), len(y), level=level)
            intercept, slopes = line(
                summed,
                origin,
                self.penalty,
                self.strength,
                positive=self.positive,
                shrunk=self.shrunk,
                start=nearby,
            )
            nearby = slopes
            before, fitted = fitted, intercept - origin @ slopes + z @ slopes
            if np.abs(fitted - before).max(initial=0.0) <= settled:
                break
            huber_factors = huber_weights((y - fitted) * root, self.huber, least=settled)
        self.n_iter_ = rounds
        self.coef_: Vector = slopes / scale
        self.intercept_ = intercept
        return RowWeights(counted, row_weights * np.where(huber_factors < 1, _FLAT_SHARE, 1.0), huber_factors)

    def _require_rows(self, x: Matrix, y: Vector) -> None:
        # A model without features is allowed: it is a constant, the baseline that other models are compared with.
        if x.ndim != 2 or y.shape != x.shape[:1] or not len(y):
            raise ValueError(f"features of shape {x.shape} and targets of shape {y.shape} are not rows")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise ValueError("features and targets must be finite numbers")
        if not isinstance(self.positive, bool) and len(self.positive) != x.shape[1] + 1:
            raise ValueError(f"positive has {len(self.positive)} flags, not one per feature and one for the intercept")
        if self.shrunk and len(self.shrunk) != x.shape[1]:
            raise ValueError(f"shrunk has {len(self.shrunk)} flags, not one per feature")

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

    def predict(self, x: Matrix) -> Vector:
        """Return intercept + x @ coefficients, shape (n,)."""
        return np.asarray(self.intercept_ + x @ self.coef_, dtype=float)


def sampled(y: Vector, weights: Vector | None) -> Vector:
    """Return the weights of rows with a mean of 1; shape (n,)."""
    if weights is None:
        return np.ones(len(y))
    if weights.shape != y.shape or not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ValueError("Sample weights must contain at least one non-zero number, none below 0, one per row")
    return np.asarray(weights / np.mean(weights), dtype=float)


def standardised(x: Matrix) -> tuple[Matrix, Vector, Vector]:
    """Return features about their means in standard deviations, and both of these; a constant feature is 0."""
    center = x.mean(axis=0)
    # Column by column: each of them is added up and divided as a whole.
    z = np.asfortranarray(x - center)
    scale = np.sqrt(np.einsum("ij,ij->j", z, z) / len(x))
    scale = np.where(scale > 0, scale, 1.0)
    z /= scale
    return z, center, scale


def huber_weights(residual: Vector, huber: float, *, least: float = 0.0) -> Vector:
    """Return weights in (0, 1]: 1 within `huber` robust standard deviations, huber/|u| beyond; shape (n,).

    A standard deviation above 0 is `least` or more. Times without noise would otherwise be weighed by the rounding of a
    penalty, and rows of few such as those with prompts by nothing.
    """
    sd = robust_sd(residual)
    if sd <= 0 or not np.isfinite(huber):
        return np.ones(len(residual))
    sd = max(sd, least)
    return np.minimum(1.0, huber / np.maximum(np.abs(residual) / sd, 1e-12))


def confidence_intervals(
    x: Matrix, y: Vector, model: RobustLinear, rows: RowWeights, blocks: Integers
) -> tuple[Interval | None, list[Interval | None]]:
    """Return 95 % confidence intervals of the intercept and of each coefficient, robust to correlation between rows
    near in time.

    Cluster-robust sandwich: V = A^-1 (sum over blocks g_b g_b') A^-1 with A = Z'DZ + penalty, D the slopes of the rows'
    pull (not its weights, which would make intervals too narrow: Huber 1981) and g_b the sum of a block's weighted
    scores, times the small-sample factor B/(B-1); quantile of Student's t with B-1 degrees of freedom (Liang and Zeger
    1986; Cameron and Miller 2015). A coefficient that a penalty or a bound set to zero has no interval; the interval of
    a number that cannot be negative starts at zero or above.

    `model` is fitted on exactly these rows, `rows` is what its `fit_rows` returned, and `blocks` the time block of each
    row.
    """
    weights, pull_slopes, _ = rows
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
    reach = student_975(max(count - 1, 1)) * errors

    def around(value: float, width: float, *, cut: bool) -> Interval:
        return max(value - width, 0.0 if cut else -np.inf), value + width

    intervals: list[Interval | None] = [None] * x.shape[1]
    for position, feature in enumerate(active, start=1):
        width, cut = float(reach[position]), bool(at_least_zero[feature])
        intervals[int(feature)] = around(float(model.coef_[feature]), width, cut=cut)
    constant = around(model.intercept_, float(reach[0]), cut=constant_at_least_zero)
    return None if bound else constant, intervals


Interval = tuple[float, float]


_MOST_EXACT = 200
_NORMAL_975 = 1.959963984540054


@cache
def student_975(degrees: int) -> float:
    """Return the 97.5th percentile of Student's t with so many degrees of freedom.

    The root of its distribution function, a finite sum in the angle atan(t / sqrt(degrees)) (Abramowitz and Stegun
    1964, 26.7.3 and 26.7.4); with many degrees Fisher's expansion about the normal percentile (26.7.5), whose error is
    below 1e-8 there.
    """
    if degrees > _MOST_EXACT:
        z = _NORMAL_975
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / degrees + second / degrees**2 + third / degrees**3
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Return the probability that |t| is below tan(angle) sqrt(degrees)."""
    odd, cosine = degrees % 2, math.cos(angle)
    total, term = 0.0, cosine if odd else 1.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


DESCENT_ROUNDS = 10


def fit_nonnegative(x: Matrix, y: Vector, weights: Vector | None = None, *, huber: float = HUBER_SD) -> Vector:
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
    from scipy.optimize import nnls  # noqa: PLC0415 - it takes long, and trainings do without

    weights = np.ones(len(y)) if weights is None else weights
    # Scaled to 1 at most: NNLS decides by an absolute tolerance, and terms come in bytes, tokens and microseconds.
    scale = x.max(axis=0, initial=0.0)
    scale = np.where(scale > 0, scale, 1.0)
    huber_factors, coefficients = np.ones(len(y)), np.zeros(x.shape[1])
    for _ in range(DESCENT_ROUNDS):
        root = np.sqrt(weights * huber_factors)
        coefficients, _norm = nnls((x / scale) * root[:, None], y * root)
        huber_factors = huber_weights(y - (x / scale) @ coefficients, huber)
    return np.asarray(coefficients / scale)
