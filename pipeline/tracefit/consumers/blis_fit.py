"""Fit BLIS's coefficients: overheads in whole us, and step times on its terms, weighted as replays say.

BLIS's terms cannot follow every step, so that a fit has to favour some steps by its weights. Users compare latencies of
requests, not step times, and the simulator's feedback (a shorter step means a smaller batch, which means a shorter
step) amplifies errors. The steps are therefore fitted under several weightings, each result replays the training
requests (`blis_replay`), and the one with the closest latencies is exported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import polars as pl

from tracefit.consumers.base import (
    Source,
    block_size,
    held_out,
    kv_blocks,
    number,
    train_and_holdout,
    worse_than_baseline,
    written,
)
from tracefit.consumers.blis_replay import RooflineRates, StepRates, replay_as_blis, roofline_us
from tracefit.consumers.blis_roofline import (
    BLIS_ROOFLINE_TERMS,
    BLIS_TERMS,
    PAIRS_COLUMN,
    add_blis_terms,
    roofline_shape,
    with_prefill_pairs,
)
from tracefit.errors import DataError, UsageError
from tracefit.features.roofline import ROOFLINE_COLUMNS
from tracefit.features.sets import FeatureSet
from tracefit.fit.boundary import admission_with_clock, api_waits, clocks_of, queued_us
from tracefit.fit.estimators import HUBER_SD, fit_nonnegative
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.splits import request_frame
from tracefit.models.frames import evaluated_steps
from tracefit.models.schema import BoundaryModel
from tracefit.models.targets import target_named
from tracefit.options import ServerOptions, named
from tracefit.replay.engine import EngineSettings, StepBatch
from tracefit.statistics import percentile
from tracefit.tables.dialects import WITHOUT_EVENTS
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tracefit.results.models import HeldOut
    from tracefit.statistics import Flags, Matrix, Vector

_TERM_NAMES = list(BLIS_TERMS)
_ONE_TERM = _TERM_NAMES.index("blis_one")
_REQUESTS_TERM = _TERM_NAMES.index("blis_requests")
_DECODE_KV = _TERM_NAMES.index("blis_decode_kv_us")
BLIS_JOURNEYS_SHARE = 0.99
"""Least journey sampling for a replay: with fewer requests it would run under too little load."""

MIN_REQUESTS = 40
"""Fewest training requests for a choice by replay."""

MOST_BLIS_REQUESTS = 2_000
"""Most requests of an engine that are replayed: the latest ones."""

DEFAULT_SLOTS = 256
DEFAULT_BUDGET = 2_048
"""BLIS's own scheduler limits, used where those of the server are unknown."""

BAR_PCT: Mapping[tuple[str, int], float] = {
    ("TTFT", 50): 10.0,
    ("ITL", 50): 3.0,
    ("ITL", 90): 3.0,
    ("E2E", 50): 3.0,
    ("E2E", 90): 3.0,
}
"""The bar for a replay: latency and percentile to the largest acceptable error in percent."""

_SOONEST, _LEAST_LENGTH_SPREAD = 0.1, 0.4
"""Share of the requests that are the soonest queued; and the share of a step by which they spread if they wait for one.
A wait for any moment of a step spreads 0.8 of it between these shares."""

MOST_SCALE = 1.06
SCALE_ROUNDS = 5
"""Bisections that determine the factor on step times, between 1 / `MOST_SCALE` and `MOST_SCALE`, to 0.4 %."""

MOST_NOMINAL = 10.0
"""Largest multiple of its nominal value at which a coefficient still describes its term."""

_FIRST_COMPUTE, _FIRST_MEMORY, _LEAST_FACTOR = 2.0, 1.25, 0.05
_TURNS = 30
"""A fit of the roofline begins at half of the peak compute and 80 % of the bandwidth, and ends after so many turns at
most."""

_ABOUT = 1.1
"""A replay so many times as far off as the closest is about as close."""

MAX_DIFFERENCE = 0.2
"""Largest relative difference between BLIS's step and tracefit's at a full batch that needs no note."""


WEIGHTINGS: Mapping[str, tuple[float, float, float]] = {
    "equal steps, least squares": (0.0, 0.0, np.inf),
    "requests^1 / time^0, least squares": (1.0, 0.0, np.inf),
    "requests^0.5 / time^0.5, Huber": (0.5, 0.5, HUBER_SD),
    "requests^0.5 / time^0.5, least squares": (0.5, 0.5, np.inf),
    "requests^1 / time^0.5, Huber": (1.0, 0.5, HUBER_SD),
    "requests^1 / time^1, least squares": (1.0, 1.0, np.inf),
}
"""Weights that a step may have in the fit: powers of its requests and of its time, and where Huber's weights set in.

Requests^1 counts a step once per request in it, time^2 would weigh errors in percent. Without Huber's weights tails
count in full, which keeps the sum of all steps.
"""

EQUAL_STEPS, *_ = WEIGHTINGS
FALLBACK = "requests^0.5 / time^0.5, Huber"
"""Weighting where no requests can be replayed: the best one over twenty generated runs of eight models."""


_ROOFLINE_NOTES = (
    (
        "form: roofline. mfuPrefill, mfuDecode and BwPeakTBs in hardware_config.json are what this server reaches; "
        "steps have no overhead"
    ),
    (
        "--latency-model roofline refuses an alpha, so one decode instance serves all requests and takes alpha from "
        "defaults.yaml"
    ),
    "the prefill instance gets no request, and nothing reads the beta in defaults.yaml",
)


class BlisCoefficients(msgspec.Struct, frozen=True):
    """The coefficients as written for BLIS, with the errors of exactly these.

    Of three beta its backend is `roofline`: these are multiples of the peak times, in the order of
    `BLIS_ROOFLINE_TERMS`.
    """

    alpha: tuple[int, int, int]
    beta: tuple[float, ...]
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...]


def fit_blis(source: Source, *, only_ten: bool = False) -> BlisCoefficients:
    """Fit the overheads, and step times on BLIS's terms, in the form and weighting whose replay is closest on training
    requests.

    Args:
        source: Models and tables of the deployment.
        only_ten: Whether ten coefficients are the only form.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    arrival, arrival_errors, folded = _arrival(source)
    departure, departure_errors, undeparted = _departure(source)
    steps = _steps(source)
    forms = {"": _fit_ten} if only_ten else _FORMS
    fits = {
        f"{form}{name}": fit(steps, _weights(steps, *powers), huber)
        for form, fit in forms.items()
        for name, (*powers, huber) in WEIGHTINGS.items()
    }
    requests, missing = _requests(source, steps.ends)
    training, alpha = _training(requests), (arrival, *departure)
    replays = partial(_replayed, source, alpha)
    if missing is None and training["counts"].sum() < MIN_REQUESTS:
        missing = f"fewer than {MIN_REQUESTS} training requests to replay"
    if missing:
        beta, reason = fits[FALLBACK], f"{FALLBACK}; {missing}"
    else:
        beta, reason = _choose(replays, fits, training, steps)
    beta = np.array([written(v) for v in beta])
    errors, notes = list(_step_errors(steps, beta)), [f"weighting: {reason}"]
    if not missing:
        replayed, note = _replayed_errors(replays, requests, training, beta)
        errors += replayed
        notes.append(note)
    errors += arrival_errors
    if _is_roofline(beta):
        alpha = _roofline_alpha(alpha)
        notes += _ROOFLINE_NOTES
        if departure[0]:
            notes.append(f"a departure has no fixed part in this form: E2E lacks {departure[0]:,} us")
    else:
        errors += departure_errors
        same = [n for i, n in enumerate(_TERM_NAMES) if not steps.varies[i] and steps.x[:, i].any()]
        notes += [
            f"{', '.join(same)} do not vary in one deployment: beta6 contains what they add, for this deployment only",
            (
                f"{len(beta)} beta: the eleventh that BLIS reads, MoE dispatch between data-parallel ranks, stays at "
                "its default, beta3"
            ),
        ]
    notes += [
        *_transfer(beta, steps),
        *_full_batch(source, steps, beta),
        *folded,
        *undeparted,
        *worse_than_baseline(errors),
    ]
    return BlisCoefficients(alpha, tuple(beta.tolist()), tuple(errors), tuple(notes))


def _is_roofline(beta: Vector) -> bool:
    return len(beta) == len(BLIS_ROOFLINE_TERMS)


def _roofline_alpha(alpha: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the alpha of the backend `roofline`: its second is per prompt token, and a departure has no fixed part."""
    return alpha[0], 0, alpha[2]


# -- overheads -------------------------------------------------------------------------------------------


def _arrival(source: Source) -> tuple[int, tuple[HeldOut, ...], tuple[str, ...]]:
    """Return alpha0, the API work of the admission model at the mean prompt, with its error and notes."""
    if not source.tables.requests["admission_us"].count():
        return 0, (), ("alpha0 is 0: no request shows the API's work, and TTFT is shorter by as much",)
    rows = request_frame(source.tables, target_named("admission"), FeatureSet("none", ()), {})
    train, holdout = train_and_holdout(source, rows, ["prompt_tokens"], "ARRIVED to QUEUED")
    model = source.models.models.get("alpha.admission")
    if not isinstance(model, BoundaryModel):
        return _arrival_without_clock(source, train, holdout)
    per_token = model.work_us_per_prompt_token
    mean = float(train["prompt_tokens"].cast(pl.Float64).to_numpy().mean())
    # BLIS has no API work per prompt token: the mean prompt stands for all.
    alpha = round(max(model.work.intercept.value + per_token * mean, 0.0))
    done = np.full(holdout.height, float(alpha))
    # BLIS works on all arrivals at once; the wait says which of them another one is ahead of.
    predicted, has_boundary = admission_with_clock(
        holdout, clocks_of(source.tables.timeline), api_waits(holdout, done), done, 0.0
    )
    if not has_boundary.any():
        raise DataError("no held-out request was queued at a step whose start is known")
    what = "ARRIVED to QUEUED, by alpha0 and the step boundary"
    error = held_out(what, "us", queued_us(holdout)[has_boundary], predicted[has_boundary], queued_us(train))
    note = (
        "alpha0 is the API's work, by the admission model: the wait for a step boundary, which BLIS simulates, "
        "is not in it"
    )
    if per_token:
        note += f"; it contains {number(per_token)} us per prompt token at the mean prompt of {mean:.0f} tokens"
    return alpha, (error,), (note,)


def _arrival_without_clock(
    source: Source, train: pl.DataFrame, holdout: pl.DataFrame
) -> tuple[int, tuple[HeldOut, ...], tuple[str, ...]]:
    """Return alpha0 where no rule takes the wait for the step in progress out of ARRIVED to QUEUED.

    BLIS simulates that wait, so that a mean with it in would count it twice. Its spread is that of a step: where
    admissions spread far less, QUEUED is stamped on arrival and their mean is the API's work. Else the soonest waited
    least.
    """
    y, trained = target_of(holdout), target_of(train)
    step_us = float(np.median(source.tables.timeline["cycle_us"].drop_nulls().to_numpy()))
    soonest, latest = np.quantile(trained, [_SOONEST, 1 - _SOONEST])
    waits = latest - soonest > _LEAST_LENGTH_SPREAD * step_us
    alpha = round(float(soonest if waits else trained.mean()))
    note = (
        f"alpha0 is what the soonest {100 * _SOONEST:.0f} % of the requests took: the others contain a wait for the "
        "step in progress, which BLIS simulates"
        if waits
        else (
            "alpha0 is the mean from ARRIVED to QUEUED, which contains no wait for a step: QUEUED is stamped on arrival"
        )
    )
    what = "ARRIVED to QUEUED, by alpha0" + (" without the wait" if waits else "")
    return alpha, (held_out(what, "us", y, np.full(len(y), float(alpha)), trained),), (note,)


def _departure(source: Source) -> tuple[tuple[int, int], tuple[HeldOut, ...], tuple[str, ...]]:
    """Return alpha1 and alpha2 with their error; 0 with a note if no span shows a departure."""
    if not source.tables.requests["departure_us"].count():
        note = "alpha1 and alpha2 are 0: no request shows when it departs, and alpha0 has no way back of a token"
        return (0, 0), (), (note,)
    rows = request_frame(source.tables, target_named("departure"), FeatureSet("none", ()), {})
    train, holdout = train_and_holdout(source, rows, ["output_tokens"], "FINISHED to DEPARTED")
    y = target_of(train)
    fixed, per_token = _whole_line(matrix(train, ["output_tokens"])[:, 0], y)
    predicted = fixed + per_token * holdout["output_tokens"].to_numpy()
    return (fixed, per_token), (held_out("FINISHED to DEPARTED", "us", target_of(holdout), predicted, y),), ()


def _whole_line(tokens: Vector, y: Vector) -> tuple[int, int]:
    """Fit y = fixed + per_token * tokens in whole us, neither negative: BLIS drops the digits after the decimal point.

    Args:
        tokens: Shape (n,).
        y: In us, shape (n,).
    """
    # Rounding both at once can be far off: the constant is refitted for each whole slope next to the best one.
    best = (np.inf, 0, 0)
    slope = float(fit_nonnegative(np.column_stack([np.ones(len(y)), tokens]), y)[1])
    for per_token in sorted({0, int(slope), int(slope) + 1}):
        rest = y - per_token * tokens
        fixed = round(float(fit_nonnegative(np.ones((len(y), 1)), np.maximum(rest, 0.0))[0]))
        best = min(best, (float(np.abs(rest - fixed).mean()), fixed, per_token))
    return best[1], best[2]


# -- step times ------------------------------------------------------------------------------------------


class _Steps(msgspec.Struct, frozen=True):
    """Training and held-out steps of one deployment on BLIS's terms."""

    train: pl.DataFrame
    holdout: pl.DataFrame
    x: Vector
    y: Vector
    roofline: Matrix
    """Training steps on `BLIS_ROOFLINE_TERMS`, shape (n, 3)."""
    varies: Flags
    ends: pl.DataFrame
    """run_id, server, holdout_from_ns."""


def _with_terms(source: Source, frame: pl.DataFrame) -> pl.DataFrame:
    context = source.deployment.context
    if context.architecture is None or context.gpu is None:
        lacking = "config.json" if context.architecture is None else "GPU"
        option = "model_config" if context.architecture is None else "gpu"
        what = "" if context.architecture is None else ": a name, or a JSON file with a device's rates"
        raise DataError(
            f"BLIS's step terms need the model's config.json and the GPU; the {lacking} is not known",
            hint=f"ingest the run again with {named(ServerOptions, option)}{what}",
        )
    tp = context.settings.tensor_parallel or 1
    # Unknown counts are null in BLIS's terms as well, and such steps are left out.
    prefill_reqs, decode_reqs, prefill, _, contexts, before = (
        frame[name].cast(pl.Float64).fill_null(0.0).to_numpy() for name in ROOFLINE_COLUMNS
    )
    shape = roofline_shape(context.architecture, context.gpu, tp=tp)
    # Prefill requests of a step count as equal: a summary has only their total.
    seen = prefill * (before + prefill / 2) / np.maximum(prefill_reqs, 1.0)
    terms = shape.terms((prefill, before, seen, decode_reqs, contexts))
    columns = {name: pl.Series(terms[:, i]) for i, name in enumerate(BLIS_ROOFLINE_TERMS)}
    return add_blis_terms(frame, context.architecture, context.gpu, tp=tp).with_columns(**columns)


def _steps(source: Source) -> _Steps:
    timeline = _with_terms(source, with_prefill_pairs(source.tables.timeline, source.tables.requests))
    rows = source.steps([*_TERM_NAMES, *BLIS_ROOFLINE_TERMS], timeline)
    train, holdout = train_and_holdout(source, rows, _TERM_NAMES, "BLIS step terms")
    x, y = matrix(train, _TERM_NAMES), target_of(train)
    # Terms that do not vary within the deployment cannot be separated: BLIS's constant of a step takes their sum.
    varies = np.array([i == _ONE_TERM or np.ptp(x[:, i]) > 0 for i in range(len(_TERM_NAMES))])
    ends = rows.drop_nulls("holdout_from_ns").group_by(SERVER).agg(pl.col("holdout_from_ns").first())
    return _Steps(train, holdout, x, y, matrix(train, BLIS_ROOFLINE_TERMS), varies, ends)


def _folded(x: Vector) -> Vector:
    """Return the terms of eight coefficients from those of ten: of the two terms of a phase the larger."""
    larger = [np.maximum(x[:, compute], x[:, kv]) for compute, kv in ((0, 8), (1, 9))]
    return np.column_stack([*larger, x[:, 2:8]])


def _weights(steps: _Steps, requests_power: float, time_power: float) -> Vector:
    # A step without requests has no weight where requests count, and no infinite one.
    requests = np.maximum(steps.x[:, _REQUESTS_TERM], 1e-9)
    weights = requests**requests_power / np.maximum(steps.y, 1.0) ** time_power
    # A row of an interval is the mean of several steps.
    weights = weights * steps.train["interval_steps"].to_numpy().astype(float)
    return np.asarray(weights / weights.mean())


def _fit_ten(steps: _Steps, weights: Vector, huber: float) -> Vector:
    return fit_nonnegative(steps.x * steps.varies, steps.y, weights, huber=huber)


def _fit_eight(steps: _Steps, weights: Vector, huber: float) -> Vector:
    return fit_nonnegative(_folded(steps.x * steps.varies), steps.y, weights, huber=huber)


def _fit_roofline(steps: _Steps, weights: Vector, huber: float) -> Vector:
    """Fit the multiples of the peak times, with one for all compute where steps cannot tell decode compute from prefill
    compute.
    """
    factors = _bound(steps.roofline, steps.y, weights, huber)
    if _LEAST_FACTOR < factors[1] <= MOST_NOMINAL:
        return factors
    compute, memory = steps.roofline[:, :2].sum(axis=1), steps.roofline[:, 2]
    one, memory_factor = _bound(np.column_stack([compute, memory]), steps.y, weights, huber)
    return np.array([one, one, memory_factor])


def _bound(terms: Matrix, y: Vector, weights: Vector, huber: float) -> Vector:
    """Fit y = max(compute terms, memory term); the binding term of each step and the factors are determined in turns.

    Args:
        terms: Compute terms and, last, the memory term, shape (n, n_terms).
        y: In us, shape (n,).
        weights: Shape (n,).
        huber: See `fit_nonnegative`.
    """
    factors = np.r_[np.full(terms.shape[1] - 1, _FIRST_COMPUTE), _FIRST_MEMORY]
    for _ in range(_TURNS):
        by_memory = terms[:, -1] * factors[-1] >= terms[:, :-1] @ factors[:-1]
        last = np.arange(terms.shape[1]) == terms.shape[1] - 1
        binds = np.where(by_memory[:, None] == last, terms, 0.0)
        fitted = fit_nonnegative(binds, y, weights, huber=huber)
        # A time that binds no step stays, and none is so short that its rate has no digits.
        fitted = np.maximum(np.where(binds.any(axis=0), fitted, factors), _LEAST_FACTOR)
        if np.allclose(fitted, factors, rtol=1e-4):
            break
        factors = fitted
    return np.asarray(factors)


_FORMS = {"": _fit_ten, "eight coefficients, ": _fit_eight, "roofline, ": _fit_roofline}
"""Name of each form of the step time, as a prefix of the weighting, to its fit."""


def _step_errors(steps: _Steps, beta: Vector) -> Iterator[HeldOut]:
    y = target_of(steps.holdout)
    if _is_roofline(beta):
        took = roofline_us(matrix(steps.holdout, BLIS_ROOFLINE_TERMS), beta)
    else:
        x = matrix(steps.holdout, _TERM_NAMES)
        took = (x if len(beta) == len(_TERM_NAMES) else _folded(x)) @ beta
    predicted = np.maximum(np.floor(took), 1.0)  # as BLIS cuts them
    mixed = steps.holdout["has_prefill"].to_numpy()
    for what, rows in {
        "": np.full(len(y), fill_value=True),
        ", mixed": mixed,
        ", decode only": ~mixed,
    }.items():
        if rows.any():
            yield held_out(f"step time{what}", "us", y[rows], predicted[rows], steps.y)


# The two terms of each phase; the larger one decides its time.
_PHASE_TERMS = {"prefill": {0: "compute", 8: "KV"}, "decode": {1: "compute", 9: "KV"}}


def _transfer(beta: Vector, steps: _Steps) -> Iterator[str]:
    """Yield a note on coefficients that stand in for other terms and are valid for one deployment only.

    A phase is bound by one of its two roofline terms. One of them may therefore be 0, but not both, and neither should
    be a large multiple of its nominal value.
    """
    implausible, phases = [], _PHASE_TERMS
    if _is_roofline(beta):
        factors, phases = zip(BLIS_ROOFLINE_TERMS, beta, strict=True), {}
        implausible = [f"{name} is {f:.3g} times nominal" for name, f in factors if f > MOST_NOMINAL]
    for phase, terms in phases.items():
        varying = {i: what for i, what in terms.items() if steps.varies[i] and i < len(beta)}
        most = [i for i in varying if beta[i] > MOST_NOMINAL]
        if varying and not any(beta[i] for i in varying):
            implausible.append(f"no {phase} term is above 0")
        implausible += [f"beta{i} ({phase} {varying[i]}) is {beta[i]:.3g} times nominal" for i in most]
        if most:
            implausible += [f"beta{i} ({phase} {varying[i]}) is 0" for i in varying if not beta[i]]
    if implausible:
        yield (
            f"no transfer: {', '.join(implausible)}; these stand in for other terms, and are valid for this model, "
            "GPU, tensor parallelism and load only"
        )


def _full_batch(source: Source, steps: _Steps, beta: Vector) -> Iterator[str]:
    """Yield a note where BLIS's step time differs from that of the step model when every slot decodes."""
    slots = source.deployment.context.settings.max_num_seqs
    decode = steps.train.filter(~pl.col("has_prefill"))
    trained_on = float(matrix(steps.train, [_TERM_NAMES[_REQUESTS_TERM]]).max())
    if slots is None or slots <= trained_on or not decode.height:
        return
    each = decode[_TERM_NAMES[_DECODE_KV]] / decode[_TERM_NAMES[_REQUESTS_TERM]]
    per_token = _step_rates(source, np.eye(len(_TERM_NAMES))[_DECODE_KV]).context_token
    context = max(float(each.to_numpy().mean()) / per_token - 1, 1.0)
    blis = _times(source, beta).step(StepBatch(decode_reqs=slots, context_tokens=slots * context))
    full = pl.DataFrame({"batch": [float(slots)], "context": [context]})
    try:
        predicted = evaluated_steps(source.models, full)["predicted_us"][0]
    except UsageError:  # a feature set of the user that needs more than a described step has
        return
    if predicted and abs(blis / predicted - 1) > MAX_DIFFERENCE:
        yield (
            f"beyond the training load BLIS's steps differ from the step model: with {slots} requests decoding "
            f"(trained on up to {trained_on:.0f}) it takes {blis / 1e3:.3g} ms, {source.models.step_model.name} "
            f"{predicted / 1e3:.3g} ms"
        )


def _times(source: Source, beta: Vector) -> StepRates | RooflineRates:
    context = source.deployment.context
    if _is_roofline(beta) and context.architecture is not None and context.gpu is not None:
        shape = roofline_shape(context.architecture, context.gpu, tp=context.settings.tensor_parallel or 1)
        return RooflineRates(shape, beta)
    return _step_rates(source, beta)


def _step_rates(source: Source, beta: Vector) -> StepRates:
    """Return BLIS's step time as a sum of products: the differences of its terms between steps that differ in one
    count.
    """
    if len(beta) < len(_TERM_NAMES):
        one = np.eye(len(_TERM_NAMES))
        phases = (
            (_step_rates(source, factor * one[compute]), _step_rates(source, factor * one[kv]))
            for factor, compute, kv in ((beta[0], 0, 8), (beta[1], 1, 9))
        )
        rest = np.r_[0.0, 0.0, beta[2:], 0.0, 0.0]
        return replace(_step_rates(source, rest), larger=tuple(phases))
    # Every term is linear in the counts of a step except the pairs, which are a count here: differences are exact.
    nothing = dict.fromkeys((*ROOFLINE_COLUMNS, PAIRS_COLUMN), 0.0)
    request, token = nothing | {"num_decode_reqs": 1.0}, nothing | {"prefill_tokens": 1.0}
    decode = request | {"decode_tokens": 1.0}
    pair, context = token | {PAIRS_COLUMN: 1.0}, decode | {"context_tokens": 1.0}
    terms = _with_terms(source, pl.DataFrame([nothing, request, token, pair, decode, context]))
    empty, one, token_us, pair_us, decode_us, context_us = (matrix(terms, _TERM_NAMES) @ beta).tolist()
    return StepRates(empty, one - empty, token_us - empty, pair_us - token_us, decode_us - one, context_us - decode_us)


# -- replays ---------------------------------------------------------------------------------------------

_Replay: TypeAlias = "Callable[[pl.DataFrame, Vector], tuple[pl.DataFrame, bool]]"
"""Requests and beta to what `_replayed` returns."""

BLIS_LENGTHS = {
    "prompt": pl.col("prompt_tokens").cast(pl.Int64),
    "output": pl.col("output_tokens").fill_null(1).clip(lower_bound=1).cast(pl.Int64),
    "shared": pl.col("cached_prompt_tokens").fill_null(0).clip(lower_bound=0).cast(pl.Int64),
}
"""Lengths of a request as BLIS takes them; `shared` tokens of the prompt are in the prefix cache."""

_LATENCY_COLUMNS = {
    "TTFT": pl.col("ttft_us"),
    "ITL": pl.col("itl_us"),
    # A span without events ends where the front end has the last token.
    "E2E": pl.when(pl.col("dialect").is_in(WITHOUT_EVENTS)).then("e2e_us").otherwise("client_us"),
}


def stamped_requests(source: Source) -> pl.DataFrame:
    """Return the requests that can be replayed."""
    return source.tables.requests.drop_nulls(["arrival_ns", "first_token_ns", "prompt_tokens"])


def whole_us(ns: pl.Expr) -> pl.Expr:
    """Return a time in whole us."""
    return (ns / 1e3).round().cast(pl.Int64)


def _requests(source: Source, ends: pl.DataFrame) -> tuple[pl.DataFrame, str | None]:
    """Return the requests of a replay, or why a replay is not possible.

    Returns:
        A row per request, engine by engine in the order they arrived, in us since its first: `arrival` and `departure`
        (whole), the measured `TTFT`, `ITL` and `E2E`; `prompt`, `output` (at least 1) and `shared` tokens (in the
        prefix cache); `counts`, whether it counts in errors (not aborted, with more than one token); `boundary`, where
        the hold-out begins.
    """
    rows = stamped_requests(source).join(ends, on=SERVER).sort(*ENGINE, "arrival_ns", maintain_order=True)
    begin = pl.col("arrival_ns").first().over(ENGINE)
    requests = rows.select(
        *ENGINE,
        arrival=whole_us(pl.col("arrival_ns") - begin),
        departure=whole_us(pl.coalesce("departed_ns", "finished_ns", "first_token_ns") - begin),
        boundary=(pl.col("holdout_from_ns").first().over(ENGINE) - begin) / 1e3,
        **BLIS_LENGTHS,
        counts=(
            pl.col("finish_status").ne_missing("aborted")
            & (pl.col("output_tokens") > 1)
            & pl.all_horizontal(measured.is_not_null() for measured in _LATENCY_COLUMNS.values())
        ).fill_null(value=False),
        **{name: measured.cast(pl.Float64) for name, measured in _LATENCY_COLUMNS.items()},
    )
    is_sampled = (source.tables.runs["journey_sampling"] < BLIS_JOURNEYS_SHARE).any()
    return requests, "journeys of all requests would let their replay choose" if is_sampled else None


def _training(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that arrived before the hold-out; those that left in it are replayed but do not count."""
    early = requests.filter(pl.col("arrival") < pl.col("boundary"))
    latest = early.group_by(ENGINE, maintain_order=True).tail(MOST_BLIS_REQUESTS)
    return latest.with_columns(counts=pl.col("counts") & (pl.col("departure") < pl.col("boundary")))


def _replayed(
    source: Source, alpha: tuple[int, int, int], requests: pl.DataFrame, beta: Vector
) -> tuple[pl.DataFrame, bool]:
    """Replay the requests of each engine by itself, under the limits of the traced server's scheduler.

    Returns:
        The requests that count, with the requests in the engine at its arrival (`load`) and their replayed latencies
        (`replayed TTFT`, ...); and whether any request was preempted.
    """
    settings, rates = source.deployment.context.settings, _times(source, beta)
    alpha = _roofline_alpha(alpha) if _is_roofline(beta) else alpha
    limits = EngineSettings(
        settings.max_num_seqs or DEFAULT_SLOTS,
        settings.max_num_batched_tokens or DEFAULT_BUDGET,
        block_size(source),
        kv_blocks(source),
    )
    replayed, preempted = [], False
    for engine in requests.partition_by(ENGINE, maintain_order=True):
        arrival, departure, prompt, output, shared = (
            engine[name].to_numpy() for name in ("arrival", "departure", "prompt", "output", "shared")
        )
        latencies = replay_as_blis(arrival, prompt, output, rates, alpha, limits, shared)
        preempted |= latencies.preemptions > 0
        left = np.searchsorted(np.sort(departure), arrival)
        columns = {
            "load": np.searchsorted(arrival, arrival) - left,
            "replayed TTFT": latencies.ttft,
            "replayed ITL": latencies.decode / np.maximum(output - 1, 1),
            "replayed E2E": latencies.e2e,
        }
        replayed.append(engine.with_columns(pl.Series(name, values) for name, values in columns.items()))
    # A request that never gets its blocks has no latency in the replay, although the server served it.
    return pl.concat(replayed).filter(pl.col("counts") & pl.col("replayed E2E").is_finite()), preempted


def _error_pct(requests: pl.DataFrame, name: str, percent: int) -> float:
    """Return the error in percent of a percentile of a replayed latency."""
    actual, replayed = (percentile(requests[column].to_numpy(), percent) for column in (name, f"replayed {name}"))
    return float(100 * (replayed / actual - 1))


def _worst(requests: pl.DataFrame) -> float:
    """Return the largest error of the replayed latencies, in units of the bar."""
    return max(abs(_error_pct(requests, *what)) / bar for what, bar in BAR_PCT.items())


def _choose(replays: _Replay, fits: Mapping[str, Vector], training: pl.DataFrame, steps: _Steps) -> tuple[Vector, str]:
    """Choose the fit with the smallest worst error over the training requests under light and under heavy load.

    One whose coefficients stand in for other terms is chosen only where no other is about as close, or as close as
    asked.

    Returns:
        Its coefficients, and how they were chosen, for the user. Where requests were preempted, all of them are scaled.
    """
    worst, any_preempted = {}, False
    for weighting, beta in fits.items():
        compared, preempted = replays(training, beta)
        busy = pl.col("load") > pl.col("load").median()
        # A fit that is right on average can be wrong at both loads, in opposite directions.
        halves = [compared.filter(half) for half in (busy, ~busy)]
        enough = [half for half in halves if half.height >= MIN_REQUESTS // 4]
        worst[weighting] = max(map(_worst, enough or [compared]))
        any_preempted |= preempted
    enough_error = max(1.0, _ABOUT * min(worst.values()))
    close = [w for w in worst if worst[w] <= enough_error and not any(_transfer(fits[w], steps))]
    best = min(close or worst, key=lambda w: worst[w])
    reason = (
        f"{best}, of {len(fits)} the closest replay of {training['counts'].sum()} training requests, light and heavy "
        f"load apart: at worst {worst[best]:.2f} times what is asked (TTFT P50 within 10 %, ITL and E2E P50 and P90 "
        f"within 3 %), equal steps {worst[EQUAL_STEPS]:.2f}"
    )
    if not any_preempted:
        return fits[best], reason
    # By bisection: latencies grow with step times, through the queue faster than in proportion.
    low, high = 1 / MOST_SCALE, MOST_SCALE
    for _ in range(SCALE_ROUNDS):
        middle = (low + high) / 2
        compared, _preempted = replays(training, fits[best] * middle)
        too_short = compared["replayed E2E"].sum() < compared["E2E"].sum()
        low, high = (middle, high) if too_short else (low, middle)
    scale = round((low + high) / 2, 4)
    return fits[best] * scale, (
        f"{reason}; step times times {scale:g}, so that latencies add up over training requests: BLIS finds the "
        "prompt of a preempted request in its cache and generates its output again, the server computes both again"
    )


def _replayed_errors(
    replays: _Replay, requests: pl.DataFrame, training: pl.DataFrame, beta: Vector
) -> tuple[list[HeldOut], str]:
    """Replay the latest requests, and return the errors of those that arrived in the hold-out, with a note."""
    # Twice as many as count at most: the engine must be under load when they arrive.
    latest = requests.group_by(ENGINE, maintain_order=True).tail(2 * MOST_BLIS_REQUESTS)
    late = pl.col("counts") & (pl.col("arrival") >= pl.col("boundary"))
    compared, _ = replays(latest.with_columns(counts=late), beta)
    if compared.height < MIN_REQUESTS // 4:
        return [], f"{compared.height} requests came in the hold-out: too few to replay"
    errors = [
        held_out(
            f"{name} of a request, replayed",
            "us",
            compared[name].to_numpy(),
            compared[f"replayed {name}"].to_numpy(),
            training[name].drop_nulls().to_numpy(),
        )
        for name in _LATENCY_COLUMNS
    ]
    errors_text = "; ".join(
        f"{name} {', '.join(f'P{p} {_error_pct(compared, name, p):+.1f} %' for p in (50, 90, 99))}"
        for name in _LATENCY_COLUMNS
    )
    return (
        errors,
        f"replayed as BLIS would, {compared.height} held-out requests against the trace: {errors_text}",
    )
