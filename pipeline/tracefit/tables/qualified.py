"""Names of servers and traces while several runs are built together: they begin with the number of their run.

Every key of the build has one of the two, so that rows of different runs never meet. One run alone needs no numbers.
"""

from __future__ import annotations

import polars as pl

_QUALIFIER_DIGITS = 6

QUALIFIED = ("server", "trace_id")
"""Columns that are qualified in the rows of several runs."""


def qualified(name: str) -> pl.Expr:
    """Return a name behind the number of its `run`; null where the name is."""
    return pl.concat_str(pl.col("run").cast(pl.String).str.zfill(_QUALIFIER_DIGITS), name).alias(name)


def run_of(name: str) -> pl.Expr:
    """Return the number of the run that a qualified name begins with."""
    return pl.col(name).str.head(_QUALIFIER_DIGITS).cast(pl.UInt32)


def plain(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with the names as they are in the traces."""
    names = [name for name in QUALIFIED if name in rows.columns]
    return rows.with_columns(pl.col(names).str.slice(_QUALIFIER_DIGITS))
