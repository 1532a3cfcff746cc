"""The models of one deployment by name, with its settings and its mean request, and predictions of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.models.amounts import number
from tracefit.models.describe import (
    REQUEST_VALUES,
    STEP_INPUTS,
    STEP_VALUES,
    require_possible,
    step_inputs,
    traffic_formulas,
)
from tracefit.models.evaluate import CompiledModel, middles
from tracefit.models.formulas import Formulas
from tracefit.models.predict import PredictedDuration, in_lines, predict_row
from tracefit.models.schema import STEP_MODELS, LinearModel, terms_of
from tracefit.models.targets import STEP_TARGETS, is_step_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefit.models.amounts import Amount
    from tracefit.models.formulas import Amounts
    from tracefit.models.schema import DeploymentFacts, Model, NotFitted, RequestRange, Workload

MAX_NAME_SHOWN = 64

_SPAN_DEFINITIONS = {target.definition for target in STEP_TARGETS}


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
            columns = STEP_VALUES if is_step_model(model.name) else REQUEST_VALUES
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
        """KV usage of a described step, where a recording stated the steps without their context, and the KV blocks are
        unknown.
        """
        model = self.step_model
        is_recorded = model.target is not None and model.target.definition not in _SPAN_DEFINITIONS
        left_out = model.features_left_out if isinstance(model, LinearModel) else ()
        lacks_context = any(each.feature == "context_tokens" and not each.training_range for each in left_out)
        if self.server["num_gpu_blocks"] or not (is_recorded and lacks_context):
            return None
        return middles(terms_of(model)).get("kv_usage_ratio")

    @cached_property
    def workload(self) -> Workload | None:
        """The mean request the models were trained on; null if the files do not state it."""
        return next((facts.workload for facts in self._facts if facts.workload), None)

    @cached_property
    def traffic(self) -> Formulas:
        """Formulas of the prompts of other requests, for the mean request; see `describe.traffic_formulas`."""
        return Formulas.parse(traffic_formulas(self.workload), where="traffic")

    def knows_queue(self, model: Model) -> bool:
        """Return whether the number of waiting requests changes a prediction of this model."""
        compiled = self.compiled(model)
        return "queue" in compiled.formulas.used(term.feature for term in terms_of(model))

    @property
    def gpu(self) -> str | None:
        """The GPU of the server; null if the files do not state it."""
        return next((facts.gpu for facts in self._facts if facts.gpu), None)

    def setting(self, name: str) -> object:
        """Return any setting of the server as the files have it."""
        return next((facts.settings.get(name) for facts in self._facts), None)

    def known_settings(self, compiled: CompiledModel) -> dict[str, float]:
        """Return the settings of the server; an unknown one is NaN, or left out where the model has a formula for
        it.
        """
        # Unknown, it would override the model's own formula of that name.
        return {
            n: math.nan if v is None else v
            for n, v in self.server.items()
            if v is not None or n not in compiled.formulas.nodes
        }

    def read(self, models: Iterable[Model]) -> set[str]:
        """Return the names that change a prediction of these models, or its notes."""
        return set[str]().union(*(self.compiled(model).read for model in models))

    def require_read(self, features: Iterable[str], models: Iterable[Model], also: Iterable[str] = ()) -> None:
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
        columns = {STEP_VALUES.get(column) for column in named}
        return [
            f"{name} {value:,g} is outside {ends[0]:,g} to {ends[1]:,g}, the range of {of}s in training"
            for name, ends in self.input_ranges(of).items()
            if (value := given.get(name)) is not None and not ends[0] <= value <= ends[1] and name not in columns
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

    def step_values(self, described: Amounts, features: Amounts) -> dict[str, Amount]:
        """Return what a model of step times is computed from: settings, the described step, and features, which win
        over them.

        Args:
            described: Amounts of some of `describe.STEP_INPUTS`.
            features: Columns or features by name.
        """
        settings = self.known_settings(self.compiled(self.step_model))
        usual = {} if self.knows_usage(features) else {"kv_usage_ratio": self.usual_kv_usage}
        return {**settings, **step_inputs(described), **usual, **features}

    def knows_usage(self, given: Collection[str]) -> bool:
        """Return whether the KV usage of a step follows from what is given, or from the server."""
        return self.usual_kv_usage is None or "num_gpu_blocks" in given or "kv_usage_ratio" in given

    def step(self, stated: Mapping[str, float | None], features: Mapping[str, float]) -> StepPrediction:
        """Predict a step.

        Args:
            stated: Values of some of `describe.STEP_INPUTS`.
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
        described = {name: number(name, value) for name, value in stated.items() if value is not None}
        values = self.step_values(described, {name: number(name, v) for name, v in features.items()})
        compiled = self.compiled(model)
        prediction = predict_row(compiled, values)
        # A model of table columns may be used without a batch: inputs that are 0 are not checked.
        inputs = {name: value for name, value in stated.items() if value}
        beyond = self.beyond("step", inputs, [each.feature for each in prediction.outside])
        available = [name for name, value in values.items() if not math.isnan(value)]
        checked = {name: stated.get(name) for name in ("batch", "context", "prefill", "waiting")}
        assumed = [*prediction.assumed, *self.inputs_without_effect(checked, [model], features, available)]
        needs_context = "context" in compiled.formulas.used(compiled.features, features)
        if not self.knows_usage(features):
            assumed.append(f"kv_usage_ratio {self.usual_kv_usage:.3g}: the middle of its training range")
        elif checked["batch"] and not checked["context"] and needs_context:
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
