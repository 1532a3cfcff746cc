"""Figures of engines over their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    anchor,
    axis_number,
    axis_of,
    line,
    mark,
    panels,
    regions,
    shaded,
)
from tracefit.statistics import mean_of
from tracefit.text import number, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.diagnostics.engines import EngineRun
    from tracefit.reports.document import Trace
    from tracefit.reports.figures.elements import ShadedRegion

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
    bins, overload = engine.bins, engine.overload
    marked = [region for kind, ends in engine.periods.items() for region in regions(kind, ends)]
    shapes = shaded(marked)
    if engine.holdout_s is not None:
        shapes.append(mark("hold-out begins", "x", engine.holdout_s, colour=GREY))
    fate = ""
    if overload is not None:
        fate = f": overloaded, {'trained on all the same' if overload.trained_on else 'left out of training'}"
    drawn = [key for key in _QUANTITIES if bins[key].count()]
    axes: list[Trace] = []
    traces = []
    for place, key in enumerate(drawn):
        label, full, colour = _QUANTITIES[key]
        part, axis = bins.drop_nulls(key), axis_number(place)
        axes.append(axis_of(label, rangemode="tozero", nticks=4))
        traces.append(
            line(
                full,
                part["at_s"],
                part[key],
                colour,
                yaxis=f"y{axis}",
                showlegend=False,
                hovertemplate="%{y:,.4~r}<extra>%{fullData.name}</extra>",
            )
        )
    return Figure(
        name=anchor(f"engine-{engine.run_id}-{engine.server}"),
        height=90 + 105 * len(drawn),
        kind="timeline",
        title=f"The engine of {engine.run_id}, {engine.server}{fate}",
        look="Look for a hold-out unlike what comes before it: then its errors say little about the rest. A queue that grows "
        "through the whole run means that the server was offered more than it can do.",
        note="Means of the traced steps over equal intervals of time; of step times the median.",
        summary=_engine_table(engine, marked),
        traces=tuple(traces),
        layout={
            # One time, one label in each panel: panels share the axis.
            "hovermode": "x",
            "shapes": shapes,
            **panels(axis_of("seconds into the run"), axes, 0.05),
        },
        wide=True,
    )


def _engine_table(engine: EngineRun, marked: Sequence[ShadedRegion]) -> Table:
    bins, boundary = engine.bins, engine.holdout_s
    is_before = pl.col("at_s") < (float("inf") if boundary is None else boundary)
    rows = []
    for label, part in (
        ("before the hold-out", bins.filter(is_before)),
        ("hold-out", bins.filter(~is_before)),
    ):
        means = [mean_of(part[key]) for key in _QUANTITIES]
        rows += [(label, *map(number, means))] if any(v is not None for v in means) else []
    for kind in dict.fromkeys(r.kind for r in marked):
        lengths = [r.end - r.start for r in marked if r.kind == kind]
        label = f"{kind}: {plural(len(lengths), 'interval')}, {number(sum(lengths))} s"
        rows.append((label, *[""] * len(_QUANTITIES)))
    return Table(("part of the run", *(head for _, head, _ in _QUANTITIES.values())), tuple(rows))
