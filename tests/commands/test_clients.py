"""Logs of load generators and of requests through the whole job."""

from __future__ import annotations

import json
import random

import pytest

import clients
from tracefit import TrainOptions, ingest, inspect, run
from tracefit.reports.terminal_results import inspect_text
from tracefit.tables.store import TableStore


def models_of(tmp_path, options=None, **logs):
    """Return the models that some logs in one run give, by name."""
    (tmp_path / "run").mkdir()
    for name, content in logs.items():
        (tmp_path / "run" / name).write_bytes(content)
    run(tmp_path / "run", out=tmp_path / "out", workers=1, options=options)
    files = [tmp_path / "out/models" / f"{kind}.json" for kind in ("alpha", "beta")]
    return {model["name"]: model for file in files for model in json.loads(file.read_text())["models"]}


@pytest.mark.slow
def test_token_times_of_a_client_give_step_times(tmp_path):
    model = models_of(tmp_path, result=clients.vllm_bench(clients.planned(400)))["beta.cycle_time"]
    assert "as the client received them" in model["target"]["definition"]
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    assert terms["prefill_tokens"] == pytest.approx(20, rel=0.1)
    assert terms["num_decode_reqs"] == pytest.approx(500, rel=0.1)
    assert model["intercept"]["value"] == pytest.approx(15_000, rel=0.05)


@pytest.mark.slow
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


@pytest.mark.slow
def test_network_stands_apart_from_the_server(tmp_path):
    plan = clients.planned(200)
    server = clients.request_log(plan)
    for request in plan:
        request.token_s = [token + 0.0007 for token in request.token_s]
    models = models_of(tmp_path, server=server, client=clients.guidellm(plan))
    # The log takes the soonest to be queued as it arrives: all of them are, a millisecond later.
    assert models["alpha.network"]["intercept"]["value"] == pytest.approx(1_700, rel=0.01)


@pytest.mark.slow
def test_times_without_a_date_give_none(tmp_path):
    """An experiment of inference-sim counts from its beginning, and its latencies have no time at all."""
    plan = clients.planned(400)
    models_of(tmp_path, **{name: write(plan) for name, write in clients.EXPERIMENT.items()})
    assert "Traced " not in (tmp_path / "out/report.md").read_text()
    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    (server,) = evaluation["ingest"]["servers"]
    assert server["seconds"] == pytest.approx(max(r.sent_s for r in plan) - min(r.sent_s for r in plan), abs=0.01)
    assert "no date, " in inspect_text(inspect([tmp_path / "run"]))


# -- a server's requests and those of its clients ----------------------------------------------------------------


def ingested(tmp_path, **logs):
    """Return the result of an ingest of some logs in one run, and its tables `requests` and `steps`."""
    (tmp_path / "run").mkdir()
    for name, content in logs.items():
        (tmp_path / "run" / name).write_bytes(content)
    result = ingest(tmp_path / "run", tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    return result, store.read("requests"), store.read("steps")


@pytest.mark.slow
@pytest.mark.parametrize("in_one_file", [True, False])
def test_a_benchmark_given_twice_is_read_once(in_one_file, tmp_path):
    plan = clients.planned(100)
    bench = clients.vllm_bench(plan) + b"\n"
    logs = {"a": bench + bench} if in_one_file else {"a": bench, "b": bench}
    result, requests, _ = ingested(tmp_path, server=clients.request_log(plan), **logs)
    assert (requests.height, requests["client_ttft_us"].count()) == (100, 100)
    (one,) = result.runs
    assert (one.requests, one.rejects, one.implausible) == (100, 0, 0)
    assert result.exit_code == 3
    assert any("were there twice and count once" in text for text in result.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("in_one_file", [True, False])
def test_the_benchmarks_of_a_sweep_are_one_load(in_one_file, tmp_path):
    plan = clients.planned(200)
    parts = [clients.vllm_bench(part, clients.date_of(part)) for part in (plan[:80], plan[80:])]
    logs = {"all": b"\n".join(parts)} if in_one_file else dict(zip("ab", parts, strict=True))
    result, requests, steps = ingested(tmp_path, server=clients.request_log(plan), **logs)
    assert (requests.height, requests["network_us"].count()) == (200, 200)
    # The server's spans show the steps: those that a client saw are not needed.
    assert not steps.height
    assert (result.exit_code, result.warnings) == (0, ())


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("in_one_file", [True, False])
def test_a_sweep_without_spans_has_the_steps_of_each_benchmark(in_one_file, tmp_path):
    plan = clients.planned(200)
    parts = [clients.vllm_bench(part, clients.date_of(part)) for part in (plan[:80], plan[80:])]
    logs = {"all": b"\n".join(parts)} if in_one_file else dict(zip("ab", parts, strict=True))
    result, requests, steps = ingested(tmp_path, **logs)
    assert requests.height == 200
    assert steps["epoch"].unique().sort().to_list() == [0, 1]
    assert steps["decode_tokens"].sum() == sum(r.output - 1 for r in plan)
    assert (result.exit_code, result.warnings) == (0, ())


@pytest.mark.slow
def test_requests_of_another_run_are_no_load(tmp_path):
    plan, others = clients.planned(100), clients.planned(100)
    for n, request in enumerate(others):
        sent_s = 0.31 * n + 0.2 * (7 * n % 5)
        request.token_s = [sent_s + token - request.sent_s for token in request.token_s]
        request.sent_s = sent_s
    result, requests, _ = ingested(tmp_path, server=clients.request_log(plan), client=clients.vllm_bench(others))
    assert requests.height == 100
    assert not requests["client_ttft_us"].count()
    (one,) = result.runs
    assert (one.requests, one.implausible, result.exit_code) == (100, 100, 3)
    assert any("100 client requests that match no span: no offset" in text for text in result.warnings)


@pytest.mark.slow
def test_a_few_requests_without_a_span_are_said(tmp_path):
    plan = clients.planned(200)
    server = b"".join(clients.request_log(plan).splitlines(keepends=True)[:-1])
    result, requests, _ = ingested(tmp_path, server=server, client=clients.vllm_bench(plan))
    assert requests.height == 199
    assert result.exit_code == 0
    assert [text for text in result.warnings if text.endswith("1 client requests that match no span were left out")]


@pytest.mark.slow
def test_a_first_token_in_ms_gives_no_times(tmp_path):
    plan = clients.planned(100)
    server = clients.request_log(plan)
    bench = json.loads(clients.vllm_bench(plan))
    bench["ttfts"] = [1e3 * s for s in bench["ttfts"]]
    result, requests, _ = ingested(tmp_path, server=server, client=json.dumps(bench).encode())
    assert requests.height == 100
    assert not requests.select("client_ttft_us", "client_e2e_us", "network_us").sum_horizontal().sum()
    assert result.exit_code == 3
    assert any("100 the client's TTFT is about 1,000 times the server's: is it in ms?" in w for w in result.warnings)
