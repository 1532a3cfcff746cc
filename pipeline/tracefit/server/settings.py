"""Settings of a vLLM server that latency depends on: their names, valid values, and sources.

Settings come from run descriptions (YAML or JSON), `vllm serve` command lines, the server's log and the
user. A value keeps its source. Names without a field are kept in `other`, because they still identify the
run. The last section has the flags that turn on traces, for messages.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from itertools import dropwhile
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from tracefit.errors import UsageError
from tracefit.inputs.rejects import is_name
from tracefit.options import ServerOptions, named
from tracefit.server.documents import (
    FiniteNumber,
    Scalar,
    Text,
    WholeNumber,
    as_text,
    excerpt,
    kind_of,
    parse_json_object,
    parse_yaml_objects,
    read_bytes,
    validated,
)
from tracefit.server.server_log import ServerStart, starts_of
from tracefit.text import plural, unread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tracefit.server.documents import Document


SettingSource = Literal["given", "read", "measured", "assumed"]
"""given: by the user for this call. read: in the files of the run. measured: by the server as it started. assumed:
vLLM's default."""

# Bounds are far above real settings: a larger value has a wrong unit or is damaged.
Ranks = Annotated[WholeNumber, Field(ge=1, le=65_536)] | None
OptionalCount = Annotated[WholeNumber, Field(ge=1, le=2**40)] | None
Share = Annotated[FiniteNumber, Field(gt=0, le=1)] | None
Rate = Annotated[FiniteNumber, Field(ge=0, le=1)] | None
Flag: TypeAlias = bool | None
OptionalText = Text | None


class ServerSettings(BaseModel):
    """Settings of one server; None is a value that was not stated.

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
        unread: A sentence for each file that states something, but no setting; with the keys it has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: OptionalText = None
    gpu: OptionalText = None
    tensor_parallel: Ranks = None
    pipeline_parallel: Ranks = None
    data_parallel: Ranks = None
    enable_expert_parallel: Flag = None
    max_model_len: OptionalCount = None
    max_num_batched_tokens: OptionalCount = None
    max_num_seqs: OptionalCount = None
    gpu_memory_utilization: Share = None
    enable_chunked_prefill: Flag = None
    enable_prefix_caching: Flag = None
    enforce_eager: Flag = None
    block_size: OptionalCount = None
    num_gpu_blocks: OptionalCount = None
    dtype: OptionalText = None
    quantization: OptionalText = None
    kv_cache_dtype: OptionalText = None
    async_scheduling: Flag = None
    journey_tracing_sample_rate: Rate = None
    step_tracing_sample_rate: Rate = None
    step_tracing_rich_subsample_rate: Rate = None
    sources: Mapping[str, SettingSource] = {}
    other: Mapping[str, Scalar] = {}
    unread: tuple[str, ...] = ()

    def values(self) -> dict[str, Scalar]:
        """Return the stated settings, by field name, in a fixed order."""
        return {name: value for name in SETTING_NAMES if (value := getattr(self, name)) is not None}

    @property
    def is_sglang(self) -> bool:
        """Whether the run's files name SGLang as the engine, by its version or by a key such as `backend`."""
        return any(
            key.startswith("sglang") or (key in _ENGINE_KEYS and "sglang" in str(value).lower())
            for key, value in self.other.items()
        )

    @property
    def has_adapters(self) -> bool:
        """Whether the run's files name LoRA adapters, by a key such as `enable_lora` that is not false."""
        return any(
            "lora" in key and str(value).lower() not in {"false", "none", "null", "0", ""}
            for key, value in self.other.items()
        )

    def knobs(self) -> dict[str, Scalar]:
        """Return the stated settings that distinguish deployments, beyond model, GPU and tensor parallelism.

        Measured values are left out: they differ a little from start to start, and nobody chose them. The order is
        fixed, so that the mapping can be hashed.
        """
        measured = self.measured()
        return {n: value for n, value in self.values().items() if n in _KNOBS and n not in measured}

    def measured(self) -> dict[str, Scalar]:
        """Return the values that the server measured as it started, by field name."""
        return {n: value for n, value in self.values().items() if self.sources.get(n) == "measured"}


SETTING_NAMES: tuple[str, ...] = tuple(
    n for n in ServerSettings.model_fields if n not in {"sources", "other", "unread"}
)
"""Names of the settings, in the order they are written."""

SERVER_FLAGS = frozenset(name for name in SETTING_NAMES if ServerSettings.model_fields[name].annotation == Flag)
"""Settings that are true or false."""

_COUNT_SETTINGS = frozenset(
    name for name in SETTING_NAMES if ServerSettings.model_fields[name].annotation == OptionalCount
)

TEXTS = frozenset(name for name in SETTING_NAMES if ServerSettings.model_fields[name].annotation == OptionalText)
"""Settings that are text."""

_ENGINE_KEYS = frozenset({"engine", "backend", "framework", "server"})

# A deployment id names model, GPU and ranks in words; sampling rates change the trace, not the server.
_KNOBS = frozenset(SETTING_NAMES) - {
    "model",
    "gpu",
    "tensor_parallel",
    "journey_tracing_sample_rate",
    "step_tracing_sample_rate",
    "step_tracing_rich_subsample_rate",
}

# Short forms of vLLM's options (-tp, -q), and the keys of run descriptions in use.
ALIASES: Mapping[str, str] = {
    "model_id": "model",
    "model_name": "model",
    "model_tag": "model",
    "model_url": "model",
    "gpu_type": "gpu",
    "gpu_name": "gpu",
    "accelerator": "gpu",
    "accelerator_type": "gpu",
    "device_name": "gpu",
    **{
        alias: f"{kind}_parallel"
        for kind in ("tensor", "pipeline", "data")
        for alias in (f"{kind[0]}p", f"{kind[0]}p_size", f"{kind}_parallelism", f"{kind}_parallel_size")
    },
    "expert_parallel": "enable_expert_parallel",
    "ep": "enable_expert_parallel",
    "max_seq_len": "max_model_len",
    "chunked_prefill": "enable_chunked_prefill",
    "prefix_caching": "enable_prefix_caching",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "q": "quantization",
    # Labels of the nodes that a manifest selects.
    "cloud.google.com/gke_accelerator": "gpu",
    "nvidia.com/gpu.product": "gpu",
}
"""Other spellings of settings, dashes already turned into underscores."""

DEFAULT_BLOCK_SIZE = 16
"""vLLM's default of tokens per KV block on GPUs."""

SETTING_DEFAULTS: Mapping[str, Scalar] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "data_parallel": 1,
    "gpu_memory_utilization": 0.9,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "block_size": DEFAULT_BLOCK_SIZE,
    "kv_cache_dtype": "auto",
}
"""Defaults of vLLM's engine v1 that hold on every platform; the others depend on hardware and version."""


_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def canonical_name(key: str) -> str:
    """Return the name of a setting for any of its spellings; an unknown key with underscores for dashes."""
    name = key.strip().lstrip("-").replace("-", "_")
    divided = _HUMP.sub("_", name).lower()  # tensorParallelSize
    divided = ALIASES.get(divided, divided)
    return divided if divided in SETTING_NAMES else ALIASES.get(name.lower(), name.lower())


def settings_from(
    values: Mapping[str, object] | Iterable[tuple[str, object]],
    *,
    where: str,
    source: SettingSource = "given",
) -> ServerSettings:
    """Make settings of named values, under any spelling.

    Args:
        values: Names to values, or pairs of them; None is unset; names without a field go to `other`.
        where: File or option they come from, for errors.
        source: The source to record for them.

    Raises:
        UsageError: A value is not allowed for its setting, or two statements of a setting contradict each other.
    """
    stated: dict[str, object] = {}
    spelled: dict[str, str] = {}
    other: dict[str, Scalar] = {}
    for key, value in values.items() if isinstance(values, Mapping) else values:
        name = canonical_name(key)
        if value is None:
            continue
        if name not in SETTING_NAMES:
            other[name] = _scalar(value)
        elif name not in stated:
            stated[name], spelled[name] = value, key
        # Stated twice with one value is common: model and model_tag of a logged command, a file and its nested section.
        elif stated[name] != value:
            first, second = excerpt(stated[name]), excerpt(value)
            raise UsageError(f"{spelled[name]} {first} and {key} {second} contradict", where=where)
    # In the order of the fields, so that files that state the same in another order have the same hash.
    sources = {name: source for name in SETTING_NAMES if name in stated}
    document = {**stated, "sources": sources, "other": other}
    return validated(ServerSettings, document, where=where, spellings=spelled)


def _scalar(value: object) -> Scalar:
    """Keep an unknown value as it is, or as JSON text if it is nested."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str, skipkeys=True)


def merge(base: ServerSettings, overrides: ServerSettings) -> ServerSettings:
    """Return settings in which `overrides` wins wherever it states a value.

    Values keep their sources.
    """
    sources = {**base.sources, **overrides.sources}
    changes = {
        **overrides.values(),
        "sources": {name: sources[name] for name in SETTING_NAMES if name in sources},
        "other": {**base.other, **overrides.other},
        "unread": (*base.unread, *overrides.unread),
    }
    return base.model_copy(update=changes)


def assume_defaults(settings: ServerSettings) -> ServerSettings:
    """Fill in vLLM's defaults (`SETTING_DEFAULTS`) for missing settings, each value marked as assumed."""
    return merge(settings_from(SETTING_DEFAULTS, where="vLLM's defaults", source="assumed"), settings)


def settings_to_json(settings: ServerSettings) -> str:
    """Write settings as JSON: each value with its source, and the rest under `other`."""
    stated = {n: {"value": v, "source": settings.sources[n]} for n, v in settings.values().items()}
    return json.dumps({"settings": stated, "other": dict(settings.other)})


def settings_from_json(text: str, *, where: str) -> ServerSettings:
    """Restore settings that `settings_to_json` wrote.

    Raises:
        UsageError: The text is not of that form.
    """
    try:
        document: Any = parse_json_object(text, where=where)
        stated = document["settings"]
        values = {name: entry["value"] for name, entry in stated.items()}
        sources = {name: entry["source"] for name, entry in stated.items()}
        other = dict(document["other"])
    except (UsageError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("settings column is damaged", where=where, hint="ingest the run again") from error
    return validated(ServerSettings, {**values, "sources": sources, "other": other}, where=where)


# -- files -----------------------------------------------------------------------------------------------

_MAX_BYTES = 1024 * 1024
_MAX_LOG_BYTES = 64 * 1024 * 1024  # the log of a server that ran for days
_MAX_COMMAND_CHARS = 64 * 1024
# Sections that only group settings.
_NESTED_SECTIONS = {
    "vllm",
    "server",
    "args",
    "engine_args",
    "engine_kwargs",
    "vllm_args",
    "kv_cache",
    "hardware",
}
_MAX_NESTED = 4
# vLLM reads counts this way: lower case is decimal, upper case binary.
_UNIT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})([kmgKMG]?)", re.ASCII)
_SGLANG_MODULE = "sglang.launch_server"
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", _SGLANG_MODULE)
_OF_SGLANG = {
    "model_path": "model",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "page_size": "block_size",
}
"""Options of SGLang that have another name in vLLM."""
_SGLANG_SWITCHES = {
    "disable_radix_cache": ("enable_prefix_caching", False),
    "disable_cuda_graph": ("enforce_eager", True),
    "disable_overlap_schedule": ("async_scheduling", False),
}
_OTHER_PROGRAMS = {
    "sh",
    "bash",
    "dash",
    "zsh",
    "env",
    "python",
    "python3",
    "ray",
    "sleep",
    "tail",
    "torchrun",
}
"""Programs that a container with the server's image may start instead of the server."""
_IMAGE = "vllm/vllm-openai"  # its entry point is the server: the rest are the server's arguments
_COMMAND_ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>", "&>"}  # of a command in a shell script
# The server's switches without value; for an option that is not listed, the next word is its value.
_SWITCHES = SERVER_FLAGS | {
    "trust_remote_code",
    "disable_log_requests",
    "disable_log_stats",
    "enable_journey_tracing",
}


def read_settings(path: Path) -> ServerSettings:
    """Read settings from a file, by its kind.

    `.yaml`, `.yml` and `.json` are run descriptions; any other file is searched for the line in which vLLM
    logs its arguments, then for a `vllm serve` command line.

    Raises:
        UsageError: The file cannot be read, or holds no settings or wrong ones.
    """
    where = str(path)
    suffix = path.suffix.lower()
    if suffix in {".json", ".yaml", ".yml"}:
        content = read_bytes(path, limit_bytes=_MAX_BYTES)
        return parse_settings(content, where=where, is_json=suffix == ".json")
    # A log can hold stray bytes; they do not make the arguments unreadable.
    text = read_bytes(path, limit_bytes=_MAX_LOG_BYTES).decode("utf-8", errors="replace")
    if starts := starts_of(text.splitlines()):
        # A log can hold several starts: the last one counts.
        blocks = {"num_gpu_blocks": starts[-1].cache_blocks}
        return merge(settings_from(blocks, where=where, source="measured"), logged_settings(starts[-1], where=where))
    return parse_serve_command(text, where=where)


def logged_settings(start: ServerStart, *, where: str) -> ServerSettings:
    """Return what a server's log states. Its other arguments may be secrets, such as a key of the API, and are not
    kept.

    Raises:
        UsageError: A value is not allowed for its setting.
    """
    known = {
        name: value
        for name, value in start.stated.items()
        if canonical_name(name) in SETTING_NAMES
        or name in _KEPT_ARGUMENTS
        or (name.startswith(SPECULATION) and value is not None)
    }
    return settings_from(known, where=where, source="read")


_KEPT_ARGUMENTS = frozenset({"enable_lora", "served_model_name"})
"""Arguments of a logged server that are kept beside the settings: the names of its models."""

SPECULATION = ("speculative", "num_speculative")
"""How arguments about speculative decoding begin: a step then computes several tokens of a request."""


def read_all_settings(paths: Iterable[Path]) -> ServerSettings:
    """Read and merge several descriptions of one run.

    Raises:
        UsageError: One cannot be read, or two contradict.
    """
    merged = ServerSettings()
    stated: dict[str, tuple[Scalar, Path]] = {}
    for path in paths:
        more = read_settings(path)
        for name, value in {**more.values(), **more.other}.items():
            first, where = stated.setdefault(name, (value, path))
            if first != value and not name.startswith(_UNRESOLVED):
                raise UsageError(
                    f"{name} {excerpt(value)} contradicts {excerpt(first)} in {where.name}",
                    where=str(path),
                    hint=f"keep one of the two files, or name one with {named(ServerOptions, 'run_config')}",
                )
        merged = merge(merged, more)
    return merged


def parse_settings(content: bytes | str, *, where: str, is_json: bool = False) -> ServerSettings:
    """Read a run description: `exp-config.yaml`, `run.yaml`, or a vLLM `--config` file.

    Keys are vLLM's option names or the shorter ones of run descriptions, with dashes or underscores, at the top
    or under `vllm:`, `server:` or `args:`; `args` may also be a list or a line of options. A file without them may be
    what starts the server, such as a manifest, a compose file or the values of a chart: see `_deployed`. Of several
    YAML documents, as of a Deployment and its Service, those that state settings count. Where one starts servers for
    prefill and others for decode, the name of the file or of its folder says which are meant, or else only what both
    have counts.

    Raises:
        UsageError: The file is not a run description, or a value is not allowed for its setting.
    """
    documents = [parse_json_object(content, where=where)] if is_json else parse_yaml_objects(content, where=where)
    of_roles = (_of_roles(each, where=where) for each in documents if not _is_description(each))
    settings = next((each for each in of_roles if each is not None), None)
    document = documents[0] if documents else {}
    if settings is None:
        found = [pair for each in documents for pair in _of_server(each, where=where)]
        if not found and len(documents) > 1:
            raise UsageError(
                "holds several YAML documents, and no arguments of vLLM in any",
                where=where,
                hint="give one file per run",
            )
        settings = settings_from(found or _stated(document, where=where), where=where, source="read")
    settings = _with_doubts(_with_sampler(settings, as_text(content, where=where), where=where), where=where)
    if settings.values() or not document:
        return settings
    keys = unread(plural(len(document), "key"), "of them a setting", list(filter(is_name, document)))
    return settings.model_copy(update={"unread": (f"{where}: {keys}",)})


_SAMPLER = re.compile(
    r"""OTEL_TRACES_SAMPLER(_ARG)?\b["']?[\s,]{0,80}(?:[=:]|["']?value["']?\s{0,8}:)\s{0,8}["']?([\w.]{1,40})"""
)
"""A sampler of the OpenTelemetry SDK in the environment of a server, as a shell, a compose file or a manifest writes
it."""


def traced_share(text: str) -> float | None:
    """Return the share of requests that a sampler in a server's environment lets through; null where the text sets
    none.
    """
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = dict(_SAMPLER.findall(lines))
    sampler = found.get("", "").lower().removeprefix("parentbased_")
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return None
    try:
        share = float(found.get("_ARG", "1"))
    except ValueError:
        return None
    return share if 0 <= share <= 1 else None


def _with_sampler(settings: ServerSettings, text: str, *, where: str) -> ServerSettings:
    """Add the share of traced requests that a sampler leaves, unless a setting states it."""
    share = traced_share(text) if "OTEL_TRACES_SAMPLER" in text else None
    return merge(settings_from({"journey_tracing_sample_rate": share}, where=where, source="read"), settings)


def _of_server(document: Document, *, where: str) -> list[tuple[str, object]]:
    """Return the settings of a document that describes a run or starts a server; empty for any other."""
    if _is_description(document):
        return list(_stated(document, where=where))
    return _deployed(document, where=where)


def _is_description(part: Mapping[str, object], depth: int = 0) -> bool:
    """Return whether a mapping, or one of those that only group settings, states a setting of vLLM's."""
    for key, value in part.items():
        name = canonical_name(str(key))
        if name in _NESTED_SECTIONS:
            is_list = isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("-"))
            is_group = isinstance(value, Mapping) and depth < _MAX_NESTED and _is_description(value, depth + 1)
            if is_list or is_group:
                return True
        elif name in _OF_VLLM and isinstance(value, str | int | float):
            return True
    return False


def _stated(part: Document, *, where: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the settings of a mapping and of nested mappings that only group settings."""
    for key, value in part.items():
        name = canonical_name(str(key))
        if name in _NESTED_SECTIONS and isinstance(value, Mapping) and depth < _MAX_NESTED:
            yield from _stated(value, where=where, depth=depth + 1)
        elif name in _NESTED_SECTIONS and isinstance(value, list):
            yield from _options([str(item) for item in value], where=where)
        elif name in _NESTED_SECTIONS and isinstance(value, str) and value.lstrip().startswith("-"):
            yield from _options(_split(value, where=where), where=where)
        elif name in SETTING_NAMES and isinstance(value, Mapping | list):
            raise UsageError(f"{key} must be a single value, not {kind_of(value)}", where=where)
        elif name in SETTING_NAMES and name not in TEXTS and isinstance(value, str):
            # vLLM takes its configuration file as options: `8k` and quoted numbers are read as on a command line.
            if _is_unresolved(value):
                yield _unresolved(name), value
            else:
                yield str(key), _literal(value)
        elif isinstance(value, bool) and name.startswith("no_") and canonical_name(name[3:]) in SERVER_FLAGS:
            yield canonical_name(name[3:]), not value
        else:
            yield str(key), value


# -- manifests -------------------------------------------------------------------------------------------

_OF_VLLM = frozenset(SETTING_NAMES) - {"model", "gpu", "dtype", "quantization"}
"""Settings whose names show that a mapping or a command is vLLM's; other programs have the names left out here."""

_WORDS_KEYS = ("entrypoint", "command", "cmd", "args", "extra_args")
"""Keys of a container's words, in the order in which they are its command line."""

_KSERVE_NAME = "model_name="
"""KServe's name of a model for its clients; the model itself is another argument."""


def _deployed(part: object, *, where: str, role: str | None = None) -> list[tuple[str, object]]:
    """Return the settings that what starts a server states: arguments of vLLM, or mappings of its options, at any
    depth.

    Manifests of Kubernetes and KServe, compose files, values of charts and configurations of Ray Serve have them under
    keys of their own. The name of a model or GPU in a mapping around them is theirs if they have none. Sections for
    servers of another role are left out.
    """
    if isinstance(part, list):
        return [pair for item in part for pair in _deployed(item, where=where, role=role)]
    if not isinstance(part, Mapping):
        return []
    within = [*_container_options(part, where=where), *_parallelism(part)]
    for value in _of_role(part, role):
        within += _deployed(value, where=where, role=role)
    own = list(_single(part))
    if any(canonical_name(key) in _OF_VLLM for key, _ in own):
        return own + within
    if not within:
        return []
    stated = {canonical_name(key) for key, _ in within}
    beside = [pair for value in part.values() if isinstance(value, Mapping) for pair in _single(value)]
    around = {canonical_name(key): (key, value) for key, value in (*beside, *own)}
    return within + [around[name] for name in ("model", "gpu") if name in around and name not in stated]


_ROLES = ("prefill", "decode")
_ROLE = re.compile(r"(?<![a-z])(prefill|decode)(?:er|r)?(?![a-z])")
_NOT_STARTED = (("create", False), ("enabled", False), ("replicas", 0))
"""Keys and values of a section whose servers are not started."""


def _role_in(name: object) -> str | None:
    """Return the role that a name has, such as `VllmPrefillWorker` or `decode-0`; null if it has none or both."""
    found = set(_ROLE.findall(_HUMP.sub("_", str(name)).lower()))
    return found.pop() if len(found) == 1 else None


def _sections(part: Mapping[Any, object]) -> dict[str, list[object]]:
    """Return the sections of servers that are started, by role; `` has those without."""
    found: dict[str, list[object]] = {"": [], **{role: [] for role in _ROLES}}
    for key, value in part.items():
        role = _role_in(key) if isinstance(value, Mapping | list) else None
        is_off = isinstance(value, Mapping) and any(
            value.get(name) is off or (off == 0 and value.get(name) == 0) for name, off in _NOT_STARTED
        )
        if not (role and is_off):
            found[role or ""].append(value)
    return found


def _of_role(part: Mapping[Any, object], role: str | None) -> list[object]:
    """Return the values of a mapping without those of servers that are not started, or have another role.

    KServe has a section for prefill beside the servers that decode.
    """
    found = _sections(part)
    if role is None:
        return [value for values in found.values() for value in values]
    is_kserve = role == "prefill" and bool(found["prefill"]) and not found["decode"]
    return found[role] if is_kserve else [*found[""], *(found[role] if role else ())]


def _of_roles(document: Document, *, where: str) -> ServerSettings | None:
    """Return the settings of servers that a document starts for prefill and for decode; null if it does not start both.

    The name of the file or of its folder may have the role that is meant; else what both have counts.
    """
    if not any(_role_in(key) for key in _keys(document)):
        return None
    pairs = {role: _deployed(document, where=where, role=role) for role in _ROLES}
    # The name of the model may be around both sections.
    around = [
        (key, value) for key, value in _deployed(document, where=where, role="") if canonical_name(key) in _STATED_APART
    ]
    first, second = (
        settings_from([*own, *_missing(around, own)] if own else [], where=where, source="read")
        for own in pairs.values()
    )
    if first.values() == second.values() or not (
        first.values().keys() - _STATED_APART and second.values().keys() - _STATED_APART
    ):
        return None
    *_, folder, file = ("", *where.replace("\\", "/").split("/"))
    if role := _role_in(file) or _role_in(folder):
        return first if role == _ROLES[0] else second
    ours, theirs = first.values(), second.values()
    differing = [n for n in SETTING_NAMES if ours.get(n) != theirs.get(n)]
    said = ", ".join(f"{n} {_said(ours.get(n))} and {_said(theirs.get(n))}" for n in differing)
    common = {n: value for n, value in ours.items() if n not in differing}
    common |= {n: value for n, value in first.other.items() if second.other.get(n) == value}
    doubt = (
        f"{where}: its servers for prefill and for decode differ ({said}), and these settings are taken as unknown: "
        f"state them with {named(ServerOptions, 'settings')}, or put prefill or decode into the name of the run's "
        "folder"
    )
    return settings_from(common, where=where, source="read").model_copy(update={"unread": (doubt,)})


_STATED_APART = frozenset({"model", "gpu"})


def _missing(around: list[tuple[str, object]], own: list[tuple[str, object]]) -> list[tuple[str, object]]:
    stated = {canonical_name(key) for key, _ in own}
    return [(key, value) for key, value in around if canonical_name(key) not in stated]


def _said(value: Scalar) -> str:
    return "none" if value is None else excerpt(value)


def _keys(part: object) -> Iterator[object]:
    """Yield the keys of all sections of a document."""
    if isinstance(part, list):
        for item in part:
            yield from _keys(item)
    elif isinstance(part, Mapping):
        for key, value in part.items():
            if isinstance(value, Mapping | list):
                yield key
                yield from _keys(value)


_DEGREES = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "data": "data_parallel"}
"""Keys of llm-d's `parallelism`."""


def _parallelism(part: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield what llm-d's values state beside the containers: `parallelism`, and the model as `modelArtifacts`."""
    degrees, artifacts = part.get("parallelism"), part.get("modelArtifacts")
    if isinstance(degrees, Mapping):
        for key, name in _DEGREES.items():
            if isinstance(degrees.get(key), int):
                yield name, degrees[key]
    if isinstance(artifacts, Mapping):
        uri = artifacts.get("uri")
        if isinstance(uri, str) and uri.startswith("hf://"):
            yield "model", uri.removeprefix("hf://")


def _single(part: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield the settings of a mapping itself, as far as their values can be of a setting."""
    for key, value in part.items():
        name = canonical_name(str(key))
        if name in SETTING_NAMES and isinstance(value, str if name in TEXTS else str | int | float):
            yield str(key), value if name in TEXTS else _literal(str(value))


def _container_options(part: Mapping[Any, object], *, where: str) -> list[tuple[str, object]]:
    """Return the settings that the words of a container state; empty if they are not the server's."""
    texts = {_HUMP.sub("_", str(key)).lower(): value for key, value in part.items()}
    variables = _environment(texts.get("env"))
    words: list[str] = []
    for key in _WORDS_KEYS:
        value = texts.get(key)
        if isinstance(value, str):
            with suppress(UsageError):  # of another program, whose shell may read it
                words += _split(value, where=where) if _served(value, where=where) is None else [value]
        elif isinstance(value, list):
            words += [_resolved(str(i), variables) for i in value if isinstance(i, str | int | float)]
    scripts = [_served(word, where=where) for word in words if len(word.split()) > 1]
    served = next((found for found in scripts if found is not None), None)
    if served is None:
        served = _serve_arguments(words, where=where)
    starts_another = bool(words) and words[0].rsplit("/", 1)[-1] in _OTHER_PROGRAMS
    if served is None and str(texts.get("image")).startswith(_IMAGE) and not starts_another:
        served = words
    if served is not None:
        return list(_options(served, where=where))
    # The image, which is elsewhere, may start the server.
    words = [word for word in words if not word.lstrip("-").replace("-", "_").startswith(_KSERVE_NAME)]
    options = list(_options(list(dropwhile(lambda word: not _is_option(word), words)), where=where))
    return options if any(name in _OF_VLLM for name, _ in options) else []


def _environment(entries: object) -> dict[str, str]:
    """Return the variables of a container that have a literal value; Kubernetes writes `$(NAME)` for them."""
    listed = entries if isinstance(entries, list) else []
    named = [(e.get("name"), e.get("value")) for e in listed if isinstance(e, Mapping)]
    return {n: v for n, v in named if isinstance(n, str) and isinstance(v, str) and not _is_unresolved(v)}


# -- variables -------------------------------------------------------------------------------------------

_ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:export[ \t]+|readonly[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w{0,99})=(.{0,1000})$""",
    re.MULTILINE,
)
_PLAIN_WORD = re.compile(r"[\w./:@=,+%~ -]*", re.ASCII)
"""Values of variables that mean the same wherever they are put in."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w{0,99})\}|\(([A-Za-z_]\w{0,99})\)|([A-Za-z_]\w{0,99}))")
_SUBSTITUTION = re.compile(r"\$\((?!\w{1,100}\))[^()]{0,1000}\)|`[^`]{0,1000}`")
"""The output of a command, which is not run."""


def _variables(script: str) -> dict[str, str]:
    """Return the variables to which a script assigns one literal value."""
    values: dict[str, set[str | None]] = {}
    for name, text in _ASSIGNMENT.findall(script):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            words = []
        # Words behind the value are a command, and the variable is of that one only.
        is_literal = len(words) <= 1 and _PLAIN_WORD.fullmatch("".join(words)) is not None and "$" not in text
        values.setdefault(name, set()).add("".join(words) if is_literal else None)
    return {n: value for n, (value, *others) in values.items() if value is not None and not others}


def _resolved(text: str, variables: Mapping[str, str]) -> str:
    """Put in the variables that are known; the others stay as they are written, and so do lines that are too long for a
    command.
    """
    if len(text) > _MAX_COMMAND_CHARS:
        return text
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2] or found[3], found[0]), text)


def _is_unresolved(word: str) -> bool:
    return "$" in word or "{{" in word


_UNRESOLVED = "unresolved_"


def _unresolved(name: str) -> str:
    return f"{_UNRESOLVED}{name}"


def _with_doubts(settings: ServerSettings, *, where: str) -> ServerSettings:
    """Add a sentence for each setting whose value is a variable that the file does not assign."""
    texts = {n.removeprefix(_UNRESOLVED): v for n, v in settings.other.items() if n.startswith(_UNRESOLVED)}
    unknown = [
        f"{where}: {n} is {excerpt(v)}, whose value the file does not state"
        for n, v in texts.items()
        if n not in settings.values()
    ]
    return settings.model_copy(update={"unread": (*settings.unread, *unknown)})


# -- command lines ---------------------------------------------------------------------------------------


def parse_serve_command(text: str, *, where: str) -> ServerSettings:
    """Read a `vllm serve MODEL --option value …` command line, or a shell script with one.

    Takes `--option value`, `--option=value`, `-tp 2`, switches and their `--no-` forms, and counts such as `16k`
    (16,000) and `16K` (16,384), as vLLM does. Nothing is executed. Variables that the script assigns literally are put
    in; a setting whose value is another one is unknown, with a sentence in `unread`. `python -m sglang.launch_server`
    is read likewise.

    Raises:
        UsageError: The text has no such command, unclosed quotes, or an impossible value.
    """
    if len(text) > _MAX_BYTES:
        raise UsageError(f"is larger than {_MAX_BYTES:,} bytes", where=where)
    words = _served(text, where=where)
    if words is None:
        raise UsageError("holds no `vllm serve` command", where=where, hint="give the line that starts the server")
    settings = settings_from(_options(words, where=where), where=where, source="read")
    return _with_doubts(_with_sampler(settings, text, where=where), where=where)


def _served(script: str, *, where: str) -> list[str] | None:
    """Return the arguments of the server that a script starts; null if it starts none."""
    # A shell joins lines that end in a backslash.
    joined = re.sub(r"\\\r?\n", " ", script)
    variables = _variables(joined)
    for written in joined.splitlines():
        line = _resolved(_SUBSTITUTION.sub("$()", written), variables)
        if ("vllm" in line or _SGLANG_MODULE in line) and not line.lstrip().startswith("#"):
            words = _serve_arguments(_split(line, where=where), where=where)
            if words is not None:
                return words
    return None


def _split(line: str, *, where: str) -> list[str]:
    if len(line) > _MAX_COMMAND_CHARS:
        raise UsageError(f"has a line of more than {_MAX_COMMAND_CHARS:,} characters", where=where)
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"is not a command line ({error})", where=where) from None


def _serve_arguments(words: list[str], *, where: str) -> list[str] | None:
    """Return the words after `vllm serve`, the server's module or its image, up to the end of the command."""
    for index, word in enumerate(words):
        if "vllm serve" in word:  # a whole command in quotes, as for `bash -c`
            return _serve_arguments(_split(word, where=where), where=where)
        follows = words[index + 1 : index + 2]
        is_command = word.rsplit("/", 1)[-1] == "vllm" and follows == ["serve"]
        if is_command or word in _MODULES or word.startswith(_IMAGE):
            return [*([word] if word == _SGLANG_MODULE else []), *_until_end(words[index + 1 + is_command :])]
    return None


def _until_end(words: list[str]) -> Iterator[str]:
    """Yield the words of a command; the shell may end it right behind a word."""
    for word in words:
        if word in _COMMAND_ENDS:
            return
        yield word.removesuffix(";")
        if word.endswith(";"):
            return


def _options(words: list[str], *, where: str) -> Iterator[tuple[str, object]]:
    """Yield the settings that words of a command line state; a word that belongs to no option is the model."""
    rest = list(words)
    is_sglang = rest[:1] == [_SGLANG_MODULE]
    if is_sglang:
        rest.pop(0)
        yield "engine", "sglang"
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            if not is_sglang:
                yield (_unresolved("model") if _is_unresolved(word) else "model"), word
            continue
        flag, equals, attached = word.partition("=")
        value = attached if equals else None
        if value is None and rest and _takes(flag, rest[0]):
            value = rest.pop(0)
        name = canonical_name(flag)
        if is_sglang and value is None and name in _SGLANG_SWITCHES:
            yield _SGLANG_SWITCHES[name]
        else:
            yield _option_value(_OF_SGLANG.get(name, flag) if is_sglang else flag, value, where=where)


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _takes(flag: str, word: str) -> bool:
    """Return whether the word after an option is its value; a switch takes only true or false, as in old versions."""
    name = canonical_name(flag)
    if name in _SWITCHES or name.removeprefix("no_") in _SWITCHES:
        return word.lower() in {"true", "false"}
    return not _is_option(word)


def _option_value(flag: str, value: str | None, *, where: str) -> tuple[str, object]:
    """Return the name and value of the setting that an option states."""
    name = canonical_name(flag)
    if value is None:
        if name.startswith("no_") and canonical_name(name[3:]) in _SWITCHES:
            return canonical_name(name[3:]), False
        if name in SETTING_NAMES and name not in SERVER_FLAGS:
            raise UsageError(f"{flag} has no value", where=where)
        return name, True
    if _is_unresolved(value) and name in SETTING_NAMES:
        return _unresolved(name), value
    return name, value if name in TEXTS else _literal(value)


def _literal(value: str) -> object:
    """Read a word of a command line as a number or a boolean if it is one, else as text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    count = _COUNT.fullmatch(value)
    if count is None:
        return value
    number = float(count[1]) * _UNIT_FACTORS[count[2]]
    return int(number) if number.is_integer() else number


# -- flags that turn on traces --------------------------------------------------------------------------
#
# Stock vLLM does not have these flags: they belong to the fork of vLLM that the inference-sim project
# instruments. Messages say so, because a stock server refuses to start with them.


INSTRUMENTED_VERSION = "0.15.1"
"""Version of vLLM whose instrumented fork has every attribute that is read."""

_FORK = "(inference-sim's fork of vLLM)"

ENDPOINT_FLAG = "--otlp-traces-endpoint"
"""A span of every request, from stock vLLM as well."""

STEP_FLAGS = f"--step-tracing-enabled --step-tracing-sample-rate 1.0 {_FORK}"
"""A summary of every engine step."""

JOURNEY_FLAGS = f"--enable-journey-tracing --journey-tracing-sample-rate 1.0 {_FORK}"
"""The events of every request."""

SNAPSHOT_FLAG = f"--step-tracing-rich-subsample-rate 1.0 {_FORK}"
"""The requests of every step, with the tokens that each has computed."""


ALL_SPANS = (
    "step times follow from the spans of every request of one engine: OTEL_TRACES_SAMPLER=always_on, one front end, "
    "and for each server an OTEL_SERVICE_NAME of its own"
)
"""How to get step times from an unmodified vLLM."""

NOT_OF_STOCK = "no flag of an unmodified vLLM gives it"

NO_PREFIX_CACHE = "--no-enable-prefix-caching makes it certain"
"""How to get the time of a prompt token from spans without prefix-cache hits."""

_REQUEST_SPANS = f"a span of every request gives it: start the server with {ENDPOINT_FLAG} URL"


SGLANG_STEPS = "SGLang has spans of its steps at level 3: start it with SGLANG_TRACE_LEVEL=3"


def step_remedy(*, stock: bool) -> str:
    """Say how to get step times; the fork's flags are not named for an unmodified server, which refuses them."""
    return ALL_SPANS if stock else f"the summaries of all steps give it: start the server with {STEP_FLAGS}"


_HITS_SHARE = 0.98
"""Share of the prompt tokens that the steps of a log compute, below which the prefix cache had the others."""


def context_remedy(requests: int, prompt_tokens: int, prompts: int, computed_tokens: int) -> str:
    """Say how to get the context tokens of the steps of a log.

    Args:
        requests: Requests of the run.
        prompt_tokens: Tokens of their prompts.
        prompts: Prompts that the steps computed, one for each step of a chunked one.
        computed_tokens: Their tokens that the steps computed.
    """
    few = f"too few of the {requests:,} requests of the run could be assigned to the lines of the log"
    if prompts >= requests > 0 and 0 < computed_tokens < _HITS_SHARE * prompt_tokens:
        return (
            f"{few}; prefix hits were seen: the steps computed {100 * computed_tokens / prompt_tokens:.0f} % of the "
            "prompt tokens, unless log and spans are of different servers; --no-enable-prefix-caching, or other "
            "prompts in each call of a load generator, help"
        )
    if requests:
        return f"{few}; a log format with microseconds, and a log and spans of one server only, help"
    return (
        "spans of the same requests, in the same run folder, give context tokens, queue wait and admission: start "
        f"the server with {ENDPOINT_FLAG} URL"
    )


def journey_remedy(*, stock: bool, after_last_token: bool = False) -> str:
    """Say how to get the durations between the events of a request."""
    if not stock:
        return f"the events of requests give it: start the server with {JOURNEY_FLAGS}"
    return f"{NOT_OF_STOCK}; TTFT, ITL and E2E do without it" if after_last_token else _REQUEST_SPANS


def without_attribute(event: str, attributes: Sequence[str]) -> str:
    """Say that no event of a name has some attributes, and name the flag and the version of vLLM that write them."""
    from tracefit.tables.dialects import SNAPSHOT_EVENT, STEP_EVENT  # noqa: PLC0415 - `predict` does without polars

    flags = {STEP_EVENT: STEP_FLAGS, SNAPSHOT_EVENT: SNAPSHOT_FLAG}.get(event, JOURNEY_FLAGS)
    return (
        f"no {event} has a usable {', '.join(attributes)}: what is computed from them is not known; "
        f"vLLM {INSTRUMENTED_VERSION} gives them with {flags}"
    )
