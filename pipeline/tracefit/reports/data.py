"""Sections of the report on the data: what was read, what servers traced, which rows count, what the step clock had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.cells import count, number, reasons, share, table

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Evaluation, IngestEntry, ServerEntry, TimelineEntry
    from tracefit.reports.model import Part

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
    "Sampling rates are estimated from the traces: steps with a summary of those counted; journeys among the requests that "
    "step summaries count, `-` where no step tells; steps with snapshots of those with a summary."
)
_ROWS = (
    "Rows that count, and those left out by reason. Training loses warm-up, outliers and steps heavy with preemptions; both "
    "parts lose idle gaps and restarts. Errors are on the rows held out."
)
_MANY_ROWS = 12


def data_parts(evaluation: Evaluation) -> list[Part]:
    """Return the section on what was read and which rows of it count."""
    entry = evaluation.ingest
    parts: list[Part] = ["## Data", _ingested(entry)]
    if entry.dropped_events:
        parts.append(
            f"**{count(entry.dropped_events)} events were dropped by the server's SDK** and are missing from every "
            "number here. Set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server."
        )
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


def _ingested(entry: IngestEntry) -> Part:
    rows = [
        ("files", count(entry.files)),
        ("bytes", count(entry.bytes)),
        ("spans", count(entry.spans)),
        ("spans of other scopes, left out", count(entry.other_spans)),
        ("records that could not be read (rejects)", count(entry.rejects)),
        ("spans there twice, counted once", count(entry.duplicates)),
        ("events the server's SDK dropped", count(entry.dropped_events)),
    ]
    return table(("what", "count"), rows)


def _server(s: ServerEntry) -> tuple[str, ...]:
    return (
        f"`{s.run_id}`",
        s.server,
        number(s.seconds),
        *(count(n) for n in (s.epochs, s.requests, s.steps)),
        *(share(rate) or "-" for rate in (s.step_sampling, s.journey_sampling, s.snapshot_sampling)),
        count(s.dropped_events),
    )


_MOST_SAMPLED = 0.98


def clock_parts(t: TimelineEntry) -> list[Part]:
    """Return the section on where step times come from: what `step.duration_us` covers, and what the step clock had."""
    rows = [
        ("busy time covered by `step.duration_us`", share(t.duration_coverage) or "-"),
        ("median cycle, us", number(t.median_cycle_us)),
        ("median `step.duration_us`", number(t.median_duration_us)),
        ("steps known", count(t.steps_known)),
        ("consecutive steps (cycles)", count(t.adjacent_cycles)),
        (
            "intervals between other known starts",
            f"{count(t.intervals)} over {count(t.interval_steps)} steps",
        ),
        ("idle gaps among both", count(t.idle_gaps)),
        ("steps whose batch the journeys tell exactly", share(t.composition_agreement) or "-"),
        (
            "events that disagree with the step clock",
            f"{count(t.clock_disagreements)} of {count(t.clock_checked_events)}",
        ),
        ("API events moved from another host's clock", count(t.clock_corrected_events)),
    ]
    parts: list[Part] = ["### What `step.duration_us` covers, and the step clock"]
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
            "Journeys are sampled: batches are those of step summaries alone, and the queue state is that of the "
            "nearest sampled step, not exact."
        )
    return parts
