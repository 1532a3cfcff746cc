"""Look up the keys of a model's configuration: the part that describes the text model, spellings, defaults, and bounds.

Configurations come in several forms: Hugging Face's `config.json`, with the text model at the top or in a section, and
Mistral's `params.json`. `open_config` finds the text model and brings its keys to one level; `Config` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from tracefit.errors import UsageError
from tracefit.server.documents import FLAG, TEXT, excerpt, validated, whole_number

if TYPE_CHECKING:
    from tracefit.server.documents import Document


class UnknownModelError(UsageError):
    """A config that does not say enough to compute the cost of a step, or has a value that cannot be."""


# -- facts of families ----------------------------------------------------------------------------------
#
# Facts that no key of a published config states, by `model_type` (without `_text`, the type of the text part
# of multimodal models). Source: each family's configuration class in the transformers library.

UNGATED = frozenset(
    [
        *("falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2"),
        *("apertus", "arcee", "jais2", "nanochat", "nemotron", "nemotron_h"),
    ]
)
"""FFNs have two matrices, no gate; the width of those that do not state it is 4·hidden."""

TIED = frozenset(
    [
        *("falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt2", "gpt_bigcode", "opt"),
        *("cohere", "cohere2", "lfm2", "mamba", "starcoder2"),
    ]
)
"""Output head and input embedding are one matrix unless the config says otherwise."""

WINDOWED = frozenset(["mistral", "mixtral", "phi3", "phi4mm", "phimoe", "starcoder2"])
"""A window, if set, is one of every layer."""

GATED = frozenset(["bitnet", "gemma", "kimi_linear"])
"""FFNs have a gate, with an activation that most families have without one."""

_GATED_ACTIVATIONS = re.compile(r"glu|silu|swish|^gelu_pytorch_tanh$")
"""Activations that families have with a gate only."""

ALTERNATING = frozenset(["gemma2", "gpt_oss"])
"""A window is one of layers 0, 2, 4, …"""

LEARNED_POSITIONS: Mapping[str, int] = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
"""Positions are a learned embedding, with this number of rows beyond the configured count."""

GATED_ATTENTION = frozenset(["afmoe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
"""The output of attention has a gate unless the config says otherwise."""

BESIDE = frozenset(["falcon_h1"])
"""Each layer has attention and a state beside each other."""

ONLY_STATES = frozenset(["falcon_mamba", "mamba", "mamba2"])
"""Each layer is a state, without attention and FFN."""

DOUBLE = frozenset(["longcat_flash"])
"""Each layer has two attentions and two dense FFNs, and experts beside them."""

LIGHTNING = frozenset(["minimax", "minimax_m1", "minimax_text_01", "bailing_moe_linear", "bailing_moe_v2_linear"])
"""States are those of lightning attention, with the heads of the other layers' attention."""

COMPRESSED = frozenset(["deepseek_v4"])
"""Each layer has attention in a window, and most read entries of several tokens too. Sources: transformers'
`modeling_deepseek_v4`, vLLM's `deepseek_v4_attention` and `deepseek_compressor`."""

SINGLE_PART = frozenset(["nemotron_h"])
"""Each layer is one part: a state, attention, an FFN or experts."""

KNOWN = frozenset().union(
    *(UNGATED, TIED, GATED, WINDOWED, ALTERNATING, GATED_ATTENTION, BESIDE, ONLY_STATES, DOUBLE, LIGHTNING),
    COMPRESSED,
    ("chatglm", "kimi_k2", "llama", "llama4", "olmo2", "olmo3", "seed_oss", "smollm3"),
    ("bailing_moe", "bailing_moe_v2", "dbrx", "dots1", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_moe", "step3"),
    ("exaone4", "exaone4_5", "hunyuan_v1_dense", "laguna", "mimo", "ministral3", "step3p5"),
    ("bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "nemotron-nas", "mimo_v2_flash"),
    ("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    ("glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2"),
    ("granite", "granitemoe", "granitemoeshared"),
    ("qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_moe", "qwen2_vl"),
    ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"),
)
"""Families whose keys say all the rest."""

CONFIG_DEFAULTS: Mapping[str, Mapping[str, int]] = {
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


# -- keys and bounds ------------------------------------------------------------------------------------


LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIM = ("head_dim", "kv_channels")  # the second of ChatGLM
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
VOCABULARY = ("vocab_size", "padded_vocab_size")
POSITIONS = ("max_position_embeddings", "n_positions")
DTYPE = ("torch_dtype", "dtype")

_CONFIG_SECTIONS = (
    ("text_config",),
    ("thinker_config", "text_config"),
    ("thinker_config",),
    ("llm_config",),
    ("language_config",),
    ("language_model_config",),
)
"""Where multimodal configs describe the text model: Llama 4, Gemma 3, Qwen-VL; Qwen-Omni; InternVL; DeepSeek-VL."""

_PART_KEYS = ("attn_config", "ffn_config", "moe")
"""Sections of the text model whose keys are as good as its own: of DBRX, and of Mistral's experts."""

_KEY_SPELLINGS = {
    # Of Mistral's params.json, and its section of experts.
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
    "expert_hidden_dim": "moe_intermediate_size",
    "route_every_n": "moe_layer_freq",
    # DBRX; Step; DeciLM.
    "kv_n_heads": "num_key_value_heads",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
    "num_key_value_heads_per_layer": "num_key_value_heads",
    # Hunyuan and Nemotron-H; Hunyuan; LFM2 and OLMo.
    "attention_head_dim": "head_dim",
    "num_shared_expert": "n_shared_experts",
    "tie_embedding": "tie_word_embeddings",
    "weight_tying": "tie_word_embeddings",
    # LFM2 and Trinity; LongCat; MiniMax-M3; Command A+; Nemotron-Nano.
    "num_dense_layers": "first_k_dense_replace",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "dense_intermediate_size": "intermediate_size_mlp",
    "prefix_dense_intermediate_size": "intermediate_size_mlp",
    "mamba_num_groups": "n_groups",
}
"""Keys of few families, by the key with the same meaning, which counts if both are set."""

_WINNERS = {"block_ff_dim": "intermediate_size", "num_attention_heads_per_layer": "num_attention_heads"}
"""Keys that count even if the key with the same meaning is set: of LFM2, and of Laguna's lists."""

# Keys that multimodal configs have outside the nested text config.
_OUTER_KEYS = frozenset(
    {*DTYPE, *VOCABULARY, "tie_word_embeddings", "_name_or_path", "quantization_config", "compression_config"}
)

# Far above those of published models. Larger values are damage, and would make lists that fill the memory.
MOST_NAME = 64
MOST_MODEL_LAYERS = 4096
MOST_WIDTH = 2**24
MOST_HEADS = 2**16
MOST_MATRIX_ROWS = 2**28


class Config(msgspec.Struct):
    """A configuration with its nested text part in front, and the list of assumptions."""

    inner: Document
    outer: Document
    where: str
    model_type: str
    assumed: list[str] = msgspec.field(default_factory=list)

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

    def integer(self, *keys: str, least: int = 1, most: int = MOST_WIDTH) -> int | None:
        """Return a whole number under one of several spellings, or the family's default, or None."""
        stated = self.find(*keys)
        if stated is not None:
            return validated(whole_number(least, most), stated[1], key=stated[0], where=self.where)
        default = CONFIG_DEFAULTS.get(self.family, {}).get(keys[0])
        if default is not None:
            self._assume(f"{keys[0]} {default} assumed: default of {self.model_type}")
        return default

    def _assume(self, note: str) -> None:
        if note not in self.assumed:
            self.assumed.append(note)

    def required(self, *keys: str, least: int = 1, most: int = MOST_WIDTH) -> int:
        """Return a whole number that the model needs."""
        value = self.integer(*keys, least=least, most=most)
        if value is None:
            raise self.missing(*keys)
        return value

    def usual(self, usual: int, *keys: str, most: int = MOST_WIDTH) -> int:
        """Return a whole number that is nearly always the same, which is assumed if no key states it."""
        value = self.integer(*keys, most=most)
        if value is None:
            self._assume(f"{keys[0]} {usual} assumed: {keys[0]} is absent")
        return usual if value is None else value

    def per_layer(self, layers: int, *keys: str, least: int = 1, most: int = MOST_WIDTH) -> tuple[int, ...] | None:
        """Return a whole number for each layer, from a list of them or one number for all; None if no key states it."""
        stated = self.find(*keys)
        if stated is not None and isinstance(stated[1], list) and len(stated[1]) == layers:
            number = whole_number(least, most)
            return tuple(validated(number, item, key=stated[0], where=self.where) for item in stated[1])
        one = self.integer(*keys, least=least, most=most)
        return None if one is None else (one,) * layers

    def flag(self, key: str) -> bool | None:
        """Return true, false, or None for a key that is not set."""
        value = self.get(key)
        return None if value is None else validated(FLAG, value, key=key, where=self.where)

    def integers(self, key: str, *, least: int, most: int, length: int | None = None) -> list[int] | None:
        """Return a list of whole numbers, or None for a key that is not set."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MOST_MODEL_LAYERS or length not in {None, len(value)}:
            wanted = "numbers" if length is None else f"{length} numbers, one per layer"
            raise self.fault(f"{key} must be a list of {wanted}")
        number = whole_number(least, most)
        return [validated(number, item, key=key, where=self.where) for item in value]

    def section(self, key: str) -> Config | None:
        """Return a section as a configuration of its own, or None for a key that is not set."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(f"{key} must be an object")
        return Config(value, {}, self.where, self.model_type, self.assumed)

    def fault(self, text: str) -> UnknownModelError:
        """Return the error of a config with an impossible value."""
        return UnknownModelError(text, where=self.where)

    def missing(self, *keys: str) -> UnknownModelError:
        """Return the error of a config without a key."""
        spellings = f" (also spelled {', '.join(keys[1:])})" if keys[1:] else ""
        return UnknownModelError(
            f"{keys[0]} is missing{spellings}", where=self.where, hint="is this a whole config.json?"
        )

    def not_understood(self, key: str, what: str) -> UnknownModelError:
        """Return the error of a config that shows something no rule of this module reads."""
        return UnknownModelError(
            f"{excerpt(key)} {what}", where=self.where, hint="without the model, its features are left out"
        )


# -- opening --------------------------------------------------------------------------------------------


def open_config(document: Document, *, where: str) -> Config:
    """Find the part that describes the text model, and its family.

    Raises:
        UnknownModelError: The document describes an adapter, not a model.
    """
    if (adapter := document.get("peft_type")) is not None:
        base = document.get("base_model_name_or_path")
        of = f" of {excerpt(base)}" if isinstance(base, str) else ""
        kind = "LoRA" if adapter == "LORA" else excerpt(adapter)
        raise UnknownModelError(
            f"a {kind} adapter{of}, not a model, is described",
            where=where,
            hint="give the config.json of the model",
        )
    document = {key: _unquoted(key, value) for key, value in document.items()}
    inner = _flat(next((part for path in _CONFIG_SECTIONS if (part := _at(document, path)) is not None), document))
    # The type of the text model comes first: it says more than the wrapper's.
    named = inner.get("model_type") or document.get("model_type")
    if named is None and "dim" in inner:
        inner, named = _with_llama_ffn(inner), "mistral"
    model_type = validated(TEXT, named or "unknown", key="model_type", where=where)[:MOST_NAME]
    config = Config(inner, _flat(document), where, model_type)
    if config.family not in KNOWN:
        _check_usual(config)
        config.assumed.append(
            f"model_type {excerpt(model_type)} is not known: read by its keys as a usual decoder (gated FFNs, rotary "
            "positions)"
        )
    return config


_UNUSUAL_FAMILY = re.compile(r"rwkv|xlstm|retnet|mamba|griffin|hyena|recurrent")


def _check_usual(config: Config) -> None:
    """Refuse a family that is not known and cannot be read as a usual decoder.

    Raises:
        UnknownModelError: Its name or activation says that its layers may not be those of a usual decoder.
    """
    if _UNUSUAL_FAMILY.search(config.family):
        raise config.not_understood(f"model_type {config.model_type}", "is of a family whose layers are not read")
    activation = config.get("hidden_act")
    if isinstance(activation, str) and not _GATED_ACTIVATIONS.search(activation.lower()):
        raise config.not_understood(
            f"hidden_act {activation}",
            f"does not say whether FFNs of {excerpt(config.model_type)} have a gate",
        )


_WRITTEN_NUMBER = re.compile(r"-?\d{1,18}(?:(\.\d{1,18})?(e[+-]?\d{1,2})?)", re.ASCII | re.IGNORECASE)
_TRUTH_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TEXT_KEYS = frozenset({*DTYPE, "_name_or_path", "model_type", "moe_layers_enum"})
"""Keys whose values are text, even if it is that of a number."""


def _unquoted(key: str, value: object) -> object:
    """Return a value with the numbers, booleans and nulls in it that a script wrote in quotes: `"64"` is 64."""
    if isinstance(value, Mapping):
        return {name: _unquoted(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unquoted(key, item) for item in value]
    if not isinstance(value, str) or key in _TEXT_KEYS:
        return value
    if value in _TRUTH_WORDS:
        return _TRUTH_WORDS[value]
    number = _WRITTEN_NUMBER.fullmatch(value)
    return value if number is None else float(value) if any(number.groups()) else int(value)


def _at(document: Document, path: tuple[str, ...]) -> Document | None:
    """Return the section at a path of keys, or None."""
    part: object = document
    for key in path:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else None


def _flat(section: Document) -> dict[str, object]:
    """Return the keys of a section with those of its parts, all under one spelling; its own keys win."""
    parts = [part for key in _PART_KEYS if isinstance(part := section.get(key), Mapping)]
    flat = {
        key: value
        for part in (*parts, section)
        for key, value in part.items()
        if value is not None and (part is section or key != "model_type")
    }
    for key, usual in _KEY_SPELLINGS.items():
        if flat.get(key) is not None and flat.get(usual) is None:
            flat[usual] = flat[key]
    return flat | {usual: flat[key] for key, usual in _WINNERS.items() if flat.get(key) is not None}


def _with_llama_ffn(inner: dict[str, object]) -> dict[str, object]:
    """Add the FFN width to Meta's `params.json`, which states a rounding and a factor instead."""
    dim, rounding, factor = (inner.get(key) for key in ("dim", "multiple_of", "ffn_dim_multiplier"))
    if inner.get("intermediate_size") is not None or not (_is_size(dim) and _is_size(rounding)):
        return inner
    width = int(8 * dim / 3)  # type: ignore[operator]
    if isinstance(factor, int | float) and 0 < factor < 64:
        width = int(factor * width)
    return {**inner, "intermediate_size": rounding * -(-width // rounding)}  # type: ignore[operator]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST_WIDTH


# -- keys that nothing reads ----------------------------------------------------------------------------

_SHOWS_LAYERS = re.compile(
    r"(?<!activation_sparsity)_pattern$|layer_types$|block_types?$|block_configs?$|_type_list$|layer_(period|offset|indices|ids|idxs|group)"
    r"|layers_(enum|indices|ids)|attention_interval$|_every_n_layers$|mem(ory)?_blocks$|mb_per_layer|compress_ratios|sparse_attention"
    r"|ngram|_lora_adapter|o_groups|cla_share|share_q|^swa_|^global_(head|attn|attention)|^attention_other|layer_freq|kv_shared|cross_attention_layers$"
    r"|_k_eq_v$|double_wide|ut_steps$|num_(loops|recurrences)$"
)
"""Keys that say how layers differ, or what is unusual in them."""

_SHOWS_STATES = re.compile(
    r"^(mamba|ssm|rwkv|wkv|lru|gla|kda|lightning|recurrent|linear|conv_L|retention)_|^(d_)?state_size$|linear_attn"
)
"""Keys that size a state per request."""

_SHOWS_EXPERTS = re.compile(r"experts?$|experts_(num|count)|expert_(num|count)|moe_(freq|every|layers|period)")
"""Keys that say how many experts there are, or in which layers."""

_HARMLESS = re.compile(
    r"^(mtp|nextn|draft|vision|audio|talker|rope|router|output|log|use|add|norm|index_topk)_|_per_tok(en)?$"
)
"""Keys that look like one of those above and change no size."""


def check_understood(config: Config, *, read: frozenset[str], has_experts: bool, has_states: bool) -> None:
    """Refuse a configuration that shows kinds of layers in keys which nothing reads.

    Args:
        config: The configuration.
        read: Keys that were read, or say what a key that was read says too.
        has_experts: Whether experts were found, or stated to be none.
        has_states: Whether states were found, or the kinds of all layers are stated.

    Raises:
        UnknownModelError: There is such a key.
    """
    for key, value in config.inner.items():
        # Every first layer is every layer.
        if not value or key in read or _HARMLESS.search(key) or (key == "global_attn_every_n" and value == 1):
            continue
        is_number = isinstance(value, int | float | list) and not isinstance(value, bool)
        if _SHOWS_LAYERS.search(key):
            raise config.not_understood(key, "is not understood, and describes layers")
        if not has_states and is_number and _SHOWS_STATES.search(key):
            raise config.not_understood(key, "is not understood, and describes layers with a state")
        if not has_experts and is_number and value != 1 and _SHOWS_EXPERTS.search(key):
            raise config.not_understood(key, "is not understood, and describes experts")
