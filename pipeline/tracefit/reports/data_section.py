"""The report's sections on the data: input, servers and sampling, rows per model, and the step clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.document import Section, table
from tracefit.reports.text import count, number, reasons, share
from tracefit.server.tracing import without_attribute

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Evaluation, IngestEntry, ServerEntry, TimelineEntry
    from tracefit.reports.document import ReportPart

_SERVERS = (
    "run",
    "server",
    "seconds",
    "epochs",
    "requests",
    "steps",
    "steps sampled",
    "journeys sampled",
    "snapshots",
    "dropped events",
)
_SAMPLING = (
    "Sampling rates are estimated from the traces: the share of counted steps that have a summary; the share of the requests "
    "in step summaries that have a journey, `-` without any summary; the share of summarised steps that have snapshots."
)
_ROWS = (
    "Rows used, and rows left out by reason. Training leaves out warm-up, outliers and steps with many preemptions; "
    "idle gaps and restarts are left out everywhere. Errors are measured on the held-out rows."
)
_MANY_ROWS = 12


def data_parts(evaluation: Evaluation) -> list[ReportPart]:
    """Return the section on the input and on the rows of each model."""
    entry = evaluation.ingest
    parts: list[ReportPart] = [_ingested(entry)]
    if entry.dropped_events:
        parts.append(
            f"**{count(entry.dropped_events)} events were dropped by the server's SDK** and are missing from every "
            "number here. Set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server."
        )
    parts += [_sentence(without_attribute(*lacking)) for lacking in entry.missing_attributes.items()]
    if entry.servers:
        parts += [
            _SAMPLING,
            table(_SERVERS, [_server(s) for s in entry.servers]),
        ]
    rows = [
        (f"`{r.run_id}`", f"`{r.model}`", count(r.trained), count(r.held_out), reasons(r.left_out) or "none")
        for scope in evaluation.scopes
        for r in sorted(scope.rows, key=lambda r: r.run_id)
    ]
    if rows:
        parts += [
            _ROWS,
            table(
                ("run", "model", "trained", "held out", "left out"),
                rows,
                folded="Rows by run and model" if len(rows) > _MANY_ROWS else None,
            ),
        ]
    events = [(f"`{name}`", count(n)) for name, n in entry.events.items()]
    return [*parts, table(("event", "count"), events, folded="Events by name")] if events else parts


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _ingested(entry: IngestEntry) -> ReportPart:
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


def _server(s: ServerEntry) -> tuple[str, ...]:
    return (
        f"`{s.run_id}`",
        s.server,
        number(s.seconds),
        *(count(n) for n in (s.epochs, s.requests, s.steps)),
        *(share(rate) for rate in (s.step_sampling, s.journey_sampling, s.snapshot_sampling)),
        count(s.dropped_events),
    )


_MOST_SAMPLED = 0.98


def clock_parts(t: TimelineEntry) -> list[ReportPart]:
    """Return the section on the source of step times: the coverage of `step.duration_us`, and the step clock."""
    rows = [
        ("busy time covered by `step.duration_us`", share(t.duration_coverage)),
        ("median cycle, us", number(t.median_cycle_us)),
        ("median `step.duration_us`", number(t.median_duration_us)),
        ("steps known", count(t.steps_known)),
        ("consecutive steps (cycles)", count(t.adjacent_cycles)),
        (
            "intervals between other known starts",
            f"{count(t.intervals)} over {count(t.interval_steps)} steps",
        ),
        ("idle gaps among both", count(t.idle_gaps)),
        ("sampled steps whose batch agrees with the journeys", share(t.composition_agreement)),
        (
            "events that disagree with the step clock",
            f"{count(t.clock_disagreements)} of {count(t.clock_checked_events)}",
        ),
        ("API events corrected from another host's clock", count(t.clock_corrected_events)),
    ]
    parts: list[ReportPart] = []
    if t.beta_target_reason:
        parts.append(f"Step times come from the {t.beta_target_source}: {t.beta_target_reason}.")
    parts.append(table(("what", "value"), rows))
    if t.execution_lag_steps:
        parts.append(
            "Scheduling runs one step ahead of execution (asynchronous scheduling): the time of a step is the cycle "
            "after its own start."
        )
    if t.journey_sampling is not None and 0 < t.journey_sampling < _MOST_SAMPLED:
        parts.append(
            "Journeys are sampled: batches are known from step summaries only, and the queue state is that of the "
            "nearest sampled step."
        )
    return [Section("`step.duration_us` and the step clock", tuple(parts))]
