"""How far predictions are from what was measured: error metrics, quantiles and prediction intervals.

Every report and file of tracefit states errors as this module computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.results import NO_ROWS, Distribution, Metrics, PredictionInterval

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from tracefit.fit.arrays import Vector


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


PERCENTS: tuple[int, ...] = (*range(0, 100, 5), 99, 100)


def distribution(rows: pl.DataFrame, measured: str, predicted: Sequence[str]) -> Distribution:
    """Return quantiles of a column and of its predictions, over the rows where all are known.

    A prediction that no row has is left out and takes no row with it. Predictions are clipped at 0, as everywhere.

    Args:
        rows: What was held out.
        measured: Column that was measured.
        predicted: Columns that predict it.
    """
    there = [name for name in predicted if rows[name].count()]
    known = rows.drop_nulls([measured, *there])
    if not known.height or not there:
        return Distribution(0, (), {})
    told = {name: _quantiles(known[name].clip(lower_bound=0)) for name in there}
    return Distribution(known.height, _quantiles(known[measured]), told)


def _quantiles(column: pl.Series) -> tuple[float, ...]:
    return tuple(float(column.quantile(p / 100, "linear") or 0.0) for p in PERCENTS)


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
