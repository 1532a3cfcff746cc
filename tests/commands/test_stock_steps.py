"""A server that nobody instrumented: what `run` and `inspect` make of one span per request."""

from __future__ import annotations

import json
import re

import polars as pl
import pytest

from stock import stock_requests, write_stock
from tracefit.engines import training
from tracefit.synth import SynthOptions, synth
from tracefit.synth.options import LoadPhase
from tracefit.timeline import request_steps


@pytest.fixture(scope="module")
def generated():
    """Return a generated run with a load that rises."""
    phases = (LoadPhase("light", 0.4, 0.6), LoadPhase("heavy", 0.6, 1.3))
    return synth(SynthOptions(rate_per_s=12.0, requests=400, seed=4, phases=phases, abort_fraction=0.0))


@pytest.fixture(scope="module")
def requests(generated):
    """Return its requests as stock spans have them."""
    return stock_requests(generated)


def _run(tracefit, folder, requests):
    write_stock(requests, folder / "stock")
    code, out, _ = tracefit("run", folder / "stock", "--out", folder / "out", "--json")
    return code, json.loads(out)


def _beta(folder):
    models = json.loads((folder / "out" / "models" / "beta.json").read_text())["models"]
    return {m["name"]: m for m in models}.get("beta.cycle_time")


@pytest.mark.slow
def test_spans_of_requests_give_step_time_and_queue_wait(tracefit, tmp_path, generated, requests):
    code, result = _run(tracefit, tmp_path, requests)
    assert code == 0
    fitted = {m["name"]: m for m in result["trained"]["fitted"]}
    assert fitted["beta.cycle_time"]["of_means"]
    assert not fitted["alpha.queue_wait"]["of_means"]
    deployment = json.loads((tmp_path / "out" / "evaluation.json").read_text())["deployments"][0]
    steps = deployment["models"]["beta.cycle_time"]
    assert set(steps["rows_by_source"]) == {"request"}
    assert steps["holdout"]["n"] > 100
    assert deployment["models"]["alpha.queue_wait"]["holdout"]["n"] > 100
    # Training saw only sums: no error is said to be that of a single step.
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Mean step times are typically within" in page
    assert "| mean step time |" in page
    assert "points means of several steps" in page
    assert not re.search(r"\| step time \||\*\*Step times are typically|[^n] step times are off|single steps", page)
    # Against the law that made the steps, at a decode batch of eight with 300 tokens of context each.
    beta = _beta(tmp_path)
    batch = {
        "num_decode_reqs": 8,
        "decode_tokens": 8,
        "context_tokens": 2400,
        "running_depth": 8,
        "scheduled_tokens": 8,
    }
    said = beta["intercept"]["value"] + sum(t["value"] * batch.get(t["feature"], 0) for t in beta["terms"])
    law = generated.law
    true = law.intercept_us + 8 * law.per_decode_req_us + 2400 * law.per_context_token_us
    assert said == pytest.approx(true, rel=0.03)


@pytest.mark.slow
def test_every_request_keeps_its_row_across_windows(tracefit, tmp_path, requests, monkeypatch):
    """Four windows of 50, at fifths of the recording; the other requests stay as they were."""
    monkeypatch.setattr(request_steps, "_STEP_WINDOWS", 4)
    monkeypatch.setattr(request_steps, "_WINDOW_REQUESTS", 50)
    monkeypatch.setattr(request_steps, "MOST_PLACED", 200)
    monkeypatch.setattr(training, "MOST_PLACED", 200)
    write_stock(requests, tmp_path / "stock")
    folder = tmp_path / "tables"
    assert tracefit("ingest", tmp_path / "stock", "--out", folder, "--workers", "1")[0] == 0
    found = pl.read_parquet(next((folder / "requests").rglob("*.parquet")))
    both = requests.join(found, on="trace_id", suffix="_found")
    assert both.height == found.height == requests.height
    for name in ("prompt_tokens", "output_tokens", "e2e_us", "queue_wait_us"):
        assert both[f"{name}_found"].to_list() == pytest.approx(both[name].to_list(), abs=1e-3)
    placed = both.filter(pl.col("first_token_step_found").is_not_null())
    assert placed.height == 200
    # Every output token but the first takes a step.
    assert (placed["finished_step_found"] - placed["first_token_step_found"]).to_list() == (
        placed["output_tokens"] - 1
    ).to_list()
    assert tracefit("train", folder, "--out", tmp_path / "models", "--fast")[0] in (0, 1)
    beta = tmp_path / "models" / "beta.json"
    assert "200 of 400 requests are placed on steps" in beta.read_text()
