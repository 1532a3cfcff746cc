"""A model whose steps take as long whatever is in them."""

from __future__ import annotations

import json

import pytest

from tracefit.replay.plan import Fleet

METRICS = ("n", "mape_pct", "mdape_pct", "mae", "rmse", "r2", "bias_pct", "p90_ape_pct", "p99_ape_pct")


@pytest.fixture
def constant(tmp_path):
    """Return a coefficient file; `training` is the range of the requests that decode, `ci95` that of the step time."""

    def write(training=(0, 8), ci95=None, name="beta.json", feature="num_decode_reqs", **validation):
        term = {"feature": feature, "unit": "us/request", "value": 0.0, "training_range": training}
        model = {
            "name": "beta.cycle_time",
            "deployment_id": "small.gpu.tp1.00000000",
            "form": "linear",
            "intercept": {"value": 1000.0, "ci95": ci95},
            "terms": [term],
            "deployment": {
                "model": "small",
                "gpu": "H100",
                "architecture": {},
                "hardware": {},
                "settings": {
                    "max_num_seqs": 8,
                    "max_num_batched_tokens": 2048,
                    "tensor_parallel": 2,
                    "max_model_len": 4096,
                },
            },
        }
        if validation:
            errors = {**dict.fromkeys(METRICS), "n": 100, "bias_pct": 0.0}
            parts = dict.fromkeys(("train", "holdout", "baseline"), errors)
            facts = {"unit": "us", "n_features": 1, "gradient_boosting": None, "skill": None}
            model["validation"] = {**facts, **parts, **validation}
        beta = {"schema": "tracefit/coefficients", "version": 4, "kind": "beta", "models": [model]}
        (tmp_path / name).write_text(json.dumps(beta))
        return tmp_path / name

    return write


@pytest.fixture
def fewer_requests(monkeypatch, request):
    """Replay a twelfth of the requests, except where percentiles must be close: that is the time which a plan takes."""
    if "truth_at" not in request.fixturenames:
        replay = Fleet._simulate
        monkeypatch.setattr(Fleet, "_simulate", lambda *a: replay(*a[:3], max(150, a[3] // 12)))
