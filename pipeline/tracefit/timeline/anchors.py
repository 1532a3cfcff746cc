"""The step clock: the start of every step that something anchors, and how well it is known.

Three kinds of anchors: a step's own summary (exact); SCHEDULED and PREEMPTED, stamped inside the step's schedule();
FIRST_TOKEN and FINISHED, stamped in its update, right before the next step starts. The small offsets of the last two
are measured where a summary is there too.
"""

from __future__ import annotations

import polars as pl

from tracefit.timeline.engines import ENGINE, StepAxis

SERVER = ["run_id", "server"]
_INSIDE = ("SCHEDULED", "PREEMPTED")
_UPDATE = ("FIRST_TOKEN", "FINISHED")
_UNKNOWN_SD_US = 200.0
_LEAST_SD_US = 10.0
_NORMAL_MAD = 1.4826
_LAG_EVENTS = 20
_ENOUGH_STEPS = 5


def execution_lags(starts: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Find engines that schedule a step while the one before it executes (asynchronous scheduling).

    There, a request's FIRST_TOKEN or FINISHED of step k is stamped after step k+1 began, because step k executes in
    the period between the starts of k+1 and k+2. Composition k then explains the cycle of step k+1.

    Args:
        starts: Columns of the engine, step_id, ts_start_ns: step starts as far as they are known.
        journeys: The `journey_events` table.

    Returns:
        One row per (run_id, server) that has enough events to tell: `execution_lag_steps`, 0 or 1.
    """
    nexts = starts.select(
        *ENGINE, step_id=pl.col("step_id") - 1, next_start_ns=pl.col("ts_start_ns")
    ).drop_nulls()
    late = _updates(journeys).join(nexts, on=[*ENGINE, "step_id"], how="inner")
    return (
        late.group_by(SERVER)
        .agg(events=pl.len(), late=(pl.col("ts_ns") > pl.col("next_start_ns")).mean())
        .filter(pl.col("events") >= _LAG_EVENTS)
        .select(*SERVER, execution_lag_steps=(pl.col("late") > 0.5).cast(pl.Int64))
        .sort(SERVER)
    )


def _updates(journeys: pl.DataFrame) -> pl.DataFrame:
    # An abort is stamped when the client's disconnect is noticed, not in an update.
    aborted = (pl.col("finish_status") == "aborted").fill_null(value=False)
    return journeys.filter(pl.col("event").is_in(_UPDATE) & ~aborted)


def scheduled_starts(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the starts of steps as summaries and SCHEDULED events put them, the latter uncorrected."""
    inside = journeys.filter(pl.col("event").is_in(_INSIDE) & pl.col("step_id").is_not_null())
    first = inside.group_by(*ENGINE, "step_id").agg(ts_start_ns=pl.col("ts_ns").min())
    exact = steps.select(*ENGINE, "step_id", "ts_start_ns")
    return pl.concat([exact, first.join(exact, on=[*ENGINE, "step_id"], how="anti").select(exact.columns)])


def step_starts(
    axis: StepAxis, steps: pl.DataFrame, journeys: pl.DataFrame, lags: pl.DataFrame
) -> pl.DataFrame:
    """Place a start on every step that is anchored.

    Args:
        axis: All steps.
        steps: The `steps` table.
        journeys: The `journey_events` table.
        lags: `execution_lags`.

    Returns:
        position, ts_start_ns, start_source (`summary`, `scheduled`, `update`), start_sd_us; one row per anchored
        step, starts increasing within an engine.
    """
    exact = steps.select(*ENGINE, "step_id", "ts_start_ns")
    inside = journeys.filter(pl.col("event").is_in(_INSIDE) & pl.col("step_id").is_not_null())
    inside = inside.group_by(*ENGINE, "step_id").agg(pl.col("ts_ns").min())
    updates = _updates(journeys).join(lags, on=SERVER, how="left")
    after = pl.col("step_id") + 1 + pl.col("execution_lag_steps").fill_null(0)
    updates = updates.with_columns(step_id=after).group_by(*ENGINE, "step_id").agg(pl.col("ts_ns").max())
    kinds = {"scheduled": inside, "update": updates}
    offsets = _offsets(kinds, exact)
    anchors = pl.concat(
        [
            exact.with_columns(start_source=pl.lit("summary"), start_sd_us=pl.lit(0.0)),
            *(_corrected(events, offsets.filter(pl.col("kind") == kind)) for kind, events in kinds.items()),
        ],
        how="vertical_relaxed",
    )
    placed = axis.place(anchors, "step_id").filter(pl.col("position").is_not_null())
    best = placed.sort("position", "start_sd_us", "start_source").unique(
        "position", keep="first", maintain_order=True
    )
    return _increasing(best).select("position", "ts_start_ns", "start_source", "start_sd_us")


def _offsets(kinds: dict[str, pl.DataFrame], exact: pl.DataFrame) -> pl.DataFrame:
    """Measure how far the events of each kind are from their step's start: (run_id, server, kind, offset_ns, sd_us).

    Against exact starts where enough steps have both. A kind without them is placed against the other one, on steps
    that have both kinds; without any exact start the two meet halfway: cycles do not depend on a common shift.
    """
    direct = pl.concat([_distances(e, exact).with_columns(kind=pl.lit(k)) for k, e in kinds.items()])
    between = _distances(kinds["scheduled"], kinds["update"].rename({"ts_ns": "ts_start_ns"}))
    pairs = between.rename({"offset_ns": "gap_ns", "sd_us": "gap_sd_us"})
    sides = pl.concat([pairs.select(SERVER), direct.select(SERVER)]).unique()
    sides = sides.join(pl.DataFrame({"kind": list(kinds), "sign": [1.0, -1.0]}), how="cross")
    table = sides.join(direct, on=[*SERVER, "kind"], how="left").join(pairs, on=SERVER, how="left")
    other = pl.col("offset_ns").reverse().over(SERVER)
    table = table.sort(*SERVER, "kind").with_columns(other=other)
    gap = pl.col("gap_ns") * pl.col("sign")
    return table.select(
        *SERVER,
        "kind",
        offset_ns=pl.coalesce("offset_ns", pl.col("other") + gap, gap / 2, pl.lit(0.0)),
        sd_us=pl.coalesce("sd_us", "gap_sd_us", pl.lit(_UNKNOWN_SD_US)).clip(lower_bound=_LEAST_SD_US),
    )


def _distances(events: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Median distance of events after starts, and its robust spread, per server with enough steps that have both."""
    both = events.join(starts, on=[*ENGINE, "step_id"], how="inner")
    distance = (pl.col("ts_ns") - pl.col("ts_start_ns")).cast(pl.Float64)
    spread = (distance - distance.median()).abs().median() * _NORMAL_MAD / 1e3
    told = both.group_by(SERVER).agg(steps=pl.len(), offset_ns=distance.median(), sd_us=spread)
    return told.filter(pl.col("steps") >= _ENOUGH_STEPS).drop("steps")


def _corrected(events: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Move events of one kind to where their steps start."""
    known = events.join(offsets, on=SERVER, how="inner")
    return known.select(
        *ENGINE,
        "step_id",
        ts_start_ns=pl.col("ts_ns") - pl.col("offset_ns").round().cast(pl.Int64),
        start_source="kind",
        start_sd_us="sd_us",
    )


def _increasing(anchors: pl.DataFrame) -> pl.DataFrame:
    """Drop estimated starts that would run backwards; exact ones always stay."""
    ordered = anchors.sort("position")
    latest_before = pl.col("ts_start_ns").cum_max().shift(1).over(ENGINE)
    earliest_after = pl.col("ts_start_ns").cum_min(reverse=True).shift(-1).over(ENGINE)
    exact = pl.col("start_source") == "summary"
    fits = (pl.col("ts_start_ns") > latest_before).fill_null(value=True) & (
        pl.col("ts_start_ns") < earliest_after
    ).fill_null(value=True)
    return ordered.filter(exact | fits)
