"""Array types and statistics for several rooms: percentiles, robust standard deviation, least squares with bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
"""Types of arrays; docstrings of functions that take or return arrays state their shapes."""

PERCENTS: tuple[int, ...] = (*range(0, 100, 5), 99, 100)
"""Percentiles that distributions of latencies are published and drawn at."""

_SD_PER_MAD = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution: 1 / Phi^-1(3/4)."""


def percentile(values: Vector, percent: float) -> float:
    """Return a percentile of values of shape (n,), n > 0, by linear interpolation between ranks.

    It is the sorted value at `percent / 100 * (n - 1)`, counted from 0. Everything that prints a percentile of
    latencies takes it from here, so that commands agree on the same requests. It is unknown if a value is. It is that
    of `np.percentile`, which takes several times as long for some thousand values.
    """
    rank = percent / 100 * (len(values) - 1)
    at = min(int(rank), max(len(values) - 2, 0))
    above = min(at + 1, len(values) - 1)
    # Unknown values are sorted to the end.
    parted = np.partition(values, (at, above, len(values) - 1))
    if parted[-1] != parted[-1]:
        return math.nan
    low, high, share = parted[at].item(), parted[above].item(), rank - at
    # From the nearer of the two, so that the end of a rank is exactly its value.
    return float(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))


def percentiles(values: Vector, percents: Sequence[float]) -> list[float]:
    """Return several percentiles of the same values, each as `percentile` does; the values are sorted once."""
    return [float(value) for value in np.percentile(values, percents, method="linear")]


def percentile_of_counts(values: Vector, counts: Integers, percent: float) -> float:
    """Return the `percentile` of values that each occur so many times; shapes (n,), with a sum of counts above 0."""
    order = np.argsort(values)
    upto = np.cumsum(counts[order])
    rank = percent / 100 * float(upto[-1] - 1)
    ends = (math.floor(rank), math.ceil(rank))
    low, high = (float(values[order[np.searchsorted(upto, end, side="right")]]) for end in ends)
    return low + (high - low) * (rank - ends[0])


def percentile_expr(column: pl.Expr, percent: float) -> pl.Expr:
    """Return `percentile` of the known values of a column, or of each group of it, as an expression."""
    # Without a method, polars takes the nearest value.
    return column.quantile(percent / 100, "linear")


LIKELY_SDS = 2.0
"""Standard deviations about a mean within which 95 % of normal values are: what is within may be chance."""

SD_OF_MEDIAN = 1.2533
"""Standard error of a median over that of a mean of normal values: sqrt(pi / 2)."""


def median(values: Vector) -> float:
    """Return the median of values of shape (n,) as `np.median` does, which takes several times as long; NaN without
    any.
    """
    if not len(values):
        return math.nan
    middle = len(values) // 2
    # The upper middle rank: numpy finds one in a quarter of the time that it takes for both.
    parted = np.partition(values, middle)
    if math.isnan(float(values.sum())):
        return math.nan
    upper = float(parted[middle])
    return upper if len(values) % 2 else (float(parted[:middle].max()) + upper) / 2


def robust_sd(values: Vector) -> float:
    """Return 1.4826 times the median absolute deviation from the median, in the unit of `values` of shape (n,).

    Half of the values can be arbitrarily wrong without moving it far (Hampel 1974). It is 0 if more than half of them
    are equal.
    """
    return _SD_PER_MAD * median(np.abs(values - median(values)))


_ROUNDS_PER_SLOPE = 3
_SINGULAR = 1e-13
"""Directions with a smaller share of the largest eigenvalue are rounding errors."""

_UPHILL = 1e-10
"""Slopes whose increase lowers the squares by a smaller share of the steepest one remain 0: that is rounding."""


def nonnegative(
    gram: Matrix, cross: Vector, bound: Flags, start: Vector | None = None, *, least: float = 0.0
) -> Vector:
    """Return the a that minimises a.gram.a / 2 - cross.a with a >= 0 where `bound`, shape (n,).

    The active-set method of Lawson and Hanson (1974) on the products of the columns instead of their rows (Bro and de
    Jong 1997): a few systems of the size of the number of columns.

    Args:
        gram: Products of the columns, shape (n, n).
        cross: Products of columns and target, shape (n,).
        bound: Which elements are not negative, shape (n,).
        start: An allowed a nearby, from which the search is shorter.
        least: No eigenvalue of `gram` is below it.
    """
    is_regular = least > _SINGULAR * float(gram.trace())
    if start is None or not bound.any():
        nearby = _solved(gram, cross, is_regular=is_regular)
        if (nearby[bound] > 0).all():
            return nearby
    else:
        nearby = start
    slopes = np.where(bound, np.maximum(nearby, 0.0), nearby)
    passive = ~bound | (slopes > 0)
    uphill = _UPHILL * float(np.abs(cross).max())
    for _ in range(_ROUNDS_PER_SLOPE * len(cross)):
        slopes, passive = _inside(gram, cross, bound, slopes, passive, is_regular=is_regular)
        if passive.all():
            break
        downhill = np.where(passive, -np.inf, cross - gram @ slopes)
        steepest = int(np.argmax(downhill))
        if not downhill[steepest] > uphill:
            break
        passive[steepest] = True
    return slopes


def _solved(gram: Matrix, cross: Vector, *, is_regular: bool) -> Vector:
    """Return the shortest a with gram.a = cross; directions that are rounding errors of `gram` are left out of it.

    If `gram` is regular, no direction is left out, and there is one a.
    """
    if is_regular:
        return np.asarray(np.linalg.solve(gram, cross))
    values, vectors = np.linalg.eigh(gram)
    kept = values > _SINGULAR * values[-1]
    inverse = np.where(kept, 1 / np.where(kept, values, 1.0), 0.0)
    return np.asarray(vectors @ (inverse * (cross @ vectors)))


def _inside(
    gram: Matrix, cross: Vector, bound: Flags, slopes: Vector, passive: Flags, *, is_regular: bool
) -> tuple[Vector, Flags]:
    """Return the minimum over the `passive` slopes, and which of them are left: those on whose bound the way there ends
    are 0.
    """
    passive = passive.copy()
    while (used := np.flatnonzero(passive)).size:
        best = np.zeros(len(slopes))
        best[used] = _solved(gram[used[:, None], used], cross[used], is_regular=is_regular)
        crossed = np.flatnonzero(passive & bound & (best <= 0))
        if not crossed.size:
            return best, passive
        # As far as the first bound on the way. A slope that just became passive is 0, and may stay there.
        ways = slopes[crossed] / np.maximum(slopes[crossed] - best[crossed], np.finfo(float).tiny)
        slopes = slopes + float(ways.min()) * (best - slopes)
        ends = crossed[ways <= ways.min()]
        slopes[ends], passive[ends] = 0.0, False
    return np.zeros(len(slopes)), passive


def binomial_tail(least: int, trials: int, chance: float) -> float:
    """Return the probability of at least so many successes in trials that each succeed by a chance between 0 and 1."""
    if not least:
        return 1.0
    odds = math.log(chance) - math.log1p(-chance)
    ways = math.lgamma(trials + 1) - math.lgamma(least + 1) - math.lgamma(trials - least + 1)
    more = np.arange(least, trials)
    # The logarithm of the probability of `least`, and the steps from that of each number to that of the next.
    logs = np.r_[ways + least * odds + trials * math.log1p(-chance), np.log((trials - more) / (more + 1)) + odds]
    return min(1.0, float(np.exp(np.cumsum(logs)).sum()))


def monotone(x: Vector, y: Vector) -> Callable[[Vector], Vector]:
    """Return a smooth curve through points, monotone between two of them: piecewise cubic Hermite interpolation
    (Fritsch and Butland 1984).

    Args:
        x: Ascending, shape (n,), n of at least 2.
        y: Shape (n,).

    Returns:
        Function of values within `x`, of any shape.
    """
    gaps, rises = np.diff(x), np.diff(y)
    slopes = rises / gaps
    tangents = np.full(len(x), slopes[0])
    if len(x) > 2:
        before, after = slopes[:-1], slopes[1:]
        is_turn = before * after <= 0
        near, far = 2 * gaps[1:] + gaps[:-1], gaps[1:] + 2 * gaps[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (near + far) / (near / before + far / after)
        tangents[1:-1] = np.where(is_turn, 0.0, mean)
        for end, (first, second), (slope, next_slope) in (
            (0, gaps[:2], slopes[:2]),
            (-1, gaps[:-3:-1], slopes[:-3:-1]),
        ):
            # The parabola through three points, as long as it keeps the first two in order.
            tangent = ((2 * first + second) * slope - first * next_slope) / (first + second)
            if np.sign(tangent) != np.sign(slope):
                tangent = 0.0
            elif np.sign(slope) != np.sign(next_slope) and abs(tangent) > 3 * abs(slope):
                tangent = 3 * slope
            tangents[end] = tangent

    def curve(at: Vector) -> Vector:
        piece = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
        gap = gaps[piece]
        t = (at - x[piece]) / gap
        start, end = gap * tangents[piece], gap * tangents[piece + 1]
        bend = 3 * rises[piece] - 2 * start - end
        return np.asarray(y[piece] + t * (start + t * (bend + t * (start + end - 2 * rises[piece]))))

    return curve


def mean_of(column: pl.Series) -> float | None:
    """Return the mean of the known values of a column; null if all are unknown."""
    value = column.mean()
    return float(value) if isinstance(value, int | float) else None


def robust_sd_expr(column: pl.Expr) -> pl.Expr:
    """Return `robust_sd` of a column, or of each group of it, as an expression."""
    return (column - column.median()).abs().median() * _SD_PER_MAD


def sum_if_all_known(column: pl.Expr) -> pl.Expr:
    """Return the sum of a column, or of each group of it, as an expression; null if one value is null."""
    return pl.when(column.null_count() == 0).then(column.sum())


def divided(values: pl.Expr, number: float) -> pl.Expr:
    """Return values divided by a number, equal to the last digit in frames of any length."""
    # By a column: polars divides a long frame by a constant through its reciprocal, which can be off in the last digit.
    return values / (values * 0 + number)
