"""Compose the latencies of a request from the models of a deployment: written once, for one request and for many.

Every quantity is an amount (`amounts`): a float, or an array of one per request. `RequestComposer` predicts steps and
overheads and adds them up, and keeps what lies outside the training ranges; `OneRequest` words it, `frames` makes
columns of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tracefit.errors import UsageError
from tracefit.models import targets
from tracefit.models.amounts import (
    any_of,
    anywhere,
    filled,
    is_known,
    largest,
    number,
    quotient,
    smallest,
    where,
)
from tracefit.models.describe import (
    OTHERS,
    REQUEST_INPUTS,
    RUNNING,
    STEP_INPUTS,
    others_like,
    prompt_step_groups,
    require_possible,
    running_like,
)
from tracefit.models.evaluate import expected_at_boundary
from tracefit.models.predict import (
    IDLE_ENGINE,
    PredictedDuration,
    assumed,
    group_of,
    in_lines,
    interval_about,
    outside_training,
    p90_ape_pct,
    require_amount,
)
from tracefit.models.schema import BoundaryModel
from tracefit.options import BatchOption, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracefit.models.amounts import Amount, Truth
    from tracefit.models.deployment import DeploymentModels
    from tracefit.models.evaluate import CompiledModel, Evaluated
    from tracefit.models.formulas import Amounts
    from tracefit.models.predict import Outside
    from tracefit.models.schema import LinearForm, Workload


def complete(given: Amounts, server: Mapping[str, float | None], mean: Workload | None) -> dict[str, Amount]:
    """Return `REQUEST_INPUTS`, `OTHERS`, `RUNNING`, `steps_of_others` and `capacity` of described requests.

    `capacity` is the number of requests that slots and KV blocks have room for, unknown if neither is known. Then
    `batch` is unknown too, if requests wait and the number of running ones is not given.

    Args:
        given: Amounts of `REQUEST_INPUTS` and of some of `OTHERS`.
        server: Settings by name, see `DeploymentModels.server`.
        mean: The mean request of the training; the other requests are like it, or without it like the request itself.
    """
    prompt, output = given["prompt_tokens"], given["output_tokens"]
    queue, cached = filled(given["queue"], 0.0), filled(given["cached"], 0.0)
    like = others_like(mean) or dict(zip(OTHERS, (prompt, cached, output, output), strict=True))
    others = {name: filled(given.get(name, math.nan), like[name]) for name in OTHERS}
    halfway = others["others_output"] / 2
    ends = (others["others_prompt"] + halfway, largest(others["others_max"] - halfway, 0.0))
    running = dict(zip(RUNNING, ends, strict=True))
    if (measured := running_like(mean)) is not None:
        # Given facts of the other requests replace those of the training.
        stated = any_of([is_known(given.get(name, math.nan)) for name in OTHERS])
        running = {name: where(stated, running[name], value) for name, value in measured.items()}
    context = filled(given["context"], running["others_context"])
    capacity = _capacity(context, server)
    # Without a mean request none arrives unless its output is given.
    steady = others["others_output"] if mean is not None else math.inf
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "queue": queue,
        "batch": filled(given["batch"], where(queue == 0, 0.0, capacity)),
        "capacity": capacity,
        "context": context,
        "cached": cached,
        **others,
        **running,
        "steps_of_others": filled(given.get("others_output", math.nan), steady),
    }


def _capacity(context: Amount, server: Mapping[str, float | None]) -> Amount:
    """Return the number of requests that slots and KV blocks have room for; unknown if neither is known."""
    slots, blocks, size = (server.get(n) for n in ("max_num_seqs", "num_gpu_blocks", "block_size"))
    if blocks is None or size is None:
        return math.nan if slots is None else max(slots, 1.0)
    by_blocks = (blocks - 1) // (context / size + 0.5)
    return largest(by_blocks if slots is None else smallest(by_blocks, slots), 1.0)


# -- composing -------------------------------------------------------------------------------------------

MAX_PREFILL_STEPS = 5_000_000
"""Steps of all prompts together."""

MAX_PREFILL_STEPS_OF_ONE = 10_000


class Overhead(NamedTuple):
    """A duration around the steps: the model evaluated, its value, and the limits that follow from a step boundary."""

    compiled: CompiledModel
    found: Evaluated
    value_us: Amount
    limits_us: tuple[Amount, Amount] | None = None


class AddedWait(NamedTuple):
    """A wait in the queue that the models do not know: for requests that have to leave, and for which rows."""

    model: str
    rows: Truth
    wait_us: Amount
    leaving: Amount

    def __str__(self) -> str:
        """Say it of one request."""
        return (
            f"{self.model}: nothing in it depends on the queue, training shows no wait behind one; "
            f"{self.wait_us / 1e3:,.0f} ms are added for {self.leaving:,.0f} of the others to leave: outputs ahead * "
            "step time / slots"
        )


class RequestComposer:
    """Composes the durations of one request, or of many, and keeps what a reader has to know of them."""

    def __init__(self, models: DeploymentModels, inputs: Amounts, features: Amounts) -> None:
        """Take the completed inputs, and compute how the prompts of other requests change the steps.

        Args:
            models: Models of one deployment.
            inputs: Completed inputs, see `complete`.
            features: Columns or features by name; they win over what follows from the inputs.
        """
        server = models.server
        slots, limit = server["max_num_seqs"], server["max_num_batched_tokens"]
        batch = inputs["batch"]
        # If the batch is full, one request has to leave before this one runs.
        others = batch if slots is None else largest(smallest(batch, slots - 1), 0.0)
        is_cut = limit is not None and models.setting("enable_chunked_prefill") is not False
        budget = largest((limit or 0.0) - others, 1.0) if is_cut else math.inf
        self.models, self.features = models, features
        self._is_one = isinstance(inputs["prompt_tokens"], float)
        self.inputs: dict[str, Amount] = {**inputs, "others": others, "budget": budget}
        self.traffic = {
            name: filled(value, 0.0)
            for name, value in models.traffic.values(self.inputs, models.traffic.nodes).items()
            if name in models.traffic.nodes
        }
        self.outside: list[Outside] = []
        self.assumed: list[str] = []
        self.overheads: dict[str, Overhead] = {}
        self.added_wait: AddedWait | None = None
        self.prefill_steps = 1

    def compose(self) -> dict[str, Amount]:
        """Predict the steps and overheads of the request, and add them up: name to us.

        An overhead without a model is null, and so are durations that include it.
        """
        inputs = self.inputs
        batch, others, context = inputs["batch"], inputs["others"], inputs["context"]
        busy, mean, current = batch > 0, 0.0, math.nan
        if anywhere(busy):
            mean, current = self._cycle(batch, context)
        # The request decodes with the others, halfway through its output on average.
        own = inputs["prompt_tokens"] + inputs["output_tokens"] / 2
        itl, _ = self._cycle(others + 1, (others * context + own) / (others + 1))
        prefill = self._prefill()
        if self.models.setting("async_scheduling") is True:
            # Scheduling runs a step ahead: the prompt waits one cycle more.
            prefill = prefill + where(busy, mean, 0.0)
        # No step runs in an idle engine: values computed from its time are unknown.
        arrives = {**inputs, "decode_cycle_us": where(busy, current, math.nan)}
        # It departs from the batch it decoded in.
        leaves = {**arrives, "batch": others + 1}
        before = {t.name: self._before(t, arrives, itl) for t in targets.parts_of("ttft")}
        after = {t.name: self._overhead(t, leaves) for t in targets.parts_of("client")}
        waits: list[Amount] = list(before.values())
        ttft = None if any(wait is None for wait in waits) else sum(waits) + prefill
        # The first output token comes with the end of the prompt.
        e2e = None if ttft is None else ttft + itl * (inputs["output_tokens"] - 1)
        return {**before, "prefill": prefill, "itl": itl, **after, "ttft": ttft, "e2e": e2e}

    def _prefill(self) -> Amount:
        """Add up the steps of the prompt, in chunks of the token budget that running requests leave."""
        inputs = self.inputs
        left = inputs["prompt_tokens"] - inputs["cached"]
        if self._is_one:
            self.prefill_steps = max(math.ceil(left / inputs["budget"]), 1)
            if self.prefill_steps > MAX_PREFILL_STEPS_OF_ONE:
                raise UsageError(f"the prompt takes more than {MAX_PREFILL_STEPS_OF_ONE:,} steps", where="prompt")
            steps = range(self.prefill_steps)
            return float(sum(self._prompt_step(float(k), inputs, self.traffic, self.features) for k in steps))
        return self._prefill_of_many(left)

    def _prefill_of_many(self, left: Amount) -> Amount:
        """Add up the steps of many prompts, with one row per step."""
        import numpy as np

        counts = np.maximum(np.ceil(left / self.inputs["budget"]), 1.0)
        if counts.sum() > MAX_PREFILL_STEPS:
            raise UsageError(f"the prompts take more than {MAX_PREFILL_STEPS:,} steps in total")
        # `request` is the request that a step belongs to, `k` its number.
        request = np.repeat(np.arange(counts.size), counts.astype(np.int64))
        k = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))

        def by_step(values: Amounts) -> dict[str, Amount]:
            return {n: value if isinstance(value, float) else value[request] for n, value in values.items()}

        noted, self.outside = self.outside, []
        times = self._prompt_step(k, *map(by_step, (self.inputs, self.traffic, self.features)))
        prefill = np.bincount(request, np.broadcast_to(times, request.size), minlength=counts.size)
        for each in self.outside:
            rows = np.zeros(counts.size, dtype=bool)
            rows[request[np.broadcast_to(each.rows, request.size)]] = True
            noted.append(each._replace(rows=rows, values=math.nan))
        self.outside = noted
        return prefill

    def _prompt_step(self, k: Amount, inputs: Amounts, traffic: Amounts, features: Amounts) -> Amount:
        """Predict step `k`, from 0, of a prompt; prompts of others that arrive meanwhile share it."""
        budget = inputs["budget"]
        # Without a budget there is one step; 0 times infinity would be NaN.
        done = where(k == 0, 0.0, budget) * k
        own = smallest(budget, inputs["prompt_tokens"] - inputs["cached"] - done)
        return self._step(
            {
                "batch": inputs["others"],
                "context": inputs["context"],
                "prefill": smallest(own + traffic["prompt_tokens_per_step"], budget),
                "prefill_reqs": 1 + traffic["prompts_per_step"],
                "prefill_done": inputs["cached"] + done,
            },
            features,
        )

    def _step(self, described: Amounts, features: Amounts | None = None) -> Amount:
        """Predict a step from some of `STEP_INPUTS`."""
        features = self.features if features is None else features
        compiled = self.models.compiled(self.models.step_model)
        found = self._evaluated(compiled, self.models.step_values(described, features))
        return largest(found.amount, 0.0)

    def _evaluated(
        self,
        compiled: CompiledModel,
        given: Amounts,
        *,
        noted: bool = True,
        only: tuple[str, LinearForm] | None = None,
    ) -> Evaluated:
        """Evaluate a model; if `noted`, keep what stands in and what lies outside."""
        if only is None:
            compiled.require(compiled.compared, given)
        found = compiled.evaluate(given, stand_in=only is None, only=only)
        if self._is_one:
            require_amount(compiled, found, given)
        else:  # a null in a row gives it no prediction; a column that is not there is an error
            terms = [t for _, form in found.forms for t in form.terms if t.training_range is None]
            compiled.require([t.feature for t in terms if t.feature not in found.values], given)
        if noted:
            self.assumed += assumed(found)
            self.outside += outside_training(compiled, found)
        return found

    def _overhead(self, target: targets.Target, inputs: Amounts, *, noted: bool = True) -> Amount | None:
        """Predict a duration around the steps, null without a model; if `noted`, keep it with its notes."""
        model = self.models.models.get(target.model)
        if model is None:
            self.assumed.append(f"no model {target.model}: this time is not predicted, nor is what includes it")
            return None
        compiled = self.models.compiled(model)
        given = {**self.models.known_settings(compiled), **inputs, **self.features}
        only = (IDLE_ENGINE, model.work) if isinstance(model, BoundaryModel) else None
        found = self._evaluated(compiled, given, noted=noted, only=only)
        overhead = Overhead(compiled, found, largest(found.amount, 0.0))
        if isinstance(model, BoundaryModel):
            cycle = inputs["decode_cycle_us"]
            expected, soonest, latest = expected_at_boundary(model, overhead.value_us, cycle)
            # Without a cycle the engine is idle, and the admission is the work.
            value = where(is_known(cycle), expected, overhead.value_us)
            overhead = overhead._replace(value_us=value, limits_us=(soonest, latest))
        if noted:
            self.overheads[target.name] = overhead
        return overhead.value_us

    def _before(self, target: targets.Target, arrives: Amounts, cycle: Amount) -> Amount | None:
        """Predict a duration before the first step, at least as long as with an empty queue.

        A model that was trained without a queue has no term for it. The wait is then that for the requests
        that have to leave before this one runs: outputs ahead * step time / slots, with departures at the
        rate of the mean output.
        """
        inputs = self.inputs
        queue, batch, slots = inputs["queue"], inputs["batch"], self.models.server["max_num_seqs"]
        predicted = self._overhead(target, arrives)
        if predicted is None:
            return None
        if target.state == "queue" and not self.models.knows_queue(self.models.models[target.model]):
            # Requests wait for blocks too; if none waits, only full slots are certain.
            capacity = where(inputs["capacity"] > 0, inputs["capacity"], batch)
            room = where(queue > 0, capacity, math.inf if slots is None else slots)
            leaving = largest(queue + 1 - largest(room - batch, 0.0), 0.0)
            wait = leaving * inputs["others_output"] * cycle / largest(room, 1.0)
            self.added_wait = AddedWait(target.model, leaving > 0, wait, leaving)
            return predicted + wait
        if not anywhere(queue > 0):
            return predicted
        return largest(predicted, self._overhead(target, {**arrives, "queue": 0.0 * queue}, noted=False))

    def _cycle(self, decoding: Amount, context: Amount) -> tuple[Amount, Amount]:
        """Return the mean time of a step, with prompts of others, and of the step in progress at an arrival."""
        traffic = self.traffic
        step = {"batch": decoding, "context": context}
        decode = self._step(step)
        share = traffic["prompt_step_share"]
        if not anywhere(share > 0):
            return decode, decode

        def with_prompts(group: str, suffix: object = "") -> Amount:
            tokens, reqs = (traffic[f"{group}_{what}{suffix}"] for what in ("tokens", "reqs"))
            return self._step({**step, "prefill": tokens, "prefill_reqs": reqs})

        groups = range(prompt_step_groups(self.models.workload))
        mixed = [with_prompts("prompt_step", f"_{k}") for k in groups]
        mean = (1 - share) * decode + share * sum(mixed) / len(mixed)
        # An arrival falls into a step with probability proportional to its time: E[c^2] / E[c], over steps
        # with the mean prompt and without.
        of_mean = traffic["mean_prompt_share"]
        with_mean = with_prompts("mean_prompt")
        current = quotient(
            (1 - of_mean) * decode**2 + of_mean * with_mean**2, (1 - of_mean) * decode + of_mean * with_mean
        )
        return where(share > 0, mean, decode), where(share > 0, current, decode)


# -- one request -----------------------------------------------------------------------------------------


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


def predict_request(
    models: DeploymentModels, stated: Mapping[str, float | None], features: Mapping[str, float]
) -> RequestPrediction:
    """Predict one request.

    Args:
        models: Models of one deployment.
        stated: Values of `REQUEST_INPUTS`; null where nothing is stated.
        features: Columns or features by name, those of `OTHERS` too; they win over what follows from the rest.

    Raises:
        DataError: The model of step times could not be fitted.
        UsageError: The server would refuse the request, a feature is not known, or the number of running requests is
            not.
    """
    around = {target.model for target in targets.around_steps()}
    read_by = [models.step_model, *(m for name, m in models.models.items() if name in around)]
    models.require_read(features, read_by, OTHERS)
    require_possible("request", {**stated, **features}, models.limit)
    numbers = {name: number(name, value) for name, value in features.items()}
    others = {name: value for name, value in numbers.items() if name in OTHERS}
    given = {name: number(name, value) for name, value in stated.items()} | others
    inputs = complete(given, models.server, models.workload)
    if stated["batch"] is None and math.isnan(inputs["batch"]):
        raise UsageError(
            "the number of running requests is unknown while requests wait",
            where="batch",
            hint=f"give {named(BatchOption)}",
        )
    settings = (name for name, value in models.server.items() if value is not None)
    names = {*inputs, *STEP_INPUTS, *features, *settings}
    without_effect = models.inputs_without_effect({"context": stated["context"]}, read_by, features, names)
    # An empty engine has no cached tokens.
    checked = {n: inputs[n] for n in REQUEST_INPUTS if n != "context" or inputs["batch"]}
    beyond = models.beyond("request", checked)
    composer = RequestComposer(models, inputs, numbers)
    durations = composer.compose()
    added = composer.added_wait
    if added is not None and added.rows:
        beyond.append(str(added))
    ahead = []
    if models.setting("async_scheduling") is True and inputs["batch"]:
        ahead = ["scheduling runs a step ahead: the prompt waits one cycle more"]
    is_outside = bool(beyond or composer.outside)
    ranges = {name: _range_of(models, name, is_outside=is_outside) for name in targets.LATENCY_TITLES}

    def latency(name: str) -> PredictedDuration:
        value = durations[name]
        return PredictedDuration(value, *(ratio * value for ratio in ranges[name][0]))

    all_assumed = (*without_effect, *_assumed_of(models, stated, inputs, others), *composer.assumed, *ahead)
    return RequestPrediction(
        deployment_id=models.deployment_id,
        overheads=_overheads(composer, durations),
        prefill=PredictedDuration(durations["prefill"]),
        itl=latency("itl"),
        ttft=None if durations["ttft"] is None else latency("ttft"),
        e2e=None if durations["e2e"] is None else latency("e2e"),
        prefill_steps=composer.prefill_steps,
        assumed=tuple(dict.fromkeys(all_assumed)),
        out_of_range=(*beyond, *in_lines(composer.outside)),
        ranges=tuple(f"{targets.LATENCY_TITLES[name]}: {text}" for name, (_, text) in ranges.items()),
    )


def _assumed_of(
    models: DeploymentModels, stated: Mapping[str, float | None], inputs: Amounts, others: Amounts
) -> Iterator[str]:
    """Yield what `complete` assumed of a request."""
    batch, queue, mean = inputs["batch"], inputs["queue"], models.workload
    if stated["batch"] is None:
        what = "nothing else runs" if queue == 0 else "as many as slots and KV blocks hold"
        yield f"batch {batch:.0f}: {what}"
    if batch or queue:
        like = "this request" if mean is None else f"the mean of {mean.requests:,} requests trained on"
        lengths = f"prompt {inputs['others_prompt']:.0f}, output {inputs['others_output']:.0f}"
        steady = math.isfinite(inputs["steps_of_others"])
        arrive = "as many arrive as finish" if steady else "none of them arrives while it runs"
        yield f"the others are like {like}: {lengths}; {arrive}"
    if stated["context"] is None and batch:
        measured = running_like(mean) is not None and not others
        whence = "the mean of running requests in training" if measured else "halfway through their outputs"
        yield f"context {inputs['context']:.0f} of the others: {whence}"


def _overheads(composer: RequestComposer, durations: Mapping[str, Amount]) -> dict[str, PredictedDuration | None]:
    """Return the durations around the steps of one request, each with the interval of its model."""
    found: dict[str, PredictedDuration | None] = {}
    for target in targets.around_steps():
        overhead, value = composer.overheads.get(target.name), durations[target.name]
        if overhead is None or value is None:
            found[target.name] = None
        # Its errors were measured with the true work ahead; here that work is assumed.
        elif (composer.inputs["queue"] and target.state == "queue") or value != overhead.value_us:
            found[target.name] = PredictedDuration(value)
        # While a step runs, the latest admission is known.
        elif overhead.limits_us is not None and is_known(overhead.limits_us[1]):
            found[target.name] = PredictedDuration(value, *overhead.limits_us)
        else:
            compiled, evaluation = overhead.compiled, overhead.found
            is_outside = any(outside_training(compiled, evaluation))
            errors = None if is_outside else p90_ape_pct(compiled.model, group_of(compiled, evaluation))
            found[target.name] = interval_about(value, errors)
    return found


def _range_of(models: DeploymentModels, latency: str, *, is_outside: bool) -> tuple[tuple[float, ...], str]:
    """Return the published range of a composed latency as ratios to it, empty without one, and a note on it."""
    published = models.ranges.get(latency)
    if published is None:
        return (), "no range, because the files have no ranges of requests"
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
