"""Figures of the report, each with a sentence that says what to look for and its numbers in a few rows.

Everything they show comes from the published evaluation, the model files and `results.figures`; nothing is computed here
but units, the limits of an axis, and the few rows under a curve of many points.

Traces and layouts are dictionaries in the terms of plotly: whoever writes Markdown or JSON needs no plotly, and `page` makes the
figures of the library of them. Colours of the page come from a template, one for light and one for dark.
"""

from __future__ import annotations

import math
import re
from itertools import cycle
from typing import TYPE_CHECKING, TypedDict, Unpack

from tracefit.coefficients.model import RegimesModel
from tracefit.errors import printable
from tracefit.features import targets
from tracefit.reports.document import Figure, Table, Trace
from tracefit.results.figures import LATENCIES, US_PER_MS, ShadedRegion
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.coefficients.model import Model, ScopeEvaluation
    from tracefit.fit.results import ErrorOverLoad
    from tracefit.reports.document import Trace
    from tracefit.results.figures import (
        Bin,
        Breakdown,
        Cloud,
        EngineRun,
        LatencyOverLoad,
        ModelRows,
        OverTime,
        Points,
        ScopeRows,
    )

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


def dots(points: Points, colour: str, *, symbol: str = "circle", opacity: float = 0.55) -> Trace:
    """Draw rows as points; what is known of each row shows on hover."""
    known = {name: values for name, values in points.facts.items() if any(v is not None for v in values)}
    # Rounded here, not by the page: a number that is not known is a dash.
    facts = [["-" if v is None else float(f"{v:.4g}") for v in values] for values in known.values()]
    lines = [f"{name_text(name)}: %{{customdata[{k}]}}" for k, name in enumerate(known)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name_text(points.name),
        "x": rounded(points.x),
        "y": rounded(points.y),
        "marker": {"color": colour, "size": 5, "opacity": opacity, "symbol": symbol},
        "customdata": list(zip(*facts, strict=True)),
        "hovertemplate": "<br>".join(lines) + "<extra></extra>",
    }


def shaded(regions: Iterable[ShadedRegion]) -> list[Trace]:
    """Shade intervals of the x axis; each kind is in the legend once."""
    # In the order of `SHADES`: of regions that overlap, the one that matters most is drawn last.
    listed: set[str] = set()
    shapes = []
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
                "showlegend": one.kind not in listed,
            }
        )
        listed.add(one.kind)
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


def domain(place: int, panels: int, gap: float = 0.06) -> list[float]:
    """Return the share of the height that a panel takes, the first one on top."""
    # So many panels with a gap between each two fill the figure: panels * (height - gap) + (panels - 1) * gap = 1.
    height = (1 + gap) / panels
    top = 1 - place * height
    # Rounded: differences of floats would put 17 digits of each into the page.
    return [max(0.0, round(top - height + gap, 4)), round(top, 4)]


class FigureWords(TypedDict):
    """What a figure is called and says: see `Figure`."""

    name: str
    kind: str
    title: str
    look: str
    note: str


_MEASURED, _PREDICTED = BLUE, ORANGE
_PART_COLOURS = {
    "every step": GREY,
    "weights": BLUE,
    "prompt tokens": ORANGE,
    "generated tokens": GREEN,
    "tokens": AMBER,
    "context": PURPLE,
    "requests": TEAL,
    "waiting requests": PINK,
    "communication": AMBER,
    "prefill": ORANGE,
}

_OVERHEAD_COLOURS = (BLUE, PINK, GREEN, PURPLE, TEAL, AMBER, GREY)
"""Of the overheads in TTFT, in the order a request goes through them; without that of the prefill."""


def _bin_table(bins: Iterable[Bin], x_name: str, y_name: str) -> Table:
    rows = tuple((_between(b), count(b.rows), *(number(v) for v in (b.median, b.p10, b.p90))) for b in bins)
    return Table((x_name, "rows", f"median {y_name}", "P10", "P90"), rows)


def _between(b: Bin) -> str:
    return f"{number(b.low)} to {number(b.high)}"


def _how_many(cloud: Cloud) -> str:
    points = sum(len(p.x) for p in cloud.points)
    if points == cloud.rows:
        return f"All {count(cloud.rows)} rows."
    return f"{count(points)} of {count(cloud.rows)} rows, evenly in time."


# Step times


def over_time_figure(scope_id: str, found: OverTime) -> Figure:
    """Draw measured and predicted step times over time; single steps show what they computed."""
    limits, note = limited([y for y in (*found.rows.y, *found.measured) if y is not None], from_zero=True)
    several = len(found.runs) > 1
    place: Trace = {"xref": "x", "y": 1, "yref": "paper", "xanchor": "left", "showarrow": False}
    names = [{"text": name_text(run), "x": at, **place} for run, at in (found.runs if several else ())]
    x = "seconds, runs one after the other" if several else "seconds into the run"
    hover = "%{y:.3~f} ms<extra>%{fullData.name}</extra>"
    return Figure(
        name=anchor(f"{scope_id}-step-times"),
        kind="step-times",
        title="Step times over time: predicted against measured",
        look="Look for times at which the two lines part: what the server did then, the model does not know.",
        note=f"Lines are means over equal intervals of time, points single steps. {note}".rstrip(),
        hint="Hover over a point for what that step computed; drag to zoom, double-click to see everything again.",
        summary=_over_time_table(found),
        traces=(
            dots(found.rows, _MEASURED, opacity=0.4) | {"name": "single steps, measured"},
            # Lines break between two runs: nothing was measured there.
            line("measured", found.at_s, found.measured, _MEASURED, connectgaps=False, hovertemplate=hover),
            line(
                "predicted", found.at_s, found.predicted, _PREDICTED, connectgaps=False, hovertemplate=hover
            ),
        ),
        layout={
            "xaxis": axis_of(x),
            "yaxis": axis_of("step time, ms", **limits),
            "shapes": shaded(found.holdout),
            "annotations": names,
        },
        wide=True,
        height=380,
    )


def _over_time_table(found: OverTime, parts: int = 8) -> Table:
    known = [
        (at, m, p)
        for at, m, p in zip(found.at_s, found.measured, found.predicted, strict=True)
        if m is not None and p is not None
    ]
    rows = []
    for k in range(parts):
        some = known[k * len(known) // parts : (k + 1) * len(known) // parts]
        if some:
            measured, predicted = (sum(row[i] for row in some) / len(some) for i in (1, 2))
            off = percent(100 * (predicted / measured - 1)) if measured else "-"
            span = f"{number(some[0][0])} to {number(some[-1][0])}"
            rows.append((span, number(measured), number(predicted), off))
    return Table(("seconds", "measured, ms", "predicted, ms", "off by %"), tuple(rows))


_LOADS = {"running_tokens": "tokens in the caches of the batch", "batch_requests": "requests in the batch"}


def load_figure(scope_id: str, found: ErrorOverLoad | None) -> Figure | None:
    """Draw errors over the load of held-out rows, the training range shaded."""
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
        name=anchor(f"{scope_id}-error-by-load"),
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


def breakdown_figure(scope_id: str, found: Breakdown) -> Figure:
    """Draw what held-out steps consist of, short steps first."""
    return _stacked(
        found,
        _PART_COLOURS,
        "step",
        "predicted step time, ms",
        name=anchor(f"{scope_id}-step-breakdown"),
        kind="step-breakdown",
        title="What a step costs",
        look="Look for the part that grows towards the long steps: that is what to change to make them shorter.",
        note="*Every step* is what even the smallest step costs: launches, and reading the weights unless they are a part of "
        "their own.",
    )


def first_token_figure(scope_id: str, found: Breakdown) -> Figure:
    """Draw what the measured TTFT consists of, requests with the shortest first."""
    overheads = targets.parts_of("ttft")
    colours = dict(zip((target.label for target in overheads), cycle(_OVERHEAD_COLOURS), strict=False))
    meanings = [f"*{target.label}* ({target.definition})" for target in overheads]
    return _stacked(
        found,
        _PART_COLOURS | colours,
        "request",
        "measured TTFT, ms",
        name=anchor(f"{scope_id}-first-token"),
        kind="first-token",
        title="Where TTFT goes",
        look="Look for what the slow requests have that the fast ones do not: a queue asks for more servers, a prefill for "
        "shorter prompts or larger steps.",
        note=f"The parts: {', '.join([*meanings, '*prefill* (first SCHEDULED to FIRST_TOKEN)'])}.",
    )


def _stacked(
    found: Breakdown, colours: Mapping[str, str], what: str, y: str, **words: Unpack[FigureWords]
) -> Figure:
    width = 100 / len(found.rows)
    at = [width * (k + 0.5) for k in range(len(found.rows))]
    groups = [f"{width * k:.0f} to {width * (k + 1):.0f} %" for k in range(len(found.rows))]
    facts = [
        "<br>".join(f"{n}: {number(v)}" for n, values in found.facts.items() if (v := values[k]) is not None)
        for k in range(len(groups))
    ]
    wholes = [sum(values[k] for values in found.parts.values()) for k in range(len(groups))]
    bars = tuple(
        {
            "type": "bar",
            "name": name_text(part),
            "x": at,
            "y": rounded(values),
            "width": 0.84 * width,
            "marker": {"color": colours.get(part, AMBER)},
            "customdata": [
                f"{percent(100 * v / whole) if whole else '-'} % of {number(whole)} ms<br>mean of {plural(n, what)}, {group}<br>{fact}"
                for v, whole, n, group, fact in zip(values, wholes, found.rows, groups, facts, strict=True)
            ],
            "hovertemplate": "%{fullData.name}: %{y:.3~f} ms<br>%{customdata}<extra></extra>",
        }
        for part, values in found.parts.items()
    )
    measured: tuple[Trace, ...] = ()
    # Parts of a step are predicted, so that the measurement beside them shows what they miss; those of TTFT are measured.
    if what == "step":
        outline = {"color": "#1b1f24", "width": 1.5}
        measured = (
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": at,
                "y": rounded(found.measured),
                "marker": {"symbol": "diamond", "size": 8, "color": "#fff", "line": outline},
                "hovertemplate": "measured: %{y:.3~f} ms<extra></extra>",
            },
        )
    rows = tuple(
        (
            group,
            count(found.rows[k]),
            *(number(v[k]) for v in found.parts.values()),
            number(found.measured[k]),
        )
        for k, group in enumerate(groups)
    )
    x = f"{what}s from the shortest to the longest, %"
    axis = axis_of(x, range=[0, 100], showgrid=False)
    return Figure(
        **words,
        summary=Table(
            (f"{what}s by length", f"{what}s", *(f"{p}, ms" for p in found.parts), "measured, ms"), rows
        ),
        traces=(*bars, *measured),
        # Relative: a part below zero, such as a negative intercept, hangs below the axis.
        layout={"xaxis": axis, "yaxis": axis_of(y), "barmode": "relative"},
    )


# One model


def model_figures(model: Model, rows: ModelRows) -> tuple[Figure, ...]:
    """Draw the rows of one model for an expert: predictions, and residuals over time and over its strongest features."""
    name = anchor(f"{model.scope_id}-{model.name}")
    overlaid = f" The runs of {rows.servers} servers overlay each other." if rows.servers > 1 else ""
    over_time = _residuals(
        rows.over_time,
        "seconds into the run",
        rows.holdout,
        name=f"{name}-time",
        kind=f"{model.name}-residuals",
        title=f"{model.name}: residuals over time",
        look="Look for a drift or a step: then the server changed, and the end of the run is not like its beginning.",
        note=f"{_how_many(rows.over_time)}{overlaid}",
    )
    over_features = (
        _residuals(
            cloud,
            feature,
            name=f"{name}-over-{anchor(feature)}",
            kind=f"{model.name}-residuals-{feature}",
            title=f"{model.name}: residuals against {feature}",
            look=f"Look for a bend in the medians: then the effect of {feature} is not linear, and predictions at its ends are "
            "biased.",
            note="Held-out rows.",
        )
        for feature, cloud in rows.over_features.items()
    )
    return (_predicted_figure(model, rows), over_time, *over_features)


def _predicted_figure(model: Model, rows: ModelRows) -> Figure:
    """Draw predicted against measured durations of held-out rows."""
    look = "Look for a cloud that leaves the line at one end: the model misses a bend there."
    if isinstance(model, RegimesModel):
        first, rest = model.regimes[0].name, model.regimes[-1].name
        look = f"Look for points of *{first}* among those of *{rest}*: there the condition between the two regimes is wrong."
    zeros = (
        f" {plural(rows.without_place, 'row')} with a zero cannot be drawn on logarithmic axes."
        if rows.without_place
        else ""
    )
    # Both axes have one scale, so that the diagonal is where a prediction is right.
    values = [v for p in rows.predicted.points for v in (*p.x, *p.y)]
    ends = (min(values, default=0.0), max(values, default=1.0))

    def axis(title: str) -> Trace:
        return log_axis(title, values) if rows.wide_range else axis_of(title)

    diagonal = line("predicted as measured", ends, ends, GREY, dash="dash", hoverinfo="skip")
    return Figure(
        name=f"{anchor(f'{model.scope_id}-{model.name}')}-against",
        kind=f"{model.name}-predicted",
        title=f"{model.name}: predicted against measured",
        look=look,
        note=f"Held out. {_how_many(rows.predicted)}{zeros}",
        summary=_bin_table(rows.predicted.bins, "measured, ms", "predicted, ms"),
        traces=(*_clouds(rows.predicted), diagonal),
        layout={"xaxis": axis("measured, ms"), "yaxis": axis("predicted, ms")},
    )


def _clouds(cloud: Cloud) -> tuple[Trace, ...]:
    styles = ((BLUE, "circle"), (ORANGE, "triangle-up"), (GREEN, "square"))
    return tuple(
        dots(p, colour, symbol=symbol) for p, (colour, symbol) in zip(cloud.points, styles, strict=False)
    )


def _residuals(
    cloud: Cloud, x: str, regions: Iterable[ShadedRegion] = (), **words: Unpack[FigureWords]
) -> Figure:
    limits, beyond = limited([y for p in cloud.points for y in p.y])
    medians = line(
        "median of each eighth", [b.middle for b in cloud.bins], [b.median for b in cloud.bins], PINK
    )
    words["note"] = f"{words['note']} {beyond}".rstrip()
    return Figure(
        **words,
        summary=_bin_table(cloud.bins, x, "residual, ms"),
        traces=(*_clouds(cloud), medians),
        layout={
            "xaxis": spread_axis(name_text(x), [v for p in cloud.points for v in p.x]),
            "yaxis": axis_of("measured - predicted, ms", zeroline=True, **limits),
            "shapes": shaded(regions),
        },
    )


# Latencies of requests

_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)
_FAR_OFF = 10.0
"""Times the largest value from which on a line would squeeze a figure."""


def _objective(slo_ms: float | None, largest: float) -> str:
    """Name an objective that is drawn; empty where there is none, or it lies far off."""
    return "" if slo_ms is None or slo_ms > _FAR_OFF * largest else f"SLO {slo_ms:,g} ms"


def distribution_figures(scope: ScopeEvaluation, rows: ScopeRows | None) -> tuple[Figure, ...]:
    """Draw distributions of request latencies: measured beside predicted, or measured alone where none is predicted.

    `rows` is null without tables.
    """
    figures = []
    for key, label in LATENCIES.items():
        entry = scope.latency.get(key)
        objective = rows.over_load.get(key) if rows is not None else None
        slo_ms = objective.slo_ms if objective else None
        name = anchor(f"{scope.scope_id}-{key}-cdf")
        if entry is not None and (found := entry.distribution) is not None:
            ways = {
                "measured": found.measured,
                "predicted, measured batches": found.teacher_forced,
                "predicted from averages": found.averages_only,
            }
            figures.append(
                _distribution(
                    {way: tuple(q / US_PER_MS for q in us) for way, us in ways.items() if us},
                    found.percents,
                    slo_ms,
                    name=name,
                    kind=key,
                    title=f"{label}, predicted and measured",
                    look="Look for where a predicted curve leaves the measured one: with measured batches, step times are wrong "
                    "there; from averages, waits and batches that an average does not show.",
                    note=f"Share of {count(found.requests)} held-out requests with at most this {label}.",
                )
            )
        elif rows is not None and key in rows.latencies_ms:
            at_ms = rows.latencies_ms[key]
            figures.append(
                _distribution(
                    {"measured": tuple(at_ms.values())},
                    tuple(at_ms),
                    slo_ms,
                    name=name,
                    kind=key,
                    title=f"{label} as measured",
                    look="Look for a long flat end: these requests waited, and a mean hides them.",
                    note=f"Share of requests with at most this {label}; no model predicts it here.",
                )
            )
    return tuple(figures)


def _distribution(
    curves: Mapping[str, tuple[float, ...]],
    percents: tuple[int, ...],
    slo_ms: float | None,
    **words: Unpack[FigureWords],
) -> Figure:
    styles = {"measured": (_MEASURED, "solid"), "predicted, measured batches": (_PREDICTED, "dash")}
    hover = "%{y} % within %{x:,.4~r} ms<extra>%{fullData.name}</extra>"
    traces = []
    for name, values in curves.items():
        colour, dash = styles.get(name, (GREEN, "dot"))
        # A logarithmic axis has no place for a zero.
        drawn = [(q, float(p)) for q, p in zip(values, percents, strict=True) if q > 0]
        xs, ys = ([point[i] for point in drawn] for i in (0, 1))
        traces.append(line(name, xs, ys, colour, dash=dash, hovertemplate=hover))
    every = [v for values in curves.values() for v in values]
    objective = _objective(slo_ms, max(every, default=0.0))
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
            "shapes": [mark(objective, "x", slo_ms)] if objective and slo_ms else [],
        },
    )


def latency_load_figure(scope_id: str, rows: ScopeRows) -> Figure | None:
    """Draw the latencies over the load, one line per run where there are several."""
    if not rows.over_load:
        return None
    several = any(len(found.runs) > 1 for found in rows.over_load.values())
    traces: list[Trace] = []
    shapes: list[Trace] = []
    axes: Trace = {}
    keys = list(rows.over_load)
    for place, (key, found) in enumerate(rows.over_load.items()):
        # plotly calls the first axis `y`, the others `y2`, `y3` and so on.
        axis = "" if place == 0 else str(place + 1)
        colours = dict(zip(found.runs, COLOURS, strict=False))
        for run, bins in found.runs.items():
            # Of several runs only the slow tenth, which objectives are about: two lines each would be too many to tell apart.
            shown = [("P90", "p90")] if several else [("median", "median"), ("P90", "p90")]
            for words, what in shown:
                colour = colours[run] if several else (BLUE if what == "median" else PINK)
                one = line(
                    run if several else words,
                    [b.middle for b in bins],
                    [getattr(b, what) for b in bins],
                    colour,
                    mode="lines+markers",
                    yaxis=f"y{axis}",
                    legendgroup=run if several else words,
                    showlegend=place == 0,
                    customdata=[f"{_between(b)} in flight, {plural(b.rows, 'request')}" for b in bins],
                    hovertemplate=f"{LATENCIES[key]} {words} %{{y:,.4~r}} ms<br>%{{customdata}}<extra>%{{fullData.name}}</extra>",
                )
                traces.append(one)
        objective = _objective(found.slo_ms, max(b.p90 for bins in found.runs.values() for b in bins))
        if objective and found.slo_ms:
            shapes.append(mark(f"{LATENCIES[key]}: {objective}", "y", found.slo_ms, on=f"y{axis}"))
        values = [v for bins in found.runs.values() for b in bins for v in (b.median, b.p90)]
        axes[f"yaxis{axis}"] = log_axis(f"{LATENCIES[key]}, ms", values, domain=domain(place, len(keys)))
    last = "" if len(keys) == 1 else str(len(keys))
    x = "requests in flight on arrival"
    return Figure(
        name=anchor(f"{scope_id}-latency-load"),
        height=130 + 130 * len(keys),
        kind="latency-by-load",
        title="Latencies against load" + (", P90 of each run" if several else ""),
        look="Look for the load from which a latency climbs: there the server is full.",
        note=f"Measured requests in groups of equal size by the traced requests in flight when each arrived."
        f"{_left_out(rows)}{_within(rows.over_load)}{_APART if several else ''}",
        summary=Table(
            ("latency", "run", "requests in flight", "requests", "median, ms", "P90, ms"),
            tuple(
                (LATENCIES[key], f"`{run}`", _between(b), count(b.rows), number(b.median), number(b.p90))
                for key, found in rows.over_load.items()
                for run, bins in found.runs.items()
                for b in bins
            ),
        ),
        traces=tuple(traces),
        layout={
            "xaxis": axis_of(x, anchor=f"y{last}", rangemode="tozero"),
            "shapes": shapes,
            **axes,
        },
    )


_APART = " Runs whose lines lie apart at one load differ in their servers or in their requests."


def _within(found: Mapping[str, LatencyOverLoad]) -> str:
    within = "; ".join(
        f"{percent(one.within_pct)} % of {count(one.requests)} requests had {LATENCIES[key]} within {one.slo_ms:,g} ms"
        for key, one in found.items()
        if one.slo_ms is not None and one.within_pct is not None
    )
    return f" Objectives (SLO): {within}; `tracefit report --slo` sets others." if within else ""


def _left_out(rows: ScopeRows) -> str:
    return f" {plural(rows.more_runs, 'more run')} not drawn." if rows.more_runs else ""


def runs_figure(scope_id: str, rows: ScopeRows) -> Figure | None:
    """Overlay the step times of several runs over the requests in the batch; null for a single run."""
    if len(rows.step_times) < 2:
        return None
    hover = "%{y:.3~f} ms<br>%{customdata}<extra>%{fullData.name}</extra>"
    return Figure(
        name=anchor(f"{scope_id}-runs"),
        kind="runs",
        title="Runs overlaid: step times against the batch",
        look="Look for lines that lie apart: one model for all of them is then wrong for each.",
        note=f"Median times of steps in groups of equal size by the requests in the batch.{_left_out(rows)}",
        summary=Table(
            ("run", "requests in the batch", "steps", "median, ms", "P10", "P90"),
            tuple(
                (f"`{run}`", _between(b), count(b.rows), *(number(v) for v in (b.median, b.p10, b.p90)))
                for run, bins in rows.step_times.items()
                for b in bins
            ),
        ),
        traces=tuple(
            line(
                run,
                [b.middle for b in bins],
                [b.median for b in bins],
                colour,
                mode="lines+markers",
                customdata=[f"{_between(b)} requests, {plural(b.rows, 'step')}" for b in bins],
                hovertemplate=hover,
            )
            for (run, bins), colour in zip(rows.step_times.items(), COLOURS, strict=False)
        ),
        layout={"xaxis": axis_of("requests in the batch"), "yaxis": axis_of("median step time, ms")},
    )


# Engines over their runs

_QUANTITIES = {
    "running": ("running", "requests running", BLUE),
    "waiting": ("waiting", "requests waiting", PINK),
    "tokens": ("tokens", "tokens per step", ORANGE),
    "kv_pct": ("KV, %", "KV blocks in use, %", PURPLE),
    "cycle_ms": ("step, ms", "step time, ms", GREEN),
}
"""Quantity to the label of its panel, what it is in full, and its colour."""


def engine_figure(engine: EngineRun) -> Figure:
    """Draw what one engine did over its run."""
    fate = ""
    if engine.overloaded is not None:
        fate = f": overloaded, {'trained on all the same' if engine.overloaded else 'left out of training'}"
    shapes = shaded(engine.regions)
    if engine.holdout_from_s is not None:
        shapes.append(mark("hold-out begins", "x", engine.holdout_from_s, colour=GREY))
    panels = len(engine.quantities)
    axes: Trace = {}
    traces = []
    for place, quantity in enumerate(engine.quantities):
        axis = "" if place == 0 else str(place + 1)
        label, full, colour = _QUANTITIES[quantity.key]
        axes[f"yaxis{axis}"] = axis_of(
            label, rangemode="tozero", nticks=4, domain=domain(place, panels, 0.05)
        )
        traces.append(
            line(
                full,
                quantity.at_s,
                quantity.values,
                colour,
                yaxis=f"y{axis}",
                showlegend=False,
                hovertemplate="%{y:,.4~r}<extra>%{fullData.name}</extra>",
            )
        )
    return Figure(
        name=anchor(f"engine-{engine.run_id}-{engine.server}"),
        height=90 + 105 * panels,
        kind="timeline",
        title=f"The engine of {engine.run_id}, {engine.server}{fate}",
        look="Look for a hold-out unlike what comes before it: then its errors say little about the rest. A queue that grows "
        "through the whole run means that the server was offered more than it can do.",
        note="Means of the traced steps over equal intervals of time; of step times the median.",
        summary=_engine_table(engine),
        traces=tuple(traces),
        layout={
            # One time, one label in each panel: panels share the axis.
            "hovermode": "x",
            "shapes": shapes,
            "xaxis": axis_of("seconds into the run", anchor=f"y{panels if panels > 1 else ''}"),
            **axes,
        },
        wide=True,
    )


def _engine_table(engine: EngineRun) -> Table:
    known = {q.key: q for q in engine.quantities}
    means = {
        "before the hold-out": [known[k].before_holdout if k in known else None for k in _QUANTITIES],
        "hold-out": [known[k].in_holdout if k in known else None for k in _QUANTITIES],
    }
    rows = [
        (label, *(number(v) for v in values))
        for label, values in means.items()
        if any(v is not None for v in values)
    ]
    for kind in dict.fromkeys(r.kind for r in engine.regions):
        lengths = [r.end - r.start for r in engine.regions if r.kind == kind]
        label = f"{kind}: {plural(len(lengths), 'interval')}, {number(sum(lengths))} s"
        rows.append((label, *[""] * len(_QUANTITIES)))
    return Table(("part of the run", *(head for _, head, _ in _QUANTITIES.values())), tuple(rows))
