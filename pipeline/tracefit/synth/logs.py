"""The log of a simulation: the facts from which both the trace and the truth are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracefit.synth.engine import Request
    from tracefit.synth.laws import Composition
    from tracefit.synth.workload import Arrival


@dataclass(frozen=True, slots=True)
class JourneyPoint:
    """One event of a request's journey through the engine core.

    Attributes:
        event: QUEUED, SCHEDULED, FIRST_TOKEN, PREEMPTED or FINISHED.
        ts_ns: Time, monotonic.
        step_id: Counter of the step it belongs to.
        phase: WAITING, PREFILL or DECODE.
        prefill_done_tokens: Most prompt tokens ever computed.
        decode_done_tokens: Output tokens so far.
        num_preemptions: Preemptions so far.
        detail: `schedule.kind` of SCHEDULED, `finish.status` of FINISHED, else empty.
    """

    event: str
    ts_ns: int
    step_id: int
    phase: str
    prefill_done_tokens: int
    decode_done_tokens: int
    num_preemptions: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a request met when it was QUEUED.

    Attributes:
        requests_ahead: Requests waiting before it.
        tokens_ahead: Tokens these have to compute.
        running_reqs: Requests running.
        running_remaining_tokens: Output tokens these will still generate, if left alone.
        blocks_free: KV blocks free.
    """

    requests_ahead: int
    tokens_ahead: int
    running_reqs: int
    running_remaining_tokens: int
    blocks_free: int


@dataclass(slots=True, eq=False)
class RequestLog:
    """One request: its arrival and its outcome.

    Attributes:
        arrival: As the client sent it.
        request: As the engine core saw it.
        socket_ns: Time it lay in the engine's input socket.
        queue_state: What it met when QUEUED.
        points: Its journey.
        abort_ns: Time its client went; None if it stayed.
        batch_reqs: Requests in the batch of the step it finished in; 0 if it was aborted.
        finishing_reqs: Requests that finished with that step.
        cached_prompt_tokens: Prompt tokens found in the prefix cache at the first scheduling.
        handoff_ns: HANDOFF_TO_CORE of the API process.
        first_response_ns: FIRST_RESPONSE_FROM_CORE of the API process; None if there was none.
        departed_ns: End of the request in the API process.
        is_aborted: Whether the API process ended it as aborted.
    """

    arrival: Arrival
    request: Request
    socket_ns: int
    queue_state: QueueState | None = None
    points: list[JourneyPoint] = field(default_factory=list)
    abort_ns: int | None = None
    batch_reqs: int = 0
    finishing_reqs: int = 0
    cached_prompt_tokens: int = 0
    handoff_ns: int = 0
    first_response_ns: int | None = None
    departed_ns: int = 0
    is_aborted: bool = False

    def note(self, event: str, ts_ns: int, step_id: int, *, phase: str = "", detail: str = "") -> None:
        """Add a point of the journey with the request's present state."""
        request = self.request
        phase = phase or ("DECODE" if request.done_tokens else "PREFILL")
        self.points.append(
            JourneyPoint(
                event,
                ts_ns,
                step_id,
                phase,
                request.prefill_done_tokens,
                request.done_tokens,
                request.num_preemptions,
                detail,
            )
        )

    def first(self, event: str) -> JourneyPoint | None:
        """Return the first point of that kind, if there is one."""
        return next((point for point in self.points if point.event == event), None)


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """State of one running request in a rich-sampled step, tokens of the step not yet computed."""

    request_id: str
    is_decode: bool
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    num_preemptions: int
    scheduled_tokens: int
    blocks: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepLog:
    """One step of the engine.

    Attributes:
        step_id: Counter of the step.
        composition: What it carried.
        num_finished: Requests that ended since the step before was scheduled.
        num_preempted: Requests that lost their blocks in it.
        start_ns: Start, monotonic.
        schedule_ns: Time inside `schedule()`.
        cycle_ns: Time to the start of the next step while the engine is busy.
        law_us: What the law says, without noise.
        is_hiccup: Whether something outside the law delayed it.
        running_depth: Requests with a slot after scheduling.
        waiting_depth: Requests without one.
        waiting_tokens: Tokens these have to compute.
        blocks_free: KV blocks free after scheduling.
        is_sampled: Whether it is in the trace.
        snapshots: Its running requests, if it was rich-sampled.
    """

    step_id: int
    composition: Composition
    num_finished: int
    num_preempted: int
    start_ns: int
    schedule_ns: int
    cycle_ns: int
    law_us: float
    is_hiccup: bool
    running_depth: int
    waiting_depth: int
    waiting_tokens: int
    blocks_free: int
    is_sampled: bool
    snapshots: tuple[SnapshotRow, ...] | None

    @property
    def end_ns(self) -> int:
        """End of the cycle, monotonic."""
        return self.start_ns + self.cycle_ns


@dataclass(frozen=True, slots=True)
class EpochLog:
    """One life of one engine.

    Attributes:
        server: Number of the server, from 0.
        epoch: Number of the engine's start on it, from 0.
        unix_offset_ns: Unix time minus monotonic time.
        started_ns: Time the engine came up, monotonic.
        stopped_ns: Time it went down.
        steps: Its steps in order.
        requests: Its requests in order of arrival.
        blocks_total: KV blocks it could hand out.
        blocks_free_at_end: How many of them were free at the end.
    """

    server: int
    epoch: int
    unix_offset_ns: int
    started_ns: int
    stopped_ns: int
    steps: tuple[StepLog, ...]
    requests: tuple[RequestLog, ...]
    blocks_total: int
    blocks_free_at_end: int
