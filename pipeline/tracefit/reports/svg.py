"""Figures as SVG: real text, colours of the page, no dependency.

Widths are in the units of a narrow screen, so that letters stay readable where the picture is not scaled up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.reports.document import Figure, Panel, Series

NARROW, WIDE = 420.0, 1080.0
LEFT, RIGHT, TOP = 52.0, 12.0, 4.0
LABEL_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 18.0, 36.0, 18.0
PANEL_HEIGHT, STACKED_HEIGHT, GAP = 240.0, 88.0, 10.0
ROW_HEIGHT = 34.0
CHAR_WIDTH = 6.1
"""Mean width of a letter in a legend, in pixels."""

_REGIONS = {
    "hold-out": 0,
    "training range": 0,
    "warm-up": 1,
    "idle": 2,
    "queue never empty": 3,
    "overload": 4,
}
_MOST_TICKS, _MOST_TICKS_STACKED = 7, 5


def figure_svg(figure: Figure, *, width: float = NARROW) -> str:
    """Draw a figure. Its title and caption are read out in place of the picture.

    Args:
        figure: The figure.
        width: Of the drawing; where it is not `NARROW` the ids in it are others, so that both fit in one page.
    """
    body, height = _categories(figure, width) if figure.categories else _panels(figure, width)
    name = escape(figure.name if width == NARROW else f"{figure.name}-{width:g}", quote=True)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(figure.title)}</title><desc id="{name}-d">{escape(figure.caption)}</desc>'
        f"{body}</svg>"
    )


def _panels(figure: Figure, width: float) -> tuple[str, float]:
    height = PANEL_HEIGHT if len(figure.panels) == 1 else STACKED_HEIGHT
    x_axis = axis_of(_places(figure), LEFT, width - RIGHT, log=figure.log_x)
    parts, top = [], TOP
    for panel in figure.panels:
        parts.append(_text(4, top + 12, panel.y_label, "l"))
        top += LABEL_HEIGHT
        if len(panel.series) > 1:
            entries = [(s.name, _sample(s, k)) for k, s in enumerate(panel.series)]
            legend, top = _legend(entries, top, width)
            parts += legend
        parts += _panel(figure, panel, x_axis, top, top + height)
        top += height + GAP
    bottom = top - GAP
    ticks = spaced([(x_axis.at(v), tick_text(v)) for v in x_axis.ticks(_MOST_TICKS)], CHAR_WIDTH)
    parts += [_text(x, bottom + 14, text, "t m") for x, text in ticks]
    parts.append(_text((LEFT + width - RIGHT) / 2, bottom + 29, figure.x_label, "l m"))
    marks, end = _legend(_marked(figure), bottom + AXIS_HEIGHT, width)
    return "".join([*parts, *marks]), end


def _places(figure: Figure) -> list[float]:
    drawn = [x for p in figure.panels for s in p.series for x in s.x]
    return [*drawn, *(end for r in figure.regions for end in (r.start, r.end)), *(x for x, _ in figure.marks)]


def _panel(figure: Figure, panel: Panel, x_axis: Axis, top: float, bottom: float) -> Iterator[str]:
    y_axis = _y_axis(panel, top, bottom)
    left, right = x_axis.start, x_axis.end
    yield _rect("f", left, right, top, bottom)
    for region in figure.regions:
        start, end = x_axis.at(region.start), x_axis.at(region.end)
        yield _rect(f"b{_REGIONS[region.kind]}", start, max(end, start + 1), top, bottom)
        if region.kind == "overload":
            yield _rect("o", start, max(end, start + 1), top, top + 3)
    most = _MOST_TICKS if bottom - top > STACKED_HEIGHT else _MOST_TICKS_STACKED
    for value in y_axis.ticks(most):
        y = y_axis.at(value)
        yield _line("g", left, y, right, y)
        yield _text(left - 4, y + 4, tick_text(value), "t e")
    for place, _ in figure.marks:
        x = x_axis.at(place)
        yield _line("k", x, top, x, bottom)
    if panel.diagonal:
        low, high = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
        yield _line("r", x_axis.at(low), y_axis.at(low), x_axis.at(high), y_axis.at(high))
    if panel.zero:
        yield _line("r", left, y_axis.at(0), right, y_axis.at(0))
    for level, name in panel.levels:
        y = y_axis.at(level)
        yield _line("h", left, y, right, y)
        yield _text(right - 4, y - 3 if y - top > 14 else y + 11, name, "t e")
    for number, series in enumerate(panel.series):
        yield _drawn(series, x_axis, y_axis, number)


def _y_axis(panel: Panel, top: float, bottom: float) -> Axis:
    values = [y for s in panel.series for y in s.y]
    values += [x for s in panel.series for x in s.x] if panel.diagonal else []
    if panel.y_limits is not None:
        low, high = panel.y_limits
        values = [v for v in values if low <= v <= high]
    values += [0.0] if panel.zero else []
    values += [level for level, _ in panel.levels]
    from_zero = not (panel.log_y or panel.zero or panel.diagonal)
    return axis_of(values, bottom, top, log=panel.log_y, from_zero=from_zero)


def _drawn(series: Series, x_axis: Axis, y_axis: Axis, number: int) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(series.x, series.y, strict=True)]
    if series.kind == "line":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return f'<polyline class="s{number}" points="{path}"/>'
    return _points(places, number)


def _points(places: Sequence[tuple[float, float]], number: int) -> str:
    """Draw all points of a series as one path; series differ in shape as well as in colour."""
    if number % 2 == 0:
        # A line of zero length with round ends is drawn as a dot.
        dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in places)
        return f'<path class="p{number}" d="{dots}"/>'
    triangles = "".join(f"M{x:.1f} {y - 2.8:.1f}l2.6 4.6h-5.2z" for x, y in places)
    return f'<path class="q{number}" d="{triangles}"/>'


def _sample(series: Series, number: int) -> str:
    """Draw the sample of a series in a legend, from (0, 0) to (16, 0)."""
    return _line(f"s{number}", 0, 0, 16, 0) if series.kind == "line" else _points([(8, 0)], number)


def _marked(figure: Figure) -> list[tuple[str, str]]:
    """Return the legend entries of the marks along the x axis."""
    kinds = dict.fromkeys(sorted((r.kind for r in figure.regions), key=_REGIONS.__getitem__))
    swatches = [(k, _rect(f"b{_REGIONS[k]} e", 0, 16, -5, 5)) for k in kinds]
    return [*swatches, *((n, _line("k", 8, -6, 8, 6)) for n in dict.fromkeys(n for _, n in figure.marks))]


def _legend(entries: Sequence[tuple[str, str]], top: float, width: float) -> tuple[list[str], float]:
    """Draw a legend in as many lines as it takes; return it and where it ends."""
    if not entries:
        return [], top
    parts, x, y = [], LEFT, top + 8
    for name, sample in entries:
        wide = 20 + CHAR_WIDTH * len(name)
        if x > LEFT and x + wide > width - RIGHT:
            x, y = LEFT, y + LEGEND_HEIGHT
        parts += [f'<g transform="translate({x:.1f} {y:.1f})">{sample}</g>', _text(x + 20, y + 4, name, "t")]
        x += wide + 14
    return parts, y + LEGEND_HEIGHT - 8


def _categories(figure: Figure, width: float) -> tuple[str, float]:
    """Draw one row per category, its name above its bar: names of any length fit."""
    (panel,) = figure.panels
    values = [v for s in panel.series for v in (*s.x, *s.low, *s.high)]
    x_axis = axis_of([*values, 0.0], 12.0, width - RIGHT, log=False, from_zero=True)
    tops = [TOP + ROW_HEIGHT * k for k in range(len(figure.categories))]
    bottom = TOP + ROW_HEIGHT * len(tops)
    ticks = [(x_axis.at(v), tick_text(v)) for v in x_axis.ticks(_MOST_TICKS)]
    # Grid lines in pieces between the rows, so that they cross no name.
    parts = [_line("g", x, top + 16, x, top + ROW_HEIGHT) for x, _ in ticks for top in tops]
    parts += [_text(x, bottom + 14, text, "t m") for x, text in spaced(ticks, CHAR_WIDTH)]
    zero = x_axis.at(0.0)
    parts += [_line("z", zero, top + 16, zero, top + ROW_HEIGHT) for top in tops]
    for series in panel.series:
        for k, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            row = TOP + ROW_HEIGHT * y + 24
            if series.kind == "bars":
                left, right = sorted((zero, x_axis.at(x)))
                parts.append(_rect("a0", left, right, row - 5, row + 5))
                continue
            parts.append(_line("s0", x_axis.at(series.low[k]), row, x_axis.at(series.high[k]), row))
            parts.append(f'<circle class="a0" cx="{x_axis.at(x):.1f}" cy="{row:g}" r="3.4"/>')
    parts += [_text(4, top + 13, name, "c") for top, name in zip(tops, figure.categories, strict=True)]
    parts.append(_text(width / 2, bottom + 29, figure.x_label, "l m"))
    return "".join(parts), bottom + AXIS_HEIGHT


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(kind: str, left: float, right: float, top: float, bottom: float) -> str:
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:g}" width="{right - left:.1f}" height="{bottom - top:g}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


# Axes: values to pixels, and round values to label

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
