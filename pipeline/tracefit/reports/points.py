"""Points of a benchmark in the report: what was measured at each load, and what the models predict of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracefit.reports.document import Bullets, section, table
from tracefit.reports.facts import not_compared, point_load
from tracefit.tables.points import POINT_LATENCIES, STATISTICS
from tracefit.text import count, number, plural, sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.reports.document import Section
    from tracefit.results.models import ComparedPoint

_MOST_TABLE_ROWS, _OPEN_ROWS, _MOST_POINT_REASONS = 200, 40, 8
_HEAD = ("point", "load", "prompt", "output", "latency, ms", *STATISTICS)
_NO_STEPS_TEXT = (
    "A point has a load and latencies over all its requests, and no request and no step: no model of "
    "steps is fitted on it."
)
_ALONE = (
    "Latencies are as measured. `tracefit compare OUT POINTS` puts the predictions of a fitted deployment beside them."
)
_PREDICTED = (
    "Each cell is measured / predicted: the load is replayed with the models of the point's deployment, "
    "which saw none of the points."
)


def points_section(rows: Sequence[Mapping[str, Any]], compared: Sequence[ComparedPoint]) -> Section | None:
    """Return the section on points; null without any.

    Args:
        rows: Rows of `points`.
        compared: The first of them with their predictions.
    """
    if not rows:
        return None
    predicted = {(point.number, each.name): each.predicted_us for point in compared for each in point.latencies}
    shown = [cells for n, row in enumerate(rows[:_MOST_TABLE_ROWS], 1) for cells in _rows(n, row, predicted)]
    open_rows, more = len(shown) <= _OPEN_ROWS, len(rows) - _MOST_TABLE_ROWS
    return section(
        "Points of a benchmark",
        _NO_STEPS_TEXT,
        _PREDICTED if predicted else _ALONE,
        table(_HEAD, shown, folded=None if open_rows else "Latencies by point"),
        f"{plural(more, 'point')} after the first {count(_MOST_TABLE_ROWS)} are in the table `points` only."
        if more > 0
        else "",
        f"Only the first {count(len(compared))} are predicted here; `tracefit compare` predicts more."
        if 0 < len(compared) < len(rows)
        else "",
        _reasons(compared),
        _written_by(rows),
        _unread(rows),
    )


def _rows(n: int, row: Mapping[str, Any], predicted: Mapping[tuple[int, str], float]) -> Iterator[tuple[str, ...]]:
    facts: tuple[str, ...] = (
        count(n),
        point_load(row["rate_per_s"], row["concurrency"]) or "unknown",
        number(row["prompt_tokens"]),
        number(row["output_tokens"]),
    )
    for latency in POINT_LATENCIES:
        cells = [
            _cell(row[f"{latency}_{statistic}_us"], predicted.get((n, f"{latency}_{statistic}")))
            for statistic in STATISTICS
        ]
        if any(cells):
            yield (*facts, latency.upper(), *cells)
            facts = ("",) * len(facts)


def _cell(measured_us: float | None, predicted_us: float | None) -> str:
    if measured_us is None:
        return ""
    measured = number(measured_us / 1e3)
    return measured if predicted_us is None else f"{measured} / {number(predicted_us / 1e3)}"


def _reasons(compared: Sequence[ComparedPoint]) -> Bullets | None:
    numbers: dict[str, list[str]] = {}
    for point in compared:
        if point.reason:
            numbers.setdefault(point.reason, []).append(count(point.number))
    lines = [sentence(not_compared(which, reason)) for reason, which in numbers.items()]
    more = len(lines) - _MOST_POINT_REASONS
    return (
        Bullets((*lines[:_MOST_POINT_REASONS], *([f"{plural(more, 'more reason')}."] if more > 0 else [])))
        if lines
        else None
    )


def _written_by(rows: Sequence[Mapping[str, Any]]) -> str:
    ways = sorted({row["requests_written_by"] for row in rows if row["requests_written_by"]})
    return f"Single requests, which a model needs, are written by: {'; '.join(ways)}." if ways else ""


def _unread(rows: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for row in rows for name in json.loads(row["unread"] or "[]")})
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_POINT_REASONS])
    more = f" and {len(names) - _MOST_POINT_REASONS} more" if len(names) > _MOST_POINT_REASONS else ""
    return f"Columns that are not read: {shown}{more}." if names else ""
