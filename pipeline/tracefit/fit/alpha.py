"""Fit the targets of requests (queue wait, admission, departure): one model per `features.targets.Target`.

A model takes one of the forms that its target declares. A form says which linear models the target consists of, and whether
the wait for the next step boundary is added. The first form of a target follows from how the engine works; another form
replaces it where it is clearly better on training rows that neither was fitted on (`FORM_RULE`): the hold-out remains unused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from tracefit.features.sets import BUILT_IN, FREE_FEATURES, QUEUED_FEATURES
from tracefit.fit import splits
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.fitted import (
    NON_NEGATIVE,
    FitOptions,
    FittedModel,
    RegimeRows,
    ScopeOptions,
    ScopeTables,
    TooFewRows,
)
from tracefit.fit.results import Candidate, Comparison, Condition, Missing, TargetFacts
from tracefit.fit.splits import request_frame
from tracefit.fit.train import fit_regimes
from tracefit.server.settings import INSTRUMENTED_VERSION, JOURNEY_FLAGS, NOT_OF_STOCK, journey_remedy
from tracefit.tables.dialects import WITHOUT_EVENTS
from tracefit.tables.schema import BETWEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.features.sets import Feature
    from tracefit.features.targets import FormName, Target


_QUEUED = pl.col("first_scheduled_step") > pl.col("queued_step") + 1
"""Whether a request was left waiting: the first scheduling pass after it was queued did not take it."""

SOMEONE_WAITS = Condition(
    any=(
        Comparison(feature="waiting_depth", op=">", value=0.0),
        Comparison(feature="max_num_seqs", op="<=", feature2="running_depth"),
    )
)
"""`NO_CAPACITY` as far as a sampled step shows it: the step left a request waiting, or no slot free."""

NO_CAPACITY = Condition(
    any=(
        Comparison(feature="free_slots", op="<=", value=0.0),
        Comparison(feature="free_tokens", op="<=", value=0.0),
        Comparison(feature="block_demand", op=">", feature2="kv_blocks_free"),
    )
)
"""The next scheduling pass leaves a request waiting when slots, token budget or KV blocks do not suffice for it."""

_BOUNDARY_NOTES = (
    "work is the API process's own time: what a consumer that simulates step boundaries itself needs",
    "admission = time to the first step start at or after the end of the work, plus offset; to that end itself when idle",
    "work on a request begins when it arrives, or when the work on the one before it ends: one after the other",
    "without_clock is the mean admission, the wait for the boundary included: not to be added to simulated boundaries",
)

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


def _queued_or_free(offered: tuple[Feature, ...], exact: bool) -> list[RegimeRows]:
    """Return the two regimes of a queue wait: left waiting by a scheduling pass, or taken by the next one."""
    if not exact:
        # The latest sampled step does not show who waits for what, so that both regimes are offered all features.
        return [RegimeRows("queued", offered, SOMEONE_WAITS), RegimeRows("free", offered)]
    queued = tuple(f for f in offered if f.name in QUEUED_FEATURES)
    free = tuple(f for f in offered if f.name in FREE_FEATURES)
    return [RegimeRows("queued", queued, NO_CAPACITY), RegimeRows("free", free)]


FORMS: Mapping[FormName, Callable[[tuple[Feature, ...], bool], list[RegimeRows]]] = {
    "line": _one_line,
    "regimes": _queued_or_free,
    "step_boundary": _one_line,
}
"""Forms a target may declare, to the linear models they consist of, of offered features and whether the queue is known exactly.

The wait for the next step comes on top of the API work that `step_boundary` fits (`boundary.fit_boundary`).
"""


def fit_target(
    tables: ScopeTables, target: Target, constants: Mapping[str, float | None], options: ScopeOptions
) -> FittedModel | Missing:
    """Fit the model of one target of requests, as far as the data allow.

    Returns:
        The model, or why there is none and what to do for it.
    """
    if (missing := _missing(tables, target)) is not None:
        return missing
    features, exact = BUILT_IN[target.feature_set], target.state == "queue" and tables.queue is not None
    rows = request_frame(tables, target, features, constants)
    how = _options_of(target, options)
    regimes = {name: FORMS[name](features.features, exact) for name in target.forms}
    form, *others = target.forms
    tried: tuple[Candidate, ...] = ()
    if others:
        inner = inner_rows(rows)
        measured = [_try(name, inner, regimes[name], how, tables.timeline) for name in (form, others[0])]
        # None are compared where fewer than two forms can be measured.
        tried = choose_form(*known) if len(known := [c for c in measured if c is not None]) == 2 else ()
        form = next((name for name in others for c in tried if c.chosen and c.name == name), form)
    result = fit_regimes(rows, regimes[form], how)
    if isinstance(result, TooFewRows):
        disorder, remedy = _disorder(tables.requests, target)
        reason = f"requests with both events{' in order' if disorder else ''}: {result.reason}"
        return Missing(target.model, "; ".join((reason, *disorder)), remedy)
    definition, source = target.definition, "journey"
    if tables.requests["dialect"].is_in(WITHOUT_EVENTS).all():
        definition, source = target.without_events or definition, "request spans"
    if target.state == "queue":
        source += ", exact queue state" if exact else ", queue state of the latest sampled step"
    # Too few steps may have a known start for a boundary. The fitted line is then the whole model.
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


def _missing(tables: ScopeTables, target: Target) -> Missing | None:
    """Return why the requests hold no value of a target; null where they hold some."""
    requests = tables.requests
    if not requests.height:
        return Missing(target.model, "the traces hold no journeys", journey_remedy(stock=False))
    if requests[target.column].count():
        return None
    if requests["dialect"].is_in(WITHOUT_EVENTS).all():
        return Missing(target.model, "the spans of these requests do not carry it", NOT_OF_STOCK)
    disorder, remedy_of_disorder = _disorder(requests, target)
    if disorder:
        return Missing(
            target.model,
            f"no request has both events in order ({target.definition}); {disorder[0]}",
            remedy_of_disorder,
        )
    reason = "; ".join(
        (
            f"no request has both events ({target.definition})",
            *tables.missing_attributes(r"journey\..*|api\..*"),
        )
    )
    return Missing(target.model, reason, f"vLLM {INSTRUMENTED_VERSION} writes them with {JOURNEY_FLAGS}")


def _disorder(requests: pl.DataFrame, target: Target) -> tuple[tuple[str, ...], str]:
    """Return what events out of order, or stamped at one time, leave of a target's values, and what to do for more of them."""
    begins, *_, ends = BETWEEN[target.column]
    both = requests.filter(pl.col(begins).is_not_null() & pl.col(ends).is_not_null())
    lost = both.filter((pl.col(target.column) > 0).fill_null(value=False).not_()).height
    if 2 * lost <= both.height:
        return (), "trace more requests"
    said = f"{lost:,} of {both.height:,} have events out of order, or of one time"
    of_api = {begins, ends} & {"arrival_ns", "departed_ns"}
    return (said,), f"check the clock{'s of the API process and' if of_api else ' of'} the engine core"


def _options_of(target: Target, options: ScopeOptions) -> FitOptions:
    """Return how a target is fitted. The options are the same for all of its forms, so that their errors compare."""
    label = _QUEUED if "regimes" in target.forms else None
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
    "by the mean absolute error on the last 30 % of the training rows in time, fitted on those before; the form that the "
    "engine's laws give unless another is better by more than 5 %"
)

_BOUNDARY_NUMBERS = 2
"""Fitted numbers of the step boundary: the API work and the offset of the stamp."""


def choose_form(lawful: Candidate, other: Candidate) -> tuple[Candidate, ...]:
    """Mark the form to fit, by `FORM_RULE`, and give both forms their reason."""
    gain = 1 - other.inside_mae / lawful.inside_mae if lawful.inside_mae else 0.0
    clearly = gain > MIN_GAIN and lawful.inside_mae - other.inside_mae > CLOCK_US
    winner, loser = (other, lawful) if clearly else (lawful, other)
    if winner is other:
        why = f"removes {100 * gain:.0f} % of the error of {lawful.name}"
    elif gain > 0:
        why = f"{other.name} removes only {100 * gain:.1f} % of its error"
    else:
        why = "smallest error"
    beaten = f"error {loser.inside_mae:.4g} us, where {winner.name} has {winner.inside_mae:.4g} us"
    return tuple(
        replace(c, chosen=c is winner, reason=why if c is winner else beaten) for c in (lawful, other)
    )


def inner_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the training rows as a frame of their own whose last 30 % in time are held out."""
    # The hold-out stays unused: a form that was chosen by it would look better there than it is.
    trained = rows.filter(pl.col("split") == "train").drop("split", "holdout_from_ns")
    return splits.split_by_time(trained)


def _try(
    form: FormName, rows: pl.DataFrame, regimes: list[RegimeRows], options: FitOptions, timeline: pl.DataFrame
) -> Candidate | None:
    """Measure a form on the inner hold-out; null where rows, or known step starts, are too few."""
    fitted = fit_regimes(rows, regimes, replace(options, reference=False))
    if isinstance(fitted, TooFewRows):
        return None
    measured = fit_boundary(fitted, timeline) if form == "step_boundary" else fitted
    if measured is None or measured.validation.holdout.mae is None:
        return None
    numbers = _BOUNDARY_NUMBERS if form == "step_boundary" else len(fitted.terms)
    return Candidate(form, numbers, measured.validation.holdout.mae, None)
