"""Shared by the tests of coefficient files: small files written by hand."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from tracefit.evaluator import _terms_of

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 100, "num_gpu_blocks": 101, "block_size": 10}


def _metrics(p90):
    names = ("mape_pct", "mdape_pct", "mae", "rmse", "r2", "bias_pct", "p99_ape_pct")
    return {"n": 50, **dict.fromkeys(names), "p90_ape_pct": p90}


def validation(p90, **by):
    """Return a validation whose held-out 90th percentile is `p90`, and of some rows another."""
    held = {name: _metrics(p90) for name in ("train", "holdout", "baseline")}
    groups = {name: _metrics(value) for name, value in by.items()}
    return {
        "unit": "us",
        "n_features": 0,
        **held,
        "gradient_boosting": None,
        "by_group": groups,
        "skill": None,
    }


def term(feature, value, training_range=(0, 1e6), **more):
    """Return a term."""
    return {"feature": feature, "unit": "us", "value": value, "training_range": list(training_range), **more}


STEP = {
    "name": "beta.cycle_time",
    "form": "linear",
    "deployment_id": "small.gpu.tp1.00000000",
    "intercept": {"value": 1000.0},
    "terms": [
        term("prefill_tokens", 10.0, (0, 60)),
        term("num_decode_reqs", 50.0, (0, 6)),
        term("context_tokens", 0.5),
        term("prefill_share", 100.0, (0, 1), formula="prefill_tokens / (prefill_tokens + decode_tokens)"),
    ],
    "validation": validation(20.0, mixed=60.0),
    "deployment": {"model": "small", "gpu": "gpu", "architecture": {}, "hardware": {}, "settings": SETTINGS},
}
ADMISSION = {
    "name": "alpha.admission",
    "form": "boundary",
    "deployment_id": "small.gpu.tp1.00000000",
    "boundary": "step_start",
    "work": {"intercept": {"value": 300.0}, "terms": [term("prompt_tokens", 2.0)]},
    "offset": {"value": -20.0},
    "without_clock": {"form": "linear", "intercept": {"value": 1500.0}, "terms": []},
}
WAIT = {
    "name": "alpha.queue_wait",
    "form": "regimes",
    "deployment_id": "small.gpu.tp1.00000000",
    "regimes": [
        {
            "name": "queued",
            "when": {
                "any": [
                    {"feature": "free_slots", "op": "<=", "value": 0.0},
                    {"feature": "block_demand", "op": ">", "feature2": "kv_blocks_free"},
                ]
            },
            "intercept": {"value": 5000.0},
            "terms": [term("outputs_ahead", 100.0)],
        },
        {"name": "free", "when": {"all": []}, "intercept": {"value": 70.0}, "terms": []},
    ],
}
DEPARTURE = {
    "name": "alpha.departure",
    "form": "linear",
    "deployment_id": "small.gpu.tp1.00000000",
    "intercept": {"value": 200.0},
    "terms": [term("batch_requests", 30.0, formula="num_prefill_reqs + num_decode_reqs")],
}


def document(kind, *models):
    """Return a coefficient file's content; models that a test gave other terms state as many."""
    models = [
        model | {"validation": model["validation"] | {"n_features": len(_terms_of(model))}}
        if model.get("validation")
        else model
        for model in models
    ]
    return {"schema": "tracefit/coefficients", "version": 4, "kind": kind, "models": models}


@pytest.fixture
def small(tmp_path):
    """Return a folder with the files of one small server."""
    (tmp_path / "beta.json").write_text(json.dumps(document("beta", STEP)))
    (tmp_path / "alpha.json").write_text(json.dumps(document("alpha", ADMISSION, WAIT, DEPARTURE)))
    return tmp_path


@pytest.fixture
def parts():
    """Return the models of the small server by short name, to make other files of."""
    return deepcopy({"step": STEP, "admission": ADMISSION, "wait": WAIT, "departure": DEPARTURE})


@pytest.fixture
def write(small):
    """Return a function that puts models in place of those of a file of the small server."""

    def to_file(kind, *models):
        (small / f"{kind}.json").write_text(json.dumps(document(kind, *models)))

    return to_file
