"""The summary of requests as text and as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import spreadsheet_safe
from tracefit.reports.text import columns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.results.requests import Quantiles, RequestGroup, RequestSummary

_METRICS = ("ttft", "itl", "e2e", "queue")
_POINTS = ("p50", "p90", "p99")
_FACTS = (
    "by",
    "name",
    "requests",
    "failed",
    "in_flight",
    "preemptions",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "requests_per_s",
    "output_tokens_per_s",
)


def requests_text(summary: RequestSummary) -> str:
    """Say how requests fared: all of them, by run, by phase, over time. Times in milliseconds."""
    total = summary.total
    states = ", ".join(f"{count:,} {state}" for state, count in summary.states.items())
    counts = f"{total.failed:,} failed, {total.in_flight:,} in flight, {total.preemptions:,} preemptions"
    rates = (
        f"{_number(total.output_tokens_per_s)} output tokens/s, {_number(total.requests_per_s)} requests/s"
    )
    tokens = f"{total.prompt_tokens:,} prompt and {total.output_tokens:,} output tokens"
    head = [f"{total.requests:,} requests: {counts} ({states})", f"{rates}, {tokens}"]
    parts = [
        "\n".join(head),
        columns(
            ("", "n", "mean ms", *(f"{p} ms" for p in _POINTS)),
            [
                _quantile_row(metric.upper() if metric != "queue" else metric, getattr(total, metric))
                for metric in _METRICS
            ],
            left={0},
        ),
        "by phase\n"
        + columns(
            ("phase", "share %", "n", "mean ms", *(f"{p} ms" for p in _POINTS)),
            [_with_share(_quantile_row(p.phase, p.seconds), p.share) for p in summary.phases],
            left={0},
        ),
        "by run\n" + _groups(summary.runs),
    ]
    if summary.windows:
        parts.append("over time\n" + _groups(summary.windows))
    return "\n\n".join(parts)


def requests_csv(summary: RequestSummary) -> str:
    """Return one line per group: all, each run, each window of time. Times in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    points = ("n", "mean", *_POINTS)
    writer.writerow([*_FACTS, *(f"{m}_{p}" for m in _METRICS for p in points)])
    for group in summary.groups:
        facts = [spreadsheet_safe(getattr(group, name)) for name in _FACTS]
        writer.writerow([*facts, *(getattr(getattr(group, m), p) for m in _METRICS for p in points)])
    return text.getvalue()


def requests_table_csv(rows: pl.DataFrame) -> str:
    """Return one line per request. Ids come from clients: none is a formula to a spreadsheet."""
    texts = [name for name, dtype in rows.schema.items() if dtype == pl.String]
    return rows.with_columns(
        pl.col(name).str.replace(r"^([=+\-@\t\r])", "'${1}").alias(name) for name in texts
    ).write_csv()


def _groups(groups: Iterable[RequestGroup]) -> str:
    head = (
        "name",
        "requests",
        "failed",
        "tokens/s",
        *(f"{m} {p} ms" for m in _METRICS for p in ("p50", "p99")),
    )
    rows = [
        (
            g.name,
            f"{g.requests:,}",
            f"{g.failed:,}",
            _number(g.output_tokens_per_s),
            *(_ms(value) for m in _METRICS for value in (getattr(g, m).p50, getattr(g, m).p99)),
        )
        for g in groups
    ]
    return columns(head, rows, left={0})


def _quantile_row(name: str, q: Quantiles) -> tuple[str, ...]:
    return (name, f"{q.n:,}", *(_ms(value) for value in (q.mean, q.p50, q.p90, q.p99)))


def _with_share(row: tuple[str, ...], share: float | None) -> tuple[str, ...]:
    return (row[0], "-" if share is None else f"{100 * share:.1f}", *row[1:])


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else 1000 * seconds)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
