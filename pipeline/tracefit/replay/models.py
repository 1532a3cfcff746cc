"""The fitted models of a scope as the step times and the admissions of a replay."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.coefficients.workload import STEP_COLUMNS
from tracefit.errors import UsageError
from tracefit.evaluator import COMPARE
from tracefit.features.expressions import ARITHMETIC, Algebra, compute
from tracefit.fit.results import line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.coefficients.model import Model
    from tracefit.features.expressions import Function, Operator
    from tracefit.replay.engine import StepBatch
    from tracefit.statistics import Flags, Integers, Vector


def _binary(operator: Operator, left: Vector, right: Vector) -> Vector:
    if operator == "/":
        return np.asarray(left / np.where(right == 0, np.inf, right))
    return np.asarray(np.power(left, right) if operator == "**" else ARITHMETIC[operator](left, right))


def _extreme(function: Function, arguments: Sequence[Vector]) -> Vector:
    return np.asarray(reduce(np.minimum if function == "min" else np.maximum, arguments))


def _compare(relation: str, left: Vector, right: Vector) -> Flags:
    known = ~(np.isnan(left) | np.isnan(right))
    return np.asarray(COMPARE[relation](left, right) & known)


ARRAYS: Algebra[Vector, Flags] = Algebra(
    constant=np.asarray,
    binary=_binary,
    extreme=_extreme,
    finite=lambda value: np.where(np.isfinite(value), value, np.nan),
    compare=_compare,
    some=lambda values: reduce(np.logical_or, values, np.asarray(False)),
    every=lambda values: reduce(np.logical_and, values, np.asarray(True)),
)
"""Arrays of numbers; NaN is unknown."""


class FittedStepTimes:
    """A model of step times, for the steps of a replay."""

    def __init__(self, model: Model, server: Mapping[str, float | None]) -> None:
        """Compile a model.

        Args:
            model: A model of step times.
            server: Settings of the server that its formulas use, null where not known.

        Raises:
            UsageError: The model reads what a replay does not know of a step.
        """
        self._compiled = CompiledModel(model, STEP_COLUMNS)
        self._server = {n: np.asarray(np.nan if v is None else v) for n, v in server.items()}
        formulas, given = self._compiled.formulas, {*self._server, *_described(_NOTHING)}
        if missing := formulas.missing(self._compiled.features, given):
            raise UsageError(f"a replay does not know {', '.join(missing)} of a step", where=model.name)
        used = formulas.used(self._compiled.features, given)
        self._nodes = [(n, node) for n, node in formulas.nodes.items() if n in used and n not in given]

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step in us."""
        return float(self._times(_described(batch)))

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode, in us; shape (steps,)."""
        context: Vector = np.asarray(batch.context_tokens + growth * np.arange(steps), dtype=float)
        return np.broadcast_to(self._times(_described(batch, context)), steps)

    def _times(self, values: dict[str, Vector]) -> Vector:
        with np.errstate(all="ignore"):
            values |= self._server
            for name, node in self._nodes:
                values[name] = compute(node, values.__getitem__, ARRAYS)
            return np.nan_to_num(np.maximum(self._line(values), 1.0), nan=1.0)

    def _line(self, values: Mapping[str, Vector]) -> Vector:
        """Return the line of the first regime whose condition holds."""
        model, value_of = self._compiled.model, values.__getitem__
        if not isinstance(model, RegimesModel):
            form = self._compiled.active({})[1]
            return line(form.intercept, form.terms, value_of, ARRAYS)
        found: Vector = np.asarray(np.nan)
        for regime in reversed(model.regimes):
            time = line(regime.intercept, regime.terms, value_of, ARRAYS)
            found = np.where(regime.when.holds(value_of, ARRAYS), time, found)
        return found


def _described(batch: StepBatch | tuple[float, ...], context: Vector | None = None) -> dict[str, Vector]:
    """Return the inputs of `STEP_COLUMNS` of a step, or of several that differ in their context."""
    prefill_reqs, prefill, done, _, decode_reqs, tokens, waiting = batch
    values = {"prefill_reqs": prefill_reqs, "prefill": prefill, "prefill_done": done, "batch": decode_reqs}
    inputs = {name: np.asarray(value, dtype=float) for name, value in values.items()}
    mean = (np.asarray(tokens) if context is None else context) / max(decode_reqs, 1)
    return {**inputs, "context": mean, "waiting": np.asarray(waiting, dtype=float)}


_NOTHING = (0.0,) * 7


def admission_us(model: Model | None, arrival_us: Vector, prompt_tokens: Integers) -> Vector:
    """Return the API's time of each request until it can be queued, in us; shape (n,).

    The wait for a step boundary that follows is the replay's own: a boundary model's work alone counts, which is 0 where the
    model has another form or reads more than the prompt.

    Args:
        model: The model of admissions; null without one.
        arrival_us: Arrivals in ascending order.
        prompt_tokens: Prompt tokens.
    """
    if not isinstance(model, BoundaryModel) or {t.feature for t in model.work.terms} - {"prompt_tokens"}:
        return np.zeros(len(arrival_us))
    work = np.maximum(model.work.intercept.value + model.work_us_per_prompt_token * prompt_tokens, 0.0)
    if model.queue is None:
        return np.asarray(work)
    # Work begins when the request comes or the work on the one before ends (Lindley's recursion, as a running maximum).
    total = np.cumsum(work)
    ends = total + np.maximum.accumulate(arrival_us - (total - work))
    return np.asarray(ends - arrival_us)
