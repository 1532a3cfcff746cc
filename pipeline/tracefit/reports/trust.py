"""How far a model can be trusted, in sentences: prediction intervals, collinearity, extrapolation, learning curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.cells import number

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Entry, PredictionInterval

TROUBLE = 30.0
"""Condition number above which coefficients trade places with each other (Belsley, Kuh and Welsch 1980)."""


def trust_lines(entry: Entry) -> list[str]:
    """Return one paragraph per thing there is to say of a model's validation."""
    lines = [
        _equations(entry),
        _intervals(entry),
        _collinearity(entry),
        _extrapolation(entry),
        _beyond_load(entry),
        _learning(entry),
    ]
    return [line for line in lines if line]


def _intervals(entry: Entry) -> str:
    if not entry.prediction_intervals or entry.interval_coverage_pct is None:
        return ""
    several = len(entry.prediction_intervals) > 1
    limits = "; ".join(
        f"{f'*{p.regime}* ' if several else ''}{_limits(p, entry.unit)}" for p in entry.prediction_intervals
    )
    return f"**95 % prediction interval:** {limits}. It held {entry.interval_coverage_pct:.1f} % of the held-out rows."


def _limits(interval: PredictionInterval, unit: str) -> str:
    if interval.kind == "ratio":
        return f"{interval.low:.3g} to {interval.high:.3g} times the prediction"
    return f"the prediction {interval.low:+,.0f} to {interval.high:+,.0f} {unit}"


def _collinearity(entry: Entry) -> str:
    parts = []
    for one in entry.collinearity:
        if one.condition_number is None or len(one.variance_inflation) < 2:
            continue
        worst = max(one.variance_inflation, key=lambda name: one.variance_inflation[name])
        name = f"*{one.regime}* " if len(entry.collinearity) > 1 else ""
        trouble = "; **coefficients trade places with each other**" if one.condition_number > TROUBLE else ""
        parts.append(
            f"{name}condition number {one.condition_number:.3g}, largest variance inflation "
            f"{one.variance_inflation[worst]:.3g} (`{worst}`){trouble}"
        )
    return f"**Collinearity of the features that stayed:** {'; '.join(parts)}." if parts else ""


def _extrapolation(entry: Entry) -> str:
    if not entry.extrapolated_rows:
        return ""
    by_feature = ", ".join(f"`{name}` {rows:,}" for name, rows in entry.extrapolated.items())
    return (
        f"**Extrapolation:** {entry.extrapolated_rows:,} of {entry.holdout.n:,} held-out rows lie outside the range of "
        f"the training rows ({by_feature}): their predictions, and the errors above, are of a load the model has not seen."
    )


def _equations(entry: Entry) -> str:
    found = entry.held_out_equations
    if found is None:
        return ""
    kinds = ", ".join(f"{name} {rows:,}" for name, rows in found.rows_by_source.items())
    one, step = found.per_equation, found.per_step
    return (
        f"**All held-out equations** ({kinds}): MAPE {number(one.mape_pct)} % per equation (n = {one.n:,}), "
        f"{number(step.mape_pct)} % and bias {number(step.bias_pct)} % weighted by steps (n = {step.n:,} steps)."
    )


def _beyond_load(entry: Entry) -> str:
    found, inside = entry.load_extrapolation, entry.by_load.get("inside")
    if found is None:
        return ""
    beside = (
        f", gradient boosting {number(found.gradient_boosting.mape_pct)} %" if found.gradient_boosting else ""
    )
    within = (
        f" On the hold-out inside the training ranges it is {number(inside.mape_pct)} %." if inside else ""
    )
    return (
        f"**Beyond the load:** trained on the lower half of the load of the whole run ({found.load.replace('_', ' ')} up to "
        f"{number(found.cut)}), MAPE {number(found.mape_pct)} % and bias {number(found.bias_pct)} % on the upper half "
        f"(n = {found.n:,}){beside}.{within}"
    )


def _learning(entry: Entry) -> str:
    if len(entry.learning_curve) < 2:
        return ""
    points = ", ".join(f"{number(p.mae)} ({p.rows:,})" for p in entry.learning_curve)
    return f"**Hold-out MAE, {entry.unit},** by number of training rows, the latest before the hold-out: {points}."
