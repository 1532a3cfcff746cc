"""Reading config.json: spellings, traps, and files that are not what they should be."""

from __future__ import annotations

import json

import pytest

from tracefit.errors import UsageError
from tracefit.server.model_config import parse_architecture


@pytest.mark.parametrize(
    ("spelling", "standard"),
    [
        ("n_layer", "num_hidden_layers"),
        ("num_layers", "num_hidden_layers"),
        ("n_embd", "hidden_size"),
        ("d_model", "hidden_size"),
        ("n_head", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("n_head_kv", "num_key_value_heads"),
        ("multi_query_group_num", "num_key_value_heads"),
        ("n_inner", "intermediate_size"),
        ("ffn_dim", "intermediate_size"),
        ("ffn_hidden_size", "intermediate_size"),
        ("padded_vocab_size", "vocab_size"),
        ("dtype", "torch_dtype"),
    ],
)
def test_spellings_mean_the_same(parse, spelling, standard):
    values = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
    }

    assert parse(without=(standard,), **{spelling: values[standard]}) == parse()


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"])
@pytest.mark.parametrize("chosen", ["num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"])
def test_expert_spellings(parse, key, chosen):
    arch = parse(**{key: 8, chosen: 2, "moe_intermediate_size": 32})

    assert (arch.experts, arch.experts_per_token, arch.expert_ffn, arch.moe_layers) == (8, 2, 32, 4)


def test_spellings_that_contradict_are_refused(parse):
    with pytest.raises(UsageError, match=r"config\.json: num_hidden_layers 4 and n_layer 5 contradict"):
        parse(n_layer=5)


def test_whole_numbers_may_be_written_as_floats(parse):
    assert parse(hidden_size=64.0) == parse()


def test_a_stated_head_dim_is_used(parse):
    assert parse(head_dim=128).head_dim == 128
    assert parse(head_dim=128).parameters > parse().parameters


def test_null_is_unset(parse):
    assert parse(head_dim=None, n_layer=None, quantization_config=None) == parse()


def test_absent_kv_heads_are_one_per_head(parse):
    arch = parse(without=("num_key_value_heads",))

    assert (arch.kv_heads, arch.attention) == (8, "MHA")
    assert any("one KV head per attention head" in note for note in arch.assumed)


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"multi_query": True, "num_key_value_heads": 8}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_key_value_heads": 4}, 4),
        ({"multi_query": False, "num_key_value_heads": 8}, 8),
        ({"multi_query_attention": False, "num_key_value_heads": None, "multi_query_group_num": 2}, 8),
        ({"multi_query_attention": True, "num_key_value_heads": None, "multi_query_group_num": 2}, 2),
    ],
)
def test_multi_query_flags(parse, changes, kv_heads):
    assert parse(**changes).kv_heads == kv_heads


def test_everything_assumed_is_listed(parse):
    arch = parse(without=("torch_dtype", "tie_word_embeddings"))

    assert arch.assumed == (
        "dtype bfloat16 assumed: torch_dtype is absent",
        "name llama-4x64 made up: the config has none",
        "head_dim 8 derived: hidden_size / num_attention_heads",
        "tie_word_embeddings false assumed: default of the family",
    )
    assert parse(head_dim=8, _name_or_path="a/b").assumed == ()


def test_width_of_gpt_2_is_assumed_and_listed(load):
    assert "intermediate_size 3072 assumed: 4 times hidden_size" in load("gpt2").assumed


def test_rows_of_learned_positions(load):
    assert [load(name).learned_positions for name in ("gpt2", "opt-6.7b", "llama-2-7b")] == [1024, 2050, 0]


def test_defaults_of_gemma_3_are_filled_in_and_listed(load):
    arch = load("gemma-3-4b")

    assert (arch.heads, arch.kv_heads, arch.head_dim, arch.vocabulary) == (8, 4, 256, 262208)
    assert sum("default of gemma3_text" in note for note in arch.assumed) == 5


def test_name_is_the_argument_or_that_of_the_config():
    text = json.dumps({**_small(), "_name_or_path": "org/Its-Name"})

    assert parse_architecture(text, where="x").slug == "its-name"
    assert parse_architecture(text, where="x").name == "org/Its-Name"
    assert parse_architecture(text, where="x", name="org/Given").name == "org/Given"


def _small():
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 128,
        "vocab_size": 100,
    }


def test_nested_text_config_with_quantization_at_the_top(config_of):
    config = config_of("gemma-3-27b")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    arch = parse_architecture(json.dumps(config), where="config.json")

    assert (arch.hidden, arch.model_type, arch.attention_weight_bytes) == (5376, "gemma3_text", 0.5)


def test_unknown_wrapper_of_a_text_model_is_read(config_of):
    config = {"model_type": "some_vlm", "text_config": config_of("llama-3.1-8b"), "hidden_size": 7}

    assert parse_architecture(json.dumps(config), where="x").hidden == 4096


@pytest.mark.parametrize(
    ("changes", "layer_ids"),
    [
        ({"first_k_dense_replace": 2}, (2, 3)),
        ({"moe_layer_start_index": 2}, (2, 3)),
        ({"moe_layer_freq": 2}, (0, 2)),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, (2,)),
        ({"moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({"interleave_moe_layer_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, (1, 2)),
        ({"moe_layers": [3, 1]}, (1, 3)),
        ({"moe_layers": [0, 3]}, (0, 3)),
    ],
)
def test_which_layers_are_moe(parse, changes, layer_ids):
    arch = parse(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16, **changes)

    assert arch.moe_layer_ids == layer_ids
    assert arch.ffn == 128


def test_missing_key_is_named_with_its_other_spellings(parse):
    with pytest.raises(UsageError, match=r"num_hidden_layers is missing \(also spelled n_layer, num_layers\);"):
        parse(without=("num_hidden_layers",))


def test_dense_model_has_no_experts_of_any_kind(parse):
    arch = parse()

    assert (arch.experts, arch.experts_per_token, arch.expert_ffn, arch.shared_ffn) == (0, 0, 0, 0)


def test_model_whose_every_layer_turns_out_dense_is_dense(parse):
    arch = parse(num_experts=4, num_experts_per_tok=1, first_k_dense_replace=4)

    assert (arch.is_moe, arch.experts) == (False, 0)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"n_shared_experts": 2}, 32),
        ({"moe_num_shared_experts": 2}, 32),
        ({"shared_expert_intermediate_size": 99}, 99),
        ({"shared_expert_intermediate_size": 0, "n_shared_experts": 2}, 0),
        ({"n_shared_experts": None}, 0),
        ({"n_shared_experts": 0}, 0),
    ],
)
def test_shared_experts(parse, changes, width):
    assert parse(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16, **changes).shared_ffn == width


def test_llama_4_has_a_shared_expert_and_a_dense_width(load):
    maverick = load("llama-4-maverick")

    assert (maverick.shared_ffn, maverick.expert_ffn, maverick.ffn) == (8192, 8192, 16384)
    assert maverick.layer_windows[:8] == (8192, 8192, 8192, None, 8192, 8192, 8192, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 16}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 16}, (16,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 16),
        ),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
            (16,) * 4,
        ),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, (16,) * 4),
        ({"model_type": "gemma2", "sliding_window": 16}, (16, None, 16, None)),
        ({"model_type": "gpt_oss", "sliding_window": 16}, (16, None, 16, None)),
        (
            {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 4},
            (16, 16, 16, None),
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 16, "_sliding_window_pattern": 2},
            (16, None, 16, None),
        ),
        (
            {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 16, None, 16),
        ),
        (
            {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
            (8, 8, 8, None),
        ),
        (
            {"model_type": "llama4", "no_rope_layers": [0, 1, 1, 0], "intermediate_size_mlp": 1},
            (None, 8192, 8192, None),
        ),
    ],
)
def test_which_layers_have_a_window(parse, changes, windows):
    assert parse(**changes).layer_windows == windows


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["hyena", "full_attention"] * 2, "layer_types has layers hyena"),
        (["full_attention"] * 3, "layer_types must be a list of 4 names"),
        ([1, 2, 3, 4], "layer_types has layers that are not text"),
        ("full_attention", "layer_types must be a list"),
        (["sliding_attention"] * 4, "sliding_window is missing"),
    ],
)
def test_attention_that_is_not_understood_is_refused(parse, kinds, message):
    with pytest.raises(UsageError, match=message):
        parse(layer_types=kinds)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_missing_key_is_named(parse, key):
    with pytest.raises(
        UsageError, match=rf"config\.json: {key} is missing( \(also spelled [a-z_, ]+\))?; is this a whole"
    ):
        parse(without=(key,))


@pytest.mark.parametrize("key", ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_half_a_latent_attention_is_refused(config_of, key):
    config = config_of("deepseek-v3")
    del config[key]

    with pytest.raises(UsageError, match=rf"{key} is missing"):
        parse_architecture(json.dumps(config), where="config.json")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [-1, 0, 10**30, 1.5, float("nan"), float("inf"), "64 KB", "0x40", True, [64], {}])
def test_number_that_cannot_be_is_refused(parse, key, value):
    with pytest.raises(UsageError, match=rf"config\.json: {key} must be (a whole number|greater|less)") as caught:
        parse(**{key: value})

    assert "\n" not in caught.value.line()
    assert len(caught.value.line()) < 200


def test_numbers_booleans_and_nulls_in_quotes_are_read(config_of):
    def quoted(value):
        if isinstance(value, dict):
            return {key: quoted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [quoted(item) for item in value]
        return value if isinstance(value, str) else json.dumps(value)

    for name in ("llama-3.1-8b", "deepseek-v3"):
        config = config_of(name) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        plain = parse_architecture(json.dumps(config), where="x")

        assert parse_architecture(json.dumps(quoted(config)), where="x") == plain


@pytest.mark.parametrize("value", ["true", "null", "1e400", "64.5", "", "-64", "\u0664"])
def test_text_in_quotes_that_is_no_such_number_is_refused(parse, value):
    with pytest.raises(UsageError, match=r"hidden_size (must be|is missing)"):
        parse(hidden_size=value)


def test_a_name_of_digits_stays_text(parse):
    arch = parse(_name_or_path="64")

    assert arch.name == "64"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama4", "no_rope_layers": [2] * 4, "intermediate_size_mlp": 1},
            "no_rope_layers must be less than or equal to 1, not 2",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        (
            {"hidden_size": 65},
            "head_dim is missing, and hidden_size 65 is not a multiple of num_attention_heads 8",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "complex64"}, "torch_dtype 'complex64' is not known"),
        ({"torch_dtype": 16}, "torch_dtype must be text"),
        ({"quantization_config": [1]}, "quantization_config is a list"),
        (
            {"num_experts": 4, "num_experts_per_tok": 1, "mlp_only_layers": "all"},
            "mlp_only_layers must be a list",
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 1, "moe_layer_freq": [1]},
            "moe_layer_freq must be a list of 4",
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 1, "moe_layers": [4]},
            "moe_layers must be (a whole number|greater|less)",
        ),
        (
            {"model_type": "llama4", "no_rope_layers": [1], "intermediate_size_mlp": 1},
            "no_rope_layers must be a list of 4 numbers, one per layer",
        ),
    ],
)
def test_contradiction_is_refused(parse, changes, message):
    with pytest.raises(UsageError, match=message):
        parse(**changes)


def test_an_unknown_family_is_assumed_to_be_a_usual_decoder(parse):
    known, unknown = (
        parse(model_type=name, architectures=[f"{name}ForCausalLM"], _name_or_path="m") for name in ("llama", "llama9")
    )

    assert (unknown.model_type, unknown.parameters) == ("llama9", known.parameters)
    assert set(unknown.assumed) - set(known.assumed) == {
        "model_type llama9 is not known: read by its keys as a usual decoder (gated FFNs, rotary positions)"
    }


def test_a_config_that_names_no_family_is_read_by_its_keys(parse):
    arch = parse(without=("model_type",))

    assert (arch.parameters, arch.model_type) == (parse().parameters, "unknown")
    assert arch.assumed[0].startswith("model_type unknown is not known: ")


def test_a_window_without_layers_is_left_out_and_noted(parse):
    arch = parse(model_type="new", sliding_window=16)

    assert arch.layer_windows == (None,) * 4
    assert "sliding_window 16 left out: no key says which layers it is for" in arch.assumed


# Keys of Qwen3.5: 2 heads of 8 for keys, 4 of 16 for values.
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    "which",
    [{"full_attention_interval": 4}, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}],
)
def test_linear_attention_is_recognised_by_its_keys(parse, which):
    arch, usual = parse(model_type="new", **LINEAR, **which), parse()

    assert arch.layer_windows == (0, 0, 0, None)
    assert (arch.linear_layers, arch.context_layers, arch.window_groups) == (3, 1, ((None, 1),))
    assert (arch.kv_bytes_per_token, usual.kv_bytes_per_token) == (64, 4 * 64)  # 2 · 2 KV heads · 8 · 2 bytes
    # Queries and keys 2·2·8, values, their gate and output 3·4·16, two scalars for each of 4 heads: 232 columns of 64.
    assert arch.parameters == usual.parameters + 3 * (64 * 232 - usual.attention_parameters)
    assert arch.facts()["linear_layers"] == 3
    assert arch.facts()["windowed_layers"] == 0


def test_a_state_whose_size_no_key_states_is_refused(parse):
    with pytest.raises(UsageError, match="no key that is known states its size"):
        parse(layer_types=["mamba"] * 2 + ["attention"] * 2)


def test_gate_of_attention_is_as_wide_as_its_queries(parse):
    gated = parse(attn_output_gate=True)

    assert gated.attention_parameters == parse().attention_parameters + 64 * 64  # 8 heads of 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list where an object was expected"),
        ("null", "holds null"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ("{}", "num_hidden_layers is missing"),
    ],
)
def test_file_that_is_no_config_is_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_architecture(text, where="config.json")

    assert caught.value.line().startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_byte_order_mark_and_infinity_elsewhere_do_no_harm():
    text = json.dumps({**_small(), "time_step_limit": [0.0, float("inf")]})

    assert parse_architecture(b"\xef\xbb\xbf" + text.encode(), where="x").layers == 4
