"""Compose the latencies of a request from the models of a deployment: written once, for one request and for many.

A value is a number, or a numpy array with one number per request. Python's operators are the same for both;
`Arithmetic` has the few operations that differ. `OneRequest` predicts steps and overheads of one request in
plain Python, `predict_frames.ManyRequests` those of a frame; `RequestComposer` combines them.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from tracefit.coefficients.predict import (
    DeploymentModels,
    Outside,
    PredictedDuration,
    Prediction,
    in_lines,
    predict_row,
)
from tracefit.coefficients.workload import (
    OTHERS,
    REQUEST_INPUTS,
    RUNNING,
    STEP_INPUTS,
    others_like,
    prompt_step_groups,
    require_possible,
    running_like,
)
from tracefit.errors import UsageError
from tracefit.features import targets
from tracefit.options import BatchOption, named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.coefficients.model import Workload


Value = Any
"""A number, or an array of one number per request."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operations on values that numbers and arrays have under different names."""

    least: Callable[[Value, Value], Value]
    most: Callable[[Value, Value], Value]
    where: Callable[[Value, Value, Value], Value]
    """The second value if the first, a condition, holds, else the third."""
    ratio: Callable[[Value, Value], Value]
    """The first value divided by the second; 0 if the second is 0."""
    is_known: Callable[[Value], Value]
    filled: Callable[[Value, Value], Value]
    """The first value if known, else the second."""
    anywhere: Callable[[Value], bool]
    """Whether a condition holds for any request."""


NUMBERS = Arithmetic(
    least=min,
    most=max,
    where=lambda condition, value, otherwise: value if condition else otherwise,
    ratio=lambda part, whole: part / whole if whole else 0.0,
    is_known=lambda value: value is not None,
    filled=lambda value, otherwise: otherwise if value is None else value,
    anywhere=bool,
)
"""The arithmetic of one request; null is unknown."""


def complete(
    a: Arithmetic,
    given: Mapping[str, Value],
    server: Mapping[str, float | None],
    mean: Workload | None,
) -> dict[str, Value]:
    """Return `REQUEST_INPUTS`, `OTHERS`, `RUNNING`, `steps_of_others` and `capacity` of described requests.

    `capacity` is the number of requests that slots and KV blocks have room for, NaN if neither is known. Then
    `batch` is NaN too, if requests wait and the number of running ones is not given.

    Args:
        a: Arithmetic of the values.
        given: Values of `REQUEST_INPUTS` and of some of `OTHERS`.
        server: Settings by name, see `DeploymentModels.server`.
        mean: The mean request of the training; the other requests are like it, or without it like the request itself.
    """
    prompt, output = given["prompt_tokens"], given["output_tokens"]
    queue, cached = a.filled(given["queue"], 0.0), a.filled(given["cached"], 0.0)
    like = others_like(mean) or dict(zip(OTHERS, (prompt, cached, output, output), strict=True))
    others = {name: a.filled(given.get(name), like[name]) for name in OTHERS}
    halfway = others["others_output"] / 2
    ends = (others["others_prompt"] + halfway, a.most(others["others_max"] - halfway, 0.0))
    running = dict(zip(RUNNING, ends, strict=True))
    if (measured := running_like(mean)) is not None:
        # Given facts of the other requests replace those of the training.
        stated = reduce(operator.or_, (a.is_known(given.get(name)) for name in OTHERS))
        running = {name: a.where(stated, running[name], value) for name, value in measured.items()}
    context = a.filled(given["context"], running["others_context"])
    capacity = _capacity(a, context, server)
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "queue": queue,
        "batch": a.filled(given["batch"], a.where(queue == 0, 0.0, capacity)),
        "capacity": capacity,
        "context": context,
        "cached": cached,
        **others,
        **running,
        "steps_of_others": a.filled(
            given.get("others_output"), math.inf if mean is None else others["others_output"]
        ),
    }


def _capacity(a: Arithmetic, context: Value, server: Mapping[str, float | None]) -> Value:
    """Return the number of requests that slots and KV blocks have room for; NaN if neither is known."""
    slots, blocks, size = (server.get(n) for n in ("max_num_seqs", "num_gpu_blocks", "block_size"))
    if blocks is None or size is None:
        return math.nan if slots is None else max(slots, 1.0)
    by_blocks = (blocks - 1) // (context / size + 0.5)
    return a.most(by_blocks if slots is None else a.least(by_blocks, slots), 1.0)


# -- composing -------------------------------------------------------------------------------------------


class RequestComposer(ABC):
    """Composes the durations of one request, or of many."""

    def __init__(self, models: DeploymentModels, arithmetic: Arithmetic, inputs: Mapping[str, Value]) -> None:
        """Take the completed inputs, and compute how the prompts of other requests change the steps."""
        a, server = arithmetic, models.server
        slots, limit = server["max_num_seqs"], server["max_num_batched_tokens"]
        batch = inputs["batch"]
        # If the batch is full, one request has to leave before this one runs.
        others = batch if slots is None else a.most(a.least(batch, slots - 1), 0.0)
        is_cut = limit is not None and models.setting("enable_chunked_prefill") is not False
        budget = a.most((limit or 0.0) - others, 1.0) if is_cut else math.inf
        self.models, self.arithmetic = models, arithmetic
        self.inputs: dict[str, Value] = {**inputs, "others": others, "budget": budget}
        self.traffic = self._evaluate_traffic()

    @abstractmethod
    def _evaluate_traffic(self) -> dict[str, Value]:
        """Return the values of `DeploymentModels.traffic`."""

    @abstractmethod
    def _step(self, stated: Mapping[str, Value]) -> Value:
        """Predict a step from some of `STEP_INPUTS`."""

    @abstractmethod
    def _prefill(self) -> Value:
        """Add up the steps of the prompt (`prompt_step`), in chunks of the token budget that running requests leave."""

    @abstractmethod
    def _overhead(
        self, target: targets.Target, inputs: Mapping[str, Value], *, noted: bool = True
    ) -> Value | None:
        """Predict a duration around the steps, null without a model; if `noted`, keep its notes."""

    @abstractmethod
    def _beyond(self, name: str, where: Value, text: Callable[[], str]) -> None:
        """Note for the requests that fulfil the condition `where` that an input is outside the models' range."""

    def prompt_step(self, k: Value) -> Value:
        """Predict step `k`, from 0, of the prompt; prompts of others that arrive meanwhile share it."""
        a, inputs, budget = self.arithmetic, self.inputs, self.inputs["budget"]
        # Without a budget there is one step; 0 times infinity would be NaN.
        done = a.where(k == 0, 0.0, budget) * k
        own = a.least(budget, inputs["prompt_tokens"] - inputs["cached"] - done)
        return self._step(
            {
                "batch": inputs["others"],
                "context": inputs["context"],
                "prefill": a.least(own + self.traffic["prompt_tokens_per_step"], budget),
                "prefill_reqs": 1 + self.traffic["prompts_per_step"],
                "prefill_done": inputs["cached"] + done,
            }
        )

    def compose(self) -> dict[str, Value]:
        """Predict the steps and overheads of the request, and add them up: name to us.

        An overhead without a model is null, and so are durations that include it.
        """
        a, inputs = self.arithmetic, self.inputs
        batch, others, context = inputs["batch"], inputs["others"], inputs["context"]
        busy, mean, current = batch > 0, 0.0, None
        if a.anywhere(busy):
            mean, current = self._cycle(batch, context)
        # The request decodes with the others, halfway through its output on average.
        own = inputs["prompt_tokens"] + inputs["output_tokens"] / 2
        itl, _ = self._cycle(others + 1, (others * context + own) / (others + 1))
        prefill = self._prefill()
        if self.models.setting("async_scheduling") is True:
            # Scheduling runs a step ahead: the prompt waits one cycle more.
            prefill = prefill + a.where(busy, mean, 0.0)
        arrives = {**inputs, "decode_cycle_us": current}
        # It departs from the batch it decoded in.
        leaves = {**arrives, "batch": others + 1}
        before = {t.name: self._before(t, arrives, itl) for t in targets.parts_of("ttft")}
        after = {t.name: self._overhead(t, leaves) for t in targets.parts_of("client")}
        waits: list[Value] = list(before.values())
        ttft = None if any(wait is None for wait in waits) else sum(waits) + prefill
        # The first output token comes with the end of the prompt.
        e2e = None if ttft is None else ttft + itl * (inputs["output_tokens"] - 1)
        return {**before, "prefill": prefill, "itl": itl, **after, "ttft": ttft, "e2e": e2e}

    def _before(self, target: targets.Target, arrives: Mapping[str, Value], cycle: Value) -> Value | None:
        """Predict a duration before the first step, at least as long as with an empty queue.

        A model that was trained without a queue has no term for it. The wait is then that for the requests
        that have to leave before this one runs: outputs ahead * step time / slots, with departures at the
        rate of the mean output.
        """
        a, inputs = self.arithmetic, self.inputs
        queue, batch, slots = inputs["queue"], inputs["batch"], self.models.server["max_num_seqs"]
        predicted = self._overhead(target, arrives)
        if predicted is None:
            return None
        if target.state == "queue" and not self.models.knows_queue(self.models.models[target.model]):
            # Requests wait for blocks too; if none waits, only full slots are certain.
            capacity = a.where(inputs["capacity"] > 0, inputs["capacity"], batch)
            room = a.where(queue > 0, capacity, math.inf if slots is None else slots)
            leaving = a.most(queue + 1 - a.most(room - batch, 0.0), 0.0)
            wait = leaving * inputs["others_output"] * cycle / a.most(room, 1.0)
            self._beyond(
                "queue",
                leaving > 0,
                lambda: (
                    f"{target.model}: nothing in it depends on the queue, training shows no wait behind one; "
                    f"{wait / 1e3:,.0f} ms are added for {leaving:,.0f} of the others to leave: outputs ahead * step time / slots"
                ),
            )
            return predicted + wait
        if not a.anywhere(queue > 0):
            return predicted
        return a.most(predicted, self._overhead(target, {**arrives, "queue": 0.0 * queue}, noted=False))

    def _cycle(self, decoding: Value, context: Value) -> tuple[Value, Value]:
        """Return the mean time of a step, with prompts of others, and of the step in progress at an arrival."""
        a, traffic = self.arithmetic, self.traffic
        step = {"batch": decoding, "context": context}
        decode = self._step(step)
        share = traffic["prompt_step_share"]
        if not a.anywhere(share > 0):
            return decode, decode

        def with_prompts(group: str, suffix: object = "") -> Value:
            tokens, reqs = (traffic[f"{group}_{what}{suffix}"] for what in ("tokens", "reqs"))
            return self._step({**step, "prefill": tokens, "prefill_reqs": reqs})

        groups = range(prompt_step_groups(self.models.workload))
        mixed = [with_prompts("prompt_step", f"_{k}") for k in groups]
        mean = (1 - share) * decode + share * sum(mixed) / len(mixed)
        # An arrival falls into a step with probability proportional to its time: E[c^2] / E[c], over steps
        # with the mean prompt and without.
        of_mean = traffic["mean_prompt_share"]
        with_mean = with_prompts("mean_prompt")
        current = a.ratio(
            (1 - of_mean) * decode**2 + of_mean * with_mean**2, (1 - of_mean) * decode + of_mean * with_mean
        )
        return a.where(share > 0, mean, decode), a.where(share > 0, current, decode)


# -- one request -----------------------------------------------------------------------------------------

MAX_PREFILL_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class RequestPrediction:
    """A predicted request. Durations without a model in the files are null, and so are those that include them.

    Attributes:
        deployment_id: The deployment of the models.
        overheads: Durations around the steps, by name of their target, in the order a request goes through them.
        prefill: First SCHEDULED to FIRST_TOKEN.
        itl: Mean time of a decode step, including steps with prompts of others.
        ttft: The overheads before the first step + prefill.
        e2e: ttft + (output tokens - 1) * itl, ARRIVED to FINISHED.
        prefill_steps: Steps the prompt takes.
        assumed: Assumptions for inputs that were not given.
        out_of_range: Inputs outside the training range.
    """

    deployment_id: str | None
    overheads: dict[str, PredictedDuration | None]
    prefill: PredictedDuration
    itl: PredictedDuration
    ttft: PredictedDuration | None
    e2e: PredictedDuration | None
    prefill_steps: int
    assumed: tuple[str, ...] = ()
    out_of_range: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    """How well each range of a composed latency covers held-out requests, or why the range is missing."""


class OneRequest(RequestComposer):
    """One prediction of a request, and what it collects on the way: assumptions, and inputs out of range."""

    def __init__(
        self, models: DeploymentModels, stated: Mapping[str, float | None], features: Mapping[str, float]
    ) -> None:
        """Complete the description.

        Args:
            models: Models of one deployment.
            stated: Values of `REQUEST_INPUTS`; null where nothing is stated.
            features: Columns or features by name, those of `OTHERS` too; they win over what follows from the rest.

        Raises:
            UsageError: The server would refuse the request, or the number of running requests is unknown.
        """
        self.stated, self.features = stated, features
        self.assumed, self.out_of_range, self.outside = list[str](), list[str](), list[Outside]()
        self.overheads: dict[str, PredictedDuration | None] = {}
        self.prefill_steps = 1
        super().__init__(models, NUMBERS, self._completed(models))

    def _completed(self, models: DeploymentModels) -> dict[str, float]:
        stated, features, mean = self.stated, self.features, models.workload
        queue = stated["queue"] or 0.0
        around = {target.model for target in targets.around_steps()}
        read_by = [models.step_model, *(m for name, m in models.models.items() if name in around)]
        models.require_read(features, read_by, OTHERS)
        require_possible("request", {**stated, **features}, models.limit)
        others = {name: value for name, value in features.items() if name in OTHERS}
        inputs = complete(NUMBERS, {**stated, **others}, models.server, mean)
        if stated["batch"] is None and math.isnan(inputs["batch"]):
            raise UsageError(
                "the number of running requests is unknown while requests wait",
                where="batch",
                hint=f"give {named(BatchOption)}",
            )
        settings = (name for name, value in models.server.items() if value is not None)
        names = {*inputs, *STEP_INPUTS, *features, *settings}
        given = {"context": stated["context"]}
        self.assumed += models.inputs_without_effect(given, read_by, features, names)
        batch = inputs["batch"]
        # An empty engine has no cached tokens.
        self.out_of_range += models.beyond(
            "request", {n: inputs[n] for n in REQUEST_INPUTS if n != "context" or batch}
        )
        if stated["batch"] is None:
            what = "nothing else runs" if queue == 0 else "as many as slots and KV blocks hold"
            self.assumed.append(f"batch {batch:.0f}: {what}")
        if batch or queue:
            like = "this request" if mean is None else f"the mean of {mean.requests:,} requests trained on"
            lengths = f"prompt {inputs['others_prompt']:.0f}, output {inputs['others_output']:.0f}"
            steady = math.isfinite(inputs["steps_of_others"])
            arrive = "as many arrive as finish" if steady else "none of them arrives while it runs"
            self.assumed.append(f"the others are like {like}: {lengths}; {arrive}")
        if stated["context"] is None and batch:
            measured = running_like(mean) is not None and not others
            where = (
                "the mean of running requests in training" if measured else "halfway through their outputs"
            )
            self.assumed.append(f"context {inputs['context']:.0f} of the others: {where}")
        return inputs

    def predict(self) -> RequestPrediction:
        """Compose the prediction."""
        durations, queue = self.compose(), self.stated["queue"]
        if self.models.setting("async_scheduling") is True and self.inputs["batch"]:
            self.assumed.append("scheduling runs a step ahead: the prompt waits one cycle more")
        for target in targets.parts_of("ttft"):
            wait, value = self.overheads[target.name], durations[target.name]
            # Its errors were measured with the true work ahead; here that work is assumed.
            if wait and ((queue and target.state == "queue") or value != wait.value_us):
                self.overheads[target.name] = PredictedDuration(value)
        ranges = {name: self._range_of(name) for name in targets.LATENCIES}

        def latency(name: str) -> PredictedDuration:
            value = durations[name]
            return PredictedDuration(value, *(ratio * value for ratio in ranges[name][0]))

        return RequestPrediction(
            deployment_id=self.models.deployment_id,
            overheads=self.overheads,
            prefill=PredictedDuration(durations["prefill"]),
            itl=latency("itl"),
            ttft=None if durations["ttft"] is None else latency("ttft"),
            e2e=None if durations["e2e"] is None else latency("e2e"),
            prefill_steps=self.prefill_steps,
            assumed=tuple(dict.fromkeys(self.assumed)),
            out_of_range=(*self.out_of_range, *in_lines(self.outside)),
            ranges=tuple(f"{targets.LATENCIES[name]}: {text}" for name, (_, text) in ranges.items()),
        )

    def _evaluate_traffic(self) -> dict[str, float]:
        formulas = self.models.traffic
        values = formulas.row(self.inputs, formulas.nodes)
        return {name: values[name] or 0.0 for name in formulas.nodes}

    def _step(self, stated: Mapping[str, float]) -> float:
        prediction = self.models.predict(stated, self.features, stand_in=True)
        self._note(prediction)
        return prediction.interval.value_us

    def _prefill(self) -> float:
        left, budget = self.inputs["prompt_tokens"] - self.inputs["cached"], self.inputs["budget"]
        self.prefill_steps = math.ceil(left / budget) if budget < math.inf else 1
        if self.prefill_steps > MAX_PREFILL_STEPS:
            raise UsageError(f"the prompt takes more than {MAX_PREFILL_STEPS:,} steps", where="prompt")
        return float(sum(map(self.prompt_step, range(self.prefill_steps))))

    def _overhead(
        self, target: targets.Target, inputs: Mapping[str, float | None], *, noted: bool = True
    ) -> float | None:
        model = self.models.models.get(target.model)
        if model is None:
            self.assumed.append(f"no model {target.model}: left out with what needs it")
            self.overheads[target.name] = None
            return None
        compiled = self.models.compiled(model)
        given = {**self.models.known_settings(compiled), **inputs, **self.features}
        prediction = predict_row(compiled, given, stand_in=True, cycle_us=inputs["decode_cycle_us"])
        if noted:
            self._note(prediction)
            self.overheads[target.name] = prediction.interval
        return prediction.interval.value_us

    def _beyond(self, name: str, where: bool, text: Callable[[], str]) -> None:  # noqa: ARG002 - the text has it
        if where:
            self.out_of_range.append(text())

    def _note(self, prediction: Prediction) -> None:
        self.assumed += prediction.assumed
        self.outside += prediction.outside

    def _range_of(self, latency: str) -> tuple[tuple[float, ...], str]:
        """Return the published range of a composed latency as ratios to it, empty without one, and a note on it."""
        published = self.models.ranges.get(latency)
        if published is None:
            return (), "no range, because the files have no ranges of requests"
        is_outside = self.out_of_range or self.outside
        reason = "the input is outside the training range" if is_outside else published.reason
        if published.low_ratio is not None and published.high_ratio is not None and reason is None:
            # Files of an earlier tracefit count every held-out request.
            requests = published.requests_held_out or published.holdout.n
            ends = (published.low_ratio, published.high_ratio)
            return ends, f"{published.coverage_pct:.0f} % of {requests} held-out requests lie in it"
        errors = published.holdout
        if errors.mdape_pct is None or errors.p90_ape_pct is None:
            return (), f"no range, {reason}"
        return (), (
            f"no range, {reason}; predictions of {errors.n} held-out requests were off by {errors.mdape_pct:.0f} % in the "
            f"median, nine of ten by less than {errors.p90_ape_pct:.0f} %"
        )
