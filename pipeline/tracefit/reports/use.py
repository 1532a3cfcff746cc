"""What the commands that use coefficient files say, in a few lines; imports nothing heavy."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.coefficients.answers import RequestAnswer, Span, StepAnswer
    from tracefit.verbs.export import ExportResult
    from tracefit.verbs.predict import RowsAnswer

_RANGE_NOTE = "90 % range: where nine of ten held-out measurements lay about their prediction"


def step_text(answer: StepAnswer) -> str:
    """Say how long a step takes."""
    rows = [("step", answer.step)]
    return "\n".join([*_spans(answer.scope_id, rows), *_notes(answer.assumed, answer.outside)])


def request_text(answer: RequestAnswer) -> str:
    """Say how long a request takes, part by part."""
    rows = [
        ("admission", answer.admission),
        ("queue wait", answer.queue_wait),
        (f"prefill ({answer.prefill_steps:,} step{'s' * (answer.prefill_steps > 1)})", answer.prefill),
        ("TTFT", answer.ttft),
        ("ITL", answer.itl),
        ("E2E", answer.e2e),
        ("departure, after E2E", answer.departure),
    ]
    return "\n".join([*_spans(answer.scope_id, rows), *_notes(answer.assumed, answer.outside)])


def rows_text(answer: RowsAnswer) -> str:
    """Give the predicted rows as CSV, or say where they are."""
    if answer.out is not None:
        outside = "" if answer.outside is None else f", {answer.outside:,} outside the training range"
        return f"{answer.rows:,} rows{outside}\nwrote   {answer.out}"
    text = io.StringIO()
    if answer.predictions:
        writer = csv.DictWriter(text, list(answer.predictions[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(answer.predictions)
    return text.getvalue()


def export_text(result: ExportResult) -> str:
    """Say what was written for a consumer and the held-out error of exactly that."""
    rows = [
        (
            e.what,
            f"{e.n:,}",
            _figure(e.mape_pct),
            f"{_figure(e.mae)} {e.unit}",
            f"{_figure(e.baseline_mae)} {e.unit}",
            _figure(e.bias_pct),
        )
        for e in result.errors
    ]
    head = ("held out, in the exported form", "rows", "MAPE %", "MAE", "baseline", "bias %")
    lines = [f"scope   {result.scope_id}", "", *_table(head, rows), ""]
    lines += [f"note    {note}" for note in result.notes]
    lines += [f"wrote   {path}" for path in result.files]
    return "\n".join([*lines, f"use     {result.usage}"])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align columns, the first to the left, the others to the right."""
    table = [tuple(head), *(tuple(r) for r in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spans(scope_id: str | None, rows: Iterable[tuple[str, Span | None]]) -> list[str]:
    table = [(name, *(_ms(s, end) for end in ("value_us", "low_us", "high_us"))) for name, s in rows]
    body = [f"{name:<22}{value:>12}  {low:>12} to {high}" for name, value, low, high in table]
    return [f"scope   {scope_id}", "", f"{'':<22}{'ms':>12}  {'90 % range':>12}", *body, "", _RANGE_NOTE]


def _ms(found: Span | None, end: str) -> str:
    if found is None:
        return "-"
    value = getattr(found, end)
    return "open" if value is None else f"{value / 1e3:,.3f}"


def _notes(assumed: Sequence[str], outside: Sequence[str]) -> list[str]:
    return [*(f"assumed: {text}" for text in assumed), *(f"outside: {text}" for text in outside)]
