"""The evaluation file: its published shape.

Results of the fit (`fit.results`) are published as they are; the classes here compose them and add what is computed for
the file alone. The file's rules (no unknown keys, finite numbers) hold for those results too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tracefit.fit.results import (
    Latency,
    LeftOutErrors,
    Metrics,
    Missing,
    Overload,
    SummedTime,
    Validation,
)

EVALUATION_SCHEMA: Literal["tracefit/evaluation"] = "tracefit/evaluation"


class Strict(BaseModel):
    """A part of a published file: immutable, finite numbers, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


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
    answer: Literal["yes", "with limits", "no"]
    reason: str


class Verdict(Strict):
    """Verdict on one use of the scope's models: the worst of the criteria."""

    answer: Literal["yes", "with limits", "no"]
    reasons: tuple[str, ...] = Field(description="the criteria that decide")
    criteria: tuple[Criterion, ...]


class RequestRange(Strict):
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


class ScopeEvaluation(Strict):
    """Everything about one scope."""

    scope_id: str
    runs: tuple[str, ...]
    overloaded: tuple[Overload, ...] = ()
    verdicts: dict[str, Verdict] = Field(
        default_factory=dict, description="use to verdict, by the thresholds that are stated with it"
    )
    models: dict[str, Validation]
    not_fitted: tuple[Missing, ...] = ()
    latency: dict[str, Latency] = Field(
        default_factory=dict,
        description="latencies of requests, composed of the models: ttft, itl, e2e, client, prefill, execution",
    )
    latency_missing: str | None = Field(default=None, description="why there are none")
    requests: tuple[RequestRange, ...] = Field(
        default=(), description="what `predict` makes of requests, held against what was measured"
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
        description="share of requests with a journey; null where no step shows it"
    )
    snapshot_sampling: float | None = Field(description="steps with snapshots / steps with a summary")
    dropped_events: int


class IngestEntry(Strict):
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


class Evaluation(Strict):
    """evaluation.json."""

    schema_: Literal["tracefit/evaluation"] = Field(default=EVALUATION_SCHEMA, alias="schema")
    version: Literal[2] = 2
    ingest: IngestEntry
    scopes: tuple[ScopeEvaluation, ...]
    across: tuple[LeftOutErrors, ...] = Field(
        default=(), description="errors on what was left out of training, where that was requested"
    )
    across_notes: tuple[str, ...] = Field(
        default=(), description="what could not be left out or measured, and why"
    )

    @property
    def answers(self) -> dict[str, dict[str, str]]:
        """Scope id to use to verdict: yes, with limits or no."""
        return {s.scope_id: {use: v.answer for use, v in s.verdicts.items()} for s in self.scopes}
