"""The log of a simulation, and the truth tables made of it.

`emit` writes what a server would have sent of a log; the truth tables hold all of it, with what a trace does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import polars as pl

if TYPE_CHECKING:
    from tracefit.synth.engine import Request, Scheduled
    from tracefit.synth.laws import Composition
    from tracefit.synth.options import Arrival


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
        snapshots: Its running requests as they were before its tokens were computed, if it was rich-sampled.
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
    snapshots: tuple[Scheduled, ...]

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


# -- truth -----------------------------------------------------------------------------------------------

Cell: TypeAlias = str | int | float | bool | None
"""A value of a truth table."""

_T = TypeVar("_T")
_Columns: TypeAlias = Mapping[str, tuple[type[pl.DataType], Callable[[EpochLog, _T], Cell]]]


def _state(field_name: str) -> Callable[[EpochLog, RequestLog], Cell]:
    """Return a function to a field of the queue a request met; null where it was never queued."""
    return lambda _, log: getattr(log.queue_state, field_name, None)


def _point(event: str, field_name: str) -> Callable[[EpochLog, RequestLog], Cell]:
    """Return a function to a field of a request's first event of a kind; null where it has none."""
    return lambda _, log: getattr(log.first(event), field_name, None)


_STEPS: _Columns[StepLog] = {
    "server": (pl.Int64, lambda epoch, _: epoch.server),
    "epoch": (pl.Int64, lambda epoch, _: epoch.epoch),
    "step_id": (pl.Int64, lambda _, step: step.step_id),
    "start_ns": (pl.Int64, lambda _, step: step.start_ns),
    "end_ns": (pl.Int64, lambda _, step: step.end_ns),
    "cycle_us": (pl.Float64, lambda _, step: step.cycle_ns / 1e3),
    "law_us": (pl.Float64, lambda _, step: step.law_us),
    "schedule_us": (pl.Float64, lambda _, step: step.schedule_ns / 1e3),
    "is_hiccup": (pl.Boolean, lambda _, step: step.is_hiccup),
    "num_prefill_reqs": (pl.Int64, lambda _, step: step.composition.num_prefill_reqs),
    "num_decode_reqs": (pl.Int64, lambda _, step: step.composition.num_decode_reqs),
    "prefill_tokens": (pl.Int64, lambda _, step: step.composition.prefill_tokens),
    "decode_tokens": (pl.Int64, lambda _, step: step.composition.decode_tokens),
    "recompute_tokens": (pl.Int64, lambda _, step: step.composition.recompute_tokens),
    "scheduled_tokens": (pl.Int64, lambda _, step: step.composition.scheduled_tokens),
    "context_tokens": (pl.Int64, lambda _, step: step.composition.context_tokens),
    "prefill_context_tokens": (pl.Int64, lambda _, step: step.composition.prefill_context_tokens),
    "attention_pairs": (pl.Int64, lambda _, step: step.composition.attention_pairs),
    "running": (pl.Int64, lambda _, step: step.running_depth),
    "waiting": (pl.Int64, lambda _, step: step.waiting_depth),
    "waiting_tokens": (pl.Int64, lambda _, step: step.waiting_tokens),
    "blocks_free": (pl.Int64, lambda _, step: step.blocks_free),
    "num_finished": (pl.Int64, lambda _, step: step.num_finished),
    "num_preempted": (pl.Int64, lambda _, step: step.num_preempted),
    "is_sampled": (pl.Boolean, lambda _, step: step.is_sampled),
}
_REQUESTS: _Columns[RequestLog] = {
    "server": (pl.Int64, lambda epoch, _: epoch.server),
    "epoch": (pl.Int64, lambda epoch, _: epoch.epoch),
    "request_id": (pl.String, lambda epoch, log: log.arrival.api_id(epoch.server)),
    "core_request_id": (pl.String, lambda _, log: log.request.request_id),
    "load_phase": (pl.String, lambda _, log: log.arrival.phase),
    "is_chat": (pl.Boolean, lambda _, log: log.arrival.is_chat),
    "is_streaming": (pl.Boolean, lambda _, log: log.arrival.is_streaming),
    "prompt_tokens": (pl.Int64, lambda _, log: log.arrival.prompt_tokens),
    "max_tokens": (pl.Int64, lambda _, log: log.arrival.max_tokens),
    "output_tokens": (pl.Int64, lambda _, log: log.request.done_tokens),
    "cached_prompt_tokens": (pl.Int64, lambda _, log: log.cached_prompt_tokens),
    "arrival_ns": (pl.Int64, lambda _, log: log.arrival.arrival_ns),
    "api_work_us": (pl.Float64, lambda _, log: log.arrival.api_work_us),
    "socket_ns": (pl.Int64, lambda _, log: log.socket_ns),
    "queued_ns": (pl.Int64, _point("QUEUED", "ts_ns")),
    "queued_step": (pl.Int64, _point("QUEUED", "step_id")),
    "requests_ahead": (pl.Int64, _state("requests_ahead")),
    "tokens_ahead": (pl.Int64, _state("tokens_ahead")),
    "running_reqs": (pl.Int64, _state("running_reqs")),
    "running_remaining_tokens": (pl.Int64, _state("running_remaining_tokens")),
    "blocks_free": (pl.Int64, _state("blocks_free")),
    "first_scheduled_ns": (pl.Int64, _point("SCHEDULED", "ts_ns")),
    "first_scheduled_step": (pl.Int64, _point("SCHEDULED", "step_id")),
    "first_token_ns": (pl.Int64, _point("FIRST_TOKEN", "ts_ns")),
    "first_token_step": (pl.Int64, _point("FIRST_TOKEN", "step_id")),
    "finished_ns": (pl.Int64, _point("FINISHED", "ts_ns")),
    "finished_step": (pl.Int64, _point("FINISHED", "step_id")),
    "finish_status": (pl.String, lambda _, log: log.points[-1].detail),
    "departed_ns": (pl.Int64, lambda _, log: log.departed_ns),
    "num_preemptions": (pl.Int64, lambda _, log: log.request.num_preemptions),
    "batch_reqs": (pl.Int64, lambda _, log: log.batch_reqs or None),
    "finishing_reqs": (pl.Int64, lambda _, log: log.finishing_reqs or None),
    "abort_ns": (pl.Int64, lambda _, log: log.abort_ns),
    "abort_stage": (pl.String, lambda _, log: log.arrival.abort_stage.value or None),
}

STEP_COLUMNS = {name: kind for name, (kind, _) in _STEPS.items()}
"""Columns of the steps' truth; times monotonic, `law_us` is `cycle_us` without noise and hiccups."""

REQUEST_COLUMNS = {name: kind for name, (kind, _) in _REQUESTS.items()}
"""Columns of the requests' truth; queue state is what the request met when it was QUEUED."""


def steps_frame(epochs: Sequence[EpochLog]) -> pl.DataFrame:
    """Return one row per step."""
    return _frame(_STEPS, [(epoch, step) for epoch in epochs for step in epoch.steps])


def requests_frame(epochs: Sequence[EpochLog]) -> pl.DataFrame:
    """Return one row per request, sampled or not."""
    return _frame(_REQUESTS, [(epoch, log) for epoch in epochs for log in epoch.requests])


def _frame(columns: _Columns[_T], rows: Sequence[tuple[EpochLog, _T]]) -> pl.DataFrame:
    return pl.DataFrame(
        [pl.Series(name, [value(*row) for row in rows], kind) for name, (kind, value) in columns.items()]
    )
