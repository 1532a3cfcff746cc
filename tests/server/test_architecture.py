"""The cost of a token, by hand arithmetic on two small models."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tracefit.errors import UsageError
from tracefit.server.architecture import LatentAttention, slug_of


def test_dense_model_by_hand(dense):
    layer = 192 + 384

    assert dense.parameters == dense.active_parameters == 2 * layer + 160
    assert dense.layer_flops_per_token == 2 * 2 * layer
    assert dense.head_flops_per_token == 160
    assert dense.kv_bytes_per_token_per_layer == 2 * 1 * 4 * 2
    assert dense.prefill_pair_flops == dense.decode_pair_flops == 32  # 4 · 2 heads · width 4
    assert dense.kv_bytes_per_token == 32
    assert dense.fixed_weight_bytes == 2 * (2 * layer + 80)
    assert dense.weight_bytes == 2 * (2 * layer + 160)
    assert dense.size_proxy == 16
    assert dense.attention == "MQA"


def test_moe_model_by_hand(moe):
    attention, experts, shared, router = 256, 144, 96, 32

    assert moe.parameters == 80 + 3 * attention + 384 + 2 * (4 * experts + shared + router)
    assert moe.active_parameters == 80 + 3 * attention + 384 + 2 * (2 * experts + shared + router) == 2064
    assert moe.layer_flops_per_token == 2 * (2064 - 80)
    assert moe.fixed_weight_bytes == 2 * (3 * attention + 384 + 2 * (shared + router) + 80) == 2976
    assert moe.expert_bytes == 288
    assert moe.weight_bytes == 2 * moe.parameters
    assert (moe.layers, moe.dense_layers, moe.moe_layers, moe.attention) == (3, 1, 2, "MHA")


def test_windows_do_not_cap_the_written_kv_bytes(dense, with_attention):
    arch = with_attention(dense, windows=(None, 4))

    assert arch.kv_bytes_per_token == dense.kv_bytes_per_token


@pytest.fixture
def mla(dense, with_attention):
    latent = LatentAttention(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
    return with_attention(dense, latent=latent, kv_heads=2, head_dim=5)


def test_latent_attention_by_hand(mla):
    # query 8·2·5, down 8·(6 + 2), up 6·2·(3 + 4), output 2·4·8
    assert mla.attention_parameters == 80 + 64 + 84 + 64
    assert mla.kv_bytes_per_token_per_layer == (6 + 2) * 2
    assert mla.prefill_pair_flops == 2 * 2 * (5 + 4)
    assert mla.decode_pair_flops == 2 * 2 * (8 + 6)
    assert mla.attention == "MLA"


def test_latent_attention_with_compressed_queries(mla, with_attention):
    compressed = with_attention(mla, latent=replace(mla.latent, q_lora_rank=3))

    assert compressed.attention_parameters == 3 * (8 + 10) + 64 + 84 + 64


def test_kv_heads_that_cannot_be_divided_are_repeated(dense, moe, mla):
    assert [dense.kv_shards(tp) for tp in (1, 2, 4)] == [1, 1, 1]  # one KV head
    assert [moe.kv_shards(tp) for tp in (1, 2, 4)] == [1, 2, 2]
    assert mla.kv_shards(2) == 1


def test_flops_are_about_two_per_parameter(load):
    arch = load("llama-2-70b")

    flops = arch.layer_flops_per_token + arch.head_flops_per_token
    assert flops == pytest.approx(2 * arch.parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b-instruct"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("/models/my model/", "my-model"),
        (r"C:\models\Phi_4", "phi-4"),
        ("/root/hub/models--meta-llama--Llama-2-7b-hf/snapshots/8cca527612d856d7", "llama-2-7b"),
        ("/root/hub/models--gpt2/snapshots/607a30d783dfa663", "gpt2"),
        ("模型", "model"),
        ("", "model"),
        ("a" * 200, "a" * 64),
    ],
)
def test_slug_is_short_and_plain(name, slug):
    assert slug_of(name) == slug


def test_window_groups_begin_with_full_attention(dense, with_attention):
    arch = with_attention(dense, windows=(8, None, 4, 8, None, None))

    assert arch.window_groups == ((None, 3), (4, 1), (8, 2))


def test_learned_positions_are_parameters(load):
    assert load("gpt2").embedding_parameters == (50_257 + 1024) * 768


def test_facts_of_a_dense_model(dense):
    assert list(dense.facts().items()) == [
        ("model", "tiny"),
        ("model_type", "llama"),
        ("layers", 2),
        ("moe_layers", 0),
        ("hidden_size", 8),
        ("heads", 2),
        ("kv_heads", 1),
        ("head_dim", 4),
        ("attention", "MQA"),
        ("kv_lora_rank", None),
        ("ffn_size", 16),
        ("gated_ffn", True),
        ("is_moe", False),
        ("experts", None),
        ("experts_per_token", None),
        ("expert_ffn_size", None),
        ("shared_ffn_size", None),
        ("windowed_layers", 0),
        ("window_tokens", None),
        ("vocabulary", 10),
        ("tied_embeddings", False),
        ("dtype", "bfloat16"),
        ("quantization", None),
        ("parameters", 1312),
        ("active_parameters", 1312),
        ("weight_bytes", 2624),
        ("kv_bytes_per_token", 32.0),
        ("size_proxy", 16),
    ]


def test_facts_of_a_moe_model(moe, load):
    facts = moe.facts()

    assert (facts["experts"], facts["experts_per_token"], facts["expert_ffn_size"]) == (4, 2, 6)
    assert (facts["shared_ffn_size"], facts["ffn_size"], facts["moe_layers"], facts["is_moe"]) == (
        4,
        16,
        2,
        True,
    )
    assert load("mixtral-8x7b").facts()["ffn_size"] is None  # no layer is dense
    assert load("deepseek-v3").facts()["kv_lora_rank"] == 512
    assert load("gemma-3-27b").facts()["window_tokens"] == 1024
    assert load("gemma-3-27b").facts()["windowed_layers"] == 52


@pytest.mark.parametrize(
    ("tp", "fits"), [(1, True), (2, True), (4, True), (8, True), (3, False), (16, False), (0, False)]
)
def test_heads_must_divide_by_tensor_parallel(parse, tp, fits):
    arch = parse()  # 8 heads, 2 KV heads
    if fits:
        arch.check_tensor_parallel(tp)
        return
    with pytest.raises(UsageError, match=r"tensor.parallel"):
        arch.check_tensor_parallel(tp)


def test_kv_heads_must_divide_or_repeat(parse):
    arch = parse(num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    arch.check_tensor_parallel(3)
    arch.check_tensor_parallel(12)

    with pytest.raises(UsageError, match="6 KV heads can be neither divided over nor repeated on 4"):
        arch.check_tensor_parallel(4)
