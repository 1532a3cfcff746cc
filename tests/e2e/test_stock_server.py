"""An unmodified server, which sends one span for each request: its latencies are predicted, and its exports made, as
any other's."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest
import yaml

import tracefit
from tracefit.commands.export import export
from tracefit.synth import SynthOptions, synth, write_run

pytestmark = pytest.mark.slow

FLAGS_OF_THE_FORK = re.compile(r"--(enable-)?(step|journey)-tracing|fork of vLLM")
API_WORK_US = 1_450
"""Work of the generator's API process on a request."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("stock")
    run = synth(SynthOptions(name="stock", form="stock", requests=400, abort_fraction=0.0))
    folder = write_run(run, out, formats=("protobuf",))
    options = tracefit.TrainOptions(features="batch", fast=True)
    tracefit.run([folder], out / "run", options=options)
    return out / "run"


def _read(made, name):
    return json.loads((made / name).read_text())


def test_latencies_are_predicted_on_arrival_and_in_hindsight(made):
    (deployment,) = _read(made, "evaluation.json")["deployments"]
    for name in ("ttft", "itl", "e2e"):
        latency = deployment["latency"][name]
        assert latency["predicted"]["n"] >= 100, name
        given = latency["given_measured_state"]
        assert given["n"] >= latency["predicted"]["n"], name
        assert given["mdape_pct"] < 5, name
    assert (
        deployment["latency"]["ttft"]["predicted"]["mdape_pct"] < deployment["latency"]["ttft"]["baseline"]["mdape_pct"]
    )
    assert {r["latency"] for r in deployment["requests"]} == {"ttft", "itl", "e2e"}


def test_api_work_is_separated_from_waiting_for_a_step(made):
    admission = next(m for m in _read(made, "models/alpha.json")["models"] if m["name"] == "alpha.admission")
    assert admission["work"]["intercept"]["value"] == pytest.approx(API_WORK_US, abs=200)
    assert admission["offset"]["value"] > 0
    requests = pl.read_parquet(f"{made}/tables/requests/**/*.parquet")
    assert requests["admission_us"].median() > 2 * API_WORK_US


def test_blis_gets_the_api_work_without_a_wait_and_replays(made, tmp_path):
    result = export(made, "blis", tmp_path)
    written = yaml.safe_load((tmp_path / "defaults.yaml").read_text())["trained_physics_coefficients"]
    assert written["alpha_coeffs"] == [pytest.approx(API_WORK_US, abs=200), 0, 0]
    errors = {e.what: e for e in result.errors}
    assert abs(errors["E2E of a request, replayed"].bias_pct) < 5
    queued = errors["ARRIVED to QUEUED, by alpha0 and the step boundary"]
    assert queued.mae < 0.5 * queued.baseline_mae
    assert any("no request shows when it departs" in note for note in result.notes)


@pytest.mark.parametrize("to", ["llm-d-inference-sim", "dynamo-mocker", "csv"])
def test_other_exports_have_the_errors_of_their_form(made, tmp_path, to):
    result = export(made, to, tmp_path)
    assert result.files
    assert all(e.n > 0 and np.isfinite(e.mae) for e in result.errors)
    assert not FLAGS_OF_THE_FORK.search(" ".join(result.notes))


def test_no_hint_names_flags_that_a_stock_server_refuses(made, tmp_path, tracefit):
    """Of half the requests the steps cannot be counted: every refusal says what an unmodified server can do."""
    half = synth(SynthOptions(name="half", form="stock", requests=200, journey_sampling=0.5))
    folder = write_run(half, tmp_path, formats=("protobuf",))
    seen = [tracefit("inspect", folder)[1:], tracefit("run", folder, "--out", tmp_path / "out")[1:]]
    seen += [
        tracefit("export", tmp_path / "out", "--to", to, "--out", tmp_path / to)[1:]
        for to in ("blis", "llm-d-inference-sim", "dynamo-mocker")
    ]
    text = " ".join(f"{part}" for each in seen for part in each)
    assert not FLAGS_OF_THE_FORK.search(text)
    assert "OTEL_TRACES_SAMPLER=always_on" in " ".join(text.split())
    assert not FLAGS_OF_THE_FORK.search((made / "report.md").read_text())
