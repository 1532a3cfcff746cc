"""How much each equation says: an interval's mean is worth more than a single cycle, a rough clock less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.estimators import RobustLinear

if TYPE_CHECKING:
    from tracefit.fit.metrics import Matrix, Vector

_NORMAL_MAD = 1.4826
_SURE = 2.0
"""Noise grows with the time of a step where its exponent is so many standard errors above zero."""

_LEAST_SHARE, _MOST_SHARE = 0.1, 3.0
"""Noise is taken to grow between these multiples of the median time."""

_LOG_SPREAD = 1.1107
"""Standard deviation of the logarithm of the size of a normal deviate: pi / sqrt(8)."""


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


def noise_exponent(residual: Vector, predicted: Vector) -> float:
    """Return g of noise whose spread goes with predicted**g, from 0 (the same for all rows) to 1 (a share of the time).

    The slope of log |residual| over log predicted; 0 where it is not surely above (Harvey 1976). A step's noise is a share
    of its time where the machine's speed varies: the short steps tell the constant then, which the long ones drown.

    Args:
        residual: Shape (n,), of rows that would be equally noisy.
        predicted: Shape (n,).
    """
    known = (residual != 0) & (predicted > 0)
    size, time = np.log(np.abs(residual[known])), np.log(predicted[known])
    about = time - time.mean() if time.size else time
    spread = float(about @ about)
    if spread <= 0:
        return 0.0
    slope = float(about @ size) / spread
    return min(slope, 1.0) if slope > _SURE * _LOG_SPREAD / np.sqrt(spread) else 0.0


def noise_weights(x: Matrix, y: Vector, weights: Vector) -> Vector:
    """Return weights times the inverse variance of noise that grows with the time of a step, mean 1; shape (n_rows,).

    Args:
        x: Features.
        y: Times.
        weights: Inverse variances but for that, up to a factor.
    """
    predicted = RobustLinear().fit(x, y, weights).predict(x)
    exponent = noise_exponent((y - predicted) * np.sqrt(weights), predicted)
    if exponent == 0:
        return weights
    # No step is so short that it alone tells the constant, and none so long that it says nothing.
    middle = float(np.median(predicted))
    within = np.clip(predicted, _LEAST_SHARE * middle, _MOST_SHARE * middle)
    both = weights * within ** (-2 * exponent)
    return np.asarray(both / both.mean())
