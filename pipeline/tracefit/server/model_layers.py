"""Read what each layer of a model does from the keys of its configuration.

Families say in their own keys which layers have attention, a window, a state, experts: a list of names, a string with a
letter per layer, a period and an offset, a list of layers. `read_layers` reads all of these into one list of layers.
Where a configuration shows kinds of layers that it cannot read, it refuses: the sizes would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from tracefit.server.architecture import (
    Attention,
    CompressedAttention,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
)
from tracefit.server.documents import excerpt
from tracefit.server.model_keys import (
    ALTERNATING,
    BESIDE,
    COMPRESSED,
    DOUBLE,
    FFN,
    GATED_ATTENTION,
    HEAD_DIM,
    HEADS,
    KNOWN,
    KV_HEADS,
    LAYERS,
    LIGHTNING,
    MOST_HEADS,
    MOST_MATRIX_ROWS,
    MOST_MODEL_LAYERS,
    MOST_WIDTH,
    ONLY_STATES,
    SINGLE_PART,
    UNGATED,
    WINDOWED,
    Config,
    UnknownModelError,
    check_understood,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BESIDE_EXPERTS = ("enable_moe_block", "residual_moe")
DENSE_FFN = "intermediate_size_mlp"  # of Llama 4, whose `intermediate_size` is the experts'
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_k")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
_SPARSE = ("sparse", "moe", "hash_moe")  # DeepSeek-V4 has the last two: its first layers choose by token
_GATES = ("attn_output_gate", "attention_output_gate", "mla_use_output_gate")

_KEYS_READ = frozenset(
    {
        # The kind of each layer. The first that is set counts; the others say the same.
        *(
            "hybrid_override_pattern",
            "layers_block_type",
            "layer_types",
            "attn_type_list",
            "hybrid_layer_pattern",
        ),
        *(
            "attn_layer_period",
            "attn_layer_offset",
            "attn_layer_indices",
            "full_attn_idxs",
            "linear_attn_config",
        ),
        *("layer_group_size", "full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"),
        *("global_attn_every_n_layers", "block_configs"),
        # Which layers have experts.
        *(
            "expert_layer_period",
            "expert_layer_offset",
            "moe_layers_enum",
            "mlp_layer_types",
            "moe_layer_freq",
        ),
        *("moe_layers", *_EXPERTS),
        # Attention that is not the usual one.
        *(
            "swa_num_attention_heads",
            "swa_num_key_value_heads",
            "swa_head_dim",
            "swa_v_head_dim",
            "swa_rope_theta",
        ),
        *("attention_other_setting", "global_head_dim", "attention_k_eq_v", "share_q_dim"),
        *("num_kv_shared_layers", "use_double_wide_mlp", "use_cla", "cla_share_factor", "indexer_types"),
    }
)
"""Keys that `read_layers` reads, of those that show kinds of layers."""

_READ_IF_COMPRESSED = frozenset({"compress_ratios", "o_groups"})
"""Keys that it reads of families with compressed attention only."""


class Stack(NamedTuple):
    """The layers of a model.

    Attributes:
        layers: The layers, in order.
        ffn: FFN width of a dense layer; if no layer is dense, the stated width, or that of an expert.
        lookups: Parameters of tables that each layer reads a row of.
    """

    layers: tuple[Layer, ...]
    ffn: int
    lookups: int = 0


class _Mix(NamedTuple):
    """The parts of a layer that mix tokens: attention, in a window if it is not None, and a state."""

    attention: bool
    window: int | None = None
    state: bool = False


_FULL_ATTENTION, _STATE, _ATTENTION_AND_STATE, _NO_MIX = (
    _Mix(True),
    _Mix(False, state=True),
    _Mix(True, state=True),
    _Mix(False),
)


class _Kinds(NamedTuple):
    """The kind of each layer.

    Attributes:
        mixes: The parts that mix tokens in it.
        ffns: `dense`, `moe` or nothing; None if other keys say it.
        stated: Whether keys say which layers have a state.
    """

    mixes: Sequence[_Mix]
    ffns: Sequence[str] | None = None
    stated: bool = True


def read_layers(config: Config, hidden: int) -> Stack:
    """Return the layers of a model.

    Raises:
        UnknownModelError: A key is missing, or layers are of a kind that is not supported.
        UsageError: A value cannot be.
    """
    count = layer_count(config)
    if config.get("block_configs") is not None:
        return _blocks(config, hidden, count)
    kinds = _kinds(config, count)
    experts = _experts(config, count, kinds)
    check_understood(
        config,
        read=_KEYS_READ | _READ_IF_COMPRESSED if config.family in COMPRESSED else _KEYS_READ,
        # A model that states none, or none of whose layers has any, is dense.
        has_experts=any(experts) or config.find(*_EXPERTS) is not None,
        has_states=kinds.stated or any(mix.state for mix in kinds.mixes),
    )
    attention = _attentions(config, hidden, count) if any(mix.attention for mix in kinds.mixes) else None
    state = _state(config, hidden) if any(mix.state for mix in kinds.mixes) else None
    widths, ffn = _dense_widths(config, hidden, kinds, experts)
    other, first, lookups = _beside(config, hidden, count)
    copies = 2 if config.family in DOUBLE else 1
    layers = [
        Layer(
            attentions=(attention(i, mix.window),) * copies if attention and mix.attention else (),
            state=state if mix.state else None,
            ffns=(widths[i],) * copies if widths[i] else (),
            experts=experts[i],
            other=other + (first if i == 0 else 0),
        )
        for i, mix in enumerate(kinds.mixes)
    ]
    return Stack(tuple(layers), ffn, lookups)


def layer_count(config: Config) -> int:
    """Return the number of layers, which a list of their kinds says too."""
    # LongCat's `num_hidden_layers` counts its attentions in some files.
    is_double = config.family in DOUBLE and config.get("num_layers") is not None
    count = config.integer(*(("num_layers",) if is_double else LAYERS), most=MOST_MODEL_LAYERS)
    if count is not None:
        return count
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = config.get(key)
        if isinstance(kinds, list | str) and 0 < len(kinds) <= MOST_MODEL_LAYERS:
            return len(kinds)
    raise config.missing(*LAYERS)


# -- kinds of layers -------------------------------------------------------------------------------------

_LETTERS = {"M": (_STATE, ""), "*": (_FULL_ATTENTION, ""), "-": (_NO_MIX, "dense"), "E": (_NO_MIX, "moe")}
_PART_MIXES = {"mlp": (_NO_MIX, "dense"), "moe": (_NO_MIX, "moe")}
_WINDOW_KEYS = {
    **dict.fromkeys(("sliding_attention", "local_attention", "local"), "sliding_window"),
    "chunked_attention": "attention_chunk_size",
}
_STATE_KINDS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "kda", "gated_deltanet", "lightning_attention"}
)
# Which tokens sparse attention reads is in the keys of its indexer.
_FULL_KINDS = frozenset({"full_attention", "attention", "global", "global_attention", "deepseek_sparse_attention"})
_LAYER_KINDS = _STATE_KINDS | _FULL_KINDS | _WINDOW_KEYS.keys() | _PART_MIXES.keys()


def _kinds(config: Config, count: int) -> _Kinds:
    """Return the kind of each layer, by the first key that says it."""
    if config.family in COMPRESSED:
        window = config.required("sliding_window", most=MOST_MATRIX_ROWS)
        kinds = _compressed_kinds(config, count)
        return _Kinds([_Mix(True, window if kind == "sliding_attention" else None) for kind in kinds])
    for key, read in (
        ("hybrid_override_pattern", _of_letters),
        ("layers_block_type", _of_names),
        ("layer_types", _of_names),
        ("attn_type_list", _of_ones),
        ("hybrid_layer_pattern", _of_windowed),
        ("attn_layer_period", _of_period),
        ("attn_layer_indices", _of_indices),
        ("full_attn_idxs", _of_indices),
        ("linear_attn_config", _of_linear),
        ("layer_group_size", _of_groups),
    ):
        if config.get(key) is not None:
            return read(config, key, count)
    if config.family in BESIDE:
        return _Kinds((_ATTENTION_AND_STATE,) * count)
    if config.family in ONLY_STATES:
        return _Kinds((_STATE,) * count, ("",) * count)
    # Qwen3-Next: every n-th layer has full attention, the others a linear one.
    if config.get("linear_num_value_heads") is not None:
        interval = config.required("full_attention_interval")
        return _Kinds([_STATE if (i + 1) % interval else _FULL_ATTENTION for i in range(count)])
    return _Kinds([_Mix(True, window) for window in _windows(config, count)], stated=False)


def _of_letters(config: Config, key: str, count: int) -> _Kinds:
    pattern = config.get(key)
    if not isinstance(pattern, str) or len(pattern) != count:
        raise config.fault(f"{key} must be text of {count} letters, one per layer")
    if unknown := set(pattern) - _LETTERS.keys():
        raise config.not_understood(key, f"has layers {excerpt(min(unknown))}, which is not supported")
    mixes, ffns = zip(*(_LETTERS[letter] for letter in pattern), strict=True)
    return _Kinds(mixes, ffns)


def _of_names(config: Config, key: str, count: int) -> _Kinds:
    """Return kinds from a list that names each layer's."""
    kinds = config.get(key)
    # Step and others also list the layers of multi-token prediction, which come last.
    extra = config.integer("num_nextn_predict_layers", least=0) or 0
    if not isinstance(kinds, list) or len(kinds) not in {count, count + extra}:
        raise config.fault(f"{key} must be a list of {count} names, one per layer")
    kinds = kinds[:count]
    used = {kind if isinstance(kind, str) else "that are not text" for kind in kinds}
    if unknown := used - _LAYER_KINDS:
        raise UnknownModelError(
            f"{key} has layers {excerpt(min(unknown))}, which is not supported",
            where=config.where,
            hint=f"supported: {', '.join(sorted(_LAYER_KINDS))}",
        )
    windows = {
        kind: config.required(window, most=MOST_MATRIX_ROWS) for kind, window in _WINDOW_KEYS.items() if kind in used
    }
    mixes = [
        _STATE
        if kind in _STATE_KINDS
        else _PART_MIXES[kind][0]
        if kind in _PART_MIXES
        else _Mix(True, windows.get(kind))
        for kind in kinds
    ]
    # Where FFNs are layers of their own, the other layers have none.
    if config.family in SINGLE_PART or used & _PART_MIXES.keys():
        return _Kinds(mixes, [_PART_MIXES[kind][1] if kind in _PART_MIXES else "" for kind in kinds])
    return _Kinds(mixes)


def _of_ones(config: Config, key: str, count: int) -> _Kinds:
    """MiniMax: 1 is full attention, 0 a state."""
    ones = config.integers(key, least=0, most=1, length=count) or ()
    return _Kinds([_FULL_ATTENTION if one else _STATE for one in ones])


def _of_windowed(config: Config, key: str, count: int) -> _Kinds:
    """MiMo: 1 is a window, 0 full attention."""
    ones = config.integers(key, least=0, most=1, length=count) or ()
    window = config.required("sliding_window", "sliding_window_size", most=MOST_MATRIX_ROWS) if any(ones) else None
    return _Kinds([_Mix(True, window if one else None) for one in ones])


def _of_period(config: Config, key: str, count: int) -> _Kinds:
    """Jamba: one layer of each period has attention."""
    chosen = _periodic(config, key, "attn_layer_offset", count)
    return _Kinds([_FULL_ATTENTION if one else _STATE for one in chosen])


def _periodic(config: Config, period: str, offset: str, count: int) -> list[bool]:
    every, first = config.required(period), config.required(offset, least=0)
    return [i % every == first for i in range(count)]


def _of_indices(config: Config, key: str, count: int) -> _Kinds:
    """Bamba and LFM2: a list of the layers with attention."""
    listed = set(config.integers(key, least=0, most=count - 1) or ())
    return _Kinds([_FULL_ATTENTION if i in listed else _STATE for i in range(count)])


def _of_linear(config: Config, key: str, count: int) -> _Kinds:
    """Kimi-Linear: lists of the layers of both kinds, which count from 1."""
    section = config.section(key)
    full = set((section and section.integers("full_attn_layers", least=1, most=count)) or ())
    linear = set((section and section.integers("kda_layers", least=1, most=count)) or ())
    if full & linear or len(full | linear) != count:
        raise config.not_understood(key, f"does not say of each of {count} layers which kind it is")
    return _Kinds([_STATE if i + 1 in linear else _FULL_ATTENTION for i in range(count)])


def _of_groups(config: Config, key: str, count: int) -> _Kinds:
    """Ling and Ring linear: the last layer of each group has attention, and so do those after the last whole group."""
    if config.family not in LIGHTNING:
        raise config.not_understood(key, "is not understood, and describes layers")
    size = config.required(key)
    whole = count // size * size
    return _Kinds([_FULL_ATTENTION if (i + 1) % size == 0 or i >= whole else _STATE for i in range(count)])


_COMPRESSED_KINDS = {
    "sliding_attention": 1,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
"""Tokens that a cached entry stands for by kind of layer, where `compress_rates` does not say otherwise."""

_CHOOSING = "compressed_sparse_attention"
"""The kind of layer whose indexer chooses the entries to read."""


def _compressed_kinds(config: Config, count: int) -> Sequence[str]:
    """DeepSeek-V4: return the name of each layer's kind, from names or from its ratio of tokens to entries."""
    key = "compress_ratios" if config.get("layer_types") is None else "layer_types"
    listed = config.get(key)
    if listed is None:
        raise config.missing(key, "layer_types")
    # Layers of multi-token prediction come last.
    extra = config.integer("num_nextn_predict_layers", least=0) or 0
    if not isinstance(listed, list) or len(listed) not in {count, count + extra}:
        raise config.fault(f"{key} must be a list of {count} items, one per layer")
    names = {"0": "sliding_attention"} | {str(ratio): kind for kind, ratio in _COMPRESSED_KINDS.items()}
    kinds = [names.get(str(item), str(item)) for item in listed[:count]]
    if unknown := set(kinds) - _COMPRESSED_KINDS.keys():
        raise config.not_understood(key, f"has layers {excerpt(min(unknown))}, which is not supported")
    return kinds


def _windows(config: Config, count: int) -> Sequence[int | None]:
    """Return how far back each layer reads, None for all, in a model whose every layer has attention."""
    if config.family == "llama4" or config.get("attention_chunk_size") is not None:
        return _chunks(config, count)
    if isinstance(listed := config.get("sliding_window"), list):
        return _listed_windows(config, listed, count)
    # Qwen states a window even if it is unused, and the layer from which it applies.
    first = config.integer("max_window_layers", least=0)
    is_used = config.flag("use_sliding_window")
    window = None if is_used is False else config.integer("sliding_window", most=MOST_MATRIX_ROWS)
    if isinstance(letters := config.get("sliding_window_pattern"), str):
        # EXAONE: a letter for each layer of a period, L for a window.
        if not letters or set(letters) - set("LG"):
            raise config.not_understood("sliding_window_pattern", f"{excerpt(letters)} is not supported")
        return [window if letters[i % len(letters)] == "L" else None for i in range(count)]
    # All but each n-th layer; newer versions of transformers write Gemma 3's key with an underscore.
    pattern = 2 if config.family in ALTERNATING else None
    if window is not None and pattern is None:
        keys = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
        pattern = config.integer(*keys)
    if pattern is not None:
        return [window if (i + 1) % pattern else None for i in range(count)]
    if is_used or config.family in WINDOWED:
        return [window if i >= (first or 0) else None for i in range(count)]
    if window is not None and config.family not in KNOWN:
        config.assumed.append(f"sliding_window {window} left out: no key says which layers it is for")
    return (None,) * count


def _listed_windows(config: Config, listed: list[object], count: int) -> Sequence[int | None]:
    """Mistral: the windows of one period, null for a layer without."""
    period = len(listed)
    if not 0 < period <= count or count % period:
        raise config.fault(f"sliding_window must be a number, or a list that repeats over {count} layers")
    section = replace(config, inner={str(i): value for i, value in enumerate(listed)}, outer={})
    windows = [section.integer(str(i), most=MOST_MATRIX_ROWS) for i in range(period)]
    return windows * (count // period)


def _chunks(config: Config, count: int) -> Sequence[int | None]:
    """Return Llama 4's windows: layers with rotary positions see only the chunk of the token."""
    chunk = config.required("attention_chunk_size", most=MOST_MATRIX_ROWS)
    # An empty list means the default in published configs.
    if config.get("no_rope_layers") in (None, []):
        interval = config.required("no_rope_layer_interval")
        return [chunk if (i + 1) % interval else None for i in range(count)]
    rotary = config.integers("no_rope_layers", least=0, most=1, length=count) or []
    return [chunk if uses_rotary else None for uses_rotary in rotary]


# -- attention -------------------------------------------------------------------------------------------


def _attentions(config: Config, hidden: int, count: int) -> Callable[[int, int | None], Attention]:
    """Return a function from a layer and its window to its attention."""
    heads = config.per_layer(count, *HEADS, most=MOST_HEADS)
    if heads is None:
        raise config.missing(*HEADS)
    is_gated = _is_gated(config)
    latent = _latent(config)
    if latent is not None:
        indexer, topk, indexed = _indexer(config, count)

        def latent_of(i: int, window: int | None) -> Attention:
            return Attention(
                heads=heads[i],
                kv_heads=heads[i],
                head_dim=latent.qk_head_dim,
                window=window,
                gated=is_gated,
                latent=latent,
                indexer=indexer if indexed[i] else None,
                indexed_tokens=topk,
            )

        return latent_of
    kv_heads = _kv_heads(config, heads, count)
    head_dim = _head_dim(config, hidden, heads[0])
    if config.family in COMPRESSED:
        return _compressed(config, heads, kv_heads, head_dim)
    value_dim = config.integer("v_head_dim")
    query_rank = config.integer("share_q_dim")
    cached = _cached(config, count)
    of_windows = _changed(
        config,
        {
            "heads": "swa_num_attention_heads",
            "kv_heads": "swa_num_key_value_heads",
            "head_dim": "swa_head_dim",
            "value_head_dim": "swa_v_head_dim",
        },
    ) | _of_other(config)
    of_full = _changed(config, {"head_dim": "global_head_dim"})
    if config.flag("attention_k_eq_v"):
        of_full |= _changed(config, {"kv_heads": "num_global_key_value_heads"})

    def attention_of(i: int, window: int | None) -> Attention:
        usual = Attention(
            heads=heads[i],
            kv_heads=kv_heads[i],
            head_dim=head_dim,
            value_head_dim=value_dim,
            window=window,
            gated=is_gated,
            query_rank=query_rank,
            is_cached=cached[i],
            keys_are_values=window is None and bool(config.flag("attention_k_eq_v")),
        )
        changed = replace(usual, **(of_full if window is None else of_windows))
        if changed.heads % changed.kv_heads:
            raise config.fault(
                f"num_key_value_heads {changed.kv_heads} does not divide num_attention_heads {changed.heads}"
            )
        return changed

    return attention_of


def _compressed(
    config: Config, heads: Sequence[int], kv_heads: Sequence[int], head_dim: int
) -> Callable[[int, int | None], Attention]:
    """DeepSeek-V4: one vector is key and value; most layers read entries of several tokens, all or the chosen ones,
    beside a window.
    """
    kinds = _compressed_kinds(config, len(heads))
    rates = config.section("compress_rates")
    ratios = {
        kind: (rates and usual > 1 and rates.integer(kind, least=2, most=MOST_MATRIX_ROWS)) or usual
        for kind, usual in _COMPRESSED_KINDS.items()
    }
    window, rank = config.required("sliding_window", most=MOST_MATRIX_ROWS), config.required("q_lora_rank")
    groups, output_rank = config.required("o_groups", most=MOST_HEADS), config.required("o_lora_rank")
    indexer, topk, _ = _indexer(config, len(heads))
    if topk is None and _CHOOSING in kinds:
        raise config.missing("index_topk")

    def attention_of(i: int, own_window: int | None) -> Attention:
        if heads[i] % groups or heads[i] % kv_heads[i]:
            raise config.fault(
                f"o_groups {groups} or num_key_value_heads {kv_heads[i]} does not divide num_attention_heads {heads[i]}"
            )
        ratio, chooses = ratios[kinds[i]], kinds[i] == _CHOOSING
        return Attention(
            heads=heads[i],
            kv_heads=kv_heads[i],
            head_dim=head_dim,
            window=own_window,
            query_rank=rank,
            compressed=CompressedAttention(
                output_groups=groups,
                output_rank=output_rank,
                ratio=ratio,
                recent_tokens=0 if own_window else window,
            ),
            indexer=indexer if chooses else None,
            # It chooses entries.
            indexed_tokens=topk * ratio if chooses and topk else None,
            keys_are_values=True,
        )

    return attention_of


def _is_gated(config: Config) -> bool:
    stated = [flag for key in _GATES if (flag := config.flag(key)) is not None]
    return any(stated) if stated else config.family in GATED_ATTENTION


def _changed(config: Config, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes that some layers have instead of the usual ones, by name of the size."""
    return {name: size for name, key in keys.items() if (size := config.integer(key)) is not None}


def _of_other(config: Config) -> dict[str, Any]:
    """Step: a section of its own for the layers with a window."""
    section = config.section("attention_other_setting")
    if section is None:
        return {}
    if section.get("attention_type") != "sliding_attention":
        raise config.not_understood("attention_other_setting", "is not understood, and describes layers")
    return _changed(
        section, {"heads": "num_attention_heads", "kv_heads": "num_attention_groups", "head_dim": "head_dim"}
    )


def _cached(config: Config, count: int) -> list[bool]:
    """Return which layers have keys and values of their own."""
    # Gemma 3n: the last layers read those of the last layer before them that is of their kind.
    shared = config.integer("num_kv_shared_layers", least=0, most=MOST_MODEL_LAYERS) or 0
    if shared >= count:
        raise config.fault(f"num_kv_shared_layers {shared} leaves no layer of {count} with keys and values")
    # Hunyuan: the layers of a group read those of its first.
    group = config.required("cla_share_factor") if config.flag("use_cla") else 1
    return [i < count - shared and i % group == 0 for i in range(count)]


def _kv_heads(config: Config, heads: Sequence[int], count: int) -> Sequence[int]:
    # Falcon's first architecture writes both num_kv_heads = heads and multi_query, and means 1.
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return (1,) * count
    kv_heads = config.per_layer(count, *KV_HEADS, most=MOST_HEADS)
    # ChatGLM states a number of groups that `multi_query_attention: false` switches off.
    if kv_heads is None or config.flag("multi_query_attention") is False:
        config.assumed.append("one KV head per attention head assumed: num_key_value_heads is absent")
        return heads
    return kv_heads


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    stated = config.integer(*HEAD_DIM)
    if stated is not None:
        return stated
    if hidden % heads:
        raise config.fault(
            f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    config.assumed.append(f"head_dim {hidden // heads} derived: hidden_size / num_attention_heads")
    return hidden // heads


def _latent(config: Config) -> LatentAttention | None:
    # The one key that every config of latent attention has; DeepSeek-V2-Lite has no q_lora_rank.
    kv_lora_rank = config.integer("kv_lora_rank")
    if kv_lora_rank is None:
        return None
    return LatentAttention(
        q_lora_rank=config.integer("q_lora_rank"),
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=config.required("qk_nope_head_dim"),
        qk_rope_head_dim=config.required("qk_rope_head_dim"),
        v_head_dim=config.required("v_head_dim"),
    )


def _indexer(config: Config, count: int) -> tuple[Indexer | None, int | None, Sequence[bool]]:
    """Return the indexer of DeepSeek-V3.2, how many tokens it chooses, and which layers have one of their own."""
    topk = config.integer("index_topk", most=MOST_MATRIX_ROWS)
    if topk is None:
        return None, None, (False,) * count
    indexer = Indexer(config.required("index_n_heads", most=MOST_HEADS), config.required("index_head_dim"))
    types = config.get("indexer_types")
    if types is None:
        return indexer, topk, (True,) * count
    if not isinstance(types, list) or len(types) != count or not all(t in ("full", "shared") for t in types):
        raise config.not_understood("indexer_types", f"must be a list of {count} names, full or shared")
    return indexer, topk, [t == "full" for t in types]


# -- states ----------------------------------------------------------------------------------------------


def _state(config: Config, hidden: int) -> LayerState:
    """Return what keeps a state in the layers that have one, recognised by its keys."""
    if config.get("linear_num_value_heads") is not None:
        return _gated_delta(config, hidden)
    if (section := config.section("linear_attn_config")) is not None:
        return _kimi_delta(section, hidden)
    if config.get("conv_L_cache") is not None:
        kernel = config.required("conv_L_cache")
        # In with two gates, and out.
        return LayerState("conv", 4 * hidden * hidden + hidden * kernel, 0, hidden * (kernel - 1))
    if any(config.get(key) is not None for key in _MAMBA_HEADS) or config.family == "mamba2":
        return _mamba2(config, hidden)
    if any(config.get(key) is not None for key in _MAMBA_STATE):
        return _mamba1(config, hidden)
    if config.family in LIGHTNING or config.get("attn_type_list") is not None:
        heads = config.required(*HEADS, most=MOST_HEADS)
        head_dim = _head_dim(config, hidden, heads)
        # Queries, keys, values, a gate and the output.
        return LayerState("linear", 5 * hidden * heads * head_dim, heads * head_dim * head_dim)
    raise UnknownModelError(
        "layers with a state are there, and no key that is known states its size",
        where=config.where,
        hint="is this a whole config.json?",
    )


def _gated_delta(config: Config, hidden: int) -> LayerState:
    """Qwen3-Next: the gated delta rule."""
    key_heads = config.required("linear_num_key_heads", most=MOST_HEADS)
    value_heads = config.required("linear_num_value_heads", most=MOST_HEADS)
    key_dim, value_dim = config.required("linear_key_head_dim"), config.required("linear_value_head_dim")
    # Queries, keys, values with gate and output, two scalars per value head.
    columns = 2 * key_heads * key_dim + value_heads * (3 * value_dim + 2)
    kernel = config.integer("linear_conv_kernel_dim") or 1
    conv = (2 * key_heads * key_dim + value_heads * value_dim) * (kernel - 1)
    return LayerState("linear", hidden * columns, value_heads * key_dim * value_dim, conv)


def _kimi_delta(section: Config, hidden: int) -> LayerState:
    """Kimi delta attention: gates of decay and output through a low rank as wide as a head."""
    heads, head_dim = section.required("num_heads", most=MOST_HEADS), section.required("head_dim")
    kernel = section.usual(4, "short_conv_kernel_size")
    width = heads * head_dim
    low_rank = hidden * head_dim + head_dim * width
    gate = hidden * width if section.flag("use_full_rank_gate") else low_rank
    matrices = 4 * hidden * width + low_rank + gate + hidden * heads + 3 * width * kernel
    return LayerState("linear", matrices, heads * head_dim * head_dim, 3 * width * (kernel - 1))


_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads")
_MAMBA_HEAD_DIM = ("mamba_d_head", "mamba_head_dim")
_MAMBA_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_MAMBA_CONV = ("mamba_d_conv", "conv_kernel")
_MAMBA_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
_MAMBA_EXPAND = ("mamba_expand", "expand")
_MAMBA_RANK = ("mamba_dt_rank", "time_step_rank")


def _mamba2(config: Config, hidden: int) -> LayerState:
    # The model type mamba2 has the keys without a prefix, for it has no attention.
    bare = config.family == "mamba2"
    heads = config.required(*(("num_heads",) if bare else _MAMBA_HEADS), most=MOST_HEADS)
    head_keys = ("head_dim",) if bare else _MAMBA_HEAD_DIM
    if any(config.get(key) not in (None, "auto") for key in head_keys):
        inner = heads * config.required(*head_keys)
    else:
        inner = hidden * config.usual(2, *_MAMBA_EXPAND)
    state, kernel = config.required(*_MAMBA_STATE), config.usual(4, *_MAMBA_CONV)
    groups = config.usual(1, *_MAMBA_GROUPS, most=MOST_HEADS)
    convolved = inner + 2 * groups * state
    matrices = hidden * (inner + convolved + heads) + convolved * kernel + inner * hidden
    return LayerState("mamba", matrices, inner * state, convolved * (kernel - 1))


def _mamba1(config: Config, hidden: int) -> LayerState:
    state, kernel = config.required(*_MAMBA_STATE), config.usual(4, *_MAMBA_CONV)
    stated = config.integer("intermediate_size") if config.family in ONLY_STATES else None
    inner = stated or hidden * config.usual(2, *_MAMBA_EXPAND)
    usual = -(-hidden // 16)
    is_auto = any(config.get(key) == "auto" for key in _MAMBA_RANK)
    rank = usual if is_auto else config.usual(usual, *_MAMBA_RANK)
    matrices = 3 * hidden * inner + inner * (kernel + rank + 2 * state) + rank * inner + inner * state
    return LayerState("mamba", matrices, inner * state, inner * (kernel - 1))


# -- FFNs ------------------------------------------------------------------------------------------------


def _experts(config: Config, count: int, kinds: _Kinds) -> list[Experts | None]:
    """Return the experts of each layer, None for one without."""
    none: list[Experts | None] = [None] * count
    # 0 is stated by dense models of families that also have MoE ones; one expert is an FFN.
    numbers = config.per_layer(count, *_EXPERTS, least=0, most=MOST_HEADS) or (0,) * count
    if max(numbers) <= 1 or config.flag("enable_moe_block") is False:
        return none
    if kinds.ffns is None:
        chosen = set(_moe_layer_ids(config, count))
    else:
        chosen = {i for i, ffn in enumerate(kinds.ffns) if ffn == "moe"}
    chosen = {i for i in chosen if numbers[i] > 1}
    if not chosen:
        return none
    per_token = config.per_layer(count, *_EXPERTS_PER_TOKEN, most=MOST_HEADS)
    if per_token is None:
        raise config.missing(*_EXPERTS_PER_TOKEN)
    # Mixtral and Phi-MoE have only experts; their width is under the key of the dense FFN.
    widths = config.per_layer(count, "moe_intermediate_size") or config.per_layer(count, *FFN)
    if widths is None:
        raise config.missing(*FFN)
    shared = _shared_widths(config, count, widths)
    idle = config.integer("zero_expert_num", least=0, most=MOST_HEADS) or 0
    latent = config.integer("moe_latent_size", "routed_expert_hidden_size", least=0) or None

    def experts_of(i: int) -> Experts:
        if per_token[i] > numbers[i] + idle:
            raise config.fault(f"num_experts_per_tok {per_token[i]} is more than the {numbers[i]} experts there are")
        # Tokens choose idle experts as often as others, as far as the configuration says.
        visited = max(1, round(per_token[i] * numbers[i] / (numbers[i] + idle)))
        return Experts(
            count=numbers[i],
            per_token=visited,
            ffn=widths[i],
            shared_ffn=shared[i],
            idle=idle,
            latent=latent,
        )

    return [experts_of(i) if i in chosen else None for i in range(count)]


def _shared_widths(config: Config, count: int, widths: Sequence[int]) -> Sequence[int]:
    # Qwen and Granite state the width of shared experts, DeepSeek a number of them, as wide as the routed
    # ones, Nemotron and Ling a number and a width; Llama 4 has one.
    if config.family == "llama4":
        return widths
    total = config.integer(*_SHARED_WIDTH, least=0)
    if total is not None:
        return (total,) * count
    numbers = config.per_layer(count, *_SHARED_EXPERTS, least=0, most=MOST_HEADS) or (0,) * count
    one = config.integer("moe_shared_expert_intermediate_size", least=0)
    return [number * (width if one is None else one) for number, width in zip(numbers, widths, strict=True)]


def _moe_layer_ids(config: Config, count: int) -> Sequence[int]:
    """Return which layers are MoE, by the rule of the families that the config uses."""
    # Llama 4 lists the layers or states a step, whose first MoE layer is the step's last, as that of Qwen's is.
    listed = config.integers("moe_layers", least=0, most=count - 1)
    if listed is not None:
        return sorted(set(listed))
    if (text := config.get("moe_layers_enum")) is not None:
        return _enumerated(config, text, count)
    if (types := config.get("mlp_layer_types")) is not None:
        if not isinstance(types, list) or len(types) != count or not all(t in ("dense", *_SPARSE) for t in types):
            raise config.not_understood("mlp_layer_types", f"must be a list of {count} names, dense or sparse")
        return [i for i, kind in enumerate(types) if kind in _SPARSE]
    if config.get("expert_layer_period") is not None:
        chosen = _periodic(config, "expert_layer_period", "expert_layer_offset", count)
        return [i for i, one in enumerate(chosen) if one]
    keys = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
    step = config.integer(*keys) or 1
    # Qwen has `mlp_only_layers`; DeepSeek `first_k_dense_replace` and `moe_layer_freq`, a number or a list
    # with 1 for each MoE layer; Ernie a first and a last. A key that a family does not have changes nothing here.
    dense = set(config.integers("mlp_only_layers", least=0, most=MOST_MODEL_LAYERS) or ())
    first = config.integer("first_k_dense_replace", "moe_layer_start_index", least=0) or 0
    # -1 is the last layer.
    last = config.integer("moe_layer_end_index", least=-1)
    last = count - 1 if last in (None, -1) else last
    if isinstance(config.get("moe_layer_freq"), list):
        ones = config.integers("moe_layer_freq", least=0, most=1, length=count) or []
    else:
        every = config.integer("moe_layer_freq") or 1
        ones = [int(i % every == 0) for i in range(count)]
    return [i for i in range(first, min(count, last + 1)) if i not in dense and (i + 1) % step == 0 and ones[i]]


def _enumerated(config: Config, text: object, count: int) -> Sequence[int]:
    """Step: numbers of layers in a text."""
    parts = text.split(",") if isinstance(text, str) else []
    numbers = {int(part) for part in parts if part.strip().isdecimal() and len(part) < len(str(MOST_MODEL_LAYERS)) + 4}
    # Layers of multi-token prediction are beyond the last.
    if not parts or len(numbers) != len(parts):
        raise config.not_understood("moe_layers_enum", "must be numbers of layers, separated by commas")
    return sorted(i for i in numbers if i < count)


def _dense_widths(
    config: Config, hidden: int, kinds: _Kinds, experts: Sequence[Experts | None]
) -> tuple[Sequence[int], int]:
    """Return the FFN width of each layer, 0 for one without a dense FFN, and the width that stands for the model."""
    count = len(experts)
    # Gemma 4 and Grok have an FFN beside their experts, as LongCat has.
    beside = config.family in DOUBLE or any(config.flag(key) for key in _BESIDE_EXPERTS)
    if kinds.ffns is None:
        is_dense = [beside or one is None for one in experts]
    else:
        is_dense = [ffn == "dense" for ffn in kinds.ffns]
    stated = config.integer(DENSE_FFN)
    if not any(is_dense):
        # All layers are MoE, so `intermediate_size` is unused or describes the experts.
        return (0,) * count, stated or max((one.ffn for one in experts if one), default=0)
    widths = (stated,) * count if stated else _stated_widths(config, hidden, count, any(experts))
    if config.flag("use_double_wide_mlp"):
        cached = _cached(config, count)
        widths = [width if own else 2 * width for width, own in zip(widths, cached, strict=True)]
    chosen = [width if one else 0 for width, one in zip(widths, is_dense, strict=True)]
    return chosen, next(width for width in chosen if width)


def _stated_widths(config: Config, hidden: int, count: int, has_experts: bool) -> Sequence[int]:
    # Granite's hybrids without experts have only the FFN that is shared in the others.
    if not has_experts and config.family == "granitemoehybrid" and config.get("shared_intermediate_size"):
        return (config.required("shared_intermediate_size"),) * count
    widths = config.per_layer(count, *FFN)
    if widths is None and config.family in UNGATED:
        config.assumed.append(f"{FFN[0]} {4 * hidden} assumed: 4 times hidden_size")
        return (4 * hidden,) * count
    if widths is None:
        raise config.missing(*FFN)
    # LFM2 states the width of an FFN without a gate, unless it says that it does not.
    adjusts = config.flag("block_auto_adjust_ff_dim")
    if adjusts or (adjusts is None and config.family == "lfm2"):
        rounding = config.usual(256, "block_multiple_of")
        return [rounding * -(-(2 * width // 3) // rounding) for width in widths]
    return widths


def _beside(config: Config, hidden: int, count: int) -> tuple[int, int, int]:
    """Return what Gemma 3n and 4 and DeepSeek-V4 have beside attention and FFNs: parameters of each layer, of the
    model, and of lookups.

    Every layer has an embedding of its own, which two matrices join to the hidden vector, and a matrix from it; Gemma
    3n also has a low-rank matrix beside attention, and makes several hidden vectors of one and one of several.
    DeepSeek-V4 has several hidden vectors: a matrix before attention and one before the experts give weights to join,
    divide and mix them, and a last one to join them.
    """
    if config.family in COMPRESSED:
        several = config.required("hc_mult", most=64)
        return 2 * (2 + several) * several * several * hidden, several * several * hidden, 0
    width = config.integer("hidden_size_per_layer_input", least=0) or 0
    rank = config.integer("laurel_rank", least=0) or 0
    copies = config.integer("altup_num_inputs", least=0, most=64) or 1
    lookups = width * count * config.required("vocab_size_per_layer_input", most=MOST_MATRIX_ROWS) if width else 0
    return 3 * hidden * width + 2 * hidden * rank, 2 * (copies - 1) * hidden * hidden, lookups


# -- layers one by one -----------------------------------------------------------------------------------

_BLOCK_KEYS = {
    "attention": frozenset(
        {"no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads", "window_length"}
    ),
    "ffn": frozenset({"no_op", "replace_with_linear", "ffn_mult", "intermediate_size", "hidden_act"}),
}


def _blocks(config: Config, hidden: int, count: int) -> Stack:
    """DeciLM, of Nemotron-Super and -Ultra: a section for each layer, whose attention or FFN may be gone or one
    matrix.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise config.fault(f"block_configs must be a list of {count} objects, one per layer")
    heads = config.required(*HEADS, most=MOST_HEADS)
    head_dim = _head_dim(config, hidden, heads)
    layers = []
    for block in blocks:
        section = Config(block if isinstance(block, Mapping) else {}, {}, config.where, config.model_type)
        attention, ffn = (_part(section, name) for name in _BLOCK_KEYS)
        other = sum(hidden * hidden for part in (attention, ffn) if part.flag("replace_with_linear"))
        attentions: tuple[Attention, ...] = ()
        if not (attention.flag("no_op") or attention.flag("replace_with_linear")):
            group = attention.integer("n_heads_in_group", most=MOST_HEADS)
            kv_heads = heads // group if group else attention.required("num_key_value_heads", most=MOST_HEADS)
            if not kv_heads or heads % kv_heads:
                raise config.fault(f"block_configs: {kv_heads} KV heads do not divide {heads} attention heads")
            window = attention.integer("window_length", most=MOST_MATRIX_ROWS)
            attentions = (Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window),)
        has_ffn = not (ffn.flag("no_op") or ffn.flag("replace_with_linear"))
        layers.append(Layer(attentions=attentions, ffns=(_ffn_width(ffn, hidden),) if has_ffn else (), other=other))
    return Stack(tuple(layers), next((layer.ffns[0] for layer in layers if layer.ffns), 0))


def _part(block: Config, name: str) -> Config:
    part = block.section(name)
    if part is None:
        raise block.fault(f"block_configs: {name} is missing")
    for key, value in part.inner.items():
        # Experts, state spaces and sinks of newer files.
        if value and key not in _BLOCK_KEYS[name]:
            raise block.not_understood(f"block_configs {name} {key}", "is not understood, and describes layers")
    return part


def _ffn_width(ffn: Config, hidden: int) -> int:
    factor = ffn.get("ffn_mult")
    if factor is None:
        return ffn.required("intermediate_size")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < MOST_WIDTH / hidden:
        raise ffn.fault(f"block_configs: ffn_mult {excerpt(factor)} cannot be")
    # The class's own rounding, to a multiple of 256.
    return 256 * -(-int(2 * factor * hidden / 3) // 256)
