"""Known coefficients: the truth's cycle times say them back, and the presets are what they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tracefit.synth import GPUS, MODELS, Composition, LinearLaw, RooflineLaw, SynthOptions, synth

_FEATURES = ("computed_tokens", "num_decode_reqs", "context_tokens", "num_prefill_reqs")


def _busy_steps(run):
    steps = run.truth_steps
    return steps.filter(steps["scheduled_tokens"] > 0)


def _design(steps):
    columns = [
        np.ones(steps.height),
        (steps["prefill_tokens"] + steps["recompute_tokens"]).to_numpy(),
        *(steps[name].to_numpy() for name in _FEATURES[1:]),
    ]
    return np.column_stack(columns).astype(float)


def test_linear_coefficients_come_back_exactly_without_noise(busy_options):
    law = LinearLaw(6_000.0, 31.0, 17.0, 0.005, 55.0)
    steps = _busy_steps(synth(replace(busy_options, law=law, noise=0.0, rich_sampling=0.0)))
    found, *_ = np.linalg.lstsq(_design(steps), steps["cycle_us"].to_numpy(), rcond=None)
    assert found == pytest.approx([6_000.0, 31.0, 17.0, 0.005, 55.0], rel=1e-3)


@pytest.mark.slow
def test_linear_coefficients_come_back_within_the_noise(busy_run):
    steps = _busy_steps(busy_run)
    x, y = _design(steps), steps["cycle_us"].to_numpy()
    x_relative = x / y[:, None]
    found, *_ = np.linalg.lstsq(x_relative, np.ones(len(y)), rcond=None)
    truth = np.array([7_000.0, 26.0, 15.0, 0.003, 40.0])
    deviation = 0.03 * np.sqrt(np.diag(np.linalg.inv(x_relative.T @ x_relative)))
    assert (np.abs(found - truth) < 4 * deviation).all()
    assert (4 * deviation[:2] < 0.03 * truth[:2]).all()
    errors = np.abs(x @ found / y - 1)
    assert np.median(errors) == pytest.approx(0.6745 * 0.03, rel=0.15)


@pytest.mark.slow
def test_noise_is_a_factor_around_the_law(busy_run):
    steps = _busy_steps(busy_run)
    logs = np.log(steps["cycle_us"].to_numpy() / steps["law_us"].to_numpy())
    assert logs.std() == pytest.approx(0.03, rel=0.1)
    assert abs(logs.mean()) < 0.005
    assert not steps["is_hiccup"].any()


def test_hiccups_are_rare_long_and_marked(busy_options):
    run = synth(replace(busy_options, noise=0.0, hiccup_rate=0.02, rich_sampling=0.0))
    delay_us = (run.truth_steps["cycle_us"] - run.truth_steps["law_us"]).to_numpy()
    is_hiccup = run.truth_steps["is_hiccup"].to_numpy()
    assert 0.01 < is_hiccup.mean() < 0.035
    assert (delay_us[is_hiccup] > 0).all()
    assert np.abs(delay_us[~is_hiccup]).max() < 0.001
    assert delay_us[is_hiccup].mean() == pytest.approx(30_000, rel=0.5)


@pytest.mark.slow
def test_an_empty_step_takes_the_time_of_its_option(busy_options):
    run = synth(replace(busy_options, noise=0.0, empty_step_us=300.0, rich_sampling=0.0))
    empty = run.truth_steps.filter(run.truth_steps["scheduled_tokens"] == 0)
    assert empty.height > 5
    assert set(empty["law_us"]) == {300.0}


@pytest.mark.slow
def test_truth_has_the_law_of_its_composition(busy_run):
    for row in _busy_steps(busy_run).head(200).iter_rows(named=True):
        step = Composition(
            num_prefill_reqs=row["num_prefill_reqs"],
            num_decode_reqs=row["num_decode_reqs"],
            prefill_tokens=row["prefill_tokens"],
            decode_tokens=row["decode_tokens"],
            context_tokens=row["context_tokens"],
        )
        assert row["law_us"] == pytest.approx(busy_run.law.step_us(step))


def test_linear_law_charges_recomputed_tokens_as_prompt_tokens():
    law = LinearLaw(1_000.0, 10.0, 5.0, 0.5, 3.0, 0.25)
    resumed = Composition(num_decode_reqs=2, decode_tokens=102, context_tokens=40)
    assert law.step_us(resumed) == 1_000 + 10 * 100 + 5 * 2 + 0.5 * 40
    prefill = Composition(num_prefill_reqs=1, prefill_tokens=7, prefill_context_tokens=8)
    assert law.step_us(prefill) == 1_000 + 10 * 7 + 3 + 0.25 * 8


def test_a_custom_law_is_used():
    class Constant:
        def step_us(self, step):
            return 5_000.0

    run = synth(SynthOptions(requests=10, law=Constant(), noise=0.0))
    assert set(_busy_steps(run)["cycle_us"]) == {5_000.0}


def _roofline(model="llama-8b", **kwargs):
    return RooflineLaw(MODELS[model], GPUS["H100"], **kwargs)


def _decode(num_reqs, *, context_tokens=0):
    return Composition(num_decode_reqs=num_reqs, decode_tokens=num_reqs, context_tokens=context_tokens)


def _prefill(tokens):
    pairs = tokens * (tokens + 1) // 2
    return Composition(num_prefill_reqs=1, prefill_tokens=tokens, attention_pairs=pairs)


def test_roofline_binds_decode_by_memory_and_prefill_by_compute():
    law = _roofline()
    few, many = _decode(4), _prefill(2_048)
    assert law.memory_us(few) > 5 * law.compute_us(few)
    assert law.compute_us(many) > 2 * law.memory_us(many)
    assert law.step_us(few) == pytest.approx(law.memory_us(few) + 1_200 + 4 * 8)
    assert law.step_us(many) == pytest.approx(law.compute_us(many) + 1_200 + 8)


def test_roofline_reads_all_weights_and_the_cache():
    law = _roofline(memory_efficiency=1.0)
    # 8.03 billion weights less the embedding table, two bytes each, at 3,350 GB/s.
    assert law.memory_us(_decode(1)) == pytest.approx(2 * 7.505e9 / 3_350e3, rel=0.002)
    more_us = law.memory_us(_decode(1, context_tokens=100_000)) - law.memory_us(_decode(1))
    assert more_us == pytest.approx(100_000 * 2 * 32 * 8 * 128 * 2 / 3_350e3)


def test_roofline_counts_the_work_of_a_prompt():
    law = _roofline(compute_efficiency=1.0)
    linear = 2 * 32 * (4_096 * 128 * 80 + 3 * 4_096 * 14_336) * 1_000
    attention = 4 * 32 * 32 * 128 * 1_000 * 1_001 / 2
    head = 2 * 4_096 * 128_256
    assert law.compute_us(_prefill(1_000)) == pytest.approx((linear + attention + head) / 989.5e6)
    # One decode token meets its context and itself.
    grown = law.compute_us(_decode(1, context_tokens=999)) - law.compute_us(_decode(1))
    assert grown == pytest.approx(4 * 32 * 32 * 128 * 999 / 989.5e6)


def test_tensor_parallelism_divides_all_but_the_all_reduce():
    one, four = _roofline("llama-70b"), _roofline("llama-70b", tp=4)
    step = _decode(16, context_tokens=8_000)
    assert four.memory_us(step) == pytest.approx(one.memory_us(step) / 4)
    assert one.allreduce_us(step) == 0
    assert four.allreduce_us(step) == pytest.approx(160 * (9.0 + 1.5 * 16 * 8_192 * 2 / 900e3))
    assert four.step_us(step) > one.memory_us(step) / 4 + four.allreduce_us(step)


def test_experts_are_read_as_tokens_reach_them():
    moe = MODELS["qwen-moe-30b"]
    law = _roofline("qwen-moe-30b")
    assert moe.touched_layer_params(1) == pytest.approx(moe.active_layer_params)
    assert moe.touched_layer_params(500) == pytest.approx(29.9e9, rel=0.02)
    assert law.memory_us(_decode(64)) > 5 * law.memory_us(_decode(1))


def test_a_linear_model_cannot_hold_the_roofline():
    options = SynthOptions(requests=150, rate_per_s=40.0, law="roofline", noise=0.0, seed=5)
    steps = _busy_steps(synth(options))
    x, y = _design(steps), steps["cycle_us"].to_numpy()
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    assert np.abs(x @ found / y - 1).max() > 0.05


@pytest.mark.parametrize(
    ("name", "total_params"),
    [("llama-8b", 8.03e9), ("llama-70b", 68.98e9), ("qwen-moe-30b", 30.5e9), ("tiny", 31.0e6)],
)
def test_model_sizes(name, total_params):
    model = MODELS[name]
    tables = 2 * model.hidden_size * model.vocab_size
    assert model.touched_layer_params(10**6) + tables == pytest.approx(total_params, rel=0.02)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_model_configs_are_hugging_face_style(model):
    config = model.config()
    assert config["architectures"] == [model.architecture]
    assert config["head_dim"] == model.head_dim
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["torch_dtype"] == "bfloat16"
    assert ("num_experts" in config) == (model.num_experts > 0)


def test_models_are_of_several_families():
    assert len({model.model_type for model in MODELS.values()}) == 3
    assert MODELS["qwen-moe-30b"].config()["num_experts_per_tok"] == 8
    # Its heads are wider than hidden size over heads.
    assert MODELS["qwen-moe-30b"].head_dim == 128 != 2_048 // 32


@pytest.mark.parametrize(("name", "size"), [("llama-8b", 131_072), ("llama-70b", 327_680), ("qwen-moe-30b", 98_304)])
def test_kv_bytes_per_token(name, size):
    assert MODELS[name].kv_bytes_per_token == size
