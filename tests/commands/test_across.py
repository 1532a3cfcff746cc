"""Leaving out runs, models and GPUs in turn."""

from __future__ import annotations

import json

import pytest

from tracefit import TrainOptions, ingest, train
from tracefit.models.targets import TARGETS
from tracefit.synth import SynthOptions, synth, write_run


@pytest.fixture
def evaluation_of(tmp_path):
    """Train on the run folders below `runs` and return the evaluation and the report."""

    def of(**options):
        ingest([tmp_path / "runs"], tmp_path / "tables")
        train(tmp_path / "tables", tmp_path / "models", options=TrainOptions(fast=True, **options))
        evaluation = json.loads((tmp_path / "models" / "evaluation.json").read_text())
        # A long report is a summary, and its sections are files beside it.
        pages = [tmp_path / "models/report.md", *sorted((tmp_path / "models/report").glob("*.md"))]
        return evaluation, "\n".join(page.read_text() for page in pages)

    return of


@pytest.mark.slow
def test_a_run_is_predicted_by_the_other_and_on_all_of_its_rows(tmp_path, new_traces, evaluation_of):
    """A step of run b costs 500 us more per request that decodes (15 on average) than one of run a.

    Of 240 steps 239 have a time; the run's own training part loses the first 20 of them to warm-up.
    """
    for name, decode_us in (("a", 50), ("b", 550)):
        new_traces().load(decode_us=decode_us, seed=ord(name)).write(tmp_path / "runs" / name)
    evaluation, report = evaluation_of(across=True, features="batch")
    found = {(e["left_out"], e["model"]): e for e in evaluation["across"]}
    models = {"beta.cycle_time", *(target.model for target in TARGETS)}
    assert found.keys() == {(run, model) for run in "ab" for model in models}
    for run, other, bias in (("a", "b", 7500), ("b", "a", -7500)):
        entry = found[run, "beta.cycle_time"]
        assert (entry["kind"], entry["trained_on"], entry["errors"]["n"]) == ("run", [other], 239)
        assert entry["errors"]["mae"] == pytest.approx(abs(bias), rel=0.1)
        assert entry["errors"]["bias_pct"] * bias > 0
    assert "run `a` | `beta.cycle_time`" in report


@pytest.mark.slow
def test_a_part_that_cannot_be_left_out_is_a_note(tmp_path, traces, evaluation_of):
    traces.load(steps=120, requests=0).write(tmp_path / "runs" / "alone")
    evaluation, report = evaluation_of(across=True, features="batch")
    assert evaluation["across"] == []
    notes = "\n".join(evaluation["across_notes"])
    assert "leave-one-run-out: no deployment has two runs" in notes
    assert "no GPU" in notes
    assert "leave-one-model-out: the data have none, two are needed" in notes
    assert "- Note: leave-one-run-out" in report


@pytest.mark.slow
def test_without_asking_nothing_is_left_out(tmp_path, traces, evaluation_of):
    traces.load(steps=120, requests=0).write(tmp_path / "runs" / "alone")
    evaluation, report = evaluation_of(features="batch")
    assert (evaluation["across"], evaluation["across_notes"]) == ([], [])
    assert "Across" not in report


@pytest.mark.slow
def test_step_times_of_an_unknown_model_are_within_15_percent(tmp_path, evaluation_of):
    """Four architectures, one of experts, under the roofline law: the larger of compute and memory time."""
    models = (("tiny", 1), ("llama-8b", 1), ("llama-70b", 4), ("qwen-moe-30b", 1))
    for seed, (model, tp) in enumerate(models):
        options = SynthOptions(name=model, seed=seed, law="roofline", model=model, tp=tp, requests=40)
        write_run(synth(options), tmp_path / "runs")
    evaluation, _ = evaluation_of(across=True, features="roofline")
    errors = {e["left_out"]: e["errors"]["mape_pct"] for e in evaluation["across"]}
    assert len(errors) == 4
    assert max(errors.values()) <= 15, errors
    assert all(e["kind"] == "model" and len(e["trained_on"]) == 3 for e in evaluation["across"])


def _on(gpus, models, folder):
    """Write a run of every model on every GPU, under the roofline law."""
    for seed, (gpu, (model, tp)) in enumerate((g, m) for g in gpus for m in models):
        named = {"name": f"{gpu}-{model}", "model": model, "gpu": gpu, "tp": tp}
        write_run(synth(SynthOptions(seed=seed, law="roofline", requests=12, **named)), folder)


@pytest.mark.slow
def test_step_times_on_an_unseen_gpu_are_within_15_percent(tmp_path, evaluation_of):
    """Memory of an H100 is 1.6 times, its arithmetic 3.2 times as fast as an A100's: no line in the batch knows
    that."""
    _on(("A100", "H100"), (("llama-8b", 1), ("llama-70b", 4)), tmp_path / "runs")
    evaluation, report = evaluation_of(across=True, features="roofline")
    found = {e["left_out"]: e for e in evaluation["across"] if e["kind"] == "gpu"}
    assert {name: e["trained_on"] for name, e in found.items()} == {
        "a100-80gb-sxm": ["h100-sxm"],
        "h100-sxm": ["a100-80gb-sxm"],
    }
    for name, entry in found.items():
        assert entry["errors"]["mape_pct"] <= 15
        assert entry["baseline"]["mape_pct"] > 30
        assert f"`{name}`" in report
    assert not any("GPU" in note for note in evaluation["across_notes"])


@pytest.mark.slow
def test_one_model_cannot_separate_weights_from_a_constant(tmp_path, evaluation_of):
    _on(("A100", "H100"), (("llama-8b", 1),), tmp_path / "runs")
    evaluation, report = evaluation_of(across=True, features="roofline")
    assert {e["left_out"] for e in evaluation["across"]} == {"a100-80gb-sxm", "h100-sxm"}
    for gpu in ("a100-80gb-sxm", "h100-sxm"):
        assert f"leave-one-GPU-out, {gpu}: the rest is one deployment" in "\n".join(evaluation["across_notes"])
    assert "the rest is one deployment, which cannot separate reading the weights from a constant" in report


@pytest.mark.slow
def test_deployments_of_one_model_on_one_gpu_predict_each_other(tmp_path, evaluation_of):
    """The error of a constant per batch size is beside each, by an independent path: what steps of the other deployment
    took."""
    for tp in (1, 4):
        options = SynthOptions(name=f"tp{tp}", seed=tp, law="roofline", model="llama-8b", tp=tp, requests=40)
        write_run(synth(options), tmp_path / "runs")
    evaluation, report = evaluation_of(across=True, features="roofline")
    first, second = evaluation["across"]
    assert (first["kind"], second["kind"]) == ("deployment", "deployment")
    assert (first["trained_on"], second["trained_on"]) == ([second["left_out"]], [first["left_out"]])
    # Four GPUs are quicker than one: a table of past steps is too slow one way, and too quick the other.
    assert min(e["by_batch_size"]["mape_pct"] for e in (first, second)) > 20
    biases = [e["by_batch_size"]["bias_pct"] for e in (first, second)]
    assert min(biases) < 0 < max(biases)
    assert "constant per batch size" in report
