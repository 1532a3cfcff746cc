"""Arrivals of a recording: its stretches of steady rate, gaps relative to the rate of their stretch, and their
burstiness.

A load that is recorded at several rates, with pauses between them, has long and short gaps because its rate changes,
and not because requests come in bursts. Gaps are therefore compared only within a stretch of steady rate. A change of
the rate that does not last for `SHORTEST_GAPS` gaps and `SHORTEST_NS` counts as a burst.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.statistics import Flags, Integers, Matrix, Vector

GAP_BLOCK = 50
"""Consecutive gaps that are drawn as one block, which keeps their correlation."""
SHORTEST_GAPS = 20
"""Fewest gaps in a stretch of steady rate: the error of their mean is 22 % for a Poisson process, and the sum of 5 of
them keeps 71 % of its variance when it is divided by their mean. Shorter stretches have no relative gaps. A recording
as the report advises has stretches of little more."""
SHORTEST_NS = 8 * 10**9
"""Shortest time of a stretch: many requests within the time that one takes, which is seconds, are a burst to the
server. The advised recording has one of 10 s, less what chance takes."""

SUMMED_GAPS = 5
"""Consecutive gaps whose sum is compared with a Poisson process: one gap does not show how gaps follow each other, and
the more are summed, the fewer sums are independent."""
BEYOND_CHANCE = 3.0
"""Standard deviations from a Poisson process beyond which arrivals differ from it: 3 in 1,000 Poisson processes do."""
LEAST_SHAPE, MOST_SHAPE = 0.05, 20.0
"""Limits of the shape of gamma gaps: bursts of 20 requests, and gaps that are nearly equal."""

_PENALTY = 1.6
"""Least log-likelihood ratio of a cut, in units of log(gaps) and of the local dispersion. It cuts 1 to 2 of 100 Poisson
processes of 100 to 2,000 gaps, which leaves out one gap, and finds 95 of 100 pauses of 18 mean gaps; a rate or a pause
that is not found looks like bursts."""
_COMPARED_GAPS = 8
"""Gaps in each of the two neighbouring sums that give the local dispersion: bursts of up to twice as many requests show
in nearly every pair of sums, and half of the pairs lie within one stretch if all stretches are as short as can be."""
_LEAST_PAIRS = 8
"""Fewest pairs of sums that give a local dispersion; with fewer it is 1."""
_PHASE_ROUNDS = 6
"""Most rounds in which the local dispersion is computed again, within the stretches that the last one led to."""
_MOST_PHASES = 60
"""Most times that a segment is cut out of a longer one, which bounds the time."""


class Burstiness(msgspec.Struct, frozen=True):
    """How far arrivals within stretches of steady rate are from a Poisson process.

    Attributes:
        dispersion: Variance of the sum of `SUMMED_GAPS` consecutive relative gaps over its value for independent gaps
            of a Poisson
            process, the index of dispersion for intervals (Cox and Lewis 1966): 1 for a Poisson process, 0 for equal
            gaps, and more than 1 in bursts. It is 1 without gaps.
        sd: Its standard deviation for a Poisson process; infinite without gaps.
        gaps: Gaps that it is computed from.
    """

    dispersion: float
    sd: float
    gaps: int

    @property
    def differs(self) -> bool:
        """Whether the arrivals differ from a Poisson process beyond chance.

        The dispersion is a variance, and skewed like one: its cube root is nearly normal (Wilson and Hilferty 1931),
        with the degrees of freedom of a variance that has the same standard deviation.
        """
        if not self.gaps:
            return False
        variance = self.sd**2 / 9
        return abs(math.cbrt(self.dispersion) - (1 - variance)) > BEYOND_CHANCE * math.sqrt(variance)

    @property
    def shape(self) -> float:
        """Shape of gamma gaps with this dispersion, within `LEAST_SHAPE` and `MOST_SHAPE`; 1 if no difference is beyond
        chance.
        """
        if not self.differs:
            return 1.0
        return 1 / min(max(self.dispersion, 1 / MOST_SHAPE), 1 / LEAST_SHAPE)


def burstiness(engines: Sequence[Integers]) -> Burstiness:
    """Return how far arrivals are from a Poisson process of steady rate, over several engines.

    The relative gaps of a stretch are divided by their own mean. For n gaps of a Poisson process the share of m of them
    in the sum of all is Beta(m, n - m), so the sum of m relative gaps has the variance m n (n - m) / (n (n + 1)); the
    dispersion is relative to it. Its own variance is that of the mean square of all overlapping sums of m exponential
    gaps, whose fourth cumulant is 6 per shared
    gap: (6 + 2 (2 m² + 1) / (3 m)) / n with a known mean gap, and 4 / n less with the mean of the same gaps (delta
    method).

    Args:
        engines: Arrivals at each engine in ascending order, in ns; each of shape (n,).
    """
    m = SUMMED_GAPS
    total = expected = 0.0
    count = 0
    for gaps in (gaps for arrival_ns in engines for gaps in _relative(arrival_ns)):
        upto = np.concatenate(([0.0], np.cumsum(gaps)))
        sums = upto[m:] - upto[:-m]
        total += float(((sums - m) ** 2).sum())
        expected += len(sums) * m * (len(gaps) - m) / (len(gaps) + 1)
        count += len(gaps)
    if not count:
        return Burstiness(1.0, math.inf, 0)
    variance = (6 + 2 * (2 * m**2 + 1) / (3 * m) - 4) / count
    return Burstiness(total / expected, math.sqrt(variance), count)


def relative_gaps(arrival_ns: Integers) -> Vector:
    """Return gaps between arrivals over the mean gap of their stretch of steady rate, one stretch after the other,
    shape (gaps,).

    Gaps between two stretches are left out, and so are stretches of less than `SHORTEST_GAPS` gaps and arrivals that
    all come at once: they have no rate. The result is empty if fewer than `GAP_BLOCK` gaps remain.

    Args:
        arrival_ns: Arrivals at one server in ascending order, in ns, shape (n,).
    """
    stretches = _relative(arrival_ns)
    joined = np.concatenate(stretches) if stretches else np.zeros(0)
    return joined if len(joined) >= GAP_BLOCK else np.zeros(0)


def _relative(arrival_ns: Integers) -> list[Vector]:
    """Return the relative gaps of each stretch that has a rate."""
    gaps = [np.diff(arrival_ns[stretch]).astype(float) for stretch in steady_stretches(arrival_ns)]
    return [g / g.mean() for g in gaps if len(g) >= SHORTEST_GAPS and g.any()]


def steady_stretches(arrival_ns: Integers) -> list[slice]:
    """Cut arrivals into stretches of steady rate; the slices of arrivals are in order and leave nothing out.

    A cut takes one gap, which belongs to neither side. Both sides have at least `SHORTEST_GAPS` gaps and take
    `SHORTEST_NS`, with one
    exception: a pause also cuts fewer gaps than that off an end of a stretch, such as a request that tests the
    connection. Fewer arrivals than two stretches need are one stretch, except for such pauses.

    The segmentation is binary and recursive. Seeded intervals (Kovács, Bühlmann, Li and Munk, Biometrika 2023) find the
    changes that hide
    each other in longer ones: a rate that rises and falls again has nearly the same mean on both sides of every cut. A
    cut must raise the log-likelihood of exponential gaps by `_PENALTY` log(gaps) times the local dispersion, which is 1
    for a Poisson process. By
    chance, bursts with a dispersion of d raise it d times as much. The local dispersion is that within stretches: it
    begins with 1, which leads to the most cuts, and rises as long as the stretches that it leads to have a larger one.

    A slow change of the rate becomes steps. Bursts of more requests than two sums of the local dispersion have are not
    cut from each other, and neither is a load of them where its rate changes.

    Args:
        arrival_ns: Arrivals at one server in ascending order, in ns, shape (n,).
    """
    if not len(arrival_ns):
        return []
    gaps = np.diff(arrival_ns).astype(float)
    seeded, unit = _seeded_cuts(gaps), _PENALTY * math.log(max(len(gaps), 2))
    dispersion = 1.0
    for _ in range(_PHASE_ROUNDS):
        stretches = _segments(gaps, seeded, unit * dispersion, at_ends=False)
        within = _local_dispersion([gaps[begin:end] for begin, end in stretches])
        if within <= dispersion:
            break
        dispersion = within
    return [slice(begin, end + 1) for begin, end in _segments(gaps, seeded, unit * dispersion, at_ends=True)]


class _Cuts(NamedTuple):
    """The best cut in each of several intervals of gaps; all of shape (intervals,).

    Attributes:
        begin: First gap of the interval.
        end: The gap after its last one.
        at: The gap that the cut takes.
        gain: Log-likelihood ratio of the cut; 0 if no cut is possible.
    """

    begin: Integers
    end: Integers
    at: Integers
    gain: Vector


def _seeded_cuts(gaps: Vector) -> _Cuts:
    """Return the best cuts of the whole and of intervals of a half, a quarter and so on, which overlap by half."""
    size, found = len(gaps), list[_Cuts]()
    while size > 2 * SHORTEST_GAPS:
        last = len(gaps) - size
        begin = np.linspace(0, last, -(-2 * last // size) + 1).astype(np.int64)
        gain, at = _best_cuts(gaps[begin[:, None] + np.arange(size)], at_ends=False)
        found.append(_Cuts(begin, begin + size, begin + at, gain))
        size //= 2
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return _Cuts(none, none, none, np.zeros(0))
    return _Cuts(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _segments(gaps: Vector, seeded: _Cuts, penalty: float, *, at_ends: bool) -> list[tuple[int, int]]:
    """Cut gaps wherever the gain is above a penalty, the largest gain of each segment first.

    Args:
        gaps: Gaps in ns, shape (n,).
        seeded: The best cuts of its intervals.
        penalty: The least gain.
        at_ends: Whether pauses cut off short ends.

    Returns:
        First gap of each segment and the gap after its last one.
    """
    fewest = SHORTEST_GAPS if at_ends else 2 * SHORTEST_GAPS
    segments, left = list[tuple[int, int]](), [(0, len(gaps), 0)]
    while left:
        begin, end, level = left.pop()
        gain, at = 0.0, begin
        inside = (seeded.begin >= begin) & (seeded.end <= end)
        if inside.any():
            best = int(np.argmax(np.where(inside, seeded.gain, -1.0)))
            gain, at = float(seeded.gain[best]), int(seeded.at[best])
        # The search of the whole segment is the only one that finds pauses at its ends.
        if end - begin > fewest and (at_ends or gain <= penalty):
            gains, cuts = _best_cuts(gaps[None, begin:end], at_ends=at_ends)
            if gains[0] > gain:
                gain, at = float(gains[0]), begin + int(cuts[0])
        if gain > penalty and level < _MOST_PHASES:
            left += [(begin, at, level + 1), (at + 1, end, level + 1)]
        else:
            segments.append((begin, end))
    return sorted(segments)


def _best_cuts(gaps: Matrix, *, at_ends: bool) -> tuple[Vector, Integers]:
    """Return gain and place of the best cut in each of several intervals of equal length.

    The log-likelihood of n exponential gaps with the mean M is at most -n log(M) - n. A cut gives each side its own
    mean. The gap that the cut takes has the mean of the slower side, or its own, as a pause, if it is longer than that.

    Args:
        gaps: Gaps in ns, shape (intervals, gaps); at least two in an interval.
        at_ends: Whether a pause also cuts off fewer gaps than a stretch needs; both sides then have the same mean.

    Returns:
        Two arrays of shape (intervals,); the gain is 0 where no cut is possible.
    """
    count = gaps.shape[1]
    before = np.arange(count)
    after = count - 1 - before
    total, upto = gaps.sum(1, keepdims=True), np.cumsum(gaps, 1)
    left, right = upto - gaps, total - upto
    long_left = (before >= SHORTEST_GAPS) & (left >= SHORTEST_NS)
    long_right = (after >= SHORTEST_GAPS) & (right >= SHORTEST_NS)
    both = long_left & long_right
    possible: Flags = both
    if at_ends:
        possible = both | (long_left & (after < SHORTEST_GAPS)) | (long_right & (before < SHORTEST_GAPS))
    # Where a cut is possible there is a mean above 0; elsewhere 1 stands for it.
    rest = np.where(possible, (total - gaps) / (count - 1), 1.0)
    mean_left = np.where(both, left / np.maximum(before, 1), rest)
    mean_right = np.where(both, right / np.maximum(after, 1), rest)
    slower = np.maximum(mean_left, mean_right)
    ratio = gaps / slower
    taken = np.log(slower) + np.where(ratio > 1, np.log(np.maximum(ratio, 1.0)) + 1, ratio)
    whole = count * (np.log(np.where(total > 0, total, 1.0) / count) + 1)
    cut = before * (np.log(mean_left) + 1) + after * (np.log(mean_right) + 1) + taken
    gain = np.where(possible, whole - cut, 0.0)
    at = np.argmax(gain, 1)
    return gain[np.arange(len(gain)), at], at


def _local_dispersion(stretches: Sequence[Vector]) -> float:
    """Return the dispersion of neighbouring gaps, at least 1: infinite if arrivals come in bursts longer than a sum.

    For gamma gaps of shape k, the share of the sum of m gaps in the sum of 2 m is Beta(m k, m k), with a variance of
    1 / (4 (2 m k + 1)), whatever their rate, and the dispersion of the gaps is 1 / k. Two sums of 0 have no share.

    Args:
        stretches: Gaps of each stretch in ns; each of shape (n,).
    """
    m = _COMPARED_GAPS
    sums = [gaps[: len(gaps) // m * m].reshape(-1, m).sum(1) for gaps in stretches]
    one = np.concatenate([s[:-1] for s in sums])
    both = one + np.concatenate([s[1:] for s in sums])
    share = one[both > 0] / both[both > 0]
    if len(share) < _LEAST_PAIRS:
        return 1.0
    variance = float(((share - 0.5) ** 2).mean())
    return max(2 * m * 4 * variance / (1 - 4 * variance), 1.0) if 4 * variance < 1 else math.inf
