"""How fast a machine is over a recording: steps of equal batches take longer at one time than at another.

Processors change their clock, neighbours take memory bandwidth, a load generator shares the machine. A recording whose
load changes slowly then mixes the two: if the machine is slow while the load is high, a plain fit gives a larger batch
too much time. So the time of a step is taken to be that of its batch times the speed of its stretch of time. Models are
fitted to times without the speed, and what the speed did is published: a later load meets the machine at some other
speed, and plans widen their intervals by it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.estimators import FEW_ROUNDS, RobustLinear
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.select import usable_features
from tracefit.fit.splits import MIN_TRAIN_ROWS
from tracefit.models.validation import SpeedVariation
from tracefit.statistics import SD_OF_MEDIAN, robust_sd
from tracefit.tables.schema import SERVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.features.sets import Feature
    from tracefit.statistics import Integers, Vector

SPEED = "speed"
"""Column of a training frame: how much longer a row's step took than at the mean speed of the training part, as a
factor."""

STRETCH_S = 30.0
"""Length of a stretch of time with one speed. The speed of a shared machine wanders within a minute; a stretch of a
busy server has hundreds of steps."""

LEAST_ROWS = 10
"""Rows of a stretch that has a speed of its own; that of others is 1."""

LEAST_STRETCHES = 4
LEAST_SD_PCT = 2.0
"""Speeds count as changes of the machine if there are as many stretches and this is their standard deviation. A form of
the model that does not suit the server looks like 1 to 2 % over a changing load."""

_SPEED_GROUPS = 12
_SPEED_ROUNDS = 25
_SETTLED_SPEED = 1e-4


def with_speed(rows: pl.DataFrame, features: Sequence[Feature]) -> tuple[pl.DataFrame, SpeedVariation | None]:
    """Add the column `speed`, and return how the speed varied; null where it cannot be known.

    Logarithms of measured over roughly predicted times are the sum of an effect of the batch and one of the stretch,
    which medians separate (median polish, Tukey 1977, chapter 11). The effect of the batch, one for rows of about equal
    predictions, takes up what the rough prediction gets wrong. So a load that only one stretch has looks like a batch,
    not like a speed. Effects of stretches are drawn to zero by their error (James and Stein 1961), and all of them are
    0 where they vary by less than 2 %.

    Args:
        rows: A frame that is split, with `features`, `has_prefill`, `interval_steps`, `ts_ns` and `y`.
        features: Features of a rough prediction.
    """
    plain = rows.with_columns(pl.lit(1.0).alias(SPEED))
    is_used = pl.col("excluded_reason").is_null() & (pl.col("y") > 0)
    used = rows.with_row_index("row").filter(is_used)
    known = [f.name for f in features if f.name in used.columns and not used[f.name].null_count()]
    is_train = (used["split"] == "train").to_numpy()
    if is_train.sum() < MIN_TRAIN_ROWS or not known:
        return plain, None
    x, y = matrix(used, known), target_of(used)
    kept, _ = usable_features(x[is_train], known)
    model = RobustLinear(max_iter=FEW_ROUNDS, positive=True).fit(x[is_train][:, kept], y[is_train])
    rough = np.maximum(model.predict(x[:, kept]), 1e-3 * float(np.median(y)))
    stretch, batch = _stretches(used), _batches(used, rough)
    effects, noise = _polished(np.log(y / rough), batch, stretch)
    counts = np.bincount(stretch, minlength=len(effects))
    trained = np.bincount(stretch[is_train], minlength=len(effects))
    has_own = counts >= LEAST_ROWS
    # Without training rows there is no mean that the speeds are relative to.
    if has_own.sum() < LEAST_STRETCHES or not trained[has_own].any():
        return plain, None
    errors = SD_OF_MEDIAN * noise / np.sqrt(np.maximum(counts, 1))
    effects = np.where(has_own, effects - np.average(effects, weights=trained * has_own), 0.0)
    variance = float(np.mean(effects[has_own] ** 2) - np.mean(errors[has_own] ** 2))
    sd_pct = 100 * math.sqrt(max(variance, 0.0))
    varies = sd_pct >= LEAST_SD_PCT
    drawn = effects * variance / (variance + errors**2) if varies else np.zeros(len(effects))
    later = has_own & (trained < counts / 2)
    ends = np.expm1(effects[has_own])
    variation = SpeedVariation(
        stretch_s=STRETCH_S,
        stretches=int(has_own.sum()),
        sd_pct=sd_pct,
        fastest_pct=100 * float(ends.min()),
        slowest_pct=100 * float(ends.max()),
        holdout_pct=100 * float(np.expm1(np.average(effects[later], weights=counts[later]))) if later.any() else None,
        adjusted=varies,
    )
    speeds = used.select("row", pl.Series(SPEED, np.exp(drawn[stretch])))
    indexed = rows.with_row_index("row").join(speeds, on="row", how="left", maintain_order="left")
    return indexed.with_columns(pl.col(SPEED).fill_null(1.0)).drop("row"), variation


def _stretches(used: pl.DataFrame) -> Integers:
    """Return the number of each row's stretch of time, from 0 over all servers; shape (n,)."""
    busy_ns = (1e3 * pl.col("y") * pl.col("interval_steps")).cum_sum().over(SERVER)
    has_times = pl.col("ts_ns").null_count().over(SERVER) == 0
    since = pl.when(has_times).then(pl.col("ts_ns") - pl.col("ts_ns").min().over(SERVER)).otherwise(busy_ns)
    numbered = used.with_columns(stretch=(since / (1e9 * STRETCH_S)).floor())
    return numbered.select(pl.struct(*SERVER, "stretch").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()


def _batches(used: pl.DataFrame, rough: Vector) -> Integers:
    """Return the number of each row's group of about equal batches: those with prompts apart from those without; shape
    (n,).
    """
    numbers = np.zeros(len(rough), dtype=np.int64)
    for offset, has_prefill in ((0, False), (_SPEED_GROUPS, True)):
        here = (used["has_prefill"].fill_null(value=False) == has_prefill).to_numpy()
        cuts = (
            np.unique(np.quantile(rough[here], np.arange(1, _SPEED_GROUPS) / _SPEED_GROUPS))
            if here.any()
            else np.zeros(0)
        )
        numbers[here] = offset + np.searchsorted(cuts, rough[here], side="right")
    return numbers


def _polished(logs: Vector, batch: Integers, stretch: Integers) -> tuple[Vector, float]:
    """Return the effect of each stretch, shape (stretches,), and the robust standard deviation of what remains."""
    frame = pl.DataFrame({"log": logs, "batch": batch, "stretch": stretch})
    effects, rest = np.zeros(int(stretch.max()) + 1), logs
    for _ in range(_SPEED_ROUNDS):
        without = frame.with_columns(rest=pl.Series(logs - effects[stretch]))
        of_batch = without.select(pl.col("rest").median().over("batch")).to_series().to_numpy()
        left = frame.with_columns(rest=pl.Series(logs - of_batch)).group_by("stretch").agg(pl.col("rest").median())
        before, effects = effects, left.sort("stretch")["rest"].to_numpy()
        rest = logs - of_batch - effects[stretch]
        if np.abs(effects - before).max() < _SETTLED_SPEED:
            break
    return effects, robust_sd(rest)
