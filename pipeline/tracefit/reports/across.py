"""Errors across runs, models and GPUs, as a section of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.cells import count, number, table

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import AcrossEntry, Evaluation
    from tracefit.reports.model import Part

_HEAD = (
    "left out",
    "model",
    "features",
    "n",
    "MAPE %",
    "median APE %",
    "bias %",
    "MAE us",
    "baseline MAE",
    "reference MAE",
)


def across_parts(evaluation: Evaluation) -> list[Part]:
    """Return the section's parts; none where leaving out was not asked for."""
    if not evaluation.across and not evaluation.across_notes:
        return []
    parts: list[Part] = [
        "## Across runs, models and GPUs",
        "Each is left out in turn and predicted by a model fitted on the others; errors are on all of its rows.",
    ]
    if evaluation.across:
        parts.append(table(_HEAD, [_row(one) for one in evaluation.across]))
    return [*parts, *(f"- Note: {note}." for note in evaluation.across_notes)]


def _row(one: AcrossEntry) -> tuple[str, ...]:
    e, reference = one.errors, one.gradient_boosting.mae if one.gradient_boosting else None
    return (
        f"{one.kind} `{one.left_out}`",
        f"`{one.model}`",
        one.feature_set,
        count(e.n),
        *(number(v) for v in (e.mape_pct, e.mdape_pct, e.bias_pct, e.mae, one.baseline.mae, reference)),
    )
