"""The size of a decoder and the cost of a token in it: parameters, KV bytes, FLOPs, weight bytes.

A model is a list of layers, and each layer says what it does: attention over cached keys and values, a state of fixed
size per request, dense FFNs, experts. Everything here is arithmetic on them; reading them from a configuration is the
work of `model_config` and `model_layers`. Only matrices are counted: norms and biases are below 0.2 % of any model
supported.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.server.documents import Scalar

_T = TypeVar("_T")

AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]
MatrixKind = Literal["attention", "state", "ffn", "shared", "router", "expert"]

_SLUG_CHARS = 64  # a deployment id is read in tables and typed to name one
_CACHE_FOLDER = re.compile(r"models--(?:[^/\\]+?--)?([^/\\]+)")  # models--org--name of a hub cache
_INDEX_SCALE_ELEMENTS = 128  # keys of an indexer are cached in fp8, with a scale of 4 bytes for each 128


# -- parts of a layer ------------------------------------------------------------------------------------


class LatentAttention(msgspec.Struct, frozen=True):
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


class CompressedAttention(msgspec.Struct, frozen=True):
    """Sizes of attention that caches one vector as key and value, and one for several tokens (DeepSeek-V4).

    Attributes:
        output_groups: Groups of heads; each is projected by itself before one matrix joins them.
        output_rank: Width that the output of each group is projected to.
        ratio: Tokens that one cached entry stands for; 1 where every token has its own.
        recent_tokens: Last tokens that it reads one by one beside the entries; 0 where it reads no entries of several.
    """

    output_groups: int
    output_rank: int
    ratio: int = 1
    recent_tokens: int = 0


class Indexer(msgspec.Struct, frozen=True):
    """The small attention that chooses which cached tokens the attention of its layer reads (DeepSeek-V3.2).

    Attributes:
        heads: Its query heads.
        head_dim: Width of a query head, and of the one key that it caches per token, or per entry of several.
    """

    heads: int
    head_dim: int

    @property
    def cached_bytes(self) -> int:
        """Bytes cached per token or entry: a key in fp8 and its scales."""
        return self.head_dim + 4 * -(-self.head_dim // _INDEX_SCALE_ELEMENTS)


class CacheRead(NamedTuple):
    """One kind of read of cached tokens: how far back it goes, and what a token in reach costs; that is a share where
    an entry stands for several.
    """

    window: int | None
    prefill_pair_flops: float
    decode_pair_flops: float
    cached_bytes: float
    shards: int


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one layer over the tokens before.

    Attributes:
        heads: Query heads.
        kv_heads: Key/value heads (for MLA equal to `heads`, though none of them is cached).
        head_dim: Width of one query head; not always hidden / heads.
        value_head_dim: Width of one value head; None for that of a query head.
        window: How many tokens back it reads (sliding or chunked attention); None is all.
        gated: A gate as wide as the output multiplies it.
        query_rank: Width queries are compressed to, outside latent attention; None for none.
        latent: Sizes of latent attention; None for every other kind.
        compressed: Sizes of compressed attention; None for every other kind.
        indexer: The indexer that chooses the tokens to read; None reads all.
        indexed_tokens: How many tokens are chosen, whether by this layer's indexer or an earlier one's; None is all.
        is_cached: It has keys and values of its own; otherwise it reads those of an earlier layer.
        keys_are_values: One matrix makes keys and values, which are both cached, except in compressed attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    window: int | None = None
    gated: bool = False
    query_rank: int | None = None
    latent: LatentAttention | None = None
    compressed: CompressedAttention | None = None
    indexer: Indexer | None = None
    indexed_tokens: int | None = None
    is_cached: bool = True
    keys_are_values: bool = False

    @property
    def kind(self) -> AttentionKind:
        """Kind of attention, by the ratio of KV heads to heads."""
        if self.latent is not None:
            return "MLA"
        # The ratio decides before the count: with a single head, one KV head is still one per head.
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        if self.latent is not None:
            return self.latent.v_head_dim
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def parameters(self, hidden: int) -> int:
        """Return the parameters of its matrices."""
        width = self.heads * self.value_width
        matrices = width * hidden * (1 + self.gated)
        if (grouped := self.compressed) is not None:
            # A matrix for each group of heads, all together as wide as the heads, and one that joins the groups.
            matrices = grouped.output_rank * (width + grouped.output_groups * hidden)
        if self.latent is None:
            # Not hidden: Qwen3-30B-A3B has heads of 128 where hidden / heads is 64.
            queries, rank = self.heads * self.head_dim, self.query_rank
            matrices += hidden * queries if rank is None else rank * (hidden + queries)
            if self.is_cached:
                values = 0 if self.keys_are_values else self.value_width
                matrices += hidden * self.kv_heads * (self.head_dim + values)
            if self.indexer is not None:
                matrices += (rank or hidden) * self.indexer.heads * self.indexer.head_dim
            return matrices + self.unquantized_parameters(hidden)
        mla = self.latent
        queries = self.heads * mla.qk_head_dim
        matrices += hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
        # Keys without position and values are expanded from the latent; `cached_elements` is the width of the
        # projection to it.
        matrices += hidden * mla.cached_elements
        matrices += mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        if self.indexer is not None:
            # Its queries come from the compressed ones; its key and the weights of its heads from the hidden vector.
            width = self.indexer.heads * self.indexer.head_dim
            matrices += (mla.q_lora_rank or hidden) * width
            matrices += hidden * (self.indexer.head_dim + self.indexer.heads)
        return matrices

    def unquantized_parameters(self, hidden: int) -> int:
        """Return the parameters of its matrices that no method quantizes: those that make entries of several tokens,
        and weights of their indexer's heads.
        """
        if self.compressed is None or self.compressed.ratio == 1:
            return 0
        # Vectors and their weights in an entry. Entries that an indexer chooses are of twice as many tokens, so that
        # they overlap, and have a second pair for the tokens before; the keys of the indexer are made alike.
        if (chosen := self.indexer) is None:
            return 2 * hidden * self.head_dim
        return 2 * 2 * hidden * (self.head_dim + chosen.head_dim) + hidden * chosen.heads

    @property
    def elements(self) -> int:
        """Elements of keys and values of one token or entry, cached here or by an earlier layer."""
        if self.latent is not None:
            return self.latent.cached_elements
        return self.kv_heads * (self.head_dim + (0 if self.compressed else self.value_width))

    @property
    def _ratio(self) -> int:
        """Tokens that one cached entry stands for."""
        return self.compressed.ratio if self.compressed else 1

    def cached_bytes(self, kv_bytes: float) -> float:
        """Return the bytes that one token adds to the cache: its own, for layers that read it, and its share of an
        entry of several.
        """
        if not self.is_cached:
            return 0.0
        own = self.elements * kv_bytes if self._ratio > 1 else 0.0
        entry = self.elements * kv_bytes + (self.indexer.cached_bytes if self.indexer else 0)
        return own + entry / self._ratio

    def kv_shards(self, tp: int) -> int:
        """Into how many parts its KV cache is divided under tensor parallelism.

        KV heads fewer than ranks are replicated, and the latent of MLA is whole on every rank.
        """
        return 1 if self.latent is not None else min(tp, self.kv_heads)

    @property
    def prefill_pair_flops(self) -> int:
        """FLOPs of one (query token, visible token or entry) pair of a prefill.

        Scores and weighted values take 2·heads·width each; MLA prefills with its keys and values expanded.
        """
        query = self.head_dim if self.latent is None else self.latent.qk_head_dim
        return 2 * self.heads * (query + self.value_width)

    @property
    def decode_pair_flops(self) -> int:
        """FLOPs of one (query token, cached token or entry) pair of a decode.

        MLA decodes on the latent itself: scores over latent and position, values over the latent.
        """
        if self.latent is None:
            return self.prefill_pair_flops
        # The expansion is multiplied into queries and outputs instead (weight absorption of DeepSeek-V2).
        return 2 * self.heads * (self.latent.cached_elements + self.latent.kv_lora_rank)

    def readings(self, kv_bytes: float, tp: int) -> tuple[CacheRead, ...]:
        """Return what it reads of the cache: keys and values in its reach, the last tokens beside entries of several,
        and the keys of an indexer, of all tokens.
        """
        reaches = [n for n in (self.window, self.indexed_tokens) if n is not None]
        flops = self.prefill_pair_flops, self.decode_pair_flops
        recent = self.compressed.recent_tokens if self.compressed else 0
        main = CacheRead(min(reaches, default=None), *flops, self.elements * kv_bytes, self.kv_shards(tp))
        reads = [_per_token(main, self._ratio)]
        if recent:
            reads.append(main._replace(window=recent))
        if self.indexer is not None:
            scores = 2 * self.indexer.heads * self.indexer.head_dim
            keys = CacheRead(None, scores, scores, float(self.indexer.cached_bytes), 1)
            reads.append(_per_token(keys, self._ratio))
        return tuple(reads)


def _per_token(entry: CacheRead, ratio: int) -> CacheRead:
    """Return the read of a token from that of an entry, whose cost `ratio` tokens share."""
    return entry._replace(
        prefill_pair_flops=entry.prefill_pair_flops / ratio,
        decode_pair_flops=entry.decode_pair_flops / ratio,
        cached_bytes=entry.cached_bytes / ratio,
    )


class LayerState(msgspec.Struct, frozen=True):
    """A state of fixed size per request, instead of keys and values per token: linear attention, Mamba, a short
    convolution.

    Attributes:
        kind: `linear`, `mamba` or `conv`.
        parameters: Parameters of its matrices.
        elements: Elements of the recurrent state of one request.
        conv_elements: Elements of the convolution's last inputs, which are kept too.
    """

    kind: str
    parameters: int
    elements: int
    conv_elements: int = 0


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts of one layer, and the shared ones beside them.

    Attributes:
        count: Routed experts.
        per_token: Routed experts that a token visits; the expected number if some choices do nothing.
        ffn: FFN width of one routed expert.
        shared_ffn: Sum of the FFN widths of the shared experts; 0 for none.
        idle: Choices of the router that have no parameters (LongCat's zero experts).
        latent: Width that the hidden vector is projected to for the routed experts; None for no such projection.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    idle: int = 0
    latent: int | None = None


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: attention and a state, which mix tokens, and FFNs and experts, which work on each token by itself.

    Attributes:
        attentions: Attentions, one after the other or beside a state.
        state: The state that it keeps per request; None for no state.
        ffns: FFN widths of the dense FFNs.
        experts: Its experts; None for none.
        other: Parameters of other matrices that each token goes through.
    """

    attentions: tuple[Attention, ...] = ()
    state: LayerState | None = None
    ffns: tuple[int, ...] = ()
    experts: Experts | None = None
    other: int = 0

    @property
    def window(self) -> int | None:
        """How many tokens back it reads; None is all, 0 nothing that is cached."""
        if not self.attentions:
            return 0
        windows = [attention.window for attention in self.attentions]
        return None if None in windows else max(n for n in windows if n is not None)

    @property
    def all_reduces(self) -> int:
        """Sums over tensor-parallel ranks of one token: one after each part."""
        parts = len(self.attentions) + (self.state is not None) + len(self.ffns)
        return parts + (self.experts is not None)


# -- the model -------------------------------------------------------------------------------------------


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder, as far as latency depends on it.

    Attributes:
        name: The model as a reader knows it, for example `meta-llama/Llama-2-70b-hf`.
        model_type: Hugging Face's family name, for example `llama`.
        hidden: Width of the residual stream.
        stack: Its layers, in order.
        ffn: FFN width of a dense layer; if no layer is dense, the stated width, or that of an expert.
        gated_ffn: Three matrices per FFN (gate, up, down) instead of two.
        vocabulary: Rows of the embedding.
        tied_embeddings: Input embedding and output head are one matrix.
        learned_positions: Rows of a learned position embedding; 0 for rotary or ALiBi.
        lookups: Parameters of other tables that a token reads one row of.
        dtype: Data type of activations and of weights that are not quantized.
        dtype_bytes: Its bytes per element.
        quantization: Quantization method, or None.
        attention_weight_bytes: Bytes per element of the attention matrices.
        state_weight_bytes: Bytes per element of the matrices around a state.
        ffn_weight_bytes: Bytes per element of dense FFN matrices.
        shared_weight_bytes: Bytes per element of shared experts.
        expert_weight_bytes: Bytes per element of routed experts.
        head_weight_bytes: Bytes per element of the output head.
        kv_bytes: Bytes per cached KV element.
        state_bytes: Bytes per element of a recurrent state.
        fp8_compute: Matrix products run at the GPU's fp8 rate where it has one.
        assumed: One phrase for each value that the config did not state.
    """

    name: str
    model_type: str
    hidden: int
    stack: tuple[Layer, ...]
    ffn: int
    gated_ffn: bool = True
    vocabulary: int
    tied_embeddings: bool = False
    learned_positions: int = 0
    lookups: int = 0
    dtype: str = "bfloat16"
    dtype_bytes: float = 2.0
    quantization: str | None = None
    attention_weight_bytes: float = 2.0
    state_weight_bytes: float = 2.0
    ffn_weight_bytes: float = 2.0
    shared_weight_bytes: float = 2.0
    expert_weight_bytes: float = 2.0
    head_weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    state_bytes: float = 2.0
    fp8_compute: bool = False
    assumed: tuple[str, ...] = ()

    # -- shape ---------------------------------------------------------------------------------------

    @cached_property
    def _kinds(self) -> Counter[Layer]:
        """The different layers, and how many there are of each: sums over them take as long for a thousand layers as
        for one.
        """
        return Counter(self.stack)

    @cached_property
    def attentions(self) -> Counter[Attention]:
        """The different attentions, and how many there are of each."""
        return _counted((attention, n) for layer, n in self._kinds.items() for attention in layer.attentions)

    @cached_property
    def states(self) -> Counter[LayerState]:
        """The different states, and how many there are of each."""
        return _counted((layer.state, n) for layer, n in self._kinds.items() if layer.state is not None)

    @cached_property
    def moes(self) -> Counter[Experts]:
        """The different sets of experts, and how many layers have each."""
        return _counted((layer.experts, n) for layer, n in self._kinds.items() if layer.experts is not None)

    @property
    def layers(self) -> int:
        """Layers."""
        return len(self.stack)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer, how many tokens back it reads; None is all, 0 is a layer without cached keys and values."""
        return tuple(layer.window for layer in self.stack)

    @property
    def linear_layers(self) -> int:
        """Layers with a state: its cost does not depend on the context."""
        return self.states.total()

    @property
    def context_layers(self) -> int:
        """Attentions over cached keys and values of every token; most models have one a layer."""
        return self.attentions.total()

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Which layers route tokens to experts, in order; empty for a dense model."""
        return tuple(i for i, layer in enumerate(self.stack) if layer.experts is not None)

    @property
    def moe_layers(self) -> int:
        """Layers that route tokens to experts."""
        return self.moes.total()

    @property
    def dense_layers(self) -> int:
        """Layers with an FFN for every token."""
        return sum(n for layer, n in self._kinds.items() if layer.ffns)

    @property
    def all_reduces(self) -> int:
        """Sums over tensor-parallel ranks of one token; two a layer in a usual decoder."""
        return sum(n * layer.all_reduces for layer, n in self._kinds.items())

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.moe_layers > 0

    @cached_property
    def _main(self) -> Attention | None:
        """The attention that stands for the model: the first that reads all tokens, or the first; None for a model
        without any.
        """
        whole = (attention for attention in self.attentions if attention.window is None)
        return next(whole, next(iter(self.attentions), None))

    @property
    def heads(self) -> int:
        """Query heads; 0 for a model without attention."""
        return self._main.heads if self._main else 0

    @property
    def kv_heads(self) -> int:
        """Key/value heads; 0 for a model without attention."""
        return self._main.kv_heads if self._main else 0

    @property
    def head_dim(self) -> int:
        """Width of one query head; 0 for a model without attention."""
        return self._main.head_dim if self._main else 0

    @property
    def latent(self) -> LatentAttention | None:
        """Sizes of latent attention; None for every other kind."""
        return self._main.latent if self._main else None

    @property
    def attention(self) -> AttentionKind | None:
        """Kind of attention, by the ratio of KV heads to heads; None without attention."""
        return self._main.kind if self._main else None

    @cached_property
    def _experts(self) -> Experts:
        first = next(iter(self.moes), None)
        return first or Experts(count=0, per_token=0, ffn=0)

    @property
    def experts(self) -> int:
        """Routed experts of an MoE layer; 0 for a dense model."""
        return self._experts.count

    @property
    def experts_per_token(self) -> int:
        """Routed experts each token visits."""
        return self._experts.per_token

    @property
    def expert_ffn(self) -> int:
        """FFN width of one routed expert."""
        return self._experts.ffn

    @property
    def shared_ffn(self) -> int:
        """Sum of the FFN widths of the shared experts; 0 for none."""
        return self._experts.shared_ffn

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
        """(window in tokens or None, number of attentions) pairs, full attention first."""
        return _by_window((attention.window, n) for attention, n in self.attentions.items())

    # -- parameters ----------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention matrices of one layer with a context."""
        return self._main.parameters(self.hidden) if self._main else 0

    def ffn_parameters(self, width: int, *, hidden: int | None = None) -> int:
        """Return the parameters of one FFN: 3 matrices when gated, 2 when not; `hidden` is the model's unless it works
        on another vector.
        """
        return (3 if self.gated_ffn else 2) * (hidden or self.hidden) * width

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, tied or not."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embeddings and output head, a tied matrix once."""
        copies = 1 if self.tied_embeddings else 2
        return copies * self.head_parameters + self.learned_positions * self.hidden + self.lookups

    def _expert_parameters(self, experts: Experts) -> int:
        return self.ffn_parameters(experts.ffn, hidden=experts.latent)

    def _layer_matrices(self, layer: Layer) -> dict[MatrixKind, int]:
        """Return the parameters of a layer by kind of matrix, without its routed experts."""
        moe = layer.experts
        # Into the experts' vector and out of it.
        latent = 2 * self.hidden * moe.latent if moe is not None and moe.latent else 0
        plain = sum(attention.unquantized_parameters(self.hidden) for attention in layer.attentions)
        return {
            "attention": sum(attention.parameters(self.hidden) for attention in layer.attentions) - plain,
            "state": layer.state.parameters if layer.state else 0,
            "ffn": sum(map(self.ffn_parameters, layer.ffns)) + layer.other,
            "shared": (self.ffn_parameters(moe.shared_ffn) + latent) if moe else 0,
            # The router stays in the model's data type under every quantization method, as embeddings do.
            "router": (self.hidden * (moe.count + moe.idle) if moe else 0) + plain,
        }

    @cached_property
    def _bytes_of(self) -> dict[MatrixKind, float]:
        return {
            "attention": self.attention_weight_bytes,
            "state": self.state_weight_bytes,
            "ffn": self.ffn_weight_bytes,
            "shared": self.shared_weight_bytes,
            "router": self.dtype_bytes,
            "expert": self.expert_weight_bytes,
        }

    @cached_property
    def _common(self) -> Counter[MatrixKind]:
        """Parameters over all layers by kind of matrix, without routed experts."""
        return _counted(
            (kind, n * parameters)
            for layer, n in self._kinds.items()
            for kind, parameters in self._layer_matrices(layer).items()
        )

    @property
    def _routed(self) -> int:
        """Parameters of the routed experts over all layers."""
        return sum(n * moe.count * self._expert_parameters(moe) for moe, n in self.moes.items())

    @property
    def parameters(self) -> int:
        """Parameters of the whole model (text decoder; norms and biases left out)."""
        return self.embedding_parameters + self._common.total() + self._routed

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: as `parameters`, with only the experts it visits."""
        visited = sum(n * moe.per_token * self._expert_parameters(moe) for moe, n in self.moes.items())
        return self.embedding_parameters + self._common.total() + visited

    # -- KV cache ------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token_per_layer(self) -> float:
        """KV bytes per token in one layer, over all ranks: 2·kv heads·head_dim elements, or the MLA latent."""
        return self._main.cached_bytes(self.kv_bytes) if self._main else 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes that one token writes, over all layers with a context and tensor-parallel ranks."""
        return sum((n * a.cached_bytes(self.kv_bytes) for a, n in self.attentions.items()), 0.0)

    @property
    def state_bytes_per_request(self) -> float:
        """Bytes of state that one request keeps, over all layers and ranks, whatever its length."""
        return sum(
            (
                n * (state.elements * self.state_bytes + state.conv_elements * self.dtype_bytes)
                for state, n in self.states.items()
            ),
            0.0,
        )

    def kv_shards(self, tp: int) -> int:
        """Into how many parts a layer's KV cache is divided under tensor parallelism."""
        return self._main.kv_shards(tp) if self._main else 1

    def check_tensor_parallel(self, tp: int) -> None:
        """Refuse a tensor-parallel size that the heads cannot be divided by, as vLLM does.

        Raises:
            UsageError: `tp` is not positive, does not divide the heads, or neither divides the KV heads nor is
                a multiple of them.
        """
        if tp < 1:
            raise UsageError(f"tensor_parallel must be at least 1, not {tp}")
        for attention in self.attentions:
            heads, kv_heads = attention.heads, attention.kv_heads
            if heads % tp:
                fault = f"{heads} attention heads cannot be divided over {tp} tensor-parallel ranks"
            elif attention.latent is None and kv_heads % tp and tp % kv_heads:
                fault = f"{kv_heads} KV heads can be neither divided over nor repeated on {tp} tensor-parallel ranks"
            else:
                continue
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
        """FLOPs of one (query token, visible token) pair in one layer of a prefill."""
        return self._main.prefill_pair_flops if self._main else 0

    @property
    def decode_pair_flops(self) -> int:
        """FLOPs of one (query token, cached token) pair in one layer of a decode."""
        return self._main.decode_pair_flops if self._main else 0

    def readings(self, tp: int) -> tuple[tuple[CacheRead, int], ...]:
        """Return the different reads of cached tokens on `tp` ranks, each with how many there are, in order of the
        layers.
        """
        reads = _counted(
            (reading, n)
            for attention, n in self.attentions.items()
            for reading in attention.readings(self.kv_bytes, tp)
        )
        return tuple(reads.items())

    # -- weights -------------------------------------------------------------------------------------

    @property
    def fixed_weight_bytes(self) -> float:
        """Weight bytes that every step reads: all but routed experts and input embedding, over all ranks."""
        layers = sum(n * self._bytes_of[kind] for kind, n in self._common.items())
        return layers + self.head_parameters * self.head_weight_bytes

    def bytes_of_expert(self, experts: Experts) -> float:
        """Return the bytes of one of these routed experts."""
        return self._expert_parameters(experts) * self.expert_weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in one layer."""
        return self.bytes_of_expert(self._experts)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model in memory, over all ranks."""
        rows = self.embedding_parameters - self.head_parameters
        return self.fixed_weight_bytes + self._routed * self.expert_weight_bytes + rows * self.dtype_bytes

    # -- facts ---------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Scalar]:
        """Return the model facts of a coefficient file, as a flat mapping in a fixed order."""
        windows = [attention.window for attention in self.attentions.elements() if attention.window]
        return {
            "model": self.name,
            "model_type": self.model_type,
            "layers": self.layers,
            # Only for models with such layers: these facts go into the deployment id, which must not change for others.
            **({"linear_layers": self.linear_layers} if self.linear_layers else {}),
            **({"attention_layers": self.context_layers} if self._is_uneven else {}),
            "moe_layers": self.moe_layers,
            "hidden_size": self.hidden,
            "heads": self.heads or None,
            "kv_heads": self.kv_heads or None,
            "head_dim": self.head_dim or None,
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

    @property
    def _is_uneven(self) -> bool:
        """Whether attentions and states do not add up to the layers, so that the other facts do not tell how many
        attentions there are.
        """
        return self.context_layers + self.linear_layers != self.layers


def _counted(pairs: Iterable[tuple[_T, int]]) -> Counter[_T]:
    """Add up counts by what they count."""
    counts: Counter[_T] = Counter()
    for what, n in pairs:
        counts[what] += n
    return counts


def _by_window(pairs: Iterable[tuple[int | None, int]]) -> tuple[tuple[int | None, int], ...]:
    return tuple(sorted(_counted(pairs).items(), key=lambda item: (item[0] is not None, item[0] or 0)))


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
