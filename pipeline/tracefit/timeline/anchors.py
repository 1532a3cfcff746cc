"""The step clock: the start of every anchored step, and its standard deviation.

Three kinds of stamps anchor a step: its summary (exact); SCHEDULED and PREEMPTED, stamped inside its schedule();
FIRST_TOKEN and FINISHED, stamped in its update, right before the next step starts. Steps that also have a summary show
the small offsets of the last two.
"""

from __future__ import annotations

import polars as pl

from tracefit.statistics import divided, robust_sd_expr
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.timeline import thresholds
from tracefit.timeline.engines import position

_INSIDE_SCHEDULE = ("SCHEDULED", "PREEMPTED")
_UPDATE = ("FIRST_TOKEN", "FINISHED")


def execution_lags(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Find engines that schedule a step while the one before it executes (asynchronous scheduling).

    There, a request's FIRST_TOKEN or FINISHED of step k is stamped after step k+1 began, because step k executes in
    the period between the starts of k+1 and k+2. Composition k then explains the cycle of step k+1.

    Args:
        steps: The `steps` table, or any frame with the columns of the engine, step_id and ts_start_ns.
        journeys: The `journey_events` table; its SCHEDULED events are starts too.

    Returns:
        One row per (run_id, server) with enough events: `execution_lag_steps`, 0 or 1.
    """
    step = [*ENGINE, "step_id"]
    inside = journeys.filter(pl.col("event").is_in(_INSIDE_SCHEDULE) & pl.col("step_id").is_not_null())
    first = inside.group_by(step).agg(ts_start_ns=pl.col("ts_ns").min())
    exact = steps.select(*step, "ts_start_ns").drop_nulls()
    starts = pl.concat([exact, first.join(exact, on=step, how="anti").select(exact.columns)])
    nexts = starts.select(*ENGINE, step_id=pl.col("step_id") - 1, next_start_ns="ts_start_ns")
    late = journeys.filter(_is_update()).join(nexts, on=step, how="inner")
    # Nearly all events of a server are late, or nearly no event is: half is a safe border.
    return (
        late.group_by(SERVER)
        .agg(events=pl.len(), late=(pl.col("ts_ns") > pl.col("next_start_ns")).mean())
        .filter(pl.col("events") >= thresholds.LEAST_SAMPLES)
        .select(*SERVER, execution_lag_steps=(pl.col("late") > 0.5).cast(pl.Int64))
        .sort(SERVER)
    )


def clock_disagreements(timeline: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Count the events of the engine core that were stamped before their step began or after it must have ended.

    Args:
        timeline: The `timeline` table.
        journeys: The `journey_events` table.

    Returns:
        One row per (run_id, server) with events before or after an anchored start: `events`, the number of these
        events, and `disagreeing`.
    """
    clock = timeline.select(*ENGINE, "step_id", "ts_start_ns").drop_nulls().sort("step_id")
    inside = pl.col("event").is_in(_INSIDE_SCHEDULE)
    stamped = journeys.filter((inside | _is_update()) & pl.col("step_id").is_not_null())
    # An update comes before the step after next: with scheduling a step ahead the next one has begun by then.
    over = stamped.with_columns(over_step=pl.col("step_id") + pl.when(inside).then(1).otherwise(2))
    between = (
        over.sort("step_id")
        .join_asof(clock.rename({"ts_start_ns": "begin_ns"}), on="step_id", by=ENGINE, check_sortedness=False)
        .sort("over_step")
        .join_asof(
            clock.rename({"ts_start_ns": "end_ns"}),
            left_on="over_step",
            right_on="step_id",
            by=ENGINE,
            strategy="forward",
            check_sortedness=False,
        )
    )
    early = pl.col("ts_ns") < pl.col("begin_ns") - thresholds.DISAGREEING_NS
    late = pl.col("ts_ns") > pl.col("end_ns") + thresholds.DISAGREEING_NS
    disagrees = early.fill_null(value=False) | late.fill_null(value=False)
    checked = between.filter(pl.col("begin_ns").is_not_null() | pl.col("end_ns").is_not_null())
    return checked.group_by(SERVER).agg(events=pl.len(), disagreeing=disagrees.sum()).sort(SERVER)


def _is_update() -> pl.Expr:
    # An abort is stamped when the client's disconnect is noticed, not in an update.
    aborted = (pl.col("finish_status") == "aborted").fill_null(value=False)
    return pl.col("event").is_in(_UPDATE) & ~aborted


def step_starts(steps: pl.DataFrame, core: pl.DataFrame) -> pl.DataFrame:
    """Return the start of every step that is anchored.

    Args:
        steps: The `steps` table, located on the step axis, with `position`.
        core: `core_events`, located, with `execution_lag_steps`.

    Returns:
        position, ts_start_ns, start_source (`summary`, `scheduled`, `update`), start_sd_us; one row per anchored
        step, starts increasing within an engine.
    """
    exact = steps.select("position", "engine", "server_number", at="ts_start_ns").drop_nulls("at")
    # Events inside schedule() give the start of their step, and the earliest is nearest to it. An update ends its step:
    # it gives the start of the next one (with scheduling ahead, of the one after), and the latest is nearest to it.
    step, stamp = pl.col("step_id"), pl.col("ts_ns")
    kinds = {
        "scheduled": _at(core.filter(pl.col("event").is_in(_INSIDE_SCHEDULE)), step, stamp.min()),
        "update": _at(core.filter(_is_update()), step + 1 + pl.col("execution_lag_steps"), stamp.max()),
    }
    # Events are moved by the median of the offsets of their server: CPUs and versions differ.
    offsets = _offsets(kinds, exact)
    estimated = {k: _corrected(events, offsets.filter(kind=k)) for k, events in kinds.items()}
    anchors = pl.concat(
        [
            exact.select("position", "engine", "at", sd_us=pl.lit(0.0), start_source=pl.lit("summary")),
            _best(estimated).join(exact, on="position", how="anti"),
        ],
        how="vertical_relaxed",
    )
    return _increasing(anchors.sort("position")).select(
        "position", "start_source", ts_start_ns="at", start_sd_us="sd_us"
    )


def _at(events: pl.DataFrame, step: pl.Expr, stamp: pl.Expr) -> pl.DataFrame:
    """Return one stamp per step that events name: position, engine, server_number, at."""
    on_axis = events.with_columns(position=position(step)).drop_nulls("position")
    return on_axis.group_by("position").agg(pl.col("engine", "server_number").first(), at=stamp)


def _offsets(kinds: dict[str, pl.DataFrame], exact: pl.DataFrame) -> pl.DataFrame:
    """Measure how far the events of each kind are from their step's start: server_number, kind, offset_ns, sd_us.

    They are compared with exact starts where enough steps have both. A kind without exact starts is compared with the
    other kind, on steps that have both; without any exact start each kind gets half of the distance: cycles do not
    depend on a common shift.
    """
    direct = pl.concat([_distances(e, exact).with_columns(kind=pl.lit(k)) for k, e in kinds.items()])
    pairs = _distances(kinds["scheduled"], kinds["update"])
    pairs = pairs.rename({"offset_ns": "gap_ns", "sd_us": "gap_sd_us"})
    servers = pl.concat([e.select("server_number") for e in kinds.values()]).unique()
    sides = servers.join(pl.DataFrame({"kind": list(kinds), "sign": [1.0, -1.0]}), how="cross")
    table = sides.join(direct, on=["server_number", "kind"], how="left")
    table = table.join(pairs, on="server_number", how="left").sort("server_number", "kind")
    # Each server has two rows, one of each kind: in reverse order, each kind gets the offset of the other one.
    table = table.with_columns(other=pl.col("offset_ns").reverse().over("server_number"))
    gap = pl.col("gap_ns") * pl.col("sign")
    return table.select(
        "server_number",
        "kind",
        offset_ns=pl.coalesce("offset_ns", pl.col("other") + gap, gap / 2, pl.lit(0.0)),
        sd_us=pl.coalesce("sd_us", "gap_sd_us", pl.lit(thresholds.EVENT_SD_US)).clip(
            lower_bound=thresholds.LEAST_EVENT_SD_US
        ),
    )


def _distances(events: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Return by how much events come after starts, median and robust standard deviation, per server with enough steps
    that have both.
    """
    both = events.join(starts.select("position", start="at"), on="position", how="inner")
    distance = (pl.col("at") - pl.col("start")).cast(pl.Float64)
    sd = divided(robust_sd_expr(distance), 1e3)
    measured = both.group_by("server_number").agg(steps=pl.len(), offset_ns=distance.median(), sd_us=sd)
    return measured.filter(pl.col("steps") >= thresholds.LEAST_OFFSET_STEPS).drop("steps")


def _corrected(events: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Move events of one kind to the starts of their steps."""
    moved = pl.col("at") - pl.col("offset_ns").round().cast(pl.Int64)
    return events.join(offsets, on="server_number", how="inner").select(
        "position", "engine", "sd_us", at=moved, start_source="kind"
    )


def _best(estimated: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Choose between a step's two estimates: the more precise one, or the one inside the step where they disagree.

    Anything may happen between an update and the next start (requests to drain, garbage collection), while a SCHEDULED
    event cannot be further from its start than schedule() is long.
    """
    inside, after = estimated["scheduled"], estimated["update"]
    pairs = inside.join(after.select("position", other="at", other_sd_us="sd_us"), on="position", how="left")
    apart = (pl.col("at") - pl.col("other")).abs() / 1e3
    far = apart > thresholds.DISAGREEING_SD * (pl.col("sd_us") ** 2 + pl.col("other_sd_us") ** 2).sqrt()
    taken = pairs.filter(pl.col("other").is_null() | far | (pl.col("sd_us") <= pl.col("other_sd_us")))
    taken = taken.select("position", "engine", "at", "sd_us", "start_source")
    return pl.concat([taken, after.join(taken, on="position", how="anti").select(taken.columns)])


def _increasing(anchors: pl.DataFrame) -> pl.DataFrame:
    """Drop estimated starts that run backwards in time; exact ones always stay.

    A single wrong stamp must not remove all its neighbours: starts that disagree with the median of their
    neighbours are dropped first.
    """
    at, exact = pl.col("at"), pl.col("start_source") == "summary"
    behind, ahead = (_middle([at.shift(sign * k).over("engine") for k in (1, 2, 3)]) for sign in (1, -1))
    near = anchors.filter(exact | (_after(at, behind) & _after(ahead, at)))
    # The remaining anchors must increase over the whole epoch; a cycle is a difference and cannot be negative.
    latest_before = at.cum_max().shift(1).over("engine")
    earliest_after = at.cum_min(reverse=True).shift(-1).over("engine")
    return near.filter(exact | (_after(at, latest_before) & _after(earliest_after, at)))


def _middle(three: list[pl.Expr]) -> pl.Expr:
    """Return the median of three values, or of fewer at an end of the trace."""
    a, b, c = three
    return pl.max_horizontal(pl.min_horizontal(a, b), pl.min_horizontal(pl.max_horizontal(a, b), c))


def _after(late: pl.Expr, early: pl.Expr) -> pl.Expr:
    return (late > early).fill_null(value=True)
