"""Write the log of a simulation as the spans that the instrumented server would have sent.

Names of spans, events and attributes, their order and their clocks are those of the real emitter, odd ones included: a step's
`duration_us` is the time in `schedule()`, and a span that loses events loses its oldest.
"""

from __future__ import annotations

import uuid
from itertools import groupby
from typing import TYPE_CHECKING

from tracefit.synth.spans import (
    Attributes,
    ExportBatch,
    GeneratedEvent,
    GeneratedSpan,
    SpanKind,
    Value,
    limited,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np

    from tracefit.synth.engine import Scheduled
    from tracefit.synth.logs import EpochLog, JourneyPoint, RequestLog, StepLog
    from tracefit.synth.options import SynthOptions

_API, _CORE, _STEP = "vllm.api", "vllm.scheduler", "vllm.scheduler.step"
# OTLP's SpanFlags: bit 8 says that bit 9, "the parent is in another process", is meant.
_FLAGS_ROOT, _FLAGS_CHILD_OF_REMOTE = 0x100, 0x300
# Defaults of the SDK's batch processor: OTEL_BSP_SCHEDULE_DELAY and OTEL_BSP_MAX_EXPORT_BATCH_SIZE.
_FLUSH_NS = 5_000_000_000
"""Period in which a process exports the spans that ended."""
_MAX_BATCH_SPANS = 512
_DISCONNECT = "Client disconnected"

_DETAIL_KEYS = {"SCHEDULED": "schedule.kind", "FINISHED": "finish.status"}


class Emitter:
    """Writes the spans of one epoch of one server."""

    def __init__(self, options: SynthOptions, epoch: EpochLog, rng: np.random.Generator) -> None:
        self._options = options
        self._epoch = epoch
        id_rng, journey_rng, jitter_rng = rng.spawn(3)
        self._id_rng = id_rng
        self._is_sampled = (journey_rng.random(len(epoch.requests)) < options.journey_sampling).tolist()
        # Unix stamps follow the monotonic ones by a few microseconds; a prime number of lags repeats with no other period.
        self._lags_ns: list[int] = jitter_rng.integers(500, 9_000, 1_021).tolist()

    def spans(self) -> tuple[list[GeneratedSpan], list[GeneratedSpan]]:
        """Return the spans of the API process and of the engine core."""
        api: list[GeneratedSpan] = []
        core: list[GeneratedSpan] = []
        for log, is_sampled in zip(self._epoch.requests, self._is_sampled, strict=True):
            trace_id, api_id, core_id = self._hex(16), self._hex(8), self._hex(8)
            if is_sampled:
                api.append(self._api_span(log, trace_id, api_id))
                core.append(self._core_span(log, trace_id, core_id, parent_id=api_id))
        core.extend(self._step_spans())
        return api, core

    def _hex(self, size_bytes: int) -> str:
        return self._id_rng.bytes(size_bytes).hex()

    def _unix_ns(self, ts_ns: int) -> int:
        return ts_ns + self._epoch.unix_offset_ns

    def _stamp_ns(self, ts_ns: int) -> int:
        return self._unix_ns(ts_ns) + self._lags_ns[ts_ns % len(self._lags_ns)]

    def _event(self, name: str, ts_ns: int, attributes: Attributes) -> GeneratedEvent:
        return GeneratedEvent(name, self._stamp_ns(ts_ns), attributes)

    def _limited(self, events: list[GeneratedEvent]) -> tuple[tuple[GeneratedEvent, ...], int]:
        return limited(events, self._options.span_event_limit)

    def _api_span(self, log: RequestLog, trace_id: str, span_id: str) -> GeneratedSpan:
        arrival = log.arrival
        # Status code 2 is on aborted chat and non-streaming requests alone; a broken stream ends its span without one.
        is_failed = log.is_aborted and (arrival.is_chat or not arrival.is_streaming)
        error = _DISCONNECT if is_failed else ""
        events, dropped = self._limited(list(self._api_events(log, error)))
        return GeneratedSpan(
            scope=_API,
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id="",
            flags=_FLAGS_ROOT,
            name="llm_request",
            kind=SpanKind.SERVER,
            start_unix_ns=self._unix_ns(arrival.arrival_ns) - 60_000,
            end_unix_ns=self._unix_ns(log.departed_ns) + 30_000,
            attributes=self._api_attributes(log),
            events=events,
            dropped_events=dropped,
            error=error,
        )

    def _api_attributes(self, log: RequestLog) -> Attributes:
        arrival = log.arrival
        values: dict[str, Value] = {
            "gen_ai.request.id": arrival.api_id(self._epoch.server),
            "http.route": "/v1/chat/completions" if arrival.is_chat else "/v1/completions",
            "gen_ai.response.model": self._options.architecture.served_name,
            "gen_ai.usage.prompt_tokens": arrival.prompt_tokens,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": arrival.max_tokens,
            "gen_ai.request.n": 1,
        }
        # Of finished chat requests alone: output lengths of the others are in their journeys.
        if arrival.is_chat and not log.is_aborted:
            values["gen_ai.usage.completion_tokens"] = log.request.done_tokens
        return Attributes.of(values)

    def _api_events(self, log: RequestLog, error: str) -> Iterator[GeneratedEvent]:
        yield self._api_event("ARRIVED", log.arrival.arrival_ns)
        # The completions route stamps ARRIVED and the end only.
        if log.arrival.is_chat:
            if not log.is_aborted or log.handoff_ns < log.departed_ns:
                yield self._api_event("HANDOFF_TO_CORE", log.handoff_ns)
            if log.first_response_ns is not None:
                yield self._api_event("FIRST_RESPONSE_FROM_CORE", log.first_response_ns)
        if not log.is_aborted:
            yield self._api_event("DEPARTED", log.departed_ns)
        else:
            details = {"reason": "client_disconnect", **({"error": error} if error else {})}
            yield self._api_event("ABORTED", log.departed_ns, **details)

    def _api_event(self, name: str, ts_ns: int, **details: str) -> GeneratedEvent:
        return self._event(
            f"api.{name}", ts_ns, Attributes.of({"event.ts.monotonic": ts_ns / 1e9, **details})
        )

    def _core_span(self, log: RequestLog, trace_id: str, span_id: str, *, parent_id: str) -> GeneratedSpan:
        events, dropped = self._limited([self._journey_event(log, point) for point in log.points])
        return GeneratedSpan(
            scope=_CORE,
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            flags=_FLAGS_CHILD_OF_REMOTE,
            name="llm_core",
            kind=SpanKind.INTERNAL,
            start_unix_ns=self._unix_ns(log.points[0].ts_ns) - 12_000,
            end_unix_ns=self._stamp_ns(log.points[-1].ts_ns) + 60_000,
            attributes=Attributes.of({"gen_ai.request.id": log.request.request_id}),
            events=events,
            dropped_events=dropped,
        )

    def _journey_event(self, log: RequestLog, point: JourneyPoint) -> GeneratedEvent:
        values: dict[str, Value] = {
            "event.type": point.event,
            "ts.monotonic": point.ts_ns / 1e9,
            "ts.monotonic_ns": point.ts_ns,
            "scheduler.step": point.step_id,
            "phase": point.phase,
            "prefill.done_tokens": point.prefill_done_tokens,
            "prefill.total_tokens": log.arrival.prompt_tokens,
            "decode.done_tokens": point.decode_done_tokens,
            "decode.max_tokens": log.arrival.max_tokens,
            "num_preemptions": point.num_preemptions,
        }
        if point.detail:
            values[_DETAIL_KEYS[point.event]] = point.detail
        return self._event(f"journey.{point.event}", point.ts_ns, Attributes.of(values))

    def _step_spans(self) -> Iterator[GeneratedSpan]:
        """Yield a span per so many steps; one without an event stays open for as many more."""
        interval = self._options.steps_per_span
        events: list[GeneratedEvent] = []
        first, sequence = 1, 1
        opened_ns = self._unix_ns(self._epoch.started_ns)
        for step in self._epoch.steps:
            if step.is_sampled:
                events.extend(self._step_events(step))
            if events and step.step_id % interval == 0:
                ended_ns = max(self._stamp_ns(step.start_ns + step.schedule_ns), events[-1].unix_ns) + 12_000
                yield self._step_span(events, (sequence, first, step.step_id), (opened_ns, ended_ns))
                first, sequence, opened_ns, events = step.step_id + 1, sequence + 1, ended_ns + 8_000, []
        if events:
            last = self._epoch.steps[-1].step_id
            ended_ns = self._unix_ns(self._epoch.stopped_ns)
            yield self._step_span(events, (sequence, first, last), (opened_ns, ended_ns))

    def _step_span(
        self, events: list[GeneratedEvent], steps: tuple[int, int, int], unix_ns: tuple[int, int]
    ) -> GeneratedSpan:
        sequence, first, last = steps
        kept, dropped = self._limited(events)
        return GeneratedSpan(
            scope=_STEP,
            trace_id=self._hex(16),
            span_id=self._hex(8),
            parent_span_id="",
            flags=_FLAGS_ROOT,
            name=f"scheduler_steps_{sequence}",
            kind=SpanKind.INTERNAL,
            start_unix_ns=unix_ns[0],
            end_unix_ns=unix_ns[1],
            attributes=Attributes.of(
                {
                    "scheduler.span_sequence": sequence,
                    "scheduler.step_range_start": first,
                    "scheduler.closure_interval": self._options.steps_per_span,
                    "scheduler.step_range_end": last,
                }
            ),
            events=kept,
            dropped_events=dropped,
        )

    def _step_events(self, step: StepLog) -> Iterator[GeneratedEvent]:
        # The emitter's `step.duration_us` is the time in schedule(), whatever its name says.
        took_ns = step.cycle_ns if self._options.duration == "step" else step.schedule_ns
        end_ns = step.start_ns + took_ns
        yield self._event("step.BATCH_SUMMARY", end_ns, self._summary(step, end_ns))
        # Snapshots carry no clock; they are stamped one after the other, after the summary.
        for i, share in enumerate(step.snapshots):
            yield self._event(
                "step.REQUEST_SNAPSHOT", end_ns + 20_000 + 12_000 * i, self._snapshot(step, share)
            )

    def _summary(self, step: StepLog, end_ns: int) -> Attributes:
        batch, total = step.composition, self._epoch.blocks_total
        return Attributes.of(
            {
                "step.id": step.step_id,
                "step.ts_start_ns": step.start_ns,
                "step.ts_end_ns": end_ns,
                "step.duration_us": (end_ns - step.start_ns) // 1_000,
                "queue.running_depth": step.running_depth,
                "queue.waiting_depth": step.waiting_depth,
                "batch.num_prefill_reqs": batch.num_prefill_reqs,
                "batch.num_decode_reqs": batch.num_decode_reqs,
                "batch.scheduled_tokens": batch.scheduled_tokens,
                "batch.prefill_tokens": batch.prefill_tokens,
                "batch.decode_tokens": batch.decode_tokens,
                "batch.num_finished": step.num_finished,
                "batch.num_preempted": step.num_preempted,
                "kv.usage_gpu_ratio": 1.0 - step.blocks_free / total,
                "kv.blocks_total_gpu": total,
                "kv.blocks_free_gpu": step.blocks_free,
            }
        )

    def _snapshot(self, step: StepLog, share: Scheduled) -> Attributes:
        request = share.request
        return Attributes.of(
            {
                "step.id": step.step_id,
                "request.id": request.request_id,
                "request.phase": "DECODE" if request.done_tokens else "PREFILL",
                "request.num_prompt_tokens": request.prompt_tokens,
                "request.num_computed_tokens": share.computed_tokens,
                "request.num_output_tokens": request.done_tokens,
                "request.num_preemptions": request.num_preemptions,
                "request.scheduled_tokens_this_step": share.tokens,
                "kv.blocks_allocated_gpu": request.blocks,
                # Full blocks, not hits: those are the prompt less `effective_prompt_len`.
                "kv.blocks_cached_gpu": (share.computed_tokens + share.tokens) // self._options.block_size,
                "request.effective_prompt_len": request.prompt_tokens - request.cached_tokens,
            }
        )


def export(options: SynthOptions, epochs: Iterable[EpochLog], rng: np.random.Generator) -> list[ExportBatch]:
    """Return all export batches of all servers, in the order a collector received them."""
    id_rng, span_rng = rng.spawn(2)
    batches: list[tuple[int, ExportBatch]] = []
    for _, lives in groupby(epochs, key=lambda epoch: epoch.server):
        api: list[GeneratedSpan] = []
        core: list[GeneratedSpan] = []
        for life in lives:
            for whole, part in zip(
                (api, core), Emitter(options, life, span_rng.spawn(1)[0]).spans(), strict=True
            ):
                whole.extend(part)
        for resource, spans in zip(_resources(options, id_rng.bytes), (api, core), strict=True):
            batches.extend(_flushes(resource, spans))
    batches.sort(key=lambda sent: sent[0])
    return [batch for _, batch in batches]


def _resources(options: SynthOptions, draw: Callable[[int], bytes]) -> tuple[Attributes, Attributes]:
    """Return the resource of a server's API process and of its engine core."""
    choice = options.instance_ids
    if choice == "auto":
        choice = "none" if options.servers == 1 else "server"
    # Drawn whether used or not: another choice leaves every other id as it is.
    api_id, core_id = (str(uuid.UUID(bytes=draw(16), version=4)) for _ in range(2))

    def resource(sdk: str, **instance: str) -> Attributes:
        described = {
            "telemetry.sdk.language": "python",
            "telemetry.sdk.name": "opentelemetry",
            "telemetry.sdk.version": sdk,
        }
        return Attributes.of({**described, **instance, "service.name": "vllm-synth"})

    if choice == "none":
        return resource("1.26.0"), resource("1.26.0")
    ids = (api_id, core_id if choice == "process" else api_id)
    api, core = (resource("1.45.2", **{"service.instance.id": one}) for one in ids)
    return api, core


def _flushes(resource: Attributes, spans: list[GeneratedSpan]) -> Iterator[tuple[int, ExportBatch]]:
    """Yield what one process exports, with the time: the spans that ended since it did so last."""
    ordered = sorted(spans, key=lambda span: (span.end_unix_ns, span.span_id))
    for period, group in groupby(ordered, key=lambda span: span.end_unix_ns // _FLUSH_NS):
        ended = tuple(group)
        for first in range(0, len(ended), _MAX_BATCH_SPANS):
            sent_ns = (period + 1) * _FLUSH_NS + first
            yield sent_ns, ExportBatch(resource, ended[first : first + _MAX_BATCH_SPANS])
