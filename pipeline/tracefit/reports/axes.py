"""Axes of figures: values to pixels, and round values to label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROUND = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7))
"""Multiples of a power of ten to label on a logarithmic axis, from few to many."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values and the pixels it covers."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; values outside are put at the edge."""
        low, high, inside = (self._scaled(v) for v in (self.low, self.high, value))
        share = (inside - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value

    def ticks(self, most: int = 6) -> list[float]:
        """Return up to `most` round values to label: steps of 1, 2 or 5; on a logarithmic axis as fit best."""
        return self._log_ticks(most) if self.log else _even(self.low, self.high, most)

    def _log_ticks(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        offered = [
            [m * 10.0**k for k in range(first, last + 1) for m in multiples if self._holds(m * 10.0**k)]
            for multiples in _ROUND
        ]
        fitting = [ticks for ticks in offered if 3 <= len(ticks) <= most]
        if fitting:
            return fitting[-1]
        if len(offered[0]) > most:
            return offered[0][:: -(-len(offered[0]) // most)]
        return _even(self.low, self.high, most)

    def _holds(self, value: float) -> bool:
        return self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)


def _even(low: float, high: float, most: int) -> list[float]:
    span = high - low
    step = 10 ** math.floor(math.log10(span / most)) if span > 0 else 1.0
    step *= next(m for m in (1, 2, 5, 10, 20) if span / (step * m) < most)
    first = math.ceil(low / step - 1e-9)
    count = math.floor((high - first * step) / step + 1e-9)
    return [(first + k) * step for k in range(count + 1)]


def axis_of(values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool = False) -> Axis:
    """Fit an axis around values, with a little room on both sides."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    if log:
        low, high = (low or 1e-3), (high or 1.0)
        return Axis(low / 1.15, high * 1.15, start, end, log=True)
    low = min(low, 0.0) if from_zero else low
    room = 0.04 * (high - low) or max(abs(high), 1.0) * 0.1
    return Axis(low if from_zero and low == 0 else low - room, high + room, start, end)


def tick_text(value: float) -> str:
    """Write the value of a tick: 12k, 3.5M, 0.02."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = size if letter != "k" else 1e3
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def spaced(labels: Iterable[tuple[float, str]], char_width: float) -> list[tuple[float, str]]:
    """Leave out labels that would touch the one before: (pixel of the middle, text), in order."""
    kept: list[tuple[float, str]] = []
    free_from = -math.inf
    for x, text in labels:
        half = char_width * len(text) / 2
        if x - half >= free_from:
            kept.append((x, text))
            free_from = x + half + char_width
    return kept
