"""Evaluate a model of a coefficient file, in plain Python: no numpy, no polars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import (
    BoundaryModel,
    Comparison,
    Condition,
    Linear,
    Model,
    Number,
    Operator,
    RegimesModel,
    Term,
    Work,
)
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def predict(
    model: Model | Linear | Work,
    features: Mapping[str, float],
    step_starts: Sequence[float] | None = None,
    *,
    api_wait_us: float = 0.0,
) -> float:
    """Return the prediction in the target's unit, clipped at 0.

    Args:
        model: A model of any form, or a linear part of one.
        features: Raw feature values by name.
        step_starts: For a boundary model: when the next steps start, in us after the event, in order; empty when the
            engine is idle, null when nobody knows.
        api_wait_us: For a boundary model with a `queue`, and step starts: work left on the events before, when this one
            comes.

    Raises:
        UsageError: A feature the model needs is missing, or no regime's condition holds.
    """
    if isinstance(model, RegimesModel):
        for regime in model.regimes:
            if holds(regime.when, features):
                return _linear(regime.intercept, regime.terms, features)
        raise UsageError(f"no regime of {model.name} holds for these features")
    if isinstance(model, BoundaryModel):
        if step_starts is None:
            return predict(model.without_clock, features)
        work = predict(model.work, features) + (api_wait_us if model.queue else 0.0)
        waited = (start + model.offset.value for start in step_starts if start >= work)
        return max(next(waited, work), 0.0)
    return _linear(model.intercept, model.terms, features)


def _linear(intercept: Number, terms: Iterable[Term], features: Mapping[str, float]) -> float:
    total = intercept.value + sum(term.value * _feature(features, term.feature) for term in terms)
    return max(total, 0.0)


def _feature(features: Mapping[str, float], name: str) -> float:
    if name not in features:
        raise UsageError(
            f"feature {name} is needed and not given", hint=f"given: {', '.join(sorted(features))}"
        )
    return float(features[name])


def holds(condition: Condition, features: Mapping[str, float]) -> bool:
    """Tell whether a regime's condition holds."""
    if condition.any is not None and not any(_compare(c, features) for c in condition.any):
        return False
    return all(_compare(c, features) for c in condition.all or ())


def _compare(comparison: Comparison, features: Mapping[str, float]) -> bool:
    left = _feature(features, comparison.feature)
    if comparison.feature2 is not None:
        right = _feature(features, comparison.feature2)
    else:
        right = comparison.value if comparison.value is not None else 0.0
    return compare(left, comparison.op, right)


def compare(left: float, op: Operator, right: float) -> bool:
    """Compare two numbers."""
    match op:
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case ">=":
            return left >= right
        case "==":
            return left == right
