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

    assert (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes) == (
        weight_bytes,
    ) * 3
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


@pytest.mark.parametrize("bits", [0, -4, "4", 64, float("nan")])
def test_bits_that_cannot_be_are_refused(parse, bits):
    with pytest.raises(UsageError, match=r"quantization_config bits must be (a whole number|greater|less)"):
        parse(quantization_config={"quant_method": "gptq", "bits": bits})


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
