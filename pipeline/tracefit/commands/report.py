"""Write the report of a trained folder as a page and as Markdown."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.coefficients.models import Models
from tracefit.commands.predict import parse_numbers
from tracefit.diagnostics.deployment import diagnose, models_of
from tracefit.diagnostics.groups import US_PER_MS
from tracefit.errors import TracefitError, UsageError
from tracefit.inputs.buckets import location_of
from tracefit.models.schema import STEP_MODELS
from tracefit.models.targets import LATENCY_TITLES
from tracefit.options import (
    LimitsOption,
    ReportedArgument,
    ReportOutOption,
    TablesOption,
    named,
)
from tracefit.progress import NullProgress, Progress
from tracefit.reports.content import Goodput, build_report
from tracefit.reports.document import markdown_files, plain
from tracefit.reports.figures.deployment import DeploymentFigures, deployment_figures
from tracefit.reports.points import points_section
from tracefit.reports.sentences import verdicts
from tracefit.results.models import ReportResult
from tracefit.tables.client_times import CLIENT_TIMES, with_clients_latencies
from tracefit.tables.disk import write_files
from tracefit.tables.points import points_stated
from tracefit.tables.requests import is_cut_off
from tracefit.tables.store import TableStore
from tracefit.text import FIRST_DATE_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tracefit.coefficients.documents import CoefficientFile, Evaluation
    from tracefit.models.schema import Model
    from tracefit.reports.document import Report, Section
    from tracefit.results.models import ComparedPoint

MAX_PAGE_BYTES = 6_000_000
"""Of these plotly itself takes 4.8 million."""

NO_PAGE = "report.html is left out: it needs plotly and jinja2 (pip install 'tracefit[report]')"

_PREDICTED_POINTS = 20
"""Points of a benchmark that a report predicts: each is a replay of a second or so."""
_DETAIL = ((250, None), (120, None), (60, None), (60, 8), (60, 4), (60, 2), (60, 0))
"""Points per series, and deployments that are drawn (null for all): the first pair that keeps the page small enough is
used."""


def report(
    folder: ReportedArgument,
    *,
    tables: TablesOption = None,
    out: ReportOutOption = None,
    slo_ms: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> ReportResult:
    """Write report.html and report.md again from the files that `run` or `train` wrote.

    Args:
        folder: Folder with evaluation.json, and with alpha.json and beta.json in it or in its `models/`.
        tables: The tables folder; `folder`/tables if not given. Without tables the report has no figures of single
            rows.
        out: Where to write; `folder` if not given.
        slo_ms: The longest time, in ms, that each latency (`ttft`, `itl`, `e2e`) should take. The figures draw it as a
            line, and the goodput counts requests that meet all of these.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A file is missing or does not match its schema, an objective names no latency or is not positive, or
            the report cannot be written.

    Examples:
        >>> import tracefit
        >>> (verdicts,) = tracefit.report("out/").verdicts.values()
        >>> sorted(verdicts)
        ['alerting', 'autoscaling', 'capacity planning', 'simulation']
    """
    objectives = _objectives(slo_ms)
    folder = location_of(folder)
    progress = progress or NullProgress()
    progress.stage("drawing the report")
    evaluation = read_evaluation(folder / "evaluation.json")
    models = folder / "models" if (folder / "models").is_dir() else folder
    alpha, beta = (read_coefficients(models / f"{kind}.json") for kind in ("alpha", "beta"))
    store = TableStore(tables or folder / "tables")
    if tables is not None:
        store.require()
    made = report_of(evaluation, alpha, beta, store if store.runs() else None, slo_ms=objectives, progress=progress)
    texts = report_texts(made, location_of(out or folder), progress)
    write_files(texts)
    # A terminal shows no marks of Markdown, and a program has no use for them.
    uses = {s.deployment_id: verdicts(s).uses for s in evaluation.deployments}
    reasons = {deployment: {v.use: plain(v.sentence) for v in of} for deployment, of in uses.items()}
    return ReportResult(tuple(texts), evaluation.answers, reasons, plain(made.report.lead))


class DrawnReport(NamedTuple):
    """A report, and the page that shows it; null where the libraries that the page needs are not installed."""

    report: Report
    page: str | None


def report_texts(made: DrawnReport, folder: Path, progress: Progress) -> dict[Path, str]:
    """Return the files of a report and their content; the page only where its libraries are installed."""
    texts = {folder / name: text for name, text in markdown_files(made.report).items()}
    if made.page is None:
        progress.warn(NO_PAGE)
        return texts
    return texts | {folder / "report.html": made.page}


def _page(made: Report) -> str | None:
    """Return the report as a page; null where the libraries it needs are not installed."""
    try:
        from tracefit.reports.page import html_page
    except TracefitError:
        return None
    return html_page(made)


def report_of(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    store: TableStore | None,
    *,
    slo_ms: Mapping[str, float] = MappingProxyType({}),
    page_bytes: int = MAX_PAGE_BYTES,
    progress: Progress | None = None,
) -> DrawnReport:
    """Build the report of published files, with figures of rows where there are tables.

    With many deployments fewer points are drawn, and figures of the last deployments are left out, so that the page
    stays within `page_bytes`.
    """
    models = (*beta.models, *alpha.models)
    traced = _traced(evaluation, store) if store is not None else None
    goodput = _goodput(evaluation, store, slo_ms) if store is not None and slo_ms else {}
    measured = _points(alpha, beta, store) if store is not None else None
    rows = [diagnose(one, models_of(one, models), store) for one in evaluation.deployments] if store is not None else []
    for points, drawn in _DETAIL:
        figures: dict[str, DeploymentFigures] | None = None
        if store is not None:
            figures = {
                one.deployment.deployment_id: deployment_figures(one, points=points, slo_ms=slo_ms)
                for one in rows[:drawn]
            }
        made = build_report(
            evaluation, alpha, beta, figures, traced=traced, slo_ms=slo_ms, goodput=goodput, points=measured
        )
        # Drawn to know its size, which depends on the numbers of every figure.
        page = _page(made)
        if page is None or len(page.encode()) <= page_bytes:
            break
    if figures and progress is not None:
        for text in dict.fromkeys(text for one in figures.values() for text in one.failed):
            progress.warn(f"the report: {text}")
        _warn_of_other_frames(evaluation, models, figures, progress)
    return DrawnReport(made, page)


def _points(alpha: CoefficientFile, beta: CoefficientFile, store: TableStore) -> Section | None:
    """Return the section on the points of a benchmark in the tables, the first of them with predictions; null without
    any.
    """
    if not points_stated(store.read("runs", columns=["dialects"])):
        return None
    # It imports all that plans need; most recordings have no points.
    from tracefit.commands.compare_points import predicted_points, rows_in_order

    rows = rows_in_order(store.read("points"))
    compared: tuple[ComparedPoint, ...] = ()
    models = Models((alpha, beta))
    if any(name in STEP_MODELS for each in models.deployment_ids for name in models.deployment(each).models):
        compared, _ = predicted_points(store, models, rows[:_PREDICTED_POINTS])
    return points_section(rows, compared)


def _warn_of_other_frames(
    evaluation: Evaluation,
    models: Sequence[Model],
    figures: Mapping[str, DeploymentFigures],
    progress: Progress,
) -> None:
    """Name the models without figures: the tables have the training frames of the last training only."""
    for deployment in (one for one in evaluation.deployments if one.deployment_id in figures):
        # A model of a transfer has errors on other servers: no rows of this one.
        own = [m for m in models_of(deployment, models) if m.transfer is None]
        measured = [m.name for m in own if m.validation and m.validation.holdout.n]
        if without := [name for name in measured if name not in figures[deployment.deployment_id].models]:
            progress.warn(
                f"{', '.join(without)}: no figures, the tables hold the training rows of another training; train again"
            )


def parse_slo(texts: Iterable[str]) -> dict[str, float]:
    """Read `latency=milliseconds` objectives from the command line.

    Raises:
        UsageError: A text of another form.
    """
    numbers = (text.strip().removesuffix("ms") for text in texts)
    values = parse_numbers(numbers, named(LimitsOption), "LATENCY=MS", "ttft=500")
    return {name.lower(): ms for name, ms in values.items()}


def _objectives(slo_ms: Mapping[str, float] | None) -> Mapping[str, float]:
    for name, ms in (slo_ms or {}).items():
        if name not in LATENCY_TITLES or not 0 < ms < math.inf:
            raise UsageError(
                f"{named(LimitsOption)} {name}={ms:g}: no objective",
                hint=f"a positive number of ms for one of {', '.join(LATENCY_TITLES)}",
            )
    return slo_ms or {}


def _goodput(evaluation: Evaluation, store: TableStore, slo_ms: Mapping[str, float]) -> dict[str, Goodput]:
    """Return the goodput of each run; a request that failed, or lacks a latency but ITL, misses the objectives."""
    # A request of one token has no time between two.
    within = [
        (pl.col(f"{name}_us") <= US_PER_MS * ms).fill_null((pl.col("output_tokens") == 1) & (name == "itl"))
        for name, ms in slo_ms.items()
    ]
    latencies = [*(f"{name}_us" for name in LATENCY_TITLES), *CLIENT_TIMES]
    columns = ["run_id", "dialect", *latencies, "output_tokens", "finish_status"]
    stored = set(store.runs())
    goodput = {}
    for run in (run for deployment in evaluation.deployments for run in deployment.served if run.name in stored):
        requests = with_clients_latencies(store.read("requests", [run.name], columns))
        good = requests.filter(~is_cut_off(), *within).height
        goodput[run.name] = Goodput(100 * good / run.requests, good / run.seconds if run.seconds else None)
    return goodput


def _traced(evaluation: Evaluation, store: TableStore) -> tuple[int, int] | None:
    """Return when the traces were recorded; null where their tables are elsewhere, or no time in them has a date."""
    run_ids = sorted({r for s in evaluation.deployments for r in s.runs} & set(store.runs()))
    dated = store.read("runs", run_ids, ["first_unix_ns", "last_unix_ns"]).filter(
        pl.col("first_unix_ns") >= FIRST_DATE_NS
    )
    first, last = dated.select(pl.col("first_unix_ns").min(), pl.col("last_unix_ns").max()).row(0)
    return None if first is None else (first, last)
