"""Predictions over frames: the same files and formulas as for one row, as column operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.ask import p90_ape_pct
from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.coefficients.values import compared_names, formulas_of, terms_of
from tracefit.coefficients.workload import (
    STEP_COLUMNS,
    STEP_INPUTS,
)
from tracefit.errors import UsageError
from tracefit.features.expressions import names_in, parse_formula, to_polars

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefit.coefficients.model import (
        Comparison,
        Condition,
        Linear,
        LinearModel,
        Model,
        Regime,
        Work,
    )

    Part = LinearModel | Linear | Work | Regime

OUTPUTS = ("predicted_us", "low_us", "high_us", "outside")


def predict_rows(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `predicted_us`, `low_us`, `high_us` and `outside` (null inside the training range) to a frame.

    Args:
        model: The model; a boundary model as for a consumer without a step clock.
        rows: Its features, or the columns they are computed from.

    Raises:
        UsageError: A column is missing, or not of numbers. A null in one gives a null prediction.
    """
    work = _features(model, rows)
    clash = [c for c in OUTPUTS if c in rows.columns]
    if clash:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    return rows.hstack(work.with_columns(_answer(model, work.columns)).select(OUTPUTS))


def _features(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the columns a model is evaluated on, each computed once and by name."""
    wanted = [*dict.fromkeys(t.feature for t in terms_of(model)), *compared_names(model)]
    extra = ["prefill_tokens"] if "prefill_tokens" in rows.columns else []
    computed = derive(rows, formulas_of(model), dict.fromkeys([*wanted, *extra]))
    missing = [name for name in wanted if name not in computed.columns]
    if missing:
        raise UsageError(
            f"{model.name} needs {', '.join(_columns_for(missing, formulas_of(model), computed.columns))}, "
            "which the rows do not give",
            hint=f"columns: {', '.join(rows.columns[:40])}",
        )
    numbers = [pl.col(name).cast(pl.Float64) for name in dict.fromkeys([*wanted, *extra])]
    # A column of its own keeps the rows of a model that is a constant.
    return computed.select(pl.int_range(pl.len()).alias("row of the frame"), *numbers)


def _columns_for(names: Iterable[str], formulas: Mapping[str, str], there: Collection[str]) -> list[str]:
    """Return the columns that are missing for some features: themselves, or what they are computed from."""
    found: dict[str, None] = {}
    for name in names:
        inside = (
            sorted(names_in(parse_formula(formulas[name], where=name)) - {name}) if name in formulas else []
        )
        missing = [each for each in inside if each not in there]
        found |= dict.fromkeys(_columns_for(missing, formulas, there) if inside else [name])
    return list(found)


def derive(rows: pl.DataFrame, formulas: Mapping[str, str], wanted: Iterable[str]) -> pl.DataFrame:
    """Add the wanted columns that are not there and can be computed, and what they are computed from.

    Args:
        rows: The frame; a column that is there is taken as it is.
        formulas: Name to formula.
        wanted: Names.

    Raises:
        UsageError: A formula is wrong, definitions go round in a circle, or a column is not of numbers.
    """
    for name in wanted:
        rows = _with(rows, name, formulas, ())
    return rows


def _with(rows: pl.DataFrame, name: str, formulas: Mapping[str, str], trail: tuple[str, ...]) -> pl.DataFrame:
    if name in rows.columns:
        if not rows.schema[name].is_numeric() and rows.schema[name] not in (pl.Boolean, pl.Null):
            raise UsageError("is not a column of numbers", where=name)
        return rows
    if name in trail or name not in formulas:
        if name in trail:
            raise UsageError("is defined by itself", where=name)
        return rows
    node = parse_formula(formulas[name], where=name)
    needed = names_in(node)
    for inner in sorted(needed):
        rows = _with(rows, inner, formulas, (*trail, name))
    if not needed <= set(rows.columns):
        return rows
    return rows.with_columns(to_polars(node, {}).alias(name))


def value(model: Model) -> pl.Expr:
    """Return a model as an expression over its features; a boundary model as without a step clock."""
    if isinstance(model, BoundaryModel):
        return _line(model.without_clock)
    if not isinstance(model, RegimesModel):
        return _line(model)
    return _by_regime(model, [_line(r) for r in model.regimes])


def _by_regime(model: RegimesModel, values: list[pl.Expr], kind: pl.DataType | None = None) -> pl.Expr:
    chosen = pl.lit(None, kind or pl.Float64())
    for regime, found in reversed(list(zip(model.regimes, values, strict=True))):
        chosen = pl.when(_holds(regime.when)).then(found).otherwise(chosen)
    return chosen


def _line(part: Part) -> pl.Expr:
    total = pl.lit(part.intercept.value)
    for term in part.terms:
        total = total + term.value * pl.col(term.feature)
    return pl.max_horizontal(total, pl.lit(0.0)) if not part.terms else total.clip(lower_bound=0.0)


def _holds(condition: Condition) -> pl.Expr:
    held = pl.lit(value=True)
    if condition.any is not None:
        held = (
            pl.any_horizontal(*(_compare(c) for c in condition.any)) if condition.any else pl.lit(value=False)
        )
    for comparison in condition.all or ():
        held = held & _compare(comparison)
    return held


def _compare(c: Comparison) -> pl.Expr:
    left = pl.col(c.feature)
    right = pl.col(c.feature2) if c.feature2 else pl.lit(c.value)
    held = {
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
        "==": left == right,
    }
    return held[c.op].fill_null(value=False)


def _answer(model: Model, columns: Collection[str]) -> list[pl.Expr]:
    predicted, q = value(model), _p90(model, columns) / 100
    return [
        predicted.alias("predicted_us"),
        (predicted / (1 + q)).alias("low_us"),
        pl.when(q < 1).then(predicted / (1 - q)).alias("high_us"),
        _outside(model).alias("outside"),
    ]


def _p90(model: Model, columns: Collection[str]) -> pl.Expr:
    """Return the held-out 90th percentile of the group of rows each row is of, as `ask` has it."""

    def of(group: str | None) -> pl.Expr:
        return pl.lit(p90_ape_pct(model, group), pl.Float64)

    if isinstance(model, RegimesModel):
        return _by_regime(model, [of(r.name) for r in model.regimes])
    if isinstance(model, BoundaryModel):
        return of("without_clock")
    if "prefill_tokens" not in columns:
        return of(None)
    return pl.when(pl.col("prefill_tokens") > 0).then(of("mixed")).otherwise(of("decode_only"))


def _outside(model: Model) -> pl.Expr:
    """Name the features outside the training range, null where there is none."""
    if isinstance(model, RegimesModel):
        return _by_regime(model, [_outside_of(r) for r in model.regimes], pl.String())
    return _outside_of(model.without_clock if isinstance(model, BoundaryModel) else model)


def _outside_of(part: Part) -> pl.Expr:
    named = [
        pl.when(~pl.col(t.feature).is_between(*t.seen)).then(pl.lit(t.feature))
        for t in part.terms
        if t.seen is not None
    ]
    if not named:
        return pl.lit(None, pl.String)
    text = pl.concat_str(named, separator=", ", ignore_nulls=True)
    return pl.when(text != "").then(text)


def predict_steps(model: Model, rows: pl.DataFrame, server: Mapping[str, float | None]) -> pl.DataFrame:
    """Predict steps given as timeline columns or as a person describes them (`workload.STEP_INPUTS`).

    Raises:
        UsageError: As `predict_rows`.
    """
    if not any(c in rows.columns for c in STEP_INPUTS):
        return predict_rows(model, rows)
    return rows.hstack(predict_rows(model, step_columns(rows, server)).select(OUTPUTS))


def step_columns(rows: pl.DataFrame, server: Mapping[str, float | None]) -> pl.DataFrame:
    """Add timeline columns to steps that are described by `workload.STEP_INPUTS`; what is not described is 0.

    Args:
        rows: The described steps; a timeline column that is there is taken as it is.
        server: Settings by name, see `workload.server_constants`.
    """
    zero = [pl.lit(0.0).alias(c) for c in STEP_INPUTS if c not in rows.columns and c != "prefill_reqs"]
    given = rows.with_columns(zero)
    if "prefill_reqs" not in given.columns:
        given = given.with_columns(prefill_reqs=pl.col("prefill").clip(0.0, 1.0))
    return derive(_with_server(given, server), STEP_COLUMNS, STEP_COLUMNS)


def _with_server(rows: pl.DataFrame, server: Mapping[str, float | None]) -> pl.DataFrame:
    return rows.with_columns(
        pl.lit(v, pl.Float64).alias(name) for name, v in server.items() if name not in rows.columns
    )
