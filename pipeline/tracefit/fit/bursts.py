"""Bursts: requests that arrive faster than the API process works, so that they queue in front of it.

The API process works on one request after the other: in a burst the work on a request begins when that on the requests
before it is done. What the work is, is told by requests outside of bursts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.results import Burst

if TYPE_CHECKING:
    from tracefit.fit.metrics import Vector

SERVER = ["run_id", "server"]
REQUESTS_AHEAD = 5.0
"""A request is part of a burst when the API process has work of five requests or more to do before its own."""

QUICKEST_SHARE = 0.05
"""The 5th percentile of admissions in the training part stands for the API work: little of it is a wait for a step."""

APART_S = 1.0
"""Requests of one burst come within a second of each other."""


def requests_ahead(arrivals_us: Vector, work_us: float) -> Vector:
    """Return the work ahead of each request in a process that works on one after the other, in requests.

    Args:
        arrivals_us: Sorted, shape (n,).
        work_us: Work per request.
    """
    return _waits(arrivals_us, np.full(len(arrivals_us), work_us)) / work_us


def api_waits(rows: pl.DataFrame, work_us: Vector) -> Vector:
    """Return how long each request waits for the API process of its server, in us, shape (n,).

    Args:
        rows: All admission rows of their servers: columns run_id, server, ts_ns (ARRIVED), in any order.
        work_us: API work of each, shape (n,).
    """
    numbered = rows.select(*SERVER, "ts_ns").with_row_index("row")
    waits = np.zeros(rows.height)
    for _, part in numbered.sort("ts_ns", maintain_order=True).group_by(SERVER):
        mine = part["row"].to_numpy()
        since = ((part["ts_ns"] - part["ts_ns"].min()) / 1e3).to_numpy()
        waits[mine] = _waits(since, work_us[mine])
    return waits


def _waits(arrivals_us: Vector, work_us: Vector) -> Vector:
    """Return the waits for a process that works on one after the other (Lindley 1952), arrivals sorted.

    Work on request i starts at s_i = max(a_i, s_{i-1} + w_{i-1}) = W_i + max over j <= i of (a_j - W_j), with W_i the work
    on all before i.
    """
    before = np.cumsum(work_us) - work_us
    return np.asarray(before + np.maximum.accumulate(arrivals_us - before) - arrivals_us)


def mark_bursts(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `in_burst` to the admission rows of requests.

    Args:
        rows: Columns run_id, server, ts_ns (ARRIVED), y (us), split.
    """
    work = rows.filter((pl.col("split") == "train") & (pl.col("y") > 0))["y"].quantile(QUICKEST_SHARE)
    if work is None:
        return rows.with_columns(in_burst=pl.lit(value=False))
    parts = []
    for _, part in rows.with_row_index("_row").group_by(SERVER, maintain_order=True):
        ordered = part.sort("ts_ns")
        since = ((ordered["ts_ns"] - ordered["ts_ns"].min()) / 1e3).to_numpy()
        ahead = requests_ahead(since, work)
        parts.append(ordered.with_columns(in_burst=pl.Series(ahead >= REQUESTS_AHEAD)))
    return pl.concat(parts).sort("_row").drop("_row")


def find_bursts(rows: pl.DataFrame) -> tuple[Burst, ...]:
    """Name the bursts of every server, from rows that `mark_bursts` marked."""
    if not rows.height:
        return ()
    seconds = (pl.col("ts_ns") - pl.col("ts_ns").min().over(SERVER)) / 1e9
    marked = rows.with_columns(at_s=seconds).filter("in_burst").sort(*SERVER, "at_s")
    apart = (pl.col("at_s").diff().over(SERVER) > APART_S).fill_null(value=False)
    bursts = (
        marked.with_columns(burst=apart.cast(pl.Int64).cum_sum().over(SERVER))
        .group_by(*SERVER, "burst", maintain_order=True)
        .agg(
            from_s=pl.col("at_s").min(),
            to_s=pl.col("at_s").max(),
            requests=pl.len(),
            holdout_requests=(pl.col("split") == "holdout").sum(),
        )
    )
    return tuple(Burst(**row) for row in bursts.drop("burst").to_dicts())
