"""Runs in the form of ForwardPassMetrics: the records' times and batches beside the truth, and the model fitted on
them."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import polars as pl
import pytest

import tracefit
from tracefit.errors import UsageError
from tracefit.synth import LinearLaw, SynthOptions, synth, write_run

LAW = LinearLaw(
    intercept_us=7_000.0,
    per_prefill_token_us=26.0,
    per_decode_req_us=15.0,
    per_context_token_us=0.0,
    per_prefill_req_us=400.0,
)
TRUTH = {"prefill_tokens": 26.0, "num_decode_reqs": 15.0, "num_prefill_reqs": 400.0}
FEATURES = """
name: planted
features:
  - {name: prefill_tokens, unit: token, formula: prefill_tokens}
  - {name: num_prefill_reqs, unit: request, formula: num_prefill_reqs}
  - {name: num_decode_reqs, unit: request, formula: num_decode_reqs}
"""


def written(folder, **options):
    """Write a run; return the records of each worker, in order, and the truth."""
    run = synth(SynthOptions(form="fpm", **options))
    lines = (write_run(run, folder) / "fpm.jsonl").read_bytes().splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["received_at_ns"] for one in found] == sorted(one["received_at_ns"] for one in found)
    by_worker: dict[str, list] = {}
    for one in found:
        by_worker.setdefault(one["metrics"]["worker_id"], []).append(one)
    return by_worker, run.truth_steps


@pytest.mark.slow
def test_every_step_with_tokens_has_a_record_of_batch_and_time(tmp_path):
    by_worker, truth = written(tmp_path, seed=3, requests=30, rate_per_s=1.0, servers=2)
    assert len(by_worker) == 2
    for number, records in enumerate(by_worker[name] for name in sorted(by_worker)):
        metrics = [one["metrics"] for one in records]
        assert [m["counter_id"] for m in metrics] == list(range(len(metrics)))
        steps = truth.filter((pl.col("server") == number) & (pl.col("scheduled_tokens") > 0))
        # The first step, and one after an empty step (the ids show a gap), has only its own time.
        follows = steps["step_id"].diff().fill_null(0).to_list()
        timed = [m for m in metrics if m["wall_time"]]
        assert len(timed) == steps.height
        for step, is_next, one in zip(steps.iter_rows(named=True), follows, timed, strict=True):
            batch = one["scheduled_requests"]
            assert [batch["sum_prefill_tokens"], batch["num_decode_requests"]] == [
                step["prefill_tokens"],
                step["num_decode_reqs"],
            ]
            assert batch["sum_decode_kv_tokens"] == step["context_tokens"]
            wall_us = one["wall_time"] * 1e6
            if is_next == 1:
                # Outputs come within a quarter of a millisecond of the end of a cycle.
                assert wall_us == pytest.approx(step["cycle_us"], abs=250)
            else:
                assert step["cycle_us"] - step["schedule_us"] - 250 < wall_us < step["cycle_us"]


def test_an_idle_second_brings_a_heartbeat(tmp_path):
    (records,) = written(tmp_path, seed=3, requests=20, rate_per_s=0.3)[0].values()
    beats = [one["metrics"] for one in records if not one["metrics"]["wall_time"]]
    assert len(beats) > 10
    assert all(not any(m["scheduled_requests"].values()) and m["worker_id"] == "worker-0" for m in beats)
    for one, following in pairwise(records):
        assert following["received_at_ns"] - one["received_at_ns"] <= 1_000_000_000


def test_fpm_has_no_tracing_settings_and_no_protobuf(tmp_path):
    run = synth(SynthOptions(form="fpm", requests=5))
    folder = write_run(run, tmp_path, compress="gz")
    assert gzip.decompress((folder / "fpm.jsonl.gz").read_bytes()).startswith(b'{"received_at_ns":')
    assert "tracing" not in (folder / "exp-config.yaml").read_text()
    with pytest.raises(UsageError, match="only as lines"):
        write_run(run, tmp_path, formats=("protobuf",))


@pytest.mark.slow
def test_planted_coefficients_are_recovered_from_recorded_steps(tmp_path):
    run = synth(SynthOptions(name="planted", form="fpm", seed=21, requests=400, law=LAW))
    folder = write_run(run, tmp_path / "runs")
    declared = tmp_path / "planted.yaml"
    declared.write_text(FEATURES)
    result = tracefit.run([folder], tmp_path / "out", options=tracefit.TrainOptions(features=str(declared)))
    assert result.ingested.runs[0].lost_steps == 0
    model = json.loads((tmp_path / "out/models/beta.json").read_text())["models"][0]
    found = {term["feature"]: term for term in model["terms"]}
    assert found.keys() == TRUTH.keys()
    for name, truth in TRUTH.items():
        low, high = found[name]["ci95"]
        assert abs(found[name]["value"] - truth) <= 2 * (high - low) / 2, name
        assert high - low < 1.5 * truth, f"{name}: an interval this wide finds nothing"
    assert model["intercept"]["value"] == pytest.approx(7_000.0, rel=0.005)
