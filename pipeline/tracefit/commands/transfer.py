"""Predict a server that was never traced: fit a law to the steps of others, and write its model as a training does."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from tracefit.coefficients import publish
from tracefit.coefficients.boxed import ENGINES, boxed_law
from tracefit.coefficients.documents import CoefficientFile
from tracefit.coefficients.files import find_models, published
from tracefit.coefficients.models import load
from tracefit.coefficients.transferred import (
    coverage_pct,
    evaluation_of,
    law_coefficients,
    left_out_errors,
    ranges_of,
    step_model,
    validation_of,
)
from tracefit.coefficients.verdicts import Measurements, verdicts_of
from tracefit.commands.deployments import deployments_of, load_deployment, sample_runs, write_timelines
from tracefit.commands.described import SERVER_FILE, server_text
from tracefit.commands.ingest import ingest, stated_settings
from tracefit.commands.locate import as_list, find_tables, is_tables
from tracefit.commands.report import report_of, report_texts
from tracefit.errors import DataError, TracefitError, UsageError
from tracefit.features.sets import AUTO
from tracefit.features.training import MOST_TOO_FAST
from tracefit.fit.deployments import fit_deployment, with_seen_limits
from tracefit.fit.fitted import DeploymentOptions, target_of
from tracefit.fit.points import FEWEST_POINTS, point_rows
from tracefit.fit.results import Missing
from tracefit.fit.transfer import (
    FASTER,
    FEWEST_STEPS,
    OWN_STEPS,
    PHASES,
    PROMPTS,
    UNTESTED,
    LawRows,
    calibrate,
    choose_sources,
    drawn,
    errors_of,
    fit_law,
    group_of,
    law_rows,
    leave_out,
    nearest,
    parts_of_model,
    prompts_of,
    unseen_parts,
    with_prompts_cached,
)
from tracefit.fit.validation import measure
from tracefit.inputs.buckets import location_of
from tracefit.models import schema
from tracefit.models.targets import CYCLE_TIME, is_step_model, target_named
from tracefit.options import (
    CalibrateOption,
    ForceOption,
    LawEngineOption,
    ServerOptions,
    SourcesArgument,
    TransferOutOption,
    named,
)
from tracefit.progress import KeptWarnings, Progress
from tracefit.results.models import LawPart, LeftOutSource, TransferResult
from tracefit.server.context import deployment_of, read_context
from tracefit.server.hardware import find_gpu
from tracefit.server.settings import SPECULATION, merge, settings_from
from tracefit.tables.disk import write_files
from tracefit.tables.points import points_stated
from tracefit.tables.store import TableStore
from tracefit.text import percent, plural, reasons

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from tracefit.coefficients.documents import Evaluation, Provenance
    from tracefit.coefficients.models import Models
    from tracefit.fit.fitted import DeploymentTables, FittedDeployment
    from tracefit.fit.results import LeftOutErrors
    from tracefit.fit.transfer import Calibration, Fold, Kind, Law, TransferErrors, Wider
    from tracefit.models.validation import Metrics
    from tracefit.server.context import Deployment, RunContext
    from tracefit.server.settings import ServerSettings

_KIND_TEXTS: dict[str, str] = {
    "tensor_parallel": "another tensor parallelism of the same model and GPU",
    "model": "another model on the same GPU",
    "gpu": "another GPU",
    "model_and_gpu": "another model on another GPU",
}
_MOST_SOURCE_RUNS = 50
_MOST_SOURCE_ROWS = 200_000
"""Runs, and steps and events, that a source is read with."""
_FEWEST_STEPS = 100
_UTILIZATION = 0.9
_OTHER_SHARE = 0.04
"""Share of a GPU's memory that activations, CUDA graphs and the libraries take."""
_WORKED_OUT = "worked out"
_TOO_SHORT = 0.03
"""Share of the steps that are too short to have computed their prompts, from which on these were in the prefix
cache."""
_BORROWED = ("admission", "departure")
"""Models of the front end, which do not depend on the model or the GPU behind it."""


def transfer(
    folders: SourcesArgument,
    out: TransferOutOption,
    *,
    server: ServerOptions | None = None,
    engine: LawEngineOption = None,
    calibrate: CalibrateOption = None,
    force: ForceOption = False,
    progress: Progress | None = None,
) -> TransferResult:
    """Predict a server that was never traced from the traces of others, and write models, evaluation and report for it.

    A law in time at rated speed is fitted to the steps of the sources: of deployments of the same model and GPU if
    there are any, else of the same GPU, else of all. Its errors are those on servers that are left out of the sources
    in turn. Without folders the law is the one that the package carries.

    Args:
        folders: Folders that `run` or `train` wrote; the law in the package if none is given.
        out: Folder for alpha.json, beta.json, evaluation.json and the report.
        server: The new server: at least `model_config` and `gpu`.
        engine: The engine of the law in the package: `vllm` if not given.
        calibrate: Traces of the new server, or a folder that `run` wrote of them: the law is drawn to its steps.
        force: Answer where nothing shows how exact the answer is, with the widest interval.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A folder or an option is wrong, the model or the GPU is not known, or the model does not fit.
        DataError: The sources do not support this transfer.

    Examples:
        >>> import tracefit
        >>> new = tracefit.ServerOptions(model_config="config.json", gpu="B300", tp=2)
        >>> result = tracefit.transfer(["out/"], "new/", server=new)  # doctest: +SKIP
    """
    progress = KeptWarnings(progress)
    locations = as_list(folders or ())
    if locations and engine is not None:
        raise UsageError(
            f"{named(LawEngineOption)}: is for the law in the package",
            hint="leave it out where folders are given: the law is fitted to what these hold",
        )
    if any(location_of(location) == location_of(out) for location in locations):
        raise UsageError(
            f"{named(TransferOutOption)} {out}: is one of the sources, whose models would be lost",
            hint="give the new server a folder of its own",
        )
    server = server or ServerOptions()
    context = _target(server)
    with threadpool_limits(limits=1, user_api="blas"):
        found = _transferred(locations, context, progress) if locations else _from_package(context, engine)
        found = _with_calibration(found, calibrate, server, location_of(out), progress)
        if found.doubts and not force and found.calibration is None:
            lifts = f"some minutes of its traces lift this: {named(CalibrateOption)}"
            raise DataError(
                f"{found.target.deployment_id}: {'; '.join(found.doubts)}",
                hint=f"{lifts}; or {named(ForceOption)} answers with the widest interval",
            )
        return _written(location_of(out), found, progress)


class _Sources(msgspec.Struct, frozen=True):
    """Steps of the sources, the models beside them, and why others cannot be sources."""

    rows: tuple[LawRows, ...]
    models: dict[str, Models]
    refused: tuple[str, ...]


class _Own(msgspec.Struct, frozen=True):
    """An own fit of the steps to calibrate with, beside the calibrated law on the same held-out part."""

    fitted: FittedDeployment | None = None
    mape_pct: float | None = None
    after_mape_pct: float | None = None

    @property
    def is_better(self) -> bool:
        """Whether it is."""
        return self.mape_pct is not None and self.after_mape_pct is not None and self.mape_pct < self.after_mape_pct


class _Found(msgspec.Struct, frozen=True):
    """A law for a server, and what shows how exact it is.

    Attributes:
        target: The server.
        kind: Property of it that no source has.
        sources: Ids of the sources.
        prior_sources: Ids of the servers that the priors are found on.
        reach: Their steps, or the corners of their batches.
        law: The law of all of them.
        left_out: Range of each coefficient over the laws without one of the sources.
        across: Errors on sources that were left out in turn.
        expected: The errors to expect of it.
        about: Sentences on the sources.
        has_prompts: Whether any source has steps with prompts.
        alpha: Models of the front end, borrowed from a source.
        doubts: Why nothing shows how exact it is.
        calibration: The law drawn to steps of the server, or to points of it; null without any.
        drawn_to: Whether it is drawn to steps or to points.
        own: A fit of these steps by themselves.
    """

    target: Deployment
    kind: Kind
    sources: tuple[str, ...]
    prior_sources: tuple[str, ...]
    reach: tuple[LawRows, ...]
    law: Law
    left_out: dict[str, tuple[float, float]]
    across: tuple[LeftOutErrors, ...]
    expected: TransferErrors
    about: tuple[str, ...]
    has_prompts: bool
    alpha: tuple[schema.Model, ...]
    doubts: tuple[str, ...]
    calibration: Calibration | None = None
    drawn_to: Literal["steps", "points"] = "steps"
    own: _Own = msgspec.field(default_factory=_Own)


def _transferred(locations: Sequence[str | Path], context: RunContext, progress: KeptWarnings) -> _Found:
    """Return a law that is fitted to the steps of some folders."""
    sources = _sources(locations, context, progress)
    kind, chosen, wider = choose_sources(context, sources.rows)
    if not chosen:
        raise DataError(
            "no deployment of these folders can be a source",
            hint="; ".join(sources.refused) or "name folders that `tracefit run` wrote, with config.json and a GPU",
        )
    target = deployment_of(_with_limits(_named_like(context, [one.context for one in sources.rows])))
    progress.stage(f"fitting the law to {plural(len(chosen), 'deployment')}: {_KIND_TEXTS[kind]}")
    law = fit_law(chosen, kind, wider)
    progress.stage("leaving out servers in turn")
    folds = leave_out(chosen, kind, wider)
    doubts = tuple(_doubts(target.context, chosen, kind, folds, " on this GPU" if kind == "model" else ""))
    names, others = (tuple(one.deployment_id for one in group) for group in (chosen, _all_of(wider)))
    about = [f"the law is fitted to {', '.join(names)} ({_KIND_TEXTS[kind]})"]
    if others:
        about.append(f"what these cannot tell apart is as it was found on {', '.join(others)}")
    return _Found(
        target=target,
        kind=kind,
        sources=names,
        prior_sources=others,
        reach=chosen,
        law=law,
        left_out=ranges_of([fold.law for fold in folds]),
        across=left_out_errors(folds, kind, chosen, _own_errors(sources, chosen)),
        expected=UNTESTED if doubts else errors_of(folds),
        about=(*about, *sources.refused),
        has_prompts=any(one.has_prompts for one in chosen),
        alpha=_borrowed(target, kind, chosen, sources),
        doubts=doubts,
    )


def _all_of(wider: Sequence[Wider]) -> tuple[LawRows, ...]:
    return tuple(one for step in wider for one in step.sources)


def _from_package(context: RunContext, engine: str | None) -> _Found:
    """Return the law that the package carries.

    Raises:
        UsageError: It has none of the engine, or the server decodes speculatively.
    """
    name = (engine or ENGINES[0]).lower()
    if name not in ENGINES:
        raise UsageError(
            f"{named(LawEngineOption)} {name}: the package has no law of it",
            hint=(
                f"there is one of {', '.join(ENGINES)}; for others name folders that `tracefit run` wrote of their "
                "servers"
            ),
        )
    if any(setting.startswith(SPECULATION) for setting in context.settings.other):
        raise UsageError(
            (
                "with speculative decoding a step computes several tokens of a request, which the law in the package "
                "does not know"
            ),
            hint="leave the setting out, or name folders that `tracefit run` wrote of such servers",
        )
    boxed = boxed_law(name)
    target, kind = deployment_of(_with_limits(context)), boxed.kind_for(context)
    doubts = tuple(_unseen(context, boxed.parts))
    points = sum(one.points for one in boxed.servers)
    errors = boxed.errors[kind]
    about = (
        (
            f"the law is the package's own, fitted to {points:,} public points of {len(boxed.servers)} servers with "
            f"{name}: {boxed.source}"
        ),
        (
            f"servers that were left out of it, as this one is ({_KIND_TEXTS[kind]}), were "
            f"{percent(errors.mdape_pct)} % off at the median point"
        ),
    )
    return _Found(
        target=target,
        kind=kind,
        sources=tuple(one.deployment_id for one in boxed.servers),
        prior_sources=(),
        reach=(boxed.batches(target),),
        law=boxed.fitted(),
        left_out={c.feature: c.left_out_range for c in boxed.law if c.left_out_range is not None},
        across=tuple(one for one in boxed.across if one.kind == kind),
        expected=UNTESTED if doubts else boxed.expected(kind),
        about=about,
        has_prompts=False,
        alpha=(),
        doubts=doubts,
    )


# -- the new server --------------------------------------------------------------------------------------


def _target(server: ServerOptions) -> RunContext:
    """Return the server that a transfer is for.

    Raises:
        UsageError: Its model or GPU is not stated or not known, or the weights do not fit into its memory.
    """
    for name, value in (("model_config", server.model_config), ("gpu", server.gpu)):
        if value is None and not (name == "gpu" and server.run_config):
            raise UsageError(
                f"{named(ServerOptions, name)}: is not given",
                hint="a transfer needs the model's config.json and the GPU of the new server",
            )
    configs = [server.run_config] if server.run_config else []
    context = read_context(configs, server.model_config, stated_settings(server), gpu=server.gpu)
    if context.architecture is None or context.gpu is None:
        unknown = "; ".join(context.left_out) or "the GPU is not known"
        raise UsageError(f"the new server cannot be computed: {unknown}")
    return with_blocks(context)


def _with_limits(context: RunContext) -> RunContext:
    """Return the server with vLLM's limits of a batch on its GPU, unless they are stated: a plan needs them.

    `EngineArgs.get_batch_defaults` of vLLM 0.20: more on GPUs of 70 GiB and more, except A100.
    """
    gpu = context.gpu
    is_large = gpu is not None and gpu.memory_gb * 1e9 >= 70 * 2**30 and "A100" not in gpu.name
    limits = {
        "max_num_seqs": 1_024 if is_large else 256,
        "max_num_batched_tokens": 8_192 if is_large else 2_048,
    }
    assumed = settings_from(limits, where="vLLM's defaults", source="assumed")
    return replace(context, settings=merge(assumed, context.settings))


def _named_like(context: RunContext, others: Sequence[RunContext]) -> RunContext:
    """Return a server with the name that another one's files give to its model, where its own have none."""
    same = (one for one in others if group_of(one, "model") == group_of(context, "model"))
    name = next((one.settings.model for one in same if one.settings.model), None)
    if context.settings.model or name is None or context.architecture is None:
        return context
    settings = merge(context.settings, settings_from({"model": name}, where="sources", source="read"))
    return replace(context, settings=settings, architecture=replace(context.architecture, name=name))


def with_blocks(context: RunContext) -> RunContext:
    """Return the server with the KV blocks that its memory has room for, unless they are stated.

    Raises:
        UsageError: The weights leave no room.
    """
    model, gpu, settings = context.architecture, context.gpu, context.settings
    if model is None or gpu is None:
        raise ValueError("a target has a model and a GPU")
    tp, stages = settings.tensor_parallel or 1, settings.pipeline_parallel or 1
    share = settings.gpu_memory_utilization or _UTILIZATION
    weights = model.weight_bytes / tp / stages
    free = (share - _OTHER_SHARE) * gpu.memory_gb * 1e9 - weights
    per_token = sum(n * a.cached_bytes(model.kv_bytes) / a.kv_shards(tp) for a, n in model.attentions.items()) / stages
    block_tokens = settings.block_size or 16
    blocks = int(free / (per_token * block_tokens)) if per_token > 0 else None
    if free <= 0 or (blocks is not None and blocks < 1):
        raise UsageError(
            (
                f"{weights / 1e9:,.1f} GB of weights on each of {tp * stages} GPUs leave no room for a KV cache in "
                f"{gpu.memory_gb:g} GB ({gpu.name})"
            ),
            hint=f"divide the model over more GPUs: {named(ServerOptions, 'tp')}",
        )
    if settings.num_gpu_blocks or blocks is None:
        return context
    worked_out = settings_from({"num_gpu_blocks": blocks}, where="memory", source="measured")
    text = f"num_gpu_blocks {blocks:,} ({_WORKED_OUT} from memory, weights and {percent(100 * share)} % use)"
    return replace(context, settings=merge(settings, worked_out), left_out=(*context.left_out, text))


# -- the sources -----------------------------------------------------------------------------------------


def _sources(locations: Sequence[str | Path], target: RunContext, progress: KeptWarnings) -> _Sources:
    """Read the steps of every deployment of some folders that can be a source."""
    found: dict[str, LawRows] = {}
    models: dict[str, Models] = {}
    refused: list[str] = []
    for location in locations:
        store = TableStore(find_tables(location)).require()
        with suppress(TracefitError):
            of_place = load(find_models(location))
            models.update(dict.fromkeys(of_place.deployment_ids, of_place))
        runs = store.read("runs", None)
        for deployment, members in deployments_of(runs, str(store.root)):
            name = deployment.deployment_id
            progress.stage(f"reading {name}")
            if name in found:
                refused.append(f"{name} is in two folders: the runs of {location} are not used")
                continue
            reason = _no_source(deployment.context)
            if name == deployment_of(_named_like(target, [deployment.context])).deployment_id:
                reason = "it is the server asked for; its own model is better than any law"
            if reason is None:
                rows = _law_rows(store, runs, deployment, members)
                reason = _too_few(rows)
                if reason is None:
                    found[name] = rows
            if reason is not None:
                refused.append(f"{name} cannot be a source: {reason}")
    for text in refused:
        progress.warn(text)
    return _Sources(tuple(found.values()), models, tuple(refused))


def _law_rows(store: TableStore, runs: pl.DataFrame, deployment: Deployment, members: Sequence[str]) -> LawRows:
    tables = _tables_of(store, runs, members)
    seen, _ = with_seen_limits(deployment, tables.timeline)
    return law_rows(seen, tables)


def _tables_of(store: TableStore, runs: pl.DataFrame, members: Sequence[str]) -> DeploymentTables:
    """Return the tables of a deployment's runs, of some of them where they are many."""
    kept = sample_runs(runs, members, most_rows=_MOST_SOURCE_ROWS, most_runs=_MOST_SOURCE_RUNS)
    write_timelines(store, kept)
    return load_deployment(store, kept)


def _no_source(context: RunContext) -> str | None:
    """Return why a deployment cannot be a source; null where it can."""
    if context.architecture is None:
        return next(iter(context.left_out), "its config.json is not known")
    if context.gpu is None:
        return "its GPU is not known"
    if (context.settings.data_parallel or 1) > 1 and context.architecture.is_moe:
        return "data-parallel ranks share its experts, and the steps of one rank say nothing of the tokens of others"
    if (context.settings.pipeline_parallel or 1) > 1:
        return "the law knows no pipeline stages"
    if any(name.startswith(SPECULATION) for name in context.settings.other):
        return "with speculative decoding a step computes several tokens of a request"
    return "it serves adapters" if context.settings.has_adapters else None


def _too_few(rows: LawRows) -> str | None:
    fast = rows.left_out.get(FASTER, 0)
    if fast > MOST_TOO_FAST * (rows.rows.height + fast):
        return "most of its steps are faster than its GPU allows: model, GPU or tensor_parallel is stated wrongly"
    if rows.rows.height < _FEWEST_STEPS:
        return f"{rows.rows.height} steps are too few, {_FEWEST_STEPS} are needed"
    return None


def _doubts(
    context: RunContext, chosen: Sequence[LawRows], kind: Kind, folds: Sequence[Fold], which: str
) -> Iterator[str]:
    """Yield why nothing shows how exact a transfer is; `which` says which sources count."""
    yield from _unseen(context, {part for one in chosen for part in parts_of_model(one.context)}, which)
    if len(chosen) == 1:
        yield "there is one source only, and none is left to test the law on"
    elif not folds:
        what = {"tensor_parallel": "tensor parallelism", "model": "model", "gpu": "GPU"}[kind]
        yield f"all sources have one {what}, so that none shows how the law carries over to another"


def _unseen(context: RunContext, seen: Collection[str], which: str = "") -> Iterator[str]:
    """Yield the parts of a server that no source has."""
    if unseen := unseen_parts(context, seen):
        yield f"no source{which} has {' or '.join(unseen)}"
    if (context.settings.data_parallel or 1) > 1 and context.architecture is not None and context.architecture.is_moe:
        yield "no source has experts shared by data-parallel ranks"
    if (context.settings.pipeline_parallel or 1) > 1:
        yield "no source has pipeline stages"


# -- calibration -----------------------------------------------------------------------------------------


def _with_calibration(
    found: _Found, traces: str | Path | None, server: ServerOptions, out: Path, progress: KeptWarnings
) -> _Found:
    """Return a law drawn to steps of the server, where traces of it are given."""
    if traces is None:
        return found
    folder = find_tables(traces)
    if not is_tables(folder):
        progress.stage("reading the traces to calibrate with")
        ingest(traces, out / "tables", server=server, progress=progress)
        folder = out / "tables"
    store = TableStore(folder).require()
    if points_stated(store.read("runs", None), only=True):
        steps, tables = _points_of(store, found.target, str(traces)), None
    else:
        steps, tables, target = _steps_of(store, found.target, str(traces))
        found = replace(found, target=target)
    what: Literal["steps", "points"] = "points" if tables is None else "steps"
    fewest = FEWEST_POINTS if tables is None else FEWEST_STEPS
    made = calibrate(found.law, steps, found.expected, fewest=fewest)
    if tables is not None and made is not None:
        made, tables = _with_hits(found, made, tables, progress)
    if made is None:
        counted = f"{steps.rows.height} {what}"
        reasons = [f"{n} left out: {reason}" for reason, n in steps.left_out.items()]
        left = ", ".join((*reasons, *(tables.unknown_batches if tables is not None else ())))
        text = (
            f"{counted} are too few to calibrate with, {fewest} are needed: the transfer is as without "
            f"them{f' ({left})' if left else ''}"
        )
        progress.warn(text)
        return replace(found, about=(*found.about, text))
    found = replace(found, calibration=made, drawn_to=what)
    if tables is not None:
        found = replace(found, own=_own_fit(found, made, tables, progress))
    # The limits of the steps matter only where the law is taken.
    for text in () if found.own.is_better else _of_calibration(made, found.drawn_to):
        progress.warn(text)
    return found


def _points_of(store: TableStore, target: Deployment, where: str) -> LawRows:
    """Return the mean steps of the points of a server in some tables.

    Raises:
        UsageError: A point states another model, GPU or tensor parallelism.
    """
    points = store.read("points").sort("source_file", "source_offset", "point")
    context = target.context
    for row in points.select("gpu", "tensor_parallel").unique(maintain_order=True).to_dicts():
        gpu, tp = row["gpu"] and find_gpu(row["gpu"]), row["tensor_parallel"]
        if (gpu and gpu != context.gpu) or (tp and tp != (context.settings.tensor_parallel or 1)):
            raise UsageError(
                (
                    f"holds points of {row['gpu'] or 'a server'} with tensor parallelism {tp or '?'}, which is not "
                    f"{target.deployment_id}"
                ),
                where=f"{named(CalibrateOption)} {where}",
                hint="give only points of the new server",
            )
    return point_rows(
        target,
        points.select(
            *(pl.col(name).cast(pl.Float64) for name in ("concurrency", "prompt_tokens", "output_tokens")),
            ttft_us=pl.coalesce("ttft_mean_us", "ttft_p50_us").cast(pl.Float64),
            tpot_us=pl.coalesce("tpot_mean_us", "itl_mean_us", "tpot_p50_us", "itl_p50_us").cast(pl.Float64),
        ),
    )


def _steps_of(store: TableStore, target: Deployment, where: str) -> tuple[LawRows, DeploymentTables, Deployment]:
    """Return the steps of a server in some tables, the tables, and the server with the settings that they state.

    Raises:
        UsageError: No run is of it, or the runs are of several deployments of its model, GPU and tensor parallelism.
    """
    runs = store.read("runs", None)
    every = deployments_of(runs, str(store.root))
    of_server = [one for one in every if _same_server(one[0].context, target.context)]
    if len(of_server) != 1:
        raise UsageError(
            f"holds {'runs of several deployments' if of_server else 'no run'} of {target.deployment_id}",
            where=f"{named(CalibrateOption)} {where}",
            hint=(
                f"there are: {', '.join(one.deployment_id for one, _ in every)}; model, GPU and tensor parallelism "
                "have to be those of the new server"
            ),
        )
    deployment, members = of_server[0]
    target = _with_stated(target, deployment.context.settings)
    tables = _tables_of(store, runs, members)
    return law_rows(target, tables), tables, target


def _with_stated(target: Deployment, stated: ServerSettings) -> Deployment:
    """Return the server with the settings that its own traces state, where its own are assumed or worked out."""
    own = target.context.settings
    known = {
        name: value
        for name, value in stated.values().items()
        if stated.sources.get(name) in ("read", "measured") and own.sources.get(name) in ("assumed", "measured")
    }
    if not known:
        return target
    settings = merge(own, settings_from(known, where="the traces", source="read"))
    left_out = tuple(
        text for text in target.context.left_out if "num_gpu_blocks" not in known or _WORKED_OUT not in text
    )
    return replace(target, context=replace(target.context, settings=settings, left_out=left_out))


def _with_hits(
    found: _Found, made: Calibration, tables: DeploymentTables, progress: KeptWarnings
) -> tuple[Calibration, DeploymentTables]:
    """Return the calibration and the tables with all prompts cached, where the steps are too short to have computed
    them.

    Where few are, the smaller error on left-out blocks decides.
    """
    cached = with_prompts_cached(found.target, tables)
    again = calibrate(found.law, law_rows(found.target, cached), found.expected) if cached is not None else None
    if cached is None or again is None:
        return made, tables
    too_short = made.left_out.get(FASTER, 0) - again.left_out.get(FASTER, 0)
    share = too_short / max(too_short + made.rows.rows.height, 1)
    if share <= _TOO_SHORT and again.error_pct >= made.error_pct:
        return made, tables
    progress.warn(
        f"the steps are counted from requests, which do not state prefix-cache hits: {percent(100 * share)} % of them "
        f"are too short to compute the prompts; with all prompts in the cache the law is {percent(again.error_pct)} % "
        f"off, with none {percent(made.error_pct)} %: they are taken as cached"
    )
    return again, cached


def _same_server(one: RunContext, other: RunContext) -> bool:
    if one.architecture is None or one.gpu is None:
        return False
    kinds: tuple[Kind, ...] = ("tensor_parallel", "model", "gpu")
    return all(group_of(one, kind) == group_of(other, kind) for kind in kinds)


def _of_calibration(found: Calibration, drawn_to: Literal["steps", "points"]) -> Iterator[str]:
    """Yield what the steps, or points, of a calibration do not show."""
    rows = found.rows.rows
    if drawn_to == "points":
        yield "points hold no steps with prompts: the cost of a prompt is known only from the mean time between tokens"
    elif not prompts_of(rows).any():
        yield "the steps to calibrate with hold no prompts: what a prompt costs is as transferred"
    if rows["of_num_decode_reqs"].round().n_unique() == 1:
        yield (
            f"the {drawn_to} to calibrate with all have {rows['of_num_decode_reqs'][0]:.0f} decoding requests: how "
            "the time grows with the batch is as transferred"
        )
    if not found.used:
        yield (
            f"the {drawn_to} confirm the transferred law ({percent(found.before.mape_pct)} % off; drawn to them, "
            f"{percent(found.after.mape_pct)} % on left-out blocks of them): it is used unchanged"
        )


def _own_fit(found: _Found, made: Calibration, tables: DeploymentTables, progress: KeptWarnings) -> _Own:
    """Fit the steps to calibrate with by themselves, and compare both on the last part of them, which neither was
    fitted on.
    """
    progress.stage("fitting the calibration's run by itself")
    fitted = fit_deployment(found.target, tables, AUTO, DeploymentOptions(reference=False))
    model = next((m for m in fitted.models if is_step_model(m.name)), None)
    steps = made.rows.rows
    if model is None or fitted.beta_rows is None or steps.height < OWN_STEPS:
        return _Own(fitted)
    later = fitted.beta_rows.filter(split="holdout").filter(pl.col("excluded_reason").is_null())
    keys = ["run_id", "server", "step_id"]
    evaluated = steps.join(later.select(keys), on=keys, how="semi")
    earlier = steps.join(later.select(keys), on=keys, how="anti")
    if not evaluated.height or earlier.height < FEWEST_STEPS:
        return _Own(fitted)
    after = drawn(found.law, earlier).predict(evaluated)
    return _Own(fitted, model.validation.holdout.mape_pct, measure(target_of(evaluated), after).mape_pct)


# -- what is written -------------------------------------------------------------------------------------


def _notes(found: _Found) -> Iterator[str]:
    """Yield what a user has to know about a transfer."""
    if found.own.is_better:
        yield (
            f"an own fit of these steps is better ({percent(found.own.mape_pct)} % on their last part, the calibrated "
            f"law {percent(found.own.after_mape_pct)} %): it is taken instead of the law"
        )
        return
    yield from found.about
    made = found.calibration
    if made is not None and made.used:
        others = f" ({reasons(made.left_out)} left out)" if made.left_out else ""
        yield (
            f"drawn to {made.rows.rows.height:,} {found.drawn_to} of this server{others}: the error on blocks of time "
            f"that were left out was {percent(made.before.mape_pct)} % before, and is {percent(made.after.mape_pct)} %"
        )
    elif found.doubts:
        yield f"untested: {'; '.join(found.doubts)}; the interval is the widest known"
    elif found.across:
        worst = max(found.across, key=lambda one: one.errors.mape_pct or 0.0)
        yield (
            f"what was left out of the sources was at most {percent(worst.errors.mape_pct)} % off on average "
            f"({worst.deployment_id or worst.left_out})"
        )
    if not found.has_prompts:
        yield "no source has steps with prompts: their coefficients are the priors, and TTFT is not planned"
    yield from (text for text in found.target.context.left_out if _WORKED_OUT in text)


def _borrowed(target: Deployment, kind: Kind, chosen: Sequence[LawRows], sources: _Sources) -> tuple[schema.Model, ...]:
    """Return the models of the front end of the nearest source that has them."""
    first = nearest(target.context, chosen)
    names = [target_named(name).model for name in _BORROWED]
    for one in (first, *(s for s in chosen if s is not first)):
        models = sources.models.get(one.deployment_id)
        of_source = models.deployment(one.deployment_id).models if models is not None else {}
        if of_source.keys() & set(names):
            note = f"borrowed from {one.deployment_id}: the front end's work depends on neither model nor GPU"
            return tuple(
                model.model_copy(
                    update={
                        "deployment_id": target.deployment_id,
                        "origin": "transferred",
                        "transfer": schema.Transfer(kind=kind, sources=(one.deployment_id,)),
                        "notes": (*model.notes, note),
                    }
                )
                for name in names
                if (model := of_source.get(name)) is not None
            )
    return ()


def _written(out: Path, found: _Found, progress: KeptWarnings) -> TransferResult:
    """Publish a transfer, and return it."""
    target, context = found.target, found.target.context
    gpu = context.gpu.name if context.gpu else None
    made_by = publish.provenance({"command": "transfer", "kind": found.kind, "gpu": gpu}, files={})
    notes = tuple(_notes(found))
    own_alpha, own_step = _own_models(found.own, made_by)
    own_names = {model.name for model in own_alpha}
    alpha = (*own_alpha, *(m for m in found.alpha if m.name not in own_names))
    step = _step_model(found, own_step, notes)
    missing = _missing(target.deployment_id, alpha)
    files = {
        "alpha": CoefficientFile(kind="alpha", models=alpha, not_fitted=missing, provenance=made_by),
        "beta": CoefficientFile(kind="beta", models=(step,), provenance=made_by),
    }
    evaluation = _evaluation(found, step, alpha, missing, notes)
    (alpha_text, alpha_file), (beta_text, beta_file) = published(files["alpha"]), published(files["beta"])
    evaluation_text, rounded = published(evaluation)
    texts = {
        out / "alpha.json": alpha_text,
        out / "beta.json": beta_text,
        out / "evaluation.json": evaluation_text,
        out / SERVER_FILE: server_text(context),
    }
    progress.stage("drawing the report")
    texts |= report_texts(report_of(rounded, alpha_file, beta_file, None), out, progress)
    write_files(texts)
    return _result(out, found, step, alpha, notes, (tuple(texts), tuple(progress.warnings)))


def _evaluation(
    found: _Found,
    step: schema.Model,
    alpha: Sequence[schema.Model],
    missing: Sequence[schema.NotFitted],
    notes: tuple[str, ...],
) -> Evaluation:
    """Return the evaluation of a transfer, or of an own fit that is taken instead, with the models that it borrows."""
    fitted = found.own.fitted
    if fitted is None or not found.own.is_better:
        lost = tuple(Missing(one.name, one.reason, one.remedy) for one in missing)
        return evaluation_of(found.target.deployment_id, step, alpha, found.across, lost, notes)
    evaluation = publish.evaluate([fitted], fitted.tables.runs)
    (entry,) = evaluation.deployments
    models = {model.name: model.validation for model in alpha if model.validation is not None} | entry.models
    changed = {
        "models": models,
        "verdicts": verdicts_of(models, Measurements(fitted.summed)),
        "not_fitted": tuple(one for one in entry.not_fitted if one.name not in models),
        "notes": (*entry.notes, *notes),
    }
    return evaluation.model_copy(update={"deployments": (entry.model_copy(update=changed),)})


def _own_models(own: _Own, made_by: Provenance) -> tuple[tuple[schema.Model, ...], schema.Model | None]:
    """Return the models of requests of an own fit, and that of step times."""
    if own.fitted is None:
        return (), None
    alpha, beta, _ = publish.coefficient_files([own.fitted], made_by)
    return alpha.models, next((m for m in beta.models if is_step_model(m.name)), None)


def _step_model(found: _Found, own: schema.Model | None, notes: tuple[str, ...]) -> schema.Model:
    """Return the model of step times: the law, or the own fit where that is better."""
    made, fitted = found.calibration, found.own.fitted
    law, expected = (found.law, found.expected) if made is None else (made.law, made.errors)
    facts = None
    if made is not None:
        facts = schema.CalibrationFacts(
            runs=tuple(sorted(made.rows.rows["run_id"].unique())),
            steps=made.rows.rows.height,
            left_out=made.left_out,
            used=made.used,
            before=made.before,
            after=made.after,
            own_mape_pct=found.own.mape_pct,
            own_after_mape_pct=found.own.after_mape_pct,
        )
    transfer = schema.Transfer(
        kind=found.kind,
        sources=found.sources,
        prior_sources=found.prior_sources,
        law=law_coefficients(law, found.left_out),
        folds=expected.folds,
        p90_ape_pct=dict(expected.p90_ape_pct),
        sd_pct=100 * math.expm1(expected.sd_log),
        coverage_pct=coverage_pct(found.across),
        tested=not found.doubts or made is not None,
        has_prompts=found.has_prompts,
        calibration=facts,
    )
    if own is not None and found.own.is_better:
        # The errors of its hold-out are its own: those of the transfer are for comparison.
        return own.model_copy(update={"notes": (*own.notes, *notes)})
    step = next((m for m in fitted.models if is_step_model(m.name)), None) if fitted else None
    return step_model(
        found.target,
        law,
        [*found.reach, *([made.rows] if made else [])],
        transfer,
        validation_of(law, found.across, made),
        training=publish.training_of(fitted, step.fitted) if fitted is not None and step is not None else None,
        notes=notes,
    )


def _missing(deployment_id: str, alpha: Sequence[schema.Model]) -> tuple[schema.NotFitted, ...]:
    names = {model.name for model in alpha}
    return tuple(
        schema.NotFitted(
            name=target_named(name).model,
            deployment_id=deployment_id,
            reason="no source has a model of it",
            remedy="give a source whose requests are traced",
        )
        for name in _BORROWED
        if target_named(name).model not in names
    )


def _own_errors(sources: _Sources, chosen: Sequence[LawRows]) -> dict[str, Metrics]:
    """Return the errors of each source's own model of step times."""
    errors: dict[str, Metrics] = {}
    for one in chosen:
        models = sources.models.get(one.deployment_id)
        model = models.deployment(one.deployment_id).models.get(CYCLE_TIME.model) if models else None
        if model is not None and model.validation is not None:
            errors[one.deployment_id] = model.validation.holdout
    return errors


def _result(
    out: Path,
    found: _Found,
    step: schema.Model,
    alpha: Sequence[schema.Model],
    notes: tuple[str, ...],
    written: tuple[tuple[Path, ...], tuple[str, ...]],
) -> TransferResult:
    transfer = step.transfer
    limits = transfer.p90_ape_pct if transfer else {}
    return TransferResult(
        out=out,
        deployment_id=found.target.deployment_id,
        origin=step.origin,
        kind=found.kind,
        sources=found.sources,
        prior_sources=found.prior_sources,
        tested=transfer.tested if transfer else True,
        p90_ape_pct={phase: limits[phase] for phase in PHASES if phase in limits},
        law=tuple(
            LawPart(c.feature, c.unit, c.value, c.low, c.high, c.prior, c.left_out_range)
            for c in (transfer.law if transfer else ())
        ),
        left_out=tuple(
            LeftOutSource(
                one.left_out,
                one.deployment_id or "",
                one.errors.mape_pct,
                one.by_phase[PROMPTS].mape_pct if PROMPTS in one.by_phase else None,
                one.nearest.mape_pct if one.nearest else None,
                one.roofline.mape_pct if one.roofline else None,
                one.own.mape_pct if one.own else None,
                one.interval_coverage_pct,
            )
            for one in found.across
        ),
        borrowed=tuple(m.name for m in alpha if m.origin == "transferred"),
        notes=notes,
        files=written[0],
        warnings=written[1],
    )
