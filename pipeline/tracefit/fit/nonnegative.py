"""Non-negative least squares for consumers whose coefficients can only add up, robust and balanced over kinds of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

from tracefit.fit.estimators import HUBER, huber_weights

if TYPE_CHECKING:
    from tracefit.fit.estimators import NDArrayInt
    from tracefit.fit.metrics import Matrix, Vector

ROUNDS = 10


def fit_nonnegative(x: Matrix, y: Vector, weights: Vector | None = None, *, huber: float = HUBER) -> Vector:
    """Minimise sum_i w_i h_i (y_i - x_i.a)^2 over a >= 0, h_i Huber's weights; no intercept but a column of ones.

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


def balanced(group: NDArrayInt) -> Vector:
    """Return weights that give every group the same say, whatever its rows; shape (n,), mean 1."""
    _, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    weights = 1.0 / counts[index]
    return np.asarray(weights / weights.mean())
