"""The clock of steps that vLLM's log names: when each of them began, as far as the stamps of its lines say.

A line ends its step, so that the stamp of one line is the start of the next step. Of stamps finer than steps every line gives
a start. Of coarser ones, such as the whole seconds of the default format, a change of the stamp is the start of the step whose
line shows it, half a step off: the steps between two changes are one interval. The elapsed time that a line prints is the wait
for its result, often a part of the step alone; where it adds up to the time between the changes, it is the time of its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from tracefit.statistics import robust_sd_expr
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import CycleSource

_STAMP_SD_US = 100.0
"""How far a fine stamp is from the end of its step, on two runs with known ends."""

_AGREES = 0.03
"""Largest usual difference of the elapsed times from the clock, as a share of it, where they are the times of the steps."""

_FAR_SD = 4.0
"""A step that none ran before comes after a pause, if its time less its elapsed time is so many standard deviations above the usual."""

_EVEN_SD = 12.0**-0.5
"""Standard deviation of an even distribution, as a share of its width."""

FINE, CHANGE = "log", "log_change"
"""Sources of starts: the stamp of the line before, or a change of a coarse stamp."""


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """The clock of logged steps.

    Attributes:
        steps: The `steps` table; lines of a log keep the elapsed time in `cycle_us` where it is the time of the step.
        starts: ENGINE, step_id, ts_start_ns, start_sd_us, start_source, and pause: whether idle time lies between the start and
            the next one.
    """

    steps: pl.DataFrame
    starts: pl.DataFrame


def is_logged() -> pl.Expr:
    """Return which rows of `steps` are lines of vLLM's log."""
    return (pl.col("cycle_source") == CycleSource.LOG.value).fill_null(value=False)


def log_clock(steps: pl.DataFrame) -> LoggedSteps:
    """Choose the clock of logged steps by what their lines say, and find the starts it gives.

    Args:
        steps: The `steps` table.
    """
    step, stamp = pl.col("step_id"), pl.col("unix_ns")
    follows = (step.diff() == 1).over(ENGINE).fill_null(value=False)
    rows = steps.filter(is_logged()).drop_nulls("unix_ns").sort(*ENGINE, "step_id")
    rows = rows.with_columns(grown=stamp.diff().over(ENGINE), follows=follows)
    same = (pl.col("grown") <= 0) & pl.col("follows")
    rows = rows.with_columns(
        is_coarse=(2 * same.sum() > pl.col("follows").sum()).over(SERVER),
        # A step without a request that was there before may come after a pause.
        is_fresh=(pl.col("num_decode_reqs") == 0) & (pl.col("num_prefill_reqs") > 0),
        tick_ns=pl.max_horizontal(
            pl.when((stamp % tick == 0).all().over(SERVER)).then(tick).otherwise(1) for tick in (10**6, 10**9)
        ),
    )
    # The line of a fine stamp ends an interval, that of a change begins one.
    marks = (
        pl.when("is_coarse")
        .then(pl.col("grown") > 0)
        .otherwise(pl.col("grown").is_null() | (pl.col("grown") > 0))
    )
    rows = rows.with_columns(is_mark=marks.fill_null(value=False)).with_columns(
        interval=(
            pl.col("is_mark").cum_sum()
            - pl.when("is_coarse").then(0).otherwise(pl.col("is_mark").cast(pl.Int64))
        ).over(ENGINE)
    )
    inside = rows.group_by(*ENGINE, "interval").agg(
        steps=pl.len(), elapsed_us=pl.col("cycle_us").sum(), any_fresh=pl.col("is_fresh").any()
    )
    starts = (
        rows.filter("is_mark")
        .select(
            *ENGINE,
            "is_coarse",
            "tick_ns",
            interval=pl.int_range(1, pl.len() + 1).over(ENGINE).cast(rows.schema["interval"]),
            step_id=step + pl.when("is_coarse").then(0).otherwise(1),
            ts_start_ns=stamp,
            time_us=(stamp.shift(-1).over(ENGINE) - stamp) / 1e3,
            count=step.shift(-1).over(ENGINE) - step,
            ends_fresh=pl.col("is_coarse") & pl.col("is_fresh").shift(-1).over(ENGINE),
        )
        .join(inside, on=[*ENGINE, "interval"], how="left", maintain_order="left")
    )
    may_pause = (pl.col("any_fresh") | pl.col("ends_fresh")).fill_null(value=False)
    whole = (pl.col("count") == pl.col("steps")) & (pl.col("time_us") > 0)
    slack = pl.when(whole).then((pl.col("time_us") - pl.col("elapsed_us")) / pl.col("steps"))
    usual = pl.when(~may_pause).then(slack)
    most = (usual.median() + _FAR_SD * robust_sd_expr(usual)).over(SERVER)
    # Where every interval may hold a pause, nothing tells which do.
    starts = starts.with_columns(pause=may_pause & (slack > most).fill_null(value=True))
    ratio = pl.when(whole & ~pl.col("pause")).then((pl.col("elapsed_us") / pl.col("time_us") - 1).abs())
    agrees = starts.group_by(SERVER).agg(agrees=pl.col("is_coarse").any() & (ratio.median() <= _AGREES))
    starts = starts.join(agrees, on=SERVER, how="left", maintain_order="left")
    sd_us = (
        pl.when("is_coarse")
        # The last change has no step time of its own: that of the steps before it.
        .then(_EVEN_SD * (pl.col("time_us") / pl.col("count")).forward_fill().over(ENGINE))
        .otherwise((_STAMP_SD_US**2 + (_EVEN_SD * pl.col("tick_ns") / 1e3) ** 2).sqrt())
    )
    chosen = steps.join(agrees, on=SERVER, how="left", maintain_order="left").with_columns(
        cycle_us=pl.when(~is_logged() | pl.col("agrees")).then("cycle_us")
    )
    return LoggedSteps(
        chosen.drop("agrees"),
        starts.select(
            *ENGINE,
            "step_id",
            "ts_start_ns",
            start_sd_us=sd_us,
            start_source=pl.when("is_coarse").then(pl.lit(CHANGE)).otherwise(pl.lit(FINE)),
            pause=pl.col("pause") & ~pl.col("agrees").fill_null(value=False),
        ),
    )
