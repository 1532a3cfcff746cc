"""Figures of latencies and step times over the load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.diagnostics.groups import ENOUGH_FOR_P90, bins_by_run
from tracefit.models.targets import LATENCY_TITLES
from tracefit.options import LimitsOption, flag_of
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    BLUE,
    COLOURS,
    PINK,
    anchor,
    axis_number,
    axis_of,
    cells_of,
    ends_of,
    line,
    log_axis,
    mark,
    objective,
    panels,
)
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from tracefit.diagnostics.groups import Bin
    from tracefit.reports.document import Trace


def latency_load_figure(
    deployment_id: str, loads: Mapping[str, pl.DataFrame], slo_ms: Mapping[str, float], more_runs: int = 0
) -> Figure | None:
    """Draw `latencies_over_load`, one line per run where there are several; objectives are lines across."""
    if not loads:
        return None
    bins = {key: bins_by_run(rows, "in_flight", "ms", least=ENOUGH_FOR_P90) for key, rows in loads.items()}
    several = any(len(runs) > 1 for runs in bins.values())
    traces: list[Trace] = []
    shapes: list[Trace] = []
    axes: list[Trace] = []
    within = []
    for panel, (key, runs) in enumerate(bins.items()):
        axis, label = axis_number(panel), LATENCY_TITLES[key]
        for (run, groups), of_run in zip(runs.items(), COLOURS, strict=False):
            # Of several runs only the slow tenth, which objectives are about: two lines each would be too many to
            # distinguish.
            shown = [("P90", "p90", of_run)] if several else [("median", "median", BLUE), ("P90", "p90", PINK)]
            traces += [
                line(
                    run if several else words,
                    [b.middle for b in groups],
                    [getattr(b, field) for b in groups],
                    colour,
                    mode="lines+markers",
                    yaxis=f"y{axis}",
                    legendgroup=run if several else words,
                    showlegend=panel == 0,
                    customdata=[f"{ends_of(b)} in flight, {plural(b.rows, 'request')}" for b in groups],
                    hovertemplate=(
                        f"{label} {words} %{{y:,.4~r}} ms<br>%{{customdata}}<extra>%{{fullData.name}}</extra>"
                    ),
                )
                for words, field, colour in shown
            ]
        every = [b for groups in runs.values() for b in groups]
        if slo := slo_ms.get(key):
            ms = loads[key]["ms"]
            share = 100 * int((ms <= slo).sum()) / ms.len()
            within.append(f"{percent(share)} % of {count(ms.len())} requests had {label} within {slo:,g} ms")
            if words := objective(slo, max(b.p90 for b in every)):
                shapes.append(mark(f"{label}: {words}", "y", slo, on=f"y{axis}"))
        axes.append(log_axis(f"{label}, ms", [v for b in every for v in (b.median, b.p90)]))
    apart = " Runs whose lines lie apart at one load differ in their servers or in their requests."
    objectives = f" Objectives (SLO): {'; '.join(within)}; `tracefit report {flag_of(LimitsOption)}` sets others."
    return Figure(
        name=anchor(f"{deployment_id}-latency-load"),
        height=130 + 130 * len(bins),
        kind="latency-by-load",
        title="Latencies against load" + (", P90 of each run" if several else ""),
        look="Look for the load from which a latency climbs: there the server is full.",
        note=f"Measured requests in groups of equal size by the traced requests in flight when each arrived."
        f"{_left_out(more_runs)}{objectives if within else ''}{apart if several else ''}",
        summary=Table(
            ("latency", "run", "requests in flight", "requests", "median, ms", "P90, ms"),
            tuple(
                (LATENCY_TITLES[key], f"`{run}`", ends_of(b), count(b.rows), number(b.median), number(b.p90))
                for key, runs in bins.items()
                for run, groups in runs.items()
                for b in groups
            ),
        ),
        traces=tuple(traces),
        layout={
            "shapes": shapes,
            **panels(axis_of("requests in flight on arrival", rangemode="tozero"), axes),
        },
    )


def _left_out(more_runs: int) -> str:
    return f" {plural(more_runs, 'more run')} not drawn." if more_runs else ""


def runs_figure(deployment_id: str, step_times: Mapping[str, Sequence[Bin]], more_runs: int = 0) -> Figure | None:
    """Overlay the step times of several runs over the requests in the batch; null for a single run."""
    if len(step_times) < 2:
        return None
    return Figure(
        name=anchor(f"{deployment_id}-runs"),
        kind="runs",
        title="Runs overlaid: step times against the batch",
        look="Look for lines that lie apart: one model for all of them is then wrong for each.",
        note=f"Median times of steps in groups of equal size by the requests in the batch.{_left_out(more_runs)}",
        summary=Table(
            ("run", "requests in the batch", "steps", "median, ms", "P10", "P90"),
            tuple((f"`{run}`", *cells_of(b)) for run, bins in step_times.items() for b in bins),
        ),
        traces=tuple(
            line(
                run,
                [b.middle for b in bins],
                [b.median for b in bins],
                colour,
                mode="lines+markers",
                customdata=[f"{ends_of(b)} requests, {plural(b.rows, 'step')}" for b in bins],
                hovertemplate="%{y:.3~f} ms<br>%{customdata}<extra>%{fullData.name}</extra>",
            )
            for (run, bins), colour in zip(step_times.items(), COLOURS, strict=False)
        ),
        layout={"xaxis": axis_of("requests in the batch"), "yaxis": axis_of("median step time, ms")},
    )
