"""Steps that contradict the rated speed of the GPU, or the settings."""

from __future__ import annotations

import json

import polars as pl
import pytest

import tracefit
from recorded import json_lines, record
from tracefit.options import ServerOptions, TrainOptions

# A token takes 2·(4·512² + 3·512·2048)·8 = 67 MFLOP, so that 1,000 take 67 ms on 1 TFLOP/s.
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}
GPU = {"compute_tflops_fp16": 1, "memory_bandwidth_gb_s": 1000, "memory_gb": 8}
STEPS, FAST = 400, 7


def trained(tmp_path, *, fast=(), gpu=True, **settings):
    """Train on steps of 1 to 8 prompts of 125 tokens, which take 100 us a token; the `fast` ones take 2 ms."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    records = [
        record(
            step,
            0.002 if step in fast else 0.001 + 0.0125 * (1 + step % 8),
            num_prefill_requests=1 + step % 8,
            sum_prefill_tokens=125 * (1 + step % 8),
        )
        for step in range(STEPS)
    ]
    (folder / "steps.jsonl").write_bytes(b"".join(json_lines(records)))
    (folder / "run.yaml").write_text(json.dumps({"model": "m", **settings}))
    (folder / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    server = ServerOptions(gpu=str(tmp_path / "gpu.json") if gpu else None)
    return tracefit.run([folder], tmp_path / "out", server=server, options=TrainOptions(fast=True, features="batch"))


@pytest.mark.slow
def test_steps_faster_than_the_gpu_are_left_out_counted_and_said(tmp_path):
    # Every eighth step has 1,000 tokens: 2 ms are a thirtieth of what the GPU needs.
    fast = set(range(7, 7 + 8 * FAST, 8))
    result = trained(tmp_path, fast=fast)

    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    (entry,) = evaluation["deployments"]
    assert entry["exclusions"]["beta.cycle_time"]["faster_than_gpu"] == FAST
    rows = pl.read_parquet(tmp_path / "out/tables/beta_training/**/*.parquet")
    assert set(rows.filter(excluded_reason="faster_than_gpu")["step_id"]) == fast
    assert result.trained.exit_code == 3
    (said,) = [text for text in result.trained.warnings if "faster_than_gpu" in text]
    assert f"{FAST} of {STEPS} step times are shorter than the rated speed of gpu allows" in said


@pytest.mark.slow
def test_a_few_are_only_counted(tmp_path):
    result = trained(tmp_path, fast=range(7, 7 + 8 * 3, 8))

    (entry,) = json.loads((tmp_path / "out/evaluation.json").read_text())["deployments"]
    assert entry["exclusions"]["beta.cycle_time"]["faster_than_gpu"] == 3
    assert (result.trained.exit_code, result.trained.warnings) == (0, ())


@pytest.mark.slow
def test_where_most_are_faster_the_settings_are_wrong_and_the_steps_count(tmp_path):
    result = trained(tmp_path, fast=[step for step in range(STEPS) if step % 4])

    (entry,) = json.loads((tmp_path / "out/evaluation.json").read_text())["deployments"]
    assert "faster_than_gpu" not in entry["exclusions"]["beta.cycle_time"]
    (said,) = [text for text in result.trained.warnings if "rated speed" in text]
    assert "75% of the step times are shorter than the rated speed of gpu allows" in said


@pytest.mark.slow
def test_without_a_gpu_or_fast_steps_nothing_is_left_out(tmp_path):
    for name, fast, gpu in (("a", (), True), ("b", (7, 15), False)):
        result = trained(tmp_path / name, fast=fast, gpu=gpu)

        assert "faster_than_gpu" not in (tmp_path / name / "out/evaluation.json").read_text()
        assert not [text for text in result.trained.warnings if "faster_than_gpu" in text]


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("stated", "seen"), [(512, 1000), (2048, None), (None, None)])
def test_steps_win_over_settings_that_they_contradict(tmp_path, stated, seen):
    result = trained(tmp_path, max_num_seqs=8, **({} if stated is None else {"max_num_batched_tokens": stated}))

    (summary,) = result.trained.deployments
    assert summary.settings.get("max_num_batched_tokens") == (str(seen or stated) if seen or stated else None)
    said = [text for text in result.trained.warnings if "what is seen counts" in text]
    assert len(said) == (seen is not None)
    if seen:
        assert "a step has 1,000 tokens, and the settings say max_num_batched_tokens 512" in said[0]
