"""Find runs that share spans: the same traces ingested under two names, for example from rotating files.

Such spans would count twice, and rows held out of one run would train the model through the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from tracefit.tables.store import TableStore

_IDS = ("trace_id", "span_id", "start_unix_ns", "end_unix_ns")
"""What a span is known by: an id that two runs use for spans of other times is no span they share."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A run with spans that also are in a run of at least the same size.

    Attributes:
        run_id: The run.
        other: The run that is kept.
        spans: Number of shared spans.
    """

    run_id: str
    other: str
    spans: int


def find_overlaps(store: TableStore, runs: pl.DataFrame) -> tuple[Overlap, ...]:
    """Find runs that share spans with a run that is kept.

    Larger runs are kept before smaller ones, equal ones by name. Only runs that overlap in time are compared, with
    eight bytes in memory for each of their spans.

    Args:
        store: The tables.
        runs: Rows of the `runs` table.

    Returns:
        One overlap per run to leave out, in the order of the rows.
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
