"""Fitted scopes become the published documents: coefficient files and evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from tracefit._version import __version__
from tracefit.coefficients import evaluation as ev
from tracefit.coefficients import model as cf
from tracefit.coefficients import verdicts
from tracefit.features.definitions import definitions
from tracefit.fit.bands import LEVEL_PCT
from tracefit.fit.distribution import PERCENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tracefit.features.context import Scope
    from tracefit.fit.across import AcrossResult, LeftOutErrors
    from tracefit.fit.boundary import FittedBoundary
    from tracefit.fit.distribution import Distribution
    from tracefit.fit.latency import Latency, LatencyErrors
    from tracefit.fit.metrics import Metrics
    from tracefit.fit.parts import FittedPart
    from tracefit.fit.scope import FittedModel, FittedScope
    from tracefit.fit.summed import SummedTime
    from tracefit.fit.train import Fitted
    from tracefit.fit.validate import Classified

_LIBRARIES = ("numpy", "scikit-learn", "polars", "pyarrow")

Kind = Literal["alpha", "beta"]


def provenance(options: dict[str, cf.Scalar], files: dict[str, str] | None = None) -> cf.Provenance:
    """State which program makes the files, with which libraries and options.

    Args:
        options: Options by name.
        files: sha256 of the files that options name, by option.
    """
    return cf.Provenance(
        tool="tracefit",
        version=__version__,
        libraries=libraries(),
        options=options,
        files=files or {},
    )


def libraries() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    return {name: version(name) for name in _LIBRARIES}


def coefficient_file(kind: Kind, scopes: Sequence[FittedScope], made_by: cf.Provenance) -> cf.CoefficientFile:
    """Collect the models of one kind over all scopes."""
    prefix = f"{kind}."
    return cf.CoefficientFile(
        kind=kind,
        models=tuple(_model(s, m) for s in scopes for m in s.models if m.name.startswith(prefix)),
        not_fitted=tuple(
            cf.NotFitted(name=m.name, scope_id=s.scope.scope_id, reason=m.reason, remedy=m.remedy)
            for s in scopes
            for m in s.missing
            if m.name.startswith(prefix)
        ),
        provenance=made_by,
    )


def _model(scope: FittedScope, model: FittedModel) -> cf.LinearModel | cf.RegimesModel | cf.BoundaryModel:
    fitted, first = model.fitted, model.fitted.parts[0]
    common = {
        "name": model.name,
        "scope_id": scope.scope.scope_id,
        "target": cf.Target(name=model.target, definition=model.definition, source=model.source),
        "estimator": _estimator(fitted, first),
        "features_left_out": tuple(
            cf.FeatureLeftOut(feature=x.feature, reason=x.reason) for x in fitted.left_out
        ),
        "training": _training(scope, fitted),
        "validation": entry(model),
        "scope": scope_facts(scope.scope),
        "feature_set": model.feature_set,
        "definitions": definitions(_formulas(fitted), scope.scope.context),
        "notes": model.notes,
    }
    if model.boundary is not None:
        return _boundary(common, model.boundary, first)
    if len(fitted.parts) == 1:
        return cf.LinearModel(**common, intercept=_intercept(first), terms=_terms(first))
    return cf.RegimesModel(form="regimes", **common, regimes=tuple(_regime(part) for part in fitted.parts))


def _formulas(fitted: Fitted) -> list[str]:
    """Formulas of a model's terms, and the names its conditions compare."""
    compared = [c for part in fitted.parts for c in part.regime.any_of]
    names = [n for c in compared for n in (c.feature, c.feature2) if n]
    return [*(t.feature.formula or t.feature.name for t in fitted.terms), *names]


def _boundary(common: dict[str, Any], fitted: FittedBoundary, linear: FittedPart) -> cf.BoundaryModel:
    slope = fitted.work_us_per_prompt_token
    terms = (cf.Term(feature="prompt_tokens", unit="us/token", value=slope),) if slope else ()
    return cf.BoundaryModel(
        **common,
        form="boundary",
        boundary="step_start",
        queue="one_at_a_time",
        work=cf.Work(intercept=cf.Number(value=fitted.work_us), terms=terms),
        offset=cf.Number(value=fitted.offset_us),
        without_clock=cf.Linear(intercept=_intercept(linear), terms=_terms(linear)),
        expectation=cf.Expectation(
            intercept=cf.Number(value=fitted.work_us + fitted.expected_wait_us),
            terms=terms,
            residual=cf.Number(value=fitted.residual_us),
            busy_share=fitted.busy_share,
        ),
    )


def _intercept(part: FittedPart) -> cf.Number:
    return cf.Number(value=part.intercept, ci95=part.intercept_ci95)


def _terms(part: FittedPart) -> tuple[cf.Term, ...]:
    return tuple(
        cf.Term(
            feature=t.feature.name,
            unit=t.feature.unit,
            value=t.value,
            ci95=t.ci95,
            seen=t.seen,
            formula=t.feature.formula,
        )
        for t in part.terms
    )


def _regime(part: FittedPart) -> cf.Regime:
    any_of = tuple(
        cf.Comparison(feature=c.feature, op=c.op, value=c.value, feature2=c.feature2)
        for c in part.regime.any_of
    )
    when = cf.Condition(any=any_of) if any_of else cf.Condition(all=())
    return cf.Regime(name=part.regime.name, when=when, intercept=_intercept(part), terms=_terms(part))


def _estimator(fitted: Fitted, part: FittedPart) -> cf.Estimator:
    return cf.Estimator(
        name="huber_linear",
        penalty=part.choice.penalty,
        strength=part.choice.strength,
        huber=fitted.huber,
        chosen_by="mean absolute error of time-blocked cross-validation on the training part",
        cv_mae=part.choice.score if part.choice.folds else None,
        folds=part.choice.folds,
    )


def _training(scope: FittedScope, fitted: Fitted) -> cf.Training:
    rows = fitted.rows
    ranges = (
        rows.group_by("run_id", "server")
        .agg(
            pl.col("ts_ns").min().alias("first"),
            pl.col("holdout_from_ns").first(),
            pl.col("ts_ns").max().alias("last"),
        )
        .drop_nulls()
        .sort("run_id", "server")
    )
    return cf.Training(
        runs=tuple(sorted(rows["run_id"].unique())),
        rows=fitted.rows_train,
        rows_used=fitted.rows_used,
        rows_holdout=fitted.rows_holdout,
        exclusions=exclusions(fitted),
        time_range=tuple(
            cf.TimeRange(run_id=run, server=server, first_ns=first, holdout_from_ns=boundary, last_ns=last)
            for run, server, first, boundary, last in ranges.iter_rows()
        ),
        inputs_sha256=_inputs_hash(scope),
        inputs=run_inputs(scope.tables.runs),
    )


def run_inputs(runs: pl.DataFrame) -> tuple[cf.RunInput, ...]:
    """State what the tables of runs were made from, in run order.

    Args:
        runs: Rows of the `runs` table.
    """
    columns = ("run_id", "content_sha256", "settings", "model_config", "gpu")
    rows = runs.unique("run_id", keep="first", maintain_order=True).select(columns).sort("run_id")
    return tuple(
        cf.RunInput(run_id=run, traces_sha256=traces, context_sha256=_sha256(json.dumps(context)))
        for run, traces, *context in rows.iter_rows()
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _inputs_hash(scope: FittedScope) -> str:
    contents = scope.tables.runs.select("run_id", "content_sha256").unique().sort("run_id")
    return hashlib.sha256("\n".join(":".join(row) for row in contents.iter_rows()).encode()).hexdigest()


def exclusions(fitted: Fitted) -> dict[str, int]:
    """Count the rows that were left out, by reason, in name order."""
    return _reasons(fitted.rows)


def _reasons(rows: pl.DataFrame) -> dict[str, int]:
    return dict(sorted(Counter(rows["excluded_because"].drop_nulls().to_list()).items()))


def scope_facts(scope: Scope) -> cf.ScopeFacts:
    """State what a model speaks about."""
    context = scope.context
    return cf.ScopeFacts(
        model=context.settings.model or (context.architecture.name if context.architecture else None),
        gpu=context.gpu.name if context.gpu else None,
        architecture=dict(context.architecture.facts()) if context.architecture else {},
        hardware=dict(context.gpu.facts()) if context.gpu else {},
        settings=dict(context.settings.values()),
        assumed=scope.assumed(),
    )


def metrics_entry(metrics: Metrics) -> ev.MetricsEntry:
    """Publish metrics."""
    return ev.MetricsEntry(**dataclasses.asdict(metrics))


def entry(model: FittedModel) -> ev.Entry:
    """Publish a model's validation."""
    fitted, v, boundary = model.fitted, model.validation, model.boundary
    return ev.Entry(
        unit="us",
        n_features=len(fitted.terms),
        train=metrics_entry(v.train),
        holdout=metrics_entry(v.holdout),
        baseline=metrics_entry(v.baseline),
        reference=metrics_entry(v.reference) if v.reference else None,
        by={name: metrics_entry(m) for name, m in v.by.items()},
        by_phase=tuple(
            ev.StepPhaseEntry(
                run_id=p.run_id,
                server=p.server,
                **dataclasses.asdict(p.phase),
                holdout=metrics_entry(p.holdout),
                baseline=metrics_entry(p.baseline),
            )
            for p in model.by_phase
        ),
        within_5_pct=v.within_5_pct,
        extrapolated_rows=v.extrapolated_rows,
        extrapolated=v.extrapolated,
        prediction_intervals=_prediction_intervals(model),
        interval_coverage_pct=v.interval_coverage_pct,
        collinearity=tuple(_collinearity(part) for part in fitted.parts),
        learning_curve=tuple(
            ev.LearningPointEntry(share=p.share, rows=p.rows, mae=p.mae, mape_pct=p.mape_pct)
            for p in v.learning_curve
        ),
        equations=_equations(fitted.rows),
        classifier=_classifier(v.classifier),
        right_boundary_pct=_percent(boundary.right_boundary) if boundary else None,
        right_boundary_without_work_pct=_percent(boundary.right_boundary_without_work) if boundary else None,
        bursts=tuple(ev.BurstEntry(**dataclasses.asdict(b)) for b in boundary.bursts) if boundary else (),
        skill=v.skill,
    )


def _prediction_intervals(model: FittedModel) -> tuple[ev.PredictionInterval, ...]:
    bands = [(part.regime.name, part.band) for part in model.fitted.parts]
    if model.boundary is not None:
        bands = [("all", model.boundary.band)]
    return tuple(
        ev.PredictionInterval(regime=name, level_pct=LEVEL_PCT, kind=band.kind, low=band.low, high=band.high)
        for name, band in bands
    )


def _collinearity(part: FittedPart) -> ev.CollinearityEntry:
    names = [term.feature.name for term in part.terms]
    return ev.CollinearityEntry(
        regime=part.regime.name,
        condition_number=part.collinearity.condition_number,
        variance_inflation=dict(zip(names, part.collinearity.inflation, strict=True)),
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _classifier(classified: Classified | None) -> ev.Classifier | None:
    if classified is None:
        return None
    counts = dataclasses.asdict(classified)
    return ev.Classifier(balanced_accuracy=counts.pop("balanced_accuracy"), confusion=counts)


def _equations(rows: pl.DataFrame) -> dict[str, int]:
    if "source" not in rows.columns:
        return {}
    used = rows.filter((pl.col("split") == "train") & pl.col("excluded_because").is_null())
    return dict(sorted(used.group_by("source").len().iter_rows()))


def evaluate(
    scopes: Sequence[FittedScope],
    all_runs: pl.DataFrame,
    across: AcrossResult | None = None,
    thresholds: Sequence[verdicts.Threshold] = verdicts.THRESHOLDS,
) -> ev.Evaluation:
    """Publish everything that was measured, and what it is worth by the thresholds."""
    return ev.Evaluation(
        ingest=_ingest(all_runs),
        scopes=tuple(_scope(s, thresholds) for s in scopes),
        across=tuple(_across(one) for one in across.errors) if across else (),
        across_notes=across.notes if across else (),
    )


def verdict_entries(
    models: Mapping[str, ev.Entry], thresholds: Sequence[verdicts.Threshold]
) -> dict[str, ev.VerdictEntry]:
    """Publish the verdict on every use."""
    return {
        v.use: ev.VerdictEntry(
            answer=v.answer,
            reasons=v.reasons,
            criteria=tuple(
                ev.CriterionEntry(
                    measure=j.threshold.measure,
                    value=j.value,
                    yes=j.threshold.yes,
                    with_limits=j.threshold.with_limits,
                    higher_is_better=verdicts.MEASURES[j.threshold.measure].higher_is_better,
                    answer=j.answer,
                    reason=j.reason,
                )
                for j in v.judged
            ),
        )
        for v in verdicts.judge(models, thresholds)
    }


def _across(one: LeftOutErrors) -> ev.AcrossEntry:
    v = one.validation
    return ev.AcrossEntry(
        kind=one.kind,
        left_out=one.left_out,
        model=one.model,
        scope_id=one.scope_id,
        feature_set=one.feature_set,
        trained_on=one.trained_on,
        rows_used=one.rows_used,
        errors=metrics_entry(v.holdout),
        baseline=metrics_entry(v.baseline),
        reference=metrics_entry(v.reference) if v.reference else None,
        skill=v.skill,
        interval_coverage_pct=v.interval_coverage_pct,
    )


def _ingest(runs: pl.DataFrame) -> ev.IngestEntry:
    # Files, rejects and duplicates are counted per run; spans and dropped events per server of it.
    per_run = runs.unique("run_id", keep="first", maintain_order=True)
    events: Counter[str] = Counter()
    for text in per_run["events"]:
        events.update(_event_counts(text))
    return ev.IngestEntry(
        files=_sum(per_run, "files"),
        bytes=_sum(per_run, "bytes"),
        spans=_sum(runs, "spans"),
        other_spans=_sum(per_run, "other_spans"),
        events=dict(sorted(events.items())),
        rejects=_sum(per_run, "rejects"),
        dropped_events=_sum(runs, "dropped_events"),
        dropped_attributes=_sum(per_run, "dropped_attributes"),
        duplicates=_sum(per_run, "duplicate_spans"),
        servers=tuple(_server(row) for row in runs.sort("run_id", "server").iter_rows(named=True)),
    )


def _server(row: Mapping[str, Any]) -> ev.ServerEntry:
    first, last = row["first_unix_ns"], row["last_unix_ns"]
    same = {k: row[k] for k in ev.ServerEntry.model_fields if k in row}
    return ev.ServerEntry(**same, seconds=None if first is None or last is None else (last - first) / 1e9)


def _event_counts(text: str | None) -> dict[str, int]:
    return dict(json.loads(text)) if text else {}


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum() or 0)


def _scope(scope: FittedScope, thresholds: Sequence[verdicts.Threshold]) -> ev.ScopeEvaluation:
    models = {m.name: entry(m) for m in scope.models}
    return ev.ScopeEvaluation(
        scope_id=scope.scope.scope_id,
        runs=tuple(sorted(scope.tables.runs["run_id"].unique())),
        overloaded=tuple(
            ev.OverloadEntry(
                run_id=o.run_id,
                reasons=o.reasons,
                trained_on=o.trained_on,
                queued=tuple(ev.QueueStretchEntry(**dataclasses.asdict(q)) for q in o.queued),
            )
            for o in scope.overloads
        ),
        verdicts=verdict_entries(models, thresholds),
        models=models,
        not_fitted=tuple(
            ev.NotFittedEntry(name=m.name, reason=m.reason, remedy=m.remedy) for m in scope.missing
        ),
        latency={name: _latency(name, one) for name, one in scope.composed.latencies.items()},
        latency_missing=scope.composed.missing,
        summed_step_time=_summed(scope.summed),
        timeline=_timeline(scope),
        exclusions={m.name: exclusions(m.fitted) for m in scope.models},
        rows=tuple(_rows(m.name, run_id, rows) for m in scope.models for run_id, rows in _by_run(m)),
        notes=scope.notes,
    )


def _by_run(model: FittedModel) -> Iterator[tuple[str, pl.DataFrame]]:
    for (run_id,), rows in model.fitted.rows.sort("run_id").group_by("run_id", maintain_order=True):
        yield str(run_id), rows


def _rows(model: str, run_id: str, rows: pl.DataFrame) -> ev.RowsEntry:
    kept = rows.filter(pl.col("excluded_because").is_null())
    # A mean over an interval is no step: it trains, and no error is measured on it.
    judged = kept.filter(pl.col("source") != "interval") if "source" in kept.columns else kept
    return ev.RowsEntry(
        model=model,
        run_id=run_id,
        trained=int((kept["split"] == "train").sum()),
        held_out=int((judged["split"] == "holdout").sum()),
        left_out=_reasons(rows),
    )


def _summed(summed: SummedTime | None) -> ev.SummedEntry | None:
    if summed is None:
        return None
    return ev.SummedEntry(**dataclasses.asdict(summed), bias_pct=summed.bias_pct)


_LATENCIES = {
    "ttft": "FIRST_TOKEN - ARRIVED",
    "itl": "(FINISHED - FIRST_TOKEN) / (output tokens - 1)",
    "e2e": "FINISHED - ARRIVED = TTFT + (output tokens - 1) * ITL",
    "client": "DEPARTED - ARRIVED = E2E + departure",
    "prefill": "FIRST_TOKEN - first SCHEDULED, without waits after a preemption",
    "execution": "FINISHED - first SCHEDULED, without waits after a preemption: the steps the request was in",
}


def _latency(name: str, latency: Latency) -> ev.LatencyEntry:
    return ev.LatencyEntry(
        **_latency_errors(latency.overall),
        definition=_LATENCIES[name],
        by_run={run: ev.LatencyErrorsEntry(**_latency_errors(e)) for run, e in latency.by_run.items()},
        by_phase=tuple(
            ev.PhaseEntry(
                **_latency_errors(p.errors),
                run_id=p.run_id,
                server=p.server,
                **dataclasses.asdict(p.phase),
            )
            for p in latency.by_phase
        ),
        left_out=dict(latency.left_out),
        distribution=_distribution(name, latency.distribution),
    )


def _distribution(name: str, found: Distribution) -> ev.DistributionEntry | None:
    if not found.rows:
        return None
    return ev.DistributionEntry(
        requests=found.rows,
        percents=PERCENTS,
        measured=found.measured,
        teacher_forced=found.predicted.get(f"forced_{name}"),
        averages_only=found.predicted.get(f"mean_{name}"),
    )


def _latency_errors(errors: LatencyErrors) -> dict[str, ev.MetricsEntry]:
    return {
        "teacher_forced": metrics_entry(errors.teacher_forced),
        "averages_only": metrics_entry(errors.averages_only),
        "baseline": metrics_entry(errors.baseline),
    }


def _timeline(scope: FittedScope) -> ev.TimelineEntry:
    tables, runs = scope.tables, scope.tables.runs
    timeline = tables.timeline
    idle = timeline.filter(pl.col("cycle_us").is_not_null() & pl.col("idle_after"))
    return ev.TimelineEntry(
        epochs=_sum(runs, "epochs"),
        servers=runs.height,
        steps_known=timeline.height,
        adjacent_cycles=int((timeline["cycle_source"] == "adjacent").sum()),
        intervals=int((timeline["cycle_source"] == "interval").sum()),
        interval_steps=_sum(timeline.filter(pl.col("cycle_source") == "interval"), "interval_steps"),
        composition_agreement=_mean(timeline["journey_agrees"].cast(pl.Float64)),
        composition_errors=_composition_errors(timeline),
        idle_gaps=idle.height,
        step_sampling=_mean(runs["step_sampling"]),
        journey_sampling=_mean(runs["journey_sampling"]),
        duration_coverage=scope.cover.share,
        median_cycle_us=scope.cover.median_cycle_us,
        median_duration_us=scope.cover.median_duration_us,
        beta_target_source=scope.choice.source if scope.choice else None,
        beta_target_because=scope.choice.because if scope.choice else None,
        execution_lag_steps=max(tables.lags.values(), default=0),
        clock_checked_events=_sum(tables.clock_checks, "events"),
        clock_disagreements=_sum(tables.clock_checks, "disagreeing"),
        moved_events=_sum(runs.unique("run_id"), "moved_events"),
        dropped_events=_sum(runs, "dropped_events"),
    )


def _composition_errors(timeline: pl.DataFrame) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name in ("reqs", "tokens"):
        column = timeline[f"journey_error_{name}"].drop_nulls().abs()
        if column.len():
            errors[f"mean_abs_{name}"] = _mean(column) or 0.0
            errors[f"p99_abs_{name}"] = float(column.quantile(0.99) or 0.0)
    return errors


def _mean(column: pl.Series) -> float | None:
    value = column.mean()
    return float(value) if isinstance(value, int | float) else None


def model_names(scopes: Iterable[FittedScope]) -> list[str]:
    """Names of all fitted models, in order."""
    return [m.name for s in scopes for m in s.models]
