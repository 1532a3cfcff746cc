"""Predict steps and requests from the models of one scope, in plain Python: neither numpy nor polars is imported.

A prediction is a number, the interval that nine of ten held-out rows kept to, what had to be assumed, and where the
input leaves the training range. `predict_frames` does the same for the rows of a frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tracefit.coefficients.compiled import CompiledModel, Formulas, expected_at_boundary, line_value
from tracefit.coefficients.model import STEP_MODELS, BoundaryModel
from tracefit.coefficients.workload import (
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    RequestInput,
    StepInput,
    prompt_step_groups,
    server_constants,
    traffic_formulas,
)
from tracefit.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefit.coefficients.evaluation import RequestRange
    from tracefit.coefficients.model import LinearForm, Model, NotFitted, Term, Workload

MAX_PREFILL_STEPS = 10_000

INTERVAL_ROWS = 20
"""Fewer held-out rows than this do not make an interval of their own."""


# -- what a prediction says ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PredictedDuration:
    """A predicted duration.

    Attributes:
        value_us: The prediction.
        low_us: Lower end of the interval that nine of ten held-out rows kept to; null without a validation.
        high_us: Its upper end; null also where held-out errors leave it open.
    """

    value_us: float
    low_us: float | None = None
    high_us: float | None = None


def interval_about(value_us: float, p90_ape_pct: float | None) -> PredictedDuration:
    """Put the interval around a prediction p that |p - actual| / actual <= q on nine of ten held-out rows gives.

    It is p/(1 + q) to p/(1 - q), open above where q is 1 or more.
    """
    if p90_ape_pct is None:
        return PredictedDuration(value_us)
    q = p90_ape_pct / 100
    return PredictedDuration(value_us, value_us / (1 + q), value_us / (1 - q) if q < 1 else None)


def p90_ape_pct(model: Model, group: str | None) -> float | None:
    """Return the 90th percentile of the held-out errors, of the group of rows like the input where it is large enough."""
    if model.validation is None:
        return None
    of_group = model.validation.by_group.get(group) if group else None
    enough = of_group is not None and of_group.n >= INTERVAL_ROWS
    found = of_group if of_group is not None and enough else model.validation.holdout
    return found.p90_ape_pct


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A predicted step.

    Attributes:
        scope_id: Whose model predicts.
        model: Its name.
        step: The step's time.
        features: What the model was evaluated on.
        assumed: What the input leaves open, and what stands in.
        out_of_range: Where the input leaves the training range.
    """

    scope_id: str | None
    model: str
    step: PredictedDuration
    features: tuple[tuple[str, float], ...]
    assumed: tuple[str, ...] = ()
    out_of_range: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPrediction:
    """A predicted request. Durations that the files have no model for are null, and what needs them too.

    Attributes:
        scope_id: Whose models predict.
        admission: ARRIVED to QUEUED.
        queue_wait: QUEUED to first SCHEDULED.
        prefill: First SCHEDULED to FIRST_TOKEN.
        itl: Mean time of a decode step, those with prompts of others among them.
        departure: FINISHED to DEPARTED.
        ttft: admission + queue wait + prefill.
        e2e: ttft + (output tokens - 1) * itl, ARRIVED to FINISHED.
        prefill_steps: Steps the prompt takes.
        assumed: What the input leaves open, and what stands in.
        out_of_range: Where the input leaves the training range.
    """

    scope_id: str | None
    admission: PredictedDuration | None
    queue_wait: PredictedDuration | None
    prefill: PredictedDuration
    itl: PredictedDuration
    departure: PredictedDuration | None
    ttft: PredictedDuration | None
    e2e: PredictedDuration | None
    prefill_steps: int
    assumed: tuple[str, ...] = ()
    out_of_range: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    """How well each range of a composed latency covers held-out requests, or why there is none."""


# -- one row of one model --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model predicts for a row, from which features, and how far to trust it."""

    interval: PredictedDuration
    features: dict[str, float]
    assumed: tuple[str, ...]
    out_of_range: tuple[str, ...]


def stand_ins(terms: Iterable[Term]) -> dict[str, float]:
    """Return the middle of the training range of every feature that has one."""
    ranges = ((t.feature, t.training_range) for t in terms)
    return {feature: (ends[0] + ends[1]) / 2 for feature, ends in ranges if ends is not None}


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
        given: Its features, or what they are computed from; null is unknown.
        stand_in: Let the middle of the training range stand in for a feature of a term that is not known, and say so.
        cycle_us: For a boundary model: time of the steps that run. Then, or if `given` has a batch of 0, the work is
            what is predicted, and the boundary is expected after it.

    Raises:
        UsageError: A feature is not known and nothing stands in for it, or no regime's condition holds.
    """
    model = compiled.model
    if isinstance(model, BoundaryModel) and (cycle_us is not None or given.get("batch") == 0):
        found = _predict_form(compiled, "idle_engine", model.work, given, stand_in=False)
        if cycle_us is None:
            return found
        interval = PredictedDuration(*expected_at_boundary(model, found.interval.value_us, cycle_us))
        return Prediction(interval, found.features, found.assumed, found.out_of_range)
    compiled.require(compiled.compared, given)
    group, form = compiled.active(compiled.formulas.row(given, compiled.compared))
    return _predict_form(compiled, _group(compiled, group, given), form, given, stand_in=stand_in)


def _group(compiled: CompiledModel, form: str, given: Mapping[str, float | None]) -> str | None:
    """Return the group of held-out rows that a row belongs to: its regime, or whether its step prefills."""
    if form != "line":
        return form
    known = not compiled.formulas.missing(["prefill_tokens"], given)
    prefill = compiled.formulas.row(given, ["prefill_tokens"])["prefill_tokens"] if known else None
    return None if prefill is None else "mixed" if prefill > 0 else "decode_only"


def _predict_form(
    compiled: CompiledModel,
    group: str | None,
    form: LinearForm,
    given: Mapping[str, float | None],
    *,
    stand_in: bool,
) -> Prediction:
    model, formulas = compiled.model, compiled.formulas
    middles = stand_ins(form.terms) if stand_in else {}
    names = [t.feature for t in form.terms]
    found = formulas.row(given, [n for n in names if not formulas.missing([n], given)])
    values, assumed, out_of_range = dict[str, float](), list[str](), list[str]()
    for term in form.terms:
        value = found.get(term.feature)
        if value is None and term.feature in middles:
            value = middles[term.feature]
            assumed.append(
                f"{term.feature} {value:g}: does not follow from the input, the middle of its training range"
            )
        if value is not None:
            values[term.feature] = value
            out_of_range += _out_of_range(model.name, term, value)
    predicted = line_value(form, {n: values.get(n) for n in names})
    if predicted is None:
        without_value = [n for n in names if n not in values]
        known = [n for n, v in given.items() if v is not None]
        if lacking := sorted(formulas.inputs(without_value, given) - set(known)):
            raise compiled.lacks(lacking, known)
        raise UsageError(
            f"the formula of {without_value[0]} gives no finite number for these values",
            where=model.name,
            hint="give the feature itself, or other values",
        )
    # The held-out errors are those of rows in the training range: outside they say nothing.
    interval = interval_about(predicted, None if out_of_range else p90_ape_pct(model, group))
    return Prediction(interval, values, tuple(assumed), tuple(out_of_range))


def _out_of_range(model: str, term: Term, value: float) -> list[str]:
    """Say that a value is outside the training range of a term, if it is."""
    if term.training_range is None or term.training_range[0] <= value <= term.training_range[1]:
        return []
    low, high = term.training_range
    return [f"{model}: {term.feature} {value:g} is outside {low:g} to {high:g}, the training range"]


# -- steps and requests of one scope ---------------------------------------------------------------------


@dataclass(frozen=True)
class ScopeModels:
    """The models of one scope by name."""

    scope_id: str | None
    models: Mapping[str, Model]
    ranges: Mapping[str, RequestRange] = field(default_factory=dict)
    """Ranges of composed latencies: ttft, itl, e2e."""
    not_fitted: tuple[NotFitted, ...] = ()
    """Models that the files say could not be fitted."""
    _compiled: dict[str, CompiledModel] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """Name the scope and its models."""
        return f"<models of {self.scope_id}: {', '.join(self.models)}>"

    def require(self, name: str) -> Model:
        """Return a model by name.

        Raises:
            UsageError: It is not there.
        """
        if name not in self.models:
            raise UsageError(
                f"no model {name} of scope {self.scope_id}",
                hint=f"there are: {', '.join(sorted(self.models))}",
            )
        return self.models[name]

    def compiled(self, model: Model) -> CompiledModel:
        """Return a model of the scope compiled for inputs as `workload` describes them; each is compiled once."""
        if model.name not in self._compiled:
            columns = STEP_COLUMNS if model.name.startswith("beta.") else REQUEST_COLUMNS
            self._compiled[model.name] = CompiledModel(model, columns)
        return self._compiled[model.name]

    @property
    def step_model(self) -> Model:
        """The model of step times.

        Raises:
            DataError: It could not be fitted; the error has the reason.
            UsageError: It is not there.
        """
        found = next((n for n in STEP_MODELS if n in self.models), STEP_MODELS[0])
        missing = next((m for m in self.not_fitted if m.name in STEP_MODELS), None)
        if missing is not None and found not in self.models:
            raise DataError(
                f"{missing.name} of scope {self.scope_id} was not fitted: {missing.reason}",
                hint=missing.remedy,
            )
        return self.require(found)

    @property
    def server(self) -> dict[str, float | None]:
        """Settings of the server by name, null where not known."""
        scope = next((m.scope for m in self.models.values() if m.scope is not None), None)
        return server_constants(scope)

    @property
    def workload(self) -> Workload | None:
        """The mean request the models were trained on; null where the files do not state it."""
        return next((m.scope.workload for m in self.models.values() if m.scope and m.scope.workload), None)

    @cached_property
    def traffic(self) -> Formulas:
        """Formulas of the prompts of other requests, for the mean request; see `workload.traffic_formulas`."""
        return Formulas.parse(traffic_formulas(self.workload), where="traffic")

    def setting(self, name: str) -> object:
        """Return any setting of the server as the files have it."""
        scopes = (m.scope for m in self.models.values() if m.scope is not None)
        return next((s.settings.get(name) for s in scopes), None)

    def known_settings(self, compiled: CompiledModel) -> dict[str, float | None]:
        """Return the settings of the server; one that is not known leaves its name to the model's own formula for it."""
        return {n: v for n, v in self.server.items() if v is not None or n not in compiled.formulas.nodes}

    def step(self, described: StepInput, *, stand_in: bool = False) -> StepPrediction:
        """Predict a step.

        Raises:
            DataError: The model of step times could not be fitted.
            UsageError: There is none, or a feature it needs is not known.
        """
        compiled = self.compiled(self.step_model)
        given = {**self.known_settings(compiled), **described.inputs(), **described.features}
        found = predict_row(compiled, given, stand_in=stand_in)
        return StepPrediction(
            self.scope_id,
            compiled.model.name,
            found.interval,
            tuple(found.features.items()),
            found.assumed,
            found.out_of_range,
        )

    def request(self, described: RequestInput) -> RequestPrediction:
        """Predict a request: overheads, queue wait, the steps of its prompt, and its decode steps.

        Raises:
            DataError: The model of step times could not be fitted.
            UsageError: There is none, or the input makes no sense.
        """
        return _RequestPredictor(self, described).predict()

    def beside(self, batch: float) -> float:
        """Return how many requests run beside one that runs: of a full batch one has to go first."""
        slots = self.server["max_num_seqs"]
        return batch if slots is None else max(min(batch, slots - 1), 0.0)

    def budget(self, batch: float) -> float | None:
        """Return the prompt tokens that a step has room for beside `batch` decodes; null where nothing cuts prompts."""
        limit = self.server["max_num_batched_tokens"]
        if limit is None or self.setting("enable_chunked_prefill") is False:
            return None
        return max(limit - batch, 1.0)


class _RequestPredictor:
    """One prediction of a request, and what it collects on the way: assumptions, and inputs out of range."""

    def __init__(self, models: ScopeModels, described: RequestInput) -> None:
        self.models, self.described = models, described
        self.inputs, assumed = described.inputs(models.server, models.workload)
        self.assumed, self.out_of_range = list(assumed), list[str]()
        self.beside = models.beside(self.inputs["batch"] or 0.0)
        self.traffic = self._traffic(self.beside)

    def predict(self) -> RequestPrediction:
        described, models, inputs = self.described, self.models, self.inputs
        batch, context = inputs["batch"] or 0.0, inputs["context"] or 0.0
        mean_us, met_us = self._cycle(batch, context) if batch else (None, None)
        inputs["decode_cycle_us"] = met_us
        # The request decodes with the others, halfway through its output on average.
        own = described.prompt_tokens + described.output_tokens / 2
        itl_us, _ = self._cycle(self.beside + 1, (self.beside * context + own) / (self.beside + 1))
        prefill_us, steps = self._prefill(context)
        if models.setting("async_scheduling") is True and mean_us is not None:
            prefill_us += mean_us
            self.assumed.append("scheduling runs a step ahead: the prompt waits one cycle more")
        admission = self._overhead("admission", inputs, met_us)
        wait = self._overhead("queue_wait", inputs, met_us)
        departure = self._overhead("departure", {**inputs, "batch": self.beside + 1}, met_us)
        if wait is not None and described.queue and not self._depends_on_queue("alpha.queue_wait"):
            self.out_of_range.append(
                "alpha.queue_wait: nothing in it depends on the queue, no request waited in training"
            )
        ttft_us = (
            None if admission is None or wait is None else admission.value_us + wait.value_us + prefill_us
        )
        e2e_us = None if ttft_us is None else ttft_us + itl_us * (described.output_tokens - 1)
        return RequestPrediction(
            models.scope_id,
            admission,
            wait,
            PredictedDuration(prefill_us),
            self._in_range("itl", itl_us),
            departure,
            None if ttft_us is None else self._in_range("ttft", ttft_us),
            None if e2e_us is None else self._in_range("e2e", e2e_us),
            steps,
            tuple(dict.fromkeys(self.assumed)),
            tuple(dict.fromkeys(self.out_of_range)),
            tuple(self._about_range(name) for name in ("ttft", "itl", "e2e")),
        )

    def _about_range(self, latency: str) -> str:
        found, name = self.models.ranges.get(latency), latency.upper()
        if found is None:
            return f"{name}: no range, for the files hold none of requests"
        if found.reason is not None:
            return f"{name}: no range, {found.reason}"
        if self.out_of_range:
            return f"{name}: no range, the input is outside the training range"
        return f"{name}: {found.coverage_pct:.0f} % of {found.holdout.n} held-out requests lie in it"

    def _in_range(self, latency: str, value_us: float) -> PredictedDuration:
        """Put the published range about a composed latency; none about one whose inputs are outside the training range."""
        found = self.models.ranges.get(latency)
        if found is None or found.low_ratio is None or found.high_ratio is None or self.out_of_range:
            return PredictedDuration(value_us)
        return PredictedDuration(value_us, found.low_ratio * value_us, found.high_ratio * value_us)

    def _traffic(self, beside: float) -> dict[str, float]:
        given = {**self.inputs, "beside": beside, "budget": self.models.budget(beside) or math.inf}
        formulas = self.models.traffic
        found = formulas.row(given, formulas.nodes)
        return {name: found[name] or 0.0 for name in formulas.nodes}

    def _cycle(self, decoding: float, context: float) -> tuple[float, float]:
        """Return the mean time of a step, those with prompts of others among them, and of one that an arrival meets."""
        alone = self._step(decoding, context)
        share = self.traffic["prompt_step_share"] if self.beside else 0.0
        if not share:
            return alone, alone
        groups = range(prompt_step_groups(self.models.workload))
        mixed = [
            self._step(
                decoding,
                context,
                self.traffic[f"prompt_step_tokens_{k}"],
                reqs=self.traffic[f"prompt_step_reqs_{k}"],
            )
            for k in groups
        ]
        mean = (1 - share) * alone + share * sum(mixed) / len(mixed)
        return mean, self._met(decoding, context, alone)

    def _met(self, decoding: float, context: float, alone: float) -> float:
        """Return the mean time of the step that an arrival meets, E[c^2] / E[c], of steps with the mean prompt and without."""
        share = self.traffic["mean_prompt_share"]
        tokens, reqs = self.traffic["mean_prompt_tokens"], self.traffic["mean_prompt_reqs"]
        mixed = self._step(decoding, context, tokens, reqs=reqs)
        mean = (1 - share) * alone + share * mixed
        return ((1 - share) * alone**2 + share * mixed**2) / mean if mean else 0.0

    def _note(self, found: Prediction | StepPrediction) -> None:
        self.assumed += found.assumed
        self.out_of_range += found.out_of_range

    def _step(
        self, decoding: float, context: float, prefill: float = 0, done: float = 0, reqs: float | None = None
    ) -> float:
        step = StepInput(decoding, context, prefill, reqs, done, features=self.described.features)
        found = self.models.step(step, stand_in=True)
        self._note(found)
        return found.step.value_us

    def _prefill(self, context: float) -> tuple[float, int]:
        """Add up the steps of the prompt, cut by what running requests leave of the token budget.

        Prompts of others that arrive meanwhile share these steps.
        """
        total, done = 0.0, self.described.cached
        left = self.described.prompt_tokens - done
        budget = self.models.budget(self.beside) or math.inf
        count = math.ceil(left / budget) if budget < math.inf else 1
        if count > MAX_PREFILL_STEPS:
            raise UsageError(f"the prompt takes more than {MAX_PREFILL_STEPS:,} steps", where="prompt")
        others, reqs = self.traffic["prompt_tokens_per_step"], 1 + self.traffic["prompts_per_step"]
        for i in range(count):
            tokens = min(budget, left - i * budget) if i else min(budget, left)
            shared = min(tokens + others, budget)
            total, done = total + self._step(self.beside, context, shared, done, reqs), done + tokens
        return total, count

    def _overhead(
        self, name: str, inputs: Mapping[str, float | None], cycle_us: float | None
    ) -> PredictedDuration | None:
        model = self.models.models.get(f"alpha.{name}")
        if model is None:
            self.assumed.append(f"no model alpha.{name}: left out with what needs it")
            return None
        compiled = self.models.compiled(model)
        given = {**self.models.known_settings(compiled), **inputs, **self.described.features}
        found = predict_row(compiled, given, stand_in=True, cycle_us=cycle_us)
        self._note(found)
        return found.interval

    def _depends_on_queue(self, name: str) -> bool:
        compiled = self.models.compiled(self.models.models[name])
        return "queue" in compiled.inputs
