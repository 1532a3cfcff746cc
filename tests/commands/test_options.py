"""Effects of the options of training, and where they are recorded."""

from __future__ import annotations

import json

import pytest

from tracefit import TrainOptions, ingest, train


@pytest.fixture
def tables(tmp_path, traces):
    """Ingest a busy run whose steps cost less the more requests decode."""
    folder = traces.load(steps=120, requests=60, decode_us=-20).write(tmp_path / "run")
    ingest([folder], tmp_path / "tables")
    return tmp_path / "tables"


@pytest.fixture
def trained_with(tables, tmp_path):
    """Train with options; return models by name, entries by name, and the options the files record."""

    def of(**options):
        train(tables, tmp_path / "models", options=TrainOptions(**options))
        files = [json.loads((tmp_path / "models" / f"{kind}.json").read_text()) for kind in ("alpha", "beta")]
        evaluation = json.loads((tmp_path / "models" / "evaluation.json").read_text())
        models = {m["name"]: m for file in files for m in file["models"]}
        return models, evaluation["deployments"][0]["models"], files[0]["provenance"]["options"]

    return of


def _linear_parts(model):
    """Yield every object of a model that holds an intercept and terms."""
    if isinstance(model, dict):
        if "intercept" in model:
            yield model
        for value in model.values():
            yield from _linear_parts(value)
    elif isinstance(model, list):
        for value in model:
            yield from _linear_parts(value)


@pytest.mark.slow
def test_positive_leaves_no_coefficient_below_zero(trained_with):
    free, _, _ = trained_with(fast=True)
    bound, _, options = trained_with(fast=True, positive=True)
    assert any(t["value"] < 0 for t in free["beta.cycle_time"]["terms"])
    for model in bound.values():
        for part in _linear_parts(model):
            assert part["intercept"]["value"] >= 0
            assert all(t["value"] > 0 for t in part["terms"])
    assert options["positive"] is True


@pytest.mark.slow
def test_fast_skips_the_references_and_keeps_the_baselines(trained_with):
    _, entries, options = trained_with(fast=True)
    assert [e["gradient_boosting"] for e in entries.values()] == [None] * 4
    assert all(e["baseline"]["n"] > 0 for e in entries.values())
    assert options["fast"] is True


@pytest.mark.slow
def test_without_fast_every_model_of_a_feature_has_a_reference(trained_with):
    _, entries, options = trained_with()
    assert all(e["gradient_boosting"]["mae"] > 0 for e in entries.values() if e["n_features"])
    assert any(e["n_features"] for e in entries.values())
    assert (options["fast"], options["positive"]) == (False, False)
