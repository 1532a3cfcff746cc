"""Runs that share spans: the same traces ingested under two names, such as a window of files that rotates.

Spans that are there twice would count twice, and one run's held-out rows would be among those another is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from tracefit.tables.store import TableStore

_IDS = ("trace_id", "span_id")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A run of which spans are in another run that has no fewer.

    Attributes:
        run_id: The run.
        other: The other.
        spans: Spans they share.
    """

    run_id: str
    other: str
    spans: int


def find_overlaps(store: TableStore, runs: pl.DataFrame) -> tuple[Overlap, ...]:
    """Find runs that share spans with a run that is kept.

    Runs are kept in order of their spans, the largest first, then of their names. Only runs that overlap in time are
    looked into; eight bytes of each of their spans are held.

    Args:
        store: The tables.
        runs: Rows of the `runs` table.

    Returns:
        One per run to leave out, in the order of the rows.
    """
    spans = runs.group_by("run_id", maintain_order=True).agg(
        pl.col("spans").sum(), pl.col("first_unix_ns").min(), pl.col("last_unix_ns").max()
    )
    ordered = spans.sort(pl.col("spans"), pl.col("run_id"), descending=[True, False])
    held: dict[str, pl.Series] = {}

    def ids(run_id: str) -> pl.Series:
        if run_id not in held:
            held[run_id] = store.read("spans", [run_id], _IDS).select(_IDS).hash_rows()
        return held[run_id]

    kept: list[tuple[str, int, int]] = []
    found: dict[str, Overlap] = {}
    for run_id, _, first, last in ordered.iter_rows():
        beside = [name for name, begin, end in kept if begin <= last and first <= end]
        shared = {name: int(ids(run_id).is_in(ids(name).implode()).sum()) for name in beside}
        other = max(shared, key=shared.__getitem__, default=None)
        if other is not None and shared[other]:
            found[run_id] = Overlap(run_id, other, shared[other])
            del held[run_id]
        else:
            kept.append((run_id, first, last))
    return tuple(found[name] for name in spans["run_id"] if name in found)
