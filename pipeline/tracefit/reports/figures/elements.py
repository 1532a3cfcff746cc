"""Parts of the figures of the report; only units and the limits of an axis are computed here.

Traces and layouts are dictionaries in the terms of plotly: whoever writes Markdown or JSON needs no plotly, and `page`
makes the figures of the library of them. Colours of the page come from a template, one for light and one for dark.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, TypedDict

from tracefit.errors import printable
from tracefit.text import count, number, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.diagnostics.groups import Bin
    from tracefit.diagnostics.rows import MarkedInterval
    from tracefit.reports.document import Trace

# Colours: at least 3:1 against white and against the dark page, so that one palette serves both.
BLUE, ORANGE, GREEN, PURPLE = "#3987d6", "#d9730d", "#2f9e63", "#9a6bd6"
PINK, TEAL, AMBER, GREY = "#d1558f", "#1a9ba8", "#b08500", "#7d8590"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, PINK, TEAL, AMBER, GREY)

# Translucent: regions overlap, and the data are drawn on top of them.
SHADES = {
    "training range": "rgba(125,133,144,0.14)",
    "hold-out": "rgba(125,133,144,0.14)",
    "warm-up": "rgba(57,135,214,0.20)",
    "idle": "rgba(125,133,144,0.34)",
    "queue never empty": "rgba(217,145,13,0.22)",
    "overload": "rgba(214,57,57,0.26)",
}

# -- templates: what a page or a notebook adds to every figure ---------------------------------------------


def _template(*, ink: str, soft: str, grid: str, paper: str) -> Trace:
    axis = {
        "gridcolor": grid,
        "linecolor": grid,
        "zerolinecolor": soft,
        "zerolinewidth": 1,
        "tickcolor": grid,
        # Labels hold names from traces, of any length.
        "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13}},
        "tickfont": {"color": soft},
    }
    return {
        "layout": {
            "font": {
                "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
                "size": 12.5,
                "color": ink,
            },
            # Transparent: the page shows its own colour, light or dark.
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(COLOURS),
            "xaxis": axis | {"zeroline": False},
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
            "hoverlabel": {"bgcolor": paper, "bordercolor": grid, "font": {"color": ink}, "align": "left"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": soft, "activecolor": ink},
            "bargap": 0.18,
        }
    }


TEMPLATES = {
    "light": _template(ink="#1b1f24", soft="#57606a", grid="#dfe4ea", paper="#ffffff"),
    "dark": _template(ink="#e6edf3", soft="#9aa6b2", grid="#2c343e", paper="#1b2129"),
}
CONFIG: Trace = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
}


def name_text(name: str) -> str:
    """Return a name that plotly shows as it is: in its texts `<a href=…>` would be a link."""
    return printable(name).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def anchor(text: str) -> str:
    """Return a text as a name in a page: letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to what a screen shows: five digits keep a page of thousands of points small."""
    return [None if v is None else float(f"{v:.5g}") for v in values]


def line(
    name: str,
    x: Iterable[float | None],
    y: Iterable[float | None],
    colour: str,
    *,
    dash: str = "solid",
    **more: object,
) -> Trace:
    """Draw values as a line, or as points with `mode`; `more` is in plotly's terms."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name_text(name),
        "x": rounded(x),
        "y": rounded(y),
        "line": {"width": 2, "color": colour, "dash": dash},
        **more,
    }


def shaded(intervals: Iterable[MarkedInterval]) -> list[Trace]:
    """Shade intervals of the x axis; each kind is in the legend once."""
    # In the order of `SHADES`: of regions that overlap, the one that matters most is drawn last.
    ordered = sorted(intervals, key=lambda r: list(SHADES).index(r.kind))
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": one.start,
            "x1": one.end,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"width": 0},
            "fillcolor": SHADES[one.kind],
            "name": one.kind,
            "legendgroup": one.kind,
            "showlegend": before is None or before.kind != one.kind,
        }
        for before, one in pairwise((None, *ordered))
        if one is not None
    ]


def mark(name: str, axis: str, value: float, *, colour: str = "#d63939", on: str = "paper", **more: object) -> Trace:
    """Draw a line across the figure at a value of one axis; `more` is in plotly's terms."""
    other = "y" if axis == "x" else "x"
    # A time is one time in all panels of a figure; a value belongs to the axis of one panel (`on`).
    return {
        "type": "line",
        f"{axis}ref": axis if axis == "x" else on,
        f"{other}ref": "paper",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": colour, "width": 1.5, "dash": "longdashdot"},
        "name": name,
        "showlegend": True,
        **more,
    }


def axis_of(title: str, **more: object) -> Trace:
    """Return an axis with a title; `more` is in plotly's terms."""
    return {"title": {"text": title}, **more}


_SKEWED = 20.0
"""Times the median above which the largest value would squeeze all others against the axis."""


def spread_axis(title: str, values: Sequence[float]) -> Trace:
    """Return a logarithmic axis where a few large values would squeeze all others, else a linear one."""
    ordered = sorted(values)
    # A logarithmic axis has no zero.
    skewed = ordered and ordered[0] > 0 and ordered[-1] > _SKEWED * ordered[len(ordered) // 2]
    return log_axis(title, values) if skewed else axis_of(title)


def log_axis(title: str, values: Sequence[float], **more: object) -> Trace:
    """Return a logarithmic axis with labels at powers of ten, and between them where there are few."""
    positive = [v for v in values if v > 0]
    # Within few decades labels at powers of ten alone would be one or none: "D2" adds those at 2 and 5.
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    return axis_of(title, type="log", dtick=1 if decades > 1.5 else "D2", tickformat=",~r", **more)


_TAIL = 0.01
"""Share of the points at either end that need not fit on a robust axis."""

_ENOUGH = 20
"""Fewest points for robust limits: of fewer, every point counts."""


def robust_limits(values: Iterable[float]) -> tuple[float, float] | None:
    """Return limits of an axis that a few outliers do not widen; null where every value fits well.

    They hold the middle 98 % of the values and half of its width to either side.
    """
    ordered = sorted(values)
    if len(ordered) < _ENOUGH:
        return None
    cut = int(_TAIL * len(ordered))
    low, high = ordered[cut], ordered[-1 - cut]
    room = (high - low) / 2
    if ordered[0] >= low - room and ordered[-1] <= high + room:
        return None
    return max(ordered[0], low - room), min(ordered[-1], high + room)


def limited(values: Sequence[float], *, from_zero: bool = False) -> tuple[Trace, str]:
    """Return the range of a y axis that a few outliers do not widen, and a note on the points beyond it."""
    limits = robust_limits(values)
    if limits is None:
        return ({"rangemode": "tozero"} if from_zero else {}), ""
    low, high = (min(0.0, limits[0]) if from_zero else limits[0]), limits[1]
    outside = sum(not low <= y <= high for y in values)
    note = f"{plural(outside, 'point')} {'lies' if outside == 1 else 'lie'} beyond the axis."
    return {"range": rounded((low, high))}, note


def axis_number(panel: int) -> str:
    """Return the number that plotly writes behind the axes of a panel; the first panel has none."""
    return "" if panel == 0 else str(panel + 1)


def panels(x: Trace, ys: Sequence[Trace], gap: float = 0.06) -> Trace:
    """Return the axes of panels on top of each other, which share the x axis below the last one."""
    # So many panels with a gap between each two fill the figure: panels * (height - gap) + (panels - 1) * gap = 1.
    height = (1 + gap) / len(ys)
    tops = [1 - k * height for k in range(len(ys))]
    # Rounded: differences of floats would put 17 digits of each into the page.
    domains = [[max(0.0, round(top - height + gap, 4)), round(top, 4)] for top in tops]
    axes = {f"yaxis{axis_number(k)}": {**y, "domain": domains[k]} for k, y in enumerate(ys)}
    return {"xaxis": {**x, "anchor": f"y{axis_number(len(ys) - 1)}"}, **axes}


class FigureWords(TypedDict):
    """Name and texts of a figure: see `Figure`."""

    name: str
    kind: str
    title: str
    look: str
    note: str


MEASURED_COLOR, PREDICTED_COLOR = BLUE, ORANGE


def ends_of(one: Bin) -> str:
    """Write both ends of a group of rows."""
    return f"{number(one.low)} to {number(one.high)}"


def cells_of(one: Bin) -> tuple[str, ...]:
    """Write a group of rows as cells of a table: its ends, its rows, and the three values of y."""
    return (ends_of(one), count(one.rows), *(number(v) for v in (one.median, one.p10, one.p90)))


_FAR_OFF = 10.0
"""Times the largest value above which a line would squeeze a figure."""


def objective(slo_ms: float | None, largest: float) -> str:
    """Name an objective that is drawn; empty without one, or if it is far off."""
    return "" if slo_ms is None or slo_ms > _FAR_OFF * largest else f"SLO {slo_ms:,g} ms"
