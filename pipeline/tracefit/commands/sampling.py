"""Choose the runs of a scope to train on where they are too many to hold: evenly in time, and stated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_ROWS = 2_000_000
"""Steps and events of the runs of a scope that are trained on together: about 1 KB of memory each.

A fit needs a few ten thousand rows; the rest makes its errors known by run and by load.
"""

MOST_RUNS = 500
"""Runs that are trained on together: some measures are taken run by run, and two thousand take a quarter of an hour."""


def sample_runs(runs: pl.DataFrame, members: Sequence[str], *, most_rows: int, most_runs: int) -> list[str]:
    """Return the runs of a scope to train on: all, or as many as the bounds allow, evenly in the order of their beginning.

    Args:
        runs: Rows of the `runs` table.
        members: The runs of the scope.
        most_rows: Most steps and events of the runs returned; a single run may have more.
        most_runs: Most runs.

    Returns:
        The runs, in the order of `members`.
    """
    own = runs.filter(pl.col("run_id").is_in(list(members)))
    # Steps that were not sampled are rows of the timeline too.
    steps = pl.when(pl.col("step_sampling") > 0).then(pl.col("steps") / pl.col("step_sampling"))
    sizes = (
        own.group_by("run_id", maintain_order=True)
        .agg(steps.sum().alias("steps"), pl.col("events").first(), began=pl.col("first_unix_ns").min())
        .sort("began", "run_id")
    )
    # The counts are those of the run, repeated in the row of every server.
    events = [sum(json.loads(text).values()) for text in sizes["events"].fill_null("{}")]
    rows, ids = np.array(events) + sizes["steps"].to_numpy(), sizes["run_id"].to_list()
    kept = min(len(ids), most_runs)
    chosen = _evenly(len(ids), kept)
    while kept > 1 and rows[chosen].sum() > most_rows:
        # By the mean size at first; runs of different sizes take a few rounds.
        kept = max(1, min(kept - 1, int(kept * most_rows / rows[chosen].sum())))
        chosen = _evenly(len(ids), kept)
    found = {ids[place] for place in chosen}
    return [run_id for run_id in members if run_id in found]


def sampling_note(kept: int, of: int) -> str:
    """Return the sentence that states a sampling."""
    return (
        f"trained on {kept:,} of {of:,} runs, evenly in the order of their beginning: more take memory and time, and tell no "
        "more; all are in the tables"
    )


def _evenly(count: int, kept: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `kept` places of `count`: the middles of as many equal parts."""
    return ((np.arange(kept) + 0.5) * count / kept).astype(np.int64)
