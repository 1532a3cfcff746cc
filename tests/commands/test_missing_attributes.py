"""An attribute that is missing costs only the features that need it."""

from __future__ import annotations

import json

import pytest

from tracefit import run
from tracefit.models.targets import TARGETS

GROUPED = ("beta.cycle_time", "alpha.queue_wait")


def _deployment(trace, folder, how):
    run([trace.write(folder / "run")], folder / "out", options=how)
    return json.loads((folder / "out" / "evaluation.json").read_text())["deployments"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "event", "attribute"),
    [
        pytest.param("alpha.queue_wait", "journey.QUEUED", "scheduler.step", marks=pytest.mark.slow),
        pytest.param("alpha.queue_wait", "journey.SCHEDULED", "scheduler.step", marks=pytest.mark.slow),
        ("beta.cycle_time", "step.BATCH_SUMMARY", "batch.prefill_tokens"),
    ],
)
def test_a_held_out_row_without_a_group_is_in_no_group(tmp_path, traces, quick, model, event, attribute):
    """Step durations are the step times: each row is a step, whose own batch says what kind it is."""
    traces.load(covered=1.0)
    traces.change(traces.events(event)[-10:-9], lambda _: None, attribute)
    models = _deployment(traces, tmp_path, quick)["models"]
    assert set(models) == {"beta.cycle_time", *(target.model for target in TARGETS)}
    grouped = {n: sum(group["n"] for group in models[n]["by_group"].values()) for n in GROUPED}
    # A step whose batch is unknown is not in the hold-out at all.
    beta = json.loads((tmp_path / "out" / "models" / "beta.json").read_text())["models"][0]
    assert beta["training"]["exclusions"].get("unknown_features", 0) == (model == "beta.cycle_time")
    assert grouped == {n: models[n]["holdout"]["n"] - (n == model == "alpha.queue_wait") for n in GROUPED}


@pytest.mark.slow
def test_steps_without_attributes_take_the_usual_time(tmp_path, traces, quick):
    """Eight steps of nine take 3 ms to the nanosecond. The others pull the fit away from all of them."""
    starts = [3000 * step + 97_000 * (step // 9) for step in range(270)]
    slow = [step % 9 == 8 for step in range(270)]
    traces.steps(*(traces.summary(s, starts[s], decode_tokens=99 if slow[s] else 1) for s in range(270)))
    traces.change(traces.events("step.BATCH_SUMMARY"), lambda _: None, "batch.decode_tokens")
    deployment = _deployment(traces, tmp_path, quick)
    assert set(deployment["models"]) == {"beta.cycle_time"}
    assert deployment["models"]["beta.cycle_time"]["holdout"]["mdape_pct"] == pytest.approx(0)
    assert [m["name"] for m in deployment["not_fitted"]] == [target.model for target in TARGETS]
    assert all("no journeys" in m["reason"] for m in deployment["not_fitted"])
