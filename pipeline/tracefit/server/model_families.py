"""Facts of Hugging Face model families that their config.json does not state.

A config names a family (`model_type`) and leaves out the family's defaults, so a few facts per
family are needed beside it: whether FFNs are gated, whether embeddings are tied, which layers a window is for.
Source: each family's configuration class in the transformers library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

WindowRule = Literal["none", "all", "upper", "even", "pattern", "chunked"]
"""Which layers a window applies to when `layer_types` does not say it layer by layer.

none: no layer, whatever the config says. all: every layer, if a window is set. upper: layers from
`max_window_layers` on, if `use_sliding_window`. even: layers 0, 2, 4, … pattern: all but each n-th layer.
chunked: layers with rotary positions, within chunks of `attention_chunk_size`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Defaults of one model family.

    Attributes:
        gated: FFNs have a gate matrix beside up and down.
        tied: Output head and input embedding are one matrix unless the config says otherwise.
        windows: Which layers a window applies to.
        ffn_is_four_hidden: FFN width is 4·hidden when the config leaves it out.
        learned_positions: Positions are a learned embedding.
        extra_positions: Rows of it beyond the configured count.
        shared_expert: One shared expert, as wide as a routed one, in each MoE layer.
        dense_ffn_key: Where the width of dense layers stands, if `intermediate_size` is the experts'.
        defaults: Values of keys that published configs of the family leave out.
    """

    gated: bool = True
    tied: bool = False
    windows: WindowRule = "none"
    ffn_is_four_hidden: bool = False
    learned_positions: bool = False
    extra_positions: int = 0
    shared_expert: bool = False
    dense_ffn_key: str | None = None
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Family()
_WINDOWED = Family(windows="all")
_QWEN = Family(windows="upper")
_GPT = Family(gated=False, tied=True, ffn_is_four_hidden=True, learned_positions=True)
_GEMMA3 = Family(
    tied=True,
    windows="pattern",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
_LLAMA4 = Family(
    windows="chunked",
    shared_expert=True,
    dense_ffn_key="intermediate_size_mlp",
    defaults={"interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _WINDOWED,
    "mixtral": _WINDOWED,
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen2_vl_text": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_vl_text": _QWEN,
    "qwen3_vl_moe_text": _QWEN,
    "deepseek": _LLAMA,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
    "kimi_k2": _LLAMA,
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, windows="even", defaults={"sliding_window": 4096}),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": Family(gated=False),
    "phi3": _WINDOWED,
    "phi4mm": _WINDOWED,
    "phimoe": _WINDOWED,
    "gpt_oss": Family(windows="even", defaults={"sliding_window": 128}),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "falcon": Family(gated=False, tied=True, ffn_is_four_hidden=True),
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": Family(gated=False),
    "opt": Family(gated=False, tied=True, learned_positions=True, extra_positions=2),
    "starcoder2": Family(gated=False, tied=True, windows="all"),
    "olmo2": _LLAMA,
    "chatglm": Family(),
}
"""Families by `model_type`."""

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "Phi4MMForCausalLM": "phi4mm",
    "PhiMoEForCausalLM": "phimoe",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "FalconForCausalLM": "falcon",
    "RWForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox",
    "OPTForCausalLM": "opt",
    "Starcoder2ForCausalLM": "starcoder2",
    "Olmo2ForCausalLM": "olmo2",
    "ChatGLMModel": "chatglm",
    "ChatGLMForConditionalGeneration": "chatglm",
}
"""Family by the class in `architectures`, for configs whose `model_type` is missing or of their own making."""
