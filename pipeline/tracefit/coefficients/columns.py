"""Models of a coefficient file as column expressions: predictions for whole training frames."""

from __future__ import annotations

import polars as pl

from tracefit.coefficients.model import (
    BoundaryModel,
    Comparison,
    Condition,
    LinearModel,
    Number,
    RegimesModel,
    Term,
)

STEP_RESIDUAL = "step_residual_us"


def prediction(model: LinearModel | RegimesModel | BoundaryModel) -> pl.Expr:
    """Return the prediction in us as an expression over a training frame, clipped at 0, null where a feature is.

    Of a boundary model the next known step start is looked at alone (column `step_residual_us`, null when the engine is
    idle): null where the work runs past it.
    """
    if isinstance(model, BoundaryModel):
        work = _linear(model.work.intercept, model.work.terms)
        residual = pl.col(STEP_RESIDUAL)
        waited = pl.when(residual >= work).then(residual + model.offset.value)
        return pl.when(residual.is_null()).then(work).otherwise(waited).clip(lower_bound=0.0)
    if isinstance(model, RegimesModel):
        value = pl.lit(None, pl.Float64)
        for regime in reversed(model.regimes):
            value = pl.when(holds(regime.when)).then(_linear(regime.intercept, regime.terms)).otherwise(value)
        return value
    return _linear(model.intercept, model.terms)


def features_of(model: LinearModel | RegimesModel | BoundaryModel) -> set[str]:
    """Name the columns that `prediction` needs."""
    if isinstance(model, BoundaryModel):
        return {STEP_RESIDUAL, *(t.feature for t in model.work.terms)}
    if isinstance(model, RegimesModel):
        compared = {
            n
            for r in model.regimes
            for c in r.when.any or ()
            for n in (c.feature, c.feature2)
            if n is not None
        }
        return compared | {t.feature for r in model.regimes for t in r.terms}
    return {t.feature for t in model.terms}


def holds(condition: Condition) -> pl.Expr:
    """Return whether a regime's condition holds; a comparison with null does not."""
    parts = [_compared(c) for c in condition.any or ()]
    some = pl.any_horizontal(parts) if parts else pl.lit(value=True)
    every = [_compared(c) for c in condition.all or ()]
    return some & pl.all_horizontal(every) if every else some


def _compared(comparison: Comparison) -> pl.Expr:
    left = pl.col(comparison.feature)
    right = pl.col(comparison.feature2) if comparison.feature2 else pl.lit(comparison.value)
    match comparison.op:
        case "<":
            result = left < right
        case "<=":
            result = left <= right
        case ">":
            result = left > right
        case ">=":
            result = left >= right
        case "==":
            result = left == right
    return result.fill_null(value=False)


def _linear(intercept: Number, terms: tuple[Term, ...]) -> pl.Expr:
    total = pl.lit(intercept.value)
    for term in terms:
        total = total + term.value * pl.col(term.feature)
    return total.clip(lower_bound=0.0)
