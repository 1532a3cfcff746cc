"""The fitted models of a deployment as the step times and the admissions of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.errors import DataError
from tracefit.models.amounts import filled, largest
from tracefit.models.describe import STEP_INPUTS, STEP_VALUES
from tracefit.models.evaluate import CompiledModel
from tracefit.models.formulas import Name
from tracefit.models.schema import BoundaryModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.models.amounts import Amount
    from tracefit.models.schema import Model
    from tracefit.replay.engine import StepBatch
    from tracefit.replay.run import ReplayedTimes
    from tracefit.statistics import Integers, Vector


class FittedStepTimes:
    """A model of step times, for the steps of a replay."""

    def __init__(self, model: Model, server: Mapping[str, float | None], factor: float = 1.0) -> None:
        """Compile a model.

        Args:
            model: A model of step times.
            server: Settings of the server that its formulas use; null if unknown: then a step that needs it has no
                time.
            factor: Factor on every time, of a machine with another speed.

        Raises:
            DataError: The model reads a value of a step that a replay does not have.
        """
        self._compiled, self._factor = CompiledModel(model, STEP_VALUES), factor
        server = {name: float(value) for name, value in server.items() if value is not None}
        formulas, inputs = self._compiled.formulas, {*server, *STEP_INPUTS}
        if missing := formulas.missing(self._compiled.features, inputs):
            raise DataError(f"a replay does not know {', '.join(missing)} of a step", where=model.name)
        used = formulas.used(self._compiled.features, inputs) - inputs
        # Values that no step changes are computed once.
        self._constant: dict[str, Amount] = dict(server)
        self._formulas, self._aliases = [], []
        for name in (n for n in formulas.nodes if n in used):
            if formulas.needs[name] <= self._constant.keys():
                self._constant[name] = formulas.computation(name)(self._constant)
            elif isinstance(node := formulas.nodes[name], Name) and node.name in STEP_INPUTS:
                self._aliases.append((name, node.name))
            else:
                self._formulas.append((name, formulas.computation(name)))

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step in us."""
        time = float(self._amount(batch, float(batch.context_tokens)))
        return max(self._factor * time, 1.0) if time > 0 else 1.0

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode, in us; shape (steps,)."""
        context: Vector = np.asarray(batch.context_tokens + growth * np.arange(steps), dtype=float)
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.fmax(self._factor * self._amount(batch, context), 1.0), steps)

    def _amount(self, batch: StepBatch, context_tokens: Amount) -> Amount:
        values = self._constant | _described(batch, context_tokens)
        for name, given in self._aliases:
            values[name] = values[given]
        for name, computed in self._formulas:
            values[name] = computed(values)
        return self._compiled.amount(values)


def _described(batch: StepBatch, context_tokens: Amount) -> dict[str, Amount]:
    """Return the inputs of `STEP_VALUES` of a step, or of several that differ in their context."""
    return {
        "prefill_reqs": float(batch.prefill_reqs),
        "prefill": float(batch.prefill_tokens),
        "prefill_done": float(batch.prefill_context_tokens),
        "batch": float(batch.decode_reqs),
        "context": context_tokens / max(batch.decode_reqs, 1),
        "waiting": float(batch.waiting),
    }


def admission_us(model: Model | None, arrival_us: Vector, prompt_tokens: Integers) -> Vector:
    """Return the API's time for each request before the queue, in us; shape (n,). 0 without a model.

    The replay adds the wait for a step boundary. So only the work of a boundary model counts; a model of another form
    counts with its time on an idle server, where nothing waits.

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
    ends, running = (np.array(column) for column in zip(*((s[0][-1], s[1]) for s in times.steps), strict=True))
    return np.asarray(running[np.minimum(np.searchsorted(ends, at_us), len(ends) - 1)], dtype=float)


def departure_us(model: Model | None, times: ReplayedTimes, output_tokens: Integers) -> Vector:
    """Return the API's time of each request after its last token, in us; shape (n,). NaN without a model or a last
    token.

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
    given = dict.fromkeys(compiled.inputs, 0.0) | {n: np.asarray(v, dtype=float) for n, v in inputs.items()}
    with np.errstate(all="ignore"):
        amount = largest(filled(compiled.evaluate(given).amount, 0.0), 0.0)
    return np.broadcast_to(amount, rows)
