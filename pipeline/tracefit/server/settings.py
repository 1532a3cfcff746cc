"""A server's settings as far as latency depends on them, each with where it comes from.

What files and command lines say is read by `settings_sources`; here is what a setting is called, what it may
be, and how the ones of a file, a command line and the user are put together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from tracefit.errors import UsageError
from tracefit.server.documents import (
    Scalar,
    checked_flag,
    checked_integer,
    checked_number,
    checked_text,
    excerpt,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["given", "read", "assumed"]
"""given: by the user for this call. read: in the run's own files. assumed: vLLM's default."""

_Kind: TypeAlias = Literal["text", "count", "share", "rate", "flag"]

_MOST_RANKS = 65_536
_MOST_COUNT = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server; None is a value nobody stated.

    Attributes:
        model: Model name or path.
        gpu: GPU name.
        tensor_parallel: Ranks a layer is divided over.
        pipeline_parallel: Stages the layers are divided over.
        data_parallel: Replicas of the engine behind one API.
        enable_expert_parallel: Experts are spread over ranks instead of divided.
        max_model_len: Longest context, in tokens.
        max_num_batched_tokens: Token budget of one step.
        max_num_seqs: Most requests in one step.
        gpu_memory_utilization: Share of GPU memory the server may use, above 0 and at most 1.
        enable_chunked_prefill: Prompts may be computed in parts.
        enable_prefix_caching: KV blocks of equal prefixes are shared.
        enforce_eager: No CUDA graphs.
        block_size: Tokens per KV block.
        num_gpu_blocks: KV blocks.
        dtype: Data type of the model as served.
        quantization: Quantization method as served.
        kv_cache_dtype: Data type of the KV cache.
        async_scheduling: A step is scheduled while the one before it runs.
        journey_tracing_sample_rate: Share of requests traced, 0 to 1.
        step_tracing_sample_rate: Share of steps traced, 0 to 1.
        step_tracing_rich_subsample_rate: Share of traced steps with request snapshots, 0 to 1.
        sources: Where each value that is not None comes from, by field name.
        other: Settings of the same files that have no field here, nested ones as JSON text.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    enable_expert_parallel: bool | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    async_scheduling: bool | None = None
    journey_tracing_sample_rate: float | None = None
    step_tracing_sample_rate: float | None = None
    step_tracing_rich_subsample_rate: float | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)
    other: Mapping[str, Scalar] = field(default_factory=dict)

    def values(self) -> dict[str, Scalar]:
        """Return the settings that are known, by field name, in a fixed order."""
        every = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in every.items() if value is not None}

    def knobs(self) -> dict[str, Scalar]:
        """Return the known settings that tell scopes apart beyond model, GPU and tensor parallelism.

        The order is fixed, so that the mapping can be hashed as it is. Sampling rates are left out: they
        change what is seen, not what the server does.
        """
        return {name: value for name, value in self.values().items() if name in _KNOBS}


_KINDS: Mapping[str, _Kind] = {
    "model": "text",
    "gpu": "text",
    "tensor_parallel": "count",
    "pipeline_parallel": "count",
    "data_parallel": "count",
    "enable_expert_parallel": "flag",
    "max_model_len": "count",
    "max_num_batched_tokens": "count",
    "max_num_seqs": "count",
    "gpu_memory_utilization": "share",
    "enable_chunked_prefill": "flag",
    "enable_prefix_caching": "flag",
    "enforce_eager": "flag",
    "block_size": "count",
    "num_gpu_blocks": "count",
    "dtype": "text",
    "quantization": "text",
    "kv_cache_dtype": "text",
    "async_scheduling": "flag",
    "journey_tracing_sample_rate": "rate",
    "step_tracing_sample_rate": "rate",
    "step_tracing_rich_subsample_rate": "rate",
}

SETTINGS: tuple[str, ...] = tuple(item.name for item in fields(ServerSettings) if item.name in _KINDS)
"""Names of the settings, in the order they are written."""

FLAGS: frozenset[str] = frozenset(name for name, kind in _KINDS.items() if kind == "flag")
"""Settings that are true or false."""

TEXTS: frozenset[str] = frozenset(name for name, kind in _KINDS.items() if kind == "text")
"""Settings that are text."""

_RANKS = frozenset({"tensor_parallel", "pipeline_parallel", "data_parallel"})
_KNOBS = frozenset(SETTINGS) - {
    "model",
    "gpu",
    "tensor_parallel",
    "journey_tracing_sample_rate",
    "step_tracing_sample_rate",
    "step_tracing_rich_subsample_rate",
}

ALIASES: Mapping[str, str] = {
    "model_id": "model",
    "model_name": "model",
    "model_tag": "model",
    "gpu_type": "gpu",
    "gpu_name": "gpu",
    "accelerator": "gpu",
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tensor_parallelism": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "pp": "pipeline_parallel",
    "pp_size": "pipeline_parallel",
    "pipeline_parallelism": "pipeline_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "dp": "data_parallel",
    "dp_size": "data_parallel",
    "data_parallelism": "data_parallel",
    "data_parallel_size": "data_parallel",
    "expert_parallel": "enable_expert_parallel",
    "ep": "enable_expert_parallel",
    "max_seq_len": "max_model_len",
    "chunked_prefill": "enable_chunked_prefill",
    "prefix_caching": "enable_prefix_caching",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "q": "quantization",
}
"""Other spellings of settings, dashes already turned into underscores."""

DEFAULTS: Mapping[str, Scalar] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "data_parallel": 1,
    "gpu_memory_utilization": 0.9,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "block_size": 16,
    "kv_cache_dtype": "auto",
}
"""Defaults of vLLM's engine v1 that hold on every platform; the others depend on hardware and version."""


def canonical_name(key: str) -> str:
    """Return the name of a setting for any of its spellings; an unknown key with underscores for dashes."""
    name = key.strip().lower().lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def _checked(name: str, value: object, *, key: str, where: str) -> Scalar:
    kind = _KINDS[name]
    if kind == "count":
        most = _MOST_RANKS if name in _RANKS else _MOST_COUNT
        return checked_integer(value, key=key, where=where, most=most)
    if kind == "flag":
        return checked_flag(value, key=key, where=where)
    if kind == "text":
        return checked_text(value, key=key, where=where)
    if kind == "share":
        return checked_number(value, key=key, where=where, above=0.0, most=1.0)
    return checked_number(value, key=key, where=where, most=1.0)


def settings_from(values: Mapping[str, object], *, where: str, source: Source = "given") -> ServerSettings:
    """Make settings of named values, under any spelling.

    Args:
        values: Names to values; None is unset; names nobody knows go to `other`.
        where: File or option they come from, for errors.
        source: Where they count as coming from.

    Raises:
        UsageError: A value that its setting cannot have, or two spellings that contradict each other.
    """
    known: dict[str, Scalar] = {}
    spelled: dict[str, str] = {}
    other: dict[str, Scalar] = {}
    for key, value in values.items():
        name = canonical_name(key)
        if value is None:
            continue
        if name not in _KINDS:
            other[name] = _scalar(value)
            continue
        checked = _checked(name, value, key=key, where=where)
        if known.setdefault(name, checked) != checked:
            raise UsageError(
                f"{spelled[name]} {excerpt(known[name])} and {key} {excerpt(checked)} contradict", where=where
            )
        spelled.setdefault(name, key)
    return _build(known, dict.fromkeys(known, source), other)


def _scalar(value: object) -> Scalar:
    """Keep an unknown value as it is, or as JSON text if it is nested."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str, skipkeys=True)


def _build(
    values: Mapping[str, Scalar], sources: Mapping[str, Source], other: Mapping[str, Scalar]
) -> ServerSettings:
    """Build settings of values that are checked already, in the fields' own order."""
    ordered: dict[str, Source] = {name: sources[name] for name in SETTINGS if name in values}
    bare = ServerSettings(sources=ordered, other=dict(other))
    # A mapping of checked values is beyond what the type of `replace` can express.
    return replace(bare, **values)  # type: ignore[arg-type]


def merge(base: ServerSettings, overrides: ServerSettings) -> ServerSettings:
    """Return settings in which `overrides` wins wherever it states a value.

    Args:
        base: What the run's files say.
        overrides: What was given for this call; its values keep their own sources.
    """
    return _build(
        {**base.values(), **overrides.values()},
        {**base.sources, **overrides.sources},
        {**base.other, **overrides.other},
    )


def assume_defaults(settings: ServerSettings) -> ServerSettings:
    """Fill in what vLLM does when nothing is said (`DEFAULTS`), each value marked as assumed."""
    assumed = settings_from(DEFAULTS, where="vLLM's defaults", source="assumed")
    return merge(assumed, settings)
