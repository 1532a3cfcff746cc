"""The training rows of one linear model as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit import rows as rules
from tracefit.fit.linear import FeatureColumn, matrix, target_of
from tracefit.fit.select import time_blocks, usable_features
from tracefit.fit.weights import interval_weights, noise_weights

if TYPE_CHECKING:
    from tracefit.fit.estimators import NDArrayInt
    from tracefit.fit.metrics import Matrix, Vector
    from tracefit.fit.results import FeatureLeftOut

BLOCK_ROWS = 10
FEWEST_BLOCKS, MOST_BLOCKS = 10, 50
"""Blocks of time for intervals: long enough that rows of two blocks have little in common, enough to tell a variance."""

_PERMILLE = 1000


@dataclass(frozen=True, slots=True)
class Design:
    """Training rows as arrays: features (n, n_features), and each of shape (n,) targets, weights, run and time.

    `weights` are inverse variances. `counts` are the same but for noise that grows with the target: an error of so many us
    counts alike in a short step and in a long one.
    """

    columns: list[FeatureColumn]
    x: Matrix
    y: Vector
    weights: Vector
    counts: Vector
    run: NDArrayInt
    time: NDArrayInt

    def blocks(self) -> NDArrayInt:
        """Blocks of time for intervals, numbered over all runs; shape (n,)."""
        rows = len(self.y) // (int(self.run.max()) + 1)
        count = min(max(rows // BLOCK_ROWS, FEWEST_BLOCKS), MOST_BLOCKS)
        return time_blocks(self.run, self.time, count) + self.run * count

    def folds(self, count: int) -> NDArrayInt:
        """Folds for cross-validation: contiguous in every run's time; shape (n,)."""
        return time_blocks(self.run, self.time, count)

    def latest(self, share: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Tell the last `share` of every run's rows in time, to a permille; shape (n,)."""
        return time_blocks(self.run, self.time, _PERMILLE) >= round((1 - share) * _PERMILLE)


def design_of(used: pl.DataFrame, features: list[FeatureColumn]) -> tuple[Design, list[FeatureLeftOut]]:
    """Return the rows as arrays of the features that say something, and the other features with reasons.

    Args:
        used: Training rows. `interval_steps` and `cycle_sd_us`, where there, say how much each tells; `row_scale_us` what
            size of error counts alike: that of the row's own scope, where several are fitted together.
        features: Candidates in order of preference.
    """
    names = [f.name for f in features]
    everything, y = matrix(used, names), target_of(used)
    kept, left = usable_features(everything, names, [f.max_inflation for f in features])
    x = np.asfortranarray(everything[:, kept])
    counts = weights = np.ones(len(y))
    if "interval_steps" in used.columns:
        steps, sd = matrix(used, ["interval_steps", "cycle_sd_us"]).T
        counts = interval_weights(x, y, steps, sd)
        weights = noise_weights(x, y, counts)
    if "row_scale_us" in used.columns:
        scale = matrix(used, ["row_scale_us"])[:, 0] ** 2
        counts, weights = counts / scale, weights / scale
    run = used.select(pl.struct(rules.SERVER).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    return Design([features[k] for k in kept], x, y, weights, counts, run, used["ts_ns"].to_numpy()), left
