"""Output of inspect."""

from __future__ import annotations

import pytest

from tracefit import inspect
from tracefit.reports.terminal_results import inspect_text
from tracefit.text import columns, number


@pytest.fixture
def text_of(tmp_path):
    return lambda trace: inspect_text(inspect([trace.write(tmp_path / "busy")]))


@pytest.mark.slow
def test_run_servers_events_checks_and_allowed_models(traces, text_of):
    traces.load(steps=120, requests=0)
    traces.records[0]["scopeSpans"][0]["spans"][0]["droppedEventsCount"] = 4321
    lines = [line.split() for line in text_of(traces).splitlines()]
    assert ["run", "busy"] in lines
    assert ["scope", "vllm.scheduler.step,", "1", "span,", "dialect", "journey"] in lines
    (place,) = (k for k, line in enumerate(lines) if line[:2] == ["server", "engine:"])
    assert lines[place][2:5] == ["2023-11-14", "22:13:21", "UTC,"]
    assert lines[place + 1][-3:] == ["4,321", "dropped", "events"]
    assert ["step.BATCH_SUMMARY", "120"] in lines
    assert ["tokens", "of", "a", "step", "add", "up", "120", "of", "120"] in lines
    assert not any(line[:1] == ["complete"] for line in lines), "a check that applies to nothing is not shown"
    (step_time,) = (line for line in lines if line[:2] == ["step", "time"])
    assert step_time[2:6] == ["yes", "119", "adjacent", "pairs;"]


@pytest.mark.slow
def test_that_nothing_can_be_trained_is_the_last_line(traces, text_of):
    assert text_of(traces.request(1, 0, step=1)).splitlines()[-1] == "Nothing can be trained from this."


@pytest.mark.parametrize(
    ("value", "said"), [(1.13e-14, "0"), (-2e-15, "0"), (0.0, "0"), (3.1e-7, "3.1e-07"), (None, "-")]
)
def test_rounding_noise_is_written_as_zero(value, said):
    assert number(value) == said


def test_columns_align_names_left_and_numbers_right():
    text = columns(("name", "n"), [("a", "1"), ("long name", "1,000")], left={0})
    assert text.splitlines() == ["name           n", "a              1", "long name  1,000"]
    assert columns(None, [], left=()) == ""
