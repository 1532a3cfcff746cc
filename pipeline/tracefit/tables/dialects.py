"""How traces spell things: scopes, events and attribute keys to table columns, as data.

The instrumented server writes dotted keys (`prefill.done_tokens`); written specifications also spell them
with underscores, and name API events without a prefix. Another dialect is another entry, not another branch.
"""

from __future__ import annotations

from dataclasses import dataclass

API_SCOPE = "vllm.api"
CORE_SCOPE = "vllm.scheduler"
STEP_SCOPE = "vllm.scheduler.step"
VLLM_SCOPES = (API_SCOPE, CORE_SCOPE, STEP_SCOPE)

STEP_EVENT = "step.BATCH_SUMMARY"
SNAPSHOT_EVENT = "step.REQUEST_SNAPSHOT"


@dataclass(frozen=True, slots=True)
class JourneyEvent:
    """One kind of journey event: its name in the tables, its layer, and how traces spell it."""

    event: str
    layer: str
    spellings: tuple[str, ...]


_API = ("ARRIVED", "HANDOFF_TO_CORE", "FIRST_RESPONSE_FROM_CORE", "DEPARTED", "ABORTED")
_CORE = ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")
_MORE = {"FIRST_RESPONSE_FROM_CORE": ("FIRST_RESPONSE", "api.FIRST_RESPONSE")}

JOURNEY_EVENTS: tuple[JourneyEvent, ...] = (
    *(JourneyEvent(e, "api", (f"api.{e}", e, *_MORE.get(e, ()))) for e in _API),
    *(JourneyEvent(e, "core", (f"journey.{e}", e)) for e in _CORE),
)

LAYER_SCOPES = {"api": API_SCOPE, "core": CORE_SCOPE}

JOURNEY_KEYS: dict[str, tuple[str, ...]] = {
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
"""Column to the attribute keys it is read from, first present wins."""

TS_NS_KEYS = ("ts.monotonic_ns", "ts_monotonic_ns")
TS_S_KEYS = ("ts.monotonic", "event.ts.monotonic", "ts_monotonic")

STEP_KEYS: dict[str, tuple[str, ...]] = {
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
    "num_finished": ("batch.num_finished",),
    "num_preempted": ("batch.num_preempted",),
    "kv_usage_ratio": ("kv.usage_gpu_ratio",),
    "kv_blocks_total": ("kv.blocks_total_gpu",),
    "kv_blocks_free": ("kv.blocks_free_gpu",),
}

SNAPSHOT_KEYS: dict[str, tuple[str, ...]] = {
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

SPAN_ATTRIBUTES = (
    "gen_ai.request.choice.count",
    "gen_ai.request.frequency_penalty",
    "gen_ai.request.id",
    "gen_ai.request.max_tokens",
    "gen_ai.request.model",
    "gen_ai.request.n",
    "gen_ai.request.presence_penalty",
    "gen_ai.request.seed",
    "gen_ai.request.temperature",
    "gen_ai.request.top_k",
    "gen_ai.request.top_p",
    "gen_ai.response.id",
    "gen_ai.response.model",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.prompt_tokens",
    "http.request.method",
    "http.response.status_code",
    "http.route",
    "http.status_code",
    "scheduler.closure_interval",
    "scheduler.span_sequence",
    "scheduler.step_range_end",
    "scheduler.step_range_start",
)
"""Span attributes that are kept: ids, counts, routes, the model, sampling parameters. Nothing a user wrote."""
