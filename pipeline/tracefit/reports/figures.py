"""Figures of one model: coefficients, predicted against measured, residuals, errors by kind of row."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.compiled import CompiledModel, holds_expression
from tracefit.coefficients.model import RegimesModel, Term
from tracefit.fit.splits import FEW_ROWS
from tracefit.reports.cells import count, number
from tracefit.reports.model import Band, Figure, Panel, Series, Table
from tracefit.reports.models import AnyModel, terms_of

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Entry, ErrorOverLoadEntry

US_PER_MS = 1e3
_SUMMARY_ROWS = 8
_STRONG = 2
_FAR_OUT = 4
"""Times the median from which on a largest value asks for an axis of powers of ten."""


def model_figures(
    model: AnyModel, entry: Entry, rows: pl.DataFrame | None, *, points: int
) -> tuple[Figure, ...]:
    """Draw what tells a model: for each, what to look for and the numbers behind it.

    Args:
        model: The model.
        entry: Its validation.
        rows: Its training frame, of every split; rows that were left out are marked in `excluded_because`. Null without
            tables: then only what the files tell is drawn.
        points: At most so many points per series, evenly taken in time.
    """
    name = _clean(f"{model.scope_id}-{model.name}")
    figures = [
        _forest(name, model),
        _errors(name, model.name, entry),
        _over_load(name, model.name, entry.error_over_load),
    ]
    compiled = CompiledModel(model)
    if rows is not None and compiled.columns_with_clock <= set(rows.columns):
        kept = _predicted(compiled, rows)
        held = kept.filter(pl.col("split") == "holdout")
        if held.height:
            figures += [
                _against(name, model, held, points),
                _over_time(name, model.name, kept, points),
                *_over_features(name, model, held, points),
            ]
    return tuple(f for f in figures if f is not None)


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def _predicted(compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that count, with the prediction and the measurement in ms."""
    model = compiled.model
    kept = rows.filter(pl.col("excluded_because").is_null())
    if "source" in kept.columns:
        # A mean over an interval is no step: the errors of the report are those on single steps, if there are enough.
        single = kept.filter(pl.col("source") != "interval")
        kept = single if single.filter(pl.col("split") == "holdout").height >= FEW_ROWS else kept
    start = pl.col("ts_ns").min().over("run_id", "server")
    drawn = {"run_id", "server", "ts_ns", "split", *compiled.columns_with_clock}
    kept = kept.select(
        *(c for c in kept.columns if c in drawn),
        predicted_ms=compiled.expression_with_clock() / US_PER_MS,
        measured_ms=pl.col("y") / US_PER_MS,
        at_s=(pl.col("ts_ns") - start) / 1e9,
        first_regime=holds_expression(model.regimes[0].when)
        if isinstance(model, RegimesModel)
        else pl.lit(value=True),
    )
    # To a nanosecond, as clocks tell it: rounding errors of arithmetic are no residuals.
    residual = (pl.col("measured_ms") - pl.col("predicted_ms")).round(6)
    return kept.with_columns(residual_ms=residual).drop_nulls("residual_ms")


def thinned(rows: pl.DataFrame, points: int) -> pl.DataFrame:
    """Take at most `points` rows, evenly."""
    return rows.gather_every(max(1, -(-rows.height // points)))


def _series(name: str, rows: pl.DataFrame, x: str, y: str, points: int) -> Series:
    taken = thinned(rows.sort("ts_ns"), points)
    return Series(name, "points", tuple(taken[x].to_list()), tuple(taken[y].to_list()))


def _terms(model: AnyModel) -> list[tuple[str, Term]]:
    if isinstance(model, RegimesModel):
        return [(f"{r.name}: ", t) for r in model.regimes for t in r.terms]
    return [("", t) for t in terms_of(model)]


def _forest(name: str, model: AnyModel) -> Figure | None:
    """Draw what each term adds between the smallest and the largest value it was trained on."""
    drawn = [(f"{prefix}{t.feature}", t) for prefix, t in _terms(model) if t.training_range is not None]
    if not drawn:
        return None
    ranges = [t.training_range[1] - t.training_range[0] if t.training_range else 0.0 for _, t in drawn]
    values = [t.value * r / US_PER_MS for (_, t), r in zip(drawn, ranges, strict=True)]
    ends = [
        tuple(sorted(v * r / US_PER_MS for v in (t.ci95 or (t.value, t.value))))
        for (_, t), r in zip(drawn, ranges, strict=True)
    ]
    rows = tuple(
        (f"`{label}`", f"{v:.4g}", f"{low:.4g} to {high:.4g}")
        for (label, _), v, (low, high) in zip(drawn, values, ends, strict=True)
    )
    places = tuple(float(k) for k in range(len(drawn)))
    lows, highs = tuple(e[0] for e in ends), tuple(e[1] for e in ends)
    series = Series("effect over the range seen", "intervals", tuple(values), places, lows, highs)
    return Figure(
        name=f"{name}-terms",
        title=f"{model.name}: what each term adds",
        caption="The point is the coefficient times the range of its feature in the training rows, the line its 95 % "
        "interval. Look for intervals that cross zero: those terms could as well not be there.",
        x_label="ms",
        panels=(Panel("", (series,)),),
        categories=tuple(label for label, _ in drawn),
        summary=Table(("term", "adds, ms", "95 % interval, ms"), rows),
    )


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
    places = tuple(float(k) for k in range(len(known)))
    series = Series("mean absolute error", "bars", tuple(v for _, v in known), places)
    return Figure(
        name=f"{name}-errors",
        title=f"{model_name}: errors on the hold-out",
        caption="Mean absolute error. Look for a bar well below the baseline's and near the reference's: a long way above "
        "the reference means that a straight line misses something in these features.",
        x_label="ms",
        panels=(Panel("", (series,)),),
        categories=tuple(label for label, _ in known),
        summary=Table(("of", "mean absolute error, ms"), tuple((label, f"{v:.4g}") for label, v in known)),
    )


_LOADS = {
    "running_tokens": "tokens in the caches of the batch",
    "batch_requests": "requests of the batch",
}


def _over_load(name: str, model_name: str, found: ErrorOverLoadEntry | None) -> Figure | None:
    """Draw error and bias over the load of held-out rows, the range of the training rows shaded."""
    bins = [b for b in found.bins if b.holdout.mape_pct is not None] if found else []
    if found is None or not bins:
        return None
    places = tuple((b.low + b.high) / 2 for b in bins)
    mape = tuple(b.holdout.mape_pct or 0.0 for b in bins)
    bias = tuple(b.holdout.bias_pct or 0.0 for b in bins)
    low, high = found.training_range
    rows = tuple(
        (
            f"{b.low:,.0f} to {b.high:,.0f}",
            count(b.holdout.n),
            number(b.holdout.mape_pct),
            number(b.holdout.bias_pct),
            "inside" if b.high <= high and b.low >= low else "beyond",
        )
        for b in bins
    )
    return Figure(
        name=f"{name}-load",
        title=f"{model_name}: error by load",
        caption="Held-out rows in groups of equal size by load; the loads of the training rows are shaded. Look for an error "
        "that grows, or a bias that leaves zero, beyond the shade: there the model is asked about what it has not seen.",
        x_label=_LOADS[found.load],
        panels=(
            Panel("MAPE, %", (Series("mean absolute error", "line", places, mape),)),
            Panel("bias, %", (Series("bias", "line", places, bias),), zero=True),
        ),
        bands=(Band("training range", low, high),),
        summary=Table((_LOADS[found.load], "rows", "MAPE %", "bias %", "training range"), rows),
    )


def _against(name: str, model: AnyModel, held: pl.DataFrame, points: int) -> Figure:
    most, middle = held.select(pl.col("measured_ms").max(), middle=pl.col("measured_ms").median()).row(0)
    log = (most or 0.0) > _FAR_OUT * max(middle or 0.0, 1e-9)
    look = (
        "Points on the line are right; a cloud that leaves it at one end is a bend the model does not know."
    )
    parts = [("held-out rows", held)]
    if isinstance(model, RegimesModel):
        first, rest = model.regimes[0].name, model.regimes[-1].name
        parts = [(first, held.filter("first_regime")), (rest, held.filter(~pl.col("first_regime")))]
        log = True
        look = (
            f"The two regimes: {first} when its condition holds, {rest} otherwise. Look for points of one regime among "
            "the other's: there the condition is wrong, and the error is the whole distance between them."
        )
    kept = [(n, p.filter((pl.col("measured_ms") > 0) & (pl.col("predicted_ms") > 0))) for n, p in parts]
    shown = kept if log else parts
    hidden = held.height - sum(p.height for _, p in shown)
    drawn = tuple(_series(n, p, "measured_ms", "predicted_ms", points) for n, p in shown if p.height)
    zeros = f" {count(hidden)} with a zero have no place on these axes." if hidden else ""
    return Figure(
        name=f"{name}-against",
        title=f"{model.name}: predicted against measured",
        caption=f"{_how_many(drawn, held.height - hidden)}, held out.{zeros} {look}",
        x_label="measured, ms",
        panels=(Panel("predicted, ms", drawn, log_y=log, diagonal=True),),
        log_x=log,
        summary=_binned(held, "measured_ms", "measured, ms", "predicted_ms", "predicted, ms"),
    )


def _how_many(drawn: tuple[Series, ...], rows: int) -> str:
    points = sum(len(s.x) for s in drawn)
    return (
        f"All {count(rows)} rows"
        if points == rows
        else f"{count(points)} of {count(rows)} rows, evenly in time"
    )


def _over_time(name: str, model_name: str, kept: pl.DataFrame, points: int) -> Figure:
    drawn = tuple(
        _series(label, part, "at_s", "residual_ms", points)
        for label, part in (
            ("training rows", kept.filter(pl.col("split") == "train")),
            ("held-out rows", kept.filter(pl.col("split") == "holdout")),
        )
        if part.height
    )
    ends = (
        kept.filter(pl.col("split") == "holdout")
        .group_by("run_id", "server")
        .agg(start=pl.col("at_s").min(), end=pl.col("at_s").max())
        .select("start", "end")
    )
    several = kept.select("run_id", "server").n_unique()
    bands = [Band("hold-out", start, end) for start, end in ends.iter_rows()] if several == 1 else []
    laid = f" {several} servers' runs are laid over each other." if several > 1 else ""
    return Figure(
        name=f"{name}-time",
        title=f"{model_name}: residuals over time",
        caption=f"Measured less predicted; {_lower(_how_many(drawn, kept.height))}.{laid} Look for a drift or a step: then "
        "the server changed, and the end of the run is not like its beginning.",
        x_label="seconds into the run",
        panels=(Panel("measured - predicted, ms", drawn, zero=True),),
        bands=tuple(bands),
        summary=_binned(kept, "at_s", "seconds into the run", "residual_ms", "residual, ms"),
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _over_features(name: str, model: AnyModel, held: pl.DataFrame, points: int) -> list[Figure]:
    """Draw residuals against the terms that move the prediction most."""
    effects = {
        t.feature: abs(t.value) * (t.training_range[1] - t.training_range[0])
        for _, t in _terms(model)
        if t.training_range is not None and t.feature in held.columns
    }
    strong = sorted(effects, key=lambda f: -effects[f])[:_STRONG]
    return [
        Figure(
            name=f"{name}-over-{_clean(feature)}",
            title=f"{model.name}: residuals against {feature}",
            caption=f"Look for a bend: then the effect of {feature} is not a straight line, and predictions at its ends are "
            "off to one side.",
            x_label=feature,
            panels=(
                Panel(
                    "measured - predicted, ms",
                    (_series("held-out rows", held.drop_nulls(feature), feature, "residual_ms", points),),
                    zero=True,
                ),
            ),
            summary=_binned(held.drop_nulls(feature), feature, feature, "residual_ms", "residual, ms"),
        )
        for feature in strong
        if held[feature].drop_nulls().len()
    ]


def _binned(rows: pl.DataFrame, x: str, x_name: str, y: str, y_name: str) -> Table:
    """Sum up one column over another in groups of equal size."""
    place = (pl.int_range(pl.len()) * _SUMMARY_ROWS // pl.len()).alias("bin")
    groups = (
        rows.sort(x)
        .with_columns(place)
        .group_by("bin", maintain_order=True)
        .agg(
            rows=pl.len(),
            low=pl.col(x).min(),
            high=pl.col(x).max(),
            median=pl.col(y).median(),
            p10=pl.col(y).quantile(0.1),
            p90=pl.col(y).quantile(0.9),
        )
    )
    head = (x_name, "rows", f"median {y_name}", "P10", "P90")
    return Table(
        head,
        tuple(
            (f"{low:.4g} to {high:.4g}", f"{n:,}", number(median), number(p10), number(p90))
            for _, n, low, high, median, p10, p90 in groups.iter_rows()
        ),
    )
