"""Read a model's configuration into a `ModelArchitecture`: any decoder, quantized or not, by its keys.

Experts, grouped heads, latent attention, windows, states and what each layer has of them are recognised by their keys
(`model_layers`). A value that the config does not state is either refused (one line that names the key) or, where its
family or vLLM defines it, filled in and listed in `ModelArchitecture.assumed`, together with the assumptions about an
unknown family. `as_served` applies the options by which a server overrides the config: data types, and quantization,
which makes weights smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tracefit.errors import UsageError
from tracefit.server.architecture import ModelArchitecture
from tracefit.server.documents import TEXT, excerpt, parse_json_object, validated
from tracefit.server.model_keys import (
    DTYPE,
    HIDDEN,
    LEARNED_POSITIONS,
    MOST_MATRIX_ROWS,
    MOST_WIDTH,
    POSITIONS,
    TIED,
    UNGATED,
    VOCABULARY,
    UnknownModelError,
    open_config,
)
from tracefit.server.model_layers import layer_count, read_layers
from tracefit.server.quantization import QUANTIZED_BYTES, bytes_of_dtype, quantization_of, quantized

if TYPE_CHECKING:
    from tracefit.server.documents import Document
    from tracefit.server.model_keys import Config
    from tracefit.server.quantization import Weights

__all__ = ["UnknownModelError", "as_served", "parse_architecture"]


def parse_architecture(text: bytes | str, *, where: str, name: str | None = None) -> ModelArchitecture:
    """Parse the content of a Hugging Face `config.json`, or of Mistral's `params.json`.

    Without a `name` it is the config's `_name_or_path`.

    Returns:
        The architecture, with every assumption listed in `assumed`.

    Raises:
        UnknownModelError: A key is missing, layers are of an unsupported kind, or a value is impossible.
        UsageError: The content is not a JSON object.
    """
    document = parse_json_object(text, where=where)
    try:
        return _architecture(document, where=where, name=name)
    except UnknownModelError:
        raise
    except UsageError as error:
        # A value of another type than the key has.
        raise UnknownModelError(error.what, where=error.where, hint=error.hint) from None


def _architecture(document: Document, *, where: str, name: str | None) -> ModelArchitecture:
    config = open_config(document, where=where)
    count = layer_count(config)
    hidden = config.required(*HIDDEN, most=MOST_WIDTH)
    dtype = _dtype(config)
    size = bytes_of_dtype(dtype, key="torch_dtype", where=where)
    name = _name(config, name, f"{config.model_type}-{count}x{hidden}")
    stack = read_layers(config, hidden)
    positions = LEARNED_POSITIONS.get(config.family)
    sizes: Weights = {
        "attention_weight_bytes": size,
        "state_weight_bytes": size,
        "ffn_weight_bytes": size,
        "shared_weight_bytes": size,
        "expert_weight_bytes": size,
        "head_weight_bytes": size,
        "kv_bytes": size,
        **quantization_of(config, stack.layers, size),
    }
    return ModelArchitecture(
        name=name,
        model_type=config.model_type,
        hidden=hidden,
        stack=stack.layers,
        ffn=stack.ffn,
        gated_ffn=config.family not in UNGATED,
        vocabulary=config.required(*VOCABULARY, most=MOST_MATRIX_ROWS),
        tied_embeddings=_tied(config),
        learned_positions=0 if positions is None else config.required(*POSITIONS, most=MOST_MATRIX_ROWS) + positions,
        lookups=stack.lookups,
        dtype=dtype,
        dtype_bytes=size,
        state_bytes=_state_bytes(config, size),
        **sizes,
        assumed=tuple(config.assumed),
    )


def _name(config: Config, name: str | None, fallback: str) -> str:
    if name:
        return name
    value = config.get("_name_or_path")
    if isinstance(value, str) and value.strip():
        return validated(TEXT, value, key="_name_or_path", where=config.where)
    config.assumed.append(f"name {fallback} made up: the config has none")
    return fallback


def _tied(config: Config) -> bool:
    stated, default = config.flag("tie_word_embeddings"), config.family in TIED
    if stated is None:
        config.assumed.append(f"tie_word_embeddings {str(default).lower()} assumed: default of the family")
    return default if stated is None else stated


def _dtype(config: Config) -> str:
    stated = config.find(*DTYPE)
    # vLLM's choice if no type is stated.
    if stated is None or stated[1] == "auto":
        config.assumed.append("dtype bfloat16 assumed: torch_dtype is absent")
        return "bfloat16"
    return validated(TEXT, stated[1], key=stated[0], where=config.where).removeprefix("torch.")


def _state_bytes(config: Config, dtype_bytes: float) -> float:
    """Return the bytes per element of a recurrent state: the type that the config names for it, or the model's."""
    stated = config.find("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if stated is None:
        return dtype_bytes
    named = validated(TEXT, stated[1], key=stated[0], where=config.where).removeprefix("torch.")
    return bytes_of_dtype(named, key=stated[0], where=config.where)


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
        size = QUANTIZED_BYTES.get(quantization)
        if size is None:
            unknown = f"quantization {excerpt(quantization)} is not known"
            assumed.append(f"weights in the model's data type assumed: {unknown}")
        arch = replace(arch, **quantized(quantization, size))
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
        state_weight_bytes=changed(arch.state_weight_bytes),
        ffn_weight_bytes=changed(arch.ffn_weight_bytes),
        shared_weight_bytes=changed(arch.shared_weight_bytes),
        expert_weight_bytes=changed(arch.expert_weight_bytes),
        head_weight_bytes=changed(arch.head_weight_bytes),
        kv_bytes=changed(arch.kv_bytes),
    )
