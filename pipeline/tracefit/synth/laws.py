"""Laws with known coefficients: how long a step takes, and how long requests wait around the engine.

Times are microseconds, sizes are tokens or requests, FLOPs and bytes are per GPU unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tracefit.synth.models import LawGpu, Model


@dataclass(frozen=True, slots=True)
class Composition:
    """The batch of one step.

    Prefill means "no output token yet", decode "has output", as the trace counts them. A request that resumes
    after a preemption can therefore be one decode request with hundreds of decode tokens.

    Attributes:
        num_prefill_reqs: Requests with tokens in the step and no output yet.
        num_decode_reqs: Requests with tokens in the step and some output.
        prefill_tokens: Tokens of the prefill requests.
        decode_tokens: Tokens of the decode requests.
        context_tokens: KV tokens in cache before the step, summed over decode requests.
        prefill_context_tokens: KV tokens in cache before the step, summed over prefill requests.
        attention_pairs: (query, key) pairs of the requests with more than one token in the step.
    """

    num_prefill_reqs: int = 0
    num_decode_reqs: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0
    prefill_context_tokens: int = 0
    attention_pairs: int = 0

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
        """Decode tokens beyond one per request: what resumed requests compute again."""
        return self.decode_tokens - self.num_decode_reqs


@runtime_checkable
class StepLaw(Protocol):
    """A law of step times: the time of a step for its batch."""

    def step_us(self, step: Composition) -> float:
        """Return the noise-free time of a step that carries at least one token, in µs."""
        ...


@dataclass(frozen=True, slots=True)
class LinearLaw:
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


@dataclass(frozen=True, slots=True)
class RooflineLaw:
    """Step time as the larger of compute and memory time plus overheads; no linear model holds it exactly.

    Attributes:
        model: Architecture that is served.
        gpu: Rates of one GPU.
        tp: Tensor parallel size; work and weights are split evenly.
        compute_efficiency: Share of the peak FLOP rate that is reached.
        memory_efficiency: Share of the peak memory bandwidth that is reached.
        base_us: Cost of any step: launches, sampling, scheduling.
        per_req_us: Cost per request in the step.
        allreduce_latency_us: Fixed cost of one all-reduce; two per layer where tp > 1.
    """

    model: Model
    gpu: LawGpu
    tp: int = 1
    compute_efficiency: float = 0.55
    memory_efficiency: float = 0.75
    base_us: float = 1_200.0
    per_req_us: float = 8.0
    allreduce_latency_us: float = 9.0

    def compute_us(self, step: Composition) -> float:
        """Return the time the arithmetic of `step` needs, in µs."""
        model = self.model
        linear = 2 * model.active_layer_params * step.scheduled_tokens
        head = 2 * model.hidden_size * model.vocab_size * step.num_reqs
        # A decode query meets its context and itself; pairs of longer chunks are counted by the scheduler.
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
        # A ring all-reduce sends 2 (tp - 1) / tp of the data over each link; attention and MLP of a layer need one each.
        size_bytes = step.scheduled_tokens * self.model.hidden_size * self.model.dtype_bytes
        share = 2 * (self.tp - 1) / self.tp
        once_us = self.allreduce_latency_us + share * size_bytes / (self.gpu.link_gb_per_s * 1e3)
        return 2 * self.model.num_layers * once_us

    def step_us(self, step: Composition) -> float:
        """Return the noise-free time of `step`, in µs."""
        bound_us = max(self.compute_us(step), self.memory_us(step))
        return bound_us + self.allreduce_us(step) + self.base_us + self.per_req_us * step.num_reqs


@dataclass(frozen=True, slots=True)
class AdmissionLaw:
    """API work between ARRIVED and the engine's input socket.

    The time to QUEUED is longer: the engine core drains its socket between steps only.
    """

    # On seven CPU runs of an instrumented vLLM 0.15.1 the API work is 1.2 to 1.6 ms.
    base_us: float = 1_300.0
    per_prompt_token_us: float = 0.4
    jitter: float = 0.04

    def work_us(self, prompt_tokens: int) -> float:
        """Return the API work of a request without jitter, in µs."""
        return self.base_us + self.per_prompt_token_us * prompt_tokens


@dataclass(frozen=True, slots=True)
class DepartureLaw:
    """FINISHED to DEPARTED: the API process works through the outputs of the finishing step.

    Attributes:
        base_us: Constant part.
        per_batch_req_us: Per request in the batch of the finishing step.
        per_finishing_req_us: Per request that finishes with it, itself included.
        jitter: Relative noise (sigma of a log-normal factor).
    """

    # Measured: 90 to 215 us per request in the batch, 100 to 350 us per request that finishes, nothing per output token.
    base_us: float = 700.0
    per_batch_req_us: float = 120.0
    per_finishing_req_us: float = 200.0
    jitter: float = 0.05

    def departure_us(self, batch_reqs: int, finishing_reqs: int) -> float:
        """Return the departure overhead without jitter, in µs."""
        return self.base_us + self.per_batch_req_us * batch_reqs + self.per_finishing_req_us * finishing_reqs
