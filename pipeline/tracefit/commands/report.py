"""Write the report of a trained folder: the one command that composes results into a page, Markdown and terminal text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.commands.figure_data import LATENCIES, SLO_MS, scope_rows
from tracefit.errors import UsageError
from tracefit.progress import NullProgress, Progress
from tracefit.reports.content import TracedTime, build_report
from tracefit.reports.html import html_page
from tracefit.reports.markdown import markdown_text
from tracefit.results.training import ReportResult
from tracefit.tables.disk import write_files
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.coefficients.evaluation import Evaluation, ScopeEvaluation
    from tracefit.coefficients.model import CoefficientFile
    from tracefit.reports.document import Report
    from tracefit.reports.model_section import AnyModel
    from tracefit.results.figures import ScopeRows

MAX_PAGE_BYTES = 2_000_000
_DETAIL = ((300, None), (150, None), (60, None), (30, None), (30, 8), (30, 4), (30, 2), (30, 0))
"""Points per series, and scopes that are drawn (null for all): the first pair that keeps the page small enough is used."""


def report(
    folder: str | Path,
    *,
    tables: str | Path | None = None,
    out: str | Path | None = None,
    slo_ms: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> tuple[ReportResult, Report]:
    """Write report.html and report.md again from the files that `run` or `train` wrote.

    Args:
        folder: Holds evaluation.json, and alpha.json and beta.json in it or in `models/`.
        tables: The tables folder; `folder`/tables if not given. Without tables the report has no figures of rows.
        out: Where to write; `folder` if not given.
        slo_ms: The longest each latency (`ttft`, `itl`, `e2e`) should take: a line in its figures. Limits of MLPerf Inference
            if not given.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A file is missing or not of the published shape, an objective is of no latency or not positive, or the
            report cannot be written.
    """
    objectives = _objectives(slo_ms)
    folder = Path(folder)
    (progress or NullProgress()).stage("drawing the report")
    evaluation = read_evaluation(folder / "evaluation.json")
    models = folder / "models" if (folder / "models").is_dir() else folder
    alpha, beta = (read_coefficients(models / f"{kind}.json") for kind in ("alpha", "beta"))
    store = TableStore(tables or folder / "tables")
    if tables is not None:
        store.require()
    made = report_of(evaluation, alpha, beta, store if store.runs() else None, slo_ms=objectives)
    place = Path(out or folder)
    texts = report_texts(made, place)
    write_files(texts)
    return ReportResult(tuple(texts), _verdicts(evaluation)), made


def report_texts(made: Report, folder: Path) -> dict[Path, str]:
    """Return the files of a report and their content."""
    return {folder / "report.md": markdown_text(made), folder / "report.html": html_page(made)}


def report_of(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    store: TableStore | None,
    *,
    slo_ms: Mapping[str, float] = SLO_MS,
) -> Report:
    """Build the report of published files, with figures of rows where there are tables.

    With many scopes fewer points are drawn, and figures of the last scopes are left out, so that the page stays small.
    """
    models = (*beta.models, *alpha.models)
    traced = _traced(evaluation, store) if store is not None else None
    for points, drawn in _DETAIL:
        rows: dict[str, ScopeRows] | None = None
        if store is not None:
            rows = {
                scope.scope_id: scope_rows(
                    scope, _models_of(scope, models), store, points=points, slo_ms=slo_ms
                )
                for scope in evaluation.scopes[:drawn]
            }
        made = build_report(evaluation, alpha, beta, rows, drawn=drawn, traced=traced)
        if len(html_page(made).encode()) <= MAX_PAGE_BYTES:
            break
    return made


def parse_slo(texts: Iterable[str]) -> dict[str, float]:
    """Read `latency=milliseconds` objectives from the command line.

    Raises:
        UsageError: A text of another form.
    """
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name.strip().lower()] = float(value.strip().removesuffix("ms"))
        except ValueError:
            raise UsageError(
                f"--slo {text}: not of the form LATENCY=MS", hint="such as --slo ttft=500"
            ) from None
    return found


def _objectives(slo_ms: Mapping[str, float] | None) -> Mapping[str, float]:
    if not slo_ms:
        return SLO_MS
    for name, ms in slo_ms.items():
        if name not in LATENCIES or not 0 < ms < math.inf:
            raise UsageError(
                f"--slo {name}={ms:g}: no objective",
                hint=f"a positive number of ms for one of {', '.join(LATENCIES)}",
            )
    return slo_ms


def _models_of(scope: ScopeEvaluation, models: Sequence[AnyModel]) -> list[AnyModel]:
    return [m for m in models if m.scope_id == scope.scope_id and m.name in scope.models]


def _traced(evaluation: Evaluation, store: TableStore) -> TracedTime | None:
    """Return when the traces were recorded; null where their tables are elsewhere."""
    run_ids = sorted({r for s in evaluation.scopes for r in s.runs} & set(store.runs()))
    runs = store.read("runs", run_ids) if run_ids else None
    if runs is None or not runs["first_unix_ns"].is_not_null().any():
        return None
    first, last = runs.select(pl.col("first_unix_ns").min(), pl.col("last_unix_ns").max()).row(0)
    return TracedTime(first, last)


def _verdicts(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    return {s.scope_id: {use: v.answer for use, v in s.verdicts.items()} for s in evaluation.scopes}
