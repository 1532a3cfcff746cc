"""Every event and key of the specification, with the type it has on the wire; what is not in it is on the plugin's
page."""

from __future__ import annotations

from plugin.fake_vllm import Request, engine
from plugin.test_middleware import answers
from plugin.test_scheduler import load, name

JOURNEY = {
    "event.type": str,
    "ts.monotonic": float,
    "ts.monotonic_ns": int,
    "scheduler.step": int,
    "phase": str,
    "prefill.done_tokens": int,
    "prefill.total_tokens": int,
    "decode.done_tokens": int,
    "decode.max_tokens": int,
    "num_preemptions": int,
}
SUMMARY = {
    "step.id": int,
    "step.ts_start_ns": int,
    "step.ts_end_ns": int,
    "step.duration_us": int,
    "queue.running_depth": int,
    "queue.waiting_depth": int,
    "batch.num_prefill_reqs": int,
    "batch.num_decode_reqs": int,
    "batch.scheduled_tokens": int,
    "batch.prefill_tokens": int,
    "batch.decode_tokens": int,
    "batch.num_finished": int,
    "batch.num_preempted": int,
    "kv.usage_gpu_ratio": float,
    "kv.blocks_total_gpu": int,
    "kv.blocks_free_gpu": int,
}
MORE = {
    "batch.prefill_context_tokens": int,
    "batch.decode_context_tokens": int,
    "batch.prefix_hit_tokens": int,
}
SNAPSHOT = {
    "step.id": int,
    "request.id": str,
    "request.phase": str,
    "request.num_prompt_tokens": int,
    "request.num_computed_tokens": int,
    "request.num_output_tokens": int,
    "request.num_preemptions": int,
    "request.scheduled_tokens_this_step": int,
    "request.effective_prompt_len": int,
    "kv.blocks_allocated_gpu": int,
    "kv.blocks_cached_gpu": int,
}


def types(attributes):
    return {key: type(value) for key, value in attributes.items()}


def test_the_engines_spans_have_every_event_and_key(traced, built, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE", "1")
    scheduler, recorder = traced(blocks=12)
    arrivals = load()
    arrivals.setdefault(1, []).append(Request(name(99), 20, 3, hits=16))
    engine(scheduler, arrivals, aborts={20: [name(3)]})
    found = built(recorder.records)
    events = [event for span in found.journeys.values() for event in span.events]
    more = {"journey.SCHEDULED": {"schedule.kind": str}, "journey.FINISHED": {"finish.status": str}}
    for event in events:
        assert types(event.attributes) == JOURNEY | more.get(event.name, {})
        assert event.name == f"journey.{event.attributes['event.type']}"
    names = {event.attributes["event.type"] for event in events}
    assert names == {"QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED"}
    assert {event.attributes["phase"] for event in events} == {"WAITING", "PREFILL", "DECODE"}
    for span in found.journeys.values():
        assert (span.scope, span.name) == ("vllm.scheduler", "llm_core")
    assert all(types(summary) == SUMMARY | MORE for summary in found.summaries)
    assert all(types(snapshot) == SNAPSHOT for snapshot in found.snapshots)
    assert {snapshot["request.phase"] for snapshot in found.snapshots} == {"PREFILL", "DECODE"}
    assert {span.name for span in found.steps} == {f"scheduler_steps_{n}" for n in range(1, len(found.steps) + 1)}


def test_the_api_servers_span_has_its_events(serve):
    kinds = {}
    for is_whole in (True, False):
        _, (span,) = serve(answers(is_whole=is_whole))
        assert (span.name, span.kind.name, types(span.attributes)) == (
            "llm_request",
            "SERVER",
            {"gen_ai.request.id": str, "http.route": str},
        )
        kinds |= {event.name: types(event.attributes) for event in span.events}
    at = {"event.ts.monotonic": float}
    assert kinds == {"api.ARRIVED": at, "api.DEPARTED": at, "api.ABORTED": at | {"reason": str}}
