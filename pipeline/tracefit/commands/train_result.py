"""Sum up a training: what `train` returns, from the fitted deployments and their evaluation."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients import publish
from tracefit.commands.fitting import FEW_TOO_FAST
from tracefit.features.training import TOO_FAST
from tracefit.fit.splits import of_means
from tracefit.models.targets import LATENCY_TITLES, is_step_model
from tracefit.models.validation import is_negligible_wait
from tracefit.reports.trained import TrainResult
from tracefit.results.models import DeploymentSummary, LatencySummary, MissingModels, ModelSummary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tracefit.coefficients.documents import DeploymentEvaluation, Evaluation
    from tracefit.fit.fitted import FittedDeployment, FittedModel
    from tracefit.fit.results import Latency
    from tracefit.models.validation import Metrics


def train_result(
    deployments: Sequence[FittedDeployment],
    runs: pl.DataFrame,
    evaluation: Evaluation,
    *,
    models: Path,
    report: Path,
    tables: Path,
) -> TrainResult:
    """Return the result of a training, without the files that it wrote and its warnings.

    Args:
        deployments: The fitted deployments.
        runs: Rows of the `runs` table that were trained on.
        evaluation: The measurements of the models.
        models: Folder of the coefficient files.
        report: Folder of the evaluation and the report.
        tables: Folder of the tables.
    """
    advice = {s.deployment_id: int(s.record.minutes) if s.record else None for s in evaluation.deployments}
    return TrainResult(
        models=models,
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
            if name in LATENCY_TITLES
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
                advice[s.deployment.deployment_id],
            )
            for s in deployments
        ),
        tables=tables,
    )


def _missing(deployment: FittedDeployment) -> Iterator[MissingModels]:
    """Yield the models that are missing, those of one reason together."""
    together: dict[tuple[str, str | None], list[str]] = {}
    for one in deployment.missing:
        together.setdefault((one.reason, one.remedy), []).append(one.name)
    for (reason, remedy), names in together.items():
        yield MissingModels(deployment.deployment.deployment_id, tuple(names), reason, remedy)


def _has_many_too_fast(deployment: DeploymentEvaluation) -> bool:
    """Return whether more than a few of the step times are faster than the GPU."""
    of_steps = [rows for rows in deployment.rows if is_step_model(rows.model)]
    everything = sum(rows.trained + rows.held_out + sum(rows.left_out.values()) for rows in of_steps)
    return sum(rows.left_out.get(TOO_FAST, 0) for rows in of_steps) > FEW_TOO_FAST * everything


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
