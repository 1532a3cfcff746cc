"""Which step time is fitted, and what is said when something is missing."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest

from tracefit import run
from tracefit.models.targets import TARGETS
from tracefit.reports.terminal_results import run_text
from tracefit.tables.store import TableStore


@pytest.fixture
def job(tmp_path, quick):
    """Run the main job on a trace; return its result, with all output below `tmp_path / "out"`."""

    def of(trace, **options):
        folder = trace.write(tmp_path / "run")
        return run([folder], tmp_path / "out", options=replace(quick, **options))

    return of


def _beta(tmp_path):
    return json.loads((tmp_path / "out" / "models" / "beta.json").read_text())["models"][0]


def _timeline(tmp_path):
    return json.loads((tmp_path / "out" / "evaluation.json").read_text())["deployments"][0]["timeline"]


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("target", "covered", "name", "source"),
    [
        pytest.param("auto", 0.05, "beta.cycle_time", "step_clock", marks=pytest.mark.slow),
        ("auto", 0.78, "beta.cycle_time", "step_clock"),
        ("auto", 0.82, "beta.cycle_time", "duration"),
        pytest.param("clock", 0.95, "beta.cycle_time", "step_clock", marks=pytest.mark.slow),
        ("duration", 0.05, "beta.duration", "duration"),
    ],
)
def test_target_is_chosen_by_the_covered_busy_time(tmp_path, traces, job, target, covered, name, source):
    job(traces.load(steps=120, requests=0, covered=covered), beta_target=target)
    beta = _beta(tmp_path)
    assert (beta["name"], beta["target"]["source"]) == (name, source)
    assert _timeline(tmp_path)["duration_coverage"] == pytest.approx(covered, abs=0.002)


@pytest.mark.slow
def test_durations_train_every_sampled_step(tmp_path, traces, job):
    trace = traces.load(steps=400, requests=0, covered=0.95)
    events = trace.spans[0]["events"]
    events[:] = [event for n, event in enumerate(events) if n % 4 < 2]
    job(trace)
    assert TableStore(tmp_path / "out" / "tables").read("beta_training").height == 200


@pytest.mark.slow
def test_report_explains_the_clock_with_both_medians(tmp_path, traces, job):
    job(traces.load(steps=120, requests=0, covered=0.05))
    because = _timeline(tmp_path)["beta_target_reason"]
    medians = TableStore(tmp_path / "out" / "tables").read("timeline").filter(pl.col("cycle_us").is_not_null())
    assert "5.0 %" in because
    for column in ("cycle_us", "duration_us"):
        assert f"{medians[column].median():.0f} us" in because
    assert because in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_steps_without_any_duration_use_the_clock(tmp_path, traces, job):
    trace = traces.load(steps=120, requests=0)
    trace.change(trace.events(), lambda _: None, "step.duration_us")
    job(trace)
    assert _beta(tmp_path)["target"]["source"] == "step_clock"


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_law_is_found_in_step_with_execution(tmp_path, traces, job, lag):
    """2,000 + 10 per prefill token + 50 per decode token; with `lag` 1 a composition drives the cycle after its own."""
    job(traces.load(noise=0.0, lag=lag))
    assert _timeline(tmp_path)["execution_lag_steps"] == lag
    beta = _beta(tmp_path)
    rows = TableStore(tmp_path / "out" / "tables").read("beta_training")
    rows = rows.filter(pl.col("step_id") > 1)  # nothing is known to execute during the first with a lag
    law = 2000 + 10 * rows["prefill_tokens"] + 50 * rows["decode_tokens"]
    assert (law - rows["y"]).abs().max() < 0.01
    assert rows.height >= 235
    assert beta["validation"]["holdout"]["mape_pct"] < 0.01
    assert {t["feature"]: round(t["value"], 2) for t in beta["terms"]}["prefill_tokens"] == 10


@pytest.mark.slow
def test_idle_gaps_are_in_neither_part(tmp_path, traces, job):
    trace = traces.load(steps=240, requests=0)
    idle = [trace.events()[n] for n in (99, 229)]
    trace.change(idle, lambda _: 0, "queue.running_depth", "queue.waiting_depth")
    job(trace)
    rows = TableStore(tmp_path / "out" / "tables").read("beta_training")
    assert rows.filter(excluded_reason="idle_gap").select("step_id", "split").rows() == [
        (100, "train"),
        (230, "holdout"),
    ]


@pytest.mark.slow
def test_steps_train_beta_and_name_the_flag_for_alpha(tmp_path, traces, job):
    result = job(traces.load(steps=120, requests=0))
    assert [m.name for m in result.trained.fitted] == ["beta.cycle_time"]
    assert result.exit_code == 0
    alpha = json.loads((tmp_path / "out" / "models" / "alpha.json").read_text())
    assert alpha["models"] == []
    assert [m["name"] for m in alpha["not_fitted"]] == [target.model for target in TARGETS]
    for said in (run_text(result), (tmp_path / "out" / "report.md").read_text()):
        assert "alpha.queue_wait" in said
        assert "--enable-journey-tracing" in said


@pytest.mark.slow
def test_journeys_without_api_spans_train_queue_wait(tmp_path, traces, job):
    trace = traces.load(steps=120)
    trace.records = [r for r in trace.records if r["scopeSpans"][0]["scope"]["name"] != "vllm.api"]
    result = job(trace)
    assert [m.name for m in result.trained.fitted] == ["beta.cycle_time", "alpha.queue_wait"]
    assert result.exit_code == 0


@pytest.mark.slow
def test_too_few_consecutive_steps_say_which_flag_to_raise(tmp_path, traces, job):
    trace = traces.load(steps=120)
    events = trace.spans[0]["events"]
    events[:] = events[::3]
    with (trace.write(tmp_path / "run") / "exp-config.yaml").open("a") as config:
        config.write("journey_tracing_sample_rate: 0.1\n")
    result = run([tmp_path / "run"], tmp_path / "out")
    assert "beta.cycle_time" not in {m.name for m in result.trained.fitted}
    assert "--step-tracing-sample-rate" in run_text(result)
