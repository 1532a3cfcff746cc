"""An overloaded run among others: flagged, left out, and kept when asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tracefit import ingest, train
from tracefit.tables.store import TableStore


@pytest.fixture
def trained_on(tmp_path, new_traces, quick):
    """Train on run folders `names`; the client of `given_up` gave up on a fifth of the requests."""

    def of(names, **options):
        for name in names:
            trace = new_traces().load(steps=120, requests=60, seed=len(name))
            for number in range(1000, 1015) if name == "given_up" else ():
                aborted = ("FINISHED", 2e6, 3, {"finish.status": "aborted"})
                trace.core(number, [("QUEUED", 1_100_000, 2), aborted])
            trace.write(tmp_path / "runs" / name)
        ingest([tmp_path / "runs"], tmp_path / "tables")
        result = train(tmp_path / "tables", tmp_path / "models", options=replace(quick, **options))
        assert [REASON in text for text in result.warnings] == [True], "a program reads what a terminal shows"
        deployment = json.loads((tmp_path / "models" / "evaluation.json").read_text())["deployments"][0]
        return deployment, (tmp_path / "models" / "report.md").read_text()

    return of


REASON = "20.0 % of requests failed or were given up"


@pytest.mark.slow
def test_it_is_flagged_and_kept_out_of_the_fit(tmp_path, trained_on):
    deployment, report = trained_on(["fine", "given_up"])
    assert deployment["overloaded"] == [{"run_id": "given_up", "reasons": [REASON], "trained_on": False, "queued": []}]
    assert deployment["runs"] == ["fine"]
    assert REASON in report
    assert "--include-overloaded" in report
    store = TableStore(tmp_path / "tables")
    assert store.read("beta_training", ["given_up"]).height == 0
    assert store.read("beta_training", ["fine"]).height > 100


@pytest.mark.slow
def test_it_is_kept_when_asked_for(trained_on):
    deployment, _ = trained_on(["fine", "given_up"], include_overloaded=True)
    assert deployment["overloaded"][0]["trained_on"] is True
    assert deployment["runs"] == ["fine", "given_up"]


@pytest.mark.slow
def test_the_only_run_of_a_deployment_is_trained_on_and_flagged(trained_on):
    deployment, report = trained_on(["given_up"])
    assert deployment["overloaded"][0]["trained_on"] is True
    assert deployment["models"]["beta.cycle_time"]["holdout"]["n"] > 0
    assert "trained on all the same" in report
