"""The size of a transformer and the cost of a token in it: parameters, KV bytes, FLOPs, weight bytes.

Everything here is arithmetic on a `ModelArchitecture`; reading one from a Hugging Face `config.json` is
`model_config`'s work. Only matrices are counted: norms and biases are below 0.2 % of any model supported.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.server.documents import Scalar

AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]

_SLUG_CHARS = 64  # a deployment id is read in tables and typed to name one
_CACHE_FOLDER = re.compile(r"models--(?:[^/\\]+?--)?([^/\\]+)")  # models--org--name of a hub cache


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek), in elements.

    Attributes:
        q_lora_rank: Width queries are compressed to; None when they are projected directly.
        kv_lora_rank: Width of the latent that is cached for both keys and values.
        qk_nope_head_dim: Part of each query and key head without position.
        qk_rope_head_dim: Part with rotary position, cached once for all heads.
        v_head_dim: Width of each value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cached_elements(self) -> int:
        """Elements cached per token and layer, over all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Sizes of linear attention (gated delta rule), which caches one state per request instead of keys and values per token.

    Attributes:
        key_heads: Query and key heads.
        value_heads: Value heads, each with one state.
        key_head_dim: Width of a query or key head.
        value_head_dim: Width of a value head.
    """

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def parameters_per_hidden(self) -> int:
        """Columns of a layer's matrices: queries, keys, values with gate and output, two scalars per value head."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * (3 * self.value_head_dim + 2)


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only transformer, as far as latency depends on it.

    Attributes:
        name: The model as a reader knows it, for example `meta-llama/Llama-2-70b-hf`.
        model_type: Hugging Face's family name, for example `llama`.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads (for MLA equal to `heads`, though none of them is cached).
        head_dim: Width of one query head; not always hidden / heads.
        latent: Sizes of latent attention; None for every other kind.
        linear: Sizes of linear attention; None for a model without it, or with unknown sizes.
        gated_attention: The query matrix of attention has a gate as wide as itself.
        moe_layer_ids: Which layers route tokens to experts, in order; empty for a dense model.
        ffn: FFN width of a dense layer; if no layer is dense, the stated width, or that of an expert.
        gated_ffn: Three matrices per FFN (gate, up, down) instead of two.
        experts: Routed experts of an MoE layer; 0 for a dense model.
        experts_per_token: Routed experts each token visits.
        expert_ffn: FFN width of one routed expert.
        shared_ffn: Sum of the FFN widths of the shared experts; 0 for none.
        layer_windows: Per layer, how many tokens back it reads (sliding or chunked attention); None is all, 0
            is a layer of linear attention, which has no context.
        vocabulary: Rows of the embedding.
        tied_embeddings: Input embedding and output head are one matrix.
        learned_positions: Rows of a learned position embedding; 0 for rotary or ALiBi.
        dtype: Data type of activations and of weights that are not quantized.
        dtype_bytes: Its bytes per element.
        quantization: Quantization method, or None.
        attention_weight_bytes: Bytes per element of the attention matrices.
        ffn_weight_bytes: Bytes per element of dense and shared FFN matrices.
        expert_weight_bytes: Bytes per element of routed experts.
        kv_bytes: Bytes per cached KV element.
        fp8_compute: Matrix products run at the GPU's fp8 rate where it has one.
        assumed: One phrase for each value that the config did not state.
    """

    name: str
    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    gated_attention: bool = False
    moe_layer_ids: tuple[int, ...] = ()
    ffn: int
    gated_ffn: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    layer_windows: tuple[int | None, ...]
    vocabulary: int
    tied_embeddings: bool = False
    learned_positions: int = 0
    dtype: str = "bfloat16"
    dtype_bytes: float = 2.0
    quantization: str | None = None
    attention_weight_bytes: float = 2.0
    ffn_weight_bytes: float = 2.0
    expert_weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    fp8_compute: bool = False
    assumed: tuple[str, ...] = ()

    # -- shape ---------------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_windows)

    @property
    def linear_layers(self) -> int:
        """Layers of linear attention: their cost does not depend on the context."""
        return self.layer_windows.count(0)

    @property
    def context_layers(self) -> int:
        """Layers that cache keys and values of every token, and read them."""
        return self.layers - self.linear_layers

    @property
    def moe_layers(self) -> int:
        """Layers that route tokens to experts."""
        return len(self.moe_layer_ids)

    @property
    def dense_layers(self) -> int:
        """Layers with one FFN for every token."""
        return self.layers - self.moe_layers

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.moe_layers > 0

    @property
    def attention(self) -> AttentionKind:
        """Kind of attention, by the ratio of KV heads to heads."""
        if self.latent is not None:
            return "MLA"
        # The ratio decides before the count: with a single head, one KV head is still one per head.
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def size_proxy(self) -> int:
        """Hidden size times layers: the crudest measure of a model's size."""
        return self.hidden * self.layers

    @property
    def slug(self) -> str:
        """The model's name as a part of a deployment id: lower case, no organisation, `[a-z0-9.-]` only."""
        return slug_of(self.name)

    @cached_property
    def window_groups(self) -> tuple[tuple[int | None, int], ...]:
        """(window in tokens or None, number of layers) pairs of layers with a context, full attention first."""
        counts = Counter(window for window in self.layer_windows if window != 0)
        return tuple(sorted(counts.items(), key=lambda item: (item[0] is not None, item[0] or 0)))

    # -- parameters ----------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention matrices of one layer with a context."""
        if self.latent is None:
            # Not hidden: Qwen3-30B-A3B has heads of 128 where hidden / heads is 64.
            columns = (2 + self.gated_attention) * self.heads + 2 * self.kv_heads
            return self.hidden * self.head_dim * columns
        mla = self.latent
        query_width = self.heads * mla.qk_head_dim
        query = self.hidden * query_width
        if mla.q_lora_rank is not None:
            query = mla.q_lora_rank * (self.hidden + query_width)
        # Keys without position and values are expanded from the latent; `cached_elements` is the width of the projection to it.
        expand = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + self.hidden * mla.cached_elements + expand + self.heads * mla.v_head_dim * self.hidden

    def ffn_parameters(self, width: int) -> int:
        """Return the parameters of one FFN: 3 matrices when gated, 2 when not."""
        return (3 if self.gated_ffn else 2) * self.hidden * width

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, tied or not."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embeddings and output head, a tied matrix once."""
        copies = 1 if self.tied_embeddings else 2
        return copies * self.head_parameters + self.learned_positions * self.hidden

    def _layer_matrices(self, experts: int) -> tuple[tuple[int, float], ...]:
        """Return (parameters over all layers, bytes of each) per kind of matrix, with `experts` per MoE layer."""
        shared = self.moe_layers * self.ffn_parameters(self.shared_ffn)
        routed = self.moe_layers * experts * self.ffn_parameters(self.expert_ffn)
        linear = self.hidden * self.linear.parameters_per_hidden if self.linear else self.attention_parameters
        attention = self.context_layers * self.attention_parameters + self.linear_layers * linear
        return (
            (attention, self.attention_weight_bytes),
            (self.dense_layers * self.ffn_parameters(self.ffn) + shared, self.ffn_weight_bytes),
            # The router stays in the model's data type under every quantization method, as embeddings do.
            (self.moe_layers * self.hidden * self.experts, self.dtype_bytes),
            (routed, self.expert_weight_bytes),
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole model (text decoder; norms and biases left out)."""
        return self.embedding_parameters + sum(n for n, _ in self._layer_matrices(self.experts))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: as `parameters`, with only the experts it visits."""
        return self.embedding_parameters + sum(n for n, _ in self._layer_matrices(self.experts_per_token))

    # -- KV cache ------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token_per_layer(self) -> float:
        """KV bytes per token in one layer, over all ranks: 2·kv heads·head_dim elements, or the MLA latent."""
        elements = self.latent.cached_elements if self.latent else 2 * self.kv_heads * self.head_dim
        return elements * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes that one token writes, over all layers with a context and tensor-parallel ranks."""
        return self.context_layers * self.kv_bytes_per_token_per_layer

    def kv_shards(self, tp: int) -> int:
        """Into how many parts a layer's KV cache is divided under tensor parallelism.

        KV heads fewer than ranks are replicated, and the latent of MLA is whole on every rank.
        """
        return 1 if self.latent is not None else min(tp, self.kv_heads)

    def check_tensor_parallel(self, tp: int) -> None:
        """Refuse a tensor-parallel size that the heads cannot be divided by, as vLLM does.

        Raises:
            UsageError: `tp` is not positive, does not divide the heads, or neither divides the KV heads nor is
                a multiple of them.
        """
        if tp < 1:
            raise UsageError(f"tensor_parallel must be at least 1, not {tp}")
        if self.heads % tp:
            fault = f"{self.heads} attention heads cannot be divided over {tp} tensor-parallel ranks"
        elif self.latent is None and self.kv_heads % tp and tp % self.kv_heads:
            fault = f"{self.kv_heads} KV heads can be neither divided over nor repeated on {tp} tensor-parallel ranks"
        else:
            return
        raise UsageError(fault, where=self.name, hint="check tensor_parallel and the model's config.json")

    # -- FLOPs ---------------------------------------------------------------------------------------

    @property
    def layer_flops_per_token(self) -> int:
        """FLOPs of one token in the matrices of all layers: 2 per parameter it uses, head excluded."""
        return 2 * (self.active_parameters - self.embedding_parameters)

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of one token in the output head."""
        return 2 * self.head_parameters

    @property
    def prefill_pair_flops(self) -> int:
        """FLOPs of one (query token, visible token) pair in one layer of a prefill.

        Scores and weighted values take 2·heads·width each; MLA prefills with its keys and values expanded.
        """
        if self.latent is None:
            return 4 * self.heads * self.head_dim
        return 2 * self.heads * (self.latent.qk_head_dim + self.latent.v_head_dim)

    @property
    def decode_pair_flops(self) -> int:
        """FLOPs of one (query token, cached token) pair in one layer of a decode.

        MLA decodes on the latent itself: scores over latent and position, values over the latent.
        """
        if self.latent is None:
            return 4 * self.heads * self.head_dim
        # The expansion is multiplied into queries and outputs instead (weight absorption of DeepSeek-V2).
        return 2 * self.heads * (self.latent.cached_elements + self.latent.kv_lora_rank)

    # -- weights -------------------------------------------------------------------------------------

    @property
    def fixed_weight_bytes(self) -> float:
        """Weight bytes that every step reads: all but routed experts and input embedding, over all ranks."""
        layers = sum(n * size for n, size in self._layer_matrices(0))
        return layers + self.head_parameters * self.dtype_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in one layer."""
        return self.ffn_parameters(self.expert_ffn) * self.expert_weight_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model in memory, over all ranks."""
        layers = sum(n * size for n, size in self._layer_matrices(self.experts))
        return layers + self.embedding_parameters * self.dtype_bytes

    # -- facts ---------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Scalar]:
        """Return the model facts of a coefficient file, as a flat mapping in a fixed order."""
        windows = [window for window in self.layer_windows if window]
        return {
            "model": self.name,
            "model_type": self.model_type,
            "layers": self.layers,
            # Only for models with such layers: these facts go into the deployment id, which must not change for others.
            **({"linear_layers": self.linear_layers} if self.linear_layers else {}),
            "moe_layers": self.moe_layers,
            "hidden_size": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention": self.attention,
            "kv_lora_rank": self.latent.kv_lora_rank if self.latent else None,
            "ffn_size": self.ffn if self.dense_layers else None,
            "gated_ffn": self.gated_ffn,
            "is_moe": self.is_moe,
            "experts": self.experts or None,
            "experts_per_token": self.experts_per_token or None,
            "expert_ffn_size": self.expert_ffn or None,
            "shared_ffn_size": self.shared_ffn or None,
            "windowed_layers": len(windows),
            "window_tokens": min(windows, default=None),
            "vocabulary": self.vocabulary,
            "tied_embeddings": self.tied_embeddings,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "weight_bytes": round(self.weight_bytes),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "size_proxy": self.size_proxy,
        }


def slug_of(name: str) -> str:
    """Return a model's name or path as a short readable part of a deployment id.

    `meta-llama/Llama-2-70b-hf` is `llama-2-70b`; a folder of the hub's cache is its model.

    Returns:
        Lower-case text of `[a-z0-9.-]`, at most 64 characters; `model` if no character is left.
    """
    cached = _CACHE_FOLDER.search(name)
    last = cached[1] if cached else re.split(r"[/\\]+", name.rstrip("/\\ "))[-1]
    clean = re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.")
    return clean.removesuffix("-hf")[:_SLUG_CHARS].strip("-.") or "model"
