"""Train: fit the models of every deployment in the tables; write coefficient files, evaluation and report. `run`
ingests first.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tracefit import memory
from tracefit.coefficients import publish
from tracefit.coefficients.files import published
from tracefit.coefficients.models import Models
from tracefit.coefficients.verdicts import override
from tracefit.commands.deployments import write_timelines
from tracefit.commands.fitting import choose_runs, deployment_options, fit_runs, some_runs
from tracefit.commands.ingest import ingest_and_hold
from tracefit.commands.locate import find_tables
from tracefit.commands.recorded import recorded_load
from tracefit.commands.replay import replay_all
from tracefit.commands.report import report_of, report_texts
from tracefit.commands.requests import served
from tracefit.commands.train_result import train_result
from tracefit.commands.training_tables import sample_tables, write_training_frames
from tracefit.engines.local import open_engine
from tracefit.engines.training import BYTES_PER_JOB
from tracefit.errors import DataError
from tracefit.features.sets import is_feature_file
from tracefit.fit.deployments import fit_across
from tracefit.inputs.buckets import location_of
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
)
from tracefit.progress import KeptWarnings, Progress
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.server.documents import read_bytes
from tracefit.tables.disk import disk_errors, write_files
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from tracefit.coefficients.documents import CoefficientFile, Evaluation
    from tracefit.coefficients.verdicts import Threshold
    from tracefit.commands.fitting import ChosenRuns
    from tracefit.commands.plan import Rates
    from tracefit.fit.fitted import FittedDeployment
    from tracefit.options import IngestOptions
    from tracefit.results.replays import RunReplay
    from tracefit.tables.store import Manifest


_NOT_FITTED = ("sample_csv", "thresholds")
_COEFFICIENT_FILES = ("alpha.json", "beta.json")


class _Training(msgspec.Struct, frozen=True):
    """One training: what it reads, how it works, and where its files go.

    Attributes:
        store: The tables.
        where: Their name for the user.
        options: How to train.
        thresholds: Requirements of each use.
        models: Folder for the coefficient files.
        report: Folder for the evaluation and the report.
        progress: Receives reports, and keeps the warnings for the result.
    """

    store: TableStore
    where: str
    options: TrainOptions
    thresholds: tuple[Threshold, ...]
    models: Path
    report: Path
    progress: KeptWarnings


class _Coefficients(msgspec.Struct, frozen=True):
    """The coefficient files of a training.

    Attributes:
        alpha: Models of requests, as they were fitted.
        predicted: Deployment to its requests with predictions by the files.
        texts: Name of each file to its content.
        rounded: The same files with the digits that are written.
    """

    alpha: CoefficientFile
    predicted: Mapping[str, pl.DataFrame]
    texts: Mapping[str, str]
    rounded: tuple[CoefficientFile, CoefficientFile]


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

    On disk, the tables are locked meanwhile: another process that writes there waits. In a bucket, the training is
    refused if another process changes one of its runs meanwhile.

    Args:
        tables: A folder that `ingest` or `run` wrote, or its URL; the training frames are added to its tables.
        out: Folder for alpha.json and beta.json, or an `s3://` or `gs://` URL.
        options: How to train.
        report_folder: Folder for evaluation.json and report.md; `out` if not given.
        run_ids: Runs to train on; every run in the tables if not given.
        workers: Most processes that make the frames of runs; one per core if not given.
        engine: Where these processes run: on this machine, or on Ray. The coefficients are fitted on this machine and
            do not depend on it.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A folder is not valid, or another process has changed a run in a bucket.
        DataError: No model can be fitted. Only the report is written, and only if no models of an earlier training are
            there.

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
    training = _Training(
        store, str(tables), options, thresholds, location_of(out), location_of(report_folder or out), progress
    )
    with ExitStack() as held:
        # To the end: frames, models and report are of the tables that were read.
        with disk_errors(store.root):
            held.enter_context(store.lock(progress))
        return _trained(training, run_ids, engine, workers)


def _trained(
    training: _Training, run_ids: Sequence[str] | None, engine: EngineChoice, workers: int | None
) -> TrainResult:
    """Fit, evaluate and write; see `train`. The tables are locked."""
    chosen = choose_runs(training.store, run_ids, training.progress)
    deployments, read = _fitted(training, chosen, engine, workers)
    nothing = _nothing_fitted(deployments, training.where)
    # A failed training leaves the models and the report of an earlier one as they were.
    if nothing and any((training.models / name).exists() for name in _COEFFICIENT_FILES):
        raise nothing
    coefficients = _coefficients(deployments, training.options)
    evaluation = _evaluated(training, chosen.runs, deployments, coefficients)
    evaluation_text, rounded = published(evaluation)
    texts = {training.models / name: text for name, text in coefficients.texts.items()}
    texts[training.report / "evaluation.json"] = evaluation_text
    if training.options.sample_csv:
        texts |= {training.models / name: text for name, text in sample_tables(deployments).items()}
    write_training_frames(training.store, deployments, read)
    result = train_result(
        deployments,
        chosen.runs,
        evaluation,
        models=training.models,
        report=training.report,
        tables=training.store.root,
    )
    # The report is drawn from the written tables: the frames of the fits are not kept in memory meanwhile.
    del deployments
    memory.trim()
    drawn = _drawn(training, rounded, coefficients)
    if nothing:
        write_files(drawn)
        hint = "; ".join(filter(None, (nothing.hint, f"{[*drawn][-1]} says what the server did")))
        raise DataError(nothing.what, where=nothing.where, hint=hint)
    texts |= drawn
    write_files(texts)
    return replace(result, files=tuple(texts), warnings=tuple(training.progress.warnings))


def _fitted(
    training: _Training, chosen: ChosenRuns, engine: EngineChoice, workers: int | None
) -> tuple[list[FittedDeployment], Manifest]:
    """Return the fitted deployments, and the manifest of the tables that they were fitted on."""
    store, runs = training.store, chosen.runs
    with open_engine(engine, workers) as workplace:
        workplace.check(store.root.absolute() / "runs" if store.storage.has_lock else None)
        workplace.limit(max(1, int(runs.unique("run_id", keep="first")["bytes"].sum()) // BYTES_PER_JOB))
        write_timelines(store, runs["run_id"].unique(maintain_order=True), workplace)
        read = store.manifest()
        fitted = fit_runs(store, runs, training.options, training.progress, workplace)
    return [
        msgspec.structs.replace(one, notes=(*one.notes, *chosen.notes.get(one.deployment.deployment_id, ())))
        for one in fitted
    ], read


def _coefficients(deployments: Sequence[FittedDeployment], options: TrainOptions) -> _Coefficients:
    made_by = publish.provenance(
        # A refit does not need the options of sample tables and verdicts: they do not change the fit.
        {name: getattr(options, name) for name in TrainOptions.__slots__ if name not in _NOT_FITTED},
        files=_named_files(options),
    )
    alpha, beta, predicted = publish.coefficient_files(deployments, made_by)
    texts, rounded = zip(*(published(file) for file in (alpha, beta)), strict=True)
    return _Coefficients(alpha, predicted, dict(zip(_COEFFICIENT_FILES, texts, strict=True)), rounded)


def _evaluated(
    training: _Training,
    runs: pl.DataFrame,
    deployments: Sequence[FittedDeployment],
    coefficients: _Coefficients,
) -> Evaluation:
    """Measure the models on what was left out, and on replays of the runs with the published files."""
    store, options, progress = training.store, training.options, training.progress
    if options.across:
        progress.stage("leaving out runs, models and GPUs")
    across = fit_across(deployments, deployment_options(options)) if options.across else None
    models = Models(coefficients.rounded)
    progress.stage("replaying the held-out part of each run")
    trained = [run for one in deployments for run in publish.runs_of(one)]
    replays = replay_all(store, models, trained)
    rates = {} if options.fast else _rates(store, models, replays)
    for _ in deployments:
        progress.finish_part()
    work = served(store, trained)
    operations = {}
    for one in deployments:
        own, rate = publish.runs_of(one), rates.get(one.deployment.deployment_id)
        operations[one.deployment.deployment_id] = publish.Operation(
            replays=tuple(replay for replay in replays if replay.run_id in own),
            served=tuple(group for group in work if group.name in own),
            load=recorded_load(store, own),
            capacity=rate.capacity if rate else None,
            rates=rate.points if rate else (),
        )
    return publish.evaluate(
        deployments,
        runs,
        across,
        requests=coefficients.alpha.requests,
        predicted=coefficients.predicted,
        operations=operations,
        thresholds=training.thresholds,
    )


def _rates(store: TableStore, models: Models, replays: Sequence[RunReplay]) -> Mapping[str, Rates]:
    from tracefit.commands.plan import rates_of  # noqa: PLC0415 - a fast training plans nothing

    return rates_of(store, models, replays)


def _drawn(training: _Training, evaluation: Evaluation, coefficients: _Coefficients) -> dict[Path, str]:
    """Return the files of the report."""
    training.progress.stage("drawing the report")
    # From the files' own numbers, so that `report` makes the same one later.
    made = report_of(evaluation, *coefficients.rounded, training.store)
    return report_texts(made, training.report, training.progress)


def _named_files(options: TrainOptions) -> dict[str, str]:
    if not is_feature_file(options.features):
        return {}
    # `verify` refits with the file of this name: the hash shows whether its content is still the same.
    return {"features": hashlib.sha256(read_bytes(Path(options.features))).hexdigest()}


def _nothing_fitted(deployments: Sequence[FittedDeployment], where: str) -> DataError | None:
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
    out = location_of(out)
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
                f"{out / 'tables'} also has {some_runs(earlier)} of an earlier command; models and report are only of "
                f"{some_runs(run_ids)} (`tracefit train {out} {flag_of(TrainOutOption)} MODELS` trains on all runs)"
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
