"""Fit the targets of requests (queue wait, admission, departure): one model per `models.targets.Target`.

A model takes one of the forms that its target declares. A form says which linear models the target consists of, and
whether the wait for the next step boundary is added. The first form of a target follows from how the engine works;
another form replaces it where it is clearly better on training rows that neither was fitted on (`FORM_RULE`): the
hold-out remains unused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from tracefit.features.sets import BUILT_IN, FREE_FEATURES, PROMPTS_AHEAD_FEATURES, QUEUED_FEATURES
from tracefit.fit import splits
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.fitted import (
    FREE,
    NON_NEGATIVE,
    DeploymentOptions,
    DeploymentTables,
    FitOptions,
    FittedModel,
    RegimeRows,
    TooFewRows,
)
from tracefit.fit.results import Missing
from tracefit.fit.splits import MIN_TRAIN_ROWS, counted_rows, request_frame
from tracefit.fit.train import fit_regimes
from tracefit.models.schema import Comparison, Condition, TargetFacts
from tracefit.models.validation import Candidate
from tracefit.server.settings import INSTRUMENTED_VERSION, JOURNEY_FLAGS, journey_remedy
from tracefit.tables.dialects import WITHOUT_EVENTS
from tracefit.tables.schema import BETWEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.features.sets import Feature
    from tracefit.models.targets import FormName, Target


SOMEONE_WAITS = Condition(
    any=(
        Comparison(feature="waiting_depth", op=">", value=0.0),
        Comparison(feature="max_num_seqs", op="<=", feature2="running_depth"),
    )
)
"""A sampled step counts as `NO_CAPACITY` if a request was left waiting or no slot was free."""

NEEDS_ROOM = Condition(
    any=(
        Comparison(feature="free_slots", op="<=", value=0.0),
        Comparison(feature="block_demand", op=">", feature2="kv_blocks_free"),
    )
)
"""Slots or KV blocks do not suffice for a request: it waits until running ones have finished."""

NO_BUDGET = Condition(any=(Comparison(feature="free_tokens", op="<=", value=0.0),))
"""The token budget of the next scheduling pass does not suffice: a request waits until the prompts ahead are
computed."""

NO_CAPACITY = Condition(any=(*(NEEDS_ROOM.any or ()), *(NO_BUDGET.any or ())))
"""The next scheduling pass leaves a request waiting when slots, token budget or KV blocks do not suffice for it."""

_BOUNDARY_NOTES = (
    "work is the API process's own time: what a consumer that simulates step boundaries itself needs",
    (
        "admission = time to the first step start at or after the end of the work, plus offset; to that end itself "
        "when idle"
    ),
    "work on a request begins when it arrives, or when the work on the one before it ends: one after the other",
    "without_clock is the mean admission, the wait for the boundary included: not to be added to simulated boundaries",
)

EXACT_QUEUE, SAMPLED_QUEUE = "exact queue state", "queue state of the latest sampled step"
"""The queue state that a published model of the queue uses."""

_WAIT_NOTES = (
    "free_slots = max_num_seqs - running requests - requests waiting ahead",
    "free_tokens = max_num_batched_tokens - running requests - their prompt tokens still to compute - tokens_ahead",
    "tokens_ahead, outputs_ahead = tokens to compute, and output tokens allowed, of the requests waiting ahead",
    "block_demand = KV blocks of the prompts waiting ahead and of the request's own prompt",
    "kv_blocks_free = free KV blocks when the request is queued",
    "running_remaining_tokens = output tokens the running requests may still produce (by max_tokens)",
)


def _one_line(offered: tuple[Feature, ...], _exact: bool) -> list[RegimeRows]:
    return [RegimeRows("all", offered)]


def _by_need(offered: tuple[Feature, ...], exact: bool) -> list[RegimeRows]:
    """Return a regime of a queue wait for each need of a request: room of a running one, a prompt's turn, or
    nothing.
    """
    queued, free = _queued_or_free(offered, exact)
    if not exact:
        return [queued, free]
    prompts = tuple(f for f in offered if f.name in PROMPTS_AHEAD_FEATURES)
    return [msgspec.structs.replace(queued, when=NEEDS_ROOM), RegimeRows("prompts_ahead", prompts, NO_BUDGET), free]


def _queued_or_free(offered: tuple[Feature, ...], exact: bool) -> list[RegimeRows]:
    """Return the two regimes of a queue wait: left waiting by a scheduling pass, or taken by the next one."""
    if not exact:
        # The latest sampled step does not show which request waits for which resource: both regimes are offered all
        # features.
        return [RegimeRows("queued", offered, SOMEONE_WAITS), RegimeRows(FREE, offered)]
    queued = tuple(f for f in offered if f.name in QUEUED_FEATURES)
    free = tuple(f for f in offered if f.name in FREE_FEATURES)
    return [RegimeRows("queued", queued, NO_CAPACITY), RegimeRows(FREE, free)]


ALPHA_FORMS: Mapping[FormName, Callable[[tuple[Feature, ...], bool], list[RegimeRows]]] = {
    "line": _one_line,
    "regimes": _by_need,
    "two_regimes": _queued_or_free,
    "step_boundary": _one_line,
    "constant": lambda _offered, _exact: [RegimeRows("all", ())],
}
"""Forms that a target may declare, and their linear models of the offered features, for an exact queue state or a
sampled one.

The wait for the next step comes on top of the API work that `step_boundary` fits (`boundary.fit_boundary`).
"""


def fit_target(
    tables: DeploymentTables,
    target: Target,
    constants: Mapping[str, float | None],
    options: DeploymentOptions,
) -> FittedModel | Missing:
    """Fit the model of one target of requests, as far as the data allow.

    Returns:
        The model, or why it is missing and what to do about it.
    """
    if (missing := _missing(tables, target)) is not None:
        return missing
    features, exact = BUILT_IN[target.feature_set], target.state == "queue" and tables.queue is not None
    rows = request_frame(tables, target, features, constants)
    how = _fit_options(target, options)
    regimes: dict[FormName, list[RegimeRows]] = {
        # With a sampled queue state both forms of regimes are the same.
        name: ALPHA_FORMS[name](features.features, exact)
        for name in target.forms
        if exact or name != "two_regimes"
    }
    # A queue that builds up makes a wait no constant, whatever the last training rows show.
    if how.label is None or counted_rows(rows, "train").filter(how.label).height < MIN_TRAIN_ROWS:
        regimes[CONSTANT] = ALPHA_FORMS[CONSTANT](features.features, exact)
    form, inner = target.forms[0], inner_rows(rows)
    measured = {name: _try(name, inner, regimes[name], how, tables.timeline) for name in regimes}
    candidates = [candidate for candidate in measured.values() if candidate is not None]
    tried = choose_form(*candidates) if len(candidates) > 1 else ()
    chosen = next((name for name in regimes for c in tried if c.chosen and c.name == name), form)
    # Where the first form cannot be measured no other line replaces it, the median does.
    form, tried = (chosen, tried) if measured[form] is not None or chosen == CONSTANT else (form, ())
    result = fit_regimes(rows, regimes[form], how)
    if isinstance(result, TooFewRows):
        disorder, remedy = _disorder(tables.requests, target)
        reason = "; ".join(filter(None, (f"requests with both events: {result.reason}", disorder)))
        return Missing(target.model, reason, remedy)
    definition, source = target.definition, "journey"
    if tables.requests["dialect"].is_in(WITHOUT_EVENTS).all():
        definition, source = target.without_events or definition, "request spans"
    if target.state == "queue":
        source += f", {EXACT_QUEUE if exact else SAMPLED_QUEUE}"
    # Without enough step starts there is no boundary: the fitted line is the whole model.
    boundary = fit_boundary(result, tables.timeline) if form == "step_boundary" else None
    if boundary is not None:
        definition += "; includes the wait for the step in progress to end"
        source += ", step clock"
    notes = (*(_BOUNDARY_NOTES if boundary else ()), *(_WAIT_NOTES if exact else ()))
    return FittedModel(
        target.model,
        TargetFacts(name=target.name, definition=definition, source=source),
        result,
        features.name,
        tuple(regimes[form]),
        how,
        replace((boundary or result).validation, candidates=tried),
        notes=(*notes, *(f"form {c.name} chosen: {c.reason} ({FORM_RULE})" for c in tried if c.chosen)),
        boundary=boundary,
    )


def _missing(tables: DeploymentTables, target: Target) -> Missing | None:
    """Return why no request has a value of a target; null where one has."""
    requests = tables.requests
    remedy = journey_remedy(stock=tables.is_stock, after_last_token=target.adds_to == "client")
    if missing := tables.missing_of_points(target.model):
        return missing
    if not requests.height:
        return Missing(target.model, "the traces hold no journeys", remedy)
    if requests[target.column].count():
        return None
    if requests["dialect"].is_in(WITHOUT_EVENTS).all():
        return Missing(target.model, "the spans of these requests do not carry it", remedy)
    disorder, remedy = _disorder(requests, target)
    if disorder:
        reason = f"no request has both events in order ({target.definition}); {disorder}"
        return Missing(target.model, reason, remedy)
    without = tables.missing_attributes(r"journey\..*|api\..*")
    reason = "; ".join((f"no request has both events ({target.definition})", *without))
    return Missing(target.model, reason, f"vLLM {INSTRUMENTED_VERSION} writes them with {JOURNEY_FLAGS}")


def _disorder(requests: pl.DataFrame, target: Target) -> tuple[str, str]:
    """Return how many requests have events out of order, or of one time, empty where few have; and what to do for more
    values.
    """
    begins, *_, ends = BETWEEN[target.column]
    both = requests.drop_nulls([begins, ends]).filter(~pl.col("dialect").is_in(WITHOUT_EVENTS))
    unusable = both.filter((pl.col(target.column) > 0).fill_null(value=False).not_()).height
    if both.height > 1 and both[begins].n_unique() == 1:
        disorder = f"all {both.height:,} begin at one time"
    elif 2 * unusable > both.height:
        disorder = f"{unusable:,} of {both.height:,} have events out of order, or of one time"
    else:
        return "", "trace more requests"
    is_of_api = not {begins, ends}.isdisjoint({"arrival_ns", "departed_ns"})
    return disorder, f"check the clock{'s of the API process and' if is_of_api else ' of'} the engine core"


def _fit_options(target: Target, options: DeploymentOptions) -> FitOptions:
    """Return how a target is fitted. The options are the same for all of its forms, so that their errors compare."""
    # A request was left waiting if the first scheduling pass after it was queued did not take it.
    is_queued = pl.col("first_scheduled_step") > pl.col("queued_step") + 1
    label = is_queued if "regimes" in target.forms else None
    return FitOptions(
        drop_outliers=target.drop_outliers,
        groups=() if label is None else (("queued", label), ("free", ~label)),
        label=label,
        reference=options.reference,
        signs=NON_NEGATIVE if target.non_negative else options.signs(),
    )


# -- the rule ----------------------------------------------------------------------------------------------

MIN_GAIN = 0.05
"""Least share of the error that another form must remove to replace the form that the engine's laws give."""

CLOCK_US = 1.0
"""Smallest difference between errors, in us, that counts: the stamps resolve none below it."""

FORM_RULE = (
    "by the mean absolute error on the last 30 % of the training rows in time, fitted on those before; the form that "
    "the engine's laws give unless another is better by more than 5 %, and the training median where it is better "
    "still"
)

CONSTANT: FormName = "constant"
"""The training median, the baseline of every report: a model that predicts worse is not worth its inputs."""

_BOUNDARY_NUMBERS = 2
"""Fitted numbers of the step boundary: the API work and the offset of the stamp."""


def choose_form(first: Candidate, *others: Candidate) -> tuple[Candidate, ...]:
    """Mark the form to fit, by `FORM_RULE`, and give every form its reason."""
    winner, candidates = first, (first, *others)
    # The constant, which is the baseline, is compared last and needs no clear gain.
    for other in sorted(others, key=lambda c: c.name == CONSTANT):
        least = 0.0 if other.name == CONSTANT else max(MIN_GAIN * winner.inside_mae, CLOCK_US)
        if winner.inside_mae - other.inside_mae > least:
            winner = other
    is_best = winner.inside_mae == min(c.inside_mae for c in candidates)
    why = "smallest error" if is_best else f"no other form removes more than {100 * MIN_GAIN:.0f} % of its error"
    smallest = f"{winner.inside_mae:.4g} us"
    errors = [f"{c.inside_mae:.4g} us" for c in candidates]
    against = [f"error {e}, where {winner.name} has {smallest}" if e != smallest else f"error {e} too" for e in errors]
    reasons = [why if c is winner else text for c, text in zip(candidates, against, strict=True)]
    return tuple(replace(c, chosen=c is winner, reason=r) for c, r in zip(candidates, reasons, strict=True))


def inner_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the training rows, the last 30 % of them in time held out."""
    # The hold-out stays unused: a form that was chosen by it would look better there than it is.
    trained = rows.filter(pl.col("split") == "train").drop("split", "holdout_from_ns")
    return splits.split_by_time(trained)


def _try(
    form: FormName, rows: pl.DataFrame, regimes: list[RegimeRows], options: FitOptions, timeline: pl.DataFrame
) -> Candidate | None:
    """Measure a form on the inner hold-out; null where rows, or known step starts, are too few."""
    fitted = fit_regimes(rows, regimes, msgspec.structs.replace(options, only_error=True))
    if isinstance(fitted, TooFewRows):
        return None
    measured = fit_boundary(fitted, timeline) if form == "step_boundary" else fitted
    if measured is None or measured.validation.holdout.mae is None:
        return None
    numbers = _BOUNDARY_NUMBERS if form == "step_boundary" else len(fitted.terms)
    return Candidate(form, numbers, measured.validation.holdout.mae, None)
