"""Predictions of single rows by one model: a number, the interval that nine of ten held-out rows stayed in, and what
lies outside the training range.

`frames` does the same for the rows of a frame. Neither numpy nor polars is needed for a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tracefit.errors import UsageError
from tracefit.models.amounts import Amount, Truth, anywhere, known, largest, number, where
from tracefit.models.evaluate import expected_at_boundary
from tracefit.models.schema import BoundaryModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tracefit.models.evaluate import CompiledModel, Evaluated
    from tracefit.models.schema import Model

PREDICTED_COLUMN = "predicted_us"
"""Name of the prediction itself among values outside their range: a line below 0 is cut off at 0."""
INTERVAL_ROWS = 20
"""Held-out rows that a group of rows needs for an interval of its own."""
IDLE_ENGINE = "idle_engine"
"""Name of the work of a boundary model as the form that predicts."""


# -- intervals -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PredictedDuration:
    """A predicted duration.

    Attributes:
        value_us: The prediction.
        low_us: Lower end of the interval that nine of ten held-out rows stayed in; null without a validation.
        high_us: Its upper end; also null if held-out errors are 100 % or more.
    """

    value_us: float
    low_us: float | None = None
    high_us: float | None = None


def interval_about(value_us: float, p90_ape_pct: float | None) -> PredictedDuration:
    """Return the interval around a prediction p if |p - actual| / actual <= q on nine of ten held-out rows.

    It is p/(1 + q) to p/(1 - q), open above if q is 1 or more.
    """
    if p90_ape_pct is None:
        return PredictedDuration(value_us)
    q = p90_ape_pct / 100
    return PredictedDuration(value_us, value_us / (1 + q), value_us / (1 - q) if q < 1 else None)


def p90_ape_pct(model: Model, group: str | None) -> float | None:
    """Return the 90th percentile of the held-out errors, over the rows of the input's group if they are enough.

    Those of a transferred model are of servers that were left out.
    """
    if model.transfer is not None and model.transfer.p90_ape_pct:
        # The names of its regimes begin with the phase.
        limits, phase = model.transfer.p90_ape_pct, (group or "").partition(",")[0]
        return limits.get(phase, max(limits.values()))
    if model.validation is None:
        return None
    # A group with few held-out rows, such as a rare regime, says less about its errors than all rows do.
    of_group = model.validation.by_group.get(group) if group else None
    enough = of_group is not None and of_group.n >= INTERVAL_ROWS
    errors = of_group if of_group is not None and enough else model.validation.holdout
    return errors.p90_ape_pct


def published_mdape_pct(model: Model) -> float | None:
    """Return the median error of the training or of the held-out rows, the larger one.

    New traces may resemble either part.
    """
    parts = (model.validation.train, model.validation.holdout) if model.validation else ()
    return max((part.mdape_pct for part in parts if part.mdape_pct is not None), default=None)


# -- outside the training range --------------------------------------------------------------------------


class Outside(NamedTuple):
    """Values of a feature outside its training range `ends`, or predictions below 0, and for which rows."""

    model: str
    feature: str
    rows: Truth
    values: Amount
    ends: tuple[float, float]
    has_term: bool = True

    def text(self, low: float, high: float) -> str:
        """Say it of values from `low` to `high`."""
        values = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        if self.feature == PREDICTED_COLUMN:
            return (
                f"{self.model}: the model extrapolates to {values} us here; reported as 0, which means unknown, "
                "not no time"
            )
        text = (
            f"{self.model}: {self.feature} {values} is outside {self.ends[0]:g} to {self.ends[1]:g}, the training range"
        )
        return text if self.has_term else f"{text}; the model has no term for it"


def outside_training(compiled: CompiledModel, found: Evaluated) -> Iterator[Outside]:
    """Yield what lies outside the training range: features of the form that predicts, or else those without a term, and
    sums below 0.
    """
    name, beyond = compiled.model.name, False
    for k, (_, form) in enumerate(found.forms):
        for term in form.terms:
            if term.training_range is not None:
                value = found.values.get(term.feature, math.nan)
                rows = _beyond(value, term.training_range) & (found.index == k)
                if anywhere(rows):
                    beyond = beyond | rows
                    yield Outside(name, term.feature, rows, value, term.training_range)
    # A feature that a term covers leaves its range together with the term: one line is enough.
    values = compiled.formulas.values(found.values, compiled.unmodeled)
    for feature, ends in compiled.unmodeled.items():
        rows = where(beyond, False, _beyond(values.get(feature, math.nan), ends))
        if anywhere(rows):
            yield Outside(name, feature, rows, values[feature], ends, has_term=False)
    if anywhere(found.amount < 0):
        yield Outside(name, PREDICTED_COLUMN, found.amount < 0, found.amount, (0.0, math.inf))


def _beyond(value: Amount, ends: tuple[float, float]) -> Truth:
    return (value < ends[0]) | (value > ends[1])


def in_lines(outside: Iterable[Outside]) -> tuple[str, ...]:
    """Return a line per model and feature: the steps of one request leave a range at many values."""
    ends: dict[tuple[str, str], tuple[Outside, float, float]] = {}
    for each in outside:
        values = [each.values] if isinstance(each.values, float) else each.values[each.rows].tolist()
        _, *others = ends.get(each[:2], (each,))
        ends[each[:2]] = each, min([*values, *others]), max([*values, *others])
    return tuple(each.text(low, high) for each, low, high in ends.values())


# -- one row ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of a model for a row, with its features, assumptions and values out of range."""

    interval: PredictedDuration
    features: dict[str, float]
    assumed: tuple[str, ...]
    outside: tuple[Outside, ...]


def predict_row(
    compiled: CompiledModel,
    given: Mapping[str, float | None],
    *,
    stand_in: bool = False,
    cycle_us: float | None = None,
) -> Prediction:
    """Predict one row; a boundary model as for a consumer who does not know step starts.

    Args:
        compiled: The model.
        given: Its features, or their inputs; null is unknown.
        stand_in: Use the middle of the training range for an unknown feature of a term, and say so.
        cycle_us: For a boundary model: time of the running steps. With it, or with a batch of 0 in `given`, the model
            predicts the work, and the expected wait for the boundary is added.

    Raises:
        UsageError: A feature is unknown and has no stand-in, or no regime's condition holds.
    """
    model = compiled.model
    values = {name: number(name, value) for name, value in given.items() if name in compiled.looked_at}
    # Without a cycle, a batch of 0 shows an idle engine: no step runs, and the admission is the work.
    if isinstance(model, BoundaryModel) and (cycle_us is not None or given.get("batch") == 0):
        found = compiled.evaluate(values, only=(IDLE_ENGINE, model.work))
        work = prediction(compiled, found, given)
        if cycle_us is None:
            return work
        interval = PredictedDuration(*expected_at_boundary(model, work.interval.value_us, cycle_us))
        return Prediction(interval, work.features, work.assumed, work.outside)
    compiled.require(compiled.compared, given)
    return prediction(compiled, compiled.evaluate(values, stand_in=stand_in), given)


def prediction(compiled: CompiledModel, found: Evaluated, given: Mapping[str, float | None]) -> Prediction:
    """Return the prediction of one row from its evaluation, and from what was given.

    Raises:
        UsageError: The row has none.
    """
    require_amount(compiled, found, given)
    outside = tuple(outside_training(compiled, found))
    # The held-out errors are from rows in the training range, so they do not apply outside it.
    errors = None if outside else p90_ape_pct(compiled.model, group_of(compiled, found))
    _, form = found.form
    return Prediction(
        interval_about(largest(found.amount, 0.0), errors),
        {t.feature: found.values[t.feature] for t in form.terms},
        tuple(assumed(found)),
        outside,
    )


def assumed(found: Evaluated) -> Iterator[str]:
    """Yield what stands in for unknown features of one row."""
    for name, value in found.replaced.items():
        if isinstance(value, float):
            yield f"{name} {value:g}: does not follow from the input, the middle of its training range"


def group_of(compiled: CompiledModel, found: Evaluated) -> str | None:
    """Return the group of held-out rows that a row belongs to: its regime, or whether its step prefills."""
    name, _ = found.form
    if name != "line":
        return name
    # A model without features of prompts was still validated on both kinds of steps.
    prefill = known(compiled.formulas.values(found.values, ["prefill_tokens"]).get("prefill_tokens", math.nan))
    return None if prefill is None else "mixed" if prefill > 0 else "decode_only"


def require_amount(compiled: CompiledModel, found: Evaluated, given: Mapping[str, float | None]) -> None:
    """Refuse one row that has no prediction.

    Raises:
        UsageError: No regime's condition holds, a feature is unknown, or a formula or the sum is not finite.
    """
    model = compiled.model
    if not math.isnan(found.amount):
        return
    if found.index < 0:
        raise UsageError(f"no regime of {model.name} holds for these features")
    _, form = found.form
    without_value = [t.feature for t in form.terms if math.isnan(found.values.get(t.feature, math.nan))]
    # A row from Python may hold any value.
    with_value = {n for n, v in given.items() if v is not None and not (isinstance(v, float) and math.isnan(v))}
    if unknown := compiled.formulas.inputs(without_value, given) - with_value:
        raise compiled.lacks(unknown, with_value)
    of = f"the formula of {without_value[0]}" if without_value else "the sum"
    raise UsageError(
        f"{of} gives no finite number for these values",
        where=model.name,
        hint="give the feature itself, or other values",
    )
