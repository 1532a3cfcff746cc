"""Logs of load generators and of requests through the whole job."""

from __future__ import annotations

import json
import random

import pytest

import clients
from tracefit import TrainOptions, inspect, run
from tracefit.reports.terminal_results import inspect_text


def models_of(tmp_path, options=None, **logs):
    """Return the models that some logs in one run give, by name."""
    (tmp_path / "run").mkdir()
    for name, content in logs.items():
        (tmp_path / "run" / name).write_bytes(content)
    run(tmp_path / "run", out=tmp_path / "out", workers=1, options=options)
    files = [tmp_path / "out/models" / f"{kind}.json" for kind in ("alpha", "beta")]
    return {model["name"]: model for file in files for model in json.loads(file.read_text())["models"]}


def test_token_times_of_a_client_give_step_times(tmp_path):
    model = models_of(tmp_path, result=clients.vllm_bench(clients.planned(400)))["beta.cycle_time"]
    assert "as the client received them" in model["target"]["definition"]
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    assert terms["prefill_tokens"] == pytest.approx(20, rel=0.1)
    assert terms["num_decode_reqs"] == pytest.approx(500, rel=0.1)
    assert model["intercept"]["value"] == pytest.approx(15_000, rel=0.05)


def test_first_and_last_tokens_of_a_client_give_step_times(tmp_path):
    plan, late = clients.planned(400), random.Random(1)
    for request in plan:
        request.token_s = [token + late.uniform(0.0004, 0.001) for token in request.token_s]
    # Means over a request's steps do not tell a line in the batch from a curve: the planted line is asked for.
    models = models_of(tmp_path, TrainOptions(features="batch"), result=clients.guidellm(plan))
    terms = {term["feature"]: term["value"] for term in models["beta.cycle_time"]["terms"]}
    assert terms["prefill_tokens"] == pytest.approx(20, rel=0.1)
    assert terms["num_decode_reqs"] == pytest.approx(500, rel=0.1)
    assert models["beta.cycle_time"]["intercept"]["value"] == pytest.approx(15_000, rel=0.05)
    # Nothing of the server's queue is seen.
    assert set(models) == {"beta.cycle_time"}


def test_network_stands_apart_from_the_server(tmp_path):
    plan = clients.planned(200)
    server = clients.request_log(plan)
    for request in plan:
        request.token_s = [token + 0.0007 for token in request.token_s]
    models = models_of(tmp_path, server=server, client=clients.guidellm(plan))
    # The log takes the soonest to be queued as it arrives: all of them are, a millisecond later.
    assert models["alpha.network"]["intercept"]["value"] == pytest.approx(1_700, rel=0.01)


def test_times_without_a_date_give_none(tmp_path):
    """An experiment of inference-sim counts from its beginning, and its latencies have no time at all."""
    plan = clients.planned(400)
    models_of(tmp_path, **{name: write(plan) for name, write in clients.EXPERIMENT.items()})
    assert "Traced " not in (tmp_path / "out/report.md").read_text()
    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    (server,) = evaluation["ingest"]["servers"]
    assert server["seconds"] == pytest.approx(
        max(r.sent_s for r in plan) - min(r.sent_s for r in plan), abs=0.01
    )
    assert "no date, " in inspect_text(inspect([tmp_path / "run"]))
