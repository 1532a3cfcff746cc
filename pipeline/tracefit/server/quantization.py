"""How many bytes a number takes: data types, and the quantization methods that shrink weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "float": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_ds_mla": 1.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
}
"""Bytes per element of the data types a config or vLLM's `--dtype` and `--kv-cache-dtype` name."""

QUANTIZED_WEIGHT_BYTES: Mapping[str, float] = {
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

FP8_COMPUTE_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"})
"""Methods whose matrix products run in fp8; the others only store weights smaller."""

EXPERT_ONLY_METHODS = frozenset({"mxfp4", "experts_int8"})
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
