"""What the coefficient file and the evaluation both say of a model: its errors, and rows left out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from tracefit.coefficients import evaluation as ev
from tracefit.fit.metrics import LEVEL_PCT
from tracefit.fit.splits import counted

if TYPE_CHECKING:
    import polars as pl

    from tracefit.fit.linear import FittedRegime
    from tracefit.fit.results import (
        Classifier,
        EquationErrors,
        ErrorOverLoad,
        FittedModel,
        LinearFit,
        LoadExtrapolation,
        Metrics,
    )


def exclusions(fitted: LinearFit) -> dict[str, int]:
    """Count the rows that were left out, by reason, in name order."""
    return reasons(fitted.rows)


def reasons(rows: pl.DataFrame) -> dict[str, int]:
    """Count rows by what `excluded_because` says, in name order."""
    return dict(sorted(Counter(rows["excluded_because"].drop_nulls().to_list()).items()))


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
        gradient_boosting=metrics_entry(v.reference) if v.reference else None,
        by_group={name: metrics_entry(m) for name, m in v.by_group.items()},
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
        by_load={name: metrics_entry(m) for name, m in v.by_load.items()},
        held_out_equations=_equation_errors(v.held_out_equations),
        error_over_load=_over_load(model.error_over_load),
        load_extrapolation=_extrapolation(model.load_extrapolation),
        candidates=tuple(
            ev.CandidateEntry(
                name=c.name,
                features=c.features,
                inside_mae=c.inside_mae,
                beyond_mae=c.beyond_mae,
                chosen=c.chosen,
                reason=c.reason,
            )
            for c in model.candidates
        ),
        within_5_pct=v.within_5_pct,
        extrapolated_rows=v.extrapolated_rows,
        extrapolated=v.extrapolated,
        prediction_intervals=_prediction_intervals(model),
        interval_coverage_pct=v.interval_coverage_pct,
        collinearity=tuple(_collinearity(part) for part in fitted.regimes),
        learning_curve=tuple(
            ev.LearningPointEntry(share=p.share, rows=p.rows, mae=p.mae, mape_pct=p.mape_pct)
            for p in v.learning_curve
        ),
        rows_by_source=_equations(fitted.rows),
        classifier=_classifier(v.classifier),
        boundary_accuracy_pct=boundary.boundary_accuracy_pct if boundary else None,
        boundary_accuracy_without_work_pct=boundary.boundary_accuracy_without_work_pct if boundary else None,
        bursts=tuple(ev.BurstEntry(**dataclasses.asdict(b)) for b in boundary.bursts) if boundary else (),
        skill=v.skill,
    )


def _equation_errors(found: EquationErrors | None) -> ev.EquationErrorsEntry | None:
    if found is None:
        return None
    return ev.EquationErrorsEntry(
        rows_by_source=found.rows_by_source,
        per_equation=metrics_entry(found.per_equation),
        per_step=metrics_entry(found.per_step),
    )


def _over_load(found: ErrorOverLoad | None) -> ev.ErrorOverLoadEntry | None:
    if found is None:
        return None
    return ev.ErrorOverLoadEntry(
        load=found.load,
        training_range=found.training_range,
        bins=tuple(
            ev.LoadBinEntry(low=b.low, high=b.high, holdout=metrics_entry(b.holdout)) for b in found.bins
        ),
    )


def _extrapolation(found: LoadExtrapolation | None) -> ev.LoadExtrapolationEntry | None:
    if found is None:
        return None
    return ev.LoadExtrapolationEntry(
        **dataclasses.asdict(found.errors),
        load=found.load,
        cut=found.cut,
        gradient_boosting=metrics_entry(found.reference) if found.reference else None,
    )


def _prediction_intervals(model: FittedModel) -> tuple[ev.PredictionInterval, ...]:
    bands = [(part.regime.name, part.prediction_interval) for part in model.fitted.regimes]
    if model.boundary is not None:
        bands = [("all", model.boundary.prediction_interval)]
    return tuple(
        ev.PredictionInterval(regime=name, level_pct=LEVEL_PCT, kind=band.kind, low=band.low, high=band.high)
        for name, band in bands
    )


def _collinearity(part: FittedRegime) -> ev.CollinearityEntry:
    names = [term.feature.name for term in part.terms]
    return ev.CollinearityEntry(
        regime=part.regime.name,
        condition_number=part.collinearity.condition_number,
        variance_inflation=dict(zip(names, part.collinearity.variance_inflation, strict=True)),
    )


def _classifier(classified: Classifier | None) -> ev.Classifier | None:
    if classified is None:
        return None
    counts = dataclasses.asdict(classified)
    return ev.Classifier(balanced_accuracy=counts.pop("balanced_accuracy"), confusion=counts)


def _equations(rows: pl.DataFrame) -> dict[str, int]:
    if "source" not in rows.columns:
        return {}
    used = counted(rows, "train")
    return dict(sorted(used.group_by("source").len().iter_rows()))
