"""Compare two coefficient files, or check an old file on new traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.coefficients.compiled import CompiledModel, terms_of
from tracefit.coefficients.diff import coefficient_diffs, prediction_diffs
from tracefit.coefficients.files import find_models, has_models
from tracefit.coefficients.model import BoundaryModel
from tracefit.coefficients.models import Models, load
from tracefit.coefficients.predict_frames import predict_rows
from tracefit.commands.deployments import deployments_of, load_deployment, write_timelines
from tracefit.commands.locate import choose_deployment, find_tables
from tracefit.errors import DataError, UsageError
from tracefit.features import training
from tracefit.features.sets import Feature, FeatureSet
from tracefit.features.targets import is_step_model, target_named
from tracefit.fit import splits
from tracefit.fit.alpha import EXACT_QUEUE
from tracefit.fit.boundary import admission_with_clock, api_waits, step_clock
from tracefit.fit.fitted import target_of
from tracefit.fit.splits import MIN_TRAIN_ROWS, of_means, request_frame, step_frame
from tracefit.fit.validation import measure
from tracefit.options import DeploymentOption, FirstArgument, RunOption, SecondArgument, Tolerance
from tracefit.results.models import CompareResult, Drift, DriftVerdict, ModelComparison
from tracefit.tables.schema import SERVER
from tracefit.tables.sources import is_one_step
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.coefficients.model import Model
    from tracefit.coefficients.predict import DeploymentModels
    from tracefit.fit.fitted import DeploymentTables
    from tracefit.fit.results import Validation
    from tracefit.server.context import Deployment
    from tracefit.statistics import Flags, Vector


def compare(
    first: FirstArgument,
    second: SecondArgument,
    *,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    tolerance: Tolerance | None = None,
) -> CompareResult:
    """Compare two coefficient files, or check a file on new tables.

    Args:
        first: A coefficient file, a folder of them, or a folder that `run` wrote.
        second: Another such file or folder, or tables of new runs. If a folder has both models and tables, the models are compared.
        deployment: Compare this deployment only; see `Models.deployment`.
        run: Compare the deployment of this run only.
        tolerance: For a drift check.

    Raises:
        UsageError: A file or folder is not valid.
        DataError: The two have no model in common.

    Examples:
        >>> import tracefit
        >>> tracefit.compare("out/models/", "out/tables/").verdict
        'good'
    """
    one, other = find_models(first), find_models(second)
    old = load(one)
    chosen = choose_deployment(old, deployment, run)
    wanted = [old.deployment(chosen).deployment_id or ""] if chosen is not None else list(old.deployment_ids)
    # A folder that `run` wrote has both: its models are compared, its tables only if they are named.
    if other.is_dir() and not has_models(other):
        other = find_tables(other)
    if (other / "runs").is_dir():
        return _drift(one, other, old, wanted, tolerance or Tolerance())
    new = load(other)
    compared: list[ModelComparison] = []
    notes: list[str] = []
    for deployment_id in wanted:
        pair = _partner(deployment_id, old, new, notes)
        if pair is None:
            continue
        left, right = old.deployment(deployment_id), new.deployment(pair)
        for name, model in left.models.items():
            if name not in right.models:
                notes.append(f"{name} of {deployment_id}: only in {one}")
                continue
            changes = tuple(coefficient_diffs(model, right.models[name]))
            shifts, reasons = prediction_diffs(model, right.models[name])
            # Why predictions cannot be compared matters where coefficients differ.
            notes += reasons if model != right.models[name] else []
            compared.append(ModelComparison(name, deployment_id, changes, tuple(shifts)))
    if not compared:
        raise DataError(
            "the two have no model in common",
            where=f"{one}, {other}",
            hint=f"deployments: {', '.join(old.deployment_ids)}; {', '.join(new.deployment_ids)}",
        )
    return CompareResult(one, other, tuple(compared), notes=tuple(notes))


def _partner(deployment_id: str, old: Models, new: Models, notes: list[str]) -> str | None:
    """Return the deployment of the other file to compare with: the same one, or its only one."""
    if deployment_id in new.deployment_ids:
        return deployment_id
    # Deployment ids hold a hash of the settings: after a change of one setting the same server has another id.
    if len(old.deployment_ids) == len(new.deployment_ids) == 1:
        notes.append(
            f"deployment {deployment_id} is compared with {new.deployment_ids[0]}, which is another one"
        )
        return new.deployment_ids[0]
    notes.append(f"deployment {deployment_id}: only in the first")
    return None


def _drift(one: Path, tables: Path, old: Models, wanted: list[str], tolerance: Tolerance) -> CompareResult:
    store = TableStore(tables).require()
    runs = store.read("runs")
    write_timelines(store, runs["run_id"].unique(maintain_order=True))
    here = {one.deployment_id: (one, members) for one, members in deployments_of(runs, str(tables))}
    drifts: list[Drift] = []
    notes: list[str] = []
    for deployment_id in wanted:
        if deployment_id not in here:
            notes.append(f"deployment {deployment_id}: no run of it in {tables}")
            continue
        deployment, members = here[deployment_id]
        loaded = load_deployment(store, members)
        models = old.deployment(deployment_id).models.values()
        drifts += [_drift_of(model, deployment, loaded, tolerance) for model in models]
    if not drifts:
        changed = {
            text: None
            for deployment_id in wanted
            for other, _ in here.values()
            if (text := _changes(old.deployment(deployment_id), other))
        }
        raise DataError(
            f"no run of deployment {', '.join(wanted)} is here",
            where=str(tables),
            hint=f"here {'is' if len(here) == 1 else 'are'} {'; '.join(changed) or ', '.join(here)}: fit these runs by themselves",
        )
    verdict = min((d.verdict for d in drifts), key=_WORST_FIRST.index)
    return CompareResult(one, tables, drift=tuple(drifts), verdict=verdict, notes=tuple(notes))


def _changes(models: DeploymentModels, other: Deployment) -> str:
    """Name another deployment with the facts in which it differs, both values each; empty where the models state none."""
    facts = next((m.deployment for m in models.models.values() if m.deployment is not None), None)
    if facts is None:
        return ""
    context = other.context
    then = {**facts.settings, "model": facts.model, "gpu": facts.gpu}
    served = context.settings.model or (context.architecture.name if context.architecture else None)
    now = {**context.settings.values(), "model": served, "gpu": context.gpu.name if context.gpu else None}
    # A setting that one side does not state may be the same on both.
    stated = {name: (then[name], value) for name, value in now.items() if None not in (then.get(name), value)}
    listed = ", ".join(
        f"{name} {before} → {after}" for name, (before, after) in stated.items() if before != after
    )
    return f"{other.deployment_id} ({listed})" if listed else ""


_WORST_FIRST: tuple[DriftVerdict, ...] = ("drifted", "unknown", "good")


@dataclass(frozen=True, slots=True)
class _Alike:
    """New rows like those that the published error was measured on.

    Attributes:
        rows: The rows within the training range.
        predicted: Predictions for them.
        outside: Rows left out: outside the training range, or without a feature.
        then: Median errors the file was published with on such rows; null if unknown.
        differs: How the evidence differs from the file's; null if it does not.
    """

    rows: pl.DataFrame
    predicted: Vector
    outside: int
    then: tuple[float | None, ...]
    differs: str | None = None


def _drift_of(model: Model, deployment: Deployment, tables: DeploymentTables, tolerance: Tolerance) -> Drift:
    try:
        alike = _alike(model, deployment, tables)
    except (UsageError, DataError) as error:
        return Drift(model.name, model.deployment_id, reason=error.line())
    actual = target_of(alike.rows)
    now = measure(actual, alike.predicted)
    # The median, which a few unusual requests do not change. Of both parts of the training data: the new traces may be
    # like either.
    then = max((median for median in alike.then if median is not None), default=None)
    # A median error of 0.5 % may triple by chance: the slack lets models that are nearly exact keep their verdict.
    limit = None if then is None else max(tolerance.factor * then, then + tolerance.slack_pct)
    verdict: DriftVerdict = "unknown"
    reason = None
    if now.n < MIN_TRAIN_ROWS:
        inside = " with known features within the training range" if alike.outside else ""
        reason = f"{now.n} rows{inside} are fewer than {MIN_TRAIN_ROWS}"
    elif limit is None or now.mdape_pct is None:
        reason = "the file states no errors"
    elif now.mdape_pct <= limit:
        verdict = "good"
    elif alike.differs is not None:
        reason = f"the error is larger, but {alike.differs}"
    elif now.mdape_pct - 2 * (spread := _spread_pct(alike.rows, actual, alike.predicted)) <= limit:
        reason = f"the error is larger by no more than it varies between parts of these runs (± {2 * spread:.2g} points)"
    else:
        verdict = "drifted"
    return Drift(
        model=model.name,
        deployment_id=model.deployment_id,
        rows=now.n,
        rows_outside=alike.outside,
        then_mdape_pct=then,
        now_mdape_pct=now.mdape_pct,
        then_mae_us=model.validation.holdout.mae if model.validation else None,
        now_mae_us=now.mae,
        now_bias_pct=now.bias_pct,
        limit_pct=limit,
        verdict=verdict,
        reason=reason,
    )


_PARTS = 10


def _spread_pct(rows: pl.DataFrame, actual: Vector, predicted: Vector) -> float:
    """Return the standard deviation of the median errors of the tenths of each server's time, in percentage points.

    A server whose speed wanders within a run does so between runs as well.
    """
    error = 100 * np.abs(predicted - actual)[actual != 0] / np.abs(actual[actual != 0])
    known = rows.filter(pl.Series(actual != 0)).select(*SERVER, "ts_ns", error=pl.Series(error))
    tenth = (pl.col("ts_ns").rank("ordinal").over(SERVER) - 1) * _PARTS // pl.len().over(SERVER)
    medians = known.group_by(*SERVER, tenth=tenth).agg(pl.col("error").median())["error"]
    return float(np.std(medians.to_numpy(), ddof=1)) if medians.len() > 1 else 0.0


def _alike(model: Model, deployment: Deployment, tables: DeploymentTables) -> _Alike:
    """Return the new rows that a model is evaluated on, with the published errors on rows of the same source."""
    features = FeatureSet(
        "file",
        tuple({t.feature: Feature(t.feature, "", t.formula or t.feature) for t in terms_of(model)}.values()),
    )
    constants = training.constants_of(deployment.context)
    published = model.validation
    then: tuple[float | None, ...] = ()
    differs = None
    if published is not None:
        then = published.train.mdape_pct, published.holdout.mdape_pct
    if is_step_model(model.name):
        source = "duration" if model.target is not None and model.target.source == "duration" else "clock"
        timeline = training.with_roofline(tables.timeline, deployment.context)
        rows = _all_new(step_frame(tables, timeline, features, constants, source))
        rows, differs = _steps_alike(rows, published)
    else:
        target = target_named(model.name.removeprefix("alpha."))
        rows = _all_new(request_frame(tables, target, features, constants))
        exact = model.target is not None and EXACT_QUEUE in model.target.source
        if target.state == "queue" and exact != (tables.queue is not None):
            differs = "the queue is known exactly in one of both only, in the other as the latest sampled step left it"
    # Conditions may compare facts that the new tables lack: null, such a condition is false, and the model still predicts.
    # A feature that lacks its inputs may be a column itself.
    lacking = CompiledModel(model).inputs - {*rows.columns, *(t.feature for t in terms_of(model))}
    nulls = (pl.lit(None, pl.Float64).alias(name) for name in sorted(lacking))
    predictions = predict_rows(model, rows.with_columns(nulls))
    predicted = predictions["predicted_us"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    inside = (predictions["out_of_range"].is_null() & predictions["predicted_us"].is_not_null()).to_numpy()
    if isinstance(model, BoundaryModel):
        by_clock, known = _by_clock(model, rows, tables)
        if (known & inside).sum() >= MIN_TRAIN_ROWS:
            # The step starts of the other requests are not known: how many these are is a matter of sampling.
            rows, predicted, inside = rows.filter(pl.Series(known)), by_clock[known], inside[known]
        else:
            without = published.by_group.get("without_clock") if published else None
            then = (without.mdape_pct,) if without else ()
            differs = "few of the step starts behind the admissions are known here"
    return _Alike(rows.filter(pl.Series(inside)), predicted[inside], int((~inside).sum()), then, differs)


def _steps_alike(rows: pl.DataFrame, published: Validation | None) -> tuple[pl.DataFrame, str | None]:
    """Return the rows of the kind that a published error of step times is of: single steps, or intervals too.

    The second value says how the rows differ if none is of that kind.
    """
    # The mean over an interval is easier to predict than a single step.
    single = rows.filter(is_one_step())
    if not of_means(published):
        if single.height >= MIN_TRAIN_ROWS:
            return single, None
        return rows, "the file's error is that of single steps, and here are mostly intervals of several"
    if single.height == rows.height:
        return rows, "the file's error is that of intervals of several steps, and here are single steps"
    return rows, None


def _by_clock(model: BoundaryModel, rows: pl.DataFrame, tables: DeploymentTables) -> tuple[Vector, Flags]:
    """Predict admissions from known step starts only, without interpolation; also return for which rows these suffice."""
    tokens = rows["prompt_tokens"].fill_null(0).to_numpy().astype(float)
    work = model.work.intercept.value + model.work_us_per_prompt_token * tokens
    wait = api_waits(rows, work) if model.queue else np.zeros(len(work))
    clock = step_clock(tables.timeline)
    return admission_with_clock(rows, (clock, clock), wait, work + wait, model.offset.value)


def _all_new(rows: pl.DataFrame) -> pl.DataFrame:
    # Without idle gaps and epoch boundaries, on which the old file was not trained either.
    return rows.filter(~splits.is_excluded(splits.ALWAYS))
