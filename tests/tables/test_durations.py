"""Durations of a request, by the formulas of vLLM's request metrics, worked by hand in microseconds."""

from __future__ import annotations

import json

import pytest

from together import together

DONE = {"finish.status": "length", "decode.done_tokens": 5}


def _row(traces, events, *, departed=51_500, **common):
    api = {"ARRIVED": 0} | ({"DEPARTED": departed} if departed else {})
    table = yield traces.api(1, api).core(1, events, **common)
    return table("requests").row(0, named=True)


def _events(*between, end=("FINISHED", 51_200, 5, DONE)):
    """QUEUED at 1,000, SCHEDULED at 1,200, FIRST_TOKEN at 11,200, and what is given around them."""
    events = [("QUEUED", 1000, 0), ("SCHEDULED", 1200, 1), ("FIRST_TOKEN", 11_200, 1), *between]
    return [*events, end] if end else events


@together
def test_an_undisturbed_request(traces):
    row = yield from _row(traces, _events())
    expected = {
        "admission_us": 1000.0,
        "queue_wait_us": 200.0,
        "requeue_wait_us": 0.0,
        "time_in_queue_us": 1200.0,
        "prefill_us": 10_000.0,
        "decode_us": 40_000.0,
        "ttft_us": 11_200.0,
        "engine_us": 50_200.0,
        "e2e_us": 51_200.0,
        "departure_us": 300.0,
        "client_us": 51_500.0,
        "itl_us": 10_000.0,
    }
    assert {name: row[name] for name in expected} == expected
    assert (row["last_token_ns"], row["output_tokens"], row["prompt_tokens"]) == (51_200_000, 5, 100)
    steps = ("queued_step", "first_scheduled_step", "first_token_step", "finished_step")
    assert [row[name] for name in steps] == [0, 1, 1, 5]


BEFORE = [("PREEMPTED", 3000, 2), ("SCHEDULED", 7000, 4)]
AFTER = [("PREEMPTED", 20_000, 6), ("SCHEDULED", 26_000, 8)]


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("turns", "requeue", "prefill", "decode"),
    [
        (BEFORE, 4000, 6000, 40_000),
        (AFTER, 6000, 10_000, 34_000),
        (BEFORE + AFTER, 10_000, 6000, 34_000),
        ([*AFTER, ("PREEMPTED", 30_000, 9), ("SCHEDULED", 31_000, 10)], 7000, 10_000, 33_000),
    ],
)
@together
def test_wait_after_preemption_is_no_prefill_or_decode(traces, turns, requeue, prefill, decode):
    row = yield from _row(traces, _events(*turns), preemptions=len(turns) // 2)
    assert (row["requeue_wait_us"], row["prefill_us"], row["decode_us"]) == (requeue, prefill, decode)
    assert row["num_preemptions"] == len(turns) // 2


ABORTED = ("FINISHED", 51_200, 9, {"finish.status": "aborted", "decode.done_tokens": 2})


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("resumed_before", [False, True])
@together
def test_preemption_without_a_resume_has_unknown_waits(traces, resumed_before):
    turns = [*(AFTER if resumed_before else []), ("PREEMPTED", 30_000, 9)]
    row = yield from _row(traces, _events(*turns, end=ABORTED), preemptions=1 + resumed_before)
    assert (row["requeue_wait_us"], row["decode_us"]) == (None, None)
    assert row["prefill_us"] == 10_000, "nothing disturbed the prefill"


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("turns", [[], AFTER])
@together
def test_a_preemption_whose_events_are_lost_leaves_waits_unknown(traces, turns):
    row = yield from _row(traces, _events(*turns), preemptions=1 + bool(turns))
    assert (row["requeue_wait_us"], row["prefill_us"], row["decode_us"]) == (None, None, None)


@together
def test_a_request_in_flight_has_nulls(traces):
    row = yield from _row(traces, _events(end=None), departed=None)
    unknown = ("decode_us", "engine_us", "e2e_us", "departure_us", "client_us", "itl_us", "last_token_ns")
    assert [row[name] for name in unknown] == [None] * len(unknown)
    assert (row["ttft_us"], row["requeue_wait_us"], row["finish_status"]) == (11_200, 0, None)


@together
def test_a_request_that_was_never_scheduled_has_nulls(traces):
    row = yield from _row(traces, [("QUEUED", 1000, 0), ("FINISHED", 2000, 0, {"finish.status": "aborted"})])
    unknown = ("queue_wait_us", "requeue_wait_us", "time_in_queue_us", "prefill_us", "decode_us", "ttft_us")
    assert [row[name] for name in unknown] == [None] * len(unknown)
    assert (row["admission_us"], row["engine_us"], row["finish_status"]) == (1000, 1000, "aborted")


@together
def test_one_token_has_no_inter_token_latency(traces):
    end = ("FINISHED", 11_200, 1, {"finish.status": "length", "decode.done_tokens": 1})
    row = yield from _row(traces, _events(end=end))
    assert (row["itl_us"], row["decode_us"], row["output_tokens"]) == (None, 0.0, 1)


@pytest.mark.slow
@together
def test_an_aborted_request_has_no_known_last_token(traces):
    row = yield from _row(traces, _events(end=ABORTED))
    assert (row["last_token_ns"], row["finished_ns"]) == (None, 51_200_000)


@together
def test_prefix_hits_are_prompt_less_effective_prompt(traces):
    traces.request(1, 0, step=1).request(2, 0, step=1)
    shown = traces.snapshot(1, 1500, "cmpl-1-0-00000000", effective_prompt_len=36)
    traces.steps(traces.summary(1, 1100), shown)
    rows = (yield traces)("requests").sort("request_id")
    assert rows["cached_prompt_tokens"].to_list() == [64, None]


CAUSED = (
    "admission_us",
    "queue_wait_us",
    "prefill_us",
    "decode_us",
    "ttft_us",
    "e2e_us",
    "departure_us",
    "client_us",
)


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"QUEUED": -100}, {"admission_us", "ttft_us", "e2e_us", "client_us"}),
        ({"SCHEDULED": 900}, {"queue_wait_us", "ttft_us", "e2e_us", "client_us"}),
        ({"FIRST_TOKEN": 1100}, {"prefill_us", "ttft_us", "e2e_us", "client_us"}),
        ({"FIRST_TOKEN": 51_300}, {"decode_us", "e2e_us", "client_us"}),
        ({"FINISHED": 51_600}, {"departure_us", "client_us"}),
    ],
)
@together
def test_times_of_events_out_of_order_are_rejected(traces, changed, lost):
    """Nobody knows which of two events of a request is wrong: values around both are left out, the others stay."""
    traces.server, at_us = "engine", 1_000_000
    events = [(name, at_us + changed.get(name, us), *more) for name, us, *more in _events()]
    traces.api(1, {"ARRIVED": at_us, "DEPARTED": at_us + 51_500}).core(1, events)
    table = yield traces
    row = table("requests").row(0, named=True)
    assert {name for name in CAUSED if row[name] is None} == lost
    implausible = json.loads(table("runs")["implausible"][0])
    listed = dict(table("rejects").select("reason", "count").rows())
    assert implausible == listed
    assert {name for name in CAUSED if any(rule.startswith(f"requests.{name} ") for rule in listed)} == lost


@together
def test_an_aborted_request_may_depart_first(traces):
    aborted = ("FINISHED", 51_900, 5, {"finish.status": "aborted", "decode.done_tokens": 5})
    row = yield from _row(traces, _events(end=aborted))
    assert (row["departure_us"], row["client_us"], row["e2e_us"]) == (None, 51_500.0, 51_900.0)


@together
def test_client_may_leave_before_the_engine_queues(traces):
    """The step in progress ends after the client left: only then the request is queued, and aborted."""
    events = [("QUEUED", 5000, 0), ("FINISHED", 5100, 0, {"finish.status": "aborted"})]
    row = yield from _row(traces, events, departed=2400)
    assert (row["client_us"], row["admission_us"]) == (2400, 5000)
