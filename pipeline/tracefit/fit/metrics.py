"""Error metrics, quantiles of distributions, and prediction intervals.

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
    """Return the errors of predictions.

    Args:
        actual: Measured values, shape (n,).
        predicted: Predictions in the same unit, shape (n,).
    """
    if actual.size == 0:
        return NO_ROWS
    error = np.abs(predicted - actual)
    nonzero = actual != 0
    ape = 100 * error[nonzero] / np.abs(actual[nonzero])
    total_squares = float(np.sum((actual - actual.mean()) ** 2))
    total = float(actual.sum())
    quantiles = [float(q) for q in np.quantile(ape, [0.5, 0.9, 0.99])] if ape.size else [None, None, None]
    return Metrics(
        n=int(actual.size),
        mape_pct=float(ape.mean()) if ape.size else None,
        mdape_pct=quantiles[0],
        mae=float(error.mean()),
        rmse=float(np.sqrt(np.mean(error**2))),
        r2=1 - float(np.sum(error**2)) / total_squares if total_squares > 0 else None,
        bias_pct=100 * (float(predicted.sum()) - total) / total if total else None,
        p90_ape_pct=quantiles[1],
        p99_ape_pct=quantiles[2],
        zero_targets=int(np.sum(~nonzero)),
    )


def skill(model: Metrics, baseline: Metrics) -> float | None:
    """Return the share of the baseline's mean absolute error that the model removes: 1 is perfect, 0 no better."""
    if model.mae is None or not baseline.mae:
        return None
    return 1 - model.mae / baseline.mae


PERCENTS: tuple[int, ...] = (*range(0, 100, 5), 99, 100)


def distribution(rows: pl.DataFrame, measured: str, predicted: Sequence[str]) -> Distribution:
    """Return quantiles of a column and of its predictions, over the rows where all are known.

    A prediction that is null on all rows is left out and removes no row. Predictions are clipped at 0, as everywhere.

    Args:
        rows: Held-out rows.
        measured: Column with the measured values.
        predicted: Columns with predictions of it.
    """
    given = [name for name in predicted if rows[name].count()]
    known = rows.drop_nulls([measured, *given])
    if not known.height or not given:
        return Distribution(0, (), {})
    quantiles = {name: _quantiles(known[name].clip(lower_bound=0)) for name in given}
    return Distribution(known.height, _quantiles(known[measured]), quantiles)


def _quantiles(column: pl.Series) -> tuple[float, ...]:
    return tuple(float(column.quantile(p / 100, "linear") or 0.0) for p in PERCENTS)


LEVEL_PCT = 95.0


def prediction_interval(predicted: Vector, actual: Vector) -> PredictionInterval:
    """Return the limits that 2.5 % of rows are below and above, as conformal quantiles at k / (n + 1) (Vovk et al. 2005).

    The limits are ratios or differences, whichever give the narrower intervals over these rows: the noise of a step time grows
    with the step, the noise of a wait need not.

    Args:
        predicted: Out-of-sample predictions, shape (n,).
        actual: Measured values, shape (n,).
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
