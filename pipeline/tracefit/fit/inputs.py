"""Inputs of a fit: the tables of one scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl


@dataclass(frozen=True, slots=True)
class ScopeTables:
    """The tables of the runs of one scope."""

    runs: pl.DataFrame
    timeline: pl.DataFrame
    sampled_steps: int
    requests: pl.DataFrame
    queue: pl.DataFrame | None
    """What each request found when it was queued; null where journeys are not complete."""
    counters: pl.DataFrame
    """run_id, server, epoch, first_step, last_step."""
    lags: Mapping[tuple[str, str], int]
    """(run_id, server) to steps that scheduling runs ahead of execution."""
    requeue_waits: pl.DataFrame
    """`timeline.requeue_waits`: which steps a preempted request waited through."""
    clock_checks: pl.DataFrame
    """run_id, server, events, disagreeing: engine core events held against the starts of their steps."""
