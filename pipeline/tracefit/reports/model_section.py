"""The report's section on one model: what it predicts, its coefficients, and how far to trust them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import (
    BoundaryModel,
    Condition,
    Expectation,
    LinearModel,
    Number,
    RegimesModel,
    Term,
)
from tracefit.reports.document import Bullets, table
from tracefit.reports.latency_section import burst_lines, step_phase_parts
from tracefit.reports.text import count, exact, number, percent, reasons, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.fit.results import PredictionInterval, Validation
    from tracefit.reports.document import ReportPart, Table

AnyModel = LinearModel | RegimesModel | BoundaryModel

TROUBLE = 30.0
"""Condition number above which single coefficients are poorly determined (Belsley, Kuh and Welsch 1980)."""


def model_parts(entry: Validation, model: AnyModel, left_out: dict[str, int]) -> list[ReportPart]:
    """Return the section on one model, without its figures.

    Args:
        entry: Its validation.
        model: The model.
        left_out: Rows left out of its fit, by reason.
    """
    parts: list[ReportPart] = []
    if model.target is not None:
        t = model.target
        parts.append(f"Predicts {t.definition} ({t.unit}, from {t.source.replace('_', ' ')}).")
    parts += [*_coefficients(model), *burst_lines(entry.bursts)]
    facts = (
        *_facts(entry, model, left_out),
        *trust_lines(entry),
        *(f"Note: {text}." for text in model.notes),
    )
    parts.append(Bullets(facts))
    parts += step_phase_parts(entry.by_phase)
    if entry.candidates:
        tried = [
            (
                f"`{c.name}`{' **chosen**' if c.chosen else ''}",
                count(c.features),
                number(c.inside_mae),
                number(c.beyond_mae),
                c.reason,
            )
            for c in entry.candidates
        ]
        head = ("candidate", "features", "MAE inside", "MAE beyond the load", "reason")
        parts.append(table(head, tried, folded="Candidates compared on the training part"))
    if model.features_left_out:
        rows = [(f"`{x.feature}`", x.reason) for x in model.features_left_out]
        parts.append(table(("feature", "reason"), rows, folded="Features left out"))
    return parts


def _facts(entry: Validation, model: AnyModel, left_out: dict[str, int]) -> Iterator[str]:
    if entry.boundary_accuracy_pct is not None:
        yield (
            f"**Step boundary predicted correctly:** {percent(entry.boundary_accuracy_pct)} % of held-out requests whose step is known "
            f"({percent(entry.boundary_accuracy_without_work_pct)} % with zero API work)."
        )
    if entry.classifier is not None:
        accuracy = number(entry.classifier.balanced_accuracy)
        counts = reasons(entry.classifier.confusion)
        yield f"**Condition of the first regime, on the hold-out:** balanced accuracy {accuracy} ({counts})."
    if model.estimator is not None:
        e = model.estimator
        yield (
            f"**Estimator:** {e.name.replace('_', ' ')}, {e.penalty} penalty {e.strength:g}, chosen by {e.chosen_by}."
        )
    if model.training is not None:
        t = model.training
        yield (
            f"**Rows:** {count(t.rows_used)} of {count(t.rows)} trained, {count(t.rows_holdout)} held out; "
            f"left out: {reasons(left_out) or 'none'}."
        )
        yield (
            f"**In-sample MAPE,** for comparison with the hold-out's {percent(entry.holdout.mape_pct)} %: "
            f"{percent(entry.train.mape_pct)} %."
        )
    if entry.rows_by_source:
        yield f"**Training rows by source:** {reasons(entry.rows_by_source)}."


def terms_of(model: LinearModel | BoundaryModel) -> tuple[Term, ...]:
    """Return the terms of a model without regimes; of a boundary model those of its API work."""
    return tuple((model.work if isinstance(model, BoundaryModel) else model).terms)


def _coefficients(model: AnyModel) -> list[ReportPart]:
    if isinstance(model, RegimesModel):
        return [
            part
            for regime in model.regimes
            for part in (
                f"Regime *{regime.name}*, {_condition(regime.when)}:",
                _terms(regime.intercept, regime.terms),
            )
        ]
    if isinstance(model, BoundaryModel):
        expected = model.expectation
        return [
            "API work:",
            _terms(model.work.intercept, model.work.terms),
            f"then the first step start at or after it, {exact(model.offset.value)} us; without a step clock:",
            _terms(model.without_clock.intercept, model.without_clock.terms),
            *([_expectation(expected)] if expected else []),
        ]
    return [_terms(model.intercept, model.terms)]


def _expectation(expected: Expectation) -> str:
    return (
        f"Expected where the step starts are not known: {number(expected.intercept.value)} us; of a step in progress "
        f"{number(expected.residual.value)} us are left on average (half a cycle, cycles weighted by their length), "
        f"and a step is in progress {share(expected.busy_share)} of the time."
    )


def _condition(when: Condition) -> str:
    if not when.any:
        return "otherwise"
    tests = (f"`{c.feature}` {c.op} {f'`{c.feature2}`' if c.feature2 else exact(c.value)}" for c in when.any)
    return "when " + " or ".join(tests)


def _terms(intercept: Number, terms: Iterable[Term]) -> Table:
    rows: list[tuple[str, ...]] = [("intercept", "us", exact(intercept.value), interval(intercept.ci95), "")]
    rows += [
        (f"`{t.feature}`", t.unit, exact(t.value), interval(t.ci95), interval(t.training_range))
        for t in terms
    ]
    return table(("term", "unit", "value", "95 % interval", "training range"), rows)


def interval(pair: tuple[float, float] | None) -> str:
    """Write both ends of a range; empty where there is none."""
    return f"{exact(pair[0])} to {exact(pair[1])}" if pair else ""


# How far the model can be trusted


def trust_lines(entry: Validation) -> list[str]:
    """Return one paragraph per fact of a model's validation."""
    lines = [
        _equations(entry),
        _intervals(entry),
        _collinearity(entry),
        _extrapolation(entry),
        _beyond_load(entry),
        _learning(entry),
    ]
    return [line for line in lines if line]


def _intervals(entry: Validation) -> str:
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


def _collinearity(entry: Validation) -> str:
    parts = []
    for one in entry.collinearity:
        if one.condition_number is None or len(one.variance_inflation) < 2:
            continue
        worst = max(one.variance_inflation, key=lambda name: one.variance_inflation[name])
        name = f"*{one.regime}* " if len(entry.collinearity) > 1 else ""
        trouble = (
            "; **the data do not determine single coefficients well**"
            if one.condition_number > TROUBLE
            else ""
        )
        parts.append(
            f"{name}condition number {one.condition_number:.3g}, largest variance inflation "
            f"{one.variance_inflation[worst]:.3g} (`{worst}`){trouble}"
        )
    return f"**Collinearity of the kept features:** {'; '.join(parts)}." if parts else ""


def _extrapolation(entry: Validation) -> str:
    if not entry.extrapolated_rows:
        return ""
    by_feature = ", ".join(f"`{name}` {rows:,}" for name, rows in entry.extrapolated.items())
    return (
        f"**Extrapolation:** {entry.extrapolated_rows:,} of {entry.holdout.n:,} held-out rows lie outside the range of "
        f"the training rows ({by_feature}): their predictions, and the errors above, are extrapolations."
    )


def _equations(entry: Validation) -> str:
    found = entry.held_out_equations
    if found is None:
        return ""
    kinds = ", ".join(f"{name} {rows:,}" for name, rows in found.rows_by_source.items())
    one, step = found.per_equation, found.per_step
    return (
        f"**All held-out cycles and intervals** ({kinds}): MAPE {percent(one.mape_pct)} % each (n = {one.n:,}), "
        f"{percent(step.mape_pct)} % and bias {percent(step.bias_pct)} % weighted by steps (n = {step.n:,} steps)."
    )


def _beyond_load(entry: Validation) -> str:
    found, inside = entry.load_extrapolation, entry.by_load.get("inside")
    if found is None:
        return ""
    beside = (
        f", gradient boosting {percent(found.gradient_boosting.mape_pct)} %"
        if found.gradient_boosting
        else ""
    )
    within = (
        f" On the hold-out inside the training ranges it is {percent(inside.mape_pct)} %." if inside else ""
    )
    return (
        f"**Beyond the load:** trained on the lower half of the load of the whole run ({found.load.replace('_', ' ')} up to "
        f"{number(found.cut)}), MAPE {percent(found.mape_pct)} % and bias {percent(found.bias_pct)} % on the upper half "
        f"(n = {found.n:,}){beside}.{within}"
    )


def _learning(entry: Validation) -> str:
    if len(entry.learning_curve) < 2:
        return ""
    points = ", ".join(f"{number(p.mae)} ({p.rows:,})" for p in entry.learning_curve)
    return f"**Hold-out MAE, {entry.unit},** by number of training rows, the latest before the hold-out: {points}."
