"""Fit BLIS's coefficients: step times on its own terms, with the weighting whose replay of training requests is closest.

BLIS's terms cannot follow every step, so that a fit has to favour some steps by its weights. Users compare latencies of
requests, not step times, and the simulator's feedback (a shorter step means a smaller batch, which means a shorter step)
amplifies errors. The steps are therefore fitted under several weightings, each result replays the training requests
(`blis_replay`), and the one with the closest latencies is exported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.coefficients.predict_frames import predict_steps
from tracefit.consumers.base import (
    HeldOut,
    Source,
    held_out,
    kv_blocks,
    train_and_holdout,
    written,
)
from tracefit.consumers.blis_replay import ReplayLimits, StepRates, replay
from tracefit.consumers.blis_roofline import (
    BLIS_TERMS,
    PAIRS_COLUMN,
    add_blis_terms,
    with_prefill_pairs,
)
from tracefit.errors import DataError, UsageError
from tracefit.features.roofline import ROOFLINE_COLUMNS
from tracefit.features.sets import Feature, FeatureSet
from tracefit.fit.estimators import HUBER, fit_nonnegative
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.splits import step_frame
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tracefit.statistics import Flags, Integers, Vector

_STEP = FeatureSet("blis", tuple(Feature(name, unit, name) for name, unit in BLIS_TERMS.items()))
_NAMES = list(BLIS_TERMS)
_CONSTANT = _NAMES.index("blis_one")
_REQUESTS = _NAMES.index("blis_requests")
_DECODE_KV = _NAMES.index("blis_decode_kv_us")
ALL_JOURNEYS = 0.99
"""Least journey sampling for a replay: with fewer requests it would run under too little load."""

MIN_REQUESTS = 40
"""Fewest training requests for a choice by replay."""

MOST_REQUESTS = 2_000
"""Most requests of an engine that are replayed: the latest ones."""

DEFAULT_SLOTS = 256
DEFAULT_BUDGET = 2_048
"""BLIS's own scheduler limits, used where the server's are not known."""

BAR_PCT: Mapping[tuple[str, int], float] = {
    ("TTFT", 50): 10.0,
    ("ITL", 50): 3.0,
    ("ITL", 90): 3.0,
    ("E2E", 50): 3.0,
    ("E2E", 90): 3.0,
}
"""The bar for a replay: latency and percentile to the largest acceptable error in percent."""

MOST_SCALE = 1.06
SCALE_ROUNDS = 5
"""The factor on step times is found by this many bisections between 1 / `MOST_SCALE` and `MOST_SCALE`, to 0.4 %."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """Weight of a row in the fit: requests in the step ** requests_power / time ** time_power.

    Attributes:
        requests_power: 1 counts a step once per request in it, 0 once.
        time_power: 2 weighs errors in percent, 0 weighs errors in us.
        robust: Apply Huber's weights too. Without them tails count in full, which keeps the sum of all steps.
    """

    requests_power: float
    time_power: float
    robust: bool

    @property
    def name(self) -> str:
        """The weighting as a formula."""
        how = "Huber" if self.robust else "least squares"
        if not self.requests_power and not self.time_power:
            return f"equal steps, {how}"
        return f"requests^{self.requests_power:g} / time^{self.time_power:g}, {how}"


WEIGHTINGS = (
    Weighting(0.0, 0.0, robust=False),
    Weighting(1.0, 0.0, robust=False),
    Weighting(0.5, 0.5, robust=True),
    Weighting(0.5, 0.5, robust=False),
    Weighting(1.0, 0.5, robust=True),
    Weighting(1.0, 1.0, robust=False),
)
FALLBACK = WEIGHTINGS[2]
"""Weighting where no requests can be replayed: the best one over twenty generated runs of eight models."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen weighting and the reason.

    Attributes:
        weighting: The weights of rows.
        reason: How it was chosen, for the user.
        scale: Factor on every step time with which replayed and measured E2E of training requests have the same sum; 1
            without preemptions.
    """

    weighting: Weighting
    reason: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BlisCoefficients:
    """The coefficients as written for BLIS, with the errors of exactly these."""

    alpha: tuple[int, int, int]
    beta: tuple[float, ...]
    choice: Choice
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Training and held-out steps of one scope on BLIS's terms."""

    train: pl.DataFrame
    held: pl.DataFrame
    x: Vector
    y: Vector
    varies: Flags
    ends: pl.DataFrame
    """run_id, server, holdout_from_ns."""


def fit_blis(source: Source, alpha: tuple[int, int, int]) -> BlisCoefficients:
    """Fit step times on BLIS's terms under every weighting, and take the one whose replay is closest on training requests.

    Args:
        source: One scope.
        alpha: alpha0 to alpha2 in whole us, as BLIS reads them.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    steps = _steps(source)
    fits = {w: _fit(steps, w) for w in WEIGHTINGS}
    engines, missing = _engines(source, steps.ends)
    limits = replay_limits(source)
    choice = Choice(FALLBACK, f"{FALLBACK.name}; {missing}") if missing else None
    if choice is None:
        choice = _choose(source, fits, [e.training() for e in engines], alpha, limits)
    beta = tuple(written(v * choice.scale) for v in fits[choice.weighting])
    errors = [*_step_errors(steps, beta)]
    notes = [f"weighting: {choice.reason}"]
    if engines and not missing:
        replayed, replay_notes = _replayed_errors(source, engines, beta, alpha, limits)
        errors += replayed
        notes += replay_notes
    same = [n for i, n in enumerate(_NAMES) if not steps.varies[i] and steps.x[:, i].any()]
    notes.append(
        f"{', '.join(same)} do not vary in one scope: beta6 holds what they add, for this scope alone"
    )
    notes += [*_transfer(beta, steps), *_full_batch(source, steps, beta)]
    return BlisCoefficients(alpha, beta, choice, tuple(errors), tuple(notes))


# -- step times ------------------------------------------------------------------------------------------


def _steps(source: Source) -> _Steps:
    context = source.scope.context
    if context.architecture is None or context.gpu is None:
        lacking = "config.json" if context.architecture is None else "GPU"
        raise DataError(
            f"BLIS's step terms need the model's config.json and the GPU; the {lacking} is not known",
            hint="ingest the run again with --model-config and --gpu",
        )
    tp = context.settings.tensor_parallel or 1
    exact = with_prefill_pairs(source.tables.timeline, source.tables.requests)
    timeline = add_blis_terms(exact, context.architecture, context.gpu, tp=tp)
    rows = step_frame(source.tables, timeline, _STEP, {}, source.step_source)
    train, held = train_and_holdout(rows, _NAMES, "BLIS step terms")
    x, y = matrix(train, _NAMES), target_of(train)
    # Terms that do not vary within the scope cannot be separated: BLIS's constant of a step takes their sum.
    varies = np.array([i == _CONSTANT or np.ptp(x[:, i]) > 0 for i in range(len(_NAMES))])
    ends = rows.drop_nulls("holdout_from_ns").group_by(SERVER).agg(pl.col("holdout_from_ns").first())
    return _Steps(train, held, x, y, varies, ends)


def _fit(steps: _Steps, weighting: Weighting) -> Vector:
    # A step without requests has no weight where requests count, and no infinite one.
    requests = np.maximum(steps.x[:, _REQUESTS], 1e-9)
    weights = requests**weighting.requests_power / np.maximum(steps.y, 1.0) ** weighting.time_power
    # A row of an interval is the mean of several steps.
    weights = weights * steps.train["interval_steps"].to_numpy().astype(float)
    huber = HUBER if weighting.robust else np.inf
    return fit_nonnegative(steps.x * steps.varies, steps.y, weights / weights.mean(), huber=huber)


def _step_errors(steps: _Steps, beta: tuple[float, ...]) -> Iterator[HeldOut]:
    y = target_of(steps.held)
    # As BLIS cuts them.
    predicted = np.maximum(np.floor(matrix(steps.held, _NAMES) @ np.array(beta)), 1.0)
    mixed = steps.held["has_prefill"].to_numpy()
    groups = {
        "step time": np.ones(len(y), dtype=bool),
        "step time, mixed": mixed,
        "step time, decode only": ~mixed,
    }
    return (
        held_out(what, "us", y[rows], predicted[rows], steps.y) for what, rows in groups.items() if rows.any()
    )


# The two terms of each phase, of which one binds it.
_PHASES = {"prefill": {0: "compute", 8: "KV"}, "decode": {1: "compute", 9: "KV"}}
MOST_NOMINAL = 10.0
"""Largest multiple of its nominal value at which a coefficient still describes its own term."""


def _transfer(beta: tuple[float, ...], steps: _Steps) -> Iterator[str]:
    """Yield a note on coefficients that stand in for other terms and hold for their own scope alone.

    A phase is bound by one of its two roofline terms. One of them may therefore be 0, but not both, and neither should be a
    large multiple of its nominal value.
    """
    implausible = []
    for phase, terms in _PHASES.items():
        varying = {i: what for i, what in terms.items() if steps.varies[i]}
        most = [i for i in varying if beta[i] > MOST_NOMINAL]
        if varying and not any(beta[i] for i in varying):
            implausible.append(f"no {phase} term is above 0")
        implausible += [f"beta{i} ({phase} {varying[i]}) is {beta[i]:.3g} times nominal" for i in most]
        if most:
            implausible += [f"beta{i} ({phase} {varying[i]}) is 0" for i in varying if not beta[i]]
    if implausible:
        yield (
            f"no transfer: {', '.join(implausible)}; these stand in for other terms, and hold for this model, GPU, tensor parallelism "
            "and load alone"
        )


MAX_DIFFERENCE = 0.2
"""Largest relative difference between BLIS's step and tracefit's at a full batch that needs no note."""


def _full_batch(source: Source, steps: _Steps, beta: tuple[float, ...]) -> Iterator[str]:
    """Yield a note where BLIS's step time differs from tracefit's own model when every slot decodes."""
    slots = source.scope.context.settings.max_num_seqs
    decode = steps.train.filter(~pl.col("has_prefill"))
    trained_on = float(matrix(steps.train, [_NAMES[_REQUESTS]]).max())
    if slots is None or slots <= trained_on or not decode.height:
        return
    rates = step_rates(source, np.array(beta))
    each = decode[_NAMES[_DECODE_KV]] / decode[_NAMES[_REQUESTS]]
    per_token = step_rates(source, np.eye(len(beta))[_DECODE_KV]).context_token
    context = max(float(each.to_numpy().mean()) / per_token - 1, 1.0)
    blis = rates.constant + slots * (rates.request + rates.decode_request + rates.context_token * context)
    full = pl.DataFrame({"batch": [float(slots)], "context": [context]})
    try:
        predicted = predict_steps(source.models, full)["predicted_us"][0]
    except UsageError:  # a feature set of the user's own that a described step does not hold
        return
    if predicted and abs(blis / predicted - 1) > MAX_DIFFERENCE:
        yield (
            f"beyond the training load BLIS's steps leave our model's: with {slots} requests decoding (trained on up to {trained_on:.0f}) "
            f"it takes {blis / 1e3:.3g} ms, {source.models.step_model.name} {predicted / 1e3:.3g} ms; its terms are a line in the batch"
        )


# -- replays ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _EngineRequests:
    """The requests of one engine.

    Attributes:
        rows: In the order they arrived, in us since the first: `arrival` and `departure` (whole), the measured `TTFT`, `ITL`
            and `E2E`; `prompt`, `output` (at least 1) and `shared` tokens (found in the prefix cache); `counts`: whether
            the request counts in errors (not aborted, with more than one token).
        boundary: Time at which the hold-out begins, in us.
    """

    rows: pl.DataFrame
    boundary: float

    def training(self) -> _EngineRequests:
        """Return the requests that arrived before the hold-out; those that left in it are replayed but do not count."""
        early = self.rows.filter(pl.col("arrival") < self.boundary).tail(MOST_REQUESTS)
        return replace(self, rows=early).counting(pl.col("departure") < self.boundary)

    def latest(self) -> _EngineRequests:
        """Return the last requests, of which those that arrived in the hold-out count."""
        # Twice as many as count at most: the engine must be under load when they arrive.
        last = self.rows.tail(2 * MOST_REQUESTS)
        return replace(self, rows=last).counting(pl.col("arrival") >= self.boundary)

    def counting(self, also: pl.Expr) -> _EngineRequests:
        """Return the same requests, of which those that do not meet a condition count no more."""
        return replace(self, rows=self.rows.with_columns(counts=pl.col("counts") & also))

    def load(self) -> Integers:
        """Return the number of requests in the engine when each arrived; shape (n,)."""
        arrival, departure = (self.rows[name].to_numpy() for name in ("arrival", "departure"))
        left = np.searchsorted(np.sort(departure), arrival)
        return np.asarray(np.searchsorted(arrival, arrival) - left)


def _engines(source: Source, ends: pl.DataFrame) -> tuple[list[_EngineRequests], str | None]:
    """Return the requests of every engine, or why they cannot be replayed."""
    sampled = source.tables.runs["journey_sampling"].drop_nulls()
    # polars types an extreme as any scalar a column can hold; this column is numbers.
    if sampled.len() and float(sampled.min() or 0.0) < ALL_JOURNEYS:  # type: ignore[arg-type]
        return [], "journeys of all requests would let their replay choose"
    stamps = ("arrival_ns", "first_token_ns", "prompt_tokens")
    rows = source.tables.requests.filter(pl.all_horizontal(pl.col(stamps).is_not_null()))
    rows = rows.join(ends, on=SERVER).sort(*ENGINE, "arrival_ns", maintain_order=True)
    engines = [_engine(requests) for _, requests in rows.group_by(ENGINE, maintain_order=True)]
    if sum(int(e.training().rows["counts"].sum()) for e in engines) < MIN_REQUESTS:
        return [], f"fewer than {MIN_REQUESTS} training requests to replay"
    return engines, None


def _engine(rows: pl.DataFrame) -> _EngineRequests:
    begin = int(rows["arrival_ns"][0])
    left = pl.coalesce("departed_ns", "finished_ns", "first_token_ns")

    def whole_us(at: pl.Expr) -> pl.Expr:
        return ((at - begin) / 1e3).round().cast(pl.Int64)

    measured = {"TTFT": "ttft_us", "ITL": "itl_us", "E2E": "client_us"}
    requests = rows.select(
        arrival=whole_us(pl.col("arrival_ns")),
        departure=whole_us(left),
        prompt=pl.col("prompt_tokens").cast(pl.Int64),
        output=pl.col("output_tokens").fill_null(1).clip(lower_bound=1).cast(pl.Int64),
        shared=pl.col("cached_prompt_tokens").fill_null(0).clip(lower_bound=0).cast(pl.Int64),
        counts=(
            pl.col("finish_status").ne_missing("aborted")
            & (pl.col("output_tokens") > 1)
            & pl.all_horizontal(pl.col("departed_ns", *measured.values()).is_not_null())
        ).fill_null(value=False),
        **{name: pl.col(column).cast(pl.Float64) for name, column in measured.items()},
    )
    return _EngineRequests(requests, (int(rows["holdout_from_ns"][0]) - begin) / 1e3)


def step_rates(source: Source, beta: Vector) -> StepRates:
    """Return BLIS's step time as a sum of products: the differences of its terms between steps that differ in one count.

    Args:
        source: One scope, its architecture and GPU known.
        beta: The ten coefficients.
    """
    context = source.scope.context
    if context.architecture is None or context.gpu is None:
        raise DataError("BLIS's step terms need the model's config.json and the GPU")
    # Every term is linear in the counts of a step but the pairs, which are given: differences are exact.
    nothing = dict.fromkeys((*ROOFLINE_COLUMNS, PAIRS_COLUMN), 0.0)
    request, token = nothing | {"num_decode_reqs": 1.0}, nothing | {"prefill_tokens": 1.0}
    decode = request | {"decode_tokens": 1.0}
    described = [
        nothing,
        request,
        token,
        token | {PAIRS_COLUMN: 1.0},
        decode,
        decode | {"context_tokens": 1.0},
    ]
    tp = context.settings.tensor_parallel or 1
    terms = add_blis_terms(pl.DataFrame(described), context.architecture, context.gpu, tp=tp)
    empty, one, token_us, pair_us, decode_us, context_us = (matrix(terms, _NAMES) @ beta).tolist()
    return StepRates(
        empty, one - empty, token_us - empty, pair_us - token_us, decode_us - one, context_us - decode_us
    )


def replay_limits(source: Source) -> ReplayLimits:
    """Return the limits of the traced server's scheduler; BLIS's own defaults where they are not known."""
    settings = source.scope.context.settings
    return ReplayLimits(
        settings.max_num_seqs or DEFAULT_SLOTS,
        settings.max_num_batched_tokens or DEFAULT_BUDGET,
        settings.block_size or 16,  # vLLM's default
        kv_blocks(source),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """Measured and replayed latencies of the requests that count, the load they met, and the number of preemptions."""

    measured: Mapping[str, Vector]
    replayed: Mapping[str, Vector]
    load: Integers
    preemptions: int

    def error_pct(self, rows: Flags, name: str, percentile: int) -> float:
        """Return the error in percent of a percentile over some of the requests."""
        actual, replayed = (
            np.percentile(latencies[name][rows], percentile) for latencies in (self.measured, self.replayed)
        )
        return float(100 * (replayed / actual - 1))

    def worst(self, rows: Flags) -> float:
        """Return the largest error over some of the requests, in units of the bar."""
        return max(abs(self.error_pct(rows, *what)) / bar for what, bar in BAR_PCT.items())


def _compare(
    engines: Iterable[_EngineRequests],
    rates: StepRates,
    alpha: tuple[int, int, int],
    limits: ReplayLimits,
) -> _Compared:
    measured: dict[str, list[Vector]] = {"TTFT": [], "ITL": [], "E2E": []}
    replayed: dict[str, list[Vector]] = {"TTFT": [], "ITL": [], "E2E": []}
    loads, preemptions = [], 0
    for engine in engines:
        arrival, prompt, output, shared = (
            engine.rows[name].to_numpy() for name in ("arrival", "prompt", "output", "shared")
        )
        latencies = replay(arrival, prompt, output, rates, alpha, limits, shared=shared)
        # A request that never gets its blocks has no latency: in the replay alone, for the server served it.
        rows = engine.rows["counts"].to_numpy() & np.isfinite(latencies.e2e)
        itl = latencies.decode / np.maximum(output - 1, 1)
        for name, values in {"TTFT": latencies.ttft, "ITL": itl, "E2E": latencies.e2e}.items():
            measured[name].append(engine.rows[name].to_numpy()[rows])
            replayed[name].append(values[rows])
        loads.append(engine.load()[rows])
        preemptions += latencies.preemptions
    return _Compared(
        {name: np.concatenate(values) for name, values in measured.items()},
        {name: np.concatenate(values) for name, values in replayed.items()},
        np.concatenate(loads),
        preemptions,
    )


def _choose(
    source: Source,
    fits: Mapping[Weighting, Vector],
    engines: list[_EngineRequests],
    alpha: tuple[int, int, int],
    limits: ReplayLimits,
) -> Choice:
    """Choose the weighting with the smallest worst error over the training requests under light and under heavy load."""
    worst, preempted = {}, 0
    for weighting, beta in fits.items():
        compared = _compare(engines, step_rates(source, beta), alpha, limits)
        busy = compared.load > np.median(compared.load)
        # A fit that is right on average can be wrong at both loads, in opposite directions.
        halves = [rows for rows in (busy, ~busy) if rows.sum() >= MIN_REQUESTS // 4]
        worst[weighting] = max(compared.worst(rows) for rows in halves or [np.ones(len(busy), dtype=bool)])
        preempted = max(preempted, compared.preemptions)
    best = min(worst, key=lambda w: worst[w])
    equal = worst[WEIGHTINGS[0]]
    reason = (
        f"{best.name}, of {len(fits)} the closest replay of {sum(int(e.rows['counts'].sum()) for e in engines)} training requests, "
        f"light and heavy load apart: at worst {worst[best]:.2f} times what is asked (TTFT P50 within 10 %, ITL and E2E P50 "
        f"and P90 within 3 %), equal steps {equal:.2f}"
    )
    if not preempted:
        return Choice(best, reason)
    scale = _scale(source, fits[best], engines, alpha, limits)
    return Choice(
        best,
        f"{reason}; step times times {scale:g}, so that latencies add up over training requests: BLIS finds the prompt of a "
        "preempted request in its cache and generates its output anew, the server computes both again",
        scale,
    )


def _scale(
    source: Source,
    beta: Vector,
    engines: list[_EngineRequests],
    alpha: tuple[int, int, int],
    limits: ReplayLimits,
) -> float:
    """Return the factor on step times with which the replayed and the measured E2E of training requests have the same sum."""

    def excess(scale: float) -> float:
        compared = _compare(engines, step_rates(source, beta * scale), alpha, limits)
        return float(compared.replayed["E2E"].sum() / compared.measured["E2E"].sum() - 1)

    # By bisection: latencies grow with step times, through the queue faster than in proportion.
    low, high = 1 / MOST_SCALE, MOST_SCALE
    for _ in range(SCALE_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return round((low + high) / 2, 4)


def _replayed_errors(
    source: Source,
    engines: list[_EngineRequests],
    beta: tuple[float, ...],
    alpha: tuple[int, int, int],
    limits: ReplayLimits,
) -> tuple[list[HeldOut], list[str]]:
    """Replay the latest requests, and return the errors of those that arrived in the hold-out, with notes."""
    compared = _compare([e.latest() for e in engines], step_rates(source, np.array(beta)), alpha, limits)
    count = len(compared.load)
    if count < MIN_REQUESTS // 4:
        return [], [f"{count} requests came in the hold-out: too few to replay"]
    trained = {
        n: np.concatenate([e.training().rows[n].to_numpy() for e in engines]) for n in compared.measured
    }
    errors = [
        held_out(
            f"{n} of a request, replayed",
            "us",
            compared.measured[n],
            compared.replayed[n],
            _known(trained[n]),
        )
        for n in compared.measured
    ]
    every = np.ones(count, dtype=bool)
    errors_text = "; ".join(
        f"{name} {', '.join(f'P{p} {compared.error_pct(every, name, p):+.1f} %' for p in (50, 90, 99))}"
        for name in compared.measured
    )
    return errors, [f"replayed as BLIS would, {count} held-out requests against the trace: {errors_text}"]


def _known(values: Vector) -> Vector:
    """Return the finite values."""
    return values[np.isfinite(values)]
