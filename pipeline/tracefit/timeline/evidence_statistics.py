"""Statistics of the times of requests that contradict a complete recording of one engine, each by its name and symbol.

`docs/explanation/request-sums.md` defines them with the same symbols, `docs/reference/thresholds.md` has the numbers
that they are compared with, and `request_evidence` compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tracefit.statistics import binomial_tail, robust_sd
from tracefit.timeline import thresholds

if TYPE_CHECKING:
    import polars as pl

    from tracefit.statistics import Vector
    from tracefit.timeline.request_graph import Graph, RequestArrays


# -- r: the rate of a sampler -----------------------------------------------------------------------------


def sampler_rate(trace_ids: pl.Series) -> float | None:
    """Return *r*, the share of traces that a sampler kept by their ids; null where it kept all, or leaves no mark in
    them.

    OpenTelemetry's samplers compare the end of a random id with a bound: the low 64 bits, as a number or without its
    sign, are below it (TraceIdRatioBased), or the low 56 bits above it (consistent probability sampling, W3C trace
    context level 2). The largest of n even numbers is below 1 by about 1 / n.
    """
    ids = trace_ids.drop_nulls().unique()
    ids = ids.filter(ids.str.contains("^[0-9a-f]{32}$"))
    if ids.len() < thresholds.LEAST_SAMPLES:
        return None

    def number(start: int) -> Vector:
        return ids.str.slice(start, 8).str.to_integer(base=16).to_numpy() / 2.0**32

    high, low, middle = number(16), number(24), number(18)
    value = high + low / 2.0**32
    for share in (value, 2 * np.minimum(value, 1 - value), 1 - middle):
        most = float(share.max())
        # Ids that are not random do not spread evenly up to their largest either: even numbers have a standard
        # deviation of 1 / sqrt(12), 0.289, and their mean is within four standard errors of a half.
        even = abs(float(share.mean()) / max(most, 1e-300) - 0.5) < 4 * 0.289 / np.sqrt(len(share))
        if even and most > thresholds.LEAST_SAMPLER_RATE and -np.log(most) * len(share) > thresholds.SURPRISE:
            return most
    return None


# -- C, M, L: single stamps and requests ------------------------------------------------------------------


def close_stamps(arrays: RequestArrays, graph: Graph) -> float:
    """Return *C*: stamps too close for two steps of one engine, as a share of those that independent engines would
    give.

    A delayed front end stamps the outputs of two steps right after each other: their engine times are a step apart.
    """
    short_us = arrays.short_step_us()
    stamps = np.concatenate([arrays.first_token_ns, arrays.last_token_ns])
    order = np.argsort(stamps, kind="stable")
    gaps_us = np.diff(stamps[order]) / 1e3
    engine_gaps_us = np.diff(graph.time_us[np.concatenate([graph.first, graph.last])[order]])
    apart = gaps_us > thresholds.SAME_STAMP_NS / 1e3
    close = int((apart & (np.maximum(gaps_us, engine_gaps_us) < thresholds.CLOSE_SHARE * short_us)).sum())
    decoding = graph.interval_sums(graph.first, graph.last, np.ones(len(graph.first))) > 0
    busy_us = float(np.diff(graph.time_us)[decoding].sum())
    # Independent stamps come as a Poisson process: the chance that the next one is close.
    expected = apart.sum() * -np.expm1(-thresholds.CLOSE_SHARE * short_us * apart.sum() / max(busy_us, 1.0))
    return float(close / expected) if close > thresholds.FEW_CLOSE else 0.0


def miscounted_share(arrays: RequestArrays) -> float:
    """Return *M*: the share of requests that have less than half of the usual tokens and take the usual time of all of
    them.
    """
    usual_us, usual = np.median(arrays.decode_us), np.median(arrays.decode_steps)
    is_usual_time = np.abs(arrays.decode_us / max(float(usual_us), 1.0) - 1) < thresholds.SAME_DURATION
    return float((is_usual_time & (arrays.decode_steps < usual / 2)).mean())


class LateArrivals(NamedTuple):
    """*L*: requests that came while no other was in the engine, and waited for a step all the same.

    Attributes:
        late: How many waited.
        arrivals: How many came to an empty engine.
        usual_share: Share that may wait in a complete recording, by the jitter of this one.
        is_jitter: Whether the waits are as long as a front end's jitter, and not those for a step.
    """

    late: int
    arrivals: int
    usual_share: float
    is_jitter: bool

    @property
    def chance(self) -> float:
        """The chance of at least as many in a complete recording, of the binomial distribution."""
        return binomial_tail(self.late, self.arrivals, self.usual_share)


def late_arrivals(arrays: RequestArrays) -> LateArrivals | None:
    """Return *L*; null where no request came to an empty engine, or the engine is often slow.

    A request that arrives while the engine is empty is scheduled at once. If it waits for a step in progress, as most
    requests do while others run, others ran.
    """
    arrival_us, ends_us = arrays.arrival_us, (arrays.last_token_ns - arrays.zero_ns) / 1e3
    before_us = np.r_[-np.inf, np.maximum.accumulate(ends_us)[:-1]]
    to_empty = np.flatnonzero(arrival_us > before_us)
    short_us = arrays.short_step_us()
    slowdown = float(arrays.decode_us.sum() / max(arrays.decode_steps.sum(), 1.0)) / short_us
    if not to_empty.size or slowdown > thresholds.MOST_SLOWDOWN:
        return None
    waited_us = ((arrays.first_token_ns - arrays.zero_ns) / 1e3 - arrival_us - arrays.prefill_us)[to_empty]
    steps = (waited_us - np.quantile(waited_us, 0.1)) / short_us
    late = int((steps > thresholds.LATE_STEPS).sum())
    most = thresholds.MOST_LATE_SHORT if short_us < thresholds.SHORT_STEP_US else thresholds.MOST_LATE
    return LateArrivals(
        late,
        to_empty.size,
        min(thresholds.FEW_LATE + thresholds.LATE_PER_QUARTILE * float(np.quantile(steps, 0.25)), most),
        is_jitter=thresholds.LATE_STEPS * short_us < thresholds.JITTER_US
        and bool((steps > thresholds.JITTER_STEPS).sum() > thresholds.JITTER_TAIL * late),
    )


# -- F, U: a full engine ----------------------------------------------------------------------------------


class Fullness(NamedTuple):
    """How evenly the known requests fill an engine that lets others wait.

    Attributes:
        share: *F*, the share of the steps in which about as many requests run as in the fullest of them.
        unevenness: *U* of the tokens in their caches.
    """

    share: float
    unevenness: float


def fullness(run: Vector, read: Vector, steps: Vector) -> Fullness | None:
    """Return *F* and *U* of plain intervals in which a request waits in a queue; null where they are few.

    Args:
        run: Requests that run in each interval, shape (n,).
        read: Tokens in their caches.
        steps: Steps of the interval.
    """
    spread = unevenness(read, steps, thresholds.LEAST_QUEUE_STEPS)
    if spread is None or len(run) < thresholds.LEAST_SAMPLES:
        return None
    is_most = run >= thresholds.ABOUT_MOST * np.quantile(run, 0.99)
    return Fullness(float(steps[is_most].sum() / steps.sum()), spread)


def unevenness(read: Vector, steps: Vector, least_steps: float) -> float | None:
    """Return *U*: the 10th to the 90th percentile of the tokens in the caches over some steps, as a share of their
    median.

    Args:
        read: Tokens in the caches in each interval, shape (n,).
        steps: Steps of the interval.
        least_steps: Steps below which it is null.
    """
    if steps.sum() < least_steps:
        return None
    order = np.argsort(read)
    share = np.cumsum(steps[order]) / steps.sum()
    low, middle, high = (float(read[order][np.searchsorted(share, q)]) for q in (0.1, 0.5, 0.9))
    # Where requests have fewer tokens than steps, the counted steps may leave the cache empty.
    return (high - low) / middle if middle > 0 else None


# -- N, S: the times of plain intervals -------------------------------------------------------------------


def step_noise(off: Vector, steps: Vector) -> float | None:
    """Return *N*: the standard deviation of the times of short plain intervals, as a share of them; null where these
    are few.

    Args:
        off: Time of each interval over the time that its batch explains, less one; shape (n,).
        steps: Steps of the interval.
    """
    short = off[steps <= thresholds.FEW_STEPS]
    return robust_sd(short) if len(short) >= thresholds.LEAST_SAMPLES else None


class Skew(NamedTuple):
    """How much further plain intervals are longer than their batches explain than they are shorter; all of a step's
    time.

    Attributes:
        ratio: *S*, the ratio of the two.
        longer: How much longer a tenth of the steps are, as a share of their time.
        noise: Standard deviation of a step, as a share of its time.
    """

    ratio: float
    longer: float
    noise: float


def skew(off: Vector, steps: Vector) -> Skew:
    """Return *S*: the geometric mean of the 90th and 95th percentile of the errors of a step, over that of the 10th and
    5th.

    Noise makes a step shorter about as often as longer. A prompt that is not known only makes it longer.

    Args:
        off: Time of each plain interval over the time that its batch explains, less one; shape (n,).
        steps: Steps of the interval.
    """
    of_step = off * np.sqrt(steps)
    low, less, more, high = np.quantile(of_step, (0.05, 0.1, 0.9, 0.95))
    ratio = np.sqrt(max(more * high, 0.0) / max(less * low, 1e-6))
    return Skew(float(ratio), float(more), robust_sd(of_step))
