"""What fits return: models with the rows they were fitted on, and everything of one scope.

Their plain parts, which files publish as they are, are in `results`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit.fit.results import (
    Burst,
    Candidate,
    ComposedLatencies,
    DurationCover,
    ErrorOverLoad,
    FeatureLeftOut,
    LoadExtrapolation,
    Missing,
    Overload,
    PredictionInterval,
    StepPhase,
    SummedTime,
    TargetChoice,
    Validation,
)

if TYPE_CHECKING:
    import polars as pl

    from tracefit.features.sets import FeatureSet
    from tracefit.fit.inputs import FitOptions, ScopeTables
    from tracefit.fit.linear import FittedRegime, FittedTerm, Regime
    from tracefit.server.context import ModelScope


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A fitted model with its validation: one part, or one per regime, the first whose condition holds speaking."""

    regimes: tuple[FittedRegime, ...]
    huber: float
    rows_train: int
    rows_used: int
    rows_holdout: int
    validation: Validation
    rows: pl.DataFrame
    """The training frame with `excluded_reason` as the fit left it."""

    @property
    def terms(self) -> tuple[FittedTerm, ...]:
        """Terms of all parts."""
        return tuple(t for part in self.regimes for t in part.terms)

    @property
    def features_left_out(self) -> tuple[FeatureLeftOut, ...]:
        """Features left out of all parts; with several, the regime's name leads the reason."""
        many = len(self.regimes) > 1
        return tuple(
            FeatureLeftOut(x.feature, f"{part.regime.name}: {x.reason}" if many else x.reason)
            for part in self.regimes
            for x in part.features_left_out
        )


@dataclass(frozen=True, slots=True)
class TooFewRows:
    """Why nothing was fitted."""

    reason: str
    rows: pl.DataFrame


@dataclass(frozen=True, slots=True)
class FittedBoundary:
    """API work in us (constant and per prompt token), the stamp's offset from the boundary, and how well it does.

    Attributes:
        work_us: Constant API work.
        work_us_per_prompt_token: API work per prompt token; 0 where the data cannot tell.
        offset_us: QUEUED less the step start it comes before.
        residual_us: What is left of a step in progress at any time of it, on the average: E[c^2] / (2 E[c]) of cycles c.
        busy_share: Share of the time in which a step is in progress.
        boundary_accuracy_pct: Held-out requests in a known step that get the right boundary, in percent.
        boundary_accuracy_without_work_pct: The same with zero API work.
        rows_with_clock: Held-out requests whose boundary the step clock knows.
        without_clock: The linear model for consumers without a step clock, and its own validation.
    """

    work_us: float
    work_us_per_prompt_token: float
    offset_us: float
    residual_us: float
    busy_share: float
    boundary_accuracy_pct: float | None
    boundary_accuracy_without_work_pct: float | None
    rows_with_clock: int
    without_clock: LinearFit
    validation: Validation
    """Errors with the clock; `by` holds those without it."""
    prediction_interval: PredictionInterval
    """Prediction interval with the clock, told by the training rows: three numbers do not fit themselves to their noise."""

    bursts: tuple[Burst, ...]
    """Stretches in which requests queue in front of the API process: outside the range of what was fitted."""

    @property
    def expected_wait_us(self) -> float:
        """Mean time from the end of the API work to QUEUED: nothing while the engine is idle."""
        return self.busy_share * (self.residual_us + self.offset_us)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to fit anew on other rows of the same kind."""

    regimes: tuple[Regime, ...]
    options: FitOptions


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A fitted model under its published name."""

    name: str
    target: str
    definition: str
    source: str
    fitted: LinearFit
    feature_set: str
    recipe: Recipe
    notes: tuple[str, ...] = ()
    by_phase: tuple[StepPhase, ...] = ()
    """Errors of step times in each workload phase."""
    candidates: tuple[Candidate, ...] = ()
    """Every form that was tried, where one was chosen."""
    feature_definitions: FeatureSet | None = None
    """Of step times: the features the model was offered, ratios chosen."""
    error_over_load: ErrorOverLoad | None = None
    load_extrapolation: LoadExtrapolation | None = None
    boundary: FittedBoundary | None = None
    """With it the model is API work and the step clock; `fitted` is what to use without a clock."""

    @property
    def validation(self) -> Validation:
        """Errors of the model in its published form."""
        return self.boundary.validation if self.boundary else self.fitted.validation


@dataclass(frozen=True, slots=True)
class FittedScope:
    """All results of one scope."""

    scope: ModelScope
    tables: ScopeTables
    cover: DurationCover
    choice: TargetChoice | None
    models: tuple[FittedModel, ...]
    missing: tuple[Missing, ...]
    alpha_rows: pl.DataFrame | None
    beta_rows: pl.DataFrame | None
    composed: ComposedLatencies
    summed: SummedTime | None
    """Step times of beta's hold-out, summed."""
    notes: tuple[str, ...] = field(default=())
    overloads: tuple[Overload, ...] = ()
    """Overloaded runs of the scope; `tables` hold those of them that were trained on."""
