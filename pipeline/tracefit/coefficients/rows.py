"""Rows to predict, in whatever form a Python program has them, and predictions in the same form.

narwhals reads and writes the frames of pandas, pyarrow and the other libraries it knows; only polars has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import narwhals.stable.v2 as nw
import polars as pl
from narwhals.stable.v2.typing import IntoDataFrame, IntoFrame

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Rows = IntoFrame | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A frame, columns by name (`{"batch": [1, 2]}`), or one mapping per row (`[{"batch": 1}, {"batch": 2}]`)."""

FrameT = TypeVar("FrameT", bound=IntoDataFrame)
"""A frame in memory of a library that narwhals knows: predictions come back as another of the same library."""


def as_frame(rows: Rows) -> pl.DataFrame:
    """Return rows as a polars frame, in their order; an index of pandas is not among the columns.

    Raises:
        UsageError: They are no rows.
    """
    if isinstance(rows, pl.DataFrame):
        return rows
    if isinstance(rows, str | bytes):
        raise UsageError(
            f"{rows!r:.80} is no frame, no columns by name and no list of mappings", where="rows"
        )
    try:
        return _frame(rows)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"cannot be read as rows ({str(error)[:200]})", where="rows") from error


def with_predictions(rows: Rows, predict: Callable[[pl.DataFrame], pl.DataFrame]) -> Any:
    """Return rows with the columns that `predict` adds to them: as a frame of the caller's library, index included.

    A lazy frame, columns by name and mappings come back as a polars frame.

    Args:
        rows: The rows.
        predict: Returns a frame that begins with the columns it gets; what it adds are numbers and text.

    Raises:
        UsageError: They are no rows, or of `predict`.
    """
    frame = as_frame(rows)
    predicted = predict(frame)
    callers = nw.from_native(cast("Any", rows), pass_through=True)
    if not isinstance(callers, nw.DataFrame) or isinstance(rows, pl.DataFrame):
        return predicted
    added = [
        nw.new_series(
            column.name,
            column.to_list(),
            nw.String if column.dtype == pl.String else nw.Float64,
            backend=callers.implementation,
        )
        for column in predicted.get_columns()[frame.width :]
    ]
    return callers.with_columns(*added).to_native()


def _frame(rows: Any) -> pl.DataFrame:
    known = nw.from_native(rows, pass_through=True)
    if isinstance(known, nw.LazyFrame):
        known = known.collect(backend="polars")
    if isinstance(known, nw.DataFrame):
        return known.to_polars()
    if isinstance(rows, Mapping):
        return pl.DataFrame({name: _column(values) for name, values in rows.items()})
    if hasattr(rows, "__arrow_c_stream__"):  # of a library that narwhals does not know
        return pl.DataFrame(rows)
    listed = list(rows)
    if wrong := next((row for row in listed if not isinstance(row, Mapping)), None):
        raise TypeError(f"{type(wrong).__name__} is no mapping of names to values")
    return pl.DataFrame([dict(row) for row in listed], infer_schema_length=None)


def _column(values: Any) -> Any:
    """Return the values of a column; a number alone stands for every row."""
    return values if isinstance(values, int | float) or hasattr(values, "__array__") else list(values)
