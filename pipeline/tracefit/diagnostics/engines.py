"""The course of an engine over its run: load and step times over time, and periods with a meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from tracefit.diagnostics.groups import US_PER_MS
from tracefit.diagnostics.rows import MarkedInterval, covered, marked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.results import Overload

LOAD_BINS = 80

SHORTEST_IDLE_SHARE = 0.005
"""Idle gaps shorter than this share of the run are too thin to be visible."""

MOST_IDLE_GAPS = 60

TIMELINE_COLUMNS = (
    *("server", "ts_start_ns", "cycle_us", "interval_steps", "idle_after", "running_depth"),
    *("waiting_depth", "prefill_tokens", "decode_tokens", "kv_usage_ratio"),
)


class EngineRun(msgspec.Struct, frozen=True):
    """One engine over its run; times in seconds since its first known step.

    Attributes:
        run_id: The run.
        server: The server.
        overload: That of the run in the evaluation.
        bins: One row per interval of equal length: at_s and the means of running, waiting, tokens (per step) and
            kv_pct, and the median of cycle_ms.
        marked: Its warm-up, idle gaps, queues that never emptied, and overload.
        holdout_s: Where the hold-out begins; null where no row is held out.
    """

    run_id: str
    server: str
    overload: Overload | None
    bins: pl.DataFrame
    marked: tuple[MarkedInterval, ...]
    holdout_s: float | None


def engine_run(
    timeline: pl.DataFrame,
    training: pl.DataFrame,
    overload: Overload | None = None,
    *,
    run_id: str,
    server: str,
) -> EngineRun | None:
    """Return load and step times of one engine over its run; null with fewer than two known steps.

    `timeline` has the server's rows of that table (`TIMELINE_COLUMNS`), `training` those of `beta_training`, if any,
    for the warm-up and the hold-out; `overload` is that of the run in the evaluation.
    """
    # The figure leaves out steps without a time, and those of unknown batch.
    known = timeline.drop_nulls(["ts_start_ns", "running_depth"]).sort("ts_start_ns")
    if known.height < 2:
        return None
    start = int(known["ts_start_ns"][0])
    known = known.with_columns(at_s=(pl.col("ts_start_ns") - start) / 1e9)
    training = training.with_columns(at_s=(pl.col("ts_ns") - start) / 1e9)
    seconds = float(known["at_s"][-1]) or 1.0
    bins = _time_bins(known, seconds)
    overloaded = [
        MarkedInterval("overload", max(0.0, (q.from_ns - start) / 1e9), (q.to_ns - start) / 1e9)
        for q in (overload.queued if overload else ())
        if q.server == server
    ]
    warm_up = covered("warm-up", training.filter(excluded_reason="warm_up"), ["epoch"])
    intervals = (*warm_up, *_idle(known, seconds), *_queues(bins, overloaded), *overloaded)
    holdout_s = training.filter(split="holdout").select(pl.col("at_s").min()).item()
    return EngineRun(run_id, server, overload, bins, intervals, holdout_s)


def _time_bins(known: pl.DataFrame, seconds: float) -> pl.DataFrame:
    # The last step starts at the end of the last interval: it belongs to that one.
    width = seconds / LOAD_BINS
    number = (pl.col("at_s") / width).floor().clip(0, LOAD_BINS - 1)
    busy = pl.col("cycle_us").filter(~pl.col("idle_after"))
    return (
        known.group_by(bin=number, maintain_order=True)
        .agg(
            at_s=pl.col("at_s").mean(),
            running=pl.col("running_depth").mean(),
            waiting=pl.col("waiting_depth").mean(),
            queued=pl.col("waiting_depth").min() > 0,
            # Not per second: of sampled steps the tokens of those between are not known.
            tokens=(pl.col("prefill_tokens") + pl.col("decode_tokens")).mean(),
            kv_pct=100 * pl.col("kv_usage_ratio").mean(),
            cycle_ms=busy.median() / US_PER_MS,
        )
        .with_columns(start=pl.col("bin") * width, end=(pl.col("bin") + 1) * width)
        .sort("bin")
    )


def _queues(bins: pl.DataFrame, overloaded: Sequence[MarkedInterval]) -> list[MarkedInterval]:
    """Join neighbouring intervals in which requests wait at every step; those marked as overload are left out."""
    middle = (pl.col("start") + pl.col("end")) / 2
    in_overload = (middle.is_between(o.start, o.end) for o in overloaded)
    queued = bins.filter("queued", ~pl.any_horizontal(pl.lit(value=False), *in_overload))
    group = (pl.col("bin").diff().fill_null(1) > 1).cum_sum()
    joined = queued.with_columns(group=group).group_by("group", maintain_order=True)
    return marked("queue never empty", joined.agg(pl.col("start").min(), pl.col("end").max()))


def _idle(known: pl.DataFrame, seconds: float) -> list[MarkedInterval]:
    length = pl.col("cycle_us") * pl.col("interval_steps") / 1e6
    gaps = known.filter(pl.col("idle_after") & (length > SHORTEST_IDLE_SHARE * seconds))
    ends = gaps.select(start="at_s", end=pl.col("at_s") + length, length=length)
    return marked("idle", ends.sort("length", descending=True).head(MOST_IDLE_GAPS).sort("start"))
