"""Rows in groups of equal size: a figure of thousands of rows has a few numbers that sum up all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from tracefit.statistics import percentile_expr

if TYPE_CHECKING:
    from polars.dataframe.group_by import GroupBy

US_PER_MS = 1e3

_MOST_GROUPS = 8
ENOUGH_FOR_P90 = 50
"""Rows of a group: the tenth above its P90 is five of them."""


class Bin(NamedTuple):
    """Rows with an x of `low` to `high`, the median of their x, and median, P10 and P90 of their y."""

    # Of equal size, not of equal width: a group of the highest values would have a row or two.
    rows: int
    low: float
    high: float
    middle: float
    median: float
    p10: float
    p90: float


def bins_of(rows: pl.DataFrame, x: str, y: str, *, least: int = 1) -> list[Bin]:
    """Sum up y in groups of about equal size along x, of so many rows at least; rows of one x are in one group."""
    # Groups of few rows differ by chance, and so do those that split rows of one x.
    count = min(_MOST_GROUPS, max(2, rows.height // least))
    ranked = rows[[x, y]].sort(x)
    group = ((ranked[x].rank("min") - 1) * count).cast(pl.Int64) // rows.height
    groups = ranked.group_by(group.alias("group"), maintain_order=True).agg(
        rows=pl.len(),
        low=pl.col(x).min(),
        high=pl.col(x).max(),
        middle=pl.col(x).median(),
        median=pl.col(y).median(),
        p10=percentile_expr(pl.col(y), 10),
        p90=percentile_expr(pl.col(y), 90),
    )
    return [Bin(*row) for row in groups.drop("group").iter_rows()]


def in_groups(rows: pl.DataFrame, by: str, groups: int) -> GroupBy:
    """Split rows into groups of equal size from small to large."""
    group = (pl.int_range(pl.len()) * groups // pl.len()).alias("group")
    return rows.sort(by).with_columns(group).group_by("group", maintain_order=True)


def count_open(begins: pl.Series, ends: pl.Series, at: pl.Series) -> pl.Series:
    """Count the intervals that began before each time and had not ended by then."""
    begun, ended = begins.sort().search_sorted(at, side="left"), ends.sort().search_sorted(at, side="right")
    return begun.cast(pl.Int64) - ended.cast(pl.Int64)


def bins_by_run(rows: pl.DataFrame, x: str, y: str, *, least: int = 1) -> dict[str, list[Bin]]:
    """Return the groups of each run; see `bins_of`."""
    runs = rows.sort("run_id", maintain_order=True).group_by("run_id", maintain_order=True)
    return {str(run): bins_of(part, x, y, least=least) for (run,), part in runs}
