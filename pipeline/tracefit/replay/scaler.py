"""A scaler over a day: it follows the load by what a server carries, and a server is ready some time after it is asked
for.

Every half minute it computes the servers that the load of the last two minutes needs, rounded up to whole steps, and
asks for them. It lets servers go when the load of five minutes has needed none of them, as Kubernetes does by default;
they finish their requests. A server that was asked for is ready after the start-up time, if it was asked for all that
time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from tracefit.statistics import Integers, Vector

EVERY_S = 30.0
"""Time between two decisions."""
_SEEN_INTERVALS = 4
"""Intervals whose mean load decides."""
_KEPT = 10
"""Intervals in which no load may need a server before it is let go."""


class ScaledServers(msgspec.Struct, frozen=True):
    """Servers over time.

    Attributes:
        begin_s: When the first interval begins.
        ready: Servers that are ready in each interval of `EVERY_S`, shape (n,).
    """

    begin_s: float
    ready: Integers

    def at(self, at_s: Vector) -> Integers:
        """Return the servers that are ready at some times, shape of `at_s`."""
        numbers = ((at_s - self.begin_s) // EVERY_S).astype(np.int64)
        return self.ready[np.clip(numbers, 0, len(self.ready) - 1)]

    def hours(self, end_s: float) -> float:
        """Return the hours of all servers until a time."""
        lasted = np.clip(end_s - self.begin_s - EVERY_S * np.arange(len(self.ready)), 0.0, EVERY_S)
        return float((self.ready * lasted).sum()) / 3600


def needed_by_load(at_s: Vector, needed_for_one: Vector) -> tuple[float, Vector]:
    """Return the begin of the first interval, and the servers that the load of each interval needs, not rounded; shape
    (intervals,).

    Args:
        at_s: Arrivals in ascending order.
        needed_for_one: Servers that one request per second like each of them needs, shape of `at_s`.
    """
    begin = float(at_s[0])
    count = int((at_s[-1] - begin) // EVERY_S) + 1
    numbers = ((at_s - begin) // EVERY_S).astype(np.int64)
    return begin, np.bincount(numbers, needed_for_one, count) / EVERY_S


def scaled(begin_s: float, needed: Vector, *, start_up_s: float, step: int, spare_pct: float) -> ScaledServers:
    """Return the servers that a scaler has ready; at the begin it has those that the first two minutes need.

    Args:
        begin_s: When the first interval begins.
        needed: See `needed_by_load`.
        start_up_s: Time from asking for a server to its first request.
        step: Servers come and go by as many.
        spare_pct: Servers beyond those that the load needs, in percent of these.
    """
    # The load of an interval is known when it ends.
    upto = np.concatenate([[0.0], np.cumsum(needed)])
    ends = np.arange(len(needed))
    begins = np.maximum(ends - _SEEN_INTERVALS, 0)
    first = needed[:_SEEN_INTERVALS].mean()
    seen = np.where(ends < _SEEN_INTERVALS, first, (upto[ends] - upto[begins]) / np.maximum(ends - begins, 1))
    asked = step * np.maximum(np.ceil(seen * (1 + spare_pct / 100) / step - 1e-9), 1).astype(np.int64)
    kept = _over_the_last(asked, _KEPT, np.maximum)
    return ScaledServers(begin_s, _over_the_last(kept, math.ceil(start_up_s / EVERY_S), np.minimum))


def _over_the_last(values: Integers, before: int, ufunc: np.ufunc) -> Integers:
    """Return the extreme of each value and those of so many intervals before it; the first value holds before it."""
    padded = np.concatenate([np.full(before, values[0]), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, before + 1)
    return np.asarray(ufunc.reduce(windows, axis=1))
