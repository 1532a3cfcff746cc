"""Read how many bytes the weights of a quantized model take, by kind of matrix, from its configuration.

A method has one width for all matrices, and rules for some modules: lists of modules that are left as they are, or with
a width of their own, by name, wildcard or regular expression. The rules are matched against the names that modules of
such layers have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import polars as pl

from tracefit.errors import UsageError
from tracefit.server.documents import excerpt, kind_of, validated, whole_number
from tracefit.server.model_keys import MOST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.server.architecture import Layer
    from tracefit.server.documents import Document
    from tracefit.server.model_keys import Config

DTYPE_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("float32", "float"), 4.0),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    # fp8_inc is Gaudi's, fp8_ds_mla that of DeepSeek's latent attention.
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), 1.0),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 1.0),
}
"""Bytes per element of the data types a config or vLLM's `--dtype` and `--kv-cache-dtype` name."""

_NVFP4 = 0.5625  # 4 bits and an 8-bit scale for each 16
_MXFP4 = 0.53125  # 4 bits and an 8-bit scale for each 32

QUANTIZED_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "experts_int8", "eetq"), 1.0),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes"), 0.5),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), _NVFP4),
    "mxfp4": _MXFP4,
    "bitnet": 0.25,  # three values, packed in 2 bits
}
"""Bytes per weight of quantization methods when the config gives no bit count."""

_FP8_COMPUTE_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"})
"""Methods whose matrix products run in fp8; the others only store weights smaller."""

_EXPERT_ONLY_METHODS = frozenset({"mxfp4", "experts_int8"})
"""Methods that shrink the routed experts and leave every other matrix as it is."""

# Spellings of GPTQ and newer AWQ, older AWQ, others, and compressed-tensors; HQQ.
_BITS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits")
# Of transformers, compressed-tensors, fp8 checkpoints, ModelOpt; Quark; HQQ.
_LEFT_OUT_KEYS = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "skip_modules",
)

_MOST_EXPRESSIONS = 256
"""Regular expressions and wildcards that are matched; published files have fewer than 100."""


def bytes_of_dtype(dtype: str, *, key: str, where: str | None = None) -> float:
    """Return the bytes per element of a named data type.

    Raises:
        UsageError: The name is unknown.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise UsageError(f"{key} {dtype[:40]!r} is not known", where=where, hint=f"one of {', '.join(DTYPE_BYTES)}")
    return size


class Weights(TypedDict, total=False):
    """The fields of an architecture that quantization changes."""

    quantization: str
    attention_weight_bytes: float
    state_weight_bytes: float
    ffn_weight_bytes: float
    shared_weight_bytes: float
    expert_weight_bytes: float
    head_weight_bytes: float
    kv_bytes: float
    fp8_compute: bool


def quantized(method: str, size: float | None) -> Weights:
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
        "state_weight_bytes": size,
        "ffn_weight_bytes": size,
        "shared_weight_bytes": size,
        "expert_weight_bytes": size,
        "fp8_compute": method in _FP8_COMPUTE_METHODS,
    }


def quantization_of(config: Config, layers: Sequence[Layer], dtype_bytes: float) -> Weights:
    """Read the `quantization_config` section.

    Bits come from `bits` (GPTQ, AWQ, EXL3, auto-round), `config_groups.*.weights.num_bits` (compressed-tensors, the
    widest group), `load_in_4bit`/`load_in_8bit` (bitsandbytes), the name of a data type (Quark) or of a class
    (torchao), or the method's name.
    """
    section = next((s for key in _QUANTIZATION_SECTIONS if (s := config.get(key)) is not None), None)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise config.fault(f"quantization_config is {kind_of(section)}, not an object")
    method, where = _method(section), config.where
    size = _size(section, where=where)
    if size is None:
        # A list of all quantized layers leaves the others as they are.
        size = dtype_bytes if section.get("quantized_layers") else QUANTIZED_BYTES.get(method)
    if size is None:
        config.assumed.append(
            f"weights in the model's data type assumed: quantization {excerpt(method)} states no bits"
        )
    weights = quantized(method, size)
    # DeepSeek-V4: the section describes the other matrices.
    if config.get("expert_dtype") == "fp4":
        weights["expert_weight_bytes"] = _MXFP4
    matrices = {**_MATRICES, **(_OF_GEMMA_4 if config.flag("enable_moe_block") else {})}
    weights.update(_by_rules(weights, list(_rules(section, dtype_bytes, where=where)), layers, matrices))
    # EXL3 has a width of its own for the output head.
    if (head := _bits(section, "head_bits", where=where)) is not None:
        weights["head_weight_bytes"] = head / 8
    is_kv_fp8 = str(section.get("kv_cache_quant_algo")).upper() == "FP8"
    kv = 1.0 if is_kv_fp8 else _size_of_part(_part(section, "kv_cache_scheme"), where=where)
    if kv is not None:
        weights["kv_bytes"] = kv
    # The rate of matrix products changes only if activations are 8-bit floats too.
    groups = [_part(group, "input_activations") for group in _groups(section)]
    quark = _part(_part(section, "global_quant_config"), "input_tensors")
    if any(a.get("num_bits") == 8 and a.get("type") == "float" for a in groups) or _is_fp8(quark.get("dtype")):
        weights["fp8_compute"] = True
    return weights


_QUANTIZATION_SECTIONS = ("quantization_config", "compression_config", "quantization")
"""The first of transformers, the second of older compressed-tensors, the last of Mistral's params.json and MLX."""


def _method(section: Document) -> str:
    named = section.get("quant_method")
    method = named.strip().lower()[:MOST_NAME] if isinstance(named, str) and named.strip() else "unnamed"
    if method == "unnamed" and str(section.get("qformat_weight")).lower().startswith("fp8"):
        return "fp8"
    # NVIDIA ModelOpt names its formats here.
    return "modelopt_fp4" if "FP4" in str(section.get("quant_algo")).upper() else method


def _size(section: Document, *, where: str) -> float | None:
    """Return the bytes of a weight that the section states for most matrices, or None."""
    # compressed-tensors: each group of modules has bits, the section itself has none.
    groups = [group for group in _groups(section) if not _targets(group)] or list(_groups(section))
    sizes = [_size_of_part(_part(group, "weights"), where=where) or 0 for group in groups]
    if largest := max(sizes, default=0):
        return largest
    for part in (
        section,
        _part(_part(section, "global_quant_config"), "weight"),  # Quark
        _part(_part(section, "quant_config"), "weight_quant_params"),  # HQQ
    ):
        if (size := _size_of_part(part, where=where)) is not None:
            return size
    if (size := _torchao_bytes(section.get("quant_type"))) is not None:
        return size
    # Quanto names the data type of weights.
    if (named := _TYPE_BITS.search(str(section.get("weights")).lower())) is not None:
        return int(named[1]) / 8
    loads = (bits / 8 for bits in (8, 4) if section.get(f"load_in_{bits}bit") is True)
    return next(loads, None)


def _groups(section: Document) -> Iterator[Document]:
    for group in _part(section, "config_groups").values():
        if isinstance(group, Mapping):
            yield group


def _targets(group: Document) -> list[str]:
    """Return the modules that a group is for, by name or expression; none if it is for a class of them, such as
    Linear.
    """
    listed = group.get("targets")
    names = [t for t in listed if isinstance(t, str)] if isinstance(listed, list) else []
    return [name for name in names if name.startswith("re:") or "." in name or "*" in name]


def _size_of_part(part: Document, *, where: str) -> float | None:
    """Return the bytes of a number that a section describes by its bits or data type, with the scales of 4-bit
    floats.
    """
    bits = next((b for key in _BITS if (b := _bits(part, key, where=where)) is not None), None)
    is_float = part.get("type") == "float" or "fp" in str(part.get("data_type")).lower()
    dtype = part.get("dtype")
    if bits is None and isinstance(dtype, str) and (named := _TYPE_BITS.search(dtype.lower())) is not None:
        bits, is_float = int(named[1]), dtype.lower().startswith(("fp", "float", "mx"))
    if bits is None:
        return None
    if bits == 4 and is_float:
        return {16: _NVFP4, 32: _MXFP4}.get(_whole(part.get("group_size")), 0.5)
    return bits / 8


_TYPE_BITS = re.compile(r"(?:u?int|mx_?fp|nv_?fp|fp|float)_?(16|8|6|4|3|2)(?!\d)")
"""Data types by name: int4, uint4, fp8_e4m3, mxfp4, float8_e4m3fn."""


def _is_fp8(dtype: object) -> bool:
    return str(dtype).lower().startswith(("fp8", "float8"))


def _whole(value: object) -> int:
    return value if type(value) is int else 0


_TORCHAO = re.compile(r"(nv|mx)?(?:u?int|fp|float)_?([1-8])_?weight", re.IGNORECASE)


def _torchao_bytes(quant_type: object) -> float | None:
    """Return the bytes of a weight by the name of torchao's class or function: Int4WeightOnlyConfig,
    int8_weight_only.
    """
    if isinstance(quant_type, Mapping):
        inner = quant_type.get("default", quant_type)
        named = inner.get("_type") if isinstance(inner, Mapping) else inner
    else:
        named = quant_type
    match = _TORCHAO.search(named) if isinstance(named, str) else None
    if match is None:
        return None
    if match[1] is not None and match[2] == "4":
        return _NVFP4 if match[1].lower() == "nv" else _MXFP4
    return int(match[2]) / 8


def _part(section: Document, key: str) -> Document:
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}


def _bits(section: Document, key: str, *, where: str) -> float | None:
    """Return a number of bits; EXL2 and EXL3 state the mean of many matrices, which has a fraction."""
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, float) and math.isfinite(value) and 1 <= value <= 32:
        return value
    return validated(whole_number(1, 32), value, key=f"quantization_config {key}", where=where)


# -- rules for some modules ------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """Modules, and the bytes of their weights."""

    pattern: str
    size: float


def _rules(section: Document, dtype_bytes: float, *, where: str) -> Iterator[_Rule]:
    """Yield the rules of a section; a later one counts more: widths first, modules that are left out last."""
    for group in _groups(section):
        size = _size_of_part(_part(group, "weights"), where=where)
        yield from (_Rule(target, dtype_bytes if size is None else size) for target in _targets(group))
    yield from _rules_of_methods(section, dtype_bytes, where=where)
    for key in _LEFT_OUT_KEYS:
        listed = section.get(key)
        names = listed if isinstance(listed, list) else ()
        yield from (_Rule(name, dtype_bytes) for name in names if isinstance(name, str))


def _rules_of_methods(section: Document, dtype_bytes: float, *, where: str) -> Iterator[_Rule]:
    """Yield the rules of ModelOpt, which lists every module of a mixed checkpoint, and of methods that list those that
    differ.
    """
    for name, part in _named(section, "quantized_layers"):
        yield _Rule(name, _NVFP4 if "FP4" in str(part.get("quant_algo")).upper() else 1.0)
    for name, part in _named(section, "layer_quant_config"):  # Quark
        size = _size_of_part(_part(part, "weight"), where=where)
        yield _Rule(name, dtype_bytes if size is None else size)
    # MLX names modules beside its own keys, with false for one that is left out.
    for name, value in section.items():
        if "layers." in name and (value is False or isinstance(value, Mapping)):
            size = _size_of_part(value, where=where) if isinstance(value, Mapping) else None
            yield _Rule(name, dtype_bytes if size is None else size)
    for name, part in _named(_part(section, "quant_type"), "module_fqn_to_config"):  # torchao
        yield _Rule(name, _torchao_bytes(part) or dtype_bytes)
    # auto-round; and GPTQModel's expressions; a minus at the start leaves modules out.
    for name, part in (*_named(section, "extra_config"), *_named(section, "dynamic")):
        size = dtype_bytes if name.startswith("-:") else _size_of_part(part, where=where)
        expression = name.removeprefix("-:").removeprefix("+:")
        if size is not None:
            yield _Rule(name if _is_plain(name) else f"re:{expression}", min(size, dtype_bytes))


def _named(section: Document, key: str) -> Iterator[tuple[str, Document]]:
    for name, part in _part(section, key).items():
        if isinstance(part, Mapping):
            yield name, part


_PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("w1", "w2", "w3"),
)
_MATRICES: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "attention_weight_bytes": (
        ("self_attn", "self_attention", "attention", "attn", "mixer"),
        (
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("qkv_proj", "o_proj"),
            ("query_key_value", "dense"),
            ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ),
    ),
    "state_weight_bytes": (
        ("linear_attn", "mamba", "mixer", "self_attn", "conv", "short_conv"),
        (
            ("in_proj", "out_proj"),
            ("in_proj_qkv", "in_proj_z", "out_proj"),
            ("in_proj_qkvz", "in_proj_ba", "out_proj"),
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("qkv_proj", "out_proj"),
        ),
    ),
    "ffn_weight_bytes": (("mlp", "mlps.0", "feed_forward", "ffn", "mixer"), _PROJECTIONS),
    "shared_weight_bytes": (
        (
            *("mlp.shared_experts", "mlp.shared_expert", "block_sparse_moe.shared_experts", "shared_mlp"),
            *("feed_forward.shared_expert", "mixer.shared_experts", "mlp.shared_mlp"),
        ),
        _PROJECTIONS,
    ),
    "expert_weight_bytes": (
        (
            *("mlp.experts.0", "block_sparse_moe.experts.0", "feed_forward.experts.0", "mixer.experts.0"),
            *("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts", "mixer.experts"),
        ),
        _PROJECTIONS,
    ),
}
"""Where the modules of a kind are in a layer, and the sets of matrices that they are made of, by the field they
change."""

_OF_GEMMA_4 = {
    "ffn_weight_bytes": (("mlp",), _PROJECTIONS),
    "expert_weight_bytes": (("experts.0", "experts", "moe.experts.0", "moe"), _PROJECTIONS),
}
"""Where Gemma 4 has its FFN and its experts: beside each other, so that a rule for `mlp` is not one for the experts."""

_MODULE_PREFIXES = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "transformer.",
    "",
)
_NUMBERED = re.compile(r"^(.*?)\b(?:layers|blocks|h)\.(\d{1,6}|\*)(?:\.(.+)|(\*)?)$", re.DOTALL)
_OTHER_TOWERS = re.compile(r"vis|audio|tower|encoder|projector|mtp|draft|talker|speech")
_PLAIN_MODULE = re.compile(r"[\w.\-]+")


def _is_plain(pattern: str) -> bool:
    return _PLAIN_MODULE.fullmatch(pattern) is not None


def _has(field: str, layer: Layer) -> bool:
    """Return whether a layer has matrices of a kind."""
    match field:
        case "attention_weight_bytes":
            return bool(layer.attentions)
        case "state_weight_bytes":
            return layer.state is not None
        case "ffn_weight_bytes":
            return bool(layer.ffns)
        case "shared_weight_bytes":
            return layer.experts is not None and layer.experts.shared_ffn > 0
        case _:
            return layer.experts is not None


def _by_rules(
    weights: Weights,
    rules: Sequence[_Rule],
    layers: Sequence[Layer],
    matrices: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]],
) -> Weights:
    """Return the bytes of each kind of matrix with the rules applied: the mean over the layers that have it.

    A layer has the width of a rule if the rules cover all of its matrices of the kind; one matrix of several changes
    nothing.
    """
    changed: dict[str, float] = {}
    if not rules:
        return {}
    matcher = _Matcher(rules, len(layers))
    for field, (roots, sets) in matrices.items():
        usual = weights.get(field)
        ids = [i for i, layer in enumerate(layers) if _has(field, layer)]
        if not isinstance(usual, float) or not ids:
            continue
        sizes = Counter(
            next(
                (size for root in roots for s in sets if (size := matcher.size_of(i, root, s)) is not None),
                usual,
            )
            for i in ids
        )
        if sizes.keys() != {usual}:
            changed[field] = sum(size * n for size, n in sizes.items()) / len(ids)
    return changed  # type: ignore[return-value]


class _Matcher:
    """Rules, sorted by the layers that they are for."""

    def __init__(self, rules: Sequence[_Rule], count: int) -> None:
        """Sort the rules: exact names and wildcards of numbered layers, and expressions, which are matched with all
        names at once.
        """
        self.of_layer: dict[int, dict[str, float]] = {}
        self.of_all: dict[str, float] = {}
        self.expressions: list[_Rule] = []
        self.count = count
        self.matched: dict[str, dict[int, float]] = {}
        for rule in rules:
            self._sort(rule)
        del self.expressions[_MOST_EXPRESSIONS:]

    def _sort(self, rule: _Rule) -> None:
        if rule.pattern.startswith("re:"):
            self.expressions.append(rule._replace(pattern=rule.pattern[3:]))
            return
        if (numbered := _NUMBERED.match(rule.pattern)) is None:
            self.of_all[rule.pattern.removesuffix("*").removesuffix(".").removeprefix("*").removeprefix(".")] = (
                rule.size
            )
            if "*" in rule.pattern.strip("*."):
                self.expressions.append(rule._replace(pattern=_expression_of(rule.pattern)))
            return
        prefix, number, rest, _ = numbered.groups()
        if _OTHER_TOWERS.search(prefix):
            return
        rest = (rest or "").removesuffix("*").removesuffix(".")
        if "*" in rest:
            self.expressions.append(rule._replace(pattern=_expression_of(rule.pattern)))
        elif number == "*":
            self.of_all[rest] = rule.size
        else:
            self.of_layer.setdefault(int(number), {})[rest] = rule.size

    def size_of(self, layer: int, root: str, matrices: Iterable[str]) -> float | None:
        """Return the bytes that rules state for all of these matrices of a layer, or None if they leave one open."""
        sizes = [self._one(layer, f"{root}.{matrix}") for matrix in matrices]
        return None if None in sizes else max(size for size in sizes if size is not None)

    def _one(self, layer: int, name: str) -> float | None:
        numbered = self.of_layer.get(layer, {})
        for rules in (numbered, self.of_all):
            for rule in _parts_of(name):
                if rule in rules:
                    return rules[rule]
        if "" in numbered:  # the whole layer
            return numbered[""]
        if name not in self.matched:
            self.matched[name] = self._match(name)
        return self.matched[name].get(layer)

    def _match(self, name: str) -> dict[int, float]:
        """Return the bytes that expressions state for one module of each layer, by layer.

        The expressions come from a file. The library that matches them takes time in proportion to the text, for any
        expression; one that it does not know matches nothing.
        """
        if not self.expressions:
            return {}
        names = pl.DataFrame({"layer": range(self.count)}).select(
            "layer",
            name=pl.concat_list(pl.format(prefix + "layers.{}." + name, "layer") for prefix in _MODULE_PREFIXES),
        )
        found: dict[int, float] = {}
        exploded = names.explode("name")
        for rule in self.expressions:
            # compressed-tensors matches from the start of a name, as Python's `re.match` does.
            try:
                hit = exploded.filter(pl.col("name").str.contains(f"^(?:{rule.pattern})", strict=False))
            except pl.exceptions.PolarsError:
                continue
            found.update(dict.fromkeys(hit["layer"].to_list(), rule.size))
        return found


def _parts_of(name: str) -> Iterator[str]:
    """Yield the runs of a module's name that a rule may consist of: `mlp.up_proj`, `mlp`, `up_proj`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for first in range(len(parts) - length + 1):
            yield ".".join(parts[first : first + length])


def _expression_of(wildcards: str) -> str:
    """Return a regular expression for a name with wildcards, which a dot does not end."""
    return ".*".join(re.escape(part) for part in wildcards.split("*")) + "(?:$|\\.)"
