"""A model: an intercept and terms, in one of three forms, with the facts of the deployment that it holds for.

One line (`LinearModel`), one line per regime (`RegimesModel`), or API work followed by the wait for a step boundary
(`BoundaryModel`). The coefficient files have these types as they are: the order of the fields is the order of the keys,
and `Attributes` are the descriptions in `schemas/`. A file may come from anyone, so each type checks itself (`Strict`).
A field with a default may be absent in a file of an older version. Neither numpy nor polars is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tracefit.evaluator import (
    MAX_COMPARISONS,
    MAX_FORMULA_CHARS,
    MAX_NAME_CHARS,
    MAX_REGIMES,
    MAX_TERMS,
    NAME_PATTERN,
    ROUNDING,
)
from tracefit.models import targets
from tracefit.models.validation import Metrics, Validation
from tracefit.server.documents import FiniteNumber, Scalar

Relation = Literal["<", "<=", ">", ">=", "=="]
Bounds = tuple[FiniteNumber, FiniteNumber]
Identifier = Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$", max_length=MAX_NAME_CHARS)]
Formula = Annotated[str, Field(max_length=MAX_FORMULA_CHARS)]


class Strict(BaseModel):
    """A part of a published file: immutable, finite numbers, no unknown keys."""

    # By name too: `schema` is `schema_` here, for pydantic's models have a method of that name.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True)


# -- a line -----------------------------------------------------------------------------------------------


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
    training_range: Bounds | None = Field(default=None, description="smallest and largest value in the training rows")
    formula: str | None = Field(
        default=None,
        max_length=MAX_FORMULA_CHARS,
        description="how the feature is computed from table columns and the model's definitions",
    )
    collinear_with: tuple[Identifier, ...] = Field(
        default=(),
        description=(
            "features left out since they go with this one in the training rows: the value may be a cost of theirs"
        ),
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


def _each_feature_once(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    if len({term.feature for term in terms}) != len(terms):
        raise ValueError("a feature has two terms")
    return terms


Terms = Annotated[tuple[Term, ...], Field(max_length=MAX_TERMS), AfterValidator(_each_feature_once)]


class Linear(Strict):
    """intercept + sum of value * feature, clipped at 0."""

    form: Literal["linear"] = "linear"
    intercept: Number
    terms: Terms


class Work(Strict):
    """A linear amount of work."""

    intercept: Number
    terms: Terms


# -- a regime ---------------------------------------------------------------------------------------------


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

    def text(self, name: Callable[[str], str] = str, number: Callable[[float | None], str] = str) -> str:
        """Write it: comparisons joined by `or` and `and`; `never` where none can hold, empty where it always holds."""

        def one(c: Comparison) -> str:
            return f"{name(c.feature)} {c.op} {name(c.feature2) if c.feature2 else number(c.value)}"

        if self.any is not None and not self.any:
            return NEVER
        sides = [(self.any, " or "), (self.all, " and ")]
        texts = [joint.join(map(one, comparisons)) for comparisons, joint in sides if comparisons]
        return " and ".join(f"({t})" for t in texts) if len(texts) > 1 else "".join(texts)


NO_CONDITION = Condition(all=())
NEVER = "never"


class Regime(Strict):
    """One regime of a two-regime model."""

    name: str
    when: Condition
    intercept: Number
    terms: Terms


def _each_name_once(regimes: tuple[Regime, ...]) -> tuple[Regime, ...]:
    if len({regime.name for regime in regimes}) != len(regimes):
        raise ValueError("two regimes have one name")
    return regimes


# -- where a model comes from, and what it holds for ------------------------------------------------------


class TargetFacts(Strict):
    """The quantity that a model predicts."""

    name: str | None = None
    unit: Literal["us"] = "us"
    definition: str
    source: str = Field(description="which evidence the target was measured from, e.g. step_clock or duration")


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


class Estimator(Strict):
    """How the numbers were fitted.

    Attributes:
        cv_mae: Cross-validated mean absolute error of the choice.
    """

    name: str
    penalty: str
    strength: float
    huber: float | None = None
    chosen_by: str
    cv_mae: float | None = None
    folds: int = 0


class TimeRange(Strict):
    """Times of one server's rows, ns on its own monotonic clock."""

    run_id: str
    server: str
    first_ns: int
    holdout_from_ns: int
    last_ns: int


class RunInput(Strict):
    """Content hashes of the inputs of one run's tables.

    Attributes:
        traces_sha256: Over the contents of the trace files, without their names and order.
        context_sha256: Over settings, config.json and GPU as in the `runs` table.
    """

    run_id: str
    traces_sha256: str
    context_sha256: str


class Training(Strict):
    """Training data of the model.

    Attributes:
        rows: Rows of the training part.
        exclusions: Rows left out of both parts, by reason.
        inputs_sha256: SHA-256 over the contents of the trace files.
    """

    runs: tuple[str, ...]
    rows: int
    rows_used: int
    rows_holdout: int
    exclusions: dict[str, int]
    time_range: tuple[TimeRange, ...]
    inputs_sha256: str
    inputs: tuple[RunInput, ...] = ()


class PromptSteps(Strict):
    """The mean of a group of steps that compute prompts.

    Attributes:
        tokens: Prompt tokens of a step.
        prompts: Requests with these prompt tokens.
    """

    tokens: float
    prompts: float


class Workload(Strict):
    """The mean request of the training part; the other requests of a prediction are assumed to be like it.

    Attributes:
        cached_prompt_tokens: Prompt tokens in the prefix cache; 0 if unknown.
        max_tokens: Output tokens allowed; null if unknown.
        running_context_tokens: Tokens in the cache of a running request, mean over the steps that requests run in.
        running_remaining_tokens: Output tokens that a running request may still generate, mean over the same steps.
        prompt_steps: Steps that compute prompts, in groups of equal size from few tokens to many; empty if unknown.
    """

    requests: int
    prompt_tokens: float
    cached_prompt_tokens: float
    output_tokens: float
    max_tokens: float | None
    running_context_tokens: float | None = None
    running_remaining_tokens: float | None = None
    prompt_steps: tuple[PromptSteps, ...] = ()


class DeploymentFacts(Strict):
    """Model, GPU and settings the model is valid for; nothing in `assumed` was stated by any input.

    Attributes:
        workload: The mean request; null if no journeys of requests are traced.
        input_ranges: Smallest and largest value in training of the inputs that describe a step, and a request on
            arrival.
    """

    model: str | None
    gpu: str | None
    architecture: dict[str, Scalar]
    hardware: dict[str, Scalar]
    settings: dict[str, Scalar]
    assumed: tuple[str, ...] = ()
    workload: Workload | None = None
    input_ranges: dict[Literal["step", "request"], dict[str, tuple[float, float]]] = Field(default_factory=dict)


# -- a model ----------------------------------------------------------------------------------------------


ModelOrigin = Literal["fitted", "transferred", "calibrated"]
"""Where a model's numbers come from: fitted to traces of its deployment, computed by a law from those of others, or
both."""


TransferKind = Literal["tensor_parallel", "model", "gpu", "model_and_gpu"]
"""Property of a server that none of those has that a law was fitted on."""


class LawCoefficient(Strict):
    """A coefficient of a law, which means the same on every server.

    Attributes:
        feature: The term.
        unit: Unit of the coefficient: 1 for a time at rated speed, where it is one over an efficiency.
        part: The sum that the term is in: the time is always + max(memory, compute), or, in a step with prompts, launch
            if that is longer.
        low: Least value allowed.
        high: Largest value allowed; null without a limit.
        prior: Value expected before any step of the sources is seen: that of physics, or of a law of other servers.
        left_out_range: Its values over the laws fitted without one of the sources; null without such laws.
    """

    feature: Identifier
    unit: str
    value: FiniteNumber
    part: Literal["always", "memory", "compute", "launch"]
    low: FiniteNumber
    high: FiniteNumber | None
    prior: FiniteNumber
    left_out_range: tuple[FiniteNumber, FiniteNumber] | None = None


class CalibrationFacts(Strict):
    """Steps of the server itself that a transferred law was drawn to.

    Attributes:
        runs: Their runs.
        steps: Steps that count.
        left_out: Steps that do not, by reason.
        used: Whether the law was drawn to them: blocks of them that were left out are predicted better so.
        before: Errors of the transferred law on the steps.
        after: Errors of calibrated laws on the blocks that each was not fitted on.
        own_mape_pct: Mean error of an own fit on the last part of the steps, which it was not fitted on; null where
            none was tried.
        own_after_mape_pct: Mean error of the calibrated law on the same part; null with it.
    """

    runs: tuple[str, ...]
    steps: int
    left_out: dict[str, int]
    used: bool
    before: Metrics
    after: Metrics
    own_mape_pct: float | None = None
    own_after_mape_pct: float | None = None


class Transfer(Strict):
    """How a model follows from other deployments.

    Attributes:
        kind: Property of the server that no source has.
        sources: Deployments that the law was fitted on, or, for a model of requests, the one it is borrowed from.
        prior_sources: Deployments less like the server, on which the priors of the law were found; empty where these
            are the ones of physics.
        law: The coefficients; empty for a borrowed model.
        folds: Groups of sources that were left out in turn to measure the errors.
        p90_ape_pct: Phase to the error in percent that nine of ten steps of a left-out server keep to.
        sd_pct: Standard deviation of the mean step time of such a server about the predicted one, in percent.
        coverage_pct: Percent of the steps of the left-out servers within the interval that the others gave; null
            without folds.
        tested: Whether servers left out of the sources show the errors; if not, the interval is the widest known.
        has_prompts: Whether any source has steps with prompts: without them their coefficients are the priors.
        calibration: Steps of the server itself; null without any.
    """

    kind: TransferKind
    sources: tuple[str, ...]
    prior_sources: tuple[str, ...] = ()
    law: tuple[LawCoefficient, ...] = ()
    folds: int = 0
    p90_ape_pct: dict[str, float] = Field(default_factory=dict)
    sd_pct: float = 0.0
    coverage_pct: float | None = None
    tested: bool = True
    has_prompts: bool = True
    calibration: CalibrationFacts | None = None


class _ModelBase(Strict):
    name: str
    deployment_id: str | None = None
    origin: ModelOrigin = Field(
        default="fitted",
        description=(
            "fitted: to traces of the deployment; transferred: computed by a law from other deployments; "
            "calibrated: both"
        ),
    )
    transfer: Transfer | None = Field(
        default=None, description="where a model that is not fitted comes from, and its errors"
    )
    target: TargetFacts | None = None
    estimator: Estimator | None = None
    features_left_out: tuple[OmittedFeature, ...] = ()
    training: Training | None = None
    validation: Validation | None = None
    deployment: DeploymentFacts | None = None
    feature_set: str | None = Field(default=None, description="the declared features the model was offered")
    definitions: dict[Identifier, Formula] = Field(
        default_factory=dict,
        max_length=MAX_TERMS,
        description=(
            "names in formulas that are not table columns: a number, or a formula over columns and other names here"
        ),
    )
    notes: tuple[str, ...] = ()


class LinearModel(_ModelBase):
    """A linear model."""

    form: Literal["linear"] = "linear"
    intercept: Number
    terms: Terms


class RegimesModel(_ModelBase):
    """The first regime whose condition holds, then linear."""

    form: Literal["regimes"]
    regimes: Annotated[tuple[Regime, ...], Field(min_length=1, max_length=MAX_REGIMES), AfterValidator(_each_name_once)]


class Expectation(Linear):
    """Expected admission without step times: the work, plus the expected rest of a step in progress.

    Its intercept is the work's + busy_share * (residual + offset).

    Attributes:
        residual: Mean rest of a cycle c at a random time in it: E[c^2] / (2 E[c]).
        busy_share: Share of the time in which a step is in progress.
    """

    residual: Number
    busy_share: float = Field(ge=0, le=1)


class BoundaryModel(_ModelBase):
    """The first step start at or after the end of the work, plus offset; that end itself when the engine is idle.

    Attributes:
        queue: When work on an event begins: `one_at_a_time`, when it comes or when the work on the event before it on
            the same server ends, whichever is later; null, when it comes.
    """

    form: Literal["boundary"]
    boundary: Literal["step_start"]
    queue: Literal["one_at_a_time"] | None = None
    work: Work
    offset: Number
    without_clock: Linear
    expectation: Expectation | None = None

    @property
    def work_us_per_prompt_token(self) -> float:
        """API work per prompt token; 0 if the work has no such term."""
        return sum(term.value for term in self.work.terms if term.feature == "prompt_tokens")


# Discriminated by `form`, so that a damaged model reports only errors of its own form.
Model = Annotated[LinearModel | RegimesModel | BoundaryModel, Field(discriminator="form")]
LinearForm = LinearModel | Linear | Work | Regime
"""Any type with an intercept and a sum of terms."""

STEP_MODELS = tuple(target.model for target in targets.STEP_TARGETS)
"""Names of the models of step times, the preferred one first."""


class NotFitted(Strict):
    """A model that could not be fitted, why, and what would give the data."""

    name: str
    deployment_id: str
    reason: str
    remedy: str | None = None


class RequestRange(Strict):
    """Range of measured latencies around the predictions from a request's lengths, its batch and the queue.

    `low_ratio` and `high_ratio` are the 5th and 95th percentile of measured / predicted over the requests of
    the training part. Both are null unless 85 % of the later, held-out requests lie between the two. Every
    request is described by the facts at its arrival, and only requests inside the training range of the
    models count for the range.

    Attributes:
        requests: Requests of the training part, inside the training range.
        requests_held_out: Held-out requests, inside the training range.
        coverage_pct: Percent of these held-out requests that are in the range.
        holdout: Errors of `predict` on all held-out requests.
        baseline: Errors of the training median on the same held-out requests.
        gradient_boosting: Errors of gradient boosting on the same inputs and requests.
        reason: Why the range is missing.
    """

    deployment_id: str
    latency: Literal["ttft", "itl", "e2e"]
    low_ratio: float | None
    high_ratio: float | None
    requests: int
    requests_held_out: int | None = None
    coverage_pct: float | None
    holdout: Metrics
    baseline: Metrics
    gradient_boosting: Metrics | None = None
    reason: str | None = None


# -- the linear forms of a model ---------------------------------------------------------------------------


def linear_forms(model: Model | LinearForm) -> dict[str, LinearForm]:
    """Return the linear forms of a model by name: one per regime, or `work` and `without_clock`, or `line`."""
    if isinstance(model, RegimesModel):
        return {regime.name: regime for regime in model.regimes}
    if isinstance(model, BoundaryModel):
        return {"work": model.work, "without_clock": model.without_clock}
    return {"line": model}


def main_forms(model: Model) -> dict[str, LinearForm]:
    """Return the linear forms of predictions with a step clock: all except `without_clock`."""
    forms = linear_forms(model)
    return {"work": forms["work"]} if isinstance(model, BoundaryModel) else forms


def terms_of(model: Model) -> list[Term]:
    """Return the terms of all linear forms of a model, including those for consumers without a step clock."""
    return [term for form in linear_forms(model).values() for term in form.terms]


_CLOCK_TEXTS = {"work": "step starts known", "without_clock": "step starts unknown"}


def numbers_of(model: Model) -> dict[tuple[str, str, str], Number | Term]:
    """Return the numbers of a model by linear form, name and unit."""
    numbers: dict[tuple[str, str, str], Number | Term] = {}
    for part, form in linear_forms(model).items():
        numbers[part, "intercept", "us"] = form.intercept
        numbers |= {(part, term.feature, term.unit): term for term in form.terms}
        # The offset is added after the boundary, so it is not a term of the work.
        if isinstance(model, BoundaryModel) and part == "work":
            numbers[part, "offset", "us"] = model.offset
    return numbers


def coefficient_rows(model: Model) -> Iterator[dict[str, object]]:
    """Yield one row per number of a model: its linear form and condition, name, unit, value, interval and training
    range.
    """
    forms = linear_forms(model)
    for (part, name, unit), number in numbers_of(model).items():
        form, term = forms[part], number if isinstance(number, Term) else None
        bounds = (number.ci95, term and term.training_range)
        low, high, least, most = (end for pair in bounds for end in pair or (None, None))
        yield {
            "deployment_id": model.deployment_id,
            "model": model.name,
            "part": part,
            "condition": form.when.text() if isinstance(form, Regime) else _CLOCK_TEXTS.get(part),
            "term": name,
            "unit": unit,
            "value": number.value,
            "ci95_low": low,
            "ci95_high": high,
            "training_min": least,
            "training_max": most,
            "formula": term and term.formula,
        }
