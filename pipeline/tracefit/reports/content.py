"""Build the report: overview, verdicts and data first, then one section per scope with its figures.

The result is a `document.Report`, which `html`, `markdown` and `terminal` render.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tracefit.coefficients.model import CoefficientFile, RegimesModel, Term
from tracefit.reports.data_section import clock_parts, data_parts
from tracefit.reports.document import Report, ReportPart, Table, table
from tracefit.reports.figures import (
    engine_figure,
    latency_figures,
    model_figures,
    predicted_figure,
    run_figures,
)
from tracefit.reports.latency_section import latency_sections, summed_line
from tracefit.reports.model_section import AnyModel, interval, model_parts, terms_of
from tracefit.reports.scopes import ScopeLabel, scope_labels
from tracefit.reports.text import ERRORS, count, exact, mape_misleads, metrics, number, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.coefficients.evaluation import AcrossEntry, Evaluation, ScopeEvaluation
    from tracefit.fit.results import Metrics, Overload
    from tracefit.results.figures import ScopeRows

_PREAMBLE = "Errors are measured on the hold-out: the last 30 % of each run in time; only idle gaps and restarts are left out of it."
_HEADLINE_NOTE = (
    "TTFT, ITL and E2E are predicted with the measured batches and waits of each request (teacher-forced): they measure the "
    "step and overhead models. Predictions from averages alone, as for a single request, are less exact: see *Request "
    "latencies*."
)
_TERMS = (
    ("step", "one iteration of the engine over its batch"),
    (
        "cycle time",
        "start of a step to the start of the next while the engine is busy: the time a step takes",
    ),
    ("hold-out", "the rows that no model was fitted on"),
    (
        "APE, MAPE",
        "absolute percentage error of a row, and its mean; a few rows near zero can dominate the mean",
    ),
    ("MAE", "mean absolute error"),
    ("bias", "sum of predictions over sum of measurements, less 100 %"),
    ("baseline", "predicts the training median for every row"),
    ("reference", "gradient boosting on the same features and rows: about the best these features allow"),
    ("admission", "ARRIVED to QUEUED: work of the API process, and the wait for the next step"),
    ("queue wait", "QUEUED to SCHEDULED"),
    ("departure", "FINISHED to DEPARTED"),
    ("TTFT, ITL, E2E", "time to the first token, between tokens, and from arrival to the last token"),
    (
        "training range",
        "smallest to largest value of a feature in the training rows; a prediction outside extrapolates",
    ),
)


@dataclass(frozen=True, slots=True)
class TracedTime:
    """First and last time of the traces, in Unix nanoseconds."""

    from_unix_ns: int
    to_unix_ns: int


def build_report(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    rows: Mapping[str, ScopeRows] | None,
    *,
    drawn: int | None = None,
    traced: TracedTime | None = None,
) -> Report:
    """Build the whole report.

    Args:
        evaluation: The evaluation.
        alpha: Its alpha file.
        beta: Its beta file.
        rows: Scope id to the rows for its figures; null without tables.
        drawn: Number of scopes with figures, from the first on; all if null.
        traced: When the traces were recorded.
    """
    models = {(m.scope_id, m.name): m for m in (*beta.models, *alpha.models)}
    labels = _labels(evaluation, models)
    scopes = [
        _Section(
            scope,
            {name: models[scope.scope_id, name] for name in scope.models},
            rows.get(scope.scope_id) if rows is not None else None,
            has_figures=drawn is None or place < drawn,
        )
        for place, scope in enumerate(evaluation.scopes)
    ]
    parts: list[ReportPart] = [
        _subject(evaluation, traced),
        _overview(evaluation, labels),
        _HEADLINE_NOTE,
        *_first_figure(scopes, labels),
        *_verdict_parts(evaluation, labels),
        _PREAMBLE,
        table(("term", "meaning"), _TERMS, folded="Terms of this report"),
        *data_parts(evaluation),
    ]
    if rows is None:
        parts.append(
            "There were no tables beside the evaluation: figures of rows, requests and runs are left out."
        )
    for section in scopes:
        parts += _scope(section)
    parts += [*_across_parts(evaluation), *_provenance(alpha, beta)]
    several = len(evaluation.scopes) > 1
    folded = frozenset(_scope_heading(s) for s in evaluation.scopes) if several else frozenset()
    return Report("tracefit report", tuple(parts), folded)


@dataclass(frozen=True, slots=True)
class _Section:
    """One scope of the report."""

    scope: ScopeEvaluation
    models: dict[str, AnyModel]
    rows: ScopeRows | None
    has_figures: bool


def _labels(
    evaluation: Evaluation, models: Mapping[tuple[str | None, str], AnyModel]
) -> dict[str, ScopeLabel]:
    settings = {
        scope_id: {k: str(v) for k, v in m.scope.settings.items()}
        for (scope_id, _), m in models.items()
        if m.scope is not None
    }
    return scope_labels({s.scope_id: (s.runs, settings.get(s.scope_id, {})) for s in evaluation.scopes})


def _subject(evaluation: Evaluation, traced: TracedTime | None) -> str:
    servers = evaluation.ingest.servers
    counts = (
        plural(len({s.run_id for s in servers}), "run"),
        plural(len(evaluation.scopes), "scope"),
        plural(sum(s.requests for s in servers), "request"),
        plural(sum(s.steps for s in servers), "traced step"),
    )
    when = f" Traced {_moment(traced.from_unix_ns)} to {_moment(traced.to_unix_ns)} UTC." if traced else ""
    return f"Latency models of a vLLM server, fitted on its traces: {', '.join(counts)}.{when}"


def _moment(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns / 1e9, UTC):%Y-%m-%d %H:%M}"


_HEADLINES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}


def _overview(evaluation: Evaluation, labels: Mapping[str, ScopeLabel]) -> Table:
    """Return a table with one row per scope: headline errors and the load they hold for."""
    rows = []
    for scope in evaluation.scopes:
        label = labels[scope.scope_id]
        step = next((e for name, e in scope.models.items() if name.startswith("beta.")), None)
        errors = [
            _headline(step.holdout, step.baseline) if step else "-",
            *(
                _headline(scope.latency[key].teacher_forced, scope.latency[key].baseline)
                if key in scope.latency
                else "-"
                for key in _HEADLINES
            ),
        ]
        load = step.error_over_load if step else None
        holds = "-"
        if load is not None:
            low, high = (f"{v:,.0f}" for v in load.training_range)
            unit = "tokens in the caches" if load.load == "running_tokens" else "requests in the batch"
            holds = f"{low} to {high} {unit}"
        name = f"`{label.name}`" + (f" ({label.detail})" if label.detail else "")
        rows.append((name, ", ".join(f"`{r}`" for r in scope.runs), *errors, holds))
    head = ("scope", "runs", "step time", *_HEADLINES.values(), "holds for")
    return table((*head[:2], *(f"{h}, median / P90 error" for h in head[2:6]), head[6]), rows)


def _headline(found: Metrics, baseline: Metrics) -> str:
    """Write median and P90 of the percentage errors, and those of the baseline."""
    if found.mdape_pct is None:
        return "-"
    errors, base = (f"{number(m.mdape_pct)} / {number(m.p90_ape_pct)} %" for m in (found, baseline))
    return f"{errors} (baseline {base})"


def _first_figure(scopes: list[_Section], labels: Mapping[str, ScopeLabel]) -> list[ReportPart]:
    """Return the figure of the first scope's step times, which shows at once whether the models fit."""
    for section in scopes:
        for name, model in section.models.items():
            rows = section.rows.models.get(name) if section.rows is not None else None
            if name.startswith("beta.") and rows is not None and section.has_figures:
                title = f"Step times of {labels[section.scope.scope_id].name}: predicted against measured"
                return [replace(predicted_figure(model, rows), name="overview", title=title)]
    return []


def _verdict_parts(evaluation: Evaluation, labels: Mapping[str, ScopeLabel]) -> list[ReportPart]:
    """Return the section of verdicts: for each scope and use whether the models are good enough, with reasons."""
    parts: list[ReportPart] = ["## Verdict"]
    evaluated = [scope for scope in evaluation.scopes if scope.verdicts]
    several = len(evaluated) > 1
    if several:
        uses = tuple(evaluated[0].verdicts)
        verdicts = [
            (f"`{labels[s.scope_id].name}`", *(f"**{s.verdicts[u].answer}**" for u in uses))
            for s in evaluated
        ]
        parts.append(table(("scope", *uses), verdicts))
    for scope in evaluated:
        rows = [(use, f"**{v.answer}**", "; ".join(v.reasons)) for use, v in scope.verdicts.items()]
        folded = f"Reasons for `{labels[scope.scope_id].name}`" if several else None
        parts.append(table(("use", "verdict", "reason"), rows, folded=folded))
    parts.append(
        "Each use is as good as the worst measure it needs, all on the hold-out. The thresholds are in evaluation.json; "
        "`--threshold USE.MEASURE=YES:WITH_LIMITS` sets others."
    )
    return parts


def _scope_heading(scope: ScopeEvaluation) -> str:
    return f"## Scope `{scope.scope_id}`"


def _scope(section: _Section) -> list[ReportPart]:
    scope, models, rows = section.scope, section.models, section.rows
    runs = f"Runs: {', '.join(f'`{r}`' for r in scope.runs)}."
    parts: list[ReportPart] = [_scope_heading(scope), runs]
    parts += _facts(next(iter(models.values())) if models else None)
    parts += [_overload(one) for one in scope.overloaded]
    parts += ["### Errors on the hold-out", _errors(scope), *_misleading(scope)]
    parts += [f"- **{m.name}** was not fitted: {m.reason}{_remedy(m.remedy)}" for m in scope.not_fitted]
    if scope.summed_step_time is not None:
        parts.append(summed_line(scope.summed_step_time))
    parts += clock_parts(scope.timeline)
    # Step times before waits: latencies build on them.
    for name, entry in sorted(scope.models.items(), key=lambda item: not item[0].startswith("beta.")):
        parts += model_parts(name, entry, models[name], scope.exclusions.get(name, {}))
        if section.has_figures:
            parts += model_figures(models[name], entry, rows.models.get(name) if rows else None)
    parts += latency_sections(scope)
    if section.has_figures:
        parts += [*latency_figures(scope, rows), *_engines(scope.scope_id, rows)]
    else:
        parts.append(
            "Figures of this scope are left out to keep the page small; train on its runs alone to get them."
        )
    return [*parts, *_ranges(models)]


def _engines(scope_id: str, rows: ScopeRows | None) -> list[ReportPart]:
    if rows is None or not rows.engines:
        return []
    parts: list[ReportPart] = [
        "### The engine over the run",
        *run_figures(scope_id, rows),
        *(engine_figure(e) for e in rows.engines),
    ]
    if rows.more_engines:
        total = count(len(rows.engines) + rows.more_engines)
        parts.append(f"{len(rows.engines)} of {total} engines are drawn, overloaded ones first.")
    return parts


def _misleading(scope: ScopeEvaluation) -> list[ReportPart]:
    """Warn of mean percentage errors that a few rows dominate."""
    return [
        f"- **`{name}`: the mean error misleads.** Half of the held-out rows are within {number(m.mdape_pct)} %, nine of "
        f"ten within {number(m.p90_ape_pct)} %; a few rows that are far off, or small, raise the mean to "
        f"{number(m.mape_pct)} %. Read the median error and the MAE."
        for name, entry in scope.models.items()
        if mape_misleads((m := entry.holdout).mape_pct, m.mdape_pct)
    ]


def _facts(model: AnyModel | None) -> list[ReportPart]:
    facts = model.scope if model else None
    if facts is None:
        return []
    lines = [f"Model {facts.model or 'not named'}, GPU {facts.gpu or 'not given'}."]
    if facts.gpu is None:
        lines.append("Without a GPU specification, hardware features are unknown and left out.")
    if not facts.architecture:
        lines.append("Without a config.json, features of the model are unknown and left out.")
    if facts.assumed:
        lines.append("Assumed, because no input states it: " + "; ".join(facts.assumed) + ".")
    settings = [(f"`{k}`", str(v)) for k, v in facts.settings.items() if k not in ("model", "gpu")]
    shown: list[ReportPart] = [" ".join(lines)]
    return [*shown, table(("setting", "value"), settings, folded="Server settings")] if settings else shown


def _overload(one: Overload) -> str:
    fate = (
        "it is trained on all the same, so the models describe an overloaded server"
        if one.trained_on
        else "it is left out of training (`--include-overloaded` keeps it)"
    )
    return f"**Run `{one.run_id}` was overloaded** ({'; '.join(one.reasons)}): {fate}."


def _remedy(remedy: str | None) -> str:
    return f"; {remedy}" if remedy else ""


_ERRORS = ("model", *ERRORS, "baseline MAE", "reference MAE")


def _errors(scope: ScopeEvaluation) -> Table:
    rows = []
    for name, entry in scope.models.items():
        reference = entry.gradient_boosting.mae if entry.gradient_boosting else None
        rows.append((f"`{name}`", *metrics(entry.holdout), exact(entry.baseline.mae), exact(reference)))
        rows += [
            (f"`{name}`, {kind.replace('_', ' ')}", *metrics(m), "", "") for kind, m in entry.by_group.items()
        ]
    return table(_ERRORS, rows)


def _ranges(models: dict[str, AnyModel]) -> list[ReportPart]:
    """Give the training ranges: a prediction outside them extrapolates."""
    rows = [
        (f"`{name}`{regime}", f"`{t.feature}`", interval(t.training_range))
        for name, model in models.items()
        for regime, t in _all_terms(model)
        if t.training_range is not None
    ]
    if not rows:
        return []
    text = "Smallest and largest value in the training rows. A prediction outside them extrapolates."
    return ["### Training ranges", text, table(("model", "feature", "training range"), rows)]


def _all_terms(model: AnyModel) -> list[tuple[str, Term]]:
    if isinstance(model, RegimesModel):
        return [(f", {r.name}", t) for r in model.regimes for t in r.terms]
    return [("", t) for t in terms_of(model)]


def _provenance(alpha: CoefficientFile, beta: CoefficientFile) -> list[ReportPart]:
    made = beta.provenance or alpha.provenance
    if made is None:
        return []
    rows = [
        (made.tool, made.version),
        *((name, version) for name, version in made.libraries.items()),
        *((f"option {name.replace('_', '-')}", _option(value)) for name, value in made.options.items()),
        *((f"file of option {name}, sha256", f"`{digest}`") for name, digest in made.files.items()),
    ]
    inputs = {m.training.inputs_sha256: m.scope_id or "" for m in (*beta.models, *alpha.models) if m.training}
    rows += [(f"inputs of `{scope}`, sha256", f"`{digest}`") for digest, scope in inputs.items()]
    return ["## Provenance", table(("item", "value"), rows)]


def _option(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


_ACROSS = (
    "left out",
    "model",
    "features",
    "n",
    "median APE %",
    "MAPE %",
    "bias %",
    "MAE us",
    "baseline MAE",
    "reference MAE",
)


def _across_parts(evaluation: Evaluation) -> list[ReportPart]:
    """Return the section on leaving out runs, models and GPUs; empty unless that was requested."""
    if not evaluation.across and not evaluation.across_notes:
        return []
    parts: list[ReportPart] = [
        "## Across runs, models and GPUs",
        "Each run, model and GPU is left out in turn and predicted by a model fitted on the others; errors are on all of its rows.",
    ]
    if evaluation.across:
        parts.append(table(_ACROSS, [_across_row(one) for one in evaluation.across]))
    return [*parts, *(f"- Note: {note}." for note in evaluation.across_notes)]


def _across_row(one: AcrossEntry) -> tuple[str, ...]:
    e, reference = one.errors, one.gradient_boosting.mae if one.gradient_boosting else None
    return (
        f"{one.kind} `{one.left_out}`",
        f"`{one.model}`",
        one.feature_set,
        count(e.n),
        *(exact(v) for v in (e.mdape_pct, e.mape_pct, e.bias_pct, e.mae, one.baseline.mae, reference)),
    )
