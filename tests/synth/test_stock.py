"""Spans as an unmodified vLLM writes them, against the truth of the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tracefit.synth import SpanKind, synth

_LATENCY = "gen_ai.latency.time_"


@pytest.fixture(scope="module")
def stock(busy_options):
    return synth(replace(busy_options, form="stock", rich_sampling=0.0))


@pytest.fixture(scope="module")
def described(stock):
    """Return (span, its request's truth) of every span."""
    truth = {row["request_id"]: row for row in stock.truth_requests.iter_rows(named=True)}
    return [(span, truth[span.attributes["gen_ai.request.id"]]) for span in stock.spans]


def test_a_complete_request_is_one_span_without_steps(stock, described):
    ended = stock.truth_requests.filter(stock.truth_requests["finish_status"] != "aborted")
    assert 100 < ended.height < 260  # some clients left
    assert sorted(row["request_id"] for _, row in described) == sorted(ended["request_id"])
    for span, row in described:
        assert (span.scope, span.name, span.kind) == ("vllm.tracing.otel", "llm_request", SpanKind.SERVER)
        assert (span.parent_span_id, span.events) == ("", ())
        assert not any("step" in key for key in span.attributes)
        assert span.attributes["gen_ai.usage.prompt_tokens"] == row["prompt_tokens"]
        assert span.attributes["gen_ai.usage.completion_tokens"] == row["output_tokens"]


def test_times_of_the_engine_are_differences_between_its_steps(stock, described):
    steps = {row["step_id"]: row for row in stock.truth_steps.iter_rows(named=True)}

    def output_us(step_id):
        step = steps[step_id]
        return (step["end_ns"] - 0.75 * min(250e3, step["cycle_us"] * 250)) / 1e3

    for span, row in described:
        scheduled_us = steps[row["first_scheduled_step"]]["start_ns"] / 1e3
        first, last = output_us(row["first_token_step"]), output_us(row["finished_step"])
        wanted = {
            "in_queue": scheduled_us - row["queued_ns"] / 1e3,
            "in_model_prefill": first - scheduled_us,
            "in_model_decode": last - first,
            "in_model_inference": last - scheduled_us,
        }
        found = {name: 1e6 * span.attributes[_LATENCY + name] for name in wanted}
        assert found == pytest.approx(wanted, abs=0.01)


def test_the_front_end_stamps_a_step_once(stock, described):
    nodes = {}
    for span, row in described:
        for name, step in (
            (_LATENCY + "to_first_token", row["first_token_step"]),
            ("gen_ai.latency.e2e", row["finished_step"]),
        ):
            nodes.setdefault(step, []).append(span.start_unix_ns + span.attributes[name] * 1e9)
    assert max(map(len, nodes.values())) == 3
    # Float seconds since 1970 are 240 ns apart; start, stamp and their difference are rounded.
    assert max(np.ptp(stamps) for stamps in nodes.values()) < 1_000
    middle = np.array([np.median(nodes[step]) for step in sorted(nodes)])
    assert np.diff(middle).min() > 100_000
    ends = dict(stock.truth_steps.select("step_id", "end_ns").iter_rows())
    late_ns = middle - [ends[step] for step in sorted(nodes)]
    assert 20_000 < np.std(late_ns) < 300_000


@pytest.mark.slow
def test_sampling_at_the_head_goes_by_the_trace_id(stock, busy_options):
    half = synth(replace(stock.options, journey_sampling=0.5))
    low = {span.trace_id: int(span.trace_id, 16) % 2**64 for span in stock.spans}
    assert {span.trace_id for span in half.spans} == {name for name, bits in low.items() if bits < 2**63}
    assert 0.35 < len(half.spans) / len(stock.spans) < 0.65
    instrumented = synth(replace(busy_options, rich_sampling=0.0))
    assert set(low) < {span.trace_id for span in instrumented.spans}
