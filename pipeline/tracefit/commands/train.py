"""Train: fit the models of every deployment in the tables; write coefficient files, evaluation and report. `run` ingests first."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracefit import memory
from tracefit.coefficients import publish
from tracefit.coefficients.files import published
from tracefit.coefficients.models import Models
from tracefit.coefficients.verdicts import override
from tracefit.commands.deployments import (
    MOST_ROWS,
    MOST_RUNS,
    deployments_of,
    sample_runs,
    sampling_note,
    write_timelines,
)
from tracefit.commands.ingest import ingest_and_hold
from tracefit.commands.locate import find_tables
from tracefit.commands.recorded import recorded_load
from tracefit.commands.replay import replay_all
from tracefit.commands.report import report_of, report_texts
from tracefit.commands.requests import served
from tracefit.commands.training_tables import sample_tables, write_training_frames
from tracefit.engines.local import LocalEngine, open_engine
from tracefit.engines.training import BYTES_PER_JOB, deployment_tables, each_run, frames_of
from tracefit.errors import DataError, UsageError
from tracefit.features.sets import feature_sets, is_feature_file
from tracefit.features.training import TOO_FAST
from tracefit.fit.deployments import fit_across, fit_deployment, with_seen_limits
from tracefit.fit.fitted import DeploymentOptions
from tracefit.fit.load import runs_to_fit
from tracefit.fit.splits import is_excluded, of_means
from tracefit.inputs.buckets import place_of
from tracefit.models.targets import LATENCIES, is_step_model
from tracefit.models.validation import is_negligible_wait
from tracefit.options import (
    LOCAL,
    EngineChoice,
    PathsArgument,
    RunOutOption,
    ServerOptions,
    TablesArgument,
    TrainOptions,
    TrainOutOption,
    WorkersOption,
    flag_of,
    named,
)
from tracefit.progress import KeptWarnings, Progress
from tracefit.reports.facts import overloaded
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.results.models import (
    DeploymentSummary,
    LatencySummary,
    MissingModels,
    ModelSummary,
)
from tracefit.server.documents import read_bytes
from tracefit.tables.disk import disk_errors, write_files
from tracefit.tables.runs import find_overlaps
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.coefficients.documents import DeploymentEvaluation, Evaluation
    from tracefit.coefficients.verdicts import Threshold
    from tracefit.commands.plan import Rates
    from tracefit.engines.jobs import TaskEngine
    from tracefit.fit.fitted import FittedDeployment, FittedModel
    from tracefit.fit.results import Latency
    from tracefit.models.validation import Metrics
    from tracefit.options import IngestOptions
    from tracefit.results.replays import RunReplay


_NAMED_RUNS = 3
_NOT_FITTED = ("sample_csv", "thresholds")


def train(
    tables: TablesArgument,
    out: TrainOutOption,
    *,
    options: TrainOptions | None = None,
    report_folder: str | Path | None = None,
    run_ids: Sequence[str] | None = None,
    workers: WorkersOption = None,
    engine: EngineChoice = LOCAL,
    progress: Progress | None = None,
) -> TrainResult:
    """Fit every deployment in the tables and write models, evaluation and report.

    On disk, the tables are locked meanwhile: another process that writes there waits. In a bucket, the training is refused if
    another process changes one of its runs meanwhile.

    Args:
        tables: A folder that `ingest` or `run` wrote, or its URL; the training frames are added to its tables.
        out: Folder for alpha.json and beta.json, or an `s3://` or `gs://` URL.
        options: How to train.
        report_folder: Folder for evaluation.json and report.md; `out` if not given.
        run_ids: Runs to train on; every run in the tables if not given.
        workers: Most processes that make the frames of runs; one per core if not given.
        engine: Where these processes run: on this machine, or on Ray. The coefficients are fitted on this machine and do not depend on it.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A folder is not valid, or another process has changed a run in a bucket.
        DataError: No model can be fitted. Only the report is written, and only if no models of an earlier training are there.

    Examples:
        >>> import tracefit
        >>> fast = tracefit.TrainOptions(fast=True, features="batch")
        >>> result = tracefit.train("out/tables/", "models/", options=fast)
        >>> [path.name for path in result.files][:2]
        ['alpha.json', 'beta.json']
    """
    options = options or TrainOptions()
    # Read before a fit of minutes, used after it.
    thresholds = override(options.thresholds)
    progress = KeptWarnings(progress)
    store = TableStore(find_tables(tables)).require()
    with ExitStack() as held:
        # To the end: frames, models and report are of the tables that were read.
        with disk_errors(store.root):
            held.enter_context(store.lock(progress))
        return _trained(
            store,
            out,
            options,
            report_folder=report_folder,
            run_ids=run_ids,
            workers=workers,
            engine=engine,
            progress=progress,
            thresholds=thresholds,
            where=str(tables),
        )


def _trained(
    store: TableStore,
    out: str | Path,
    options: TrainOptions,
    *,
    report_folder: str | Path | None,
    run_ids: Sequence[str] | None,
    workers: int | None,
    engine: EngineChoice,
    progress: KeptWarnings,
    thresholds: tuple[Threshold, ...],
    where: str,
) -> TrainResult:
    """Fit, and write; see `train`. The tables are locked."""
    runs = store.read("runs", None if run_ids is None else list(run_ids))
    runs, notes = _sampled(store, runs, progress)
    overlaps = find_overlaps(store, runs)
    for one in overlaps:
        progress.warn(
            f"run {one.run_id}: {one.spans:,} of its spans are in run {one.other} too; it is left out of training, for "
            "they would count twice"
        )
    # Two servers that write to one collector file, or a file copied into a second folder, give the same spans twice.
    runs = runs.filter(~pl.col("run_id").is_in([one.run_id for one in overlaps]))
    # Their features are fewer, and their settings are vLLM's defaults.
    bare = runs.filter(pl.all_horizontal(pl.col("model_config", "gpu", "model").is_null()))
    if bare.height:
        run_config, model_config, gpu = (
            named(ServerOptions, name) for name in ("run_config", "model_config", "gpu")
        )
        progress.warn(
            f"{', '.join(bare['run_id'].unique().sort())}: no server configuration was found, so hardware and model features "
            f"are left out and settings are assumed; name it with {run_config} (or {model_config}) and {gpu}"
        )
    with open_engine(engine, workers) as workplace:
        workplace.check(store.root.absolute() / "runs" if store.place.has_lock else None)
        workplace.limit(max(1, int(runs.unique("run_id", keep="first")["bytes"].sum()) // BYTES_PER_JOB))
        write_timelines(store, runs["run_id"].unique(maintain_order=True), workplace)
        read = store.manifest()
        deployments = [
            replace(fitted, notes=(*fitted.notes, *notes.get(fitted.deployment.deployment_id, ())))
            for fitted in fit_runs(store, runs, options, progress, workplace)
        ]
    models, report = place_of(out), place_of(report_folder or out)
    nothing = _nothing_fitted(deployments, where)
    # A failed training leaves the models and the report of an earlier one as they were.
    if nothing and any((models / name).exists() for name in ("alpha.json", "beta.json")):
        raise nothing
    made_by = publish.provenance(
        # A refit does not need the options of sample tables and verdicts: they do not change the fit.
        {name: getattr(options, name) for name in TrainOptions.__slots__ if name not in _NOT_FITTED},
        files=_named_files(options),
    )
    alpha, beta, predicted = publish.coefficient_files(deployments, made_by)
    if options.across:
        progress.stage("leaving out runs, models and GPUs")
    across = fit_across(deployments, deployment_options(options)) if options.across else None
    (alpha_text, rounded_alpha), (beta_text, rounded_beta) = published(alpha), published(beta)
    fitted_models = Models((rounded_alpha, rounded_beta))
    progress.stage("replaying the held-out part of each run")
    trained = [r for s in deployments for r in publish.runs_of(s)]
    replays = replay_all(store, fitted_models, trained)
    rates = {} if options.fast else _rates(store, fitted_models, replays)
    for _ in deployments:
        progress.finish_part()
    evaluation = publish.evaluate(
        deployments,
        runs,
        across,
        requests=alpha.requests,
        predicted=predicted,
        replays=replays,
        served=served(store, trained),
        loads={s.deployment.deployment_id: recorded_load(store, publish.runs_of(s)) for s in deployments},
        rates={name: one.points for name, one in rates.items()},
        capacities={name: one.capacity for name, one in rates.items()},
        thresholds=thresholds,
    )
    evaluation_text, rounded = published(evaluation)
    texts = {
        models / "alpha.json": alpha_text,
        models / "beta.json": beta_text,
        report / "evaluation.json": evaluation_text,
    }
    if options.sample_csv:
        texts.update({models / name: text for name, text in sample_tables(deployments).items()})
    write_training_frames(store, deployments, read)
    result = _result(deployments, runs, evaluation, out=models, report=report, tables=store.root)
    # The report is drawn from the written tables: the frames of the fits are not kept in memory meanwhile.
    del deployments
    memory.trim()
    progress.stage("drawing the report")
    # From the files' own numbers, so that `report` makes the same one later.
    drawn = report_texts(report_of(rounded, rounded_alpha, rounded_beta, store), report, progress)
    if nothing:
        write_files(drawn)
        hint = "; ".join(filter(None, (nothing.hint, f"{[*drawn][-1]} says what the server did")))
        raise DataError(nothing.what, where=nothing.where, hint=hint)
    texts |= drawn
    write_files(texts)
    return replace(result, files=tuple(texts), warnings=tuple(progress.warnings))


def _rates(store: TableStore, models: Models, replays: Sequence[RunReplay]) -> Mapping[str, Rates]:
    from tracefit.commands.plan import rates_of  # noqa: PLC0415 - a fast training plans nothing

    return rates_of(store, models, replays)


def _missing(deployment: FittedDeployment) -> Iterator[MissingModels]:
    """Yield the models that are missing, those of one reason together."""
    together: dict[tuple[str, str | None], list[str]] = {}
    for one in deployment.missing:
        together.setdefault((one.reason, one.remedy), []).append(one.name)
    for (reason, remedy), names in together.items():
        yield MissingModels(deployment.deployment.deployment_id, tuple(names), reason, remedy)


def _result(
    deployments: list[FittedDeployment],
    runs: pl.DataFrame,
    evaluation: Evaluation,
    *,
    out: Path,
    report: Path,
    tables: Path,
) -> TrainResult:
    return TrainResult(
        models=out,
        files=(),
        evaluation=report / "evaluation.json",
        report=report / "report.md",
        fitted=tuple(_summary(s, m) for s in deployments for m in s.models),
        verdicts=evaluation.answers,
        reasons=evaluation.first_reasons,
        not_fitted=tuple(missing for each in deployments for missing in _missing(each)),
        latencies=tuple(
            _latency_summary(s.deployment_id, name, latency)
            for s in evaluation.deployments
            for name, latency in s.latency.items()
            # The other latencies are in the report: the summary names those that users know.
            if name in LATENCIES
        ),
        quarantined=bool(
            runs.select(pl.sum("rejects", "dropped_events", "duplicate_spans")).sum_horizontal()[0]
            or evaluation.ingest.implausible
            or any(map(_has_many_too_fast, evaluation.deployments))
        ),
        served=tuple(run for s in evaluation.deployments for run in s.served),
        replays=tuple(one for s in evaluation.deployments for one in s.replays),
        deployments=tuple(
            DeploymentSummary(
                s.deployment.deployment_id,
                publish.runs_of(s),
                {name: str(value) for name, value in s.deployment.context.settings.values().items()},
            )
            for s in deployments
        ),
        tables=tables,
    )


_FEW_TOO_FAST = 0.01
"""Share of steps faster than the GPU up to which they are only counted: a stamp may be late now and then."""


def _has_many_too_fast(deployment: DeploymentEvaluation) -> bool:
    """Return whether more than a few of the step times are faster than the GPU."""
    of_steps = [rows for rows in deployment.rows if is_step_model(rows.model)]
    everything = sum(rows.trained + rows.held_out + sum(rows.left_out.values()) for rows in of_steps)
    return sum(rows.left_out.get(TOO_FAST, 0) for rows in of_steps) > _FEW_TOO_FAST * everything


_PARTS = 2
"""Parts of the work on a deployment that take about as long: its fits, and its replays with the page."""


def fit_runs(
    store: TableStore,
    runs: pl.DataFrame,
    options: TrainOptions,
    progress: Progress,
    engine: TaskEngine | None = None,
) -> list[FittedDeployment]:
    """Fit every deployment of some runs, rows of the `runs` table; `engine` makes the frames of each, this process if not given."""
    engine = engine or LocalEngine(1)
    write_timelines(store, runs["run_id"].unique(maintain_order=True), engine)
    sets = feature_sets(options.features)
    how = deployment_options(options)
    deployments = []
    grouped = deployments_of(runs, str(store.root))
    progress.expect_parts(_PARTS * len(grouped))
    for deployment, members in grouped:
        progress.stage(f"fitting {deployment.deployment_id} ({_some(members)})")
        frames = dict(each_run(engine, frames_of, store, members))
        overloads = tuple(filter(None, (frames[run_id].overload for run_id in members)))
        kept, overloads = runs_to_fit(members, overloads, include=options.include_overloaded)
        for one in overloads:
            progress.warn(overloaded(one, named(TrainOptions, "include_overloaded")).line)
        tables = deployment_tables([frames[run_id].tables for run_id in sorted(kept)])
        frames.clear()
        # Memory that the frames took would add to the peak of the fits.
        memory.trim()
        seen, contradictions = with_seen_limits(deployment, tables.timeline)
        for text in contradictions:
            progress.warn(f"{deployment.deployment_id}: {text}")
        fitted = replace(fit_deployment(seen, tables, sets, how), overloads=overloads)
        deployments.append(fitted)
        progress.finish_part()
        rows = fitted.beta_rows
        count = 0 if rows is None else rows.filter(is_excluded([TOO_FAST])).height
        if rows is not None and count > _FEW_TOO_FAST * rows.height:
            progress.warn(
                f"{deployment.deployment_id}: {count:,} of {rows.height:,} step times are shorter than the rated speed of "
                f"{deployment.context.gpu.name if deployment.context.gpu else 'the GPU'} allows, and are left out ({TOO_FAST}); check model, GPU and "
                "tensor_parallel"
            )
    return deployments


def _sampled(
    store: TableStore, runs: pl.DataFrame, progress: Progress
) -> tuple[pl.DataFrame, dict[str, tuple[str, ...]]]:
    """Return the rows of the runs to train on, and a note for each deployment with some left out."""
    sampled: list[str] = []
    notes: dict[str, tuple[str, ...]] = {}
    for deployment, members in deployments_of(runs, str(store.root)):
        chosen = sample_runs(runs, members, most_rows=MOST_ROWS, most_runs=MOST_RUNS)
        sampled += chosen
        if len(chosen) < len(members):
            note = sampling_note(len(chosen), len(members))
            notes[deployment.deployment_id] = (note,)
            progress.warn(f"{deployment.deployment_id}: {note}")
    return runs.filter(pl.col("run_id").is_in(sampled)), notes


def _named_files(options: TrainOptions) -> dict[str, str]:
    if not is_feature_file(options.features):
        return {}
    # `verify` refits with the file of this name: the hash shows whether its content is still the same.
    return {"features": hashlib.sha256(read_bytes(Path(options.features))).hexdigest()}


def deployment_options(options: TrainOptions) -> DeploymentOptions:
    """Return the options of training that the fits need."""
    if options.positive and options.any_sign:
        raise UsageError(
            f"{named(TrainOptions, 'positive')} and {named(TrainOptions, 'any_sign')} contradict each other",
            hint="give one of them",
        )
    return DeploymentOptions(
        options.beta_target, positive=options.positive, any_sign=options.any_sign, reference=not options.fast
    )


def _some(run_ids: list[str]) -> str:
    rest = len(run_ids) - _NAMED_RUNS
    return ", ".join(run_ids[:_NAMED_RUNS]) + (f" and {rest} more" if rest > 0 else "")


def _nothing_fitted(deployments: list[FittedDeployment], where: str) -> DataError | None:
    """Return why there is not a single model; null where there is one."""
    if any(s.models for s in deployments):
        return None
    by_reason: dict[str, dict[str, None]] = {}
    for m in (m for s in deployments for m in s.missing):
        by_reason.setdefault(m.reason, {})[m.name] = None
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    remedies = dict.fromkeys(m.remedy for s in deployments for m in s.missing if m.remedy)
    what = f"nothing can be fitted: {'; '.join(reasons)}"
    return DataError(what, where=where, hint="; ".join(remedies) or None)


def _summary(deployment: FittedDeployment, model: FittedModel) -> ModelSummary:
    v = model.validation
    parts = {"holdout": v.holdout, "baseline": v.baseline, "reference": v.gradient_boosting}
    return ModelSummary(
        name=model.name,
        deployment_id=deployment.deployment.deployment_id,
        skill=v.skill,
        rows_used=model.fitted.rows_used,
        rows_holdout=model.fitted.rows_holdout,
        of_means=of_means(v),
        is_negligible=is_negligible_wait(model.name, v),
        **_numbers(ModelSummary, parts),
    )


def _latency_summary(deployment_id: str, name: str, latency: Latency) -> LatencySummary:
    ways = ("predicted", "baseline", "gradient_boosting", "given_measured_state")
    requests = latency.predicted.n or latency.given_measured_state.n
    numbers = _numbers(LatencySummary, {way: getattr(latency, way) for way in ways})
    return LatencySummary(name, deployment_id, requests, **numbers)


def _numbers(
    summary: type[ModelSummary | LatencySummary], parts: Mapping[str, Metrics | None]
) -> dict[str, float | None]:
    """Return the fields of a summary that are numbers of its parts: `holdout_mae` is the `mae` of `holdout`."""
    return {
        field.name: None if metrics is None else getattr(metrics, field.name.removeprefix(f"{part}_"))
        for part, metrics in parts.items()
        for field in fields(summary)
        if field.name.startswith(f"{part}_")
    }


def run(
    paths: PathsArgument,
    out: RunOutOption,
    *,
    server: ServerOptions | None = None,
    ingest_options: IngestOptions | None = None,
    options: TrainOptions | None = None,
    workers: WorkersOption = None,
    engine: EngineChoice = LOCAL,
    progress: Progress | None = None,
) -> RunResult:
    """Ingest traces and train on them: OUT/tables, OUT/models, OUT/evaluation.json, OUT/report.md.

    A second job with the same folder on disk waits until all of this is written.

    Args:
        paths: One path or several: run folders, folders of run folders, or trace files.
        out: Folder for all output, or its `s3://` or `gs://` URL.
        server: Facts about the server in addition to the run's files.
        ingest_options: Which parts of the traces to keep.
        options: How to train.
        workers: Most processes to use; one per core if not given.
        engine: Where these processes run; see `ingest` and `train`.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a file or an option is wrong.
        DataError: The traces cannot support any model; see `train`.

    Examples:
        >>> import tracefit
        >>> fast = tracefit.TrainOptions(fast=True, features="batch")
        >>> result = tracefit.run("runs/", "out/", options=fast)
        >>> [model.name for model in result.trained.fitted]
        ['beta.cycle_time', 'alpha.queue_wait', 'alpha.admission', 'alpha.departure']
        >>> result.models.filter(model="beta.cycle_time")["term"].to_list()[:2]
        ['intercept', 'prefill_tokens']
        >>> result.evaluation.filter(name="beta.cycle_time")["holdout_mdape_pct"].item() < 5
        True
    """
    out = place_of(out)
    # One after the other, in one hold of the tables: another job in between would leave models of its tables here.
    with ExitStack() as held:
        ingested = ingest_and_hold(
            paths,
            out / "tables",
            held,
            server,
            ingest_options,
            engine=open_engine(engine, workers),
            progress=progress,
        )
        # Memory freed by ingestion would add to the peak of training.
        memory.trim()
        # The folder may hold runs of earlier jobs: train on those of this one only.
        run_ids = [r.run_id for r in ingested.runs]
        kept = KeptWarnings(progress)
        if earlier := sorted({*TableStore(out / "tables").runs()} - {*run_ids}):
            kept.warn(
                f"{out / 'tables'} also has {_some(earlier)} of an earlier command; models and report are only of "
                f"{_some(run_ids)} (`tracefit train {out} {flag_of(TrainOutOption)} MODELS` trains on all runs)"
            )
        trained = train(
            out / "tables",
            out / "models",
            options=options,
            report_folder=out,
            run_ids=run_ids,
            workers=workers,
            engine=engine,
            progress=progress,
        )
    return RunResult(ingested, replace(trained, warnings=(*kept.warnings, *trained.warnings)), out)
