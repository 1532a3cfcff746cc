"""Columns of frames as amounts, and amounts as columns: null in a frame is NaN in an array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.errors import UsageError
from tracefit.models.evaluate import holds, line
from tracefit.models.formulas import computation, names_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefit.models.amounts import Amount
    from tracefit.models.formulas import Formulas, Node
    from tracefit.models.schema import Condition, Number, Term
    from tracefit.statistics import Flags, Vector


def amounts_of(frame: pl.DataFrame, names: Collection[str]) -> dict[str, Vector]:
    """Return the columns that names stand for as arrays, shape (rows,); null is NaN.

    Raises:
        UsageError: A column is not of numbers.
    """
    columns = [frame[name] for name in frame.columns if name in names]
    for column in columns:
        if not (column.dtype.is_numeric() or column.dtype in (pl.Boolean, pl.Null)):
            raise UsageError("is not a column of numbers", where=column.name)
    return {column.name: column.cast(pl.Float64).to_numpy() for column in columns}


def column_of(name: str, amount: Amount, rows: int) -> pl.Series:
    """Return amounts as a column of so many rows; unknown is null."""
    return pl.Series(name, np.broadcast_to(amount, rows), pl.Float64, nan_to_null=True)


def with_formulas(
    frame: pl.DataFrame, nodes: Mapping[str, Node], constants: Mapping[str, float | None] | None = None
) -> pl.DataFrame:
    """Add a column for each formula, computed from the columns that the frame had before, and null where it is unknown.

    Args:
        frame: The rows.
        nodes: Formulas by the name of their column.
        constants: Names that are one value for the whole frame; null is unknown. A column of the same name wins.

    Raises:
        UsageError: A column is not of numbers.
        KeyError: A name is neither a column nor a constant.
    """
    fixed = {name: np.nan if value is None else float(value) for name, value in (constants or {}).items()}
    needed = frozenset().union(*map(names_in, nodes.values()))
    values = fixed | amounts_of(frame, needed)
    with np.errstate(all="ignore"):
        return frame.with_columns(
            column_of(name, computation(node)(values), frame.height) for name, node in nodes.items()
        )


def with_definitions(frame: pl.DataFrame, formulas: Formulas, names: Collection[str]) -> pl.DataFrame:
    """Add the columns of names, and of the names they build on, as far as they can be computed.

    Raises:
        UsageError: A needed column is not of numbers.
    """
    given = amounts_of(frame, formulas.used(names, frame.columns))
    with np.errstate(all="ignore"):
        values = formulas.values(given, names)
    new = values.keys() - given.keys()
    return frame.with_columns(column_of(n, values[n], frame.height) for n in formulas.nodes if n in new)


def held(frame: pl.DataFrame, condition: Condition) -> Flags:
    """Return for which rows a condition over columns holds, shape (rows,)."""
    return np.broadcast_to(holds(condition, amounts_of(frame, condition.names)), frame.height)


def summed(frame: pl.DataFrame, intercept: Number, terms: Iterable[Term]) -> Vector:
    """Return a line over columns, not clipped, shape (rows,); NaN where a feature is null."""
    terms = tuple(terms)
    values = amounts_of(frame, {term.feature for term in terms})
    with np.errstate(all="ignore"):
        return np.broadcast_to(line(intercept, terms, values), frame.height)
