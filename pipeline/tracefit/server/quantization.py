"""Bytes per number: data types, and quantization, which makes weights smaller.

`parse_quantization` reads the `quantization_config` section of a model's config.json: which matrices it makes smaller,
and by how much. `as_served` applies the options with which a server overrules the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.server.documents import excerpt, validated, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.server.architecture import ModelArchitecture
    from tracefit.server.documents import Document

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "float": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,  # of Gaudi
    "fp8_ds_mla": 1.0,  # of DeepSeek's latent attention
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
}
"""Bytes per element of the data types a config or vLLM's `--dtype` and `--kv-cache-dtype` name."""

_QUANTIZED_BYTES: Mapping[str, float] = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "ptpc_fp8": 1.0,
    "modelopt": 1.0,
    "experts_int8": 1.0,
    "awq": 0.5,
    "awq_marlin": 0.5,
    "gptq": 0.5,
    "gptq_marlin": 0.5,
    "bitsandbytes": 0.5,
    "modelopt_fp4": 0.5625,  # 4 bits and an 8-bit scale for each 16
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,  # 4 bits and an 8-bit scale for each 32
}
"""Bytes per weight of quantization methods when the config gives no bit count."""

_FP8_COMPUTE_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"})
"""Methods whose matrix products run in fp8; the others only store weights smaller."""

_EXPERT_ONLY_METHODS = frozenset({"mxfp4", "experts_int8"})
"""Methods that shrink the routed experts and leave every other matrix as it is."""


def bytes_of_dtype(dtype: str, *, key: str, where: str | None = None) -> float:
    """Return the bytes per element of a named data type.

    Args:
        dtype: Name, for example `bfloat16`.
        key: What named it, for the error.
        where: File or option it stands in, for the error.

    Raises:
        UsageError: The name is not known.
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


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bytes per element of a quantized model's matrices; None is the model's own data type.

    Attributes:
        method: Name of the method, or None for a model that is not quantized.
        attention_bytes: Attention matrices.
        ffn_bytes: Dense and shared FFN matrices.
        expert_bytes: Routed experts.
        kv_bytes: Cached keys and values.
        fp8_compute: Matrix products run in fp8.
        assumed: What the section did not state.
    """

    method: str | None = None
    attention_bytes: float | None = None
    ffn_bytes: float | None = None
    expert_bytes: float | None = None
    kv_bytes: float | None = None
    fp8_compute: bool = False
    assumed: tuple[str, ...] = ()


NOT_QUANTIZED = Quantization()


def parse_quantization(section: Document | None, *, where: str) -> Quantization:
    """Interpret a `quantization_config` section.

    Bits come from `bits` (GPTQ, AWQ), `config_groups.*.weights.num_bits` (compressed-tensors, the widest
    group), `load_in_4bit`/`load_in_8bit` (bitsandbytes), or the method's name (fp8, mxfp4, …). Embedding,
    output head and router stay in the model's data type under every method.

    Args:
        section: The section, or None when there is none.
        where: Name of the config, for errors.

    Raises:
        UsageError: A bit count is not valid.
    """
    if section is None:
        return NOT_QUANTIZED
    method = _method(section)
    size = _weight_bytes(section, method, where=where)
    found = Quantization(
        method=method,
        expert_bytes=size,
        ffn_bytes=None if method in _EXPERT_ONLY_METHODS else size,
        attention_bytes=None if method in _EXPERT_ONLY_METHODS or _leaves_out_attention(section) else size,
        kv_bytes=_kv_bytes(section, where=where),
        fp8_compute=_computes_in_fp8(section, method),
    )
    if size is None:
        note = f"weights in the model's data type assumed: quantization {excerpt(method)} states no bits"
        return replace(found, assumed=(note,))
    return found


def _method(section: Document) -> str:
    algorithm = section.get("quant_algo")  # NVIDIA ModelOpt names its formats here
    if isinstance(algorithm, str) and "FP4" in algorithm.upper():
        return "modelopt_fp4"
    method = section.get("quant_method")
    return method.strip().lower()[:64] if isinstance(method, str) and method.strip() else "unnamed"


def _groups(section: Document) -> Iterator[Document]:
    groups = section.get("config_groups")
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _weight_bytes(section: Document, method: str, *, where: str) -> float | None:
    # compressed-tensors: the section itself has no bits, each group of modules has its own.
    bits = [_bits(weights, where=where) for group in _groups(section) if (weights := _part(group, "weights"))]
    stated = max((bit for bit in bits if bit is not None), default=None)
    if stated is None:
        stated = _bits(section, where=where)
    if stated is None and section.get("load_in_8bit") is True:
        stated = 8
    if stated is None and section.get("load_in_4bit") is True:
        stated = 4
    return _QUANTIZED_BYTES.get(method) if stated is None else stated / 8


def _part(section: Document, key: str) -> Document | None:
    value = section.get(key)
    return value if isinstance(value, Mapping) else None


def _bits(section: Document, *, where: str) -> int | None:
    for key in _BITS:
        value = section.get(key)
        if value is not None:
            return validated(whole_number(1, 32), value, key=f"quantization_config {key}", where=where)
    return None


def _leaves_out_attention(section: Document) -> bool:
    """Return whether the attention of every layer is left unquantized, not only that of some numbered layers."""
    # `model.layers.3.self_attn` names one layer of many; `re:.*self_attn` has no digit and means all.
    for key in _LEFT_OUT:
        patterns = section.get(key)
        for pattern in patterns if isinstance(patterns, list) else ():
            if isinstance(pattern, str) and "attn" in pattern and not any(map(str.isdigit, pattern)):
                return True
    return False


def _kv_bytes(section: Document, *, where: str) -> float | None:
    if str(section.get("kv_cache_quant_algo")).upper() == "FP8":
        return 1.0
    scheme = _part(section, "kv_cache_scheme")
    bits = _bits(scheme, where=where) if scheme else None
    return None if bits is None else bits / 8


def _computes_in_fp8(section: Document, method: str) -> bool:
    """Return whether activations are quantized to 8-bit floats too; weights alone do not change the rate."""
    if method in _FP8_COMPUTE_METHODS:
        return True
    for group in _groups(section):
        activations = _part(group, "input_activations")
        if activations and activations.get("num_bits") == 8 and activations.get("type") == "float":
            return True
    return False


# -- as served -------------------------------------------------------------------------------------------


def as_served(
    arch: ModelArchitecture,
    *,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    quantization: str | None = None,
) -> ModelArchitecture:
    """Return the model as a server holds it, where its options overrule the config.

    Args:
        arch: The model as its config describes it.
        dtype: The server's `--dtype`; None or `auto` keeps the config's, save that a float32 checkpoint is
            served as bfloat16 (vLLM's own rule), which is noted in `assumed`.
        kv_cache_dtype: The server's `--kv-cache-dtype`; None or `auto` keeps the config's.
        quantization: The server's `--quantization`, for a config that is not quantized itself; a method that is
            not known is taken not to shrink weights, which is noted in `assumed`.

    Raises:
        UsageError: A data type that is not known.
    """
    if dtype in {None, "auto"}:
        # vLLM's rule of `--dtype auto`: a float32 checkpoint is loaded in 16 bits.
        if arch.dtype in {"float32", "float"}:
            arch = _with_dtype(arch, "bfloat16")
            note = "dtype bfloat16 assumed: float32 checkpoints are served in 16 bits"
            arch = replace(arch, assumed=(*arch.assumed, note))
    elif dtype is not None:
        stated = tuple(note for note in arch.assumed if not note.startswith("dtype "))
        arch = replace(_with_dtype(arch, dtype), assumed=stated)
    # A checkpoint that is quantized stays as it is: `gptq_marlin` names a kernel for it, not other weights.
    if quantization is not None and arch.quantization is None:
        arch = _with_quantization(arch, quantization)
    if kv_cache_dtype is not None and kv_cache_dtype != "auto":
        arch = replace(arch, kv_bytes=bytes_of_dtype(kv_cache_dtype, key="kv_cache_dtype"))
    return arch


def _with_dtype(arch: ModelArchitecture, dtype: str) -> ModelArchitecture:
    """Change the data type of all matrices in the model's own data type."""
    new, old = bytes_of_dtype(dtype, key="dtype"), arch.dtype_bytes
    # Sizes that differ from the old data type's are quantized ones, and stay.
    quantized = arch.quantization is not None
    sizes = (arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes, arch.kv_bytes)
    attention, ffn, expert, kv = (new if size == old or not quantized else size for size in sizes)
    return replace(
        arch,
        dtype=dtype,
        dtype_bytes=new,
        attention_weight_bytes=attention,
        ffn_weight_bytes=ffn,
        expert_weight_bytes=expert,
        kv_bytes=kv,
    )


def _with_quantization(arch: ModelArchitecture, method: str) -> ModelArchitecture:
    """Shrink the weights of a model that the server quantizes as it loads it."""
    size = _QUANTIZED_BYTES.get(method)
    if size is None:
        note = f"weights in the model's data type assumed: quantization {excerpt(method)} is not known"
        return replace(arch, quantization=method, assumed=(*arch.assumed, note))
    if method in _EXPERT_ONLY_METHODS:
        return replace(arch, quantization=method, expert_weight_bytes=size)
    return replace(
        arch,
        quantization=method,
        attention_weight_bytes=size,
        ffn_weight_bytes=size,
        expert_weight_bytes=size,
        fp8_compute=method in _FP8_COMPUTE_METHODS,
    )
