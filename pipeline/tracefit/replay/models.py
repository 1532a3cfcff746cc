"""The fitted models of a deployment as the step times and the admissions of a replay."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import polars as pl

from tracefit.coefficients.compiled import CompiledModel, linear_forms
from tracefit.coefficients.model import BoundaryModel, Regime, RegimesModel
from tracefit.coefficients.workload import STEP_COLUMNS, STEP_INPUTS
from tracefit.errors import DataError
from tracefit.evaluator import COMPARE, power
from tracefit.features.expressions import ARITHMETIC, ROW, Algebra, compiled, evaluate
from tracefit.fit.results import line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.coefficients.model import Model
    from tracefit.features.expressions import Function
    from tracefit.replay.engine import StepBatch
    from tracefit.replay.run import ReplayedTimes
    from tracefit.statistics import Flags, Integers, Vector


StepAmount = TypeVar("StepAmount", "float", "Vector")
Amount: TypeAlias = "float | Vector"


def _finite(value: Amount) -> Amount:
    if isinstance(value, float):
        return value if math.isfinite(value) else math.nan
    return np.where(np.isfinite(value), value, np.nan)


def _quotient(left: Amount, right: Amount) -> Amount:
    if isinstance(right, float):
        return left / (right or math.inf)
    return np.asarray(left / np.where(right == 0, np.inf, right))


def _power(left: Amount, right: Amount) -> Amount:
    is_row = isinstance(left, float) and isinstance(right, float)
    return power(left, right) if is_row else np.power(left, right)  # type: ignore[arg-type]  # both are


def _extreme(function: Function, arguments: Sequence[Amount]) -> Amount:
    if all(isinstance(one, float) for one in arguments):
        bound = ROW.extreme(function, arguments)  # type: ignore[arg-type]  # all of them are numbers
        return math.nan if bound is None else bound
    return np.asarray(reduce(np.minimum if function == "min" else np.maximum, arguments))


def _compare(relation: str, left: Amount, right: Amount) -> Flags:
    has_both = ~(np.isnan(left) | np.isnan(right))
    return np.asarray(COMPARE[relation](left, right) & has_both)


ARRAYS: Algebra[Amount, Flags] = Algebra(
    constant=float,
    binary={
        **ARITHMETIC,
        "/": _quotient,
        "**": _power,
    },
    extreme=_extreme,
    finite=_finite,
    compare=_compare,
    some=lambda values: reduce(np.logical_or, values, np.asarray(False)),
    every=lambda values: reduce(np.logical_and, values, np.asarray(True)),
)
"""Numbers of consecutive steps, or one number for all of them, which is faster; NaN is unknown."""


class FittedStepTimes:
    """A model of step times, for the steps of a replay."""

    def __init__(self, model: Model, server: Mapping[str, float | None], factor: float = 1.0) -> None:
        """Compile a model.

        Args:
            model: A model of step times.
            server: Settings of the server that its formulas use; null if unknown: then a step that needs it has no time.
            factor: Factor on every time, of a machine with another speed.

        Raises:
            DataError: The model reads a value of a step that a replay does not have.
        """
        self._compiled, self._factor = CompiledModel(model, STEP_COLUMNS), factor
        server = {name: value for name, value in server.items() if value is not None}
        formulas, inputs = self._compiled.formulas, {*server, *STEP_INPUTS}
        if missing := formulas.missing(self._compiled.features, inputs):
            raise DataError(f"a replay does not know {', '.join(missing)} of a step", where=model.name)
        used = formulas.used(self._compiled.features, inputs)
        self._line_form = linear_forms(model)[next(reversed(linear_forms(model)))]
        nodes = [(n, node) for n, node in formulas.nodes.items() if n in used and n not in inputs]
        # Values that no step changes are computed once.
        self._row: dict[str, float | None] = dict(server)
        self._formulas = []
        for name, node in nodes:
            if formulas.needs[name] <= self._row.keys():
                self._row[name] = evaluate(node, self._row)
            else:
                self._formulas.append((name, compiled(node, ROW), compiled(node, ARRAYS)))
        self._constant = {n: math.nan if v is None else v for n, v in self._row.items()}

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step in us."""
        values: dict[str, float | None] = {**self._row, **_described(batch, batch.context_tokens)}
        for name, computed, _ in self._formulas:
            values[name] = computed(values.__getitem__)
        model = self._compiled.model
        regimes = model.regimes if isinstance(model, RegimesModel) else (self._line_form,)
        holds = (r for r in regimes if not isinstance(r, Regime) or r.when.holds(values.__getitem__, ROW))
        form = next(holds, None)
        time = None if form is None else line(form.intercept, form.terms, values.__getitem__, ROW)
        return max(self._factor * (time or 1.0), 1.0)

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode, in us; shape (steps,)."""
        context: Vector = np.asarray(batch.context_tokens + growth * np.arange(steps), dtype=float)
        described = _described(batch, context).items()
        values = {n: float(v) if isinstance(v, int) else v for n, v in described} | self._constant
        with np.errstate(all="ignore"):
            for name, _, computed in self._formulas:
                values[name] = computed(values.__getitem__)
            return np.broadcast_to(np.fmax(self._factor * self._line(values), 1.0), steps)

    def _line(self, values: Mapping[str, Amount]) -> Amount:
        """Return the line of the first regime whose condition holds."""
        model, value_of = self._compiled.model, values.__getitem__
        if not isinstance(model, RegimesModel):
            return line(self._line_form.intercept, self._line_form.terms, value_of, ARRAYS)
        amount: Amount = math.nan
        for regime in reversed(model.regimes):
            time = line(regime.intercept, regime.terms, value_of, ARRAYS)
            amount = np.where(regime.when.holds(value_of, ARRAYS), time, amount)
        return amount


def _described(batch: StepBatch, context: StepAmount) -> dict[str, StepAmount | float]:
    """Return the inputs of `STEP_COLUMNS` of a step, or of several that differ in their context."""
    return {
        "prefill_reqs": batch.prefill_reqs,
        "prefill": batch.prefill_tokens,
        "prefill_done": batch.prefill_context_tokens,
        "batch": batch.decode_reqs,
        "context": context / max(batch.decode_reqs, 1),
        "waiting": batch.waiting,
    }


def admission_us(model: Model | None, arrival_us: Vector, prompt_tokens: Integers) -> Vector:
    """Return the API's time for each request before the queue, in us; shape (n,). 0 without a model.

    The replay adds the wait for a step boundary. So only the work of a boundary model counts; a model of another form counts with its
    time on an idle server, where nothing waits.

    Args:
        model: The model of admissions; null without one.
        arrival_us: Arrivals in ascending order.
        prompt_tokens: Prompt tokens.
    """
    if model is None:
        return np.zeros(len(arrival_us))
    if not isinstance(model, BoundaryModel):
        return _of_requests(model, {"prompt_tokens": prompt_tokens}, len(arrival_us))
    work = np.maximum(model.work.intercept.value + model.work_us_per_prompt_token * prompt_tokens, 0.0)
    if model.queue is None:
        return np.asarray(work)
    # Work begins when the request comes or the work on the one before ends (Lindley's recursion, as a running maximum).
    total = np.cumsum(work)
    ends = total + np.maximum.accumulate(arrival_us - (total - work))
    return np.asarray(ends - arrival_us)


def batch_at(at_us: Vector, times: ReplayedTimes) -> Vector:
    """Return how many requests ran in the step that ends at each time, shape (n,); 0 where nothing was replayed.

    Args:
        at_us: Ends of steps of the replay.
        times: The replay.
    """
    if not times.steps:
        return np.zeros(len(at_us))
    ends, running = (
        np.array(column) for column in zip(*((s[0][-1], s[1]) for s in times.steps), strict=True)
    )
    return np.asarray(running[np.minimum(np.searchsorted(ends, at_us), len(ends) - 1)], dtype=float)


def departure_us(model: Model | None, times: ReplayedTimes, output_tokens: Integers) -> Vector:
    """Return the API's time of each request after its last token, in us; shape (n,). NaN without a model or a last token.

    Args:
        model: The model of departures; null without one.
        times: The replay of these requests.
        output_tokens: Output tokens.
    """
    last = times.last_us
    if model is None or not times.steps:
        return np.full(len(last), np.nan)
    batch = batch_at(last, times)
    _, which, count = np.unique(last, return_inverse=True, return_counts=True)
    inputs: dict[str, Vector | Integers] = {
        "num_decode_reqs": batch,
        "finishing_reqs": count[which].astype(float),
        "output_tokens": output_tokens,
    }
    return _of_requests(model, inputs, len(last)) + 0 * last


def _of_requests(model: Model, inputs: Mapping[str, Vector | Integers], rows: int) -> Vector:
    """Evaluate a model of requests; inputs that are not given are 0, results at least 0."""
    compiled = CompiledModel(model)
    frame = pl.DataFrame({name: np.asarray(value, dtype=float) for name, value in inputs.items()})
    missing = compiled.inputs - inputs.keys()
    frame = frame.with_columns(pl.lit(0.0).alias(name) for name in sorted(missing))
    predicted = compiled.computed(frame).select(y=compiled.expression())["y"]
    return np.broadcast_to(predicted.fill_null(0.0).to_numpy(), rows)
