"""The tables of a folder as frames, for programs that work with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import UsageError, did_you_mean
from tracefit.inputs.buckets import place_of
from tracefit.tables.schema import TABLES
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class RunTables(Mapping[str, pl.DataFrame]):
    """The tables of some runs by name, each read when it is asked for: `tables["requests"]`.

    `tables.scan("timeline")` is a lazy frame; `tables["requests"].to_pandas()` and `.to_arrow()` are other libraries' frames.
    """

    def __init__(self, root: str | Path, run_ids: Sequence[str] | None = None) -> None:
        """Name the folder of tables, and its runs; all of them if not given."""
        self.root = place_of(root)
        self._run_ids = None if run_ids is None else list(run_ids)

    def __repr__(self) -> str:
        """Name the folder and the tables."""
        return f"<Tables of {self.root}: {', '.join(self)}>"

    def __fspath__(self) -> str:
        """Return the folder: the tables of a result stand for it wherever one is asked for."""
        return str(self.root)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the tables."""
        return iter(TABLES)

    def __len__(self) -> int:
        """Return how many tables there are."""
        return len(TABLES)

    def __getitem__(self, name: str) -> pl.DataFrame:
        """Read a table.

        Raises:
            KeyError: There is no table of that name.
            DataError: A part is not a readable Parquet file, or has changed since it was written.
        """
        if name not in TABLES:
            raise KeyError(name)
        return TableStore(self.root).read(name, self._run_ids)

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table as a lazy frame: only what a query needs is read.

        Raises:
            UsageError: There is no table of that name.
        """
        if name not in TABLES:
            raise UsageError(
                f"there is no table {name}",
                where=str(self.root),
                hint=did_you_mean(name, TABLES) or f"there are: {', '.join(TABLES)}",
            )
        return TableStore(self.root).scan(name, self._run_ids)
