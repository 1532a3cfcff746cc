"""Draw the report's figures of rows: a function per figure, from the tables of a scope and its models to what plotly draws.

Four kinds of figures: models evaluated on their rows, what durations consist of, latencies and steps over load, and engines over
time. A figure shows some rows, taken evenly in time, and sums up all of them in groups of equal size, so that a page stays
small. Durations are drawn in ms, times in seconds into the run. What plotly draws is put together in `reports.figures`.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Unpack

import polars as pl

from tracefit.coefficients.compiled import CompiledModel, main_forms
from tracefit.coefficients.model import LinearModel, RegimesModel
from tracefit.errors import UsageError
from tracefit.features.expressions import Binary, Call, Constant, Name
from tracefit.features.targets import LATENCIES, parts_of
from tracefit.fit.splits import FEW_ROWS, in_time
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures import (
    AMBER,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PINK,
    PREDICTED,
    PURPLE,
    TEAL,
    US_PER_MS,
    FigureWords,
    ScopeFigures,
    ShadedRegion,
    anchor,
    axis_number,
    axis_of,
    distribution_figures,
    error_by_load_figure,
    limited,
    line,
    log_axis,
    mark,
    name_text,
    objective,
    panels,
    rounded,
    shaded,
    spread_axis,
)
from tracefit.statistics import PERCENTS, mean_of
from tracefit.tables.health import CUT_OFF
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from polars.dataframe.group_by import GroupBy

    from tracefit.coefficients.model import Model, ScopeEvaluation
    from tracefit.features.expressions import Node
    from tracefit.fit.results import Overload
    from tracefit.reports.document import Trace
    from tracefit.reports.figures import RegionKind
    from tracefit.tables.store import TableStore

MOST_ENGINES = 4
"""Engines drawn per scope; the tables have all of them."""

MOST_RUNS = 6
"""Runs overlaid in one figure."""

SLO_MS: Mapping[str, float] = {"ttft": 2000.0, "itl": 200.0}
"""Limits of MLPerf Inference for Llama-2-70B in its server scenario: objectives where a user names none."""

_REQUEST_COLUMNS = (
    *("run_id", "server", "arrival_ns", "queued_ns", "finished_ns", "aborted_ns", "departed_ns"),
    *("finish_status", "prompt_tokens"),
)
_STEP_COLUMNS = ("run_id", "cycle_us", "cycle_source", "idle_after", "running_depth")
_BATCH_COLUMNS = (
    *("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "prefill_context_tokens"),
    *("decode_tokens", "context_tokens"),
)
"""What a step computes."""

COMPOSITION = {
    "requests": pl.col("num_prefill_reqs") + pl.col("num_decode_reqs"),
    "prompt tokens": pl.col("prefill_tokens"),
    "generated tokens": pl.col("decode_tokens"),
    "context tokens": pl.col("context_tokens"),
}
"""What a reader sees of a step, over columns of the `timeline` table."""

_STEP = (*ENGINE, "step_id")
_ROW_COLUMNS = frozenset({*_STEP, "scope_id", "target", "source", "ts_ns", "y", "split", "excluded_reason"})
"""What figures need of training rows beside the features of the models."""


def scope_figures(
    scope: ScopeEvaluation,
    models: Sequence[Model],
    store: TableStore,
    *,
    points: int,
    slo_ms: Mapping[str, float] = SLO_MS,
) -> ScopeFigures:
    """Draw the figures of one scope; `points` is the most per series, taken evenly in time.

    Raises:
        UsageError: A run of the scope has no tables.
    """
    missing = sorted(set(scope.runs) - set(store.runs()))
    if missing:
        raise UsageError(
            f"holds no tables of {', '.join(missing)}",
            where=str(store.root),
            hint="name the tables folder with --tables",
        )
    runs, scope_id = list(scope.runs), scope.scope_id
    own = pl.col("scope_id") == scope_id
    columns = sorted(_ROW_COLUMNS.union(*(CompiledModel(m).columns_with_clock for m in models)))
    batches = store.read("timeline", runs, [*_STEP, *_BATCH_COLUMNS])
    steps = with_batches(
        store.read("beta_training", runs, columns).filter(own),
        batches,
        lag_steps=scope.timeline.execution_lag_steps,
    )
    waits = store.read("alpha_training", runs, columns).filter(own)
    durations = [*(f"{name}_us" for name in LATENCIES), *_first_token_parts().values()]
    requests = store.read("requests", runs, [*_REQUEST_COLUMNS, *dict.fromkeys(durations)])
    first: list[Figure | None] = []
    of_models: dict[str, tuple[Figure, ...]] = {}
    for model in models:
        is_step = model.name.startswith("beta.")
        frame = steps if is_step else waits.filter(target=model.name.removeprefix("alpha."))
        # Tables hold the training frames of the last training alone: those of other models lack their features.
        if (rows := evaluated(model, frame)) is None:
            continue
        of_models[model.name] = model_figures(model, rows, points=points)
        if is_step and not first:
            first = [step_times_figure(scope_id, rows, points=points), error_by_load_figure(scope)]
            if isinstance(model, LinearModel):
                found = step_breakdown(model, rows.filter(split="holdout"))
                first.append(breakdown_figure(scope_id, found))
    drawn = pl.col("run_id").is_in(runs[:MOST_RUNS])
    loads = latencies_over_load(requests.filter(drawn))
    step_times = step_times_over_batch(store.read("timeline", runs[:MOST_RUNS], _STEP_COLUMNS))
    more_runs = len(runs) - len(runs[:MOST_RUNS])
    engines, engines_note = _engine_figures(scope, store, steps)
    first += [
        first_token_figure(scope_id, first_token_breakdown(requests)),
        latency_load_figure(scope_id, loads, slo_ms, more_runs),
        runs_figure(scope_id, step_times, more_runs),
        *engines,
    ]
    objectives = {name: ms for name, ms in slo_ms.items() if name in loads}
    return ScopeFigures(
        tuple(figure for figure in first if figure is not None),
        distribution_figures(scope, measured_latencies(requests), objectives),
        of_models,
        engines_note,
    )


def with_batches(steps: pl.DataFrame, batches: pl.DataFrame, *, lag_steps: int = 0) -> pl.DataFrame:
    """Add to rows of `beta_training` the batch that executed, by columns of `timeline`; null for an interval of several steps.

    With `lag_steps` 1 the batch of the step before executes: scheduling runs that far ahead.
    """
    single = pl.when(pl.col("source") != "interval").then(pl.col("step_id"))
    new = [c for c in _BATCH_COLUMNS if c not in steps.columns]
    return steps.with_columns(step_id=single).join(
        batches.select(*_STEP, *new).with_columns(pl.col("step_id") + lag_steps),
        on=list(_STEP),
        how="left",
        maintain_order="left",
    )


# -- rows as points and in groups -----------------------------------------------------------------------

_GROUPS = 8


class Bin(NamedTuple):
    """Rows whose x lies between `low` and `high`, the median of their x, and median, P10 and P90 of their y."""

    # Of equal size, not of equal width: the highest values of x would be a row or two.
    rows: int
    low: float
    high: float
    middle: float
    median: float
    p10: float
    p90: float

    @property
    def ends(self) -> str:
        """Both ends in one text."""
        return f"{number(self.low)} to {number(self.high)}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The bin as cells of a table: its ends, its rows, and the three values of y."""
        return (self.ends, count(self.rows), *(number(v) for v in (self.median, self.p10, self.p90)))


def bins_of(rows: pl.DataFrame, x: str, y: str) -> list[Bin]:
    """Sum up y in groups of equal size along x."""
    groups = _in_groups(rows, x, _GROUPS).agg(
        rows=pl.len(),
        low=pl.col(x).min(),
        high=pl.col(x).max(),
        middle=pl.col(x).median(),
        median=pl.col(y).median(),
        p10=pl.col(y).quantile(0.1),
        p90=pl.col(y).quantile(0.9),
    )
    return [Bin(*row) for row in groups.drop("group").iter_rows()]


def _in_groups(rows: pl.DataFrame, by: str, groups: int) -> GroupBy:
    """Split rows into groups of equal size from small to large."""
    group = (pl.int_range(pl.len()) * groups // pl.len()).alias("group")
    return rows.sort(by).with_columns(group).group_by("group", maintain_order=True)


def bins_by_run(rows: pl.DataFrame, x: str, y: str) -> dict[str, list[Bin]]:
    """Return `bins_of` each run."""
    runs = rows.sort("run_id", maintain_order=True).group_by("run_id", maintain_order=True)
    return {str(run): bins_of(part, x, y) for (run,), part in runs}


def _bin_table(bins: Iterable[Bin], x_name: str, y_name: str) -> Table:
    return Table((x_name, "rows", f"median {y_name}", "P10", "P90"), tuple(b.cells for b in bins))


def thinned(rows: pl.DataFrame, points: int) -> pl.DataFrame:
    """Take at most `points` rows, evenly."""
    return rows.gather_every(max(1, -(-rows.height // points)))


def _dots(name: str, rows: pl.DataFrame, x: str, y: str, **marker: object) -> Trace:
    """Draw rows as points; on hover a reader sees what was measured and predicted, and the batch."""
    batch = COMPOSITION if set(_BATCH_COLUMNS) <= set(rows.columns) else {}
    facts = rows.select(
        pl.col("measured_ms").alias("measured, ms"), pl.col("predicted_ms").alias("predicted, ms"), **batch
    )
    known = [fact for fact in facts if fact.count()]
    # Rounded here, not by the page: a number that is not known is a dash.
    written = [["-" if v is None else float(f"{v:.4g}") for v in fact] for fact in known]
    lines = [f"{fact.name}: %{{customdata[{k}]}}" for k, fact in enumerate(known)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name_text(name),
        "x": rounded(rows[x]),
        "y": rounded(rows[y]),
        "marker": {"size": 5, "opacity": 0.55, "symbol": "circle", **marker},
        "customdata": list(zip(*written, strict=True)),
        "hovertemplate": "<br>".join(lines) + "<extra></extra>",
    }


class Cloud(NamedTuple):
    """Rows as points of one quantity over another, and a sentence on how many of them are drawn."""

    traces: list[Trace]
    x: list[float]
    y: list[float]
    how_many: str


def _cloud(parts: Sequence[tuple[str, pl.DataFrame]], x: str, y: str, points: int) -> Cloud:
    """Draw at most `points` rows of each kind."""
    kinds = [(name, thinned(part.sort("ts_ns"), points)) for name, part in parts if part.height]
    styles = ((BLUE, "circle"), (ORANGE, "triangle-up"))
    traces = [
        _dots(name, some, x, y, color=colour, symbol=symbol)
        for (name, some), (colour, symbol) in zip(kinds, styles, strict=False)
    ]
    xs, ys = ([value for _, some in kinds for value in some[column]] for column in (x, y))
    rows = sum(part.height for _, part in parts)
    how_many = f"{count(len(xs))} of {count(rows)} rows, evenly in time."
    return Cloud(traces, xs, ys, f"All {count(rows)} rows." if len(xs) == rows else how_many)


# -- a model on its rows --------------------------------------------------------------------------------


def evaluated(model: Model, rows: pl.DataFrame) -> pl.DataFrame | None:
    """Return the rows of a training frame that count, with prediction, measurement and residual in ms.

    Null where the frame lacks a feature of the model or has no held-out row.
    """
    compiled = CompiledModel(model)
    if not compiled.columns_with_clock <= set(rows.columns):
        return None
    kept = rows.filter(pl.col("excluded_reason").is_null())
    if "source" in kept.columns:
        # A mean over an interval is no step: the errors of the report are those on single steps, if there are enough.
        single = kept.filter(pl.col("source") != "interval")
        kept = single if single.filter(split="holdout").height >= FEW_ROWS else kept
    # In seconds, or in steps where these have no time.
    unit = 1 if kept["ts_ns"].null_count() else 1e9
    needed = {*_STEP, *_BATCH_COLUMNS, "ts_ns", "split", *compiled.columns_with_clock}
    kept = kept.select(
        *(c for c in kept.columns if c in needed),
        predicted_ms=compiled.expression_with_clock() / US_PER_MS,
        measured_ms=pl.col("y") / US_PER_MS,
        at_s=(in_time() - in_time().min().over(SERVER)) / unit,
        first_regime=model.regimes[0].when.expression()
        if isinstance(model, RegimesModel)
        else pl.lit(value=True),
    )
    # To a nanosecond, the resolution of the clocks: rounding errors of arithmetic are no residuals.
    residual = (pl.col("measured_ms") - pl.col("predicted_ms")).round(6)
    kept = kept.with_columns(residual_ms=residual).drop_nulls("residual_ms")
    return kept if kept.filter(split="holdout").height else None


def _time_unit(rows: pl.DataFrame) -> str:
    """Return what `at_s` counts, for the label of an axis."""
    return "steps" if rows["ts_ns"].null_count() else "seconds"


_STRONG = 2


def model_figures(model: Model, rows: pl.DataFrame, *, points: int) -> tuple[Figure, ...]:
    """Draw the rows of one model for an expert: predictions, and residuals over time and over its strongest features."""
    name = anchor(f"{model.scope_id}-{model.name}")
    held = rows.filter(split="holdout")
    servers = rows.select(SERVER).n_unique()
    overlaid = f" The runs of {servers} servers overlay each other." if servers > 1 else ""
    cloud = _cloud(
        (("training rows", rows.filter(split="train")), ("held-out rows", held)),
        "at_s",
        "residual_ms",
        points,
    )
    over_time = _residuals(
        cloud,
        bins_of(rows, "at_s", "residual_ms"),
        f"{_time_unit(rows)} into the run",
        # Where runs of several servers overlay each other, their hold-outs do too.
        _covered("hold-out", held, SERVER) if servers == 1 else (),
        name=f"{name}-time",
        kind=f"{model.name}-residuals",
        title=f"{model.name}: residuals over time",
        look="Look for a drift or a step: then the server changed, and the end of the run is not like its beginning.",
        note=f"{cloud.how_many}{overlaid}",
    )
    over_features = [
        _residuals(
            _cloud((("held-out rows", known),), feature, "residual_ms", points),
            bins_of(known, feature, "residual_ms"),
            feature,
            name=f"{name}-over-{anchor(feature)}",
            kind=f"{model.name}-residuals-{feature}",
            title=f"{model.name}: residuals against {feature}",
            look=f"Look for a bend in the medians: then the effect of {feature} is not linear, and predictions at its ends are "
            "biased.",
            note="Held-out rows.",
        )
        for feature in _strongest(model, held)
        if (known := held.drop_nulls(feature)).height
    ]
    return (_predicted_figure(model, held, points), over_time, *over_features)


def _strongest(model: Model, held: pl.DataFrame) -> list[str]:
    """Name the features that move the prediction most over the training range."""
    effects = {
        t.feature: abs(t.value) * (t.training_range[1] - t.training_range[0])
        for form in main_forms(model).values()
        for t in form.terms
        if t.training_range is not None and t.feature in held.columns
    }
    return sorted(effects, key=lambda f: -effects[f])[:_STRONG]


_FAR_OUT = 4
"""Times the median from which on a largest value asks for logarithmic axes."""


def _predicted_figure(model: Model, held: pl.DataFrame, points: int) -> Figure:
    """Draw predicted against measured durations of held-out rows; of a model with regimes one kind of points per regime."""
    most, middle = held.select(pl.col("measured_ms").max(), middle=pl.col("measured_ms").median()).row(0)
    is_wide = isinstance(model, RegimesModel) or (most or 0.0) > _FAR_OUT * max(middle or 0.0, 1e-9)
    parts = [("held-out rows", held)]
    look = "Look for a cloud that leaves the line at one end: the model misses a bend there."
    if isinstance(model, RegimesModel):
        first, rest = model.regimes[0].name, model.regimes[-1].name
        parts = [(first, held.filter("first_regime")), (rest, held.filter(~pl.col("first_regime")))]
        look = f"Look for points of *{first}* among those of *{rest}*: there the condition between the two regimes is wrong."
    if is_wide:
        positive = (pl.col("measured_ms") > 0) & (pl.col("predicted_ms") > 0)
        parts = [(name, part.filter(positive)) for name, part in parts]
    without_place = held.height - sum(part.height for _, part in parts)
    zeros = f" {plural(without_place, 'row')} with a zero cannot be drawn on logarithmic axes."
    cloud = _cloud(parts, "measured_ms", "predicted_ms", points)
    # Both axes have one scale, so that the diagonal is where a prediction is right.
    values = [*cloud.x, *cloud.y]
    ends = (min(values, default=0.0), max(values, default=1.0))

    def axis(title: str) -> Trace:
        return log_axis(title, values) if is_wide else axis_of(title)

    diagonal = line("predicted as measured", ends, ends, GREY, dash="dash", hoverinfo="skip")
    return Figure(
        name=f"{anchor(f'{model.scope_id}-{model.name}')}-against",
        kind=f"{model.name}-predicted",
        title=f"{model.name}: predicted against measured",
        look=look,
        note=f"Held out. {cloud.how_many}{zeros if without_place else ''}",
        summary=_bin_table(bins_of(held, "measured_ms", "predicted_ms"), "measured, ms", "predicted, ms"),
        traces=(*cloud.traces, diagonal),
        layout={"xaxis": axis("measured, ms"), "yaxis": axis("predicted, ms")},
    )


def _residuals(
    cloud: Cloud,
    bins: Sequence[Bin],
    x: str,
    regions: Iterable[ShadedRegion] = (),
    **words: Unpack[FigureWords],
) -> Figure:
    limits, beyond = limited(cloud.y)
    medians = line("median of each eighth", [b.middle for b in bins], [b.median for b in bins], PINK)
    words["note"] = f"{words['note']} {beyond}".rstrip()
    return Figure(
        **words,
        summary=_bin_table(bins, x, "residual, ms"),
        traces=(*cloud.traces, medians),
        layout={
            "xaxis": spread_axis(name_text(x), cloud.x),
            "yaxis": axis_of("measured - predicted, ms", zeroline=True, **limits),
            "shapes": shaded(regions),
        },
    )


# -- step times over time -------------------------------------------------------------------------------

TIME_BINS = 160
_BETWEEN_RUNS = 0.02
"""Room between two runs on a common time axis, as a share of all their time."""


def step_times_figure(scope_id: str, kept: pl.DataFrame, *, points: int) -> Figure:
    """Draw measured and predicted step times over time, runs one after the other; single steps show what they computed."""
    # Without the time between runs: traces of two days would be two dots with nothing between them.
    engines = kept.group_by(SERVER, maintain_order=True).agg(seconds=pl.col("at_s").max()).head(MOST_RUNS)
    total = float(engines["seconds"].sum()) or 1.0
    begins = pl.col("seconds").cum_sum().shift(1, fill_value=0.0)
    engines = engines.with_columns(begins=begins + _BETWEEN_RUNS * total * pl.int_range(pl.len()))
    rows = (
        kept.join(engines, on=SERVER, how="inner", maintain_order="left")
        .with_columns(at_s=pl.col("at_s") + pl.col("begins"))
        .sort("at_s")
    )
    place = (pl.col("at_s") / (total / TIME_BINS)).floor()
    means = (
        rows.group_by("begins", place.alias("bin"), maintain_order=True)
        .agg(pl.col("at_s", "measured_ms", "predicted_ms").mean())
        .sort("at_s")
    )
    # A row of nulls before every run but the first: there the lines break.
    breaks = pl.DataFrame({"begins": engines["begins"][1:], "at_s": engines["begins"][1:]})
    drawn = pl.concat([breaks, means], how="diagonal").sort("begins", "at_s", maintain_order=True)
    some = thinned(rows, points)
    limits, note = limited([*some["measured_ms"], *means["measured_ms"]], from_zero=True)
    several = engines.height > 1
    at: Trace = {"xref": "x", "y": 1, "yref": "paper", "xanchor": "left", "showarrow": False}
    named = engines.select(
        pl.when(pl.col("run_id").is_duplicated())
        .then(pl.col("run_id") + ", " + pl.col("server"))
        .otherwise("run_id"),
        "begins",
    )
    hover = "%{y:.3~f} ms<extra>%{fullData.name}</extra>"
    return Figure(
        name=anchor(f"{scope_id}-step-times"),
        kind="step-times",
        title="Step times over time: predicted against measured",
        look="Look for times at which the two lines part: what the server did then, the model does not know.",
        note=f"Lines are means over equal intervals of time, points single steps. {note}".rstrip(),
        hint="Hover over a point for what that step computed; drag to zoom, double-click to see everything again.",
        summary=_step_times_table(means),
        traces=(
            _dots("single steps, measured", some, "at_s", "measured_ms", color=MEASURED, opacity=0.4),
            *(
                line(name, drawn["at_s"], drawn[f"{name}_ms"], colour, connectgaps=False, hovertemplate=hover)
                for name, colour in (("measured", MEASURED), ("predicted", PREDICTED))
            ),
        ),
        layout={
            "xaxis": axis_of(
                f"{_time_unit(kept)}, runs one after the other"
                if several
                else f"{_time_unit(kept)} into the run"
            ),
            "yaxis": axis_of("step time, ms", **limits),
            "shapes": shaded(_covered("hold-out", rows.filter(split="holdout"), ["begins"])),
            "annotations": [
                {"text": name_text(run), "x": begins, **at}
                for run, begins in (named.iter_rows() if several else ())
            ],
        },
        wide=True,
        height=380,
    )


def _step_times_table(means: pl.DataFrame, parts: int = 8) -> Table:
    rows = []
    for k in range(parts):
        some = means[k * means.height // parts : (k + 1) * means.height // parts]
        if some.height:
            measured, predicted = (sum(some[c]) / some.height for c in ("measured_ms", "predicted_ms"))
            off = percent(100 * (predicted / measured - 1)) if measured else "-"
            span = f"{number(some['at_s'][0])} to {number(some['at_s'][-1])}"
            rows.append((span, number(measured), number(predicted), off))
    return Table(("seconds", "measured, ms", "predicted, ms", "off by %"), tuple(rows))


# -- what durations consist of --------------------------------------------------------------------------

_QUANTILES = 10
EVERY_STEP = "every step"

_PARTS: Mapping[str, tuple[str, ...]] = {
    EVERY_STEP: ("layers",),
    "weights": ("weight_read_us", "weight_kb", "moe_expert_read_us", "expert_kb"),
    "prompt tokens": (
        *("prefill_compute_us", "prefill_mflop", "prefill_kv_write_us", "kv_write_kb", "prefill_tokens"),
        *("prefill_tokens_squared", "prefill_tokens_x_layers", "prefill_share"),
    ),
    "generated tokens": ("decode_compute_us", "decode_mflop", "decode_tokens"),
    "context": (
        *("decode_kv_read_us", "kv_read_kb", "context_tokens", "decode_tokens_x_kv_blocks"),
        "kv_usage_ratio",
    ),
    "requests": (
        *("batch_requests", "num_prefill_reqs", "num_decode_reqs", "num_decode_reqs_squared"),
        *("first_decode_reqs", "running_depth"),
    ),
    "waiting requests": ("waiting_depth",),
    "communication": ("tp_comm_us", "moe_dispatch_us"),
}
"""Part to the features that belong to it; any other feature is a part of its own."""

_PART_OF = {feature: part for part, features in _PARTS.items() for feature in features}
_PART_COLOURS = dict(zip(_PARTS, (GREY, BLUE, ORANGE, GREEN, PURPLE, TEAL, PINK, AMBER), strict=True))

_OVERHEAD_COLOURS = (BLUE, PINK, GREEN, PURPLE, TEAL, AMBER, GREY)
"""Of the overheads in TTFT, in the order a request goes through them; without that of the prefill."""


class Breakdown(NamedTuple):
    """Durations in groups of equal size from short to long: means of each group, of the parts in ms by name and of the whole."""

    # Means, not medians: those of the parts add up to that of the whole.
    parts: dict[str, list[float]]
    measured: list[float]
    rows: list[int]
    facts: dict[str, list[float | None]]


def step_breakdown(model: LinearModel, steps: pl.DataFrame) -> Breakdown | None:
    """Return what step times consist of by the terms of their model, short steps first; null where no step has all it needs.

    `steps` have `measured_ms`, the model's features, and the `timeline` columns of the batch that executed.
    """
    compiled = CompiledModel(model)
    largest = {t.feature: _largest_of(compiled.formulas.nodes.get(t.feature)) for t in model.terms}
    known = compiled.formulas.frame(
        steps, {name for sums in largest.values() for one in sums for name in one}
    )
    parts: dict[str, list[pl.Expr]] = {EVERY_STEP: [pl.lit(model.intercept.value)]}
    for term in model.terms:
        sums = largest[term.feature]
        can_split = sums and all(set(one) <= set(known.columns) for one in sums)
        addends = _split(sums) if can_split else {term.feature: pl.col(term.feature)}
        for name, value in addends.items():
            parts.setdefault(_PART_OF.get(name, name), []).append(term.value * value)
    us = {name: pl.sum_horizontal(values, ignore_nulls=False) for name, values in parts.items()}
    return _breakdown(known, us, pl.col("measured_ms"), COMPOSITION)


def first_token_breakdown(requests: pl.DataFrame) -> Breakdown | None:
    """Return what the measured TTFT consists of, shortest first; null where no request has all of its parts."""
    us = {name: pl.col(column) for name, column in _first_token_parts().items()}
    facts = {"prompt tokens": pl.col("prompt_tokens")}
    return _breakdown(requests, us, pl.col("ttft_us") / US_PER_MS, facts)


def _first_token_parts() -> dict[str, str]:
    """Return what TTFT consists of: name to column of the `requests` table, in us."""
    return {target.label: target.column for target in parts_of("ttft")} | {"prefill": "prefill_us"}


def _breakdown(
    rows: pl.DataFrame, parts_us: Mapping[str, pl.Expr], whole_ms: pl.Expr, facts: Mapping[str, pl.Expr]
) -> Breakdown | None:
    """Sum up rows in groups of equal size by their duration; parts that are zero everywhere are left out."""
    # A part and a fact may have one name.
    columns = {f"part {name}": value / US_PER_MS for name, value in parts_us.items()}
    known = rows.select(whole=whole_ms, **columns, **facts).drop_nulls(["whole", *columns])
    if known.height < _QUANTILES:
        return None
    means = _in_groups(known, "whole", _QUANTILES).agg(
        pl.len().alias("rows"), pl.col(["whole", *columns, *facts]).mean()
    )
    return Breakdown(
        {name: means[f"part {name}"].to_list() for name in parts_us if means[f"part {name}"].abs().max()},
        means["whole"].to_list(),
        means["rows"].to_list(),
        {name: means[name].to_list() for name in facts},
    )


_Sum: TypeAlias = dict[str, float]
"""Name to factor."""


def _largest_of(node: Node | None) -> list[_Sum]:
    """Return the sums that a formula is the largest of; none for any other formula."""
    if not isinstance(node, Call) or node.function != "max":
        return []
    sums = [_addends(argument) for argument in node.arguments]
    return [one for one in sums if one is not None] if None not in sums else []


def _split(sums: list[_Sum]) -> dict[str, pl.Expr]:
    """Return the addends of the largest of several sums, row by row: 0 where their sum is not the largest."""
    addends = [{name: factor * pl.col(name) for name, factor in one.items()} for one in sums]
    wholes = [pl.sum_horizontal(one.values(), ignore_nulls=False) for one in addends]
    largest = pl.concat_list(wholes).list.arg_max()
    return {
        name: pl.when(largest == k).then(value).otherwise(0.0)
        for k, one in enumerate(addends)
        for name, value in one.items()
    }


def _addends(node: Node, factor: float = 1.0) -> _Sum | None:
    """Return name to factor of a sum of names; null for any other formula."""
    match node:
        case Name(name):
            return {name: factor}
        case Binary("+", left, right):
            first, second = _addends(left, factor), _addends(right, factor)
            return None if first is None or second is None else first | second
        case Binary("*", Constant(value), other) | Binary("*", other, Constant(value)):
            return _addends(other, factor * value)
        case _:
            return None


def breakdown_figure(scope_id: str, found: Breakdown | None) -> Figure | None:
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


def first_token_figure(scope_id: str, found: Breakdown | None) -> Figure | None:
    """Draw what the measured TTFT consists of, requests with the shortest first."""
    overheads = parts_of("ttft")
    colours = dict(zip((target.label for target in overheads), cycle(_OVERHEAD_COLOURS), strict=False))
    meanings = [f"*{target.label}* ({target.definition})" for target in overheads]
    return _stacked(
        found,
        colours | {"prefill": ORANGE},
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
    found: Breakdown | None, colours: Mapping[str, str], what: str, y: str, **words: Unpack[FigureWords]
) -> Figure | None:
    """Draw the parts of durations as bars on each other; null where there are none."""
    if found is None:
        return None
    width = 100 / len(found.rows)
    at = [width * (k + 0.5) for k in range(len(found.rows))]
    groups = [f"{width * k:.0f} to {width * (k + 1):.0f} %" for k in range(len(found.rows))]
    facts = [
        "<br>".join(f"{n}: {number(v)}" for n, values in found.facts.items() if (v := values[k]) is not None)
        for k in range(len(groups))
    ]
    wholes = [sum(values) for values in zip(*found.parts.values(), strict=True)]
    traces: list[Trace] = [
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
    ]
    # Parts of a step are predicted, so that the measurement beside them shows what they miss; those of TTFT are measured.
    if what == "step":
        outline = {"color": "#1b1f24", "width": 1.5}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": at,
                "y": rounded(found.measured),
                "marker": {"symbol": "diamond", "size": 8, "color": "#fff", "line": outline},
                "hovertemplate": "measured: %{y:.3~f} ms<extra></extra>",
            }
        )
    columns = ([number(v) for v in values] for values in (*found.parts.values(), found.measured))
    axis = axis_of(f"{what}s from the shortest to the longest, %", range=[0, 100], showgrid=False)
    return Figure(
        **words,
        summary=Table(
            (f"{what}s by length", f"{what}s", *(f"{p}, ms" for p in found.parts), "measured, ms"),
            tuple(zip(groups, map(count, found.rows), *columns, strict=True)),
        ),
        traces=tuple(traces),
        # Relative: a part below zero, such as a negative intercept, hangs below the axis.
        layout={"xaxis": axis, "yaxis": axis_of(y), "barmode": "relative"},
    )


# -- latencies and steps over load ----------------------------------------------------------------------


def measured_latencies(requests: pl.DataFrame) -> dict[str, dict[int, float]]:
    """Return percentiles of the measured request latencies in ms; a latency of fewer than two requests is left out."""
    found = {}
    for name in LATENCIES:
        positive = requests[f"{name}_us"].drop_nulls()
        positive = positive.filter(positive > 0)
        if positive.len() >= 2:
            found[name] = {
                p: float(positive.quantile(p / 100, "linear") or 0.0) / US_PER_MS for p in PERCENTS
            }
    return found


def latencies_over_load(requests: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the requests with each latency, `ms`, and those `in_flight` when one arrived, of the `requests` table."""
    began = pl.coalesce("arrival_ns", "queued_ns")
    ended = pl.coalesce("finished_ns", "aborted_ns", "departed_ns")
    rows = requests.with_columns(began=began, ended=ended).drop_nulls("began")
    parts = [
        part.with_columns(in_flight=_in_flight(part).cast(pl.Float64))
        for _, part in rows.group_by(SERVER, maintain_order=True)
    ]
    if not parts:
        return {}
    cut_off = pl.col("finish_status").is_in(CUT_OFF).fill_null(value=False)
    found = {}
    for name in LATENCIES:
        ms = pl.col(f"{name}_us") / US_PER_MS
        known = pl.concat(parts).filter(ms > 0, pl.lit(name == "ttft") | ~cut_off).with_columns(ms=ms)
        if known.height >= 2:
            found[name] = known
    return found


def _in_flight(rows: pl.DataFrame) -> pl.Series:
    """Count the requests of a server that had begun and not ended when each one began; those without an end do not count."""
    whole = rows.drop_nulls("ended")
    starts, ends = whole["began"].sort(), whole["ended"].sort()
    began = starts.search_sorted(rows["began"], side="left")
    return began.cast(pl.Int64) - ends.search_sorted(rows["began"], side="right").cast(pl.Int64)


def latency_load_figure(
    scope_id: str, loads: Mapping[str, pl.DataFrame], slo_ms: Mapping[str, float], more_runs: int = 0
) -> Figure | None:
    """Draw `latencies_over_load`, one line per run where there are several; objectives are lines across."""
    if not loads:
        return None
    bins = {key: bins_by_run(rows, "in_flight", "ms") for key, rows in loads.items()}
    several = any(len(runs) > 1 for runs in bins.values())
    traces: list[Trace] = []
    shapes: list[Trace] = []
    axes: list[Trace] = []
    within = []
    for place, (key, runs) in enumerate(bins.items()):
        axis, label = axis_number(place), LATENCIES[key]
        for (run, found), own in zip(runs.items(), COLOURS, strict=False):
            # Of several runs only the slow tenth, which objectives are about: two lines each would be too many to tell apart.
            shown = [("P90", "p90", own)] if several else [("median", "median", BLUE), ("P90", "p90", PINK)]
            traces += [
                line(
                    run if several else words,
                    [b.middle for b in found],
                    [getattr(b, what) for b in found],
                    colour,
                    mode="lines+markers",
                    yaxis=f"y{axis}",
                    legendgroup=run if several else words,
                    showlegend=place == 0,
                    customdata=[f"{b.ends} in flight, {plural(b.rows, 'request')}" for b in found],
                    hovertemplate=f"{label} {words} %{{y:,.4~r}} ms<br>%{{customdata}}<extra>%{{fullData.name}}</extra>",
                )
                for words, what, colour in shown
            ]
        every = [b for found in runs.values() for b in found]
        if slo := slo_ms.get(key):
            ms = loads[key]["ms"]
            share = 100 * int((ms <= slo).sum()) / ms.len()
            within.append(f"{percent(share)} % of {count(ms.len())} requests had {label} within {slo:,g} ms")
            if words := objective(slo, max(b.p90 for b in every)):
                shapes.append(mark(f"{label}: {words}", "y", slo, on=f"y{axis}"))
        values = [v for b in every for v in (b.median, b.p90)]
        axes.append(log_axis(f"{label}, ms", values))
    apart = " Runs whose lines lie apart at one load differ in their servers or in their requests."
    objectives = f" Objectives (SLO): {'; '.join(within)}; `tracefit report --slo` sets others."
    return Figure(
        name=anchor(f"{scope_id}-latency-load"),
        height=130 + 130 * len(bins),
        kind="latency-by-load",
        title="Latencies against load" + (", P90 of each run" if several else ""),
        look="Look for the load from which a latency climbs: there the server is full.",
        note=f"Measured requests in groups of equal size by the traced requests in flight when each arrived."
        f"{_left_out(more_runs)}{objectives if within else ''}{apart if several else ''}",
        summary=Table(
            ("latency", "run", "requests in flight", "requests", "median, ms", "P90, ms"),
            tuple(
                (LATENCIES[key], f"`{run}`", b.ends, count(b.rows), number(b.median), number(b.p90))
                for key, runs in bins.items()
                for run, found in runs.items()
                for b in found
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


def step_times_over_batch(timeline: pl.DataFrame) -> dict[str, list[Bin]]:
    """Return the step times of each run over the requests in the batch, of steps whose next one is known and not idle."""
    steps = timeline.filter(pl.col("cycle_source") == "adjacent", ~pl.col("idle_after")).with_columns(
        ms=pl.col("cycle_us") / US_PER_MS
    )
    return bins_by_run(steps.drop_nulls(["ms", "running_depth"]), "running_depth", "ms")


def runs_figure(scope_id: str, step_times: Mapping[str, Sequence[Bin]], more_runs: int = 0) -> Figure | None:
    """Overlay the step times of several runs over the requests in the batch; null for a single run."""
    if len(step_times) < 2:
        return None
    return Figure(
        name=anchor(f"{scope_id}-runs"),
        kind="runs",
        title="Runs overlaid: step times against the batch",
        look="Look for lines that lie apart: one model for all of them is then wrong for each.",
        note=f"Median times of steps in groups of equal size by the requests in the batch.{_left_out(more_runs)}",
        summary=Table(
            ("run", "requests in the batch", "steps", "median, ms", "P10", "P90"),
            tuple((f"`{run}`", *b.cells) for run, bins in step_times.items() for b in bins),
        ),
        traces=tuple(
            line(
                run,
                [b.middle for b in bins],
                [b.median for b in bins],
                colour,
                mode="lines+markers",
                customdata=[f"{b.ends} requests, {plural(b.rows, 'step')}" for b in bins],
                hovertemplate="%{y:.3~f} ms<br>%{customdata}<extra>%{fullData.name}</extra>",
            )
            for (run, bins), colour in zip(step_times.items(), COLOURS, strict=False)
        ),
        layout={"xaxis": axis_of("requests in the batch"), "yaxis": axis_of("median step time, ms")},
    )


# -- engines over their runs ----------------------------------------------------------------------------

BINS = 80
SHORTEST_IDLE_SHARE = 0.005
"""Idle gaps shorter than this share of the run are too thin to be visible."""

MOST_IDLE_GAPS = 60

TIMELINE_COLUMNS = (
    *("server", "ts_start_ns", "cycle_us", "interval_steps", "idle_after", "running_depth"),
    *("waiting_depth", "prefill_tokens", "decode_tokens", "kv_usage_ratio"),
)
_QUANTITIES = {
    "running": ("running", "requests running", BLUE),
    "waiting": ("waiting", "requests waiting", PINK),
    "tokens": ("tokens", "tokens per step", ORANGE),
    "kv_pct": ("KV, %", "KV blocks in use, %", PURPLE),
    "cycle_ms": ("step, ms", "step time, ms", GREEN),
}
"""Quantity to the label of its panel, what it is in full, and its colour."""


def _engine_figures(
    scope: ScopeEvaluation, store: TableStore, steps: pl.DataFrame
) -> tuple[list[Figure], str]:
    """Draw the engines of overloaded runs first, trained on or not: a reader should look at those; say if some are not."""
    overloads = {o.run_id: o for o in scope.overloaded}
    runs = dict.fromkeys(r for r in (*overloads, *scope.runs) if r in store.runs())
    found: list[Figure] = []
    for run_id in runs:
        timeline = store.read("timeline", [run_id], TIMELINE_COLUMNS)
        training = steps.filter(pl.col("run_id") == run_id)
        for server in timeline["server"].unique().sort():
            if len(found) == MOST_ENGINES:
                break
            own = pl.col("server") == server
            engine = engine_figure(
                timeline.filter(own),
                training.filter(own),
                run_id=run_id,
                server=server,
                overload=overloads.get(run_id),
            )
            found += [engine] if engine is not None else []
    are_more = scope.timeline.servers > len(found)
    note = f"{len(found)} of {count(scope.timeline.servers)} engines are drawn, overloaded ones first."
    return found, note if are_more else ""


def engine_figure(
    timeline: pl.DataFrame,
    training: pl.DataFrame,
    *,
    run_id: str,
    server: str,
    overload: Overload | None = None,
) -> Figure | None:
    """Draw what one engine did over its run; null where fewer than two steps are known.

    `timeline` has the server's rows of that table (`TIMELINE_COLUMNS`), `training` those of `beta_training`, if any, for the
    warm-up and the hold-out; `overload` is that of the run in the evaluation.
    """
    # Steps that nothing anchors in time, or of unknown batch, have no place in the figure.
    known = timeline.drop_nulls(["ts_start_ns", "running_depth"]).sort("ts_start_ns")
    if known.height < 2:
        return None
    start = int(known["ts_start_ns"][0])
    known = known.with_columns(at_s=(pl.col("ts_start_ns") - start) / 1e9)
    training = training.with_columns(at_s=(pl.col("ts_ns") - start) / 1e9)
    seconds = float(known["at_s"][-1]) or 1.0
    bins = _time_bins(known, seconds)
    overloaded = [
        ShadedRegion("overload", max(0.0, (q.from_ns - start) / 1e9), (q.to_ns - start) / 1e9)
        for q in (overload.queued if overload else ())
        if q.server == server
    ]
    warm_up = _covered("warm-up", training.filter(excluded_reason="warm_up"), ["epoch"])
    regions = (*warm_up, *_idle(known, seconds), *_queues(bins, overloaded), *overloaded)
    held = training.filter(split="holdout")
    boundary = held.select(pl.col("at_s").min()).item() if held.height else None
    shapes = shaded(regions)
    if boundary is not None:
        shapes.append(mark("hold-out begins", "x", boundary, colour=GREY))
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
        name=anchor(f"engine-{run_id}-{server}"),
        height=90 + 105 * len(drawn),
        kind="timeline",
        title=f"The engine of {run_id}, {server}{fate}",
        look="Look for a hold-out unlike what comes before it: then its errors say little about the rest. A queue that grows "
        "through the whole run means that the server was offered more than it can do.",
        note="Means of the traced steps over equal intervals of time; of step times the median.",
        summary=_engine_table(bins, boundary, regions),
        traces=tuple(traces),
        layout={
            # One time, one label in each panel: panels share the axis.
            "hovermode": "x",
            "shapes": shapes,
            **panels(axis_of("seconds into the run"), axes, 0.05),
        },
        wide=True,
    )


def _engine_table(bins: pl.DataFrame, boundary: float | None, regions: Sequence[ShadedRegion]) -> Table:
    is_before = pl.col("at_s") < (float("inf") if boundary is None else boundary)
    rows = []
    for label, part in (
        ("before the hold-out", bins.filter(is_before)),
        ("hold-out", bins.filter(~is_before)),
    ):
        means = [mean_of(part[key]) for key in _QUANTITIES]
        rows += [(label, *map(number, means))] if any(v is not None for v in means) else []
    for kind in dict.fromkeys(r.kind for r in regions):
        lengths = [r.end - r.start for r in regions if r.kind == kind]
        label = f"{kind}: {plural(len(lengths), 'interval')}, {number(sum(lengths))} s"
        rows.append((label, *[""] * len(_QUANTITIES)))
    return Table(("part of the run", *(head for _, head, _ in _QUANTITIES.values())), tuple(rows))


def _time_bins(known: pl.DataFrame, seconds: float) -> pl.DataFrame:
    # The last step starts at the end of the last interval: it belongs to that one.
    width = seconds / BINS
    place = (pl.col("at_s") / width).floor().clip(0, BINS - 1)
    busy = pl.col("cycle_us").filter(~pl.col("idle_after"))
    return (
        known.with_columns(bin=place)
        .group_by("bin", maintain_order=True)
        .agg(
            at_s=pl.col("at_s").mean(),
            running=pl.col("running_depth").mean(),
            waiting=pl.col("waiting_depth").mean(),
            queued=pl.col("waiting_depth").min() > 0,
            # Not per second: of sampled steps the tokens of those between are not known.
            tokens=(pl.col("prefill_tokens") + pl.col("decode_tokens")).mean(),
            kv_pct=100 * pl.col("kv_usage_ratio").mean(),
            cycle_ms=busy.median() / US_PER_MS,
        )
        .with_columns(start=pl.col("bin") * width, end=(pl.col("bin") + 1) * width)
        .sort("bin")
    )


def _queues(bins: pl.DataFrame, overloaded: Sequence[ShadedRegion]) -> list[ShadedRegion]:
    """Join neighbouring intervals in which requests wait at every step, but those already marked as overload."""
    middle = (pl.col("start") + pl.col("end")) / 2
    marked = pl.any_horizontal(pl.lit(value=False), *(middle.is_between(b.start, b.end) for b in overloaded))
    queued = bins.filter(pl.col("queued").fill_null(value=False) & ~marked)
    group = (pl.col("bin").diff().fill_null(1) > 1).cum_sum()
    joined = queued.with_columns(group=group).group_by("group", maintain_order=True)
    return _regions("queue never empty", joined.agg(pl.col("start").min(), pl.col("end").max()))


def _idle(known: pl.DataFrame, seconds: float) -> list[ShadedRegion]:
    length = pl.col("cycle_us") * pl.col("interval_steps") / 1e6
    gaps = known.filter(pl.col("idle_after") & (length > SHORTEST_IDLE_SHARE * seconds))
    ends = gaps.select(start="at_s", end=pl.col("at_s") + length, length=length)
    return _regions("idle", ends.sort("length", descending=True).head(MOST_IDLE_GAPS).sort("start"))


def _covered(kind: RegionKind, rows: pl.DataFrame, by: Sequence[str]) -> list[ShadedRegion]:
    """Return the time that each group of rows covers."""
    groups = rows.group_by(by, maintain_order=True)
    return _regions(kind, groups.agg(start=pl.col("at_s").min(), end=pl.col("at_s").max()))


def _regions(kind: RegionKind, ends: pl.DataFrame) -> list[ShadedRegion]:
    return [ShadedRegion(kind, start, end) for start, end in ends.select("start", "end").iter_rows()]
