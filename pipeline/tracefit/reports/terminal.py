"""A report in the terminal. Nothing is computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table as RichTable
from rich.text import Text

from tracefit.errors import printable
from tracefit.reports.markdown import plain
from tracefit.reports.model import Figure, Table

if TYPE_CHECKING:
    from rich.console import Console

    from tracefit.reports.model import Report


def print_report(report: Report, console: Console) -> None:
    """Print the whole report on a terminal."""
    console.rule(_text(report.title))
    for part in report.parts:
        if isinstance(part, Figure):
            console.print(_text(f"\n{part.title}", style="bold"))
            console.print(_text(plain(part.caption), style="dim"))
            _print_table(part.summary, console)
        elif isinstance(part, Table):
            if part.folded:
                console.print(_text(f"\n{plain(part.folded)}:"))
            _print_table(part, console)
        elif part.startswith("#"):
            level = len(part) - len(part.lstrip("#"))
            text = plain(part.lstrip("# "))
            if level <= 2:
                console.print()
                console.rule(_text(text))
            else:
                console.print(_text(f"\n{text}", style="bold underline"))
        else:
            console.print(_text(plain(part)))
    console.print()


_STYLES = {"**yes**": "bold green", "**with limits**": "bold yellow", "**no**": "bold red"}


def _print_table(table: Table, console: Console) -> None:
    drawn = RichTable(show_edge=False, pad_edge=False)
    for name, number in zip(table.head, table.numeric(), strict=True):
        drawn.add_column(_text(plain(name)), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(_text(plain(cell), style=_STYLES.get(cell, "")) for cell in row))
    console.print(drawn)


def _text(content: str, *, style: str = "") -> Text:
    """Return text of which a terminal obeys nothing: names in traces come from elsewhere."""
    return Text("\n".join(map(printable, content.split("\n"))), style=style)
