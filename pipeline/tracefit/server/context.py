"""The server behind a run: its settings, model and GPU, how the `runs` table stores them, and their deployment id.

Runs of one model on one kind of GPU under the same settings share a deployment and are fitted as one. Its id
ends in a hash over everything that changes how a server behaves.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracefit.errors import UsageError
from tracefit.options import ServerOptions, named
from tracefit.server.architecture import ModelArchitecture, slug_of
from tracefit.server.documents import as_text, read_bytes
from tracefit.server.hardware import Gpu, UnknownGpuError, find_gpu, find_gpus, parse_gpu, read_gpu
from tracefit.server.model_config import UnknownModelError, as_served, parse_architecture
from tracefit.server.settings import (
    DEFAULT_BLOCK_SIZE,
    SPECULATION,
    ServerSettings,
    assume_defaults,
    logged_settings,
    merge,
    read_all_settings,
    settings_from,
    settings_from_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.server.documents import Scalar
    from tracefit.server.server_log import ServerStart


class RunContext(msgspec.Struct, frozen=True, eq=False):
    """The server of one run: settings, and the model and GPU if known. The runs of a fleet share one object, which
    equals no other.
    """

    settings: ServerSettings
    architecture: ModelArchitecture | None = None
    gpu: Gpu | None = None
    model_config: str | None = None
    """config.json as it was read."""
    left_out: tuple[str, ...] = ()
    """A sentence for a stated but unknown model or GPU, with the features that are left out for it."""

    def served_names(self) -> tuple[str, ...]:
        """Return the names of the model that the run's files state: its own, and those that clients use."""
        stated = self.settings.other.get("served_model_name")
        aliases = str(stated).strip("[]").replace('"', "").replace(",", " ").split() if stated else []
        return tuple(filter(None, (self.settings.model, *aliases)))

    def config_name(self) -> str | None:
        """Return the name in config.json; null where it has none."""
        config = None
        with suppress(ValueError):
            config = json.loads(self.model_config or "null")
        name = config.get("_name_or_path") if isinstance(config, dict) else None
        return name if isinstance(name, str) and name.strip() else None


class Deployment(msgspec.Struct, frozen=True):
    """The conditions a fitted model is valid for: one model on one kind of GPU under one set of settings."""

    deployment_id: str
    context: RunContext

    def assumed(self) -> tuple[str, ...]:
        """Name every value that no input states."""
        settings = self.context.settings
        names = [n for n, source in settings.sources.items() if source == "assumed"]
        phrases = [f"{name} {settings.values()[name]} (vLLM's default)" for name in names]
        assumed = self.context.architecture.assumed if self.context.architecture else ()
        return (*phrases, *assumed, *self.context.left_out)


def read_context(
    run_configs: Sequence[Path],
    model_config: Path | None,
    overrides: ServerSettings,
    *,
    gpu: str | None = None,
    starts: Sequence[ServerStart] = (),
) -> RunContext:
    """Return the server of a run, from the run's files; the user's values win, and what the server's log says is the
    last resort.

    Args:
        run_configs: exp-config.yaml, run.yaml, a `vllm serve` command line or a server log.
        model_config: config.json.
        overrides: Settings from the user.
        gpu: Name of a GPU, or a JSON file that describes one; else the `gpu` setting of the run.
        starts: Starts of the server in its log.

    Raises:
        UsageError: A file is not valid, or two of them contradict. A configuration of a model that cannot be read is in
            `left_out`.
    """
    given = merge(read_all_settings(run_configs), overrides)
    logged, doubts = _logged(starts, given)
    settings = merge(logged, given)
    text = as_text(read_bytes(model_config), where=str(model_config)) if model_config else None
    name = settings.gpu if gpu is None else gpu
    described, count = None, 1
    if gpu and "://" in gpu:
        # Refused without showing it: a URL may contain a password, and a GPU's name gets into tables and reports.
        raise UsageError(
            "is a URL",
            where=named(ServerOptions, "gpu"),
            hint="give the name of a GPU, or a JSON file on this machine",
        )
    if name and name.lower().endswith(".json"):
        described = read_gpu(Path(name))
    elif name:
        # A GPU may be newer than the catalogue: `_assemble` names it, and the features that are left out without it.
        try:
            described, count = find_gpus(name)
        except UnknownGpuError:
            if gpu:
                settings = merge(settings, settings_from({"gpu": gpu}, where=named(ServerOptions, "gpu")))
    if starts:
        settings = merge(_unnamed(starts[-1], described, settings), settings)
    context, more = _with_count(settings, name or "", count, text, str(model_config), described)
    return replace(context, left_out=(*doubts, *more, *context.left_out))


_RANKS = ("tensor_parallel", "pipeline_parallel", "data_parallel")


def _with_count(
    settings: ServerSettings, name: str, count: int, text: str | None, where: str, gpu: Gpu | None
) -> tuple[RunContext, tuple[str, ...]]:
    """Return the context of a server whose GPU's name counts several (`8xH100`), and a doubt if only that name tells
    how many it has.
    """
    if count > 1 and not any(getattr(settings, ranks) for ranks in _RANKS):
        source = settings.sources.get("gpu", "given")
        counted = merge(settings_from({"tensor_parallel": count}, where="gpu", source=source), settings)
        said = f"{name} is {count} GPUs, and no setting divides the model"
        context = _assemble(assume_defaults(counted), text, where, gpu)
        alone = _assemble(assume_defaults(settings), text, where, gpu)
        # The model cannot be divided so.
        if context.architecture is None and alone.architecture is not None:
            return alone, (f"{said}: state tensor_parallel",)
        return context, (f"{said}: tensor_parallel {count} is taken",)
    return _assemble(assume_defaults(settings), text, where, gpu), ()


def _logged(starts: Sequence[ServerStart], given: ServerSettings) -> tuple[ServerSettings, tuple[str, ...]]:
    """Return the settings of the last start in a log, and doubts: other starts, and files that say something else."""
    try:
        every = [logged_settings(start, where="the server's log") for start in starts]
    except UsageError as error:
        return ServerSettings(), (f"settings in the server's log are not read: {error.what}",)
    if not every:
        return ServerSettings(), ()
    last, values = every[-1], given.values()
    doubts = [
        f"the server was started again with other settings ({_changes(before.values(), last.values())}): record each "
        "start in a folder of its own; the last one's settings are taken"
        for before in every[:-1]
        if _changes(before.values(), last.values())
    ]
    if other := _changes({n: v for n, v in last.values().items() if n != "model"}, values, common=True):
        doubts.append(
            f"the server's log says something else than its configuration ({other}): the configuration counts"
        )
    return last, tuple(dict.fromkeys(doubts))


def _changes(before: Mapping[str, Scalar], after: Mapping[str, Scalar], *, common: bool = False) -> str:
    """Name the settings that differ, with both values; `common` leaves out those that one side does not state."""
    names = [n for n in {**before, **after} if not common or (n in before and n in after)]
    return ", ".join(f"{n} {before.get(n)} → {after.get(n)}" for n in names if before.get(n) != after.get(n))


def _unnamed(start: ServerStart, gpu: Gpu | None, settings: ServerSettings) -> ServerSettings:
    """Return what nobody set: limits of a step as vLLM chooses them, and the blocks of the cache as the server measured
    it.
    """
    memory_gib = gpu.memory_gb * 1e9 / 2**30 if gpu is not None else None
    is_a100 = gpu is not None and "a100" in gpu.name.lower()
    limits = settings_from(start.defaults(memory_gib, is_a100=is_a100), where="vLLM's defaults", source="assumed")
    block_tokens = settings.block_size or limits.block_size or DEFAULT_BLOCK_SIZE
    blocks = start.cache_blocks or (start.cache_tokens or 0) // block_tokens
    measured = {"num_gpu_blocks": blocks or None}
    return merge(limits, settings_from(measured, where="the server's log", source="measured"))


def _assemble(settings: ServerSettings, text: str | None, where: str, gpu: Gpu | None) -> RunContext:
    architecture, left_out = None, []
    if settings.gpu and gpu is None:
        try:
            find_gpu(settings.gpu)
        except UnknownGpuError as error:
            left_out.append(f"{error.what}: features of the GPU are left out ({error.hint})")
    try:
        architecture = None if text is None else parse_architecture(text, where=where, name=settings.model)
    except UnknownModelError as error:
        left_out.append(f"features of the model are left out: {error.what} in its config.json")
    if architecture is not None:
        architecture = as_served(
            architecture,
            dtype=settings.dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
            quantization=settings.quantization,
        )
        try:
            architecture.check_tensor_parallel(settings.tensor_parallel or 1)
        except UsageError as error:
            # The server ran, so that one of the two describes another server.
            left_out.append(f"features of the model are left out: {error.what}")
            architecture = None
    return RunContext(settings, architecture, gpu, text, tuple(left_out))


def gpu_to_json(gpu: Gpu | None) -> str | None:
    """Write a GPU as JSON of the shape of a user's GPU file."""
    return None if gpu is None else json.dumps({"name": gpu.name, **gpu.facts()})


def context_from_json(settings: str, model_config: str | None, gpu: str | None, *, where: str) -> RunContext:
    """Restore a context from the `runs` table.

    Raises:
        UsageError: tracefit did not write these columns.
    """
    restored = settings_from_json(settings, where=where)
    return _assemble(restored, model_config, where, _restore_gpu(gpu, where=where))


def _restore_gpu(text: str | None, *, where: str) -> Gpu | None:
    if text is None:
        return None
    gpu = parse_gpu(text, where=where)
    try:
        listed = find_gpu(gpu.name)
    except UsageError:
        return gpu
    # The column has only facts: a GPU of the catalogue gets its confidence back, an altered one does not. Older tables
    # have no fp4 rate.
    facts = {**listed.facts(), **gpu.facts(), "gpu_confidence": listed.confidence}
    return listed if listed.facts() == facts else gpu


@lru_cache(maxsize=64)  # the runs of a fleet share a context
def deployment_of(context: RunContext) -> Deployment:
    """Return the deployment of a run; its id is `<model>.<gpu>.tp<n>.<8 hex digits of a hash>`."""
    settings, architecture = context.settings, context.architecture
    speculation = {name: value for name, value in settings.other.items() if name.startswith(SPECULATION)}
    parts = {
        "architecture": architecture.facts() if architecture else None,
        "gpu": {k: v for k, v in context.gpu.facts().items() if k != "compute_tflops_fp4"} if context.gpu else None,
        # An unknown GPU also distinguishes deployments.
        **({"unknown_gpu": settings.gpu} if settings.gpu and context.gpu is None else {}),
        "knobs": settings.knobs(),
        # Its steps compute several tokens of a request. Only there with it, so that ids of other servers stay.
        **({"speculation": speculation} if speculation else {}),
        # As are the products with adapters, which each of its layers adds.
        **({"adapters": True} if settings.has_adapters else {}),
        "tensor_parallel": settings.tensor_parallel,
    }
    # Everything that changes how a server behaves counts; the readable part before it names model, GPU and ranks only.
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    model = architecture.slug if architecture else slug_of(settings.model or "unknown-model")
    gpu = context.gpu.slug if context.gpu else slug_of(settings.gpu or "no-gpu")
    return Deployment(f"{model}.{gpu}.tp{settings.tensor_parallel or 1}.{digest}", context)


_NOTABLE = 1.05
"""Ratio of two measured values of one setting from which it is said that they differ."""


def together(deployments: Sequence[Deployment]) -> Deployment:
    """Return the deployment of runs of one id. Of what their servers measured, which may differ, the smallest value
    counts.
    """
    first = deployments[0]
    found: dict[str, list[float]] = {}
    for settings in (deployment.context.settings for deployment in deployments):
        for name, value in settings.measured().items():
            found.setdefault(name, []).append(float(str(value)))
    smallest = {name: int(min(values)) for name, values in found.items()}
    if smallest == first.context.settings.measured():
        settings = first.context.settings
    else:
        measured = settings_from(smallest, where="the servers' logs", source="measured")
        settings = merge(first.context.settings, measured)
    texts = [
        f"the servers measured {name} from {min(values):,.0f} to {max(values):,.0f}: the smallest counts"
        for name, values in found.items()
        if max(values) > _NOTABLE * min(values)
    ]
    if not texts and settings is first.context.settings:
        return first
    left_out = (*first.context.left_out, *texts)
    return replace(first, context=replace(first.context, settings=settings, left_out=left_out))
