"""Read a model's `config.json` into a `ModelArchitecture`: any decoder, quantized or not, by its keys.

Experts, grouped heads, latent and linear attention and windows are recognised by their keys. A value that the
config does not state is either refused (one line that names the key) or, where its family or vLLM defines it,
filled in and listed in `ModelArchitecture.assumed`, together with the assumptions about an unknown family.
`as_served` applies the options by which a server overrides the config: data types, and quantization, which
makes weights smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from tracefit.errors import UsageError
from tracefit.server.architecture import LatentAttention, LinearAttention, ModelArchitecture
from tracefit.server.documents import (
    FLAG,
    TEXT,
    excerpt,
    kind_of,
    parse_json_object,
    validated,
    whole_number,
)

if TYPE_CHECKING:
    from tracefit.server.documents import Document


class UnknownModelError(UsageError):
    """A config that does not say enough to compute the cost of a step."""


# -- facts of families ----------------------------------------------------------------------------------
#
# Facts that no key of a published config states, by `model_type` (without `_text`, the type of the text part
# of multimodal models). Source: each family's configuration class in the transformers library.

_UNGATED = frozenset(["falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2"])
"""FFNs have two matrices, no gate; the width of those that do not state it is 4·hidden."""

_TIED = frozenset(["falcon", "gemma", "gemma2", "gemma3", "gpt2", "gpt_bigcode", "opt", "starcoder2"])
"""Output head and input embedding are one matrix unless the config says otherwise."""

_WINDOWED = frozenset(["mistral", "mixtral", "phi3", "phi4mm", "phimoe", "starcoder2"])
"""A window, if set, is one of every layer."""

_ALTERNATING = frozenset(["gemma2", "gpt_oss"])
"""A window is one of layers 0, 2, 4, …"""

_LEARNED_POSITIONS: Mapping[str, int] = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
"""Positions are a learned embedding, with this number of rows beyond the configured count."""

_KNOWN = frozenset().union(
    *(_UNGATED, _TIED, _WINDOWED, _ALTERNATING),
    ("chatglm", "kimi_k2", "llama", "llama4", "olmo2"),
    ("deepseek", "deepseek_v2", "deepseek_v3"),
    ("granite", "granitemoe", "granitemoeshared"),
    ("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl"),
    ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
)
"""Families whose keys say all the rest."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma2": {"sliding_window": 4096},
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {"sliding_window": 128},
    "llama4": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
}
"""Values of keys that published configs of a family leave out."""


# -- reading a config -----------------------------------------------------------------------------------


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels")  # the second of ChatGLM
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_DENSE_FFN = "intermediate_size_mlp"  # of Llama 4, whose `intermediate_size` is the experts'
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_k")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_POSITIONS = ("max_position_embeddings", "n_positions")
_DTYPE = ("torch_dtype", "dtype")
_NESTED = ("text_config", "llm_config", "language_config")

# Keys that multimodal configs have outside the nested text config.
_OUTER_KEYS = frozenset(
    {*_DTYPE, *_VOCABULARY, "tie_word_embeddings", "_name_or_path", "quantization_config"}
)

# Far above those of published models. Larger values are damage, and would make lists that fill the memory.
_MOST_NAME = 64
_MOST_LAYERS = 4096
_MOST_WIDTH = 2**24
_MOST_HEADS = 2**16
_MOST_ROWS = 2**28


def parse_architecture(text: bytes | str, *, where: str, name: str | None = None) -> ModelArchitecture:
    """Parse the content of a Hugging Face `config.json`.

    Without a `name` it is the config's `_name_or_path`.

    Returns:
        The architecture, with every assumption listed in `assumed`.

    Raises:
        UnknownModelError: A key is missing, or layers are of an unsupported kind.
        UsageError: The content is not a JSON object, or has an impossible value.
    """
    config = _open_config(parse_json_object(text, where=where), where=where)
    layers = config.required(*_LAYERS, most=_MOST_LAYERS)
    hidden = config.required(*_HIDDEN, most=_MOST_WIDTH)
    heads = config.required(*_HEADS, most=_MOST_HEADS)
    latent = _latent(config)
    experts = _experts(config, layers)
    dtype = _dtype(config)
    size = bytes_of_dtype(dtype, key="torch_dtype", where=where)
    sizes: _Weights = {
        "attention_weight_bytes": size,
        "ffn_weight_bytes": size,
        "expert_weight_bytes": size,
        "kv_bytes": size,
        **_quantization(config),
    }
    windows = _windows(config, layers)
    positions = _LEARNED_POSITIONS.get(config.family)
    return ModelArchitecture(
        name=_name(config, name, f"{config.model_type}-{layers}x{hidden}"),
        model_type=config.model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _kv_heads(config, heads),
        head_dim=latent.qk_head_dim if latent else _head_dim(config, hidden, heads),
        latent=latent,
        linear=_linear(config) if 0 in windows else None,
        gated_attention=bool(config.flag("attn_output_gate")),
        ffn=_dense_ffn(config, hidden, experts, layers),
        gated_ffn=config.family not in _UNGATED,
        **experts,
        layer_windows=windows,
        vocabulary=config.required(*_VOCABULARY, most=_MOST_ROWS),
        tied_embeddings=_tied(config),
        learned_positions=0
        if positions is None
        else config.required(*_POSITIONS, most=_MOST_ROWS) + positions,
        dtype=dtype,
        dtype_bytes=size,
        **sizes,
        assumed=tuple(config.assumed),
    )


# -- looking up values in the config --------------------------------------------------------------------


@dataclass(slots=True)
class _Config:
    """A config.json with its nested text part in front, and the list of assumptions."""

    inner: Document
    outer: Document
    where: str
    model_type: str
    assumed: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        """The name under which the tables above have the model."""
        return self.model_type.lower().removesuffix("_text")

    def get(self, key: str) -> object:
        """Return a key's value; None if it is absent, null, or in a section that does not count."""
        value = self.inner.get(key)
        return self.outer.get(key) if value is None and key in _OUTER_KEYS else value

    def find(self, *keys: str) -> tuple[str, object] | None:
        """Return the first of several spellings that is set; they may not contradict each other."""
        # Conversion scripts leave several spellings in one file; if they differ, either value may be wrong.
        stated = [(key, value) for key in keys if (value := self.get(key)) is not None]
        for key, value in stated[1:]:
            if value != stated[0][1]:
                first, other = excerpt(stated[0][1]), excerpt(value)
                raise self.fault(f"{stated[0][0]} {first} and {key} {other} contradict")
        return stated[0] if stated else None

    def integer(self, *keys: str, least: int = 1, most: int = _MOST_WIDTH) -> int | None:
        """Return a whole number under one of several spellings, or the family's default, or None."""
        stated = self.find(*keys)
        if stated is not None:
            return validated(whole_number(least, most), stated[1], key=stated[0], where=self.where)
        default = _DEFAULTS.get(self.family, {}).get(keys[0])
        if default is not None:
            self.assumed.append(f"{keys[0]} {default} assumed: default of {self.model_type}")
        return default

    def required(self, *keys: str, most: int = _MOST_WIDTH) -> int:
        """Return a whole number that every model needs."""
        value = self.integer(*keys, most=most)
        if value is None:
            spellings = f" (also spelled {', '.join(keys[1:])})" if keys[1:] else ""
            raise UnknownModelError(
                f"{keys[0]} is missing{spellings}", where=self.where, hint="is this a whole config.json?"
            )
        return value

    def fault(self, text: str) -> UsageError:
        """Return the error of a config with an impossible value."""
        return UsageError(text, where=self.where)

    def flag(self, key: str) -> bool | None:
        """Return true, false, or None for a key that is not set."""
        value = self.get(key)
        return None if value is None else validated(FLAG, value, key=key, where=self.where)

    def integers(self, key: str, *, least: int, most: int, length: int | None = None) -> list[int] | None:
        """Return a list of whole numbers, or None for a key that is not set."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > _MOST_LAYERS or length not in {None, len(value)}:
            wanted = "numbers" if length is None else f"{length} numbers, one per layer"
            raise self.fault(f"{key} must be a list of {wanted}")
        number = whole_number(least, most)
        return [validated(number, item, key=key, where=self.where) for item in value]


def _open_config(document: Document, *, where: str) -> _Config:
    """Find the part that describes the text model, and its family."""
    # Multimodal configs (Llama 4, Gemma 3, Qwen-VL) describe the text model in a nested section.
    sections = (part for key in _NESTED if isinstance(part := document.get(key), Mapping))
    inner = next(sections, document)
    # The type of the text model comes first: it says more than the wrapper's.
    named = inner.get("model_type") or document.get("model_type") or "unknown"
    model_type = validated(TEXT, named, key="model_type", where=where)[:_MOST_NAME]
    config = _Config(inner, document, where, model_type)
    if config.family not in _KNOWN:
        config.assumed.append(
            f"model_type {excerpt(model_type)} is not known: read by its keys as a usual decoder (gated FFNs, rotary positions)"
        )
    return config


# -- its parts -------------------------------------------------------------------------------------------


def _name(config: _Config, name: str | None, fallback: str) -> str:
    if name:
        return name
    value = config.get("_name_or_path")
    if isinstance(value, str) and value.strip():
        return validated(TEXT, value, key="_name_or_path", where=config.where)
    config.assumed.append(f"name {fallback} made up: the config has none")
    return fallback


def _kv_heads(config: _Config, heads: int) -> int:
    # Falcon's first architecture writes both num_kv_heads = heads and multi_query, and means 1.
    multi_query = config.flag("multi_query") and not config.flag("new_decoder_architecture")
    kv_heads = 1 if multi_query else config.integer(*_KV_HEADS, most=_MOST_HEADS)
    # ChatGLM states a number of groups that `multi_query_attention: false` switches off.
    if kv_heads is None or config.flag("multi_query_attention") is False:
        config.assumed.append("one KV head per attention head assumed: num_key_value_heads is absent")
        return heads
    if heads % kv_heads:
        raise config.fault(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


def _head_dim(config: _Config, hidden: int, heads: int) -> int:
    stated = config.integer(*_HEAD_DIM)
    if stated is not None:
        return stated
    if hidden % heads:
        raise config.fault(
            f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    config.assumed.append(f"head_dim {hidden // heads} derived: hidden_size / num_attention_heads")
    return hidden // heads


def _latent(config: _Config) -> LatentAttention | None:
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


class _Experts(TypedDict, total=False):
    """The fields of an architecture that only models with experts have."""

    moe_layer_ids: tuple[int, ...]
    experts: int
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int


def _experts(config: _Config, layers: int) -> _Experts:
    # 0 is stated by dense models of families that also have MoE ones.
    count = config.integer(*_EXPERTS, least=0, most=_MOST_HEADS) or 0
    layer_ids = _moe_layer_ids(config, layers) if count else ()
    if not layer_ids:
        return {}
    per_token = config.required(*_EXPERTS_PER_TOKEN, most=_MOST_HEADS)
    if per_token > count:
        raise config.fault(f"num_experts_per_tok {per_token} is more than the {count} experts there are")
    # Mixtral and Phi-MoE have only experts; their width is under the key of the dense FFN.
    width = config.integer("moe_intermediate_size") or config.required(*_FFN)
    # Qwen and Granite state the width of shared experts, DeepSeek a number of them, as wide as the routed
    # ones; Llama 4 has one.
    shared = width if config.get(_DENSE_FFN) is not None else config.integer(*_SHARED_WIDTH, least=0)
    if shared is None:
        shared = (config.integer(*_SHARED_EXPERTS, least=0, most=_MOST_HEADS) or 0) * width
    return {
        "moe_layer_ids": layer_ids,
        "experts": count,
        "experts_per_token": per_token,
        "expert_ffn": width,
        "shared_ffn": shared,
    }


def _moe_layer_ids(config: _Config, layers: int) -> tuple[int, ...]:
    """Return which layers are MoE, by the rule of the families that the config uses."""
    # Llama 4 lists the layers or states a step, whose first MoE layer is the step's last, as that of Qwen's is.
    listed = config.integers("moe_layers", least=0, most=layers - 1)
    if listed is not None:
        return tuple(sorted(set(listed)))
    step = config.integer("interleave_moe_layer_step", "decoder_sparse_step") or 1
    # Qwen has `mlp_only_layers`; DeepSeek `first_k_dense_replace` and `moe_layer_freq`, a number or a list
    # with 1 for each MoE layer. A key that a family does not have changes nothing here.
    dense = set(config.integers("mlp_only_layers", least=0, most=_MOST_LAYERS) or ())
    first = config.integer("first_k_dense_replace", "moe_layer_start_index", least=0) or 0
    if isinstance(config.get("moe_layer_freq"), list):
        chosen = config.integers("moe_layer_freq", least=0, most=1, length=layers) or []
    else:
        every = config.integer("moe_layer_freq") or 1
        chosen = [int(layer % every == 0) for layer in range(layers)]
    return tuple(
        layer
        for layer in range(first, layers)
        if layer not in dense and (layer + 1) % step == 0 and chosen[layer]
    )


def _dense_ffn(config: _Config, hidden: int, experts: _Experts, layers: int) -> int:
    stated = config.integer(_DENSE_FFN)
    # All layers are MoE, so `intermediate_size` is unused or describes the experts.
    if len(experts.get("moe_layer_ids", ())) == layers:
        return stated or experts["expert_ffn"]
    width = stated or config.integer(*_FFN)
    if width is None and config.family in _UNGATED:
        config.assumed.append(f"{_FFN[0]} {4 * hidden} assumed: 4 times hidden_size")
        return 4 * hidden
    return width or config.required(*_FFN)


_LINEAR_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv"})
_WINDOW_KEYS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_FULL_KINDS = frozenset({"full_attention", "attention"})
_LAYER_KINDS = _LINEAR_KINDS | _FULL_KINDS | _WINDOW_KEYS.keys()


def _linear(config: _Config) -> LinearAttention | None:
    """Return the sizes of linear attention, or None, with a note, for layers of another kind."""
    if config.get("linear_num_value_heads") is None:
        config.assumed.append("layers without a context as large as those with one: linear_* keys are absent")
        return None
    return LinearAttention(
        key_heads=config.required("linear_num_key_heads", most=_MOST_HEADS),
        value_heads=config.required("linear_num_value_heads", most=_MOST_HEADS),
        key_head_dim=config.required("linear_key_head_dim"),
        value_head_dim=config.required("linear_value_head_dim"),
    )


def _windows(config: _Config, layers: int) -> tuple[int | None, ...]:
    """Return how far back each layer reads: None for all, 0 for linear attention; by the first key that states it."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return _windows_by_type(config, kinds, layers)
    # Qwen3-Next: every n-th layer has full attention, the others a linear one.
    if config.get("linear_num_value_heads") is not None:
        interval = config.required("full_attention_interval")
        return tuple(0 if (layer + 1) % interval else None for layer in range(layers))
    if config.family == "llama4" or config.get("attention_chunk_size") is not None:
        return _chunks(config, layers)
    # Qwen states a window even if it is unused, and the layer from which it applies.
    first = config.integer("max_window_layers", least=0)
    is_used = config.flag("use_sliding_window")
    window = None if is_used is False else config.integer("sliding_window", most=_MOST_ROWS)
    # All but each n-th layer; newer versions of transformers write Gemma 3's key with an underscore.
    pattern = 2 if config.family in _ALTERNATING else None
    if window is not None and pattern is None:
        pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    if is_used or config.family in _WINDOWED:
        return tuple(window if layer >= (first or 0) else None for layer in range(layers))
    if window is not None and config.family not in _KNOWN:
        config.assumed.append(f"sliding_window {window} left out: no key says which layers it is for")
    return (None,) * layers


def _windows_by_type(config: _Config, kinds: object, layers: int) -> tuple[int | None, ...]:
    """Return windows from a list that names each layer's kind of attention."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.fault(f"layer_types must be a list of {layers} names, one per layer")
    used = {kind if isinstance(kind, str) else "that are not text" for kind in kinds}
    if unknown := used - _LAYER_KINDS:
        raise UnknownModelError(
            f"layer_types has layers {excerpt(min(unknown))}, which is not supported",
            where=config.where,
            hint=f"supported: {', '.join(sorted(_LAYER_KINDS))}",
        )
    windows = {
        kind: config.required(key, most=_MOST_ROWS) for kind, key in _WINDOW_KEYS.items() if kind in used
    }
    return tuple(0 if kind in _LINEAR_KINDS else windows.get(kind) for kind in kinds)


def _chunks(config: _Config, layers: int) -> tuple[int | None, ...]:
    """Return Llama 4's windows: layers with rotary positions see only the chunk of the token."""
    chunk = config.required("attention_chunk_size", most=_MOST_ROWS)
    # An empty list means the default in published configs.
    if config.get("no_rope_layers") in (None, []):
        interval = config.required("no_rope_layer_interval")
        return tuple(chunk if (layer + 1) % interval else None for layer in range(layers))
    rotary = config.integers("no_rope_layers", least=0, most=1, length=layers) or []
    return tuple(chunk if uses_rotary else None for uses_rotary in rotary)


def _tied(config: _Config) -> bool:
    stated, default = config.flag("tie_word_embeddings"), config.family in _TIED
    if stated is None:
        config.assumed.append(f"tie_word_embeddings {str(default).lower()} assumed: default of the family")
    return default if stated is None else stated


def _dtype(config: _Config) -> str:
    stated = config.find(*_DTYPE)
    # vLLM's choice if no type is stated.
    if stated is None or stated[1] == "auto":
        config.assumed.append("dtype bfloat16 assumed: torch_dtype is absent")
        return "bfloat16"
    return validated(TEXT, stated[1], key=stated[0], where=config.where).removeprefix("torch.")


# -- bytes per number -------------------------------------------------------------------------------------

DTYPE_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("float32", "float"), 4.0),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    # fp8_inc is Gaudi's, fp8_ds_mla that of DeepSeek's latent attention.
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), 1.0),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 1.0),
}
"""Bytes per element of the data types a config or vLLM's `--dtype` and `--kv-cache-dtype` name."""

_QUANTIZED_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "experts_int8"), 1.0),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes"), 0.5),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), 0.5625),  # 4 bits and an 8-bit scale for each 16
    "mxfp4": 0.53125,  # 4 bits and an 8-bit scale for each 32
}
"""Bytes per weight of quantization methods when the config gives no bit count."""

_FP8_COMPUTE_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"})
"""Methods whose matrix products run in fp8; the others only store weights smaller."""

_EXPERT_ONLY_METHODS = frozenset({"mxfp4", "experts_int8"})
"""Methods that shrink the routed experts and leave every other matrix as it is."""


def bytes_of_dtype(dtype: str, *, key: str, where: str | None = None) -> float:
    """Return the bytes per element of a named data type.

    Raises:
        UsageError: The name is unknown.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise UsageError(
            f"{key} {dtype[:40]!r} is not known", where=where, hint=f"one of {', '.join(DTYPE_BYTES)}"
        )
    return size


# -- quantization_config ---------------------------------------------------------------------------------

# Spellings of GPTQ and newer AWQ, older AWQ, others, and compressed-tensors.
_BITS = ("bits", "w_bit", "weight_bits", "num_bits")
# Of transformers, compressed-tensors, fp8 checkpoints and ModelOpt.
_LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


class _Weights(TypedDict, total=False):
    """The fields of an architecture that quantization changes."""

    quantization: str
    attention_weight_bytes: float
    ffn_weight_bytes: float
    expert_weight_bytes: float
    kv_bytes: float
    fp8_compute: bool


def _quantized(method: str, size: float | None) -> _Weights:
    """Return the fields that a method changes; it stores weights in `size` bytes, null keeps the model's data type.

    Embedding, output head and router stay in the model's data type under every method.
    """
    if size is None:
        return {"quantization": method}
    if method in _EXPERT_ONLY_METHODS:
        return {"quantization": method, "expert_weight_bytes": size}
    return {
        "quantization": method,
        "attention_weight_bytes": size,
        "ffn_weight_bytes": size,
        "expert_weight_bytes": size,
        "fp8_compute": method in _FP8_COMPUTE_METHODS,
    }


def _quantization(config: _Config) -> _Weights:
    """Read the `quantization_config` section.

    Bits come from `bits` (GPTQ, AWQ), `config_groups.*.weights.num_bits` (compressed-tensors, the widest group),
    `load_in_4bit`/`load_in_8bit` (bitsandbytes), or the method's name (fp8, mxfp4, …).
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise config.fault(f"quantization_config is {kind_of(section)}, not an object")
    named = section.get("quant_method")
    method = named.strip().lower()[:_MOST_NAME] if isinstance(named, str) and named.strip() else "unnamed"
    # NVIDIA ModelOpt names its formats here.
    if "FP4" in str(section.get("quant_algo")).upper():
        method = "modelopt_fp4"
    groups = [group for group in _part(section, "config_groups").values() if isinstance(group, Mapping)]
    # compressed-tensors: each group of modules has bits, the section itself has none.
    of_groups = [_bits(_part(group, "weights"), where=config.where) or 0 for group in groups]
    loads = (bits for bits in (8, 4) if section.get(f"load_in_{bits}bit") is True)
    bits = max(of_groups, default=0) or _bits(section, where=config.where) or next(loads, None)
    size = bits / 8 if bits else _QUANTIZED_BYTES.get(method)
    if size is None:
        config.assumed.append(
            f"weights in the model's data type assumed: quantization {excerpt(method)} states no bits"
        )
    weights = _quantized(method, size)
    # DeepSeek-V4: the section describes the other matrices.
    if config.get("expert_dtype") == "fp4":
        weights["expert_weight_bytes"] = _QUANTIZED_BYTES["mxfp4"]
    if _leaves_out_attention(section):
        weights.pop("attention_weight_bytes", None)
    is_kv_fp8 = str(section.get("kv_cache_quant_algo")).upper() == "FP8"
    kv_bits = 8 if is_kv_fp8 else _bits(_part(section, "kv_cache_scheme"), where=config.where)
    if kv_bits is not None:
        weights["kv_bytes"] = kv_bits / 8
    # The rate of matrix products changes only if activations are 8-bit floats too.
    activations = [_part(group, "input_activations") for group in groups]
    if any(a.get("num_bits") == 8 and a.get("type") == "float" for a in activations):
        weights["fp8_compute"] = True
    return weights


def _part(section: Document, key: str) -> Document:
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}


def _bits(section: Document, *, where: str) -> int | None:
    for key in _BITS:
        if (value := section.get(key)) is not None:
            return validated(whole_number(1, 32), value, key=f"quantization_config {key}", where=where)
    return None


def _leaves_out_attention(section: Document) -> bool:
    """Return whether the attention of every layer is left unquantized, not only that of some numbered layers."""
    patterns = [p for key in _LEFT_OUT if isinstance(listed := section.get(key), list) for p in listed]
    # `model.layers.3.self_attn` names one layer of many; `re:.*self_attn` has no digit and means all.
    return any(isinstance(p, str) and "attn" in p and not any(map(str.isdigit, p)) for p in patterns)


# -- as served -------------------------------------------------------------------------------------------


def as_served(
    arch: ModelArchitecture,
    *,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    quantization: str | None = None,
) -> ModelArchitecture:
    """Return the model as it is served, with the options that override the config.

    Args:
        arch: The model as its config describes it.
        dtype: The server's `--dtype`; None or `auto` keeps the config's, save that a float32 checkpoint is
            served as bfloat16 (vLLM's rule), which is noted in `assumed`.
        kv_cache_dtype: The server's `--kv-cache-dtype`; None or `auto` keeps the config's.
        quantization: The server's `--quantization`, for a config without quantization; an unknown method is
            assumed not to shrink weights, which is noted in `assumed`.

    Raises:
        UsageError: A data type is unknown.
    """
    assumed = list(arch.assumed)
    if dtype is not None and dtype != "auto":
        arch = _with_dtype(arch, dtype)
        assumed = [note for note in assumed if not note.startswith("dtype ")]
    elif arch.dtype in {"float32", "float"}:  # vLLM's rule of `--dtype auto`
        arch = _with_dtype(arch, "bfloat16")
        assumed.append("dtype bfloat16 assumed: float32 checkpoints are served in 16 bits")
    # A checkpoint that is quantized stays as it is: `gptq_marlin` names a kernel for it, not other weights.
    if quantization is not None and arch.quantization is None:
        size = _QUANTIZED_BYTES.get(quantization)
        if size is None:
            unknown = f"quantization {excerpt(quantization)} is not known"
            assumed.append(f"weights in the model's data type assumed: {unknown}")
        arch = replace(arch, **_quantized(quantization, size))
    if kv_cache_dtype is not None and kv_cache_dtype != "auto":
        arch = replace(arch, kv_bytes=bytes_of_dtype(kv_cache_dtype, key="kv_cache_dtype"))
    return replace(arch, assumed=tuple(assumed))


def _with_dtype(arch: ModelArchitecture, dtype: str) -> ModelArchitecture:
    """Change the data type of every matrix that is not quantized."""
    new = bytes_of_dtype(dtype, key="dtype")

    def changed(size: float) -> float:
        # Sizes that differ from the old data type's are quantized ones, and stay.
        return size if arch.quantization is not None and size != arch.dtype_bytes else new

    return replace(
        arch,
        dtype=dtype,
        dtype_bytes=new,
        attention_weight_bytes=changed(arch.attention_weight_bytes),
        ffn_weight_bytes=changed(arch.ffn_weight_bytes),
        expert_weight_bytes=changed(arch.expert_weight_bytes),
        kv_bytes=changed(arch.kv_bytes),
    )
