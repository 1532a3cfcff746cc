"""Admission by the step clock: API work, then the first step boundary.

A request is QUEUED when the engine core drains its socket, between steps: at the first step start at or after the end of
its API work; at that end itself when the engine is idle. The API process works on one request after the other, in the order
they arrive. The API work is what is fitted, on requests with few in front of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.arrays import Vector
from tracefit.fit.estimators import RobustLinear
from tracefit.fit.fitted import FittedBoundary
from tracefit.fit.linear import predict_regimes
from tracefit.fit.metrics import coverage_pct, measure, prediction_interval, skill
from tracefit.fit.results import Burst, Metrics, PredictionInterval
from tracefit.fit.splits import MIN_TRAIN_ROWS, counted
from tracefit.fit.step_clock import (
    StepClock,
    boundary_of,
    interpolated_clock,
    meets_idle,
    step_clock,
    true_boundary,
)
from tracefit.fit.validate import WITHIN_PCT, reference
from tracefit.tables.keys import SERVER

if TYPE_CHECKING:
    from tracefit.fit.arrays import Flags, Integers, Vector
    from tracefit.fit.fitted import LinearFit

REQUESTS_AHEAD = 5.0
"""A request is part of a burst when the API process has work of five requests or more to do before its own."""

QUICKEST_SHARE = 0.05
"""The 5th percentile of admissions in the training part stands for the API work: little of it is a wait for a step."""

APART_S = 1.0
"""Requests of one burst come within a second of each other."""


def requests_ahead(arrivals_us: Vector, work_us: float) -> Vector:
    """Return the work ahead of each request in a process that works on one after the other, in requests.

    Args:
        arrivals_us: Sorted, shape (n,).
        work_us: Work per request.
    """
    return _waits(arrivals_us, np.full(len(arrivals_us), work_us)) / work_us


def api_waits(rows: pl.DataFrame, work_us: Vector) -> Vector:
    """Return how long each request waits for the API process of its server, in us, shape (n,).

    Args:
        rows: All admission rows of their servers: columns run_id, server, ts_ns (ARRIVED), in any order.
        work_us: API work of each, shape (n,).
    """
    numbered = rows.select(*SERVER, "ts_ns").with_row_index("row")
    waits = np.zeros(rows.height)
    for _, part in numbered.sort("ts_ns", maintain_order=True).group_by(SERVER):
        mine = part["row"].to_numpy()
        since = ((part["ts_ns"] - part["ts_ns"].min()) / 1e3).to_numpy()
        waits[mine] = _waits(since, work_us[mine])
    return waits


def _waits(arrivals_us: Vector, work_us: Vector) -> Vector:
    """Return the waits for a process that works on one after the other (Lindley 1952), arrivals sorted.

    Work on request i starts at s_i = max(a_i, s_{i-1} + w_{i-1}) = W_i + max over j <= i of (a_j - W_j), with W_i the work
    on all before i.
    """
    before = np.cumsum(work_us) - work_us
    return np.asarray(before + np.maximum.accumulate(arrivals_us - before) - arrivals_us)


def mark_bursts(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `in_burst` to the admission rows of requests.

    Args:
        rows: Columns run_id, server, ts_ns (ARRIVED), y (us), split.
    """
    work = rows.filter((pl.col("split") == "train") & (pl.col("y") > 0))["y"].quantile(QUICKEST_SHARE)
    if work is None:
        return rows.with_columns(in_burst=pl.lit(value=False))
    parts = []
    for _, part in rows.with_row_index("_row").group_by(SERVER, maintain_order=True):
        ordered = part.sort("ts_ns")
        since = ((ordered["ts_ns"] - ordered["ts_ns"].min()) / 1e3).to_numpy()
        ahead = requests_ahead(since, work)
        parts.append(ordered.with_columns(in_burst=pl.Series(ahead >= REQUESTS_AHEAD)))
    return pl.concat(parts).sort("_row").drop("_row")


def find_bursts(rows: pl.DataFrame) -> tuple[Burst, ...]:
    """Name the bursts of every server, from rows that `mark_bursts` marked."""
    if not rows.height:
        return ()
    seconds = (pl.col("ts_ns") - pl.col("ts_ns").min().over(SERVER)) / 1e9
    marked = rows.with_columns(at_s=seconds).filter("in_burst").sort(*SERVER, "at_s")
    apart = (pl.col("at_s").diff().over(SERVER) > APART_S).fill_null(value=False)
    bursts = (
        marked.with_columns(burst=apart.cast(pl.Int64).cum_sum().over(SERVER))
        .group_by(*SERVER, "burst", maintain_order=True)
        .agg(
            from_s=pl.col("at_s").min(),
            to_s=pl.col("at_s").max(),
            requests=pl.len(),
            holdout_requests=(pl.col("split") == "holdout").sum(),
        )
    )
    return tuple(Burst(**row) for row in bursts.drop("burst").to_dicts())


MIN_IDLE_ROWS = 20
GRID_US = 50.0
MOST_WORK_US = 20_000.0
PLATEAU = 0.002
"""Amounts of work whose share of right boundaries is this close to the best are as good as it."""


def expected_admission(fitted: FittedBoundary, prompt_tokens: pl.Series) -> Vector:
    """Return the expected admission of requests of which nothing else is known, in us, clipped at 0; shape (n,)."""
    return np.asarray(np.maximum(_work_us(fitted, prompt_tokens) + fitted.expected_wait_us, 0.0))


def predict_admission(fitted: FittedBoundary, rows: pl.DataFrame, timeline: pl.DataFrame) -> Vector:
    """Predict the admission rows of requests by the step clock, without it where the clock has gaps; us, shape (n,).

    Args:
        fitted: The model.
        rows: All rows of their servers: how long a request waits for the API process depends on those before it.
        timeline: The `timeline` table.
    """
    clocks = step_clock(timeline), interpolated_clock(timeline)
    return _predict(fitted, _with_done(fitted, rows), *clocks)


def fit_boundary(linear: LinearFit, timeline: pl.DataFrame) -> FittedBoundary | None:
    """Fit the API work on the training rows of a linear admission fit; null where the clock knows too little.

    The constant is the amount of work that finds the right boundary for most training requests (the middle of the
    plateau, where several do); per prompt token it is told by requests that met an idle engine.

    Args:
        linear: The fit for consumers without a clock; its rows are used.
        timeline: The `timeline` table.
    """
    clock = step_clock(timeline)
    marked = mark_bursts(linear.rows)
    train = counted(marked, "train")
    if int((true_boundary(train, clock) >= 0).sum()) < MIN_TRAIN_ROWS:
        return None
    alone = train.filter(~pl.col("in_burst"))
    told = alone if alone.height >= MIN_TRAIN_ROWS else train
    per_token, idle_work = _work_of_idle(told, clock)
    work, offset = _constants(told, clock, per_token, idle_work)
    band = PredictionInterval("difference", 0.0, 0.0)
    residual, busy_share = mean_residual(timeline, train)
    fitted = FittedBoundary(
        work,
        per_token,
        offset,
        residual,
        busy_share,
        None,
        None,
        0,
        linear,
        linear.validation,
        band,
        find_bursts(marked),
    )
    rows = _with_done(fitted, marked)
    clocks = clock, interpolated_clock(timeline)
    return _validated(fitted, counted(rows, "train"), counted(rows, "holdout"), *clocks)


def _constants(
    train: pl.DataFrame, clock: StepClock, per_token: float, idle_work: float | None
) -> tuple[float, float]:
    """Return the constant of the API work and the offset; of few requests that met a boundary idle ones tell better."""
    slope = per_token * train["prompt_tokens"].fill_null(0).to_numpy()
    truth = true_boundary(train, clock)
    known = truth >= 0
    offset = _offset(train, clock, truth, known) if known.any() else 0.0
    if idle_work is not None and int(known.sum()) < MIN_TRAIN_ROWS:
        return idle_work, offset
    grid = np.arange(0.0, MOST_WORK_US, GRID_US)
    shares = _right_shares(train, clock, truth, slope, grid)
    plateau = grid[shares >= shares.max() - PLATEAU]
    if idle_work is not None and plateau.min() <= idle_work <= plateau.max():
        return idle_work, offset
    return float(np.median(plateau)), offset


def _right_shares(
    train: pl.DataFrame, clock: StepClock, truth: Integers, slope: Vector, grid: Vector
) -> Vector:
    """Return the share of requests of known boundary that each constant of the API work finds it for; shape of `grid`.

    A request gets its boundary from every amount of work that ends after the step start before it and no later than the
    boundary itself: with both ends sorted, two searches count the requests for all amounts at once.
    """
    known = truth >= 0
    arrived = train["ts_ns"].to_numpy()[known].astype(float)
    after, until = (
        np.sort((clock.starts[boundary] - arrived) / 1e3 - slope[known])
        for boundary in (truth[known] - 1, truth[known])
    )
    return np.asarray((np.searchsorted(after, grid) - np.searchsorted(until, grid)) / known.sum())


def admission_with_clock(
    rows: pl.DataFrame, timeline: pl.DataFrame, done_us: Vector, offset_us: float
) -> tuple[Vector, Flags]:
    """Predict admissions by the step clock: the boundary after the work, or its end itself when the engine was idle.

    A boundary whose step the clock does not know is taken to lie evenly between the known ones around it.

    Args:
        rows: Admission rows: engine columns and ts_ns.
        timeline: The `timeline` table.
        done_us: From the arrival of each row to the end of its API work.
        offset_us: QUEUED less the step start it comes before.

    Returns:
        Predictions in us, clipped at 0, and for which rows the clock knows enough; shape (n,) each.
    """
    clock, between = step_clock(timeline), interpolated_clock(timeline)
    until, known = _until_boundary(rows, clock, between, done_us)
    idle = meets_idle(rows, clock, done_us)
    predicted = np.where(known, until + offset_us, done_us)
    return np.asarray(np.maximum(predicted, 0.0)), np.asarray(known | idle)


def _until_boundary(
    rows: pl.DataFrame, clock: StepClock, between: StepClock, done_us: Vector
) -> tuple[Vector, Flags]:
    """Return the time to the boundary each request waits for, and for which of them a clock tells it; shape (n,) each."""
    arrived, idle = rows["ts_ns"].to_numpy(), meets_idle(rows, clock, done_us)
    exact, near = (boundary_of(rows, one, done_us) for one in (clock, between))
    until = np.where(exact >= 0, clock.starts[exact] - arrived, between.starts[near] - arrived) / 1e3
    return until, np.asarray((exact >= 0) | ((near >= 0) & ~idle))


def _work_of_idle(train: pl.DataFrame, clock: StepClock) -> tuple[float, float | None]:
    """Return API work per prompt token and its constant, told by requests that met an idle engine."""
    y, tokens = train["y"].to_numpy(), train["prompt_tokens"].fill_null(0).to_numpy().astype(float)
    idle = meets_idle(train, clock, np.zeros(len(y))) & meets_idle(train, clock, y)
    if int(idle.sum()) < MIN_IDLE_ROWS:
        return 0.0, None
    line = RobustLinear().fit(tokens[idle, None], y[idle])
    flat = float(np.median(y[idle]))
    error = y[idle] - line.predict(tokens[idle, None])
    spread = tokens[idle].std() * np.sqrt(idle.sum())
    slope, sure = float(line.coef_[0]), 2 * float(error.std()) / spread if spread > 0 else np.inf
    return (slope, line.intercept_) if slope > sure else (0.0, flat)


def _offset(train: pl.DataFrame, clock: StepClock, truth: Integers, known: Flags) -> float:
    queued = train["ts_ns"].to_numpy()[known] + train["y"].to_numpy()[known] * 1e3
    return float(np.median(queued - clock.starts[truth[known]])) / 1e3


def mean_residual(timeline: pl.DataFrame, train: pl.DataFrame) -> tuple[float, float]:
    """Return E[c^2] / (2 E[c]) over the cycles of the training part, and the share of its time that is busy.

    A moment of busy time falls into a cycle with a chance in proportion to its length, and half of it is left. Of a
    cycle that holds idle time a median cycle was busy.
    """
    ends = train.group_by(SERVER).agg(until_ns=pl.col("holdout_from_ns").first())
    told = timeline.filter(pl.col("cycle_us").is_not_null()).join(ends, on=SERVER)
    told = told.filter(pl.col("ts_start_ns") < pl.col("until_ns"))
    cycle, steps = told["cycle_us"].to_numpy(), told["interval_steps"].to_numpy().astype(float)
    idle = told["idle_after"].fill_null(value=False).to_numpy()
    if not (~idle).any():
        return 0.0, 0.0
    busy = cycle[~idle] * steps[~idle]
    held = np.minimum(cycle[idle], np.median(cycle[~idle])) * steps[idle]
    residual = float((busy * cycle[~idle]).sum() / (2 * busy.sum()))
    return residual, float((busy.sum() + held.sum()) / (cycle * steps).sum())


def _with_done(fitted: FittedBoundary, rows: pl.DataFrame) -> pl.DataFrame:
    """Add done_us, from ARRIVED to the end of the API work, the wait for the API process included."""
    work = _work_us(fitted, rows["prompt_tokens"])
    return rows.with_columns(done_us=pl.Series(api_waits(rows, work) + work))


def _work_us(fitted: FittedBoundary, prompt_tokens: pl.Series) -> Vector:
    tokens = prompt_tokens.fill_null(0).to_numpy().astype(float)
    return np.asarray(fitted.work_us + fitted.work_us_per_prompt_token * tokens)


def _predict(fitted: FittedBoundary, rows: pl.DataFrame, clock: StepClock, between: StepClock) -> Vector:
    done = rows["done_us"].to_numpy()
    until, known = _until_boundary(rows, clock, between, done)
    predicted = np.where(
        meets_idle(rows, clock, done), done, predict_regimes(fitted.without_clock.regimes, rows)
    )
    return np.asarray(np.maximum(np.where(known, until + fitted.offset_us, predicted), 0.0))


def _validated(
    fitted: FittedBoundary,
    train: pl.DataFrame,
    held: pl.DataFrame,
    clock: StepClock,
    between: StepClock,
) -> FittedBoundary:
    y = held["y"].to_numpy().astype(float)
    truth = true_boundary(held, clock)
    known = truth >= 0
    right, without = (
        100 * float(np.mean(boundary_of(held, clock, w)[known] == truth[known])) if known.any() else None
        for w in (held["done_us"].to_numpy(), np.zeros(len(y)))
    )
    told = _predict(fitted, held, clock, between)
    told_train, y_train = _predict(fitted, train, clock, between), train["y"].to_numpy().astype(float)
    band = prediction_interval(told_train, y_train)
    low, high = band.limits(told)
    linear = fitted.without_clock
    measured = measure(y, told)
    by: dict[str, Metrics] = {
        "without_clock": linear.validation.holdout,
        "expectation": measure(y, expected_admission(fitted, held["prompt_tokens"])),
    }
    idle = meets_idle(held, clock, held["done_us"].to_numpy())
    if idle.any():
        by["idle_engine"] = measure(y[idle], told[idle])
    burst = held["in_burst"].to_numpy()
    if burst.any():
        by |= {"burst": measure(y[burst], told[burst]), "no_burst": measure(y[~burst], told[~burst])}
    # The same knowledge for the reference: the prompt, and what is left of the step in progress.
    names = [n for n in ("prompt_tokens", "step_residual_us") if train[n].is_not_null().any()]
    validation = replace(
        linear.validation,
        train=measure(y_train, told_train),
        holdout=measured,
        reference=reference(train, held, names) if linear.validation.reference else None,
        by_group=by,
        within_5_pct=100 * float((np.abs(told - y) <= WITHIN_PCT / 100 * np.abs(y)).mean()),
        skill=skill(measured, linear.validation.baseline),
        interval_coverage_pct=coverage_pct(low, y, high),
        learning_curve=(),
    )
    return replace(
        fitted,
        boundary_accuracy_pct=right,
        boundary_accuracy_without_work_pct=without,
        rows_with_clock=int(known.sum()),
        validation=validation,
        prediction_interval=band,
    )
