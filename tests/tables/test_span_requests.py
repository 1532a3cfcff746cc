"""Requests that spans tell of without events: stock vLLM, lifecycle spans, and mixes with journeys."""

from __future__ import annotations

import pytest

from together import together
from tracefit.tables import dialects, schema

BOOT = 1_700_000_000_000_000_000

STOCK = {
    "gen_ai.response.model": "a-model",
    "gen_ai.request.id": "cmpl-7",
    "gen_ai.request.max_tokens": 40,
    "gen_ai.request.temperature": 0.5,
    "gen_ai.usage.prompt_tokens": 120,
    "gen_ai.usage.completion_tokens": 31,
    "gen_ai.latency.time_in_queue": 0.010,
    "gen_ai.latency.time_to_first_token": 0.035,
    "gen_ai.latency.e2e": 0.335,
    "gen_ai.latency.time_in_model_prefill": 0.020,
    "gen_ai.latency.time_in_model_decode": 0.299,
    "gen_ai.latency.time_in_model_inference": 0.319,
}


def _span(trace, scope, name, ids, begin_us, end_us, **attributes):
    trace.span(scope, name, ids, [], attributes=attributes)
    span = trace.records[-1]["scopeSpans"][0]["spans"][0]
    span["startTimeUnixNano"] = str(BOOT + round(begin_us * 1000))
    span["endTimeUnixNano"] = str(BOOT + round(end_us * 1000))
    return trace


def _stock(trace, number=7, *, begin_us=1_000_000, parent=0, scope="vllm.llm_engine", **changes):
    facts = {**STOCK, "gen_ai.request.id": f"cmpl-{number}", **changes}
    return _span(trace, scope, "llm_request", (number, 2 * number, parent), begin_us, begin_us + 335_000, **facts)


def _phases(trace, number, phases, *, parent, scope="vllm.scheduler"):
    for index, (name, begin_us, end_us) in enumerate(phases):
        _span(trace, scope, name, (number, 1000 * number + index, parent), begin_us, end_us)
    return trace


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("scope", ["vllm.llm_engine", "vllm.tracing.otel"])
@together
def test_a_stock_span_is_a_request(traces, scope):
    row = (yield _stock(traces, scope=scope))("requests").row(0, named=True)
    expected = {
        "request_id": "cmpl-7",
        "dialect": "stock",
        "arrival_ns": BOOT + 1_000_000_000,
        "first_token_ns": BOOT + 1_035_000_000,
        "finished_ns": BOOT + 1_335_000_000,
        "prompt_tokens": 120,
        "output_tokens": 31,
        "max_tokens": 40,
        "num_preemptions": None,
        "finish_status": None,
        "state": None,
        "departure_us": None,
    }
    assert {key: row[key] for key in expected} == expected
    durations = {
        # 35 ms to the first token, less 10 in the queue and 20 of prefill.
        "admission_us": 5_000,
        "queue_wait_us": 10_000,
        "time_in_queue_us": 10_000,
        "prefill_us": 20_000,
        "decode_us": 299_000,
        "inference_us": 319_000,
        "ttft_us": 35_000,
        "e2e_us": 335_000,
        "itl_us": 300_000 / 30,
        "tokens_per_s": 31 / 0.335,
        "queue_ratio": 10 / 335,
    }
    assert {key: row[key] for key in durations} == pytest.approx(durations)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("scope", ["vllm.llm_engine", "vllm.tracing.otel"])
@together
def test_lengths_may_have_their_newer_names(traces, scope):
    older = {f"gen_ai.usage.{name}_tokens": None for name in ("prompt", "completion")}
    newer = {"gen_ai.usage.input_tokens": 64, "gen_ai.usage.output_tokens": 9}
    _stock(traces, 1, scope=scope, **older, **newer)
    _stock(traces, 2, scope=scope, **newer)
    rows = (yield traces)("requests").sort("request_id")
    assert rows.select("prompt_tokens", "output_tokens").rows() == [(64, 9), (120, 31)]


@together
def test_stock_phases_are_counted_back_from_first_token(traces):
    row = (yield _stock(traces))("requests").row(0, named=True)
    # 35 ms to the first token, 20 of them prefill, 10 before that in the queue.
    assert row["first_scheduled_ns"] == BOOT + 1_015_000_000
    assert row["queued_ns"] == BOOT + 1_005_000_000


@pytest.mark.slow
@together
def test_an_older_stock_span_has_the_times_in_the_model(traces):
    older = {
        "gen_ai.latency.time_in_scheduler": 0.002,
        "gen_ai.latency.time_in_model_forward": 0.2,
        "gen_ai.latency.time_in_model_execute": 0.3,
        **dict.fromkeys(k for k in STOCK if "time_in_model" in k),
    }
    row = (yield _stock(traces, **older))("requests").row(0, named=True)
    times = ("scheduler_us", "model_forward_us", "model_execute_us", "execute_ratio", "prefill_us")
    assert [row[t] for t in times] == [2000, 200_000, 300_000, pytest.approx(0.3 / 0.335), None]
    assert row["queued_ns"] == row["arrival_ns"], "nothing better is known"


@together
def test_values_that_are_no_numbers_are_unknown(traces):
    row = yield _stock(traces, **{"gen_ai.latency.time_in_queue": "soon", "gen_ai.latency.e2e": True})
    row = row("requests").row(0, named=True)
    assert (row["queue_wait_us"], row["finished_ns"], row["ttft_us"]) == (None, None, pytest.approx(35_000))


LIFE = [
    ("vllm_queue", 1_000, 3_000),
    ("vllm_async_kv_transfer", 3_000, 4_500),
    ("vllm_prefill", 4_500, 10_000),
    ("vllm_decode", 10_000, 20_000),
    ("vllm_queue", 20_000, 24_000),
    ("vllm_prefill", 24_000, 26_000),
    ("vllm_decode", 26_000, 40_000),
]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("scope", ["vllm.scheduler", "vllm.something.new"])
@together
def test_lifecycle_spans_of_one_parent_are_a_request(traces, scope):
    row = (yield _phases(traces, 9, LIFE, parent=99, scope=scope))("requests").row(0, named=True)
    expected = {
        "dialect": "lifecycle",
        "queued_ns": BOOT + 1_000_000,
        "first_scheduled_ns": BOOT + 4_500_000,
        "first_token_ns": BOOT + 10_000_000,
        "finished_ns": BOOT + 40_000_000,
        "last_token_ns": BOOT + 40_000_000,
        "queue_wait_us": 3_500,
        "requeue_wait_us": 4_000,
        "kv_transfer_us": 1_500,
        "prefill_us": 7_500,
        "decode_us": 24_000,
        "engine_us": 39_000,
        "inference_us": 35_500,
        "arrival_ns": None,
        "e2e_us": None,
    }
    assert {key: row[key] for key in expected} == expected


@together
def test_lifecycle_spans_complete_the_stock_span_they_belong_to(traces):
    trace = _stock(traces, 9, begin_us=500)
    rows = (yield _phases(trace, 9, LIFE, parent=18))("requests")
    row = rows.row(0, named=True)
    assert (rows.height, row["dialect"], row["output_tokens"]) == (1, "stock", 31)
    assert row["admission_us"] == 500, "both its ends are known now"
    assert row["queue_wait_us"] == 10_000, "as the server itself counts it"


@together
def test_a_file_of_all_dialects_has_every_request_once(traces):
    trace = traces.request(1, 2_000_000, step=1)
    _stock(trace, 7)
    _phases(trace, 9, LIFE, parent=99)
    table = yield trace
    rows = table("requests").sort("dialect")
    assert rows["dialect"].to_list() == ["journey", "lifecycle", "stock"]
    # One server on one clock: the journey tells that it began at BOOT, so the others are on it, too.
    assert rows["arrival_ns"].to_list() == [2_000_000_000, None, 1_000_000_000]
    assert rows["queued_ns"].to_list() == [2_001_000_000, 1_000_000, 1_005_000_000]
    assert table("runs")["dialects"].item().split(",") == ["vllm.api", "vllm.llm_engine", "vllm.scheduler"]


@together
def test_stock_span_fills_only_gaps_of_a_journey(traces):
    trace = traces.request(1, 2_000_000, step=1, output=5)
    stock = {"gen_ai.latency.time_in_queue": 9.0, "gen_ai.latency.time_in_model_forward": 0.04}
    _span(trace, "vllm.llm_engine", "llm_request", (1, 77, 2), 2_000_000, 2_050_000, **stock)
    rows = (yield trace)("requests")
    row = rows.row(0, named=True)
    assert rows.height == 1
    assert (row["dialect"], row["queue_wait_us"]) == ("journey", 200), "events come first"
    assert row["model_forward_us"] == 40_000, "no event tells of it"


def _without_parents(trace):
    for record in trace.records:
        record["scopeSpans"][0]["spans"][0]["parentSpanId"] = ""
    return trace


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("layers", ["both", "core"])
@pytest.mark.parametrize("same_trace", [True, False])
@together
def test_stock_span_and_its_events_are_one_request(traces, layers, same_trace):
    for number in (1, 2):
        traces.request(number, number * 2_000_000, step=number * 10, output=5)
    if layers == "core":
        traces.records = [r for r in traces.records if r["scopeSpans"][0]["scope"]["name"] != "vllm.api"]
        _without_parents(traces)
    for number in (1, 2):
        name = {"gen_ai.request.id": f"cmpl-{number}-0"}
        facts = {**STOCK, **name, "gen_ai.usage.completion_tokens": 5, "gen_ai.latency.e2e": 0.08}
        ids = (number if same_trace else 100 + number, 77 + number, 0)
        begin_us = number * 2_000_000
        _span(traces, "vllm.tracing.otel", "llm_request", ids, begin_us, begin_us + 80_000, **facts)
    # A request that the events do not have.
    _stock(traces, 9)
    rows = (yield traces)("requests").sort("request_id")
    assert rows["dialect"].to_list() == ["journey", "journey", "stock"]
    assert rows["queue_wait_us"].to_list() == [200, 200, pytest.approx(10_000)], "events come first"
    assert rows["core_request_id"][:2].to_list() == ["cmpl-1-0-00000000", "cmpl-2-0-00000000"]
    if layers == "core":
        assert rows["e2e_us"][:2].to_list() == pytest.approx([80_000] * 2), "no event tells of it"


@pytest.mark.slow
@together
def test_an_id_that_several_requests_have_joins_none(traces):
    for number in (1, 2):
        traces.request(number, number * 2_000_000, step=number * 10, output=5)
    for record in traces.records:
        span = record["scopeSpans"][0]["spans"][0]
        span["attributes"] = [
            {**a, "value": {"stringValue": "mine"}} if a["key"] == "gen_ai.request.id" else a
            for a in span["attributes"]
        ]
    _stock(traces, 9, **{"gen_ai.request.id": "mine"})
    rows = (yield traces)("requests")
    assert rows["dialect"].to_list().count("stock") == 1


def test_every_scope_and_phase_has_a_dialect():
    assert dialects.dialect_of("vllm.api") == "journey"
    assert dialects.dialect_of("vllm.scheduler.step") == "journey"
    assert dialects.dialect_of("vllm.llm_engine") == "stock"
    assert dialects.dialect_of("vllm.scheduler", "vllm_queue") == "lifecycle"
    assert dialects.dialect_of("vllm.somewhere", "vllm_decode") == "lifecycle"
    assert dialects.dialect_of("fastapi") is None
    assert dialects.dialect_of(None) is None


def test_declared_columns_are_in_the_table_they_name():
    own = {"api_prompt_tokens", "api_completion_tokens", "api_max_tokens", "model"}
    for s in dialects.SPELLINGS:
        if s.attribute != dialects.EVENT_NAME:
            assert s.column in {*schema.TABLES[s.table].names, *own}, s


LATENCIES = [key for key in STOCK if "latency" in key]


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, None),
        (-0.3, "requests.prefill_us is out of range"),
        (1e7, "requests.prefill_us is out of range"),
        ("Infinity", "requests.prefill_us is out of range"),
        (50.0, "requests.prefill_us is longer than its span"),
        ("0.3 s", "requests.prefill_us is not a number"),
    ],
)
@together
def test_a_latency_that_cannot_be_is_left_out_alone_and_listed(traces, value, reason):
    sound = _stock(traces, 7)
    table = yield _stock(sound, 8, **{"gen_ai.latency.time_in_model_prefill": value})
    rows = table("requests").sort("request_id")
    assert rows["prefill_us"].to_list() == [pytest.approx(20_000), None]
    others = ["ttft_us", "e2e_us", "decode_us", "queue_wait_us", "output_tokens", "arrival_ns"]
    assert rows.select(others).n_unique() == 1
    assert table("rejects")["reason"].to_list() == [reason] * (reason is not None)
    assert table("runs")["implausible"].item() == (f'{{"{reason}": 1}}' if reason else "{}")


@together
def test_latencies_in_ns_are_recognised_by_span_length(traces):
    agent = {key: round(STOCK[key] * 1e9) for key in LATENCIES}
    # The server was idle: 20 us in the queue, which could be hours as seconds.
    agent["gen_ai.latency.time_in_queue"] = 20_000
    table = yield _stock(_stock(traces, 7), 8, **agent)
    plain, of_agent = table("requests").sort("request_id").iter_rows(named=True)
    times = ["ttft_us", "e2e_us", "prefill_us", "decode_us", "inference_us", "itl_us"]
    assert [of_agent[t] for t in times] == pytest.approx([plain[t] for t in times])
    assert of_agent["queue_wait_us"] == pytest.approx(20)
    assert table("rejects").height == 0
