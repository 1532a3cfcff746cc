"""Records of a traced scheduler, and their spans: equal to what the scheduler itself counted."""

from __future__ import annotations

import logging
import random

import pytest

from plugin.fake_vllm import FakeScheduler, Request, engine
from tracefit_vllm.records import OUTPUT, QUEUED, STEP
from tracefit_vllm.scheduler import missing
from tracefit_vllm.spans import client_id, is_sampled

KINDS = {
    "plain": ({}, {}),
    "ahead": ({}, {"ahead": True}),
    "chunked": ({"budget": 16}, {}),
    "preempting": ({"blocks": 12}, {}),
    "preempting ahead": ({"blocks": 12}, {"ahead": True}),
    "speculating": ({"draft": 3}, {"right": 2}),
}


def name(number):
    return f"cmpl-{number}-0-{number:08x}"


def load(count=30, seed=0):
    draw = random.Random(seed)
    arrivals = {}
    for number in range(1, count + 1):
        hits = 16 * draw.randint(0, 1)
        request = Request(name(number), draw.randint(20, 90), draw.randint(1, 12), hits)
        arrivals.setdefault(draw.randint(1, 60), []).append(request)
    return arrivals


@pytest.fixture(params=KINDS)
def ran(request, traced):
    """A load that ran to its end: the scheduler, its records."""
    options, loop = KINDS[request.param]
    scheduler, recorder = traced(**options)
    engine(scheduler, load(), aborts={20: [name(3)], 31: [name(7), name(8)]}, **loop)
    assert recorder.why is None
    if "preempting" in request.param:
        assert scheduler.truth.preempted
    return scheduler, recorder


def test_every_step_has_its_batch(ran, built):
    scheduler, recorder = ran
    found = [
        [
            s["step.id"],
            s["queue.running_depth"],
            s["queue.waiting_depth"],
            s["kv.blocks_free_gpu"],
            s["batch.num_prefill_reqs"],
            s["batch.num_decode_reqs"],
            s["batch.prefill_tokens"],
            s["batch.decode_tokens"],
            s["batch.prefill_context_tokens"],
            s["batch.decode_context_tokens"],
        ]
        for s in built(recorder.records).summaries
    ]
    wanted = []
    for *queue, batch in scheduler.truth.steps:
        of = ([one for one in batch if not one[3]], [one for one in batch if one[3]])
        sums = [sum(one[field] for one in part) for field in (1, 2) for part in of]
        wanted.append([*queue, len(of[0]), len(of[1]), *sums])
    assert found == wanted


def test_every_request_has_its_journey(ran, built):
    scheduler, recorder = ran
    journeys = built(recorder.records).journeys
    ended = {}
    for key, span in journeys.items():
        *_, last = span.events
        status = {"length": "FINISHED_LENGTH_CAPPED", "aborted": "FINISHED_ABORTED"}
        facts = last.attributes
        assert last.name == "journey.FINISHED"
        ended[key] = (status[facts["finish.status"]], facts["decode.done_tokens"], facts["num_preemptions"])
    assert ended == scheduler.truth.ended
    preempted = [
        (event.attributes["scheduler.step"], key)
        for key, span in journeys.items()
        for event in span.events
        if event.name == "journey.PREEMPTED"
    ]
    assert sorted(preempted) == sorted(scheduler.truth.preempted)


def test_a_token_is_of_the_step_that_computed_it(ran, built):
    """Also where the next step is scheduled before the token comes: first and last step of each request as it is
    known."""
    scheduler, recorder = ran
    computed = {}
    for step, *_, batch in scheduler.truth.steps:
        for key, tokens, before, _ in batch:
            computed.setdefault(key, []).append((step, before + tokens))
    for key, span in built(recorder.records).journeys.items():
        at = {event.name.partition(".")[2]: event.attributes["scheduler.step"] for event in span.events}
        status, outputs, preemptions = scheduler.truth.ended[key]
        if status == "FINISHED_LENGTH_CAPPED" and not preemptions:
            prompt = span.events[0].attributes["prefill.total_tokens"]
            assert at["FIRST_TOKEN"] == next(step for step, done in computed[key] if done >= prompt)
            assert at["SCHEDULED"] == computed[key][0][0]
            if not scheduler.draft and "PREEMPTED" not in at:
                assert at["FINISHED"] == [step for step, done in computed[key] if done < prompt + outputs][-1]


def test_a_resumed_request_says_so(traced, built):
    scheduler, recorder = traced(blocks=12)
    engine(scheduler, load())
    kinds = {}
    for span in built(recorder.records).journeys.values():
        names = [event.name.partition(".")[2] for event in span.events]
        said = [event.attributes.get("schedule.kind") for event in span.events]
        for before, kind in zip(["", *names], [*said, None], strict=True):
            if kind:
                kinds.setdefault(before, set()).add(kind)
    assert kinds == {"QUEUED": {"FIRST"}, "PREEMPTED": {"RESUME"}}


def test_a_prefix_hit_is_in_a_snapshot_whatever_the_sampling(traced, built):
    scheduler, recorder = traced()
    engine(scheduler, {1: [Request(name(1), 40, 3, hits=16), Request(name(2), 40, 3)]})
    found = built(recorder.records)
    (snapshot,) = found.snapshots
    assert snapshot["request.id"] == name(1)
    assert snapshot["request.num_prompt_tokens"] - snapshot["request.effective_prompt_len"] == 16
    assert found.summaries[0]["batch.prefill_context_tokens"] == 16
    assert [s["batch.prefix_hit_tokens"] for s in found.summaries] == [16, *[0] * (len(found.summaries) - 1)]


def test_rejected_drafts_are_subtracted_from_later_steps(built):
    """Step 3 counts three drafts of step 2 as right, and one is; the output that would correct step 4 never comes."""
    records = [
        (1, 0, None, None, 16, 100, 1.0, 1.0, 100),
        (QUEUED, 1, 0, "a", 10, 20, None, None),
        (STEP, 1, 2, 3, 1, 0, 99, [("a", 0, ([0],))], [], [], [], {"a": 10}, []),
        (OUTPUT, 4, 1, [("a", 1)], [], []),
        (STEP, 2, 5, 6, 1, 0, 99, [], ["a"], [10], [None], {"a": 4}, ["a"]),
        (STEP, 3, 7, 8, 1, 0, 99, [], ["a"], [14], [None], {"a": 4}, ["a"]),
        (OUTPUT, 9, 2, [("a", 2)], [], [("a", 2)]),
        (STEP, 4, 10, 11, 1, 0, 99, [], ["a"], [16], [None], {"a": 4}, ["a"]),
    ]
    found = built(records)
    assert [s.get("batch.decode_context_tokens") for s in found.summaries] == [0, 10, 12, None]
    assert [s.get("request.num_computed_tokens") for s in found.snapshots] == [0, 10, 12, None]
    assert [s["batch.decode_tokens"] for s in found.summaries] == [0, 4, 4, 4]


def test_a_streaming_sessions_steps_are_left_out(traced, built):
    """Its prompt grows while it runs, so that nobody knows which of its tokens are output."""
    scheduler, recorder = traced()
    other = Request(name(2), 20, 2, resumable=True)
    engine(scheduler, {1: [Request(name(1), 20, 4)], 3: [other]})
    found = built(recorder.records)
    assert [s["step.id"] for s in found.summaries] == [1, 2]
    assert list(found.journeys) == [name(1)]
    assert sum(span.dropped_events for span in found.spans) == len(scheduler.truth.steps) - 2


def test_rich_steps_show_every_running_request(traced, built, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE", "1")
    scheduler, recorder = traced()
    engine(scheduler, load())
    found = built(recorder.records)
    shown = {}
    for one in found.snapshots:
        shown.setdefault(one["step.id"], []).append(one["request.scheduled_tokens_this_step"])
    for summary in found.summaries:
        of = shown.get(summary["step.id"], [])
        assert len(of) == summary["queue.running_depth"]
        assert sum(of) == summary["batch.scheduled_tokens"]


def test_shares_are_sampled(traced, built, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_JOURNEY_TRACING_SAMPLE_RATE", "0.5")
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_SAMPLE_RATE", "0.25")
    scheduler, recorder = traced()
    engine(scheduler, load(200))
    found, steps = built(recorder.records), len(scheduler.truth.steps)
    assert 60 < len(found.journeys) < 140
    assert 0.15 * steps < len(found.summaries) < 0.35 * steps


@pytest.mark.parametrize(
    ("core", "client"),
    [
        ("cmpl-abc-0-0123abcd", "cmpl-abc"),
        ("cmpl-a-12-3-0123abcd", "cmpl-a-12"),
        ("chatcmpl-a-12-0123abcd", "chatcmpl-a-12"),
        ("1_chatcmpl-abc-0123abcd", "chatcmpl-abc"),
        ("0_cmpl-abc-0-0123abcd", "cmpl-abc"),
    ],
)
def test_a_request_is_sampled_by_the_id_its_client_knows(core, client):
    assert client_id(core) == client
    assert is_sampled(client, 1.0)
    assert not is_sampled(client, 0.0)


def test_a_span_of_steps_ends_with_its_interval(traced, built, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_CLOSURE_INTERVAL", "10")
    scheduler, recorder = traced()
    engine(scheduler, load())
    found = [
        (s.attributes["scheduler.step_range_start"], s.attributes["scheduler.step_range_end"])
        for s in built(recorder.records).steps
    ]
    count = len(scheduler.truth.steps)
    assert found == [(n, min(n + 9, count)) for n in range(1, count + 1, 10)]


def test_the_callers_span_is_the_parent_and_the_server_gets_ours(traced, built):
    scheduler, recorder = traced()
    given = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    refused = {"traceparent": f"00-{7:032x}-{9:016x}-00"}
    requests = [Request(name(n), 20, 2, trace_headers=h) for n, h in ((1, given), (2, None), (3, refused))]
    engine(scheduler, {1: list(requests)})
    journeys = built(recorder.records).journeys
    assert [journeys[name(n)].parent for n in (1, 2)] == [(7, 9), None]
    assert journeys[name(1)].context[0] == 7
    for n in (1, 2):
        _, *ids, _ = requests[n - 1].trace_headers["traceparent"].split("-")
        assert journeys[name(n)].context == tuple(int(one, 16) for one in ids)
    assert name(3) not in journeys, "its caller does not trace it"


def test_an_error_in_it_ends_the_tracing_alone(traced):
    scheduler, recorder = traced()
    recorder.put = lambda record, weight=1: 1 / 0
    engine(scheduler, load())
    assert recorder.why == "ZeroDivisionError: division by zero"
    assert len(scheduler.truth.ended) == 30


def test_its_end_closes_the_recorder(traced):
    scheduler, recorder = traced()
    scheduler.shutdown()
    assert (recorder.is_closed, scheduler.is_shut_down) == (True, True)


class _Other(FakeScheduler):
    def update_from_output(self, outputs):
        return {}


@pytest.mark.parametrize(
    ("module", "what"), [("vllm.v1.core.sched.scheduler", "version of vLLM"), ("mine", "--scheduler-cls")]
)
def test_a_scheduler_that_is_not_known_is_not_traced(traced, caplog, monkeypatch, module, what):
    monkeypatch.setattr(_Other, "__module__", module)
    with caplog.at_level(logging.WARNING):
        scheduler, recorder = traced(_Other)
    assert (type(scheduler), recorder) == (_Other, None)
    (line,) = caplog.messages
    assert f"no tracing, this {what} is not known: _Other.update_from_output takes outputs" in line
    assert missing(FakeScheduler) is None


def test_a_bad_setting_is_said_and_nothing_is_traced(traced, caplog, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_SAMPLE_RATE", "half")
    with caplog.at_level(logging.WARNING):
        scheduler, recorder = traced()
    engine(scheduler, load())
    assert recorder is None
    assert caplog.messages == [
        "tracefit-vllm: no tracing: TRACEFIT_VLLM_STEP_TRACING_SAMPLE_RATE=half: a number from 0 to 1 is needed"
    ]


@pytest.mark.parametrize("share", [0.34, 0.04])
def test_after_records_were_lost_nothing_is_guessed(traced, built, share):
    """Of records that are gone in the middle: what still comes is exact, and what does not is counted."""
    scheduler, recorder = traced()
    engine(scheduler, load())
    header, *rest = recorder.records
    begin, cut = len(rest) // 3, int(len(rest) * share)
    found = built([header, *rest[:begin], (5, cut), *rest[begin + cut :]])
    whole = {s["step.id"]: s for s in built(recorder.records).summaries}
    changed = ("batch.num_finished", "batch.num_preempted")
    assert 0 < len(found.summaries) < len(whole)
    for summary in found.summaries:
        same = {k: v for k, v in whole[summary["step.id"]].items() if k not in changed}
        assert {k: v for k, v in summary.items() if k not in changed} == same
    assert sum(span.dropped_events for span in found.spans) > cut
    journeys, of_all = found.journeys, built(recorder.records).journeys
    ends = [key for key, span in journeys.items() if span.events[-1].name == "journey.FINISHED"]
    assert 0 < len(ends) < len(of_all)
    for key in ends:
        assert journeys[key].events == of_all[key].events


def test_a_span_holds_what_a_collector_takes(traced, built, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE", "1")
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_CLOSURE_INTERVAL", "10000")
    scheduler, recorder = traced(slots=40, budget=400)
    engine(scheduler, load(400))
    found = built(recorder.records)
    assert len(found.summaries) == len(scheduler.truth.steps)
    assert len(found.steps) > 1
    assert max(len(span.events) for span in found.steps) <= 1000
