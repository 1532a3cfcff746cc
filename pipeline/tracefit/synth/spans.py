"""The spans that a server would have sent of a simulation: as data, as OTLP JSON lines and as framed protobuf.

The server is the instrumented one, an unmodified vLLM, which writes one span per request
(`Emitter._stock_spans`), or SGLang. Names of spans, events and attributes, their order and their clocks are
those of the real emitter, odd ones included: a step's `duration_us` is the time in `schedule()`, and a span
that loses events loses its oldest. Both encodings are written by hand here, so that no code is shared with
the rooms that read them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from enum import IntEnum
from functools import cache, lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from tracefit.synth.requests import outputs_ns, seen_ns, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefit.synth.options import SynthOptions
    from tracefit.synth.scheduler import JourneyPoint, Request, Scheduled
    from tracefit.synth.simulation import EpochLog, StepLog

SpanValue: TypeAlias = str | int | float
"""A scalar attribute value; its Python type is its kind on the wire."""
Attributes: TypeAlias = Mapping[str, SpanValue]
"""Attributes in order."""


class SpanKind(IntEnum):
    """OTLP span kinds of the emitter."""

    INTERNAL = 1
    SERVER = 2


class GeneratedEvent(msgspec.Struct, frozen=True):
    """An event of a span."""

    name: str
    unix_ns: int
    attributes: Attributes


class GeneratedSpan(msgspec.Struct, frozen=True):
    """A span as its exporter sends it; ids are lower-case hex digits, events the oldest first."""

    scope: str  # name of the instrumentation scope
    trace_id: str
    span_id: str
    parent_span_id: str  # or empty
    flags: int
    name: str
    kind: SpanKind
    start_unix_ns: int
    end_unix_ns: int
    attributes: Attributes
    events: tuple[GeneratedEvent, ...]
    dropped_events: int = 0  # lost to the limit
    error: str = ""  # status message of a failed span


class ExportBatch(msgspec.Struct, frozen=True):
    """One export request: the spans that a process sent at one time."""

    resource: Attributes
    spans: tuple[GeneratedSpan, ...]  # by the order they ended in

    def by_scope(self) -> dict[str, list[GeneratedSpan]]:
        """Return the spans of each scope, scopes in order of appearance."""
        scopes = dict.fromkeys(span.scope for span in self.spans)
        return {scope: [span for span in self.spans if span.scope == scope] for scope in scopes}


# -- emission --------------------------------------------------------------------------------------------

_API, _CORE, _STEPS_SCOPE, _STOCK = "vllm.api", "vllm.scheduler", "vllm.scheduler.step", "vllm.tracing.otel"
_SGLANG = "sglang server"
# OTLP's SpanFlags: bit 8 says that bit 9, "the parent is in another process", is meant.
_FLAGS_ROOT, _FLAGS_CHILD_OF_REMOTE = 0x100, 0x300
# Defaults of the SDK's batch processor: OTEL_BSP_SCHEDULE_DELAY and OTEL_BSP_MAX_EXPORT_BATCH_SIZE.
_FLUSH_NS = 5_000_000_000
"""Period in which a process exports the spans that ended."""
_MAX_BATCH_SPANS = 512

_RESULT_NS = 3_000
"""Time that SGLang's scheduler takes for the result of one request of a batch: assumed."""

_DETAIL_KEYS = {"SCHEDULED": "schedule.kind", "FINISHED": "finish.status"}


class Emitter:
    """Writes the spans of one epoch of one server."""

    def __init__(self, options: SynthOptions, epoch: EpochLog, rng: np.random.Generator) -> None:
        self._options = options
        self._epoch = epoch
        self._id_rng, journey_rng, jitter_rng, self._front_rng = rng.spawn(4)
        self._is_sampled = (journey_rng.random(len(epoch.requests)) < options.journey_sampling).tolist()
        # Unix stamps follow the monotonic ones by a few microseconds; a prime number of lags repeats with no
        # other period.
        self._lags_ns: list[int] = jitter_rng.integers(500, 9_000, 1_021).tolist()

    def spans(self) -> tuple[list[GeneratedSpan], list[GeneratedSpan]]:
        """Return the spans of the API process and of the engine core."""
        if self._options.form in ("stock", "sglang"):
            return list(self._stock_spans() if self._options.form == "stock" else self._sglang_spans()), []
        api: list[GeneratedSpan] = []
        core: list[GeneratedSpan] = []
        for request, is_sampled in zip(self._epoch.requests, self._is_sampled, strict=True):
            # Drawn whether sampled or not, so that another sampling rate does not change other ids.
            trace_id, api_id, core_id = self._hex(16), self._hex(8), self._hex(8)
            if is_sampled:
                api.append(self._api_span(request, trace_id, api_id))
                core.append(self._core_span(request, trace_id, core_id, parent_id=api_id))
        core.extend(self._step_spans())
        return api, core

    def _stock_spans(self) -> Iterator[GeneratedSpan]:
        """Yield the spans of an unmodified vLLM 0.32: one per request, written once the front end has its last token.

        Two clocks give its times. The front end stamps the outputs of a step once, shortly after the engine
        core sent them, in float seconds since 1970; the engine core stamps them once too, on its monotonic
        clock. Nothing names a step.
        """
        out_ns = outputs_ns(self._epoch).tolist()
        seen_s = (seen_ns(self._epoch, self._front_rng) / 1e9).tolist()
        complete = {one.request: one for one in served(self._epoch)}
        for request in self._epoch.requests:
            trace_id, span_id, _ = self._hex(16), self._hex(8), self._hex(8)
            # The span of a request is written with its last token: an aborted request has no span.
            one = complete.get(request)
            if one is None or int(trace_id[16:], 16) >= round(self._options.journey_sampling * 2**64):
                continue
            first, last = one.token_steps[0], one.token_steps[-1]
            arrival_s = self._unix_ns(request.arrival_ns) / 1e9
            attributes: dict[str, SpanValue] = {
                "gen_ai.latency.time_to_first_token": seen_s[first] - arrival_s,
                "gen_ai.latency.e2e": seen_s[last] - arrival_s,
                "gen_ai.latency.time_in_queue": (one.scheduled_ns - one.queued_ns) / 1e9,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.completion_tokens": request.done_tokens,
                "gen_ai.latency.time_in_model_prefill": (out_ns[first] - one.scheduled_ns) / 1e9,
                "gen_ai.latency.time_in_model_decode": (out_ns[last] - out_ns[first]) / 1e9,
                "gen_ai.latency.time_in_model_inference": (out_ns[last] - one.scheduled_ns) / 1e9,
                "gen_ai.request.id": request.api_id,
                "gen_ai.request.top_p": 1.0,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.n": 1,
            }
            unix_ns = int(arrival_s * 1e9), int(seen_s[last] * 1e9) + 380_000
            name, ids = (_STOCK, "llm_request"), (trace_id, span_id, "")
            yield self._span(name, ids, unix_ns, attributes, kind=SpanKind.SERVER)

    def _sglang_spans(self) -> Iterator[GeneratedSpan]:
        """Yield the spans of SGLang 0.5.23 at trace level 3: of a request, its two threads, and their stages."""
        out_ns, seen = outputs_ns(self._epoch), seen_ns(self._epoch, self._front_rng)
        for number, one in enumerate(served(self._epoch)):
            request, turn_ns = one.request, _RESULT_NS * (number % 16)
            trace_id, root, front, scheduler, prefill, decode = (self._hex(n) for n in (16, 8, 8, 8, 8, 8))
            arrival_ns, handed_ns = self._unix_ns(request.arrival_ns), self._unix_ns(request.socket_ns)
            tokens = [int(out_ns[step]) + turn_ns for step in one.token_steps]
            chunks = [one.scheduled_ns, *(int(out_ns[step]) + turn_ns for step in one.prompt_steps)]
            first, last = (int(seen[one.token_steps[at]]) for at in (0, -1))
            facts: dict[str, SpanValue] = {
                "rid": request.api_id,
                "module": "sglang::request",
                "gen_ai.usage.completion_tokens": request.done_tokens,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.cached_tokens": request.cached_prompt_tokens,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.latency.time_to_first_token": (first - arrival_ns) / 1e9,
                "gen_ai.latency.e2e": (last - arrival_ns) / 1e9,
            }
            thread: dict[str, SpanValue] = {"thread_label": "Scheduler", "tp_rank": 0}
            spans: list[tuple[str, str, str, int, int, dict[str, SpanValue]]] = [
                ("Req", root, "", arrival_ns, last, facts),
                ("Tokenizer", front, root, arrival_ns, handed_ns, {"thread_label": "Tokenizer"}),
                ("tokenize", "", front, arrival_ns, handed_ns, {}),
                ("Scheduler [TP 0]", scheduler, root, one.queued_ns, tokens[-1], thread),
                ("prefill_waiting", "", scheduler, one.queued_ns, one.scheduled_ns, {}),
                ("prefill_forward", prefill, scheduler, one.scheduled_ns, tokens[0], {}),
            ]
            if len(chunks) > 2:
                spans += (("chunked_prefill", "", prefill, *ends, {}) for ends in pairwise(chunks))
            if len(tokens) > 1:
                spans.append(("decode_forward", decode, scheduler, tokens[0], tokens[-1], {}))
            for count, ends in enumerate(pairwise(tokens)):
                spans.append(("decode_loop", "", decode, *ends, {"decode_ct": count}))
            for name, span_id, parent, begin_ns, end_ns, attributes in spans:
                ids = trace_id, span_id or self._hex(8), parent
                yield self._span((_SGLANG, name), ids, (begin_ns, end_ns), attributes)

    def _hex(self, size_bytes: int) -> str:
        return self._id_rng.bytes(size_bytes).hex()

    def _unix_ns(self, ts_ns: int) -> int:
        return ts_ns + self._epoch.unix_offset_ns

    def _stamp_ns(self, ts_ns: int) -> int:
        return self._unix_ns(ts_ns) + self._lags_ns[ts_ns % len(self._lags_ns)]

    def _event(self, name: str, ts_ns: int, attributes: Attributes) -> GeneratedEvent:
        return GeneratedEvent(name, self._stamp_ns(ts_ns), attributes)

    def _span(
        self,
        name: tuple[str, str],
        ids: tuple[str, str, str],
        unix_ns: tuple[int, int],
        attributes: Attributes,
        events: Sequence[GeneratedEvent] = (),
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> GeneratedSpan:
        """Return a span: its scope and name; trace, span and parent; start and end; and its events within the limit."""
        (scope, title), flags = name, _FLAGS_CHILD_OF_REMOTE if ids[2] else _FLAGS_ROOT
        # The SDK's queue of events is bounded (128 by default) and loses its oldest.
        lost = max(len(events) - (self._options.span_event_limit or len(events)), 0)
        kept = tuple(events[lost:])
        return GeneratedSpan(scope, *ids, flags, title, kind, *unix_ns, attributes, kept, lost, error)

    def _api_span(self, request: Request, trace_id: str, span_id: str) -> GeneratedSpan:
        # Only aborted chat and non-streaming requests have status code 2; a broken stream ends its span without one.
        is_failed = request.is_aborted and (request.is_chat or not request.is_streaming)
        error = "Client disconnected" if is_failed else ""
        attributes: dict[str, SpanValue] = {
            "gen_ai.request.id": request.api_id,
            "http.route": "/v1/chat/completions" if request.is_chat else "/v1/completions",
            "gen_ai.response.model": self._options.architecture.served_name,
            "gen_ai.usage.prompt_tokens": request.prompt_tokens,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.n": 1,
        }
        # Only for finished chat requests: the output lengths of others are in their journeys.
        if request.is_chat and not request.is_aborted:
            attributes["gen_ai.usage.completion_tokens"] = request.done_tokens
        return self._span(
            (_API, "llm_request"),
            (trace_id, span_id, ""),
            (self._unix_ns(request.arrival_ns) - 60_000, self._unix_ns(request.departed_ns) + 30_000),
            attributes,
            list(self._api_events(request, error)),
            kind=SpanKind.SERVER,
            error=error,
        )

    def _api_events(self, request: Request, error: str) -> Iterator[GeneratedEvent]:
        yield self._api_event("ARRIVED", request.arrival_ns)
        # The completions route stamps ARRIVED and the end only.
        if request.is_chat:
            if not request.is_aborted or request.handoff_ns < request.departed_ns:
                yield self._api_event("HANDOFF_TO_CORE", request.handoff_ns)
            if request.first_response_ns is not None:
                yield self._api_event("FIRST_RESPONSE_FROM_CORE", request.first_response_ns)
        if not request.is_aborted:
            yield self._api_event("DEPARTED", request.departed_ns)
        else:
            details = {"reason": "client_disconnect", **({"error": error} if error else {})}
            yield self._api_event("ABORTED", request.departed_ns, **details)

    def _api_event(self, name: str, ts_ns: int, **details: str) -> GeneratedEvent:
        return self._event(f"api.{name}", ts_ns, {"event.ts.monotonic": ts_ns / 1e9, **details})

    def _core_span(self, request: Request, trace_id: str, span_id: str, *, parent_id: str) -> GeneratedSpan:
        points = request.points
        return self._span(
            (_CORE, "llm_core"),
            (trace_id, span_id, parent_id),
            (self._unix_ns(points[0].ts_ns) - 12_000, self._stamp_ns(points[-1].ts_ns) + 60_000),
            {"gen_ai.request.id": request.request_id},
            [self._journey_event(request, point) for point in points],
        )

    def _journey_event(self, request: Request, point: JourneyPoint) -> GeneratedEvent:
        attributes: dict[str, SpanValue] = {
            "event.type": point.event,
            "ts.monotonic": point.ts_ns / 1e9,
            "ts.monotonic_ns": point.ts_ns,
            "scheduler.step": point.step_id,
            "phase": point.phase,
            "prefill.done_tokens": point.prefill_done_tokens,
            "prefill.total_tokens": request.prompt_tokens,
            "decode.done_tokens": point.decode_done_tokens,
            "decode.max_tokens": request.max_tokens,
            "num_preemptions": point.num_preemptions,
        }
        if point.detail:
            attributes[_DETAIL_KEYS[point.event]] = point.detail
        return self._event(f"journey.{point.event}", point.ts_ns, attributes)

    def _step_spans(self) -> Iterator[GeneratedSpan]:
        """Yield a span per `steps_per_span` steps; one without an event stays open for as many more."""
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
        attributes: dict[str, SpanValue] = {
            "scheduler.span_sequence": sequence,
            "scheduler.step_range_start": first,
            "scheduler.closure_interval": self._options.steps_per_span,
            "scheduler.step_range_end": last,
        }
        ids = self._hex(16), self._hex(8), ""
        return self._span((_STEPS_SCOPE, f"scheduler_steps_{sequence}"), ids, unix_ns, attributes, events)

    def _step_events(self, step: StepLog) -> Iterator[GeneratedEvent]:
        # The emitter's `step.duration_us` is the time in schedule(), whatever its name says.
        took_ns = step.cycle_ns if self._options.duration == "step" else step.schedule_ns
        end_ns = step.start_ns + took_ns
        yield self._event("step.BATCH_SUMMARY", end_ns, self._summary(step, end_ns))
        # Snapshots carry no clock; they are stamped one after the other, after the summary.
        for i, share in enumerate(step.snapshots):
            ts_ns = end_ns + 20_000 + 12_000 * i
            yield self._event("step.REQUEST_SNAPSHOT", ts_ns, self._snapshot(step, share))

    def _summary(self, step: StepLog, end_ns: int) -> Attributes:
        batch, total = step.composition, self._epoch.blocks_total
        return {
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

    def _snapshot(self, step: StepLog, share: Scheduled) -> Attributes:
        request, tokens, computed_tokens = share
        return {
            "step.id": step.step_id,
            "request.id": request.request_id,
            "request.phase": "DECODE" if request.done_tokens else "PREFILL",
            "request.num_prompt_tokens": request.prompt_tokens,
            "request.num_computed_tokens": computed_tokens,
            "request.num_output_tokens": request.done_tokens,
            "request.num_preemptions": request.num_preemptions,
            "request.scheduled_tokens_this_step": tokens,
            "kv.blocks_allocated_gpu": request.blocks,
            # Full blocks, not hits: hits are the prompt less `effective_prompt_len`.
            "kv.blocks_cached_gpu": (computed_tokens + tokens) // self._options.block_size,
            "request.effective_prompt_len": request.prompt_tokens - request.cached_tokens,
        }


def export(options: SynthOptions, epochs: Iterable[EpochLog], rng: np.random.Generator) -> list[ExportBatch]:
    """Return all export batches of all servers, in the order a collector received them."""
    id_rng, span_rng = rng.spawn(2)
    batches: list[tuple[int, ExportBatch]] = []
    for _, lives in groupby(epochs, key=lambda epoch: epoch.server):
        api: list[GeneratedSpan] = []
        core: list[GeneratedSpan] = []
        for life in lives:
            life_api, life_core = Emitter(options, life, span_rng.spawn(1)[0]).spans()
            api += life_api
            core += life_core
        for resource, spans in zip(_resources(options, id_rng.bytes), (api, core), strict=True):
            batches += _flushes(resource, spans)
    batches.sort(key=lambda sent: sent[0])
    return [batch for _, batch in batches]


def _resources(options: SynthOptions, draw: Callable[[int], bytes]) -> tuple[Attributes, Attributes]:
    """Return the resource of a server's API process and of its engine core."""
    choice = options.instance_ids
    if choice == "auto":
        choice = "none" if options.servers == 1 else "server"
    # Drawn whether used or not, so that another choice does not change other ids.
    api_id, core_id = (str(uuid.UUID(bytes=draw(16), version=4)) for _ in range(2))

    def resource(instance_id: str) -> Attributes:
        return {
            "telemetry.sdk.language": "python",
            "telemetry.sdk.name": "opentelemetry",
            "telemetry.sdk.version": "1.26.0" if choice == "none" else "1.45.2",
            **({} if choice == "none" else {"service.instance.id": instance_id}),
            "service.name": "vllm-synth",
        }

    return resource(api_id), resource(core_id if choice == "process" else api_id)


def _flushes(resource: Attributes, spans: list[GeneratedSpan]) -> Iterator[tuple[int, ExportBatch]]:
    """Yield the exports of one process with their times: the spans that ended since the last export."""
    ordered = sorted(spans, key=lambda span: (span.end_unix_ns, span.span_id))
    for period, group in groupby(ordered, key=lambda span: span.end_unix_ns // _FLUSH_NS):
        ended = tuple(group)
        for first in range(0, len(ended), _MAX_BATCH_SPANS):
            sent_ns = (period + 1) * _FLUSH_NS + first
            yield sent_ns, ExportBatch(resource, ended[first : first + _MAX_BATCH_SPANS])


# -- encodings -------------------------------------------------------------------------------------------

# Attributes are printed into a template made once per kind of event. 64-bit integers are strings in OTLP's JSON.
_SLOTS = {
    str: '{"key":%s,"value":{"stringValue":%%s}}',
    int: '{"key":%s,"value":{"intValue":"%%d"}}',
    float: '{"key":%s,"value":{"doubleValue":%%s}}',
}


_ERROR = trace_pb2.Status.STATUS_CODE_ERROR


def json_lines(batches: Iterable[ExportBatch]) -> bytes:
    """Return one JSON line per export batch, as the Collector's file exporter writes it."""
    return "".join(f"{_batch_json(batch)}\n" for batch in batches).encode()


def framed_protobuf(batches: Iterable[ExportBatch]) -> bytes:
    """Return one message per export batch, each after its length in four bytes, big-endian."""
    frames = []
    for batch in batches:
        message = _batch_message(batch).SerializeToString(deterministic=True)
        frames.append(len(message).to_bytes(4, "big") + message)
    return b"".join(frames)


def _batch_json(batch: ExportBatch) -> str:
    scopes = ",".join(
        f'{{"scope":{{"name":{_text(scope)}}},"spans":[{",".join(map(_span_json, spans))}]}}'
        for scope, spans in batch.by_scope().items()
    )
    resource = f'{{"attributes":{_attributes_json(batch.resource)}}}'
    return f'{{"resourceSpans":[{{"resource":{resource},"scopeSpans":[{scopes}]}}]}}'


def _span_json(span: GeneratedSpan) -> str:
    # The Collector leaves out an event list without events and a count of nothing.
    events = f'"events":[{",".join(map(_event_json, span.events))}],' if span.events else ""
    dropped = f'"droppedEventsCount":{span.dropped_events},' if span.dropped_events else ""
    status = f'"message":{_text(span.error)},"code":{_ERROR}' if span.error else ""
    return (
        f'{{"traceId":"{span.trace_id}","spanId":"{span.span_id}","parentSpanId":"{span.parent_span_id}",'
        f'"flags":{span.flags},"name":{_text(span.name)},"kind":{span.kind.value},'
        f'"startTimeUnixNano":"{span.start_unix_ns}","endTimeUnixNano":"{span.end_unix_ns}",'
        f'"attributes":{_attributes_json(span.attributes)},{events}{dropped}"status":{{{status}}}}}'
    )


def _event_json(event: GeneratedEvent) -> str:
    attributes = _attributes_json(event.attributes)
    return f'{{"timeUnixNano":"{event.unix_ns}","name":{_text(event.name)},"attributes":{attributes}}}'


def _attributes_json(attributes: Attributes) -> str:
    values = attributes.values()
    template = _template(tuple(attributes), tuple(map(type, values)))
    return template % tuple(value if type(value) is int else _scalar(value) for value in values)


@cache  # spans have a few sets of keys
def _template(keys: tuple[str, ...], kinds: tuple[type[SpanValue], ...]) -> str:
    """Return the text of attributes with these keys and kinds, a slot for each value."""
    pairs = zip(keys, kinds, strict=True)
    return "[" + ",".join(_SLOTS[kind] % _text(key).replace("%", "%%") for key, kind in pairs) + "]"


def _scalar(value: str | float) -> str:
    if isinstance(value, str):
        return _text(value)
    # The Collector prints a double with the fewest digits, `0` for 0.0, and no exponent in our range.
    text = repr(value)
    return np.format_float_positional(value, trim="-") if "e" in text else text.removesuffix(".0")


@lru_cache(maxsize=4096)  # names recur in every span; ids would fill the memory
def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _batch_message(batch: ExportBatch) -> trace_pb2.TracesData:
    scopes = [
        trace_pb2.ScopeSpans(
            scope=common_pb2.InstrumentationScope(name=scope), spans=[_span_message(span) for span in spans]
        )
        for scope, spans in batch.by_scope().items()
    ]
    resource = resource_pb2.Resource(attributes=_pairs(batch.resource))
    spans = trace_pb2.ResourceSpans(resource=resource, scope_spans=scopes)
    return trace_pb2.TracesData(resource_spans=[spans])


def _span_message(span: GeneratedSpan) -> trace_pb2.Span:
    code = _ERROR if span.error else trace_pb2.Status.STATUS_CODE_UNSET
    return trace_pb2.Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_span_id),
        flags=span.flags,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.ValueType(span.kind),
        start_time_unix_nano=span.start_unix_ns,
        end_time_unix_nano=span.end_unix_ns,
        attributes=_pairs(span.attributes),
        events=[
            trace_pb2.Span.Event(time_unix_nano=event.unix_ns, name=event.name, attributes=_pairs(event.attributes))
            for event in span.events
        ],
        dropped_events_count=span.dropped_events,
        status=trace_pb2.Status(message=span.error, code=code),  # an empty one is there too, as in JSON
    )


def _pairs(attributes: Attributes) -> list[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: SpanValue) -> common_pb2.AnyValue:
    if isinstance(value, str):
        return common_pb2.AnyValue(string_value=value)
    if isinstance(value, int):
        return common_pb2.AnyValue(int_value=value)
    return common_pb2.AnyValue(double_value=value)
