"""Plan servers for a load: replay a steady load at several rates, and search for the fewest servers or the largest
rate.

All servers are equal, and each gets its requests at random or in turn, independently of the others: one stands for all.
Every rate has the same requests and random numbers, only the gaps are scaled, so that latencies change with the rate
and not with the draw. Longer replays near the answer, the anchors, then set the level of the curve near them.

The uncertainty of the step time needs no more replays. A server whose steps take s times as long serves a load as this
one serves s times the load, s times as slowly. For each draw of the coefficients s follows from the batches of a
replay; this is exact if all steps change by the same factor. The machine's speed is such a factor: it was another one
in each stretch of the recording, and the load that is planned for meets one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec.structs import replace

from tracefit.errors import DataError
from tracefit.models.amounts import filled
from tracefit.models.describe import STEP_INPUTS, STEP_VALUES
from tracefit.models.evaluate import CompiledModel
from tracefit.models.frames import evaluated
from tracefit.replay.arrivals import GAP_BLOCK
from tracefit.replay.decoding import TabledDecoding
from tracefit.replay.long_run import LONG_QUEUE_LENGTH, RANKS, LongerWaits, longer_waits, slot_waits_us
from tracefit.replay.models import FittedStepTimes, admission_us
from tracefit.replay.run import RequestLoad, TokenGaps, replay, token_gaps
from tracefit.results.plans import Objective, PlannedLatency, PlanPoint
from tracefit.statistics import monotone, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracefit.models.deployment import DeploymentModels
    from tracefit.models.evaluate import Evaluated
    from tracefit.models.schema import LinearForm, Model
    from tracefit.replay.engine import EngineSettings, StepBatch, StepGroup, StepTimeModel
    from tracefit.statistics import Flags, Integers, Matrix, Vector

_WAVES = 4
"""Times that a server's slots are filled in the replay of its capacity, at least."""
REPLAYED_REQUESTS = 1_200
"""Requests of one replay of a curve."""
ANCHOR_REQUESTS = 6_000
"""Requests of a replay at a rate that a search tries and that is not its answer."""
ANSWER_REQUESTS = 9_000
"""Requests of a replay at the rate of an answer. Near the capacity P90 of TTFT varies by tens of percent between
replays of 6,000 to 12,000, which the interval has to hold; with the waits of the long run it varies by some percent."""

LOAD_SHARES = (0.15, 0.35, 0.55, 0.7, 0.8, 0.88, 0.95, 1.0)
"""Rates of a curve, as shares of the capacity."""
_IDLE_SHARE = 0.01
"""Share of the capacity at which hardly any request meets another one."""
SATURATED = 0.95
"""Share of the capacity above which a queue's length is that of the capacity's own error: some percent of it decide
whether the queue grows, and nothing bounds the latency from above."""
_LONG_RUN_SHARES = (0.6, 0.98)
"""Shares of the capacity between which a queue has a long run: below, hardly any request waits. Above, no time is long
enough, and the waits are at least those of the upper share."""
_LONGEST = 100
"""Requests of a queue in the long run, as a multiple of those of the replay, at most."""
SOME_OUTSIDE_PCT = 2.0
"""Share of the busy time outside the training above which latencies count as extrapolated."""
_SLACK = 0.02
_MOST_TEXTS = 2
_OF_THE_QUEUE = {"waiting_depth"}
_DRAWS = 400
_ENDS_PCT = (5.0, 95.0)
_Z95 = 1.959964
_Z90 = 1.644854
_REPLAY_PARTS = 20
_MOST_ANCHORS = 3
_MOST_RATES = 3
"""Longer replays of a search for the largest rate: each one is where the one before it moved the curve to."""
_ANCHOR_REACH = 0.1
"""Distance, as a share of the capacity, at which a longer replay says nothing of a curve: shorter ones are off one way
at some loads and the other way at others, and hardly at all where few requests wait."""
_CLOSE_SHARE = 0.005
"""Relative distance of two rates up to which one anchor serves both."""


# -- the load --------------------------------------------------------------------------------------------


class TrafficSample(msgspec.Struct, frozen=True):
    """Requests to draw from.

    Attributes:
        prompt_tokens: Shape (n,).
        output_tokens: Shape (n,).
        cached_tokens: Leading tokens of each prompt from the prefix cache, shape (n,).
        gaps: Consecutive gaps between arrivals over their mean at that time, shape (m,); null if arrivals are drawn.
        burstiness: Shape of the gamma distribution of drawn gaps: 1 is a Poisson process, a smaller one comes in
            bursts.
        is_sample: Whether the load has other requests like these, so that their lengths are uncertain too.
        in_turn: Whether servers get requests in turn; otherwise at random.
    """

    prompt_tokens: Integers
    output_tokens: Integers
    cached_tokens: Integers
    gaps: Vector | None = None
    burstiness: float = 1.0
    is_sample: bool = False
    in_turn: bool = False


def draw(sample: TrafficSample, count: int, servers: int) -> RequestLoad:
    """Draw requests in random order, stratified by output and then by prompt, so that both are spread as in the sample.

    Their arrivals are those at one of several servers, with a mean gap of 1.
    """
    lengths_rng, gaps_rng, jumps_rng = np.random.default_rng(0).spawn(3)
    most = len(sample.output_tokens)
    by_output = np.lexsort((sample.prompt_tokens, sample.output_tokens))
    stratum = np.arange(most) * math.isqrt(count) // most
    order = by_output[np.lexsort((sample.prompt_tokens[by_output], stratum))]
    picks = order[((np.arange(count) + lengths_rng.random(count)) * len(order) / count).astype(int)]
    lengths_rng.shuffle(picks)
    # The numbers of the requests that reach this server.
    jumps = np.full(count, servers) if sample.in_turn else jumps_rng.geometric(1 / servers, count)
    numbers = np.cumsum(jumps)
    at = np.cumsum(_gaps(sample, int(numbers[-1]), gaps_rng))[numbers - 1]
    lengths = (sample.prompt_tokens[picks], sample.output_tokens[picks], sample.cached_tokens[picks])
    return RequestLoad(at * (count / at[-1]), *lengths)


def _gaps(sample: TrafficSample, count: int, rng: np.random.Generator) -> Vector:
    """Return gaps of mean 1, shape (count,)."""
    if sample.gaps is not None and len(sample.gaps) >= GAP_BLOCK:
        starts = rng.integers(0, len(sample.gaps) - GAP_BLOCK + 1, -(-count // GAP_BLOCK))
        drawn = sample.gaps[(starts[:, None] + np.arange(GAP_BLOCK)).ravel()[:count]]
    else:
        drawn = rng.gamma(sample.burstiness, 1.0, count)
    return np.asarray(drawn / drawn.mean())


CARRIED_S = 30.0
"""Length of the time over which a server's finished requests are counted."""
_CARRIED_SHIFTS = 6


def carried_per_s(finished_ns: Integers, tokens: Matrix, mean_tokens: Sequence[float]) -> float | None:
    """Return the most requests of mean length that a server finished per second, over 30 s; null where it ran for less.

    Requests that finish together may be shorter than the mean: of the requests and each kind of their tokens, over
    their means, the one with the fewest counts.

    Args:
        finished_ns: When requests finished, in ascending order, shape (n,).
        tokens: Their tokens of each kind, computed prompt tokens and output tokens, shape (n, kinds).
        mean_tokens: The mean of each kind.
    """
    span_s = float(np.ptp(finished_ns)) / 1e9 if len(finished_ns) else 0.0
    if span_s < CARRIED_S:
        return None
    begins = np.arange(0.0, span_s - CARRIED_S + 1e-9, CARRIED_S / _CARRIED_SHIFTS)
    at = (finished_ns - finished_ns[0]) / 1e9
    first, end = np.searchsorted(at, begins), np.searchsorted(at, begins + CARRIED_S)
    work = np.column_stack([np.ones(len(at)), *(tokens[:, k] / mean for k, mean in enumerate(mean_tokens) if mean)])
    upto = np.vstack([np.zeros(work.shape[1]), np.cumsum(work, axis=0)])
    return float((upto[end] - upto[first]).min(axis=1).max()) / CARRIED_S


# -- one rate --------------------------------------------------------------------------------------------


class BatchRecorder:
    """A model of step times, each times a factor, that records the requested batches and the mean time of their
    steps.
    """

    def __init__(self, times: StepTimeModel, factor: float = 1.0) -> None:
        self.times, self.factor = times, factor
        self.batches: list[tuple[StepBatch, float]] = []

    def step(self, batch: StepBatch) -> float:
        """Return the time of a step, and keep both."""
        time = self.factor * self.times.step(batch)
        self.batches.append((batch, time))
        return time

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps, and keep their first batch with the mean."""
        times = self.times.decoding(batch, steps, growth)
        if self.factor != 1:
            times = self.factor * times
        self.batches.append((batch, float(np.add.reduce(times)) / steps))
        return times


@dataclass(frozen=True)
class Simulated:
    """A steady load on one server.

    Attributes:
        rate: Requests per second at each server.
        latencies: ttft, itl and e2e of the counted requests, in us.
        slowness: Low and high end of the factor on step times, from the uncertainty of the coefficients and of the
            machine's speed.
        running: Mean requests that run on a server.
        waiting: Mean requests that wait at it.
        outside_pct: Share of the busy time outside the training, in percent.
        outside: Names, values and training ranges of the features outside.
        sampled: Requests that the lengths were drawn from; infinite if they are the lengths of the load.
        gaps: Times between two tokens of a request, see `token_gaps`.
        step_mean_us: Mean time of a step.
        longer: By how much longer the counted requests wait than in the replay; null where they wait as long.
    """

    rate: float
    latencies: Mapping[str, Vector]
    slowness: tuple[float, float]
    running: float
    waiting: float
    outside_pct: float
    outside: tuple[str, ...]
    sampled: float
    gaps: TokenGaps | None = None
    step_mean_us: float = math.nan
    longer: LongerWaits | None = None
    _known: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    """Ends that were computed: every point of a curve asks for those of all points."""

    def percentile_ms(self, name: str) -> float:
        """Return the latency that a name such as `ttft_p99_ms` stands for."""
        latency, q = split_name(name)
        return percentile(self.latencies[latency], q) / 1e3

    def drawn(self, name: str, *, high: bool) -> float:
        """Return the low or the high end of the 90 % interval of a percentile over its value, from the draw of the
        requests.

        Consecutive requests share a queue: the error of the rank is the spread of the share below the percentile
        between parts of the replay (batch means; Law, Simulation Modeling and Analysis, 2015, section 9.5). The error
        of the sample is binomial.
        """
        if name not in self._known:
            self._known[name] = self._drawn(*split_name(name))
        return self._known[name][high]

    def _drawn(self, latency: str, q: float) -> tuple[float, float]:
        values = self.latencies[latency]
        value = percentile(values, q)
        below = (values <= value).astype(float)
        parts = _error_of_mean(below)
        if self.longer is not None and latency != "itl":
            # A part of it is that of the replay's own arrivals, which the long run does not have.
            own = _error_of_mean(below - (self.longer.ranks <= q / 100))
            parts = min(parts, math.hypot(own, float(np.interp(q / 100, RANKS, self.longer.rank_errors))))
        error = _Z90 * math.hypot(100 * parts, math.sqrt(q * (100 - q) / self.sampled))
        low, high = (percentile(values, end) for end in (max(q - error, 0.0), min(q + error, 100.0)))
        return low / max(value, 1e-6), high / max(value, 1e-6)


def _error_of_mean(values: Vector) -> float:
    """Return the standard error of the mean of consecutive values that depend on each other."""
    each, left = divmod(len(values), _REPLAY_PARTS)
    numbers = np.arange(min(_REPLAY_PARTS, len(values)))
    begins = numbers * each + np.minimum(numbers, left)
    parts = np.add.reduceat(values, begins) / np.diff(begins, append=len(values))
    return float(np.std(parts, ddof=1)) / math.sqrt(_REPLAY_PARTS)


def split_name(name: str) -> tuple[str, float]:
    """Return latency and percentage of a name such as `ttft_p99_ms`."""
    latency, _, q = name.removesuffix("_ms").partition("_p")
    return latency, float(q)


class Fleet(msgspec.Struct, frozen=True, dict=True):
    """Equal servers under a load.

    Attributes:
        deployment: Their models.
        server: Known settings that formulas of the models use.
        settings: Settings of the scheduler.
        sample: The requests to draw from.
        requests: Requests of one replay of a curve.
        carried_per_s: Requests per second of this kind that a recorded server finished; null where that is not known.
    """

    deployment: DeploymentModels
    server: Mapping[str, float]
    settings: EngineSettings
    sample: TrafficSample
    requests: int = REPLAYED_REQUESTS
    carried_per_s: float | None = None
    _known: dict[tuple[int, float, int], Simulated] = msgspec.field(default_factory=dict)
    _drawn: dict[tuple[int, int], RequestLoad] = msgspec.field(default_factory=dict)
    """Requests by their number and that of the servers: those of every rate are the same."""

    @cached_property
    def times(self) -> TabledDecoding:
        """The model of step times.

        Raises:
            DataError: It reads a value of a step or of the server that is unknown.
        """
        exact = FittedStepTimes(self.deployment.step_model, dict(self.server))
        return TabledDecoding(exact, reads_waiting=self.law.reads("waiting"))

    @cached_property
    def law(self) -> StepLawUncertainty:
        """The limits of the model of step times."""
        return StepLawUncertainty(self.deployment.step_model, self.server)

    @cached_property
    def capacity(self) -> float:
        """Requests per second that one server finishes when a queue never lets it rest: by the models, or as many as it
        carried.

        Raises:
            DataError: It never serves some of the requests.
        """
        return max(self.modelled_capacity, self.carried_per_s or 0.0)

    @property
    def pace(self) -> float:
        """Factor on the models' step times: below 1 if a recorded server carried more than the models let it."""
        return self.modelled_capacity / self.capacity

    @cached_property
    def modelled_capacity(self) -> float:
        """The capacity that follows only from the models.

        Raises:
            DataError: The server never serves some of the requests.
        """
        return 1e6 / self._full_server.request_us

    @cached_property
    def _full_server(self) -> FullServer:
        slots = self.slots
        count = max(self.requests, _WAVES * slots)
        load = replace(self._draw(count, 1), arrival_us=np.zeros(count))
        recorder = BatchRecorder(self.times)
        replayed = replay(load, recorder, self.settings)
        last = np.sort(replayed.last_us)
        if unserved := int(np.isnan(last).sum()):
            raise DataError(
                f"{unserved} of {count} requests would never be served: they need more KV blocks or a larger token "
                "budget than the server has"
            )
        # The load is not steady at the beginning, when all requests start at once, and at the end, when slots stay
        # empty.
        first, until = int(0.2 * count), int(0.8 * count)
        if count > self.requests:
            # Requests that start together end together: whole waves of them show how long one takes with its prompts.
            first, until = slots, (_WAVES - 1) * slots
        steps = batches_of(recorder.batches, replayed.steps, self.settings.tokens_per_step)
        return full_server(steps, count, float(last[first]), float(last[until]))

    @property
    def slots(self) -> int:
        """The most requests that can run at a time, as far as their tokens fit into the KV cache."""
        most, blocks = self.settings.max_num_seqs, self.settings.num_blocks
        if blocks is None:
            return most
        tokens = float(self.sample.prompt_tokens.mean() + self.sample.output_tokens.mean())
        return max(1, min(most, int(blocks * self.settings.block_size / max(tokens, 1.0))))

    @property
    def waits_for_slots(self) -> bool:
        """Whether requests wait for a slot, and not for blocks of the KV cache, whose queue is another one."""
        return self.slots == self.settings.max_num_seqs

    def at(self, servers: int, rate: float, requests: int | None = None) -> Simulated:
        """Return the load of each of several servers at a rate, in requests per second at each."""
        # A random part of a Poisson process is one too, whatever the number of servers.
        is_poisson = self.sample.gaps is None and self.sample.burstiness == 1 and not self.sample.in_turn
        key = (1 if is_poisson else servers, rate, requests or self.requests)
        if key not in self._known:
            self._known[key] = self._simulate(*key)
        return self._known[key]

    def _draw(self, count: int, servers: int) -> RequestLoad:
        if (count, servers) not in self._drawn:
            self._drawn[count, servers] = draw(self.sample, count, servers)
        return self._drawn[count, servers]

    def _simulate(self, servers: int, rate: float, requests: int) -> Simulated:
        drawn = self._draw(requests, servers)
        arrival, output = drawn.arrival_us / rate * 1e6, drawn.output_tokens
        load = replace(drawn, arrival_us=arrival)
        admission = admission_us(self.deployment.models.get("alpha.admission"), arrival, load.prompt_tokens)
        recorder = BatchRecorder(self.times, self.pace)
        replayed = replay(load, recorder, self.settings, admission_us=admission)
        e2e = replayed.last_us - arrival
        counts = _steady(arrival, e2e)
        several = counts & (output > 1)
        itl = (replayed.last_us - replayed.first_us) / np.maximum(output - 1, 1)
        span = float(arrival[-1] - arrival[0]) or 1.0
        begins = np.clip(replayed.scheduled_us, 0, arrival[-1])
        ends = np.clip(replayed.last_us, 0, arrival[-1])
        wait = replayed.scheduled_us - arrival
        longer = self._in_the_long_run(rate, servers, load, wait, replayed.first_us - arrival, counts)
        added = 0.0 if longer is None else longer.added_us
        batches = batches_of(recorder.batches, replayed.steps, self.settings.tokens_per_step)
        outside_pct, outside = self.law.outside(batches)
        gaps = token_gaps(replayed.steps, [batch.decode_reqs for batch, _ in recorder.batches])
        steady = gaps.within(float(arrival[counts].min()), float(replayed.last_us[counts].max()))
        return Simulated(
            rate,
            {"ttft": (replayed.first_us - arrival)[counts] + added, "itl": itl[several], "e2e": e2e[counts] + added},
            self.law.slowness(batches, outside_pct),
            float((ends - begins).sum()) / span,
            float((begins - np.minimum(arrival, begins)).sum()) / span,
            outside_pct,
            outside,
            len(self.sample.output_tokens) if self.sample.is_sample else math.inf,
            None if self.settings.tokens_per_step > 1 else steady,
            float(batches.select(pl.col("time").sum() / pl.col("steps").sum()).item()),
            longer,
        )

    def _in_the_long_run(
        self, rate: float, servers: int, load: RequestLoad, wait_us: Vector, ttft_us: Vector, counts: Flags
    ) -> LongerWaits | None:
        """Return how much longer the counted requests wait in the long run; null where hardly any waits, or they wait
        for blocks.

        Args:
            rate: Requests per second at each server.
            servers: How many servers share the load.
            load: The replayed requests of one of them.
            wait_us: How long each waits until it is scheduled, shape (n,).
            ttft_us: Its TTFT, shape (n,).
            counts: Which of them count, shape (n,).
        """
        share = min(rate / self.capacity, _LONG_RUN_SHARES[1])
        if share < _LONG_RUN_SHARES[0] or not self.waits_for_slots:
            return None
        count = len(wait_us)
        longest = int(count * min(LONG_QUEUE_LENGTH / (1 - share) ** 2, _LONGEST))
        if longest <= count:
            return None
        drawn = draw(self.sample, longest, servers)
        long_us = self._slot_waits_us(drawn, drawn.arrival_us / (share * self.capacity) * 1e6)[longest // 20 :]
        short_us = self._slot_waits_us(load, load.arrival_us)[counts]
        return longer_waits(wait_us[counts], ttft_us[counts], short_us, long_us)

    def _slot_waits_us(self, load: RequestLoad, arrival_us: Vector | Integers) -> Vector:
        """Return how long requests wait in the model of the queue, which serves as many as the server can, shape
        (n,).
        """
        full, sample = self._full_server, self.sample
        mean_us = float(full.work_us(sample.output_tokens, sample.prompt_tokens - sample.cached_tokens).mean())
        cached = 0 if load.prefix_tokens is None else load.prefix_tokens
        work = full.work_us(load.output_tokens, load.prompt_tokens - cached) / mean_us
        return slot_waits_us(arrival_us, work * self.slots * 1e6 / self.capacity, self.slots)


class FullServer(NamedTuple):
    """Time of a server that is never empty, for each token that it generates and each of a prompt that it computes, and
    for a request of mean length; all in us.
    """

    decoded_us: float
    computed_us: float
    request_us: float

    def work_us(self, output_tokens: Integers, computed_tokens: Integers) -> Vector:
        """Return the time of requests, shape (n,); the first token of each comes out of the step that ends its
        prompt.
        """
        return np.asarray(self.decoded_us * (output_tokens - 1.0) + self.computed_us * computed_tokens)


def full_server(steps: pl.DataFrame, requests: int, begin_us: float, end_us: float) -> FullServer:
    """Return what tokens and requests take in a server that is as full as between two times.

    The requests that finish in some seconds are longer or shorter than others by a few percent, and so would be their
    rate. The time of the steps between is therefore split on the tokens that they generate and those of prompts that
    they compute, by least squares over blocks of equal time, and counted for the tokens of all steps.

    Args:
        steps: Rows of `batches_of`, from the first step on, without idle time.
        requests: Requests whose tokens they hold.
        begin_us: When the server is full.
        end_us: Until when it is.
    """
    ended_us = steps["time"].cum_sum()
    tokens = steps.select(decoded=pl.col("batch") * pl.col("steps"), computed="prefill", time="time")
    block = ((ended_us - begin_us) / (end_us - begin_us) * _REPLAY_PARTS).floor()
    inside = tokens.with_columns(block=block).filter(pl.col("block").is_between(0, _REPLAY_PARTS - 1))
    sums = inside.group_by("block", maintain_order=True).agg(pl.col("decoded", "computed", "time").sum())
    per_block, time = sums.select("decoded", "computed").cast(pl.Float64).to_numpy(), sums["time"].to_numpy()
    each, *_ = np.linalg.lstsq(per_block, time, rcond=None)
    if (each < 0).any():
        # Tokens take time: where one kind has none, the other kind has all of it.
        each = np.where(each < 0, 0.0, (per_block * time[:, None]).sum(axis=0) / (per_block**2).sum(axis=0))
    every = tokens.select(pl.col("decoded", "computed").sum().cast(pl.Float64)).to_numpy()[0]
    return FullServer(float(each[0]), float(each[1]), float(every @ each) / requests)


def _steady(arrival: Vector, e2e: Vector) -> Flags:
    """Mark requests that neither the empty server at the begin nor the end of the load makes faster; at least half of
    them.
    """
    typical = float(np.median(e2e))
    begin = min(2 * typical, float(np.percentile(arrival, 30)))
    end = max(float(arrival[-1]) - typical, float(np.percentile(arrival, 80)))
    return np.asarray((arrival >= begin) & (arrival <= end))


# -- the uncertainty of step times -----------------------------------------------------------------------


def batches_of(
    recorded: Sequence[tuple[StepBatch, float]],
    steps: Sequence[StepGroup],
    growth: float,
) -> pl.DataFrame:
    """Return a row per group of steps: its inputs in the middle, its number of steps and its time."""
    # An array of tuples takes several times as long as one of their numbers in a row.
    numbers = np.fromiter(chain.from_iterable(batch for batch, _ in recorded), float)
    prefill_reqs, prefill, done, _, decode, context, waiting, _ = numbers.reshape(len(recorded), -1).T
    counts = np.array([len(ends) for ends, _, _ in steps], dtype=float)
    middle = context + growth * decode * (counts - 1) / 2
    return pl.DataFrame(
        {
            "prefill_reqs": prefill_reqs,
            "prefill": prefill,
            "prefill_done": done,
            "batch": decode,
            "context": middle / np.maximum(decode, 1),
            "waiting": waiting,
            "steps": counts,
            "time": counts * np.array([time for _, time in recorded]),
        }
    )


class StepLawUncertainty:
    """The limits of a model of step times: its coefficients within their intervals, and its training ranges."""

    def __init__(self, model: Model, server: Mapping[str, float]) -> None:
        self._compiled = CompiledModel(model, STEP_VALUES)
        self._server = server
        rng = np.random.default_rng(0)
        self._draws = [_coefficients(form, rng) for _, form in self._compiled.forms]
        self._speeds = _speeds(model, rng)
        beyond = model.validation.load_extrapolation if model.validation else None
        self._beyond = abs(beyond.bias_pct or 0.0) / 100 if beyond else 0.0
        self._normal = rng.standard_normal(_DRAWS)
        # A server whose model comes from others is off, in its mean step time, as these were when they were left out.
        sd = model.transfer.sd_pct / 100 if model.transfer is not None else 0.0
        self._of_server = np.exp(np.log1p(sd) * rng.standard_normal(_DRAWS))

    def _evaluated(self, batches: pl.DataFrame) -> Evaluated:
        return evaluated(self._compiled, batches, self._server)

    def reads(self, name: str) -> bool:
        """Return whether the model depends on an input of a step."""
        return name in self._compiled.formulas.used(self._compiled.features, STEP_INPUTS)

    def slowness(self, batches: pl.DataFrame, outside_pct: float) -> tuple[float, float]:
        """Return the 5th and 95th percentile of the factor on the mean step time.

        It has four independent errors: of the coefficients, within their intervals; of the machine's speed, which is
        that of one more stretch of time; of the form beyond the load in training, as far as a fit on the lower half of
        the load was off on the upper; and, of a transferred model, of the server, as far as servers that were left out
        were off.

        Args:
            batches: The steps.
            outside_pct: Share of the time in steps outside the training range, in percent.
        """
        found, weight = self._evaluated(batches), batches["steps"].to_numpy()
        means, totals = 0.0, np.zeros(_DRAWS)
        for k, ((_, form), draws) in enumerate(zip(found.forms, self._draws, strict=True)):
            here = weight * (found.index == k)
            columns = [1.0, *(filled(found.values[t.feature], 0.0) for t in form.terms)]
            sums = np.array([float((here * column).sum()) for column in columns])
            means += float(sums @ [form.intercept.value, *(t.value for t in form.terms)])
            totals = totals + draws @ sums
        if means <= 0:
            return 1.0, 1.0
        of_form = np.exp(outside_pct / 100 * self._beyond * self._normal)
        low, high = np.percentile(
            np.maximum(totals / means, 0.01) * self._speeds * of_form * self._of_server, _ENDS_PCT
        )
        return min(float(low), 1.0), max(float(high), 1.0)

    def outside(self, batches: pl.DataFrame) -> tuple[float, tuple[str, ...]]:
        """Return the share of the time in steps outside the training range, in percent, and the features outside it."""
        found, time = self._evaluated(batches), batches["time"].to_numpy()
        terms = [(t.feature, t.training_range) for _, form in found.forms for t in form.terms]
        ranges = {n: ends for n, ends in [*terms, *self._compiled.unmodeled.items()] if ends is not None}
        with np.errstate(all="ignore"):
            amounts = self._compiled.formulas.values(found.values, ranges)
        left, texts = np.zeros(batches.height, dtype=bool), list[tuple[float, str]]()
        for name, (low, high) in ranges.items():
            # Requests that wait are not in the step: they matter only to a model with a term for them.
            if name not in amounts or (name in _OF_THE_QUEUE and name not in dict(terms)):
                continue
            values, slack = np.broadcast_to(filled(amounts[name], low), batches.height), _SLACK * (high - low)
            is_outside = (values < low - slack) | (values > high + slack)
            share = 100 * float(time[is_outside].sum()) / (float(time.sum()) or 1.0)
            left |= is_outside
            if share > SOME_OUTSIDE_PCT:
                ends = f"{low:,.4g} to {high:,.4g}"
                reach = f"{values[is_outside].min():,.4g} to {values[is_outside].max():,.4g}"
                texts.append((-share, f"{name} {reach} in {share:.0f} % of the time, trained on {ends}"))
        worst = tuple(text for _, text in sorted(texts)[:_MOST_TEXTS])
        return 100 * float(time[left].sum()) / (float(time.sum()) or 1.0), worst


def _speeds(model: Model, rng: np.random.Generator) -> Vector:
    """Draw factors on all step times from the speeds of the recording's stretches, shape (draws,); all 1 if they do not
    differ.

    Their standard deviation is known from n stretches (Student's t with n - 1 degrees of freedom). A load that lasts
    for several stretches
    varies less than one of them, and the mean of the recorded ones has an error of its own: the two are taken to
    cancel.
    """
    speed = model.validation.speed if model.validation else None
    if speed is None or not speed.adjusted:
        return np.ones(_DRAWS)
    return np.asarray(np.exp(speed.sd_pct / 100 * rng.standard_t(speed.stretches - 1, _DRAWS)))


def _coefficients(form: LinearForm, rng: np.random.Generator) -> Vector:
    """Draw intercept and terms of a line within their intervals, independently; shape (draws, 1 + terms)."""
    numbers = [
        (form.intercept.value, form.intercept.ci95, None),
        *((t.value, t.ci95, t.sign) for t in form.terms),
    ]
    columns = []
    for value, ci95, sign in numbers:
        low, high = ci95 or (value, value)
        z = rng.standard_normal(_DRAWS)
        # An interval that is cut at 0 has two widths.
        drawn = value + z * np.where(z < 0, value - low, high - value) / _Z95
        columns.append(np.maximum(drawn, 0.0) if sign else drawn)
    return np.column_stack(columns)


# -- the search ------------------------------------------------------------------------------------------


def _logs_ms(points: Sequence[Simulated], name: str) -> Vector:
    """Return the logarithms of a percentile at some rates, shape (n,)."""
    return np.log(np.maximum([p.percentile_ms(name) for p in points], 1e-6))


def _through(points: Sequence[Simulated], name: str) -> Callable[[Vector], Vector]:
    return monotone(np.array([p.rate for p in points]), _logs_ms(points, name))


class Curve:
    """Percentiles of latencies over the rate at each server, between the rates that were replayed."""

    def __init__(
        self, points: Sequence[Simulated], errors: Mapping[str, float], anchors: Sequence[Simulated] = ()
    ) -> None:
        """Take replayed rates.

        Args:
            points: At least two, at different rates.
            errors: Name of a percentile to the relative error of replays of recorded runs, a factor of at least 1.
            anchors: Longer replays at rates between those of the points, through which the curve is moved near them:
                they are points of it too.
        """
        self.errors = errors
        self.anchors = sorted(anchors, key=lambda p: p.rate)
        self.shape = sorted(points, key=lambda p: p.rate)
        at = [p.rate for p in self.shape]
        more = [p for p in self.anchors if not np.isclose(at, p.rate).any()]
        self.points = sorted([*self.shape, *more], key=lambda p: p.rate)
        self.rates = np.array([p.rate for p in self.points])
        self._reach = _ANCHOR_REACH * self.shape[-1].rate
        self._logs: dict[str, Callable[[Vector], Vector]] = {}

    def _through(self, name: str) -> Callable[[Vector], Vector]:
        if name not in self._logs:
            through = _through(self.shape, name)
            if self.anchors:
                through = monotone(self.rates, through(self.rates) + self._moved(name, through))
            self._logs[name] = through
        return self._logs[name]

    def _moved(self, name: str, through: Callable[[Vector], Vector]) -> Vector:
        """Return by how much the anchors move the logarithms of a percentile at the rates of the curve, shape (n,)."""
        at = np.array([p.rate for p in self.anchors])
        moved = _logs_ms(self.anchors, name) - through(at)
        # Where nothing is moved: on both sides of an anchor, unless the next one is nearer.
        still = np.concatenate([at - self._reach, at + self._reach])
        still = still[self._is_far(still)]
        rates, values = np.concatenate([at, still]), np.concatenate([moved, np.zeros(len(still))])
        order = np.argsort(rates)
        return np.asarray(np.interp(self.rates, rates[order], values[order]))

    def _is_far(self, rates: Vector) -> Flags:
        """Return which rates no anchor says anything of, shape (n,)."""
        at = np.array([p.rate for p in self.anchors])
        distances = np.abs(rates[:, None] - at).min(axis=1, initial=math.inf)
        return np.asarray(distances >= self._reach * (1 - 1e-9))

    def values_ms(self, name: str, rates: Vector) -> Vector:
        """Return a percentile at rates, shape (n,); infinite if the servers do not keep up, except for an ITL: that of
        full batches.
        """
        inside = np.exp(self._through(name)(np.clip(rates, self.rates[0], self.rates[-1])))
        grows = (rates > self.rates[-1] * (1 + 1e-9)) & (not name.startswith("itl"))
        return np.where(grows, np.inf, inside)

    def ends_ms(self, name: str, rates: Vector, *, high: bool) -> Vector:
        """Return the low or the high end of the interval of a percentile at rates, shape (n,); infinite if it is open.

        Errors of the step time and of the draw are independent. Replays of recorded runs have both, so that the end is
        at least as far as they were off. Near the capacity only an ITL has a high end.
        """
        slow = np.interp(rates, self.rates, [p.slowness[high] for p in self.points])
        is_far = self._is_far(np.array([p.rate for p in self.shape]))
        kept = sorted([*self.anchors, *compress(self.shape, is_far)], key=lambda p: p.rate)
        drawn = np.interp(rates, [p.rate for p in kept], [p.drawn(name, high=high) for p in kept])
        values, moved = self.values_ms(name, rates), self.values_ms(name, rates * slow) * slow
        with np.errstate(all="ignore"):
            error = np.hypot(np.log(moved / values), np.log(drawn))
            error = np.maximum(error, math.log(self.errors.get(name, 1.0)))
            end = values * np.exp(error if high else -error)
        end = np.where(np.isfinite(values), end, np.inf if high else moved * drawn)
        is_open = self.is_saturated(rates) if high and not name.startswith("itl") else False
        return np.where(is_open, np.inf, end)

    def is_saturated(self, rates: Vector) -> Flags:
        """Return which rates are so near to the capacity, or above it, that latencies have no high end; shape (n,)."""
        return np.asarray(rates > SATURATED * self.rates[-1] * (1 + 1e-9))

    def has_anchor(self, rate: float) -> bool:
        """Return whether a longer replay is at a rate, or next to it."""
        return any(abs(rate / anchor.rate - 1) < _CLOSE_SHARE for anchor in self.anchors)

    @property
    def most(self) -> float:
        """Largest rate that each server may keep up with, if its steps are at the low end of their interval."""
        return float(self.rates[-1] / self.points[-1].slowness[0])

    @property
    def least(self) -> float:
        """Largest rate that each server keeps up with, even if its steps are at the high end of their interval."""
        return float(self.rates[-1] / self.points[-1].slowness[1])

    def largest_rate(self, objectives: Sequence[Objective], *, high: bool | None = None) -> float:
        """Return the largest rate up to which all objectives hold; 0 if they hold at none.

        Args:
            objectives: The objectives.
            high: Whether they must hold at the high or the low end of the intervals; at the value itself if not given.
        """
        values = self.values_ms if high is None else partial(self.ends_ms, high=high)
        # Beyond them the queue grows, whatever the objective is.
        until = {None: float(self.rates[-1]), True: self.least, False: self.most}[high]
        rates = np.linspace(self.rates[0], until, 1000)
        kept = np.ones(len(rates), dtype=bool)
        for one in objectives:
            kept &= values(one.name, rates) <= one.limit_ms
        if kept.all():
            return float(rates[-1])
        return float(rates[int(np.argmin(kept)) - 1]) if kept[0] else 0.0

    def knee(self) -> float:
        """Return the rate with the largest ratio of rate to mean E2E (Kleinrock 1979)."""
        logs = np.log([p.latencies["e2e"].mean() for p in self.points])
        rates = np.linspace(self.rates[0], self.rates[-1], 1000)
        power = np.log(rates) - monotone(self.rates, logs)(rates)
        return float(rates[int(np.argmax(power))])


def curve_of(fleet: Fleet, servers: int, errors: Mapping[str, float]) -> Curve:
    """Replay the servers at the rates of a curve.

    Args:
        fleet: The servers.
        servers: How many.
        errors: See `Curve`.

    Raises:
        DataError: The servers never serve some of the requests.
    """
    return Curve([fleet.at(servers, share * fleet.capacity) for share in LOAD_SHARES], errors)


def anchored(fleet: Fleet, servers: int, curve: Curve, rate: float, requests: int = ANCHOR_REQUESTS) -> Curve:
    """Return a curve through one more replay, a longer one of some servers at a rate at each of them."""
    # Below its lowest rate a curve has no shape.
    is_below = rate < (1 - _CLOSE_SHARE) * curve.shape[0].rate
    new = [fleet.at(servers, rate)] if is_below else []
    anchors = {a.rate: a for a in (*curve.anchors, fleet.at(servers, rate, requests))}
    return Curve([*curve.shape, *new], curve.errors, [*anchors.values()])


def from_idle(fleet: Fleet, servers: int, curve: Curve, borne: Callable[[Curve], float]) -> Curve:
    """Return a curve that says whether any rate is borne, if the short replays of the given one say that none is: with
    a longer replay at its lowest rate, and one of servers that are nearly always idle.
    """
    for share in (LOAD_SHARES[0], _IDLE_SHARE):
        if borne(curve):
            break
        curve = anchored(fleet, servers, curve, share * fleet.capacity)
    return curve


def with_anchors(curve: Curve, more: Sequence[Simulated]) -> Curve:
    """Return a curve through the longer replays of another one too."""
    return Curve(curve.shape, curve.errors, [*{a.rate: a for a in (*more, *curve.anchors)}.values()])


def fewest_servers(
    fleet: Fleet, curve: Curve, rate: float, borne: Callable[[Curve], float]
) -> tuple[int, Curve] | None:
    """Return the fewest servers that are enough at a rate over all of them, and their curve; null if no number is
    enough.

    Args:
        fleet: The servers.
        curve: Their curve.
        rate: Requests per second, over all servers.
        borne: Returns the largest rate that one server of a curve bears; 0 if none.
    """
    tried = set[int]()
    curve = from_idle(fleet, 1, curve, borne)
    while each := min(borne(curve), fleet.capacity):
        enough = math.ceil(rate / each - 1e-9)
        # This number and the one below it each get a replay that says whether they are enough.
        less = max(enough - 1, math.ceil(rate / fleet.capacity - 1e-9), 1)
        servers = less if enough in tried else enough
        if servers in tried or len(tried) == _MOST_ANCHORS:
            return enough, anchored(fleet, enough, curve, rate / enough, ANSWER_REQUESTS)
        # The replay of the answer to these servers at this rate: the same question has one answer.
        curve = anchored(fleet, servers, curve, rate / servers, ANSWER_REQUESTS)
        tried.add(servers)
    return None


class LargestRate(NamedTuple):
    """The largest rate at each server that keeps to objectives, with its interval; each 0 where no rate does.

    Attributes:
        low: With latencies at the high end of their intervals.
        value: As planned.
        high: With latencies at the low end.
        curve: A curve with its last anchor at the rate; without an anchor if no rate keeps to the objectives.
    """

    low: float
    value: float
    high: float
    curve: Curve


def largest_rate(
    fleet: Fleet, servers: int, errors: Mapping[str, float], objectives: Sequence[Objective]
) -> LargestRate:
    """Return the largest rate at each of some servers that keeps to objectives: the smallest of those of each objective
    by itself.

    It depends on nothing else. A rate that is asked about has replays of its own, which would move the curve.
    """
    each = [_largest_rate(fleet, servers, errors, one) for one in objectives]
    return LargestRate(
        low=min(found.low for found in each),
        value=min(found.value for found in each),
        high=min(found.high for found in each),
        curve=min(each, key=lambda found: found.value).curve,
    )


def _largest_rate(fleet: Fleet, servers: int, errors: Mapping[str, float], objective: Objective) -> LargestRate:
    curve, only = curve_of(fleet, servers, errors), (objective,)
    curve = from_idle(fleet, servers, curve, lambda one: one.largest_rate(only))
    for _ in range(_MOST_RATES):
        rate = curve.largest_rate(only)
        if rate <= 0 or curve.has_anchor(rate):
            break
        curve = anchored(fleet, servers, curve, rate)
    if curve.largest_rate(only) > 0:
        curve = from_idle(fleet, servers, curve, lambda one: one.largest_rate(only, high=True))
    value = curve.largest_rate(only)
    low, high = (curve.largest_rate(only, high=end) for end in (True, False))
    return LargestRate(min(low, value), value, max(high, value), curve)


def plan_point(
    simulated: Simulated,
    servers: int,
    fleet: Fleet,
    curve: Curve,
    names: Sequence[str],
    rate: float | None = None,
) -> PlanPoint:
    """Return latencies and load of some servers at a replayed rate, or at one beyond their capacity.

    Args:
        simulated: The replay: of the rate, at each of them, or of their capacity.
        servers: How many.
        fleet: The servers.
        curve: The curve of this rate and others.
        names: Percentiles, such as `ttft_p99_ms`.
        rate: The rate at each of them, if it is not the replayed one.
    """
    each = rate or simulated.rate
    (latencies,) = _latencies(curve, names, np.array([each]))
    return _point(simulated, servers, fleet, each, latencies)


def plan_points(servers: int, fleet: Fleet, curve: Curve, names: Sequence[str]) -> tuple[PlanPoint, ...]:
    """Return latencies and load of some servers at the replayed rates of a curve; see `plan_point`."""
    latencies = _latencies(curve, names, curve.rates)
    return tuple(
        _point(simulated, servers, fleet, simulated.rate, here)
        for simulated, here in zip(curve.points, latencies, strict=True)
    )


def _latencies(curve: Curve, names: Sequence[str], rates: Vector) -> list[tuple[PlannedLatency, ...]]:
    """Return percentiles with their intervals at rates: an item per rate."""
    by_name = []
    for name in names:
        values = curve.values_ms(name, rates)
        low, high = (curve.ends_ms(name, rates, high=end) for end in (False, True))
        ends = np.column_stack([values, np.minimum(low, values), np.maximum(high, values)]).tolist()
        by_name.append([PlannedLatency(name, *(end if math.isfinite(end) else None for end in row)) for row in ends])
    return list(zip(*by_name, strict=True))


def _point(
    simulated: Simulated, servers: int, fleet: Fleet, each: float, latencies: tuple[PlannedLatency, ...]
) -> PlanPoint:
    served = min(each, fleet.capacity) * servers
    return PlanPoint(
        rate_per_s=each * servers,
        latencies=latencies,
        output_tokens_per_s=served * float(fleet.sample.output_tokens.mean()),
        running_mean=simulated.running,
        waiting_mean=simulated.waiting,
        outside_pct=simulated.outside_pct,
        outside=simulated.outside,
        extrapolates=simulated.outside_pct > SOME_OUTSIDE_PCT,
    )
