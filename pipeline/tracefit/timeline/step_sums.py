"""Sums over consecutive steps of an engine; no other code decides how a missing step counts."""

from __future__ import annotations

from typing import Literal

import polars as pl

from tracefit.tables.schema import ENGINE

MissingSteps = Literal["unknown", "skipped"]
"""How a step without a row or a value counts: it makes the sum null, or the sum leaves it out."""


class StepSums:
    """Sums of columns over steps, as differences of two cumulative sums: no frame has a row per request and step."""

    def __init__(self, steps: pl.DataFrame, *columns: str) -> None:
        """Add up columns of numbers along each engine; `steps` has the engine's columns and step_id, one row per
        step.
        """
        self._columns = columns
        values = pl.col(columns).fill_null(0)
        has_value = pl.col(columns).is_not_null().cast(pl.Int64).name.suffix("_known")
        sums = (sum_of.cum_sum().over(ENGINE) for sum_of in (values, has_value))
        self._until = steps.sort("step_id").select(*ENGINE, "step_id", *sums)

    def between(self, rows: pl.DataFrame, after: pl.Expr, last: pl.Expr, *, missing: MissingSteps) -> pl.DataFrame:
        """Sum over the steps after `after`, up to and including `last`.

        Args:
            rows: One row per sum, with the columns of the engine.
            after: The step before the first of each sum.
            last: The last step of each sum.
            missing: The rule for missing steps.

        Returns:
            One row per row of `rows`, in its order: each column's sum, and `<column>_known`, the number of steps with a
                value.
            Null if `after` or `last` is null.
        """
        # Both ends in one join.
        ends = pl.concat([rows.select(*ENGINE, step_id=step.cast(pl.Int64)) for step in (after, last)])
        until = self._sums_until(ends)
        begin, end = until.head(rows.height), until.tail(rows.height)
        sums = end.select(pl.col(name) - begin[name] for name in end.columns)
        if missing == "unknown":
            steps = pl.col("step_id")
            sums = sums.with_columns(
                pl.when(pl.col(f"{name}_known") == steps).then(name).alias(name) for name in self._columns
            )
        return sums.drop("step_id")

    def _sums_until(self, wanted: pl.DataFrame) -> pl.DataFrame:
        matched = (
            wanted.with_row_index("row")
            .sort("step_id", nulls_last=True)
            .join_asof(self._until, on="step_id", by=ENGINE, check_sortedness=False)
        )
        # An engine that has no step yet has a sum of 0.
        sums = pl.exclude(*ENGINE, "row").fill_null(0)
        return matched.sort("row").select(pl.when(pl.col("step_id").is_not_null()).then(sums))
