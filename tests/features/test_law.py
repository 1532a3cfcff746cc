"""The names in the law's formulas, on servers with and without experts."""

import json

import polars as pl
import pytest

from tracefit.features.law import LAW_BATCH_COLUMNS, with_law
from tracefit.features.sets import LAW_SET, add_features
from tracefit.server.context import RunContext
from tracefit.server.hardware import find_gpu
from tracefit.server.model_config import parse_architecture
from tracefit.server.settings import settings_from

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
STEP = dict(zip(LAW_BATCH_COLUMNS, (0, 2, 0, 2, 400, None), strict=True))


def _terms(context, **step):
    rows = pl.DataFrame([{**STEP, **step}], schema=dict.fromkeys(LAW_BATCH_COLUMNS, pl.Int64))
    return add_features(with_law(rows, context), LAW_SET, {}).row(0, named=True)


def _server(tp=1, **config):
    settings = settings_from({"tensor_parallel": tp, "max_num_seqs": 8}, where="test")
    model = parse_architecture(json.dumps({**EXPERTS, **config}), where="test")
    return RunContext(settings, model, find_gpu("H100"))


def test_a_step_without_prompts_has_no_launches():
    terms = _terms(_server())
    assert terms["launched_small"] == terms["launched_large"] == terms["prompt_kernels"] == 0
    # Attention runs 7 kernels and experts 8, in each of 4 layers.
    assert terms["kernels"] == 4 * 15


def test_a_step_with_prompts_launches_its_kernels_by_its_tokens():
    small, large = (_terms(_server(), num_prefill_reqs=1, prefill_tokens=n) for n in (510, 511))
    assert (small["launched_small"], small["launched_large"]) == (60, 0)
    assert (large["launched_small"], large["launched_large"]) == (0, 60)


def test_experts_are_read_as_often_as_evenly_chosen_ones_are_met():
    # Of 8 experts 2 tokens miss (3/4)^2 each: 3.5 are read, of 3 x 2048 x 768 numbers of 2 bytes, in 4 layers at 3,350
    # GB/s.
    terms = _terms(_server())
    assert terms["moe_expert_read_us"] == pytest.approx(4 * 3.5 * 3 * 2048 * 768 * 2 / 3350e3, rel=1e-6)
    assert terms["narrow_expert_read_us"] == 0


def test_ranks_wait_for_each_other_twice_a_layer():
    assert _terms(_server())["all_reduces"] == 0
    assert _terms(_server(tp=2))["all_reduces"] == 8


def test_without_a_gpu_the_terms_are_not_known():
    terms = _terms(RunContext(settings_from({}, where="test")))
    assert terms["weight_read_us"] is None
    assert terms["kernels"] is None
