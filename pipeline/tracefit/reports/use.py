"""What the commands that use coefficient files say, in a few lines; imports nothing heavy."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from tracefit.errors import spreadsheet_safe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.coefficients.predict import PredictedDuration, RequestPrediction, StepPrediction
    from tracefit.results.comparison import CompareResult
    from tracefit.results.exports import ExportResult
    from tracefit.results.predictions import RowPredictions
    from tracefit.results.verification import VerifyResult

_RANGE_NOTE = "90 % range: where nine of ten held-out measurements lay about their prediction"


def step_text(predicted: StepPrediction) -> str:
    """Say how long a step takes."""
    rows = [("step", predicted.step)]
    return "\n".join([*_spans(predicted.scope_id, rows), *_notes(predicted.assumed, predicted.out_of_range)])


def request_text(predicted: RequestPrediction) -> str:
    """Say how long a request takes, part by part."""
    rows = [
        ("admission", predicted.admission),
        ("queue wait", predicted.queue_wait),
        (
            f"prefill ({predicted.prefill_steps:,} step{'s' * (predicted.prefill_steps > 1)})",
            predicted.prefill,
        ),
        ("TTFT", predicted.ttft),
        ("ITL", predicted.itl),
        ("E2E", predicted.e2e),
        ("departure, after E2E", predicted.departure),
    ]
    return "\n".join([*_spans(predicted.scope_id, rows), *_notes(predicted.assumed, predicted.out_of_range)])


def rows_text(predicted: RowPredictions) -> str:
    """Give the predicted rows as CSV, or say where they are."""
    if predicted.out is not None:
        outside = (
            ""
            if predicted.out_of_range is None
            else f", {predicted.out_of_range:,} outside the training range"
        )
        return f"{predicted.rows:,} rows{outside}\nwrote   {predicted.out}"
    text = io.StringIO()
    if predicted.predictions:
        writer = csv.DictWriter(text, list(predicted.predictions[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: spreadsheet_safe(cell) for key, cell in row.items()} for row in predicted.predictions
        )
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


def verify_text(result: VerifyResult) -> str:
    """Say whether a file is what its inputs give."""
    head = f"{result.numbers:,} values refitted, {result.differing:,} not confirmed"
    lines = [f"{result.file}: {'verified' if result.verified else 'NOT verified'}", head]
    lines += [f"input differs: {text}" for text in result.inputs]
    lines += [f"{d.place}: {d.in_file} in the file, {d.refitted} refitted" for d in result.differences]
    if result.differing > len(result.differences):
        lines.append(f"and {result.differing - len(result.differences):,} more")
    return "\n".join([*lines, *(f"note: {text}" for text in result.notes)])


def compare_text(result: CompareResult) -> str:
    """Say what moved between two files, or whether an old one is still good."""
    lines: list[str] = []
    for one in result.models:
        lines += [f"{one.model}  {one.scope_id}", ""]
        rows = [
            (
                f"{c.part}: {c.term}",
                *(_ci(v, ci) for v, ci in ((c.first, c.first_ci95), (c.second, c.second_ci95))),
                c.unit,
                _apart(c.apart),
            )
            for c in one.changes
        ]
        lines += [*_table(("coefficient", "first", "second", "unit", "intervals"), rows), ""]
        lines += [
            f"{s.part}: predictions move by {_figure(s.mean_us)} us on average ({_figure(s.low_us)} to {_figure(s.high_us)}; "
            f"the first file predicts {_figure(s.first_us)} us) over the range both were trained on"
            for s in one.shifts
        ]
        lines.append("")
    if result.verdict is not None:
        head = ("model", "rows", "MAPE % then", "now", "limit", "MAE us then", "now", "bias % now", "verdict")
        rows = [
            (
                d.model,
                f"{d.rows:,}",
                *(
                    _figure(v)
                    for v in (
                        d.then_mape_pct,
                        d.now_mape_pct,
                        d.limit_pct,
                        d.then_mae_us,
                        d.now_mae_us,
                        d.now_bias_pct,
                    )
                ),
                d.verdict,
            )
            for d in result.drift
        ]
        lines += [*_table(head, rows), ""]
        lines += [f"{d.model}: cannot tell: {d.reason}" for d in result.drift if d.reason]
        lines.append(f"verdict: {_VERDICTS[result.verdict]}")
    return "\n".join([*lines, *(f"note: {text}" for text in result.notes)])


_VERDICTS = {
    "good": "the file is still good on these traces",
    "drifted": "the file has drifted: train anew",
    "unknown": "these traces cannot tell",
}


def _ci(value: float | None, ci95: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" + (f" [{ci95[0]:.6g}, {ci95[1]:.6g}]" if ci95 else "")


def _apart(apart: bool | None) -> str:
    return "-" if apart is None else "apart" if apart else "meet"


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


def _spans(scope_id: str | None, rows: Iterable[tuple[str, PredictedDuration | None]]) -> list[str]:
    table = [(name, *(_ms(s, end) for end in ("value_us", "low_us", "high_us"))) for name, s in rows]
    body = [f"{name:<22}{value:>12}  {low:>12} to {high}" for name, value, low, high in table]
    return [f"scope   {scope_id}", "", f"{'':<22}{'ms':>12}  {'90 % range':>12}", *body, "", _RANGE_NOTE]


def _ms(found: PredictedDuration | None, end: str) -> str:
    if found is None:
        return "-"
    value = getattr(found, end)
    return "open" if value is None else f"{value / 1e3:,.3f}"


def _notes(assumed: Sequence[str], outside: Sequence[str]) -> list[str]:
    return [*(f"assumed: {text}" for text in assumed), *(f"outside: {text}" for text in outside)]
