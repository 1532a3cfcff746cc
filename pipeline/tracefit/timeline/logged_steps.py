"""The clock of stamped steps, such as the lines of a server's log: when each step began, as far as the stamps of the
lines show it.

A line ends its step, so that the stamp of a line is the start of the next step. If stamps are finer than steps, every
line gives a start. If they are coarser, such as the whole seconds of the default format, a change of the stamp is the
start of the step whose line shows it, half a step off, and the steps between two changes are one interval. The elapsed
time that a line prints is the wait for its result. The rest of the step is work of the engine between two waits, in one
thread: about a constant and a part for each request, or a share of the wait, whichever explains the time between
changes. Where waits are most of the time, and add up with this work to the time between the changes, wait and work are
the time of a step; elsewhere, as on a fast GPU with asynchronous scheduling, only the intervals have times.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from tracefit.statistics import Matrix, Vector, robust_sd, robust_sd_expr
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import SOURCES, is_from, names_of
from tracefit.timeline import thresholds

_HUBER, _HUBER_ROUNDS = 1.345, 30
"""Residual, in standard deviations, from which on an interval weighs less (Huber 1964), and rounds of reweighting."""

CLOCK_JUMP = "steps.unix_ns jumps: the time to the next step is not a step's"
"""Reason of a step time that is left out because the clock of the log jumped in it."""

MAYBE_JUMP = "steps.unix_ns may jump: a gap of whole half hours, to 2 s, before new requests is not taken for idle time"
"""Reason of a gap that is left out because a change of the time zone, or of daylight saving, looks like it."""

_EVEN_SD = 12.0**-0.5
"""Standard deviation of an even distribution, as a share of its width."""

_WORK_TERMS = {
    "step": pl.col("step_id").is_not_null().cast(pl.Int64),
    "request": pl.col("num_prefill_reqs") + pl.col("num_decode_reqs"),
    "prompt": pl.col("num_prefill_reqs"),
    "wait": pl.col("cycle_us"),
}
"""The engine's work between two waits grows with these: steps, their requests, and the requests with prompt tokens; or
else the wait itself."""

_CHANGE = "_change"
"""The source of a start is that of its step: the stamp of the line before; with this behind it, a change of a coarse
stamp."""


class LoggedSteps(msgspec.Struct, frozen=True):
    """The clock of logged steps.

    Attributes:
        steps: The `steps` table; `cycle_us` of a line is its wait and work if these are the time of the step, else
            null.
        starts: ENGINE, step_id, ts_start_ns, start_sd_us, start_source, and pause: whether there is idle time between
            the start and the next one.
        jumps: ENGINE, step_id of the starts after which the clock jumped forward, or may have, before the next one;
            with the reason.
    """

    steps: pl.DataFrame
    starts: pl.DataFrame
    jumps: pl.DataFrame


def is_logged(column: str = "cycle_source") -> pl.Expr:
    """Return which rows have a source of stamped steps, as the lines of a log are."""
    return is_from(lambda source: source.is_stamped, column)


def is_change() -> pl.Expr:
    """Return which starts are changes of a coarse stamp; the others are stamps, or follow from them."""
    return pl.col("start_source").str.ends_with(_CHANGE)


def sources_of_intervals() -> dict[str, str]:
    """Return the source of the means over several steps that begin at a stamped start, by the source of the start."""
    means = {name: SOURCES[name].means for name in names_of(lambda source: source.means)}
    return means | {f"{name}{_CHANGE}": mean for name, mean in means.items()}


def log_clock(steps: pl.DataFrame) -> LoggedSteps:
    """Return the clock that the stamps and waits of logged steps allow.

    Args:
        steps: The `steps` table.
    """
    step, stamp = pl.col("step_id"), pl.col("unix_ns")
    rows = _lines(steps)
    inside = rows.group_by(*ENGINE, "interval").agg(
        *(column.sum().alias(name) for name, column in _WORK_TERMS.items()),
        any_fresh=pl.col("is_fresh").any(),
        any_open=(pl.col("is_fresh") & ~pl.col("continues")).any(),
    )
    starts = (
        rows.filter("is_mark")
        .select(
            *ENGINE,
            "is_coarse",
            "tick_ns",
            "cycle_source",
            interval=pl.int_range(1, pl.len() + 1).over(ENGINE).cast(rows.schema["interval"]),
            step_id=step + pl.when("is_coarse").then(0).otherwise(1),
            ts_start_ns=stamp,
            time_us=(stamp.shift(-1).over(ENGINE) - stamp) / 1e3,
            count=step.shift(-1).over(ENGINE) - step,
            ends_fresh=pl.col("is_coarse") & pl.col("is_fresh").shift(-1).over(ENGINE),
            ends_open=pl.col("is_coarse") & (pl.col("is_fresh") & ~pl.col("continues")).shift(-1).over(ENGINE),
        )
        .join(inside, on=[*ENGINE, "interval"], how="left", maintain_order="left")
    )
    may_pause = (pl.col("any_fresh") | pl.col("ends_fresh")).fill_null(value=False)
    is_open = (pl.col("any_open") | pl.col("ends_open")).fill_null(value=False)
    whole = (pl.col("count") == pl.col("step")) & (pl.col("time_us") > 0)
    slack = pl.when(whole).then((pl.col("time_us") - pl.col("wait")) / pl.col("step"))
    usual = pl.when(~may_pause).then(slack)
    most = (usual.median() + thresholds.PAUSE_SD * robust_sd_expr(usual)).over(SERVER)
    # If every interval may have a pause, there is no usual slack to detect pauses with.
    starts = starts.with_columns(
        pause=may_pause & (slack > most).fill_null(value=True), reason=_jump_reason(whole, may_pause, is_open)
    ).with_columns(jump=pl.col("reason").is_not_null())
    clean = starts.filter("is_coarse", ~may_pause, whole, ~pl.col("jump")).partition_by(SERVER, as_dict=True)
    works = pl.DataFrame(
        [(*server, *work) for server, part in clean.items() if (work := _work(part))],
        {
            **{name: steps.schema[name] for name in SERVER},
            **{f"{name}_us": pl.Float64 for name in _WORK_TERMS},
        },
        orient="row",
    )
    starts = starts.join(works, on=SERVER, how="left", maintain_order="left")
    sd_us = (
        pl.when("is_coarse")
        # The last change has no step time: it gets the time of the steps before it.
        .then(_EVEN_SD * (pl.col("time_us") / pl.col("count")).forward_fill().over(ENGINE))
        .otherwise((_stamp_sd_us() ** 2 + (_EVEN_SD * pl.col("tick_ns") / 1e3) ** 2).sqrt())
    )
    terms = (pl.col(f"{name}_us") * column for name, column in _WORK_TERMS.items())
    work_us = pl.sum_horizontal(terms, ignore_nulls=False)
    chosen = steps.join(works, on=SERVER, how="left", maintain_order="left").with_columns(
        cycle_us=pl.when(is_logged()).then(pl.col("cycle_us") + work_us).otherwise("cycle_us")
    )
    source = pl.when("is_coarse").then(pl.col("cycle_source") + _CHANGE).otherwise("cycle_source")
    # The time of a jump is not the steps', as that of a pause is not.
    starts = starts.with_columns(start_sd_us=sd_us, start_source=source, pause=pl.col("pause") | pl.col("jump"))
    return LoggedSteps(
        chosen.select(steps.columns),
        starts.select(*ENGINE, "step_id", "ts_start_ns", "start_sd_us", "start_source", "pause"),
        starts.filter("jump").select(*ENGINE, "step_id", "reason"),
    )


def _jump_reason(whole: pl.Expr, may_pause: pl.Expr, is_open: pl.Expr) -> pl.Expr:
    """Return why the time after a start is not a time of steps; null where it may be, or be a pause.

    Args:
        whole: Whether the interval has all of its lines.
        may_pause: Whether one of its steps has only new requests: its time is not compared with.
        is_open: Whether the engine may have idled before one of these.
    """
    comparable = whole & ~may_pause
    time_us, wait_us, count = pl.col("time_us"), pl.col("wait"), pl.col("step")
    # With asynchronous scheduling waits may be almost nothing, without prints of them nothing: the larger of both
    # counts.
    step_us = pl.when(comparable).then(time_us / count).median().over(SERVER)
    ratio = pl.when(comparable & (wait_us > 0)).then(time_us / wait_us).median().over(SERVER)
    usual_us = pl.max_horizontal(step_us * count, ratio * wait_us)
    is_far = (time_us > thresholds.JUMP_RATIO * usual_us) & (time_us - usual_us > thresholds.LEAST_JUMP_US)
    away_us = (time_us - usual_us) % thresholds.HALF_HOUR_US
    is_even = (time_us > thresholds.HALF_HOUR_US / 2) & (
        pl.min_horizontal(away_us, thresholds.HALF_HOUR_US - away_us) <= thresholds.NEAR_HALF_HOUR_US
    )
    reason = pl.when(~is_open).then(pl.lit(CLOCK_JUMP)).when(is_even).then(pl.lit(MAYBE_JUMP))
    return pl.when(whole & is_far).then(reason)


def without_jumps(timeline: pl.DataFrame, jumps: pl.DataFrame | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the timeline without the step times in which the clock of the log jumped, and how many: run_id, reason,
    count.

    Args:
        timeline: The `timeline` table.
        jumps: The `jumps` of `LoggedSteps`, if there is a log.
    """
    jumps = timeline.select(*ENGINE, "step_id", reason=pl.lit("")).clear() if jumps is None else jumps
    counts = jumps.group_by("run_id", "reason").agg(count=pl.len()).sort("run_id", "reason")
    if not jumps.height:
        return timeline, counts
    jumped = jumps.drop("reason").with_columns(jump=pl.lit(value=True))
    rows = timeline.join(jumped, on=[*ENGINE, "step_id"], how="left", maintain_order="left")
    is_jump = (pl.col("jump") & is_logged()).fill_null(value=False)
    nothing = ("cycle_us", "cycle_source", "cycle_sd_us", "interval_steps")
    without = rows.with_columns(
        *(pl.when(~is_jump).then(name).alias(name) for name in nothing),
        idle_after=pl.col("idle_after") & ~is_jump,
    )
    return without.select(timeline.columns), counts


def _lines(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the stamped lines with the number of their `interval` in the engine, and `is_mark`: whether the line
    bounds one.
    """
    step, stamp = pl.col("step_id"), pl.col("unix_ns")
    follows = (step.diff() == 1).over(ENGINE).fill_null(value=False)
    rows = steps.filter(is_logged()).drop_nulls("unix_ns").sort(*ENGINE, "step_id")
    rows = rows.with_columns(grown=stamp.diff().over(ENGINE), follows=follows)
    same = (pl.col("grown") <= 0) & pl.col("follows")
    rows = rows.with_columns(
        is_coarse=(2 * same.sum() > pl.col("follows").sum()).over(SERVER),
        # A step whose requests are all new may come after a pause.
        is_fresh=(pl.col("num_decode_reqs") == 0) & (pl.col("num_prefill_reqs") > 0),
        tick_ns=pl.max_horizontal(
            pl.when((stamp % tick == 0).all().over(SERVER)).then(tick).otherwise(1) for tick in (10**6, 10**9)
        ),
    )
    # A line with a fine stamp ends an interval; a line at which a coarse stamp changes begins one.
    marks = (pl.col("grown") > 0) | (pl.col("grown").is_null() & ~pl.col("is_coarse"))
    ends = (pl.col("is_mark") & ~pl.col("is_coarse")).cast(pl.Int64)
    return rows.with_columns(is_mark=marks.fill_null(value=False), continues=_continues()).with_columns(
        interval=(pl.col("is_mark").cum_sum() - ends).over(ENGINE)
    )


def _stamp_sd_us() -> pl.Expr:
    """Return the distance of a fine stamp from the end of its step."""
    sd_us = {name: SOURCES[name].sd_us for name in names_of(lambda source: source.is_stamped)}
    return pl.col("cycle_source").replace_strict(sd_us, default=None, return_dtype=pl.Float64)


def _continues() -> pl.Expr:
    """Return which lines go on with a prompt of the line before, so that the engine did not idle between the two.

    A step whose prompts fill the largest budget leaves one unfinished: if all were complete, the next step would have
    output tokens, but where requests have one output token only.
    """
    tokens = pl.col("prefill_tokens")
    is_full = pl.col("is_fresh") & (tokens == tokens.max().over(SERVER))
    have_outputs = (pl.col("num_decode_reqs") > 0).mean().over(SERVER) > thresholds.LEAST_OUTPUT_STEPS
    follows = is_full.shift(1).over(ENGINE) & pl.col("follows")
    return (pl.col("is_fresh") & follows & have_outputs).fill_null(value=False)


def every_start(steps: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Add the starts of the steps between `starts`, if logged steps have a time.

    Args:
        steps: The `steps` of `LoggedSteps`.
        starts: The `starts` of `LoggedSteps`, or those of requests on its steps (`place_on_log`).
    """
    timed = steps.filter(is_logged()).drop_nulls("cycle_us")
    timed = timed.select(*ENGINE, "step_id", "cycle_us", "cycle_source")
    timed = timed.join(starts, on=ENGINE, how="semi")
    if not timed.height:
        return starts
    rows = timed.join(starts, on=[*ENGINE, "step_id"], how="full", coalesce=True).sort(*ENGINE, "step_id")
    parts = []
    for part in rows.partition_by(ENGINE, maintain_order=True):
        mark = np.flatnonzero(part["ts_start_ns"].is_not_null().to_numpy())
        marked = part[mark]
        first_ns = marked["ts_start_ns"][0]
        at_us = (marked["ts_start_ns"] - first_ns).to_numpy() / 1e3
        step_us = part["cycle_us"].fill_null(0.0).to_numpy(writable=True)
        # Idle time follows the start with the pause; without it, the steps fill the time between two starts.
        idle_us = np.diff(at_us) - np.add.reduceat(step_us, mark)[:-1]
        step_us[mark[:-1]] += np.where(marked["pause"].to_numpy()[:-1], np.maximum(idle_us, 0.0), 0.0)
        passed_us = np.cumsum(step_us) - step_us
        begin_us = np.interp(passed_us, passed_us[mark], at_us)
        begin_us += np.minimum(passed_us - passed_us[mark[0]], 0.0)
        begin_us += np.maximum(passed_us - passed_us[mark[-1]], 0.0)
        start_ns = first_ns + (begin_us * 1e3).round().astype(np.int64)
        parts.append(
            part.with_columns(
                ts_start_ns=pl.coalesce("ts_start_ns", pl.Series(start_ns)),
                start_sd_us=pl.col("start_sd_us").forward_fill().backward_fill(),
                start_source=pl.col("start_source").fill_null(pl.col("cycle_source") + _CHANGE),
                # Whole seconds do not show which step the idle time follows.
                pause=(pl.col("pause") & ~is_change()).fill_null(value=False),
            ).select(starts.columns)
        )
    return pl.concat(parts)


def _work(intervals: pl.DataFrame) -> tuple[float, ...] | None:
    """Return the engine's work between two waits for each of `_WORK_TERMS`; null if waits and work disagree with the
    clock.

    Args:
        intervals: time_us, and sums of `_WORK_TERMS` of the intervals of a server that have no idle time.
    """
    time_us, waits_us = (intervals[name].to_numpy() for name in ("time_us", "wait"))
    if waits_us.sum() < thresholds.LEAST_WAIT_SHARE * time_us.sum():
        return None
    design = intervals.select(*_WORK_TERMS).cast(pl.Float64).to_numpy()
    work_us = np.zeros(design.shape[1])
    rest_us = time_us - waits_us
    if len(design) >= thresholds.LEAST_LINES:
        # Prompts count if their effect is clear; no part of the work takes negative time.
        for size in (3, 2, 1):
            work, sd = _robust(design[:, :size], rest_us)
            if work.min() >= 0 and (size < 3 or work[2] > 2 * sd[2]):
                work_us[:size] = work
                break
        share, _ = _robust(design[:, 3:], rest_us)
        left_us = robust_sd(rest_us - design @ work_us)
        if share[0] >= 0 and robust_sd(rest_us - design[:, 3:] @ share) < thresholds.CLEARLY_BETTER * left_us:
            work_us = np.append(np.zeros(3), share)
    apart = np.median(np.abs(waits_us + design @ work_us - time_us) / time_us)
    return tuple(work_us.tolist()) if apart <= thresholds.MOST_WORK_DIFFERENCE else None


def _robust(design: Matrix, target: Vector) -> tuple[Vector, Vector]:
    """Return Huber's M-estimates of the coefficients of a linear model (Huber 1964), and their standard deviations."""
    root, solution, sd = np.ones(len(target)), np.zeros(design.shape[1]), 0.0
    weighed = design
    for _ in range(_HUBER_ROUNDS):
        weighed = design * root[:, None]
        solution = np.asarray(np.linalg.lstsq(weighed, target * root, rcond=None)[0], np.float64)
        off = target - design @ solution
        sd = max(robust_sd(off), 1e-9)
        root = 1 / np.sqrt(np.maximum(np.abs(off) / (_HUBER * sd), 1.0))
    return solution, sd * np.sqrt(np.diag(np.linalg.pinv(weighed.T @ weighed)))
