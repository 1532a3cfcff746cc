"""Errors of models: on rows that the fit did not use, by group and load, beside its baseline and its reference.

The coefficient files and the evaluation publish these types as they are; `Attributes` are the descriptions in
`schemas/`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tracefit.statistics import Vector


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
class Collinearity:
    """How well the features of a model, or of one regime of it, predict each other in the training rows.

    Attributes:
        regime: Name of the regime, or `all`.
        condition_number: Largest by smallest singular value of the standardised features (Belsley, Kuh and Welsch
            1980): 1 means no collinearity, above 30 is trouble. Null without features.
        variance_inflation: Feature to how much wider the variance of its coefficient is than without the others.
    """

    regime: str
    condition_number: float | None
    variance_inflation: dict[str, float]


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """Limits of the prediction interval of one regime, or of `all` rows.

    Attributes:
        regime: Name of the regime, or `all`.
        level_pct: Percent of rows that are between the limits.
        kind: Whether the limits are factors on the prediction, or differences from it in the model's unit.
        low: Lower limit.
        high: Upper limit.
    """

    regime: str
    level_pct: float
    kind: Literal["ratio", "difference"]
    low: float
    high: float

    def limits(self, predicted: Vector) -> tuple[Vector, Vector]:
        """Return the lower and upper limits of predictions; shape (n,) each, not below zero."""
        if self.kind == "ratio":
            return predicted * self.low, predicted * self.high
        return (predicted + self.low).clip(min=0.0), (predicted + self.high).clip(min=0.0)


NO_INTERVAL = PredictionInterval("all", 0.0, "difference", 0.0, 0.0)
"""Stands in a model until its predictions give it an interval."""


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Hold-out error of the model trained on the latest `rows` training rows."""

    share: float
    rows: int
    mae: float
    mape_pct: float | None


@dataclass(frozen=True, slots=True)
class Classifier:
    """How well the condition of the first regime predicts that regime on the held-out rows.

    Attributes:
        balanced_accuracy: Mean of the shares of right predictions among the rows of the regime and among the others.
        confusion: Rows by outcome, with the first regime as positive: `true_positive`, `false_negative`, ...
    """

    balanced_accuracy: float | None
    confusion: dict[str, int]


@dataclass(frozen=True, slots=True)
class SummedRowErrors:
    """Errors of step times on all held-out rows: single steps, and intervals by their mean.

    Attributes:
        rows_by_source: Number of held-out rows by kind.
        per_equation: Errors with each row counted once.
        per_step: Errors with each row counted once per step in it.
    """

    rows_by_source: dict[str, int]
    per_equation: Metrics
    per_step: Metrics


# No slots: PhaseErrors inherits from two classes, and Python allows slots in only one.
@dataclass(frozen=True)
class Phase:
    """A workload phase of one server: a period in which requests arrive at one rate.

    Attributes:
        run_id: The run.
        server: The server.
        from_s: Seconds after the server's first request.
        to_s: Its end, counted the same way.
        arrivals_per_s: Requests per second.
        requests: All requests of the phase, held out or not.
    """

    run_id: str
    server: str
    from_s: float
    to_s: float
    arrivals_per_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class StepPhase(Phase):
    """Errors on the held-out steps that began in one workload phase.

    Attributes:
        holdout: Errors of the model.
        baseline: Errors of the training median on the same steps.
    """

    holdout: Metrics
    baseline: Metrics


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feature set or form that was tried, with mean absolute errors in us on training rows it was not fitted on.

    Attributes:
        name: Feature set or form.
        features: Number of its features.
        inside_mae: Error inside the training load: every fifth of many short blocks of time left out in turn.
        beyond_mae: Error beyond it: fitted on the lower half of the load, evaluated on the upper; null where rows are
            too few.
        chosen: Whether it is the candidate that was fitted.
        reason: Why it was chosen or not.
        inside_pct: Typical relative error inside the training load, for step times; null for other targets.
        beyond_pct: The same beyond it.
        plain: Whether it is a line of the plain batch.
    """

    name: str
    features: int
    inside_mae: float
    beyond_mae: float | None
    chosen: bool = False
    reason: str = ""
    inside_pct: float | None = None
    beyond_pct: float | None = None
    plain: bool = False

    @property
    def score(self) -> float:
        """Geometric mean of both errors."""
        return self.inside_mae if self.beyond_mae is None else math.sqrt(self.inside_mae * self.beyond_mae)

    @property
    def score_pct(self) -> float:
        """Geometric mean of both typical errors."""
        inside = math.inf if self.inside_pct is None else self.inside_pct
        return inside if self.beyond_pct is None else math.sqrt(inside * self.beyond_pct)


@dataclass(frozen=True, slots=True)
class LoadExtrapolation(Metrics):
    """Errors on the upper half of the load of a model of the same form that was fitted on the lower half.

    Attributes:
        load: The measure of load: running_tokens (in the caches of the batch), or batch_requests.
        cut: The load that the lower half does not exceed.
        gradient_boosting: Errors of gradient boosting on the same features and rows.
    """

    _: KW_ONLY
    load: str
    cut: float
    gradient_boosting: Metrics | None = None


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
class SpeedVariation:
    """How the speed of the machine varied over a recording: how long steps of equal batches took, by stretches of time.

    Attributes:
        stretch_s: Length of a stretch in seconds.
        stretches: Stretches with enough steps, of the training part and of the hold-out.
        sd_pct: Standard deviation of a stretch's step times about the training part's mean, in percent, without what
            chance adds.
        fastest_pct: How much longer steps took in the fastest stretch than at the mean of the training part, in
            percent: below 0.
        slowest_pct: The same in the slowest stretch.
        holdout_pct: The same over the hold-out; null where it has no stretch.
        adjusted: Whether the model was fitted to times without these changes.
    """

    stretch_s: float
    stretches: int
    sd_pct: float
    fastest_pct: float
    slowest_pct: float
    holdout_pct: float | None
    adjusted: bool


@dataclass(frozen=True, slots=True)
class MachineNoise:
    """How much steps of equal batches differ although they ran near in time, as errors of a model that knows each
    batch's mean.

    Attributes:
        apart_s: Least and most seconds between two such steps.
        pairs: Pairs of such steps.
        mape_pct: Mean error in percent.
        mdape_pct: Median error in percent.
        p90_ape_pct: 90th percentile of the errors in percent.
    """

    apart_s: tuple[float, float]
    pairs: int
    mape_pct: float
    mdape_pct: float
    p90_ape_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One model's validation: its errors, those of its baseline and its reference, and the facts they depend on.

    Attributes:
        unit: Unit of the target and of absolute errors.
        n_features: Terms of the model.
        train: Errors on the training rows.
        holdout: Errors on the held-out rows, as everything below.
        baseline: Errors of the training median.
        gradient_boosting: Errors of gradient boosting on the same features and rows: of a flexible model that cannot be
            read.
        by_group: Errors by kind of row.
        by_phase: Errors of step times by workload phase.
        by_load: Errors `inside` and `outside` the ranges of the training rows.
        held_out_equations: Errors of step times over single steps and intervals, where the hold-out has both.
        error_over_load: Errors of step times in groups of rows by load.
        load_extrapolation: Errors of step times beyond the load that the form was fitted on.
        stretches: Errors of step times where every third of ten equal parts of the time is held out instead.
        speed: How the speed of the machine varied, for a model of step times; null where that is not known.
        noise: How much steps of equal batches differ, near in time, for a model of step times; null where few are
            equal.
        candidates: The candidates inside the training part, and the chosen one.
        classifier: How well the regime of a row is predicted, where there are regimes.
        within_5_pct: Percent of rows predicted within 5 %.
        extrapolated_rows: Rows with a feature outside the training range of their regime.
        extrapolated: The same by feature.
        prediction_intervals: Limits by regime.
        interval_coverage_pct: Percent of rows within their prediction interval.
        prefill_reach_pct: For a model of step times: the most prompt tokens of a step trained on, in percent of the
            tokens that a step may have.
        collinearity: Collinearity of the features by regime.
        learning_curve: Errors of the model trained on fewer rows.
        rows_by_source: Training rows by kind: values of `CycleSource`.
        boundary_accuracy_pct: Percent of requests that get the right step boundary, of those whose step is known.
        boundary_accuracy_without_work_pct: The same with zero API work.
        bursts: Periods outside the range of an admission model: the API process has a queue.
        skill: 1 - mae / baseline.mae.
    """

    unit: str
    n_features: int
    train: Metrics
    holdout: Metrics
    baseline: Metrics
    gradient_boosting: Metrics | None
    by_group: dict[str, Metrics] = field(default_factory=dict)
    by_phase: tuple[StepPhase, ...] = ()
    by_load: dict[str, Metrics] = field(default_factory=dict)
    held_out_equations: SummedRowErrors | None = None
    error_over_load: ErrorOverLoad | None = None
    load_extrapolation: LoadExtrapolation | None = None
    stretches: Metrics | None = None
    speed: SpeedVariation | None = None
    noise: MachineNoise | None = None
    candidates: tuple[Candidate, ...] = ()
    classifier: Classifier | None = None
    within_5_pct: float | None = None
    extrapolated_rows: int = 0
    extrapolated: dict[str, int] = field(default_factory=dict)
    prediction_intervals: tuple[PredictionInterval, ...] = ()
    interval_coverage_pct: float | None = None
    prefill_reach_pct: float | None = None
    collinearity: tuple[Collinearity, ...] = ()
    learning_curve: tuple[LearningPoint, ...] = ()
    rows_by_source: dict[str, int] = field(default_factory=dict)
    boundary_accuracy_pct: float | None = None
    boundary_accuracy_without_work_pct: float | None = None
    bursts: tuple[Burst, ...] = ()
    skill: float | None

    @property
    def is_negligible(self) -> bool:
        """Whether the model of a wait and a constant guess are both off by less than a millisecond on average: no use
        can tell.
        """
        errors = (self.holdout.mae, self.baseline.mae)
        return all(error is not None and error < NEGLIGIBLE_US for error in errors)


NEGLIGIBLE_US = 1_000.0
"""A latency of a request is never felt as this much longer or shorter."""


def is_negligible_wait(model: str, entry: Validation) -> bool:
    """Return whether a model is one of waits whose errors no use can tell: those of step times add up over a
    request.
    """
    return model.startswith("alpha.") and entry.is_negligible
