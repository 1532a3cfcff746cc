"""Training rows of one linear model as arrays: features, targets, the weight of each row, and which rows are outliers.

Rows differ in how much they determine: an interval of many steps has less noise than one step, a start taken from an event
has more than one from a summary, and the noise of a step may grow with its time. Weights are inverse variances of all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import matrix, max_inflations, target_of
from tracefit.fit.select import time_blocks, usable_features
from tracefit.statistics import robust_sd
from tracefit.tables.keys import SERVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.results import OmittedFeature
    from tracefit.statistics import Integers, Matrix, Vector

BLOCK_ROWS = 10
FEWEST_BLOCKS, MOST_BLOCKS = 10, 50
"""Blocks of time for confidence intervals: long enough that rows of different blocks are nearly independent, and enough of
them to estimate a variance."""

_PERMILLE = 1000


@dataclass(frozen=True, slots=True)
class Design:
    """Training rows as arrays: features (n, n_features), and each of shape (n,) targets, weights, run and time.

    `weights` are inverse variances. `counts` leave out the noise that grows with the target, so that an error of so many us
    counts the same in a short step as in a long one: candidates are compared by `counts`.
    """

    columns: list[Feature]
    x: Matrix
    y: Vector
    weights: Vector
    counts: Vector
    run: Integers
    time: Integers

    def blocks(self) -> Integers:
        """Blocks of time for intervals, numbered over all runs; shape (n,)."""
        rows = len(self.y) // (int(self.run.max()) + 1)
        count = min(max(rows // BLOCK_ROWS, FEWEST_BLOCKS), MOST_BLOCKS)
        return time_blocks(self.run, self.time, count) + self.run * count

    def folds(self, count: int) -> Integers:
        """Folds for cross-validation: contiguous in every run's time; shape (n,)."""
        return time_blocks(self.run, self.time, count)

    def latest(self, share: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which rows are in the last `share` of their run in time, to a permille; shape (n,)."""
        return time_blocks(self.run, self.time, _PERMILLE) >= round((1 - share) * _PERMILLE)


def design_of(used: pl.DataFrame, features: Sequence[Feature]) -> tuple[Design, list[OmittedFeature]]:
    """Return the rows as arrays of the features that can be fitted, and the other features with reasons.

    Args:
        used: Training rows. The optional columns `interval_steps` and `cycle_sd_us` give each row's noise. `row_scale_us`,
            also optional, is the typical target of the row's scope where several scopes are fitted together: errors of one
            multiple of it count the same.
        features: Candidates in order of preference.
    """
    names = [f.name for f in features]
    everything, y = matrix(used, names), target_of(used)
    kept, left = usable_features(everything, names, max_inflations(features))
    x = np.asfortranarray(everything[:, kept])
    counts = weights = np.ones(len(y))
    if "interval_steps" in used.columns:
        steps, sd = matrix(used, ["interval_steps", "cycle_sd_us"]).T
        counts = interval_weights(x, y, steps, sd)
        weights = noise_weights(x, y, counts)
    if "row_scale_us" in used.columns:
        scale = matrix(used, ["row_scale_us"])[:, 0] ** 2
        counts, weights = counts / scale, weights / scale
    run = used.select(pl.struct(SERVER).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    return Design([features[k] for k in kept], x, y, weights, counts, run, used["ts_ns"].to_numpy()), left


_SURE = 2.0
"""The exponent of the noise must be this many standard errors above zero to count."""

_LEAST_SHARE, _MOST_SHARE = 0.1, 3.0
"""Noise is taken to grow between these multiples of the median time."""

_LOG_SD = 1.1107
"""Standard deviation of the logarithm of the size of a normal deviate: pi / sqrt(8)."""


def interval_weights(x: Matrix, y: Vector, steps: Vector, sd: Vector) -> Vector:
    """Return inverse variances of mean cycles: 1 / (s^2 / n + sd^2), up to a factor; shape (n_rows,).

    `s`, the standard deviation of a single cycle about the model, comes from a first robust fit weighted by n.

    Args:
        x: Features, means over the steps of each interval.
        y: Mean cycles.
        steps: Steps of each interval (n).
        sd: Standard deviation of each mean cycle that comes from its two ends' clocks.
    """
    if np.all(steps == steps[0]) and not np.any(sd):
        return np.ones(len(y))
    residual = (y - RobustLinear().fit(x, y, steps).predict(x)) * np.sqrt(steps)
    single_sd = robust_sd(residual)
    variance = single_sd**2 / steps + sd**2
    # A model that fits exactly leaves no variance: no row may weigh infinitely much.
    least = float(variance[variance > 0].min(initial=np.inf))
    weights = 1 / np.maximum(variance, least if np.isfinite(least) else 1.0)
    return np.asarray(weights / weights.mean())


def noise_exponent(residual: Vector, predicted: Vector) -> float:
    """Return g of noise whose standard deviation is proportional to predicted**g, from 0 (constant) to 1 (a share).

    g is the slope of log |residual| over log predicted, or 0 where it is not significantly positive (Harvey 1976). Where the
    speed of the machine varies, the noise of a step is a share of its time. The short steps then determine the intercept,
    which the noise of the long ones would drown.

    Args:
        residual: Shape (n,), scaled to equal noise but for this growth.
        predicted: Shape (n,).
    """
    known = (residual != 0) & (predicted > 0)
    size, time = np.log(np.abs(residual[known])), np.log(predicted[known])
    centered = time - time.mean() if time.size else time
    sum_of_squares = float(centered @ centered)
    if sum_of_squares <= 0:
        return 0.0
    slope = float(centered @ size) / sum_of_squares
    return min(slope, 1.0) if slope > _SURE * _LOG_SD / np.sqrt(sum_of_squares) else 0.0


def noise_weights(x: Matrix, y: Vector, weights: Vector) -> Vector:
    """Return weights times the inverse variance of noise that grows with the time of a step, mean 1; shape (n_rows,).

    Args:
        x: Features.
        y: Times.
        weights: Inverse variances without that growth, up to a factor.
    """
    predicted = RobustLinear().fit(x, y, weights).predict(x)
    exponent = noise_exponent((y - predicted) * np.sqrt(weights), predicted)
    if exponent == 0:
        return weights
    # Clipped, so that no very short step determines the intercept alone and no very long one loses all weight.
    middle = float(np.median(predicted))
    within = np.clip(predicted, _LEAST_SHARE * middle, _MOST_SHARE * middle)
    both = weights * within ** (-2 * exponent)
    return np.asarray(both / both.mean())


OUTLIER_SDS = 8.0
OUTLIER_FACTOR = 3.0
"""A training row is an outlier when its residual from a first robust fit is more than 8 robust standard deviations from
the median residual, and it is more than a factor of 3 away from the fit: never more than half of the rows."""


def outliers(x: Vector, y: Vector) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Find the outliers among training rows; shape (n,)."""
    fitted = RobustLinear().fit(x, y).predict(x)
    residual = y - fitted
    # Distances are from the median residual: where most rows are equal to the last digit a fit can miss all of them.
    distance = np.abs(residual - np.median(residual))
    floor = np.maximum(fitted, 1e-9)
    far = distance > OUTLIER_SDS * robust_sd(residual)
    return np.asarray(far & ((y > OUTLIER_FACTOR * floor) | (y * OUTLIER_FACTOR < floor)))
