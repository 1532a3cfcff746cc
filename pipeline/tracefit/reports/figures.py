"""Figures of the report, each with a sentence that says what to look for and its numbers in a few rows.

Everything they show comes from the published evaluation, the model files and `results.figures`; nothing is computed here
but units, the limits of an axis, and the few rows under a curve of many points. They are made of the pieces in `plots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import RegimesModel
from tracefit.reports.document import Figure, Table, Trace
from tracefit.reports.plots import (
    AMBER,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    TEAL,
    anchor,
    axis_of,
    domain,
    dots,
    layout,
    limited,
    line,
    log_axis,
    mark,
    name_text,
    rounded,
    shaded,
    spread_axis,
)
from tracefit.reports.text import count, number, percent, plural
from tracefit.results.figures import LATENCIES, US_PER_MS, ShadedRegion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefit.coefficients.model import Model, ScopeEvaluation
    from tracefit.fit.results import Distribution, ErrorOverLoad
    from tracefit.results.figures import (
        Bin,
        Breakdown,
        Cloud,
        EngineRun,
        LatencyOverLoad,
        ModelRows,
        OverTime,
        ScopeRows,
    )

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
    "admission": BLUE,
    "queue": PINK,
    "prefill": ORANGE,
}


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
    names = [
        {
            "text": name_text(run),
            "x": at,
            "xref": "x",
            "y": 1,
            "yref": "paper",
            "xanchor": "left",
            "showarrow": False,
        }
        for run, at in (found.runs if several else ())
    ]
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
        layout=layout(x, "step time, ms", shapes=shaded(found.holdout), annotations=names)
        | {"yaxis": axis_of("step time, ms", **limits)},
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
        layout=layout(
            _LOADS[found.load], "error, %", shapes=shaded([ShadedRegion("training range", low, high)])
        )
        | {"xaxis": axis_of(_LOADS[found.load], rangemode="tozero")},
    )


def breakdown_figure(scope_id: str, found: Breakdown) -> Figure:
    """Draw what held-out steps consist of, short steps first."""
    return _stacked(
        found,
        name=anchor(f"{scope_id}-step-breakdown"),
        kind="step-breakdown",
        title="What a step costs",
        look="Look for the part that grows towards the long steps: that is what to change to make them shorter.",
        note="*Every step* is what even the smallest step costs: launches, and reading the weights unless they are a part of "
        "their own.",
        what="step",
        y="predicted step time, ms",
    )


def first_token_figure(scope_id: str, found: Breakdown) -> Figure:
    """Draw what the measured TTFT consists of, requests with the shortest first."""
    return _stacked(
        found,
        name=anchor(f"{scope_id}-first-token"),
        kind="first-token",
        title="Where TTFT goes",
        look="Look for what the slow requests have that the fast ones do not: a queue asks for more servers, a prefill for "
        "shorter prompts or larger steps.",
        note="*Admission* is arrival to the queue, *queue* to the first step, *prefill* to the first token.",
        what="request",
        y="measured TTFT, ms",
    )


def _stacked(
    found: Breakdown, *, name: str, kind: str, title: str, look: str, note: str, what: str, y: str
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
            "marker": {"color": _PART_COLOURS.get(part, AMBER)},
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
        diamond = {
            "symbol": "diamond",
            "size": 8,
            "color": "#fff",
            "line": {"color": "#1b1f24", "width": 1.5},
        }
        measured = (
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": at,
                "y": rounded(found.measured),
                "marker": diamond,
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
        name=name,
        kind=kind,
        title=title,
        look=look,
        note=note,
        summary=Table(
            (f"{what}s by length", f"{what}s", *(f"{p}, ms" for p in found.parts), "measured, ms"), rows
        ),
        traces=(*bars, *measured),
        # Relative: a part below zero, such as a negative intercept, hangs below the axis.
        layout=layout(x, y, barmode="relative") | {"xaxis": axis},
    )


# One model


def model_figures(model: Model, rows: ModelRows) -> tuple[Figure, ...]:
    """Draw the rows of one model for an expert: predictions, and residuals over time and over its strongest features."""
    name = anchor(f"{model.scope_id}-{model.name}")
    return (
        predicted_figure(model, rows),
        _residuals_over_time(name, model.name, rows),
        *(_residuals_over(name, model.name, f, cloud) for f, cloud in rows.over_features.items()),
    )


def predicted_figure(model: Model, rows: ModelRows) -> Figure:
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
        layout=layout("measured, ms", "predicted, ms")
        | {"xaxis": axis("measured, ms"), "yaxis": axis("predicted, ms")},
    )


def _clouds(cloud: Cloud) -> tuple[Trace, ...]:
    styles = ((BLUE, "circle"), (ORANGE, "triangle-up"), (GREEN, "square"))
    return tuple(
        dots(p, colour, symbol=symbol) for p, (colour, symbol) in zip(cloud.points, styles, strict=False)
    )


def _residuals_over_time(name: str, model_name: str, rows: ModelRows) -> Figure:
    overlaid = f" The runs of {rows.servers} servers overlay each other." if rows.servers > 1 else ""
    return _residuals(
        rows.over_time,
        x="seconds into the run",
        name=f"{name}-time",
        kind=f"{model_name}-residuals",
        title=f"{model_name}: residuals over time",
        look="Look for a drift or a step: then the server changed, and the end of the run is not like its beginning.",
        note=f"{_how_many(rows.over_time)}{overlaid}",
        regions=rows.holdout,
    )


def _residuals_over(name: str, model_name: str, feature: str, cloud: Cloud) -> Figure:
    """Draw residuals against one of the terms that move the prediction most."""
    return _residuals(
        cloud,
        x=feature,
        name=f"{name}-over-{anchor(feature)}",
        kind=f"{model_name}-residuals-{feature}",
        title=f"{model_name}: residuals against {feature}",
        look=f"Look for a bend in the medians: then the effect of {feature} is not linear, and predictions at its ends are "
        "biased.",
        note="Held-out rows.",
    )


def _residuals(
    cloud: Cloud,
    *,
    x: str,
    name: str,
    kind: str,
    title: str,
    look: str,
    note: str,
    regions: Iterable[ShadedRegion] = (),
) -> Figure:
    limits, beyond = limited([y for p in cloud.points for y in p.y])
    medians = line(
        "median of each eighth", [b.middle for b in cloud.bins], [b.median for b in cloud.bins], PINK
    )
    return Figure(
        name=name,
        kind=kind,
        title=title,
        look=look,
        note=f"{note} {beyond}".rstrip(),
        summary=_bin_table(cloud.bins, x, "residual, ms"),
        traces=(*_clouds(cloud), medians),
        layout=layout(x, "measured - predicted, ms", shapes=shaded(regions))
        | {
            "xaxis": spread_axis(name_text(x), [v for p in cloud.points for v in p.x]),
            "yaxis": axis_of("measured - predicted, ms", zeroline=True, **limits),
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

    Args:
        scope: The scope's evaluation.
        rows: What its tables hold; null without tables.
    """
    figures = []
    for key, label in LATENCIES.items():
        entry = scope.latency.get(key)
        objective = rows.over_load.get(key) if rows is not None else None
        slo_ms = objective.slo_ms if objective else None
        if entry is not None and entry.distribution is not None:
            figures.append(_compared(entry.distribution, key, scope.scope_id, slo_ms))
        elif rows is not None and key in rows.latencies_ms:
            at_ms = rows.latencies_ms[key]
            curves = {"measured": tuple(at_ms.values())}
            look = "Look for a long flat end: these requests waited, and a mean hides them."
            note = f"Share of requests with at most this {label}; no model predicts it here."
            figures.append(
                _distribution(
                    curves, tuple(at_ms), key, scope.scope_id, slo_ms, (f"{label} as measured", look, note)
                )
            )
    return tuple(figures)


def _compared(found: Distribution, key: str, scope_id: str, slo_ms: float | None) -> Figure:
    label = LATENCIES[key]
    ways = {
        "measured": found.measured,
        "predicted, measured batches": found.teacher_forced,
        "predicted from averages": found.averages_only,
    }
    curves = {name: tuple(q / US_PER_MS for q in quantiles) for name, quantiles in ways.items() if quantiles}
    look = (
        "Look for where a predicted curve leaves the measured one: with measured batches, step times are wrong there; from "
        "averages, waits and batches that an average does not show."
    )
    note = f"Share of {count(found.requests)} held-out requests with at most this {label}."
    title = f"{label}, predicted and measured"
    return _distribution(curves, found.percents, key, scope_id, slo_ms, (title, look, note))


def _distribution(
    curves: Mapping[str, tuple[float, ...]],
    percents: tuple[int, ...],
    key: str,
    scope_id: str,
    slo_ms: float | None,
    words: tuple[str, str, str],
) -> Figure:
    title, look, note = words
    styles = {"measured": (_MEASURED, "solid"), "predicted, measured batches": (_PREDICTED, "dash")}
    traces = []
    for name, values in curves.items():
        colour, dash = styles.get(name, (GREEN, "dot"))
        # A logarithmic axis has no place for a zero.
        drawn = [(q, p) for q, p in zip(values, percents, strict=True) if q > 0]
        hover = "%{y} % within %{x:,.4~r} ms<extra>%{fullData.name}</extra>"
        xs, ys = [q for q, _ in drawn], [float(p) for _, p in drawn]
        traces.append(line(name, xs, ys, colour, dash=dash, hovertemplate=hover))
    objective = _objective(slo_ms, max((max(v) for v in curves.values()), default=0.0))
    written = [(k, p) for k, p in enumerate(percents) if p in _WRITTEN_PERCENTS]
    x = f"{LATENCIES[key]}, ms"
    return Figure(
        name=anchor(f"{scope_id}-{key}-cdf"),
        kind=key,
        title=title,
        look=look,
        note=note,
        summary=Table(
            ("of requests", *(f"{name}, ms" for name in curves)),
            tuple((f"P{p}", *(number(values[k]) for values in curves.values())) for k, p in written),
        ),
        traces=tuple(traces),
        layout=layout(x, "requests, %", shapes=[mark(objective, "x", slo_ms)] if objective and slo_ms else [])
        | {
            "xaxis": log_axis(x, [v for values in curves.values() for v in values]),
            # Beyond 100: a line along the edge would be cut in half.
            "yaxis": axis_of("requests, %", range=[0, 102]),
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
        layout=layout("requests in the batch", "median step time, ms"),
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
