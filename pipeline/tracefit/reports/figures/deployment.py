"""All figures of one deployment, with its tables or without."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from tracefit.coefficients.model import LinearModel
from tracefit.diagnostics.breakdown import step_breakdown
from tracefit.diagnostics.rows import MOST_RUNS
from tracefit.features.targets import is_step_model
from tracefit.fit.splits import of_means
from tracefit.reports.figures.breakdown import breakdown_figure, first_token_figure
from tracefit.reports.figures.engines import engine_figure
from tracefit.reports.figures.evaluation import (
    distribution_figures,
    error_by_load_figure,
    queue_figure,
    rates_figure,
    served_figure,
)
from tracefit.reports.figures.load import latency_load_figure, runs_figure
from tracefit.reports.figures.models import model_figures, step_times_figure
from tracefit.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefit.coefficients.model import DeploymentEvaluation
    from tracefit.diagnostics.deployment import DeploymentDiagnostics
    from tracefit.diagnostics.slowest import SlowRequest
    from tracefit.reports.document import Figure


@dataclass(frozen=True, slots=True)
class DeploymentFigures:
    """The figures of one deployment.

    Attributes:
        top: Those of the first screen: the work of the server, measured and replayed, and over the rate.
        first: The others that every reader looks at, in reading order.
        latencies: Distributions of the request latencies.
        models: Those of the rows of each model, by its name.
        note: On engines that are not drawn; empty where all are.
        slowest: The slowest requests, and the reason of each.
    """

    top: tuple[Figure, ...]
    first: tuple[Figure, ...]
    latencies: tuple[Figure, ...]
    models: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)
    note: str = ""
    slowest: tuple[SlowRequest, ...] = ()

    def by_name(self) -> dict[str, Figure]:
        """Return every figure by the name that `plot` knows it by."""
        named: dict[str, Figure] = {}
        for figure in (*self.top, *self.first, *self.latencies, *chain.from_iterable(self.models.values())):
            # Each engine has a figure of one kind: the second one is `timeline-2`.
            earlier = sum(f.kind == figure.kind for f in named.values())
            named[f"{figure.kind}-{earlier + 1}" if earlier else figure.kind] = figure
        return named


def figures_of_evaluation(deployment: DeploymentEvaluation, slo_ms: Mapping[str, float]) -> DeploymentFigures:
    """Return the figures that need no tables."""
    top = (served_figure(deployment), rates_figure(deployment, slo_ms))
    later = (queue_figure(deployment), error_by_load_figure(deployment))
    return DeploymentFigures(_drawn(top), _drawn(later), distribution_figures(deployment, {}, slo_ms))


def _drawn(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    return tuple(filter(None, figures))


def deployment_figures(
    rows: DeploymentDiagnostics, *, points: int, slo_ms: Mapping[str, float] = MappingProxyType({})
) -> DeploymentFigures:
    """Draw the figures of one deployment; `points` is the most per series, taken evenly in time."""
    deployment, deployment_id = rows.deployment, rows.deployment.deployment_id
    first: list[Figure | None] = []
    of_models: dict[str, tuple[Figure, ...]] = {}
    for model in rows.models:
        # Tables hold only the frames of the last training, which lack the features of other models.
        if (kept := rows.evaluated(model)) is None:
            continue
        of_models[model.name] = model_figures(model, kept, points=points)
        if is_step_model(model.name) and not first:
            means = of_means(deployment.models.get(model.name))
            over_time = step_times_figure(deployment_id, kept, points=points, of_means=means)
            first = [over_time, error_by_load_figure(deployment)]
            if isinstance(model, LinearModel):
                parts = step_breakdown(model, kept.filter(split="holdout"))
                first.append(breakdown_figure(deployment_id, parts))
    more_runs = max(0, len(deployment.runs) - MOST_RUNS)
    first += [
        first_token_figure(deployment_id, rows.first_token),
        latency_load_figure(deployment_id, rows.loads, slo_ms, more_runs),
        runs_figure(deployment_id, rows.step_times, more_runs),
        *map(engine_figure, rows.engines),
    ]
    objectives = {name: ms for name, ms in slo_ms.items() if name in rows.loads}
    drawn, servers = len(rows.engines), deployment.timeline.servers
    return DeploymentFigures(
        _drawn((served_figure(deployment), rates_figure(deployment, slo_ms))),
        _drawn((queue_figure(deployment), *first)),
        distribution_figures(deployment, rows.latencies, objectives),
        of_models,
        f"{drawn} of {count(servers)} engines are drawn, overloaded ones first." if servers > drawn else "",
        rows.slowest,
    )
