"""Print what a report says in a terminal: a table where it fits, otherwise one block per row. Nothing is computed here.

This is the report of `tracefit report`; results of the other commands are in `terminal_results`, which needs no rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from rich.console import Console
from rich.text import Text

from tracefit.errors import printable
from tracefit.reports.document import Bullets, Figure, Section, Table, Verdicts, plain, verdict_table
from tracefit.reports.text import columns

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tracefit.reports.document import Report, ReportPart

_STYLES = {"**yes**": "bold green", "**with limits**": "bold yellow", "**no**": "bold red"}


class PipeConsole(Console):
    """A console that leaves a pipe closed by its reader to the caller; rich ends the program with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise BrokenPipeError


def print_report(report: Report, files: Iterable[Path], console: Console) -> None:
    """Print what a report says, and where the files are that hold its figures and long tables.

    With these it would be more than a thousand lines, in which nobody finds the answer.
    """
    console.rule(_plain(report.title))
    for text, style in ((report.subject, ""), (report.lead, "bold")):
        if text:
            console.print(Text(_plain(text), style=style))
    for part in report.parts:
        _print_part(part, console, level=0)
    console.print()
    console.print(Text("Figures and further tables:", style="bold"))
    for file in files:
        console.print(Text(f"  {_plain(str(file))}"), soft_wrap=True)


def _print_part(part: ReportPart, console: Console, *, level: int) -> None:
    match part:
        case str():
            console.print(Text(_plain(part)))
        case Bullets(items):
            for item in items:
                console.print(Text(f"- {_plain(item)}"))
        case Table():
            if not part.folded:
                _print_table(part, console)
        case Verdicts():
            _print_table(verdict_table(part), console)
        case Figure():
            console.print(Text(f"figure: {_plain(part.title)}", style="dim"))
        case Section():
            _print_section(part, console, level=level)
        case _:
            assert_never(part)


def _print_section(section: Section, console: Console, *, level: int) -> None:
    console.print()
    if level:
        console.print(Text(_plain(section.title), style="bold underline"))
    else:
        console.rule(_plain(section.title))
    for part in section.parts:
        _print_part(part, console, level=level + 1)


def _print_table(table: Table, console: Console) -> None:
    left = {k for k, number in enumerate(table.numeric()) if not number}
    cells = [[_plain(cell) for cell in row] for row in table.rows]
    head = [_plain(name) for name in table.head]
    text = columns(head, cells, left=left)
    if max(len(line) for line in text.splitlines()) > console.width:
        _print_blocks(head, table, console)
        return
    first, _, rest = text.partition("\n")
    # Lines are as wide as their content: rich must neither wrap nor cut them.
    console.print(Text(first, style="bold"), no_wrap=True, overflow="ignore", crop=False)
    drawn = Text(rest)
    for mark, style in _STYLES.items():
        # Whole cells alone, between two blanks each: a `no` within a name is not coloured.
        drawn.highlight_regex(rf"(?<=  ){_plain(mark)}(?=  |$|\n)", style)
    console.print(drawn, no_wrap=True, overflow="ignore", crop=False)


def _print_blocks(head: list[str], table: Table, console: Console) -> None:
    """Print one block per row: its first cell, then a line per further cell."""
    for row in table.rows:
        console.print(Text(_plain(row[0]) or "-", style="bold"))
        for name, cell in zip(head[1:], row[1:], strict=True):
            if cell:
                console.print(Text(f"  {name}: ").append(_plain(cell), style=_STYLES.get(cell, "")))


def _plain(text: str) -> str:
    """Return text without marks and of which a terminal obeys nothing: names in traces come from elsewhere."""
    return "\n".join(map(printable, plain(text).split("\n")))
