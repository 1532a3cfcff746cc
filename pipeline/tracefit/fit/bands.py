"""Where a new observation falls about its prediction, told by rows the model had not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from tracefit.fit.metrics import Vector

LEVEL_PCT = 95.0


@dataclass(frozen=True, slots=True)
class Band:
    """Limits of a 95 % prediction interval: factors on a prediction, or differences from it in the target's unit."""

    kind: Literal["ratio", "difference"]
    low: float
    high: float

    def around(self, predicted: Vector) -> tuple[Vector, Vector]:
        """Return the lower and upper limits of predictions; shape (n,) each, not below zero."""
        if self.kind == "ratio":
            return predicted * self.low, predicted * self.high
        return np.maximum(predicted + self.low, 0.0), np.maximum(predicted + self.high, 0.0)


def band_of(predicted: Vector, actual: Vector) -> Band:
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
            return Band("ratio", *ratios)
    return Band("difference", *differences)


def _limits(values: Vector, tail: float) -> tuple[float, float]:
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


def covered_pct(low: Vector, actual: Vector, high: Vector) -> float:
    """Return the share of rows within their limits, in percent."""
    return 100 * float(np.mean((actual >= low) & (actual <= high)))
