"""Training rows that a first robust fit is far off, by the stated rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.estimators import RobustLinear

if TYPE_CHECKING:
    from tracefit.fit.metrics import Vector

OUTLIER_SPREADS = 8.0
OUTLIER_FACTOR = 3.0
"""A training row is an outlier when its residual from a first robust fit is more than 8 robust standard deviations from
the median residual, and it is more than a factor of 3 away from the fit: never more than half of the rows."""


def outliers(x: Vector, y: Vector) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Find the outliers among training rows; shape (n,)."""
    fitted = RobustLinear().fit(x, y).predict(x)
    residual = y - fitted
    # From the middle, which most rows are near: a fit can pass by all of them, where most are the same to the last digit.
    away = np.abs(residual - np.median(residual))
    spread = 1.4826 * float(np.median(away))
    floor = np.maximum(fitted, 1e-9)
    far = away > OUTLIER_SPREADS * spread
    return np.asarray(far & ((y > OUTLIER_FACTOR * floor) | (y * OUTLIER_FACTOR < floor)))
