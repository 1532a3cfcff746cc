"""Cells and tables of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.model import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.fit.results import Metrics

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


def plural(value: int, noun: str, ending: str = "s") -> str:
    """Write a count of something."""
    return f"{count(value)} {noun}{'' if value == 1 else ending}"


def reasons(counts: Mapping[str, int]) -> str:
    """Write counts by reason in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in counts.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, folded: str | None = None) -> Table:
    """Make a table of written cells."""
    return Table(tuple(head), tuple(tuple(r) for r in rows), folded)


def metrics(m: Metrics) -> tuple[str, ...]:
    """Write errors under the heads of `ERRORS`."""
    percentages = (m.mape_pct, m.mdape_pct, m.p90_ape_pct, m.p99_ape_pct, m.bias_pct)
    return (count(m.n), *(number(v) for v in percentages), number(m.mae))
