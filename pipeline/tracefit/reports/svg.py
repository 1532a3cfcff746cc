"""Figures as SVG: text that is text, colours that follow the page's, no dependency.

Widths are in the units of a narrow screen, so that letters stay readable where the picture is not scaled up.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from tracefit.reports.axes import Axis, axis_of, spaced, tick_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.reports.model import Figure, Panel, Series

NARROW, WIDE = 420.0, 1080.0
LEFT, RIGHT, TOP = 52.0, 12.0, 4.0
LABEL_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 18.0, 36.0, 18.0
PANEL_HEIGHT, STACKED_HEIGHT, GAP = 240.0, 88.0, 10.0
ROW_HEIGHT = 34.0
CHAR_WIDTH = 6.1
"""Width of a letter of a legend, on the average."""

_BANDS = {"hold-out": 0, "training range": 0, "warm-up": 1, "idle": 2, "queue never empty": 3, "overload": 4}
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
    return [*drawn, *(end for b in figure.bands for end in (b.start, b.end)), *(x for x, _ in figure.marks)]


def _panel(figure: Figure, panel: Panel, x_axis: Axis, top: float, bottom: float) -> Iterator[str]:
    y_axis = _y_axis(panel, top, bottom)
    left, right = x_axis.start, x_axis.end
    yield _rect("f", left, right, top, bottom)
    for band in figure.bands:
        start, end = x_axis.at(band.start), x_axis.at(band.end)
        yield _rect(f"b{_BANDS[band.kind]}", start, max(end, start + 1), top, bottom)
        if band.kind == "overload":
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
    for number, series in enumerate(panel.series):
        yield _drawn(series, x_axis, y_axis, number)


def _y_axis(panel: Panel, top: float, bottom: float) -> Axis:
    values = [y for s in panel.series for y in s.y]
    values += [x for s in panel.series for x in s.x] if panel.diagonal else []
    values += [0.0] if panel.zero else []
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
        # A line of no length with round ends is a dot.
        dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in places)
        return f'<path class="p{number}" d="{dots}"/>'
    triangles = "".join(f"M{x:.1f} {y - 2.8:.1f}l2.6 4.6h-5.2z" for x, y in places)
    return f'<path class="q{number}" d="{triangles}"/>'


def _sample(series: Series, number: int) -> str:
    """Draw what stands for a series in a legend, about (0, 0) to (16, 0)."""
    return _line(f"s{number}", 0, 0, 16, 0) if series.kind == "line" else _points([(8, 0)], number)


def _marked(figure: Figure) -> list[tuple[str, str]]:
    """Return the legend of what is marked along the x axis."""
    kinds = dict.fromkeys(sorted((b.kind for b in figure.bands), key=_BANDS.__getitem__))
    swatches = [(k, _rect(f"b{_BANDS[k]} e", 0, 16, -5, 5)) for k in kinds]
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
    # In pieces, so that they cross no name.
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
