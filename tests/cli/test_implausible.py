"""One absurd number in a run is left out by a rule that is named and counted; everything else stands."""

from __future__ import annotations

import json

import pytest

from tracefit.commands.inspect import inspect
from tracefit.tables.store import TableStore

ODD = {
    "a step counter at its end": ("step.BATCH_SUMMARY", "step.id", lambda _: 2**63 - 1),
    "a step far ahead": ("step.BATCH_SUMMARY", "step.id", lambda n: n + 10**6),
    "a step far behind": ("step.BATCH_SUMMARY", "step.id", lambda n: -n),
    "an event of a step far ahead": ("journey.FIRST_TOKEN", "scheduler.step", lambda n: n + 10**5),
    "a step at the dawn of time": ("step.BATCH_SUMMARY", "step.ts_start_ns", lambda _: 1),
    "a step at the end of time": ("step.BATCH_SUMMARY", "step.ts_start_ns", lambda _: 2**63 - 1),
    "a request at the dawn of time": ("journey.QUEUED", "ts.monotonic_ns", lambda _: 1),
    "tokens beyond the budget": ("step.BATCH_SUMMARY", "batch.prefill_tokens", lambda n: n + 90_000),
    "tokens below nothing": ("step.BATCH_SUMMARY", "batch.decode_tokens", lambda n: -n - 1),
    "a request of a thousand million tokens": ("journey.QUEUED", "prefill.total_tokens", lambda _: 10**9),
    "more blocks than any memory": ("step.BATCH_SUMMARY", "kv.blocks_total_gpu", lambda _: 10**9),
    "more free blocks than blocks": ("step.BATCH_SUMMARY", "kv.blocks_free_gpu", lambda n: n + 10**6),
}
RULES = {
    "a step counter at its end": "steps.step_id is out of range",
    "a step far ahead": "steps.step_id is far from the steps around it",
    "a step far behind": "steps.step_id is out of range",
    "an event of a step far ahead": "journey_events.step_id is far from the steps around it",
    "a step at the dawn of time": "steps.ts_start_ns is off the run's clock",
    "a step at the end of time": "steps.ts_start_ns is out of range",
    "a request at the dawn of time": "journey_events.ts_ns is off the run's clock",
    "tokens beyond the budget": "steps.prefill_tokens is above max_num_batched_tokens",
    "tokens below nothing": "steps.decode_tokens is out of range",
    "a request of a thousand million tokens": "journey_events.prefill_total_tokens is out of range",
    "more blocks than any memory": "steps.kv_blocks_total is out of range",
    "more free blocks than blocks": "steps.kv_blocks_free is above kv_blocks_total",
}


def _errors(out):
    models = json.loads((out / "evaluation.json").read_text())["deployments"][0]["models"]
    return {name: m["holdout"]["mae"] for name, m in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(o, marks=[pytest.mark.slow] if n else []) for n, o in enumerate(ODD)])
def test_implausible_value_is_counted_and_changes_no_model(tmp_path, new_traces, trained, tracefit, quick, name):
    event, key, change = ODD[name]
    trace = new_traces().load()
    events = trace.events(event)
    trace.change([events[len(events) // 2]], change, key)
    code, _, stderr = tracefit("run", trace.write(tmp_path / "busy"), "--out", tmp_path / "out", "--fast")
    assert code == 3
    assert "1 implausible value" in stderr
    tables = TableStore(tmp_path / "out" / "tables")
    assert json.loads(tables.read("runs")["implausible"][0]) == {RULES[name]: 1}
    assert tables.read("runs").height == 1
    assert tables.read("rejects")["reason"].to_list() == [RULES[name]]
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert evaluation["ingest"]["implausible"] == {RULES[name]: 1}
    assert RULES[name] in (tmp_path / "out" / "report.md").read_text()
    assert inspect([tmp_path / "out" / "tables"]).runs[0].implausible == {RULES[name]: 1}
    found, without = _errors(tmp_path / "out"), _errors(trained)
    assert found.keys() == without.keys()
    assert found == {name: pytest.approx(error, rel=0.1, abs=2) for name, error in without.items()}


@pytest.mark.slow
def test_a_limit_that_the_run_itself_contradicts_bounds_nothing(tmp_path, traces, tracefit):
    """The configuration says 2,048 tokens a step; one step in ten has more."""
    trace = traces.load()
    trace.change(trace.events("step.BATCH_SUMMARY")[::10], lambda _: 4000, "batch.prefill_tokens")
    code, _, stderr = tracefit("ingest", trace.write(tmp_path / "run"), "--out", tmp_path / "tables")
    assert (code, stderr) == (0, "")
    assert TableStore(tmp_path / "tables").read("runs")["implausible"].to_list() == ["{}"]
