"""Everything that is fitted for one scope: which target beta has, which models there are, what is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl
from threadpoolctl import threadpool_limits

from tracefit.features import training
from tracefit.features.sets import (
    BUILT_IN,
    FREE_FEATURES,
    PRODUCTS,
    QUEUED_FEATURES,
    Feature,
    FeatureSet,
)
from tracefit.fit import candidates as forms
from tracefit.fit.boundary import FittedBoundary, fit_boundary
from tracefit.fit.candidates import SET_RULE, choose, try_features
from tracefit.fit.extrapolation import (
    LOAD_FEATURES,
    beyond_training,
    error_over_load,
    load_extrapolation,
    with_load,
)
from tracefit.fit.holdout import summed_holdout
from tracefit.fit.inputs import COVERED_SHARE, NON_NEGATIVE, BetaTarget, FitOptions, ScopeOptions
from tracefit.fit.latency import compose_latencies
from tracefit.fit.linear import Comparison, FeatureColumn, Regime
from tracefit.fit.phases import errors_by_phase
from tracefit.fit.results import (
    Candidate,
    DurationCover,
    FittedModel,
    FittedScope,
    Missing,
    Recipe,
    TargetChoice,
    TooFewRows,
)
from tracefit.fit.select import MAX_PRODUCT_VIF, MAX_VIF
from tracefit.fit.splits import request_frame, step_frame
from tracefit.fit.train import fit_regimes, mark_outliers
from tracefit.server.tracing import JOURNEY_FLAGS, STEP_FLAGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.fit.inputs import ScopeTables
    from tracefit.server.context import Scope

STEP_TIMES = "beta.cycle_time"

_REGIME_BY_STEP = pl.col("first_scheduled_step") > pl.col("queued_step") + 1


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_scope(
    scope: Scope, tables: ScopeTables, beta_sets: Sequence[FeatureSet], options: ScopeOptions
) -> FittedScope:
    """Fit beta and the three alpha models of one scope, as far as its data allow.

    One thread for linear algebra: its matrices have few columns, and threads that wait for each other cost more than
    they bring.

    Args:
        scope: The scope.
        tables: Its runs' tables.
        beta_sets: Feature sets for step times; of several, cross-validation chooses.
        options: How.
    """
    constants = training.constants_of(scope.context)
    cover = duration_cover(tables.timeline)
    models: list[FittedModel] = []
    missing: list[Missing] = []
    choice, beta = _fit_beta(scope, tables, cover, beta_sets, options)
    _sort_out(beta, models, missing)
    alphas = [
        _fit_alpha(tables, target, BUILT_IN[_ALPHA_SETS[target]], constants, options)
        for target in training.ALPHA_TARGETS
    ]
    for alpha in alphas:
        _sort_out(alpha, models, missing)
    alpha_frames = [a.fitted.rows for a in alphas if isinstance(a, FittedModel)]
    fitted_set = beta.feature_definitions if isinstance(beta, FittedModel) else None
    whole_steps = choice is not None and (choice.source == "clock" or (cover.share or 0.0) >= COVERED_SHARE)
    return FittedScope(
        scope=scope,
        tables=tables,
        cover=cover,
        choice=choice,
        models=tuple(models),
        missing=tuple(missing),
        alpha_rows=pl.concat(alpha_frames, how="diagonal_relaxed") if alpha_frames else None,
        beta_rows=beta.fitted.rows if isinstance(beta, FittedModel) else None,
        composed=compose_latencies(scope, tables, models, fitted_set, whole_steps=whole_steps),
        summed=summed_holdout(beta.fitted) if isinstance(beta, FittedModel) else None,
    )


def _sort_out(result: FittedModel | Missing, models: list[FittedModel], missing: list[Missing]) -> None:
    if isinstance(result, FittedModel):
        models.append(result)
    else:
        missing.append(result)


def duration_cover(timeline: pl.DataFrame) -> DurationCover:
    """Measure the share of busy time that step durations cover, over adjacent steps."""
    busy = timeline.filter((pl.col("cycle_source") == "adjacent") & ~pl.col("idle_after"))
    total = float(busy["cycle_us"].sum())
    if not busy.height or total <= 0:
        return DurationCover(None, None, None)
    medians = busy.select(pl.col("cycle_us").median(), pl.col("duration_us").cast(pl.Float64).median()).row(0)
    return DurationCover(float(busy["duration_us"].sum() or 0) / total, *medians)


def choose_target(cover: DurationCover, wanted: BetaTarget) -> TargetChoice:
    """Choose where step times come from: the durations where they are the step times, else the step clock."""
    if wanted == "duration":
        return TargetChoice("duration", "asked for with --beta-target duration")
    if wanted == "clock":
        return TargetChoice("clock", "asked for with --beta-target clock")
    if cover.share is None or cover.median_duration_us is None:
        return TargetChoice(
            "clock", "no two consecutive steps in the sample with a step.duration_us to compare"
        )
    medians = f"median cycle {cover.median_cycle_us:.0f} us, median step.duration_us {cover.median_duration_us:.0f} us"
    share = f"step.duration_us covers {100 * cover.share:.1f} % of busy time"
    if cover.share >= COVERED_SHARE:
        return TargetChoice("duration", f"{share}: durations are the step times ({medians})")
    return TargetChoice("clock", f"{share}: it is the time inside schedule(), not the step ({medians})")


def _fit_beta(
    scope: Scope,
    tables: ScopeTables,
    cover: DurationCover,
    sets: Sequence[FeatureSet],
    options: ScopeOptions,
) -> tuple[TargetChoice | None, FittedModel | Missing]:
    wanted = options.beta_target
    name = "beta.duration" if wanted == "duration" else STEP_TIMES
    if not tables.timeline.height:
        return None, Missing(name, "the traces hold no step events", f"start the server with {STEP_FLAGS}")
    choice = choose_target(cover, wanted)
    if scope.context.gpu is not None and len(sets) > 1:
        # With a GPU amounts of work are times: the roofline says the same of them.
        sets = [one for one in sets if one.name != "work_max"]
    timeline = training.with_roofline(tables.timeline, scope.context)
    constants = training.constants_of(scope.context)
    rows, load = with_load(step_frame(tables, timeline, _offered(sets), constants, choice.source))
    how = beta_options(options)
    chosen = _choose_set(rows, sets, how)
    recipe = Recipe((Regime("all", (), tuple(columns_of(chosen.features))),), how)
    result = fit_regimes(chosen.rows, list(recipe.regimes), recipe.options)
    if isinstance(result, TooFewRows):
        remedy = (
            f"raise --step-tracing-sample-rate: of {tables.sampled_steps} sampled steps few are consecutive"
        )
        return choice, Missing(name, f"step times: {result.reason}", remedy)
    definition, source = _beta_definition(choice, tables.lags)
    target = name.removeprefix("beta.")
    return choice, FittedModel(
        name,
        target,
        definition,
        source,
        result,
        chosen.features.name,
        recipe,
        notes=(*_choice_note(chosen), *beyond_training(result.terms, tables.timeline)),
        by_phase=errors_by_phase(result, tables.requests, how.eval_filter),
        candidates=chosen.candidates,
        feature_definitions=chosen.features,
        error_over_load=error_over_load(result, load, how),
        load_extrapolation=load_extrapolation(result, columns_of(chosen.features), load, how),
    )


def _choice_note(chosen: _ChosenSet) -> tuple[str, ...]:
    return (f"feature set {chosen.features.name} chosen: {SET_RULE}",) if chosen.candidates else ()


def beta_options(options: ScopeOptions) -> FitOptions:
    """Return how step times are fitted."""
    mixed = pl.col("has_prefill")
    # A mean over an interval is easier to predict than a step: the error of the model is its error on steps.
    single = pl.col("source") != "interval"
    return FitOptions(
        groups=(("decode_only", ~mixed), ("mixed", mixed)),
        eval_filter=single,
        reference=options.reference,
        # A step takes no less than nothing, whatever it carries.
        signs=options.signs(intercept=True),
    )


def _offered(sets: Sequence[FeatureSet]) -> FeatureSet:
    """Return the features of all sets once, those with a ratio to choose once for every ratio, and what measures load."""
    features: dict[str, Feature] = {}
    for one in sets:
        for feature in one.features:
            if not feature.is_tuned:
                features[feature.name] = feature
        for number, ratio in enumerate(one.ratios):
            for feature in one.at(ratio).features:
                if feature.name not in features:
                    features[_at(feature.name, number)] = replace(feature, name=_at(feature.name, number))
    return FeatureSet("offered", (*features.values(), *LOAD_FEATURES))


def _at(name: str, number: int) -> str:
    return f"{name}__{number}"


@dataclass(frozen=True, slots=True)
class _ChosenSet:
    """The features to fit, the training rows with exactly these, and what was tried."""

    features: FeatureSet
    rows: pl.DataFrame
    candidates: tuple[Candidate, ...] = ()


def _choose_set(rows: pl.DataFrame, sets: Sequence[FeatureSet], options: FitOptions) -> _ChosenSet:
    """Choose the feature set by the rule of `candidates`, on the training part alone. A set that was asked for is taken.

    Args:
        rows: Training frame with the features of `_offered`, and the load.
        sets: The candidates in order of preference.
        options: How the model is fitted.
    """
    # The same rows for all: a model of its own outliers would be judged without those that speak against it.
    first = _ratios(sets[0])[0]
    marked = mark_outliers(_taken(rows, first), columns_of(first.features), options)
    rows_judged = rows.with_columns(marked["excluded_because"])
    how = replace(options, drop_outliers=False)
    tuned = [_with_ratio(rows_judged, one, how) for one in sets]
    found = [try_features(_taken(rows_judged, one), one.name, columns_of(one.features), how) for one in tuned]
    tried = choose([c for c in found if c is not None]) if any(found) else ()
    name = next((c.name for c in tried if c.chosen), sets[0].name)
    winner = next(one for one in tuned if one.name == name)
    kept = _taken(rows, winner)
    unused = {f.name for f in _offered(sets).features} - set(winner.features.names)
    features = winner.features
    return _ChosenSet(features, kept.drop(unused & set(kept.columns)), tried if len(sets) > 1 else ())


@dataclass(frozen=True, slots=True)
class _TunedSet:
    """A set with its ratio chosen, and the number that its columns of that ratio carry."""

    features: FeatureSet
    number: int | None = None

    @property
    def name(self) -> str:
        return self.features.name


def _ratios(features: FeatureSet) -> list[_TunedSet]:
    """Return a set with each ratio it may have; itself where it has none."""
    tried = [_TunedSet(features.at(ratio), number) for number, ratio in enumerate(features.ratios)]
    return tried or [_TunedSet(features)]


def _with_ratio(rows: pl.DataFrame, features: FeatureSet, options: FitOptions) -> _TunedSet:
    """Choose the ratio of a set that has one: by the rule for candidates."""
    tried = _ratios(features)
    if len(tried) == 1:
        return tried[0]
    scores = []
    for one in tried:
        found = try_features(_taken(rows, one), one.name, columns_of(one.features), options, quick=True)
        scores.append(found.score if found else float("inf"))
    return tried[scores.index(min(scores))]


def _taken(rows: pl.DataFrame, one: _TunedSet) -> pl.DataFrame:
    """Give the columns of the chosen ratio the names of the features."""
    if one.number is None:
        return rows
    names = {_at(n, one.number): n for n in one.features.names if _at(n, one.number) in rows.columns}
    return rows.rename(names)


def _beta_definition(choice: TargetChoice, lags: Mapping[tuple[str, str], int]) -> tuple[str, str]:
    if choice.source == "duration":
        return "step.duration_us as the server stamps it", "duration"
    if any(lags.values()):
        ahead = "; scheduling runs a step ahead, so that a step's time is the cycle after its own start"
        return f"start of a step to start of the next, engine busy{ahead}", "step_clock"
    return "start of a step to start of the next, engine busy", "step_clock"


_ALPHA_SETS = {"queue_wait": "queue", "admission": "admission", "departure": "departure"}
_ALPHA_DEFINITIONS = {
    "queue_wait": "QUEUED to first SCHEDULED",
    "admission": "ARRIVED to QUEUED; includes the wait for the step in progress to end",
    "departure": "FINISHED to DEPARTED",
}


_WITHOUT_EVENTS = ("stock", "lifecycle")


def _is_told(requests: pl.DataFrame, target: str) -> bool:
    return bool(requests[training.ALPHA_TARGETS[target][0]].is_not_null().any())


def _fit_alpha(
    tables: ScopeTables,
    target: str,
    features: FeatureSet,
    constants: Mapping[str, float | None],
    options: ScopeOptions,
) -> FittedModel | Missing:
    name = f"alpha.{target}"
    if not tables.requests.height:
        return Missing(name, "the traces hold no journeys", f"start the server with {JOURNEY_FLAGS}")
    if (tables.requests["dialect"].is_in(_WITHOUT_EVENTS)).all() and not _is_told(tables.requests, target):
        return Missing(
            name, "the spans of these requests do not tell", f"start the server with {JOURNEY_FLAGS}"
        )
    rows = request_frame(tables, target, features, constants)
    if target == "queue_wait":
        return _fit_wait(rows, name, features, options, exact=tables.queue is not None)
    how = FitOptions(
        # A request whose API work ran past a boundary waits a whole step more: the rule, not an outlier.
        drop_outliers=target != "admission",
        reference=options.reference,
        # Outputs to work through can only add to a departure; the load a request comes in may well take from others.
        signs=NON_NEGATIVE if target == "departure" else options.signs(),
    )
    recipe = Recipe((Regime("all", (), tuple(columns_of(features))),), how)
    result = fit_regimes(rows, list(recipe.regimes), how)
    if isinstance(result, TooFewRows):
        return Missing(name, f"requests with both events: {result.reason}", "trace more requests")
    boundary: FittedBoundary | None = None
    tried: tuple[Candidate, ...] = ()
    if target == "admission":
        tried = _admission_forms(rows, recipe, tables.timeline)
        if not any(c.chosen and c.name == forms.LINE for c in tried):
            boundary = fit_boundary(result, tables.timeline)
    return FittedModel(
        name,
        target,
        _ALPHA_DEFINITIONS[target] if boundary or target != "admission" else _QUEUED_AT_ONCE,
        "journey, step clock" if boundary else "journey",
        result,
        features.name,
        recipe,
        notes=(*(_BOUNDARY_NOTES if boundary else ()), *_form_note(tried)),
        boundary=boundary,
        candidates=tried,
    )


def _admission_forms(rows: pl.DataFrame, recipe: Recipe, timeline: pl.DataFrame) -> tuple[Candidate, ...]:
    """Hold the step boundary after the API work against a plain line; empty where there is but one to choose."""
    inner, regimes = forms.inner_rows(rows), list(recipe.regimes)
    found = (
        forms.try_boundary(inner, regimes, recipe.options, timeline),
        forms.try_regimes(inner, forms.LINE, regimes, recipe.options),
    )
    return _one_of(*found)


def _one_of(lawful: Candidate | None, other: Candidate | None) -> tuple[Candidate, ...]:
    return forms.choose_form(lawful, other) if lawful is not None and other is not None else ()


def _form_note(tried: tuple[Candidate, ...]) -> tuple[str, ...]:
    return tuple(f"form {c.name} chosen: {c.reason} ({forms.FORM_RULE})" for c in tried if c.chosen)


_QUEUED_AT_ONCE = "ARRIVED to QUEUED"

_BOUNDARY_NOTES = (
    "work is the API process's own time: what a consumer that simulates step boundaries itself needs",
    "admission = time to the first step start at or after the end of the work, plus offset; to that end itself when idle",
    "work on a request begins when it arrives, or when the work on the one before it ends: one after the other",
    "without_clock is the mean admission, the wait for the boundary included: not to be added to simulated boundaries",
)

SOMEONE_WAITS = (
    Comparison("waiting_depth", ">", value=0.0),
    Comparison("max_num_seqs", "<=", feature2="running_depth"),
)
"""What a sampled step can tell of `NO_CAPACITY`: the step left a request waiting, or no slot."""

NO_CAPACITY = (
    Comparison("free_slots", "<=", value=0.0),
    Comparison("free_tokens", "<=", value=0.0),
    Comparison("block_demand", ">", feature2="kv_blocks_free"),
)
"""A request is left waiting by the next scheduling pass when slots, token budget or KV blocks do not last for it."""

_WAIT_NOTES = (
    "free_slots = max_num_seqs - running requests - requests waiting ahead",
    "free_tokens = max_num_batched_tokens - running requests - their prompt tokens still to compute - tokens_ahead",
    "tokens_ahead, outputs_ahead = tokens to compute, and output tokens allowed, of the requests waiting ahead",
    "block_demand = KV blocks of the prompts waiting ahead and of the request's own prompt",
    "kv_blocks_free = free KV blocks when the request is queued",
    "running_remaining_tokens = output tokens the running requests may still produce (by max_tokens)",
)


def _fit_wait(
    rows: pl.DataFrame, name: str, features: FeatureSet, options: ScopeOptions, *, exact: bool
) -> FittedModel | Missing:
    """Fit the wait in the queue: two regimes, on its exact state or on what the latest sampled step tells of it."""
    groups = (("queued", _REGIME_BY_STEP), ("free", ~_REGIME_BY_STEP))
    # A queue wait of seconds among waits of 0.2 ms is not an outlier, it is what the model is for.
    how = FitOptions(
        drop_outliers=False,
        groups=groups,
        label=_REGIME_BY_STEP,
        reference=options.reference,
        signs=options.signs(),
    )
    columns = columns_of(features)
    if exact:
        ahead = [c for c in columns if c.name in QUEUED_FEATURES]
        here = [c for c in columns if c.name in FREE_FEATURES]
        regimes = [Regime("queued", NO_CAPACITY, tuple(ahead)), Regime("free", (), tuple(here))]
        source = "journey, exact queue state"
    else:
        regimes = [Regime("queued", SOMEONE_WAITS, tuple(columns)), Regime("free", (), tuple(columns))]
        source = "journey, queue state of the latest sampled step"
    one_line = [Regime("all", (), tuple(columns))]
    inner = forms.inner_rows(rows)
    found = (
        forms.try_regimes(inner, forms.REGIMES, regimes, how),
        forms.try_regimes(inner, forms.LINE, one_line, how),
    )
    tried = _one_of(*found)
    chosen = one_line if any(c.chosen and c.name == forms.LINE for c in tried) else regimes
    result = fit_regimes(rows, chosen, how)
    if isinstance(result, TooFewRows):
        return Missing(name, f"requests with both events: {result.reason}", "trace more requests")
    return FittedModel(
        name,
        "queue_wait",
        _ALPHA_DEFINITIONS["queue_wait"],
        source,
        result,
        features.name,
        Recipe(tuple(chosen), how),
        notes=(*(_WAIT_NOTES if exact else ()), *_form_note(tried)),
        candidates=tried,
    )


def columns_of(features: FeatureSet) -> list[FeatureColumn]:
    """Return the features of a set as candidates for a fit."""
    loose = {f.name for f in PRODUCTS}
    return [
        FeatureColumn(
            f.name, f.coefficient_unit, f.formula, MAX_PRODUCT_VIF if f.name in loose else MAX_VIF, f.sign
        )
        for f in features.features
    ]
