"""Build the report: verdicts and their certainty first, then figures, then details for an expert.

The result is a `document.Report`, which `page` renders as HTML and `document.markdown_text` as Markdown. The words of
verdicts are in `sentences`, the figures in `figures`; here are the sections and their order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tracefit.fit.splits import of_means
from tracefit.models.schema import NEVER, BoundaryModel, RegimesModel, main_forms
from tracefit.models.targets import LATENCY_TITLES, around_steps, is_step_model
from tracefit.models.validation import is_negligible_wait
from tracefit.options import TrainOptions, flag_of
from tracefit.reports.document import Bullets, Report, ShellLines, kept, section, table, table_of
from tracefit.reports.facts import (
    HOLDOUT,
    RAISE_EVENT_LIMIT,
    compared_requests,
    dropped_events,
    mean_misleads,
    not_fitted,
    not_replayed,
    overloaded,
    worse_than_median,
)
from tracefit.reports.figures.deployment import DeploymentFigures, figures_of_evaluation
from tracefit.reports.sentences import (
    lead,
    least_exact,
    least_exact_replay,
    longer,
    speed_change,
    speed_text,
    step_entry,
    step_times,
    verdicts,
)
from tracefit.reports.transferred import transfer_of, transferred_report
from tracefit.server.settings import without_attribute
from tracefit.text import (
    UNKNOWN,
    DeploymentLabel,
    count,
    deployment_labels,
    exact,
    in_words,
    number,
    percent,
    plural,
    reasons,
    sentence,
    share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tracefit.coefficients import documents
    from tracefit.diagnostics.slowest import SlowRequest
    from tracefit.fit import results
    from tracefit.models import schema, validation
    from tracefit.models.schema import Condition, Number, Term
    from tracefit.reports.document import ReportPart, Section, Table

ERRORS = ("n", "median APE %", "P90 %", "P99 %", "MAPE %", "bias %", "MAE us")


def metrics(m: validation.Metrics) -> tuple[str, ...]:
    """Write errors under the heads of `ERRORS`."""
    percentages = (m.mdape_pct, m.p90_ape_pct, m.p99_ape_pct, m.mape_pct, m.bias_pct)
    return (count(m.n), *(percent(v) for v in percentages), number(m.mae))


def _mae(errors: validation.Metrics | None) -> float | None:
    return errors.mae if errors else None


_NO_TABLES = "There were no tables beside the evaluation: figures of rows, requests and runs are left out."
_NO_FIGURES = "Figures of this deployment are left out to keep the page small; train on its runs alone to get them."
_HOLDOUT_NOTE = (
    f"{HOLDOUT} The baseline is a constant guess, the training median; the reference is gradient "
    "boosting on the same inputs."
)
_LATENCY_NOTE = (
    "TTFT, ITL and E2E are predictions of `tracefit predict` from the facts at a request's arrival: its lengths, the "
    "queue and the batch that runs. Given the measured queue and batches, the models are closer: see *Request "
    "latencies*."
)
_THRESHOLDS_NOTE = (
    "Each use is as good as the worst measure it needs. The thresholds are in evaluation.json; "
    f"`tracefit train {flag_of(TrainOptions, 'thresholds')} USE.MEASURE=YES:WITH_LIMITS` sets others."
)
_TERMS = {
    "step": "one iteration of the engine over its batch",
    "cycle time": "start of a step to the start of the next while the engine is busy: the time a step takes",
    "hold-out": "the rows that no model was fitted on",
    "APE, MAPE": "absolute percentage error of a row, and its mean; a few rows near zero can dominate the mean",
    "MAE": "mean absolute error",
    "bias": "sum of predictions over sum of measurements, less 100 %",
    "baseline": "predicts the training median for every row",
    "reference": "gradient boosting on the same features and rows: about the best these features allow",
    **{t.label: ": ".join(filter(None, (t.definition, t.contains))) for t in around_steps()},
    "TTFT, ITL, E2E": "time to the first token, between tokens, and from arrival to the last token",
    "training range": "smallest to largest value of a feature in the training rows; a prediction outside extrapolates",
}


class Goodput(NamedTuple):
    """Requests that met all objectives: their share in percent, and how many a second."""

    within_pct: float
    requests_per_s: float | None


class DeploymentParts(msgspec.Struct, frozen=True):
    """One deployment of the report: its evaluation, its models by name, its figures, null where these are left out, and
    goodput by run.
    """

    deployment: documents.DeploymentEvaluation
    label: DeploymentLabel
    models: dict[str, schema.Model]
    figures: DeploymentFigures | None
    goodput: Mapping[str, Goodput]

    @property
    def facts(self) -> schema.DeploymentFacts | None:
        """Facts of its server, the same for all of its models; null without a model."""
        return next((m.deployment for m in self.models.values()), None)


def build_report(
    evaluation: documents.Evaluation,
    alpha: documents.CoefficientFile,
    beta: documents.CoefficientFile,
    figures: Mapping[str, DeploymentFigures] | None,
    *,
    traced: tuple[int, int] | None = None,
    slo_ms: Mapping[str, float] = MappingProxyType({}),
    goodput: Mapping[str, Goodput] = MappingProxyType({}),
    points: Section | None = None,
) -> Report:
    """Build the whole report.

    `figures` are those of the drawn deployments, by deployment id, and null without tables; `traced` is the first and
    the last time of the traces in Unix nanoseconds. `slo_ms` are objectives, and `goodput` counts the requests of each
    run that met all of them. `points` is the section on points of a benchmark.
    """
    models = {(m.deployment_id, m.name): m for m in (*beta.models, *alpha.models)}
    settings = {
        deployment_id: {k: str(v) for k, v in m.deployment.settings.items()}
        for (deployment_id, _), m in models.items()
        if m.deployment is not None
    }
    labels = deployment_labels(
        {s.deployment_id: (s.runs, settings.get(s.deployment_id, {})) for s in evaluation.deployments}
    )
    has_tables = figures is not None
    if figures is None:
        figures = {s.deployment_id: figures_of_evaluation(s, slo_ms) for s in evaluation.deployments}
    deployments = [
        DeploymentParts(
            deployment,
            labels[deployment.deployment_id],
            {name: models[deployment.deployment_id, name] for name in deployment.models},
            figures.get(deployment.deployment_id),
            goodput,
        )
        for deployment in evaluation.deployments
    ]
    data = kept(
        "" if has_tables else _NO_TABLES,
        points,
        section("Data", *_data_parts(evaluation), folded=True),
        _across(evaluation),
        section("Terms", table(("term", "meaning"), _TERMS.items()), folded=True),
        _provenance(alpha, beta),
    )
    if len(deployments) == 1 and transfer_of(beta) is not None:
        of_models = (
            section(f"`{name}`", *_coefficients(model), *(f"Note: {text}." for text in model.notes), folded=True)
            for name, model in deployments[0].models.items()
        )
        return transferred_report(evaluation, alpha, beta, [*of_models, _provenance(alpha, beta)])
    subject = _subject(evaluation, traced)
    # A single deployment needs no overview: its verdicts and errors are the report.
    if len(deployments) == 1:
        (only,) = deployments
        return Report(_title(only), lead(only.deployment), (*_deployment(only), *data), subject)
    sections = [
        section(
            f"Deployment `{one.label.name}`",
            f"**{lead(one.deployment)}**",
            *_deployment(one),
        )
        for one in deployments
    ]
    # The first one is open: a page of headings alone would say nothing.
    sections = [msgspec.structs.replace(one, folded=k > 0, is_choice=True) for k, one in enumerate(sections)]
    exactness = least_exact([(one.label.name, one.deployment) for one in deployments])
    titles = list(dict.fromkeys(_title(one) for one in deployments))
    title = " and ".join(titles) if len(titles) < 3 else f"{titles[0]} and {len(titles) - 1} more models"
    return Report(
        title,
        exactness,
        (msgspec.structs.replace(_overview(deployments), leads_to=tuple(sections)), *sections, *data),
        subject,
    )


def _title(one: DeploymentParts) -> str:
    model = (one.facts and one.facts.model) or one.label.name
    return f"{model} on {one.facts.gpu}" if one.facts and one.facts.gpu else model


def _subject(evaluation: documents.Evaluation, traced: tuple[int, int] | None) -> str:
    servers = evaluation.ingest.servers
    counts = (
        plural(len({s.run_id for s in servers}), "run"),
        plural(len(evaluation.deployments), "deployment"),
        plural(sum(s.requests for s in servers), "request"),
        plural(sum(s.steps for s in servers), "traced step"),
    )
    moments = [f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%d %H:%M}" for ns in traced or ()]
    when = f" Traced {' to '.join(moments)} UTC." if moments else ""
    return f"Latency models of a vLLM server, fitted on its traces: {', '.join(counts)}.{when}"


def _headline_table(deployment: documents.DeploymentEvaluation) -> Table:
    """Return the errors a reader asks for first, each beside those of the baseline and of gradient boosting."""
    # In the order of a simulation: all latencies are made of step times.
    step = step_entry(deployment)
    errors: dict[str, tuple[validation.Metrics, validation.Metrics, validation.Metrics | None]] = {}
    if step:
        errors[step_times(step).removesuffix("s")] = step.holdout, step.baseline, step.gradient_boosting
    for key, label in LATENCY_TITLES.items():
        if entry := deployment.latency.get(key):
            errors[label] = entry.predicted, entry.baseline, entry.gradient_boosting
    rows = [
        (
            label,
            *(percent(v) for m in (model, baseline) for v in (m.mdape_pct, m.p90_ape_pct)),
            percent(boosted.mdape_pct if boosted else None),
            percent(step.noise.mdape_pct if step and step.noise and model is step.holdout else None),
            count(model.n),
        )
        for label, (model, baseline, boosted) in errors.items()
        if model.mdape_pct is not None
    ]
    heads = (f"{who}{what} %" for who in ("", "baseline ") for what in ("median", "P90"))
    return table(("error of", *heads, "reference median %", "machine's noise median %", "held out"), rows)


_REPLAY_NOTE = (
    "**In a closed loop:** the held-out part of each run is replayed from the arrivals and lengths of its requests; "
    "queue, batches and latencies are the replay's own. *Constant* is what the training part measured, *predict* "
    "what `tracefit predict` says of each request on its arrival. The errors of single models, given the measured "
    "queue and batches, stand below."
)


_REPLAYED_FACTS = {"output_tokens_per_s": "output tokens/s", "waiting_mean": "waiting on average"}


def _replay_parts(deployment: documents.DeploymentEvaluation) -> tuple[ReportPart, ...]:
    """Return measured and replayed latencies of each run, or why a run is not replayed."""
    rows, lines = [], []
    for run in deployment.replays:
        name = f"`{run.run_id}`"
        for latency, label in (*LATENCY_TITLES.items(), ("client", "until departure")):
            if points := run.of(latency):
                p50, p90 = points[:2]
                guesses = (p.error_of(g) for p in (p50, p90) for g in (p.constant, p.predicted))
                cells = (number(p50.measured / 1e3), number(p50.replayed / 1e3))
                errors = (*(p.error_pct for p in points), *guesses)
                rows.append((name, label, *cells, *map(_signed, errors)))
        if run.reason:
            lines.append(sentence(not_replayed([run.run_id], run.reason)))
            continue
        others = {q.name: q for q in run.quantities}
        facts = [
            f"{words} {number(q.measured)} measured, {number(q.replayed)} replayed"
            for key, words in _REPLAYED_FACTS.items()
            if (q := others.get(key))
        ]
        lines.append(f"Run {name}: {'; '.join((compared_requests(run), *facts, *run.notes))}.")
    heads = [f"P{q} error %" for q in (50, 90, 99)]
    heads += [f"{way} P{q} %" for q in (50, 90) for way in ("constant", "predict")]
    latencies = table(("run", "replayed", "measured P50 ms", "replayed", *heads), rows)
    parts = (_REPLAY_NOTE if rows else "", latencies, Bullets(tuple(lines)))
    return _folded_if_many("Replays of", len(deployment.replays), *parts)


_MANY_RUNS = 8


def _folded_if_many(title: str, runs: int, *parts: ReportPart) -> tuple[ReportPart, ...]:
    """Return parts with something for each run; those of many runs are a folded section."""
    return parts if runs <= _MANY_RUNS else (section(f"{title} {count(runs)} runs", *parts, folded=True),)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _holds_for(deployment: documents.DeploymentEvaluation) -> str:
    # Errors were measured on such load: beyond it they are unknown.
    step = step_entry(deployment)
    load = step.error_over_load if step else None
    if load is None:
        return ""
    low, high = (f"{v:,.0f}" for v in load.training_range)
    return f"{low} to {high} {'tokens in the caches' if load.load == 'running_tokens' else 'requests in the batch'}"


def _overview(deployments: Sequence[DeploymentParts]) -> Table:
    """Return a table with a row per deployment: its verdicts, its main errors and the load they are valid for."""
    uses = list(dict.fromkeys(use for one in deployments for use in one.deployment.verdicts))
    rows = []
    for one in deployments:
        # If deployment names differ only in their hash, show their runs as well.
        name = f"`{one.label.name}`" + (f", {_some_runs(one.deployment)}" if one.label.detail else "")
        answers = [f"**{one.deployment.verdicts[u].answer}**" if u in one.deployment.verdicts else "-" for u in uses]
        step, run = step_entry(one.deployment), least_exact_replay(one.deployment)
        replayed = [[q.error_pct for q in run.of(name)[:2]] if run else [] for name in LATENCY_TITLES]
        cells = [f"{' / '.join(map(_signed, pair))} %" if pair else "-" for pair in replayed]
        cells.append(f"{percent(step.holdout.mdape_pct)} / {percent(step.holdout.p90_ape_pct)} %" if step else "-")
        rows.append((name, *answers, *cells, _holds_for(one.deployment) or "-"))
    heads = (f"replayed {label}, error at P50 / P90" for label in LATENCY_TITLES.values())
    return table(("deployment", *uses, *heads, "step time, median / P90 error", "holds for"), rows)


def _some_runs(deployment: documents.DeploymentEvaluation, most: int = 2) -> str:
    more = f" and {len(deployment.runs) - most} more" if len(deployment.runs) > most else ""
    return f"{'run' if len(deployment.runs) == 1 else 'runs'} {', '.join(deployment.runs[:most])}{more}"


def _deployment(one: DeploymentParts) -> tuple[ReportPart, ...]:
    """Return the parts of one deployment: its server as measured, verdicts and what would better them, figures, errors;
    details are folded.
    """
    deployment, models, load = one.deployment, one.models, _holds_for(one.deployment)
    figures = one.figures or DeploymentFigures((), (), (), note=_NO_FIGURES)
    errors = _headline_table(deployment)
    notes = (
        f"**Holds for {load}.**" if load else "",
        _HOLDOUT_NOTE,
        _LATENCY_NOTE if deployment.latency else "",
    )
    lost = (not_fitted([m.name], m.reason, m.remedy) for m in deployment.not_fitted)
    # Step times before waits: latencies build on them.
    names = sorted(deployment.models, key=lambda name: not is_step_model(name))
    return kept(
        f"Deployments of this name differ: this one has {one.label.detail}." if one.label.detail else "",
        *_served(one),
        verdicts(deployment),
        _to_record(deployment),
        *figures.top,
        *_replay_parts(deployment),
        errors,
        " ".join(filter(None, notes)) if errors.rows else "",
        _machine_noise(deployment),
        _machine_speed(deployment),
        _negligible(deployment),
        *(f"Note: {text}." for text in deployment.notes),
        *(overloaded(one, _INCLUDE_OVERLOADED).paragraph for one in deployment.overloaded),
        *figures.first,
        _slowest(figures.slowest),
        figures.note,
        *(f"Note: {text}." for text in figures.failed),
        section(
            "Errors on the hold-out",
            _THRESHOLDS_NOTE,
            _errors(deployment),
            Bullets((*_doubtful(deployment), *(f"**{one.claim}**{one.detail}" for one in lost))),
            summed_line(deployment.summed_step_time) if deployment.summed_step_time else "",
            folded=True,
        ),
        section("Request latencies", *figures.latencies, *_latency_parts(deployment), folded=True),
        *(
            section(
                f"`{name}`",
                *_model_parts(deployment.models[name], models[name], deployment.exclusions.get(name, {})),
                *figures.models.get(name, ()),
                folded=True,
            )
            for name in names
        ),
        section(
            "Server, step clock and training ranges",
            *_server_facts(one),
            _clock(deployment.timeline),
            _ranges(models),
            folded=True,
        ),
    )


def _to_record(deployment: documents.DeploymentEvaluation) -> Section | None:
    """Return what to record for a yes on every use, as commands to copy; null where every use has one."""
    if (record := deployment.record) is None:
        return None
    stretches = table_of(record.stretches, _STRETCHES)
    return section(
        f"What to record for a yes on {in_words(record.uses)}: {number(record.minutes)} minutes",
        f"{record.rounds} rounds of these stretches against the server, while it records {record.sampling}:",
        stretches,
        ShellLines(record.command),
        _BEFORE_RECORDING,
        folded=True,
    )


_STRETCHES: dict[str, Callable[[documents.LoadStretch], str]] = {
    "stretch": lambda one: one.name,
    "seconds": lambda one: f"{one.seconds:.0f}",
    "requests/s": lambda one: number(one.requests_per_s),
    "prompt tokens": lambda one: _uniform(one.prompt_tokens, one.prompt_spread),
    "output tokens": lambda one: _uniform(one.output_tokens, one.output_spread),
    "reason": lambda one: sentence(one.reason),
}
_BEFORE_RECORDING = (
    "Every call has its own seed: with the same seed it sends the same prompts, which then are in the prefix cache. "
    "The load generator needs the tokenizer of the model: add `--tokenizer` where the server names its model "
    "otherwise. Nothing else should use the server meanwhile. Put the new run into the place of the old one, or "
    "beside it."
)


def _uniform(mean: int, spread: float) -> str:
    """Write the range of uniform lengths."""
    low, high = max(int(mean * (1 - spread)), 1), math.ceil(mean * (1 + spread))
    return count(mean) if low == high else f"{count(low)} to {count(high)}"


def _served(one: DeploymentParts) -> tuple[ReportPart, ...]:
    """Return requests, rates and latencies of the server, a row per run."""
    rows = []
    for run in one.deployment.served:
        latencies = [getattr(run, name) for name in LATENCY_TITLES]
        good = one.goodput.get(run.name)
        within = (f"{percent(good.within_pct)} %", number(good.requests_per_s)) if good else ("-", "-")
        failed = f"{count(run.failed)} ({percent(100 * run.failed / run.requests)} %)" if run.failed else "0"
        cells = (
            *(f"`{run.name}`", count(run.requests), failed, count(run.preemptions)),
            *(number(run.requests_per_s), number(run.output_tokens_per_s)),
            number(run.prompt_tokens / run.seconds if run.seconds else None),
            *(" / ".join(map(number, q.percentiles_ms)) if q.n else "-" for q in latencies),
        )
        rows.append((*cells, *(within if one.goodput else ())))
    heads = ("requests", "failed", "preemptions", "requests/s", "output tokens/s", "prompt tokens/s")
    percentiles = (f"{label} P50 / P90 / P99, ms" for label in LATENCY_TITLES.values())
    goodput = ("within the objectives", "goodput, requests/s") if one.goodput else ()
    every = table(("run", *heads, *percentiles, *goodput), rows)
    return _folded_if_many("What the servers did in", len(rows), every)


def _slowest(requests: Sequence[SlowRequest]) -> Section:
    """Return the slowest requests, each with its reason."""
    rows = [
        (
            *(f"`{r.run_id}`", f"`{r.name}`", LATENCY_TITLES[r.latency], number(r.ttft_ms), number(r.e2e_ms)),
            *("-" if v is None else count(v) for v in (r.prompt_tokens, r.output_tokens)),
            sentence(r.reason),
        )
        for r in requests
    ]
    head = ("run", "request", "slow in", "TTFT, ms", "E2E, ms", "prompt", "output", "reason")
    return section("The slowest requests", table(head, rows))


def _negligible(deployment: documents.DeploymentEvaluation) -> str:
    """Name the models of waits that decide no verdict, as no use can tell their errors."""
    names = [f"`{name}`" for name, entry in deployment.models.items() if is_negligible_wait(name, entry)]
    if not names:
        return ""
    return (
        f"Errors of {' and '.join(names)} are under a millisecond, as those of a constant guess are: no use can "
        "tell, and no verdict counts them."
    )


def _doubtful(deployment: documents.DeploymentEvaluation) -> Iterator[str]:
    """Name the models that are worse than a constant guess, then those whose mean error misleads, each in a
    sentence.
    """
    models = deployment.models.items()
    worse = (
        worse_than_median(name, e.skill, e.holdout.mae, e.baseline.mae, is_negligible=is_negligible_wait(name, e))
        for name, e in models
    )
    misleading = (
        mean_misleads(name, m.mape_pct, m.mdape_pct, m.p90_ape_pct)
        for name, m in ((name, entry.holdout) for name, entry in models)
    )
    return (fact.paragraph for fact in (*worse, *misleading) if fact)


def _server_facts(one: DeploymentParts) -> tuple[ReportPart, ...]:
    runs = f"Deployment `{one.deployment.deployment_id}`, runs {', '.join(f'`{r}`' for r in one.deployment.runs)}."
    facts = one.facts
    if facts is None:
        return (runs,)
    lacking = {
        "Without a GPU specification, hardware features are unknown and left out.": facts.gpu,
        "Without a config.json of a known kind, features of the model are unknown and left out.": facts.architecture,
    }
    lines = (
        runs,
        f"Model {facts.model or 'not named'}, GPU {facts.gpu or facts.settings.get('gpu') or 'not given'}.",
        *(text for text, value in lacking.items() if value is None),
        f"Assumed, because no input states it: {'; '.join(facts.assumed)}." if facts.assumed else "",
    )
    settings = [(f"`{k}`", str(v)) for k, v in facts.settings.items() if k not in ("model", "gpu")]
    return " ".join(filter(None, lines)), table(("setting", "value"), settings, folded="Server settings")


_INCLUDE_OVERLOADED = f"`tracefit train {flag_of(TrainOptions, 'include_overloaded')}`"


_ERRORS = ("model", *ERRORS, "baseline MAE", "reference MAE")


def _errors(deployment: documents.DeploymentEvaluation) -> Table:
    rows = []
    for name, entry in deployment.models.items():
        beside = (number(entry.baseline.mae), number(_mae(entry.gradient_boosting)))
        errors = entry.holdout
        if deployment.summed_step_time is not None and entry is step_entry(deployment):
            # The report has one bias of step times: the bias of all steps, not only of single ones.
            errors = replace(errors, bias_pct=deployment.summed_step_time.bias_pct)
        rows.append((f"`{name}`", *metrics(errors), *beside))
        # Baseline and reference are measured on all rows together.
        rows += [(f"`{name}`, {kind.replace('_', ' ')}", *metrics(m), "", "") for kind, m in entry.by_group.items()]
    return table(_ERRORS, rows)


def _ranges(models: dict[str, schema.Model]) -> Section:
    """Give the training ranges: a prediction outside them extrapolates."""
    rows = [
        (
            f"`{name}`{f', {form}' if isinstance(model, RegimesModel) else ''}",
            f"`{t.feature}`",
            interval(t.training_range),
        )
        for name, model in models.items()
        for form, line in main_forms(model).items()
        for t in line.terms
        if t.training_range is not None
    ]
    text = "Smallest and largest value in the training rows. A prediction outside them extrapolates."
    ranges = table(("model", "feature", "training range"), rows)
    return section("Training ranges", text if rows else "", ranges)


def _provenance(alpha: documents.CoefficientFile, beta: documents.CoefficientFile) -> Section | None:
    made = beta.provenance or alpha.provenance
    if made is None:
        return None
    rows = [
        (made.tool, made.version),
        *((name, version) for name, version in made.libraries.items()),
        *(
            (
                f"option {name.replace('_', '-')}",
                "yes" if value is True else "no" if value is False else str(value),
            )
            for name, value in made.options.items()
        ),
        *((f"file of option {name}, sha256", f"`{digest}`") for name, digest in made.files.items()),
    ]
    # Models of one deployment are fitted on the same inputs: one line for all of them.
    inputs = {m.training.inputs_sha256: m.deployment_id or "" for m in (*beta.models, *alpha.models) if m.training}
    rows += [(f"inputs of `{deployment}`, sha256", f"`{digest}`") for digest, deployment in inputs.items()]
    return section("Provenance", table(("item", "value"), rows), folded=True)


_ACROSS_INTRO = (
    "Each run, model and GPU, and each deployment of a model with several on one GPU, is left out in "
    "turn and predicted by a model fitted on the others; errors are on all of its rows."
)
_LEFT_OUT_COLUMNS: dict[str, Callable[[results.LeftOutErrors], str]] = {
    "left out": lambda one: f"{one.kind} `{one.left_out}`",
    "model": lambda one: f"`{one.model}`",
    "features": lambda one: one.feature_set,
    "n": lambda one: count(one.errors.n),
    "median APE %": lambda one: percent(one.errors.mdape_pct),
    "MAPE %": lambda one: percent(one.errors.mape_pct),
    "bias %": lambda one: percent(one.errors.bias_pct),
    "constant per batch size, MAPE %": lambda one: percent(one.by_batch_size.mape_pct) if one.by_batch_size else "-",
    "MAE us": lambda one: number(one.errors.mae),
    "baseline MAE": lambda one: number(one.baseline.mae),
    "reference MAE": lambda one: number(_mae(one.gradient_boosting)),
}


def _across(evaluation: documents.Evaluation) -> Section | None:
    """Return the section on leaving out runs, models and GPUs; null unless that was requested."""
    if not evaluation.across and not evaluation.across_notes:
        return None
    notes = Bullets(tuple(f"Note: {note}." for note in evaluation.across_notes))
    return section("Across runs, models and GPUs", _ACROSS_INTRO, table_of(evaluation.across, _LEFT_OUT_COLUMNS), notes)


# -- the data -------------------------------------------------------------------------------------------


_SERVERS: dict[str, Callable[[documents.ServerEntry], str]] = {
    "run": lambda s: f"`{s.run_id}`",
    "server": lambda s: s.server,
    "seconds": lambda s: number(s.seconds),
    "epochs": lambda s: count(s.epochs),
    "requests": lambda s: count(s.requests),
    "steps": lambda s: count(s.steps),
    "steps sampled": lambda s: share(s.step_sampling),
    "journeys sampled": lambda s: share(s.journey_sampling),
    "snapshots": lambda s: share(s.snapshot_sampling),
    "dropped events": lambda s: count(s.dropped_events),
}
_SAMPLING = (
    "Sampling rates are estimated from the traces: the share of counted steps that have a summary; the share of the "
    "requests in step summaries that have a journey, `-` without any summary; the share of summarised steps that "
    "have snapshots."
)
_ROWS = (
    "Rows used, and rows left out by reason. Training leaves out warm-up, outliers and steps with many preemptions; "
    "idle gaps and restarts are left out everywhere. Errors are measured on the held-out rows."
)
_MANY_ROWS = 12


def _data_parts(evaluation: documents.Evaluation) -> tuple[ReportPart, ...]:
    """Return the counts of the ingest, and the rows of each model."""
    entry = evaluation.ingest
    dropped = (
        f"**{dropped_events(entry.dropped_events)}** and are missing from every number here. "
        f"{sentence(RAISE_EVENT_LIMIT)}"
    )
    rows = [
        (f"`{r.run_id}`", f"`{r.model}`", count(r.trained), count(r.held_out), reasons(r.left_out) or "none")
        for deployment in evaluation.deployments
        for r in sorted(deployment.rows, key=lambda r: r.run_id)
    ]
    folded = "Rows by run and model" if len(rows) > _MANY_ROWS else None
    events = [(f"`{name}`", count(n)) for name, n in entry.events.items()]
    return (
        _ingested(entry),
        dropped if entry.dropped_events else "",
        *(sentence(without_attribute(*lacking)) for lacking in entry.missing_attributes.items()),
        _SAMPLING if entry.servers else "",
        table_of(entry.servers, _SERVERS),
        _ROWS if rows else "",
        table(("run", "model", "trained", "held out", "left out"), rows, folded=folded),
        table(("event", "count"), events, folded="Events by name"),
    )


def _ingested(entry: documents.IngestEntry) -> ReportPart:
    rows = [
        ("files", count(entry.files)),
        ("bytes", count(entry.bytes)),
        ("spans", count(entry.spans)),
        ("spans of other scopes, left out", count(entry.other_spans)),
        ("unreadable records (rejects)", count(entry.rejects)),
        *((f"implausible values left out: {rule}", count(n)) for rule, n in entry.implausible.items()),
        ("duplicate spans, counted once", count(entry.duplicates)),
        ("events dropped by the server's SDK", count(entry.dropped_events)),
    ]
    return table(("what", "count"), rows)


_MOST_SAMPLED = 0.98
_AHEAD_TEXT = (
    "Scheduling runs one step ahead of execution (asynchronous scheduling): the time of a step is the "
    "cycle after its own start."
)
_SAMPLED_TEXT = (
    "Journeys are sampled: batches are known from step summaries only, and the queue state is that of "
    "the nearest sampled step."
)


def _clock(t: documents.TimelineEntry) -> Section:
    """Return the section on the source of step times: the coverage of `step.duration_us`, where steps have it, and the
    step clock.
    """
    rows = {
        "busy time covered by `step.duration_us`": share(t.duration_coverage),
        "median cycle, us": number(t.median_cycle_us),
        "median `step.duration_us`": number(t.median_duration_us),
        "steps known": count(t.steps_known),
        "consecutive steps (cycles)": count(t.adjacent_cycles),
        "intervals between other known starts": f"{count(t.intervals)} over {count(t.interval_steps)} steps",
        "idle gaps among both": count(t.idle_gaps),
        "sampled steps whose batch agrees with the journeys": share(t.composition_agreement),
        "events that disagree with the step clock": (
            f"{count(t.clock_disagreements)} of {count(t.clock_checked_events)}"
        ),
        "API events corrected from another host's clock": count(t.clock_corrected_events),
    }
    return section(
        "The step clock" if t.duration_coverage is None else "`step.duration_us` and the step clock",
        f"Step times come from the {t.beta_target_source}: {t.beta_target_reason}." if t.beta_target_reason else "",
        table(("what", "value"), [row for row in rows.items() if row[1] != UNKNOWN]),
        _AHEAD_TEXT if t.execution_lag_steps else "",
        # The rate is an estimate: nearly 1 may be 1.
        _SAMPLED_TEXT if t.journey_sampling is not None and 0 < t.journey_sampling < _MOST_SAMPLED else "",
    )


# -- request latencies ----------------------------------------------------------------------------------


_ON_ARRIVAL_LABELS = {"predicted": "on arrival", "baseline": "baseline", "gradient_boosting": "reference"}
_GIVEN_STATE_LABELS = {
    "given_measured_state": "given queue and batches",
    "refit_on_holdout": "refit on hold-out",
    "baseline": "baseline",
}

_PREAMBLE = (
    "Errors on requests that arrived in the hold-out of every model. *On arrival*: predictions of `tracefit predict` "
    "from the facts at the arrival: prompt, output and cached tokens, the requests that wait and those that run. "
    "*Baseline*: the training median. *Reference*: gradient boosting on the same inputs."
)
_STATE_PREAMBLE = (
    "Errors on the same requests, had their future been known: measured batches and waits, predicted step times and "
    "overheads. They measure the models, not the predictions of a user. *Refit on hold-out*: the same with the terms "
    "of the step time fitted on the held-out steps themselves; the error that remains is in no coefficient, the "
    "error that disappears comes from changes since the training part."
)


def _latency_parts(deployment: documents.DeploymentEvaluation) -> tuple[ReportPart, ...]:
    """Return the text and tables on composed latencies; one line where none was composed."""
    if not deployment.latency:
        return (f"Not composed: {deployment.latency_missing or 'nothing was fitted'}.",)
    named = [(LATENCY_TITLES.get(name, name), entry) for name, entry in deployment.latency.items()]
    on_arrival, given_state = (
        [
            (label, words, *metrics(errors))
            for label, entry in named
            for way, words in ways.items()
            if (errors := getattr(entry, way)) is not None and (ways is _GIVEN_STATE_LABELS or entry.predicted.n)
        ]
        for ways in (_ON_ARRIVAL_LABELS, _GIVEN_STATE_LABELS)
    )
    left_out = [(label, reasons(entry.left_out)) for label, entry in named if entry.left_out]
    known = [(label, deployment.latency[name]) for name, label in LATENCY_TITLES.items()]
    runs = [(f"`{run}`", *_group(label, e)) for label, entry in known for run, e in entry.by_run.items()]
    phases = [(_phase(e), *_group(label, e)) for label, entry in known for e in entry.by_phase]
    return (
        _PREAMBLE,
        table(("latency", "predicted", *ERRORS), on_arrival),
        table(("latency", "is"), [(label, e.definition) for label, e in named], folded="What each latency is"),
        # The errors of a single run are those of the first table.
        table(("run", *_GROUP_HEAD), runs if len(deployment.runs) > 1 else (), folded="By run"),
        table(("phase", *_GROUP_HEAD), phases, folded=_BY_PHASE),
        section(
            "Given the measured queue and batches",
            _STATE_PREAMBLE,
            table(("latency", "predicted", *ERRORS), given_state),
            table(("latency", "requests"), left_out, folded="Requests in the hold-out without such a prediction"),
        ),
    )


def _machine_noise(deployment: documents.DeploymentEvaluation) -> str:
    """Say how much steps of equal batches differ, near in time; empty where few are equal."""
    entry = step_entry(deployment)
    if entry is None or entry.noise is None:
        return ""
    noise, (least_s, most_s) = entry.noise, entry.noise.apart_s
    rows = "means of intervals" if of_means(entry) else "steps"
    return (
        f"**The machine's noise:** {rows} with equal batches, {least_s:g} to {most_s:g} s apart, are typically "
        f"{percent(noise.mdape_pct)} % off their mean, and one in ten more than {percent(noise.p90_ape_pct)} % "
        f"({count(noise.pairs)} pairs). No model of batches has smaller errors."
    )


def _machine_speed(deployment: documents.DeploymentEvaluation) -> str:
    """Say that the machine had several speeds, so that it may have another one later; empty where it had one."""
    entry = step_entry(deployment)
    if entry is None or entry.speed is None or not entry.speed.adjusted:
        return ""
    return (
        f"**A machine of several speeds:** {speed_text(entry.speed)}. The models are those of the training part's "
        "mean. At another time the machine may have another speed again: errors of as many percent are then its own. "
        "`tracefit plan` has changes as large as these in its intervals, and no larger ones."
    )


def summed_line(entry: results.SummedTime) -> str:
    """Return the bias of the summed step times of the hold-out, the change of speed and the change of load, each by
    itself.
    """
    known = entry.steps_known_pct
    scaled = f", from {percent(known)} % of its steps" if known is not None and known < 99.5 else ""
    bias = (
        f"**Step times of the hold-out summed{scaled}:** predicted {entry.predicted_us / 1e6:,.2f} s, measured "
        f"{entry.actual_us / 1e6:,.2f} s, bias {entry.bias_pct:+.2f} % (two standard deviations "
        f"{entry.bias_2sd_pct:.2f} %, by bootstrap over {entry.blocks} blocks of time); the step or interval with the "
        f"largest error contributes {entry.max_contribution_pct:+.2f} points."
    )
    return " ".join((bias, *_changes(entry)))


def _changes(entry: results.SummedTime) -> Iterator[str]:
    if change := speed_change(entry):
        yield f"**The server changed:** {change}: no coefficient can correct that."
    elif entry.speed_change_pct is None:
        yield "**Speed of the server:** there are no equal batches in both parts to compare it by."
    elif entry.speed_change_2sd_pct is not None:
        yield (
            "**Speed of the server:** no change beyond chance; steps of equal batches take "
            f"{longer(entry.speed_change_pct)} than in the training part (± {percent(entry.speed_change_2sd_pct)} %, "
            "two standard deviations)."
        )
    if entry.load_change_pct is not None:
        yield (
            f"**Load:** by its batch a step of the hold-out takes {longer(entry.load_change_pct)} than one of the "
            "training part."
        )


def burst_line(bursts: Sequence[validation.Burst]) -> str:
    """Return the bursts outside the range of the admission model; empty without any."""
    named = "; ".join(
        (
            f"`{b.run_id}` {b.from_s:.2f} to {b.to_s:.2f} s: {count(b.requests)} requests, {count(b.holdout_requests)} "
            "held out"
        )
        for b in bursts
    )
    text = (
        "**Bursts, outside the range of this model:** requests that arrived faster than the API process works, each "
        f"behind five or more others ({named}). The API work was fitted without them. With a step clock the model "
        "lets each of them wait until those before it are done; a prediction for a single request cannot know of the "
        "others. The errors above include them (`burst` and `no_burst` apart)."
    )
    return text if bursts else ""


_BY_PHASE = "By workload phase (an interval of a run with one arrival rate)"
_GROUP_HEAD = ("latency", *ERRORS, "baseline median %", "given queue and batches, median %")


def _group(label: str, errors: results.LatencyErrors) -> tuple[str, ...]:
    others = (errors.baseline.mdape_pct, errors.given_measured_state.mdape_pct)
    return (label, *metrics(errors.predicted), *(percent(v) for v in others))


def _phase(phase: validation.Phase) -> str:
    rate = f"{number(phase.arrivals_per_s)} requests/s"
    return f"`{phase.run_id}` {phase.from_s:.0f} to {phase.to_s:.0f} s, {rate}"


# -- one model ------------------------------------------------------------------------------------------


TROUBLE = 30.0
"""Condition number above which single coefficients are poorly determined (Belsley, Kuh and Welsch 1980)."""


_CANDIDATES: dict[str, Callable[[validation.Candidate], str]] = {
    "candidate": lambda c: f"`{c.name}`{' **chosen**' if c.chosen else ''}",
    "features": lambda c: count(c.features),
    "MAE inside": lambda c: number(c.inside_mae),
    "MAE beyond the load": lambda c: number(c.beyond_mae),
    "reason": lambda c: c.reason,
}


def _model_parts(entry: validation.Validation, model: schema.Model, left_out: dict[str, int]) -> tuple[ReportPart, ...]:
    """Return the section on one model, without its figures; `left_out` counts rows left out of its fit, by reason."""
    t, phases = model.target, entry.by_phase if len(entry.by_phase) > 1 else ()
    facts = (
        *_model_facts(entry, model, left_out),
        *trust_lines(entry),
        *(f"Note: {text}." for text in model.notes),
    )
    by_phase = [(_phase(p), *metrics(p.holdout), percent(p.baseline.mape_pct)) for p in phases]
    unused = [(f"`{x.feature}`", x.reason) for x in model.features_left_out]
    return (
        f"Predicts {t.definition} ({t.unit}, from {t.source.replace('_', ' ')})." if t else "",
        *_coefficients(model),
        burst_line(entry.bursts),
        Bullets(facts),
        table(("phase", *ERRORS, "baseline MAPE %"), by_phase, folded=_BY_PHASE),
        table_of(entry.candidates, _CANDIDATES, folded="Candidates compared on the training part"),
        table(("feature", "reason"), unused, folded="Features left out"),
    )


def _model_facts(entry: validation.Validation, model: schema.Model, left_out: dict[str, int]) -> Iterator[str]:
    if entry.boundary_accuracy_pct is not None:
        yield (
            f"**Step boundary predicted correctly:** {percent(entry.boundary_accuracy_pct)} % of held-out requests "
            f"whose step is known ({percent(entry.boundary_accuracy_without_work_pct)} % with zero API work)."
        )
    if entry.classifier is not None:
        accuracy = number(entry.classifier.balanced_accuracy)
        counts = reasons(entry.classifier.confusion)
        yield f"**Condition of the first regime, on the hold-out:** balanced accuracy {accuracy} ({counts})."
    if model.estimator is not None:
        e = model.estimator
        yield (
            f"**Estimator:** {e.name.replace('_', ' ')}, {e.penalty} penalty {e.strength:g}, chosen by {e.chosen_by}."
        )
    if model.training is not None:
        t = model.training
        yield (
            f"**Rows:** {count(t.rows_used)} of {count(t.rows)} trained, {count(t.rows_holdout)} held out; "
            f"left out: {reasons(left_out) or 'none'}."
        )
        yield (
            f"**In-sample MAPE,** for comparison with the hold-out's {percent(entry.holdout.mape_pct)} %: "
            f"{percent(entry.train.mape_pct)} %."
        )
    if entry.rows_by_source:
        yield f"**Training rows by source:** {reasons(entry.rows_by_source)}."


def _coefficients(model: schema.Model) -> Iterator[ReportPart]:
    match model:
        case RegimesModel():
            for regime in model.regimes:
                yield f"Regime *{regime.name}*, {_condition(regime.when)}:"
                yield _terms(regime.intercept, regime.terms)
        case BoundaryModel():
            # The wait itself is not a coefficient: whoever simulates steps knows when the next one starts.
            yield "API work:"
            yield _terms(model.work.intercept, model.work.terms)
            yield f"then the first step start at or after it, {exact(model.offset.value)} us; without a step clock:"
            yield _terms(model.without_clock.intercept, model.without_clock.terms)
            if model.expectation:
                yield _expectation(model.expectation)
        case _:
            yield _terms(model.intercept, model.terms)


def _expectation(expected: schema.Expectation) -> str:
    return (
        f"Expected where the step starts are not known: {number(expected.intercept.value)} us; of a step in progress "
        f"{number(expected.residual.value)} us are left on average (half a cycle, cycles weighted by their length), "
        f"and a step is in progress {share(expected.busy_share)} of the time."
    )


def _condition(when: Condition) -> str:
    text = when.text(lambda name: f"`{name}`", exact)
    # The last regime has no condition of its own: it predicts what the others leave.
    return "otherwise" if not text else text if text == NEVER else f"when {text}"


def _terms(intercept: Number, terms: Iterable[Term]) -> Table:
    rows = [(f"`{t.feature}`", t.unit, exact(t.value), interval(t.ci95), interval(t.training_range)) for t in terms]
    constant = ("intercept", "us", exact(intercept.value), interval(intercept.ci95), "")
    return table(("term", "unit", "value", "95 % interval", "training range"), (constant, *rows))


def interval(pair: tuple[float, float] | None) -> str:
    """Write both ends of a range; empty without one."""
    return f"{exact(pair[0])} to {exact(pair[1])}" if pair else ""


# How far the model can be trusted


def trust_lines(entry: validation.Validation) -> Iterator[str]:
    """Yield one paragraph per fact of a model's validation."""
    if equations := entry.held_out_equations:
        row, step = equations.per_equation, equations.per_step
        yield (
            f"**All held-out cycles and intervals** ({reasons(equations.rows_by_source)}): MAPE "
            f"{percent(row.mape_pct)} % each (n = {row.n:,}), {percent(step.mape_pct)} % weighted by steps (n = "
            f"{step.n:,} steps)."
        )
    if entry.prediction_intervals and entry.interval_coverage_pct is not None:
        several = len(entry.prediction_intervals) > 1
        limits = "; ".join(
            f"{f'*{p.regime}* ' if several else ''}{_limits(p, entry.unit)}" for p in entry.prediction_intervals
        )
        held = f"It held {entry.interval_coverage_pct:.1f} % of the held-out rows."
        yield f"**95 % prediction interval:** {limits}. {held}"
    # Predictions do not suffer from collinearity, single coefficients do: who reads them as costs has to know.
    several = len(entry.collinearity) > 1
    if parts := list(filter(None, (_collinear(one, several=several) for one in entry.collinearity))):
        yield f"**Collinearity of the kept features:** {'; '.join(parts)}."
    if entry.extrapolated_rows:
        by_feature = ", ".join(f"`{name}` {rows:,}" for name, rows in entry.extrapolated.items())
        yield (
            f"**Extrapolation:** {entry.extrapolated_rows:,} of {entry.holdout.n:,} held-out rows lie outside the "
            f"range of the training rows ({by_feature}): their predictions, and the errors above, are extrapolations."
        )
    if every := entry.stretches:
        yield (
            "**Every third of ten equal stretches held out,** in place of the last 30 %: MAPE "
            f"{percent(every.mape_pct)} % and bias {percent(every.bias_pct)} % (n = {every.n:,}). The last 30 % may "
            "hold one kind of load only, such as a drain."
        )
    if beyond := entry.load_extrapolation:
        yield _beyond_load(beyond, entry.by_load.get("inside"))
    if len(entry.learning_curve) > 1:
        points = ", ".join(f"{number(p.mae)} ({p.rows:,})" for p in entry.learning_curve)
        yield f"**Hold-out MAE, {entry.unit},** by number of training rows, the latest before the hold-out: {points}."


def _limits(interval: validation.PredictionInterval, unit: str) -> str:
    if interval.kind == "ratio":
        return f"{number(interval.low)} to {number(interval.high)} times the prediction"
    return f"the prediction {interval.low:+,.0f} to {interval.high:+,.0f} {unit}"


def _collinear(one: validation.Collinearity, *, several: bool) -> str:
    # One feature alone is collinear with nothing.
    if one.condition_number is None or len(one.variance_inflation) < 2:
        return ""
    worst = max(one.variance_inflation, key=lambda name: one.variance_inflation[name])
    name = f"*{one.regime}* " if several else ""
    trouble = "; **the data do not determine single coefficients well**"
    return (
        f"{name}condition number {one.condition_number:.3g}, largest variance inflation "
        f"{one.variance_inflation[worst]:.3g} (`{worst}`){trouble if one.condition_number > TROUBLE else ''}"
    )


def _beyond_load(beyond: validation.LoadExtrapolation, inside: validation.Metrics | None) -> str:
    boosted = beyond.gradient_boosting
    beside = f", gradient boosting {percent(boosted.mape_pct)} %" if boosted else ""
    within = f" On the hold-out inside the training ranges it is {percent(inside.mape_pct)} %." if inside else ""
    return (
        "**Beyond the load:** trained on the lower half of the load of the whole run "
        f"({beyond.load.replace('_', ' ')} up to {number(beyond.cut)}), MAPE {percent(beyond.mape_pct)} % and bias "
        f"{percent(beyond.bias_pct)} % on the upper half (n = {beyond.n:,}){beside}.{within}"
    )
