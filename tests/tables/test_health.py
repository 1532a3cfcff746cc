"""Journeys and steps that are not whole or not in order are counted, each under its own rule."""

from __future__ import annotations

import pytest

from together import together
from tracefit.tables.health import health_checks


def checks_of(trace):
    """Yield a trace; return its checks by name."""
    table = yield trace
    found = health_checks(table("journey_events"), table("requests"), table("steps"))
    return {check.name: (check.held, check.of, check.detail) for check in found}


@pytest.mark.slow
@together
def test_a_healthy_trace_has_nothing_to_tell(traces):
    traces.load(steps=60, requests=40)
    found = yield from checks_of(traces)
    assert {name: held for name, (held, _, _) in found.items()} == {
        "complete lifecycles": 40,
        "both layers": 40,
        "time order": 40,
        "step order": 40,
        "one token per step": 40,
        "preemption pairing": 0,
        "step starts in order": 60,
        "tokens of a step add up": 60,
    }
    assert all(held == of and detail == "" for held, of, detail in found.values())


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("lost", ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"])
@together
def test_a_lost_event_makes_a_lifecycle_incomplete(traces, lost):
    traces.request(1, 0, step=1).request(2, 60_000, step=6)
    span = traces.records[-1]["scopeSpans"][0]["spans"][0]
    span["events"] = [e for e in span["events"] if e["name"] != f"journey.{lost}"]
    assert (yield from checks_of(traces))["complete lifecycles"] == (1, 2, f"1 without {lost}")


@together
def test_a_request_that_was_aborted_while_it_waited_is_complete(traces):
    traces.api(1, {"ARRIVED": 0, "ABORTED": 900})
    traces.core(1, [("QUEUED", 500, 0), ("FINISHED", 800, 1, {"finish.status": "aborted"})])
    assert (yield from checks_of(traces))["complete lifecycles"] == (1, 1, "")


@pytest.mark.slow
@together
def test_spans_of_one_layer_alone_are_reported(traces):
    traces.request(1, 0, step=1)
    traces.api(2, {"ARRIVED": 70_000, "DEPARTED": 80_000})
    orphan = [("QUEUED", 90_000, 9), ("SCHEDULED", 90_200, 10, {"schedule.kind": "FIRST"})]
    traces.core(3, orphan, parent=False)
    wanted = (1, 3, "1 without an API span, 1 without an engine span")
    assert (yield from checks_of(traces))["both layers"] == wanted


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("times", "detail"),
    [
        ((500, 1200, 11_000, 50_000), "1 QUEUED before ARRIVED"),
        ((2000, 1900, 11_000, 50_000), "1 SCHEDULED before QUEUED"),
        ((2000, 2200, 2100, 50_000), "1 FIRST_TOKEN before SCHEDULED"),
        ((2000, 2200, 11_000, 10_000), "1 FINISHED before FIRST_TOKEN"),
    ],
)
@together
def test_events_that_run_backwards_in_time_are_reported(traces, times, detail):
    traces.api(1, {"ARRIVED": 1000, "DEPARTED": 60_000})
    queued, scheduled, first, finished = times
    events = [
        ("QUEUED", queued, 0),
        ("SCHEDULED", scheduled, 1, {"schedule.kind": "FIRST"}),
        ("FIRST_TOKEN", first, 1),
        ("FINISHED", finished, 5, {"finish.status": "length", "decode.done_tokens": 5}),
    ]
    traces.core(1, events)
    assert (yield from checks_of(traces))["time order"] == (0, 1, detail)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("steps", "detail"),
    [
        ((7, 6, 6, 10), "1 SCHEDULED in a step before QUEUED"),
        ((5, 6, 5, 10), "1 FIRST_TOKEN in a step before SCHEDULED"),
        ((5, 6, 6, 5), "1 FINISHED in a step before FIRST_TOKEN"),
    ],
)
@together
def test_steps_that_run_backwards_are_reported(traces, steps, detail):
    names = ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED")
    traces.core(1, [(n, 1000 * i, step) for i, (n, step) in enumerate(zip(names, steps, strict=True))])
    assert (yield from checks_of(traces))["step order"] == (0, 1, detail)


@together
def test_more_steps_than_tokens_are_reported(traces):
    """Five tokens from the first to the last in step 6: five steps apart instead of four."""
    events = [
        ("QUEUED", 0, 0),
        ("SCHEDULED", 200, 1, {"schedule.kind": "FIRST"}),
        ("FIRST_TOKEN", 9000, 1),
        ("FINISHED", 50_000, 6, {"finish.status": "length", "decode.done_tokens": 5}),
    ]
    traces.core(1, events)
    traces.request(2, 60_000, step=8)
    assert (yield from checks_of(traces))["one token per step"] == (1, 2, "1 otherwise")


def _preempted(traces, turns):
    events = [("QUEUED", 0, 0), *((n, at, step, {"schedule.kind": kind}) for n, at, step, kind in turns)]
    return traces.core(1, events)


PREEMPTIONS = {
    "resumed": ([("PREEMPTED", 3000, 3, None), ("SCHEDULED", 5000, 5, "RESUME")], (2, 2, "")),
    "ended": ([("PREEMPTED", 3000, 3, None), ("FINISHED", 5000, 5, None)], (1, 1, "")),
    "lost": ([("PREEMPTED", 3000, 3, None)], (0, 1, "1 preempted and never heard of again")),
    "twice": (
        [("PREEMPTED", 3000, 3, None), ("PREEMPTED", 4000, 4, None), ("SCHEDULED", 5000, 5, "RESUME")],
        (2, 3, "1 preempted twice in a row"),
    ),
    "unannounced": ([("SCHEDULED", 5000, 5, "RESUME")], (0, 1, "1 resumed without a preemption")),
}


@together
def test_a_resume_that_comes_first_is_reported(traces):
    _preempted(traces, [("SCHEDULED", 1000, 1, "RESUME")])
    assert (yield from checks_of(traces))["preemption pairing"] == (0, 1, "1 resumed without a preemption")


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("case", PREEMPTIONS)
@together
def test_preemptions_pair_with_what_follows(traces, case):
    turns, wanted = PREEMPTIONS[case]
    _preempted(traces, [("SCHEDULED", 1000, 1, "FIRST"), *turns])
    assert (yield from checks_of(traces))["preemption pairing"] == wanted


@together
def test_a_step_whose_tokens_do_not_add_up_is_reported(traces):
    traces.steps(traces.summary(1, 1000), traces.summary(2, 3000, scheduled_tokens=9), traces.summary(3, 5000))
    assert (yield from checks_of(traces))["tokens of a step add up"] == (2, 3, "1 otherwise")


@together
def test_starts_out_of_order_are_reported(traces):
    steps = [traces.summary(k, at) for k, at in ((1, 1000), (2, 3000), (3, 2000), (4, 7000))]
    # The wall clock goes on: only the engine's own clock runs backwards.
    for event, at in zip(steps, (1, 2, 3, 4), strict=True):
        event["timeUnixNano"] = str(1_700_000_000_000_000_000 + at * 1_000_000)
    traces.steps(*steps)
    assert (yield from checks_of(traces))["step starts in order"] == (3, 4, "1 before the step before")
