"""Bytes per weight from a config's quantization section, and from a server's options."""

from __future__ import annotations

import pytest

from tracefit.errors import UsageError
from tracefit.server.model_config import as_served


def _section(**group):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


_INT4 = {"num_bits": 4, "type": "int"}
_FP8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("section", "weight_bytes", "fp8_compute"),
    [
        ({"quant_method": "gptq", "bits": 4}, 0.5, False),
        ({"quant_method": "gptq", "bits": 8}, 1.0, False),
        ({"quant_method": "awq", "w_bit": 4}, 0.5, False),
        ({"quant_method": "awq"}, 0.5, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1.0, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5, False),
        ({"load_in_4bit": True}, 0.5, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, 1.0, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625, False),
        (_section(weights=_INT4, input_activations=None), 0.5, False),
        (_section(weights=_FP8, input_activations=_FP8), 1.0, True),
        (_section(weights=_FP8, input_activations=None), 1.0, False),
    ],
)
def test_bits_are_read_under_the_keys_of_each_method(parse, section, weight_bytes, fp8_compute):
    arch = parse(quantization_config=section)

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes) == (weight_bytes,) * 3
    assert arch.fp8_compute is fp8_compute
    assert arch.kv_bytes == arch.dtype_bytes == 2.0


def test_widest_of_several_groups_counts(parse):
    groups = {"a": {"weights": _INT4}, "b": {"weights": _FP8}, "c": {"weights": None}, "d": 3}
    arch = parse(quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})

    assert arch.ffn_weight_bytes == 1.0


def test_mxfp4_shrinks_only_experts(parse):
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    arch = parse(num_experts=4, num_experts_per_tok=1, quantization_config=section)

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes) == (2.0, 2.0)
    assert arch.expert_weight_bytes == 0.53125


def test_a_rule_for_the_ffn_of_gemma_4_is_none_for_the_experts_beside_it(parse):
    # NVIDIA's checkpoint leaves out attention, the router and the FFN of each layer by name.
    names = [f"model.language_model.layers.{i}.{m}*" for i in range(4) for m in ("mlp", "router", "self_attn")]
    arch = parse(
        num_experts=4,
        num_experts_per_tok=1,
        enable_moe_block=True,
        quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": names},
    )

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes) == (
        2.0,
        2.0,
        0.5625,
    )


def test_mlx_has_the_bits_of_modules_beside_its_own(parse):
    section = {"group_size": 64, "bits": 4, "mode": "affine"}
    for i in range(4):
        section |= {f"model.layers.{i}.self_attn.{m}_proj": {"bits": 8, "group_size": 64} for m in "qkvo"}
        section[f"model.layers.{i}.mlp"] = False
    arch = parse(quantization=section)

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes) == (1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("patterns", "attention"),
    [
        (["re:.*self_attn", "re:.*lm_head"], 2.0),
        (["model.layers.*.self_attn"], 2.0),
        (["model.layers.3.self_attn.q_proj"], 1.0),
        (["lm_head"], 1.0),
        ("lm_head", 1.0),
        (None, 1.0),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "ignored_layers"])
def test_attention_can_be_left_out_for_all_layers(parse, key, patterns, attention):
    arch = parse(quantization_config={"quant_method": "fp8", key: patterns})

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes) == (attention, 1.0)


@pytest.mark.parametrize(
    "extra", [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}]
)
def test_kv_cache_can_be_quantized_by_the_config(parse, extra):
    arch = parse(quantization_config={"quant_method": "fp8", **extra})

    assert arch.kv_bytes == 1.0
    assert arch.kv_bytes_per_token * 2 == parse().kv_bytes_per_token


def test_a_method_without_bits_keeps_the_weights_and_is_noted(parse):
    arch = parse(quantization_config={"quant_method": "aqlm"})

    assert (arch.quantization, arch.ffn_weight_bytes) == ("aqlm", 2.0)
    assert any("quantization aqlm states no bits" in note for note in arch.assumed)


@pytest.mark.parametrize("bits", [0, -4, "four", 64, float("nan")])
def test_bits_that_cannot_be_are_refused(parse, bits):
    with pytest.raises(UsageError, match=r"quantization_config bits must be (a whole number|greater|less)"):
        parse(quantization_config={"quant_method": "gptq", "bits": bits})


# -- modules with a width of their own -------------------------------------------------------------------

_NAMES = {
    "by name": [f"model.layers.{i}.self_attn" for i in range(4)],
    "by name and prefix": [f"language_model.model.layers.{i}.self_attn*" for i in range(4)],
    "by matrix": [f"model.layers.{i}.self_attn.{m}_proj" for i in range(4) for m in "qkvo"],
    "by wildcard": ["model.layers.*.self_attn*"],
    "by leading wildcard": ["*self_attn*"],
    "by expression": ["re:.*self_attn.*"],
    "by numbered expression": [r"re:model\.layers\.[0-9]+\.self_attn\.(q|k|v|o)_proj$"],
}


@pytest.mark.parametrize("names", _NAMES.values(), ids=_NAMES)
@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "exclude"])
def test_attention_that_is_left_out_keeps_its_bits(parse, key, names):
    arch = parse(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", key: [*names, "lm_head"]})

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes) == (2.0, 0.5625)


def test_attention_of_some_layers_counts_in_proportion(parse):
    names = ["model.layers.0.self_attn", "model.layers.3.self_attn"]
    arch = parse(quantization_config={"quant_method": "fp8", "ignored_layers": names})

    assert arch.attention_weight_bytes == (2 * 2.0 + 2 * 1.0) / 4


@pytest.mark.parametrize(
    "names",
    [
        ["vision_tower.encoder.layers.0.self_attn"] * 4,
        [f"visual.blocks.{i}.attn" for i in range(4)],
        ["model.layers.61.self_attn"],
        ["gate", "lm_head", "e_score_correction_bias"],
        ["model.layers.0.mlp.gate"],
        ["re:(?<!x)self_attn"],  # an expression that is not known here
        [None, 3, {}],
    ],
)
def test_other_modules_that_are_left_out_change_nothing(parse, names):
    arch = parse(quantization_config={"quant_method": "fp8", "ignore": names})

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes) == (1.0, 1.0)


def test_only_experts_of_kimi_k2_are_quantized(parse):
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
    section = _section(targets=["Linear"], weights=_INT4 | {"group_size": 32}) | {"ignore": ignore}
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    arch = parse(moe_intermediate_size=16, **moe, quantization_config=section)

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.shared_weight_bytes) == (2.0, 2.0, 2.0)
    assert arch.expert_weight_bytes == 0.5


def test_states_are_left_out_by_their_own_names(parse):
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    ignore = [f"model.layers.{i}.linear_attn*" for i in range(3)]
    arch = parse(
        **linear,
        linear_value_head_dim=16,
        layer_types=kinds,
        quantization_config={"quant_method": "fp8", "ignore": ignore},
    )

    assert (arch.state_weight_bytes, arch.attention_weight_bytes, arch.ffn_weight_bytes) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("section", "ffn", "attention"),
    [
        # Quark.
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 1.0, 1.0),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "int4", "group_size": 128}},
            },
            0.5,
            0.5,
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
                "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
            },
            0.53125,
            1.0,
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "int8"}},
                "exclude": ["*self_attn*"],
            },
            1.0,
            2.0,
        ),
        # torchao.
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.5, 0.5),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
            },
            1.0,
            1.0,
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig"}},
            },
            0.5,
            0.5,
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig"}},
            },
            1.0,
            1.0,
        ),
        # HQQ.
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
            0.5,
            0.5,
        ),
        # EXL2 and EXL3.
        ({"quant_method": "exl3", "bits": 4.25}, 4.25 / 8, 4.25 / 8),
        ({"quant_method": "exl2", "bits": 3.0}, 3 / 8, 3 / 8),
        # auto-round and GPTQModel.
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, 0.5, 0.5),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "extra_config": {f"model.layers.{i}.self_attn": {"bits": 16} for i in range(4)},
            },
            0.5,
            2.0,
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn.*": {}}}, 0.5, 2.0),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*self_attn.*": {"bits": 8}}}, 0.5, 1.0),
        # bitnet, Quanto, NVFP4 of compressed-tensors, mixed ModelOpt.
        (
            {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
            0.25,
            0.25,
        ),
        ({"quant_method": "quanto", "weights": "int4"}, 0.5, 0.5),
        (
            _section(targets=["Linear"], weights={"num_bits": 4, "type": "float", "group_size": 16}),
            0.5625,
            0.5625,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{i}.mlp.{m}_proj": {"quant_algo": "NVFP4"}
                    for i in range(4)
                    for m in ("gate", "up", "down")
                },
            },
            0.5625,
            2.0,
        ),
        # Two groups: all linear layers, and some with a width of their own.
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": _INT4},
                    "b": {"targets": ["re:.*self_attn.*"], "weights": _FP8},
                },
            },
            0.5,
            1.0,
        ),
    ],
)
def test_each_method_counts_its_own_bits(parse, section, ffn, attention):
    arch = parse(quantization_config=section)

    assert (arch.ffn_weight_bytes, arch.attention_weight_bytes) == (ffn, attention)
    assert not any("states no bits" in note for note in arch.assumed)


def test_exl3_has_an_output_head_of_its_own_bits(parse):
    plain, arch = parse(), parse(quantization_config={"quant_method": "exl3", "bits": 4.25, "head_bits": 6})
    matrices = plain.parameters - 2 * 100 * 64

    assert arch.weight_bytes == matrices * 4.25 / 8 + 100 * 64 * 6 / 8 + 100 * 64 * 2


# -- as served -------------------------------------------------------------------------------------------


def test_server_dtype_overrules_the_config(parse):
    arch = as_served(parse(), dtype="float32")

    assert (arch.dtype, arch.dtype_bytes, arch.kv_bytes, arch.ffn_weight_bytes) == ("float32", 4.0, 4.0, 4.0)
    assert arch.weight_bytes == 2 * parse().weight_bytes


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_automatic_dtype_is_the_configs(parse, dtype):
    assert as_served(parse(), dtype=dtype, kv_cache_dtype="auto") == parse()


def test_float32_checkpoint_is_served_in_16_bits_and_noted(load):
    arch = load("starcoderbase")
    served = as_served(arch)

    assert (arch.dtype_bytes, served.dtype_bytes, served.dtype) == (4.0, 2.0, "bfloat16")
    assert served.weight_bytes == arch.weight_bytes / 2
    assert "float32 checkpoints are served in 16 bits" in served.assumed[-1]


def test_server_kv_cache_dtype_overrules_the_config(parse):
    arch = as_served(parse(), kv_cache_dtype="fp8_e4m3")

    assert (arch.kv_bytes, arch.ffn_weight_bytes) == (1.0, 2.0)


def test_server_can_quantize_a_model_that_is_not(parse):
    arch = as_served(parse(), quantization="fp8")

    assert (arch.quantization, arch.ffn_weight_bytes, arch.attention_weight_bytes) == ("fp8", 1.0, 1.0)
    assert arch.fp8_compute


def test_server_option_does_not_requantize(parse):
    gptq = parse(quantization_config={"quant_method": "gptq", "bits": 4})

    assert as_served(gptq, quantization="gptq_marlin") == gptq


def test_quantizing_experts_leaves_the_rest(parse):
    arch = as_served(parse(num_experts=4, num_experts_per_tok=1), quantization="experts_int8")

    assert (arch.expert_weight_bytes, arch.attention_weight_bytes, arch.fp8_compute) == (1.0, 2.0, False)


def test_dtype_change_leaves_quantized_weights(parse):
    gptq = parse(quantization_config={"quant_method": "gptq", "bits": 4})
    arch = as_served(gptq, dtype="float32")

    assert (arch.ffn_weight_bytes, arch.dtype_bytes, arch.kv_bytes) == (0.5, 4.0, 4.0)


def test_unknown_quantization_is_assumed_not_to_shrink(parse):
    arch = as_served(parse(), quantization="gguf")

    assert (arch.quantization, arch.weight_bytes) == ("gguf", parse().weight_bytes)
    assert arch.assumed[-1] == "weights in the model's data type assumed: quantization gguf is not known"


def test_dtype_that_the_server_states_is_no_longer_assumed(parse):
    arch = parse(without=("torch_dtype",))

    assert any(note.startswith("dtype") for note in arch.assumed)
    assert as_served(arch, dtype="float16").assumed == parse().assumed
    assert as_served(arch, dtype="auto").assumed == arch.assumed


@pytest.mark.parametrize("option", ["dtype", "kv_cache_dtype"])
def test_an_unknown_name_is_refused_with_all_names(parse, option):
    with pytest.raises(UsageError, match=rf"{option} 'float3' is not known; one of .*fp8"):
        as_served(parse(), **{option: "float3"})
