"""Results of the commands as text for a terminal, at most 80 columns wide; imports nothing heavy.

The reader is a person: blocks per deployment, numbers to three digits, never cut or wrapped. Programs read `--json`.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections import Counter
from dataclasses import fields, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING

from tracefit.errors import printable, spreadsheet_safe
from tracefit.models import targets
from tracefit.options import LoadOptions, ObjectivesOption, RateOption, flag_of
from tracefit.reports.document import plain
from tracefit.reports.facts import (
    HOLDOUT,
    compared_requests,
    expected_within,
    mean_misleads,
    not_compared,
    not_fitted,
    not_replayed,
    point_load,
    worse_than_median,
)
from tracefit.server.settings import without_attribute
from tracefit.text import (
    FIRST_DATE_NS,
    WIDTH,
    DeploymentLabel,
    columns,
    count,
    deployment_labels,
    indented,
    number,
    plural,
    share,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tracefit.features.sets import FeatureSet
    from tracefit.models.deployment import StepPrediction
    from tracefit.models.predict import PredictedDuration
    from tracefit.models.request import RequestPrediction
    from tracefit.reports.trained import RunResult, TrainResult
    from tracefit.results import models, traces
    from tracefit.results.plans import (
        DayPlan,
        PlannedArrivals,
        PlannedDrafts,
        PlannedWindow,
        PlanPoint,
        PlanResult,
        RankedServers,
        ScalerPlan,
        ServerPlan,
    )
    from tracefit.results.replays import QueueWindow, RunReplay
    from tracefit.results.requests import Quantiles, RequestGroup, RequestSummary


def _wrapped(text: str, indent: str = "") -> str:
    """Break a sentence between words, its further lines indented; names and paths stay whole."""
    # Blocks are moved two places to the right afterwards.
    return textwrap.fill(text, WIDTH - 2, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _noted(text: str) -> str:
    return indented(_wrapped(text, "  "))


# Ingesting and training


def ingest_text(result: traces.IngestResult) -> str:
    """Return the counts of each run, and the tables folder."""
    return f"{_runs(result)}\n\ntables  {result.tables}"


def _runs(result: traces.IngestResult) -> str:
    columns_of = attrgetter("spans", "steps", "requests", "rejects", "dropped_events", "duplicate_spans")
    head = ("run", "spans", "steps", "requests", "rejects", "dropped events", "duplicates")
    return columns(head, [(run.run_id, *map(count, columns_of(run))) for run in result.runs])


def ingest_plan_text(plan: traces.IngestPlan) -> str:
    """Return the files that an ingest would read, two lines each."""
    lines = []
    for f in plan.files:
        packed = f", {f.compression}" if f.compression else ""
        lines += [
            f"{f.run_id}  {f.file}",
            f"  {f.shape}{packed}; {f.status}: {count(f.bytes_to_read)} of {count(f.bytes)} bytes to read",
        ]
    return "\n".join([*lines, *(_wrapped(f"left out: {text}", "  ") for text in plan.left_out)])


def train_text(result: TrainResult) -> str:
    """Return the models' errors deployment by deployment, and the written files."""
    return "\n".join([*_deployments(result), *_written(result.files)])


def _written(files: Sequence[Path]) -> list[str]:
    """Name the files, and once more at the end the page to open."""
    pages = [path for path in files if path.suffix == ".html"]
    return [*(f"wrote   {path}" for path in files), *(f"open    {path}" for path in pages)]


def report_text(result: models.ReportResult) -> str:
    """Return the exactness of the models, the verdict on every use of each, and the files of the report."""
    parts = [_wrapped(result.lead)]
    for deployment_id, uses in result.verdicts.items():
        reasons = result.reasons[deployment_id]
        verdicts = [_wrapped(f"  {use}: {answer}. {reasons[use]}", "    ") for use, answer in uses.items()]
        parts.append("\n".join([f"deployment {deployment_id}", *verdicts]))
    parts.append(_wrapped(HOLDOUT))
    return "\n\n".join([*parts, "\n".join(_written(result.files))])


def run_text(result: RunResult) -> str:
    """Return a summary of the main job, ending with the page to open."""
    return f"{_runs(result.ingested)}\n\n{train_text(result.trained)}"


def _deployments(result: TrainResult) -> list[str]:
    labels = deployment_labels({s.deployment_id: (s.runs, s.settings) for s in result.deployments})
    runs = {s.deployment_id: s.runs for s in result.deployments}
    head = ("model", "median error", "P90", "MAE us", "baseline us", "held out")
    lines: list[str] = []
    record_minutes = {s.deployment_id: s.record_minutes for s in result.deployments}
    known = [m.deployment_id for m in result.fitted] + [m.deployment_id for m in result.not_fitted]
    for deployment_id in dict.fromkeys([*labels, *known]):
        label = labels.get(deployment_id, DeploymentLabel(deployment_id))
        lines.append(f"deployment {label.name}")
        if label.detail:
            lines.append(_noted(label.detail))
        lines += _served([r for r in result.served if r.name in runs.get(deployment_id, ())])
        lines += _closed_loop([r for r in result.replays if r.deployment_id == deployment_id])
        fitted = [m for m in result.fitted if m.deployment_id == deployment_id]
        lines.append(indented(columns(head, [_model_row(m) for m in fitted])))
        lines += [_noted(text) for m in fitted for text in _warnings(m)]
        latencies = [x for x in result.latencies if x.deployment_id == deployment_id]
        if latencies:
            given = [f"{x.name.upper()} {_percent(x.given_measured_state_mdape_pct)}" for x in latencies]
            lines.append(indented(columns(_LATENCY_HEAD, [_latency_row(x) for x in latencies])))
            lines.append(_noted(f"given the measured queue and batches: {', '.join(given)}"))
        uses: dict[str, list[str]] = {}
        for use, answer in result.verdicts.get(deployment_id, {}).items():
            reason = result.reasons.get(deployment_id, {}).get(use)
            uses.setdefault(answer if answer == "yes" or not reason else f"{answer}, {reason}", []).append(use)
        lines += [_noted(f"{', '.join(same)}: {verdict}") for verdict, same in uses.items()]
        if minutes := record_minutes.get(deployment_id):
            lines.append(_noted(f"for a yes: record {plural(minutes, 'minute')} as the report says (What to record)"))
        lines += [
            _noted(not_fitted(m.models, m.reason, m.remedy).line)
            for m in result.not_fitted
            if m.deployment_id == deployment_id
        ]
        lines.append("")
    return lines


def _warnings(m: models.ModelSummary) -> Iterator[str]:
    facts = (
        mean_misleads(m.name, m.holdout_mape_pct, m.holdout_mdape_pct, m.holdout_p90_ape_pct),
        worse_than_median(m.name, m.skill, m.holdout_mae, m.baseline_mae, is_negligible=m.is_negligible),
    )
    yield from (fact.line for fact in facts if fact)
    if m.of_means:
        yield f"{m.name}: these are errors of means over several steps, no single step was seen"


_MOST_SHOWN_RUNS = 3
_MOST_SENDERS = 50


def _served(runs: Sequence[RequestGroup]) -> list[str]:
    """Return latencies and rates of each run, those with the most requests first."""
    shown = sorted(runs, key=lambda run: -run.requests)[:_MOST_SHOWN_RUNS]
    rows, lines = [], []
    for run in shown:
        name = f" {run.name}" if len(runs) > 1 else ""
        for latency, label in targets.LATENCY_TITLES.items():
            q: Quantiles = getattr(run, latency)
            if q.n:
                rows.append((f"{label}{name}", *map(number, q.percentiles_ms), count(q.n)))
        rates = f"{number(run.requests_per_s)} requests/s, {number(run.output_tokens_per_s)} output tokens/s"
        failed = f"{count(run.failed)} of {plural(run.requests, 'request')} failed"
        lines.append(_noted(f"{name[1:] or 'the server'}: {rates}, {failed}"))
    if len(runs) > len(shown):
        lines.append(_noted(f"{plural(len(runs) - len(shown), 'more run')} with requests: see the report"))
    return [*([indented(columns(_SERVED_HEAD, rows))] if rows else []), *lines]


def _closed_loop(replays: Sequence[RunReplay]) -> list[str]:
    """Return the errors of replays, the least exact runs first, and why others are not replayed."""
    worst = {r.run_id: r.worst_pct(*targets.LATENCY_TITLES) for r in replays}
    replayed = sorted((r for r in replays if r.quantities), key=lambda r: -(worst[r.run_id] or 0.0))
    rows = []
    for run in replayed[:_MOST_SHOWN_RUNS]:
        name = f" {run.run_id}" if len(replayed) > 1 else ""
        for latency, label in targets.LATENCY_TITLES.items():
            if points := run.of(latency):
                p50 = points[0]
                errors = (*(p.error_pct for p in points), *map(p50.error_of, (p50.constant, p50.predicted)))
                rows.append((f"{label}{name}", *map(_signed, errors), count(run.requests)))
    lines = [indented(columns(_REPLAY_HEAD, rows))] if rows else []
    if len(replayed) > _MOST_SHOWN_RUNS:
        lines.append(_noted(f"{plural(len(replayed) - _MOST_SHOWN_RUNS, 'more run')} replayed: see the report"))
    missing: dict[str, list[str]] = {}
    for run in (r for r in replays if r.reason):
        missing.setdefault(run.reason or "", []).append(run.run_id)
    return [*lines, *(_noted(plain(not_replayed(runs, reason))) for reason, runs in missing.items())]


_SERVED_HEAD = ("measured", "P50 ms", "P90 ms", "P99 ms", "requests")
_REPLAY_HEAD = ("replayed", "P50", "P90", "P99", "constant P50", "predict P50", "requests")
_LATENCY_HEAD = ("predict", "median error", "P90", "baseline", "reference", "held out")


def _latency_row(x: models.LatencySummary) -> tuple[str, ...]:
    errors = (x.predicted_mdape_pct, x.predicted_p90_ape_pct, x.baseline_mdape_pct)
    return (x.name.upper(), *map(_percent, (*errors, x.gradient_boosting_mdape_pct)), count(x.requests))


def _model_row(m: models.ModelSummary) -> tuple[str, ...]:
    errors = (_percent(m.holdout_mdape_pct), _percent(m.holdout_p90_ape_pct))
    return (m.name, *errors, number(m.holdout_mae), number(m.baseline_mae), count(m.rows_holdout))


def _signed(error_pct: float | None) -> str:
    return "" if error_pct is None else f"{error_pct:+.1f} %"


def _percent(value: float | None) -> str:
    return number(value) if value is None else f"{number(value)} %"


def features_text(sets: Sequence[FeatureSet]) -> str:
    """Return the features of each set: name, unit and formula, then the reason."""
    from tracefit.features.roofline import TERM_FORMULAS  # noqa: PLC0415 - it imports polars

    parts = []
    for one in sets:
        lines = [one.name]
        for f in one.features:
            formula = TERM_FORMULAS.get(f.formula, f.formula)
            lines += [f"  {f.name}, {f.unit} = {formula}", indented(indented(_wrapped(f.reason)))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def receive_text(result: traces.ReceiveResult) -> str:
    """Return the received spans and records by sender, and their folder."""
    tables = []
    if result.received_from or not result.recorded_from:
        rows = [
            (printable(r.service), printable(r.instance) or "-", count(r.spans))
            for r in result.received_from[:_MOST_SENDERS]
        ]
        others = len(result.received_from[_MOST_SENDERS:]) + result.forgotten_senders
        if others:
            spans = sum(r.spans for r in result.received_from[_MOST_SENDERS:]) + result.forgotten_spans
            rows.append((plural(others, "other"), "", count(spans)))
        head = ("service", "instance", "spans")
        tables.append(columns(head, rows, left={0, 1}) if rows else "nothing was received")
    if result.recorded_from:
        recorded = [(r.endpoint, count(r.records), count(r.lost_messages), _refused(r)) for r in result.recorded_from]
        tables.append(columns(("engine", "records", "messages lost", "not kept"), recorded))
    files = f"{plural(result.file_count, 'file')}, {count(result.bytes)} bytes"
    requests = f"{count(result.exports)} acknowledged, {_refused(result, ' refused')}"
    return "\n\n".join([*tables, f"requests  {requests}\nwritten   {files}, below {result.out}"])


def _refused(one: traces.ReceiveResult | traces.RecordedFrom, word: str = "") -> str:
    """Write how much was refused, and by which cause."""
    causes = ", ".join(f"{cause} {count(n)}" for cause, n in one.refused_by_cause.items())
    return f"{count(one.refused)}{word}" + (f" ({causes})" if causes else "")


def synth_text(result: models.SynthResult) -> str:
    """Return the size of the generated run, and its folders."""
    lines = [f"{count(result.requests)} requests, {count(result.steps)} steps"]
    return "\n".join([*lines, *(f"wrote   {folder}" for folder in result.folders)])


# Inspecting


def inspect_text(inspection: traces.Inspection) -> str:
    """Return the facts of the runs, the health of their journeys, and the models that can be trained."""
    parts = [*map(_run, inspection.runs), *map(_allowed, inspection.deployments)]
    if inspection.exit_code:
        parts.append("Nothing can be trained from this.")
    return "\n\n".join(parts)


def _run(run: traces.RunFacts) -> str:
    facts = [
        ("size", f"{run.bytes / 1e6:,.1f} MB"),
        *(
            ("file", f"{f.name}: {f.shape}" + (f", {f.compression}" if f.compression != "none" else ""))
            for f in run.files
        ),
        ("service", ", ".join(run.services) or "not named"),
        *(("scope", f"{s.scope}, {plural(s.spans, 'span')}, dialect {s.dialect}") for s in run.scopes),
        *(("scope", f"{scope}, {plural(spans, 'span')}, not read") for scope, spans in run.other_scopes.items()),
        ("rejects", f"{plural(run.rejects, 'record')} could not be read" if run.rejects else ""),
        *(("implausible", f"{n:,} left out: {rule}") for rule, n in run.implausible.items()),
        ("duplicates", plural(run.duplicate_spans, "span") if run.duplicate_spans else ""),
    ]
    events = [(name, f"{n:,}") for name, n in run.events.items()]
    checks = [(c.name, f"{c.held:,} of {c.of:,}") for c in run.checks if c.of]
    return "\n".join(
        [
            f"run {run.run_id}",
            indented(columns(None, [fact for fact in facts if fact[1]], left={0, 1})),
            "",
            *(indented(_server(s)) for s in run.servers),
            "",
            *([indented(columns(("event", "count"), events)), ""] if events else []),
            indented(columns(("check", "holds"), checks)),
            *(_noted(f"{c.name}: {c.detail}") for c in run.checks if c.of and c.detail),
            *(_noted(without_attribute(*lacking)) for lacking in run.missing_attributes.items()),
            *map(_noted, (*run.unread, *run.models)),
        ]
    )


def _server(s: traces.ServerFacts) -> str:
    first, last = s.first_unix_ns, s.last_unix_ns
    time = "time not known"
    if first is not None and last is not None:
        date = f"{datetime.fromtimestamp(first / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
        time = f"{date if first >= FIRST_DATE_NS else 'no date'}, {(last - first) / 1e9:,.1f} s"
    counts = f"{plural(s.epochs, 'epoch')}, {plural(s.requests, 'request')}, {plural(s.steps, 'step')}"
    sampled = {"steps": s.step_sampling, "journeys": s.journey_sampling, "snapshots": s.snapshot_sampling}
    # Kinds that are not traced at all are in the table below.
    rates = ", ".join(f"{what} {share(rate)}" for what, rate in sampled.items() if rate)
    dropped = plural(s.dropped_events, "dropped event")
    return f"server {s.server}: {time}\n  {counts}, {dropped}" + (f"\n  sampled: {rates}" if rates else "")


def _allowed(deployment: traces.DeploymentInspection) -> str:
    name = max((len(a.what) for a in deployment.allows), default=0)
    # 13: two blanks before the name, two on either side of the verdict, and its seven letters.
    lines = [_wrapped(f"  {a.what:<{name}}  {a.verdict:<7}  {a.reason}", " " * (name + 13)) for a in deployment.allows]
    head = f"deployment {deployment.deployment_id} ({', '.join(deployment.runs)}) allows"
    return "\n".join([_wrapped(head, "  "), *lines])


# Requests


_METRICS = {**targets.LATENCY_TITLES, "queue": "in queue"}
_SHOWN_PERCENTILES = ("p50", "p90", "p99")


def requests_text(summary: RequestSummary) -> str:
    """Return counts, latencies and throughput of requests: in total, by phase, by run, over time; in milliseconds."""
    total = summary.total
    states = ", ".join(f"{count:,} {state}" for state, count in summary.states.items())
    counts = f"{total.failed:,} failed, {total.in_flight:,} in flight, {total.preemptions:,} preemptions"
    rates = f"{number(total.output_tokens_per_s)} output tokens/s, {number(total.requests_per_s)} requests/s"
    tokens = f"{total.prompt_tokens:,} prompt and {total.output_tokens:,} output tokens"
    quantiles = ("n", "mean ms", *(f"{p} ms" for p in _SHOWN_PERCENTILES))
    metrics = [(_METRICS[name], *_quantile_row(getattr(total, name))) for name in _METRICS]
    phases = [
        (p.phase, number(None if p.share is None else 100 * p.share), *_quantile_row(p.seconds)) for p in summary.phases
    ]
    parts = [
        f"{_wrapped(f'{total.requests:,} requests: {counts} ({states})', '  ')}\n{rates}, {tokens}",
        (
            f"{columns(('', *quantiles), metrics)}\nin queue: since arrival, as vLLM counts it; queue wait below: "
            "since QUEUED"
        ),
        f"by phase\n{columns(('phase', 'share %', *quantiles), phases)}",
        f"by run\n{_groups(summary.runs)}",
        *(f"over time: {run}\n{_groups(windows)}" for run, windows in _by_run(summary).items()),
    ]
    return "\n\n".join(parts)


def requests_csv(summary: RequestSummary) -> str:
    """Return one line per group: all, each run, each window of time. Times in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    points = ("n", "mean", *_SHOWN_PERCENTILES)
    plain = [f.name for f in fields(summary.total) if f.name not in _METRICS]
    writer.writerow([*plain, *(f"{m}_{p}" for m in _METRICS for p in points)])
    for group in summary.groups:
        facts = [spreadsheet_safe(getattr(group, name)) for name in plain]
        writer.writerow([*facts, *(getattr(getattr(group, m), p) for m in _METRICS for p in points)])
    return text.getvalue()


def _by_run(summary: RequestSummary) -> dict[str, list[RequestGroup]]:
    """Return the windows of each run, named only by their times."""
    windows: dict[str, list[RequestGroup]] = {}
    for window in summary.windows:
        # The name of a run may have blanks; the times have no blanks.
        run, _, times = window.name.removesuffix(" s").rpartition(" ")
        windows.setdefault(run, []).append(replace(window, name=f"{times} s"))
    return windows


def _groups(groups: Sequence[RequestGroup]) -> str:
    counts = [
        (g.name, count(g.requests), count(g.failed), number(g.output_tokens_per_s), *_p50_p99(g.queue)) for g in groups
    ]
    latencies = [(g.name, *(cell for q in (g.ttft, g.itl, g.e2e) for cell in _p50_p99(q))) for g in groups]
    heads = [f"{name} {p}" for name in targets.LATENCY_TITLES.values() for p in ("p50", "p99")]
    tables = (
        columns(("", "requests", "failed", "tokens/s", "in queue p50 ms", "p99 ms"), counts),
        columns(("ms", *heads), latencies),
    )
    return "\n".join(tables)


def _p50_p99(q: Quantiles) -> list[str]:
    return [number(ms) for ms in q.percentiles_ms[::2]]


def _quantile_row(q: Quantiles) -> tuple[str, ...]:
    return (count(q.n), *map(number, (None if q.mean is None else 1e3 * q.mean, *q.percentiles_ms)))


# Predicting, exporting, verifying, comparing

_RANGE_NOTE = "90 % range: where nine of ten measurements lay about their prediction"


def step_text(predicted: StepPrediction) -> str:
    """Return the predicted time of a step."""
    return _prediction_text(predicted, [("step", predicted.step)])


def request_text(predicted: RequestPrediction) -> str:
    """Return the predicted latencies of a request, interval by interval."""
    before, after = (
        [(t.label, predicted.overheads[t.name]) for t in targets.parts_of(latency)] for latency in ("ttft", "client")
    )
    rows = [
        *before,
        (f"prefill ({plural(predicted.prefill_steps, 'step')})", predicted.prefill),
        *((label, getattr(predicted, name)) for name, label in targets.LATENCY_TITLES.items()),
        *((f"{label}, after E2E", duration) for label, duration in after),
    ]
    return _prediction_text(predicted, rows, [f"range: {text}" for text in predicted.ranges])


def rows_text(predicted: models.RowPredictions) -> str:
    """Return the predicted rows as CSV, or the file they were written to."""
    if predicted.out is not None:
        outside = f"{predicted.out_of_range:,} outside the training range"
        return f"{predicted.rows:,} rows, {outside}\nwrote   {predicted.out}"
    text = io.StringIO()
    if predicted.predictions:
        writer = csv.DictWriter(text, list(predicted.predictions[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: spreadsheet_safe(cell) for key, cell in row.items()} for row in predicted.predictions)
    return text.getvalue()


def transfer_text(result: models.TransferResult) -> str:
    """Return where the model of a new server comes from, how exact it is, and the errors on servers left out of its
    sources.
    """
    head = ("left out", "error %", "prompts %", "nearest %", "roofline %", "own fit %", "covered %")
    names = Counter(one.left_out for one in result.left_out)
    rows = [
        (
            # Two servers with one GPU, or of one model.
            one.deployment_id.rpartition(".")[0] if names[one.left_out] > 1 else one.left_out,
            *map(
                number,
                (
                    *(one.mape_pct, one.prompts_mape_pct, one.nearest_mape_pct),
                    *(one.roofline_mape_pct, one.own_mape_pct, one.coverage_pct),
                ),
            ),
        )
        for one in result.left_out
    ]
    how = "as tested" if result.tested else "untested: the widest interval known"
    lines = [f"deployment   {result.deployment_id}"]
    if result.p90_ape_pct:
        lines += [
            f"origin       {result.origin}, from {plural(len(result.sources), 'deployment')}",
            _wrapped(f"errors       {expected_within(result.p90_ape_pct)} ({how})", " " * 13),
        ]
    else:
        lines.append(f"origin       {result.origin}, from its own steps")
    lines += ["", columns(head, rows), ""] if rows else [""]
    lines += [_wrapped(f"note    {note}", " " * 8) for note in result.notes]
    rate, slo = flag_of(RateOption), flag_of(ObjectivesOption)
    prompt, output = (flag_of(LoadOptions, name) for name in ("prompt", "output"))
    lines += [
        f"wrote   {result.out}",
        f"use     tracefit plan {result.out} {rate} 10 {prompt} 500 {output} 200 {slo} itl_p99=50",
    ]
    return "\n".join(lines)


def export_text(result: models.ExportResult) -> str:
    """Return the files written for a consumer, and the held-out error of the exported form."""
    rows = [
        (
            e.what,
            count(e.n),
            number(e.mape_pct),
            number(e.bias_pct),
            f"{number(e.mae)} {e.unit}",
            f"{number(e.baseline_mae)} {e.unit}",
        )
        for e in result.errors
    ]
    head = ("exported form, held out", "rows", "MAPE %", "bias %", "MAE", "baseline")
    lines = [f"deployment   {result.deployment_id}", "", columns(head, rows), ""]
    lines += [_wrapped(f"note    {note}", " " * 8) for note in result.notes]
    lines += [f"wrote   {path}" for path in result.files]
    return "\n".join([*lines, f"use     {result.usage}"])


def replay_text(result: models.ReplayResult) -> str:
    """Return measured and replayed quantities, a block per run."""
    blocks = []
    for run in result.runs:
        if run.reason is not None:
            blocks.append(_noted(plain(not_replayed([run.run_id], run.reason))))
            continue
        head = f"{run.run_id}: {compared_requests(run)}"
        rows = [
            (
                q.name,
                number(q.measured),
                number(q.replayed),
                *map(_signed, (q.error_pct, *map(q.error_of, (q.constant, q.predicted)))),
            )
            for q in run.quantities
        ]
        notes = [_noted(f"note: {note}") for note in run.notes]
        table = indented(columns(("", "measured", "replayed", "error", "constant", "predict"), rows))
        blocks.append("\n".join([head, table, *_queue_bars(run.queue), *notes]))
    return "\n\n".join(blocks)


def plan_text(result: PlanResult) -> str:
    """Return the answer for each kind of server: how many or how much, latencies, and the curve."""
    several = len({p.folder for p in result.plans}) > 1
    shown = list(result.plans)
    if len(result.ranked) > _MOST_IN_FULL:
        # The table has the others.
        shown = [
            p for p in shown if (p.folder, p.deployment_id) == (result.ranked[0].name, result.ranked[0].deployment_id)
        ]
    answers = ["\n".join([f"{p.folder if several else 'deployment'} {p.deployment_id}", *_planned(p)]) for p in shown]
    unanswered = [p for p in result.plans if p.reason is not None]
    missing = [f"{p.folder} {p.deployment_id}: no answer: {p.reason}" for p in unanswered if p not in shown]
    missing += [f"left out: {text}" for text in result.left_out]
    tables = [_ranked(result.ranked, unanswered)] if result.ranked else []
    return "\n\n".join([*tables, *answers, *(["\n".join(_noted(text) for text in missing)] if missing else [])])


_MOST_IN_FULL = 3
"""Kinds of server that are shown in full beside a table of them."""


def _ranked(rows: Sequence[RankedServers], unanswered: Sequence[ServerPlan]) -> str:
    """Return the table of what each kind of server costs, the cheapest first, and last those without an answer."""
    # Deployments of one folder have its name.
    names = Counter([*(one.name for one in rows), *(one.folder for one in unanswered)])

    def label(name: str, deployment_id: str | None) -> str:
        return deployment_id or name if names[name] > 1 else name

    is_priced = any(one.cost_per_hour is not None for one in rows)

    def ends(most: float | None, least: float | None) -> str:
        return "-" if most is None else number(most) if most == least else f"{number(least)} to {number(most)}"

    head = (
        "",
        "servers",
        "GPUs",
        *(("cost per hour",) if is_priced else ()),
        "nearest to its limit",
        "model",
    )
    table = [
        (
            f"{'=' if one.ties else ' '} {label(one.name, one.deployment_id)}",
            f"{ends(one.servers, one.servers_low)}{'' if one.is_sure else ', not sure'}",
            ends(one.gpus, one.gpus_low),
            *((ends(one.cost_per_hour, one.cost_per_hour_low),) if is_priced else ()),
            _percentile(one.binds) if one.binds else "-",
            one.origin if one.is_tested else f"{one.origin}, untested",
        )
        for one in rows
    ]
    rest = [""] * (len(head) - 2)
    table += [(f"  {label(one.folder, one.deployment_id)}", "no answer", *rest) for one in unanswered]
    legend = "  = may be the cheapest: fewer servers of it may be enough" if sum(one.ties for one in rows) > 1 else ""
    return "\n".join(filter(None, [columns(head, table), legend]))


def _planned(plan: ServerPlan) -> Iterator[str]:
    if plan.arrivals is not None:
        yield _noted(arrivals_text(plan.arrivals))
    if plan.load is not None:
        mean = f"mean prompt {number(plan.load.prompt_tokens)}, mean output {number(plan.load.output_tokens)} tokens"
        yield _noted(f"{plan.load.source}; {mean}")
    if plan.drafts is not None:
        yield _noted(_drafts_text(plan.drafts))
    if plan.day is not None:
        yield from _day(plan.day)
        yield from (_noted(f"note: {note}") for note in plan.notes)
        return
    if plan.reason is not None or plan.at is None or plan.servers is None:
        yield _noted(f"no answer: {plan.reason}")
        return
    yield _noted(_answer(plan, plan.servers))
    if plan.cost_per_million_tokens is not None:
        output = number(plan.cost_per_million_output_tokens)
        yield _noted(
            f"a million tokens cost {number(plan.cost_per_million_tokens)}, or {output} if only output tokens count"
        )
    limits = {one.name: one.limit_ms for one in plan.objectives}
    rows = [
        (
            _percentile(one.name),
            "grows" if one.value is None else number(one.value),
            f"{number(one.low)} to {'no end' if one.high is None else number(one.high)}",
            number(limits[one.name]) if one.name in limits else "",
        )
        for one in plan.at.latencies
    ]
    yield f"  at {number(plan.at.rate_per_s)} requests per second"
    yield indented(columns(("ms", "expected", "interval", "objective"), rows))
    shown = list(limits) or [n for n in ("ttft_p99_ms", "itl_p99_ms") if n in {x.name for x in plan.at.latencies}]
    head = ("requests/s", *map(_percentile, shown), "running", "waiting", "")
    yield indented(columns(head, [_rate_row(point, shown) for point in plan.curve]))
    yield from (_noted(f"note: {note}") for note in plan.notes)


def _drafts_text(drafts: PlannedDrafts) -> str:
    """Say how many tokens a step gives, and the times between steps and between tokens."""
    origin = "as given" if drafts.is_given else "as recorded"
    if not drafts.is_given and drafts.measured_p10 is not None and drafts.measured_p90 is not None:
        origin += f" ({number(drafts.measured_p10)} to {number(drafts.measured_p90)} for eight of ten requests)"
    text = f"speculative decoding: a step gives a request {number(drafts.tokens_per_step)} tokens, {origin}"
    if drafts.step_mean_ms is None:
        return text
    return (
        f"{text}; its outputs come a step apart, {number(drafts.step_mean_ms)} ms, and ITL is the time per token (TPOT)"
    )


_MOST_OF_A_DAY = 48
"""Windows of a day that are shown."""


def _day(day: DayPlan) -> Iterator[str]:
    """Say how many servers a file of arrivals needs: in all, for a scaler, and window by window."""
    known = "its rates per hour gave" if day.has_rates else f"{plural(day.rows, 'row')},"
    unit, name = next((u, n) for u, n in ((3600, "h"), (60, "min"), (1, "s")) if day.window_s >= u)
    span = f"{number(day.window_s / unit)} {name}"
    yield _noted(
        f"{known} {plural(day.requests, 'request')} in {plural(len(day.windows), 'window')} of {span}, each with the "
        "objectives"
    )
    if day.odd:
        rows = ", ".join(f"{reason}: {count(n)}" for reason, n in day.odd.items())
        yield _noted(f"{plural(sum(day.odd.values()), 'row')} left out ({rows})")
    fewer = f" ({day.servers_likely} may be enough)" if day.servers_likely < day.servers else ""
    binding = day.windows[day.binding]
    hours, by_window = number(day.server_hours), number(day.server_hours_by_window)
    yield _noted(
        f"{plural(day.servers, 'server')} all day{fewer}: {hours} server-hours; window by window they are "
        f"{by_window}. The window from {binding.begins} needs the most"
    )
    yield _noted(_scaler_text(day.scaler))
    if day.cost is not None:
        yield _noted(f"they cost {number(day.cost)} all day, {number(day.cost_scaled)} with the scaler")
    yield f"  in the window from {binding.begins}"
    rows_of = [
        (
            _percentile(one.name),
            number(one.limit_ms),
            *("never" if v is None else number(v) for v in (one.value, one.high)),
            "never" if one.one_fewer is None and day.servers > 1 else number(one.one_fewer),
        )
        for one in day.latencies
    ]
    yield indented(columns(("ms", "objective", "expected", "high end", "one server fewer"), rows_of))
    head = ("from", "requests/s", "prompt", "output", "servers", "likely", "scaler", "")
    yield indented(columns(head, [_window_row(w) for w in day.windows[:_MOST_OF_A_DAY]]))
    if len(day.windows) > _MOST_OF_A_DAY:
        yield _noted(f"and {plural(len(day.windows) - _MOST_OF_A_DAY, 'window')} more, which JSON has")


def _window_row(window: PlannedWindow) -> tuple[str, ...]:
    servers = ("-" if n is None else count(n) for n in (window.servers, window.servers_likely))
    missed = "scaler misses" if window.scaled_holds is False else ""
    return (
        window.begins,
        number(window.rate_per_s),
        number(window.prompt_tokens),
        number(window.output_tokens),
        *servers,
        number(window.scaled_mean),
        "none holds" if window.servers is None else missed,
    )


def _scaler_text(scaler: ScalerPlan) -> str:
    """Say what a scaler needs."""
    steps = "single servers" if scaler.step == 1 else f"steps of {scaler.step} servers"
    spare = f"{number(scaler.spare_pct)} % more servers than the load needs" if scaler.spare_pct else "no spare servers"
    has = f"a scaler with {number(scaler.scale_up_s)} s of start-up and {steps}"
    used = f"at most {plural(scaler.most, 'server')} and {number(scaler.server_hours)} server-hours"
    if scaler.holds:
        return f"{has} needs {spare}: {used}"
    return f"{has} misses the objectives in {plural(scaler.windows_missed, 'window')}, even with {spare}: {used}"


def arrivals_text(arrivals: PlannedArrivals) -> str:
    """Say when the requests of a plan come, and what the recorded ones do within stretches of steady rate."""
    shape = f"gamma arrivals of shape {number(arrivals.shape)}"
    used = {"poisson": "Poisson arrivals", "gamma": shape, "traced": "arrivals as traced"}[arrivals.kind]
    if arrivals.is_given or arrivals.traced_dispersion is None or arrivals.traced_dispersion_sd is None:
        return f"{used} at a steady rate"
    seen = (
        f"dispersion {number(arrivals.traced_dispersion)}, of a Poisson process 1 ± "
        f"{number(2 * arrivals.traced_dispersion_sd)}"
    )
    if arrivals.kind == "traced":
        return f"{used} at a steady rate: blocks of the gaps that were recorded within such stretches ({seen})"
    differ = "differ from these by no more than chance" if arrivals.kind == "poisson" else "have bursts"
    if arrivals.kind == "gamma" and arrivals.traced_dispersion < 1:
        differ = "are more regular than chance"
    return f"{used} at a steady rate: the recorded ones, within stretches of steady rate, {differ} ({seen})"


def _answer(plan: ServerPlan, servers: int) -> str:
    """Return the answer as a sentence: the number of servers or the rate, and the rates that bound it."""
    fewer = dict.fromkeys(n for n in (plan.servers_likely, plan.servers_low) if n not in (None, servers))
    named = " or even ".join(map(str, fewer))
    maybe = f" ({named} may be enough)" if named else ""
    if not plan.is_sure:
        maybe = f" may be enough{f', or even {named}' if named else ''}, and no number is sure"
    between = f" ({number(plan.capacity_low)} to {number(plan.capacity_high)})"
    is_open = plan.capacity_low != plan.capacity_high
    capacity = f"the capacity is {number(plan.capacity_per_s)}{between if is_open else ''}"
    facts = [f"the knee is at {number(plan.knee_per_s)}, {capacity}"]
    if plan.largest_rate_per_s is not None:
        high = number(plan.largest_rate_high)
        ends = (
            f"{number(plan.largest_rate_low)} to {high}" if plan.largest_rate_low else f"up to {high}, and none is sure"
        )
        facts.insert(0, f"the largest rate is {number(plan.largest_rate_per_s)} requests per second ({ends})")
    if plan.met is not None and plan.rate_per_s is not None:
        verb = "hold" if plan.met else "do not hold"
        facts.insert(0, f"the objectives {verb} at {number(plan.rate_per_s)} requests per second")
    return f"{plural(servers, 'server')}{maybe}: {'; '.join(facts)}"


def _percentile(name: str) -> str:
    latency, _, point = name.removesuffix("_ms").partition("_")
    return f"{latency.upper()} {point.upper()}"


def _rate_row(point: PlanPoint, names: Sequence[str]) -> tuple[str, ...]:
    values = (number(point.latency(name).value) for name in names)
    mark = "extrapolated" if point.extrapolates else ""
    return (number(point.rate_per_s), *values, number(point.running_mean), number(point.waiting_mean), mark)


_BARS = " ▁▂▃▄▅▆▇█"


def _queue_bars(queue: Sequence[QueueWindow]) -> list[str]:
    """Draw the queue over time, a bar per window; empty where no request waits."""
    most = max((w for one in queue for w in (one.measured, one.replayed)), default=0.0)
    if not most:
        return []
    sides = {"measured": [w.measured for w in queue], "replayed": [w.replayed for w in queue]}
    bars = {
        side: "".join(_BARS[math.ceil(8 * value / most - 1e-9)] for value in values) for side, values in sides.items()
    }
    head = f"  queue over the held-out time, a full bar is {number(most)} requests"
    return [head, *(f"    {side}  {text}" for side, text in bars.items())]


def verify_text(result: models.VerifyResult) -> str:
    """Return whether a refit confirms a file."""
    head = f"{result.numbers:,} values refitted, {result.differing:,} not confirmed"
    lines = [f"{result.file}: {'verified' if result.verified else 'NOT verified'}", head]
    lines += [f"input differs: {text}" for text in result.inputs]
    lines += [f"{d.place}: {d.in_file} in the file, {d.refitted} refitted" for d in result.differences]
    # The result holds only the first differences: one wrong input may change every number.
    if result.differing > len(result.differences):
        lines.append(f"and {result.differing - len(result.differences):,} more")
    return "\n".join([*lines, *(f"note: {text}" for text in result.notes)])


def compare_text(result: models.CompareResult) -> str:
    """Return the differences of two files, or whether an old one is still good."""
    lines = [line for one in result.models for line in _changed_lines(one)]
    if result.points:
        lines += [*_point_lines(result.points), ""]
    if result.verdict is not None:
        for deployment_id in dict.fromkeys(d.deployment_id for d in result.drift):
            drifts = [d for d in result.drift if d.deployment_id == deployment_id]
            seen = [x for x in result.latencies if x.deployment_id == deployment_id]
            lines += [f"deployment {deployment_id}"]
            if seen:
                lines += [indented(columns(_SEEN_HEAD, _seen_rows(seen))), ""]
            lines += [indented(columns(_DRIFT_HEAD, map(_drift_row, drifts))), ""]
            lines += [_wrapped(f"{d.model}: cannot tell: {d.reason}", "  ") for d in drifts if d.reason]
        if result.latencies:
            lines += [
                "replayed: the new requests, with the file's models and the stated settings",
                "at its speeds: the same at the speeds that the machine has in the new run",
                "good: within the limit of the replay, or of the nearest one at its speeds",
            ]
        lines += [
            "in the file: the larger of its errors in training and on held-out rows",
            "outside: rows outside its training range, which say nothing of it",
        ]
        if not all(d.decides for d in result.drift):
            lines += ["in parentheses: for information, the verdict does not depend on it"]
        lines += ["", f"verdict: {_VERDICTS[result.verdict]}"]
        lines += [_wrapped(f"  {text}", "    ") for text in result.reasons[:_MOST_SHOWN_REASONS]]
        if (more := len(result.reasons) - _MOST_SHOWN_REASONS) > 0:
            lines += [f"  and {plural(more, 'more reason')}"]
    return "\n".join([*lines, *(_wrapped(f"note: {text}", "  ") for text in result.notes)])


def _changed_lines(one: models.ModelComparison) -> list[str]:
    """Return the differences of a model that both files have."""
    lines = [f"{one.model}  {one.deployment_id}"]
    if all((c.first, c.first_ci95) == (c.second, c.second_ci95) for c in one.changes):
        return [*lines, "  the same coefficients in both files", ""]
    for c in one.changes:
        values = (_interval(c.first, c.first_ci95), _interval(c.second, c.second_ci95))
        lines += [f"  {c.part}: {c.term}, {c.unit}", f"    {values[0]} -> {values[1]}{_apart(c.apart)}"]
    lines += [
        _wrapped(
            f"  {s.part}: predictions move by {number(s.mean_us)} us on average ({number(s.low_us)} to "
            f"{number(s.high_us)}; the first file predicts {number(s.first_us)} us) over the range both were trained "
            "on",
            "    ",
        )
        for s in one.shifts
    ]
    return [*lines, ""]


_POINT_HEAD = ("point", "load", "prompt", "output", "ms", "measured", "predicted", "error %")
_OF_DEPLOYMENT = "deployment"


def _point_lines(points: Sequence[models.ComparedPoint]) -> Iterator[str]:
    """Yield the points of a benchmark with predictions, and those that are not compared with the reason."""
    rows = []
    is_of_several = len({point.deployment_id for point in points if point.deployment_id}) > 1
    for point in points:
        load = point_load(point.rate_per_s, point.concurrency)
        facts = (count(point.number), load, number(point.prompt_tokens), number(point.output_tokens))
        for n, each in enumerate(point.latencies):
            name = each.name.replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT")
            name = name.replace("itl", "ITL").replace("e2e", "E2E")
            values = (each.measured_us / 1e3, each.predicted_us / 1e3, each.error_pct)
            of = (point.deployment_id or "" if n == 0 else "",) if is_of_several else ()
            rows.append((*(facts if n == 0 else ("",) * len(facts)), name, *map(number, values), *of))
    yield columns((*_POINT_HEAD, *([_OF_DEPLOYMENT] if is_of_several else [])), rows)
    yield from (
        _wrapped(not_compared([f"{point.number} ({point.file})"], point.reason), "  ")
        for point in points
        if point.reason
    )


_DRIFT_HEAD = ("median error %", "in the file", "now", "limit", "bias % now", "rows", "outside", "verdict")


def _drift_row(d: models.Drift) -> tuple[str, ...]:
    errors = (d.then_mdape_pct, d.now_mdape_pct, d.limit_pct, d.now_bias_pct)
    verdict = _DRIFT_WORDS[d.verdict] if d.decides else f"({_DRIFT_WORDS[d.verdict]})"
    return (d.model, *(number(v) for v in errors), count(d.rows), count(d.rows_outside), verdict)


_SEEN_HEAD = ("ms", "measured", "replayed", "at its speeds", "error", "limit %", "verdict")
_MOST_SHOWN_REASONS = 6


def _seen_rows(latencies: Sequence[models.LatencyDrift]) -> Iterator[tuple[str, ...]]:
    """Yield the latencies of the runs, the least exact runs first."""
    runs: dict[str, list[models.LatencyDrift]] = {}
    for each in latencies:
        runs.setdefault(each.run_id, []).append(each)
    worst = sorted(runs, key=lambda run_id: -max(abs(x.error_pct or 0.0) for x in runs[run_id]))
    for run_id in worst[:_MOST_SHOWN_RUNS]:
        for x in runs[run_id]:
            name = x.name.removesuffix("_us").upper().replace("_", " ")
            yield (
                f"{name} {run_id}" if len(runs) > 1 else name,
                *(number(value / 1e3) for value in (x.measured, x.replayed)),
                f"{number(x.low / 1e3)} to {number(x.high / 1e3)}",
                _signed(x.error_pct),
                number(x.limit_pct),
                _DRIFT_WORDS[x.verdict],
            )


_DRIFT_WORDS = {"good": "good", "drifted": "drifted", "unknown": "cannot tell"}


_VERDICTS = {
    "good": "the file is still good on these traces",
    "drifted": "the file has drifted: train a new one",
    "unknown": "these traces cannot tell whether the file is still good",
}


def _interval(value: float | None, ci95: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return number(value, 4) + (f" [{number(ci95[0], 4)}, {number(ci95[1], 4)}]" if ci95 else "")


def _apart(apart: bool | None) -> str:
    return "" if apart is None else ", intervals apart" if apart else ", intervals overlap"


def _prediction_text(
    predicted: StepPrediction | RequestPrediction,
    rows: Sequence[tuple[str, PredictedDuration | None]],
    ranges: Sequence[str] = (),
) -> str:
    # A file without validations gives no range to anything: its column would be empty.
    has_range = any(_range(duration) for _, duration in rows)
    lines = [
        f"deployment   {predicted.deployment_id}\n",
        f"{'':<22}{'ms':>12}" + (f"  {'90 % range':>12}" if has_range else ""),
        *(f"{name:<22}{_ms(duration, 'value_us'):>12}{_range(duration)}" for name, duration in rows),
        "",
    ]
    notes = [*ranges, *(f"assumed: {text}" for text in predicted.assumed)]
    notes += [f"outside: {text}" for text in predicted.out_of_range]
    return "\n".join([*lines, *([_RANGE_NOTE] if has_range else []), *(_wrapped(text, "  ") for text in notes)])


def _range(duration: PredictedDuration | None) -> str:
    if duration is None or duration.low_us is None:
        return ""
    return f"  {_ms(duration, 'low_us'):>12} to {_ms(duration, 'high_us')}"


def _ms(duration: PredictedDuration | None, end: str) -> str:
    if duration is None:
        return "-"
    value = getattr(duration, end)
    return "open" if value is None else f"{value / 1e3:,.3f}"
