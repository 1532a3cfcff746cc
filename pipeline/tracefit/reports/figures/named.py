"""One figure of the report by its name, drawn from the written files: for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.diagnostics.deployment import diagnose, models_of
from tracefit.errors import UsageError, known_names
from tracefit.options import DeploymentOption, named
from tracefit.reports.figures.deployment import deployment_figures
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    from plotly.graph_objects import Figure as PlotlyFigure

    from tracefit.coefficients.documents import DeploymentEvaluation, Evaluation

_POINTS = 1000
"""Points per series: a notebook shows one figure, a page all of them."""


def draw(evaluation: Path, models: Path, tables: Path, figure: str, deployment: str | None) -> PlotlyFigure:
    """Draw one figure of the report; see `TrainResult.plot`.

    Args:
        evaluation: evaluation.json.
        models: Folder of the coefficient files.
        tables: Folder of the tables.
        figure: Its name.
        deployment: A deployment, a part of its id, or a run of it; null if there is only one deployment.
    """
    from tracefit.reports.page import plotly_figure

    published = read_evaluation(evaluation)
    chosen = _deployment_of(published, deployment)
    fitted = [m for kind in ("beta", "alpha") for m in read_coefficients(models / f"{kind}.json").models]
    rows = diagnose(chosen, models_of(chosen, fitted), TableStore(tables))
    figures = deployment_figures(rows, points=_POINTS).by_name()
    if figure not in figures:
        raise UsageError(f"there is no figure {figure}", hint=known_names(figure, figures, title="figures"))
    return plotly_figure(figures[figure])


def _deployment_of(evaluation: Evaluation, deployment: str | None) -> DeploymentEvaluation:
    every = evaluation.deployments
    fitting = [s for s in every if deployment is None or deployment in s.deployment_id or deployment in s.runs]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(s.deployment_id for s in every)
    problem = f"there is no deployment {deployment}" if not fitting else "several deployments are there"
    raise UsageError(problem, hint=f"name one with {named(DeploymentOption)}: {names}")
