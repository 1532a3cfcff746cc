"""The report of what a job left: evaluation, coefficient files and tables, as a page, as Markdown and for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.errors import UsageError
from tracefit.reports.figures import model_figures
from tracefit.reports.html import html_page
from tracefit.reports.markdown import Figures, build_report
from tracefit.reports.render import markdown_text
from tracefit.reports.run_figures import engine_figure, latency_figures
from tracefit.tables.store import TableStore
from tracefit.verbs.results import Progress, Silent
from tracefit.verbs.writing import write_texts

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Evaluation, ScopeEvaluation
    from tracefit.coefficients.model import CoefficientFile
    from tracefit.reports.model import Figure, Report

MOST_POINTS, FEWEST_POINTS = 150, 30
POINT_BUDGET = 600
"""Points per series times scopes: what keeps the page below 2 MB."""

MOST_ENGINES = 4
"""Engines drawn per scope; the others are in the tables."""


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Where the report is."""

    files: tuple[Path, ...]
    verdicts: dict[str, dict[str, str]]
    """scope_id to use to verdict."""


def report(
    folder: str | Path,
    *,
    tables: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[ReportResult, Report]:
    """Write report.html and report.md anew from what `run` or `train` left.

    Args:
        folder: Holds evaluation.json, and alpha.json and beta.json in it or in `models/`.
        tables: The tables folder; `folder`/tables if not given. Without tables the report has no figures of rows.
        out: Where to write; `folder` if not given.
        progress: Told of what is going on.

    Raises:
        UsageError: A file is missing or not of the published shape, or the report cannot be written.
    """
    folder = Path(folder)
    (progress or Silent()).stage("drawing the report")
    evaluation = read_evaluation(folder / "evaluation.json")
    models = folder / "models" if (folder / "models").is_dir() else folder
    alpha, beta = (read_coefficients(models / f"{kind}.json") for kind in ("alpha", "beta"))
    store = TableStore(tables or folder / "tables")
    if tables is not None:
        store.require()
    made = report_of(evaluation, alpha, beta, store if store.runs() else None)
    place = Path(out or folder)
    texts = report_texts(made, place)
    write_texts(texts)
    return ReportResult(tuple(texts), _verdicts(evaluation)), made


def report_texts(made: Report, folder: Path) -> dict[Path, str]:
    """Return the files of a report and their content."""
    return {folder / "report.md": markdown_text(made), folder / "report.html": html_page(made)}


def report_of(
    evaluation: Evaluation, alpha: CoefficientFile, beta: CoefficientFile, store: TableStore | None
) -> Report:
    """Build the report of published files, with figures where there are tables."""
    figures: Figures = {}
    if store is not None:
        points = max(FEWEST_POINTS, min(MOST_POINTS, POINT_BUDGET // max(len(evaluation.scopes), 1)))
        for scope in evaluation.scopes:
            figures |= _scope_figures(scope, alpha, beta, store, points)
    return build_report(evaluation, alpha, beta, figures)


def _verdicts(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    return {s.scope_id: {use: v.answer for use, v in s.verdicts.items()} for s in evaluation.scopes}


def _scope_figures(
    scope: ScopeEvaluation, alpha: CoefficientFile, beta: CoefficientFile, store: TableStore, points: int
) -> Figures:
    runs = [r for r in scope.runs if r in store.runs()]
    if len(runs) < len(scope.runs):
        missing = ", ".join(sorted(set(scope.runs) - set(runs)))
        raise UsageError(
            f"holds no tables of {missing}",
            where=str(store.root),
            hint="name the tables folder with --tables",
        )
    steps = _of_scope(store.read("beta_training", runs), scope)
    requests = _of_scope(store.read("alpha_training", runs), scope)
    figures: Figures = {}
    for model in (*beta.models, *alpha.models):
        if model.scope_id != scope.scope_id or model.name not in scope.models:
            continue
        target = model.name.removeprefix("alpha.")
        rows = steps if model.name.startswith("beta.") else requests.filter(pl.col("target") == target)
        key = (scope.scope_id, model.name)
        figures[key] = model_figures(model, scope.models[model.name], rows, points=points)
    figures[scope.scope_id, "latency"] = latency_figures(
        store.read("requests", runs), scope_id=scope.scope_id
    )
    figures[scope.scope_id, "engine"] = tuple(_engines(store, runs, steps))
    return figures


def _of_scope(frame: pl.DataFrame, scope: ScopeEvaluation) -> pl.DataFrame:
    return frame.filter(pl.col("scope_id") == scope.scope_id)


def _engines(store: TableStore, runs: list[str], steps: pl.DataFrame) -> list[Figure]:
    drawn: list[Figure] = []
    for run_id in runs:
        timeline = store.read("timeline", [run_id])
        for server in timeline["server"].unique().sort():
            if len(drawn) == MOST_ENGINES:
                return drawn
            figure = engine_figure(
                timeline.filter(pl.col("server") == server),
                steps.filter((pl.col("run_id") == run_id) & (pl.col("server") == server)),
                run_id=run_id,
                server=server,
            )
            drawn += [figure] if figure is not None else []
    return drawn
