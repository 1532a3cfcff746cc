"""What `inspect` found, for people to read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tracefit.reports.text import columns, indented

if TYPE_CHECKING:
    from tracefit.results.inspection import Inspection, RunFacts, ScopeFacts, ServerFacts
    from tracefit.tables.health import Check


def inspection_text(found: Inspection) -> str:
    """Say what the runs hold, how healthy their journeys are, and what that allows."""
    parts = [*(_run(run) for run in found.runs), *(_scope(scope) for scope in found.scopes)]
    if found.exit_code:
        parts.append("Nothing can be trained from this.")
    return "\n\n".join(parts)


def _run(run: RunFacts) -> str:
    facts = [
        ("size", f"{run.bytes / 1e6:,.1f} MB"),
        *((("file", f"{f.name}: {f.shape}{_packed(f.compression)}")) for f in run.files),
        ("service", ", ".join(run.services) or "not named"),
        *(("scope", f"{s.scope}, {s.spans:,} spans, dialect {s.dialect}") for s in run.scopes),
        *([("scope", f"others, {run.other_spans:,} spans, left out")] if run.other_spans else []),
        *((("rejects", f"{run.rejects:,} records could not be read"),) if run.rejects else ()),
        *((("duplicates", f"{run.duplicate_spans:,} spans"),) if run.duplicate_spans else ()),
    ]
    return "\n".join(
        [
            f"run {run.run_id}",
            indented(columns(None, facts, left={0, 1})),
            "",
            indented(columns(_SERVER_HEAD, [_server(s) for s in run.servers], left={0, 1})),
            "",
            indented(columns(("event", "count"), [(n, f"{c:,}") for n, c in run.events.items()], left={0})),
            "",
            indented(columns(("check", "holds", ""), [_check(c) for c in run.checks if c.of], left={0, 2})),
        ]
    )


def _packed(compression: str) -> str:
    return "" if compression == "none" else f", {compression}"


_SERVER_HEAD = (
    "server",
    "from",
    "seconds",
    "epochs",
    "requests",
    "steps",
    "steps sampled",
    "journeys sampled",
    "snapshots",
    "dropped events",
)


def _server(s: ServerFacts) -> tuple[str, ...]:
    first, last = s.first_unix_ns, s.last_unix_ns
    known = first is not None and last is not None
    return (
        s.server,
        f"{datetime.fromtimestamp(first / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC" if first else "-",
        f"{(last - first) / 1e9:,.1f}" if known and first is not None and last is not None else "-",
        *(f"{n:,}" for n in (s.epochs, s.requests, s.steps)),
        *(_share(v) for v in (s.step_sampling, s.journey_sampling, s.snapshot_sampling)),
        f"{s.dropped_events:,}",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _check(check: Check) -> tuple[str, ...]:
    return (check.name, f"{check.held:,} of {check.of:,}", check.detail)


def _scope(scope: ScopeFacts) -> str:
    rows = [(a.what, a.verdict, a.reason) for a in scope.allows]
    head = f"scope {scope.scope_id} ({', '.join(scope.runs)}) allows"
    return "\n".join([head, indented(columns(None, rows, left={0, 1, 2}))])
