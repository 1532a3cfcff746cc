"""Publish fitted deployments: as coefficient files, and as the evaluation of everything that was measured.

The results of the fit (`fit.fitted`, `fit.results`) become the published types of `model`; nothing is fitted
here. Only the ranges in alpha.json are measured here, because they compare traced requests with predictions
by the finished files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import polars as pl

from tracefit._version import __version__
from tracefit.coefficients import documents, verdicts
from tracefit.coefficients.models import Models
from tracefit.coefficients.recording import to_record
from tracefit.coefficients.request_ranges import (
    described_requests,
    input_ranges,
    predicted_requests,
    request_ranges,
    workload_of,
)
from tracefit.features.training import definitions
from tracefit.fit.estimators import HUBER_SD
from tracefit.fit.fitted import missing_attributes
from tracefit.fit.latency import latency_errors, split_requests, trained_steps
from tracefit.fit.splits import counted_rows, evaluation_rows
from tracefit.models import schema
from tracefit.models.schema import Number, Term
from tracefit.statistics import mean_of
from tracefit.tables.schema import SERVER
from tracefit.tables.sources import ADJACENT, is_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.fit.fitted import FittedBoundary, FittedDeployment, FittedModel, FittedRegime, LinearFit
    from tracefit.fit.results import AcrossResult
    from tracefit.models.validation import Metrics
    from tracefit.results.plans import PlanPoint, ServerCapacity
    from tracefit.results.replays import RunReplay
    from tracefit.results.requests import RecordedLoad, RequestGroup
    from tracefit.server.documents import Scalar

_LIBRARIES = ("numpy", "polars", "pyarrow")


def provenance(options: dict[str, Scalar], files: dict[str, str]) -> documents.Provenance:
    """Return which program makes the files, with which libraries and options.

    Args:
        options: Options by name.
        files: sha256 of the files that options name, by option.
    """
    return documents.Provenance(
        tool="tracefit", version=__version__, libraries=libraries(), options=options, files=files
    )


def libraries() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    return {name: version(name) for name in _LIBRARIES}


def coefficient_files(
    deployments: Sequence[FittedDeployment], made_by: documents.Provenance
) -> tuple[documents.CoefficientFile, documents.CoefficientFile, dict[str, pl.DataFrame]]:
    """Return alpha.json, beta.json, and by deployment the measured requests with the predictions of both files.

    alpha.json states how far these predictions lie from the measured latencies.
    """
    by_id = {fitted.deployment.deployment_id: fitted for fitted in deployments}
    described = {
        deployment_id: described_requests(
            split_requests(fitted.tables.requests, fitted.models), fitted.tables.timeline, fitted.tables.queue
        )
        for deployment_id, fitted in by_id.items()
    }
    facts = {deployment_id: _facts(fitted, described[deployment_id]) for deployment_id, fitted in by_id.items()}

    def file(kind: documents.FileKind) -> documents.CoefficientFile:
        fitted = [(i, m) for i, each in by_id.items() for m in each.models if m.name.startswith(f"{kind}.")]
        missing = [(i, m) for i, each in by_id.items() for m in each.missing if m.name.startswith(f"{kind}.")]
        return documents.CoefficientFile(
            kind=kind,
            models=tuple(_model(by_id[i], m, facts[i]) for i, m in fitted),
            # A file refuses unknown keys, so a new field of `Missing` cannot be forgotten here.
            not_fitted=tuple(schema.NotFitted(deployment_id=i, **asdict(m)) for i, m in missing),
            provenance=made_by,
        )

    alpha, beta = (file(kind) for kind in get_args(documents.FileKind))
    # The ranges describe predictions of `predict` with exactly these files.
    models = Models((alpha, beta))
    predicted = {
        deployment_id: predicted_requests(models.deployment(deployment_id), described[deployment_id])
        for deployment_id, fitted in by_id.items()
        if described[deployment_id].height and any(m.name in schema.STEP_MODELS for m in fitted.models)
    }
    ranges = [
        latency
        for deployment_id, rows in predicted.items()
        for latency in request_ranges(
            deployment_id, rows, reference=any(m.options.reference for m in by_id[deployment_id].models)
        )
    ]
    return alpha.model_copy(update={"requests": tuple(ranges)}), beta, predicted


def _facts(deployment: FittedDeployment, described: pl.DataFrame) -> schema.DeploymentFacts:
    """Return the server that the models of a deployment are valid for, and the load they were trained on."""
    context = deployment.deployment.context
    steps = trained_steps(deployment.tables.timeline, deployment.models)
    requests = split_requests(deployment.tables.requests, deployment.models)
    return schema.DeploymentFacts(
        model=context.settings.model or (context.architecture.name if context.architecture else None),
        gpu=context.gpu.name if context.gpu else None,
        architecture=dict(context.architecture.facts()) if context.architecture else {},
        hardware=dict(context.gpu.facts()) if context.gpu else {},
        settings=dict(context.settings.values()),
        assumed=deployment.deployment.assumed(),
        workload=workload_of(requests, steps),
        input_ranges=input_ranges(described, steps),
    )


def _model(
    deployment: FittedDeployment, model: FittedModel, facts: schema.DeploymentFacts
) -> schema.LinearModel | schema.RegimesModel | schema.BoundaryModel:
    fitted, first = model.fitted, model.fitted.regimes[0]
    # The validation is that of the published form: for a boundary model, with the clock.
    common = {
        "name": model.name,
        "deployment_id": deployment.deployment.deployment_id,
        "target": model.target,
        "estimator": _estimator(first),
        "features_left_out": fitted.features_left_out,
        "training": training_of(deployment, fitted),
        "validation": model.validation,
        "deployment": facts,
        "feature_set": model.feature_set,
        "definitions": definitions(_formulas(fitted), deployment.deployment.context),
        "notes": model.notes,
    }
    if model.boundary is not None:
        return _boundary(common, model.boundary, first)
    if len(fitted.regimes) == 1:
        return schema.LinearModel(**common, intercept=first.intercept, terms=first.terms)
    return schema.RegimesModel(
        form="regimes",
        **common,
        regimes=tuple(
            schema.Regime(name=r.regime.name, when=r.regime.when, intercept=r.intercept, terms=r.terms)
            for r in fitted.regimes
        ),
    )


def _formulas(fitted: LinearFit) -> list[str]:
    """Formulas of a model's terms, and the names its conditions compare."""
    names = [n for part in fitted.regimes for n in part.regime.when.names]
    return [*(t.formula for t in fitted.terms if t.formula), *names]


def _boundary(common: dict[str, Any], fitted: FittedBoundary, linear: FittedRegime) -> schema.BoundaryModel:
    slope = fitted.work_us_per_prompt_token
    # Work and offset come from a grid search, not least squares, so they have no confidence interval.
    terms = (Term(feature="prompt_tokens", unit="us/token", value=slope),) if slope else ()
    return schema.BoundaryModel(
        **common,
        form="boundary",
        boundary="step_start",
        queue="one_at_a_time",
        work=schema.Work(intercept=Number(value=fitted.work_us), terms=terms),
        offset=Number(value=fitted.offset_us),
        without_clock=schema.Linear(intercept=linear.intercept, terms=linear.terms),
        expectation=schema.Expectation(
            intercept=Number(value=fitted.work_us + fitted.expected_wait_us),
            terms=terms,
            residual=Number(value=fitted.residual_us),
            busy_share=fitted.busy_share,
        ),
    )


def _estimator(part: FittedRegime) -> schema.Estimator:
    # Each regime chooses its own penalty; the first one is stated.
    return schema.Estimator(
        name="huber_linear",
        penalty=part.choice.penalty,
        strength=part.choice.strength,
        huber=HUBER_SD,
        chosen_by="mean absolute error of time-blocked cross-validation on the training part",
        cv_mae=part.choice.score if part.choice.folds else None,
        folds=part.choice.folds,
    )


def training_of(deployment: FittedDeployment, fitted: LinearFit) -> schema.Training:
    """Return the rows that a model was fitted on."""
    rows, time = fitted.rows, pl.col("ts_ns")
    ranges = (
        rows.group_by(SERVER)
        .agg(pl.col("holdout_from_ns").first(), first_ns=time.min(), last_ns=time.max())
        .drop_nulls()
        .sort(SERVER)
    )
    return schema.Training(
        runs=tuple(sorted(rows["run_id"].unique())),
        rows=fitted.rows_train,
        rows_used=fitted.rows_used,
        rows_holdout=fitted.rows_holdout,
        exclusions=_exclusions(rows),
        time_range=tuple(schema.TimeRange(**row) for row in ranges.iter_rows(named=True)),
        inputs_sha256=_inputs_hash(deployment),
        inputs=run_inputs(deployment.tables.runs),
    )


def run_inputs(runs: pl.DataFrame) -> tuple[schema.RunInput, ...]:
    """Return the inputs of the tables of runs, in run order.

    Args:
        runs: Rows of the `runs` table.
    """
    # Settings, config.json and GPU change coefficients as traces do: `verify` names the one that differs.
    columns = ("run_id", "content_sha256", "settings", "model_config", "gpu")
    rows = runs.unique("run_id", keep="first", maintain_order=True).select(columns).sort("run_id")
    return tuple(
        schema.RunInput(run_id=run, traces_sha256=traces, context_sha256=_sha256(json.dumps(context)))
        for run, traces, *context in rows.iter_rows()
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _inputs_hash(deployment: FittedDeployment) -> str:
    # Sorted: the order in which runs were read must not change the file.
    contents = deployment.tables.runs.select("run_id", "content_sha256").unique().sort("run_id")
    return _sha256("\n".join(map(":".join, contents.iter_rows())))


# -- the evaluation --------------------------------------------------------------------------------------


class Operation(msgspec.Struct, frozen=True):
    """The work of a deployment's servers, as recorded, and what one of them can carry.

    Attributes:
        replays: Replays of its runs.
        served: The work of its servers, by run.
        load: The requests of its runs; null if none was recorded.
        capacity: The rate that one server can carry; null if that was not computed.
        rates: Latencies of one server over the rate.
    """

    replays: tuple[RunReplay, ...] = ()
    served: tuple[RequestGroup, ...] = ()
    load: RecordedLoad | None = None
    capacity: ServerCapacity | None = None
    rates: tuple[PlanPoint, ...] = ()


def evaluate(
    deployments: Sequence[FittedDeployment],
    all_runs: pl.DataFrame,
    across: AcrossResult | None = None,
    *,
    requests: Sequence[schema.RequestRange] = (),
    predicted: Mapping[str, pl.DataFrame] = MappingProxyType({}),
    operations: Mapping[str, Operation] = MappingProxyType({}),
    thresholds: Sequence[verdicts.Threshold] = verdicts.THRESHOLDS,
) -> documents.Evaluation:
    """Return all measurements, and the verdicts by the thresholds.

    Args:
        deployments: The fitted deployments.
        all_runs: Rows of the `runs` table.
        across: Errors on groups left out in turn.
        requests: Ranges of the coefficient files.
        predicted: Deployment to its requests with predictions, see `coefficient_files`.
        operations: Deployment to what its servers did and can do.
        thresholds: Requirements of each use.
    """
    entries = []
    for fitted in deployments:
        deployment_id = fitted.deployment.deployment_id
        operation = operations.get(deployment_id, Operation())
        measured = verdicts.Measurements(fitted.summed, operation.replays, operation.served)
        ranges = tuple(latency for latency in requests if latency.deployment_id == deployment_id)
        entry = _deployment(fitted, thresholds, ranges, predicted.get(deployment_id), measured)
        known = {"load": operation.load, "capacity": operation.capacity, "rates": operation.rates}
        entry = entry.model_copy(update=known)
        record = to_record(entry, fitted.deployment.context.settings)
        entries.append(entry.model_copy(update={"record": record}))
    return documents.Evaluation(
        ingest=_ingest(all_runs),
        deployments=tuple(entries),
        across=across.errors if across else (),
        across_notes=across.notes if across else (),
    )


def runs_of(deployment: FittedDeployment) -> tuple[str, ...]:
    """Return the runs that a deployment was fitted on, in name order."""
    return tuple(sorted(deployment.tables.runs["run_id"].unique()))


def _exclusions(rows: pl.DataFrame) -> dict[str, int]:
    """Count the rows that were left out, by reason, in name order."""
    return dict(sorted(Counter(rows["excluded_reason"].drop_nulls().to_list()).items()))


def _ingest(runs: pl.DataFrame) -> documents.IngestEntry:
    # Files, rejects and duplicates are counted per run; spans and dropped events per server of it.
    per_run = runs.unique("run_id", keep="first", maintain_order=True)
    seconds = (pl.col("last_unix_ns") - pl.col("first_unix_ns")) / 1e9
    servers = runs.sort(SERVER).with_columns(seconds=seconds).select(*documents.ServerEntry.model_fields)
    return documents.IngestEntry(
        **{name: _sum(per_run, name) for name in ("files", "bytes", "other_spans", "rejects")},
        dropped_attributes=_sum(per_run, "dropped_attributes"),
        spans=_sum(runs, "spans"),
        events=_counts(per_run["events"]),
        implausible=_counts(per_run["implausible"]),
        missing_attributes=missing_attributes(runs),
        dropped_events=_sum(runs, "dropped_events"),
        duplicates=_sum(per_run, "duplicate_spans"),
        servers=tuple(documents.ServerEntry(**row) for row in servers.iter_rows(named=True)),
    )


def _counts(texts: pl.Series) -> dict[str, int]:
    """Add up counts by name, each a JSON text, in name order."""
    total = Counter[str]()
    for text in texts.drop_nulls():
        total.update(json.loads(text))
    return dict(sorted(total.items()))


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum() or 0)


def _deployment(
    deployment: FittedDeployment,
    thresholds: Sequence[verdicts.Threshold],
    requests: tuple[schema.RequestRange, ...],
    predicted: pl.DataFrame | None,
    measured: verdicts.Measurements,
) -> documents.DeploymentEvaluation:
    boosted: dict[str, Metrics | None] = {r.latency: r.gradient_boosting for r in requests}
    models = {m.name: m.validation for m in deployment.models}
    return documents.DeploymentEvaluation(
        deployment_id=deployment.deployment.deployment_id,
        runs=runs_of(deployment),
        overloaded=deployment.overloads,
        verdicts=verdicts.verdicts_of(models, measured, thresholds),
        replays=measured.replays,
        served=measured.served,
        models=models,
        not_fitted=deployment.missing,
        latency={
            name: replace(latency, gradient_boosting=boosted.get(name))
            for name, latency in latency_errors(deployment.composed, predicted).items()
        },
        latency_missing=deployment.composed.missing,
        requests=requests,
        summed_step_time=deployment.summed,
        timeline=_timeline(deployment),
        exclusions={m.name: _exclusions(m.fitted.rows) for m in deployment.models},
        rows=tuple(entry for m in deployment.models for entry in _rows(m)),
        notes=deployment.notes,
    )


def _rows(model: FittedModel) -> Iterator[documents.RowsEntry]:
    """Yield the use of each run's rows by a model."""
    # A mean over an interval is not a step: no error is measured on it, unless single steps are too few.
    every, eval_filter = counted_rows(model.fitted.rows, "holdout"), model.options.eval_filter
    if eval_filter is not None and evaluation_rows(every, eval_filter).height == every.height:
        eval_filter = None
    for (run_id,), rows in model.fitted.rows.sort("run_id").group_by("run_id", maintain_order=True):
        held = counted_rows(rows, "holdout")
        yield documents.RowsEntry(
            model=model.name,
            run_id=str(run_id),
            trained=counted_rows(rows, "train").height,
            held_out=(held if eval_filter is None else held.filter(eval_filter)).height,
            left_out=_exclusions(rows),
        )


def _timeline(deployment: FittedDeployment) -> documents.TimelineEntry:
    tables, runs, timeline = deployment.tables, deployment.tables.runs, deployment.tables.timeline
    intervals = timeline.filter(is_from(lambda source: not source.is_one_step))
    return documents.TimelineEntry(
        epochs=_sum(runs, "epochs"),
        servers=runs.height,
        steps_known=timeline.height,
        adjacent_cycles=timeline.filter(cycle_source=ADJACENT.name).height,
        intervals=intervals.height,
        interval_steps=_sum(intervals, "interval_steps"),
        composition_agreement=mean_of(timeline["journey_agrees"].cast(pl.Float64)),
        composition_errors=_composition_errors(timeline),
        idle_gaps=timeline.filter(pl.col("cycle_us").is_not_null() & pl.col("idle_after")).height,
        step_sampling=mean_of(runs["step_sampling"]),
        journey_sampling=mean_of(runs["journey_sampling"]),
        **msgspec.structs.asdict(deployment.source),
        execution_lag_steps=max(tables.lags.values(), default=0),
        clock_checked_events=_sum(tables.clock_checks, "events"),
        clock_disagreements=_sum(tables.clock_checks, "disagreeing"),
        clock_corrected_events=_sum(runs.unique("run_id"), "clock_corrected_events"),
        dropped_events=_sum(runs, "dropped_events"),
    )


def _composition_errors(timeline: pl.DataFrame) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name in ("reqs", "tokens"):
        column = timeline[f"journey_error_{name}"].drop_nulls().abs()
        if column.len():
            errors[f"mean_abs_{name}"] = mean_of(column) or 0.0
            errors[f"p99_abs_{name}"] = float(column.quantile(0.99) or 0.0)
    return errors
