"""Penalised least squares, solved from the weighted moments of the rows.

`moments` reduces n rows to matrices of the size of the number of features; `line` and `solve` minimise Ridge, Lasso and
elastic-net objectives over them, with bounds on the signs of the coefficients. One pass over the rows therefore serves all
penalties that are compared.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from scipy.optimize import nnls
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

if TYPE_CHECKING:
    from tracefit.fit.arrays import Flags, Matrix, Vector

Penalty = Literal["ridge", "lasso", "elastic_net"]

Positive: TypeAlias = bool | tuple[bool, ...]
"""What cannot be negative: all coefficients and the intercept, or none; or one flag per feature and, last, the intercept's."""


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


def line(
    summed: Moments, origin: Vector, penalty: Penalty, strength: float, *, positive: Positive = False
) -> tuple[float, Vector]:
    """Return intercept and slopes of the line that `solve` finds; the intercept is the line's value at `origin`.

    The problem remains convex where the intercept cannot be negative: if the best line is below zero at the origin, the best
    allowed line goes through zero there.
    """
    slopes = solve(summed, penalty, strength, positive=positive)
    from_origin = summed.center - origin
    intercept = summed.level - float(from_origin @ slopes)
    if not bounds_of(positive, len(slopes))[1] or intercept >= 0:
        return intercept, slopes
    # Moments about the origin instead of the mean (parallel axis theorem): a line through the origin has no intercept.
    about_origin = replace(
        summed,
        gram=summed.gram + summed.total * np.outer(from_origin, from_origin),
        cross=summed.cross + summed.total * summed.level * from_origin,
    )
    return 0.0, solve(about_origin, penalty, strength, positive=positive)


def solve(summed: Moments, penalty: Penalty, strength: float, *, positive: Positive = False) -> Vector:
    """Return the slopes that minimise the penalised squares, shape (n_features,).

    Minimises |y - x.a|^2 / 2n + l1 |a|_1 + l2 |a|^2 / 2 over the moments, with n the number of rows. Ridge: l2 =
    `strength`. Lasso: l1 = `strength` times the smallest l1 that empties the model. Elastic net (Zou and Hastie 2005):
    half of each. Slopes that `positive` bounds are not negative (Lawson and Hanson 1974 where l1 is 0).
    """
    if not summed.cross.size:
        return np.zeros(0)
    l2 = ridge_share(penalty) * strength
    l1 = (strength - l2) * float(np.abs(summed.cross).max()) / summed.rows
    gram = summed.gram + l2 * summed.rows * np.eye(len(summed.cross))
    bound, _ = bounds_of(positive, len(summed.cross))
    if l1 == 0 and not bound.any():
        return np.asarray(np.linalg.lstsq(gram, summed.cross, rcond=_SINGULAR)[0])
    root, target = _as_rows(gram, summed.cross)
    if l1 == 0:
        return _partly_nonnegative(root, target, bound)
    # Lasso's `positive` bounds all slopes or none. Where only some are bound, a free slope becomes the difference of two
    # bound ones, whose penalty is the same.
    free = np.flatnonzero(~bound) if bound.any() else np.zeros(0, dtype=np.int64)
    # scikit-learn divides the squares by the rows it gets; these few stand for `summed.rows`.
    model = Lasso(
        l1 * summed.rows / len(target),
        fit_intercept=False,
        positive=bool(bound.any()),
        max_iter=_LASSO_ROUNDS,
        tol=1e-6,
    )
    with warnings.catch_warnings():
        # Descent is slow on nearly collinear features. Where it stops is a candidate like any other.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = np.asarray(model.fit(np.hstack([root, -root[:, free]]), target).coef_, dtype=float)
    slopes = found[: len(summed.cross)]
    slopes[free] -= found[len(summed.cross) :]
    return slopes


def _partly_nonnegative(root: Matrix, target: Vector, bound: Flags) -> Vector:
    """Return the least-squares solution a of root.a = target with a >= 0 where `bound`.

    For any bound slopes the best free ones are an unbounded least-squares solution of the rest. The bound slopes are therefore
    found by NNLS in the space orthogonal to the free columns (variable projection), the free ones after them.
    """
    slopes = np.zeros(len(bound))
    directions, sizes, _ = np.linalg.svd(root[:, ~bound], full_matrices=False)
    basis = directions[:, sizes > _SINGULAR * sizes.max(initial=0.0)]
    columns = root[:, bound]
    slopes[bound] = nnls(columns - basis @ (basis.T @ columns), target - basis @ (basis.T @ target))[0]
    if not bound.all():
        left = target - root[:, bound] @ slopes[bound]
        slopes[~bound] = np.linalg.lstsq(root[:, ~bound], left, rcond=None)[0]
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
