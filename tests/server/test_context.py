"""The server of a run: its settings, and a GPU whose name counts several."""

from __future__ import annotations

import json

import pytest

from tracefit.server.context import context_from_json, deployment_of, gpu_to_json, read_context
from tracefit.server.settings import settings_from, settings_to_json

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def context(model_config=None, **stated):
    return read_context((), model_config, settings_from(stated, where="run.yaml", source="read"))


@pytest.mark.parametrize(
    ("stated", "tensor_parallel", "said"),
    [
        (
            {"gpu": "8xH100"},
            8,
            ("8xH100 is 8 GPUs, and no setting divides the model: tensor_parallel 8 is taken",),
        ),
        ({"gpu": "H100"}, 1, ()),
        ({"gpu": "8xH100", "tp": 2}, 2, ()),
        ({"gpu": "8xH100", "dp": 8}, 1, ()),
    ],
)
def test_a_count_of_gpus_is_the_tensor_parallelism_that_nothing_states(stated, tensor_parallel, said):
    found = context(**stated)

    assert found.gpu.name == "H100-SXM"
    assert found.settings.tensor_parallel == tensor_parallel
    assert found.left_out == said


def test_a_count_that_the_model_cannot_be_divided_by_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    found = context(tmp_path / "config.json", gpu="8xH100")

    assert found.settings.tensor_parallel == 1
    assert found.left_out == ("8xH100 is 8 GPUs, and no setting divides the model: state tensor_parallel",)
    assert context(tmp_path / "config.json", gpu="4xH100").settings.tensor_parallel == 4


def test_a_stored_gpu_without_an_fp4_rate_is_the_one_of_the_catalogue():
    found = context(gpu="B200")
    stored = {k: v for k, v in json.loads(gpu_to_json(found.gpu)).items() if k != "compute_tflops_fp4"}
    again = context_from_json(settings_to_json(found.settings), None, json.dumps(stored), where="runs")

    assert again.gpu == found.gpu
    assert deployment_of(again).deployment_id == deployment_of(found).deployment_id


def test_a_slice_is_stored_and_restored():
    found = context(gpu="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    again = context_from_json(settings_to_json(found.settings), None, gpu_to_json(found.gpu), where="runs")

    assert again.gpu == found.gpu
    assert deployment_of(found).deployment_id.startswith("unknown-model.h100-sxm-mig-1g-10gb.tp1.")
