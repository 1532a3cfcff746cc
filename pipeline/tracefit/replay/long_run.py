"""Waits in the long run, from a replay that is too short for them.

Near the capacity a queue grows and shrinks over thousands of requests. A replay of ten thousand has only a few of these
swings, and begins with an empty server: at 95 % of the capacity the median TTFT differs by tens of percent between two
draws of the arrivals, and high percentiles are too low. So the queue alone is modelled too: as many slots as the server
has; each serves a request at a time with an equal share of the engine's work, first come first served (Kiefer and
Wolfowitz 1955). That takes a hundredth of a replay's time. It is run with the requests of the replay and with many
more. By as much as the request of the same rank waits longer in the long queue than in the short one, the replayed
request waits longer too: a control variate (Law, Simulation Modeling and Analysis, 2015, section 11.4), for whole
distributions instead of a mean.
"""

from __future__ import annotations

import math
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tracefit.statistics import Integers, Vector

LONG_QUEUE_LENGTH = 0.6
"""Requests of a long queue per request of the replay, times the square of the share of the capacity that is left: the
nearer the capacity, the more requests depend on each other, and the more of them an average needs."""

RANKS = np.arange(1, 100) / 100
_PARTS = 40
"""Parts of a long queue, from whose differences the error of all follows."""


class LongerWaits(NamedTuple):
    """How much longer requests of a replay would wait in the long run.

    Attributes:
        added_us: To add to the wait of each request, shape (n,).
        ranks: Share of the requests that wait less than each one in the model of the queue, shape (n,).
        rank_errors: Standard error of such a share in the long queue, at `RANKS`, shape (99,).
    """

    added_us: Vector
    ranks: Vector
    rank_errors: Vector


def slot_waits_us(arrival_us: Vector | Integers, service_us: Vector, slots: int) -> Vector:
    """Return how long requests wait for the first free slot, shape (n,).

    Args:
        arrival_us: Arrivals in ascending order, shape (n,).
        service_us: How long each request keeps its slot, shape (n,).
        slots: How many requests are served at a time.
    """
    # More slots than requests change nothing.
    free_at, begins = [0.0] * min(slots, len(arrival_us)), list[float]()
    for arrival, service in zip(arrival_us.tolist(), service_us.tolist(), strict=True):
        begin = free_at[0]
        if begin < arrival:  # noqa: PLR1730 - a call of max takes as long as all else here
            begin = arrival
        begins.append(begin)
        heapreplace(free_at, begin + service)
    return np.asarray(begins - arrival_us, dtype=float)


def longer_waits(waited_us: Vector, latency_us: Vector, short_us: Vector, long_us: Vector) -> LongerWaits:
    """Return how much longer the requests of a replay wait in the long run.

    Requests that do not wait in the model of the queue are ranked by their latency. The model explains a part of the
    replayed waits, its regression coefficient; as much of its difference counts. No request waits for less than no
    time.

    Args:
        waited_us: Wait of each request in the replay, shape (n,).
        latency_us: Its latency, shape (n,).
        short_us: Its wait in the model of the queue, shape (n,).
        long_us: Waits of many more requests in that model, shape (m,).
    """
    count = len(short_us)
    ranks = np.empty(count)
    ranks[np.lexsort((latency_us, short_us))] = (np.arange(count) + 0.5) / count
    ordered = np.sort(long_us)
    longer = np.interp(ranks, (np.arange(len(ordered)) + 0.5) / len(ordered), ordered) - short_us
    spread = float(np.var(short_us))
    common = float(np.mean((waited_us - waited_us.mean()) * (short_us - short_us.mean())))
    share = min(max(common / spread, 0.0), 1.0) if spread else 0.0
    ends = ordered[(RANKS * len(ordered)).astype(int)]
    parts = [np.searchsorted(np.sort(part), ends, side="right") / len(part) for part in np.array_split(long_us, _PARTS)]
    # Consecutive requests share a queue: batch means (section 9.5 of the same book).
    rank_errors = np.std(parts, axis=0, ddof=1) / math.sqrt(_PARTS)
    return LongerWaits(np.maximum(share * longer, -waited_us), ranks, rank_errors)
