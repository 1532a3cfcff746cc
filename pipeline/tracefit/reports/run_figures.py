"""Figures of runs: what the engine did over time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from tracefit.reports.cells import plural
from tracefit.reports.model import Band, Figure, Panel, Series, Table

if TYPE_CHECKING:
    from tracefit.fit.results import Overload

BINS = 80
SHORTEST_IDLE_SHARE = 0.005
"""Idle gaps shorter than this share of the run are too thin to be seen."""

MOST_IDLE_GAPS = 60

TIMELINE_COLUMNS = (
    "server",
    "ts_start_ns",
    "cycle_us",
    "interval_steps",
    "idle_after",
    "running_depth",
    "waiting_depth",
    "prefill_tokens",
    "decode_tokens",
    "kv_usage_ratio",
)
"""What the figure of an engine needs."""


def engine_figure(
    timeline: pl.DataFrame,
    training: pl.DataFrame,
    *,
    run_id: str,
    server: str,
    overload: Overload | None = None,
) -> Figure | None:
    """Draw the engine of one server over its run.

    Args:
        timeline: The server's rows of the `timeline` table, the columns `TIMELINE_COLUMNS` at least.
        training: Its rows of `beta_training`, for the warm-up and the hold-out; may be empty.
        run_id: The run.
        server: The server.
        overload: What the evaluation says of the run, where it was overloaded.
    """
    known = timeline.drop_nulls(["ts_start_ns", "running_depth"]).sort("ts_start_ns")
    if known.height < 2:
        return None
    start = int(known["ts_start_ns"][0])
    known = known.with_columns(at_s=(pl.col("ts_start_ns") - start) / 1e9)
    seconds = float(known["at_s"][-1]) or 1.0
    bins = _bins(known, seconds)
    panels = tuple(
        Panel(label, (Series(label, "line", tuple(part["at_s"].to_list()), tuple(part[column].to_list())),))
        for label, column in _LINES
        if (part := bins.drop_nulls(column)).height
    )
    overloaded = _overloaded(overload, server, start)
    bands = (*_warm_up(training, start), *_idle(known, seconds), *_queues(bins, overloaded), *overloaded)
    boundary = _holdout_from(training, start)
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"engine-{run_id}-{server}").strip("-").lower()
    return Figure(
        name=name,
        title=f"The engine of {run_id}, {server}{_flag(overload)}",
        caption="Means over equal stretches of time, of the steps that were traced. Look for a hold-out that is unlike what "
        "comes before it: then its errors say little about the rest. A queue that grows all through a run is a server that "
        "was offered more than it can do.",
        x_label="seconds into the run",
        panels=panels,
        bands=bands,
        marks=((boundary, "hold-out begins"),) if boundary is not None else (),
        summary=_stretch_table(bins, bands, boundary),
        wide=True,
    )


_LINES = (
    ("requests running", "running"),
    ("requests waiting", "waiting"),
    ("tokens per step", "tokens"),
    ("KV blocks in use, %", "kv_pct"),
    ("median step time, ms", "cycle_ms"),
)


def _flag(overload: Overload | None) -> str:
    if overload is None:
        return ""
    return f": overloaded, {'trained on all the same' if overload.trained_on else 'left out of training'}"


def _bins(known: pl.DataFrame, seconds: float) -> pl.DataFrame:
    width = seconds / BINS
    place = (pl.col("at_s") / width).floor().clip(0, BINS - 1)
    busy = pl.col("cycle_us").filter(~pl.col("idle_after"))
    return (
        known.with_columns(bin=place)
        .group_by("bin", maintain_order=True)
        .agg(
            at_s=pl.col("at_s").mean(),
            running=pl.col("running_depth").mean(),
            waiting=pl.col("waiting_depth").mean(),
            queued=pl.col("waiting_depth").min() > 0,
            # Not per second: of sampled steps the tokens of those between are not known.
            tokens=(pl.col("prefill_tokens") + pl.col("decode_tokens")).mean(),
            kv_pct=100 * pl.col("kv_usage_ratio").mean(),
            cycle_ms=busy.median() / 1e3,
        )
        .with_columns(start=pl.col("bin") * width, end=(pl.col("bin") + 1) * width)
        .sort("bin")
    )


def _overloaded(overload: Overload | None, server: str, start_ns: int) -> tuple[Band, ...]:
    return tuple(
        Band("overload", max(0.0, (q.from_ns - start_ns) / 1e9), (q.to_ns - start_ns) / 1e9)
        for q in (overload.queued if overload else ())
        if q.server == server
    )


def _queues(bins: pl.DataFrame, overloaded: tuple[Band, ...]) -> tuple[Band, ...]:
    """Join neighbouring stretches in which someone waits at every step; those marked as overload are told already."""
    middle = (pl.col("start") + pl.col("end")) / 2
    told = pl.any_horizontal(pl.lit(value=False), *(middle.is_between(b.start, b.end) for b in overloaded))
    marked = bins.filter(pl.col("queued").fill_null(value=False) & ~told)
    group = (pl.col("bin").diff().fill_null(1) > 1).cum_sum()
    joined = marked.with_columns(group=group).group_by("group", maintain_order=True)
    ends = joined.agg(pl.col("start").min(), pl.col("end").max()).select("start", "end")
    return tuple(Band("queue never empty", start, end) for start, end in ends.iter_rows())


def _idle(known: pl.DataFrame, seconds: float) -> tuple[Band, ...]:
    length = pl.col("cycle_us") * pl.col("interval_steps") / 1e6
    gaps = known.filter(pl.col("idle_after") & (length > SHORTEST_IDLE_SHARE * seconds))
    ends = gaps.select(start="at_s", end=pl.col("at_s") + length, length=length)
    longest = ends.sort("length", descending=True).head(MOST_IDLE_GAPS).sort("start")
    return tuple(Band("idle", start, end) for start, end, _ in longest.iter_rows())


def _warm_up(training: pl.DataFrame, start_ns: int) -> tuple[Band, ...]:
    left_out = training.filter(pl.col("excluded_reason") == "warm_up")
    if not left_out.height:
        return ()
    ends = left_out.group_by("epoch").agg(a=pl.col("ts_ns").min(), b=pl.col("ts_ns").max()).sort("epoch")
    return tuple(Band("warm-up", (a - start_ns) / 1e9, (b - start_ns) / 1e9) for _, a, b in ends.iter_rows())


def _holdout_from(training: pl.DataFrame, start_ns: int) -> float | None:
    held = training.filter(pl.col("split") == "holdout")
    return (held.select(pl.col("ts_ns").min()).item() - start_ns) / 1e9 if held.height else None


def _stretch_table(bins: pl.DataFrame, bands: tuple[Band, ...], boundary: float | None) -> Table:
    columns = tuple(column for _, column in _LINES)
    head = ("part of the run", "running", "waiting", "tokens per step", "KV %", "step ms")
    at = boundary if boundary is not None else float("inf")
    parts = (
        ("before the hold-out", bins.filter(pl.col("at_s") < at)),
        ("hold-out", bins.filter(pl.col("at_s") >= at)),
    )
    rows = [(label, *(_mean(part[c]) for c in columns)) for label, part in parts if part.height]
    for kind in dict.fromkeys(b.kind for b in bands):
        mine = [b for b in bands if b.kind == kind]
        total = sum(b.end - b.start for b in mine)
        rows.append((f"{kind}: {plural(len(mine), 'stretch', 'es')}, {total:.3g} s", *[""] * len(columns)))
    return Table(head, tuple(rows))


def _mean(column: pl.Series) -> str:
    value = column.mean()
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
