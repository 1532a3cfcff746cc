"""Sections of the report on one model each: what it predicts, its numbers, how far to trust them."""

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
from tracefit.reports.cells import count, number, reasons, share, table
from tracefit.reports.latency import burst_lines, step_phase_parts
from tracefit.reports.trust import trust_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.coefficients.evaluation import Entry
    from tracefit.reports.model import Part, Table

AnyModel = LinearModel | RegimesModel | BoundaryModel


def model_parts(name: str, entry: Entry, model: AnyModel, left_out: dict[str, int]) -> list[Part]:
    """Return the section on one model, without its figures.

    Args:
        name: Its name.
        entry: Its validation.
        model: The model.
        left_out: Rows left out of its fit, by reason.
    """
    parts: list[Part] = [f"### `{name}`"]
    if model.target is not None:
        t = model.target
        parts.append(f"Predicts {t.definition} ({t.unit}, from {t.source.replace('_', ' ')}).")
    parts += [*_coefficients(model), *burst_lines(entry.bursts)]
    parts += [f"- {line}" for line in (*_facts(entry, model, left_out), *trust_lines(entry))]
    parts += [f"- Note: {text}." for text in model.notes]
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
        head = ("candidate", "features", "MAE inside", "MAE beyond the load", "why")
        parts.append(table(head, tried, folded="What was tried inside the training part"))
    if model.features_left_out:
        rows = [(f"`{x.feature}`", x.reason) for x in model.features_left_out]
        parts.append(table(("feature", "why"), rows, folded="Features left out"))
    return parts


def _facts(entry: Entry, model: AnyModel, left_out: dict[str, int]) -> Iterator[str]:
    if entry.boundary_accuracy_pct is not None:
        yield (
            f"**Right step boundary:** {number(entry.boundary_accuracy_pct)} % of held-out requests whose step is known "
            f"({number(entry.boundary_accuracy_without_work_pct)} % with zero API work)."
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
            f"**In-sample MAPE,** for comparison with the hold-out's {number(entry.holdout.mape_pct)} %: "
            f"{number(entry.train.mape_pct)} %."
        )
    if entry.rows_by_source:
        yield f"**Equations trained on:** {reasons(entry.rows_by_source)}."


def terms_of(model: LinearModel | BoundaryModel) -> tuple[Term, ...]:
    """Return the terms of a model without regimes; of a boundary model those of its work."""
    return tuple((model.work if isinstance(model, BoundaryModel) else model).terms)


def _coefficients(model: AnyModel) -> list[Part]:
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
            f"then the first step start at or after it, {number(model.offset.value)} us; without a step clock:",
            _terms(model.without_clock.intercept, model.without_clock.terms),
            *([_expectation(expected)] if expected else []),
        ]
    return [_terms(model.intercept, model.terms)]


def _expectation(expected: Expectation) -> str:
    return (
        f"Expected where nothing is known of the steps: {number(expected.intercept.value)} us, of a step in progress "
        f"{number(expected.residual.value)} us are left on the average (half a cycle, cycles weighted by their length) "
        f"and one is in progress {share(expected.busy_share)} of the time."
    )


def _condition(when: Condition) -> str:
    if not when.any:
        return "otherwise"
    tests = (f"`{c.feature}` {c.op} {f'`{c.feature2}`' if c.feature2 else number(c.value)}" for c in when.any)
    return "when " + " or ".join(tests)


def _terms(intercept: Number, terms: Iterable[Term]) -> Table:
    rows: list[tuple[str, ...]] = [("intercept", "us", number(intercept.value), interval(intercept.ci95), "")]
    rows += [
        (f"`{t.feature}`", t.unit, number(t.value), interval(t.ci95), interval(t.training_range))
        for t in terms
    ]
    return table(("term", "unit", "value", "95 % interval", "seen"), rows)


def interval(pair: tuple[float, float] | None) -> str:
    """Write both ends of a range; nothing where there is none."""
    return f"{number(pair[0])} to {number(pair[1])}" if pair else ""
