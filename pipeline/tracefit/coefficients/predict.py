"""The models of one deployment, and predictions of single rows and steps in plain Python, without numpy or polars.

A prediction is a number, the interval that nine of ten held-out rows stayed in, the assumptions, and the inputs outside
the training range. `predict_frames` does the same for the rows of a frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from tracefit.coefficients.compiled import (
    CompiledModel,
    Formulas,
    expected_at_boundary,
    terms_of,
)
from tracefit.coefficients.model import STEP_MODELS, BoundaryModel, LinearModel
from tracefit.coefficients.workload import (
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    STEP_INPUTS,
    require_possible,
    step_inputs,
    traffic_formulas,
)
from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.features.expressions import ROW
from tracefit.features.targets import is_step_model
from tracefit.fit.results import line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefit.coefficients.model import (
        DeploymentFacts,
        LinearForm,
        Model,
        NotFitted,
        RequestRange,
        Workload,
    )
    from tracefit.fit.results import Term

PREDICTED = "predicted_us"
"""Name of the prediction itself among values outside their range: a line below 0 is cut off at 0."""
INTERVAL_ROWS = 20
"""Held-out rows that a group of rows needs for an interval of its own."""
MAX_NAME_SHOWN = 64


# -- predictions -----------------------------------------------------------------------------------------


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
    """Return the 90th percentile of the held-out errors, over the rows of the input's group if they are enough."""
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


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A predicted step.

    Attributes:
        deployment_id: The deployment of the model.
        model: Name of the model.
        step: The step's time.
        features: The features and their values.
        assumed: Assumptions for inputs that were not given.
        out_of_range: Inputs outside the training range.
    """

    deployment_id: str | None
    model: str
    step: PredictedDuration
    features: tuple[tuple[str, float], ...]
    assumed: tuple[str, ...] = ()
    out_of_range: tuple[str, ...] = ()


class Outside(NamedTuple):
    """Values of a feature, `low` to `high`, outside its training range `ends`; or predictions below 0."""

    model: str
    feature: str
    low: float
    high: float
    ends: tuple[float, float]
    has_term: bool = True

    def __str__(self) -> str:
        values = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        if self.feature == PREDICTED:
            return f"{self.model}: the model extrapolates to {values} us here; reported as 0, which means unknown, not no time"
        text = f"{self.model}: {self.feature} {values} is outside {self.ends[0]:g} to {self.ends[1]:g}, the training range"
        return text if self.has_term else f"{text}; the model has no term for it"


def in_lines(outside: Iterable[Outside]) -> tuple[str, ...]:
    """Return a line per model and feature: the steps of one request leave a range at many values."""
    widest: dict[tuple[str, str], Outside] = {}
    for each in outside:
        other = widest.get(each[:2], each)
        widest[each[:2]] = each._replace(low=min(each.low, other.low), high=max(each.high, other.high))
    return tuple(map(str, widest.values()))


# -- one row of one model --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of a model for a row, with its features, assumptions and values out of range."""

    interval: PredictedDuration
    features: dict[str, float]
    assumed: tuple[str, ...]
    outside: tuple[Outside, ...]


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
        given: Its features, or their inputs; null is unknown.
        stand_in: Use the middle of the training range for an unknown feature of a term, and say so.
        cycle_us: For a boundary model: time of the running steps. With it, or with a batch of 0 in `given`, the model
            predicts the work, and the expected wait for the boundary is added.

    Raises:
        UsageError: A feature is unknown and has no stand-in, or no regime's condition holds.
    """
    model = compiled.model
    # Without a cycle, a batch of 0 shows an idle engine: no step runs, and the admission is the work.
    if isinstance(model, BoundaryModel) and (cycle_us is not None or given.get("batch") == 0):
        work = _predict_form(compiled, "idle_engine", model.work, given, stand_in=False)
        if cycle_us is None:
            return work
        interval = PredictedDuration(*expected_at_boundary(model, work.interval.value_us, cycle_us))
        return Prediction(interval, work.features, work.assumed, work.outside)
    compiled.require(compiled.compared, given)
    group, form = compiled.active(compiled.formulas.row(given, compiled.compared))
    return _predict_form(compiled, _group(compiled, group, given), form, given, stand_in=stand_in)


def _group(compiled: CompiledModel, form: str, given: Mapping[str, float | None]) -> str | None:
    """Return the group of held-out rows that a row belongs to: its regime, or whether its step prefills."""
    if form != "line":
        return form
    # A model without features of prompts was still validated on both kinds of steps.
    if compiled.formulas.missing(["prefill_tokens"], given):
        return None
    prefill = compiled.formulas.row(given, ["prefill_tokens"])["prefill_tokens"]
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
    row = formulas.row(given, [n for n in names if not formulas.missing([n], given)])
    replaced = {n: middles[n] for n in names if n in middles and row.get(n) is None}
    values = {n: value for n in names if (value := replaced.get(n, row.get(n))) is not None}
    outside = _outside(model, values, {t.feature: t.limits for t in form.terms})
    if not outside:
        # A feature that a term covers leaves its range together with the term: one line is enough.
        unmodeled = {n: ends for n, ends in compiled.unmodeled.items() if not formulas.missing([n], given)}
        outside = _outside(model, formulas.row(given, unmodeled), unmodeled, has_term=False)
    predicted = line(form.intercept, form.terms, values.get, ROW)
    if predicted is None:
        without_value = [n for n in names if n not in values]
        # A row from Python may hold any value.
        with_value = {
            n for n, v in given.items() if v is not None and not (isinstance(v, float) and math.isnan(v))
        }
        if lacking := formulas.inputs(without_value, given) - with_value:
            raise compiled.lacks(lacking, with_value)
        of = f"the formula of {without_value[0]}" if without_value else "the sum"
        raise UsageError(
            f"{of} gives no finite number for these values",
            where=model.name,
            hint="give the feature itself, or other values",
        )
    if predicted < 0:
        outside.append(Outside(model.name, PREDICTED, predicted, predicted, (0.0, math.inf)))
    # The held-out errors are from rows in the training range, so they do not apply outside it.
    interval = interval_about(max(predicted, 0.0), None if outside else p90_ape_pct(model, group))
    assumed = (
        f"{n} {value:g}: does not follow from the input, the middle of its training range"
        for n, value in replaced.items()
    )
    return Prediction(interval, values, tuple(assumed), tuple(outside))


def _outside(
    model: Model,
    values: Mapping[str, float | None],
    ranges: Mapping[str, tuple[float, float]],
    *,
    has_term: bool = True,
) -> list[Outside]:
    """Return the values outside their training range."""
    return [
        Outside(model.name, name, value, value, ends, has_term)
        for name, ends in ranges.items()
        if (value := values.get(name)) is not None and not ends[0] <= value <= ends[1]
    ]


# -- steps and requests of one deployment ---------------------------------------------------------------------


@dataclass(frozen=True)
class DeploymentModels:
    """The models of one deployment by name."""

    deployment_id: str | None
    models: Mapping[str, Model]
    ranges: Mapping[str, RequestRange] = field(default_factory=dict)
    """Ranges of composed latencies: ttft, itl, e2e."""
    not_fitted: tuple[NotFitted, ...] = ()
    """Models that the files say could not be fitted."""
    _compiled: dict[str, CompiledModel] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """Name the deployment and its models."""
        return f"<models of {self.deployment_id}: {', '.join(self.models)}>"

    def require(self, name: str) -> Model:
        """Return a model by name.

        Raises:
            UsageError: It is not there.
        """
        if name not in self.models:
            raise UsageError(
                f"no model {name} of deployment {self.deployment_id}",
                hint=f"there are: {', '.join(sorted(self.models))}",
            )
        return self.models[name]

    def compiled(self, model: Model) -> CompiledModel:
        """Return a model of the deployment compiled for inputs as `workload` describes them; each is compiled once."""
        if model.name not in self._compiled:
            columns = STEP_COLUMNS if is_step_model(model.name) else REQUEST_COLUMNS
            self._compiled[model.name] = CompiledModel(model, columns)
        return self._compiled[model.name]

    @property
    def step_model(self) -> Model:
        """The model of step times.

        Raises:
            DataError: The model could not be fitted; the error has the reason.
            UsageError: No such model.
        """
        # If both exist, take whole cycles: a duration is the time inside schedule() on most servers.
        name = next((n for n in STEP_MODELS if n in self.models), STEP_MODELS[0])
        missing = next((m for m in self.not_fitted if m.name in STEP_MODELS), None)
        if missing is not None and name not in self.models:
            raise DataError(
                f"{missing.name} of deployment {self.deployment_id} was not fitted: {missing.reason}",
                hint=missing.remedy,
            )
        return self.require(name)

    @cached_property
    def _facts(self) -> tuple[DeploymentFacts, ...]:
        """The facts of the deployment, as each model of the files states them."""
        return tuple(model.deployment for model in self.models.values() if model.deployment is not None)

    @cached_property
    def server(self) -> dict[str, float | None]:
        """Settings of the server that formulas of workloads use, by name, null if unknown."""
        names = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "block_size")
        values = {n: None if (v := self.limit(n)) is None else float(v) for n in names}
        # The block size has a default in vLLM; the other settings cannot be guessed.
        if not values["block_size"]:
            from tracefit.server.settings import DEFAULT_BLOCK_SIZE  # noqa: PLC0415 - files of `train` state it

            values["block_size"] = DEFAULT_BLOCK_SIZE
        return values

    @cached_property
    def usual_kv_usage(self) -> float | None:
        """KV usage of a described step, where no step that the model was trained on has its context, and the KV blocks are unknown."""
        model = self.step_model
        left_out = model.features_left_out if isinstance(model, LinearModel) else ()
        lacks_context = any(each.feature == "context_tokens" and not each.training_range for each in left_out)
        if self.server["num_gpu_blocks"] or not lacks_context:
            return None
        return stand_ins(terms_of(model)).get("kv_usage_ratio")

    @cached_property
    def workload(self) -> Workload | None:
        """The mean request the models were trained on; null if the files do not state it."""
        return next((facts.workload for facts in self._facts if facts.workload), None)

    @cached_property
    def traffic(self) -> Formulas:
        """Formulas of the prompts of other requests, for the mean request; see `workload.traffic_formulas`."""
        return Formulas.parse(traffic_formulas(self.workload), where="traffic")

    def knows_queue(self, model: Model) -> bool:
        """Return whether the number of waiting requests changes a prediction of this model."""
        compiled = self.compiled(model)
        return "queue" in compiled.formulas.used(term.feature for term in terms_of(model))

    def setting(self, name: str) -> object:
        """Return any setting of the server as the files have it."""
        return next((facts.settings.get(name) for facts in self._facts), None)

    def known_settings(self, compiled: CompiledModel) -> dict[str, float | None]:
        """Return the settings of the server; an unknown one is left out."""
        # A null would override the model's own formula of that name.
        return {n: v for n, v in self.server.items() if v is not None or n not in compiled.formulas.nodes}

    def read(self, models: Iterable[Model]) -> set[str]:
        """Return the names that change a prediction of these models, or its notes."""
        return set[str]().union(*(self.compiled(model).read for model in models))

    def require_read(
        self, features: Iterable[str], models: Iterable[Model], also: Iterable[str] = ()
    ) -> None:
        """Refuse features that no model uses.

        Args:
            features: Names of the given features.
            models: The models that predict.
            also: Other names that are used.

        Raises:
            UsageError: No model uses one of the features.
        """
        models = list(models)
        read = self.read(models).union(also)
        if unread := [name for name in features if name not in read]:
            terms = dict.fromkeys(name for model in models for name in self.compiled(model).features)
            raise UsageError(
                f"no model that predicts this reads {unread[0][:MAX_NAME_SHOWN]}",
                where="features",
                hint=did_you_mean(unread[0], read) or f"their features are {', '.join(terms)}",
            )

    def range_of(self, latency: str) -> tuple[float | None, float | None]:
        """Return the ratios of both ends of a latency's published range to the prediction; null without one."""
        published = self.ranges.get(latency)
        return (None, None) if published is None else (published.low_ratio, published.high_ratio)

    def input_ranges(self, of: Literal["step", "request"]) -> Mapping[str, tuple[float, float]]:
        """Return the smallest and largest value of each input in training; empty if the files do not state them."""
        return next((facts.input_ranges.get(of, {}) for facts in self._facts if facts.input_ranges), {})

    def beyond(
        self, of: Literal["step", "request"], given: Mapping[str, float | None], named: Collection[str] = ()
    ) -> list[str]:
        """Name the inputs outside their training range, except those whose column is in `named`."""
        columns = {STEP_COLUMNS.get(column) for column in named}
        return [
            f"{name} {value:,g} is outside {ends[0]:,g} to {ends[1]:,g}, the range of {of}s in training"
            for name, ends in self.input_ranges(of).items()
            if (value := given.get(name)) is not None
            and not ends[0] <= value <= ends[1]
            and name not in columns
        ]

    def limit(self, setting: str) -> float | None:
        """Return a numeric setting of the server, null if unknown."""
        value = self.setting(setting)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def inputs_without_effect(
        self,
        stated: Mapping[str, float | None],
        models: Iterable[Model],
        features: Mapping[str, float],
        available: Collection[str],
    ) -> list[str]:
        """Name the inputs that do not change the prediction, and the features missing to check their training range.

        Args:
            stated: Inputs and their values; null or 0 if not given.
            models: The models that predict.
            features: Features that are given directly.
            available: Names of all values that a formula may use.
        """
        compiled = [self.compiled(model) for model in models]
        # Features with a training range but no term: the names each is computed from, and the missing ones among them.
        ranges = [
            (each.formulas.used([name], features), each.formulas.missing([name], available))
            for each in compiled
            for name in each.unmodeled
        ]
        matters = set[str]().union(
            *(each.formulas.used(each.features, features) for each in compiled),
            *(used for used, missing in ranges if not missing),
        )
        texts, names = [], ", ".join(each.model.name for each in compiled)
        for name, value in stated.items():
            if value and name not in matters:
                missing = sorted({m for used, without in ranges if name in used for m in without})
                also = f"; with {', '.join(missing)} as a feature, its range is checked" if missing else ""
                texts.append(f"{name} {value:,.0f} changes nothing: no term of {names} depends on it{also}")
        return texts

    def predict(
        self, stated: Mapping[str, float | None], features: Mapping[str, float], *, stand_in: bool = False
    ) -> Prediction:
        """Predict a step's time; see `step`."""
        given = self._step_values(stated, features)
        return predict_row(self.compiled(self.step_model), given, stand_in=stand_in)

    def _step_values(
        self, stated: Mapping[str, float | None], features: Mapping[str, float]
    ) -> dict[str, float | None]:
        settings = self.known_settings(self.compiled(self.step_model))
        usual = {} if self._knows_usage(features) else {"kv_usage_ratio": self.usual_kv_usage}
        return {**settings, **step_inputs(stated), **usual, **features}

    def _knows_usage(self, features: Mapping[str, float]) -> bool:
        return self.usual_kv_usage is None or "num_gpu_blocks" in features or "kv_usage_ratio" in features

    def step(self, stated: Mapping[str, float | None], features: Mapping[str, float]) -> StepPrediction:
        """Predict a step.

        Args:
            stated: Values of some of `workload.STEP_INPUTS`.
            features: Columns or features by name; they win over what follows from the rest.

        Raises:
            DataError: The model of step times could not be fitted.
            UsageError: No such model, a required feature is missing, an unused feature was passed, or the
                server does not run such a step.
        """
        model = self.step_model
        self.require_read(features, [model])
        given = {**dict.fromkeys(STEP_INPUTS, 0.0), **stated}
        require_possible("step", {**given, **features}, self.limit)
        prediction = self.predict(stated, features)
        # A model of table columns may be used without a batch: inputs that are 0 are not checked.
        inputs = {name: value for name, value in stated.items() if value}
        beyond = self.beyond("step", inputs, [each.feature for each in prediction.outside])
        available = [n for n, value in self._step_values(stated, features).items() if value is not None]
        described = {name: stated.get(name) for name in ("batch", "context", "prefill", "waiting")}
        assumed = [*prediction.assumed, *self.inputs_without_effect(described, [model], features, available)]
        compiled = self.compiled(model)
        needs_context = "context" in compiled.formulas.used(compiled.features, features)
        if not self._knows_usage(features):
            assumed.append(f"kv_usage_ratio {self.usual_kv_usage:.3g}: the middle of its training range")
        elif described["batch"] and not described["context"] and needs_context:
            assumed.append("context 0: not given, as if the batch had no tokens in its caches")
        # Errors were not measured outside the training range.
        interval = PredictedDuration(prediction.interval.value_us) if beyond else prediction.interval
        return StepPrediction(
            self.deployment_id,
            model.name,
            interval,
            tuple(prediction.features.items()),
            tuple(assumed),
            (*beyond, *in_lines(prediction.outside)),
        )
