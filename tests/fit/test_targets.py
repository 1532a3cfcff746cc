"""A target of requests needs only its declaration: it is fitted, composed and listed like the others."""

from __future__ import annotations

import json

import polars as pl
import pytest
from msgspec.structs import replace

import tracefit
from tracefit.commands.requests import phase_columns
from tracefit.models import targets
from tracefit.models.targets import TARGETS, Target, target_named

EXECUTION = Target(
    name="execution",
    label="execution",
    title="time in the engine",
    definition="first SCHEDULED to FIRST_TOKEN",
    column="prefill_us",
    begins="first_scheduled_ns",
    step="first_scheduled_step",
    feature_set="departure",
    state="own_step",
)


@pytest.fixture
def job(tmp_path, new_traces, quick, monkeypatch):
    """Run the main job with other targets; return its output folder and its result."""

    def of(declared):
        monkeypatch.setattr(targets, "TARGETS", declared)
        result = tracefit.run([new_traces().load().write(tmp_path / "run")], tmp_path / "out")
        return tmp_path / "out", result

    return of


@pytest.mark.slow
def test_a_declared_target_is_fitted_published_and_listed(job):
    out, result = job((*TARGETS, EXECUTION))
    models = {m["name"]: m for m in json.loads((out / "models/alpha.json").read_text())["models"]}
    assert list(models) == [*(t.model for t in TARGETS), "alpha.execution"]
    assert models["alpha.execution"]["target"]["definition"] == EXECUTION.definition
    assert "alpha.execution" in {m.name for m in result.trained.fitted}
    rows = pl.read_parquet(f"{out}/tables/alpha_training/*/*.parquet").filter(target="execution")
    requests = pl.read_parquet(f"{out}/tables/requests/*/*.parquet")
    assert sorted(rows["y"]) == sorted(requests["prefill_us"].drop_nulls())
    allowed = {a.what for deployment in tracefit.inspect([out.parent / "run"]).deployments for a in deployment.allows}
    assert EXECUTION.title in allowed


@pytest.mark.slow
def test_a_target_adds_to_the_latencies_it_declares(job):
    """The hold-out has one request less known of nothing: with the admission counted twice TTFT is longer by it."""
    twice = replace(target_named("admission"), name="again", label="again", forms=("line",))
    out, _ = job(TARGETS)
    before = json.loads((out / "evaluation.json").read_text())["deployments"][0]["latency"]
    out, _ = job((*TARGETS, twice))
    after = json.loads((out / "evaluation.json").read_text())["deployments"][0]["latency"]
    for latency in ("ttft", "e2e", "client"):
        assert after[latency]["given_measured_state"]["bias_pct"] > before[latency]["given_measured_state"]["bias_pct"]
    assert after["prefill"] == before["prefill"]


def test_parts_of_a_request_come_in_the_order_of_their_events():
    assert [t.name for t in targets.parts_of("ttft")] == ["admission", "queue_wait"]
    assert list(phase_columns()) == [
        "admission",
        "queue wait",
        "requeue wait",
        "prefill",
        "decode",
        "departure",
    ]
