"""The report of what a job left: evaluation, coefficient files and tables, as a page, as Markdown and for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.errors import UsageError
from tracefit.progress import NullProgress, Progress
from tracefit.reports.content import Figures, build_report
from tracefit.reports.figures import model_figures
from tracefit.reports.html import html_page
from tracefit.reports.latency_figures import LATENCIES, latency_figures
from tracefit.reports.markdown import markdown_text
from tracefit.reports.run_figures import TIMELINE_COLUMNS, engine_figure
from tracefit.results.training import ReportResult
from tracefit.tables.disk import write_files
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.coefficients.evaluation import Evaluation, ScopeEvaluation
    from tracefit.coefficients.model import CoefficientFile
    from tracefit.reports.model import Figure, Report
    from tracefit.reports.models import AnyModel

MAX_PAGE_BYTES = 2_000_000
_DETAIL = ((300, None), (150, None), (60, None), (30, None), (30, 8), (30, 4), (30, 2), (30, 0))
"""Points per series, and scopes that are drawn (null for all): the first that keeps the page small enough is taken."""

MOST_ENGINES = 4
"""Engines drawn per scope; the others are in the tables."""

_ROW_COLUMNS = frozenset(
    {"scope_id", "run_id", "server", "epoch", "target", "source", "ts_ns", "y", "split", "excluded_because"}
)
"""What figures need of training rows beside the features of the models."""


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
    (progress or NullProgress()).stage("drawing the report")
    evaluation = read_evaluation(folder / "evaluation.json")
    models = folder / "models" if (folder / "models").is_dir() else folder
    alpha, beta = (read_coefficients(models / f"{kind}.json") for kind in ("alpha", "beta"))
    store = TableStore(tables or folder / "tables")
    if tables is not None:
        store.require()
    made = report_of(evaluation, alpha, beta, store if store.runs() else None)
    place = Path(out or folder)
    texts = report_texts(made, place)
    write_files(texts)
    return ReportResult(tuple(texts), _verdicts(evaluation)), made


def report_texts(made: Report, folder: Path) -> dict[Path, str]:
    """Return the files of a report and their content."""
    return {folder / "report.md": markdown_text(made), folder / "report.html": html_page(made)}


def report_of(
    evaluation: Evaluation, alpha: CoefficientFile, beta: CoefficientFile, store: TableStore | None
) -> Report:
    """Build the report of published files, with figures of rows where there are tables.

    Of many scopes fewer points are drawn, and figures of the last scopes left out, so that the page stays small.
    """
    models = (*beta.models, *alpha.models)
    for points, scopes in _DETAIL:
        figures: Figures = {}
        for scope in evaluation.scopes[:scopes]:
            figures |= _scope_figures(scope, models, store, points)
        made = build_report(evaluation, alpha, beta, figures, with_tables=store is not None)
        if len(html_page(made).encode()) <= MAX_PAGE_BYTES:
            break
    return made


def _verdicts(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    return {s.scope_id: {use: v.answer for use, v in s.verdicts.items()} for s in evaluation.scopes}


def _scope_figures(
    scope: ScopeEvaluation, models: Sequence[AnyModel], store: TableStore | None, points: int
) -> Figures:
    mine = [m for m in models if m.scope_id == scope.scope_id and m.name in scope.models]
    rows = _Rows(scope, mine, store) if store is not None else None
    figures: Figures = {
        (scope.scope_id, m.name): model_figures(
            m, scope.models[m.name], rows.of(m.name) if rows else None, points=points
        )
        for m in mine
    }
    figures[scope.scope_id, "latency"] = latency_figures(scope, rows.requests if rows else None)
    figures[scope.scope_id, "engine"] = tuple(_engines(rows)) if rows else ()
    return figures


class _Rows:
    """The rows that figures of one scope are drawn from, with no more columns than these need."""

    def __init__(self, scope: ScopeEvaluation, models: Sequence[AnyModel], store: TableStore) -> None:
        missing = sorted(set(scope.runs) - set(store.runs()))
        if missing:
            raise UsageError(
                f"holds no tables of {', '.join(missing)}",
                where=str(store.root),
                hint="name the tables folder with --tables",
            )
        self.scope, self.runs, self.store = scope, list(scope.runs), store
        mine = pl.col("scope_id") == scope.scope_id
        columns = sorted(_ROW_COLUMNS.union(*(CompiledModel(m).columns_with_clock for m in models)))
        self.steps = store.read("beta_training", self.runs, columns).filter(mine)
        self.waits = store.read("alpha_training", self.runs, columns).filter(mine)
        self.requests = store.read("requests", self.runs, [f"{name}_us" for name in LATENCIES])

    def of(self, model_name: str) -> pl.DataFrame:
        """Return the training frame of a model."""
        if model_name.startswith("beta."):
            return self.steps
        return self.waits.filter(pl.col("target") == model_name.removeprefix("alpha."))


def _engines(rows: _Rows) -> list[Figure]:
    """Draw the engines of overloaded runs first, trained on or not: those are to be seen."""
    overloads = {o.run_id: o for o in rows.scope.overloaded}
    runs = dict.fromkeys(r for r in (*overloads, *rows.runs) if r in rows.store.runs())
    drawn: list[Figure] = []
    for run_id in runs:
        timeline = rows.store.read("timeline", [run_id], TIMELINE_COLUMNS)
        steps = rows.steps.filter(pl.col("run_id") == run_id)
        for server in timeline["server"].unique().sort():
            if len(drawn) == MOST_ENGINES:
                return drawn
            mine = pl.col("server") == server
            figure = engine_figure(
                timeline.filter(mine),
                steps.filter(mine),
                run_id=run_id,
                server=server,
                overload=overloads.get(run_id),
            )
            drawn += [figure] if figure is not None else []
    return drawn
