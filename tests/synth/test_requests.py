"""Requests as others write them: the tokens, the chunks and the stamps are those of the simulation's steps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tracefit.synth import LengthMix, SynthOptions, synth
from tracefit.synth.requests import served
from tracefit.synth.simulation import simulate_server

OPTIONS = SynthOptions(
    requests=60,
    rate_per_s=60.0,
    num_blocks=90,
    prompt_tokens=LengthMix(((1.0, 160.0, 0.6),), minimum=4, maximum=600),
    max_num_batched_tokens=256,
)


@pytest.fixture(scope="module")
def epoch():
    (one,) = simulate_server(OPTIONS, OPTIONS.step_law(), 0, np.random.default_rng(3))
    return one


def test_every_token_is_of_a_step_that_computed_it(epoch):
    requests = list(served(epoch))
    assert any(one.request.num_preemptions for one in requests)
    tokens = np.bincount([step for one in requests for step in one.token_steps], minlength=len(epoch.steps))
    for one in requests:
        assert len(one.token_steps) == one.request.done_tokens
        assert sorted(set(one.token_steps)) == one.token_steps
        assert one.token_steps[0] == one.request.first("FIRST_TOKEN").step_id - 1
        assert one.token_steps[-1] == one.request.points[-1].step_id - 1
        assert one.prompt_steps[-1] == one.token_steps[0]
    # No step has more tokens than requests in it; those that prefill without an end have none.
    for step, count in zip(epoch.steps, tokens, strict=True):
        assert count <= step.composition.num_decode_reqs + step.composition.num_prefill_reqs
    assert any(len(one.prompt_steps) > 1 for one in requests)


@pytest.mark.parametrize("form", ["bench", "guidellm", "request_log", "sglang"])
def test_a_request_has_its_lengths_and_its_latency(form):
    run = synth(SynthOptions(form=form, requests=30, abort_fraction=0.0))
    truth = run.truth_requests.sort("arrival_ns")
    tokens = (truth["first_token_ns"] - truth["arrival_ns"]).to_numpy() / 1e9
    lengths = truth.select("prompt_tokens", "output_tokens").rows()
    if form == "bench":
        (found,) = map(json.loads, run.recorded_lines)
        told, ttfts = [*zip(found["input_lens"], found["output_lens"], strict=True)], found["ttfts"]
        assert [len(gaps) for gaps in found["itls"]] == [n - 1 for n in found["output_lens"]]
    elif form == "guidellm":
        (found,) = map(json.loads, run.recorded_lines)
        requests = found["benchmarks"][0]["requests"]["successful"]
        told = [(r["prompt_tokens"], r["output_tokens"]) for r in requests]
        times = [r["info"]["timings"] for r in requests]
        ttfts = [t["first_token_iteration"] - t["request_start"] for t in times]
    elif form == "request_log":
        requests = [json.loads(line) for line in run.recorded_lines]
        told = [(r["input_toks"], r["output_toks"]) for r in requests]
        # The engine's clock is another one: TTFT since the request is queued, which is a little after its arrival.
        ttfts = [r["first_token_ts"] - r["queued_ts"] for r in requests]
        tokens = (truth["first_token_ns"] - truth["queued_ns"]).to_numpy() / 1e9
    else:
        roots = sorted((span for span in run.spans if span.name == "Req"), key=lambda span: span.start_unix_ns)
        told = [tuple(r.attributes[f"gen_ai.usage.{name}_tokens"] for name in ("prompt", "completion")) for r in roots]
        ttfts = [r.attributes["gen_ai.latency.time_to_first_token"] for r in roots]
        loops = sum(span.name == "decode_loop" for span in run.spans)
        assert loops == truth["output_tokens"].sum() - truth.height
    assert told == lengths
    # FIRST_TOKEN is stamped within the tail of its step; a client is a millisecond away.
    assert np.abs(np.array(ttfts) - tokens).max() < 0.003
