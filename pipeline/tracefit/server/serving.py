"""A model as one server holds it: divided over ranks, in the data types its options ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.server.documents import excerpt
from tracefit.server.quantization import (
    EXPERT_ONLY_METHODS,
    FP8_COMPUTE_METHODS,
    QUANTIZED_WEIGHT_BYTES,
    bytes_of_dtype,
)

if TYPE_CHECKING:
    from tracefit.server.architecture import ModelArchitecture


def check_parallelism(arch: ModelArchitecture, tp: int) -> None:
    """Refuse a tensor-parallel size the model's heads cannot be divided by.

    Args:
        arch: The model.
        tp: Tensor-parallel ranks.

    Raises:
        UsageError: `tp` is not positive, does not divide the heads, or neither divides the KV heads nor is
            a multiple of them.
    """
    if tp < 1:
        raise UsageError(f"tensor_parallel must be at least 1, not {tp}")
    if arch.heads % tp:
        raise UsageError(
            f"{arch.heads} attention heads cannot be divided over {tp} tensor-parallel ranks",
            where=arch.name,
            hint="check tensor_parallel and the model's config.json",
        )
    if arch.latent is None and arch.kv_heads % tp and tp % arch.kv_heads:
        raise UsageError(
            f"{arch.kv_heads} KV heads can be neither divided over nor repeated on {tp} tensor-parallel ranks",
            where=arch.name,
            hint="check tensor_parallel and the model's config.json",
        )


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
        if arch.dtype in {"float32", "float"}:
            arch = _with_dtype(arch, "bfloat16")
            note = "dtype bfloat16 assumed: float32 checkpoints are served in 16 bits"
            arch = replace(arch, assumed=(*arch.assumed, note))
    elif dtype is not None:
        stated = tuple(note for note in arch.assumed if not note.startswith("dtype "))
        arch = replace(_with_dtype(arch, dtype), assumed=stated)
    if quantization is not None and arch.quantization is None:
        arch = _with_quantization(arch, quantization)
    if kv_cache_dtype not in {None, "auto"} and kv_cache_dtype is not None:
        arch = replace(arch, kv_bytes=bytes_of_dtype(kv_cache_dtype, key="kv_cache_dtype"))
    return arch


def _with_dtype(arch: ModelArchitecture, dtype: str) -> ModelArchitecture:
    """Change the data type of all matrices in the model's own data type."""
    new, old = bytes_of_dtype(dtype, key="dtype"), arch.dtype_bytes
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
    size = QUANTIZED_WEIGHT_BYTES.get(method)
    if size is None:
        note = f"weights in the model's data type assumed: quantization {excerpt(method)} is not known"
        return replace(arch, quantization=method, assumed=(*arch.assumed, note))
    if method in EXPERT_ONLY_METHODS:
        return replace(arch, quantization=method, expert_weight_bytes=size)
    return replace(
        arch,
        quantization=method,
        attention_weight_bytes=size,
        ffn_weight_bytes=size,
        expert_weight_bytes=size,
        fp8_compute=method in FP8_COMPUTE_METHODS,
    )
