"""Figures of the report, each with a caption that says what to look for and the numbers behind it.

Everything they show comes from the published evaluation, the model files and `results.figures`; nothing is computed here
but units and the limits of an axis.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tracefit.coefficients.model import RegimesModel, Term
from tracefit.reports.document import Figure, Panel, Series, Table
from tracefit.reports.model_section import AnyModel, terms_of
from tracefit.reports.text import count, exact, number, plural
from tracefit.results.figures import ShadedRegion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.coefficients.evaluation import DistributionEntry, Entry, ScopeEvaluation
    from tracefit.fit.results import ErrorOverLoad
    from tracefit.results.figures import Bin, Cloud, EngineRun, LatencyOverLoad, ModelRows, ScopeRows

US_PER_MS = 1e3
_TAIL = 0.01
"""Share of the points at either end that need not fit on a robust axis."""

_ENOUGH = 20
"""Fewest points for robust limits: of fewer, every point counts."""


def model_figures(model: AnyModel, entry: Entry, rows: ModelRows | None) -> tuple[Figure, ...]:
    """Draw one model: coefficients, errors, and its rows where there are tables.

    Args:
        model: The model.
        entry: Its validation.
        rows: Its evaluated rows; null without tables.
    """
    name = _anchor(f"{model.scope_id}-{model.name}")
    figures = [
        _forest(name, model),
        _errors(name, model.name, entry),
        _over_load(name, model.name, entry.error_over_load),
    ]
    if rows is not None:
        figures += [
            predicted_figure(model, rows),
            _over_time(name, model.name, rows),
            *(_over_feature(name, model.name, f, cloud) for f, cloud in rows.over_features.items()),
        ]
    return tuple(f for f in figures if f is not None)


def _anchor(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def _named_terms(model: AnyModel) -> list[tuple[str, Term]]:
    if isinstance(model, RegimesModel):
        return [(f"{r.name}: {t.feature}", t) for r in model.regimes for t in r.terms]
    return [(t.feature, t) for t in terms_of(model)]


def _forest(name: str, model: AnyModel) -> Figure | None:
    """Draw the contribution of each term between the ends of its training range."""
    drawn = [
        (label, t, (t.training_range[1] - t.training_range[0]) / US_PER_MS)
        for label, t in _named_terms(model)
        if t.training_range is not None
    ]
    if not drawn:
        return None
    values = [t.value * width for _, t, width in drawn]
    ends = [tuple(sorted(v * width for v in (t.ci95 or (t.value, t.value)))) for _, t, width in drawn]
    labels = tuple(label for label, _, _ in drawn)
    rows = tuple(
        (f"`{label}`", exact(v), f"{exact(low)} to {exact(high)}")
        for label, v, (low, high) in zip(labels, values, ends, strict=True)
    )
    lows, highs = tuple(e[0] for e in ends), tuple(e[1] for e in ends)
    series = Series(
        "effect over the training range", "intervals", tuple(values), _places(labels), lows, highs
    )
    return Figure(
        name=f"{name}-terms",
        title=f"{model.name}: what each term adds",
        caption="The point is the coefficient times the training range of its feature, the line its 95 % interval. "
        "Look for intervals that cross zero: the data do not show that these terms matter.",
        x_label="ms",
        panels=(Panel("", (series,)),),
        categories=labels,
        summary=Table(("term", "adds, ms", "95 % interval, ms"), rows),
    )


def _places(labels: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(float(k) for k in range(len(labels)))


def _errors(name: str, model_name: str, entry: Entry) -> Figure | None:
    found = [
        ("this model", entry.holdout.mae),
        ("baseline: training median", entry.baseline.mae),
        ("reference: boosted trees", entry.gradient_boosting.mae if entry.gradient_boosting else None),
        *((f"this model, {kind.replace('_', ' ')} ({m.n:,})", m.mae) for kind, m in entry.by_group.items()),
    ]
    known = [(label, mae / US_PER_MS) for label, mae in found if mae is not None]
    if not known:
        return None
    labels = tuple(label for label, _ in known)
    series = Series("mean absolute error", "bars", tuple(v for _, v in known), _places(labels))
    return Figure(
        name=f"{name}-errors",
        title=f"{model_name}: errors on the hold-out",
        caption="Mean absolute error. Look for a bar well below the baseline and near the reference: an error far above "
        "the reference means that the linear form misses something in these features.",
        x_label="ms",
        panels=(Panel("", (series,)),),
        categories=labels,
        summary=Table(("of", "mean absolute error, ms"), tuple((label, exact(v)) for label, v in known)),
    )


_LOADS = {
    "running_tokens": "tokens in the caches of the batch",
    "batch_requests": "requests of the batch",
}


def _over_load(name: str, model_name: str, found: ErrorOverLoad | None) -> Figure | None:
    """Draw error and bias over the load of held-out rows, the training range shaded."""
    bins = [b for b in found.bins if b.holdout.mape_pct is not None] if found else []
    if found is None or not bins:
        return None
    places = tuple((b.low + b.high) / 2 for b in bins)
    low, high = found.training_range
    rows = tuple(
        (
            f"{b.low:,.0f} to {b.high:,.0f}",
            count(b.holdout.n),
            exact(b.holdout.mape_pct),
            exact(b.holdout.bias_pct),
            "inside" if b.high <= high and b.low >= low else "beyond",
        )
        for b in bins
    )
    mape = tuple(b.holdout.mape_pct or 0.0 for b in bins)
    bias = tuple(b.holdout.bias_pct or 0.0 for b in bins)
    return Figure(
        name=f"{name}-load",
        title=f"{model_name}: error by load",
        caption="Held-out rows in groups of equal size by load; the training range is shaded. Look for an error that "
        "grows, or a bias that leaves zero, outside the shaded region: there the model extrapolates.",
        x_label=_LOADS[found.load],
        panels=(
            Panel("MAPE, %", (Series("mean absolute error", "line", places, mape),)),
            Panel("bias, %", (Series("bias", "line", places, bias),), zero=True),
        ),
        regions=(ShadedRegion("training range", low, high),),
        summary=Table((_LOADS[found.load], "rows", "MAPE %", "bias %", "training range"), rows),
    )


def predicted_figure(model: AnyModel, rows: ModelRows) -> Figure:
    """Draw predicted against measured durations of held-out rows."""
    look = "Look for a cloud that leaves the line at one end: the model misses a bend there."
    if isinstance(model, RegimesModel):
        first, rest = model.regimes[0].name, model.regimes[-1].name
        look = (
            f"Two regimes: {first} where its condition holds, {rest} elsewhere. Look for points of one regime among "
            "those of the other: there the condition is wrong, and the error is the whole distance between them."
        )
    zeros = (
        f" {plural(rows.without_place, 'row')} with a zero cannot be drawn on logarithmic axes."
        if rows.without_place
        else ""
    )
    return Figure(
        name=f"{_anchor(f'{model.scope_id}-{model.name}')}-against",
        title=f"{model.name}: predicted against measured",
        caption=f"{_how_many(rows.predicted)}, held out.{zeros} {look}",
        x_label="measured, ms",
        panels=(Panel("predicted, ms", _points(rows.predicted), log_y=rows.wide_range, diagonal=True),),
        log_x=rows.wide_range,
        summary=_bin_table(rows.predicted.bins, "measured, ms", "predicted, ms"),
    )


def _points(cloud: Cloud) -> tuple[Series, ...]:
    return tuple(Series(p.name, "points", p.x, p.y) for p in cloud.points)


def _how_many(cloud: Cloud) -> str:
    points = sum(len(p.x) for p in cloud.points)
    if points == cloud.rows:
        return f"All {count(cloud.rows)} rows"
    return f"{count(points)} of {count(cloud.rows)} rows, evenly in time"


def _over_time(name: str, model_name: str, rows: ModelRows) -> Figure:
    overlaid = f" The runs of {rows.servers} servers overlay each other." if rows.servers > 1 else ""
    panel, beyond = _residuals(rows.over_time)
    return Figure(
        name=f"{name}-time",
        title=f"{model_name}: residuals over time",
        caption=f"Measured less predicted; {_lower(_how_many(rows.over_time))}, and the medians of eighths of them."
        f"{overlaid}{beyond} Look for a drift or a step: then the server changed, and the end of the run is not like its "
        "beginning.",
        x_label="seconds into the run",
        panels=(panel,),
        regions=rows.holdout,
        summary=_bin_table(rows.over_time.bins, "seconds into the run", "residual, ms"),
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _over_feature(name: str, model_name: str, feature: str, cloud: Cloud) -> Figure:
    """Draw residuals against one of the terms that move the prediction most."""
    panel, beyond = _residuals(cloud)
    return Figure(
        name=f"{name}-over-{_anchor(feature)}",
        title=f"{model_name}: residuals against {feature}",
        caption=f"Held-out rows, and the medians of eighths of them.{beyond} Look for a bend in the medians: then the effect "
        f"of {feature} is not linear, and predictions at its ends are biased.",
        x_label=feature,
        panels=(panel,),
        summary=_bin_table(cloud.bins, feature, "residual, ms"),
    )


def _residuals(cloud: Cloud) -> tuple[Panel, str]:
    """Return a panel of residuals with their binned medians, and a sentence on points outside its limits."""
    medians = Series(
        "median", "line", tuple(b.middle for b in cloud.bins), tuple(b.median for b in cloud.bins)
    )
    limits = robust_limits([y for p in cloud.points for y in p.y])
    panel = Panel("measured - predicted, ms", (*_points(cloud), medians), zero=True, y_limits=limits)
    outside = sum(not limits[0] <= y <= limits[1] for p in cloud.points for y in p.y) if limits else 0
    lie = "lies" if outside == 1 else "lie"
    return panel, f" {plural(outside, 'point')} {lie} beyond the axis, drawn at its edge." if outside else ""


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


def _bin_table(bins: Iterable[Bin], x_name: str, y_name: str) -> Table:
    rows = tuple(
        (f"{b.low:.4g} to {b.high:.4g}", count(b.rows), exact(b.median), exact(b.p10), exact(b.p90))
        for b in bins
    )
    return Table((x_name, "rows", f"median {y_name}", "P10", "P90"), rows)


# Latencies of requests

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)


def latency_figures(scope: ScopeEvaluation, rows: ScopeRows | None) -> tuple[Figure, ...]:
    """Draw distributions of request latencies: measured beside predicted, or measured alone where none is predicted.

    Args:
        scope: The scope's evaluation.
        rows: What its tables hold; null without tables.
    """
    figures: list[Figure] = []
    for key, label in LATENCIES.items():
        entry = scope.latency.get(key)
        if entry is not None and entry.distribution is not None:
            figures.append(_compared(entry.distribution, label, scope.scope_id))
        elif rows is not None and key in rows.latencies_ms:
            figures.append(_measured(rows.latencies_ms[key], label, scope.scope_id))
        if figures and rows is not None and key in rows.over_load:
            figures[-1] = _with_objective(figures[-1], rows.over_load[key])
    return (*figures, *_over_requests(scope.scope_id, rows)) if rows is not None else tuple(figures)


_FAR_OFF = 10.0
"""Times the largest value from which on a line would squeeze a figure."""


def _objective(slo_ms: float | None, largest: float) -> tuple[tuple[float, str], ...]:
    """Return an objective as a line of a figure; nothing where there is none, or it lies far off."""
    return () if slo_ms is None or slo_ms > _FAR_OFF * largest else ((slo_ms, f"SLO {slo_ms:,g} ms"),)


def _with_objective(figure: Figure, found: LatencyOverLoad) -> Figure:
    largest = max((x for p in figure.panels for s in p.series for x in s.x), default=0.0)
    return replace(figure, marks=_objective(found.slo_ms, largest))


_APART = " Runs whose lines lie apart at one load differ in their servers or in their requests."


def _over_requests(scope_id: str, rows: ScopeRows) -> tuple[Figure, ...]:
    """Draw the latencies over the load, one line per run where there are several."""
    if not rows.over_load:
        return ()
    panels, table = [], []
    for key, found in rows.over_load.items():
        bins = [(run, b) for run, of_run in found.runs.items() for b in of_run]
        table += [
            (LATENCIES[key], f"`{run}`", _between(b), count(b.rows), exact(b.median), exact(b.p90))
            for run, b in bins
        ]
        several = len(found.runs) > 1
        series = [
            line
            for run, of_run in found.runs.items()
            for line in ([_line(run, of_run, "p90")] if several else _lines(of_run))
        ]
        levels = _objective(found.slo_ms, max(b.p90 for _, b in bins))
        label = f"P90 of {LATENCIES[key]}, ms" if several else f"{LATENCIES[key]}, ms"
        panels.append(Panel(label, tuple(series), log_y=True, levels=levels))
    within = "; ".join(
        f"{found.within_pct:.1f} % of {count(found.requests)} requests had {LATENCIES[key]} within {found.slo_ms:,g} ms"
        for key, found in rows.over_load.items()
        if found.slo_ms is not None and found.within_pct is not None
    )
    objectives = f" Objectives (SLO): {within}; `tracefit report --slo` sets others." if within else ""
    return (
        Figure(
            name=_anchor(f"{scope_id}-latency-load"),
            title="Latencies against load",
            caption="Measured requests in groups of equal size by the traced requests in flight when each arrived."
            f"{_left_out(rows)}{objectives} Look for the load from which a latency climbs: there the server is full."
            f"{_APART if any(len(found.runs) > 1 for found in rows.over_load.values()) else ''}",
            x_label="requests in flight on arrival",
            panels=tuple(panels),
            summary=Table(
                ("latency", "run", "requests in flight", "requests", "median, ms", "P90, ms"), tuple(table)
            ),
        ),
    )


def run_figures(scope_id: str, rows: ScopeRows | None) -> tuple[Figure, ...]:
    """Overlay the step times of several runs over the requests in the batch; nothing for a single run."""
    if rows is None or len(rows.step_times) < 2:
        return ()
    table = tuple(
        (f"`{run}`", _between(b), count(b.rows), exact(b.median), exact(b.p10), exact(b.p90))
        for run, bins in rows.step_times.items()
        for b in bins
    )
    series = tuple(_line(run, bins, "median") for run, bins in rows.step_times.items())
    return (
        Figure(
            name=_anchor(f"{scope_id}-runs"),
            title="Runs overlaid: step times against the batch",
            caption=f"Median times of steps in groups of equal size by the requests in the batch.{_left_out(rows)} Look for "
            "lines that lie apart: one model for all of them is then wrong for each.",
            x_label="requests in the batch",
            panels=(Panel("median step time, ms", series),),
            summary=Table(("run", "requests in the batch", "steps", "median, ms", "P10", "P90"), table),
        ),
    )


def _left_out(rows: ScopeRows) -> str:
    return f" {plural(rows.more_runs, 'more run')} not drawn." if rows.more_runs else ""


def _lines(bins: tuple[Bin, ...]) -> list[Series]:
    return [_line("median", bins, "median"), _line("P90", bins, "p90")]


def _line(name: str, bins: tuple[Bin, ...], what: Literal["median", "p90"]) -> Series:
    values = tuple(b.median if what == "median" else b.p90 for b in bins)
    return Series(name, "line", tuple(b.middle for b in bins), values)


def _between(b: Bin) -> str:
    return f"{b.low:.4g} to {b.high:.4g}"


def _compared(found: DistributionEntry, label: str, scope_id: str) -> Figure:
    ways = [("measured", found.measured), ("teacher-forced", found.teacher_forced)]
    ways.append(("averages only", found.averages_only))
    known = [(name, tuple(q / US_PER_MS for q in quantiles)) for name, quantiles in ways if quantiles]
    written = [
        (f"P{p}", *(exact(quantiles[k]) for _, quantiles in known))
        for k, p in enumerate(found.percents)
        if p in _WRITTEN_PERCENTS
    ]
    return Figure(
        name=_anchor(f"{scope_id}-{label}-cdf"),
        title=f"{label}, predicted and measured",
        caption=f"Share of {found.requests:,} held-out requests with at most this {label}. Look for where a predicted curve "
        "leaves the measured one: teacher-forced, step times are wrong there; from averages, waits and batches that an "
        "average does not show.",
        x_label=f"{label}, ms",
        panels=(Panel("requests, %", tuple(_curve(n, q, found.percents) for n, q in known)),),
        log_x=True,
        summary=Table(("of requests", *(f"{name}, ms" for name, _ in known)), tuple(written)),
    )


def _measured(at_ms: dict[int, float], label: str, scope_id: str) -> Figure:
    return Figure(
        name=_anchor(f"{scope_id}-{label}-cdf"),
        title=f"{label} as measured",
        caption=f"Share of requests with at most this {label}; no model predicts it here. Look for a long flat end: these "
        "requests waited, and a mean hides them.",
        x_label=f"{label}, ms",
        panels=(Panel("requests, %", (_curve("measured", tuple(at_ms.values()), tuple(at_ms)),)),),
        log_x=True,
        summary=Table(
            ("of requests", f"{label} at most, ms"),
            tuple((f"P{p}", exact(at_ms[p])) for p in _WRITTEN_PERCENTS),
        ),
    )


def _curve(name: str, quantiles_ms: tuple[float, ...], percents: tuple[int, ...]) -> Series:
    # A logarithmic axis has no place for a zero.
    drawn = [(q, float(p)) for q, p in zip(quantiles_ms, percents, strict=True) if q > 0]
    return Series(name, "line", tuple(x for x, _ in drawn), tuple(y for _, y in drawn))


# Engines over their runs

_QUANTITIES = {
    "running": ("requests running", "running"),
    "waiting": ("requests waiting", "waiting"),
    "tokens": ("tokens per step", "tokens per step"),
    "kv_pct": ("KV blocks in use, %", "KV %"),
    "cycle_ms": ("median step time, ms", "step ms"),
}
"""Quantity to the label of its panel and the head of its column."""


def engine_figure(engine: EngineRun) -> Figure:
    """Draw what one engine did over its run."""
    fate = ""
    if engine.overloaded is not None:
        fate = f": overloaded, {'trained on all the same' if engine.overloaded else 'left out of training'}"
    boundary = engine.holdout_from_s
    return Figure(
        name=_anchor(f"engine-{engine.run_id}-{engine.server}"),
        title=f"The engine of {engine.run_id}, {engine.server}{fate}",
        caption="Means of the traced steps over equal intervals of time. Look for a hold-out unlike what comes before it: "
        "then its errors say little about the rest. A queue that grows through the whole run means that the server was "
        "offered more than it can do.",
        x_label="seconds into the run",
        panels=tuple(
            Panel(_QUANTITIES[q.key][0], (Series(_QUANTITIES[q.key][0], "line", q.at_s, q.values),))
            for q in engine.quantities
        ),
        regions=engine.regions,
        marks=((boundary, "hold-out begins"),) if boundary is not None else (),
        summary=_engine_table(engine),
        wide=True,
    )


def _engine_table(engine: EngineRun) -> Table:
    known = {q.key: q for q in engine.quantities}
    means = {
        "before the hold-out": [known[k].before_holdout if k in known else None for k in _QUANTITIES],
        "hold-out": [known[k].in_holdout if k in known else None for k in _QUANTITIES],
    }
    rows = [
        (label, *(exact(v) for v in values))
        for label, values in means.items()
        if any(v is not None for v in values)
    ]
    for kind in dict.fromkeys(r.kind for r in engine.regions):
        lengths = [r.end - r.start for r in engine.regions if r.kind == kind]
        label = f"{kind}: {plural(len(lengths), 'interval')}, {number(sum(lengths))} s"
        rows.append((label, *[""] * len(_QUANTITIES)))
    return Table(("part of the run", *(head for _, head in _QUANTITIES.values())), tuple(rows))
