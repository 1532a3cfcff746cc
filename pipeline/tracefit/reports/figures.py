"""What figures of the report are put together from, and those that show the published evaluation.

A figure has a sentence that says what to look for, and its numbers in a few rows. Those of rows, requests and engines are
drawn in `commands.figures`, which reads the tables; nothing is computed here but units and the limits of an axis.

Traces and layouts are dictionaries in the terms of plotly: whoever writes Markdown or JSON needs no plotly, and `page` makes the
figures of the library of them. Colours of the page come from a template, one for light and one for dark.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, Unpack

from tracefit.errors import printable
from tracefit.features.targets import LATENCIES
from tracefit.reports.document import Figure, Table
from tracefit.reports.sentences import step_entry
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.coefficients.model import ScopeEvaluation
    from tracefit.reports.document import Trace

US_PER_MS = 1e3

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
    """Draw values as a line; `more` is in plotly's terms."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name_text(name),
        "x": rounded(x),
        "y": rounded(y),
        "line": {"width": 2, "color": colour, "dash": dash},
        **more,
    }


RegionKind = Literal["training range", "hold-out", "warm-up", "idle", "queue never empty", "overload"]


class ShadedRegion(NamedTuple):
    """An interval of the x axis with a meaning."""

    kind: RegionKind
    start: float
    end: float


def shaded(regions: Iterable[ShadedRegion]) -> list[Trace]:
    """Shade intervals of the x axis; each kind is in the legend once."""
    # In the order of `SHADES`: of regions that overlap, the one that matters most is drawn last.
    shapes: list[Trace] = []
    for one in sorted(regions, key=lambda r: list(SHADES).index(r.kind)):
        shapes.append(
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
                "showlegend": all(other["name"] != one.kind for other in shapes),
            }
        )
    return shapes


def mark(
    name: str,
    axis: str,
    value: float,
    *,
    colour: str = "#d63939",
    on: str = "paper",
) -> Trace:
    """Draw a line across the figure at a value of one axis."""
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
    }


def axis_of(title: str, **more: object) -> Trace:
    """Return an axis with a title; `more` is in plotly's terms."""
    return {"title": {"text": title}, **more}


_SKEWED = 20.0
"""Times the median from which on a largest value would squeeze all others against the axis."""


def spread_axis(title: str, values: Sequence[float]) -> Trace:
    """Return a logarithmic axis where a few large values would squeeze all others, else a linear one."""
    ordered = sorted(values)
    # A zero has no place on a logarithmic axis.
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
    """Return the range of a y axis that a few outliers do not widen, and a note on what lies beyond it."""
    limits = robust_limits(values)
    if limits is None:
        return ({"rangemode": "tozero"} if from_zero else {}), ""
    low, high = (min(0.0, limits[0]) if from_zero else limits[0]), limits[1]
    outside = sum(not low <= y <= high for y in values)
    note = f"{plural(outside, 'point')} {'lies' if outside == 1 else 'lie'} beyond the axis."
    return {"range": rounded((low, high))}, note


def axis_number(place: int) -> str:
    """Return what plotly has behind the `y` of a panel's axis, the first one on top."""
    return "" if place == 0 else str(place + 1)


def panels(x: Trace, ys: Sequence[Trace], gap: float = 0.06) -> Trace:
    """Return the axes of panels on top of each other, which share the x axis below the last one."""
    # So many panels with a gap between each two fill the figure: panels * (height - gap) + (panels - 1) * gap = 1.
    height = (1 + gap) / len(ys)
    tops = [1 - place * height for place in range(len(ys))]
    # Rounded: differences of floats would put 17 digits of each into the page.
    domains = [[max(0.0, round(top - height + gap, 4)), round(top, 4)] for top in tops]
    axes = {f"yaxis{axis_number(k)}": {**y, "domain": domains[k]} for k, y in enumerate(ys)}
    return {"xaxis": {**x, "anchor": f"y{axis_number(len(ys) - 1)}"}, **axes}


class FigureWords(TypedDict):
    """What a figure is called and says: see `Figure`."""

    name: str
    kind: str
    title: str
    look: str
    note: str


MEASURED, PREDICTED = BLUE, ORANGE


@dataclass(frozen=True, slots=True)
class ScopeFigures:
    """The figures of one scope.

    Attributes:
        first: Those every reader looks at, in reading order.
        latencies: Distributions of the request latencies.
        models: Those of the rows of each model, by its name.
        note: On engines that are not drawn; empty where all are.
    """

    first: tuple[Figure, ...]
    latencies: tuple[Figure, ...]
    models: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)
    note: str = ""

    def by_name(self) -> dict[str, Figure]:
        """Return every figure by the name that `plot` knows it by."""
        named: dict[str, Figure] = {}
        for figure in (*self.first, *self.latencies, *chain.from_iterable(self.models.values())):
            # Each engine has a figure of one kind: the second one is `timeline-2`.
            taken = sum(f.kind == figure.kind for f in named.values())
            named[f"{figure.kind}-{taken + 1}" if taken else figure.kind] = figure
        return named


def figures_of_evaluation(scope: ScopeEvaluation) -> ScopeFigures:
    """Return the figures that need no tables."""
    by_load = error_by_load_figure(scope)
    return ScopeFigures((by_load,) if by_load else (), distribution_figures(scope, {}, {}))


_LOADS = {"running_tokens": "tokens in the caches of the batch", "batch_requests": "requests in the batch"}


def error_by_load_figure(scope: ScopeEvaluation) -> Figure | None:
    """Draw errors of step times over the load of held-out rows, the training range shaded."""
    entry = step_entry(scope)
    found = entry.error_over_load if entry else None
    # Rows whose measurement is zero have no error in percent.
    bins = [b for b in found.bins if b.holdout.mdape_pct is not None] if found else []
    if found is None or not bins:
        return None
    low, high = found.training_range
    at = [(b.low + b.high) / 2 for b in bins]
    hover = "%{y:.2~f} %<br>%{customdata}<extra>%{fullData.name}</extra>"
    spans = [f"load {number(b.low)} to {number(b.high)}, {count(b.holdout.n)} steps" for b in bins]
    shown = (
        ("typical error (median)", ORANGE, [b.holdout.mdape_pct for b in bins]),
        ("nine in ten within (P90)", PINK, [b.holdout.p90_ape_pct for b in bins]),
        ("bias", GREY, [b.holdout.bias_pct for b in bins]),
    )
    return Figure(
        name=anchor(f"{scope.scope_id}-error-by-load"),
        kind="error-by-load",
        title="Errors of step times by load",
        look="Look for errors that grow, or a bias that leaves zero, outside the shaded training range: there the model "
        "extrapolates.",
        note="Held-out steps in groups of equal size.",
        summary=Table(
            (_LOADS[found.load], "steps", "median error %", "P90 error %", "bias %", "training range"),
            tuple(
                (
                    f"{number(b.low)} to {number(b.high)}",
                    count(b.holdout.n),
                    *(percent(v) for v in (b.holdout.mdape_pct, b.holdout.p90_ape_pct, b.holdout.bias_pct)),
                    "inside" if b.high <= high and b.low >= low else "beyond",
                )
                for b in bins
            ),
        ),
        traces=tuple(
            line(name, at, values, colour, mode="lines+markers", customdata=spans, hovertemplate=hover)
            for name, colour, values in shown
        ),
        layout={
            "xaxis": axis_of(_LOADS[found.load], rangemode="tozero"),
            "yaxis": axis_of("error, %"),
            "shapes": shaded([ShadedRegion("training range", low, high)]),
        },
    )


# Latencies of requests

_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)
_FAR_OFF = 10.0
"""Times the largest value from which on a line would squeeze a figure."""


def objective(slo_ms: float | None, largest: float) -> str:
    """Name an objective that is drawn; empty where there is none, or it lies far off."""
    return "" if slo_ms is None or slo_ms > _FAR_OFF * largest else f"SLO {slo_ms:,g} ms"


def distribution_figures(
    scope: ScopeEvaluation, measured_ms: Mapping[str, Mapping[int, float]], slo_ms: Mapping[str, float]
) -> tuple[Figure, ...]:
    """Draw distributions of request latencies: measured beside predicted, or measured alone where none is predicted.

    Args:
        scope: The evaluation.
        measured_ms: Latency to its measured percentiles, percent to value; empty without tables.
        slo_ms: The longest each latency should take.
    """
    figures = []
    for key, label in LATENCIES.items():
        entry = scope.latency.get(key)
        if found := entry.distribution if entry else None:
            ways = {
                "measured": found.measured,
                "predicted on arrival": found.predicted,
                "given the measured queue and batches": found.given_measured_state,
            }
            curves = {way: tuple(q / US_PER_MS for q in us) for way, us in ways.items() if us}
            percents, title = found.percents, f"{label}, predicted and measured"
            look = (
                "Look for where a predicted curve leaves the measured one: given the measured batches, step times are wrong "
                "there; on arrival, what comes after it changes the batch."
            )
            note = f"Share of {count(found.requests)} held-out requests with at most this {label}."
        elif at_ms := measured_ms.get(key):
            curves, percents, title = (
                {"measured": tuple(at_ms.values())},
                tuple(at_ms),
                f"{label} as measured",
            )
            look = "Look for a long flat end: these requests waited, and a mean hides them."
            note = f"Share of requests with at most this {label}; no model predicts it here."
        else:
            continue
        name = anchor(f"{scope.scope_id}-{key}-cdf")
        words = FigureWords(name=name, kind=key, title=title, look=look, note=note)
        figures.append(_distribution(curves, percents, slo_ms.get(key), **words))
    return tuple(figures)


def _distribution(
    curves: Mapping[str, tuple[float, ...]],
    percents: tuple[int, ...],
    slo_ms: float | None,
    **words: Unpack[FigureWords],
) -> Figure:
    styles = {"measured": (MEASURED, "solid"), "predicted on arrival": (PREDICTED, "dash")}
    hover = "%{y} % within %{x:,.4~r} ms<extra>%{fullData.name}</extra>"
    traces = []
    for name, values in curves.items():
        colour, dash = styles.get(name, (GREEN, "dot"))
        # A logarithmic axis has no place for a zero.
        drawn = [(q, float(p)) for q, p in zip(values, percents, strict=True) if q > 0]
        xs, ys = ([point[i] for point in drawn] for i in (0, 1))
        traces.append(line(name, xs, ys, colour, dash=dash, hovertemplate=hover))
    every = [v for values in curves.values() for v in values]
    words_of_slo = objective(slo_ms, max(every, default=0.0))
    written = [(k, p) for k, p in enumerate(percents) if p in _WRITTEN_PERCENTS]
    return Figure(
        **words,
        summary=Table(
            ("of requests", *(f"{name}, ms" for name in curves)),
            tuple((f"P{p}", *(number(values[k]) for values in curves.values())) for k, p in written),
        ),
        traces=tuple(traces),
        layout={
            "xaxis": log_axis(f"{LATENCIES[words['kind']]}, ms", every),
            # Beyond 100: a line along the edge would be cut in half.
            "yaxis": axis_of("requests, %", range=[0, 102]),
            "shapes": [mark(words_of_slo, "x", slo_ms)] if words_of_slo and slo_ms else [],
        },
    )
