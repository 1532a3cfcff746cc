"""Results of a fit as plain data: error metrics, validation, choices that were made, and models that are missing.

The modules of this room fill these types, and the coefficient and evaluation files publish them. Reading such a file and
predicting a row from it need neither numpy nor polars: this module imports neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tracefit.fit.arrays import Vector
    from tracefit.fit.solvers import Penalty


@dataclass(frozen=True, slots=True)
class Metrics:
    """Errors over `n` rows; percentages in percent, `mae` and `rmse` in the target's unit.

    Attributes:
        n: Rows.
        mape_pct: Mean of |predicted - actual| / actual.
        mdape_pct: Median of |predicted - actual| / actual.
        mae: Mean absolute error.
        rmse: Root mean squared error.
        r2: 1 - residual / total sum of squares; null for a constant target.
        bias_pct: 100 * (sum predicted - sum actual) / sum actual.
        p90_ape_pct: 90th percentile of the absolute percentage error.
        p99_ape_pct: 99th percentile of the absolute percentage error.
        zero_targets: Rows with a target of zero, which percentage errors leave out.
    """

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


NO_ROWS = Metrics(0, None, None, None, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles at `metrics.PERCENTS` of a measured column and of its predictions, over rows that have all of them."""

    rows: int
    measured: tuple[float, ...]
    predicted: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class OmittedFeature:
    """A feature that is not in the model, and why."""

    feature: str
    reason: str


@dataclass(frozen=True, slots=True)
class PenaltyChoice:
    """A penalty chosen by time-blocked cross-validation; `score` is its mean absolute error over the folds."""

    penalty: Penalty
    strength: float
    score: float
    folds: int
    fold_scores: tuple[float, ...] = ()
    """Contribution of each fold to the score, in order; they sum to it."""


@dataclass(frozen=True, slots=True)
class Collinearity:
    """Collinearity of the features of a model.

    Attributes:
        condition_number: Largest by smallest singular value of the standardised features (Belsley, Kuh and Welsch
            1980): 1 is none, above 30 is strong. Null without features.
        variance_inflation: Per feature, the factor by which the other features raise the variance of its coefficient; 1 is
            none.
    """

    condition_number: float | None
    variance_inflation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """Limits of a 95 % prediction interval: factors on a prediction, or differences from it in the target's unit."""

    kind: Literal["ratio", "difference"]
    low: float
    high: float

    def limits(self, predicted: Vector) -> tuple[Vector, Vector]:
        """Return the lower and upper limits of predictions; shape (n,) each, not below zero."""
        if self.kind == "ratio":
            return predicted * self.low, predicted * self.high
        return (predicted + self.low).clip(min=0.0), (predicted + self.high).clip(min=0.0)


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Hold-out error of the model trained on the latest `rows` training rows."""

    share: float
    rows: int
    mae: float
    mape_pct: float | None


@dataclass(frozen=True, slots=True)
class Classifier:
    """Confusion of the first regime's condition with the truth on the held-out rows; the first regime is positive."""

    balanced_accuracy: float | None
    true_positive: int
    false_negative: int
    false_positive: int
    true_negative: int


@dataclass(frozen=True, slots=True)
class EquationErrors:
    """Errors of step times on all held-out rows: single steps, and intervals by their mean.

    Attributes:
        rows_by_source: Number of held-out rows by kind.
        per_equation: Errors with each row counted once.
        per_step: Errors with each row counted once per step in it.
    """

    rows_by_source: dict[str, int]
    per_equation: Metrics
    per_step: Metrics


@dataclass(frozen=True, slots=True)
class Validation:
    """Errors of one model, of its baseline and of its reference; all but `train` on the hold-out."""

    train: Metrics
    holdout: Metrics
    baseline: Metrics
    reference: Metrics | None
    by_group: dict[str, Metrics]
    within_5_pct: float | None
    extrapolated_rows: int
    extrapolated: dict[str, int]
    """Held-out rows with a feature outside the training range of their regime, by feature."""
    interval_coverage_pct: float
    """Percent of held-out rows within their 95 % prediction interval."""
    by_load: dict[str, Metrics]
    """Errors on held-out rows `inside` and `outside` the ranges of the training rows."""
    skill: float | None
    classifier: Classifier | None = None
    learning_curve: tuple[LearningPoint, ...] = ()
    held_out_equations: EquationErrors | None = None
    """Given for step times whose hold-out has intervals."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A period of constant arrival rate, in seconds after the first arrival."""

    from_s: float
    to_s: float
    arrivals_per_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class StepPhase:
    """Errors on the held-out steps that began in one phase of one server: the model's, and those of the training median."""

    run_id: str
    server: str
    phase: Phase
    holdout: Metrics
    baseline: Metrics


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feature set or form that was tried, with mean absolute errors in us on training rows it was not fitted on.

    Attributes:
        name: Feature set or form.
        features: Number of its features.
        inside_mae: Error inside the training load: blocks of time left out in turn.
        beyond_mae: Error beyond it: fitted on the lower half of the load, evaluated on the upper; null where rows are too
            few.
        chosen: Whether it is the candidate that was fitted.
        reason: Why it was chosen or not.
    """

    name: str
    features: int
    inside_mae: float
    beyond_mae: float | None
    chosen: bool = False
    reason: str = ""

    @property
    def score(self) -> float:
        """Geometric mean of both errors."""
        return self.inside_mae if self.beyond_mae is None else math.sqrt(self.inside_mae * self.beyond_mae)


@dataclass(frozen=True, slots=True)
class LoadExtrapolation:
    """Errors of a model fitted on the lower half of the load of all rows and evaluated on the upper half.

    Attributes:
        load: The measure of load.
        cut: Median load: the border between the halves.
        errors: Errors on the upper half.
        reference: Gradient boosting on the same features and rows.
    """

    load: str
    cut: float
    errors: Metrics
    reference: Metrics | None


@dataclass(frozen=True, slots=True)
class LoadBin:
    """Errors on the held-out rows of one range of load."""

    low: float
    high: float
    holdout: Metrics


@dataclass(frozen=True, slots=True)
class ErrorOverLoad:
    """Errors on held-out rows in groups of equal size by load, and the training range of the load."""

    load: str
    training_range: tuple[float, float]
    bins: tuple[LoadBin, ...]


@dataclass(frozen=True, slots=True)
class Burst:
    """A burst on one server, in seconds after the server's first request."""

    run_id: str
    server: str
    from_s: float
    to_s: float
    requests: int
    holdout_requests: int


@dataclass(frozen=True, slots=True)
class DurationCover:
    """Share of the busy time that `step.duration_us` covers, over consecutive sampled steps."""

    share: float | None
    median_cycle_us: float | None
    median_duration_us: float | None


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """The source of beta's target, and the reason for it."""

    source: Literal["clock", "duration"]
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A model that was not fitted, the reason, and what to do for it."""

    name: str
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class SummedTime:
    """Sum of step times over the held-out rows.

    Attributes:
        predicted_us: Sum predicted.
        actual_us: Sum measured.
        two_sd_pct: Two standard deviations of the bias in percent, by block bootstrap.
        blocks: Number of blocks of time in the bootstrap.
        max_contribution_pct: Contribution of the row with the largest error to the bias, in percentage points: large for a
            hiccup.
        speed_change_pct: How much longer steps of equal batches take in the hold-out than in the training part; null where
            too few batches are equal.
    """

    predicted_us: float
    actual_us: float
    two_sd_pct: float
    blocks: int
    max_contribution_pct: float
    speed_change_pct: float | None = None

    @property
    def drifting(self) -> bool:
        """Whether the bias exceeds chance: the machine, or its workload, changed after the training part."""
        return abs(self.bias_pct) > self.two_sd_pct

    @property
    def bias_pct(self) -> float:
        """Predicted minus measured sum, in percent of the measured one."""
        return 100 * (self.predicted_us / self.actual_us - 1)


@dataclass(frozen=True, slots=True)
class LatencyErrors:
    """Errors of one latency over one group of requests, each over the requests with a prediction."""

    teacher_forced: Metrics
    refit_on_holdout: Metrics
    """Teacher-forced with the step-time model refitted on the hold-out: the error that no coefficients remove."""
    averages_only: Metrics
    baseline: Metrics
    """The training median."""


@dataclass(frozen=True, slots=True)
class PhaseErrors:
    """Errors over the held-out requests of one workload phase of one server."""

    run_id: str
    server: str
    phase: Phase
    errors: LatencyErrors


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency: errors over all held-out requests, per run, per phase; requests without a prediction by reason."""

    overall: LatencyErrors
    by_run: Mapping[str, LatencyErrors]
    by_phase: tuple[PhaseErrors, ...]
    left_out: Mapping[str, int]
    distribution: Distribution
    """Quantiles of the measured latency and of the predictions `forced_…` and `mean_…`."""


@dataclass(frozen=True, slots=True)
class ComposedLatencies:
    """All latencies of one scope, or why there are none."""

    latencies: Mapping[str, Latency]
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


LeftOutKind = Literal["run", "model", "gpu"]


@dataclass(frozen=True, slots=True)
class LeftOutErrors:
    """Errors on all rows of a run, model or GPU, of a model fitted on the training rows of the rest.

    Attributes:
        kind: What was left out: one run of a scope, or all scopes of a model or GPU.
        left_out: Its name.
        model: Name of the fitted model.
        scope_id: The scope of a run; null where models or GPUs are left out.
        feature_set: The feature set the model was offered.
        trained_on: The runs, models or GPUs it was fitted on.
        rows_used: Rows it was fitted on.
        validation: Errors; all but `train` on the rows left out.
    """

    kind: LeftOutKind
    left_out: str
    model: str
    scope_id: str | None
    feature_set: str
    trained_on: tuple[str, ...]
    rows_used: int
    validation: Validation


@dataclass(frozen=True, slots=True)
class AcrossResult:
    """Errors of everything that was left out in turn, and notes on what could not be left out or evaluated."""

    errors: tuple[LeftOutErrors, ...]
    notes: tuple[str, ...]
