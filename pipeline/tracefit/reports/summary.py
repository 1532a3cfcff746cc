"""What a command says at its end, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.errors import printable
from tracefit.reports.text import columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.features.sets import FeatureSet
    from tracefit.results.ingestion import IngestPlan, IngestResult
    from tracefit.results.receiving import ReceiveResult
    from tracefit.results.training import (
        LatencySummary,
        ModelSummary,
        RunResult,
        SynthResult,
        TrainResult,
    )


def ingest_text(result: IngestResult) -> str:
    """Say what was read and where the tables are."""
    head = ("run", "spans", "steps", "requests", "rejects", "dropped events", "duplicates")
    rows = [
        (
            r.run_id,
            *(
                f"{n:,}"
                for n in (r.spans, r.steps, r.requests, r.rejects, r.dropped_events, r.duplicate_spans)
            ),
        )
        for r in result.runs
    ]
    return f"{_columns(head, rows)}\n\ntables  {result.tables}"


def plan_text(plan: IngestPlan) -> str:
    """Say what would be read, and as what."""
    head = ("run", "file", "is", "compressed", "bytes", "status", "to read")
    rows = [
        (f.run_id, f.file, f.shape, f.compression or "", f"{f.bytes:,}", f.status, f"{f.bytes_to_read:,}")
        for f in plan.files
    ]
    return "\n".join(
        [columns(head, rows, left={0, 1, 2, 3, 5}), *(f"left out: {text}" for text in plan.left_out)]
    )


def train_text(result: TrainResult) -> str:
    """Say how good the models are and where they and the report are."""
    head = ("scope", "model", "held out", "MAPE %", "MAE us", "baseline", "reference", "skill")
    rows = [_model_row(m) for m in result.fitted]
    lines = [_columns(head, rows), ""]
    if result.latencies:
        lines += [_columns(_LATENCY_HEAD, [_latency_row(x) for x in result.latencies]), ""]
    for scope_id, answers in result.verdicts.items():
        lines += [scope_id, *(f"  {use}: {answer}" for use, answer in answers.items()), ""]
    lines += [f"not fitted: {text}" for text in result.not_fitted]
    lines += [f"wrote   {path}" for path in result.files]
    return "\n".join(lines)


def run_text(result: RunResult) -> str:
    """Say what the main job made."""
    return f"{ingest_text(result.ingested)}\n\n{train_text(result.trained)}"


def features_text(sets: Sequence[FeatureSet]) -> str:
    """Say what the feature sets hold."""
    parts = []
    for one in sets:
        rows = [(f.name, f.unit, f.formula, f.reason) for f in one.features]
        parts.append(f"{one.name}\n{_columns(('feature', 'unit', 'formula', 'reason'), rows)}")
    return "\n\n".join(parts)


def synth_text(result: SynthResult) -> str:
    """Say what was generated and where it is."""
    lines = [f"{result.requests:,} requests, {result.steps:,} steps"]
    return "\n".join([*lines, *(f"wrote   {folder}" for folder in result.folders)])


def receive_text(result: ReceiveResult) -> str:
    """Say what was received and where it is."""
    head = ("service", "instance", "spans")
    rows = [
        (printable(r.service), printable(r.instance) or "-", f"{r.spans:,}") for r in result.received_from
    ]
    files = f"wrote   {result.out}: {len(result.files):,} files, {result.bytes:,} bytes"
    refused = f"{result.exports:,} requests acknowledged, {result.refused:,} refused"
    table = columns(head, rows, left={0, 1}) if rows else "nothing was received"
    return f"{table}\n\n{refused}\n{files}"


def _model_row(m: ModelSummary) -> tuple[str, ...]:
    numbers = (m.holdout_mape_pct, m.holdout_mae, m.baseline_mae, m.reference_mae, m.skill)
    return (m.scope_id, m.name, f"{m.rows_holdout:,}", *(_number(v) for v in numbers))


_LATENCY_HEAD = ("scope", "latency", "held out", "teacher-forced MAPE %", "averages only", "baseline")


def _latency_row(x: LatencySummary) -> tuple[str, ...]:
    errors = (x.teacher_forced_mape_pct, x.averages_only_mape_pct, x.baseline_mape_pct)
    return (x.scope_id, x.name, f"{x.requests:,}", *(_number(v) for v in errors))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_TEXT = ("run", "scope", "model", "latency", "feature", "unit", "formula", "reason")


def _columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return columns(head, rows, left={i for i, name in enumerate(head) if name in _TEXT})
