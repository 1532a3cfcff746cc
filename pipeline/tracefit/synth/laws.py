"""Laws with known coefficients for step times and waits around the engine, with their models and GPUs.

Times are microseconds, sizes are tokens or requests, FLOPs and bytes are per GPU unless a name says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import msgspec

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


# -- models and GPUs: enough for a roofline and a valid `config.json` -----------------------------------


ConfigValue: TypeAlias = str | int | float | bool | list[str] | None
"""A value of a Hugging Face model config as we write it."""


class LawGpu(msgspec.Struct, frozen=True):
    """Rates of one GPU."""

    name: str  # as run configs spell it
    tflops: float  # dense bf16, 10^12 FLOP/s
    memory_gb_per_s: float  # 10^9 bytes/s
    link_gb_per_s: float  # between GPUs of a server


# Not taken from the catalogue of `server`: a wrong rate there must not be wrong in the truth as well.
GPUS: Mapping[str, LawGpu] = {
    gpu.name: gpu
    for gpu in (
        LawGpu("A100", 312.0, 2_039.0, 600.0),
        LawGpu("H100", 989.5, 3_350.0, 900.0),
        LawGpu("H200", 989.5, 4_800.0, 900.0),
        LawGpu("L4", 121.0, 300.0, 64.0),
    )
}


class ServedModel(msgspec.Struct, frozen=True):
    """An architecture, with the facts its `config.json` states."""

    name: str  # under which the generator knows it
    served_name: str  # which a server would report
    architecture: str  # entry of `architectures` in the config
    model_type: str
    num_layers: int
    hidden_size: int  # width of the residual stream
    ffn_size: int  # width of the dense MLP; every model here gates it, so three matrices
    num_heads: int
    num_kv_heads: int
    head_dim: int  # not always hidden_size / num_heads
    vocab_size: int
    dtype: str = "bfloat16"  # of weights and cache
    dtype_bytes: int = 2
    num_experts: int = 0  # per layer; 0 for a dense model
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    max_position_embeddings: int = 8_192

    @property
    def _attention_params(self) -> int:
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def active_layer_params(self) -> int:
        """Weights one token is multiplied with, all layers, without embedding and head."""
        width = self.expert_ffn_size * self.experts_per_token if self.num_experts else self.ffn_size
        return self.num_layers * (self._attention_params + 3 * self.hidden_size * width)

    def touched_layer_params(self, scheduled_tokens: int) -> float:
        """Return the weights that a step reads, experts at their expected number."""
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


MODELS: Mapping[str, ServedModel] = {
    model.name: model
    for model in (
        ServedModel(
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
        ServedModel(
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
        ServedModel(
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
        ServedModel(
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


def lookup(table: Mapping[str, _T], name: str | None, *, option: str) -> _T:
    """Return the entry `name` of `table`.

    Raises:
        UsageError: No such entry; the message lists the existing ones.
    """
    if name is None or name not in table:
        hint = f"known: {', '.join(sorted(table))}"
        raise UsageError(f"unknown {option} {name!r}", where=option, hint=hint)
    return table[name]


# -- laws -----------------------------------------------------------------------------------------------


class Composition(msgspec.Struct, frozen=True):
    """The batch of one step.

    Prefill means "no output token yet", decode "has output", as the trace counts them. A request that resumes
    after a preemption can therefore be one decode request with hundreds of decode tokens.
    """

    num_prefill_reqs: int = 0  # with tokens in the step
    num_decode_reqs: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0  # in the KV cache before the step, of decode requests
    prefill_context_tokens: int = 0  # and of prefill requests
    attention_pairs: int = 0  # (query, key) of the requests with more than one token in the step

    @property
    def scheduled_tokens(self) -> int:
        """Tokens of the step, prefill and decode."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def num_reqs(self) -> int:
        """Requests with tokens in the step."""
        return self.num_prefill_reqs + self.num_decode_reqs

    @property
    def recompute_tokens(self) -> int:
        """Decode tokens beyond one per request: those that resumed requests compute again."""
        return self.decode_tokens - self.num_decode_reqs


class StepLaw(Protocol):
    """A law of step times: the time of a step for its batch."""

    def step_us(self, step: Composition) -> float:
        """Return the noise-free time of a step that carries at least one token, in µs."""
        ...


class LinearLaw(msgspec.Struct, frozen=True):
    """Step time as a linear function of facts in the trace; defaults as of a small model on an H100.

    time = intercept + a·(prefill + recompute tokens) + b·decode requests + c·decode context tokens
           + d·prefill requests + e·prefill context tokens

    Recomputed tokens of a resumed request cost as much as prompt tokens, although the trace counts them as decode.
    """

    intercept_us: float = 7_000.0
    per_prefill_token_us: float = 26.0
    per_decode_req_us: float = 15.0
    per_context_token_us: float = 0.003
    per_prefill_req_us: float = 40.0
    per_prefill_context_token_us: float = 0.0

    def step_us(self, step: Composition) -> float:
        """Return the noise-free time of `step`, in µs."""
        return (
            self.intercept_us
            + self.per_prefill_token_us * (step.prefill_tokens + step.recompute_tokens)
            + self.per_decode_req_us * step.num_decode_reqs
            + self.per_context_token_us * step.context_tokens
            + self.per_prefill_req_us * step.num_prefill_reqs
            + self.per_prefill_context_token_us * step.prefill_context_tokens
        )


class RooflineLaw(msgspec.Struct, frozen=True):
    """Step time as the larger of compute and memory time plus overheads; no linear model is equal to it."""

    model: ServedModel
    gpu: LawGpu
    tp: int = 1  # tensor parallel size; work and weights are split evenly
    compute_efficiency: float = 0.55  # share of the peak FLOP rate that is reached
    memory_efficiency: float = 0.75  # share of the peak memory bandwidth that is reached
    base_us: float = 1_200.0  # of any step: launches, sampling, scheduling
    per_req_us: float = 8.0
    allreduce_latency_us: float = 9.0  # fixed cost of one all-reduce; two per layer where tp > 1

    def compute_us(self, step: Composition) -> float:
        """Return the time the arithmetic of `step` needs, in µs."""
        model = self.model
        linear = 2 * model.active_layer_params * step.scheduled_tokens
        head = 2 * model.hidden_size * model.vocab_size * step.num_reqs
        # A decode query attends to its context and itself; the scheduler counts the pairs of longer chunks.
        pairs = step.attention_pairs + step.context_tokens + step.num_decode_reqs
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        rate_per_us = self.gpu.tflops * 1e6 * self.compute_efficiency * self.tp
        return (linear + head + attention) / rate_per_us

    def memory_us(self, step: Composition) -> float:
        """Return the time `step` needs to read its weights and KV cache, in µs."""
        model = self.model
        # The input embedding is a lookup of a few rows; the head is a matrix that each step reads.
        weights = model.touched_layer_params(step.scheduled_tokens) + model.hidden_size * model.vocab_size
        kv_tokens = step.context_tokens + step.prefill_context_tokens + step.scheduled_tokens
        size_bytes = weights * model.dtype_bytes + kv_tokens * model.kv_bytes_per_token
        return size_bytes / (self.gpu.memory_gb_per_s * 1e3 * self.memory_efficiency * self.tp)

    def allreduce_us(self, step: Composition) -> float:
        """Return the time spent exchanging activations between GPUs, in µs."""
        if self.tp == 1:
            return 0.0
        # A ring all-reduce sends 2 (tp - 1) / tp of the data over each link; attention and MLP of a layer
        # need one each.
        size_bytes = step.scheduled_tokens * self.model.hidden_size * self.model.dtype_bytes
        share = 2 * (self.tp - 1) / self.tp
        once_us = self.allreduce_latency_us + share * size_bytes / (self.gpu.link_gb_per_s * 1e3)
        return 2 * self.model.num_layers * once_us

    def step_us(self, step: Composition) -> float:
        """Return the noise-free time of `step`, in µs."""
        bound_us = max(self.compute_us(step), self.memory_us(step))
        return bound_us + self.allreduce_us(step) + self.base_us + self.per_req_us * step.num_reqs


class AdmissionLaw(msgspec.Struct, frozen=True):
    """API work between ARRIVED and the engine's input socket.

    The time to QUEUED is longer: the engine core drains its socket between steps only.
    """

    # On seven CPU runs of an instrumented vLLM 0.15.1 the API work is 1.2 to 1.6 ms.
    base_us: float = 1_300.0
    per_prompt_token_us: float = 0.4
    jitter: float = 0.04  # sigma of a log-normal factor

    def work_us(self, prompt_tokens: int) -> float:
        """Return the API work of a request without jitter, in µs."""
        return self.base_us + self.per_prompt_token_us * prompt_tokens


class DepartureLaw(msgspec.Struct, frozen=True):
    """FINISHED to DEPARTED: the API process works through the outputs of the finishing step."""

    # Measured: 90 to 215 us per request in the batch, 100 to 350 us per request that finishes, nothing per
    # output token.
    base_us: float = 700.0
    per_batch_req_us: float = 120.0
    per_finishing_req_us: float = 200.0  # itself included
    jitter: float = 0.05  # sigma of a log-normal factor

    def departure_us(self, batch_reqs: int, finishing_reqs: int) -> float:
        """Return the departure overhead without jitter, in µs."""
        return self.base_us + self.per_batch_req_us * batch_reqs + self.per_finishing_req_us * finishing_reqs
