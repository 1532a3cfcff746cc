"""Figures of the published evaluation: errors of step times by load, distributions of request latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from tracefit.diagnostics.groups import US_PER_MS
from tracefit.diagnostics.rows import MarkedInterval
from tracefit.fit.splits import of_means
from tracefit.models.targets import LATENCY_TITLES
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    GREEN,
    GREY,
    MEASURED_COLOR,
    ORANGE,
    PINK,
    PREDICTED_COLOR,
    FigureWords,
    anchor,
    axis_number,
    axis_of,
    line,
    log_axis,
    mark,
    objective,
    panels,
    shaded,
)
from tracefit.reports.sentences import least_exact_replay, step_entry, step_times
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.coefficients.documents import DeploymentEvaluation
    from tracefit.reports.document import Trace
    from tracefit.results.plans import PlanPoint, ServerPlan

_LOADS = {"running_tokens": "tokens in the caches of the batch", "batch_requests": "requests in the batch"}


def error_by_load_figure(deployment: DeploymentEvaluation) -> Figure | None:
    """Draw errors of step times over the load of held-out rows, the training range shaded."""
    entry = step_entry(deployment)
    over_load = entry and entry.error_over_load
    # Rows whose measurement is zero have no error in percent.
    bins = [b for b in over_load.bins if b.holdout.mdape_pct is not None] if over_load else []
    if not (entry and over_load and bins):
        return None
    low, high = over_load.training_range
    rows = "intervals of several steps" if of_means(entry) else "steps"
    at = [(b.low + b.high) / 2 for b in bins]
    hover = "%{y:.2~f} %<br>%{customdata}<extra>%{fullData.name}</extra>"
    spans = [f"load {number(b.low)} to {number(b.high)}, {count(b.holdout.n)} {rows}" for b in bins]
    shown = (
        ("typical error (median)", ORANGE, [b.holdout.mdape_pct for b in bins]),
        ("nine in ten within (P90)", PINK, [b.holdout.p90_ape_pct for b in bins]),
        ("bias", GREY, [b.holdout.bias_pct for b in bins]),
    )
    return Figure(
        name=anchor(f"{deployment.deployment_id}-error-by-load"),
        kind="error-by-load",
        title=f"Errors of {step_times(entry)} by load",
        look="Look for errors that grow, or a bias that leaves zero, outside the shaded training range: there the "
        "model extrapolates.",
        note=f"Held-out {rows} in groups of equal size.",
        summary=Table(
            (_LOADS[over_load.load], rows, "median error %", "P90 error %", "bias %", "training range"),
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
            "xaxis": axis_of(_LOADS[over_load.load], rangemode="tozero"),
            "yaxis": axis_of("error, %"),
            "shapes": shaded([MarkedInterval("training range", low, high)]),
        },
    )


# What the server did, and replays

_PERCENTS = (50, 90, 99)
_BETWEEN_PANELS = 0.12


def served_figure(deployment: DeploymentEvaluation) -> Figure | None:
    """Draw what the server did in the whole run, and in its held-out part beside a replay; of several runs the least
    exact one.
    """
    run = least_exact_replay(deployment)
    served = next((g for g in deployment.served if run is None or g.name == run.run_id), None)
    none = (None,) * len(_PERCENTS)
    rows: dict[str, dict[str, tuple[float | None, ...]]] = {}
    if served:
        rows["the whole run"] = {name: getattr(served, name).percentiles_ms for name in LATENCY_TITLES}
    for way in ("measured", "replayed") if run else ():
        rows[f"held-out part, {way}"] = {
            name: tuple(getattr(q, way) / US_PER_MS for q in run.of(name)) or none for name in LATENCY_TITLES if run
        }
    known = [name for name in LATENCY_TITLES if any(values[name] != none for values in rows.values())]
    if not known:
        return None
    errors = {
        name: ["" if q.error_pct is None else f"{q.error_pct:+.1f} %" for q in run.of(name)] if run else []
        for name in known
    }
    styles = (
        (GREY, "square", "solid"),
        (MEASURED_COLOR, "circle", "solid"),
        (PREDICTED_COLOR, "diamond", "dash"),
    )
    traces: list[Trace] = []
    axes: Trace = {}
    width = (1 - _BETWEEN_PANELS * (len(known) - 1)) / len(known)
    for panel, latency in enumerate(known):
        axis, left = axis_number(panel), panel * (width + _BETWEEN_PANELS)
        domain = [round(left, 3), round(left + width, 3)]
        axes[f"xaxis{axis}"] = axis_of("", type="category", anchor=f"y{axis}", domain=domain)
        axes[f"yaxis{axis}"] = axis_of(f"{LATENCY_TITLES[latency]}, ms", rangemode="tozero", anchor=f"x{axis}")
        for (way, values), (colour, symbol, dash) in zip(rows.items(), styles[0 if served else 1 :], strict=False):
            texts = errors[latency] if way.endswith("replayed") else []
            trace = line(
                way,
                (),
                values[latency],
                colour,
                dash=dash,
                mode="lines+markers+text" if texts else "lines+markers",
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
                marker={"symbol": symbol, "size": 8},
                text=texts,
                textposition="top center",
                cliponaxis=False,
                legendgroup=way,
                showlegend=panel == 0,
                hovertemplate=f"{LATENCY_TITLES[latency]} %{{x}}: %{{y:,.4~r}} ms<extra>%{{fullData.name}}</extra>",
            )
            traces.append(trace | {"x": [f"P{q}" for q in _PERCENTS]})
    name = run.run_id if run else served.name if served else ""
    compared = f" {count(run.requests)} held-out requests are compared." if run else " It cannot be replayed."
    several = run and len(deployment.replays) > 1
    of_many = f", the least exact of {count(len(deployment.replays))}" if several else ""
    return Figure(
        name=anchor(f"{deployment.deployment_id}-replay"),
        kind="replay",
        title="What the server did, and what a replay makes of it" if run else "What the server did",
        look="Look for a diamond off its circle: a simulation of this load would be wrong by as much."
        if run
        else "Look for a P99 far from its P50: few requests wait long.",
        note=f"Run {name}{of_many}.{compared}",
        summary=Table(
            ("latency", *(f"{way}, ms" for way in rows), *(("error",) if run else ())),
            tuple(
                (
                    f"{LATENCY_TITLES[n]} P{q}",
                    *(number(values[n][k]) for values in rows.values()),
                    *((errors[n] or [""] * 3)[k : k + 1] if run else ()),
                )
                for n in known
                for k, q in enumerate(_PERCENTS)
            ),
        ),
        traces=tuple(traces),
        layout=axes,
        wide=True,
        height=300,
    )


def rates_figure(deployment: DeploymentEvaluation, slo_ms: Mapping[str, float]) -> Figure | None:
    """Draw what one server would do over the rate, dotted beyond the training; on a page a rate and an objective can be
    moved.
    """
    if len(deployment.rates) < 2:
        return None
    recorded = {f"recorded: {g.name}": g.requests_per_s for g in deployment.served if g.requests_per_s}
    return _over_rates(
        deployment.rates,
        dict(list(recorded.items())[:_MARKED_RUNS]),
        {f"{name}_p99_ms": ms for name, ms in slo_ms.items()},
        name=anchor(f"{deployment.deployment_id}-rates"),
        kind="rates",
        title="Latency against rate, for one server",
        look=_CLIMBS,
        note="Replays of requests like those traced, up to the rate that the server can serve. Thin lines are the "
        "rates of the recorded runs. `tracefit plan` has more: several servers, other lengths, settings, costs.",
    )


def plan_figure(plan: ServerPlan) -> Figure | None:
    """Draw planned servers over the rate, with the objectives; null where nothing could be replayed."""
    if len(plan.curve) < 2:
        return None
    marks = {"at": plan.at.rate_per_s if plan.at else None, "knee": plan.knee_per_s}
    counted = plural(plan.servers or 1, "server")
    return _over_rates(
        plan.curve,
        {name: rate for name, rate in marks.items() if rate},
        {one.name: one.limit_ms for one in plan.objectives},
        name=anchor(f"{plan.folder}-{plan.deployment_id}-plan"),
        kind="plan",
        title=f"Latency against rate, for {counted} of `{plan.deployment_id}`",
        look=_CLIMBS,
        note=f"Replays of {plan.load.source if plan.load else 'requests'}, up to the rate that {counted} can serve. "
        "Thin lines are the planned rate and the knee.",
    )


_CLIMBS = (
    "Look for the rate from which a line climbs: there a server is full. Dotted lines rest on steps unlike "
    "those of the training."
)


def _over_rates(
    points: Sequence[PlanPoint],
    marked: Mapping[str, float],
    limits: Mapping[str, float],
    **words: Unpack[FigureWords],
) -> Figure:
    """Draw percentiles over the rate; `marked` are rates by name, the first of them where the movable one begins."""
    measured = {one.name for one in points[0].latencies}
    series = {
        f"{label} P{q}": name
        for latency, label in LATENCY_TITLES.items()
        for q in _PERCENTS
        if (name := f"{latency}_p{q}_ms") in measured
    }
    labels = list(dict.fromkeys(shown.split()[0] for shown in series))
    rates = [p.rate_per_s for p in points]
    # The rates of a curve are up to the capacity: there every latency has a value.
    values = {shown: [p.latency(name).value or 0.0 for p in points] for shown, name in series.items()}
    outside = [p.extrapolates for p in points]
    traces, axes = [], []
    hover = "%{y:,.4~r} ms at %{x:,.3~r} requests/s<extra>%{fullData.name}</extra>"
    for panel, label in enumerate(labels):
        for q, colour in zip(_PERCENTS, (MEASURED_COLOR, GREEN, PINK), strict=True):
            for dash, y in _inside_and_outside(values[f"{label} P{q}"], outside).items():
                traces.append(
                    line(
                        f"P{q}" + (", beyond the training" if dash == "dot" else ""),
                        rates,
                        y,
                        colour,
                        dash=dash,
                        yaxis=f"y{axis_number(panel)}",
                        legendgroup=f"P{q}",
                        showlegend=panel == 0 and dash == "solid",
                        hovertemplate=hover,
                    )
                )
        axes.append(log_axis(f"{label}, ms", [v for n in values if n.startswith(label) for v in values[n]]))
    at = min(max(next(iter(marked.values()), rates[0]), rates[0]), rates[-1])
    thin = {"color": MEASURED_COLOR, "width": 1, "dash": "dot"}
    shapes = [
        mark("rate", "x", at, colour=GREY, showlegend=False),
        mark("objective", "y", 1.0, on="y", showlegend=False, visible=False),
        *(mark(name, "x", rate, line=thin, showlegend=False) for name, rate in marked.items()),
    ]
    ends = [p.latency("ttft_p99_ms") for p in points]
    return Figure(
        **words,
        summary=Table(
            ("requests/s", *values, "TTFT P99 between", "waiting", "beyond the training"),
            tuple(
                (
                    number(p.rate_per_s),
                    *(number(v[k]) for v in values.values()),
                    f"{number(ends[k].low)} and {number(ends[k].high) if ends[k].high else 'any'}",
                    number(p.waiting_mean),
                    "yes" if p.extrapolates else "no",
                )
                for k, p in enumerate(points)
            ),
        ),
        traces=tuple(traces),
        layout={"shapes": shapes, **panels(axis_of("requests per second"), axes)},
        wide=True,
        height=150 + 130 * len(labels),
        curves={
            "rates": rates,
            "values": values,
            "outside": outside,
            "rate": at,
            "limits": {shown: limits[name] for shown, name in series.items() if name in limits},
            "axes": {shown: f"y{axis_number(labels.index(shown.split()[0]))}" for shown in series},
        },
    )


_MARKED_RUNS = 6


def _inside_and_outside(values: Sequence[float], outside: Sequence[bool]) -> dict[str, list[float | None]]:
    """Return a line in two styles: solid between rates inside the training, dotted from and to those outside; gaps
    elsewhere.
    """
    styles: dict[str, list[float | None]] = {"solid": [None] * len(values), "dot": [None] * len(values)}
    for k in range(len(values) - 1):
        style = styles["dot" if outside[k] or outside[k + 1] else "solid"]
        style[k], style[k + 1] = values[k], values[k + 1]
    return {dash: y for dash, y in styles.items() if any(v is not None for v in y)}


def queue_figure(deployment: DeploymentEvaluation) -> Figure | None:
    """Draw the queue over time of the replay that is least exact, measured and replayed; null where nobody waits."""
    run = least_exact_replay(deployment)
    if run is None or not any(w.measured or w.replayed for w in run.queue):
        return None
    at = [w.from_s for w in run.queue]
    return Figure(
        name=anchor(f"{deployment.deployment_id}-replayed-queue"),
        kind="queue",
        title="Queue over time: replayed against measured",
        look="Look for times at which one queue grows and the other does not: errors of a queue add up.",
        note=f"Mean number of requests between arrival and first schedule, run {run.run_id}.",
        summary=Table(
            ("from, s", "measured", "replayed"),
            tuple((number(w.from_s), number(w.measured), number(w.replayed)) for w in run.queue[::4]),
        ),
        traces=(
            line("measured", at, [w.measured for w in run.queue], MEASURED_COLOR),
            line("replayed", at, [w.replayed for w in run.queue], PREDICTED_COLOR, dash="dash"),
        ),
        layout={
            "xaxis": axis_of("seconds of the held-out part"),
            "yaxis": axis_of("requests", rangemode="tozero"),
        },
    )


# Latencies of requests

_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)


def distribution_figures(
    deployment: DeploymentEvaluation,
    measured_ms: Mapping[str, Mapping[int, float]],
    slo_ms: Mapping[str, float],
) -> tuple[Figure, ...]:
    """Draw distributions of request latencies: measured beside predicted, or measured alone where none is predicted.

    Args:
        deployment: The evaluation.
        measured_ms: Latency to its measured percentiles, percent to value; empty without tables.
        slo_ms: The longest each latency should take.
    """
    figures = []
    for key, label in LATENCY_TITLES.items():
        entry = deployment.latency.get(key)
        if quantiles := entry and entry.distribution:
            ways = {
                "measured": quantiles.measured,
                "predicted on arrival": quantiles.predicted,
                "given the measured queue and batches": quantiles.given_measured_state,
            }
            curves = {way: tuple(q / US_PER_MS for q in us) for way, us in ways.items() if us}
            percents, title = quantiles.percents, f"{label}, predicted and measured"
            look = (
                "Look for where a predicted curve leaves the measured one: given the measured batches, step times "
                "are wrong there; on arrival, what comes after it changes the batch."
            )
            note = f"Share of {count(quantiles.requests)} held-out requests with at most this {label}."
        elif at_ms := measured_ms.get(key):
            curves, percents = {"measured": tuple(at_ms.values())}, tuple(at_ms)
            title = f"{label} as measured"
            look = "Look for a long flat end: these requests waited, and a mean hides them."
            note = f"Share of requests with at most this {label}; no model predicts it here."
        else:
            continue
        name = anchor(f"{deployment.deployment_id}-{key}-cdf")
        words = FigureWords(name=name, kind=key, title=title, look=look, note=note)
        figures.append(_distribution(curves, percents, slo_ms.get(key), **words))
    return tuple(figures)


def _distribution(
    curves: Mapping[str, tuple[float, ...]],
    percents: tuple[int, ...],
    slo_ms: float | None,
    **words: Unpack[FigureWords],
) -> Figure:
    styles = {"measured": (MEASURED_COLOR, "solid"), "predicted on arrival": (PREDICTED_COLOR, "dash")}
    hover = "%{y} % within %{x:,.4~r} ms<extra>%{fullData.name}</extra>"
    traces = []
    for name, values in curves.items():
        colour, dash = styles.get(name, (GREEN, "dot"))
        # A logarithmic axis has no zero.
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
            "xaxis": log_axis(f"{LATENCY_TITLES[words['kind']]}, ms", every),
            # Beyond 100: a line along the edge would be cut in half.
            "yaxis": axis_of("requests, %", range=[0, 102]),
            "shapes": [mark(words_of_slo, "x", slo_ms)] if words_of_slo and slo_ms else [],
        },
    )
