"""Shared by the tests of the generator: runs, and a plain reading of their spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tracefit.synth import LengthMix, LoadPhase, SynthOptions, SynthRun, synth


@dataclass
class Trace:
    """The spans of one server and epoch, sorted into what they are about."""

    steps: dict = field(default_factory=dict)
    snapshots: dict = field(default_factory=dict)
    journeys: dict = field(default_factory=dict)
    api: dict = field(default_factory=dict)
    step_spans: list = field(default_factory=list)
    core_spans: dict = field(default_factory=dict)
    api_spans: dict = field(default_factory=dict)


def _read(spans) -> Trace:
    trace = Trace()
    for span in spans:
        attributes = span.attributes
        events = [(event.name, event.attributes) for event in span.events]
        if span.scope == "vllm.scheduler.step":
            trace.step_spans.append(span)
            for name, event in events:
                if name == "step.BATCH_SUMMARY":
                    trace.steps[event["step.id"]] = event
                else:
                    trace.snapshots.setdefault(event["step.id"], []).append(event)
        elif span.scope == "vllm.scheduler":
            trace.journeys[attributes["gen_ai.request.id"]] = [event for _, event in events]
            trace.core_spans[attributes["gen_ai.request.id"]] = span
        else:
            trace.api[attributes["gen_ai.request.id"]] = events
            trace.api_spans[attributes["gen_ai.request.id"]] = span
    trace.step_spans.sort(key=lambda span: span.attributes["scheduler.span_sequence"])
    return trace


@pytest.fixture(scope="session")
def read():
    """Return a function from spans to what they are about."""
    return _read


BUSY = SynthOptions(
    name="busy",
    seed=11,
    requests=260,
    rate_per_s=16.0,
    phases=(LoadPhase("light", 0.35, 0.15), LoadPhase("burst", 0.65, 6.0)),
    prompt_tokens=LengthMix(((1.0, 250.0, 0.9),), minimum=4, maximum=900),
    output_tokens=LengthMix(((1.0, 40.0, 0.8),), maximum=200),
    num_blocks=301,
    max_num_seqs=24,
    max_num_batched_tokens=512,
    abort_fraction=0.15,
    prefix_fraction=0.3,
    prefix_tokens=64,
    rich_sampling=1.0,
)


@pytest.fixture(scope="session")
def busy_options() -> SynthOptions:
    """Return a run with queues, preemptions, chunks, prefix hits, aborts and idle times."""
    return BUSY


@pytest.fixture(scope="session")
def busy_run() -> SynthRun:
    return synth(BUSY)


@pytest.fixture(scope="session")
def busy(busy_run) -> Trace:
    return _read(busy_run.spans)


@pytest.fixture(scope="session")
def boundaries(busy_run):
    """Return (step, next step) of the busy run's truth as rows."""
    return list(pairwise(busy_run.truth_steps.iter_rows(named=True)))
