"""Display and warnings while traces come in."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from receive.conftest import at_once
from tracefit.receive.observed import ClassCounts, Observed, ObservedStep, StepErrors, live_table
from tracefit.receive.spans import PrivacyFilter


def observe(traces, observed=None):
    observed = observed or Observed()
    observed.spans += sum(part.spans for part in at_once(PrivacyFilter().by_sender(traces.protobuf(), observed)))
    return observed


def test_ttft_is_from_arrival_to_the_first_token(traces):
    """In whichever order both spans come."""
    traces.core(2, [("FIRST_TOKEN", 30_000, 1), ("FINISHED", 40_000, 2)])
    traces.api(2, {"ARRIVED": 10_000, "DEPARTED": 41_000})
    traces.api(3, {"ARRIVED": 50_000, "DEPARTED": 91_000})
    traces.core(3, [("FIRST_TOKEN", 80_000, 1), ("FINISHED", 90_000, 2)])
    observed = observe(traces)
    assert list(observed.ttft_s.recent) == pytest.approx([0.02, 0.03])
    assert (observed.requests, observed.spans) == (2, 4)


def test_stock_servers_say_their_latencies_themselves(traces):
    latencies = {"gen_ai.latency.time_to_first_token": 0.25, "gen_ai.latency.time_in_queue": 0.125}
    traces.span("vllm.llm_engine", "llm_request", (1, 1, 0), [], attributes=latencies)
    observed = observe(traces)
    found = (list(observed.ttft_s.recent), list(observed.queue_wait_s.recent), observed.requests)
    assert found == ([0.25], [0.125], 1)


def test_a_queue_wait_lasts_until_a_request_is_first_scheduled(traces):
    events = [("QUEUED", 10_000, 0), ("SCHEDULED", 17_000, 1), ("PREEMPTED", 20_000, 2)]
    traces.core(1, [*events, ("SCHEDULED", 90_000, 5), ("FINISHED", 95_000, 6)])
    observed = observe(traces)
    assert list(observed.queue_wait_s.recent) == pytest.approx([0.007])


def test_values_are_counted_by_class():
    """A bound belongs to the class below it."""
    values = ClassCounts((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        values.add(value)
    assert (values.counts, values.sum) == ([2, 1, 1], 10.0)


def test_errors_of_predictions_are_relative_to_what_was_measured():
    """100 us measured and 110 predicted, 200 and 180; of the third there is no prediction."""
    steps = [ObservedStep(0, 1, 0, 0, None, cycle_us) for cycle_us in (100.0, 200.0, 300.0)]
    errors = StepErrors()
    errors.add(steps, [110.0, 180.0, None])
    assert list(errors.errors.recent) == pytest.approx([0.1, 0.1])
    assert (errors.measured_s, errors.predicted_s) == pytest.approx((300e-6, 290e-6))


def test_step_of_a_busy_engine_lasts_until_the_next(traces):
    """9 ms between 1 and 2; 3 follows an empty engine; 5 is not adjacent to 3."""
    traces.steps(
        traces.summary(1, 1000),
        traces.summary(2, 10_000, running_depth=0),
        traces.summary(3, 90_000),
        traces.summary(5, 120_000),
    )
    observed = observe(traces)
    assert list(observed.cycle_ms) == [9.0]
    assert observed.steps == 4


def test_dropped_events_are_warned_of_at_once_and_once(traces):
    """127 events of 200: the limit that is needed is the next power of two above what a span has."""
    traces.steps(*(traces.summary(n, n * 10_000) for n in range(127)), dropped=173)
    observed = observe(traces)
    (text,) = observed.new_warnings()
    assert "dropped 173 events" in text
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT=512" in text
    observe(traces, observed)
    assert observed.new_warnings() == []
    assert observed.dropped_events == 346


def test_a_server_that_traces_no_steps_is_warned_of(traces):
    for number in range(1, 50):
        traces.request(number, number * 1e6, step=number)
    observed = observe(traces)
    assert observed.new_warnings() == []
    traces.records.clear()
    traces.request(51, 0, step=1)
    observe(traces, observed)
    (text,) = observed.new_warnings()
    assert "--step-tracing-enabled" in text
    assert "stock vLLM refuses to start with these flags" in text


def test_stock_server_gets_no_advice_it_refuses(traces):
    for number in range(1, 60):
        traces.span("vllm.tracing.otel", "llm_request", (number, number, 0), [])
    observed = observe(traces)
    assert observed.requests == 59
    assert observed.new_warnings() == []


@pytest.mark.parametrize(
    ("service", "is_unnamed"),
    [("", True), ("unknown_service", True), ("unknown_service:python", True), ("unknown-llama", False)],
)
def test_a_server_without_a_service_name_is_warned_of_once(lib, tmp_path, service, is_unnamed):
    """As the SDK names it, or not named at all."""

    async def main():
        async with lib.running(tmp_path) as at:
            body = lib.request(1, service=service).SerializeToString()
            for _ in range(2):
                await at.intake.take(lambda: asyncio.sleep(0, body))
            return [at.intake.observed.new_warnings() for _ in range(2)]

    first, second = asyncio.run(main())
    assert ["OTEL_SERVICE_NAME=" in text for text in first] == [True] * is_unnamed
    assert second == []


def test_a_server_that_traces_no_requests_is_warned_of(traces):
    for number in range(5):
        traces.steps(*(traces.summary(n, n * 10_000) for n in range(number * 100, number * 100 + 100)))
    (text,) = observe(traces).new_warnings()
    assert "--enable-journey-tracing" in text
    assert "stock vLLM refuses to start with these flags" in text


def test_server_that_traces_both_gets_no_warning(traces):
    for number in range(1, 60):
        traces.request(number, number * 1e6, step=number)
    traces.steps(traces.summary(1, 0))
    assert observe(traces).new_warnings() == []


def test_rates_are_those_of_the_last_ten_seconds(monkeypatch):
    now, observed = [0.0], Observed()
    monkeypatch.setattr("tracefit.receive.observed.time.monotonic", lambda: now[0])
    assert observed.rates() == (0.0, 0.0)
    now[0], observed.spans, observed.steps = 5.0, 500, 50
    assert observed.rates() == (100.0, 10.0)
    now[0] = 16.0  # from 5 s on: nothing came
    assert observed.rates() == (0.0, 0.0)


def test_the_view_shows_what_there_is(traces):
    observed = observe(
        traces.steps(traces.summary(1, 1000), traces.summary(2, 10_000), dropped=7).request(1, 0, step=1)
    )
    text = io.StringIO()
    Console(file=text, width=80).print(live_table(observed))
    shown = dict(line.rstrip().split("  ", 1) for line in text.getvalue().splitlines())
    shown = {name: value.strip() for name, value in shown.items()}
    assert shown == {
        "spans": "3 (0/s)",
        "steps": "2 (0/s)",
        "requests": "1",
        "TTFT, median": "0.011 s",
        "queue wait, median": "0.2 ms",
        "step time, median": "9.00 ms",
        "events dropped by the sender": "7",
        "requests refused": "0",
    }


def test_open_requests_are_forgotten_after_a_while():
    """Of 11,000 first tokens the oldest have no arrival to wait for any more."""
    observed = Observed()
    first_token = SimpleNamespace(name="journey.FIRST_TOKEN", time_unix_nano=30)
    for number in range(11_000):
        core = SimpleNamespace(trace_id=number, dropped_events_count=0, events=[first_token])
        observed.add("vllm.scheduler", core)
    for number in (0, 10_999):
        api = SimpleNamespace(trace_id=number, dropped_events_count=0, name="llm_request", start_time_unix_nano=10)
        observed.add("vllm.api", api)
    assert list(observed.ttft_s.recent) == [20 / 1e9]
