"""Runs whose server could not keep up: their waits follow the load test's length, not the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from tracefit.fit.results import Overload, QueueStretch

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FAILED_SHARE = 0.1
"""More requests than this share that ended in an error or whose client gave up."""

MAX_QUEUED_SHARE = 0.25
MIN_PEAK = 10
"""A queue that grew to 10 requests or more and did not empty for more than a quarter of the run's time: more came in than
went out."""

MAX_PREEMPTIONS_PER_REQUEST = 0.1
"""More preemptions than one for ten requests: work is done again instead of new work."""

_FAILED = ("aborted", "error")

REQUEST_COLUMNS = ("run_id", "server", "finish_status", "num_preemptions", "queued_ns", "first_scheduled_ns")
STEP_COLUMNS = ("run_id", "server", "ts_start_ns", "waiting_depth", "num_preempted")
"""What the rules look at."""


def find_overloads(
    run_ids: Sequence[str], requests: pl.DataFrame, steps: pl.DataFrame
) -> tuple[Overload, ...]:
    """Return the overloaded ones of some runs, in order.

    The queue is told by the journeys, and by the sampled steps of a run without any.

    Args:
        run_ids: The runs.
        requests: Their `requests` table, the columns `REQUEST_COLUMNS` at least.
        steps: Their `steps` table, the columns `STEP_COLUMNS` at least.
    """
    found = []
    for run_id in run_ids:
        mine, sampled = (frame.filter(pl.col("run_id") == run_id) for frame in (requests, steps))
        queued = _growing_queues(mine, sampled)
        reasons = [*_failures(mine), *_preemptions(mine, sampled), *_longest(queued)]
        if reasons:
            found.append(Overload(run_id, tuple(reasons), queued=queued))
    return tuple(found)


def runs_to_fit(
    run_ids: Sequence[str], overloads: Sequence[Overload], *, include: bool
) -> tuple[list[str], tuple[Overload, ...]]:
    """Return the runs of a scope to fit, and the overloaded ones with what becomes of them.

    Overloaded runs are left out, unless they are asked for or there is no other run.
    """
    flagged = {one.run_id for one in overloads}
    sound = [run_id for run_id in run_ids if run_id not in flagged]
    if sound and not include:
        return sound, tuple(overloads)
    return list(run_ids), tuple(replace(one, trained_on=True) for one in overloads)


def _failures(requests: pl.DataFrame) -> list[str]:
    ended = requests["finish_status"].drop_nulls()
    share = int(ended.is_in(_FAILED).sum()) / ended.len() if ended.len() else 0.0
    return [f"{100 * share:.1f} % of requests failed or were given up"] if share > MAX_FAILED_SHARE else []


def _preemptions(requests: pl.DataFrame, steps: pl.DataFrame) -> list[str]:
    if not requests.height:
        return []
    count = max(int(requests["num_preemptions"].sum() or 0), int(steps["num_preempted"].sum() or 0))
    each = count / requests.height
    return (
        [f"{count} preemptions of {requests.height} requests"] if each > MAX_PREEMPTIONS_PER_REQUEST else []
    )


def _longest(queued: tuple[QueueStretch, ...]) -> list[str]:
    if not queued:
        return []
    one = max(queued, key=lambda stretch: stretch.share)
    return [f"a queue of up to {one.peak} requests did not empty for {100 * one.share:.0f} % of the run"]


def _growing_queues(requests: pl.DataFrame, steps: pl.DataFrame) -> tuple[QueueStretch, ...]:
    depth = _depth_by_journeys(requests) if requests.height else _depth_by_steps(steps)
    # A stretch begins with the first request that waits and ends when none does.
    stretches = (
        depth.with_columns(
            stretch=(pl.col("waiting") == 0).cum_sum().over("server"),
            length=(pl.col("ts_ns").max() - pl.col("ts_ns").min()).over("server"),
        )
        .group_by("server", "stretch", maintain_order=True)
        .agg(
            from_ns=pl.col("ts_ns").filter(pl.col("waiting") > 0).min(),
            to_ns=pl.col("until_ns").max(),
            peak=pl.col("waiting").max(),
            length=pl.col("length").first(),
        )
        .with_columns(share=(pl.col("to_ns") - pl.col("from_ns")) / pl.col("length"))
        .filter((pl.col("peak") >= MIN_PEAK) & (pl.col("share") > MAX_QUEUED_SHARE))
    )
    return tuple(
        QueueStretch(*row) for row in stretches.select("server", "from_ns", "to_ns", "peak", "share").rows()
    )


def _depth_by_journeys(requests: pl.DataFrame) -> pl.DataFrame:
    waits = requests.filter(pl.col("queued_ns").is_not_null() & pl.col("first_scheduled_ns").is_not_null())
    events = pl.concat(
        waits.select("server", ts_ns=name, change=pl.lit(change, pl.Int64))
        for name, change in (("queued_ns", 1), ("first_scheduled_ns", -1))
    ).sort("server", "ts_ns", "change", descending=[False, False, True])
    return _until(events.with_columns(waiting=pl.col("change").cum_sum().over("server")))


def _depth_by_steps(steps: pl.DataFrame) -> pl.DataFrame:
    known = steps.filter(pl.col("ts_start_ns").is_not_null() & pl.col("waiting_depth").is_not_null())
    return _until(
        known.select("server", ts_ns="ts_start_ns", waiting="waiting_depth").sort("server", "ts_ns")
    )


def _until(depth: pl.DataFrame) -> pl.DataFrame:
    """Add when a depth ends: at the next event of its server."""
    following = pl.col("ts_ns").shift(-1).over("server")
    return depth.with_columns(until_ns=pl.coalesce(following, "ts_ns"))
