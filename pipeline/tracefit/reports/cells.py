"""Cells and tables of the Markdown report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.coefficients.evaluation import MetricsEntry

ERRORS = ("n", "MAPE %", "median APE %", "P90 %", "P99 %", "bias %", "MAE us")


def share(value: float | None) -> str:
    """Write a ratio in percent; nothing where it is not known."""
    return "" if value is None else f"{100 * value:.1f} %"


def count(value: int) -> str:
    """Write a count."""
    return f"{value:,}"


def number(value: float | None) -> str:
    """Write a number to four digits, `-` where it is not known."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    lines = [_row(head), _row(["---"] * len(head)), *(_row(r) for r in rows)]
    return "\n".join(lines)


def metrics(m: MetricsEntry) -> tuple[str, ...]:
    """Write errors under the heads of `ERRORS`."""
    percentages = (m.mape_pct, m.mdape_pct, m.p90_ape_pct, m.p99_ape_pct, m.bias_pct)
    return (count(m.n), *(number(v) for v in percentages), number(m.mae))


def _row(cells: Iterable[str]) -> str:
    # A pipe in a run's or a model's name must not end the cell.
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
