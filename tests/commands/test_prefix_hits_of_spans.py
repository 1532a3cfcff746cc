"""Prefix-cache hits on a server that names none: what becomes of the time of a prompt token."""

from __future__ import annotations

import json

import pytest

from stock import stock_requests, write_stock
from tracefit.synth import SynthOptions, synth
from tracefit.synth.options import LoadPhase


def _trained(tracefit, folder, fraction):
    """Return the law and the step model of a run in which so many prompts begin with one of four prefixes of 128 tokens."""
    options = SynthOptions(
        rate_per_s=12.0, requests=500, seed=4, abort_fraction=0.0, prefix_fraction=fraction,
        phases=(LoadPhase("steady", 1.0, 1.0),),
    )  # fmt: skip
    run = synth(options)
    write_stock(stock_requests(run), folder / "stock")
    assert tracefit("run", folder / "stock", "--out", folder / "out", "--fast", "--features", "batch")[0] == 0
    models = json.loads((folder / "out" / "models" / "beta.json").read_text())["models"]
    verdicts = json.loads((folder / "out" / "evaluation.json").read_text())["scopes"][0]["verdicts"]
    return run.law, next(m for m in models if m["name"] == "beta.cycle_time"), json.dumps(verdicts)


def _per_prompt_token(model):
    return next(t["value"] for t in model["terms"] if t["feature"] == "prefill_tokens")


def test_prompts_that_may_be_hits_are_left_out_where_hits_show(tracefit, tmp_path):
    law, model, _ = _trained(tracefit, tmp_path, 0.4)
    assert model["training"]["exclusions"]["prefix_hit"] > 50
    assert "intervals with more than 128 prompt tokens" in str(model["notes"])
    assert _per_prompt_token(model) == pytest.approx(law.per_prefill_token_us, rel=0.1)


def test_where_no_prompt_is_sure_to_be_whole_the_model_and_the_verdict_say_so(tracefit, tmp_path):
    _, model, verdicts = _trained(tracefit, tmp_path, 0.9)
    assert "the coefficients of prompts are uncertain" in str(model["notes"])
    assert "fullest training step, as a share of a step's token budget: 0 %" in verdicts
    assert "prefix_hit" not in model["training"]["exclusions"]


def test_without_hits_no_prompt_is_left_out(tracefit, tmp_path):
    law, model, _ = _trained(tracefit, tmp_path, 0.0)
    assert "prefix_hit" not in model["training"]["exclusions"]
    assert "every prompt token counts as computed" in str(model["notes"])
    assert _per_prompt_token(model) == pytest.approx(law.per_prefill_token_us, rel=0.05)
