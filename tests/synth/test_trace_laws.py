"""The emitted spans against what real traces say, law by law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tracefit.synth import AdmissionLaw, LoadPhase, SynthOptions, synth


def _of(journey, kind):
    return next((event for event in journey if event["event.type"] == kind), None)


def test_the_busy_run_has_everything_the_laws_are_about(busy, busy_run):
    kinds = Counter(event["event.type"] for journey in busy.journeys.values() for event in journey)
    assert kinds["PREEMPTED"] > 5
    assert kinds["QUEUED"] == kinds["FINISHED"] == 260
    assert busy_run.truth_steps["waiting"].max() > 20
    assert busy_run.truth_requests["cached_prompt_tokens"].max() == 64
    assert set(busy_run.truth_requests["finish_status"]) == {"stopped", "length", "aborted"}
    chunked = busy_run.truth_steps["prefill_context_tokens"] > 64
    assert chunked.any()


def test_duration_is_the_time_inside_schedule(busy, busy_run):
    for step, truth in zip(busy.steps.values(), busy_run.truth_steps.iter_rows(named=True), strict=True):
        took_ns = step["step.ts_end_ns"] - step["step.ts_start_ns"]
        assert step["step.duration_us"] == took_ns // 1_000
        assert took_ns == pytest.approx(truth["schedule_us"] * 1e3)
    busy_steps = busy_run.truth_steps.filter(busy_run.truth_steps["scheduled_tokens"] > 0)
    assert busy_steps["schedule_us"].max() < 0.15 * busy_steps["cycle_us"].min()
    assert 60 <= busy_steps["schedule_us"].median() <= 400


def test_duration_mode_step_spans_the_cycle(busy_options):
    run = synth(replace(busy_options, requests=20, duration="step", rich_sampling=0.0))
    events = [event for span in run.spans for event in span.events if event.name == "step.BATCH_SUMMARY"]
    summaries = sorted((event.attributes for event in events), key=lambda event: event["step.id"])
    assert [event["step.ts_end_ns"] for event in summaries] == run.truth_steps["end_ns"].to_list()
    assert [event["step.duration_us"] for event in summaries] == [
        int(cycle_us) for cycle_us in run.truth_steps["cycle_us"]
    ]


def test_step_clock_is_the_cycle_while_busy_and_idle_otherwise(boundaries):
    idle = 0
    for step, following in boundaries:
        assert following["step_id"] == step["step_id"] + 1
        assert following["start_ns"] >= step["end_ns"]
        if following["start_ns"] > step["end_ns"]:
            idle += 1
            assert (step["running"], step["waiting"], step["scheduled_tokens"]) == (0, 0, 0)
    assert idle > 10


def test_queued_is_the_first_boundary_after_the_api_work(busy_run):
    steps = busy_run.truth_steps
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    seen = Counter()
    for row in busy_run.truth_requests.iter_rows(named=True):
        # The step that was in progress when the request reached the socket, if there was one.
        index = int(np.searchsorted(starts, row["socket_ns"], side="right")) - 1
        left_ns = ends[index] - row["socket_ns"] if index >= 0 else -1
        late_ns = row["queued_ns"] - max(row["socket_ns"], ends[index] if left_ns > 0 else 0)
        if left_ns > 70_000:
            seen["boundary"] += 1
            assert -70_000 < late_ns <= 0
        elif left_ns <= 0 and late_ns < 80_000:
            seen["idle"] += 1
            assert late_ns > 0
        else:
            seen["between"] += 1  # came after the socket was drained, before the next step began
            continue
        assert row["queued_step"] == (steps["step_id"][index] if index >= 0 else 0)
    assert seen["boundary"] > 100
    assert seen["idle"] > 20
    assert seen["between"] < 6


def test_a_burst_is_queued_before_the_next_step_begins():
    burst = (LoadPhase("burst", 1.0, 1.0),)
    run = synth(SynthOptions(requests=300, rate_per_s=1e6, phases=burst, abort_fraction=0.3))
    starts = dict(run.truth_steps.select("step_id", "start_ns").iter_rows())
    # A few come first and start the engine; the rest lies in the socket when their step ends.
    rows = run.truth_requests.filter(run.truth_requests["queued_step"] == 1)
    assert rows.height > 200
    assert rows["queued_ns"].max() < starts[2]
    assert rows["queued_ns"].n_unique() == rows.height
    ends = run.truth_requests.filter(run.truth_requests["finish_status"] == "aborted")
    assert all(row["finished_ns"] < starts[row["finished_step"] + 1] for row in ends.iter_rows(named=True))


def test_admission_is_api_work(busy_run):
    rows = busy_run.truth_requests
    law = AdmissionLaw()
    ratio = rows["api_work_us"].to_numpy() / (1_300.0 + 0.4 * rows["prompt_tokens"].to_numpy())
    assert np.abs(np.log(ratio)).max() < 5 * law.jitter
    assert np.std(np.log(ratio)) == pytest.approx(law.jitter, rel=0.2)
    work_ns = rows["socket_ns"] - rows["arrival_ns"]
    assert np.allclose(work_ns.to_numpy(), rows["api_work_us"].to_numpy() * 1e3, atol=1)


def test_queued_counter_before_the_first_step_is_zero(busy):
    steps = [_of(journey, "QUEUED")["scheduler.step"] for journey in busy.journeys.values()]
    assert min(steps) == 0
    assert all(_of(journey, "QUEUED")["phase"] == "WAITING" for journey in busy.journeys.values())


def test_scheduled_is_stamped_inside_schedule_of_its_step(busy):
    stamps = [
        (event, busy.steps[event["scheduler.step"]])
        for journey in busy.journeys.values()
        for event in journey
        if event["event.type"] in ("SCHEDULED", "PREEMPTED")
    ]
    for event, step in stamps:
        assert step["step.ts_start_ns"] < event["ts.monotonic_ns"] < step["step.ts_end_ns"]
    waits_us = [
        (event["ts.monotonic_ns"] - step["step.ts_start_ns"]) / 1e3
        for event, step in stamps
        if event["event.type"] == "SCHEDULED"
    ]
    assert min(waits_us) > 80
    assert max(waits_us) <= 700


def test_tokens_are_stamped_right_after_execution(busy, busy_run):
    steps = {row["step_id"]: row for row in busy_run.truth_steps.iter_rows(named=True)}
    for journey in busy.journeys.values():
        for event in journey:
            if event["event.type"] != "FIRST_TOKEN" and event.get("finish.status") not in (
                "stopped",
                "length",
            ):
                continue
            step = steps[event["scheduler.step"]]
            before_end_ns = step["end_ns"] - event["ts.monotonic_ns"]
            assert 0 < before_end_ns < 500_000
            assert event["ts.monotonic_ns"] > step["start_ns"]


def test_seconds_and_nanoseconds_of_an_event_agree(busy):
    for journey in busy.journeys.values():
        stamps = [event["ts.monotonic_ns"] for event in journey]
        assert stamps == sorted(stamps)
        for event in journey:
            assert event["ts.monotonic"] == event["ts.monotonic_ns"] / 1e9


def test_unix_and_monotonic_differ_by_a_constant(busy):
    lags = [
        event.unix_ns - event.attributes["ts.monotonic_ns"]
        for span in busy.core_spans.values()
        for event in span.events
    ]
    lags += [
        event.unix_ns - event.attributes["step.ts_end_ns"]
        for span in busy.step_spans
        for event in span.events
        if event.name == "step.BATCH_SUMMARY"
    ]
    assert max(lags) - min(lags) < 10_000
    assert len(set(lags)) > 100


def test_queue_state_of_the_truth_follows_from_the_journeys(busy, busy_run):
    changes = []
    for core_id, journey in busy.journeys.items():
        prompt = journey[0]["prefill.total_tokens"]
        for event in journey:
            tokens = prompt + event["decode.done_tokens"]
            sign = {"QUEUED": 1, "PREEMPTED": 1, "SCHEDULED": -1}.get(event["event.type"], 0)
            changes.append((event["ts.monotonic_ns"], core_id, event["event.type"], sign, tokens))
    changes.sort()
    truth = {row["core_request_id"]: row for row in busy_run.truth_requests.iter_rows(named=True)}
    waiting = {}
    for _, core_id, kind, sign, tokens in changes:
        if kind == "QUEUED":
            row = truth[core_id]
            assert (row["requests_ahead"], row["tokens_ahead"]) == (len(waiting), sum(waiting.values()))
        if sign > 0:
            waiting[core_id] = tokens
        else:
            waiting.pop(core_id, None)
    assert busy_run.truth_requests["requests_ahead"].max() > 10


def test_preemption_resets_computed_tokens_not_their_peak(busy):
    preempted = {
        core_id: journey
        for core_id, journey in busy.journeys.items()
        if _of(journey, "PREEMPTED") and _of(journey, "PREEMPTED")["phase"] == "DECODE"
    }
    assert preempted
    resumed = 0
    for core_id, journey in preempted.items():
        resume = next((event for event in journey if event.get("schedule.kind") == "RESUME"), None)
        if resume is None:
            continue
        resumed += 1
        assert resume["prefill.done_tokens"] == resume["prefill.total_tokens"]
        assert resume["phase"] == "DECODE"
        row = next(row for row in busy.snapshots[resume["scheduler.step"]] if row["request.id"] == core_id)
        hit = row["request.num_prompt_tokens"] - row["request.effective_prompt_len"]
        assert row["request.num_computed_tokens"] == hit
        assert row["request.phase"] == "DECODE"
    assert resumed
    events = [event for journey in preempted.values() for event in journey]
    assert all(e["num_preemptions"] >= 1 for e in events if e["event.type"] == "PREEMPTED")


def test_a_resumed_request_is_a_decode_request_with_many_tokens(busy):
    resumed = {
        event["scheduler.step"]
        for journey in busy.journeys.values()
        for event in journey
        if event.get("schedule.kind") == "RESUME" and event["phase"] == "DECODE"
    }
    many = [busy.steps[step_id] for step_id in resumed]
    assert any(step["batch.decode_tokens"] > 50 + step["batch.num_decode_reqs"] for step in many)


def test_summary_counts_agree_with_the_snapshots(busy):
    for step_id, step in busy.steps.items():
        rows = busy.snapshots.get(step_id, [])
        assert len(rows) == step["queue.running_depth"]
        for phase, key in (("PREFILL", "prefill"), ("DECODE", "decode")):
            tokens = [
                row["request.scheduled_tokens_this_step"]
                for row in rows
                if row["request.phase"] == phase and row["request.scheduled_tokens_this_step"]
            ]
            assert step[f"batch.num_{key}_reqs"] == len(tokens)
            assert step[f"batch.{key}_tokens"] == sum(tokens)
        assert step["batch.prefill_tokens"] + step["batch.decode_tokens"] == step["batch.scheduled_tokens"]


def test_truth_counts_the_context_the_snapshots_show(busy, busy_run):
    for truth in busy_run.truth_steps.iter_rows(named=True):
        context = Counter()
        for row in busy.snapshots.get(truth["step_id"], []):
            if row["request.scheduled_tokens_this_step"]:
                context[row["request.phase"]] += row["request.num_computed_tokens"]
        assert truth["context_tokens"] == context["DECODE"]
        assert truth["prefill_context_tokens"] == context["PREFILL"]


def test_snapshot_blocks(busy):
    for rows in busy.snapshots.values():
        for row in rows:
            tokens = row["request.num_computed_tokens"] + row["request.scheduled_tokens_this_step"]
            assert row["kv.blocks_cached_gpu"] == tokens // 16
            assert row["kv.blocks_allocated_gpu"] == -(-tokens // 16)


def test_kv_numbers_leave_out_the_null_block(busy):
    for step in busy.steps.values():
        assert step["kv.blocks_total_gpu"] == 300
        assert step["kv.usage_gpu_ratio"] == 1 - step["kv.blocks_free_gpu"] / 300
    assert min(step["kv.blocks_free_gpu"] for step in busy.steps.values()) < 20


def test_num_finished_counts_those_since_the_schedule_before(busy):
    ended = Counter(_of(journey, "FINISHED")["scheduler.step"] for journey in busy.journeys.values())
    for step_id, step in busy.steps.items():
        assert step["batch.num_finished"] == ended[step_id - 1]
    assert max(ended.values()) > 1


def test_num_preempted_counts_those_of_the_step(busy):
    lost = Counter(
        event["scheduler.step"]
        for journey in busy.journeys.values()
        for event in journey
        if event["event.type"] == "PREEMPTED"
    )
    assert all(step["batch.num_preempted"] == lost[step_id] for step_id, step in busy.steps.items())


def test_an_empty_step_follows_when_the_last_request_ended(busy):
    empty = [step_id for step_id, step in busy.steps.items() if not step["batch.scheduled_tokens"]]
    assert len(empty) > 10
    for step_id in empty:
        step = busy.steps[step_id]
        assert (step["queue.running_depth"], step["queue.waiting_depth"]) == (0, 0)
        assert step["batch.num_finished"] >= 1


def test_steps_between_first_and_last_token(busy):
    undisturbed = 0
    for journey in busy.journeys.values():
        end, first = _of(journey, "FINISHED"), _of(journey, "FIRST_TOKEN")
        if end["finish.status"] == "aborted" or end["num_preemptions"]:
            continue
        undisturbed += 1
        assert end["scheduler.step"] - first["scheduler.step"] == end["decode.done_tokens"] - 1
        assert (end["finish.status"] == "length") == (end["decode.done_tokens"] == end["decode.max_tokens"])
    assert undisturbed > 100


def test_api_events_by_route(busy):
    seen = Counter()
    for span_id, events in busy.api.items():
        names = [name for name, _ in events]
        is_chat = busy.api_spans[span_id].attributes["http.route"] == "/v1/chat/completions"
        assert span_id.startswith("chatcmpl-" if is_chat else "cmpl-")
        assert names[0] == "api.ARRIVED"
        assert names[-1] in ("api.DEPARTED", "api.ABORTED")
        if not is_chat:
            assert len(names) == 2
        elif names[-1] == "api.DEPARTED":
            assert names[1:3] == ["api.HANDOFF_TO_CORE", "api.FIRST_RESPONSE_FROM_CORE"]
        stamps = [event["event.ts.monotonic"] for _, event in events]
        assert stamps == sorted(stamps)
        seen[is_chat, names[-1]] += 1
    assert len(seen) == 4


def test_aborts_end_both_spans(busy, busy_run):
    endings = Counter()
    for row in busy_run.truth_requests.iter_rows(named=True):
        end = _of(busy.journeys[row["core_request_id"]], "FINISHED")
        if end["finish.status"] != "aborted":
            continue
        kind = busy.journeys[row["core_request_id"]][-2]["event.type"]
        name, event = busy.api[row["request_id"]][-1]
        span = busy.api_spans[row["request_id"]]
        endings[kind, name] += 1
        assert event["event.ts.monotonic"] < end["ts.monotonic"]
        if name == "api.ABORTED":
            assert event["reason"] == "client_disconnect"
            is_failed = row["is_chat"] or not row["is_streaming"]
            assert span.error == ("Client disconnected" if is_failed else "")
            assert ("error" in event) == is_failed
    kinds = {kind for kind, _ in endings}
    assert {"QUEUED", "SCHEDULED", "FIRST_TOKEN"} <= kinds


def test_every_abort_happens_in_its_stage(busy_run):
    rows = busy_run.truth_requests
    assert rows["abort_stage"].is_null().equals(rows["abort_ns"].is_null())
    after_ms = (rows["abort_ns"] - rows["socket_ns"]) / 1e6
    assert after_ms.filter(rows["abort_stage"] == "waiting").max() < 2.0
    assert (after_ms.filter(rows["abort_stage"] == "prefill") > 0).all()
    decode = rows.filter(rows["abort_stage"] == "decode")
    assert (decode["abort_ns"] > decode["first_token_ns"]).all()
    assert set(rows["abort_stage"].drop_nulls()) == {"waiting", "prefill", "decode"}


def test_a_request_aborted_in_the_queue_was_never_scheduled(busy):
    journeys = [journey for journey in busy.journeys.values() if len(journey) == 2]
    assert journeys
    for queued, end in journeys:
        assert (queued["event.type"], end["finish.status"], end["phase"]) == ("QUEUED", "aborted", "PREFILL")
        assert end["prefill.done_tokens"] == end["decode.done_tokens"] == 0


def test_completion_tokens_are_on_finished_chat_spans_only(busy):
    seen = Counter()
    for request_id, span in busy.api_spans.items():
        attributes = span.attributes
        has_tokens = "gen_ai.usage.completion_tokens" in attributes
        ends = busy.api[request_id][-1][0]
        assert has_tokens == (request_id.startswith("chatcmpl-") and ends == "api.DEPARTED")
        seen[has_tokens] += 1
    assert seen[True] > 5


def test_core_span_is_the_child_of_its_api_span(busy, busy_run):
    for row in busy_run.truth_requests.iter_rows(named=True):
        api, core = busy.api_spans[row["request_id"]], busy.core_spans[row["core_request_id"]]
        assert (core.trace_id, core.parent_span_id) == (api.trace_id, api.span_id)
        assert (api.parent_span_id, len(api.trace_id), len(api.span_id)) == ("", 32, 16)
        middle = "-" if row["is_chat"] else "-0-"
        token = row["core_request_id"].removeprefix(row["request_id"] + middle)
        assert len(token) == 8
        assert int(token, 16) >= 0
    assert len({span.span_id for span in busy_run.spans}) == len(busy_run.spans)
    assert all(span.parent_span_id == "" for span in busy.step_spans)


def test_journey_sampling_drops_both_spans_of_a_request(busy_options, busy_run, read):
    run = synth(replace(busy_options, journey_sampling=0.4, rich_sampling=0.0))
    trace = read(run.spans)
    parents = {span.parent_span_id for span in trace.core_spans.values()}
    assert parents == {span.span_id for span in trace.api_spans.values()}
    assert 0.3 < len(trace.journeys) / 260 < 0.5
    assert run.truth_requests.equals(busy_run.truth_requests)


@pytest.mark.slow
def test_step_sampling_shows_a_part_of_the_same_run(busy_options, read):
    options = replace(busy_options, hiccup_rate=0.05)
    whole = synth(replace(options, rich_sampling=0.0))
    run = synth(replace(options, step_sampling=0.1, rich_sampling=0.5))
    trace = read(run.spans)
    sampled = run.truth_steps.filter(run.truth_steps["is_sampled"])
    assert run.truth_steps.drop("is_sampled").equals(whole.truth_steps.drop("is_sampled"))
    assert sorted(trace.steps) == sampled["step_id"].to_list()
    assert 0.06 < sampled.height / run.truth_steps.height < 0.14
    filled = {step_id for step_id, step in trace.steps.items() if step["queue.running_depth"]}
    assert set(trace.snapshots) < filled
    assert 0.3 < len(trace.snapshots) / len(filled) < 0.7


@pytest.mark.slow
def test_the_newest_events_of_a_span_survive_the_limit(busy_options, busy, read):
    run = synth(replace(busy_options, span_event_limit=128))
    trace = read(run.spans)
    full = {span.span_id: span for span in busy.step_spans}
    dropped = 0
    for span in trace.step_spans:
        whole = full[span.span_id]
        assert len(span.events) <= 128
        assert span.dropped_events == len(whole.events) - len(span.events)
        assert span.events == whole.events[len(whole.events) - len(span.events) :]
        dropped += span.dropped_events
    assert dropped > 1_000
    assert all(span.dropped_events == 0 for span in trace.core_spans.values())


def test_step_spans_cover_the_steps_in_turn(busy, busy_run):
    expected = 1
    for number, span in enumerate(busy.step_spans, 1):
        attributes = span.attributes
        assert span.name == f"scheduler_steps_{number}"
        assert attributes["scheduler.step_range_start"] == expected
        assert attributes["scheduler.closure_interval"] == 100
        expected = attributes["scheduler.step_range_end"] + 1
        steps = {event.attributes["step.id"] for event in span.events}
        assert steps == set(range(attributes["scheduler.step_range_start"], expected))
    assert expected == busy_run.truth_steps.height + 1
    assert all(span.attributes["scheduler.step_range_end"] % 100 == 0 for span in busy.step_spans[:-1])


def test_a_step_span_without_an_event_stays_open(busy_options, read):
    run = synth(replace(busy_options, step_sampling=0.01, steps_per_span=20))
    ranges = [
        (attributes["scheduler.step_range_start"], attributes["scheduler.step_range_end"])
        for attributes in (span.attributes for span in read(run.spans).step_spans)
    ]
    assert any(last - first + 1 > 20 for first, last in ranges)
    assert all(first % 20 == 1 for first, _ in ranges)


def test_spans_leave_when_they_ended(busy_run):
    for batch in busy_run.batches:
        ends = [span.end_unix_ns for span in batch.spans]
        assert ends == sorted(ends)
        assert all(span.start_unix_ns < span.end_unix_ns for span in batch.spans)
        assert {span.scope for span in batch.spans} <= {"vllm.api"} or all(
            span.scope.startswith("vllm.scheduler") for span in batch.spans
        )
    assert len(busy_run.batches) > 3


def test_departure_follows_the_batch_of_the_finishing_step(busy, busy_run):
    rows = [row for row in busy_run.truth_requests.iter_rows(named=True) if row["abort_ns"] is None]
    for row in rows:
        step = busy.steps[row["finished_step"]]
        assert row["batch_reqs"] == step["batch.num_prefill_reqs"] + step["batch.num_decode_reqs"]
    x = np.array([[1, row["batch_reqs"], row["finishing_reqs"]] for row in rows], dtype=float)
    y = np.array([(row["departed_ns"] - row["finished_ns"]) / 1e3 for row in rows])
    base, per_batch, per_finishing = np.linalg.lstsq(x, y, rcond=None)[0]
    assert base == pytest.approx(700.0, abs=90)
    assert per_batch == pytest.approx(120.0, abs=6)
    assert per_finishing == pytest.approx(200.0, abs=60)
