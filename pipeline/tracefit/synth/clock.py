"""Simulate an engine over time: its socket, steps and idle times, and the API process around it.

One cycle of the engine core, start to start::

    schedule() | execute ............... | aborts | update | drain the socket | next schedule()
    start      +schedule_ns              +cycle-tail                          start + cycle
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tracefit.synth.engine import FinishStatus, Request, Scheduled, Scheduler, StepOutcome, StepPlan
from tracefit.synth.logs import QueueState, RequestLog, StepLog
from tracefit.synth.options import AbortStage, Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from tracefit.synth.laws import StepLaw
    from tracefit.synth.options import SynthOptions

# Times around a step are assumed, of the order that traces of an instrumented vLLM 0.15.1 show.
_WAKE_NS = 10_000
"""Time an idle engine needs to notice a message."""
_PROCESS_NS = 2_000
"""Time between two stamps of one loop over requests, if there is room for it."""
_ABORT_MESSAGE_NS = 200_000
"""Time from a client's disconnect to the message in the engine's socket."""
_CHUNK = 4_096
"""Random numbers drawn at once: by itself a number costs about eight times one of a chunk."""


class Draws:
    """Standard normal and uniform numbers of one generator, drawn ahead in chunks.

    The two kinds have generators of their own: an added draw of one kind leaves the sequence of the other as it is.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        normal_rng, uniform_rng = rng.spawn(2)
        self._normal = self._ahead(lambda: normal_rng.standard_normal(_CHUNK).tolist())
        self._uniform = self._ahead(lambda: uniform_rng.random(_CHUNK).tolist())

    def normal(self) -> float:
        """Return a draw of the standard normal distribution."""
        return next(self._normal)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a draw between `low` and `high`."""
        return low + (high - low) * next(self._uniform)

    @staticmethod
    def _ahead(draw: Callable[[], list[float]]) -> Iterator[float]:
        while True:
            yield from draw()


@dataclass(frozen=True, slots=True)
class Streams:
    """Sources of randomness that must not disturb each other: another sampling rate shows more or less of the same run.

    Attributes:
        engine: Step times and time in `schedule()`.
        api: The API process.
        sampling: Which steps are in the trace.
    """

    engine: Draws
    api: Draws
    sampling: Draws


class EngineClock:
    """Runs one engine from its first arrival until all requests have ended.

    Attributes:
        steps: Steps so far.
        requests: Requests, in order of arrival.
        scheduler: The engine's scheduler.
    """

    def __init__(
        self,
        options: SynthOptions,
        law: StepLaw,
        streams: Streams,
        arrivals: Sequence[Arrival],
        core_ids: Sequence[str],
    ) -> None:
        self._options = options
        self._law = law
        self._streams = streams
        self.scheduler = Scheduler(options.scheduler)
        self.steps: list[StepLog] = []
        self.requests = [_log(arrival, core_id) for arrival, core_id in zip(arrivals, core_ids, strict=True)]
        self._by_request = {log.request: log for log in self.requests}
        self._quitters = {
            log.request: log for log in self.requests if log.arrival.abort_stage is AbortStage.DECODE
        }
        self._socket = sorted(self.requests, key=lambda log: (log.socket_ns, log.arrival.number))
        self._next = 0
        self._aborts: list[tuple[int, int, RequestLog]] = []

    def run(self) -> None:
        """Take steps until all requests have ended."""
        now_ns = 0
        while True:
            if self.scheduler.has_work:
                now_ns = self._step(now_ns)
            elif self._next < len(self._socket):
                drain_ns = max(now_ns, self._socket[self._next].socket_ns + _WAKE_NS)
                # From idle the first schedule() follows the drain at once, with no step to wait for.
                now_ns = drain_ns + 60_000
                self._drain(drain_ns, room_ns=30_000)
            else:
                break
        for log in self.requests:
            self._close(log)

    def _step(self, start_ns: int) -> int:
        """Take one step and drain the socket; return when the next can start."""
        plan = self.scheduler.schedule()
        snapshots = self._snapshots(plan) if self._is_sampled() else None
        law_us = self._law.step_us(plan.composition) if plan.scheduled else self._options.empty_step_us
        hiccup_us = self._hiccup_us()
        cycle_us = law_us * math.exp(self._options.noise * self._streams.engine.normal()) + hiccup_us
        cycle_ns = round(cycle_us * 1e3)
        schedule_ns = self._schedule_ns(plan, cycle_ns)
        self._note_scheduling(plan, start_ns, schedule_ns, cycle_ns)
        self.steps.append(
            StepLog(
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
                is_sampled=snapshots is not None,
                snapshots=snapshots or (),
            )
        )
        self._finish_step(plan, start_ns, cycle_ns)
        return start_ns + cycle_ns

    def _finish_step(self, plan: StepPlan, start_ns: int, cycle_ns: int) -> None:
        self.scheduler.launch(plan)
        end_ns = start_ns + cycle_ns
        # Real FIRST_TOKEN and FINISHED are stamped within 0.5 ms of the end of their step.
        tail_ns = min(250_000, cycle_ns // 4)
        self._take_aborts(end_ns - tail_ns, end_ns - tail_ns, room_ns=tail_ns // 8)
        outcome = self.scheduler.update(plan)
        self._note_update(plan, outcome, end_ns - tail_ns * 3 // 4, room_ns=tail_ns // 3)
        self._drain(end_ns - tail_ns // 4, room_ns=tail_ns // 8)

    def _is_sampled(self) -> bool:
        return self._streams.sampling.uniform() < self._options.step_sampling

    def _snapshots(self, plan: StepPlan) -> tuple[Scheduled, ...]:
        """Return the running requests if the step is rich-sampled, else nothing."""
        if self._streams.sampling.uniform() >= self._options.rich_sampling:
            return ()
        tokens = {share.request: share.tokens for share in plan.scheduled}
        # Copies: the requests themselves go on.
        return tuple(
            Scheduled(replace(request), tokens.get(request, 0), request.computed_tokens)
            for request in self.scheduler.running
        )

    def _hiccup_us(self) -> float:
        draws = self._streams.engine
        # Both are drawn for every step: another rate leaves the draws of the other steps as they are.
        is_hit = draws.uniform() < self._options.hiccup_rate
        delay_us = -math.log(1.0 - draws.uniform()) * self._options.hiccup_us
        return delay_us if is_hit else 0.0

    def _schedule_ns(self, plan: StepPlan, cycle_ns: int) -> int:
        """Return the time in `schedule()`: a little per running request, more where one is admitted."""
        # Real schedule() takes 91 us (median, CPU) to 1.1 ms (H100), and stamps SCHEDULED 0.1 to 0.7 ms after its start.
        admitted = len(plan.first) + len(plan.resumed)
        admit_us = 160.0 + 25.0 * admitted if admitted else 0.0
        time_us = 60.0 + 1.5 * len(plan.scheduled) + admit_us
        time_us *= math.exp(0.2 * self._streams.engine.normal())
        return min(round(min(time_us, 800.0) * 1e3), cycle_ns // 2)

    def _note_scheduling(self, plan: StepPlan, start_ns: int, schedule_ns: int, cycle_ns: int) -> None:
        step_id = plan.step_id
        stamps = _stamps(start_ns + schedule_ns // 4, schedule_ns // 4, len(plan.preempted))
        for request, ts_ns in zip(plan.preempted, stamps, strict=True):
            self._by_request[request].note("PREEMPTED", ts_ns, step_id)
        # Preemptions come first: the engine serves running requests before it admits waiting ones.
        admitted = (*((request, "FIRST") for request in plan.first), *((r, "RESUME") for r in plan.resumed))
        stamps = _stamps(start_ns + schedule_ns * 5 // 8, schedule_ns // 4, len(admitted))
        for (request, kind), ts_ns in zip(admitted, stamps, strict=True):
            log = self._by_request[request]
            log.note("SCHEDULED", ts_ns, step_id, detail=kind)
            if kind == "FIRST":
                log.cached_prompt_tokens = request.cached_tokens
                self._leave(log, AbortStage.PREFILL, start_ns + round(log.arrival.abort_share * cycle_ns))

    def _note_update(self, plan: StepPlan, outcome: StepOutcome, from_ns: int, *, room_ns: int) -> None:
        step_id = plan.step_id
        stamps = _stamps(from_ns, room_ns, len(outcome.first_token) + len(outcome.finished))
        for request, ts_ns in zip(outcome.first_token, stamps, strict=False):
            self._by_request[request].note("FIRST_TOKEN", ts_ns, step_id)
        for request, ts_ns in zip(outcome.finished, stamps[len(outcome.first_token) :], strict=True):
            log = self._by_request[request]
            log.batch_reqs, log.finishing_reqs = len(plan.scheduled), len(outcome.finished)
            log.note("FINISHED", ts_ns, step_id, detail=_status(request).value)
        self._leave_in_decode(plan, from_ns + room_ns)

    def _leave_in_decode(self, plan: StepPlan, now_ns: int) -> None:
        """Disconnect the clients that leave after this many tokens."""
        for share in plan.scheduled:
            log = self._quitters.get(share.request)
            if log is None:
                continue
            wanted = 1 + int(log.arrival.abort_share * (log.arrival.output_tokens - 1))
            if share.request.done_tokens >= wanted:
                self._leave(log, AbortStage.DECODE, now_ns + round(3e6 * self._streams.api.uniform()))

    def _leave(self, log: RequestLog, stage: AbortStage, abort_ns: int) -> None:
        """Disconnect a client if this is the stage at which it leaves."""
        if log.arrival.abort_stage is stage and log.abort_ns is None:
            log.abort_ns = max(abort_ns, log.socket_ns)
            message = (log.abort_ns + _ABORT_MESSAGE_NS, log.arrival.number, log)
            heapq.heappush(self._aborts, message)

    def _drain(self, until_ns: int, *, room_ns: int) -> None:
        """Read the socket: new requests are QUEUED, aborted ones end."""
        arrived = self._arrived(until_ns)
        for log, ts_ns in zip(arrived, _stamps(until_ns, room_ns, len(arrived)), strict=True):
            # Before `add`: a request does not wait for itself.
            log.queue_state = self._queue_state()
            queued_ns = ts_ns if self._options.queued_stamp == "step_start" else log.socket_ns
            log.note("QUEUED", queued_ns, self.scheduler.step_id, phase="WAITING")
            self.scheduler.add(log.request)
            self._leave(log, AbortStage.WAITING, log.socket_ns + round(2e6 * log.arrival.abort_share))
        self._take_aborts(until_ns, until_ns + room_ns, room_ns=room_ns // 2)

    def _arrived(self, until_ns: int) -> list[RequestLog]:
        first = self._next
        while self._next < len(self._socket) and self._socket[self._next].socket_ns <= until_ns:
            self._next += 1
        return self._socket[first : self._next]

    def _take_aborts(self, until_ns: int, from_ns: int, *, room_ns: int) -> None:
        """End the requests whose abort came before `until_ns`; stamps begin after `from_ns`."""
        gone: list[RequestLog] = []
        while self._aborts and self._aborts[0][0] <= until_ns:
            log = heapq.heappop(self._aborts)[2]
            if self.scheduler.abort(log.request):
                gone.append(log)
        for log, ts_ns in zip(gone, _stamps(from_ns, room_ns, len(gone)), strict=True):
            log.note("FINISHED", ts_ns, self.scheduler.step_id, detail=_status(log.request).value)

    def _queue_state(self) -> QueueState:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        return QueueState(
            requests_ahead=len(waiting),
            tokens_ahead=sum(request.pending_tokens for request in waiting),
            running_reqs=len(running),
            running_remaining_tokens=sum(r.output_tokens - r.done_tokens for r in running),
            blocks_free=self.scheduler.pool.free,
        )

    def _close(self, log: RequestLog) -> None:
        """Stamp the API events of a request that has ended."""
        draws, options = self._streams.api, self._options
        log.handoff_ns = log.arrival.arrival_ns + round(log.arrival.api_work_us * draws.uniform(180, 240))
        response_ns = round(draws.uniform(0.5e6, 1.5e6))
        # A departure waits for the outputs of the finishing step, not for its own tokens.
        law_us = options.departure.departure_us(log.batch_reqs, log.finishing_reqs)
        departure_us = law_us * math.exp(options.departure.jitter * draws.normal())
        log.departed_ns = log.points[-1].ts_ns + round(departure_us * 1e3)
        if log.abort_ns is not None and log.abort_ns < log.departed_ns:
            log.departed_ns = log.abort_ns
            # A stream that breaks off is now and then taken for one that ended.
            may_depart = log.arrival.is_streaming and not log.arrival.is_chat
            log.is_aborted = not (may_depart and draws.uniform() < 0.1)
        first_token = log.first("FIRST_TOKEN")
        if first_token:
            response_ns = min(first_token.ts_ns + response_ns, log.departed_ns - 20_000)
            # The client can be gone before the API process has worked through its first token.
            log.first_response_ns = response_ns if response_ns > first_token.ts_ns else None


def _log(arrival: Arrival, core_id: str) -> RequestLog:
    request = Request(
        request_id=core_id,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        max_tokens=arrival.max_tokens,
        prefix=arrival.prefix,
    )
    return RequestLog(arrival, request, socket_ns=arrival.arrival_ns + round(arrival.api_work_us * 1e3))


def _status(request: Request) -> FinishStatus:
    if request.finish_status is None:
        msg = f"{request.request_id} has not ended"
        raise RuntimeError(msg)
    return request.finish_status


def _stamps(from_ns: int, room_ns: int, count: int) -> Sequence[int]:
    """Return `count` times after `from_ns`, in order, within `room_ns`."""
    gap_ns = min(_PROCESS_NS, room_ns // max(count, 1))
    return [from_ns + gap_ns * (i + 1) for i in range(count)]
