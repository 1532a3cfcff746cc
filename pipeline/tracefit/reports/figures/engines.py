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
    shaded,
)
from tracefit.statistics import mean_of
from tracefit.text import number, plural

if TYPE_CHECKING:
    from tracefit.diagnostics.engines import EngineRun
    from tracefit.reports.document import Trace

_QUANTITIES = {
    "running": ("running", "requests running", BLUE),
    "waiting": ("waiting", "requests waiting", PINK),
    "tokens": ("tokens", "tokens per step", ORANGE),
    "kv_pct": ("KV, %", "KV blocks in use, %", PURPLE),
    "cycle_ms": ("step, ms", "step time, ms", GREEN),
}
"""Quantity to the label of its panel, its full name and its colour."""


def engine_figure(engine: EngineRun) -> Figure:
    """Draw load and step times of one engine over its run."""
    bins, overload = engine.bins, engine.overload
    shapes = shaded(engine.marked)
    if engine.holdout_s is not None:
        shapes.append(mark("hold-out begins", "x", engine.holdout_s, colour=GREY))
    kept = "trained on all the same" if overload and overload.trained_on else "left out of training"
    fate = f": overloaded, {kept}" if overload else ""
    drawn = [key for key in _QUANTITIES if bins[key].count()]
    hover = "%{y:,.4~r}<extra>%{fullData.name}</extra>"
    axes: list[Trace] = []
    traces = []
    for panel, key in enumerate(drawn):
        label, full, colour = _QUANTITIES[key]
        x, y = bins.drop_nulls(key).select("at_s", key)
        axis = f"y{axis_number(panel)}"
        axes.append(axis_of(label, rangemode="tozero", nticks=4))
        traces.append(line(full, x, y, colour, yaxis=axis, showlegend=False, hovertemplate=hover))
    return Figure(
        name=anchor(f"engine-{engine.run_id}-{engine.server}"),
        height=90 + 105 * len(drawn),
        kind="timeline",
        title=f"The engine of {engine.run_id}, {engine.server}{fate}",
        look="Look for a hold-out unlike what comes before it: then its errors say little about the rest. A queue "
        "that grows through the whole run means that the server was offered more than it can do.",
        note="Means of the traced steps over equal intervals of time; of step times the median." + _fuller(engine),
        summary=_engine_table(engine),
        traces=tuple(traces),
        layout={
            # One time, one label in each panel: panels share the axis.
            "hovermode": "x",
            "shapes": shapes,
            **panels(axis_of("seconds into the run"), axes, 0.05),
        },
        wide=True,
    )


_FULLER = 1.5
"""How many times as many requests run or wait before the hold-out as in it where the report says so."""


def _fuller(engine: EngineRun) -> str:
    """Return that training saw the fuller part of the run, where it did."""
    running, waiting = ([mean_of(part[key]) for part in _parts(engine)] for key in ("running", "waiting"))
    trained, held_out = ((r or 0.0) + (w or 0.0) for r, w in zip(running, waiting, strict=True))
    if None in running or trained < _FULLER * held_out:
        return ""
    before, inside = (
        number(r) if not any(waiting) else f"{number(r)} and {number(w)}" for r, w in zip(running, waiting, strict=True)
    )
    load = "requests run and wait" if any(waiting) else "requests run"
    return f" Training saw the fuller part of the run: on average {before} {load} before the hold-out, {inside} in it."


def _parts(engine: EngineRun) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the intervals before the hold-out, and those in it."""
    boundary = float("inf") if engine.holdout_s is None else engine.holdout_s
    return engine.bins.filter(pl.col("at_s") < boundary), engine.bins.filter(pl.col("at_s") >= boundary)


def _engine_table(engine: EngineRun) -> Table:
    rows = []
    for label, part in zip(("before the hold-out", "hold-out"), _parts(engine), strict=True):
        means = [mean_of(part[key]) for key in _QUANTITIES]
        rows += [(label, *map(number, means))] if any(v is not None for v in means) else []
    for kind in dict.fromkeys(r.kind for r in engine.marked):
        lengths = [r.end - r.start for r in engine.marked if r.kind == kind]
        label = f"{kind}: {plural(len(lengths), 'interval')}, {number(sum(lengths))} s"
        rows.append((label, *[""] * len(_QUANTITIES)))
    return Table(("part of the run", *(head for _, head, _ in _QUANTITIES.values())), tuple(rows))
