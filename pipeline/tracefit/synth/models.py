"""The architectures and GPUs the generator knows: enough for a roofline and a valid `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

ConfigValue: TypeAlias = str | int | float | bool | list[str] | None
"""A value of a Hugging Face model config as we write it."""


@dataclass(frozen=True, slots=True)
class LawGpu:
    """Rates of one GPU.

    Attributes:
        name: Name as run configs spell it.
        tflops: Dense bf16 rate, 10^12 FLOP/s.
        memory_gb_per_s: Memory bandwidth, 10^9 bytes/s.
        link_gb_per_s: Bandwidth between GPUs of a server, 10^9 bytes/s.
    """

    name: str
    tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float


# Written again, not taken from the catalogue of `server`: a wrong rate there must not be wrong in the truth as well.
GPUS: Mapping[str, LawGpu] = {
    gpu.name: gpu
    for gpu in (
        LawGpu("A100", 312.0, 2_039.0, 600.0),
        LawGpu("H100", 989.5, 3_350.0, 900.0),
        LawGpu("H200", 989.5, 4_800.0, 900.0),
        LawGpu("L4", 121.0, 300.0, 64.0),
    )
}


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture, with the facts its `config.json` states.

    Attributes:
        name: Name under which the generator knows it.
        served_name: Name a server would report.
        architecture: Entry of `architectures` in the config.
        model_type: Family key of the config.
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        ffn_size: Width of the dense MLP; every model here gates it, so three matrices.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head; not always hidden_size / num_heads.
        vocab_size: Vocabulary.
        dtype: Weight and cache type.
        dtype_bytes: Its width.
        num_experts: Experts per layer; 0 for a dense model.
        experts_per_token: Experts a token visits.
        expert_ffn_size: Width of one expert.
        max_position_embeddings: Longest sequence of the architecture.
    """

    name: str
    served_name: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str = "bfloat16"
    dtype_bytes: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    max_position_embeddings: int = 8_192

    @property
    def _attention_params(self) -> int:
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def active_layer_params(self) -> int:
        """Weights one token is multiplied with, all layers, without embedding and head."""
        if self.num_experts:
            mlp = 3 * self.hidden_size * self.expert_ffn_size * self.experts_per_token
        else:
            mlp = 3 * self.hidden_size * self.ffn_size
        return self.num_layers * (self._attention_params + mlp)

    def touched_layer_params(self, scheduled_tokens: int) -> float:
        """Return the weights a step of so many tokens reads, experts at their expected number."""
        if not self.num_experts:
            return float(self.active_layer_params)
        # Each token misses an expert with this probability if the router spreads tokens evenly and independently.
        missed = (1 - self.experts_per_token / self.num_experts) ** scheduled_tokens
        experts = self.num_experts * (1 - missed)
        mlp = 3 * self.hidden_size * self.expert_ffn_size * experts
        return self.num_layers * (self._attention_params + mlp)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache one token takes, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def config(self) -> dict[str, ConfigValue]:
        """Return a Hugging Face style `config.json`."""
        config: dict[str, ConfigValue] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "use_cache": True,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_size,
            "vocab_size": self.vocab_size,
        }
        if self.num_experts:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_ffn_size,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
            }
        return config


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="tiny",
            served_name="tracefit/tiny-mistral",
            architecture="MistralForCausalLM",
            model_type="mistral",
            num_layers=8,
            hidden_size=512,
            ffn_size=1_408,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=8_192,
        ),
        Model(
            name="llama-8b",
            served_name="meta-llama/Llama-3.1-8B-Instruct",
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_layers=32,
            hidden_size=4_096,
            ffn_size=14_336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            max_position_embeddings=131_072,
        ),
        Model(
            name="llama-70b",
            served_name="meta-llama/Llama-2-70b-hf",
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_layers=80,
            hidden_size=8_192,
            ffn_size=28_672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32_000,
            max_position_embeddings=4_096,
        ),
        Model(
            name="qwen-moe-30b",
            served_name="Qwen/Qwen3-30B-A3B",
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            num_layers=48,
            hidden_size=2_048,
            ffn_size=6_144,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=151_936,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_size=768,
            max_position_embeddings=40_960,
        ),
    )
}

_T = TypeVar("_T")


def lookup(table: Mapping[str, _T], name: str, *, option: str) -> _T:
    """Return the entry `name` of `table`.

    Raises:
        UsageError: There is none; the message lists what there is.
    """
    try:
        return table[name]
    except KeyError:
        known = ", ".join(sorted(table))
        raise UsageError(f"unknown {option} {name!r}", where=option, hint=f"known: {known}") from None
