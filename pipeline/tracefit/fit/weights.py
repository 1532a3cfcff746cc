"""How much each equation says: an interval's mean is worth more than a single cycle, a rough clock less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.estimators import RobustLinear

if TYPE_CHECKING:
    from tracefit.fit.metrics import Matrix, Vector

_NORMAL_MAD = 1.4826


def interval_weights(x: Matrix, y: Vector, steps: Vector, sd: Vector) -> Vector:
    """Return inverse variances of mean cycles: 1 / (s^2 / n + sd^2), up to a factor; shape (n_rows,).

    `s`, the spread of a single cycle about the model, comes from a first robust fit weighted by n.

    Args:
        x: Features, means over the steps of each interval.
        y: Mean cycles.
        steps: Steps of each interval (n).
        sd: Standard deviation of each mean cycle that comes from its two ends' clocks.
    """
    if np.all(steps == steps[0]) and not np.any(sd):
        return np.ones(len(y))
    residual = (y - RobustLinear().fit(x, y, steps).predict(x)) * np.sqrt(steps)
    spread = _NORMAL_MAD * float(np.median(np.abs(residual - np.median(residual))))
    variance = spread**2 / steps + sd**2
    least = float(variance[variance > 0].min(initial=np.inf))
    weights = 1 / np.maximum(variance, least if np.isfinite(least) else 1.0)
    return np.asarray(weights / weights.mean())
