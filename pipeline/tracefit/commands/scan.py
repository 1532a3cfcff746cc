"""Read a table as a lazy frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.commands.locate import find_tables
from tracefit.errors import UsageError, did_you_mean
from tracefit.tables.run_tables import RunTables
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl


def scan(folder: str | Path, table: str, *, run: str | None = None) -> pl.LazyFrame:
    """Return a table as a lazy polars frame, of which a query reads only the columns and rows it needs.

    `scan(...).collect()` is a polars frame, whose methods `to_pandas()` and `to_arrow()` make frames of these libraries.

    Args:
        folder: Tables, or the folder that `run` wrote.
        table: Its name, such as `requests` or `timeline`.
        run: The run whose rows to read; all runs if not given.

    Raises:
        UsageError: The folder holds no tables, not that one or not that run.
    """
    store = TableStore(find_tables(folder)).require()
    if run is not None and run not in (known := store.runs()):
        raise UsageError(
            f"there is no run {run}",
            where=str(store.root),
            hint=did_you_mean(run, known) or f"there are: {', '.join(known)}",
        )
    return RunTables(store.root, None if run is None else [run]).scan(table)
