"""Figures as SVG: text that is text, colours that follow the page's, no dependency.

Widths are in the units of a narrow screen, so that letters stay readable where the picture is not scaled up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.reports.model import Figure, Panel, Series

WIDTH = 420.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 36.0
PANEL_HEIGHT, STACKED_HEIGHT, GAP = 240.0, 88.0, 14.0
ROW_HEIGHT = 34.0
LEGEND_HEIGHT = 18.0
_CHAR_WIDTH = 6.1


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

    def ticks(self) -> list[float]:
        """Return round values to label: powers of ten on a logarithmic axis, else steps of 1, 2 or 5."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, (last - first) // 5)
            if last - first >= 1:
                return [10.0**k for k in range(first, last + 1, every)]
        span = self.high - self.low
        step = 10 ** math.floor(math.log10(span / 4)) if span > 0 else 1.0
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor((self.high - first * step) / step + 1e-9)
        return [(first + k) * step for k in range(count + 1)]


def axis_of(values: list[float], start: float, end: float, *, log: bool, from_zero: bool = False) -> Axis:
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


def figure_svg(figure: Figure) -> str:
    """Draw a figure. Its title and caption are read out in place of the picture."""
    drawn = _categories(figure) if figure.categories else _panels(figure)
    body, height = drawn
    name = escape(figure.name, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(figure.title)}</title><desc id="{name}-d">{escape(figure.caption)}</desc>'
        f"{body}</svg>"
    )


def _panels(figure: Figure) -> tuple[str, float]:
    one = len(figure.panels) == 1
    height = PANEL_HEIGHT if one else STACKED_HEIGHT
    xs = [x for p in figure.panels for s in p.series for x in s.x]
    x_axis = axis_of(xs, LEFT, WIDTH - RIGHT, log=figure.log_x)
    parts = []
    top = TOP
    for panel in figure.panels:
        legend = panel.series if len(panel.series) > 1 else ()
        top += 14 + (LEGEND_HEIGHT if legend else 0)
        parts.append(_panel(figure, panel, x_axis, top, top + height))
        parts.append(_text(4, top - 6 - (LEGEND_HEIGHT if legend else 0), panel.y_label, "l"))
        parts += _legend(legend, top - 7)
        top += height + GAP
    bottom = top - GAP
    for value in x_axis.ticks():
        parts.append(_text(x_axis.at(value), bottom + 14, tick_text(value), "t m"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 30, figure.x_label, "l m"))
    return "".join(parts), bottom + BOTTOM


def _panel(figure: Figure, panel: Panel, x_axis: Axis, top: float, bottom: float) -> str:
    ys = [y for s in panel.series for y in s.y]
    both = [x for s in panel.series for x in s.x] if panel.diagonal else []
    y_axis = axis_of(
        [*ys, *both, *([0.0] if panel.zero else [])],
        bottom,
        top,
        log=panel.log_y,
        from_zero=not panel.log_y and not panel.zero and not panel.diagonal,
    )
    parts = [
        f'<rect class="f" x="{LEFT:g}" y="{top:g}" width="{WIDTH - RIGHT - LEFT:g}" height="{bottom - top:g}"/>'
    ]
    for number, band in enumerate(figure.bands):
        left, right = x_axis.at(band.start), x_axis.at(band.end)
        kind = sorted({b.name for b in figure.bands}).index(band.name)
        width = max(right - left, 1.0)
        parts.append(
            f'<rect class="b{kind}" x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{bottom - top:g}"'
            f' data-band="{number}"/>'
        )
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="g" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 4, y + 4, tick_text(value), "t e"))
    for place, label in figure.marks:
        x = x_axis.at(place)
        parts.append(
            f'<line class="k" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"><title>{escape(label)}</title></line>'
        )
    if panel.diagonal:
        low, high = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
        parts.append(_line(x_axis.at(low), y_axis.at(low), x_axis.at(high), y_axis.at(high)))
    if panel.zero:
        parts.append(_line(LEFT, y_axis.at(0), WIDTH - RIGHT, y_axis.at(0)))
    for number, series in enumerate(panel.series):
        parts += _drawn(series, x_axis, y_axis, number)
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="r" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _drawn(series: Series, x_axis: Axis, y_axis: Axis, number: int) -> Iterator[str]:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(series.x, series.y, strict=True)]
    if series.kind == "line":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="s{number}" points="{path}"/>'
        return
    for x, y in places:
        yield _marker(x, y, number)


def _marker(x: float, y: float, number: int) -> str:
    """Draw a point: series differ in shape as well as in colour."""
    if number % 2 == 0:
        return f'<circle class="p{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>'
    return f'<path class="p{number}" d="M{x:.1f} {y - 3:.1f}l3 5h-6z"/>'


def _legend(named: Sequence[Series], y: float) -> Iterator[str]:
    left = LEFT
    for number, series in enumerate(named):
        width = 20 if series.kind == "line" else 8
        if series.kind == "line":
            yield f'<line class="s{number}" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}"/>'
        else:
            yield _marker(left + 4, y - 4, number)
        yield _text(left + width + 4, y, series.name, "t")
        left += width + 4 + _CHAR_WIDTH * len(series.name) + 14


def _categories(figure: Figure) -> tuple[str, float]:
    """Draw one row per category, its name above its bar: names of any length fit."""
    (panel,) = figure.panels
    values = [v for s in panel.series for v in (*s.x, *s.low, *s.high)]
    x_axis = axis_of([*values, 0.0], 12.0, WIDTH - RIGHT, log=False, from_zero=True)
    bottom = TOP + ROW_HEIGHT * len(figure.categories)
    parts = []
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{bottom:g}"/>')
        parts.append(_text(x, bottom + 14, tick_text(value), "t m"))
    zero = x_axis.at(0.0)
    # In pieces, so that it crosses no name.
    tops = [TOP + ROW_HEIGHT * k for k in range(len(figure.categories))]
    parts += [_line(zero, top + 16, zero, top + ROW_HEIGHT - 4) for top in tops]
    for series in panel.series:
        for k, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            row = TOP + ROW_HEIGHT * y + 22
            if series.kind == "bars":
                left, right = sorted((zero, x_axis.at(x)))
                parts.append(
                    f'<rect class="p0" x="{left:.1f}" y="{row - 5:g}" width="{right - left:.1f}" height="10"/>'
                )
                continue
            low, high = x_axis.at(series.low[k]), x_axis.at(series.high[k])
            parts.append(f'<line class="s0" x1="{low:.1f}" x2="{high:.1f}" y1="{row:g}" y2="{row:g}"/>')
            parts.append(_marker(x_axis.at(x), row, 0))
    for number, name in enumerate(figure.categories):
        parts.append(_text(4, TOP + ROW_HEIGHT * number + 13, name, "c"))
    parts.append(_text(WIDTH / 2, bottom + 30, figure.x_label, "l m"))
    return "".join(parts), bottom + BOTTOM


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
