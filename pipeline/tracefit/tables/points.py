"""Points of a benchmark: rows of the `points` table from the spans that stand for them.

A point has no request and no step: nothing is fitted on it. It is what a plan is compared with.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl

from tracefit.tables.dialects import POINT_KEY, POINT_SCOPE
from tracefit.tables.schema import POINTS, SPANS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATED = tuple(
    name
    for name in POINTS.names
    if name not in ("run_id", "server", "point", "source_file", "source_offset", "unread", "settings")
)
"""Columns that a record states as one value each."""

POINT_LATENCIES, STATISTICS = ("ttft", "tpot", "itl", "e2e"), ("mean", "p50", "p90", "p95", "p99")
"""Latencies of a point, and what is known of each: `ttft_mean_us`."""


def point_columns(latency: str) -> Iterable[str]:
    """Yield the columns of a latency."""
    return (f"{latency}_{statistic}_us" for statistic in STATISTICS)


def text_of_point(values: Mapping[str, Any]) -> str:
    """Return a point as the text of its span's attribute; equal points have equal texts."""
    return json.dumps({name: value for name, value in values.items() if value is not None}, sort_keys=True)


def points_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `points` that some spans stand for.

    Args:
        spans: Rows of the `spans` table; others than of points are left out.
    """
    of_points = spans.filter(has_points())
    pair = pl.element().struct
    # Parquet stores them as a map.
    pairs = pl.col("attributes").cast(SPANS.types["attributes"])
    text = pairs.list.eval(pair.field("value").filter(pair.field("key") == POINT_KEY)).list.first()
    columns = ("run_id", "server", "source_file", "source_offset")
    rows = []
    for *position, stated_text in of_points.select(*columns, text).iter_rows():
        stated: dict[str, Any] = json.loads(stated_text or "{}")
        row = dict(zip(columns, position, strict=True)) | {name: stated.get(name) for name in (*STATED, "point")}
        rows.append(row | {name: json.dumps(stated.get(name), sort_keys=True) for name in ("settings", "unread")})
    if not rows:
        return POINTS.empty()
    return POINTS.conform(pl.DataFrame(rows, infer_schema_length=None))


def points_stated(runs: pl.DataFrame, *, only: bool = False) -> bool:
    """Return whether rows of `runs` have points, or, if asked, nothing else."""
    read = runs["dialects"].str.split(",").explode()
    return bool((read == POINT_SCOPE).all() if only else (read == POINT_SCOPE).any())


def has_points() -> pl.Expr:
    """Return which rows of `spans` are points."""
    return pl.col("scope") == POINT_SCOPE
