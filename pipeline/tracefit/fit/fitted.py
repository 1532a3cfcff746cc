"""The objects that fits return: fitted models together with the rows they were fitted on, and all results of one scope.

They hold data frames and stay inside the process. Their plain fields, which files publish as they are, are in `results`.
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
    LoadExtrapolation,
    Missing,
    OmittedFeature,
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
    from tracefit.fit.linear import FittedRegime, FittedTerm, RegimeRows
    from tracefit.server.context import ModelScope


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A fitted linear model with its validation: one line, or one per regime; the first regime whose condition holds predicts."""

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
        """Terms of all regimes."""
        return tuple(t for regime in self.regimes for t in regime.terms)

    @property
    def features_left_out(self) -> tuple[OmittedFeature, ...]:
        """Features left out of the regimes; with several regimes each reason starts with the regime's name."""
        many = len(self.regimes) > 1
        return tuple(
            OmittedFeature(x.feature, f"{fitted.regime.name}: {x.reason}" if many else x.reason)
            for fitted in self.regimes
            for x in fitted.features_left_out
        )


@dataclass(frozen=True, slots=True)
class TooFewRows:
    """Why nothing was fitted."""

    reason: str
    rows: pl.DataFrame


@dataclass(frozen=True, slots=True)
class FittedBoundary:
    """A fitted admission model with a step clock: API work, offset of the stamp from the boundary, and their validation.

    Attributes:
        work_us: Constant API work.
        work_us_per_prompt_token: API work per prompt token; 0 where the data do not determine it.
        offset_us: QUEUED minus the step start it belongs to.
        residual_us: Mean time left of the step in progress at a random moment: E[c^2] / (2 E[c]) of cycles c.
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
    """Errors with the clock; `by_group` holds those without it."""
    prediction_interval: PredictionInterval
    """Prediction interval with the clock, from the errors on the training rows."""

    bursts: tuple[Burst, ...]
    """Periods in which requests queue in front of the API process: outside the range of the fit."""

    @property
    def expected_wait_us(self) -> float:
        """Mean time from the end of the API work to QUEUED: nothing while the engine is idle."""
        return self.busy_share * (self.residual_us + self.offset_us)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a fit, for fitting the same model on other rows."""

    regimes: tuple[RegimeRows, ...]
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
    """Every feature set or form that was tried, where several were."""
    feature_definitions: FeatureSet | None = None
    """For step times: the features the model was offered, with their ratios chosen."""
    error_over_load: ErrorOverLoad | None = None
    load_extrapolation: LoadExtrapolation | None = None
    boundary: FittedBoundary | None = None
    """Where given, the model is API work and the step clock, and `fitted` serves consumers without a clock."""

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
    """Sum of the step times of beta's hold-out."""
    notes: tuple[str, ...] = field(default=())
    overloads: tuple[Overload, ...] = ()
    """Overloaded runs of the scope; `tables` hold those that were trained on."""
