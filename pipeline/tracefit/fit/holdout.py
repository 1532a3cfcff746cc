"""Step times of the hold-out: their sum, whether the machine drifted, and the model refitted on them.

The sum is what a simulation of the whole run would be off by. An error that a refit on the held-out rows does not
remove is not one of the coefficients: the batch does not determine it. What the refit removes is what changed since the
training part, the level of the machine above all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.design import design_of
from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import active_regime, linear_terms, matrix, predict_regimes, target_of
from tracefit.fit.results import SummedTime
from tracefit.fit.select import time_blocks
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted
from tracefit.tables.keys import SERVER

if TYPE_CHECKING:
    from tracefit.fit.arrays import Integers, Vector
    from tracefit.fit.fitted import LinearFit
    from tracefit.fit.linear import FittedRegime

FEWEST_BLOCKS = 10
"""Fewer tell no variance: where the hold-out is too short for them, its blocks are shorter than the rule says."""

MOST_BLOCKS = 1_000
"""More tell the variance no better, and drawing them takes memory: blocks of a long hold-out are longer than the rule says."""

RESAMPLES = 2_000

_TENTHS = 10


def summed_time(predicted_us: Vector, actual_us: Vector, blocks: Integers) -> SummedTime | None:
    """Sum step times and bootstrap the bias of the sum by blocks of time; null of no time.

    Steps that follow each other share the machine's mood, so that whole blocks are drawn, with replacement, 2,000
    times with a fixed seed (Kuensch 1989, without overlap). A drift slower than a block is not in their spread.

    Args:
        predicted_us: Shape (n,).
        actual_us: Shape (n,).
        blocks: Shape (n,), the block of each row.
    """
    if not float(actual_us.sum()) > 0:
        return None
    _, index = np.unique(blocks, return_inverse=True)
    sums = np.stack([np.bincount(index, weights=w) for w in (predicted_us, actual_us)])
    count = sums.shape[1]
    drawn = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    predicted, actual = sums[0][drawn].sum(axis=1), sums[1][drawn].sum(axis=1)
    spread = float(np.std(100 * predicted[actual > 0] / actual[actual > 0], ddof=1))
    total, off = float(actual_us.sum()), predicted_us - actual_us
    furthest = 100 * float(off[np.abs(off).argmax()]) / total
    return SummedTime(float(predicted_us.sum()), total, 2 * spread, count, furthest)


def block_length(series: Vector) -> int:
    """Return how many neighbours in time make a block, by the rule of Politis and White (2004; Patton et al. 2009).

    b = (2 G^2 / D)^(1/3) n^(1/3) with G = sum lambda(k/M) |k| R(k), D = 4/3 (sum lambda(k/M) R(k))^2 over lags |k| <= M,
    lambda the flat-top window (1 to one half, then linear to 0). M is twice the lag after which the next lags'
    autocorrelations are all within 2 sqrt(log10(n) / n), no more than sqrt(n) and those lags. At most 3 sqrt(n) and n / 3.

    Args:
        series: In order of time, shape (n,).
    """
    n = len(series)
    if n < FEWEST_BLOCKS or np.ptp(series) == 0:
        return 1
    quiet = max(5, int(np.sqrt(np.log10(n))))
    most = min(int(np.ceil(np.sqrt(n))) + quiet, n - 1)
    about = series - series.mean()
    covariance = np.array([about[: n - k] @ about[k:] for k in range(most + 1)]) / n
    within = np.abs(covariance[1:] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    ends = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(within, min(quiet, most)).all(axis=1))
    last = min(2 * max(int(ends[0]), 1), most) if len(ends) else most
    lag = np.arange(1, last + 1)
    window = np.minimum(1.0, 2 * (1 - lag / last)) * covariance[1 : last + 1]
    slope, level = 2 * float(lag @ window), float(covariance[0] + 2 * window.sum())
    if level == 0:
        return 1
    length = float(np.cbrt(2 * slope**2 / (4 / 3 * level**2) * n))
    return max(1, int(np.ceil(min(length, 3 * np.sqrt(n), n / 3))))


def summed_holdout(beta: LinearFit) -> SummedTime | None:
    """Sum the step times of beta's held-out rows, an interval as all of its steps.

    Blocks are contiguous in the time of a server, as long as `block_length` says of the residuals of the training rows: the
    longest of its servers; no fewer than 10 blocks of each server, and no more than 1,000 of all.
    """
    held = counted(beta.rows, "holdout")
    if not held.height:
        return None
    length = _training_block_length(beta)
    server = held.select(s=pl.struct(SERVER).rank("dense").cast(pl.Int64) - 1)["s"].to_numpy()
    servers = int(server.max()) + 1
    count = max(min(round(held.height / servers / length), MOST_BLOCKS // servers), FEWEST_BLOCKS)
    blocks = time_blocks(server, held["ts_ns"].to_numpy(), count) + server * count
    predicted, actual = _summands(beta, held)
    summed = summed_time(predicted, actual, blocks)
    return None if summed is None else replace(summed, speed_change_pct=speed_change_pct(beta))


def speed_change_pct(beta: LinearFit) -> float | None:
    """Return how much longer steps of equal batches take in the hold-out than in the training part, in percent.

    Batches are equal as far as the model tells them: rows in tenths of its predictions. Within each tenth the medians of
    measured by predicted time are compared, so that what the model has wrong of such a batch is not taken for a change;
    tenths count by the rows that both parts have in them. Null where no tenth has 10 rows of either.
    """
    used, held = counted(beta.rows, "train"), counted(beta.rows, "holdout")
    predicted = [predict_regimes(beta.regimes, rows) for rows in (used, held)]
    if not all(p.size and (p > 0).all() for p in predicted):
        return None
    before, after = (target_of(rows) / p for rows, p in zip((used, held), predicted, strict=True))
    cuts = np.quantile(np.concatenate(predicted), np.arange(1, _TENTHS) / _TENTHS)
    place = [np.searchsorted(cuts, p) for p in predicted]
    ratios, rows = [], []
    for tenth in range(_TENTHS):
        ours = before[place[0] == tenth], after[place[1] == tenth]
        fewest = min(len(one) for one in ours)
        if fewest >= MIN_HOLDOUT_ROWS:
            ratios.append(float(np.median(ours[1]) / np.median(ours[0])))
            rows.append(fewest)
    return 100 * (float(np.average(ratios, weights=rows)) - 1) if rows else None


def _training_block_length(beta: LinearFit) -> int:
    lengths = [1]
    for _, rows in counted(beta.rows, "train").sort("ts_ns").group_by(SERVER):
        predicted, actual = _summands(beta, rows)
        lengths.append(block_length(predicted - actual))
    return max(lengths)


def _summands(beta: LinearFit, rows: pl.DataFrame) -> tuple[Vector, Vector]:
    """Return predicted and measured time of each row's steps."""
    steps = rows["interval_steps"].to_numpy().astype(float)
    return predict_regimes(beta.regimes, rows) * steps, rows["y"].to_numpy() * steps


def refit_on_holdout(fitted: LinearFit) -> tuple[FittedRegime, ...]:
    """Fit the parts of a model anew on its held-out rows, with the estimator, the penalty and the signs it was trained with.

    A term that the held-out rows cannot tell (constant, or a mix of others) keeps its value; so does a part that fewer of
    them than a fit needs speak for.

    Args:
        fitted: The model.
    """
    held = counted(fitted.rows, "holdout")
    active = active_regime(fitted.regimes, held)
    return tuple(
        _refitted(part, held.filter(pl.Series(active == index))) for index, part in enumerate(fitted.regimes)
    )


def _refitted(part: FittedRegime, held: pl.DataFrame) -> FittedRegime:
    if held.height < MIN_TRAIN_ROWS:
        return part
    data, _ = design_of(held, [t.feature for t in part.terms])
    untold = [t for t in part.terms if t.feature not in data.columns]
    kept_us = matrix(held, [t.feature.name for t in untold]) @ np.array([t.value for t in untold])
    model = RobustLinear(part.choice.penalty, part.choice.strength, positive=part.signs.of(data.columns))
    model.fit(data.x, data.y - kept_us, data.weights)
    terms = (*linear_terms(data.columns, model.coef_, data.x), *untold)
    return replace(part, intercept=model.intercept_, terms=terms)
