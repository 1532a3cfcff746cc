"""Distributions of what was measured and what was predicted, over the same rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.fit.results import Distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

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
