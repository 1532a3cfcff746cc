"""Fitted scopes become the evaluation."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl

from tracefit.coefficients import evaluation as ev
from tracefit.coefficients import verdicts
from tracefit.coefficients.entries import entry, exclusions, metrics_entry, reasons
from tracefit.fit.metrics import PERCENTS
from tracefit.fit.splits import counted, evaluation_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.fit.results import (
        AcrossResult,
        Distribution,
        FittedModel,
        FittedScope,
        Latency,
        LatencyErrors,
        LeftOutErrors,
        SummedTime,
    )


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
        gradient_boosting=metrics_entry(v.reference) if v.reference else None,
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
        rows=tuple(_rows(m, run_id, rows) for m in scope.models for run_id, rows in _by_run(m)),
        notes=scope.notes,
    )


def _by_run(model: FittedModel) -> Iterator[tuple[str, pl.DataFrame]]:
    for (run_id,), rows in model.fitted.rows.sort("run_id").group_by("run_id", maintain_order=True):
        yield str(run_id), rows


def _rows(model: FittedModel, run_id: str, rows: pl.DataFrame) -> ev.RowsEntry:
    kept = rows.filter(pl.col("excluded_because").is_null())
    # A mean over an interval is no step: no error is measured on it, unless single steps are too few.
    judge, every = model.recipe.options.eval_filter, counted(model.fitted.rows, "holdout")
    are_single = judge is not None and evaluation_rows(every, judge).height < every.height
    judged = kept.filter(judge) if judge is not None and are_single else kept
    return ev.RowsEntry(
        model=model.name,
        run_id=run_id,
        trained=int((kept["split"] == "train").sum()),
        held_out=int((judged["split"] == "holdout").sum()),
        left_out=reasons(rows),
    )


def _summed(summed: SummedTime | None) -> ev.SummedEntry | None:
    if summed is None:
        return None
    fields = dataclasses.asdict(summed)
    fields["bias_2sd_pct"] = fields.pop("two_sd_pct")
    return ev.SummedEntry(**fields, bias_pct=summed.bias_pct, drifting=summed.drifting)


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
        "refit_on_holdout": metrics_entry(errors.refit_on_holdout),
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
        beta_target_reason=scope.choice.reason if scope.choice else None,
        execution_lag_steps=max(tables.lags.values(), default=0),
        clock_checked_events=_sum(tables.clock_checks, "events"),
        clock_disagreements=_sum(tables.clock_checks, "disagreeing"),
        clock_corrected_events=_sum(runs.unique("run_id"), "moved_events"),
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
