"""Figures of the published evaluation: errors of step times by load, distributions of request latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from tracefit.diagnostics.groups import US_PER_MS
from tracefit.diagnostics.rows import MarkedInterval
from tracefit.features.targets import LATENCIES
from tracefit.fit.splits import of_means
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    COLOURS,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PINK,
    PREDICTED,
    FigureWords,
    anchor,
    axis_of,
    line,
    log_axis,
    mark,
    objective,
    shaded,
)
from tracefit.reports.sentences import least_exact_replay, step_entry, step_times
from tracefit.text import count, number, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.coefficients.model import ScopeEvaluation

_LOADS = {"running_tokens": "tokens in the caches of the batch", "batch_requests": "requests in the batch"}


def error_by_load_figure(scope: ScopeEvaluation) -> Figure | None:
    """Draw errors of step times over the load of held-out rows, the training range shaded."""
    entry = step_entry(scope)
    found = entry.error_over_load if entry else None
    # Rows whose measurement is zero have no error in percent.
    bins = [b for b in found.bins if b.holdout.mdape_pct is not None] if found else []
    if entry is None or found is None or not bins:
        return None
    low, high = found.training_range
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
        name=anchor(f"{scope.scope_id}-error-by-load"),
        kind="error-by-load",
        title=f"Errors of {step_times(entry)} by load",
        look="Look for errors that grow, or a bias that leaves zero, outside the shaded training range: there the model "
        "extrapolates.",
        note=f"Held-out {rows} in groups of equal size.",
        summary=Table(
            (_LOADS[found.load], rows, "median error %", "P90 error %", "bias %", "training range"),
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
            "shapes": shaded([MarkedInterval("training range", low, high)]),
        },
    )


# Replays


def replay_figures(scope: ScopeEvaluation) -> tuple[Figure, ...]:
    """Draw the replay that is least exact: percentiles of each latency and the queue over time, measured and replayed."""
    run = least_exact_replay(scope)
    if run is None:
        return ()
    sides = (("measured", "solid"), ("replayed", "dash"))
    points = {label: run.of(name) for name, label in LATENCIES.items()}
    percents = [50, 90, 99]
    hover = "P%{x}: %{y:,.4~r} ms<extra>%{fullData.name}</extra>"
    values = [getattr(q, side) / US_PER_MS for side, _ in sides for all_ in points.values() for q in all_]
    latencies = Figure(
        name=anchor(f"{scope.scope_id}-replay"),
        kind="replay",
        title="Latencies in a closed loop: replayed against measured",
        look="Look for a dashed line that leaves its solid one: there a simulation of this load would be wrong by as much.",
        note=f"{count(run.requests)} held-out requests of run {run.run_id}.",
        summary=Table(
            ("latency", *(f"P{q} {side}, ms" for q in percents for side, _ in sides)),
            tuple(
                (label, *(number(getattr(q, side) / US_PER_MS) for q in all_ for side, _ in sides))
                for label, all_ in points.items()
                if all_
            ),
        ),
        traces=tuple(
            line(
                f"{label} {side}",
                percents,
                [getattr(q, side) / US_PER_MS for q in all_],
                colour,
                dash=dash,
                mode="lines+markers",
                hovertemplate=hover,
            )
            for (label, all_), colour in zip(points.items(), COLOURS, strict=False)
            for side, dash in sides
            if all_
        ),
        layout={
            "xaxis": axis_of("percentile of requests", tickvals=percents),
            "yaxis": log_axis("ms", values),
        },
    )
    if not any(w.measured or w.replayed for w in run.queue):
        return (latencies,)
    at = [w.from_s for w in run.queue]
    queue = Figure(
        name=anchor(f"{scope.scope_id}-replayed-queue"),
        kind="queue",
        title="Queue over time: replayed against measured",
        look="Look for times at which one queue grows and the other does not: errors of a queue add up.",
        note=f"Mean number of requests between arrival and first schedule, run {run.run_id}.",
        summary=Table(
            ("from, s", "measured", "replayed"),
            tuple((number(w.from_s), number(w.measured), number(w.replayed)) for w in run.queue[::4]),
        ),
        traces=(
            line("measured", at, [w.measured for w in run.queue], MEASURED),
            line("replayed", at, [w.replayed for w in run.queue], PREDICTED, dash="dash"),
        ),
        layout={
            "xaxis": axis_of("seconds of the held-out part"),
            "yaxis": axis_of("requests", rangemode="tozero"),
        },
    )
    return latencies, queue


# Latencies of requests

_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)


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
