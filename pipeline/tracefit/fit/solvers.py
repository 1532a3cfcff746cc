"""Penalised least squares from weighted moments: the size of the problem is the number of features, not of rows."""

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
"""What cannot be negative: everything or nothing, the intercept too; or one flag per feature and, last, the intercept's."""


_LASSO_ROUNDS = 100_000
_BLOCK_ROWS = 8192
"""Rows summed up at once: as many as a processor's cache holds."""

_SINGULAR = 1e-13
"""Directions whose share of the largest eigenvalue is below this are rounding, not data."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Weighted second moments of features and target over `rows` rows.

    Attributes:
        rows: Rows, whatever their weights.
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
        about = x[rows] - center
        weighted = (about * weights[rows, None]).T
        gram += weighted @ about
        cross += weighted @ (y[rows] - level)
    return Moments(len(y), total, center, level, gram, cross)


def bounds_of(positive: Positive, features: int) -> tuple[Flags, bool]:
    """Return which of so many slopes cannot be negative, shape (features,), and whether the intercept cannot."""
    if isinstance(positive, bool):
        return np.full(features, positive), positive
    return np.array(positive[:-1], dtype=bool), positive[-1]


def line(
    of: Moments, origin: Vector, penalty: Penalty, strength: float, *, positive: Positive = False
) -> tuple[float, Vector]:
    """Return intercept and slopes of the best line, see `solve`; the intercept is the line's value at `origin`.

    Where the intercept cannot be negative the problem is still convex: where the best line of allowed slopes is below
    zero at the origin, the best allowed one goes through it.
    """
    slopes = solve(of, penalty, strength, positive=positive)
    away = of.center - origin
    intercept = of.level - float(away @ slopes)
    if not bounds_of(positive, len(slopes))[1] or intercept >= 0:
        return intercept, slopes
    about_origin = replace(
        of,
        gram=of.gram + of.total * np.outer(away, away),
        cross=of.cross + of.total * of.level * away,
    )
    return 0.0, solve(about_origin, penalty, strength, positive=positive)


def solve(of: Moments, penalty: Penalty, strength: float, *, positive: Positive = False) -> Vector:
    """Return the slopes that minimise the penalised squares, shape (n_features,).

    Minimises |y - x.a|^2 / 2n + l1 |a|_1 + l2 |a|^2 / 2 over the moments, with n the number of rows. Ridge: l2 =
    `strength`. Lasso: l1 = `strength` times the smallest l1 that empties the model. Elastic net (Zou and Hastie 2005):
    half of each. Slopes that `positive` names are not negative (Lawson and Hanson 1974 without l1).
    """
    if not of.cross.size:
        return np.zeros(0)
    l2 = ridge_share(penalty) * strength
    l1 = (strength - l2) * float(np.abs(of.cross).max()) / of.rows
    gram = of.gram + l2 * of.rows * np.eye(len(of.cross))
    bound, _ = bounds_of(positive, len(of.cross))
    if l1 == 0 and not bound.any():
        return np.asarray(np.linalg.lstsq(gram, of.cross, rcond=_SINGULAR)[0])
    root, target = _as_rows(gram, of.cross)
    if l1 == 0:
        return _partly_nonnegative(root, target, bound)
    # Of some bound slopes, a free one is the difference of two bound ones: its size costs the same either way.
    free = np.flatnonzero(~bound) if bound.any() else np.zeros(0, dtype=np.int64)
    # scikit-learn divides the squares by the rows it is given, which stand for `of.rows` of the data.
    model = Lasso(
        l1 * of.rows / len(target),
        fit_intercept=False,
        positive=bool(bound.any()),
        max_iter=_LASSO_ROUNDS,
        tol=1e-6,
    )
    with warnings.catch_warnings():
        # Of features that nearly say the same the descent is slow: where it stops is ranked like any other candidate.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = np.asarray(model.fit(np.hstack([root, -root[:, free]]), target).coef_, dtype=float)
    slopes = found[: len(of.cross)]
    slopes[free] -= found[len(of.cross) :]
    return slopes


def _partly_nonnegative(root: Matrix, target: Vector, bound: Flags) -> Vector:
    """Return the least squares of root.a = target with a >= 0 where bound.

    Whatever the bound slopes are, the free ones take what they can of the rest: the bound ones are found in the space
    that the free ones leave.
    """
    slopes = np.zeros(len(bound))
    directions, sizes, _ = np.linalg.svd(root[:, ~bound], full_matrices=False)
    basis = directions[:, sizes > _SINGULAR * sizes.max(initial=0.0)]
    held, rest = root[:, bound], target
    slopes[bound] = nnls(held - basis @ (basis.T @ held), rest - basis @ (basis.T @ rest))[0]
    if not bound.all():
        left = target - root[:, bound] @ slopes[bound]
        slopes[~bound] = np.linalg.lstsq(root[:, ~bound], left, rcond=None)[0]
    return slopes


def ridge_share(penalty: Penalty) -> float:
    """Return how much of a penalty's strength is on the squares of the slopes."""
    return {"ridge": 1.0, "lasso": 0.0, "elastic_net": 0.5}[penalty]


def _as_rows(gram: Matrix, cross: Vector) -> tuple[Matrix, Vector]:
    """Return few rows whose squares are those of the many: R'R = gram and R't = cross."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > _SINGULAR * values.max(initial=0.0)
    root = np.sqrt(values[kept])
    return root[:, None] * vectors[:, kept].T, (vectors[:, kept].T @ cross) / root
