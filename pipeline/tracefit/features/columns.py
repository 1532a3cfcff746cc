"""Formulas, conditions and lines as polars expressions over a frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from tracefit.evaluator import COMPARE
from tracefit.features.expressions import ARITHMETIC, Algebra, compiled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.features.expressions import Function, Node


def to_polars(node: Node, constants: Mapping[str, float | None]) -> pl.Expr:
    """Compile a formula to a polars expression of type Float64.

    Args:
        node: The formula.
        constants: Names that are one value for the whole frame; None is null. Every other name is a column.
    """

    def value_of(name: str) -> pl.Expr:
        if name in constants:
            return pl.lit(constants[name], dtype=pl.Float64)
        # A column of text has no numbers: its rows lack the feature.
        return pl.col(name).cast(pl.Float64, strict=False)

    return compiled(node, COLUMNS)(value_of)


def _extreme(function: Function, arguments: Sequence[pl.Expr]) -> pl.Expr:
    # The horizontal functions skip nulls and NaN; a missing operand must not look like a small one.
    all_numbers = pl.all_horizontal(
        *(argument.is_not_null() & argument.is_not_nan() for argument in arguments)
    )
    value = pl.min_horizontal(*arguments) if function == "min" else pl.max_horizontal(*arguments)
    return pl.when(all_numbers).then(value)


COLUMNS: Algebra[pl.Expr, pl.Expr] = Algebra(
    constant=lambda value: pl.lit(value, dtype=pl.Float64),
    binary={
        **ARITHMETIC,
        # A quotient by infinity is 0, as wanted; a null stays null. Adding 0 turns -0.0 into 0.0.
        "/": lambda left, right: left / (right + 0.0).replace(0.0, math.inf),
        # Adding 0 as for a quotient: a power of -0.0 would have the other sign of infinity.
        "**": lambda left, right: (left + 0.0).pow(right),
    },
    extreme=_extreme,
    finite=lambda value: pl.when(value.is_finite()).then(value),
    compare=lambda relation, left, right: pl.Expr.fill_null(COMPARE[relation](left, right), value=False),
    some=lambda truths: pl.any_horizontal(pl.lit(value=False), *truths),
    every=lambda truths: pl.all_horizontal(pl.lit(value=True), *truths),
)
"""The columns of a frame; null is unknown."""
