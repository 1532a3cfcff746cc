"""Ask one model about one row: the number, the range around it, and what was assumed or is outside the training range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.coefficients.answers import Span, span
from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.coefficients.predict import compare
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.model import (
        Comparison,
        Condition,
        Linear,
        LinearModel,
        Model,
        Regime,
        Term,
        Work,
    )
    from tracefit.coefficients.values import Row

BAND_ROWS = 20
"""Fewer held-out rows than this do not make a range of their own."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a model says of a row."""

    span: Span
    features: dict[str, float]
    assumed: tuple[str, ...]
    outside: tuple[str, ...]


def ask(model: Model, row: Row, *, stand_in: bool = False) -> Told:
    """Evaluate a model on a row; a boundary model as for a consumer without a step clock.

    Args:
        model: The model.
        row: Its features, or what they are computed from.
        stand_in: Let the middle of the training range stand in for a feature that nothing tells, and say so.

    Raises:
        UsageError: A feature is not known and nothing stands in for it, or no regime's condition holds.
    """
    if isinstance(model, RegimesModel):
        for regime in model.regimes:
            if _holds(regime.when, row):
                return _line(model, regime, row, regime.name, stand_in=stand_in)
        raise UsageError(f"no regime of {model.name} holds for these features")
    if isinstance(model, BoundaryModel):
        return _line(model, model.without_clock, row, "without_clock", stand_in=stand_in)
    prefill = row.get("prefill_tokens")
    group = None if prefill is None else "mixed" if prefill > 0 else "decode_only"
    return _line(model, model, row, group, stand_in=stand_in)


def ask_work(model: BoundaryModel, row: Row, cycle_us: float | None) -> Told:
    """Tell the expected wait for the boundary: API work, and half a step on average when the engine is busy.

    Args:
        model: The boundary model.
        row: Its features.
        cycle_us: Time of the steps that run; null when the engine is idle.
    """
    told = _line(model, model.work, row, "idle_engine", stand_in=False)
    if cycle_us is None:
        return told
    soonest = max(told.span.value_us + model.offset.value, 0.0)
    around = Span(soonest + cycle_us / 2, soonest, soonest + cycle_us)
    return Told(around, told.features, told.assumed, told.outside)


def _line(
    model: Model, part: LinearModel | Linear | Work | Regime, row: Row, group: str | None, *, stand_in: bool
) -> Told:
    values, assumed, outside, lacking = dict[str, float](), [], [], set[str]()
    for term in part.terms:
        value = row.get(term.feature)
        if value is None and stand_in and term.seen is not None:
            value = (term.seen[0] + term.seen[1]) / 2
            assumed.append(
                f"{term.feature} {value:g}: not told by the question, the middle of its training range"
            )
        if value is None:
            lacking |= row.missing(term.feature)
            continue
        values[term.feature] = value
        outside += outside_of(model.name, term, value)
    if lacking:
        raise UsageError(
            f"{model.name} needs {', '.join(sorted(lacking))}, which is not given",
            hint=f"given: {', '.join(sorted(n for n, v in row.given.items() if v is not None))}",
        )
    total = part.intercept.value + sum(term.value * values[term.feature] for term in part.terms)
    found = span(max(total, 0.0), p90_ape_pct(model, group))
    return Told(found, values, tuple(assumed), tuple(outside))


def outside_of(model: str, term: Term, value: float) -> list[str]:
    """Say that a value is outside the training range of a term, if it is."""
    if term.seen is None or term.seen[0] <= value <= term.seen[1]:
        return []
    low, high = term.seen
    return [f"{model}: {term.feature} {value:g} is outside {low:g} to {high:g}, the training range"]


def p90_ape_pct(model: Model, group: str | None) -> float | None:
    """Ninth tenth of the held-out errors, of the group of rows the question is of where there are enough."""
    if model.validation is None:
        return None
    of_group = model.validation.by.get(group) if group else None
    enough = of_group is not None and of_group.n >= BAND_ROWS
    found = of_group if of_group is not None and enough else model.validation.holdout
    return found.p90_ape_pct


def _holds(condition: Condition, row: Row) -> bool:
    """As training has it: a comparison with something unknown does not hold."""

    def one(c: Comparison) -> bool:
        left = row.get(c.feature)
        right = row.get(c.feature2) if c.feature2 else c.value
        return left is not None and right is not None and compare(left, c.op, right)

    if condition.any is not None and not any(one(c) for c in condition.any):
        return False
    return all(one(c) for c in condition.all or ())
