"""The published files, as pydantic models: coefficient files (alpha.json, beta.json) and the evaluation.

A coefficient file holds one model per name and deployment, in one of three forms: one line (`LinearModel`), one
line per regime (`RegimesModel`), or API work followed by the wait for a step boundary (`BoundaryModel`).
Results of the fit (`fit.results`) are published as they are; the classes here compose them and add values
that only the files have. The rules of the files (no unknown keys, finite numbers) hold for those results too.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tracefit.evaluator import MAX_FORMULA_CHARS, MAX_MODELS, MAX_REGIMES, MAX_TERMS
from tracefit.features import targets
from tracefit.fit.results import (
    Condition,
    Identifier,
    Latency,
    LeftOutErrors,
    Metrics,
    Missing,
    Number,
    OmittedFeature,
    Overload,
    Strict,
    SummedTime,
    TargetFacts,
    Term,
    Validation,
)
from tracefit.results.plans import PlanPoint, ServerCapacity
from tracefit.results.replays import RunReplay
from tracefit.results.requests import RecordedLoad, RequestGroup
from tracefit.server.documents import Scalar

Answer = Literal["yes", "with limits", "no"]
"""Whether the models can be used for a purpose."""

FileKind = Literal["alpha", "beta"]
"""alpha: models of API, queue and departure; beta: models of step times."""

# -- the evaluation -------------------------------------------------------------------------------------


class TimelineEntry(Strict):
    """Evidence behind the step clock.

    Attributes:
        composition_agreement: Share of sampled steps whose batch, worked out from journeys, matches exactly.
        composition_errors: Absolute differences on sampled steps: mean and 99th percentile.
        duration_coverage: Share of busy time that step.duration_us covers, over adjacent steps.
        execution_lag_steps: 1 if scheduling runs a step ahead of execution.
        clock_checked_events: Engine core events of steps whose start is known.
        clock_disagreements: Those of them stamped before their step began or after it must have ended.
        clock_corrected_events: API events of another host's clock, moved to the engine core's by wall clock.
    """

    epochs: int
    servers: int
    steps_known: int
    adjacent_cycles: int
    intervals: int = 0
    interval_steps: int = 0
    idle_gaps: int
    composition_agreement: float | None = None
    composition_errors: dict[str, float] = Field(default_factory=dict)
    step_sampling: float | None
    journey_sampling: float | None
    duration_coverage: float | None
    median_cycle_us: float | None = None
    median_duration_us: float | None = None
    beta_target_source: str | None = None
    beta_target_reason: str | None = None
    execution_lag_steps: int = 0
    clock_checked_events: int = 0
    clock_disagreements: int = 0
    clock_corrected_events: int = 0
    dropped_events: int


class RowsEntry(Strict):
    """Use of the rows of one run by one model; errors are measured on the held-out rows.

    Attributes:
        left_out: Rows left out of either part, by reason.
    """

    model: str
    run_id: str
    trained: int
    held_out: int
    left_out: dict[str, int]


class Criterion(Strict):
    """One measure compared with its threshold.

    Attributes:
        yes: Value from which on the use is allowed.
        with_limits: Value from which on it is allowed with limits.
        machine_pct: If the value is worse than `yes` and the machine's own noise explains it, that noise in percent; else null. No
            recording on this machine gives a better value.
    """

    measure: str
    value: float | None
    yes: float
    with_limits: float
    higher_is_better: bool
    answer: Answer
    reason: str
    machine_pct: float | None = None


class LoadStretch(Strict):
    """Requests at one steady rate: one call of a load generator in each round of a recording.

    Lengths are uniform within `spread` of their mean, as a share of it.

    Attributes:
        requests_per_s: Poisson arrivals.
        requests: Number of requests.
        prompt_tokens: Mean prompt.
        output_tokens: Mean output.
        seeds: Seed of each round: two calls with the same one send the same prompts, which are then in the prefix cache.
        reason: The purpose of it.
    """

    name: str
    requests_per_s: float
    requests: int
    prompt_tokens: int
    prompt_spread: float
    output_tokens: int
    output_spread: float
    seeds: tuple[int, ...]
    reason: str

    @property
    def seconds(self) -> float:
        """Time until the last arrival."""
        return self.requests / self.requests_per_s


class RecordingAdvice(Strict):
    """A recording that could make every verdict a yes.

    Attributes:
        uses: Uses whose verdict is not yes.
        rounds: How often all stretches are sent, one after the other, in this order.
        stretches: The load of one round.
        minutes: Duration of all rounds, without the starts of the load generator.
        sampling: Share of requests and steps to trace.
        command: Lines of a shell that make this load with `vllm bench serve`.
    """

    uses: tuple[str, ...]
    rounds: int
    stretches: tuple[LoadStretch, ...]
    minutes: float
    sampling: str
    command: tuple[str, ...]


class Verdict(Strict):
    """Verdict on one use of the deployment's models: the worst of the criteria.

    Attributes:
        reasons: Reasons of the criteria that decide.
    """

    answer: Answer
    reasons: tuple[str, ...]
    criteria: tuple[Criterion, ...]


class RequestRange(Strict):
    """Range of measured latencies around the predictions from a request's lengths, its batch and the queue.

    `low_ratio` and `high_ratio` are the 5th and 95th percentile of measured / predicted over the requests of
    the training part. Both are null unless 85 % of the later, held-out requests lie between the two. Every
    request is described by the facts at its arrival, and only requests inside the training range of the
    models count for the range.

    Attributes:
        requests: Requests of the training part, inside the training range.
        requests_held_out: Held-out requests, inside the training range.
        coverage_pct: Percent of these held-out requests that are in the range.
        holdout: Errors of `predict` on all held-out requests.
        baseline: Errors of the training median on the same held-out requests.
        gradient_boosting: Errors of gradient boosting on the same inputs and requests.
        reason: Why the range is missing.
    """

    deployment_id: str
    latency: Literal["ttft", "itl", "e2e"]
    low_ratio: float | None
    high_ratio: float | None
    requests: int
    requests_held_out: int | None = None
    coverage_pct: float | None
    holdout: Metrics
    baseline: Metrics
    gradient_boosting: Metrics | None = None
    reason: str | None = None


class DeploymentEvaluation(Strict):
    """Everything about one deployment.

    Attributes:
        verdicts: Use to verdict, by the thresholds that are stated with it.
        replays: Per run, the held-out part replayed from arrivals and lengths, or why it cannot be replayed.
        record: The recording that may give a yes on every use; null if all are.
        served: Per run, the work of the server on all requests.
        load: Requests per second that were carried, and the lengths of requests.
        capacity: Rates that one server can carry.
        rates: The work of one server at rates up to its capacity, with requests like those traced; see
            `tracefit plan`.
        latency: Latencies of requests, composed of the models: ttft, itl, e2e, client, prefill, execution.
        latency_missing: Why latencies are missing.
        requests: Predictions of requests by `predict`, compared with measurements.
        exclusions: Model name to rows left out by reason.
        rows: Use of the rows, by model and run.
    """

    deployment_id: str
    runs: tuple[str, ...]
    overloaded: tuple[Overload, ...] = ()
    verdicts: dict[str, Verdict] = Field(default_factory=dict)
    replays: tuple[RunReplay, ...] = ()
    record: RecordingAdvice | None = None
    served: tuple[RequestGroup, ...] = ()
    load: RecordedLoad | None = None
    capacity: ServerCapacity | None = None
    rates: tuple[PlanPoint, ...] = ()
    models: dict[str, Validation]
    not_fitted: tuple[Missing, ...] = ()
    latency: dict[str, Latency] = Field(default_factory=dict)
    latency_missing: str | None = None
    requests: tuple[RequestRange, ...] = ()
    summed_step_time: SummedTime | None = None
    timeline: TimelineEntry
    exclusions: dict[str, dict[str, int]] = Field(default_factory=dict)
    rows: tuple[RowsEntry, ...] = ()
    notes: tuple[str, ...] = ()


class ServerEntry(Strict):
    """Traces of one server in one run; sampling rates are estimated from the traces.

    Attributes:
        seconds: From the start of the first span to the end of the last one.
        steps: Steps with a summary.
        step_sampling: Steps with a summary / steps counted.
        journey_sampling: Share of requests with a journey; null if no step shows it.
        snapshot_sampling: Steps with snapshots / steps with a summary.
    """

    run_id: str
    server: str
    seconds: float | None
    epochs: int
    spans: int
    requests: int
    steps: int
    step_sampling: float | None
    journey_sampling: float | None
    snapshot_sampling: float | None
    dropped_events: int


class IngestEntry(Strict):
    """Counts of the records read, and of the unusable ones.

    Attributes:
        implausible: Rule of the tables to the number of rows that broke it and are left out.
        missing_attributes: Event to its attributes without a usable value in any such event of a run.
    """

    files: int
    bytes: int
    spans: int
    other_spans: int = 0
    events: dict[str, int]
    rejects: int
    implausible: dict[str, int] = Field(default_factory=dict)
    missing_attributes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    dropped_events: int
    dropped_attributes: int = 0
    duplicates: int
    servers: tuple[ServerEntry, ...] = ()


class Evaluation(Strict):
    """evaluation.json.

    Attributes:
        across: Errors on the groups left out of training in turn, on request.
        across_notes: Groups that could not be left out or measured, with the reason.
    """

    schema_: Literal["tracefit/evaluation"] = Field(default="tracefit/evaluation", alias="schema")
    version: Literal[3] = 3
    ingest: IngestEntry
    deployments: tuple[DeploymentEvaluation, ...]
    across: tuple[LeftOutErrors, ...] = ()
    across_notes: tuple[str, ...] = ()

    @property
    def answers(self) -> dict[str, dict[str, str]]:
        """Deployment id to use to verdict: yes, with limits or no."""
        return {s.deployment_id: {use: v.answer for use, v in s.verdicts.items()} for s in self.deployments}

    @property
    def first_reasons(self) -> dict[str, dict[str, str]]:
        """Deployment id to use to the first of the reasons that decide its verdict."""
        return {
            s.deployment_id: {use: next(iter(v.reasons), "") for use, v in s.verdicts.items()}
            for s in self.deployments
        }


# -- coefficient files ----------------------------------------------------------------------------------


# A file may come from anyone, so its contents are bounded.
Formula = Annotated[str, Field(max_length=MAX_FORMULA_CHARS)]


def _each_feature_once(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    if len({term.feature for term in terms}) != len(terms):
        raise ValueError("a feature has two terms")
    return terms


Terms = Annotated[tuple[Term, ...], Field(max_length=MAX_TERMS), AfterValidator(_each_feature_once)]


class Linear(Strict):
    """intercept + sum of value * feature, clipped at 0."""

    form: Literal["linear"] = "linear"
    intercept: Number
    terms: Terms


class Regime(Strict):
    """One regime of a two-regime model."""

    name: str
    when: Condition
    intercept: Number
    terms: Terms


class Work(Strict):
    """A linear amount of work."""

    intercept: Number
    terms: Terms


class Estimator(Strict):
    """How the numbers were fitted.

    Attributes:
        cv_mae: Cross-validated mean absolute error of the choice.
    """

    name: str
    penalty: str
    strength: float
    huber: float | None = None
    chosen_by: str
    cv_mae: float | None = None
    folds: int = 0


class TimeRange(Strict):
    """Times of one server's rows, ns on its own monotonic clock."""

    run_id: str
    server: str
    first_ns: int
    holdout_from_ns: int
    last_ns: int


class RunInput(Strict):
    """Content hashes of the inputs of one run's tables.

    Attributes:
        traces_sha256: Over the contents of the trace files, without their names and order.
        context_sha256: Over settings, config.json and GPU as in the `runs` table.
    """

    run_id: str
    traces_sha256: str
    context_sha256: str


class Training(Strict):
    """Training data of the model.

    Attributes:
        rows: Rows of the training part.
        exclusions: Rows left out of both parts, by reason.
        inputs_sha256: SHA-256 over the contents of the trace files.
    """

    runs: tuple[str, ...]
    rows: int
    rows_used: int
    rows_holdout: int
    exclusions: dict[str, int]
    time_range: tuple[TimeRange, ...]
    inputs_sha256: str
    inputs: tuple[RunInput, ...] = ()


class Provenance(Strict):
    """Which program made the file; comparisons ignore this.

    Attributes:
        files: SHA-256 of the files that options name, by option.
    """

    tool: str
    version: str
    libraries: dict[str, str]
    options: dict[str, Scalar]
    files: dict[str, str] = Field(default_factory=dict)


class PromptSteps(Strict):
    """The mean of a group of steps that compute prompts.

    Attributes:
        tokens: Prompt tokens of a step.
        prompts: Requests with these prompt tokens.
    """

    tokens: float
    prompts: float


class Workload(Strict):
    """The mean request of the training part; the other requests of a prediction are assumed to be like it.

    Attributes:
        cached_prompt_tokens: Prompt tokens in the prefix cache; 0 if unknown.
        max_tokens: Output tokens allowed; null if unknown.
        running_context_tokens: Tokens in the cache of a running request, mean over the steps that requests run in.
        running_remaining_tokens: Output tokens that a running request may still generate, mean over the same steps.
        prompt_steps: Steps that compute prompts, in groups of equal size from few tokens to many; empty if unknown.
    """

    requests: int
    prompt_tokens: float
    cached_prompt_tokens: float
    output_tokens: float
    max_tokens: float | None
    running_context_tokens: float | None = None
    running_remaining_tokens: float | None = None
    prompt_steps: tuple[PromptSteps, ...] = ()


class DeploymentFacts(Strict):
    """Model, GPU and settings the model is valid for; nothing in `assumed` was stated by any input.

    Attributes:
        workload: The mean request; null if no journeys of requests are traced.
        input_ranges: Smallest and largest value in training of the inputs that describe a step, and a request on
            arrival.
    """

    model: str | None
    gpu: str | None
    architecture: dict[str, Scalar]
    hardware: dict[str, Scalar]
    settings: dict[str, Scalar]
    assumed: tuple[str, ...] = ()
    workload: Workload | None = None
    input_ranges: dict[Literal["step", "request"], dict[str, tuple[float, float]]] = Field(
        default_factory=dict
    )


class _ModelBase(Strict):
    name: str
    deployment_id: str | None = None
    target: TargetFacts | None = None
    estimator: Estimator | None = None
    features_left_out: tuple[OmittedFeature, ...] = ()
    training: Training | None = None
    validation: Validation | None = None
    deployment: DeploymentFacts | None = None
    feature_set: str | None = Field(default=None, description="the declared features the model was offered")
    definitions: dict[Identifier, Formula] = Field(
        default_factory=dict,
        max_length=MAX_TERMS,
        description="names in formulas that are not table columns: a number, or a formula over columns and other names here",
    )
    notes: tuple[str, ...] = ()


class LinearModel(_ModelBase):
    """A linear model."""

    form: Literal["linear"] = "linear"
    intercept: Number
    terms: Terms


def _each_name_once(regimes: tuple[Regime, ...]) -> tuple[Regime, ...]:
    if len({regime.name for regime in regimes}) != len(regimes):
        raise ValueError("two regimes have one name")
    return regimes


class RegimesModel(_ModelBase):
    """The first regime whose condition holds, then linear."""

    form: Literal["regimes"]
    regimes: Annotated[
        tuple[Regime, ...], Field(min_length=1, max_length=MAX_REGIMES), AfterValidator(_each_name_once)
    ]


class Expectation(Linear):
    """Expected admission without step times: the work, plus the expected rest of a step in progress.

    Its intercept is the work's + busy_share * (residual + offset).

    Attributes:
        residual: Mean rest of a cycle c at a random time in it: E[c^2] / (2 E[c]).
        busy_share: Share of the time in which a step is in progress.
    """

    residual: Number
    busy_share: float = Field(ge=0, le=1)


class BoundaryModel(_ModelBase):
    """The first step start at or after the end of the work, plus offset; that end itself when the engine is idle.

    Attributes:
        queue: When work on an event begins: `one_at_a_time`, when it comes or when the work on the event before it on
            the same server ends, whichever is later; null, when it comes.
    """

    form: Literal["boundary"]
    boundary: Literal["step_start"]
    queue: Literal["one_at_a_time"] | None = None
    work: Work
    offset: Number
    without_clock: Linear
    expectation: Expectation | None = None

    @property
    def work_us_per_prompt_token(self) -> float:
        """API work per prompt token; 0 if the work has no such term."""
        return sum(term.value for term in self.work.terms if term.feature == "prompt_tokens")


# Discriminated by `form`, so that a damaged model reports only errors of its own form.
Model = Annotated[LinearModel | RegimesModel | BoundaryModel, Field(discriminator="form")]
LinearForm = LinearModel | Linear | Work | Regime
"""Any type with an intercept and a sum of terms."""

STEP_MODELS = tuple(target.model for target in targets.STEP_TARGETS)
"""Names of the models of step times, the preferred one first."""


class NotFitted(Strict):
    """A model that could not be fitted, why, and what would give the data."""

    name: str
    deployment_id: str
    reason: str
    remedy: str | None = None


class CoefficientFile(Strict):
    """alpha.json or beta.json.

    Attributes:
        requests: Ranges of request latencies that are composed of the models of both files; in alpha.json.
    """

    schema_: Literal["tracefit/coefficients"] = Field(default="tracefit/coefficients", alias="schema")
    version: Literal[3] = 3
    kind: FileKind
    models: tuple[Model, ...] = Field(max_length=MAX_MODELS)
    not_fitted: tuple[NotFitted, ...] = ()
    requests: tuple[RequestRange, ...] = ()
    provenance: Provenance | None = None

    @model_validator(mode="after")
    def _names_each_model_once(self) -> Self:
        named = Counter((model.name, model.deployment_id) for model in self.models)
        for (name, deployment_id), count in named.items():
            if count > 1:
                raise ValueError(f"two models are {name} of deployment {deployment_id}")
        return self
