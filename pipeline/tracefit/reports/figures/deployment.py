"""All figures of one deployment, with its tables or without."""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from tracefit.diagnostics.attempts import Attempts
from tracefit.diagnostics.breakdown import step_breakdown
from tracefit.diagnostics.rows import MOST_DRAWN_RUNS
from tracefit.fit.splits import of_means
from tracefit.models.schema import LinearModel
from tracefit.models.targets import is_step_model
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

    import polars as pl

    from tracefit.coefficients.documents import DeploymentEvaluation
    from tracefit.diagnostics.deployment import DeploymentDiagnostics
    from tracefit.diagnostics.slowest import SlowRequest
    from tracefit.reports.document import Figure


class DeploymentFigures(msgspec.Struct, frozen=True):
    """The figures of one deployment.

    Attributes:
        top: Those of the first screen: the work of the server, measured and replayed, and over the rate.
        first: The others that every reader looks at, in reading order.
        latencies: Distributions of the request latencies.
        models: Those of the rows of each model, by its name.
        note: On engines that are not drawn; empty where all are.
        slowest: The slowest requests, and the reason of each.
        failed: The parts that could not be drawn, and why.
    """

    top: tuple[Figure, ...]
    first: tuple[Figure, ...]
    latencies: tuple[Figure, ...]
    models: Mapping[str, tuple[Figure, ...]] = msgspec.field(default_factory=dict)
    note: str = ""
    slowest: tuple[SlowRequest, ...] = ()
    failed: tuple[str, ...] = ()

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
    attempts = Attempts()
    top, later = _top(attempts, deployment, slo_ms), _of_evaluation(attempts, deployment)
    latencies = _latencies(attempts, deployment, {}, slo_ms)
    return DeploymentFigures(top, _drawn(later.values()), latencies, failed=tuple(attempts.failed))


def _top(attempts: Attempts, deployment: DeploymentEvaluation, slo_ms: Mapping[str, float]) -> tuple[Figure, ...]:
    served = attempts.make("the work of the server", lambda: served_figure(deployment), None)
    rates = attempts.make("latency over the rate", lambda: rates_figure(deployment, slo_ms), None)
    return _drawn((served, rates))


def _of_evaluation(attempts: Attempts, deployment: DeploymentEvaluation) -> dict[str, Figure | None]:
    return {
        "queue": attempts.make("the queue", lambda: queue_figure(deployment), None),
        "by_load": attempts.make("errors by load", lambda: error_by_load_figure(deployment), None),
    }


def _latencies(
    attempts: Attempts,
    deployment: DeploymentEvaluation,
    measured: dict[str, dict[int, float]],
    slo_ms: Mapping[str, float],
) -> tuple[Figure, ...]:
    draw = partial(distribution_figures, deployment, measured, slo_ms)
    return attempts.make("distributions of the latencies", draw, ())


def _drawn(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    return tuple(filter(None, figures))


def deployment_figures(
    rows: DeploymentDiagnostics, *, points: int, slo_ms: Mapping[str, float] = MappingProxyType({})
) -> DeploymentFigures:
    """Draw the figures of one deployment; `points` is the most per series, taken evenly in time."""
    deployment, deployment_id = rows.deployment, rows.deployment.deployment_id
    make = (attempts := Attempts()).make
    of_evaluation = _of_evaluation(attempts, deployment)
    first: list[Figure | None] = []
    of_models: dict[str, tuple[Figure, ...]] = {}
    for model in rows.models:
        # Tables hold only the frames of the last training, which lack the features of other models.
        if (kept := make(f"the rows of {model.name}", partial(rows.evaluated, model), None)) is None:
            continue
        draw = partial(model_figures, model, kept, points=points)
        of_models[model.name] = make(f"the residuals of {model.name}", draw, ())
        if is_step_model(model.name) and not first:
            means = of_means(deployment.models.get(model.name))
            over_time = partial(step_times_figure, deployment_id, kept, points=points, of_means=means)
            first = [make("step times over time", over_time, None), of_evaluation["by_load"]]
            if isinstance(model, LinearModel):
                parts = partial(_parts_of_steps, deployment_id, model, kept)
                first.append(make("the parts of step times", parts, None))
    more_runs = max(0, len(deployment.runs) - MOST_DRAWN_RUNS)
    loads, times = rows.loads, rows.step_times
    first += [
        make("the parts of TTFT", lambda: first_token_figure(deployment_id, rows.first_token), None),
        make(
            "latency over the load",
            lambda: latency_load_figure(deployment_id, loads, slo_ms, more_runs),
            None,
        ),
        make("step times of the runs", lambda: runs_figure(deployment_id, times, more_runs), None),
        *(
            make(f"the engine of {each.run_id}, {each.server},", partial(engine_figure, each), None)
            for each in rows.engines
        ),
    ]
    objectives = {name: ms for name, ms in slo_ms.items() if name in rows.loads}
    drawn, servers = len(rows.engines), deployment.timeline.servers
    return DeploymentFigures(
        _top(attempts, deployment, slo_ms),
        _drawn((of_evaluation["queue"], *first)),
        _latencies(attempts, deployment, rows.latencies, objectives),
        of_models,
        f"{drawn} of {count(servers)} engines are drawn, overloaded ones first." if servers > drawn else "",
        rows.slowest,
        tuple(dict.fromkeys((*rows.failed, *attempts.failed))),
    )


def _parts_of_steps(deployment_id: str, model: LinearModel, kept: pl.DataFrame) -> Figure | None:
    return breakdown_figure(deployment_id, step_breakdown(model, kept.filter(split="holdout")))
