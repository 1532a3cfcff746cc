"""Where a new observation falls about its prediction, told by rows the model had not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.results import PredictionInterval

if TYPE_CHECKING:
    from tracefit.fit.metrics import Vector

LEVEL_PCT = 95.0


def prediction_interval(predicted: Vector, actual: Vector) -> PredictionInterval:
    """Return the limits that 2.5 % of rows are below and above, as conformal quantiles at k / (n + 1) (Vovk et al. 2005).

    Ratios or differences, whichever make the narrower intervals over these rows: the noise of step times grows with the
    step, that of a wait may not.

    Args:
        predicted: Out-of-sample predictions, shape (n,).
        actual: What was measured, shape (n,).
    """
    tail = (1 - LEVEL_PCT / 100) / 2
    differences = _limits(actual - predicted, tail)
    if (predicted > 0).all():
        ratios = _limits(actual / predicted, tail)
        if (ratios[1] - ratios[0]) * float(predicted.mean()) < differences[1] - differences[0]:
            return PredictionInterval("ratio", *ratios)
    return PredictionInterval("difference", *differences)


def _limits(values: Vector, tail: float) -> tuple[float, float]:
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


def coverage_pct(low: Vector, actual: Vector, high: Vector) -> float:
    """Return the share of rows within their limits, in percent."""
    return 100 * float(np.mean((actual >= low) & (actual <= high)))
