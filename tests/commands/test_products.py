"""Products of columns are terms of a model where validation pays for them, and nowhere else."""

from __future__ import annotations

import json

import pytest

from tracefit import TrainOptions, run
from tracefit.synth import LinearLaw, SynthOptions, synth, write_run


class Quadratic(LinearLaw):
    """A law with a cost for every pair of prompt tokens of a step."""

    def step_us(self, step):
        return super().step_us(step) + 0.05 * step.prefill_tokens**2


@pytest.mark.slow
@pytest.mark.parametrize(("law", "taken"), [(Quadratic(), True), (LinearLaw(), False)])
def test_a_square_is_found_where_there_is_one(tmp_path, law, taken):
    folder = write_run(synth(SynthOptions(name="run", seed=5, requests=150, law=law)), tmp_path)
    run([folder], tmp_path / "out", options=TrainOptions(fast=True))
    model = json.loads((tmp_path / "out" / "models" / "beta.json").read_text())["models"][0]
    terms = {t["feature"]: t for t in model["terms"]}
    assert model["feature_set"].endswith("+products") is taken
    assert ("prefill_tokens_squared" in terms) is taken
    tried = {c["name"]: c for c in model["validation"]["candidates"]}
    assert tried["batch+products"]["chosen"] is taken
    assert tried["batch+products"]["reason"]
    if taken:
        square = terms["prefill_tokens_squared"]
        assert square["value"] == pytest.approx(0.05, rel=0.2)
        assert square["formula"] == "prefill_tokens ** 2"
