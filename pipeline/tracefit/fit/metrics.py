"""Error metrics of a prediction, as every report and file of tracefit states them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tracefit.fit.results import NO_ROWS, Metrics

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


def measure(actual: Vector, predicted: Vector) -> Metrics:
    """Compare predictions with what was measured.

    Args:
        actual: Shape (n,).
        predicted: Shape (n,), same unit.
    """
    if actual.size == 0:
        return NO_ROWS
    error = np.abs(predicted - actual)
    nonzero = actual != 0
    ape = 100 * error[nonzero] / np.abs(actual[nonzero])
    spread = float(np.sum((actual - actual.mean()) ** 2))
    total = float(actual.sum())
    quantiles = [float(q) for q in np.quantile(ape, [0.5, 0.9, 0.99])] if ape.size else [None, None, None]
    return Metrics(
        n=int(actual.size),
        mape_pct=float(ape.mean()) if ape.size else None,
        mdape_pct=quantiles[0],
        mae=float(error.mean()),
        rmse=float(np.sqrt(np.mean(error**2))),
        r2=1 - float(np.sum(error**2)) / spread if spread > 0 else None,
        bias_pct=100 * (float(predicted.sum()) - total) / total if total else None,
        p90_ape_pct=quantiles[1],
        p99_ape_pct=quantiles[2],
        zero_targets=int(np.sum(~nonzero)),
    )


def skill(model: Metrics, baseline: Metrics) -> float | None:
    """Share of the baseline's mean absolute error that the model removes: 1 is perfect, 0 no better, null unknown."""
    if model.mae is None or not baseline.mae:
        return None
    return 1 - model.mae / baseline.mae
