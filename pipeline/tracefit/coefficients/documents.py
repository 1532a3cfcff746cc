"""The published files, as pydantic models: coefficient files (alpha.json, beta.json) and the evaluation.

A coefficient file holds one model (`models.schema`) per name and deployment. Models and results of the fit
(`fit.results`) are published as they are; the classes here compose them and add values that only the files have. The
rules of the files (no unknown keys, finite numbers) hold for all of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, Self

from pydantic import Field, model_validator

from tracefit.evaluator import MAX_MODELS
from tracefit.fit.results import (
    Latency,
    LeftOutErrors,
    Missing,
    Overload,
    SummedTime,
)
from tracefit.models.schema import Model, NotFitted, RequestRange, Strict
from tracefit.models.validation import Validation
from tracefit.results.plans import PlanPoint, ServerCapacity
from tracefit.results.replays import RunReplay
from tracefit.results.requests import RecordedLoad, RequestGroup
from tracefit.server.documents import Scalar

VerdictAnswer = Literal["yes", "with limits", "no"]
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
        machine_pct: If the value is worse than `yes` and the machine's own noise explains it, that noise in percent;
            else null. No recording on this machine gives a better value.
    """

    measure: str
    value: float | None
    yes: float
    with_limits: float
    higher_is_better: bool
    answer: VerdictAnswer
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
        seeds: Seed of each round: two calls with the same one send the same prompts, which are then in the prefix
            cache.
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

    answer: VerdictAnswer
    reasons: tuple[str, ...]
    criteria: tuple[Criterion, ...]


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
    version: Literal[3, 4] = 4
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
            s.deployment_id: {use: next(iter(v.reasons), "") for use, v in s.verdicts.items()} for s in self.deployments
        }


# -- coefficient files ----------------------------------------------------------------------------------


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


class CoefficientFile(Strict):
    """alpha.json or beta.json.

    Attributes:
        requests: Ranges of request latencies that are composed of the models of both files; in alpha.json.
    """

    schema_: Literal["tracefit/coefficients"] = Field(default="tracefit/coefficients", alias="schema")
    version: Literal[3, 4] = 4
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
