"""Figures of models on their rows: predicted against measured, residuals, step times over time.

A figure shows some rows, taken evenly in time, and sums up all of them in groups of equal size, so that a page stays
small. Durations are drawn in ms, times in seconds into the run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import polars as pl

from tracefit.diagnostics.groups import bins_of
from tracefit.diagnostics.rows import (
    COMPOSITION,
    RESIDUAL_BATCH_COLUMNS,
    covered,
    steps_over_time,
    strongest_features,
    time_unit,
)
from tracefit.models.schema import RegimesModel
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    BLUE,
    GREY,
    MEASURED_COLOR,
    ORANGE,
    PINK,
    PREDICTED_COLOR,
    FigureWords,
    anchor,
    axis_of,
    cells_of,
    limited,
    line,
    log_axis,
    name_text,
    shaded,
    spread_axis,
)
from tracefit.tables.schema import SERVER
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.diagnostics.groups import Bin
    from tracefit.diagnostics.rows import MarkedInterval
    from tracefit.models.schema import Model
    from tracefit.reports.document import Trace


def _bin_table(bins: Iterable[Bin], x_name: str, y_name: str) -> Table:
    return Table((x_name, "rows", f"median {y_name}", "P10", "P90"), tuple(map(cells_of, bins)))


def thinned(rows: pl.DataFrame, points: int) -> pl.DataFrame:
    """Take at most `points` rows, evenly."""
    # By their numbers: `gather_every` takes thirty times as long.
    return rows[np.arange(0, rows.height, max(1, -(-rows.height // points)))]


def _dots(name: str, rows: pl.DataFrame, x: str, y: str, colour: str, **marker: object) -> Trace:
    """Draw rows as points; on hover a reader sees the measurement, the prediction and the batch."""
    batch = COMPOSITION if set(RESIDUAL_BATCH_COLUMNS) <= set(rows.columns) else {}
    facts = rows.select(
        pl.col("measured_ms").alias("measured, ms"), pl.col("predicted_ms").alias("predicted, ms"), **batch
    )
    known = [fact for fact in facts if fact.count()]
    # Rounded here, not by the page: a number that is not known is a dash.
    written = [["-" if v is None else float(f"{v:.4g}") for v in fact] for fact in known]
    lines = [f"{fact.name}: %{{customdata[{k}]}}" for k, fact in enumerate(known)]
    return line(
        name,
        rows[x],
        rows[y],
        colour,
        mode="markers",
        marker={"size": 5, "opacity": 0.55, "symbol": "circle", "color": colour, **marker},
        customdata=list(zip(*written, strict=True)),
        hovertemplate="<br>".join(lines) + "<extra></extra>",
    )


class ScatterSample(NamedTuple):
    """Rows as points of one quantity over another, and a sentence on how many of them are drawn."""

    traces: list[Trace]
    x: list[float]
    y: list[float]
    how_many: str


def _sample(parts: Sequence[tuple[str, pl.DataFrame]], x: str, y: str, points: int) -> ScatterSample:
    """Draw at most `points` rows of each kind, which are in the order of time."""
    kinds = [(name, thinned(part, points)) for name, part in parts if part.height]
    styles = ((BLUE, "circle"), (ORANGE, "triangle-up"), (GREY, "diamond"))
    traces = [
        _dots(name, some, x, y, colour, symbol=symbol)
        for (name, some), (colour, symbol) in zip(kinds, styles, strict=False)
    ]
    xs, ys = ([value for _, some in kinds for value in some[column]] for column in (x, y))
    rows = sum(part.height for _, part in parts)
    how_many = f"{count(len(xs))} of {count(rows)} rows, evenly in time."
    return ScatterSample(traces, xs, ys, f"All {count(rows)} rows." if len(xs) == rows else how_many)


def model_figures(model: Model, rows: pl.DataFrame, *, points: int) -> tuple[Figure, ...]:
    """Draw the rows of one model for an expert: predictions, and residuals over time and over its strongest
    features.
    """
    name = anchor(f"{model.deployment_id}-{model.name}")
    rows = rows.sort("ts_ns")
    held = rows.filter(split="holdout")
    servers = rows.unique(SERVER).height
    overlaid = f" The runs of {servers} servers overlay each other." if servers > 1 else ""
    parts = (("training rows", rows.filter(split="train")), ("held-out rows", held))
    sample = _sample(parts, "at_s", "residual_ms", points)
    over_time = _residuals(
        sample,
        bins_of(rows, "at_s", "residual_ms"),
        f"{time_unit(rows)} into the run",
        # Where runs of several servers overlay each other, their hold-outs do too.
        covered("hold-out", held, SERVER) if servers == 1 else (),
        name=f"{name}-time",
        kind=f"{model.name}-residuals",
        title=f"{model.name}: residuals over time",
        look="Look for a drift or a step: then the server changed, and the end of the run is not like its beginning.",
        note=f"{sample.how_many}{overlaid}",
    )
    over_features = [
        _residuals(
            _sample((("held-out rows", known),), feature, "residual_ms", points),
            bins_of(known, feature, "residual_ms"),
            feature,
            name=f"{name}-over-{anchor(feature)}",
            kind=f"{model.name}-residuals-{feature}",
            title=f"{model.name}: residuals against {feature}",
            look=f"Look for a bend in the medians: then the effect of {feature} is not linear, and predictions at its "
            "ends are biased.",
            note="Held-out rows.",
        )
        for feature in strongest_features(model, held)
        if (known := held.drop_nulls(feature)).height
    ]
    return (_predicted_figure(model, held, points), over_time, *over_features)


_FAR_OUT = 4
"""Times the median above which the largest value asks for logarithmic axes."""


def _predicted_figure(model: Model, held: pl.DataFrame, points: int) -> Figure:
    """Draw predicted against measured durations of held-out rows; of a model with regimes one kind of points per
    regime.
    """
    most, middle = held.select(pl.col("measured_ms").max(), middle=pl.col("measured_ms").median()).row(0)
    is_wide = isinstance(model, RegimesModel) or (most or 0.0) > _FAR_OUT * max(middle or 0.0, 1e-9)
    parts = [("held-out rows", held)]
    look = "Look for a cloud that leaves the line at one end: the model misses a bend there."
    if isinstance(model, RegimesModel):
        first, *_, rest = names = [r.name for r in model.regimes]
        parts = [(name, held.filter(regime=name)) for name in names]
        look = (
            f"Look for points of *{first}* among those of *{rest}*: there the condition between the regimes is wrong."
        )
    if is_wide:
        positive = (pl.col("measured_ms") > 0) & (pl.col("predicted_ms") > 0)
        parts = [(name, part.filter(positive)) for name, part in parts]
    lost = held.height - sum(part.height for _, part in parts)
    zeros = f" {plural(lost, 'row')} with a zero cannot be drawn on logarithmic axes."
    sample = _sample(parts, "measured_ms", "predicted_ms", points)
    # Both axes have one scale, so that the diagonal is where a prediction is right.
    values = [*sample.x, *sample.y]
    ends = (min(values, default=0.0), max(values, default=1.0))

    def axis(title: str) -> Trace:
        return log_axis(title, values) if is_wide else axis_of(title)

    diagonal = line("predicted as measured", ends, ends, GREY, dash="dash", hoverinfo="skip")
    return Figure(
        name=f"{anchor(f'{model.deployment_id}-{model.name}')}-against",
        kind=f"{model.name}-predicted",
        title=f"{model.name}: predicted against measured",
        look=look,
        note=f"Held out. {sample.how_many}{zeros if lost else ''}",
        summary=_bin_table(bins_of(held, "measured_ms", "predicted_ms"), "measured, ms", "predicted, ms"),
        traces=(*sample.traces, diagonal),
        layout={"xaxis": axis("measured, ms"), "yaxis": axis("predicted, ms")},
    )


def _residuals(
    sample: ScatterSample,
    bins: Sequence[Bin],
    x: str,
    marked: Iterable[MarkedInterval] = (),
    **words: Unpack[FigureWords],
) -> Figure:
    limits, beyond = limited(sample.y)
    medians = line("median of each eighth", [b.middle for b in bins], [b.median for b in bins], PINK)
    words["note"] = f"{words['note']} {beyond}".rstrip()
    return Figure(
        **words,
        summary=_bin_table(bins, x, "residual, ms"),
        traces=(*sample.traces, medians),
        layout={
            "xaxis": spread_axis(name_text(x), sample.x),
            "yaxis": axis_of("measured - predicted, ms", zeroline=True, **limits),
            "shapes": shaded(marked),
        },
    )


def step_times_figure(deployment_id: str, kept: pl.DataFrame, *, points: int, of_means: bool) -> Figure:
    """Draw measured and predicted step times over time, runs one after the other; a point shows what its step, or the
    steps it is the mean of, computed.
    """
    rows_are = "means of several steps" if of_means else "single steps"
    runs, rows, means = steps_over_time(kept)
    # A row of nulls before every run but the first: there the lines break.
    breaks = pl.DataFrame({"begins": runs["begins"][1:], "at_s": runs["begins"][1:]})
    drawn = pl.concat([breaks, means], how="diagonal").sort("begins", "at_s", maintain_order=True)
    some = thinned(rows, points)
    limits, note = limited([*some["measured_ms"], *means["measured_ms"]], from_zero=True)
    several, unit = runs.height > 1, time_unit(kept)
    at: Trace = {"xref": "x", "y": 1, "yref": "paper", "xanchor": "left", "showarrow": False}
    named = runs.select(
        pl.when(pl.col("run_id").is_duplicated()).then(pl.col("run_id") + ", " + pl.col("server")).otherwise("run_id"),
        "begins",
    )
    hover = "%{y:.3~f} ms<extra>%{fullData.name}</extra>"
    return Figure(
        name=anchor(f"{deployment_id}-step-times"),
        kind="step-times",
        title="Step times over time: predicted against measured",
        look="Look for times at which the two lines part: what the server did then, the model does not know.",
        note=f"Lines are means over equal intervals of time, points {rows_are}. {note}".rstrip(),
        hint="Hover over a point for what that step computed; drag to zoom, double-click to see everything again.",
        summary=_step_times_table(means, unit),
        traces=(
            _dots(f"{rows_are}, measured", some, "at_s", "measured_ms", MEASURED_COLOR, opacity=0.4),
            *(
                line(name, drawn["at_s"], drawn[f"{name}_ms"], colour, connectgaps=False, hovertemplate=hover)
                for name, colour in (("measured", MEASURED_COLOR), ("predicted", PREDICTED_COLOR))
            ),
        ),
        layout={
            "xaxis": axis_of(f"{unit}, runs one after the other" if several else f"{unit} into the run"),
            "yaxis": axis_of("step time, ms", **limits),
            "shapes": shaded(covered("hold-out", rows.filter(split="holdout"), ["begins"])),
            "annotations": [
                {"text": name_text(run), "x": begins, **at} for run, begins in (named.iter_rows() if several else ())
            ],
        },
        wide=True,
        height=380,
    )


def _step_times_table(means: pl.DataFrame, unit: str, parts: int = 8) -> Table:
    rows = []
    bounds = [k * means.height // parts for k in range(parts + 1)]
    for some in (means[start:end] for start, end in pairwise(bounds) if start < end):
        measured, predicted = (sum(some[c]) / some.height for c in ("measured_ms", "predicted_ms"))
        off = percent(100 * (predicted / measured - 1)) if measured else "-"
        ends = f"{number(some['at_s'][0])} to {number(some['at_s'][-1])}"
        rows.append((ends, number(measured), number(predicted), off))
    return Table((unit, "measured, ms", "predicted, ms", "off by %"), tuple(rows))
