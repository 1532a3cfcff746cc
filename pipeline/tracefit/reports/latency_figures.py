"""Distributions of request latencies: measured beside predicted, from the evaluation; or measured alone, from the tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.reports.cells import number
from tracefit.reports.model import Figure, Panel, Series, Table

if TYPE_CHECKING:
    import polars as pl

    from tracefit.coefficients.evaluation import DistributionEntry, ScopeEvaluation

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
US_PER_MS = 1e3
_PERCENTS = (*range(0, 100, 5), 99, 100)
_WRITTEN_PERCENTS = (5, 25, 50, 75, 90, 95, 99)


def latency_figures(scope: ScopeEvaluation, requests: pl.DataFrame | None) -> tuple[Figure, ...]:
    """Draw how long requests took, and what the models say they took, as distributions.

    Args:
        scope: The scope's evaluation.
        requests: The `requests` tables of its runs, for latencies that no model predicts; null without tables.
    """
    figures: list[Figure | None] = []
    for key, label in LATENCIES.items():
        entry = scope.latency.get(key)
        if entry is not None and entry.distribution is not None:
            figures.append(_compared(entry.distribution, label, scope.scope_id))
        elif requests is not None:
            figures.append(_measured(requests[f"{key}_us"].drop_nulls(), label, scope.scope_id))
    return tuple(f for f in figures if f is not None)


def _compared(found: DistributionEntry, label: str, scope_id: str) -> Figure:
    ways = [("measured", found.measured), ("teacher-forced", found.teacher_forced)]
    ways.append(("averages only", found.averages_only))
    told = [(name, quantiles) for name, quantiles in ways if quantiles]
    written = [
        (f"P{p}", *(number(quantiles[k] / US_PER_MS) for _, quantiles in told))
        for k, p in enumerate(found.percents)
        if p in _WRITTEN_PERCENTS
    ]
    return Figure(
        name=_name(scope_id, label),
        title=f"{label}, predicted and measured",
        caption=f"Share of {found.requests:,} held-out requests whose {label} is at most so long. Look for where a predicted "
        "curve leaves the measured one: teacher-forced, step times are wrong there; from averages, waits and batches that "
        "an average does not know.",
        x_label=f"{label}, ms",
        panels=(Panel("requests, %", tuple(_line(n, q, found.percents) for n, q in told)),),
        log_x=True,
        summary=Table(("of requests", *(f"{name}, ms" for name, _ in told)), tuple(written)),
    )


def _measured(values: pl.Series, label: str, scope_id: str) -> Figure | None:
    positive = values.filter(values > 0)
    if positive.len() < 2:
        return None
    at = {p: float(positive.quantile(p / 100, "linear") or 0.0) for p in _PERCENTS}
    written = tuple((f"P{p}", number(at[p] / US_PER_MS)) for p in _WRITTEN_PERCENTS)
    return Figure(
        name=_name(scope_id, label),
        title=f"{label} as measured",
        caption=f"Share of requests whose {label} is at most so long; no model predicts it here. Look for a long flat end: "
        "those requests waited, and a mean says nothing of them.",
        x_label=f"{label}, ms",
        panels=(Panel("requests, %", (_line("measured", tuple(at.values()), _PERCENTS),)),),
        log_x=True,
        summary=Table(("of requests", f"{label} at most, ms"), written),
    )


def _line(name: str, quantiles_us: tuple[float, ...], percents: tuple[int, ...]) -> Series:
    # An axis of powers of ten has no place for a zero.
    drawn = [(q / US_PER_MS, float(p)) for q, p in zip(quantiles_us, percents, strict=True) if q > 0]
    return Series(name, "line", tuple(x for x, _ in drawn), tuple(y for _, y in drawn))


def _name(scope_id: str, label: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{scope_id}-{label}-cdf").strip("-").lower()
