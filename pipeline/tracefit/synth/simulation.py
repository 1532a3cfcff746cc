"""Simulate a server over time: its clients, the socket, steps and idle times of its engine, and the API process.

One cycle of the engine core, start to start::

    schedule() | execute ............... | aborts | update | drain the socket | next schedule()
    start      +schedule_ns              +cycle-tail                          start + cycle

Load, engine and sampling have separate random streams: an option of one does not change the draws of the others.
"""

from __future__ import annotations

import heapq
import math
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from tracefit.synth.options import LengthPhase
from tracefit.synth.scheduler import (
    NO_PREFIX,
    AbortStage,
    QueueState,
    Request,
    Scheduled,
    Scheduler,
    StepOutcome,
    StepPlan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tracefit.synth.laws import Composition, StepLaw
    from tracefit.synth.options import LengthMix, LoadPhase, SynthOptions

# A fixed start, in September 2026: with the time of day in them, equal options would give other bytes.
_UNIX_START_NS = 1_790_000_000_000_000_000
# Seconds without events around each life of the engine separate epochs on the clock, as restarts do.
_WARM_UP_NS = 5_000_000_000
_SHUTDOWN_NS = 7_000_000_000
_RESTART_NS = 20_000_000_000

# Times around a step are assumed, of the order that traces of an instrumented vLLM 0.15.1 show.
_WAKE_NS = 10_000
"""Time an idle engine needs to notice a message."""
_PROCESS_NS = 2_000
"""Time between two stamps of one loop over requests, if there is room for it."""
_ABORT_MESSAGE_NS = 200_000
"""Time from a client's disconnect to the message in the engine's socket."""


class StepLog(msgspec.Struct, frozen=True):
    """One step of the engine; depths and blocks are those after scheduling."""

    step_id: int
    composition: Composition
    num_finished: int  # requests that ended since the step before was scheduled
    num_preempted: int
    start_ns: int  # monotonic
    schedule_ns: int  # time inside `schedule()`
    cycle_ns: int  # to the start of the next step while the engine is busy
    law_us: float  # without noise
    is_hiccup: bool  # something outside the law delayed it
    running_depth: int
    waiting_depth: int
    waiting_tokens: int  # that the waiting have to compute
    blocks_free: int
    is_sampled: bool  # it is in the trace
    snapshots: tuple[Scheduled, ...]  # running requests before its tokens were computed, if rich-sampled

    @property
    def end_ns(self) -> int:
        """End of the cycle, monotonic."""
        return self.start_ns + self.cycle_ns

    @property
    def tail_ns(self) -> int:
        """Time from the end of the execution to that of the cycle."""
        # Real FIRST_TOKEN and FINISHED are stamped within 0.5 ms of the end of their step.
        return min(250_000, self.cycle_ns // 4)

    @property
    def output_ns(self) -> int:
        """Time of the step's outputs, monotonic."""
        return self.end_ns - self.tail_ns * 3 // 4


class EpochLog(msgspec.Struct, frozen=True):
    """One life of one engine; requests are in order of arrival."""

    server: int  # from 0
    epoch: int  # of the engine's starts on that server, from 0
    unix_offset_ns: int  # Unix time minus monotonic time
    started_ns: int  # monotonic
    stopped_ns: int
    steps: list[StepLog]
    requests: list[Request]
    blocks_total: int  # KV blocks it could hand out


def simulate_server(options: SynthOptions, law: StepLaw, server: int, rng: np.random.Generator) -> list[EpochLog]:
    """Simulate all lives of one server on its clock."""
    # Monotonic clocks count from each host's boot: those of two servers do not compare.
    boot_ns = (2_000 + 1_777 * server) * 1_000_000_000 + int(rng.integers(0, 1_000_000_000))
    bounds = np.linspace(0, options.requests, options.epochs + 1).round().astype(int).tolist()
    lives: list[EpochLog] = []
    started_ns = boot_ns
    for epoch, child in enumerate(rng.spawn(options.epochs)):
        load_rng, id_rng, *stream_rngs = child.spawn(5)
        numbers = range(bounds[epoch] + 1, bounds[epoch + 1] + 1)
        requests = _load(options, load_rng, numbers=numbers, start_ns=started_ns + _WARM_UP_NS)
        for request in requests:
            route = "chatcmpl" if request.is_chat else "cmpl"
            request.api_id = f"{route}-req-{f'{server}-' if server else ''}{request.number:06d}"
            # Longer in the core: by a random token and, for completions, the number of the prompt.
            prompt = "" if request.is_chat else "-0"
            request.request_id = f"{request.api_id}{prompt}-{id_rng.bytes(4).hex()}"
        clock = EngineClock(options, law, Streams(*map(Draws, stream_rngs)), requests)
        clock.run()
        ends = [request.departed_ns for request in requests] + [step.end_ns for step in clock.steps[-1:]]
        stopped_ns = max(ends, default=started_ns) + _SHUTDOWN_NS
        lives.append(
            EpochLog(
                server=server,
                epoch=epoch,
                unix_offset_ns=_UNIX_START_NS - boot_ns,
                started_ns=started_ns,
                stopped_ns=stopped_ns,
                steps=clock.steps,
                requests=requests,
                blocks_total=clock.scheduler.pool.total,
            )
        )
        started_ns = stopped_ns + _RESTART_NS
    return lives


# -- the load -------------------------------------------------------------------------------------------


def _load(options: SynthOptions, rng: np.random.Generator, *, numbers: range, start_ns: int) -> list[Request]:
    """Return the requests with these numbers as their clients send them, in order of arrival."""
    count = len(numbers)
    phases, gaps_s = _gaps_s(options, rng, count)
    arrival_ns = start_ns + np.cumsum(np.round(gaps_s * 1e9).astype(np.int64))
    prompt, output, prefix = _lengths(options, rng, phases)
    # A request that stops by itself asked for more than it got: `finish.status` is stopped, not length.
    stopped = rng.random(count) < options.stop_fraction
    spare = np.where(stopped, rng.integers(1, 257, count), 0)
    jitter = np.exp(rng.normal(0.0, 1.0, count) * options.admission.jitter)
    chat = rng.random(count) < options.chat_fraction
    streaming = rng.random(count) >= options.non_streaming_fraction
    stages = _abort_stages(options, rng, output)
    shares = rng.random(count)
    return [
        Request(
            request_id="",
            number=number,
            load_phase=phases[i].name,
            arrival_ns=int(arrival_ns[i]),
            api_work_us=options.admission.work_us(int(prompt[i])) * float(jitter[i]),
            prompt_tokens=int(prompt[i]),
            output_tokens=int(output[i]),
            max_tokens=int(output[i] + spare[i]),
            prefix=int(prefix[i]),
            is_chat=bool(chat[i]),
            is_streaming=bool(streaming[i]),
            abort_stage=stages[i],
            abort_share=float(shares[i]),
        )
        for i, number in enumerate(numbers)
    ]


def _gaps_s(
    options: SynthOptions, rng: np.random.Generator, count: int
) -> tuple[list[LoadPhase], npt.NDArray[np.float64]]:
    """Return each request's phase and the time since the one before: a Poisson process per phase."""
    shares = np.array([phase.share for phase in options.phases])
    # Phases share out the requests, not the time: each has its number of requests whatever the draws.
    bounds = np.round(np.cumsum(shares / shares.sum()) * count).astype(int)
    index = np.searchsorted(bounds, np.arange(count), side="right")
    rates = np.array([phase.rate for phase in options.phases]) * options.rate_per_s
    gaps = rng.exponential(1.0, count) / rates[index]
    return [options.phases[i] for i in index], gaps


def _lengths(
    options: SynthOptions, rng: np.random.Generator, phases: Sequence[LoadPhase]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return prompt lengths, output lengths and prefix numbers of requests of some phases that the engine can hold."""
    count = len(phases)
    longest, prefix_tokens = options.longest_sequence_tokens, options.shared_prefix_tokens
    # Both are drawn whether prefixes are shared or not, so that later draws do not change.
    shared = rng.random(count) < options.prefix_fraction
    prefix = np.where(shared, rng.integers(0, options.num_prefixes, count), NO_PREFIX)
    if not prefix_tokens:
        prefix = np.full(count, NO_PREFIX)
    prompt, output = _draw(options.prompt_tokens, rng, count), _draw(options.output_tokens, rng, count)
    for own in dict.fromkeys(phase for phase in phases if isinstance(phase, LengthPhase)):
        of_it = np.array([phase == own for phase in phases])
        prompt[of_it], output[of_it] = (
            _draw(mix, rng, int(of_it.sum())) for mix in (own.prompt_tokens, own.output_tokens)
        )
    # A shared prefix is never the whole prompt: the last token must be computed.
    prompt = np.minimum(np.where(prefix != NO_PREFIX, prompt + prefix_tokens, prompt), longest - 1)
    return prompt, np.minimum(output, longest - prompt), prefix


def _draw(mix: LengthMix, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    weights, medians, sigmas = (np.array(column) for column in zip(*mix.components, strict=True))
    which = rng.choice(len(weights), count, p=weights / weights.sum())
    lengths = medians[which] * np.exp(sigmas[which] * rng.normal(0.0, 1.0, count))
    return np.clip(np.round(lengths), mix.minimum, mix.maximum).astype(np.int64)


def _abort_stages(
    options: SynthOptions, rng: np.random.Generator, output_tokens: npt.NDArray[np.int64]
) -> list[AbortStage]:
    stages = (AbortStage.WAITING, AbortStage.PREFILL, AbortStage.DECODE)
    count = len(output_tokens)
    aborted = rng.random(count) < options.abort_fraction
    which = rng.integers(0, 3, count)
    # No client leaves during the decode of a request without one.
    which = np.where(output_tokens < 2, which % 2, which)
    return [stages[which[i]] if aborted[i] else AbortStage.NEVER for i in range(count)]


# -- the engine -----------------------------------------------------------------------------------------


class Draws:
    """Standard normal and uniform numbers of one generator.

    The two kinds have separate generators: an added draw of one kind does not change the sequence of the other.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._normal_rng, self._uniform_rng = rng.spawn(2)

    def normal(self) -> float:
        """Return a draw of the standard normal distribution."""
        return self._normal_rng.standard_normal()

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a draw between `low` and `high`."""
        return low + (high - low) * self._uniform_rng.random()


class Streams(NamedTuple):
    """Independent sources of randomness: another sampling rate shows more or less of the same run."""

    engine: Draws  # step times and time in `schedule()`
    api: Draws  # the API process
    sampling: Draws  # which steps are in the trace


class EngineClock:
    """Runs one engine from its first arrival until all requests have ended.

    Attributes:
        steps: Steps so far.
        scheduler: The engine's scheduler.
    """

    def __init__(self, options: SynthOptions, law: StepLaw, streams: Streams, requests: Sequence[Request]) -> None:
        self._options = options
        self._law = law
        self._streams = streams
        self._requests = requests
        self.scheduler = Scheduler(options)
        self.steps: list[StepLog] = []
        self._socket = sorted(requests, key=lambda request: request.socket_ns)
        self._next = 0
        self._aborts: list[tuple[int, int, Request]] = []

    def run(self) -> None:
        """Take steps until all requests have ended."""
        now_ns = 0
        while True:
            if self.scheduler.has_work:
                now_ns = self._step(now_ns)
            elif self._next < len(self._socket):
                drain_ns = max(now_ns, self._socket[self._next].socket_ns + _WAKE_NS)
                # After idling, schedule() follows the drain at once: no step is in progress.
                now_ns = drain_ns + 60_000
                self._drain(drain_ns, room_ns=30_000)
            else:
                break
        for request in self._requests:
            self._close(request)

    def _step(self, start_ns: int) -> int:
        """Take one step and drain the socket; return when the next can start."""
        plan = self.scheduler.schedule()
        is_sampled = self._streams.sampling.uniform() < self._options.step_sampling
        snapshots = self._snapshots(plan) if is_sampled else ()
        law_us = self._law.step_us(plan.composition) if plan.scheduled else self._options.empty_step_us
        hiccup_us = self._hiccup_us()
        cycle_us = law_us * math.exp(self._options.noise * self._streams.engine.normal()) + hiccup_us
        cycle_ns = round(cycle_us * 1e3)
        schedule_ns = self._schedule_ns(plan, cycle_ns)
        self._note_scheduling(plan, start_ns, schedule_ns, cycle_ns)
        step = StepLog(
            step_id=plan.step_id,
            composition=plan.composition,
            num_finished=plan.num_finished,
            num_preempted=len(plan.preempted),
            start_ns=start_ns,
            schedule_ns=schedule_ns,
            cycle_ns=cycle_ns,
            law_us=law_us,
            is_hiccup=hiccup_us > 0,
            running_depth=len(self.scheduler.running),
            waiting_depth=len(self.scheduler.waiting),
            waiting_tokens=sum(request.pending_tokens for request in self.scheduler.waiting),
            blocks_free=self.scheduler.pool.free,
            is_sampled=is_sampled,
            snapshots=snapshots,
        )
        self.steps.append(step)
        self.scheduler.launch(plan)
        end_ns, tail_ns = step.end_ns, step.tail_ns
        self._take_aborts(end_ns - tail_ns, end_ns - tail_ns, room_ns=tail_ns // 8)
        outcome = self.scheduler.update(plan)
        self._note_update(plan, outcome, step.output_ns, room_ns=tail_ns // 3)
        self._drain(end_ns - tail_ns // 4, room_ns=tail_ns // 8)
        return end_ns

    def _snapshots(self, plan: StepPlan) -> tuple[Scheduled, ...]:
        """Return the running requests if the step is rich-sampled, else nothing."""
        if self._streams.sampling.uniform() >= self._options.rich_sampling:
            return ()
        tokens = {request: tokens for request, tokens, _ in plan.scheduled}
        # Copies, because the requests themselves change.
        return tuple(
            Scheduled(copy(request), tokens.get(request, 0), request.computed_tokens)
            for request in self.scheduler.running
        )

    def _hiccup_us(self) -> float:
        draws = self._streams.engine
        # Both are drawn for every step, so that another rate does not change the draws of other steps.
        is_hit = draws.uniform() < self._options.hiccup_rate
        delay_us = -math.log(1.0 - draws.uniform()) * self._options.hiccup_us
        return delay_us if is_hit else 0.0

    def _schedule_ns(self, plan: StepPlan, cycle_ns: int) -> int:
        """Return the time in `schedule()`: a little per running request, more where one is admitted."""
        # Real schedule() takes 91 us (median, CPU) to 1.1 ms (H100), and stamps SCHEDULED 0.1 to 0.7 ms after
        # its start.
        admitted = len(plan.first) + len(plan.resumed)
        admit_us = 160.0 + 25.0 * admitted if admitted else 0.0
        time_us = 60.0 + 1.5 * len(plan.scheduled) + admit_us
        time_us *= math.exp(0.2 * self._streams.engine.normal())
        return min(round(min(time_us, 800.0) * 1e3), cycle_ns // 2)

    def _note_scheduling(self, plan: StepPlan, start_ns: int, schedule_ns: int, cycle_ns: int) -> None:
        # Preemptions come first: the engine serves running requests before it admits waiting ones.
        stamps = _stamps(start_ns + schedule_ns // 4, schedule_ns // 4, len(plan.preempted))
        for request, ts_ns in zip(plan.preempted, stamps, strict=True):
            request.note("PREEMPTED", ts_ns, plan.step_id)
        kinds = ["FIRST"] * len(plan.first) + ["RESUME"] * len(plan.resumed)
        stamps = _stamps(start_ns + schedule_ns * 5 // 8, schedule_ns // 4, len(kinds))
        for request, kind, ts_ns in zip(plan.first + plan.resumed, kinds, stamps, strict=True):
            request.note("SCHEDULED", ts_ns, plan.step_id, detail=kind)
            if kind == "FIRST":
                request.cached_prompt_tokens = request.cached_tokens
                self._leave(request, AbortStage.PREFILL, start_ns + round(request.abort_share * cycle_ns))

    def _note_update(self, plan: StepPlan, outcome: StepOutcome, from_ns: int, *, room_ns: int) -> None:
        first_token, finished = outcome
        stamps = _stamps(from_ns, room_ns, len(first_token) + len(finished))
        for request, ts_ns in zip(first_token, stamps, strict=False):
            request.note("FIRST_TOKEN", ts_ns, plan.step_id)
        for request, ts_ns in zip(finished, stamps[len(first_token) :], strict=True):
            request.batch_reqs, request.finishing_reqs = len(plan.scheduled), len(finished)
            request.note("FINISHED", ts_ns, plan.step_id, detail=str(request.finish_status))
        for request, _, _ in plan.scheduled:
            if request.abort_stage is not AbortStage.DECODE:
                continue
            # Its client leaves after this many tokens.
            if request.done_tokens >= 1 + int(request.abort_share * (request.output_tokens - 1)):
                after_ns = round(3e6 * self._streams.api.uniform())
                self._leave(request, AbortStage.DECODE, from_ns + room_ns + after_ns)

    def _leave(self, request: Request, stage: AbortStage, abort_ns: int) -> None:
        """Disconnect a client if this is the stage at which it leaves."""
        if request.abort_stage is stage and request.abort_ns is None:
            request.abort_ns = max(abort_ns, request.socket_ns)
            heapq.heappush(self._aborts, (request.abort_ns + _ABORT_MESSAGE_NS, request.number, request))

    def _drain(self, until_ns: int, *, room_ns: int) -> None:
        """Read the socket: new requests are QUEUED, aborted ones end."""
        first = self._next
        while self._next < len(self._socket) and self._socket[self._next].socket_ns <= until_ns:
            self._next += 1
        arrived = self._socket[first : self._next]
        for request, ts_ns in zip(arrived, _stamps(until_ns, room_ns, len(arrived)), strict=True):
            # Before `add`: a request does not wait for itself.
            request.queue_state = self._queue_state()
            queued_ns = ts_ns if self._options.queued_stamp == "step_start" else request.socket_ns
            request.note("QUEUED", queued_ns, self.scheduler.step_id, phase="WAITING")
            self.scheduler.add(request)
            self._leave(request, AbortStage.WAITING, request.socket_ns + round(2e6 * request.abort_share))
        self._take_aborts(until_ns, until_ns + room_ns, room_ns=room_ns // 2)

    def _take_aborts(self, until_ns: int, from_ns: int, *, room_ns: int) -> None:
        """End the requests whose abort came before `until_ns`; stamps begin after `from_ns`."""
        gone: list[Request] = []
        while self._aborts and self._aborts[0][0] <= until_ns:
            request = heapq.heappop(self._aborts)[2]
            if self.scheduler.abort(request):
                gone.append(request)
        for request, ts_ns in zip(gone, _stamps(from_ns, room_ns, len(gone)), strict=True):
            request.note("FINISHED", ts_ns, self.scheduler.step_id, detail=str(request.finish_status))

    def _queue_state(self) -> QueueState:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        return QueueState(
            requests_ahead=len(waiting),
            tokens_ahead=sum(request.pending_tokens for request in waiting),
            running_reqs=len(running),
            running_remaining_tokens=sum(r.output_tokens - r.done_tokens for r in running),
            blocks_free=self.scheduler.pool.free,
        )

    def _close(self, request: Request) -> None:
        """Stamp the API events of a request that has ended."""
        draws, options = self._streams.api, self._options
        request.handoff_ns = request.arrival_ns + round(request.api_work_us * draws.uniform(180, 240))
        response_ns = round(draws.uniform(0.5e6, 1.5e6))
        # A departure waits for all outputs of the finishing step, not only for the tokens of the request.
        law_us = options.departure.departure_us(request.batch_reqs, request.finishing_reqs)
        departure_us = law_us * math.exp(options.departure.jitter * draws.normal())
        request.departed_ns = request.points[-1].ts_ns + round(departure_us * 1e3)
        if request.abort_ns is not None and request.abort_ns < request.departed_ns:
            request.departed_ns = request.abort_ns
            # A broken stream is sometimes recorded as one that ended.
            may_depart = request.is_streaming and not request.is_chat
            request.is_aborted = not (may_depart and draws.uniform() < 0.1)
        first_token = request.first("FIRST_TOKEN")
        if first_token:
            response_ns = min(first_token.ts_ns + response_ns, request.departed_ns - 20_000)
            # The client can be gone before the API process has worked through its first token.
            request.first_response_ns = response_ns if response_ns > first_token.ts_ns else None


def _stamps(from_ns: int, room_ns: int, count: int) -> Sequence[int]:
    """Return `count` times after `from_ns`, in order, within `room_ns`."""
    gap_ns = min(_PROCESS_NS, room_ns // max(count, 1))
    return [from_ns + gap_ns * (i + 1) for i in range(count)]
