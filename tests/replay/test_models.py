"""Fitted models in a replay: their own numbers, by hand, and a run that is replayed in a closed loop."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tracefit as package
from tracefit.coefficients.model import CoefficientFile
from tracefit.commands.replay import _missing
from tracefit.errors import UsageError
from tracefit.replay.engine import StepBatch
from tracefit.replay.models import FittedStepTimes, admission_us

PACKAGE = Path(__file__).parents[2] / "pipeline/tracefit"


def value(number):
    return {"value": number, "ci95": None}


def model(**changes):
    kind = "alpha" if changes.get("name", "").startswith("alpha") else "beta"
    return CoefficientFile.model_validate(
        {"kind": kind, "models": [{"name": "beta.cycle_time", "form": "linear"} | changes]}
    ).models[0]


def term(feature, slope, formula=None):
    return {"feature": feature, "value": slope, "unit": "us", "formula": formula or feature}


def test_a_step_takes_what_its_line_says():
    terms = [term("context_tokens", 2.0), term("most", 3.0, "max(prefill_tokens, 10 * num_decode_reqs)")]
    times = FittedStepTimes(model(intercept=value(100.0), terms=terms), {"block_size": 16})
    assert times.step(StepBatch(1, 50, 0, 0, 2, 30)) == 100 + 2 * 30 + 3 * 50
    # The context of two requests grows by two tokens a step.
    decoding = times.decoding(StepBatch(decode_reqs=2, context_tokens=30), 3, 2)
    assert decoding.tolist() == [100 + 60 + 60, 100 + 64 + 60, 100 + 68 + 60]


def test_each_step_is_of_the_first_regime_that_holds():
    many = {"any": None, "all": [{"feature": "context_tokens", "op": ">", "value": 31}]}
    regimes = [
        {"name": "many", "when": many, "intercept": value(500.0)},
        {"name": "rest", "when": {"all": []}, "intercept": value(7.0)},
    ]
    times = FittedStepTimes(model(form="regimes", regimes=regimes), {})
    assert times.decoding(StepBatch(decode_reqs=2, context_tokens=30), 3, 2).tolist() == [7, 500, 500]


def test_a_model_that_reads_what_a_replay_does_not_know_is_refused():
    with pytest.raises(UsageError, match="moon_phase"):
        FittedStepTimes(model(intercept=value(1.0), terms=[term("moon_phase", 1.0)]), {})


@pytest.mark.parametrize(("queue", "waits"), [(None, [110, 120, 110]), ("one_at_a_time", [110, 220, 110])])
def test_work_of_the_api_begins_when_the_work_before_it_ends(queue, waits):
    work = {"intercept": value(100.0), "terms": [term("prompt_tokens", 1.0)]}
    alpha = model(
        name="alpha.admission",
        form="boundary",
        boundary="step_start",
        queue=queue,
        work=work,
        offset=value(0.0),
        without_clock={"intercept": value(0.0)},
    )
    found = admission_us(alpha, np.array([0.0, 10.0, 1000.0]), np.array([10, 20, 10]))
    # The second comes at 10, and work on it begins at 110.
    assert found.tolist() == pytest.approx(waits)


@pytest.mark.slow
def test_a_generated_run_is_replayed_within_the_errors_of_its_models(tmp_path):
    root = Path(__file__).parents[2] / "fixtures/generated"
    package.run([root / "llama-8b-linear"], tmp_path / "out")
    (found,) = package.replay_runs(tmp_path / "out").runs
    errors = {q.name: abs(q.error_pct) for q in found.quantities}
    assert found.reason is None
    assert found.requests > 100
    assert all(errors[f"{name}_p{q}_us"] < 3 for name in ("itl", "e2e") for q in (50, 90))
    assert errors["ttft_p50_us"] < 10
    assert errors["ttft_p90_us"] < 10


def test_no_scheduler_but_the_replays_is_outside_the_generator():
    """A scheduler is what admits a queue, and preempts: BLIS's rules are settings of the one that is there."""
    schedulers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.strip("_") in ("preempt", "schedule_running", "schedule_waiting")
    }
    assert "replay" in schedulers
    assert schedulers <= {"replay", "synth"}


def test_a_run_without_a_replay_has_the_reason(trained, tracefit):
    code, said, _ = tracefit("replay", trained, "--json")
    runs = json.loads(said)["runs"]
    assert all(bool(run["quantities"]) != bool(run["reason"]) for run in runs)
    assert code == (0 if any(run["quantities"] for run in runs) else 1)


def test_a_run_that_is_not_there_is_named(trained, tracefit):
    code, _, error = tracefit("replay", trained, "--run", "nowhere")
    assert code == 2
    assert "there is no run nowhere" in error


@pytest.mark.parametrize(
    ("traced", "sampling", "reason"),
    [
        (0, 0.0, "no request was traced, only steps"),
        (4, 0.5, "journeys are a sample of 50%: the requests between them are not known"),
        # Without any journey, other spans may show every request.
        (4, 0.0, None),
        (4, None, None),
    ],
)
def test_the_reason_against_a_replay_is_what_was_traced(traced, sampling, reason):
    facts = {"arrival_ns": range(traced), "prompt_tokens": [5] * traced, "output_tokens": [3] * traced}
    requests = pl.DataFrame(facts | {"max_tokens": [None] * traced})
    run = pl.DataFrame({"journey_sampling": [sampling]}, schema={"journey_sampling": pl.Float64})
    assert _missing(run, requests, {"server": 1}) == reason
