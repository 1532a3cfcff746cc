"""The published files, as pydantic models: coefficient files (alpha.json, beta.json) and the evaluation.

A coefficient file holds one model per name and deployment, in one of three forms: one line (`LinearModel`), one
line per regime (`RegimesModel`), or API work followed by the wait for a step boundary (`BoundaryModel`).
Results of the fit (`fit.results`) are published as they are; the classes here compose them and add what is
computed for the files alone. The rules of the files (no unknown keys, finite numbers) hold for those results
too.
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
from tracefit.results.plans import PlanPoint
from tracefit.results.replays import RunReplay
from tracefit.results.requests import RequestGroup
from tracefit.server.documents import Scalar

Answer = Literal["yes", "with limits", "no"]
"""Whether the models can be used for a purpose."""

FileKind = Literal["alpha", "beta"]
"""alpha: models of API, queue and departure; beta: models of step times."""

# -- the evaluation -------------------------------------------------------------------------------------


class TimelineEntry(Strict):
    """Evidence behind the step clock."""

    epochs: int
    servers: int
    steps_known: int
    adjacent_cycles: int
    intervals: int = 0
    interval_steps: int = 0
    idle_gaps: int
    composition_agreement: float | None = Field(
        default=None,
        description="share of sampled steps whose batch, worked out from journeys, matches exactly",
    )
    composition_errors: dict[str, float] = Field(
        default_factory=dict, description="absolute differences on sampled steps: mean and 99th percentile"
    )
    step_sampling: float | None
    journey_sampling: float | None
    duration_coverage: float | None = Field(
        description="share of busy time that step.duration_us covers, over adjacent steps"
    )
    median_cycle_us: float | None = None
    median_duration_us: float | None = None
    beta_target_source: str | None = None
    beta_target_reason: str | None = None
    execution_lag_steps: int = Field(
        default=0, description="1 where scheduling runs a step ahead of execution"
    )
    clock_checked_events: int = Field(
        default=0, description="engine core events stamped beside steps whose start is known"
    )
    clock_disagreements: int = Field(
        default=0,
        description="of these, the ones stamped before their step began or after it must have ended",
    )
    clock_corrected_events: int = Field(
        default=0, description="API events of another host's clock, moved to the engine core's by wall clock"
    )
    dropped_events: int


class RowsEntry(Strict):
    """Use of the rows of one run by one model; errors are measured on the held-out rows."""

    model: str
    run_id: str
    trained: int
    held_out: int
    left_out: dict[str, int] = Field(description="rows left out of either part, by reason")


class Criterion(Strict):
    """One measure compared with its threshold."""

    measure: str
    value: float | None
    yes: float = Field(description="from here on the use is allowed")
    with_limits: float = Field(description="from here on it is allowed with limits")
    higher_is_better: bool
    answer: Answer
    reason: str


class RecordingAdvice(Strict):
    """A recording that could make a verdict a yes."""

    load: str = Field(description="rates of arrivals, and in what order")
    prompts: str = Field(description="how long the prompts have to be")
    minutes: float = Field(description="how long the load runs")
    sampling: str = Field(description="how much of it to trace")
    command: str = Field(description="shell commands of a load generator that makes this load")


class Verdict(Strict):
    """Verdict on one use of the deployment's models: the worst of the criteria."""

    answer: Answer
    reasons: tuple[str, ...] = Field(description="the criteria that decide")
    criteria: tuple[Criterion, ...]
    record: RecordingAdvice | None = Field(
        default=None, description="what to record for a yes; null if it is one"
    )


class RequestRange(Strict):
    """Range of measured latencies around the predictions from a request's lengths, its batch and the queue.

    `low_ratio` and `high_ratio` are the 5th and 95th percentile of measured / predicted over the requests of
    the training part. Both are null unless 85 % of the later, held-out requests lie between the two. Every
    request is described by the facts at its arrival, and only requests inside the training range of the
    models count for the range.
    """

    deployment_id: str
    latency: Literal["ttft", "itl", "e2e"]
    low_ratio: float | None
    high_ratio: float | None
    requests: int = Field(description="requests of the training part, inside the training range")
    requests_held_out: int | None = Field(
        default=None, description="held-out requests, inside the training range"
    )
    coverage_pct: float | None = Field(description="share of these held-out requests that lie in the range")
    holdout: Metrics = Field(description="errors of `predict` on all held-out requests")
    baseline: Metrics = Field(description="the training median, for the same held-out requests")
    gradient_boosting: Metrics | None = Field(default=None, description="on the same inputs and requests")
    reason: str | None = Field(default=None, description="why there is no range")


class DeploymentEvaluation(Strict):
    """Everything about one deployment."""

    deployment_id: str
    runs: tuple[str, ...]
    overloaded: tuple[Overload, ...] = ()
    verdicts: dict[str, Verdict] = Field(
        default_factory=dict, description="use to verdict, by the thresholds that are stated with it"
    )
    replays: tuple[RunReplay, ...] = Field(
        default=(),
        description="by run: the held-out part replayed from arrivals and lengths, measured beside replayed; or why not",
    )
    served: tuple[RequestGroup, ...] = Field(
        default=(), description="by run: what the server did with the requests of the run, all of them"
    )
    rates: tuple[PlanPoint, ...] = Field(
        default=(),
        description="what one server would do at rates up to its capacity, with requests like those traced: see `tracefit plan`",
    )
    models: dict[str, Validation]
    not_fitted: tuple[Missing, ...] = ()
    latency: dict[str, Latency] = Field(
        default_factory=dict,
        description="latencies of requests, composed of the models: ttft, itl, e2e, client, prefill, execution",
    )
    latency_missing: str | None = Field(default=None, description="why no latency is composed")
    requests: tuple[RequestRange, ...] = Field(
        default=(), description="predictions of requests by `predict`, compared with measurements"
    )
    summed_step_time: SummedTime | None = None
    timeline: TimelineEntry
    exclusions: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="model name to rows left out by reason"
    )
    rows: tuple[RowsEntry, ...] = Field(default=(), description="the same by run, with the rows that count")
    notes: tuple[str, ...] = ()


class ServerEntry(Strict):
    """Traces of one server in one run; sampling rates are estimated from the traces."""

    run_id: str
    server: str
    seconds: float | None = Field(description="first span's start to last span's end")
    epochs: int
    spans: int
    requests: int
    steps: int = Field(description="steps with a summary")
    step_sampling: float | None = Field(description="steps with a summary / steps counted")
    journey_sampling: float | None = Field(
        description="share of requests with a journey; null if no step shows it"
    )
    snapshot_sampling: float | None = Field(description="steps with snapshots / steps with a summary")
    dropped_events: int


class IngestEntry(Strict):
    """Counts of the records read, and of the unusable ones."""

    files: int
    bytes: int
    spans: int
    other_spans: int = 0
    events: dict[str, int]
    rejects: int
    implausible: dict[str, int] = Field(
        default_factory=dict,
        description="rule of the tables to the number of rows that broke it and are left out",
    )
    missing_attributes: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="event to its attributes without a usable value in any such event of a run",
    )
    dropped_events: int
    dropped_attributes: int = 0
    duplicates: int
    servers: tuple[ServerEntry, ...] = ()


class Evaluation(Strict):
    """evaluation.json."""

    schema_: Literal["tracefit/evaluation"] = Field(default="tracefit/evaluation", alias="schema")
    version: Literal[3] = 3
    ingest: IngestEntry
    deployments: tuple[DeploymentEvaluation, ...]
    across: tuple[LeftOutErrors, ...] = Field(
        default=(), description="errors on the groups left out of training in turn, on request"
    )
    across_notes: tuple[str, ...] = Field(
        default=(), description="groups that could not be left out or measured, with the reason"
    )

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
    terms: Terms = ()


class Regime(Strict):
    """One regime of a two-regime model."""

    name: str
    when: Condition
    intercept: Number
    terms: Terms = ()


class Work(Strict):
    """A linear amount of work."""

    intercept: Number
    terms: Terms = ()


class Estimator(Strict):
    """How the numbers were fitted."""

    name: str
    penalty: str
    strength: float
    huber: float | None = None
    chosen_by: str
    cv_mae: float | None = Field(
        default=None, description="cross-validated mean absolute error of the choice"
    )
    folds: int = 0


class TimeRange(Strict):
    """Times of one server's rows, ns on its own monotonic clock."""

    run_id: str
    server: str
    first_ns: int
    holdout_from_ns: int
    last_ns: int


class RunInput(Strict):
    """Content hashes of the inputs of one run's tables."""

    run_id: str
    traces_sha256: str = Field(description="over the trace files' contents, names and order left out")
    context_sha256: str = Field(description="over settings, config.json and GPU as the runs table has them")


class Training(Strict):
    """Training data of the model."""

    runs: tuple[str, ...]
    rows: int = Field(description="rows of the training part")
    rows_used: int
    rows_holdout: int
    exclusions: dict[str, int] = Field(description="rows left out, by reason, both parts together")
    time_range: tuple[TimeRange, ...]
    inputs_sha256: str = Field(description="hash over the trace files' contents")
    inputs: tuple[RunInput, ...] = ()


class Provenance(Strict):
    """Which program made the file; comparisons ignore this."""

    tool: str
    version: str
    libraries: dict[str, str]
    options: dict[str, Scalar]
    files: dict[str, str] = Field(
        default_factory=dict, description="sha256 of the files that options name, by option"
    )


class PromptSteps(Strict):
    """The mean of a group of steps that compute prompts."""

    tokens: float = Field(description="prompt tokens that a step computes")
    prompts: float = Field(description="requests they belong to")


class Workload(Strict):
    """The mean request of the training part; the requests beside a predicted one are assumed to be like it."""

    requests: int
    prompt_tokens: float
    cached_prompt_tokens: float = Field(description="prompt tokens in the prefix cache; 0 if unknown")
    output_tokens: float
    max_tokens: float | None = Field(description="output tokens allowed; null if unknown")
    running_context_tokens: float | None = Field(
        default=None,
        description="tokens in the cache of a running request, mean over the steps that requests run in",
    )
    running_remaining_tokens: float | None = Field(
        default=None,
        description="output tokens that a running request may still generate, mean over the same steps",
    )
    prompt_steps: tuple[PromptSteps, ...] = Field(
        default=(),
        description="steps that compute prompts, in groups of equal size from few tokens to many; empty where not known",
    )


class DeploymentFacts(Strict):
    """Model, GPU and settings the model is valid for; nothing in `assumed` was stated by any input."""

    model: str | None
    gpu: str | None
    architecture: dict[str, Scalar]
    hardware: dict[str, Scalar]
    settings: dict[str, Scalar]
    assumed: tuple[str, ...] = ()
    workload: Workload | None = Field(default=None, description="null if no journeys of requests are traced")
    input_ranges: dict[Literal["step", "request"], dict[str, tuple[float, float]]] = Field(
        default_factory=dict,
        description="smallest and largest value in training of the inputs that describe a step, and a request on arrival",
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
    terms: Terms = ()


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
    """

    residual: Number = Field(description="mean rest of a cycle c at a random time in it: E[c^2] / (2 E[c])")
    busy_share: float = Field(description="share of the time in which a step is in progress", ge=0, le=1)


class BoundaryModel(_ModelBase):
    """The first step start at or after the end of the work, plus offset; that end itself when the engine is idle."""

    form: Literal["boundary"]
    boundary: Literal["step_start"]
    queue: Literal["one_at_a_time"] | None = Field(
        default=None,
        description="one_at_a_time: work on an event begins when it comes or when the work on the one before it on the same "
        "server ends, whichever is later; null: when it comes",
    )
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
    """alpha.json or beta.json."""

    schema_: Literal["tracefit/coefficients"] = Field(default="tracefit/coefficients", alias="schema")
    version: Literal[3] = 3
    kind: FileKind
    models: tuple[Model, ...] = Field(max_length=MAX_MODELS)
    not_fitted: tuple[NotFitted, ...] = ()
    requests: tuple[RequestRange, ...] = Field(
        default=(),
        description="ranges of request latencies that are composed of the models of both files; in alpha.json",
    )
    provenance: Provenance | None = None

    @model_validator(mode="after")
    def _names_each_model_once(self) -> Self:
        named = Counter((model.name, model.deployment_id) for model in self.models)
        for (name, deployment_id), count in named.items():
            if count > 1:
                raise ValueError(f"two models are {name} of deployment {deployment_id}")
        return self
