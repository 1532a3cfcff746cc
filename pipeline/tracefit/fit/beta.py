"""Fit the step time (beta): choose its source, choose its feature set, then fit and evaluate the model.

The source is the step clock (start of a step to start of the next) unless `step.duration_us` turns out to cover the
time the engine is busy. Of several feature sets `SET_RULE` chooses one: each is fitted on one part of the training rows
and evaluated on the rest of them, so that the hold-out remains unused.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.features import training
from tracefit.features.law import with_law
from tracefit.features.sets import LAW_SET, POWER, WORK_MAX, FeatureSet
from tracefit.fit.estimators import FEW_ROUNDS
from tracefit.fit.fitted import (
    PENALTIES,
    DeploymentOptions,
    DeploymentTables,
    FitOptions,
    FittedModel,
    RegimeRows,
    TooFewRows,
    matrix,
)
from tracefit.fit.holdout import (
    LOAD,
    LOAD_FEATURES,
    beyond_load,
    beyond_training,
    error_by_stretch,
    error_over_load,
    errors_by_phase,
    load_extrapolation,
    mean_error,
    with_load,
)
from tracefit.fit.mixes import mixes
from tracefit.fit.noise import machine_noise
from tracefit.fit.results import COVERED_SHARE, Missing, StepTimeSource
from tracefit.fit.select import FOLDS, estimator
from tracefit.fit.speed import with_speed
from tracefit.fit.splits import PROMPT_FEATURES, counted_rows, mark_prefix_hits, step_frame
from tracefit.fit.train import TrainingRows, fit_regimes, mark_outliers
from tracefit.models.schema import TargetFacts
from tracefit.models.targets import CYCLE_TIME, DURATION_TARGET
from tracefit.models.validation import Candidate
from tracefit.server.settings import ALL_SPANS, NO_PREFIX_CACHE, SGLANG_STEPS, context_remedy, step_remedy
from tracefit.tables.dialects import SGLANG_DIALECT, STEP_EVENT
from tracefit.tables.schema import ENGINE
from tracefit.tables.sources import ADJACENT, REQUEST_SOURCE, SOURCES, CycleSource, is_one_step, names_of
from tracefit.timeline import is_at_recording_end

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.fitted import LinearFit
    from tracefit.fit.results import TimeSource
    from tracefit.options import BetaTarget
    from tracefit.server.context import Deployment, RunContext
    from tracefit.statistics import Vector


_EVENT_PATTERN = re.escape(STEP_EVENT)

COUNTED_NOTES = (
    (
        "steps are counted from the times of the requests: a row is an interval between two of them, its time the mean "
        "of its steps"
    ),
    "assumed: every request has a span; nothing contradicts it, and a tenth without one, or fewer, need not show",
)
"""Notes of a model that was fitted on steps counted from requests."""

_NO_HIT = "prefix-cache hits are not in the spans: every prompt token counts as computed"
_UNCERTAIN_HITS = (
    "prefix hits were seen in the times of prompts, and nothing says which tokens were found: the coefficient of a "
    f"prompt token is uncertain, too low for one that is computed as a whole; {NO_PREFIX_CACHE}"
)


RECORD_LONGER = (
    "record for longer under load, or let the log write fractions of seconds: %(created).6f in the "
    "format of a logging configuration"
)
"""Advice if a log gives too few intervals."""

_WITHOUT_GPU = {WORK_MAX.name, POWER.name}
"""Sets that compete only where no GPU is known."""

_AHEAD_NOTE = "scheduling runs a step ahead, so that a step's time is the cycle after its own start"

_ESTIMATED_CONTEXT = (
    "without journeys the context tokens of a step are estimated from its KV blocks in use: blocks that requests "
    "share count once, and earlier chunks of a prompt count as context"
)

_WITHOUT_CONTEXT = (
    "the log does not say how many tokens of context a step reads: the model goes by the batch, and by KV-cache "
    "usage if that helps"
)


def duration_cover(timeline: pl.DataFrame) -> StepTimeSource:
    """Measure the share of busy time that step durations cover; the target is not chosen yet."""
    busy = timeline.filter((pl.col("cycle_source") == ADJACENT.name) & ~pl.col("idle_after"))
    total = float(busy["cycle_us"].sum())
    if not busy.height or total <= 0:
        return StepTimeSource(None, None, None)
    medians = busy.select(pl.col("cycle_us").median(), pl.col("duration_us").cast(pl.Float64).median()).row(0)
    return StepTimeSource(float(busy["duration_us"].sum() or 0) / total, *medians)


def choose_target(
    cover: StepTimeSource, wanted: BetaTarget, sources: Collection[CycleSource]
) -> tuple[TimeSource, str]:
    """Return where step times come from, and why: the durations where they cover the steps, otherwise the step
    clock.
    """
    if wanted != "auto":
        return wanted, "asked for"
    if cover.duration_coverage is None or cover.median_duration_us is None:
        evidence = {
            "each record of a step has its time": any(source.is_stated for source in sources),
            "the server's log has a line for each step": any(source.is_stamped for source in sources),
            "steps are counted from the times of the requests": REQUEST_SOURCE in sources,
            "no two consecutive steps in the sample with a step.duration_us to compare": True,
        }
        return "clock", next(why for why, applies in evidence.items() if applies)
    medians = f"median cycle {cover.median_cycle_us:.0f} us, median step.duration_us {cover.median_duration_us:.0f} us"
    share = f"step.duration_us covers {100 * cover.duration_coverage:.1f} % of busy time"
    if cover.duration_coverage >= COVERED_SHARE:
        return "duration", f"{share}: durations are the step times ({medians})"
    return "clock", f"{share}: it is the time inside schedule(), not the step ({medians})"


def fit_step_times(
    deployment: Deployment, tables: DeploymentTables, sets: Sequence[FeatureSet], options: DeploymentOptions
) -> tuple[StepTimeSource, FittedModel | Missing]:
    """Fit the step times of a deployment; return their source, and the model or why it is missing."""
    cover, target, context = duration_cover(tables.timeline), options.step_target, deployment.context
    if missing := tables.missing_of_points(target.model):
        return cover, missing
    unknown = "; ".join(tables.unknown_batches)
    if not tables.timeline.height and unknown:
        return cover, Missing(target.model, "the batches of the steps are not known", unknown)
    if not tables.sampled_steps and not tables.timeline["cycle_us"].count():
        remedy = SGLANG_STEPS if SGLANG_DIALECT in tables.requests["dialect"] else step_remedy(stock=tables.is_stock)
        without = "; ".join(tables.missing_attributes(_EVENT_PATTERN)) or "the traces hold no step events"
        return cover, Missing(target.model, without, remedy)
    sources = {SOURCES[source] for source in tables.timeline["cycle_source"].drop_nulls().unique()}
    logged = any(source.is_stamped for source in sources)
    time_source, why = choose_target(cover, options.beta_target, sources)
    source = msgspec.structs.replace(cover, beta_target_source=time_source, beta_target_reason=why)
    if context.gpu is not None and len(sets) > 1:
        # With a known GPU the roofline terms are these amounts of work, scaled to times. Nor does a GPU get cheaper per
        # request in larger batches: it reads the weights once for all of them, and is then bound by compute.
        sets = [candidate for candidate in sets if candidate.name not in _WITHOUT_GPU]
    variants = [_variants(one) for one in sets]
    offered = {feature.name: feature for tried in variants for one in tried for feature in one.features}
    may_hit = REQUEST_SOURCE in sources and context.settings.enable_prefix_caching is not False
    helpers = (*LOAD_FEATURES, *(PROMPT_FEATURES if may_hit else ()))
    every = FeatureSet("offered", (*offered.values(), *helpers))
    timeline = _with_terms(tables.timeline, context, sets)
    rows = step_frame(tables, timeline, every, training.constants_of(context), time_source)
    rows, whole_prompts = mark_prefix_hits(rows) if may_hit else (rows, {})
    rows, load = with_load(rows)
    rows, speed = with_speed(rows, sets[0].features)
    noise = machine_noise(rows)
    features, rows, candidates, how = _choose_set(rows, variants, beta_options(options))
    regimes = (RegimeRows("all", features.features),)
    result = fit_regimes(rows, regimes, how)
    if isinstance(result, TooFewRows):
        too_few = "; ".join((f"step times: {result.reason}", *tables.missing_attributes(_EVENT_PATTERN)))
        few = f"of {tables.sampled_steps} sampled steps few are consecutive"
        more = ALL_SPANS if tables.is_stock else f"raise --step-tracing-sample-rate: {few}"
        remedy = RECORD_LONGER if logged else more
        return source, Missing(target.model, too_few, remedy)
    notes = [f"feature set {features.name} chosen: {SET_RULE}"] if candidates else []
    if REQUEST_SOURCE.name in rows["source"]:
        notes += _notes_on_counted_steps(tables, whole_prompts)
    if unknown:
        notes.append(f"servers without a known step are left out: {unknown}")
    notes += beyond_training(result.terms, tables.timeline)
    if tables.timeline["context_estimated"].any():
        notes.append(_ESTIMATED_CONTEXT)
    notes += _notes_on_records(sources, tables, deployment)
    notes += mixes(deployment, tables)
    if logged and not tables.timeline["context_tokens"].count():
        notes.append(f"{_WITHOUT_CONTEXT}; {_context_remedy(tables)}")
    budget = context.settings.max_num_batched_tokens
    model = FittedModel(
        target.model,
        _target_facts(target.name, time_source, sources, runs_ahead=any(tables.lags.values())),
        result,
        features.name,
        regimes,
        how,
        replace(
            result.validation,
            by_phase=errors_by_phase(result, tables.requests, how.eval_filter),
            error_over_load=error_over_load(result, load, how),
            load_extrapolation=load_extrapolation(result, features.features, load, how),
            speed=speed,
            noise=noise,
            stretches=error_by_stretch(result, features.features, how),
            candidates=candidates,
            # 0 where no prompt is sure to be computed as a whole.
            prefill_reach_pct=0.0
            if 0.0 in whole_prompts.values()
            else _prefill_reach_pct(result, tables.timeline, budget),
        ),
        notes=tuple(notes),
    )
    return source, model


def _with_terms(timeline: pl.DataFrame, context: RunContext, sets: Sequence[FeatureSet]) -> pl.DataFrame:
    """Add the columns that the formulas of the sets need."""
    timeline = training.with_roofline(timeline, context)
    if all(one.name != LAW_SET.name for one in sets):
        return timeline
    law = with_law(timeline, context)
    # The law assumes numbers that a batch does not say; other sets do not.
    return law if len(sets) == 1 else timeline.with_columns(law.select(pl.exclude(timeline.columns)))


def _target_facts(
    name: str, time_source: TimeSource, sources: Collection[CycleSource], *, runs_ahead: bool
) -> TargetFacts:
    """Return the definition of each kind of step time, stated times before those between stamps."""
    if time_source == "duration":
        return TargetFacts(name=name, definition=DURATION_TARGET.definition, source=DURATION_TARGET.source)
    kinds = sorted((s for s in sources if s.interval), key=lambda source: (source.is_stamped, source.name))
    clock = [CYCLE_TIME.definition] if len(sources) > len(kinds) else []
    definitions = [*clock, *(kind.interval for kind in kinds), *([_AHEAD_NOTE] if runs_ahead else [])]
    of_records = [s.target_source for s in kinds if s.target_source != CYCLE_TIME.source]
    source = of_records[0] if of_records and all(s.is_stated for s in sources) else CYCLE_TIME.source
    return TargetFacts(name=name, definition="; ".join(definitions), source=source)


def _context_remedy(tables: DeploymentTables) -> str:
    steps = tables.timeline
    sums = (tables.requests["prompt_tokens"], steps["num_prefill_reqs"], steps["prefill_tokens"])
    return context_remedy(tables.requests.height, *(int(column.sum() or 0) for column in sums))


def _notes_on_counted_steps(tables: DeploymentTables, whole_prompts: dict[str, float]) -> Iterator[str]:
    """Yield the limits of steps that were counted from requests."""
    yield from COUNTED_NOTES
    cut_off = tables.timeline.filter(is_at_recording_end()).height
    yield f"{cut_off:,} steps at the ends of the recording have no time: requests that were in them may be missing"
    if not whole_prompts:
        yield _NO_HIT
    for longest in sorted(set(whole_prompts.values())):
        left_out = f"intervals with more than {longest:.0f} prompt tokens, which may include hits, are left out"
        yield f"prefix hits were seen in the times of prompts: {left_out}" if longest else _UNCERTAIN_HITS
    on_steps, requests = tables.requests["first_token_step"].count(), int(tables.runs["requests"].sum())
    if on_steps < requests:
        yield f"{on_steps:,} of {requests:,} requests are placed on steps"


def _notes_on_records(
    sources: Collection[CycleSource], tables: DeploymentTables, deployment: Deployment
) -> Iterator[str]:
    """Yield the limits of recorded steps."""
    yield from dict.fromkeys(
        note for source in sorted(sources, key=lambda source: source.name) for note in source.notes
    )
    if not any(source.is_by_rank for source in sources):
        return
    ranks = deployment.context.settings.data_parallel or 1
    servers = tables.runs.filter(pl.col("dialects").is_in(names_of(lambda source: source.interval)))
    fewest = servers.group_by("run_id").len()["len"].min()
    if isinstance(fewest, int) and fewest < ranks:
        yield (
            f"steps of {fewest} of {ranks} data-parallel ranks are recorded: what the others compute, such as the "
            "tokens that their requests send to the experts here, and the waits for them, are not known"
        )


def _prefill_reach_pct(fitted: LinearFit, timeline: pl.DataFrame, token_budget: int | None) -> float | None:
    """Return the most prompt tokens of a step of the training part, in percent of the server's token budget."""
    if not token_budget:
        return None
    steps = timeline.select(*ENGINE, "step_id", "prefill_tokens")
    trained = counted_rows(fitted.rows, "train").select(*ENGINE, "step_id")
    most = trained.join(steps, on=[*ENGINE, "step_id"])["prefill_tokens"].max()
    return 100 * most / token_budget if isinstance(most, int | float) else None


def beta_options(options: DeploymentOptions) -> FitOptions:
    """Return how step times are fitted."""
    mixed = pl.col("has_prefill")
    # A mean over an interval is easier to predict than a single step: the published error is that on single steps.
    single = is_one_step()
    return FitOptions(
        groups=(("decode_only", ~mixed), ("mixed", mixed)),
        # A typical batch instead of an unknown one would add an error that is not the model's.
        fill_unknown=False,
        eval_filter=single,
        reference=options.reference,
        # An empty step takes no negative time.
        signs=options.signs(intercept=True),
    )


def _for_set(options: FitOptions, features: FeatureSet) -> FitOptions:
    """Return how a set is fitted: a relative one without a choice of penalties."""
    return msgspec.structs.replace(options, relative=True, penalties=PENALTIES[:1]) if features.is_relative else options


_RATIO_MARK = "@"
"""Between the name of a feature and the number of its ratio, in a frame with a column per ratio. Identifiers do not
have it."""


def _variants(features: FeatureSet) -> list[FeatureSet]:
    """Return the set at each of its ratios, with the number of the ratio in the names that depend on it."""
    variants = []
    for number, ratio in enumerate(features.ratios):
        suffix = f"{_RATIO_MARK}{number}"
        numbered = tuple(replace(f, name=f.name + suffix) if f.is_tuned else f for f in features.features)
        # The first feature of a tuned set, which has the ratio, defines it.
        variants.append(replace(features, features=numbered, defining=(numbered[0].name,)).at(ratio))
    return variants or [features]


def _choose_set(
    rows: pl.DataFrame, variants: list[list[FeatureSet]], options: FitOptions
) -> tuple[FeatureSet, pl.DataFrame, tuple[Candidate, ...], FitOptions]:
    """Choose the feature set by `SET_RULE`, on the training rows only; a single set is taken as it is.

    `rows` have the features of all `variants`, which are those of one set after the other, and the load.

    Returns:
        The features to fit, the frame with exactly these, the candidates that were compared, and how the set is fitted.
    """
    winner = variants[0][0]
    compared: tuple[Candidate, ...] = ()
    if len(variants) > 1 or len(variants[0]) > 1:
        # All candidates are compared on the same rows: with outliers of its own each would drop the rows it predicts
        # worst.
        common_rows = TrainingRows.of(mark_outliers(rows, winner.features, options))
        tuned = [_best_of(common_rows, tried, options) for tried in variants]
        measured = [c for one in tuned if (c := try_features(common_rows, one, options)) is not None]
        candidates = choose(measured) if measured else ()
        name = next((c.name for c in candidates if c.chosen), tuned[0].name)
        winner = next(one for one in tuned if one.name == name)
        compared = candidates if len(variants) > 1 else ()
    names = {name: name.split(_RATIO_MARK)[0] for name in winner.names}
    unused = {name for tried in variants for one in tried for name in one.names} - names.keys()
    chosen = replace(winner, features=tuple(replace(f, name=names[f.name]) for f in winner.features))
    return chosen, rows.drop(unused).rename(names), compared, _for_set(options, winner)


def _best_of(rows: TrainingRows, tried: list[FeatureSet], options: FitOptions) -> FeatureSet:
    """Return the variant with the smallest error, by the rule for candidates."""
    if len(tried) == 1:
        return tried[0]
    # One penalty is enough to rank the ratios of one set; the sets themselves are compared with all of them.
    quick = msgspec.structs.replace(options, penalties=PENALTIES[:1])
    candidates = [try_features(rows, one, quick) for one in tried]
    scores = [candidate.score if candidate else math.inf for candidate in candidates]
    return tried[scores.index(min(scores))]


# -- the rule ----------------------------------------------------------------------------------------------

TIE = 0.02
"""Candidates whose score is within this share of the best one's tie with it; the fewest features decide."""

NOISE = 0.15
"""A set whose typical error inside the training load is above that of the line by a larger share is not chosen."""

SET_RULE = (
    "smallest geometric mean of the error inside the training load (every fifth of up to 50 blocks of time left out "
    "in turn) and the error beyond it (fitted on the lower half of the load, evaluated on the upper half); within 2 "
    "% of it the fewest features; a line of the plain batch instead where its typical relative error is smaller"
)


def try_features(rows: TrainingRows, features: FeatureSet, options: FitOptions) -> Candidate | None:
    """Measure a linear model of a set on training rows.

    Null where rows or features are too few, where the model has no defining feature of the set, or where one that is a
    time at the GPU's peak has a coefficient below 1.
    """
    options = _for_set(options, features)
    design = rows.design(features, relative=options.relative)
    if design is None:
        return None
    used, data = design
    if features.defining and {f.name for f in data.columns}.isdisjoint(features.defining):
        return None
    choice = data.ranked_first(options)
    model = estimator(choice, options.signs, data.columns, max_iter=FEW_ROUNDS)
    huber = model.fit_rows(data.x, data.y, data.weights).huber
    if _is_below_peak(data.columns, model.coef_, features):
        return None
    # Short blocks: a fifth of a run in one piece may be the only one with some loads, such as the sweep before it or
    # its drain, and the error on these would be one beyond the load that the others train.
    inside = msgspec.structs.replace(data, folds=data.blocks() % FOLDS, start=huber).out_of_fold(choice, options.signs)
    beyond = beyond_load(data, matrix(used.frame, [LOAD])[:, 0], options)
    return Candidate(
        features.name,
        len(data.columns),
        mean_error(data, inside, np.ones(len(inside), dtype=bool)),
        beyond and mean_error(data, *beyond),
        inside_pct=typical_error_pct(inside, data.y),
        beyond_pct=beyond and typical_error_pct(beyond[0], data.y[beyond[1]]),
        plain=features.is_relative,
    )


def _is_below_peak(columns: Sequence[Feature], slopes: Vector, features: FeatureSet) -> bool:
    """Return whether a term that defines a set is a time at the GPU's peak, and its coefficient says that steps take
    less.

    Such a term stands for another cost, and its prediction fails beyond the load.
    """
    at_peak = [f.name in features.defining and f.unit == "us" for f in columns]
    return bool((slopes[at_peak] < 1).any())


def typical_error_pct(predicted: Vector, actual: Vector) -> float:
    """Return the squared mean of the square roots of relative errors, in percent: hiccups and rare steps do not decide
    it.
    """
    return float(100 * np.mean(np.sqrt(np.abs(predicted - actual) / np.maximum(actual, 1.0))) ** 2)


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Mark the candidate to fit, by `SET_RULE`, and give each candidate its reason."""
    lines = [c for c in candidates if c.plain]
    sets = [c for c in candidates if not c.plain]
    if not sets or (lines and _gives_way(_fewest(sets), lines)):
        line = _best_line(lines)
        return tuple(replace(c, chosen=c is line, reason=_reason_pct(c, line)) for c in candidates)
    best, winner = min(sets, key=attrgetter("score")), _fewest(sets)
    reasons = [_reason_pct(c, winner) if c.plain else _reason(c, best=best, winner=winner) for c in candidates]
    return tuple(replace(c, chosen=c is winner, reason=r) for c, r in zip(candidates, reasons, strict=True))


def _fewest(sets: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest features of those that tie with the best one."""
    best = min(c.score for c in sets)
    return min((c for c in sets if c.score <= best * (1 + TIE)), key=lambda c: (c.features, c.score))


def _best_line(lines: Sequence[Candidate]) -> Candidate:
    """Return the best line. Ties need no rule: the corrections of the longer one are drawn to zero in its fit."""
    return min(lines, key=attrgetter("score_pct"))


def _gives_way(winner: Candidate, lines: Sequence[Candidate]) -> bool:
    """Return whether a line is better than the best of the other sets, or that is worse than the plain one inside the
    load.
    """
    is_worse = (winner.inside_pct or 0.0) > (lines[0].inside_pct or math.inf) * (1 + NOISE)
    return is_worse or winner.score_pct > _best_line(lines).score_pct * (1 + TIE)


def _reason_pct(candidate: Candidate, winner: Candidate) -> str:
    errors = f"typical error {candidate.inside_pct or 0:.2g} % inside"
    if candidate.beyond_pct is not None:
        errors += f" and {candidate.beyond_pct:.2g} % beyond the training load"
    return errors if candidate is winner else f"{errors}, no better than {winner.name}"


def _reason(candidate: Candidate, *, best: Candidate, winner: Candidate) -> str:
    if candidate is winner:
        if winner is best:
            beyond = " and beyond" if winner.beyond_mae is not None else ""
            return f"smallest error inside{beyond} the training load"
        return f"within {100 * TIE:.0f} % of {best.name} with fewer features"
    if candidate.score <= best.score * (1 + TIE):
        return f"no better than {winner.name} with {winner.features} features"
    errors = {
        "inside": (candidate.inside_mae, winner.inside_mae),
        "beyond": (candidate.beyond_mae, winner.beyond_mae),
    }
    worse = [
        f"{100 * (error / best_error - 1):.0f} % worse {where}"
        for where, (error, best_error) in errors.items()
        if error is not None and best_error and error > best_error * (1 + TIE / 2)
    ]
    return f"{' and '.join(worse) or 'worse'} than {winner.name}"
