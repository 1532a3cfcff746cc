"""The spellings of traces as one declared table: from (scope, span, event, attribute) to a column.

There are five dialects. `journey` is the instrumented server, with dotted keys (`prefill.done_tokens`); written
specifications also spell them with underscores, and API events without a prefix. `stock` is an unmodified vLLM: one
`llm_request` span per request, with its times as attributes in seconds. `lifecycle` is a proposal for upstream: a
span per phase of a request, whose beginning and end are the times. `sglang` is another engine: a span per request,
and below it spans of its stages in each thread that works on it. `client` are the logs of load generators. A new
dialect needs rows here and no change elsewhere: every other module derives its dialects from these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Iterable

RecordTable = Literal["journey_events", "steps", "request_snapshots", "requests"]
Take = Literal["value", "start", "end", "duration", "later_durations"]
"""How to read a value: from an attribute, or from the matching spans of a request: the start of the first, the end of
the last, the sum of their durations, or that sum without the first."""

EVENT_NAME = ""
"""Instead of an attribute: the row names the event itself in the tables."""


class Spelling(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        dialect: The dialect that uses the spelling.
        scope: Instrumentation scope of the span; None for any that begins with `vllm`.
        span: Name of the span; None for any of the scope.
        event: Event of the span; None for the span itself.
        attribute: Attribute key; `EVENT_NAME` for the event as such, None for the span's own times.
        table: Table the value goes to.
        column: Column it goes to, or the event's name in the tables. In `requests`, the API's token counts
            are `api_prompt_tokens`, `api_completion_tokens` and `api_max_tokens`: the table's own columns
            follow from these.
        take: How the value is read.
        factor: Multiplier of the value.
    """

    dialect: str
    scope: str | None
    span: str | None
    event: str | None
    attribute: str | None
    table: RecordTable
    column: str
    take: Take = "value"
    factor: float = 1.0


_API_SCOPE = "vllm.api"
_CORE_SCOPE = "vllm.scheduler"
_STEP_SCOPE = "vllm.scheduler.step"

FRONT_SPAN = "llm_request"
"""Name of a request's span in the process in front of the engine core: the API server, or stock vLLM."""

STEP_EVENT = "step.BATCH_SUMMARY"
SNAPSHOT_EVENT = "step.REQUEST_SNAPSHOT"

_JOURNEY_KEYS: dict[str, tuple[str, ...]] = {
    "step_id": ("scheduler.step", "scheduler_step"),
    "phase": ("phase",),
    "prefill_done_tokens": ("prefill.done_tokens", "prefill_done_tokens"),
    "prefill_total_tokens": ("prefill.total_tokens", "prefill_total_tokens"),
    "decode_done_tokens": ("decode.done_tokens", "decode_done_tokens"),
    "decode_max_tokens": ("decode.max_tokens", "decode_max_tokens"),
    "num_preemptions": ("num_preemptions",),
    "schedule_kind": ("schedule.kind", "schedule_kind"),
    "finish_status": ("finish.status", "finish_status"),
    "reason": ("reason",),
}

_STEP_KEYS: dict[str, tuple[str, ...]] = {
    "step_id": ("step.id",),
    "ts_start_ns": ("step.ts_start_ns",),
    "ts_end_ns": ("step.ts_end_ns",),
    "duration_us": ("step.duration_us",),
    "running_depth": ("queue.running_depth",),
    "waiting_depth": ("queue.waiting_depth",),
    "num_prefill_reqs": ("batch.num_prefill_reqs",),
    "num_decode_reqs": ("batch.num_decode_reqs",),
    "scheduled_tokens": ("batch.scheduled_tokens",),
    "prefill_tokens": ("batch.prefill_tokens",),
    "decode_tokens": ("batch.decode_tokens",),
    # Written only by the plugin tracefit-vllm.
    "context_tokens": ("batch.decode_context_tokens",),
    "prefill_context_tokens": ("batch.prefill_context_tokens",),
    "num_finished": ("batch.num_finished",),
    "num_preempted": ("batch.num_preempted",),
    "kv_usage_ratio": ("kv.usage_gpu_ratio",),
    "kv_blocks_total": ("kv.blocks_total_gpu",),
    "kv_blocks_free": ("kv.blocks_free_gpu",),
}

_SNAPSHOT_KEYS: dict[str, tuple[str, ...]] = {
    "step_id": ("step.id",),
    "request_id": ("request.id",),
    "phase": ("request.phase",),
    "num_prompt_tokens": ("request.num_prompt_tokens",),
    "num_computed_tokens": ("request.num_computed_tokens",),
    "num_output_tokens": ("request.num_output_tokens",),
    "num_preemptions": ("request.num_preemptions",),
    "scheduled_tokens": ("request.scheduled_tokens_this_step",),
    "kv_blocks_allocated": ("kv.blocks_allocated_gpu",),
    "kv_blocks_cached": ("kv.blocks_cached_gpu",),
    "effective_prompt_len": ("request.effective_prompt_len",),
}

_REQUEST_KEYS = {
    "request_id": "gen_ai.request.id",
    "route": "http.route",
    "api_prompt_tokens": "gen_ai.usage.prompt_tokens",
    "api_completion_tokens": "gen_ai.usage.completion_tokens",
    "api_max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.response.model",
}

_REQUESTED = {"model": "gen_ai.request.model"}
"""The model that the client asked for, if the span does not say which one answered."""

_RENAMED_LENGTHS = {
    "api_prompt_tokens": "gen_ai.usage.input_tokens",
    "api_completion_tokens": "gen_ai.usage.output_tokens",
}
"""Newer names of lengths in OpenTelemetry's conventions; vLLM's own count if a span has both."""

_LATENCY_KEYS = {
    "queue_wait_us": "gen_ai.latency.time_in_queue",
    "time_in_queue_us": "gen_ai.latency.time_in_queue",
    "ttft_us": "gen_ai.latency.time_to_first_token",
    "e2e_us": "gen_ai.latency.e2e",
    "prefill_us": "gen_ai.latency.time_in_model_prefill",
    "decode_us": "gen_ai.latency.time_in_model_decode",
    "inference_us": "gen_ai.latency.time_in_model_inference",
    "scheduler_us": "gen_ai.latency.time_in_scheduler",
    "model_forward_us": "gen_ai.latency.time_in_model_forward",
    "model_execute_us": "gen_ai.latency.time_in_model_execute",
}
"""Column to its attribute, in seconds. Stock vLLM's time in the queue begins in the queue of the engine core."""

_API_EVENTS: dict[str, tuple[str, ...]] = {
    "ARRIVED": ("api.ARRIVED", "ARRIVED"),
    "HANDOFF_TO_CORE": ("api.HANDOFF_TO_CORE", "HANDOFF_TO_CORE"),
    "FIRST_RESPONSE_FROM_CORE": (
        "api.FIRST_RESPONSE_FROM_CORE",
        "FIRST_RESPONSE_FROM_CORE",
        "FIRST_RESPONSE",
        "api.FIRST_RESPONSE",
    ),
    "DEPARTED": ("api.DEPARTED", "DEPARTED"),
    "ABORTED": ("api.ABORTED", "ABORTED"),
}
_CORE_EVENT_NAMES: dict[str, tuple[str, ...]] = {
    e: (f"journey.{e}", e) for e in ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")
}

_ANY_EVENT = "*"
_NS_PER_S = 1e9
_CLOCK_KEYS = {
    1.0: ("ts.monotonic_ns", "ts_monotonic_ns"),
    _NS_PER_S: ("ts.monotonic", "event.ts.monotonic", "ts_monotonic"),
}
"""Spellings of a journey event's time, by the factor to nanoseconds."""


JOURNEY = "journey"
"""Dialect of requests whose events were traced."""
STOCK = "stock"
"""Dialect of requests that an unmodified server describes, with one span each."""
LOG_SCOPE = "request log"
"""Scope of the requests of a log with the same times, which no tracer wrote."""


def _journey(scope: str, event: str, table: RecordTable, keys: dict[str, tuple[str, ...]]) -> list[Spelling]:
    return [
        Spelling(JOURNEY, scope, None, event, key, table, column)
        for column, spellings in keys.items()
        for key in spellings
    ]


def _journeys(scope: str, events: dict[str, tuple[str, ...]]) -> list[Spelling]:
    """Return the rows of a layer: the names of its events, their attributes, and their time."""
    return [
        *(
            Spelling(JOURNEY, scope, None, spelled, EVENT_NAME, "journey_events", event)
            for event, spellings in events.items()
            for spelled in spellings
        ),
        *_journey(scope, _ANY_EVENT, "journey_events", _JOURNEY_KEYS),
        *(
            Spelling(JOURNEY, scope, None, _ANY_EVENT, key, "journey_events", "ts_ns", factor=factor)
            for factor, keys in _CLOCK_KEYS.items()
            for key in keys
        ),
    ]


def _attributes(
    dialect: str, scope: str, span: str | None, keys: dict[str, str], factor: float = 1.0
) -> list[Spelling]:
    """Return the rows of attributes of a request's span, from their columns."""
    return [
        Spelling(dialect, scope, span, None, key, "requests", column, factor=factor) for column, key in keys.items()
    ]


def _times(dialect: str, scope: str | None, span: str, column: str, take: Take) -> Spelling:
    """Return the row of a column that follows from the times of spans."""
    return Spelling(dialect, scope, span, None, None, "requests", column, take)


def _stock(scope: str) -> list[Spelling]:
    return [
        _times(STOCK, scope, FRONT_SPAN, "arrival_ns", "start"),
        *_attributes(STOCK, scope, FRONT_SPAN, _REQUEST_KEYS),
        *_attributes(STOCK, scope, FRONT_SPAN, _RENAMED_LENGTHS | _REQUESTED),
        *_attributes(STOCK, scope, FRONT_SPAN, _LATENCY_KEYS, 1e6),
    ]


CLIENT = "client"
"""Dialect of requests that a load generator describes."""
CLIENT_SCOPE = "load generator"
NOT_SENT_S = 2.0**32
"""Arrival, in seconds, of the requests in a log of latencies only; another file has their arrivals."""
_CLIENT_FACTS = {name: _REQUEST_KEYS[name] for name in ("request_id", "api_prompt_tokens", "api_completion_tokens")}
_CLIENT_LATENCIES = {f"client_{name}_us": f"client.latency.{name}" for name in ("ttft", "itl", "e2e")}
CLIENT_KEYS = _CLIENT_FACTS | _CLIENT_LATENCIES
"""Column to attribute; latencies are in seconds."""
POINT_SCOPE, POINT_KEY = "summary of a load generator", "point"
"""Scope of the spans that stand for points of a benchmark, and their attribute: a row of `points` as JSON."""


def _phase(span: str, column: str, take: Take) -> Spelling:
    return _times("lifecycle", None, span, column, take)


SGLANG_DIALECT = "sglang"
"""Dialect of SGLang, whose stages are spans below those of threads (`sglang.srt.observability.req_time_stats`)."""
SGLANG_SCOPE = "sglang server"

THREAD_KEYS = ("rid", "thread_label", "tp_rank", "pp_rank", "dp_rank")
"""Attributes that distinguish SGLang's spans of requests (`rid`) and of threads (the others) from those of stages."""

_SGLANG_REQUEST = {
    "request_id": "rid",
    **{column: key for column, key in _REQUEST_KEYS.items() if column.startswith("api_") or column == "model"},
    "cached_prompt_tokens": "gen_ai.usage.cached_tokens",
}
# The other latencies of the span begin or end in the front end; those of the engine come from stages.
_SGLANG_LATENCIES = {column: _LATENCY_KEYS[column] for column in ("ttft_us", "e2e_us")}
_SGLANG_STAGES: tuple[tuple[str, Take, tuple[str, ...]], ...] = (
    ("arrival_ns", "start", ("tokenize",)),
    # A decode server has no stage for the prompt; on other servers that stage comes first.
    ("queued_ns", "start", ("prefill_waiting", "decode_waiting")),
    ("queue_wait_us", "duration", ("prefill_waiting", "decode_waiting")),
    ("first_scheduled_ns", "start", ("prefill_forward",)),
    ("first_token_ns", "end", ("prefill_forward",)),
    ("prefill_us", "duration", ("prefill_forward",)),
    # A request of one token has no decode, and only level 3 traces steps.
    ("last_token_ns", "end", ("decode_loop", "decode_forward", "prefill_forward")),
    ("finished_ns", "end", ("decode_forward", "prefill_forward")),
    ("kv_transfer_us", "duration", ("prefill_transfer_kv_cache", "decode_transferred")),
)


SPELLINGS: tuple[Spelling, ...] = (
    *_journeys(_API_SCOPE, _API_EVENTS),
    *_journeys(_CORE_SCOPE, _CORE_EVENT_NAMES),
    *_journey(_STEP_SCOPE, STEP_EVENT, "steps", _STEP_KEYS),
    *_journey(_STEP_SCOPE, SNAPSHOT_EVENT, "request_snapshots", _SNAPSHOT_KEYS),
    *_attributes(JOURNEY, _API_SCOPE, FRONT_SPAN, _REQUEST_KEYS),
    *_attributes(JOURNEY, _API_SCOPE, FRONT_SPAN, _RENAMED_LENGTHS | _REQUESTED),
    Spelling(JOURNEY, _CORE_SCOPE, "llm_core", None, "gen_ai.request.id", "requests", "request_id"),
    *_stock("vllm.llm_engine"),
    # Newer servers trace from a separate module.
    *_stock("vllm.tracing.otel"),
    *_stock(LOG_SCOPE),
    Spelling("lifecycle", None, "vllm_queue", None, "gen_ai.request.id", "requests", "request_id"),
    _phase("vllm_queue", "queued_ns", "start"),
    _phase("vllm_queue", "requeue_wait_us", "later_durations"),
    _phase("vllm_async_kv_transfer", "kv_transfer_us", "duration"),
    _phase("vllm_prefill", "first_scheduled_ns", "start"),
    _phase("vllm_decode", "first_token_ns", "start"),
    # A request of one token has no decode; after a preemption it has several prefills.
    _phase("vllm_prefill", "first_token_ns", "end"),
    _phase("vllm_decode", "finished_ns", "end"),
    _phase("vllm_decode", "last_token_ns", "end"),
    _phase("vllm_decode", "decode_us", "duration"),
    _phase("vllm_prefill", "prefill_us", "duration"),
    *_attributes(SGLANG_DIALECT, SGLANG_SCOPE, None, _SGLANG_REQUEST),
    *_attributes(SGLANG_DIALECT, SGLANG_SCOPE, None, _RENAMED_LENGTHS | _REQUESTED),
    *_attributes(SGLANG_DIALECT, SGLANG_SCOPE, None, _SGLANG_LATENCIES, 1e6),
    *(
        _times(SGLANG_DIALECT, SGLANG_SCOPE, span, column, take)
        for column, take, spans in _SGLANG_STAGES
        for span in spans
    ),
    _times(CLIENT, CLIENT_SCOPE, FRONT_SPAN, "arrival_ns", "start"),
    *_attributes(CLIENT, CLIENT_SCOPE, FRONT_SPAN, _CLIENT_FACTS),
    *_attributes(CLIENT, CLIENT_SCOPE, FRONT_SPAN, _CLIENT_LATENCIES, 1e6),
)
"""Everything that is read from a trace. If several attributes give one column, the first one present counts."""


def _distinct(values: Iterable[str | None]) -> tuple[str, ...]:
    """Return each text once, in the order of first occurrence."""
    return tuple(dict.fromkeys(filter(None, values)))


READ_SCOPES = (*_distinct(s.scope for s in SPELLINGS), POINT_SCOPE)
PHASE_SPANS = _distinct(s.span for s in SPELLINGS if s.scope is None)
"""Spans that are identified by name, in any scope that begins with `vllm`."""

DIALECTS = _distinct(s.dialect for s in SPELLINGS)
_WITH_EVENTS = _distinct(s.dialect for s in SPELLINGS if s.event)
WITHOUT_EVENTS = tuple(name for name in DIALECTS if name not in _WITH_EVENTS)
"""Dialects whose spans describe requests without events."""
EVENT_SCOPES = _distinct(s.scope for s in SPELLINGS if s.dialect in _WITH_EVENTS)
"""Scopes of the instrumented server."""

REQUEST_RULES = tuple(s for s in SPELLINGS if s.table == "requests" and s.dialect in WITHOUT_EVENTS)
"""How requests are read from such spans."""

FRONT_SCOPES = (*_distinct(s.scope for s in SPELLINGS if s.span == FRONT_SPAN), POINT_SCOPE)
"""Scopes of the processes in front of the engine core: the API's, and the client's."""


def is_known() -> pl.Expr:
    """Return whether a span is read, from its `scope` and `name`."""
    phase = pl.col("name").is_in(PHASE_SPANS) & pl.col("scope").str.starts_with("vllm")
    return pl.col("scope").is_in(READ_SCOPES).fill_null(value=False) | phase.fill_null(value=False)


def dialect_of(scope: str | None, span: str | None = None) -> str | None:
    """Return the dialect of a scope, or None if the scope is not one that is read.

    Args:
        scope: Instrumentation scope.
        span: Name of the span, for dialects that share a scope.
    """
    if scope == POINT_SCOPE:
        return POINT_KEY
    if span in PHASE_SPANS and (scope or "").startswith("vllm"):
        return next(s.dialect for s in SPELLINGS if s.scope is None and s.span == span)
    return next((s.dialect for s in SPELLINGS if s.scope == scope and scope), None)


def _by_column(spellings: Iterable[Spelling]) -> dict[str, tuple[str, ...]]:
    """Return the attributes that each column is read from; the first present one counts."""
    rows = [s for s in spellings if s.attribute]
    return {
        column: _distinct(s.attribute for s in rows if s.column == column)
        for column in _distinct(s.column for s in rows)
    }


_OF_EVENTS = [s for s in SPELLINGS if s.event and s.column != "ts_ns"]
_SPAN_SPELLINGS = [s for s in SPELLINGS if s.table == "requests" and s.attribute]

JOURNEY_KEYS, STEP_KEYS, SNAPSHOT_KEYS = (
    _by_column(s for s in _OF_EVENTS if s.table == table) for table in ("journey_events", "steps", "request_snapshots")
)
REQUEST_ATTRIBUTES = _by_column(s for s in _SPAN_SPELLINGS if s.dialect in _WITH_EVENTS)
"""Column of an API span's row to the attributes that may hold it."""

MODEL_KEYS = _by_column(_SPAN_SPELLINGS)["model"]
"""Attributes of a request's span that name the model."""

TS_NS_KEYS, TS_S_KEYS = (
    _distinct(s.attribute for s in SPELLINGS if s.column == "ts_ns" and s.factor == factor) for factor in _CLOCK_KEYS
)
"""Attributes of a journey event's time: in nanoseconds, and in seconds."""


class JourneyEvent(msgspec.Struct, frozen=True):
    """One kind of journey event in one scope: its name in the tables, its layer, and its spellings in traces."""

    event: str
    layer: str
    scope: str
    spellings: tuple[str, ...]


_BY_ATTRIBUTE = [s for s in SPELLINGS if s.attribute == EVENT_NAME and s.scope]
EVENT_KINDS = tuple(
    JourneyEvent(
        event,
        "api" if event in _API_EVENTS else "core",
        scope,
        _distinct(s.event for s in _BY_ATTRIBUTE if (s.column, s.scope) == (event, scope)),
    )
    for event, scope in dict.fromkeys((s.column, s.scope or "") for s in _BY_ATTRIBUTE)
)
CORE_ID_SUFFIX = r"-[0-9a-f]{8}$"
"""Suffix that the engine core adds to the client-facing id."""

API_SCOPES = _distinct(kind.scope for kind in EVENT_KINDS if kind.layer == "api")
CORE_SCOPES = _distinct(kind.scope for kind in EVENT_KINDS if kind.layer == "core")
"""Scopes of the spans whose events are the journeys of the API process, and of the engine core."""

SPAN_KEYS = tuple(sorted({*THREAD_KEYS, "decode_ct", *(s.attribute or "" for s in _SPAN_SPELLINGS)}))
"""Attributes of spans that become columns of their rows."""

SPAN_ATTRIBUTES = tuple(
    sorted(
        {
            *SPAN_KEYS,
            "gen_ai.request.choice.count",
            "gen_ai.request.frequency_penalty",
            "gen_ai.request.n",
            "gen_ai.request.presence_penalty",
            "gen_ai.request.seed",
            "gen_ai.request.temperature",
            "gen_ai.request.top_k",
            "gen_ai.request.top_p",
            "gen_ai.response.id",
            "http.request.method",
            "http.response.status_code",
            "http.status_code",
            "scheduler.closure_interval",
            "scheduler.span_sequence",
            "scheduler.step_range_end",
            "scheduler.step_range_start",
        }
    )
)
"""Span attributes that are kept: ids, counts, times, routes, the model, sampling parameters. Text of users is never
kept."""

REASONS = (
    "client_disconnect",
    "client_cancelled",
    "cancelled",
    "aborted",
    "timeout",
    "error",
    "generation_error",
    "validation_error",
    "internal_error",
    "exception",
    "shutdown",
)
"""Reasons for the end of a request that are kept; error messages may quote a prompt and are not kept."""
