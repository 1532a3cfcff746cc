"""Build the report: can I use this, for what and how sure; then figures; then what an expert asks.

The result is a `document.Report`. `page` renders it as HTML, `document.markdown_text` as Markdown. The words
of verdicts are in `sentences`, the sections for experts in `sections`, the figures in `figures`; here is their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tracefit.coefficients.compiled import main_forms
from tracefit.coefficients.model import CoefficientFile, Model, RegimesModel, Term
from tracefit.reports.document import Bullets, Figure, Report, ReportPart, Section, Table, table
from tracefit.reports.figures import (
    breakdown_figure,
    distribution_figures,
    engine_figure,
    first_token_figure,
    latency_load_figure,
    load_figure,
    model_figures,
    over_time_figure,
    runs_figure,
)
from tracefit.reports.sections import (
    clock_parts,
    data_parts,
    interval,
    latency_parts,
    model_parts,
    summed_line,
)
from tracefit.reports.sentences import lead, least_exact, step_entry, verdicts
from tracefit.reports.text import (
    ERRORS,
    ScopeLabel,
    count,
    mape_misleads,
    metrics,
    number,
    percent,
    plural,
    scope_labels,
)
from tracefit.results.figures import LATENCIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.coefficients.model import Evaluation, ScopeEvaluation
    from tracefit.fit.results import LeftOutErrors, Metrics, Overload
    from tracefit.results.figures import ScopeRows

_HOLDOUT_NOTE = (
    "Measured on the hold-out, the last 30 % of each run in time, which no model was fitted on. The baseline is a constant "
    "guess: the training median."
)
_LATENCY_NOTE = (
    "TTFT, ITL and E2E are predicted with the measured batches and waits of each request (teacher-forced): they measure the "
    "step and overhead models. Predictions from averages are less exact: see *Request latencies*."
)
_THRESHOLDS_NOTE = (
    "Each use is as good as the worst measure it needs. The thresholds are in evaluation.json; "
    "`--threshold USE.MEASURE=YES:WITH_LIMITS` sets others."
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


@dataclass(frozen=True, slots=True)
class ScopeParts:
    """One scope of the report: its evaluation, its models by name, and the rows of its figures; null without tables."""

    scope: ScopeEvaluation
    label: ScopeLabel
    models: dict[str, Model]
    rows: ScopeRows | None
    has_figures: bool = True


def build_report(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    rows: Mapping[str, ScopeRows] | None,
    *,
    traced: TracedTime | None = None,
) -> Report:
    """Build the whole report.

    Args:
        evaluation: The evaluation.
        alpha: Its alpha file.
        beta: Its beta file.
        rows: Scope id to the rows for its figures, of the scopes that are drawn; null without tables.
        traced: When the traces were recorded.
    """
    scopes = scope_parts(evaluation, alpha, beta, rows)
    data: list[ReportPart] = [
        Section("Data", tuple(data_parts(evaluation)), folded=True),
        *_across_parts(evaluation),
        Section("Terms", (table(("term", "meaning"), _TERMS),), folded=True),
        *_provenance(alpha, beta),
    ]
    if rows is None:
        data.insert(
            0, "There were no tables beside the evaluation: figures of rows, requests and runs are left out."
        )
    subject = _subject(evaluation, traced)
    # A single scope needs no overview: its verdicts and errors are the report.
    if len(scopes) == 1:
        (only,) = scopes
        return Report(_title(only), lead(only.scope), (*_scope(only), *data), subject)
    sections = [
        Section(
            f"Scope `{one.label.name}`",
            (f"**{lead(one.scope)}**", *_scope(one, several=True)),
            # The first one is open: a page of headings alone would say nothing.
            folded=place > 0,
        )
        for place, one in enumerate(scopes)
    ]
    exactness = least_exact([(one.label.name, one.scope) for one in scopes])
    titles = list(dict.fromkeys(_title(one) for one in scopes))
    title = " and ".join(titles) if len(titles) < 3 else f"{titles[0]} and {len(titles) - 1} more models"
    return Report(title, exactness, (_overview(scopes), *sections, *data), subject)


def scope_parts(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    rows: Mapping[str, ScopeRows] | None,
) -> list[ScopeParts]:
    """Return the scopes of an evaluation with their models; see `build_report`."""
    models = {(m.scope_id, m.name): m for m in (*beta.models, *alpha.models)}
    settings = {
        scope_id: {k: str(v) for k, v in m.scope.settings.items()}
        for (scope_id, _), m in models.items()
        if m.scope is not None
    }
    labels = scope_labels({s.scope_id: (s.runs, settings.get(s.scope_id, {})) for s in evaluation.scopes})
    return [
        ScopeParts(
            scope,
            labels[scope.scope_id],
            {name: models[scope.scope_id, name] for name in scope.models},
            rows.get(scope.scope_id) if rows is not None else None,
            has_figures=rows is None or scope.scope_id in rows,
        )
        for scope in evaluation.scopes
    ]


def _title(one: ScopeParts) -> str:
    # All models of a scope state the same facts.
    facts = next((m.scope for m in one.models.values()), None)
    model = (facts.model if facts else None) or one.label.name
    return f"{model} on {facts.gpu}" if facts and facts.gpu else model


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


def _headlines(scope: ScopeEvaluation) -> dict[str, tuple[Metrics, Metrics]]:
    """Return the errors a reader asks for first, each with those of the baseline."""
    # In the order of a simulation: all latencies are made of step times.
    step = step_entry(scope)
    found = {"step time": (step.holdout, step.baseline)} if step else {}
    for key, label in LATENCIES.items():
        if key in scope.latency:
            found[label] = scope.latency[key].teacher_forced, scope.latency[key].baseline
    return {label: both for label, both in found.items() if both[0].mdape_pct is not None}


def _headline_table(scope: ScopeEvaluation) -> Table:
    rows = [
        (
            label,
            *(percent(v) for v in (m.mdape_pct, m.p90_ape_pct, base.mdape_pct, base.p90_ape_pct)),
            count(m.n),
        )
        for label, (m, base) in _headlines(scope).items()
    ]
    return table(
        ("error of", "median %", "P90 %", "baseline median %", "baseline P90 %", "held out"),
        rows,
    )


def _holds_for(scope: ScopeEvaluation) -> str:
    # The errors beside it were measured on such load: beyond it nothing is known.
    step = step_entry(scope)
    load = step.error_over_load if step else None
    if load is None:
        return ""
    low, high = (f"{v:,.0f}" for v in load.training_range)
    return f"{low} to {high} {'tokens in the caches' if load.load == 'running_tokens' else 'requests in the batch'}"


def _overview(scopes: Sequence[ScopeParts]) -> Table:
    """Return a table with one row per scope: what it can be used for, headline errors and the load they hold for."""
    uses = list(dict.fromkeys(use for one in scopes for use in one.scope.verdicts))
    labels = ("step time", "TTFT")
    rows = []
    for one in scopes:
        # Where several scopes share a name but for its hash, a reader knows them by their runs.
        name = f"`{one.label.name}`" + (f", {_some_runs(one.scope)}" if one.label.detail else "")
        answers = [f"**{one.scope.verdicts[u].answer}**" if u in one.scope.verdicts else "-" for u in uses]
        errors = _headlines(one.scope)
        cells = [_errors_of(errors[label][0]) if label in errors else "-" for label in labels]
        rows.append((name, *answers, *cells, _holds_for(one.scope) or "-"))
    return table(("scope", *uses, *(f"{h}, median / P90 error" for h in labels), "holds for"), rows)


def _some_runs(scope: ScopeEvaluation, most: int = 2) -> str:
    more = f" and {len(scope.runs) - most} more" if len(scope.runs) > most else ""
    return f"{'run' if len(scope.runs) == 1 else 'runs'} {', '.join(scope.runs[:most])}{more}"


def _errors_of(found: Metrics) -> str:
    return f"{percent(found.mdape_pct)} / {percent(found.p90_ape_pct)} %"


def _scope(one: ScopeParts, *, several: bool = False) -> list[ReportPart]:
    """Return the parts of one scope: verdicts, errors, figures, then what an expert asks, folded.

    Of several scopes the verdicts stand side by side before them: there the first figure comes first.
    """
    scope, models = one.scope, one.models
    figures = scope_figures(one)
    first = figures[:1] if several else []
    parts: list[ReportPart] = (
        [f"Of scopes alike, this one has {one.label.detail}."] if one.label.detail else []
    )
    parts += [*first, *([verdicts(scope)] if scope.verdicts else [])]
    if _headlines(scope):
        holds = [f"**Holds for {load}.**"] if (load := _holds_for(scope)) else []
        note = " ".join([*holds, _HOLDOUT_NOTE, *([_LATENCY_NOTE] if scope.latency else [])])
        parts += [_headline_table(scope), note]
    parts += [f"Note: {text}." for text in scope.notes]
    parts += [_overload(o) for o in scope.overloaded]
    parts += figures[len(first) :]
    if not one.has_figures:
        parts.append(
            "Figures of this scope are left out to keep the page small; train on its runs alone to get them."
        )
    elif one.rows is not None and one.rows.more_engines:
        total = count(len(one.rows.engines) + one.rows.more_engines)
        parts.append(f"{len(one.rows.engines)} of {total} engines are drawn, overloaded ones first.")
    lost = tuple(f"**{m.name}** was not fitted: {m.reason}{_remedy(m.remedy)}" for m in scope.not_fitted)
    errors: list[ReportPart] = [_THRESHOLDS_NOTE, _errors(scope), *_bullets((*_misleading(scope), *lost))]
    if scope.summed_step_time is not None:
        errors.append(summed_line(scope.summed_step_time))
    parts.append(Section("Errors on the hold-out", tuple(errors), folded=True))
    latencies = (
        (*distribution_figures(scope, one.rows), *latency_parts(scope))
        if one.has_figures
        else latency_parts(scope)
    )
    parts.append(Section("Request latencies", tuple(latencies), folded=True))
    # Step times before waits: latencies build on them.
    for name, entry in sorted(scope.models.items(), key=lambda item: not item[0].startswith("beta.")):
        described = model_parts(entry, models[name], scope.exclusions.get(name, {}))
        rows = one.rows.models.get(name) if one.rows is not None else None
        drawn = model_figures(models[name], rows) if rows is not None else ()
        parts.append(Section(f"`{name}`", (*described, *drawn), folded=True))
    server = (*_facts(one), *clock_parts(scope.timeline), *_ranges(models))
    return [*parts, Section("Server, step clock and training ranges", server, folded=True)]


def scope_figures(one: ScopeParts) -> list[ReportPart]:
    """Return the figures every reader looks at, in reading order."""
    if not one.has_figures:
        return []
    scope_id, rows = one.scope.scope_id, one.rows
    entry = step_entry(one.scope)
    figures: list[Figure | None] = []
    if rows is not None:
        steps = next((r for name, r in rows.models.items() if name.startswith("beta.")), None)
        if steps is not None:
            figures += [
                over_time_figure(scope_id, steps.timeline),
                load_figure(scope_id, entry.error_over_load if entry else None),
            ]
            figures += [breakdown_figure(scope_id, steps.breakdown)] if steps.breakdown else []
        figures += [first_token_figure(scope_id, rows.first_token)] if rows.first_token else []
        figures += [latency_load_figure(scope_id, rows), runs_figure(scope_id, rows)]
        figures += [engine_figure(e) for e in rows.engines]
    # Without tables too: errors over the load are in the evaluation itself.
    elif entry is not None:
        figures.append(load_figure(scope_id, entry.error_over_load))
    return [f for f in figures if f is not None]


def all_figures(one: ScopeParts) -> dict[str, Figure]:
    """Return every figure of a scope by the name that `plot` knows it by."""
    named: dict[str, Figure] = {}
    for figure in Report("", parts=tuple(_scope(one))).figures():
        # Each engine has a figure of one kind: the second one is `timeline-2`.
        taken = sum(f.kind == figure.kind for f in named.values())
        named[f"{figure.kind}-{taken + 1}" if taken else figure.kind] = figure
    return named


def _bullets(items: Sequence[str]) -> list[ReportPart]:
    return [Bullets(tuple(items))] if items else []


def _misleading(scope: ScopeEvaluation) -> list[str]:
    """Warn of mean percentage errors that a few rows dominate."""
    return [
        f"**`{name}`: the mean error misleads.** Half of the held-out rows are within {percent(m.mdape_pct)} %, nine of "
        f"ten within {percent(m.p90_ape_pct)} %; a few rows that are far off, or small, raise the mean to "
        f"{percent(m.mape_pct)} %. Read the median error and the MAE."
        for name, entry in scope.models.items()
        if mape_misleads((m := entry.holdout).mape_pct, m.mdape_pct)
    ]


def _facts(one: ScopeParts) -> list[ReportPart]:
    runs = f"Scope `{one.scope.scope_id}`, runs {', '.join(f'`{r}`' for r in one.scope.runs)}."
    facts = next((m.scope for m in one.models.values()), None)
    if facts is None:
        return [runs]
    lines = [
        runs,
        f"Model {facts.model or 'not named'}, GPU {facts.gpu or 'not given'}.",
    ]
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
        rows.append((f"`{name}`", *metrics(entry.holdout), number(entry.baseline.mae), number(reference)))
        # Baseline and reference are measured on all rows together.
        rows += [
            (f"`{name}`, {kind.replace('_', ' ')}", *metrics(m), "", "") for kind, m in entry.by_group.items()
        ]
    return table(_ERRORS, rows)


def _ranges(models: dict[str, Model]) -> list[ReportPart]:
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
    return [Section("Training ranges", (text, table(("model", "feature", "training range"), rows)))]


def _all_terms(model: Model) -> list[tuple[str, Term]]:
    """Return every term of a model, after the name of its regime where there are several."""
    several = isinstance(model, RegimesModel)
    forms = main_forms(model).items()
    return [(f", {name}" if several else "", t) for name, form in forms for t in form.terms]


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
    # Models of one scope are fitted on the same inputs: one line for all of them.
    inputs = {m.training.inputs_sha256: m.scope_id or "" for m in (*beta.models, *alpha.models) if m.training}
    rows += [(f"inputs of `{scope}`, sha256", f"`{digest}`") for digest, scope in inputs.items()]
    return [Section("Provenance", (table(("item", "value"), rows),), folded=True)]


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
        "Each run, model and GPU is left out in turn and predicted by a model fitted on the others; errors are on all of its rows.",
    ]
    if evaluation.across:
        parts.append(table(_ACROSS, [_across_row(one) for one in evaluation.across]))
    parts += _bullets([f"Note: {note}." for note in evaluation.across_notes])
    return [Section("Across runs, models and GPUs", tuple(parts))]


def _across_row(one: LeftOutErrors) -> tuple[str, ...]:
    e, reference = one.errors, one.gradient_boosting.mae if one.gradient_boosting else None
    return (
        f"{one.kind} `{one.left_out}`",
        f"`{one.model}`",
        one.feature_set,
        count(e.n),
        *(percent(v) for v in (e.mdape_pct, e.mape_pct, e.bias_pct)),
        *(number(v) for v in (e.mae, one.baseline.mae, reference)),
    )
