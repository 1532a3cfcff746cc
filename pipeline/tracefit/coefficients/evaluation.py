"""The evaluation file: its published shape.

Results of the fit (`fit.results`) are published as they are; the classes here compose them and add what is computed for
the file alone. The file's rules (no unknown keys, finite numbers) hold for those results too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tracefit.fit.results import (
    Burst,
    Candidate,
    EquationErrors,
    ErrorOverLoad,
    LatencyErrors,
    LearningPoint,
    Metrics,
    Missing,
    Overload,
)

EVALUATION_SCHEMA: Literal["tracefit/evaluation"] = "tracefit/evaluation"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class ClassifierEntry(_Part):
    """How well a regime condition predicts the regime on the hold-out."""

    balanced_accuracy: float | None
    confusion: dict[str, int]


class RegimeInterval(_Part):
    """Limits of the prediction interval of one regime, or of `all` rows."""

    regime: str
    level_pct: float
    kind: Literal["ratio", "difference"] = Field(
        description="limits are factors on the prediction, or differences from it in the model's unit"
    )
    low: float
    high: float


class CollinearityEntry(_Part):
    """How well the features of a model, or of one regime of it, predict each other in the training rows."""

    regime: str
    condition_number: float | None = Field(
        description="of the standardised features: 1 is none, above 30 is trouble"
    )
    variance_inflation: dict[str, float] = Field(
        description="feature to how much wider the variance of its coefficient is than without the others"
    )


class SummedEntry(_Part):
    """Step times of beta's hold-out, summed."""

    predicted_us: float
    actual_us: float
    bias_pct: float
    bias_2sd_pct: float = Field(
        description="two standard deviations of bias_pct, by bootstrap over blocks of time"
    )
    blocks: int
    max_contribution_pct: float = Field(
        description="contribution of the step or interval with the largest error to bias_pct, in percentage points"
    )
    speed_change_pct: float | None = Field(
        default=None,
        description="how much longer steps of equal batches take in the hold-out than in the training part",
    )
    drifting: bool = Field(
        default=False,
        description="bias_pct is more than two standard deviations: the machine, or what it did, changed after training",
    )


class LoadExtrapolationEntry(_Part):
    """Errors of the model's form, trained on the lower half of the load, on the upper half."""

    n: int
    mape_pct: float | None
    mdape_pct: float | None
    mae: float | None
    rmse: float | None
    r2: float | None
    bias_pct: float | None
    p90_ape_pct: float | None
    p99_ape_pct: float | None
    zero_targets: int = 0
    load: str = Field(description="running_tokens (in the caches of the batch), or batch_requests")
    cut: float = Field(description="the load that the lower half does not exceed")
    gradient_boosting: Metrics | None = Field(
        default=None, description="gradient boosting on the same features and rows"
    )


class StepPhaseEntry(_Part):
    """Errors on the held-out steps of one workload phase: a period in which requests arrive at one rate."""

    run_id: str
    server: str
    from_s: float = Field(description="seconds after the server's first request")
    to_s: float
    arrivals_per_s: float
    requests: int = Field(description="all requests of the phase, held out or not")
    holdout: Metrics
    baseline: Metrics = Field(description="the training median on the same steps")


class Entry(_Part):
    """One model's validation."""

    unit: str
    n_features: int
    train: Metrics
    holdout: Metrics
    baseline: Metrics = Field(description="the training median on the hold-out")
    gradient_boosting: Metrics | None = Field(
        description="gradient boosting on the same features and rows, hold-out"
    )
    by_group: dict[str, Metrics] = Field(default_factory=dict, description="hold-out errors by kind of row")
    by_phase: tuple[StepPhaseEntry, ...] = Field(
        default=(), description="hold-out errors of step times by workload phase"
    )
    by_load: dict[str, Metrics] = Field(
        default_factory=dict,
        description="hold-out errors `inside` and `outside` the ranges of the training rows",
    )
    held_out_equations: EquationErrors | None = Field(
        default=None,
        description="errors of step times over single steps and intervals, where the hold-out has both",
    )
    error_over_load: ErrorOverLoad | None = None
    load_extrapolation: LoadExtrapolationEntry | None = None
    candidates: tuple[Candidate, ...] = Field(
        default=(), description="what was tried inside the training part, and what was chosen"
    )
    classifier: ClassifierEntry | None = None
    within_5_pct: float | None = Field(default=None, description="share of hold-out rows within 5 %")
    extrapolated_rows: int = Field(
        default=0, description="hold-out rows with a feature outside its training range"
    )
    extrapolated: dict[str, int] = Field(default_factory=dict, description="the same by feature")
    prediction_intervals: tuple[RegimeInterval, ...] = ()
    interval_coverage_pct: float | None = Field(
        default=None, description="share of hold-out rows within their prediction interval"
    )
    prefill_reach_pct: float | None = Field(
        default=None,
        description="of a model of step times: the most prompt tokens of a step trained on, of the tokens a step may have",
    )
    collinearity: tuple[CollinearityEntry, ...] = ()
    learning_curve: tuple[LearningPoint, ...] = ()
    rows_by_source: dict[str, int] = Field(
        default_factory=dict, description="training rows by kind: adjacent, interval, duration"
    )
    boundary_accuracy_pct: float | None = Field(
        default=None,
        description="hold-out requests that get the right step boundary, of those whose step is known",
    )
    boundary_accuracy_without_work_pct: float | None = Field(
        default=None, description="the same with zero API work"
    )
    bursts: tuple[Burst, ...] = Field(
        default=(),
        description="periods outside the range of an admission model: the API process has a queue",
    )
    skill: float | None = Field(description="1 - mae / baseline.mae on the hold-out")


class TimelineEntry(_Part):
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


class _LatencyErrors(_Part):
    teacher_forced: Metrics = Field(
        description="the real batches and the real waits; step times and overheads predicted"
    )
    refit_on_holdout: Metrics = Field(
        description="teacher-forced, with the terms of the step time fitted on the held-out steps themselves: an error "
        "that no coefficients mend; where it is much smaller, the machine or the load has changed since the training part"
    )
    averages_only: Metrics = Field(
        description="everything predicted from averages over the training part and the request's own lengths"
    )
    baseline: Metrics = Field(description="the training median")


class PhaseEntry(_LatencyErrors):
    """Errors over one workload phase: a period of a server in which requests arrive at one rate."""

    run_id: str
    server: str
    from_s: float = Field(description="seconds after the server's first request")
    to_s: float
    arrivals_per_s: float
    requests: int = Field(description="all requests of the phase, held out or not")


class DistributionEntry(_Part):
    """Quantiles of one latency in us, measured and predicted, over the same held-out requests."""

    requests: int
    percents: tuple[int, ...] = Field(description="of requests; one per entry of each list of quantiles")
    measured: tuple[float, ...]
    teacher_forced: tuple[float, ...] | None
    averages_only: tuple[float, ...] | None


class LatencyEntry(_LatencyErrors):
    """One latency of requests that came in the hold-out of every fit."""

    definition: str
    by_run: dict[str, LatencyErrors]
    by_phase: tuple[PhaseEntry, ...]
    left_out: dict[str, int] = Field(
        default_factory=dict, description="held-out requests without a teacher-forced prediction, by reason"
    )
    distribution: DistributionEntry | None = Field(
        default=None, description="null where no held-out request has a prediction"
    )


class RowsEntry(_Part):
    """Use of the rows of one run by one model; errors are measured on the held-out rows."""

    model: str
    run_id: str
    trained: int
    held_out: int
    left_out: dict[str, int] = Field(description="rows left out of either part, by reason")


class Criterion(_Part):
    """One measure compared with its threshold."""

    measure: str
    value: float | None
    yes: float = Field(description="from here on the use is allowed")
    with_limits: float = Field(description="from here on it is allowed with limits")
    higher_is_better: bool
    answer: Literal["yes", "with limits", "no"]
    reason: str


class Verdict(_Part):
    """Verdict on one use of the scope's models: the worst of the criteria."""

    answer: Literal["yes", "with limits", "no"]
    reasons: tuple[str, ...] = Field(description="the criteria that decide")
    criteria: tuple[Criterion, ...]


class RequestRange(_Part):
    """How measured latencies lie about those that `predict` composes of a request's lengths, its batch and the queue.

    `low_ratio` and `high_ratio` are the 5th and 95th percentile of measured / predicted over the requests of the training
    part. Both are null unless 85 to 95 % of the later, held-out requests lie between the two.
    """

    scope_id: str
    latency: Literal["ttft", "itl", "e2e"]
    low_ratio: float | None
    high_ratio: float | None
    requests: int = Field(description="of the training part")
    coverage_pct: float | None = Field(description="share of the held-out requests that lie in the range")
    holdout: Metrics
    baseline: Metrics = Field(description="the training median, for the same held-out requests")
    reason: str | None = Field(default=None, description="why there is no range")


class ScopeEvaluation(_Part):
    """Everything about one scope."""

    scope_id: str
    runs: tuple[str, ...]
    overloaded: tuple[Overload, ...] = ()
    verdicts: dict[str, Verdict] = Field(
        default_factory=dict, description="use to verdict, by the thresholds that are stated with it"
    )
    models: dict[str, Entry]
    not_fitted: tuple[Missing, ...] = ()
    latency: dict[str, LatencyEntry] = Field(
        default_factory=dict,
        description="latencies of requests, composed of the models: ttft, itl, e2e, client, prefill, execution",
    )
    latency_missing: str | None = Field(default=None, description="why there are none")
    requests: tuple[RequestRange, ...] = Field(
        default=(), description="what `predict` makes of requests, held against what was measured"
    )
    summed_step_time: SummedEntry | None = None
    timeline: TimelineEntry
    exclusions: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="model name to rows left out by reason"
    )
    rows: tuple[RowsEntry, ...] = Field(default=(), description="the same by run, with the rows that count")
    notes: tuple[str, ...] = ()


class ServerEntry(_Part):
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
        description="share of requests with a journey; null where no step shows it"
    )
    snapshot_sampling: float | None = Field(description="steps with snapshots / steps with a summary")
    dropped_events: int


class IngestEntry(_Part):
    """Counts of what was read, and of what was not usable."""

    files: int
    bytes: int
    spans: int
    other_spans: int = 0
    events: dict[str, int]
    rejects: int
    implausible: dict[str, int] = Field(
        default_factory=dict,
        description="rule of the tables that rows broke to how many did: they are left out",
    )
    missing_attributes: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="event to its attributes that none of these events of a run has a usable value of",
    )
    dropped_events: int
    dropped_attributes: int = 0
    duplicates: int
    servers: tuple[ServerEntry, ...] = ()


class AcrossEntry(_Part):
    """Errors on all rows of a run, model or GPU, of a model fitted on the others."""

    kind: Literal["run", "model", "gpu"]
    left_out: str
    model: str = Field(description="name of the fitted model")
    scope_id: str | None = Field(description="the scope of a run; null where models or GPUs are left out")
    feature_set: str
    trained_on: tuple[str, ...]
    rows_used: int
    errors: Metrics
    baseline: Metrics = Field(description="the training median on what was left out")
    gradient_boosting: Metrics | None = Field(
        description="gradient boosting on the same features and rows, on what was left out"
    )
    skill: float | None
    interval_coverage_pct: float | None


class Evaluation(_Part):
    """evaluation.json."""

    schema_: Literal["tracefit/evaluation"] = Field(default=EVALUATION_SCHEMA, alias="schema")
    version: Literal[2] = 2
    ingest: IngestEntry
    scopes: tuple[ScopeEvaluation, ...]
    across: tuple[AcrossEntry, ...] = Field(
        default=(), description="errors on what was left out of training, where that was requested"
    )
    across_notes: tuple[str, ...] = Field(
        default=(), description="what could not be left out or measured, and why"
    )
