"""Parameter counts and KV sizes of published models, from the keys their configs hold."""

from __future__ import annotations

import pytest

# Parameters as reported by each model's authors or counted from its released weights (text decoder); layers; KV
# elements per token and layer.
MODELS = {
    "chatglm3-6b": (6_243_584_000, 28, 2 * 2 * 128),
    "codellama-34b": (33_743_970_304, 48, 2 * 8 * 128),
    "deepseek-v2-lite": (15_706_484_224, 27, 512 + 64),
    "deepseek-v3": (671_026_419_200, 61, 512 + 64),  # without the multi-token prediction module
    "falcon-40b": (41_303_293_952, 60, 2 * 8 * 64),
    "falcon-7b": (6_921_720_704, 32, 2 * 1 * 64),
    "gemma-2-9b": (9_241_705_984, 42, 2 * 8 * 256),
    "gemma-3-27b": (27_009_002_240, 62, 2 * 16 * 128),  # without the vision tower's 0.4 B
    "gemma-3-4b": (3_880_099_328, 34, 2 * 4 * 256),  # likewise
    "gpt-oss-120b": (116_829_156_672, 36, 2 * 8 * 64),
    "gpt-oss-20b": (20_914_757_184, 24, 2 * 8 * 64),
    "gpt2": (124_439_808, 12, 2 * 768),
    "gpt2-xl": (1_557_611_200, 48, 2 * 1600),
    "granite-3.0-1b-a400m": (1_334_628_352, 24, 2 * 8 * 64),
    "granite-3.1-8b": (8_170_848_256, 40, 2 * 8 * 128),
    "llama-2-70b": (68_976_648_192, 80, 2 * 8 * 128),
    "llama-2-7b": (6_738_415_616, 32, 2 * 4096),
    "llama-3.1-8b": (8_030_261_248, 32, 2 * 8 * 128),
    # The vision tower of 0.87 B is not counted.
    "llama-4-maverick": (401_583_781_376, 48, 2 * 8 * 128),
    "llama-4-scout": (108_641_793_536, 48, 2 * 8 * 128),  # likewise
    "mistral-7b-v0.1": (7_241_732_096, 32, 2 * 8 * 128),
    "mixtral-8x22b": (140_630_071_296, 56, 2 * 8 * 128),
    "mixtral-8x7b": (46_702_792_704, 32, 2 * 8 * 128),
    "opt-6.7b": (6_658_473_984, 32, 2 * 4096),
    "phi-2": (2_779_683_840, 32, 2 * 2560),
    "phi-3-mini-4k": (3_821_079_552, 32, 2 * 3072),
    "phi-3.5-moe": (41_873_153_344, 32, 2 * 8 * 128),
    "phi-4": (14_659_507_200, 40, 2 * 10 * 128),
    "pythia-6.9b": (6_857_302_016, 32, 2 * 4096),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 24, 2 * 2048),
    "qwen2-57b-a14b": (57_409_011_712, 28, 2 * 4 * 128),
    "qwen2.5-7b": (7_615_616_512, 28, 2 * 4 * 128),
    "qwen3-0.6b": (596_049_920, 28, 2 * 8 * 128),
    "qwen3-30b-a3b": (30_532_122_624, 48, 2 * 4 * 128),
    # 35.95e9 of the released weights are the vision tower's 0.45e9 and the multi-token prediction module's 0.84e9 too.
    "qwen3.6-35b-a3b": (34_659_368_960, 40, 2 * 2 * 256),
    "starcoder2-7b": (7_173_923_840, 32, 2 * 4 * 128),
    "starcoderbase": (15_517_456_384, 40, 2 * 1 * 128),
}

# Layers with a context, of models where others have none: every fourth of Qwen3.6.
CONTEXT_LAYERS = {"qwen3.6-35b-a3b": 10}

# Active parameters as reported, in 10^9.
ACTIVE = {
    "deepseek-v3": 37.6,  # "37 B"
    "llama-4-maverick": 17.2,  # "17 B"
    "llama-4-scout": 17.2,  # "17 B"
    "mixtral-8x22b": 39.1,
    "mixtral-8x7b": 12.9,
    "phi-3.5-moe": 6.6,
    "qwen2-57b-a14b": 14.2,
    "qwen3-30b-a3b": 3.35,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen3.6-35b-a3b": 3.45,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_kv_sizes_are_the_published_ones(load, name):
    arch = load(name)
    parameters, layers, elements = MODELS[name]

    assert arch.parameters == pytest.approx(parameters, rel=0.01)
    assert (arch.layers, arch.kv_bytes_per_token_per_layer) == (layers, elements * arch.kv_bytes)
    assert arch.kv_bytes_per_token == CONTEXT_LAYERS.get(name, layers) * elements * arch.kv_bytes


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(load, name):
    assert load(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.01)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gpt-oss-20b"])
def test_gpt_oss_counts_active_parameters_without_embedding(load, name):
    arch = load(name)
    published = {"gpt-oss-120b": 5.13e9, "gpt-oss-20b": 3.61e9}[name]

    assert arch.active_parameters - arch.head_parameters == pytest.approx(published, rel=0.01)


def test_every_config_is_tested(config_names):
    assert set(MODELS) == set(config_names)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama-2-7b", "MHA"),
        ("llama-2-70b", "GQA"),
        ("falcon-7b", "MQA"),
        ("starcoderbase", "MQA"),
        ("deepseek-v3", "MLA"),
        ("phi-4", "GQA"),
    ],
)
def test_attention_kind_follows_the_ratio_of_kv_heads(load, name, attention):
    assert load(name).attention == attention


@pytest.mark.parametrize("name", MODELS)
def test_specification_formula_agrees_where_heads_divide_hidden(load, name):
    """hidden · KV heads / heads · 2 · bytes, as the specification has it, per layer."""
    arch = load(name)
    by_ratio = arch.hidden * arch.kv_heads / arch.heads * 2 * arch.kv_bytes

    assert (by_ratio == arch.kv_bytes_per_token_per_layer) == (
        arch.latent is None and arch.head_dim * arch.heads == arch.hidden
    )


def test_kv_bytes_of_published_models(load):
    assert load("llama-2-70b").kv_bytes_per_token_per_layer == 4096
    assert load("qwen3-30b-a3b").kv_bytes_per_token_per_layer == 2048  # 1024 by the specification's formula


@pytest.mark.parametrize(
    ("name", "moe_layer_ids"),
    [
        ("llama-3.1-8b", range(0)),
        ("mixtral-8x7b", range(32)),
        ("deepseek-v2-lite", range(1, 27)),
        ("deepseek-v3", range(3, 61)),
        ("llama-4-scout", range(48)),
        ("llama-4-maverick", range(1, 48, 2)),
    ],
)
def test_moe_layers(load, name, moe_layer_ids):
    arch = load(name)

    assert arch.moe_layer_ids == tuple(moe_layer_ids)
    assert arch.is_moe == (len(moe_layer_ids) > 0)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama-3.1-8b", ((None, 32),)),
        ("mistral-7b-v0.1", ((4096, 32),)),
        ("qwen2.5-7b", ((None, 28),)),
        ("gemma-2-9b", ((None, 21), (4096, 21))),
        ("gemma-3-27b", ((None, 10), (1024, 52))),
        ("gemma-3-4b", ((None, 5), (1024, 29))),
        ("gpt-oss-20b", ((None, 12), (128, 12))),
        ("llama-4-scout", ((None, 12), (8192, 36))),
        ("phi-4", ((None, 40),)),
    ],
)
def test_windows(load, name, groups):
    assert load(name).window_groups == groups


@pytest.mark.parametrize("name", ["falcon-7b", "gpt2", "starcoderbase", "opt-6.7b", "pythia-6.9b", "phi-2"])
def test_ungated_families_have_two_matrices_per_ffn(load, name):
    arch = load(name)

    assert not arch.gated_ffn
    assert arch.ffn == 4 * arch.hidden
    assert arch.ffn_parameters(10) == 20 * arch.hidden


def test_quantized_weights_take_less_room(load):
    deepseek, gpt_oss = load("deepseek-v3"), load("gpt-oss-120b")

    assert (deepseek.quantization, deepseek.fp8_compute, deepseek.kv_bytes) == ("fp8", True, 2.0)
    assert deepseek.weight_bytes == pytest.approx(671e9 + 1.85e9, rel=0.01)  # embeddings stay in 16 bits
    assert (gpt_oss.attention_weight_bytes, gpt_oss.expert_weight_bytes) == (2.0, 0.53125)
    assert gpt_oss.weight_bytes == pytest.approx(65.2e9, rel=0.01)  # the released files: 60.8 GiB
