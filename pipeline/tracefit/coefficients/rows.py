"""Rows to predict, in whatever form a Python program has them: as a polars frame.

Frames of other libraries come through Arrow's C stream interface (pandas 2.2, pyarrow, DuckDB and others have it) or the
older interchange protocol, so that none of these libraries has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import polars as pl
from pyarrow.interchange import from_dataframe

from tracefit.errors import UsageError


@runtime_checkable
class ArrowFrame(Protocol):
    """A frame of any library that exports Arrow data: of pandas, pyarrow, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the frame as an Arrow stream."""
        ...


@runtime_checkable
class InterchangeFrame(Protocol):
    """A frame of any library that has the dataframe interchange protocol, as pandas before 2.2."""

    def __dataframe__(self, *, allow_copy: bool = True) -> Any:
        """Export the frame."""
        ...


Rows = (
    pl.DataFrame
    | pl.LazyFrame
    | ArrowFrame
    | InterchangeFrame
    | Mapping[str, Any]
    | Iterable[Mapping[str, Any]]
)
"""A frame, columns by name (`{"batch": [1, 2]}`), or one mapping per row (`[{"batch": 1}, {"batch": 2}]`)."""

_INDEX = "__index_level_"


def as_frame(rows: Rows) -> pl.DataFrame:
    """Return rows as a polars frame, in their order; an index that is no column of its own is left out.

    Raises:
        UsageError: They are no rows.
    """
    if isinstance(rows, pl.DataFrame):
        return rows
    if isinstance(rows, pl.LazyFrame):
        return rows.collect()
    if isinstance(rows, str | bytes):
        raise UsageError(
            f"{rows!r:.80} is no frame, no columns by name and no list of mappings", where="rows"
        )
    try:
        frame = _frame(rows)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"cannot be read as rows ({str(error)[:200]})", where="rows") from error
    return frame.drop([name for name in frame.columns if name.startswith(_INDEX)])


def _frame(rows: Any) -> pl.DataFrame:
    if isinstance(rows, Mapping):
        return pl.DataFrame({name: _column(values) for name, values in rows.items()})
    if isinstance(rows, ArrowFrame):
        return pl.DataFrame(rows)
    if isinstance(rows, InterchangeFrame):
        frame = pl.from_arrow(from_dataframe(rows))
        if isinstance(frame, pl.DataFrame):
            return frame
    listed = list(rows)
    if wrong := next((row for row in listed if not isinstance(row, Mapping)), None):
        raise TypeError(f"{type(wrong).__name__} is no mapping of names to values")
    return pl.DataFrame([dict(row) for row in listed], infer_schema_length=None)


def _column(values: Any) -> Any:
    """Return the values of a column; a number alone stands for every row."""
    return values if isinstance(values, int | float) or hasattr(values, "__array__") else list(values)
