"""Results of a fit beside the models themselves: choices that were made, latencies composed of the models, and models
that are missing.

The modules of this room fill these types, and the evaluation publishes them as they are: the order of the fields is the
order of the keys, and `Attributes` are the descriptions in `schemas/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from tracefit.models.validation import Metrics, Phase

if TYPE_CHECKING:
    import polars as pl

    from tracefit.fit.estimators import Penalty


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles of one latency in us, measured and predicted, over the same held-out requests.

    Attributes:
        requests: Requests that have all of them.
        percents: Percent of requests, one per entry of each list of quantiles.
        measured: Quantiles of the measured latency.
        predicted: Quantiles of the predictions of `predict` on arrival; null without any.
        given_measured_state: Quantiles of the prediction from the measured queue and batches; null without any.
    """

    requests: int
    percents: tuple[int, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...] | None
    given_measured_state: tuple[float, ...] | None


class PenaltyChoice(msgspec.Struct, frozen=True):
    """A penalty chosen by time-blocked cross-validation; `score` is its mean absolute error over the folds."""

    penalty: Penalty
    strength: float
    score: float
    folds: int


TimeSource = Literal["clock", "duration"]

COVERED_SHARE = 0.8
"""Where `step.duration_us` covers at least this share of busy time, durations are the step times."""


class StepTimeSource(msgspec.Struct, frozen=True):
    """Where beta's target comes from, and the share of busy time that `step.duration_us` covers, over adjacent steps.

    The target's source is null for traces without steps.
    """

    duration_coverage: float | None
    median_cycle_us: float | None
    median_duration_us: float | None
    beta_target_source: TimeSource | None = None
    beta_target_reason: str | None = None

    @property
    def is_whole_step(self) -> bool:
        """Whether the target is the whole time of a step: only then are latencies sums of it."""
        covers = (self.duration_coverage or 0.0) >= COVERED_SHARE
        return self.beta_target_source == "clock" or (self.beta_target_source == "duration" and covers)


@dataclass(frozen=True, slots=True)
class Missing:
    """A model that was not fitted, the reason, and the remedy."""

    name: str
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class SummedTime:
    """Time that the engine was busy in the hold-out: step times summed, those of a server with few known steps scaled
    up to all.

    Three statements: the bias of the model, the change of the server's speed, and the change of its load.

    Attributes:
        predicted_us: Sum predicted.
        actual_us: Sum measured.
        bias_pct: Predicted minus measured sum, in percent of the measured one.
        bias_2sd_pct: Two standard deviations of bias_pct, by bootstrap over blocks of time.
        blocks: Number of blocks of time in the bootstrap.
        max_contribution_pct: Contribution of the step or interval with the largest error to bias_pct, in percentage
            points: large for a hiccup.
        speed_change_pct: How much longer steps of equal batches take in the hold-out than in the training part; null
            where too few batches are equal.
        drifting: The server's speed changed: speed_change_pct is more than two standard deviations and more than 3 %.
        speed_change_2sd_pct: Two standard deviations of speed_change_pct, from blocks of time; null with it.
        load_change_pct: How much longer the model takes a step of the hold-out to be than one of the training part: its
            batches are larger.
        steps_known_pct: Percent of the engine's steps in the hold-out that the sum was made of.
    """

    predicted_us: float
    actual_us: float
    bias_pct: float
    bias_2sd_pct: float
    blocks: int
    max_contribution_pct: float
    speed_change_pct: float | None = None
    drifting: bool = False
    speed_change_2sd_pct: float | None = None
    load_change_pct: float | None = None
    steps_known_pct: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyErrors:
    """Errors of one latency over one group of requests, each over the requests with a prediction.

    Attributes:
        predicted: Predictions of `predict` from the facts at arrival: lengths, the queue, and the running batch.
        given_measured_state: The measured queue and batches; step times and overheads predicted.
        refit_on_holdout: The same with the terms of the step time fitted on the held-out steps themselves: an error
            that no coefficients mend. Where it is much smaller, the machine or the load has changed since the training
            part.
        baseline: The training median.
    """

    predicted: Metrics
    given_measured_state: Metrics
    refit_on_holdout: Metrics
    baseline: Metrics


@dataclass(frozen=True, slots=True)
class PhaseErrors(Phase, LatencyErrors):
    """Errors of one latency over the held-out requests of one workload phase."""


@dataclass(frozen=True, slots=True)
class Latency(LatencyErrors):
    """One latency of requests that came in the hold-out of every fit.

    Attributes:
        definition: The stamps it is the time between.
        by_run: Errors by run.
        by_phase: Errors by workload phase.
        gradient_boosting: Gradient boosting on the inputs of `predict`, and the same requests.
        left_out: Held-out requests without a prediction given the measured queue and batches, by reason.
        distribution: Quantiles; null where no held-out request has a prediction.
    """

    definition: str
    by_run: dict[str, LatencyErrors]
    by_phase: tuple[PhaseErrors, ...]
    gradient_boosting: Metrics | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    distribution: Distribution | None = None


class ComposedLatencies(msgspec.Struct, frozen=True):
    """Requests with every latency as measured and as composed of the models (`fit.latency`), or why they are
    missing.
    """

    rows: pl.DataFrame | None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class QueuePeriod:
    """A period in which the queue of one server did not empty; on the engine's clock."""

    server: str
    from_ns: int
    to_ns: int
    peak: int
    """Most requests that waited at once."""
    share: float
    """Share of the run's time."""


@dataclass(frozen=True, slots=True)
class Overload:
    """An overloaded run, the rules it broke, and whether models were fitted on it nevertheless."""

    run_id: str
    reasons: tuple[str, ...]
    trained_on: bool = False
    queued: tuple[QueuePeriod, ...] = ()
    """Periods with a queue that broke the rule on queues."""


LeftOutKind = Literal["run", "model", "gpu", "deployment", "tensor_parallel", "model_and_gpu"]


@dataclass(frozen=True, slots=True)
class LeftOutErrors:
    """Errors on all rows of a run, model, GPU or deployment, of a model fitted on the training rows of the rest.

    Attributes:
        kind: The left-out group: a run, all deployments of a model or of a GPU, or one of those of a model on a GPU.
        left_out: Its name.
        model: Name of the fitted model.
        deployment_id: The deployment of a run; null where models, GPUs or deployments are left out.
        feature_set: The feature set the model was offered.
        trained_on: The runs, models or GPUs it was fitted on.
        rows_used: Rows it was fitted on.
        errors: Errors on the left-out rows, as everything below.
        baseline: Errors of the training median.
        gradient_boosting: Errors of gradient boosting on the same features and rows.
        skill: 1 - errors.mae / baseline.mae.
        interval_coverage_pct: Percent of rows within their prediction interval.
        by_batch_size: Errors of step times of a constant per batch size: the median of the training rows with as many
            requests, or the nearest number; null for runs.
        nearest: Errors of the most similar of these deployments, its time for the same batches unchanged; null without
            a law.
        roofline: Errors of the longer of compute and memory at the rated speed; null without a law.
        own: Errors of the left-out deployment's own model on its hold-out; null without a law, or where that is not
            known.
        by_phase: Errors on steps without and with prompts; empty without a law.
    """

    kind: LeftOutKind
    left_out: str
    model: str
    deployment_id: str | None
    feature_set: str
    trained_on: tuple[str, ...]
    rows_used: int
    errors: Metrics
    baseline: Metrics
    gradient_boosting: Metrics | None
    skill: float | None
    interval_coverage_pct: float | None
    by_batch_size: Metrics | None = None
    nearest: Metrics | None = None
    roofline: Metrics | None = None
    own: Metrics | None = None
    by_phase: dict[str, Metrics] = field(default_factory=dict)


class AcrossResult(msgspec.Struct, frozen=True):
    """Errors of every group that was left out in turn, and notes on groups that could not be left out or evaluated."""

    errors: tuple[LeftOutErrors, ...]
    notes: tuple[str, ...]
