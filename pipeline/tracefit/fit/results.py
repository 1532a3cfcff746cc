"""Results of a fit: lines with their terms and conditions, error metrics, choices that were made, and models that are missing.

The modules of this room fill these types, and the coefficient and evaluation files publish them as they are: the order of
the fields is the order of the keys, and `Attributes` are the descriptions in `schemas/`. Types that are also read from files, which
anyone may have written, check themselves (`Strict`). A field with a default may be absent in a file of an older version.
Reading such a file and predicting a row from it need neither numpy nor polars: this module imports neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tracefit.evaluator import MAX_COMPARISONS, MAX_FORMULA_CHARS, MAX_NAME_CHARS, NAME, ROUNDING
from tracefit.features.expressions import Algebra, Operand, Truth
from tracefit.server.documents import FiniteNumber

if TYPE_CHECKING:
    import polars as pl

    from tracefit.fit.estimators import Penalty
    from tracefit.statistics import Vector


# -- a fitted line ---------------------------------------------------------------------------------------

Relation = Literal["<", "<=", ">", ">=", "=="]
Bounds = tuple[FiniteNumber, FiniteNumber]
Identifier = Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=MAX_NAME_CHARS)]


class Strict(BaseModel):
    """A part of a published file: immutable, finite numbers, no unknown keys."""

    # By name too: `schema` is `schema_` here, for pydantic's models have a method of that name.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class TargetFacts(Strict):
    """The quantity that a model predicts."""

    name: str | None = None
    unit: Literal["us"] = "us"
    definition: str
    source: str = Field(
        description="which evidence the target was measured from, e.g. step_clock or duration"
    )


class Number(Strict):
    """A fitted number in the target's unit."""

    value: FiniteNumber
    ci95: Bounds | None = Field(default=None, description="95 % interval; contains the value")

    @model_validator(mode="after")
    def _is_in_its_interval(self) -> Self:
        _check_interval(self.value, self.ci95)
        return self


class Term(Strict):
    """One addend: value times feature, both raw."""

    feature: Identifier
    unit: str = Field(description="unit of the value, e.g. us/token")
    value: FiniteNumber
    ci95: Bounds | None = None
    sign: Literal["non_negative"] | None = Field(
        default=None, description="what physics says of the value: no load can make it negative"
    )
    training_range: Bounds | None = Field(
        default=None, description="smallest and largest value in the training rows"
    )
    formula: str | None = Field(
        default=None,
        max_length=MAX_FORMULA_CHARS,
        description="how the feature is computed from table columns and the model's definitions",
    )
    collinear_with: tuple[Identifier, ...] = Field(
        default=(),
        description="features left out since they go with this one in the training rows: the value may be a cost of theirs",
    )

    @property
    def limits(self) -> Bounds:
        """The training range; without bounds where it is not known."""
        return self.training_range or (-math.inf, math.inf)

    @model_validator(mode="after")
    def _has_ordered_ranges(self) -> Self:
        _check_interval(self.value, self.ci95)
        if self.training_range is not None and self.training_range[0] > self.training_range[1]:
            raise ValueError(f"training_range of {self.feature} begins above its end")
        return self


def _check_interval(value: float, ci95: Bounds | None) -> None:
    if ci95 is None:
        return
    # Both were rounded to `files.DIGITS` digits, each by itself.
    room = ROUNDING * max(abs(value), abs(ci95[0]), abs(ci95[1]))
    if not ci95[0] - room <= value <= ci95[1] + room:
        raise ValueError(f"ci95 {list(ci95)} does not contain the value {value}")


def line(
    intercept: Number,
    terms: Iterable[Term],
    value_of: Callable[[str], Operand],
    algebra: Algebra[Operand, Any],
) -> Operand:
    """Return intercept + sum of value * feature, not clipped; unknown if a feature is, or the sum is not finite."""
    total = algebra.constant(intercept.value)
    for term in terms:
        addend = algebra.binary["*"](algebra.constant(term.value), value_of(term.feature))
        total = algebra.binary["+"](total, addend)
    return algebra.finite(total)


def line_expression(intercept: Number, terms: Iterable[Term]) -> pl.Expr:
    """Return `line` as a polars expression over columns."""
    import polars as pl

    from tracefit.features.columns import COLUMNS

    return line(intercept, terms, pl.col, COLUMNS)


def admitted_us(start_us: pl.Expr, done_us: pl.Expr, offset_us: float) -> pl.Expr:
    """Return the admission by the rule of the step boundary, in us after ARRIVED like both times; not below 0.

    Args:
        start_us: The first step start at or after the end of the API work; null if no step is waited for.
        done_us: That end.
        offset_us: QUEUED less the step start it comes before.
    """
    import polars as pl

    return pl.coalesce(start_us + offset_us, done_us).clip(lower_bound=0.0)


class Comparison(Strict):
    """A feature compared with a number or with another feature."""

    feature: Identifier
    op: Relation
    value: FiniteNumber | None = None
    feature2: Identifier | None = None

    @model_validator(mode="after")
    def _has_one_right_side(self) -> Self:
        if (self.value is None) == (self.feature2 is None):
            raise ValueError("a comparison needs either value or feature2")
        return self


class Condition(Strict):
    """True if any / all of the comparisons hold; an empty `any` is false, an empty `all` true; null does not hold."""

    any: tuple[Comparison, ...] | None = Field(default=None, max_length=MAX_COMPARISONS)
    all: tuple[Comparison, ...] | None = Field(default=None, max_length=MAX_COMPARISONS)

    @model_validator(mode="after")
    def _has_comparisons(self) -> Self:
        if self.any is None and self.all is None:
            raise ValueError("a condition needs any or all")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the comparisons."""
        compared = (*(self.any or ()), *(self.all or ()))
        return tuple(dict.fromkeys(n for c in compared for n in (c.feature, c.feature2) if n))

    def holds(self, value_of: Callable[[str], Operand], algebra: Algebra[Operand, Truth]) -> Truth:
        """Return whether it holds for the values of its names."""

        def one(c: Comparison) -> Truth:
            right = value_of(c.feature2) if c.feature2 else algebra.constant(c.value or 0.0)
            return algebra.compare(c.op, value_of(c.feature), right)

        either = [] if self.any is None else [algebra.some([one(c) for c in self.any])]
        return algebra.every([*either, *(one(c) for c in self.all or ())])

    def expression(self) -> pl.Expr:
        """Return it as a polars expression over columns, never null."""
        import polars as pl

        from tracefit.features.columns import COLUMNS

        return self.holds(pl.col, COLUMNS)

    def text(self, name: Callable[[str], str] = str, number: Callable[[float | None], str] = str) -> str:
        """Write it: comparisons joined by `or` and `and`; `never` where none can hold, empty where it always holds."""

        def one(c: Comparison) -> str:
            return f"{name(c.feature)} {c.op} {name(c.feature2) if c.feature2 else number(c.value)}"

        if self.any is not None and not self.any:
            return NEVER
        sides = [(self.any, " or "), (self.all, " and ")]
        texts = [joint.join(map(one, comparisons)) for comparisons, joint in sides if comparisons]
        return " and ".join(f"({t})" for t in texts) if len(texts) > 1 else "".join(texts)


ALWAYS = Condition(all=())
NEVER = "never"


# -- its validation --------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class OmittedFeature:
    """A feature that is not in the model, and why.

    Attributes:
        feature: Its name.
        reason: Why it is left out.
        training_range: Its smallest and largest value in the training rows; null where it was not known. The model says
            nothing of steps beyond it.
        collinear_with: The feature of the model that it goes with in the training rows.
    """

    feature: str
    reason: str
    training_range: tuple[float, float] | None = None
    collinear_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PenaltyChoice:
    """A penalty chosen by time-blocked cross-validation; `score` is its mean absolute error over the folds."""

    penalty: Penalty
    strength: float
    score: float
    folds: int


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
        beyond_mae: Error beyond it: fitted on the lower half of the load, evaluated on the upper; null where rows are too
            few.
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
        sd_pct: Standard deviation of a stretch's step times about the training part's mean, in percent, without what chance adds.
        fastest_pct: How much longer steps took in the fastest stretch than at the mean of the training part, in percent: below 0.
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
    """How much steps of equal batches differ although they ran near in time, as errors of a model that knows each batch's mean.

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
        noise: How much steps of equal batches differ, near in time, for a model of step times; null where few are equal.
        candidates: The candidates inside the training part, and the chosen one.
        classifier: How well the regime of a row is predicted, where there are regimes.
        within_5_pct: Percent of rows predicted within 5 %.
        extrapolated_rows: Rows with a feature outside the training range of their regime.
        extrapolated: The same by feature.
        prediction_intervals: Limits by regime.
        interval_coverage_pct: Percent of rows within their prediction interval.
        prefill_reach_pct: For a model of step times: the most prompt tokens of a step trained on, in percent of the tokens
            that a step may have.
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
    held_out_equations: EquationErrors | None = None
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
        """Whether the model of a wait and a constant guess are both off by less than a millisecond on average: no use can tell."""
        errors = (self.holdout.mae, self.baseline.mae)
        return all(error is not None and error < NEGLIGIBLE_US for error in errors)


NEGLIGIBLE_US = 1_000.0
"""A latency of a request is never felt as this much longer or shorter."""

TimeSource = Literal["clock", "duration"]

COVERED_SHARE = 0.8
"""Where `step.duration_us` covers at least this share of busy time, durations are the step times."""


@dataclass(frozen=True, slots=True)
class StepTimeSource:
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
    """Time that the engine was busy in the hold-out: step times summed, those of a server with few known steps scaled up to all.

    Three statements: the bias of the model, the change of the server's speed, and the change of its load.

    Attributes:
        predicted_us: Sum predicted.
        actual_us: Sum measured.
        bias_pct: Predicted minus measured sum, in percent of the measured one.
        bias_2sd_pct: Two standard deviations of bias_pct, by bootstrap over blocks of time.
        blocks: Number of blocks of time in the bootstrap.
        max_contribution_pct: Contribution of the step or interval with the largest error to bias_pct, in percentage
            points: large for a hiccup.
        speed_change_pct: How much longer steps of equal batches take in the hold-out than in the training part; null where
            too few batches are equal.
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
            that no coefficients mend. Where it is much smaller, the machine or the load has changed since the training part.
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


@dataclass(frozen=True, slots=True)
class ComposedLatencies:
    """Requests with every latency as measured and as composed of the models (`fit.latency`), or why they are missing."""

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


LeftOutKind = Literal["run", "model", "gpu", "deployment"]


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
        by_batch_size: Errors of step times of a constant per batch size: the median of the training rows with as many requests,
            or the nearest number; null for runs.
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


@dataclass(frozen=True, slots=True)
class AcrossResult:
    """Errors of every group that was left out in turn, and notes on groups that could not be left out or evaluated."""

    errors: tuple[LeftOutErrors, ...]
    notes: tuple[str, ...]
