"""Arguments and results of fits: options and the tables of one deployment; linear models, and all fitted models of a
deployment.

A linear model is one line, or one line per regime: a regime is a condition on the features and a line, and the
first regime whose condition holds predicts a row. `RegimeRows` describes one before the fit, `FittedRegime` after it.
These objects hold data frames and stay inside the process: `results` has the types that files publish.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import polars as pl

from tracefit.fit.results import Missing
from tracefit.models.columns import held, summed
from tracefit.models.schema import NO_CONDITION, Term
from tracefit.models.targets import CYCLE_TIME, DURATION_TARGET, StepTarget
from tracefit.models.validation import NO_INTERVAL
from tracefit.server.settings import without_attribute
from tracefit.tables.points import points_stated
from tracefit.tables.runs import are_stock
from tracefit.text import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.estimators import Penalty, Positive
    from tracefit.fit.results import (
        ComposedLatencies,
        Overload,
        PenaltyChoice,
        StepTimeSource,
        SummedTime,
    )
    from tracefit.models.schema import (
        Condition,
        Number,
        OmittedFeature,
        TargetFacts,
    )
    from tracefit.models.validation import Collinearity, PredictionInterval, Validation
    from tracefit.options import BetaTarget
    from tracefit.server.context import Deployment
    from tracefit.statistics import Flags, Integers, Matrix, Vector


# -- arguments -------------------------------------------------------------------------------------------

PENALTIES: tuple[tuple[Penalty, float], ...] = (
    *(("ridge", s) for s in (1e-8, 1e-4, 1e-3, 1e-2)),
    *(("lasso", s) for s in (1e-3, 1e-2, 3e-2)),
    *(("elastic_net", s) for s in (1e-3, 1e-2)),
)
"""Penalties and strengths that are compared, in order of preference."""


class Signs(msgspec.Struct, frozen=True):
    """Which signs are in force in a fit.

    Attributes:
        slopes: Which coefficients cannot be negative: none, those whose feature declares it, or all.
        intercept: Whether the intercept cannot be negative.
    """

    slopes: Literal["any", "declared", "non_negative"] = "declared"
    intercept: bool = False

    def of(self, features: Sequence[Feature]) -> Positive:
        """Return which coefficients cannot be negative in a model of these features, the intercept last."""
        if self.slopes == "declared":
            return (*(f.sign == "non_negative" for f in features), self.intercept)
        return (*(self.slopes == "non_negative" for _ in features), self.intercept)


ANY_SIGN = Signs("any")
NON_NEGATIVE = Signs("non_negative", intercept=True)


class FitOptions(msgspec.Struct, frozen=True):
    """Options for fitting one target.

    Attributes:
        drop_outliers: Leave outliers out of the training rows. Off for a target whose tail is the signal.
        groups: Name to condition: hold-out errors are also given for these rows.
        label: True value of the first regime's condition, where there are regimes.
        fill_unknown: The training median stands in for a feature that a held-out row lacks; if not, the row is left
            out.
        eval_filter: Held-out rows to measure the error on, when there are enough of them; all rows if not given.
        reference: Fit the gradient-boosted reference.
        only_error: Measure only the error on the held-out rows, as for a fit that is compared with others: there are no
            intervals, no reference and no learning curve.
        signs: Which coefficients cannot be negative.
        penalties: Penalties and strengths to choose from, in order of preference.
        relative: Minimise errors in proportion to the target.
    """

    drop_outliers: bool = True
    groups: tuple[tuple[str, pl.Expr], ...] = ()
    fill_unknown: bool = True
    eval_filter: pl.Expr | None = None
    label: pl.Expr | None = None
    reference: bool = True
    only_error: bool = False
    signs: Signs = ANY_SIGN
    penalties: tuple[tuple[Penalty, float], ...] = PENALTIES
    relative: bool = False


class DeploymentOptions(msgspec.Struct, frozen=True):
    """Options for fitting the models of a deployment.

    Attributes:
        beta_target: The step time to fit.
        positive: Allow no negative coefficient and no negative intercept in any model.
        any_sign: Allow any sign, also where a feature declares one.
        reference: Fit the gradient-boosted reference of every model too.
    """

    beta_target: BetaTarget = "auto"
    positive: bool = False
    any_sign: bool = False
    reference: bool = True

    @property
    def step_target(self) -> StepTarget:
        """The target of step times, by the option: durations that cover the busy time are cycle times by another
        clock.
        """
        return DURATION_TARGET if self.beta_target == "duration" else CYCLE_TIME

    def signs(self, *, intercept: bool = False) -> Signs:
        """Return the signs in force; `intercept` is for a target whose intercept cannot be negative."""
        if self.positive:
            return NON_NEGATIVE
        return ANY_SIGN if self.any_sign else Signs("declared", intercept=intercept)


class DeploymentTables(msgspec.Struct, frozen=True):
    """The tables of the runs of one deployment."""

    runs: pl.DataFrame
    timeline: pl.DataFrame
    sampled_steps: int
    requests: pl.DataFrame
    queue: pl.DataFrame | None
    """State of the engine when each request was queued; null where journeys are not complete."""
    counters: pl.DataFrame
    """run_id, server, epoch, first_step, last_step."""
    lags: Mapping[tuple[str, str], int]
    """(run_id, server) to steps that scheduling runs ahead of execution."""
    requeue_waits: pl.DataFrame
    """`timeline.requeue_waits`: the steps that a preempted request waited through."""
    clock_checks: pl.DataFrame
    """run_id, server, events, disagreeing: engine core events compared with the starts of their steps."""
    unknown_batches: tuple[str, ...] = ()
    """Why no step is known of servers that write a span per request and no events; see `timeline.unknown_batches`."""
    requests_written_by: tuple[str, ...] = ()
    """How the programs of its points of a benchmark write single requests."""

    @property
    def only_points(self) -> bool:
        """Whether it has points of a benchmark and nothing else."""
        return self.runs.height > 0 and points_stated(self.runs, only=True)

    def missing_of_points(self, name: str) -> Missing | None:
        """Return why a model is missing of a deployment that has only points of a benchmark; null for another one."""
        if not self.only_points:
            return None
        writers = f", as {in_words(self.requests_written_by)} writes them" if self.requests_written_by else ""
        remedy = f"record single requests{writers}, or compare these points with the predictions of a fitted deployment"
        return Missing(name, "points of a benchmark give no model of steps, nor of a request", remedy)

    @property
    def is_stock(self) -> bool:
        """See `are_stock`."""
        return are_stock(self.runs)

    def missing_attributes(self, events: str) -> tuple[str, ...]:
        """Return a sentence for each event, by a pattern of names, that lacks attributes: which, and the flags that
        give them.
        """
        missing = missing_attributes(self.runs).items()
        return tuple(without_attribute(event, names) for event, names in missing if re.fullmatch(events, event))


def missing_attributes(runs: pl.DataFrame) -> dict[str, tuple[str, ...]]:
    """Return event to the attributes that none of these events of a run has a usable value of, in name order."""
    missing: dict[str, set[str]] = {}
    # The column is JSON text of the run, the same in the row of each of its servers.
    for text in runs["missing_attributes"].drop_nulls().unique():
        for event, attributes in json.loads(text).items():
            missing.setdefault(event, set()).update(attributes)
    return {event: tuple(sorted(missing[event])) for event in sorted(missing)}


# -- results ---------------------------------------------------------------------------------------------


class RegimeRows(msgspec.Struct, frozen=True):
    """The rows of one linear model, those for which the condition holds, and the features it is offered."""

    name: str
    features: tuple[Feature, ...]
    when: Condition = NO_CONDITION
    """Condition on the rows that the earlier regimes leave."""


class FittedRegime(msgspec.Struct, frozen=True):
    """One linear model: the whole of a linear fit, or one regime of a fit by regimes."""

    regime: RegimeRows
    intercept: Number
    terms: tuple[Term, ...]
    features_left_out: tuple[OmittedFeature, ...]
    choice: PenaltyChoice
    rows_used: int
    collinearity: Collinearity
    prediction_interval: PredictionInterval = NO_INTERVAL
    signs: Signs = ANY_SIGN
    """The signs that were in force."""
    relative: bool = False
    """Whether errors in proportion to the target were minimised."""

    @property
    def least(self) -> float:
        """Smallest prediction, before clipping, over the box of the training ranges of all features."""
        return self.intercept.value + sum(min(t.value * end for end in t.limits) for t in self.terms)

    def predict(self, rows: pl.DataFrame) -> Vector:
        """Predict the rows of a training frame, clipped at 0; shape (n,)."""
        return np.maximum(summed(rows, self.intercept, self.terms), 0.0)


def predict_regimes(regimes: Sequence[FittedRegime], rows: pl.DataFrame) -> Vector:
    """Predict rows, each by the first regime whose condition holds; shape (n,)."""
    return np.choose(active_regime(regimes, rows), [regime.predict(rows) for regime in regimes])


def active_regime(regimes: Sequence[FittedRegime], rows: pl.DataFrame) -> Integers:
    """Return the index of the regime that predicts each row; shape (n,)."""
    # The condition of the last one holds for every row.
    return np.asarray(np.argmax([held(rows, r.regime.when) for r in regimes], axis=0))


FREE = "free"
"""Name of the regime of requests that wait for nothing; all others are left waiting."""


def which(rows: pl.DataFrame, condition: pl.Expr) -> Flags:
    """Return which rows a condition holds for, shape (n,); it does not hold where it is null."""
    return rows.with_columns(_holds=condition.fill_null(value=False))["_holds"].to_numpy().astype(bool)


def linear_terms(
    columns: Sequence[Feature],
    coefficients: Vector,
    x: Matrix,
) -> tuple[Term, ...]:
    """Return a term per coefficient that is not zero, with the range of its feature in the training rows `x`."""
    return tuple(
        Term(
            feature=column.name,
            unit=column.coefficient_unit,
            value=float(value),
            sign=column.sign,
            training_range=(float(values.min()), float(values.max())),
            formula=column.formula,
        )
        for column, value, values in zip(columns, coefficients, x.T, strict=True)
        if value != 0
    )


class LinearFit(msgspec.Struct, frozen=True):
    """A fitted linear model with its validation: one line, or one per regime; the first regime whose condition holds
    predicts.
    """

    regimes: tuple[FittedRegime, ...]
    rows_train: int
    rows_used: int
    rows_holdout: int
    validation: Validation
    rows: pl.DataFrame
    """The training frame with `excluded_reason` as the fit left it."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of all regimes."""
        return tuple(t for regime in self.regimes for t in regime.terms)

    @property
    def features_left_out(self) -> tuple[OmittedFeature, ...]:
        """Features left out of the regimes; with several regimes each reason starts with the regime's name."""
        if len(self.regimes) == 1:
            return self.regimes[0].features_left_out
        return tuple(
            replace(x, reason=f"{fitted.regime.name}: {x.reason}")
            for fitted in self.regimes
            for x in fitted.features_left_out
        )


class TooFewRows(msgspec.Struct, frozen=True):
    """Why nothing was fitted."""

    reason: str


class FittedBoundary(msgspec.Struct, frozen=True):
    """A fitted admission model with a step clock: API work, offset of the stamp from the boundary, and their
    validation.

    Attributes:
        work_us: Constant API work.
        work_us_per_prompt_token: API work per prompt token; 0 where the data do not determine it.
        offset_us: QUEUED minus the step start it belongs to.
        residual_us: Mean time left of the step in progress at a random moment: E[c^2] / (2 E[c]) of cycles c.
        busy_share: Share of the time in which a step is in progress.
        without_clock: The linear model for consumers without a step clock, and its own validation.
        validation: Errors with the clock; `by_group` holds those without it.
    """

    work_us: float
    work_us_per_prompt_token: float
    offset_us: float
    residual_us: float
    busy_share: float
    without_clock: LinearFit
    validation: Validation

    @property
    def expected_wait_us(self) -> float:
        """Mean time from the end of the API work to QUEUED: nothing while the engine is idle."""
        return self.busy_share * (self.residual_us + self.offset_us)


class FittedModel(msgspec.Struct, frozen=True):
    """A fitted model under its published name."""

    name: str
    target: TargetFacts
    fitted: LinearFit
    feature_set: str
    regimes: tuple[RegimeRows, ...]
    """With `options`, all that a fit of the same model on other rows needs."""
    options: FitOptions
    validation: Validation
    """Validation of the model in its published form."""
    notes: tuple[str, ...] = ()
    boundary: FittedBoundary | None = None
    """Where given, the model is API work and the step clock, and `fitted` serves consumers without a clock."""


class FittedDeployment(msgspec.Struct, frozen=True):
    """All results of one deployment."""

    deployment: Deployment
    tables: DeploymentTables
    source: StepTimeSource
    models: tuple[FittedModel, ...]
    missing: tuple[Missing, ...]
    alpha_rows: pl.DataFrame | None
    beta_rows: pl.DataFrame | None
    composed: ComposedLatencies
    summed: SummedTime | None
    """Sum of the step times of beta's hold-out."""
    overloads: tuple[Overload, ...] = ()
    """Overloaded runs of the deployment; `tables` hold those that were trained on."""
    notes: tuple[str, ...] = ()
    """Notes on the rows, such as which of many runs were taken."""


# -- columns of a training frame -----------------------------------------------------------------------


def matrix(rows: pl.DataFrame, names: Sequence[str]) -> Matrix:
    """Return columns as floats, shape (n, n_names); null is NaN."""
    if not names:
        return np.zeros((rows.height, 0))
    return np.array([rows[n].cast(pl.Float64).to_numpy() for n in names]).T


def target_of(rows: pl.DataFrame) -> Vector:
    """Return the column y as floats, shape (n,)."""
    return rows["y"].to_numpy().astype(np.float64)
