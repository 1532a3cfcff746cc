"""Fit the admission model that knows when steps start: how long the API process works on a request before it is QUEUED.

Fitted are the API work on a request, constant and per prompt token, and the offset of the stamp from the step start.
The work does not show in the stamps directly. The API process works on one request after the other, in the order they
arrive. The engine core reads the request from its socket between two steps: QUEUED is stamped at the first step start
at or after the end of the API work, or at that end itself when the engine is idle: the step that starts then is the
request's own.

In reading order: the step starts; the API process, how long a request waits for it, and the bursts in which requests
queue up for it, which take no part in the fit; the fit of the work by the boundaries at which the training requests
were queued, and its evaluation with the step clock and without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl

from tracefit.fit.estimators import RobustLinear
from tracefit.fit.fitted import FittedBoundary, predict_regimes, target_of
from tracefit.fit.splits import MIN_TRAIN_ROWS, counted_rows
from tracefit.fit.validation import coverage_pct, measure, prediction_interval, reference, skill, within_5_pct
from tracefit.models.evaluate import admitted_us
from tracefit.models.validation import Burst
from tracefit.statistics import median
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.fit.fitted import LinearFit
    from tracefit.statistics import Flags, Vector

# -- the step clock --------------------------------------------------------------------------------------

TOLERANCE_SDS = 3.0
"""An estimated start is taken to be exact to within this many standard deviations."""


Clocks = tuple[pl.DataFrame, pl.DataFrame]
"""The known step starts, and the same with unknown ones interpolated: two frames of `step_clock`."""


def step_clock(timeline: pl.DataFrame) -> pl.DataFrame:
    """Return the known step starts of the `timeline` table.

    Returns:
        Columns of the engine, start (ns), and of the step before, null where its start is not known: start_before and
        idle_before (the engine was idle between the two starts). And tolerance_us, the same on all rows: how long
        before an estimated start the stamp of a request queued at it may be; 0 for exact starts.
    """
    start = pl.col("ts_start_ns").cast(pl.Float64)
    follows = pl.when(pl.col("step_id").shift(1).over(ENGINE) == pl.col("step_id") - 1)
    return (
        timeline.select(*ENGINE, "step_id", "ts_start_ns", "start_sd_us", "idle_after")
        .drop_nulls("ts_start_ns")
        .sort(*ENGINE, "ts_start_ns")
        .select(
            *ENGINE,
            start=start,
            start_before=follows.then(start.shift(1).over(ENGINE)),
            idle_before=follows.then(pl.col("idle_after").shift(1).over(ENGINE).fill_null(value=False)),
            tolerance_us=TOLERANCE_SDS * pl.col("start_sd_us").median().cast(pl.Float64).fill_null(0.0),
        )
    )


def interpolated_clock(timeline: pl.DataFrame) -> pl.DataFrame:
    """Return the step starts of the `timeline` table, with unknown ones spaced evenly between the known ones around
    them.

    No start is interpolated across an idle gap: which of the steps the gap followed is not known.
    """
    columns = (*ENGINE, "step_id", "ts_start_ns", "start_sd_us", "idle_after")
    ordered = timeline.select(columns).sort(*ENGINE, "step_id")
    start = pl.col("ts_start_ns")
    idle = pl.when(start.is_not_null()).then(pl.col("idle_after").fill_null(value=False)).forward_fill()
    between = start.cast(pl.Float64).interpolate_by("step_id").round().cast(pl.Int64)
    filled = pl.when(start.is_null() & ~idle.over(ENGINE)).then(between.over(ENGINE)).otherwise(start)
    return step_clock(ordered.with_columns(ts_start_ns=filled))


def clocks_of(timeline: pl.DataFrame) -> Clocks:
    """Return both clocks of the `timeline` table."""
    return step_clock(timeline), interpolated_clock(timeline)


class _Boundaries(NamedTuple):
    """The first known step start after some moment of each request; shape (n,) each.

    Attributes:
        start: The start that the request waits for, in ns; NaN where it is unknown or the engine is idle.
        start_before: That of the step before.
        is_idle: Whether the engine is known to be idle.
    """

    start: Vector
    start_before: Vector
    is_idle: Flags


def _boundaries(rows: pl.DataFrame, clock: pl.DataFrame, done_us: Vector) -> _Boundaries:
    """Return the first known start at or after ARRIVED + `done_us` of each row."""
    done = rows["ts_ns"].to_numpy().astype(float) + done_us * 1e3
    starts, before = clock["start"].to_numpy(), clock["start_before"].to_numpy()
    # 1 after an idle step, and NaN after a step of unknown start.
    idle = clock["idle_before"].cast(pl.Float64).to_numpy()
    found = np.full(len(done), len(starts))
    of_engine = _rows_of_engines(clock)
    for engine, chosen in _rows_of_engines(rows).items():
        own = of_engine.get(engine, np.zeros(0, dtype=np.int64))
        found[chosen] = np.append(own, len(starts))[np.searchsorted(starts[own], done[chosen])]
    start, start_before, idle = (np.append(values, np.nan)[found] for values in (starts, before, idle))
    # After a step of unknown start another boundary may come in between; after an idle step nothing is waited for.
    waits = idle == 0
    return _Boundaries(np.where(waits, start, np.nan), np.where(waits, start_before, np.nan), idle == 1)


def _rows_of_engines(frame: pl.DataFrame) -> dict[tuple[object, ...], NDArray[np.int64]]:
    """Return the numbers of the rows of each engine, in their order."""
    # Most servers have one engine in one epoch, and a query takes longer than all the rest.
    if all(frame[name].n_unique() == 1 for name in ENGINE):
        return {tuple(frame[name][0] for name in ENGINE): np.arange(frame.height)}
    parts = frame.select(*ENGINE, row=pl.int_range(pl.len())).group_by(ENGINE).agg("row")
    return {tuple(engine): np.asarray(rows) for *engine, rows in parts.iter_rows()}


def _true_boundaries(rows: pl.DataFrame, clock: pl.DataFrame) -> _Boundaries:
    """Return `_boundaries` that the requests were queued at."""
    tolerance = clock.select(pl.col("tolerance_us").max()).item() or 0.0
    return _boundaries(rows, clock, queued_us(rows) - tolerance)


def queued_us(rows: pl.DataFrame) -> Vector:
    """Return ARRIVED to QUEUED; the admission of spans without events is longer by the way back of the first token."""
    return rows.select((pl.col("queued_ns") - pl.col("ts_ns")) / 1e3).to_series().to_numpy()


def _queued_at_once(rows: pl.DataFrame, clock: pl.DataFrame, wait_us: Vector, done_us: Vector) -> Flags:
    """Return whether a request is QUEUED when its API work ends, with no step to wait for; shape (n,).

    The engine is idle then, or it is idle when the request arrives and no other one is ahead of it: a step that starts
    within `done_us` of that starts with this request, whose work took less than is predicted.
    """
    arrives = _boundaries(rows, clock, np.zeros(len(done_us))).is_idle & (wait_us <= 0)
    return np.asarray(arrives | _boundaries(rows, clock, done_us).is_idle)


def admission_with_clock(
    rows: pl.DataFrame, clocks: Clocks, wait_us: Vector, done_us: Vector, offset_us: float
) -> tuple[Vector, Flags]:
    """Predict admissions by the step clock: the boundary after the work, or its end itself when the engine is idle.

    Unknown step starts are spaced evenly between the known ones around them.

    Args:
        rows: Admission rows: engine columns and ts_ns.
        clocks: `clocks_of` the `timeline` table.
        wait_us: How long each row waits for the API process.
        done_us: From the arrival of each row to the end of its API work.
        offset_us: QUEUED less the step start it comes before.

    Returns:
        Predictions in us, clipped at 0, and for which rows the clock has a start; shape (n,) each.
    """
    start, interpolated = (_boundaries(rows, clock, done_us).start for clock in clocks)
    start = np.where(np.isnan(start), interpolated, start)
    idle = _queued_at_once(rows, clocks[0], wait_us, done_us)
    until = np.where(idle, np.nan, (start - rows["ts_ns"].to_numpy()) / 1e3)
    return admitted_us(until, done_us, offset_us), ~np.isnan(until) | idle


def mean_residual(timeline: pl.DataFrame, train: pl.DataFrame) -> tuple[float, float]:
    """Return the mean residual cycle and the busy share of time in the training part.

    The mean residual of a cycle c at a random moment of busy time is E[c^2] / (2 E[c]) (renewal theory: the moment
    falls into a cycle with a probability proportional to its length, and half of the cycle is left). A cycle that holds
    idle time counts as busy for the length of a median cycle.
    """
    ends = train.group_by(SERVER).agg(until_ns=pl.col("holdout_from_ns").first())
    cycles = timeline.filter(pl.col("cycle_us").is_not_null()).join(ends, on=SERVER)
    cycles = cycles.filter(pl.col("ts_start_ns") < pl.col("until_ns"))
    cycle, steps = cycles["cycle_us"].to_numpy(), cycles["interval_steps"].to_numpy().astype(float)
    idle = cycles["idle_after"].fill_null(value=False).to_numpy()
    if not (~idle).any():
        return 0.0, 0.0
    busy = cycle[~idle] * steps[~idle]
    busy_of_idle = np.minimum(cycle[idle], np.median(cycle[~idle])) * steps[idle]
    residual = float((busy * cycle[~idle]).sum() / (2 * busy.sum()))
    return residual, float((busy.sum() + busy_of_idle.sum()) / (cycle * steps).sum())


# -- the API process -------------------------------------------------------------------------------------

REQUESTS_AHEAD = 5.0
"""A request is part of a burst when the API process has work of five requests or more to do before it."""

QUICKEST_SHARE = 0.05
"""Quantile of the training admissions that estimates the API work: the shortest admissions include little wait for a
step."""

APART_S = 1.0
"""Requests of one burst come within a second of each other."""


def api_waits(rows: pl.DataFrame, work_us: Vector) -> Vector:
    """Return how long each request waits for the API process of its server, in us, shape (n,) (Lindley 1952).

    Work on request i starts at s_i = max(a_i, s_{i-1} + w_{i-1}) = W_i + max over j <= i of (a_j - W_j), where W_i is
    the sum of the work on all requests before i. `rows` are all admission rows of their servers (run_id, server, and
    ts_ns of ARRIVED), in any order; `work_us` is shape (n,).
    """
    # Microseconds since the first arrival: nanoseconds of the epoch lose their last digits in floating point.
    since = (pl.col("ts_ns") - pl.col("ts_ns").min().over(SERVER)) / 1e3
    before = pl.col("work").cum_sum().over(SERVER) - pl.col("work")
    ordered = rows.select(*SERVER, "ts_ns", work=pl.Series(work_us)).with_row_index("row")
    ordered = ordered.sort("ts_ns", maintain_order=True).with_columns(since=since, before=before)
    starts = pl.col("before") + (pl.col("since") - pl.col("before")).cum_max().over(SERVER)
    return ordered.with_columns(wait=starts - pl.col("since")).sort("row")["wait"].to_numpy()


def mark_bursts(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `in_burst` to admission rows: run_id, server, ts_ns (ARRIVED), y (us), split."""
    work = rows.filter((pl.col("split") == "train") & (pl.col("y") > 0))["y"].quantile(QUICKEST_SHARE)
    if work is None:
        return rows.with_columns(in_burst=pl.lit(value=False))
    ahead = api_waits(rows, np.full(rows.height, work)) / work
    return rows.with_columns(in_burst=pl.Series(ahead >= REQUESTS_AHEAD))


def find_bursts(rows: pl.DataFrame) -> tuple[Burst, ...]:
    """Return the bursts of every server: runs of marked requests with no more than `APART_S` between two of them."""
    if not rows.height:
        return ()
    seconds = (pl.col("ts_ns") - pl.col("ts_ns").min().over(SERVER)) / 1e9
    marked = rows.with_columns(at_s=seconds).filter("in_burst").sort(*SERVER, "at_s")
    begins = (pl.col("at_s").diff().over(SERVER) > APART_S).fill_null(value=False)
    bursts = (
        marked.with_columns(burst=begins.cast(pl.Int64).cum_sum().over(SERVER))
        .group_by(*SERVER, "burst", maintain_order=True)
        .agg(
            from_s=pl.col("at_s").min(),
            to_s=pl.col("at_s").max(),
            requests=pl.len(),
            holdout_requests=(pl.col("split") == "holdout").sum(),
        )
    )
    return tuple(Burst(**row) for row in bursts.drop("burst").iter_rows(named=True))


# -- the model -------------------------------------------------------------------------------------------

MIN_IDLE_ROWS = 20
"""Fewest training requests that arrived at an idle engine for a fit of the API work on them."""

GRID_US = 50.0
MOST_WORK_US = 20_000.0
"""Amounts of API work that are tried: from 0 up to this, in steps of `GRID_US`."""

PLATEAU = 0.002
"""Amounts of work whose share of right boundaries is this close to the best one's count as equally good."""


def predict_admission(fitted: FittedBoundary, rows: pl.DataFrame, timeline: pl.DataFrame) -> Vector:
    """Predict admissions by the step clock, and by the linear model where the clock has gaps; in us, shape (n,).

    `rows` are all admission rows of their servers: the wait for the API process depends on the requests before.
    """
    return _predict(fitted, _with_done(fitted, rows), clocks_of(timeline))


def fit_boundary(linear: LinearFit, timeline: pl.DataFrame) -> FittedBoundary | None:
    """Fit the API work on the training rows of a linear admission fit.

    The constant is the amount of work that finds the right boundary for most training requests: the middle of the
    plateau where several amounts do. The work per prompt token comes from requests that arrived at an idle engine.

    Returns:
        The model; null where the boundary of fewer than `MIN_TRAIN_ROWS` training requests is known.
    """
    clocks = clocks_of(timeline)
    clock = clocks[0]
    marked = mark_bursts(linear.rows)
    train = counted_rows(marked, "train")
    if np.isfinite(_true_boundaries(train, clock).start).sum() < MIN_TRAIN_ROWS:
        return None
    # In a burst the wait for the API process dominates: its requests say little of the work on one of them.
    outside_bursts = train.filter(~pl.col("in_burst"))
    used = outside_bursts if outside_bursts.height >= MIN_TRAIN_ROWS else train
    per_token, idle_work = _work_of_idle(used, clock)
    work, offset = _constants(used, clock, per_token, idle_work)
    # `_validated` measures it, for which it needs a model that predicts.
    residual, busy_share = mean_residual(timeline, train)
    validation = replace(linear.validation, bursts=find_bursts(marked))
    fitted = FittedBoundary(work, per_token, offset, residual, busy_share, linear, validation)
    rows = _with_done(fitted, marked)
    return _validated(fitted, counted_rows(rows, "train"), counted_rows(rows, "holdout"), clocks)


def _constants(
    train: pl.DataFrame, clock: pl.DataFrame, per_token: float, idle_work: float | None
) -> tuple[float, float]:
    """Return the constant of the API work and the offset of the QUEUED stamp from the step start, both in us."""
    known = _true_boundaries(train, clock)
    has_start = np.isfinite(known.start)
    rows, start, before = train.filter(has_start), known.start[has_start], known.start_before[has_start]
    arrived = rows["ts_ns"].to_numpy().astype(float)
    offset = median(arrived + target_of(rows) * 1e3 - start) if len(start) else 0.0
    # Requests that arrive at an idle engine measure the work directly, which few known boundaries cannot improve on.
    if idle_work is not None and rows.height < MIN_TRAIN_ROWS:
        return idle_work, offset / 1e3
    grid = np.arange(0.0, MOST_WORK_US, GRID_US)
    # A constant predicts a request's boundary when the work ends after the step start before it and no later than the
    # boundary itself. With both ends sorted, two searches count the requests for all constants at once.
    of_prompt = per_token * rows["prompt_tokens"].fill_null(0).to_numpy()
    after, until = (np.sort((ends - arrived) / 1e3 - of_prompt) for ends in (before, start))
    shares = (np.searchsorted(after, grid) - np.searchsorted(until, grid)) / rows.height
    plateau = grid[shares >= shares.max() - PLATEAU]
    # Every amount on the plateau explains the boundaries equally well; the direct measurement picks one of them.
    if idle_work is not None and plateau.min() <= idle_work <= plateau.max():
        return idle_work, offset / 1e3
    return float(np.median(plateau)), offset / 1e3


def _work_of_idle(train: pl.DataFrame, clock: pl.DataFrame) -> tuple[float, float | None]:
    """Return the API work per prompt token, and its constant, of the requests that arrived at an idle engine.

    Their admission is nothing but API work. The constant is null where such requests are too few.
    """
    # Idle both on arrival and when QUEUED: a step in between would have put a wait into the admission.
    on_arrival = _boundaries(train, clock, np.zeros(train.height)).is_idle
    idle = train.filter(on_arrival & _boundaries(train, clock, queued_us(train)).is_idle)
    if idle.height < MIN_IDLE_ROWS:
        return 0.0, None
    y, tokens = queued_us(idle), idle["prompt_tokens"].fill_null(0).to_numpy().astype(float)
    line = RobustLinear().fit(tokens[:, None], y)
    error = y - line.predict(tokens[:, None])
    # Two standard errors of a slope: 2 sd(residual) / (sd(tokens) sqrt(n)). A smaller slope is taken for zero.
    spread = tokens.std() * np.sqrt(len(y))
    two_errors = 2 * float(error.std()) / spread if spread > 0 else np.inf
    slope = float(line.coef_[0])
    return (slope, line.intercept_) if slope > two_errors else (0.0, float(np.median(y)))


def _with_done(fitted: FittedBoundary, rows: pl.DataFrame) -> pl.DataFrame:
    """Add wait_us, the wait for the API process, and done_us, the time from ARRIVED to the end of the API work after
    it.
    """
    work = _work_us(fitted, rows["prompt_tokens"])
    wait = api_waits(rows, work)
    return rows.with_columns(wait_us=pl.Series(wait), done_us=pl.Series(wait + work))


def _work_us(fitted: FittedBoundary, prompt_tokens: pl.Series) -> Vector:
    tokens = prompt_tokens.fill_null(0).to_numpy().astype(float)
    return np.asarray(fitted.work_us + fitted.work_us_per_prompt_token * tokens)


def _predict(fitted: FittedBoundary, rows: pl.DataFrame, clocks: Clocks) -> Vector:
    wait, done = rows["wait_us"].to_numpy(), rows["done_us"].to_numpy()
    by_clock, has_start = admission_with_clock(rows, clocks, wait, done, fitted.offset_us)
    return np.where(has_start, by_clock, predict_regimes(fitted.without_clock.regimes, rows))


def _validated(fitted: FittedBoundary, train: pl.DataFrame, holdout: pl.DataFrame, clocks: Clocks) -> FittedBoundary:
    y, y_train, clock = target_of(holdout), target_of(train), clocks[0]
    truth = _true_boundaries(holdout, clock).start
    has_boundary = ~np.isnan(truth)
    accuracy, accuracy_without_work = (
        100 * float(np.mean((_boundaries(holdout, clock, work).start == truth)[has_boundary]))
        if has_boundary.any()
        else None
        for work in (holdout["done_us"].to_numpy(), np.zeros(len(y)))
    )
    predicted, predicted_train = (_predict(fitted, rows, clocks) for rows in (holdout, train))
    # In-sample errors serve here: three fitted numbers do not follow the noise of the training rows.
    interval = prediction_interval(predicted_train, y_train)
    low, high = interval.limits(predicted)
    linear = fitted.without_clock.validation
    measured = measure(y, predicted)
    expected = np.maximum(_work_us(fitted, holdout["prompt_tokens"]) + fitted.expected_wait_us, 0.0)
    by_group = {"without_clock": linear.holdout, "expectation": measure(y, expected)}
    idle = _queued_at_once(holdout, clock, holdout["wait_us"].to_numpy(), holdout["done_us"].to_numpy())
    if idle.any():
        by_group["idle_engine"] = measure(y[idle], predicted[idle])
    burst = holdout["in_burst"].to_numpy()
    if burst.any():
        by_group["burst"] = measure(y[burst], predicted[burst])
        by_group["no_burst"] = measure(y[~burst], predicted[~burst])
    # The reference gets the same inputs: the prompt, and the time left of the step in progress.
    names = [n for n in ("prompt_tokens", "step_residual_us") if train[n].is_not_null().any()]
    validation = replace(
        fitted.validation,
        n_features=linear.n_features + (fitted.work_us_per_prompt_token != 0),
        train=measure(y_train, predicted_train),
        holdout=measured,
        gradient_boosting=reference(train, holdout, names) if linear.gradient_boosting else None,
        by_group=by_group,
        within_5_pct=within_5_pct(y, predicted),
        skill=skill(measured, linear.baseline),
        prediction_intervals=(interval,),
        interval_coverage_pct=coverage_pct(low, y, high),
        boundary_accuracy_pct=accuracy,
        boundary_accuracy_without_work_pct=accuracy_without_work,
        learning_curve=(),
    )
    return msgspec.structs.replace(fitted, validation=validation)
