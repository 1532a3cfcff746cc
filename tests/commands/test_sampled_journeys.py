"""With half of the journeys the queue is not known exactly: the state of the nearest sampled step takes its place."""

from __future__ import annotations

import json

import pytest

import tracefit
from tracefit.synth import SynthOptions, synth, write_run


def _wait(tmp_path, options, how):
    folder = write_run(synth(options), tmp_path / "runs")
    tracefit.run([folder], tmp_path / "out", options=how)
    models = json.loads((tmp_path / "out/models/alpha.json").read_text())["models"]
    return next(m for m in models if m["name"] == "alpha.queue_wait")


@pytest.mark.slow
def test_the_wait_in_an_overload_has_two_regimes(tmp_path, quick):
    model = _wait(tmp_path, SynthOptions(seed=9, requests=600, journey_sampling=0.5, num_blocks=400), quick)
    assert model["target"]["source"] == "journey, queue state of the latest sampled step"
    waits = model["regimes"][0]["when"]["any"][0]
    assert (waits["feature"], waits["op"], waits["value"]) == ("waiting_depth", ">", 0.0)
    assert model["validation"]["skill"] > 0.7
    assert model["validation"]["classifier"]["balanced_accuracy"] > 0.9


@pytest.mark.slow
def test_wait_without_a_queue_is_no_worse_than_its_median(tmp_path, quick):
    model = _wait(tmp_path, SynthOptions(seed=10, requests=300, journey_sampling=0.5), quick)
    validation = model["validation"]
    assert validation["holdout"]["mae"] <= 1.2 * validation["baseline"]["mae"]
