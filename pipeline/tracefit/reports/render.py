"""A report as Markdown and in the terminal. Nothing is computed here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.reports.model import Figure, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from tracefit.reports.model import Report


def markdown_text(report: Report) -> str:
    """Return the whole report as Markdown; figures in a few rows of numbers each."""
    parts = [f"# {report.title}"]
    for part in report.parts:
        if isinstance(part, Figure):
            parts += [f"**{part.title}.** {part.caption}", _markdown_table(part.summary)]
        else:
            parts.append(_markdown_table(part) if isinstance(part, Table) else part)
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [_row(table.head), _row(["---"] * len(table.head)), *(_row(r) for r in table.rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    # A pipe in a run's or a model's name must not end the cell.
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


_MARKS = re.compile(r"`([^`]*)`|\*\*([^*]+)\*\*|\*([^*]+)\*")


def plain(text: str) -> str:
    """Take the marks of inline Markdown away."""
    return _MARKS.sub(lambda m: next(g for g in m.groups() if g is not None), text)


def print_report(report: Report, console: Console) -> None:
    """Print the whole report on a terminal."""
    from rich.text import Text  # noqa: PLC0415 - rich is slow to import, and quiet runs need none of it

    console.rule(report.title)
    for part in report.parts:
        if isinstance(part, Figure):
            console.print(Text(part.title, style="bold"))
            console.print(Text(part.caption, style="dim"))
            _print_table(part.summary, console)
        elif isinstance(part, Table):
            _print_table(part, console)
        elif part.startswith("#"):
            level = len(part) - len(part.lstrip("#"))
            text = plain(part.lstrip("# "))
            if level <= 2:
                console.rule(text)
            else:
                console.print(Text(f"\n{text}", style="bold underline"))
        else:
            console.print(Text(plain(part)))
    console.print()


def _print_table(table: Table, console: Console) -> None:
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = RichTable(show_edge=False, pad_edge=False)
    for number, name in enumerate(table.head):
        numbers = number > 0 and all(_is_number(row[number]) for row in table.rows)
        drawn.add_column(Text(plain(name)), justify="right" if numbers else "left")
    for row in table.rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    console.print(drawn)


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+0-9.,e%s ]*", cell.replace("steps", "")))
