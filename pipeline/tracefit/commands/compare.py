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
from tracefit.commands.locate import choose_scope, find_tables
from tracefit.commands.scopes import load_scope, scopes_of, write_timelines
from tracefit.errors import DataError, UsageError
from tracefit.features import training
from tracefit.features.sets import Feature, FeatureSet
from tracefit.features.targets import target_named
from tracefit.fit import splits
from tracefit.fit.boundary import admission_with_clock, api_waits, clocks_of
from tracefit.fit.fitted import target_of
from tracefit.fit.splits import MIN_TRAIN_ROWS, request_frame, step_frame
from tracefit.fit.validation import measure
from tracefit.results.models import CompareResult, Drift, DriftVerdict, ModelComparison
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.coefficients.model import Model
    from tracefit.coefficients.predict import ScopeModels
    from tracefit.fit.fitted import ScopeTables
    from tracefit.fit.results import Metrics
    from tracefit.server.context import ModelScope
    from tracefit.statistics import Vector


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much worse an old file may be on new traces.

    Attributes:
        factor: Times the median error it was published with.
        slack_pct: Percentage points above it, where that is more.
    """

    factor: float = 1.5
    slack_pct: float = 2.0


def compare(
    first: str | Path,
    second: str | Path,
    *,
    scope: str | None = None,
    run: str | None = None,
    tolerance: Tolerance | None = None,
) -> CompareResult:
    """Compare two coefficient files, or check a file on new tables.

    Args:
        first: A coefficient file, a folder of them, or a folder that `run` wrote.
        second: Another one, or tables of new runs. Of a folder with both, the models are compared.
        scope: Compare this scope only; see `Models.scope`.
        run: Compare the scope of this run only.
        tolerance: For a drift check.

    Raises:
        UsageError: A file or folder is not valid.
        DataError: The two have no model in common.
    """
    one, other = find_models(first), find_models(second)
    old = load(one)
    chosen = choose_scope(old, scope, run)
    wanted = [old.scope(chosen).scope_id or ""] if chosen is not None else list(old.scope_ids)
    # A folder that `run` wrote holds both: of such a folder the models are compared, its tables only if they are named.
    if other.is_dir() and not has_models(other):
        other = find_tables(other)
    if (other / "runs").is_dir():
        return _drift(one, other, old, wanted, tolerance or Tolerance())
    new = load(other)
    compared: list[ModelComparison] = []
    notes: list[str] = []
    for scope_id in wanted:
        pair = _partner(scope_id, old, new, notes)
        if pair is None:
            continue
        left, right = old.scope(scope_id), new.scope(pair)
        for name, model in left.models.items():
            if name not in right.models:
                notes.append(f"{name} of {scope_id}: only in {one}")
                continue
            changes = tuple(coefficient_diffs(model, right.models[name]))
            moved, said = prediction_diffs(model, right.models[name])
            # Why predictions cannot be compared matters where coefficients differ.
            notes += said if model != right.models[name] else []
            compared.append(ModelComparison(name, scope_id, changes, tuple(moved)))
    if not compared:
        raise DataError(
            "the two have no model in common",
            where=f"{one}, {other}",
            hint=f"scopes: {', '.join(old.scope_ids)}; {', '.join(new.scope_ids)}",
        )
    return CompareResult(one, other, tuple(compared), notes=tuple(notes))


def _partner(scope_id: str, old: Models, new: Models, notes: list[str]) -> str | None:
    """Return the scope of the other file to compare with: the same one, or its only one."""
    if scope_id in new.scope_ids:
        return scope_id
    # Scope ids hold a hash of the settings: after a change of one setting the same server has another id.
    if len(old.scope_ids) == len(new.scope_ids) == 1:
        notes.append(f"scope {scope_id} is compared with {new.scope_ids[0]}, which is another one")
        return new.scope_ids[0]
    notes.append(f"scope {scope_id}: only in the first")
    return None


def _drift(one: Path, tables: Path, old: Models, wanted: list[str], tolerance: Tolerance) -> CompareResult:
    store = TableStore(tables).require()
    runs = store.read("runs")
    write_timelines(store, runs["run_id"].unique(maintain_order=True))
    here = {scope.scope_id: (scope, members) for scope, members in scopes_of(runs, str(tables))}
    found: list[Drift] = []
    notes: list[str] = []
    for scope_id in wanted:
        if scope_id not in here:
            notes.append(f"scope {scope_id}: no run of it in {tables}")
            continue
        scope, members = here[scope_id]
        loaded = load_scope(store, members)
        models: ScopeModels = old.scope(scope_id)
        found += [_drift_of(m, scope, loaded, tolerance) for m in models.models.values()]
    if not found:
        raise DataError(
            f"no run of scope {', '.join(wanted)} is here",
            where=str(tables),
            hint=f"here are: {', '.join(here)}",
        )
    verdicts = {d.verdict for d in found}
    verdict: DriftVerdict = (
        "drifted" if "drifted" in verdicts else "good" if "good" in verdicts else "unknown"
    )
    return CompareResult(one, tables, drift=tuple(found), verdict=verdict, notes=tuple(notes))


def _drift_of(model: Model, scope: ModelScope, tables: ScopeTables, tolerance: Tolerance) -> Drift:
    # The median: a few requests that met something else say nothing of whether the coefficients still hold. Of both
    # parts of the training data, since the new traces are as much like the one as like the other.
    parts = (model.validation.train, model.validation.holdout) if model.validation else ()
    medians = [part.mdape_pct for part in parts if part.mdape_pct is not None]
    base = (max(medians, default=None), model.validation.holdout.mae if model.validation else None)
    try:
        rows, predicted = _predicted(model, scope, tables)
    except (UsageError, DataError) as error:
        return Drift(
            model.name, model.scope_id, 0, base[0], None, base[1], None, None, None, "unknown", error.line()
        )
    known = np.isfinite(predicted)
    now: Metrics = measure(target_of(rows)[known], predicted[known])
    # A median error of 0.5 % may triple by chance: the slack lets models that are nearly exact keep their verdict.
    limit = None if base[0] is None else max(tolerance.factor * base[0], base[0] + tolerance.slack_pct)
    verdict: DriftVerdict = "unknown"
    reason = None
    if now.n < MIN_TRAIN_ROWS:
        reason = f"{now.n} rows are fewer than {MIN_TRAIN_ROWS}"
    elif limit is None or now.mdape_pct is None:
        reason = "the file states no errors"
    else:
        verdict = "drifted" if now.mdape_pct > limit else "good"
    return Drift(
        model.name,
        model.scope_id,
        now.n,
        base[0],
        now.mdape_pct,
        base[1],
        now.mae,
        now.bias_pct,
        limit,
        verdict,
        reason,
    )


def _predicted(model: Model, scope: ModelScope, tables: ScopeTables) -> tuple[pl.DataFrame, Vector]:
    """Return the new rows a model is evaluated on, and its predictions for them (NaN where it has none)."""
    features = FeatureSet(
        "file",
        tuple({t.feature: Feature(t.feature, "", t.formula or t.feature) for t in terms_of(model)}.values()),
    )
    constants = training.constants_of(scope.context)
    if model.name.startswith("beta."):
        source = "duration" if model.target is not None and model.target.source == "duration" else "clock"
        timeline = training.with_roofline(tables.timeline, scope.context)
        rows = _all_new(step_frame(tables, timeline, features, constants, source))
        # The published error is that on single steps: a mean over an interval is easier to predict.
        single = rows.filter(~pl.col("source").is_in(training.MEANS))
        rows = single if single.height >= MIN_TRAIN_ROWS else rows
    else:
        rows = _all_new(
            request_frame(tables, target_named(model.name.removeprefix("alpha.")), features, constants)
        )
    # Conditions may compare facts that the new tables do not have: unknown, they do not hold, and the model still predicts.
    lacking = sorted(c for c in CompiledModel(model).inputs if c not in rows.columns)
    with_predictions = predict_rows(model, rows if not lacking else rows.with_columns(_nulls(model, lacking)))
    predicted = with_predictions["predicted_us"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    if isinstance(model, BoundaryModel):
        slope = {t.feature: t.value for t in model.work.terms}.get("prompt_tokens", 0.0)
        work = model.work.intercept.value + slope * rows["prompt_tokens"].fill_null(0).to_numpy().astype(
            float
        )
        wait = api_waits(rows, work) if model.queue else np.zeros(len(work))
        by_clock, known = admission_with_clock(
            rows, clocks_of(tables.timeline), wait, work + wait, model.offset.value
        )
        predicted = np.where(known, by_clock, predicted)
    return rows, np.asarray(predicted, dtype=float)


def _nulls(model: Model, lacking: list[str]) -> list[pl.Expr]:
    """Return nulls for the inputs the tables lack: of features that are columns already, or of unknown facts in conditions."""
    named = {t.feature for t in terms_of(model)}
    return [pl.lit(None, pl.Float64).alias(c) for c in lacking if c not in named]


def _all_new(rows: pl.DataFrame) -> pl.DataFrame:
    # All but idle gaps and epoch boundaries, on which the old file was not trained either.
    return rows.filter(~pl.col("excluded_reason").is_in(splits.ALWAYS).fill_null(value=False))
